"""The watchdog of many nodes: what the leader costs, and how long it takes to name a stalled rank.

    python benchmarks/watchdog_scale.py --nodes 64 --seconds 300 --outage 30
    python benchmarks/watchdog_scale.py --nodes 512 --seconds 300

The leader is the real process. The other nodes share a few processes and have made-up ranks, but the real code decides
when they report, and their messages travel over real sockets. In the middle of the run all of them lose the network for
`--outage` seconds, which must not cause an alarm; at its end one rank stalls, and the others wait for it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nest_ssl.launch.launcher import free_port
from nest_ssl.watchdog import exchange
from nest_ssl.watchdog.beacon import INT32, STATE_AT, Beacon, RankMark
from nest_ssl.watchdog.exchange import Follower, NodeReport, Orders, job_secret
from nest_ssl.watchdog.judge.flight import Collective, Flight
from nest_ssl.watchdog.monitor import LOOK_EVERY_S, Following
from nest_ssl.watchdog.rank import RankState, Stage
from nest_ssl.watchdog.report.status import Settings
from nest_ssl.watchdog.rows import RankRow, WorkerRow

RANKS = 8
CALLS = 200
"""Calls in a flight recorder."""


@dataclass(frozen=True)
class Plan:
    """What happens when, in seconds of `time.monotonic`."""

    nodes: int
    floor_s: float
    outage: tuple[float, float]
    stall: float

    @property
    def stalled_rank(self) -> int:
        return RANKS * (self.nodes - 1) + 3


class SimulatedNode:
    """A node whose ranks train, and wait for the stalled one in the end."""

    def __init__(self, number: int, plan: Plan) -> None:
        self.number, self.plan = number, plan
        self.beacon = SimpleNamespace(
            beat_monitor=lambda: None,
            stop_signal=0,
            stop_step=-1,
            stop_agreed=-1,
            local_ranks=RANKS,
            first_rank=RANKS * number,
            world_size=RANKS * plan.nodes,
        )
        self.recent = SimpleNamespace(update=lambda: False)
        self.stop_acknowledged = -1
        self.ended: dict[str, Any] | None = None
        self._rows: list[RankRow] = []
        self._made_at = 0.0

    def rows(self) -> list[RankRow]:
        """Return the ranks; made-up ones change seldom, because 512 nodes share this machine."""
        now = time.monotonic()
        if now - self._made_at > (0.5 if now > self.plan.stall else 5.0) or self._made_at < self.plan.stall < now:
            self._rows = [self._row(RANKS * self.number + i, now) for i in range(RANKS)]
            self._made_at = now
        return self._rows

    def _row(self, rank: int, now: float) -> RankRow:
        stalls = now > self.plan.stall
        stage = Stage.ENCODER if rank == self.plan.stalled_rank or not stalls else Stage.EXCHANGE
        busy = [WorkerRow(9000 + i, i, "S", True, 0.01, f"/data/corpus/{i:04d}/utterance.flac") for i in range(8)]
        return RankRow(
            rank=rank,
            node=self.number,
            pid=0,
            state=RankState.RUNNING,
            process="S",
            stage=stage,
            part=0,
            step=int(min(now, self.plan.stall) * 5),
            in_stage_s=now - self.plan.stall if stalls else 0.1,
            heartbeat_s=0.1,
            steps_done=1000,
            exit_status=None,
            stop_signal=0,
            limit_s=self.plan.floor_s,
            patience_s=self.plan.floor_s,
            workers=busy,
            usual_ms={stage.label: 12.5 for stage in Stage if Stage.DATA <= stage <= Stage.OPTIMIZER},
        )

    def flights(self, rows: list[RankRow]) -> dict[int, Flight]:
        waits = {n: Collective(n, "all_reduce", ((1 << 20,),), n < CALLS) for n in range(1, CALLS + 1)}
        behind = {n: replace(call, is_done=True) for n, call in waits.items() if n < CALLS}
        return {row.rank: {"0": behind if row.rank == self.plan.stalled_rank else waits} for row in rows}

    def end(self, verdict: dict[str, Any]) -> None:
        self.ended = verdict

    def failures(self) -> dict[int, Any]:
        return {}

    def write_status(self, rows: list[RankRow], *, now: bool = False) -> None:
        pass

    def keep_evidence(self, folder: Path) -> None:
        pass

    def stop_at(self, step: int) -> None:
        pass


class UnreliableFollower(Follower):
    """Has no network during the outage."""

    outage = (0.0, 0.0)

    def send(self, report: NodeReport) -> Orders | None:
        if self.outage[0] < time.monotonic() < self.outage[1]:
            self._drop()
            return None
        return super().send(report)


def follow_as(numbers: list[int], settings: dict[str, Any], plan: Plan, queue: Any, over: Event) -> None:
    """Be the monitors of these nodes."""
    sizes: list[int] = []
    seal_line = exchange.Seal.line

    def line(self: exchange.Seal, content: dict[str, Any]) -> bytes:
        made = seal_line(self, content)
        sizes.append(len(made))
        return made

    exchange.Seal.line = line  # type: ignore[method-assign]
    UnreliableFollower.outage = plan.outage
    followers = []
    for number in numbers:
        own = Settings(**settings, node=number)
        secret = job_secret(f"{own.leader_address}:{own.leader_port} {own.run_dir}")
        following = Following.__new__(Following)
        node: Any = SimulatedNode(number, plan)
        follower = UnreliableFollower(own.leader_address, own.leader_port, secret, number, own.init_s)
        following.settings, following.follower, following.node = own, follower, node
        following._alone, following._request, following._report = None, 0, NodeReport()
        following._wrong, following._urgent_until, following._next_report = None, 0.0, 0.0
        followers.append(following)
    ended: set[int] = set()
    while len(ended) < len(followers) and not over.is_set():
        started = time.monotonic()
        for following in followers:
            if following.settings.node not in ended and following._look() is not None:
                ended.add(following.settings.node)
        time.sleep(max(0.0, LOOK_EVERY_S - (time.monotonic() - started)))
    alone = sum(following.settings.node in ended and following._alone is not None for following in followers)
    queue.put({"sizes": sizes, "ended": len(ended), "ended_alone": alone})


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3


def measure(nodes: int, seconds: float, floor_s: float, outage_s: float, processes: int) -> dict[str, Any]:
    """Run the simulation; return its figures."""
    folder = Path(tempfile.mkdtemp(prefix="watchdog-scale-"))
    beacon_folder, run_dir = folder / "beacon", folder / "run"
    beacon_folder.mkdir(mode=0o700)
    run_dir.mkdir()
    beacon = Beacon.create(
        beacon_folder / "beacon", local_ranks=RANKS, first_rank=0, world_size=RANKS * nodes, workers_per_rank=1
    )
    ranks = subprocess.Popen(["sleep", "100000"])  # what the leader may end
    begin = time.monotonic() + 3.0
    plan = Plan(nodes, floor_s, (begin + seconds / 3, begin + seconds / 3 + outage_s), begin + seconds)
    settings: dict[str, Any] = {
        "beacon": str(beacon.path),
        "run_dir": str(run_dir),
        "floor_s": floor_s,
        "init_s": 900.0,
        "judges": True,
        "ends": True,
        "saves": True,
        "parent": 0,
        "resume_command": "",
        "num_nodes": nodes,
        "leader_port": free_port(),
    }
    Settings(**settings, node=0).write(beacon_folder / "monitor.json")
    marks = [RankMark(beacon, i) for i in range(RANKS)]
    for i, mark in enumerate(marks):
        mark.take()
        beacon.set_pid(i, ranks.pid)
        INT32.pack_into(beacon.map, beacon.rank_at(i) + STATE_AT, RankState.RUNNING)
        mark.finish_step(1)
    leader = subprocess.Popen([sys.executable, "-m", "nest_ssl.watchdog.monitor", str(beacon_folder / "monitor.json")])
    context = multiprocessing.get_context("spawn")
    queue, over = context.Queue(), context.Event()
    parts = [list(range(1, nodes))[i::processes] for i in range(processes)]
    followers = [context.Process(target=follow_as, args=(part, settings, plan, queue, over)) for part in parts if part]
    for process in followers:
        process.start()
    shares, used, at = [], cpu_s(leader.pid), time.monotonic()
    pss, is_early = 0.0, False
    named_after_s: float | None = None
    while time.monotonic() < plan.stall + floor_s + 30.0:
        now = time.monotonic()
        for mark in marks:
            mark.beat()
            if now < plan.stall:
                mark.enter(Stage.EXCHANGE)
                mark.finish_step(int(now * 5))
        if leader.poll() is None and now < plan.stall and now - at > 5.0:
            shares.append((cpu_s(leader.pid) - used) / (now - at))
            used, at, pss = cpu_s(leader.pid), now, max(pss, pss_mb(leader.pid))
        if incidents := list((run_dir / "incidents").glob("*.json")):
            named_after_s, is_early = now - plan.stall - floor_s, now < plan.stall
            break
        time.sleep(0.05)
    try:
        leader.wait(timeout=60)
    except subprocess.TimeoutExpired:
        leader.kill()
        leader.wait()
    over.set()
    told = [queue.get(timeout=60) for _ in followers]
    for process in followers:
        process.join()
    ranks.kill()
    ranks.wait()
    sizes = sorted(size for part in told for size in part["sizes"])
    incident = json.loads(incidents[0].read_text()) if incidents else {}
    return {
        "nodes": nodes,
        "seconds": seconds,
        "outage_s": outage_s,
        "false_alarm": is_early,
        "named": incident.get("ranks"),
        "stalled_rank": plan.stalled_rank,
        "named_after_floor_s": None if named_after_s is None else round(named_after_s, 2),
        "leader_cpu_share": round(statistics.mean(shares), 4) if shares else None,
        "leader_cpu_share_highest_5_s": round(max(shares), 4) if shares else None,
        "leader_pss_mb": round(pss, 1),
        "messages": len(sizes),
        "message_bytes_median": sizes[len(sizes) // 2] if sizes else None,
        "message_bytes_largest": sizes[-1] if sizes else None,
        "ended_by_leader": sum(part["ended"] - part["ended_alone"] for part in told),
        "ended_alone": sum(part["ended_alone"] for part in told),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0, help="of healthy training before a rank stalls")
    parser.add_argument("--floor-s", type=float, default=60.0, help="watchdog.floor_s")
    parser.add_argument("--outage", type=float, default=30.0, help="seconds without a network")
    parser.add_argument("--processes", type=int, default=4, help="that the other nodes share")
    options = parser.parse_args()
    figures = measure(options.nodes, options.seconds, options.floor_s, options.outage, options.processes)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
