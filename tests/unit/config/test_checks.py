"""Every number in the configuration has its range."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import pytest

from nest_ssl.config import compose, parse
from nest_ssl.config.checks import _parts, duration_s, ranges_of


def sections(config: Any, where: str = "") -> list[tuple[str, Any]]:
    """Every dataclass in a configuration, with its key."""
    found = [(where, config)]
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        if dataclasses.is_dataclass(value):
            found += sections(value, f"{where}.{one.name}".lstrip("."))
    return found


CONFIG = compose("nest_demo", ["model.train_ds.manifest_filepath=x", "exp_manager.ema.enable=true"])
NUMERIC = [
    (f"{where}.{one.name}".lstrip("."), section, one.name)
    for where, section in sections(CONFIG)
    for one in dataclasses.fields(section)
    if one.name != "max_time"  # a mapping of numbers, which `duration_s` checks
    and {int, float} & set(_parts(typing.get_type_hints(type(section), include_extras=True)[one.name]))
]
ODD: list[Any] = [math.nan, math.inf, -math.inf, -1, 0, -7, 10**400, 1e300, True]


def test_the_whole_configuration_is_walked() -> None:
    keys = {key for key, _, _ in NUMERIC}
    assert {"seed", "trainer.max_steps", "model.optim.sched.min_lr", "model.train_ds.batch_augmentor.prob"} <= keys
    assert len(keys) > 150


def test_every_numeric_key_declares_its_range() -> None:
    assert [key for key, section, name in NUMERIC if name not in ranges_of(type(section))] == []


def refusal(value: Any, key: str, section: Any, name: str) -> str | None:
    """Why the section does not take this value under `name`, or None: in a list where only a list is taken."""
    hint = typing.get_type_hints(type(section))[name]
    kinds = typing.get_args(hint) or (hint,)
    takes_number = int in kinds or float in kinds
    data = {**dataclasses.asdict(section), name: value if takes_number else [value, value]}
    try:
        parse(type(section), data, key.rpartition(".")[0])
    except ValueError as error:
        return str(error)
    return None


def test_an_odd_number_is_accepted_or_refused_with_its_key() -> None:
    for key, section, name in NUMERIC:
        for value in ODD:
            message = refusal(value, key, section, name)
            if message is not None:
                # Another key may be named first: a window of 0 seconds is shorter than the Fourier transform.
                assert message.startswith(key.split(".")[0]), f"{key}={value}: {message}"
                assert len(message) < 400, key


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400], ids=["nan", "inf", "-inf", "huge"])
def test_no_numeric_key_takes_what_is_not_finite(value: float) -> None:
    for key, section, name in NUMERIC:
        message = refusal(value, key, section, name)
        assert message is not None, key
        assert name in message, message


REFUSED = {
    "trainer.gradient_clip_val=-1": "trainer.gradient_clip_val: -1 is not greater than 0. Use null for no clipping",
    "trainer.gradient_clip_val=nan": "trainer.gradient_clip_val: nan is not a finite number",
    "trainer.max_steps=0": "trainer.max_steps: 0 trains nothing",
    "trainer.limit_train_batches=0": "trainer.limit_train_batches: 0 leaves nothing to train on",
    "trainer.min_steps=5 trainer.max_steps=3": "trainer.min_steps: 5 is more than trainer.max_steps 3",
    "trainer.max_steps=true": "trainer.max_steps: expected a number, got true",
    "trainer.devices=-2": "trainer.devices: -2 is less than -1",
    "trainer.precision=64": "trainer.precision=64: not supported",
    "trainer.max_time=00:00:00:00": "trainer.max_time: no time at all trains nothing",
    "exp_manager.ema.decay=1": "exp_manager.ema.decay: ",
    "trainer.max_time={days:-1}": "trainer.max_time: {'days': -1} is less than 0 seconds",
    "exp_manager.early_stopping_callback_params.patience=-1": "patience: -1 is less than 0",
    "exp_manager.checkpoint_callback_params.every_n_train_steps=-1": "every_n_train_steps: -1 is less than 0",
    "exp_manager.checkpoint_callback_params.mode=mean": "mode: 'mean' is not one of 'min', 'max'",
    "model.preprocessor.highfreq=9000": "model.preprocessor.highfreq: 9000 Hz is more than half the sample rate",
    "model.preprocessor.dither=-1": "model.preprocessor.dither: -1.0 is less than 0",
    "model.train_ds.bucket_duration_bins=[nan]": "model.train_ds.bucket_duration_bins: nan is not a finite number",
    "model.train_ds.channel_selector=foo": "model.train_ds.channel_selector: 'foo' is not one of 'average'",
    "model.train_ds.min_duration=9 model.train_ds.max_duration=3": "model.train_ds.min_duration: 9 s is above",
    "model.encoder.d_model=999998 model.encoder.n_heads=2": "weights; at most 1e+11 are supported",
    "model.validation_ds.batch_size=0": "model.validation_ds.batch_size: 0 is less than 1",
    "seed=-1": "seed: -1 is less than 0",
    "name=../../x": "exp_manager.name = ${name}: '../../x' is not a name inside the run's folder",
    "+model.train_ds.use_lhotse=true +model.train_ds.is_tarred=true": "is_tarred: with 'use_lhotse: true' it needs",
    "exp_manager.name=.": "exp_manager.name: '.' is not a name inside",
    f"exp_manager.name={'x' * 151}": "is longer than 150 bytes",
    "exp_manager.name=/x": "exp_manager.name: '/x' is not a name inside",
    "exp_manager.version=a/../../b": "exp_manager.version: 'a/../../b' is not a name inside",
    "exp_manager.checkpoint_callback_params.prefix=../x": "prefix: '../x' is not a name inside",
    "model.encoder.global_tokens=1": "model.encoder.global_tokens: 1 exists in NeMo but not in nest-ssl",
    "+model.masking._target_=nest_ssl.modules.ConformerEncoder": "masking._target_: a ConformerEncoder where a Random",
    "model.preprocessor.window_stride=0.0001": "model.preprocessor.window_stride: 0.0001 is less than 0.001",
    "model.preprocessor.highfreq=8": "model.preprocessor.features: 0 frequencies between lowfreq and highfreq",
    "model.preprocessor.lowfreq=7900": "model.preprocessor.features: 3 frequencies between lowfreq and highfreq",
    "exp_manager.exp_dir='$HOME/runs'": "exp_manager.exp_dir: '$HOME/runs' is not a path",
    "exp_manager.exp_dir='file:///runs'": "exp_manager.exp_dir: 'file:///runs' is not a path",
    "exp_manager.exp_dir=": "exp_manager.exp_dir: is empty. Give a path, or null for none.",
    "exp_manager.explicit_log_dir=''": "exp_manager.explicit_log_dir: is empty",
    "exp_manager.resume_from_checkpoint=": "exp_manager.resume_from_checkpoint: is empty",
    "exp_manager.checkpoint_callback_params.dirpath=": "exp_manager.checkpoint_callback_params.dirpath: is empty",
    "exp_manager.checkpoint_callback_params.filename=a/b": "filename: 'a/b' is not the name of a file. Give the folder",
    "exp_manager.max_time_per_run='00:00:00:00'": "exp_manager.max_time_per_run: 0 seconds leave no time to train",
    "exp_manager.checkpoint_callback_params.filename='{val_loss'": "filename: '{val_loss': a brace is missing",
    "exp_manager.summary_writer_kwargs={bogus:1}": "summary_writer_kwargs.bogus: no such key",
    "exp_manager.summary_writer_kwargs={max_queue:0}": "summary_writer_kwargs.max_queue: 0 is less than 1",
    "exp_manager.checkpoint_callback_params.prefix=a/b": "prefix: 'a/b' is not the name of a file. Give the folder",
    "model.preprocessor.dither=1": "model.preprocessor.dither: 1.0 is more than 0.1. Samples are between -1 and 1",
    "model.optim.lr=1e30": "model.optim.lr: 1e+30 is more than 1000",
    "model.preprocessor.log_zero_guard_value=1e12": "model.preprocessor.log_zero_guard_value: 1000000000000.0 is more",
    "model.train_ds.concat_sampling_temperature=1e-300": "concat_sampling_temperature: 1e-300 is less than 0.1",
    "model.train_ds.cuts_path=x.jsonl": "model.train_ds.cuts_path: needs 'use_lhotse: true'",
    "model.train_ds.shar_path=x": "model.train_ds.shar_path: needs 'use_lhotse: true'",
    "exp_manager.version=1.10": "expected str | None, got 1.1. Text that looks like a number or a switch needs quotes",
    "model.optim.eps=0": "model.optim.eps: 0.0 is not greater than 0",
    "model.encoder.reduction_factor=2": "model.encoder.reduction_factor: 2 exists in NeMo but not in nest-ssl",
    "model.quantizer.time_ahead=true": "model.quantizer.time_ahead: True exists in NeMo",
    "model.train_ds.noise_manifest=''": "model.train_ds.noise_manifest: contains no path",
    "model.train_ds.noise_manifest=[]": "model.train_ds.noise_manifest: contains no path",
    "model.train_ds.input_cfg=x.yaml": "model.train_ds.input_cfg: needs 'use_lhotse: true'",
    "model.preprocessor.window_size=0.00002": "model.preprocessor.window_size: 2e-05 is less than 1 sample",
    "model.preprocessor.window_size=25": "model.preprocessor.window_size: 25.0 is more than a second",
    "model.preprocessor={window_size:null,n_window_size:160000}": "preprocessor.n_window_size: 160000 is more than a",
    "model.preprocessor={window_size:0.9,window_stride:0.9,n_fft:null}": "stride: 14400 samples are more than 0.1",
    "model.preprocessor.n_fft=1000000": "model.preprocessor.n_fft: 1000000 is more than 65536",
    "model.preprocessor.pad_to=100000": "model.preprocessor.pad_to: 100000 is more than 1024",
    "model.preprocessor.mel_norm=foo": "model.preprocessor.mel_norm: 'foo' is not one of",
    "+model.optim.sched={name:WarmupHoldPolicy,hold_steps:5}": "model.optim.sched.name: 'WarmupHoldPolicy' exists in",
    "model.sample_rate=48000": "model.preprocessor.n_fft: 512 is less than a window (window_size), 1200 samples at",
    "model.preprocessor.window_stride=0.2": "model.preprocessor.window_stride: 3200 samples are more than",
    "model.masking.mask_prob=1e-7": "model.masking.mask_prob: 1e-07 masks next to nothing",
    "model.masking.max_mask_ratio=0": "model.masking.max_mask_ratio: 0.0 is not greater than 0",
    "trainer.strategy={_target_:DDPStrategy,exchange_dtype:fp7}": "exchange_dtype=fp7: not 32 or bf16",
    "exp_manager.checkpoint_callback_params.filename='{val_loss:q}'": "filename: {val_loss:q}: Unknown format code",
    "model.train_ds.sample_rate=8000": "model.train_ds.sample_rate: 8000 Hz is not model.sample_rate, 16000 Hz",
    "model.validation_ds.sample_rate=8000": "model.validation_ds.sample_rate: 8000 Hz is not model.sample_rate",
    "model.preprocessor.sample_rate=8000": "model.preprocessor.sample_rate: 8000 Hz is not model.sample_rate",
    "model.masking.mask_prob=0": "model.masking.mask_prob: 0 masks next to nothing",
    "model.loss.mask_threshold=1": "model.loss.mask_threshold: no token has more than all",
    "model.encoder.subsampling_factor=64": "model.masking.block_size: a block of 16 frames masks no token",
    "model.masking.block_size=3": "model.masking.block_size: a block of 3 frames masks no token",
    "model.num_classes=1": "model.num_classes: with 1 code every prediction is right",
    "model.train_ds.manifest_filepath=s3://b/x.jsonl": "s3://b/x.jsonl: nest-ssl reads local files only",
    "model.train_ds.noise_manifest=https://b/x.jsonl": "https://b/x.jsonl: nest-ssl reads local files only",
    "hydra.run.dir=x": "hydra.run.dir=x: Hydra only composes.* Use exp_manager.explicit_log_dir",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_nonsense_is_refused_with_the_whole_key(overrides: str) -> None:
    with pytest.raises(ValueError) as raised:
        compose("nest_demo", overrides.split())
    assert REFUSED[overrides].split(".*")[0] in str(raised.value)


@pytest.mark.parametrize("text", ["1:2:3", "٣:0:0:0", "9999999999:0:0:0", "999999999:999999999:0:0"])
def test_a_duration_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="^trainer.max_time: "):
        duration_s("trainer.max_time", text)


def test_what_is_possible_but_rarely_meant_gets_one_line() -> None:
    assert CONFIG.unlikely() == []
    odd = ["model.optim.lr=0", "trainer.max_steps=3", "model.masking.block_size=5", "model.masking.mask_prob=0.4"]
    odd += ["model.optim.sched.warmup_steps=9", "+model.test_ds={manifest_filepath: x}"]
    odd += ["exp_manager.ema.enable=true", "exp_manager.ema.every_n_steps=1000"]
    odd += ["exp_manager.early_stopping_callback_params.patience=3"]
    keys = [line.split(":")[0] for line in compose("nest_demo", odd).unlikely()]
    whole_block = compose("nest_demo", ["model.masking.block_size=2000", "model.train_ds.max_duration=20"])
    assert whole_block.unlikely()[0].startswith("model.masking.block_size: 2000 frames are more than max_mask_ratio")
    ratio = compose("nest_demo", ["model.masking.max_mask_ratio=0.001", "model.train_ds.max_duration=20"])
    assert "max_mask_ratio, 0.001, of utterances" in ratio.unlikely()[0]
    assert keys == [
        *("model.optim.lr", "model.optim.sched.warmup_steps"),
        *("exp_manager.early_stopping_callback_params", "exp_manager.ema.every_n_steps"),
        *("model.test_ds", "model.masking.block_size"),
    ]


@pytest.mark.parametrize(
    ("override", "switch"),
    [
        ("bucket_duration_bins=[3,9]", "use_bucketing=true"),
        (
            "concat_sampling_probabilities=[0.5,0.5] is_concat=true",
            "is_concat=true and concat_sampling_technique=random",
        ),
        ("bucketing_weights=[1,2]", "bucketing_batch_size"),
        ("tarred_audio_filepaths=a.tar", "is_tarred=true"),
        ("quadratic_duration=30", "batch_duration"),
    ],
)
def test_a_key_of_the_data_without_its_switch_gets_one_line(override: str, switch: str) -> None:
    for section in ("train_ds", "validation_ds"):
        lines = compose("nest_demo", [f"model.{section}.{one}" for one in override.split()]).unlikely()
        assert lines == [f"model.{section}.{override.split('=')[0]}: has no effect without {switch}."]
