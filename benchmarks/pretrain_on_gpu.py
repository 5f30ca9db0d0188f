"""A step of the whole program on a GPU: `nest-ssl pretrain` with its shipped defaults, next to the step alone.

    python benchmarks/pretrain_on_gpu.py --output benchmarks/results/pretrain_on_gpu.json

The program reads audio files with DataLoader workers, logs and saves as it does by default; a row of metrics.csv has
the mean time of the steps since the row before, and the median of those rows counts, without the first ones, in which
kernels are compiled and graphs captured. The step alone (forward, backward, AdamW) runs on one batch that stays on the
GPU. Both run in one call, so that they see the same machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

sys.path[:0] = [str(Path(__file__).parents[1])]
from benchmarks.train_step import our_model, our_training, random_batch, timed

from nest_ssl.config import OptimConfig
from nest_ssl.fast.engine import accelerate
from nest_ssl.training.optimizers import build_optimizer

RATE = 16_000
DDP_ALONE = ["trainer.strategy=ddp", "trainer.sync_batchnorm=true", "debug.collectives=true"]
"""What several GPUs would do, on one: gradients and statistics of batch norms travel, from the rank to itself."""


def make_data(folder: Path, num_files: int, num_lines: int, seconds: float) -> None:
    """Files of 70 to 100 % of `seconds`, and a manifest that repeats them."""
    random = np.random.default_rng(0)
    lines = []
    for number in range(num_files):
        num_samples = int(RATE * seconds * random.uniform(0.7, 1.0))
        soundfile.write(folder / f"{number}.flac", 0.1 * random.standard_normal(num_samples), RATE)
        lines.append({"audio_filepath": f"{number}.flac", "duration": num_samples / RATE})
    speech = [lines[number % num_files] for number in range(num_lines)]
    for name, part in (("train", speech), ("valid", lines[:16]), ("noise", lines[:8])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part))


def whole_program(data: Path, batch: int, steps: int, workers: int, more: list[str], skip: int = 60) -> dict[str, Any]:
    """The median time of a step in `nest-ssl pretrain`, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "nest_ssl", "pretrain", "size=large", f"exp_manager.exp_dir={folder}"),
            *(
                f"model.train_ds.manifest_filepath={data}/train.jsonl",
                f"model.train_ds.noise_manifest={data}/noise.jsonl",
            ),
            f"model.validation_ds.manifest_filepath={data}/valid.jsonl",
            f"model.validation_ds.noise_manifest={data}/noise.jsonl",
            *(f"model.train_ds.batch_size={batch}", f"model.validation_ds.batch_size={batch}"),
            *(f"model.train_ds.num_workers={workers}", "model.validation_ds.num_workers=2"),
            *("trainer.precision=bf16", f"trainer.max_steps={steps}", "exp_manager.name=run", *more),
        ]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        with (Path(folder) / "run" / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["train_loss"] and int(row["step"]) >= skip]
        timings = [1e3 * float(row["train_step_timing"]) for row in rows]
        waits = [float(row["data_wait_share"]) for row in rows]
        said = [line for line in done.stderr.splitlines() if "raining runs with" in line or "ollectives in" in line]
    return {
        "ms": statistics.median(timings),
        "least_ms": min(timings),
        "most_ms": max(timings),
        "data_wait_share": statistics.median(waits),
        "steps": steps,
        "whole_s": time.perf_counter() - started,
        "engine": said,
    }


def step_alone(batch: int, seconds: float, steps: int = 50) -> float:
    """Forward, backward and AdamW on one batch that stays on the GPU, in milliseconds."""
    model = our_model("large")
    optimizer = build_optimizer(model, OptimConfig(lr=1e-4, betas=[0.9, 0.98], weight_decay=1e-3))
    step = our_training(accelerate(model, autocast=torch.bfloat16), random_batch(batch, seconds), optimizer)
    return timed(step, steps, 10)["ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=16.0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--collectives", action="store_true", help="also with ddp, one rank making every collective")
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*", help="further overrides of nest-ssl pretrain")
    options = parser.parse_args()
    alone_ms = step_alone(options.batch, options.seconds)
    torch.cuda.empty_cache()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        make_data(data, 64, options.batch * options.steps * 2, options.seconds)
        for more in ([], DDP_ALONE) if options.collectives else ([],):
            overrides = [*more, *options.overrides]
            whole = whole_program(data, options.batch, options.steps, options.workers, overrides)
            result = {
                "batch": f"{options.batch} x {options.seconds:g} s",
                "overrides": overrides,
                "step_alone_ms": alone_ms,
                "ratio": whole["ms"] / alone_ms,
                "pretrain": whole,
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "commit": commit,
            }
            print(json.dumps(result, indent=1), flush=True)
            if options.output is not None:
                earlier = json.loads(options.output.read_text()) if options.output.exists() else []
                options.output.write_text(json.dumps([*earlier, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
