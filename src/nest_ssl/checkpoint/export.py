"""A checkpoint in the formats of others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from nest_ssl.checkpoint.huggingface import CTC_FOLDER, export_huggingface
from nest_ssl.checkpoint.load import CONFIG_KEY, load
from nest_ssl.checkpoint.onnx_file import export_onnx
from nest_ssl.files import replacing
from nest_ssl.model import EncDecMaskedTokenPredModel
from nest_ssl.nemo_file import CheckpointError, nemo_config

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


def write_safetensors(model: EncDecMaskedTokenPredModel, path: Path) -> None:
    """Write the model, whole or not at all."""
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise CheckpointError(f"{path}: needs safetensors. Install nest-ssl[hf].") from error
    # Weights that stand under several names are written under each: the format knows no sharing.
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    config = nemo_config(model.cfg, type(model).__name__)
    with replacing(path) as file:
        file.write(save(weights, metadata={"format": "pt", CONFIG_KEY: json.dumps(config)}))
