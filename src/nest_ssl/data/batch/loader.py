"""The loader: a torch DataLoader over a plan that can start at any batch and counts bad files."""

from __future__ import annotations

import errno
import json
import logging
import mmap
import multiprocessing.connection
import multiprocessing.queues
import multiprocessing.util
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, Sampler

from nest_ssl.data.batch.collate import AudioNoiseBatch, BadDataError, BadFile, keep_blocks
from nest_ssl.data.plan.batches import BatchSpec, Plan, Shape
from nest_ssl.freed_memory import give_back_freed_memory

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[2]
"""The folder of nest_ssl."""
MIN_UTTERANCES = 1000
"""Where an epoch's length is unknown (lhotse, endless), the share is of at least this many utterances."""
FEW = 10
"""So many bad utterances of an epoch never end a run, unless they are above `max_bad_fraction` of 1,000 as well."""
MAX_NAMED = 10
"""Files named in the log; the others are only in the run's list."""
IN_SUMMARY = 3
"""Reasons, and files, in a summary, which may be part of an error."""
SHARED_MEMORY = Path("/dev/shm")
TORCH_PREFETCH = 2
"""What torch's DataLoader prefetches per worker if nothing is set."""


JUDGED = {"speech": "could not be read", "no-noise": "found no noise that could be read"}
"""Kinds of bad utterances of which too many end a run, and what is said of them."""


class BatchSampler(Sampler[Any], ABC):
    """Yields the description of each batch; knows the epoch and where to start in it."""

    epoch = 0
    start = 0
    """First batch of the next iteration, which resets it to 0."""
    same_every_epoch = False
    on_skip: Callable[[], None] | None = None
    """Called about every second while batches before `start` are passed over, where that takes time (lhotse)."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; the trainer calls this at the start of every epoch, also when it resumes one."""
        if epoch != self.epoch and not self.same_every_epoch:
            self.epoch, self.start = epoch, 0

    def take_start(self) -> int:
        start, self.start = self.start, 0
        return start

    @abstractmethod
    def plan_hash(self) -> str: ...

    @abstractmethod
    def utterances_per_epoch(self) -> int | None: ...

    @abstractmethod
    def shapes(self) -> list[Shape]:
        """Return all shapes of a run that are planned; none if durations are unknown or batch sizes differ."""

    @abstractmethod
    def largest_batch(self) -> int | None:
        """Return the samples of the largest batch, with padding; None if unknown."""

    def num_sizes_without_shape(self) -> int:
        """Return the number of batch sizes for which MAX_SHAPES has no room."""
        return 0


class PlanSampler(BatchSampler):
    """One rank's batches of a plan."""

    def __init__(self, plan: Plan, rank: int, *, same_every_epoch: bool = False) -> None:
        if not 0 <= rank < plan.world_size:
            raise ValueError(f"rank {rank} is not in [0, {plan.world_size})")
        self.plan, self.rank, self.same_every_epoch = plan, rank, same_every_epoch

    def __iter__(self) -> Iterator[BatchSpec]:
        step, end = self.take_start(), self.plan.num_batches()
        while end is None or step < end:
            yield self.plan.batch(self.epoch, step, self.rank)
            step += 1

    def __len__(self) -> int:
        num_batches = self.plan.num_batches()
        if num_batches is None:
            raise TypeError("an endless plan has no length")
        return num_batches

    def plan_hash(self) -> str:
        return self.plan.hash()

    def utterances_per_epoch(self) -> int | None:
        return self.plan.utterances_per_epoch

    def shapes(self) -> list[Shape]:
        return self.plan.shapes()

    def largest_batch(self) -> int | None:
        return self.plan.largest_batch

    def num_sizes_without_shape(self) -> int:
        return 0 if self.plan.step_shapes is None else self.plan.step_shapes.num_sizes_left_out


@dataclass(frozen=True)
class Prefetch:
    """How much is prepared ahead: batches = workers x factor."""

    num_workers: int
    factor: int | None = None
    """None: torch's."""

    def bounded(self, batch_bytes: int, max_bytes: float) -> Prefetch:
        """Return what keeps within `max_bytes`: first fewer batches per worker, then fewer workers; one batch at least.

        Unchanged if it fits.
        """
        per_worker = TORCH_PREFETCH if self.factor is None else self.factor
        if self.num_workers * per_worker * batch_bytes <= max_bytes:
            return self
        num_batches = max(1, int(max_bytes // batch_bytes))
        num_workers = min(self.num_workers, num_batches)
        return Prefetch(num_workers, max(1, min(per_worker, num_batches // num_workers)))


def _with_plain_errors(batches: Iterator[AudioNoiseBatch]) -> Iterator[AudioNoiseBatch]:
    """Yield the batches; an error that a worker raised for its user arrives as its message.

    Torch puts the worker's traceback into the message. It stays the cause of the error, for `--verbose`.
    """
    try:
        yield from batches
    except (ValueError, OSError, RuntimeError) as error:
        if "shared memory" in str(error) and os.strerror(errno.ENOSPC) in str(error):
            raise _shared_memory_is_full() from error
        if os.strerror(errno.EMFILE) in str(error):
            raise OSError(
                "too many open files: batches of DataLoader workers take some each. Raise the limit with "
                "'ulimit -n 4096', or lower model.train_ds.num_workers or prefetch_factor."
            ) from error
        message = message_of_worker(str(error), always=isinstance(error, OSError))
        if message is None:
            raise
        # Torch raises a RuntimeError in place of errors that take more than a message, such as ManifestError.
        kind = ValueError if isinstance(error, RuntimeError) else type(error)
        raise kind(message) from error


def _start_worker(pins: bool, worker: int) -> None:
    """In a worker: have a batch that cannot be passed on arrive as its error, and pass none on through TMPDIR.

    Python's queues send from a thread, which only prints its errors: the loader would wait for that batch for ever.
    Torch passes tensors through a socket that Python makes in TMPDIR, where its path may be too long, and where a
    cleaner may delete it in a long run. Linux has sockets without a file, and a key of the job's processes guards both.
    """

    def send_error(queue: Any, error: Exception, numbered_batch: tuple[int, Any]) -> None:
        queue.put((numbered_batch[0], ExceptionWrapper(where=f"in DataLoader worker process {worker}")))

    multiprocessing.queues.Queue._on_queue_feeder_error = send_error  # type: ignore[attr-defined]
    if multiprocessing.util.abstract_sockets_supported:
        name = f"\0nest-ssl-{os.getpid()}-{os.urandom(8).hex()}"
        multiprocessing.connection.arbitrary_address = lambda family: name  # type: ignore[attr-defined]
    if pins:
        keep_blocks()


def _check_shared_memory(num_workers: int) -> None:
    """Refuse to start workers where there is no room for their semaphores: torch would leave a half-made iterator."""
    num_semaphores = 3 * num_workers + 3 + 5  # a queue of each worker, the queue of batches, and an event
    if SHARED_MEMORY.is_dir():
        if not os.access(SHARED_MEMORY, os.W_OK):
            raise OSError(f"{SHARED_MEMORY} cannot be written to, and DataLoader workers need it. Set num_workers=0.")
        space = shutil.disk_usage(SHARED_MEMORY)
        if space.total > 0 and space.free < num_semaphores * mmap.PAGESIZE:  # total 0: it has no limit
            raise _shared_memory_is_full()


def _shared_memory_is_full() -> OSError:
    total_mb = shutil.disk_usage(SHARED_MEMORY).total / 1e6
    return OSError(
        f"{SHARED_MEMORY} is full ({total_mb:.1f} MB in all): DataLoader workers pass batches through it. Lower "
        "model.train_ds.num_workers, prefetch_factor or prefetch_gb, or enlarge it (docker: --shm-size=8g)."
    )


def message_of_worker(text: str, *, always: bool = False) -> str | None:
    """Return the message in torch's report of an error in a worker; None for any other text.

    Also None, unless `always`, where another package raised the error: there the traceback is needed.
    """
    report = re.match(r"Caught (\w+) in DataLoader worker process \d+\.\n", text)
    frames = list(re.finditer(r'(?m)^  File "([^"]+)", line', text))
    if report is None or not frames:
        return None
    if not always and PACKAGE not in Path(frames[-1][1]).parents:
        return None
    rest = text[frames[-1].end() :]
    found = re.search(rf"(?m)^(?:\w+\.)*{report[1]}: ", rest)
    return None if found is None else rest[found.end() :].strip()


class PlannedLoader(DataLoader[AudioNoiseBatch]):
    """The batches of one rank. `set_epoch` chooses the epoch; `position` and `resume` continue after batch k."""

    def __init__(
        self,
        dataset: Dataset[AudioNoiseBatch],
        sampler: BatchSampler,
        *,
        max_bad_fraction: float,
        bad_files_path: Path | None = None,
        rank: int = 0,
        world_size: int = 1,
        stops_if_bad: bool = True,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
    ) -> None:
        pinned = pin_memory and torch.cuda.is_available()  # torch warns otherwise
        super().__init__(
            dataset,
            batch_size=None,
            sampler=sampler,
            collate_fn=_unchanged,
            num_workers=num_workers,
            pin_memory=pinned,
            worker_init_fn=partial(_start_worker, pinned),
            # torch refuses these two without workers
            persistent_workers=persistent_workers and num_workers > 0,
            prefetch_factor=prefetch_factor if num_workers > 0 else None,
        )
        self.batches: BatchSampler = sampler
        self.bad_data = BadDataLog(
            max_bad_fraction=max_bad_fraction,
            utterances_per_epoch=sampler.utterances_per_epoch(),
            path=bad_files_path,
            rank=rank,
            world_size=world_size,
            stops=stops_if_bad,
        )
        self._next_batch = 0

    @cached_property
    def plan_hash(self) -> str:
        """The plan's hash, which the ranks compare before the first step."""
        return self.batches.plan_hash()

    def shapes(self) -> list[Shape]:
        """Return all shapes that the batches of a run can have, if the plan decides them; equal on all ranks."""
        return self.batches.shapes()

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch; None: unknown before its end."""
        try:
            return None if self.batches.utterances_per_epoch() is None else len(self)
        except TypeError:
            return None

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[AudioNoiseBatch]:  # type: ignore[override]
        self._next_batch = self.batches.start
        if self._next_batch == 0 or self.bad_data.epoch != self.batches.epoch:
            self.bad_data.start_epoch(self.batches.epoch)
        if self.num_workers > 0 and self._iterator is None:
            give_back_freed_memory()
            _check_shared_memory(self.num_workers)
        for batch in _with_plain_errors(super().__iter__()):
            self._next_batch += 1
            assert batch.audio is not None
            self.bad_data.record(len(batch.audio), batch.bad_files, batch.cropped_files)
            yield batch
        self._next_batch = 0
        if self.bad_data.num_bad["cropped"]:
            log.warning("%s", self.bad_data.cropped())

    def start_at(self, epoch: int, batch: int) -> None:
        """Start the next iteration at batch `batch` of `epoch`, or at the next epoch if there is no such batch."""
        if self.num_batches is not None and batch >= self.num_batches:
            epoch, batch = epoch + 1, 0
        self.batches.epoch, self.batches.start = epoch, batch
        self._next_batch = batch

    def position(self, next_batch: int | None = None) -> dict[str, Any]:
        """Return the state that, taken after batch k was received, makes `resume` continue with batch k + 1.

        A caller that reads ahead passes the number of the `next_batch` it has not used yet.
        """
        return {
            "epoch": self.batches.epoch,
            "next_batch": self._next_batch if next_batch is None else next_batch,
            "plan_hash": self.plan_hash,
            "bad_data": self.bad_data.state_dict(),
        }

    def resume(self, state: dict[str, Any]) -> None:
        if state["plan_hash"] != self.plan_hash:
            raise ValueError(
                "the checkpoint was written with another batch plan: seed, data, batch size or number of ranks have "
                "changed, so training cannot resume at the same batch. Restore them, or start a new epoch without "
                "the loader's state."
            )
        self.batches.epoch, self.batches.start = state["epoch"], state["next_batch"]
        self._next_batch = state["next_batch"]
        self.bad_data.load_state_dict(state["bad_data"], state["epoch"])


def _unchanged(batch: Any) -> Any:
    return batch


CountOverRanks = Callable[[str, int], int]
"""Adds a number to a counter that all ranks share, and returns the sum so far; see `World.counter`."""


class BadDataLog:
    """Counts what could not be read, writes each file once to `path`, and stops above `max_bad_fraction`.

    The share is that of all ranks: `count` adds up their counts. Without it a rank knows only its own, and stops when
    these alone are too many for all ranks.
    """

    def __init__(
        self,
        *,
        max_bad_fraction: float,
        utterances_per_epoch: int | None,
        path: Path | None = None,
        rank: int = 0,
        world_size: int = 1,
        stops: bool = True,
    ) -> None:
        self.max_bad_fraction = max_bad_fraction
        self.utterances_per_epoch = utterances_per_epoch
        """Of one rank."""
        self.path, self.rank, self.world_size = path, rank, world_size
        self.stops = stops
        """Otherwise too many bad files are only reported: in validation, which must not end a training."""
        self.count: CountOverRanks | None = None
        self.epoch = 0
        self._round = 0
        """Epochs started, repeated ones too: the same on all ranks, which share counters by it."""
        self._reported = False
        self.num_read = 0
        """Utterances of this epoch so far."""
        self.num_bad: Counter[str] = Counter()
        """Counts of this epoch by kind: utterances replaced, noise drawn again, utterances left without noise, and
        utterances cropped."""
        self.files: dict[str, BadFile] = {}
        """Every bad file of the run, by path."""
        self.first_cropped: str | None = None

    def start_epoch(self, epoch: int) -> None:
        self.epoch, self.num_read, self.num_bad = epoch, 0, Counter()
        self._round += 1

    def record(self, num_utterances: int, bad_files: list[BadFile], cropped_files: Sequence[str] = ()) -> None:
        """Count a batch. Raises BadDataError if the epoch's share of bad utterances is too high."""
        self.num_read += num_utterances
        if cropped_files:
            has_stand_ins = any(bad.kind == "speech" for bad in bad_files)  # these are cropped as a matter of course
            self._count_cropped(cropped_files, names=not has_stand_ins)
        added = Counter(bad.kind for bad in bad_files if not bad.stand_in)
        self.num_bad += added
        for bad in bad_files:
            if bad.kind != "no-noise" and bad.audio_filepath not in self.files:
                self._name(bad)
        if bad_files:
            self._stop_if_too_many(bad_files, added)

    def _count_cropped(self, files: Sequence[str], *, names: bool) -> None:
        self.num_bad["cropped"] += len(files)
        if self.first_cropped is None and names:
            self.first_cropped = files[0]
            log.warning(
                "%s: longer than the batches of its step are planned to be: cropped. Further ones are only counted. "
                "If its 'duration' is wrong, 'nest-ssl prepare' measures it.",
                files[0],
            )

    def _name(self, bad: BadFile) -> None:
        self.files[bad.audio_filepath] = bad
        if len(self.files) <= MAX_NAMED:
            log.warning("bad %s file: %s: %s", bad.kind, bad.audio_filepath, bad.reason)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(bad), ensure_ascii=False) + "\n")

    def _over_all_ranks(self, kind: str, added: int = 0) -> int:
        """Add to what all ranks have counted in this epoch, and return it."""
        return self.num_bad[kind] if self.count is None else self.count(f"{self._round}/{kind}", added)

    def _stop_if_too_many(self, bad_files: list[BadFile], added: Counter[str]) -> None:
        of_rank = max(self.num_read, MIN_UTTERANCES) if self.utterances_per_epoch is None else self.utterances_per_epoch
        out_of = of_rank * self.world_size
        most = max(self.max_bad_fraction * out_of, min(FEW, self.max_bad_fraction * MIN_UTTERANCES))
        for kind, what in JUDGED.items():
            if not added[kind]:
                continue
            num_bad = self._over_all_ranks(kind, added[kind])
            if num_bad <= most:
                continue
            one = next(bad for bad in bad_files if bad.kind == kind)
            ranks = f", on {self.world_size} ranks," if self.world_size > 1 else ""
            message = (
                f"{num_bad} of {out_of:,} utterances of epoch {self.epoch}{ranks} {what}, more than "
                f"max_bad_fraction = {self.max_bad_fraction:.2%}, such as {one.audio_filepath}: {one.reason}\n"
                f"{self.summary()}\n"
                "Run 'nest-ssl prepare' on the data to leave them out, or raise max_bad_fraction."
            )
            if self.stops:
                raise BadDataError(message)
            if not self._reported:
                log.warning("validation continues with other utterances in their place: %s", message)
            self._reported = True

    def summary(self) -> str:
        """Return one paragraph for the log; empty if nothing was bad."""
        if not self.files and not self.num_bad:
            return ""
        reasons = Counter(bad.reason for bad in self.files.values())
        lines = [
            f"bad data: {self.num_bad['speech']} of {self.num_read:,} utterances of epoch {self.epoch} replaced, "
            f"{self.num_bad['noise']} noise segments drawn again, {self.num_bad['no-noise']} utterances without noise; "
            f"{len(self.files)} bad files in this run",
            *([f"  {self.cropped()}"] if self.num_bad["cropped"] else []),
            *(f"  {count} x {reason}" for reason, count in reasons.most_common(IN_SUMMARY)),
            *(f"  {bad.kind}: {bad.audio_filepath}: {bad.reason}" for bad in list(self.files.values())[:IN_SUMMARY]),
        ]
        if self.path is not None:
            lines.append(f"  all of them: {self.path}")
        return "\n".join(lines)

    def cropped(self) -> str:
        first = f", {self.first_cropped} first" if self.first_cropped else ""  # a resumed run knows only the number
        return f"{self.num_bad['cropped']} of {self.num_read:,} utterances of epoch {self.epoch} cropped{first}"

    def state_dict(self) -> dict[str, object]:
        """Return the counts for a checkpoint; on rank 0, which writes it, those of all ranks."""
        num_bad = {**self.num_bad, **({} if self.rank else {kind: self._over_all_ranks(kind) for kind in JUDGED})}
        return {"num_read": self.num_read, "num_bad": {kind: number for kind, number in num_bad.items() if number}}

    def load_state_dict(self, state: dict[str, object], epoch: int) -> None:
        """Continue with the counts of a checkpoint, which rank 0 takes over for all."""
        self.start_epoch(epoch)
        if self.rank > 0:
            return
        self.num_read = int(state["num_read"])  # type: ignore[call-overload]
        self.num_bad.update(state["num_bad"])  # type: ignore[call-overload]
        for kind in JUDGED:
            self._over_all_ranks(kind, self.num_bad[kind])
