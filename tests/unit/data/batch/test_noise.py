from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from nest_ssl.audio import AudioError, read_audio
from nest_ssl.data import NoiseSource, load_noise_audio, open_manifests, sample_noise
from tests.unit.data.corpus import RATE, Corpus, write_manifest


def write(path: Path, samples: Any, duration_s: float | None = None, **more: Any) -> dict[str, Any]:
    soundfile.write(path, np.asarray(samples, np.float32), RATE, subtype="FLOAT")
    return {"audio_filepath": str(path), "duration": duration_s or len(samples) / RATE, **more}


def test_a_long_file_gives_a_random_segment_of_the_length_asked_for(tmp_path: Path) -> None:
    ramp = np.arange(1, RATE + 1) / RATE
    sample = write(tmp_path / "ramp.wav", ramp)
    rng = np.random.default_rng(0)
    starts = set()
    for _ in range(20):
        noise, length = load_noise_audio(sample, RATE, 1000, generator=rng)
        assert noise.shape == (1000,)
        assert int(length) == 1000
        assert np.allclose(np.diff(noise.numpy()), 1 / RATE, atol=1e-6), "a piece of the file, without gaps"
        starts.add(float(noise[0]))
    assert len(starts) == 20


def test_a_short_file_is_read_whole_and_padded_with_zeros_that_the_length_does_not_count(tmp_path: Path) -> None:
    sample = write(tmp_path / "short.wav", np.full(300, 0.5))
    noise, length = load_noise_audio(sample, RATE, 1000)
    assert int(length) == 300
    assert noise.tolist() == [0.5] * 300 + [0.0] * 700
    assert len(load_noise_audio(sample, RATE, 1000, pad_to_max=False)[0]) == 300
    assert len(load_noise_audio(sample, RATE)[0]) == 300


def test_a_file_of_unknown_duration_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = write(tmp_path / "ramp.wav", np.arange(1, RATE + 1) / RATE)
    del sample["duration"]
    asked: list[float | None] = []

    def read(*args: Any, **options: Any) -> Any:
        asked.append(options["duration_s"])
        return read_audio(*args, **options)

    monkeypatch.setattr("nest_ssl.data.batch.augmentation.read_audio", read)
    noise, length = load_noise_audio(sample, RATE, 1600, generator=np.random.default_rng(0))
    assert asked == [0.1]
    assert int(length) == 1600
    assert float(noise[0]) > 2 / RATE, "from anywhere in the file, not its beginning"


def test_segments_stay_between_offset_and_duration(tmp_path: Path) -> None:
    samples = np.concatenate([np.full(RATE, 0.9), np.full(RATE, 0.1), np.full(RATE, 0.9)])
    sample = write(tmp_path / "three.wav", samples, duration_s=1.0, offset=1.0)
    rng = np.random.default_rng(0)
    for _ in range(50):
        noise, _ = load_noise_audio(sample, RATE, 4000, generator=rng)
        assert np.allclose(noise.numpy(), 0.1, atol=1e-3)


def test_a_silent_file_becomes_white_noise_between_the_two_levels(tmp_path: Path) -> None:
    sample = write(tmp_path / "silent.wav", np.zeros(RATE))
    rng = np.random.default_rng(0)
    rows = [load_noise_audio(sample, RATE, 8000, generator=rng)[0].numpy() for _ in range(30)]
    levels = [20 * np.log10(row.std()) for row in rows]
    assert -91 < min(levels) < -80
    assert -56 < max(levels) < -45


def test_noise_with_a_negative_sum_is_not_taken_for_silence(tmp_path: Path) -> None:
    sample = write(tmp_path / "negative.wav", np.full(RATE, -0.5))
    noise, _ = load_noise_audio(sample, RATE, 1000)
    assert noise.tolist() == [-0.5] * 1000


def test_a_partly_silent_file_gives_a_segment_with_sound(tmp_path: Path) -> None:
    samples = np.zeros(10 * RATE)
    samples[-2 * RATE :] = 0.3
    sample = write(tmp_path / "late.wav", samples)
    for seed in range(5):
        noise, _ = load_noise_audio(sample, RATE, 1000, generator=np.random.default_rng(seed))
        assert float(noise.max()) == pytest.approx(0.3)


def test_an_unreadable_file_is_reported_and_another_one_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "bad.wav").write_bytes(b"not audio at all")
    good = write(tmp_path / "good.wav", np.full(RATE, 0.2))
    data = [{"audio_filepath": str(tmp_path / "bad.wav"), "duration": 1.0}, good]
    errors: list[AudioError] = []
    for seed in range(10):
        noise, _ = sample_noise(data, RATE, 500, generator=np.random.default_rng(seed), on_error=errors.append)
        assert noise.any()
    assert errors
    assert {error.path for error in errors} == {str(tmp_path / "bad.wav")}


def test_with_nothing_readable_or_no_noise_the_noise_is_silence(tmp_path: Path) -> None:
    errors: list[AudioError] = []
    noise, length = sample_noise([{"audio_filepath": "/no/such.wav"}], RATE, 500, max_trial=7, on_error=errors.append)
    assert len(errors) == 7
    assert not noise.any()
    assert (len(noise), int(length)) == (500, 500)
    assert not sample_noise([], RATE, 500)[0].any()


def test_the_bank_gives_the_same_noise_as_the_files(corpus: Corpus) -> None:
    manifest = open_manifests(str(corpus.noise))
    from_disk = NoiseSource(manifest, RATE)
    from_bank = NoiseSource(manifest, RATE, bank_bytes=10**7)
    assert from_bank.bank is not None
    assert len(from_bank.bank) == 3
    for seed in range(20):
        a, b = (s.sample(3000, np.random.default_rng(seed)) for s in (from_disk, from_bank))
        assert a is not None
        assert b is not None
        assert np.array_equal(a, b)


def test_what_does_not_fit_into_the_bank_is_read_from_disk(corpus: Corpus) -> None:
    source = NoiseSource(open_manifests(str(corpus.noise)), RATE, bank_bytes=int(1.5 * RATE * 4))
    assert source.bank is not None
    assert len(source.bank) == 1
    assert all(source.sample(3000, np.random.default_rng(seed)) is not None for seed in range(10))


def test_a_bad_file_stays_out_of_the_bank_and_is_reported_when_drawn(tmp_path: Path) -> None:
    good = write(tmp_path / "good.wav", np.full(RATE, 0.2))
    lines = [{"audio_filepath": str(tmp_path / "missing.wav"), "duration": 1.0}, good]
    source = NoiseSource(open_manifests(str(write_manifest(tmp_path / "n.jsonl", lines))), RATE, bank_bytes=10**7)
    errors: list[AudioError] = []
    assert all(source.sample(500, np.random.default_rng(s), errors.append) is not None for s in range(10))
    assert {error.path for error in errors} == {str(tmp_path / "missing.wav")}
