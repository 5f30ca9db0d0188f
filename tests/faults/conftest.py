"""One corpus and one undisturbed run, shared by all fault tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.harness import Lab, lab_in
from tests.integration.runs import make_corpus

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux signals and /proc")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run on two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    with lab_in(corpus, folder) as lab:
        run = lab.start().wait()
        assert run.returncode == 0, run.stderr[-4000:]
        assert not run.incidents()
    return run.run_dir


@pytest.fixture
def lab(corpus: Path, tmp_path: Path) -> Iterator[Lab]:
    with lab_in(corpus, tmp_path) as lab:
        yield lab


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 6 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
