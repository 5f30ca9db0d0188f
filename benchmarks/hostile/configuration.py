"""Values, types and combinations of config keys and options; yaml files and overrides; runs resumed with other keys."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from benchmarks.hostile.harness import (
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
    ended_well,
    losses,
    only_run,
    pretrain,
    resume,
    rows,
    said,
    trained,
    write_lines,
)

Row = tuple[str, list[str], Expected]


def no(*words: str) -> Refused:
    return Refused(words)


def either(*words: str, check: Check = trained) -> Either:
    return Either(Refused(words), Right(check))


def without(*keys: str) -> list[str]:
    """The usual command, less some keys."""
    return ["pretrain", *(item for item in TINY if item.split("=")[0] not in keys)]


def steps(number: int) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = sorted(losses(only_run(folder)))
        return trained(folder, outcome) or (None if found == list(range(number)) else f"steps {found}")

    return check


def rate(highest: float) -> Check:
    """Trained, and the learning rate of some step is this one."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = [float(row["learning_rate"]) for row in rows(only_run(folder)) if row["train_loss"]]
        close = math.isclose(max(found), highest, rel_tol=1e-3)
        return trained(folder, outcome) or (None if close else f"learning rates {found}, expected {highest}")

    return check


def values(tree: Any, key: str) -> Iterator[Any]:
    """All values of a key, anywhere in a tree."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if name == key:
                yield value
            yield from values(value, key)


def ran_with(section: str, key: str, value: Any) -> Check:
    """Trained, and hparams.yaml has this value."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        tree = yaml.safe_load((only_run(folder) / "hparams.yaml").read_text())
        found = [one.get(key) for one in values(tree, section) if isinstance(one, Mapping)]
        return trained(folder, outcome) or (None if value in found else f"{section}.{key} is {found}, not {value!r}")

    return check


def saved(folder: Path, outcome: Outcome) -> str | None:
    found = list(folder.rglob("last.ckpt"))
    return None if len(found) == 1 else f"{len(found)} checkpoints"


def unchanged(folder: Path, outcome: Outcome) -> str | None:
    return f"changed {outcome.changed[:4]}" if outcome.changed else None


def continued(*words: str, until: int = 10) -> Check:
    """It says so, keeps the rows of the first six steps, and goes on to the end."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        before, found = losses(Fixture.path / RUN), losses(folder / RUN)
        if any(found.get(step) != loss for step, loss in before.items()):
            return "the rows of the earlier steps are lost"
        if sorted(found) != list(range(until)):
            return f"steps {sorted(found)}"
        return said("resumed at step", *words)(folder, outcome)

    return check


def old_run_is_kept(folder: Path, outcome: Outcome) -> str | None:
    """The checkpoint of six steps is still somewhere, or steps were added to it."""
    before = (Fixture.path / RUN / "checkpoints/last.ckpt").read_bytes()
    kept = any(path.read_bytes() == before for path in folder.rglob("*.ckpt"))
    return None if kept or "resumed at step" in outcome.text else "the checkpoint of the earlier run is gone"


AUG = "model.train_ds.batch_augmentor"
CKPT = "exp_manager.checkpoint_callback_params"

VALUES: list[Row] = [
    ("the number of steps is a word", ["trainer.max_steps=many"], no("max_steps")),
    ("the number of steps is left empty", ["trainer.max_steps="], no("max_steps")),
    ("no steps at all are asked for", ["trainer.max_steps=0"], no("max_steps")),
    ("no batch of an epoch may be used", ["trainer.limit_train_batches=0"], no("limit_train_batches")),
    ("a learning rate with a decimal comma", ["model.optim.lr=0,05"], no("lr|0,05")),
    ("a learning rate that is not a number", ["model.optim.lr=nan"], no("lr")),
    ("a batch of no utterances", ["model.train_ds.batch_size=0"], no("batch_size")),
    ("a batch size of true", ["model.train_ds.batch_size=true"], no("batch_size")),
    ("a batch larger than all the data", ["model.train_ds.batch_size=64"], no("batch_size|drop_last")),
    ("heads that do not divide the width", ["model.encoder.n_heads=5"], no("n_heads")),
    ("an encoder without layers", ["model.encoder.n_layers=0"], no("n_layers")),
    ("a convolution of even size", ["model.encoder.conv_kernel_size=8"], no("conv_kernel_size")),
    ("a subsampling factor that is no power of two", ["model.encoder.subsampling_factor=6"], no("subsampling_factor")),
    ("a context that sees nothing", ["model.encoder.att_context_size=[-5,-5]"], no("att_context_size")),
    ("a mask probability in percent", ["model.masking.mask_prob=65"], no("mask_prob")),
    (
        "masking is turned off",
        ["model.masking.mask_prob=0"],
        Either(no("mask_prob"), Right(said("mask_prob", then=ended_well))),
    ),
    ("a mask threshold that nothing reaches", ["model.loss.mask_threshold=1.5"], no("mask_threshold")),
    ("a mask block longer than every utterance", ["model.masking.block_size=100000"], either("block_size")),
    ("a codebook of one code", ["model.num_classes=1"], no("num_classes")),
    ("a codebook for the memory of a thousand machines", ["model.num_classes=1000000000000"], no("num_classes|memory")),
    ("a decoder with other classes than the codebook", ["model.decoder.num_classes=32"], no("num_classes")),
    ("a loss with another subsampling", ["model.loss.combine_time_steps=4"], no("combine_time_steps")),
    ("training data with another sample rate than the model", ["model.train_ds.sample_rate=8000"], no("sample_rate")),
    ("a window in milliseconds", ["model.preprocessor.window_size=25"], no("window_size|n_fft")),
    ("mel filters that begin above the highest frequency", ["model.preprocessor.lowfreq=9000"], no("lowfreq")),
    ("betas of one number", ["model.optim.betas=0.9"], no("betas")),
    (
        "a lowest rate above the highest",
        ["model.optim.sched.min_lr=1.0", "model.optim.sched.name=CosineAnnealing", "model.optim.sched.d_model=null"],
        Either(no("min_lr"), Right(said("min_lr"))),
    ),
    ("a warm-up both in steps and as a ratio", ["model.optim.sched.warmup_ratio=0.5"], either("warmup_ratio")),
    ("gradients clipped at a negative norm", ["trainer.gradient_clip_val=-1"], no("gradient_clip_val")),
    ("a seed of thirty digits", ["+seed=123456789012345678901234567890"], either("seed")),
    ("no devices", ["trainer.devices=0"], no("devices")),
    ("the time limit is in words", ["trainer.max_time=6min"], no("max_time")),
    ("the validation interval is one and a half epochs", ["trainer.val_check_interval=1.5"], no("val_check_interval")),
    (
        "accumulation by epoch, as Lightning once had it",
        ["trainer.accumulate_grad_batches={0: 1, 4: 2}"],
        no("accumulate_grad_batches"),
    ),
    (
        "more batches accumulated than an epoch has",
        ["trainer.accumulate_grad_batches=100"],
        either("accumulate_grad_batches"),
    ),
    ("logging every zero steps", ["trainer.log_every_n_steps=0"], either("log_every_n_steps", check=saved)),
    ("a monitored metric that does not exist", [f"{CKPT}.monitor=val_wer"], no("val_wer")),
    (
        "the average of weights with a decay of two",
        ["exp_manager.ema.enable=true", "exp_manager.ema.decay=2"],
        no("decay"),
    ),
    (
        "early stopping with a patience below zero",
        ["exp_manager.create_early_stopping_callback=true", "exp_manager.early_stopping_callback_params.patience=-1"],
        no("patience"),
    ),
    ("the folder for runs is a file", ["exp_manager.exp_dir=train.jsonl"], no("train.jsonl")),
    ("the folder for runs is in the kernel's file system", ["exp_manager.exp_dir=/proc/runs"], no("/proc/runs")),
    (
        "a range of ratios with its ends exchanged",
        [f"{AUG}.min_r_speech=10", f"{AUG}.max_r_speech=-10"],
        no("min_r_speech|max_r_speech"),
    ),
    (
        "a longest duration below the shortest",
        ["model.train_ds.min_duration=5", "model.train_ds.max_duration=1"],
        no("duration"),
    ),
    ("the manifest is a list of none", ["model.train_ds.manifest_filepath=[]"], no("manifest_filepath")),
    ("tar shards are asked for, but none are named", ["model.train_ds.is_tarred=true"], no("tarred_audio_filepaths")),
    (
        "buckets of durations that do not rise",
        ["model.train_ds.use_bucketing=true", "model.train_ds.bucket_duration_bins=[3,2,1]"],
        no("bucket_duration_bins"),
    ),
    (
        "starting weights from two places",
        ["+init_from_nemo_model=a.nemo", "+init_from_ptl_ckpt=b.ckpt"],
        no("init_from|a.nemo|b.ckpt"),
    ),
]

SYNTAX: list[Row] = [
    ("a class to create that runs a shell command", ["model.encoder._target_=os.system"], no("os.system")),
    ("an option with dashes like those of other programs", ["--trainer.max_steps=2"], no("trainer.max_steps")),
    ("a key and a value with a space between them", ["trainer.max_steps", "2"], no("trainer.max_steps")),
    ("typographic quotes around a path", ["model.train_ds.manifest_filepath=“train.jsonl”"], no("train.jsonl")),
    ("a sweep over several values", ["--multirun", "model.optim.lr=0.01,0.02"], no("multirun|lr")),
    ("a value that refers to itself", ["model.encoder.d_model=${model.encoder.d_model}"], no("d_model")),
    (
        "an environment variable that is not set",
        ["exp_manager.name=${oc.env:NOT_SET_ANYWHERE}"],
        no("NOT_SET_ANYWHERE"),
    ),
    ("a section that is a number", ["model.encoder=5"], no("encoder")),
    ("a key that is written in capitals", ["trainer.MAX_STEPS=2"], no("MAX_STEPS")),
    (
        "a flag in quotes that says False",
        ["model.train_ds.shuffle='False'"],
        either("shuffle", check=ran_with("train_ds", "shuffle", False)),
    ),
    ("a size that does not exist", ["size=huge"], no("huge")),
]

BASE = "defaults: [nest_fast-conformer, _self_]\n"
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)

YAMLS: list[tuple[str, str | bytes, list[str], Expected]] = [
    ("a yaml file indented with tabs", BASE + "model:\n\toptim:\n\t\tlr: 0.1\n", [], no("my.yaml")),
    (
        "a yaml file in which a key comes twice",
        BASE + "seed: 1\ntrainer: {max_steps: 2}\ntrainer: {max_epochs: 2}\n",
        [],
        no("trainer"),
    ),
    (
        "a yaml file from an editor that writes UTF-16",
        (BASE + "seed: 1\n").encode("utf-16"),
        [],
        either("my.yaml", check=steps(4)),
    ),
    (
        "a yaml file with a byte order mark and Windows lines",
        b"\xef\xbb\xbf" + (BASE + "model:\n  num_books: 2\n").replace("\n", "\r\n").encode(),
        [],
        either("my.yaml", check=ran_with("quantizer", "num_books", 2)),
    ),
    ("a yaml file in Latin-1", (BASE + "name: Bär\n").encode("latin-1"), [], no("my.yaml")),
    ("an empty yaml file", "", [], either("my.yaml|model")),
    (
        "a yaml file with an object of Python in it",
        BASE + "name: !!python/object/apply:os.system ['touch ../pwned']\n",
        [],
        no("my.yaml"),
    ),
    ("a yaml file that unfolds to a billion words", BASE + LAUGHS, [], no("a0|a8|my.yaml")),
    ("a yaml file that is based on itself", "defaults: [my, _self_]\nseed: 1\n", [], no("my")),
    ("a yaml file whose section is one level too high", BASE + "train_ds:\n  batch_size: 4\n", [], no("train_ds")),
    (
        "a yaml file with a rate written as 5e-2",
        BASE + "model:\n  optim: {lr: 5e-2, sched: null}\n",
        ["model.optim.lr", "model.optim.sched.warmup_steps"],
        Right(rate(0.05)),
    ),
    (
        "a yaml file in which a normalisation is called no",
        BASE + "model: {preprocessor: {normalize: no}}\n",
        [],
        either("normalize"),
    ),
]


def writes(content: str | bytes) -> Setup:
    def setup(folder: Path) -> None:
        (folder / "my.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())

    return setup


RESUMES: list[Row] = [
    ("resumed with a wider encoder", ["model.encoder.d_model=64"], no("d_model|last.ckpt")),
    ("resumed with another optimizer", ["model.optim.name=sgd", "~model.optim.betas"], no("optim")),
    ("resumed with another window of the mel features", ["model.preprocessor.window=hamming"], no("window")),
    ("resumed with another seed", ["+seed=7"], either("seed", check=continued("seed"))),
    ("resumed with a changed weight decay", ["model.optim.weight_decay=0.5"], Right(continued("weight_decay"))),
    ("resumed with fewer steps than are done", ["trainer.max_steps=3"], either("max_steps", check=continued(until=6))),
    ("resumed with larger batches", ["model.train_ds.batch_size=4"], Right(continued("batch_size"))),
    (
        "resumed with the average of weights turned on",
        ["exp_manager.ema.enable=true", "exp_manager.ema.decay=0.9"],
        either("ema", check=continued("ema")),
    ),
    (
        "resuming is turned off in the folder of a run",
        ["exp_manager.resume_if_exists=false"],
        either("runs/run|resume_if_exists", check=old_run_is_kept),
    ),
    (
        "resumed from a checkpoint that is not there",
        ["exp_manager.resume_from_checkpoint=nowhere.ckpt"],
        no("nowhere.ckpt"),
    ),
    ("a dry run in the folder of a run", ["trainer.fast_dev_run=true"], Right(unchanged)),
]


def labelled(folder: Path) -> None:
    """Two classes, two speakers each, in one manifest for both parts."""
    model(folder)
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    write_lines(folder / "train.jsonl", [{**line, "label": "ab"[i % 2]} for i, line in enumerate(lines)])


def model(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder)


EXTRACT = ["extract", "model.nemo", "audio/0.wav", "out", "--device", "cpu"]
PREPARE = ["prepare", "audio", "--output", "m.jsonl", "--workers", "0"]
PROBE = ["probe", "model.nemo", "--train", "train.jsonl", "--test", "train.jsonl", "--output", "out", "--device", "cpu"]


def layer_twice(folder: Path, outcome: Outcome) -> str | None:
    array = np.load(next((folder / "out").rglob("*.npy")))
    good = np.array_equal(array, Fixture.feature()[[1, 1]]) or np.array_equal(array, Fixture.feature()[[1]])
    return None if good else f"features of shape {array.shape} that are not those of layer 1"


def all_in_shards(folder: Path, outcome: Outcome) -> str | None:
    lines = (folder / "m.jsonl").read_text().splitlines()
    tars = list(folder.glob("audio_*.tar"))
    return None if len(lines) == 8 and tars else f"{len(lines)} lines, {len(tars)} shards"


OPTIONS: list[tuple[str, list[str], Expected, Callable[[Path], object] | None]] = [
    ("features of a layer that the model does not have", [*EXTRACT, "--layers", "7"], no("7"), model),
    ("features of a layer that is named twice", [*EXTRACT, "--layers", "1,1"], either("1", check=layer_twice), model),
    (
        "weights of layers that are not numbers",
        [*EXTRACT, "--aggregation", "weighted", "--weights", "nan,1"],
        no("weights"),
        model,
    ),
    ("weights of layers without a weighted sum", [*EXTRACT, "--weights", "0.2,0.8"], no("weights"), model),
    ("batches of zero seconds", [*EXTRACT, "--batch-seconds", "0"], no("batch-seconds|batch_seconds"), model),
    (
        "a limit of durations that is not a number",
        [*EXTRACT, "--max-duration", "nan"],
        no("max-duration|max_duration"),
        model,
    ),
    ("a device that this machine does not have", [*EXTRACT[:-1], "cuda:7"], no("cuda"), model),
    (
        "a share for validation of two hundred percent",
        [*PREPARE, "--split", "hash", "--valid-share", "2"],
        no("valid-share|valid_share"),
        None,
    ),
    (
        "a share for validation without a split",
        [*PREPARE, "--valid-share", "0.5"],
        no("valid-share|valid_share|split"),
        None,
    ),
    ("a job with a number that is too high", [*PREPARE, "--job", "4/4"], no("4/4|job"), None),
    (
        "a hundred shards for eight utterances",
        [*PREPARE, "--shards", "100"],
        either("shards", check=all_in_shards),
        None,
    ),
    (
        "a built-in configuration with a wrong key",
        ["info", "nest_fast-conformer", "model.encoder.layers=3"],
        no("model.encoder.layers"),
        None,
    ),
    ("a demo of utterances that last no time", ["demo", "--duration", "0"], no("duration"), None),
    (
        "a probe with noise of no known ratio",
        [*PROBE, "--label", "label", "--snr", "nan", "--noise", "valid.jsonl"],
        no("snr"),
        labelled,
    ),
    (
        "a probe with more labels per class than there are",
        [*PROBE, "--label", "label", "--labels-per-class", "100"],
        no("labels-per-class|labels_per_class|label"),
        labelled,
    ),
]


def trials() -> list[Trial]:
    group = "configuration"
    mine = ("--config-path", ".", "--config-name", "my")
    found = [Trial(group, name, pretrain(*overrides), expected) for name, overrides, expected in VALUES + SYNTAX]
    found += [
        Trial(group, name, [*without(*less), *mine], expected, writes(content))
        for name, content, less, expected in YAMLS
    ]
    found += [Trial(group, name, resume(*overrides), expected, Fixture.run) for name, overrides, expected in RESUMES]
    found += [Trial(group, name, command, expected, setup) for name, command, expected, setup in OPTIONS]
    found += [
        Trial(
            group,
            "two machines without a word where the first is",
            pretrain("trainer.num_nodes=2"),
            no("num_nodes|MASTER_ADDR"),
            own_process=True,
        ),
        Trial(
            group,
            "a logger on the web without an account",
            pretrain(
                "exp_manager.create_wandb_logger=true",
                "exp_manager.wandb_logger_kwargs.name=a",
                "exp_manager.wandb_logger_kwargs.project=b",
            ),
            either("wandb"),
            own_process=True,
            limit_s=90,
        ),
        Trial(
            group,
            "a yaml file given with its folder and ending",
            [*without(), "--config-path", "my.yaml"],
            either("my.yaml"),
            writes(BASE),
        ),
        Trial(
            group,
            "a yaml file that is a folder",
            [*without(), *mine],
            no("my"),
            lambda folder: (folder / "my.yaml").mkdir(),
        ),
    ]
    return found
