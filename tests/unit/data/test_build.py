"""From a configuration to a loader: mixtures, buckets, registered sources, and what is refused."""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nest_ssl.config import DatasetConfig
from nest_ssl.config.checks import named_section
from nest_ssl.data import LhotseAudioNoiseDataset, build_loader
from nest_ssl.data.sources import lhotse as lhotse_source
from tests.unit.data.corpus import NEEDS_LHOTSE, RATE, Corpus, assert_same, write_manifest

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


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


def test_a_bucket_of_short_audio_counts_its_padding(corpus: Corpus) -> None:
    config = corpus.config(batch_size=None, use_bucketing=True, num_buckets=2, batch_duration=2.0)
    for batch in build_loader(replace(config, min_audio_len_secs=0.5)):
        assert batch.audio is not None
        assert batch.audio.numel() <= 2.0 * RATE


def test_what_an_epoch_does_not_read_is_logged_by_bucket_with_hours(
    corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"drop_last": True, "use_bucketing": True, "bucket_duration_bins": [0.2, 0.3], "batch_size": 2}
    with caplog.at_level(logging.INFO):
        loader = build_loader(corpus.config(**settings), world_size=2)
    (message,) = [text for text in caplog.messages if "does not read" in text]
    num_read = 2 * sum(len(spec.indices) for spec in loader.batches)
    assert f"an epoch on 2 ranks does not read {22 - num_read} of 22 utterances, 0.00 of 0.00 h" in message
    by_bucket = [int(n) for n in re.findall(r"(\d+) of \d+ up to 0\.\d s \(0\.00 h\)", message)]
    assert sum(by_bucket) == 22 - num_read > 0
    caplog.clear()
    build_loader(corpus.config(**settings | {"drop_last": False}), world_size=2)
    assert "does not read" not in caplog.text


def test_audio_outside_the_duration_limits_is_a_warning(corpus: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    build_loader(corpus.config())
    assert "outside the duration limits" not in caplog.text
    build_loader(corpus.config(max_duration=0.3))
    (record,) = [one for one in caplog.records if "outside the duration limits of training" in one.getMessage()]
    assert record.levelno == logging.WARNING


def test_a_bucket_that_fills_no_step_is_read_with_its_neighbour(corpus: Corpus) -> None:
    # On 8 ranks no bucket has the 16 utterances of a step, but all together have 22.
    config = corpus.config(drop_last=True, use_bucketing=True, num_buckets=4, batch_size=2)
    specs = [list(build_loader(config, rank=rank, world_size=8).batches) for rank in range(8)]
    assert sum(len(spec.indices) for rank in specs for spec in rank) == 16


@NEEDS_LHOTSE
def test_more_buckets_than_lhotse_can_fill_are_refused(corpus: Corpus) -> None:
    config = corpus.config(use_lhotse=True, use_bucketing=True, num_buckets=1000, batch_duration=1.0)
    with pytest.raises(ValueError, match=r"num_buckets=1000: .*number of cuts \(22\)"):
        next(iter(build_loader(config)))


def test_a_manifest_of_shards_without_its_shards_is_refused_with_the_keys_to_set(
    corpus: Corpus, tmp_path: Path
) -> None:
    path = tmp_path / "sharded_manifests" / "manifest_0.json"
    path.parent.mkdir()
    path.write_text('{"audio_filepath": "0.wav", "duration": 2.0}\n')
    with pytest.raises(
        ValueError, match=r"manifest_0\.json: its audio is in tar shards\. Set is_tarred=true and tarred"
    ):
        build_loader(corpus.config(manifest_filepath=str(path)))


def test_missing_or_contradicting_keys_are_refused(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="batch_size: a value is needed"):
        build_loader(corpus.config(batch_size=None))
    with pytest.raises(ValueError, match="manifest_filepath: a value is needed"):
        build_loader(DatasetConfig(batch_size=2))
    with pytest.raises(ValueError, match=r"no utterance is left.* durations are [\d.]+ to [\d.]+ s\. Set other limits"):
        build_loader(corpus.config(min_duration=50.0))
    with pytest.raises(ValueError, match="22 utterances do not fill one batch on each of 8 ranks"):
        build_loader(corpus.config(drop_last=True), world_size=8)
    with pytest.raises(ValueError, match="^batch_duration: 22 utterances do not fill one batch"):
        build_loader(corpus.config(batch_size=None, use_bucketing=True, batch_duration=400_000, drop_last=True))
    with pytest.raises(ValueError, match=r"model\.train_ds\.batch_size: a value is needed"):  # noqa: SIM117
        with named_section("model.train_ds", config := corpus.config(batch_size=None)):
            build_loader(config)
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


def test_bucketing_without_durations_says_what_to_do(corpus: Corpus, tmp_path: Path) -> None:
    lines = [{"audio_filepath": str(corpus.folder / "speech_0.wav")}]
    manifest = write_manifest(tmp_path / "m.jsonl", lines)
    with pytest.raises(ValueError, match=r"m\.jsonl: use_bucketing needs every 'duration'.*nest-ssl prepare"):
        build_loader(corpus.config(manifest_filepath=str(manifest), use_bucketing=True))


def test_without_lhotse_the_key_and_the_command_to_install_it_are_named(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lhotse", None)
    lhotse_source._lhotse.cache_clear()
    message = r"use_lhotse: lhotse, .* is not installed\. Run: pip install 'nest-ssl\[lhotse\]'"
    with pytest.raises(ValueError, match=message):
        build_loader(corpus.config(use_lhotse=True, batch_duration=1.0))
    with pytest.raises(ValueError, match=message):
        LhotseAudioNoiseDataset(sample_rate=RATE)
    lhotse_source._lhotse.cache_clear()


def test_the_shapes_of_a_run_are_logged_or_why_there_are_none(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [{"audio_filepath": str(corpus.folder / f"speech_{i}.wav")} for i in range(4)]
    unknown = str(write_manifest(tmp_path / "m.jsonl", lines))
    longest = f"{int(max(corpus.durations_s) * 100) / 100 + 0.01:.2f} s"
    for changed, world_size, expected in (
        ({}, 1, f"to 4 x {longest}"),
        ({"batch_size": 22}, 1, f"batches are 22 x {longest}"),
        ({"manifest_filepath": unknown}, 2, r"not every duration is known\): no CUDA graphs .* 'nest-ssl prepare'"),
        (
            {"use_bucketing": True, "bucketing_strategy": "fully_randomized"},
            2,
            "its own bucket.* bucketing_strategy=synced_randomized",
        ),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            loaders = [build_loader(corpus.config(**changed), rank=r, world_size=world_size) for r in range(world_size)]
        (line,) = [message for message in caplog.messages if message.startswith("batches")]
        assert re.search(expected, line), line
        planned = [spec.num_samples for loader in loaders for spec in loader.batches]
        assert all(n is None for n in planned) == (loaders[0].shapes() == [])
