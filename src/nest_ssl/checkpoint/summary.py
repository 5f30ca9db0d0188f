"""What a configuration or a checkpoint contains, and how two of them differ. Models are built without storage."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nest_ssl.checkpoint.read import (
    check_model,
    checkpoint_config,
    local_path,
    model_class,
    model_without_storage,
    read_checkpoint,
)
from nest_ssl.config import ModelConfig, compose, embedded_configs, load_yaml
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel, EncDecMaskedTokenPredModel

CHECKPOINT_SUFFIXES = (".nemo", ".ckpt", ".safetensors")


@dataclass
class Source:
    """A checkpoint or a configuration, under the name that the user gave."""

    name: str
    cfg: ModelConfig
    kind: type[EncDecMaskedTokenPredModel]
    weights: dict[str, Tensor] | None
    """None for a configuration."""

    def model(self) -> EncDecMaskedTokenPredModel:
        """The model without storage."""
        return model_without_storage(Path(self.name), self.kind, self.cfg)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        state = self.weights if self.weights is not None else self.model().state_dict()
        return {name: tuple(tensor.shape) for name, tensor in state.items()}


@dataclass
class Row:
    """One module of the model."""

    module: str
    kind: str
    output: str
    """Shape of its output for `Summary.seconds` of audio."""
    parameters: int
    trainable: int


@dataclass
class Summary:
    rows: list[Row]
    parameters: int
    trainable: int
    encoder_parameters: int
    weight_bytes: int
    training_bytes: int
    """Weights, gradients and AdamW's two moments, without activations."""
    mel_frames_per_s: float
    encoder_frames_per_s: float
    seconds: float


def open_source(name: str, overrides: list[str] | None = None) -> Source:
    """Open a `.nemo`, `.ckpt` or `.safetensors` file, a yaml file, or a built-in configuration."""
    path = Path(os.path.expanduser(name))
    if is_checkpoint(name):
        content = read_checkpoint(local_path(name))
        kind, section = model_class(path, content.config), checkpoint_config(path, content.config)
        check_model(path, kind, section, content.weights)
        return Source(name, section, kind, content.weights)
    if path.suffix == ".yaml" and path.is_file():
        cfg = load_yaml(path, overrides or [])
    elif name.removesuffix(".yaml") in embedded_configs():
        cfg = compose(name, overrides or [])
    else:
        what = "no .nemo, .ckpt or .yaml file" if local_path(name).exists() else "no such file"
        raise ValueError(f"{name}: {what}. Built-in configurations: {', '.join(embedded_configs())}.")
    return Source(name, cfg.model, EncDecDenoiseMaskedTokenPredModel, None)


def is_checkpoint(name: str) -> bool:
    return Path(name).suffix in CHECKPOINT_SUFFIXES


def summarize(source: Source, seconds: float = 16.0) -> Summary:
    """Modules, shapes for `seconds` of audio, parameters and memory."""
    model, cfg = source.model(), source.cfg
    shapes = _output_shapes(model, seconds)
    counted: set[int] = set()
    rows = _merged([_row(name, module, shapes, counted) for name, module in _parts(model)])
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    weight_bytes = sum(p.numel() * p.element_size() for p in parameters)
    mel_rate = cfg.sample_rate / cfg.preprocessor.num_stride_samples
    return Summary(
        rows=rows,
        parameters=total,
        trainable=trainable,
        encoder_parameters=sum(p.numel() for p in model.encoder.parameters()),
        weight_bytes=weight_bytes,
        training_bytes=weight_bytes + 12 * trainable,
        mel_frames_per_s=mel_rate,
        encoder_frames_per_s=mel_rate / cfg.encoder.subsampling_factor,
        seconds=seconds,
    )


def config_differences(a: Source, b: Source) -> list[tuple[str, str, str]]:
    """Every key of the model section that differs: (key, value in a, value in b)."""
    flat_a, flat_b = _flat(dataclasses.asdict(a.cfg)), _flat(dataclasses.asdict(b.cfg))
    keys = [key for key in {**flat_a, **flat_b} if flat_a.get(key, _ABSENT) != flat_b.get(key, _ABSENT)]
    return [(key, str(flat_a.get(key, _ABSENT)), str(flat_b.get(key, _ABSENT))) for key in keys]


def parameter_differences(a: Source, b: Source) -> list[tuple[str, str, str]]:
    """Every parameter that is missing on one side or differs in shape or value: (name, in a, in b)."""
    shapes_a, shapes_b = a.shapes(), b.shapes()
    out: list[tuple[str, str, str]] = []
    for name in {**shapes_a, **shapes_b}:
        shape_a, shape_b = shapes_a.get(name), shapes_b.get(name)
        if shape_a != shape_b:
            out.append((name, str(shape_a or _ABSENT), str(shape_b or _ABSENT)))
        elif a.weights is not None and b.weights is not None and not torch.equal(a.weights[name], b.weights[name]):
            largest = float((a.weights[name].double() - b.weights[name].double()).abs().max())
            out.append((name, "values", f"differ by up to {largest:.3g}"))
    return out


_ABSENT = "–"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    out: dict[str, Any] = {}
    for key, inner in value.items():
        out |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return out


def _parts(model: EncDecMaskedTokenPredModel) -> list[tuple[str, nn.Module]]:
    encoder = model.encoder
    parts: list[tuple[str, nn.Module]] = [
        ("preprocessor", model.preprocessor),
        ("quantizer", model.quantizer),
        ("mask_processor", model.mask_processor),
        ("encoder.pre_encode", encoder.pre_encode),
        *((f"encoder.layers.{index}", layer) for index, layer in enumerate(encoder.layers)),
    ]
    if encoder.out_proj is not None:
        parts.append(("encoder.out_proj", encoder.out_proj))
    return [*parts, ("decoder", model.decoder), ("loss", model.loss)]


def _row(name: str, module: nn.Module, shapes: dict[str, str], counted: set[int]) -> Row:
    """Parameters shared by several modules count for the first."""
    own = [p for p in module.parameters() if id(p) not in counted]
    counted |= {id(p) for p in own}
    total, trainable = sum(p.numel() for p in own), sum(p.numel() for p in own if p.requires_grad)
    return Row(name, type(module).__name__, shapes.get(name, ""), total, trainable)


def _merged(rows: list[Row]) -> list[Row]:
    """Join equal layers into one row, `encoder.layers.0…16`, with the sum of their parameters."""
    out: list[Row] = []
    first: Row | None = None  # the first of a run of equal layers
    for row in rows:
        same = first is not None and (row.kind, row.output, row.parameters) == (
            first.kind,
            first.output,
            first.parameters,
        )
        if same and row.module.startswith("encoder.layers."):
            run = out[-1]
            run.module = f"{run.module.split('…')[0]}…{row.module.rsplit('.', 1)[1]}"
            run.parameters += row.parameters
            run.trainable += row.trainable
        else:
            out.append(dataclasses.replace(row))
            first = row
    return out


def _output_shapes(model: EncDecMaskedTokenPredModel, seconds: float) -> dict[str, str]:
    """Shapes of the modules' main outputs, from a forward pass on `meta`."""
    shapes: dict[str, str] = {}

    def note(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = output[-1] if name == "quantizer" else output[0] if isinstance(output, tuple) else output
            shapes[name] = " × ".join(map(str, tensor.shape))

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in _parts(model)]
    samples = int(seconds * model.cfg.sample_rate)
    audio = torch.zeros(1, samples, device="meta")
    length = torch.zeros(1, dtype=torch.long, device="meta")
    noisy = {"noisy_input_signal": audio, "noisy_input_signal_length": length}
    with torch.no_grad():
        extra = noisy if isinstance(model, EncDecDenoiseMaskedTokenPredModel) else {}
        log_probs, _, masks, tokens = model(input_signal=audio, input_signal_length=length, apply_mask=True, **extra)
        model.loss(masks=masks, decoder_outputs=log_probs, targets=tokens)
    for hook in hooks:
        hook.remove()
    return shapes
