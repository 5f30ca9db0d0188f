from __future__ import annotations

import gzip
import io
import itertools
import os
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch

from nest_ssl.audio import AudioError
from nest_ssl.config import DatasetConfig
from nest_ssl.data import TarredAudioNoiseDataset, build_loader
from nest_ssl.data.batch.collate import needed
from nest_ssl.data.plan.batches import Shape
from nest_ssl.data.sources.tar import TarShard
from tests.unit.data.corpus import RATE, Corpus, write_manifest

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

NUM_SHARDS = 5


@pytest.fixture(scope="module")
def shards(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """22 utterances in 5 shards of 4 or 5, in NeMo's naming, with manifests per shard and one for all."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "sharded_manifests").mkdir()
    everything = []
    for shard in range(NUM_SHARDS):
        lines = []
        with tarfile.open(folder / f"audio_{shard}.tar", "w") as tar:
            for i in range(shard, 22, NUM_SHARDS):
                tar.add(corpus.folder / f"speech_{i}.wav", f"speech_{i}.wav")
                line = {"audio_filepath": f"speech_{i}.wav", "duration": corpus.durations_s[i], "shard_id": shard}
                lines.append(line)
        write_manifest(folder / "sharded_manifests" / f"manifest_{shard}.json", lines)
        everything += lines
    write_manifest(folder / "tarred_audio_manifest.json", everything[::-1])
    return folder


def config(corpus: Corpus, shards: Path, *, per_shard: bool = True, **changed: Any) -> DatasetConfig:
    manifest = "sharded_manifests/manifest__OP_0..4_CL_.json" if per_shard else "tarred_audio_manifest.json"
    settings: dict[str, Any] = {
        "manifest_filepath": str(shards / manifest),
        "tarred_audio_filepaths": str(shards / "audio__OP_0..4_CL_.tar"),
        "is_tarred": True,
        "shuffle_n": 6,
        "batch_size": 2,
    }
    return corpus.config(**{**settings, **changed})


def names(batches: list[Any]) -> Counter[str]:
    return Counter(name for batch in batches for name in batch.audio_filepaths)


@pytest.mark.parametrize("per_shard", [True, False])
def test_every_utterance_of_the_shards_is_read_with_its_own_audio(
    corpus: Corpus, shards: Path, per_shard: bool
) -> None:
    batches = list(build_loader(config(corpus, shards, per_shard=per_shard)))
    assert names(batches) == Counter(f"speech_{i}.wav" for i in range(22))
    for batch in batches:
        for name, row, length in zip(batch.audio_filepaths, batch.audio, batch.audio_len, strict=True):  # type: ignore[arg-type]
            expected, _ = soundfile.read(corpus.folder / name, dtype="float32")
            assert torch.equal(row[:length], torch.from_numpy(expected))


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 11])
def test_scattered_shards_give_every_rank_the_same_number_of_batches(
    corpus: Corpus, shards: Path, world_size: int, drop_last: bool
) -> None:
    settings = config(corpus, shards, drop_last=drop_last)
    loaders = [build_loader(settings, rank=rank, world_size=world_size) for rank in range(world_size)]
    specs = [list(loader.batches) for loader in loaders]
    assert len({tuple(len(spec.indices) for spec in rank) for rank in specs}) == 1
    found = Counter(i for rank in specs for spec in rank for i in spec.indices.tolist())
    if drop_last:
        assert sum(found.values()) == 22 - 22 % (2 * world_size)
        assert set(found.values()) <= {1}
    else:
        assert set(found) == set(range(22))
        assert sum(found.values()) - 22 < world_size


def test_replicated_shards_give_every_rank_all_utterances(corpus: Corpus, shards: Path) -> None:
    settings = config(corpus, shards, tarred_shard_strategy="replicate")
    ranks = [list(build_loader(settings, rank=rank, world_size=3)) for rank in range(3)]
    assert all(names(batches) == Counter(f"speech_{i}.wav" for i in range(22)) for batches in ranks)
    assert len({tuple(batches[0].audio_filepaths) for batches in ranks}) > 1


@pytest.mark.parametrize("more", [{}, {"use_bucketing": True, "num_buckets": 3}, {"drop_last": True}])
@pytest.mark.parametrize("strategy", ["scatter", "replicate"])
@pytest.mark.parametrize("per_shard", [True, False])
def test_all_ranks_have_the_same_planned_shape_which_every_utterance_fits(
    corpus: Corpus, shards: Path, per_shard: bool, strategy: str, more: dict[str, Any]
) -> None:
    settings = config(corpus, shards, per_shard=per_shard, tarred_shard_strategy=strategy, noise_manifest=None, **more)
    loaders = [build_loader(settings, rank=rank, world_size=2, seed=2) for rank in range(2)]
    for step in zip(*loaders, strict=True):
        (shape,) = {Shape(len(batch.audio_filepaths), batch.planned_samples or 0) for batch in step}
        assert shape in loaders[0].shapes()
        assert all(needed(batch.audio).shape[1] < shape.num_samples and not batch.num_cropped for batch in step)


def test_batches_do_not_depend_on_workers_and_can_be_resumed(corpus: Corpus, shards: Path) -> None:
    whole = list(build_loader(config(corpus, shards), seed=5))
    for num_workers in (1, 4):
        found = list(build_loader(config(corpus, shards, num_workers=num_workers), seed=5))
        assert all(torch.equal(a.noisy_audio, b.noisy_audio) for a, b in zip(whole, found, strict=True))  # type: ignore[arg-type]
    resumed = build_loader(config(corpus, shards), seed=5)
    resumed.resume({**resumed.position(), "next_batch": 6})
    rest = list(resumed)
    assert len(rest) == len(whole) - 6
    assert all(torch.equal(a.noisy_audio, b.noisy_audio) for a, b in zip(whole[6:], rest, strict=True))  # type: ignore[arg-type]


def test_shards_mix_and_form_buckets_like_files(corpus: Corpus, shards: Path) -> None:
    halves: dict[str, Any] = {
        "manifest_filepath": [
            [str(shards / f"sharded_manifests/manifest_{i}.json") for i in part] for part in ((0, 1), (2, 3, 4))
        ],
        "tarred_audio_filepaths": [[str(shards / f"audio_{i}.tar") for i in part] for part in ((0, 1), (2, 3, 4))],
    }
    mixed = list(build_loader(config(corpus, shards, is_concat=True, concat_sampling_temperature=1.0, **halves)))
    assert names(mixed) == Counter(f"speech_{i}.wav" for i in range(22))
    buckets = list(build_loader(config(corpus, shards, bucketing_batch_size=[3, 2], **halves)))
    assert names(buckets) == Counter(f"speech_{i}.wav" for i in range(22))
    assert {len(batch.audio_filepaths) for batch in buckets} == {3, 2, 1}


def test_an_entry_that_is_not_in_its_shard_is_replaced_and_named(corpus: Corpus, shards: Path, tmp_path: Path) -> None:
    lines = [{"audio_filepath": "speech_0.wav", "duration": 0.1}, {"audio_filepath": "gone.wav", "duration": 0.1}]
    manifest = write_manifest(tmp_path / "manifest_0.json", lines)
    settings = config(
        corpus,
        shards,
        manifest_filepath=str(manifest),
        tarred_audio_filepaths=str(shards / "audio_0.tar"),
        shard_manifests=True,
        max_bad_fraction=0.5,
    )
    loader = build_loader(settings)
    (batch,) = loader
    assert len(batch.audio_filepaths) == 2
    assert "gone.wav: no such member in the shard" in loader.bad_data.summary()


def test_one_manifest_leaves_out_what_is_in_no_shard(
    corpus: Corpus, shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [{"audio_filepath": name, "duration": 0.1} for name in ("gone.wav", "speech_3.wav", "speech_0.wav")]
    dataset = TarredAudioNoiseDataset(
        audio_tar_filepaths=[str(shards / "audio_0.tar"), str(shards / "audio_3.tar")],
        manifest_filepath=str(write_manifest(tmp_path / "tarred_audio_manifest.json", lines)),
        sample_rate=RATE,
    )
    assert "1 utterances are in none of the shards" in caplog.text
    assert [dataset.utterance(i).audio_filepath for i in range(len(dataset))] == ["speech_0.wav", "speech_3.wav"]


def test_nemos_sub_segments_and_folders_in_names_are_understood(corpus: Corpus, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "audio_0.tar", "w") as tar:
        tar.add(corpus.folder / "speech_0.wav", "some_folder/long.wav")
    shard = TarShard(str(tmp_path / "audio_0.tar"))
    expected = (corpus.folder / "speech_0.wav").read_bytes()
    for name in ("some_folder/long.wav", "long.wav", "long-sub1.flac", "/elsewhere/long.wav"):
        assert shard.read(name) == expected
    with pytest.raises(AudioError, match="no such member"):
        shard.read("short.wav")


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_SPARSE, tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_sparse_member_or_a_link_is_not_read_as_audio(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "audio_0.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        member = tarfile.TarInfo("a.wav")
        member.type, member.linkname = kind, "b.wav"
        tar.addfile(member)
    with pytest.raises(
        AudioError, match=r"a\.wav: no such member in the shard \(links and sparse files are not read\)"
    ):
        TarShard(str(tmp_path / "audio_0.tar")).read("a.wav")


def write_shard(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_members_with_equal_stems_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    members = {"spk1/001.txt": b"a text", "spk1/001.wav": b"one", "./spk2/001.wav": b"two", "a/spk2/001.wav": b"three"}
    shard = TarShard(str(write_shard(tmp_path / "audio_0.tar", members)))
    found = {
        "spk1/001.wav": b"one",
        "/data/spk1/001.flac": b"one",
        "spk2/001.wav": b"two",  # the same name, though another member ends with it
        "/data/spk2/001.wav": b"two",
        "/data/a/spk2/001.wav": b"three",
        "spk1/001-sub2.wav": b"one",
    }
    assert {name: shard.read(name) for name in found} == found
    for name in ("001.wav", "/data/spk3/001.wav"):
        with pytest.raises(AudioError, match=r"members fit equally well \(.*\)\. Write"):
            shard.read(name)


def test_one_manifest_finds_members_with_equal_stems_in_their_own_shards(tmp_path: Path) -> None:
    shards = [str(write_shard(tmp_path / f"audio_{i}.tar", {f"spk{i}/001.wav": b"x"})) for i in range(3)]

    def shard_sizes(*names: str) -> tuple[int, ...]:
        lines = [{"audio_filepath": name, "duration": 0.1} for name in names]
        manifest = write_manifest(tmp_path / "tarred_audio_manifest.json", lines)
        return TarredAudioNoiseDataset(
            audio_tar_filepaths=shards, manifest_filepath=str(manifest), sample_rate=RATE
        ).shard_sizes

    assert shard_sizes("/data/spk0/001.wav", "/data/spk1/001.wav", "/data/spk2/001.wav") == (1, 1, 1)
    with pytest.raises(ValueError, match=r"manifest\.json:2: 001\.wav: 3 members fit equally well"):
        shard_sizes("spk0/001.wav", "001.wav")


def test_a_member_that_claims_more_bytes_than_the_shard_has_is_a_bad_file(tmp_path: Path) -> None:
    path = tmp_path / "audio_0.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a.wav")
        info.size, info.pax_headers = 3, {"size": str(1 << 50)}
        tar.addfile(info, io.BytesIO(b"one"))
    with pytest.raises(AudioError, match=r"a\.wav: the shard ends after \d+ of 1125899906842624 bytes"):
        TarShard(str(path)).read("a.wav")


def test_a_shard_whose_header_claims_a_size_that_no_file_has_is_named(tmp_path: Path) -> None:
    path = tmp_path / "audio_0.tar"
    info = tarfile.TarInfo("a.wav")
    info.size = (1 << 63) - 1
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(
        AudioError, match=r"audio_0\.tar.*a\.wav: the shard ends after \d+ of 9223372036854775807 bytes"
    ):
        TarShard(str(path)).read("a.wav")


def test_a_shard_with_a_damaged_header_is_named_by_every_way_to_its_members(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_shard(tmp_path / "audio_0.tar", {"a.wav": b"one", "b.wav": b"two", "c.wav": b"three"})
    data = bytearray(path.read_bytes())
    data[1024 + 150] ^= 1  # in the checksum of the second header
    path.write_bytes(data)
    shard = TarShard(str(path))
    assert shard.read("a.wav") == b"one"
    with pytest.raises(AudioError, match=r"audio_0\.tar/c\.wav: .*no such member .*damaged at byte 1,024"):
        shard.read("c.wav")
    names = [{"audio_filepath": name, "duration": 0.1} for name in ("a.wav", "b.wav", "c.wav")]
    manifest = write_manifest(tmp_path / "tarred_audio_manifest.json", names)
    TarredAudioNoiseDataset(audio_tar_filepaths=str(path), manifest_filepath=str(manifest), sample_rate=RATE)
    assert f"{path}: the shard is damaged at byte 1,024: members after that are lost" in caplog.text
    assert "2 utterances are in none of the shards" in caplog.text


def test_what_comes_before_the_end_of_a_truncated_shard_is_read(corpus: Corpus, shards: Path, tmp_path: Path) -> None:
    data = (shards / "audio_0.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[: len(data) // 2])
    shard = TarShard(str(tmp_path / "cut.tar"))
    assert shard.read("speech_0.wav") == (corpus.folder / "speech_0.wav").read_bytes()
    with pytest.raises(AudioError, match=r"the shard ends after|no such member"):
        shard.read("speech_20.wav")
    (tmp_path / "junk.tar").write_bytes(b"junk" * 500)
    with pytest.raises(AudioError, match="not a readable, uncompressed tar file"):
        TarShard(str(tmp_path / "junk.tar"))


def test_missing_shards_and_wrong_numbers_of_manifests_are_refused_at_the_start(
    corpus: Corpus, shards: Path, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"audio_5\.tar: no such file \(2 of 7 shards are missing\)"):
        build_loader(config(corpus, shards, tarred_audio_filepaths=str(shards / "audio__OP_0..6_CL_.tar")))
    (tmp_path / "folder.tar").mkdir()
    os.mkfifo(tmp_path / "fifo.tar")
    for name, what in (("folder", "a folder"), ("fifo", "not a regular file")):
        with pytest.raises(ValueError, match=rf"{name}\.tar: is {what}\. Give uncompressed tar files"):
            build_loader(config(corpus, shards, tarred_audio_filepaths=str(tmp_path / f"{name}.tar")))
    (tmp_path / "gz.tar").write_bytes(gzip.compress((shards / "audio_0.tar").read_bytes()))
    others = ",".join(str(shards / f"audio_{number}.tar") for number in range(1, 5))
    with pytest.raises(ValueError, match=r"gz\.tar: not a readable, uncompressed tar file"):
        build_loader(config(corpus, shards, tarred_audio_filepaths=f"{tmp_path / 'gz.tar'},{others}"))
    with pytest.raises(ValueError, match="5 manifests for 4 tar shards"):
        build_loader(config(corpus, shards, tarred_audio_filepaths=str(shards / "audio__OP_0..3_CL_.tar")))
    with pytest.raises(ValueError, match="tarred_audio_filepaths: a value is needed"):
        build_loader(config(corpus, shards, tarred_audio_filepaths=None))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_dataset_can_be_iterated_by_ranks_with_torchs_own_loader(
    corpus: Corpus, shards: Path, num_workers: int
) -> None:
    seen: Counter[str] = Counter()
    for rank in range(2):
        dataset = TarredAudioNoiseDataset(
            audio_tar_filepaths=str(shards / "audio__OP_0..4_CL_.tar"),
            manifest_filepath=str(shards / "sharded_manifests/manifest__OP_0..4_CL_.json"),
            sample_rate=RATE,
            shuffle_n=4,
            global_rank=rank,
            world_size=2,
        )
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=3, collate_fn=dataset.collate_fn, num_workers=num_workers
        )
        seen.update(i for batch in loader for i in batch.sample_id)
    assert seen == Counter(str(i) for i in range(22))


def test_a_shard_whose_headers_are_read_slowly_shows_progress(
    shards: Path, monkeypatch: pytest.MonkeyPatch, corpus: Corpus
) -> None:
    """The watchdog takes the time from the last call of `on_read` for one read."""
    dataset = TarredAudioNoiseDataset(
        audio_tar_filepaths=str(shards / "audio_0.tar"),
        manifest_filepath=str(shards / "sharded_manifests" / "manifest_0.json"),
        shard_manifests=True,
        sample_rate=RATE,
    )
    clock = itertools.count(0.0, 0.4)
    monkeypatch.setattr("nest_ssl.data.sources.tar.time.monotonic", lambda: next(clock))
    seen: list[str] = []
    dataset.read(0, seen.append)
    assert seen[0] == "speech_0.wav"
    assert set(seen[1:]) == {str(shards / "audio_0.tar")}
    assert 1 <= len(seen[1:]) <= len(dataset)
    dataset.read(1, seen.append)
    assert seen[-1] == "speech_5.wav"  # its headers are known
