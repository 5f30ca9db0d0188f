"""Export a checkpoint to other formats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from nest_ssl.checkpoint.huggingface import CTC_FOLDER, export_huggingface
from nest_ssl.checkpoint.onnx_file import export_onnx
from nest_ssl.checkpoint.read import CHECKSUM_KEY, CONFIG_KEY, checksum, load
from nest_ssl.files import make_folder, remove_left_over, replacing
from nest_ssl.model import EncDecMaskedTokenPredModel
from nest_ssl.nemo_file import CheckpointError, nemo_config

FORMATS = ("huggingface", "nemo", "safetensors", "onnx")
SUFFIXES = {"nemo": ".nemo", "safetensors": ".safetensors", "onnx": ".onnx"}


@dataclass(frozen=True)
class Exported:
    """The files that were written, each with a short description."""

    files: list[tuple[Path, str]]


def export_checkpoint(checkpoint: str | Path, output: str | Path, kind: str) -> Exported:
    """Write the model in a file or on the hub to `output`: a folder for huggingface, otherwise a file."""
    if kind not in FORMATS:
        raise ValueError(f"format: {kind!r} is not one of {', '.join(FORMATS)}.")
    output = _checked_output(Path(output).expanduser(), kind)
    model = load(checkpoint)
    make_folder(output.parent)
    if kind == "huggingface":
        export_huggingface(model, output)
        ctc = (output / CTC_FOLDER, "ParakeetForCTC with this encoder and a new head")
        return Exported([(output, "ParakeetEncoder, for transformers' AutoModel"), ctc])
    if kind == "nemo":
        model.save_to(output)
        return Exported([(output, "for NeMo and nest-ssl")])
    if kind == "safetensors":
        write_safetensors(model, output)
        return Exported([(output, "all weights, with the configuration in the metadata")])
    difference = export_onnx(model, output)
    return Exported([(output, f"the encoder; largest difference in onnxruntime {difference:.1g}")])


def _checked_output(output: Path, kind: str) -> Path:
    suffix = SUFFIXES.get(kind)
    if suffix is None:
        if output.exists() and not output.is_dir():
            raise ValueError(f"{output}: is a file; {kind} needs a folder.")
        if output.is_dir() and any(output.iterdir()) and not (output / "config.json").is_file():
            raise ValueError(f"{output}: is a folder with other files. Give a new folder.")
        return output
    if output.is_dir():
        raise ValueError(f"{output}: is a folder; give a file such as {output / 'nest'}{suffix}.")
    if output.suffix != suffix:
        raise ValueError(f"{output}: the file name must end in {suffix} for {kind}.")
    return output


def write_safetensors(model: EncDecMaskedTokenPredModel, path: Path) -> None:
    """Write one `.safetensors` file: every weight by its name, and the configuration in the metadata."""
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise CheckpointError(f"{path}: needs safetensors. Install nest-ssl[hf].") from error
    # Shared weights are written under each of their names: the format cannot share.
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    config = json.dumps(nemo_config(model.cfg, type(model).__name__))
    metadata = {"format": "pt", CONFIG_KEY: config, CHECKSUM_KEY: checksum(weights, config)}
    remove_left_over(path)
    with replacing(path) as file:
        file.write(save(weights, metadata=metadata))
