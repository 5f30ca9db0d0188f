"""Short runs of the real program on a tiny model and corpus."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import soundfile

from nest_ssl.config import compose
from nest_ssl.data.randomness import Use, seed_everything
from nest_ssl.launch.ranks import ALONE
from nest_ssl.training import experiment
from nest_ssl.training.run import pretrain
from nest_ssl.training.trainer import Run, current_run

PROGRAM = [sys.executable, "-m", "nest_ssl", "pretrain"]

TINY = [
    "model.encoder.d_model=32",
    "model.encoder.n_layers=2",
    "model.encoder.n_heads=4",
    "model.encoder.subsampling_conv_channels=8",
    "model.num_classes=64",
    "model.masking.mask_prob=0.05",
    "model.train_ds.batch_size=4",
    "model.validation_ds.batch_size=4",
    "model.optim.sched.warmup_steps=20",
    "trainer.accelerator=cpu",
    "trainer.sync_batchnorm=false",
    "trainer.log_every_n_steps=1",
    "trainer.max_steps=10",
    "exp_manager.create_tensorboard_logger=false",
    "exp_manager.checkpoint_callback_params.every_n_train_steps=3",
]


def make_corpus(folder: Path, num_train: int = 24, num_val: int = 8) -> None:
    """Write noisy sweeps of 1 to 1.5 s, with train.jsonl, valid.jsonl and noise.jsonl."""
    random = np.random.RandomState(0)
    (folder / "audio").mkdir(parents=True)
    lines: list[dict[str, object]] = []
    for number in range(num_train + num_val + 2):
        num_samples = int(16_000 * (1 + 0.5 * random.rand()))
        seconds = np.arange(num_samples) / 16_000
        tone = np.sin(2 * np.pi * random.uniform(120, 300) * seconds * (1 + 0.3 * seconds))
        samples = 0.1 * tone + 0.02 * random.randn(num_samples)
        soundfile.write(folder / "audio" / f"{number}.wav", samples.astype(np.float32), 16_000)
        lines.append({"audio_filepath": f"audio/{number}.wav", "duration": num_samples / 16_000})
    parts = {"train": lines[:num_train], "valid": lines[num_train:-2], "noise": lines[-2:]}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part))


def arguments(corpus: Path, exp_dir: Path, name: str, *more: str) -> list[str]:
    return [
        *TINY,
        f"model.train_ds.manifest_filepath={corpus / 'train.jsonl'}",
        f"model.train_ds.noise_manifest={corpus / 'noise.jsonl'}",
        f"model.validation_ds.manifest_filepath={corpus / 'valid.jsonl'}",
        f"exp_manager.exp_dir={exp_dir}",
        f"exp_manager.name={name}",
        *more,
    ]


def run(args: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *args], capture_output=True, text=True, check=False, timeout=300)


def run_and_kill(args: list[str], metrics_csv: Path, at_step: int) -> None:
    """Start a run and kill it, with all its processes, once it has logged `at_step`."""
    process = subprocess.Popen(
        [*PROGRAM, *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    deadline = time.monotonic() + 240
    while at_step not in losses(metrics_csv):
        assert process.poll() is None, process.stderr and process.stderr.read().decode()[-2000:]
        assert time.monotonic() < deadline, f"step {at_step} was not reached"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def losses(metrics_csv: Path, column: str = "train_loss") -> dict[int, str]:
    """Return a column's values by step as text: equal text means bit-identical values."""
    if not metrics_csv.is_file():
        return {}
    with metrics_csv.open(newline="") as file:
        return {int(row["step"]): row[column] for row in csv.DictReader(file) if row.get(column)}


def run_here(args: list[str]) -> Path:
    """Run within this process, which saves the imports; return the run folder."""
    cfg = compose("nest_fast-conformer", args)
    assert cfg.exp_manager is not None
    folder = experiment.run_folder(cfg.exp_manager, cfg.name)
    with current_run(Run(ALONE, cfg, folder=folder)):
        seed_everything(cfg.seed, Use.WEIGHTS)
        pretrain(cfg)
    return folder.path
