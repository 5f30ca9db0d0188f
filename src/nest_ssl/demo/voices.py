"""Many voices for the demo from two synthesizers: py-nanotts where it is installed, our own formants elsewhere.

py-nanotts has six speakers. A voice is one of them with a different pitch, tempo and length of the vocal tract. A
longer tract makes the same sound with all frequencies lower, so speech is synthesized higher and faster, and then
slowed down.
What the voices say are random sentences in six languages, without meaning.
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

Samples = npt.NDArray[np.float64]

SYNTHESIS_RATE_HZ = 16_000
LETTERS_PER_S = 16.0
"""What py-nanotts says at tempo 1, at most; the end is cut off."""
TIMEOUT_S = 120
WORDS: dict[str, str] = {
    "en-US": "river mountain yellow window thirteen people quickly around the garden because nobody heard seven ships "
    "sailing through thick winter fog before breakfast my brother usually fixes old machines with patience and joy",
    "en-GB": "weather village clever butcher gathers fresh mushrooms near church every Thursday while children measure "
    "strange shadows on the wooden bridge whose beauty changes under bright autumn light and quiet rain",
    "de-DE": "Straße schöne Brücke zwölf Bücher zwischen Häusern fliegt langsam über den grünen Wald heute morgen "
    "kaufen Freunde frisches Brot im kleinen Dorf wo niemand wirklich schnell läuft und jeder freundlich grüßt",
    "es-ES": "montaña pequeña llueve mucho sobre el camino viejo donde los niños juegan siempre después de comer "
    "naranjas dulces mientras la abuela cuenta historias largas del río azul y catorce caballos blancos",
    "fr-FR": "montagne petite rivière chaque matin les oiseaux chantent doucement dans le jardin vert derrière la "
    "maison où quinze enfants mangent du pain chaud avec beaucoup de fromage et une vieille chanson joyeuse",
    "it-IT": "montagna piccola strada ogni mattina gli uccelli cantano piano nel giardino verde dietro la casa dove "
    "quindici ragazzi mangiano pane caldo con molto formaggio e una vecchia canzone piena di luce",
}
LANGUAGES = tuple(WORDS)


@dataclass(frozen=True)
class Voice:
    language: str
    tract: float
    """Factor on all resonances: 0.82 for a large man, 1.18 for a child."""
    pitch: float
    """Factor on the synthesizer's own pitch, about 200 Hz."""
    tempo: float
    level_db: float
    """Loudness, relative to full scale."""


def random_voice(rng: np.random.Generator) -> Voice:
    """Draw a voice. Large people have long tracts and low voices, so one draw decides both, up to some scatter."""
    size = rng.uniform()
    return Voice(
        language=LANGUAGES[rng.integers(len(LANGUAGES))],
        tract=0.82 + 0.36 * size,
        pitch=float(0.55 * 2.5**size * np.exp(rng.normal(0, 0.08))),
        tempo=rng.uniform(0.5, 0.7),  # slow and clear: a sound lasts longer than one token, as in read speech
        level_db=rng.uniform(-30, -20),
    )


Speak = Callable[[str, Voice], Samples]
"""Turns text and voice into samples at SYNTHESIS_RATE_HZ, before the tract is scaled."""


@dataclass(frozen=True)
class Synthesizer:
    name: str
    version: str
    speak: Speak


def find_synthesizer(name: str = "auto") -> Synthesizer:
    """Return `nanotts`, `formants`, or with `auto` the first that is available."""
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
    """Speak a text in a process of its own.

    The engine (0.1.1) reads memory it has not written, so its output depends on what was in memory before. In a new
    process that is zeros.
    """
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
    """Return at most `duration_s` of random speech, and its words."""
    text = random_text(voice.language, round(duration_s * voice.tempo * LETTERS_PER_S), rng)
    speech: Samples = trimmed(synthesizer.speak(text, voice))
    speech = soxr.resample(speech, SYNTHESIS_RATE_HZ * voice.tract, sample_rate)
    kept = speech[: round(duration_s * sample_rate)]
    text = words_before(text, len(kept) / max(len(speech), 1))
    speech = with_fades(kept, round(0.01 * sample_rate))
    speech = at_level(speech, voice.level_db)
    return speech + 10 ** (-65 / 20) * rng.standard_normal(len(speech)), text  # no microphone is silent


def random_text(language: str, num_letters: int, rng: np.random.Generator) -> str:
    """Return sentences of 4 to 9 words, `num_letters` long or a little more."""
    words = WORDS[language].split()
    sentences: list[str] = []
    while sum(map(len, sentences)) < num_letters:
        sentence = " ".join(rng.choice(words, size=rng.integers(4, 10)))
        sentences.append(f"{sentence[0].upper()}{sentence[1:]}.")
    return " ".join(sentences)


def words_before(text: str, share: float) -> str:
    """Return the words that end before this share of the letters: about what is heard of a text that is cut off."""
    end = share * len(text)
    places = (match.end() for match in re.finditer(r"\S+", text))
    return text[: max((place for place in places if place <= end + 0.5), default=0)]


def trimmed(samples: Samples) -> Samples:
    """Cut the silence at both ends."""
    loud = np.flatnonzero(np.abs(samples) > 0.01 * np.abs(samples).max(initial=0))
    return samples[loud[0] : loud[-1] + 1] if len(loud) else samples


def with_fades(samples: Samples, num_samples: int) -> Samples:
    num_samples = min(num_samples, len(samples) // 2)
    ramp = np.linspace(0, 1, num_samples, endpoint=False)
    return np.concatenate([ramp, np.ones(len(samples) - 2 * num_samples), ramp[::-1]]) * samples


def at_level(samples: Samples, level_db: float) -> Samples:
    """Scale to a root mean square of `level_db` relative to full scale, or lower if peaks would clip."""
    rms, peak = float(np.sqrt(np.mean(samples**2))), float(np.abs(samples).max())
    return samples * min(10 ** (level_db / 20) / max(rms, 1e-9), 0.95 / max(peak, 1e-9))
