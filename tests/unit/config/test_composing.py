from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import yaml

from nest_ssl.config import ConfigError, compose, embedded_configs, load_yaml, model_config
from nest_ssl.config.training import NestConfig

NEMO_YAML = json.loads((Path(__file__).parents[2] / "parity" / "nemo_yaml.json").read_text())


@pytest.fixture
def nemo_yaml(tmp_path: Path) -> Path:
    """NeMo's nest_fast-conformer.yaml, from its recorded keys and values."""
    path = tmp_path / "nest_fast-conformer.yaml"
    path.write_text(yaml.safe_dump(NEMO_YAML, sort_keys=False))
    return path


def test_nemos_yaml_loads_unchanged_and_one_line_names_the_unused_keys(
    nemo_yaml: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cfg = load_yaml(nemo_yaml)
    assert cfg.trainer.strategy == "ddp_find_unused_parameters_true"
    assert cfg.model.quantizer.combine_time_steps == 8
    assert [m for m in caplog.messages if "does not use" in m] == [
        "ignored NeMo config keys that NEST does not use: model.spec_augment"
    ]


def test_our_model_section_has_nemos_values(nemo_yaml: Path) -> None:
    ours, theirs = compose().model, load_yaml(nemo_yaml).model
    for section in ("preprocessor", "masking", "quantizer", "encoder", "decoder", "loss", "optim"):
        assert getattr(ours, section) == getattr(theirs, section), section
    assert ours.encoder.sync_max_audio_length is False


def test_the_default_starts_anywhere() -> None:
    cfg = compose()
    assert (cfg.trainer.devices, cfg.trainer.accelerator, cfg.trainer.strategy) == (1, "auto", "auto")
    assert cfg.trainer.sync_batchnorm
    assert cfg.model.train_ds is not None
    assert (cfg.model.train_ds.batch_size, cfg.model.train_ds.num_workers) == (2, 0)
    assert cfg.model.train_ds.pin_memory


def test_the_example_for_several_gpus_uses_all_of_them() -> None:
    cfg = compose("nest_fast-conformer_ddp_example")
    assert (cfg.trainer.devices, cfg.trainer.strategy) == (-1, "ddp")
    assert cfg.model.train_ds is not None
    assert (cfg.model.train_ds.batch_size, cfg.model.train_ds.num_workers, cfg.model.train_ds.drop_last) == (8, 8, True)


def test_the_streaming_and_xlarge_variants_compose() -> None:
    encoder = compose("nest_fast-conformer_streaming").model.encoder
    assert encoder.causal_downsampling
    assert encoder.conv_context == (8, 0)
    assert (encoder.att_context_style, encoder.conv_norm_type) == ("chunked_limited", "layer_norm")
    xlarge = compose("nest_fast-conformer_xlarge_128mel").model
    assert (xlarge.preprocessor.features, xlarge.masking.feat_in, xlarge.encoder.feat_in) == (128, 128, 128)
    assert (xlarge.encoder.d_model, xlarge.encoder.n_layers, xlarge.encoder.use_bias) == (1024, 24, False)


@pytest.mark.parametrize("name", embedded_configs())
def test_every_embedded_configuration_is_valid(name: str) -> None:
    assert isinstance(compose(name), NestConfig)


def test_interpolations_follow_overrides() -> None:
    model = compose(overrides=["model.preprocessor.features=128", "model.num_books=4"]).model
    assert (model.encoder.feat_in, model.masking.feat_in, model.quantizer.feat_in) == (128, 128, 128)
    assert (model.decoder.num_decoders, model.loss.num_decoders) == (4, 4)


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_any_key_of_the_schema_can_be_set_with_or_without_a_plus(nemo_yaml: Path, prefix: str) -> None:
    overrides = [f"{prefix}model.encoder.sync_max_audio_length=true", f"{prefix}trainer.devices=2"]
    cfg = load_yaml(nemo_yaml, overrides)
    assert cfg.model.encoder.sync_max_audio_length
    assert cfg.trainer.devices == 2


def test_a_tilde_removes_a_key() -> None:
    train_ds = compose(overrides=["~model.train_ds.batch_augmentor"]).model.train_ds
    assert train_ds is not None
    assert train_ds.batch_augmentor is None


@pytest.mark.parametrize("override", ["size=small", "+size=small"])
def test_sizes_work_with_our_yaml_and_with_nemos(nemo_yaml: Path, override: str) -> None:
    assert compose(overrides=[override]).model.encoder.d_model == 176
    assert load_yaml(nemo_yaml, [override]).model.encoder.d_model == 176


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.encoder.n_layer=3", "model.encoder.n_layer: no such key. Did you mean 'model.encoder.n_layers'?"),
        ("modell.x=1", "modell: no such key. Did you mean 'model'?"),
        ("optim.lr=1", "optim: no such key. Did you mean 'model.optim'?"),
        ("model.batch_size=1", "model.batch_size: no such key. Did you mean 'model.train_ds.batch_size'?"),
        ("trainer.devicess=1", "Did you mean 'trainer.devices'?"),
        ("model.encoder.n_layers=many", "model.encoder.n_layers: expected int, got 'many'"),
        ("model.encoder.xscaling=7", "model.encoder.xscaling: expected bool, got 7"),
        ("model.encoder._target_=os.system", "'os.system' is not a class that nest-ssl knows"),
        ("model.masking._target_=nemo.collections.asr.modules.RandomBlockMaskin", "Did you mean 'nemo.collections"),
        ("trainer.strategy={_target_:subprocess.Popen}", "'subprocess.Popen' is not a class"),
        ("model.train_ds.batch_augmentor._target_=builtins.eval", "'builtins.eval' is not a class"),
        ("model.encoder.subsampling=vggnet", "'vggnet' exists in NeMo but not in nest-ssl"),
        ("model.encoder.self_attention_model=rel_pos_local_attn", "exists in NeMo but not in nest-ssl"),
        ("model.encoder.reduction=pooling", "exists in NeMo but not in nest-ssl"),
        ("model.encoder.conv_norm_type=fused_batch_norm", "exists in NeMo but not in nest-ssl"),
        ("model.encoder.conv_norm_type=group_norm", "is not batch_norm, layer_norm"),
        ("model.encoder.conv_norm_type=group_norm7", "a divisor of d_model 512"),
        ("model.encoder.subsampling_factor=6", "6 is not a power of two"),
        ("model.encoder.n_heads=7", "7 does not divide d_model 512"),
        ("model.encoder.dropout=1.5", "1.5 is not a probability"),
        ("model.encoder.att_context_size=[1,2,3]", "is not [left, right]"),
        ("model.encoder.att_context_probs=[0.5]", "are not 1 probabilities that sum to 1"),
        ("model.encoder.conv_context_size=[1,2]", "left + right + 1 = 9"),
        ("model.preprocessor.exact_pad=true", "exists in NeMo but not in nest-ssl"),
        ("model.preprocessor.normalize=per_features", "is not one of 'per_feature'"),
        ("model.masking.feat_in=12", "model.masking.feat_in is 12, but preprocessor.features is 80"),
        ("model.mask_position=mid_conv", "'mid_conv' is not one of 'pre_conv', 'post_conv'"),
        ("model.loss.squeeze_single=true", "squeeze_single differs"),
        ("model.encoder.att_context_probs=[1.5,-0.5]", "are not 1 probabilities"),
        ("model.encoder.conv_norm_type='group_norm²'", "is not batch_norm"),
        ("model.encoder.subsampling_conv_channels=-7", "subsampling_conv_channels: -7 is less than 1"),
        ("model.preprocessor.window_stride=inf", "window_stride: inf is not a finite number"),
        ('name="a\0b"', "name: 'a\\x00b' contains NUL, which no name or path has"),
        ('model.train_ds.manifest_filepath=[x,"a\0b"]', "model.train_ds.manifest_filepath: "),
        ("model.preprocessor.window_size=nan", "window_size: nan is not a finite number"),
        ("model.preprocessor.lowfreq=9000", "lowfreq: 9000 Hz is not between 0 and the highest frequency, 8000 Hz"),
        ("model.quantizer.dist_fn=dot", "'dot' is not one of 'l2', 'cosine'"),
        ("model.optim.sched.warmup_ratio=0.1", "give warmup_steps or warmup_ratio, not both"),
        ("nonsense", "override 'nonsense': expected key=value"),
        ("trainer.max_\u200bsteps=8", "its key contains U+200B. Type it again"),
        ("\u201ctrainer.max_steps=8\u201d", "its key contains U+201C. Type it again"),
        ("size=huge", "'size=huge': no such size. There are large, "),
        ("model.encoder.subsampling_factor=0", "combine_time_steps = ${model.encoder.subsampling_factor}: 0 is less"),
        ("model.sample_rate=0", "model.train_ds.sample_rate = ${model.sample_rate}: 0 is less than 1000"),
        ("model.encoder.n_layers=${nowhere}", "nowhere"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_key_and_the_way_out(override: str, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        compose(overrides=[override])
    assert words in str(raised.value)


@pytest.mark.parametrize("depth", [1, 12])
def test_aliases_that_would_fill_the_memory_are_refused(tmp_path: Path, depth: int) -> None:
    lines = ["a0: &a0 [*a0]" if depth == 1 else "a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, depth)]
    (tmp_path / "own.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"own.yaml.*aliases"):
        compose("own", config_path=tmp_path)


@pytest.mark.parametrize("value", ["[1, 2]", "7", "text", "null"])
@pytest.mark.parametrize("key", ["model.encoder", "model.masking", "trainer"])
def test_what_is_no_section_in_the_place_of_one_is_refused_by_its_key(tmp_path: Path, key: str, value: str) -> None:
    found = {"text": "'text'", "null": "None"}.get(value, value)
    message = f"^{re.escape(f'{key}: expected a mapping of keys, got {found}.')}$"
    with pytest.raises(ConfigError, match=message):
        compose(overrides=[f"{key}={value}"])
    section, _, inner = key.partition(".")
    content = f"{inner}: {value}" if inner else value
    yaml_text = f"defaults: [nest_fast-conformer, _self_]\n{section}: {f'{{{content}}}' if inner else value}\n"
    (tmp_path / "mine.yaml").write_text(yaml_text)
    with pytest.raises(ConfigError, match=message):
        load_yaml(tmp_path / "mine.yaml")


def test_a_mapping_in_the_place_of_a_list_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^model\.optim\.betas: expected list\[float\] \| None, got \{'a': 1\}"):
        compose(overrides=["model.optim.betas={a: 1}"])


def test_a_section_may_refer_to_another_and_a_yaml_may_merge_but_not_repeat_a_key(tmp_path: Path) -> None:
    text = "defaults: [nest_fast-conformer, _self_]\nmodel:\n  train_ds: &data {batch_size: 3}\n"
    (tmp_path / "mine.yaml").write_text(
        text + "  validation_ds: {<<: *data, batch_size: 4}\n  test_ds: ${model.validation_ds}\n"
    )
    model = load_yaml(tmp_path / "mine.yaml").model
    assert [ds.batch_size for ds in (model.train_ds, model.validation_ds, model.test_ds) if ds] == [3, 4, 4]
    (tmp_path / "mine.yaml").write_text(text + "  train_ds: {batch_size: 5}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: .*duplicate key train_ds"):
        load_yaml(tmp_path / "mine.yaml")


def test_a_missing_file_lists_the_packaged_configurations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file.*nest_fast-conformer"):
        compose("nothing", config_path=tmp_path)


def test_the_model_section_can_be_a_dict_with_interpolations_of_its_file() -> None:
    section = {**NEMO_YAML["model"], "train_ds": None, "validation_ds": None}
    assert model_config(section).encoder.feat_in == 80


def test_a_post_conv_section_that_nemo_adjusted_gets_the_users_values_back() -> None:
    section = json.loads(json.dumps(NEMO_YAML["model"]))
    section |= {"mask_position": "post_conv", "train_ds": None, "validation_ds": None, "nemo_version": "2.7.3"}
    section["masking"] |= {"block_size": 5, "feat_in": 512}
    section["quantizer"] |= {"feat_in": 512, "combine_time_steps": 1}
    section["loss"]["combine_time_steps"] = 1
    cfg = model_config(section)
    assert (cfg.masking.block_size, cfg.masking.feat_in, cfg.quantizer.feat_in) == (40, 80, 80)


def test_numbers_in_scientific_notation_are_numbers() -> None:
    assert model_config({**NEMO_YAML["model"], "optim": {"weight_decay": "1e-3"}}).optim.weight_decay == 1e-3


@pytest.mark.parametrize("content", ["seed", "- seed: 1", "3"])
def test_a_yaml_that_is_no_mapping_is_refused_by_its_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "my.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"my\.yaml: expected a mapping of keys"):
        compose("my", [], tmp_path)


@pytest.mark.parametrize("content", ["", "# nothing but this\n"])
def test_an_empty_yaml_is_said_to_be_empty(tmp_path: Path, content: str) -> None:
    (tmp_path / "my.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"^\S+my\.yaml: is empty"):
        compose("my", [], tmp_path)


def test_a_value_to_be_given_that_is_not_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "my.yaml").write_text(
        "defaults: [nest_fast-conformer, _self_]\nmodel: {train_ds: {noise_manifest: '???'}}\n"
    )
    assert compose("my", ["model.train_ds.noise_manifest=n.jsonl"], tmp_path).model.train_ds is not None
    assert caplog.text == ""
    compose("my", ["model.train_ds.noise_manifest=null"], tmp_path)
    compose("my", ["~model.train_ds"], tmp_path)
    assert caplog.text == ""
    compose("my", [], tmp_path)
    assert "my.yaml: model.train_ds.noise_manifest: ??? stands for a value to be given. None was: null" in caplog.text


def test_a_yaml_that_is_based_on_itself_is_called_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: [b, _self_]\n")
    (tmp_path / "b.yaml").write_text("defaults: [a, _self_]\n")
    with pytest.raises(ConfigError, match=r"a\.yaml: leads in a circle: a file in its 'defaults:' list"):
        compose("a", config_path=tmp_path)


def test_a_yaml_in_a_subfolder_is_based_on_the_packaged_ones_and_one_elsewhere_is_pointed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "my.yaml"
    path.write_text("defaults: [nest_demo, _self_]\nseed: 5\nhydra: {run: {dir: x}}\n")
    assert compose("sub/my", config_path=tmp_path).seed == compose(str(path)).seed == 5
    assert "my.yaml: 'hydra:' has no effect" in caplog.text
    monkeypatch.chdir(tmp_path / "sub")
    with pytest.raises(ConfigError, match=r"For my\.yaml use '--config-path \. --config-name my'"):
        compose("my.yaml")


def test_letters_other_than_ascii_need_no_quotes() -> None:
    cfg = compose("nest_demo", ["exp_manager.name=käse", "model.train_ds.manifest_filepath=数据/train.jsonl"])
    assert cfg.exp_manager is not None
    assert cfg.exp_manager.name == "käse"
    assert cfg.model.train_ds is not None
    assert cfg.model.train_ds.manifest_filepath == "数据/train.jsonl"
    with pytest.raises(ConfigError, match="max_steps: expected int, got '４'"):
        compose("nest_demo", ["trainer.max_steps=４"])
