"""The demo's dataset: speech of many voices, noises, and their manifests; the same arguments give the same bytes.

A folder is made next to its final place and renamed when it is complete, so that it exists whole or not at all.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from nest_ssl.config.checks import Positive, Range, Seed, ranges_of
from nest_ssl.demo.formants import RATE_HZ, speak_formants
from nest_ssl.demo.voices import LANGUAGES, Synthesizer, at_level, find_synthesizer, random_text, random_voice, say
from nest_ssl.files import remove_left_over, replace_text, temporary_name

RECORD = "demo.json"
PARTS = ("train", "valid", "noise")
UTTERANCES_PER_VOICE = 2

Samples = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DemoConfig:
    """What to make."""

    num_train: Positive = 80
    """Utterances to train on."""
    num_val: Positive = 16
    """Utterances to validate on, by voices that are not in the training data."""
    num_noise: Positive = 16
    """Noises, of eight kinds in turn."""
    duration: Annotated[float, Range(0.5, 60)] = 6.5
    """Average seconds per utterance; they vary by a quarter. Noises have this length."""
    sample_rate: Annotated[int, Range(8_000, 48_000)] = 16_000
    """Samples per second."""
    seed: Seed = 0
    """Seed of voices, texts and noises."""

    def __post_init__(self) -> None:
        for name, limits in ranges_of(DemoConfig).items():
            limits.range.check(f"--{name.replace('_', '-')}", getattr(self, name))


@dataclass(frozen=True)
class DemoFolder:
    """What a demo folder contains."""

    folder: Path
    config: DemoConfig
    synthesizer: str
    num_voices: dict[str, int]
    duration_s: dict[str, float]
    is_new: bool

    def manifest(self, part: str) -> Path:
        return self.folder / f"{part}.jsonl"


Report = Callable[[int, int], None]
"""Called with the number of files done and their total."""


def make_demo(
    folder: Path,
    config: DemoConfig,
    *,
    synthesizer: str = "auto",
    overwrite: bool = False,
    num_threads: int = 2,
    report: Report = lambda done, total: None,
) -> DemoFolder:
    """Make the dataset in `folder` unless it exists; one made with other settings is replaced only with `overwrite`."""
    voices = find_synthesizer(synthesizer)
    record = {"config": asdict(config), "synthesizer": voices.name}
    complete = _what_is_there(folder, record, overwrite)
    if complete is not None:
        return _opened(folder, complete, is_new=False)
    place = Path(os.path.abspath(folder))
    if Path.cwd().is_relative_to(place):
        raise ValueError(f"{folder}: is the working folder, or above it. Give another --data-dir.")
    remove_left_over(place)
    part, old = temporary_name(place), temporary_name(place)
    try:
        part.mkdir(parents=True)
        _write(part, config, voices, num_threads, report)
        record["synthesizer_version"] = voices.version
        replace_text(part / RECORD, json.dumps(record, indent=1) + "\n")
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
    except OSError as error:
        raise OSError(f"{folder}: cannot be written ({error.strerror or error}). Give another --data-dir.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return _opened(folder, record, is_new=True)


def _what_is_there(folder: Path, wanted: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """Return the record of a complete folder as wanted; None if one may be made. Refuse what others made."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not folder.is_dir() or not (folder / RECORD).is_file():
        raise ValueError(f"{folder}: exists, and the demo did not make it. Give another --data-dir.")
    ours = {RECORD, *PARTS, *(f"{part}.jsonl" for part in PARTS)}
    others = sorted(path.name for path in folder.iterdir() if path.name not in ours and path.suffix != ".idx")
    if overwrite and others:
        raise ValueError(f"{folder}: contains '{others[0]}', which the demo did not make. Move it first.")
    if overwrite:
        return None
    record = _read_record(folder)
    now = {**wanted["config"], "synthesizer": wanted["synthesizer"]}
    before = {**record["config"], "synthesizer": record["synthesizer"]}
    changed = [f"{key} {before.get(key)}, not {now[key]}" for key in now if before.get(key) != now[key]]
    if changed:
        raise ValueError(f"{folder}: was made with {'; '.join(changed)}. Give --overwrite or another --data-dir.")
    for part in PARTS:
        for entry in _entries(folder, part):
            if not (folder / entry["audio_filepath"]).is_file():
                raise ValueError(f"{folder}: {entry['audio_filepath']} is missing. Give --overwrite to make it again.")
    return record


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text())
        DemoConfig(**record["config"])
        _ = record["synthesizer"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / RECORD}: cannot be read ({error}). Give --overwrite to make it again.") from None
    return record


def _entries(folder: Path, part: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()]


def _opened(folder: Path, record: dict[str, Any], *, is_new: bool) -> DemoFolder:
    entries = {part: _entries(folder, part) for part in PARTS}
    return DemoFolder(
        folder=folder,
        config=DemoConfig(**record["config"]),
        synthesizer=record["synthesizer"],
        num_voices={part: len({entry["speaker"] for entry in entries[part]}) for part in ("train", "valid")},
        duration_s={part: sum(entry["duration"] for entry in entries[part]) for part in PARTS},
        is_new=is_new,
    )


def _write(folder: Path, config: DemoConfig, voices: Synthesizer, num_threads: int, report: Report) -> None:
    counts = {"train": config.num_train, "valid": config.num_val, "noise": config.num_noise}
    jobs = [(part, index) for part, count in counts.items() for index in range(count)]
    for part in PARTS:
        (folder / part).mkdir()

    def make(job: tuple[str, int]) -> dict[str, Any]:
        part, index = job
        samples, entry = _noise(config, index) if part == "noise" else _utterance(config, part, index, voices)
        path = f"{part}/{index:05d}.flac"
        encoded = io.BytesIO()
        soundfile.write(encoded, samples, config.sample_rate, subtype="PCM_16", format="FLAC")
        (folder / path).write_bytes(encoded.getvalue())  # libsndfile calls a full disk a "System error."
        return {"audio_filepath": path, "duration": len(samples) / config.sample_rate, **entry}

    with ThreadPoolExecutor(num_threads) as pool:
        try:
            entries = list(_counted(pool.map(make, jobs), len(jobs), report))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for part in PARTS:
        lines = [
            json.dumps(entry, ensure_ascii=False) for job, entry in zip(jobs, entries, strict=True) if job[0] == part
        ]
        replace_text(folder / f"{part}.jsonl", "\n".join(lines) + "\n")


def _counted(entries: Iterable[dict[str, Any]], total: int, report: Report) -> Iterable[dict[str, Any]]:
    for done, entry in enumerate(entries, 1):
        report(done, total)
        yield entry


def _utterance(config: DemoConfig, part: str, index: int, voices: Synthesizer) -> tuple[Samples, dict[str, Any]]:
    # A file depends only on its own number, not on threads or on how many files there are.
    part_number = PARTS.index(part)
    number = index // UTTERANCES_PER_VOICE
    voice = random_voice(np.random.default_rng((config.seed, part_number, 0, number)))
    rng = np.random.default_rng((config.seed, part_number, 1, index))
    duration_s = config.duration * rng.uniform(0.75, 1.25)
    samples, text = say(voice, duration_s, config.sample_rate, voices, rng)
    return samples, {"speaker": f"{part}_{number:04d}", "lang": voice.language, "text": text}


def _noise(config: DemoConfig, index: int) -> tuple[Samples, dict[str, Any]]:
    rng = np.random.default_rng((config.seed, PARTS.index("noise"), index))
    name = list(NOISES)[index % len(NOISES)]
    samples = NOISES[name](round(config.duration * config.sample_rate), config.sample_rate, rng)
    return at_level(samples, rng.uniform(-35, -20)), {"label": name}


# ---- noises, each made from a random generator alone ----


def coloured(num_samples: int, exponent: float, rng: np.random.Generator) -> Samples:
    """Return noise whose power falls as 1 / frequency^exponent: 0 white, 1 pink, 2 brown."""
    spectrum = np.fft.rfft(rng.standard_normal(num_samples))
    index = np.maximum(1, np.arange(len(spectrum)))
    return np.fft.irfft(spectrum * index ** (-exponent / 2), num_samples)


def white(num_samples: int, _rate: int, rng: np.random.Generator) -> Samples:
    return coloured(num_samples, 0, rng)


def pink(num_samples: int, _rate: int, rng: np.random.Generator) -> Samples:
    return coloured(num_samples, 1, rng)


def brown(num_samples: int, _rate: int, rng: np.random.Generator) -> Samples:
    return coloured(num_samples, 2, rng)


def hum(num_samples: int, rate: int, rng: np.random.Generator) -> Samples:
    """Mains hum, 50 or 60 Hz, with weaker harmonics."""
    seconds = np.arange(num_samples) / rate
    mains_hz = rng.choice([50, 60])
    out = 0.02 * rng.standard_normal(num_samples)
    for k in range(1, 9):
        out += rng.uniform(0.2, 1) / k * np.sin(2 * np.pi * (k * mains_hz * seconds + rng.uniform()))
    return out


def wind(num_samples: int, rate: int, rng: np.random.Generator) -> Samples:
    """Brownish noise that swells and fades."""
    num_gusts = max(2, num_samples // rate + 2)
    swell = np.interp(np.linspace(0, num_gusts - 1, num_samples), np.arange(num_gusts), rng.uniform(0.1, 1, num_gusts))
    return swell * coloured(num_samples, 1.5, rng)


def clicks(num_samples: int, rate: int, rng: np.random.Generator) -> Samples:
    """Keys, dishes, doors: short ringing at random times."""
    out = 1e-4 * rng.standard_normal(num_samples)
    ring_s = np.arange(round(0.05 * rate)) / rate
    for start in rng.integers(0, num_samples, size=max(1, round(6 * num_samples / rate))):
        hz, decay_s = rng.uniform(300, 0.4 * rate), rng.uniform(0.002, 0.012)
        ring = rng.uniform(0.2, 1) * np.exp(-ring_s / decay_s) * np.sin(2 * np.pi * hz * ring_s)
        out[start : start + len(ring)] += ring[: num_samples - start]
    return out


def chords(num_samples: int, rate: int, rng: np.random.Generator) -> Samples:
    """Slow music: three notes at a time, changing every half second or so."""
    out = np.zeros(num_samples)
    start = 0
    while start < num_samples:
        length = min(num_samples - start, round(rng.uniform(0.3, 0.9) * rate))
        seconds = np.arange(length) / rate
        for note in rng.choice(24, size=3, replace=False):
            hz = 130.8 * 2 ** (note / 12)
            out[start : start + length] += np.exp(-2 * seconds) * sum(
                np.sin(2 * np.pi * k * hz * seconds) / k for k in range(1, 6)
            )
        start += length
    return out


def babble(num_samples: int, rate: int, rng: np.random.Generator) -> Samples:
    """Six people talking at once."""
    out = np.zeros(num_samples)
    for _ in range(6):
        tract, pitch = rng.uniform(0.85, 1.15), rng.uniform(0.6, 1.3)
        language = LANGUAGES[rng.integers(len(LANGUAGES))]
        text = random_text(language, round(14 * num_samples / rate) + 20, rng)
        speech = soxr.resample(speak_formants(text, pitch), RATE_HZ * tract, rate)
        out += np.resize(speech, num_samples) / np.sqrt(np.mean(speech**2))
    return out


NOISES: dict[str, Callable[[int, int, np.random.Generator], Samples]] = {
    noise.__name__: noise for noise in (white, pink, brown, hum, wind, clicks, chords, babble)
}
"""Maps names to functions of the number of samples, the sample rate and a generator."""
