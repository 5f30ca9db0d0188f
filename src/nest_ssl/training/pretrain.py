"""Pre-training, from a configuration to a `.nemo` file. Read this to see what a run does."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from nest_ssl.checkpoint.initialize import maybe_init_from_pretrained_checkpoint
from nest_ssl.config import ExperimentConfig, NestConfig
from nest_ssl.distributed.agent import RankAgent
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.training import experiment
from nest_ssl.training.averaging import ExponentialAverage
from nest_ssl.training.checkpoints import checkpoint_callbacks
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

log = logging.getLogger(__name__)


def pretrain(cfg: NestConfig, agent: RankAgent | None = None) -> RunFolder:
    """Pre-train, or go on with, the run that `cfg` describes; the folder of the run.

    `agent` makes this process visible to the monitor, and lets it stop at a step that all ranks agree on.
    """
    exp = cfg.exp_manager or ExperimentConfig()
    folder = experiment.run_folder(cfg)
    metrics = MetricsCsv(folder.metrics_csv)
    checkpoint = experiment.checkpoint_to_resume(folder, exp)
    watch = None if agent is None else Watch(agent)
    callbacks = _callbacks(cfg, exp, folder, metrics)
    if watch is not None:
        callbacks = [*watch.callbacks(cfg, folder, checkpoint), *callbacks, *watch.last_callbacks(cfg, folder)]
    rank = agent.facts if agent is not None and agent.facts.world_size > 1 else None
    options = cfg.trainer
    if not validation_sets(cfg.model.validation_ds):
        options = replace(options, limit_val_batches=0)  # else Lightning takes every epoch's end for a validation
    trainer = build_trainer(options, callbacks, [metrics, *_loggers(exp, folder)], rank)
    seed_everything(cfg.seed, Stage.WEIGHTS)
    module = PretrainingModule(EncDecDenoiseMaskedTokenPredModel(cfg.model), cfg, folder.path, watch)
    if checkpoint is None:
        maybe_init_from_pretrained_checkpoint(module.model, cfg)
    if trainer.is_global_zero:
        experiment.create(folder, cfg)
    with log_to_file(folder.path, exp, global_rank=trainer.global_rank, local_rank=trainer.local_rank):
        if trainer.is_global_zero:
            _say_where(checkpoint, folder)
        if watch is not None:
            watch.joins()
        trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
    return folder


def _say_where(checkpoint: Path | None, folder: RunFolder) -> None:
    if checkpoint is None:
        log.info("run folder: %s", folder.path)
        return
    step = int(torch.load(checkpoint, map_location="meta", weights_only=True)["global_step"])
    forget_after(folder.metrics_csv, step)
    log.info("run folder: %s; resumed at step %d from %s", folder.path, step, checkpoint.name)


def _callbacks(cfg: NestConfig, exp: ExperimentConfig, folder: RunFolder, metrics: MetricsCsv) -> list[Callback]:
    callbacks: list[Callback] = [SkipNonFinite(cfg.trainer.log_every_n_steps or 50)]
    if exp.ema.enable:
        if "fsdp" in str(cfg.trainer.strategy).lower():
            raise ValueError("exp_manager.ema: there is no average of weights that are sharded. Use strategy=ddp.")
        callbacks.append(ExponentialAverage(exp.ema))  # before the checkpoints, which save what it averages
    callbacks += checkpoint_callbacks(exp, folder, cfg.name)
    if exp.create_early_stopping_callback:
        callbacks.append(EarlyStopping(**vars(exp.early_stopping_callback_params)))
    if exp.max_time_per_run is not None:
        callbacks.append(TimePerRun(exp.max_time_per_run))
    if cfg.trainer.enable_progress_bar is not False:
        callbacks.append(ProgressReport(metrics))
    return callbacks


def _loggers(exp: ExperimentConfig, folder: RunFolder) -> list[Logger]:
    loggers: list[Logger] = []
    if exp.create_tensorboard_logger:
        loggers.append(TensorBoardLogger(folder.path, name="", version="", **(exp.summary_writer_kwargs or {})))
    if exp.create_wandb_logger:
        from lightning.pytorch.loggers import WandbLogger

        loggers.append(WandbLogger(save_dir=folder.path, **(exp.wandb_logger_kwargs or {})))
    return loggers
