"""Which checkpoint a run continues from when some of them are damaged."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nest_ssl.config import CheckpointConfig, EmaConfig, ExperimentConfig
from nest_ssl.config.training import EarlyStoppingConfig
from nest_ssl.nemo_file import CheckpointError, nemo_config
from nest_ssl.run_folder import BEFORE, LAST, RunFolder
from nest_ssl.training.ema import Average
from nest_ssl.training.optimizers import build_optimizer, check_resumable
from nest_ssl.training.parallel import World
from nest_ssl.training.saving import Saver
from nest_ssl.training.schedules import build_schedule
from nest_ssl.training.state import (
    Memory,
    Trained,
    TrainState,
    _check_form,
    _check_tensors,
    check_inputs,
    checkpoint_of,
    examine_checkpoint,
    restore,
)
from nest_ssl.training.stopping import EarlyStopping, StoppingState
from nest_ssl.training.watching import Watch
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


def test_a_checkpoint_that_may_not_be_read_is_not_passed_over(tmp_path: Path) -> None:
    folder, said = RunFolder(tmp_path), list[str]()
    write(folder.checkpoints / BEFORE, 2000)
    last = write(folder.checkpoints / LAST, 3000)

    def refuse(path: Path) -> str | None:
        raise PermissionError(13, "Permission denied", str(path))

    with pytest.raises(ValueError, match=rf"{last}: the newest checkpoint cannot be opened: Permission denied"):
        folder.checkpoint_to_resume(RESUME, refuse, said.append)
    assert said == []


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
        ("state_dict", WEIGHTS, "state_dict: expected object, got tensor"),
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
        ("lr_schedulers", [{"last_epoch": 7}], "its schedule is at step 7, and the run at step 6"),
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
        (lambda saved: [one.pop("exp_avg") for one in saved["state"].values()], "state of parameter 0 is incomplete"),
        (lambda saved: saved["state"][0]["exp_avg_sq"].sub_(1), "exp_avg_sq of parameter 0 is not"),
        (lambda saved: saved["state"][0]["step"].fill_(-5), "step of parameter 0 is not"),
        (lambda saved: saved["state"][0].update(step="six"), "step of parameter 0 is not .*'six'"),
        (lambda saved: saved["state"][0]["step"].fill_(2), "its optimizer has made more steps than the run"),
        (lambda saved: saved["state"][0]["step"].fill_(0), "its optimizer has moments of parameter 0 but no step"),
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
    trained.loader, trained.num_batches = SimpleNamespace(plan_hash="same", num_batches=8), 8
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
    trained.loader, trained.num_batches = SimpleNamespace(plan_hash="same", num_batches=8), 8
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


# ---- a checkpoint that was edited by hand ----


class Real:
    """A small run after three steps of an epoch of four: what is trained, and its checkpoint."""

    def __init__(self) -> None:
        self.model = tiny_model({"encoder.n_layers": 1, "encoder.d_model": 16})
        optimizer = build_optimizer(self.model, self.model.cfg.optim)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        assert self.model.cfg.optim.sched is not None
        schedule = build_schedule(optimizer, self.model.cfg.optim.sched, 100)
        scaler = torch.amp.GradScaler("cpu")
        average = Average(EmaConfig(enable=True), self.model)
        for step in range(3):
            optimizer.step()
            schedule.step()
            average.update(step + 1)
        bad_data: Any = SimpleNamespace(state_dict=lambda: {"num_read": 7, "num_bad": {"speech": 1}})
        bad_data.load_state_dict = lambda state, epoch: None
        loader = SimpleNamespace(plan_hash="same", num_batches=4, bad_data=bad_data)
        step_of: Any = SimpleNamespace(optimizer=optimizer, schedule=schedule, scaler=scaler, average=average)
        self.trained = Trained(self.model, step_of, loader, 1, num_batches=4)  # type: ignore[arg-type]
        stopping: StoppingState = {"best": 1.0, "last": 2.0, "wait_count": 1}
        self.state = TrainState(step=3, epoch=1, batch=3, batches_seen=7, memory=Memory({"a.ckpt": 1.0}, stopping, 5.0))
        self.state.means.start(1)
        self.state.means.add("train_loss_epoch", torch.tensor(2.0), 4)
        self.content = copy.deepcopy(checkpoint_of(self.state, self.trained))

    def resume(self, content: dict[str, Any], path: Path) -> TrainState:
        """What the trainer and the loop do with what `torch.load` returns."""
        checkpoint = {**content, "path": path}
        _check_form(checkpoint)
        check_resumable(self.model.cfg.optim, checkpoint, path)
        check_inputs(self.model.cfg.preprocessor, checkpoint)
        state = restore(checkpoint, self.trained)
        state.means.add("train_loss_epoch", torch.tensor(2.0), 4)
        assert all(value.ndim == 0 for value in state.means.means().values())
        if state.memory.early_stopping is not None:
            EarlyStopping(EarlyStoppingConfig(), has_validation=True).resume(state.memory.early_stopping)
        Saver(RunFolder(path.parent), CheckpointConfig(), "x", World(), Watch()).start(state)
        return state


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to every section and leaf; of the weights, and of the second and later parameters, none."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        here = (*path, key)
        if here[-2:-1] == ("state",) and key > 0:
            continue
        yield here
        is_read = here[:2] != ("hyper_parameters", "cfg") or here[2:3] in [(), ("preprocessor",), ("optim",)]
        if isinstance(value, (dict, list)) and key not in ("state_dict", "current_model_state", "params") and is_read:
            yield from places(value, here)


def edited(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The same content, not copied but for what is on the way, with another value at this place."""
    if not place:
        return value
    changed = copy.copy(content)
    if len(place) == 1 and value is LEFT_OUT:
        del changed[place[0]]
    else:
        changed[place[0]] = edited(content[place[0]], place[1:], value)
    return changed


WRONG = {
    "left out": LEFT_OUT,
    "null": None,
    "text": "x" * 5000,
    "list": [1, "x"],
    "mapping": {"x" * 5000: "y"},
    "empty": {},
    "NaN": float("nan"),
    "negative": -3,
    "huge": 10**400,
    "tensor": torch.ones(3),
    "NaN tensor": torch.tensor(float("nan")),
}
UNUSED = (
    ("nest_ssl_version",),
    ("hyper_parameters", "cfg"),  # but for the preprocessor and the name of the optimizer
    ("lr_schedulers", 0, "_last_lr"),
    ("lr_schedulers", 0, "_step_count"),
    ("lr_schedulers", 0, "settings"),
    ("optimizer_states", 0, "param_groups", 0),  # the configuration decides the settings
    ("data_position", "plan_hash"),  # another one is a warning
    ("progress", "memory", "resumed_from"),
    ("progress", "memory", "early_stopping", "best"),  # what is watched may be any number
    ("progress", "memory", "early_stopping", "last"),
)
"""Places whose values do not decide how a run continues: any may be there, but none may end in a traceback."""
OPTIONAL = (
    *(("epoch",), ("hyper_parameters",), ("epoch_means",), ("data_position", "bad_data")),
    *(("progress", key) for key in ("epoch_is_over", "validation_is_due", "scaler", "optimizer")),
    *(("progress", "memory", key) for key in ("best", "early_stopping", "elapsed_s")),
    *(("progress", "memory"), ("progress", "memory", "best", "a.ckpt"), ("optimizer_states", 0, "state")),
    *(("data_position", "bad_data", "num_bad"), ("data_position", "bad_data", "num_bad", "speech")),
)
"""Places that checkpoints of earlier versions do not have, or where null and nothing are good values."""


@pytest.fixture(scope="module")
def real() -> Real:
    return Real()


@pytest.mark.parametrize("wrong", WRONG)
def test_a_checkpoint_edited_by_hand_is_refused_in_one_short_message_that_names_it(
    real: Real, wrong: str, tmp_path: Path
) -> None:
    path, accepted, badly_refused = tmp_path / "last.ckpt", [], []
    for place in places(real.content):
        try:
            real.resume(edited(real.content, place, WRONG[wrong]), path)
        except ValueError as error:
            if str(path) not in str(error) or len(str(error)) >= 600:
                badly_refused.append((place, str(error)))
            continue
        is_harmless = any(place[: len(one)] == one for one in UNUSED)
        if not is_harmless and not (wrong in ("left out", "null", "empty") and place in OPTIONAL):
            accepted.append(place)
    assert badly_refused == []
    score = [("progress", "memory", "best", "a.ckpt")]
    assert accepted == {"negative": score, "NaN": score, "mapping": [("progress", "memory")]}.get(wrong, [])


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("lr_schedulers", 0, "last_epoch"), 1, "its schedule is at step 1, and the run at step 3"),
        (("epoch_means", "sums"), {"x": torch.ones(())}, "epoch_means: sums and weights have different names"),
        (("epoch_means", "sums", "train_loss_epoch"), torch.tensor(1), "epoch_means: a sum or weight is not a finite"),
        (("current_model_state",), LEFT_OUT, "only one of current_model_state and progress.average"),
        (("current_model_state",), None, "current_model_state: expected object, got null"),
        (("progress", "memory", "early_stopping"), {"x": 1}, "progress.memory.early_stopping: object missing required"),
        (
            ("progress", "memory", "best"),
            {"x" * 300: 1.0},
            "key in progress.memory.best: expected str matching",
        ),
        (("hyper_parameters",), "text", "hyper_parameters: expected object, got str"),
        (
            ("hyper_parameters", "cfg", "preprocessor", "window_size"),
            "x",
            "hyper_parameters.*: preprocessor.window_size",
        ),
        (("optimizer_states", 0, "state", 0, "step"), torch.ones(3), "the optimizer's step of parameter 0 is not"),
        (("progress", "optimizer"), "AdamX", "contains the state of AdamX, which AdamW cannot continue from"),
        (("progress", "scaler", "scale"), LEFT_OUT, "is damaged: progress.scaler: object missing required field scale"),
    ],
)
def test_what_is_wrong_with_an_edited_checkpoint_is_named(
    real: Real, place: tuple[Any, ...], value: Any, named: str, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}:? .*{named}"):
        real.resume(edited(real.content, place, value), path)


@pytest.mark.parametrize("batch", [3, 4])
def test_the_place_in_the_data_decides_whether_an_epoch_is_over(
    real: Real, batch: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = edited(real.content, ("data_position", "batch"), batch)
    for flag in (True, False):
        caplog.clear()
        state = real.resume(edited(content, ("progress", "epoch_is_over"), flag), tmp_path / "last.ckpt")
        assert state.epoch_is_over == (batch == 4)
        assert (f"last.ckpt: its epoch_is_over is wrong at batch {batch} of 4" in caplog.text) == (flag != (batch == 4))


def test_a_schedule_that_was_added_to_a_run_later_continues_where_it_was(
    real: Real, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {**real.content["lr_schedulers"][0], "last_epoch": 1, "_step_count": 2}
    real.resume({**real.content, "lr_schedulers": [saved]}, tmp_path / "last.ckpt")
    assert "last.ckpt: its schedule is at step 1, the run at step 3; both continue there" in caplog.text


def test_a_real_checkpoint_is_good_as_it_is(real: Real, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "last.ckpt"
    torch.save(real.content, path)
    assert examine_checkpoint(path) is None
    assert real.resume(real.content, path).memory == real.state.memory
    assert not caplog.messages
