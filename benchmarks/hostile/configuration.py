"""Configuration: values, units, combinations and yaml files as people get them wrong; options of the other commands.

What can only give a worthless result is refused with the key, or named in the output; what is merely written in an
unusual way gives the losses of the usual way.
"""

from __future__ import annotations

import csv
import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import soundfile
from benchmarks.hostile.harness import (
    BASE_STEPS,
    RUN,
    TINY,
    Check,
    Either,
    Expected,
    Fixture,
    Outcome,
    Refused,
    Right,
    Setup,
    Trial,
    both,
    ended_well,
    finite_features,
    in_fork,
    losses,
    only_run,
    pretrain,
    resume,
    resumed,
    rows,
    said,
    trained,
    write_lines,
)

GROUP = "configuration"
TRAIN, VALID, MEL, MASK = "model.train_ds.", "model.validation_ds.", "model.preprocessor.", "model.masking."
ENCODER, OPTIM, EXP = "model.encoder.", "model.optim.", "exp_manager."
SAVING, STOPPING = EXP + "checkpoint_callback_params.", EXP + "early_stopping_callback_params."
COSINE = (f"{OPTIM}sched.name=CosineAnnealing", f"{OPTIM}sched.d_model=null")
BUCKETS = (f"{TRAIN}use_bucketing=true", f"{TRAIN}batch_size=null", f"{TRAIN}batch_duration=4")
CONCAT = (f"{TRAIN}manifest_filepath=[train.jsonl,valid.jsonl]", f"{TRAIN}is_concat=true")
STOP_EARLY = f"{EXP}create_early_stopping_callback=true"
AVERAGE = f"{EXP}ema.enable=true"
RATE_KEY, MODE_KEY = "optim.lr|lr=|lr:|'lr'", "params.mode|mode=|mode:|mode is|'mode'"
"""Words that name the key; `lr` and `mode` alone are part of `already` and of `model`."""

# ------------------------------------------------------------------------------------------- what can only be refused

REFUSED: list[tuple[str, ...]] = [  # a word of the message, then the overrides
    # wrong units: milliseconds, samples, kilohertz, per cent
    ("window_size", f"{MEL}window_size=25"),
    ("window_size", f"{MEL}window_size=400", f"{MEL}window_stride=160"),
    ("window_stride", f"{MEL}window_stride=10"),
    ("window_size", f"{MEL}window_size=0.000025"),
    ("sample_rate", "model.sample_rate=16"),
    ("highfreq", f"{MEL}highfreq=7.6"),
    ("lowfreq", f"{MEL}lowfreq=4000", f"{MEL}highfreq=300"),
    ("min_duration", f"{TRAIN}min_duration=1600"),
    ("min_duration", f"{TRAIN}min_duration=30", f"{TRAIN}max_duration=1"),
    ("batch_duration", *BUCKETS, f"{TRAIN}batch_duration=400000"),
    ("mask_prob", f"{MASK}mask_prob=4"),
    ("dropout", f"{ENCODER}dropout=10"),
    ("augmentor.prob|prob=|prob:", f"{TRAIN}batch_augmentor.prob=50"),
    ("decay", AVERAGE, f"{EXP}ema.decay=99.9"),
    ("warmup_ratio", f"{OPTIM}sched.warmup_steps=null", f"{OPTIM}sched.warmup_ratio=10"),
    ("warmup_steps", f"{OPTIM}sched.warmup_steps=0.1"),
    # copy and paste, shells, spreadsheets, other locales
    ("max_steps", "trainer.max_steps=\u22121"),
    ("max_steps", "trainer.max_steps=1,000"),
    ("max_steps", "trainer.max_steps=10k"),
    ("max_steps", "trainer.max_steps=4.7"),
    ("max_steps", "trainer.max_steps="),
    ("max_steps", "trainer.max_steps=None"),
    ("max_steps", "trainer.max_steps=true"),
    (RATE_KEY, f"{OPTIM}lr=0,05"),
    (RATE_KEY, f"{OPTIM}lr="),
    (RATE_KEY, f"{OPTIM}lr=1e-3x"),
    (RATE_KEY, f"{OPTIM}lr", "=", "0.01"),
    (RATE_KEY, f"{OPTIM}lr", "0.01"),
    ("trainer.max_steps", "--trainer.max_steps=4"),
    ("config-name", "\u2013\u2013config-name=nest_demo"),
    ("\u2026", "\u2026"),
    ("manifest_filepath", f"{TRAIN}manifest_filepath="),
    ("manifest_filepath", f"{TRAIN}manifest_filepath=[]"),
    ("manifest_filepath", f"{TRAIN}manifest_filepath=[train.jsonl"),
    ("betas", f"{OPTIM}betas=[0.9,0.98,0.999]"),
    ("betas", f"{OPTIM}betas=[0.98,1.0]"),
    # keys of other programs and versions, sections given as a value
    ("gpus", "trainer.gpus=1"),
    ("learning_rate", "++model.learning_rate=0.01"),
    ("model.optim", "optim.lr=0.01"),
    ("precision", "trainer.precision=fp16"),
    ("strategy", "trainer.strategy=deepspeed_stage_2"),
    ("momentum", f"++{OPTIM}momentum=0.9"),
    ("optim", "model.optim=adamw"),
    ("sched", "model.optim.sched=CosineAnnealing"),
    ("train_ds", "model.train_ds=train.jsonl"),
    ("trainer", "trainer=cpu"),
    ("train_ds", "~model.train_ds"),
    ("size", "size=Large"),
    ("os.system", f"{TRAIN}batch_augmentor._target_=os.system"),
    # times and intervals
    ("max_time", "trainer.max_time=6h"),
    ("max_time", "trainer.max_time=00:06:00"),
    ("max_time", "trainer.max_time=00:00:00:00"),
    ("hour", "trainer.max_time={hour: 1}"),
    ("max_time", "trainer.max_time={hours: -1}"),
    ("train_time_interval", f"{SAVING}train_time_interval=15"),
    ("max_time_per_run", f"{EXP}max_time_per_run=1h"),
    ("val_check_interval", "trainer.val_check_interval=1.5"),
    ("check_val_every_n_epoch", "trainer.check_val_every_n_epoch=0"),
    ("log_every_n_steps", "trainer.log_every_n_steps=-5"),
    (MODE_KEY, f"{SAVING}mode=lowest"),
    ("save_top_k", f"{SAVING}save_top_k=-2"),
    ("floor_s", "watchdog.floor_s=0"),
    ("action", "watchdog.action=kill"),
    ("max_restarts", "launch.max_restarts=-1"),
    ("MASTER_ADDR|NODE_RANK|num_nodes", "trainer.num_nodes=2"),
    ("seed", "seed=1.5"),
    # nothing could be learned, or nothing sensible
    ("mag_power", f"{MEL}mag_power=0"),
    ("log_zero_guard_value", f"{MEL}log_zero_guard_value=-1"),
    ("pad_value", f"{MEL}pad_value=nan"),
    ("dropout", f"{ENCODER}dropout=1.0"),
    ("stochastic_depth_drop_prob", f"{ENCODER}stochastic_depth_drop_prob=1.0"),
    ("decay", AVERAGE, f"{EXP}ema.decay=1.0"),
    (RATE_KEY, f"{OPTIM}lr=0"),
    ("min_lr", *COSINE, f"{OPTIM}sched.min_lr=0.5"),
    ("warmup", f"{OPTIM}sched.warmup_ratio=0.5"),
    ("batch_size|drop_last", f"{TRAIN}batch_size=100"),
    ("prefetch_factor", f"{TRAIN}num_workers=1", f"{TRAIN}prefetch_factor=0"),
    # parts that do not fit together
    ("r_noise", f"{TRAIN}batch_augmentor.min_r_noise=20", f"{TRAIN}batch_augmentor.max_r_noise=-5"),
    ("mix_rate", f"{TRAIN}batch_augmentor.min_mix_rate=0.9", f"{TRAIN}batch_augmentor.max_mix_rate=0.1"),
    ("num_classes", "model.decoder.num_classes=32"),
    ("combine_time_steps", "model.loss.combine_time_steps=4"),
    ("combine_time_steps", "model.quantizer.combine_time_steps=4"),
    ("feat_in", f"{MASK}feat_in=64"),
    ("feat", f"{ENCODER}feat_out=64"),
    ("conv_context_size", f"{ENCODER}conv_context_size=[4,3]"),
    ("att_context_size", f"{ENCODER}att_context_size=[70]"),
    ("conv_norm_type", f"{ENCODER}conv_norm_type=group_norm3"),
    ("bucket_duration_bins", *BUCKETS, f"{TRAIN}bucket_duration_bins=[2.0,1.8]"),
    (
        "bucket_batch_size",
        *BUCKETS[:2],
        f"{TRAIN}bucket_duration_bins=[1.7,1.9,2.1]",
        f"{TRAIN}bucket_batch_size=[4,2]",
    ),
    (
        "concat_sampling",
        *CONCAT,
        f"{TRAIN}concat_sampling_technique=random",
        f"{TRAIN}concat_sampling_probabilities=[0.5]",
    ),
    ("channel", f"{TRAIN}channel_selector=5"),
    ("memory|d_model", f"{ENCODER}d_model=1000000"),
    ("nesterov|momentum", f"{OPTIM}name=sgd", f"~{OPTIM}betas", f"++{OPTIM}nesterov=true"),
    ("momentum", f"{OPTIM}name=sgd", f"~{OPTIM}betas", f"++{OPTIM}momentum=-0.5"),
    ("min_lr", f"{OPTIM}sched.min_lr=-1"),
    ("constant_steps", *COSINE, f"++{OPTIM}sched.constant_steps=-5"),
    ("early_stopping|validation", STOP_EARLY, "~model.validation_ds"),
    ("valid_loss", STOP_EARLY, f"{STOPPING}monitor=valid_loss"),
    ("every_n_steps", AVERAGE, f"{EXP}ema.every_n_steps=0"),
    ("every_n_steps", AVERAGE, f"{EXP}ema.every_n_steps=2.5"),
    ("filename", f"{SAVING}filename=../../x"),
    ("filename|val_los", f"{SAVING}filename='{{val_los:.2f}}'"),
    ("max_epochs", "trainer.max_epochs=0"),
    ("max_epochs", "trainer.max_epochs=-5"),
    ("train_time_interval", f"{SAVING}train_time_interval=-00:00:15:00"),
    ("block_size|mask", f"{MASK}block_size=1"),
    ("early_stopping|limit_val_batches", STOP_EARLY, "trainer.limit_val_batches=0"),
    # more of what shells and scripts do
    ("max_steps", "trainer.max_steps=4 model.optim.lr=0.05"),
    ("max_steps", "trainer.max_steps=4,"),
    ("max_steps", "trainer.max_steps={}"),
    ("multirun", "--multirun", f"{OPTIM}lr=0.05,0.1"),
    ("num_workers", f"{TRAIN}num_workers=all"),
    ("sync_batchnorm", "trainer.sync_batchnorm=ture"),
    ("profiler", "trainer.profiler=fast"),
    ("train2.jsonl", f"{TRAIN}manifest_filepath='C:\\data\\train2.jsonl'"),
    ("train2.jsonl", f"{TRAIN}manifest_filepath=[train.jsonl,train2.jsonl]"),
    ("manifest_filepath", f"{TRAIN}manifest_filepath=???"),
    ("exp_dir", f"{EXP}exp_dir=/proc/runs"),
    ("precision", "trainer.precision=bf16-true"),
]

EXTREME: list[tuple[str, ...]] = [  # too large, too small, too long for their type
    ("max_steps", "trainer.max_steps=99999999999999999999"),
    ("seed", "seed=99999999999999999999"),
    ("optim.lr", f"{OPTIM}lr=1e400"),
    ("optim.lr", f"{OPTIM}lr=1e-400"),
    ("weight_decay", f"{OPTIM}weight_decay=1e400"),
    ("batch_size", f"{TRAIN}batch_size=9999999999999999999"),
    ("num_workers", f"{TRAIN}num_workers=-1"),
    ("prefetch_gb", f"{TRAIN}prefetch_gb=-1"),
    ("block_size", f"{MASK}block_size=99999999999999999999"),
    ("warmup_steps", f"{OPTIM}sched.warmup_steps=1e30"),
    ("accumulate_grad_batches", "trainer.accumulate_grad_batches=99999999999999999999"),
    ("log_every_n_steps", "trainer.log_every_n_steps=99999999999999999999"),
    ("val_check_interval", "trainer.val_check_interval=99999999999999999999"),
    ("max_time", "trainer.max_time={days: 1e300}"),
    ("max_restarts", "launch.max_restarts=99999999999999999999"),
    ("save_top_k", f"{SAVING}save_top_k=99999999999999999999"),
    ("patience", STOP_EARLY, f"{STOPPING}patience=99999999999999999999"),
    ("timeout", "trainer.strategy={_target_: lightning.pytorch.strategies.DDPStrategy, timeout: 30}"),
]
MAY_BE_OBEYED = ("log_every", "val_check", "save_top_k", "patience", "max_restarts")
"""Where such a number can be obeyed, it may also be."""

NO_EFFECT: list[tuple[str, str]] = [  # what the docs call without effect: named in the log, and the losses are the same
    ("limit_test_batches", "trainer.limit_test_batches=3"),
    ("use_distributed_sampler", "trainer.use_distributed_sampler=false"),
    ("reload_dataloaders_every_n_epochs", "trainer.reload_dataloaders_every_n_epochs=1"),
    ("default_root_dir", "trainer.default_root_dir=/nowhere"),
    ("enable_checkpointing", "trainer.enable_checkpointing=true"),
    ("logger", "trainer.logger=true"),
    ("enable_autolog_hparams", "trainer.enable_autolog_hparams=false"),
    ("sync_max_audio_length", f"{ENCODER}sync_max_audio_length=true"),
    ("skip_nan_grad", "++model.skip_nan_grad=true"),
    ("spec_augment", "++model.spec_augment={freq_masks: 2}"),
    ("create_mlflow_logger", f"++{EXP}create_mlflow_logger=true"),
    ("find_unused_parameters", "trainer.strategy={_target_: DDPStrategy, find_unused_parameters: true}"),
]

NOT_NUMBERS: list[tuple[str, ...]] = [  # keys that a division by zero in a script, or an empty cell, makes NaN
    ("optim.lr", f"{OPTIM}lr=nan"),
    ("weight_decay", f"{OPTIM}weight_decay=nan"),
    ("eps", f"++{OPTIM}eps=nan"),
    ("min_lr", f"{OPTIM}sched.min_lr=nan"),
    ("warmup_ratio", f"{OPTIM}sched.warmup_steps=null", f"{OPTIM}sched.warmup_ratio=nan"),
    ("dropout", f"{ENCODER}dropout=nan"),
    ("stochastic_depth_drop_prob", f"{ENCODER}stochastic_depth_drop_prob=nan"),
    ("window_stride", f"{MEL}window_stride=nan"),
    ("preemph", f"{MEL}preemph=nan"),
    ("dither", f"{MEL}dither=nan"),
    ("lowfreq", f"{MEL}lowfreq=nan"),
    ("mag_power", f"{MEL}mag_power=nan"),
    ("mask_prob", f"{MASK}mask_prob=nan"),
    ("mask_threshold", "model.loss.mask_threshold=nan"),
    ("max_duration", f"{TRAIN}max_duration=nan"),
    ("max_bad_fraction", f"{TRAIN}max_bad_fraction=nan"),
    ("prefetch_gb", f"{TRAIN}prefetch_gb=nan"),
    ("noise_bank_gb", f"{TRAIN}noise_bank_gb=nan"),
    ("noise_ratio", f"{TRAIN}batch_augmentor.noise_ratio=nan"),
    ("max_r_noise", f"{TRAIN}batch_augmentor.max_r_noise=nan"),
    ("max_mix_rate", f"{TRAIN}batch_augmentor.max_mix_rate=nan"),
    ("batch_duration", *BUCKETS, f"{TRAIN}batch_duration=nan"),
    ("quadratic_duration", *BUCKETS, f"{TRAIN}quadratic_duration=nan"),
    ("concat_sampling_temperature", *CONCAT, f"{TRAIN}concat_sampling_temperature=nan"),
    ("decay", AVERAGE, f"{EXP}ema.decay=nan"),
    ("min_delta", STOP_EARLY, f"{STOPPING}min_delta=nan"),
    ("limit_val_batches", "trainer.limit_val_batches=nan"),
    ("val_check_interval", "trainer.val_check_interval=nan"),
    ("floor_s", "watchdog.floor_s=nan"),
    ("activation_budget", "model.activation_budget=nan"),
]

# ----------------------------------------------------------------- what may be refused, or done with a word about it

NAMED: list[tuple[str, ...]] = [  # the word that has to be read in both cases, then the overrides
    ("val_check_interval", "trainer.val_check_interval=1000"),
    ("valid_loss", f"{SAVING}monitor=valid_loss"),
    (MODE_KEY, f"{SAVING}monitor=val_accuracy"),
    (MODE_KEY, f"{SAVING}monitor=val_loss", f"{SAVING}mode=max"),
    (MODE_KEY, STOP_EARLY, f"{STOPPING}monitor=val_accuracy", f"{STOPPING}mode=min"),
    ("create_early_stopping_callback", f"{STOPPING}patience=3"),
    ("filter", f"{MEL}features=512"),
    ("limit_val_batches", "trainer.limit_val_batches=0.01"),
    # options whose switch is off
    ("num_buckets", f"{TRAIN}num_buckets=8"),
    ("bucket_duration_bins", f"{TRAIN}bucket_duration_bins=[1.8,2.0]"),
    ("bucket_batch_size", f"{TRAIN}bucket_batch_size=[4,2]"),
    ("tarred_audio_filepaths", f"{TRAIN}tarred_audio_filepaths=audio_0.tar"),
    ("noise_bank_gb", f"{TRAIN}noise_bank_gb=1"),
    ("ema", f"{EXP}ema.decay=0.9"),
    ("wandb", f"{EXP}wandb_logger_kwargs.project=nest"),
    ("concat_sampling_technique", f"{TRAIN}concat_sampling_technique=round-robin"),
    ("every_n_steps", AVERAGE, f"{EXP}ema.every_n_steps=1000"),
]


def as_usual(folder: Path, outcome: Outcome) -> str | None:
    """The losses are those of the usual command, bit for bit."""
    usual, found = losses(Fixture.path / RUN), losses(only_run(folder))
    if len(found) != 4:
        return f"{len(found)} steps, expected 4"
    different = [step for step, loss in found.items() if usual[step] != loss]
    return f"losses differ from those of the usual command at steps {different}" if different else None


def validated(folder: Path, outcome: Outcome) -> str | None:
    if not any(row.get("val_loss") for row in rows(only_run(folder))):
        return "it never validated"
    return trained(folder, outcome)


def told(words: str, then: Check = trained) -> Check:
    """One of the words, separated by `|`, is in a line of the output that is not just the command, repeated."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        lines = [line.lower() for line in outcome.text.splitlines() if "nest-ssl pretrain" not in line]
        if not any(word.lower() in line for word in words.split("|") for line in lines):
            return f"the output does not say {words!r}"
        return then(folder, outcome)

    return check


def best_is_best(folder: Path, outcome: Outcome) -> str | None:
    """The checkpoint that is kept is from the step with the best value of what its name says is monitored."""
    run = only_run(folder)
    kept = [path.stem for path in run.glob("checkpoints/*--*.ckpt")]
    if len(kept) != 1:
        return f"{len(kept)} best checkpoints"
    key = kept[0].partition("--")[2].partition("=")[0]
    values = [float(row[key]) for row in rows(run) if row[key]]
    best = max(values) if key == "val_accuracy" else min(values)
    found = float(kept[0].partition(f"{key}=")[2].partition("-")[0])
    return None if abs(found - best) < 1e-3 else f"{kept[0]}: the best {key} is {best}"


def steps(number: int) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = len(losses(only_run(folder)))
        return f"{found} steps, expected {number}" if found != number else trained(folder, outcome)

    return check


def rate_falls(folder: Path, outcome: Outcome) -> str | None:
    rates = [float(row["learning_rate"]) for row in rows(only_run(folder)) if row["train_loss"]]
    return None if rates[-1] < max(rates) else f"the learning rate does not fall: {rates}"


def in_home(folder: Path, outcome: Outcome) -> str | None:
    """A `~` is the home, or refused; never a folder of this name."""
    if (folder / "~").exists():
        return "a folder named ~"
    return None if (folder.parent / "home/runs/run/metrics.csv").exists() else "the run is not in the home"


MAYBE: list[tuple[str, Check, tuple[str, ...]]] = [  # a word of the refusal, the check, the overrides
    (RATE_KEY, as_usual, (f"{OPTIM}lr=0.05\u00a0",)),
    (RATE_KEY, as_usual, (f"{OPTIM}lr='0.05'",)),
    ("max_steps", as_usual, ("trainer.max_steps=4e0",)),
    ("max_steps", as_usual, ("trainer.max_steps=0_004",)),
    ("", as_usual, (" ",)),
    ("exp_dir", in_home, (f"{EXP}exp_dir=~/runs",)),
    ("exp_dir", as_usual, (f"{EXP}exp_dir=",)),
    ("manifest_filepath", trained, (f"{VALID}manifest_filepath=",)),
    ("betas", trained, (f"{OPTIM}name=sgd",)),
    ("max_steps", rate_falls, (*COSINE, f"{OPTIM}sched.min_lr=0", "trainer.max_steps=-1", "trainer.max_epochs=1")),
    ("accumulate_grad_batches", steps(4), ("trainer.accumulate_grad_batches=100",)),
    ("batch_size", validated, (f"{VALID}batch_size=100",)),
    ("num_buckets", trained, (f"{TRAIN}use_bucketing=true", f"{TRAIN}num_buckets=100")),
    ("batch_duration", trained, (*BUCKETS, f"{TRAIN}batch_duration=1")),
    (
        "max_num_speakers",
        trained,
        (f"{TRAIN}batch_augmentor.min_num_speakers=5", f"{TRAIN}batch_augmentor.max_num_speakers=5"),
    ),
    ("block_size", trained, (f"{MASK}block_size=100000",)),
    ("subsampling_conv_channels", trained, (f"{ENCODER}subsampling_conv_channels=-1",)),
    ("masking", trained, ("model.masking=null",)),
    ("preprocessor", trained, ("~model.preprocessor",)),
    ("stochastic_depth_start_layer", trained, (f"{ENCODER}stochastic_depth_start_layer=50",)),
    ("devices", trained, ("trainer.devices=auto",)),
    ("limit_train_batches", steps(4), ("trainer.limit_train_batches=0.01",)),
    ("max_steps", as_usual, ("trainer.max_steps=4\r",)),
    ("limit_val_batches", trained, ("trainer.limit_val_batches=0",)),
    ("early_stopping", steps(8), (STOP_EARLY, "trainer.check_val_every_n_epoch=2", "trainer.max_steps=8")),
    ("early_stopping", steps(4), (STOP_EARLY, "trainer.val_check_interval=3", f"{STOPPING}patience=5")),
    ("mask_prob", trained, (f"{MASK}mask_prob=0.5", f"{MASK}allow_overlap=false")),
    ("best|mode", best_is_best, (f"{SAVING}monitor=val_accuracy", f"{SAVING}mode=max", "trainer.val_check_interval=1")),
    ("best|mode", best_is_best, ("trainer.val_check_interval=1",)),
    ("train_loss", trained, (f"{SAVING}monitor=train_loss",)),
    ("d_model", as_usual, (f"{ENCODER}d_model='32'",)),
    ("num_classes", as_usual, ("model.num_classes=6.4e1",)),
    ("batch_size", as_usual, (f"{TRAIN}batch_size=0x2",)),
    ("max_duration", as_usual, (f"{TRAIN}max_duration=1e400",)),
    ("pos_emb_max_len", as_usual, (f"{ENCODER}pos_emb_max_len=10",)),
    ("dirpath", trained, (f"{SAVING}dirpath=elsewhere",)),
    ("filename", validated, (f"{SAVING}filename=best", f"{SAVING}save_top_k=3", "trainer.val_check_interval=1")),
    ("hydra", as_usual, ("hydra.run.dir=.",)),
    ("min_steps", steps(4), ("trainer.min_steps=10",)),
    ("exp_manager", trained, ("exp_manager=null",)),
    ("validation_ds", trained, ("~model.validation_ds",)),
    ("save_top_k", as_usual, (f"{SAVING}save_top_k=0",)),
    ("save_weights_only", as_usual, (f"{SAVING}save_weights_only=true", f"{SAVING}every_n_train_steps=1")),
    ("max_r_noise", trained, (f"{TRAIN}batch_augmentor.max_r_noise=1000", f"{TRAIN}noise_manifest=train.jsonl")),
    (
        "min_r_speech",
        trained,
        (f"{TRAIN}batch_augmentor.min_r_speech=-1000", f"{TRAIN}batch_augmentor.max_r_speech=-999"),
    ),
    ("n_fft", trained, (f"{MEL}n_fft=400",)),
    ("pad_to", trained, (f"{MEL}pad_to=0",)),
    ("num_books", trained, ("model.num_books=2", "model.squeeze_single=true")),
    ("subsampling_factor", trained, (f"{ENCODER}subsampling_factor=4",)),
    ("mask_position", trained, ("model.mask_position=post_conv",)),
    ("precision", trained, ("trainer.precision=16",)),
    ("sync_batchnorm", trained, ("trainer.sync_batchnorm=yes",)),
    ("wandb", trained, (f"{EXP}create_wandb_logger=true",)),
    ("files_to_copy", trained, (f"{EXP}files_to_copy=[nothere.py]",)),
]

# ------------------------------------------------------------------------------------------------------- own yaml files

MINE = ["pretrain", "--config-path", ".", "--config-name", "my", *TINY]
HEAD = "defaults: [nest_fast-conformer, _self_]\n"
LR = f"{OPTIM}lr=0.05"


def without(*left_out: str) -> list[str]:
    return [argument for argument in MINE if argument not in left_out]


def file(name: str, content: str | bytes) -> Setup:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


SAME = Right(as_usual)
BAD_YAML = Refused(("my.yaml|'my'",))
YAML: list[tuple[str, str | bytes, list[str], Expected]] = [
    ("with a byte order mark", b"\xef\xbb\xbf" + HEAD.encode(), MINE, SAME),
    ("with Windows line ends", HEAD.replace("\n", "\r\n") + "trainer:\r\n  precision: 32\r\n", MINE, SAME),
    ("in UTF-16, from PowerShell", HEAD.encode("utf-16"), MINE, Either(BAD_YAML, SAME)),
    ("with a Latin-1 comment", HEAD.encode() + b"# caf\xe9\n", MINE, Either(BAD_YAML, SAME)),
    ("indented with a tab", HEAD + "trainer:\n\tprecision: 32\n", MINE, BAD_YAML),
    (
        "with a section twice",
        HEAD + "trainer: {precision: 32}\nmodel: {num_classes: 64}\ntrainer: {}\n",
        MINE,
        BAD_YAML,
    ),
    ("with the marks of a merge", HEAD + "<<<<<<< HEAD\nname: a\n=======\nname: b\n>>>>>>> main\n", MINE, BAD_YAML),
    ("that is empty", "", MINE, BAD_YAML),
    ("that is full of zero bytes", bytes(4096), MINE, BAD_YAML),
    ("that is a list", "- a\n- b\n", MINE, BAD_YAML),
    ("that includes itself", "defaults: [my, _self_]\n", MINE, BAD_YAML),
    ("that includes a file that is not there", "defaults: [base_v2, _self_]\n", MINE, Refused(("base_v2",))),
    ("with lr: 5e-2", HEAD + "model: {optim: {lr: 5e-2}}\n", without(LR), SAME),
    ("with lr: 0,05", HEAD + "model: {optim: {lr: '0,05'}}\n", without(LR), Refused((RATE_KEY,))),
    (
        "with a name that is not there",
        HEAD + "model: {optim: {lr: '${model.rate}'}}\n",
        without(LR),
        Refused(("rate",)),
    ),
    (
        *(
            "with names that go in a circle",
            HEAD + "model: {optim: {lr: '${model.optim.weight_decay}', weight_decay: '${.lr}'}}\n",
        ),
        *(without(LR), Refused(("lr|weight_decay",))),
    ),
    (
        "with an unset variable",
        HEAD + "exp_manager: {exp_dir: '${oc.env:SCRATCH}'}\n",
        without("exp_manager.exp_dir=runs"),
        Refused(("SCRATCH",)),
    ),
    (
        "with a typo in a section",
        HEAD + "modle: {optim: {lr: 1}}\n",
        MINE,
        Refused(("modle",)),
    ),
    ("of two documents", HEAD + "---\nname: b\n", MINE, BAD_YAML),
    ("with anchors", HEAD + "model:\n  optim: &o {name: adamw}\n  decoder: {use_bias: true}\nname: &n x\n", MINE, SAME),
    ("with a section for hydra", HEAD + "hydra: {run: {dir: .}}\n", MINE, Either(Refused(("hydra",)), SAME)),
    ("with a key one level too high", HEAD + "model: {lr: 0.1}\n", MINE, Refused((RATE_KEY,))),
    ("named with its ending", HEAD, [word if word != "my" else "my.yaml" for word in MINE], Either(BAD_YAML, SAME)),
    ("given as the folder", HEAD, [word if word != "." else "my.yaml" for word in MINE], Refused(("my.yaml",))),
]

# ------------------------------------------------------------------------------------- what changes when a run resumes


def takes_effect(key: str) -> Check:
    """The changed key is named, and the losses change; or it is said to be ignored, and they are the same."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        whole, found = losses(Fixture.path / "runs/whole"), losses(folder / RUN)
        if "resumed at step" not in outcome.text:
            return "it does not say that it resumed"
        if sorted(found) != sorted(whole):
            return f"steps {sorted(found)}"
        ignored = any(key in line and "ignored, because" in line for line in outcome.text.splitlines())
        if (found == whole) != ignored:
            return f"{key} is said to be ignored, but has an effect" if ignored else f"{key} has no effect"
        return told(key)(folder, outcome)

    return check


def kept(folder: Path, outcome: Outcome) -> str | None:
    """The rows of the earlier run are still there."""
    before, after = losses(Fixture.path / RUN), losses(folder / RUN)
    return None if all(after.get(step) == loss for step, loss in before.items()) else "rows of the earlier run are lost"


CHANGED: list[tuple[str, str]] = [
    (f"{OPTIM}betas", "[0.5,0.7]"),
    (f"{OPTIM}sched.warmup_steps", "50"),
    (f"{MASK}mask_prob", "0.03"),
    ("model.loss.mask_threshold", "0.3"),
    ("model.quantizer.dist_fn", "cosine"),
    (f"{ENCODER}xscaling", "false"),
    (f"{ENCODER}att_context_size", "[4,4]"),
    (f"{ENCODER}n_heads", "2"),
    (f"{ENCODER}subsampling_factor", "4"),
    ("model.num_classes", "128"),
    ("model.sample_rate", "8000"),
    (f"{MEL}window_stride", "0.02"),
    (f"{MEL}normalize", "all_features"),
    ("seed", "7"),
    (f"{TRAIN}batch_augmentor.prob", "0.1"),
    ("trainer.accumulate_grad_batches", "2"),
    ("trainer.precision", "bf16"),
    ("trainer.gradient_clip_val", "0.001"),
    (f"{ENCODER}dropout_att", "0.6"),
    (f"{ENCODER}conv_norm_type", "layer_norm"),
    (f"{MEL}dither", "0.1"),
    (f"{TRAIN}batch_size", "4"),
    (f"{TRAIN}shuffle", "false"),
    (f"{TRAIN}noise_manifest", "valid.jsonl"),
    (f"{OPTIM}name", "adam"),
]


def in_turn(*parts: tuple[str, ...]) -> Callable[[Path, list[str]], str | None]:
    """The same run in parts, each with other settings; they must not change what is learned."""

    def act(folder: Path, command: list[str]) -> str | None:
        for overrides in parts:
            outcome = in_fork([*command, *overrides], folder, {}, 90)
            if outcome.code != 0 or "Traceback (most recent call last)" in outcome.text:
                return f"exit code {outcome.code}: {outcome.text[-300:]}"
        return resumed(folder, outcome)

    return act


def again(folder: Path, outcome: Outcome) -> str | None:
    """The run that was started from another one's hparams.yaml has its losses."""
    before, found = losses(folder / RUN), losses(folder / "runs/again")
    return None if before == found else f"losses differ from those of the run: {found}"


def untouched(folder: Path, outcome: Outcome) -> str | None:
    return f"a dry run changed {outcome.changed[:4]}" if outcome.changed else None


MIXED_CASES: dict[str, tuple[tuple[str, ...], ...]] = {
    "an average of the weights, then none": ((AVERAGE, "trainer.max_steps=6"), (f"{EXP}ema.enable=false",)),
    "no average of the weights, then one": (("trainer.max_steps=6",), (AVERAGE,)),
    "the best with weights only, then whole": ((f"{SAVING}save_weights_only=true", "trainer.max_steps=6"), ()),
    "a checkpoint at every step, then not": ((f"{SAVING}every_n_train_steps=1", "trainer.max_steps=5"), ()),
    "validation by steps, then by epochs": (("trainer.val_check_interval=1", "trainer.max_steps=5"), ()),
    "no validation set, then one": (("~model.validation_ds", "trainer.max_steps=5"), ()),
    "with workers, then without": ((f"{TRAIN}num_workers=2", "trainer.max_steps=5"), ()),
    "the best named last, then not": ((f"{SAVING}filename=last", "trainer.max_steps=6"), ()),
    "traced, then not": (("debug.trace=true", "trainer.max_steps=5"), ()),
}

# ------------------------------------------------------------------------------- starting weights, and other commands


def model(folder: Path) -> None:
    for name in ("model.nemo", "model.ckpt"):
        shutil.copy(Fixture.path / name, folder)


def loaded_some(folder: Path, outcome: Outcome) -> str | None:
    """The weights that were asked for were loaded: more than none."""
    numbers = [int(line.split()[0]) for line in outcome.text.splitlines() if line.strip().endswith(" loaded")]
    return trained(folder, outcome) if any(numbers) else "no weight was loaded"


START: list[tuple[str, Refused | Either, tuple[str, ...]]] = [
    (
        *("starting weights with a typo in include", Refused(("encodr",))),
        ("init_from_nemo_model={base: {path: model.nemo, include: [encodr]}}",),
    ),
    (
        *("starting weights that exclude everything", Refused(("exclude|include",))),
        ("init_from_nemo_model={base: {path: model.nemo, include: [encoder], exclude: [encoder]}}",),
    ),
    (
        *("starting weights of another width", Either(Refused(("shape",)), Right(said("different shape")))),
        ("init_from_nemo_model=model.nemo", f"{ENCODER}d_model=64"),
    ),
    (
        *("starting weights from two places", Refused(("init_from_nemo_model", "init_from_ptl_ckpt"))),
        ("init_from_nemo_model=model.nemo", "init_from_ptl_ckpt=model.ckpt"),
    ),
    (
        *("a .nemo file as training checkpoint", Either(Refused(("model.nemo",)), Right(loaded_some))),
        ("init_from_ptl_ckpt=model.nemo",),
    ),
    (
        *("a training checkpoint as .nemo file", Either(Refused(("model.ckpt",)), Right(loaded_some))),
        ("init_from_nemo_model=model.ckpt",),
    ),
    ("starting weights from a folder", Refused(("audio",)), ("init_from_nemo_model=audio",)),
    ("resuming from a .nemo file", Refused(("model.nemo",)), (f"{EXP}resume_from_checkpoint=model.nemo",)),
]


def sensible_features(number: int = 8) -> Check:
    """So many arrays, finite, and not constant."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        files = list((folder / "out").rglob("*.npy"))
        if len(files) != number:
            return f"{len(files)} feature files, expected {number}"
        if any(np.ptp(np.load(path)) == 0 for path in files):
            return "features are constant"
        return finite_features(folder, outcome)

    return check


def same_layers(folder: Path, outcome: Outcome) -> str | None:
    """Features of `1,1`: the layer once or twice, but with as many layers as the manifest's arrays are described with."""
    described = json.loads((folder / "out/extract.json").read_text())
    counts = {np.load(path).shape[0] for path in (folder / "out").rglob("*.npy")}
    return None if counts == {len(described["layers"])} else f"{counts} layers, extract.json has {described['layers']}"


def labels(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    write_lines(folder / "l.jsonl", [{**line, "label": "ab"[i % 2]} for i, line in enumerate(lines)])


EXTRACT = ["extract", "model.nemo", "train.jsonl", "out", "--device", "cpu"]
WEIGHTED = ["--aggregation", "weighted"]
PROBE = ["probe", "model.nemo", "--train", "l.jsonl", "--test", "l.jsonl", "--label", "label", "--output", "out"]
PREPARE = ["prepare", "audio", "--output", "new.jsonl", "--workers", "0"]
INSPECT = ["inspect", "train.jsonl", "--examples", "0"]


def pages(folder: Path, outcome: Outcome) -> str | None:
    return None if "</html>" in (folder / "inspect.html").read_text() else "no whole page"


def measured(folder: Path, outcome: Outcome) -> str | None:
    """Every file is in the manifest, and once in the parts of it."""
    names = [json.loads(line)["audio_filepath"] for line in (folder / "new.jsonl").read_text().splitlines()]
    parts = [
        json.loads(line)["audio_filepath"]
        for part in ("train", "valid")
        if (folder / f"new.{part}.jsonl").exists()
        for line in (folder / f"new.{part}.jsonl").read_text().splitlines()
    ]
    if len(names) != 8:
        return f"{len(names)} utterances, expected 8"
    return None if sorted(parts) in ([], sorted(names)) else "the parts are not the whole"


def shards(folder: Path, outcome: Outcome) -> str | None:
    tars = list(folder.rglob("audio_*.tar"))
    return measured(folder, outcome) if len(tars) == 20 else f"{len(tars)} shards, expected 20"


COMMANDS: list[tuple[list[str], Expected]] = [
    ([*EXTRACT, *WEIGHTED, "--weights", "nan,1"], Refused(("weights",))),
    ([*EXTRACT, *WEIGHTED, "--weights", "0,0"], Refused(("weights",))),
    ([*EXTRACT, *WEIGHTED, "--weights", "0.2;0.8"], Refused(("weights",))),
    ([*EXTRACT, *WEIGHTED], Either(Refused(("weights",)), Right(sensible_features()))),
    ([*EXTRACT, "--weights", "0.2,0.8"], Refused(("weights|aggregation",))),
    ([*EXTRACT, "--layers", "1,1"], Either(Refused(("layers",)), Right(same_layers))),
    ([*EXTRACT, "--layers", "1-2"], Refused(("layers",))),
    ([*EXTRACT, "--layers", ""], Refused(("layers",))),
    ([*EXTRACT, "--max-duration", "nan"], Refused(("max-duration",))),
    ([*EXTRACT, "--batch-seconds", "inf"], Either(Refused(("batch-seconds",)), Right(sensible_features()))),
    ([*EXTRACT, "--format", "shards", "--shard-mb", "-1"], Refused(("shard-mb",))),
    ([*EXTRACT[:-1], "gpu"], Refused(("gpu",))),
    ([*PROBE, "--snr", "nan", "--noise", "train.jsonl"], Refused(("snr",))),
    ([*PROBE, "--snr", "0"], Refused(("noise",))),
    ([*PROBE, "--head", "attentive", "--lr", "0"], Refused((RATE_KEY,))),
    (
        [*PROBE, "--labels-per-class", "100"],
        Either(Refused(("labels-per-class",)), Right(told("labels-per-class|100", ended_well))),
    ),
    ([*PREPARE, "--split", "hash", "--valid-share", "10"], Refused(("valid-share",))),
    ([*PREPARE, "--split", "hash", "--valid-share", "nan"], Refused(("valid-share",))),
    ([*PREPARE, "--valid-share", "0.1"], Refused(("split",))),
    ([*PREPARE, "--split", "folder", "--folder-level", "0", "--valid-share", "0.5"], Refused(("folder-level",))),
    ([*PREPARE, "--job", "4/4"], Refused(("job",))),
    ([*PREPARE, "--merge", "2"], Refused(("job",))),
    ([*PREPARE, "--shards", "20"], Either(Refused(("shards",)), Right(shards))),
    ([*INSPECT, "--batch-size", "1000000000"], Either(Refused(("batch-size",)), Right(pages))),
    ([*INSPECT, "model.train_ds.max_duration=60s"], Refused(("max_duration",))),
    ([*INSPECT, "--config-name", "nest_demo2"], Refused(("nest_demo2",))),
    (["info", "nest_fast-conformer", "size=huge"], Refused(("huge",))),
    (["info", "nest_fast-conformer", f"{ENCODER}n_layers=-3"], Refused(("n_layers",))),
    (["info", "nest_fast-conformer", f"{ENCODER}n_layers=1000000000"], Refused(("n_layers|memory",))),
]


# -------------------------------------------------------------------- a second command where a first one left its files


def after(command: Sequence[str], *then: Setup) -> Setup:
    """The folder as a first command leaves it, and something that happens afterwards."""

    def setup(folder: Path) -> None:
        outcome = in_fork(command, folder, {}, 90)
        if outcome.code != 0:
            raise RuntimeError(f"the first command fails: {outcome.text}")
        both(*then)(folder)

    return setup


def other_model(folder: Path) -> None:
    """The model file is replaced by one of the same shape, trained for longer."""
    (folder / "model.nemo").unlink()
    shutil.copy(Fixture.path / "runs/whole/checkpoints/whole.nemo", folder / "model.nemo")


def not_those_of_before(folder: Path, outcome: Outcome) -> str | None:
    """The features of the first file are not those of the first model."""
    first = next((folder / "out").rglob("*-0.npy"))
    same = np.array_equal(np.load(first), Fixture.feature())
    return (
        "the features of the earlier model are taken for those of this one"
        if same
        else sensible_features()(folder, outcome)
    )


def not_a_number(folder: Path) -> None:
    """A file whose header is good and whose samples are not."""
    soundfile.write(folder / "audio/7.wav", np.full(16000, np.nan, np.float32), 16000, subtype="FLOAT")


def finds_it(folder: Path, outcome: Outcome) -> str | None:
    listed = [json.loads(line)["audio_filepath"] for line in (folder / "new.bad.jsonl").read_text().splitlines()]
    return None if listed == ["audio/7.wav"] else f"bad files: {listed}"


def in_tars(number: int) -> Check:
    """So many shards, no other, and every utterance in one of them."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        tars = sorted(folder.rglob("audio_*.tar"))
        found = []
        for path in tars:
            with tarfile.open(path) as tar:
                found += [member.name for member in tar.getmembers() if member.isfile()]
        if len(found) != 8 or len(set(found)) != 8:
            return f"{len(found)} members, {len(set(found))} different, of 8 utterances"
        return None if len(tars) == number else f"{len(tars)} shards, expected {number}"

    return check


def valid_share(folder: Path, outcome: Outcome) -> str | None:
    """All are in the validation part, as the second command asks, if 1 is a share."""
    return measured(folder, outcome) or (
        None if not (folder / "new.train.jsonl").read_text() else "the old split is kept"
    )


def one_table(folder: Path, outcome: Outcome) -> str | None:
    """Every row of metrics.csv has the cells of its header, and the new sets have theirs."""
    with (folder / RUN / "metrics.csv").open(newline="") as table:
        header, *content = list(csv.reader(table))
    if any(len(cells) != len(header) for cells in content):
        return "a row has another number of cells than the header"
    sets = [i for i, name in enumerate(header) if name.endswith("_val_loss") and any(cells[i] for cells in content)]
    return f"columns of {len(sets)} validation sets, expected 2" if len(sets) != 2 else resumed(folder, outcome)


def one_line_less(folder: Path) -> None:
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:-2]))


HASH = ["--split", "hash", "--valid-share"]
SECOND: list[tuple[str, list[str], Expected, Setup]] = [
    (
        *("features, then the same with another model of the same name", EXTRACT),
        *(Either(Refused(("out|model",)), Right(not_those_of_before)), both(model, after(EXTRACT, other_model))),
    ),
    (
        *("headers only, then decoded", PREPARE),
        *(Either(Refused(("new.jsonl",)), Right(finds_it)), both(not_a_number, after([*PREPARE, "--check", "header"]))),
    ),
    (
        *("split, then split with another share", [*PREPARE, *HASH, "0.999"]),
        *(Either(Refused(("new",)), Right(valid_share)), after([*PREPARE, *HASH, "0.2"])),
    ),
    (
        *("two shards, then three", [*PREPARE, "--shards", "3"]),
        *(Either(Refused(("shards|audio_",)), Right(in_tars(3))), after([*PREPARE, "--shards", "2"])),
    ),
    (
        *("three shards, then two", [*PREPARE, "--shards", "2"]),
        *(Either(Refused(("shards|audio_",)), Right(in_tars(2))), after([*PREPARE, "--shards", "3"])),
    ),
    (
        *("resumed with two validation sets", resume(f"{VALID}manifest_filepath=[valid.jsonl,train.jsonl]")),
        *(Either(Refused(("validation_ds",)), Right(one_table)), Fixture.run),
    ),
    (
        *("resumed with starting weights", resume("init_from_nemo_model=model.nemo")),
        *(
            Either(Refused(("init_from_nemo_model",)), Right(told("init_from_nemo_model", resumed))),
            both(model, Fixture.run),
        ),
    ),
    (
        *("resumed with a shorter manifest", resume()),
        *(
            Either(Refused(("train.jsonl|data",)), Right(told("differ|changed|other data", trained))),
            both(Fixture.run, one_line_less),
        ),
    ),
    ("info of a file with a size", ["info", "model.nemo", "size=large"], Refused(("size",)), model),
    ("doctor of a configuration that is not there", ["doctor", "--config-name", "mine"], Refused(("mine",)), model),
    ("report of a folder without a run", ["report", "audio"], Refused(("audio",)), model),
]

# ------------------------------------------------------------------------------------------------------------ the rows


def shown(command: Sequence[str]) -> str:
    return " ".join(command)


def row(name: str, command: Sequence[str], expected: Expected, setup: Setup | None = None) -> Trial:
    alone = any("num_nodes" in word or "wandb" in word for word in command)
    return Trial(GROUP, name, command, expected, setup, own_process=alone, limit_s=90)


def values() -> list[Trial]:
    found = [
        row(shown(overrides), pretrain(*overrides), Refused((word,))) for word, *overrides in (*REFUSED, *NOT_NUMBERS)
    ]
    for word, *overrides in EXTREME:
        refused = Refused((word,))
        expected = Either(refused, Right(trained)) if word.startswith(MAY_BE_OBEYED) else refused
        found.append(row(shown(overrides), pretrain(*overrides), expected))
    found += [
        row(f"without effect: {override}", pretrain(override), Right(told(word, as_usual)))
        for word, override in NO_EFFECT
    ]
    for word, *overrides in NAMED:
        found.append(row(shown(overrides), pretrain(*overrides), Either(Refused((word,)), Right(told(word)))))
    for word, check, maybe in MAYBE:
        found.append(row(repr(shown(maybe)), pretrain(*maybe), Either(Refused((word,)), Right(check))))
    return found


def files() -> list[Trial]:
    found = [
        row(f"a yaml {name}", command, expected, file("my.yaml", content)) for name, content, command, expected in YAML
    ]
    typo = ["pretrain", "--config-name", "nest_fast_conformer", *TINY]
    found.append(row("a typo in --config-name", typo, Refused(("nest_fast_conformer", "nest_fast-conformer"))))
    return found


def changes() -> list[Trial]:
    found = []
    for key, value in CHANGED:
        expected = Either(Refused((key.rpartition(".")[2],)), Right(takes_effect(key)))
        found.append(row(f"resumed with {key}={value}", resume(f"{key}={value}"), expected, Fixture.run))
    found += [
        Trial(GROUP, name, resume(), SAME, act=in_turn(*parts), limit_s=200) for name, parts in MIXED_CASES.items()
    ]
    hparams = ["pretrain", "--config-path", str(RUN), "--config-name", "hparams", "exp_manager.name=again"]
    found += [
        row(
            "hparams.yaml of a run as configuration", hparams, Either(Refused(("hparams",)), Right(again)), Fixture.run
        ),
        row("a dry run in the folder of a run", resume("trainer.fast_dev_run=true"), Right(untouched), Fixture.run),
        row("a dry run of -1 batches", resume("trainer.fast_dev_run=-1"), Refused(("fast_dev_run",)), Fixture.run),
        row(
            "resumed with fewer steps than done",
            resume(f"trainer.max_steps={BASE_STEPS - 3}"),
            Either(Refused(("max_steps",)), Right(told("max_steps", kept))),
            Fixture.run,
        ),
        row(
            "not resumed, in the same folder",
            resume(f"{EXP}resume_if_exists=false"),
            Either(Refused(("resume_if_exists|exp_manager.name",)), Right(kept)),
            Fixture.run,
        ),
        row(
            "resumed with early stopping",
            resume(STOP_EARLY, f"{STOPPING}patience=50"),
            Right(said("resumed at step")),
            Fixture.run,
        ),
        row(
            "resumed with an average of the weights",
            resume(AVERAGE, f"{EXP}ema.decay=0.9"),
            Either(Refused(("ema",)), Right(said("resumed at step", "ema"))),
            Fixture.run,
        ),
    ]
    return found


def trials() -> list[Trial]:
    starts = [row(name, pretrain(*overrides), expected, model) for name, expected, overrides in START]
    others = [row(shown(command), command, expected, both(model, labels)) for command, expected in COMMANDS]
    seconds = [row(name, command, expected, setup) for name, command, expected, setup in SECOND]
    return [*values(), *files(), *changes(), *starts, *others, *seconds]
