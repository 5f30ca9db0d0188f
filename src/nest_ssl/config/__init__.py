"""Configuration: NeMo's yaml keys as typed, documented, checked dataclasses."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nest_ssl.config.composing import compose, embedded_configs, load_yaml
    from nest_ssl.config.data import AugmentorConfig, DatasetConfig
    from nest_ssl.config.encoder import EncoderConfig
    from nest_ssl.config.model import (
        DecoderConfig,
        LossConfig,
        MaskingConfig,
        ModelConfig,
        PreprocessorConfig,
        QuantizerConfig,
    )
    from nest_ssl.config.model_section import model_config
    from nest_ssl.config.optim import OptimConfig, ScheduleConfig
    from nest_ssl.config.parsing import ConfigError, parse, read_yaml
    from nest_ssl.config.training import (
        CheckpointConfig,
        DebugConfig,
        EmaConfig,
        ExperimentConfig,
        LaunchConfig,
        NestConfig,
        TrainerConfig,
        WatchdogConfig,
    )

__all__ = [
    "AugmentorConfig",
    "CheckpointConfig",
    "ConfigError",
    "DatasetConfig",
    "DebugConfig",
    "DecoderConfig",
    "EmaConfig",
    "EncoderConfig",
    "ExperimentConfig",
    "LaunchConfig",
    "LossConfig",
    "MaskingConfig",
    "ModelConfig",
    "NestConfig",
    "OptimConfig",
    "PreprocessorConfig",
    "QuantizerConfig",
    "ScheduleConfig",
    "TrainerConfig",
    "WatchdogConfig",
    "compose",
    "embedded_configs",
    "load_yaml",
    "model_config",
    "parse",
    "read_yaml",
]

# Hydra takes a tenth of a second to import, and only composing needs it.
_HOMES = {
    "AugmentorConfig": "data",
    "CheckpointConfig": "training",
    "ConfigError": "parsing",
    "DatasetConfig": "data",
    "DebugConfig": "training",
    "DecoderConfig": "model",
    "EmaConfig": "training",
    "EncoderConfig": "encoder",
    "ExperimentConfig": "training",
    "LaunchConfig": "training",
    "LossConfig": "model",
    "MaskingConfig": "model",
    "ModelConfig": "model",
    "NestConfig": "training",
    "OptimConfig": "optim",
    "PreprocessorConfig": "model",
    "QuantizerConfig": "model",
    "ScheduleConfig": "optim",
    "TrainerConfig": "training",
    "WatchdogConfig": "training",
    "compose": "composing",
    "embedded_configs": "composing",
    "load_yaml": "composing",
    "model_config": "model_section",
    "parse": "parsing",
    "read_yaml": "parsing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
