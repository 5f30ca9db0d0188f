"""Do the batches of `nest-ssl fit` hold? Fits them, then trains 200 real steps with them, validations included.

    python benchmarks/fit_holds.py large        # one size per call: 6 to 8 minutes on an H200
    python benchmarks/fit_holds.py xlarge
    python benchmarks/fit_holds.py xlarge --fitted fit.txt   # only the training, with what 'fit -o fit.txt' has found

Synthetic audio of 2 to 30 s, mixed; 64 files that the manifest names again and again. Prints what `fit` printed, the
peak of the memory that torch reserved, next to what `fit` had measured, and the time of steps and of an epoch; appends
all of it to JSON. Fails if training does, or if it used less than 85 % of the card.
"""

from __future__ import annotations

import argparse
import json
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
from nest_ssl.config import compose
from nest_ssl.data.randomness import Use, seed_everything
from nest_ssl.launch.ranks import ALONE
from nest_ssl.run_folder import RunFolder, read_rows
from nest_ssl.training.experiment import git_commit
from nest_ssl.training.run import pretrain
from nest_ssl.training.trainer import Run, current_run

NUM_FILES = 64
LONGEST_S = 30.0
LEAST_SHARE = 0.85


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", help="small, medium, large, …")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--memory-share", type=float, default=0.95)
    parser.add_argument("--more", nargs="*", default=[], help="further overrides, for both commands")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "fit_holds.json")
    parser.add_argument("--fitted", type=Path, help="what an earlier 'nest-ssl fit -o' has written; it is not repeated")
    parser.add_argument("--train", nargs="*", help=argparse.SUPPRESS)  # the second process: these overrides
    options = parser.parse_args()
    if options.train is not None:
        print(json.dumps(train(options.train)))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    print(json.dumps(result, indent=1))
    results = json.loads(options.output.read_text()) if options.output.is_file() else []
    options.output.write_text(json.dumps([*results, result], indent=1) + "\n")
    if result["peak_share"] < LEAST_SHARE:
        sys.exit(f"training used {result['peak_share']:.0%} of the card, less than {LEAST_SHARE:.0%}")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write_data(folder, num_lines=300 * options.steps)
    common = [
        f"size={options.size}",
        "trainer.precision=bf16",
        f"model.train_ds.max_duration={LONGEST_S}",
        f"model.train_ds.manifest_filepath={folder}/train.jsonl",
        f"model.train_ds.noise_manifest={folder}/noise.jsonl",
        f"model.validation_ds.manifest_filepath={folder}/valid.jsonl",
        f"model.validation_ds.max_duration={LONGEST_S}",
        "model.validation_ds.batch_size=16",
        *options.more,
    ]
    fitted, fit_s = options.fitted or folder / "fit.txt", None
    if options.fitted is None:
        started = time.perf_counter()
        fit = [sys.executable, "-m", "nest_ssl", "fit", f"--memory-share={options.memory_share}", f"-o{fitted}"]
        subprocess.run([*fit, *common], check=True)
        fit_s = round(time.perf_counter() - started, 1)
    found = fitted.read_text().split()
    run = [
        f"trainer.max_steps={options.steps}",
        f"trainer.val_check_interval={options.steps // 2}",
        "trainer.check_val_every_n_epoch=null",
        "trainer.log_every_n_steps=10",
        f"exp_manager.explicit_log_dir={folder}/run",
    ]
    command = [sys.executable, __file__, options.size, "--train", *common, *found, *run]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    facts = {"size": options.size, "commit": git_commit().strip(), "torch": torch.__version__, "fit_s": fit_s}
    return {**facts, "memory_share": options.memory_share, "found": found, **json.loads(done.stdout.splitlines()[-1])}


def write_data(folder: Path, num_lines: int) -> None:
    """Durations are spread evenly over their logarithm: as much choice for short buckets as for long ones."""
    random = np.random.default_rng(0)
    lines = []
    for number, duration_s in enumerate(np.geomspace(2.0, LONGEST_S, NUM_FILES)):
        num_samples = int(16_000 * duration_s)
        samples = (2000 * random.standard_normal(num_samples)).astype(np.int16)
        soundfile.write(folder / f"{number}.wav", samples, 16_000)
        lines.append(json.dumps({"audio_filepath": f"{number}.wav", "duration": num_samples / 16_000}))
    chosen = random.integers(NUM_FILES, size=num_lines)
    (folder / "train.jsonl").write_text("".join(f"{lines[number]}\n" for number in chosen))
    (folder / "valid.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "noise.jsonl").write_text("".join(f"{line}\n" for line in lines[:8]))


def train(overrides: list[str]) -> dict[str, Any]:
    """Train in this process, to be able to ask torch for the memory."""
    cfg = compose(overrides=overrides)
    assert cfg.exp_manager is not None
    folder = RunFolder(Path(str(cfg.exp_manager.explicit_log_dir)))
    started = time.perf_counter()
    with current_run(Run(ALONE, cfg, folder=folder)):
        seed_everything(cfg.seed, Use.WEIGHTS)
        pretrain(cfg)
    rows = read_rows(folder.metrics_csv)
    total = torch.cuda.get_device_properties(0).total_memory
    return {
        "device": torch.cuda.get_device_name(0),
        "peak_share": round(torch.cuda.max_memory_reserved(0) / total, 4),
        "free_share_at_the_end": round(torch.cuda.mem_get_info(0)[0] / total, 4),
        "steps": cfg.trainer.max_steps,
        "training_s": round(time.perf_counter() - started, 1),
        "val_loss": [round(float(row["val_loss"]), 4) for row in rows if row.get("val_loss")],
    }


if __name__ == "__main__":
    main()
