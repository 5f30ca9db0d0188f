"""A second set of trials with bad input, by somebody who had not read the fixes for the first.

    python benchmarks/hostile_trials_again.py [--only CLASS] [--jobs N] [--output FILE]

The eight classes, the fixture and the rules that judge an outcome are those of hostile_trials.py; no trial is repeated.
"""

from __future__ import annotations

import bz2
import io
import itertools
import json
import math
import os
import pickle
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import numpy as np
import soundfile
import torch
from benchmarks.hostile_trials import (
    ALL_STEPS,
    ANCHORS,
    BASE_STEPS,
    BEFORE,
    CONTROL,
    DIED,
    EIGHT,
    EVIL,
    FLOATS,
    GOOD,
    LAST,
    METRICS,
    NAMED_OR_TRAINED,
    PARAMETERS,
    PCM,
    RATE,
    RUN,
    SAVED,
    TAR,
    UNCOUNTED,
    WORKERS,
    Check,
    Either,
    Evil,
    Expected,
    Fixture,
    Kill,
    Outcome,
    Refused,
    Right,
    Setup,
    Trial,
    _is_seen,
    _left_running,
    _output,
    _quote,
    _set,
    _store,
    _tail,
    _weights,
    _with_pickle,
    always,
    both,
    changed,
    copied,
    cut,
    disturbed,
    encoded,
    ended_well,
    extracted,
    finite_features,
    fmt,
    in_fork,
    in_process,
    killed,
    line,
    link,
    losses,
    main,
    nemo,
    nemo_members,
    nothing,
    on_bytes,
    only_run,
    patched,
    prepared,
    pretrain,
    quoted,
    replaced,
    resume,
    resumed,
    riff,
    safetensors,
    said,
    same_features,
    saved,
    snapshot,
    special,
    start,
    takes_effect,
    trained,
    validated,
    weights_file,
    write_lines,
    yaml,
    zeros,
)

warnings.filterwarnings("ignore")  # of zipfile and torch, about what is made here

TRAINED = Right(trained)
VALIDATED = Right(validated)


def make_more() -> None:
    """Runs that the first set has not: with sharded and with averaged weights, half and whole."""
    sharded, averaged = ("trainer.devices=2", "trainer.strategy=fsdp"), ("+exp_manager.ema.enable=true",)
    for name, steps, overrides in (
        ("sharded", BASE_STEPS, sharded),
        ("sharded_whole", ALL_STEPS, sharded),
        ("averaged", BASE_STEPS, averaged),
        ("averaged_whole", ALL_STEPS, averaged),
    ):
        if not (Fixture.path / "runs" / name).exists():
            command = resume(*overrides, f"trainer.max_steps={steps}", f"exp_manager.name={name}")
            outcome = in_process(command, Fixture.path, {}, 120)
            if outcome.code != 0:
                raise RuntimeError(f"the run {name!r} cannot be made:\n{outcome.text}")


# -------------------------------------------------------------------------------------------------------- configuration

VALUES: dict[str, str] = {
    "trainer.sync_batchnorm": "maybe | 3",
    "trainer.benchmark": "perhaps",
    "trainer.enable_progress_bar": "7 | [false]",
    "trainer.enable_model_summary": "[1]",
    "trainer.inference_mode": "9",
    "trainer.detect_anomaly": "true | 5",
    "trainer.limit_test_batches": "-1 | nan",
    "trainer.val_check_interval": "'00:00:00:00' | {a: 1} | -0.5 | 3.0 | '1:2' | [1]",
    "trainer.max_time": "{days: 1, parsecs: 2} | [1,2] | '00:00:00:-5' | nan | {hours: 1e400} | ''",
    "trainer.limit_train_batches": "0.3 | 0.0 | -0.5 | true | '50%'",
    "trainer.limit_val_batches": "0 | true | -7",
    "trainer.log_every_n_steps": "nan | [1]",
    "trainer.reload_dataloaders_every_n_epochs": "-1",
    "trainer.min_epochs": "1.5 | -1",
    "trainer.max_epochs": "-1 | 1e400 | '3'",
    "trainer.accumulate_grad_batches": "-1 | [2] | true",
    "trainer.num_sanity_val_steps": "-1 | 1.5 | 1",
    "trainer.devices": "'' | '0,0' | {a: 1} | -7 | true",
    "trainer.precision": "'bf16-true' | 16-true | transformer-engine | [32] | 32.5",
    "trainer.gradient_clip_algorithm": "[norm] | 7",
    "model.optim.lr": "[0.1] | 1e-400 | true | '0x10' | 1e400",
    "model.optim.betas": "[0.9,1.0] | [a,b] | [0.9,null] | {a: 1} | [0.98,0.9] | [[0.9],[0.98]] | [inf,0.9]",
    "model.optim.weight_decay": "inf | true | [0.1] | -1e-9",
    "+model.optim.eps": "inf | abc | [1e-8] | -1e-300",
    "+model.optim.amsgrad": "maybe | true",
    "+model.optim.maximize": "maybe",
    "+model.optim.foreach": "7",
    "+model.optim.nesterov": "true",
    "model.optim.sched": "foo | 3 | []",
    "model.optim.sched.warmup_steps": "1e300 | null | [2] | true",
    "model.optim.sched.warmup_ratio": "nan | 0.5",
    "model.optim.sched.min_lr": "inf | [1]",
    "model.optim.sched.d_model": "nan | null | 1e30 | 0.5",
    "+model.optim.sched.max_steps": "-5 | 0 | 2 | 1.5",
    "+model.optim.sched.hold_steps": "3",
    "model.encoder.xscaling": "3 | maybe",
    "model.encoder.untie_biases": "x | false",
    "model.encoder.use_bias": "2 | false",
    "model.encoder.dropout_pre_encoder": "1.0 | -0.5 | nan",
    "model.encoder.dropout_emb": "1.1 | inf | 1.0",
    "model.encoder.causal_downsampling": "7 | true",
    "model.encoder.conv_context_size": "[4,5] | [-1,-1] | [4] | {a: 1} | [8,0]",
    "model.encoder.att_context_size": "[[-1,-1],[4,4]] | [[4,4],[4]] | [null,3] | [1e30,1]",
    "+model.encoder.att_context_probs": "[0.5] | [0.5,0.6] | [nan,1] | [-1,2]",
    "model.encoder.stochastic_depth_start_layer": "-1 | 0 | 99 | 1.5",
    "model.encoder.stochastic_depth_drop_prob": "nan | 0.999999",
    "+model.encoder.reduction": "pooling | 3",
    "+model.encoder.reduction_factor": "0 | 2",
    "model.encoder.n_layers": "'2' | true | [2] | null | 2.0",
    "model.encoder.d_model": "'32' | null | 1 | nan",
    "model.encoder.n_heads": "3 | 32 | true | null",
    "model.encoder.subsampling": "[dw_striding] | striding",
    "model.encoder.subsampling_factor": "2 | 16 | 32 | null | 0.5 | '8'",
    "model.encoder.ff_expansion_factor": "0.5 | null | nan",
    "model.encoder.conv_kernel_size": "1 | 9.5 | null",
    "model.decoder.use_bias": "9",
    "model.decoder.init_mode": "foo | null",
    "model.quantizer.feat_in": "79 | 0",
    "model.quantizer.freeze": "false | maybe",
    "+model.quantizer.time_ahead": "true | 3",
    "model.squeeze_single": "true | 5",
    "model.code_dim": "0 | -3 | 1 | 1e9 | null",
    "model.loss.num_decoders": "0 | 2",
    "+model.masking.max_mask_ratio": "0 | -1 | nan | 2 | 1e-9",
    "+model.masking.mask_value": "nan | inf | 0",
    "model.preprocessor.log": "maybe | false",
    "+model.preprocessor.exact_pad": "true",
    "+model.preprocessor.nb_augmentation_prob": "0.5 | nan",
    "+model.preprocessor.log_zero_guard_type": "foo | clamp",
    "+model.preprocessor.mel_norm": "foo | null",
    "+model.preprocessor.n_window_stride": "0 | 160 | -1",
    "+model.preprocessor.n_window_size": "400 | 0 | 1000000",
    "+model.preprocessor.use_torchaudio": "true",
    "model.preprocessor.n_fft": "256 | null | 512.5",
    "model.preprocessor.pad_to": "7 | 1.5 | null",
    "model.preprocessor.window": "kaiser | [hann] | hamming",
    "model.preprocessor.dither": "x | inf",
    "+model.preprocessor.mag_power": "inf | 1000",
    "model.train_ds.drop_last": "maybe | null",
    "model.train_ds.trim_silence": "true | 3",
    "model.train_ds.shuffle_n": "-1 | nan",
    "model.train_ds.bucketing_strategy": "foo | null",
    "+model.train_ds.int_values": "true | 7",
    "+model.train_ds.tarred_shard_strategy": "foo",
    "+model.train_ds.max_utts": "-3 | 1 | 1.5 | 3",
    "+model.train_ds.persistent_workers": "true | 9",
    "+model.train_ds.quadratic_duration": "-1 | nan | 3",
    "model.train_ds.noise_manifest": "'' | [] | {} | 3 | nowhere.jsonl",
    "model.train_ds.batch_augmentor": "[] | 3 | {} | foo",
    "model.train_ds.batch_augmentor.noise_ratio": "-1 | nan | 1.5",
    "model.train_ds.batch_augmentor.min_r_noise": "99 | nan | -inf | -1000",
    "model.train_ds.batch_augmentor.max_r_speech": "nan | -99",
    "model.train_ds.batch_augmentor.min_mix_rate": "-0.5 | 2 | nan",
    "model.train_ds.batch_augmentor.max_num_segments": "-1 | 0 | 1.5",
    "+model.train_ds.batch_augmentor.keep_unselected_noise": "maybe",
    "+model.train_ds.source_options": "{a: 1} | 3",
    "model.validation_ds": "null | 3 | []",
    "model.validation_ds.shuffle": "true | 7",
    "model.validation_ds.max_duration": "0.5 | nan | -1",
    "+model.test_ds.manifest_filepath": "nowhere.jsonl | train.jsonl",
    "+model.compile": "maybe | [off] | off",
    "+model.activation_budget": "-1 | 1.5 | nan",
    "exp_manager.resume_if_exists": "maybe | 7",
    "exp_manager.create_checkpoint_callback": "perhaps | false",
    "exp_manager.checkpoint_callback_params": "[] | 3 | null",
    "exp_manager.checkpoint_callback_params.save_top_k": "1e9 | nan | true",
    "+exp_manager.checkpoint_callback_params.save_weights_only": "maybe | true",
    "+exp_manager.checkpoint_callback_params.save_last": "false | 7",
    "+exp_manager.checkpoint_callback_params.every_n_epochs": "0 | -1 | 1.5",
    "+exp_manager.checkpoint_callback_params.always_save_nemo": "maybe",
    "+exp_manager.log_step_timing": "5",
    "+exp_manager.max_time_per_run": "{hours: nan} | -5 | [1]",
    "+exp_manager.ema.decay": "1.0 | inf | abc",
    "+exp_manager.ema.every_n_steps": "0 | -1 | 1.5",
    "+exp_manager.ema": "3 | [] | {foo: 1}",
    "+exp_manager.early_stopping_callback_params.min_delta": "nan | -inf | x",
    "+exp_manager.early_stopping_callback_params.patience": "1.5 | nan | [3]",
    "+exp_manager.early_stopping_callback_params.mode": "up",
    "+exp_manager.create_preemption_callback": "7",
    "+exp_manager.files_to_copy": "3 | [audio] | ['../../x']",
    "+exp_manager.use_datetime_version": "maybe",
    "+watchdog.init_s": "0 | -1 | nan | inf",
    "+watchdog.floor_s": "inf | 1e300 | abc",
    "+watchdog.enabled": "maybe | true | false",
    "+watchdog": "off | 3 | []",
    "+launch": "3 | {foo: 1}",
    "+launch.max_restarts": "1e9 | nan",
    "+debug.trace": "maybe",
    "+debug.check_every_n_steps": "-1 | 1.5 | nan",
    "+debug.collectives": "7",
    "+seed": "[1] | 4294967296 | nan | '7'",
}
"""Every value (they are separated by bars) is one trial: the run is right, or the key is named."""

ALSO_NAMED: dict[str, str] = {
    "model.squeeze_single": "decoder|loss|quantizer",
    "model.encoder.subsampling_factor": "block_size|mask",
    "model.quantizer.feat_in": "features|combine_time_steps",
    "model.train_ds.batch_augmentor.min_r_noise": "max_r_noise",
    "model.train_ds.batch_augmentor.max_r_speech": "min_r_speech",
    "model.train_ds.batch_augmentor.min_mix_rate": "max_mix_rate",
    "model.train_ds.batch_augmentor.max_num_segments": "min_num_segments",
    "+model.train_ds.max_utts": "batch_size|drop_last",
    "model.validation_ds.max_duration": "min_duration|valid.jsonl",
    "model.optim.sched": "optim",
    "+model.encoder.att_context_probs": "att_context_size",
    "+model.preprocessor.n_window_stride": "window_stride",
    "+model.preprocessor.n_window_size": "window_size",
    "model.loss.num_decoders": "num_books|num_decoders",
    "+model.masking.max_mask_ratio": "mask",
    "+exp_manager.ema.every_n_steps": "ema",
}
"""Where a good message names another key, with which the value does not go."""

REFUSALS: dict[str, str] = {
    # negative clipping, in other words
    "trainer.gradient_clip_val=-0.0001": "gradient_clip_val",
    "trainer.gradient_clip_val=-1e-300": "gradient_clip_val",
    "trainer.gradient_clip_val=-inf": "gradient_clip_val",
    "trainer.gradient_clip_val=1e400": "gradient_clip_val",
    "trainer.gradient_clip_val='-1'": "gradient_clip_val",
    "trainer.gradient_clip_val=abc": "gradient_clip_val",
    "trainer.gradient_clip_val=-0.1 & trainer.gradient_clip_algorithm=value": "gradient_clip_val",
    "trainer.gradient_clip_val=nan & trainer.gradient_clip_algorithm=value": "gradient_clip_val",
    "trainer.gradient_clip_val=${model.encoder.feat_out}": "gradient_clip_val",
    # sample rates that contradict each other
    "model.preprocessor.sample_rate=22050": "sample_rate",
    "model.preprocessor.sample_rate=16001": "sample_rate",
    "model.validation_ds.sample_rate=44100": "sample_rate",
    "model.train_ds.sample_rate=15999": "sample_rate",
    "model.sample_rate=8000 & model.preprocessor.sample_rate=16000": "sample_rate",
    "model.sample_rate=8000 & model.train_ds.sample_rate=16000": "sample_rate",
    "model.sample_rate=8000 & model.validation_ds.sample_rate=16000": "sample_rate",
    "model.sample_rate=48000 & model.train_ds.sample_rate=16000 & model.validation_ds.sample_rate=16000": "sample_rate",
    # what can never mask a token
    "model.masking.block_size=5 & model.masking.allow_overlap=false": "block_size|mask",
    "model.masking.block_size=7 & model.loss.mask_threshold=0.95 & model.masking.allow_overlap=false": "mask",
    "model.encoder.subsampling_factor=64": "subsampling_factor|block_size|mask",
    "model.loss.mask_threshold=1.5": "mask_threshold",
    "model.masking.mask_prob=-0.0": "mask_prob|masked",
    "+model.masking.max_mask_ratio=0 & model.masking.allow_overlap=false": "mask",
    # combinations
    "trainer.strategy={_target_: os.system}": "strategy|os.system",
    "trainer.strategy={_target_: lightning.pytorch.strategies.DDPStrategy, exchange_dtype: fp7}": "exchange_dtype|fp7",
    "trainer.strategy={_target_: lightning.pytorch.strategies.DDPStrategy, foo: 1}": "foo",
    "trainer.strategy={_target_: lightning.pytorch.strategies.FSDPStrategy, cpu_offload: true}": "cpu_offload",
    "trainer.strategy=[ddp]": "strategy",
    "trainer.barebones=true": "barebones",
    "trainer.strategy=fsdp & model.mask_position=post_conv & trainer.devices=2": "post_conv|mask_position",
    "trainer.strategy=fsdp & model.encoder.untie_biases=false & trainer.devices=2": "untie_biases",
    "model.optim.sched.warmup_steps=2 & model.optim.sched.warmup_ratio=0.1": "warmup",
    "model.optim.name=sgd & model.optim.betas=[0.9,0.98]": "betas|sgd",
    "model.optim.name=AdamW": "optim|adamw",
    "+model.optim.params=[1]": "params",
    "+model.preprocessor.lowfreq=4000 & +model.preprocessor.highfreq=100": "lowfreq|highfreq",
    "+model.train_ds.use_bucketing=true & +model.train_ds.bucket_duration_bins=[nan]": "bucket_duration_bins",
    "+model.train_ds.use_bucketing=true & +model.train_ds.bucket_duration_bins=[2,2]": "bucket_duration_bins",
    "+model.train_ds.use_bucketing=true & +model.train_ds.bucket_duration_bins=[-1,2]": "bucket_duration_bins",
    "+model.train_ds.use_bucketing=true & +model.train_ds.bucket_duration_bins=[2,inf]": "bucket_duration_bins",
    "+model.train_ds.use_bucketing=true & +model.train_ds.bucket_duration_bins=[2,4] & "
    "+model.train_ds.bucket_batch_size=[1,2,3,4]": "bucket_batch_size",
    "+model.train_ds.use_bucketing=true & +model.train_ds.bucket_duration_bins=[2] & "
    "+model.train_ds.bucket_batch_size=[0,1]": "bucket_batch_size",
    "+model.train_ds.use_bucketing=true & model.train_ds.batch_size=null & "
    "+model.train_ds.batch_duration=0.001": "batch_",
    "+model.train_ds.use_bucketing=true & model.train_ds.batch_size=null & "
    "+model.train_ds.batch_duration=nan": "batch_",
    "+model.train_ds.use_bucketing=true & model.train_ds.batch_size=null": "batch_",
    "+model.train_ds.use_lhotse=true & +model.train_ds.input_cfg=[{type: foo}]": "foo|type|input_cfg",
    "+model.train_ds.use_lhotse=true & +model.train_ds.input_cfg=[{type: nemo}]": "manifest_filepath|input_cfg",
    "+model.train_ds.use_lhotse=true & +model.train_ds.input_cfg=3": "input_cfg",
    "+model.train_ds.use_lhotse=true & +model.train_ds.input_cfg=[{type: nemo, manifest_filepath: train.jsonl, "
    "weight: nan}]": "weight|input_cfg",
    "+model.train_ds.use_lhotse=true & +model.train_ds.shar_path=nowhere": "nowhere|shar_path",
    "+model.train_ds.input_cfg=nowhere.yaml": "use_lhotse|input_cfg",
    "model.train_ds.is_concat=true & model.train_ds.manifest_filepath=[train.jsonl,valid.jsonl] & "
    "model.train_ds.concat_sampling_technique=random & +model.train_ds.concat_sampling_probabilities=[nan,1]": "probab",
    "model.train_ds.is_concat=true & model.train_ds.manifest_filepath=[train.jsonl,valid.jsonl] & "
    "model.train_ds.concat_sampling_technique=random & +model.train_ds.concat_sampling_probabilities=[0.5]": "probab",
    "model.train_ds.batch_augmentor._target_=__import__": "_target_|__import__",
    "model.preprocessor._target_=subprocess.run": "subprocess",
    "model.optim.sched._target_=os.system": "_target_|os.system",
    "exp_manager._target_=os.system": "_target_|os.system",
    "+init_from_nemo_model={base: {path: 3}}": "init_from_nemo_model|path",
    "+init_from_nemo_model={base: {include: [encoder]}}": "init_from_nemo_model|path",
    "+init_from_pretrained_model=3": "init_from_pretrained_model",
    # overrides that are not what they seem
    "model.optim.lr=0.1,0.2": "lr",
    "--multirun": "multirun",
    "hydra.run.dir=elsewhere": "hydra",
    "hydra/launcher=joblib": "hydra",
    "model/encoder=x": "model/encoder",
    "+unknown=1": "unknown",
    "+trainer.unknown={a: 1}": "unknown",
    "~trainer.nowhere": "nowhere",
    "+model.encoder=[]": "encoder",
    "model.encoder.d_model=${oc.decode:'[1'}": "d_model",
    "model.encoder.d_model=${model}": "d_model",
    "model.encoder.d_model=???": "d_model",
    "exp_manager.name=???": "name",
    "trainer.max_steps=${.max_steps}": "max_steps",
    "@a=b": "@a",
    "model.encoder.d_model:=3": "d_model",
}
"""Overrides, separated by "&", that must be refused, and a word of the message."""

FINE: list[str] = [
    "++model.encoder.d_model=32",
    "trainer.max_steps=2 & trainer.max_steps=3",
    "model.optim.lr=${model.optim.weight_decay}",
    "model.optim.sched=null & model.optim.lr=0.001",
    "model.train_ds.drop_last=false & model.train_ds.batch_size=3",
    "+model.train_ds.use_bucketing=true & +model.train_ds.num_buckets=2",
    "model.train_ds.noise_manifest=train.jsonl & model.train_ds.batch_augmentor.noise_ratio=1",
    "~model.train_ds.batch_augmentor",
    "exp_manager.create_checkpoint_callback=true & trainer.limit_val_batches=0",
    "trainer.gradient_clip_val=0",
    "trainer.gradient_clip_val=-0.0",
    "trainer.strategy={_target_: DDPStrategy, exchange_dtype: bf16}",
]
"""Unusual, but right."""

NOTHING_MASKED: dict[str, tuple[str, ...]] = {
    "blocks of 6 frames, tokens of 8": ("model.masking.block_size=6",),
    "a threshold that aligned blocks alone reach": ("model.masking.block_size=8", "model.loss.mask_threshold=0.9999"),
    "a probability of 1e-7": ("model.masking.mask_prob=1e-7", "trainer.max_steps=60"),
    "a probability of 1e-300": ("model.masking.mask_prob=1e-300", "trainer.max_steps=60"),
    "a stride of 200 ms": ("model.preprocessor.window_stride=0.2",),
    "utterances shorter than a block": ("model.masking.block_size=400", "trainer.max_steps=8"),
    "a ratio of 1e-9": ("+model.masking.max_mask_ratio=1e-9",),
    "a stride of 50 ms": ("model.preprocessor.window_stride=0.05",),
}


def _short_lines(name: str) -> Setup:
    """Segments of 0.3 s, shorter than a masked block."""
    return lambda folder: write_lines(
        folder / name,
        [{"audio_filepath": f"audio/{i}.wav", "offset": 0.1 * i, "duration": 0.3} for i in range(8)],
    )


SHORTEST = ("min_duration", "min_audio_len_secs")

OPTIONS: list[tuple[str, str, str]] = [
    ("demo --num-train 0 --num-val 1 --num-noise 1 --duration 1", "any", "num-train|num_train"),
    ("demo --num-train -1", "no", "num-train|num_train"),
    ("demo --num-val -3", "no", "num-val|num_val"),
    ("demo --num-noise -3", "no", "num-noise|num_noise"),
    ("demo --duration 0 --num-train 2", "no", "duration"),
    ("demo --duration -1", "no", "duration"),
    ("demo --duration nan", "no", "duration"),
    ("demo --duration inf", "no", "duration"),
    ("demo --duration 1e9 --num-train 1 --num-val 1 --num-noise 1", "no", "duration"),
    ("demo --sample-rate 0", "no", "sample-rate|sample_rate"),
    ("demo --sample-rate -16000", "no", "sample-rate|sample_rate"),
    ("demo --sample-rate 1 --num-train 1 --num-val 1 --num-noise 1", "no", "sample-rate|sample_rate"),
    ("demo --sample-rate 2147483648 --num-train 1 --num-val 1 --num-noise 1", "no", "sample-rate|sample_rate"),
    ("demo --seed -1 --num-train 1 --num-val 1 --num-noise 1 --duration 1", "any", "seed"),
    ("demo --seed 99999999999999999999999 --num-train 1 --num-val 1 --num-noise 1 --duration 1", "any", "seed"),
    ("demo --synthesizer espeak", "no", "synthesizer"),
    ("demo --data-dir audio --overwrite --num-train 1", "no", "audio"),
    ("demo --data-dir train.jsonl --overwrite", "no", "train.jsonl"),
    ("demo --data-dir . --overwrite", "no", "not|demo"),
    ("demo --data-dir /proc/x", "no", "/proc/x"),
    ("prepare audio --output m.jsonl --valid-share nan --split hash", "no", "valid-share|valid_share"),
    ("prepare audio --output m.jsonl --valid-share -1 --split hash", "no", "valid-share|valid_share"),
    ("prepare audio --output m.jsonl --valid-share 2 --split hash", "no", "valid-share|valid_share"),
    ("prepare audio --output m.jsonl --split folder --folder-level 0 --workers 0", "any", "folder-level"),
    ("prepare audio --output m.jsonl --split folder --folder-level 99 --workers 0", "partial", "folder-level|folder"),
    ("prepare audio --output m.jsonl --split folder --folder-level -99 --workers 0", "partial", "folder-level|folder"),
    ("prepare audio --output m.jsonl --shards 0", "no", "shards"),
    ("prepare audio --output m.jsonl --shards 100 --workers 0", "partial", "shards"),
    ("prepare audio --output m.jsonl --shards 2 --shards-folder train.jsonl --workers 0", "partial", "train.jsonl"),
    ("prepare audio --output m.jsonl --job 5/3", "no", "job"),
    ("prepare audio --output m.jsonl --job -1/3", "no", "job"),
    ("prepare audio --output m.jsonl --job 0/0", "no", "job"),
    ("prepare audio --output m.jsonl --job 1", "no", "job"),
    ("prepare audio --output m.jsonl --job 1/2/3", "no", "job"),
    ("prepare audio --output m.jsonl --merge 3", "no", "job|merge"),
    ("prepare audio --output m.jsonl --merge 2 --job 0/2", "no", "job|merge"),
    ("prepare audio --output m.jsonl --workers -1", "no", "workers"),
    ("prepare audio --output m.jsonl --check perhaps", "no", "check"),
    ("prepare audio --output ''", "no", "output|name|folder|directory"),
    ("prepare train.jsonl --output train.jsonl --workers 0", "no", "train.jsonl"),
    ("prepare train.jsonl --output ./audio/../train.jsonl --workers 0", "no", "train.jsonl"),
    ("prepare audio/0.wav --output audio/0.wav --workers 0", "no", "0.wav"),
    ("prepare '' --output m.jsonl", "any", ""),
    ("prepare nowhere --output m.jsonl", "no", "nowhere"),
    ("prepare / --output m.jsonl --job 5/3", "no", "job"),
    ("inspect train.jsonl --batch-size 0", "no", "batch-size"),
    ("inspect train.jsonl --examples -1", "no", "examples"),
    ("inspect train.jsonl --files 0", "no", "files"),
    ("inspect train.jsonl --seed -1", "no", "seed"),
    ("inspect train.jsonl --seed 99999999999999999999999 --examples 1", "any", "seed"),
    ("inspect train.jsonl --output train.jsonl", "no", "train.jsonl"),
    ("inspect train.jsonl --output audio", "no", "audio"),
    ("inspect train.jsonl --noise nowhere.jsonl", "no", "nowhere.jsonl"),
    ("inspect train.jsonl model.train_ds.max_duration=0.1", "any", "max_duration|train.jsonl"),
    ("inspect train.jsonl model.train_ds.batch_size=nan", "no", "batch_size"),
    ("inspect train.jsonl model.nowhere=1", "no", "nowhere"),
    ("inspect train.jsonl --config-name nowhere", "no", "nowhere"),
    ("inspect train.jsonl --batch-size 1000000000 --examples 1", "any", "batch"),
    ("fit model.encoder.d_modell=3", "no", "d_modell|GPU"),
    ("fit --memory-share nan", "no", "memory-share|memory_share|GPU"),
    ("fit --most -1", "no", "most|GPU"),
    ("report train.jsonl", "no", "train.jsonl"),
    ("report audio", "no", "audio"),
    ("report ''", "no", "run folder|metrics.csv"),
    ("doctor train.jsonl", "no", "train.jsonl"),
    ("doctor audio", "no", "audio"),
    ("doctor nowhere --follow", "no", "nowhere"),
    ("doctor --config-name nowhere", "no", "nowhere"),
    ("info nest_fast-conformer size=nope", "no", "nope"),
    ("info nest_fast-conformer model.encoder.n_layers=-1", "no", "n_layers"),
    ("info nest_fast-conformer model.encoder.n_layers=99999999999", "no", "n_layers|large|memory"),
    ("info {M} {M} {M}", "no", ""),
    ("info {M} {M}", "yes", ""),
    ("info train.jsonl", "no", "train.jsonl"),
    ("info audio", "no", "audio"),
    ("info /dev/zero", "no", "/dev/zero"),
    ("info {M} model.encoder.d_model=3", "no", ""),
    ("verify train.jsonl", "no", "train.jsonl"),
    ("verify {M} --recorded train.jsonl", "no", "train.jsonl"),
    ("verify {M} --recorded nowhere.npz", "no", "nowhere.npz"),
    ("verify {M} --nemo-python nowhere", "no", "nowhere"),
    ("verify {M} --nemo-python /bin/false", "no", "/bin/false|NeMo"),
    ("verify copy.nemo --report copy.nemo", "no", "copy.nemo"),
    ("verify {M} --report audio", "no", "audio"),
    ("extract {M} audio/0.wav out --batch-seconds 0", "no", "batch-seconds|batch_seconds"),
    ("extract {M} audio/0.wav out --batch-seconds -1", "no", "batch-seconds|batch_seconds"),
    ("extract {M} audio/0.wav out --batch-seconds nan", "no", "batch-seconds|batch_seconds"),
    ("extract {M} audio/0.wav out --batch-seconds 1e-9 --device cpu", "any", "batch-seconds|batch_seconds"),
    ("extract {M} audio/0.wav out --max-duration nan", "no", "max-duration|max_duration"),
    ("extract {M} audio/0.wav out --max-duration 0", "partial", "max-duration|max_duration|limit|bad.jsonl"),
    ("extract {M} audio/0.wav out --max-duration -1", "no", "max-duration|max_duration"),
    ("extract {M} audio/0.wav out --format shards --shard-mb 0 --device cpu", "any", "shard-mb|shard_mb"),
    ("extract {M} audio/0.wav out --format shards --shard-mb nan", "no", "shard-mb|shard_mb"),
    ("extract {M} audio/0.wav out --format shards --shard-mb -1", "no", "shard-mb|shard_mb"),
    ("extract {M} audio/0.wav out --layers 0,0 --device cpu", "any", "layers"),
    ("extract {M} audio/0.wav out --layers ''", "no", "layers"),
    ("extract {M} audio/0.wav out --layers -1", "any", "layers"),
    ("extract {M} audio/0.wav out --layers 0-1", "no", "layers"),
    ("extract {M} audio/0.wav out --layers all,0", "no", "layers"),
    ("extract {M} audio/0.wav out --layers 1e0", "no", "layers"),
    ("extract {M} audio/0.wav out --weights 0.5,0.5 --device cpu", "any", "weights|aggregation"),
    ("extract {M} audio/0.wav out --aggregation weighted", "no", "weights"),
    ("extract {M} audio/0.wav out --aggregation weighted --weights 1", "no", "weights"),
    ("extract {M} audio/0.wav out --aggregation weighted --weights inf,1", "no", "weights"),
    ("extract {M} audio/0.wav out --aggregation weighted --weights 1e39,1", "no", "weights|finite"),
    ("extract {M} audio/0.wav out --aggregation weighted --weights train.jsonl", "no", "train.jsonl|weights"),
    ("extract {M} audio/0.wav out --aggregation weighted --weights odd.json", "no", "odd.json|weights"),
    ("extract {M} audio/0.wav out --dtype int8", "no", "dtype"),
    ("extract {M} audio/0.wav out --device cuda:99", "no", "cuda"),
    ("extract {M} audio/0.wav out --workers 0", "no", "workers"),
    ("extract {M} nowhere.wav out", "no", "nowhere.wav"),
    ("extract {M} audio/0.wav audio/0.wav", "no", "audio/0.wav"),
    ("extract {M} audio/0.wav ''", "any", ""),
    ("export {M} out --format tflite", "no", "format"),
    ("export {M} train.jsonl --format huggingface", "no", "train.jsonl"),
    ("export {M} audio --format nemo", "no", "audio"),
    ("export {M} audio --format huggingface", "any", "audio"),
    ("export {M} '' --format nemo", "no", ""),
    ("export copy.nemo copy.nemo --format safetensors", "no", "copy.nemo"),
    ("export {M} /dev/full --format nemo", "no", "/dev/full"),
    ("probe {M} --train train.jsonl --test valid.jsonl --output p", "no", "label|task"),
    ("probe {M} --train train.jsonl --test valid.jsonl --output p --label speaker", "no", "speaker"),
    ("probe {M} --train train.jsonl --test valid.jsonl --output p --label x --task y", "no", "task|label"),
    ("probe {M} --train train.jsonl --test valid.jsonl --output p --task nowhere", "no", "nowhere"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label label --snr 0", "no", "noise"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label label --noise l.jsonl", "any", "snr"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label label --snr nan --noise l.jsonl", "no", "snr"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label label --snr inf --noise l.jsonl", "no", "snr"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label label --snr -1e30 --noise l.jsonl", "no", "snr"),
    (
        "probe {M} --train l.jsonl --test l.jsonl --output p --label label --labels-per-class 0",
        "no",
        "labels-per-class",
    ),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label label --labels-per-class 999", "any", "labels"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label label --head attentive --epochs 0", "no", "epochs"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label label --head attentive --lr nan", "no", "lr"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label label --head attentive --lr -1", "no", "lr"),
    (
        "probe {M} --train l.jsonl --test l.jsonl --output p --label label --head attentive --lr 1e30",
        "any",
        "lr|finite",
    ),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label label --finetune --encoder-lr inf", "no", "encoder"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label label --layers 7", "no", "layers"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label label --device tpu", "no", "tpu|device"),
    ("probe {M} --train l.jsonl --test l.jsonl --output l.jsonl --label label", "no", "l.jsonl"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label duration", "any", "label|duration"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label same", "any", "same|class"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label every", "any", "every|class"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label list", "any", "list|label"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label nan", "any", "nan|label"),
    ("--version --help pretrain", "any", ""),
    ("pretrain", "no", "manifest_filepath"),
    ("pretrain --config-name nest_demo", "no", "demo"),
    ("pretrain --config-name ''", "no", ""),
    ("pretrain --config-path audio --config-name 0.wav", "no", "0.wav"),
    ("pretrain --config-path /dev/null --config-name x", "no", "/dev/null|x"),
]
"""Commands with odd options; {M} is a good model. "no": refused with this word. "any": that, or right."""


def _labels(folder: Path) -> None:
    """A manifest with labels of many kinds, a copy of the model, and weights that are none."""
    rows = [json.loads(text) for text in (folder / "train.jsonl").read_text().splitlines()]
    extra = [{"label": str(i % 2), "same": "x", "every": i, "list": [i % 2], "nan": math.nan} for i in range(8)]
    write_lines(folder / "l.jsonl", [row | more for row, more in zip(rows, extra, strict=True)])
    shutil.copy(Fixture.path / "model.nemo", folder / "copy.nemo")
    (folder / "odd.json").write_text('{"layer_weights": [NaN, {"a": 1}]}')


MORE_YAMLS: dict[str, bytes] = {
    "a merge key": b"defaults: [nest_fast-conformer, _self_]\na: &a {seed: 1}\nb:\n  <<: *a\n",
    "two documents": b"defaults: [nest_fast-conformer, _self_]\n---\nseed: 1\n",
    "a set": b"defaults: [nest_fast-conformer, _self_]\nseed: !!set {1, 2}\n",
    "a date": b"defaults: [nest_fast-conformer, _self_]\nseed: 2026-01-01\n",
    "bytes": b"defaults: [nest_fast-conformer, _self_]\nseed: !!binary aGVsbG8=\n",
    "a Python name": b"defaults: [nest_fast-conformer, _self_]\nseed: !!python/name:os.system\n",
    "a number as key": b"defaults: [nest_fast-conformer, _self_]\n7: 8\nmodel: {9: 1}\n",
    "null as key": b"defaults: [nest_fast-conformer, _self_]\nmodel: {null: 1}\n",
    "a NUL": b"defaults: [nest_fast-conformer, _self_]\nseed: \0\n",
    "a byte order mark": b"\xef\xbb\xbfdefaults: [nest_fast-conformer, _self_]\nseed: 1\n",
    "CR alone": b"defaults: [nest_fast-conformer, _self_]\rseed: 1\r",
    "a key of 100,000 letters": b"defaults: [nest_fast-conformer, _self_]\n" + b"x" * 100_000 + b": 1\n",
    "an absolute default": b"defaults: [/etc/passwd, _self_]\n",
    "a default that leaves the folder": b"defaults: [../../../etc/passwd, _self_]\n",
    "a hundred thousand keys": b"".join(b"k%d: 1\n" % i for i in range(100_000)),
    "an interpolation in a circle": b"defaults: [nest_fast-conformer, _self_]\nname: ${model.x}\nmodel: {x: ${name}}\n",
    "the environment": b"defaults: [nest_fast-conformer, _self_]\nname: ${oc.env:HOME}/../../x\n",
}


def configurations() -> Iterator[Trial]:
    group = "configuration"
    for key, values in VALUES.items():
        for value in values.split(" | "):
            words = "|".join(
                filter(None, (key.rpartition(".")[2].lstrip("+"), ALSO_NAMED.get(key), value[3:] and value))
            )
            expected: Expected = Either(Refused((words,)), TRAINED)
            yield Trial(group, f"{key.lstrip('+')}={value}", pretrain(f"{key}={value}"), expected)
    for overrides, word in REFUSALS.items():
        yield Trial(group, f"refuse {overrides}", pretrain(*overrides.split(" & ")), Refused((word,)))
    for overrides in FINE:
        yield Trial(group, f"allow {overrides}", pretrain(*overrides.split(" & ")), TRAINED)
    masked = Either(Refused(("mask|short|block_size|window_stride",), partial=True), VALIDATED)
    for name, changes in NOTHING_MASKED.items():
        yield Trial(group, f"masks nothing: {name}", pretrain(*changes), masked)
    short = [f"+model.{name}.{key}=0.1" for name in ("train_ds", "validation_ds") for key in SHORTEST]
    for name in ("train.jsonl", "valid.jsonl"):
        command = pretrain(*short, "trainer.max_steps=8")
        yield Trial(group, f"masks nothing: segments of 0.3 s in {name}", command, masked, _short_lines(name))
    other_rate = ("model.sample_rate=8000", "+init_from_nemo_model={folder}/copy.nemo")
    expected = Either(Refused(("sample_rate",)), Right(said("sample_rate")))
    yield Trial(group, "weights of another sample rate", pretrain(*other_rate), expected, _labels)
    for name, value in {
        "include nothing": "{a: {path: copy.nemo, include: [nowhere]}}",
        "exclude everything": "{a: {path: copy.nemo, exclude: ['']}}",
        "include a number": "{a: {path: copy.nemo, include: 3}}",
        "an unknown key": "{a: {path: copy.nemo, includ: [encoder]}}",
        "the same file twice": "{a: {path: copy.nemo, include: [encoder]}, b: {path: copy.nemo, include: [decoder]}}",
    }.items():
        expected = Either(Refused(("init_from_nemo_model|includ|copy.nemo",)), Right(said(" loaded")))
        yield Trial(group, f"start from: {name}", pretrain(f"+init_from_nemo_model={value}"), expected, _labels)
    for text, kind, word in OPTIONS:
        command = shlex.split(text.replace("{M}", f"{Fixture.path}/model.nemo"))
        refused = Refused((word,), partial=kind == "partial")
        right = Right(finite_features)
        expected = right if kind == "yes" else Either(refused, right) if kind == "any" else refused
        yield Trial(group, f"command {text}", command, expected, _labels)
    for name, content in MORE_YAMLS.items():

        def write(folder: Path, content: bytes = content) -> None:
            (folder / "my.yaml").write_bytes(content)

        command = pretrain("--config-path", "{folder}", "--config-name", "my")
        words = "my|passwd|seed|model|name|key"
        yield Trial(group, f"another yaml: {name}", command, Either(Refused((words,)), TRAINED), write)


# ------------------------------------------------------------------------------------------------------------ manifests


def clean(folder: Path, outcome: Outcome) -> str | None:
    """Training is right, and no file was bad."""
    bad = list(only_run(folder).glob("bad_files_train*"))
    return f"a good file is bad: {bad[0].read_text()[:200]}" if bad else trained(folder, outcome)


def raw(text: str) -> bytes:
    """The good lines, and one more as it stands."""
    return GOOD + text.encode() + b"\n"


def with_duration(text: str) -> bytes:
    return raw('{"audio_filepath": "audio/0.wav", "duration": ' + text + "}")


def with_offset(text: str) -> bytes:
    return raw('{"audio_filepath": "audio/0.wav", "duration": 1.2, "offset": ' + text + "}")


def at(path: str, **changes: Any) -> bytes:
    return GOOD + line(audio_filepath=path, **changes)


LINES: dict[str, tuple[bytes, str]] = {
    "a byte order mark in the second line": (GOOD.replace(b"\n", b"\n\xef\xbb\xbf", 1), "any"),
    "two byte order marks": (b"\xef\xbb\xbf" * 2 + GOOD, "any"),
    "a byte order mark and CRLF": (b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n"), "clean"),
    "UTF-32": (GOOD.decode().encode("utf-32"), "any"),
    "UTF-16 without a mark": (GOOD.decode().encode("utf-16-le"), "any"),
    "Latin-1 in a text": (GOOD + b'{"audio_filepath": "audio/0.wav", "duration": 1.6, "text": "caf\xe9"}\n', "any"),
    "both kinds of line ends": (GOOD.replace(b"\n", b"\r\n", 3), "clean"),
    "CR alone": (GOOD.replace(b"\n", b"\r"), "any"),
    "a form feed between lines": (GOOD.replace(b"\n", b"\n\x0c\n", 1), "any"),
    "NULs at the end": (GOOD + bytes(4096), "any"),
    "NULs in a line": (GOOD + line().replace(b":", b":\0\0", 1), "any"),
    "an empty object": (raw("{}"), "any"),
    "an empty list": (raw("[]"), "any"),
    "null": (raw("null"), "any"),
    "true": (raw("true"), "any"),
    "a list of objects in a line": (raw('[{"audio_filepath": "audio/0.wav", "duration": 1.6}]'), "any"),
    "a path that is an object": (GOOD + line(audio_filepath={"path": "audio/0.wav"}), "any"),
    "a path that is true": (GOOD + line(audio_filepath=True), "any"),
    "a path that is a float": (GOOD + line(audio_filepath=0.5), "any"),
    "a duration that is a list": (with_duration("[1.6]"), "any"),
    "a duration that is an object": (with_duration('{"s": 1.6}'), "any"),
    "a duration of -0.0": (with_duration("-0.0"), "any"),
    "a duration of 1e-320": (with_duration("1e-320"), "any"),
    "a duration of -Infinity": (with_duration("-Infinity"), "any"),
    "a duration of nan": (with_duration("nan"), "any"),
    "a duration of +1.6": (with_duration("+1.6"), "any"),
    "a duration of 01.6": (with_duration("01.6"), "any"),
    "a duration of 1.": (with_duration("1."), "any"),
    "a duration of .5": (with_duration(".5"), "any"),
    "a duration of 0x10": (with_duration("0x10"), "any"),
    "a duration of 1,6": (with_duration("1,6"), "any"),
    "a duration of 5000 decimals": (with_duration("1." + "6" * 5000), "any"),
    "a duration of false": (with_duration("false"), "any"),
    "a duration of 1e308": (with_duration("1e308"), "any"),
    "durations that differ": (with_duration('99, "duration": 1.6'), "any"),
    "an offset of null": (with_offset("null"), "any"),
    "an offset of true": (with_offset("true"), "any"),
    "an offset that is a list": (with_offset("[0]"), "any"),
    "an offset of -0.0": (with_offset("-0.0"), "clean"),
    "an offset of 1e-320": (with_offset("1e-320"), "clean"),
    "an offset of 30 digits": (with_offset("1" + "0" * 30), "any"),
    "an offset of Infinity": (with_offset("Infinity"), "any"),
    "an offset of -1e-9": (with_offset("-1e-9"), "any"),
    "an offset of 0.4": (with_offset("0.4"), "clean"),
    "an offset of 0.8, so 0.4 s are missing": (with_offset("0.8"), "bad"),
    "a comment": (raw("// audio"), "any"),
    "a hash": (raw("# audio"), "any"),
    "a comma in an object": (raw('{"audio_filepath": "audio/0.wav", "duration": 1.6,}'), "any"),
    "everything in one line": (GOOD.replace(b"\n", b" "), "any"),
    "an escaped key": (raw('{"audio\\u005ffilepath": "audio/0.wav", "duration": 1.6}'), "clean"),
    "an escaped slash": (raw('{"audio_filepath": "audio\\/0.wav", "duration": 1.6}'), "clean"),
    "letters as escapes": (raw('{"audio_filepath": "\\u0061udio/0.wav", "duration": 1.6}'), "clean"),
    "dots in a path": (at("./audio//../audio/./0.wav"), "clean"),
    "an absolute path": (at("{folder}/audio/0.wav"), "clean"),
    "a path through a link": (at("linked/0.wav"), "clean"),
    "a space at the end of a path": (at("audio/0.wav "), "bad"),
    "percent signs in a path": (at("audio%2F0.wav"), "bad"),
    "a variable in a path": (at("$HOME/0.wav"), "bad"),
    "a dash": (at("-"), "bad"),
    "a dot": (at("."), "bad"),
    "a slash": (at("/"), "bad"),
    "/dev/random": (at("/dev/random"), "bad"),
    "/dev/tty": (at("/dev/tty"), "bad"),
    "/proc/self/fd/0": (at("/proc/self/fd/0"), "bad"),
    "/proc/kmsg": (at("/proc/kmsg"), "bad"),
    "/sys/power/state": (at("/sys/power/state"), "bad"),
    "a drive letter": (at("C:\\\\audio\\\\0.wav"), "bad"),
    "a share": (at("\\\\\\\\server\\\\share\\\\0.wav"), "bad"),
    "a file URL": (at("file://{folder}/audio/0.wav"), "any"),
    "a fragment": (at("audio/0.wav#t=1"), "bad"),
    "concat:": (at("concat:audio/0.wav|audio/1.wav"), "bad"),
    "data:": (at("data:audio/wav;base64,UklGRg=="), "bad"),
    "subfile": (at("subfile,,start,0,end,99,,:audio/0.wav"), "bad"),
    "pipe:": (at("pipe:0"), "bad"),
    "tcp:": (at("tcp://127.0.0.1:9"), "bad"),
    "lavfi": (at("lavfi:sine"), "bad"),
    "another case": (at("AUDIO/0.WAV"), "bad"),
    "a hyperlink in a path": (at("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\.wav"), "bad"),
    "rich markup in a path": (at("[red]a[/].wav"), "bad"),
    "a broken rich markup in a path": (at("[/].wav"), "bad"),
    "a format in a path": (at("{0}%s{val}.wav"), "bad"),
    "an emoji in a path": (at("😀.wav"), "bad"),
    "a path of 300 bytes": (at("x" * 300 + ".wav"), "bad"),
    "two keys for the path": (
        raw('{"audio_filepath": "audio/0.wav", "audio_filename": "x.wav", "duration": 1.6}'),
        "any",
    ),
    "a key in capitals": (raw('{"AUDIO_FILEPATH": "audio/0.wav", "duration": 1.6}'), "any"),
    "a lone surrogate in a text": (raw('{"audio_filepath": "audio/0.wav", "duration": 1.6, "text": "\\ud800"}'), "any"),
    "900 brackets": (
        raw('{"audio_filepath": "audio/0.wav", "duration": 1.6, "x": ' + "[" * 900 + "]" * 900 + "}"),
        "any",
    ),
    "an integer of 5000 digits elsewhere": (raw('{"x": 1' + "0" * 5000 + "}"), "any"),
    "a tab in a string": (raw('{"audio_filepath": "audio/0.wav", "duration": 1.6, "text": "a\tb"}'), "any"),
    "a key of 1 MB": (GOOD + line(**{"x" * 1_000_000: 1}), "clean"),
    "100,000 lines": (GOOD * 12_500, "clean"),
    "a million blank lines": (GOOD.replace(b"\n", b"\n" * 125_000), "clean"),
    "10 % too long": (at("audio/0.wav", duration=1.7), "clean"),
    "30 % too long": (at("audio/0.wav", duration=2.3), "bad"),
    "longer than max_duration": (at("audio/0.wav", duration=60.0001), "left out"),
    "all longer than max_duration": (GOOD.replace(b'"duration": ', b'"duration": 99'), "no"),
    "all shorter than min_duration": (GOOD.replace(b'"duration": 1', b'"duration": 0').replace(b" 2.", b" 0."), "no"),
    "one line": (line(), "too few"),
    "another sample rate": (at("audio/0.wav", sample_rate=8000, sampling_rate=8000), "clean"),
}
"""Lines of train.jsonl, and what must come of it."""

LINE_KINDS: dict[str, Expected] = {
    "any": NAMED_OR_TRAINED,
    "clean": Right(clean),
    "bad": Right(said("bad")),
    "left out": Right(said("left out")),
    "no": Refused(("train.jsonl",)),
    "too few": Refused(("train.jsonl|batch_size",)),
}
TAR_KEYS = ("model.train_ds.is_tarred=true", "model.train_ds.manifest_filepath=tarred.json")


def wav_of(i: int) -> bytes:
    return (Fixture.path / f"audio/{i % 8}.wav").read_bytes()


def shard(*names: str, mode: str = "w", kind: int = tarfile.GNU_FORMAT, change: Any = None, rows: Any = None) -> Setup:
    """audio_0.tar with the eight files under these names, and tarred.json."""

    def setup(folder: Path) -> None:
        with tarfile.open(folder / TAR, mode, format=kind) as file:  # type: ignore[call-overload]
            for i, name in enumerate(names):
                data, member = wav_of(i), tarfile.TarInfo(name)
                if change and i == 3:
                    data = change(member, data)
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
        lines = [{"audio_filepath": f"{i}.wav", "duration": 1.6 + 0.1 * i, "shard_id": 0} for i in range(8)]
        write_lines(folder / "tarred.json", [rows(i, row) for i, row in enumerate(lines)] if rows else lines)

    return setup


def _member(**changes: Any) -> Callable[[tarfile.TarInfo, bytes], bytes]:
    def change(member: tarfile.TarInfo, data: bytes) -> bytes:
        content: bytes = changes.get("content", data)
        for key, value in changes.items():
            if key != "content":
                setattr(member, key, value)
        return content

    return change


def _row(**changes: Any) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    return lambda i, row: row | changes if i == 3 else row


def _then(setup: Setup, change: Callable[[bytes], bytes]) -> Setup:
    return both(setup, on_bytes(change, TAR))


def nan_wav() -> bytes:
    return riff(fmt(3, bits=32), (b"data", (FLOATS * math.nan).astype("<f4").tobytes()))


SHARDS: dict[str, tuple[Setup, str]] = {
    "names with ./": (shard(*(f"./{name}" for name in EIGHT)), "ok"),
    "absolute names": (shard(*(f"/{name}" for name in EIGHT)), "any"),
    "names in folders": (shard(*(f"a/b/{name}" for name in EIGHT)), "any"),
    "equal stems in two folders": (shard(*(f"s{i}/{name}" for i in (1, 2) for name in EIGHT)), "any"),
    "other suffixes": (shard(*(f"{i}.flac" for i in range(8))), "any"),
    "names in capitals": (shard(*(f"{i}.WAV" for i in range(8))), "any"),
    "a name of 200 letters": (shard(*EIGHT, "x" * 200 + ".wav"), "ok"),
    "a name with escape codes": (shard(*EIGHT, "\x1b[31mred.wav"), "ok"),
    "names in pax headers": (shard(*EIGHT, "语" * 60 + ".wav", kind=tarfile.PAX_FORMAT), "ok"),
    "a pax size that lies": (
        shard(*EIGHT, kind=tarfile.PAX_FORMAT, change=_member(pax_headers={"size": "99999999999"})),
        "any",
    ),
    "a pax path that leaves it": (
        shard(*EIGHT, kind=tarfile.PAX_FORMAT, change=_member(pax_headers={"path": "../../pwned"})),
        "any",
    ),
    "a pax header of 5 MB": (
        shard(*EIGHT, kind=tarfile.PAX_FORMAT, change=_member(pax_headers={"comment": "x" * 5_000_000})),
        "any",
    ),
    "bzip2": (shard(*EIGHT, mode="w:bz2"), "any"),
    "xz": (shard(*EIGHT, mode="w:xz"), "any"),
    "two archives in one": (_then(shard(*EIGHT), lambda data: data + data), "any"),
    "no end": (_then(shard(*EIGHT), lambda data: data.rstrip(b"\0")), "any"),
    "a megabyte of zeros at the end": (_then(shard(*EIGHT), lambda data: data + bytes(1 << 20)), "ok"),
    "garbage at the end": (_then(shard(*EIGHT), lambda data: data + b"garbage" * 999), "any"),
    "garbage at the beginning": (_then(shard(*EIGHT), lambda data: b"garbage\n" * 64 + data), "any"),
    "a wrong checksum": (_then(shard(*EIGHT), lambda data: patched(data, 148, b"0000000\0")), "any"),
    "an empty member": (shard(*EIGHT, change=_member(content=b"")), "bad"),
    "a member of text": (shard(*EIGHT, change=_member(content=b"no audio" * 99)), "bad"),
    "a member of NaN": (shard(*EIGHT, change=_member(content=nan_wav())), "bad"),
    "a member that is cut off": (shard(*EIGHT, change=_member(content=riff(fmt(), (b"data", PCM))[:20_000])), "bad"),
    "a member that is a tar": (shard(*EIGHT, change=_member(content=bytes(10_240))), "bad"),
    "a time of 2^40": (shard(*EIGHT, change=_member(mtime=2**33 - 1)), "ok"),
    "an offset": (shard(*EIGHT, rows=_row(offset=0.5, duration=1.2)), "any"),
    "a negative offset": (shard(*EIGHT, rows=_row(offset=-1)), "any"),
    "shard_id of 7": (shard(*EIGHT, rows=_row(shard_id=7)), "any"),
    "shard_id of -1": (shard(*EIGHT, rows=_row(shard_id=-1)), "any"),
    "shard_id of text": (shard(*EIGHT, rows=_row(shard_id="x")), "any"),
    "shard_id of 0.5": (shard(*EIGHT, rows=_row(shard_id=0.5)), "any"),
    "shard_id of null": (shard(*EIGHT, rows=_row(shard_id=None)), "any"),
    "the same line twice": (shard(*EIGHT, rows=lambda i, row: row | {"audio_filepath": "0.wav"}), "any"),
    "paths that leave it": (shard(*EIGHT, rows=lambda i, row: row | {"audio_filepath": f"../../{i}.wav"}), "any"),
    "durations that lie": (shard(*EIGHT, rows=_row(duration=9.0)), "bad"),
}
SHARD_PATHS: dict[str, str] = {
    "a range that goes back": "audio__OP_3..0_CL_.tar",
    "a range of -1": "audio__OP_-1..0_CL_.tar",
    "half a range": "audio__OP_0..1.tar",
    "/dev/zero": "/dev/zero",
    "a FIFO": "fifo.tar",
    "a list in a list": "[[[audio_0.tar]]]",
    "a number": "7",
    "twice the same": "[audio_0.tar,audio_0.tar]",
    "more shards than there are": "audio__OP_0..3_CL_.tar",
    "a manifest": "train.jsonl",
    "an empty text": "''",
    "a URL": "http://127.0.0.1:9/audio_0.tar",
    "a pipe": "'pipe:touch ../pwned'",
}


def cuts(change: Callable[[int, dict[str, Any]], Any]) -> Setup:
    """cuts.jsonl with eight cuts of lhotse's; `change` may return another line."""

    def setup(folder: Path) -> None:
        lines = []
        for i in range(8):
            seconds = round(1.6 + 0.1 * i, 1)
            source = {"type": "file", "channels": [0], "source": str(folder / f"audio/{i}.wav")}
            recording = {"id": f"r{i}", "sources": [source], "sampling_rate": RATE, "duration": seconds}
            recording["num_samples"] = int(RATE * seconds)
            entry = {"id": f"c{i}", "start": 0, "duration": seconds, "channel": 0, "supervisions": []}
            entry |= {"recording": recording, "type": "MonoCut"}
            lines.append(change(i, entry) or entry)
        (folder / "cuts.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))

    return setup


def _cut(**changes: Any) -> Setup:
    return cuts(lambda i, entry: entry.update(changes) if i == 3 else None)


def _recording(**changes: Any) -> Setup:
    return cuts(lambda i, entry: entry["recording"].update(changes) if i == 3 else None)


def _source(**changes: Any) -> Setup:
    return cuts(lambda i, entry: entry["recording"]["sources"][0].update(changes) if i == 3 else None)


def _all_sources(**changes: Any) -> Setup:
    return cuts(lambda i, entry: entry["recording"]["sources"][0].update(changes))


CUTS: dict[str, tuple[Setup, str]] = {
    "as they should be": (_cut(), "ok"),
    "a command": (_source(type="command", source="touch ../pwned; cat audio/3.wav"), "no"),
    "all commands": (_all_sources(type="command", source="touch ../pwned; cat audio/3.wav"), "no"),
    "a URL that is a pipe": (_source(type="url", source="pipe:touch ../pwned"), "any"),
    "a URL of this machine": (_source(type="url", source="http://127.0.0.1:9/x.wav"), "any"),
    "an unknown type": (_source(type="foo"), "any"),
    "memory with text": (_source(type="memory", source="hello"), "any"),
    "shar": (_source(type="shar", source="x"), "any"),
    "a missing file": (_source(source="nowhere.wav"), "any"),
    "/dev/zero": (_source(source="/dev/zero"), "any"),
    "a file with escape codes": (_source(source="\x1b[31mred.wav"), "any"),
    "no sources": (_recording(sources=[]), "any"),
    "sources of null": (_recording(sources=None), "any"),
    "no recording": (cuts(lambda i, entry: entry.pop("recording") and None), "any"),
    "channel 7": (_cut(channel=7), "any"),
    "channels of the source": (_source(channels=[0, 1, 2]), "any"),
    "a rate of 0": (_recording(sampling_rate=0), "any"),
    "a rate of 8000 that lies": (_recording(sampling_rate=8000, num_samples=15200), "any"),
    "a rate of text": (_recording(sampling_rate="x"), "any"),
    "samples that lie": (_recording(num_samples=10**12, duration=10**12 / RATE), "any"),
    "a negative duration": (_cut(duration=-1), "any"),
    "a duration of NaN": (_cut(duration=math.nan), "any"),
    "a duration of 1e300": (_cut(duration=1e300), "any"),
    "a negative start": (_cut(start=-1), "any"),
    "a start after the end": (_cut(start=99), "any"),
    "no id": (cuts(lambda i, entry: entry.pop("id") and None), "any"),
    "the same id": (cuts(lambda i, entry: entry.update(id="x")), "any"),
    "an id of escape codes": (_cut(id="\x1b[31mred\x07"), "any"),
    "supervisions of text": (_cut(supervisions="x"), "any"),
    "another type": (_cut(type="PaddingCut"), "any"),
    "no type": (cuts(lambda i, entry: entry.pop("type") and None), "any"),
    "a line that is a list": (cuts(lambda i, entry: [1] if i == 3 else None), "any"),
    "an extra key": (_cut(foo=1), "any"),
    "features instead of audio": (_cut(features={"type": "fbank", "storage_path": "x"}), "any"),
}
NOISES: dict[str, tuple[bytes, dict[str, Any]]] = {
    "samples of 1e30": (riff(fmt(3, bits=32), (b"data", (FLOATS * 1e31).astype("<f4").tobytes())), {}),
    "one sample of 1e30": (
        riff(fmt(3, bits=32), (b"data", np.where(np.arange(2 * RATE) == 7, 1e30, FLOATS).astype("<f4").tobytes())),
        {},
    ),
    "NaN": (nan_wav(), {}),
    "8 kHz": (encoded("WAV", FLOATS[::2], 8000), {}),
    "eight channels": (encoded("WAV", np.stack([FLOATS] * 8, 1)), {}),
    "one sample": (riff(fmt(), (b"data", b"\1\1")), {}),
    "a duration that lies": (encoded("WAV"), {"duration": 500.0}),
    "an offset after the end": (encoded("WAV"), {"offset": 50.0}),
    "no duration": (encoded("WAV"), {"duration": None}),
    "constant full scale": (riff(fmt(), (b"data", b"\xff\x7f" * 2 * RATE)), {}),
    "denormal numbers": (riff(fmt(3, bits=32), (b"data", (FLOATS * 1e-40).astype("<f4").tobytes())), {}),
}
VALIDATIONS: dict[str, tuple[bytes, Expected]] = {
    "empty": (b"", Refused(("valid.jsonl",))),
    "all files missing": (
        GOOD.replace(b"audio/", b"nowhere/"),
        Either(Refused(("valid|nowhere",), partial=True), Right(said("bad", then=validated))),
    ),
    "one file of NaN": (line(audio_filepath="nan.wav") + GOOD, Right(said("bad", then=validated))),
    "one file of 1e30": (line(audio_filepath="huge.wav") + GOOD, Right(said("bad", then=validated))),
    "one line": (line(), Either(Refused(("valid.jsonl",)), VALIDATED)),
    "too long, all of them": (GOOD.replace(b'"duration": ', b'"duration": 99'), Refused(("valid.jsonl",))),
    "not JSON": (b"hello\n", Refused(("valid.jsonl",))),
    "a FIFO among them": (GOOD + line(audio_filepath="fifo.tar"), Either(Refused(("fifo",), partial=True), VALIDATED)),
}


def _odd_places(folder: Path) -> None:
    (folder / "linked").symlink_to("audio")
    os.mkfifo(folder / "fifo.tar")
    (folder / "nan.wav").write_bytes(nan_wav())
    (folder / "huge.wav").write_bytes(riff(fmt(3, bits=32), (b"data", (FLOATS * 1e31).astype("<f4").tobytes())))


def _stale(change: Callable[[bytes], bytes]) -> Setup:
    """Another manifest of the same size and time as the one that the index was made of."""

    def setup(folder: Path) -> None:
        manifest = folder / "train.jsonl"
        for name in ("train.jsonl", "train.jsonl.idx"):
            shutil.copy2(Fixture.path / name, folder)
        before, data = manifest.stat(), change(manifest.read_bytes())
        manifest.write_bytes(data)
        if len(data) != before.st_size:
            raise ValueError("another size")
        os.utime(manifest, ns=(before.st_atime_ns, before.st_mtime_ns))

    return setup


def _rolled(data: bytes) -> bytes:
    """A space moves from one line to another, so that all lines between start elsewhere."""
    rows = data.splitlines(keepends=True)
    rows[0] = rows[0].replace(b": ", b":", 1)
    rows[5] = rows[5].replace(b"{", b"{ ", 1)
    return b"".join(rows)


LISTS: dict[str, bytes] = {
    "blank lines and CRLF": b"audio/0.wav\r\n\r\naudio/1.wav\r\n",
    "a byte order mark": b"\xef\xbb\xbfaudio/0.wav\naudio/1.wav\n",
    "itself": b"list.txt\naudio/0.wav\n",
    "a folder": b"audio\naudio/0.wav\n",
    "the same twice": b"audio/0.wav\naudio/0.wav\n./audio/0.wav\n",
    "binary": bytes(range(256)),
    "a NUL in a name": b"audio/0\0.wav\naudio/0.wav\n",
    "names that are not UTF-8": b"\xff\xfe.wav\naudio/0.wav\n",
    "escape codes": b"\x1b[31mred.wav\naudio/0.wav\n",
    "/dev/zero": b"/dev/zero\naudio/0.wav\n",
    "a FIFO": b"fifo.tar\naudio/0.wav\n",
    "a line of 1 MB": b"x" * 1_000_000 + b"\naudio/0.wav\n",
    "spaces around": b"  audio/0.wav  \n\taudio/1.wav\n",
    "half JSON": b'audio/0.wav\n{"audio_filepath": "audio/1.wav"}\n',
}


def manifests() -> Iterator[Trial]:
    group = "manifests"
    model = f"{Fixture.path}/model.nemo"
    others = itertools.cycle(
        (
            ["inspect", "train.jsonl", "--examples", "1", "--batch-size", "2"],
            ["prepare", "train.jsonl", "--output", "m.jsonl", "--workers", "0"],
            ["extract", model, "train.jsonl", "out", "--device", "cpu"],
        )
    )
    told = Either(
        Refused(("train.jsonl|m.jsonl|bad.jsonl|without features|audio|out",), partial=True), Right(finite_features)
    )
    for name, (content, kind) in LINES.items():

        def write(folder: Path, content: bytes = content) -> None:
            _odd_places(folder)
            (folder / "train.jsonl").write_bytes(content.replace(b"{folder}", os.fsencode(folder)))

        command = pretrain("trainer.max_steps=9", "trainer.limit_val_batches=1")
        yield Trial(group, f"line: {name}", command, LINE_KINDS[kind], write)
        other = next(others)
        if len(content) < 500_000:
            yield Trial(group, f"{other[0]}: {name}", other, told, write)
    two = [*pretrain("trainer.devices=2")]
    yield Trial(
        *(group, "one line, two ranks", two, LINE_KINDS["too few"]),
        setup=lambda folder: (folder / "train.jsonl").write_bytes(line()),
        own_process=True,
    )
    for name, (setup, kind) in SHARDS.items():
        command = pretrain(*TAR_KEYS, "model.train_ds.tarred_audio_filepaths=audio_0.tar", "trainer.max_steps=8")
        refused = Refused(("audio_0.tar|tarred.json",), partial=True)
        fine = Right(clean if kind == "ok" else said("bad"))
        expected: Expected = Either(refused, TRAINED) if kind == "any" else fine
        yield Trial(group, f"shard: {name}", command, expected, setup)
    for name, value in SHARD_PATHS.items():
        command = pretrain(*TAR_KEYS, f"model.train_ds.tarred_audio_filepaths={value}")
        expected = Either(Refused(("audio_|tarred|fifo|/dev|train.jsonl|pipe|http",), partial=True), TRAINED)
        yield Trial(group, f"tarred_audio_filepaths is {name}", command, expected, both(shard(*EIGHT), _odd_places))
    for name, (setup, kind) in CUTS.items():
        keys = ("+model.train_ds.use_lhotse=true", "+model.train_ds.cuts_path=cuts.jsonl")
        command = pretrain(*keys, "model.train_ds.manifest_filepath=null", "trainer.max_steps=8")
        refused = Refused(("cuts|lhotse|c3|recording|type|command",), partial=True)
        expected = TRAINED if kind == "ok" else refused if kind == "no" else Either(refused, TRAINED)
        yield Trial(group, f"cuts: {name}", command, expected, setup)
    for name in (
        "a negative duration",
        "a duration of 1e308",
        "an offset of Infinity",
        "a path that is true",
        "NULs in a line",
    ):
        command = pretrain("+model.train_ds.use_lhotse=true", "trainer.max_steps=8")

        def lines(folder: Path, content: bytes = LINES.get(name, (GOOD + line(duration=-1.0), ""))[0]) -> None:
            (folder / "train.jsonl").write_bytes(content)

        yield Trial(group, f"lhotse: {name}", command, NAMED_OR_TRAINED, lines)
    for name, (content, changes) in NOISES.items():

        def noisy(folder: Path, content: bytes = content, changes: dict[str, Any] = changes) -> None:
            (folder / "noise.wav").write_bytes(content)
            entry = {"audio_filepath": "noise.wav", "duration": 2.0} | changes
            good = {"audio_filepath": "audio/1.wav", "duration": 1.7}
            write_lines(folder / "noise.jsonl", [{k: v for k, v in entry.items() if v is not None}, good])

        augmentor = "model.train_ds.batch_augmentor"
        command = pretrain(
            *("model.train_ds.noise_manifest=noise.jsonl", f"{augmentor}.noise_ratio=1", f"{augmentor}.prob=1"),
            *("trainer.max_steps=8", "model.validation_ds.noise_manifest=noise.jsonl"),
        )
        expected = Either(Refused(("noise",), partial=True), Right(quiet_noise))
        yield Trial(group, f"noise of {name}", command, expected, noisy)
    for name, (content, expected) in VALIDATIONS.items():

        def valid(folder: Path, content: bytes = content) -> None:
            _odd_places(folder)
            (folder / "valid.jsonl").write_bytes(content)

        yield Trial(group, f"validation: {name}", pretrain("+watchdog.floor_s=5"), expected, valid)
    for name, change in {
        "lines reversed": lambda data: b"".join(reversed(data.splitlines(keepends=True))),
        "a space moved": _rolled,
    }.items():
        expected = Either(Refused(("train.jsonl",)), Right(clean))
        yield Trial(group, f"same size and time, {name}", pretrain(), expected, _stale(change))
    for name, content in LISTS.items():

        def listed(folder: Path, content: bytes = content) -> None:
            _odd_places(folder)
            (folder / "list.txt").write_bytes(content)

        command = ["prepare", "list.txt", "--output", "m.jsonl", "--workers", "0"]
        expected = Either(Refused(("list.txt|m.jsonl",), partial=True), Right(no_controls))
        yield Trial(group, f"a list with {name}", command, expected, listed)


def quiet_noise(folder: Path, outcome: Outcome) -> str | None:
    """No step was skipped for what the noise did to it."""
    return "a loss that is not finite" if "not finite" in outcome.text else trained(folder, outcome)


def no_controls(folder: Path, outcome: Outcome) -> str | None:
    """What was written has no raw control codes, and each line is JSON."""
    for path in folder.glob("m*.jsonl"):
        text = path.read_bytes().decode()
        if CONTROL.search(text):
            return f"{path.name} has control codes"
        for row in text.splitlines():
            json.loads(row)
    return None


# ---------------------------------------------------------------------------------------------------------------- audio


def floats_with(value: float, where: int | slice = 5000, channels: int = 1, bits: int = 32) -> bytes:
    """A wav of floats with one odd value, in the last channel."""
    samples = np.stack([FLOATS.astype(np.float64)] * channels, 1)
    with np.errstate(over="ignore"):
        samples[where, -1] = value
        data = samples.astype(f"<f{bits // 8}").tobytes()
    return riff(fmt(3, channels, bits=bits), (b"data", data))


def cancelling() -> bytes:
    """Two channels whose absurd samples cancel in the mean."""
    samples = np.stack([FLOATS, FLOATS], 1).astype(np.float64)
    samples[5000] = [1e30, -1e30]
    return riff(fmt(3, 2, bits=32), (b"data", samples.astype("<f4").tobytes()))


def extensible(guid: bytes, bits: int = 16, valid: int | None = None) -> tuple[bytes, bytes]:
    base = fmt(0xFFFE, bits=bits)[1]
    return b"fmt ", base + struct.pack("<HHI", 22, bits if valid is None else valid, 0) + guid


PCM_GUID = b"\1\0\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"


def media(kind: str, codec: str) -> bytes:
    """Two seconds in a container that libsndfile does not read."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=RATE)
        frame = av.AudioFrame.from_ndarray((FLOATS * 32767).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate = RATE
        resampler = av.AudioResampler(format=stream.format, layout="mono", rate=RATE, frame_size=stream.frame_size or 0)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            for packet in stream.encode(part):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)
    return file.getvalue()


def more_audio() -> dict[str, tuple[bytes, str]]:
    """The content of a file, and what it is: good (2 s of speech), bad, or a matter of opinion."""
    data = (b"data", PCM)
    wav, flac = riff(fmt(), data), encoded("FLAC")
    ogg, mp3, opus = encoded("OGG", subtype="VORBIS"), encoded("MP3"), encoded("OGG", subtype="OPUS")
    aiff, au, sph, caf = encoded("AIFF"), encoded("AU"), encoded("NIST"), encoded("CAF")
    wide = np.stack([FLOATS] * 8, 1)
    last_page = ogg.rfind(b"OggS")
    found = {
        # other codings
        "alaw.wav": (encoded("WAV", subtype="ALAW"), "good"),
        "ulaw.wav": (encoded("WAV", subtype="ULAW"), "good"),
        "bits_24.wav": (encoded("WAV", subtype="PCM_24"), "good"),
        "bits_32.wav": (encoded("WAV", subtype="PCM_32"), "good"),
        "gsm.wav": (encoded("WAV", subtype="GSM610"), "any"),
        "wavex.wav": (encoded("WAVEX"), "good"),
        "rf64.wav": (encoded("RF64"), "good"),
        "extensible.wav": (riff(extensible(PCM_GUID), data), "good"),
        "extensible_unknown.wav": (riff(extensible(b"\xee" * 16), data), "bad"),
        "extensible_valid_bits_0.wav": (riff(extensible(PCM_GUID, valid=0), data), "any"),
        "extensible_valid_bits_99.wav": (riff(extensible(PCM_GUID, valid=99), data), "any"),
        "alaw_of_16_bits.wav": (riff(fmt(6, bits=16), data), "any"),
        "float_of_16_bits.wav": (riff(fmt(3, bits=16), data), "any"),
        "float_of_8_bits.wav": (riff(fmt(3, bits=8), data), "bad"),
        "bits_65535.wav": (riff(fmt(bits=65535), data), "bad"),
        "bits_1.wav": (riff(fmt(bits=1), data), "any"),
        "three_channels.wav": (encoded("WAV", np.stack([FLOATS] * 3, 1)), "good"),
        "eight_channels.flac": (encoded("FLAC", wide), "good"),
        "channels_64.wav": (encoded("WAV", np.stack([FLOATS] * 64, 1)), "good"),
        "channels_1025.wav": (riff(fmt(channels=1025), (b"data", bytes(1025 * 2 * 100))), "bad"),
        "opposite_channels.wav": (encoded("WAV", np.stack([FLOATS, -FLOATS], 1)), "any"),
        "rate_10_mhz.wav": (riff(fmt(rate=10_000_000), data), "bad"),
        "rate_1000.wav": (encoded("WAV", FLOATS[:2000], 1000), "any"),
        "rate_7999.wav": (encoded("WAV", FLOATS[:15_998], 7999), "good"),
        "rate_768000.wav": (riff(fmt(rate=768_000), (b"data", PCM * 48)), "any"),
        "rate_0.au": (patched(au, 16, bytes(4)), "bad"),
        "rate_negative.au": (patched(au, 16, b"\xff\xff\xff\xfe"), "bad"),
        "rate_0.aiff": (patched(aiff, aiff.find(b"COMM") + 16, bytes(10)), "bad"),
        "rate_nan.aiff": (patched(aiff, aiff.find(b"COMM") + 16, b"\x7f\xff" + b"\xff" * 8), "bad"),
        "rate_0.sph": (re.sub(rb"sample_rate -i \d+", b"sample_rate -i 0    ", sph), "bad"),
        "rate_0.caf": (patched(caf, caf.find(b"desc") + 12, bytes(8)), "bad"),
        "rate_nan.caf": (patched(caf, caf.find(b"desc") + 12, struct.pack(">d", math.nan)), "bad"),
        "rate_0.flac": (patched(flac, 18, bytes([0, 0, flac[20] & 15])), "any"),
        # absurd samples
        "huge_1e10.wav": (floats_with(1e10), "bad"),
        "huge_1e19.wav": (floats_with(1e19), "bad"),
        "huge_3e38.wav": (floats_with(3e38), "bad"),
        "huge_negative.wav": (floats_with(-1e30), "bad"),
        "huge_last_sample.wav": (floats_with(1e30, -1), "bad"),
        "huge_first_sample.wav": (floats_with(1e30, 0), "bad"),
        "huge_everywhere.wav": (floats_with(1e30, slice(None)), "bad"),
        "huge_second_channel.wav": (floats_with(1e30, channels=2), "bad"),
        "huge_eighth_channel.wav": (floats_with(1e30, channels=8), "bad"),
        "huge_cancelling.wav": (cancelling(), "bad"),
        "huge_double_1e39.wav": (floats_with(1e39, bits=64), "bad"),
        "huge_double_1e25.wav": (floats_with(1e25, bits=64), "bad"),
        "huge.au": (encoded("AU", np.where(np.arange(2 * RATE) == 9, 1e30, FLOATS), subtype="FLOAT"), "bad"),
        "huge.caf": (encoded("CAF", np.where(np.arange(2 * RATE) == 9, 1e30, FLOATS), subtype="FLOAT"), "bad"),
        "huge.aiff": (encoded("AIFF", np.where(np.arange(2 * RATE) == 9, 1e30, FLOATS), subtype="FLOAT"), "bad"),
        "huge.w64": (encoded("W64", np.where(np.arange(2 * RATE) == 9, 1e30, FLOATS), subtype="DOUBLE"), "bad"),
        "nan_last_sample.wav": (floats_with(math.nan, -1), "bad"),
        "nan_second_channel.wav": (floats_with(math.nan, channels=2), "bad"),
        "nan_signalling.wav": (patched(floats_with(0.0), 20_044, struct.pack("<I", 0x7F800001)), "bad"),
        "inf_double.wav": (floats_with(math.inf, bits=64), "bad"),
        # chunks and sizes
        "fmt_of_14_bytes.wav": (riff((b"fmt ", fmt()[1][:14]), data), "any"),
        "fmt_of_18_bytes.wav": (riff((b"fmt ", fmt()[1] + b"\0\0"), data), "good"),
        "fmt_of_100_kb.wav": (riff((b"fmt ", fmt()[1] + bytes(100_000)), data), "any"),
        "fmt_size_max.wav": (patched(wav, 16, b"\xff\xff\xff\xff"), "bad"),
        "fmt_size_0.wav": (riff((b"fmt ", b""), data), "bad"),
        "fact_that_lies.wav": (riff(fmt(), (b"fact", struct.pack("<I", 2**31)), data), "any"),
        "a_hundred_thousand_chunks.wav": (riff(fmt(), *[(b"JUNK", b"")] * 100_000, data), "any"),
        "junk_of_1_mb.wav": (riff((b"JUNK", bytes(1 << 20)), fmt(), data), "good"),
        "riff_in_riff.wav": (riff((b"RIFF", wav), fmt(), data), "any"),
        "list_in_list.wav": (riff(fmt(), (b"LIST", b"INFO" + b"LIST\xff\xff\xff\xff" * 50), data), "any"),
        "cue_that_lies.wav": (riff(fmt(), (b"cue ", struct.pack("<I", 2**31)), data), "any"),
        "smpl_that_lies.wav": (riff(fmt(), (b"smpl", struct.pack("<9I", *[2**31] * 9)), data), "any"),
        "title_with_codes.wav": (riff(fmt(), (b"LIST", b"INFOINAM\x08\0\0\0\x1b[31mre\0"), data), "good"),
        "bext_of_zeros.wav": (riff(fmt(), (b"bext", bytes(602)), data), "good"),
        "id3_at_the_end.wav": (wav + b"ID3\x04\0\0\0\0\0\x0a" + bytes(10), "any"),
        "data_size_0.wav": (patched(wav, 40, bytes(4)), "any"),
        "data_size_1.wav": (patched(wav, 40, b"\1\0\0\0"), "bad"),
        "rifx.wav": (riff(fmt(), data, magic=b"RIFX"), "any"),
        "wave_in_small_letters.wav": (wav.replace(b"WAVE", b"wave", 1), "bad"),
        "byte_rate_0.wav": (patched(wav, 28, bytes(4)), "any"),
        "block_align_65535.wav": (riff(fmt(block=65535), data), "any"),
        # flac
        "bits_24.flac": (encoded("FLAC", subtype="PCM_24"), "good"),
        "bits_8.flac": (encoded("FLAC", subtype="PCM_S8"), "good"),
        "samples_unknown.flac": (patched(flac, 21, bytes([flac[21] & 0xF0]) + bytes(4)), "any"),
        "samples_too_few.flac": (patched(flac, 21, bytes([flac[21] & 0xF0]) + struct.pack(">I", 1000)), "any"),
        "samples_twice.flac": (patched(flac, 21, bytes([flac[21] & 0xF0]) + struct.pack(">I", 4 * RATE)), "bad"),
        "one_byte_short.flac": (flac[:-1], "any"),
        "cut_at_95_percent.flac": (flac[: int(len(flac) * 0.8)], "bad"),
        "flipped_at_30_percent.flac": (
            patched(flac, len(flac) * 3 // 10, bytes([flac[len(flac) * 3 // 10] ^ 1])),
            "bad",
        ),
        "flipped_at_80_percent.flac": (
            patched(flac, len(flac) * 8 // 10, bytes([flac[len(flac) * 8 // 10] ^ 64])),
            "bad",
        ),
        "zeros_inside.flac": (patched(flac, len(flac) // 2, bytes(500)), "bad"),
        "twice.flac": (flac + flac, "any"),
        "id3_first.flac": (b"ID3\x04\0\0\0\0\0\x0a" + bytes(10) + flac, "any"),
        "block_of_16_mb.flac": (flac[:4] + b"\x01\xff\xff\xff" + flac[4:], "bad"),
        "channels_differ.flac": (patched(flac, 20, bytes([flac[20] ^ 0x0E])), "bad"),
        # ogg, mp3
        "plain.opus": (opus, "good"),
        "cut.opus": (opus[: len(opus) // 2], "any"),
        "granule_max.ogg": (patched(ogg, last_page + 6, b"\xff\xff\xff\xff\xff\xff\xff\x7f"), "any"),
        "granule_minus_2.ogg": (patched(ogg, last_page + 6, b"\xfe" + b"\xff" * 7), "any"),
        "other_serial.ogg": (patched(ogg, last_page + 14, b"\1\2\3\4"), "any"),
        "no_last_page.ogg": (ogg[:last_page], "any"),
        "garbage_inside.ogg": (ogg[:last_page] + b"garbage" * 100 + ogg[last_page:], "any"),
        "flipped.ogg": (patched(ogg, len(ogg) // 2, bytes([ogg[len(ogg) // 2] ^ 8])), "any"),
        "headers_only.ogg": (ogg[:4200], "any"),
        "one_frame.mp3": (mp3[:200], "any"),
        "only_id3.mp3": (b"ID3\x04\0\0\0\0\0\x0a" + bytes(10), "bad"),
        "a_thousand_ids.mp3": (b"ID3\x04\0\0\0\0\0\x0a" + bytes(10) * 1000 + mp3, "any"),
        "zeros_inside.mp3": (patched(mp3, len(mp3) // 2, bytes(3000)), "any"),
        "xing_that_lies.mp3": (re.sub(rb"(Xing|Info)....", b"Xing\0\0\0\x0f", mp3, count=1, flags=re.S), "any"),
        # others
        "offset_after_the_end.au": (patched(au, 4, b"\x7f\xff\xff\xff"), "bad"),
        "encoding_999.au": (patched(au, 12, b"\0\0\x03\xe7"), "bad"),
        "channels_0.au": (patched(au, 20, bytes(4)), "bad"),
        "no_end.sph": (sph.replace(b"end_head", b"xxx_head"), "any"),
        "channels_0.sph": (re.sub(rb"channel_count -i \d", b"channel_count -i 0", sph), "bad"),
        "count_negative.sph": (re.sub(rb"sample_count -i \d+", b"sample_count -i -1", sph), "any"),
        "size_minus_1.caf": (patched(caf, caf.find(b"data") + 4, b"\xff" * 8), "any"),
        "size_huge.caf": (patched(caf, caf.find(b"data") + 4, b"\x7f" + b"\xff" * 7), "any"),
        "size_huge.w64": (patched(encoded("W64"), 16, b"\xff" * 7 + b"\x7f"), "any"),
        "plain.voc": (encoded("VOC"), "any"),
        "plain.paf": (encoded("PAF"), "any"),
        "plain.sf": (encoded("IRCAM"), "any"),
        "matlab.mat": (encoded("MAT5"), "any"),
        "matlab_huge.mat": (encoded("MAT5", np.where(np.arange(2 * RATE) == 9, 1e30, FLOATS), subtype="DOUBLE"), "bad"),
        # what a decoder may take for an address
        "manifest.mpd": (b'<?xml version="1.0"?><MPD><BaseURL>file:///etc/passwd</BaseURL></MPD>', "bad"),
        "metadata.wav": (b";FFMETADATA1\ntitle=x\n", "bad"),
        "server.wav": (b"#EXTM3U\n#EXTINF:2,\nhttp://127.0.0.1:9/x.wav\n#EXT-X-ENDLIST\n", "bad"),
        "image.svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "any"),
        "random.wav": (np.random.default_rng(0).bytes(50_000), "any"),
        "random.bin": (np.random.default_rng(1).bytes(50_000), "any"),
    }
    for kind, codec, name in (
        ("mp4", "aac", "plain.m4a"),
        ("matroska", "pcm_s16le", "plain.mka"),
        ("adts", "aac", "a.aac"),
    ):
        content = media(kind, codec)
        found[name] = (content, "any")
        found[f"cut_{name}"] = (content[: len(content) // 2], "any")
        found[f"flipped_{name}"] = (patched(content, len(content) // 3, b"\xff\0\xff"), "any")
    return found


def _long(folder: Path) -> None:
    """An hour of silence is a small file."""
    (folder / "odd").mkdir()
    soundfile.write(folder / "odd/hour.flac", np.zeros(3600 * RATE, np.int16), RATE)


def no_connection(text: str) -> Callable[[Path, list[str]], str | None]:
    """No file makes the program call an address: there is a server, and nobody comes."""

    def act(folder: Path, command: list[str]) -> str | None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(0.2)
            (folder / "odd").mkdir()
            (folder / "odd/x.wav").write_text(text.replace("{}", str(server.getsockname()[1])))
            shutil.copy(folder / "audio/0.wav", folder / "odd/0.wav")
            outcome = in_fork(command, folder, {}, 50)
            if outcome.code is None:
                return "does not end within 50 s"
            if "Traceback" in outcome.text:
                return f"a traceback: {outcome.err[-300:]}"
            try:
                server.accept()[0].close()
            except TimeoutError:
                return None
            return "the program called an address that a file names"

    return act


ADDRESSES: dict[str, str] = {
    "a playlist": "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nhttp://127.0.0.1:{}/x.ts\n#EXT-X-ENDLIST\n",
    "a plain list": "http://127.0.0.1:{}/x.wav\n",
    "a session": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio {} RTP/AVP 0\n",
    "a concat script": "ffconcat version 1.0\nfile 'http://127.0.0.1:{}/x.wav'\n",
    "a pls file": "[playlist]\nFile1=http://127.0.0.1:{}/x.wav\nNumberOfEntries=1\n",
    "an mpd file": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period>'
    '<BaseURL>http://127.0.0.1:{}/</BaseURL><AdaptationSet mimeType="audio/mp4"><Representation id="1">'
    '<SegmentTemplate media="x.m4s" initialization="i.mp4"/></Representation></AdaptationSet></Period></MPD>',
}


def audio() -> Iterator[Trial]:
    group = "audio"
    model = f"{Fixture.path}/model.nemo"
    for i, (name, (content, kind)) in enumerate(more_audio().items()):

        def write(folder: Path, name: str = name, content: bytes = content) -> None:
            (folder / "odd").mkdir()
            (folder / "odd" / name).write_bytes(content)
            shutil.copy(folder / "audio/0.wav", folder / "odd/0.wav")
            with (folder / "train.jsonl").open("ab") as file:
                file.write(line(audio_filepath=f"odd/{name}", duration=2.0))

        skipped = Path(name).suffix in {".svg", ".mat", ".bin", ".mpd"}  # may count as no audio at all
        command = ["prepare", "odd", "--output", "m.jsonl", "--workers", "0"]
        check = ended_well if skipped else prepared(name, kind)
        yield Trial(group, f"prepare {name}", command, Right(check), write)
        command = ["extract", model, f"odd/{name}", "out", "--device", "cpu"]
        refused = Refused(("bad.jsonl|without features|no audio|odd/",), partial=True)
        expected: Expected = Either(refused, Right(finite_features)) if skipped else extracted(kind)
        yield Trial(group, f"extract {name}", command, expected, write)
        if name.startswith(("huge", "nan")) or i % 4 == 0:
            expected = Right(said("bad") if kind == "bad" else trained)
            yield Trial(group, f"pretrain {name}", pretrain("trainer.max_steps=9"), expected, write)
        if i % 7 == 0:
            command = ["inspect", "train.jsonl", "--batch-size", "2", "--examples", "5"]
            expected = Either(Refused(("train.jsonl|odd|file",), partial=True), Right(ended_well))
            yield Trial(group, f"inspect {name}", command, expected, write)
    command = ["prepare", "odd", "--output", "m.jsonl", "--workers", "0"]
    hour = Right(lambda folder, outcome: None if "3600" in (folder / "m.jsonl").read_text() else "not an hour")
    yield Trial(group, "prepare an hour of silence", command, hour, _long)
    command = ["extract", model, "odd/hour.flac", "out", "--device", "cpu"]
    yield Trial(group, "extract an hour of silence", command, Refused(("3600|longer",), partial=True), _long)
    for name, text in ADDRESSES.items():
        for verb in (["prepare", "odd", "--output", "m.jsonl", "--workers", "0"], ["extract", model, "odd", "out"]):
            trial = f"{verb[0]} {name} with an address"
            yield Trial(group, trial, verb, Right(ended_well), act=no_connection(text))


# ---------------------------------------------------------------------------------------------------------------- kills

TERM, INT, KILL, USR1, USR2, HUP = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGKILL),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP),
)
SEGV, ABRT, BUS, STOP, CONT = signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGSTOP, signal.SIGCONT
SHARDED = {"overrides": ("trainer.strategy=fsdp",), "ranks": 2, "reference": "runs/sharded_whole"}
AVERAGED = {"overrides": ("+exp_manager.ema.enable=true",), "reference": "runs/averaged_whole"}
RESTARTS = ("+launch.max_restarts=2",)
LIMIT = ("+watchdog.floor_s=3",)


def crash(number: signal.Signals) -> tuple[int, ...]:
    return 75, 1, -number, 128 + number


MORE_KILLS = [
    Kill((USR2,), "step 3", codes=crash(USR2), continued=True),
    Kill((signal.SIGALRM,), "step 3", codes=crash(signal.SIGALRM), continued=True),
    Kill((SEGV,), "step 3", codes=crash(SEGV)),
    Kill((ABRT,), "step 3", codes=crash(ABRT)),
    Kill((BUS,), "step 5", codes=crash(BUS)),
    Kill((signal.SIGXCPU,), "step 3", codes=crash(signal.SIGXCPU), continued=True),
    Kill((signal.SIGWINCH,), "step 3", codes=(0,), continued=True),
    Kill((signal.SIGCHLD,), "step 3", codes=(0,), continued=True),
    Kill((signal.SIGURG,), "step 3", codes=(0,), continued=True),
    Kill((TERM,), "step 0"),
    Kill((TERM,), "step 8", codes=(75, 0), continued=True),
    Kill((INT,), "file hparams.yaml", codes=(75, 130, 1, -2)),
    Kill((TERM,), "file metrics.csv"),
    Kill((TERM,), "file checkpoints/*val_loss*", codes=(75, 0), continued=True),
    Kill((TERM,), "file checkpoints/.*", codes=(75, 0), continued=True),
    Kill((KILL,), "file checkpoints/last-before.ckpt", codes=DIED),
    Kill((KILL,), "file .saved", codes=DIED),
    Kill((KILL,), "file report.html", codes=DIED, continued=True),
    Kill((KILL,), "file .lock", codes=DIED),
    Kill((KILL,), "step 0", codes=DIED),
    Kill((KILL,), "step 7", codes=DIED),
    Kill((TERM, INT), "step 3", codes=(75, 130, 1)),
    Kill((USR1, TERM, INT), "step 3", codes=(75, 130, 1)),
    Kill((USR1, USR1, USR1), "step 3"),
    Kill((STOP, TERM, CONT), "step 3"),
    Kill((STOP, CONT, STOP, CONT), "step 2", codes=(0,), continued=True),
    Kill((SEGV,), "step 3", to="worker", overrides=WORKERS),
    Kill((STOP,), "step 3", to="worker", overrides=(*WORKERS, *LIMIT)),
    Kill((STOP, CONT), "step 3", to="worker", overrides=WORKERS, codes=(0,), continued=True),
    Kill((HUP,), "step 2", ranks=2, codes=(75, -1, 129)),
    Kill((USR1,), "step 2", ranks=2),
    Kill((USR1, KILL), "step 2", ranks=2, codes=(75, *DIED)),
    Kill((SEGV,), "step 2", ranks=2, to="rank 1"),
    Kill((ABRT,), "step 2", ranks=2, to="rank 1"),
    Kill((USR2,), "step 2", ranks=2, to="rank 1", codes=(75, 0), continued=True),
    Kill((INT,), "step 2", ranks=2, to="rank 1", codes=(75, 130, 1)),
    Kill((INT,), "step 2", ranks=2, to="group", codes=(75, 130, 1)),
    Kill((KILL,), "step 2", ranks=2, to="group", codes=DIED),
    Kill((STOP, CONT), "step 2", ranks=2, to="rank 1", codes=(0,), continued=True),
    Kill((STOP,), "step 4", ranks=2, to="monitor", codes=(0, 75), continued=True),
    Kill((TERM,), "step 2", ranks=2, to="monitor", codes=(0, 75), continued=True),
    Kill((KILL,), "file .saved", ranks=2, to="rank 1"),
    Kill((KILL,), "file checkpoints/last-before.ckpt", ranks=2, codes=DIED),
    Kill((KILL,), "step 2", ranks=2, to="rank 1", codes=(0,), overrides=RESTARTS),
    Kill((SEGV,), "step 4", ranks=2, to="rank 1", codes=(0,), overrides=RESTARTS),
    Kill((TERM,), "step 3", ranks=2, overrides=RESTARTS),
    Kill((TERM,), "step 3", **SHARDED),  # type: ignore[arg-type]
    Kill((KILL,), "step 4", codes=DIED, **SHARDED),  # type: ignore[arg-type]
    Kill((KILL,), "file checkpoints/*", codes=DIED, **SHARDED),  # type: ignore[arg-type]
    Kill((KILL,), "file .saved", to="rank 1", **SHARDED),  # type: ignore[arg-type]
    Kill((TERM,), "step 3", **AVERAGED),  # type: ignore[arg-type]
    Kill((KILL,), "step 5", codes=DIED, **AVERAGED),  # type: ignore[arg-type]
]

MORE_DISTURBANCES: dict[str, Setup] = {
    "last.ckpt is cut": lambda folder: os.truncate(folder / LAST, 1000) if (folder / LAST).is_file() else None,
    "last.ckpt becomes a folder": replaced(Path.mkdir, LAST),
    "last.ckpt becomes a FIFO": replaced(os.mkfifo, LAST),
    ".saved becomes a folder": replaced(Path.mkdir, SAVED),
    "the run folder is renamed": lambda folder: (folder / RUN).rename(folder / "runs/other"),
    "the run folder becomes a dangling link": replaced(link("nowhere"), RUN),
    "the run folder becomes a file": replaced(Path.touch, RUN),
    "metrics.csv becomes a FIFO": replaced(os.mkfifo, METRICS),
    "metrics.csv becomes a link to /dev/full": replaced(link("/dev/full"), METRICS),
    "the log becomes a FIFO": replaced(os.mkfifo, RUN / "log_globalrank-0_localrank-0.txt"),
    "the index is removed": replaced(nothing, Path("train.jsonl.idx")),
    "the manifest becomes another one": lambda folder: (folder / "train.jsonl").write_bytes(line() * 8),
    "the validation manifest is removed": replaced(nothing, Path("valid.jsonl")),
    "audio becomes NaN": lambda folder: (folder / "audio/3.wav").write_bytes(nan_wav()),
    "audio becomes a folder": replaced(Path.mkdir, Path("audio/3.wav")),
    "audio becomes a FIFO": replaced(os.mkfifo, Path("audio/3.wav")),
    "hparams.yaml becomes garbage": lambda folder: (folder / PARAMETERS).write_bytes(bytes(range(256))),
    "watchdog becomes a file": replaced(Path.touch, RUN / "watchdog"),
    "the lock is removed": replaced(nothing, RUN / ".lock"),
}


def interrupted(seen: str, number: signal.Signals, setup: Setup) -> Callable[[Path, list[str]], str | None]:
    """A command that is not a training: stopped once something is seen and started again, it writes the same bytes."""

    def act(folder: Path, command: list[str]) -> str | None:
        setup(folder)
        before = snapshot(folder)
        if (code := in_process(command, folder, {}, 50).code) != 0:
            return f"exit code {code} when undisturbed: {_output(folder)[-300:]}"
        expected = _new(folder, before)
        for name in set(snapshot(folder)) - set(before):
            (folder / name).unlink()
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not any(entry.is_file() for entry in path.rglob("*")):
                shutil.rmtree(path)
        process = start(command, folder, {})
        begin = time.monotonic()
        while not any(folder.glob(seen)) and process.poll() is None and time.monotonic() - begin < 50:
            time.sleep(0.002)
        process.send_signal(number)
        try:
            code = process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            return "does not end within 30 s of the signal"
        if left := _left_running(None):
            return f"left running after the signal: {left[:2]}"
        if "Traceback (most recent call last)" in _output(folder):
            return f"a traceback after the signal: {_output(folder)[-300:]}"
        if code not in {0, -number, 128 + number, 1, 2, 75, 130}:
            return f"exit code {code} after the signal"
        if (code := in_process(command, folder, {}, 50).code) != 0:
            return f"cannot be continued, exit code {code}: {_output(folder)[-300:]}"
        found = _new(folder, before)
        different = sorted(name for name in expected | found if expected.get(name) != found.get(name))
        return f"other results than undisturbed: {different[:4]}" if different else None

    return act


def _new(folder: Path, before: Mapping[str, str]) -> dict[str, str]:
    after = snapshot(folder)
    changed_files = {name: after[name] for name in after if before.get(name) != after[name]}
    return {name: text for name, text in changed_files.items() if not UNCOUNTED.search(name) and ".state" not in name}


def _many(folder: Path) -> None:
    for i in range(300):
        os.link(folder / f"audio/{i % 8}.wav", folder / f"audio/more_{i}.wav")


INTERRUPTED: list[tuple[str, str]] = [
    ("prepare audio --output m.jsonl --workers 1", "m.jsonl*"),
    ("prepare audio --output m.jsonl --workers 2 --shards 3", "audio_*"),
    ("prepare audio --output m.jsonl --workers 0 --split hash", "m.jsonl.state"),
    ("extract {M} audio out --device cpu --layers last", "out/**/*.npy"),
    ("extract {M} audio out --device cpu --layers last --format shards --shard-mb 0.05", "out/shard-00002*"),
    ("demo --num-train 6 --num-val 2 --num-noise 2 --duration 2 --synthesizer formants", "**/*.flac"),
    ("export {M} new.nemo --format nemo", "*new*"),
    ("inspect train.jsonl --examples 5 --batch-size 2", "*inspect*"),
]


def second_run(folder: Path, command: list[str]) -> str | None:
    """Two runs in one folder: the second is refused, and the first is none the worse."""
    process = start(command, folder, {})
    begin = time.monotonic()
    while not _is_seen("step 2", folder / RUN, begin) and process.poll() is None:
        time.sleep(0.002)
    out = folder.parent / "second"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    whole = [sys.executable, "-m", "nest_ssl", *command]
    with out.open("wb") as file:
        second = subprocess.run(whole, cwd=folder, stdout=file, stderr=file, timeout=60, env=environment, check=False)
    first = process.wait(60)
    text = out.read_text(errors="replace")
    if second.returncode != 1 or "using it" not in text or "Traceback" in text:
        return f"the second run: exit code {second.returncode}: {text[-300:]}"
    if first != 0:
        return f"the first run: exit code {first}: {_output(folder)[-300:]}"
    steps = sorted(losses(folder / RUN))
    return None if steps == list(range(60)) else f"rows of the first run: {steps}"


SHORT = {
    **dict.fromkeys(WORKERS, "workers"),
    **dict.fromkeys(LIMIT, "limit"),
    **dict.fromkeys(RESTARTS, "restarts"),
    "trainer.strategy=fsdp": "sharded",
    "+exp_manager.ema.enable=true": "averaged",
}
"""A trial's name is part of its TMPDIR, and the path of a socket has at most 107 bytes."""


def bounded(
    act: Callable[[Path, list[str]], str | None], limit_s: int = 120
) -> Callable[[Path, list[str]], str | None]:
    """Several commands end in time too; what they leave is ended."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError

    def run(folder: Path, command: list[str]) -> str | None:
        before = signal.signal(signal.SIGALRM, late)
        signal.alarm(limit_s)
        try:
            return act(folder, command)
        except TimeoutError:
            _left_running(None)
            return f"does not end within {limit_s} s: {_output(folder)[-300:]}"
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    return run


def kills() -> Iterator[Trial]:
    group = "kills"
    every = "+exp_manager.checkpoint_callback_params.every_n_train_steps=2"
    for name, disturb in MORE_DISTURBANCES.items():
        command = resume("trainer.max_steps=40", every, "+watchdog.floor_s=3")
        yield Trial(
            group, f"while it runs, {name}", command, Right(ended_well), act=bounded(disturbed(disturb)), limit_s=120
        )
    for kill in MORE_KILLS:
        names = " ".join(number.name[3:] for number in kill.signals)
        extra = "".join(f" {SHORT[override]}" for override in kill.overrides)
        name = f"{names} to {kill.to} at {kill.seen}, {kill.ranks} rank{'s' * (kill.ranks > 1)}{extra}"
        command = resume(f"trainer.devices={kill.ranks}", every, *kill.overrides)
        yield Trial(group, name.strip(), command, Right(ended_well), act=bounded(killed(kill)), limit_s=120)
    for text, seen in INTERRUPTED:
        numbers = (KILL, TERM, INT) if "extract" in text or "workers 1" in text else (KILL, INT)
        for number in numbers:
            command = shlex.split(text.replace("{M}", f"{Fixture.path}/model.nemo"))
            setup = _many if "audio" in text else nothing
            act = bounded(interrupted(seen, number, setup))
            yield Trial(group, f"{number.name} to {text}", command, Right(ended_well), act=act, limit_s=120)
    command = resume("trainer.max_steps=60", "trainer.check_val_every_n_epoch=100")
    yield Trial(
        group, "a second run in the same folder", command, Right(ended_well), act=bounded(second_run), limit_s=120
    )


# ---------------------------------------------------------------------------------------------------------- checkpoints


def best(folder: Path) -> Path:
    return next((folder / RUN / "checkpoints").glob("*val_loss*"))


def tensor(name: str, change: Callable[[torch.Tensor], object]) -> Callable[[dict[str, Any]], None]:
    """Change the first weight whose name ends like this."""

    def apply(content: dict[str, Any]) -> None:
        found = next(key for key in content["state_dict"] if key.endswith(name))
        content["state_dict"][found] = change(content["state_dict"][found])

    return apply


def filled(value: float, index: int = -1) -> Callable[[torch.Tensor], torch.Tensor]:
    """One element is this."""

    def change(x: torch.Tensor) -> torch.Tensor:
        new = x.clone()
        new.view(-1)[index] = value
        return new

    return change


def states(change: Callable[[dict[Any, Any]], object]) -> Callable[[dict[str, Any]], None]:
    return lambda content: (change(content["optimizer_states"][0]["state"]), None)[1]


def groups(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def apply(content: dict[str, Any]) -> None:
        content["optimizer_states"][0]["param_groups"][0].update(changes)

    return apply


def inside(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set a value far inside."""

    def apply(content: dict[str, Any]) -> None:
        place: Any = content
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return apply


def bit(share: float, number: int) -> Callable[[bytes], bytes]:
    """Another bit than the first set flips, at another place."""

    def change(data: bytes) -> bytes:
        where = int(share * (len(data) - 1))
        return patched(data, where, bytes([data[where] ^ (1 << number)]))

    return change


def members(change: Callable[[str, bytes], tuple[str, bytes] | None], **options: Any) -> Callable[[bytes], bytes]:
    """The archive is packed anew, with right checksums; members may change, vanish or have another name."""

    def apply(data: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", **options) as new:
            for info in old.infolist():
                if (found := change(info.filename, old.read(info))) is not None:
                    new.writestr(*found)
        return out.getvalue()

    return apply


def named_member(ending: str, content: bytes | None) -> Callable[[bytes], bytes]:
    def change(name: str, data: bytes) -> tuple[str, bytes] | None:
        if not name.endswith(ending):
            return name, data
        return None if content is None else (name, content)

    return members(change)


def silent(data: bytes) -> bytes:
    """A bit flips in the largest member, and its checksums say 0: "not computed"."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = max(archive.infolist(), key=lambda entry: entry.file_size)
    lengths = struct.unpack("<HH", data[info.header_offset + 26 : info.header_offset + 30])
    where = info.header_offset + 30 + sum(lengths) + info.file_size // 2
    new = patched(data, where, bytes([data[where] ^ 0x40]))
    for place in re.finditer(re.escape(struct.pack("<I", info.CRC)), data):
        new = patched(new, place.start(), bytes(4))
    return new


def duplicated(data: bytes) -> bytes:
    """Every member is there twice; the second ones are zeros."""
    out = io.BytesIO(data)
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "a") as new:
        for info in old.infolist():
            if "/data/" in info.filename:
                new.writestr(info.filename, bytes(info.file_size))
    return out.getvalue()


def encrypted(data: bytes) -> bytes:
    """Every member of the directory says so; none is."""
    return re.sub(b"(PK\x01\x02....)\0", lambda found: found[1] + b"\1", data, flags=re.DOTALL)


def legacy(change: Callable[[bytes], bytes] = bytes) -> Setup:
    """Torch's form of before 2020, which has no checksums."""

    def setup(folder: Path) -> None:
        content = torch.load(folder / LAST, weights_only=True)
        (folder / LAST).unlink()
        file = io.BytesIO()
        torch.save(content, file, _use_new_zipfile_serialization=False)
        (folder / LAST).write_bytes(change(file.getvalue()))

    return setup


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(here)


def folder_of(**files: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        for name, content in files.items():
            (path / name.replace("_DOT_", ".")).write_bytes(content)

    return make


def each(*setups: tuple[Callable[[Path], object], Path]) -> Setup:
    return both(*(replaced(make, path) for make, path in setups))


def no_checkpoints(make: Callable[[Path], object]) -> Setup:
    """None of the three is what it was."""

    def setup(folder: Path) -> None:
        for path in (folder / LAST, folder / BEFORE, best(folder)):
            path.unlink()
            make(path)

    return setup


POSITIONS = [
    (0.02, 0),
    (0.08, 7),
    (0.12, 6),
    (0.22, 1),
    (0.36, 5),
    (0.41, 3),
    (0.55, 7),
    (0.67, 0),
    (0.83, 6),
    (0.94, 1),
]
POSITIONS += [(0.985, 3), (0.995, 0)]

STILL_RESUMES: dict[str, Setup] = {
    **{f"bit {number} flipped at {share:.1%}": on_bytes(bit(share, number), LAST) for share, number in POSITIONS},
    "a flipped bit under a checksum of 0": on_bytes(silent, LAST),
    "a member that is missing": on_bytes(named_member("/data/7", None), LAST),
    "a member that is short": on_bytes(named_member("/data/7", b"x"), LAST),
    "no pickle in it": on_bytes(named_member("data.pkl", None), LAST),
    "a pickle that runs a command in it": on_bytes(lambda data: _with_pickle(data, EVIL), LAST),
    "a pickle of text in it": on_bytes(lambda data: _with_pickle(data, b"hello"), LAST),
    "a page of zeros in it": on_bytes(lambda data: patched(data, 100_000, bytes(4096)), LAST),
    "its end is zeros": on_bytes(lambda data: data[:-4096] + bytes(4096), LAST),
    "its beginning is missing": on_bytes(lambda data: data[4096:], LAST),
    "bzip2": on_bytes(bz2.compress, LAST),
    "a tar": on_bytes(lambda data: bytes(512) + data, LAST),
    "a socket": replaced(_socket, LAST),
    "a link to /dev/null": replaced(link("/dev/null"), LAST),
    "a link to a FIFO": both(replaced(link("../../../fifo"), LAST), lambda folder: os.mkfifo(folder / "fifo")),
    "a link to its own folder": replaced(link("."), LAST),
    "a link to hparams.yaml": replaced(link("../hparams.yaml"), LAST),
    "an empty folder": replaced(Path.mkdir, LAST),
    "a folder of garbage": replaced(folder_of(__0_0_DOT_distcp=b"x", rest_DOT_pt=b"x", _DOT_metadata=b"x"), LAST),
    "a folder whose metadata run a command": replaced(folder_of(rest_DOT_pt=EVIL, _DOT_metadata=EVIL), LAST),
    "an evil one before it": on_bytes(always(EVIL), BEFORE),
    "a FIFO before it": replaced(os.mkfifo, BEFORE),
    "a folder before it": replaced(Path.mkdir, BEFORE),
    "missing, and a FIFO before it": each((nothing, LAST), (os.mkfifo, BEFORE)),
    "dangling, and a dangling one before it": each((link("nowhere"), LAST), (link("nowhere"), BEFORE)),
    "a FIFO, and nothing before it": each((os.mkfifo, LAST), (nothing, BEFORE)),
    "a FIFO, and garbage before it": both(replaced(os.mkfifo, LAST), on_bytes(zeros, BEFORE)),
    "the best is a FIFO": lambda folder: replaced(os.mkfifo, best(folder))(folder),
    "the best is garbage": lambda folder: replaced(lambda path: path.write_bytes(b"x"), best(folder))(folder),
    "an odd file among them": lambda folder: (folder / RUN / "checkpoints/x--val_loss=nan-epoch=x-step=y.ckpt").touch(),
    "a best of step 10^9 that is empty": lambda folder: (
        folder / RUN / "checkpoints/NEST-FastConformer-SSL--val_loss=0.0000-epoch=9-step=1000000000.ckpt"
    ).touch(),
    "a link in a circle among them": lambda folder: (folder / RUN / "checkpoints/a.ckpt").symlink_to("a.ckpt"),
    ".saved is huge": on_bytes(always(b"step " + b"9" * 10_000), SAVED),
    ".saved has escape codes": on_bytes(always(b"\x1b[31mstep 6"), SAVED),
    ".saved is behind": on_bytes(always(b"step -1\n"), SAVED),
    "hparams.yaml has anchors that multiply": on_bytes(always(ANCHORS), PARAMETERS),
    "hparams.yaml is a number": on_bytes(always(b"7"), PARAMETERS),
    "hparams.yaml has escape codes": on_bytes(
        lambda data: data.replace(b"weight_decay: 0.001", b'weight_decay: "\\e[31mred\\a"'), PARAMETERS
    ),
    "hparams.yaml has other types": on_bytes(
        lambda data: data.replace(b"betas:", b"betas: {a: 1}\n    bets:"), PARAMETERS
    ),
    "report.html is a FIFO": replaced(os.mkfifo, RUN / "report.html"),
    "node0.json is a FIFO": replaced(os.mkfifo, RUN / "watchdog/node0.json"),
    "node0.json is a folder": replaced(Path.mkdir, RUN / "watchdog/node0.json"),
    ".lock names a live process": on_bytes(always(b"1 vm"), RUN / ".lock"),
    # settings that are saved, but come from the command
    "a saved rate of NaN": changed(groups(lr=math.nan, initial_lr=math.nan)),
    "saved betas": changed(groups(betas=(0.1, 0.2))),
    "a saved weight_decay": changed(groups(weight_decay=99.0)),
    "a saved eps": changed(groups(eps=1.0)),
    "a saved cfg of another model": changed(inside("hyper_parameters", "cfg", "encoder", "d_model", value=64)),
    "a saved cfg with escape codes": changed(inside("hyper_parameters", "cfg", "\x1b[31m", value="\x1b]0;x\x07")),
    "an unknown key": changed(_store("x\x1b[31m", 1)),
    "another version": changed(_store("nest_ssl_version", "999.0\x1b[31m")),
    "a weight in float64": changed(_weights(lambda x: x.double())),
    "a weight that needs a gradient": changed(_weights(lambda x: torch.nn.Parameter(x))),
    "a weight with other strides": changed(_weights(lambda x: x.T.contiguous().T)),
}
"""Resumes with the losses of the undisturbed run, from last.ckpt or an earlier one."""

ODD_PROGRESS: dict[tuple[Any, ...], tuple[Any, ...]] = {
    ("progress", "batches_seen"): (-1, "x", 10**15, math.nan),
    ("progress", "epoch_is_over"): ("x",),
    ("progress", "validation_is_due"): (7,),
    ("progress", "optimizer"): ("SGD", 7, None),
    ("progress", "scaler"): ({"scale": math.nan}, "x"),
    ("progress", "average"): ("x", {"decay": math.nan}),
    ("progress", "memory"): (None, "x", []),
    ("progress", "memory", "best"): (None, [1], {"x": math.nan}, {"x\x1b[31m": -1e9}, {7: "x"}),
    ("progress", "memory", "early_stopping"): ("x", {"best": math.nan}),
    ("progress", "memory", "elapsed_s"): (-1e9, math.nan, "x"),
    ("progress", "memory", "resumed_from"): ("/dev/zero", 7),
    ("data_position", "batch"): (-1, 0.5, math.nan, "x"),
    ("data_position", "epoch"): (-1, 10**9, "x"),
    ("data_position", "world_size"): (0, -1, "x"),
    ("data_position", "plan_hash"): (None, 7, "\x1b[31m"),
    ("data_position", "bad_data"): (None, "x", {"num_read": -5, "num_bad": {"x": 10**9}}),
    ("epoch_means",): (None, "x", {"epoch": "x"}),
    ("epoch_means", "weights"): (None, {"train_loss_epoch": "x"}),
    ("lr_schedulers",): ([], None, [{}, {}]),
    ("lr_schedulers", 0, "last_epoch"): (-1, 10**12, "x", None, math.nan),
    ("lr_schedulers", 0, "settings"): (None, {"base_lrs": [math.nan]}),
    ("global_step",): (0, 2**70, True, [6]),
    ("epoch",): (0.5, None, math.nan),
}

RESUMES_OR_NOT: dict[str, Setup] = {
    ".saved is a FIFO": replaced(os.mkfifo, SAVED),
    ".saved is a link to /dev/zero": replaced(link("/dev/zero"), SAVED),
    "hparams.yaml is a FIFO": replaced(os.mkfifo, PARAMETERS),
    "hparams.yaml is a link to /dev/zero": replaced(link("/dev/zero"), PARAMETERS),
    "git-commit.txt is a FIFO": replaced(os.mkfifo, RUN / "git-commit.txt"),
    ".lock has garbage": on_bytes(always(bytes(range(256))), RUN / ".lock"),
    ".lock is a link to /dev/zero": replaced(link("/dev/zero"), RUN / ".lock"),
    # settings of the optimizer that are saved and must not take effect
    "saved maximize": changed(groups(maximize=True)),
    "saved amsgrad": changed(groups(amsgrad=True)),
    "saved decoupled_weight_decay": changed(groups(decoupled_weight_decay=False)),
    "saved capturable": changed(groups(capturable=True)),
    "saved differentiable": changed(groups(differentiable=True)),
    "saved fused and foreach": changed(groups(fused=True, foreach=True)),
    "saved garbage in the group": changed(groups(lr="\x1b[31m", betas=None, foo=[1])),
    "no group": changed(inside("optimizer_states", 0, "param_groups", value=[])),
    "params are permuted": changed(
        lambda content: content["optimizer_states"][0]["param_groups"][0]["params"].reverse()
    ),
    "params are too many": changed(groups(params=list(range(999)))),
    # its state
    "infinite moments": changed(states(lambda state: state[0].update(exp_avg=state[0]["exp_avg"] / 0))),
    "a NaN in the last moment": changed(
        states(lambda s: s[max(s)].update(exp_avg=filled(math.nan)(s[max(s)]["exp_avg"])))
    ),
    "negative second moments": changed(states(lambda state: state[0].update(exp_avg_sq=-1 - state[0]["exp_avg_sq"]))),
    "bool moments": changed(states(lambda state: state[0].update(exp_avg=state[0]["exp_avg"] > 0))),
    "moments in bfloat16": changed(states(lambda state: state[0].update(exp_avg=state[0]["exp_avg"].bfloat16()))),
    "sparse moments": changed(states(lambda state: state[0].update(exp_avg=state[0]["exp_avg"].to_sparse()))),
    "a step of -5": changed(states(lambda state: state[0].update(step=torch.tensor(-5.0)))),
    "a step of NaN": changed(states(lambda state: state[0].update(step=torch.tensor(math.nan)))),
    "a step of text": changed(states(lambda state: state[0].update(step="six"))),
    "no second moments": changed(states(lambda state: state[0].pop("exp_avg_sq"))),
    "a parameter without moments": changed(states(lambda state: state.pop(5))),
    "moments of nobody": changed(states(lambda state: state.update({9999: state[0]}))),
    "moments under a name": changed(states(lambda state: state.update(x=state.pop(0)))),
    # weights
    "a NaN in the last bias": changed(tensor("decoder_layers.0.bias", filled(math.nan))),
    "a NaN in running_var": changed(tensor("running_var", filled(math.nan))),
    "a negative running_var": changed(tensor("running_var", lambda x: -x - 1)),
    "an infinite running_mean": changed(tensor("running_mean", filled(math.inf))),
    "a NaN in the codebook": changed(tensor("codebooks", filled(math.nan))),
    "a NaN in the filterbank": changed(tensor("featurizer.fb", filled(math.nan))),
    "an infinite mask": changed(tensor("mask_embedding", filled(-math.inf))),
    "1e300 in float64": changed(_weights(lambda x: filled(1e300)(x.double()))),
    "an infinity in float16": changed(_weights(lambda x: filled(math.inf)(x.half()))),
    "uint8": changed(_weights(lambda x: x.to(torch.uint8))),
    "int16": changed(tensor("norm_out.bias", lambda x: x.to(torch.int16))),
    "a bool codebook": changed(tensor("codebooks", lambda x: x > 0)),
    "complex128": changed(_weights(lambda x: x.to(torch.complex128))),
    "float8": changed(_weights(lambda x: x.to(torch.float8_e4m3fn))),
    "no elements": changed(_weights(lambda x: x[:0])),
    "one dimension more": changed(_weights(lambda x: x[None])),
    "compressed rows": changed(_weights(lambda x: x.to_sparse_csr())),
    "a number": changed(_weights(lambda x: 0.5)),
    "a list of numbers": changed(_weights(lambda x: x.tolist())),
    "a negative num_batches_tracked": changed(tensor("num_batches_tracked", lambda x: x - 10**6)),
    "two names exchanged with other shapes": changed(
        lambda content: content["state_dict"].update(
            {
                "encoder.layers.0.feed_forward1.linear1.weight": content["state_dict"][
                    "decoder.decoder_layers.0.weight"
                ],
                "decoder.decoder_layers.0.weight": content["state_dict"][
                    "encoder.layers.0.feed_forward1.linear1.weight"
                ],
            }
        )
    ),
    "every name with model.": changed(
        lambda content: content.update(state_dict={f"model.{key}": x for key, x in content["state_dict"].items()})
    ),
    "names in capitals": changed(
        lambda content: content.update(state_dict={key.upper(): x for key, x in content["state_dict"].items()})
    ),
    # progress
    **{
        f"{'.'.join(map(str, keys))} is {value!r}": changed(inside(*keys, value=value))
        for keys, values in ODD_PROGRESS.items()
        for value in values
    },
    # archives
    "torch's old form": legacy(),
    "torch's old form with a flipped bit": legacy(bit(0.5, 6)),
    "torch's old form, cut": legacy(cut(0.7)),
    "a deflated archive": on_bytes(members(lambda name, data: (name, data), compression=zipfile.ZIP_DEFLATED), LAST),
    "an LZMA archive": on_bytes(members(lambda name, data: (name, data), compression=zipfile.ZIP_LZMA), LAST),
    "every member twice, then zeros": on_bytes(duplicated, LAST),
    "an encrypted archive": on_bytes(encrypted, LAST),
    "the other byte order": on_bytes(named_member("byteorder", b"big"), LAST),
    "version 999": on_bytes(named_member("/version", b"999\n"), LAST),
    "bytes before the archive": on_bytes(lambda data: b"#!/bin/sh\nexit\n" + data, LAST),
    "a member that leaves it": on_bytes(
        members(lambda name, data: (name.replace("/data/7", "/../../pwned"), data)), LAST
    ),
    "another top folder": on_bytes(members(lambda name, data: (name.replace("last/", "x/"), data)), LAST),
    "a pickle of protocol 5": on_bytes(lambda data: _with_pickle(data, pickle.dumps({"a": 1}, protocol=5)), LAST),
    "a pickle of a module": changed(lambda content: {"state_dict": content["state_dict"], "x": Evil()}),
}
"""Resumes with the right losses, or says what is wrong."""

NEVER_AGAIN: dict[str, Setup] = {
    "all FIFOs": no_checkpoints(os.mkfifo),
    "all dangling": no_checkpoints(link("nowhere")),
    "all empty folders": no_checkpoints(Path.mkdir),
    "all evil": no_checkpoints(lambda path: path.write_bytes(EVIL)),
    "all of /dev/null": no_checkpoints(link("/dev/null")),
    "all sockets": no_checkpoints(lambda path: path.symlink_to("/proc/self/fd/0")),
    "renamed to .bak": lambda folder: [
        path.rename(path.with_name(path.name + ".bak")) for path in (folder / RUN / "checkpoints").glob("*.ckpt")
    ],
    "the folder renamed": lambda folder: (folder / RUN / "checkpoints").rename(folder / RUN / "checkpoint"),
    "the folder is a FIFO": replaced(os.mkfifo, RUN / "checkpoints"),
    "the folder is a link in a circle": replaced(link("checkpoints"), RUN / "checkpoints"),
    "the folder is a link to an empty one": both(
        replaced(link("../../empty"), RUN / "checkpoints"), lambda folder: (folder / "empty").mkdir()
    ),
}
"""Refused: the run had saved, and there is nothing to resume from."""

WITHOUT_TRACE: dict[str, Setup] = {
    "no checkpoint and no .saved": both(no_checkpoints(nothing), replaced(nothing, SAVED)),
    "no checkpoints folder and no .saved": each((nothing, RUN / "checkpoints"), (nothing, SAVED)),
    "only metrics.csv is left": lambda folder: each(
        *((nothing, path) for path in (folder / RUN).iterdir() if path.name != "metrics.csv")
    )(folder),
    "dangling checkpoints and no .saved": both(no_checkpoints(link("nowhere")), replaced(nothing, SAVED)),
    "FIFOs and no .saved": both(no_checkpoints(os.mkfifo), replaced(nothing, SAVED)),
    "empty files and no .saved": both(no_checkpoints(Path.touch), replaced(nothing, SAVED)),
    "garbage in .saved, no checkpoint": both(no_checkpoints(nothing), on_bytes(always(b"hello"), SAVED)),
    "an empty .saved, no checkpoint": both(no_checkpoints(nothing), on_bytes(cut(0), SAVED)),
}
"""Refused, or one run from step 0 on whose metrics are not mixed with the old ones."""


def not_mixed(folder: Path, outcome: Outcome) -> str | None:
    steps = [row.split(",")[0] for row in (folder / METRICS).read_text().splitlines()[1:]]
    if steps != sorted(steps, key=int):
        return f"metrics are mixed: steps {steps}"
    return None if losses(folder / RUN) == losses(Fixture.path / "runs/whole") else "other losses than from step 0 on"


def left_alone(folder: Path, outcome: Outcome) -> str | None:
    """The old run is as it was, and there is a new one."""
    if (folder / METRICS).read_bytes() != (Fixture.path / METRICS).read_bytes():
        return "the old run was changed"
    new = [path.parent for path in folder.rglob("metrics.csv") if path != folder / METRICS]
    whole = losses(Fixture.path / "runs/whole")
    return None if len(new) == 1 and losses(new[0]) == whole else f"{len(new)} new runs, or other losses"


MORE_METRICS: dict[str, Callable[[bytes], bytes]] = {
    "other columns": lambda data: data.replace(b"train_loss", b"loss"),
    "columns exchanged": lambda data: data.replace(b"step,time", b"time,step"),
    "a byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "an open quote": lambda data: data + b'"',
    "a field of 1 MB": lambda data: data + b"6," + b"x" * 1_000_000,
    "negative steps": lambda data: data + b"-1,1,2\n",
    "a step of 400 digits": lambda data: data + b"1" * 400 + b",1,2\n",
    "a step of NaN": lambda data: data + b"nan,1,2\n",
    "NULs": lambda data: data + bytes(4096),
    "a column of escape codes": lambda data: data.replace(b"accuracy", b"\x1b[31maccuracy", 1),
    "rows out of order": lambda data: b"\n".join([data.split(b"\n")[0], *data.split(b"\n")[:0:-1], b""]),
    "two headers": lambda data: data.splitlines(keepends=True)[0] + data,
    "no header": lambda data: b"".join(data.splitlines(keepends=True)[1:]),
    "too many fields": lambda data: data.replace(b"\n", b",,,,,,\n"),
}

CHANGED_KEYS: dict[str, tuple[tuple[str, ...], Expected]] = {
    # settings of the optimizer and what belongs to it
    "no weight_decay": (("model.optim.weight_decay=0",), Right(said("model.optim.weight_decay"))),
    "a larger weight_decay": (("model.optim.weight_decay=5",), takes_effect("model.optim.weight_decay")),
    "the second beta": (("model.optim.betas=[0.9,0.5]",), takes_effect("model.optim.betas")),
    "the first beta": (("model.optim.betas=[0.1,0.98]",), takes_effect("model.optim.betas")),
    "eps of 1e-3": (("+model.optim.eps=1e-3",), takes_effect("model.optim.eps")),
    "amsgrad": (
        ("+model.optim.amsgrad=true",),
        Either(Refused(("amsgrad",)), Right(said("model.optim.amsgrad"))),
    ),
    "maximize": (
        ("+model.optim.maximize=true",),
        Either(Refused(("maximize",)), takes_effect("model.optim.maximize")),
    ),
    "lr and weight_decay": (
        ("model.optim.lr=0.2", "model.optim.weight_decay=1"),
        takes_effect("model.optim.weight_decay"),
    ),
    "lr by interpolation": (("model.optim.lr=${model.optim.sched.warmup_steps}",), takes_effect("model.optim.lr")),
    "min_lr": (("model.optim.sched.min_lr=0.02",), takes_effect("model.optim.sched.min_lr")),
    "warmup_steps": (("model.optim.sched.warmup_steps=50",), takes_effect("model.optim.sched.warmup_steps")),
    "d_model of the schedule": (("model.optim.sched.d_model=8",), takes_effect("model.optim.sched.d_model")),
    "no schedule": (("model.optim.sched=null", "model.optim.lr=0.001"), Right(said("sched", "takes effect"))),
    "another schedule": (
        ("model.optim.sched.name=CosineAnnealing", "model.optim.sched.d_model=null"),
        takes_effect("model.optim.sched.name"),
    ),
    "adam": (("model.optim.name=adam",), Either(Refused(("optim",)), takes_effect("model.optim.name"))),
    "lr of NaN": (("model.optim.lr=nan",), Refused(("lr",))),
    "a negative weight_decay": (("model.optim.weight_decay=-1",), Refused(("weight_decay",))),
    "negative clipping": (("trainer.gradient_clip_val=-2",), Refused(("gradient_clip_val",))),
    "clipping by value": (
        ("trainer.gradient_clip_val=1e-6", "trainer.gradient_clip_algorithm=value"),
        takes_effect("trainer.gradient_clip_val"),
    ),
    "accumulation": (("trainer.accumulate_grad_batches=2",), takes_effect("trainer.accumulate_grad_batches")),
    # the model
    **{
        key: ((key,), Refused((key.rpartition("=")[0].rpartition(".")[2] + "|shape|feat_in",)))
        for key in (
            *("model.encoder.conv_kernel_size=7", "model.encoder.use_bias=false", "model.encoder.untie_biases=false"),
            *("model.encoder.n_heads=2", "model.encoder.n_heads=8", "model.encoder.ff_expansion_factor=2"),
            *("model.encoder.conv_norm_type=layer_norm", "model.encoder.self_attention_model=abs_pos"),
            *("model.encoder.subsampling=striding", "model.encoder.subsampling_conv_channels=16", "model.code_dim=8"),
            *("model.encoder.feat_out=16", "model.mask_position=post_conv", "model.num_books=2"),
            *("model.encoder.subsampling_factor=4", "model.decoder.use_bias=false", "model.preprocessor.n_fft=1024"),
            "model.encoder.causal_downsampling=true",
        )
    },
    **{
        key: ((key,), Either(Refused((key.partition("=")[0].rpartition(".")[2],)), takes_effect(key.partition("=")[0])))
        for key in (
            *(
                "model.encoder.dropout_att=0.9",
                "model.encoder.dropout_pre_encoder=0.9",
                "model.encoder.dropout_emb=0.9",
            ),
            *("model.encoder.stochastic_depth_drop_prob=0.9", "model.masking.block_size=20"),
            *(
                "model.loss.mask_threshold=0.2",
                "model.preprocessor.dither=0.1",
                "model.preprocessor.normalize=all_features",
            ),
            *(
                "model.preprocessor.preemph=0.5",
                "model.preprocessor.mag_power=1.0",
                "model.preprocessor.window=hamming",
            ),
            *("model.encoder.xscaling=false", "model.encoder.att_context_size=[1,1]"),
            *("model.train_ds.batch_augmentor.prob=1.0", "model.train_ds.noise_manifest=valid.jsonl"),
            *("model.train_ds.shuffle=false", "model.preprocessor.lowfreq=500", "model.masking.allow_overlap=false"),
            *("model.train_ds.seed=9", "model.preprocessor.highfreq=4000", "model.preprocessor.mel_norm=null"),
        )
    },
    # the data and the run
    "sample rates that differ": (("model.train_ds.sample_rate=8000",), Refused(("sample_rate",))),
    "nothing masked": (("model.masking.mask_prob=0",), Refused(("mask",))),
    "one code": (("model.num_classes=1",), Refused(("num_classes",))),
    "lhotse": (("+model.train_ds.use_lhotse=true",), Either(Refused(("lhotse",)), Right(said("use_lhotse")))),
    "drop_last": (("model.train_ds.drop_last=false", "model.train_ds.batch_size=3"), Right(said("batch_size"))),
    "shorter utterances": (("model.train_ds.max_duration=2",), Right(said("max_duration"))),
    "no utterance": (("model.train_ds.max_duration=1.1",), Refused(("max_duration",))),
    "fewer epochs than done": (
        ("trainer.max_epochs=1",),
        Either(Refused(("max_epochs",)), Right(said("resumed at step"))),
    ),
    "the steps it has": (("trainer.max_steps=6",), Right(said("resumed at step"))),
    "a limit of train batches": (("trainer.limit_train_batches=2",), Right(said("limit_train_batches"))),
    "no validation": (("~model.validation_ds",), Right(said("validation_ds"))),
    "another monitor": (
        (
            "exp_manager.checkpoint_callback_params.monitor=val_accuracy",
            "exp_manager.checkpoint_callback_params.mode=max",
        ),
        Either(Refused(("monitor",)), Right(said("monitor"))),
    ),
    "resume_if_exists=false": (
        ("exp_manager.resume_if_exists=false",),
        Either(Refused(("resume_if_exists|exists",)), Right(left_alone)),
    ),
    "two sharded ranks": (
        ("trainer.devices=2", "trainer.strategy=fsdp"),
        Right(said("resumed at step", "was 1", then=ended_well)),
    ),
    "two ranks": (("trainer.devices=2",), Right(said("resumed at step", "was 1"))),
    "precision 16": (("trainer.precision=16",), Either(Refused(("precision",)), Right(said("precision")))),
}

DELETIONS: dict[str, str] = {
    "an absolute path": "{folder}/precious.txt",
    "a path that leaves the folder": "../../../precious.txt",
    "the folder of the data": "{folder}/audio",
    "a link": "{folder}/linked.txt",
}


def best_is(path: str) -> Setup:
    """The checkpoint says that the best so far is a file of somebody else, and that its loss was high."""

    def setup(folder: Path) -> None:
        (folder / "precious.txt").write_text("precious")
        (folder / "linked.txt").symlink_to("precious.txt")
        changed(inside("progress", "memory", "best", value={path.replace("{folder}", str(folder)): 99.0}))(folder)

    return setup


def nothing_deleted(folder: Path, outcome: Outcome) -> str | None:
    for name in ("precious.txt", "linked.txt", "audio/0.wav"):
        if not (folder / name).exists():
            return f"deleted {name}"
    return trained(folder, outcome)


SHARD_DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes] | None]] = {
    "a shard with a flipped bit": ("__0_0.distcp", bit(0.5, 6)),
    "the other shard with a flipped bit": ("__1_0.distcp", bit(0.7, 5)),
    "a shard cut off": ("__1_0.distcp", cut(0.6)),
    "a shard missing": ("__1_0.distcp", None),
    "a shard of zeros": ("__0_0.distcp", zeros),
    "an evil shard": ("__0_0.distcp", always(EVIL)),
    "rest.pt missing": ("rest.pt", None),
    "rest.pt with a flipped bit": ("rest.pt", bit(0.5, 2)),
    "rest.pt evil": ("rest.pt", always(EVIL)),
    "metadata missing": (".metadata", None),
    "metadata cut": (".metadata", cut(0.5)),
    "metadata that run a command": (".metadata", always(EVIL)),
    "metadata with a flipped bit": (".metadata", bit(0.5, 1)),
    "metadata with another class": (".metadata", always(b'cbuiltins\neval\n(S\'open("../pwned", "w")\'\ntR.')),
}


def sharded(name: str, change: Callable[[bytes], bytes] | None, *, everywhere: bool = False) -> Setup:
    def setup(folder: Path) -> None:
        shutil.copytree(Fixture.path / "runs/sharded", folder / RUN)
        places = sorted((folder / RUN / "checkpoints").glob("*.ckpt")) if everywhere else [folder / LAST]
        for place in places:
            data = (place / name).read_bytes()
            (place / name).unlink()
            if change:
                (place / name).write_bytes(change(data))

    return setup


def fell_back(folder: Path, outcome: Outcome) -> str | None:
    """It resumed, but not from what is damaged."""
    if "resumed at step" not in outcome.text:
        return "it does not say that it resumed"
    if re.search(r"resumed at step \d+ from last\.ckpt", outcome.text) and "passed over" not in outcome.text:
        return "a damaged checkpoint was resumed without a word"
    return trained(folder, outcome)


INCIDENT = RUN / "incidents/20260101-000000-rank1-\x1b[31mx"

RUN_FILES: dict[str, Setup] = {
    "node0.json cut": on_bytes(cut(0.5), RUN / "watchdog/node0.json"),
    "node0.json a list": on_bytes(always(b"[1, 2]"), RUN / "watchdog/node0.json"),
    "node0.json binary": on_bytes(always(bytes(range(256))), RUN / "watchdog/node0.json"),
    "node0.json with other types": on_bytes(
        always(b'{"time": "x", "host": 3, "ranks": {"a": null}, "settings": []}'), RUN / "watchdog/node0.json"
    ),
    "node0.json with escape codes": on_bytes(
        lambda data: data.replace(b'"host": "', b'"host": "\\u001b[31m'), RUN / "watchdog/node0.json"
    ),
    "node0.json a FIFO": replaced(os.mkfifo, RUN / "watchdog/node0.json"),
    "node0.json huge": on_bytes(always(b'{"a":' * 100_000), RUN / "watchdog/node0.json"),
    "watchdog a dangling link": replaced(link("nowhere"), RUN / "watchdog"),
    "hparams.yaml binary": on_bytes(always(bytes(range(256))), PARAMETERS),
    "hparams.yaml with an object": on_bytes(
        always(b"a: !!python/object/apply:os.system ['touch ../pwned']"), PARAMETERS
    ),
    "hparams.yaml without a model": on_bytes(always(b"name: x\n"), PARAMETERS),
    "metrics.csv binary": on_bytes(always(bytes(range(256))), METRICS),
    "metrics.csv with infinities": on_bytes(lambda data: re.sub(rb"\n(\d+),([^,]*),", rb"\n\1,inf,", data), METRICS),
    "metrics.csv with 1e308": on_bytes(lambda data: re.sub(rb"4\.\d+", b"1e308", data), METRICS),
    "metrics.csv with markup": on_bytes(
        lambda data: data.replace(b"accuracy", b"<script>alert(1)</script>", 1), METRICS
    ),
    "metrics.csv a FIFO": replaced(os.mkfifo, METRICS),
    "metrics.csv empty": on_bytes(cut(0), METRICS),
    "metrics.csv with one row of step 10^18": on_bytes(lambda data: data + b"1" + b"0" * 18 + b",1,2\n", METRICS),
    "last.ckpt evil": on_bytes(always(EVIL), LAST),
    "last.ckpt a FIFO": replaced(os.mkfifo, LAST),
    "last.ckpt of NaN": changed(_weights(lambda x: x * math.nan)),
    "git-commit.txt with markup": on_bytes(always(b"<script>alert(1)</script>\x1b[31m"), RUN / "git-commit.txt"),
    "git-commit.txt of 50 MB": on_bytes(always(b"x" * 50_000_000), RUN / "git-commit.txt"),
    "incidents a file": replaced(Path.touch, RUN / "incidents"),
    "incidents with garbage": both(
        lambda folder: (folder / INCIDENT).mkdir(parents=True),
        lambda folder: (folder / INCIDENT / "report.txt").write_bytes(b"\x1b[31m\xff\0"),
    ),
}


def page(folder: Path, outcome: Outcome) -> str | None:
    path = folder / RUN / "report.html"
    return "a script from a file" if path.is_file() and b"<script>alert(1)" in path.read_bytes() else None


def checkpoints() -> Iterator[Trial]:
    group = "checkpoints"
    words = "last.ckpt|checkpoint|.saved|hparams|.lock|watchdog|optim|git-commit|report"
    for table, expected in (
        (STILL_RESUMES, Right(resumed)),
        (RESUMES_OR_NOT, Either(Refused((words,)), Right(resumed))),
        (NEVER_AGAIN, Refused(("checkpoint",))),
        (WITHOUT_TRACE, Either(Refused(("checkpoint|.saved|metrics",)), Right(not_mixed))),
    ):
        for name, damage in table.items():
            yield Trial(group, f"again: {name}", resume(), expected, both(Fixture.run, damage))
    for name, change in MORE_METRICS.items():
        expected = Either(Refused(("metrics.csv",)), Right(_tail))
        yield Trial(group, f"metrics with {name}", resume(), expected, both(Fixture.run, on_bytes(change, METRICS)))
    for name, (overrides, expected) in CHANGED_KEYS.items():
        yield Trial(group, f"changed on resume: {name}", resume(*overrides), expected, Fixture.run)
    for name, path in DELETIONS.items():
        setup = both(Fixture.run, best_is(path))
        expected = Either(Refused((words,)), Right(nothing_deleted))
        yield Trial(group, f"the best is {name}", resume("trainer.max_steps=12"), expected, setup)
    for name, (file, change_or_none) in SHARD_DAMAGES.items():
        setup = sharded(file, change_or_none)
        expected = Either(Refused((words,)), Right(fell_back))
        yield Trial(group, f"sharded: {name}", resume("trainer.max_steps=8"), expected, setup)
        setup = sharded(file, change_or_none, everywhere=True)
        yield Trial(
            group, f"sharded, all of them: {name}", resume("trainer.max_steps=8"), Refused(("checkpoint",)), setup
        )
    for verb in ("report", "doctor"):
        for name, damage in RUN_FILES.items():
            expected = Either(Refused((), partial=True), Right(page))
            yield Trial(group, f"{verb}: {name}", [verb, str(RUN)], expected, both(Fixture.run, damage))


# ---------------------------------------------------------------------------------------------------------- model files


def archive(*entries: tuple[str, bytes], pax: Mapping[str, str] | None = None, **options: Any) -> Setup:
    """x.nemo with these members, in this order, under names that may repeat."""

    def setup(folder: Path) -> None:
        with tarfile.open(folder / "x.nemo", "w", format=tarfile.PAX_FORMAT) as tar:
            for name, data in entries:
                member = tarfile.TarInfo(name)
                member.size = len(data)
                member.pax_headers = dict(pax or {})
                for key, value in options.items():
                    setattr(member, key, value)
                tar.addfile(member, io.BytesIO(data))

    return setup


def text_of(change: Callable[[bytes], bytes]) -> Setup:
    """The configuration of a .nemo file is other text."""

    def setup(folder: Path) -> None:
        parts = nemo_members()
        nemo({**parts, "model_config.yaml": change(parts["model_config.yaml"])})(folder)

    return setup


CONFIG, WEIGHTS = "model_config.yaml", "model_weights.ckpt"


def nemo_tricks() -> tuple[dict[str, Setup], dict[str, Setup]]:
    """What must be refused, and what may turn out to be harmless."""
    whole = nemo_members()
    config, weights = (CONFIG, whole[CONFIG]), (WEIGHTS, whole[WEIGHTS])
    evil = (WEIGHTS, EVIL)
    nan = io.BytesIO()
    torch.save({"encoder.layers.0.norm_out.bias": torch.full((32,), math.nan)}, nan)
    three = (CONFIG, whole[CONFIG].replace(b"n_layers: 2", b"n_layers: 3"))
    bad = {
        "weights that are a link in it": nemo(
            {CONFIG: whole[CONFIG], "b.ckpt": whole[WEIGHTS]}, special(WEIGHTS, tarfile.SYMTYPE, "b.ckpt")
        ),
        "weights that are a link to themselves": nemo(
            {CONFIG: whole[CONFIG]}, special(WEIGHTS, tarfile.SYMTYPE, WEIGHTS)
        ),
        "weights that are a block device": nemo({CONFIG: whole[CONFIG]}, special(WEIGHTS, tarfile.BLKTYPE)),
        "only names in folders": archive(("a/" + CONFIG, whole[CONFIG]), ("b/" + WEIGHTS, whole[WEIGHTS])),
        "names in capitals": archive((CONFIG.upper(), whole[CONFIG]), (WEIGHTS.upper(), whole[WEIGHTS])),
        "weights of NaN alone": archive(config, (WEIGHTS, nan.getvalue())),
        "empty weights": archive(config, (WEIGHTS, b"")),
        "weights that are the configuration": archive(config, (WEIGHTS, whole[CONFIG])),
        "a zip": lambda folder: _zip(folder, whole),
        "a configuration that is JSON of a list": text_of(always(b"[1, 2]")),
        "a configuration that is text": text_of(always(b"hello")),
        "a configuration that is null": text_of(always(b"null")),
        "a configuration with NULs": text_of(lambda data: data + bytes(10)),
        "!!python/name": text_of(lambda data: data + b"\nx: !!python/name:os.system\n"),
        "!!python/module": text_of(lambda data: data + b"\nx: !!python/module:os\n"),
        "!!python/object/new": text_of(lambda data: data + b"\nx: !!python/object/new:os.system ['touch ../pwned']\n"),
        "the environment with a default": yaml("features: 80", "features: ${oc.env:NOWHERE,80}"),
        "an interpolation in a circle": yaml("features: 80", "features: ${preprocessor.features}"),
        "an unknown resolver": yaml("features: 80", "features: ${evil:1}"),
        "a missing value": yaml("features: 80", "features: ???"),
        "features of 81": yaml("features: 80", "features: 81"),
        "features that are a list": yaml("features: 80", "features: [80]"),
        "n_fft of 64": yaml("n_fft: 512", "n_fft: 64"),
        "n_fft of 10^12": yaml("n_fft: 512", "n_fft: 1000000000000"),
        "a stride of 0": yaml("window_stride: 0.01", "window_stride: 0"),
        "a stride of NaN": yaml("window_stride: 0.01", "window_stride: .nan"),
        "a stride of -1": yaml("window_stride: 0.01", "window_stride: -1"),
        "a window of an hour": yaml("window_size: 0.025", "window_size: 3600"),
        "n_heads of 3": yaml("n_heads: 4", "n_heads: 3"),
        "n_layers of -1": yaml("n_layers: 2", "n_layers: -1"),
        "n_layers of 1e400": yaml("n_layers: 2", "n_layers: .inf"),
        "a kernel of 8": yaml("conv_kernel_size: 9", "conv_kernel_size: 8"),
        "subsampling by 4": yaml("subsampling_factor: 8", "subsampling_factor: 4"),
        "a context of [0]": yaml(r"att_context_size:\n  - -1\n  - -1", "att_context_size: [0]"),
        "a normalisation that runs code": yaml("normalize: per_feature", "normalize: __import__('os')"),
        "another rate in the preprocessor": yaml(r"^  sample_rate: 16000", "  sample_rate: 8000"),
        "another rate of the model": yaml(r"^sample_rate: 16000", "sample_rate: 8000"),
        "a target of another class": yaml(r"ConformerEncoder", "RNNTDecoder"),
        "a target with escape codes": yaml(r"_target_: .*ConformerEncoder", '_target_: "\\\\e[31mx"'),
        "members that claim 2^62 bytes in pax": archive(config, weights, pax={"size": str(2**62)}),
        "a negative size in pax": archive(config, weights, pax={"size": "-1"}),
        "weights in the other byte order": weights_file(named_member("byteorder", b"big")),
        "weights without a member": weights_file(named_member("/data/7", None)),
        "weights with a short member": weights_file(named_member("/data/7", b"1234")),
        "weights with a flipped bit under a checksum of 0": weights_file(silent),
        "weights that are a script": weights_file(always(b"import os; os.system('touch ../pwned')")),
        "weights of TorchScript": lambda folder: _scripted(folder, whole[CONFIG]),
        "weights that are a module": lambda folder: _module(folder, whole[CONFIG]),
        **{
            f"bit {number} of the weights flipped at {share:.0%}": weights_file(bit(share, number))
            for share, number in FLIPS
        },
    }
    harmless = {
        "a good configuration, then another": archive(config, weights, three),
        "another configuration, then a good one": archive(three, config, weights),
        "good weights, then evil ones": archive(config, weights, evil),
        "evil weights, then good ones": archive(config, evil, weights),
        "names with two slashes": archive((".//" + CONFIG, whole[CONFIG]), (".//" + WEIGHTS, whole[WEIGHTS])),
        "absolute names": archive(("/" + CONFIG, whole[CONFIG]), ("/" + WEIGHTS, whole[WEIGHTS])),
        "a pax path that leaves it": archive(("x", b"x"), config, weights, pax={"comment": "../" * 99}),
        "a pax header of 5 MB": archive(config, weights, pax={"comment": "x" * 5_000_000}),
        "a time of 2^33": archive(config, weights, mtime=2**33 - 1),
        "an unknown owner": archive(config, weights, uid=2**21 - 1, uname="\x1b[31mred"),
        "contiguous files": archive(config, weights, type=tarfile.CONTTYPE),
        "a device besides": nemo(whole, special("zero", tarfile.CHRTYPE)),
        "a link besides": nemo(whole, special("passwd", tarfile.SYMTYPE, "/etc/passwd")),
        "bzip2": nemo(whole, mode="w:bz2"),
        "xz": nemo(whole, mode="w:xz"),
        "two archives in one": copied("model.nemo", lambda data: data + data),
        "a configuration in UTF-16": text_of(lambda data: data.decode().encode("utf-16")),
        "a configuration with a mark": text_of(lambda data: b"\xef\xbb\xbf" + data),
        "a configuration with CRLF": text_of(lambda data: data.replace(b"\n", b"\r\n")),
        "a configuration with a document more": text_of(lambda data: data + b"\n---\na: 1\n"),
        "a key twice in the configuration": text_of(lambda data: data + b"\nsample_rate: 16000\n"),
        "an unknown key in the configuration": text_of(lambda data: data + b"\nfoo: {bar: 1}\n"),
        "n_layers of '2'": yaml("n_layers: 2", "n_layers: '2'"),
        "n_layers of 2.0": yaml("n_layers: 2", "n_layers: 2.0"),
        "a dropout of 5": yaml("dropout: 0.1", "dropout: 5"),
        "a training set that is garbage": yaml("manifest_filepath: train.jsonl", "manifest_filepath: {a: [1]}"),
        "an LZMA archive of weights": weights_file(
            members(lambda name, data: (name, data), compression=zipfile.ZIP_LZMA)
        ),
        "weights with every member twice": weights_file(duplicated),
        "weights that claim to be encrypted": weights_file(encrypted),
        "bytes before the weights": weights_file(lambda data: b"#!/bin/sh\n" + data),
        "a comment after the weights": weights_file(_commented),
        "weights in torch's old form": weights_file(lambda data: _old_form(data)),
        "weights in torch's old form with a flipped bit": weights_file(lambda data: bit(0.5, 6)(_old_form(data))),
        # one bit of the configuration's text flips
        "preemph 0.97 as 0.96": yaml("preemph: 0.97", "preemph: 0.96"),
        "mag_power 2.0 as 3.0": yaml("mag_power: 2.0", "mag_power: 3.0"),
        "window_stride 0.01 as 0.03": yaml("window_stride: 0.01", "window_stride: 0.03"),
        "sample_rate 16000 as 16004": yaml("^sample_rate: 16000", "sample_rate: 16004"),
        "n_heads 4 as 5": yaml("n_heads: 4", "n_heads: 5"),
        "n_fft 512 as 516": yaml("n_fft: 512", "n_fft: 516"),
        "att_context -1 as -3": yaml("- -1", "- -3"),
        "pad_value 0.0 as 1.0": yaml("pad_value: 0.0", "pad_value: 1.0"),
    }
    return bad, harmless


FLIPS = [(0.01, 1), (0.13, 6), (0.27, 7), (0.44, 0), (0.63, 6), (0.88, 5), (0.96, 1)]


def _zip(folder: Path, parts: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(folder / "x.nemo", "w") as file:
        for name, data in parts.items():
            file.writestr(name, data)


def _scripted(folder: Path, config: bytes) -> None:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)
    nemo({CONFIG: config, WEIGHTS: file.getvalue()})(folder)


def _module(folder: Path, config: bytes) -> None:
    file = io.BytesIO()
    torch.save(torch.nn.Linear(2, 2), file)
    nemo({CONFIG: config, WEIGHTS: file.getvalue()})(folder)


def _old_form(data: bytes) -> bytes:
    file = io.BytesIO()
    content = torch.load(io.BytesIO(data), weights_only=True)
    torch.save(content, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def _commented(data: bytes) -> bytes:
    file = io.BytesIO(data)
    with zipfile.ZipFile(file, "a") as opened:
        opened.comment = b"\x1b[31m" * 99
    return file.getvalue()


def ckpt_tricks() -> tuple[dict[str, Setup], dict[str, Setup]]:
    def config(**changes: Any) -> Callable[[dict[str, Any]], None]:
        return lambda content: content["hyper_parameters"]["cfg"].update(changes)

    bad: dict[str, Callable[[dict[str, Any]], object]] = {
        "a NaN in the last bias": tensor("decoder_layers.0.bias", filled(math.nan)),
        "a NaN in running_var": tensor("running_var", filled(math.nan)),
        "a NaN in the codebook": tensor("codebooks", filled(math.nan)),
        "an infinity in the window": tensor("featurizer.window", filled(math.inf)),
        "an infinity in the mask": tensor("mask_embedding", filled(math.inf)),
        "1e300 in float64": _weights(lambda x: filled(1e300)(x.double())),
        "1e39 in float64": tensor("norm_out.weight", lambda x: filled(-1e39)(x.double())),
        "an infinity in float16": _weights(lambda x: filled(math.inf)(x.half())),
        "a NaN in bfloat16": _weights(lambda x: filled(math.nan)(x.bfloat16())),
        "uint8": _weights(lambda x: x.to(torch.uint8)),
        "int16": tensor("norm_out.bias", lambda x: x.to(torch.int16)),
        "int32": tensor("linear_q.bias", lambda x: x.to(torch.int32)),
        "a bool codebook": tensor("codebooks", lambda x: x > 0),
        "a bool mask": tensor("mask_embedding", lambda x: x > 0),
        "complex128": _weights(lambda x: x.to(torch.complex128)),
        "quantised": _weights(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
        "compressed rows": _weights(lambda x: x.to_sparse_csr()),
        "no elements": _weights(lambda x: x[:0]),
        "one dimension more": _weights(lambda x: x[None]),
        "a number": _weights(lambda x: 0.5),
        "a list of numbers": _weights(lambda x: x.tolist()),
        "a dict": _weights(lambda x: {"a": x}),
        "names with another prefix": lambda content: content.update(
            state_dict={f"x.{key}": value for key, value in content["state_dict"].items()}
        ),
        "a name of 1 MB": _set("state_dict", "x" * 1_000_000, torch.zeros(1)),
        "names of tuples": _set("state_dict", ("a", "b"), torch.zeros(1)),
        "two names exchanged with other shapes": lambda content: content["state_dict"].update(
            {
                "quantizer.proj.weight": content["state_dict"]["quantizer.codebooks"],
                "quantizer.codebooks": content["state_dict"]["quantizer.proj.weight"],
            }
        ),
        "a configuration of another rate": config(sample_rate=8000),
        "a configuration with the environment": config(num_classes="${oc.env:HOME}"),
        "a configuration with a circle": config(num_classes="${num_classes}"),
        "a configuration without an encoder": config(encoder=None),
        "a configuration with a list as encoder": config(encoder=[1]),
        "a configuration with escape codes": config(mask_position="\x1b[31mred"),
        "a configuration of bytes": _store("hyper_parameters", {"cfg": b"\xff"}),
        "a configuration of tensors": config(num_classes=torch.tensor([1, 2])),
    }
    opinion: dict[str, Callable[[dict[str, Any]], object]] = {
        "a negative running_var": tensor("running_var", lambda x: -x - 1),
        "a running_var of 0": tensor("running_var", torch.zeros_like),
        "weights of 1e38": _weights(lambda x: x * 0 + 1e38),
        "a norm of 3e38": tensor("norm_out.weight", lambda x: x * 0 + 3e38),
        "denormal weights": _weights(lambda x: x * 0 + 1e-42),
        "a filterbank of 1e38": tensor("featurizer.fb", lambda x: x * 0 + 1e38),
        "a filterbank of -1": tensor("featurizer.fb", lambda x: x * 0 - 1),
        "a window of zeros": tensor("featurizer.window", torch.zeros_like),
        "float16": _weights(lambda x: x.half()),
        "bfloat16": _weights(lambda x: x.bfloat16()),
    }
    self_finite = {name: saved(change) for name, change in opinion.items()}
    return {name: saved(change) for name, change in bad.items()}, self_finite


def crc(content: dict[str, Any], value: str) -> None:
    content["__metadata__"]["crc32"] = value


def metadata(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["__metadata__"].update(changes)


def model_config(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        text = content["__metadata__"]["model_config"]
        if old not in text:
            raise ValueError(f"the configuration has no {old}")
        content["__metadata__"]["model_config"] = text.replace(old, new, 1)

    return change


def exchanged(one: str, other: str) -> Callable[[dict[str, Any]], None]:
    """Two tensors of one shape have each other's names."""

    def change(content: dict[str, Any]) -> None:
        first, second = (next(key for key in content if key.endswith(name)) for name in (one, other))
        content[first], content[second] = content[second], content[first]

    return change


def named_entry(ending: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        next(value for key, value in content.items() if key.endswith(ending)).update(changes)

    return change


def as_text(change: Callable[[bytes], bytes]) -> Callable[[dict[str, Any]], bytes]:
    return lambda content: change(json.dumps(content).encode())


def data_with(value: float) -> Callable[[bytes], bytes]:
    """All float32 from the middle on are this."""
    return lambda data: data[: len(data) // 8 * 4] + struct.pack("<f", value) * ((len(data) - len(data) // 8 * 4) // 4)


def no_crc(content: dict[str, Any], ending: str = "", **changes: Any) -> dict[str, Any]:
    content["__metadata__"].pop("crc32")
    if ending:
        named_entry(ending, **changes)(content)
    return content


def safetensors_tricks() -> tuple[dict[str, Setup], dict[str, Setup]]:
    q, k = "layers.0.self_attn.linear_q.weight", "layers.0.self_attn.linear_k.weight"
    source = "model.safetensors"
    bad = {
        "a wrong checksum": safetensors(lambda content: crc(content, "00000000")),
        "an empty checksum": safetensors(lambda content: crc(content, "")),
        "a checksum of text": safetensors(lambda content: crc(content, "\x1b[31m")),
        "a checksum of 1 MB": safetensors(lambda content: crc(content, "f" * 1_000_000)),
        "two tensors exchanged": safetensors(exchanged(q, k)),
        "two biases exchanged": safetensors(exchanged("layers.0.norm_out.bias", "layers.1.norm_out.bias")),
        "offsets of three numbers": safetensors(named_entry(q, data_offsets=[0, 4096, 8192])),
        "offsets of one": safetensors(named_entry(q, data_offsets=[0])),
        "offsets of floats": safetensors(named_entry(q, data_offsets=[0.0, 4096.0])),
        "offsets of text": safetensors(named_entry(q, data_offsets=["0", "4096"])),
        "offsets of 2^64": safetensors(named_entry(q, data_offsets=[2**64, 2**64 + 4096])),
        "offsets of null": safetensors(named_entry(q, data_offsets=None)),
        "offsets of another tensor": safetensors(lambda content: named_entry(q, data_offsets=_of(content, k))(content)),
        "a shape of floats": safetensors(named_entry(q, shape=[32.0, 32.0])),
        "a shape that overflows to this size": safetensors(named_entry(q, shape=[2**62, 4, 1024])),
        "a shape of 0": safetensors(named_entry(q, shape=[0, 32])),
        "a shape of one dimension": safetensors(named_entry(q, shape=[1024])),
        "a shape of text": safetensors(named_entry(q, shape="32")),
        "a shape of 1000 dimensions": safetensors(named_entry(q, shape=[1] * 999 + [1024])),
        "a dtype of small letters": safetensors(named_entry(q, dtype="f32")),
        "a dtype of bool": safetensors(named_entry(q, dtype="BOOL", shape=[128, 32])),
        "a dtype of I8": safetensors(named_entry(q, dtype="I8", shape=[128, 32])),
        "a dtype of F8": safetensors(named_entry(q, dtype="F8_E4M3", shape=[128, 32])),
        "a dtype of BF16": safetensors(named_entry(q, dtype="BF16", shape=[64, 32])),
        "a dtype of null": safetensors(named_entry(q, dtype=None)),
        "a tensor that is a list": safetensors(lambda content: content.update({"x": [1]})),
        "a tensor missing": safetensors(lambda content: [content.pop(key) for key in list(content) if key.endswith(q)]),
        "a tensor too many": safetensors(
            lambda content: content.update({"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
        ),
        "a name with escape codes": safetensors(
            lambda content: content.update({"\x1b[31m": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
        ),
        "a header of 0 bytes": copied(source, lambda data: bytes(8) + data[8:]),
        "a header of 1 byte": copied(source, lambda data: b"\1" + bytes(7) + data[8:]),
        "a header as long as the file": copied(source, lambda data: struct.pack("<Q", len(data)) + data[8:]),
        "a header one byte too long": copied(
            source, lambda data: struct.pack("<Q", struct.unpack("<Q", data[:8])[0] + 1) + data[8:]
        ),
        "a header of 100 MB": copied(source, lambda data: struct.pack("<Q", 100_000_001) + b" " * 100_000_001),
        "only seven bytes": copied(source, lambda data: data[:7]),
        "a header in UTF-16": safetensors(as_text(lambda text: text.decode().encode("utf-16"))),
        "a header with NaN": safetensors(as_text(lambda text: text.replace(b'"shape": [', b'"shape": [NaN, ', 1))),
        "no configuration": safetensors(lambda content: content["__metadata__"].pop("model_config") and None),
        "a configuration of text": safetensors(metadata(model_config="hello")),
        "a configuration of brackets": safetensors(metadata(model_config="[" * 100_000)),
        "a configuration of null": safetensors(metadata(model_config="null")),
        "a configuration with the environment": safetensors(
            model_config('"num_classes": 64', '"num_classes": "${oc.env:HOME}"')
        ),
        "a configuration of three layers": safetensors(model_config('"n_layers": 2', '"n_layers": 3')),
        "a configuration of another rate": safetensors(model_config('"sample_rate": 16000', '"sample_rate": 8000')),
        "NaN, no checksum": safetensors(no_crc, data_with(math.nan)),
        "infinities, no checksum": safetensors(no_crc, data_with(-math.inf)),
        "no checksum and I32": safetensors(lambda content: no_crc(content, q, dtype="I32")),
        **{
            f"bit {number} of the data flipped at {share:.0%}": safetensors(lambda content: None, bit(share, number))
            for share, number in FLIPS
        },
    }
    harmless = {
        "spaces after the header": safetensors(as_text(lambda text: text + b" " * 1000)),
        "the header sorted": safetensors(as_text(lambda text: json.dumps(json.loads(text), sort_keys=True).encode())),
        "a checksum in capitals": safetensors(lambda content: crc(content, content["__metadata__"]["crc32"].upper())),
        "metadata with escape codes": safetensors(metadata(x="\x1b[31m\x07")),
        "metadata of 10 MB": safetensors(metadata(x="x" * 10_000_000)),
        "a key twice in the header": safetensors(as_text(lambda text: text[:-1] + b', "__metadata__": {}}')),
        # one bit of the configuration's text flips
        "preemph 0.97 as 0.96": safetensors(model_config('"preemph": 0.97', '"preemph": 0.96')),
        "mag_power 2.0 as 3.0": safetensors(model_config('"mag_power": 2.0', '"mag_power": 3.0')),
        "n_heads 4 as 5": safetensors(model_config('"n_heads": 4', '"n_heads": 5')),
        "xscaling as false": safetensors(model_config('"xscaling": true', '"xscaling": false')),
    }
    return bad, harmless


def _of(content: dict[str, Any], ending: str) -> list[int]:
    found: list[int] = next(value["data_offsets"] for key, value in content.items() if key.endswith(ending))
    return found


def some_features(folder: Path, outcome: Outcome) -> str | None:
    """There are features, and they are finite."""
    return finite_features(folder, outcome) if list((folder / "out").rglob("*.npy")) else "no features"


def _file(make: Callable[[Path], object]) -> Setup:
    return lambda folder: make(folder / "x.nemo")


def _unpacked(path: Path) -> None:
    path.mkdir()
    for name, data in nemo_members().items():
        (path / name).write_bytes(data)


NO_FILES: dict[str, tuple[Setup, bool]] = {
    "a FIFO": (_file(os.mkfifo), False),
    "a socket": (_file(_socket), False),
    "a link in a circle": (_file(link("x.nemo")), False),
    "a link to /dev/zero": (_file(link("/dev/zero")), False),
    "a link to /dev/random": (_file(link("/dev/random")), False),
    "a dangling link": (_file(link("nowhere")), False),
    "an empty folder": (_file(Path.mkdir), False),
    "a folder with its parts": (_file(_unpacked), True),
    "a good file behind a link": (lambda folder: (folder / "x.nemo").symlink_to(Fixture.path / "model.nemo"), True),
    "8 GB of nothing": (both(_file(Path.touch), lambda folder: os.truncate(folder / "x.nemo", 8 << 30)), False),
    "audio": (lambda folder: shutil.copy(folder / "audio/0.wav", folder / "x.nemo"), False),
    "a manifest": (lambda folder: shutil.copy(folder / "train.jsonl", folder / "x.nemo"), False),
}


def model_trials() -> Iterator[tuple[str, str, Setup, Expected, bool]]:
    """The name, the file, how it is made, what `extract` must say, and whether it must be refused everywhere."""
    nemo_bad, nemo_harmless = nemo_tricks()
    ckpt_bad, ckpt_opinion = ckpt_tricks()
    tensors_bad, tensors_harmless = safetensors_tricks()
    for suffix, bad, harmless in (
        ("nemo", nemo_bad, nemo_harmless),
        ("ckpt", ckpt_bad, {}),
        ("safetensors", tensors_bad, tensors_harmless),
    ):
        refused = Refused((f"x.{suffix}",))
        for name, setup in bad.items():
            yield f"{suffix} with {name}", f"x.{suffix}", setup, refused, True
        for name, setup in harmless.items():
            yield f"{suffix} with {name}", f"x.{suffix}", setup, Either(refused, Right(same_features)), False
    for name, setup in ckpt_opinion.items():
        finite = Either(Refused(("x.ckpt|finite|bad.jsonl",), partial=True), Right(some_features))
        yield f"ckpt with {name}", "x.ckpt", setup, finite, False
    for name, (setup, may) in NO_FILES.items():
        refused = Refused(("x.nemo",))
        yield f"no file: {name}", "x.nemo", setup, Either(refused, Right(same_features)) if may else refused, not may


def same_weights(folder: Path, outcome: Outcome) -> str | None:
    """new.nemo has the weights of the undamaged folder: the damage was elsewhere."""
    found, expected = (
        torch.load(io.BytesIO(nemo_members(path)[WEIGHTS]), weights_only=True)
        for path in (folder / "new.nemo", Fixture.path / "runs/sharded/checkpoints/sharded.nemo")
    )
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    return f"other weights: {different[:3]}" if different else None


def hostile_models() -> Iterator[Trial]:
    group = "model files"
    expected: Expected
    for i, (name, file, setup, expected, bad) in enumerate(model_trials()):
        command = ["extract", file, "audio/0.wav", "out", "--device", "cpu"]
        yield Trial(group, f"extract: {name}", command, expected, setup)
        told: Expected = Refused((file,)) if bad else Either(Refused((file,), partial=True), Right(ended_well))
        start_key = "init_from_ptl_ckpt" if file.endswith("ckpt") else "init_from_nemo_model"
        verb, command = [
            ("info", ["info", file]),
            ("export", ["export", file, "new.safetensors", "--format", "safetensors"]),
            ("verify", ["verify", file]),
            ("start from", pretrain(f"+{start_key}={file}")),
        ][i % 4]
        if verb == "verify":  # its result is a table, and exit code 1 where a row is wrong
            told = Right(said(file, then=ended_well), codes=(0, 1))
        elif verb != "export":  # may not need the weights, or the configuration
            told = Either(Refused((file,)), TRAINED if verb == "start from" else Right(ended_well))
        yield Trial(group, f"{verb}: {name}", command, told, setup)
    for name, (file_name, change) in SHARD_DAMAGES.items():
        if change is None or "flipped" in name:
            continue
        command = ["extract", str(LAST), "audio/0.wav", "out", "--device", "cpu"]
        yield Trial(
            group, f"extract a folder with {name}", command, Refused(("last.ckpt",)), sharded(file_name, change)
        )
    for name in ("a shard with a flipped bit", "rest.pt with a flipped bit", "a shard missing"):
        command = ["export", str(LAST), "new.nemo", "--format", "nemo"]
        setup = sharded(*SHARD_DAMAGES[name])
        expected = Either(Refused(("last.ckpt",)), Right(same_weights))
        yield Trial(group, f"export a folder with {name}", command, expected, setup)


# ---------------------------------------------------------------------------------------------------------------- names

MORE_NAMES: dict[str, str] = {
    "a zero-width joiner": "a\u200db",
    "a byte order mark": "\ufeffrun",
    "a soft hyphen": "a\u00adb",
    "right-to-left isolates": "a\u2067b\u2069",
    "Arabic": "تدريب",
    "a carriage return": "good\rbad",
    "backspaces": "good\b\b\b\bevil",
    "a vertical tab": "a\vb",
    "a form feed": "a\fb",
    "DEL": "a\x7fb",
    "NEL": "a\x85b",
    "a line separator": "a\u2028b",
    "a hyperlink": "\x1b]8;;http:x\x1b\\a\x1b]8;;\x1b\\",
    "a device control string": "\x1bPq#0;2;0;0;0\x1b\\",
    "three dots": "...",
    "a trailing dot": "run.",
    "a device of Windows": "CON",
    "a colon": "a:b",
    "a semicolon": "a;b",
    "a command": "$(touch pwned)",
    "backticks": "`touch pwned`",
    "a pipe": "a|b",
    "an exclamation mark": "a!b",
    "an option": "--help",
    "an at sign": "@file",
    "a format": "{0}{epoch}{val_loss:9999d}",
    "a percent format": "%(asctime)s%n",
    "a name of Python": "__init__",
    "a checkpoint": "last.ckpt",
    "rich markup": "[bold red]x[/bold red]",
    "rich markup that is not open": "[/]",
    "rich markup of a link": "[link=file:x]y[/link]",
    "an emoji code": ":smile:",
    "a number with an exponent": "1e5",
    "None": "None",
    "an interpolation": "${oc.env:HOME}",
    "a sequence that reverses": "\u202dabc\u202c",
    "254 bytes": "x" * 254,
    "85 wide letters": "语" * 85,
    "a question mark": "a?b",
    "angle brackets": "<b>x</b>",
    "an entity": "&lt;script&gt;",
    "tabs alone": "\t\t",
    "a quotation mark alone": '"',
    "a backslash at the end": "a\\",
}


def _named(name: str) -> Setup:
    """Everything is in a folder of that name."""

    def setup(folder: Path) -> None:
        place = folder / "data" / name
        place.mkdir(parents=True)
        shutil.copytree(folder / "audio", place / "audio")
        rows = [json.loads(text) for text in (folder / "train.jsonl").read_text().splitlines()]
        write_lines(place / "m.jsonl", [row | {"label": f"{name}{i % 2}"} for i, row in enumerate(rows)])
        shutil.copytree(Fixture.path / RUN, place / "run")
        shutil.copy(Fixture.path / "model.nemo", place / "m.nemo")

    return setup


def made(*paths: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        missing = [path for path in paths if not list((folder / "data").rglob(path))]
        scripts = [path for path in folder.rglob("*.html") if "<b>x</b>" in path.read_text(errors="replace")]
        if (folder / "pwned").exists():
            return "a command in a name was run"
        return f"not made: {missing}" if missing else "markup from a name in a page" if scripts else None

    return check


def names() -> Iterator[Trial]:
    group = "names"
    odd = Refused(("name|character|data/|m.jsonl|m.nemo|run|folder|new|demo",))
    for i, (what, name) in enumerate(MORE_NAMES.items()):
        place = f"data/{name}"
        checkpoint = f"{place}/m.nemo"
        commands: list[tuple[str, list[str], tuple[str, ...]]] = [
            (
                "inspect",
                ["inspect", f"{place}/m.jsonl", "--output", f"{place}/i.html", "--examples", "1"],
                ("i.html",),
            ),
            ("report", ["report", f"{place}/run"], ("report.html",)),
            ("doctor", ["doctor", f"{place}/run"], ()),
            ("export", ["export", checkpoint, f"{place}/new.nemo", "--format", "nemo"], ("new.nemo",)),
            ("info", ["info", checkpoint], ()),
            (
                "prepare shards",
                ["prepare", f"{place}/audio", "--output", f"{place}/n.jsonl", "--shards", "2"],
                ("*.tar",),
            ),
            (
                "probe",
                [
                    *("probe", checkpoint, "--train", f"{place}/m.jsonl", "--test", f"{place}/m.jsonl"),
                    *("--label", "label", "--output", f"{place}/p", "--device", "cpu"),
                ],
                ("results.json",),
            ),
            (
                "demo",
                [*shlex.split("demo --num-train 1 --num-val 1 --num-noise 1 --duration 1 --data-dir"), f"{place}/d"],
                (),
            ),
        ]
        for verb, command, paths in (commands[i % 8], commands[(i + 3) % 8]):
            expected = Either(odd, Right(made(*paths)))
            yield Trial(group, f"{verb} in a folder with {what}", command, expected, _named(name))
        keys = [
            f"exp_manager.name={quoted(name)}",
            f"exp_manager.exp_dir={quoted('runs/' + name)}",
            f"+exp_manager.explicit_log_dir={quoted('runs/' + name)}",
            f"+exp_manager.checkpoint_callback_params.filename={quoted(name)}",
            f"+exp_manager.checkpoint_callback_params.prefix={quoted(name)}",
            f"name={quoted(name)}",
        ]
        for key in (keys[0], keys[1 + i % 5]):
            expected = Either(Refused(("name|exp_dir|explicit_log_dir|filename|prefix|character|format",)), Right(kept))
            yield Trial(group, f"{key.partition('=')[0].lstrip('+')} is {what}", pretrain(key), expected)
    for command in (
        ["extract", "-x.nemo", "audio/0.wav", "out"],
        ["extract", "--", "-x.nemo", "audio/0.wav", "out"],
        ["extract", "[/]", "[/]", "[/]"],
        ["extract", f"{Fixture.path}/model.nemo", "[/].wav", "out"],
        ["prepare", "[/]", "--output", "[/].jsonl"],
        ["prepare", "audio", "--output", "m.jsonl", "--job", "[/]"],
        ["inspect", "[bold]x[/].jsonl"],
        ["inspect", "m__OP_0..3_CL_[/].jsonl"],
        ["report", "[/]"],
        ["doctor", "[/red]"],
        ["info", "[/]"],
        ["info", "[/]", "[red]"],
        ["verify", "[/].nemo"],
        ["verify", f"{Fixture.path}/model.nemo", "--nemo-python", "[/]"],
        ["export", "[/].nemo", "x", "--format", "[/]"],
        ["probe", "[/]", "--train", "[/]", "--test", "[/]", "--label", "[/]", "--output", "[/]"],
        ["demo", "--data-dir", "[/]", "--num-train", "[/]"],
        ["pretrain", "[/]=1"],
        ["pretrain", "model.encoder.[/]=1"],
        ["pretrain", "--config-name", "[/]"],
        ["pretrain", "model.train_ds.manifest_filepath='[/]'"],
        ["fit", "[/]"],
        ["[/]"],
        ["pretrain", "trainer.max_steps=\u0664"],
        ["pretrain", "trainer.max\u200b_steps=4"],
        ["pretrain", "a" * 100_000 + "=1"],
        ["pretrain", "=" * 1000],
        ["pretrain", "\r\n"],
        ["info", "a\nb"],
        ["report", "a\rnest-ssl: everything is fine"],
    ):
        text = repr(" ".join(part.replace(str(Fixture.path), "…") for part in command))[:70]
        yield Trial(group, f"arguments {text}", command, Refused(()))


def kept(folder: Path, outcome: Outcome) -> str | None:
    """The run is below `runs`, its folder has all it should have, and no command in a name was run."""
    run = only_run(folder)
    if not run.is_relative_to(folder / "runs"):
        return f"the run is in {run.relative_to(folder)}"
    if list(folder.rglob("pwned")) or not list(run.rglob("*last.ckpt")):
        return "no last.ckpt, or a command was run"
    return trained(folder, outcome)


# ---------------------------------------------------------------------------------------------------------- environment

VARIABLES: dict[str, tuple[dict[str, str | None], str]] = {
    # what is said if it is not right; empty: it must be right
    "MASTER_PORT=0": ({"MASTER_PORT": "0"}, "MASTER_PORT"),
    "MASTER_PORT=-1": ({"MASTER_PORT": "-1"}, "MASTER_PORT"),
    "MASTER_PORT is empty": ({"MASTER_PORT": ""}, "MASTER_PORT"),
    "MASTER_PORT=65536": ({"MASTER_PORT": "65536"}, "MASTER_PORT"),
    "MASTER_ADDR with escape codes": ({"MASTER_ADDR": "\x1b[31mred"}, "MASTER_ADDR"),
    "RANK alone": ({"RANK": "1"}, "RANK|WORLD_SIZE"),
    "WORLD_SIZE=2 alone": ({"WORLD_SIZE": "2"}, "WORLD_SIZE|RANK"),
    "WORLD_SIZE=-1": ({"RANK": "0", "WORLD_SIZE": "-1", "LOCAL_RANK": "0"}, "WORLD_SIZE"),
    "WORLD_SIZE=1e3": ({"RANK": "0", "WORLD_SIZE": "1e3", "LOCAL_RANK": "0"}, "WORLD_SIZE"),
    "RANK is empty": ({"RANK": "", "WORLD_SIZE": "1"}, "RANK"),
    "RANK=0x0": ({"RANK": "0x0", "WORLD_SIZE": "1"}, "RANK"),
    "LOCAL_RANK=5": ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "5", "MASTER_ADDR": "127.0.0.1"}, "LOCAL_RANK"),
    "LOCAL_RANK=-2": ({"LOCAL_RANK": "-2", "RANK": "0", "WORLD_SIZE": "1"}, "LOCAL_RANK"),
    "LOCAL_WORLD_SIZE=0": ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, "WORLD_SIZE"),
    "NODE_RANK=abc": ({"NODE_RANK": "abc"}, "NODE_RANK"),
    "NODE_RANK=7": ({"NODE_RANK": "7"}, "NODE_RANK"),
    "GROUP_RANK=abc": ({"GROUP_RANK": "abc"}, "GROUP_RANK"),
    "TORCHELASTIC_RUN_ID alone": ({"TORCHELASTIC_RUN_ID": "x"}, "torchrun|RANK|TORCHELASTIC"),
    "SLURM_NTASKS=2, one task": ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "SLURM|devices"),
    "SLURM_NTASKS=0": ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "0", "SLURM_PROCID": "0"}, "SLURM"),
    "SLURM_LOCALID=abc": (
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "abc"},
        "SLURM",
    ),
    "SLURM_PROCID=3 of 1": (
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_NODEID": "0"},
        "SLURM",
    ),
    "SLURM_NODELIST of garbage": (
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "[[\x1b[31m"},
        "SLURM",
    ),
    "SLURM_JOB_ID with escape codes": ({"SLURM_JOB_ID": "\x1b[31m"}, "SLURM"),
    "SLURM_NNODES=-1": ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_NNODES": "-1"}, "SLURM"),
    "CUDA_VISIBLE_DEVICES=-1": ({"CUDA_VISIBLE_DEVICES": "-1"}, ""),
    "CUDA_VISIBLE_DEVICES=0,0": ({"CUDA_VISIBLE_DEVICES": "0,0"}, ""),
    "CUDA_VISIBLE_DEVICES is empty": ({"CUDA_VISIBLE_DEVICES": ""}, ""),
    "CUDA_VISIBLE_DEVICES=GPU-x": ({"CUDA_VISIBLE_DEVICES": "GPU-\x1b[31mx"}, ""),
    "OMP_NUM_THREADS is empty": ({"OMP_NUM_THREADS": ""}, ""),
    "OMP_NUM_THREADS=1,2": ({"OMP_NUM_THREADS": "1,2"}, ""),
    "OMP_NUM_THREADS=500": ({"OMP_NUM_THREADS": "500"}, ""),
    "MKL_NUM_THREADS=abc": ({"MKL_NUM_THREADS": "abc"}, ""),
    "GOMP_SPINCOUNT=abc": ({"GOMP_SPINCOUNT": "abc"}, ""),
    "OMP_WAIT_POLICY=foo": ({"OMP_WAIT_POLICY": "foo"}, ""),
    "MALLOC_ARENA_MAX=abc": ({"MALLOC_ARENA_MAX": "abc", "MALLOC_PERTURB_": "170"}, ""),
    "TMPDIR is empty": ({"TMPDIR": ""}, ""),
    "TMPDIR is a file": ({"TMPDIR": "/etc/passwd"}, ""),
    "TMPDIR is relative": ({"TMPDIR": "audio"}, ""),
    "HOME is relative": ({"HOME": "audio"}, ""),
    "HOME is /proc": ({"HOME": "/proc"}, ""),
    "XDG_CACHE_HOME is a file": ({"XDG_CACHE_HOME": "/etc/passwd", "XDG_CONFIG_HOME": "/etc/passwd"}, ""),
    "NEST_SSL_CACHE_DIR is empty": ({"NEST_SSL_CACHE_DIR": ""}, ""),
    "NEST_SSL_CACHE_DIR is /proc/x": ({"NEST_SSL_CACHE_DIR": "/proc/x"}, ""),
    "NEST_SSL_SECRET is empty": ({"NEST_SSL_SECRET": ""}, ""),
    "NEST_SSL_SECRET has newlines": ({"NEST_SSL_SECRET": "a\nb\x1b[31m"}, ""),
    "PYTHONUTF8=0 and C": ({"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}, ""),
    "PYTHONIOENCODING=utf-16": ({"PYTHONIOENCODING": "utf-16"}, ""),
    "PYTHONIOENCODING=ascii:strict": ({"PYTHONIOENCODING": "ascii:strict"}, ""),
    "PYTHONDEVMODE=1": ({"PYTHONDEVMODE": "1"}, ""),
    "PYTHONMALLOC=debug": ({"PYTHONMALLOC": "debug"}, ""),
    "PYTHONTRACEMALLOC=3": ({"PYTHONTRACEMALLOC": "3"}, ""),
    "PYTHONSAFEPATH=1": ({"PYTHONSAFEPATH": "1"}, ""),
    "PYTHONNOUSERSITE=1": ({"PYTHONNOUSERSITE": "1"}, ""),
    "PYTHONFAULTHANDLER=1": ({"PYTHONFAULTHANDLER": "1"}, ""),
    "PYTHONHASHSEED=random": ({"PYTHONHASHSEED": "random"}, ""),
    "PYTHONWARNINGS of garbage": ({"PYTHONWARNINGS": "foo::bar"}, ""),
    "PYTHONINTMAXSTRDIGITS=640": ({"PYTHONINTMAXSTRDIGITS": "640"}, ""),
    "PYTHONDONTWRITEBYTECODE is unset": ({"PYTHONDONTWRITEBYTECODE": None}, ""),
    "PYTORCH_CUDA_ALLOC_CONF of garbage": ({"PYTORCH_CUDA_ALLOC_CONF": "garbage"}, ""),
    "PYTORCH_ALLOC_CONF of garbage": ({"PYTORCH_ALLOC_CONF": "foo:bar"}, ""),
    "TORCHINDUCTOR_CACHE_DIR=/dev/null": ({"TORCHINDUCTOR_CACHE_DIR": "/dev/null"}, ""),
    "TORCH_SHOW_CPP_STACKTRACES=1": ({"TORCH_SHOW_CPP_STACKTRACES": "1"}, ""),
    "HF_HOME is a file": ({"HF_HOME": "/etc/passwd"}, ""),
    "http_proxy of garbage": ({"http_proxy": "garbage", "https_proxy": "garbage", "all_proxy": "x"}, ""),
    "LC_NUMERIC=de_DE": ({"LC_NUMERIC": "de_DE.UTF-8", "LC_ALL": None, "LANG": "de_DE.UTF-8"}, ""),
    "LC_ALL=tr_TR": ({"LC_ALL": "tr_TR.UTF-8"}, ""),
    "TZ=:": ({"TZ": ":/etc/passwd"}, ""),
    "COLUMNS=1000000": ({"COLUMNS": "1000000"}, ""),
    "COLUMNS=-5": ({"COLUMNS": "-5"}, ""),
    "USER and LOGNAME are unset": ({"USER": None, "LOGNAME": None, "USERNAME": None}, ""),
    "a variable that is not UTF-8": ({"FOO": os.fsdecode(b"\xff\xfe")}, ""),
    "HYDRA_FULL_ERROR=abc": ({"HYDRA_FULL_ERROR": "abc"}, ""),
    "GIT_DIR and GIT_WORK_TREE": ({"GIT_DIR": "/dev/null", "GIT_WORK_TREE": "/proc"}, ""),
    "WANDB and MLFLOW": ({"WANDB_MODE": "garbage", "MLFLOW_TRACKING_URI": "x"}, ""),
}

TWO_RANKS: dict[str, tuple[dict[str, str | None], str]] = {
    "MASTER_ADDR=256.256.256.256": ({"MASTER_ADDR": "256.256.256.256"}, "MASTER_ADDR"),
    "MASTER_ADDR=::1": ({"MASTER_ADDR": "::1"}, "MASTER_ADDR|::1"),
    "MASTER_ADDR=0.0.0.0": ({"MASTER_ADDR": "0.0.0.0"}, "MASTER_ADDR"),
    "MASTER_PORT=0": ({"MASTER_PORT": "0"}, "MASTER_PORT"),
    "TORCH_DISTRIBUTED_DEBUG=FOO": ({"TORCH_DISTRIBUTED_DEBUG": "FOO"}, "TORCH_DISTRIBUTED_DEBUG"),
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, ""),
    "GLOO_SOCKET_IFNAME=lo": ({"GLOO_SOCKET_IFNAME": "lo"}, ""),
    "NEST_SSL_SECRET of one letter": ({"NEST_SSL_SECRET": "x"}, "NEST_SSL_SECRET"),
    "HOME is a file": ({"HOME": "/etc/passwd"}, ""),
    "TMPDIR is missing": ({"TMPDIR": "/nonexistent"}, ""),
    "CUDA_VISIBLE_DEVICES=0": ({"CUDA_VISIBLE_DEVICES": "0"}, ""),
    "PYTHONUNBUFFERED": ({"PYTHONUNBUFFERED": "1", "PYTHONDEVMODE": "1"}, ""),
    "RANK=0 is set already": ({"RANK": "0", "LOCAL_RANK": "0"}, "RANK"),
}

LIMITS: dict[str, tuple[str, Expected]] = {
    "stdin is a folder": ('"$@" <.', TRAINED),
    "stdin is a FIFO": ('mkfifo ../tmp/f; "$@" <>../tmp/f; code=$?; rm ../tmp/f; exit $code', TRAINED),
    "stdout appends to the manifest's folder": ('"$@" >>seen.txt', TRAINED),
    "nohup": ('nohup "$@"', TRAINED),
    "setsid": ('setsid -w "$@"', TRAINED),
    "unbuffered": ('stdbuf -o0 -e0 "$@"', TRAINED),
    "one processor": ('taskset -c 0 "$@"', TRAINED),
    "the idle class": ('chrt -i 0 "$@"', TRAINED),
    "an empty environment": ('env -i PYTHONPATH="$PYTHONPATH" "$@"', TRAINED),
    "another name of the program": ("exec -a $'\\e[31mred' \"$@\"", TRAINED),
    "many open files": ('for i in $(seq 10 200); do eval "exec $i</dev/null"; done; "$@"', TRAINED),
    "descriptors 3 to 9 are full": ('for i in 3 4 5 6 7 8 9; do eval "exec $i>/dev/full"; done; "$@"', TRAINED),
    "no queue of signals": ('ulimit -i 0; "$@"', TRAINED),
    "an unlimited stack": ('ulimit -s unlimited; "$@"', TRAINED),
    "a stack of 128 kB": ('ulimit -s 128; "$@"', Either(Refused(("stack|memory|thread",), partial=True), TRAINED)),
    "no message queues": ('ulimit -q 0; "$@"', TRAINED),
    "memory of 1 GB": ('ulimit -v 1000000; "$@"', Refused(("memory",), partial=True)),
    "data of 500 MB": ('ulimit -d 500000; "$@"', Either(Refused(("memory",), partial=True), TRAINED)),
    "SIGPIPE ignored": ("trap '' PIPE; \"$@\"", TRAINED),
    "SIGUSR1 and SIGALRM ignored": ("trap '' USR1 ALRM; \"$@\"", TRAINED),
    "umask 077": ('umask 077; "$@"', TRAINED),
    "runs is a file": ('touch runs; "$@"', Refused(("runs",))),
    "runs is a dangling link": ('ln -s nowhere/deep runs; "$@"', Either(Refused(("runs",)), TRAINED)),
    "runs is a link in a circle": ('ln -s runs runs; "$@"', Refused(("runs",))),
    "runs/run is a file": ('mkdir runs; touch runs/run; "$@"', Refused(("run",))),
    "runs/run is a FIFO": ('mkdir runs; mkfifo runs/run; "$@"', Refused(("run",))),
    "refused with a full stderr": ('"$@" model.foo=1 2>/dev/full', Right(ended_well, codes=(1, 2))),
    "refused with a closed stderr": ('"$@" model.foo=1 2>&-', Right(ended_well, codes=(1, 2))),
    "refused into a closed pipe": (
        'set -o pipefail; "$@" model.foo=1 2>&1 | true; exit ${PIPESTATUS[0]}',
        Right(ended_well, codes=(1, 2)),
    ),
    "stopped by timeout": ('timeout -s TERM 30 "$@" trainer.max_steps=100000', Right(ended_well, codes=(124, 75))),
    "60 open files, two ranks": ('ulimit -n 60; "$@" trainer.devices=2', TRAINED),
    "60 open files, two workers": ('ulimit -n 60; "$@" model.train_ds.num_workers=2', TRAINED),
    "20 open files, two ranks": (
        'ulimit -n 20; "$@" trainer.devices=2',
        Either(Refused(("open files|ulimit|Too many",), partial=True, codes=(1, 75)), TRAINED),
    ),
    "all closed, two ranks": ('"$@" trainer.devices=2 <&- >&- 2>&-', TRAINED),
    "full outputs, two ranks": ('"$@" trainer.devices=2 >/dev/full 2>&1', TRAINED),
    "files of 50 kB, two ranks": (
        'exec > >(cat) 2> >(cat >&2); ulimit -f 50; "$@" trainer.devices=2',
        Refused(("large|ulimit|written|space",), partial=True, codes=(1, 75)),
    ),
    "SIGTERM ignored, two ranks": ("trap '' TERM INT; \"$@\" trainer.devices=2", TRAINED),
}

MOUNTS: dict[str, tuple[str, Expected]] = {
    "/dev/shm is read-only": ('mount -t tmpfs -o ro none /dev/shm; "$@"', TRAINED),
    "/dev/shm is read-only, two ranks": (
        'mount -t tmpfs -o ro none /dev/shm; "$@" trainer.devices=2',
        Either(Refused(("/dev/shm|shared memory",), partial=True), TRAINED),
    ),
    "/dev/shm of 4 kB, two ranks": (
        'mount -t tmpfs -o size=4k none /dev/shm; "$@" trainer.devices=2',
        Either(Refused(("/dev/shm|shared memory",), partial=True, codes=(1, 75)), TRAINED),
    ),
    "no /proc, two ranks": (
        'mount -t tmpfs none /proc; "$@" trainer.devices=2',
        Either(Refused(("/proc",), partial=True), TRAINED),
    ),
    "no /sys": ('mount -t tmpfs none /sys; "$@"', TRAINED),
    "/tmp is read-only": ('mount -t tmpfs -o ro none $TMPDIR; "$@"', TRAINED),
    "HOME is read-only": ('mount -t tmpfs -o ro none $HOME; "$@"', TRAINED),
    "TMPDIR without programs": ('mount -t tmpfs -o noexec,nodev,nosuid none $TMPDIR; "$@"', TRAINED),
    **{
        f"a disk of {size}": (
            f'mkdir runs; mount -t tmpfs -o size={size} none runs; "$@" trainer.max_steps=12',
            Either(Refused(("space|full",), partial=True), Right(ended_well)),
        )
        for size in ("20k", "300k", "1500k", "2200k", "3M")
    },
    **{
        f"{count} inodes": (
            f'mkdir runs; mount -t tmpfs -o nr_inodes={count} none runs; "$@"',
            Either(Refused(("space|full|written",), partial=True), Right(ended_well)),
        )
        for count in (2, 6, 12, 16)
    },
    "a disk of 1 MB, two ranks": (
        'mkdir runs; mount -t tmpfs -o size=1M none runs; "$@" trainer.devices=2',
        Either(Refused(("space|full",), partial=True), Right(ended_well)),
    ),
    "runs is read-only, two ranks": (
        'mkdir runs; mount -t tmpfs -o ro none runs; "$@" trainer.devices=2',
        Refused(("read-only|written",)),
    ),
    "a user without a name": (
        'chmod -R a+rwX ..; setpriv --reuid 54321 --regid 54321 --clear-groups env -u USER "$@"',
        Either(Refused(("denied|written",)), TRAINED),
    ),
    "a user without a name, two ranks": (
        'chmod -R a+rwX ..; setpriv --reuid 54321 --regid 54321 --clear-groups "$@" trainer.devices=2',
        Either(Refused(("denied|written",)), TRAINED),
    ),
    "another user, HOME is not readable": (
        'chmod -R a+rwX ..; chmod 0 $HOME; setpriv --reuid 54321 --regid 54321 --clear-groups "$@" trainer.devices=2; '
        "code=$?; chmod 755 $HOME; (exit $code)",
        TRAINED,
    ),
    "another user, /dev/shm is closed": (
        "chmod -R a+rwX ..; mount -t tmpfs -o mode=700 none /dev/shm; "
        'setpriv --reuid 54321 --regid 54321 --clear-groups "$@"',
        Either(Refused(("/dev/shm|shared memory",)), TRAINED),
    ),
    "few processes for another user, two ranks": (
        'chmod -R a+rwX ..; ulimit -u 3; setpriv --reuid 54321 --regid 54321 --clear-groups "$@" trainer.devices=2',
        Either(Refused(("process|thread|ulimit|resource",), partial=True, codes=(1, 75)), TRAINED),
    ),
    "a PID namespace of its own": ('unshare -p -f --mount-proc -- "$@"', TRAINED),
    "a PID namespace of its own, two ranks": ('unshare -p -f --mount-proc -- "$@" trainer.devices=2', TRAINED),
    "an IPC namespace of its own, two workers": ('unshare -i -- "$@" model.train_ds.num_workers=2', TRAINED),
    "a host name of escape codes": (
        'unshare -u -- bash -c \'printf "\\033[31mred" >/proc/sys/kernel/hostname; exec "$@"\' bash "$@"',
        TRAINED,
    ),
    "an empty host name, two ranks": (
        'unshare -u -- bash -c \'printf "" >/proc/sys/kernel/hostname; exec "$@"\' bash "$@" trainer.devices=2',
        TRAINED,
    ),
    "a read-only audio folder that is a mount": (
        'mount --bind audio audio; mount -o remount,ro,bind audio; "$@"',
        TRAINED,
    ),
    "the manifest is a mount": ('mount --bind train.jsonl train.jsonl; "$@"', TRAINED),
}

FULL: list[tuple[str, str]] = [
    ("prepare audio --output {out}/m.jsonl --workers 0", "4k"),
    ("prepare audio --output {out}/m.jsonl --workers 0 --shards 2", "100k"),
    ("extract {M} audio {out}/features --device cpu", "16k"),
    ("extract {M} audio {out}/features --device cpu --format shards", "16k"),
    ("export {M} {out}/x.nemo --format nemo", "100k"),
    ("export {M} {out}/x.safetensors --format safetensors", "100k"),
    ("export {M} {out}/x --format huggingface", "100k"),
    ("inspect train.jsonl --output {out}/i.html --examples 1", "4k"),
    ("demo --data-dir {out}/d --num-train 2 --num-val 1 --num-noise 1 --duration 2", "40k"),
    ("report {run} --output {out}/r.html", "4k"),
    ("probe {M} --train l.jsonl --test l.jsonl --label label --output {out}/p --device cpu", "4k"),
    ("verify {M} --report {out}/v.md", "0"),
]
"""Commands whose output does not fit on the disk, or is on one that cannot be written."""


def environments() -> Iterator[Trial]:
    group = "environment"
    for suffix, table, overrides in (("", VARIABLES, ()), (", two ranks", TWO_RANKS, ("trainer.devices=2",))):
        for name, (changes, word) in table.items():
            expected: Expected = Either(Refused((word,), partial=True), TRAINED) if word else TRAINED
            command = pretrain(*overrides)
            yield Trial(
                *(group, name + suffix, command, expected),
                environment=changes,
                own_process=True,
                limit_s=120,
            )
    long = Either(Refused(("TMPDIR|AF_UNIX|path",), partial=True, codes=(1, 75)), TRAINED)
    shell = 'export TMPDIR=$TMPDIR/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; mkdir $TMPDIR; "$@"; '
    shell += "code=$?; rm -r $TMPDIR; exit $code"
    for overrides in (("model.train_ds.num_workers=2",), ("trainer.devices=2",), ()):
        yield Trial(group, f"a long TMPDIR {' '.join(overrides)}", pretrain(*overrides), long, shell=shell, limit_s=120)
    for name, (shell, expected) in LIMITS.items():
        yield Trial(group, name, pretrain(), expected, shell=shell, limit_s=120)
    if os.geteuid() != 0:
        return
    for name, (shell, expected) in MOUNTS.items():
        yield Trial(group, name, pretrain(), expected, shell=_private(shell, "runs"), limit_s=120)
    for text, size in FULL:
        for kind, options in (("full", f"size={size}"), ("read-only", "ro"), ("without inodes", "nr_inodes=1")):
            if kind == "full" and size == "0":
                continue
            shell = _private(f'mkdir out; mount -t tmpfs -o {options} none out; "$@"', "out")
            command = shlex.split(
                text.replace("{M}", f"{Fixture.path}/model.nemo").replace("{out}", "out").replace("{run}", str(RUN))
            )
            setup = both(_labels, Fixture.run) if "{run}" in text else _labels
            yield Trial(group, f"{kind}: {text}", command, Right(whole_or_nothing, codes=(0, 1)), setup, shell=shell)


def whole_or_nothing(folder: Path, outcome: Outcome) -> str | None:
    """Exit code 1 with a word about the disk, and no file that is half there; or a result that is whole."""
    if outcome.code == 1:
        refused = Refused(("space|full|read-only|written|denied|out",), partial=True)
        if wrong := refused.wrong(folder, outcome):
            return wrong
    for path in (folder / "out").rglob("*"):
        if path.is_file() and (wrong := _half(path, outcome)):
            return wrong
    return None


def _half(path: Path, outcome: Outcome) -> str | None:
    """What is wrong with a file that a command has left on a full disk."""
    if "tmp" in path.name or path.name.startswith(".") or path.stat().st_size == 0:
        return f"left over: {path.name}"
    if path.suffix == ".npy":
        np.load(path)
    elif path.suffix == ".html" and not path.read_text().rstrip().endswith("</html>"):
        return f"{path.name} is cut off"
    elif path.suffix in {".nemo", ".safetensors"} and outcome.code == 1:
        return f"{path.name} is there, though it was refused"
    elif path.suffix == ".jsonl":
        for text in path.read_text().splitlines():
            json.loads(text)
    return None


def _private(shell: str, folder: str) -> str:
    """Mounts are seen by this program alone; what it wrote there is copied out for the checks."""
    inner = f"{shell}; code=$?; cp -r {folder} {folder}_seen 2>/dev/null; exit $code"
    outer = "unshare -m -- bash -c " + _quote(inner) + ' bash "$@"; code=$?; '
    return outer + f"[ -d {folder}_seen ] && rm -rf {folder} && mv {folder}_seen {folder}; exit $code"


# ----------------------------------------------------------------------------------------------------------------- main


def trials() -> list[Trial]:
    make_more()
    tables = (configurations, manifests, audio, kills, checkpoints, hostile_models, names, environments)
    return [trial for table in tables for trial in table()]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" has it ignored, and children inherit that
    main(trials, __doc__)
