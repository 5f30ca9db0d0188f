"""A checkpoint in the formats of others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nest_ssl.checkpoint.huggingface import CTC_FOLDER, export_huggingface
from nest_ssl.checkpoint.load import load
from nest_ssl.checkpoint.onnx_file import export_onnx
from nest_ssl.checkpoint.safetensors_file import write_safetensors

FORMATS = ("huggingface", "nemo", "safetensors", "onnx")
SUFFIXES = {"nemo": ".nemo", "safetensors": ".safetensors", "onnx": ".onnx"}


@dataclass(frozen=True)
class Exported:
    """What was written, each with a few words about it."""

    files: list[tuple[Path, str]]


def export_checkpoint(checkpoint: str | Path, output: str | Path, kind: str) -> Exported:
    """Write the model of a file or a name of the hub to `output`: a folder for huggingface, else a file."""
    if kind not in FORMATS:
        raise ValueError(f"format: {kind!r} is not one of {', '.join(FORMATS)}.")
    output = _checked_output(Path(output).expanduser(), kind)
    model = load(checkpoint)
    output.parent.mkdir(parents=True, exist_ok=True)
    if kind == "huggingface":
        export_huggingface(model, output)
        ctc = (output / CTC_FOLDER, "ParakeetForCTC with this encoder and a new head")
        return Exported([(output, "ParakeetEncoder, for transformers' AutoModel"), ctc])
    if kind == "nemo":
        model.save_to(output)
        return Exported([(output, "for NeMo and nest-ssl")])
    if kind == "safetensors":
        write_safetensors(model, output)
        return Exported([(output, "all weights, with the configuration among the metadata")])
    difference = export_onnx(model, output)
    return Exported([(output, f"the encoder; largest difference in onnxruntime {difference:.1g}")])


def _checked_output(output: Path, kind: str) -> Path:
    suffix = SUFFIXES.get(kind)
    if suffix is None:
        if output.exists() and not output.is_dir():
            raise ValueError(f"{output}: is a file; {kind} needs a folder.")
        return output
    if output.is_dir():
        raise ValueError(f"{output}: is a folder; give a file such as {output / 'nest'}{suffix}.")
    if output.suffix != suffix:
        raise ValueError(f"{output}: a file of format {kind} ends in {suffix}.")
    return output
