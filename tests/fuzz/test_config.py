"""Any configuration is accepted or refused in one line that names a key; what is accepted can be built."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nest_ssl import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.config import ExperimentConfig, ModelConfig, NestConfig, compose, model_config, parse
from nest_ssl.config.composing import yaml_folder
from nest_ssl.config.model_section import unused_keys
from nest_ssl.run_folder import ranks_per_node
from nest_ssl.training.experiment import run_folder
from nest_ssl.training.optimizers import build_optimizer
from nest_ssl.training.run import monitor_settings, pretrain_command, worker_slots
from nest_ssl.training.schedules import build_schedule
from tests.fuzz.config_values import ODD_TEXTS, Nested, any_value, changed, changes, good, hydra_text, keys_of
from tests.fuzz.effort import examples, outcome

KEYS = {key.path: key for key in keys_of(NestConfig)}
BUILT_KEYS = [key for key in keys_of(ModelConfig, "model") if not re.match(r"model\.\w+_ds\b", key.path)]
"""Those that decide the model, its optimizer and its schedule."""
PLAIN = dataclasses.asdict(compose("nest_demo"))
LINKED: dict[str, Any] = OmegaConf.to_container(  # type: ignore[assignment]
    OmegaConf.merge(*(OmegaConf.load(yaml_folder() / f"{name}.yaml") for name in ("nest_fast-conformer", "nest_demo")))
)
"""With its interpolations, so that one number may change the sections that refer to it."""


def accepted(check: Callable[[], Any], *given: str) -> Any:
    """Return the result of a check, or None if it refuses in one line that names a key, those `given` or another."""
    result, error = outcome(check, ValueError)
    if error is None:
        return result
    message = str(error)
    assert "\n" not in message, message
    assert len(message) < 1200, message
    subjects = re.findall(r"(?:^|^nest_demo.yaml: |full_key: )([\w.]+)", message)  # OmegaConf writes full_key
    is_named = any(subject.rstrip(".") in KEYS for subject in subjects)
    assert is_named or any(one.rpartition(".")[2] in message for one in given), f"{given}: {message}"
    return None


def check_before_a_run(cfg: NestConfig) -> NestConfig:
    """What `nest-ssl pretrain` does with a configuration before it starts a rank."""
    trainer, exp = cfg.trainer, cfg.exp_manager or ExperimentConfig()
    ranks_per_node(trainer.devices, trainer.accelerator, lambda: 0)
    folder = run_folder(exp, cfg.name)
    assert folder.checkpoints.is_absolute()
    monitor_settings(cfg, pretrain_command([], verbose=False), folder, None)
    assert worker_slots(cfg) >= 1
    assert all(isinstance(line, str) for line in [*cfg.unlikely(), *trainer.without_effect()])
    return cfg


@examples(100)
@given(changes(list(KEYS.values()), any_value))
@example({"model.decoder.squeeze_single": Nested(3000)})
@example({"model.optim.etas": {"_target_": None}})
@example({"model.train_ds.bucket_duration_bins": {"1": 1485}})
@example({"model.optim.betas": "abc"})
@example({"exp_manager.exp_dir": "~no-such-user/x"})
@example({"exp_manager.checkpoint_callback_params.dirpath": "~no-such-user/x"})
@example({"model.train_ds.concat_sampling_probabilities": b"\xff"})
@example({"model.encoder.self_attention_model": "9" * 5000})
@example({"model.encoder.conv_norm_type": "group_norm" + "9" * 5000})
@example({"model.optim.name": "a\nb"})
@example({"exp_manager.checkpoint_callback_params.filename": "{epoch:9999999999d}"})
def test_any_mapping_is_a_configuration_or_refused_with_a_key(values: dict[str, Any]) -> None:
    config = changed(PLAIN, values)
    accepted(lambda: check_before_a_run(parse(NestConfig, config, unused=unused_keys())), *values)


@examples(40)
@given(changes(BUILT_KEYS, any_value))
@example({"model.encoder": []})
@example({"model.encoder.dropout": Nested(3000)})
def test_any_section_of_a_model_file_is_a_model_or_refused_with_a_key(values: dict[str, Any]) -> None:
    model = changed(LINKED, values)["model"]
    if isinstance(model, dict):
        model = {**model, "target": "nemo.collections.asr.models.ssl_models.EncDecDenoiseMaskedTokenPredModel"}
    accepted(lambda: model_config(model), *values)


texts = st.sampled_from(ODD_TEXTS) | st.text(max_size=10) | st.text(alphabet="[]{}()'\",:$=\\ a1.", max_size=12)
overrides = st.builds(
    lambda sign, key, value: f"{sign}{key.path}={value}",
    st.sampled_from(["", "", "+", "++", "~"]),
    st.sampled_from(list(KEYS.values())),
    texts,
) | changes(list(KEYS.values()), any_value, most=1).map(
    lambda change: "".join(f"{path}={hydra_text(value)}" for path, value in change.items())
)


@examples(12)
@given(st.lists(overrides, min_size=1, max_size=2))
@example(["size=null"])
@example([f"seed=1{'0' * 5000}"])
@example([f"model.encoder.dropout={'[' * 1000}{']' * 1000}"])
@example(["model.train_ds.shuffle={'':1}"])
@example(["~model="])
def test_any_override_is_applied_or_refused_with_its_key(given_overrides: list[str]) -> None:
    keys = [one.partition("=")[0].lstrip("+~") for one in given_overrides]
    accepted(lambda: check_before_a_run(compose("nest_demo", given_overrides)), *keys)


@examples(25)
@given(changes(BUILT_KEYS, good, most=4))
@example({"model.optim.sched.constant_steps": 1000})
def test_an_accepted_model_can_be_built_with_its_optimizer_and_schedule(values: dict[str, Any]) -> None:
    cfg = accepted(lambda: model_config(changed(LINKED, values)["model"]), *values)
    if cfg is None or num_weights(cfg) > 1e9:
        return
    accepted(lambda: build(cfg), *values)


def num_weights(cfg: ModelConfig) -> float:
    size = cfg.encoder.n_layers * cfg.encoder.d_model**2 * cfg.encoder.ff_expansion_factor
    return size + cfg.decoder.feat_in * cfg.decoder.num_classes * cfg.decoder.num_decoders


def build(cfg: ModelConfig) -> None:
    with torch.device("meta"):
        model = EncDecDenoiseMaskedTokenPredModel(cfg)
    optimizer = build_optimizer(model, cfg.optim)
    if cfg.optim.sched is not None:
        schedule = build_schedule(optimizer, cfg.optim.sched, 800)
        assert all(0 <= schedule.rate(cfg.optim.lr, step) < float("inf") for step in (0, 1, 40, 800, 10**6))
