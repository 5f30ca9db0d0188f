"""NeMo's `model:` section, wherever it comes from, as a checked configuration; and the keys NEST does not use."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from nest_ssl.config.checks import quoted
from nest_ssl.config.data import UNUSED_DATASET_KEYS, DatasetConfig
from nest_ssl.config.model import ModelConfig
from nest_ssl.config.optim import OptimConfig
from nest_ssl.config.parsing import ConfigError, one_line, parse, plain

log = logging.getLogger(__name__)

SAVED_NOTES = {"target", "nemo_version", "nest_ssl_version"}
"""Keys that `.nemo` files add to the model's configuration: the class and the version that saved them."""

TRAINING_SECTIONS: dict[str, type[Any]] = {
    "train_ds": DatasetConfig,
    "validation_ds": DatasetConfig,
    "test_ds": DatasetConfig,
    "optim": OptimConfig,
}
"""Sections that record how a model was trained; its outputs do not depend on them."""


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
        data: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else plain(config, "model")
        if _has_interpolation(data):
            # A section taken out of its file still refers to it as `${model.…}`.
            data = plain(OmegaConf.create({"model": data}))["model"]
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(one_line(error)) from error
    if not isinstance(data, dict):
        raise ConfigError(f"model: expected a mapping of keys, got {quoted(data)}.")
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


# ---- keys that NEST does not use: accepted, dropped, and named in one line of the log ----

UNUSED_MODEL_KEYS: dict[str, str] = {
    "spec_augment": "NEST masks with `masking`; NeMo keeps this section only because its base class requires it",
    "skip_nan_grad": "non-finite steps are always skipped, by all ranks together",
    "variational_noise": "not part of NEST",
    "loss_list": "only for NeMo's contrastive models",
    "labels": "there are no transcripts in pre-training",
    "tokenizer": "there are no transcripts in pre-training",
    "optim.sched.monitor": "these schedules monitor no metric",
    "optim.sched.reduce_on_plateau": "these schedules monitor no metric",
    "optim.sched.iters_per_batch": "the trainer knows the number of steps",
    "preprocessor.rng": "NeMo's narrow-band augmentation",
    "preprocessor.nb_max_freq": "NeMo's narrow-band augmentation",
    "preprocessor.use_torchaudio": "deprecated in NeMo; the result does not depend on it",
    "preprocessor.stft_exact_pad": "deprecated in NeMo; no effect there either",
    "preprocessor.stft_conv": "deprecated in NeMo; no effect there either",
}

UNUSED_ROOT_KEYS: dict[str, str] = {
    "exp_manager.resume_past_end": "a finished run resumes once max_steps or max_epochs is raised",
    "exp_manager.disable_validation_on_resume": "a resumed run validates where an uninterrupted run would have",
    "exp_manager.seconds_to_sleep": "ranks do not need to wait for the folder",
    "exp_manager.log_delta_step_timing": "step times are logged by `log_step_timing`",
    "exp_manager.step_timing_kwargs": "step times are logged by `log_step_timing`",
    "exp_manager.log_tflops_per_sec_per_gpu": "speed is logged in audio-seconds per second",
    **{
        f"exp_manager.create_{name}": "this NeMo service is not part of nest-ssl"
        for name in (
            "mlflow_logger",
            "dllogger_logger",
            "clearml_logger",
            "neptune_logger",
            "ipl_epoch_stopper_callback",
            "straggler_detection_callback",
            "fault_tolerance_callback",
        )
    },
    **{
        f"exp_manager.{name}": "this NeMo service is not part of nest-ssl"
        for name in (
            "mlflow_logger_kwargs",
            "dllogger_logger_kwargs",
            "clearml_logger_kwargs",
            "neptune_logger_kwargs",
            "ipl_epoch_stopper_callback_params",
            "straggler_detection_params",
            "fault_tolerance",
        )
    },
    "exp_manager.checkpoint_callback_params.filepath": "the folder is `dirpath`",
    "exp_manager.checkpoint_callback_params.model_parallel_size": "nest-ssl has no model parallelism",
    "exp_manager.checkpoint_callback_params.async_save": "checkpoints are written synchronously and atomically",
    "exp_manager.checkpoint_callback_params.save_last_n_optim_states": "every checkpoint holds the optimizer",
    "exp_manager.checkpoint_callback_params.auto_insert_metric_name": "names are always written out",
}


def unused_keys(model_prefix: str = "model") -> dict[str, str]:
    """Return all unused keys as dotted paths, for a model section at `model_prefix`."""
    keys = {f"{model_prefix}.{key}": reason for key, reason in UNUSED_MODEL_KEYS.items()}
    for section in ("train_ds", "validation_ds", "test_ds"):
        keys.update({f"{model_prefix}.{section}.{key}": reason for key, reason in UNUSED_DATASET_KEYS.items()})
    return keys | UNUSED_ROOT_KEYS
