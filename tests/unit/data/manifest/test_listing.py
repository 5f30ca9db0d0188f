"""What an input names, in an order that never changes."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from nest_ssl.data.manifest import listing
from nest_ssl.data.manifest.listing import input_kind, list_entries


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names(source: Path) -> list[str]:
    return [os.path.relpath(entry.path, source if source.is_dir() else source.parent) for entry in list_entries(source)]


def test_a_folder_is_walked_in_sorted_order_and_other_files_are_passed_over(tmp_path: Path) -> None:
    wanted = ["a/1.wav", "a/2.FLAC", "a-b/x.mp3", "b/c/deep.opus", "b/no_extension", "z.wav"]
    shuffled = random.Random(0).sample(wanted, len(wanted))
    make(tmp_path, *shuffled, "a/1.txt", "README.md", "m.jsonl", "m.jsonl.idx", ".hidden.wav", ".snapshot/z.wav")
    assert names(tmp_path) == ["a/1.wav", "a/2.FLAC", "a-b/x.mp3", "b/c/deep.opus", "b/no_extension", "z.wav"]


def test_a_name_of_dots_is_no_hidden_file(tmp_path: Path) -> None:
    make(tmp_path, "....wav", "..flac", "....txt", ".wav", "._a.wav")
    assert names(tmp_path) == ["....wav", "..flac"]


def test_a_folder_too_large_for_memory_gives_the_same_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, *(f"{n}.wav" for n in range(100)), "new\nline.wav")
    in_memory = names(tmp_path)
    monkeypatch.setattr(listing, "NAMES_IN_MEMORY", 7)
    assert names(tmp_path) == in_memory
    assert len(in_memory) == 101


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    make(tmp_path, "data/a.wav", "other/b.wav")
    (tmp_path / "data/link").symlink_to(tmp_path / "other")
    (tmp_path / "data/circle").symlink_to(tmp_path / "data")
    assert names(tmp_path / "data") == ["a.wav", "link/b.wav"]


def test_a_folder_that_cannot_be_read_is_an_entry_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "locked/a.wav", "open/b.wav")
    scandir = os.scandir

    def locked_scandir(folder: str) -> object:
        if str(folder).endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", locked_scandir)
    entries = list(list_entries(tmp_path))
    assert [entry.error for entry in entries] == ["Permission denied", None]


def test_a_list_names_files_from_its_own_folder(tmp_path: Path) -> None:
    make(tmp_path, "a.wav", "sub/b.wav")
    (tmp_path / "files.lst").write_bytes(b"\xef\xbb\xbfsub\\b.wav\r\n\n  a.wav  \nmissing.wav")
    assert input_kind(tmp_path / "files.lst") == "list"
    assert names(tmp_path / "files.lst") == ["sub/b.wav", "a.wav", "missing.wav"]


def test_a_manifest_keeps_its_keys_and_its_bad_lines_have_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"audio_filepath": "a.wav", "duration": 2.5, "text": "x"}\n\nnot json\n{"text": "no path"}\n')
    entries = list(list_entries(path))
    assert entries[0].path == str(tmp_path / "a.wav")
    assert entries[0].item == {"duration": 2.5, "offset": None, "text": "x"}
    assert [(entry.path, entry.error) for entry in entries[1:]] == [
        (f"{path}:3", "not JSON (Expecting value at column 1)"),
        (f"{path}:4", "no 'audio_filepath'"),
    ]


def test_seconds_in_quotes_are_read_as_the_numbers_that_they_are_and_other_texts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(
        '{"audio_filepath": "a.wav", "duration": "3.2", "offset": "0.5"}\n'
        '{"audio_filepath": "a.wav", "duration": "long"}\n{"audio_filepath": "a.wav", "offset": "inf"}\n'
    )
    good, *bad = list_entries(path)
    assert good.item == {"duration": 3.2, "offset": 0.5}
    assert [entry.error for entry in bad] == [
        "'duration' is 'long', not a number of seconds",
        "'offset' is inf, not a number of seconds",
    ]


@pytest.mark.parametrize("missing", ["NaN", "null", '""', '"nan"'])
def test_a_missing_duration_as_pandas_or_excel_writes_it_is_measured(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"audio_filepath": "a.wav", "duration": {missing}, "offset": {missing}}}\n')
    (entry,) = list_entries(path)
    assert (entry.error, entry.item) == (None, {"duration": None, "offset": None})


def test_a_manifest_of_tar_shards_is_no_list_of_files(tmp_path: Path) -> None:
    path = tmp_path / "tarred_audio_manifest.json"
    path.write_text('{"audio_filepath": "0.wav", "duration": 2.0}\n')
    with pytest.raises(
        ValueError, match="tarred_audio_manifest.json: its audio is in tar shards. Give the manifest that"
    ):
        list_entries(path)


def test_inputs_that_are_neither_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.wav").write_bytes(b"RIFF\0\0\0\0WAVE")
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("x.wav", "not text"), ("pipe", "neither"), ("missing", "no such")):
        with pytest.raises(ValueError, match=reason):
            input_kind(tmp_path / name)
