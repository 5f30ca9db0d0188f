"""Is a model still what it was built as? Code that reads the weights of parts instead of calling them must ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

Hook = TypeVar("Hook", bound=Callable[..., Any])

_BUILT_FROM = ("torch.nn.modules.", "nest_ssl.")


def is_as_built(module: nn.Module) -> bool:
    """Return False if a part was replaced (adapters, parametrisations, sharding) or has a hook that must run."""
    return "forward" not in vars(module) and all(_is_plain(part) for part in module.modules() if part is not module)


def _is_plain(part: nn.Module) -> bool:
    has_own_forward = type(part).__module__.startswith(_BUILT_FROM) and "forward" not in vars(part)
    return has_own_forward and not any(map(must_run, hooks_of(part)))


def may_be_skipped(hook: Hook) -> Hook:
    """Mark a hook that a step may leave out."""
    hook.may_be_skipped = True  # type: ignore[attr-defined]
    return hook


def must_run(hook: Callable[..., Any]) -> bool:
    return not getattr(hook, "may_be_skipped", False)


def hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """The hooks of a module's forward and backward pass."""
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()
    yield from module._backward_pre_hooks.values()
    yield from module._backward_hooks.values()
