"""Many voices for the demo out of two synthesizers: py-nanotts where it is installed, our own formants elsewhere.

py-nanotts has six speakers. A voice is one of them with another pitch, tempo and length of the vocal tract: speech of a
longer tract is the same sound with all frequencies lower, so it is made higher and faster, and then slowed down.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soxr

from nest_ssl.demo.formants import speak_formants
from nest_ssl.demo.texts import LANGUAGES, random_text

Samples = npt.NDArray[np.float64]

SYNTHESIS_RATE_HZ = 16_000
LETTERS_PER_S = 16.0
"""What py-nanotts says at tempo 1, at most; the end is cut off."""
TIMEOUT_S = 120


@dataclass(frozen=True)
class Voice:
    language: str
    tract: float
    """All resonances are scaled by this: 0.82 a large man, 1.18 a child."""
    pitch: float
    """Of the synthesizer's own pitch, about 200 Hz."""
    tempo: float
    level_db: float
    """Loudness, relative to full scale."""


def random_voice(rng: np.random.Generator) -> Voice:
    """Large people have long tracts and low voices, so one draw decides both, up to some scatter."""
    size = rng.uniform()
    return Voice(
        language=LANGUAGES[rng.integers(len(LANGUAGES))],
        tract=0.82 + 0.36 * size,
        pitch=float(0.55 * 2.5**size * np.exp(rng.normal(0, 0.08))),
        tempo=rng.uniform(0.5, 0.7),  # slow and clear: a sound lasts longer than one token, as in read speech
        level_db=rng.uniform(-30, -20),
    )


Speak = Callable[[str, Voice], Samples]
"""Text and voice to samples at SYNTHESIS_RATE_HZ, before the tract is scaled."""


@dataclass(frozen=True)
class Synthesizer:
    name: str
    version: str
    speak: Speak


def find_synthesizer(name: str = "auto") -> Synthesizer:
    """`nanotts`, `formants`, or `auto`: the first that is there."""
    if name in ("auto", "nanotts"):
        try:
            importlib.import_module("py_nanotts")
        except ImportError as error:
            if name == "nanotts":
                raise ValueError(
                    f"py-nanotts cannot be imported ({error}). Run \"pip install 'nest-ssl[demo]'\", or give "
                    f"'--synthesizer formants'."
                ) from None
        else:
            return Synthesizer("nanotts", importlib.metadata.version("py-nanotts"), speak_nanotts)
    if name in ("auto", "formants"):
        return Synthesizer("formants", "1", _speak_formants)
    raise ValueError(f"synthesizer '{name}': not one of auto, nanotts, formants.")


def _speak_formants(text: str, voice: Voice) -> Samples:
    return speak_formants(text, voice.pitch / voice.tract, voice.tempo / voice.tract)


_SPEAK_ONCE = """
import json, sys
given = json.load(sys.stdin)
sys.path.insert(0, given.pop("folder"))
from py_nanotts import NanoTTS
sys.stdout.buffer.write(NanoTTS().speak(**given))
"""


def speak_nanotts(text: str, voice: Voice) -> Samples:
    """One process for every text: the engine (0.1.1) reads memory it has not written, so that what it says depends on
    what was in memory before. In a new process that is zeros."""
    origin = importlib.import_module("py_nanotts").__file__
    assert origin is not None
    request = {
        "folder": str(Path(origin).parents[1]),
        "text": text,
        "voice": voice.language,
        "speed": voice.tempo / voice.tract,
        "pitch": voice.pitch / voice.tract,
        "volume": 0.5,  # at 1 the loudest samples are clipped
    }
    command = [sys.executable, "-I", "-S", "-c", _SPEAK_ONCE]
    way_out = f"for {text!r}. Give '--synthesizer formants' to do without it."
    try:
        done = subprocess.run(command, input=json.dumps(request).encode(), capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"py-nanotts: no answer within {TIMEOUT_S} s {way_out}") from None
    if done.returncode != 0 or not done.stdout:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"py-nanotts: {reason[-1]} {way_out}")
    return np.frombuffer(done.stdout, "<i2") / 32768


def say(
    voice: Voice, duration_s: float, sample_rate: int, synthesizer: Synthesizer, rng: np.random.Generator
) -> tuple[Samples, str]:
    """`duration_s` of random speech and its words: cut off where it is over, shorter if the voice was done before."""
    text = random_text(voice.language, round(duration_s * voice.tempo * LETTERS_PER_S), rng)
    speech: Samples = trimmed(synthesizer.speak(text, voice))
    speech = soxr.resample(speech, SYNTHESIS_RATE_HZ * voice.tract, sample_rate)
    kept = speech[: round(duration_s * sample_rate)]
    text = words_before(text, len(kept) / max(len(speech), 1))
    speech = with_fades(kept, round(0.01 * sample_rate))
    speech = at_level(speech, voice.level_db)
    return speech + 10 ** (-65 / 20) * rng.standard_normal(len(speech)), text  # no microphone is silent


def words_before(text: str, share: float) -> str:
    """The words that end before this share of the letters: what is heard of a text that is cut off, nearly."""
    end = share * len(text)
    places = (match.end() for match in re.finditer(r"\S+", text))
    return text[: max((place for place in places if place <= end + 0.5), default=0)]


def trimmed(samples: Samples) -> Samples:
    """Without the silence at both ends."""
    loud = np.flatnonzero(np.abs(samples) > 0.01 * np.abs(samples).max(initial=0))
    return samples[loud[0] : loud[-1] + 1] if len(loud) else samples


def with_fades(samples: Samples, num_samples: int) -> Samples:
    num_samples = min(num_samples, len(samples) // 2)
    ramp = np.linspace(0, 1, num_samples, endpoint=False)
    return np.concatenate([ramp, np.ones(len(samples) - 2 * num_samples), ramp[::-1]]) * samples


def at_level(samples: Samples, level_db: float) -> Samples:
    """Root mean square at `level_db` of full scale, or lower where peaks would be clipped."""
    rms, peak = float(np.sqrt(np.mean(samples**2))), float(np.abs(samples).max())
    return samples * min(10 ** (level_db / 20) / max(rms, 1e-9), 0.95 / max(peak, 1e-9))
