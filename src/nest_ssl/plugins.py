"""Names that other packages add: augmentations, data sources, optimizers, schedules and probe tasks.

A package adds one with a single call, and a configuration then uses it by that name:

>>> from nest_ssl.plugins import register_augmentation
>>> register_augmentation("reverb", Reverb)      # model.train_ds.batch_augmentor._target_: reverb

The call runs when the module that contains it is imported. To have that done for every command, the package names the
module in its pyproject.toml; nest-ssl imports such modules once, when it meets a name that it does not know:

    [project.entry-points."nest_ssl.plugins"]
    my_package = "my_package.nest_plugins"

docs/extending.md says what each kind of thing must be able to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

GROUP = "nest_ssl.plugins"


class PluginError(ValueError):
    """A plugin cannot be loaded, or its name is taken."""


class Registry:
    """The things of one kind that were registered, by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._things: dict[str, Callable[..., Any]] = {}

    def register(self, name: str, thing: Callable[..., Any]) -> None:
        """Make `thing` available as `name`; registering it twice is fine, another thing under its name is not."""
        if not name:
            raise PluginError(f"{self.kind} {thing!r}: its name is empty.")
        if not callable(thing):
            raise PluginError(f"{self.kind} '{name}': {thing!r} is neither a class nor a function.")
        if self._things.setdefault(name, thing) is not thing:
            raise PluginError(f"{self.kind} '{name}': the name is taken by {self._things[name]!r}. Choose another one.")

    def find(self, name: str, built_in: Collection[str] = ()) -> Callable[..., Any] | None:
        """Return what was registered as `name`, or None. The `built_in` names belong to nest-ssl alone."""
        if name not in built_in and name not in self._things:
            load_entry_points()
        if name in built_in and name in self._things:
            raise PluginError(f"{self.kind} '{name}': nest-ssl has its own one of that name. Register another name.")
        return self._things.get(name)

    def names(self) -> list[str]:
        """Return all registered names, sorted, those of installed packages included."""
        load_entry_points()
        return sorted(self._things)


augmentations = Registry("augmentation")
sources = Registry("data source")
optimizers = Registry("optimizer")
schedules = Registry("schedule")
probe_tasks = Registry("probe task")


def register_augmentation(name: str, thing: Callable[..., Any]) -> None:
    """Make an augmentation available as `model.train_ds.batch_augmentor._target_: name`."""
    augmentations.register(name, thing)


def register_source(name: str, thing: Callable[..., Any]) -> None:
    """Make a data source available as `model.train_ds.source: name`."""
    sources.register(name, thing)


def register_optimizer(name: str, thing: Callable[..., Any]) -> None:
    """Make an optimizer available as `model.optim.name: name`."""
    optimizers.register(name, thing)


def register_schedule(name: str, thing: Callable[..., Any]) -> None:
    """Make a learning-rate schedule available as `model.optim.sched.name: name`."""
    schedules.register(name, thing)


def register_probe_task(name: str, thing: Callable[..., Any]) -> None:
    """Make a task available as `nest-ssl probe --task name`."""
    probe_tasks.register(name, thing)


@cache
def load_entry_points() -> None:
    """Import every module that an installed package names in the group `nest_ssl.plugins`; only the first call does."""
    for entry_point in entry_points(group=GROUP):
        _load(entry_point)


def _load(entry_point: EntryPoint) -> None:
    package = f"package {entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "no package"
    where = f"plugin '{entry_point.name}' ({package}): {entry_point.value}"
    try:
        loaded = entry_point.load()
    except Exception as error:
        raise PluginError(f"{where}: {type(error).__name__}: {error}. Fix or uninstall the package.") from error
    if not isinstance(loaded, ModuleType):
        raise PluginError(f"{where}: is not a module. Name the module that calls register_…, without ':'.")
