"""When checkpoints are written, and that runs resume from them, at unusual moments and in unusual places."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from tests.integration.runs import arguments, losses, make_corpus, run, run_and_kill, run_here

QUIET = "trainer.enable_progress_bar=false"
EACH_EPOCH = "exp_manager.checkpoint_callback_params.every_n_train_steps=null"
STEPS_PER_EPOCH = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder


def saved_step(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def test_without_validation_every_epoch_is_saved(
    corpus: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    steps = f"trainer.max_steps={STEPS_PER_EPOCH + 2}"
    stops = run_here(arguments(corpus, tmp_path, "run", "~model.validation_ds", QUIET, EACH_EPOCH, steps))
    assert saved_step(stops / "checkpoints" / "last.ckpt") == STEPS_PER_EPOCH + 2
    ends = run_here(
        arguments(corpus, tmp_path, "one", "~model.validation_ds", QUIET, EACH_EPOCH, "trainer.max_epochs=1")
    )
    assert saved_step(ends / "checkpoints" / "last.ckpt") == STEPS_PER_EPOCH
    assert [str(warning.message) for warning in recwarn if "monitor" in str(warning.message)] == []


def test_epochs_after_the_last_validation_are_also_saved(corpus: Path, tmp_path: Path) -> None:
    epochs = ("trainer.max_steps=-1", "trainer.max_epochs=3", "trainer.check_val_every_n_epoch=2")
    ended = run_here(arguments(corpus, tmp_path, "run", QUIET, EACH_EPOCH, *epochs))
    assert saved_step(ended / "checkpoints" / "last.ckpt") == 3 * STEPS_PER_EPOCH


def test_a_time_limit_without_validation_leaves_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    limit = ("exp_manager.max_time_per_run=00:00:00:01", "trainer.max_steps=10000")
    stopped = run_here(arguments(corpus, tmp_path, "run", "~model.validation_ds", QUIET, EACH_EPOCH, *limit))
    assert saved_step(stopped / "checkpoints" / "last.ckpt") == max(losses(stopped / "metrics.csv")) + 1


def test_a_run_resumes_from_checkpoints_in_another_folder(corpus: Path, tmp_path: Path) -> None:
    elsewhere = f"exp_manager.checkpoint_callback_params.dirpath={tmp_path / 'elsewhere'}"
    whole = run_here(arguments(corpus, tmp_path, "whole", QUIET))
    for steps in (6, 10):
        parts = run_here(arguments(corpus, tmp_path, "parts", QUIET, elsewhere, f"trainer.max_steps={steps}"))
    assert losses(parts / "metrics.csv") == losses(whole / "metrics.csv")
    assert not (parts / "checkpoints").exists()
    assert {path.suffix for path in (tmp_path / "elsewhere").iterdir()} == {".ckpt", ".nemo"}


@pytest.mark.parametrize("save_top_k", [0, 2])
def test_resumable_checkpoints_are_saved_only_between_steps(corpus: Path, tmp_path: Path, save_top_k: int) -> None:
    """Validate after 3 of a step's 4 batches: last.ckpt waits for the step's end, a top-k checkpoint does not."""
    sums = ("trainer.accumulate_grad_batches=4", "trainer.val_check_interval=3", EACH_EPOCH)
    best = f"exp_manager.checkpoint_callback_params.save_top_k={save_top_k}"
    whole = run_here(arguments(corpus, tmp_path, "whole", QUIET, *sums, best, "trainer.max_steps=6"))
    for steps in (3, 6):
        parts = run_here(arguments(corpus, tmp_path, "parts", QUIET, *sums, best, f"trainer.max_steps={steps}"))
    assert losses(parts / "metrics.csv") == losses(whole / "metrics.csv")


@pytest.mark.parametrize(("ranks", "steps", "then", "epoch_ends_at"), [(2, 2, 1, 4), (1, 4, 2, 5)])
def test_a_run_resumed_on_another_number_of_ranks_finishes_its_epoch(
    corpus: Path, tmp_path: Path, ranks: int, steps: int, then: int, epoch_ends_at: int
) -> None:
    """An epoch has 6 steps on one rank and 3 on two; the first run trains two thirds of it."""
    for devices, max_steps in ((ranks, steps), (then, 6)):
        done = run(
            arguments(
                corpus, tmp_path, "run", f"trainer.devices={devices}", f"trainer.max_steps={max_steps}", EACH_EPOCH
            )
        )
        assert done.returncode == 0, done.stderr[-2000:]
    assert f"resumed on {then} rank{'s' if then > 1 else ''} (was {ranks})" in done.stderr
    with (tmp_path / "run" / "metrics.csv").open() as file:
        validated = [int(row["step"]) + 1 for row in csv.DictReader(file) if row["val_loss"]]
    assert epoch_ends_at in validated
    assert epoch_ends_at - 1 not in validated


def test_the_command_line_can_switch_on_the_weight_average(corpus: Path, tmp_path: Path) -> None:
    done = run(arguments(corpus, tmp_path, "run", "exp_manager.ema.enable=true", "trainer.max_steps=3"))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("trainer.overfit_batches=2",), "trainer.overfit_batches: the batch plan has no such mode"),
        (("model.train_ds.max_utts=5", "model.train_ds.is_tarred=true"), "max_utts: has no effect on tar shards"),
        (
            ("model.train_ds.use_lhotse=true", "model.train_ds.cuts_path=a", "model.train_ds.channel_selector=0"),
            "channel_selector: is not applied to cuts_path",
        ),
        (
            ("model.train_ds.is_concat=true", "model.train_ds.endless=true", "trainer.limit_train_batches=9"),
            "endless data would start again",
        ),
        (
            (
                *("model.train_ds.is_concat=true", "model.train_ds.endless=true"),
                *("trainer.max_steps=-1", "trainer.max_epochs=2"),
            ),
            "trainer.max_epochs: an epoch of endless data never ends. Set trainer.max_steps",
        ),
        (
            ("exp_manager.ema.enable=true", "exp_manager.checkpoint_callback_params.save_weights_only=true"),
            "not the average",
        ),
        (
            tuple(
                f"model.train_ds.{option}"
                for option in ("use_lhotse=true", "bucket_duration_bins=[5]", "bucket_batch_size=[4,2]")
            ),
            "bucket_batch_size: needs 'use_bucketing: true'",
        ),
        (
            tuple(
                f"exp_manager.checkpoint_callback_params.{key}=true"
                for key in ("save_weights_only", "always_save_nemo")
            ),
            "give one of them",
        ),
        (("exp_manager.create_early_stopping_callback=true", "~model.validation_ds"), "nothing to validate on"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    corpus: Path, tmp_path: Path, option: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        run_here(arguments(corpus, tmp_path, "run", QUIET, *option))


def test_a_run_without_a_step_limit_resumes_at_and_within_an_epoch(corpus: Path, tmp_path: Path) -> None:
    """Lightning counts epochs otherwise when steps are not limited, and loses count after the first resume."""
    epochs = ("~model.validation_ds", QUIET, "trainer.max_steps=-1")
    every = "exp_manager.checkpoint_callback_params.every_n_train_steps"
    whole = run_here(arguments(corpus, tmp_path, "whole", *epochs, "trainer.max_epochs=3", f"{every}=null"))
    run_here(arguments(corpus, tmp_path, "parts", *epochs, "trainer.max_epochs=1", f"{every}=null"))
    middle = arguments(corpus, tmp_path, "parts", *epochs, "trainer.max_epochs=3", f"{every}=4")
    run_and_kill(middle, tmp_path / "parts" / "metrics.csv", 8)
    assert saved_step(tmp_path / "parts" / "checkpoints" / "last.ckpt") == 8
    parts = run_here(arguments(corpus, tmp_path, "parts", *epochs, "trainer.max_epochs=3", f"{every}=null"))
    assert losses(parts / "metrics.csv") == losses(whole / "metrics.csv")
    assert len(losses(whole / "metrics.csv")) == 3 * STEPS_PER_EPOCH


@pytest.mark.parametrize("validation", [(), ("~model.validation_ds",)])
def test_epochs_of_unknown_length_resume_at_their_end_and_midway(
    corpus: Path, tmp_path: Path, validation: tuple[str, ...]
) -> None:
    """lhotse does not say how many batches an epoch has, and Lightning would skip the one that follows."""
    data = ("model.train_ds.use_lhotse=true", "model.train_ds.use_bucketing=false", *validation)
    epochs = (QUIET, EACH_EPOCH, "trainer.max_steps=-1", *data)
    whole = run_here(arguments(corpus, tmp_path, "whole", *epochs, "trainer.max_epochs=4"))
    for ends in ("max_epochs=1", "max_epochs=2", f"max_steps={2 * STEPS_PER_EPOCH + 3}", "max_epochs=4"):
        parts = run_here(arguments(corpus, tmp_path, "parts", *epochs, f"trainer.{ends}"))
    assert losses(parts / "metrics.csv") == losses(whole / "metrics.csv")
    of_epochs = losses(whole / "metrics.csv", "train_loss_epoch")
    assert of_epochs.items() <= losses(parts / "metrics.csv", "train_loss_epoch").items()
    assert len(losses(whole / "metrics.csv")) == 4 * STEPS_PER_EPOCH


def test_the_loss_of_an_epoch_can_be_monitored(corpus: Path, tmp_path: Path) -> None:
    """It is known only after the validation at the epoch's end, so whatever monitors it has to wait."""
    params = "exp_manager.early_stopping_callback_params"
    stop = ("exp_manager.create_early_stopping_callback=true", f"{params}.patience=1", f"{params}.min_delta=100.0")
    best = "exp_manager.checkpoint_callback_params.monitor=train_loss_epoch"
    epochs = (QUIET, EACH_EPOCH, "trainer.max_steps=-1", "trainer.max_epochs=9")
    ended = run_here(arguments(corpus, tmp_path, "run", *epochs, *stop, best, f"{params}.monitor=train_loss_epoch"))
    assert len(losses(ended / "metrics.csv")) == 2 * STEPS_PER_EPOCH
    assert list((ended / "checkpoints").glob("*train_loss_epoch=*.ckpt"))


def test_early_stopping_resumes_with_its_count(corpus: Path, tmp_path: Path) -> None:
    params = "exp_manager.early_stopping_callback_params"
    stop = ("exp_manager.create_early_stopping_callback=true", f"{params}.patience=2", f"{params}.min_delta=100.0")
    epochs = (QUIET, EACH_EPOCH, "trainer.max_steps=-1", *stop)
    whole = run_here(arguments(corpus, tmp_path, "whole", *epochs, "trainer.max_epochs=9"))
    run_here(arguments(corpus, tmp_path, "parts", *epochs, "trainer.max_epochs=1"))
    for _ in range(2):  # to its end, then again: it stays stopped
        parts = run_here(arguments(corpus, tmp_path, "parts", *epochs, "trainer.max_epochs=9"))
        assert losses(parts / "metrics.csv") == losses(whole / "metrics.csv")
    assert len(losses(whole / "metrics.csv")) == 3 * STEPS_PER_EPOCH
    patient = arguments(corpus, tmp_path, "parts", *epochs, "trainer.max_epochs=9", f"{params}.patience=3")
    assert len(losses(run_here(patient) / "metrics.csv")) == 4 * STEPS_PER_EPOCH


def test_a_run_that_saves_only_weights_in_top_k_still_resumes(corpus: Path, tmp_path: Path) -> None:
    alone = (QUIET, "exp_manager.checkpoint_callback_params.save_weights_only=true")
    whole = run_here(arguments(corpus, tmp_path, "whole", *alone))
    for steps in (6, 10):
        parts = run_here(arguments(corpus, tmp_path, "parts", *alone, f"trainer.max_steps={steps}"))
    assert losses(parts / "metrics.csv") == losses(whole / "metrics.csv")
    best = next(path for path in (parts / "checkpoints").glob("*.ckpt") if "val_loss" in path.name)
    assert "optimizer_states" not in torch.load(best, weights_only=True)
    resume = f'exp_manager.resume_from_checkpoint="{best}"'
    with pytest.raises(ValueError, match=r"contains only weights, or NeMo has written it\. .*init_from_ptl_ckpt="):
        run_here(arguments(corpus, tmp_path, "from", QUIET, resume))


def test_a_dry_run_leaves_no_checkpoint(corpus: Path, tmp_path: Path) -> None:
    tried = run_here(arguments(corpus, tmp_path, "run", QUIET, "trainer.fast_dev_run=true"))
    assert not list((tried / "checkpoints").iterdir())
