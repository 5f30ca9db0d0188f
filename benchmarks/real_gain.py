"""Does pre-training help? Pre-train a small NEST on real speech, then probe it where log-mel statistics are weak.

    python benchmarks/real_gain.py --data DATA --work WORK --minutes 15 --output benchmarks/results/real_gain.json

DATA contains the manifests speech/{train,train_more,valid}, digits/, emotion/ and noise/{train,valid} (all .jsonl).
Pre-training runs for `--minutes` in total, as commands of at most `--slice-minutes` that resume each other. Each is
printed, so that you can run it by hand. The probes follow: digits with noise at 0 dB, digits from few labels, and
emotion. `--probe-only` repeats them with the checkpoint in WORK.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAM = [sys.executable, "-m", "nest_ssl"]
RUN_NAME = "nest_small_real"
RECIPE = {
    # Few layers and a low learning rate: with two hours of speech and a rate of 0.003, models of 4 or more layers start
    # well and then only predict the most frequent code.
    "model.encoder.n_layers": 4,
    "model.encoder.d_model": 256,
    "model.encoder.n_heads": 4,
    "model.encoder.subsampling_conv_channels": 128,
    "model.num_classes": 256,
    "model.num_books": 8,
    "model.masking.block_size": 24,
    "model.masking.mask_prob": 0.02,
    "model.train_ds.batch_augmentor.prob": 0.8,
    "model.train_ds.batch_augmentor.noise_ratio": 1.0,
    "model.train_ds.batch_augmentor.min_mix_rate": 1.0,  # noise over the whole utterance, as in the test
    "model.train_ds.batch_augmentor.max_mix_rate": 1.0,
    "model.train_ds.batch_augmentor.keep_unselected_noise": "false",
    "model.optim.lr": 5e-4,
    "model.optim.sched.name": "CosineAnnealing",
    "model.optim.sched.d_model": "null",
    "model.optim.sched.warmup_steps": 500,
    "model.optim.sched.min_lr": 1e-5,
    "trainer.gradient_clip_val": 1.0,
    "trainer.max_epochs": "null",
    "trainer.val_check_interval": 1000,
    "trainer.check_val_every_n_epoch": "null",
}
"""Differences from nest_fast-conformer.yaml."""
DIGITS_TIMES = 3
"""One pass over the data sees the digits (0.8 h) this many times and the speech (2 h) once."""


def pretrain_command(args: argparse.Namespace, minutes: float) -> list[str]:
    data = args.data
    manifests = ["speech/train.jsonl", "speech/train_more.jsonl", *["digits/train.jsonl"] * DIGITS_TIMES]
    speech = ",".join(str(data / name) for name in manifests)
    keys = {
        "model.train_ds.manifest_filepath": f"[{speech}]",
        "model.train_ds.noise_manifest": data / "noise/train.jsonl",
        "model.train_ds.min_duration": 0.3,  # digits are shorter than a second
        "model.train_ds.max_duration": 20.0,
        "model.train_ds.use_bucketing": "true",  # most clips last one second, the others twelve
        "model.train_ds.num_buckets": 6,
        "model.train_ds.batch_duration": args.batch_seconds,
        "model.train_ds.batch_size": 256,
        "model.train_ds.noise_bank_gb": 1,
        "model.train_ds.num_workers": args.workers,
        "model.validation_ds.manifest_filepath": data / "speech/valid.jsonl",
        "model.validation_ds.noise_manifest": data / "noise/valid.jsonl",
        **RECIPE,
        "trainer.max_steps": args.max_steps,
        "exp_manager.max_time_per_run": "00:" + time.strftime("%H:%M:%S", time.gmtime(60 * minutes)),
        "trainer.precision": args.precision,
        "exp_manager.exp_dir": args.work,
        "exp_manager.name": RUN_NAME,
        "exp_manager.resume_if_exists": "true",
        "exp_manager.resume_ignore_no_checkpoint": "true",
        "seed": args.seed,
    }
    return [*PROGRAM, "pretrain", *(f"{key}={value}" for key, value in keys.items()), *args.override]


def probe_commands(args: argparse.Namespace, checkpoint: Path) -> dict[str, list[str]]:
    data = args.data
    digits = ["--train", data / "digits/train.jsonl", "--test", data / "digits/valid.jsonl", "--label", "label"]
    emotion = ["--train", data / "emotion/train.jsonl", "--test", data / "emotion/valid.jsonl", "--label", "emotion"]
    tasks: dict[str, list[Any]] = {
        "digits at 0 dB": [*digits, "--snr", 0, "--noise", data / "noise/valid.jsonl"],
        f"digits from {args.labels_per_class} labels a class": [*digits, "--labels-per-class", args.labels_per_class],
        "emotion": emotion,
    }
    common = ["--seed", args.seed, *(["--device", args.device] if args.device else [])]
    return {
        name: [*PROGRAM, "probe", *map(str, [checkpoint, *options, *common, "--output", args.work / f"probe_{number}"])]
        for number, (name, options) in enumerate(tasks.items())
    }


def run(command: list[str]) -> float:
    """Print and run a command; return its duration in seconds."""
    print("$", shlex.join(command), flush=True)
    start = time.monotonic()
    subprocess.run(command, check=True)
    return time.monotonic() - start


def pretrain(args: argparse.Namespace) -> float:
    """Pre-train in commands that resume each other; return the seconds."""
    left_s, total_s = 60 * args.minutes, 0.0
    while left_s > 1 and steps_done(args.work) < args.max_steps:
        took_s = run(pretrain_command(args, min(left_s / 60, args.slice_minutes)))
        total_s += took_s
        left_s -= took_s
    return total_s


def steps_done(work: Path) -> int:
    """Return the number of steps so far, from the last row of the run's metrics (steps count from 0)."""
    paths = list((work / RUN_NAME).rglob("metrics.csv"))
    rows = paths[0].read_text().splitlines()[1:] if paths else []
    return int(rows[-1].split(",")[0]) + 1 if rows else 0


def last_checkpoint(work: Path) -> Path:
    found = sorted((work / RUN_NAME).rglob("*.nemo"), key=lambda path: path.stat().st_mtime)
    found = found or sorted((work / RUN_NAME).rglob("*last*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit(f"{work / RUN_NAME}: no checkpoint here. Run without --probe-only first.")
    return found[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--slice-minutes", type=float, default=5.0)
    parser.add_argument("--batch-seconds", type=float, default=200.0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--max-steps", type=int, default=9000)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--labels-per-class", type=int, default=2)
    parser.add_argument("--device", help="device for the probes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--override", action="append", default=[], help="a KEY=VALUE for pretrain; may be repeated")
    parser.add_argument("--probe-only", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    pretraining_s = 0.0 if args.probe_only else pretrain(args)
    checkpoint = last_checkpoint(args.work)
    results: dict[str, Any] = {"pretraining_s": pretraining_s, "checkpoint": checkpoint.name, "tasks": {}}
    for number, (name, command) in enumerate(probe_commands(args, checkpoint).items()):
        run(command)
        found = json.loads((args.work / f"probe_{number}" / "results.json").read_text())
        kept = ("encoder", "log_mel", "random_encoder", "differences", "num_train", "num_test")
        results["tasks"][name] = {key: found[key] for key in kept}
        better = all(gap["low"] > 0 for gap in found["differences"].values())
        print(f"{name}: {'better than both baselines' if better else 'not better than both'}", flush=True)
    if args.output:
        args.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
