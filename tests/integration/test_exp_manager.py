"""Every `exp_manager` option does what it promises, in real runs of a tiny model."""

from __future__ import annotations

import csv
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nest_ssl import load
from tests.integration.runs import arguments, losses, run_here

EMA = ("exp_manager.ema.enable=true", "exp_manager.ema.decay=0.5")
QUIET = "trainer.enable_progress_bar=false"


def weights(nemo: Path) -> dict[str, Tensor]:
    return dict(load(nemo).state_dict())


def train(corpus: Path, folder: Path, name: str, num_steps: int, *more: str) -> Path:
    return run_here(arguments(corpus, folder, name, f"trainer.max_steps={num_steps}", QUIET, *more))


@pytest.fixture(scope="module")
def three_steps(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of one, two and three steps; each is a prefix of the next."""
    folder = tmp_path_factory.mktemp("steps")
    return [train(corpus, folder, f"run{n}", n) for n in (1, 2, 3)]


def test_the_saved_model_is_the_average_of_the_weights(corpus: Path, tmp_path: Path, three_steps: list[Path]) -> None:
    after = [weights(run / "checkpoints" / f"{run.name}.nemo") for run in three_steps]
    average = after[0]
    for later in after[1:]:
        average = {name: 0.5 * value + 0.5 * later[name] for name, value in average.items()}
    run = train(corpus, tmp_path, "run", 3, *EMA)
    saved = weights(run / "checkpoints" / "run.nemo")
    for name, value in average.items():
        if after[0][name].is_floating_point():
            torch.testing.assert_close(saved[name], value.to(saved[name].dtype), rtol=1e-5, atol=1e-7)
    assert torch.equal(saved["quantizer.codebooks"], after[0]["quantizer.codebooks"])
    name = "encoder.layers.0.feed_forward1.linear1.weight"
    assert not torch.allclose(saved[name], after[-1][name])


def test_a_run_with_a_weight_average_resumes_bit_identically(corpus: Path, tmp_path: Path) -> None:
    whole = train(corpus, tmp_path, "whole", 8, *EMA)
    train(corpus, tmp_path, "cut", 5, *EMA)  # ends between validations
    cut = train(corpus, tmp_path, "cut", 8, *EMA)
    assert losses(cut / "metrics.csv") == losses(whole / "metrics.csv")
    a, b = weights(cut / "checkpoints" / "cut.nemo"), weights(whole / "checkpoints" / "whole.nemo")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_validation_uses_the_average_or_the_training_weights(
    corpus: Path, tmp_path: Path, three_steps: list[Path]
) -> None:
    every_step = ("trainer.val_check_interval=1", "trainer.check_val_every_n_epoch=null")
    plain, average, original = (
        losses(train(corpus, tmp_path, name, 3, *every_step, *more) / "metrics.csv", "val_loss")
        for name, more in (
            ("plain", ()),
            ("average", EMA),
            ("original", (*EMA, "exp_manager.ema.validate_original_weights=true")),
        )
    )
    assert original == plain
    assert average.keys() == plain.keys()
    assert average[2] != plain[2]


def test_several_validation_sets_have_their_own_losses_and_a_mean(corpus: Path, tmp_path: Path) -> None:
    lines = (corpus / "valid.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("dev", lines[:4]), ("other", lines[4:])):
        (corpus / f"{name}.jsonl").write_text("".join(part))
    sets = f"model.validation_ds.manifest_filepath=[{corpus / 'dev.jsonl'},{corpus / 'other.jsonl'}]"
    run = train(corpus, tmp_path, "run", 6, sets)
    with (run / "metrics.csv").open() as file:
        row = next(row for row in csv.DictReader(file) if row["val_loss"])
    dev, other, together = (float(row[f"{name}val_loss"]) for name in ("dev_", "other_", ""))
    assert dev != other
    assert together == pytest.approx((dev + other) / 2, rel=1e-6)  # one batch each
    assert 0 <= float(row["other_val_accuracy"]) <= 1


def test_versions_copied_files_names_and_logs_follow_the_options(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    notes = tmp_path / "notes.txt"
    notes.write_text("why")
    options = (
        "exp_manager.resume_if_exists=false",
        "exp_manager.use_datetime_version=false",
        f"exp_manager.files_to_copy=[{notes}]",
        "exp_manager.checkpoint_callback_params.prefix=mine",
        "exp_manager.checkpoint_callback_params.postfix=-end.nemo",
        "exp_manager.log_step_timing=false",
    )
    first, second = (train(corpus, tmp_path, "run", 1, *options) for _ in range(2))
    assert [first.name, second.name] == ["version_0", "version_1"]
    assert (second / "notes.txt").read_text() == "why"
    assert (second / "checkpoints" / "mine-end.nemo").is_file()
    assert "run folder" in (second / "log_globalrank-0_localrank-0.txt").read_text()
    assert "train_step_timing" not in (second / "metrics.csv").read_text()


def test_save_best_model_writes_the_best_model_to_the_nemo_file(corpus: Path, tmp_path: Path) -> None:
    run = train(
        *(corpus, tmp_path, "run", 12),
        "model.optim.name=sgd",
        "~model.optim.betas",
        "model.optim.lr=300",  # the loss only rises: the first validation is the best
        "exp_manager.checkpoint_callback_params.save_best_model=true",
        "exp_manager.checkpoint_callback_params.save_top_k=1",
    )
    values = losses(run / "metrics.csv", "val_loss")
    best = next((run / "checkpoints").glob("*val_loss=*.ckpt"))
    assert f"step={min(values, key=lambda step: float(values[step])) + 1}" in best.name
    saved = weights(run / "checkpoints" / "run.nemo")
    assert all(torch.equal(value, saved[name]) for name, value in load(best).state_dict().items())


def test_always_save_nemo_writes_a_nemo_file_with_every_checkpoint(corpus: Path, tmp_path: Path) -> None:
    always = "exp_manager.checkpoint_callback_params.always_save_nemo=true"
    not_at_end = "exp_manager.checkpoint_callback_params.save_nemo_on_train_end=false"
    run = train(corpus, tmp_path, "run", 3, always, not_at_end, "~model.validation_ds")
    saved = weights(run / "checkpoints" / "run.nemo")
    periodic = load(run / "checkpoints" / "last.ckpt").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in periodic.items())


def test_the_last_checkpoint_is_the_latest_even_when_the_loss_rises(corpus: Path, tmp_path: Path) -> None:
    worse = ("model.optim.name=sgd", "~model.optim.betas", "model.optim.lr=300")
    run = train(corpus, tmp_path, "run", 12, *worse, "exp_manager.checkpoint_callback_params.every_n_train_steps=null")
    best = next((run / "checkpoints").glob("*val_loss=*.ckpt"))
    assert torch.load(best, weights_only=True)["global_step"] == 6
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 12


@pytest.mark.parametrize("disk_has_links", [True, False])
def test_last_and_best_checkpoint_share_one_file_when_identical(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_has_links: bool
) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not disk_has_links:
        monkeypatch.setattr(os, "link", no_links)
    all_are_best = "exp_manager.checkpoint_callback_params.save_top_k=-1"
    folder = train(corpus, tmp_path, "run", 12, all_are_best) / "checkpoints"
    best, last = next(folder.glob("*step=12.ckpt")), folder / "last.ckpt"
    assert best.samefile(last) is disk_has_links
    assert "optimizer_states" in torch.load(last, weights_only=True)
    assert torch.load(last, weights_only=True)["global_step"] == 12
    assert not list(folder.glob(".*"))
    monkeypatch.undo()
    resumed = train(corpus, tmp_path, "run", 13, all_are_best) / "checkpoints"
    assert torch.load(resumed / "last.ckpt", weights_only=True)["global_step"] == 13
    assert torch.load(best, weights_only=True)["global_step"] == 12  # not changed by the later save


def test_checkpoints_are_saved_at_a_time_interval(corpus: Path, tmp_path: Path) -> None:
    run = train(
        *(corpus, tmp_path, "run", 3, "~model.validation_ds"),
        "exp_manager.checkpoint_callback_params.every_n_train_steps=null",
        "exp_manager.checkpoint_callback_params.train_time_interval='00:00:00:00'",
    )
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 3


def test_max_time_per_run_starts_again_on_resume(corpus: Path, tmp_path: Path) -> None:
    limit = "exp_manager.max_time_per_run=00:00:00:01"
    first = losses(train(corpus, tmp_path, "run", 10_000, limit) / "metrics.csv")
    both = losses(train(corpus, tmp_path, "run", 10_000, limit) / "metrics.csv")
    assert len(first) < len(both) < 10_000
    assert first.items() <= both.items()


def test_nothing_is_printed_without_a_progress_bar(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(corpus, tmp_path, "run", 2)
    captured = capfd.readouterr()
    assert "step" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("exp_manager.files_to_copy=[/nowhere.txt]", "/nowhere.txt: no such file"),
        ("exp_manager.checkpoint_callback_params.postfix=.ckpt", "does not end with '.nemo'"),
        ("exp_manager.checkpoint_callback_params.train_time_interval=5m", "not of the form DD:HH:MM:SS"),
        ("exp_manager.ema.decay=1.5", "exp_manager.ema.decay"),
        (
            "exp_manager.checkpoint_callback_params.monitor=val_wer",
            "monitor: there is no 'val_wer'. Did you mean 'val_loss'. Known: val_loss, ",
        ),
        ("exp_manager.max_time_per_run=5h", "exp_manager.max_time_per_run: '5h' is not of the form DD:HH:MM:SS"),
        ("trainer.val_check_interval=1.5", "trainer.val_check_interval: 1.5 is not a share of an epoch"),
        ("trainer.precision=bf16-true", "would round the audio"),
    ],
)
def test_invalid_values_are_refused(corpus: Path, tmp_path: Path, option: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        train(corpus, tmp_path, "run", 1, option)
