"""Where a run is, and what a checkpoint contains.

A checkpoint is a dict:

| key | content |
|---|---|
| `state_dict` | the weights by NeMo's names; the averaged ones with `exp_manager.ema` |
| `optimizer_states`, `lr_schedulers` | lists of one, in torch's own form |
| `global_step`, `epoch` | steps done, current epoch |
| `hyper_parameters` | `cfg`: NeMo's `model:` section |
| `data_position` | epoch, batch, number of ranks, hash of the batch plan, bad files of the epoch so far |
| `epoch_means` | sums for `train_loss_epoch` |
| `progress` | the other fields of `TrainState` and what the parts of training remember (`Memory`) |
| `current_model_state` | with `exp_manager.ema`: the weights that training continues with |

With sharded weights its tensors are DTensors, and it is written as a folder: the tensors of `state_dict`,
`current_model_state` and of the optimizer's state in torch.distributed.checkpoint's form, the rest in `rest.pt`. Either
form is resumed by any number of ranks, sharded or not.

Random numbers depend on the place alone (`step.seed_everything`), so there is no generator to save. Checkpoints of the
first edition had Lightning's `loops` and `callbacks` in place of `progress`; `from_first_edition` reads them.
"""

from __future__ import annotations

import logging
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nest_ssl._version import __version__
from nest_ssl.config.checks import short
from nest_ssl.nemo_file import (
    CheckpointError,
    check_archive,
    check_fit,
    check_is_file,
    check_weights,
    nemo_config,
    one_line,
    read_index,
    read_rest,
)
from nest_ssl.training.metrics import EpochMeans
from nest_ssl.training.sharding import (
    load_optimizer_state,
    load_weights,
    optimized,
    own_weights,
    part_of,
    read_shards,
    with_layout,
)

if TYPE_CHECKING:
    from nest_ssl.data import PlannedLoader
    from nest_ssl.training.ema import Average
    from nest_ssl.training.step import TrainStep

log = logging.getLogger(__name__)

_PREFIX = "model."
"""Before the names of some weights in checkpoints of the first edition."""


@dataclass
class Memory:
    """What the parts of training remember: the best checkpoints, early stopping, time."""

    best: dict[str, float] = field(default_factory=dict)
    """Scores of the best checkpoints, by path."""
    early_stopping: dict[str, Any] | None = None
    elapsed_s: float = 0.0
    resumed_from: str | None = None
    """The file that `exp_manager.resume_from_checkpoint` named."""


@dataclass
class TrainState:
    """Where a run is."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    batch: int = 0
    """Batches of the epoch that every rank has trained on."""
    batches_seen: int = 0
    """Batches of all epochs."""
    epoch_is_over: bool = False
    """The last batch of the epoch is done; its validation and its means may not be."""
    validation_is_due: bool = False
    """A validation comes before the next batch."""
    means: EpochMeans = field(default_factory=EpochMeans)
    memory: Memory = field(default_factory=Memory)


@dataclass
class Trained:
    """The things whose values a checkpoint holds."""

    model: Any
    step: TrainStep
    loader: PlannedLoader
    world_size: int

    @property
    def average(self) -> Average | None:
        return self.step.average


def checkpoint_of(state: TrainState, trained: Trained, *, weights_only: bool = False) -> dict[str, Any]:
    """What a run continues from, or only the weights. Nothing is gathered: sharded tensors stay sharded."""
    model, average = trained.model, trained.average
    weights: dict[str, Tensor] = dict(model.state_dict())
    checkpoint: dict[str, Any] = {
        "epoch": state.epoch,
        "global_step": state.step,
        "nest_ssl_version": __version__,
        "state_dict": weights if average is None else averaged_weights(trained),
        "hyper_parameters": {"cfg": nemo_config(model.cfg, type(model).__name__)},
        "data_position": {
            "epoch": state.epoch,
            "batch": state.batch,
            "world_size": trained.world_size,
            "plan_hash": trained.loader.plan_hash,
            "bad_data": trained.loader.bad_data.state_dict(),
        },
        "epoch_means": state.means.state(),
    }
    if weights_only:
        return checkpoint
    schedule, scaler = trained.step.schedule, trained.step.scaler
    checkpoint["optimizer_states"] = [trained.step.optimizer.state_dict()]
    checkpoint["lr_schedulers"] = [] if schedule is None else [schedule.state_dict()]
    checkpoint["progress"] = {
        "batches_seen": state.batches_seen,
        "epoch_is_over": state.epoch_is_over,
        "validation_is_due": state.validation_is_due,
        "memory": dict(vars(state.memory)),
        "average": None if average is None else average.state(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "optimizer": type(trained.step.optimizer).__name__,
    }
    if average is not None:
        checkpoint["current_model_state"] = weights
    return checkpoint


def averaged_weights(trained: Trained) -> dict[str, Tensor]:
    """The average by the names of the weights, sharded like them."""
    average = trained.average
    assert average is not None
    return {name: with_layout(average.weights[name], value) for name, value in trained.model.state_dict().items()}


FORM: dict[str, type] = {
    "global_step": int,
    "state_dict": dict,
    "optimizer_states": list,
    "optimizer_states.0.state": dict,
    "optimizer_states.0.param_groups": list,
    "lr_schedulers": list,
    "data_position.epoch": int,
    "data_position.batch": int,
    "data_position.world_size": int,
    "progress.batches_seen": int,
    "progress.memory": dict,
}
"""What a checkpoint consists of. Numbers are counts."""
IN_SHARDS = [name for name in FORM if name.startswith(("state_dict", "optimizer_states"))]


def examine_checkpoint(path: Path) -> str | None:
    """Check that a training checkpoint is undamaged and can be resumed; the file that its run was told to resume from.

    Every rank does this, and comes to the same result. The tensors in shards are checked when they are read.
    """
    if path.is_dir():
        read_index(path)
    else:
        check_is_file(path)
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                what = "is not a training checkpoint, or cut off" if path.stat().st_size else "is empty"
                raise CheckpointError(f"{path}: {what}. Give a .ckpt file that 'nest-ssl pretrain' has written.")
            check_archive(file, str(path))
    origin = read_checkpoint(path, mmap=True)["progress"]["memory"].get("resumed_from")
    return None if origin is None else str(origin)


def read_checkpoint(path: Path, device: torch.device | str = "cpu", *, mmap: bool = False) -> dict[str, Any]:
    """The content of a training checkpoint, of this edition's form; of one in shards, all but their tensors.

    With `mmap` tensors are read from the file when they are used.
    """
    try:
        if path.is_dir():
            content = {**read_rest(path), "shards": path}
        else:
            content = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:
        content = {}  # NeMo's own types are in it
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable training checkpoint: {one_line(error)}") from error
    if "data_position" not in content or "optimizer_states" not in content:
        raise ValueError(
            f"{path}: cannot be resumed: it contains only weights, or NeMo has written it. Start from its weights with "
            f"'init_from_ptl_ckpt=\"{path}\"' and another exp_manager.name."
        )
    content = {"path": path, **(content if "progress" in content else _from_first_edition(content, path))}
    _check_form(content)
    return content


def _from_first_edition(content: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        return from_first_edition(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: is damaged: a part of it is missing or odd ({one_line(error)}).") from error


def _check_form(content: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose parts are not what this program writes."""
    parts = {name: kind for name, kind in FORM.items() if "shards" not in content or name not in IN_SHARDS}
    for name, kind in parts.items():
        value: Any = content
        for key in name.split("."):
            if key == "0":
                value = value[0] if isinstance(value, list) and value else None
            else:
                value = value.get(key) if isinstance(value, Mapping) else None
        is_count = kind is int and type(value) is int and 0 <= value < 2**53
        if not (is_count if kind is int else isinstance(value, kind)):
            raise CheckpointError(f"{content['path']}: is damaged: its {name} is {short(repr(value))}.")
    if content["global_step"] > content["progress"]["batches_seen"]:
        raise CheckpointError(f"{content['path']}: is damaged: it has more steps than batches.")
    if content["data_position"]["world_size"] == 0:
        raise CheckpointError(f"{content['path']}: is damaged: its data_position.world_size is 0.")


def restore(checkpoint: dict[str, Any], trained: Trained) -> TrainState:
    """Give everything the values of `checkpoint`; where the run was."""
    model, average, progress = trained.model, trained.average, checkpoint["progress"]
    before, now = progress.get("optimizer"), type(trained.step.optimizer).__name__
    if before is not None and before != now:
        raise ValueError(
            f"model.optim.name: the checkpoint contains the state of {before}, which {now} cannot continue from. Use "
            f"the same optimizer, or start a run under another exp_manager.name from these weights with "
            f"init_from_ptl_ckpt."
        )
    if "shards" in checkpoint:
        checkpoint = read_shards(checkpoint["shards"], model, trained.step.optimizer)
    else:
        _check_tensors(checkpoint, trained)
    load_weights(model, _without_prefix(checkpoint.get("current_model_state", checkpoint["state_dict"])))
    if average is not None:
        known = progress["average"]
        if known is None:
            log.warning("exp_manager.ema: the checkpoint has no average; it starts from the weights at this step.")
            average.copy(own_weights(model))
        else:
            averaged = _without_prefix(checkpoint["state_dict"])
            layout = model.state_dict()
            average.resume(known, {name: part_of(value, layout[name]) for name, value in averaged.items()})
    load_optimizer_state(trained.step.optimizer, checkpoint["optimizer_states"][0])
    schedule, scaler = trained.step.schedule, trained.step.scaler
    if schedule is not None and checkpoint["lr_schedulers"]:
        schedule.load_state_dict(checkpoint["lr_schedulers"][0])
    if scaler is not None and progress["scaler"] is not None:
        scaler.load_state_dict(progress["scaler"])
    state = TrainState(
        step=int(checkpoint["global_step"]),
        epoch=int(checkpoint["data_position"]["epoch"]),
        batches_seen=int(progress["batches_seen"]),
        epoch_is_over=bool(progress["epoch_is_over"]),
        validation_is_due=bool(progress["validation_is_due"]),
        memory=Memory(**progress["memory"]),
    )
    if "epoch_means" in checkpoint:
        state.means.resume(checkpoint["epoch_means"])
    state.batch = _place_in_epoch(checkpoint["data_position"], trained, state)
    if "bad_data" in checkpoint["data_position"]:  # older checkpoints have none
        trained.loader.bad_data.load_state_dict(checkpoint["data_position"]["bad_data"], state.epoch)
    return state


def _check_tensors(checkpoint: Mapping[str, Any], trained: Trained) -> None:
    """Refuse tensors that are not those of this model and optimizer, or not finite: fused kernels trust shapes."""
    where = str(checkpoint.get("path", "the checkpoint"))
    for name in ("state_dict", "current_model_state"):
        if name in checkpoint:
            try:
                weights = check_weights(_without_prefix(checkpoint[name]), f"{where}: its {name}")
                check_fit(trained.model, weights, where)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{error}\nA run continues with the model that it began with. For another one start a run under "
                    "another exp_manager.name; init_from_ptl_ckpt gives it the weights that fit."
                ) from error
    parameters = optimized(trained.step.optimizer)
    for number, moments in checkpoint["optimizer_states"][0]["state"].items():
        for kind, value in moments.items():
            if not isinstance(value, Tensor) or value.ndim == 0:
                continue
            fits = number in range(len(parameters)) and value.shape == parameters[number].shape
            if not (fits and value.is_floating_point() and value.isfinite().all()):
                raise CheckpointError(
                    f"{where}: the optimizer's {kind} of parameter {number} is not finite, or not that parameter's "
                    f"({str(value.dtype).removeprefix('torch.')} {list(value.shape)}). Use an earlier checkpoint."
                )


def _place_in_epoch(position: Mapping[str, Any], trained: Trained, state: TrainState) -> int:
    """The batch to continue at: with another number of ranks, the same share of the epoch. Logs what changes."""
    before, now = int(position["world_size"]), trained.world_size
    batch = int(position["batch"]) * before // now
    if now != before:
        log.warning(
            "resumed on %d %s (was %d): batches differ, and a step sees %.3g x as much audio; continuing at batch %d "
            "of epoch %d, the same share of the epoch",
            *(now, "rank" if now == 1 else "ranks", before, now / before, batch, state.epoch),
        )
    elif trained.loader.plan_hash != position["plan_hash"]:
        log.warning(
            "the data or its batches have changed since the checkpoint; continuing at batch %d of epoch %d of the new "
            "plan, so some utterances of this epoch may be read twice or not at all",
            *(batch, state.epoch),
        )
    return batch


def _without_prefix(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(_PREFIX): value for name, value in weights.items()}


def from_first_edition(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of the first edition in this edition's form."""
    callbacks = checkpoint.get("callbacks", {})
    counted = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    memory = Memory()
    for kind, saved in callbacks.items():
        if kind.startswith("ModelCheckpoint"):
            memory.best = {path: float(score) for path, score in saved["best_k_models"].items()}
        elif kind.startswith(("StopEarly", "EarlyStopping")):
            best = float(saved["best_score"])
            memory.early_stopping = {
                "best": best if torch.isfinite(torch.tensor(best)) else None,
                "last": None,
                "wait_count": saved["wait_count"],
            }
        elif kind.startswith(("TimeLimit", "Timer")) and saved:
            memory.elapsed_s = float(saved["time_elapsed"]["train"])
    average = None
    if "averaging_state" in checkpoint:
        step = next((saved["latest_update_step"] for saved in callbacks.values() if "latest_update_step" in saved), 0)
        average = {"num_updates": int(checkpoint["averaging_state"]["n_averaged"]), "last_step": step}
    progress = {
        "batches_seen": counted["total"]["processed"],
        "epoch_is_over": bool(counted["is_last_batch"]) and checkpoint["data_position"]["batch"] > 0,
        "validation_is_due": False,  # checkpoints were written after the validation of their step
        "memory": vars(memory),
        "average": average,
        "scaler": checkpoint.get("MixedPrecision"),
    }
    return {**checkpoint, "progress": progress}
