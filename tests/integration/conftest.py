from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Audio and manifests that every test here trains on."""
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder
