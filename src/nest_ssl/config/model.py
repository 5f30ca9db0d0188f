"""The `model:` section: NeMo's keys and NeMo's defaults, typed, documented and checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nest_ssl.config.checks import at_least, finite, not_supported, one_of, probability
from nest_ssl.config.data import DatasetConfig
from nest_ssl.config.optim import OptimConfig

MASK_POSITIONS = ("pre_conv", "post_conv")

MAX_LAYERS = 1000  # the largest NEST has 42; a broken or hostile file could ask for any number


@dataclass
class PreprocessorConfig:
    """Waveform to log-mel features."""

    sample_rate: int = 16000
    """Samples per second of the audio given to the model."""
    window_size: float | None = 0.02
    """Length of the analysis window, in seconds."""
    window_stride: float | None = 0.01
    """Step between frames, in seconds."""
    n_window_size: int | None = None
    """Length of the analysis window in samples, in place of `window_size`."""
    n_window_stride: int | None = None
    """Step between frames in samples, in place of `window_stride`."""
    window: str | None = "hann"
    """hann, hamming, blackman, bartlett, or none (rectangular)."""
    normalize: str | dict[str, Any] | None = "per_feature"
    """Mean 0, std 1 of each band of an utterance (per_feature) or of all (all_features); null, none and NA: neither."""
    n_fft: int | None = None
    """Size of the Fourier transform; null: the next power of two of the window."""
    preemph: float | None = 0.97
    """Pre-emphasis coefficient; null: none."""
    features: int = 64
    """Number of mel bands."""
    lowfreq: float = 0.0
    """Lowest frequency of the filterbank, in Hz."""
    highfreq: float | None = None
    """Highest frequency of the filterbank, in Hz; null: half the sample rate."""
    log: bool = True
    """Take the logarithm of the mel energies."""
    log_zero_guard_type: str = "add"
    """How the logarithm of zero is avoided: add, or clamp."""
    log_zero_guard_value: float | str = 2**-24
    """The value added or clamped to; 'tiny' and 'eps' are float32's."""
    dither: float = 1e-5
    """Standard deviation of the white noise added to the waveform in training."""
    pad_to: int = 16
    """Frames are padded to a multiple of this; 0: not padded."""
    frame_splicing: int = 1
    """Only 1 is supported."""
    exact_pad: bool = False
    """Only false is supported."""
    pad_value: float = 0.0
    """Value of the frames past an utterance's end."""
    mag_power: float = 2.0
    """Power to which the magnitude spectrum is raised."""
    mel_norm: str | None = "slaney"
    """slaney (filters of equal area), or null (filters of equal height)."""
    nb_augmentation_prob: float = 0.0
    """Only 0 is supported (narrow-band augmentation)."""

    def __post_init__(self) -> None:
        where = "preprocessor"
        at_least(f"{where}.features", self.features, 1)
        at_least(f"{where}.pad_to", self.pad_to, 0)
        for name in (
            "window_size",
            "window_stride",
            "preemph",
            "lowfreq",
            "highfreq",
            "dither",
            "pad_value",
            "mag_power",
        ):
            finite(f"{where}.{name}", getattr(self, name) or 0.0)
        high_hz = self.highfreq or self.sample_rate / 2
        if not 0 <= self.lowfreq < high_hz:
            raise ValueError(f"{where}.lowfreq: {self.lowfreq:g} Hz is not between 0 and the highest, {high_hz:g} Hz.")
        one_of(f"{where}.window", self.window, ("hann", "hamming", "blackman", "bartlett", "none", None))
        one_of(f"{where}.log_zero_guard_type", self.log_zero_guard_type, ("add", "clamp"))
        if isinstance(self.log_zero_guard_value, str):
            one_of(f"{where}.log_zero_guard_value", self.log_zero_guard_value, ("tiny", "eps"))
        else:
            finite(f"{where}.log_zero_guard_value", self.log_zero_guard_value)
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
        at_least(f"{where} window, in samples", self.num_window_samples, 1)
        at_least(f"{where} window stride, in samples", self.num_stride_samples, 1)
        at_least(f"{where}.n_fft", self.num_fft, self.num_window_samples)

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
    """Random blocks of frames replaced by one embedding."""

    feat_in: int
    """Size of a frame."""
    mask_prob: float = 0.5
    """With overlap: probability that a frame starts a masked block. Without: the share of frames to mask."""
    block_size: int = 48
    """Frames per block. For mask_position post_conv this is still counted before the subsampling."""
    mask_value: float | None = None
    """Fill masked frames with this value; null: a random embedding."""
    freeze: bool = True
    """Keep the embedding fixed; false: it is learned."""
    allow_overlap: bool = False
    """Blocks may overlap."""
    max_mask_ratio: float = 0.8
    """An utterance not longer than block_size / max_mask_ratio masks its first 8 frames instead."""

    def __post_init__(self) -> None:
        at_least("masking.feat_in", self.feat_in, 1)
        at_least("masking.block_size", self.block_size, 1)
        probability("masking.mask_prob", self.mask_prob)
        probability("masking.max_mask_ratio", self.max_mask_ratio)


@dataclass
class QuantizerConfig:
    """Random projection of stacked frames to the nearest of fixed random codes."""

    feat_in: int
    """Size of a frame."""
    code_dim: int
    """Dimension of the codes."""
    num_classes: int
    """Codes per book."""
    num_books: int
    """Number of independent codebooks."""
    dist_fn: str = "cosine"
    """l2 or cosine: the same codes, since both sides are unit vectors."""
    time_ahead: bool = False
    """Input is (B, T, D) rather than (B, D, T)."""
    freeze: bool = True
    """Keep projection and codebooks fixed. No gradient reaches them either way."""
    squeeze_single: bool = False
    """With one book, drop the book dimension of the output."""
    combine_time_steps: int = 1
    """Frames stacked for one code: the encoder's subsampling factor."""

    def __post_init__(self) -> None:
        for name in ("feat_in", "code_dim", "num_classes", "num_books", "combine_time_steps"):
            at_least(f"quantizer.{name}", getattr(self, name), 1)
        one_of("quantizer.dist_fn", self.dist_fn, ("l2", "cosine"))


@dataclass
class EncoderConfig:
    """FastConformer: convolutional subsampling, then conformer layers."""

    feat_in: int
    """Mel bands of the input."""
    n_layers: int
    """Number of conformer layers."""
    d_model: int
    """Width of the encoder."""
    feat_out: int = -1
    """Size of the output; -1: d_model, without a projection."""
    causal_downsampling: bool = False
    """Subsample without looking ahead (streaming)."""
    subsampling: str = "striding"
    """striding (full 2-d convolutions) or dw_striding (depthwise separable after the first)."""
    subsampling_factor: int = 4
    """2, 4, 8, or any other power of two."""
    subsampling_conv_chunking_factor: int = 1
    """NeMo splits its convolution by this to save memory. Nothing is split here: the result does not depend on it."""
    subsampling_conv_channels: int = -1
    """Channels of the subsampling; -1: d_model."""
    reduction: str | None = None
    """Only null is supported."""
    reduction_position: int | None = None
    """Belongs to `reduction`."""
    reduction_factor: int = 1
    """Only 1 is supported."""
    ff_expansion_factor: int = 4
    """Width of the feed-forward modules, in d_model."""
    self_attention_model: str = "rel_pos"
    """rel_pos (Transformer-XL positions) or abs_pos."""
    n_heads: int = 4
    """Attention heads."""
    att_context_size: list[int] | list[list[int]] | None = None
    """[left, right] frames that attention sees, -1 for all; a list of such pairs: one is drawn per training step."""
    att_context_probs: list[float] | None = None
    """Probabilities of the contexts; null: equal."""
    att_context_style: str = "regular"
    """regular, or chunked_limited (whole chunks of right + 1 frames, and left // chunk chunks before)."""
    xscaling: bool = True
    """Multiply the subsampled features by sqrt(d_model)."""
    untie_biases: bool = True
    """Position biases per layer rather than shared."""
    pos_emb_max_len: int = 5000
    """NeMo's initial table of positions; here positions are computed for the length at hand, so any length works."""
    conv_kernel_size: int = 31
    """Kernel of the depthwise convolution; odd."""
    conv_norm_type: str = "batch_norm"
    """batch_norm, layer_norm, instance_norm, or group_normN with N groups."""
    conv_context_size: list[int] | str | None = None
    """[left, right] frames of the convolution, 'causal', or null for a centred one."""
    use_bias: bool = True
    """Biases in feed-forward, attention and convolution."""
    dropout: float = 0.1
    """Dropout in the layers."""
    dropout_pre_encoder: float = 0.1
    """Dropout on the layers' input."""
    dropout_emb: float = 0.1
    """Dropout on the position embeddings."""
    dropout_att: float = 0.0
    """Dropout on the attention weights."""
    stochastic_depth_drop_prob: float = 0.0
    """Probability that a layer is skipped in a training step."""
    stochastic_depth_mode: str = "linear"
    """linear (growing with depth) or uniform."""
    stochastic_depth_start_layer: int = 1
    """Layers before this one are never skipped."""
    global_tokens: int = 0
    """Only 0 is supported (local attention with global tokens)."""
    global_tokens_spacing: int = 1
    """Belongs to `global_tokens`."""
    global_attn_separate: bool = False
    """Belongs to `global_tokens`."""
    use_pytorch_sdpa: bool = False
    """NeMo's switch of attention code; the numbers are the same, and nest-ssl chooses by itself."""
    use_pytorch_sdpa_backends: list[str] | None = None
    """Belongs to `use_pytorch_sdpa`."""
    sync_max_audio_length: bool = False
    """NeMo's collective in every forward pass. There is none here: true changes nothing, and says so once."""

    def __post_init__(self) -> None:
        where = "encoder"
        for name in ("feat_in", "n_layers", "d_model", "n_heads", "ff_expansion_factor", "conv_kernel_size"):
            at_least(f"{where}.{name}", getattr(self, name), 1)
        if self.d_model % self.n_heads:
            raise ValueError(f"{where}.n_heads: {self.n_heads} does not divide d_model {self.d_model}.")
        if self.d_model % 2:
            raise ValueError(f"{where}.d_model: {self.d_model} is odd; positions need sine and cosine pairs.")
        if self.subsampling in ("vggnet", "stacking", "stacking_norm", "striding_conv1d", "dw_striding_conv1d"):
            not_supported(f"{where}.subsampling", self.subsampling, "use dw_striding or striding")
        one_of(f"{where}.subsampling", self.subsampling, ("dw_striding", "striding"))
        if self.subsampling_factor < 2 or self.subsampling_factor & (self.subsampling_factor - 1):
            raise ValueError(f"{where}.subsampling_factor: {self.subsampling_factor} is not a power of two from 2 on.")
        chunking = self.subsampling_conv_chunking_factor
        if chunking not in (-1, 1) and chunking % 2:
            raise ValueError(f"{where}.subsampling_conv_chunking_factor: {chunking} is not -1, 1 or a power of two.")
        if self.subsampling_conv_channels != -1:
            at_least(f"{where}.subsampling_conv_channels", self.subsampling_conv_channels, 1)
        if self.n_layers > MAX_LAYERS:
            raise ValueError(f"{where}.n_layers: {self.n_layers} is more than {MAX_LAYERS}.")
        if self.reduction is not None or self.reduction_factor != 1:
            not_supported(f"{where}.reduction", self.reduction, "use null")
        if self.self_attention_model == "rel_pos_local_attn" or self.global_tokens:
            not_supported(f"{where}.self_attention_model", "rel_pos_local_attn", "use rel_pos with att_context_size")
        one_of(f"{where}.self_attention_model", self.self_attention_model, ("rel_pos", "abs_pos"))
        one_of(f"{where}.att_context_style", self.att_context_style, ("regular", "chunked_limited"))
        one_of(f"{where}.stochastic_depth_mode", self.stochastic_depth_mode, ("linear", "uniform"))
        if self.conv_kernel_size % 2 == 0:
            raise ValueError(f"{where}.conv_kernel_size: {self.conv_kernel_size} is even; it must be odd.")
        for name in ("dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att", "stochastic_depth_drop_prob"):
            probability(f"{where}.{name}", getattr(self, name), below_one=True)
        start = self.stochastic_depth_start_layer
        if not 1 <= start <= self.n_layers:
            raise ValueError(f"{where}.stochastic_depth_start_layer: {start} is not in 1..{self.n_layers}.")
        _ = self.attention_contexts, self.attention_context_probs, self.conv_context, self.num_norm_groups

    @property
    def attention_contexts(self) -> list[tuple[int, int]]:
        """Every [left, right] that attention may use; the first is the one of evaluation."""
        given: list[Any] = list(self.att_context_size or [[-1, -1]])
        pairs = [given] if isinstance(given[0], int) else given
        for pair in pairs:
            if len(pair) != 2 or min(pair) < -1:
                raise ValueError(f"encoder.att_context_size: {pair} is not [left, right] with -1 for all.")
            left, right = pair
            if self.att_context_style == "chunked_limited":
                if right < 0 and len(pairs) == 1:
                    raise ValueError("encoder.att_context_size: chunked_limited needs a right context of 0 or more.")
                if left > 0 and right >= 0 and left % (right + 1):
                    raise ValueError(
                        f"encoder.att_context_size: the left context {left} is not a multiple of the chunk {right + 1}."
                    )
        return [(left, right) for left, right in pairs]

    @property
    def attention_context_probs(self) -> list[float]:
        """One probability for each of `attention_contexts`."""
        num = len(self.attention_contexts)
        if not self.att_context_probs:
            return [1.0 / num] * num
        total = sum(self.att_context_probs)
        if len(self.att_context_probs) != num or not abs(total - 1) <= 1e-6 or min(self.att_context_probs) < 0:
            raise ValueError(
                f"encoder.att_context_probs: {self.att_context_probs} are not {num} probabilities that sum to 1."
            )
        return self.att_context_probs

    @property
    def conv_context(self) -> tuple[int, int]:
        """Left and right frames of the depthwise convolution."""
        kernel, given = self.conv_kernel_size, self.conv_context_size
        if given is None:
            return (kernel - 1) // 2, (kernel - 1) // 2
        if given == "causal":
            return kernel - 1, 0
        if isinstance(given, str) or len(given) != 2 or sum(given) + 1 != kernel or min(given) < 0:
            raise ValueError(
                f"encoder.conv_context_size: {given!r} is not null, 'causal' or [left, right] "
                f"with left + right + 1 = {kernel}."
            )
        return given[0], given[1]

    @property
    def num_norm_groups(self) -> int | None:
        """N of group_normN; None for the other norms."""
        norm = self.conv_norm_type
        if norm == "fused_batch_norm":
            not_supported("encoder.conv_norm_type", norm, "use batch_norm")
        if norm in ("batch_norm", "layer_norm", "instance_norm"):
            return None
        digits = norm.removeprefix("group_norm")
        if (
            digits == norm
            or not (digits.isascii() and digits.isdecimal())
            or int(digits) < 1
            or self.d_model % int(digits)
        ):
            raise ValueError(
                f"encoder.conv_norm_type: {norm!r} is not batch_norm, layer_norm, instance_norm or group_normN "
                f"with N a divisor of d_model {self.d_model}."
            )
        return int(digits)


@dataclass
class DecoderConfig:
    """A linear layer per codebook, and the logarithm of its softmax."""

    feat_in: int
    """Size of the encoder's output."""
    num_classes: int
    """Codes per book."""
    num_decoders: int = 1
    """Number of codebooks."""
    init_mode: str | None = "xavier_uniform"
    """Initial weights: xavier_uniform, xavier_normal, kaiming_uniform, kaiming_normal, or null for torch's own."""
    use_bias: bool = False
    """Add a bias."""
    squeeze_single: bool = False
    """With one book, drop the book dimension of the output."""

    def __post_init__(self) -> None:
        for name in ("feat_in", "num_classes", "num_decoders"):
            at_least(f"decoder.{name}", getattr(self, name), 1)
        modes = ("xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", None)
        one_of("decoder.init_mode", self.init_mode, modes)


@dataclass
class LossConfig:
    """Negative log-likelihood of the codes of masked frames."""

    combine_time_steps: int = 1
    """Frames per code: the subsampling factor; with post_conv masking it is 1, whatever stands here."""
    mask_threshold: float = 0.8
    """A code counts when more than this share of its frames is masked."""
    num_decoders: int = 1
    """Number of codebooks; their losses are averaged."""
    squeeze_single: bool = False
    """With one book, inputs come without the book dimension."""

    def __post_init__(self) -> None:
        at_least("loss.combine_time_steps", self.combine_time_steps, 1)
        at_least("loss.num_decoders", self.num_decoders, 1)
        probability("loss.mask_threshold", self.mask_threshold)


@dataclass
class ModelConfig:
    """Everything under `model:`."""

    preprocessor: PreprocessorConfig
    masking: MaskingConfig
    quantizer: QuantizerConfig
    encoder: EncoderConfig
    decoder: DecoderConfig
    loss: LossConfig
    sample_rate: int = 16000
    """Samples per second of all audio."""
    num_classes: int = 8192
    """Codes per book; the sections below refer to it."""
    num_books: int = 1
    """Number of codebooks."""
    code_dim: int = 16
    """Dimension of the codes."""
    squeeze_single: bool = False
    """With one book, drop the book dimension of tokens and log-probabilities."""
    mask_position: str = "pre_conv"
    """pre_conv: mask mel frames; post_conv: mask the subsampled frames, whose codes are then the targets."""
    train_ds: DatasetConfig | None = None
    validation_ds: DatasetConfig | None = None
    test_ds: DatasetConfig | None = None
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        one_of("model.mask_position", self.mask_position, MASK_POSITIONS)
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

    @staticmethod
    def _agree(name: str, value: int, other_name: str, other: int) -> None:
        if value != other:
            raise ValueError(f"model.{name} is {value}, but {other_name} is {other}; they must be equal.")
