from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nest_ssl import plugins
from nest_ssl.config import DatasetConfig, TrainerConfig
from nest_ssl.training.parallel import World
from nest_ssl.training.validation import Validation, _Sums, validation_sets
from nest_ssl.training.watching import Watch

ONE = DatasetConfig(manifest_filepath="a.jsonl,b.jsonl", batch_size=2)


def test_a_list_of_manifests_is_one_set_each_named_by_its_file() -> None:
    several = dataclasses.replace(
        ONE, manifest_filepath=["x/dev.jsonl", "x/test.json", "y/dev.jsonl", "\x1b[31mred.jsonl"]
    )
    sets = validation_sets(several)
    assert {name: one.manifest_filepath for name, one in sets.items()} == {
        "dev": "x/dev.jsonl",
        "test": "x/test.json",
        "dev_2": "y/dev.jsonl",
        "\\x1b[31mred": "\x1b[31mred.jsonl",
    }


def test_manifests_that_belong_together_are_one_set_without_a_name() -> None:
    mixed = dataclasses.replace(ONE, manifest_filepath=["a.jsonl", "b.jsonl"], is_concat=True)
    alone = dataclasses.replace(ONE, manifest_filepath=["a.jsonl"])
    for config in (ONE, mixed, alone):
        assert validation_sets(config) == {"": config}


def test_no_manifest_is_no_set() -> None:
    assert validation_sets(None) == {}
    assert validation_sets(dataclasses.replace(ONE, manifest_filepath=None)) == {}


def test_a_registered_source_is_one_set_with_or_without_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins.sources, "_things", {"elsewhere": object})
    for manifests in (None, ["a.jsonl", "b.jsonl"]):
        config = dataclasses.replace(ONE, manifest_filepath=manifests, source="elsewhere")
        assert validation_sets(config) == {"": config}


def test_shards_come_with_their_manifests() -> None:
    tarred = dataclasses.replace(
        ONE, manifest_filepath=["a.json", "b.json"], is_tarred=True, tarred_audio_filepaths=["a.tar", "b.tar"]
    )
    assert [one.tarred_audio_filepaths for one in validation_sets(tarred).values()] == ["a.tar", "b.tar"]
    with pytest.raises(ValueError, match="tarred_audio_filepaths must be a list of as many"):
        validation_sets(dataclasses.replace(tarred, tarred_audio_filepaths="a.tar"))


def test_a_validation_in_which_nothing_was_masked_has_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    """Its loss of 0 would be the best for ever."""
    decoder = SimpleNamespace(num_classes=4, num_decoders=1)
    model: Any = SimpleNamespace(cfg=SimpleNamespace(decoder=decoder))
    loaders: Any = {"clean": [], "other": []}
    engine: Any = None
    validation = Validation(model, engine, loaders, World(), Watch(), TrainerConfig(), 0)
    sums = [_Sums(model, torch.device("cpu")) for _ in loaders]
    sums[0].num_batches, sums[1].num_batches = torch.tensor(2.0), torch.tensor(1.0)
    assert validation._metrics(sums) == {}
    assert "the validation: no token was masked" in caplog.text
    sums[1].tokens.masked, sums[1].loss = torch.tensor(5.0), torch.tensor(3.0)
    caplog.clear()
    metrics = validation._metrics(sums)
    assert metrics["other_val_loss"] == 3.0
    assert metrics["val_loss"] == 1.0
    assert "clean_val_loss" not in metrics
    assert "the validation set clean: no token was masked" in caplog.text
