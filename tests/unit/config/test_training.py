"""The `trainer:` and `exp_manager:` sections, and what changes in a run that is resumed."""

from __future__ import annotations

import dataclasses

from nest_ssl.config import NestConfig, compose
from nest_ssl.config.training import IGNORED_ON_RESUME, changed_keys


def test_every_key_that_changed_since_the_checkpoint_is_listed_with_its_effect() -> None:
    before = dataclasses.asdict(compose("nest_demo"))
    now = compose(
        "nest_demo",
        [
            "model.optim.weight_decay=0.5",
            "trainer.gradient_clip_val=2.0",
            "init_from_ptl_ckpt=other.ckpt",
            "model.optim.sched.last_epoch=5",
            "trainer.logger=true",
        ],
    )
    lines = changed_keys(before, now)
    assert set(lines) == {
        *("model.optim.weight_decay", "trainer.gradient_clip_val", "init_from_ptl_ckpt"),
        *("model.optim.sched.last_epoch", "trainer.logger"),
    }
    assert lines["model.optim.weight_decay"].endswith("→ 0.5: takes effect")
    assert lines["init_from_ptl_ckpt"].endswith("ignored, because the checkpoint's weights are used")
    assert "position on the schedule" in lines["model.optim.sched.last_epoch"]
    assert "exp_manager creates the loggers" in lines["trainer.logger"]


def test_the_same_configuration_has_no_changed_keys() -> None:
    cfg = compose("nest_demo")
    assert changed_keys(dataclasses.asdict(cfg), cfg) == {}
    assert changed_keys({}, cfg) == {}


def test_every_key_that_is_ignored_on_resume_exists() -> None:
    cfg = compose("nest_demo")
    for key in IGNORED_ON_RESUME:
        section: object = cfg
        for name in key.split("."):
            assert hasattr(section, name), key
            section = getattr(section, name)
    assert isinstance(cfg, NestConfig)
