"""Values and combinations of settings: keys of pretrain, yaml files, overrides, and options of the other commands.

A value that cannot mean anything is refused with its key; one with a meaning that users of NeMo or Lightning know has
that meaning. Nothing that trains may train towards nothing.
"""

from __future__ import annotations

import csv
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.hostile.harness import (
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
    finite_features,
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
EXTRACT = ["extract", "model.nemo", "audio/0.wav", "out", "--device", "cpu"]
PROBE = ["probe", "model.nemo", "--train", "l.jsonl", "--test", "l.jsonl", "--output", "probe", "--device", "cpu"]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

# --------------------------------------------------------------------------------------------------------------- checks


def steps(count: int) -> Check:
    """Trained well, and for exactly this many steps."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = sorted(losses(only_run(folder)))
        if found != list(range(count)):
            return f"steps {found[:12]}, expected {count} of them"
        return trained(folder, outcome)

    return check


def undisturbed(folder: Path, outcome: Outcome) -> str | None:
    """The losses are those of a run without the setting: it has no effect."""
    expected, found = losses(Fixture.path / "runs/whole"), losses(only_run(folder))
    if not found or any(expected[step] != value for step, value in found.items()):
        return f"losses differ from those of a plain run: {found}"
    return trained(folder, outcome)


def different(folder: Path, outcome: Outcome) -> str | None:
    """The setting has an effect on the losses."""
    expected, found = losses(Fixture.path / "runs/whole"), losses(only_run(folder))
    if all(expected.get(step) == value for step, value in found.items()):
        return "the setting has no effect on the losses"
    return trained(folder, outcome)


def validations(count: int) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = [row for row in rows(only_run(folder)) if row.get("val_loss")]
        return trained(folder, outcome) if len(found) == count else f"{len(found)} validations, expected {count}"

    return check


def rate(value: float) -> Check:
    """The largest learning rate of the run."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = max(float(row["learning_rate"]) for row in rows(only_run(folder)) if row["learning_rate"])
        return trained(folder, outcome) if math.isclose(found, value, rel_tol=0.01) else f"learning rate {found}"

    return check


def has(*patterns: str, then: Check = trained) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        missing = [pattern for pattern in patterns if not any(folder.rglob(pattern))]
        return f"not written: {missing}" if missing else then(folder, outcome)

    return check


def sized(width: int) -> Check:
    """The saved model has this width."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        weights = torch.load(only_run(folder) / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        found = {value.shape[0] for name, value in weights.items() if name.endswith("norm_out.weight")}
        return trained(folder, outcome) if found == {width} else f"layers of width {found}"

    return check


def not_mixed(folder: Path, outcome: Outcome) -> str | None:
    """No metrics.csv contains two runs, and no step goes back."""
    for path in folder.rglob("metrics*.csv"):
        with path.open(newline="") as file:
            found = [int(row["step"]) for row in csv.DictReader(file) if row["train_loss"]]
        if sorted(set(found)) != found:
            return f"{path.name} mixes two runs: steps {found}"
    return None


def dry(folder: Path, outcome: Outcome) -> str | None:
    """A dry run leaves no checkpoint, no metrics and no hparams.yaml."""
    wrong = [name for name in outcome.changed if name.endswith((".ckpt", ".nemo", "metrics.csv", "hparams.yaml"))]
    return f"a dry run wrote {wrong}" if wrong else None


def features_of(layers: int, width: int) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        import numpy as np

        found = [np.load(path).shape[:-1] for path in (folder / "out").rglob("*.npy")]
        expected = (layers, width) if layers else (width,)
        return finite_features(folder, outcome) if found == [expected] else f"features of shape {found}"

    return check


# --------------------------------------------------------------------------------------------------------------- set-up


def model(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder / "model.nemo")


def labelled(folder: Path) -> None:
    """A model, and a manifest of labels for a probe."""
    model(folder)
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    write_lines(folder / "l.jsonl", [line | {"label": "ab"[i % 2]} for i, line in enumerate(lines)])


def wrote(name: str, text: str | bytes) -> Setup:
    def setup(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)

    return setup


OWN = "defaults: [nest_fast-conformer, _self_]\n"
"""The beginning of a yaml of one's own, as docs/own-data.md recommends it."""

# --------------------------------------------------------------------------------------------------------------- trials


def refused(name: str, *overrides: str, words: str | tuple[str, ...], partial: bool = False) -> Trial:
    """`pretrain` with these overrides is refused; by default before anything is written."""
    several = (words,) if isinstance(words, str) else words
    return Trial(GROUP, name, pretrain(*overrides), Refused(several, partial))


def right(name: str, *overrides: str, check: Check = trained) -> Trial:
    return Trial(GROUP, name, pretrain(*overrides), Right(check))


def either(name: str, *overrides: str, words: str, check: Check = trained, partial: bool = False) -> Trial:
    return Trial(GROUP, name, pretrain(*overrides), Either(Refused((words,), partial), Right(check)))


def again(name: str, *overrides: str, expected: Expected) -> Trial:
    """The run of the fixture is resumed with something changed."""
    return Trial(GROUP, f"resume: {name}", resume(*overrides), expected, Fixture.run)


def yaml(name: str, text: str | bytes, expected: Expected, *overrides: str) -> Trial:
    """`pretrain` with a configuration of one's own, in the working folder."""
    command = [*pretrain(*overrides), "--config-path", ".", "--config-name", "mine"]
    return Trial(GROUP, f"yaml: {name}", command, expected, wrote("mine.yaml", text))


def other(
    name: str, command: list[str], expected: Expected, setup: Setup | None = None, limit_s: float = 60.0
) -> Trial:
    return Trial(GROUP, name, command, expected, setup, environment=NO_GPU, limit_s=limit_s)


def of_trainer() -> list[Trial]:
    return [
        refused("max_steps with a fraction", "trainer.max_steps=4.5", words="max_steps"),
        either("max_steps as 4e0", "trainer.max_steps=4e0", words="max_steps", check=steps(4)),
        either("max_steps in quotes", "trainer.max_steps='4'", words="max_steps", check=steps(4)),
        refused("max_steps=-5", "trainer.max_steps=-5", words="max_steps"),
        refused("max_epochs=0", "trainer.max_epochs=0", words="max_epochs"),
        either("max_epochs=-1 means no limit", "trainer.max_epochs=-1", words="max_epochs", check=steps(4)),
        refused("no limit at all", "trainer.max_steps=-1", "trainer.max_epochs=0", words="max_epochs|max_steps"),
        refused("max_time of nothing", "trainer.max_time='00:00:00:00'", words="max_time"),
        refused("max_time below zero", "trainer.max_time={minutes: -5}", words="max_time"),
        refused("max_time of nan minutes", "trainer.max_time={minutes: nan}", words="max_time"),
        refused("max_time in words", "trainer.max_time='five minutes'", words="max_time"),
        either("max_time as a number", "trainer.max_time=500", words="max_time", check=steps(4)),
        refused("limit_train_batches=1.5", "trainer.limit_train_batches=1.5", words="limit_train_batches"),
        either("a share of less than one batch", "trainer.limit_train_batches=0.01", words="limit_train_batches"),
        refused("limit_val_batches=-3", "trainer.limit_val_batches=-3", words="limit_val_batches"),
        either(
            "no validation batches",
            "trainer.limit_val_batches=0",
            words="limit_val_batches",
            check=lambda folder, outcome: validations(0)(folder, outcome) or undisturbed(folder, outcome),
        ),
        either(
            "log_every_n_steps=0",
            "trainer.log_every_n_steps=0",
            words="log_every_n_steps",
            check=has("run.nemo", then=ended_well),
        ),
        refused("log_every_n_steps=-1", "trainer.log_every_n_steps=-1", words="log_every_n_steps"),
        refused("accumulate_grad_batches=0", "trainer.accumulate_grad_batches=0", words="accumulate_grad_batches"),
        refused("accumulation as a schedule", "trainer.accumulate_grad_batches={0: 2, 4: 4}", words="accumulate"),
        right("accumulation that no epoch is a multiple of", "trainer.accumulate_grad_batches=3", check=steps(4)),
        either("gradient_clip_val=0 is off", "trainer.gradient_clip_val=0", words="clip_val", check=undisturbed),
        refused("gradient_clip_val=nan", "trainer.gradient_clip_val=nan", words="gradient_clip_val"),
        refused("an unknown way to clip", "trainer.gradient_clip_algorithm=agc", words="gradient_clip_algorithm"),
        refused("weights in bf16", "trainer.precision=bf16-true", words="precision|bf16-true"),
        refused("precision=fp16", "trainer.precision=fp16", words="precision"),
        right("a validation every two batches", "trainer.val_check_interval=2", check=validations(2)),
        either("a validation after 100 of 4 batches", "trainer.val_check_interval=100", words="val_check_interval"),
        refused("val_check_interval=1.5", "trainer.val_check_interval=1.5", words="val_check_interval"),
        refused("val_check_interval=-1", "trainer.val_check_interval=-1", words="val_check_interval"),
        refused("check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch=0", words="check_val_every_n_epoch"),
        refused("num_sanity_val_steps=-2", "trainer.num_sanity_val_steps=-2", words="num_sanity_val_steps"),
        right("all batches as a sanity check", "trainer.num_sanity_val_steps=-1", check=undisturbed),
        refused("devices=0", "trainer.devices=0", words="devices"),
        refused("devices=1.5", "trainer.devices=1.5", words="devices"),
        refused("an empty list of devices", "trainer.devices=[]", words="devices"),
        refused("accelerator=tpu", "trainer.accelerator=tpu", words="accelerator"),
        refused("num_nodes=0", "trainer.num_nodes=0", words="num_nodes"),
        refused("two nodes and no address", "trainer.num_nodes=2", words="num_nodes|MASTER_ADDR"),
        refused("DeepSpeed", "trainer.strategy=deepspeed_stage_2", words="strategy"),
        refused(
            "a strategy that is a shell command",
            "trainer.strategy={_target_: os.system, command: 'touch ../pwned'}",
            words="strategy|_target_|os.system",
        ),
        refused("Lightning's callbacks", "trainer.callbacks=[{_target_: my.Callback}]", words="callbacks"),
        refused("overfit_batches", "trainer.overfit_batches=1", words="limit_train_batches"),
        refused("an unknown profiler", "trainer.profiler=nsys", words="profiler"),
        right("a profile", "trainer.profiler=simple", check=has("profile-simple.txt", then=undisturbed)),
        refused("fast_dev_run=-1", "trainer.fast_dev_run=-1", words="fast_dev_run"),
        Trial(GROUP, "a dry run in an old folder", pretrain("trainer.fast_dev_run=true"), Right(dry), Fixture.run),
        either("min_steps above max_steps", "trainer.min_steps=9", words="min_steps"),
        refused("min_steps=-2", "trainer.min_steps=-2", words="min_steps"),
        refused("a truth value that is none", "trainer.sync_batchnorm=perhaps", words="sync_batchnorm"),
        refused("no trainer", "trainer=null", words="trainer"),
        refused("a seed with a fraction", "seed=1.5", words="seed"),
        refused("a seed of 70 bits", f"seed={2**70}", words="seed"),
    ]


def of_model() -> list[Trial]:
    enc, pre = "model.encoder", "model.preprocessor"
    return [
        refused("heads that do not divide the width", f"{enc}.n_heads=5", words="n_heads|d_model"),
        refused("n_heads=0", f"{enc}.n_heads=0", words="n_heads"),
        refused("n_layers=0", f"{enc}.n_layers=0", words="n_layers"),
        refused("an even convolution kernel", f"{enc}.conv_kernel_size=8", words="conv_kernel_size"),
        either("a kernel longer than the audio", f"{enc}.conv_kernel_size=1001", words="conv_kernel_size"),
        refused("a width in a list", f"{enc}.d_model=[32]", words="d_model"),
        refused("a width that is true", f"{enc}.d_model=true", words="d_model"),
        either("a width as 32.0", f"{enc}.d_model=32.0", words="d_model", check=sized(32)),
        either("a width in quotes", f"{enc}.d_model='32'", words="d_model", check=sized(32)),
        refused("a width of four million", f"{enc}.d_model=4000000", words="d_model|memory"),
        refused("ff_expansion_factor=0", f"{enc}.ff_expansion_factor=0", words="ff_expansion_factor"),
        refused("subsampling_factor=3", f"{enc}.subsampling_factor=3", words="subsampling_factor"),
        refused("subsampling_conv_channels=0", f"{enc}.subsampling_conv_channels=0", words="conv_channels"),
        either("subsampling_conv_channels=-1 is d_model", f"{enc}.subsampling_conv_channels=-1", words="channels"),
        refused("everything dropped", f"{enc}.dropout_pre_encoder=1.0", words="dropout_pre_encoder"),
        refused("dropout=nan", f"{enc}.dropout=nan", words="dropout"),
        refused("dropout_att=-0.1", f"{enc}.dropout_att=-0.1", words="dropout_att"),
        refused("every layer skipped", f"{enc}.stochastic_depth_drop_prob=1.0", words="stochastic_depth"),
        refused("a context of one number", f"{enc}.att_context_size=[5]", words="att_context_size"),
        refused(
            "probabilities of contexts that add up to 1.1",
            f"{enc}.att_context_size=[[4,2],[2,1]]",
            f"{enc}.att_context_probs=[0.5,0.6]",
            words="att_context_probs",
        ),
        refused(
            "chunks that the left context is no multiple of",
            f"{enc}.att_context_size=[4,2]",
            f"{enc}.att_context_style=chunked_limited",
            words="att_context",
        ),
        refused("a convolution context of another kernel", f"{enc}.conv_context_size=[3,2]", words="conv_context"),
        right("a causal convolution", f"{enc}.conv_context_size=causal", check=different),
        refused("groups that do not divide the width", f"{enc}.conv_norm_type=group_norm7", words="conv_norm_type"),
        refused("an activation in place of a norm", f"{enc}.conv_norm_type=relu", words="conv_norm_type"),
        refused("local attention", f"{enc}.self_attention_model=rel_pos_local_attn", words="self_attention_model"),
        refused("an fft shorter than the window", f"{pre}.n_fft=128", words="n_fft|window"),
        refused("window_stride=0", f"{pre}.window_stride=0", words="window_stride"),
        refused("window_size=-0.025", f"{pre}.window_size=-0.025", words="window_size"),
        refused("window_size in milliseconds", f"{pre}.window_size=25", words="window_size|n_fft"),
        refused("features=0", f"{pre}.features=0", words="features"),
        refused("mel bands upside down", f"{pre}.lowfreq=4000", f"{pre}.highfreq=3000", words="lowfreq|highfreq"),
        refused("an unknown window", f"{pre}.window=triangle", words="window"),
        refused("an unknown normalisation", f"{pre}.normalize=per_features", words="normalize"),
        either("log of zero", f"{pre}.log_zero_guard_value=0", words="log_zero_guard_value"),
        refused("a magnitude to the power of 0", f"{pre}.mag_power=0", words="mag_power"),
        refused("pre-emphasis of nan", f"{pre}.preemph=nan", words="preemph"),
        refused("pad_to=-16", f"{pre}.pad_to=-16", words="pad_to"),
        refused("a masking of other features", "model.masking.feat_in=64", words="feat_in"),
        refused("fewer codes than the decoder has", "model.quantizer.num_classes=32", words="num_classes"),
        refused("more decoders than books", "model.decoder.num_decoders=2", words="num_decoders|num_books"),
        refused("tokens of other lengths", "model.quantizer.combine_time_steps=4", words="combine_time_steps"),
        refused("mask_prob=1.5", "model.masking.mask_prob=1.5", words="mask_prob"),
        refused("block_size=0", "model.masking.block_size=0", words="block_size"),
        either("blocks longer than the audio", "model.masking.block_size=100000", words="block_size"),
        refused(
            "at most no frame may be masked",
            "model.masking.allow_overlap=false",
            "model.masking.max_mask_ratio=0",
            words="max_mask_ratio",
            partial=True,
        ),
        refused("mask_position=middle", "model.mask_position=middle", words="mask_position"),
        refused("mask_threshold=1.5", "model.loss.mask_threshold=1.5", words="mask_threshold"),
        refused("num_books=0", "model.num_books=0", words="num_books"),
        refused("code_dim=-1", "model.code_dim=-1", words="code_dim"),
        refused("an unknown distance", "model.quantizer.dist_fn=l3", words="dist_fn"),
        refused("activation_budget=7", "model.activation_budget=7", words="activation_budget"),
        refused("a compiler of another name", "model.compile=inductor-max", words="compile"),
    ]


def of_optimizer() -> list[Trial]:
    opt = "model.optim"
    return [
        refused("a learning rate of 0", f"{opt}.lr=0", words="lr"),
        refused("a learning rate of nan", f"{opt}.lr=nan", words="lr"),
        either("a learning rate of 1e30", f"{opt}.lr=1e30", words="lr|finite", partial=True),
        refused("one beta", f"{opt}.betas=[0.9]", words="betas"),
        refused("betas of 1", f"{opt}.betas=[0.9,1.0]", words="betas"),
        refused("eps below zero", f"{opt}.eps=-1e-8", words="eps"),
        refused("an endless weight decay", f"{opt}.weight_decay=inf", words="weight_decay"),
        refused("momentum for adamw", f"{opt}.momentum=0.9", words="momentum"),
        either("sgd with the betas of the yaml", f"{opt}.name=sgd", f"{opt}.lr=0.01", words="betas|sgd"),
        refused("no optimizer", f"{opt}=null", words="optim"),
        refused("novograd", f"{opt}.name=novograd", words="novograd"),
        refused("a schedule of another toolkit", f"{opt}.sched.name=OneCycleLR", words="OneCycleLR"),
        refused("warmup_steps=-1", f"{opt}.sched.warmup_steps=-1", words="warmup_steps"),
        refused(
            "a warmup of 150 %", f"{opt}.sched.warmup_steps=null", f"{opt}.sched.warmup_ratio=1.5", words="warmup_ratio"
        ),
        either("two lengths of warmup", f"{opt}.sched.warmup_ratio=0.5", words="warmup"),
        refused("a width of the schedule of 0", f"{opt}.sched.d_model=0", words="d_model"),
    ]


def of_data() -> list[Trial]:
    train = "model.train_ds"
    buckets = f"{train}.use_bucketing=true"
    return [
        refused("batch_size=0", f"{train}.batch_size=0", words="batch_size"),
        refused("batch_size=null", f"{train}.batch_size=null", words="batch_size|batch_duration"),
        refused("batches larger than the data", f"{train}.batch_size=9", words="batch_size|drop_last|utterances"),
        right("the same with drop_last=false", f"{train}.batch_size=9", f"{train}.drop_last=false", check=steps(4)),
        refused("num_workers=-1", f"{train}.num_workers=-1", words="num_workers"),
        refused("prefetch_factor=0", f"{train}.num_workers=1", f"{train}.prefetch_factor=0", words="prefetch_factor"),
        refused("prefetch_gb=nan", f"{train}.prefetch_gb=nan", words="prefetch_gb"),
        refused("noise_bank_gb=-1", f"{train}.noise_bank_gb=-1", words="noise_bank_gb"),
        refused(
            "durations the wrong way round",
            f"{train}.min_duration=20",
            f"{train}.max_duration=2",
            words="min_duration|max_duration",
        ),
        refused("max_duration=nan", f"{train}.max_duration=nan", words="max_duration"),
        refused("channel 5 of mono files", f"{train}.channel_selector=5", words="channel", partial=True),
        refused("max_bad_fraction=nan", f"{train}.max_bad_fraction=nan", words="max_bad_fraction"),
        refused("an unknown padding", f"{train}.pad_audio_mode=mirror", words="pad_audio_mode"),
        refused("a probability of 150 %", f"{train}.batch_augmentor.prob=1.5", words="prob"),
        refused("ratios the wrong way round", f"{train}.batch_augmentor.min_r_noise=30", words="r_noise"),
        refused("mixing over 200 %", f"{train}.batch_augmentor.max_mix_rate=2", words="mix_rate"),
        refused(
            "an augmentation that is a shell command",
            f"{train}.batch_augmentor._target_=os.system",
            words="_target_|os.system",
        ),
        refused("another sampling rate than the mels", f"{train}.sample_rate=8000", words="sample_rate"),
        refused("seconds per batch without buckets", f"{train}.batch_duration=10", words="use_bucketing"),
        refused("num_buckets=0", buckets, f"{train}.num_buckets=0", words="num_buckets"),
        either("more buckets than utterances", buckets, f"{train}.num_buckets=500", words="num_buckets"),
        either(
            "batches shorter than an utterance",
            buckets,
            f"{train}.batch_duration=0.5",
            f"{train}.batch_size=null",
            words="batch_duration",
        ),
        refused("bins out of order", buckets, f"{train}.bucket_duration_bins=[3,2]", words="bucket_duration_bins"),
        refused("bins of nan", buckets, f"{train}.bucket_duration_bins=[2,nan]", words="bucket_duration_bins"),
        refused(
            "fewer batch sizes than bins",
            buckets,
            f"{train}.bucket_duration_bins=[2,3]",
            f"{train}.bucket_batch_size=[4]",
            words="bucket_batch_size",
        ),
        refused(
            "weights for one of two datasets",
            f"{train}.is_concat=true",
            f"{train}.manifest_filepath=[train.jsonl,valid.jsonl]",
            f"{train}.concat_sampling_technique=random",
            f"{train}.concat_sampling_probabilities=[1.0]",
            words="concat_sampling_probabilities",
        ),
        refused(
            "a temperature of 0",
            f"{train}.is_concat=true",
            f"{train}.concat_sampling_temperature=0",
            words="concat_sampling_temperature",
        ),
        refused("tarred without tars", f"{train}.is_tarred=true", words="tarred_audio_filepaths"),
        refused("a source that nobody has registered", f"{train}.source=my_corpus", words="my_corpus"),
        refused("no manifest", f"{train}.manifest_filepath=null", words="manifest_filepath"),
        refused("an empty list of manifests", f"{train}.manifest_filepath=[]", words="manifest_filepath"),
        refused("a number as manifest", f"{train}.manifest_filepath=42", words="manifest_filepath|42"),
        refused("a table as manifest", f"{train}.manifest_filepath={{a: b}}", words="manifest_filepath"),
        right("training without validation", "model.validation_ds.manifest_filepath=null", check=undisturbed),
    ]


def of_runs() -> list[Trial]:
    exp, best = "exp_manager", "exp_manager.checkpoint_callback_params"
    early = f"{exp}.create_early_stopping_callback=true"
    return [
        refused("a manifest as exp_dir", f"{exp}.exp_dir=train.jsonl", words="train.jsonl|exp_dir"),
        refused("a run called ..", f"{exp}.name=..", words="name"),
        either("a run without a name", f"{exp}.name=''", words="name"),
        refused("save_top_k=-5", f"{best}.save_top_k=-5", words="save_top_k"),
        right(
            "save_top_k=-1 keeps all",
            f"{best}.save_top_k=-1",
            "trainer.val_check_interval=2",
            check=lambda folder, outcome: (
                trained(folder, outcome)
                if len(list(folder.rglob("run--*.ckpt"))) == 2
                else f"{len(list(folder.rglob('run--*.ckpt')))} of the best are kept, expected 2"
            ),
        ),
        refused("a typo in monitor", f"{best}.monitor=val_los", words="monitor|val_los"),
        refused("mode=mini", f"{best}.mode=mini", words="mode"),
        refused("a file name that leaves the folder", f"{best}.filename='../../{{epoch}}'", words="filename"),
        right("train_time_interval of nothing: saves after every step", f"{best}.train_time_interval='00:00:00:00'"),
        refused("a time per run in words", f"{exp}.max_time_per_run='5 minutes'", words="max_time_per_run"),
        refused("an average that never moves", f"{exp}.ema.enable=true", f"{exp}.ema.decay=1.0", words="decay"),
        refused("an average every 0 steps", f"{exp}.ema.enable=true", f"{exp}.ema.every_n_steps=0", words="every_n"),
        refused("a checkpoint that is not there", f"{exp}.resume_from_checkpoint=nosuch.ckpt", words="nosuch.ckpt"),
        refused("audio as checkpoint", f"{exp}.resume_from_checkpoint=audio/0.wav", words="0.wav"),
        refused("patience of nan", early, f"{exp}.early_stopping_callback_params.patience=nan", words="patience"),
        refused(
            "early stopping on what is never logged",
            early,
            f"{exp}.early_stopping_callback_params.monitor=wer",
            words="wer|monitor",
        ),
        either(
            "early stopping without validation",
            early,
            "model.validation_ds.manifest_filepath=null",
            words="early_stopping|validation|monitor",
        ),
        either(
            "files to copy that are not there",
            f"{exp}.files_to_copy=[nosuch.py]",
            words="nosuch.py",
            check=said("nosuch.py"),
        ),
        Trial(
            GROUP,
            "resume_if_exists=false in an old folder",
            pretrain(f"{exp}.resume_if_exists=false"),
            Either(Refused(("resume_if_exists|exists|name",)), Right(not_mixed)),
            Fixture.run,
        ),
        refused("nothing to resume", f"{exp}.resume_ignore_no_checkpoint=false", words="resume_ignore_no_checkpoint"),
        refused("watchdog.floor_s=nan", "watchdog.floor_s=nan", words="floor_s"),
        refused("watchdog.action=kill", "watchdog.action=kill", words="watchdog.action|action"),
        refused("launch.max_restarts=-1", "launch.max_restarts=-1", words="max_restarts"),
        refused("weights from nowhere", "init_from_nemo_model=nosuch.nemo", words="nosuch.nemo"),
        Trial(
            GROUP,
            "weights of which nothing is included",
            pretrain("init_from_nemo_model={base: {path: model.nemo, include: [nosuch]}}"),
            Either(Refused(("nosuch|include|model.nemo",)), Right(said("0 loaded"))),
            model,
        ),
        Trial(
            GROUP,
            "weights of another width",
            pretrain("init_from_nemo_model=model.nemo", "model.encoder.d_model=64"),
            Either(Refused(("shape|model.nemo",)), Right(said("different shape", "encoder"))),
            model,
        ),
        again("another width", "model.encoder.d_model=64", expected=Refused(("d_model",))),
        again("one layer fewer", "model.encoder.n_layers=1", expected=Refused(("n_layers|layer",))),
        again("another optimizer", "model.optim.name=sgd", expected=Refused(("optim",))),
        again("another mel range", "model.preprocessor.highfreq=7000", expected=Refused(("highfreq",))),
        again("another quantizer", "model.num_books=2", expected=Refused(("num_books|quantizer|decoder",))),
        again("another seed", "seed=7", expected=Either(Refused(("seed",)), Right(said("seed", then=different)))),
        again(
            "other betas",
            "model.optim.betas=[0.5,0.5]",
            expected=Either(Refused(("betas",)), Right(said("betas", then=different))),
        ),
        again(
            "another loss threshold",
            "model.loss.mask_threshold=0.5",
            expected=Either(Refused(("mask_threshold",)), Right(said("mask_threshold", then=different))),
        ),
        again("another profiler only", "trainer.profiler=simple", expected=Right(resumed)),
        again(
            "a manifest that is gone",
            "model.train_ds.manifest_filepath=nosuch.jsonl",
            expected=Refused(("nosuch.jsonl",)),
        ),
        again(
            "fewer steps than were trained",
            "trainer.max_steps=3",
            expected=Either(Refused(("max_steps",)), Right(not_mixed)),
        ),
    ]


def of_yaml() -> list[Trial]:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
    )
    return [
        yaml(
            "a rate as 5e-2, which is text in YAML 1.1",
            OWN + "model:\n  optim:\n    lr: 5e-2\n    sched:\n"
            "      name: CosineAnnealing\n      d_model: null\n      warmup_steps: null\n      min_lr: 1e-5\n",
            Either(Refused(("lr",)), Right(rate(0.05))),
            "~model.optim.sched.warmup_steps",
            "model.optim.lr=5e-2",
        ),
        yaml("tabs", OWN + "model:\n\toptim:\n\t\tlr: 1\n", Refused(("mine.yaml",))),
        yaml(
            "a key twice",
            OWN + "trainer:\n  precision: 32\ntrainer:\n  precision: 16\n",
            Refused(("trainer|precision|twice|duplicate",)),
        ),
        yaml("UTF-16", (OWN + "seed: 1\n").encode("utf-16"), Either(Refused(("mine.yaml|mine",)), Right(trained))),
        yaml("a byte order mark", b"\xef\xbb\xbf" + OWN.encode(), Either(Refused(("mine.yaml|mine",)), Right(trained))),
        yaml("an empty file", "", Refused(("mine|trainer|model",))),
        yaml("a list", "- a\n- b\n", Refused(("mine",))),
        yaml("zeros", bytes(300), Refused(("mine",))),
        yaml("defaults that are not there", "defaults: [nosuch_base, _self_]\n", Refused(("nosuch_base",))),
        yaml("defaults that are itself", "defaults: [mine, _self_]\n", Refused(("mine",))),
        yaml("an interpolation of nothing", OWN + "seed: ${nosuch.key}\n", Refused(("nosuch",))),
        yaml("interpolations in a circle", OWN + "seed: ${name}\nname: ${seed}\n", Refused(("seed|name",))),
        yaml("??? over a value, which stays", OWN + "model:\n  num_books: ???\n", Right(trained)),
        yaml("a Python object", OWN + "seed: !!python/object/apply:os.system ['touch ../pwned']\n", Refused(("mine",))),
        yaml("a billion laughs", OWN + bomb, Refused(("mine|a0|a9|a1|alias",))),
        yaml(
            "a section of another model",
            OWN + "model:\n  tokenizer:\n    dir: x\n    type: bpe\n",
            Right(lambda f, o: trained(f, o) if "model.tokenizer" in o.err else "not said to be unused"),
        ),
        yaml("a section that is a number", OWN + "model:\n  encoder: 3\n", Refused(("encoder",))),
        yaml(
            "yes and no", OWN + "trainer:\n  sync_batchnorm: no\n", Either(Refused(("sync_batchnorm",)), Right(trained))
        ),
        other(
            "a configuration folder that is not there",
            ["pretrain", "--config-path", "nosuch_dir"],
            Refused(("nosuch_dir",)),
        ),
        other(
            "a configuration that is not there",
            ["pretrain", "--config-name", "nest_fastconformer"],
            Refused(("nest_fastconformer",)),
        ),
        other(
            "a configuration by its file name",
            [*pretrain(), "--config-path", ".", "--config-name", "mine.yaml"],
            Either(Refused(("mine",)), Right(steps(4))),
            wrote("mine.yaml", OWN),
        ),
    ]


def of_overrides() -> list[Trial]:
    return [
        refused("an override without =", "trainer.max_steps", words="trainer.max_steps"),
        refused("an override without a key", "=5", words="=5"),
        refused("an open bracket", "model.optim.betas=[0.9,0.98", words="betas"),
        refused("an unknown key with +", "+model.encoder.nlayers=2", words="nlayers"),
        refused("an unknown key with ++", "++trainer.max_step=2", words="max_step"),
        refused("removal of what is not there", "~model.nosuch", words="nosuch"),
        refused("a path through a number", "seed.value=3", words="seed"),
        refused("an unknown size", "size=gigantic", words="gigantic|size"),
        right("the last of two overrides counts", "trainer.max_steps=9", "trainer.max_steps=2", check=steps(2)),
        refused("Hydra's own keys", "hydra.run.dir=elsewhere", words="hydra"),
        other("Hydra's multirun", [*pretrain("seed=1,2"), "--multirun"], Refused(("multirun|seed|-m",))),
        refused("a sweep", "seed=1,2,3", words="seed"),
        either(
            "a comma-separated list of manifests",
            "model.train_ds.manifest_filepath='train.jsonl,valid.jsonl'",
            words="manifest_filepath",
            check=said("12 utterances"),
        ),
        refused("a value in brackets too deep", f"model.optim.betas={'[' * 5000}{']' * 5000}", words="betas"),
        refused(
            "an interpolation of the environment",
            "exp_manager.name=${oc.env:NOSUCH_VARIABLE_X}",
            words="NOSUCH_VARIABLE_X",
        ),
    ]


def of_commands() -> list[Trial]:
    fit = ["fit", "model.train_ds.manifest_filepath=train.jsonl"]
    prepare = ["prepare", "audio", "--output", "m.jsonl"]

    def bad(name: str, command: list[str], *words: str, setup: Setup | None = model) -> Trial:
        return other(name, command, Refused(words), setup)

    return [
        bad("extract: a layer that is not there", [*EXTRACT, "--layers", "9"], "layer"),
        bad("extract: layers in words", [*EXTRACT, "--layers", "first"], "layers|first"),
        bad("extract: an empty number", [*EXTRACT, "--layers", "0,,1"], "layer"),
        other(
            "extract: a layer from the end",
            [*EXTRACT, "--layers=-1"],
            Either(Refused(("layer",)), Right(features_of(1, 32))),
            model,
        ),
        other(
            "extract: a layer twice",
            [*EXTRACT, "--layers", "0,0"],
            Either(Refused(("layer",)), Right(features_of(2, 32))),
            model,
        ),
        bad("extract: weights that are not used", [*EXTRACT, "--weights", "0.5,0.5"], "weight"),
        bad(
            "extract: three weights for two layers",
            [*EXTRACT, "--aggregation", "weighted", "--weights", "1,1,1"],
            "weight",
        ),
        bad("extract: weights of nan", [*EXTRACT, "--aggregation", "weighted", "--weights", "nan,1"], "weight"),
        bad("extract: weighted without weights", [*EXTRACT, "--aggregation", "weighted"], "weights"),
        bad("extract: shards of nothing", [*EXTRACT, "--format", "shards", "--shard-mb", "0"], "shard-mb|shard_mb"),
        bad("extract: batches of nan seconds", [*EXTRACT, "--batch-seconds", "nan"], "batch-seconds|batch_seconds"),
        bad("extract: max-duration nan", [*EXTRACT, "--max-duration", "nan"], "max-duration|max_duration"),
        bad("extract: GPU 99", [*EXTRACT[:-1], "cuda:99"], "cuda:99|GPU"),
        bad("extract: a device of torch without data", [*EXTRACT[:-1], "meta"], "meta|device"),
        bad(
            "probe: noise without a ratio",
            [*PROBE, "--label", "label", "--noise", "train.jsonl"],
            "snr",
            setup=labelled,
        ),
        bad(
            "probe: a ratio of nan",
            [*PROBE, "--label", "label", "--noise", "train.jsonl", "--snr", "nan"],
            "snr",
            setup=labelled,
        ),
        bad("probe: a label and a task", [*PROBE, "--label", "label", "--task", "mine"], "task", setup=labelled),
        bad("probe: neither label nor task", PROBE, "label|task", setup=labelled),
        bad(
            "probe: more labels than there are",
            [*PROBE, "--label", "label", "--labels-per-class", "99"],
            "labels-per-class|99|4",
            setup=labelled,
        ),
        bad(
            "probe: a learning rate below zero",
            [*PROBE, "--label", "label", "--head", "attentive", "--lr", "-1"],
            "lr",
            setup=labelled,
        ),
        bad(
            "prepare: everything is for validation",
            [*prepare, "--split", "hash", "--valid-share", "1.5"],
            "valid-share|valid_share",
        ),
        bad("prepare: a share of nan", [*prepare, "--split", "hash", "--valid-share", "nan"], "valid-share|share"),
        bad("prepare: folder level 0", [*prepare, "--split", "folder", "--folder-level", "0"], "folder-level|level"),
        bad("prepare: job 3 of 2", [*prepare, "--job", "3/2"], "job|3/2"),
        bad("prepare: job 0 of 0", [*prepare, "--job", "0/0"], "job|0/0"),
        bad("prepare: merge of jobs that never ran", [*prepare, "--merge", "3"], "job"),
        bad("fit: more memory than the card has", [*fit, "--memory-share", "2"], "memory|GPU|CUDA"),
        bad("fit: without a GPU", [*fit, "trainer.accelerator=cpu"], "GPU|CUDA|accelerator"),
        bad(
            "inspect: a typo in a setting",
            ["inspect", "train.jsonl", "model.train_ds.max_durations=3"],
            "max_durations",
        ),
        bad("inspect: more masks than frames", ["inspect", "train.jsonl", "model.masking.mask_prob=7"], "mask_prob"),
        bad("demo: no utterances", ["demo", "--data-dir", "d", "--num-train", "-1"], "num-train|num_train"),
        bad("demo: utterances of nan seconds", ["demo", "--data-dir", "d", "--duration", "nan"], "duration"),
        bad("demo: 7 samples per second", ["demo", "--data-dir", "d", "--sample-rate", "7"], "sample-rate|sample_rate"),
        bad("demo: a folder that is a file", ["demo", "--data-dir", "train.jsonl", "--num-train", "2"], "train.jsonl"),
        bad("demo: overwrite what no demo has made", ["demo", "--data-dir", "audio", "--overwrite"], "audio"),
        bad("doctor: a run that is not there", ["doctor", "runs/nosuch"], "nosuch"),
        bad("doctor: a file as run", ["doctor", "train.jsonl"], "train.jsonl"),
        bad("report: a folder without a run", ["report", "audio"], "audio"),
        bad("info: an unknown size", ["info", "nest_fast-conformer", "size=gigantic"], "gigantic|size"),
        bad(
            "info: overrides of a file",
            ["info", "model.nemo", "model.encoder.d_model=64"],
            "d_model|override|model.nemo",
        ),
        bad("info: three models", ["info", "model.nemo", "model.nemo", "model.nemo"], "two|three|3|2"),
        bad("export: a folder in place of a file", ["export", "model.nemo", "audio", "--format", "nemo"], "audio"),
        bad(
            "export: onto its own source",
            ["export", "model.nemo", "model.nemo", "--format", "safetensors"],
            "model.nemo",
        ),
        bad(
            "verify: a Python that is not there",
            ["verify", "model.nemo", "--nemo-python", "nosuch_python"],
            "nosuch_python",
        ),
        bad("verify: numbers that are not there", ["verify", "model.nemo", "--recorded", "nosuch.npz"], "nosuch.npz"),
    ]


def trials() -> list[Trial]:
    makers: tuple[Callable[[], list[Trial]], ...] = (
        *(of_trainer, of_model, of_optimizer, of_data, of_runs, of_yaml, of_overrides, of_commands),
    )
    return [trial for make in makers for trial in make()]
