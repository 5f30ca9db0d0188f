"""Finding batch sizes, with a memory limit that is made up: a CPU has none to find."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nest_ssl.cli.main import main
from nest_ssl.config import DatasetConfig
from nest_ssl.config.composing import compose
from nest_ssl.fit import Bucket, TrainingTrial, bucket_durations, fit_buckets, largest, overrides_for
from tests.helpers import TINY


@pytest.mark.parametrize("limit", [1, 2, 3, 15, 16, 17, 100, 999])
def test_the_largest_is_found_to_a_sixteenth_and_never_too_large(limit: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found = largest(fits, 1, 1024)
    assert limit * 15 / 16 - 1 < found <= limit
    assert len(tried) < 20


def test_the_result_is_zero_if_nothing_fits_and_never_above_the_limit() -> None:
    assert largest(lambda size: False, 1, 8) == 0
    assert largest(lambda size: True, 1, 37) == 37
    assert largest(lambda size: True, 5, 5) == 5


def test_buckets_get_the_batches_that_the_memory_holds() -> None:
    # Memory of a batch: 400 s of audio, and a part that grows with the square of the duration.
    def fits(batch_size: int, duration_s: float) -> bool:
        return batch_size * (duration_s + duration_s**2 / 60) <= 400

    buckets = fit_buckets(fits, [8.0, 30.0, 15.0], most=1024)
    assert [bucket.longest_s for bucket in buckets] == [8.0, 15.0, 30.0]
    for bucket in buckets:
        limit = 400 / (bucket.longest_s + bucket.longest_s**2 / 60)
        assert limit * 15 / 16 - 1 < bucket.batch_size <= limit


def test_too_little_memory_for_one_utterance_is_an_error() -> None:
    with pytest.raises(ValueError, match="not even one utterance of 30 s fits"):
        fit_buckets(lambda batch_size, duration_s: False, [30.0], most=8)


def test_buckets_are_the_configured_ones_or_halves() -> None:
    configured = DatasetConfig(bucket_duration_bins=[5.0, 10.0, 99.0], max_duration=20.0)
    assert bucket_durations(configured) == [5.0, 10.0, 20.0]
    assert bucket_durations(DatasetConfig(max_duration=40.0)) == [5.0, 10.0, 20.0, 40.0]
    with pytest.raises(ValueError, match="max_duration"):
        bucket_durations(DatasetConfig())


def test_the_overrides_are_accepted_by_the_configuration() -> None:
    lines = overrides_for([Bucket(7.5, 96), Bucket(15.0, 40), Bucket(60.0, 8)])
    dataset = compose(overrides=lines).model.train_ds
    assert dataset is not None
    assert dataset.use_bucketing
    assert dataset.bucket_duration_bins == [7.5, 15.0]
    assert dataset.bucket_batch_size == [96, 40, 8]
    one = compose(overrides=overrides_for([Bucket(60.0, 8)])).model.train_ds
    assert one is not None
    assert one.batch_size == 8


def test_a_trial_trains_and_survives_running_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose(overrides=[f"model.{key}={value}" for key, value in TINY.items()])
    trial = TrainingTrial(cfg, torch.device("cpu"))
    before = [p.detach().clone() for p in trial.model.parameters() if p.requires_grad]
    loss_of = trial.model.masked_loss

    def limited(audio: torch.Tensor, *rest: torch.Tensor) -> object:
        if audio.numel() > 3 * 16_000:
            raise torch.OutOfMemoryError("made up")
        return loss_of(audio, *rest)

    monkeypatch.setattr(trial.model, "masked_loss", limited)
    assert fit_buckets(trial, [0.5, 1.0], most=8) == [Bucket(0.5, 6), Bucket(1.0, 3)]
    after = [p.detach() for p in trial.model.parameters() if p.requires_grad]
    assert not all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert all(p.grad is None for p in trial.model.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_prints_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--output", str(tmp_path / "fit.txt")])
    assert "no CUDA GPU" in capsys.readouterr().err
    assert not (tmp_path / "fit.txt").exists()
