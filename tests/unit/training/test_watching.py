"""What the watchdog sees of a step: the host's stage, and the GPU's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from nest_ssl.data import AudioNoiseBatch
from nest_ssl.launch.ranks import ALONE
from nest_ssl.modules import batch_norm
from nest_ssl.training.watching import MOST_GPU_MARKS, GpuMarks, Watch
from nest_ssl.watchdog.agent import RankAgent
from nest_ssl.watchdog.beacon import PAGE_BYTES, Beacon
from nest_ssl.watchdog.rank import FIRST_LAYER, RankState, Stage
from nest_ssl.watchdog.system import shared_memory_folder

CPU = torch.device("cpu")
STEP = (Stage.PREPROCESSOR, Stage.QUANTIZER, Stage.MASKING, Stage.ENCODER, Stage.BACKWARD, Stage.EXCHANGE)


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """A watch whose "GPU" is the CPU: it does at once what a GPU does later."""
    beacon = Beacon.create(tmp_path / "beacon", local_ranks=2, first_rank=0, world_size=2, workers_per_rank=1)
    watch = Watch(RankAgent(ALONE, beacon, has_monitor=False))
    watch.training_begins(40)
    watch.gpu = GpuMarks(CPU, beacon, 0)
    return watch


def beacon_of(watch: Watch) -> Beacon:
    assert watch.agent is not None
    return watch.agent.beacon


def where(watch: Watch) -> tuple[int, Stage, int, int] | None:
    """Batch, stage, step and launched batches, as the monitor reads them."""
    slot = beacon_of(watch).gpu(0)
    return None if slot is None else (slot.batch, slot.stage, slot.step, slot.launched)


def test_the_gpu_passes_the_stages_of_a_batch_and_ends_it(watch: Watch) -> None:
    assert where(watch) is None
    watch.forward_begins()
    watch.step_begins_on_gpu()
    assert where(watch) == (1, Stage.TRANSFER, 40, 0)
    for stage in STEP:
        watch.enter(stage)
        assert where(watch) == (1, stage, 40, 0)
    watch.step_ends_on_gpu()
    assert where(watch) == (1, Stage.END, 40, 0)
    watch.step_is_done(41)
    watch.enter(Stage.DATA)
    assert where(watch) == (1, Stage.END, 40, 1)
    watch.forward_begins()
    watch.step_begins_on_gpu()
    assert where(watch) == (2, Stage.TRANSFER, 41, 1)
    assert beacon_of(watch).gpu(1) is None


def test_a_replay_marks_the_batch_that_was_launched_last_without_any_python(watch: Watch) -> None:
    """What a graph would capture is recorded once, and run again for every batch."""
    assert watch.gpu is not None
    watch.forward_begins()
    watch.step_begins_on_gpu()
    gpu = watch.gpu
    for step in (41, 42, 43):
        watch.step_is_done(step)
        watch.forward_begins()
        torch.add(gpu._numbers, gpu._batch, alpha=256, out=gpu._words)
        gpu._slot.copy_(gpu._word_of[Stage.EXCHANGE])
        assert where(watch) == (step - 39, Stage.EXCHANGE, step, step - 40)


def test_layers_validations_and_what_comes_between_steps_are_not_marked_on_the_gpu(watch: Watch) -> None:
    watch.forward_begins()
    watch.step_begins_on_gpu()
    watch.enter(Stage.ENCODER)
    watch.enter(Stage.DECODER, FIRST_LAYER + 3)
    assert where(watch) == (1, Stage.ENCODER, 40, 0)
    watch.step_ends_on_gpu()
    watch.enter(Stage.CHECKPOINT)
    with watch.validating():
        watch.enter(Stage.ENCODER)
    assert where(watch) == (1, Stage.END, 40, 0)


def test_a_batch_has_at_most_sixteen_marks_and_the_last_is_its_end(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watch.gpu is not None
    copies = []
    slot = watch.gpu._slot

    class Counted:
        def copy_(self, word: torch.Tensor, non_blocking: bool) -> None:
            copies.append(int(word) & 255)
            slot.copy_(word)

    monkeypatch.setattr(watch.gpu, "_slot", Counted())
    watch.forward_begins()
    watch.step_begins_on_gpu()
    for _ in range(10):
        watch.enter(Stage.PREPROCESSOR)
        watch.enter(Stage.PREPROCESSOR)  # the same stage twice is one mark
        watch.enter(Stage.MASKING)
    watch.step_ends_on_gpu()
    assert len(copies) == MOST_GPU_MARKS
    assert copies[1:4] == [Stage.PREPROCESSOR, Stage.MASKING, Stage.PREPROCESSOR]
    assert copies[-1] == Stage.END


def test_a_step_that_was_given_up_in_the_middle_marks_nothing_afterwards(watch: Watch) -> None:
    watch.forward_begins()
    watch.step_begins_on_gpu()
    watch.enter(Stage.ENCODER)  # and then the capture fails
    watch.forward_begins()
    watch.enter(Stage.BACKWARD)
    assert where(watch) == (1, Stage.ENCODER, 40, 0)


def test_after_training_the_gpu_reports_nothing(watch: Watch) -> None:
    watch.forward_begins()
    watch.step_begins_on_gpu()
    watch.step_ends_on_gpu()
    watch.training_has_ended()
    assert watch.gpu is None
    assert where(watch) is None


def test_without_a_gpu_nothing_of_it_exists(tmp_path: Path) -> None:
    beacon = Beacon.create(tmp_path / "beacon", local_ranks=1, first_rank=0, world_size=1, workers_per_rank=1)
    for watch in (Watch(), Watch(RankAgent(ALONE, beacon, has_monitor=False))):
        watch.marks_gpu(CPU)
        assert watch.gpu is None
        watch.forward_begins()
        watch.step_begins_on_gpu()
        watch.enter(Stage.ENCODER)
        watch.step_ends_on_gpu()
        watch.step_is_done(1)
    assert beacon.gpu(0) is None
    assert beacon.rank(0).state is RankState.ABSENT


def test_the_page_of_a_gpu_is_one_whole_page(watch: Watch) -> None:
    assert watch.gpu is not None
    assert watch.gpu.address % PAGE_BYTES == 0
    assert beacon_of(watch).gpu_at(1) - beacon_of(watch).gpu_at(0) == PAGE_BYTES


def test_a_step_that_compiles_or_captures_is_not_a_usual_one(watch: Watch) -> None:
    assert watch.agent is not None
    beacon = beacon_of(watch)
    watch.step_is_done(41)  # the first one is not counted either
    for builds in (True, False):
        watch.enter(Stage.ENCODER)
        if builds:
            with watch.building():
                assert beacon.rank(0).builds
        assert not beacon.rank(0).builds
        watch.enter(Stage.DATA)
        watch.step_is_done(42)
        assert sum(beacon.durations(0, Stage.ENCODER)) == (0 if builds else 1)


def test_the_first_batch_of_an_epoch_and_after_validation_counts_as_a_start(watch: Watch) -> None:
    beacon = beacon_of(watch)
    batch = AudioNoiseBatch(audio=torch.zeros(1, 4), audio_len=torch.tensor([4]))
    watch.epoch_begins()
    assert beacon.rank(0).starts
    watch.batch_arrives(batch)
    assert not beacon.rank(0).starts
    with watch.validating():
        assert beacon.rank(0).starts
        watch.batch_arrives(batch)
        assert not beacon.rank(0).starts
    assert beacon.rank(0).starts


def test_the_gpu_counts_the_collectives_it_comes_to_in_a_batch(watch: Watch) -> None:
    gpu = watch.gpu
    assert gpu is not None

    def came_to() -> int:
        slot = beacon_of(watch).gpu(0)
        assert slot is not None
        return slot.came_to

    sums = torch.randn(5, dtype=torch.double)
    for _ in range(2):
        watch.forward_begins()
        watch.step_begins_on_gpu()
        assert came_to() == 0
        for number in (1, 2, 3):
            assert torch.equal(gpu.bring(sums), sums)
            assert came_to() == number
    for _ in range(300):
        gpu.bring(sums)
    assert came_to() == 255


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_captured_step_marks_its_stages_in_every_replay() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    path = shared_memory_folder() / f"nest-test-beacon-{os.getpid()}"  # pages of a file on a disk cannot be locked
    beacon = Beacon.create(path, local_ranks=2, first_rank=0, world_size=2, workers_per_rank=1)
    path.unlink()  # the mapping stays
    watch = Watch(RankAgent(ALONE, beacon, has_monitor=False))
    watch.training_begins(0)
    watch.marks_gpu(device)
    assert watch.gpu is not None
    x = torch.randn(64, 64, device=device)
    sums = torch.randn(33, dtype=torch.double, device=device)

    def step() -> None:
        watch.step_begins_on_gpu()
        for stage in STEP:
            watch.enter(stage)
            torch.mm(x, x)
            if stage is Stage.BACKWARD:
                for _ in range(3):
                    brought.append(batch_norm.bring(sums))
                torch.cuda._sleep(1_000_000_000)  # about half a second
        watch.step_ends_on_gpu()

    brought: list[torch.Tensor] = []

    watch.forward_begins()
    step()
    torch.cuda.synchronize()
    watch.step_is_done(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in range(2, 5):
        watch.forward_begins()
        graph.replay()
        watch.step_is_done(number)
        seen = set()
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            slot = beacon.gpu(0)
            seen.add((where(watch), 0 if slot is None else slot.came_to))
        assert ((number, Stage.BACKWARD, number - 1, number), 3) in seen
        assert where(watch) == (number, Stage.END, number - 1, number)
    assert all(torch.equal(copy, sums) for copy in brought)
    watch.training_has_ended()
    assert where(watch) is None
    assert batch_norm.bring is torch.Tensor.clone
