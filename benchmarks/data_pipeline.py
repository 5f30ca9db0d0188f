"""How many seconds of noisy speech one core makes ready per second: decoding alone, nest-ssl, and NeMo.

    python benchmarks/data_pipeline.py --nemo-python /path/to/nemo/bin/python --output benchmarks/results/data.json

FLAC of 16 kHz, utterances of 8 to 16 s, NeMo's default augmentation, no loader processes, one thread, one core;
everything is decoded anew in every epoch but for the row with the noise bank. `--speech` and `--noise` take manifests
of real audio, which is encoded as FLAC first (speech cut to these lengths); without them it is synthesised. NeMo's
speed depends on the noise: it reads a segment again, up to 100 times, while the sum of its samples is negative.
Without NeMo's interpreter (also NEST_SSL_NEMO_PYTHON) its row says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before numpy and torch are imported

import numpy as np
import soundfile
import torch

RATE = 16000
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


def synthetic_speech(duration_s: float, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Voiced syllables with pauses and a noise floor: about as hard to compress as read speech."""
    t = np.arange(int(duration_s * RATE)) / RATE
    pitch = 120 + 40 * np.sin(2 * np.pi * 0.4 * t + rng.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    voiced = sum(np.sin(k * phase) / k**1.2 for k in range(1, 20))
    syllables = np.clip(np.sin(2 * np.pi * 2.5 * t) + 0.4 * np.sin(2 * np.pi * 0.3 * t), 0, None)
    return (0.08 * voiced * syllables + 0.003 * rng.standard_normal(len(t))).astype(np.float32)


def synthetic_noise(duration_s: float, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    noise = np.convolve(rng.standard_normal(int(duration_s * RATE)), np.ones(6) / 6, "same")
    return (0.05 * noise).astype(np.float32)


def real_files(manifest: Path) -> list[np.ndarray[Any, Any]]:
    lines = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    files = [soundfile.read(manifest.parent / line["audio_filepath"], dtype="float32") for line in lines]
    return [samples for samples, rate in files if rate == RATE and samples.ndim == 1]


def speech_signals(manifest: Path | None, num: int, rng: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """`num` utterances of 8 to 16 s."""
    lengths = [int(duration_s * RATE) for duration_s in rng.uniform(8, 16, num)]
    if manifest is None:
        return [synthetic_speech(length / RATE, rng) for length in lengths]
    stream = np.concatenate(real_files(manifest))
    starts = rng.integers(len(stream), size=num)
    return [
        np.take(stream, start + np.arange(length), mode="wrap") for start, length in zip(starts, lengths, strict=True)
    ]


def noise_signals(manifest: Path | None, rng: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """All noise files as they are, or 64 of 30 s."""
    return [synthetic_noise(30.0, rng) for _ in range(64)] if manifest is None else real_files(manifest)


def make_data(folder: Path, num_speech: int, speech: Path | None, noise: Path | None) -> float:
    """FLAC files and manifests in `folder`; returns the seconds of speech."""
    rng = np.random.default_rng(0)
    signals = {"speech": speech_signals(speech, num_speech, rng), "noise": noise_signals(noise, rng)}
    for name, all_samples in signals.items():
        lines = []
        for i, samples in enumerate(all_samples):
            path = folder / f"{name}_{i}.flac"
            soundfile.write(path, samples, RATE, subtype="PCM_16")
            lines.append({"audio_filepath": str(path), "duration": len(samples) / RATE, "text": ""})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return sum(map(len, signals["speech"])) / RATE


def decode_only(folder: Path) -> Callable[[], None]:
    """The limit: each utterance and a noise segment of its length, decoded and thrown away."""
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
    """Runs only under NeMo's interpreter."""
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


def seconds(epoch: Callable[[], None], rounds: int) -> list[float]:
    """Of each epoch, after one to warm up."""
    epoch()
    out = []
    for _ in range(rounds):
        begin = time.perf_counter()
        epoch()
        out.append(time.perf_counter() - begin)
    return out


def pin_to_one_core() -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def nemo_seconds(python: str, folder: Path, rounds: int) -> dict[str, Any]:
    """NeMo's row, measured by this file under `python`."""
    command = [python, __file__, "--as-nemo", str(folder), "--rounds", str(rounds)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        return {"error": result.stderr.strip().splitlines()[-1] if result.stderr.strip() else "no output"}
    row: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return row


def facts() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    versions = {name: metadata.version(name) for name in ("torch", "numpy", "soundfile")}
    return {"commit": commit.stdout.strip(), "device": cpu, "python": platform.python_version(), "versions": versions}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        total_s = make_data(folder, args.num_speech, args.speech, args.noise)
        pin_to_one_core()
        rows: dict[str, dict[str, Any]] = {
            "decode speech and noise segments": {"seconds": seconds(decode_only(folder), args.rounds)},
            "nest-ssl": {"seconds": seconds(ours(folder), args.rounds)},
            "nest-ssl, noise bank in memory": {"seconds": seconds(ours(folder, noise_bank_gb=1.0), args.rounds)},
        }
        if args.nemo_python:
            rows["NeMo 2.7.3"] = nemo_seconds(args.nemo_python, folder, max(1, args.rounds // 4))
        else:
            rows["NeMo 2.7.3"] = {"error": "not measured: give --nemo-python or NEST_SSL_NEMO_PYTHON"}
    for row in rows.values():
        if "seconds" in row:
            row["audio_s_per_s"] = total_s / statistics.median(row["seconds"])
    data = "real" if args.speech else "synthetic"
    return {**facts(), "data": data, "speech_s": total_s, "batch_size": BATCH_SIZE, "rows": rows}


def table(result: dict[str, Any]) -> str:
    rows = result["rows"]
    limit = rows["decode speech and noise segments"]["audio_s_per_s"]
    peer = rows["NeMo 2.7.3"].get("audio_s_per_s")
    lines = [f"{'':34} {'x real time':>12} {'of the limit':>13} {'x NeMo':>8}"]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"{name:34} {row['error']}")
            continue
        speed = row["audio_s_per_s"]
        against = f"{speed / peer:.1f}" if peer else "-"
        lines.append(f"{name:34} {speed:12,.0f} {speed / limit:13.0%} {against:>8}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speech", type=Path, help="manifest of real speech")
    parser.add_argument("--noise", type=Path, help="manifest of real noise")
    parser.add_argument("--num-speech", type=int, default=64, help="utterances in an epoch")
    parser.add_argument("--rounds", type=int, default=8, help="epochs measured")
    parser.add_argument("--nemo-python", default=os.environ.get("NEST_SSL_NEMO_PYTHON"))
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--as-nemo", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_nemo:
        pin_to_one_core()
        sys.stdout.flush()
        row = {"seconds": seconds(nemo(args.as_nemo), args.rounds), "python": platform.python_version()}
        print(json.dumps({**row, "versions": {n: metadata.version(n) for n in ("nemo_toolkit", "torch", "numpy")}}))
        return
    result = measure(args)
    print(table(result))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
