"""Configuration: NeMo's yaml keys as typed, documented, checked dataclasses."""

from nest_ssl.config.compose import compose, embedded_configs, load_yaml, model_config
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
from nest_ssl.config.optim import OptimConfig, ScheduleConfig
from nest_ssl.config.parse import ConfigError, parse, read_yaml
from nest_ssl.config.training import CheckpointConfig, EmaConfig, ExperimentConfig, NestConfig, TrainerConfig
from nest_ssl.config.watchdog import DebugConfig, LaunchConfig, WatchdogConfig

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
