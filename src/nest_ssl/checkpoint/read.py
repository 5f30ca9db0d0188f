"""Load a model from a file (`.nemo`, ours or NeMo's, a training checkpoint `.ckpt`, `.safetensors`) or from the hub.

A `.ckpt` of sharded weights is a folder (`nemo_file.read_sharded`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode
from torch import Tensor

from nest_ssl.config import ModelConfig
from nest_ssl.config.checks import local_paths, quoted
from nest_ssl.config.model_section import model_config, model_section
from nest_ssl.config.targets import TARGETS
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel, EncDecMaskedTokenPredModel
from nest_ssl.modules import AudioToMelSpectrogramPreprocessor
from nest_ssl.nemo_file import (
    CONFIG_NAME,
    CheckpointError,
    NemoFile,
    as_checkpoint_errors,
    check_features,
    check_fit,
    check_is_file,
    check_weights,
    one_line,
    read_nemo,
    read_sharded,
    read_weights,
    refuse_resolvers,
)
from nest_ssl.run_folder import RunFolder, is_checkpoint

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FILE_SUFFIXES = (".nemo", ".ckpt", ".safetensors")
CONFIG_KEY = "model_config"
"""The configuration, as JSON, in the metadata of a `.safetensors` file."""
CHECKSUM_KEY = "crc32"
"""The checksum of its weights and configuration, there too."""
NO_CONFIG = "has no model configuration under hyper_parameters."


def checkpoint_path(name: str | Path) -> Path:
    """The file that `name` means: a path or, if there is no such path, a model on the Hugging Face hub."""
    path = local_path(name)
    if path.suffix in FILE_SUFFIXES or not HUB_NAME.fullmatch(str(name)) or path.exists():
        return path
    return hub_file(str(name))


def local_path(name: str | Path) -> Path:
    """The path that `name` means. A folder that is not a checkpoint is refused, with the file in it to give instead."""
    if not str(name):
        raise CheckpointError("the name of the model file is empty. Give a .nemo, .ckpt or .safetensors file.")
    local_paths("model file", str(name))
    path = Path(os.path.expanduser(name))  # Path's own fails for ~name without such a user
    if path.suffix != ".ckpt" and os.path.isdir(path) and not is_checkpoint(path):
        if (path / CONFIG_NAME).is_file():
            pack = shlex.join(["tar", "-cf", f"{path}.nemo", "-C", str(path), "."])
            raise CheckpointError(f"{path}: is an unpacked .nemo file. Pack it again: {pack}")
        newest = RunFolder.open(path).newest_weights() or RunFolder(path, str(path)).newest_weights()
        way_out = f"{newest}, the newest in it" if newest else "a .nemo, .ckpt or .safetensors file"
        raise CheckpointError(f"{path}: is a folder, not a file. Give {way_out}.")
    return path


def hub_file(name: str) -> Path:
    """The `.nemo` file of a model on the hub, such as nvidia/ssl_en_nest_large_v1.0; cached or downloaded."""
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{name}: not a file, and huggingface_hub is not installed to look it up. "
            f"Install nest-ssl[hf], or download the .nemo file and give its path."
        ) from error
    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.nemo"]))
    except Exception as error:  # whatever a network, a proxy or the hub can raise
        cached = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
        raise CheckpointError(
            f"{name}: no such file, and it could not be downloaded from the hub ({one_line(error, 200)}). "
            f"Without a network: download its .nemo file elsewhere (https://huggingface.co/{name}/tree/main) and "
            f"give the path, or copy the folder {cached} from a machine that has it."
        ) from error
    found = sorted(folder.glob("*.nemo"))
    if not found:
        raise CheckpointError(f"{name}: the repository on the hub has no .nemo file.")
    return found[0]


log = logging.getLogger(__name__)

ModelType = TypeVar("ModelType", bound=EncDecMaskedTokenPredModel)

MODELS: dict[str, type[EncDecMaskedTokenPredModel]] = {
    model.__name__: model for model in (EncDecMaskedTokenPredModel, EncDecDenoiseMaskedTokenPredModel)
}

# NeMo's `.ckpt` files contain their configuration as omegaconf objects: only these classes may be unpickled.
_CKPT_GLOBALS: list[Any] = [
    DictConfig,
    ListConfig,
    ContainerMetadata,
    Metadata,
    AnyNode,
    Any,
    dict,
    list,
    int,
    defaultdict,
]


def load(path: str | Path, map_location: Any = "cpu", strict: bool = True) -> EncDecMaskedTokenPredModel:
    """Load a model, in eval mode, from a `.nemo`, `.ckpt` or `.safetensors` file or by its name on the hub.

    Missing, unexpected and misshapen parameters are an error that lists them; with `strict=False` the first two are
    only a warning.
    """
    path = checkpoint_path(path)
    content = read_checkpoint(path, map_location)
    kind, cfg = model_class(path, content.config), checkpoint_config(path, content.config)
    check_model(path, kind, cfg, content.weights, strict)
    model = kind(cfg)
    model.load_state_dict(content.weights, strict=False)
    return model.to(next(iter(content.weights.values())).device).eval()


def check_model(path: Path, kind: type[Any], cfg: ModelConfig, weights: dict[str, Tensor], strict: bool = True) -> None:
    """Refuse weights that cannot be those of the configuration, without memory for another copy of them."""
    check_fit(model_without_storage(path, kind, cfg), weights, str(path), strict=strict)
    own = AudioToMelSpectrogramPreprocessor(**vars(cfg.preprocessor)).state_dict(prefix="preprocessor.")
    check_features(weights, own, str(path))


def checkpoint_config(path: Path, section: Any) -> ModelConfig:
    """The configuration in a file, checked."""
    if not section:
        raise CheckpointError(f"{path}: {NO_CONFIG}")
    try:
        return model_config(section)
    except ValueError as error:
        raise CheckpointError(f"{path}: its configuration cannot be used: {one_line(error, 1000)}") from error


def model_without_storage(path: Path, kind: type[ModelType], cfg: ModelConfig) -> ModelType:
    """The model of a file on `meta`: a configuration can ask for any amount of memory, so shapes are checked first."""
    try:
        with torch.device("meta"):
            return kind(cfg)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: its configuration cannot be used: {one_line(error)}") from error


def read_checkpoint(path: Path, map_location: Any = "cpu") -> NemoFile:
    """Configuration and weights of a `.nemo`, `.ckpt` or `.safetensors` file, whatever its name: users rename them."""
    if os.path.isdir(path) and (path.suffix == ".ckpt" or is_checkpoint(path)):  # in shards
        return _read_ckpt(path, map_location)
    check_is_file(path)
    with as_checkpoint_errors(path, "cannot be read"), path.open("rb") as file:
        start = file.read(9)
    if start[8:] == b"{" or (path.suffix == ".safetensors" and len(start) < 9):  # after the length of its header
        return _read_safetensors(path, map_location)
    if start.startswith((b"PK", b"\x80")) or (path.suffix == ".ckpt" and not tarfile.is_tarfile(path)):
        return _read_ckpt(path, map_location)
    return read_nemo(path, map_location)


def model_class(path: Path, config: dict[str, Any]) -> type[EncDecMaskedTokenPredModel]:
    """The model class that a configuration was saved from."""
    target = config.get("target")
    if target is None:
        return EncDecDenoiseMaskedTokenPredModel
    name = TARGETS.get(str(target))
    if name not in MODELS:
        found = str(target).rpartition(".")[2]
        raise CheckpointError(f"{path}: contains a {quoted(found)}, not a NEST model. Accepted: {', '.join(MODELS)}.")
    return MODELS[name]


def _read_ckpt(path: Path, map_location: Any) -> NemoFile:
    """A Lightning checkpoint of ours or NeMo's: `state_dict`, and the configuration under `hyper_parameters`."""
    with as_checkpoint_errors(path, "not a readable training checkpoint"):
        if path.is_dir():
            content: Any = read_sharded(path, only="state_dict.")
        else:
            with path.open("rb") as file, torch.serialization.safe_globals(_CKPT_GLOBALS):
                content = read_weights(file, str(path), map_location)
    if not isinstance(content, dict) or "state_dict" not in content:
        raise CheckpointError(f"{path}: not a training checkpoint: it has no state_dict.")
    parameters = content.get("hyper_parameters") or {}
    config = parameters.get("cfg", parameters) if isinstance(parameters, (dict, DictConfig)) else None
    if not isinstance(config, (dict, DictConfig)):
        raise CheckpointError(f"{path}: {NO_CONFIG}")
    with as_checkpoint_errors(path, "its configuration cannot be used"):
        plain = OmegaConf.to_container(config, resolve=False) if isinstance(config, DictConfig) else config
        refuse_resolvers(plain, f"{path}: its configuration")
        section = model_section(config) if config else {}  # starting weights need none
    weights = check_weights(content["state_dict"], f"{path}: its state_dict")
    if path.is_dir():
        weights = {name: value.to(map_location) for name, value in weights.items()}
    return NemoFile(section, weights)


def _read_safetensors(path: Path, map_location: Any = "cpu") -> NemoFile:
    """Configuration and weights of a file written by `nest-ssl export`."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CheckpointError(f"{path}: needs safetensors. Install nest-ssl[hf].") from error
    with as_checkpoint_errors(path, "not a readable .safetensors file"):
        with safe_open(path, framework="pt", device=str(map_location)) as file:
            metadata = file.metadata() or {}
            text = metadata.get(CONFIG_KEY)
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = json.loads(text, object_pairs_hook=_section) if text else None
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{path}: contains weights but no NEST configuration. "
            f"'nest-ssl export CHECKPOINT {path.name} --format safetensors' writes both."
        )
    refuse_resolvers(config, f"{path}: its configuration")
    weights = check_weights(weights, f"{path}: its tensors")
    if CHECKSUM_KEY in metadata and metadata[CHECKSUM_KEY] != checksum(weights, text or ""):
        raise CheckpointError(f"{path}: is damaged: its content fails its checksum. Use another copy of it.")
    return NemoFile(config, weights)


def _section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping in JSON, which would take the last of several values."""
    section: dict[str, Any] = {}
    for name, value in pairs:
        if name in section:
            raise ValueError(f"the key '{name}' occurs twice in its configuration")
        section[name] = value
    return section


def checksum(weights: Mapping[str, Tensor], config: str) -> str:
    """The CRC-32 of weights and configuration; safetensors has none of its own, so files of others are not checked."""
    value = zlib.crc32(config.encode())
    for name in sorted(weights):
        flat = weights[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        value = zlib.crc32(flat.numpy().data, zlib.crc32(name.encode(), value))
    return f"{value:08x}"
