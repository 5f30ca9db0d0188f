"""The whole program on a CPU, from the command to the end of 8 steps and a validation, next to NeMo in the same run.

    python benchmarks/whole_program.py --nemo-python /path/to/nemo/bin/python --nemo-yaml nest_fast-conformer.yaml

64 utterances of 8 to 16 s to train on and 16 to validate on, synthetic or cut from the manifest given by `--speech`;
the synthetic noise of `data_pipeline.py`, or with `--noise` a manifest's. All audio is FLAC, which NeMo reads too.
Prints a table and writes JSON. Without NeMo its rows are left out.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[1])]
from benchmarks.data_pipeline import NOISE, real_files, speech_signals, write_data

from nest_ssl.training.experiment import git_commit

TINY = {
    "model.encoder.d_model": 64,
    "model.encoder.n_layers": 2,
    "model.encoder.n_heads": 4,
    "model.num_classes": 512,
    "model.train_ds.batch_size": 8,
    "model.validation_ds.batch_size": 8,
    "trainer.devices": 1,
    "trainer.num_nodes": 1,
    "trainer.accelerator": "cpu",
    "trainer.strategy": "auto",
    "trainer.precision": 32,
    "trainer.max_epochs": 1,
    "trainer.sync_batchnorm": "false",
    "exp_manager.create_wandb_logger": "false",
    "exp_manager.checkpoint_callback_params.save_nemo_on_train_end": "false",  # NeMo writes it before the sign below
}
SECTIONS = {"train_ds": "train", "validation_ds": "valid"}
NUM_TRAIN, NUM_VALID = 64, 16
SIGNS = {"ours": ("run folder", "step 8/8"), "NeMo": ("STARTS", "ENDS")}
"""What each program prints when training starts, and when steps, validation and `.ckpt` files are done."""


@dataclass
class Timed:
    start_up_s: float | None
    training_s: float | None
    """From the end of start-up to the end of training."""
    total_s: float


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        make_data(options, Path(folder))
        results = measure(options, Path(folder))
    print_table(results)
    facts = {
        "NeMo": nemo_version(options.nemo_python),
        "commit": git_commit().strip(),
        "torch": torch.__version__,
        "speech": "synthetic" if options.speech is None else options.speech.name,
        "noise": options.noise_kind if options.noise is None else options.noise.name,
        "num_workers": options.num_workers,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    options.output.write_text(json.dumps({**facts, **results}, indent=2) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nemo-python", help="Python of an environment with nemo_toolkit[asr]")
    parser.add_argument("--nemo-yaml", help="NeMo's nest_fast-conformer.yaml")
    parser.add_argument("--speech", type=Path, help="manifest of speech; default: synthetic")
    parser.add_argument("--noise", type=Path, help="manifest of noise; default: synthetic")
    parser.add_argument("--noise-kind", choices=NOISE, default=next(iter(NOISE)), help="kind of synthetic noise")
    parser.add_argument("--num-workers", type=int, default=0, help="DataLoader workers; NeMo's yaml has 8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "whole_program.json")
    return parser.parse_args()


def nemo_version(nemo_python: str | None) -> str | None:
    if nemo_python is None:
        return None
    ask = "from importlib.metadata import version; print(version('nemo_toolkit'))"
    return subprocess.run([nemo_python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def make_data(options: argparse.Namespace, folder: Path) -> None:
    rng = np.random.default_rng(0)
    signals = {
        "train": speech_signals(options.speech, NUM_TRAIN, rng),
        "valid": speech_signals(options.speech, NUM_VALID, rng),
        "noise": NOISE[options.noise_kind](rng) if options.noise is None else real_files(options.noise),
    }
    write_data(folder, signals)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of every repeat; the programs take turns."""
    results: dict[str, list[float]] = {}
    for repeat in range(options.repeats):
        changes = {**TINY, **manifests(folder), **{f"model.{s}.num_workers": options.num_workers for s in SECTIONS}}
        overrides = [f"{key}={value}" for key, value in changes.items()]
        add(results, "import torch", run([sys.executable, "-c", "import torch"]))
        here = [*overrides, f"exp_manager.exp_dir={folder}/{repeat}"]
        add(results, "ours", run([sys.executable, "-m", "nest_ssl", "pretrain", *here], SIGNS["ours"]))
        if options.nemo_python:
            script = Path(__file__).with_name("nemo_pretrain.py")
            nemo = [options.nemo_python, str(script), options.nemo_yaml, *overrides]
            add(results, "NeMo", run([*nemo, f"exp_manager.exp_dir={folder}/nemo{repeat}"], SIGNS["NeMo"]))
    return results


def manifests(data: Path) -> dict[str, Path]:
    speech = {f"model.{section}.manifest_filepath": data / f"{part}.jsonl" for section, part in SECTIONS.items()}
    return {**speech, **{f"model.{section}.noise_manifest": data / "noise.jsonl" for section in SECTIONS}}


def run(command: list[str], signs: tuple[str, ...] = ()) -> Timed:
    """Run to the end, and note when each of the `signs` was last printed."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    seen_s: dict[str, float] = {}
    lines = []
    for line in process.stdout:
        lines.append(line)
        seen_s.update({sign: time.perf_counter() - begin for sign in signs if sign in line})
    if process.wait() != 0 or len(seen_s) < len(signs):
        raise SystemExit("".join(lines[-30:]))
    total_s = time.perf_counter() - begin
    if not signs:
        return Timed(None, None, total_s)
    starts, ends = signs
    return Timed(seen_s[starts], seen_s[ends] - seen_s[starts], total_s)


def add(results: dict[str, list[float]], name: str, timed: Timed) -> None:
    parts = {"total": timed.total_s, "start-up": timed.start_up_s, "8 steps and validation": timed.training_s}
    for part, seconds in parts.items():
        if seconds is not None:
            print(f"{name}, {part}: {seconds:.1f} s", flush=True)
            results.setdefault(f"{name}, {part}, s", []).append(seconds)


def print_table(results: dict[str, list[float]]) -> None:
    for name, values in results.items():
        print(f"{name:36} {' '.join(f'{value:8.1f}' for value in values)}   median {statistics.median(values):8.1f}")
    if "NeMo, total, s" not in results:
        print("NeMo: not measured (give --nemo-python and --nemo-yaml)")
        return
    for part in ("total", "start-up", "8 steps and validation"):
        ours_s, nemo_s = (statistics.median(results[f"{name}, {part}, s"]) for name in ("ours", "NeMo"))
        print(f"{part}: {nemo_s / ours_s:.1f} x NeMo")


if __name__ == "__main__":
    main()
