"""Weights, gradients and optimizer state shared out over the ranks: FSDP2 (`trainer.strategy=fsdp`)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel


def shard(model: EncDecDenoiseMaskedTokenPredModel) -> None:
    """Share out the trained weights, their gradients and optimizer state over the ranks (FSDP2, `fully_shard`).

    Each conformer layer is gathered for its own forward and backward pass. What is not trained, the float64 codebooks
    among it, stays whole on every rank. Weights stay float32, so autocast works as on one GPU.
    """
    from torch.distributed.fsdp import fully_shard

    # Our modules return views; nothing changes them in place, which is what torch warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for part in (model.encoder.pre_encode, *model.encoder.layers, model.encoder, model.decoder):
        fully_shard(part)


def is_sharded(model: nn.Module) -> bool:
    return any(hasattr(p, "full_tensor") for p in model.parameters())


def _whole() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions  # takes 50 ms to import

    return StateDictOptions(full_state_dict=True, cpu_offload=True)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights by NeMo's names. Sharded ones are gathered on rank 0, so every rank has to call this."""
    if not is_sharded(model):
        return dict(model.state_dict())
    from torch.distributed.checkpoint import state_dict as sharded_state

    gathered: Any = sharded_state.get_model_state_dict(model, options=_whole())
    return dict(gathered)


def load_whole_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give the model these weights, which every rank has read."""
    if not is_sharded(model):
        model.load_state_dict(weights)
        return
    from torch.distributed.checkpoint import state_dict as sharded_state

    sharded_state.set_model_state_dict(model, dict(weights), options=_whole())


def whole_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state with parameters numbered in its order, whether they are sharded or not."""
    if not is_sharded(model):
        return optimizer.state_dict()
    from torch.distributed.checkpoint import state_dict as sharded_state

    state: Any = sharded_state.get_optimizer_state_dict(model, optimizer, options=_whole())
    if not state:
        return {}  # gathered on rank 0
    numbers = {name: number for number, name in enumerate(_optimized_names(model, optimizer))}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {numbers[name]: value for name, value in state["state"].items()}, "param_groups": groups}


def load_whole_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    if not is_sharded(model):
        optimizer.load_state_dict(state)
        return
    from torch.distributed.checkpoint import state_dict as sharded_state

    names = _optimized_names(model, optimizer)
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    named: Any = {"state": {names[number]: value for number, value in state["state"].items()}, "param_groups": groups}
    sharded_state.set_optimizer_state_dict(model, optimizer, named, options=_whole())


def _optimized_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


class ShardedGradients:
    """The gradients of weights that are shared out over the ranks: torch averages them and leaves them in `p.grad`."""

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

    def norm(self) -> Tensor:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def clip(self, most: float, norm: Tensor) -> None:
        torch.nn.utils.clip_grads_with_norm_(self.parameters, most, norm)

    def clip_values(self, most: float) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters, most)
