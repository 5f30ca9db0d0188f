from __future__ import annotations

import pytest
import torch

from nest_ssl.training.metrics import EpochMeans


def test_means_are_weighted_and_of_one_epoch() -> None:
    means = EpochMeans()
    assert means.means() == {}
    means.start(0)
    means.add("loss", torch.tensor(100.0), 1)
    for _ in range(2):
        means.start(1)
    means.add("loss", torch.tensor(2.0), 3)
    means.add("loss", torch.tensor(6.0), 1)
    assert means.means()["loss"].item() == pytest.approx(3.0)


def test_a_resumed_epoch_has_the_mean_of_the_whole() -> None:
    whole, cut = EpochMeans(), EpochMeans()
    values = torch.rand(10, generator=torch.Generator().manual_seed(0))
    for value in values:
        whole.add("loss", value, 4)
    for value in values[:7]:
        cut.add("loss", value, 4)
    resumed = EpochMeans()
    resumed.resume(cut.state())
    for value in values[7:]:
        resumed.add("loss", value, 4)
    assert torch.equal(resumed.means()["loss"], whole.means()["loss"])
    resumed.start(1)
    resumed.add("loss", torch.tensor(5.0), 2)
    assert resumed.means()["loss"].item() == 5.0


def test_a_loss_that_is_not_finite_does_not_count() -> None:
    means = EpochMeans()
    for value in (2.0, float("nan"), float("inf"), 4.0):
        means.add("loss", torch.tensor(value), 2)
        means.add("rate", torch.tensor(1.0), 2)
    assert {name: mean.item() for name, mean in means.means().items()} == {"loss": 3.0, "rate": 1.0}


def test_sums_of_the_first_edition_are_continued() -> None:
    means = EpochMeans()
    means.resume({"epoch": 3, "weight": 6, "sums": {"loss": torch.tensor(12.0)}})
    means.start(3)
    means.add("loss", torch.tensor(4.0), 2)
    assert means.means()["loss"].item() == 2.5
