"""Tar shards: NeMo's names, every utterance once, the same bytes again."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile

from nest_ssl.audio import read_audio
from nest_ssl.data import open_manifests
from nest_ssl.prepare import shards as shards_module
from nest_ssl.prepare.shards import join_shard_manifests, shard_manifest_path, tar_path, write_shards

RATE = 16000


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Ten files, one of them twice as segments."""
    rng = np.random.default_rng(0)
    items = []
    for number in range(10):
        name = f"audio.dir/utt.{number}-sub1.wav"
        (tmp_path / name).parent.mkdir(exist_ok=True)
        soundfile.write(tmp_path / name, rng.uniform(-0.5, 0.5, RATE + number), RATE)
        items.append({"audio_filepath": name, "duration": 1.0, "text": f"words {number}"})
    soundfile.write(tmp_path / "long.wav", rng.uniform(-0.5, 0.5, (4 * RATE, 2)), RATE, subtype="PCM_16")
    soundfile.write(tmp_path / "loud.wav", 3 * rng.uniform(-1, 1, 4 * RATE), RATE, subtype="FLOAT")
    items += [{"audio_filepath": "long.wav", "duration": 1.5, "offset": offset} for offset in (0.0, 2.0)]
    items += [{"audio_filepath": "loud.wav", "duration": 1.0, "offset": 1.0}]
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def contents(folder: Path, num_shards: int) -> dict[str, bytes]:
    files = {}
    for shard in range(num_shards):
        with tarfile.open(tar_path(folder, shard)) as archive:
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None
                assert member.name not in files
                files[member.name] = file.read()
    return files


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_utterance_is_in_one_shard_with_its_samples(manifest: Path, tmp_path: Path, num_workers: int) -> None:
    folder = tmp_path / "tarred"
    assert write_shards(manifest, folder, 3, num_workers=num_workers) == 3
    assert join_shard_manifests(folder, 3)
    files = contents(folder, 3)
    originals = open_manifests(str(manifest))
    found = 0
    for shard in range(3):
        lines = [json.loads(line) for line in shard_manifest_path(folder, shard).read_text().splitlines()]
        with tarfile.open(tar_path(folder, shard)) as archive:
            assert archive.getnames() == [line["audio_filepath"] for line in lines]
        for line in lines:
            original = originals[int(line["audio_filepath"][:9])]
            assert line["shard_id"] == shard == int(line["audio_filepath"][:9]) % 3
            assert (line["duration"], line.get("text")) == (original.duration_s, original.extra.get("text"))
            assert line["audio_filepath"].count(".") == 1  # webdataset's key ends at the first dot
            expected = read_audio(
                original.audio_filepath, sample_rate=RATE, offset_s=original.offset_s, duration_s=original.duration_s
            )
            samples = read_audio(files[line["audio_filepath"]], sample_rate=RATE, duration_s=line["duration"])
            np.testing.assert_array_equal(samples, expected)
            found += 1
    assert found == len(originals) == 13
    joined = open_manifests(str(folder / "tarred_audio_manifest.json"))
    assert sorted(utterance.audio_filepath for utterance in joined) == sorted(files)


def test_whole_files_are_copied_byte_for_byte_and_segments_cut(manifest: Path, tmp_path: Path) -> None:
    write_shards(manifest, tmp_path / "tarred", 1)
    files = contents(tmp_path / "tarred", 1)
    assert files["000000003_utt_3_sub1.wav"] == (tmp_path / "audio.dir/utt.3-sub1.wav").read_bytes()
    assert len(files["000000011_long.flac"]) < 2 * 2 * 1.6 * RATE  # 16 of the 24 bits are stored
    assert "000000012_loud.wav" in files  # FLAC would clip it


def test_audio_whose_name_is_only_dots_keeps_its_suffix_in_a_shard(manifest: Path, tmp_path: Path) -> None:
    names = ("....wav", ".wav", "no_suffix")
    for name in names:
        (tmp_path / name).write_bytes((tmp_path / "long.wav").read_bytes())
    manifest.write_text("".join(json.dumps({"audio_filepath": name, "duration": 4.0}) + "\n" for name in names))
    write_shards(manifest, tmp_path / "tarred", 1)
    assert list(contents(tmp_path / "tarred", 1)) == ["000000000____.wav", "000000001_.wav", "000000002_no_suffix"]


def test_shards_that_are_there_are_left_and_a_half_written_one_is_made_again(manifest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tarred"
    assert write_shards(manifest, folder, 4, shards=[0, 1, 3]) == 3
    shard_manifest_path(folder, 0).unlink()  # killed before the last rename
    assert not join_shard_manifests(folder, 4)
    (folder / "audio_2.tar.partial").write_bytes(b"killed while writing")
    assert write_shards(manifest, folder, 4) == 2
    write_shards(manifest, tmp_path / "undisturbed", 4)
    for shard in range(4):
        assert tar_path(folder, shard).read_bytes() == tar_path(tmp_path / "undisturbed", shard).read_bytes()
    assert not list(folder.glob("*.partial"))


def test_shards_of_other_data_are_not_mixed_with_ours(manifest: Path, tmp_path: Path) -> None:
    write_shards(manifest, tmp_path / "tarred", 4)
    with pytest.raises(ValueError, match="shards of other data"):
        write_shards(manifest, tmp_path / "tarred", 3)


def test_shards_of_another_corpus_are_refused_and_left(manifest: Path, tmp_path: Path) -> None:
    write_shards(manifest, tmp_path / "tarred", 4)
    before = tar_path(tmp_path / "tarred", 0).read_bytes()
    lines = manifest.read_text().splitlines(keepends=True)
    other = manifest.with_name("other.jsonl")
    other.write_text("".join(lines[::-1]))  # as many, with other audio in each place
    with pytest.raises(ValueError, match="manifest_0.json: shards of other data, .* Give another folder"):
        write_shards(other, tmp_path / "tarred", 4)
    assert tar_path(tmp_path / "tarred", 0).read_bytes() == before


@pytest.mark.parametrize("missing", [["manifest_0.json.state"], ["manifest_0.json.state", "manifest_0.json"]])
def test_shards_that_another_program_wrote_are_refused_and_left(
    manifest: Path, tmp_path: Path, missing: list[str]
) -> None:
    folder = tmp_path / "tarred"
    write_shards(manifest, folder, 4)
    for name in missing:
        (folder / "sharded_manifests" / name).unlink()
    tar_path(folder, 0).write_bytes(b"of another corpus")
    with pytest.raises(ValueError, match="_0.*: shards of other data.* Give another folder, or remove them"):
        write_shards(manifest, folder, 4)
    assert tar_path(folder, 0).read_bytes() == b"of another corpus"


def test_a_shard_whose_manifest_is_damaged_is_written_again(manifest: Path, tmp_path: Path) -> None:
    write_shards(manifest, tmp_path, 4)
    path = shard_manifest_path(tmp_path, 1)
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)))
    assert write_shards(manifest, tmp_path, 4) == 1
    assert path.read_bytes() == whole


def test_a_shard_whose_audio_was_replaced_or_whose_tar_is_cut_is_written_again(manifest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tarred"
    write_shards(manifest, folder, 4)
    whole = tar_path(folder, 2).read_bytes()
    tar_path(folder, 2).write_bytes(whole[:9000])
    assert write_shards(manifest, folder, 4) == 1
    assert tar_path(folder, 2).read_bytes() == whole
    assert write_shards(manifest, folder, 4) == 0
    audio = Path(open_manifests(str(manifest))[1].audio_filepath)
    os.utime(audio, (1, 1))
    assert write_shards(manifest, folder, 4) >= 1
    assert write_shards(manifest, folder, 4) == 0


@pytest.mark.parametrize("damage", ["[1]", "null", '"x"', "{", "[" * 100_000])
def test_a_shard_whose_note_is_damaged_is_written_again(manifest: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "tarred"
    write_shards(manifest, folder, 4)
    note = shard_manifest_path(folder, 2).with_name("manifest_2.json.state")
    whole = note.read_text()
    note.write_text(damage)
    assert write_shards(manifest, folder, 4) == 1
    assert note.read_text() == whole


def test_a_segment_gives_the_same_bytes_at_another_time(manifest: Path, tmp_path: Path) -> None:
    write_shards(manifest, tmp_path / "tarred", 1)
    loud = contents(tmp_path / "tarred", 1)["000000012_loud.wav"]
    at = loud.index(b"PEAK")
    assert loud[at + 8 : at + 16] == b"\1\0\0\0" + bytes(4)  # version, time


@pytest.mark.parametrize("num_shards", [0, 14])
def test_more_shards_than_utterances_are_refused(manifest: Path, tmp_path: Path, num_shards: int) -> None:
    with pytest.raises(ValueError, match="Give 1 to 13"):
        write_shards(manifest, tmp_path, num_shards)


def test_a_file_that_vanished_is_named(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "audio.dir/utt.5-sub1.wav").unlink()
    with pytest.raises(ValueError, match=r"utt\.5-sub1\.wav: No such file"):
        write_shards(manifest, tmp_path / "tarred", 2)
    assert not shard_manifest_path(tmp_path / "tarred", 1).exists()
    assert shards_module.SEGMENT_SLACK_S < 0.025
