"""Optimizers by NeMo's names, and the parameter groups they work on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from nest_ssl.config import OptimConfig
from nest_ssl.plugins import optimizers

OPTIMIZER_CLASSES: dict[str, Callable[..., Optimizer]] = {
    "adamw": optim.AdamW,
    "adam": optim.Adam,
    "sgd": optim.SGD,
    "adamax": optim.Adamax,
    "adadelta": optim.Adadelta,
    "adagrad": optim.Adagrad,
    "rmsprop": optim.RMSprop,
    "rprop": optim.Rprop,
}

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


def parameter_groups(model: nn.Module, *, no_decay_on_norms_and_biases: bool = False) -> list[dict[str, Any]]:
    """The trainable parameters: one group, or one with weight decay and one without.

    A bias is any parameter with `bias` in its own name: those of the relative positions too.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError("the model has no trainable parameter: all are frozen.")
    if not no_decay_on_norms_and_biases:
        return [{"params": list(trainable.values())}]
    of_norms = {id(p) for module in model.modules() if isinstance(module, NORMS) for p in module.parameters()}
    exempt = {name for name, p in trainable.items() if id(p) in of_norms or "bias" in name.rpartition(".")[2]}
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in trainable.items() if name not in exempt]},
        {"params": [p for name, p in trainable.items() if name in exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, cfg: OptimConfig, *, loss_is_scaled: bool = False) -> Optimizer:
    """The optimizer of the `optim:` section for the parameters of `model`, which stands on its device already.

    A loss that is scaled (fp16) leaves scaled gradients to a fused optimizer, and they could not be clipped before.
    """
    groups = parameter_groups(model, no_decay_on_norms_and_biases=cfg.no_decay_on_norms_and_biases)
    options = cfg.options()
    if cfg.name in ("adamw", "adam") and cfg.fused is None:
        # One kernel in place of one per parameter or more; not every device has it.
        parameters = [p for group in groups for p in group["params"]]
        fits = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
        options["fused"] = fits and not loss_is_scaled
    make = optimizers.find(cfg.name, OPTIMIZER_CLASSES) or OPTIMIZER_CLASSES[cfg.name]
    optimizer: Optimizer = make(groups, lr=cfg.lr, **options)
    return optimizer
