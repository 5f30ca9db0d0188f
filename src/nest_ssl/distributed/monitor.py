"""The monitor: one process per node, beside the ranks, that looks four times a second and never takes part.

It names the rank that stands still, keeps evidence, ends the job, and agrees the step at which all ranks stop when
one is asked to. It imports no torch: it starts in a tenth of a second and cannot be caught in what it watches.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from nest_ssl.distributed import evidence, flight, words
from nest_ssl.distributed.beacon import NO_STEP, Beacon, RankState
from nest_ssl.distributed.blame import Verdict, is_suspicious, judge_abort, judge_dead, judge_stalled
from nest_ssl.distributed.exit_codes import NEEDS_A_PERSON, RESUMABLE
from nest_ssl.distributed.failure import read_failures
from nest_ssl.distributed.incident import FOLDER, exit_code_of, incident_name, make_incident, write_incident
from nest_ssl.distributed.limits import Limits
from nest_ssl.distributed.rows import RankRow, local_rows
from nest_ssl.distributed.slow import RecentDurations, Slow, find_slow
from nest_ssl.distributed.stages import Stage
from nest_ssl.distributed.status import Settings, write_status
from nest_ssl.distributed.system import die_with_parent, kill_all, wait_until_gone

LOOK_EVERY_S = 0.25
EVIDENCE_WAIT_S = 0.6
SETTLE_S = 0.3
"""After the first sign of a death: others may have failed before, and their words are on the way."""
LOST_PEER_S = 2.0
STOP_MARGIN = 2
"""Steps between the decision to stop and the stop: no rank can have passed it when it learns of it."""
STATUS_EVERY_S = 5.0
WARN_FROM_S = 10.0
"""A warning comes at half the limit, unless that is shorter than this."""


def verdict_path(folder: Path) -> Path:
    """Where the monitor leaves how it ended the job."""
    return folder / "verdict.json"


class Monitor:
    """Looks, judges, reports, ends."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.beacon = Beacon(Path(settings.beacon))
        self.run_dir = Path(settings.run_dir)
        self.limits = Limits(settings.floor_s, settings.init_s)
        self.recent = RecentDurations(self.beacon)
        self._stopped_since: dict[int, float] = {}
        self._dead_since: float | None = None
        self._reported: set[tuple[object, ...]] = set()
        self._slow: Slow | None = None
        self._next_status = 0.0

    def run(self) -> int:
        """Until all ranks have left, or the job is ended; the exit code for the job."""
        while True:
            self.beacon.beat_monitor()
            rows = local_rows(self.beacon, self.limits, self.settings.node, self.recent.usual_ms)
            self._write_status(rows)
            if all(row.is_gone and not row.is_active for row in rows):
                self._write_status(rows, now=True)
                return 0
            code = self._look(rows)
            if code is not None:
                self._write_status(rows, now=True)
                return code
            time.sleep(LOOK_EVERY_S)

    def _look(self, rows: list[RankRow]) -> int | None:
        """One look; an exit code when the job is over."""
        dead = self._dead(rows)
        if dead is not None:
            aborted = dead.kind == "died" and dead.row.exit_status == -signal.SIGABRT
            return self._end(judge_abort(dead, rows, self._flights(rows)) if aborted else dead, rows)
        if self._dead_since is None and self.settings.judges:
            stopped_s = self._stopped_s(rows)
            if is_suspicious(rows, stopped_s, self.settings.floor_s):
                flights = self._flights(rows)
                verdict = judge_stalled(rows, flights, stopped_s, self.settings.floor_s)
                if verdict is not None:
                    return self._stalled(verdict, rows)
            self._warn_early(rows)
            self._warn_slow(rows)
        return self._stop(rows)

    # ---- dead ----

    def _dead(self, rows: list[RankRow]) -> Verdict | None:
        if not any(row.state is RankState.FAILED or (row.is_gone and row.is_active) for row in rows):
            return None
        now = time.monotonic()
        self._dead_since = self._dead_since or now
        if now - self._dead_since < SETTLE_S:
            return None
        verdict = judge_dead(rows, read_failures(self.beacon.folder))
        lost_peer = verdict is not None and verdict.failure is not None and verdict.failure.is_lost_peer
        return None if lost_peer and now - self._dead_since < LOST_PEER_S else verdict

    def _end(self, verdict: Verdict, rows: list[RankRow]) -> int:
        failure = verdict.failure
        if failure is not None and failure.is_plain and verdict.row.stage is Stage.INIT:
            who = "" if len(rows) == 1 else f"rank {failure.rank}: "
            self._say(f"nest-ssl: {who}{failure.message}")  # as without ranks: the message says all
            return self._leave(NEEDS_A_PERSON, None, rows)
        return self._report_and_end(verdict, rows)

    # ---- stalled ----

    def _stopped_s(self, rows: list[RankRow]) -> dict[int, float]:
        """How long each stopped process has been seen stopped, by pid."""
        now = time.monotonic()
        processes = {row.pid: row.is_stopped for row in rows}
        processes |= {worker.pid: worker.process in ("T", "t") for row in rows for worker in row.workers}
        stopped = {pid for pid, is_stopped in processes.items() if is_stopped}
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        return {pid: now - since for pid, since in self._stopped_since.items()}

    def _flights(self, rows: list[RankRow]) -> dict[int, flight.Flight]:
        """Ask the ranks for their flight recorders, and wait a moment for those that can answer."""
        request = self.beacon.request_evidence()
        deadline = time.monotonic() + EVIDENCE_WAIT_S
        able = [i for i, row in enumerate(rows) if row.pid and not row.is_gone and not row.is_stopped]
        while time.monotonic() < deadline:
            if all(self.beacon.rank(i).evidence_given >= request for i in able):
                break
            time.sleep(0.02)
        given = [row.rank for i, row in enumerate(rows) if self.beacon.rank(i).evidence_given >= request]
        return evidence.collect_flights(self.beacon.folder, given)

    def _stalled(self, verdict: Verdict, rows: list[RankRow]) -> int | None:
        if self.settings.ends:
            return self._report_and_end(verdict, rows)
        key = (verdict.kind, tuple((row.rank, row.step, row.place) for row in verdict.culprits))
        if key not in self._reported:
            self._reported.add(key)
            self._report(verdict, rows)
        return None

    # ---- report and end ----

    def _report(self, verdict: Verdict, rows: list[RankRow]) -> str:
        """Evidence to its folder, ten lines to the terminal and to a file; the name of the incident."""
        name = incident_name(verdict)
        folder = self.run_dir / FOLDER / name
        failure = verdict.failure
        stack = failure.innermost_frames[:3] if failure is not None else self._innermost_frames(verdict)
        incident = make_incident(verdict, stack, self.run_dir, name, self.settings.resume_command)
        if failure is not None and not failure.is_plain and not failure.is_lost_peer:
            self._say(failure.short_traceback)
        self._say(incident.text)
        try:
            write_incident(incident, self.run_dir)
            self._keep_evidence(verdict, rows, folder)
        except OSError as error:  # a full disk must not keep the job from being ended
            self._say(f"nest-ssl: {folder}: the evidence could not be written: {error.strerror}")
        return name

    def _innermost_frames(self, verdict: Verdict) -> list[str]:
        worker = verdict.worker
        pid = worker.pid if worker is not None else verdict.row.pid
        if verdict.row.is_gone:  # a crash leaves its stack
            path = evidence.fault_file(self.beacon.folder, pid)
            return evidence.innermost_frames(path.read_text(errors="replace") if path.is_file() else "")
        if not pid:
            return []
        return evidence.innermost_frames(evidence.read_stacks({"it": pid}, self.beacon.folder).get("it", ""))

    def _keep_evidence(self, verdict: Verdict, rows: list[RankRow], folder: Path) -> None:
        evidence.write_facts(rows, folder)
        if verdict.failure is not None:
            (folder / "traceback.txt").write_text(verdict.failure.traceback)
        for row in rows:
            source = self.beacon.folder / flight.file_name(row.rank)
            if source.is_file():
                shutil.copyfile(source, folder / source.name)
        evidence.write_stacks(evidence.processes_of(rows), folder / "stacks", self.beacon.folder)

    def _report_and_end(self, verdict: Verdict, rows: list[RankRow]) -> int:
        name = self._report(verdict, rows)
        return self._leave(exit_code_of(verdict), name, rows, verdict)

    def _leave(self, code: int, incident: str | None, rows: list[RankRow], verdict: Verdict | None = None) -> int:
        """End every process of the job on this node, and say how."""
        fault = None if verdict is None else [verdict.kind, verdict.ranks, verdict.row.stage.label, verdict.row.step]
        content = {"exit_code": code, "incident": incident, "fault": fault}
        path = verdict_path(self.beacon.folder)
        path.with_suffix(".tmp").write_text(json.dumps(content))
        os.replace(path.with_suffix(".tmp"), path)
        pids = {row.pid for row in rows if row.pid} | {worker.pid for row in rows for worker in row.workers}
        kill_all(pids)
        wait_until_gone(pids, 1.0)
        return code

    # ---- warnings ----

    def _warn_early(self, rows: list[RankRow]) -> None:
        for row in rows:
            half_s = row.limit_s / 2
            key = ("early", row.rank, row.step, row.place)
            if row.is_active and half_s >= WARN_FROM_S and row.in_stage_s > half_s and key not in self._reported:
                self._reported.add(key)
                self._say(
                    f"nest-ssl: warning: rank {row.rank} has been in {row.place} of step {row.step} for "
                    f"{row.in_stage_s:.0f} s; at {row.limit_s:.0f} s it counts as stalled"
                )

    def _warn_slow(self, rows: list[RankRow]) -> None:
        if not self.recent.update():
            return
        before, self._slow = self._slow, find_slow(rows)
        slow = self._slow
        if slow is None or before is None or (slow.rank, slow.stage) != (before.rank, before.stage):
            return
        if ("slow", slow.rank, slow.stage) not in self._reported:
            self._reported.add(("slow", slow.rank, slow.stage))
            self._say(f"nest-ssl: warning: {slow}")

    # ---- stopping together ----

    def _stop(self, rows: list[RankRow]) -> int | None:
        """Agree the step after which all ranks save and leave, once one of them or the launcher was asked to stop."""
        asked = self.beacon.stop_signal or max(row.stop_signal for row in rows)
        if not asked or self.beacon.stop_step != NO_STEP:
            return None
        name = words.signal_name(asked)
        if any(row.stage is Stage.INIT and row.is_active for row in rows):
            self._say(f"nest-ssl: {name}: stopped before the first step; nothing had to be saved")
            return self._leave(RESUMABLE, None, rows)
        step = max(row.step for row in rows) + STOP_MARGIN
        self.beacon.stop_step = step
        self._say(f"nest-ssl: {name}: all ranks save after step {step} and leave")
        return None

    # ---- status ----

    def _write_status(self, rows: list[RankRow], *, now: bool = False) -> None:
        """What `nest-ssl doctor RUN_DIR` reads of a run whose processes are gone."""
        if time.monotonic() < self._next_status and not now:
            return
        self._next_status = time.monotonic() + STATUS_EVERY_S
        with contextlib.suppress(OSError):  # a full disk is for those to report whose work it stops
            write_status(self.settings, rows, os.getpid())

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def main(settings_path: str) -> int:
    settings = Settings.read(Path(settings_path))
    if settings.parent:
        die_with_parent(settings.parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it leaves when the ranks have left
    return Monitor(settings).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
