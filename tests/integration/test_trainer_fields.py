"""Every field of `trainer:` that works, in real runs of a tiny model; the table is in unit/training/test_trainer.py."""

from __future__ import annotations

import csv
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nest_ssl import load
from nest_ssl.training.validation import Validation
from nest_ssl.training.watching import Stopped, Watch
from nest_ssl.watchdog.rank import Stage
from tests.integration.runs import arguments, losses, run_here

QUIET = "trainer.enable_progress_bar=false"
STEPS_PER_EPOCH = 6
LHOTSE = ("model.train_ds.use_lhotse=true", "model.train_ds.use_bucketing=false")


def train(corpus: Path, folder: Path, name: str, *more: str) -> Path:
    return run_here(arguments(corpus, folder, name, QUIET, *more))


def validated(run: Path) -> list[int]:
    """Steps done at each validation."""
    with (run / "metrics.csv").open() as file:
        return [int(row["step"]) + 1 for row in csv.DictReader(file) if row.get("val_loss")]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(load(run / "checkpoints" / f"{run.name}.nemo").state_dict())


def count_validation_batches(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The number of batches of each validation from now on."""
    counts: list[float] = []
    real = Validation._metrics

    def count(self: Validation, sums: list[Any]) -> dict[str, float]:
        counts.append(float(sums[0].num_batches))
        return real(self, sums)

    monkeypatch.setattr(Validation, "_metrics", count)
    return counts


@pytest.mark.parametrize(
    ("options", "at"),
    [
        (["val_check_interval=1.0"], [6, 12]),
        (["val_check_interval=0.5"], [3, 6, 9, 12]),
        (["val_check_interval=4"], [4, 10]),
        (["val_check_interval=5", "check_val_every_n_epoch=null"], [5, 10]),
        (["check_val_every_n_epoch=2"], [12]),
        (["val_check_interval=0.5", "check_val_every_n_epoch=2"], [9, 12]),
        (["val_check_interval='00:00:00:00'"], list(range(1, 13))),
        (["val_check_interval='01:00:00:00'"], []),
        (["limit_val_batches=0"], []),
        (["limit_train_batches=4"], [4, 8, 12]),
        (["limit_train_batches=0.5", "val_check_interval=1.0"], [3, 6, 9, 12]),
        (["limit_train_batches=0.01", "limit_val_batches=0.01", "max_steps=3"], [1, 2, 3]),  # at least one batch
        (["max_steps=8"], [6]),
        (["max_epochs=1", "max_steps=-1"], [6]),
        ([*LHOTSE, "val_check_interval=1000"], [6, 12]),  # an epoch of unknown length is validated at its end
        ([*LHOTSE, "val_check_interval=4"], [4, 6, 10, 12]),
        ([*LHOTSE, "val_check_interval=8", "check_val_every_n_epoch=null"], [6, 8, 12]),
    ],
)
def test_validation_comes_when_it_is_due(corpus: Path, tmp_path: Path, options: list[str], at: list[int]) -> None:
    given = [option if option.startswith("model.") else f"trainer.{option}" for option in options]
    run = train(corpus, tmp_path, "run", "trainer.max_steps=12", *given)
    assert validated(run) == at


def test_an_interval_longer_than_an_epoch_is_refused_with_the_way_out(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"an epoch has only 6 batches\. Lower it, or set .*every_n_epoch=null"):
        train(corpus, tmp_path, "run", "trainer.val_check_interval=7")


def test_limited_validation_uses_so_many_batches(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_validation_batches(monkeypatch)
    for name, limit in (("all", "null"), ("one", "1"), ("half", "0.5")):
        train(corpus, tmp_path, name, "trainer.max_steps=6", f"trainer.limit_val_batches={limit}")
    assert counts == [2, 1, 1]
    train(corpus, tmp_path, "sanity", "trainer.max_steps=1", "trainer.num_sanity_val_steps=1")
    train(corpus, tmp_path, "sanity", "trainer.max_steps=2", "trainer.num_sanity_val_steps=1")  # not when resumed
    assert counts[3:] == [1]


def test_a_sanity_check_changes_nothing(corpus: Path, tmp_path: Path) -> None:
    plain = train(corpus, tmp_path, "plain", "trainer.max_steps=3")
    checked = train(corpus, tmp_path, "checked", "trainer.max_steps=3", "trainer.num_sanity_val_steps=-1")
    assert losses(checked / "metrics.csv") == losses(plain / "metrics.csv")
    assert validated(checked) == []


def test_two_batches_to_a_step_have_the_mean_of_their_gradients(corpus: Path, tmp_path: Path) -> None:
    """One step of SGD on twice the batch, in a model whose utterances do not depend on their neighbours."""
    alike = [
        "~model.validation_ds",
        "~model.train_ds.batch_augmentor",
        "model.train_ds.noise_manifest=null",
        "model.train_ds.shuffle=false",
        "model.masking.block_size=1000",
        "model.encoder.conv_norm_type=layer_norm",
        "model.preprocessor.dither=0",
        *(f"model.encoder.{name}=0" for name in ("dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att")),
        *("model.optim.name=sgd", "~model.optim.betas", "model.optim.weight_decay=0", "model.optim.lr=1"),
        *("~model.optim.sched", "trainer.max_steps=1"),
    ]
    two = train(corpus, tmp_path, "two", *alike, "trainer.accumulate_grad_batches=2", "model.train_ds.batch_size=4")
    one = train(corpus, tmp_path, "one", *alike, "model.train_ds.batch_size=8")
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(two)[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_the_last_step_of_an_epoch_takes_what_is_left(corpus: Path, tmp_path: Path) -> None:
    run = train(
        *(corpus, tmp_path, "run", "trainer.accumulate_grad_batches=4"),
        *("trainer.max_epochs=2", "trainer.max_steps=-1", "~model.validation_ds"),
    )
    assert sorted(losses(run / "metrics.csv")) == [0, 1, 2, 3]  # 6 batches: 4 and 2


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped(corpus: Path, tmp_path: Path, algorithm: str) -> None:
    sgd = ("model.optim.name=sgd", "~model.optim.betas", "model.optim.weight_decay=0", "model.optim.lr=1")
    common = (*sgd, "~model.optim.sched", "~model.validation_ds")
    most = 1e-3
    clip = (f"trainer.gradient_clip_val={most}", f"trainer.gradient_clip_algorithm={algorithm}")
    start = weights(train(corpus, tmp_path, "start", *common, "model.optim.lr=0", "trainer.max_steps=1"))
    moved = weights(train(corpus, tmp_path, "moved", *common, *clip, "trainer.max_steps=1"))
    trained = [name for name in start if start[name].is_floating_point() and "running" not in name]
    steps = torch.cat([(start[name] - moved[name]).flatten().double() for name in trained])
    size = steps.norm() if algorithm == "norm" else steps.abs().max()
    assert float(size) == pytest.approx(most, rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", 16])
def test_precisions_train_to_nearly_the_same_losses(corpus: Path, tmp_path: Path, precision: str | int) -> None:
    full = losses(train(corpus, tmp_path, "full", "trainer.max_steps=8") / "metrics.csv")
    lower = f"trainer.precision={precision}"
    low = losses(train(corpus, tmp_path, "low", "trainer.max_steps=8", lower) / "metrics.csv")
    assert low != full
    assert float(low[0]) == pytest.approx(float(full[0]), rel=1e-2)
    for step, value in full.items():  # float16 skips its first updates, until its scale fits
        assert float(low[step]) == pytest.approx(float(value), rel=0.1)


def test_scaled_gradients_are_unscaled_before_they_are_clipped(corpus: Path, tmp_path: Path) -> None:
    """In float16 the loss is scaled by up to 65536: clipping scaled gradients would all but stop training."""
    sgd = ("model.optim.name=sgd", "~model.optim.betas", "model.optim.weight_decay=0", "~model.optim.sched")
    common = (*sgd, "~model.validation_ds", "trainer.precision=16", "trainer.gradient_clip_val=1e-3")
    start = weights(train(corpus, tmp_path, "start", *common, "model.optim.lr=0", "trainer.max_steps=1"))
    moved = weights(train(corpus, tmp_path, "moved", *common, "model.optim.lr=1", "trainer.max_steps=6"))
    trained = [name for name in start if start[name].is_floating_point() and "running" not in name]
    distance = torch.cat([(start[name] - moved[name]).flatten().double() for name in trained]).norm()
    assert 1e-3 < float(distance) <= 6.1e-3  # several steps of 1e-3, in nearly one direction


def test_a_run_in_float16_resumes_with_its_scale(corpus: Path, tmp_path: Path) -> None:
    half = ("trainer.precision=16", "~model.validation_ds")
    whole = train(corpus, tmp_path, "whole", *half, "trainer.max_steps=6")
    for steps in (3, 6):
        parts = train(corpus, tmp_path, "parts", *half, f"trainer.max_steps={steps}")
    assert losses(parts / "metrics.csv") == losses(whole / "metrics.csv")
    saved = torch.load(parts / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["progress"]["scaler"]["scale"] > 1


def stop_early(monitor: str = "val_loss") -> list[str]:
    params = "exp_manager.early_stopping_callback_params"
    return [
        "exp_manager.create_early_stopping_callback=true",
        f"{params}.monitor={monitor}",
        *(f"{params}.patience=1", f"{params}.min_delta=100.0"),
    ]


@pytest.mark.parametrize(("least", "steps"), [("min_steps=15", 15), ("min_epochs=4", 24), ("min_steps=1", 12)])
def test_a_run_does_not_stop_before_its_least_length(corpus: Path, tmp_path: Path, least: str, steps: int) -> None:
    run = train(corpus, tmp_path, "run", *stop_early(), "trainer.max_steps=40", f"trainer.{least}")
    assert len(losses(run / "metrics.csv")) == steps


def test_the_reason_of_a_stop_is_logged(corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    train(corpus, tmp_path, "run", *stop_early(), "trainer.max_steps=40")
    assert "stopped after step 12: val_loss has not improved on" in caplog.text
    caplog.clear()
    limit = ("trainer.max_time={seconds: 1}", "trainer.max_steps=100000", "~model.validation_ds")
    train(corpus, tmp_path, "time", *limit)
    assert re.search(r"stopped after step \d+: trainer\.max_time of 1 s is over", caplog.text)


def test_a_rank_that_leaves_when_asked_to_stop_is_at_the_end(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[Stage] = []
    monkeypatch.setattr(Watch, "enter", lambda self, stage, part=0: entered.append(stage))
    monkeypatch.setattr(Watch, "stop_is_due", lambda self, step: step == 3)
    with pytest.raises(Stopped, match="saved and stopped after step 3"):
        train(corpus, tmp_path, "stopped", "trainer.max_steps=6")
    assert entered[-1] is Stage.END  # to end workers may take longer than a step: it is no stall


def test_the_time_of_a_run_counts_its_earlier_parts(corpus: Path, tmp_path: Path) -> None:
    limit = ("trainer.max_time={seconds: 2}", "trainer.max_steps=100000", "~model.validation_ds")
    first = losses(train(corpus, tmp_path, "run", *limit) / "metrics.csv")
    both = losses(train(corpus, tmp_path, "run", *limit) / "metrics.csv")
    assert len(first) <= len(both) <= len(first) + 1


def test_every_nth_step_is_logged(corpus: Path, tmp_path: Path) -> None:
    run = train(corpus, tmp_path, "run", "trainer.max_steps=9", "trainer.log_every_n_steps=4")
    assert sorted(losses(run / "metrics.csv")) == [3, 7]


def test_deterministic_and_anomaly_detection_train_to_the_same_losses(corpus: Path, tmp_path: Path) -> None:
    common = ("trainer.max_steps=3", "~model.validation_ds")
    plain = train(corpus, tmp_path, "plain", *common)
    for name, option in (("det", "deterministic=true"), ("warn", "deterministic=warn"), ("ano", "detect_anomaly=true")):
        other = train(corpus, tmp_path, name, *common, f"trainer.{option}", "trainer.inference_mode=false")
        assert losses(other / "metrics.csv") == losses(plain / "metrics.csv"), name
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize(
    ("kind", "file", "word"),
    [
        ("simple", "profile-simple.txt", "backward"),
        ("advanced", "profile-advanced.txt", "_train_on"),
        ("pytorch", "profile-pytorch.json", "aten::"),
    ],
)
def test_a_profile_says_where_time_goes(corpus: Path, tmp_path: Path, kind: str, file: str, word: str) -> None:
    run = train(corpus, tmp_path, "run", "trainer.max_steps=2", "~model.validation_ds", f"trainer.profiler={kind}")
    assert word in (run / file).read_text()


def test_a_summary_of_the_model_is_logged_on_request(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    train(corpus, tmp_path, "run", "trainer.max_steps=1", "trainer.enable_model_summary=true")
    assert "encoder" in caplog.text
    assert "ConformerEncoder" in caplog.text
    assert "frozen" in caplog.text


@pytest.mark.parametrize("runs", [1, 3])
def test_a_dry_run_trains_and_validates_so_many_batches(
    corpus: Path, tmp_path: Path, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_validation_batches(monkeypatch)
    run = train(corpus, tmp_path, "run", f"trainer.fast_dev_run={runs}")
    assert counts == [min(runs, 2)]
    assert not (run / "metrics.csv").exists()
    assert not list((run / "checkpoints").iterdir())


def test_a_dry_run_in_the_folder_of_a_run_trains_from_the_start_and_leaves_its_files(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(corpus, tmp_path, "run", "trainer.max_steps=3", "~model.validation_ds")
    kept = [run / "hparams.yaml", run / "git-commit.txt", run / "metrics.csv", *(run / "checkpoints").iterdir()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in kept}
    counts = count_validation_batches(monkeypatch)
    caplog.set_level(logging.INFO)
    train(corpus, tmp_path, "run", "trainer.fast_dev_run=2", "model.optim.lr=0.1")
    assert counts == [2]  # it did train, and validated afterwards
    assert "resumed at step" not in caplog.text
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in kept} == before
    assert set((run / "checkpoints").iterdir()) <= set(kept)


@pytest.mark.parametrize(
    "strategy",
    [
        "auto",
        "ddp",
        "ddp_find_unused_parameters_false",
        "ddp_find_unused_parameters_true",
        "fsdp",
        "{_target_: lightning.pytorch.strategies.DDPStrategy, find_unused_parameters: true}",
        "{_target_: pytorch_lightning.strategies.FSDPStrategy}",
    ],
)
def test_strategies_of_one_rank_are_all_the_same(corpus: Path, tmp_path: Path, strategy: str) -> None:
    run = train(corpus, tmp_path, "run", "trainer.max_steps=1", "~model.validation_ds", f"trainer.strategy={strategy}")
    assert losses(run / "metrics.csv").keys() == {0}
