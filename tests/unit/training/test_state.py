"""Which checkpoint a run continues from when some of them are damaged."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nest_ssl.config import ExperimentConfig
from nest_ssl.nemo_file import CheckpointError, nemo_config
from nest_ssl.run_folder import BEFORE, LAST, RunFolder
from nest_ssl.training.state import _check_tensors, check_inputs, examine_checkpoint, restore
from tests.helpers import tiny_model

RESUME = ExperimentConfig(resume_if_exists=True, resume_ignore_no_checkpoint=True)
WEIGHTS = torch.arange(1000.0)
LEFT_OUT = object()


def write(path: Path, time_s: int, *, resumed_from: Path | None = None, **more: Any) -> Path:
    """A checkpoint as training writes it, as far as choosing one is concerned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    memory: dict[str, Any] = {"best": {}, "resumed_from": None if resumed_from is None else str(resumed_from)}
    content = {
        "global_step": 6,
        "data_position": {"epoch": 1, "batch": 2, "world_size": 1},
        "optimizer_states": [{"state": {}, "param_groups": []}],
        "lr_schedulers": [],
        "progress": {"memory": memory, "batches_seen": 6},
        "state_dict": {"w": WEIGHTS},
    }
    content = {key: value for key, value in {**content, **more}.items() if value is not LEFT_OUT}
    torch.save(content, path)
    os.utime(path, (time_s, time_s))
    return path


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(WEIGHTS.numpy().tobytes()) + 7] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_a_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [flip_a_bit, truncate, empty, make_a_pipe, make_a_dangling_link, make_a_folder, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_continues_from_the_newest_good_checkpoint(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder, said = RunFolder(tmp_path), list[str]()
    folder.saved.write_text("step 6\n")
    write(folder.checkpoints / "best.ckpt", 1000)
    before = write(folder.checkpoints / BEFORE, 2000)
    last = write(folder.checkpoints / LAST, 3000)
    assert folder.checkpoint_to_resume(RESUME, examine_checkpoint, said.append) == last
    assert said == []
    damage(last)
    assert folder.checkpoint_to_resume(RESUME, examine_checkpoint, said.append) == before
    assert f"passed over a checkpoint: {last}: " in said[0]
    assert f"resuming from {before} instead" in said[1]


@pytest.mark.parametrize(
    ("part", "value", "named"),
    [
        ("global_step", None, "global_step: expected int, got null"),
        ("global_step", -1, "global_step: expected int >= 0"),
        ("global_step", 10**12, "more steps than batches"),
        ("global_step", "six", "global_step: expected int, got str"),
        ("global_step", LEFT_OUT, "missing required field global_step"),
        ("state_dict", LEFT_OUT, "missing required field state_dict"),
        ("state_dict", [1], "state_dict: expected object, got array"),
        ("state_dict", WEIGHTS, "a part of it: 'tensor' object has no"),
        ("lr_schedulers", LEFT_OUT, "missing required field lr_schedulers"),
        ("optimizer_states", [], "optimizer_states: expected array of length >= 1"),
        (
            "optimizer_states",
            [{"state": "x", "param_groups": []}],
            r"optimizer_states.*state: expected object, got str",
        ),
        ("data_position", {}, "data_position: object missing required field epoch"),
        ("data_position", [7], "data_position: expected object, got array"),
        ("data_position", {"epoch": 0, "batch": -3, "world_size": 1}, "data_position.batch: expected int >= 0"),
        ("data_position", {"epoch": 0, "batch": "2", "world_size": 1}, "data_position.batch: expected int, got str"),
        ("data_position", {"epoch": 0, "batch": 2, "world_size": 0}, "data_position.world_size: expected int >= 1"),
        ("lr_schedulers", [{"last_epoch": 7}], "its schedule has made more steps than the run"),
        ("lr_schedulers", [{"last_epoch": None}], "last_epoch: expected int, got null"),
        ("epoch", 9, "it is in epoch 9 and in epoch 1"),
        ("epoch_means", None, "epoch_means: expected object, got null"),
        ("epoch_means", {"epoch": 1, "sums": {"x": "y"}}, "epoch_means.sums.*: expected tensor, got str"),
        ("progress", "x", "progress: expected object, got str"),
        ("progress", {"batches_seen": 6, "memory": {"best": [1]}}, "progress.memory.best: expected object"),
        ("progress", {"batches_seen": 6, "memory": {}, "epoch_is_over": "x"}, "epoch_is_over: expected bool, got str"),
    ],
)
def test_a_checkpoint_with_an_odd_part_is_passed_over_and_named(
    tmp_path: Path, part: str, value: Any, named: str
) -> None:
    folder, said = RunFolder(tmp_path), list[str]()
    before = write(folder.checkpoints / BEFORE, 2000)
    last = write(folder.checkpoints / LAST, 3000, **{part: value})
    assert folder.checkpoint_to_resume(RESUME, examine_checkpoint, said.append) == before
    assert re.search(f"passed over a checkpoint: {last}: is damaged: .*{named}", said[0])


def test_a_tensor_whose_data_is_too_short_is_noticed_though_its_checksum_is_right(tmp_path: Path) -> None:
    """Torch maps the file, and would take what comes after the data for the rest of the tensor."""
    path = write(tmp_path / "x.ckpt", 1000, state_dict={"w": WEIGHTS, "next": torch.ones(9000)})
    with zipfile.ZipFile(path) as archive:
        members = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data[:1] if name.endswith("data/0") else data)
    with pytest.raises(CheckpointError, match=r"x\.ckpt: is damaged: its tensors are not as long as their data"):
        examine_checkpoint(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("trick", ["packed", "other byte order", "twice"])
def test_an_archive_that_torch_would_map_wrongly_is_refused(tmp_path: Path, trick: str) -> None:
    path = write(tmp_path / "x.ckpt", 1000)
    with zipfile.ZipFile(path) as archive:
        members = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    if trick == "other byte order":
        members = [(name, b"big" if name.endswith("byteorder") else data) for name, data in members]
    if trick == "twice":
        members += [(name, bytes(len(data))) for name, data in members if name.endswith("data/0")]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if trick == "packed" else zipfile.ZIP_STORED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    with pytest.raises(CheckpointError, match=r"x\.ckpt: (is damaged|not a readable)"):
        examine_checkpoint(path)


def model_and_checkpoint() -> tuple[Any, dict[str, Any]]:
    """What is trained, and a checkpoint of it as `restore` is given it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    content = {"path": "x.ckpt", "global_step": 1, "state_dict": model.state_dict()}
    content["optimizer_states"] = [optimizer.state_dict()]
    return SimpleNamespace(model=model, step=SimpleNamespace(optimizer=optimizer)), copy.deepcopy(content)


def test_tensors_of_another_kind_or_shape_are_refused_before_anything_is_loaded() -> None:
    """A fused optimizer reads and writes beyond a moment that is too small."""
    trained, good = model_and_checkpoint()
    _check_tensors(good, trained)
    nan = torch.full((2, 3), float("nan"))
    for wrong in (torch.zeros(2, 3).bool(), torch.zeros(2, 3).char(), torch.zeros(2, 3, dtype=torch.complex64), nan):
        _, bad = model_and_checkpoint()
        bad["state_dict"]["weight"] = wrong
        with pytest.raises(CheckpointError, match=r"(?s)x\.ckpt: .*weight"):
            _check_tensors(bad, trained)
    for wrong in (torch.zeros(3), torch.zeros(2, 3).long(), nan):
        _, bad = model_and_checkpoint()
        bad["optimizer_states"][0]["state"][0]["exp_avg"] = wrong
        with pytest.raises(CheckpointError, match=r"x\.ckpt: the optimizer's exp_avg of parameter 0 is not"):
            _check_tensors(bad, trained)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda saved: saved["param_groups"].clear(), "its optimizer numbers the parameters otherwise"),
        (lambda saved: saved["param_groups"][0]["params"].reverse(), "its optimizer numbers the parameters otherwise"),
        (lambda saved: saved["state"].pop(1), "its optimizer has the state of 1 of 2 weights"),
        (lambda saved: saved["state"][1].pop("exp_avg_sq"), "its optimizer's state of parameter 1 is incomplete"),
        (lambda saved: saved["state"][0]["exp_avg_sq"].sub_(1), "exp_avg_sq of parameter 0 is not"),
        (lambda saved: saved["state"][0]["step"].fill_(-5), "step of parameter 0 is not"),
        (lambda saved: saved["state"][0].update(step="six"), "step of parameter 0 is not .*'six'"),
        (lambda saved: saved["state"][0]["step"].fill_(2), "its optimizer has made more steps than the run"),
        (lambda saved: saved["state"][0].update(exp_avg=torch.zeros(2, 3).bfloat16()), r"bfloat16 \[2, 3\]"),
        (
            lambda saved: saved["state"][0].update(exp_avg=torch.zeros(2, 3).to_sparse()),
            "exp_avg of parameter 0 is not",
        ),
    ],
)
def test_an_optimizer_state_that_is_not_of_these_parameters_is_refused(
    damage: Callable[[dict[str, Any]], object], named: str
) -> None:
    trained, bad = model_and_checkpoint()
    damage(bad["optimizer_states"][0])
    with pytest.raises(CheckpointError, match=rf"x\.ckpt: .*{named}"):
        _check_tensors(bad, trained)


def test_weights_that_were_rounded_are_not_resumed() -> None:
    trained, bad = model_and_checkpoint()
    bad["state_dict"]["weight"] = bad["state_dict"]["weight"].bfloat16()
    with pytest.raises(CheckpointError, match=r"x\.ckpt: its weight is bfloat16, not float32"):
        _check_tensors(bad, trained)


def test_another_architecture_is_refused_with_a_few_names_and_the_way_out() -> None:
    trained, bad = model_and_checkpoint()
    bad["state_dict"] = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(30))).state_dict()
    with pytest.raises(CheckpointError, match=r"another exp_manager\.name; init_from_ptl_ckpt") as error:
        _check_tensors(bad, trained)
    assert len(str(error.value).splitlines()) < 12


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_that_has_saved_never_starts_from_the_beginning(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = RunFolder(tmp_path)
    folder.saved.write_text("step 12\n")
    damage(write(folder.checkpoints / LAST, 3000))
    with pytest.raises(ValueError, match=r"has saved a checkpoint of step 12, and none can be resumed now: .*backup"):
        folder.checkpoint_to_resume(RESUME, examine_checkpoint)


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).checkpoint_to_resume(RESUME, examine_checkpoint) is None


def test_weights_alone_are_passed_over(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    whole = write(folder.checkpoints / "a.ckpt", 1000)
    torch.save({"state_dict": {}}, folder.checkpoints / "b.ckpt")
    assert folder.checkpoint_to_resume(RESUME, examine_checkpoint) == whole


def test_a_named_checkpoint_that_is_damaged_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.ckpt", 1000)
    flip_a_bit(path)
    with pytest.raises(ValueError, match=r"x\.ckpt: is damaged: .* fails its checksum"):
        RunFolder(tmp_path).checkpoint_to_resume(ExperimentConfig(resume_from_checkpoint=str(path)), examine_checkpoint)


def test_a_requeued_job_continues_from_what_it_has_saved_since_the_named_checkpoint(tmp_path: Path) -> None:
    folder, said = RunFolder(tmp_path / "run"), list[str]()
    named = write(tmp_path / "other" / "start.ckpt", 1000)
    exp = ExperimentConfig(resume_if_exists=True, resume_from_checkpoint=str(named))
    last = write(folder.last_checkpoint, 3000)  # of a run before: the user wants to go back
    assert folder.checkpoint_to_resume(exp, examine_checkpoint, said.append) == named
    assert said == []
    write(last, 4000, resumed_from=named)
    assert folder.checkpoint_to_resume(exp, examine_checkpoint, said.append) == last
    assert f"has resumed from {named} before; continuing from {last}, which is newer" in said[0]


def test_a_checkpoint_that_has_lost_its_schedule_is_refused() -> None:
    trained, content = model_and_checkpoint()
    trained.average, trained.step.schedule, trained.step.scaler = None, object(), None
    content |= {"progress": {"batches_seen": 1, "memory": {}}, "lr_schedulers": []}
    content["hyper_parameters"] = {"cfg": {"optim": {"sched": {"name": "NoamAnnealing"}}}}
    with pytest.raises(CheckpointError, match=r"x\.ckpt: is damaged: its lr_schedulers is empty"):
        restore(content, trained)


def test_an_optimizer_without_its_state_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    trained, content = model_and_checkpoint()
    trained.average, trained.step.schedule, trained.step.scaler, trained.world_size = None, None, None, 2
    trained.loader = SimpleNamespace(plan_hash="same", num_batches=8)
    content |= {"progress": {"batches_seen": 1, "memory": {}}, "lr_schedulers": []}
    content["data_position"] = {"epoch": 0, "batch": 1, "world_size": 2, "plan_hash": "same"}
    restore(content, trained)
    assert not caplog.messages
    content["optimizer_states"][0]["state"] = {}
    restore(content, trained)
    assert "x.ckpt: has no state of the optimizer, whose means of gradients start again from zero" in caplog.text


def test_the_state_of_another_optimizer_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    trained: Any = SimpleNamespace(model=None, average=None, step=SimpleNamespace(optimizer=optimizer))
    with pytest.raises(ValueError, match=r"model\.optim\.name: the checkpoint contains the state of AdamW, which SGD"):
        restore({"progress": {"batches_seen": 6, "memory": {}, "optimizer": "AdamW"}}, trained)


@pytest.mark.parametrize(("batch", "is_good"), [(8, True), (9, False), (10**9, False)])
def test_a_place_that_the_epoch_does_not_have_is_refused(batch: int, is_good: bool) -> None:
    trained, content = model_and_checkpoint()
    trained.average, trained.step.schedule, trained.step.scaler, trained.world_size = None, None, None, 2
    trained.loader = SimpleNamespace(plan_hash="same", num_batches=8)
    content |= {"progress": {"batches_seen": 1, "memory": {}}, "lr_schedulers": []}
    content["data_position"] = {"epoch": 0, "batch": batch, "world_size": 2, "plan_hash": "same"}
    if is_good:
        assert restore(content, trained).batch == batch
        return
    with pytest.raises(CheckpointError, match=rf"x\.ckpt: is damaged: it is at batch {batch} of an epoch of 8"):
        restore(content, trained)


@pytest.mark.parametrize(
    "changed",
    [
        {"normalize": "all_features"},
        {"preemph": None},
        {"window": "hamming"},
        {"window_stride": 0.02},
        {"log": False},
        {"mag_power": 1.0},
        {"log_zero_guard_value": 1.0},
        {"lowfreq": 50.0},
    ],
)
def test_features_other_than_those_of_the_checkpoint_are_refused_with_their_key(changed: dict[str, Any]) -> None:
    cfg = tiny_model().cfg
    content = {"path": "x.ckpt", "hyper_parameters": {"cfg": nemo_config(cfg, "EncDecDenoiseMaskedTokenPredModel")}}
    with pytest.raises(CheckpointError, match=rf"model\.preprocessor\.{next(iter(changed))}: .* of x\.ckpt"):
        check_inputs(replace(cfg.preprocessor, **changed), content)


def test_the_same_features_written_in_another_way_are_those_of_the_checkpoint() -> None:
    cfg = tiny_model().cfg.preprocessor
    cfg = replace(cfg, window=None, normalize="NA", preemph=None)
    content = {"path": "x.ckpt", "hyper_parameters": {"cfg": {"preprocessor": dataclasses.asdict(cfg)}}}
    samples, high_hz = cfg.num_window_samples, cfg.sample_rate / 2
    other = replace(cfg, window="none", normalize="none", preemph=0.0, n_window_size=samples, highfreq=high_hz)
    check_inputs(replace(other, dither=0.1, pad_to=0), content)
    check_inputs(other, {"path": "first_edition.ckpt"})
