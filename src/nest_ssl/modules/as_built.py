"""Is a module still what it was built as? Who reads the weights of its parts, in place of calling them, must ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

Hook = TypeVar("Hook", bound=Callable[..., Any])

_BUILT_FROM = ("torch.nn.modules.", "nest_ssl.")


def is_as_built(module: nn.Module) -> bool:
    """False if a part was replaced (adapters, parametrisations, sharding) or has a hook that must run."""
    return all(_is_plain(part) for part in module.modules() if part is not module)


def _is_plain(part: nn.Module) -> bool:
    return type(part).__module__.startswith(_BUILT_FROM) and not any(map(must_run, hooks_of(part)))


def may_be_skipped(hook: Hook) -> Hook:
    """Say of a hook that a step may do without it."""
    hook.may_be_skipped = True  # type: ignore[attr-defined]
    return hook


def must_run(hook: Callable[..., Any]) -> bool:
    return not getattr(hook, "may_be_skipped", False)


def hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Of its forward and its backward pass."""
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()
    yield from module._backward_pre_hooks.values()
    yield from module._backward_hooks.values()
