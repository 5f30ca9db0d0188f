"""Turn a yaml and command-line overrides into a checked configuration. Hydra composes; OmegaConf ends here."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from nest_ssl.config.data import DatasetConfig
from nest_ssl.config.model import ModelConfig
from nest_ssl.config.optim import OptimConfig
from nest_ssl.config.parse import ConfigError, parse, plain
from nest_ssl.config.training import NestConfig
from nest_ssl.config.unused import unused_keys

log = logging.getLogger(__name__)

YAML_PACKAGE = "nest_ssl.config.yaml"
DEFAULT_CONFIG = "nest_fast-conformer"

SAVED_NOTES = {"target", "nemo_version", "nest_ssl_version"}
"""Keys that `.nemo` files add to the model's configuration: the class and the version that saved them."""

TRAINING_SECTIONS: dict[str, type[Any]] = {
    "train_ds": DatasetConfig,
    "validation_ds": DatasetConfig,
    "test_ds": DatasetConfig,
    "optim": OptimConfig,
}
"""Sections that record how a model was trained; its outputs do not depend on them."""


def yaml_folder() -> Path:
    """Return the folder of the packaged yaml files."""
    return Path(str(resources.files(YAML_PACKAGE)))


def embedded_configs() -> list[str]:
    """Return the names of the packaged configurations."""
    return sorted(path.stem for path in yaml_folder().glob("*.yaml"))


def compose(
    config_name: str = DEFAULT_CONFIG, overrides: Sequence[str] = (), config_path: str | Path | None = None
) -> NestConfig:
    """Return the configuration `config_name` from the folder `config_path` (None: the package's own), with overrides.

    Overrides are Hydra's. A key of the schema needs no `+`; a `+` on an existing key replaces its value.
    """
    folder = yaml_folder() if config_path is None else Path(config_path).expanduser().absolute()
    name = config_name.removesuffix(".yaml")
    if not (folder / f"{name}.yaml").is_file():
        raise ConfigError(
            f"{folder / name}.yaml: no such file. Packaged configurations: {', '.join(embedded_configs())}."
        )
    groups = {path.name for base in (folder, yaml_folder()) for path in base.iterdir() if path.is_dir()}
    listed = _default_groups(folder / f"{name}.yaml")
    given = [_override(text, groups, listed) for text in overrides]
    try:
        with hydra.initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            node = hydra.compose(name, overrides=[*given, f"hydra.searchpath=[pkg://{YAML_PACKAGE}]"])
        data = OmegaConf.to_container(node, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{name}.yaml: {_one_line(error)}") from error
    return parse(NestConfig, data, unused=unused_keys())


def load_yaml(path: str | Path, overrides: Sequence[str] = ()) -> NestConfig:
    """Return the configuration in the file `path`, with overrides."""
    path = Path(path)
    return compose(path.name, overrides, path.parent)


def model_config(config: Any) -> ModelConfig:
    """Return NeMo's `model:` section (a dict, a DictConfig or a dataclass) as a checked `ModelConfig`."""
    if isinstance(config, ModelConfig):
        return config
    data = model_section(config)
    if SAVED_NOTES.isdisjoint(data):
        return parse(ModelConfig, data, where="model", unused=unused_keys())
    section = _without_foreign_training({key: value for key, value in data.items() if key not in SAVED_NOTES})
    # The user did not choose what NeMo's files contain, so dropped keys are not worth a line in the log.
    cfg = parse(ModelConfig, section, where="model", unused=unused_keys(), report_level=logging.DEBUG)
    return cfg if "nest_ssl_version" in data else _undo_post_conv_adjustment(cfg)


def model_section(config: Any) -> dict[str, Any]:
    """Return `config` as a plain mapping, with interpolations resolved within its file or else within itself."""
    try:
        if isinstance(config, DictConfig):
            with contextlib.suppress(InterpolationKeyError):
                config = OmegaConf.to_container(config, resolve=True)
        data: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else plain(config)
        if _has_interpolation(data):
            # A section taken out of its file still refers to it as `${model.…}`.
            data = plain(OmegaConf.create({"model": data}))["model"]
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error
    if not isinstance(data, dict):
        raise ConfigError(f"model: expected a mapping of keys, got {data!r}.")
    return {str(key): value for key, value in data.items()}


def _undo_post_conv_adjustment(cfg: ModelConfig) -> ModelConfig:
    """Return the user's values: NeMo rewrites a post_conv config when it builds the model, and saves the result."""
    if cfg.mask_position != "post_conv":
        return cfg
    factor, mels = cfg.encoder.subsampling_factor, cfg.preprocessor.features
    return dataclasses.replace(
        cfg,
        masking=dataclasses.replace(cfg.masking, feat_in=mels, block_size=cfg.masking.block_size * factor),
        quantizer=dataclasses.replace(cfg.quantizer, feat_in=mels),
        loss=dataclasses.replace(cfg.loss, combine_time_steps=factor),
    )


def _without_foreign_training(data: dict[str, Any]) -> dict[str, Any]:
    """Drop training sections that only NeMo understands; the model loads without them."""
    kept = dict(data)
    for name, schema in TRAINING_SECTIONS.items():
        if kept.get(name) is None:
            kept.pop(name, None)
            continue
        try:
            parse(schema, kept[name], f"model.{name}", unused_keys(), logging.DEBUG)
        except ValueError as error:
            log.warning("model.%s in the file is ignored, since the model does not need it: %s", name, error)
            del kept[name]
    return kept


def _has_interpolation(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_interpolation, value.values()))
    if isinstance(value, list):
        return any(map(_has_interpolation, value))
    return isinstance(value, str) and "${" in value


def _default_groups(path: Path) -> set[str]:
    """Return the config groups in the defaults list of a yaml."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: not a readable yaml file: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, got a {type(content).__name__}.")
    entries = content.get("defaults") or []
    return {str(group) for entry in entries if isinstance(entry, dict) for group in entry}


def _override(text: str, groups: set[str], listed: set[str]) -> str:
    """Return an override in Hydra's form, with `++` so that the key need not exist in the yaml."""
    key = text.lstrip("+").split("=", 1)[0]
    if text.startswith("~") or key.startswith("hydra."):
        return text
    if key.split("@", 1)[0] in groups:
        return text.lstrip("+") if key in listed else f"+{text.lstrip('+')}"
    if "=" not in text:
        raise ConfigError(f"override '{text}': expected key=value.")
    return f"++{text.lstrip('+')}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
