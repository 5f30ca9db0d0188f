"""One node of a job: what its monitor can observe there, and what it can do."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from nest_ssl.files import replacing
from nest_ssl.watchdog.beacon import NO_STEP, Beacon, Hold
from nest_ssl.watchdog.judge import flight
from nest_ssl.watchdog.judge.blame import Verdict
from nest_ssl.watchdog.judge.failure import Failure, read_failures
from nest_ssl.watchdog.judge.flight import Flight
from nest_ssl.watchdog.rank import RankState
from nest_ssl.watchdog.report import evidence
from nest_ssl.watchdog.report.status import Settings, write_status
from nest_ssl.watchdog.rows import Limits, RankRow, RecentDurations, WorkerRow, local_rows
from nest_ssl.watchdog.system import OomKiller, kill_all, wait_until_gone, within

EVIDENCE_WAIT_S = 0.6
STATUS_EVERY_S = 2.0
STATUS_AGAIN_S = 60.0
"""How long to wait after a disk did not respond."""


def verdict_path(folder: Path) -> Path:
    """Return the file in which the monitor records how it ended the job."""
    return folder / "verdict.json"


class Node:
    """The ranks of this node, their beacon, and their processes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.beacon = Beacon(Path(settings.beacon))
        self._in_use = Hold(self.beacon.folder)
        self.recent = RecentDurations(self.beacon)
        self._limits = Limits(settings.floor_s, settings.init_s)
        self._oom_killer = OomKiller()
        self._stopped_since: dict[int, float] = {}
        self._gpu_since: dict[int, tuple[object, float]] = {}
        self._next_status = 0.0
        self.stop_acknowledged = NO_STEP
        """The last stop step that all ranks of this node have learnt of in time."""

    # ---- observing ----

    def rows(self) -> list[RankRow]:
        """Return the ranks now, with how long stopped processes and GPUs that do not move have been seen so."""
        rows = local_rows(self.beacon, self._limits, self.settings.node, self.recent.usual_ms)
        now = time.monotonic()
        stopped = {row.pid for row in rows if row.is_stopped}
        stopped |= {worker.pid for row in rows for worker in row.workers if worker.process in ("T", "t")}
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        is_lost = any(row.state is RankState.FAILED or (row.is_gone and row.is_active) for row in rows)
        oom_killer = self._oom_killer.text() if is_lost else ""
        rows = [dataclasses.replace(row, oom_killer=oom_killer) for row in rows]
        return [self._with_gpu(self._with_stops(row, now), now) for row in rows]

    def _with_stops(self, row: RankRow, now: float) -> RankRow:
        def stopped_s(pid: int) -> float:
            return now - self._stopped_since.get(pid, now)

        workers: list[WorkerRow] = [
            dataclasses.replace(worker, stopped_s=stopped_s(worker.pid)) for worker in row.workers
        ]
        return dataclasses.replace(row, stopped_s=stopped_s(row.pid), workers=workers)

    def _with_gpu(self, row: RankRow, now: float) -> RankRow:
        if row.gpu is None:
            return row
        seen = (row.gpu.position, row.gpu.is_busy)  # one that was idle starts when it is given a batch
        before, since = self._gpu_since.get(row.rank, (None, now))
        since = since if before == seen else now
        self._gpu_since[row.rank] = (seen, since)
        return dataclasses.replace(row, gpu=dataclasses.replace(row.gpu, in_stage_s=now - since))

    def failures(self) -> dict[int, Failure]:
        return read_failures(self.beacon.folder)

    def flights(self, rows: list[RankRow]) -> dict[int, Flight]:
        """Ask the ranks for their flight recorders, and wait briefly for those that can answer."""
        request = self.beacon.request_evidence()
        deadline = time.monotonic() + EVIDENCE_WAIT_S
        able = [i for i, row in enumerate(rows) if row.pid and not row.is_gone and not row.is_stopped]
        while time.monotonic() < deadline:
            if all(self.beacon.rank(i).evidence_given >= request for i in able):
                break
            time.sleep(0.02)
        given = [row.rank for i, row in enumerate(rows) if self.beacon.rank(i).evidence_given >= request]
        return evidence.collect_flights(self.beacon.folder, given)

    def innermost_frames(self, verdict: Verdict) -> list[str]:
        """Return where the culprit's code is, if the culprit is on this node."""
        row = verdict.row
        pid = row.pid if verdict.worker is None else verdict.worker.pid
        if row.node != self.settings.node or not pid:
            return []
        if row.is_gone:  # a crash leaves its stack
            path = evidence.fault_file(self.beacon.folder, pid)
            return evidence.innermost_frames(path.read_text(errors="replace") if path.is_file() else "")
        return evidence.innermost_frames(evidence.read_stacks({"it": pid}, self.beacon.folder).get("it", ""))

    def keep_evidence(self, folder: Path) -> None:
        """Write stacks, states, flight recorders and figures of this node's processes to `folder`."""
        rows = self.rows()
        evidence.write_facts(rows, folder, self.settings.node)
        for row in rows:
            source = self.beacon.folder / flight.file_name(row.rank)
            if source.is_file():
                shutil.copyfile(source, folder / source.name)
        evidence.write_stacks(evidence.processes_of(rows), folder / "stacks", self.beacon.folder)

    def write_status(self, rows: list[RankRow], *, now: bool = False) -> None:
        """Write what `nest-ssl doctor RUN_DIR` reads once the processes are gone."""
        if time.monotonic() < self._next_status and not now:
            return
        self._next_status = time.monotonic() + STATUS_EVERY_S
        try:
            within(STATUS_EVERY_S, lambda: write_status(self.settings, rows, os.getpid()))
        except OSError as error:  # a full disk is reported by the ranks that it stops
            if isinstance(error, TimeoutError):
                self._next_status += STATUS_AGAIN_S

    # ---- acting ----

    def stop_at(self, step: int) -> None:
        """Have every rank save and exit after `step`, once that is agreed; acknowledge it if none may have passed it.

        A rank shows that it has finished a step only after it has looked whether to stop there.
        """
        if step <= self.beacon.stop_step:
            return
        self.beacon.stop_step = step
        if self.latest_step() + 1 < step:
            self.stop_acknowledged = step

    def latest_step(self) -> int:
        """Return the latest step that a running rank of this node shows."""
        slots = (self.beacon.rank(local_rank) for local_rank in range(self.beacon.local_ranks))
        return max((slot.step for slot in slots if slot.state is RankState.RUNNING), default=NO_STEP)

    def end(self, verdict: dict[str, Any]) -> None:
        """End every process of the job on this node, and record why."""
        # If there is no room left for the file, the exit code below still has its place in the beacon.
        with contextlib.suppress(OSError), replacing(verdict_path(self.beacon.folder), sync=False) as file:
            file.write(json.dumps(verdict).encode())
        self.beacon.outcome = verdict["exit_code"]
        rows = self.rows()
        # A process without a state was reaped: its pid is free, or belongs to another process.
        pids = {row.pid for row in rows if row.pid and row.process}
        pids |= {worker.pid for row in rows for worker in row.workers if worker.process}
        kill_all(pids)
        wait_until_gone(pids, 1.0)
