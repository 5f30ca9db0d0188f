"""The source stays within the limits of tools/layout.py, and that tool counts correctly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tools import layout


@pytest.mark.parametrize("name", layout.LIMITS)
def test_the_source_is_within_its_limits(name: str) -> None:
    count, limit = layout.COUNTERS[name](), layout.LIMITS[name]
    assert count.value <= limit.most, "\n".join([f"{count.value} {limit.what}, at most {limit.most}:", *count.found])


def test_every_limit_has_a_counter() -> None:
    assert layout.LIMITS.keys() == layout.COUNTERS.keys()


def tree(folder: Path, **files: str) -> Path:
    """A package `pkg`; `a__b` is the module a/b.py, `a____init__` the package a."""
    source = folder / "pkg"
    for name, text in {"__init__": "", **files}.items():
        path = source / f"{name.replace('__', '/', 1) if not name.startswith('__') else name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return source


def test_imports_within_functions_count_and_those_for_types_do_not(tmp_path: Path) -> None:
    source = tree(
        tmp_path,
        a="def f():\n    from pkg.b import x\n",
        b="import importlib\n\ndef g():\n    importlib.import_module('pkg.c')\n",
        c="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.a import f\nelse:\n    import pkg.d\n",
        d="import os\n",
    )
    assert layout.longest_chain(source).found == ["pkg.a", "pkg.b", "pkg.c", "pkg.d"]
    assert layout.import_cycles(source).value == 0


@pytest.mark.parametrize(
    "init",
    [
        "from pkg.low.home import name\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.low.home import name\n",
    ],
    ids=["at once", "lazily"],
)
def test_a_name_from_a_package_leads_to_the_module_that_defines_it(tmp_path: Path, init: str) -> None:
    source = tree(tmp_path, low____init__=init, low__home="name = 1\n", high="from pkg.low import name\n")
    assert layout.longest_chain(source).found == ["pkg.high", "pkg.low.home"]
    assert layout.one_importer_modules(source).found == ["pkg.low.home (1 lines), imported by pkg.high"]


def test_a_package_that_imports_at_once_is_on_the_way_of_those_outside_it(tmp_path: Path) -> None:
    files = {
        "low____init__": "from pkg.low.x import a\n",
        "low__x": "from pkg.low.y import a\n",
        "low__y": "a = b = 1\n",
    }
    source = tree(tmp_path, **files, high="from pkg.low.y import b\n")
    assert layout.longest_chain(source).found == ["pkg.high", "pkg.low.x", "pkg.low.y"]
    assert layout.import_cycles(source).value == 0


def test_a_cycle_through_a_lazy_import_is_found(tmp_path: Path) -> None:
    source = tree(tmp_path, a="from pkg.b import x\n", b="def f():\n    from pkg.a import y\n")
    (cycle,) = layout.import_cycles(source).found
    assert cycle in ("pkg.a → pkg.b → pkg.a", "pkg.b → pkg.a → pkg.b")


def test_relative_imports_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1: a relative import"):
        layout.import_graph(tree(tmp_path, a="from . import b\n"))


def test_only_small_modules_with_one_importer_count(tmp_path: Path) -> None:
    source = tree(tmp_path, a="from pkg import b, c, d\n", b="from pkg import c\n", c="", d="\n" * layout.SMALL)
    assert layout.one_importer_modules(source).found == ["pkg.b (1 lines), imported by pkg.a"]


def test_init_files_are_files_but_not_modules_of_a_folder(tmp_path: Path) -> None:
    source = tree(tmp_path, a="1\n2\n", low____init__="", low__x="", low__y="3\n")
    assert layout.count_files(source).value == 5
    assert layout.count_lines(source).value == 3
    assert layout.fullest_folder(source).found[0] == "2 low"


def test_a_file_counts_when_one_of_its_functions_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tree(
        tmp_path,
        traced__runs="from pkg.traced import idle\n\ndef f():\n    import pkg.traced.imported\n",
        traced__idle="def g():\n    pass\n",
        traced__imported="print()\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from pkg.traced.runs import f  # type: ignore[import-not-found]

    try:
        assert layout.files_executed(f, source) == ["traced/runs.py"]
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "pkg"]:
            del sys.modules[name]
