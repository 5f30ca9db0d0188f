"""Finding batch sizes, with a memory limit that is made up: a CPU has none to find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nest_ssl.cli.main import main
from nest_ssl.config import DatasetConfig, NestConfig
from nest_ssl.config.composing import compose
from nest_ssl.data import build_loader
from nest_ssl.fit import (
    SPARE_SHARE,
    Bucket,
    Card,
    Host,
    TrainingTrial,
    _fit,
    bucket_durations,
    fit_buckets,
    hours_per_epoch,
    keys_for,
    largest,
    loader_keys,
    overrides_for,
    settle,
    validation_shape,
)
from nest_ssl.training.parallel import World
from tests.helpers import TINY

CPU = Card(torch.device("cpu"), 0.95)
HOST = Host(memory_bytes=64e9, cores=16, num_ranks=1)


def tiny(*more: str) -> NestConfig:
    return compose(overrides=[*(f"model.{key}={value}" for key, value in TINY.items()), *more])


@pytest.mark.parametrize("guess", [1, 16, 100, 700, 5000])
@pytest.mark.parametrize("limit", [1, 2, 3, 15, 16, 17, 100, 999])
def test_the_largest_is_found_to_a_sixteenth_and_never_too_large(limit: int, guess: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found = largest(fits, 1024, guess)
    assert limit * 15 / 16 - 1 < found <= limit
    assert len(tried) == len(set(tried)) < 20


def test_a_good_guess_needs_two_trials() -> None:
    tried: list[int] = []
    assert largest(lambda size: tried.append(size) or size <= 101, 1024, 100) == 100  # type: ignore[func-returns-value]
    assert tried == [100, 106]


def test_nothing_below_what_is_known_to_fit_is_tried() -> None:
    def never(size: int) -> bool:
        assert size > 544
        return False

    assert largest(never, 1024, 1024, least=544) == 544
    assert largest(lambda size: pytest.fail("there is nothing to find"), 544, least=544) == 544


def test_the_result_is_zero_if_nothing_fits_and_never_above_the_limit() -> None:
    assert largest(lambda size: False, 8) == 0
    assert largest(lambda size: False, 1024, 700) == 0
    assert largest(lambda size: True, 37) == 37
    assert largest(lambda size: True, 5, 12) == 5


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
    buckets = [Bucket(7.5, 96), Bucket(15.0, 40), Bucket(60.0, 8)]
    found = DatasetConfig(num_workers=4, max_duration=60.0)
    lines = overrides_for({**keys_for(buckets), **loader_keys(found, buckets, HOST)})
    dataset = compose(overrides=lines).model.train_ds
    assert dataset is not None
    assert dataset.use_bucketing
    assert dataset.bucket_duration_bins == [7.5, 15.0]
    assert dataset.bucket_batch_size == [96, 40, 8]
    assert (dataset.num_workers, dataset.prefetch_factor) == (4, 2)
    one = compose(overrides=overrides_for(keys_for([Bucket(60.0, 8)]))).model.train_ds
    assert one is not None
    assert one.batch_size == 8


@pytest.mark.parametrize(
    ("memory_gb", "num_ranks", "configured", "workers", "ahead"),
    [
        (200, 1, 8, 8, 2),  # a batch takes 1.28 GB: 8 workers with 3 each, and 3 that are pinned
        (200, 1, 0, 8, 2),
        (100, 1, 8, 8, 2),
        (64, 1, 8, 8, 1),
        (30, 1, 8, 4, 1),
        (64, 8, 8, 1, 1),
        (1, 1, 8, 1, 1),
    ],
)
def test_batches_that_wait_fit_into_the_hosts_memory(
    memory_gb: int, num_ranks: int, configured: int, workers: int, ahead: int
) -> None:
    dataset = DatasetConfig(num_workers=configured, sample_rate=16_000)
    keys = loader_keys(dataset, [Bucket(5.0, 600), Bucket(20.0, 500)], Host(memory_gb * 1e9, 32, num_ranks))
    assert (keys["num_workers"], keys["prefetch_factor"]) == (workers, ahead)
    assert workers * ahead * 1.28 <= keys["prefetch_gb"] <= workers * ahead * 1.28 + 0.1


def test_buckets_that_do_not_fit_together_are_made_smaller_until_they_do() -> None:
    buckets = [Bucket(5.0, 64), Bucket(10.0, 3)]
    assert settle(lambda found: sum(one.batch_size for one in found) <= 60, buckets) == [
        Bucket(5.0, 57),
        Bucket(10.0, 1),
    ]
    with pytest.raises(ValueError, match="Lower --memory-share"):
        settle(lambda found: False, buckets)


class MadeUpCard(TrainingTrial):
    """Records what a trial does; runs out of memory above `most_s` seconds of audio in all shapes so far."""

    def __init__(self, cfg: NestConfig, most_s: float) -> None:
        super().__init__(cfg, World(), CPU)
        self.most_s, self.done = most_s, list[tuple[str, float, int]]()

    def warm_up(self, shape: Bucket) -> None:
        self._note("warm up", shape)

    def train(self, shape: Bucket) -> None:
        self._note("train", shape)

    def validate(self) -> None:
        assert self.validation is not None
        self._note("validate", self.validation)

    def _note(self, what: str, shape: Bucket) -> None:
        self.done.append((what, shape.longest_s, shape.batch_size))
        if sum({done[1:]: done[1] * done[2] for done in self.done}.values()) > self.most_s:
            raise torch.OutOfMemoryError("made up")


def test_a_trial_takes_turns_between_two_shapes_and_validates() -> None:
    cfg = tiny("model.validation_ds.batch_size=3", "model.validation_ds.max_duration=4")
    trial = MadeUpCard(cfg, 40.0)
    assert trial(2, 8.0)
    assert trial.done == [
        ("warm up", 8.0, 2),
        ("train", 8.0, 2),
        ("train", 4.0, 2),  # no other bucket is known yet
        ("train", 8.0, 2),
        ("validate", 4.0, 3),
        ("train", 8.0, 2),
    ]
    trial.done.clear()
    assert not trial(8, 4.0)  # alone it fits; next to the longer bucket and the validation it does not
    assert trial.done == [("warm up", 4.0, 8), ("train", 4.0, 8), ("train", 8.0, 2)]


def test_a_trial_trains_averages_and_survives_running_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nest_ssl.fit.ROUNDS", 1)
    cfg = tiny(
        "exp_manager.ema.enable=true", "model.validation_ds.max_duration=0.5", "model.validation_ds.min_duration=0"
    )
    trial = TrainingTrial(cfg, World(), CPU)
    before = [p.detach().clone() for p in trial.model.parameters() if p.requires_grad]
    loss_of = trial.model.masked_loss
    modes: list[bool] = []

    def limited(audio: torch.Tensor, *rest: torch.Tensor) -> object:
        modes.append(trial.model.training)
        if audio.numel() > 3 * 16_000:
            raise torch.OutOfMemoryError("made up")
        return loss_of(audio, *rest)

    monkeypatch.setattr(trial.model, "masked_loss", limited)
    assert fit_buckets(trial, [0.5, 1.0], most=8) == [Bucket(0.5, 6), Bucket(1.0, 3)]
    assert False in modes  # it validated
    after = [p.detach() for p in trial.model.parameters() if p.requires_grad]
    assert not all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert all(p.grad is None for p in trial.model.parameters())
    assert trial.holds([Bucket(0.5, 2), Bucket(1.0, 2)], timed=True)
    assert trial.step_s.keys() == {Bucket(0.5, 2), Bucket(1.0, 2)}


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        ("model.validation_ds.batch_size=4", Bucket(60.0, 4)),
        ("model.validation_ds.max_duration=8", Bucket(8.0, 2)),
        ("trainer.limit_val_batches=0", None),
        ("~model.validation_ds", None),
    ],
)
def test_the_validation_batch_is_the_configured_one(keys: str, shape: Bucket | None) -> None:
    assert validation_shape(compose(overrides=[keys])) == shape


def write_manifest(path: Path, durations_s: list[float]) -> None:
    lines = [json.dumps({"audio_filepath": f"{n}.wav", "duration": one}) for n, one in enumerate(durations_s)]
    path.write_text("\n".join(lines) + "\n")


def test_an_epoch_takes_the_time_of_its_planned_shapes(tmp_path: Path) -> None:
    write_manifest(tmp_path / "train.jsonl", [1.0] * 16 + [4.0] * 8)
    dataset = DatasetConfig(
        manifest_filepath=str(tmp_path / "train.jsonl"), **keys_for([Bucket(1.0, 4), Bucket(4.0, 2)]), num_workers=0
    )
    step_s = {Bucket(1.0, 4): 10.0, Bucket(4.0, 2): 100.0}
    hours = hours_per_epoch(build_loader(dataset), step_s, 16_000)
    assert hours == pytest.approx((4 * 10 + 4 * 100) / 3600, rel=0.02)  # shapes are a little longer
    assert hours_per_epoch(build_loader(dataset, world_size=2), step_s, 16_000) == pytest.approx(
        (2 * 10 + 2 * 100) / 3600, rel=0.02
    )


def test_the_whole_search_prints_overrides_and_tries_the_shapes_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nest_ssl.fit.ROUNDS", 1)
    write_manifest(tmp_path / "train.jsonl", [0.3, 0.4, 0.5] * 4 + [0.7, 1.0] * 4)
    cfg = tiny(
        f"model.train_ds.manifest_filepath={tmp_path / 'train.jsonl'}",
        "model.train_ds.max_duration=1.0",
        "model.train_ds.min_duration=0.1",
        "model.train_ds.bucket_duration_bins=[0.5]",
        "model.validation_ds.max_duration=0.5",
        "model.validation_ds.min_duration=0",
    )
    fitted = _fit(cfg, World(), CPU, 2, HOST, 1)
    assert fitted.buckets == [Bucket(0.5, 2), Bucket(1.0, 2)]
    assert "model.train_ds.bucket_batch_size=[2,2]" in fitted.overrides
    assert max(shape.longest_s for shape in fitted.step_s) == pytest.approx(1.0, abs=0.02)
    assert fitted.hours_per_epoch is not None
    assert fitted.hours_per_epoch > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("more", [(), ("trainer.accumulate_grad_batches=2", "exp_manager.ema.enable=true")])
def test_on_a_gpu_the_limit_is_found_with_graphs_and_kept(more: tuple[str, ...]) -> None:
    cfg = tiny(
        "trainer.precision=bf16",
        "model.train_ds.max_duration=8",
        "model.train_ds.bucket_duration_bins=[4]",
        "model.validation_ds.max_duration=8",
        *more,
    )
    card = Card(torch.device("cuda", 0), 10 * SPARE_SHARE)  # of a smaller share, most would be spare
    torch._dynamo.reset()  # tests before this one may have used up the compilations of a layer; what is left takes more
    try:
        fitted = _fit(cfg, World(device=card.device), card, 4096, HOST, 1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, card.device)
    assert fitted.buckets[0].batch_size > fitted.buckets[1].batch_size > 1
    assert fitted.buckets[0].batch_size < 4096
    assert 0.7 * card.share < fitted.peak_share <= card.share
    assert all(seconds > 0 for seconds in fitted.step_s.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_prints_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--output", str(tmp_path / "fit.txt")])
    assert "no CUDA GPU" in capsys.readouterr().err
    assert not (tmp_path / "fit.txt").exists()
