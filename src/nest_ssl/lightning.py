"""NEST pre-training as a LightningModule, for people who bring their own `lightning.pytorch.Trainer`.

`nest-ssl pretrain` does not use this file. It makes the same updates as that command's loop: the same weights, batches,
noise and masks, hence the same losses. What the loop adds around the step (run folder, watchdog, non-finite guard, CUDA
graphs, averaged weights, resuming in the middle of an epoch) is left to Lightning or to the user.
`examples/train_lightning.py` is a complete program.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from nest_ssl.config import DatasetConfig, NestConfig, parse
from nest_ssl.config.model_section import unused_keys
from nest_ssl.data import AudioNoiseBatch, PlannedLoader, build_loader
from nest_ssl.data.randomness import Use, seed_everything
from nest_ssl.launch.ranks import BEACON_VARIABLE
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.nemo_file import nemo_config
from nest_ssl.training.optimizers import build_optimizer
from nest_ssl.training.schedules import build_schedule
from nest_ssl.training.validation import has_data, validation_sets

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise ImportError("nest_ssl.lightning needs Lightning: pip install 'nest-ssl[lightning]'") from error

PREFIX = "model."
"""Where the model's parameters are in this module's state_dict. Checkpoints have NeMo's names, without it."""


class PretrainingModule(pl.LightningModule):
    """The model of `cfg.model`, its data and its optimizer.

    A `model` can be given, for example one that starts from other weights; otherwise it is built from `cfg.seed`, as
    `nest-ssl pretrain` builds it. Checkpoints contain NeMo's parameter names and the configuration: `nest_ssl.load`
    and `init_from_ptl_ckpt` read them. They can be resumed by Lightning alone, at the end of an epoch.
    """

    def __init__(self, cfg: NestConfig, model: EncDecDenoiseMaskedTokenPredModel | None = None) -> None:
        super().__init__()
        if model is None:
            seed_everything(cfg.seed, Use.WEIGHTS)
            model = EncDecDenoiseMaskedTokenPredModel(cfg.model)
        self.cfg = cfg
        self.model = model
        self.train_ds, self.validation_ds = cfg.model.train_ds, cfg.model.validation_ds
        self._val_losses: dict[str, list[Tensor]] = {}

    @property
    def world_size(self) -> int:
        return 1 if self._trainer is None else self._trainer.world_size

    @property
    def local_rank(self) -> int:
        """The trainer's; before there is one, the launcher's."""
        return int(os.environ.get("LOCAL_RANK", "0")) if self._trainer is None else self._trainer.local_rank

    # ---- data: the batch plan gives every rank its own batches ----

    def setup_training_data(self, config: Any) -> None:
        """Train on `config`, NeMo's `train_ds:` section as a mapping or a dataclass."""
        self.train_ds = parse(DatasetConfig, config, "model.train_ds", unused_keys())

    def setup_validation_data(self, config: Any) -> None:
        """Validate on `config`; a list of manifests is one set each."""
        self.validation_ds = parse(DatasetConfig, config, "model.validation_ds", unused_keys())

    def setup(self, stage: str) -> None:
        """Refuse, on several ranks, what works only in our own loop."""
        if BEACON_VARIABLE in os.environ:
            raise ValueError(
                "nest_ssl.lightning: nest-ssl has launched this rank, and its watchdog would take it for stalled: "
                "Lightning's loop reports no progress. Use hydra_runner(…, launch=False); Lightning starts the ranks."
            )
        if self.world_size > 1 and self.trainer._accelerator_connector.use_distributed_sampler:
            raise ValueError(
                "trainer.use_distributed_sampler: the batch plan already gives each rank its own batches, and "
                "Lightning's sampler would split them again. Use Trainer(use_distributed_sampler=False)."
            )

    def train_dataloader(self) -> PlannedLoader:
        config = self.train_ds
        if config is None or not has_data(config):
            raise ValueError("model.train_ds.manifest_filepath: no manifest. Set it, or call setup_training_data.")
        return self._loader(config, same_every_epoch=False)

    def val_dataloader(self) -> list[PlannedLoader]:
        sets = validation_sets(self.validation_ds)
        self._val_losses = {name: [] for name in sets}
        return [self._loader(config, same_every_epoch=True) for config in sets.values()]

    def _loader(self, config: DatasetConfig, *, same_every_epoch: bool) -> PlannedLoader:
        return build_loader(
            config,
            rank=self.global_rank,
            world_size=self.world_size,
            seed=self.cfg.seed,
            same_every_epoch=same_every_epoch,
            mix=False,  # transfer_batch_to_device mixes, on the device
        )

    def transfer_batch_to_device(
        self, batch: AudioNoiseBatch, device: torch.device, dataloader_idx: int
    ) -> AudioNoiseBatch:
        return batch.to(device, non_blocking=True).mixed()

    # ---- steps: seeded by their place in the run, so that masks and dropout are those of `nest-ssl pretrain` ----

    def on_train_batch_start(self, batch: AudioNoiseBatch, batch_idx: int) -> None:
        seed_everything(self.cfg.seed, Use.TRAIN, self.current_epoch, batch_idx, self.global_rank)

    def training_step(self, batch: AudioNoiseBatch, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log_dict({"train_loss": loss.detach(), "learning_rate": rate}, batch_size=1)
        return loss

    def on_validation_batch_start(self, batch: AudioNoiseBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        seed_everything(self.cfg.seed, Use.VALIDATION, dataloader_idx, batch_idx, self.global_rank)

    def validation_step(self, batch: AudioNoiseBatch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self._loss(batch)
        list(self._val_losses.values())[dataloader_idx].append(loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        """Log `val_loss`, the mean over all batches and ranks; with several sets also NAME_val_loss of each."""
        losses = {"val_loss": [loss for of_set in self._val_losses.values() for loss in of_set]}
        if len(self._val_losses) > 1:
            losses |= {f"{name}_val_loss": of_set for name, of_set in self._val_losses.items()}
        means = {name: torch.stack(values).mean() for name, values in losses.items() if values}
        self.log_dict(means, sync_dist=self.world_size > 1)
        self._val_losses = {name: [] for name in self._val_losses}

    def _loss(self, batch: AudioNoiseBatch) -> Tensor:
        return self.model.masked_loss(*batch.tensors()).loss

    # ---- optimizer, checkpoints ----

    def configure_optimizers(self) -> Any:
        optim = self.cfg.model.optim
        is_mixed = self.trainer.precision != "32-true"  # then Lightning refuses to clip a fused optimizer's gradients
        optimizer = build_optimizer(self.model, optim, loss_is_scaled=is_mixed)
        if optim.sched is None:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        schedule = build_schedule(optimizer, optim.sched, None if math.isinf(steps) else int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.removeprefix(PREFIX): value for name, value in state.items()}
        checkpoint["hyper_parameters"] = {"cfg": nemo_config(self.model.cfg, type(self.model).__name__)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"{PREFIX}{name}": value for name, value in checkpoint["state_dict"].items()}
