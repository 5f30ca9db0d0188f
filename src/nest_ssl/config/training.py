"""The `trainer:`, `exp_manager:`, `watchdog:`, `launch:` and `debug:` sections, and the whole configuration."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from nest_ssl.config.checks import (
    Count,
    Finite,
    Positive,
    Range,
    Seed,
    ShareBelowOne,
    check_ranges,
    duration_s,
    local_paths,
    one_of,
    plain_path,
    quoted,
    short,
    stays_inside,
)
from nest_ssl.config.model import ModelConfig, PreprocessorConfig, same_rate
from nest_ssl.config.targets import resolve_target

LIGHTNING = "Bring your own pl.Trainer instead: nest_ssl.lightning, examples/train_lightning.py."

NO_EFFECT: dict[str, str] = {
    "use_distributed_sampler": "the batch plan gives every rank its share of the data",
    "limit_test_batches": "pre-training has no test loop",
    "limit_predict_batches": "pre-training has no prediction loop",
    "reload_dataloaders_every_n_epochs": "the batch plan shuffles every epoch without new loaders",
    "default_root_dir": "exp_manager.exp_dir decides where a run is kept",
    "enable_checkpointing": "exp_manager.create_checkpoint_callback decides",
    "logger": "exp_manager creates the loggers",
    "enable_autolog_hparams": "hparams.yaml always contains the configuration",
    "model_registry": "belongs to a service of Lightning's authors",
}
"""Fields of Lightning's Trainer that have no effect on results or on stopping; the log names those that are set."""

REFUSED: dict[str, str] = {
    "overfit_batches": "the batch plan has no such mode. Use trainer.limit_train_batches.",
    "callbacks": f"the training loop calls no callbacks. {LIGHTNING}",
    "plugins": f"the training loop takes no plugins. {LIGHTNING}",
    "barebones": "it would switch off checkpoints and logging. Use benchmarks/train_step.py to time steps.",
}
"""Fields of Lightning's Trainer that must not be set."""

PRECISIONS: dict[str, str] = {
    "32": "32",
    "32-true": "32",
    "None": "32",
    "bf16": "bf16-mixed",
    "bf16-mixed": "bf16-mixed",
    "16": "16-mixed",
    "16-mixed": "16-mixed",
}
"""Accepted values of `trainer.precision`, including NeMo's short names."""

STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true", "fsdp")
PROFILERS = ("simple", "advanced", "pytorch")
Batches = Annotated[int | float, Range(0, advice="Use null for all batches.")]
"""A number of batches (int), or a share of them (float)."""
Devices = Annotated[int, Range(-1, 10_000, advice="Use a count (4), device numbers ([0,2]), or -1 for all.")]
Limit = Annotated[int, Range(-1, advice="Use -1 for no limit.")]


@dataclass
class TrainerConfig:
    """`trainer:`: the arguments of Lightning's Trainer, under their own names.

    Every field works, or has no effect and is logged (`NO_EFFECT`), or is refused (`REFUSED`).
    """

    devices: Devices | str | list[int] = 1
    """Devices per node; -1 or 'auto': all."""
    num_nodes: Annotated[int, Range(1, 100_000)] = 1
    """Number of machines."""
    accelerator: str = "auto"
    """auto, cpu or gpu."""
    strategy: str | dict[str, Any] = "auto"
    """auto, ddp and its variants, fsdp, or a `_target_` of Lightning's DDPStrategy or FSDPStrategy."""
    precision: Annotated[int, Range(16, 32, advice="Use 32, bf16 or 16.")] | str | None = 32
    """32, bf16 or 16."""
    max_epochs: Limit | None = None
    """Epochs; -1: no limit."""
    min_epochs: Count | None = None
    max_steps: Limit = -1
    """Optimizer steps; -1: until max_epochs."""
    min_steps: Count | None = None
    max_time: str | dict[str, int] | None = None
    """DD:HH:MM:SS of training, including the time before a resume."""
    limit_train_batches: Batches | None = None
    """Batches of an epoch (int) or their share (float); null: all."""
    limit_val_batches: Batches | None = None
    """The same for validation; 0: no validation."""
    limit_test_batches: Batches | None = None
    limit_predict_batches: Batches | None = None
    overfit_batches: Batches = 0.0
    fast_dev_run: Count | bool = False
    """A dry run: train and validate on this many batches; save and log nothing."""
    val_check_interval: Batches | str | dict[str, int] | None = 1.0
    """Validate after this share of an epoch (float), this many batches (int), or this time (DD:HH:MM:SS)."""
    check_val_every_n_epoch: Positive | None = 1
    """Validate in every n-th epoch; null: count batches across epochs."""
    num_sanity_val_steps: Annotated[int, Range(-1)] | None = 0
    """Validation batches to run before training; -1: all."""
    log_every_n_steps: Count | None = 10
    enable_checkpointing: bool | None = False
    enable_progress_bar: bool | None = True
    enable_model_summary: bool | None = None
    accumulate_grad_batches: Positive = 1
    gradient_clip_val: Annotated[int | float, Range(0, above=True, advice="Use null for no clipping.")] | None = None
    """Largest norm, or value, of the gradient; null: no clipping."""
    gradient_clip_algorithm: str | None = None
    """norm or value; null: norm."""
    deterministic: bool | str | None = None
    """Use only deterministic algorithms; 'warn': warn where none exists."""
    benchmark: bool | None = False
    """Let cuDNN choose its algorithms by timing them."""
    inference_mode: bool = True
    """Validate under torch.inference_mode rather than torch.no_grad."""
    use_distributed_sampler: bool = False
    profiler: str | None = None
    """simple: time per stage. advanced: Python functions. pytorch: a trace of kernels. Written to the run folder."""
    detect_anomaly: bool = False
    """Raise where a backward pass first produces NaN; slow."""
    sync_batchnorm: bool = False
    """Share batch statistics between ranks: two collectives per conformer layer, one forward and one backward."""
    reload_dataloaders_every_n_epochs: Count = 0
    default_root_dir: str | None = None
    logger: bool | None = False
    callbacks: Any = None
    plugins: Any = None
    barebones: bool = False
    model_registry: str | None = None
    enable_autolog_hparams: bool = True

    def keys(self) -> list[str]:
        """Return the field names, so that `Trainer(**cfg.trainer)` works."""
        return [field.name for field in dataclasses.fields(self)]

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __post_init__(self) -> None:
        if self.gradient_clip_val == 0:  # Lightning's other way to write null
            self.gradient_clip_val = None
        _check_precision(self.precision)
        check_ranges("trainer", self)
        for name, reason in REFUSED.items():
            if getattr(self, name):
                raise ValueError(f"trainer.{name}: {reason}")
        _check_strategy(self.strategy)
        if self.gradient_clip_algorithm not in (None, "norm", "value"):
            given = quoted(self.gradient_clip_algorithm)
            raise ValueError(f"trainer.gradient_clip_algorithm: {given} is neither 'norm' nor 'value'.")
        if self.profiler not in (None, *PROFILERS):
            raise ValueError(f"trainer.profiler: there is no {quoted(self.profiler)}. Known: {', '.join(PROFILERS)}.")
        if self.deterministic not in (None, True, False, "warn"):
            raise ValueError(f"trainer.deterministic: {quoted(self.deterministic)} is neither true, false nor 'warn'.")
        self._check_counts()
        if self.max_time is not None and duration_s("trainer.max_time", self.max_time) == 0:
            raise ValueError("trainer.max_time: no time at all trains nothing. Use null for no limit.")

    def _check_counts(self) -> None:
        for name in ("limit_train_batches", "limit_val_batches"):
            limit = getattr(self, name)
            if isinstance(limit, float) and not 0 <= limit <= 1:
                raise ValueError(
                    f"trainer.{name}: {limit} is not a share between 0.0 and 1.0. Write a number of batches without a "
                    f"decimal point."
                )
        for name in ("max_steps", "max_epochs"):
            if getattr(self, name) == 0:
                raise ValueError(f"trainer.{name}: 0 trains nothing. Use -1 for no limit.")
        if self.limit_train_batches == 0:
            raise ValueError("trainer.limit_train_batches: 0 leaves nothing to train on. Use null for all batches.")
        for least, most in (("min_steps", "max_steps"), ("min_epochs", "max_epochs")):
            low, high = getattr(self, least), getattr(self, most)
            if low is not None and high is not None and -1 < high < low:
                raise ValueError(f"trainer.{least}: {low} is more than trainer.{most} {high}.")
        interval = self.val_check_interval
        if isinstance(interval, float) and not 0 < interval <= 1:
            raise ValueError(
                f"trainer.val_check_interval: {interval} is not a share of an epoch (above 0.0, at most 1.0). "
                f"Write a number of batches without a decimal point."
            )
        if isinstance(interval, int) and interval < 1:
            raise ValueError(f"trainer.val_check_interval: {interval} is less than 1 batch.")
        if isinstance(interval, (str, dict)):
            duration_s("trainer.val_check_interval", interval)
        if self.check_val_every_n_epoch is None and isinstance(interval, float):
            raise ValueError(
                "trainer.check_val_every_n_epoch=null: needs trainer.val_check_interval as a number of batches, "
                f"not a share of an epoch ({interval})."
            )

    def without_effect(self) -> list[str]:
        """Return one line for each field that is set but has no effect."""
        defaults = TrainerConfig()
        reasons = {
            name: reason
            for name, reason in NO_EFFECT.items()
            if getattr(self, name) not in (None, getattr(defaults, name))
        }
        tuned = self.strategy if isinstance(self.strategy, dict) else {}
        reasons |= {f"strategy.{name}": "our exchange of gradients needs no tuning" for name in TUNING if name in tuned}
        return [f"trainer.{name}: has no effect; {reason}." for name, reason in reasons.items()]

    @property
    def strategy_name(self) -> str:
        """'ddp' or 'fsdp'; one rank exchanges nothing with either."""
        name = self.strategy if isinstance(self.strategy, str) else self.strategy["_target_"].rpartition(".")[2]
        return "fsdp" if name in ("fsdp", "FSDPStrategy") else "ddp"

    @property
    def exchange_dtype(self) -> str:
        """'32' or 'bf16': how gradients travel between ranks."""
        given = self.strategy.get("exchange_dtype", "32") if isinstance(self.strategy, dict) else "32"
        return str(given)


def _check_precision(precision: int | str | None) -> None:
    if str(precision) in PRECISIONS:
        return
    if str(precision) in ("bf16-true", "16-true", "transformer-engine", "transformer-engine-float16"):
        raise ValueError(
            f"trainer.precision={precision}: would round the audio, and so change the target codes. Use bf16 or 16."
        )
    raise ValueError(f"trainer.precision={short(precision)}: not supported. Use 32, bf16 or 16.")


TUNING = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")
"""Options of DDPStrategy that tune torch's exchange of gradients; ours needs no tuning and gives the same results."""

STRATEGY_OPTIONS: dict[str, tuple[str, ...]] = {
    "DDPStrategy": ("process_group_backend", *TUNING, "exchange_dtype"),
    "FSDPStrategy": ("process_group_backend",),
    "SingleDeviceStrategy": (),
}
"""Accepted options of Lightning's strategies, and one of our own: `exchange_dtype` (32 or bf16), in which gradients
travel between ranks."""


def _check_strategy(strategy: str | dict[str, Any]) -> None:
    if isinstance(strategy, dict):
        name = resolve_target(strategy.get("_target_"), "trainer.strategy._target_")
        if name not in STRATEGY_OPTIONS:
            raise ValueError(f"trainer.strategy._target_: {name} is not a strategy.")
        for option in strategy.keys() - {"_target_", *STRATEGY_OPTIONS[name]}:
            raise ValueError(f"trainer.strategy.{short(option)}: not supported for {name}. {LIGHTNING}")
        if str(strategy.get("exchange_dtype", "32")) not in ("32", "bf16"):
            raise ValueError(f"trainer.strategy.exchange_dtype={short(strategy['exchange_dtype'])}: not 32 or bf16.")
        return
    if strategy not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise ValueError(f"trainer.strategy={short(strategy)}: not supported. Use one of {known}. {LIGHTNING}")


FIELD = re.compile(r"\{([^{}:]+)(:[^{}]*)?\}")
"""A value in `checkpoint_callback_params.filename`: `{epoch}`, `{val_loss:.4f}`."""

EveryN = Annotated[int, Range(0, advice="Use null to turn it off.")]


@dataclass
class CheckpointConfig:
    """`exp_manager.checkpoint_callback_params:`."""

    monitor: str = "val_loss"
    mode: str = "min"
    save_top_k: Annotated[int, Range(-1)] = 3
    """Keep this many checkpoints with the best `monitor`; -1: all."""
    save_last: bool = True
    every_n_train_steps: EveryN | None = None
    every_n_epochs: EveryN | None = None
    filename: str | None = None
    dirpath: str | None = None
    prefix: str | None = None
    postfix: str = ".nemo"
    """End of the `.nemo` file's name, after `prefix` or the run's name."""
    verbose: bool = False
    save_weights_only: bool = False
    save_best_model: bool = False
    """At the end, write the `.nemo` file from the best checkpoint instead of the last weights."""
    always_save_nemo: bool = False
    """Write a `.nemo` with every checkpoint."""
    save_nemo_on_train_end: bool = True
    save_on_train_epoch_end: bool = False
    train_time_interval: str | None = None
    """Save at least every DD:HH:MM:SS; null: every 15 minutes."""

    def __post_init__(self) -> None:
        where = "exp_manager.checkpoint_callback_params"
        check_ranges(where, self)
        one_of(f"{where}.mode", self.mode, ("min", "max"))
        plain_path(f"{where}.dirpath", self.dirpath)
        for key in ("prefix", "postfix", "filename"):
            stays_inside(f"{where}.{key}", getattr(self, key))
            if re.search(r"[/\\]", getattr(self, key) or ""):
                given = quoted(getattr(self, key))
                raise ValueError(f"{where}.{key}: {given} is not the name of a file. Give the folder as dirpath.")
        if re.search(r"[{}]", FIELD.sub("", self.filename or "")):
            raise ValueError(f"{where}.filename: {quoted(self.filename)}: a brace is missing. Write {{val_loss:.4f}}.")
        for name, spec in FIELD.findall(self.filename or ""):
            try:
                if re.search(r"\d{3}", spec):
                    raise ValueError("Too many digits")
                format(1 if name in ("epoch", "step") else 1.0, spec[1:])
            except ValueError as error:
                raise ValueError(
                    f"{where}.filename: {short(f'{{{name}{spec}}}')}: {error}. Write {{step}} or {{val_loss:.4f}}."
                ) from error
        if not self.postfix.endswith(".nemo"):
            raise ValueError(f"{where}.postfix: {quoted(self.postfix)} does not end with '.nemo'.")
        interval = self.train_time_interval
        if interval is not None:
            duration_s(f"{where}.train_time_interval", interval)
        if interval is not None and self.every_n_train_steps is not None:
            raise ValueError(f"{where}: give train_time_interval or every_n_train_steps, not both.")
        if self.save_weights_only and self.always_save_nemo:
            raise ValueError(
                f"{where}: save_weights_only and always_save_nemo both save only weights; give one of them."
            )


@dataclass
class EarlyStoppingConfig:
    """`exp_manager.early_stopping_callback_params:`."""

    monitor: str = "val_loss"
    mode: str = "min"
    min_delta: Annotated[float, Range(0)] = 0.001
    patience: Count = 10
    verbose: bool = True
    strict: bool = True
    check_finite: bool = True
    stopping_threshold: Finite | None = None
    divergence_threshold: Finite | None = None
    check_on_train_epoch_end: bool | None = None
    """Check at the end of an epoch instead of after a validation; null: only if there is no validation."""
    log_rank_zero_only: bool = False

    def __post_init__(self) -> None:
        check_ranges("exp_manager.early_stopping_callback_params", self)
        one_of("exp_manager.early_stopping_callback_params.mode", self.mode, ("min", "max"))


@dataclass
class EmaConfig:
    """`exp_manager.ema:`: a running average of the weights."""

    enable: bool = False
    decay: ShareBelowOne = 0.999
    """Share of the average that each update keeps."""
    validate_original_weights: bool = False
    """Validate the training weights instead of the average."""
    every_n_steps: Positive = 1
    """Steps between updates."""

    def __post_init__(self) -> None:
        check_ranges("exp_manager.ema", self)


@dataclass
class SummaryWriterConfig:
    """`exp_manager.summary_writer_kwargs:`, of TensorBoard's SummaryWriter."""

    max_queue: Annotated[int, Range(1, 1_000_000)] = 10
    """Values that wait before they are written."""
    flush_secs: Annotated[int, Range(1, 86_400)] = 120
    """Seconds between two writes."""
    filename_suffix: str = ""
    """End of the names of its files."""
    purge_step: Annotated[int, Range(0)] | None = None
    """Hide what an earlier run has logged from this step on."""

    def __post_init__(self) -> None:
        check_ranges("exp_manager.summary_writer_kwargs", self)
        stays_inside("exp_manager.summary_writer_kwargs.filename_suffix", self.filename_suffix or None)


@dataclass
class ExperimentConfig:
    """`exp_manager:`: folders, loggers, checkpoints."""

    exp_dir: str | None = None
    """Root folder of all experiments; null: ./nest_experiments."""
    explicit_log_dir: str | None = None
    """Use exactly this folder instead of exp_dir/name/version."""
    name: str | None = None
    version: str | None = None
    use_datetime_version: bool = True
    """Name the version folder by date and time; false: version_0, version_1, …"""
    resume_if_exists: bool = False
    resume_ignore_no_checkpoint: bool = False
    resume_from_checkpoint: str | None = None
    create_tensorboard_logger: bool = True
    summary_writer_kwargs: SummaryWriterConfig | None = None
    create_wandb_logger: bool = False
    wandb_logger_kwargs: dict[str, Any] | None = None
    create_checkpoint_callback: bool = True
    checkpoint_callback_params: CheckpointConfig = field(default_factory=CheckpointConfig)
    create_early_stopping_callback: bool = False
    early_stopping_callback_params: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    create_preemption_callback: bool = True
    """Save and exit on SIGTERM."""
    files_to_copy: list[str] | None = None
    """Files to copy into the run folder."""
    log_step_timing: bool = True
    """Log `train_step_timing`, the duration of a step in seconds."""
    log_local_rank_0_only: bool = False
    """Write a log file only for the first rank of each machine."""
    log_global_rank_0_only: bool = False
    """Write a log file only for rank 0."""
    max_time_per_run: str | None = None
    """End a run after DD:HH:MM:SS; the same command resumes it for another such period."""
    ema: EmaConfig = field(default_factory=EmaConfig)

    def __post_init__(self) -> None:
        for key in ("name", "version"):
            stays_inside(f"exp_manager.{key}", getattr(self, key))
        for key in ("exp_dir", "explicit_log_dir", "resume_from_checkpoint"):
            local_paths(f"exp_manager.{key}", getattr(self, key))
            plain_path(f"exp_manager.{key}", getattr(self, key))
        if self.max_time_per_run is not None and not duration_s("exp_manager.max_time_per_run", self.max_time_per_run):
            raise ValueError("exp_manager.max_time_per_run: 0 seconds leave no time to train.")
        if self.ema.enable and self.checkpoint_callback_params.save_weights_only:
            raise ValueError(
                "exp_manager.ema: with checkpoint_callback_params.save_weights_only, checkpoints would hold the "
                "training weights, not the average. Remove one of the two."
            )


# ---- what NeMo has no keys for ----


@dataclass
class WatchdogConfig:
    """`watchdog:`: what monitors the ranks."""

    enabled: bool | None = None
    """Detect stalled ranks; null: whenever there is more than one rank."""
    action: str = "end"
    """end: report, then end the job with exit code 75. report: write the report and let the job run."""
    floor_s: Annotated[float, Range(1, 1e7)] = 60.0
    """Shortest stall that counts. A stage may take this long, or 5 times its usual (p99) duration if that is longer."""
    init_s: Annotated[float, Range(1, 1e7)] = 900.0
    """How long starting may take: joining, comparing, loading manifests, the first step with its compilation."""

    def __post_init__(self) -> None:
        one_of("watchdog.action", self.action, ("end", "report"))
        check_ranges("watchdog", self)


@dataclass
class LaunchConfig:
    """`launch:`: how `nest-ssl pretrain` starts its ranks, unless torchrun or SLURM does."""

    max_restarts: Count = 0
    """Resume automatically up to this many times after a stall or the death of a rank."""

    def __post_init__(self) -> None:
        check_ranges("launch", self)


@dataclass
class DebugConfig:
    """`debug:`: slower, but shows more."""

    trace: bool = False
    """Print the inputs and outputs of every stage, on every rank."""
    barrier: bool = False
    """Wait for all ranks before the encoder, and name the ranks that do not arrive."""
    check_every_n_steps: Annotated[int, Range(0, advice="Use 0 for never.")] = 0
    """Compare every n-th replayed step with the same step uncaptured, and the weights of all ranks; 0: only the first
    replay of each shape."""
    collectives: bool = False
    """Make all collectives with one rank too, with itself: to measure what they cost."""
    share_gpu: bool = False
    """Let several ranks use one GPU: local rank r has GPU r % count. For tests: it shows behaviour, not speed."""

    def __post_init__(self) -> None:
        check_ranges("debug", self)


InitFrom = str | dict[str, Any] | None
"""A path or hub name, or a mapping of names to {path|name, include, exclude}."""


@dataclass
class NestConfig:
    """The whole yaml."""

    model: ModelConfig
    name: str = "NEST-FastConformer-SSL"
    seed: Seed = 0
    """Seed of everything random: weights, order, noise, masks, dropout."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    exp_manager: ExperimentConfig | None = field(default_factory=ExperimentConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    init_from_nemo_model: InitFrom = None
    init_from_ptl_ckpt: InitFrom = None
    init_from_pretrained_model: InitFrom = None

    def __post_init__(self) -> None:
        check_ranges("", self)
        stays_inside("name", self.name)
        _check_rates(self.model)
        _check_features(self.model.preprocessor)
        _check_masks_tokens(self.model)
        train_ds, limit = self.model.train_ds, self.trainer.limit_train_batches
        if train_ds is not None and train_ds.endless and limit not in (None, 1.0):
            raise ValueError(
                "trainer.limit_train_batches: endless data would start again after this many batches and never reach "
                "the rest. Set trainer.max_steps, and trainer.val_check_interval with "
                "trainer.check_val_every_n_epoch=null."
            )

    def unlikely(self) -> list[str]:
        """Return one line for each thing that is possible, but rarely meant."""
        model, steps, sched = self.model, self.trainer.max_steps, self.model.optim.sched
        lines = []
        if model.optim.lr == 0:
            lines.append("model.optim.lr: 0 changes no weight.")
        if sched is not None and sched.warmup_steps and 0 < steps <= sched.warmup_steps:
            lines.append(
                f"model.optim.sched.warmup_steps: the run ends after {steps} steps (trainer.max_steps), before the "
                f"warm-up of {sched.warmup_steps} steps does."
            )
        exp = self.exp_manager or ExperimentConfig()
        if not exp.create_early_stopping_callback and exp.early_stopping_callback_params != EarlyStoppingConfig():
            lines.append(
                "exp_manager.early_stopping_callback_params: has no effect without create_early_stopping_callback=true."
            )
        ema = exp.ema
        if ema.enable and 0 < steps < ema.every_n_steps:
            lines.append(
                f"exp_manager.ema.every_n_steps: the run ends after {steps} steps (trainer.max_steps), before the "
                f"first update of the average: what is validated and saved are the weights it began with."
            )
        for name, data in (("train_ds", model.train_ds), ("validation_ds", model.validation_ds)):
            lines += [f"model.{name}.{line}" for line in (data.without_effect() if data is not None else [])]
        if model.test_ds is not None and model.test_ds.manifest_filepath is not None:
            lines.append("model.test_ds: is not read; pre-training has no test loop. Use model.validation_ds.")
        if (short_block := _block_too_short(model)) is not None:
            lines.append(f"{short_block} Only neighbouring blocks do so together.")
        longest_s = None if model.train_ds is None else model.train_ds.max_duration
        block_s = model.masking.block_size * model.preprocessor.num_stride_samples / model.sample_rate
        ratio = model.masking.max_mask_ratio
        if longest_s is not None and block_s >= ratio * longest_s and model.mask_position != "post_conv":
            lines.append(
                f"model.masking.block_size: {model.masking.block_size} frames are more than max_mask_ratio, {ratio:g}, "
                f"of utterances of up to {longest_s:g} s (max_duration): of each only the first 8 are masked."
            )
        return lines


def _check_rates(model: ModelConfig) -> None:
    """Refuse sample rates that differ: features of another rate are other features, and nothing would fail."""
    for name in ("train_ds", "validation_ds", "test_ds"):
        if (one := getattr(model, name)) is not None:
            same_rate(f"model.{name}.sample_rate", one.sample_rate, model.sample_rate)


def _check_features(cfg: PreprocessorConfig) -> None:
    """Refuse features that leave out most of the audio."""
    where = "model.preprocessor"
    band_hz = (cfg.highfreq or cfg.sample_rate / 2) - cfg.lowfreq
    num_bins = int(band_hz * cfg.num_fft / cfg.sample_rate)
    if num_bins < cfg.features:  # 80 filters have 256 bins; the lowest take one or two each
        raise ValueError(
            f"{where}.features: {num_bins} frequencies between lowfreq and highfreq, {band_hz:g} Hz apart, do not fill "
            f"{cfg.features} mel filters. Both are in Hz."
        )
    if cfg.num_stride_samples > cfg.num_window_samples:
        raise ValueError(
            f"{where}.window_stride: {cfg.num_stride_samples} samples are more than a window, "
            f"{cfg.num_window_samples}: audio between two windows would be lost."
        )
    if cfg.num_stride_samples > cfg.sample_rate / 10:
        raise ValueError(f"{where}.window_stride: {cfg.num_stride_samples} samples are more than 0.1 s. NEST: 0.01 s.")


LEAST_MASK_PROB = 1e-5
"""One block in a quarter of an hour of audio."""


def _check_masks_tokens(model: ModelConfig) -> None:
    """Refuse a task without anything to learn: its loss would be 0, and its first checkpoint the best for ever."""
    masking, threshold = model.masking, model.loss.mask_threshold
    if model.quantizer.num_classes < 2:
        raise ValueError("model.num_classes: with 1 code every prediction is right. Use 2 or more (NEST: 8192).")
    if masking.mask_prob < LEAST_MASK_PROB:
        raise ValueError(
            f"model.masking.mask_prob: {masking.mask_prob:g} masks next to nothing, so there is nothing to predict. "
            "Raise it."
        )
    if threshold >= 1:
        raise ValueError("model.loss.mask_threshold: no token has more than all of its frames masked. Lower it.")
    # Neighbouring blocks can mask a token together. With 0.2 starts per frame that happens often enough to learn from.
    short_block = _block_too_short(model)
    if short_block is not None and (model.mask_position == "post_conv" or masking.mask_prob < 0.2):
        raise ValueError(short_block)


def _block_too_short(model: ModelConfig) -> str | None:
    """Return why no block masks a whole token, if that is so."""
    factor, block_size = model.encoder.subsampling_factor, model.masking.block_size
    needed = factor if model.mask_position == "post_conv" else math.floor(model.loss.mask_threshold * factor) + 1
    if block_size >= needed:
        return None
    return (
        f"model.masking.block_size: a block of {block_size} frames masks no token: a token has {factor} frames, of "
        f"which {needed} must be masked. Set model.masking.block_size to {needed} or more."
    )


# ---- a run that is resumed ----

_FROM_CHECKPOINT = "the checkpoint's weights are used"
IGNORED_ON_RESUME: dict[str, str] = {
    "init_from_nemo_model": _FROM_CHECKPOINT,
    "init_from_ptl_ckpt": _FROM_CHECKPOINT,
    "init_from_pretrained_model": _FROM_CHECKPOINT,
    "model.optim.initial_accumulator_value": "the optimizer's sums come from the checkpoint",
    "model.optim.sched.last_epoch": "the checkpoint decides the position on the schedule",
    "trainer.num_sanity_val_steps": "a resumed run validates where an uninterrupted run would have",
    "model.encoder.pos_emb_max_len": "positions are computed for each batch",
    "model.encoder.subsampling_conv_chunking_factor": "the result does not depend on it",
    "model.encoder.use_pytorch_sdpa": "nest-ssl chooses by itself, with the same results",
    "model.encoder.use_pytorch_sdpa_backends": "nest-ssl chooses by itself, with the same results",
    "model.encoder.sync_max_audio_length": "nest-ssl has no such collective",
    "model.quantizer.dist_fn": "both give the same codes",
    "model.test_ds": "pre-training has no test loop",
    **{f"trainer.{name}": reason for name, reason in NO_EFFECT.items()},
}
"""Keys that change nothing in a run that is resumed, with the reason. All other keys of the command take effect."""


def changed_keys(before: Any, now: NestConfig) -> dict[str, str]:
    """Return the keys that differ from `before`, the content of the run's hparams.yaml, with what each change does.

    Keys that `before` does not have were added by a newer version, and are passed over.
    """
    changes = {}
    for key, old, new in _differences(before, dataclasses.asdict(now)):
        reason = next((IGNORED_ON_RESUME[name] for name in _and_parents(key) if name in IGNORED_ON_RESUME), None)
        effect = "takes effect" if reason is None else f"ignored, because {reason}"
        changes[key] = f"{_shown(old)} → {_shown(new)}: {effect}"
    return changes


def _differences(before: Any, now: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in now:
            if key in before:
                yield from _differences(before[key], now[key], f"{where}.{key}" if where else str(key))
    elif before != now and not (before != before and now != now):  # nan is nan
        yield where, before, now


def _and_parents(key: str) -> Iterator[str]:
    while key:
        yield key
        key = key.rpartition(".")[0]


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
