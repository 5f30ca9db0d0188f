from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The audio and manifests that all tests here train on."""
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder
