"""How many seconds of noisy speech one core prepares per second: decoding alone, nest-ssl, and NeMo.

    python benchmarks/data_pipeline.py --nemo-python /path/to/nemo/bin/python --output benchmarks/results/data.json

16 kHz FLAC, utterances of 8 to 16 s, NeMo's default augmentation, no DataLoader workers, one thread, one core. Every
epoch decodes everything again, except in the row with the noise bank. Speech and noise are synthetic; `--speech`
replaces the speech with a manifest's, `--noise` adds a manifest of real noise.
Without NeMo's interpreter (also NEST_SSL_NEMO_PYTHON) its row holds a note instead.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

RATE = 16000
LIMIT, PEER = "decode speech and noise segments", "NeMo 2.7.3"
BATCH_SIZE = 8
AUGMENTATION = {
    "prob": 0.5,
    "noise_ratio": 0.5,
    "min_r_speech": -5.0,
    "max_r_speech": 5.0,
    "min_r_noise": -5.0,
    "max_r_noise": 20.0,
    "min_mix_rate": 0.5,
    "max_mix_rate": 0.5,
    "min_num_segments": 1,
    "max_num_segments": 1,
    "min_num_speakers": 1,
    "max_num_speakers": 1,
}
"""The values of NeMo's nest_fast-conformer.yaml."""


Samples = np.ndarray[Any, Any]


def synthetic_speech(num_samples: int, rng: np.random.Generator) -> Samples:
    """Make voiced syllables with pauses and a noise floor, about as hard to compress as read speech."""
    t = np.arange(num_samples) / RATE
    pitch = 120 + 40 * np.sin(2 * np.pi * 0.4 * t + rng.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    voiced: Samples = np.sum([np.sin(k * phase) / k**1.2 for k in range(1, 20)], axis=0)
    syllables = np.clip(np.sin(2 * np.pi * 2.5 * t) + 0.4 * np.sin(2 * np.pi * 0.3 * t), 0, None)
    speech: Samples = 0.08 * voiced * syllables + 0.003 * rng.standard_normal(num_samples)
    return speech


def white(num_samples: int, rng: np.random.Generator) -> Samples:
    """Make noise with energy at all frequencies: the sum of a segment is equally often positive and negative."""
    noise: Samples = 0.05 * np.convolve(rng.standard_normal(num_samples), np.ones(6) / 6, "same")
    return noise


def recorded(num_samples: int, rng: np.random.Generator) -> Samples:
    """Make noise as from a sound card: nothing below about 100 Hz, and an offset of ±1e-5."""
    noise = white(num_samples, rng)
    slow = np.convolve(noise, np.ones(160) / 160, "same")
    noise -= slow - rng.choice([-1e-5, 1e-5])
    return noise


NOISE: dict[str, Callable[[np.random.Generator], list[Samples]]] = {
    "white noise of 30 s": lambda rng: [white(30 * RATE, rng) for _ in range(64)],
    "recordings of 30 s": lambda rng: [recorded(30 * RATE, rng) for _ in range(64)],
    "clips of 5 s": lambda rng: [recorded(5 * RATE, rng) for _ in range(64)],
}
"""NeMo's speed depends on the noise: from a file longer than the utterance it reads a segment again, up to 100 times,
until the sum of the samples is positive."""


def real_files(manifest: Path) -> list[Samples]:
    lines = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    files = [soundfile.read(manifest.parent / line["audio_filepath"], dtype="float32") for line in lines]
    return [samples for samples, rate in files if rate == RATE and samples.ndim == 1]


def speech_signals(manifest: Path | None, num: int, rng: np.random.Generator) -> list[Samples]:
    """Return `num` utterances of 8 to 16 s."""
    lengths = [int(duration_s * RATE) for duration_s in rng.uniform(8, 16, num)]
    if manifest is None:
        return [synthetic_speech(length, rng) for length in lengths]
    stream = np.concatenate(real_files(manifest))
    starts = rng.integers(len(stream), size=num)
    return [np.take(stream, s + np.arange(length), mode="wrap") for s, length in zip(starts, lengths, strict=True)]


def write_data(folder: Path, signals: dict[str, list[Samples]]) -> None:
    """Write FLAC files and a manifest for each kind."""
    for name, all_samples in signals.items():
        lines = []
        for i, samples in enumerate(all_samples):
            path = folder / f"{name}_{i}.flac"
            soundfile.write(path, samples, RATE, subtype="PCM_16")
            lines.append({"audio_filepath": str(path), "duration": len(samples) / RATE, "text": ""})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def decode_only(folder: Path) -> Callable[[], None]:
    """The upper limit: decode each utterance and a noise segment of its length, and discard them."""
    speech, noise = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("speech", "noise")
    )

    def epoch() -> None:
        rng = np.random.default_rng(0)
        for line in speech:
            samples, _ = soundfile.read(line["audio_filepath"], dtype="float32")
            other = noise[int(rng.integers(len(noise)))]
            start = int(rng.uniform(0, max(0.0, other["duration"] * RATE - len(samples))))
            soundfile.read(other["audio_filepath"], start=start, frames=len(samples), dtype="float32")

    return epoch


def ours(folder: Path, noise_bank_gb: float = 0.0) -> Callable[[], None]:
    from nest_ssl.config import AugmentorConfig, DatasetConfig
    from nest_ssl.data import build_loader

    config = DatasetConfig(
        manifest_filepath=str(folder / "speech.jsonl"),
        noise_manifest=str(folder / "noise.jsonl"),
        noise_bank_gb=noise_bank_gb,
        sample_rate=RATE,
        batch_size=BATCH_SIZE,
        shuffle=True,
        batch_augmentor=AugmentorConfig(**AUGMENTATION),  # type: ignore[arg-type]
    )
    loader = build_loader(config)
    epochs = iter(range(10**6))

    def epoch() -> None:
        loader.set_epoch(next(epochs))
        exhaust(loader)

    return epoch


def nemo(folder: Path) -> Callable[[], None]:
    """NeMo's pipeline; runs only under NeMo's interpreter."""
    from nemo.collections.asr.data.ssl_dataset import get_audio_noise_dataset
    from nemo.collections.asr.modules.ssl_modules import MultiSpeakerNoiseAugmentation
    from nemo.utils import logging

    logging.setLevel(logging.ERROR)
    config = {
        "manifest_filepath": str(folder / "speech.jsonl"),
        "noise_manifest": str(folder / "noise.jsonl"),
        "sample_rate": RATE,
        "labels": None,
    }
    dataset = get_audio_noise_dataset(config, batch_augmentor=MultiSpeakerNoiseAugmentation(**AUGMENTATION))
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH_SIZE, shuffle=True, collate_fn=dataset.collate_fn, drop_last=False
    )
    return lambda: exhaust(loader)


def exhaust(batches: Iterable[Any]) -> None:
    for batch in batches:
        assert batch.noisy_audio.shape == batch.audio.shape


def seconds(epochs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Time each epoch after one to warm up. The pipelines take turns, so that other load affects all of them."""
    for epoch in epochs.values():
        epoch()
    out: dict[str, list[float]] = {name: [] for name in epochs}
    for _ in range(rounds):
        for name, epoch in epochs.items():
            begin = time.perf_counter()
            epoch()
            out[name].append(time.perf_counter() - begin)
    return out


def pin_to_one_core() -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def nemo_seconds(python: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure NeMo's row by running this file with `python`."""
    command = [python, __file__, "--as-nemo", str(folder), "--rounds", str(rounds)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        return {"error": result.stderr.strip().splitlines()[-1] if result.stderr.strip() else "no output"}
    row: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return row


def facts() -> dict[str, Any]:
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=False)
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    versions = {name: metadata.version(name) for name in ("torch", "numpy", "soundfile")}
    return {"commit": commit.stdout.strip(), "device": cpu, "python": platform.python_version(), "versions": versions}


def measure(speech: list[Samples], noise: list[Samples], rounds: int, nemo_python: str | None) -> dict[str, Any]:
    """Measure one table: a row for each pipeline."""
    speech_s = sum(map(len, speech)) / RATE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, {"speech": speech, "noise": noise})
        pipelines = {
            LIMIT: decode_only(folder),
            "nest-ssl": ours(folder),
            "nest-ssl, noise bank in memory": ours(folder, noise_bank_gb=1.0),
        }
        rows: dict[str, dict[str, Any]] = {
            name: {"seconds": times} for name, times in seconds(pipelines, rounds).items()
        }
        if nemo_python:
            rows[PEER] = nemo_seconds(nemo_python, folder, max(1, rounds // 4))
        else:
            rows[PEER] = {"error": "not measured: give --nemo-python or NEST_SSL_NEMO_PYTHON"}
    for row in rows.values():
        if "seconds" in row:
            row["audio_s_per_s"] = speech_s / statistics.median(row["seconds"])
    return {"speech_s": speech_s, "noise_files": len(noise), "rows": rows}


def table(rows: dict[str, dict[str, Any]]) -> str:
    limit, peer = rows[LIMIT]["audio_s_per_s"], rows[PEER].get("audio_s_per_s")
    lines = []
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"  {name:34} {row['error']}")
            continue
        speed = row["audio_s_per_s"]
        against = f"{speed / peer:.1f}" if peer else "-"
        lines.append(f"  {name:34} {speed:12,.0f} {speed / limit:13.0%} {against:>8}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speech", type=Path, help="manifest of real speech")
    parser.add_argument("--noise", type=Path, help="manifest of real noise")
    parser.add_argument("--num-speech", type=int, default=32, help="utterances in an epoch")
    parser.add_argument("--rounds", type=int, default=8, help="epochs measured")
    parser.add_argument("--nemo-python", default=os.environ.get("NEST_SSL_NEMO_PYTHON"))
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--as-nemo", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_nemo:
        pin_to_one_core()
        row = {"seconds": seconds({PEER: nemo(args.as_nemo)}, args.rounds)[PEER], "python": platform.python_version()}
        print(json.dumps({**row, "versions": {n: metadata.version(n) for n in ("nemo_toolkit", "torch", "numpy")}}))
        return
    pin_to_one_core()
    rng = np.random.default_rng(0)
    speech = speech_signals(args.speech, args.num_speech, rng)
    kinds = {name: make(rng) for name, make in NOISE.items()}
    if args.noise:
        kinds["real noise"] = real_files(args.noise)
    result = {**facts(), "speech": "real" if args.speech else "synthetic", "batch_size": BATCH_SIZE, "noise": {}}
    print(f"{'':36} {'x real time':>12} {'of the limit':>13} {'x NeMo':>8}")
    for name, noise in kinds.items():
        result["noise"][name] = measure(speech, noise, args.rounds, args.nemo_python)
        print(f"{name}\n{table(result['noise'][name]['rows'])}", flush=True)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
