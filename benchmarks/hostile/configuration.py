"""Settings that are wrong, contradict each other, or would train something worthless; options of every command.

Most trials are named by what is added to a good command. A value beside it has the words of the refusal, separated by
spaces; alternatives are separated by `|`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
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
    ended_well,
    finite_features,
    in_fork,
    losses,
    only_run,
    pretrain,
    resume,
    rows,
    said,
    snapshot,
    trained,
    write_lines,
)

GROUP = "configuration"

# -------------------------------------------------------------------------------------- refused before anything is done

ENCODER = {
    "model.encoder.n_layers=2.5": "n_layers",
    "model.encoder.n_layers=0": "n_layers",
    "model.encoder.n_layers=null": "n_layers",
    "model.encoder.n_layers=": "n_layers",
    "model.encoder.n_layers=true": "n_layers",
    "model.encoder.d_model=[32,32]": "d_model",
    "model.encoder.d_model=33": "d_model|n_heads",
    "model.encoder.d_model=9 model.encoder.n_heads=3": "d_model",  # odd: positions have sines and cosines
    "model.encoder.n_heads=0": "n_heads",
    "model.encoder.n_heads=-4": "n_heads",
    "model.encoder.conv_kernel_size=8": "conv_kernel_size",
    "model.encoder.conv_kernel_size=-9": "conv_kernel_size",
    "model.encoder.subsampling_factor=6": "subsampling_factor",
    "model.encoder.subsampling_conv_channels=0": "subsampling_conv_channels",
    "model.encoder.subsampling=vggnet": "subsampling",
    "model.encoder.ff_expansion_factor=0": "ff_expansion_factor",
    "model.encoder.dropout=1.0": "dropout",
    "model.encoder.dropout_att=-0.1": "dropout_att",
    "model.encoder.dropout_pre_encoder=nan": "dropout_pre_encoder",
    "model.encoder.stochastic_depth_drop_prob=1.0": "stochastic_depth_drop_prob",
    "model.encoder.stochastic_depth_drop_prob=0.3 model.encoder.stochastic_depth_start_layer=99": "start_layer",
    "model.encoder.stochastic_depth_mode=exponential": "stochastic_depth_mode",
    "model.encoder.att_context_size=70": "att_context_size",
    "model.encoder.att_context_size=[-2,3]": "att_context_size",
    "model.encoder.att_context_size=[5,6] model.encoder.att_context_style=chunked_limited": "att_context_size",
    "model.encoder.att_context_style=chunky": "att_context_style",
    "model.encoder.self_attention_model=flash": "self_attention_model",
    "model.encoder.conv_norm_type=group_norm5": "conv_norm_type|group_norm5",  # 32 channels
    "model.encoder.conv_norm_type=group_norm0": "conv_norm_type|group_norm0",
    "model.encoder.conv_context_size=[1,2,3]": "conv_context_size",
    "model.encoder.feat_in=40": "feat_in",  # the preprocessor has 80
    "model.encoder.feat_out=48": "feat_in|feat_out",  # the decoder expects 32
    "model.encoder.xscaling=perhaps": "xscaling",
    "model.encoder._target_=os.system": "_target_|os.system",
    "model.encoder._target_=nemo.collections.asr.modules.ConvASREncoder": "ConvASREncoder",
    "model.encoder.reduction=pooling": "reduction",
    "~model.encoder": "encoder",
    "model.encoder=null": "encoder",
    "model.encoder.d_model=4000000": "memory|d_model",
    "model.num_classes=100000000000": "memory|num_classes",
}
TARGETS = {
    "model.num_classes=1": "num_classes",  # one code: the loss is always 0
    "model.num_classes=-8": "num_classes",
    "model.decoder.num_classes=32": "num_classes",
    "model.decoder.num_decoders=3": "num_decoders|num_books",
    "model.decoder.feat_in=77": "feat_in",
    "model.code_dim=0": "code_dim",
    "model.num_books=0": "num_books",
    "model.quantizer.combine_time_steps=4": "combine_time_steps",
    "model.loss.combine_time_steps=2": "combine_time_steps",
    "model.quantizer.dist_fn=l1": "dist_fn",
    "model.masking.mask_prob=0": "mask_prob",  # nothing is masked: nothing is learned
    "model.masking.mask_prob=1.5": "mask_prob",
    "model.masking.mask_prob=nan": "mask_prob",
    "model.masking.block_size=0": "block_size",
    "model.loss.mask_threshold=1.0": "mask_threshold",  # "more than": no token ever counts
    "model.loss.mask_threshold=-1": "mask_threshold",
    "model.mask_position=mid_conv": "mask_position",
}
PREPROCESSOR = {
    "model.preprocessor.window_size=0.1": "window_size|n_fft",  # 1600 samples, n_fft is 512
    "model.preprocessor.window_size=25": "window",  # milliseconds
    "model.preprocessor.window_size=25 model.preprocessor.n_fft=null": "window_size",  # what that refusal advises
    "model.preprocessor.window_stride=0": "window_stride",
    "model.preprocessor.window_stride=10": "window_stride",  # milliseconds
    "model.preprocessor.features=0": "features",
    "model.preprocessor.lowfreq=4000 +model.preprocessor.highfreq=1000": "lowfreq|highfreq",
    "+model.preprocessor.highfreq=20000": "highfreq",
    "model.preprocessor.window=kaiser5": "window",
    "model.preprocessor.normalize=per_feeture": "normalize",
    "model.preprocessor.sample_rate=8000": "sample_rate",
    "model.preprocessor.pad_to=-1": "pad_to",
    "model.preprocessor.dither=nan": "dither",
    "model.preprocessor.mag_power=0": "mag_power",  # every feature is log(1)
    "model.preprocessor.pad_value=nan": "pad_value",
    "model.preprocessor.n_fft=-512": "n_fft",
    "model.preprocessor.frame_splicing=3": "frame_splicing",
    "model.sample_rate=0": "sample_rate",
    "model.sample_rate=16k": "sample_rate",
    "model.sample_rate=16000.5": "sample_rate",
    "model.train_ds.sample_rate=44100": "sample_rate",
}
OPTIMIZER = {
    "model.optim.lr=0": "lr",
    "model.optim.lr=-1": "lr",
    "model.optim.lr=nan": "lr",
    "model.optim.lr=inf": "lr",
    "model.optim.lr=5,0": "lr",  # a decimal comma
    "model.optim.lr=[0.1,0.2]": "lr",
    "model.optim.name=torch.optim.AdamW": "optim.name",
    "model.optim.name=lamb": "lamb",
    "model.optim.name=null": "optim.name",
    "model.optim.betas=[0.9]": "betas",
    "model.optim.betas=[0.9,1.0]": "betas",
    "model.optim.betas=0.9": "betas",
    "model.optim.weight_decay=-1": "weight_decay",
    "model.optim.eps=0.5e": "eps",
    "model.optim.sched.warmup_steps=-1": "warmup_steps",
    "model.optim.sched.warmup_steps=10 model.optim.sched.warmup_ratio=0.1": "warmup",
    "model.optim.sched.warmup_steps=null model.optim.sched.warmup_ratio=1.5": "warmup_ratio",
    "model.optim.sched.name=StepLR": "StepLR",
    "model.optim.sched.name=CosineAnnealing model.optim.sched.d_model=null model.optim.lr=1e-3 "
    "model.optim.sched.min_lr=1e-2": "min_lr",
    "model.optim.sched.name=CosineAnnealing model.optim.sched.d_model=null trainer.max_steps=-1 trainer.max_epochs=-1 "
    "trainer.max_time=00:00:00:05": "max_steps",
    "model.optim.sched.d_model=0": "d_model",
}
TRAINER = {
    "trainer.max_steps=0": "max_steps",
    "trainer.max_steps=-5": "max_steps",
    "trainer.max_steps=4.5": "max_steps",
    "trainer.max_steps=true": "max_steps",
    "trainer.max_steps=10k": "max_steps",
    "trainer.max_epochs=0": "max_epochs",
    "trainer.max_time=00:00:00:00": "max_time",
    "trainer.max_time=soon": "max_time",
    "trainer.max_time={hours:-1}": "max_time",
    "trainer.limit_train_batches=0": "limit_train_batches",
    "trainer.limit_train_batches=1.5": "limit_train_batches",
    "trainer.val_check_interval=100": "val_check_interval",  # an epoch has 4 batches
    "trainer.val_check_interval=0": "val_check_interval",
    "trainer.val_check_interval=1.5": "val_check_interval",
    "trainer.check_val_every_n_epoch=0": "check_val_every_n_epoch",
    "trainer.precision=fp16": "precision",
    "trainer.precision=bf16-true": "precision",
    "trainer.accelerator=gpu": "GPU",
    "trainer.accelerator=tpu": "accelerator",
    "trainer.devices=0": "devices",
    "trainer.devices=-3": "devices",
    "trainer.devices=[]": "devices",
    "trainer.devices=two": "devices",
    "trainer.num_nodes=0": "num_nodes",
    "trainer.num_nodes=2": "MASTER_ADDR|num_nodes",
    "trainer.strategy=deepspeed_stage_2": "strategy",
    "trainer.strategy={_target_:subprocess.Popen,args:[touch,../pwned]}": "strategy",
    "trainer.strategy={_target_:DDPStrategy,bucket_cap_mb:25}": "bucket_cap_mb",
    "trainer.accumulate_grad_batches=0": "accumulate_grad_batches",
    "trainer.accumulate_grad_batches={0:2,4:1}": "accumulate_grad_batches",
    "trainer.gradient_clip_val=-1": "gradient_clip_val",
    "trainer.gradient_clip_val=1 trainer.gradient_clip_algorithm=l2": "gradient_clip_algorithm",
    "trainer.callbacks=[x]": "callbacks",
    "trainer.overfit_batches=1": "overfit_batches",
    "trainer.barebones=true": "barebones",
    "trainer.profiler=pyspy": "profiler",
    "trainer.log_every_n_steps=-5": "log_every_n_steps",
    "trainer.num_sanity_val_steps=-2": "num_sanity_val_steps",
    "trainer.gpus=1": "gpus",
    "trainer.fast_dev_run=-1": "fast_dev_run",
    "trainer.limit_val_batches=2.5": "limit_val_batches",
    "trainer=null": "trainer",
}
DATA = {
    "model.train_ds.batch_size=0": "batch_size",
    "model.train_ds.batch_size=2.5": "batch_size",
    "model.train_ds.batch_size=null": "batch_size",
    "model.train_ds.batch_size=100": "batch_size|drop_last",  # of 8 utterances
    "model.train_ds.min_duration=3 model.train_ds.max_duration=2": "min_duration",
    "model.train_ds.max_duration=-1": "max_duration",
    "model.train_ds.max_duration=60s": "max_duration",
    "model.train_ds.min_duration=nan": "min_duration",
    "model.train_ds.num_workers=-1": "num_workers",
    "model.train_ds.shuffle=sometimes": "shuffle",
    "model.train_ds.use_bucketing=true model.train_ds.num_buckets=0": "num_buckets",
    "model.train_ds.use_bucketing=true model.train_ds.bucket_duration_bins=[2.0,1.0]": "bucket_duration_bins",
    "model.train_ds.use_bucketing=true model.train_ds.bucket_duration_bins=[2.0] "
    "model.train_ds.bucket_batch_size=[2,2,2]": "bucket_batch_size",
    "model.train_ds.batch_duration=10": "batch_duration",
    "model.train_ds.is_tarred=true": "tarred_audio_filepaths",
    "model.train_ds.is_concat=true model.train_ds.manifest_filepath=[train.jsonl,valid.jsonl] "
    "model.train_ds.concat_sampling_technique=random "
    "model.train_ds.concat_sampling_probabilities=[0.5]": "concat_sampling_probabilities",
    "model.train_ds.is_concat=true model.train_ds.manifest_filepath=[train.jsonl,valid.jsonl] "
    "model.train_ds.concat_sampling_technique=random "
    "model.train_ds.concat_sampling_probabilities=[1.5,-0.5]": "concat_sampling_probabilities",
    "model.train_ds.concat_sampling_temperature=0 model.train_ds.is_concat=true "
    "model.train_ds.manifest_filepath=[train.jsonl,valid.jsonl]": "concat_sampling_temperature",
    "model.train_ds.concat_sampling_technique=tempurature": "concat_sampling_technique",
    "model.train_ds.bucketing_batch_size=[2,2]": "bucketing_batch_size",
    "model.train_ds.batch_augmentor.prob=2": "prob",
    "model.train_ds.batch_augmentor.min_r_noise=30": "min_r_noise|max_r_noise",
    "model.train_ds.batch_augmentor.min_mix_rate=0.9 model.train_ds.batch_augmentor.max_mix_rate=0.1": "mix_rate",
    "model.train_ds.batch_augmentor.noise_ratio=-1": "noise_ratio",
    "model.train_ds.batch_augmentor.max_num_segments=0": "num_segments",
    "model.train_ds.batch_augmentor.min_r_speech=nan": "min_r_speech",
    "model.train_ds.batch_augmentor._target_=builtins.eval": "batch_augmentor|eval",
    "model.train_ds.noise_manifest=nowhere.jsonl": "nowhere.jsonl",
    "model.train_ds.noise_manifest=[]": "noise_manifest",
    "model.validation_ds.noise_manifest=nowhere.jsonl": "nowhere.jsonl",
    "model.train_ds.use_bucketing=true model.train_ds.bucket_duration_bins=[2.0] "
    "model.train_ds.bucket_batch_size=[0,2]": "bucket_batch_size",
    "model.train_ds.use_bucketing=true model.train_ds.batch_size=null model.train_ds.batch_duration=10 "
    "model.train_ds.quadratic_duration=-1": "quadratic_duration",
    "model.train_ds.noise_manifest=": "noise_manifest",  # $NOISE was not set: it would train without noise
    "model.train_ds.manifest_filepath=": "manifest_filepath",
    "model.validation_ds.manifest_filepath=": "manifest_filepath",
    "model.train_ds.manifest_filepath=null": "manifest_filepath",
    "model.train_ds.manifest_filepath=audio": "audio",
    "model.train_ds.manifest_filepath=audio/0.wav": "0.wav",
    "model.train_ds.max_bad_fraction=2": "max_bad_fraction",
    "model.train_ds.channel_selector=leftish": "channel_selector",
    "model.train_ds.prefetch_factor=0 model.train_ds.num_workers=1": "prefetch_factor",
    "model.train_ds.prefetch_gb=-1": "prefetch_gb",
    "model.train_ds.noise_bank_gb=-1": "noise_bank_gb",
    "model.train_ds.source=warehouse": "warehouse",
    "model.train_ds.shuffle_n=-1": "shuffle_n",
    "model.validation_ds.batch_size=0": "batch_size",
    "model.validation_ds.min_duration=50": "valid.jsonl|validation_ds",
    "model.validation_ds.sample_rate=8000": "sample_rate",
    "~model.train_ds": "train_ds|manifest_filepath",
}
MANAGER = {
    "exp_manager.exp_dir=train.jsonl": "train.jsonl",
    "exp_manager.exp_dir=/proc/nowhere": "/proc/nowhere",
    "exp_manager.checkpoint_callback_params.save_top_k=-2": "save_top_k",
    "exp_manager.checkpoint_callback_params.monitor=val_los": "val_los",
    "exp_manager.checkpoint_callback_params.mode=minimum": "mode",
    "exp_manager.checkpoint_callback_params.every_n_train_steps=-1": "every_n_train_steps",
    "exp_manager.checkpoint_callback_params.train_time_interval=banana": "train_time_interval",
    "exp_manager.ema.enable=true exp_manager.ema.decay=1.0": "decay",  # the average would never move
    "exp_manager.ema.enable=true exp_manager.ema.decay=-1": "decay",
    "exp_manager.ema.enable=true exp_manager.ema.every_n_steps=0": "every_n_steps",
    "exp_manager.create_early_stopping_callback=true "
    "exp_manager.early_stopping_callback_params.monitor=val_wer": "val_wer",
    "exp_manager.create_early_stopping_callback=true "
    "exp_manager.early_stopping_callback_params.patience=-1": "patience",
    "exp_manager.checkpoint_callback_params.save_topk=3": "save_topk",
    "exp_manager.create_early_stopping_callback=true exp_manager.early_stopping_callback_params.patiense=2": "patiense",
    "exp_manager.ema.enable=true exp_manager.ema.decai=0.9": "decai",
    "model.optim.extra={cautious:true}": "cautious",
    "model.optim.sched.extra={decay_share:0.1}": "decay_share",
    "exp_manager.resume_ignore_no_checkpoint=false": "checkpoint",
    "exp_manager.resume_from_checkpoint=nowhere.ckpt": "nowhere.ckpt",
    "exp_manager.resume_from_checkpoint=audio/0.wav": "0.wav",
    "exp_manager.max_time_per_run=tomorrow": "max_time_per_run",
    "exp_manager.files_to_copy=[nowhere.txt]": "nowhere.txt",
    "init_from_nemo_model=nowhere.nemo": "nowhere.nemo",
    "init_from_ptl_ckpt=audio/0.wav": "0.wav",
    "seed=-1": "seed",
    "seed=lucky": "seed",
    "seed=1e30": "seed",
    "watchdog.enabled=maybe": "watchdog.enabled",
    "watchdog.floor_s=0": "floor_s",
    "watchdog.action=kill": "watchdog.action",
    "launch.max_restarts=-1": "max_restarts",
    "model.compile=banana": "compile",
    "model.activation_budget=-1": "activation_budget",
}
GRAMMAR = {
    "model.encoder.n_layer=3": "n_layer n_layers",
    "n_layers=3": "n_layers",
    "model.encoder": "model.encoder",
    "=3": "=3",
    "model..encoder=3": "model..encoder",
    "++model.encoder.flavour=mint": "flavour",
    "~model.nowhere": "nowhere",
    "model.encoder.n_layers=${model.encoder.n_layers}": "n_layers",
    "model.encoder.n_layers=${model.nowhere}": "nowhere",
    "model.encoder.n_layers=1,2": "n_layers",
    "--multirun": "multirun",
    "--trainer.max_steps=3": "trainer.max_steps",
    "-m model.optim.lr=1,2": "-m|lr",
    "hydra.sweeper.max_batch_size=2 hydra.mode=MULTIRUN": "hydra",
    "size=huge": "huge",
    "size=../../../../etc/passwd": "passwd",
    "model.encoder.n_layers=２": "n_layers",  # a full-width digit
    "model.optim.lr=${oc.env:NO_SUCH_VARIABLE}": "NO_SUCH_VARIABLE",
    "model.optim.lr=${oc.decode:__import__('os')}": "oc.decode|lr",
    "optimization.max_update=10": "optimization",
    "model.train_ds.per_device_train_batch_size=8": "per_device_train_batch_size",
    "Model.encoder.n_layers=2": "Model",
    "model.encoder.n_layers=[2": "n_layers",
    "model=null": "model",
    "train.jsonl": "train.jsonl",
}
ALWAYS_REFUSED = {
    **ENCODER,
    **TARGETS,
    **PREPROCESSOR,
    **OPTIMIZER,
    **TRAINER,
    **DATA,
    **MANAGER,
    **GRAMMAR,
}

# -------------------------------------------------------------------------------------------- odd, but right: it trains


def steps(count: int, then: Check = trained) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        done = sorted(losses(only_run(folder)))
        return then(folder, outcome) if done == list(range(count)) else f"steps {done}, not {count}"

    return check


def last_rate(rate: float) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = float([row["learning_rate"] for row in rows(only_run(folder)) if row["train_loss"]][-1])
        return trained(folder, outcome) if abs(found / rate - 1) < 0.01 else f"the learning rate is {found}"

    return check


def loads(folder: Path, outcome: Outcome) -> str | None:
    """It trained, and the model that it saved can be used without the environment of the run."""
    after = in_fork(["info", f"{RUN}/checkpoints/run.nemo"], folder, {}, 60)
    return trained(folder, outcome) if after.code == 0 else f"the model cannot be read: {after.message[-200:]}"


def learned(folder: Path, outcome: Outcome) -> str | None:
    """The weights in the last checkpoint are not those that a run of one step with almost no rate has."""
    path = only_run(folder) / "checkpoints/last.ckpt"
    after = torch.load(path, weights_only=True)["state_dict"]
    command = pretrain(
        "exp_manager.name=still", "trainer.max_steps=1", "model.optim.sched=null", "model.optim.lr=1e-30"
    )
    if in_fork(command, folder, {}, 60).code != 0:
        return "the run to compare with failed"
    before = torch.load(folder / "runs/still/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    name = "encoder.layers.0.feed_forward1.linear1.weight"
    return "the weights are those of the beginning" if torch.allclose(before[name], after[name], atol=1e-7) else None


def validated(folder: Path, outcome: Outcome) -> str | None:
    values = [row.get("val_loss") for row in rows(only_run(folder))]
    return trained(folder, outcome) if any(values) else "no validation"


def without_rows(folder: Path, outcome: Outcome) -> str | None:
    """Nothing is logged in training, as with Lightning; the model is there."""
    return None if any(row.get("val_loss") for row in rows(only_run(folder))) else "no validation"


ODD_BUT_RIGHT: dict[str, Check] = {
    "model.sample_rate=8000": trained,
    "trainer.limit_train_batches=0.01 trainer.limit_val_batches=0.01": trained,  # of 4 and 2 batches: at least one
    "model.preprocessor.pad_to=7": trained,
    "model.encoder.att_context_size=[0,0]": trained,
    "model.encoder.pos_emb_max_len=1": trained,
    "model.encoder.self_attention_model=abs_pos": trained,
    "model.mask_position=post_conv": trained,
    "model.squeeze_single=true": loads,
    "model.num_books=3": loads,
    "model.optim.sched=null model.optim.lr=1e-3": last_rate(1e-3),
    "model.optim.sched.name=CosineAnnealing model.optim.sched.d_model=null model.optim.sched.max_steps=3 "
    "model.optim.sched.warmup_steps=1 model.optim.sched.min_lr=1e-4 model.optim.lr=1e-2 "
    "trainer.max_steps=6": last_rate(1e-4),
    "trainer.max_time={minutes:10}": steps(4),
    "trainer.limit_val_batches=0": steps(4),
    "trainer.accumulate_grad_batches=3": steps(4),
    "trainer.precision=bf16": steps(4),
    "trainer.num_sanity_val_steps=-1": steps(4, validated),
    "trainer.max_steps=9 trainer.max_epochs=1": steps(4, validated),
    "trainer.max_steps=2 trainer.max_steps=3": steps(3),
    "trainer.log_every_n_steps=1 trainer.val_check_interval=0.5": steps(4, validated),
    "trainer.deterministic=true": steps(4),
    "trainer.val_check_interval=0.01": steps(4, validated),
    "trainer.accumulate_grad_batches=1000": steps(4),
    "model.validation_ds.manifest_filepath=null": steps(4, loads),
    "model.train_ds.max_duration=null model.train_ds.min_duration=null": steps(4),
    "model.train_ds.num_workers=2": steps(4),
    "model.train_ds.use_bucketing=true model.train_ds.num_buckets=50": steps(4),
    "model.train_ds.batch_augmentor=null": steps(4),
    "model.train_ds.noise_manifest=train.jsonl": steps(4),
    "model.train_ds.trim_silence=true": steps(4),
    "model.train_ds.manifest_filepath=[[train.jsonl],[valid.jsonl]]": steps(4),
    "exp_manager.checkpoint_callback_params.save_top_k=0": steps(4, loads),
    "exp_manager.checkpoint_callback_params.monitor=val_accuracy "
    "exp_manager.checkpoint_callback_params.mode=max": loads,
    "exp_manager.ema.enable=true exp_manager.ema.decay=0.5": loads,
    "debug.trace=true": steps(4),
    "++trainer.max_steps=2": steps(2),
    "model.optim.name=sgd ~model.optim.betas model.optim.sched=null model.optim.lr=1e-3": last_rate(1e-3),
}

# --------------------------------------------------------------------------- both a refusal and a result are reasonable

EITHER = {
    "model.num_classes=1e2": "num_classes",
    "model.masking.block_size=100000": "block_size",
    "model.preprocessor.features=1000 model.preprocessor.n_fft=512": "features",
    "model.preprocessor.n_fft=401": "n_fft",
    "model.quantizer.freeze=false": "freeze",
    "~model.optim": "optim",
    "model.encoder.subsampling_factor=1": "subsampling_factor",
    "model.encoder.use_bias=0": "use_bias",
    "model.optim.name=AdamW": "AdamW|adamw",
    "model.optim.lr='\"0.05\"'": "lr",
    "trainer.precision=64": "precision",
    "trainer.precision=16": "precision",
    "trainer.min_steps=10": "min_steps",
    "trainer.val_check_interval=00:00:00:00": "val_check_interval",
    "trainer.max_steps=1e1": "max_steps",
    "trainer.devices=[0,0]": "devices",
    "model.train_ds.use_bucketing=true model.train_ds.batch_size=null "
    "model.train_ds.batch_duration=1": "batch_duration",
    "model.train_ds.tarred_audio_filepaths=nowhere.tar": "tarred_audio_filepaths|nowhere.tar",
    "model.train_ds.is_concat=true": "is_concat",
    "model.train_ds.batch_augmentor.max_num_speakers=50": "num_speakers",
    "model.train_ds.min_duration=-5": "min_duration",
    "model.masking.mask_prob=1": "mask_prob",
    "exp_manager=null": "exp_manager",
    "exp_manager.name=null": "name",
    "seed=4294967296": "seed",
    "seed=null": "seed",
    "model.train_ds.manifest_filepath='train.jsonl,'": "manifest_filepath|manifest",
    "watchdog.floor_s=1e-9": "floor_s",
    "model.encoder.n_layers=0x2": "n_layers",
}
LATER: dict[str, Expected] = {  # found when training has begun: what is promised besides the refusal may be there
    "model.train_ds.channel_selector=7": Refused(("channel",), partial=True),  # the files are mono
    "model.optim.lr=1e30 trainer.max_steps=40": Refused(("lr|diverged",), partial=True),
    "exp_manager.ema.enable=true exp_manager.ema.every_n_steps=1000": Either(
        Refused(("every_n_steps",)), Right(said("exp_manager.ema.every_n_steps"))
    ),
    "exp_manager.ema.enable=true exp_manager.ema.decay=0.1": Right(learned),
    "trainer.log_every_n_steps=0": Either(Refused(("log_every_n_steps",)), Right(without_rows)),
    "model.optim.weight_decay=1e9 trainer.max_steps=40": Refused(("weight_decay|diverged",), partial=True),
}

# --------------------------------------------------------------------------------------- a run that exists is continued


def untouched(folder: Path, outcome: Outcome) -> str | None:
    """Checkpoints and metrics of the earlier run are as they were."""
    before, after = snapshot(Fixture.path / RUN), snapshot(folder / RUN)
    kept = [name for name in before if name == "metrics.csv" or name.endswith((".ckpt", ".nemo", ".yaml"))]
    lost = [name for name in kept if before[name] != after.get(name)]
    return f"changed or lost: {lost}" if lost else None


def kept_steps(folder: Path, outcome: Outcome) -> str | None:
    """All six steps are still there, and so is the checkpoint of step six."""
    if losses(folder / RUN) != losses(Fixture.path / RUN):
        return "the rows of the run have changed"
    step = torch.load(folder / RUN / "checkpoints/last.ckpt", weights_only=True)["global_step"]
    return None if step == BASE_STEPS else f"last.ckpt is at step {step}"


def continued(folder: Path, outcome: Outcome) -> str | None:
    before, after = losses(Fixture.path / RUN), losses(folder / RUN)
    if any(after.get(step) != loss for step, loss in before.items()):
        return "rows of the run before have changed"
    if sorted(after) != list(range(10)):
        return f"steps {sorted(after)}"
    return trained(folder, outcome)


def changed(*words: str) -> Right:
    return Right(said("changed since the checkpoint", *words, then=continued))


RESUMED: dict[str, Expected] = {
    "model.encoder.d_model=64": Refused(("d_model|shape",)),
    "model.encoder.n_layers=3": Refused(("n_layers|layers.2",)),
    "model.num_classes=32": Refused(("num_classes|shape",)),
    "model.code_dim=8": Refused(("code_dim|shape",)),
    "model.sample_rate=8000": Refused(("sample_rate|preprocessor",)),
    "model.preprocessor.window=hamming": Refused(("window",)),
    "model.optim.name=sgd ~model.optim.betas": Refused(("optim",)),
    "model.mask_position=post_conv": Refused(("mask_position|shape|quantizer",)),
    "model.train_ds.manifest_filepath=nowhere.jsonl": Refused(("nowhere.jsonl",)),
    "model.masking.mask_prob=0": Refused(("mask_prob",)),
    "model.optim.weight_decay=0.5": changed("weight_decay", "takes effect"),
    "model.loss.mask_threshold=0.5": changed("mask_threshold"),
    "model.encoder.att_context_size=[1,1]": changed("att_context_size"),
    "model.encoder.n_heads=2": Either(Refused(("n_heads|shape|pos_bias",)), changed("n_heads")),
    "model.quantizer.dist_fn=cosine": Either(Refused(("dist_fn",)), changed("dist_fn")),
    "seed=77": changed("seed"),
    "exp_manager.ema.enable=true exp_manager.ema.decay=0.9": changed("ema"),
    "trainer.precision=bf16": changed("precision"),
    "model.train_ds.manifest_filepath=valid.jsonl": Right(said("batch", then=continued)),
    "trainer.max_steps=3": Either(Refused(("max_steps",)), Right(kept_steps)),
    "trainer.max_epochs=1": Either(Refused(("max_epochs",)), Right(kept_steps)),
    "exp_manager.resume_if_exists=false": Either(Refused(("resume_if_exists|exists|run",)), Right(untouched)),
    "trainer.fast_dev_run=true": Right(untouched),
    "exp_manager.create_checkpoint_callback=false": Either(Refused(("create_checkpoint_callback",)), Right(continued)),
    "trainer.max_steps=0": Refused(("max_steps",)),
    "model.optim.sched.name=CosineAnnealing model.optim.sched.d_model=null trainer.max_steps=-1 trainer.max_epochs=-1 "
    "trainer.max_time=00:01:00:00": Refused(("max_steps",)),
    "model.train_ds.channel_selector=7": Refused(("channel",)),
    "model.train_ds.use_lhotse=true model.train_ds.manifest_filepath=null "
    "model.train_ds.cuts_path=nowhere.jsonl": Refused(("nowhere.jsonl",)),
}

# ----------------------------------------------------------------------------------------------- yaml files of the user


def maybe(words: str) -> Either:
    return Either(Refused((words,)), Right(trained))


DEFAULTS = "defaults: [nest_fast-conformer, _self_]\n"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
YAML: dict[str, tuple[str | bytes, Expected]] = {
    "tabs": (DEFAULTS + "trainer:\n\tmax_epochs: 3\n", Refused(("my.yaml|my",))),
    "duplicate key": (DEFAULTS + "trainer:\n  max_epochs: 3\n  max_epochs: 4\n", Refused(("max_epochs",))),
    "a list": ("- model\n- trainer\n", Refused(("my",))),
    "a lonely text": ("hello", Refused(("my|hello",))),
    "a python tag": ("x: !!python/object/apply:os.system ['touch ../pwned']\n", Refused(("my",))),
    "latin-1": (DEFAULTS.encode() + b"name: caf\xe9\n", Refused(("my",))),
    "utf-16": ((DEFAULTS + "name: cafe\n").encode("utf-16"), maybe("my")),
    "binary": (bytes(range(256)), Refused(("my",))),
    "byte order mark": (("\ufeff" + DEFAULTS + "seed: 3\n").encode(), Right(trained)),
    "windows line ends": ((DEFAULTS + "seed: 3\n").replace("\n", "\r\n"), Right(trained)),
    "a bomb": (DEFAULTS + BOMB, Refused()),
    "includes itself": ("defaults: [my, _self_]\n", Refused(("my",))),
    "includes nothing that exists": ("defaults: [nowhere, _self_]\n", Refused(("nowhere",))),
    "a circle": (DEFAULTS + "seed: ${trainer.max_epochs}\ntrainer: {max_epochs: '${seed}'}\n", Refused(("seed|max_",))),
    "a misspelt section": (DEFAULTS + "trainr: {max_epochs: 3}\n", Refused(("trainr",))),
    "a misplaced key": (DEFAULTS + "train_ds: {batch_size: 2}\n", Refused(("train_ds",))),
    "merge conflict": (DEFAULTS + "<<<<<<< HEAD\nseed: 3\n=======\nseed: 4\n>>>>>>> theirs\n", Refused(("my",))),
    "quoted numbers": (
        DEFAULTS + "model: {train_ds: {batch_size: '2'}}\n",
        maybe("batch_size"),
    ),
    "yes for true": (DEFAULTS + "model: {train_ds: {shuffle: yes}}\n", maybe("shuffle")),
    "a section is a text": (DEFAULTS + "model: big\n", Refused(("model",))),
    "a section is a list": (DEFAULTS + "model: {train_ds: [batch_size, 2]}\n", Refused(("train_ds",))),
    "anchors": (DEFAULTS + "model:\n  train_ds: &d {pin_memory: false}\n  validation_ds: *d\n", Right(trained)),
    "empty": ("", Either(Refused(), Right(trained))),
    "numbers as keys": (DEFAULTS + "1: 2\n", Refused(("1",))),
    "a hydra section": (DEFAULTS + "hydra: {run: {dir: ../elsewhere}}\n", maybe("hydra")),
    "two documents": (DEFAULTS + "seed: 3\n---\nseed: 4\n", Refused(("my",))),
    "nothing where a number belongs": (DEFAULTS + "model: {masking: {block_size: }}\n", Refused(("block_size",))),
}


def yaml_file(content: str | bytes) -> Setup:
    def setup(folder: Path) -> None:
        (folder / "conf").mkdir()
        (folder / "conf/my.yaml").write_bytes(content.encode() if isinstance(content, str) else content)

    return setup


def of_yaml(*arguments: str) -> list[str]:
    return ["pretrain", *arguments, *TINY]


PLACES: dict[str, tuple[list[str], Expected]] = {
    "with its ending": (["--config-path", "conf", "--config-name", "my.yaml"], Right(trained)),
    "an absolute folder": (["--config-path", "{folder}/conf", "--config-name", "my"], Right(trained)),
    "the folder is the file": (["--config-path", "conf/my.yaml", "--config-name", "my"], Refused(("my.yaml",))),
    "no such folder": (["--config-path", "confg", "--config-name", "my"], Refused(("confg",))),
    "no such name": (["--config-path", "conf", "--config-name", "mine"], Refused(("mine",))),
    "a name of nothing": (["--config-path", "conf", "--config-name", ""], Refused()),
    "a folder as the name": (["--config-path", ".", "--config-name", "conf"], Refused(("conf",))),
    "out of the folder": (
        ["--config-path", "audio", "--config-name", "../conf/my"],
        maybe("my"),
    ),
    "a built-in name with a path": (
        ["--config-path", "conf", "--config-name", "nest_demo"],
        maybe("nest_demo"),
    ),
}

# ------------------------------------------------------------------------------------------ other commands' own options


def models(folder: Path) -> None:
    for name in ("model.nemo", "model.ckpt"):
        shutil.copy(Fixture.path / name, folder)


def labelled(folder: Path) -> None:
    """Eight utterances in two classes, to probe with."""
    models(folder)
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    write_lines(folder / "probe.jsonl", [{**line, "label": "ab"[i % 2], "one": "x"} for i, line in enumerate(lines)])


def unchanged(folder: Path, outcome: Outcome) -> str | None:
    return f"changed {outcome.changed[:4]}" if outcome.changed else None


def says(*words: str) -> Check:
    return said(*words, then=ended_well)


def audio_kept(folder: Path, outcome: Outcome) -> str | None:
    changed = [name for name in snapshot(Fixture.path / "audio") if f"audio/{name}" in outcome.changed]
    return f"changed {changed}" if changed else None


def two_models(folder: Path) -> None:
    """Features of one model are there; the other has trained for longer."""
    models(folder)
    shutil.copy(Fixture.path / "runs/whole/checkpoints/whole.nemo", folder / "other.nemo")
    if in_fork(["extract", "model.nemo", "audio/0.wav", "out", "--device", "cpu"], folder, {}, 60).code != 0:
        raise RuntimeError("extract failed")


def demo_made(seconds: float, rate: int, train: int) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        lines = [json.loads(line) for line in (folder / "d/train.jsonl").read_text().splitlines()]
        if len(lines) != train:
            return f"{len(lines)} utterances"
        wrong = [line["duration"] for line in lines if not 0.5 * seconds <= line["duration"] <= 2 * seconds]
        return f"durations {wrong}" if wrong else None

    return check


def features_of(shape: tuple[int, ...], files: int = 1) -> Check:
    import numpy as np

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = [np.load(path).shape for path in (folder / "out").rglob("*.npy")]
        if len(found) != files or any(one[: len(shape)] != shape for one in found):
            return f"features of shapes {found}"
        return finite_features(folder, outcome)

    return check


EXTRACT: dict[str, Expected] = {
    "--layers 5": Refused(("5", "layer")),
    "--layers 0,0": Either(Refused(("layer",)), Right(features_of((1, 32)))),
    "--layers 0-1": Refused(("0-1",)),
    "--layers=-7": Refused(("-7",)),
    "--layers ''": Refused(("layers",)),
    "--layers 1": Right(features_of((1, 32))),
    "--layers first": Refused(("first",)),
    "--aggregation weighted": Refused(("weights",)),
    "--aggregation weighted --weights 0.2": Refused(("weights",)),
    "--aggregation weighted --weights nan,1": Refused(("weights",)),
    "--aggregation weighted --weights train.jsonl": Refused(("train.jsonl",)),
    "--aggregation weighted --weights nowhere.json": Refused(("nowhere.json",)),
    "--weights 0.2,0.8": Refused(("weights", "weighted")),
    "--aggregation weighted --weights 0.5,0.5": Right(features_of((32,))),
    "--aggregation cat": Right(features_of((64,))),
    "--format shards --shard-mb 0": Refused(("shard-mb|shard_mb",)),
    "--format shards --shard-mb nan": Refused(("shard-mb|shard_mb",)),
    "--max-duration 0": Refused(("max-duration|max_duration|limit",), partial=True),
    "--max-duration nan": Refused(("max-duration|max_duration",)),
    "--batch-seconds 0": Refused(("batch-seconds|batch_seconds",)),
    "--batch-seconds=-5": Refused(("batch-seconds|batch_seconds",)),
    "--batch-seconds 1e-9": Either(Refused(("batch",)), Right(features_of((2, 32)))),
    "--device banana": Refused(("banana",)),
    "--device meta": Refused(("meta",)),
    "--dtype float16": Right(features_of((2, 32))),
}
PROBE: dict[str, Expected] = {
    "--label label --snr 0": Refused(("noise",)),
    "--label label --noise valid.jsonl": Refused(("snr",)),
    "--label label --snr nan --noise valid.jsonl": Refused(("snr",)),
    "--label label --task mine": Refused(("task",)),
    "": Refused(("label",)),
    "--task mine": Refused(("mine",)),
    "--label one": Refused(("one",)),  # a single class
    "--label label --layers 9": Refused(("9",)),
    "--label label --head attentive --lr nan": Refused(("lr",)),
    "--label label --head attentive --lr=-1": Refused(("lr",)),
    "--label label --head linear --finetune": Refused(("attentive",)),
    "--label label --labels-per-class 100": Either(
        Refused(("labels-per-class|labels_per_class|100",)), Right(ended_well)
    ),
    "--label label --device banana": Refused(("banana",)),
    "--label label --seed=-1": Refused(("seed",)),
}
OTHERS: dict[str, tuple[Setup | None, Expected]] = {
    "inspect train.jsonl --batch-size 0": (None, Refused(("batch-size",))),
    "inspect train.jsonl --seed=-1": (None, Refused(("seed",))),
    "inspect train.jsonl --config-name nowhere": (None, Refused(("nowhere",))),
    "inspect train.jsonl model.train_ds.nowhere=1": (None, Refused(("nowhere",))),
    "inspect train.jsonl --output audio": (None, Refused(("audio",))),
    "inspect train.jsonl model.masking.mask_prob=0": (None, Refused(("mask_prob",))),
    "inspect train.jsonl model.train_ds.min_duration=50": (None, Right(says("Nothing is left to train on"))),
    "inspect train.jsonl --output audio/0.wav": (None, Refused(("0.wav",))),
    "inspect train.jsonl --batch-size 1000000000": (None, Right(says("inspect.html"))),
    "inspect train.jsonl --examples 1000 --batch-size 1": (None, Right(says("8 example batches"))),
    f"report {RUN} --output {RUN}/checkpoints/last.ckpt": (Fixture.run, Refused(("last.ckpt",))),
    "inspect train.jsonl --output train.jsonl": (None, Refused(("train.jsonl",))),  # it would overwrite the manifest
    "demo --data-dir d --num-train 0 --synthesizer formants": (None, Refused(("num-train|num_train",))),
    "demo --data-dir d --num-train=-3": (None, Refused(("num-train|num_train",))),
    "demo --data-dir d --duration 0": (None, Refused(("duration",))),
    "demo --data-dir d --duration nan": (None, Refused(("duration",))),
    "demo --data-dir d --duration 1e9 --num-train 1": (None, Refused(("duration|memory",))),
    "demo --data-dir d --sample-rate 10": (None, Refused(("sample-rate|sample_rate",))),
    "demo --data-dir d --seed=-1": (None, Refused(("seed",))),
    "demo --data-dir audio": (None, Refused(("audio",))),
    "demo --data-dir audio --overwrite": (None, Refused(("audio",))),
    "demo --data-dir . --overwrite": (None, Refused()),
    "demo --data-dir train.jsonl --overwrite": (None, Refused(("train.jsonl",))),
    "demo --data-dir d --num-train 2 --num-val 1 --num-noise 1 --duration 1.5 --sample-rate 8000 "
    "--synthesizer formants": (
        None,
        Right(demo_made(1.5, 8000, 2)),
    ),
    "doctor nowhere": (None, Refused(("nowhere",))),
    "doctor audio": (None, Refused(("audio",))),
    "doctor train.jsonl": (None, Refused(("train.jsonl",))),
    "doctor --config-name nowhere": (None, Refused(("nowhere",))),
    "report audio": (None, Refused(("audio",))),
    "report train.jsonl": (None, Refused(("train.jsonl",))),
    f"report {RUN} --output audio": (Fixture.run, Refused(("audio",))),
    "info nowhere": (None, Refused(("nowhere",))),
    "info train.jsonl": (None, Refused(("train.jsonl",))),
    "info audio": (None, Refused(("audio",))),
    "info nest_fast-conformer size=huge": (None, Refused(("huge",))),
    "info nest_fast-conformer nest_demo model.nemo": (models, Refused()),
    "info model.nemo model.encoder.n_layers=3": (models, Refused(("n_layers|model.nemo",))),
    "info nest_fast-conformer model.encoder.n_layers=1000000000": (None, Refused(("n_layers|memory",))),
    "info nest_fast-conformer model.encoder.d_model=-8": (None, Refused(("d_model",))),
    "info": (None, Refused()),
    "verify model.nemo": (models, Right(says("Not compared with NeMo"))),
    "verify model.nemo --report train.jsonl": (models, Refused(("train.jsonl",))),
    "verify model.nemo --nemo-python /bin/true": (models, Refused(("/bin/true",))),
    "verify model.nemo --nemo-python /nowhere/python": (models, Refused(("/nowhere/python",))),
    "verify model.nemo --recorded train.jsonl": (models, Refused(("train.jsonl|batch.npz",))),
    "verify nowhere.nemo": (None, Refused(("nowhere.nemo",))),
    "export model.nemo out --format pt": (models, Refused(("pt",))),
    "export model.nemo audio": (models, Either(Refused(("audio",)), Right(audio_kept))),
    "export model.nemo audio/0.wav --format safetensors": (models, Refused(("0.wav",))),
    "export model.nemo audio --format onnx": (models, Refused(("audio",))),
    "export model.nemo train.jsonl --format nemo": (models, Refused(("train.jsonl",))),
    "export model.nemo model.nemo --format nemo": (models, Either(Refused(("model.nemo",)), Right(unchanged))),
    "export nowhere.nemo out": (None, Refused(("nowhere.nemo",))),
    "extract model.nemo nowhere out --device cpu": (models, Refused(("nowhere",))),
    "extract model.nemo audio train.jsonl --device cpu": (models, Refused(("train.jsonl",))),
    "extract other.nemo audio out --device cpu": (two_models, Refused(("out",))),
    "extract model.nemo audio out --device cpu --format shards": (two_models, Refused(("out",))),
    "frobnicate": (None, Refused(("frobnicate",))),
}

# ----------------------------------------------------------------------------------------------------- starting weights


def some_left_out(folder: Path, outcome: Outcome) -> str | None:
    found = re.search(r"(\d+) loaded\s+(\d+) left out", outcome.text)
    if not found or not 0 < int(found[2]) < int(found[1]):
        return "not a part of the model was left out"
    return trained(folder, outcome)


INIT: dict[str, Expected] = {
    "init_from_nemo_model=model.nemo": Right(said("loaded")),
    "init_from_ptl_ckpt=model.ckpt": Right(said("loaded")),
    "init_from_nemo_model=model.nemo init_from_ptl_ckpt=model.ckpt": Refused(("init_from",)),
    "init_from_nemo_model={base:{path:model.nemo,include:[decodr]}}": Refused(("include|decodr|no parameter",)),
    "init_from_nemo_model={base:{path:model.nemo,exclude:[e,d,q,p]}}": Refused(("exclude|init_from",)),
    "init_from_nemo_model={base:{path:model.nemo,include:encoder}}": Either(
        Refused(("include",)), Right(some_left_out)
    ),
    "init_from_nemo_model={base:{path:model.nemo,include:[encoder]}}": Right(some_left_out),
    "init_from_nemo_model={base:{include:[encoder]}}": Refused(("path",)),
    "init_from_nemo_model={base:{path:model.nemo,inclde:[encoder]}}": Refused(("inclde",)),
    "init_from_nemo_model=[model.nemo]": Either(Refused(("init_from_nemo_model",)), Right(said("loaded"))),
    "init_from_nemo_model=": Refused(("init_from_nemo_model",)),
    "init_from_nemo_model=train.jsonl": Refused(("train.jsonl",)),
    "init_from_pretrained_model=nobody/no-such-model": Refused(("no-such-model",)),
}


def trials() -> Iterator[Trial]:
    for added, words in ALWAYS_REFUSED.items():
        yield Trial(GROUP, f"refused: {added}", pretrain(*shlex.split(added)), Refused(tuple(words.split())))
    for added, right in ODD_BUT_RIGHT.items():
        yield Trial(GROUP, f"right: {added}", pretrain(*shlex.split(added)), Right(right))
    for added, words in EITHER.items():
        expected: Expected = Either(Refused(tuple(words.split())), Right(trained))
        yield Trial(GROUP, f"either: {added}", pretrain(*shlex.split(added)), expected)
    for added, expected in LATER.items():
        yield Trial(GROUP, f"later: {added}", pretrain(*shlex.split(added)), expected)
    for added, expected in RESUMED.items():
        yield Trial(GROUP, f"resumed: {added}", resume(*shlex.split(added)), expected, Fixture.run)
    for name, (content, expected) in YAML.items():
        command = of_yaml("--config-path", "conf", "--config-name", "my")
        yield Trial(GROUP, f"yaml: {name}", command, expected, yaml_file(content))
    for name, (arguments, expected) in PLACES.items():
        yield Trial(GROUP, f"yaml place: {name}", of_yaml(*arguments), expected, yaml_file(DEFAULTS))
    for added, expected in INIT.items():
        yield Trial(GROUP, f"weights: {added}", pretrain(*shlex.split(added)), expected, models)
    base = ["extract", "model.nemo", "audio/0.wav", "out", "--device", "cpu"]
    for added, expected in EXTRACT.items():
        yield Trial(GROUP, f"extract {added}", [*base, *shlex.split(added)], expected, models)
    base = ["probe", "model.nemo", "--train", "probe.jsonl", "--test", "probe.jsonl", "--output", "out"]
    for added, expected in PROBE.items():
        yield Trial(GROUP, f"probe {added}", [*base, "--device", "cpu", *shlex.split(added)], expected, labelled)
    for line, (setup, expected) in OTHERS.items():
        yield Trial(GROUP, line, shlex.split(line), expected, setup)
    yield from with_environment()
    wandb = pretrain("exp_manager.create_wandb_logger=true")
    yield Trial(GROUP, "either: wandb without a login", wandb, maybe("wandb"), own_process=True)
    misspelt = [*wandb, "exp_manager.wandb_logger_kwargs.projekt=x", "exp_manager.wandb_logger_kwargs.mode=offline"]
    yield Trial(GROUP, "refused: a misspelt key of wandb's", misspelt, Refused(("projekt",)), own_process=True)


def with_environment() -> Iterator[Trial]:
    rate = "model.optim.lr=${oc.env:MY_RATE}"
    rows: Mapping[str, tuple[str, Expected]] = {
        "a number": ("0.05", Right(loads)),
        "a text": ("fast", Refused(("lr",))),
        "nothing": ("", Refused(("lr|MY_RATE",))),
        "another interpolation": ("${oc.env:HOME}", Refused(("lr",))),
    }
    for name, (value, expected) in rows.items():
        yield Trial(GROUP, f"environment: {name}", pretrain(rate), expected, environment={"MY_RATE": value})
    default = "model.optim.lr=${oc.env:MY_RATE,0.05}"
    yield Trial(GROUP, "environment: a default", pretrain(default), Right(loads))
    resumed_rate = resume("model.optim.weight_decay=${oc.env:MY_DECAY}")
    yield Trial(
        GROUP,
        "environment: no longer set, resumed",
        resumed_rate,
        Refused(("MY_DECAY",)),
        Fixture.run,
    )
