"""The monitor: one process per node, outside the ranks, that looks four times a second and never takes part.

It names the rank that stalls, keeps evidence, ends the job, and chooses the step at which all ranks stop when one is
asked to. It imports no torch: it starts in a tenth of a second and cannot hang in what it watches. With several
nodes, the monitor of node 0 judges; the others report what they see and do what it orders.
"""

from __future__ import annotations

import math
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from nest_ssl.files import replace_text
from nest_ssl.run_folder import INCIDENTS
from nest_ssl.watchdog.beacon import NO_STEP
from nest_ssl.watchdog.exchange import Follower, Leader, NodeReport
from nest_ssl.watchdog.judge.blame import (
    Slow,
    Verdict,
    find_slow,
    is_suspicious,
    judge_abort,
    judge_dead,
    judge_stalled,
    with_last_calls,
)
from nest_ssl.watchdog.judge.flight import Flight
from nest_ssl.watchdog.node import EVIDENCE_WAIT_S, Node
from nest_ssl.watchdog.rank import NEEDS_A_PERSON, RESUMABLE, RankState, Stage
from nest_ssl.watchdog.report.incident import (
    exit_code_of,
    headline,
    incident_name,
    make_incident,
    write_incident,
)
from nest_ssl.watchdog.report.status import Settings
from nest_ssl.watchdog.rows import RankRow, absent_row
from nest_ssl.watchdog.system import die_with_parent, say, signal_name, within

LOOK_EVERY_S = 0.25
SETTLE_S = 0.3
"""How long to wait after the first sign of a death: other ranks may have failed earlier and be about to report."""
LOST_PEER_S = 2.0
STOP_MARGIN = 2
"""Steps between the decision to stop and the stop, so that no rank has passed the stop before it learns of it."""
OTHER_NODES_S = 2.0
"""Time that the decision to stop needs to reach other nodes."""
REPORT_S = 20.0
"""A report that takes longer than this is given up: the disk does not respond."""
WARN_FROM_S = 10.0
"""A warning is printed at half the limit, unless that is shorter than this."""


class Monitor:
    """Observes, judges, reports and ends: for one node, or for all of them."""

    def __init__(self, settings: Settings, leader: Leader | None = None) -> None:
        self.settings, self.leader = settings, leader
        self.node = Node(settings)
        self.run_dir = Path(settings.run_dir)
        self._since = time.monotonic()
        self._dead_since: float | None = None
        self._reported: set[tuple[object, ...]] = set()
        self._slow: Slow | None = None
        self._started: tuple[float, int] | None = None

    def run(self) -> int:
        """Watch until all ranks have left or the job is ended; return the job's exit code."""
        while True:
            self.node.beacon.beat_monitor()
            rows = self._rows()
            own = [row for row in rows if row.node == self.settings.node]
            self.node.write_status(own)
            over = all(row.is_gone and not row.is_active for row in rows)
            code = 0 if over else self._look(rows)
            if code is not None:
                self.node.write_status(own, now=True)
                return code
            time.sleep(LOOK_EVERY_S)

    def _rows(self) -> list[RankRow]:
        """Return all ranks now; before the first step also those of nodes that have not reported yet."""
        rows = self.node.rows() + (self.leader.rows() if self.leader is not None else [])
        if any(row.stage is Stage.INIT and row.is_active for row in rows):
            known = {row.rank for row in rows}
            waited_s = time.monotonic() - self._since
            rows += [
                absent_row(rank, waited_s, self.settings.init_s)
                for rank in range(self.node.beacon.world_size)
                if rank not in known
            ]
        return rows

    def _look(self, rows: list[RankRow]) -> int | None:
        """Take one look; return an exit code when the job is over."""
        dead = self._dead(rows)
        if dead is not None:
            if dead.kind == "died" and dead.row.exit_status == -signal.SIGABRT:
                dead = judge_abort(dead, rows, self._flights(rows))
            elif dead.kind == "left-early":
                dead = with_last_calls(dead, self._flights(rows))
            return self._end(dead, rows)
        if self._dead_since is None and self.settings.judges:
            if is_suspicious(rows, self.settings.floor_s):
                flights = self._flights(rows)
                # That took a moment: a rank that has moved on since then is not stalled.
                verdict = judge_stalled(self._rows(), flights, self.settings.floor_s)
                if verdict is not None and (code := self._stalled(verdict)) is not None:
                    return code
            self._warn_early(rows)
            self._warn_slow()
        return self._stop(rows)

    def _flights(self, rows: list[RankRow]) -> dict[int, Flight]:
        own = [row for row in rows if row.node == self.settings.node]
        if self.leader is None:
            return self.node.flights(own)
        self.leader.orders.evidence_request += 1
        flights = self.node.flights(own)
        time.sleep(EVIDENCE_WAIT_S + LOOK_EVERY_S)  # the others ask their ranks, and report at their next look
        return flights | self.leader.flights(self.leader.orders.evidence_request)

    # ---- dead ----

    def _dead(self, rows: list[RankRow]) -> Verdict | None:
        if not any(row.state is RankState.FAILED or (row.is_gone and row.is_active) for row in rows):
            return None
        now = time.monotonic()
        self._dead_since = self._dead_since or now
        if now - self._dead_since < SETTLE_S:
            return None
        failures = self.node.failures() | (self.leader.failures() if self.leader is not None else {})
        verdict = judge_dead(rows, failures)
        lost_peer = verdict is not None and verdict.failure is not None and verdict.failure.is_lost_peer
        return None if lost_peer and now - self._dead_since < LOST_PEER_S else verdict

    def _end(self, verdict: Verdict, rows: list[RankRow]) -> int:
        failure = verdict.failure
        if failure is not None and failure.is_plain and verdict.row.stage is Stage.INIT:
            who = "" if len(rows) == 1 else f"rank {failure.rank}: "
            say(f"nest-ssl: {who}{failure.message}")  # as with a single process: the message says it all
            return self._leave(NEEDS_A_PERSON, None, None)
        return self._leave(exit_code_of(verdict), self._report(verdict), verdict)

    # ---- stalled ----

    def _stalled(self, verdict: Verdict) -> int | None:
        if self.settings.ends:
            return self._leave(exit_code_of(verdict), self._report(verdict), verdict)
        key = (verdict.kind, tuple((row.rank, row.step, verdict.place_of(row)) for row in verdict.culprits))
        if key not in self._reported:
            self._reported.add(key)
            self._report(verdict)
        return None

    # ---- report and end ----

    def _report(self, verdict: Verdict) -> str:
        """Write ten lines to the terminal and to a file, and the evidence; return the incident's name."""
        name = incident_name(verdict)
        try:
            within(REPORT_S, lambda: self._say_and_keep(verdict, name))
        except Exception as error:  # the job must be ended, whatever prevents the report
            say(f"nest-ssl: {headline(verdict)}")
            say(f"nest-ssl: {self.run_dir / INCIDENTS / name}: the evidence could not be written: {error}")
        return name

    def _say_and_keep(self, verdict: Verdict, name: str) -> None:
        failure = verdict.failure
        stack = failure.innermost_frames[:3] if failure is not None else self.node.innermost_frames(verdict)
        incident = make_incident(verdict, stack, self.run_dir, name, self.settings.resume_command)
        if failure is not None and failure.traceback and not failure.is_plain and not failure.is_lost_peer:
            say(failure.short_traceback)
        say(incident.text)
        folder = self.run_dir / INCIDENTS / name
        try:
            write_incident(incident, self.run_dir)
            self.node.keep_evidence(folder)
            if failure is not None:
                replace_text(folder / "traceback.txt", failure.traceback, sync=False)
        except OSError as error:
            say(f"nest-ssl: {folder}: the evidence could not be written: {error.strerror or error}")

    def _leave(self, code: int, incident: str | None, verdict: Verdict | None) -> int:
        fault = None if verdict is None else [verdict.kind, verdict.ranks, verdict.stage.label, verdict.step]
        content: dict[str, Any] = {"exit_code": code, "incident": incident, "fault": fault}
        if self.leader is not None:
            self.leader.orders.end = content
        self.node.end(content)
        if self.leader is not None:
            time.sleep(3 * LOOK_EVERY_S)  # so that the other nodes receive the order
        return code

    # ---- warnings ----

    def _warn_early(self, rows: list[RankRow]) -> None:
        for row in rows:
            half_s = row.limit_s / 2
            key = ("early", row.rank, row.step, row.place)
            if row.is_active and half_s >= WARN_FROM_S and row.in_stage_s > half_s and key not in self._reported:
                self._reported.add(key)
                say(
                    f"nest-ssl: warning: rank {row.rank} has been in {row.place} of step {row.step} for "
                    f"{row.in_stage_s:.0f} s; after {row.limit_s:.0f} s it counts as stalled"
                )

    def _warn_slow(self) -> None:
        if not self.node.recent.update():
            return
        before, self._slow = self._slow, find_slow(self._rows())  # with the window that has just ended
        slow = self._slow
        if slow is None or before is None or (slow.rank, slow.stage) != (before.rank, before.stage):
            return
        if ("slow", slow.rank, slow.stage) not in self._reported:
            self._reported.add(("slow", slow.rank, slow.stage))
            say(f"nest-ssl: warning: {slow}")

    # ---- stopping together ----

    def _stop(self, rows: list[RankRow]) -> int | None:
        """Choose the step after which all ranks save and exit, once one of them or a launcher is asked to stop."""
        step_now = max(row.step for row in rows)
        if self._started is None and step_now > 0:
            self._started = (time.monotonic(), step_now)
        asked = max(self.node.beacon.stop_signal, *(row.stop_signal for row in rows))
        asked = max(asked, self.leader.stop_signal() if self.leader is not None else 0)
        if not asked or self.node.beacon.stop_step != NO_STEP:
            return None
        name = signal_name(asked)
        if not self.settings.saves or any(row.stage is Stage.INIT and row.is_active for row in rows):
            why = "nothing to save before the first step" if self.settings.saves else "without saving, as configured"
            say(f"nest-ssl: {name}: stopped; {why}")
            return self._leave(RESUMABLE, None, None)
        step = step_now + STOP_MARGIN + (self._steps_in(OTHER_NODES_S, step_now) if self.leader is not None else 0)
        if self.leader is not None:
            self.leader.orders.stop_step = step
        self.node.stop_at(step)
        say(f"nest-ssl: {name}: all ranks will save and exit by step {step}")
        return None

    def _steps_in(self, seconds: float, step_now: int) -> int:
        """Return the number of steps that the ranks make in this time, at their speed so far."""
        if self._started is None:
            return 0
        since, first = self._started
        return math.ceil(seconds * (step_now - first + 1) / max(time.monotonic() - since, 0.1))


def follow(settings: Settings, follower: Follower) -> int:
    """Monitor a node other than the first: report, obey, and judge alone once contact with the leader is lost."""
    node = Node(settings)
    request = 0
    report = NodeReport()
    while True:
        node.beacon.beat_monitor()
        node.recent.update()
        report.rows, report.failures = node.rows(), node.failures()
        report.stop_signal = node.beacon.stop_signal
        node.write_status(report.rows)
        orders = follower.send(report)
        if all(row.is_gone and not row.is_active for row in report.rows):
            node.write_status(report.rows, now=True)
            return 0
        if orders is None and follower.has_lost_leader:
            say(f"nest-ssl: warning: lost contact with the monitor on node 0; node {settings.node} now monitors itself")
            return Monitor(settings).run()
        if orders is not None and orders.end is not None:
            if orders.end["incident"]:
                node.keep_evidence(Path(settings.run_dir) / INCIDENTS / orders.end["incident"])
            node.end(orders.end)
            return int(orders.end["exit_code"])
        if orders is not None:
            node.stop_at(orders.stop_step)
            if orders.evidence_request > request:
                request = report.evidence_given = orders.evidence_request
                report.flights = node.flights(report.rows)
                continue  # report at once
        time.sleep(LOOK_EVERY_S)


def watch(settings: Settings) -> int:
    """Monitor a single node, or one of several as leader or follower; return the job's exit code."""
    if settings.num_nodes == 1:
        return Monitor(settings).run()
    job = f"{settings.leader_address}:{settings.leader_port} {settings.run_dir}"
    if settings.node > 0:
        return follow(
            settings, Follower(settings.leader_address, settings.leader_port, job, settings.node, settings.init_s)
        )
    try:
        leader = Leader(settings.leader_port, job)
    except OSError as error:
        say(f"nest-ssl: warning: port {settings.leader_port}: {error.strerror}; every node monitors itself")
        return Monitor(settings).run()
    try:
        return Monitor(settings, leader).run()
    finally:
        leader.close()


def main(settings_path: str) -> int:
    settings = Settings.read(Path(settings_path))
    if settings.parent:
        die_with_parent(settings.parent)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)  # it exits once the ranks have
    code = watch(settings)
    if not settings.parent:  # no launcher is there to do it
        shutil.rmtree(Path(settings.beacon).parent, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
