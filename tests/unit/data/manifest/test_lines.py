"""Where the audio paths of a manifest lead."""

from __future__ import annotations

from pathlib import Path

import pytest

from nest_ssl.data.manifest.lines import ManifestError, is_tarred_manifest, parse_lines, resolve_audio_path


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
