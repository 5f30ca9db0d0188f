"""Bring a fault into a rank from outside: Python imports this at start when its folder is on PYTHONPATH.

NEST_FAULT is 'NAME RANK STEP'. The fault is installed once the program has imported its training code.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

TARGET = "nest_ssl.training.trainer"


class _Loader(importlib.abc.Loader):
    def __init__(self, real: importlib.abc.Loader) -> None:
        self.real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.real.exec_module(module)
        import injected  # type: ignore[import-not-found]

        name, rank, step = os.environ["NEST_FAULT"].split()
        if rank in ("all", os.environ.get("RANK", "0")):
            injected.install(name, int(step))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = _Loader(spec.loader)
        return spec


if os.environ.get("NEST_FAULT"):
    sys.meta_path.insert(0, _Finder())
if cgroup := os.environ.get("NEST_FAULT_CGROUP"):
    Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
