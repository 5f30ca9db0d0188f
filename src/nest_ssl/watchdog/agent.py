"""The rank's side: its mark in the beacon, its heartbeat, its answers to the monitor, and its signal handlers.

`RankAgent` runs in the rank itself, `ReadReport` in the processes that read files for it: DataLoader
workers, or the rank when it has none.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import faulthandler
import json
import multiprocessing.util  # its exit handler waits for children: ours must be registered after it
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from nest_ssl.files import replacing
from nest_ssl.watchdog.beacon import NO_STEP, Beacon, Hold, RankMark, WorkerMark
from nest_ssl.watchdog.judge import flight
from nest_ssl.watchdog.judge.failure import tells_of_lost_worker, write_failure
from nest_ssl.watchdog.rank import FINISHED, RESUMABLE, RankFacts, RankState
from nest_ssl.watchdog.report.evidence import fault_file
from nest_ssl.watchdog.system import (
    DISK_ANSWERS_S,
    LESS_MEMORY,
    OomKiller,
    allow_inspection,
    die_with_parent,
    say,
    signal_name,
    stop_signals,
    within,
)

T = TypeVar("T")

BEAT_EVERY_S = 0.25
HOLD_S = 15.0
"""How long a failed rank waits for the monitor to end it: its evidence stays readable, and no other rank loses it."""
MEANT_FOR_ALL_S = 0.5
AGREEMENT_S = 30.0
"""How long a rank waits at the stop step for the monitors, which agree within 10 s; then it saves without them."""
SHOW_CURSOR = "\x1b[?25h"


class RankAgent:
    """One per rank process. `saves`: a rank that is asked to stop saves first, if training has begun."""

    def __init__(self, facts: RankFacts, beacon: Beacon, *, has_monitor: bool, saves: bool = True) -> None:
        self.facts, self.beacon, self.has_monitor, self.saves = facts, beacon, has_monitor, saves
        self.mark = RankMark(beacon, facts.local_rank)
        self.trains = False
        """The first step has begun: from now on the loop checks after every step whether to stop."""
        self.describe_work: Callable[[], list[str]] = list
        """Describe what the rank is working on, for the report of a failure."""
        self.gpu = ""
        """Its GPU and host in words, once chosen; for a failed GPU, which can no longer be asked."""
        self.show: Callable[[], None] = lambda: None
        """Let `nest-ssl doctor` find the beacon of a run without a monitor."""
        self.keep_monitor: Callable[[], None] = lambda: None
        """Restart the monitor if it is gone; set in the rank that started it."""
        self.close: Callable[[], None] = lambda: None
        """Let `nest-ssl doctor` read how a run without a monitor ended, and remove its beacon."""
        self.oom_killer = OomKiller()
        self._stack_file: Any = None
        self._pid = os.getpid()
        self._in_use = Hold(beacon.folder)

    def start(self, parent: int) -> None:
        """Become visible: from now on a hang, a death or a signal of this process is seen and named.

        The process dies with the process `parent`, unless that is 0.
        """
        if parent:
            die_with_parent(parent)
        allow_inspection()
        self.mark.take()
        self._stack_file = register_stack_dump(self.beacon.folder)
        threading.Thread(target=self._beat_forever, name="nest-ssl heartbeat", daemon=True).start()
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        atexit.register(_end_workers)

    # ---- signals ----

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a worker, which inherited this handler
            leave_to_the_rank(self.beacon, self.facts.local_rank, number)
            return
        if self.has_monitor:
            self.mark.ask_to_stop(number)  # the monitor agrees on a step for all ranks
        else:
            self._stop_alone(signal_name(number))

    def _stop_alone(self, name: str) -> None:
        """Do what the monitor does where there is one: announce what will happen, and wait for a step only to save."""
        if self.mark.state is RankState.STOPPED:
            os._exit(RESUMABLE)  # it is leaving already
        if why := self._why_at_once():
            say(f"nest-ssl: {name}: stopped; {why}")
            self._end_at_once()
        self.beacon.stop_step = self.beacon.stop_agreed = self.mark.step + 1
        say(f"nest-ssl: {name}: will save and exit by step {self.beacon.stop_step}")

    def _why_at_once(self) -> str:
        """Return why a rank that is asked to stop does not wait for the end of a step; empty: it does wait."""
        if self.mark.state is RankState.FINISHED:
            return "the run had finished"
        if self.beacon.stop_step != NO_STEP:
            return "asked twice, so it did not wait to save"
        if not self.saves:
            return "without saving, as configured"
        return "" if self.trains else "nothing to save before the first step"

    def _end_at_once(self) -> NoReturn:
        """End without an exception: raised in a signal handler, it could be swallowed, or wait for a reading thread."""
        if os.isatty(2):
            say(SHOW_CURSOR)  # the progress bar hides it
        code = FINISHED if self.mark.state is RankState.FINISHED else RESUMABLE
        if code == RESUMABLE:
            self.mark.state = RankState.STOPPED
        _end_workers()
        with contextlib.suppress(Exception):  # it must end, whatever prevents the last status from being written
            within(DISK_ANSWERS_S, self.close)
        os._exit(code)

    def leave_stalled(self) -> NoReturn:
        """End a run of one rank whose main thread does not return; called from another thread, after the report."""
        if os.isatty(2):
            say(SHOW_CURSOR)
        with contextlib.suppress(Exception):  # it must end, whatever prevents the last status from being written
            within(DISK_ANSWERS_S, self.close)
        os._exit(RESUMABLE)

    def stop_is_due(self, step: int) -> bool:
        """Return whether all ranks have agreed to save and leave once `step` steps are done.

        A rank that comes to a step on which the nodes have not agreed yet waits: they agree on it, or on a later one.
        """
        beacon = self.beacon
        if beacon.stop_step == NO_STEP:
            return False
        until = time.monotonic() + AGREEMENT_S
        while step >= beacon.stop_step:
            if beacon.stop_agreed == beacon.stop_step or time.monotonic() > until:
                return True
            time.sleep(0.01)
        return False

    # ---- heartbeat, evidence, failure ----

    def _beat_forever(self) -> None:
        answered = 0
        while True:
            self.mark.beat()
            self.keep_monitor()
            request = self.beacon.evidence_request
            if request > answered:
                self._dump_collectives()
                self.mark.gave_evidence(request)
                answered = request
            time.sleep(BEAT_EVERY_S)

    def _dump_collectives(self) -> None:
        """Write torch's flight recorders as JSON; their pickled form cannot be read back for gloo."""
        try:
            import torch._C._distributed_c10d as c10d

            # NCCL has a recorder of its own, in builds with CUDA.
            dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
            recorded: list[dict[str, Any]] = [json.loads(dump()) for dump in dumps if dump is not None]
            content = json.dumps(dict(collections.ChainMap({"entries": flight.merged(recorded)}, *recorded))).encode()
        except (ImportError, RuntimeError) as error:  # a torch without it: blame goes by stages alone
            content = json.dumps({"error": str(error)}).encode()
        with (
            contextlib.suppress(OSError),  # no room for it: blame goes by stages alone
            replacing(self.beacon.folder / flight.file_name(self.facts.rank), sync=False) as file,
        ):
            file.write(content)

    def fail(self, error: BaseException) -> None:
        """Write the exception down before anything else; then wait for the monitor to end the job."""
        if self.mark.state is not RankState.RUNNING:
            return
        write_failure(self.beacon.folder, self.facts.rank, error, self.describe_work(), self.gpu)
        self._dump_collectives()
        self.mark.state = RankState.FAILED
        if self.has_monitor:
            time.sleep(HOLD_S)

    def why_killed(self, error: BaseException) -> str:
        """Return what to say of a worker that was killed; where there is a monitor, it does; "" for other errors.

        The run can be resumed, as with many ranks.
        """
        text = str(error)
        if not tells_of_lost_worker(text):
            return ""
        if why := self.oom_killer.text() if "is killed by signal: Killed" in text else "":
            return f"{text.strip(' .')}: {why}. {LESS_MEMORY.capitalize()}."
        return f"{text.strip(' .')}: out of shared memory (/dev/shm) or memory? {LESS_MEMORY.capitalize()}."


class ReadReport:
    """What one DataLoader of one rank reports: `on_read` before each file, `batch_is_made` after each batch.

    It travels to workers by fork or by pickle and opens the beacon again in each. Worker n has slot
    `first_slot` + 1 + n; the rank itself, when it reads without workers, has `first_slot`.
    """

    def __init__(self, beacon_path: Path, local_rank: int, first_slot: int) -> None:
        self.beacon_path, self.local_rank, self.first_slot = beacon_path, local_rank, first_slot
        self._rank_pid = os.getpid()
        self._pid = 0
        self._mark: WorkerMark | None = None
        self._stack_file: Any = None

    def on_read(self, path: str) -> None:
        self._own_mark().reads(path)

    def batch_is_made(self, batch: T) -> T:
        """Return `batch`; used as a collate function, the last thing that a worker does to a batch."""
        self._own_mark().rests()
        return batch

    def _own_mark(self) -> WorkerMark:
        if self._mark is None or self._pid != os.getpid():
            from torch.utils.data import get_worker_info  # here, so that a rank can be watched while it imports torch

            info = get_worker_info()
            number = -1 if info is None else info.id
            self._pid = os.getpid()
            beacon = Beacon(self.beacon_path)
            slot = min(self.first_slot + 1 + number, beacon.workers_per_rank - 1)
            self._mark = WorkerMark(beacon, self.local_rank, slot, number)
            if self._pid != self._rank_pid:
                self._become_worker(beacon)
        return self._mark

    def _become_worker(self, beacon: Beacon) -> None:
        # torch's workers check for their parent every 5 s; the kernel tells them at once.
        die_with_parent(os.getppid())
        allow_inspection()
        self._stack_file = register_stack_dump(beacon.folder)
        for number in stop_signals():  # torch has a handler of its own for SIGTERM
            signal.signal(number, lambda number, _: leave_to_the_rank(beacon, self.local_rank, number))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mark": None, "_pid": 0, "_stack_file": None}


def leave_to_the_rank(beacon: Beacon, local_rank: int, number: int) -> None:
    """Handle a stop signal in a worker.

    A cluster signals all processes of a job: without its workers a rank could not reach the agreed step. If the job
    was not asked to stop, the signal was meant for this process alone.
    """
    time.sleep(MEANT_FOR_ALL_S)
    if beacon.stop_signal or beacon.rank(local_rank).stop_signal or beacon.stop_step != NO_STEP:
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _end_workers() -> None:
    """Kill the workers: Python waits for its children before it ends, and a stopped one does not hear a request."""
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would take it for a failure
    for child in multiprocessing.active_children():
        child.kill()


def register_stack_dump(folder: Path) -> Any:
    """Let SIGUSR2 write the stacks of this process to its file in `folder`; return the file, which must stay open."""
    if not hasattr(signal, "SIGUSR2"):
        return None
    file = fault_file(folder, os.getpid()).open("w")
    faulthandler.enable(file=file)  # a crash (SIGSEGV, SIGABRT, …) leaves its stack too
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    return file
