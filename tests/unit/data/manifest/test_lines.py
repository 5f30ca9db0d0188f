"""The lines of a manifest: whatever they contain, they are read or refused in words; where their paths lead."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nest_ssl.data.manifest.lines import (
    MAX_SECONDS,
    ManifestError,
    is_tarred_manifest,
    parse_line,
    parse_lines,
    resolve_audio_path,
)
from tests.fuzz.effort import examples

paths = st.text(max_size=12) | st.sampled_from(["a.wav", "a\0.wav", "\ud800.wav", "\x1b[2J", "~", "..", "a\\b.wav"])
numbers = st.floats() | st.integers() | st.sampled_from([10**400, -(10**400), 1e300, 5e-324, MAX_SECONDS, True])
values = st.none() | numbers | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
objects = st.fixed_dictionaries(
    {}, optional={"audio_filepath": paths | values, "audio_filename": paths, "duration": values, "offset": values}
)
manifest_lines = (
    st.builds(lambda value, ascii_only: _encoded(value, ascii_only), objects | values, st.booleans())
    | st.binary(max_size=30)
    | st.builds(
        lambda line, cut: line[:cut], st.builds(lambda value: _encoded(value, True), objects), st.integers(0, 60)
    )
    | st.sampled_from([b"", b" ", b"\t", b"[" * 100_000, b"{" * 500, b'{"duration": 1' + b"0" * 5000 + b"}"])
)
"""Lines that programs write, and what disks and people make of them."""


def _encoded(value: Any, ascii_only: bool) -> bytes:
    return json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")


@examples(300)
@given(st.lists(manifest_lines, max_size=5))
@example([b'{"audio_filepath": "a.wav", "duration": 1' + b"0" * 400 + b"}"])
@example([b'{"audio_filepath": "a.wav", "duration": 1, "n": 1' + b"0" * 5000 + b"}"])
@example([b'{"audio_filepath": "a.wav", "n": ' + b"[" * 5000 + b"]" * 5000 + b"}"])
@example([b'{"audio_filepath": "\\ud800.wav"}'])
@example([b'{"audio_filepath": "a\\u0000.wav"}', b'{"audio_filepath": "b.wav", "offset": 1e300}'])
def test_any_bytes_are_utterances_or_one_error_that_names_the_line(lines: list[bytes]) -> None:
    piece = b"\n".join(line.replace(b"\n", b" ") for line in lines)
    try:
        parsed = parse_lines(piece, "m.jsonl", 1)
    except ManifestError as error:
        refused: Any = error
    else:
        refused = None
    if refused is not None:
        assert refused.where.startswith("m.jsonl:")
        assert len(str(refused)) < 600
        return
    assert len(parsed.starts) == len(parsed.durations_s)
    for start, number, duration_s in zip(parsed.starts, parsed.line_numbers, parsed.durations_s, strict=True):
        # What the opening accepts, the reader accepts: nothing ends a training when its turn comes.
        item = parse_line(piece[start:].split(b"\n")[0], "m.jsonl", int(number) + 1)
        stated_s = item["duration"]
        assert np.isnan(duration_s) if stated_s is None else duration_s == np.float32(stated_s)
        assert 0 <= (item["offset"] or 0) <= MAX_SECONDS
        os.path.exists(resolve_audio_path(item["audio_filepath"], "m.jsonl"))  # raises for what is no path at all


def test_relative_paths_begin_at_the_manifest_or_else_at_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "corpus/a.wav").touch()
    (tmp_path / "elsewhere/b.wav").touch()
    monkeypatch.chdir(tmp_path / "elsewhere")
    manifest = str(tmp_path / "corpus/m.jsonl")
    assert resolve_audio_path("a.wav", manifest) == str(tmp_path / "corpus/a.wav")
    assert resolve_audio_path("b.wav", manifest) == str(tmp_path / "elsewhere/b.wav")
    assert resolve_audio_path("nowhere.wav", manifest) == str(tmp_path / "corpus/nowhere.wav")
    assert resolve_audio_path("/abs/x.wav", manifest) == "/abs/x.wav"
    assert resolve_audio_path("~/x.wav", manifest) == str(Path("~/x.wav").expanduser())
    assert resolve_audio_path("a.wav", "../corpus/m.jsonl") == str(tmp_path / "corpus/a.wav")


def test_backslashes_are_separators_unless_a_file_has_them_in_its_name(tmp_path: Path) -> None:
    manifest = str(tmp_path / "m.jsonl")
    (tmp_path / "odd\\name.wav").touch()
    assert resolve_audio_path("sub\\dir\\x.wav", manifest) == str(tmp_path / "sub/dir/x.wav")
    assert resolve_audio_path("odd\\name.wav", manifest) == str(tmp_path / "odd\\name.wav")


def test_names_in_manifests_of_tar_shards_are_left_alone() -> None:
    assert is_tarred_manifest("/d/sharded_manifests/manifest_12.json")
    assert is_tarred_manifest("tarred_audio_manifest.json")
    assert not is_tarred_manifest("/d/manifest_12.json")
    assert resolve_audio_path("x.wav", "/d/sharded_manifests/manifest_0.json") == "x.wav"


@pytest.mark.parametrize("escape", ["\\u0000", "\\ud800"], ids=["NUL", "half of a surrogate pair"])
def test_a_path_that_no_file_can_have_is_refused_when_the_manifest_is_opened(escape: str) -> None:
    good = b'{"audio_filepath": "a.wav", "duration": 1.0}\n'
    bad = f'{{"audio_filepath": "a{escape}.wav", "duration": 1.0}}\n'.encode()
    with pytest.raises(ManifestError, match="m.jsonl:2: 'audio_filepath' is .*, not a path"):
        parse_lines(good + bad, "m.jsonl", 1)


@pytest.mark.parametrize(
    "text", [b"[", b'[{"audio_filepath": "a.wav"}]', b"audio_filepath,duration", b"\x1f\x8b\x08", b"1"]
)
def test_a_file_that_is_not_json_lines_is_not_sent_to_prepare_which_would_leave_all_of_it_out(text: bytes) -> None:
    with pytest.raises(ManifestError, match="m.csv:1: .* Write one JSON object per line, such as"):
        parse_line(text, "m.csv", 1)
    with pytest.raises(ManifestError, match="m.csv:2: .* Run 'nest-ssl prepare m.csv"):
        parse_line(text, "m.csv", 2)
