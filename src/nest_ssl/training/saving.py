"""Checkpoints: the latest, the best, and `.nemo` files. Each is whole or not there.

A step waits only for the copy of the tensors to the host's memory (`HostCopy`). A thread of rank 0 writes, syncs and
renames the file. At most one is being written: the next one waits for it. Sharded checkpoints are written by all ranks
together, and the step waits for them.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nest_ssl.config import CheckpointConfig
from nest_ssl.config.checks import duration_s
from nest_ssl.config.training import FIELD
from nest_ssl.files import give_second_name, predecessor, put_in_place, remove, replace_text, replacing
from nest_ssl.nemo_file import nemo_config, read_sharded, write_nemo
from nest_ssl.run_folder import BEFORE, LAST, RunFolder, is_checkpoint
from nest_ssl.training.parallel import World
from nest_ssl.training.sharding import gathered, is_shard, optimized, part, write_shards
from nest_ssl.training.state import Trained, TrainState, averaged_weights, checkpoint_of
from nest_ssl.training.watching import Stopped, Watch
from nest_ssl.watchdog.rank import Stage

log = logging.getLogger(__name__)

SAVE_EVERY_S = 15 * 60.0
"""The most training that a run loses when it is killed, where `train_time_interval` does not say otherwise."""
RETRY_AFTER_S = 60.0
"""From a checkpoint that could not be written to the next attempt, if none is due before."""
MOST_FAILURES = 3
"""In a row; then the run ends. A file system that fails over takes a minute or two."""


@dataclass
class Write:
    """A checkpoint that is being written."""

    content: dict[str, Any]
    act: Callable[[], None]
    undo: Callable[[], None]
    """Forget it, if it could not be written."""
    future: Future[None] | None = None
    is_done: bool = False

    def run(self) -> None:
        self.act()
        self.is_done = True

    def error(self) -> BaseException | None:
        assert self.future is not None
        return self.future.exception()


class Saver:
    """Writes the checkpoints of a run. All ranks call it at the same moments.

    Rank 0 writes a file; of sharded weights every rank writes its own part, and the checkpoint is a folder. One that
    cannot be written is a warning, and is tried again; after `MOST_FAILURES` in a row, or at the end, it is an error.
    """

    def __init__(self, folder: RunFolder, params: CheckpointConfig, name: str, world: World, watch: Watch) -> None:
        self.folder, self.params, self.world, self.watch = folder, params, world, watch
        default = f"{params.prefix or Path(name).name}--{{{params.monitor}:.4f}}-{{epoch}}-{{step}}"
        self.template = params.filename or default
        has_step = "step" in dict(FIELD.findall(self.template))
        if not has_step and (params.save_top_k != 1 or f"{self.template}.ckpt" in (LAST, BEFORE)):
            self.template += "-{step}"  # of two with one name, the later would replace the better
        self.best: dict[str, float] = {}
        self.keeps_last = bool(params.save_last or params.every_n_train_steps or params.train_time_interval)
        interval = params.train_time_interval
        where = "exp_manager.checkpoint_callback_params.train_time_interval"
        self.every_s = SAVE_EVERY_S if interval is None else duration_s(where, interval)
        self._saved_at_s = time.monotonic()
        self._saved: tuple[int, int, bool] | None = None
        """Where the latest checkpoint was written: step, epoch, and whether a validation was due."""
        self._best_written: tuple[int, Path] | None = None
        self._is_sharded = False
        self._nemo_step: int | None = None
        self._host = HostCopy()
        self._thread: ThreadPoolExecutor | None = None
        self._writing: list[Write] = []
        self._failures = 0
        self.last_is_good = False
        """Whether `last.ckpt` is known to be undamaged: only then does it become the predecessor of the next."""
        self._unsaved: OSError | None = None
        """Why the latest checkpoint could not be written."""

    def reserve(self, trained: Trained) -> None:
        """Get the host memory for copies from a GPU before training: pinning it takes a second for every few GB."""
        weights = trained.model.state_dict()
        if not self.world.is_first or self.world.device.type != "cuda" or any(map(is_shard, weights.values())):
            return
        parameters = optimized(trained.step.optimizer)
        tensors = [*weights.values(), *parameters, *parameters]  # most optimizers keep two moments
        if trained.average is not None:
            tensors += trained.average.weights.values()
        self._host.reserve(int(1.05 * sum(tensor.nbytes for tensor in tensors)))

    def start(self, state: TrainState) -> None:
        """Training starts, or resumes, at `state`; the best checkpoints that are still there count on."""
        self._saved_at_s, self._saved = time.monotonic(), _place(state)
        for path, score in state.memory.best.items():
            here = self.folder.checkpoints / Path(path).name  # the folder may have been moved
            if here.name not in (LAST, BEFORE) and (is_checkpoint(here) or not self.world.is_first):
                self.best[str(here)] = score

    # ---- when ----

    def is_due_by_steps(self, step: int) -> bool:
        every = self.params.every_n_train_steps
        return self.keeps_last and bool(every) and step % (every or 1) == 0

    def is_due_by_clock(self) -> bool:
        if self._writing and all(write.future is None or write.future.done() for write in self._writing):
            self.wait()
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
        best, last, step = self._best_written[1], self.folder.last_checkpoint, state.step
        if self._is_sharded:
            done = self.world.is_first and _second_name(best, last, keeps_before=self.last_is_good)
            done = self.world.decision_of_first(done)
            self.last_is_good |= done
            return done
        if not self.world.is_first:
            return True
        if not self._writing:
            return _second_name(best, last, keeps_before=self.last_is_good)
        written = self._writing[-1]

        def act() -> None:
            with _said_of(last):
                if not written.is_done:
                    raise OSError(f"{best.name} was not written")
                if not _second_name(best, last, keeps_before=self.last_is_good):
                    _write_file(last, written.content, keeps_before=self.last_is_good)
                self._note_saved(last, step)

        self._begin(Write(written.content, act, lambda: None))
        return True

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
        kept = dict(self.best)
        self.best[str(path)] = score
        dropped = self._drop_worst()
        state.memory.best = dict(self.best)

        def forget() -> None:
            self.best, self._best_written = kept, None

        def drop() -> None:
            if dropped is not None and dropped != path and self.world.is_first:
                remove(dropped)

        self._best_written = (state.step, path)
        content = checkpoint_of(state, trained, weights_only=params.save_weights_only)
        self._write(path, content, state, trained, then=drop, undo=forget)
        if params.verbose:
            log.info("step %d: %s %.4f is one of the best; saving %s", state.step, params.monitor, score, path.name)
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

        return FIELD.sub(shown, self.template) + ".ckpt"

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
        with _said_of(path):
            write_nemo(path, nemo_config(trained.model.cfg, type(trained.model).__name__), weights)

    # ---- writing ----

    def _write(
        self,
        path: Path,
        checkpoint: dict[str, Any],
        state: TrainState,
        trained: Trained,
        then: Callable[[], None] = lambda: None,
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a checkpoint, in the background unless it is sharded; `then` do something, or `undo` if it fails."""
        weights, step = checkpoint["state_dict"], state.step
        sharded = self._is_sharded = any(map(is_shard, weights.values()))
        if not sharded and not self.world.is_first:
            return
        check_finite_weights(weights, str(path), self.world if sharded else None)
        with_nemo = self.params.always_save_nemo and self._nemo_step != step
        self._nemo_step = step if with_nemo else self._nemo_step
        if sharded:
            try:
                with _said_of(path):
                    write_shards(path, checkpoint, self.world, keeps_before=self.last_is_good)
                    self._note_saved(path, step)
            except OSError as error:
                self._note_failure(error, undo)
                return
            self._failures, self._unsaved = 0, None
            then()
            if with_nemo:
                self._write_nemo(trained, gathered(weights, self.world))
            return
        self.wait()
        content = self._host.of(checkpoint)

        def act() -> None:
            with _said_of(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                _write_file(path, content, keeps_before=path.name == LAST and self.last_is_good)
                self._note_saved(path, step)
            then()
            if with_nemo:
                self._write_nemo(trained, content["state_dict"])

        self._begin(Write(content, act, undo))

    def _begin(self, write: Write) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
        write.future = self._thread.submit(write.run)
        self._writing.append(write)

    def _note_saved(self, path: Path, step: int) -> None:
        if path.name == LAST:
            self.last_is_good = True
        if self.world.is_first:
            try:
                self.folder.path.mkdir(parents=True, exist_ok=True)
                replace_text(self.folder.saved, f"step {step}\n", sync=False)
            except OSError as error:  # the checkpoint itself is there
                log.warning("%s: could not be written: %s", self.folder.saved, error.strerror or error)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. If it fails, warn; or raise, if that is one time too many."""
        writing = self._take_writing()
        failed = [write for write in writing if write.error() is not None]
        if failed:
            error = failed[0].error()
            if not isinstance(error, OSError):
                raise RuntimeError(f"a checkpoint could not be written: {error!r}") from error
            self._note_failure(error, failed[0].undo)
        elif writing:
            self._failures, self._unsaved = 0, None

    def _take_writing(self) -> list[Write]:
        writing, self._writing = self._writing, []
        return writing

    def _note_failure(self, error: OSError, undo: Callable[[], None]) -> None:
        self._failures, self._unsaved, self._saved = self._failures + 1, error, None
        undo()
        if self._failures >= MOST_FAILURES:
            raise OSError(f"{error} It was tried {self._failures} times.") from error
        is_full = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENOSPC
        if is_full and self.last_is_good and self.world.is_first:
            remove(predecessor(self.folder.last_checkpoint))  # makes room
        self._saved_at_s = time.monotonic() - self.every_s + RETRY_AFTER_S  # rank 0's clock counts
        log.warning("%s Training continues; saving is tried again within %.0f s.", error, RETRY_AFTER_S)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; if it has failed, try it once more, and raise."""
        if self._writing:
            self.watch.enter(Stage.CHECKPOINT)
        for write in self._take_writing():
            if (error := write.error()) is not None:
                log.warning("%s It is tried once more.", error)
                write.run()
            self._unsaved = None
        if self._unsaved is not None:
            raise OSError(str(self._unsaved)) from self._unsaved

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """At the end, and when the run is stopped, the checkpoint that is being written is there, or an error says why.

        After another error it is waited for as well: a checkpoint that has been begun is not given up.
        """
        try:
            yield
        except Stopped:
            self.finish()
            raise
        except BaseException:
            for write in self._take_writing():
                if (error := write.error()) is not None:
                    log.warning("%s", error)
            raise
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=False)
        self.finish()


class HostCopy:
    """A checkpoint's tensors in the host's memory. The memory for those of a GPU is pinned, and used again.

    It comes in blocks, since torch rounds what is pinned up to a power of two: 9 GB in one piece would take 16.
    """

    BLOCK_BYTES = 2**28

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._block = self._used = 0
        """Where the next tensor goes."""

    def reserve(self, num_bytes: int) -> None:
        while sum(block.numel() for block in self._blocks) < num_bytes:
            self._add_block(self.BLOCK_BYTES)

    def of(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The same content with tensors of its own. Those of a GPU are valid until the next call."""
        self._block = self._used = 0
        copies: dict[Any, Tensor] = {}

        def copied(tensor: Tensor) -> Tensor:
            # Weights with two names stay one tensor, as torch.save would have it.
            key = (tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if key not in copies:
                if tensor.device.type == "cuda" and tensor.numel():
                    copies[key] = self._place(tensor).copy_(tensor.detach(), non_blocking=True)
                else:
                    copies[key] = tensor.detach().to("cpu", copy=True)
            return copies[key]

        content: dict[str, Any] = _with_tensors(checkpoint, copied)
        if self._used:
            torch.cuda.current_stream().synchronize()
        return content

    def _place(self, like: Tensor) -> Tensor:
        """A tensor like `like` in a block. By way of numpy its storage is its own: torch.save writes whole storages."""
        while self._block < len(self._blocks) and self._used + like.nbytes > self._blocks[self._block].numel():
            self._block, self._used = self._block + 1, 0
        if self._block == len(self._blocks):
            self._add_block(max(self.BLOCK_BYTES, like.nbytes))
        own = torch.from_numpy(self._blocks[self._block][self._used : self._used + like.nbytes].numpy())
        self._used += -(-like.nbytes // 64) * 64  # aligned as torch aligns
        return own.view(like.dtype).view(like.shape)

    def _add_block(self, num_bytes: int) -> None:
        try:
            block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # the system limits pinned memory
            log.warning("no pinned memory for checkpoints (%s): copying them is slower.", str(error).splitlines()[0])
            block = torch.empty(num_bytes, dtype=torch.uint8)
        self._blocks.append(block)


def _with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of nested containers with their tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _with_tensors(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(item, change) for item in value)
    return copy.deepcopy(value)


@contextlib.contextmanager
def _said_of(path: Path) -> Iterator[None]:
    """Whatever goes wrong while a checkpoint is written becomes one error that names it."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's zip writer says RuntimeError when a write fails
        folder = next(parent for parent in path.parents if parent.is_dir())
        raise OSError(f"{path}: the checkpoint could not be written: {_why(error, folder)}") from error


def _write_file(path: Path, checkpoint: dict[str, Any], *, keeps_before: bool) -> None:
    """Write a checkpoint, which may take the place of a folder of shards, or of something that is no checkpoint."""
    if path.exists() and not path.is_file() and not path.is_dir():
        path.unlink()  # a pipe would be written to, and wait for a reader
    target = path.with_name(f".{path.name}.tmp") if path.is_dir() else path
    with replacing(target) as file:
        torch.save(checkpoint, file)
        if keeps_before and path.is_file():
            give_second_name(path, predecessor(path))
    if target != path:
        if path.name == LAST and not keeps_before:
            remove(path)  # it is damaged, and its predecessor is not
        put_in_place(target, path, keeps_before=path.name == LAST)


def _second_name(best: Path, last: Path, *, keeps_before: bool) -> bool:
    if keeps_before and last.is_file() and not last.samefile(best):
        give_second_name(last, predecessor(last))
    if last.is_dir() and not keeps_before:
        remove(last)  # it is damaged, and its predecessor is not
    return give_second_name(best, last, keeps_before=True)


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
    elif "unexpected pos" in str(error):
        reason = "only a part of it could be written: is there a limit for files (ulimit -f), or a quota?"
    else:
        reason = str(error).splitlines()[0]
    intact = any(folder.glob("*.ckpt"))
    way_on = " Earlier checkpoints are intact; the same command resumes from them." if intact else ""
    return f"{reason}; {free_mb:.0f} MB are free.{way_on}"
