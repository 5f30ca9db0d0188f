"""Lightning's Trainer from the `trainer:` section."""

from __future__ import annotations

import inspect
import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import strategies
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.loggers import Logger
from torch.nn.parallel import DistributedDataParallel

from nest_ssl.config import TrainerConfig
from nest_ssl.config.targets import resolve_target
from nest_ssl.training.checkpoints import AtomicCheckpointIO
from nest_ssl.training.environment import LaunchedRank, take_broadcasts_out
from nest_ssl.training.sharding import fsdp
from nest_ssl.training.time_limit import TimeLimit
from nest_ssl.watchdog.rank import RankFacts

log = logging.getLogger(__name__)

PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed"}
"""NeMo's names, which Lightning takes too, with a warning."""


def build_trainer(
    config: TrainerConfig, callbacks: list[Callback], loggers: list[Logger], rank: RankFacts | None = None
) -> pl.Trainer:
    """The trainer that `config` asks for, with our loggers, checkpoints and progress in place of Lightning's.

    `rank` is who this process is, if somebody has launched it as one of several.
    """
    _quiet_lightning()
    if str(config.precision) in ("bf16-true", "16-true", "transformer-engine", "transformer-engine-float16"):
        raise ValueError(
            f"trainer.precision={config.precision}: would round the audio, and with it the codes to predict. "
            f"Use bf16 or 16."
        )
    arguments = dict(vars(config))
    on_gpu = uses_gpu(config)
    if config.max_time is not None:
        callbacks = [*callbacks, TimeLimit(config.max_time)]
    arguments |= {
        "strategy": _strategy(config.strategy, on_gpu, 1 if rank is None else rank.world_size),
        "accelerator": "cuda" if on_gpu else "cpu",  # Lightning's auto would take Apple's GPUs
        "precision": PRECISIONS.get(str(config.precision), config.precision),
        "devices": _devices(config, on_gpu),
        "gradient_clip_val": config.gradient_clip_val or None,
        "logger": loggers or False,
        "callbacks": callbacks,
        "max_time": None,  # Lightning's timer would broadcast in every step
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "enable_progress_bar": False,  # ours reads the GPU only when something is logged
        "enable_model_summary": bool(config.enable_model_summary),
        "use_distributed_sampler": False,
        "plugins": [AtomicCheckpointIO(), *([LaunchedRank(rank)] if rank is not None else [])],
    }
    if config.use_distributed_sampler:
        log.warning("trainer.use_distributed_sampler: true is ignored; the batch plan gives every rank its slice.")
    if not on_gpu:
        arguments["sync_batchnorm"] = False
    trainer = pl.Trainer(**arguments)
    if config.sync_batchnorm and trainer.world_size > 1 and (rank is None or rank.rank == 0):
        _say_what_shared_statistics_cost(on_gpu)
    take_broadcasts_out(trainer)
    return trainer


def _quiet_lightning() -> None:
    """Lightning's hints and torch's notes to Lightning's authors are nothing a user could act on."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    messages = (
        ".*LeafSpec.*is deprecated",
        ".*does not have many workers",
        ".*Found .* module.* in eval mode",
        ".*Checkpoint directory .* exists and is not empty",  # so it does whenever a run is resumed
        ".*your dataloader is not resumable",  # it is: checkpoints hold the position in the plan
        "Grad strides do not match bucket view strides",  # of a convolution, on CPU ranks: a copy more
        ".*is smaller than the logging interval",  # every step counts across epochs here
        ".*It is recommended to use .*sync_dist=True",  # of training, rank 0 logs its own share
        ".*Total length of `list` across ranks is zero",  # no validation set
        "TensorFloat32 tensor cores .* available but not enabled",  # float32 means float32
        "The AccumulateGrad node's stream does not match",  # Lightning wraps DDP in a stream of its own
        "Both mixed precision and an auto_wrap_policy were specified to FSDP",  # sharding.py: all stays float32
        "FSDP is switching to use `NO_SHARD`",  # one GPU
        "When using ``NO_SHARD``",
    )
    for message in messages:
        warnings.filterwarnings("ignore", message=message)


def uses_gpu(config: TrainerConfig) -> bool:
    if config.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ValueError("trainer.accelerator=gpu: no CUDA GPU was found. Use trainer.accelerator=cpu or auto.")
    if config.accelerator not in ("auto", "cpu", "gpu", "cuda"):
        reason = "; the codebooks are float64, as NeMo's, which Apple's GPUs have not" * (config.accelerator == "mps")
        raise ValueError(f"trainer.accelerator={config.accelerator}: not supported{reason}. Use auto, cpu or gpu.")
    return config.accelerator != "cpu" and torch.cuda.is_available()


def _devices(config: TrainerConfig, on_gpu: bool) -> Any:
    devices = config.devices
    if not on_gpu and devices in (-1, "-1", "auto"):
        return 1  # a CPU is one device, unless the user says how many ranks to make of it
    if on_gpu:
        wanted = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else 0
        if wanted > torch.cuda.device_count():
            raise ValueError(
                f"trainer.devices={devices}: this machine has {torch.cuda.device_count()} GPUs. "
                f"Use trainer.devices=-1 for all of them."
            )
    return devices


def _say_what_shared_statistics_cost(on_gpu: bool) -> None:
    if on_gpu:
        log.info(
            "trainer.sync_batchnorm: all ranks meet twice per conformer layer in every step, and wait there for the "
            "slowest; trainer.sync_batchnorm=false gives each rank its own statistics."
        )
    else:
        log.warning("trainer.sync_batchnorm: torch has none on CPU ranks; each rank uses its own batch statistics.")


DDP_STRATEGIES: dict[str, dict[str, Any]] = {
    "auto": {},
    "ddp": {},
    "ddp_find_unused_parameters_false": {"find_unused_parameters": False},
    "ddp_find_unused_parameters_true": {"find_unused_parameters": True},
}


def _strategy(strategy: str | dict[str, Any], on_gpu: bool, world_size: int) -> Any:
    options = {} if isinstance(strategy, str) else dict(strategy)
    target = options.pop("_target_", None)
    name = strategy if target is None else resolve_target(target, "trainer.strategy._target_")
    if name in ("fsdp", "FSDPStrategy"):
        if not on_gpu:
            raise ValueError("trainer.strategy=fsdp: shards over GPUs, and there are none. Use ddp on CPU ranks.")
        return fsdp(**options)
    if name == "DDPStrategy":
        return strategies.DDPStrategy(**_no_buffers() | options)
    if name in DDP_STRATEGIES and world_size > 1:
        return strategies.DDPStrategy(**_no_buffers() | DDP_STRATEGIES[str(name)])
    return name if target is None else getattr(strategies, str(name))(**options)


def _no_buffers() -> dict[str, Any]:
    """DDP's option not to broadcast all buffers in every forward pass: a collective per batch, in validation too.

    The statistics of batch norms, which alone change, are shared once per validation (`watch.py`); in training each
    rank uses those of its batch.
    """
    known = inspect.signature(DistributedDataParallel).parameters  # torch 2.13 warns of the old name
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
