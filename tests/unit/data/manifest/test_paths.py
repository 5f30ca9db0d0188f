"""Lists, patterns, and where audio paths lead."""

from __future__ import annotations

from pathlib import Path

import pytest

from nest_ssl.data.manifest.paths import is_tarred_manifest, resolve_audio_path, split_groups, split_paths


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
