"""Rows: what the monitor knows about a rank at one look, and how long the rank may take."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nest_ssl.watchdog.beacon import WORD, Beacon, GpuLog, RankMark, WorkerMark
from nest_ssl.watchdog.judge.blame import is_suspicious, judge_stalled
from nest_ssl.watchdog.rank import Stage, validation_part
from nest_ssl.watchdog.rows import Limits, RankRow, local_rows


@pytest.fixture
def beacon(tmp_path: Path) -> Beacon:
    return Beacon.create(tmp_path / "beacon", local_ranks=2, first_rank=4, world_size=8, workers_per_rank=3)


def test_limits_grow_with_what_a_stage_usually_takes(beacon: Beacon) -> None:
    limits = Limits(floor_s=3.0, init_s=60.0)
    mark = RankMark(beacon, 0)
    mark.take()

    def limit_s(stage: Stage) -> float:
        mark.enter(stage)
        return local_rows(beacon, limits, 0)[0].limit_s

    assert limit_s(Stage.INIT) == 60.0
    assert limit_s(Stage.ENCODER) == 60.0  # the first step may compile
    mark.finish_step(1, counts=False)
    assert limit_s(Stage.ENCODER) == 3.0
    mark._spent_ns[Stage.ENCODER] = 2_000_000_000
    mark.finish_step(2)
    assert 10.0 <= limit_s(Stage.ENCODER) <= 12.5
    assert limit_s(Stage.CHECKPOINT) == 30.0


def test_rows_travel_as_json(beacon: Beacon) -> None:
    RankMark(beacon, 0).take()
    WorkerMark(beacon, 0, 0, -1).reads("/a.wav")
    first = local_rows(beacon, Limits(3, 60), 2)[0]
    assert RankRow.from_json(first.to_json()) == first
    assert first.node == 2
    assert [worker.path for worker in first.workers] == ["/a.wav"]


def test_a_rank_that_compiles_or_captures_may_take_as_long_as_a_start(beacon: Beacon) -> None:
    mark = RankMark(beacon, 0)
    mark.take()
    mark.enter(Stage.TRANSFER)
    mark.finish_step(1)
    mark.builds = True
    assert local_rows(beacon, Limits(3.0, 60.0), 0)[0].limit_s == 60.0
    mark.builds = False
    assert local_rows(beacon, Limits(3.0, 60.0), 0)[0].limit_s == 3.0


def write_word(beacon: Beacon, batch: int, stage: Stage) -> None:
    """Do what the GPU of the first rank does."""
    WORD.pack_into(beacon.map, beacon.gpu_at(0), batch << 8 | stage)


@pytest.mark.parametrize(
    ("batch", "stage", "host", "is_busy"),
    [
        (2, Stage.BACKWARD, Stage.DATA, True),  # two are launched
        (1, Stage.END, Stage.DATA, True),
        (2, Stage.END, Stage.DATA, False),
        (3, Stage.ENCODER, Stage.BACKWARD, True),  # the third is launched bit by bit: backward is next
        (3, Stage.ENCODER, Stage.ENCODER, False),
        (3, Stage.EXCHANGE, Stage.TRANSFER, True),  # or all at once, a moment ago
        (3, Stage.END, Stage.TRANSFER, False),
    ],
)
def test_a_gpu_is_busy_until_it_has_done_what_its_host_has_launched(
    beacon: Beacon, batch: int, stage: Stage, host: Stage, is_busy: bool
) -> None:
    log, mark = GpuLog(beacon, 0), RankMark(beacon, 0)
    mark.take()
    for step in (10, 11):
        log.begins(step)
        log.is_launched()
    log.begins(12)
    mark.enter(host)
    write_word(beacon, batch, stage)
    first, second = local_rows(beacon, Limits(3.0, 60.0), 0)
    assert first.gpu is not None
    assert (first.gpu.is_busy, first.gpu.step, first.gpu.launched) == (is_busy, 9 + batch, 2)
    assert first.gpu.limit_s == 60.0  # the first step
    assert second.gpu is None
    assert RankRow.from_json(first.to_json()) == first


def test_a_gpu_may_take_as_long_as_the_longest_stage_of_its_host(beacon: Beacon) -> None:
    mark = RankMark(beacon, 0)
    mark.take()
    mark._spent_ns[Stage.DATA] = 9_000_000_000
    mark._spent_ns[Stage.TRANSFER] = 2_000_000_000
    mark.finish_step(1)
    GpuLog(beacon, 0).begins(1)
    write_word(beacon, 1, Stage.EXCHANGE)
    row = local_rows(beacon, Limits(3.0, 60.0), 0)[0]
    assert row.gpu is not None
    assert 10.0 <= row.gpu.limit_s <= 12.5


def test_a_slot_is_ignored_once_another_process_has_its_pid(beacon: Beacon) -> None:
    rank, worker = RankMark(beacon, 0), WorkerMark(beacon, 0, 1, 0)
    rank.take()
    rank.enter(Stage.DATA)
    time.sleep(0.6)  # what was prefetched is used up

    def waits_for_a_file() -> bool:
        return is_suspicious(local_rows(beacon, Limits(3.0, 60.0), 0), floor_s=0.0)

    worker.reads("/a.wav")
    assert waits_for_a_file()
    worker._birthmark += 1  # this process was not started when the one that wrote was
    worker.reads("/a.wav")
    assert local_rows(beacon, Limits(3.0, 60.0), 0)[0].workers[0].process == ""
    assert not waits_for_a_file()


class Clock:
    """A clock for beacons that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic_ns", lambda: int(1e9 * self.now_s))


def test_many_slow_files_are_progress_and_one_that_blocks_is_not(
    beacon: Beacon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """90 s for a batch: files of 20 s each are no reason for an alarm, one that is read for longer than 60 s is."""
    clock, rank = Clock(monkeypatch), RankMark(beacon, 0)
    rank.take()
    rank.finish_step(1)
    rank.enter(Stage.DATA)
    workers = [WorkerMark(beacon, 0, slot, slot - 1) for slot in (1, 2)]

    def rows() -> list[RankRow]:
        return local_rows(beacon, Limits(60.0, 900.0), 0)[:1]

    for _ in range(5):
        for worker in workers:
            worker.reads("/slow.wav")
        for _ in range(20):
            clock.now_s += 1.0
            assert not is_suspicious(rows(), 60.0)
    workers[0].reads("/blocks.wav")
    for _ in range(59):
        clock.now_s += 1.0
        workers[1].reads("/quick.wav")
        assert not is_suspicious(rows(), 60.0)
    clock.now_s += 1.5
    verdict = judge_stalled(rows(), {}, 60.0)
    assert verdict is not None
    assert verdict.worker is not None
    assert (verdict.kind, verdict.worker.path) == ("file", "/blocks.wav")


def test_without_progress_a_rank_that_waits_for_data_is_late(beacon: Beacon, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rank, worker = Clock(monkeypatch), RankMark(beacon, 0), WorkerMark(beacon, 0, 1, 0)
    rank.take()
    rank.finish_step(1)
    rank.enter(Stage.DATA)
    clock.now_s += 50.0
    worker.reads("/a.wav")
    worker.rests()
    clock.now_s += 59.0
    assert not is_suspicious(local_rows(beacon, Limits(60.0, 900.0), 0)[:1], 60.0)
    clock.now_s += 2.0
    assert is_suspicious(local_rows(beacon, Limits(60.0, 900.0), 0)[:1], 60.0)


@pytest.mark.parametrize("stage", [Stage.DATA, Stage.VALIDATION])
def test_the_first_batch_of_an_epoch_may_take_as_long_as_a_start(beacon: Beacon, stage: Stage) -> None:
    rank = RankMark(beacon, 0)
    rank.take()
    rank.finish_step(1)
    rank.starts = True
    rank.enter(stage, validation_part(Stage.DATA) if stage is Stage.VALIDATION else 0)
    assert local_rows(beacon, Limits(3.0, 60.0), 0)[0].limit_s == 60.0
    rank.enter(Stage.ENCODER)
    assert local_rows(beacon, Limits(3.0, 60.0), 0)[0].limit_s == 3.0
    rank.starts = False
    rank.enter(Stage.DATA)
    assert local_rows(beacon, Limits(3.0, 60.0), 0)[0].limit_s == 3.0
