"""The voices of the demo."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from nest_ssl.demo.voices import (
    LANGUAGES,
    Voice,
    at_level,
    find_synthesizer,
    random_voice,
    say,
    speak_nanotts,
    with_fades,
    words_before,
)

VOICE = Voice("en-US", tract=1.0, pitch=1.0, tempo=1.0, level_db=-25.0)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_a_longer_tract_lowers_all_frequencies_and_keeps_pitch_and_length() -> None:
    synthesizer = find_synthesizer("formants")
    small, large = (
        say(Voice("en-US", tract, 1.0, 1.0, -25), 3.0, 16_000, synthesizer, rng())[0] for tract in (1.18, 0.82)
    )
    assert len(small) == pytest.approx(len(large), rel=0.05)

    def centre_hz(samples: npt.NDArray[np.float64]) -> float:
        power = np.abs(np.fft.rfft(samples)) ** 2
        return float((power * np.fft.rfftfreq(len(samples), 1 / 16_000)).sum() / power.sum())

    assert centre_hz(large) < 0.9 * centre_hz(small)


@pytest.mark.parametrize("sample_rate", [8_000, 16_000, 44_100])
def test_speech_has_the_length_and_level_asked_for(sample_rate: int) -> None:
    speech, _ = say(VOICE, 2.0, sample_rate, find_synthesizer("formants"), rng())
    assert len(speech) == 2 * sample_rate
    assert 20 * np.log10(np.sqrt(np.mean(speech**2))) == pytest.approx(-25, abs=0.1)


def test_voices_differ_and_stay_within_what_the_synthesizers_take() -> None:
    voices = [random_voice(rng(seed)) for seed in range(500)]
    assert len(set(voices)) == 500
    assert {voice.language for voice in voices} == set(LANGUAGES)
    assert all(0.5 < voice.pitch / voice.tract < 2 and 0.4 < voice.tempo / voice.tract < 2 for voice in voices)
    assert np.corrcoef([v.tract for v in voices], [v.pitch for v in voices])[0, 1] > 0.8


def test_levels_are_lowered_where_peaks_would_be_clipped() -> None:
    spike = np.zeros(1000)
    spike[500] = 1.0
    assert np.abs(at_level(spike, -6)).max() == pytest.approx(0.95)
    assert not at_level(np.zeros(10), -20).any()


def test_fades_begin_and_end_at_zero() -> None:
    faded = with_fades(np.ones(100), 10)
    assert faded[0] == 0
    assert faded[-1] == 0
    assert (faded[10:90] == 1).all()
    assert len(with_fades(np.ones(3), 10)) == 3


def test_an_unknown_synthesizer_is_refused() -> None:
    with pytest.raises(ValueError, match="not one of auto, nanotts, formants"):
        find_synthesizer("festival")


def test_without_nanotts_the_formants_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "py_nanotts", None)
    assert find_synthesizer().name == "formants"
    with pytest.raises(ValueError, match="pip install 'nest-ssl\\[demo\\]'"):
        find_synthesizer("nanotts")


def test_nanotts_says_the_same_whatever_was_said_before() -> None:
    pytest.importorskip("py_nanotts")
    other = Voice("de-DE", 0.9, 0.7, 1.2, -25)
    first = speak_nanotts("Seven ships sail.", VOICE)
    assert len(speak_nanotts("Guten Tag.", other)) > 8_000
    assert np.array_equal(speak_nanotts("Seven ships sail.", VOICE), first)
    assert find_synthesizer().name == "nanotts"


def test_what_nanotts_cannot_say_is_named_with_a_way_out() -> None:
    pytest.importorskip("py_nanotts")
    with pytest.raises(RuntimeError, match="py-nanotts: .* Give '--synthesizer formants'"):
        speak_nanotts("Hello.", Voice("xx-XX", 1.0, 1.0, 1.0, -25))


def test_the_text_of_speech_that_is_cut_off_ends_with_its_last_whole_word() -> None:
    text = "One two three."
    assert [words_before(text, share) for share in (1.0, 0.6, 0.5, 0.1)] == [text, "One two", "One two", ""]
