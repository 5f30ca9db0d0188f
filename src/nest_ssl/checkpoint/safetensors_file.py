"""Models as one `.safetensors` file: every weight by its name, and the configuration as JSON among the metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nest_ssl.files import replacing
from nest_ssl.model import EncDecMaskedTokenPredModel
from nest_ssl.nemo_file import CheckpointError, NemoFile, check_is_file, check_weights, nemo_config, one_line

CONFIG_KEY = "model_config"


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


def read_safetensors(path: Path, map_location: Any = "cpu") -> NemoFile:
    """Configuration and weights of a file that `write_safetensors` made."""
    check_is_file(path)
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(f"{path}: needs safetensors. Install nest-ssl[hf].") from error
    try:
        with safe_open(path, framework="pt", device=str(map_location)) as file:
            text = (file.metadata() or {}).get(CONFIG_KEY)
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = json.loads(text) if text else None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable .safetensors file: {one_line(error)}") from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{path}: holds weights but no configuration of NEST. "
            f"'nest-ssl export CHECKPOINT {path.name} --format safetensors' writes both."
        )
    return NemoFile(config, check_weights(weights, f"{path}: its tensors"))
