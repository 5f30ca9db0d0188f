from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from nest_ssl.config import DatasetConfig
from nest_ssl.data import AudioNoiseBatch, AudioNoiseDataset, MultiSpeakerNoiseAugmentation, build_loader
from tests.unit.data.corpus import RATE, Corpus, write_manifest

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

FIELDS = ("audio", "audio_len", "noise", "noise_len", "noisy_audio", "noisy_audio_len")


def assert_same(a: AudioNoiseBatch, b: AudioNoiseBatch) -> None:
    assert a.sample_id == b.sample_id
    assert a.audio_filepaths == b.audio_filepaths
    for name in FIELDS:
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def two_epochs(config: DatasetConfig, **more: Any) -> list[AudioNoiseBatch]:
    loader = build_loader(config, seed=3, **more)
    out = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        out += list(loader)
    return out


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "buckets": {"use_bucketing": True, "num_buckets": 3, "batch_duration": 1.0},
    "lhotse": {"use_lhotse": True, "use_bucketing": True, "num_buckets": 2, "batch_duration": 1.0},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("augmentor", [None, "default"])
def test_noise_that_is_added_later_makes_the_same_noisy_audio(corpus: Corpus, kind: str, augmentor: str | None) -> None:
    config = corpus.config(**KINDS[kind])
    config = replace(config, batch_augmentor=None) if augmentor is None else config
    for num_workers in (0, 1):
        config = replace(config, num_workers=num_workers)
        for a, b in zip(two_epochs(config), two_epochs(config, mix=False), strict=True):
            assert b.noisy_audio is None
            later = b.mixed()
            assert later.noise is later.noise_len is None
            assert_same(a, replace(later, noise=a.noise, noise_len=a.noise_len))
            assert a.mixed() is a


@pytest.mark.parametrize("kind", KINDS)
def test_two_epochs_with_0_1_and_4_workers_give_the_same_batches(corpus: Corpus, kind: str) -> None:
    config = corpus.config(**KINDS[kind])
    reference = two_epochs(config)
    first, second = reference[: len(reference) // 2], reference[len(reference) // 2 :]
    assert [batch.sample_id for batch in first] != [batch.sample_id for batch in second], "epochs differ"
    for num_workers in (1, 4):
        found = two_epochs(replace(config, num_workers=num_workers, persistent_workers=True, prefetch_factor=3))
        assert len(found) == len(reference)
        for a, b in zip(reference, found, strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_restarting_at_batch_k_gives_batch_k(corpus: Corpus, kind: str, num_workers: int) -> None:
    config = corpus.config(**KINDS[kind], num_workers=num_workers)
    loader = build_loader(config, seed=3)
    loader.set_epoch(1)
    whole = list(loader)
    for k in (1, 3):
        stopped = build_loader(config, seed=3)
        stopped.set_epoch(1)
        for _, _batch in zip(range(k), stopped, strict=False):
            pass
        state = pickle.loads(pickle.dumps(stopped.position()))
        resumed = build_loader(config, seed=3)
        resumed.resume(state)
        resumed.set_epoch(1)  # as Lightning does when it resumes
        rest = list(resumed)
        assert len(rest) == len(whole) - k
        for a, b in zip(whole[k:], rest, strict=True):
            assert_same(a, b)
        assert len(list(resumed)) == len(whole), "the next iteration starts from the beginning"


def test_the_state_of_another_plan_is_refused(corpus: Corpus) -> None:
    state = build_loader(corpus.config(), seed=3).position()
    for other in (build_loader(corpus.config(), seed=4), build_loader(corpus.config(), seed=3, world_size=2)):
        with pytest.raises(ValueError, match="another batch plan"):
            other.resume(state)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("kind", ["plain", "buckets"])
def test_the_ranks_together_read_what_one_rank_reads(corpus: Corpus, kind: str, drop_last: bool) -> None:
    config = corpus.config(**KINDS[kind], drop_last=drop_last)
    loaders = [build_loader(config, rank=rank, world_size=3, seed=3) for rank in range(3)]
    assert len({len(loader) for loader in loaders}) == 1
    assert len({loader.plan_hash for loader in loaders}) == 1
    batches = [list(loader) for loader in loaders]
    ids = [i for rank in batches for batch in rank for i in batch.sample_id or []]
    if drop_last:
        assert len(ids) == len(set(ids))
    else:
        assert {int(i) for i in ids} == set(range(22))


def test_a_batch_is_padded_with_zeros_and_noisy_is_audio_plus_noise(corpus: Corpus) -> None:
    (batch, *_) = build_loader(corpus.config(batch_size=22, batch_augmentor=None))
    assert batch.audio is not None
    assert batch.audio_len is not None
    assert batch.noise is not None
    assert batch.audio.shape == (22, int(batch.audio_len.max()))
    for name, row, length in zip(batch.audio_filepaths, batch.audio, batch.audio_len, strict=True):
        expected, _ = soundfile.read(name, dtype="float32")
        assert torch.equal(row[:length], torch.from_numpy(expected))
        assert not row[length:].any()
    assert batch.noise.any(dim=1).all()
    assert torch.equal(batch.noisy_audio, batch.audio + batch.noise)  # type: ignore[arg-type]


def test_without_a_noise_manifest_the_noise_is_zeros(corpus: Corpus) -> None:
    (batch, *_) = build_loader(corpus.config(noise_manifest=None, batch_augmentor=None))
    assert batch.noise is not None
    assert not batch.noise.any()
    assert torch.equal(batch.noise_len, batch.audio_len)  # type: ignore[arg-type]


def test_epochs_draw_anew_but_validation_can_repeat_itself(corpus: Corpus) -> None:
    for same in (False, True):
        loader = build_loader(corpus.config(shuffle=False), seed=3, same_every_epoch=same)
        first = list(loader)
        loader.set_epoch(1)
        second = list(loader)
        assert [b.sample_id for b in first] == [b.sample_id for b in second]
        pairs = zip(first, second, strict=True)
        equal = all(torch.equal(a.noisy_audio, b.noisy_audio) for a, b in pairs)  # type: ignore[arg-type]
        assert equal == same


def test_the_bank_does_not_change_the_batches(corpus: Corpus) -> None:
    for a, b in zip(two_epochs(corpus.config()), two_epochs(corpus.config(noise_bank_gb=0.1)), strict=True):
        assert_same(a, b)


def test_batches_of_buckets_keep_to_the_duration(corpus: Corpus) -> None:
    loader = build_loader(corpus.config(use_bucketing=True, num_buckets=4, batch_duration=1.2, batch_size=None))
    for batch in loader:
        assert batch.audio is not None
        assert batch.audio.numel() <= 1.2 * RATE + len(batch.audio)


@pytest.mark.parametrize("technique", ["temperature", "random", "round-robin"])
def test_datasets_are_concatenated_and_augmented(corpus: Corpus, tmp_path: Path, technique: str) -> None:
    lines = [{"audio_filepath": str(corpus.folder / f"speech_{i}.wav"), "duration": 0.1} for i in range(5)]
    other = write_manifest(tmp_path / "other.jsonl", lines)
    config = corpus.config(
        manifest_filepath=[str(corpus.speech), str(other)],
        is_concat=True,
        concat_sampling_technique=technique,
        concat_sampling_temperature=1e9,
        noise_manifest=None,
    )
    batches = list(build_loader(config))
    from_other = sum(int(i) >= 22 for batch in batches for i in batch.sample_id or [])
    assert from_other in (13, 14), "equal shares of 27"
    assert any(batch.noise is not None and batch.noise.any() for batch in batches), "other speakers are mixed in"


def test_an_endless_mixture_has_no_length_and_resumes_past_a_round(corpus: Corpus) -> None:
    config = corpus.config(
        manifest_filepath=[str(corpus.speech), str(corpus.noise)], is_concat=True, endless=True, batch_size=5
    )
    loader = build_loader(config, seed=3)
    with pytest.raises(TypeError, match="endless"):
        len(loader)
    first = [batch for _, batch in zip(range(12), loader, strict=False)]
    resumed = build_loader(config, seed=3)
    resumed.resume({**resumed.position(), "next_batch": 10})
    for a, b in zip(first[10:], resumed, strict=False):
        assert_same(a, b)


def test_buckets_of_manifests_have_their_own_batch_sizes(corpus: Corpus) -> None:
    config = corpus.config(
        manifest_filepath=[[str(corpus.speech)], [str(corpus.noise)]], bucketing_batch_size=2, bucketing_weights=[1, 3]
    )
    sizes = [len(batch.sample_id or []) for batch in build_loader(config)]
    assert sorted(sizes) == sorted([4, 4, 4, 4, 4, 2] + 3 * [2, 1])


def test_short_audio_is_padded_to_the_least_length(corpus: Corpus) -> None:
    (batch, *_) = build_loader(corpus.config(min_audio_len_secs=0.5, pad_audio_mode="zero"))
    assert batch.audio_len is not None
    assert batch.audio_len.tolist() == [RATE // 2] * 4


def test_a_bucket_of_short_audio_counts_its_padding(corpus: Corpus) -> None:
    config = corpus.config(batch_size=None, use_bucketing=True, num_buckets=2, batch_duration=2.0)
    for batch in build_loader(replace(config, min_audio_len_secs=0.5)):
        assert batch.audio is not None
        assert batch.audio.numel() <= 2.0 * RATE


def test_more_buckets_than_lhotse_can_fill_are_refused(corpus: Corpus) -> None:
    config = corpus.config(use_lhotse=True, use_bucketing=True, num_buckets=1000, batch_duration=1.0)
    with pytest.raises(ValueError, match=r"num_buckets=1000: .*number of cuts \(22\)"):
        next(iter(build_loader(config)))


def test_missing_or_contradicting_keys_are_refused(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="batch_size: a value is needed"):
        build_loader(corpus.config(batch_size=None))
    with pytest.raises(ValueError, match="manifest_filepath: a value is needed"):
        build_loader(DatasetConfig(batch_size=2))
    with pytest.raises(ValueError, match="no utterance is left"):
        build_loader(corpus.config(min_duration=50.0))
    with pytest.raises(ValueError, match="22 utterances do not fill one batch on each of 8 ranks"):
        build_loader(corpus.config(drop_last=True), world_size=8)
    with pytest.raises(ValueError, match="seed: -1 is less than 0"):
        corpus.config(seed=-1)
    with pytest.raises(ValueError, match="rank 2 is not in"):
        build_loader(corpus.config(), rank=2, world_size=2)
    with pytest.raises(ValueError, match="are not 2 positive numbers"):
        build_loader(
            corpus.config(
                manifest_filepath=[str(corpus.speech)] * 2,
                is_concat=True,
                concat_sampling_technique="random",
                concat_sampling_probabilities=[1.0],
            )
        )
    with pytest.raises(ValueError, match="batch_duration: needs 'use_bucketing: true'"):
        corpus.config(batch_duration=5.0)


def test_an_empty_noise_manifest_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="noise"):
        build_loader(corpus.config(noise_manifest=str(write_manifest(tmp_path / "noise.jsonl", []))))


@pytest.mark.parametrize("kind", KINDS)
def test_what_loader_processes_run_can_be_sent_to_a_new_interpreter(corpus: Corpus, kind: str) -> None:
    loader = build_loader(corpus.config(**KINDS[kind]), seed=3)
    (spec, *_) = loader.batches
    sent, spec_sent = pickle.loads(pickle.dumps((loader.dataset, spec)))
    assert_same(sent[spec_sent], loader.dataset[spec])


def test_a_caller_that_reads_ahead_can_say_where_to_go_on(corpus: Corpus) -> None:
    loader = build_loader(corpus.config(), seed=3)
    whole = list(loader)
    resumed = build_loader(corpus.config(), seed=3)
    resumed.resume(loader.position(next_batch=2))
    for a, b in zip(whole[2:], resumed, strict=True):
        assert_same(a, b)


def test_bucketing_without_durations_says_what_to_do(corpus: Corpus, tmp_path: Path) -> None:
    lines = [{"audio_filepath": str(corpus.folder / "speech_0.wav")}]
    manifest = write_manifest(tmp_path / "m.jsonl", lines)
    with pytest.raises(ValueError, match=r"m\.jsonl: use_bucketing needs every 'duration'.*nest-ssl prepare"):
        build_loader(corpus.config(manifest_filepath=str(manifest), use_bucketing=True))


def test_the_dataset_gives_items_that_torchs_own_loader_can_batch(corpus: Corpus) -> None:
    dataset = AudioNoiseDataset(
        manifest_filepath=str(corpus.speech),
        noise_manifest=str(corpus.noise),
        sample_rate=RATE,
        batch_augmentor=MultiSpeakerNoiseAugmentation(prob=1.0, noise_ratio=0.5),
        min_audio_len_secs=0.1,
    )
    assert len(dataset) == 22
    item = dataset[3]
    assert item.sample_id == "3"
    assert item.audio is not None
    assert item.noise is not None
    assert item.noise.shape == item.audio.shape
    loader = torch.utils.data.DataLoader(dataset, batch_size=5, collate_fn=dataset.collate_fn)
    batches = list(loader)
    assert [len(batch.sample_id) for batch in batches] == [5, 5, 5, 5, 2]
    assert all(torch.equal(b.noisy_audio, b.audio + b.noise) for b in batches)


@pytest.mark.parametrize("kind", ["plain", "lhotse"])
def test_every_file_is_announced_before_it_is_read(corpus: Corpus, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # several: test_threads.py
    announced: list[str] = []
    loader = build_loader(corpus.config(**KINDS[kind], batch_augmentor=None), on_read=announced.append)
    read = [name for batch in loader for name in batch.audio_filepaths]
    speech = [name for name in announced if "speech_" in name]
    assert speech == read
    assert len(announced) == 2 * len(read), "each utterance and its noise"


def test_importing_the_package_does_not_import_lhotse_or_webdataset() -> None:
    code = "import sys, nest_ssl.data; print([m for m in ('lhotse', 'webdataset', 'lightning') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def resident_bytes() -> int:
    """Of this process and its children, memory shared between them counted once."""
    total = 0
    own = os.getpid()
    for process in [own, *_children(own)]:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
    return total


def _children(process: int) -> list[int]:
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
def test_memory_stays_flat_over_ten_epochs_with_workers(corpus: Corpus) -> None:
    config = corpus.config(num_workers=2, persistent_workers=True, batch_size=2, noise_bank_gb=0.001)
    loader = build_loader(config)
    after_epoch = []
    for epoch in range(13):
        loader.set_epoch(epoch)
        for _ in loader:
            pass
        after_epoch.append(resident_bytes())
    growth = np.polyfit(np.arange(10), after_epoch[3:], 1)[0]
    # Per epoch, after three in which allocators and imports settle. An epoch's batches hold 1.2 MB.
    assert growth < 4e5, [f"{size / 1e6:.1f} MB" for size in after_epoch]
