from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from nest_ssl.data.manifest import kept_open
from nest_ssl.data.manifest.kept_open import KeptOpen


class Opened:
    """Remembers what is open."""

    now: list[str] = []  # noqa: RUF012

    def __init__(self, path: str) -> None:
        self.path = path
        self.now.append(path)

    def close(self) -> None:
        self.now.remove(self.path)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> KeptOpen[Opened]:
    monkeypatch.setattr(Opened, "now", [])
    monkeypatch.setattr(kept_open, "MAX_OPEN", 2)
    return KeptOpen(Opened)


def use(files: KeptOpen[Opened], path: str) -> str:
    with files.file(path) as file:
        return file.path


def test_the_file_that_was_used_least_lately_is_closed(files: KeptOpen[Opened]) -> None:
    for path in ("a", "b", "a", "c"):
        assert use(files, path) == path
    assert Opened.now == ["a", "c"]


def test_threads_share_the_files(files: KeptOpen[Opened]) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda path: use(files, path), "ab" * 20)) == list("ab" * 20)
    assert sorted(Opened.now) == ["a", "b"]


def test_another_process_opens_its_own(files: KeptOpen[Opened], monkeypatch: pytest.MonkeyPatch) -> None:
    use(files, "a")
    use(pickle.loads(pickle.dumps(files)), "a")
    monkeypatch.setattr("os.getpid", lambda: -1)  # as after a fork
    use(files, "a")
    assert Opened.now == ["a", "a", "a"]


def test_an_error_lets_the_next_one_in(files: KeptOpen[Opened]) -> None:
    with pytest.raises(KeyError), files.file("a"):
        raise KeyError
    assert use(files, "a") == "a"
