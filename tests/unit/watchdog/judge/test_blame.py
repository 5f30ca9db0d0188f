"""Blame: every rule, and above all that a waiting rank is never the culprit."""

from __future__ import annotations

import pytest

from nest_ssl.watchdog.judge.blame import find_slow, is_suspicious, judge_dead, judge_stalled, with_last_calls
from nest_ssl.watchdog.judge.failure import Failure
from nest_ssl.watchdog.rank import InitPart, RankState, Stage, validation_part
from nest_ssl.watchdog.report import incident
from nest_ssl.watchdog.rows import RankRow
from tests.unit.watchdog.facts import FLOOR_S, calls, row, worker


def failure(rank: int, message: str, kind: str = "RuntimeError", at_ns: int = 1) -> Failure:
    return Failure(rank, kind, message, "Traceback …", at_ns)


def test_the_dead_rank_is_blamed_and_not_the_one_that_lost_the_connection() -> None:
    rows = [row(0, state=RankState.FAILED), row(1, Stage.ENCODER, process="Z", exit_status=-9)]
    verdict = judge_dead(rows, {0: failure(0, "Connection closed by peer [127.0.0.1]:1")})
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("died", [1])
    assert "SIGKILL" in incident.cause(verdict)
    assert "out of memory?" in incident.cause(verdict)


def test_the_first_exception_that_is_not_a_consequence_is_blamed() -> None:
    rows = [row(rank, state=RankState.FAILED) for rank in range(3)]
    failures = {
        0: failure(0, "Connection reset by peer", at_ns=1),
        1: failure(1, "'a bug'", "KeyError", at_ns=2),
        2: failure(2, "later", "ValueError", at_ns=3),
    }
    verdict = judge_dead(rows, failures)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("failed", [1])
    assert incident.cause(verdict) == "KeyError: 'a bug'"


def test_out_of_memory_advises_what_to_lower() -> None:
    verdict = judge_dead([row(0, state=RankState.FAILED)], {0: failure(0, "CUDA out of memory.", "OutOfMemoryError")})
    assert verdict is not None
    assert verdict.kind == "out-of-memory"
    assert "batch_size" in incident.advice(verdict)


def test_a_lost_gpu_is_named_with_its_host_and_the_run_can_resume() -> None:
    lost = Failure(
        1, "AcceleratorError", "CUDA error: unspecified launch failure\nmore", "", 1, gpu="GPU 5 (GPU-8a) of gpu07"
    )
    rows = [row(0), row(1, Stage.ENCODER, state=RankState.FAILED)]
    verdict = judge_dead(rows, {1: lost})
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, incident.exit_code_of(verdict)) == ("lost-gpu", [1], 75)
    assert incident.headline(verdict) == "rank 1 lost its GPU"
    assert incident.cause(verdict) == (
        "GPU 5 (GPU-8a) of gpu07 no longer works: CUDA error: unspecified launch failure"
    )
    assert "'nvidia-smi'" in incident.advice(verdict)
    assert "--exclude=gpu07" in incident.advice(verdict)


@pytest.mark.parametrize(
    "message",
    ["DataLoader worker (pid 901) is killed by signal: Killed. ", "DataLoader worker (pid(s) 901) exited unexpectedly"],
)
def test_a_dead_worker_is_named_with_its_file(message: str) -> None:
    workers = [worker(pid=900, path="/good.wav"), worker(pid=901, number=1, path="/big.wav", process="")]
    verdict = judge_dead([row(0, Stage.DATA, state=RankState.FAILED, workers=workers)], {0: failure(0, message)})
    assert verdict is not None
    assert verdict.kind == "worker-died"
    assert "/big.wav" in incident.cause(verdict)
    assert "shared memory" in incident.cause(verdict)


def test_finished_ranks_are_not_dead() -> None:
    assert judge_dead([row(0, process="", state=RankState.FINISHED)], {}) is None
    assert judge_dead([row(0, process="Z", state=RankState.STOPPED)], {}) is None


def test_a_stopped_rank_is_blamed_before_the_ranks_that_wait_for_it() -> None:
    rows = [row(0), row(1, Stage.ENCODER, process="T", stopped_s=3.5)]
    verdict = judge_stalled(rows, {0: calls(5, 5, done=1)}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("stopped", [1])
    assert [waiting.rank for waiting in verdict.waiting] == [0]


def test_a_stopped_rank_is_called_stopped_even_if_it_was_seen_late() -> None:
    rows = [row(0), row(1, Stage.ENCODER, 3.1, process="T", stopped_s=2.9)]
    verdict = judge_stalled(rows, {}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("stopped", [1])


def test_a_rank_that_was_stopped_for_a_moment_is_left_alone() -> None:
    rows = [row(0, in_stage_s=1.0), row(1, Stage.ENCODER, 1.0, process="T", stopped_s=1.0)]
    assert not is_suspicious(rows, FLOOR_S)


def test_the_file_that_does_not_arrive_is_named() -> None:
    rows = [row(0), row(1, Stage.DATA, workers=[worker(path="/dead/disk.wav")])]
    verdict = judge_stalled(rows, {}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("file", [1])
    assert incident.on_what(verdict) == "file /dead/disk.wav"


def test_a_frozen_worker_is_not_taken_for_a_dead_disk() -> None:
    rows = [row(0), row(1, Stage.DATA, 1.0, workers=[worker(process="T", stopped_s=3.2)])]
    verdict = judge_stalled(rows, {}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("worker-stopped", [1])


def test_a_file_is_judged_by_the_floor_even_in_a_first_step_that_may_take_longer() -> None:
    starting = row(0, Stage.DATA, 4.0, limit_s=900.0, steps_done=0, workers=[worker()])
    assert is_suspicious([starting], FLOOR_S)


def test_a_worker_that_rests_is_not_blamed_for_its_last_file() -> None:
    rows = [row(0, Stage.DATA, 2.0, workers=[worker(is_reading=False, since_s=100.0)])]
    assert not is_suspicious(rows, FLOOR_S)


def test_a_slow_file_that_is_only_prefetched_does_not_matter_yet() -> None:
    rows = [row(0, Stage.ENCODER, 0.1, workers=[worker(since_s=4.0)])]
    assert not is_suspicious(rows, FLOOR_S)


def test_the_rank_that_never_joined_is_named_by_those_that_wait() -> None:
    joining = [row(rank, Stage.INIT, 11.0, part=InitPart.JOIN, limit_s=10.0) for rank in (0, 2)]
    missing = row(1, Stage.INIT, 12.0, part=InitPart.IMPORT, limit_s=10.0)
    verdict = judge_stalled([*joining, missing], {}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("never-joined", [1])
    assert "ranks 0 and 2 waited" in incident.cause(verdict)


def test_the_rank_that_called_less_is_missing_even_if_all_are_in_backward() -> None:
    rows = [row(0), row(1)]
    verdict = judge_stalled(rows, {0: calls(5, 9, done=1), 1: calls(5)}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("missing", [1])
    assert incident.on_what(verdict) == "collective #2 all_reduce of [9]"
    assert incident.others_text(verdict) == "waiting for rank 1: rank 0 in backward, at collective #2 all_reduce of [9]"


def test_nobody_is_blamed_while_the_rank_behind_is_within_its_limit() -> None:
    saving = row(0, Stage.CHECKPOINT, 4.0, limit_s=30.0, patience_s=30.0)
    assert judge_stalled([saving, row(1)], {0: calls(5), 1: calls(5, 9, done=1)}, FLOOR_S) is None


def test_the_rank_behind_is_not_blamed_while_it_moves() -> None:
    moving = row(0, Stage.ENCODER, 0.5)
    assert judge_stalled([moving, row(1)], {0: calls(5), 1: calls(5, 9, done=1)}, FLOOR_S) is None


def test_diverging_collectives_are_shown_side_by_side_and_the_new_one_is_blamed() -> None:
    flights = {0: calls(5, 9, 5, 9, done=3), 1: calls(5, 9, 5, 7, done=3)}
    verdict = judge_stalled([row(0), row(1, Stage.ENCODER)], flights, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("diverged", [1])
    assert "rank 0: #4 all_reduce of [9]; rank 1: #4 all_reduce of [7]" in incident.on_what(verdict)


def test_the_minority_is_blamed_for_a_diverging_collective() -> None:
    flights = {rank: calls(5, 6 if rank == 2 else 9, done=1) for rank in range(4)}
    verdict = judge_stalled([row(rank) for rank in range(4)], flights, FLOOR_S)
    assert verdict is not None
    assert verdict.ranks == [2]


def test_all_in_the_same_unfinished_collective_is_the_fabric() -> None:
    flights = {rank: calls(5, 9, done=1) for rank in range(2)}
    verdict = judge_stalled([row(0), row(1)], flights, FLOOR_S)
    assert verdict is not None
    assert verdict.kind == "unfinished"
    assert "network or a GPU" in incident.cause(verdict)


def test_a_rank_whose_own_thread_cannot_run_holds_the_gil() -> None:
    rows = [row(0), row(1, Stage.ENCODER, heartbeat_s=4.0)]
    verdict = judge_stalled(rows, {0: calls(5, 9, done=1)}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("gil", [1])
    assert "GIL" in incident.cause(verdict)


def test_a_rank_that_has_finished_is_missing_where_the_others_wait() -> None:
    rows = [row(0, Stage.ENCODER), row(1, Stage.END, 4.0, state=RankState.FINISHED, limit_s=900.0)]
    verdict = judge_stalled(rows, {0: calls(5, 9, done=1), 1: calls(5)}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("left-early", [1])
    assert "missing at collective #2 all_reduce of [9]" in incident.cause(verdict)


def test_a_rank_that_finished_and_left_is_blamed_for_the_connection_that_the_others_lost() -> None:
    rows = [row(0, Stage.ENCODER, state=RankState.FAILED), row(1, Stage.END, state=RankState.FINISHED, process="")]
    verdict = judge_dead(rows, {0: failure(0, "Connection closed by peer")})
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("left-early", [1])
    verdict = with_last_calls(verdict, {0: calls(5, 1)})
    assert "missing at collective #2 all_reduce of [1]" in incident.cause(verdict)


def test_without_collectives_the_minority_place_is_blamed() -> None:
    rows = [row(0), row(1, Stage.OPTIMIZER), row(2)]
    verdict = judge_stalled(rows, {}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("stalled", [1])


def test_a_long_validation_batch_of_all_ranks_is_given_more_time_than_one_that_others_wait_for() -> None:
    part = validation_part(Stage.ENCODER)
    slow = [row(rank, Stage.VALIDATION, 5.0, part=part, patience_s=30.0) for rank in range(2)]
    assert judge_stalled(slow, {}, FLOOR_S) is None
    flights = {0: calls(5, 9, done=1), 1: calls(5)}
    verdict = judge_stalled(slow, flights, FLOOR_S)
    assert verdict is not None
    assert verdict.ranks == [1]


def test_ranks_that_end_a_long_validation_batch_one_after_the_other_do_not_wait_for_each_other() -> None:
    def ranks(waited_s: float) -> list[RankRow]:
        slow = row(0, Stage.VALIDATION, waited_s + 4.0, part=validation_part(Stage.ENCODER), patience_s=30.0)
        ahead = row(1, Stage.VALIDATION, waited_s, part=validation_part(Stage.DECODER), patience_s=30.0)
        return [slow, ahead]

    assert judge_stalled(ranks(waited_s=0.03), {}, FLOOR_S) is None
    verdict = judge_stalled(ranks(waited_s=FLOOR_S + 0.1), {}, FLOOR_S)
    assert verdict is not None
    assert verdict.ranks == [0]


def test_a_rank_that_could_not_write_down_its_error_is_still_named() -> None:
    verdict = judge_dead([row(0), row(1, state=RankState.FAILED)], {})
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("failed", [1])
    assert "/dev/shm full?" in incident.cause(verdict)


def test_a_worker_that_was_asked_to_end_did_not_run_out_of_memory() -> None:
    message = "DataLoader worker (pid 901) is killed by signal: Terminated. "
    workers = [worker(pid=901, process="")]
    verdict = judge_dead([row(0, Stage.DATA, state=RankState.FAILED, workers=workers)], {0: failure(0, message)})
    assert verdict is not None
    assert "was ended by a signal: Terminated" in incident.cause(verdict)
    assert "memory" not in incident.cause(verdict)


@pytest.mark.parametrize("state", [RankState.FINISHED, RankState.STOPPED])
def test_a_rank_that_is_done_but_does_not_exit_is_named(state: RankState) -> None:
    gone = row(0, Stage.END, process="", state=state)
    slow = row(1, Stage.END, FLOOR_S - 1, state=state)
    assert not is_suspicious([gone, slow], FLOOR_S)
    late = row(1, Stage.END, FLOOR_S + 1, state=state)
    assert is_suspicious([gone, late], FLOOR_S)
    verdict = judge_stalled([gone, late], {}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("stalled", [1])


def test_the_rank_that_costs_the_others_most_time_is_slow_and_its_stage_is_named() -> None:
    usual = [{"data": 5.0, "encoder": 20.0}, {"data": 70.0, "encoder": 220.0}, {"data": 5.0, "encoder": 22.0}]
    slow = find_slow([row(rank, usual_ms=times) for rank, times in enumerate(usual)])
    assert str(slow) == "rank 1 is slow in encoder: 220 ms per step, the others 21 ms; all ranks wait for it"


def test_a_small_difference_or_a_single_rank_is_not_slow() -> None:
    assert find_slow([row(0, usual_ms={"data": 5.0}), row(1, usual_ms={"data": 40.0})]) is None
    assert find_slow([row(0, usual_ms={"data": 900.0})]) is None
