"""Which checkpoints are kept, and under which names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nest_ssl.config import CheckpointConfig
from nest_ssl.run_folder import RunFolder
from nest_ssl.training import saving
from nest_ssl.training.parallel import World
from nest_ssl.training.saving import SAVE_EVERY_S, Saver, check_finite_weights
from nest_ssl.training.state import Memory, TrainState
from nest_ssl.training.watching import Watch


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
