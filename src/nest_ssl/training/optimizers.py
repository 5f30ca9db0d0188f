"""Optimizers by NeMo's names, and the parameter groups they work on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from nest_ssl.config import OptimConfig
from nest_ssl.config.checks import short
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
    try:
        optimizer: Optimizer = make(groups, lr=cfg.lr, **options)
    except TypeError as error:
        raise ValueError(f"model.optim.extra: '{cfg.name}' does not take these arguments: {error}.") from error
    return optimizer


# ---- resuming ----

SAME_STATE = ({"adam", "adamw"},)
"""Optimizers that keep the same numbers for each parameter, so that one continues with the state of the other."""


def check_resumable(cfg: OptimConfig, checkpoint: Mapping[str, Any], path: Path) -> None:
    """Refuse an optimizer that cannot continue with the state in `checkpoint`, the content of the file `path`."""
    start_again = f"or start from its weights with 'init_from_ptl_ckpt=\"{path}\"' and another exp_manager.name"
    saved_cfg = checkpoint.get("hyper_parameters", {}).get("cfg") or {}
    saved = short((saved_cfg.get("optim") or {}).get("name", cfg.name))
    if cfg.name != saved and not any({cfg.name, saved} <= names for names in SAME_STATE):
        raise ValueError(
            f"model.optim.name: {path} contains the state of {saved}, which {cfg.name} cannot use. Continue with "
            f"model.optim.name={saved}, {start_again}."
        )
    groups = checkpoint["optimizer_states"][0]["param_groups"]
    for key in ("amsgrad", "centered", *(["momentum"] if cfg.name == "rmsprop" else [])):
        if getattr(cfg, key) and not any(group.get(key) for group in groups):
            raise ValueError(
                f"model.optim.{key}: {path} was saved without it, so the numbers it needs are missing. Leave it off, "
                f"{start_again}."
            )
    num_groups = len(groups)
    if cfg.no_decay_on_norms_and_biases != (num_groups == 2) and num_groups <= 2:
        before = str(not cfg.no_decay_on_norms_and_biases).lower()
        raise ValueError(
            f"model.optim.no_decay_on_norms_and_biases: it was {before} in {path}, and its optimizer numbers the "
            f"parameters accordingly. Continue with {before}, {start_again}."
        )


def with_own_settings(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved `state` with the settings of `optimizer`: moments come from a checkpoint, settings do not."""
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    groups = [{**saved, **mine} for saved, mine in zip(state["param_groups"], own, strict=True)]
    return {**state, "param_groups": groups}
