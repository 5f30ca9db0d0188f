from __future__ import annotations

import pytest
import torch

from nest_ssl.training.epoch_means import EpochMeans


def test_means_are_weighted_and_of_one_epoch() -> None:
    means = EpochMeans()
    assert means.means() == {}
    means.add(0, {"loss": torch.tensor(100.0)}, 1)
    means.add(1, {"loss": torch.tensor(2.0)}, 3)
    means.add(1, {"loss": torch.tensor(6.0)}, 1)
    assert means.means()["loss"].item() == pytest.approx(3.0)


def test_a_resumed_epoch_has_the_mean_of_the_whole() -> None:
    whole, cut = EpochMeans(), EpochMeans()
    values = torch.rand(10, generator=torch.Generator().manual_seed(0))
    for value in values:
        whole.add(0, {"loss": value}, 4)
    for value in values[:7]:
        cut.add(0, {"loss": value}, 4)
    resumed = EpochMeans()
    resumed.resume(cut.state())
    for value in values[7:]:
        resumed.add(0, {"loss": value}, 4)
    assert torch.equal(resumed.means()["loss"], whole.means()["loss"])
    resumed.add(1, {"loss": torch.tensor(5.0)}, 2)
    assert resumed.means()["loss"].item() == 5.0
