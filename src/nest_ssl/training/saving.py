"""Checkpoints: the latest, the best, and `.nemo` files. Each is whole or not there."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nest_ssl.config import CheckpointConfig
from nest_ssl.config.checks import duration_s
from nest_ssl.files import give_second_name, put_in_place, remove, replacing
from nest_ssl.nemo_file import nemo_config, read_sharded, write_nemo
from nest_ssl.run_folder import RunFolder, is_checkpoint
from nest_ssl.training.parallel import World
from nest_ssl.training.sharding import gathered, is_shard, part, write_shards
from nest_ssl.training.state import Trained, TrainState, averaged_weights, checkpoint_of
from nest_ssl.training.watching import Watch
from nest_ssl.watchdog.rank import Stage

log = logging.getLogger(__name__)

SAVE_EVERY_S = 15 * 60.0
"""The most training that a run loses when it is killed, where `train_time_interval` does not say otherwise."""


class Saver:
    """Writes the checkpoints of a run. All ranks call it at the same moments.

    Rank 0 writes a file; of sharded weights every rank writes its own part, and the checkpoint is a folder.
    """

    def __init__(self, folder: RunFolder, params: CheckpointConfig, name: str, world: World, watch: Watch) -> None:
        self.folder, self.params, self.world, self.watch = folder, params, world, watch
        self.template = params.filename or f"{params.prefix or name}--{{{params.monitor}:.4f}}-{{epoch}}-{{step}}"
        self.best: dict[str, float] = {}
        self.keeps_last = bool(params.save_last or params.every_n_train_steps or params.train_time_interval)
        interval = params.train_time_interval
        where = "exp_manager.checkpoint_callback_params.train_time_interval"
        self.every_s = SAVE_EVERY_S if interval is None else duration_s(where, interval)
        self._saved_at_s = time.monotonic()
        self._saved: tuple[int, int, bool] | None = None
        """Where the latest checkpoint was written: step, epoch, and whether a validation was due."""
        self._best_written: tuple[int, Path] | None = None
        self._nemo_step: int | None = None

    def start(self, state: TrainState) -> None:
        """Training starts, or resumes, at `state`; the best checkpoints that are still there count on."""
        self._saved_at_s, self._saved = time.monotonic(), _place(state)
        for path, score in state.memory.best.items():
            here = self.folder.checkpoints / Path(path).name  # the folder may have been moved
            if is_checkpoint(here) or not self.world.is_first:
                self.best[str(here)] = score

    # ---- when ----

    def is_due_by_steps(self, step: int) -> bool:
        every = self.params.every_n_train_steps
        return self.keeps_last and bool(every) and step % (every or 1) == 0

    def is_due_by_clock(self) -> bool:
        return self.keeps_last and time.monotonic() - self._saved_at_s >= self.every_s

    # ---- the latest ----

    def save_last(self, state: TrainState, trained: Trained) -> None:
        """Write `last.ckpt`, unless it has been written at this very place; whole, whatever `save_weights_only` says.

        Where one of the best was written at this step, `last.ckpt` becomes another name of that file: large ones are
        written once.
        """
        if self._saved == _place(state):
            return
        self._saved_at_s, self._saved = time.monotonic(), _place(state)
        self.watch.enter(Stage.CHECKPOINT)
        if not self._name_best_as_last(state):
            self._write(self.folder.last_checkpoint, checkpoint_of(state, trained), state, trained)
        self.watch.enter(Stage.DATA)

    def _name_best_as_last(self, state: TrainState) -> bool:
        if self._best_written is None or self._best_written[0] != state.step or self.params.save_weights_only:
            return False
        named = self.world.is_first and give_second_name(self._best_written[1], self.folder.last_checkpoint)
        return self.world.decision_of_first(named)

    # ---- the best ----

    def save_best(self, state: TrainState, trained: Trained, metrics: Mapping[str, float]) -> None:
        """Write a checkpoint named by its metrics if it is one of the best, and delete the one it replaces."""
        params = self.params
        score = metrics.get(params.monitor)
        if score is None or params.save_top_k == 0 or (state.epoch + 1) % (params.every_n_epochs or 1):
            return
        worst = math.inf if params.mode == "min" else -math.inf
        score = worst if math.isnan(score) else score
        path = self.folder.checkpoints / self._file_name(state, {**metrics, params.monitor: score})
        if not self.world.decision_of_first(self._is_one_of_the_best(score)):
            return
        self.watch.enter(Stage.CHECKPOINT)
        self.best[str(path)] = score
        dropped = self._drop_worst()
        state.memory.best = dict(self.best)
        self._write(path, checkpoint_of(state, trained, weights_only=params.save_weights_only), state, trained)
        self._best_written = (state.step, path)
        if dropped is not None and dropped != path and self.world.is_first:
            remove(dropped)
        if params.verbose:
            log.info("step %d: %s %.4f is one of the best; saved %s", state.step, params.monitor, score, path.name)
        self.watch.enter(Stage.DATA)

    def _is_one_of_the_best(self, score: float) -> bool:
        if self.params.save_top_k < 0 or len(self.best) < self.params.save_top_k:
            return True
        better = min if self.params.mode == "min" else max
        return any(better(score, other) == score != other for other in self.best.values())

    def _drop_worst(self) -> Path | None:
        if self.params.save_top_k < 0 or len(self.best) <= self.params.save_top_k:
            return None
        worst = max if self.params.mode == "min" else min
        path = worst(self.best, key=lambda path: self.best[path])
        del self.best[path]
        return Path(path)

    def _file_name(self, state: TrainState, metrics: Mapping[str, float]) -> str:
        """Lightning's templates: `{epoch}-{val_loss:.2f}` gives `epoch=3-val_loss=4.21.ckpt`."""
        values: dict[str, float | int] = {"epoch": state.epoch, "step": state.step, **metrics}

        def shown(match: re.Match[str]) -> str:
            return f"{match[1]}={values.get(match[1], 0):{(match[2] or ':')[1:]}}"

        return re.sub(r"\{([^{}:]+)(:[^{}]*)?\}", shown, self.template) + ".ckpt"

    # ---- .nemo ----

    def save_nemo_at_end(self, trained: Trained) -> None:
        """Write the model as `.nemo`: the last weights, or those of the best checkpoint. Every rank takes part."""
        if not self.params.save_nemo_on_train_end:
            return
        weights = trained.model.state_dict() if trained.average is None else averaged_weights(trained)
        weights = gathered(weights, self.world)
        if self.params.save_best_model and self.best and self.world.is_first:
            best = min if self.params.mode == "min" else max
            path = Path(best(self.best, key=lambda path: self.best[path]))
            log.info("the best checkpoint becomes the .nemo file: %s", path)
            sharded = path.is_dir()
            content = read_sharded(path, only="state_dict.") if sharded else torch.load(path, "cpu", weights_only=True)
            weights = content["state_dict"]
        self._write_nemo(trained, weights)

    def _write_nemo(self, trained: Trained, weights: Mapping[str, Tensor]) -> None:
        if not self.world.is_first:
            return
        path = self.folder.nemo_file(self.params)
        check_finite_weights(dict(weights), str(path))
        try:
            write_nemo(path, nemo_config(trained.model.cfg, type(trained.model).__name__), weights)
        except (OSError, RuntimeError) as error:
            raise OSError(f"{path}: could not be written: {_why(error, path.parent)}") from error

    # ---- writing ----

    def _write(self, path: Path, checkpoint: dict[str, Any], state: TrainState, trained: Trained) -> None:
        weights = checkpoint["state_dict"]
        sharded = any(map(is_shard, weights.values()))
        if not sharded and not self.world.is_first:
            return
        check_finite_weights(weights, str(path), self.world if sharded else None)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if sharded:
                write_shards(path, checkpoint, self.world)
            else:
                _write_file(path, checkpoint)
        except (OSError, RuntimeError) as error:  # torch's zip writer says RuntimeError when a write fails
            raise OSError(f"{path}: the checkpoint could not be written: {_why(error, path.parent)}") from error
        if self.params.always_save_nemo and self._nemo_step != state.step:
            self._nemo_step = state.step
            self._write_nemo(trained, gathered(weights, self.world))


def _write_file(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint, which may take the place of a folder of shards."""
    target = path.with_name(f".{path.name}.tmp") if path.is_dir() else path
    with replacing(target) as file:
        torch.save(checkpoint, file)
    if target != path:
        put_in_place(target, path)


def check_finite_weights(weights: Mapping[str, Tensor], where: str, world: World | None = None) -> None:
    """Weights that are not finite must not replace good ones; with a `world`, their parts on all its ranks."""
    names = [name for name, value in weights.items() if value.is_floating_point()]
    if not names:
        return
    infinite = torch.stack([~part(weights[name]).isfinite().all() for name in names]).long()
    if world is not None:
        infinite = world.sum(infinite)
    bad = [name for name, count in zip(names, infinite.tolist(), strict=True) if count]
    if bad:
        raise RuntimeError(
            f"{where}: not written, since {len(bad)} of {len(weights)} tensors are not finite ({bad[0]}, …); training "
            f"has diverged. Earlier checkpoints are intact. Lower model.optim.lr or set trainer.gradient_clip_val."
        )


def _place(state: TrainState) -> tuple[int, int, bool]:
    return state.step, state.epoch, state.validation_is_due


def _why(error: Exception, folder: Path) -> str:
    free_mb = shutil.disk_usage(folder).free / 1e6
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    elif free_mb < 1:  # torch's zip writer notices a full disk by its position in the file alone
        reason = os.strerror(errno.ENOSPC)
    else:
        reason = str(error).splitlines()[0]
    return f"{reason}; {free_mb:.0f} MB are free. Earlier checkpoints are intact; the same command resumes from them."
