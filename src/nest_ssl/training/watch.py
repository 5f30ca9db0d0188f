"""Training under watch: the callbacks that keep the beacon, compare the ranks, stop together and report failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from torch import Tensor, nn
from torch.optim import Optimizer

from nest_ssl.config import NestConfig
from nest_ssl.data import AudioNoiseBatch
from nest_ssl.run_folder import LAST
from nest_ssl.training.compare import CompareRanks
from nest_ssl.training.experiment import RunFolder, saves_when_stopped
from nest_ssl.training.module import PretrainingModule
from nest_ssl.training.moments import is_within_step, validation_is_next
from nest_ssl.training.stage_hooks import attach_stage_hooks
from nest_ssl.training.trace import BarrierBeforeEncoder, TraceStages
from nest_ssl.watchdog.agent import RankAgent, ReadReport
from nest_ssl.watchdog.rank import InitPart, Stage, validation_part


class Stopped(Exception):  # noqa: N818 - it is no error
    """All ranks have saved at the agreed step; this one leaves."""


class StageMarks(Callback):
    """Keeps this rank's place in the beacon up to date, and writes down the exception that ends it."""

    def __init__(self, agent: RankAgent) -> None:
        self.agent, self.mark = agent, agent.mark
        self._validates = False
        self._ended = False
        self._validation_batches = 0
        self._steps = 0
        self._lengths: Tensor | None = None
        self._files: list[str] = []
        self._sample_rate = 16_000
        agent.describe_work = self._describe_batch

    def _describe_batch(self) -> list[str]:
        if self._lengths is None:
            return []
        durations_s = [float(length) / self._sample_rate for length in self._lengths]
        files = ", ".join(self._files[:3]) + (", …" if len(self._files) > 3 else "")
        return [
            f"a batch of {len(durations_s)} utterances, {sum(durations_s):.1f} s in all, the longest "
            f"{max(durations_s):.1f} s: {files}"
        ]

    def enter(self, stage: Stage, part: int = 0) -> None:
        if self._validates:
            self.mark.enter(Stage.VALIDATION, validation_part(stage, part))
        else:
            self.mark.enter(stage, part)

    # ---- before the first step ----

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, PretrainingModule)
        self._sample_rate = pl_module.cfg.model.sample_rate
        attach_stage_hooks(pl_module.model, self.enter)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.mark.enter(Stage.OPTIMIZER))
        self.mark.step = trainer.global_step
        self.mark.enter(Stage.DATA)
        self.agent.trains = True

    # ---- a step ----

    def batch_arrives(self, batch: AudioNoiseBatch) -> None:
        """To be called with the batch still on the host."""
        self.enter(Stage.TRANSFER)
        self._lengths, self._files = batch.audio_len, batch.audio_filepaths

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.mark.enter(Stage.ENCODER)  # the hooks say it more exactly, but a step that is one CUDA graph calls none

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        self.mark.enter(Stage.BACKWARD)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self.mark.enter(Stage.OPTIMIZER)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.mark.finish_step(trainer.global_step, counts=self._steps > 0)
        self._steps += 1
        self.mark.enter(Stage.DATA)

    # ---- validation and checkpoints ----

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validates = True
        self.enter(Stage.DATA)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._validation_batches += 1
        self.mark.finish_step(self.mark.step, counts=self._validation_batches > 1)
        self.enter(Stage.DATA)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validates = False

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not self._ended:
            self.mark.enter(Stage.CHECKPOINT)

    # ---- the end ----

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.mark.enter(Stage.END)
        self._ended = True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, Stopped):
            self.agent.fail(exception)


def share_statistics(module: nn.Module) -> None:
    """Give every rank rank 0's batch statistics, the only buffers that training changes: validation is of one model."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            for buffer in part.buffers(recurse=False):
                torch.distributed.broadcast(buffer, src=0)


class AfterCheckpoints(Checkpoint):
    """Lightning runs callbacks of this class last: whatever was saved is saved, and the next wait is for data."""

    def __init__(self, marks: StageMarks) -> None:
        self.marks = marks

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size > 1:
            share_statistics(pl_module)  # what other callbacks had to mend is mended

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.marks.enter(Stage.DATA)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.marks.enter(Stage.DATA)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.marks.enter(Stage.DATA)


class StopTogether(Checkpoint):
    """Saves at the step that all ranks have agreed to stop at, and leaves before the next one.

    A validation that is due after that step takes place first, as before any other checkpoint.
    """

    def __init__(self, agent: RankAgent, checkpoints: Path) -> None:
        self.agent, self.path = agent, checkpoints / LAST
        self._saved_at: int | None = None
        self._last_step = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = trainer.global_step > self._last_step  # gradients of a step must not be lost
        self._last_step = trainer.global_step
        if stepped and not validation_is_next(trainer):
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and not is_within_step(trainer):
            self._save_if_due(trainer)

    def _save_if_due(self, trainer: pl.Trainer) -> None:
        if self._saved_at is None and self.agent.stop_is_due(trainer.global_step):
            self._saved_at = trainer.global_step
            trainer.save_checkpoint(self.path)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._saved_at is not None:
            raise Stopped(f"saved and stopped after step {self._saved_at}")


class Watch:
    """What a watched run adds to training."""

    def __init__(self, agent: RankAgent) -> None:
        self.agent = agent
        self.marks = StageMarks(agent)
        self._reports: dict[str, ReadReport] = {}
        self._next_slot = 0

    def callbacks(self, cfg: NestConfig, folder: RunFolder, checkpoint: Path | None) -> list[Callback]:
        """To be listed before all others; `checkpoint` is what the run goes on from."""
        callbacks: list[Callback] = [CompareRanks(cfg, folder.path, checkpoint, self.agent.mark), self.marks]
        if cfg.debug.trace:
            callbacks.append(TraceStages())
        if cfg.debug.barrier:
            callbacks.append(BarrierBeforeEncoder(cfg.watchdog.floor_s))
        return callbacks

    def last_callbacks(self, cfg: NestConfig, folder: RunFolder) -> list[Callback]:
        """To be listed after all others."""
        stopping = [StopTogether(self.agent, folder.checkpoints)] if saves_when_stopped(cfg) else []
        return [*stopping, AfterCheckpoints(self.marks)]

    def reads(self, section: str, num_workers: int) -> ReadReport:
        """For the loader of a section: reports what its processes read."""
        if section not in self._reports:
            beacon = self.agent.beacon
            self._reports[section] = ReadReport(beacon.path, self.agent.facts.local_rank, self._next_slot)
            self._next_slot += 1 + num_workers
        return self._reports[section]

    def joins(self) -> None:
        """From here on this rank waits for the others to form the process group."""
        self.agent.show()
        self.agent.mark.enter(Stage.INIT, InitPart.JOIN)
