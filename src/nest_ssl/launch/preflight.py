"""The check before the first step: ranks that differ where they must not are refused, with a table of who differs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

Facts = Mapping[str, Any]


class Store(Protocol):
    """The part of torch's key-value store that is needed here."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


class RefusedError(ValueError):
    """The ranks do not match."""


def compare_ranks(store: Store, name: str, facts: Facts, *, rank: int, world_size: int, timeout_s: float) -> None:
    """Compare `facts` with those of all other ranks; RefusedError, on every rank, if they differ or one is missing.

    Rank 0 reads and judges, the others wait for its answer: no collective, and all ranks get the same answer.
    """
    prefix = f"nest-ssl/compare/{name}"
    store.set(f"{prefix}/{rank}", json.dumps(flat(facts)))
    if rank == 0:
        store.set(f"{prefix}/answer", _judge(store, prefix, world_size, timeout_s))
    _wait(store, f"{prefix}/answer", 2 * timeout_s)
    answer = store.get(f"{prefix}/answer").decode()
    if answer:
        raise RefusedError(answer)


def _judge(store: Store, prefix: str, world_size: int, timeout_s: float) -> str:
    """Return what is wrong; an empty string if nothing is."""
    deadline = time.monotonic() + timeout_s
    missing = []
    for rank in range(world_size):
        if not _wait(store, f"{prefix}/{rank}", max(deadline - time.monotonic(), 0.01)):
            missing.append(rank)
    if missing:
        return f"the ranks cannot be compared: {_ranks(missing)} did not answer within {timeout_s:.0f} s."
    return differences([json.loads(store.get(f"{prefix}/{rank}")) for rank in range(world_size)])


def _wait(store: Store, key: str, timeout_s: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError:  # torch's DistStoreError, whose message names no rank
        return False
    return True


def differences(facts_of: list[dict[str, str]]) -> str:
    """Return a table of the keys in which ranks differ, most frequent value first; empty if they agree."""
    lines = []
    for key in sorted({key for facts in facts_of for key in facts}):
        ranks_of: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_of):
            ranks_of.setdefault(facts.get(key, "(not set)"), []).append(rank)
        if len(ranks_of) > 1:
            by_number = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1]))
            lines += [f"  {key}", *(f"    {_ranks(ranks)}: {value}" for value, ranks in by_number)]
    if not lines:
        return ""
    return "\n".join(["the ranks do not match, so training would hang; they differ in", *lines])


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def flat(facts: Facts, prefix: str = "") -> dict[str, str]:
    """Flatten nested facts to dotted keys and texts; lists are leaves."""
    out: dict[str, str] = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = str(value)
    return out


def code_version(folder: Any) -> str:
    """Return a hash over the package's Python files: all ranks of a job must run the same code."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
