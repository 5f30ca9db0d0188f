"""The monitor: one process per node, outside the ranks, that looks four times a second and never takes part.

It names the rank that stalls, keeps evidence, ends the job, and chooses the step at which all ranks stop when one is
asked to. It imports no torch: it starts in a tenth of a second and cannot hang in what it watches. With several
nodes, the monitor of node 0 judges; the others report what they see and do what it orders.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nest_ssl.files import replace_text
from nest_ssl.run_folder import INCIDENTS
from nest_ssl.watchdog.beacon import NO_STEP, Beacon
from nest_ssl.watchdog.exchange import (
    SECRET_VARIABLE,
    URGENT_S,
    Follower,
    Leader,
    NodeReport,
    Orders,
    job_secret,
    report_every_s,
)
from nest_ssl.watchdog.judge.blame import (
    Slow,
    Verdict,
    find_slow,
    is_suspicious,
    judge_abort,
    judge_dead,
    judge_stalled,
    suspect_by_gpu,
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
from nest_ssl.watchdog.rows import CONTACT_LOST_S, GONE, WAITS, RankRow, absent_row
from nest_ssl.watchdog.system import die_with_parent, kill_all, say, signal_name, within

LOOK_EVERY_S = 0.25
SETTLE_S = 0.3
"""How long to wait after the first sign of a death: other ranks may have failed earlier and be about to report."""
LOST_PEER_S = 2.0
"""How long to look for who is gone when ranks have only lost their connections; with several nodes as long as it takes
to notice that one is silent."""
ASK_AGAIN_S = 30.0
"""Ranks that are late are asked for their collectives this often, and once more before anybody is blamed."""
FRESH_S = 2.0
LONE_GAP_S = 2.0
"""A thread that has not run for this long was stopped together with the rank it watches."""
STOP_MARGIN = 2
"""Steps between the decision to stop and the stop, so that no rank has passed the stop before it learns of it."""
OTHER_NODES_S = 2.0
"""Time that the decision to stop needs to reach other nodes, at least; a node that reports seldom needs longer."""
AGREE_WITHIN_S = 10.0
"""After this long the stop is agreed without the nodes that have not acknowledged it: clusters kill after 30 s."""
REPORT_S = 20.0
"""A report that takes longer than this is given up: the disk does not respond."""
WARN_FROM_S = 10.0
"""A warning is printed at half the limit, unless that is shorter than this."""


class Monitor:
    """Observes, judges, reports and ends: for one node, or for all of them."""

    def __init__(self, settings: Settings, leader: Leader | None = None, node: Node | None = None) -> None:
        self.settings, self.leader = settings, leader
        self.node = node or Node(settings)
        self.leader_is_lost = False
        """It judges in place of a leader that it once had: perhaps node 0 is gone."""
        self.run_dir = Path(settings.run_dir)
        self._since = time.monotonic()
        self._dead_since: float | None = None
        self._evidence: dict[int, Flight] = {}
        self._asked_at = -math.inf
        self._reported: set[tuple[object, ...]] = set()
        self._slow: Slow | None = None
        self._started: tuple[float, int] | None = None
        self._stop_since: float | None = None
        self._stop_margin = STOP_MARGIN

    def run(self) -> int:
        """Watch until all ranks have left or the job is ended; return the job's exit code."""
        while True:
            self.node.beacon.beat_monitor()
            rows = self._rows()
            own = [row for row in rows if row.node == self.settings.node]
            self.node.write_status(own)
            over = all((row.is_gone and not row.is_active) or row.is_lost for row in rows)
            code = 0 if over else self._look(rows)
            if code is not None:
                self.node.write_status(own, now=True)
                return code
            time.sleep(self._look_every_s())

    def _look_every_s(self) -> float:
        """Thousands of ranks are looked at less often: their nodes report less often, too."""
        return LOOK_EVERY_S if self.leader is None else max(LOOK_EVERY_S, report_every_s(self.settings.num_nodes) / 4)

    def look_alone(self) -> int | None:
        """Take one look at the ranks of this node; return an exit code when the job is over."""
        return self._look(self._rows())

    def _rows(self) -> list[RankRow]:
        """Return all ranks now; before the first step also those of nodes that have not reported yet."""
        rows = self.node.rows() + (self.leader.rows() if self.leader is not None else [])
        if self.leader_is_lost:
            rows += [_lost_row(rank) for rank in range(min(self.node.beacon.local_ranks, self.node.beacon.first_rank))]
        elif any(row.stage is Stage.INIT and row.is_active for row in rows):
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
                verdict = self._judge(rows)
                if verdict is not None and (code := self._stalled(verdict)) is not None:
                    return code
            self.warn_early(rows)
            self._warn_slow()
        return self._stop(rows)

    def _judge(self, rows: list[RankRow]) -> Verdict | None:
        """Judge by evidence of the last 30 s, and blame nobody before it has been confirmed by fresh evidence.

        Asking takes a moment: a rank that has moved on since then is not stalled.
        """
        floor_s = self.settings.floor_s
        if time.monotonic() - self._asked_at > ASK_AGAIN_S:
            self._ask(rows)
            rows = self._rows()
        verdict = judge_stalled(rows, self._evidence, floor_s)
        if verdict is None or self._key(verdict) in self._reported or time.monotonic() - self._asked_at < FRESH_S:
            return verdict
        self._ask(rows)
        return judge_stalled(self._rows(), self._evidence, floor_s)

    def _ask(self, rows: list[RankRow]) -> None:
        self._evidence = self._flights(rows)
        self._asked_at = time.monotonic()

    def _flights(self, rows: list[RankRow]) -> dict[int, Flight]:
        own = [row for row in rows if row.node == self.settings.node]
        if self.leader is None:
            return self.node.flights(own)
        self.leader.orders.evidence_request += 1
        flights = self.node.flights(own)
        request, deadline = self.leader.orders.evidence_request, time.monotonic() + EVIDENCE_WAIT_S
        deadline += report_every_s(self.settings.num_nodes, urgent=True)
        while time.monotonic() < deadline and not self.leader.has_all_flights(request):
            time.sleep(0.02)  # the others ask their ranks, and report at their next look
        return flights | self.leader.flights(request)

    # ---- dead ----

    def _dead(self, rows: list[RankRow]) -> Verdict | None:
        if not any(row.state is RankState.FAILED or (row.is_gone and row.is_active) for row in rows):
            self._dead_since = None
            return None
        now = time.monotonic()
        self._dead_since = self._dead_since or now
        if now - self._dead_since < SETTLE_S:
            return None
        failures = self.node.failures() | (self.leader.failures() if self.leader is not None else {})
        verdict = judge_dead(rows, failures)
        lost_peer = verdict is not None and verdict.failure is not None and verdict.failure.is_lost_peer
        patience_s = LOST_PEER_S if self.leader is None else CONTACT_LOST_S + 1.0
        return None if lost_peer and now - self._dead_since < patience_s else verdict

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
        self.report_once(verdict)
        return None

    def report_once(self, verdict: Verdict) -> None:
        """Report a stall, unless it is the same as before."""
        key = self._key(verdict)
        if key not in self._reported:
            self._reported.add(key)
            self._report(verdict)

    def _key(self, verdict: Verdict) -> tuple[object, ...]:
        return (verdict.kind, tuple((row.rank, row.step, verdict.place_of(row)) for row in verdict.culprits))

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
        if failure is not None and not failure.speaks_for_itself:
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
        if self.leader is not None:  # so that the other nodes receive the order
            time.sleep(LOOK_EVERY_S + 2 * report_every_s(self.settings.num_nodes))
        return code

    # ---- warnings ----

    def warn_early(self, rows: list[RankRow]) -> None:
        """Name those for whom the others wait, at half their limit; of ranks that wait for each other, nobody."""
        for row in _behind(rows):
            half_s = row.limit_s / 2
            key = ("early", row.rank, row.step, row.place)
            if half_s >= WARN_FROM_S and row.in_stage_s > half_s and key not in self._reported:
                self._reported.add(key)
                stopped = ", stopped by a signal" if row.is_stopped else ""
                say(
                    f"nest-ssl: warning: rank {row.rank} has been in {row.place} of step {row.step} for "
                    f"{row.in_stage_s:.0f} s{stopped}; after {row.limit_s:.0f} s it counts as stalled"
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
        """Choose the step after which all ranks save and exit, once one of them or a launcher is asked to stop.

        It is agreed once every node has acknowledged it. If a rank comes to it before that, it is put off.
        """
        step_now = max(row.step for row in rows)
        if self._started is None and step_now > 0:
            self._started = (time.monotonic(), step_now)
        asked = max(self.node.beacon.stop_signal, *(row.stop_signal for row in rows))
        asked = max(asked, self.leader.stop_signal() if self.leader is not None else 0)
        if self.node.beacon.stop_step != NO_STEP:
            self._agree(step_now)
            return None
        if not asked:
            return None
        name = signal_name(asked)
        if not self.settings.saves or any(row.stage is Stage.INIT and row.is_active for row in rows):
            why = "nothing to save before the first step" if self.settings.saves else "without saving, as configured"
            say(f"nest-ssl: {name}: stopped; {why}")
            return self._leave(RESUMABLE, None, None)
        step = self._propose(step_now)
        say(f"nest-ssl: {name}: all ranks will save and exit by step {step}")
        self._agree(step_now)
        return None

    def _propose(self, step_now: int) -> int:
        """Choose a stop step that no rank of this node has passed, however late this process was."""
        while True:
            reach = self._steps_in(self._reach_s(), step_now) if self.settings.num_nodes > 1 else 0
            step = step_now + self._stop_margin + reach
            self._stop_margin *= 2  # for the next time: it was too little
            self.node.stop_at(step)
            if self.node.stop_acknowledged == step:
                return step
            step_now = max(step_now, self.node.latest_step())

    def _agree(self, step_now: int) -> None:
        """Agree on the stop step if all nodes know it; put it off if a rank may have reached it before.

        Ranks that have reached it wait meanwhile. A new monitor continues with what the beacon says.
        """
        beacon, now = self.node.beacon, time.monotonic()
        self._stop_since = self._stop_since or now
        if beacon.stop_agreed != beacon.stop_step:
            missing = self._nodes_without(beacon.stop_step)
            if not missing:
                beacon.stop_agreed = beacon.stop_step
            elif step_now + 1 >= beacon.stop_step:
                nodes = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
                if now - self._stop_since > AGREE_WITHIN_S:
                    beacon.stop_agreed = beacon.stop_step
                    say(f"nest-ssl: warning: {nodes} did not confirm the stop; the others save and exit now")
                else:
                    step = self._propose(step_now)
                    say(f"nest-ssl: {nodes} did not confirm in time: all ranks will save and exit by step {step}")
        if self.leader is not None:
            self.leader.orders.stop_step, self.leader.orders.stop_agreed = beacon.stop_step, beacon.stop_agreed

    def _nodes_without(self, stop_step: int) -> list[int]:
        """Return the nodes of which it is not known that they have acknowledged this step."""
        own = [] if self.node.stop_acknowledged == stop_step else [self.settings.node]
        if self.leader is not None:
            return own + self.leader.nodes_without(stop_step)
        return own + [node for node in range(self.settings.num_nodes) if node != self.settings.node]

    def _reach_s(self) -> float:
        return OTHER_NODES_S + report_every_s(self.settings.num_nodes)

    def _steps_in(self, seconds: float, step_now: int) -> int:
        """Return the number of steps that the ranks make in this time, at their speed so far."""
        if self._started is None:
            return 0
        since, first = self._started
        return math.ceil(seconds * (step_now - first + 1) / max(time.monotonic() - since, 0.1))


def watch_lone_rank(monitor: Monitor, leave: Callable[[], None], over: threading.Event) -> None:
    """Watch the only rank of a run from a thread of its own process, until it is `over`.

    It names a file that blocks, a worker that was stopped and a step that hangs, and then calls `leave`. Unlike a
    monitor it does not see a process that was killed, and nothing while something holds the GIL.
    """
    settings, floor_s = monitor.settings, monitor.settings.floor_s
    since = looked_at = time.monotonic()
    while not over.wait(LOOK_EVERY_S):
        now = time.monotonic()
        if now - looked_at > LONE_GAP_S:  # the process itself was stopped (Ctrl-Z): time begins again
            since = now
        looked_at = now
        rows = monitor.node.rows()
        monitor.warn_early(rows)
        verdict = judge_stalled(rows, {}, floor_s)
        if verdict is None or now - since < (verdict.limit_s if verdict.worker is None else floor_s):
            continue
        monitor.report_once(verdict)
        if settings.ends and not over.is_set():
            kill_all({w.pid for row in rows for w in row.workers if w.number >= 0 and w.process not in GONE})
            leave()
        looked_at = time.monotonic()


def _behind(rows: list[RankRow]) -> list[RankRow]:
    """Return the ranks for whom others wait: not one that waits itself, in a collective or for others to join."""
    active = [row for row in rows if row.is_active and not row.is_lost]
    if (suspected := suspect_by_gpu(active)) is not None and suspected.kind != "gpu-unfinished":
        return suspected.culprits
    if not active:
        return []
    first = min((row.step, row.stage, row.is_joining) for row in active)
    behind = [row for row in active if (row.step, row.stage, row.is_joining) == first]
    waits_together = len(active) > 1 and (behind[0].stage in WAITS or behind[0].is_joining)
    return [row for row in behind if row.is_stopped or not waits_together]


def _lost_row(rank: int) -> RankRow:
    """Return a rank of node 0, of which nothing is known since its monitor does not respond."""
    row = absent_row(rank, 0.0, math.inf)
    return dataclasses.replace(row, node=0, state=RankState.RUNNING, silent_s=2 * CONTACT_LOST_S)


class Following:
    """The monitor of a node other than the first: it reports and obeys, and judges alone while it has no leader."""

    def __init__(self, settings: Settings, follower: Follower) -> None:
        self.settings, self.follower = settings, follower
        self.node = Node(settings)
        self._alone: Monitor | None = None
        self._request = 0
        self._report = NodeReport()
        self._wrong: object = None
        self._urgent_until = self._next_report = 0.0

    def run(self) -> int:
        """Watch until all ranks of the node have left or the job is ended; return the job's exit code."""
        while True:
            code = self._look()
            if code is not None:
                return code
            time.sleep(LOOK_EVERY_S)

    def _look(self) -> int | None:
        node, report = self.node, self._report
        node.beacon.beat_monitor()
        report.rows, report.failures = node.rows(), node.failures()
        report.stop_signal, report.stop_acknowledged = node.beacon.stop_signal, node.stop_acknowledged
        node.write_status(report.rows)
        is_over = all(row.is_gone and not row.is_active for row in report.rows)
        if is_over or self._report_is_due():
            orders = self.follower.send(report)
            if orders is not None and orders.evidence_request > self._request:
                self._request = report.evidence_given = orders.evidence_request
                report.flights = node.flights(report.rows)
                report.rows = node.rows()
                orders = self.follower.send(report) or orders  # at once, and this once
            if orders is not None:
                self._has_leader()
                if orders.end is not None:
                    return self._end(orders.end)
                self._stop_as_ordered(orders)
            elif self.follower.has_lost_leader:
                self._has_no_leader()
        if is_over:
            node.write_status(report.rows, now=True)
            return 0
        if self._alone is None:
            node.recent.update()
            return None
        code = self._alone.look_alone()
        if code is not None:
            node.write_status(node.rows(), now=True)
        return code

    def _stop_as_ordered(self, orders: Orders) -> None:
        node = self.node
        if orders.stop_step > node.beacon.stop_step:
            node.stop_at(orders.stop_step)
            self._next_report = 0.0  # the leader waits for the answer
        if orders.stop_agreed != NO_STEP:
            node.beacon.stop_agreed = orders.stop_agreed

    def _report_is_due(self) -> bool:
        """Return whether it is time: often after something has happened, else as often as the leader can bear."""
        now, rows = time.monotonic(), self._report.rows
        wrong = (
            len(self._report.failures),
            self._report.stop_signal,
            [
                (row.is_gone, row.is_stopped, row.stop_signal, is_suspicious([row], self.settings.floor_s))
                for row in rows
            ],
        )
        if wrong != self._wrong:  # at once
            self._wrong, self._urgent_until, self._next_report = wrong, now + URGENT_S, now
        if now < self._next_report:
            return False
        every_s = report_every_s(self.settings.num_nodes, urgent=now < self._urgent_until)
        self._next_report = now + every_s - LOOK_EVERY_S / 2
        return True

    def _has_leader(self) -> None:
        if self._alone is not None:
            say(f"nest-ssl: node {self.settings.node} is in contact with the monitor on node 0 again")
            self._alone = None

    def _has_no_leader(self) -> None:
        if self._alone is not None:
            return
        why = "lost contact with the monitor on node 0"
        if self.follower.was_refused:
            why = f"the monitor on node 0 has another secret: set {SECRET_VARIABLE} to the same text on all nodes"
        say(f"nest-ssl: warning: {why}; node {self.settings.node} monitors itself until it is back")
        self._alone = Monitor(self.settings, node=self.node)
        self._alone.leader_is_lost = self.follower.was_answered

    def _end(self, verdict: dict[str, Any]) -> int:
        if verdict["incident"]:
            self.node.keep_evidence(Path(self.settings.run_dir) / INCIDENTS / verdict["incident"])
        self.node.end(verdict)
        return int(verdict["exit_code"])


def watch(settings: Settings) -> int:
    """Monitor a single node, or one of several as leader or follower; return the job's exit code."""
    if settings.num_nodes == 1:
        return Monitor(settings).run()
    address, port = settings.leader_address, settings.leader_port
    try:
        secret = job_secret(f"{address}:{port} {settings.run_dir}")
        if settings.node > 0:
            return Following(settings, Follower(address, port, secret, settings.node, settings.init_s)).run()
        leader = Leader(address, port, secret, settings.num_nodes, Beacon(Path(settings.beacon)).world_size)
    except (OSError, ValueError) as error:
        why = f"port {port}: {error.strerror}" if isinstance(error, OSError) else str(error)
        say(f"nest-ssl: warning: {why}; node {settings.node} monitors itself")
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
