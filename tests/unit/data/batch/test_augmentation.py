from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from nest_ssl.audio import AudioError, read_audio
from nest_ssl.config import AugmentorConfig
from nest_ssl.data import (
    AudioNoiseBatch,
    MultiSpeakerNoiseAugmentation,
    NoiseSource,
    SpeakerNoiseAugmentation,
    build_augmentor,
    load_noise_audio,
    open_manifests,
    sample_noise,
)
from tests.unit.data.corpus import RATE, Corpus, write_manifest

BOTH = (SpeakerNoiseAugmentation, MultiSpeakerNoiseAugmentation)


def batch_of(num: int = 4, seed: int = 0) -> AudioNoiseBatch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(2000, 4000, num).long()
    valid = torch.arange(4000) < lengths[:, None]
    audio, noise = (torch.randn(num, 4000, generator=generator) * valid for _ in range(2))
    return AudioNoiseBatch(audio=audio, audio_len=lengths, noise=noise, noise_len=lengths - 500)


def fields(batch: AudioNoiseBatch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    assert batch.audio is not None
    assert batch.audio_len is not None
    assert batch.noise is not None
    assert batch.noisy_audio is not None
    assert batch.noisy_audio_len is not None
    return batch.audio, batch.audio_len, batch.noise, batch.noisy_audio, batch.noisy_audio_len


@pytest.mark.parametrize("ratio_db", [-5.0, 0.0, 20.0])
@pytest.mark.parametrize("noise_ratio", [0.0, 1.0])
def test_mix_reaches_the_requested_energy_ratio_over_the_whole_utterance(ratio_db: float, noise_ratio: float) -> None:
    augment = MultiSpeakerNoiseAugmentation(
        prob=1.0,
        noise_ratio=noise_ratio,
        min_r_noise=ratio_db,
        max_r_noise=ratio_db,
        min_r_speech=ratio_db,
        max_r_speech=ratio_db,
        min_mix_rate=0.3,
        max_mix_rate=0.9,
    )
    audio, _, noise, noisy, _ = fields(augment(batch_of(), generator=np.random.default_rng(0)))
    found_db = 10 * torch.log10(audio.square().sum(1) / noise.square().sum(1))
    torch.testing.assert_close(found_db, torch.full((4,), ratio_db), atol=1e-3, rtol=0)
    assert torch.equal(noisy, audio + noise)


def test_a_single_stretch_is_scaled_by_the_energy_of_all_the_noise_it_is_cut_from() -> None:
    batch = batch_of(1)
    assert batch.noise is not None
    batch.noise[0, :700] *= 10  # a loud beginning, which counts wherever the stretch is cut
    augment = SpeakerNoiseAugmentation(
        prob=1, noise_ratio=1, min_r_noise=10, max_r_noise=10, min_mix_rate=0.5, max_mix_rate=0.5
    )
    audio, audio_len, added, _, _ = fields(augment(batch, generator=np.random.default_rng(1)))
    whole = batch.noise[0, :1500]
    gain = torch.sqrt(audio[0].square().sum() / audio_len[0] / 10 / (whole.square().sum() / 1500))
    stretch = added[0][added[0] != 0] / gain
    start = int((whole - stretch[0]).abs().argmin())
    torch.testing.assert_close(stretch, whole[start : start + 1000], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cls", BOTH)
def test_inputs_are_not_modified(cls: type[SpeakerNoiseAugmentation]) -> None:
    batch, before = batch_of(), batch_of()
    cls(prob=1.0, noise_ratio=0.5)(batch, generator=np.random.default_rng(0))
    for name in ("audio", "audio_len", "noise", "noise_len"):
        assert torch.equal(getattr(batch, name), getattr(before, name)), name
    assert batch.noisy_audio is None


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("prob", [0.0, 0.5, 1.0])
def test_the_noisy_length_is_the_audios_whether_augmented_or_not(
    cls: type[SpeakerNoiseAugmentation], prob: float
) -> None:
    _, audio_len, noise, _, noisy_len = fields(cls(prob=prob)(batch_of(), generator=np.random.default_rng(0)))
    assert torch.equal(noisy_len, audio_len)
    assert all(not row[length:].any() for row, length in zip(noise, audio_len, strict=True))


@pytest.mark.parametrize("cls", BOTH)
def test_utterances_not_selected_keep_the_raw_noise_or_stay_clean(cls: type[SpeakerNoiseAugmentation]) -> None:
    batch = batch_of()
    assert batch.noise is not None
    assert batch.noise_len is not None
    kept = cls(prob=0.0)(batch)
    for row, raw, length in zip(fields(kept)[2], batch.noise, batch.noise_len, strict=True):
        assert torch.equal(row[:length], raw[:length])
        assert not row[length:].any()
    clean = cls(prob=0.0, keep_unselected_noise=False)(batch)
    assert torch.equal(fields(clean)[3], fields(clean)[0])


@pytest.mark.parametrize("cls", BOTH)
def test_a_batch_of_one_can_only_get_noise(cls: type[SpeakerNoiseAugmentation]) -> None:
    batch = batch_of(1)
    added = fields(cls(prob=1.0, noise_ratio=0.0, min_mix_rate=0.5, max_mix_rate=0.5)(batch))[2]
    assert added.any()


@pytest.mark.parametrize("cls", BOTH)
def test_silent_noise_adds_nothing(cls: type[SpeakerNoiseAugmentation]) -> None:
    batch = batch_of()
    assert batch.noise is not None
    silent = replace(batch, noise=torch.zeros_like(batch.noise))
    audio, _, noise, noisy, _ = fields(cls(prob=1.0, noise_ratio=1.0)(silent))
    assert not noise.any()
    assert torch.equal(noisy, audio)


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.0, 1e-4), (0.0, 1.0), (1.0, 1.0)])
def test_mixing_nothing_or_everything_is_possible(
    cls: type[SpeakerNoiseAugmentation], rates: tuple[float, float]
) -> None:
    augment = cls(prob=1.0, noise_ratio=0.5, min_mix_rate=rates[0], max_mix_rate=rates[1])
    for seed in range(20):
        noisy = fields(augment(batch_of(), generator=np.random.default_rng(seed)))[3]
        assert torch.isfinite(noisy).all()


def test_speech_is_added_from_as_many_other_utterances_as_asked_for_and_never_from_itself() -> None:
    lengths = torch.full((5,), 4000)
    audio = torch.arange(1.0, 6.0)[:, None].expand(5, 4000).clone()
    batch = AudioNoiseBatch(audio=audio, audio_len=lengths, noise=torch.zeros(5, 4000), noise_len=lengths)
    augment = MultiSpeakerNoiseAugmentation(
        prob=1.0, noise_ratio=0.0, min_num_segments=4, max_num_segments=4, min_num_speakers=3, max_num_speakers=3
    )
    added = fields(augment(batch, generator=np.random.default_rng(0)))[2]
    for own, row in enumerate(added):
        levels = row[row != 0].unique()
        assert len(levels) == 3
        ratios = {round(float(level / levels[0]), 3) for level in levels}
        others = [v for v in range(1, 6) if v != own + 1]
        assert any({round(b / a, 3) for b in others} >= ratios for a in others), "levels are those of other utterances"


@pytest.mark.parametrize("cls", BOTH)
def test_the_same_generator_state_gives_the_same_batch(cls: type[SpeakerNoiseAugmentation]) -> None:
    augment = cls(prob=0.7, noise_ratio=0.5)
    numpy_pair = [fields(augment(batch_of(), generator=np.random.default_rng(3)))[3] for _ in range(2)]
    torch_pair = [fields(augment(batch_of(), generator=torch.Generator().manual_seed(3)))[3] for _ in range(2)]
    other = fields(augment(batch_of(), generator=np.random.default_rng(4)))[3]
    assert torch.equal(*numpy_pair)
    assert torch.equal(*torch_pair)
    assert not torch.equal(numpy_pair[0], other)


def test_an_utterance_with_its_own_generator_does_not_depend_on_the_draws_of_the_others() -> None:
    augment = MultiSpeakerNoiseAugmentation(prob=1.0, noise_ratio=1.0)
    first = fields(augment(batch_of(), generator=[np.random.default_rng(i) for i in range(4)]))[2]
    second = fields(augment(batch_of(), generator=[np.random.default_rng(i) for i in (9, 1, 9, 3)]))[2]
    assert torch.equal(first[[1, 3]], second[[1, 3]])
    assert not torch.equal(first[0], second[0])


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_augmentor\.prob: 1\.5 is not a probability"):
        SpeakerNoiseAugmentation(prob=1.5)
    with pytest.raises(ValueError, match="max_r_noise"):
        MultiSpeakerNoiseAugmentation(min_r_noise=3, max_r_noise=2)
    with pytest.raises(ValueError, match="needs audio"):
        SpeakerNoiseAugmentation()(AudioNoiseBatch())
    with pytest.raises(ValueError, match="2 generators for 4 utterances"):
        SpeakerNoiseAugmentation()(batch_of(), generator=[np.random.default_rng(0)] * 2)


def test_the_configuration_names_the_class_by_nemos_name_or_ours() -> None:
    nemo = AugmentorConfig(_target_="nemo.collections.asr.modules.ssl_modules.SpeakerNoiseAugmentation", prob=0.3)
    assert build_augmentor(nemo) == SpeakerNoiseAugmentation(prob=0.3)
    assert build_augmentor(AugmentorConfig(max_num_segments=2)) == MultiSpeakerNoiseAugmentation(max_num_segments=2)
    assert build_augmentor(None) is None


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
