from __future__ import annotations

import errno
import os
import platform
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nest_ssl.files import (
    give_second_name,
    put_in_place,
    read_json,
    remove,
    remove_left_over,
    replace_text,
    replacing,
    replacing_in,
    temporary_name,
)


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


def test_a_pipe_that_nobody_reads_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nest_ssl.files.READER_S", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a pipe that nobody reads"):
        replace_text(tmp_path / "pipe", "text")


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


def folder_of(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "x").write_text(text)
    return path


def test_a_folder_takes_the_place_of_a_folder_or_a_file_and_can_be_deleted(tmp_path: Path) -> None:
    last = tmp_path / "last.ckpt"
    last.write_text("a file")
    for text in ("old", "new"):
        put_in_place(folder_of(tmp_path / ".tmp", text), last)
        assert (last / "x").read_text() == text
    assert os.listdir(tmp_path) == ["last.ckpt"]
    remove(last)
    remove(last)
    assert os.listdir(tmp_path) == []


def test_a_kill_while_folders_change_places_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last, new = folder_of(tmp_path / "last.ckpt", "old"), folder_of(tmp_path / ".tmp", "new")
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path == new:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        put_in_place(new, last)
    assert (tmp_path / "last-before.ckpt" / "x").read_text() == "old"
    monkeypatch.undo()
    put_in_place(new, last)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt"]


def test_a_folder_gets_a_second_name_file_by_file(tmp_path: Path) -> None:
    best, last = folder_of(tmp_path / "best", "new"), folder_of(tmp_path / "last", "old")
    assert give_second_name(best, last)
    assert (last / "x").samefile(best / "x")
    remove(best)
    assert (last / "x").read_text() == "new"
    assert os.listdir(tmp_path) == ["last"]


def test_a_name_that_is_not_utf8_is_written_as_an_escape(tmp_path: Path) -> None:
    replace_text(tmp_path / "x.txt", "/data/\udcff.wav\n")
    assert (tmp_path / "x.txt").read_text() == "/data/\\udcff.wav\n"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"No space left on device: '.*/model\.nemo'$"),
        (
            OSError("9 requested and 3 written"),
            r"/model\.nemo: cannot be written: 9 requested and 3 written\.",
        ),
    ],
)
def test_a_full_disk_is_reported_with_the_file_that_was_asked_for(tmp_path: Path, error: OSError, shown: str) -> None:
    with pytest.raises(OSError, match=shown), replacing(tmp_path / "model.nemo"):
        raise error


WRITING_FOR_EVER = """
import sys, time
from pathlib import Path
from nest_ssl.files import replacing, replacing_in
path = Path(sys.argv[1])
with replacing(path) as file, replacing_in(path.parent, path) as folder:
    (folder / "half").touch()
    print("begun", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("inside", [False, True])
def test_what_a_killed_process_has_left_is_removed_and_what_a_living_one_writes_is_not(
    tmp_path: Path, inside: bool
) -> None:
    path = tmp_path / "a[1].nemo"
    with subprocess.Popen([sys.executable, "-c", WRITING_FOR_EVER, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        remove_left_over(path)
        assert len(os.listdir(tmp_path)) == 2
        process.send_signal(signal.SIGKILL)
    remove_left_over(tmp_path if inside else path, inside=inside)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("inside", [False, True])
def test_what_another_host_writes_into_a_shared_folder_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """Its process numbers mean nothing here."""
    path = tmp_path / "a.npy"
    monkeypatch.setattr(platform, "node", lambda: "another")
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)  # more than Linux numbers processes
    theirs = temporary_name(path)
    theirs.touch()
    monkeypatch.setattr(platform, "node", lambda: "this")
    temporary_name(path).touch()
    remove_left_over(tmp_path if inside else path, inside=inside)
    assert list(tmp_path.iterdir()) == [theirs]


def test_new_files_of_a_folder_take_the_places_of_old_ones_and_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    (folder / "ctc").mkdir(parents=True)
    for name in ("README.md", "config.json", "ctc/config.json"):
        (folder / name).write_text("old")

    def write_half() -> None:
        with replacing_in(folder, folder) as new:
            (new / "config.json").write_text("new")
            raise OSError(errno.ENOSPC, "No space left on device", str(new / "model.safetensors"))

    with pytest.raises(OSError, match="No space left on device: '.*/out'"):
        write_half()
    assert (folder / "config.json").read_text() == "old"

    def write_a_file_named_ctc() -> None:
        with replacing_in(folder, folder) as new:
            (new / "config.json").write_text("new")
            (new / "ctc").touch()

    with pytest.raises(ValueError, match=r"out/ctc: is a folder\. Move it away"):
        write_a_file_named_ctc()
    assert (folder / "config.json").read_text() == "old"
    with replacing_in(folder, folder) as new:
        (new / "ctc").mkdir()
        (new / "config.json").write_text("new")
        (new / "ctc" / "config.json").write_text("new")
    assert [(folder / name).read_text() for name in ("README.md", "config.json", "ctc/config.json")] == [
        *("old", "new", "new")
    ]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("text", ["", '{"step": "two"}', "[1]", "{}", '{"a":' * 100_000, "\x80"])
def test_json_that_cannot_be_used_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "status.json"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=r"status\.json: is damaged \(\w+: .*\)\. Delete it"):
        read_json(path, lambda content: int(content["step"]))
    path.write_text('{"step": 2, "more": 3}')
    assert read_json(path, lambda content: int(content["step"])) == 2


def test_a_name_too_long_for_a_temporary_file_is_reported_as_the_user_gave_it(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)
    with pytest.raises(OSError, match=r"File name too long: '.*/x{250}'$"), replacing(path):
        pass
