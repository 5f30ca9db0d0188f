"""What docs/extending.md and examples/add_augmentation.py show works, from outside the package."""

from __future__ import annotations

import re
import runpy
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from nest_ssl import plugins
from nest_ssl.config import AugmentorConfig, ConfigError, DatasetConfig, OptimConfig, ScheduleConfig, parse
from nest_ssl.data import build_loader
from nest_ssl.data.batch.collate import needed
from nest_ssl.plugins import register_augmentation, register_source
from nest_ssl.report.report import look_at_checkpoint, open_run
from nest_ssl.training.optimizers import build_optimizer
from nest_ssl.training.schedules import build_schedule
from tests.integration.runs import TINY, losses, make_corpus, run_here

ROOT = Path(__file__).parents[2]
RATE = 16000


@pytest.fixture(autouse=True)
def _forget_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (plugins.augmentations, plugins.sources, plugins.optimizers, plugins.schedules):
        monkeypatch.setattr(registry, "_things", {})


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    for i in range(6):
        soundfile.write(tmp_path / f"{i}.wav", 0.1 * rng.standard_normal(RATE + 1000 * i), RATE)
    path = tmp_path / "train.jsonl"
    path.write_text("".join(f'{{"audio_filepath": "{i}.wav", "duration": 1.0}}\n' for i in range(6)))
    return str(path)


def run_documented(heading: str) -> None:
    """Run the python block below a heading of docs/extending.md."""
    text = (ROOT / "docs" / "extending.md").read_text()
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    exec(compile(code, heading, "exec"), {"__name__": "documented"})


def config(manifest: str, **more: object) -> DatasetConfig:
    given = {"manifest_filepath": manifest, "noise_manifest": manifest, "batch_size": 3, "shuffle": True, **more}
    return parse(DatasetConfig, given)


def train_one_step(folder: Path, *more: str) -> Path:
    """Train a tiny model for one step; return the run folder."""
    exp_manager = [f"exp_manager.exp_dir={folder / 'runs'}", "exp_manager.name=run"]
    return run_here([*TINY, *exp_manager, "trainer.max_steps=1", "trainer.enable_progress_bar=false", *more])


def test_the_example_adds_an_augmentation_and_makes_a_batch_with_it(manifest: str) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "add_augmentation.py"))
    batch = example["main"](manifest)
    noisy = needed(batch.noisy_audio)[0, :RATE]
    energy = torch.fft.rfft(noisy).abs() ** 2
    assert energy[300:3401].sum() > 0.99 * energy.sum()
    assert torch.equal(needed(batch.noise), torch.zeros_like(needed(batch.noise)))


@pytest.mark.parametrize("mix", [True, False])
def test_the_documented_augmentation_changes_the_noise_the_same_with_any_number_of_workers(
    manifest: str, mix: bool
) -> None:
    run_documented("An augmentation")
    plain = build_loader(config(manifest))
    augmentor = {"_target_": "gain", "max_db": 6.0}
    loaders = [build_loader(config(manifest, batch_augmentor=augmentor, num_workers=n), mix=mix) for n in (0, 1)]
    for before, here, in_worker in zip(plain, *loaders, strict=True):
        noise = needed(here.noise)
        gains_db = 20 * torch.log10(noise.abs().sum(1) / needed(before.noise).abs().sum(1))
        assert len(gains_db.round(decimals=3).unique()) == 3
        assert gains_db.abs().max() <= 6
        assert torch.equal(noise, needed(in_worker.noise))
        assert (here.noisy_audio is not None) == mix
        noisy = needed(here.audio) + noise
        assert torch.equal(needed(here.mixed().noisy_audio), noisy)


def test_arguments_that_an_augmentation_does_not_take_are_refused(manifest: str) -> None:
    run_documented("An augmentation")
    for options in ({}, {"max_db": 1.0, "prob": 0.5}):
        with pytest.raises(ValueError, match="batch_augmentor: 'gain' cannot be built: "):
            build_loader(config(manifest, batch_augmentor={"_target_": "gain", **options}))


def test_a_saved_configuration_with_a_registered_augmentation_loads_again(manifest: str) -> None:
    run_documented("An augmentation")
    first = config(manifest, batch_augmentor={"_target_": "gain", "max_db": 2.0})
    assert first.batch_augmentor is not None
    assert first.batch_augmentor.options == {"max_db": 2.0}
    assert parse(DatasetConfig, asdict(first)) == first
    with pytest.raises(ValueError, match="batch_augmentor.prob: set it in batch_augmentor.options"):
        AugmentorConfig(_target_="gain", options={"max_db": 2.0}, prob=0.5)


def test_a_name_that_nobody_registered_is_refused(manifest: str) -> None:
    run_documented("An augmentation")
    with pytest.raises(ValueError, match="_target_: 'gains' is not a class that nest-ssl knows. Did you mean 'gain'?"):
        config(manifest, batch_augmentor={"_target_": "gains"})
    with pytest.raises(ConfigError, match="batch_augmentor.max_db: no such key"):
        config(manifest, batch_augmentor={"max_db": 6.0})
    with pytest.raises(ValueError, match="batch_augmentor.options: only for registered augmentations"):
        AugmentorConfig(options={"max_db": 6.0})
    with pytest.raises(ValueError, match="source: there is no 'npy_folder'"):
        config(manifest, source="npy_folder")


def test_an_augmentation_that_changes_shapes_is_named(manifest: str) -> None:
    class Shorter:
        def __call__(self, batch: object, *, generator: object) -> object:
            from dataclasses import replace

            return replace(batch, noise=batch.noise[:, :10])  # type: ignore[type-var,attr-defined]

    register_augmentation("shorter", Shorter)
    with pytest.raises(
        ValueError, match=r"Shorter returned a batch whose noise or noisy_audio has the shape \(3, 10\)"
    ):
        list(build_loader(config(manifest, batch_augmentor={"_target_": "shorter"})))


def test_the_documented_source_is_planned_read_and_resumed_like_files(manifest: str, tmp_path: Path) -> None:
    run_documented("A data source")
    for i in range(7):
        np.save(tmp_path / f"{i}.npy", np.full(RATE + i, 0.01 * i))
    np.save(tmp_path / "7.npy", np.array("not numbers"))
    given = config(
        manifest,
        manifest_filepath=None,
        source="npy_folder",
        source_options={"folder": str(tmp_path)},
        max_bad_fraction=0.5,
    )
    loader = build_loader(given, seed=1)
    batches = list(loader)
    assert [len(batch.audio_filepaths) for batch in batches] == [3, 3, 2]
    read = {
        path: row for batch in batches for path, row in zip(batch.audio_filepaths, needed(batch.audio), strict=True)
    }
    assert set(read) == {str(tmp_path / f"{i}.npy") for i in range(7)}
    for path, row in read.items():
        number = int(Path(path).stem)
        assert torch.equal(row[: RATE + number], torch.full((RATE + number,), 0.01 * number))
    assert list(loader.bad_data.files) == [str(tmp_path / "7.npy")]
    resumed = build_loader(given, seed=1)
    resumed.resume({**resumed.position(), "next_batch": 2})
    (last,) = resumed
    assert torch.equal(needed(last.noisy_audio), needed(batches[-1].noisy_audio))


def test_a_run_trains_validates_and_reports_on_a_registered_source_without_a_manifest(tmp_path: Path) -> None:
    run_documented("A data source")
    random = np.random.default_rng(0)
    for i in range(4):
        np.save(tmp_path / f"{i}.npy", 0.1 * random.standard_normal(RATE + 1000 * i))
    read_by = ("source=npy_folder", f"source_options={{folder: '{tmp_path}'}}")
    sections = ("model.train_ds", "model.validation_ds")
    run = train_one_step(tmp_path, *(f"{section}.{what}" for section in sections for what in read_by))
    assert list(losses(run / "metrics.csv")) == [0]
    assert list(losses(run / "metrics.csv", "val_loss")) == [0]
    assert look_at_checkpoint(open_run(run)).problem == ""


def test_a_source_is_checked(manifest: str, tmp_path: Path) -> None:
    run_documented("A data source")
    register_source("nothing", lambda config: None)
    for more, message in (
        (
            {"source": "npy_folder"},
            "source_options: 'npy_folder' cannot be opened: missing a required argument: 'folder'",
        ),
        ({"source": "npy_folder", "source_options": {"folder": str(tmp_path / "none")}}, "'npy_folder' is empty"),
        ({"source": "nothing"}, "'nothing' is a NoneType, not a nest_ssl.data.Source"),
        ({"source": "nothing", "is_tarred": True}, "is_tarred: cannot be combined with source: 'nothing'"),
        ({"source_options": {"folder": "x"}}, "source_options: needs 'source'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            build_loader(config(manifest, **more))


def test_the_documented_optimizer_trains_a_run_and_takes_further_arguments(tmp_path: Path) -> None:
    run_documented("An optimizer")
    make_corpus(tmp_path, num_train=4, num_val=2)
    optim = ("name=lion", "lr=1e-4", "betas=[0.9,0.99]", "weight_decay=0.01", "extra={cautious: true}")
    run = train_one_step(
        tmp_path,
        f"model.train_ds.manifest_filepath={tmp_path / 'train.jsonl'}",
        *("~model.validation_ds", "~model.optim.sched"),
        *(f"model.optim.{key}" for key in optim),
    )
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    (optimizer,) = saved["optimizer_states"]
    assert {tuple(state) for state in optimizer["state"].values()} == {("average",)}
    assert optimizer["param_groups"][0]["betas"] == (0.9, 0.99)


def test_further_arguments_reach_the_documented_optimizer() -> None:
    run_documented("An optimizer")
    for extra, moves in ((None, True), ({"cautious": True}, False)):
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = build_optimizer(model, parse(OptimConfig, {"name": "lion", "lr": 0.1, "extra": extra}))
        for gradient in (1.0, -0.01):  # the second contradicts the average of both
            before = model.weight.item()
            model.weight.grad = torch.full((1, 1), gradient)
            optimizer.step()
        assert (model.weight.item() != before) == moves


def test_the_documented_schedule_warms_up_stays_and_decays() -> None:
    run_documented("A schedule")
    section = {"name": "WarmupStableDecay", "warmup_steps": 4, "min_lr": 0.1, "extra": {"decay_share": 0.5}}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_schedule(optimizer, parse(ScheduleConfig, section), max_steps=20)
    assert [schedule.rate(1.0, step) for step in (0, 4, 5, 10)] == [0.2, 1.0, 1.0, 1.0]
    assert [schedule.rate(1.0, step) for step in (15, 20, 21)] == pytest.approx([0.55, 0.1, 0.1])
    assert schedule.settings()["decay_share"] == 0.5


def test_a_run_with_the_documented_schedule_resumes_on_its_curve(tmp_path: Path) -> None:
    run_documented("A schedule")
    make_corpus(tmp_path, num_train=4, num_val=2)
    sched = ("name=WarmupStableDecay", "warmup_steps=0", "max_steps=4", "min_lr=0", "extra={decay_share: 0.5}")
    options = [
        f"model.train_ds.manifest_filepath={tmp_path / 'train.jsonl'}",
        *("~model.validation_ds", "~model.optim.sched.d_model", "model.optim.lr=0.001"),
        *(f"model.optim.sched.{key}" for key in sched),
    ]
    train_one_step(tmp_path, *options)
    run = train_one_step(tmp_path, *options, "trainer.max_steps=4")
    rates = losses(run / "metrics.csv", "learning_rate")
    assert list(map(float, rates.values())) == pytest.approx([0.001, 0.001, 0.001, 0.0005])


def test_further_arguments_of_built_in_optimizers_and_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="optim.cautious: adamw does not take it"):
        OptimConfig(extra={"cautious": True})
    with pytest.raises(ValueError, match="optim.sched.decay_share: WarmupAnnealing does not take it"):
        ScheduleConfig(name="WarmupAnnealing", extra={"decay_share": 0.5})
