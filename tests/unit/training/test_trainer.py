from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.callbacks import Timer

from nest_ssl.config import TrainerConfig
from nest_ssl.training.time_limit import TimeLimit
from nest_ssl.training.trainer import build_trainer


@pytest.mark.parametrize(("name", "reason"), [("mps", "float64"), ("tpu", "not supported")])
def test_an_accelerator_that_is_none_of_ours_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"trainer.accelerator={name}: .*{reason}.* Use auto, cpu or gpu"):
        build_trainer(TrainerConfig(accelerator=name), [], [])


def test_more_devices_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="trainer.devices=8: this machine has 2 GPUs"):
        build_trainer(TrainerConfig(devices=8, accelerator="gpu"), [], [])


def test_lightning_does_not_reshard_the_plan_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    trainer = build_trainer(TrainerConfig(use_distributed_sampler=True, accelerator="cpu"), [], [])
    assert not trainer._accelerator_connector.use_distributed_sampler
    assert "trainer.use_distributed_sampler: true is ignored" in caplog.text


def test_batch_statistics_are_not_shared_between_cpu_ranks_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    build_trainer(TrainerConfig(sync_batchnorm=True, accelerator="cpu", devices=2, strategy="ddp"), [], [])
    assert caplog.text.count("torch has none on CPU ranks") == 1


def test_a_strategy_can_be_a_target() -> None:
    strategy = {"_target_": "lightning.pytorch.strategies.DDPStrategy", "gradient_as_bucket_view": True}
    trainer = build_trainer(TrainerConfig(strategy=strategy, accelerator="cpu", devices=2), [], [])
    assert type(trainer.strategy).__name__ == "DDPStrategy"


@pytest.mark.parametrize(("world_size", "asked"), [(1, 30), (2, 3)])
def test_several_ranks_do_not_ask_for_the_time_in_every_step(world_size: int, asked: int) -> None:
    trainer = Mock(world_size=world_size, should_stop=False)
    trainer.strategy.broadcast.side_effect = lambda stops: stops
    trainer.fit_loop.epoch_loop._should_accumulate.return_value = False
    timer = TimeLimit({"seconds": 0}, verbose=False)
    timer.on_train_start(trainer, Mock())
    for step in range(1, 31):
        trainer.global_step = step
        timer.on_train_batch_end(trainer)
        assert trainer.should_stop is (world_size == 1 or step >= 10)
    assert trainer.strategy.broadcast.call_count == asked


def test_the_trainers_time_limit_is_ours() -> None:
    trainer = build_trainer(TrainerConfig(accelerator="cpu", max_time="00:00:00:05"), [], [])
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    assert [type(callback) for callback in callbacks if isinstance(callback, Timer)] == [TimeLimit]
