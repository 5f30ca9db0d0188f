"""Pre-training, from a configuration to a `.nemo` file. Read this to see what a run does."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from nest_ssl.checkpoint.initialize import maybe_init_from_pretrained_checkpoint
from nest_ssl.config import DatasetConfig, ExperimentConfig, NestConfig
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.training import experiment
from nest_ssl.training.averaging import ExponentialAverage
from nest_ssl.training.checkpoints import checkpoint_callbacks
from nest_ssl.training.early_stopping import StopEarly, check_monitors
from nest_ssl.training.experiment import RunFolder
from nest_ssl.training.metrics_csv import MetricsCsv, forget_after
from nest_ssl.training.module import PretrainingModule
from nest_ssl.training.nonfinite import SkipNonFinite
from nest_ssl.training.progress import ProgressReport
from nest_ssl.training.run_log import log_to_file
from nest_ssl.training.seeding import Stage, seed_everything
from nest_ssl.training.time_limit import TimePerRun
from nest_ssl.training.trainer import build_trainer
from nest_ssl.training.validation_sets import validation_sets
from nest_ssl.training.watch import Watch
from nest_ssl.watchdog.agent import RankAgent

log = logging.getLogger(__name__)


def pretrain(cfg: NestConfig, agent: RankAgent | None = None, folder: RunFolder | None = None) -> RunFolder:
    """Pre-train, or go on with, the run that `cfg` describes; the folder of the run, if none is given a new one.

    `agent` makes this process visible to the monitor, and lets it stop at a step that all ranks agree on.
    """
    exp = cfg.exp_manager or ExperimentConfig()
    folder = folder or experiment.run_folder(cfg)
    metrics = MetricsCsv(folder.metrics_csv)
    checkpoint = experiment.checkpoint_to_resume(folder, exp)
    watch = None if agent is None else Watch(agent)
    with _lightnings_complaints():
        callbacks = _callbacks(cfg, exp, folder, metrics)
    if watch is not None:
        callbacks = [*watch.callbacks(cfg, folder, checkpoint), *callbacks, *watch.last_callbacks(cfg, folder)]
    rank = agent.facts if agent is not None and agent.facts.world_size > 1 else None
    options = cfg.trainer
    if not validation_sets(cfg.model.validation_ds):
        options = replace(options, limit_val_batches=0)  # else Lightning takes every epoch's end for a validation
    with _lightnings_complaints():
        trainer = build_trainer(options, callbacks, [metrics, *_loggers(exp, folder)], rank)
    seed_everything(cfg.seed, Stage.WEIGHTS)
    module = PretrainingModule(EncDecDenoiseMaskedTokenPredModel(cfg.model), cfg, folder.path, watch)
    if checkpoint is None:
        maybe_init_from_pretrained_checkpoint(module.model, cfg)
    with contextlib.ExitStack() as stack:
        if trainer.is_global_zero:
            stack.enter_context(experiment.created(folder, cfg))
        stack.enter_context(
            log_to_file(folder.path, exp, global_rank=trainer.global_rank, local_rank=trainer.local_rank)
        )
        if trainer.is_global_zero:
            _say_where(checkpoint, folder)
        if watch is not None:
            watch.joins()
        with _lightnings_complaints():
            trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
    return folder


@contextlib.contextmanager
def _lightnings_complaints() -> Iterator[None]:
    """What Lightning has to say about the configuration is for the user, as what we say."""
    try:
        yield
    except MisconfigurationException as error:
        raise ValueError(f"trainer: {' '.join(str(error).split())}") from error


def _say_where(checkpoint: Path | None, folder: RunFolder) -> None:
    if checkpoint is None:
        log.info("run folder: %s", folder.path)
        return
    try:
        content = torch.load(checkpoint, map_location="meta", weights_only=True)
    except pickle.UnpicklingError:
        content = {}  # types of NeMo's in it
    if "data_position" not in content or "optimizer_states" not in content:
        raise ValueError(
            f"{checkpoint}: cannot be gone on from: it holds weights alone, or NeMo has written it. Start from its "
            f"weights with 'init_from_ptl_ckpt=\"{checkpoint}\"' and another exp_manager.name."
        )
    step = int(content["global_step"])
    forget_after(folder.metrics_csv, step)
    log.info("run folder: %s; resumed at step %d from %s", folder.path, step, checkpoint.name)


def _callbacks(cfg: NestConfig, exp: ExperimentConfig, folder: RunFolder, metrics: MetricsCsv) -> list[Callback]:
    callbacks: list[Callback] = [SkipNonFinite(cfg.trainer.log_every_n_steps or 50)]
    if exp.ema.enable:
        if "fsdp" in str(cfg.trainer.strategy).lower():
            raise ValueError("exp_manager.ema: there is no average of weights that are sharded. Use strategy=ddp.")
        callbacks.append(ExponentialAverage(exp.ema))  # before the checkpoints, which save what it averages
    sets = validation_sets(cfg.model.validation_ds)
    _check_endless(cfg, exp, validates=bool(sets))
    check_monitors(exp, list(sets))
    if not cfg.trainer.fast_dev_run:  # a try must leave nothing that a run would go on from
        callbacks += checkpoint_callbacks(exp, folder, cfg.name)
    if exp.create_early_stopping_callback:
        callbacks.append(StopEarly(exp.early_stopping_callback_params, has_validation=bool(sets)))
    if exp.max_time_per_run is not None:
        callbacks.append(TimePerRun(exp.max_time_per_run))
    if cfg.trainer.enable_progress_bar is not False:
        callbacks.append(ProgressReport(metrics))
    return callbacks


def _check_endless(cfg: NestConfig, exp: ExperimentConfig, *, validates: bool) -> None:
    """Where an epoch has no end, nothing may wait for it."""
    data = cfg.model.train_ds
    if data is None or not _is_endless(data) or (validates and isinstance(cfg.trainer.val_check_interval, int)):
        return
    if validates:
        log.warning(
            "model.train_ds: an epoch has no end, so nothing is validated; set trainer.val_check_interval to a number "
            "of batches and trainer.check_val_every_n_epoch=null."
        )
    params = exp.checkpoint_callback_params
    if exp.create_checkpoint_callback and not (params.every_n_train_steps or params.train_time_interval):
        log.warning(
            "model.train_ds: an epoch has no end, so nothing is saved before the end of the run; set "
            "exp_manager.checkpoint_callback_params.every_n_train_steps."
        )


def _is_endless(config: DatasetConfig) -> bool:
    if not config.use_lhotse:
        return config.endless
    from nest_ssl.data.sources.lhotse import is_endless

    return is_endless(config)


def _loggers(exp: ExperimentConfig, folder: RunFolder) -> list[Logger]:
    loggers: list[Logger] = []
    if exp.create_tensorboard_logger:
        importlib.import_module("torch.utils.tensorboard")  # if it is broken, that is known before anything is written
        loggers.append(TensorBoardLogger(folder.path, name="", version="", **(exp.summary_writer_kwargs or {})))
    if exp.create_wandb_logger:
        if importlib.util.find_spec("wandb") is None:
            raise ValueError("exp_manager.create_wandb_logger: wandb is not installed. pip install 'nest-ssl[wandb]'")
        from lightning.pytorch.loggers import WandbLogger

        loggers.append(WandbLogger(save_dir=folder.path, **(exp.wandb_logger_kwargs or {})))
    return loggers
