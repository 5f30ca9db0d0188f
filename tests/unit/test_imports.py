"""Which packages the source imports, and when."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "nest_ssl"
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics"}
WHEN_USED = LIGHTNING | {"lhotse", "wandb", "tensorboard", "transformers", "onnx", "matplotlib", "pandas", "av"}
"""Packages that take long to import: only what needs them may wait for them."""


def imported_packages(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and names of all packages that a file imports, within functions and by `import_module("…")` too."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        for name in names:
            yield getattr(node, "lineno", 0), name.split(".")[0]


def test_only_the_adapter_imports_lightning() -> None:
    users = [
        f"{path.relative_to(SOURCE)}:{line}: {package}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, package in imported_packages(path)
        if package in LIGHTNING and path != SOURCE / "lightning.py"
    ]
    assert not users, "\n".join(users)


def test_the_adapter_imports_lightning() -> None:
    """So that the test above looks for the right names."""
    assert {package for _, package in imported_packages(SOURCE / "lightning.py")} & LIGHTNING


def test_every_form_of_an_import_is_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    body = "    import c\n    importlib.import_module('d.x')\n    __import__('e')\n"
    file.write_text(f"import a.x\nfrom b.y import z\ndef f():\n{body}")
    assert sorted(imported_packages(file)) == [(1, "a"), (2, "b"), (4, "c"), (5, "d"), (6, "e")]


@pytest.mark.parametrize(
    "package", ["training", "cli", "data.batch", "data.plan", "data.manifest", "modules", "launch"]
)
def test_slow_packages_are_imported_only_when_they_are_used(package: str) -> None:
    program = (
        f"import importlib, pkgutil, sys, nest_ssl.{package} as package\n"
        "for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
        f"print(*sorted({WHEN_USED!r} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
