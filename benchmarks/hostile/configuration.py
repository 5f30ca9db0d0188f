"""Settings as people get them wrong: units, locales, copy and paste, other tools' words, parts that do not match."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from benchmarks.hostile.harness import (
    RUN,
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
    losses,
    only_run,
    pretrain,
    resume,
    rows,
    said,
    trained,
)

Overrides = tuple[str, ...]
OWN = ("--config-path", "conf", "--config-name", "my_run")
"""A configuration of the user's own, in conf/my_run.yaml."""
BEGIN = "defaults: [nest_fast-conformer, _self_]\n"
BUCKETS = "model.train_ds.use_bucketing=true"
CONCAT = ("model.train_ds.manifest_filepath=[train.jsonl,valid.jsonl]", "model.train_ds.is_concat=true")
COSINE = ("model.optim.sched.name=CosineAnnealing", "model.optim.sched.d_model=null", "model.optim.lr=5e-4")
NO_VALIDATION = "model.validation_ds.manifest_filepath=null"
FOUR_EPOCHS = ("trainer.max_steps=16", "trainer.check_val_every_n_epoch=1")


# ------------------------------------------------------------------------------------------------------------- results


def steps(number: int) -> Check:
    """That many optimizer steps were made, and the result is right."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = len(losses(only_run(folder)))
        return trained(folder, outcome) if found == number else f"{found} steps instead of {number}"

    return check


def used(**expected: object) -> Check:
    """hparams.yaml has these values (`__` for a dot), and the result is right."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        content: Any = yaml.safe_load((only_run(folder) / "hparams.yaml").read_text())
        for name, value in expected.items():
            found = content
            for part in name.split("__"):
                found = found[part]
            if found != value or isinstance(found, bool) != isinstance(value, bool):
                return f"{name.replace('__', '.')} is {found!r} instead of {value!r}"
        return trained(folder, outcome)

    return check


def run_is(path: str) -> Check:
    """The run is in this folder, complete, with a model that has its name."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        run = only_run(folder.parent)
        if run.relative_to(folder.parent).as_posix() != path:
            return f"the run is in {run.relative_to(folder.parent)}"
        if not (run / f"checkpoints/{run.name}.nemo").is_file():
            return "no model file of that name"
        return trained(run, outcome)

    return check


def best(number: int) -> Check:
    """So many checkpoints are kept besides last.ckpt and its predecessor."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        names = [path.name for path in only_run(folder).glob("checkpoints/*.ckpt")]
        kept = [name for name in names if name not in {"last.ckpt", "last-before.ckpt"}]
        if "last.ckpt" not in names:
            return "no last.ckpt"
        return trained(folder, outcome) if len(kept) == number else f"{kept} are kept instead of {number}"

    return check


def model_is_there(folder: Path, outcome: Outcome) -> str | None:
    """For runs that log no step: there is a model, and the summary does not speak of failure."""
    return None if list(folder.rglob("*.nemo")) else "no model was written"


def untouched(folder: Path, outcome: Outcome) -> str | None:
    return f"changed {outcome.changed[:4]}" if outcome.changed else None


def partly_masked(folder: Path, outcome: Outcome) -> str | None:
    """Something is masked, and something is left to predict it from."""
    rates = [float(row["mask_rate"]) for row in rows(only_run(folder)) if row["mask_rate"]]
    return trained(folder, outcome) if min(rates, default=1) < 1 else "every token was masked in every step"


def validated(folder: Path, outcome: Outcome) -> str | None:
    found = [row for row in rows(only_run(folder)) if row.get("val_loss")]
    return trained(folder, outcome) if found else "never validated, although a validation set is given"


def either(*words: str, then: Check = trained) -> Either:
    return Either(Refused(words), Right(then))


# -------------------------------------------------------------------------------------------------------------- set-ups


def own_yaml(text: str, encoding: str = "utf-8") -> Setup:
    def setup(folder: Path) -> None:
        (folder / "conf").mkdir()
        (folder / "conf/my_run.yaml").write_bytes(text.encode(encoding))

    return setup


def model_file(folder: Path) -> None:
    (folder / "model.nemo").hardlink_to(Fixture.path / "model.nemo")
    (folder / "model.ckpt").hardlink_to(Fixture.path / "model.ckpt")


def manifest_at_home(folder: Path) -> None:
    text = (folder / "train.jsonl").read_text().replace("audio/", f"{folder}/audio/")
    (folder.parent / "home/train.jsonl").write_text(text)


# --------------------------------------------------------------------------------------------- refused, from overrides

REFUSED: dict[str, tuple[Overrides, Overrides]] = {
    # the shell, the keyboard, the clipboard
    "decimal comma": (("model.optim.lr=0,001",), ("lr",)),
    "Unicode minus in an exponent": (("model.optim.lr=1e\u22123",), ("lr",)),
    "no-break space behind a number": (("trainer.max_steps=4\u00a0",), ("max_steps",)),
    "number with k": (("trainer.max_steps=10k",), ("max_steps",)),
    "spaces around the equals sign": (("trainer.max_steps", "=", "4"), ("trainer.max_steps",)),
    "two dashes before a key": (("--trainer.max_steps=4",), ("trainer.max_steps",)),
    "colon as in yaml": (("trainer.max_steps: 4",), ("trainer.max_steps",)),
    "typographic quotes": (("\u201ctrainer.max_steps=4\u201d",), ("max_steps",)),
    "variable that is not set: lr": (("model.optim.lr=",), ("model.optim.lr",)),
    "variable that is not set: manifest": (("model.train_ds.manifest_filepath=",), ("manifest_filepath",)),
    "variable in single quotes": (("trainer.devices=$NGPU",), ("devices",)),
    "shell variable in braces, in single quotes": (("exp_manager.name=${USER}_run",), ("USER",)),
    "exp_dir that is a file": (("exp_manager.exp_dir=train.jsonl",), ("train.jsonl|exp_dir",)),
    # words of other tools and of older versions
    "Lightning 1: resume_from_checkpoint": (("trainer.resume_from_checkpoint=last.ckpt",), ("resume_from_checkpoint",)),
    "Lightning: accumulate by epoch": (("trainer.accumulate_grad_batches={0: 2, 4: 4}",), ("accumulate_grad_batches",)),
    "Hugging Face: adamw_torch": (("model.optim.name=adamw_torch",), ("optim.name", "adamw")),
    "Hugging Face: cosine": (("model.optim.sched.name=cosine",), ("sched.name", "CosineAnnealing")),
    "Hugging Face: warm-up as a share": (("model.optim.sched.warmup_steps=0.1",), ("warmup_steps",)),
    "Hugging Face: precision fp32": (("trainer.precision=fp32",), ("precision",)),
    "DeepSpeed": (("trainer.strategy=deepspeed_stage_2",), ("strategy",)),
    "device as torch writes it": (("trainer.devices='cuda:0'",), ("devices",)),
    "numpy's name of a window": (("model.preprocessor.window=hanning",), ("window", "hann")),
    "ASR's metric chooses the best": (("exp_manager.checkpoint_callback_params.monitor=val_wer",), ("val_wer",)),
    "ASR's metric in the file name": (
        ("exp_manager.checkpoint_callback_params.filename='{step}-{val_wer:.3f}'",),
        ("val_wer",),
    ),
    "group of configurations that does not exist": (("model/encoder=conformer_large",), ("conformer_large|encoder",)),
    "yaml name with the wrong dash": (("--config-name", "nest-fast-conformer"), ("nest-fast-conformer",)),
    # units
    "sample rate in kHz": (("model.sample_rate=16",), ("sample_rate",)),
    "window in milliseconds": (("model.preprocessor.window_size=25",), ("window_size",)),
    "highfreq in kHz": (("model.preprocessor.highfreq=8",), ("highfreq",)),
    "pre-emphasis in percent": (("model.preprocessor.preemph=97",), ("preemph",)),
    "min_duration in milliseconds": (("model.train_ds.min_duration=1000",), ("min_duration",)),
    "mask_prob in percent": (("model.masking.mask_prob=4",), ("mask_prob",)),
    "decay of the average in percent": (
        ("exp_manager.ema.enable=true", "exp_manager.ema.decay=99.9"),
        ("decay",),
    ),
    "warm-up in percent": (
        ("model.optim.sched.warmup_steps=null", "model.optim.sched.warmup_ratio=10"),
        ("warmup_ratio",),
    ),
    "max_time as SLURM writes it": (("trainer.max_time=24:00:00",), ("max_time",)),
    "no time at all": (("trainer.max_time=00:00:00:00",), ("max_time",)),
    "interval of saves in minutes": (
        ("exp_manager.checkpoint_callback_params.train_time_interval=30",),
        ("train_time_interval",),
    ),
    "stall limit with its unit": (("watchdog.floor_s=60s",), ("floor_s",)),
    # values out of range
    "learning rate below 0": (("model.optim.lr=-0.001",), ("lr",)),
    "beta of 1": (("model.optim.betas=[0.9,1.0]",), ("betas",)),
    "average that never moves": (("exp_manager.ema.enable=true", "exp_manager.ema.decay=1.0"), ("decay",)),
    "magnitudes to the power of 0": (("model.preprocessor.mag_power=0",), ("mag_power",)),
    "workers as joblib counts them": (("model.train_ds.num_workers=-1",), ("num_workers",)),
    "no accumulation written as 0": (("trainer.accumulate_grad_batches=0",), ("accumulate_grad_batches",)),
    "machines, but no address": (("trainer.num_nodes=2",), ("MASTER_ADDR",)),
    "Kaldi's dither, for samples up to 32767": (("model.preprocessor.dither=1.0",), ("dither",)),
    "learning rate of 0": (("model.optim.lr=0",), ("lr",)),
    # parts that contradict each other
    "the best is the one with the largest loss": (
        ("exp_manager.checkpoint_callback_params.mode=max",),
        ("mode",),
    ),
    "at least more steps than at most": (("trainer.min_steps=10",), ("min_steps|max_steps",)),
    "window shorter than the stride": (
        ("model.preprocessor.window_size=0.01", "model.preprocessor.window_stride=0.025"),
        ("window_stride|window_size",),
    ),
    "FFT shorter than the window": (("model.preprocessor.n_fft=256",), ("n_fft",)),
    "frequencies swapped": (
        ("model.preprocessor.lowfreq=7600", "model.preprocessor.highfreq=60"),
        ("lowfreq|highfreq",),
    ),
    "durations swapped": (
        ("model.train_ds.min_duration=20", "model.train_ds.max_duration=1"),
        ("min_duration|max_duration",),
    ),
    "noise ratios swapped": (
        ("model.train_ds.batch_augmentor.min_r_noise=20", "model.train_ds.batch_augmentor.max_r_noise=-5"),
        ("r_noise",),
    ),
    "encoder expects other mel features": (("model.encoder.feat_in=128",), ("feat_in",)),
    "quantizer stacks other frames than the encoder": (
        ("model.quantizer.combine_time_steps=4",),
        ("combine_time_steps",),
    ),
    "warm-up given twice": (("model.optim.sched.warmup_ratio=0.1",), ("warmup",)),
    "least learning rate above the highest": ((*COSINE, "model.optim.sched.min_lr=0.01"), ("min_lr",)),
    "chunks that do not fit": (
        ("model.encoder.att_context_style=chunked_limited", "model.encoder.att_context_size=[71,13]"),
        ("att_context_size",),
    ),
    "batch larger than the data": (("model.train_ds.batch_size=16",), ("batch_size|drop_last",)),
    "bins not in order": (
        (BUCKETS, "model.train_ds.bucket_duration_bins=[2.0,1.8]"),
        ("bucket_duration_bins",),
    ),
    "bins and their batch sizes": (
        (BUCKETS, "model.train_ds.bucket_duration_bins=[1.8,2.3]", "model.train_ds.bucket_batch_size=[4]"),
        ("bucket_batch_size",),
    ),
    "endless data, and no limit of steps": (
        (*CONCAT, "model.train_ds.endless=true", "trainer.max_steps=-1", "trainer.max_epochs=2"),
        ("max_steps",),
    ),
    "early stopping without validation": (
        (NO_VALIDATION, "exp_manager.create_early_stopping_callback=true"),
        ("early_stopping|val_loss|validation",),
    ),
    "two sources of starting weights": (
        ("init_from_nemo_model=model.nemo", "init_from_ptl_ckpt=model.ckpt"),
        ("init_from",),
    ),
    "starting weights of which nothing is taken": (
        ("init_from_nemo_model={base: {path: model.nemo, include: [encodr]}}",),
        ("encodr|include",),
    ),
}

# ------------------------------------------------------------------------------------ right, or refused, from overrides

OTHERS: dict[str, tuple[Overrides, Expected]] = {
    "digits in groups": (
        ("trainer.max_steps=10_000", "trainer.max_epochs=1"),
        either("max_steps", then=used(trainer__max_steps=10_000)),
    ),
    "steps in scientific notation": (
        ("trainer.max_steps=1e5", "trainer.max_epochs=1"),
        either("max_steps", then=used(trainer__max_steps=100_000)),
    ),
    "exp_dir with a tilde": (("exp_manager.exp_dir=~/runs",), either("exp_dir|~", then=run_is("home/runs/run"))),
    "exp_dir with a tilde, quoted as the message says": (
        ('exp_manager.exp_dir="~/runs"',),
        either("exp_dir|~", then=run_is("home/runs/run")),
    ),
    "manifest with a tilde, quoted": (
        ('model.train_ds.manifest_filepath="~/train.jsonl"',),
        either("~/train.jsonl"),
    ),
    "share of the data that is less than a batch": (
        ("trainer.limit_train_batches=0.01", "trainer.max_epochs=2", "trainer.max_steps=-1"),
        either("limit_train_batches", then=steps(2)),
    ),
    "manifest with a tilde": (("model.train_ds.manifest_filepath=~/train.jsonl",), either("~/train.jsonl")),
    "run name with a slash": (
        ("exp_manager.name=lab/first",),
        either("exp_manager.name", then=run_is("folder/runs/lab/first")),
    ),
    "run name that looks like a number": (
        ("exp_manager.name=2024_01",),
        either("exp_manager.name", then=run_is("folder/runs/2024_01")),
    ),
    "cosine, d_model left from Noam": (
        ("model.optim.sched.name=CosineAnnealing", "model.optim.lr=5e-4"),
        either("d_model"),
    ),
    "all epochs counted, one batch each": (
        ("trainer.limit_train_batches=1", "trainer.max_epochs=3", "trainer.max_steps=-1"),
        Right(steps(3)),
    ),
    "limit of 1.0 is the whole epoch": (
        ("trainer.limit_train_batches=1.0", "trainer.max_epochs=1", "trainer.max_steps=100"),
        Right(steps(4)),
    ),
    "more accumulation than batches in an epoch": (
        ("trainer.accumulate_grad_batches=6", "trainer.max_steps=2"),
        either("accumulate_grad_batches", then=steps(2)),
    ),
    "validation every 5000 batches, epochs are shorter": (
        ("trainer.val_check_interval=5000", *FOUR_EPOCHS),
        either("val_check_interval", then=validated),
    ),
    "all of the best are kept": (
        ("exp_manager.checkpoint_callback_params.save_top_k=-1", *FOUR_EPOCHS),
        either("save_top_k", then=best(4)),
    ),
    "three best under one name": (
        (
            "exp_manager.checkpoint_callback_params.save_top_k=3",
            "exp_manager.checkpoint_callback_params.filename=best",
            *FOUR_EPOCHS,
        ),
        either("filename", then=best(3)),
    ),
    "logged less often than there are steps": (("trainer.log_every_n_steps=1000",), Right(model_is_there)),
    "mel features, only in the preprocessor": (
        ("model.preprocessor.features=64",),
        either("feat_in", then=used(model__encoder__feat_in=64)),
    ),
    "telephone speech by one key": (
        ("model.sample_rate=8000",),
        either("sample_rate", then=used(model__train_ds__sample_rate=8000, model__preprocessor__sample_rate=8000)),
    ),
    "blocks longer than the utterances": (
        ("model.masking.block_size=400",),
        either("block_size", then=partly_masked),
    ),
    "tar files given, is_tarred forgotten": (
        ("model.train_ds.tarred_audio_filepaths=audio__OP_0..3_CL_.tar",),
        either("is_tarred|tarred_audio_filepaths", then=said("tarred_audio_filepaths")),
    ),
    "prefetching without workers": (
        ("model.train_ds.prefetch_factor=4", "model.train_ds.persistent_workers=true"),
        either("prefetch_factor|persistent_workers"),
    ),
    "files to copy that are not there": (
        ("exp_manager.files_to_copy=[train.sh]",),
        either("train.sh", then=said("train.sh")),
    ),
    "starting weights of the wrong kind": (("init_from_nemo_model=model.ckpt",), either("model.ckpt")),
}

# -------------------------------------------------------------------------------------------------- the user's own yaml

OWN_YAML: dict[str, tuple[Setup, Expected]] = {
    "yaml: ??? left in, as NeMo's has it for the noise": (
        own_yaml(BEGIN + "model:\n  train_ds:\n    noise_manifest: ???\n"),
        either("noise_manifest", then=said("noise_manifest")),
    ),
    "yaml from Notepad: BOM and CRLF": (
        own_yaml((BEGIN + "model:\n  optim:\n    weight_decay: 0.25\n").replace("\n", "\r\n"), "utf-8-sig"),
        Right(used(model__optim__weight_decay=0.25)),
    ),
    "yaml from PowerShell: UTF-16": (own_yaml(BEGIN, "utf-16"), Refused(("my_run",))),
    "yaml with tabs": (own_yaml(BEGIN + "model:\n\toptim:\n\t\tweight_decay: 0.25\n"), Refused(("my_run",))),
    "yaml with a conflict of git": (
        own_yaml(BEGIN + "<<<<<<< HEAD\nseed: 1\n=======\nseed: 2\n>>>>>>> main\n"),
        Refused(("my_run",)),
    ),
    "yaml with a section twice": (
        own_yaml(BEGIN + "model:\n  optim:\n    weight_decay: 0.25\nmodel:\n  encoder:\n    dropout: 0.2\n"),
        Refused(("model", "my_run|duplicate|twice")),
    ),
    "yaml with a section at the wrong depth": (
        own_yaml(BEGIN + "model:\noptim:\n  weight_decay: 0.25\n"),
        Refused(("optim|model",)),
    ),
    "yaml: 5e-4 is text to PyYAML": (
        own_yaml(BEGIN + "model:\n  optim:\n    weight_decay: 5e-4\n"),
        Right(used(model__optim__weight_decay=0.0005)),
    ),
    "yaml: no _self_": (
        own_yaml("defaults: [nest_fast-conformer]\nmodel:\n  optim:\n    weight_decay: 0.25\n"),
        either("_self_", then=used(model__optim__weight_decay=0.25)),
    ),
    "yaml: 'False' in quotes": (
        own_yaml(BEGIN + "model:\n  train_ds:\n    drop_last: 'False'\n"),
        either("drop_last", then=used(model__train_ds__drop_last=False)),
    ),
    "yaml: 10 days are a number of base 60": (
        own_yaml(BEGIN + "trainer:\n  max_time: 10:00:00:00\n"),
        either("max_time", then=used(trainer__max_time="10:00:00:00")),
    ),
}

# ------------------------------------------------------------------------------------------- changes to a run of before


def longer(folder: Path, outcome: Outcome) -> str | None:
    """It has resumed, and has the losses of steps 0 to 9."""
    found = sorted(losses(folder / RUN))
    if found != list(range(10)) or "resumed at step 6" not in outcome.text:
        return f"steps {found}, or it does not say that it resumed"
    return trained(folder, outcome)


def not_shorter(folder: Path, outcome: Outcome) -> str | None:
    return None if losses(folder / RUN) == losses(Fixture.path / RUN) else "the losses of the run have changed"


RESUMED: dict[str, tuple[Overrides, Expected]] = {
    "resumed with fewer layers": (("model.encoder.n_layers=1",), Refused(("n_layers|layers",))),
    "resumed with other codes": (("model.num_classes=128",), Refused(("num_classes|quantizer|decoder",))),
    "resumed with another window": (("model.preprocessor.window_size=0.02",), Refused(("window_size",))),
    "resumed with other masks": (("model.masking.mask_prob=0.02",), Right(said("mask_prob", then=longer))),
    "resumed with another schedule": ((*COSINE,), Right(said("sched.name", then=longer))),
    "resumed with another seed": (("seed=7",), Right(said("seed", then=longer))),
    "resumed with a limit that is already passed": (
        ("trainer.max_steps=3",),
        either("max_steps", then=not_shorter),
    ),
    "a dry run in the folder of a run": (("trainer.fast_dev_run=true",), Right(untouched)),
    "hparams.yaml of a run as the configuration": (
        ("--config-path", "runs/run", "--config-name", "hparams", "exp_manager.exp_dir=again", "trainer.max_steps=4"),
        Right(lambda folder, outcome: steps(4)(folder / "again", outcome)),
    ),
}

# --------------------------------------------------------------------------------------------------------- other commands

COMMANDS: dict[str, tuple[Sequence[str], Expected]] = {
    "info: two settings that contradict": (
        ["info", "nest_fast-conformer", "model.encoder.d_model=500", "model.encoder.n_heads=8"],
        Refused(("d_model|n_heads",)),
    ),
    "inspect: batches of no seconds": (
        ["inspect", "train.jsonl", "model.train_ds.use_bucketing=true", "model.train_ds.batch_duration=-5"],
        Refused(("batch_duration",)),
    ),
    "fit: a share of the memory in percent": (
        ["fit", "model.train_ds.manifest_filepath=train.jsonl", "--memory-share", "95"],
        Refused(("memory-share|memory share|GPU",)),
    ),
    "doctor: yaml that is not there": (["doctor", "--config-name", "my_runn"], Refused(("my_runn",), partial=True)),
}


def trials() -> list[Trial]:
    setups = both(model_file, manifest_at_home)
    return [
        *(
            Trial("configuration", name, pretrain(*overrides), Refused(words), setup=setups)
            for name, (overrides, words) in REFUSED.items()
        ),
        *(
            Trial("configuration", name, pretrain(*overrides), expected, setup=setups)
            for name, (overrides, expected) in OTHERS.items()
        ),
        *(
            Trial("configuration", name, pretrain(*OWN), expected, setup=setup)
            for name, (setup, expected) in OWN_YAML.items()
        ),
        *(
            Trial("configuration", name, resume(*overrides), expected, setup=Fixture.run)
            for name, (overrides, expected) in RESUMED.items()
        ),
        Trial(
            "configuration",
            "W&B without an account or its package",
            pretrain("exp_manager.create_wandb_logger=true"),
            Refused(("wandb",)),
            own_process=True,  # it removes its temporary folders when the program ends
        ),
        *(Trial("configuration", name, command, expected) for name, (command, expected) in COMMANDS.items()),
    ]
