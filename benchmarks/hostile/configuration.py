"""Values and combinations of settings: overrides and yaml files of `pretrain`, resuming with other keys, options.

Most rows are mistakes of people: a typo, a wrong unit, a value of another program, two keys that contradict each other.
A setting that cannot work must be refused with its key, before anything is written; one that can must take effect.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.hostile.harness import (
    ALL_STEPS,
    BASE_STEPS,
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
    finite_features,
    losses,
    only_run,
    pretrain,
    replaced,
    resume,
    resumed,
    rows,
    said,
    same_features,
    snapshot,
    trained,
)

GROUP = "configuration"
ENCODER, TRAIN, VALID = "model.encoder", "model.train_ds", "model.validation_ds"
SCHED, CALLBACK = "model.optim.sched", "exp_manager.checkpoint_callback_params"
MIXING = f"{TRAIN}.batch_augmentor"
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

# -------------------------------------------------------------------------------------------------------- what is right


def steps(number: int) -> Check:
    """Training was right, and did this many steps."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        done = len(losses(only_run(folder)))
        return trained(folder, outcome) or (None if done == number else f"{done} steps instead of {number}")

    return check


def finite_losses(folder: Path, outcome: Outcome) -> str | None:
    """As `trained`, but without a look into the checkpoint, which may be a folder or not there."""
    found = losses(only_run(folder))
    return None if found and all(0 < float(loss) < math.inf for loss in found.values()) else f"losses {found}"


def model_was_saved(folder: Path, outcome: Outcome) -> str | None:
    """For runs that log nothing: the weights at the end are finite."""
    weights = torch.load(folder / RUN / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    finite = all(bool(torch.isfinite(value).all()) for value in weights.values() if value.is_floating_point())
    return None if finite else "weights that are not finite were saved"


def as_whole(run: Path = RUN) -> Check:
    """The losses are those of the fixture's run of ten steps: the setting changes nothing."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        expected, found = losses(Fixture.path / "runs/whole"), losses(folder / run)
        return None if found == expected else f"losses {found} instead of {expected}"

    return check


def continued(*words: str, differs: bool = True) -> Check:
    """Resumed to the end and said so, with these words; the steps that were done are kept, and the new ones differ."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        before, whole, found = losses(Fixture.path / RUN), losses(Fixture.path / "runs/whole"), losses(folder / RUN)
        if {step: found.get(step) for step in before} != before:
            return "the rows of steps that were done have changed"
        if max(found) < BASE_STEPS:
            return "no step was added"
        if not all(math.isfinite(float(loss)) for loss in found.values()):
            return "a loss that is not finite"
        if differs and found == whole:
            return "the changed setting has no effect"
        missing = [word for word in ("resumed", *words) if word.lower() not in outcome.text.lower()]
        return f"not in the output: {missing}" if missing else None

    return check


def kept(*ignored: str) -> Check:
    """Nothing that the run had has changed."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        before, now = snapshot(Fixture.path / RUN), snapshot(folder / RUN)
        names = ("metrics.csv", "checkpoints/last.ckpt", "hparams.yaml", "checkpoints/run.nemo")
        changed = [name for name in names if name not in ignored and before.get(name) != now.get(name)]
        return f"changed: {changed}" if changed else None

    return check


def still_six_steps(folder: Path, outcome: Outcome) -> str | None:
    """A finished run stays as it was: six rows, and a checkpoint at step 6."""
    if losses(folder / RUN) != losses(Fixture.path / RUN):
        return "the rows of metrics.csv have changed"
    step = torch.load(folder / RUN / "checkpoints/last.ckpt", weights_only=True)["global_step"]
    return None if step == BASE_STEPS else f"last.ckpt is of step {step}"


def not_mixed(folder: Path, outcome: Outcome) -> str | None:
    """A run that starts again: no row of it is in the metrics of the old one."""
    for metrics in folder.rglob("metrics.csv"):
        done = [int(row["step"]) for row in rows(metrics.parent) if row["train_loss"]]
        if done != sorted(set(done)):
            return f"{metrics}: steps {done}"
    return "it resumed" if "resumed at step" in outcome.text else None


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def manifest_of(number: int, name: str = "m.jsonl") -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = len(lines_of(folder / name))
        return None if found == number else f"{found} lines in {name}"

    return check


def has(*names: str) -> Check:
    """These files are there, and none of them is empty."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        missing = [name for name in names if not (folder / name).is_file() or not (folder / name).stat().st_size]
        return f"missing: {missing}" if missing else None

    return check


# --------------------------------------------------------------------------------------------------------------- set-up


def text(name: str, content: str | bytes) -> Setup:
    def setup(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return setup


def model(folder: Path) -> None:
    for name in ("model.nemo", "model.ckpt", "model.safetensors"):
        shutil.copy(Fixture.path / name, folder)


def labelled(folder: Path) -> None:
    """Manifests with the key `label`, and the model."""
    model(folder)
    for name in ("train.jsonl", "valid.jsonl"):
        lines = [{**line, "label": "ab"[i % 2]} for i, line in enumerate(lines_of(folder / name))]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def half_the_data(folder: Path) -> None:
    Fixture.run(folder)
    whole = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(whole[:4]))


# ----------------------------------------------------------------------------------------------------------- the tables

Row = tuple[str, tuple[str, ...], tuple[str, ...]]
"""A name, overrides, and words of the refusal."""

REFUSED: list[Row] = [
    # keys and the syntax of overrides
    ("a typo in a key of the encoder", (f"{ENCODER}.n_layer=4",), (f"{ENCODER}.n_layer", "n_layers")),
    ("an override without =", ("trainer.max_steps",), ("trainer.max_steps",)),
    ("a bracket that is not closed", ("model.optim.betas=[0.9,0.98",), ("betas",)),
    ("two values, as for a sweep of Hydra", ("model.optim.lr=0.01,0.02",), ("model.optim.lr",)),
    ("an interpolation of nothing", ("exp_manager.name=${nothing.here}",), ("nothing",)),
    # how long
    ("no steps", ("trainer.max_steps=0",), ("max_steps",)),
    ("a time in parsecs", ("trainer.max_time={parsecs: 1}",), ("max_time",)),
    ("validation every 0 batches", ("trainer.val_check_interval=0",), ("val_check_interval",)),
    ("no training batches", ("trainer.limit_train_batches=0",), ("limit_train_batches",)),
    # the trainer
    ("Lightning's plan of accumulation", ("trainer.accumulate_grad_batches={0: 2, 4: 1}",), ("accumulate_grad",)),
    ("clipping at -1", ("trainer.gradient_clip_val=-1",), ("gradient_clip_val",)),
    ("a precision of 64 bits", ("trainer.precision=64",), ("precision",)),
    ("devices as a word", ("trainer.devices=both",), ("devices",)),
    ("device 1 of a CPU", ("trainer.devices=[1]",), ("devices",)),
    ("a GPU on a machine without one", ("trainer.accelerator=gpu",), ("trainer.accelerator=gpu",)),
    ("a strategy that is a command", ("trainer.strategy={_target_: os.system, command: 'touch ../x'}",), ("strategy",)),
    ("an option of DDP that is not known", ("trainer.strategy={_target_: DDPStrategy, bucket: 5}",), ("bucket",)),
    ("callbacks of Lightning", ("trainer.callbacks=[{_target_: lightning.pytorch.Timer}]",), ("callbacks",)),
    ("a switch that is neither on nor off", ("trainer.sync_batchnorm=maybe",), ("sync_batchnorm",)),
    ("a negative seed", ("seed=-1",), ("seed",)),
    ("a watchdog of -1 s", ("watchdog.floor_s=-1",), ("floor_s",)),
    # the encoder
    ("a width that heads do not divide", (f"{ENCODER}.d_model=34",), ("d_model|n_heads",)),
    ("no layers", (f"{ENCODER}.n_layers=0",), ("n_layers",)),
    ("an encoder larger than memory", (f"{ENCODER}.d_model=1048576",), ("memory|d_model",)),
    ("tokens longer than masks", (f"{ENCODER}.subsampling_factor=64",), ("subsampling_factor|block_size",)),
    ("NeMo's local attention", (f"{ENCODER}.self_attention_model=rel_pos_local_attn",), ("self_attention_model",)),
    (
        "chunks that do not fill the history",
        (f"{ENCODER}.att_context_size=[71,6]", f"{ENCODER}.att_context_style=chunked_limited"),
        ("att_context_size",),
    ),
    ("an even kernel", (f"{ENCODER}.conv_kernel_size=8",), ("conv_kernel_size",)),
    ("an encoder for other features", (f"{ENCODER}.feat_in=81",), ("feat_in",)),
    ("a decoder of other codes", ("model.decoder.num_classes=100",), ("num_classes",)),
    ("tokens of other lengths", ("model.quantizer.combine_time_steps=4",), ("combine_time_steps",)),
    # masking
    ("masks shorter than a token", ("model.masking.block_size=3",), ("block_size",)),
    ("no masks", ("model.masking.mask_prob=0",), ("mask_prob",)),
    ("tokens that are never masked enough", ("model.loss.mask_threshold=1",), ("mask_threshold",)),
    ("a typo in mask_position", ("model.mask_position=preconv",), ("mask_position", "pre_conv")),
    # features
    ("two sample rates", ("model.preprocessor.sample_rate=8000",), ("sample_rate",)),
    ("a sample rate in kHz", ("model.sample_rate=16",), ("sample_rate",)),
    ("a window in milliseconds", ("model.preprocessor.window_size=25",), ("window_size|n_fft",)),
    ("mels above half the sample rate", ("model.preprocessor.highfreq=9000",), ("highfreq",)),
    ("NumPy's name of a window", ("model.preprocessor.window=hanning",), ("preprocessor.window", "hann")),
    # data
    ("batches larger than the data", (f"{TRAIN}.batch_size=100",), ("batch_size|drop_last",)),
    ("seconds without buckets", (f"{TRAIN}.batch_duration=10",), ("batch_duration", "use_bucketing")),
    (
        "bins from long to short",
        (f"{TRAIN}.use_bucketing=true", f"{TRAIN}.bucket_duration_bins=[3,1]"),
        ("bucket_duration_bins",),
    ),
    (
        "more batch sizes than buckets",
        (
            f"{TRAIN}.use_bucketing=true",
            f"{TRAIN}.bucket_duration_bins=[2,3]",
            f"{TRAIN}.bucket_batch_size=[4,4,2,1,1]",
        ),
        ("bucket_batch_size",),
    ),
    ("durations in milliseconds", (f"{TRAIN}.min_duration=1500", f"{TRAIN}.max_duration=60000"), ("min_duration",)),
    ("a manifest that is not there", (f"{TRAIN}.manifest_filepath=nowhere.jsonl",), ("nowhere.jsonl", "prepare")),
    ("no manifest", (f"{TRAIN}.manifest_filepath=null",), ("manifest_filepath",)),
    ("shards without names", (f"{TRAIN}.is_tarred=true",), ("tarred_audio_filepaths",)),
    (
        "an unknown way to mix corpora",
        (f"{TRAIN}.is_concat=true", f"{TRAIN}.concat_sampling_technique=tempurature"),
        ("concat_sampling_technique", "temperature"),
    ),
    ("channels as a word", (f"{TRAIN}.channel_selector=left",), ("channel_selector",)),
    ("an augmentation that is a command", (f"{MIXING}._target_=os.system",), ("os.system",)),
    ("decibels from high to low", (f"{MIXING}.min_r_noise=20", f"{MIXING}.max_r_noise=-5"), ("r_noise",)),
    # the optimizer
    ("a typo in the optimizer", ("model.optim.name=adamx",), ("optim.name", "adamx", "Did you mean")),
    ("a beta of 1", ("model.optim.betas=[0.9,1.0]",), ("betas",)),
    ("a typo in the schedule", (f"{SCHED}.name=CosineAnealing",), ("sched.name", "CosineAnnealing")),
    # the run folder
    ("a run name that leaves exp_dir", ("exp_manager.name=../../x",), ("name",)),
    ("a metric that does not exist", (f"{CALLBACK}.monitor=val_los",), ("monitor", "val_los")),
    ("a checkpoint every -1 steps", (f"{CALLBACK}.every_n_train_steps=-1",), ("every_n_train_steps",)),
    (
        "a patience of -1",
        (
            "exp_manager.create_early_stopping_callback=true",
            "exp_manager.early_stopping_callback_params.patience=-1",
        ),
        ("patience",),
    ),
    ("nothing to resume from", ("exp_manager.resume_ignore_no_checkpoint=false",), ("resume_ignore_no_checkpoint",)),
    ("a checkpoint that is not there", ("exp_manager.resume_from_checkpoint=no.ckpt",), ("no.ckpt",)),
    ("starting weights in a manifest", ("init_from_nemo_model=train.jsonl",), ("train.jsonl",)),
    # the configuration itself
    ("an unknown size", ("size=huge",), ("huge",)),
    ("an unknown configuration", ("--config-name", "nest_fastconformer"), ("nest_fastconformer",)),
]

WORKS: list[tuple[str, tuple[str, ...], Check]] = [
    ("the last of two values counts", ("trainer.max_steps=8", "trainer.max_steps=5"), steps(5)),
    ("a known key with +", ("+trainer.max_steps=3",), steps(3)),
    ("no validation set", (f"{VALID}.manifest_filepath=null",), steps(4)),
    ("no validation batches", ("trainer.limit_val_batches=0",), steps(4)),
    ("8 kHz everywhere", ("model.sample_rate=8000",), steps(4)),
    ("sync_max_audio_length", (f"{ENCODER}.sync_max_audio_length=true",), said("sync_max_audio_length")),
    ("NeMo's spec_augment", ("+model.spec_augment={freq_masks: 2, time_masks: 2}",), said("model.spec_augment")),
    (
        "Lightning's DDPStrategy",
        ("trainer.strategy={_target_: lightning.pytorch.strategies.DDPStrategy, find_unused_parameters: true}",),
        steps(4),
    ),
    ("a watchdog for one rank", ("watchdog.enabled=true",), steps(4)),
]

EITHER: list[tuple[str, tuple[str, ...], tuple[str, ...], Check]] = [
    ("an empty override", ("",), (), steps(4)),
    ("steps as a power of ten", ("trainer.max_steps=1e1",), ("max_steps",), steps(10)),
    ("no encoder section", (f"~{ENCODER}",), ("encoder",), trained),
    ("nothing is logged", ("trainer.log_every_n_steps=0",), ("log_every_n_steps",), model_was_saved),
    ("sharding over one rank", ("trainer.strategy=fsdp",), ("strategy|fsdp",), finite_losses),
    ("everything is masked", ("model.masking.mask_prob=1.0",), ("mask_prob",), trained),
    ("a floor above the rate", (f"{SCHED}.min_lr=10",), ("min_lr",), trained),
    ("a rate of 1e30", ("model.optim.lr=1e30",), ("lr|finite|diverged",), trained),
    (
        "batches shorter than an utterance",
        (f"{TRAIN}.use_bucketing=true", f"{TRAIN}.batch_size=null", f"{TRAIN}.batch_duration=0.5"),
        ("batch_duration",),
        trained,
    ),
    ("a name with a folder in it", ("exp_manager.name=a/b",), ("name",), steps(4)),
    (
        "a pipe for a shar",
        (f"{TRAIN}.use_lhotse=true", f"{TRAIN}.manifest_filepath=null", f"{TRAIN}.shar_path='pipe:touch ../pwned'"),
        ("shar_path|pipe|lhotse",),
        trained,
    ),
]
DIVERGED = {"a rate of 1e30"}
"""These are refused in the middle of the run, so they may leave files."""

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
OWN = "defaults: [nest_fast-conformer, _self_]\n"
MY = ("--config-path", ".", "--config-name", "my")
YAML_ERRORS = ("my.yaml|'my'|my:",)
YAML: list[tuple[str, str | bytes, Expected]] = [
    ("with Windows line ends", OWN.replace("\n", "\r\n") + "seed: 3\r\n", Right(steps(4))),
    ("with a mark of byte order", b"\xef\xbb\xbf" + OWN.encode(), Either(Refused(YAML_ERRORS), Right(steps(4)))),
    ("in UTF-16", OWN.encode("utf-16"), Refused(YAML_ERRORS)),
    ("indented by tabs", OWN + "model:\n\toptim:\n\t\tlr: 0.1\n", Refused(YAML_ERRORS)),
    (
        "with marks of a merge conflict",
        OWN + "<<<<<<< HEAD\nseed: 1\n=======\nseed: 2\n>>>>>>> b\n",
        Refused(YAML_ERRORS),
    ),
    ("with a key twice", OWN + "seed: 1\nseed: 2\n", Refused(("seed",))),
    ("that is a model file", b"PK\x03\x04" + bytes(200), Refused(YAML_ERRORS)),
    ("that runs a command", OWN + "name: !!python/object/apply:os.system ['touch ../pwned']\n", Refused(YAML_ERRORS)),
    ("of a billion laughs", OWN + LAUGHS, Refused()),
    ("that includes itself", "defaults: [my, _self_]\n", Refused(("my",))),
    ("of 50,000 brackets", OWN + "name: " + "[" * 50_000, Refused(YAML_ERRORS)),
    (
        "with a typo in a key",
        OWN + "model:\n  encoder:\n    n_layer: 2\n",
        Refused(("model.encoder.n_layer", "n_layers")),
    ),
    (
        "with an unused section of NeMo",
        OWN + "exp_manager:\n  create_mlflow_logger: true\n",
        Right(said("exp_manager.create_mlflow_logger")),
    ),
    ("with 90 s as 1:30", OWN + "trainer:\n  max_time: 1:30\n", Either(Refused(("max_time",)), Right(steps(4)))),
    (
        "with yes and no",
        OWN + "trainer:\n  benchmark: no\n  sync_batchnorm: yes\n",
        Either(Refused(("benchmark|sync_batchnorm",)), Right(steps(4))),
    ),
]

RESUMED: list[tuple[str, tuple[str, ...], Expected]] = [
    ("the same", (), Right(resumed)),
    ("another width", (f"{ENCODER}.d_model=64",), Refused(("d_model|shape|model.encoder",))),
    ("other codes", ("model.num_classes=128",), Refused(("num_classes|shape|quantizer|decoder",))),
    ("another optimizer", ("model.optim.name=sgd", "~model.optim.betas"), Refused(("optim",))),
    ("another window", ("model.preprocessor.window=hamming",), Refused(("preprocessor.window",))),
    ("another sample rate", ("model.sample_rate=8000",), Refused(("sample_rate",))),
    ("weight decay", ("model.optim.weight_decay=0.5",), Right(continued("model.optim.weight_decay", "takes effect"))),
    ("betas", ("model.optim.betas=[0.5,0.6]",), Right(continued("model.optim.betas", "takes effect"))),
    ("masks", ("model.masking.mask_prob=0.02",), Right(continued("model.masking.mask_prob"))),
    ("the schedule", (f"{SCHED}.name=CosineAnnealing", f"{SCHED}.d_model=null"), Right(continued(f"{SCHED}.name"))),
    ("batches of four", (f"{TRAIN}.batch_size=4",), Right(continued("batch_size"))),
    ("the seed", ("seed=5",), Either(Refused(("seed",)), Right(continued("seed")))),
    ("fewer steps than are done", ("trainer.max_steps=3",), Right(still_six_steps)),
    ("another name", ("exp_manager.name=other",), Right(as_whole(Path("runs/other")))),
    ("resume_if_exists=false", ("exp_manager.resume_if_exists=false",), Either(Refused(), Right(not_mixed))),
    ("starting weights too", ("init_from_nemo_model=model.nemo",), Right(resumed)),
    ("a model file to resume from", ("exp_manager.resume_from_checkpoint=model.nemo",), Refused(("model.nemo",))),
    ("a dry run in its folder", ("trainer.fast_dev_run=true",), Right(kept())),
    ("a typo, then nothing is changed", ("model.optim.lrr=1",), Refused(("model.optim.lrr",))),
]

EXTRACT = "extract model.nemo audio/0.wav out --device cpu"
PROBE = "probe model.nemo --train train.jsonl --test valid.jsonl --output probe"
DEMO = "demo --synthesizer formants --num-train 2 --num-val 1 --num-noise 1 --duration 1"
PREPARE = "prepare audio --output m.jsonl --workers 0"
NO_SETUP: list[tuple[str, str, Expected]] = [
    ("prepare: a share in percent", f"{PREPARE} --split hash --valid-share 10", Refused(("valid-share",))),
    ("prepare: a share without a split", f"{PREPARE} --valid-share 0.1", Refused(("split",))),
    ("prepare: job 8 of 8", f"{PREPARE} --job 8/8", Refused(("job",))),
    ("prepare: merging jobs that never ran", f"{PREPARE} --merge 3", Refused(("job",))),
    (
        "prepare: more shards than files",
        f"{PREPARE} --shards 100",
        Either(Refused(("shards",), partial=True), Right(manifest_of(8))),
    ),
    (
        "prepare: the input as output",
        "prepare train.jsonl --output train.jsonl --workers 0",
        Either(Refused(("train.jsonl",)), Right(manifest_of(8, "train.jsonl"))),
    ),
    ("prepare: a folder as output", "prepare audio --output audio --workers 0", Refused(("audio",))),
    ("inspect: batches of 0", "inspect train.jsonl --batch-size 0", Refused(("batch-size",))),
    ("inspect: a typo in an override", f"inspect train.jsonl {TRAIN}.max_durations=3", Refused(("max_duration'",))),
    ("inspect: the page is a folder", "inspect train.jsonl --output audio", Refused(("audio",))),
    ("demo: -5 utterances", "demo --num-train -5", Refused(("num-train|num_train",))),
    ("demo: utterances of nan seconds", f"{DEMO} --duration nan", Refused(("duration",))),
    ("demo: over somebody's folder", f"{DEMO} --data-dir audio --overwrite", Refused(("audio",))),
    ("fit: without a GPU", " ".join(["fit", *pretrain()[1:]]), Refused(("GPU",))),
    ("report: a folder that is no run", "report audio", Refused(("audio",))),
    ("doctor: a manifest for a run", "doctor train.jsonl", Refused(("train.jsonl",))),
    ("info: an unknown size", "info nest_fast-conformer size=huge", Refused(("huge",))),
]
WITH_MODEL: list[tuple[str, str, Expected]] = [
    ("info: three models", "info model.nemo model.ckpt model.safetensors", Refused()),
    ("info: an override of a file", f"info model.nemo {ENCODER}.d_model=64", Refused(("model.nemo|override|d_model",))),
    ("verify: a Python that is not there", "verify model.nemo --nemo-python /no/python", Refused(("/no/python",))),
    ("extract: layer 7 of 2", f"{EXTRACT} --layers 7", Refused(("layer", "7"))),
    ("extract: layers as a range", f"{EXTRACT} --layers 0-1", Refused(("layers",))),
    ("extract: one weight for two layers", f"{EXTRACT} --aggregation weighted --weights 1", Refused(("weights",))),
    (
        "extract: weights that nothing uses",
        f"{EXTRACT} --weights 0.5,0.5",
        Either(Refused(("weights",)), Right(same_features)),
    ),
    (
        "extract: weights of nan",
        f"{EXTRACT} --aggregation weighted --weights nan,1",
        Either(Refused(("weights",)), Right(finite_features)),
    ),
    ("extract: a device that is not there", f"{EXTRACT} --device cuda:7", Refused(("cuda",))),
    ("extract: batches of 0 s", f"{EXTRACT} --batch-seconds 0", Refused(("batch-seconds|batch_seconds",))),
    ("probe: a label that is not there", f"{PROBE} --label emotion", Refused(("train.jsonl:1", "emotion"))),
    ("probe: neither label nor task", PROBE, Refused(("label",))),
    ("probe: decibels without noise", f"{PROBE} --label label --snr 0", Refused(("noise",))),
    ("export: an unknown format", "export model.nemo out.tflite --format tflite", Refused(("format",))),
    (
        "export: onto itself",
        "export model.nemo model.nemo --format nemo",
        Either(Refused(("model.nemo",)), Right(has("model.nemo"))),
    ),
]


def special() -> list[Trial]:
    """Rows that need a process, a folder or a file of their own."""

    def one(
        name: str, command: Sequence[str], expected: Expected, setup: Setup | None = None, own: bool = False
    ) -> Trial:
        return Trial(GROUP, name, command, expected, setup, NO_GPU, own_process=own)

    return [
        one("two workers change nothing", resume(f"{TRAIN}.num_workers=2"), Right(as_whole()), own=True),
        one("debug.trace changes nothing", resume("debug.trace=true"), Right(as_whole())),
        one("a dry run writes nothing", pretrain("trainer.fast_dev_run=true"), Right(dry)),
        one(
            "starting weights, all of them left out",
            pretrain("init_from_nemo_model={a: {path: model.nemo, include: [x]}}"),
            Either(Refused(("include|init_from_nemo_model",)), Right(said(" 0 loaded"))),
            model,
        ),
        one(
            "two kinds of starting weights",
            pretrain("init_from_nemo_model=model.nemo", "init_from_ptl_ckpt=model.ckpt"),
            Refused(("init_from",)),
            model,
        ),
        one("a yaml that is a folder", pretrain(*MY), Refused(("my",)), replaced(Path.mkdir, Path("my.yaml"))),
        one(
            "a yaml with its ending in the name",
            pretrain("--config-path", ".", "--config-name", "my.yaml"),
            Either(Refused(("my",)), Right(steps(4))),
            text("my.yaml", OWN),
        ),
        one(
            "the hparams.yaml of a run",
            pretrain("--config-path", str(RUN), "--config-name", "hparams", "exp_manager.name=again"),
            Either(Refused(("hparams",)), Right(again)),
            Fixture.run,
        ),
        one("resumed with half of the data", resume(), Right(continued("train")), half_the_data),
        one("resumed on two ranks", resume("trainer.devices=2"), Right(continued("was 1")), Fixture.run, own=True),
        one(
            "resumed under another name from the old file",
            resume("exp_manager.name=other", f"exp_manager.resume_from_checkpoint={RUN}/checkpoints/last.ckpt"),
            Right(from_step_six),
            Fixture.run,
        ),
    ]


def dry(folder: Path, outcome: Outcome) -> str | None:
    """A dry run leaves no checkpoint, no metrics and no hparams.yaml."""
    left = [name for name in snapshot(folder) if name.endswith((".ckpt", ".nemo", "metrics.csv", "hparams.yaml"))]
    return f"written by a dry run: {left}" if left else None


def again(folder: Path, outcome: Outcome) -> str | None:
    return kept()(folder, outcome) or (None if len(losses(folder / "runs/again")) == 4 else "not four steps")


def from_step_six(folder: Path, outcome: Outcome) -> str | None:
    """The new run has the last losses of the undisturbed one; the old one is as it was."""
    expected = {k: v for k, v in losses(Fixture.path / "runs/whole").items() if BASE_STEPS <= k < ALL_STEPS}
    found = {k: v for k, v in losses(folder / "runs/other").items() if k >= BASE_STEPS}
    return kept()(folder, outcome) or (None if found == expected else f"losses {found} instead of {expected}")


def trials() -> list[Trial]:
    found = [Trial(GROUP, name, pretrain(*keys), Refused(words), None, NO_GPU) for name, keys, words in REFUSED]
    found += [Trial(GROUP, name, pretrain(*keys), Right(check), None, NO_GPU) for name, keys, check in WORKS]
    found += [
        Trial(GROUP, name, pretrain(*keys), Either(Refused(words, name in DIVERGED), Right(check)), None, NO_GPU)
        for name, keys, words, check in EITHER
    ]
    found += [
        Trial(GROUP, f"a yaml {name}", pretrain(*MY), expected, text("my.yaml", content), NO_GPU)
        for name, content, expected in YAML
    ]
    found += [
        Trial(GROUP, f"resumed with a change: {name}", resume(*keys), expected, both(Fixture.run, model), NO_GPU)
        for name, keys, expected in RESUMED
    ]
    for options, setup in ((NO_SETUP, None), (WITH_MODEL, labelled)):
        found += [Trial(GROUP, name, command.split(), expected, setup, NO_GPU) for name, command, expected in options]
    return [*found, *special()]
