"""Weights shared out over real processes, compared with whole ones: steps, averages, checkpoints."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nest_ssl import load
from nest_ssl.config import CheckpointConfig, EmaConfig, OptimConfig
from nest_ssl.data import AudioNoiseBatch
from nest_ssl.fast.engine import accelerate
from nest_ssl.nemo_file import CheckpointError
from nest_ssl.run_folder import RunFolder
from nest_ssl.training import sharding
from nest_ssl.training.ema import Average
from nest_ssl.training.optimizers import build_optimizer
from nest_ssl.training.parallel import World
from nest_ssl.training.saving import Saver
from nest_ssl.training.state import Trained, TrainState, averaged_weights, read_checkpoint, restore
from nest_ssl.training.step import Clipping, TrainStep
from nest_ssl.training.watching import Watch
from tests.helpers import NO_DROPOUT, tiny_model
from tests.ranks import on_ranks

UNEVEN = {**NO_DROPOUT, "masking.mask_prob": 1.0, "masking.freeze": False, "encoder.subsampling_conv_channels": 7}
"""Sizes that neither 2 nor 3 ranks divide; and the mask embedding is trained."""


def trained_model(world: World, seed: int, clipping: Clipping | None = None, compile: str = "off") -> Trained:
    """A model as the trainer sets it up, sharded if there are several ranks."""
    model = tiny_model(UNEVEN, seed).train()
    if world.size > 1:
        sharding.shard(model)
    step = TrainStep(
        model,
        accelerate(model, compile=compile),
        build_optimizer(model, OptimConfig(name="adamw", lr=1e-2, eps=1e-2)),  # a small eps would blow up rounding
        None,
        world,
        Watch(),
        clipping=clipping,
        average=Average(EmaConfig(enable=True, decay=0.5), model),
    )
    loader: Any = SimpleNamespace(plan_hash="same")
    return Trained(model, step, loader, world.size)


def take_steps(trained: Trained, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        torch.manual_seed(number)
        audio, length = 0.1 * torch.randn(2, 16_000), torch.tensor([16_000, 12_000])
        batch = AudioNoiseBatch(None, audio, length, audio, length, audio, length)
        losses.append(float(trained.step(batch, begins=True, updates=True, step=number).loss))
    return losses


def whole_state(trained: Trained, world: World) -> dict[str, dict[str, Tensor]]:
    """Weights, their average and the optimizer's moments, on rank 0."""
    states = trained.step.optimizer.state_dict()["state"]
    moments = {f"{number}.{kind}": value for number, kinds in states.items() for kind, value in kinds.items()}
    found = {"weights": trained.model.state_dict(), "average": averaged_weights(trained), "moments": moments}
    return {
        kind: {name: value.clone() for name, value in sharding.gathered(tensors, world).items()}
        for kind, tensors in found.items()
    }


def assert_same(found: dict[str, dict[str, Tensor]], wanted: dict[str, dict[str, Tensor]]) -> None:
    """To the bit."""
    for kind, tensors in wanted.items():
        assert found[kind].keys() == tensors.keys()
        different = [name for name, value in tensors.items() if not torch.equal(found[kind][name], value)]
        assert not different, (kind, different)


# ---- steps ----


def validate(trained: Trained) -> float:
    average = trained.average
    assert average is not None
    trained.model.eval()
    torch.manual_seed(0)
    audio, length = 0.1 * torch.randn(1, 16_000), torch.tensor([16_000])
    with average.in_the_model(), torch.no_grad():
        loss = float(trained.model.masked_loss(audio, length, audio, length).loss)
    trained.model.train()
    return loss


def steps(world: World, clipping: Clipping, compile: str) -> dict[str, Any]:
    trained = trained_model(world, 1, clipping, compile)
    validated = [validate(trained)]
    losses = take_steps(trained, range(2))
    validated.append(validate(trained))
    losses += take_steps(trained, range(2, 3))
    before = whole_state(trained, world)
    for parameter in trained.step.parameters:
        if parameter.grad is not None and world.rank == 0:
            sharding.part(parameter.grad).view(-1)[:1] = torch.nan  # one rank's part is enough
    trained.step._update(3)
    return {"losses": losses, "validated": validated, "before": before, "after": whole_state(trained, world)}


@pytest.mark.parametrize(
    ("clipping", "compile"), [(Clipping(0.05), "off"), (Clipping(1e-3, by_value=True), "off"), (Clipping(0.05), "on")]
)
def test_sharded_steps_are_those_of_whole_weights(clipping: Clipping, compile: str) -> None:
    """Clipped, averaged, validated with the average; a gradient that is not finite on one rank changes nothing."""
    alone, (first, _) = steps(World(), clipping, "off"), on_ranks(steps, 2, clipping, compile)
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert first["validated"] == pytest.approx(alone["validated"], rel=1e-4)
    for kind, tensors in alone["before"].items():
        for name, value in tensors.items():
            torch.testing.assert_close(first["before"][kind][name], value, rtol=1e-3, atol=2e-5, msg=f"{kind} {name}")
    assert_same(first["after"], {kind: first["before"][kind] for kind in ("weights", "moments")})


# ---- checkpoints ----


def saver(folder: Path, world: World) -> Saver:
    return Saver(RunFolder(folder), CheckpointConfig(), "name", world, Watch())


def save(world: World, folder: Path) -> dict[str, Any]:
    """Two steps, saved; and what an undisturbed third one gives."""
    trained = trained_model(world, 1)
    take_steps(trained, range(2))
    ours = saver(folder, world)
    ours.save_best(TrainState(step=2), trained, {"val_loss": 1.0})
    ours.save_last(TrainState(step=2, batch=2), trained)
    ours.save_nemo_at_end(trained)
    saved = whole_state(trained, world)
    return {"saved": saved, "losses": take_steps(trained, range(2, 3))}


def resume(world: World, path: Path) -> dict[str, Any]:
    trained = trained_model(world, 2)
    state = restore(read_checkpoint(path), trained)
    assert (state.step, state.batch) == (2, 2 * 2 // world.size)
    restored = whole_state(trained, world)
    return {"restored": restored, "losses": take_steps(trained, range(2, 3)), "after": whole_state(trained, world)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("run")
    return folder / "checkpoints", on_ranks(save, 2, folder)[0]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_checkpoint_in_shards_is_resumed_by_any_number_of_ranks(
    saved: tuple[Path, dict[str, Any]], num_ranks: int
) -> None:
    path, wanted = saved[0] / "last.ckpt", saved[1]
    found = resume(World(), path) if num_ranks == 1 else on_ranks(resume, num_ranks, path)[0]
    assert_same(found["restored"], wanted["saved"])
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)


def test_a_checkpoint_in_shards_loads_as_a_model(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Its names, its second name, and the `.nemo` file hold the average."""
    folder, wanted = saved
    best = next(folder.glob("*step=2.ckpt"))
    assert (best / "rest.pt").samefile(folder / "last.ckpt" / "rest.pt")
    for path in (folder / "last.ckpt", best, *folder.glob("*.nemo")):
        assert_same({"average": load(path).state_dict()}, {"average": wanted["saved"]["average"]})
    assert RunFolder(folder.parent).newest_checkpoint() == folder / "last.ckpt"
    assert [path.name for path in folder.glob(".*")] == []


def test_files_and_folders_take_each_others_place(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Resumed without sharding, the folder becomes a file; resumed with it, a folder again."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (saved[0] / "last.ckpt").rename(folder / "last.ckpt")
    alone = trained_model(World(), 2)
    state = restore(read_checkpoint(folder / "last.ckpt"), alone)
    state.batch += 1
    saver(tmp_path, World()).save_last(state, alone)
    assert (folder / "last.ckpt").is_file()
    found = on_ranks(file_to_folder, 2, tmp_path)[0]
    assert_same(found, saved[1]["saved"])
    assert (folder / "last.ckpt").is_dir()
    assert [path.name for path in folder.iterdir()] == ["last.ckpt"]


def file_to_folder(world: World, folder: Path) -> dict[str, dict[str, Tensor]]:
    trained = trained_model(world, 3)
    state = restore(read_checkpoint(RunFolder(folder).last_checkpoint), trained)
    state.batch += 1
    saver(folder, world).save_last(state, trained)
    return whole_state(trained, world)


def test_a_folder_that_lost_a_shard_or_holds_other_types_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "x.ckpt"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"x\.ckpt/rest\.pt: no such file"):
        load(folder)
    torch.save({}, folder / "rest.pt")
    (folder / ".metadata").write_bytes(pickle.dumps(AudioNoiseBatch))
    with pytest.raises(CheckpointError, match=r"not a readable index of shards: contains a nest_ssl\..*Batch; refused"):
        load(folder)
