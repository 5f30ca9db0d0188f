"""The runs that the first edition recorded: their data, their options, and a plain summary of its checkpoints.

Nothing here imports nest_ssl: the recorder runs the first edition, the tests run the current program.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import torch
from torch import Tensor

RECORDED = Path(__file__).with_name("recorded")
LAST = "last.ckpt"
SAMPLE_RATE = 16_000

ENVIRONMENT = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
"""One thread, and instructions that every processor has: the settings of tests/conftest.py."""

TINY = (
    "model.encoder.d_model=16",
    "model.encoder.n_layers=2",
    "model.encoder.n_heads=2",
    "model.encoder.subsampling_conv_channels=8",
    "model.encoder.dropout=0.0",
    "model.encoder.dropout_pre_encoder=0.0",
    "model.encoder.dropout_emb=0.0",
    "model.encoder.dropout_att=0.0",
    "model.preprocessor.dither=0.0",
    "model.num_classes=32",
    "model.masking.mask_prob=0.05",
    "model.train_ds.batch_size=4",
    "model.validation_ds.batch_size=4",
    "model.optim.lr=0.5",
    "model.optim.sched.warmup_steps=40",
    "trainer.accelerator=cpu",
    "trainer.sync_batchnorm=false",  # the first edition ignored it on CPU ranks
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "exp_manager.create_tensorboard_logger=false",
    "exp_manager.resume_if_exists=true",
)
_CHECKPOINTS = "exp_manager.checkpoint_callback_params"
_EARLY_STOPPING = "exp_manager.early_stopping_callback_params"


@dataclass(frozen=True)
class Case:
    """One run: trained to `saved_at`, then resumed and trained to `ends_at`. An epoch has 6 steps in all of them."""

    saved_at: int
    ends_at: int
    options: tuple[str, ...]
    stops_early: bool = False
    """`ends_at` is where its patience ends; `max_steps` is larger."""

    @property
    def max_steps(self) -> int:
        return 10 * self.ends_at if self.stops_early else self.ends_at


CASES = {
    # Saved after the validation of the second epoch. A min_delta of 100 makes every validation but the first a
    # disappointment: one was counted when it was saved, and the third ends the run, two epochs later.
    "plain": Case(
        saved_at=12,
        ends_at=24,
        options=(
            f"{_CHECKPOINTS}.save_top_k=2",
            "exp_manager.create_early_stopping_callback=true",
            f"{_EARLY_STOPPING}.min_delta=100.0",
            f"{_EARLY_STOPPING}.patience=3",
        ),
        stops_early=True,
    ),
    # Saved in the middle of an epoch, one step after an update of the average.
    "ema": Case(
        saved_at=9,
        ends_at=21,
        options=(
            "exp_manager.ema.enable=true",
            "exp_manager.ema.decay=0.9",
            "exp_manager.ema.every_n_steps=2",
        ),
    ),
    "mid_epoch": Case(saved_at=8, ends_at=20, options=(f"{_CHECKPOINTS}.every_n_train_steps=4",)),
    "two_ranks": Case(
        saved_at=8,
        ends_at=20,
        options=(
            "trainer.devices=2",
            "trainer.strategy=ddp",
            "model.train_ds.batch_size=2",
            f"{_CHECKPOINTS}.every_n_train_steps=4",
        ),
    ),
}


# ---- data ----


def make_corpus(folder: Path) -> str:
    """Write train.jsonl (24 utterances of 1 to 1.5 s), valid.jsonl (8) and noise.jsonl (2); return their SHA-256.

    Samples are made with integers alone and stored as such, so every machine writes the same ones. Paths in the
    manifests are relative: neither they nor the hash of the batch plan depend on `folder`.
    """
    random = np.random.RandomState(0)
    (folder / "audio").mkdir(parents=True)
    digest, lines = hashlib.sha256(), []
    for number in range(34):
        samples = _utterance(random)
        soundfile.write(folder / "audio" / f"{number}.wav", samples, SAMPLE_RATE)
        digest.update(samples.astype("<i2").tobytes())
        line = {"audio_filepath": f"audio/{number}.wav", "duration": len(samples) / SAMPLE_RATE}
        lines.append(json.dumps(line) + "\n")
    for name, part in (("train", lines[:24]), ("valid", lines[24:32]), ("noise", lines[32:])):
        (folder / f"{name}.jsonl").write_text("".join(part))
        digest.update("".join(part).encode())
    return digest.hexdigest()


def _utterance(random: np.random.RandomState) -> npt.NDArray[np.int16]:
    """Four to six syllables, each a gliding triangle wave and its third harmonic; noise over all of them."""
    parts = [_syllable(random) for _ in range(random.randint(4, 7))]
    samples = np.concatenate(parts)
    num_samples = random.randint(SAMPLE_RATE, SAMPLE_RATE * 3 // 2)
    samples = np.resize(samples, num_samples) + random.randint(-200, 201, num_samples)
    return samples.astype(np.int16)


def _syllable(random: np.random.RandomState) -> npt.NDArray[np.int64]:
    num_samples = int(random.randint(2_000, 6_000))
    first, last = (int(hz) * 65_536 // SAMPLE_RATE for hz in random.randint(90, 400, 2))
    place = np.arange(num_samples)
    phase = np.cumsum(first + (last - first) * place // num_samples)
    swell = np.minimum(place, num_samples - place) * 256 // num_samples  # 0, up to 128, and back
    weight = int(random.randint(1, 8))
    wave: npt.NDArray[np.int64] = (_triangle(phase) * 8 + _triangle(3 * phase) * weight) * swell // 4_096
    return wave


def _triangle(phase: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """-16384 to 16384; a period is 65536."""
    wave: npt.NDArray[np.int64] = np.abs((phase & 0xFFFF) - 32_768) - 16_384
    return wave


# ---- running ----


def run(name: str, max_steps: int, *, corpus: Path, exp_dir: Path, source: Path | None = None) -> None:
    """Train the case to `max_steps`, or resume it, with this interpreter's nest_ssl or with the one in `source`."""
    options = [
        *TINY,
        *CASES[name].options,
        f"model.train_ds.manifest_filepath={corpus / 'train.jsonl'}",
        f"model.train_ds.noise_manifest={corpus / 'noise.jsonl'}",
        f"model.validation_ds.manifest_filepath={corpus / 'valid.jsonl'}",
        f"trainer.max_steps={max_steps}",
        f"exp_manager.exp_dir={exp_dir}",
        f"exp_manager.name={name}",
    ]
    environment = {**os.environ, **ENVIRONMENT, **({"PYTHONPATH": str(source)} if source else {})}
    command = [sys.executable, "-m", "nest_ssl", "pretrain", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def curve(metrics_csv: Path, column: str) -> dict[int, float]:
    """Values of a column by step."""
    with metrics_csv.open(newline="") as file:
        return {int(row["step"]): float(row[column]) for row in csv.DictReader(file) if row.get(column)}


def restore(name: str, exp_dir: Path) -> Path:
    """Copy the recorded run of a case to `exp_dir`, as if it had been trained there; return its folder.

    The list of the best checkpoints holds absolute paths, which are changed to those of the copy. Of the files in it,
    only the older one of `plain` was kept; in place of the others stands the last checkpoint.
    """
    folder = exp_dir / name
    shutil.copytree(RECORDED / name, folder)
    last = folder / "checkpoints" / LAST
    checkpoint = load(last)
    state = _callback_state(checkpoint, "ModelCheckpoint")
    assert state is not None
    before, after = state["dirpath"], os.path.realpath(folder / "checkpoints")
    moved = {key: value.replace(before, after) if isinstance(value, str) else value for key, value in state.items()}
    moved["best_k_models"] = {path.replace(before, after): score for path, score in state["best_k_models"].items()}
    state.update(moved)
    torch.save(checkpoint, last)
    for path in moved["best_k_models"]:
        if not os.path.exists(path):
            shutil.copy(last, path)
    return folder


def best_steps(folder: Path) -> list[int]:
    """Steps of the best checkpoints in a run folder, by the names of the files."""
    return sorted(int(path.stem.rpartition("step=")[2]) for path in (folder / "checkpoints").glob("*step=*.ckpt"))


# ---- what a checkpoint of the first edition holds ----


def load(path: Path) -> dict[str, Any]:
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    assert isinstance(checkpoint, dict)
    return checkpoint


def describe(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The content in plain terms, as record.json has it; README.md says where each value stands in the checkpoint."""
    best = _callback_state(checkpoint, "ModelCheckpoint") or {}
    stopping = _callback_state(checkpoint, "StopEarly")
    average = _callback_state(checkpoint, "ExponentialAverage")
    means = checkpoint["epoch_means"]
    optimizer = checkpoint["optimizer_states"][0]
    return {
        "global_step": checkpoint["global_step"],
        "epoch": checkpoint["epoch"],
        "data_position": checkpoint["data_position"],
        "learning_rate": optimizer["param_groups"][0]["lr"],
        "schedule": checkpoint["lr_schedulers"][0],
        "epoch_means": {**means, "sums": {name: float(total) for name, total in means["sums"].items()}},
        "top_k": {Path(path).name: float(score) for path, score in best["best_k_models"].items()},
        "best": Path(best["best_model_path"]).name,
        "worst_of_top_k": Path(best["kth_best_model_path"]).name,
        "early_stopping": stopping and {**stopping, "best_score": float(stopping["best_score"])},
        "ema": average and {**average, "n_averaged": int(checkpoint["averaging_state"]["n_averaged"])},
        "sha256": {
            "weights_of_training": group_digests(training_weights(checkpoint)),
            "weights_saved": group_digests(checkpoint["state_dict"]),
            **{key: group_digests(moments(checkpoint, key)) for key in ("exp_avg", "exp_avg_sq", "step")},
        },
    }


def training_weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights that training continues with, by NeMo's names; `state_dict` holds the average where there is one."""
    current = checkpoint.get("current_model_state")
    if current is None:
        return dict(checkpoint["state_dict"])
    return {name.removeprefix("model."): value for name, value in current.items()}


def moments(checkpoint: Mapping[str, Any], key: str) -> dict[str, Tensor]:
    """AdamW's `exp_avg`, `exp_avg_sq` or `step` by the name of the parameter; the optimizer numbers them in order."""
    trained = [name for name in checkpoint["state_dict"] if _is_trained(name)]
    states = checkpoint["optimizer_states"][0]["state"]
    assert sorted(states) == list(range(len(trained)))
    return {name: states[number][key] for number, name in enumerate(trained)}


def _is_trained(name: str) -> bool:
    frozen = ("preprocessor.", "quantizer.", "mask_processor.")
    return not name.startswith(frozen) and not name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def group_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """SHA-256 of the tensors of each part of the model: of their names, types, shapes and bytes, sorted by name."""
    digests: dict[str, Any] = {}
    for name in sorted(tensors):
        array = tensors[name].detach().cpu().contiguous().numpy()
        digest = digests.setdefault(_group(name), hashlib.sha256())
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return {group: digest.hexdigest() for group, digest in digests.items()}


def _group(name: str) -> str:
    depth = 3 if name.startswith("encoder.layers.") else 2 if name.startswith("encoder.") else 1
    return ".".join(name.split(".")[:depth])


def _callback_state(checkpoint: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """The state of a callback; its key is the class, followed by what tells several of a kind apart."""
    states = [state for key, state in checkpoint["callbacks"].items() if key.partition("{")[0] == kind]
    return states[0] if states else None
