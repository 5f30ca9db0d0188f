"""Weights shared out over real processes, compared with whole ones: steps, averages, checkpoints."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from nest_ssl import load
from nest_ssl.config import CheckpointConfig, EmaConfig, ExperimentConfig, OptimConfig
from nest_ssl.data import AudioNoiseBatch
from nest_ssl.data.batch.loader import BadDataLog
from nest_ssl.fast import encoder as fused_encoder
from nest_ssl.fast.engine import accelerate
from nest_ssl.nemo_file import CheckpointError
from nest_ssl.run_folder import RunFolder
from nest_ssl.training import sharding
from nest_ssl.training.ema import Average
from nest_ssl.training.optimizers import build_optimizer
from nest_ssl.training.parallel import World
from nest_ssl.training.saving import MOST_FAILURES, Saver
from nest_ssl.training.state import Trained, TrainState, averaged_weights, read_checkpoint, restore
from nest_ssl.training.step import Clipping, TrainStep
from nest_ssl.training.trainer import Fit
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
    bad_data = BadDataLog(max_bad_fraction=1.0, utterances_per_epoch=None)
    loader: Any = SimpleNamespace(plan_hash="same", bad_data=bad_data)
    return Trained(model, step, loader, world.size)


def take_steps(trained: Trained, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        torch.manual_seed(number)
        audio, length = 0.1 * torch.randn(2, 16_000), torch.tensor([16_000, 12_000])
        batch = AudioNoiseBatch(None, audio, length, audio, length, audio, length)
        losses.append(float(trained.step(batch, begins=True, updates=True, step=number).loss))
    return losses


def validate(trained: Trained) -> float:
    """The loss of the average, in the middle of training."""
    average = trained.average
    assert average is not None
    trained.model.eval()
    torch.manual_seed(0)
    audio, length = 0.1 * torch.randn(1, 16_000), torch.tensor([16_000])
    with average.in_the_model(), torch.no_grad():
        loss = float(trained.model.masked_loss(audio, length, audio, length).loss)
    trained.model.train()
    return loss


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


# ---- what the ranks do; starting them takes longer than all of it ----

WAYS = {"clipped by norm": Clipping(0.05), "clipped by value": Clipping(1e-3, by_value=True), "fused": Clipping(0.05)}


def train(world: World, way: str) -> dict[str, Any]:
    trained = trained_model(world, 1, WAYS[way], "on" if way == "fused" and world.size > 1 else "off")
    validated = [validate(trained)]
    losses = take_steps(trained, range(2))
    validated.append(validate(trained))
    losses += take_steps(trained, range(2, 3))
    before = whole_state(trained, world)
    for parameter in trained.step.gradients.parameters:
        if parameter.grad is not None and world.rank == 0:
            sharding.part(parameter.grad).view(-1)[:1] = torch.nan  # one rank's part is enough
    trained.step._update()
    after = whole_state(trained, world)
    plan = trained.step.engine.description
    return {"losses": losses, "validated": validated, "before": before, "after": after, "plan": plan}


def train_and_save(world: World, folder: Path) -> dict[str, Any]:
    """Steps of every way; then two more of a new model, saved, and what an undisturbed third one gives."""
    fused_encoder.compiled = lambda function, _: torch.compile(function, backend="eager", fullgraph=True)  # type: ignore[assignment]
    ways = {way: train(world, way) for way in WAYS}
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    trained = trained_model(world, 1)
    take_steps(trained, range(2))
    ours, state = saver(folder, world), TrainState(step=2, batch=2, batches_seen=2)
    ours.save_best(state, trained, {"val_loss": 1.0})
    ours.save_last(state, trained)
    ours.save_nemo_at_end(trained)
    saved = whole_state(trained, world)
    losses = take_steps(trained, range(2, 3))
    refused = failure(ours, trained, world)
    return {"ways": ways, "num_graphs": num_graphs, "saved": saved, "losses": losses, "refused": refused}


def failure(ours: Saver, trained: Trained, world: World) -> str:
    """What a rank says when the disk of rank 1 is full, and stays so."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if world.rank == 1:
        FileSystemWriter.write_data = full  # type: ignore[assignment]
    try:
        for step in range(3, 3 + MOST_FAILURES):
            ours.save_last(TrainState(step=step), trained)
    except OSError as error:
        return str(error)
    return "nothing"


def resume(world: World, path: Path) -> dict[str, Any]:
    trained = trained_model(world, 2)
    state = restore(read_checkpoint(path), trained)
    assert (state.step, state.batch) == (2, 2 * 2 // world.size)
    restored = whole_state(trained, world)
    ours = saver(path.parent.parent, world)
    ours.last_is_good = True
    ours.save_last(state, trained)
    ours.finish()
    return {"restored": restored, "losses": take_steps(trained, range(2, 3))}


def resume_all(world: World, paths: list[Path], damaged: RunFolder) -> dict[str, Any]:
    return {"good": [resume(world, path) for path in paths], "damaged": fall_back(world, damaged)}


def fall_back(world: World, folder: RunFolder) -> dict[str, Any]:
    """What the trainer does with a run whose `last.ckpt` is damaged, and what the next save leaves."""
    trained = trained_model(world, 2)
    trainer: Any = SimpleNamespace(checkpoint=folder.last_checkpoint)
    cfg, model, watch = SimpleNamespace(), trained.model, Watch()
    fit = Fit(trainer, cfg, model, folder, world, watch, read_checkpoint(folder.last_checkpoint))  # type: ignore[arg-type]
    fit.exp = ExperimentConfig(resume_if_exists=True)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nest_ssl").addHandler(handler)
    state = fit._restored(trained)
    restored = whole_state(trained, world)
    ours = saver(folder.path, world)
    ours.last_is_good = trainer.checkpoint == folder.last_checkpoint
    ours.save_last(TrainState(step=state.step + 1, batches_seen=state.step + 1), trained)
    return {"step": state.step, "from": trainer.checkpoint.name, "restored": restored, "said": said}


def saver(folder: Path, world: World) -> Saver:
    return Saver(RunFolder(folder), CheckpointConfig(), "name", world, Watch())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two ranks: the folder of its checkpoints, and what rank 0 saw."""
    folder = tmp_path_factory.mktemp("run")
    return folder / "checkpoints", on_ranks(train_and_save, 2, folder)[0]


@pytest.mark.parametrize("way", WAYS)
def test_sharded_steps_are_those_of_whole_weights(run: tuple[Path, dict[str, Any]], way: str) -> None:
    """Clipped, averaged, validated with the average; a gradient that is not finite on one rank changes nothing."""
    alone, first = train(World(), way), run[1]["ways"][way]
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert first["validated"] == pytest.approx(alone["validated"], rel=1e-4)
    for kind, tensors in alone["before"].items():
        for name, value in tensors.items():
            torch.testing.assert_close(first["before"][kind][name], value, rtol=1e-3, atol=2e-5, msg=f"{kind} {name}")
    assert_same(first["after"], {kind: first["before"][kind] for kind in ("weights", "moments")})


def test_sharded_layers_are_compiled_once_for_all_of_them(run: tuple[Path, dict[str, Any]]) -> None:
    assert run[1]["ways"]["fused"]["plan"].startswith("fused layers")
    assert run[1]["num_graphs"] == 1


def test_a_rank_that_cannot_write_fails_all_of_them_and_leaves_the_earlier_checkpoint(
    run: tuple[Path, dict[str, Any]],
) -> None:
    said = run[1]["refused"]
    assert "last.ckpt: the checkpoint could not be written: No space left on device" in said
    assert "It was tried 3 times" in said
    assert read_checkpoint(run[0] / "last.ckpt")["global_step"] == 2


def test_a_checkpoint_in_shards_loads_as_a_model(run: tuple[Path, dict[str, Any]]) -> None:
    """Under both its names; they and the `.nemo` file hold the average."""
    folder, wanted = run
    best = next(folder.glob("*step=2.ckpt"))
    assert (best / "rest.pt").samefile(folder / "last.ckpt" / "rest.pt")
    for path in (folder / "last.ckpt", best, *folder.glob("*.nemo")):
        assert_same({"average": load(path).state_dict()}, {"average": wanted["saved"]["average"]})
    assert RunFolder(folder.parent).newest_checkpoint() == folder / "last.ckpt"
    assert [path.name for path in folder.glob(".*")] == []


def test_any_number_of_ranks_resumes_a_folder_of_shards_or_a_file(
    run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Two sharded ranks → one whole → three sharded; `last.ckpt` is a folder, a file, and a folder again."""
    wanted = run[1]
    last = [tmp_path / name / "checkpoints" / "last.ckpt" for name in ("from folder", "from file")]
    for path in last:
        shutil.copytree(run[0] / "last.ckpt", path)
    found = [resume(World(), last[1])]
    assert last[1].is_file()
    damaged = RunFolder(tmp_path / "damaged")
    for name in ("last.ckpt", "last-before.ckpt"):
        shutil.copytree(run[0] / "last.ckpt", damaged.checkpoints / name)
    shard = flip_a_bit(damaged.last_checkpoint, wanted)
    of_three = on_ranks(resume_all, 3, last, damaged)
    found += of_three[0]["good"]
    assert all(path.is_dir() for path in last)
    for one in found:
        assert_same(one["restored"], wanted["saved"])
        assert one["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert {name.name for path in last for name in path.parent.iterdir()} == {"last.ckpt", "last-before.ckpt"}
    # A shard that only some ranks read is damaged: all ranks take the checkpoint before, which is kept until a new one.
    first = of_three[0]["damaged"]
    assert_same(first["restored"], wanted["saved"])
    assert [rank["damaged"]["from"] for rank in of_three] == ["last-before.ckpt"] * 3
    assert f"passed over a checkpoint: {shard}: state_dict." in first["said"][0]
    assert f"resuming from {damaged.checkpoints / 'last-before.ckpt'} instead" in first["said"][1]
    assert not any("passed over" in line for line in of_three[1]["damaged"]["said"])
    steps = {path.name: read_checkpoint(path)["global_step"] for path in damaged.checkpoints.iterdir()}
    assert steps == {"last.ckpt": 3, "last-before.ckpt": 2}


def test_a_folder_that_is_incomplete_or_holds_other_types_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "x.ckpt"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"x\.ckpt/rest\.pt: no such file"):
        load(folder)
    torch.save({}, folder / "rest.pt")
    (folder / ".metadata").write_bytes(pickle.dumps(AudioNoiseBatch))
    with pytest.raises(CheckpointError, match=r"not a readable index of shards: contains a nest_ssl\..*Batch; refused"):
        load(folder)


def flip_a_bit(folder: Path, wanted: dict[str, Any]) -> Path:
    """Damage the first half of a weight; return its shard."""
    weight = wanted["saved"]["average"]["encoder.layers.0.norm_out.weight"].numpy().tobytes()[:8]
    shard = next(path for path in folder.glob("*.distcp") if weight in path.read_bytes())
    data = bytearray(shard.read_bytes())
    data[data.index(weight)] ^= 1
    shard.write_bytes(data)
    return shard


def test_a_flipped_bit_in_a_shard_is_noticed(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    damaged = tmp_path / "last.ckpt"
    shutil.copytree(run[0] / "last.ckpt", damaged)
    shard = flip_a_bit(damaged, run[1])
    with pytest.raises(CheckpointError, match=rf"{shard}: state_dict\..* is damaged: .* fails its checksum"):
        load(damaged)


def test_shards_of_two_saves_are_noticed(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """As after copying a folder while the run was writing it: every part is whole, and they do not belong together."""
    mixed = tmp_path / "last.ckpt"
    shutil.copytree(run[0] / "last.ckpt", mixed)
    rest = torch.load(mixed / "rest.pt", weights_only=False)
    torch.save({**rest, "save": rest["save"] + 1}, mixed / "rest.pt")
    with pytest.raises(CheckpointError, match=r"last\.ckpt: is damaged: its parts are of different saves"):
        load(mixed)


def test_a_flipped_bit_in_the_index_of_shards_is_noticed(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Pickle has no checksum: another place for a shard would be as good as any."""
    damaged = tmp_path / "last.ckpt"
    shutil.copytree(run[0] / "last.ckpt", damaged)
    index = pickle.loads((damaged / ".metadata").read_bytes())
    index.planner_data = "another"
    (damaged / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"last\.ckpt/\.metadata: is damaged: it fails its checksum"):
        load(damaged)
