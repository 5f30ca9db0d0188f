"""The beacon: what ranks and workers write is what the monitor reads."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_ssl.watchdog.beacon import (
    NO_STEP,
    NUM_BUCKETS,
    Beacon,
    RankMark,
    WorkerMark,
    bucket_of,
    quantile_ns,
    upper_edge_ns,
)
from nest_ssl.watchdog.rank import FIRST_LAYER, RankState, Stage
from tests.fuzz.effort import examples


@pytest.fixture
def beacon(tmp_path: Path) -> Beacon:
    return Beacon.create(tmp_path / "beacon", local_ranks=2, first_rank=4, world_size=8, workers_per_rank=3)


def test_a_new_beacon_is_empty(beacon: Beacon) -> None:
    slot = beacon.rank(1)
    assert (slot.rank, slot.pid, slot.state, slot.exit_status) == (5, 0, RankState.ABSENT, None)
    assert beacon.stop_step == NO_STEP
    assert beacon.workers(0) == []
    assert beacon.owner == os.getpid()


def test_what_a_rank_marks_another_process_reads(beacon: Beacon) -> None:
    mark = RankMark(beacon, 1)
    mark.take()
    mark.finish_step(12)
    mark.enter(Stage.ENCODER, FIRST_LAYER + 3)
    mark.ask_to_stop(15)
    code = (
        "import sys; from pathlib import Path; from nest_ssl.watchdog.beacon import Beacon; "
        "from nest_ssl.watchdog.rank import part_label; s = Beacon(Path(sys.argv[1])).rank(1); "
        "print(s.pid, s.step, s.stage.label, part_label(s.stage, s.part), s.state.name, s.stop_signal, s.steps_done)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(beacon.path)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == f"{os.getpid()} 12 encoder layer 3 RUNNING 15 1"


def test_ranks_do_not_write_into_each_others_slots(beacon: Beacon) -> None:
    marks = [RankMark(beacon, i) for i in range(2)]
    for i, mark in enumerate(marks):
        mark.take()
        mark.enter(Stage.DATA)
        mark.finish_step(100 + i)
        mark.enter(Stage.BACKWARD)
        for slot in range(3):
            WorkerMark(beacon, i, slot, slot).reads(f"/rank{i}/{slot}.wav")
    assert [beacon.rank(i).step for i in range(2)] == [100, 101]
    assert [w.path for w in beacon.workers(0)] == ["/rank0/0.wav", "/rank0/1.wav", "/rank0/2.wav"]
    assert [w.path for w in beacon.workers(1)] == ["/rank1/0.wav", "/rank1/1.wav", "/rank1/2.wav"]
    assert sum(beacon.durations(0, Stage.INIT)) == 1


def test_a_worker_reads_and_rests(beacon: Beacon) -> None:
    mark = WorkerMark(beacon, 0, 1, 0)
    mark.reads("/ä/" + "x" * 2000 + "/end.wav")
    (worker,) = beacon.workers(0)
    assert worker.is_reading
    assert worker.path.endswith("/end.wav")
    mark.rests()
    assert not beacon.workers(0)[0].is_reading


def test_the_time_of_a_stage_in_a_step_is_counted_once_per_step(beacon: Beacon) -> None:
    mark = RankMark(beacon, 0)
    for step in range(1, 4):
        for layer in range(5):
            mark.enter(Stage.ENCODER, FIRST_LAYER + layer)
            time.sleep(0.002)
        mark.enter(Stage.DATA)
        mark.finish_step(step, counts=step > 1)
    counts = beacon.durations(0, Stage.ENCODER)
    assert sum(counts) == 2
    median_ns = quantile_ns(counts, 0.5)
    assert median_ns is not None
    assert median_ns >= 10e6


@examples(100)
@given(st.integers(0, 2**47 - 1))
def test_a_bucket_holds_a_duration_to_within_a_quarter(duration_ns: int) -> None:
    bucket = bucket_of(duration_ns)
    assert 0 <= bucket < NUM_BUCKETS
    assert duration_ns < upper_edge_ns(bucket) <= max(1.25 * duration_ns, duration_ns + 1)


def test_a_file_that_is_not_a_beacon_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"x" * 8192)
    with pytest.raises(ValueError, match="not a beacon"):
        Beacon(path)


def test_a_beacon_without_room_is_refused_with_its_place_and_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(
        OSError, match=rf"{tmp_path}/beacon: No space left on device\. The watchdog needs .* set TMPDIR"
    ):
        Beacon.create(tmp_path / "beacon", local_ranks=2, first_rank=0, world_size=2, workers_per_rank=3)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_too_short_is_no_beacon(tmp_path: Path) -> None:
    (tmp_path / "beacon").write_bytes(b"abc")
    with pytest.raises(ValueError, match="not a beacon: 3 bytes"):
        Beacon(tmp_path / "beacon")
