"""The model as Lightning trains it: steps, logging, optimizer, loaders, and what a checkpoint holds."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from nest_ssl.captured import CapturedLoss
from nest_ssl.config import DatasetConfig, NestConfig
from nest_ssl.config.parse import MISSING
from nest_ssl.data import AudioNoiseBatch, build_loader
from nest_ssl.data.loader import PlannedLoader
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel, MaskedPrediction
from nest_ssl.nemo_file import nemo_config
from nest_ssl.training.metrics import Throughput, token_metrics
from nest_ssl.training.optimizers import build_optimizer
from nest_ssl.training.schedules import build_schedule
from nest_ssl.training.seeding import Stage, seed_everything

log = logging.getLogger(__name__)

_PREFIX = "model."


@dataclass
class DataPosition:
    """Where a run stood in its data."""

    epoch: int
    batch: int
    """Batches of the epoch that every rank has trained on."""
    world_size: int
    plan_hash: str

    def apply(self, loader: PlannedLoader, world_size: int) -> None:
        """Let `loader` go on from here; says what changes if its plan is another one."""
        batch = self.batch
        if world_size != self.world_size:
            batch = self.batch * self.world_size // world_size
            log.warning(
                "resumed on %d ranks, was %d: the batches are other ones, and a step sees %.3g x as much audio; "
                "going on at batch %d of epoch %d, the same share of the epoch",
                *(world_size, self.world_size, world_size / self.world_size, batch, self.epoch),
            )
        elif loader.plan_hash != self.plan_hash:
            log.warning(
                "the data or its batches have changed since the checkpoint; going on at batch %d of epoch %d of the "
                "new plan, so some utterances of this epoch may be read twice or not at all",
                *(batch, self.epoch),
            )
        loader.start_at(self.epoch, batch)


def _in_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class PretrainingModule(pl.LightningModule):
    """NEST pre-training of one model."""

    def __init__(self, model: EncDecDenoiseMaskedTokenPredModel, cfg: NestConfig, run_dir: Path | None = None) -> None:
        super().__init__()
        self.model = model
        self.cfg = cfg
        self.run_dir = run_dir
        self.throughput = Throughput(cfg.model.sample_rate)
        self.resume_at: DataPosition | None = None
        self._captured: CapturedLoss | None = None

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
        """One loader, or none when no validation manifest is given."""
        config = self.cfg.model.validation_ds
        given = config is not None and config.manifest_filepath not in (None, MISSING)
        return [self._loader("validation_ds", config, same_every_epoch=True)] if given else []

    def _loader(self, section: str, config: DatasetConfig | None, *, same_every_epoch: bool) -> PlannedLoader:
        if config is None or config.manifest_filepath in (None, MISSING):
            raise ValueError(
                f"model.{section}.manifest_filepath: no manifest is given. Add model.{section}.manifest_filepath=FILE; "
                f"'nest-ssl prepare FOLDER --output FILE' writes one."
            )
        name = f"bad_files_{section}_rank{self.global_rank}.jsonl"
        return build_loader(
            config,
            rank=self.global_rank,
            world_size=self.world_size,
            seed=self.cfg.seed,
            bad_files_path=None if self.run_dir is None else self.run_dir / name,
            same_every_epoch=same_every_epoch,
        )

    # ---- steps ----

    def on_before_batch_transfer(self, batch: AudioNoiseBatch, dataloader_idx: int) -> AudioNoiseBatch:
        if self.trainer.training:
            self.throughput.batch_arrives(batch)
        return batch

    def on_train_batch_start(self, batch: AudioNoiseBatch, batch_idx: int) -> None:
        seed_everything(self.cfg.seed, Stage.TRAIN, self.current_epoch, batch_idx, self.global_rank)

    def training_step(self, batch: AudioNoiseBatch, batch_idx: int) -> Tensor:
        predicted = self._predict(batch)
        size = len(batch.sample_id or ()) or 1
        logged: dict[str, Any] = {"train_loss": predicted.loss.detach(), **token_metrics(predicted)}
        logged["learning_rate"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log_dict(logged, batch_size=size)
        epoch = {"train_loss_epoch": logged["train_loss"], "learning_rate_epoch": logged["learning_rate"]}
        self.log_dict(epoch, on_step=False, on_epoch=True, batch_size=size)
        if (self.trainer.global_step + 1) % (self.cfg.trainer.log_every_n_steps or 50) == 0:
            self.log_dict(self.throughput.report(), batch_size=size)
        return predicted.loss

    def on_train_batch_end(self, outputs: Any, batch: AudioNoiseBatch, batch_idx: int) -> None:
        self.throughput.batch_done()

    def on_validation_batch_start(self, batch: AudioNoiseBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        seed_everything(self.cfg.seed, Stage.VALIDATION, dataloader_idx, batch_idx, self.global_rank)

    def validation_step(self, batch: AudioNoiseBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        predicted = self._predict(batch)
        metrics = {"val_loss": predicted.loss, "val_accuracy": token_metrics(predicted)["accuracy"]}
        self.log_dict(metrics, batch_size=len(batch.sample_id or ()) or 1, sync_dist=True, on_epoch=True)

    def on_validation_end(self) -> None:
        self.throughput.pause()

    def _predict(self, batch: AudioNoiseBatch) -> MaskedPrediction:
        assert batch.audio is not None
        assert batch.audio_len is not None
        assert batch.noisy_audio is not None
        assert batch.noisy_audio_len is not None
        tensors = (batch.audio, batch.audio_len, batch.noisy_audio, batch.noisy_audio_len)
        if not self.model.training:
            return self.model.masked_loss(*tensors)
        if self._captured is None:  # made at the first step: the model stands on its device, with its final layers
            self._captured = CapturedLoss(self.model)
        return self._captured(*tensors)

    # ---- optimizer ----

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.model, self.cfg.model.optim)
        if self.cfg.model.optim.sched is None:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        max_steps = int(steps) if steps != float("inf") else None
        schedule = build_schedule(optimizer, self.cfg.model.optim.sched, max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # ---- checkpoints: NeMo's parameter names, and the configuration ----

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.removeprefix(_PREFIX): value for name, value in state.items()}
        checkpoint["hyper_parameters"] = {"cfg": nemo_config(self.model.cfg, type(self.model).__name__)}
        checkpoint["data_position"] = vars(self._data_position())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {f"{_PREFIX}{name}": value for name, value in state.items()}
        if "data_position" in checkpoint:
            self.resume_at = DataPosition(**checkpoint["data_position"])

    def _data_position(self) -> DataPosition:
        loader = self.trainer.train_dataloader
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return DataPosition(
            epoch=self.current_epoch,
            # `processed` counts the batch that is being finished; `completed` does not yet, within its last hook.
            batch=progress.processed,
            world_size=self.world_size,
            plan_hash=loader.plan_hash if isinstance(loader, PlannedLoader) else "",
        )
