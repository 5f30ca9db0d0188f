"""Our draws against NeMo's, recorded by record_nemo_mixing.py; and that these tests notice a range moved by 10 %."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from nest_ssl.data import (
    AudioNoiseBatch,
    MultiSpeakerNoiseAugmentation,
    SpeakerNoiseAugmentation,
    load_noise_audio,
    sample_noise,
)
from tests.parity.mixing_draws import CONFIGS, RECORDED, Draws, measure, tensors
from tests.parity.two_sample import category_p, kolmogorov_smirnov_p

NUM_BATCHES = 1000
ALPHA = 1e-3
"""Seeds are fixed, so this is no rate of failures; a moved range has to come out below it."""
CLASSES = {cls.__name__: cls for cls in (SpeakerNoiseAugmentation, MultiSpeakerNoiseAugmentation)}


def our_draws(name: str, **changed: Any) -> Draws:
    augmentation = CLASSES[name](**{**CONFIGS[name], **changed})
    generator = np.random.default_rng(0)

    def batches() -> Iterator[AudioNoiseBatch]:
        fields = tensors()
        yield from itertools.repeat(
            AudioNoiseBatch(
                audio=fields["audio"],
                audio_len=fields["audio_len"],
                noise=fields["noise"],
                noise_len=fields["noise_len"],
            )
        )

    return measure(lambda batch: augmentation(batch, generator=generator), batches(), NUM_BATCHES)


def nemo_draws(name: str) -> Draws:
    with np.load(RECORDED) as recorded:
        return {key.split("/")[1]: recorded[key] for key in recorded.files if key.startswith(name + "/")}


def p_values(ours: Draws, nemo: Draws) -> dict[str, float]:
    """Return a p-value for every quantity, with separate energy ratios for noise (-1) and speech (0)."""
    out = {"source": category_p(ours["source"], nemo["source"])}
    out["num_speakers"] = category_p(ours["num_speakers"], nemo["num_speakers"])
    for name in ("mix_share", "start_share", "longest_share"):
        out[name] = kolmogorov_smirnov_p(ours[name], nemo[name])
    for kind, number in (("noise", -1), ("speech", 0)):
        ratios = [draws["ratio_db"][draws["source"] == number] for draws in (ours, nemo)]
        out[f"ratio_db of {kind}"] = kolmogorov_smirnov_p(*ratios)
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_choices_lengths_places_and_energy_ratios_have_nemos_distribution(name: str) -> None:
    p = p_values(our_draws(name), nemo_draws(name))
    assert min(p.values()) > 0.01, p


MOVED = [
    ("SpeakerNoiseAugmentation", {"min_mix_rate": 0.26}, "mix_share"),
    ("SpeakerNoiseAugmentation", {"max_mix_rate": 0.74}, "mix_share"),
    ("SpeakerNoiseAugmentation", {"min_r_noise": -2.5}, "ratio_db of noise"),
    ("MultiSpeakerNoiseAugmentation", {"prob": 0.66}, "source"),
    ("MultiSpeakerNoiseAugmentation", {"noise_ratio": 0.5}, "source"),
    ("MultiSpeakerNoiseAugmentation", {"min_mix_rate": 0.26}, "mix_share"),
    ("MultiSpeakerNoiseAugmentation", {"max_mix_rate": 0.88}, "mix_share"),
    ("MultiSpeakerNoiseAugmentation", {"min_r_noise": -2.5}, "ratio_db of noise"),
    ("MultiSpeakerNoiseAugmentation", {"max_r_noise": 22.5}, "ratio_db of noise"),
    ("MultiSpeakerNoiseAugmentation", {"min_r_speech": -4.0}, "ratio_db of speech"),
    ("MultiSpeakerNoiseAugmentation", {"max_r_speech": 6.0}, "ratio_db of speech"),
    ("MultiSpeakerNoiseAugmentation", {"max_num_segments": 4}, "longest_share"),
    ("MultiSpeakerNoiseAugmentation", {"max_num_speakers": 3}, "num_speakers"),
]


@pytest.mark.parametrize(("name", "moved", "noticed_in"), MOVED, ids=lambda value: str(value))
def test_a_range_moved_by_a_tenth_of_its_width_or_by_one_is_noticed(
    name: str, moved: dict[str, float], noticed_in: str
) -> None:
    p = p_values(our_draws(name, **moved), nemo_draws(name))
    assert p[noticed_in] < ALPHA, p


RATE = 16000


@pytest.fixture(scope="module")
def ramps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Write files like record_nemo_mixing.py: the first sample shows where a segment starts, the slope which file."""
    folder: Path = tmp_path_factory.mktemp("ramps")
    ramp = (np.arange(1, RATE + 1) / (2 * RATE)).astype(np.float32)
    for k in range(4):
        soundfile.write(folder / f"{k}.wav", ramp * 2.0**-k, RATE, subtype="FLOAT")
    return [{"audio_filepath": str(folder / f"{k}.wav"), "duration": 1.0} for k in range(4)]


def test_noise_files_and_segments_are_chosen_as_nemo_chooses_them(ramps: list[dict[str, Any]]) -> None:
    rng = np.random.default_rng(0)
    rows = [sample_noise(ramps, RATE, RATE // 10, generator=rng)[0].numpy() for _ in range(1500)]
    scale = np.array([(row[-1] - row[0]) / (len(row) - 1) * 2 * RATE for row in rows])
    start_s = np.array([row[0] * 2 / s for row, s in zip(rows, scale, strict=True)], np.float32)
    with np.load(RECORDED) as nemo:
        assert kolmogorov_smirnov_p(start_s, nemo["noise/start_s"]) > 0.01
        assert category_p(np.round(-np.log2(scale)).astype(np.float32), nemo["noise/file"].astype(np.float32)) > 0.01
        assert kolmogorov_smirnov_p(start_s * 1.1, nemo["noise/start_s"]) < ALPHA


def test_white_noise_in_place_of_silence_has_nemos_levels(tmp_path: Path) -> None:
    silent = {"audio_filepath": str(tmp_path / "silent.wav"), "duration": 0.1}
    soundfile.write(silent["audio_filepath"], np.zeros(RATE // 10, np.float32), RATE)
    rng = np.random.default_rng(0)
    rows = [load_noise_audio(silent, RATE, RATE // 10, generator=rng)[0].numpy() for _ in range(1500)]
    level_db = np.array([20 * np.log10(row.std()) for row in rows], np.float32)
    with np.load(RECORDED) as nemo:
        assert kolmogorov_smirnov_p(level_db, nemo["noise/white_db"]) > 0.01
        assert kolmogorov_smirnov_p(level_db + 4.4, nemo["noise/white_db"]) < ALPHA
