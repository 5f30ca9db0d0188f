"""A third set of trials with bad input: mostly what users do by accident, by somebody who has not read the program.

    python benchmarks/hostile_trials_third.py [--only CLASS] [--jobs N] [--output FILE]

The eight classes, the fixture and the rules that judge an outcome are those of hostile_trials.py; no trial of the two
earlier sets is repeated.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import numpy as np
import torch
from benchmarks.hostile_trials import (
    BEFORE,
    CONTROL,
    DIED,
    EVIL,
    FLOATS,
    GOOD,
    LAST,
    METRICS,
    PARAMETERS,
    PCM,
    RATE,
    RUN,
    SAVED,
    WORKERS,
    Check,
    Either,
    Expected,
    Fixture,
    Kill,
    Outcome,
    Refused,
    Right,
    Setup,
    Trial,
    _is_seen,
    _output,
    _store,
    _weights,
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
    flipped,
    fmt,
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
    rows,
    said,
    same_features,
    saved,
    start,
    takes_effect,
    trained,
    weights_file,
    write_lines,
    yaml,
    zeros,
)
from benchmarks.hostile_trials_again import _labels, _private, floats_with, make_more, media, not_mixed

TRAINED = Right(trained)
DONE = Right(ended_well)


def named(command: str) -> list[str]:
    """A command as it is typed; {M} is a good model."""
    return shlex.split(command.replace("{M}", f"{Fixture.path}/model.nemo"))


# -------------------------------------------------------------------------------------------------------- configuration

TYPOS: list[tuple[str, str]] = [
    *((f"model.optim.{key}=0.001", key) for key in ("learning_rate", "LR", "lr_rate", "weightdecay", "wd")),
    *((f"trainer.{key}=4", key) for key in ("gpus", "max_stpes", "maxSteps", "n_devices", "batch_size", "grad_clip")),
    *((f"trainer.{key}=true", key) for key in ("resume", "amp", "fp16", "auto_select_gpus", "auto_lr_find")),
    *((f"model.encoder.{key}=2", key) for key in ("num_layers", "layers", "hidden_size", "num_heads", "dmodel")),
    *((f"model.train_ds.{key}=train.jsonl", key) for key in ("manifest", "manifest_file_path", "data_dir", "path")),
    *((f"model.train_ds.{key}=3", key) for key in ("batchsize", "bs", "workers", "max_len", "bucket_size")),
    *((f"model.masking.{key}=0.1", key) for key in ("mask_probability", "prob", "mask_ratio")),
    *((f"exp_manager.{key}=x", key) for key in ("exp_name", "experiment_dir", "output_dir", "log_dir")),
    ("model.valid_ds.manifest_filepath=valid.jsonl", "valid_ds"),
    ("model.train.manifest_filepath=train.jsonl", "model.train"),
    ("train_ds.manifest_filepath=train.jsonl", "train_ds"),
    ("encoder.d_model=32", "encoder"),
    ("optim.lr=0.1", "optim"),
    ("lr=0.1", "lr"),
    ("max_steps=4", "max_steps"),
    ("batch_size=4", "batch_size"),
    ("exp_dir=runs", "exp_dir"),
    ("Trainer.max_steps=4", "Trainer"),
    ("model.Encoder.d_model=32", "Encoder"),
    ("model.quantizer.num_codebooks=1", "num_codebooks"),
    ("model.train_ds.batch_augmentor.snr=5", "snr"),
    ("watchdog.timeout=5", "timeout"),
    ("sizes=small", "sizes"),
]
"""Keys that do not exist: refused, with the key."""

PASTED: list[tuple[str, str]] = [
    *(
        (f"+model.{key}", key.partition("=")[0].partition(".")[0])
        for key in (
            "tokenizer.dir=tok",
            "joint.joint_hidden=640",
            "labels=[a,b]",
            "decoding.strategy=greedy_batch",
            "interctc.loss_weights=[]",
            "aux_ctc.ctc_loss_weight=0.3",
            "ctc_reduction=mean_batch",
            "log_prediction=true",
            "diarizer.num_speakers=2",
            "model_defaults.enc_hidden=512",
            "spec_augment.freq_masks=2",
            "skip_nan_grad=false",
            "rnnt_reduction=mean_volume",
            "compute_eval_loss=false",
            "use_cer=true",
            "nemo_version=1.23.0",
            "loss_name=rnnt",
            "prompt_format=canary",
            "transf_decoder.config_dict={}",
            "wer.use_cer=true",
        )
    ),
    *(
        (f"+model.train_ds.{key}", key.partition("=")[0].partition(".")[0])
        for key in (
            "labels=[a]",
            "normalize_transcripts=false",
            "augmentor.white_noise.prob=0.5",
            "pretokenize=false",
            "parser=en",
            "text_field=text",
            "use_start_end_token=false",
            "tarred_shard_strategy=scatter",
            "max_tps=9",
            "bucket_buffer_size=20000",
        )
    ),
    *(
        (f"+model.encoder.{key}", key.partition("=")[0])
        for key in (
            "vocab_size=99",
            "global_tokens=1",
            "use_pytorch_sdpa=true",
            "conv_dual_mode=true",
            "layer_drop=0.1",
        )
    ),
    ("+model.decoder.vocabulary=[a]", "vocabulary"),
    ("model.decoder._target_=nemo.collections.asr.modules.ConvASRDecoder", "ConvASRDecoder"),
    ("model.encoder._target_=nemo.collections.asr.modules.ConvASREncoder", "ConvASREncoder"),
    ("model.loss._target_=nemo.collections.asr.losses.CTCLoss", "CTCLoss"),
    ("model.preprocessor._target_=nemo.collections.asr.modules.AudioToMFCCPreprocessor", "MFCC"),
    ("model.masking._target_=nemo.collections.asr.modules.SpectrogramAugmentation", "SpectrogramAugmentation"),
    ("+trainer.resume_from_checkpoint=x.ckpt", "resume_from_checkpoint"),
    ("+exp_manager.seconds_to_sleep=5", "seconds_to_sleep"),
]
"""Keys of NeMo's other models: refused, or named in the log. Without a word would be wrong."""

UNITS: dict[str, str] = {
    "model.preprocessor.window_size": "25 | 25ms | 400",
    "model.preprocessor.window_stride": "160 | 10ms | 0.001",
    "model.sample_rate": "16 | 16k | 16kHz | '16,000' | 44100",
    "model.optim.lr": "5e-4e | 1e-3% | .5e | 0;1 | 0..1",
    "model.optim.weight_decay": "1% | 0,001",
    "model.masking.mask_prob": "4 | 4% | 40",
    "model.masking.block_size": "0.4 | 400ms | 40.0",
    "model.encoder.dropout": "10 | 10% | 50",
    "model.train_ds.batch_augmentor.prob": "50 | 50%",
    "model.train_ds.max_duration": "60s | '1:00' | 60000 | 0.6",
    "model.train_ds.min_duration": "1s | 1000 | 1_0",
    "model.train_ds.batch_size": "2x | '2 ' | 1e0 | 0x2 | two | 2.0",
    "model.train_ds.num_workers": "auto | max | 1.0",
    "trainer.max_steps": "10k | 1_000k | 4e0 | '4' | 4. | None | +4",
    "trainer.max_time": "6min | 00:06 | 360s | '0:0:0:0:1' | 1d",
    "trainer.devices": "1gpu | cpu | gpu:0 | cuda:0 | 1x",
    "trainer.precision": "bfloat16 | float32 | fp32 | half | amp | bf16-mixed-true | 32-bit",
    "trainer.val_check_interval": "50% | 10k | 0.5epoch",
    "trainer.gradient_clip_val": "1% | '1,0' | none | None | off",
    "+exp_manager.checkpoint_callback_params.train_time_interval": "30m | 15 | 00:15",
    "+exp_manager.checkpoint_callback_params.every_n_train_steps": "1k | 1e3 | None",
    "+seed": "None | 1e3 | 0b1",
}
"""Numbers with units, and in the wrong ones."""

UNIT_WORDS = {
    "model.preprocessor.window_stride": "block_size|mask|n_fft",
    "model.preprocessor.window_size": "n_fft",
    "model.sample_rate": "n_fft|window_size|highfreq",
    "model.train_ds.min_duration": "max_duration",
    "model.train_ds.max_duration": "min_duration",
}

WORTHLESS: dict[str, tuple[tuple[str, ...], str]] = {
    # what trains to a result that is worth nothing, in other ways than before
    "highfreq in kHz": (("+model.preprocessor.highfreq=8",), "highfreq"),
    "highfreq in kHz, lowfreq 0": (("+model.preprocessor.highfreq=4", "+model.preprocessor.lowfreq=0"), "highfreq"),
    "lowfreq just below Nyquist": (("+model.preprocessor.lowfreq=7990",), "lowfreq"),
    "clipping of -1 in a yaml": (("--config-path", "{folder}", "--config-name", "clip"), "gradient_clip_val"),
    "clipping of -2 with two ranks": (("trainer.gradient_clip_val=-2", "trainer.devices=2"), "gradient_clip_val"),
    "clipping of a negative share": (
        ("trainer.gradient_clip_val=-0.5", "trainer.accumulate_grad_batches=2"),
        "gradient_clip_val",
    ),
    "blocks of one frame": (("model.masking.block_size=1",), "mask|block_size"),
    "blocks of two frames, no overlap": (
        ("model.masking.block_size=2", "model.masking.allow_overlap=false"),
        "mask|block_size",
    ),
    "blocks shorter than a token of 16": (
        ("model.masking.block_size=12", "model.encoder.subsampling_factor=16", "model.masking.allow_overlap=false"),
        "mask|block_size",
    ),
    "blocks in seconds": (("model.masking.block_size=0.4",), "block_size"),
    "blocks of three frames in a yaml": (("--config-path", "{folder}", "--config-name", "mask"), "mask"),
    "a threshold above 1 in a yaml": (("--config-path", "{folder}", "--config-name", "threshold"), "mask_threshold"),
    "one class in two books": (("model.num_classes=1", "model.num_books=2"), "num_classes"),
    "a rate in the yaml that differs": (("--config-path", "{folder}", "--config-name", "rate"), "sample_rate"),
    "a validation rate of 8 kHz": (("model.validation_ds.sample_rate=8000",), "sample_rate"),
    "a preprocessor of 48 kHz": (("model.preprocessor.sample_rate=48000",), "sample_rate"),
    "training data of 44.1 kHz": (("model.train_ds.sample_rate=44100",), "sample_rate"),
    "rates as text": (("model.preprocessor.sample_rate='8000'",), "sample_rate"),
}
"""Refused, with the key."""

SYNTAX: list[tuple[tuple[str, ...], str]] = [
    (("model.optim.lr", "=", "0.1"), "model.optim.lr|="),
    (("model.optim.lr=", "0.1"), "lr|0.1"),
    (("model.optim.lr: 0.1",), "model.optim.lr"),
    (("--model.optim.lr=0.1",), "model.optim.lr"),
    (("--model.optim.lr", "0.1"), "model.optim.lr"),
    (("-model.optim.lr=0.1",), "option|lr|-m"),
    (("model.optim.lr==0.1",), "lr"),
    (("model,optim,lr=0.1",), "model"),
    (("model/optim.lr=0.1",), "model/optim"),
    (("model:optim:lr=0.1",), "model"),
    (("model.optim.lr=0.1;",), "lr"),
    (("model.optim.betas=(0.9,0.98)",), "betas"),
    (("model.optim.betas=0.9,0.98",), "betas"),
    (("model.optim.betas=[0.9 0.98]",), "betas"),
    (("model.optim.betas=[0.9,0.98",), "betas"),
    (("model.optim.lr=\u201c0.1\u201d",), "lr"),
    (("model.optim.lr\uff1d0.1",), "lr"),
    (("trainer.max_steps=\u22124",), "max_steps"),
    (("trainer.max_steps=4 trainer.devices=1",), "max_steps"),
    (("trainer.max_steps=4,trainer.devices=1",), "max_steps"),
    (("trainer.max_steps=4 # a try",), "max_steps"),
    (("train.jsonl",), "train.jsonl"),
    (("model.nemo",), "model.nemo"),
    (("runs/run",), "runs/run"),
    (("--config", "my.yaml"), "config"),
    (("-c", "my.yaml"), "-c"),
    (("--config-name",), "config-name"),
    (("--config-path=clip.yaml",), "clip.yaml"),
    (("--config-name=nest_fast_conformer",), "nest_fast_conformer"),
    (("--config-name=nest_fast-conformer.yml",), "nest_fast-conformer.yml"),
    (("--resume",), "resume"),
    (("--devices", "2"), "devices"),
    (("--gpus=1",), "gpus"),
    (("resume",), "resume"),
    (("$MODEL.lr=1",), "MODEL"),
    (("~model.optim.lr=0.5",), "lr"),
    (("+model.optim.lr.value=0.5",), "lr"),
    (("model.encoder=conformer",), "encoder"),
    (("model.encoder.0=1",), "0"),
    (("trainer=ddp",), "trainer"),
]
"""Overrides that are written wrongly: refused, with a part of what was written."""

UNUSUAL: list[tuple[str, ...]] = [
    ("model.train_ds.shuffle=True",),
    ("model.train_ds.pin_memory=False",),
    ("model.optim.lr=+0.05",),
    ("model.optim.lr=5.E-2",),
    ("trainer.max_epochs=null",),
    ("model.train_ds.batch_size= 2",),
    ("++exp_manager.exp_dir=runs",),
    ("exp_manager.exp_dir=./runs//",),
    ("--config-name=nest_fast-conformer.yaml",),
    ("--config-name", "nest_fast-conformer", "--config-name", "nest_fast-conformer"),
]
"""Right, or refused with a word."""

COMMANDS: list[tuple[str, str]] = [
    ("extract audio/0.wav {M} out", "audio/0.wav"),
    ("extract out {M} audio/0.wav", "out"),
    ("extract {M} out audio/0.wav", "out"),
    ("extract {M} audio/0.wav", "OUT"),
    ("extract {M} audio/0.wav out more", "more"),
    ("extract {M} audio/0.wav audio/1.wav out", "out"),
    ("extract --checkpoint {M} audio/0.wav out", "checkpoint"),
    ("extract {M} audio/0.wav out --layer 1", "layer"),
    ("extract {M} audio/0.wav out --layers 12", "layers"),
    ("extract {M} audio/0.wav out --layers first", "layers"),
    ("extract {M} audio/0.wav out --layers 0,,1", "layers"),
    ("extract {M} audio/0.wav out --layers 2", "layers"),
    ("extract {M} audio/0.wav out --format numpy", "format"),
    ("extract {M} audio/0.wav out --format .npy", "format"),
    ("extract {M} audio/0.wav out --dtype fp16", "dtype"),
    ("extract {M} audio/0.wav out --device gpu", "gpu|device"),
    ("extract {M} audio/0.wav out --device 0", "device|0"),
    ("extract {M} audio/0.wav out --device cuda", "cuda"),
    ("extract {M} audio/0.wav out --precision fp16", "precision"),
    ("extract {M} audio/0.wav out --max-duration 10m", "max-duration"),
    ("extract {M} audio/0.wav out --aggregation average", "aggregation"),
    ("extract {M} audio/0.wav out --aggregation weighted --weights 0.2;0.8", "weights"),
    ("extract {M} audio/0.wav out --aggregation weighted --weights 0,0", "weights"),
    ("extract runs/run audio/0.wav out", "runs/run"),
    ("extract nvidia/ssl_en_nest_large_v1.0 nowhere.wav out", "nowhere.wav|nvidia"),
    ("export out.nemo {M} --format nemo", "out.nemo"),
    ("export {M}", "OUT"),
    ("export {M} x.nemo --format .nemo", "format"),
    ("export {M} x.nemo --format NEMO", "format"),
    ("export {M} x.onnx --format pytorch", "format"),
    ("export {M} nowhere/deep/x.nemo y --format nemo", "y"),
    ("export train.jsonl x.nemo --format nemo", "train.jsonl"),
    ("prepare audio", "output"),
    ("prepare audio m.jsonl", "output|m.jsonl"),
    ("prepare audio --out m.jsonl", "--out"),
    ("prepare audio train.jsonl --output m.jsonl", "train.jsonl"),
    ("prepare audio --output m.jsonl --split random", "split"),
    ("prepare audio --output m.jsonl --split", "split|argument"),
    ("prepare audio --output m.jsonl --valid-share 10% --split hash", "valid-share"),
    ("prepare audio --output m.jsonl --valid-share 20 --split hash", "valid-share|valid_share"),
    ("prepare audio --output m.jsonl --shards auto", "shards"),
    ("prepare audio --output m.jsonl --job 3/3", "job"),
    ("prepare audio --output m.jsonl --job 0-3", "job"),
    ("prepare audio --output m.jsonl --job 0/2 --shards-folder x --merge 2", "job|merge"),
    ("prepare audio --output audio", "audio"),
    ("prepare model.yaml --output m.jsonl", "model.yaml"),
    ("inspect", "MANIFEST"),
    ("inspect train.jsonl valid.jsonl", "valid.jsonl"),
    ("inspect train.jsonl --noise", "noise"),
    ("inspect train.jsonl batch_size=4", "batch_size"),
    ("inspect train.jsonl --batch_size 4", "batch_size"),
    ("inspect train.jsonl --max-duration 4", "max-duration"),
    ("inspect model.train_ds.max_duration=3 train.jsonl", "model.train_ds.max_duration|train.jsonl"),
    ("report", "RUN_DIR"),
    ("report runs/nowhere", "nowhere"),
    ("report {M}", "model.nemo"),
    ("report audio train.jsonl", "train.jsonl"),
    ("doctor audio train.jsonl", "train.jsonl"),
    ("doctor runs/nowhere -f", "nowhere"),
    ("doctor --followw", "followw"),
    ("info", "FILE"),
    ("info nest_fast-conformers", "nest_fast-conformers"),
    ("info nest_fast-conformer size=XL", "XL"),
    ("info size=small", "size=small|FILE|file"),
    ("info nest_fast-conformer d_model=3", "d_model"),
    ("verify", "FILE"),
    ("verify audio", "audio"),
    ("verify {M} --recorded audio/0.wav", "0.wav"),
    ("probe {M}", "train|test|output"),
    ("probe {M} --train l.jsonl --output p --label label", "test"),
    ("probe {M} --train audio --test audio --output p --label label", "audio"),
    ("probe l.jsonl --train {M} --test l.jsonl --output p --label label", "l.jsonl"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label Label", "Label"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label label --head mlp", "head"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label label --snr 10dB --noise l.jsonl", "snr"),
    ("probe {M} --train l.jsonl --test l.jsonl --output p --label label --lr 0", "lr"),
    ("demo somewhere", "somewhere"),
    ("demo --num-train two", "num-train"),
    ("demo --num_train 2", "num_train"),
    ("demo --duration 5s", "duration"),
    ("demo --sample-rate 16k", "sample-rate"),
    ("pretrian", "pretrian"),
    ("train model.optim.lr=1", "train"),
    ("Pretrain", "Pretrain"),
    ("--pretrain", "pretrain"),
    ("help", "help"),
    ("pretrain.py", "pretrain.py"),
    ("-version", "-v|version|-e"),
    ("fit {M}", "model.nemo"),
    ("fit --memory-share 95% model.train_ds.manifest_filepath=train.jsonl", "memory-share"),
]
"""Wrong options and orders: refused, with a part of what is wrong."""

SMALL_YAMLS: dict[str, str] = {
    "clip": "trainer: {gradient_clip_val: -1}",
    "mask": "model: {masking: {block_size: 3}}",
    "threshold": "model: {loss: {mask_threshold: 1.2}}",
    "rate": "model: {preprocessor: {sample_rate: 8000}}",
}

ODD_YAMLS: dict[str, tuple[str, str]] = {
    "a comma after a key": ("model:\n  encoder:\n    dropout: 0.1,\n", "dropout"),
    "one space too few": ("model:\n  encoder:\n   dropout: 0.1\n  n_layers: 2\n", "n_layers|my"),
    "a key without a space": ("model:\n  encoder:\n    dropout:0.1\n", "my|dropout|encoder"),
    "train_ds at the top": ("train_ds:\n  batch_size: 2\n", "train_ds"),
    "trainer below model": ("model:\n  trainer:\n    max_steps: 4\n", "trainer"),
    "hydra's section": ("hydra:\n  run:\n    dir: .\n  job_logging: null\n", "hydra"),
    "a time in the name": ("name: run-${now:%Y-%m-%d}\n", "now"),
    "yes and no": ("model:\n  train_ds:\n    shuffle: yes\n    drop_last: no\n", "shuffle|drop_last"),
    "a number of base 60": ("trainer:\n  max_time: 00:00:10:00\n", "max_time"),
    "1e-3 as text": ("model:\n  optim:\n    weight_decay: 1e-3\n", "weight_decay"),
    "an octal number": ("model:\n  train_ds:\n    batch_size: 02\n", "batch_size"),
    "None": ("model:\n  train_ds:\n    noise_manifest: None\n", "None|noise_manifest"),
    "a path with ~": ("model:\n  train_ds:\n    noise_manifest: ~/noise.jsonl\n", "noise"),
    "a Windows path": ('model:\n  train_ds:\n    noise_manifest: "C:\\noise\\new.jsonl"\n', "my|noise"),
    "a merge conflict": ("<<<<<<< HEAD\nname: a\n=======\nname: b\n>>>>>>> x\n", "my"),
    "no-break spaces": ("model:\n\u00a0\u00a0optim:\n\u00a0\u00a0\u00a0\u00a0lr: 1\n", "my|optim"),
    "a whole experiment in a list": ("- model:\n    encoder: {}\n", "my"),
    "an override with a dot": ("model.encoder.dropout: 0.2\n", "model.encoder.dropout"),
}


def _write_yamls(folder: Path) -> None:
    for name, text in SMALL_YAMLS.items():
        (folder / f"{name}.yaml").write_text(f"defaults: [nest_fast-conformer, _self_]\n{text}\n")
    (folder / "train.csv").write_text("path,label\n")


def configurations() -> Iterator[Trial]:
    group = "configuration"
    for override, word in TYPOS:
        yield Trial(group, f"typo: {override}", pretrain(override), Refused((word,)))
    for override, word in PASTED:
        expected = Either(Refused((word,)), Right(said(word)))
        yield Trial(group, f"pasted: {override}", pretrain(override), expected)
    for key, values in UNITS.items():
        for value in values.split(" | "):
            last = key.rpartition(".")[2].lstrip("+")
            words = "|".join(filter(None, (last, UNIT_WORDS.get(key), value[3:] and value)))
            expected = Either(Refused((words,)), TRAINED)
            yield Trial(group, f"unit: {key.lstrip('+')}={value}", pretrain(f"{key}={value}"), expected)
    for name, (overrides, word) in WORTHLESS.items():
        yield Trial(group, f"worthless: {name}", pretrain(*overrides), Refused((word,)), _write_yamls)
    for arguments, word in SYNTAX:
        name = f"syntax: {' '.join(arguments)}"
        yield Trial(group, name, pretrain(*arguments), Refused((word,)), _write_yamls)
    for arguments in UNUSUAL:
        expected = Either(Refused((re.split("[= ]", arguments[0])[0].rpartition(".")[2],)), TRAINED)
        yield Trial(group, f"unusual: {' '.join(arguments)}", pretrain(*arguments), expected)
    for text, word in COMMANDS:
        yield Trial(group, f"order: {text}", named(text), Refused((word,)), both(_labels, _write_yamls))
    for name, (text, word) in ODD_YAMLS.items():

        def write(folder: Path, text: str = text) -> None:
            (folder / "my.yaml").write_text(f"defaults: [nest_fast-conformer, _self_]\n{text}")

        command = pretrain("--config-path", "{folder}", "--config-name", "my")
        yield Trial(group, f"yaml: {name}", command, Either(Refused((word,)), TRAINED), write)


# ------------------------------------------------------------------------------------------------------------ manifests

HF = [{"audio": {"path": f"audio/{i}.wav", "sampling_rate": RATE}, "text": "x", "id": i} for i in range(8)]
PATHS = [f"audio/{i}.wav" for i in range(8)]


def lines_of(*keys: str, seconds: Callable[[int], Any] = lambda i: 1.6 + 0.1 * i) -> bytes:
    """JSON lines with other names for the path and the duration."""
    path, duration = keys
    return b"".join(json.dumps({path: PATHS[i], duration: seconds(i)}).encode() + b"\n" for i in range(8))


def _xlsx() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("[Content_Types].xml", "<Types/>")
        file.writestr("xl/worksheets/sheet1.xml", "<worksheet><row>audio/0.wav</row></worksheet>")
    return out.getvalue()


TOOLKITS: dict[str, bytes] = {
    "Kaldi's wav.scp": b"".join(b"utt%d audio/%d.wav\n" % (i, i) for i in range(8)),
    "Kaldi's wav.scp with pipes": b"".join(b"utt%d touch ../pwned; cat audio/%d.wav |\n" % (i, i) for i in range(8)),
    "Kaldi's utt2dur": b"".join(b"utt%d 1.6\n" % i for i in range(8)),
    "Kaldi's segments": b"".join(b"utt%d rec%d 0.00 1.60\n" % (i, i) for i in range(8)),
    "LibriSpeech's trans.txt": b"84-121123-0000 GO DO YOU HEAR\n84-121123-0001 BUT IN LESS\n",
    "a row of a Hugging Face dataset": b"".join(json.dumps(row).encode() + b"\n" for row in HF),
    "Hugging Face's metadata.csv": b"file_name,transcription\n" + b"".join(p.encode() + b",x\n" for p in PATHS),
    "Hugging Face's metadata.jsonl": lines_of("file_name", "length"),
    "fairseq's tsv": b"audio\n" + b"".join(b"%d.wav\t25600\n" % i for i in range(8)),
    "Common Voice's tsv": b"client_id\tpath\tsentence\n" + b"".join(b"a\t%s\tx\n" % p.encode() for p in PATHS),
    "LJSpeech's metadata.csv": b"LJ001-0001|Printing|Printing\nLJ001-0002|in being|in being\n",
    "SpeechBrain's JSON": json.dumps({f"u{i}": {"wav": PATHS[i], "length": 1.6} for i in range(8)}).encode(),
    "SpeechBrain's csv": b"ID,duration,wav,spk_id\n"
    + b"".join(b"%d,1.6,%s,a\n" % (i, PATHS[i].encode()) for i in range(8)),
    "Coqui's csv": b"wav_filename,wav_filesize,transcript\naudio/0.wav,51244,hi\n",
    "Whisper's JSON": json.dumps({"text": "x", "segments": [{"start": 0, "end": 1.6}]}).encode(),
    "an RTTM file": b"SPEAKER audio/0.wav 1 0.00 1.60 <NA> <NA> a <NA> <NA>\n",
    "a CTM file": b"audio/0 1 0.00 0.20 hello 0.9\n",
    "a TextGrid": b'File type = "ooTextFile"\nObject class = "TextGrid"\n\nxmin = 0\nxmax = 1.6\n',
    "subtitles": b"1\n00:00:00,000 --> 00:00:01,600\nhello\n\n",
    "an m3u list": b"#EXTM3U\n#EXTINF:2,x\n" + b"".join(p.encode() + b"\n" for p in PATHS),
    "the output of ls -l": b"total 8\n-rw-r--r-- 1 me me 51244 Jan  1 00:00 0.wav\n",
    "a table of Excel": _xlsx(),
    "Parquet": b"PAR1" + bytes(64) + b"PAR1",
    "a numpy array": b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }" + bytes(80),
    "SQLite": b"SQLite format 3\0" + bytes(100),
    "a pickle": EVIL,
    "a web page": b"<!DOCTYPE html>\n<html><title>404 Not Found</title></html>\n",
    "a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n",
    "a merge conflict": GOOD + b"<<<<<<< HEAD\n" + line() + b"=======\n" + line() + b">>>>>>> main\n",
    "pretty JSON": json.dumps([json.loads(text) for text in GOOD.splitlines()], indent=2).encode(),
    "pretty objects": b"".join(json.dumps(json.loads(text), indent=2).encode() + b"\n" for text in GOOD.splitlines()),
    "yaml": b"".join(b"- audio_filepath: %s\n  duration: 1.6\n" % p.encode() for p in PATHS),
    "a dict of Python": b"".join(repr(json.loads(text)).encode() + b"\n" for text in GOOD.splitlines()),
    "a log": b"2026-01-01 00:00:00 INFO " + GOOD.replace(b"\n{", b"\n2026-01-01 00:00:00 INFO {"),
    "grep's output": GOOD.replace(b"{", b"train.jsonl:{"),
    "numbered lines": b"".join(b"%6d\t%s\n" % (i, text) for i, text in enumerate(GOOD.splitlines(), 1)),
    "escaped quotes": b"".join(json.dumps(text.decode()).encode() + b"\n" for text in GOOD.splitlines()),
    "curly quotes": GOOD.decode().replace('"', "\u201d").encode(),
    "semicolons": GOOD.replace(b", ", b"; "),
    "UTF-16 without a mark": GOOD.decode().encode("utf-16-le"),
    "UTF-32": GOOD.decode().encode("utf-32"),
    "a mark in every line": GOOD.replace(b"{", b"\xef\xbb\xbf{"),
    "zip": _xlsx()[:200] + GOOD,
    "the key wav": lines_of("wav", "duration"),
    "the key path": lines_of("path", "duration"),
    "the key audio": lines_of("audio", "duration"),
    "the key audio_path": lines_of("audio_path", "duration"),
    "the key audio_file_path": lines_of("audio_file_path", "duration"),
    "the key filename": lines_of("filename", "duration"),
    "the key dur": lines_of("audio_filepath", "dur"),
    "the key length": lines_of("audio_filepath", "length"),
    "the key durations": lines_of("audio_filepath", "durations"),
}
"""Files that are no manifests of ours: refused by name, never run."""

SECONDS: dict[str, tuple[Callable[[int], Any], bool]] = {
    "milliseconds": (lambda i: 1600 + 100 * i, True),
    "samples": (lambda i: 25600 + 1600 * i, True),
    "minutes": (lambda i: (1.6 + 0.1 * i) / 60, True),
    "hours": (lambda i: (1.6 + 0.1 * i) / 3600, True),
    "text with s": (lambda i: f"{1.6 + 0.1 * i}s", True),
    "a clock": (lambda i: "00:00:01.600", True),
    "a comma": (lambda i: "1,6", True),
    "nanoseconds": (lambda i: 1_600_000_000, True),
    "twice as long": (lambda i: 3.2 + 0.2 * i, True),
    "ten times as long": (lambda i: 16.0 + i, True),
    "half as long": (lambda i: 0.8 + 0.3, False),
    "all the same": (lambda i: 1.6, False),
    "rounded": (lambda i: round(1.6 + 0.1 * i), False),
}
"""Durations in other units; those that are wrong must be refused, since no file is as long as it says."""


def each_path(change: Callable[[int], str]) -> bytes:
    return b"".join(line(audio_filepath=change(i), duration=1.6 + 0.1 * i) for i in range(8))


ALL_PATHS: dict[str, tuple[bytes, bool]] = {
    "a tilde": (each_path(lambda i: f"~/audio/{i}.wav"), True),
    "a variable": (each_path(lambda i: f"${{DATA}}/audio/{i}.wav"), True),
    "a variable of Windows": (each_path(lambda i: f"%DATA%\\audio\\{i}.wav"), True),
    "backslashes": (each_path(lambda i: f"audio\\{i}.wav"), False),
    "a drive": (each_path(lambda i: f"D:\\corpus\\audio\\{i}.wav"), True),
    "a drive with slashes": (each_path(lambda i: f"D:/corpus/audio/{i}.wav"), True),
    "a share of Windows": (each_path(lambda i: f"\\\\nas\\audio\\{i}.wav"), True),
    "/mnt/c": (each_path(lambda i: f"/mnt/c/audio/{i}.wav"), True),
    "a bucket": (each_path(lambda i: f"s3://corpus/audio/{i}.wav"), True),
    "a bucket of Google": (each_path(lambda i: f"gs://corpus/audio/{i}.wav"), True),
    "the hub": (each_path(lambda i: f"hf://datasets/x/audio/{i}.wav"), True),
    "a URL": (each_path(lambda i: f"http://127.0.0.1:9/audio/{i}.wav"), True),
    "the folder above": (each_path(lambda i: f"../audio/{i}.wav"), True),
    "the folder above and back": (each_path(lambda i: f"../folder/audio/{i}.wav"), False),
    "no folder": (each_path(lambda i: f"{i}.wav"), True),
    "no suffix": (each_path(lambda i: f"audio/{i}"), True),
    "another suffix": (each_path(lambda i: f"audio/{i}.flac"), True),
    "a suffix in capitals": (each_path(lambda i: f"audio/{i}.WAV"), True),
    "the folder": (each_path(lambda i: "audio"), True),
    "a newline at the end": (each_path(lambda i: f"audio/{i}.wav\n"), True),
    "quotes": (each_path(lambda i: f'"audio/{i}.wav"'), True),
    "spaces around": (each_path(lambda i: f" audio/{i}.wav "), True),
    "a member of a zip": (each_path(lambda i: f"audio.zip/{i}.wav"), True),
    "a member of a tar": (each_path(lambda i: f"audio_0.tar:{i}.wav"), True),
    "Kaldi's ark": (each_path(lambda i: f"audio/{i}.ark:12"), True),
    "a pipe": (each_path(lambda i: f"touch ../pwned; cat audio/{i}.wav |"), True),
    "audio in the line": (each_path(lambda i: "data:audio/wav;base64," + base64.b64encode(PCM).decode()), True),
    "two slashes": (each_path(lambda i: f"audio//{i}.wav"), False),
    "a dot": (each_path(lambda i: f"./audio/{i}.wav"), False),
    "a decomposed letter": (each_path(lambda i: f"a\u0301udio/{i}.wav"), True),
}
"""Every path of the manifest; those that lead nowhere must be refused with one of them."""

ONE_VALUE: list[str] = [
    *("~/train.jsonl", "$PWD/train.jsonl", "file:///train.jsonl", "../folder/train.jsonl", "train.json", "TRAIN.JSONL"),
    *("'train.jsonl '", "' train.jsonl'", "train.jsonl:valid.jsonl", "'train.jsonl;valid.jsonl'", "train.jsonl/"),
    *("'train.jsonl valid.jsonl'", "s3://corpus/train.jsonl", "'C:\\\\data\\\\train.jsonl'", "'.\\\\train.jsonl'"),
    *("train.jsonl.idx", "audio/0.wav", "'\"train.jsonl\"'", "[train.jsonl,audio]", "{train: train.jsonl}"),
    *("train.jsonl#1", "'train*.jsonl'", "'tr?in.jsonl'", "train", "train.jsonl.gz", "[[train.jsonl],[valid.jsonl]]"),
    *("'[train.jsonl]'", "none", "-", "/dev/stdin"),
]
"""For `manifest_filepath`: right, or refused by name."""

NOISES: dict[str, tuple[bytes, str]] = {
    "no such files": (each_path(lambda i: f"noise/{i}.wav"), "named"),
    "a folder": (line(audio_filepath="audio"), "named"),
    "Kaldi's wav.scp": (b"n1 audio/0.wav\n", "no"),
    "a list of paths": (b"audio/0.wav\naudio/1.wav\n", "no"),
    "empty": (b"", "no"),
    "the training manifest": (GOOD, "ok"),
    "milliseconds": (lines_of("audio_filepath", "duration", seconds=lambda i: 1600), "any"),
    "no duration": (GOOD.replace(b'"duration"', b'"seconds"'), "any"),
    "tenths of a second": (b"".join(line(duration=0.1, offset=0.1 * i) for i in range(8)), "any"),
    "an offset after the end": (line(offset=60.0), "any"),
    "half of the files are missing": (GOOD + each_path(lambda i: f"noise/{i}.wav"), "any"),
}


def not_run(check: Check) -> Check:
    """No command of the manifest was run, and the result is right."""

    def checked(folder: Path, outcome: Outcome) -> str | None:
        if (folder.parent / "pwned").exists() or list(folder.rglob("pwned")):
            return "a command was run"
        return check(folder, outcome)

    return checked


def told_of_bad(folder: Path, outcome: Outcome) -> str | None:
    """`prepare` has found something, and lists all else with reasons; or says that there was nothing."""
    manifest = folder / "m.jsonl"
    good = [json.loads(text) for text in manifest.read_text().splitlines()] if manifest.exists() else []
    for entry in good:
        if not (folder / entry["audio_filepath"]).is_file():
            return f"a good line without a file: {entry}"
    reasons = folder / "m.bad.jsonl"
    for text in reasons.read_text().splitlines() if reasons.exists() else []:
        if not json.loads(text)["reason"] or CONTROL.search(json.loads(text)["reason"]):
            return f"a poor reason: {text}"
    return None if good or "bad" in outcome.text or " 0 utterances" in outcome.text else "nothing, without a word"


def manifests() -> Iterator[Trial]:
    group = "manifests"
    expected: Expected
    command: list[str]
    for number, (name, content) in enumerate(TOOLKITS.items()):

        def write(folder: Path, content: bytes = content) -> None:
            (folder / "train.jsonl").write_bytes(content)
            shutil.copy(folder / "train.jsonl", folder / "list.txt")

        yield Trial(group, f"train on {name}", pretrain(), Refused(("train.jsonl",)), write)
        others: list[tuple[str, str, Expected]] = [
            ("prepare", "prepare train.jsonl --output m.jsonl --workers 0", Right(not_run(told_of_bad))),
            ("inspect", "inspect train.jsonl --examples 0 --output i.html", Right(ended_well)),
            ("extract from", "extract {M} train.jsonl out --device cpu", Right(not_run(finite_features))),
            ("probe", "probe {M} --train train.jsonl --test valid.jsonl --label x --output p", Refused(("jsonl",))),
            ("prepare as a list", "prepare list.txt --output m.jsonl --workers 0", Right(not_run(told_of_bad))),
        ]
        verb, text, right = others[number % 5]
        refused = Refused(("train.jsonl|list.txt|bad.jsonl|without features|no audio",), partial=True)
        expected = Either(refused, right) if isinstance(right, Right) else right
        yield Trial(group, f"{verb} {name}", named(text), expected, write)
    for name, (seconds, wrong) in SECONDS.items():

        def durations(folder: Path, seconds: Callable[[int], Any] = seconds) -> None:
            (folder / "train.jsonl").write_bytes(lines_of("audio_filepath", "duration", seconds=seconds))

        for suffix, overrides in (
            ("", ()),
            (", no limits", ("model.train_ds.max_duration=null", "model.train_ds.min_duration=null")),
        ):
            told = Refused(("train.jsonl|duration|seconds",), partial=True)
            command = pretrain("trainer.limit_val_batches=1", *overrides)
            shorter = name in {"minutes", "hours", "nanoseconds"} and bool(overrides)
            expected = Either(told, TRAINED) if shorter or not wrong else told
            yield Trial(group, f"durations: {name}{suffix}", command, expected, durations)
    for name, (content, wrong) in ALL_PATHS.items():

        def paths(folder: Path, content: bytes = content) -> None:
            (folder / "train.jsonl").write_bytes(content)

        expected = Refused(("wav|audio|flac|ark",), partial=True) if wrong else Right(not_run(trained))
        yield Trial(group, f"paths: {name}", pretrain(), expected, paths)
    for value in ONE_VALUE:
        words = "train|manifest|jsonl|stdin|wav"
        command = pretrain(f"model.train_ds.manifest_filepath={value}")
        yield Trial(group, f"manifest_filepath={value}", command, Either(Refused((words,)), TRAINED))
    for name, (content, kind) in NOISES.items():

        def noise(folder: Path, content: bytes = content) -> None:
            (folder / "noise.jsonl").write_bytes(content)

        overrides = ("model.train_ds.noise_manifest=noise.jsonl", "model.train_ds.batch_augmentor.noise_ratio=1.0")
        told = Refused(("noise",), partial=True)
        kinds: dict[str, Expected] = {
            "no": told,
            "ok": TRAINED,
            "any": Either(told, TRAINED),
            "named": Right(said("bad noise")),
        }
        expected = kinds[kind]
        yield Trial(group, f"noise: {name}", pretrain(*overrides, "trainer.max_steps=6"), expected, noise)


# ---------------------------------------------------------------------------------------------------------------- audio


def at_rate(rate: int, channels: int = 1) -> np.ndarray[Any, Any]:
    """Two seconds at another rate."""
    index = np.minimum((np.arange(2 * rate) * RATE / rate).astype(int), len(FLOATS) - 1)
    return np.stack([FLOATS[index]] * channels, 1) if channels > 1 else FLOATS[index]


def video() -> bytes:
    """Two seconds of picture and sound."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        picture, sound = container.add_stream("mpeg4", rate=5), container.add_stream("aac", rate=RATE)
        picture.width, picture.height, picture.pix_fmt = 64, 64, "yuv420p"
        for _ in range(10):
            image = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
            container.mux(picture.encode(image))
        frame = av.AudioFrame.from_ndarray((FLOATS * 32767).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate = RATE
        resampler = av.AudioResampler(format="fltp", layout="mono", rate=RATE, frame_size=1024)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(sound.encode(part))
        for stream in (picture, sound):
            container.mux(stream.encode(None))
    return file.getvalue()


def picture_only() -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        picture = container.add_stream("mpeg4", rate=5)
        picture.width, picture.height, picture.pix_fmt = 64, 64, "yuv420p"
        for _ in range(10):
            image = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
            container.mux(picture.encode(image))
        container.mux(picture.encode(None))
    return file.getvalue()


def zipped(name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr(name, data)
    return out.getvalue()


def third_audio() -> dict[str, tuple[bytes, str]]:
    """The content of a file, and what it is: good (2 s of speech), bad, or a matter of opinion."""
    wav, flac, mp3, sph = riff(fmt(), (b"data", PCM)), encoded("FLAC"), encoded("MP3"), encoded("NIST")
    opus, caf = encoded("OGG", subtype="OPUS"), encoded("CAF")
    surround = encoded("WAVEX", at_rate(48_000, 6), 48_000)
    return {
        # what people have
        "stereo_44100.wav": (encoded("WAV", at_rate(44_100, 2), 44_100), "good"),
        "surround_48000.wav": (surround, "good"),
        "surround_48000.flac": (encoded("FLAC", at_rate(48_000, 6), 48_000), "good"),
        "phone_8000.sph": (encoded("NIST", at_rate(8000, 2), 8000, "ULAW"), "good"),
        "voice_11025.aiff": (encoded("AIFF", at_rate(11_025), 11_025), "good"),
        "studio_96000.caf": (encoded("CAF", at_rate(96_000, 2), 96_000), "good"),
        "studio_192000.wav": (encoded("WAV", at_rate(192_000), 192_000, "PCM_24"), "good"),
        "message_48000.opus": (encoded("OGG", at_rate(48_000), 48_000, "OPUS"), "good"),
        "message_24000.opus": (encoded("OGG", at_rate(24_000, 2), 24_000, "OPUS"), "good"),
        "podcast_22050.mp3": (encoded("MP3", at_rate(22_050, 2), 22_050), "good"),
        "video.mp4": (video(), "any"),
        "memo.m4a": (media("ipod", "aac"), "any"),
        "memo.mov": (media("mov", "pcm_s16le"), "good"),
        "memo.mka": (media("matroska", "pcm_s16le"), "good"),
        "picture_only.mp4": (picture_only(), "bad"),
        "doubles.wav": (encoded("WAV", FLOATS, subtype="DOUBLE"), "good"),
        "unsigned_8.wav": (encoded("WAV", FLOATS, subtype="PCM_U8"), "good"),
        "loud_ints_as_floats.wav": (floats_with(20_000.0, slice(None)), "any"),
        # under another name
        "flac_named.wav": (flac, "good"),
        "mp3_named.wav": (mp3, "good"),
        "wav_named.mp3": (wav, "good"),
        "opus_named.mp3": (opus, "good"),
        "m4a_named.wav": (media("ipod", "aac"), "any"),
        "sph_named.wav": (sph, "good"),
        "zip_named.wav": (zipped("0.wav", wav), "bad"),
        "gzip_named.flac": (gzip.compress(flac), "bad"),
        "tar_named.wav": (bytes(10_240), "bad"),
        "picture_named.wav": (b"\x89PNG\r\n\x1a\n" + bytes(5000), "bad"),
        "pdf_named.wav": (b"%PDF-1.7\n" + bytes(5000), "bad"),
        "no_suffix": (wav, "good"),
        "CAPITALS.WAV": (wav, "good"),
        # what downloads and copies leave
        "page_404.wav": (b"<!DOCTYPE html><html><h1>404 Not Found</h1></html>", "bad"),
        "error.json.wav": (b'{"error": "Rate limit exceeded"}', "bad"),
        "pointer.wav": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 64044\n", "bad"),
        "half.flac": (flac[: len(flac) // 2], "bad"),
        "half.m4a": (media("ipod", "aac")[:6000], "any"),
        "half.opus": (opus[: len(opus) // 2], "any"),
        "half.mp3": (mp3[: len(mp3) // 2], "any"),
        "half.sph": (sph[: len(sph) // 2], "any"),
        "half.caf": (caf[: len(caf) // 2], "any"),
        "half.mp4": (video()[: len(video()) // 2], "any"),
        "header_only.flac": (flac[:86], "bad"),
        "header_only.sph": (sph[:1024], "bad"),
        "holes.flac": (patched(flac, len(flac) // 2, bytes(4096)), "bad"),
        "holes.wav": (patched(wav, 20_000, bytes(4096)), "any"),
        "twice.wav": (wav + wav, "any"),
        "twice.flac": (flac + flac, "any"),
        "twice.mp3": (mp3 + mp3, "any"),
        "text_mode.wav": (wav.replace(b"\n", b"\r\n"), "any"),
        "text_mode.flac": (flac.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"), "bad"),
        "utf8_mode.wav": (wav.decode("latin-1").encode(), "any"),
        "base64.wav": (base64.b64encode(wav), "bad"),
        "hex.wav": (wav.hex().encode(), "bad"),
        "mark_before.wav": (b"\xef\xbb\xbf" + wav, "any"),
        "raw_pcm.wav": (PCM, "bad"),
        "._hidden.wav": (b"\0\5\x16\7\0\2\0\0Mac OS X        " + bytes(4064), "any"),
        # samples that are worthless
        "swapped_bytes.wav": (riff(fmt(), (b"data", np.frombuffer(PCM, "<i2").byteswap().tobytes())), "any"),
        "silence.wav": (riff(fmt(), (b"data", bytes(len(PCM)))), "any"),
        "constant.wav": (riff(fmt(), (b"data", b"\x00\x40" * 2 * RATE)), "any"),
        "one_tick.wav": (riff(fmt(), (b"data", patched(bytes(len(PCM)), 20_000, b"\xff\x7f"))), "any"),
        "huge_1e8.wav": (floats_with(1e8), "any"),
        "huge_negative_1e12.wav": (floats_with(-1e12, 31_999), "bad"),
        "huge_stereo_right.wav": (floats_with(5e20, 100, channels=2), "bad"),
        "huge_double_1e300.wav": (floats_with(1e300, bits=64), "bad"),
        "nan_middle_of_six.wav": (floats_with(math.nan, channels=6), "bad"),
        "infinite_first.wav": (floats_with(-math.inf, 0), "bad"),
        "huge.caf": (encoded("CAF", np.where(np.arange(2 * RATE) == 31_000, -1e25, FLOATS), subtype="DOUBLE"), "bad"),
        "nan.aiff": (encoded("AIFF", np.where(np.arange(2 * RATE) == 7, np.nan, FLOATS), subtype="FLOAT"), "bad"),
    }


def _mixed(folder: Path) -> None:
    """All kinds of good audio, and what else is in a folder of a corpus."""
    place = folder / "corpus/a b/c"
    place.mkdir(parents=True)
    for name, (content, kind) in third_audio().items():
        if kind == "good":
            (place / name).write_bytes(content)
    for name in (".DS_Store", "Thumbs.db", "desktop.ini", "README", "LICENSE.txt", "trans.txt", "x.lab", "x.TextGrid"):
        (place / name).write_bytes(b"no audio\n")
    for name in ("download.wav.part", "download.flac.crdownload", "0.wav~", ".0.wav.swp", "0 (1).wav.tmp"):
        (place / name).write_bytes(riff(fmt(), (b"data", PCM))[:9000])
    (folder / "corpus/empty").mkdir()
    (folder / "corpus/back").symlink_to("..")


def _long(folder: Path) -> None:
    """An hour of silence after a second of speech, and one that claims 20 hours."""
    (folder / "long").mkdir()
    hour = RATE * 2 * 3600
    with (folder / "long/hour.wav").open("wb") as file:
        file.write(riff(fmt(), (b"data", PCM))[:44])
        file.write(PCM)
        file.truncate(44 + hour)
        file.seek(4)
        file.write(struct.pack("<I", 36 + hour))
        file.seek(40)
        file.write(struct.pack("<I", hour))
    shutil.copy(folder / "audio/0.wav", folder / "long/0.wav")
    with (folder / "train.jsonl").open("ab") as file:
        file.write(line(audio_filepath="long/hour.wav", duration=3600.0))


IN_TRAINING = (
    *("stereo_44100.wav", "surround_48000.wav", "phone_8000.sph", "message_48000.opus", "video.mp4", "memo.m4a"),
    *("studio_192000.wav", "zip_named.wav", "page_404.wav", "half.flac", "holes.flac", "huge_1e8.wav"),
    *("huge_stereo_right.wav", "nan_middle_of_six.wav", "silence.wav", "raw_pcm.wav", "pointer.wav"),
)


def prepared_well(folder: Path, outcome: Outcome) -> str | None:
    """Every good file of `_mixed` is in the manifest with two seconds."""
    found = {Path(row["audio_filepath"]).name: row for row in map(json.loads, (folder / "m.jsonl").open())}
    for name, (_, kind) in third_audio().items():
        if kind == "good" and (name not in found or abs(found[name]["duration"] - 2) > 0.05):
            return f"{name}: {found.get(name)}"
    return None


def audio() -> Iterator[Trial]:
    group = "audio"
    for number, (name, (content, kind)) in enumerate(third_audio().items()):

        def write(folder: Path, name: str = name, content: bytes = content) -> None:
            (folder / "odd").mkdir()
            (folder / "odd" / name).write_bytes(content)
            shutil.copy(folder / "audio/0.wav", folder / "odd/0.wav")
            with (folder / "train.jsonl").open("ab") as file:
                file.write(line(audio_filepath=f"odd/{name}", duration=2.0))

        if not name.startswith("."):
            command = ["prepare", "odd", "--output", "m.jsonl", "--workers", "0"]
            yield Trial(group, f"prepare {name}", command, Right(prepared(name, kind)), write)
        if number % 2 or kind == "good":
            command = ["extract", f"{Fixture.path}/model.nemo", f"odd/{name}", "out", "--device", "cpu"]
            yield Trial(group, f"extract {name}", command, extracted(kind), write)
        if name in IN_TRAINING:
            check = said("bad") if kind == "bad" else trained
            yield Trial(group, f"train on {name}", pretrain("trainer.max_steps=5"), Right(check), write)
    expected: Expected
    told: Expected = Either(Refused((), partial=True), DONE)
    for text, expected in (
        ("prepare corpus --output m.jsonl --workers 2", Right(prepared_well)),
        ("prepare corpus --output m.jsonl --workers 0 --check header", Right(prepared_well)),
        ("prepare corpus --output m.jsonl --workers 0 --split folder --folder-level 2", told),
        ("prepare corpus --output m.jsonl --workers 0 --shards 3", Right(prepared_well)),
        (
            "extract {M} corpus out --device cpu --layers last",
            Either(Refused((), partial=True), Right(finite_features)),
        ),
    ):
        yield Trial(group, f"mixed: {text}", named(text), expected, _mixed, own_process=True)
    for text, expected in (
        ("prepare long --output m.jsonl --workers 0", Right(prepared("0.wav", "any"))),
        ("prepare long --output m.jsonl --workers 0 --check header", Right(prepared("0.wav", "any"))),
        ("inspect train.jsonl --examples 1 --output i.html", told),
        (
            "extract {M} long out --device cpu --layers last",
            Refused(("max-duration|without features|bad",), partial=True),
        ),
        (
            "extract {M} long/hour.wav out --device cpu --max-duration 60",
            Refused(("hour.wav|duration|bad",), partial=True),
        ),
    ):
        yield Trial(group, f"an hour: {text}", named(text), expected, _long)
    yield Trial(group, "an hour: pretrain", pretrain(), Right(said("left out")), _long)


# ---------------------------------------------------------------------------------------------------------------- kills

TERM, INT, KILL, USR1, HUP, QUIT, ABRT, STOP, CONT = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGUSR1, signal.SIGHUP),
    *(signal.SIGQUIT, signal.SIGABRT, signal.SIGSTOP, signal.SIGCONT),
)
EVERY = "+exp_manager.checkpoint_callback_params.every_n_train_steps=2"
THIRD_KILLS = [
    Kill((INT,), "step 2", to="monitor", ranks=2, codes=(0, 75), continued=True),
    Kill((ABRT,), "step 2", to="monitor", ranks=2, codes=(0, 75), continued=True),
    Kill((QUIT,), "step 2", to="rank 1", ranks=2),
    Kill((signal.SIGFPE,), "step 3", to="rank 1", ranks=2),
    Kill((USR1,), "step 2", to="rank 1", ranks=2, codes=(75, 0), continued=True),
    Kill((STOP, KILL), "step 2", to="rank 1", ranks=2),
    Kill((STOP, TERM, CONT), "step 2", ranks=2),
    Kill((TERM,), "second 2", ranks=2, codes=(75, -15, 143, 1)),
    Kill((KILL,), "second 3", ranks=2, codes=DIED),
    Kill((TERM,), "step 0", ranks=2),
    Kill((INT, INT, INT), "step 2", ranks=2, codes=(75, 130, 1)),
    Kill((TERM,), "file checkpoints/.*", ranks=2, codes=(75, 0), continued=True),
    Kill((KILL,), "step 2", to="worker", ranks=2, overrides=WORKERS),
    Kill((KILL,), "file metrics.csv", codes=DIED),
    Kill((signal.SIGILL,), "step 3", codes=(75, -4, 132)),
    Kill((ABRT,), "step 3", to="worker", overrides=WORKERS),
    Kill((INT,), "step 3", to="worker", overrides=WORKERS, codes=(75, 0), continued=True),
    Kill((INT,), "step 3", to="group", overrides=WORKERS, codes=(75, 130, 1)),
    Kill((HUP,), "step 3", to="group", codes=(75, -1, 129)),
]
DURING: dict[str, Setup] = {
    "the manifest grows": lambda folder: (folder / "train.jsonl").write_bytes(GOOD * 3),
    "metrics.csv is emptied": lambda folder: os.truncate(folder / METRICS, 0),
    "the log is emptied": lambda folder: os.truncate(folder / RUN / "log_globalrank-0_localrank-0.txt", 0),
    "audio becomes stereo of 44.1 kHz": lambda folder: (folder / "audio/3.wav").write_bytes(
        encoded("WAV", at_rate(44_100, 2), 44_100)
    ),
    "checkpoints becomes a link elsewhere": lambda folder: moved(RUN / "checkpoints")(folder),
}
"""What is done to the files while training runs."""


def program(command: list[str], folder: Path, limit_s: float = 60) -> tuple[int, str]:
    """Another program besides the one that runs."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    whole = [sys.executable, "-m", "nest_ssl", *command]
    done = subprocess.run(whole, cwd=folder, capture_output=True, timeout=limit_s, env=environment, check=False)
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


def until_step(step: int, folder: Path, process: subprocess.Popen[bytes]) -> None:
    begin = time.monotonic()
    while not _is_seen(f"step {step}", folder / RUN, begin) and process.poll() is None:
        time.sleep(0.002)


def copied_while_it_runs(folder: Path, command: list[str]) -> str | None:
    """Copies of the folder, taken while checkpoints are written, resume as the run itself does, or are refused."""
    process = start(command, folder, {})
    for step in (2, 4, 5):
        until_step(step, folder, process)
        try:
            shutil.copytree(folder / RUN, folder / f"runs/copy{step}")
        except shutil.Error:  # a file that is no longer there: so it is with every program that copies
            continue
    if process.wait(60) != 0:
        return f"the run itself: {_output(folder)[-300:]}"
    expected = losses(Fixture.path / "runs/whole")
    for step in (2, 4, 5):
        if (folder / f"runs/copy{step}").exists():
            code, text = program([*command, f"exp_manager.name=copy{step}"], folder)
            if "Traceback" in text or code not in {0, 1}:
                return f"copy{step}: exit code {code}: {text[-300:]}"
            if code == 0 and losses(folder / f"runs/copy{step}") != expected:
                return f"copy{step}: other losses"
    return None


def besides(*others: str, refused: str = "") -> Callable[[Path, list[str]], str | None]:
    """Other commands, while the run is at work: they are right (or refused), and the run is none the worse."""

    def act(folder: Path, command: list[str]) -> str | None:
        process = start(command, folder, {})
        until_step(2, folder, process)
        (folder / "linked").symlink_to("runs")
        for other in others:
            arguments = named(other.replace("{run}", str(RUN)))
            code, text = program([*command, *arguments[1:]] if arguments[0] == "again" else arguments, folder)
            if "Traceback" in text or CONTROL.search(text):
                return f"{other}: {text[-300:]}"
            if refused and (code != 1 or refused not in text):
                return f"{other}: exit code {code}: {text[-300:]}"
            if not refused and code != 0:
                return f"{other}: exit code {code}: {text[-300:]}"
        first = process.wait(90)
        steps = sorted(losses(folder / RUN))
        return None if first == 0 and steps == list(range(len(steps))) else f"the run: exit code {first}, rows {steps}"

    return act


def at_once(text: str, expected_files: str, number: int) -> Callable[[Path, list[str]], str | None]:
    """The same command twice at the same time: each ends well or says why not, and the result is whole."""

    def act(folder: Path, command: list[str]) -> str | None:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
        whole = [sys.executable, "-m", "nest_ssl", *named(text)]
        pair = [
            subprocess.Popen(whole, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
            for _ in range(2)
        ]
        ends = [(process.communicate(timeout=60)[0].decode(errors="replace"), process.returncode) for process in pair]
        for output, code in ends:
            if "Traceback" in output or code not in {0, 1, 2}:
                return f"exit code {code}: {output[-300:]}"
        if all(code for _, code in ends):
            return f"both ended with an error: {ends[0][0][-200:]}"
        for path in folder.rglob("*.npy"):
            np.load(path)
        found = [path for path in folder.glob(expected_files) if "tmp" not in path.name]
        lines = (
            sum(len(path.read_text().splitlines()) for path in found) if expected_files.endswith("l") else len(found)
        )
        return None if lines == number else f"{lines} instead of {number}"

    return act


def kills() -> Iterator[Trial]:
    group = "kills"
    for kill in THIRD_KILLS:
        signals = " then ".join(number.name for number in kill.signals)
        name = f"{signals} to {kill.to} at {kill.seen}, {kill.ranks} rank{'s' * (kill.ranks > 1)}"
        command = resume(f"trainer.devices={kill.ranks}", EVERY, *kill.overrides)
        yield Trial(group, name, command, DONE, act=killed(kill), limit_s=120)
    for name, disturb in DURING.items():
        command = resume("trainer.max_steps=40", EVERY)
        yield Trial(group, f"while it runs, {name}", command, DONE, act=disturbed(disturb), limit_s=120)
    every_step = "+exp_manager.checkpoint_callback_params.every_n_train_steps=1"
    yield Trial(group, "copied while it runs", resume(every_step), DONE, act=copied_while_it_runs, limit_s=120)
    many = resume("trainer.max_steps=300", "trainer.check_val_every_n_epoch=1000", EVERY)
    watching = besides("report {run} --output r.html", "doctor {run}", f"info {LAST}")
    yield Trial(group, "report, doctor and info while it runs", many, DONE, act=watching, limit_s=120)
    reading = besides(f"extract {LAST} audio/0.wav out --device cpu", f"export {LAST} new.nemo --format nemo")
    yield Trial(group, "extract and export while it runs", many, DONE, act=reading, limit_s=120)
    for name, override in (
        ("a link", "exp_manager.exp_dir=linked"),
        ("its log folder", f"+exp_manager.explicit_log_dir={RUN}"),
    ):
        act = besides(f"again {override}", refused="using it")
        yield Trial(group, f"a second run through {name}", many, DONE, act=act, limit_s=120)
    for text, files, number in (
        ("prepare audio --output m.jsonl --workers 0", "m.jsonl", 8),
        ("extract {M} audio out --device cpu --layers last", "out/**/*.npy", 8),
        ("export {M} new.nemo --format nemo", "new.nemo*", 1),
        ("prepare audio --output m.jsonl --workers 0 --shards 2", "audio_*.tar", 2),
    ):
        yield Trial(group, f"twice at once: {text}", [], DONE, act=at_once(text, files, number), limit_s=120)


# ---------------------------------------------------------------------------------------------------------- checkpoints

CHECKPOINTS = RUN / "checkpoints"


def best_of(folder: Path) -> Path:
    return next((folder / CHECKPOINTS).glob("*val_loss*.ckpt")).relative_to(folder)


def taken(source: str, target: Path = LAST) -> Setup:
    """A file or folder of another run of the fixture, in place of one of ours."""

    def setup(folder: Path) -> None:
        replaced(nothing, target)(folder)
        origin = Fixture.path / source
        (shutil.copytree if origin.is_dir() else shutil.copy)(origin, folder / target)

    return setup


def kept_only(*patterns: str) -> Setup:
    """A folder that was copied in part: all other files are missing."""

    def setup(folder: Path) -> None:
        keep = {path for pattern in patterns for path in (folder / RUN).glob(pattern)}
        for path in sorted((folder / RUN).rglob("*"), reverse=True):
            if path.is_file() and path not in keep:
                path.unlink()

    return setup


def renamed_to(name: str) -> Setup:
    """All checkpoints but the last are gone, and the last has another name."""

    def setup(folder: Path) -> None:
        data = (folder / LAST).read_bytes()
        for path in (folder / CHECKPOINTS).glob("*.ckpt"):
            path.unlink()
        (folder / CHECKPOINTS / name).write_bytes(data)

    return setup


def times(seconds: float) -> Setup:
    def setup(folder: Path) -> None:
        for path in (folder / RUN).rglob("*"):
            os.utime(path, (seconds, seconds))

    return setup


def _only_best(folder: Path) -> None:
    for path in list((folder / CHECKPOINTS).glob("last*.ckpt")):
        path.unlink()


def moved(path: Path) -> Setup:
    """A folder is elsewhere, and a link leads there."""

    def setup(folder: Path) -> None:
        (folder / path).rename(folder / "moved")
        (folder / path).symlink_to(folder / "moved")

    return setup


def _read_only(folder: Path) -> None:
    for path in (folder / RUN).rglob("*"):
        if path.is_file():
            path.chmod(0o444)


def _nested(folder: Path) -> None:
    shutil.copytree(folder / RUN, folder / "copy")
    shutil.copytree(folder / "copy", folder / RUN / "run")


def _flat(folder: Path) -> None:
    for path in list((folder / CHECKPOINTS).iterdir()):
        path.rename(folder / RUN / path.name)
    (folder / CHECKPOINTS).rmdir()


def _emptied(folder: Path) -> None:
    for path in (folder / RUN).rglob("*"):
        if path.is_file():
            os.truncate(path, 0)


def all_checkpoints(change: Callable[[bytes], bytes]) -> Setup:
    def setup(folder: Path) -> None:
        for path in list((folder / CHECKPOINTS).glob("*.ckpt")):
            on_bytes(change, path.relative_to(folder))(folder)

    return setup


RESUMES: dict[str, Setup] = {
    "the one before, copied over the last": lambda folder: replaced(
        lambda path: shutil.copy(folder / BEFORE, path), LAST
    )(folder),
    "the best, copied over the last": lambda folder: replaced(
        lambda path: shutil.copy(folder / best_of(folder), path), LAST
    )(folder),
    "only the best is left": _only_best,
    "the .nemo is missing": lambda folder: next((folder / CHECKPOINTS).glob("*.nemo")).unlink(),
    "the .nemo is damaged": lambda folder: on_bytes(zeros, CHECKPOINTS / "run.nemo")(folder),
    "last.ckpt is a link to a copy": both(
        lambda folder: shutil.copy(folder / LAST, folder / "kept.ckpt"), replaced(link("../../../kept.ckpt"), LAST)
    ),
    "the run folder is a link": moved(RUN),
    "checkpoints is a link": moved(CHECKPOINTS),
    "a copy of the run in the run": _nested,
    "all files of 1970": times(0),
    "all files of 2099": times(4_070_908_800),
    "all files are read-only": _read_only,
    "last.ckpt.part besides": lambda folder: (folder / CHECKPOINTS / "last.ckpt.part").write_bytes(b"half"),
    "last (1).ckpt besides": lambda folder: shutil.copy(folder / BEFORE, folder / CHECKPOINTS / "last (1).ckpt"),
    "._last.ckpt besides": lambda folder: (folder / CHECKPOINTS / "._last.ckpt").write_bytes(bytes(4096)),
    ".DS_Store besides": lambda folder: (folder / CHECKPOINTS / ".DS_Store").write_bytes(bytes(4096)),
    "a half-written temporary file besides": lambda folder: (folder / CHECKPOINTS / ".last.ckpt.tmp").write_bytes(b"x"),
    "a folder of another run besides": lambda folder: shutil.copytree(
        Fixture.path / "runs/two_ranks", folder / CHECKPOINTS / "two_ranks"
    ),
    "hparams.yaml of another run": taken("runs/averaged/hparams.yaml", PARAMETERS),
    "hparams.yaml with Windows line ends": on_bytes(lambda data: data.replace(b"\n", b"\r\n"), PARAMETERS),
    "hparams.yaml is empty": on_bytes(cut(0), PARAMETERS),
    **{f"a bit flipped at {share:.0%}": on_bytes(flipped(share), LAST) for share in (0.02, 0.11, 0.38, 0.52, 0.83)},
    "the last page is missing": on_bytes(lambda data: data[:-4096], LAST),
    "text mode": on_bytes(lambda data: data.replace(b"\n", b"\r\n"), LAST),
    "a web page": on_bytes(always(b"<html>503 Service Unavailable</html>"), LAST),
}
"""Resumes with the losses of the undisturbed run."""

PERHAPS: dict[str, Setup] = {
    "only last.ckpt was copied": kept_only("checkpoints/last.ckpt"),
    "only checkpoints was copied": kept_only("checkpoints/*"),
    "all but metrics.csv was copied": replaced(nothing, METRICS),
    "all but hidden files was copied": replaced(nothing, SAVED),
    "metrics.csv of another run": taken("runs/two_ranks/metrics.csv", METRICS),
    "metrics.csv of the finished run": taken("runs/whole/metrics.csv", METRICS),
    ".saved of the finished run": taken("runs/whole/.saved", SAVED),
    "last.ckpt of two ranks": taken("runs/two_ranks/checkpoints/last.ckpt"),
    "last.ckpt of two ranks, the one before": taken("runs/two_ranks/checkpoints/last-before.ckpt"),
    "last.ckpt of the finished run": taken("runs/whole/checkpoints/last.ckpt"),
    "last.ckpt with averaged weights": taken("runs/averaged/checkpoints/last.ckpt"),
    "last.ckpt of shards": taken("runs/sharded/checkpoints/last.ckpt"),
    "the steps of another run": changed(_store("global_step", 9)),
    "the optimizer of another run": changed(
        lambda content: content.update(
            optimizer_states=torch.load(Fixture.path / "runs/two_ranks/checkpoints/last.ckpt", weights_only=True)[
                "optimizer_states"
            ]
        )
    ),
}
"""Resumes and goes on with finite losses, without mixed rows; or is refused with a name."""

NEVER_FROM_0: dict[str, Setup] = {
    "last.ckpt.bak alone": renamed_to("last.ckpt.bak"),
    "last.pt alone": renamed_to("last.pt"),
    "model.safetensors alone": both(renamed_to("x"), taken("model.safetensors", CHECKPOINTS / "x")),
    "only the .nemo was copied": kept_only("checkpoints/*.nemo", "metrics.csv", ".saved", "hparams.yaml"),
    "all but checkpoints was copied": kept_only("*", ".saved"),
    "checkpoints in the folder above": _flat,
    "every file is empty": _emptied,
    "all checkpoints are cut": all_checkpoints(cut(0.7)),
    "all checkpoints have a flipped bit": all_checkpoints(flipped(0.6)),
    "all checkpoints are NaN": lambda folder: [
        changed(_weights(lambda x: x * math.nan), path.relative_to(folder))(folder)
        for path in list((folder / CHECKPOINTS).glob("*.ckpt"))
    ],
    "all checkpoints are zeros": all_checkpoints(zeros),
}
"""Refused, or resumed; never a new start among the old results."""


def goes_on(folder: Path, outcome: Outcome) -> str | None:
    """It resumed, rows are in order, and losses are finite."""
    if "resumed at step" not in outcome.text:
        return not_mixed(folder, outcome)
    steps = [int(row["step"]) for row in rows(folder / RUN) if row["train_loss"]]
    return trained(folder, outcome) if steps == sorted(set(steps)) else f"rows are mixed: {steps}"


def warned(*words: str) -> Check:
    """It resumed, goes on, and one of these words is in the output."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        if not any(word in outcome.text for word in words):
            return f"not in the output: {words}"
        return goes_on(folder, outcome)

    return check


def _lines(change: Callable[[list[bytes]], list[bytes]]) -> Setup:
    def setup(folder: Path) -> None:
        Fixture.run(folder)
        (folder / "train.jsonl").write_bytes(b"".join(change(GOOD.splitlines(keepends=True))))

    return setup


def _other_audio(folder: Path) -> None:
    Fixture.run(folder)
    for i in range(8):
        (folder / f"audio/{i}.wav").write_bytes(encoded("WAV", at_rate(44_100, 2), 44_100))


BINS = ("+model.train_ds.use_bucketing=true", "+model.train_ds.bucket_duration_bins=[1.8,2.4]")
DIFFER = ("batches", "differ", "data has changed", "changed since")
RESUMED_WITH: dict[str, tuple[Setup, tuple[str, ...], Expected]] = {
    "half of the lines": (_lines(lambda found: found[:4]), (), Right(warned(*DIFFER))),
    "lines in another order": (_lines(lambda found: found[::-1]), (), Right(warned(*DIFFER))),
    "lines twice": (_lines(lambda found: found * 2), (), Right(warned(*DIFFER))),
    "one line": (_lines(lambda found: found[:1]), (), Refused(("train.jsonl|batch_size",))),
    "no line": (_lines(lambda found: []), (), Refused(("train.jsonl",))),
    "lines of files that are gone": (
        _lines(lambda found: [text.replace(b"audio/", b"gone/") for text in found]),
        (),
        Refused(("gone|files",), partial=True),
    ),
    "files that are gone": (
        both(Fixture.run, replaced(Path.mkdir, Path("audio"))),
        (),
        Refused(("audio|files",), partial=True),
    ),
    "other audio under the same names": (_other_audio, (), DONE),
    "buckets": (Fixture.run, BINS, Right(warned(*DIFFER))),
    "buckets that hold nothing": (
        Fixture.run,
        (BINS[0], "+model.train_ds.bucket_duration_bins=[0.1,0.2]"),
        Either(Refused(("bucket|duration",)), Right(warned(*DIFFER))),
    ),
    "buckets of other sizes": (
        Fixture.run,
        (*BINS, "+model.train_ds.bucket_batch_size=[1,2,1]"),
        Either(Refused(("bucket_batch_size",)), Right(warned(*DIFFER))),
    ),
    "batches of one": (Fixture.run, ("model.train_ds.batch_size=1",), Right(warned(*DIFFER))),
    "a batch of all": (Fixture.run, ("model.train_ds.batch_size=8",), Right(warned(*DIFFER))),
    "a batch of more than all": (Fixture.run, ("model.train_ds.batch_size=9",), Refused(("batch_size|train.jsonl",))),
    "seconds instead of a number": (
        Fixture.run,
        (
            *BINS[:1],
            "+model.train_ds.num_buckets=2",
            "model.train_ds.batch_size=null",
            "+model.train_ds.batch_duration=5",
        ),
        Right(warned(*DIFFER)),
    ),
    "two workers": (Fixture.run, WORKERS, Right(resumed)),
    "another batch of validation": (Fixture.run, ("model.validation_ds.batch_size=1",), Right(goes_on)),
    "another validation": (Fixture.run, ("model.validation_ds.manifest_filepath=train.jsonl",), Right(goes_on)),
    "the same weight_decay": (Fixture.run, ("model.optim.weight_decay=1e-3",), Right(resumed)),
    "the same betas": (Fixture.run, ("model.optim.betas=[.9,0.980]",), Right(resumed)),
    "weight_decay of 10": (Fixture.run, ("model.optim.weight_decay=10",), takes_effect("model.optim.weight_decay")),
    "betas of 0": (Fixture.run, ("model.optim.betas=[0.0,0.0]",), takes_effect("model.optim.betas")),
    "betas exchanged": (Fixture.run, ("model.optim.betas=[0.98,0.9]",), takes_effect("model.optim.betas")),
    "eps of 1": (Fixture.run, ("++model.optim.eps=1",), takes_effect("model.optim.eps")),
    "eps of 0": (
        Fixture.run,
        ("+model.optim.eps=0",),
        Either(Refused(("eps|diverged",), partial=True), Right(goes_on)),
    ),
    "negative clipping": (Fixture.run, ("trainer.gradient_clip_val=-1",), Refused(("gradient_clip_val",))),
    "another preprocessor's rate": (Fixture.run, ("model.preprocessor.sample_rate=8000",), Refused(("sample_rate",))),
    "blocks of three frames": (Fixture.run, ("model.masking.block_size=3",), Refused(("mask|block_size",))),
    "a size, with keys that keep the old one": (
        Fixture.run,
        ("size=small",),
        Right(warned("model.optim.weight_decay")),
    ),
    "the weights of a file": (
        Fixture.run,
        ("+init_from_nemo_model={folder}/model.nemo",),
        Either(Refused(("init_from|model.nemo",)), Right(warned("init_from", "starting weights"))),
    ),
    "its log folder": (Fixture.run, (f"+exp_manager.explicit_log_dir={RUN}",), Right(resumed)),
    "a slash after the name": (Fixture.run, ("exp_manager.name=run/",), Either(Refused(("name",)), Right(resumed))),
    "a name in capitals": (Fixture.run, ("exp_manager.name=RUN",), DONE),
    **{
        f"resume_from_checkpoint={value}": (
            Fixture.run,
            (f"+exp_manager.resume_from_checkpoint={value}",),
            Either(Refused((f"resume_from_checkpoint|{value}",)), Right(resumed)),
        )
        for value in (
            *(
                "last",
                "latest",
                "best",
                "auto",
                "true",
                "runs/run",
                "runs/run/checkpoints",
                "run/checkpoints/last.ckpt",
            ),
            *("runs/run/checkpoints/last.ckpt", "runs/run/checkpoints/run.nemo", "~/last.ckpt", "train.jsonl", "0"),
        )
    },
}

PARTS: dict[str, Setup] = {
    "only metrics.csv": kept_only("metrics.csv"),
    "only checkpoints": kept_only("checkpoints/*"),
    "only hparams.yaml": kept_only("hparams.yaml"),
    "only the log": kept_only("log*"),
    "no metrics.csv": replaced(nothing, METRICS),
    "every file empty": _emptied,
    "metrics.csv of Excel": on_bytes(lambda data: data.replace(b",", b";").replace(b".", b","), METRICS),
    "metrics.csv in UTF-16": on_bytes(lambda data: data.decode().encode("utf-16"), METRICS),
}
"""For `report` and `doctor`: they say what is missing, or do without."""


def checkpoints() -> Iterator[Trial]:
    group = "checkpoints"
    expected: Expected
    refused = Refused(("last.ckpt|checkpoint|.saved|hparams|metrics.csv",))
    for table, expected in (
        (RESUMES, Right(resumed)),
        (PERHAPS, Either(refused, Right(goes_on))),
        (NEVER_FROM_0, Either(refused, Right(resumed))),
    ):
        for name, damage in table.items():
            yield Trial(group, name, resume(), expected, both(Fixture.run, damage))
    for name, (setup, overrides, expected) in RESUMED_WITH.items():
        copy = both(setup, lambda folder: shutil.copy(Fixture.path / "model.nemo", folder))
        yield Trial(group, f"resumed with {name}", resume(*overrides), expected, copy)
    for name, damage in PARTS.items():
        told = Right(said(then=ended_well), codes=(0, 1))
        for verb in ("report", "doctor"):
            yield Trial(group, f"{verb} with {name}", [verb, str(RUN)], told, both(Fixture.run, damage))


# ---------------------------------------------------------------------------------------------------------- model files


def repacked(change: Callable[[dict[str, bytes]], dict[str, bytes]], mode: str = "w") -> Setup:
    """x.nemo, with other members."""
    return lambda folder: nemo(change(nemo_members()), mode=mode)(folder)


def state(change: Callable[[dict[str, Any]], Any]) -> Setup:
    """x.nemo, with other weights."""

    def reload(data: bytes) -> bytes:
        weights = torch.load(io.BytesIO(data), weights_only=True)
        new = change(weights)
        out = io.BytesIO()
        torch.save(weights if new is None else new, out)
        return out.getvalue()

    return weights_file(reload)


def tensors(change: Callable[[torch.Tensor], Any], name: str = "linear1.weight") -> Callable[[dict[str, Any]], None]:
    def apply(weights: dict[str, Any]) -> None:
        found = weights.get("state_dict", weights)
        key = next(key for key in found if key.endswith(name))
        found[key] = change(found[key])

    return apply


def one(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(x: torch.Tensor) -> torch.Tensor:
        new = x.clone()
        new.view(-1)[-1] = value
        return new

    return change


def prefixed(prefix: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda weights: {prefix + key: value for key, value in weights.items()}


def _hub_folder(folder: Path) -> None:
    (folder / "x.nemo").mkdir()
    (folder / "x.nemo/config.json").write_text('{"model_type": "parakeet_ctc"}')
    (folder / "x.nemo/model.safetensors").write_bytes((Fixture.path / "model.safetensors").read_bytes())


BAD_MODELS: dict[str, tuple[str, Setup]] = {
    "a web page": ("nemo", copied("model.nemo", always(b"<!doctype html><title>Sign in</title>"))),
    "an error of a hub": ("safetensors", copied("model.safetensors", always(b'{"error":"Repository not found"}'))),
    "a third of the download": ("nemo", copied("model.nemo", cut(0.34))),
    "nine tenths of the download": ("nemo", copied("model.nemo", cut(0.93))),
    "all but a kilobyte": ("safetensors", copied("model.safetensors", lambda data: data[:-1024])),
    "half of a ckpt": ("ckpt", copied("model.ckpt", cut(0.53))),
    "text mode": ("ckpt", copied("model.ckpt", lambda data: data.replace(b"\n", b"\r\n"))),
    "base64": ("nemo", copied("model.nemo", base64.b64encode)),
    "zipped": ("ckpt", copied("model.ckpt", lambda data: zipped("model.ckpt", data))),
    "gzip twice": ("nemo", copied("model.nemo", lambda data: gzip.compress(gzip.compress(data)))),
    "no weights": ("nemo", repacked(lambda m: {"model_config.yaml": m["model_config.yaml"]})),
    "no configuration": ("nemo", repacked(lambda m: {"model_weights.ckpt": m["model_weights.ckpt"]})),
    "weights of safetensors": (
        "nemo",
        repacked(lambda m: m | {"model_weights.ckpt": (Fixture.path / "model.safetensors").read_bytes()}),
    ),
    "weights of a training": (
        "nemo",
        repacked(lambda m: m | {"model_weights.ckpt": (Fixture.path / "model.ckpt").read_bytes()}),
    ),
    "a model of NeMo for transcripts": (
        "nemo",
        yaml(r"^target: .*", "target: nemo.collections.asr.models.EncDecCTCModelBPE"),
    ),
    "an encoder of another family": ("nemo", yaml(r"ConformerEncoder", "SqueezeformerEncoder")),
    "one layer more": ("nemo", yaml(r"n_layers: 2", "n_layers: 3")),
    "one layer less": ("nemo", yaml(r"n_layers: 2", "n_layers: 1")),
    "another width": ("nemo", yaml(r"d_model: 32", "d_model: 64")),
    "other classes": ("nemo", yaml(r"num_classes: 64", "num_classes: 128")),
    "128 mels": ("nemo", yaml(r"features: 80", "features: 128")),
    "a kernel of 31": ("nemo", yaml(r"conv_kernel_size: 9", "conv_kernel_size: 31")),
    "names with module.": ("nemo", state(prefixed("module."))),
    "names with model.": ("nemo", state(prefixed("model."))),
    "names with _orig_mod.": ("ckpt", saved(lambda c: c.update(state_dict=prefixed("_orig_mod.")(c["state_dict"])))),
    "the encoder alone": (
        "nemo",
        state(lambda w: {key: value for key, value in w.items() if key.startswith("encoder.layers.0")}),
    ),
    "an empty state": ("nemo", state(lambda w: w.clear())),
    "weights as a list": ("nemo", state(lambda w: list(w.values()))),
    "weights as numbers": ("ckpt", saved(lambda c: c.update(state_dict=dict.fromkeys(c["state_dict"], 1.0)))),
    "the optimizer alone": ("ckpt", saved(lambda c: {"optimizer_states": c["optimizer_states"]})),
    "a NaN at the end of the last matrix": ("nemo", state(tensors(one(math.nan), "linear2.weight"))),
    "an infinity in a bias": ("nemo", state(tensors(one(math.inf), "linear1.bias"))),
    "a NaN in the first convolution": ("nemo", state(tensors(one(math.nan), "conv.0.weight"))),
    "a NaN in a norm": ("nemo", state(tensors(one(math.nan), "norm_out.weight"))),
    "a NaN in the position's bias": ("ckpt", saved(tensors(one(math.nan), "pos_bias_u"))),
    "an infinity in the decoder": ("ckpt", saved(tensors(one(-math.inf), "decoder_layers.0.weight"))),
    "a NaN in float16": ("nemo", state(tensors(lambda x: one(math.nan)(x.half())))),
    "int8 in a bias": ("nemo", state(tensors(lambda x: x.to(torch.int8), "linear1.bias"))),
    "int64 in a matrix": ("ckpt", saved(tensors(lambda x: x.long()))),
    "bool in a norm": ("ckpt", saved(tensors(lambda x: x > 0, "norm_out.weight"))),
    "float8 in a matrix": ("nemo", state(tensors(lambda x: x.to(torch.float8_e5m2)))),
    "a matrix of another shape": ("nemo", state(tensors(lambda x: x.T.contiguous()))),
    "a matrix on the meta device": ("ckpt", saved(tensors(lambda x: x.to("meta")))),
    "a sparse matrix": ("ckpt", saved(tensors(lambda x: x.to_sparse()))),
    "a folder of the hub": ("nemo", _hub_folder),
    "a list of audio": ("ckpt", lambda folder: (folder / "x.ckpt").write_text("audio/0.wav\n")),
    "a yaml": ("nemo", lambda folder: (folder / "x.nemo").write_bytes(nemo_members()["model_config.yaml"])),
}
"""Refused by name."""

FINE_MODELS: dict[str, tuple[str, Setup]] = {
    "members in a folder": ("nemo", repacked(lambda m: {f"model/{name}": data for name, data in m.items()})),
    "members of a Mac": ("nemo", repacked(lambda m: {f"._{name}": bytes(163) for name in m} | m)),
    "the members the other way round": ("nemo", repacked(lambda m: dict(reversed(m.items())))),
    "gzip": ("nemo", repacked(dict, "w:gz")),
    "a tokenizer besides": ("nemo", repacked(lambda m: m | {"abc_tokenizer.model": bytes(999)})),
    "a version of NeMo": ("nemo", yaml(r"^target:", "nemo_version: 2.0.0rc1\ntarget:")),
    "keys of other models": ("nemo", yaml(r"^target:", "labels: [a, b]\ntokenizer: {dir: tok}\ntarget:")),
    "paths of another machine": ("nemo", yaml(r"manifest_filepath: .*", "manifest_filepath: /data/somebody/x.json")),
    "a row of the codebook more": ("nemo", state(lambda w: w.update(extra=torch.zeros(3)))),
    "float64": ("nemo", state(lambda w: {k: v.double() if v.is_floating_point() else v for k, v in w.items()})),
    "other strides": ("nemo", state(tensors(lambda x: x.T.contiguous().T))),
    "weights that need gradients": ("nemo", state(tensors(lambda x: torch.nn.Parameter(x)))),
    "a newline at the end": ("safetensors", copied("model.safetensors", lambda data: data + b"\n")),
    **{
        f"a bit flipped at {share:.0%}": (suffix, copied(f"model.{suffix}", flipped(share)))
        for suffix in ("nemo", "ckpt", "safetensors")
        for share in (0.01, 0.13, 0.37, 0.61, 0.89)
    },
}
"""The features are those of the undamaged model, or it is refused by name."""


def hostile_models() -> Iterator[Trial]:
    group = "model files"
    number = 0
    for table, may in ((BAD_MODELS, False), (FINE_MODELS, True)):
        for name, (suffix, setup) in table.items():
            file = f"x.{suffix}"
            refused = Refused((file,))
            expected: Expected = Either(refused, Right(same_features)) if may else refused
            command = ["extract", file, "audio/0.wav", "out", "--device", "cpu"]
            yield Trial(group, f"extract: {suffix}: {name}", command, expected, setup)
            number += 1
            if number % 2:
                key = "init_from_ptl_ckpt" if suffix == "ckpt" else "init_from_nemo_model"
                others: list[tuple[str, list[str], Expected]] = [
                    ("info", ["info", file], Either(refused, DONE)),
                    (
                        "export",
                        ["export", file, "new.nemo", "--format", "nemo"],
                        Either(refused, DONE) if may else refused,
                    ),
                    ("start from", pretrain(f"+{key}={file}"), Either(refused, TRAINED)),
                    (
                        "probe",
                        [*named("probe x --train l.jsonl --test l.jsonl --label label --output p --device cpu")],
                        Either(refused, DONE) if may else refused,
                    ),
                ]
                verb, command, told = others[number // 2 % 4]
                command = [file if part == "x" else part for part in command]
                yield Trial(group, f"{verb}: {suffix}: {name}", command, told, both(_labels, setup))


# ---------------------------------------------------------------------------------------------------------------- names

RUN_NAMES: list[str] = [
    *("run 1", "run#1", "Läufer", "2026-01-01 12:00", "a=b", "exp,1", "a+b", "run*", "~run", "~", "-rf", "$HOME"),
    *("nul", "run\\1", "C:\\runs\\run", "%20", "run&", "(run)", "[run]", "{run}", "run'", "ru\u0308n", "run\u00a01"),
    *(".hidden", "run.nemo", "checkpoints", "0", "1.0", "01", "no", "a/b", "a//b", "a/./b", "/run", "run/", "👩‍🚀"),
]
FOLDERS: list[str] = [
    *("~/runs", "~nosuchuser/runs", "$HOME/runs", "${HOME}/runs", "C:\\runs", "runs with spaces", "./runs/../runs"),
    *("runs/.", "file:///runs", "s3://bucket/runs", "audio", "audio/0.wav/runs", "runs\n", "ru\tns"),
]
COLLISIONS: dict[str, list[str]] = {
    "one stem, two suffixes": ["a.wav", "a.flac"],
    "one stem, three suffixes": ["a.wav", "a.flac", "a.ogg"],
    "two cases": ["a.wav", "A.wav"],
    "a suffix in capitals": ["a.wav", "a.WAV"],
    "a folder and a line": ["a/b.wav", "a_b.wav", "a-b.wav"],
    "two folders": ["a/x.wav", "b/x.wav"],
    "folders that look alike": ["a-b/c.wav", "a/b-c.wav", "a/b_c.wav"],
    "dots": ["a.b.wav", "a.wav", "a.b.c.wav"],
    "a name of a feature": ["a.wav", "a.npy.wav", "a.wav.wav"],
    "two forms of a letter": ["\u00e9.wav", "e\u0301.wav"],
    "spaces": ["a.wav", " a.wav", "a .wav"],
    "numbers": ["1.wav", "01.wav", "1.0.wav"],
    "a folder named like a file": ["a.wav/b.wav", "a/b.wav"],
    "a manifest's name": ["manifest.wav", "manifest.jsonl.wav", "bad.jsonl.wav"],
    "a dash": ["-.wav", "--help.wav", "a.wav"],
}


def _colliding(files: list[str]) -> Setup:
    def setup(folder: Path) -> None:
        for i, name in enumerate(files):
            path = folder / "in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            kind = {"flac": "FLAC", "ogg": "OGG"}.get(name.rpartition(".")[2], "WAV")
            path.write_bytes(encoded(kind, FLOATS[: RATE + 1600 * i]))

    return setup


def one_each(number: int) -> Check:
    """Every utterance has features of its own, as long as it is."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = sorted(np.load(path).shape[-1] for path in (folder / "out").rglob("*.npy"))
        lengths = sorted((RATE + 1600 * i) // 1280 for i in range(number))
        if len(found) != number:
            return f"{len(found)} features of {number} files"
        right = all(abs(a - b) <= 2 for a, b in zip(found, lengths, strict=True))
        return None if right and len(set(found)) > 1 else f"lengths {found}, expected about {lengths}"

    return check


def all_in_shards(number: int) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        members = []
        for path in folder.rglob("audio_*.tar"):
            with tarfile.open(path) as file:
                members += [(path.name, name) for name in file.getnames()]
        lines = [json.loads(text) for text in (folder / "m.jsonl").read_text().splitlines()]
        if len(lines) != number or len(set(members)) != number:
            return f"{len(lines)} lines and {len(set(members))} members for {number} files"
        return None

    return check


def below_runs(folder: Path, outcome: Outcome) -> str | None:
    """One run, and no folder that a shell would take for another place."""
    odd = [path.name for path in folder.rglob("*") if path.name in {"~", "$HOME", "${HOME}", "s3:", "file:"}]
    homes = list((folder.parent / "home").rglob("metrics.csv"))
    if odd:
        return f"a folder named {odd[0]!r}"
    return None if homes else trained(folder, outcome)


def named_as(name: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        run = only_run(folder)
        if not run.is_relative_to(folder / "runs"):
            return f"the run is in {run.relative_to(folder)}"
        return trained(folder, outcome)

    return check


LABELS: dict[str, list[Any]] = {
    "numbers": list(range(2)),
    "numbers and their texts": [1, "1"],
    "true and 1": [True, 1],
    "null": [None, "a"],
    "empty": ["", "a"],
    "spaces": ["a", "a "],
    "two cases": ["yes", "Yes"],
    "markup": ["<script>alert(1)</script>", "[/red]"],
    "escape codes": ["\x1b[31mred", "\x07"],
    "dicts": [{"a": 1}, {"a": 2}],
    "commas": ["a,b", 'a"b'],
    "long": ["x" * 5000, "y" * 5000],
    "emoji": ["👩‍🚀", "🚀"],
    "only one": ["a", "a"],
}


def labelled(values: list[Any]) -> Setup:
    def setup(folder: Path) -> None:
        found = [json.loads(text) for text in (folder / "train.jsonl").read_text().splitlines()]
        write_lines(folder / "l.jsonl", [row | {"label": values[i % 2]} for i, row in enumerate(found)])

    return setup


def probed(folder: Path, outcome: Outcome) -> str | None:
    json.loads((folder / "p/results.json").read_text())
    scripts = [path.name for path in folder.rglob("*.html") if "<script>alert(1)" in path.read_text()]
    return f"a script from a label in {scripts}" if scripts else None


def names() -> Iterator[Trial]:
    group = "names"
    for name in RUN_NAMES:
        expected: Expected = Either(Refused(("name",)), Right(named_as(name)))
        yield Trial(group, f"exp_manager.name is {name!r}", pretrain(f"exp_manager.name={quoted(name)}"), expected)
    for name in FOLDERS:
        expected = Either(Refused(("exp_dir|audio|runs|interpolation|HOME",)), Right(below_runs))
        yield Trial(
            group, f"exp_manager.exp_dir is {name!r}", pretrain(f"exp_manager.exp_dir={quoted(name)}"), expected
        )
    for what, files in COLLISIONS.items():
        command = named("extract {M} in out --device cpu --layers last")
        expected = Either(Refused(("in|name|same",), partial=True), Right(one_each(len(files))))
        yield Trial(group, f"extract {what}", command, expected, _colliding(files))
        command = named("prepare in --output m.jsonl --workers 0 --shards 2")
        if len(files) > 2:
            expected = Either(Refused(("in|name|same",), partial=True), Right(all_in_shards(len(files))))
            yield Trial(group, f"prepare shards of {what}", command, expected, _colliding(files))
    for what, values in LABELS.items():
        command = named("probe {M} --train l.jsonl --test l.jsonl --label label --output p --device cpu")
        expected = Either(Refused(("label|class|l.jsonl",)), Right(probed))
        yield Trial(group, f"labels: {what}", command, expected, labelled(values))


# ---------------------------------------------------------------------------------------------------------- environment

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"}
"""A terminal that can write ASCII alone, and says so."""

ODD_TERMINALS: list[tuple[str, dict[str, str | None], str]] = [
    ("ASCII alone", dict(ASCII), "prepare über --output m.jsonl --workers 0"),
    ("ASCII alone", dict(ASCII), "inspect über/m.jsonl --examples 1 --output i.html"),
    ("ASCII alone", dict(ASCII), "extract {M} über out --device cpu --layers last"),
    ("ASCII alone", dict(ASCII), "info {M}"),
    ("ASCII alone", dict(ASCII), "report {run}"),
    ("ASCII alone", dict(ASCII), "doctor {run}"),
    ("Latin-1", {"PYTHONIOENCODING": "latin-1:strict"}, "report {run}"),
    ("Latin-1", {"PYTHONIOENCODING": "latin-1:strict"}, "prepare über --output m.jsonl --workers 0"),
    ("12 columns", {"COLUMNS": "12", "TERM": "vt52"}, "info {M}"),
    ("12 columns", {"COLUMNS": "12", "TERM": "vt52"}, "doctor {run}"),
    ("no colours", {"NO_COLOR": "1", "TERM": "dumb"}, "inspect über/m.jsonl --examples 0 --output i.html"),
    ("no HOME", {"HOME": None, "USER": None}, "prepare audio --output m.jsonl --workers 1"),
    ("a missing TMPDIR", {"TMPDIR": "/nonexistent"}, "extract {M} audio out --device cpu --layers last"),
    (
        "a cache that is a file",
        {"NEST_SSL_CACHE_DIR": "train.jsonl"},
        "inspect train.jsonl --examples 0 --output i.html",
    ),
    ("Python that warns", {"PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1"}, "report {run}"),
]

SMALL_LIMITS: dict[str, tuple[str, str, Expected]] = {
    "24 open files": (
        'ulimit -n 24; "$@"',
        "prepare audio --output m.jsonl --workers 2",
        Either(Refused((), partial=True), DONE),
    ),
    "20 open files": (
        'ulimit -n 20; "$@"',
        "extract {M} audio out --device cpu --layers last",
        Either(Refused((), partial=True), Right(finite_features)),
    ),
    "memory of 1.5 GB": (
        'ulimit -v 1500000; "$@"',
        "extract {M} audio out --device cpu --layers last",
        Either(Refused(("memory",), partial=True), Right(finite_features)),
    ),
    "files of 100 kB": (
        'ulimit -f 100; exec > >(cat) 2> >(cat >&2); "$@"',
        "export {M} new.nemo --format nemo",
        Refused(("large|space|written|ulimit",)),
    ),
    "files of 20 kB": (
        'ulimit -f 20; exec > >(cat) 2> >(cat >&2); "$@"',
        "prepare audio --output m.jsonl --workers 0 --shards 2",
        Refused(("large|space|written|ulimit",), partial=True),
    ),
    "a terminal of 20 columns": (
        'script -qec "stty cols 20; $(printf "%q " "$@")" /dev/null </dev/null >seen.txt',
        "prepare audio --output m.jsonl --workers 0",
        DONE,
    ),
    "seconds of time": (
        'timeout -s INT 2 "$@"; code=$?; exit $((code == 124 ? 0 : code))',
        "inspect train.jsonl",
        Right(ended_well, codes=(0, 1, 130)),
    ),
}

READ_ONLY: list[tuple[str, str]] = [
    ("prepare audio --output m.jsonl --workers 0", "m.jsonl|read-only|written"),
    ("inspect train.jsonl --examples 0", "inspect.html|read-only|written"),
    ("extract {M} audio out --device cpu", "out|read-only|written"),
    ("export {M} new.nemo --format nemo", "new.nemo|read-only|written"),
    ("demo --num-train 1 --num-val 1 --num-noise 1 --duration 1", "demo_data|read-only|written"),
    ("report {run}", "report.html|read-only|written"),
    ("pretrain", "runs|read-only|written"),
]
"""In a working folder that cannot be written."""


def _umlaut(folder: Path) -> None:
    Fixture.run(folder)
    shutil.copytree(folder / "audio", folder / "über")
    (folder / "über/0.wav").rename(folder / "über/日本 0.wav")
    names = ["日本 0.wav", *(f"{i}.wav" for i in range(1, 8))]
    write_lines(folder / "über/m.jsonl", [{"audio_filepath": name, "duration": 1.6} for name in names])


def environments() -> Iterator[Trial]:
    group = "environment"
    for what, changes, text in ODD_TERMINALS:
        command = named(text.replace("{run}", str(RUN)))
        expected: Expected = DONE
        if text.startswith("doctor"):
            expected = Right(ended_well, codes=(0, 1))
        elif what == "ASCII alone" and "über" in text:
            expected = Either(Refused(("locale|LC_ALL|PYTHONUTF8",), partial=True), DONE)
        elif "cache" in what:
            expected = Either(Refused(("NEST_SSL_CACHE_DIR|train.jsonl",)), DONE)
        yield Trial(
            group, f"{what}: {text}", command, expected, _umlaut, environment=changes, own_process=True, limit_s=120
        )
    for what, (shell, text, expected) in SMALL_LIMITS.items():
        yield Trial(group, f"{what}: {text}", named(text), expected, shell=shell, limit_s=120)
    if os.geteuid() != 0:
        return
    for text, word in READ_ONLY:
        shell = _private('mount --bind . .; mount -o remount,ro,bind "$PWD"; cd "$PWD"; "$@"', "nothing")
        command = pretrain() if text == "pretrain" else named(text.replace("{run}", str(RUN)))
        yield Trial(
            group, f"a read-only folder: {text}", command, Refused((word,)), Fixture.run, shell=shell, limit_s=120
        )


# ----------------------------------------------------------------------------------------------------------------- main


def trials() -> list[Trial]:
    make_more()
    tables = (configurations, manifests, audio, kills, checkpoints, hostile_models, names, environments)
    return [trial for table in tables for trial in table()]


if __name__ == "__main__":
    main(trials, __doc__)
