"""Which checkpoints are kept, and under which names."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nest_ssl.config import CheckpointConfig
from nest_ssl.run_folder import RunFolder
from nest_ssl.training import saving
from nest_ssl.training.parallel import World
from nest_ssl.training.saving import RETRY_AFTER_S, SAVE_EVERY_S, HostCopy, Saver, check_finite_weights
from nest_ssl.training.state import Memory, TrainState
from nest_ssl.training.watching import Stopped, Watch


@pytest.fixture(autouse=True)
def _without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "checkpoint_of", lambda state, trained, **_: {"state_dict": {}, "step": state.step})


def saver(folder: Path, **options: Any) -> Saver:
    return Saver(RunFolder(folder), CheckpointConfig(**options), "name", World(), Watch())


def validate(saver: Saver, values: list[float]) -> list[str]:
    """Names of the checkpoints that are left after validations with these losses."""
    trained: Any = SimpleNamespace()
    for step, value in enumerate(values, start=1):
        saver.save_best(TrainState(step=step), trained, {"val_loss": value})
    saver.finish()
    return sorted(path.name for path in saver.folder.checkpoints.glob("*.ckpt"))


def test_the_best_stay_and_the_worst_of_them_is_deleted(tmp_path: Path) -> None:
    kept = validate(saver(tmp_path, save_top_k=2), [3.0, 2.0, 5.0, 1.0])
    assert kept == ["name--val_loss=1.0000-epoch=0-step=4.ckpt", "name--val_loss=2.0000-epoch=0-step=2.ckpt"]


@pytest.mark.parametrize(("top_k", "steps"), [(0, []), (1, [2]), (-1, [1, 2, 3])])
def test_save_top_k_checkpoints_are_kept(tmp_path: Path, top_k: int, steps: list[int]) -> None:
    kept = validate(saver(tmp_path, save_top_k=top_k), [3.0, 2.0, 4.0])
    assert [int(name.split("step=")[1].split(".")[0]) for name in sorted(kept, key=lambda n: n[-6])] == steps


def test_mode_max_prefers_higher_values_and_nan_is_never_the_best(tmp_path: Path) -> None:
    kept = validate(saver(tmp_path, save_top_k=1, mode="max"), [1.0, float("nan"), 3.0, 2.0])
    assert kept == ["name--val_loss=3.0000-epoch=0-step=3.ckpt"]


def test_names_follow_lightnings_templates(tmp_path: Path) -> None:
    ours = saver(tmp_path, filename="{epoch:02d}-{step}-{val_loss:.2f}-x")
    assert validate(ours, [1.234]) == ["epoch=00-step=1-val_loss=1.23-x.ckpt"]


@pytest.mark.parametrize("filename", ["best", "last", "{epoch}", "{val_loss:.0f}"])
def test_checkpoints_whose_template_gives_one_name_do_not_replace_each_other(tmp_path: Path, filename: str) -> None:
    ours = saver(tmp_path, filename=filename, save_top_k=2)
    kept = validate(ours, [1.1, 1.3, 1.2])
    assert [name.rpartition("-")[2] for name in kept] == ["step=1.ckpt", "step=3.ckpt"]
    assert sorted(ours.best.values()) == [1.1, 1.2]


def test_a_single_best_checkpoint_keeps_the_name_it_was_given_unless_that_is_last(tmp_path: Path) -> None:
    assert validate(saver(tmp_path / "a", filename="best", save_top_k=1), [2.0, 1.0]) == ["best.ckpt"]
    assert validate(saver(tmp_path / "b", filename="last", save_top_k=1), [2.0, 1.0]) == ["last-step=2.ckpt"]


def test_the_best_of_a_run_whose_name_has_a_folder_are_found_again(tmp_path: Path) -> None:
    first, second = (Saver(RunFolder(tmp_path), CheckpointConfig(), "team/run", World(), Watch()) for _ in range(2))
    assert validate(first, [2.0]) == ["run--val_loss=2.0000-epoch=0-step=1.ckpt"]
    second.start(TrainState(step=1, memory=Memory(best=first.best)))
    assert second.best == first.best


def test_a_resumed_run_knows_the_best_that_are_still_there(tmp_path: Path) -> None:
    first = saver(tmp_path, save_top_k=2)
    validate(first, [3.0, 2.0])
    gone = tmp_path / "checkpoints" / "name--val_loss=2.0000-epoch=0-step=2.ckpt"
    gone.unlink()
    second = saver(tmp_path, save_top_k=2)
    moved = {f"/elsewhere/{Path(path).name}": score for path, score in first.best.items()}
    second.start(TrainState(step=2, memory=Memory(best=moved)))
    assert [Path(path).name for path in second.best] == ["name--val_loss=3.0000-epoch=0-step=1.ckpt"]


def test_a_checkpoint_is_due_every_quarter_of_an_hour_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    usual, hourly = saver(tmp_path), saver(tmp_path, train_time_interval="00:01:00:00")
    now += SAVE_EVERY_S - 1
    assert not usual.is_due_by_clock()
    now += 1
    assert usual.is_due_by_clock()
    assert not hourly.is_due_by_clock()
    now += 2700
    assert hourly.is_due_by_clock()
    assert not saver(tmp_path, save_last=False).is_due_by_clock()


def test_weights_that_are_not_finite_are_not_to_be_written() -> None:
    check_finite_weights({"a": torch.ones(3), "steps": torch.tensor(4)}, "x.ckpt")
    with pytest.raises(RuntimeError, match=r"x\.ckpt: not written, since 1 of 2 tensors are not finite \(b, …\)"):
        check_finite_weights({"a": torch.ones(3), "b": torch.tensor([1.0, float("nan")])}, "x.ckpt")


# ---- in the background ----

TRAINED: Any = SimpleNamespace()


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The weights that a checkpoint contains."""
    ours = torch.zeros(3)
    monkeypatch.setattr(saving, "checkpoint_of", lambda state, trained, **_: {"state_dict": {"w": ours}})
    return ours


def read(path: Path) -> float:
    return float(torch.load(path, weights_only=True)["state_dict"]["w"][0])


class Disk:
    """`torch.save` that waits, or fails as on a full disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write, self.fails, self.writes, self.real = threading.Event(), 0, 0, torch.save
        self.may_write.set()
        monkeypatch.setattr(torch, "save", self.save)

    def save(self, content: Any, file: Any) -> None:
        self.writes += 1
        assert self.may_write.wait(10)
        if self.fails:
            self.fails -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.real(content, file)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, weights: torch.Tensor, disk: Disk) -> None:
    ours = saver(tmp_path)
    disk.may_write.clear()
    weights.fill_(1.0)
    ours.save_last(TrainState(step=1), TRAINED)  # returns, though nothing can be written
    weights.fill_(2.0)
    assert not ours.folder.last_checkpoint.exists()
    disk.may_write.set()
    ours.save_last(TrainState(step=2), TRAINED)  # waits for the first
    assert disk.writes >= 1
    ours.finish()
    assert read(ours.folder.last_checkpoint) == 2.0
    assert read(tmp_path / "checkpoints" / "last-before.ckpt") == 1.0
    assert ours.folder.saved.read_text() == "step 2\n"


def test_a_stop_and_an_error_wait_for_the_checkpoint_that_is_being_written(
    tmp_path: Path, weights: torch.Tensor, disk: Disk
) -> None:
    for step, error in enumerate((Stopped("stopped"), KeyError("a fault")), start=1):
        ours = saver(tmp_path)
        disk.may_write.clear()
        weights.fill_(float(step))
        threading.Timer(0.1, disk.may_write.set).start()

        def train(ours: Saver = ours, step: int = step, error: Exception = error) -> None:
            with ours.finishing():
                ours.save_last(TrainState(step=step), TRAINED)
                raise error

        with pytest.raises(type(error)):
            train()
        assert read(ours.folder.last_checkpoint) == step


def test_a_checkpoint_that_cannot_be_written_is_a_warning_and_is_tried_again(
    tmp_path: Path, weights: torch.Tensor, disk: Disk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    ours = saver(tmp_path)
    ours.save_last(TrainState(step=1), TRAINED)
    ours.wait()
    disk.fails = 2
    for step in (2, 3):
        ours.save_last(TrainState(step=step), TRAINED)
        ours.wait()
    assert caplog.text.count("No space left on device") == 2
    assert "Training continues" in caplog.text
    assert not ours.is_due_by_clock()
    now += RETRY_AFTER_S
    assert ours.is_due_by_clock()
    ours.save_last(TrainState(step=3), TRAINED)  # not taken for saved
    ours.finish()
    assert ours.folder.saved.read_text() == "step 3\n"


def test_the_third_failure_in_a_row_ends_the_run(tmp_path: Path, weights: torch.Tensor, disk: Disk) -> None:
    ours = saver(tmp_path)
    disk.fails = 3
    for step in (1, 2, 3):
        ours.save_last(TrainState(step=step), TRAINED)
    with pytest.raises(OSError, match=r"last\.ckpt: the checkpoint could not be written: .* It was tried 3 times"):
        ours.wait()
    assert not list(ours.folder.checkpoints.iterdir())


@pytest.mark.parametrize("fails", [1, 2])
def test_at_the_end_a_checkpoint_is_tried_once_more(
    tmp_path: Path, weights: torch.Tensor, disk: Disk, fails: int
) -> None:
    ours = saver(tmp_path)
    disk.fails = fails
    ours.save_last(TrainState(step=1), TRAINED)
    if fails == 1:
        ours.finish()
        assert read(ours.folder.last_checkpoint) == 0.0
    else:
        with pytest.raises(OSError, match="could not be written"):
            ours.finish()


def test_the_best_checkpoint_gets_its_second_name_once_it_is_written(
    tmp_path: Path, weights: torch.Tensor, disk: Disk
) -> None:
    ours = saver(tmp_path, save_top_k=1)
    for step, loss in ((1, 3.0), (2, 2.0)):
        disk.may_write.clear()
        ours.save_best(TrainState(step=step), TRAINED, {"val_loss": loss})
        ours.save_last(TrainState(step=step), TRAINED)
        disk.may_write.set()
        ours.wait()
    assert disk.writes == 2
    best = ours.folder.checkpoints / "name--val_loss=2.0000-epoch=0-step=2.ckpt"
    assert best.samefile(ours.folder.last_checkpoint)
    assert sorted(os.listdir(ours.folder.checkpoints)) == ["last-before.ckpt", "last.ckpt", best.name]


def test_a_best_checkpoint_that_fails_replaces_no_other(
    tmp_path: Path, weights: torch.Tensor, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    ours = saver(tmp_path, save_top_k=1)
    ours.save_best(TrainState(step=1), TRAINED, {"val_loss": 3.0})
    ours.wait()
    kept = dict(ours.best)
    disk.fails = 1
    ours.save_best(TrainState(step=2), TRAINED, {"val_loss": 2.0})
    ours.save_last(TrainState(step=2), TRAINED)
    ours.wait()
    assert ours.best == kept
    assert all(Path(path).is_file() for path in kept)
    assert caplog.text.count("could not be written") == 1


def test_a_pipe_in_the_place_of_a_checkpoint_is_replaced(tmp_path: Path, weights: torch.Tensor) -> None:
    ours = saver(tmp_path)
    ours.folder.checkpoints.mkdir()
    os.mkfifo(ours.folder.last_checkpoint)
    ours.save_last(TrainState(step=1), TRAINED)
    ours.finish()
    assert read(ours.folder.last_checkpoint) == 0.0


def test_a_run_folder_that_is_deleted_meanwhile_is_made_again(tmp_path: Path, weights: torch.Tensor) -> None:
    ours = saver(tmp_path / "run")
    for step in (1, 2):
        ours.save_last(TrainState(step=step), TRAINED)
        ours.wait()
        assert read(ours.folder.last_checkpoint) == 0.0
        shutil.rmtree(tmp_path / "run")
    ours.save_last(TrainState(step=3), TRAINED)
    ours.finish()
    assert read(ours.folder.last_checkpoint) == 0.0


def test_a_copy_has_the_values_and_the_sharing_of_its_original() -> None:
    tied, other = torch.randn(4, 3), torch.arange(5, dtype=torch.bfloat16)
    content: dict[str, Any] = {
        "a": tied,
        "b": tied,
        "c": [other, (torch.tensor(2), 3, "x")],
        "d": {"e": torch.zeros(0)},
    }
    copy = HostCopy().of(content)
    wanted = tied.clone()
    tied.zero_()
    assert torch.equal(copy["a"], wanted)
    assert copy["a"] is copy["b"]
    assert torch.equal(copy["c"][0], other)
    assert copy["c"][1] == (torch.tensor(2), 3, "x")
    assert copy["d"]["e"].shape == (0,)


def test_tensors_in_reserved_memory_are_apart_and_saved_without_their_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopy, "BLOCK_BYTES", 256)
    host = HostCopy()
    host.reserve(300)
    shapes: list[tuple[int, ...]] = [(3, 2), (), (7,), (40,), (200,), (5,)]  # of bfloat16; one needs a larger block
    tensors = [host._place(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [tensor.flatten().tolist() for tensor in tensors] == [
        [number] * torch.Size(shape).numel() for number, shape in enumerate(shapes)
    ]
    torch.save(tensors[0], tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt"), tensors[0])
    assert tensors[0].untyped_storage().nbytes() == 12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_of_gpu_tensors_is_pinned_and_complete() -> None:
    on_gpu = torch.arange(9, device="cuda")
    content: dict[str, Any] = {"a": torch.randn(100, 7, device="cuda"), "b": [on_gpu, torch.ones(3)]}
    wanted = [content["a"].cpu(), content["b"][0].cpu()]
    copy = HostCopy().of(content)
    content["a"].zero_()
    assert torch.equal(copy["a"], wanted[0])
    assert torch.equal(copy["b"][0], wanted[1])
    assert copy["a"].device.type == "cpu"


def test_a_damaged_last_checkpoint_does_not_replace_its_predecessor(
    tmp_path: Path, weights: torch.Tensor, disk: Disk
) -> None:
    ours = saver(tmp_path)
    ours.folder.checkpoints.mkdir()
    ours.folder.last_checkpoint.write_bytes(b"damaged")
    before = ours.folder.checkpoints / "last-before.ckpt"
    before.write_bytes(b"good, and resumed from")
    disk.fails = 1
    for step in (1, 2):
        ours.save_last(TrainState(step=step), TRAINED)
        ours.wait()
        assert before.read_bytes() == b"good, and resumed from"
    assert read(ours.folder.last_checkpoint) == 0.0


def test_a_note_of_the_step_that_cannot_be_written_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, trained = saver(tmp_path), SimpleNamespace()
    ours.folder.saved.mkdir()
    for step in range(1, 2 + saving.MOST_FAILURES):
        ours.save_last(TrainState(step=step), trained)  # type: ignore[arg-type]
    ours.finish()
    assert torch.load(ours.folder.last_checkpoint, weights_only=True)["step"] == step
    assert f"{ours.folder.saved}: could not be written: Is a directory" in caplog.text
