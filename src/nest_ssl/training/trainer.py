"""`Trainer` and `exp_manager`: the steps that NeMo's users know, and what they put together for the loop."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from nest_ssl.checkpoint import initialize
from nest_ssl.config import CheckpointConfig, DatasetConfig, ExperimentConfig, NestConfig, TrainerConfig, parse
from nest_ssl.config.checks import named_section
from nest_ssl.config.training import PRECISIONS, changed_keys
from nest_ssl.data import PlannedLoader, build_loader
from nest_ssl.fast.engine import accelerate
from nest_ssl.files import replace_text
from nest_ssl.launch.ranks import ALONE, from_environment
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.modules.batch_norm import synchronize_batch_norms
from nest_ssl.nemo_file import CheckpointError
from nest_ssl.run_folder import RunFolder, forget_after, logged_at, parse_hparams, ranks_per_node
from nest_ssl.training import experiment
from nest_ssl.training.ema import Average
from nest_ssl.training.loggers import Loggers, Progress, check_loggers, log_to_file, profiled
from nest_ssl.training.loop import Limits, Loop, num_batches
from nest_ssl.training.optimizers import build_optimizer, check_resumable
from nest_ssl.training.parallel import World, device_for, gpu_in_words, joined, uses_gpu
from nest_ssl.training.saving import Saver
from nest_ssl.training.schedules import build_schedule
from nest_ssl.training.sharding import shard
from nest_ssl.training.state import Trained, TrainState, check_inputs, examine_checkpoint, read_checkpoint, restore
from nest_ssl.training.step import Clipping, TrainStep
from nest_ssl.training.stopping import EarlyStopping, TimeLimits, check_monitors
from nest_ssl.training.validation import Validation, has_data, validation_sets
from nest_ssl.training.watching import Stopped, Watch, compare_loaders, compare_starts, look_closer, mark_stages
from nest_ssl.watchdog.agent import RankAgent
from nest_ssl.watchdog.rank import InitPart, RankFacts, Stage

log = logging.getLogger(__name__)


@dataclass
class Run:
    """What `hydra_runner` knows and the trainer needs: the whole configuration, this rank, and who watches it."""

    facts: RankFacts
    cfg: NestConfig | None = None
    agent: RankAgent | None = None
    folder: RunFolder | None = None


_current: ContextVar[Run | None] = ContextVar("run", default=None)


@contextlib.contextmanager
def current_run(run: Run) -> Iterator[None]:
    """Trainers that are made meanwhile belong to `run`."""
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)


class Trainer:
    """Trains a model, alone or as one of several ranks. Takes Lightning's arguments: `Trainer(**cfg.trainer)`.

    Under `hydra_runner` it also has the seed, the watchdog and the ranks of the configuration. Without it, it trains
    in this process alone, or as the rank that torchrun or SLURM made of it.
    """

    def __init__(self, **options: Any) -> None:
        self.config = parse(TrainerConfig, options, where="trainer")
        uses_gpu(self.config)
        self.run = _current.get() or Run(_facts(self.config))
        self.seed = 0 if self.run.cfg is None else self.run.cfg.seed
        """Of order, noise, masks and dropout."""
        self.exp = ExperimentConfig(create_tensorboard_logger=False)
        self.folder: RunFolder | None = None
        self.checkpoint: Path | None = None
        """What training resumes from."""
        self.state = TrainState()
        if self.is_global_zero:
            for line in self.config.without_effect():
                log.info("%s", line)

    @property
    def world_size(self) -> int:
        return self.run.facts.world_size

    @property
    def global_rank(self) -> int:
        return self.run.facts.rank

    @property
    def local_rank(self) -> int:
        return self.run.facts.local_rank

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def global_step(self) -> int:
        return self.state.step

    @property
    def current_epoch(self) -> int:
        return self.state.epoch

    def fit(self, model: EncDecDenoiseMaskedTokenPredModel) -> None:
        """Train `model`: restore, train, save. Nothing is written before the configuration has been checked."""
        cfg = self._whole_config(model)
        _check(cfg, self.exp)
        for line in cfg.unlikely() if self.is_global_zero else []:
            log.warning("%s", line)
        device_for(self.config, self.run.facts, share_gpu=cfg.debug.share_gpu)
        folder = self.folder or experiment.run_folder(self.exp, cfg.name)
        changed = self._changed_since(folder, cfg)  # before the new configuration replaces the old one
        watch = Watch(self.run.agent, cfg.model.sample_rate)
        try:
            with contextlib.ExitStack() as stack:
                if self.is_global_zero:
                    stack.enter_context(experiment.created(folder, cfg))
                stack.enter_context(
                    log_to_file(folder.path, self.exp, global_rank=self.global_rank, local_rank=self.local_rank)
                )
                # Mapped: all ranks of a node share the pages of the file, and none has a copy of its own.
                content = None if self.checkpoint is None else read_checkpoint(self.checkpoint, mmap=True)
                if self.checkpoint is not None and content is not None:
                    check_resumable(cfg.model.optim, content, self.checkpoint)
                    check_inputs(cfg.model.preprocessor, content)
                if self.is_global_zero:
                    log.info("run folder: %s%s", folder.path, _resumed_at(self.checkpoint, content))
                watch.joins()
                debug = cfg.debug
                join = joined(self.config, self.run.facts, share_gpu=debug.share_gpu, collectives=debug.collectives)
                with join as world, _torch_settings(self.config):
                    if self.run.agent is not None:
                        self.run.agent.gpu = gpu_in_words(world.device)
                    fit = Fit(self, cfg, model, folder, world, watch, content, changed)
                    del content
                    fit.run()
        except BaseException as error:
            watch.failed(error)
            raise

    def _changed_since(self, folder: RunFolder, cfg: NestConfig) -> dict[str, str]:
        """Return the keys that differ from the run that is resumed, with what each change does."""
        if self.checkpoint is None:
            return {}
        kept = [RunFolder(self.checkpoint.absolute().parent.parent).hparams, folder.hparams]
        for path in kept:
            if path.is_file():
                try:
                    return changed_keys(parse_hparams(path.read_text(encoding="utf-8")), cfg)
                except (ValueError, OSError, yaml.YAMLError) as error:
                    log.warning("%s: cannot be read (%s): what changed since is not known.", path, error)
                    return {}
        return {}

    def _whole_config(self, model: EncDecDenoiseMaskedTokenPredModel) -> NestConfig:
        base = self.run.cfg or NestConfig(model.cfg, seed=self.seed)
        return replace(base, model=model.cfg, trainer=self.config, exp_manager=self.exp)


def exp_manager(trainer: Trainer, cfg: ExperimentConfig | dict[str, Any] | None = None) -> Path:
    """Give `trainer` its run folder, loggers and checkpoints; the folder, which `fit` creates.

    It also decides which checkpoint training resumes from. A dry run resumes from none: after the last step it would
    have nothing left to do.
    """
    trainer.exp = ExperimentConfig() if cfg is None else parse(ExperimentConfig, cfg, where="exp_manager")
    check_loggers(trainer.exp)
    name = "default" if trainer.run.cfg is None else trainer.run.cfg.name
    trainer.folder = trainer.run.folder or experiment.run_folder(trainer.exp, name)
    say = log.warning if trainer.is_global_zero else log.debug
    checkpoint = trainer.folder.checkpoint_to_resume(trainer.exp, examine_checkpoint, say)
    trainer.checkpoint = None if trainer.config.fast_dev_run else checkpoint
    return trainer.folder.path


def maybe_init_from_pretrained_checkpoint(model: EncDecDenoiseMaskedTokenPredModel, cfg: NestConfig) -> None:
    """Load the starting weights that `init_from_*` names; a run that is resumed has its own."""
    given = [key for key in initialize.KEYS if getattr(cfg, key) is not None]
    checkpoint = getattr(model.trainer, "checkpoint", None)
    if given and checkpoint is not None:
        log.info("%s: not used, since the run resumes from %s", given[0], checkpoint.name)
        return
    initialize.maybe_init_from_pretrained_checkpoint(model, cfg)


def _facts(config: TrainerConfig) -> RankFacts:
    per_node = ranks_per_node(config.devices, config.accelerator, torch.cuda.device_count)
    found = from_environment(os.environ, per_node)
    if found is None and per_node * config.num_nodes > 1:
        raise ValueError(
            f"trainer.devices={config.devices}: this process is one rank of {per_node * config.num_nodes}, and nothing "
            f"has started the others. Decorate the function with nest_ssl.training.hydra_runner, or use torchrun."
        )
    if found is not None and found.world_size > 1:
        os.environ.update(found.variables())
    return found or ALONE


def _resumed_at(checkpoint: Path | None, content: dict[str, Any] | None) -> str:
    if checkpoint is None or content is None:
        return ""
    return f"; resumed at step {content['global_step']} from {checkpoint.name}"


def _check(cfg: NestConfig, exp: ExperimentConfig) -> None:
    """Refuse what cannot work before anything is written."""
    if cfg.trainer.strategy_name == "fsdp":
        _check_can_be_sharded(cfg)
    train_ds = cfg.model.train_ds
    if train_ds is None or not has_data(train_ds):
        raise ValueError(
            "model.train_ds.manifest_filepath: no manifest is given. Add model.train_ds.manifest_filepath=FILE; "
            "'nest-ssl prepare FOLDER --output FILE' writes one. Without data of your own, 'nest-ssl demo' makes some "
            "and trains on it."
        )
    sets = validation_sets(cfg.model.validation_ds)
    validates = bool(sets) and cfg.trainer.limit_val_batches != 0
    _check_endless(cfg, exp, train_ds, validates=validates)
    check_monitors(exp, list(sets), validates=validates)


def _check_can_be_sharded(cfg: NestConfig) -> None:
    if PRECISIONS[str(cfg.trainer.precision)] == "16-mixed":
        raise ValueError("trainer.precision=16: sharded gradients are not scaled. Use bf16, or strategy=ddp.")
    if cfg.model.mask_position == "post_conv":
        raise ValueError(
            "model.mask_position=post_conv: the subsampling also runs outside the encoder, where sharded weights are "
            "not gathered. Use pre_conv, or strategy=ddp."
        )
    if not cfg.model.encoder.untie_biases and cfg.model.encoder.self_attention_model == "rel_pos":
        raise ValueError(
            "model.encoder.untie_biases=false: layers that share weights cannot be sharded one by one. Use "
            "strategy=ddp."
        )


def _check_endless(cfg: NestConfig, exp: ExperimentConfig, data: DatasetConfig, *, validates: bool) -> None:
    """Where an epoch has no end, nothing may wait for it."""
    if not _is_endless(data):
        return
    trainer = cfg.trainer
    has_end = trainer.max_steps != -1 or trainer.max_time or exp.max_time_per_run or trainer.fast_dev_run
    if not has_end and trainer.max_epochs not in (None, -1) and trainer.limit_train_batches in (None, 1.0):
        raise ValueError("trainer.max_epochs: an epoch of endless data never ends. Set trainer.max_steps instead.")
    if validates and not isinstance(trainer.val_check_interval, (int, str, dict)):
        log.warning(
            "model.train_ds: an epoch has no end, so nothing is validated; set trainer.val_check_interval to a number "
            "of batches and trainer.check_val_every_n_epoch=null."
        )


def _is_endless(config: DatasetConfig) -> bool:
    if not config.use_lhotse:
        return config.endless
    from nest_ssl.data.sources.lhotse import is_endless

    return is_endless(config)


@contextlib.contextmanager
def _torch_settings(config: TrainerConfig) -> Iterator[None]:
    """`deterministic`, `benchmark` and `detect_anomaly`; put back afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
        torch.use_deterministic_algorithms(True, warn_only=config.deterministic == "warn")
    torch.backends.cudnn.benchmark = bool(config.benchmark) and not config.deterministic
    try:
        with torch.autograd.set_detect_anomaly(config.detect_anomaly):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def place_model(cfg: NestConfig, model: EncDecDenoiseMaskedTokenPredModel, world: World, watch: Watch) -> None:
    """The model on its device, the same on every rank."""
    config = cfg.trainer
    model.to(world.device)
    if config.sync_batchnorm and world.communicates:
        synchronized = synchronize_batch_norms(model) > 0
        if synchronized and world.is_first:
            log.info(
                "trainer.sync_batchnorm: all ranks meet twice per conformer layer in every step, and wait there "
                "for the slowest; trainer.sync_batchnorm=false gives each rank its own statistics."
            )
    world.copy_from_first(model.state_dict().values())
    if config.strategy_name == "fsdp" and world.size > 1:
        shard(model)
    watch.marks_gpu(world.device)
    if watch.agent is not None:
        mark_stages(model, lambda stage, part: watch.enter(stage, part))
    look_closer(cfg.debug, model, watch, world, cfg.watchdog.floor_s)


def build_step(
    cfg: NestConfig,
    model: EncDecDenoiseMaskedTokenPredModel,
    world: World,
    watch: Watch,
    total_steps: int | None,
) -> TrainStep:
    """The step of a run of `total_steps`, with its engine, optimizer, schedule and average; the model is placed."""
    config, optim, exp = cfg.trainer, cfg.model.optim, cfg.exp_manager or ExperimentConfig()
    precision = PRECISIONS[str(config.precision)]
    scaler = torch.amp.GradScaler(world.device.type) if precision == "16-mixed" else None
    sharded = config.strategy_name == "fsdp" and world.size > 1
    no_graphs = "the weights are sharded" if sharded else None
    if config.detect_anomaly:
        no_graphs = "trainer.detect_anomaly looks at every operation"
    engine = accelerate(
        model,
        compile=str(cfg.model.compile),
        activation_budget=cfg.model.activation_budget,
        autocast={"32": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}[precision],
        no_graphs=no_graphs,
    )
    optimizer = build_optimizer(model, optim, loss_is_scaled=scaler is not None)
    schedule = None
    if optim.sched is not None:
        schedule = build_schedule(optimizer, optim.sched, total_steps)
    most = config.gradient_clip_val
    return TrainStep(
        model,
        engine,
        optimizer,
        schedule,
        world,
        watch,
        accumulate=config.accumulate_grad_batches,
        clipping=Clipping(None if most is None else float(most), config.gradient_clip_algorithm == "value"),
        scaler=scaler,
        average=Average(exp.ema, model) if exp.ema.enable else None,
        exchange_dtype=torch.bfloat16 if config.exchange_dtype == "bf16" else torch.float32,
        check_every=cfg.debug.check_every_n_steps,
    )


@dataclass
class Fit:
    """Puts together what the loop needs, on this rank, and runs it."""

    trainer: Trainer
    cfg: NestConfig
    model: EncDecDenoiseMaskedTokenPredModel
    folder: RunFolder
    world: World
    watch: Watch
    checkpoint: dict[str, Any] | None
    changed: dict[str, str] = field(default_factory=dict)
    """Keys that differ from the run that is resumed, with what each change does."""
    exp: ExperimentConfig = field(init=False)

    def run(self) -> None:
        cfg, config, world, watch = self.cfg, self.cfg.trainer, self.world, self.watch
        self.exp = cfg.exp_manager or ExperimentConfig()
        watch.enter(Stage.INIT, InitPart.COMPARE)
        compare_starts(cfg, world, self.folder.path, self.trainer.checkpoint)
        watch.enter(Stage.INIT, InitPart.MODEL)
        place_model(cfg, self.model, world, watch)
        watch.enter(Stage.INIT, InitPart.LOADERS)
        loader = self._loader("train_ds", cfg.model.train_ds, same_every_epoch=False)
        validation_loaders = self._validation_loaders()
        limits = Limits(
            config,
            num_batches(loader, config.limit_train_batches, config.fast_dev_run),
            validates=bool(validation_loaders),
        )
        step = self._train_step(limits)
        step.engine.expect((shape.batch_size, shape.num_samples) for shape in loader.shapes())
        trained = Trained(self.model, step, loader, world.size, limits.num_batches)
        state = self._resumed(trained)
        if self.exp.resume_from_checkpoint is not None:
            state.memory.resumed_from = str(Path(self.exp.resume_from_checkpoint).expanduser().absolute())
        self.trainer.state = state
        watch.enter(Stage.INIT, InitPart.COMPARE)
        named = {f"validation_ds.{number}": one for number, one in enumerate(validation_loaders.values())}
        compare_loaders(cfg, world, {"train_ds": loader, **named}, state.step)
        validation = None
        if validation_loaders:
            validation = Validation(
                self.model, step.engine, validation_loaders, world, watch, config, self.trainer.seed
            )
        writes = world.is_first and not config.fast_dev_run
        loggers = Loggers(self.folder, self.exp, enabled=writes)
        progress = Progress(loggers, enabled=world.is_first and config.enable_progress_bar is not False)
        loop = Loop(
            config=config,
            exp=self.exp,
            seed=self.trainer.seed,
            world=world,
            watch=watch,
            state=state,
            trained=trained,
            step=step,
            loader=loader,
            validation=validation,
            limits=limits,
            saver=None if config.fast_dev_run else self._saver(),
            loggers=loggers,
            progress=progress,
            early_stopping=self._early_stopping(bool(validation_loaders)),
            time_limits=TimeLimits.of(config, self.exp),
            resumed=self.trainer.checkpoint is not None,
            begin_writing=partial(self._begin_writing, state.step) if writes else set,
        )
        if loop.saver is not None:
            loop.saver.last_is_good = self.trainer.checkpoint == self.folder.last_checkpoint  # it was examined
            loop.saver.reserve(trained)
        if world.is_first and config.enable_model_summary:
            _log_summary(self.model)
        progress.start(state.step, limits.total_steps(step.accumulate))
        try:
            with (
                contextlib.nullcontext() if loop.saver is None else loop.saver.finishing(),
                profiled(config.profiler, self.folder.path, watch, enabled=world.is_first),
            ):
                loop.run()
        except Stopped:
            watch.training_has_ended()  # leaving may take longer than a step: workers and the process group end
            world.leave()
            raise
        finally:
            progress.close()
            loggers.close()
        step.release()
        if loop.saver is not None:
            loop.saver.save_nemo_at_end(trained)
        world.leave()

    def _begin_writing(self, step: int) -> set[str]:
        """Write down what is run from `step` on; the metrics of the step before it that are in metrics.csv."""
        experiment.describe(self.folder, self.cfg)
        if self.trainer.checkpoint is None and not self.exp.resume_if_exists:
            return set()
        forget_after(self.folder.metrics_csv, step)  # a run that was killed before it saved starts again
        return logged_at(self.folder.metrics_csv, step - 1)

    # ---- parts ----

    def _resumed(self, trained: Trained) -> TrainState:
        """Return the state of the checkpoint; a refusal names what has changed in the model since then."""
        try:
            state = self._restored(trained)
        except CheckpointError as error:
            keys = ", ".join(key for key in self.changed if key.startswith("model."))
            raise CheckpointError(f"{error}\nChanged since then: {keys}." if keys else str(error)) from error
        for key, change in self.changed.items() if self.world.is_first else []:
            log.info("changed since the checkpoint: %s: %s", key, change)
        return state

    def _restored(self, trained: Trained) -> TrainState:
        """Where the run was, from its checkpoint; every rank checks the shards that it reads.

        If one of them is damaged, all ranks take the next checkpoint: a file was examined before they joined.
        """
        bad: dict[Path, str] = {}

        def examine(path: Path) -> str | None:
            if path in bad:
                raise CheckpointError(bad[path])
            return examine_checkpoint(path)

        while self.checkpoint is not None:
            content, self.checkpoint = self.checkpoint, None  # its tensors are copied, and can go
            if "shards" not in content:
                return restore(content, trained)
            state, why = TrainState(), ""
            try:
                state = restore(content, trained)
            except CheckpointError as error:
                why = str(error)
            reasons = sorted({reason for reason in self.world.votes(why) if reason})
            if not reasons:
                return state
            bad[content["shards"]] = reasons[0]
            say = log.warning if self.world.is_first else log.debug
            self.trainer.checkpoint = self.folder.checkpoint_to_resume(self.exp, examine, say)
            assert self.trainer.checkpoint is not None  # it would have been refused
            self.checkpoint = read_checkpoint(self.trainer.checkpoint, mmap=True)
            say(f"resumed at step {self.checkpoint['global_step']} from {self.trainer.checkpoint.name}")
        return TrainState()

    def _train_step(self, limits: Limits) -> TrainStep:
        total_steps = limits.total_steps(self.cfg.trainer.accumulate_grad_batches)
        step = build_step(self.cfg, self.model, self.world, self.watch, total_steps)
        step.engine.on_mismatch = self._report_mismatch
        return step

    def _report_mismatch(self, text: str) -> None:
        """A captured step was wrong: rank 0 writes it down where stalls and failures are written."""
        log.error("%s; training goes on without CUDA graphs.", text)
        if self.world.is_first:
            report = {"kind": "graph-mismatch", "step": self.trainer.state.step, "text": text, "time": time.time()}
            try:
                self.folder.incidents.mkdir(parents=True, exist_ok=True)
                replace_text(self.folder.incidents / f"graphs_step{self.trainer.state.step}.json", json.dumps(report))
            except OSError as error:
                log.warning("%s: the report could not be written: %s", self.folder.incidents, error)

    def _loader(self, section: str, config: DatasetConfig | None, *, same_every_epoch: bool) -> PlannedLoader:
        assert config is not None
        name = f"bad_files_{section.replace('.', '_')}_rank{self.world.rank}.jsonl"
        reads = self.watch.reads(section, config.num_workers)
        with named_section(f"model.{section}", config):
            loader = build_loader(
                config,
                rank=self.world.rank,
                world_size=self.world.size,
                seed=self.trainer.seed,
                bad_files_path=self.folder.path / name,
                same_every_epoch=same_every_epoch,
                on_read=None if reads is None else reads.on_read,
                mix=False,
            )
        loader.bad_data.count = self.world.counter()
        loader.batches.on_skip = partial(self.watch.enter, Stage.DATA)  # the stage begins again: it makes progress
        if reads is not None:
            loader.collate_fn = reads.batch_is_made
        return loader

    def _validation_loaders(self) -> dict[str, PlannedLoader]:
        if self.cfg.trainer.limit_val_batches == 0:
            return {}
        return {
            name: self._loader(f"validation_ds{'.' if name else ''}{name}", one, same_every_epoch=True)
            for name, one in validation_sets(self.cfg.model.validation_ds).items()
        }

    def _saver(self) -> Saver:
        params = self.exp.checkpoint_callback_params
        if not self.exp.create_checkpoint_callback:  # a stop that was asked for is saved all the same
            params = CheckpointConfig(
                dirpath=params.dirpath, save_top_k=0, save_last=False, save_nemo_on_train_end=False
            )
        return Saver(self.folder, params, self.exp.name or self.cfg.name, self.world, self.watch)

    def _early_stopping(self, has_validation: bool) -> EarlyStopping | None:
        if not self.exp.create_early_stopping_callback:
            return None
        return EarlyStopping(self.exp.early_stopping_callback_params, has_validation=has_validation)


def _log_summary(model: EncDecDenoiseMaskedTokenPredModel) -> None:
    """`trainer.enable_model_summary`: parameters by part."""
    for name, part in model.named_children():
        sizes = [(p.numel(), p.requires_grad) for p in part.parameters()]
        trained = sum(size for size, trains in sizes if trains)
        frozen = sum(size for size, trains in sizes if not trains)
        log.info("%-16s %-36s %13s trained, %11s frozen", name, type(part).__name__, f"{trained:,}", f"{frozen:,}")
