"""`Trainer(**cfg.trainer)`: every field of Lightning's Trainer works, has no effect and is logged, or is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nest_ssl.config import TrainerConfig
from nest_ssl.config.training import NO_EFFECT, REFUSED
from nest_ssl.training import Trainer
from tests.helpers import tiny_model

LIGHTNINGS = [
    *("accelerator", "strategy", "devices", "num_nodes", "precision", "logger", "callbacks", "fast_dev_run"),
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "limit_train_batches", "limit_val_batches"),
    *("limit_test_batches", "limit_predict_batches", "overfit_batches", "val_check_interval"),
    *("check_val_every_n_epoch", "num_sanity_val_steps", "log_every_n_steps", "enable_checkpointing"),
    *("enable_progress_bar", "enable_model_summary", "accumulate_grad_batches", "gradient_clip_val"),
    *("gradient_clip_algorithm", "deterministic", "benchmark", "inference_mode", "use_distributed_sampler"),
    *("profiler", "detect_anomaly", "barebones", "plugins", "sync_batchnorm", "reload_dataloaders_every_n_epochs"),
    *("default_root_dir", "enable_autolog_hparams", "model_registry"),
]
"""The parameters of Lightning 2.6's Trainer."""

DDP = "lightning.pytorch.strategies.DDPStrategy"
SET: dict[str, Any] = {
    "use_distributed_sampler": True,
    "limit_test_batches": 3,
    "limit_predict_batches": 3,
    "reload_dataloaders_every_n_epochs": 1,
    "default_root_dir": "somewhere",
    "enable_checkpointing": True,
    "logger": True,
    "enable_autolog_hparams": False,
    "model_registry": "name",
    "overfit_batches": 2,
    "callbacks": [object()],
    "plugins": [object()],
    "barebones": True,
}

WORKS = {
    "accelerator": "tests/unit/training/test_trainer.py",
    "strategy": "tests/integration/test_trainer_fields.py",
    "devices": "tests/unit/test_run_folder.py",
    "num_nodes": "tests/unit/launch",
    "precision": "tests/integration/test_trainer_fields.py",
    "fast_dev_run": "tests/integration/test_checkpoint_moments.py",
    "max_epochs": "tests/unit/training/test_loop.py",
    "min_epochs": "tests/integration/test_trainer_fields.py",
    "max_steps": "tests/unit/training/test_loop.py",
    "min_steps": "tests/integration/test_trainer_fields.py",
    "max_time": "tests/integration/test_trainer_fields.py",
    "limit_train_batches": "tests/integration/test_trainer_fields.py",
    "limit_val_batches": "tests/integration/test_trainer_fields.py",
    "val_check_interval": "tests/integration/test_trainer_fields.py",
    "check_val_every_n_epoch": "tests/integration/test_trainer_fields.py",
    "num_sanity_val_steps": "tests/integration/test_trainer_fields.py",
    "log_every_n_steps": "tests/integration/test_trainer_fields.py",
    "enable_progress_bar": "tests/integration/test_exp_manager.py",
    "enable_model_summary": "tests/integration/test_trainer_fields.py",
    "accumulate_grad_batches": "tests/integration/test_trainer_fields.py",
    "gradient_clip_val": "tests/integration/test_trainer_fields.py",
    "gradient_clip_algorithm": "tests/integration/test_trainer_fields.py",
    "deterministic": "tests/integration/test_trainer_fields.py",
    "benchmark": "tests/unit/training/test_trainer.py",
    "inference_mode": "tests/integration/test_trainer_fields.py",
    "profiler": "tests/integration/test_trainer_fields.py",
    "detect_anomaly": "tests/integration/test_trainer_fields.py",
    "sync_batchnorm": "tests/integration/test_several_ranks.py",
}
"""Where each field that works is tested."""


def test_every_field_of_lightnings_trainer_has_its_place_in_the_table() -> None:
    ours = [field.name for field in dataclasses.fields(TrainerConfig)]
    assert sorted(ours) == sorted(LIGHTNINGS)
    assert sorted([*WORKS, *NO_EFFECT, *REFUSED]) == sorted(LIGHTNINGS)


def test_the_list_of_lightnings_fields_is_lightnings() -> None:
    pl = pytest.importorskip("lightning.pytorch")
    import inspect

    assert sorted(inspect.signature(pl.Trainer.__init__).parameters) == sorted(["self", *LIGHTNINGS])


@pytest.mark.parametrize("name", NO_EFFECT)
def test_a_field_without_effect_is_logged_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    Trainer(accelerator="cpu")
    assert "has no effect" not in caplog.text
    Trainer(accelerator="cpu", **{name: SET[name]})
    assert caplog.text.count(f"trainer.{name}: has no effect; {NO_EFFECT[name]}.") == 1


def test_what_tunes_another_exchange_of_gradients_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    Trainer(accelerator="cpu", strategy={"_target_": "lightning.pytorch.strategies.DDPStrategy", "static_graph": True})
    assert "trainer.strategy.static_graph: has no effect; our exchange of gradients needs no tuning." in caplog.text


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_is_refused_names_the_way_out(name: str) -> None:
    with pytest.raises(ValueError, match=f"trainer.{name}: "):
        Trainer(accelerator="cpu", **{name: SET[name]})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accelerator": "mps"}, "trainer.accelerator=mps: .*float64.* Use auto, cpu or gpu"),
        ({"accelerator": "tpu"}, "trainer.accelerator=tpu: not supported. Use auto, cpu or gpu"),
        ({"strategy": "deepspeed"}, "trainer.strategy=deepspeed: not supported. Use one of auto, .*nest_ssl.lightning"),
        (
            {"strategy": {"_target_": "lightning.pytorch.strategies.DDPStrategy", "x": 1}},
            "trainer.strategy.x: not supp",
        ),
        ({"strategy": {"_target_": "os.system"}}, "trainer.strategy._target_: 'os.system' is not a class"),
        ({"precision": 64}, "trainer.precision=64: not supported. Use 32, bf16 or 16"),
        ({"precision": "bf16-true"}, "would round the audio"),
        ({"gradient_clip_algorithm": "nrom"}, "trainer.gradient_clip_algorithm: 'nrom' is neither"),
        ({"profiler": "xla"}, "trainer.profiler: there is no 'xla'"),
        ({"deterministic": "maybe"}, "trainer.deterministic: 'maybe' is neither"),
        ({"val_check_interval": 0}, "trainer.val_check_interval: 0 is less than 1 batch"),
        ({"val_check_interval": "5m"}, "trainer.val_check_interval: '5m' is not of the form"),
        ({"check_val_every_n_epoch": None}, "needs trainer.val_check_interval as a number of batches"),
        ({"limit_train_batches": 1.5}, "trainer.limit_train_batches: 1.5 is not a share"),
        ({"max_time": {"parsecs": 1}}, "trainer.max_time: .*parsecs.* has keys other than weeks"),
        ({"max_step": 3}, "trainer.max_step: no such key. Did you mean 'trainer.max_steps'"),
        ({"devices": 2}, "nothing has started the others"),
    ],
)
def test_invalid_values_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Trainer(**{"accelerator": "cpu", **options})


@pytest.mark.parametrize("precision", [32, "32", "32-true", None, "bf16", "bf16-mixed", 16, "16", "16-mixed"])
def test_nemos_and_lightnings_names_of_precisions_are_known(precision: Any) -> None:
    Trainer(accelerator="cpu", precision=precision)


def test_a_configuration_section_unpacks_into_arguments() -> None:
    section = TrainerConfig(max_steps=7, accelerator="cpu")
    trainer = Trainer(**section)
    assert trainer.config == section
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.is_global_zero) == (1, 0, 0, True)


@pytest.mark.parametrize(
    ("model", "precision", "words"),
    [
        ({}, "16", "trainer.precision=16: sharded gradients are not scaled. Use bf16"),
        ({"mask_position": "post_conv"}, "32", "model.mask_position=post_conv: .* Use pre_conv, or strategy=ddp"),
        ({"encoder.untie_biases": False}, "32", "model.encoder.untie_biases=false: .* Use strategy=ddp"),
    ],
)
def test_what_cannot_be_sharded_is_refused(model: dict[str, Any], precision: str, words: str) -> None:
    trainer = Trainer(accelerator="cpu", strategy="fsdp", precision=precision)
    with pytest.raises(ValueError, match=words):
        trainer.fit(tiny_model(model))
