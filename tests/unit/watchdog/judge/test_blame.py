"""Blame: every rule, and above all that a waiting rank is never the culprit."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from nest_ssl.watchdog.judge.blame import (
    find_slow,
    is_suspicious,
    judge_abort,
    judge_dead,
    judge_stalled,
    with_last_calls,
)
from nest_ssl.watchdog.judge.failure import Failure
from nest_ssl.watchdog.judge.flight import Flight
from nest_ssl.watchdog.rank import InitPart, RankState, Stage, validation_part
from nest_ssl.watchdog.report import incident
from nest_ssl.watchdog.rows import GpuRow, RankRow
from tests.unit.watchdog.facts import FLOOR_S, calls, gpu, row, worker


def failure(rank: int, message: str, kind: str = "RuntimeError", at_ns: int = 1) -> Failure:
    return Failure(rank, kind, message, "Traceback …", at_ns)


def test_the_dead_rank_is_blamed_and_not_the_one_that_lost_the_connection() -> None:
    rows = [row(0, state=RankState.FAILED), row(1, Stage.ENCODER, process="Z", exit_status=-9)]
    verdict = judge_dead(rows, {0: failure(0, "Connection closed by peer [127.0.0.1]:1")})
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("died", [1])
    assert "SIGKILL" in incident.cause(verdict)
    assert "out of memory?" in incident.cause(verdict)


@pytest.mark.parametrize(
    ("stage", "flights", "kind", "ranks"),
    [
        (Stage.ENCODER, {0: calls(70, 70, 7)}, "diverged", [0]),
        (Stage.ENCODER, {0: calls(70, 70, 7), 2: calls(70, 70, 70)}, "diverged", [0]),
        (Stage.ENCODER, {0: calls(70, 70, 7), 2: calls(70, 70, 7)}, "died", [1]),
        (Stage.VALIDATION, {0: calls(70, 70, 7)}, "died", [1]),
    ],
)
def test_an_abort_is_blamed_on_another_rank_only_where_its_call_was_its_own(
    stage: Stage, flights: dict[int, Flight], kind: str, ranks: list[int]
) -> None:
    rows = [row(0, stage), row(1, stage, process="Z", exit_status=-6), row(2, stage)]
    dead = judge_dead(rows, {0: failure(0, "Connection closed by peer [127.0.0.1]:1")})
    assert dead is not None
    verdict = judge_abort(dead, rows, flights)
    assert (verdict.kind, verdict.ranks) == (kind, ranks)


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


def test_the_message_of_a_step_that_ran_out_of_memory_is_shown_whole() -> None:
    message = (
        "rank 1, step 40: a batch of 32 utterances x 21.5 s does not fit:\n  79.1 of 80.0 GB are in use.\n"
        "Set model.train_ds.batch_size=24."
    )
    verdict = judge_dead(
        [row(0), row(1, state=RankState.FAILED)], {1: failure(1, message, torch.OutOfMemoryError.__name__)}
    )
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, incident.exit_code_of(verdict)) == ("out-of-memory", [1], 75)
    assert incident.cause(verdict) == f"OutOfMemoryError: {' '.join(message.split())}"
    assert incident.advice(verdict) == "set what the message says, then resume"


OOM = "the kernel's OOM killer has ended 1 process of this job; the host has 64.0 GB of memory"


def test_a_rank_that_the_oom_killer_has_ended_is_told_from_one_that_somebody_killed() -> None:
    lost = {0: failure(0, "Connection closed by peer")}
    for oom_killer, kind in ((OOM, "host-memory"), ("", "died")):
        killed = row(1, Stage.DATA, process="Z", exit_status=-9, oom_killer=oom_killer)
        verdict = judge_dead([row(0, state=RankState.FAILED, oom_killer=oom_killer), killed], lost)
        assert verdict is not None
        assert (verdict.kind, verdict.ranks, incident.exit_code_of(verdict)) == (kind, [1], 75)
        if oom_killer:
            assert incident.headline(verdict) == "rank 1 ran out of host memory"
            assert incident.cause(verdict) == f"process 101 was killed: {OOM}"
            assert "num_workers, prefetch_factor or prefetch_gb" in incident.advice(verdict)


def test_a_worker_that_the_oom_killer_has_ended_is_named() -> None:
    workers = [worker(pid=901, number=1, path="/big.wav", process="")]
    failed = row(0, Stage.ENCODER, state=RankState.FAILED, workers=workers, oom_killer=OOM)
    verdict = judge_dead([failed], {0: failure(0, "DataLoader worker (pid 901) is killed by signal: Killed. ")})
    assert verdict is not None
    assert (verdict.kind, verdict.stage, incident.exit_code_of(verdict)) == ("host-memory", Stage.DATA, 75)
    assert incident.cause(verdict) == f"DataLoader worker 1 (pid 901) was killed: {OOM}"


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
    cause = incident.cause(verdict)
    assert cause.endswith("missing at collective #2 all_reduce of [1]; rank 0 then had: Connection closed by peer")


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


def test_a_slow_rank_is_found_among_thousands_without_comparing_each_with_each() -> None:
    rows = [row(rank, usual_ms={"data": 5.0, "encoder": 20.0 + (rank == 3000) * 200}) for rank in range(4096)]
    began = time.process_time()
    slow = find_slow(rows)
    assert time.process_time() - began < 1.0  # each with each takes a minute
    assert slow is not None
    assert (slow.rank, slow.stage, slow.own_ms, slow.others_ms) == (3000, "encoder", 220.0, 20.0)


# ---- by the GPUs' own marks ----


def with_gpus(*gpus: GpuRow, hosts: dict[int, RankRow] | None = None) -> list[RankRow]:
    """Return one rank per GPU; its host waits, two steps ahead, unless `hosts` says otherwise."""
    rows = [(hosts or {}).get(rank, row(rank, Stage.TRANSFER)) for rank in range(len(gpus))]
    return [replace(one, gpu=own) for one, own in zip(rows, gpus, strict=True)]


def test_the_gpu_that_is_behind_is_stuck_and_those_in_the_exchange_wait_for_it() -> None:
    waits = gpu(7, Stage.EXCHANGE)
    verdict = judge_stalled(with_gpus(waits, waits, gpu(7, Stage.BACKWARD, 63.0), waits), {}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.stage, verdict.step) == ("gpu-stuck", [2], Stage.BACKWARD, 7)
    assert incident.headline(verdict) == "rank 2 stalled on the GPU"
    assert incident.cause(verdict) == (
        "the GPU has been in backward of step 7 for 63 s; its host is in transfer (process sleeping) and has launched "
        "2 more batches"
    )
    assert incident.others_text(verdict) == "waiting for rank 2: ranks 0, 1 and 3 in exchange of step 7 on the GPU"


def test_among_gpus_in_one_stage_the_one_that_has_not_come_to_the_others_collective_is_stuck() -> None:
    """As with synchronised batch norms, where ranks wait for each other in the middle of the backward pass."""
    waits = gpu(7, Stage.BACKWARD, came_to=6)
    verdict = judge_stalled(with_gpus(waits, waits, gpu(7, Stage.BACKWARD, came_to=5), waits), {}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.stage) == ("gpu-stuck", [2], Stage.BACKWARD)
    assert "in backward of step 7, before collective 6 of its batch norms, for 4 s;" in incident.cause(verdict)
    verdict = judge_stalled(with_gpus(waits, waits, waits, waits), {}, FLOOR_S)
    assert verdict is not None
    assert verdict.kind == "gpu-unfinished"


def test_a_gpu_that_is_stuck_between_two_batches_is_behind_too() -> None:
    before_8 = gpu(7, Stage.END, launched=8)
    verdict = judge_stalled(with_gpus(gpu(8, Stage.ENCODER), before_8), {}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.stage) == ("gpu-stuck", [1], Stage.TRANSFER)
    assert "in front of the batch after step 7 for 4 s" in incident.cause(verdict)


@pytest.mark.parametrize("stage", [Stage.DATA, Stage.TRANSFER])
def test_a_rank_whose_gpu_has_done_all_it_was_given_is_late_with_its_host(stage: Stage) -> None:
    done = gpu(7, Stage.END, launched=7)
    rows = with_gpus(gpu(8, Stage.EXCHANGE), done, gpu(8, Stage.EXCHANGE), hosts={1: row(1, stage, 5.0)})
    verdict = judge_stalled(rows, {}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.stage, verdict.stalled_s) == ("host-late", [1], stage, 5.0)
    assert incident.headline(verdict) == "rank 1 stalled on the host"
    assert incident.cause(verdict) == (
        f"the GPU is done with step 7 and waits for more; its host is in {stage.label} (process sleeping)"
    )
    assert "ranks 0 and 2 in exchange of step 8 on the GPU" in incident.others_text(verdict)


def test_a_host_that_is_late_in_a_step_launched_bit_by_bit_is_told_from_gpus_in_the_same_stage() -> None:
    """All GPUs are in the encoder, whose batch norms wait for all ranks; one of them was not given the rest of it."""
    late = gpu(8, Stage.ENCODER, launched=7, is_busy=False)
    waits = gpu(8, Stage.ENCODER, launched=7)
    rows = with_gpus(waits, late, hosts={0: row(0, Stage.OPTIMIZER), 1: row(1, Stage.ENCODER)})
    verdict = judge_stalled(rows, {0: calls(5, 9, done=1), 1: calls(5)}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.stage) == ("host-late", [1], Stage.ENCODER)
    assert incident.on_what(verdict) == "collective #2 all_reduce of [9]"


def test_gpus_that_all_wait_in_one_collective_are_named_as_that() -> None:
    verdict = judge_stalled(with_gpus(*[gpu(7, Stage.EXCHANGE)] * 3), {}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.stage) == ("gpu-unfinished", [0, 1, 2], Stage.EXCHANGE)
    assert incident.headline(verdict).endswith("wait on the GPU in the same collective, which does not finish")
    assert "all GPUs have been in exchange of step 7 for 4 s, and none is behind" in incident.cause(verdict)


def test_the_one_that_left_an_exchange_in_which_most_wait_has_run_another_graph() -> None:
    rows = with_gpus(gpu(7, Stage.EXCHANGE), gpu(7, Stage.EXCHANGE), gpu(8, Stage.ENCODER, 3.5))
    verdict = judge_stalled(rows, {}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.stage, verdict.step) == ("gpu-ahead", [2], Stage.ENCODER, 8)
    assert "has left the exchange of step 7, in which the others wait" in incident.cause(verdict)


def test_a_launch_that_holds_the_gil_waits_for_the_gpu() -> None:
    hosts = {rank: row(rank, Stage.BACKWARD, heartbeat_s=9.0) for rank in range(2)}
    verdict = judge_stalled(with_gpus(gpu(7, Stage.EXCHANGE), gpu(7, Stage.ENCODER), hosts=hosts), {}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("gpu-stuck", [1])


def test_a_single_gpu_can_be_stuck_too() -> None:
    verdict = judge_stalled(with_gpus(gpu(7, Stage.ENCODER)), {}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.stage) == ("gpu-stuck", [0], Stage.ENCODER)


@pytest.mark.parametrize(
    "gpus",
    [
        [gpu(7, Stage.EXCHANGE), gpu(7, Stage.BACKWARD, 1.0)],  # it was elsewhere a second ago
        [gpu(7, Stage.EXCHANGE), gpu(7, Stage.BACKWARD, limit_s=30.0)],  # a long stage
        [gpu(7, Stage.EXCHANGE), gpu(7, Stage.EXCHANGE, 1.0)],
    ],
)
def test_hosts_that_wait_for_gpus_within_their_limit_are_not_blamed(gpus: list[GpuRow]) -> None:
    rows = with_gpus(*gpus, hosts={0: row(0, Stage.DATA), 1: row(1, Stage.TRANSFER)})
    assert is_suspicious(rows, FLOOR_S)
    assert judge_stalled(rows, {}, FLOOR_S) is None


def test_a_rank_that_saves_may_let_the_gpus_of_the_others_wait() -> None:
    saving = row(0, Stage.CHECKPOINT, 4.0, limit_s=30.0, patience_s=30.0)
    rows = with_gpus(gpu(7, Stage.END, launched=7), gpu(8, Stage.EXCHANGE), hosts={0: saving})
    assert judge_stalled(rows, {}, FLOOR_S) is None


def test_a_stuck_gpu_is_suspicious_while_its_host_still_runs_ahead() -> None:
    assert is_suspicious(with_gpus(gpu(7, Stage.ENCODER), hosts={0: row(0, Stage.DATA, 0.1)}), FLOOR_S)
    idle = gpu(9, Stage.END, 100.0)
    assert not is_suspicious(with_gpus(idle, hosts={0: row(0, Stage.VALIDATION, 0.1)}), FLOOR_S)


def test_gpus_that_have_nothing_to_do_leave_the_judgement_to_the_hosts() -> None:
    idle = gpu(9, Stage.END)
    hosts = {0: row(0, Stage.VALIDATION, 1.0), 1: row(1, Stage.DATA), 2: row(2, Stage.VALIDATION, 3.5)}
    rows = with_gpus(idle, idle, idle, hosts=hosts)
    verdict = judge_stalled(rows, {0: calls(5, 9, done=1), 1: calls(5), 2: calls(5, 9, done=1)}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("missing", [1])


def test_diverging_collectives_say_more_than_the_gpus_that_wait_in_them() -> None:
    rows = with_gpus(gpu(7, Stage.EXCHANGE), gpu(7, Stage.ENCODER), hosts={0: row(0, Stage.DATA, 0.1)})
    verdict = judge_stalled(rows, {0: calls(5, 9, 5, 9, done=3), 1: calls(5, 9, 5, 7, done=3)}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.stage, verdict.step) == ("diverged", [1], Stage.ENCODER, 7)


# ---- nodes that are not heard of ----


def lost(rank: int, silent_s: float = 8.0) -> RankRow:
    return row(rank, Stage.ENCODER, 0.1, node=1, silent_s=silent_s)


def test_a_silent_node_is_no_reason_to_end_a_job_that_moves() -> None:
    rows = [row(0, in_stage_s=0.1), lost(1, 25.0)]
    assert judge_dead(rows, {}) is None
    assert not is_suspicious(rows, FLOOR_S)
    assert judge_stalled(rows, {}, FLOOR_S) is None


def test_a_node_that_is_gone_is_named_and_not_the_survivor_that_lost_its_connection() -> None:
    failure = Failure(0, "RuntimeError", "Connection closed by peer [10.0.0.2]:1234", "", 0)
    verdict = judge_dead([row(0, state=RankState.FAILED), lost(1, 2.5)], {0: failure})
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, incident.exit_code_of(verdict)) == ("lost-node", [1], 75)
    assert incident.headline(verdict) == "node 1 is gone, with rank 1"
    assert "rank 0 lost contact with rank 1" in incident.cause(verdict)


def test_a_survivor_of_which_no_more_is_known_has_lost_its_connection_and_not_failed() -> None:
    failure = Failure(0, "RuntimeError", "Connection closed by peer [10.0.0.2]:1234", "", 0)
    verdict = judge_dead([row(0, state=RankState.FAILED), row(1)], {0: failure})
    assert verdict is not None
    assert incident.headline(verdict) == "rank 0 lost its connection"


def test_ranks_that_all_wait_wait_for_the_node_that_is_silent() -> None:
    rows = [row(0), row(1), lost(2, 70.0)]
    flights = {0: calls(5, done=0), 1: calls(5, done=0)}
    verdict = judge_stalled(rows, flights, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("lost-node", [2])
    verdict = judge_stalled([row(0), row(1, Stage.ENCODER), lost(2, 70.0)], {}, FLOOR_S)  # it does not wait
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("stalled", [1])


def test_a_rank_that_waits_is_not_blamed_while_the_others_are_within_their_limits() -> None:
    reading = [row(rank, Stage.DATA, 90.0, limit_s=145.0, patience_s=145.0) for rank in range(1, 4)]
    assert judge_stalled([row(0, Stage.EXCHANGE, 90.0, limit_s=60.0, patience_s=60.0), *reading], {}, 60.0) is None


def test_with_the_collectives_of_some_ranks_alone_those_are_not_blamed_for_one_that_is_elsewhere() -> None:
    rows = [*(row(rank, Stage.EXCHANGE) for rank in range(4)), row(4, Stage.ENCODER)]
    flights = {rank: calls(5, done=0) for rank in (0, 1)}
    verdict = judge_stalled(rows, flights, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("stalled", [4])
