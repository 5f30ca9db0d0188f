"""The model as Lightning trains it: steps, logging, optimizer, loaders, and what a checkpoint holds."""

from __future__ import annotations

import functools
import math
import operator
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn

from nest_ssl.config import DatasetConfig, NestConfig
from nest_ssl.config.parse import MISSING
from nest_ssl.data import AudioNoiseBatch, build_loader
from nest_ssl.data.batch.loader import PlannedLoader
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.nemo_file import nemo_config
from nest_ssl.objective import MaskedPrediction
from nest_ssl.training import sharding
from nest_ssl.training.data_position import DataPosition
from nest_ssl.training.epoch_means import EpochMeans
from nest_ssl.training.metrics import Throughput, TokenCounts, count_tokens
from nest_ssl.training.moments import is_within_step
from nest_ssl.training.optimizers import build_optimizer
from nest_ssl.training.schedules import build_schedule
from nest_ssl.training.seeding import Stage, seed_everything
from nest_ssl.training.validation_sets import validation_sets

if TYPE_CHECKING:
    from nest_ssl.training.watch import Watch

_PREFIX = "model."


def model_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's weights, by NeMo's names, out of the state of the module around it."""
    return {name.removeprefix(_PREFIX): value for name, value in state.items()}


def _take_model_weights(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The other way round: what a checkpoint holds becomes the state of the module around the model."""
    for name in [name for name in state if name.startswith(prefix)]:
        if not name.startswith(f"{prefix}{_PREFIX}"):
            state[f"{prefix}{_PREFIX}{name.removeprefix(prefix)}"] = state.pop(name)


def _in_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class PretrainingModule(pl.LightningModule):
    """NEST pre-training of one model."""

    def __init__(
        self,
        model: EncDecDenoiseMaskedTokenPredModel,
        cfg: NestConfig,
        run_dir: Path | None = None,
        watch: Watch | None = None,
    ) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_take_model_weights)  # type: ignore[no-untyped-call]
        self.model = model
        self.cfg = cfg
        self.run_dir = run_dir
        self.watch = watch
        self.throughput = Throughput(cfg.model.sample_rate)
        self.epoch_means = EpochMeans()
        self.resume_at: DataPosition | None = None
        self.val_names: list[str] = []
        self._val_losses: list[list[Tensor]] = []
        self._val_tokens: list[list[TokenCounts]] = []

    # ---- who and how many ----

    @property
    def world_size(self) -> int:
        """Ranks of the run: the trainer's, else the process group's, else 1."""
        if self._trainer is not None:
            return self._trainer.world_size
        return torch.distributed.get_world_size() if _in_process_group() else 1

    @property
    def global_rank(self) -> int:
        if self._trainer is not None:
            return self._trainer.global_rank
        return torch.distributed.get_rank() if _in_process_group() else 0

    @property
    def local_rank(self) -> int:
        """The trainer's, else what the launcher says (not rank modulo world size), else 0."""
        if self._trainer is not None:
            return self._trainer.local_rank
        return int(os.environ.get("LOCAL_RANK", "0"))

    # ---- data ----

    def setup_training_data(self, config: DatasetConfig) -> None:
        """Train on `config` from the next epoch on."""
        self.cfg.model.train_ds = config

    def setup_validation_data(self, config: DatasetConfig) -> None:
        self.cfg.model.validation_ds = config

    def train_dataloader(self) -> PlannedLoader:
        loader = self._loader("train_ds", self.cfg.model.train_ds, same_every_epoch=False)
        if self.resume_at is not None:
            self.resume_at.apply(loader, self.world_size)
        return loader

    def val_dataloader(self) -> list[PlannedLoader]:
        """A loader for every validation set; none when no manifest is given."""
        sets = validation_sets(self.cfg.model.validation_ds)
        self.val_names = list(sets)
        return [self._loader(f"validation_ds{name and '.'}{name}", sets[name], same_every_epoch=True) for name in sets]

    def _loader(self, section: str, config: DatasetConfig | None, *, same_every_epoch: bool) -> PlannedLoader:
        if config is None or (config.manifest_filepath in (None, MISSING) and not config.use_lhotse):
            raise ValueError(
                f"model.{section}.manifest_filepath: no manifest is given. Add model.{section}.manifest_filepath=FILE; "
                f"'nest-ssl prepare FOLDER --output FILE' writes one."
            )
        name = f"bad_files_{section.replace('.', '_')}_rank{self.global_rank}.jsonl"
        reads = None if self.watch is None else self.watch.reads(section, config.num_workers)
        loader = build_loader(
            config,
            rank=self.global_rank,
            world_size=self.world_size,
            seed=self.cfg.seed,
            bad_files_path=None if self.run_dir is None else self.run_dir / name,
            same_every_epoch=same_every_epoch,
            on_read=None if reads is None else reads.on_read,
            mix=False,
        )
        if reads is not None:
            loader.collate_fn = reads.batch_is_made
        return loader

    # ---- steps ----

    def on_before_batch_transfer(self, batch: AudioNoiseBatch, dataloader_idx: int) -> AudioNoiseBatch:
        if self.watch is not None:
            self.watch.marks.batch_arrives(batch)
        if self.trainer.training:
            self.throughput.batch_arrives(batch)
        return batch

    def transfer_batch_to_device(
        self, batch: AudioNoiseBatch, device: torch.device, dataloader_idx: int
    ) -> AudioNoiseBatch:
        """Without waiting for it."""
        return batch.to(device, non_blocking=True).mixed()

    def on_train_start(self) -> None:
        """A run that was saved at the last batch of an epoch begins the next one.

        Lightning sees to that only where it knows how long an epoch is.
        """
        loop = self.trainer.fit_loop.epoch_loop
        at_end = loop.restarted_on_train_batch_end and loop.batch_progress.is_last_batch
        if at_end and math.isinf(self.trainer.num_training_batches):
            loop.batch_progress.increment_completed()
            for progress in (loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress):
                progress.reset_on_run()
            loop.reset_restart_stage()

    def on_train_batch_start(self, batch: AudioNoiseBatch, batch_idx: int) -> None:
        # What loggers count with: after a resume Lightning's own is one behind, or not, as the checkpoint was written.
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = self.trainer.global_step
        # It also forgets to count the epoch that follows one whose last batch it was resumed from, and would then take
        # the next checkpoint in the middle of an epoch for one at its end.
        progress: Any = self.trainer.fit_loop.epoch_progress
        for count in (progress.current, progress.total):
            count.ready = count.started = count.processed + 1
        seed_everything(self.cfg.seed, Stage.TRAIN, self.current_epoch, batch_idx, self.global_rank)

    def training_step(self, batch: AudioNoiseBatch, batch_idx: int) -> Tensor:
        predicted = self._predict(batch)
        size = len(batch.sample_id or ()) or 1
        logged: dict[str, Any] = {"train_loss": predicted.loss.detach(), **count_tokens(predicted).metrics()}
        # A tensor of the host: Lightning would copy a number to the GPU, and wait for it, in every step.
        logged["learning_rate"] = torch.tensor(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log_dict(logged, batch_size=size)
        epoch = {"train_loss_epoch": logged["train_loss"], "learning_rate_epoch": logged["learning_rate"]}
        self.epoch_means.add(self.current_epoch, epoch, size)
        is_logged = (self.trainer.global_step + 1) % (self.cfg.trainer.log_every_n_steps or 50) == 0
        if is_logged and not is_within_step(self.trainer):
            speed = self.throughput.report()
            if not (self.cfg.exp_manager and self.cfg.exp_manager.log_step_timing):
                del speed["train_step_timing"]
            self.log_dict({name: torch.tensor(value) for name, value in speed.items()}, batch_size=size)
        return predicted.loss

    def on_train_batch_end(self, outputs: Any, batch: AudioNoiseBatch, batch_idx: int) -> None:
        self.throughput.batch_done()

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.epoch_means.means())

    def on_validation_batch_start(self, batch: AudioNoiseBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        seed_everything(self.cfg.seed, Stage.VALIDATION, dataloader_idx, batch_idx, self.global_rank)

    def on_validation_epoch_start(self) -> None:
        self._val_losses = [[] for _ in self.val_names]
        self._val_tokens = [[] for _ in self.val_names]

    def validation_step(self, batch: AudioNoiseBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        predicted = self._predict(batch)
        self._val_losses[dataloader_idx].append(predicted.loss)
        self._val_tokens[dataloader_idx].append(count_tokens(predicted))

    def on_validation_epoch_end(self) -> None:
        """`val_loss`, the mean of all batches as NeMo's, and `val_accuracy`; of several sets also NAME_val_loss, …"""
        sets = list(zip(self.val_names, self._val_losses, self._val_tokens, strict=True))
        everything = ("", [x for _, losses, _ in sets for x in losses], [x for *_, tokens in sets for x in tokens])
        for name, losses, tokens in [everything, *(sets if len(sets) > 1 else [])]:
            if losses:
                self.log_dict(self._validation_metrics(name and f"{name}_", losses, tokens), rank_zero_only=True)

    def _validation_metrics(self, prefix: str, losses: list[Tensor], tokens: list[TokenCounts]) -> dict[str, Tensor]:
        """Over all ranks."""
        reduce = self.trainer.strategy.reduce
        total = functools.reduce(operator.add, tokens)
        total = TokenCounts(*(reduce(count.float(), reduce_op="sum") for count in vars(total).values()))
        metrics = total.metrics()
        return {
            f"{prefix}val_loss": reduce(torch.stack(losses).mean(), reduce_op="mean"),
            f"{prefix}val_accuracy": metrics["accuracy"],
            f"{prefix}val_most_frequent_token": metrics["most_frequent_token"],
        }

    def on_validation_end(self) -> None:
        self.throughput.pause()

    def _predict(self, batch: AudioNoiseBatch) -> MaskedPrediction:
        assert batch.audio is not None
        assert batch.audio_len is not None
        assert batch.noisy_audio is not None
        assert batch.noisy_audio_len is not None
        tensors = (batch.audio, batch.audio_len, batch.noisy_audio, batch.noisy_audio_len)
        return self.model.masked_loss(*tensors)

    # ---- optimizer ----

    def configure_optimizers(self) -> Any:
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if scaled and self.cfg.model.optim.fused and self.cfg.trainer.gradient_clip_val:
            raise ValueError(
                "model.optim.fused: with trainer.precision=16 a fused optimizer takes gradients that are still scaled, "
                "so trainer.gradient_clip_val would clip them to nothing. Leave out one of the three."
            )
        optimizer = build_optimizer(self.model, self.cfg.model.optim, loss_is_scaled=scaled)
        if self.cfg.model.optim.sched is None:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        max_steps = int(steps) if steps != float("inf") else None
        schedule = build_schedule(optimizer, self.cfg.model.optim.sched, max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def setup(self, stage: str) -> None:
        self.epoch_means = EpochMeans()
        sharding.prepare(self, self.trainer)

    def gradient_norm(self) -> Tensor:
        """Of the gradient after it was averaged over the ranks; stays on the device."""
        if isinstance(self.trainer.strategy, FSDPStrategy):
            return sharding.clip_gradient(self.trainer, math.inf)
        return torch.nn.utils.get_total_norm(p.grad for p in self.parameters() if p.grad is not None)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """By norm unless told otherwise. Lightning refuses it for fused optimizers in bf16, and by norm for FSDP."""
        if not gradient_clip_val:
            return
        if gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(self.parameters(), gradient_clip_val)
        elif isinstance(self.trainer.strategy, FSDPStrategy):
            sharding.clip_gradient(self.trainer, gradient_clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    # ---- checkpoints: NeMo's parameter names, and the configuration ----

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = model_weights(checkpoint["state_dict"])
        checkpoint["hyper_parameters"] = {"cfg": nemo_config(self.model.cfg, type(self.model).__name__)}
        checkpoint["data_position"] = vars(self._data_position())
        checkpoint["epoch_means"] = self.epoch_means.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "data_position" not in checkpoint or "loops" not in checkpoint:  # of weights alone
            return
        self.resume_at = DataPosition(**checkpoint["data_position"])
        if "epoch_means" in checkpoint:  # older ones have none
            self.epoch_means.resume(checkpoint["epoch_means"])
        # Lightning counts the batches of the epoch too, and ends it by its count.
        moved = self.resume_at.batch_on(self.world_size) - self.resume_at.batch
        counted = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
        counted.update({name: count + moved for name, count in counted.items() if isinstance(count, int)})
        if isinstance(self.trainer.train_dataloader, PlannedLoader):  # FSDP loads the checkpoint after the data
            self.resume_at.apply(self.trainer.train_dataloader, self.world_size)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, as of averaged weights: the watch belongs to the one that trains."""
        return {**super().__getstate__(), "watch": None}

    def _data_position(self) -> DataPosition:
        loader = self.trainer.train_dataloader
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        # `processed` counts the batch that is being finished; `completed` does not yet, within its last hook.
        within_batch = progress.current.completed < progress.current.processed
        at_end = within_batch and progress.is_last_batch and math.isinf(self.trainer.num_training_batches)
        return DataPosition(
            epoch=self.current_epoch + 1 if at_end else self.current_epoch,
            batch=0 if at_end else progress.current.processed,
            world_size=self.world_size,
            plan_hash=loader.plan_hash if isinstance(loader, PlannedLoader) else "",
        )
