"""Weights, gradients, optimizer state and averages shared out over the ranks: FSDP2 (`trainer.strategy=fsdp`).

A sharded tensor is torch's DTensor: this rank's *part*, a plain tensor, and the layout of the whole. Torch gathers and
scatters in the forward and backward pass. All else works on parts: they are plain, and a part is changed in place.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from nest_ssl.files import SHARDS_REST, put_in_place, remove, replacing
from nest_ssl.nemo_file import INDEX_CHECKSUM, OPTIMIZER, SAVE, checksum_of_index, read_index, read_sharded
from nest_ssl.run_folder import LAST
from nest_ssl.training.optimizers import with_own_settings

if TYPE_CHECKING:
    from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
    from nest_ssl.training.parallel import World

_SECTIONS = ("state_dict", "current_model_state")
"""Weights in a checkpoint; the second are those that training continues with, if the first are averaged."""


def shard(model: EncDecDenoiseMaskedTokenPredModel) -> None:
    """Share out the trained weights, their gradients and optimizer state over the ranks (FSDP2, `fully_shard`).

    Each conformer layer is gathered for its own forward and backward pass. What is not trained, the float64 codebooks
    among it, stays whole on every rank. Weights stay float32, so autocast works as on one GPU.
    """
    from torch.distributed.fsdp import fully_shard

    # Our modules return views; nothing changes them in place, which is what torch warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    parts: list[nn.Module] = [model.encoder.pre_encode, *model.encoder.layers, model.encoder, model.decoder]
    if any(parameter.requires_grad for parameter in model.mask_processor.parameters()):
        parts.append(model.mask_processor)
    for module in parts:
        fully_shard(module)


def is_sharded(model: nn.Module) -> bool:
    return any(map(is_shard, model.parameters()))


# ---- parts ----


def is_shard(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


@torch.no_grad()
def part(tensor: Any) -> Tensor:
    """This rank's part of a sharded tensor, in the same memory; a whole tensor itself."""
    own: Tensor = tensor.to_local() if is_shard(tensor) else tensor
    return own


@torch.no_grad()
def part_of(value: Tensor, like: Any) -> Tensor:
    """This rank's part of `value`, which is whole or laid out as `like`."""
    if is_shard(value) or not is_shard(like):
        return part(value)
    parts = value.chunk(like.device_mesh.size())  # as torch shares out: along the first dimension, the last get less
    rank = like.device_mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else value[:0]


@torch.no_grad()
def with_layout(own: Tensor, like: Any) -> Tensor:
    """The sharded tensor whose part on this rank is `own`, in the same memory, laid out as `like`."""
    if not is_shard(like):
        return own
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parts of all weights and statistics by NeMo's names, in the same memory. Where nothing is sharded: all."""
    return {name: part(value) for name, value in model.state_dict().items()}  # this reshards what is gathered now


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give the model these weights, which are whole or its own layout."""
    if not is_sharded(model):
        model.load_state_dict(dict(weights))
        return
    own = model.state_dict()
    if own.keys() != weights.keys():
        differ = sorted(own.keys() ^ weights.keys())
        raise RuntimeError(f"the checkpoint and the model differ in {len(differ)} names ({differ[0]}, …).")
    with torch.no_grad():
        for name, value in own.items():
            part(value).copy_(part_of(weights[name], value))


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give the optimizer this state, whose tensors are whole or laid out as the parameters; its settings stay.

    What stays on the CPU is copied: the state may be mapped from a file, which must not be needed any longer.
    """
    parameters = optimized(optimizer)

    def laid_out(value: Any, like: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not is_shard(like) or value.shape != like.shape:
            return value.clone() if like.device.type == "cpu" or value.ndim == 0 else value
        return with_layout(part_of(value, like).to(like.device, copy=not is_shard(value)), like)

    states = {
        number: {kind: laid_out(value, parameters[number]) for kind, value in kinds.items()}
        for number, kinds in state["state"].items()
    }
    optimizer.load_state_dict(with_own_settings(optimizer, {**state, "state": states}))


def optimized(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters in the order in which an optimizer numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@torch.no_grad()
def gathered(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Whole tensors in rank 0's memory, gathered one by one: never two of them on a GPU. All ranks call this."""
    whole = {}
    for name, value in tensors.items():
        full: Tensor = value.full_tensor() if is_shard(value) else value  # type: ignore[attr-defined]
        if world.is_first:
            whole[name] = full.cpu()
    return whole


# ---- gradients ----


class ShardedGradients:
    """The gradients of sharded weights: torch averages them in the backward pass and leaves their parts in `p.grad`."""

    share = 1.0
    num_collectives = 0

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def begin(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def backward(self, loss: Tensor, leaves: Mapping[nn.Parameter, nn.Parameter], *, exchanges: bool) -> None:
        loss.backward()

    def wait(self) -> None:
        """Torch has waited."""

    def show(self) -> None:
        """They are in `p.grad` already."""

    def parts(self) -> list[Tensor]:
        return [part(parameter.grad) for parameter in self.parameters if parameter.grad is not None]

    def norm(self) -> Tensor:
        """The norm of the whole gradient, the same on every rank. One collective."""
        square = torch.nn.utils.get_total_norm(self.parts()).square()
        distributed.all_reduce(square)
        return square.sqrt()

    def clip(self, most: float, norm: Tensor) -> None:
        torch._foreach_mul_(self.parts(), torch.clamp(most / (norm + 1e-6), max=1.0))

    def clip_values(self, most: float) -> None:
        torch._foreach_clamp_min_(self.parts(), -most)
        torch._foreach_clamp_max_(self.parts(), most)


# ---- checkpoints: every rank writes its own part ----


def write_shards(path: Path, checkpoint: Mapping[str, Any], world: World, *, keeps_before: bool = False) -> None:
    """Write a checkpoint with sharded tensors as the folder `path`, complete or not at all. Every rank takes part.

    What is whole, batch statistics among it, is rank 0's, as in a file. Torch's index has no checksum of its own, and
    says where each shard belongs: the rest has it.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    temporary = path.with_name(f".{path.name}.tmp")

    def make_room() -> None:
        remove(temporary)  # of a run that was killed
        temporary.mkdir(parents=True)

    _on_first(world, make_room)  # no rank writes before
    tensors, rest = _separated(checkpoint)
    number = torch.tensor(time.time_ns(), device=world.device)
    world.copy_from_first([number])
    tensors[SAVE], rest[SAVE] = {str(world.rank): number}, int(number)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        save(tensors, storage_writer=FileSystemWriter(temporary), planner=planner)
    except CheckpointException as error:  # no Exception; every rank has it, with what any of them raised
        if world.is_first:
            remove(temporary)
        rank, (cause, _) = next(iter(error.failures.items()))
        raise cause if isinstance(cause, OSError) else OSError(f"rank {rank}: {cause!r}") from error

    def complete() -> None:
        with replacing(temporary / SHARDS_REST) as file:
            torch.save({**rest, INDEX_CHECKSUM: checksum_of_index(temporary)}, file)
        read_index(temporary)
        if path.name == LAST and not keeps_before:
            remove(path)  # it is damaged, and its predecessor is not
        put_in_place(temporary, path, keeps_before=path.name == LAST)

    _on_first(world, complete)


def _on_first(world: World, act: Callable[[], None]) -> None:
    """Let rank 0 do something; if it fails, it fails on every rank, so that all can try again together."""
    failure: Exception | None = None
    if world.is_first:
        try:
            act()
        except (OSError, RuntimeError, ValueError) as error:
            failure = error
    if not world.decision_of_first(failure is None):
        raise OSError("rank 0 could not write its part") if failure is None else failure


def _separated(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors for the shards, and the rest of the checkpoint; `read_sharded` puts them together again."""
    rest = {key: value for key, value in checkpoint.items() if key not in _SECTIONS}
    tensors: dict[str, Any] = {section: dict(checkpoint[section]) for section in _SECTIONS if section in checkpoint}
    if "optimizer_states" in rest:
        optimizer = rest["optimizer_states"][0]
        states, plain = optimizer["state"], {}
        tensors[OPTIMIZER] = {}
        for number, kinds in states.items():
            of_shards = {kind: value for kind, value in kinds.items() if isinstance(value, Tensor)}
            tensors[OPTIMIZER][str(number)] = of_shards
            plain[number] = {kind: value for kind, value in kinds.items() if kind not in of_shards}
        rest["optimizer_states"] = [{**optimizer, "state": plain}]
    return tensors, rest


def read_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Read a checkpoint in shards: with a sharded model each rank only its parts, otherwise all."""
    if not is_sharded(model):
        return read_sharded(folder)
    weights, parameters = model.state_dict(), optimized(optimizer)

    def empty(name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        section, name = name.split(".", 1)
        like = parameters[int(name.split(".", 1)[0])] if section == OPTIMIZER else weights.get(name)
        if like is None or not is_shard(like) or like.shape != size:
            return torch.empty(size, dtype=dtype)
        return torch.empty_like(like, dtype=dtype)

    return read_sharded(folder, empty)
