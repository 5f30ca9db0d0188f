"""torch's flight recorder, read: which collectives each rank has asked for, and where ranks part."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Collective:
    """One call, as one rank made it."""

    number: int
    """Of the calls of its process group."""
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
"""Of one rank: process group → number → collective."""


def file_name(rank: int) -> str:
    return f"flight_recorder_rank{rank}.json"


def read_flight(path: Path) -> Flight | None:
    """What a rank wrote; None if it wrote nothing, or not yet all of it."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    flight: Flight = {}
    for entry in data.get("entries", ()):
        if not entry.get("is_p2p"):
            flight.setdefault(str(entry["process_group"][0]), {})[entry["collective_seq_id"]] = _collective(entry)
    return flight


def _collective(entry: dict[str, Any]) -> Collective:
    op = str(entry["profiling_name"]).rpartition(":")[2]
    sizes = tuple(tuple(size) for size in entry.get("input_sizes") or ())
    return Collective(
        int(entry["collective_seq_id"]), op, sizes, bool(entry["retired"]) or entry["state"] == "completed"
    )


def open_call(flight: Flight) -> Collective | None:
    """The first collective that a rank has called and that has not come back."""
    return next((call for calls in flight.values() for _, call in sorted(calls.items()) if not call.is_done), None)


def last_call(flight: Flight) -> Collective | None:
    """The collective that a rank has called last, in its first process group."""
    return next((calls[max(calls)] for _, calls in sorted(flight.items()) if calls), None)


@dataclass(frozen=True)
class Parting:
    """Where the ranks of a process group stop agreeing."""

    kind: str
    """missing: some did not call. diverged: they called different things. unfinished: all called, nothing came back."""
    culprits: list[int]
    calls: dict[int, Collective]
    """What each rank called there; who did not call is not in it."""


def find_parting(flights: dict[int, Flight]) -> Parting | None:
    """The first place where ranks part, over all process groups; None if all that was called is done."""
    for group in sorted({name for flight in flights.values() for name in flight}):
        members = {rank: flight.get(group, {}) for rank, flight in flights.items()}
        if len(members) > 1 and (parting := _part(members)) is not None:
            return parting
    return None


def _part(members: dict[int, dict[int, Collective]]) -> Parting | None:
    last = {rank: max(calls, default=0) for rank, calls in members.items()}
    lowest, highest = min(last.values()), max(last.values())
    open_numbers = [n for calls in members.values() for n, call in calls.items() if not call.is_done]
    first = min([*open_numbers, lowest + 1])
    for number in range(first, lowest + 1):  # what all have called: the same?
        calls = {rank: members[rank][number] for rank in members if number in members[rank]}
        if len({call.signature for call in calls.values()}) > 1:
            return Parting("diverged", _odd_ones(members, calls), calls)
    if lowest < highest:
        at = lowest + 1
        calls = {rank: members[rank][at] for rank in members if at in members[rank]}
        return Parting("missing", [rank for rank in members if last[rank] == lowest], calls)
    unfinished = {rank: calls[lowest] for rank, calls in members.items() if lowest in calls}
    if unfinished and not all(call.is_done for call in unfinished.values()):
        return Parting("unfinished", sorted(unfinished), unfinished)
    return None


def _odd_ones(members: dict[int, dict[int, Collective]], calls: dict[int, Collective]) -> list[int]:
    """Ranks whose call is in the minority; of two equally many, those whose call never came before."""
    ranks_of: dict[Any, list[int]] = {}
    for rank, call in calls.items():
        ranks_of.setdefault(call.signature, []).append(rank)
    fewest = min(map(len, ranks_of.values()))
    odd = {signature: ranks for signature, ranks in ranks_of.items() if len(ranks) == fewest}
    if len(odd) == len(ranks_of) > 1:
        number = next(iter(calls.values())).number
        before = {call.signature for own in members.values() for n, call in own.items() if n < number}
        unheard = {signature: ranks for signature, ranks in odd.items() if signature not in before}
        odd = unheard if 0 < len(unheard) < len(odd) else odd
    return sorted(rank for ranks in odd.values() for rank in ranks)
