"""Comparing ranks: a difference is refused on every rank, with a table of who differs."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nest_ssl.launch.launcher import free_port
from nest_ssl.launch.preflight import RefusedError, code_version, compare_ranks, differences, flat


def compare_all(facts: list[dict[str, object]], timeout_s: float = 5.0, absent: int | None = None) -> list[str]:
    """What each rank is told, over a real store."""
    port = free_port()
    answers = ["" for _ in facts]

    def run(rank: int) -> None:
        store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=20), wait_for_workers=False)
        stores.append(store)
        try:
            compare_ranks(store, "test", facts[rank], rank=rank, world_size=len(facts), timeout_s=timeout_s)
        except RefusedError as error:
            answers[rank] = str(error)

    stores: list[TCPStore] = []
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(facts)) if rank != absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_equal_ranks_may_start() -> None:
    assert compare_all([{"plan": "a", "n": 1}] * 3) == ["", "", ""]


def test_every_rank_is_told_who_differs_and_in_what() -> None:
    answers = compare_all([{"loader": {"batches": 3, "plan": "a"}}, {"loader": {"batches": 2, "plan": "a"}}])
    assert answers[0] == answers[1]
    assert "loader.batches\n    rank 0: 3\n    rank 1: 2" in answers[0]
    assert "plan" not in answers[0]


def test_a_rank_that_does_not_answer_is_named() -> None:
    answers = compare_all([{"a": 1}] * 3, timeout_s=1.0, absent=1)
    assert "rank 1 did not answer within 1 s" in answers[0]
    assert answers[2] == answers[0]


def test_the_majority_comes_first_and_a_missing_key_is_shown() -> None:
    facts = [flat({"x": 1}), flat({"x": 2}), flat({"x": 1}), flat({})]
    table = differences(facts)
    assert table.index("ranks 0, 2: 1") < table.index("rank 1: 2") < table.index("rank 3: (not set)")


def test_the_code_version_changes_with_the_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = code_version(tmp_path)
    assert code_version(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert code_version(tmp_path) != before


@pytest.mark.parametrize("facts", [{"a": {"b": [1, 2]}, "c": None}])
def test_nested_facts_become_dotted_keys(facts: dict[str, object]) -> None:
    assert flat(facts) == {"a.b": "[1, 2]", "c": "None"}
