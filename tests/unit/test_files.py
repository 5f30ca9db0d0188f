from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from nest_ssl.files import give_second_name, replace_text, replacing


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    replace_text(path, "old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    replace_text(path, "old")

    def write_half() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        replace_text(tmp_path / "a.txt", "")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o666 & ~umask


def test_a_folder_that_does_not_exist_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        replace_text(tmp_path / "no" / "a.txt", "")


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    replace_text(pipe, "text")
    reader.join(timeout=10)
    assert received == [b"text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_second_name_is_the_same_file(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("x")
    second.write_text("y")
    assert give_second_name(first, second)
    assert second.samefile(first)
    assert give_second_name(first, second)
    assert not give_second_name(tmp_path / "gone", second)
    assert second.read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
