"""What installing and importing the package costs."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys

HEAVY = (
    "lightning",
    "transformers",
    "lhotse",
    "webdataset",
    "tensorboard",
    "matplotlib",
    "soundfile",
    "pandas",
    "typer",
)


def runtime_packages() -> set[str]:
    """Everything that `pip install nest-ssl` brings, by what the installed packages say they require."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    waiting = ["nest-ssl"]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                try:
                    importlib.metadata.distribution(requirement.name)
                except importlib.metadata.PackageNotFoundError:
                    continue  # for another platform, such as the CUDA libraries of torch
                waiting.append(requirement.name)
    return found


def test_at_most_80_packages_at_run_time() -> None:
    packages = runtime_packages()
    assert {"torch", "omegaconf", "hydra-core"} <= packages
    assert len(packages) <= 80


def test_import_loads_nothing_heavy_beyond_torch() -> None:
    program = f"import sys, nest_ssl; print([name for name in {HEAVY!r} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
