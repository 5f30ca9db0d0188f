"""NEST pre-training with Lightning's Trainer: NeMo's five steps.

    pip install 'nest-ssl[lightning]'
    python examples/train_lightning.py model.train_ds.manifest_filepath=train.jsonl \
        model.validation_ds.manifest_filepath=valid.jsonl trainer.max_steps=1000
    python examples/train_lightning.py … trainer.devices=2 trainer.strategy=ddp

The overrides are those of `nest-ssl pretrain`, and the losses are the same. Lightning starts the ranks, and no watchdog
looks after them. On CPUs several ranks need trainer.sync_batchnorm=false, since Lightning synchronises batch norms on
GPUs only.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from nest_ssl.config import NestConfig
from nest_ssl.lightning import PretrainingModule
from nest_ssl.training import hydra_runner, maybe_init_from_pretrained_checkpoint


@hydra_runner(config_path="../src/nest_ssl/config/yaml", config_name="nest_fast-conformer", launch=False)
def main(cfg: NestConfig) -> None:
    trainer = pl.Trainer(**cfg.trainer)
    use_run_folder(trainer, cfg)
    module = PretrainingModule(cfg)
    maybe_init_from_pretrained_checkpoint(module.model, cfg)
    trainer.fit(module)


def use_run_folder(trainer: pl.Trainer, cfg: NestConfig) -> None:
    """In place of `exp_manager`: Lightning's own logger and checkpoints, in exp_dir/name."""
    exp = cfg.exp_manager
    folder = (exp and exp.exp_dir) or "nest_experiments"
    trainer.logger = CSVLogger(folder, (exp and exp.name) or cfg.name, version="")
    checkpoints = ModelCheckpoint(f"{trainer.logger.log_dir}/checkpoints", save_last=True)
    trainer.callbacks.append(checkpoints)  # type: ignore[attr-defined]  # Lightning sets it from elsewhere


if __name__ == "__main__":
    main()
