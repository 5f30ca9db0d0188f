"""Manifests: every line as it stands, in no memory, from any process; what is wrong is named by file and line."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_ssl.data import Manifest, ManifestError, open_manifests, split_groups, split_paths
from nest_ssl.data.manifest import index as index_module
from nest_ssl.data.manifest import read
from nest_ssl.data.manifest.read import KeptOpen
from tests.fuzz.effort import examples


def line(path: str = "a.wav", **values: Any) -> str:
    return json.dumps({"audio_filepath": path, **values}) + "\n"


def write(path: Path, *lines: str | bytes) -> str:
    path.write_bytes(b"".join(text if isinstance(text, bytes) else text.encode() for text in lines))
    return str(path)


def test_a_line_becomes_an_utterance(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", line("sub/a.wav", duration=1.5, offset=0.25, text="é", score=float("nan")))
    utterance = open_manifests(path)[0]
    assert utterance.audio_filepath == str(tmp_path / "sub/a.wav")
    assert (utterance.duration_s, utterance.offset_s) == (1.5, 0.25)
    assert utterance.extra["text"] == "é"
    assert np.isnan(utterance.extra["score"])
    assert (utterance.manifest, utterance.line) == (path, 1)


def test_audio_filename_is_another_name_of_the_key(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", '{"audio_filename": "b.wav"}\n')
    utterance = open_manifests(path)[0]
    assert (utterance.audio_filepath, utterance.duration_s) == (str(tmp_path / "b.wav"), None)
    assert utterance.extra == {}


def test_a_line_break_in_a_name_does_not_break_the_message(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        open_manifests(str(tmp_path / "a\nnest-ssl: all is well.jsonl"))
    assert "\n" not in str(caught.value)
    assert "a\\nnest-ssl: all is well.jsonl: no such manifest" in str(caught.value)


def test_marks_carriage_returns_and_blank_lines_do_not_disturb(tmp_path: Path) -> None:
    text = "\r\n\n" + line("a.wav", duration=1) + " " * 50 + "\r\n" + line("b.wav", duration=2)[:-1] + "\r\n\n\t\n"
    path = write(tmp_path / "m.jsonl", b"\xef\xbb\xbf", text, line("c.wav", duration=3)[:-1])
    manifest = open_manifests(path)
    assert [(Path(u.audio_filepath).name, u.line) for u in manifest] == [("a.wav", 3), ("b.wav", 5), ("c.wav", 8)]
    np.testing.assert_array_equal(manifest.durations_s, [1, 2, 3])


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ('{"audio_filepath": "x"\n', "not JSON (Expecting ',' delimiter at column 23)"),
        ("\x0c\n", "not JSON (Expecting value at column 1)"),
        ('{"duration": 1}\n', "no 'audio_filepath'"),
        ("[1]\n", "a JSON list instead of an object"),
        (line("x", duration=-1), "'duration' is -1, which is negative"),
        (line("x", duration="1"), "'duration' is '1', not a number of seconds"),
        (line("x", duration=True), "'duration' is True, not a number of seconds"),
        (line("x", duration=float("nan")), "'duration' is nan, not a number of seconds"),
        (line("x", offset=-0.5), "'offset' is -0.5, which is negative"),
        (line(""), "'audio_filepath' is '', not a path"),
        (json.dumps({"audio_filepath": ["a", "b"]}), "'audio_filepath' is ['a', 'b'], not a path"),
        (b'{"audio_filepath": "\xff.wav"}\n', "not UTF-8 (byte 0xff at column 21)"),
        (line("x")[:-1] + " " + line("y"), "not JSON (Extra data at column 25)"),
        ("[" * 100_000, "not JSON (nested too deeply)"),
    ],
)
def test_a_bad_line_is_named_with_the_way_out(bad: str | bytes, what: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", line(duration=1), "\n", bad)
    with pytest.raises(ManifestError) as caught:
        open_manifests(path)
    assert str(caught.value).startswith(f"{path}:3: {what}. Run 'nest-ssl prepare")
    assert not Path(f"{path}.idx").exists()
    assert list(tmp_path.iterdir()) == [tmp_path / "m.jsonl"]


def test_a_missing_manifest_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"m\.jsonl: no such manifest"):
        open_manifests(str(tmp_path / "m.jsonl"))
    with pytest.raises(ManifestError, match="not a regular file"):
        open_manifests(str(tmp_path))


def test_a_pattern_that_is_not_closed_is_refused_with_how_to_write_one() -> None:
    with pytest.raises(ValueError, match=r"manifest_filepath or .*: m_\{0\.\.1\.json: Unbalanced .*_OP_0\.\.9_CL_"):
        split_paths("m__OP_0..1.json")


def test_filters_keep_what_lies_between_and_say_what_they_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = write(tmp_path / "a.jsonl", *(line(f"a{i}.wav", duration=i) for i in range(10_000)))
    second = write(tmp_path / "b.jsonl", *(line(f"b{i}.wav", duration=i / 10) for i in range(100)))
    with caplog.at_level(logging.INFO):
        manifest = open_manifests([first, second], min_duration_s=3, max_duration_s=6000)
    names = [Path(u.audio_filepath).name for u in manifest]
    assert names == [f"a{i}.wav" for i in range(3, 6001)] + [f"b{i}.wav" for i in range(30, 100)]
    assert manifest.durations_s.tolist() == [np.float32(u.duration_s) for u in manifest]
    assert manifest[-1].manifest == second
    assert caplog.messages[-1].startswith("a.jsonl (+1): 6,068 utterances, 5,001.")
    assert "33 shorter than 3 s (0.8 min), 3,999 longer than 6000 s" in caplog.messages[-1]
    assert len(open_manifests([first, second], min_duration_s=3, max_utterances=5)) == 5
    assert len(open_manifests([first, second], max_utterances=10_001)) == 10_001
    assert len(open_manifests(first, min_duration_s=1e9)) == 0


def test_filters_need_durations(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", line(duration=1), line())
    with pytest.raises(ManifestError, match=r"m\.jsonl:2: no 'duration', which .* need\. Run 'nest-ssl prepare"):
        open_manifests(path, max_duration_s=10)
    assert np.isnan(open_manifests(path).durations_s[1])


def test_it_is_a_sequence(tmp_path: Path) -> None:
    manifest = open_manifests(write(tmp_path / "m.jsonl", *(line(f"{i}.wav") for i in range(5))))
    assert manifest[-1] == manifest[4]
    assert manifest[1:3] == [manifest[1], manifest[2]]
    assert manifest[int(np.int64(2))] == manifest[2]
    for outside in (5, -6):
        with pytest.raises(IndexError, match="5 utterances"):
            manifest[outside]
    assert len(open_manifests(write(tmp_path / "empty.jsonl"))) == 0


def test_the_index_is_built_once_and_again_when_the_manifest_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.jsonl", line("a.wav"))
    open_manifests(path)
    before = Path(f"{path}.idx").stat().st_mtime_ns
    open_manifests(path)
    assert Path(f"{path}.idx").stat().st_mtime_ns == before
    write(tmp_path / "m.jsonl", line("a.wav"), line("b.wav"))
    assert len(open_manifests(path)) == 2
    write(tmp_path / "m.jsonl", line("x.wav"), line("y.wav"))  # the same size, another time
    os.utime(path, ns=(1, 1))
    assert Path(open_manifests(path)[1].audio_filepath).name == "y.wav"
    Path(f"{path}.idx").write_bytes(Path(f"{path}.idx").read_bytes()[:-1])  # cut off by a full disk
    assert len(open_manifests(path)) == 2


def test_a_damaged_index_is_built_again_and_blames_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "m.jsonl", *(line(f"{i}.wav") for i in range(5)), "\n", line("last.wav"))
    index = Path(f"{path}.idx")
    before = open_manifests(path)
    fingerprint, good = before.fingerprint(), index.read_bytes()
    for place in range(0, len(good), 3):  # header, starts, durations and gaps
        index.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        manifest = open_manifests(path)
        assert (list(manifest), manifest.fingerprint()) == (list(before), fingerprint)
        assert index.read_bytes() == good
    assert "m.jsonl.idx: damaged; it is built again" in caplog.text


def test_an_index_that_is_a_fifo_does_not_block(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", line("a.wav"))
    os.mkfifo(f"{path}.idx")
    assert len(open_manifests(path)) == 1


@pytest.mark.parametrize("new", ['{"audio_filepath": "b.wav", "duration": 9.0}', '"a.wav"'])
def test_a_manifest_that_changed_unnoticed_is_indexed_again_when_a_line_does_not_fit(tmp_path: Path, new: str) -> None:
    old = '{"audio_filepath": "a.wav", "duration": 1.0}'
    path = write(tmp_path / "m.jsonl", old)
    status = os.stat(path)
    manifest = open_manifests(path)
    write(tmp_path / "m.jsonl", new.ljust(len(old)))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    expected = "was changed since it was opened.*repeat the command" if "9.0" in new else "jsonl:1: a JSON str"
    with pytest.raises(ManifestError, match=expected):
        manifest[0]
    if "9.0" in new:
        assert open_manifests(path)[0].duration_s == 9.0


def test_a_folder_that_cannot_be_written_has_its_index_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NEST_SSL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    path = write(tmp_path / "data/m.jsonl", line("a.wav"))
    build = index_module._build

    def read_only(manifest: str, place: Path, status: os.stat_result) -> None:
        if place.parent == tmp_path / "data":
            raise PermissionError(13, "Permission denied")
        build(manifest, place, status)

    monkeypatch.setattr(index_module, "_build", read_only)
    assert len(open_manifests(path)) == 1
    assert len(caplog.messages) == 1
    assert "cannot be written" in caplog.messages[0]
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert len(open_manifests(path)) == 1
    assert len(caplog.messages) == 1


@examples(30)
@given(lines=st.lists(st.one_of(st.none(), st.floats(0, 100)), max_size=40), piece_bytes=st.integers(1, 300))
def test_the_index_does_not_depend_on_how_the_file_is_cut_into_pieces(
    lines: list[float | None], piece_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    text = ["\n" if seconds is None else line(f"{n}.wav", duration=seconds) for n, seconds in enumerate(lines)]
    path = write(folder / "m.jsonl", *text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "PIECE_BYTES", piece_bytes)
        manifest = open_manifests(path)
    expected = [(f"{n}.wav", seconds, n + 1) for n, seconds in enumerate(lines) if seconds is not None]
    assert [(Path(u.audio_filepath).name, u.duration_s, u.line) for u in manifest] == expected


def read_all(manifest: Manifest, results: Any) -> None:
    results.put([(u.audio_filepath, u.line) for u in manifest])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_the_same_at_the_same_time(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "SMALL_INDEX_BYTES", 0)  # memory-mapped, as a large one
    path = write(tmp_path / "m.jsonl", *(line(f"{i}.wav", duration=i) for i in range(3000)))
    manifest = open_manifests(path, min_duration_s=10)
    expected = [(u.audio_filepath, u.line) for u in manifest]
    context: Any = multiprocessing.get_context(method)
    results = context.Queue()
    workers = [context.Process(target=read_all, args=(manifest, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert all(results.get(timeout=60) == expected for _ in workers)
    for worker in workers:
        worker.join()


def test_pickling_holds_paths_and_not_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", *(line(f"{i}.wav", duration=i) for i in range(5000)))
    manifest = open_manifests(path, max_duration_s=4000)
    data = pickle.dumps(manifest)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert len(again) == len(manifest)
    assert again[77] == manifest[77]
    assert again.fingerprint() == manifest.fingerprint()


def test_the_fingerprint_is_that_of_the_data_wherever_it_lies(tmp_path: Path) -> None:
    lines = [line(f"{i}.wav", duration=i) for i in range(10)]
    (tmp_path / "copy").mkdir()
    first, copy = write(tmp_path / "m.jsonl", *lines), write(tmp_path / "copy/m.jsonl", *lines)
    other = write(tmp_path / "other.jsonl", *lines[:-1], line("9.flac", duration=9))
    fingerprint = open_manifests(first).fingerprint()
    assert open_manifests(copy).fingerprint() == fingerprint
    assert open_manifests(first, max_duration_s=100).fingerprint() == fingerprint
    assert open_manifests(first, max_duration_s=5).fingerprint() != fingerprint
    assert open_manifests(other).fingerprint() != fingerprint
    assert open_manifests([first, other]).fingerprint() != open_manifests([other, first]).fingerprint()


def test_more_manifests_than_open_files_are_allowed(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"m_{i}.jsonl", line(f"{i}.wav", duration=1)) for i in range(200)]
    manifest = open_manifests(str(tmp_path / "m_{0..199}.jsonl"))
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    assert [Path(u.audio_filepath).name for u in manifest] == [f"{i}.wav" for i in range(200)]
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 64
    assert manifest.paths == paths


def test_durations_cannot_be_changed_by_a_user_of_them(tmp_path: Path) -> None:
    manifest = open_manifests(write(tmp_path / "m.jsonl", line(duration=1), line(duration=20)), max_duration_s=10)
    with pytest.raises(ValueError, match="read-only"):
        manifest.durations_s[0] = 2


@pytest.mark.parametrize(
    ("paths", "groups"),
    [
        ("a.json", [["a.json"]]),
        ("a.json, b.json,", [["a.json"], ["b.json"]]),
        (["a.json", "b.json"], [["a.json"], ["b.json"]]),
        ([["a.json", "b.json"], ["c.json"]], [["a.json", "b.json"], ["c.json"]]),
        ("m__OP_0..2_CL_.json,x.json", [["m_0.json", "m_1.json", "m_2.json"], ["x.json"]]),
        ("m_{08..10}.json", [["m_08.json", "m_09.json", "m_10.json"]]),
        ("m_(0..1).json", [["m_0.json", "m_1.json"]]),
        ("m_[0..1].json", [["m_0.json", "m_1.json"]]),
        ("m_<0..1>.json", [["m_0.json", "m_1.json"]]),
        ("m_{a,b}.json", [["m_a.json", "m_b.json"]]),
        ("d_{0..1}/m__OP_0..1_CL_.json", [["d_0/m_0.json", "d_0/m_1.json", "d_1/m_0.json", "d_1/m_1.json"]]),
        ("data (old)/m.json", [["data (old)/m.json"]]),
        (["m_{0..1}.json", "x.json"], [["m_0.json", "m_1.json"], ["x.json"]]),
    ],
)
def test_every_way_to_name_files_is_understood(paths: str | list[str], groups: list[list[str]]) -> None:
    assert split_groups(paths) == groups
    assert split_paths(paths) == [path for group in groups for path in group]


def test_an_existing_file_with_brackets_in_its_name_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "m_[0..1].json"
    path.touch()
    assert split_paths(str(path)) == [str(path)]


@pytest.mark.parametrize("nothing", ["", " , ", [], [[]], ["a", ""]])
def test_no_path_is_an_error(nothing: str | list[str]) -> None:
    with pytest.raises(ValueError, match="no path"):
        split_paths(nothing)


class Opened:
    """Remembers what is open."""

    now: list[str] = []  # noqa: RUF012

    def __init__(self, path: str) -> None:
        self.path, self.opened = path, self.now
        self.opened.append(path)

    def close(self) -> None:
        self.opened.remove(self.path)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> KeptOpen[Opened]:
    monkeypatch.setattr(Opened, "now", [])
    monkeypatch.setattr(read, "MAX_OPEN", 2)
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
    elsewhere = pickle.loads(pickle.dumps(files))
    use(elsewhere, "a")
    monkeypatch.setattr("os.getpid", lambda: -1)  # as after a fork
    use(files, "a")
    assert Opened.now == ["a", "a", "a"]
    del elsewhere
    assert Opened.now == ["a", "a"], "files are closed with what kept them open"


def test_an_error_lets_the_next_one_in(files: KeptOpen[Opened]) -> None:
    with pytest.raises(KeyError), files.file("a"):
        raise KeyError
    assert use(files, "a") == "a"


def test_audio_outside_the_duration_limits_is_reported_above_five_percent(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = [{"audio_filepath": f"{n}.wav", "duration": 7200.0 if n == 0 else 30.0} for n in range(5)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = Manifest([str(path)], min_duration_s=1.0, max_duration_s=60.0).outside_limits()
    assert words.startswith("2.00 of 2.03 h (98.4%) are in files outside the duration limits of training (1 to 60 s)")
    assert Manifest([str(path)], min_duration_s=1.0, max_duration_s=9000.0).outside_limits() == ""
    assert Manifest([str(path)]).outside_limits() == ""


def test_an_empty_manifest_among_others_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_text('{"audio_filepath": "a.wav", "duration": 1.0}\n')
    for name in ("b", "c"):
        (tmp_path / f"{name}.jsonl").write_text("\n")
    assert len(open_manifests([str(tmp_path / f"{name}.jsonl") for name in "abc"])) == 1
    assert caplog.messages == [f"{tmp_path / 'b.jsonl'}: is empty, and so are 1 more."]
