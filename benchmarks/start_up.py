"""How long `nest-ssl pretrain` takes from the start of its process to the end of its first step.

    python benchmarks/start_up.py            # adds its figures to benchmarks/results/start_up.json

The goal: at most 1.5 s more than a script that imports torch and makes one AdamW step. Both run in turn, so that a busy
moment of the machine meets both. The run is the configuration nest_demo with its defaults (TensorBoard included), on
CPU, one rank, no workers; it logs the wall-clock time of its first step. Checkpoints come after that step and do not
count. With `--imports` a run in which Python times its imports adds the slowest packages.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

GOAL_S = 1.5
REFERENCE = """
import time, torch
layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.ones(1, 8)).sum().backward()
optimizer.step()
print(time.time())
"""
VERSIONS = ("torch", "numpy", "hydra-core", "omegaconf", "tensorboard")


def main() -> None:
    options = parse_options()
    about = facts()
    if about["load_before"] > 0.5:
        print(
            f"other programs are running (load {about['load_before']}): the figures will be too high", file=sys.stderr
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo = ["demo", "--data-dir", str(folder / "data"), "--num-train", "16", "--num-val", "8"]
        subprocess.run([sys.executable, "-m", "nest_ssl", *demo], check=True, capture_output=True)
        first_step_s(folder, "warm-up", options.overrides)  # fills the disk cache, compiles bytecode
        figures: dict[str, list[float]] = {"reference_s": [], "start_up_s": []}
        for repeat in range(options.repeats):
            figures["reference_s"].append(reference_s())
            figures["start_up_s"].append(first_step_s(folder, f"run{repeat}", options.overrides))
        imports = slowest_imports(folder, options.overrides) if options.imports else {}
    record: dict[str, Any] = {**about, "overrides": options.overrides, **figures}
    record["more_s"] = statistics.median(figures["start_up_s"]) - statistics.median(figures["reference_s"])
    record["goal_s"] = GOAL_S
    for name, values in figures.items():
        print(f"{name:12} median {statistics.median(values):.2f}, from {min(values):.2f} to {max(values):.2f}")
    print(f"{'more_s':12} {record['more_s']:.2f}, goal {GOAL_S}")
    for package, seconds in imports.items():
        print(f"    {1000 * seconds:6.0f} ms  {package}")
    add_to(options.output, record)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="more overrides for pretrain")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--imports", action="store_true", help="print the packages that take longest to import")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "start_up.json")
    return parser.parse_args()


def reference_s() -> float:
    begin = time.time()
    done = subprocess.run([sys.executable, "-c", REFERENCE], capture_output=True, text=True, check=True)
    return float(done.stdout) - begin


def pretrain(folder: Path, name: str, overrides: list[str]) -> list[str]:
    """Arguments of Python for one step; the validation that would follow it is left out."""
    data, run_dir = folder / "data", folder / name
    return [
        "-m",
        "nest_ssl",
        "pretrain",
        "--config-name=nest_demo",
        *(f"model.{part}.noise_manifest={data}/noise.jsonl" for part in ("train_ds", "validation_ds")),
        f"model.train_ds.manifest_filepath={data}/train.jsonl",
        f"model.validation_ds.manifest_filepath={data}/valid.jsonl",
        f"exp_manager.explicit_log_dir={run_dir}",
        "trainer.accelerator=cpu",
        "trainer.max_steps=1",
        "trainer.log_every_n_steps=1",
        "trainer.limit_val_batches=0",
        *overrides,
    ]


def first_step_s(folder: Path, name: str, overrides: list[str]) -> float:
    begin = time.time()
    done = subprocess.run([sys.executable, *pretrain(folder, name, overrides)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"nest-ssl pretrain ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    with open(folder / name / "metrics.csv", newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["train_loss"])
    return float(row["time"]) - begin


def slowest_imports(folder: Path, overrides: list[str], num: int = 25) -> dict[str, float]:
    """Seconds that the modules of each package take to import, without what they import themselves."""
    command = [sys.executable, "-X", "importtime", *pretrain(folder, "imports", overrides)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    own_s: dict[str, float] = defaultdict(float)
    for self_us, module in re.findall(r"import time: +(\d+) \| +\d+ \| +(\S+)", done.stderr):
        own_s[module.split(".")[0]] += int(self_us) / 1e6
    return dict(sorted(own_s.items(), key=lambda item: -item[1])[:num])


def facts() -> dict[str, Any]:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return {
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in VERSIONS}},
    }


def add_to(path: Path, record: dict[str, Any]) -> None:
    records = json.loads(path.read_text()) if path.is_file() else []
    path.write_text(json.dumps([*records, record], indent=2) + "\n")


if __name__ == "__main__":
    main()
