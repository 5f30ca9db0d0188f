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

import contextlib
import logging
import pickle
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from nest_ssl._version import __version__
from nest_ssl.config import PreprocessorConfig, parse
from nest_ssl.config.checks import short
from nest_ssl.config.model_section import unused_keys
from nest_ssl.nemo_file import (
    CheckpointError,
    as_checkpoint_errors,
    check_archive,
    check_features,
    check_fit,
    check_is_file,
    check_weights,
    nemo_config,
    one_line,
    read_index,
    read_rest,
)
from nest_ssl.training.metrics import EpochMeans
from nest_ssl.training.optimizers import OPTIMIZER_CLASSES
from nest_ssl.training.sharding import (
    load_optimizer_state,
    load_weights,
    optimized,
    own_weights,
    part_of,
    read_shards,
    with_layout,
)
from nest_ssl.training.stopping import Count, StoppingState

if TYPE_CHECKING:
    from nest_ssl.data import PlannedLoader
    from nest_ssl.training.ema import Average
    from nest_ssl.training.step import TrainStep

log = logging.getLogger(__name__)

_PREFIX = "model."
"""Before the names of some weights in checkpoints of the first edition."""

Name = Annotated[str, msgspec.Meta(max_length=250)]
FilePath = Annotated[str, msgspec.Meta(pattern=r"(^|/)[^/]{1,255}$")]
Amount = Annotated[float, msgspec.Meta(ge=0, lt=1e300)]


@dataclass
class Memory:
    """What the parts of training remember: the best checkpoints, early stopping, time."""

    best: dict[FilePath, float] = field(default_factory=dict)
    """Scores of the best checkpoints, by path."""
    early_stopping: StoppingState | None = None
    elapsed_s: Annotated[float, msgspec.Meta(ge=0, lt=1e10)] = 0.0
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
    num_batches: int | None = None
    """Batches of an epoch under `trainer.limit_train_batches`; None: unknown."""

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


class _BadData(msgspec.Struct):
    num_read: Count
    num_bad: dict[Name, Count]


class _Position(msgspec.Struct):
    epoch: Count
    batch: Count
    world_size: Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
    plan_hash: str | None = None
    bad_data: _BadData | msgspec.UnsetType = msgspec.UNSET


class _AverageState(msgspec.Struct):
    num_updates: Count
    last_step: Count


class _ScalerState(msgspec.Struct):
    scale: Amount
    growth_factor: Amount
    backoff_factor: Amount
    growth_interval: Count
    growth_tracker: Count = msgspec.field(name="_growth_tracker")


class _Progress(msgspec.Struct):
    batches_seen: Count
    memory: Memory
    epoch_is_over: bool = False
    validation_is_due: bool = False
    average: _AverageState | None = None
    scaler: _ScalerState | None = None
    optimizer: Name | None = None


class _Means(msgspec.Struct):
    epoch: Annotated[int, msgspec.Meta(ge=-1, lt=2**53)]
    sums: dict[Name, SimpleNamespace]
    weights: dict[Name, SimpleNamespace] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        weights = self.sums if self.weights is msgspec.UNSET else self.weights  # the first edition has one for all
        if weights.keys() != self.sums.keys():
            raise ValueError("sums and weights have different names")
        tensors = [boxed.tensor for boxed in (*self.sums.values(), *weights.values())]
        if not all(one.ndim == 0 and one.is_floating_point() and one.isfinite() for one in tensors):
            raise ValueError("a sum or weight is not a finite number")


class _ScheduleState(msgspec.Struct):
    last_epoch: Count | msgspec.UnsetType = msgspec.UNSET
    step_count: Count | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="_step_count")
    settings: dict[Name, Any] = {}


class _OptimizerState(msgspec.Struct):
    state: dict[int, dict[Name, Any]]
    param_groups: list[dict[Name, Any]]


class _ModelSection(msgspec.Struct):
    optim: dict[str, Any] | None = None
    preprocessor: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.preprocessor is not None:
            parse(PreprocessorConfig, self.preprocessor, "preprocessor", unused_keys(), logging.DEBUG)


class _Form(msgspec.Struct, kw_only=True):
    """What a checkpoint consists of, but for tensors that are in shards."""

    global_step: Count
    data_position: _Position
    progress: _Progress
    lr_schedulers: list[_ScheduleState]
    epoch: Count | msgspec.UnsetType = msgspec.UNSET
    epoch_means: _Means | msgspec.UnsetType = msgspec.UNSET
    hyper_parameters: dict[str, _ModelSection | None] = {}
    current_model_state: dict[Name, Any] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        step, position = self.global_step, self.data_position
        if step > self.progress.batches_seen:
            raise ValueError("it has more steps than batches")
        if self.epoch not in (msgspec.UNSET, position.epoch):
            raise ValueError(f"it is in epoch {self.epoch} and in epoch {position.epoch}")
        if self.progress.epoch_is_over and position.batch == 0:
            raise ValueError(f"epoch {position.epoch} is over before its first batch")
        if isinstance(self, _WholeForm) and bool(self.current_model_state) != bool(self.progress.average):
            raise ValueError("it has only one of current_model_state and progress.average")
        for schedule in self.lr_schedulers:  # one that was added to the run later is behind, but has counted its steps
            at, count = schedule.last_epoch, schedule.step_count
            if at is not msgspec.UNSET and (at > step or (at < step and count not in (msgspec.UNSET, at + 1))):
                raise ValueError(f"its schedule is at step {at}, and the run at step {step}")


class _WholeForm(_Form, kw_only=True):
    state_dict: dict[Name, Any]
    optimizer_states: Annotated[list[_OptimizerState], msgspec.Meta(min_length=1)]


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
    content: Any = {}
    with as_checkpoint_errors(path, "not a readable training checkpoint"):
        if path.is_dir():
            content = {**read_rest(path), "shards": path}
        else:
            with contextlib.suppress(pickle.UnpicklingError):  # NeMo's own types are in it
                content = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
            if mmap and content:
                _check_can_be_mapped(path, content)
    if not isinstance(content, dict) or "data_position" not in content or "optimizer_states" not in content:
        raise ValueError(
            f"{path}: cannot be resumed: it contains only weights, or NeMo has written it. Start from its weights with "
            f"'init_from_ptl_ckpt=\"{path}\"' and another exp_manager.name."
        )
    if "progress" not in content:
        with as_checkpoint_errors(path, "is damaged: a part of it is missing or odd"):
            content = from_first_edition(content)
    checkpoint = {**content, "path": path}
    _check_form(checkpoint)
    return checkpoint


def _check_form(content: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose parts are not what this program writes."""
    try:  # with tensors in boxes: a bare one has items, and msgspec would take it for a mapping
        boxed = tree_map_only(Tensor, lambda tensor: SimpleNamespace(tensor=tensor), dict(content))
        msgspec.convert(boxed, _Form if "shards" in content else _WholeForm)
    except Exception as error:
        what, _, where = one_line(error).replace("`", "").replace("types.SimpleNamespace", "tensor").partition(" - at ")
        where = f"{content['path']}: is damaged: {where.replace('$.', '')}{': ' if where else ''}"
        raise CheckpointError(f"{where}{what[0].lower()}{what[1:].rstrip('.')}.") from error


def _check_can_be_mapped(path: Path, content: object) -> None:
    """Refuse a file whose bytes are not the tensors: packed, in another order, or too few of them.

    Torch maps such a file all the same, and takes what comes after the data for the rest of a tensor.
    """
    with zipfile.ZipFile(path) as archive:
        parts = [entry for entry in archive.infolist() if PurePath(entry.filename).parent.name == "data"]
        orders = [archive.read(name) for name in archive.namelist() if PurePath(name).name == "byteorder"]
    storages = [leaf.untyped_storage() for leaf in tree_leaves(content) if isinstance(leaf, Tensor)]
    needed = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
    is_plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in parts)
    is_plain = is_plain and all(order == sys.byteorder.encode() for order in orders)
    if not is_plain or sorted(needed.values()) != sorted(entry.file_size for entry in parts if entry.file_size):
        raise CheckpointError(f"{path}: is damaged: its tensors are not as long as their data. Use another copy of it.")


def restore(checkpoint: dict[str, Any], trained: Trained) -> TrainState:
    """Give everything the values of `checkpoint`; where the run was."""
    model, average = trained.model, trained.average
    progress, where = msgspec.convert(checkpoint["progress"], _Progress), str(checkpoint.get("path", "the checkpoint"))
    before, now = progress.optimizer, type(trained.step.optimizer).__name__
    if before is not None and before != now:
        raise ValueError(
            f"model.optim.name: {where} contains the state of {short(before)}, which {now} cannot continue from. Use "
            f"the same optimizer, or start a run under another exp_manager.name from these weights with "
            f"init_from_ptl_ckpt."
        )
    if "shards" in checkpoint:
        checkpoint = read_shards(checkpoint["shards"], model, trained.step.optimizer)
    else:
        _check_tensors(checkpoint, trained)
    load_weights(model, _without_prefix(checkpoint.get("current_model_state", checkpoint["state_dict"])))
    if average is not None:
        known = progress.average
        if known is None:
            log.warning("exp_manager.ema: the checkpoint has no average; it starts from the weights at this step.")
            average.copy(own_weights(model))
        else:
            averaged = _without_prefix(checkpoint["state_dict"])
            layout = model.state_dict()
            average.num_updates, average.last_step = known.num_updates, known.last_step
            average.copy({name: part_of(value, layout[name]) for name, value in averaged.items()})
    load_optimizer_state(trained.step.optimizer, checkpoint["optimizer_states"][0])
    if not checkpoint["optimizer_states"][0]["state"] and "betas" in trained.step.optimizer.defaults:
        log.warning("%s: has no state of the optimizer, whose means of gradients start again from zero", where)
    schedule, scaler = trained.step.schedule, trained.step.scaler
    if schedule is not None and not checkpoint["lr_schedulers"] and _saved_config(checkpoint, "optim", "sched"):
        raise CheckpointError(f"{where}: is damaged: its lr_schedulers is empty. Use an earlier checkpoint.")
    if schedule is not None and checkpoint["lr_schedulers"]:
        with as_checkpoint_errors(Path(where), "is damaged: its lr_schedulers"):
            schedule.load_state_dict(checkpoint["lr_schedulers"][0])
        if (at := schedule.last_epoch) != (step := checkpoint["global_step"]):
            log.warning("%s: its schedule is at step %d, the run at step %d; both continue there", where, at, step)
    if scaler is not None and progress.scaler is not None:
        scaler.load_state_dict(msgspec.to_builtins(progress.scaler))
    elif scaler is not None:
        log.warning("%s: has no scale of the loss, which starts again from %g", where, scaler.get_scale())
    state = TrainState(
        step=int(checkpoint["global_step"]),
        epoch=int(checkpoint["data_position"]["epoch"]),
        batches_seen=progress.batches_seen,
        epoch_is_over=progress.epoch_is_over,
        validation_is_due=progress.validation_is_due,
        memory=progress.memory,
    )
    if "epoch_means" in checkpoint:
        with as_checkpoint_errors(Path(where), "is damaged: its epoch_means"):
            state.means.resume(checkpoint["epoch_means"])
    state.batch = _place_in_epoch(checkpoint["data_position"], trained, state, where)
    if "bad_data" in checkpoint["data_position"]:  # older checkpoints have none
        trained.loader.bad_data.load_state_dict(checkpoint["data_position"]["bad_data"], state.epoch)
    return state


def check_inputs(now: PreprocessorConfig, checkpoint: Mapping[str, Any]) -> None:
    """Refuse features other than those that the weights were trained on: nothing would fail, but training."""
    saved = _saved_config(checkpoint, "preprocessor")
    if saved is None:  # a checkpoint of the first edition
        return
    before = parse(PreprocessorConfig, saved, "model.preprocessor", unused_keys(), logging.DEBUG).decisive
    for key, value in now.decisive.items():
        if value != before[key]:
            raise CheckpointError(
                f"model.preprocessor.{key}: {short(value)} is not the {short(before[key])} of {checkpoint['path']}. A "
                "run continues with the features that it began with; for others start a run under another "
                "exp_manager.name."
            )


def _saved_config(checkpoint: Mapping[str, Any], *keys: str) -> Any:
    """Return a part of the model's configuration in a checkpoint; None where there is none."""
    part: Any = checkpoint
    for key in ("hyper_parameters", "cfg", *keys):
        part = part.get(key) if isinstance(part, Mapping) else None
    return part


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
            _check_kinds(weights, trained.model.state_dict(), where)
    _check_optimizer_state(checkpoint["optimizer_states"][0], trained.step.optimizer, where, checkpoint["global_step"])


def _check_kinds(weights: Mapping[str, Tensor], own: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights that were rounded, and features other than those of the configuration."""
    for name, value in weights.items():
        if value.dtype != own[name].dtype:
            kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in (value, own[name])]
            raise CheckpointError(f"{where}: its {name} is {kinds[0]}, not {kinds[1]}. Use an earlier checkpoint.")
    check_features(weights, own, where)


SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta", "step")
"""What an optimizer keeps that is never negative."""


def _check_optimizer_state(saved: Mapping[str, Any], optimizer: Optimizer, where: str, most_steps: int) -> None:
    """Refuse moments that are not those of the parameters: a fused kernel trusts their shapes."""
    use = "Use an earlier checkpoint."
    parameters, own = optimized(optimizer), optimizer.state_dict()["param_groups"]
    if [group.get("params") for group in saved["param_groups"]] != [group["params"] for group in own]:
        raise CheckpointError(f"{where}: its optimizer numbers the parameters otherwise. {use}")
    states: Mapping[int, Mapping[str, Any]] = saved["state"]
    if states and states.keys() != set(range(len(parameters))):
        raise CheckpointError(
            f"{where}: its optimizer has the state of {len(states)} of {len(parameters)} weights. {use}"
        )
    is_torchs = type(optimizer) in OPTIMIZER_CLASSES.values()
    needed = {"step", "exp_avg", "exp_avg_sq"} if is_torchs and isinstance(optimizer, torch.optim.Adam) else set()
    for number, moments in states.items():
        if moments.keys() != states[0].keys() | needed:
            raise CheckpointError(f"{where}: its optimizer's state of parameter {number} is incomplete. {use}")
        for kind, value in moments.items():
            if not _is_moment(kind, value, parameters[number] if is_torchs else None):
                is_tensor = isinstance(value, Tensor)
                shown = f"{value.dtype} {list(value.shape)}" if is_tensor else short(repr(value))
                raise CheckpointError(
                    f"{where}: the optimizer's {kind} of parameter {number} is not finite, or not that parameter's "
                    f"({shown.removeprefix('torch.')}). {use}"
                )
            if kind == "step" and (torch.as_tensor(value) > most_steps).any():
                raise CheckpointError(f"{where}: its optimizer has made more steps than the run. {use}")
        if needed and not moments["step"] and moments["exp_avg"].any():
            raise CheckpointError(f"{where}: its optimizer has moments of parameter {number} but no step. {use}")


def _is_moment(kind: str, value: object, parameter: Tensor | None) -> bool:
    """Whether this can be what an optimizer keeps; where `parameter` is given, of that parameter."""
    if value is None and kind != "step":
        return parameter is None or kind == "momentum_buffer"  # SGD's, before its first step
    if isinstance(value, (int, float)) and (kind == "step" or parameter is None) and abs(value) < 2**53:
        value = torch.tensor(float(value))
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_complex():
        return False
    if kind != "step" and parameter is not None and (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        return False
    if (kind == "step" and parameter is not None and value.ndim) or not value.isfinite().all():
        return False
    return kind not in SQUARES or not (value < 0).any()


def _place_in_epoch(position: Mapping[str, Any], trained: Trained, state: TrainState, where: str) -> int:
    """The batch to continue at: with another number of ranks, the same share of the epoch. Logs what changes."""
    before, now = int(position["world_size"]), trained.world_size
    batch = int(position["batch"]) * before // now
    if now != before:
        log.warning(
            "resumed on %d %s (was %d): batches differ, and a step sees %.3g x as much audio; continuing at batch %d "
            "of epoch %d, the same share of the epoch",
            *(now, "rank" if now == 1 else "ranks", before, now / before, batch, state.epoch),
        )
    elif trained.loader.plan_hash != position.get("plan_hash"):
        log.warning(
            "the data or its batches have changed since the checkpoint; continuing at batch %d of epoch %d of the new "
            "plan, so some utterances of this epoch may be read twice or not at all",
            *(batch, state.epoch),
        )
    elif (length := trained.loader.num_batches) is not None and batch > length:
        raise CheckpointError(f"{where}: is damaged: it is at batch {batch} of an epoch of {length}.")
    elif (end := trained.num_batches) is not None and state.epoch_is_over != (batch >= end):
        state.epoch_is_over = batch >= end  # the checkpoint is wrong, or trainer.limit_train_batches has changed
        log.warning("%s: its epoch_is_over is wrong at batch %d of %d; the batch decides", where, batch, end)
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
        "scaler": checkpoint.get("MixedPrecision") or None,
    }
    return {**checkpoint, "epoch": checkpoint["data_position"]["epoch"], "progress": progress}
