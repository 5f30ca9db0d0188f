"""The LightningModule on its own; tests/integration/test_train_lightning.py runs it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from omegaconf import OmegaConf

from nest_ssl import EncDecDenoiseMaskedTokenPredModel, plugins
from nest_ssl.checkpoint.read import load
from nest_ssl.config import NestConfig, compose
from nest_ssl.data import Source, Speech
from nest_ssl.lightning import PretrainingModule
from tests.integration.runs import arguments, make_corpus


def config(*overrides: str) -> NestConfig:
    return compose("nest_fast-conformer", arguments(Path("missing"), Path("runs"), "name", *overrides))


def trainer(devices: int = 1, strategy: str = "auto", *, use_distributed_sampler: bool = True) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        use_distributed_sampler=use_distributed_sampler,
        logger=False,
        enable_checkpointing=False,
    )


def test_without_lightning_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "nest_ssl.lightning")
    with pytest.raises(ImportError, match=r"pip install 'nest-ssl\[lightning\]'"):
        importlib.import_module("nest_ssl.lightning")


def test_without_a_trainer_there_is_one_rank() -> None:
    module = PretrainingModule(config())
    assert (module.world_size, module.global_rank, module.local_rank) == (1, 0, 0)


def test_ranks_are_those_of_the_trainer() -> None:
    module = PretrainingModule(config())
    module.trainer = trainer(2, "ddp")
    assert (module.world_size, module.global_rank, module.local_rank) == (2, 0, 0)


def test_a_rank_under_our_own_watchdog_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = PretrainingModule(config())
    module.trainer = trainer()
    monkeypatch.setenv("NEST_SSL_BEACON", "/dev/shm/beacon")
    with pytest.raises(ValueError, match=r"Use hydra_runner\(…, launch=False\)"):
        module.setup("fit")


def test_lightnings_sampler_is_refused_on_two_ranks() -> None:
    module = PretrainingModule(config())
    module.trainer = trainer(2, "ddp")
    with pytest.raises(ValueError, match=r"Use Trainer\(use_distributed_sampler=False\)"):
        module.setup("fit")
    module.trainer = trainer(2, "ddp", use_distributed_sampler=False)
    module.setup("fit")


def test_one_rank_may_have_both() -> None:
    module = PretrainingModule(config())
    module.trainer = trainer()
    module.setup("fit")


def test_the_seed_decides_the_weights() -> None:
    name = "model.encoder.pre_encode.out.weight"
    first, again, other = (PretrainingModule(config(f"seed={seed}")).state_dict()[name] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_given_model_is_used_as_it_is() -> None:
    cfg = config()
    model = EncDecDenoiseMaskedTokenPredModel(cfg.model)
    assert PretrainingModule(cfg, model).model is model


@pytest.mark.parametrize("make", [dict, OmegaConf.create])
def test_data_is_set_up_from_a_mapping_as_in_nemo(tmp_path: Path, make: type[dict[str, object]]) -> None:
    make_corpus(tmp_path, num_train=6, num_val=2)
    module = PretrainingModule(config())
    noise = str(tmp_path / "noise.jsonl")
    for name, setup in (("train", module.setup_training_data), ("valid", module.setup_validation_data)):
        setup(make({"manifest_filepath": str(tmp_path / f"{name}.jsonl"), "noise_manifest": noise, "batch_size": 2}))
    assert len(module.train_dataloader()) == 3
    assert [len(loader) for loader in module.val_dataloader()] == [1]


def test_a_registered_source_needs_no_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    class Four(Source):
        name = "four"

        def __len__(self) -> int:
            return 4

        def read(self, index: int, on_read: object = None) -> Speech:
            raise AssertionError("a loader reads when it is iterated")

        def fingerprint(self) -> str:
            return "four"

    monkeypatch.setattr(plugins.sources, "_things", {"four": lambda config: Four()})
    module = PretrainingModule(config())
    module.setup_training_data({"source": "four", "batch_size": 2, "noise_manifest": None})
    assert len(module.train_dataloader()) == 2


def test_an_unknown_data_key_is_an_error_that_names_its_place() -> None:
    with pytest.raises(ValueError, match=r"model.train_ds.manifest_file: no such key"):
        PretrainingModule(config()).setup_training_data({"manifest_file": "train.jsonl"})


def test_no_manifest_is_an_error_that_names_the_key() -> None:
    cfg = config()
    cfg.model.train_ds = None
    with pytest.raises(ValueError, match=r"model.train_ds.manifest_filepath: no manifest"):
        PretrainingModule(cfg).train_dataloader()


def test_a_checkpoint_has_nemos_names_and_both_nest_ssl_and_the_module_load_it(tmp_path: Path) -> None:
    module = PretrainingModule(config())
    checkpoint = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    assert list(checkpoint["state_dict"]) == list(module.model.state_dict())

    torch.save(checkpoint, tmp_path / "x.ckpt")
    loaded = load(tmp_path / "x.ckpt").state_dict()
    assert all(torch.equal(value, module.model.state_dict()[name]) for name, value in loaded.items())

    module.on_load_checkpoint(checkpoint)
    PretrainingModule(config("seed=5")).load_state_dict(checkpoint["state_dict"])
