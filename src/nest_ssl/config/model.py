"""The `model:` section: NeMo's keys and NeMo's defaults, typed, documented and checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from nest_ssl.config.checks import (
    Finite,
    NotNegative,
    Positive,
    Range,
    Share,
    Size,
    check_ranges,
    not_supported,
    one_of,
)
from nest_ssl.config.data import DatasetConfig, Rate
from nest_ssl.config.encoder import EncoderConfig
from nest_ssl.config.optim import OptimConfig

MASK_POSITIONS = ("pre_conv", "post_conv")
COMPILE_MODES = ("auto", "on", "off")
MAX_WEIGHTS = 10**11  # 400 GB in float32
Codes = Annotated[int, Range(1, 100_000_000)]
Books = Annotated[int, Range(1, 10_000)]
Seconds = Annotated[float, Range(0, 60, above=True)]


@dataclass
class PreprocessorConfig:
    """Waveform to log-mel features."""

    sample_rate: Rate = 16000
    """Sample rate of the input audio, in Hz."""
    window_size: Seconds | None = 0.02
    """Length of the analysis window, in seconds."""
    window_stride: Annotated[float, Range(0.001, 1)] | None = 0.01
    """Step between frames, in seconds."""
    n_window_size: Size | None = None
    """Length of the analysis window in samples; replaces `window_size`."""
    n_window_stride: Size | None = None
    """Step between frames in samples; replaces `window_stride`."""
    window: str | None = "hann"
    """hann, hamming, blackman, bartlett, or none (rectangular)."""
    normalize: str | dict[str, Any] | None = "per_feature"
    """Give each band (per_feature) or all bands together (all_features) mean 0 and std 1; null, none, NA: neither."""
    n_fft: Annotated[int, Range(1, 65_536)] | None = None
    """Size of the Fourier transform; null: the window's length, rounded up to a power of two."""
    preemph: Annotated[float, Range(-1, 1)] | None = 0.97
    """Pre-emphasis coefficient; null: no pre-emphasis."""
    features: Annotated[int, Range(1, 10_000)] = 64
    """Number of mel bands."""
    lowfreq: NotNegative = 0.0
    """Lowest frequency of the filterbank, in Hz."""
    highfreq: NotNegative | None = None
    """Highest frequency of the filterbank, in Hz; null: half the sample rate."""
    log: bool = True
    """Take the logarithm of the mel energies."""
    log_zero_guard_type: str = "add"
    """How to avoid the logarithm of zero: add or clamp."""
    log_zero_guard_value: Annotated[float, Range(0, 1, above=True)] | str = 2**-24
    """The value to add or clamp to; 'tiny' and 'eps' are those of float32."""
    dither: Annotated[float, Range(0, 0.1, advice="Samples are between -1 and 1. NeMo: 1e-5.")] = 1e-5
    """Standard deviation of the white noise that is added to the waveform in training."""
    pad_to: Annotated[int, Range(0, 1024)] = 16
    """Pad the frames to a multiple of this; 0: no padding."""
    frame_splicing: Positive = 1
    """Only 1 is supported."""
    exact_pad: bool = False
    """Only false is supported."""
    pad_value: Annotated[float, Range(-1000, 1000)] = 0.0
    """Value of the frames past an utterance's end."""
    mag_power: Annotated[float, Range(0, 10, above=True)] = 2.0
    """Exponent of the magnitude spectrum."""
    mel_norm: str | None = "slaney"
    """slaney (filters of equal area) or null (filters of equal height)."""
    nb_augmentation_prob: Share = 0.0
    """Only 0 is supported (narrow-band augmentation)."""

    def __post_init__(self) -> None:
        where = "preprocessor"
        check_ranges(where, self)
        nyquist_hz = self.sample_rate / 2
        high_hz = self.highfreq or nyquist_hz
        if high_hz > nyquist_hz:
            raise ValueError(
                f"{where}.highfreq: {high_hz:g} Hz is more than half the sample rate, {nyquist_hz:g} Hz. "
                f"Use null for half the sample rate."
            )
        if not 0 <= self.lowfreq < high_hz:
            raise ValueError(
                f"{where}.lowfreq: {self.lowfreq:g} Hz is not between 0 and the highest frequency, {high_hz:g} Hz."
            )
        one_of(f"{where}.window", self.window, ("hann", "hamming", "blackman", "bartlett", "none", None))
        one_of(f"{where}.mel_norm", self.mel_norm, ("slaney", None))
        one_of(f"{where}.log_zero_guard_type", self.log_zero_guard_type, ("add", "clamp"))
        if isinstance(self.log_zero_guard_value, str):
            one_of(f"{where}.log_zero_guard_value", self.log_zero_guard_value, ("tiny", "eps"))
        if isinstance(self.normalize, dict):
            not_supported(f"{where}.normalize", "fixed mean and std", "use per_feature or all_features")
        one_of(f"{where}.normalize", self.normalize, ("per_feature", "all_features", "NA", "none", None))
        if self.frame_splicing != 1:
            not_supported(f"{where}.frame_splicing", self.frame_splicing, "use 1")
        if self.exact_pad:
            not_supported(f"{where}.exact_pad", True, "use false")
        if self.nb_augmentation_prob > 0:
            not_supported(f"{where}.nb_augmentation_prob", self.nb_augmentation_prob, "use 0")
        if self.n_window_size is None and self.window_size is None:
            raise ValueError(f"{where}: give window_size (seconds) or n_window_size (samples).")
        if self.n_window_stride is None and self.window_stride is None:
            raise ValueError(f"{where}: give window_stride (seconds) or n_window_stride (samples).")
        key = "window_size" if self.n_window_size is None else "n_window_size"
        stride_key = "window_stride" if self.n_window_stride is None else "n_window_stride"
        for name, num_samples in ((key, self.num_window_samples), (stride_key, self.num_stride_samples)):
            if num_samples < 1:
                raise ValueError(f"{where}.{name}: {getattr(self, name)} is less than 1 sample.")
        if self.num_window_samples > self.sample_rate:
            raise ValueError(f"{where}.{key}: {getattr(self, key)} is more than a second. NEST: 0.025 s.")
        if self.num_fft < self.num_window_samples:
            raise ValueError(
                f"{where}.n_fft: {self.num_fft} is less than a window (window_size), {self.num_window_samples} samples "
                f"at {where}.sample_rate {self.sample_rate}. Raise it, or set null."
            )

    @property
    def decisive(self) -> dict[str, object]:
        """What the features depend on, by key; two ways to write the same thing are equal."""
        return {
            **asdict(self),
            **dict.fromkeys(("dither", "pad_to", "n_window_size", "n_window_stride")),
            "window": self.window or "none",
            "window_size": self.num_window_samples / self.sample_rate,
            "window_stride": self.num_stride_samples / self.sample_rate,
            "n_fft": self.num_fft,
            "highfreq": self.highfreq or self.sample_rate / 2,
            "preemph": self.preemph or 0.0,
            "normalize": self.normalize if self.normalize in ("per_feature", "all_features") else "none",
        }

    @property
    def num_window_samples(self) -> int:
        return self.n_window_size or int((self.window_size or 0) * self.sample_rate)

    @property
    def num_stride_samples(self) -> int:
        return self.n_window_stride or int((self.window_stride or 0) * self.sample_rate)

    @property
    def num_fft(self) -> int:
        return self.n_fft or 1 << (self.num_window_samples - 1).bit_length()


@dataclass
class MaskingConfig:
    """Replace random blocks of frames with one embedding."""

    feat_in: Size
    """Size of a frame."""
    mask_prob: Share = 0.5
    """With overlap: probability that a frame starts a masked block. Without: the share of frames to mask."""
    block_size: Size = 48
    """Frames per block, counted before subsampling even if mask_position is post_conv."""
    mask_value: Finite | None = None
    """Fill masked frames with this value; null: a random embedding."""
    freeze: bool = True
    """Keep the embedding fixed; false: learn it."""
    allow_overlap: bool = False
    """Blocks may overlap."""
    max_mask_ratio: Annotated[float, Range(0, 1, above=True)] = 0.8
    """Mask only the first 8 frames of utterances of at most block_size / max_mask_ratio frames."""

    def __post_init__(self) -> None:
        check_ranges("masking", self)


@dataclass
class QuantizerConfig:
    """Project stacked frames at random and take the nearest of fixed random codes."""

    feat_in: Size
    """Size of a frame."""
    code_dim: Size
    """Dimension of the codes."""
    num_classes: Codes
    """Codes per book."""
    num_books: Books
    """Number of independent codebooks."""
    dist_fn: str = "cosine"
    """l2 or cosine; both give the same codes, since both sides are unit vectors."""
    time_ahead: bool = False
    """Input is (B, T, D) rather than (B, D, T)."""
    freeze: bool = True
    """Keep projection and codebooks fixed. No gradient reaches them either way."""
    squeeze_single: bool = False
    """With one book, drop the book dimension of the output."""
    combine_time_steps: Annotated[int, Range(1, 10_000)] = 1
    """Frames per code: the encoder's subsampling factor."""

    def __post_init__(self) -> None:
        check_ranges("quantizer", self)
        one_of("quantizer.dist_fn", self.dist_fn, ("l2", "cosine"))


@dataclass
class DecoderConfig:
    """A linear layer and log-softmax per codebook."""

    feat_in: Size
    """Size of the encoder's output."""
    num_classes: Codes
    """Codes per book."""
    num_decoders: Books = 1
    """Number of codebooks."""
    init_mode: str | None = "xavier_uniform"
    """Initial weights: xavier_uniform, xavier_normal, kaiming_uniform, kaiming_normal, or null for torch's default."""
    use_bias: bool = False
    """Add a bias."""
    squeeze_single: bool = False
    """With one book, drop the book dimension of the output."""

    def __post_init__(self) -> None:
        check_ranges("decoder", self)
        modes = ("xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", None)
        one_of("decoder.init_mode", self.init_mode, modes)


@dataclass
class LossConfig:
    """Negative log-likelihood of the codes of masked frames."""

    combine_time_steps: Annotated[int, Range(1, 10_000)] = 1
    """Frames per code: the subsampling factor. post_conv masking always uses 1."""
    mask_threshold: Share = 0.8
    """A code counts when more than this share of its frames is masked."""
    num_decoders: Books = 1
    """Number of codebooks; their losses are averaged."""
    squeeze_single: bool = False
    """With one book, inputs come without the book dimension."""

    def __post_init__(self) -> None:
        check_ranges("loss", self)


def same_rate(key: str, rate: int, of_model: int) -> None:
    if rate != of_model:
        raise ValueError(
            f"{key}: {rate} Hz is not model.sample_rate, {of_model} Hz. Audio is resampled to one rate: set "
            "model.sample_rate alone."
        )


@dataclass
class ModelConfig:
    """Everything under `model:`."""

    preprocessor: PreprocessorConfig
    masking: MaskingConfig
    quantizer: QuantizerConfig
    encoder: EncoderConfig
    decoder: DecoderConfig
    loss: LossConfig
    sample_rate: Rate = 16000
    """Sample rate of all audio, in Hz."""
    num_classes: Codes = 8192
    """Codes per book; the sections below refer to it."""
    num_books: Books = 1
    """Number of codebooks."""
    code_dim: Size = 16
    """Dimension of the codes."""
    squeeze_single: bool = False
    """With one book, drop the book dimension of tokens and log-probabilities."""
    mask_position: str = "pre_conv"
    """pre_conv: mask mel frames; post_conv: mask subsampled frames, and predict their codes."""
    compile: str | bool = "auto"
    """Accelerated training: auto (on a CUDA GPU), on, or off. The maths is the same; see docs/performance.md."""
    activation_budget: Share = 0.9
    """Share of the activations that accelerated training keeps for the backward pass; it recomputes the others.
    1 is fastest; 0.6 instead of 0.9 took 12 % less memory and 10 % more time (large, 64 × 16 s)."""
    train_ds: DatasetConfig | None = None
    validation_ds: DatasetConfig | None = None
    test_ds: DatasetConfig | None = None
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        one_of("model.mask_position", self.mask_position, MASK_POSITIONS)
        if isinstance(self.compile, bool):  # yaml reads on and off as booleans
            self.compile = "on" if self.compile else "off"
        one_of("model.compile", self.compile, COMPILE_MODES)
        check_ranges("model", self)
        same_rate("model.preprocessor.sample_rate", self.preprocessor.sample_rate, self.sample_rate)
        self._check_size()
        if self.quantizer.time_ahead:
            not_supported("model.quantizer.time_ahead", True, "the model's features are (batch, mels, frames)")
        self._agree("encoder.feat_in", self.encoder.feat_in, "preprocessor.features", self.preprocessor.features)
        out = self.encoder.feat_out if self.encoder.feat_out > 0 else self.encoder.d_model
        self._agree("decoder.feat_in", self.decoder.feat_in, "the encoder's output", out)
        self._agree(
            "decoder.num_classes", self.decoder.num_classes, "quantizer.num_classes", self.quantizer.num_classes
        )
        self._agree("decoder.num_decoders", self.decoder.num_decoders, "quantizer.num_books", self.quantizer.num_books)
        self._agree("loss.num_decoders", self.loss.num_decoders, "quantizer.num_books", self.quantizer.num_books)
        squeezed = {self.quantizer.squeeze_single, self.decoder.squeeze_single, self.loss.squeeze_single}
        if len(squeezed) > 1:
            raise ValueError(
                "model: squeeze_single differs between quantizer, decoder and loss; set model.squeeze_single."
            )
        if self.mask_position == "pre_conv":
            self._agree("masking.feat_in", self.masking.feat_in, "preprocessor.features", self.preprocessor.features)
            self._agree(
                "quantizer.feat_in", self.quantizer.feat_in, "preprocessor.features", self.preprocessor.features
            )
            factor = self.encoder.subsampling_factor
            for name, section in (("quantizer", self.quantizer), ("loss", self.loss)):
                self._agree(
                    f"{name}.combine_time_steps", section.combine_time_steps, "encoder.subsampling_factor", factor
                )

    def _check_size(self) -> None:
        """Refuse sizes that no machine holds, before torch asks for the memory."""
        encoder = self.encoder
        num_weights = encoder.n_layers * encoder.d_model**2 * (4 + 4 * encoder.ff_expansion_factor)
        num_weights += self.decoder.feat_in * self.decoder.num_classes * self.decoder.num_decoders
        num_weights += self.quantizer.num_books * self.quantizer.code_dim * self.quantizer.num_classes
        if num_weights > MAX_WEIGHTS:
            raise ValueError(
                f"model: encoder.n_layers={encoder.n_layers}, encoder.d_model={encoder.d_model} and "
                f"num_classes={self.decoder.num_classes} make {num_weights:.1e} weights; at most {MAX_WEIGHTS:.0e} are "
                f"supported. The largest NEST has 4e+09."
            )

    @staticmethod
    def _agree(name: str, value: int, other_name: str, other: int) -> None:
        if value != other:
            raise ValueError(f"model.{name} is {value}, but {other_name} is {other}; they must be equal.")
