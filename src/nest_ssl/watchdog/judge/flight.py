"""torch's flight recorder: which collectives each rank has called, and where the ranks diverge."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAST_CALLS, OPEN_CALLS = 32, 8


@dataclass(frozen=True)
class Collective:
    """One call of one rank."""

    number: int
    """Its sequence number in its process group."""
    op: str
    sizes: tuple[tuple[int, ...], ...]
    is_done: bool

    @property
    def signature(self) -> tuple[str, tuple[tuple[int, ...], ...]]:
        return self.op, self.sizes

    def __str__(self) -> str:
        shapes = ", ".join(f"[{', '.join(map(str, size))}]" for size in self.sizes) or "no tensor"
        return f"#{self.number} {self.op} of {shapes}"


Flight = dict[str, dict[int, Collective]]
"""The calls of one rank: process group → number → collective."""


def file_name(rank: int) -> str:
    return f"flight_recorder_rank{rank}.json"


def read_flight(path: Path) -> Flight | None:
    """Return what a rank wrote; None if it wrote nothing, or not all of it yet."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    flight: Flight = {}
    for entry in data.get("entries", ()):
        if not entry.get("is_p2p"):
            flight.setdefault(_group(entry), {})[entry["collective_seq_id"]] = _collective(entry)
    return flight


def _group(entry: dict[str, Any]) -> str:
    """Return the process group; gloo and NCCL count separately in a group that has both."""
    backend = str(entry["profiling_name"]).partition(":")[0]
    name = str(entry["process_group"][0])
    return name if backend == "gloo" else f"{name} {backend}"


def merged(recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of several recorders, in which the same one may appear twice."""
    found = {
        (entry["profiling_name"], *entry["process_group"], entry["collective_seq_id"], entry["record_id"]): entry
        for one in recorded
        for entry in one.get("entries", ())
    }
    return list(found.values())


def _collective(entry: dict[str, Any]) -> Collective:
    op = str(entry["profiling_name"]).rpartition(":")[2]
    sizes = tuple(tuple(size) for size in entry.get("input_sizes") or ())
    return Collective(
        int(entry["collective_seq_id"]), op, sizes, bool(entry["retired"]) or entry["state"] == "completed"
    )


def trimmed(flight: Flight) -> Flight:
    """Return what a judgement needs: per group the last calls, the first open ones, and one of every other signature.

    A recorder holds 2,000 calls, 1.25 MB for a node of 8 ranks as JSON; this is at most 8 kB per rank and group.
    """
    return {group: _trimmed(calls) for group, calls in flight.items()}


def _trimmed(calls: dict[int, Collective]) -> dict[int, Collective]:
    numbers = sorted(calls)
    kept = set(numbers[-LAST_CALLS:])
    kept |= set([number for number in numbers if not calls[number].is_done][:OPEN_CALLS])
    newest = {calls[number].signature: number for number in numbers}  # what was called before tells who is new
    kept |= set(sorted(newest.values())[-LAST_CALLS:])
    return {number: calls[number] for number in sorted(kept)}


def open_call(flight: Flight) -> Collective | None:
    """Return the first collective that a rank has called and that has not returned."""
    return next((call for calls in flight.values() for _, call in sorted(calls.items()) if not call.is_done), None)


def last_call(flight: Flight) -> Collective | None:
    """Return the last collective that a rank has called, in its first process group."""
    return next((calls[max(calls)] for _, calls in sorted(flight.items()) if calls), None)


@dataclass(frozen=True)
class CollectiveFault:
    """What is wrong with the collectives of a process group."""

    kind: str
    """missing: some did not call. diverged: they called different things. unfinished: all called, none returned."""
    culprits: list[int]
    calls: dict[int, Collective]
    """What each rank called there; ranks that did not call are left out."""


def find_fault(flights: dict[int, Flight]) -> CollectiveFault | None:
    """Return the first fault over all process groups; None if everything called is done."""
    for group in sorted({name for flight in flights.values() for name in flight}):
        members = {rank: flight.get(group, {}) for rank, flight in flights.items()}
        if len(members) > 1 and (fault := _group_fault(members)) is not None:
            return fault
    return None


def _group_fault(members: dict[int, dict[int, Collective]]) -> CollectiveFault | None:
    last = {rank: max(calls, default=0) for rank, calls in members.items()}
    lowest, highest = min(last.values()), max(last.values())
    open_numbers = [n for calls in members.values() for n, call in calls.items() if not call.is_done]
    first = min([*open_numbers, lowest + 1])
    for number in range(first, lowest + 1):  # all ranks have made these calls: are they the same?
        calls = {rank: members[rank][number] for rank in members if number in members[rank]}
        if len({call.signature for call in calls.values()}) > 1:
            return CollectiveFault("diverged", _odd_ones(members, calls), calls)
    if lowest < highest:
        at = lowest + 1
        calls = {rank: members[rank][at] for rank in members if at in members[rank]}
        return CollectiveFault("missing", [rank for rank in members if last[rank] == lowest], calls)
    unfinished = {rank: calls[lowest] for rank, calls in members.items() if lowest in calls}
    if unfinished and not all(call.is_done for call in unfinished.values()):
        return CollectiveFault("unfinished", sorted(unfinished), unfinished)
    return None


def _odd_ones(members: dict[int, dict[int, Collective]], calls: dict[int, Collective]) -> list[int]:
    """Return the ranks whose call is in the minority; in a tie, those whose call was never made before."""
    ranks_of: dict[Any, list[int]] = {}
    for rank, call in calls.items():
        ranks_of.setdefault(call.signature, []).append(rank)
    fewest = min(map(len, ranks_of.values()))
    odd = {signature: ranks for signature, ranks in ranks_of.items() if len(ranks) == fewest}
    if len(odd) == len(ranks_of) > 1:
        number = next(iter(calls.values())).number
        before = {call.signature for own in members.values() for n, call in own.items() if n < number}
        new = {signature: ranks for signature, ranks in odd.items() if signature not in before}
        odd = new if 0 < len(new) < len(odd) else odd
    return sorted(rank for ranks in odd.values() for rank in ranks)
