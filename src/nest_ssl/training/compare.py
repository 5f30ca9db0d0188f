"""What all ranks compare before the first step: configuration, code, versions; then loaders and the checkpoint."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

import nest_ssl
from nest_ssl.config import NestConfig
from nest_ssl.data.batch.loader import PlannedLoader
from nest_ssl.launch.preflight import Facts, code_version, compare_ranks
from nest_ssl.watchdog.beacon import RankMark
from nest_ssl.watchdog.rank import InitPart, Stage


class CompareRanks(Callback):
    """Refuses to start ranks that would come apart. It talks through the process group's store, not by collectives."""

    def __init__(self, cfg: NestConfig, run_dir: Path, checkpoint: Path | None, mark: RankMark) -> None:
        self.cfg, self.run_dir, self.checkpoint, self.mark = cfg, run_dir, checkpoint, mark

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Before the model is wrapped: unequal models would fail there with a message of torch's."""
        versions = {"torch": torch.__version__, "lightning": lightning.__version__}
        facts = {
            "config": dataclasses.asdict(self.cfg),
            "code": code_version(Path(nest_ssl.__file__).parent),
            "versions": {**versions, "python": platform.python_version()},
            "world_size": trainer.world_size,
            "run folder": self.run_dir,
            "checkpoint": None if self.checkpoint is None else self.checkpoint.name,
        }
        self._compare(trainer, "start", facts)
        self.mark.enter(Stage.INIT, InitPart.LOADERS)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loaders = {"train_ds": trainer.train_dataloader}
        for number, loader in enumerate(trainer.val_dataloaders or ()):
            loaders[f"validation_ds.{number}"] = loader
        facts = {section: loader_facts(loader) for section, loader in loaders.items()}
        self._compare(trainer, "loaders", {**facts, "step": trainer.global_step})

    def _compare(self, trainer: pl.Trainer, name: str, facts: Facts) -> None:
        if trainer.world_size == 1:
            return
        self.mark.enter(Stage.INIT, InitPart.COMPARE)
        compare_ranks(
            torch.distributed.distributed_c10d._get_default_store(),
            name,
            facts,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            timeout_s=self.cfg.watchdog.init_s,
        )


def loader_facts(loader: Any) -> dict[str, Any]:
    """What must agree between the loaders of all ranks. The plan's hash covers batch size, drop_last and data."""
    if not isinstance(loader, PlannedLoader):
        return {"loader": type(loader).__name__}
    return {
        "plan": loader.plan_hash[:16],
        "batches": "no end" if loader.batches.utterances_per_epoch() is None else len(loader),
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
    }
