"""What the folder of a run holds; each part may be missing, and then a note says why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nest_ssl.config import DatasetConfig, NestConfig, parse
from nest_ssl.config.parse import MISSING
from nest_ssl.config.unused import unused_keys
from nest_ssl.report.metrics import RunMetrics, read_metrics

METRICS, HPARAMS, COMMIT, CHECKPOINTS = "metrics.csv", "hparams.yaml", "git-commit.txt", "checkpoints"
MAX_SUGGESTED = 3


@dataclass(frozen=True)
class Run:
    """A run as far as its folder tells."""

    path: Path
    metrics: RunMetrics
    config: NestConfig | None
    config_text: str
    commit: str
    checkpoint: Path | None
    """The newest one, `.nemo` or `.ckpt`."""
    notes: list[str]
    """What is missing or cannot be read."""

    @property
    def name(self) -> str:
        if self.config is None:
            return self.path.name
        exp = self.config.exp_manager
        return (exp.name if exp is not None else None) or self.config.name

    @property
    def max_steps(self) -> int | None:
        return self.config.trainer.max_steps if self.config is not None and self.config.trainer.max_steps > 0 else None

    @property
    def num_ranks(self) -> int | None:
        """Of the whole run; None where it depends on the machine (`devices: auto`)."""
        if self.config is None:
            return None
        trainer = self.config.trainer
        devices: Any = trainer.devices
        if isinstance(devices, str):
            devices = devices.split(",") if "," in devices else int(devices) if devices.isdecimal() else -1
        if isinstance(devices, list):
            devices = len(devices)
        return devices * trainer.num_nodes if devices > 0 else None

    def dataset(self) -> tuple[str, DatasetConfig]:
        """What the run was validated on, else what it was trained on, and which of the two it is."""
        sections = () if self.config is None else (self.config.model.validation_ds, self.config.model.train_ds)
        for name, section in zip(("validation", "training"), sections, strict=False):
            lhotse = section is not None and (section.cuts_path or section.shar_path or section.input_cfg)
            if section is not None and (lhotse or section.manifest_filepath not in (None, MISSING)):
                return name, section
        raise ValueError(f"{HPARAMS} names no data.")


def open_run(folder: Path) -> Run:
    """Read the folder of a run; ValueError if it is none."""
    if not folder.is_dir():
        what = "not a folder" if folder.exists() else "no such folder"
        raise ValueError(f"{folder}: {what}. Give the folder that 'nest-ssl pretrain' named at its start.")
    if not (folder / METRICS).is_file() and not (folder / HPARAMS).is_file():
        raise ValueError(
            f"{folder}: holds neither {METRICS} nor {HPARAMS}, so it is not the folder of a run.{_suggestion(folder)}"
        )
    notes: list[str] = []
    metrics = RunMetrics({}, {}, [f"{METRICS}: no such file, so nothing was logged yet."])
    if (folder / METRICS).is_file():
        metrics = read_metrics(folder / METRICS)
    config, config_text = _read_config(folder / HPARAMS, notes)
    commit = folder / COMMIT
    return Run(
        path=folder,
        metrics=metrics,
        config=config,
        config_text=config_text,
        commit=commit.read_text(encoding="utf-8", errors="replace").strip() if commit.is_file() else "",
        checkpoint=newest_checkpoint(_checkpoints(folder, config)),
        notes=[*metrics.notes, *notes],
    )


def _checkpoints(folder: Path, config: NestConfig | None) -> Path:
    exp = None if config is None else config.exp_manager
    dirpath = None if exp is None else exp.checkpoint_callback_params.dirpath
    return folder / CHECKPOINTS if dirpath is None else Path(dirpath).expanduser()


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint written last; of equally old ones the `.nemo`, which is smaller."""
    found = [path for path in folder.glob("*") if path.suffix in (".nemo", ".ckpt") and path.is_file()]
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.suffix == ".nemo", path.name), default=None)


def _read_config(path: Path, notes: list[str]) -> tuple[NestConfig | None, str]:
    if not path.is_file():
        notes.append(f"{HPARAMS}: no such file, so the configuration is not known.")
        return None, ""
    content = path.read_text(encoding="utf-8", errors="replace")
    try:
        return parse(NestConfig, yaml.safe_load(content), unused=unused_keys()), content
    except (yaml.YAMLError, ValueError) as error:
        notes.append(f"{HPARAMS}: cannot be used: {' '.join(str(error).split())}")
        return None, content


def _suggestion(folder: Path) -> str:
    """Runs below `folder`, newest first: a run has a folder of its own in that of its experiment."""
    inside = sorted({path.parent for path in folder.glob(f"*/{METRICS}")}, key=lambda run: run.stat().st_mtime)
    names = ", ".join(str(run) for run in inside[::-1][:MAX_SUGGESTED])
    return f" Runs in it: {names}." if names else " A run keeps them in nest_experiments/NAME."
