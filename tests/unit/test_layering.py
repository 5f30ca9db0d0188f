"""A package imports only from its own row of the table and the rows it may import (docs/architecture.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "nest_ssl"

_BASE = {"_version", "config", "files", "freed_memory", "nemo_file"}
_MODEL = _BASE | {"audio", "modules", "objective", "model"}
_PRODUCTS = {"prepare", "demo", "inspect", "report", "extract", "probe", "verify", "drawing"}
MAY_IMPORT: dict[str, set[str]] = {
    "_version": set(),
    "files": set(),
    "freed_memory": set(),
    "config": set(),
    "audio": set(),
    "nemo_file": {"_version", "config", "files"},
    "modules": {"config"},
    "objective": {"config", "modules"},
    "model": {"config", "modules", "nemo_file", "objective"},
    "fast": {"config", "model", "modules", "objective"},
    "checkpoint": _MODEL - {"audio"},
    "layer_features": _MODEL | {"checkpoint"},
    "data": {"audio", "config", "files", "freed_memory"},
    "watchdog": {"config", "launch"},
    "launch": {"config", "watchdog"},
    "training": _MODEL | {"fast", "checkpoint", "data", "launch", "watchdog"},
    "drawing": {"config", "modules"},
    "prepare": {"audio", "data", "files"},
    "demo": {"audio", "data", "files"},
    "inspect": _MODEL | {"data", "drawing"},
    "report": _MODEL | {"checkpoint", "data", "drawing"},
    "extract": _MODEL | {"checkpoint", "data", "layer_features"},
    "probe": _MODEL | {"checkpoint", "data", "layer_features", "drawing"},
    "verify": _MODEL | {"checkpoint"},
    "__main__": {"cli"},
    "__init__": {"_version", "config", "model", "checkpoint"},
    "cli": _MODEL | _PRODUCTS | {"checkpoint", "layer_features", "data", "launch", "watchdog", "training"},
}
ONLY_USER = {"lightning": {"training", "cli"}, "transformers": {"checkpoint", "extract", "probe"}}
ONE_ROW = {"launch", "watchdog"}  # one row: a launcher starts the monitor, which must know who a rank is
OMEGACONF_USERS = {"config", "checkpoint"}  # checkpoint: the types inside NeMo's own .ckpt files


def row(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            if node.module == "nest_ssl":
                names |= {f"nest_ssl.{alias.name}" for alias in node.names}
    return names


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down_the_layers(path: Path) -> None:
    allowed = MAY_IMPORT[row(path)] | {row(path)}
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "nest_ssl" and len(parts) > 1:
            assert parts[1] in allowed, f"{row(path)} imports {name}"
        if parts[0] in ONLY_USER:
            assert row(path) in ONLY_USER[parts[0]], f"{row(path)} imports {name}"
        if parts[0] == "omegaconf":
            assert row(path) in OMEGACONF_USERS, f"{row(path)} imports {name}"


def test_the_table_has_no_circles() -> None:
    def below(name: str, seen: tuple[str, ...] = ()) -> None:
        assert name not in seen, " → ".join((*seen, name))
        for other in MAY_IMPORT[name] - ONE_ROW:
            below(other, (*seen, name))

    for name in MAY_IMPORT:
        below(name)


def test_modules_and_model_hold_no_debug_code() -> None:
    for path in [SOURCE / "model.py", *(SOURCE / "modules").glob("*.py")]:
        tree = ast.parse(path.read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Try)], path
        calls = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert "print" not in calls, path
        assert not any("distributed" in name for name in imported(path)), path
