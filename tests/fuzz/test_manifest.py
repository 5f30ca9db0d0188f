"""Any file is a manifest or refused with the line; `prepare` counts every line as good or as bad with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import example, given
from hypothesis import strategies as st

from nest_ssl.data import ManifestError, open_manifests, split_paths
from nest_ssl.data.manifest import index as index_module
from nest_ssl.data.manifest.read import MAX_FILES
from nest_ssl.prepare.ledger import bad_path
from nest_ssl.prepare.manifest import prepare_manifest
from tests.fuzz.effort import examples, outcome
from tests.unit.data.manifest.test_lines import manifest_lines

GOOD = b'{"audio_filepath": "good.wav", "duration": 0.5}'
ends = st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n", b"\r", b" \n\t\n", b"\x0c", b"\0", b"\xe2\x80\xa8"])
lines = st.one_of(
    manifest_lines,
    st.just(GOOD),
    st.sampled_from(
        [
            b'{"audio_filepath": "good.wav", "duration": 0.1, "duration": -1}',
            b'{"audio_filepath": "good.wav", "audio_filename": "bad.wav", "offset": 1e9}',
            b'{"audio_filepath": "good.wav", "offset": 0.25, "text": "\\ud800", "n": 1e999, "N": NaN}',
            b'{"audio_filepath": "good.wav", "text": "' + b"x" * 30_000 + b'"}',
            b'{"audio_filepath": "' + b"d/" * 5000 + b'x.wav"}',
            b'{"audio_filepath": "good.wav/x", "n": ' + b"9" * 999 + b"}",
            b'{"audio_filepath": ".", "x": ' + b'{"x":' * 300 + b"1" + b"}" * 300 + b"}",
            b"good.wav",
            b"bad.wav\0",
            b"\xff\xfe{\0",
            b"NaN",
            b"'x'",
        ]
    ),
)
contents = st.builds(
    lambda mark, parts, last: mark + b"".join(line + end for line, end in parts) + last,
    st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\xef\xbb"]),
    st.lists(st.tuples(lines, ends), max_size=6),
    lines | st.just(b""),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manifests")
    soundfile.write(folder / "good.wav", np.zeros(8000), 16000)
    (folder / "bad.wav").write_bytes(b"RIFF")
    return folder


@examples(150)
@given(contents, st.sampled_from([1, 7, 64, 4 << 20]))
def test_any_file_is_read_to_its_last_line_or_refused_with_the_line(
    folder: Path, content: bytes, piece_bytes: int
) -> None:
    path = folder / "m.jsonl"
    path.write_bytes(content)
    Path(f"{path}.idx").unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "PIECE_BYTES", piece_bytes)
        utterances, error = outcome(lambda: list(open_manifests(str(path))), ManifestError)
    if utterances is None:
        assert error is not None
        assert error.where.startswith(f"{path}:")
        assert len(str(error)) < 1000
        return
    filled = [line for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    assert len(utterances) == len(filled)


@examples(60)
@given(contents, st.sampled_from([".jsonl", ".txt"]), st.booleans())
@example(b"good.wav\na\0b.wav\n", ".txt", True)
@example(b"\xff\xfe{}", ".jsonl", False)
def test_prepare_counts_every_line_as_good_or_bad_and_training_reads_what_it_wrote(
    folder: Path, content: bytes, suffix: str, decode: bool
) -> None:
    source, output = folder / f"in{suffix}", folder / "out.jsonl"
    source.write_bytes(content)
    progress, error = outcome(lambda: prepare_manifest(source, output, decode=decode, restart=True), ValueError)
    if progress is None and "contains no usable audio" in str(error):
        reasons = [json.loads(line)["reason"] for line in bad_path(output).read_bytes().splitlines()]
        assert f": {reasons[0]}. " in str(error)
        return
    if progress is None:
        assert str(error).startswith(f"{source}: not text")
        return
    utterances = list(open_manifests(str(output)))
    bad = [json.loads(line) for line in bad_path(output).read_bytes().splitlines()]
    assert len(utterances) == progress.num_good
    assert len(bad) == progress.num_bad
    assert all(line["reason"] and len(line["reason"]) < 1000 for line in bad)
    assert all(utterance.duration_s is not None for utterance in utterances)


pieces = st.sampled_from(
    ["a", "/", "{0..3}", "_OP_0..3_CL_", "{a,b}", "(0..2)", "{", "}", ",", "..", "{x,{y,z}}", "{a..e}", "<", "]"]
)
many = st.sampled_from(
    ["{0..99999999999}", "{a..z}", "{0..999}", "[0..9999]", "{-9..9}", f"{{0..{'9' * 5000}}}", "{0..9..0}"]
)


@examples(100)
@given(st.lists(pieces | many, max_size=8).map("".join))
@example("m_{0..99999999999}.jsonl")
@example("{a..z}" * 8)
@example("{a,b}" * 40)
@example(f"{{{'{a,b}' * 40},c}}")
def test_any_pattern_names_files_or_is_refused(pattern: str) -> None:
    paths, error = outcome(lambda: split_paths(pattern), ValueError, memory_gb=1)
    if paths is None:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
        return
    assert 0 < len(paths) <= MAX_FILES
