"""The rank's side: its mark in the beacon, its heartbeat, its answers to the monitor, and what it does with signals."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import logging
import multiprocessing.util  # whose exit handler waits for children: ours has to be registered after it
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from nest_ssl.launch.exit_codes import FINISHED, RESUMABLE
from nest_ssl.launch.ranks import RankFacts
from nest_ssl.watchdog.beacon import NO_STEP, Beacon, RankState
from nest_ssl.watchdog.judge import flight
from nest_ssl.watchdog.mark import RankMark
from nest_ssl.watchdog.report.evidence import fault_file
from nest_ssl.watchdog.report.failure import write_failure
from nest_ssl.watchdog.report.words import signal_name
from nest_ssl.watchdog.system import DISK_ANSWERS_S, allow_inspection, die_with_parent, say, stop_signals, within

log = logging.getLogger(__name__)

BEAT_EVERY_S = 0.25
HOLD_S = 15.0
"""A failed rank waits this long to be ended by the monitor: its evidence is still there, and the others see nothing."""
MEANT_FOR_ALL_S = 0.5
SHOW_CURSOR = "\x1b[?25h"


class RankAgent:
    """One per rank process. `saves`: a rank that is asked to stop saves first, if it trains already."""

    def __init__(self, facts: RankFacts, beacon: Beacon, *, has_monitor: bool, saves: bool = True) -> None:
        self.facts, self.beacon, self.has_monitor, self.saves = facts, beacon, has_monitor, saves
        self.mark = RankMark(beacon, facts.local_rank)
        self.trains = False
        """The first step has begun: from here on somebody looks, after every step, whether to stop."""
        self.describe_work: Callable[[], list[str]] = list
        """What the rank is working on, in words, for the report of a failure."""
        self.show: Callable[[], None] = lambda: None
        """Let `nest-ssl doctor` find the beacon of a run without a monitor."""
        self.keep_monitor: Callable[[], None] = lambda: None
        """Start the monitor again if it is gone: for the rank that has started it."""
        self.close: Callable[[], None] = lambda: None
        """Let `nest-ssl doctor` read how a run without a monitor ended, and remove its beacon."""
        self._stack_file: Any = None
        self._pid = os.getpid()

    def start(self, parent: int) -> None:
        """Become visible: from now on a hang, a death and a signal of this process are seen and named.

        It dies with the process `parent`, unless that is 0.
        """
        if parent:
            die_with_parent(parent)
        allow_inspection()
        self.mark.take()
        self._stack_file = register_stack_dump(self.beacon.folder)
        threading.Thread(target=self._beat_forever, name="nest-ssl heartbeat", daemon=True).start()
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        atexit.register(_end_loader_processes)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a loader process, which has inherited this handler
            leave_to_the_rank(self.beacon, self.facts.local_rank, number)
            return
        if self.has_monitor:
            self.mark.ask_to_stop(number)  # the monitor agrees a step with all ranks
        else:
            self._stop_alone(signal_name(number))

    def _stop_alone(self, name: str) -> None:
        """What the monitor does where there is one: say what will happen, and wait for a step only to save it."""
        if self.mark.state is RankState.STOPPED:
            os._exit(RESUMABLE)  # it is leaving already
        if why := self._why_at_once():
            say(f"nest-ssl: {name}: stopped; {why}")
            self._end_at_once()
        self.beacon.stop_step = self.mark.step + 1
        say(f"nest-ssl: {name}: saves after step {self.beacon.stop_step} and leaves")

    def _why_at_once(self) -> str:
        """Why a rank that is asked to stop does not wait for the end of a step; empty: it does."""
        if self.mark.state is RankState.FINISHED:
            return "the run had finished"
        if self.beacon.stop_step != NO_STEP:
            return "asked twice, it did not wait to save"
        if not self.saves:
            return "without saving, as set"
        return "" if self.trains else "nothing had to be saved before the first step"

    def _end_at_once(self) -> NoReturn:
        """Without an exception: raised in a signal handler, it could be swallowed, or wait for a thread that reads."""
        if os.isatty(2):
            say(SHOW_CURSOR)  # the progress bar hides it
        code = FINISHED if self.mark.state is RankState.FINISHED else RESUMABLE
        if code == RESUMABLE:
            self.mark.state = RankState.STOPPED
        _end_loader_processes()
        with contextlib.suppress(Exception):  # whatever keeps the last word from being written, it must end
            within(DISK_ANSWERS_S, self.close)
        os._exit(code)

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
        """torch's flight recorder as JSON; its pickled form cannot be read back for gloo."""
        path = self.beacon.folder / flight.file_name(self.facts.rank)
        try:
            from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

            content = bytes(_dump_fr_trace_json())
        except (ImportError, RuntimeError) as error:  # a torch without it: blame goes by stages alone
            content = json.dumps({"error": str(error)}).encode()
        with contextlib.suppress(OSError):  # no room for it: blame goes by stages alone
            path.with_suffix(".tmp").write_bytes(content)
            os.replace(path.with_suffix(".tmp"), path)

    def stop_is_due(self, step: int) -> bool:
        """Whether all ranks have agreed to save and leave once `step` steps are done."""
        stop_step = self.beacon.stop_step
        return stop_step != NO_STEP and step >= stop_step

    def fail(self, error: BaseException) -> None:
        """Write the exception down before anything else; then wait for the monitor to end the job."""
        if self.mark.state is not RankState.RUNNING:
            return
        write_failure(self.beacon.folder, self.facts.rank, error, self.describe_work())
        self._dump_collectives()
        self.mark.state = RankState.FAILED
        if self.has_monitor:
            time.sleep(HOLD_S)


def leave_to_the_rank(beacon: Beacon, local_rank: int, number: int) -> None:
    """What a loader process does with a signal that asks it to stop.

    A cluster signals all processes of a job: without its loaders a rank could not reach the agreed step. If the job was
    not asked to stop, the signal was meant for this process alone.
    """
    time.sleep(MEANT_FOR_ALL_S)
    if beacon.stop_signal or beacon.rank(local_rank).stop_signal or beacon.stop_step != NO_STEP:
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _end_loader_processes() -> None:
    """Python waits for its children before it ends, and a stopped one does not hear that it should."""
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would take it for a failure
    for child in multiprocessing.active_children():
        child.kill()


def register_stack_dump(folder: Path) -> Any:
    """Let SIGUSR2 write the stacks of this process to its file in `folder`; the open file, which must stay open."""
    if not hasattr(signal, "SIGUSR2"):
        return None
    file = fault_file(folder, os.getpid()).open("w")
    faulthandler.enable(file=file)  # a crash (SIGSEGV, SIGABRT, …) leaves its stack too
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    return file
