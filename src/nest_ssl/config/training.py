"""The `trainer:` and `exp_manager:` sections, and the whole configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from nest_ssl.config.checks import at_least, probability
from nest_ssl.config.model import ModelConfig
from nest_ssl.config.targets import resolve_target
from nest_ssl.config.watchdog import DebugConfig, LaunchConfig, WatchdogConfig


@dataclass
class TrainerConfig:
    """`trainer:`: Lightning's Trainer arguments, by their own names."""

    devices: int | str | list[int] = 1
    """Devices per node; -1 or 'auto': all."""
    num_nodes: int = 1
    """Machines."""
    accelerator: str = "auto"
    """auto, cpu or gpu."""
    strategy: str | dict[str, Any] = "auto"
    """auto, ddp and its variants, fsdp, or a `_target_` of one of Lightning's strategies."""
    precision: int | str | None = 32
    """32, bf16 or 16."""
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    """Optimizer steps; -1: until max_epochs."""
    min_steps: int | None = None
    max_time: str | dict[str, int] | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    overfit_batches: int | float = 0.0
    fast_dev_run: int | bool = False
    val_check_interval: int | float | None = 1.0
    """Validate after this share of an epoch (float) or this many batches (int)."""
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = 0
    log_every_n_steps: int | None = 10
    enable_checkpointing: bool | None = False
    """Left to exp_manager."""
    enable_progress_bar: bool | None = True
    enable_model_summary: bool | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: int | float | None = None
    gradient_clip_algorithm: str | None = None
    deterministic: bool | str | None = None
    benchmark: bool | None = False
    inference_mode: bool = True
    use_distributed_sampler: bool = False
    """Always false here: the batch plan gives every rank its slice."""
    profiler: str | None = None
    detect_anomaly: bool = False
    sync_batchnorm: bool = False
    """Share batch statistics between GPUs: two collectives per conformer layer, one forward and one backward."""
    reload_dataloaders_every_n_epochs: int = 0
    default_root_dir: str | None = None
    logger: bool | None = False
    """Left to exp_manager."""

    def __post_init__(self) -> None:
        at_least("trainer.num_nodes", self.num_nodes, 1)
        at_least("trainer.accumulate_grad_batches", self.accumulate_grad_batches, 1)
        if self.overfit_batches:
            raise ValueError("trainer.overfit_batches: the batch plan knows no such thing. Use limit_train_batches.")
        if isinstance(self.strategy, dict):
            name = resolve_target(self.strategy.get("_target_"), "trainer.strategy._target_")
            if not name.endswith("Strategy"):
                raise ValueError(f"trainer.strategy._target_: {name} is not a strategy.")


@dataclass
class CheckpointConfig:
    """`exp_manager.checkpoint_callback_params:`."""

    monitor: str = "val_loss"
    mode: str = "min"
    save_top_k: int = 3
    """Keep this many checkpoints with the best `monitor`; -1: all."""
    save_last: bool = True
    every_n_train_steps: int | None = None
    every_n_epochs: int | None = None
    filename: str | None = None
    dirpath: str | None = None
    prefix: str | None = None
    postfix: str = ".nemo"
    """What the name of the `.nemo` file ends with, after `prefix` or the run's name."""
    verbose: bool = False
    save_weights_only: bool = False
    save_best_model: bool = False
    """At the end, make the `.nemo` file of the best checkpoint, not of the last weights."""
    always_save_nemo: bool = False
    """Write a `.nemo` with every checkpoint."""
    save_nemo_on_train_end: bool = True
    save_on_train_epoch_end: bool = False
    train_time_interval: str | None = None
    """Also save every DD:HH:MM:SS."""

    def __post_init__(self) -> None:
        where = "exp_manager.checkpoint_callback_params"
        if not self.postfix.endswith(".nemo"):
            raise ValueError(f"{where}.postfix: {self.postfix!r} does not end with '.nemo'.")
        interval = self.train_time_interval
        if interval is not None and not re.fullmatch(r"\d+:\d+:\d+:\d+", interval):
            raise ValueError(f"{where}.train_time_interval: {interval!r} is not of the form DD:HH:MM:SS.")
        if interval is not None and self.every_n_train_steps is not None:
            raise ValueError(f"{where}: give train_time_interval or every_n_train_steps, not both.")
        if self.save_weights_only and self.always_save_nemo:
            raise ValueError(f"{where}: save_weights_only saves no more than always_save_nemo does; give one of them.")


@dataclass
class EarlyStoppingConfig:
    """`exp_manager.early_stopping_callback_params:`."""

    monitor: str = "val_loss"
    mode: str = "min"
    min_delta: float = 0.001
    patience: int = 10
    verbose: bool = True
    strict: bool = True
    check_finite: bool = True
    stopping_threshold: float | None = None
    divergence_threshold: float | None = None
    check_on_train_epoch_end: bool | None = None
    """Look at the end of an epoch, not after a validation; null: only if there is no validation."""
    log_rank_zero_only: bool = False


@dataclass
class EmaConfig:
    """`exp_manager.ema:`: a running average of the weights."""

    enable: bool = False
    decay: float = 0.999
    """Share of the average that stays at each update."""
    validate_original_weights: bool = False
    """Validate the weights of training, not the average."""
    every_n_steps: int = 1
    """Steps between updates."""

    def __post_init__(self) -> None:
        probability("exp_manager.ema.decay", self.decay)
        at_least("exp_manager.ema.every_n_steps", self.every_n_steps, 1)


@dataclass
class ExperimentConfig:
    """`exp_manager:`: folders, loggers, checkpoints."""

    exp_dir: str | None = None
    """Root of all experiments; null: ./nest_experiments."""
    explicit_log_dir: str | None = None
    """This very folder, in place of exp_dir/name/version."""
    name: str | None = None
    version: str | None = None
    use_datetime_version: bool = True
    """Name the version folder by date and time; false: version_0, version_1, …"""
    resume_if_exists: bool = False
    resume_ignore_no_checkpoint: bool = False
    resume_from_checkpoint: str | None = None
    create_tensorboard_logger: bool = True
    summary_writer_kwargs: dict[str, Any] | None = None
    create_wandb_logger: bool = False
    wandb_logger_kwargs: dict[str, Any] | None = None
    create_checkpoint_callback: bool = True
    checkpoint_callback_params: CheckpointConfig = field(default_factory=CheckpointConfig)
    create_early_stopping_callback: bool = False
    early_stopping_callback_params: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    create_preemption_callback: bool = True
    """Save and leave on SIGTERM."""
    files_to_copy: list[str] | None = None
    """Files to keep with the run."""
    log_step_timing: bool = True
    """Log `train_step_timing`, the seconds of a step."""
    log_local_rank_0_only: bool = False
    """Keep a log file of the first rank of each machine only."""
    log_global_rank_0_only: bool = False
    """Keep a log file of rank 0 only."""
    max_time_per_run: str | None = None
    """DD:HH:MM:SS after which a run ends; the same command goes on with it, for as long again."""
    ema: EmaConfig = field(default_factory=EmaConfig)

    def __post_init__(self) -> None:
        if self.ema.enable and self.checkpoint_callback_params.save_weights_only:
            raise ValueError(
                "exp_manager.ema: with checkpoint_callback_params.save_weights_only, checkpoints would hold the weights"
                " of training, not the average. Leave one of the two out."
            )


InitFrom = str | dict[str, Any] | None
"""A path or hub name, or a mapping of names to {path|name, include, exclude}."""


@dataclass
class NestConfig:
    """The whole yaml."""

    model: ModelConfig
    name: str = "NEST-FastConformer-SSL"
    seed: int = 0
    """Of everything random: weights, order, noise, masks, dropout."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    exp_manager: ExperimentConfig | None = field(default_factory=ExperimentConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    init_from_nemo_model: InitFrom = None
    init_from_ptl_ckpt: InitFrom = None
    init_from_pretrained_model: InitFrom = None

    def __post_init__(self) -> None:
        train_ds, limit = self.model.train_ds, self.trainer.limit_train_batches
        if train_ds is not None and train_ds.endless and limit not in (None, 1.0):
            raise ValueError(
                "trainer.limit_train_batches: endless data would begin anew after so many batches, and never show the "
                "rest. Set trainer.max_steps, and trainer.val_check_interval with trainer.check_val_every_n_epoch=null."
            )
