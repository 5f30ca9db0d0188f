"""A package imports only from its own row of the table and the rows it may import (docs/architecture.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "nest_ssl"

ROWS: list[set[str]] = [
    {"_version", "files", "freed_memory", "plugins", "run_verdict"},
    {"config"},
    {"run_folder", "nemo_file", "audio"},
    {"modules"},
    {"objective", "model"},
    {"fast"},
    {"checkpoint"},
    {"layer_features"},
    {"data"},
    {"watchdog"},
    {"launch"},
    {"training"},
    {"fit"},
    {"drawing"},
    {"prepare", "demo", "inspect", "report", "extract", "probe", "verify", "lightning"},
    {"__init__", "cli"},
    {"__main__"},
]
"""A package imports from the rows above its own. Two share theirs: the model saves itself through the objective's
file."""
SHARED = [{"objective", "model"}]
MAY_IMPORT: dict[str, set[str]] = {
    name: set().union(*ROWS[:number], *(pair for pair in SHARED if name in pair))
    for number, row in enumerate(ROWS)
    for name in row
}
ONLY_USER = {"lightning": {"lightning"}, "transformers": {"checkpoint", "extract", "probe"}}
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


def test_every_package_has_a_row() -> None:
    found = {row(path) for path in FILES}
    assert found <= MAY_IMPORT.keys(), found - MAY_IMPORT.keys()


def test_modules_and_model_hold_no_debug_code() -> None:
    for path in [SOURCE / "model.py", *(SOURCE / "modules").glob("*.py")]:
        tree = ast.parse(path.read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Try)], path
        calls = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert "print" not in calls, path
        assert not any("distributed" in name for name in imported(path)), path
