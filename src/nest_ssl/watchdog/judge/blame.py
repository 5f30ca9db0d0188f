"""Who is to blame, from facts alone: a waiting rank is never the culprit. Pure functions, so every rule has a test.

The order: a process that is gone, an exception, a stopped process, a file that does not arrive, a rank that never
joined, one that left early, one that holds the GIL, the GPUs' own marks, the flight recorder, and last the minority's
place. Collectives that were captured in a CUDA graph are in no flight recorder: there the GPUs' marks decide.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from nest_ssl.watchdog.judge.failure import Failure
from nest_ssl.watchdog.judge.flight import Collective, CollectiveFault, Flight, find_fault, last_call, open_call
from nest_ssl.watchdog.rank import RankState, Stage
from nest_ssl.watchdog.rows import WAITS, GpuRow, RankRow, WorkerRow
from nest_ssl.watchdog.system import KILLED

SILENT_S = 2.0
"""A node that has been silent for this long is the one that others have lost their connections to."""
GIL_S = 1.5
"""A rank's own thread runs four times a second; if it is this late, something holds the GIL."""
SHORT_WAIT_S = 0.5
"""A rank that has waited this long for data has used up what was prefetched."""
ON_GPU = ("gpu-stuck", "gpu-ahead", "gpu-unfinished")
"""Kinds of verdicts whose place is that of a GPU, not of its host."""
SLOW_LEAST_MS = 50.0
SLOW_LEAST_SHARE = 0.3
"""A rank is slow if it costs the others at least this much time and this share of a step."""


@dataclass(frozen=True)
class Verdict:
    """What is wrong, and which ranks caused it."""

    kind: str
    """died, lost-node, host-memory, failed, out-of-memory, lost-gpu, worker-died, stopped, worker-stopped, file,
    never-joined, left-early, gil, missing, diverged, unfinished, stalled; from the GPUs' marks host-late, gpu-stuck,
    gpu-ahead, gpu-unfinished."""
    culprits: list[RankRow]
    stalled_s: float = 0.0
    worker: WorkerRow | None = None
    failure: Failure | None = None
    fault: CollectiveFault | None = None
    waiting: list[RankRow] = field(default_factory=list)
    calls: dict[int, Collective] = field(default_factory=dict)
    """The collective in which each rank waits, where known."""

    @property
    def ranks(self) -> list[int]:
        return sorted(row.rank for row in self.culprits)

    @property
    def row(self) -> RankRow:
        """The first culprit: the one that is named."""
        return min(self.culprits, key=lambda row: row.rank)

    @property
    def gpu(self) -> GpuRow | None:
        """The first culprit's GPU, if that is where it happened; its host is ahead of a collective that hangs."""
        gpu = self.row.gpu
        is_there = self.kind in ON_GPU or (self.kind in ("diverged", "unfinished") and gpu is not None and gpu.is_busy)
        return gpu if is_there else None

    @property
    def stage(self) -> Stage:
        if self.gpu is None:
            return self.row.stage
        return Stage.TRANSFER if self.gpu.stage is Stage.END else self.gpu.stage  # it has not begun the next batch

    @property
    def step(self) -> int:
        return self.row.step if self.gpu is None else self.gpu.step

    @property
    def limit_s(self) -> float:
        return self.row.limit_s if self.gpu is None else self.gpu.limit_s

    def place_of(self, row: RankRow) -> str:
        """Return where a rank is, or where its GPU is if the GPUs' marks have decided."""
        if row.gpu is None or not row.gpu.is_busy or self.kind not in (*ON_GPU, "host-late", "diverged", "unfinished"):
            return row.place
        return f"{row.gpu.place} on the GPU"


# ---- dead ----

SELDOM = (Stage.INIT, Stage.VALIDATION, Stage.CHECKPOINT)
"""Stages whose collectives are not those of every step."""


def judge_dead(rows: Sequence[RankRow], failures: Mapping[int, Failure]) -> Verdict | None:
    """Blame a rank that is gone or has failed: the first one whose end was not a consequence of another's."""
    by_rank = {row.rank: row for row in rows}
    primary = [f for f in failures.values() if f.rank in by_rank and not f.is_lost_peer]
    died = [row for row in rows if row.is_gone and row.is_active and row.rank not in failures]
    if primary:
        failure = min(primary, key=lambda failure: failure.monotonic_ns)
        return _failed(by_rank[failure.rank], failure, rows)
    if died:
        waiting = [row for row in rows if not row.is_gone]
        killed = [row for row in died if row.exit_status in (None, KILLED) and row.oom_killer]
        return Verdict("host-memory", killed, waiting=waiting) if killed else Verdict("died", died, waiting=waiting)
    mute = [row for row in rows if row.state is RankState.FAILED and row.rank not in failures]
    if mute:
        message = "an exception that it could not write down: is /dev/shm full?"
        return Verdict("failed", mute, failure=Failure(mute[0].rank, "", message, "", 0), waiting=_others(rows, mute))
    lost = [f for f in failures.values() if f.rank in by_rank]
    left = [row for row in rows if row.state in (RankState.FINISHED, RankState.STOPPED)]
    if lost and left:  # the connection was lost because the other end had finished
        first = min(lost, key=lambda failure: failure.monotonic_ns)
        return Verdict("left-early", left, failure=first, waiting=[by_rank[failure.rank] for failure in lost])
    silent = [row for row in rows if row.silent_s > SILENT_S and row.is_active]
    if lost and silent:  # a node that is gone as a whole reports no death: its silence and the others' losses do
        silent_s = max(row.silent_s for row in silent)
        return Verdict("lost-node", silent, silent_s, waiting=[by_rank[failure.rank] for failure in lost])
    if lost:
        failure = min(lost, key=lambda failure: failure.monotonic_ns)
        return Verdict("failed", [by_rank[failure.rank]], failure=failure)
    return None


def with_last_calls(verdict: Verdict, flights: Mapping[int, Flight]) -> Verdict:
    """Return the verdict with the collectives in which the ranks that lost the connection were waiting.

    Once the connection is lost, a call that never returned counts as done: the last one is taken.
    """
    waiting = {row.rank for row in verdict.waiting}
    calls = {rank: call for rank, flight in flights.items() if rank in waiting and (call := last_call(flight))}
    return replace(verdict, calls=calls, fault=CollectiveFault("missing", verdict.ranks, calls))


def judge_abort(verdict: Verdict, rows: Sequence[RankRow], flights: Mapping[int, Flight]) -> Verdict:
    """Find the culprit behind an abort, which may have hit the victim.

    gloo aborts the process that receives data of a different size than it asked for. The rank whose call is new,
    compared with what the survivors called before, made the ranks diverge; unless several made it, or in a place where
    every call is new at first: then something else has aborted the process.
    """
    by_rank = {row.rank: row for row in rows}
    # Once the connection is lost, a call that never returned counts as done: the last one is taken.
    calls = {rank: call for rank, flight in flights.items() if (call := last_call(flight)) is not None}
    if not calls:
        return verdict
    new = [rank for rank, call in calls.items() if not _was_called_before(call, flights[rank])]
    agree = len(new) > 1 and len({calls[rank].signature for rank in new}) == 1
    if agree or any(by_rank[rank].stage in SELDOM for rank in new):
        return verdict
    culprits = [by_rank[rank] for rank in new] or verdict.culprits
    waiting = [row for row in rows if row.rank not in {culprit.rank for culprit in culprits} and not row.is_gone]
    fault = CollectiveFault("diverged", sorted(row.rank for row in culprits), calls)
    return replace(verdict, kind="diverged", culprits=culprits, fault=fault, calls=calls, waiting=waiting)


def _was_called_before(call: Collective, flight: Flight) -> bool:
    earlier = [other for calls in flight.values() for other in calls.values() if other.number < call.number]
    return call.signature in {other.signature for other in earlier}


def _failed(row: RankRow, failure: Failure, rows: Sequence[RankRow]) -> Verdict:
    waiting = _others(rows, [row])
    dead_worker = next((w for w in row.workers if w.number >= 0 and f"pid {w.pid}" in _pids(failure.message)), None)
    if failure.is_lost_worker:
        worker = dead_worker or next((w for w in row.workers if w.process in ("", "Z")), None)
        row = replace(row, stage=Stage.DATA, part=0)
        by_oom_killer = row.oom_killer and "killed by signal: Killed" in failure.message
        kind = "host-memory" if by_oom_killer else "worker-died"
        return Verdict(kind, [row], worker=worker, failure=failure, waiting=waiting)
    absent = re.search(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", failure.message)
    if absent is not None:  # debug.barrier: rank 0 lists who did not arrive
        ranks = {int(number) for number in absent[1].replace(",", " ").split()}
        culprits = [other for other in rows if other.rank in ranks]
        stalled_s = max((other.in_stage_s for other in culprits), default=0.0)
        return Verdict("missing", culprits or [row], stalled_s, failure=failure, waiting=_others(rows, culprits))
    kind = "out-of-memory" if failure.is_out_of_memory else "lost-gpu" if failure.is_lost_gpu else "failed"
    return Verdict(kind, [row], failure=failure, waiting=waiting)


def _pids(message: str) -> str:
    """Rewrite '(pid(s) 12, 13)' as '(pid 12 pid 13)', the form of a single '(pid 12)'."""
    return message.replace("pid(s) ", "pid ").replace(", ", " pid ")


# ---- stalled ----


def judge_stalled(rows: Sequence[RankRow], flights: Mapping[int, Flight], floor_s: float) -> Verdict | None:
    """Blame whoever keeps the others waiting, once that has lasted longer than the culprit's stage may."""
    verdict = _judge_stalled(rows, flights, floor_s)
    if verdict is None:
        return None
    calls = {rank: call for rank, flight in flights.items() if (call := open_call(flight)) is not None}
    return replace(verdict, calls=calls)


def _judge_stalled(rows: Sequence[RankRow], flights: Mapping[int, Flight], floor_s: float) -> Verdict | None:
    """Judge the ranks that are heard of; if all of them only wait, blame those of a node that is not."""
    known = [row for row in rows if not row.is_lost]
    lost = [row for row in rows if row.is_lost and row.is_active]
    verdict = _judge_known(known, flights, floor_s)
    if verdict is None or not lost:
        return verdict
    only_waits = verdict.kind == "stalled" and verdict.stage in WAITS
    if verdict.kind not in ("unfinished", "gpu-unfinished") and not only_waits:
        return verdict
    return Verdict("lost-node", lost, verdict.stalled_s, waiting=[row for row in known if row.is_active])


def _judge_known(rows: Sequence[RankRow], flights: Mapping[int, Flight], floor_s: float) -> Verdict | None:
    active = [row for row in rows if row.is_active]
    verdict = (
        _stopped(_present(rows), floor_s)
        or _does_not_leave(rows)
        or _blocked_file(active, floor_s)
        or _never_joined(active)
        or _left_early(rows, flights)
        or _holds_gil(active)
    )
    if verdict is not None:
        return verdict
    fault = find_fault({row.rank: flights[row.rank] for row in active if row.rank in flights})
    if fault is not None and fault.kind == "unfinished":
        # A rank that has not been heard on its collectives and is elsewhere may be the one that did not call.
        there = {(row.step, row.stage) for row in active if row.rank in fault.culprits}
        if any((row.step, row.stage) not in there for row in active if row.rank not in flights):
            fault = None
    if fault is None or fault.kind != "diverged":
        suspected = suspect_by_gpu(active)
        if suspected is not None:  # who it is, is known: there is only the time to wait for
            return _if_due(suspected, fault)
    return _by_place(active) if fault is None else _by_fault(active, fault)


def is_suspicious(rows: Sequence[RankRow], floor_s: float) -> bool:
    """Return whether a closer look is due: some rank has exceeded the limit of its stage."""
    rows = [row for row in rows if not row.is_lost]
    active = [row for row in rows if row.is_active]
    return (
        any(_is_late(row) for row in active)
        or _stopped(_present(rows), floor_s) is not None
        or _does_not_leave(rows) is not None
        or _blocked_file(active, floor_s) is not None
    )


def _is_late(row: RankRow) -> bool:
    """Return whether the rank, or its GPU with something to do, has exceeded the limit of its stage."""
    return row.in_stage_s > row.limit_s or _gpu_is_late(row)


def _gpu_is_late(row: RankRow) -> bool:
    return row.gpu is not None and row.gpu.is_busy and row.gpu.in_stage_s > row.gpu.limit_s


def _present(rows: Sequence[RankRow]) -> list[RankRow]:
    """Return the active ranks and those that have finished but not exited yet."""
    return [row for row in rows if row.is_active or not row.is_gone]


def _does_not_leave(rows: Sequence[RankRow]) -> Verdict | None:
    culprits = [row for row in _present(rows) if not row.is_active and row.in_stage_s > row.limit_s]
    if not culprits:
        return None
    return Verdict("stalled", culprits, max(row.in_stage_s for row in culprits), waiting=_others(rows, culprits))


def _stopped(active: Sequence[RankRow], floor_s: float) -> Verdict | None:
    culprits = [row for row in active if row.stopped_s > floor_s or (row.is_stopped and row.in_stage_s > row.limit_s)]
    if culprits:
        longest_s = max(max(row.stopped_s, row.in_stage_s) for row in culprits)
        return Verdict("stopped", culprits, longest_s, waiting=_others(active, culprits))
    for row in active:
        if row.waits_for_data and row.in_stage_s > SHORT_WAIT_S:
            for worker in row.workers:
                if worker.number >= 0 and min(worker.stopped_s, row.in_stage_s) > floor_s:
                    return Verdict("worker-stopped", [row], row.in_stage_s, worker, waiting=_others(active, [row]))
    return None


def _blocked_file(active: Sequence[RankRow], floor_s: float) -> Verdict | None:
    """Judge each single file by the floor, from the first batch on."""
    blocked = [
        (worker, row)
        for row in active
        if (row.waits_for_data or row.stage is Stage.INIT) and row.in_stage_s > SHORT_WAIT_S
        for worker in row.workers
        if worker.is_reading and worker.since_s > floor_s and worker.process not in ("", "Z")
    ]
    if not blocked:
        return None
    worker, row = max(blocked, key=lambda pair: pair[0].since_s)
    kind = "worker-stopped" if worker.process in ("T", "t") else "file"
    return Verdict(kind, [row], worker.since_s, worker, waiting=_others(active, [row]))


def _never_joined(active: Sequence[RankRow]) -> Verdict | None:
    joining = [row for row in active if row.is_joining]
    if not any(row.in_stage_s > row.limit_s for row in joining):
        return None
    missing = [
        row for row in active if row.state is RankState.ABSENT or (row.stage is Stage.INIT and not row.is_joining)
    ]
    if missing:
        return Verdict("never-joined", missing, max(row.in_stage_s for row in joining), waiting=joining)
    return None


def _left_early(rows: Sequence[RankRow], flights: Mapping[int, Flight]) -> Verdict | None:
    left = [row for row in rows if row.state in (RankState.FINISHED, RankState.STOPPED) or row.stage is Stage.END]
    waiting = [row for row in rows if row.is_active and row.stage is not Stage.END and row.in_stage_s > row.limit_s]
    if not left or not waiting:
        return None
    fault = find_fault({row.rank: flights[row.rank] for row in rows if row.rank in flights})
    return Verdict("left-early", left, max(row.in_stage_s for row in waiting), fault=fault, waiting=waiting)


def _holds_gil(active: Sequence[RankRow]) -> Verdict | None:
    # A launch that waits, with the GIL, for room in the queue of a busy GPU is a consequence.
    able = [row for row in active if not row.is_gone and not row.is_stopped and not (row.gpu and row.gpu.is_busy)]
    culprits = [row for row in able if row.heartbeat_s > GIL_S and row.in_stage_s > row.limit_s]
    if not culprits:
        return None
    return Verdict("gil", culprits, max(row.in_stage_s for row in culprits), waiting=_others(active, culprits))


def suspect_by_gpu(active: Sequence[RankRow]) -> Verdict | None:
    """Return for whom the GPUs wait, however short the time; None: they do not, or not all of them report.

    All ranks make the same batches, so the one that is behind keeps the others waiting in their next collective: with
    its host, if its GPU has done all it was given, else with its GPU. A host that is two steps ahead and waits for its
    own GPU never counts.
    """
    gpus = {row.rank: row.gpu for row in active if row.gpu is not None}
    if len(gpus) < len(active) or not any(gpu.is_busy for gpu in gpus.values()):
        return None
    first = min(gpu.position for gpu in gpus.values())
    behind = [row for row in active if gpus[row.rank].position == first]
    ahead = [row for row in active if gpus[row.rank].position > first]
    idle = [row for row in behind if not gpus[row.rank].is_busy]
    if idle:
        return Verdict("host-late", idle, waiting=_others(active, idle))
    if first[1] is Stage.EXCHANGE and 0 < len(ahead) < len(behind):  # nobody leaves an exchange that others are in
        return Verdict("gpu-ahead", ahead, waiting=behind)
    if ahead or len(behind) == 1:
        return Verdict("gpu-stuck", behind, waiting=ahead)
    return Verdict("gpu-unfinished", behind)


def _if_due(suspected: Verdict, fault: CollectiveFault | None) -> Verdict | None:
    """Return the verdict once the culprits, or those who wait for one that is ahead, have exceeded their limit."""
    if suspected.kind == "host-late":
        culprits = [row for row in suspected.culprits if row.in_stage_s > row.limit_s]
        stalled_s = max((row.in_stage_s for row in culprits), default=0.0)
        if fault is None or fault.kind != "missing" or fault.culprits != sorted(row.rank for row in culprits):
            fault = None
        return replace(suspected, culprits=culprits, stalled_s=stalled_s, fault=fault) if culprits else None
    judged = suspected.waiting if suspected.kind == "gpu-ahead" else suspected.culprits
    if not all(_gpu_is_late(row) for row in judged):
        return None
    return replace(suspected, stalled_s=max(row.gpu.in_stage_s for row in judged if row.gpu is not None))


def _by_fault(active: Sequence[RankRow], fault: CollectiveFault) -> Verdict | None:
    by_rank = {row.rank: row for row in active}
    culprits = [by_rank[rank] for rank in fault.culprits]
    late = [row for row in culprits if row.in_stage_s > row.limit_s]
    if fault.kind == "missing":
        culprits = late  # ranks that are behind but moving, or within the limit of a slow stage, are not stalled
    elif fault.kind == "unfinished" and len(late) < len(culprits):
        return None  # called a moment ago
    if not culprits or not any(_is_late(row) for row in active):
        return None
    stalled_s = max(row.in_stage_s for row in culprits)
    return Verdict(fault.kind, culprits, stalled_s, fault=fault, waiting=_others(active, culprits))


def _by_place(active: Sequence[RankRow]) -> Verdict | None:
    """Without collectives to compare, blame the smallest group of ranks in one place if it has been there too long."""
    groups: dict[tuple[int, str], list[RankRow]] = defaultdict(list)
    for row in active:
        groups[row.step, row.place].append(row)
    if not groups:
        return None
    # Whoever is behind and within its limit, or reads file after file, lets the others wait, and nobody is stalled.
    first = min((row.step, row.stage) for row in active)
    if all(row.in_stage_s <= row.limit_s for row in active if (row.step, row.stage) == first):
        return None
    # Among groups of equal size, the one that is behind.
    smallest = min(groups.values(), key=lambda rows: (len(rows), rows[0].step, rows[0].stage))
    others = [row for rows in groups.values() if rows is not smallest for row in rows]
    waited_s = min((row.in_stage_s for row in others), default=0.0)  # a rank that moved just now is only faster
    culprits = [row for row in smallest if row.in_stage_s > (row.limit_s if waited_s > row.limit_s else row.patience_s)]
    if not culprits:
        return None
    return Verdict("stalled", culprits, max(row.in_stage_s for row in culprits), waiting=_others(active, culprits))


def _others(rows: Sequence[RankRow], culprits: Sequence[RankRow]) -> list[RankRow]:
    blamed = {row.rank for row in culprits}
    return [row for row in rows if row.rank not in blamed and row.is_active and not row.is_gone]


# ---- slow ----


@dataclass(frozen=True)
class Slow:
    """A rank that is slower than the others: nothing hangs, but all of them wait for it in every step."""

    rank: int
    stage: str
    own_ms: float
    others_ms: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow in {self.stage}: {self.own_ms:.0f} ms per step, the others "
            f"{self.others_ms:.0f} ms; all ranks wait for it"
        )


def find_slow(rows: Sequence[RankRow]) -> Slow | None:
    """Return the rank and stage that cost the others most time, if it is enough to be worth a line."""
    found = []
    for stage in dict.fromkeys(stage for row in rows for stage in row.usual_ms):
        slowest, *others = sorted((row for row in rows if stage in row.usual_ms), key=lambda row: -row.usual_ms[stage])
        if others:
            own_ms, others_ms = slowest.usual_ms[stage], statistics.median(row.usual_ms[stage] for row in others)
            if own_ms - others_ms > max(SLOW_LEAST_MS, SLOW_LEAST_SHARE * sum(slowest.usual_ms.values())):
                found.append(Slow(slowest.rank, stage, own_ms, others_ms))
    return max(found, key=lambda slow: slow.own_ms - slow.others_ms, default=None)
