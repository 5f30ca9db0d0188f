"""The formant synthesizer."""

from __future__ import annotations

import numpy as np
import pytest

from nest_ssl.demo.formants import PHONES, phones_of, speak_formants
from nest_ssl.demo.voices import WORDS, random_text
from tests.unit.demo.spectra import energy_share, period_hz


def test_every_letter_of_the_texts_has_a_phone() -> None:
    assert {letter for text in WORDS.values() for letter in text.lower() if letter.isascii()} <= PHONES.keys()
    assert len(phones_of("über")) == 5  # u, closure and burst of b, e, r
    assert phones_of("?!") == phones_of("")


@pytest.mark.parametrize("pitch", [0.6, 1.0, 1.4])
def test_formant_speech_has_the_pitch_asked_for(pitch: float) -> None:
    assert period_hz(speak_formants("aaaaaaaa", pitch)) == pytest.approx(200 * pitch, rel=0.3)
    low, high = (period_hz(speak_formants("aaaaaaaa", p)) for p in (pitch, 1.25 * pitch))
    assert high / low == pytest.approx(1.25, rel=0.1)


def test_vowels_are_low_and_hisses_high() -> None:
    assert energy_share(speak_formants("aaaa", 1.0), 0, 3000) > 0.9
    assert energy_share(speak_formants("ssss", 1.0), 4000, 8000) > 0.9


def test_a_faster_tempo_is_shorter() -> None:
    text = random_text("it-IT", 60, np.random.default_rng(0))
    assert len(speak_formants(text, 1.0, 1.25)) == pytest.approx(len(speak_formants(text, 1.0)) / 1.25, rel=0.1)
