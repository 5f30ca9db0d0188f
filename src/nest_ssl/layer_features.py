"""Features from chosen layers of a pre-trained encoder, numbered and laid out as in NeMo.

B batch, N samples, M mel bands, T mel frames, L layers, D width, S encoder frames.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nest_ssl.audio import read_audio
from nest_ssl.audio.signal import Samples
from nest_ssl.checkpoint import load
from nest_ssl.model import EncDecMaskedTokenPredModel
from nest_ssl.modules import ConformerEncoder

AGGREGATIONS = ("none", "cat", "sum", "mean", "weighted")
PRECISIONS = ("auto", "fp32", "bf16")

Layers = str | int | Sequence[int]


class FeatureExtractor:
    """Computes the features of chosen encoder layers, in eval mode.

    `FeatureExtractor("nest.nemo", layers="all")("speech.wav")` is a float32 tensor (L, D, S): layer 0 is the first
    conformer layer, the last one is the encoder's output, and S counts frames of 80 ms (with a subsampling factor of
    8). An aggregation combines the layers into one: (L·D, S) for `cat`, (D, S) for `sum`, `mean` and `weighted`.
    """

    def __init__(
        self,
        checkpoint: str | Path | EncDecMaskedTokenPredModel,
        layers: Layers = "all",
        aggregation: str = "none",
        weights: Sequence[float] | None = None,
        *,
        device: str | torch.device | None = None,
        precision: str = "auto",
    ) -> None:
        """`checkpoint` is a file, a name on the hub, or a model, which is not modified.

        `weights` are for `weighted`, one per layer (equal by default). `device` is a GPU by default if there is one;
        `precision` auto means bf16 on a GPU and fp32 on a CPU.
        """
        self.device = find_device(device)
        model = checkpoint if isinstance(checkpoint, EncDecMaskedTokenPredModel) else load(checkpoint)
        self.name = type(model).__name__ if model is checkpoint else str(checkpoint)
        self.layers = parse_layers(layers, model.encoder.n_layers)
        self.aggregation, self.weights = check_aggregation(aggregation, weights, len(self.layers))
        if precision not in PRECISIONS:
            raise ValueError(f"precision: {precision!r} is not one of {', '.join(PRECISIONS)}.")
        self.precision = ("bf16" if self.device.type == "cuda" else "fp32") if precision == "auto" else precision
        given = model is checkpoint
        if given and (model.training or model.mask_processor.mask_embedding.device != self.device):
            model = copy.deepcopy(model)
        self.model = model.to(self.device).eval()

    @property
    def sample_rate(self) -> int:
        return self.model.cfg.preprocessor.sample_rate

    @property
    def frames_per_s(self) -> float:
        mels_per_s = self.sample_rate / self.model.cfg.preprocessor.num_stride_samples
        return mels_per_s / self.model.cfg.encoder.subsampling_factor

    def __call__(self, audio: str | Path | Samples | Tensor) -> Tensor:
        """Features of one file, or of one waveform (N,) at the model's sample rate, on the CPU."""
        if isinstance(audio, (str, Path)):
            audio = read_audio(audio, sample_rate=self.sample_rate)
        return self.batch([audio])[0]

    @torch.inference_mode()
    def batch(self, waveforms: Sequence[Samples | Tensor], *, pin: bool = False) -> list[Tensor]:
        """Features of several waveforms (N,), computed together, on the CPU; padding does not change them.

        Instance and group norms take their statistics over the padding too, so with them only waveforms of one length
        are computed together. Copies from a GPU are faster into pinned memory (`pin`), of which a machine should not
        use much.
        """
        lengths = [len(waveform) for waveform in waveforms]
        if len(set(lengths)) > 1 and self.model.cfg.encoder.conv_norm_type.startswith(("instance_norm", "group_norm")):
            features: dict[int, Tensor] = {}
            for num_samples in sorted(set(lengths)):
                places = [place for place, own in enumerate(lengths) if own == num_samples]
                features |= zip(places, self.batch([waveforms[place] for place in places], pin=pin), strict=True)
            return [features[place] for place in range(len(waveforms))]
        samples_BN, length = pad_waveforms(waveforms, pin=self.device.type == "cuda")
        samples_BN = samples_BN.to(self.device, non_blocking=True)
        features_BLDS, num_frames = self.tensors(samples_BN, length.to(self.device))
        rows = [row[..., :frames] for row, frames in zip(features_BLDS, num_frames.tolist(), strict=True)]
        return on_host(rows) if pin and self.device.type == "cuda" else [row.cpu() for row in rows]

    @torch.inference_mode()
    def tensors(self, samples_BN: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, L, D, S), aggregated (B, D, S), and their lengths, on the device."""
        with _computing_in(self.precision, self.device):
            mels_BMT, num_mels = self.model.preprocessor(input_signal=samples_BN, length=length)
            outputs, num_frames = layer_outputs(self.model.encoder, mels_BMT, num_mels, self.layers)
        return aggregate([x_BDS.float() for x_BDS in outputs], self.aggregation, self.weights), num_frames


def find_device(device: str | torch.device | None) -> torch.device:
    """The device of this name, if this machine has it; without a name a GPU, if there is one."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    choices = ["cpu", *(["cuda"] if num_gpus else []), *(f"cuda:{number}" for number in range(num_gpus))]
    choices += ["mps"] if torch.backends.mps.is_available() else []
    if not device:
        return torch.device("cuda" if num_gpus else "cpu")
    with contextlib.suppress(RuntimeError):  # torch does not know the name
        found = torch.device(device)
        if found.type == "cpu" or str(found) in choices:
            return found
    no_gpu = "" if num_gpus else " (no CUDA GPU was found)"
    raise ValueError(f"device: {str(device)!r} is not one of {', '.join(choices)}{no_gpu}.")


def on_host(rows: list[Tensor]) -> list[Tensor]:
    """Copy tensors from a GPU, each contiguous, into pinned memory, which torch reuses for the next batch."""
    buffer = torch.empty(sum(row.numel() for row in rows), dtype=rows[0].dtype, pin_memory=True)
    out = [part.view(row.shape) for part, row in zip(buffer.split([row.numel() for row in rows]), rows, strict=True)]
    for host, row in zip(out, rows, strict=True):
        host.copy_(row.contiguous(), non_blocking=True)
    torch.cuda.current_stream(rows[0].device).synchronize()
    return out


def layer_outputs(
    encoder: ConformerEncoder, mels_BMT: Tensor, length: Tensor, layers: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """The outputs (B, D, S) of `layers`, and the lengths. Layers above the highest of them are not computed."""
    seen: dict[int, Tensor] = {}
    hooks = [
        encoder.layers[index].register_forward_hook(lambda _m, _i, out, index=index: seen.__setitem__(index, out))
        for index in set(layers)
    ]
    try:
        _, length = first_layers(encoder, max(layers) + 1)(audio_signal=mels_BMT, length=length)
    finally:
        for hook in hooks:
            hook.remove()
    # An encoder with a projection (feat_out) projects every layer it returns, as in NeMo.
    project = encoder.out_proj if encoder.out_proj is not None else torch.nn.Identity()
    return [project(seen[index]).transpose(1, 2) for index in layers], length


def first_layers(encoder: ConformerEncoder, count: int) -> ConformerEncoder:
    """The first `count` layers of this encoder, with shared weights and without its output projection."""
    short = copy.copy(encoder)
    short._modules = dict(encoder._modules)
    short.layers = encoder.layers[:count]
    short.layer_drop_probs = encoder.layer_drop_probs[:count]
    short.out_proj = None
    return short


def aggregate(outputs: list[Tensor], how: str, weights: Sequence[float] | None = None) -> Tensor:
    """Combine L tensors (B, D, S): (B, L, D, S) for `none`, (B, L·D, S) for `cat`, otherwise (B, D, S)."""
    if how == "cat":
        return torch.cat(outputs, dim=1)
    stacked_BLDS = torch.stack(outputs, dim=1)
    if how == "sum":
        return stacked_BLDS.sum(1)
    if how == "mean":
        return stacked_BLDS.mean(1)
    if how == "weighted":
        assert weights is not None
        return torch.einsum("blds,l->bds", stacked_BLDS, torch.tensor(weights, device=stacked_BLDS.device))
    return stacked_BLDS


def parse_layers(layers: Layers, num_layers: int) -> list[int]:
    """Layer numbers from 'all', 'last', '0,5,11', a number or a sequence; -1 is the last layer."""
    if layers == "all":
        return list(range(num_layers))
    if layers == "last":
        return [num_layers - 1]
    try:
        numbers = (
            [int(part) for part in layers.split(",")]
            if isinstance(layers, str)
            else [int(layer) for layer in ([layers] if isinstance(layers, int) else layers)]
        )
    except ValueError:
        raise ValueError(f"layers: {layers!r} is not 'all', 'last' or numbers such as 0,5,11.") from None
    for number in numbers:
        if not -num_layers <= number < num_layers:
            raise ValueError(f"layers: there is no layer {number}; the encoder has layers 0 to {num_layers - 1}.")
    numbers = [number % num_layers for number in numbers]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"layers: {layers!r} names {'a layer twice' if numbers else 'no layer'}.")
    return numbers


def check_aggregation(
    aggregation: str, weights: Sequence[float] | None, num_layers: int
) -> tuple[str, list[float] | None]:
    """Check both; return the aggregation and, for `weighted`, one weight per layer."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation: {aggregation!r} is not one of {', '.join(AGGREGATIONS)}.")
    if aggregation != "weighted":
        if weights is not None:
            raise ValueError(f"weights are given, but the aggregation is '{aggregation}'; use 'weighted'.")
        return aggregation, None
    given = [1 / num_layers] * num_layers if weights is None else [float(weight) for weight in weights]
    if len(given) != num_layers or not np.isfinite(given).all():
        raise ValueError(f"weights: {len(given)} values for {num_layers} layers; give a finite one for each.")
    return aggregation, given


def pad_waveforms(waveforms: Sequence[Samples | Tensor], *, pin: bool = False) -> tuple[Tensor, Tensor]:
    """Zero-padded samples (B, N) in float32, in pinned memory if asked for, and the lengths."""
    rows = [np.asarray(waveform, dtype=np.float32) for waveform in waveforms]
    for row in rows:
        if row.ndim != 1 or row.size == 0:
            raise ValueError(f"a waveform has shape {row.shape}; expected (samples,) with at least one sample.")
    samples_BN = torch.empty(len(rows), max(row.size for row in rows), pin_memory=pin)
    for padded, row in zip(samples_BN.numpy(), rows, strict=True):  # torch would start all its threads per row
        padded[: row.size], padded[row.size :] = row, 0
    return samples_BN, torch.tensor([row.size for row in rows])


@contextlib.contextmanager
def _computing_in(precision: str, device: torch.device) -> Iterator[None]:
    """Use bf16 by autocast, or true fp32: by default a GPU would compute convolutions in TF32."""
    with contextlib.ExitStack() as stack:
        if precision == "bf16":
            stack.enter_context(torch.autocast(device.type, dtype=torch.bfloat16))
        elif device.type == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=True, allow_tf32=False))
        yield
