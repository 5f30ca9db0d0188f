"""How long does training stall for a checkpoint? The longest step minus the median, in the whole program.

    python benchmarks/save_stall.py --output benchmarks/results/save_stall.json

`nest-ssl pretrain size=xlarge` saves twice, with the average of the weights off and on: in the background, as it does,
and, for comparison, waiting until each file is written. The first save counts: nothing has been warmed up for it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1])]

WAITS = "NEST_SSL_SAVES_WAIT"
"""Set in the program that waits for its checkpoints."""


def program() -> None:
    """`nest-ssl pretrain`, where every checkpoint is waited for if `WAITS` is set."""
    from nest_ssl.cli.main import main as nest_ssl
    from nest_ssl.training.saving import Saver, Write

    begin = Saver._begin

    def begin_and_wait(self: Saver, write: Write) -> None:
        begin(self, write)
        self.wait()

    if os.environ.get(WAITS):
        Saver._begin = begin_and_wait  # type: ignore[method-assign]
    nest_ssl(sys.argv[1:])


def measure(data: Path, options: argparse.Namespace, *, average: bool, waits: bool) -> dict[str, Any]:
    every = options.every_if_waiting if waits else options.every
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        command = [
            *(sys.executable, __file__, "pretrain", f"size={options.size}", f"exp_manager.exp_dir={folder}"),
            f"model.train_ds.manifest_filepath={data}/train.jsonl",
            f"model.train_ds.noise_manifest={data}/noise.jsonl",
            *("~model.validation_ds", f"model.train_ds.batch_size={options.batch}", "model.train_ds.num_workers=8"),
            *("trainer.precision=bf16", f"trainer.max_steps={2 * every + every // 2}", "trainer.log_every_n_steps=1"),
            *("exp_manager.name=run", "exp_manager.create_tensorboard_logger=false"),
            f"exp_manager.ema.enable={str(average).lower()}",
            f"exp_manager.checkpoint_callback_params.every_n_train_steps={every}",
            "exp_manager.checkpoint_callback_params.save_nemo_on_train_end=false",
            *options.overrides,
        ]
        environment = {**os.environ, **({WAITS: "1"} if waits else {})}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        with Path(folder, "run", "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["train_loss"] and int(row["step"]) >= every // 2]
        num_bytes = Path(folder, "run", "checkpoints", "last.ckpt").stat().st_size
    seconds = {int(row["step"]): float(row["train_step_timing"]) for row in rows}
    median = statistics.median(seconds.values())
    longest = sorted(seconds, key=lambda step: -seconds[step])[:4]
    return {
        "average_of_weights": average,
        "waits": waits,
        "checkpoint_gb": num_bytes / 1e9,
        "median_step_s": median,
        "stall_s": max(seconds.values()) - median,
        "longest_steps": {step: seconds[step] for step in longest},
        "saved_at": [every, 2 * every],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="xlarge")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=16.0)
    parser.add_argument("--every", type=int, default=300, help="steps from one save to the next")
    parser.add_argument("--every-if-waiting", type=int, default=60)
    parser.add_argument("--average", choices=("off", "on"), help="of the weights; default: both, one after the other")
    parser.add_argument("--work", type=Path, help="a folder with 40 GB of room; default: a temporary one")
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*", help="further overrides of nest-ssl pretrain")
    options = parser.parse_args()
    from benchmarks.pretrain_on_gpu import make_data

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder), 32, 3 * options.every * options.batch, options.seconds)
        for average in (False, True) if options.average is None else (options.average == "on",):
            for waits in (False, True):
                rows.append(measure(Path(folder), options, average=average, waits=waits))
                print(json.dumps(rows[-1]), flush=True)
    result = {
        "size": options.size,
        "rows": rows,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
    }
    if options.output is not None:
        earlier = json.loads(options.output.read_text()) if options.output.exists() else []
        options.output.write_text(json.dumps([*earlier, result], indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["pretrain"]:
        program()
    else:
        main()
