"""The whole program on a CPU, from the command to the end of 8 steps and a validation, beside NeMo in the same run.

    python benchmarks/whole_program.py --nemo-python /path/to/nemo/bin/python --nemo-yaml nest_fast-conformer.yaml

64 utterances to train on and 16 to validate on, of the demo or of the manifests given by `--speech`, `--valid` and
`--noise`. Prints a table and writes JSON. Without NeMo its column says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import lightning
import soundfile
import torch

from nest_ssl.data.demo import DemoConfig, make_demo
from nest_ssl.training.experiment import git_commit

TINY = {
    "model.encoder.d_model": 64,
    "model.encoder.n_layers": 2,
    "model.encoder.n_heads": 4,
    "model.num_classes": 512,
    "model.train_ds.batch_size": 8,
    "model.train_ds.num_workers": 0,
    "model.validation_ds.batch_size": 8,
    "model.validation_ds.num_workers": 0,
    "trainer.devices": 1,
    "trainer.num_nodes": 1,
    "trainer.accelerator": "cpu",
    "trainer.strategy": "auto",
    "trainer.precision": 32,
    "trainer.max_epochs": 1,
    "trainer.sync_batchnorm": "false",
    "exp_manager.create_wandb_logger": "false",
}
NUM_TRAIN, NUM_VALID = 64, 16
STARTS = {"ours": "run folder", "nemo": "STARTS"}
"""What each program prints when it begins to train."""


@dataclass
class Timed:
    start_up_s: float
    total_s: float


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        if options.speech is None:
            make_demo(data, DemoConfig(num_train=NUM_TRAIN, num_val=NUM_VALID, num_noise=8, duration=12.0))
        else:
            copy_manifests(options, data)
        results = measure(options, data, Path(folder))
    print_table(results)
    facts = {
        "commit": git_commit().strip(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "speech": "synthetic, 12 s" if options.speech is None else options.speech.name,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    options.output.write_text(json.dumps({**facts, **results}, indent=2) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nemo-python", help="Python of an environment with nemo_toolkit[asr]")
    parser.add_argument("--nemo-yaml", help="NeMo's nest_fast-conformer.yaml")
    parser.add_argument("--speech", type=Path, help="manifest to train on; default: synthetic speech")
    parser.add_argument("--valid", type=Path)
    parser.add_argument("--noise", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "whole_program.json")
    return parser.parse_args()


def measure(options: argparse.Namespace, data: Path, folder: Path) -> dict[str, list[float]]:
    """Seconds of every repeat; the programs take turns."""
    results: dict[str, list[float]] = {}
    for repeat in range(options.repeats):
        overrides = [f"{key}={value}" for key, value in {**TINY, **manifests(data)}.items()]
        here = [*overrides, f"exp_manager.exp_dir={folder}/{repeat}"]
        add(results, "import lightning.pytorch", run([sys.executable, "-c", "import lightning.pytorch"], None))
        add(results, "ours", run([sys.executable, "-m", "nest_ssl", "pretrain", *here], STARTS["ours"]))
        if options.nemo_python:
            script = Path(__file__).with_name("nemo_pretrain.py")
            nemo = [options.nemo_python, str(script), options.nemo_yaml, *overrides]
            add(results, "NeMo", run([*nemo, f"exp_manager.exp_dir={folder}/nemo{repeat}"], STARTS["nemo"]))
    return results


def copy_manifests(options: argparse.Namespace, data: Path) -> None:
    """The first lines of each, the audio as FLAC: NeMo reads less than we do."""
    for part, source, count in (
        ("train", options.speech, NUM_TRAIN),
        ("valid", options.valid, NUM_VALID),
        ("noise", options.noise, None),
    ):
        lines = [json.loads(line) for line in source.read_text().splitlines()[:count]]
        (data / part).mkdir(parents=True)
        for number, line in enumerate(lines):
            samples, rate = soundfile.read(source.parent / line["audio_filepath"])
            line["audio_filepath"] = str(data / part / f"{number}.flac")
            soundfile.write(line["audio_filepath"], samples, rate)
        (data / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def manifests(data: Path) -> dict[str, Path]:
    parts = {"train_ds": "train", "validation_ds": "valid"}
    speech = {f"model.{section}.manifest_filepath": data / f"{part}.jsonl" for section, part in parts.items()}
    return {**speech, **{f"model.{section}.noise_manifest": data / "noise.jsonl" for section in parts}}


def run(command: list[str], sign: str | None) -> Timed:
    """Run to the end; the start-up lasts until `sign` is printed."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    start_up_s, lines = float("nan"), []
    for line in process.stdout:
        lines.append(line)
        if sign is not None and sign in line:
            start_up_s, sign = time.perf_counter() - begin, None
    if process.wait() != 0:
        raise SystemExit("".join(lines[-30:]))
    return Timed(start_up_s, time.perf_counter() - begin)


def add(results: dict[str, list[float]], name: str, timed: Timed) -> None:
    print(f"{name}: {timed.total_s:.1f} s, of it start-up {timed.start_up_s:.1f} s", flush=True)
    results.setdefault(f"{name}, s", []).append(timed.total_s)
    if timed.start_up_s == timed.start_up_s:
        results.setdefault(f"{name}, start-up, s", []).append(timed.start_up_s)


def print_table(results: dict[str, list[float]]) -> None:
    for name, values in results.items():
        print(f"{name:32} {' '.join(f'{value:8.1f}' for value in values)}   least {min(values):8.1f}")
    if "NeMo, s" not in results:
        print("NeMo: not measured (give --nemo-python and --nemo-yaml)")
        return
    after = {name: min(results[f"{name}, s"]) - min(results[f"{name}, start-up, s"]) for name in ("ours", "NeMo")}
    print(f"whole program: {min(results['NeMo, s']) / min(results['ours, s']):.1f} x NeMo")
    print(f"after start-up: {after['NeMo'] / after['ours']:.1f} x NeMo")


if __name__ == "__main__":
    main()
