from __future__ import annotations

import pytest

from tests.unit.data.corpus import Corpus, make_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Read-only: tests that break files make their own."""
    return make_corpus(tmp_path_factory.mktemp("corpus"))
