"""docs/architecture.md: its pictures are current, its packages are those of the layers, its files exist.

So do the source files that the other pages name.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tools import draw_architecture

from tests.unit.test_layering import ROWS, SOURCE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ALWAYS_ON_TOP = {"_version", "__init__", "__main__"}


def layers() -> list[list[str]]:
    """The packages of the picture, from bottom to top, by the names that test_layering.py uses."""
    return [[name.rstrip("/").removesuffix(".py") for name in names] for _, names, _ in draw_architecture.LAYERS]


@pytest.mark.parametrize("name", draw_architecture.PICTURES)
def test_the_pictures_are_current_and_well_formed(name: str) -> None:
    drawn = draw_architecture.PICTURES[name]().svg()
    ElementTree.fromstring(drawn)
    stored = (draw_architecture.IMAGES / name).read_text(encoding="utf-8")
    assert stored == drawn, "run 'python tools/draw_architecture.py'"
    assert f"images/{name}" in PAGE


def test_the_picture_shows_every_package_in_the_order_of_the_layers() -> None:
    row_of = {name: number for number, row in enumerate(ROWS) for name in row}
    shown = [name for names in layers() for name in names]
    here = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set(shown) == (here & row_of.keys()) - ALWAYS_ON_TOP
    assert [row_of[name] for name in shown] == sorted(row_of[name] for name in shown)


def test_every_package_has_a_line_in_the_table() -> None:
    table = PAGE.split("| package | owns |")[1].split("\n\n")[0]
    in_table = re.findall(r"`([\w.]+)/?`", "\n".join(line.split("|")[1] for line in table.splitlines() if line))
    assert {name.removesuffix(".py") for name in in_table} == {name for names in layers() for name in names}


def test_every_file_that_the_page_names_exists() -> None:
    named = re.findall(r"`((?:\w+/)*\w+(?:\.py|/))`", PAGE)
    folders = (SOURCE, SOURCE / "config", SOURCE / "fast", SOURCE / "data", SOURCE / "watchdog", ROOT)
    assert len(named) > 50
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


PAGES = [*ROOT.glob("docs/*.md"), SOURCE / "verify" / "alignment.md"]
PATH = re.compile(r"\b((?:nest_ssl|tests|tools|examples|benchmarks)/[\w/]+\.py)\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_source_files_that_a_page_names_by_their_path_exist(page: Path) -> None:
    named = [name for name in PATH.findall(page.read_text(encoding="utf-8")) if not name.startswith("examples/asr/")]
    assert [name for name in named if not any((folder / name).exists() for folder in (ROOT, SOURCE.parent))] == []
