"""Whatever is drawn, nothing is written where the program was started."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder, before = tmp_path_factory.mktemp("cwd"), os.getcwd()
    os.chdir(folder)
    yield
    os.chdir(before)
    assert list(folder.iterdir()) == []
