"""Model files as other programs, other versions, copies and hand edits leave them, and commands given the wrong one.

A model either gives the features of the undamaged one, or is refused by its name and what is wrong with it.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from benchmarks.hostile.harness import (
    EVIL,
    Check,
    Either,
    Expected,
    Fixture,
    Outcome,
    Refused,
    Right,
    Setup,
    Trial,
    always,
    both,
    cut,
    ended_well,
    finite_features,
    flipped,
    in_process,
    link,
    nothing,
    on_bytes,
    patched,
    pretrain,
    replaced,
    said,
    same_features,
    write_lines,
)
from safetensors.torch import load_file, save_file

GROUP = "model files"
NEMO, CKPT, SAFE = Path("model.nemo"), Path("model.ckpt"), Path("model.safetensors")
CONFIG, WEIGHTS = "model_config.yaml", "model_weights.ckpt"
Q = "encoder.layers.0.self_attn.linear_q.weight"
NORM = "encoder.layers.1.conv.batch_norm.running_var"
Weights = dict[str, Any]
Members = list[tuple[str, bytes]]
SAME = Right(same_features)


def extract(file: str | Path, *options: str) -> list[str]:
    return ["extract", str(file), "audio/0.wav", "out", "--device", "cpu", *options]


def same_or(*words: str) -> Either:
    return Either(Refused(words), SAME)


# ------------------------------------------------------------------------------------------------ files of other programs


def all_models(folder: Path) -> None:
    for name in (NEMO, CKPT, SAFE):
        shutil.copy(Fixture.path / name, folder)


def saved(content: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = {Path(member.name).name: archive.extractfile(member) for member in archive if member.isfile()}
        return {name: file.read() for name, file in found.items() if file}


def weights_of(path: Path) -> Weights:
    content: Weights = torch.load(io.BytesIO(members(path)[WEIGHTS]), weights_only=True)
    return content


def write_tar(path: Path, content: Members, mode: str = "w:", kind: int = tarfile.GNU_FORMAT) -> None:
    """An archive as `tar` writes it: without the checksums that ours have in their headers."""
    with tarfile.open(path, mode, format=kind) as archive:  # type: ignore[call-overload]
        for name, data in content:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def nemo_content() -> tuple[Weights, dict[str, Any]]:
    """Weights and configuration of the fixture's model, as NeMo would have them."""
    config = yaml.safe_load(members(Fixture.path / NEMO)[CONFIG])
    config.pop("nest_ssl_version")
    return weights_of(Fixture.path / NEMO), {**config, "nemo_version": "2.7.3"}


def as_yaml(config: object) -> bytes:
    return yaml.safe_dump(config, sort_keys=False).encode()


def with_weights(change: Callable[[Weights], object], **options: Any) -> Setup:
    """NeMo's file with other weights; what `change` returns takes their place, if it is not None."""

    def setup(folder: Path) -> None:
        weights, config = nemo_content()
        new = change(weights)
        content = saved(weights if new is None else new, **options)
        write_tar(folder / NEMO, [(f"./{CONFIG}", as_yaml(config)), (f"./{WEIGHTS}", content)])

    return setup


def with_config(changes: Mapping[str, Any]) -> Setup:
    """NeMo's file with other values of these keys (`encoder.n_layers`)."""

    def change(config: dict[str, Any]) -> bytes:
        for key, value in changes.items():
            *sections, last = key.split(".")
            section = config
            for name in sections:
                section = section.setdefault(name, {})
            section[last] = value
        return as_yaml(config)

    return with_yaml(change)


def with_yaml(change: Callable[[dict[str, Any]], bytes]) -> Setup:
    def setup(folder: Path) -> None:
        weights, config = nemo_content()
        write_tar(folder / NEMO, [(f"./{CONFIG}", change(config)), (f"./{WEIGHTS}", saved(weights))])

    return setup


def text_changed(old: str, new: str) -> Setup:
    return with_yaml(lambda config: as_yaml(config).decode().replace(old, new, 1).encode())


def with_members(make: Callable[[bytes, bytes], Members], **options: Any) -> Setup:
    """A file packed by hand from the configuration and the weights."""

    def setup(folder: Path) -> None:
        weights, config = nemo_content()
        write_tar(folder / NEMO, make(as_yaml(config), saved(weights)), **options)

    return setup


def every(change: Callable[[Any], Any], start: str = "") -> Callable[[Weights], Weights]:
    """Change every tensor of floats whose name starts so."""

    def changed(weights: Weights) -> Weights:
        return {
            name: change(value) if value.is_floating_point() and name.startswith(start) else value
            for name, value in weights.items()
        }

    return changed


def one(name: str, change: Callable[[Any], Any]) -> Callable[[Weights], Weights]:
    return lambda weights: {**weights, name: change(weights[name])}


def renamed(old: str, new: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name.replace(old, new, 1): value for name, value in weights.items()}


def without(*parts: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: value for name, value in weights.items() if not any(part in name for part in parts)}


def pruned(weights: Weights) -> None:
    value = weights.pop(Q)
    weights |= {f"{Q}_orig": value, f"{Q}_mask": torch.ones_like(value)}


def adapted(weights: Weights) -> None:
    for part in ("lora_A", "lora_B"):
        weights[Q.replace("weight", f"{part}.default.weight")] = torch.ones(4, 32)


def as_views(weights: Weights) -> Weights:
    """All tensors are pieces of one, as flat-parameter wrappers save them."""
    flat = torch.cat([value.flatten().double() for value in weights.values()]).float()
    pieces = flat.split([value.numel() for value in weights.values()])
    return {
        name: piece.view(value.shape) if value.dtype == torch.float32 else value
        for (name, value), piece in zip(weights.items(), pieces, strict=True)
    }


def turned(value: Any) -> Any:
    """The same numbers, in memory from the last dimension to the first."""
    return value.permute(*reversed(range(value.dim()))).contiguous().permute(*reversed(range(value.dim())))


def whole_module(weights: Weights) -> object:
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32))


def near(tolerance: float) -> Right:
    """Features like those of the undamaged model, within this share of their size."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        files = list((folder / "out").rglob("*.npy"))
        expected = Fixture.feature()
        if len(files) != 1:
            return f"{len(files)} feature files"
        apart = float(np.abs(np.load(files[0]) - expected).max() / np.abs(expected).max())
        return None if apart <= tolerance else f"features are {apart:.2g} of their size apart"

    return Right(check)


def other_model(path: str | Path) -> Setup:
    """The same configuration, other weights."""
    return both(with_weights(every(lambda value: value * 1.25, "encoder.layers")), moved(NEMO, path))


def moved(old: str | Path, new: str | Path) -> Setup:
    def setup(folder: Path) -> None:
        if old != new:
            (folder / new).parent.mkdir(parents=True, exist_ok=True)
            (folder / old).rename(folder / new)

    return setup


def appended(folder: Path) -> None:
    """`tar --append` of an edited configuration: the archive has two; unpacking gives the second."""
    config = nemo_content()[1]
    config["encoder"]["n_layers"] = 3
    with tarfile.open(folder / NEMO, "a") as archive:
        member = tarfile.TarInfo(f"./{CONFIG}")
        data = as_yaml(config)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))


def unpacked(folder: Path) -> None:
    (folder / "unpacked").mkdir()
    for name, data in members(folder / NEMO).items():
        (folder / "unpacked" / name).write_bytes(data)


def zipped(folder: Path) -> None:
    content = members(folder / NEMO)
    with zipfile.ZipFile(folder / NEMO, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)


CONTAINERS: list[tuple[str, Setup, str | Path, Expected]] = [
    ("control: repacked as NeMo does", with_weights(lambda weights: None), NEMO, SAME),
    ("gzip inside, as NeMo 1.0 wrote", with_members(lambda c, w: [(CONFIG, c), (WEIGHTS, w)], mode="w:gz"), NEMO, SAME),
    ("names without ./", with_members(lambda c, w: [(CONFIG, c), (WEIGHTS, w)]), NEMO, SAME),
    ("weights before configuration", with_members(lambda c, w: [(WEIGHTS, w), (CONFIG, c)]), NEMO, SAME),
    ("old ustar archive", with_members(lambda c, w: [(CONFIG, c), (WEIGHTS, w)], kind=tarfile.USTAR_FORMAT), NEMO, SAME),
    ("packed with its folder", with_members(lambda c, w: [(f"m/{CONFIG}", c), (f"m/{WEIGHTS}", w)]), NEMO, same_or("model.nemo")),
    ("packed on a Mac", with_members(lambda c, w: [(f"./._{CONFIG}", b"\0\5\x16\7Mac"), (f"./{CONFIG}", c), (f"./._{WEIGHTS}", b"\0\5\x16\7Mac"), (f"./{WEIGHTS}", w)]), NEMO, same_or("model.nemo")),
    ("with a tokenizer and a README", with_members(lambda c, w: [("README.md", b"hi"), (f"./{CONFIG}", c), (f"./{WEIGHTS}", w), ("./a1_vocab.txt", b"a\nb\n")]), NEMO, SAME),
    ("sharded weights of NeMo 2", with_members(lambda c, w: [(f"./{CONFIG}", c), ("./model_weights/metadata.json", b"{}"), ("./model_weights/__0_0.distcp", w)]), NEMO, Refused(("model.nemo",))),
    ("an edited configuration appended", appended, NEMO, Refused(("model.nemo",))),
    ("weights twice, the second of another run", with_members(lambda c, w: [(CONFIG, c), (WEIGHTS, w), (WEIGHTS, saved({}))]), NEMO, Refused(("model.nemo",))),
    ("zip instead of tar", zipped, NEMO, same_or("model.nemo")),
    ("unpacked into a folder", unpacked, "unpacked", same_or("unpacked")),
    ("the run folder instead of the file", Fixture.run, "runs/run", Refused(("runs/run",))),
    ("the checkpoints folder instead of the file", Fixture.run, "runs/run/checkpoints", Refused(("checkpoints",))),
    ("hparams.yaml instead of the file", Fixture.run, "runs/run/hparams.yaml", Refused(("hparams.yaml",))),
    ("a manifest instead of the file", all_models, "train.jsonl", Refused(("train.jsonl",))),
    ("the audio and the model swapped", all_models, "audio/0.wav", Refused(("0.wav",))),
    ("pointer of Git LFS", replaced(lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 409600\n"), NEMO), NEMO, Refused(("model.nemo",))),
    ("a login page saved as safetensors", replaced(lambda path: path.write_text("<!DOCTYPE html><html><title>Sign in</title></html>\n" * 9), SAFE), SAFE, Refused(("model.safetensors",))),
    ("a login page saved as nemo", replaced(lambda path: path.write_text("<!DOCTYPE html><html><title>Sign in</title></html>\n" * 90), NEMO), NEMO, Refused(("model.nemo",))),
    ("gzipped ckpt", on_bytes(gzip.compress, CKPT), CKPT, same_or("model.ckpt")),
    ("ended with a line feed", on_bytes(lambda data: data + b"\n", NEMO), NEMO, same_or("model.nemo")),
    ("the file twice in one (cat a a)", on_bytes(lambda data: data + data, NEMO), NEMO, same_or("model.nemo")),
    ("safetensors with a line feed after it", on_bytes(lambda data: data + b"\n", SAFE), SAFE, same_or("model.safetensors")),
    ("ckpt with zeros after it", on_bytes(lambda data: data + bytes(4096), CKPT), CKPT, same_or("model.ckpt")),
    ("ckpt named nemo", moved(CKPT, "new.nemo"), "new.nemo", same_or("new.nemo")),
    ("nemo named ckpt", moved(NEMO, "new.ckpt"), "new.ckpt", same_or("new.ckpt")),
    ("safetensors named nemo", moved(SAFE, "new.nemo"), "new.nemo", same_or("new.nemo")),
    ("nemo named safetensors", moved(NEMO, "new.safetensors"), "new.safetensors", same_or("new.safetensors")),
    ("name in capitals", moved(NEMO, "MODEL.NEMO"), "MODEL.NEMO", same_or("MODEL.NEMO")),
    ("name with (1) of a second download", moved(NEMO, "model.nemo (1)"), "model.nemo (1)", same_or("model.nemo (1)")),
    ("link into a cache of blobs", both(moved(NEMO, "blobs/4d7a21f3"), replaced(link("blobs/4d7a21f3"), NEMO)), NEMO, SAME),
    ("link whose blob is gone", replaced(link("blobs/4d7a21f3"), NEMO), NEMO, Refused(("model.nemo",))),
    ("index of sharded safetensors", replaced(lambda path: path.write_text(json.dumps({"metadata": {}, "weight_map": {Q: "model-00001-of-00002.safetensors"}})), Path("model.safetensors.index.json")), "model.safetensors.index.json", Refused(("index.json",))),
    ("ckpt named pt", moved(CKPT, "model.pt"), "model.pt", same_or("model.pt")),
    ("weights alone as pth", lambda folder: (folder / "w.pth").write_bytes(saved(nemo_content()[0])), "w.pth", Refused(("w.pth",))),
    ("weights of an unpacked nemo", unpacked, f"unpacked/{WEIGHTS}", same_or(WEIGHTS)),
    ("configuration of an unpacked nemo", unpacked, f"unpacked/{CONFIG}", Refused((CONFIG,))),
    ("an ONNX file", replaced(lambda path: path.write_bytes(b"\x08\x08\x12\x07pytorch\x1a\x062.13.0:" + bytes(999)), Path("nest.onnx")), "nest.onnx", Refused(("nest.onnx",))),
    ("a folder that is named like a file", replaced(Path.mkdir, Path("nest.nemo")), "nest.nemo", Refused(("nest.nemo",))),
    ("a name without its ending", all_models, "model", Refused(("model",))),
    ("a pipe with nobody at its other end", replaced(os.mkfifo, Path("pipe.nemo")), "pipe.nemo", Refused(("pipe.nemo",))),
    ("pickle that runs a command", with_members(lambda c, w: [(CONFIG, c), (WEIGHTS, EVIL)]), NEMO, Refused(("model.nemo",))),
]  # fmt: skip

DAMAGE: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("cut at half", cut(0.5)),
    ("last 16 KB lost", lambda data: data[: -(1 << 14)]),
    ("second half zeros, right size", lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2)),
    ("resumed download, a part twice", lambda data: data[: len(data) // 2] + data[len(data) // 3 :]),
    ("sent as text (CRLF)", lambda data: data.replace(b"\n", b"\r\n")),
    ("a page of zeros in the middle", lambda data: patched(data, len(data) // 3, bytes(4096))),
    ("bit flipped near the end", flipped(0.9)),
]

TENSORS: list[tuple[str, Callable[[Weights], object], Expected]] = [
    ("prefix module. of DDP", renamed("", "module."), same_or("module.")),
    ("prefix _orig_mod. of torch.compile", renamed("", "_orig_mod."), same_or("_orig_mod.")),
    ("prefix model. of Lightning", renamed("", "model."), same_or("model.")),
    ("only the encoder compiled", renamed("encoder.", "encoder._orig_mod."), same_or("_orig_mod.")),
    ("a whole checkpoint as weights", lambda weights: {"state_dict": weights, "epoch": 3}, same_or("state_dict|model.nemo")),
    ("bfloat16", every(lambda value: value.bfloat16()), Either(Refused(("bfloat16",)), near(0.1))),
    ("float16", every(lambda value: value.half()), Either(Refused(("float16",)), near(0.05))),
    ("float64", every(lambda value: value.double()), same_or("float64")),
    ("float8", every(lambda value: value.to(torch.float8_e4m3fn), "encoder"), Either(Refused(("float8",)), near(0.5))),
    ("float16 that overflowed", one(Q, lambda value: (value * 1e6).half()), Refused((Q,))),
    ("averaged: counters are floats", lambda weights: {k: v.float() if "tracked" in k else v for k, v in weights.items()}, same_or("num_batches_tracked")),
    ("averaged: a variance below zero", one(NORM, lambda value: value - value.max() - 1e-6), Refused(("running_var",))),
    ("one variance is NaN", one(NORM, lambda value: value.index_fill(0, torch.tensor([3]), float("nan"))), Refused(("running_var",))),
    ("parameters only, no buffers", lambda weights: {k: torch.nn.Parameter(v) for k, v in weights.items() if v.is_floating_point() and "running" not in k and "featurizer" not in k and "quantizer" not in k}, Refused(("running_mean|running_var|featurizer|quantizer",))),
    ("without counters", without("num_batches_tracked"), same_or("num_batches_tracked")),
    ("without a bias", without("linear1.bias"), Refused(("linear1.bias",))),
    ("encoder and mels only", without("decoder", "quantizer", "mask_processor"), same_or("decoder|quantizer|mask")),
    ("without mel filters", without("featurizer"), same_or("featurizer")),
    ("pruned, not made permanent", pruned, Refused(("weight_orig|weight_mask|linear_q.weight",))),
    ("adapters of LoRA left in", adapted, Refused(("lora",))),
    ("empty tensors of a sharded rank", every(lambda value: torch.empty(0), "encoder.layers"), Refused(("encoder.layers",))),
    ("encoder all zeros", every(torch.zeros_like, "encoder"), Refused(("encoder",))),
    ("tensors on meta", every(lambda value: value.to("meta"), "encoder"), Refused(("encoder",))),
    ("sparse tensors", one(Q, lambda value: value.to_sparse()), same_or("linear_q")),
    ("pieces of one flat tensor", as_views, SAME),
    ("tensors not contiguous", every(turned), SAME),
    ("weights of 1e30", every(lambda value: value * 1e30, "encoder.layers.0.feed_forward1"), Either(Refused(("feed_forward1|finite",)), Right(finite_features))),
    ("numpy arrays", lambda weights: {name: value.numpy() for name, value in weights.items()}, same_or("model.nemo")),
    ("a pickled module", whole_module, Refused(("model.nemo",))),
    ("a list of tensors, no names", lambda weights: list(weights.values()), Refused(("model.nemo",))),
    ("complex weights", one(Q, lambda value: value.to(torch.complex64)), Refused(("linear_q",))),
    ("one layer is another's shape", one(Q, lambda value: value[:16]), Refused(("linear_q",))),
    ("a layer more than the configuration", lambda weights: {**weights, **{k.replace("layers.1.", "layers.2."): v for k, v in weights.items() if "layers.1." in k}}, Refused(("layers.2",))),
]  # fmt: skip

CONFIGS: list[tuple[str, Setup, Expected]] = [
    ("window_size in ms", with_config({"preprocessor.window_size": 25}), Refused(("window_size|window",))),
    ("window_stride in ms", with_config({"preprocessor.window_stride": 10}), Refused(("window_stride",))),
    ("window_stride of 0", with_config({"preprocessor.window_stride": 0}), Refused(("window_stride",))),
    ("rate in kHz", with_config({"sample_rate": 16, "preprocessor.sample_rate": 16}), Refused(("sample_rate|filter|window",))),
    ("rate as text 16k", with_config({"sample_rate": "16k", "preprocessor.sample_rate": "16k"}), Refused(("sample_rate",))),
    ("normalize misspelt", with_config({"preprocessor.normalize": "per_features"}), Refused(("normalize",))),
    ("pad_to below zero", with_config({"preprocessor.pad_to": -16}), Refused(("pad_to",))),
    ("mag_power NaN", with_config({"preprocessor.mag_power": float("nan")}), Refused(("mag_power",))),
    ("log_zero_guard_value of 0", with_config({"preprocessor.log_zero_guard_value": 0.0}), Either(Refused(("log_zero_guard",)), Right(finite_features))),
    ("dither as YAML 1.1 reads it", text_changed("dither: 1.0e-05", "dither: 1e-5"), same_or("dither")),
    ("n_heads does not fit", with_config({"encoder.n_heads": 8}), Refused(("pos_bias|n_heads",))),
    ("norm of another model", with_config({"encoder.conv_norm_type": "layer_norm"}), Refused(("batch_norm|conv_norm_type",))),
    ("kernel size even", with_config({"encoder.conv_kernel_size": 8}), Refused(("kernel",))),
    ("factor not a power of two", with_config({"encoder.subsampling_factor": 6}), Refused(("subsampling_factor",))),
    ("n_layers 2.0", text_changed("n_layers: 2", "n_layers: 2.0"), same_or("n_layers")),
    ("n_layers an expression", text_changed("n_layers: 2", "n_layers: ${model.layers}"), Refused(("n_layers|model.layers",))),
    ("d_model quoted", text_changed("d_model: 32", "d_model: '32'"), same_or("d_model")),
    ("d_model null", text_changed("d_model: 32", "d_model: null"), Refused(("d_model",))),
    ("d_model too large for any machine", text_changed("d_model: 32", "d_model: 32000000"), Refused(("d_model|memory",))),
    ("n_layers below 0", text_changed("n_layers: 2", "n_layers: -2"), Refused(("n_layers",))),
    ("a key of a newer NeMo", with_config({"encoder.use_flash_attention_4": True}), same_or("use_flash_attention_4")),
    ("a key twice", text_changed("  n_layers: 2\n", "  n_layers: 2\n  n_layers: 17\n"), Refused(("n_layers",))),
    ("marks of a merge conflict", with_yaml(lambda config: b"<<<<<<< HEAD\n" + as_yaml(config) + b"=======\n>>>>>>> main\n"), Refused((CONFIG,))),
    ("tab in the YAML", text_changed("  n_layers: 2", "\tn_layers: 2"), Refused((CONFIG,))),
    ("saved as UTF-16", with_yaml(lambda config: as_yaml(config).decode().encode("utf-16")), same_or(CONFIG)),
    ("byte order mark and CRLF", with_yaml(lambda config: b"\xef\xbb\xbf" + as_yaml(config).replace(b"\n", b"\r\n")), same_or(CONFIG)),
    ("below model:, as in hparams.yaml", with_yaml(lambda config: as_yaml({"model": config})), same_or("model.nemo")),
    ("a list", with_yaml(lambda config: as_yaml([config])), Refused((CONFIG,))),
    ("empty", with_yaml(lambda config: b""), Refused((CONFIG,))),
    ("of a recogniser", with_config({"target": "nemo.collections.asr.models.EncDecCTCModelBPE", "decoder": {"_target_": "nemo.collections.asr.modules.ConvASRDecoder", "num_classes": 1024}}), same_or("EncDecCTCModelBPE|ConvASRDecoder|decoder")),
    ("another window than the weights", with_config({"preprocessor.window": "hamming"}), Refused(("window",))),
    ("preemph in percent", with_config({"preprocessor.preemph": 97}), Refused(("preemph",))),
    ("highfreq of another rate", with_config({"preprocessor.highfreq": 4000}), Refused(("fb|filter|highfreq",))),
    ("mel_norm misspelt", with_config({"preprocessor.mel_norm": "slaney_"}), Refused(("mel_norm",))),
    ("window misspelt", with_config({"preprocessor.window": "hanning"}), same_or("window")),
    ("log switched off as a text", with_config({"preprocessor.log": "false"}), Refused(("preprocessor.log",))),
    ("xscaling as a text", with_config({"encoder.xscaling": "no"}), Refused(("xscaling",))),
    ("dropout in percent", with_config({"encoder.dropout": 10}), Refused(("dropout",))),
    ("context of no frames", with_config({"encoder.att_context_size": [-5, 0]}), Refused(("att_context_size",))),
    ("context of one number", with_config({"encoder.att_context_size": 128}), Refused(("att_context_size",))),
    ("reduction inside the encoder", with_config({"encoder.reduction": "pooling", "encoder.reduction_factor": 2}), Refused(("reduction",))),
    ("pos_emb_max_len of 10**15", with_config({"encoder.pos_emb_max_len": 10**15}), same_or("pos_emb_max_len")),
    ("an encoder of my company", with_config({"encoder._target_": "company.modules.OurEncoder"}), Refused(("company.modules.OurEncoder",))),
    ("a secret of the environment", with_config({"train_ds.manifest_filepath": "${oc.env:HOME}/m.jsonl"}), Refused(("oc.env",))),
    ("training data that is not there", with_config({"train_ds.manifest_filepath": "/gone/*.jsonl", "validation_ds": None}), SAME),
    ("no optimizer, no data", with_yaml(lambda config: as_yaml({k: v for k, v in config.items() if k not in {"optim", "train_ds", "validation_ds", "loss"}})), same_or("model.nemo")),
    ("a comment in Latin-1", with_yaml(lambda config: "# f\xfcr Anna\n".encode("latin-1") + as_yaml(config)), same_or(CONFIG)),
    ("a second document in the YAML", with_yaml(lambda config: as_yaml(config) + b"---\nencoder: {n_layers: 17}\n"), Refused((CONFIG,))),
    ("a date for a name", with_config({"nemo_version": "2026-11-19", "name": "12:30:45"}), same_or("name")),
    ("no preprocessor", with_yaml(lambda config: as_yaml({k: v for k, v in config.items() if k != "preprocessor"})), Refused(("preprocessor",))),
]  # fmt: skip


def strange_checkpoint(change: Callable[[dict[str, Any]], object]) -> Setup:
    def setup(folder: Path) -> None:
        content = torch.load(folder / CKPT, weights_only=True)
        new = change(content)
        torch.save(content if new is None else new, folder / CKPT)

    return setup


def resaved(change: Callable[[Weights], Weights], metadata: dict[str, str] | None) -> Setup:
    """The safetensors file through another program, which may keep a part of the metadata."""

    def setup(folder: Path) -> None:
        path = folder / SAFE
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        old = json.loads(data[8 : 8 + size])["__metadata__"]
        kept = None if metadata is None else {"model_config": old["model_config"], "format": "pt", **metadata}
        save_file({name: value.contiguous() for name, value in change(load_file(path)).items()}, path, kept)

    return setup


CHECKPOINTS: list[tuple[str, Setup, Path, Expected]] = [
    ("ckpt with hyper-parameters as a Namespace", strange_checkpoint(lambda content: {**content, "hyper_parameters": argparse.Namespace(**content["hyper_parameters"])}), CKPT, same_or("model.ckpt")),
    ("ckpt of weights alone", strange_checkpoint(lambda content: content["state_dict"]), CKPT, Refused(("model.ckpt",))),
    ("ckpt of the optimizer alone", strange_checkpoint(lambda content: {"optimizer_states": content["optimizer_states"]}), CKPT, Refused(("state_dict|weights",))),
    ("ckpt without hyper-parameters", strange_checkpoint(lambda content: content.pop("hyper_parameters") and None), CKPT, Refused(("hyper_parameters|configuration",))),
    ("ckpt whose weights are null", strange_checkpoint(lambda content: {**content, "state_dict": None}), CKPT, Refused(("state_dict|weights",))),
    ("ckpt with hyper-parameters not below cfg", strange_checkpoint(lambda content: {**content, "hyper_parameters": content["hyper_parameters"]["cfg"]}), CKPT, same_or("hyper_parameters|configuration")),
    ("ckpt with tensors of an average besides", strange_checkpoint(lambda content: {**content, "ema_state_dict": content["state_dict"]}), CKPT, SAME),
    ("safetensors without metadata", resaved(dict, None), SAFE, Refused(("model.safetensors",))),
    ("safetensors resaved, without our checksum", resaved(dict, {}), SAFE, SAME),
    ("safetensors resaved with NaN", resaved(one(Q, lambda value: value * float("nan")), {}), SAFE, Refused(("linear_q",))),
    ("safetensors of float16, old checksum", resaved(every(lambda value: value.half()), {"crc32": "81d4c6ce"}), SAFE, Refused(("model.safetensors",))),
]  # fmt: skip


# ------------------------------------------------------------------------------------------- commands that use the model


def same_model(path: str) -> Check:
    """The file holds the fixture's weights, bit for bit."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        expected, found = weights_of(Fixture.path / NEMO), weights_of(folder / path)
        different = [k for k in expected | found if k not in found or not torch.equal(expected[k], found[k])]
        return f"{path}: other weights: {different[:3]}" if different else None

    return check


def same_values(path: str) -> Check:
    """The file holds the fixture's numbers, in whatever type."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        expected, found = weights_of(Fixture.path / NEMO), weights_of(folder / path)
        same = expected.keys() == found.keys() and all(
            torch.equal(expected[k].double(), found[k].double()) for k in found
        )
        return None if same else f"{path}: other weights"

    return check


def kept(name: str, text: str, then: Check) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        path = folder / name
        return then(folder, outcome) if path.is_file() and path.read_text() == text else f"{name} is lost"

    return check


def new_features(folder: Path, outcome: Outcome) -> str | None:
    """The folder's features are not those of the fixture's model."""
    with (folder / "out/manifest.jsonl").open() as file:
        found = np.load(folder / json.loads(next(file))["feature_filepath"])
    return "features of another model" if np.array_equal(found, Fixture.feature()) else None


def with_notes(folder: Path) -> None:
    (folder / "there").mkdir()
    (folder / "there/notes.txt").write_text("mine")


def old_features(folder: Path) -> None:
    shutil.copytree(Fixture.path / "features", folder / "out")


def label_as(folder: Path, labels: Sequence[object]) -> None:
    files = [{"audio_filepath": f"audio/{i}.wav", "duration": 1.6 + 0.1 * i} for i in range(8)]
    write_lines(folder / "l.jsonl", [{**line, "label": labels[i % len(labels)]} for i, line in enumerate(files)])


def labelled(folder: Path) -> None:
    label_as(folder, ["a", "b"])


def results(weights: Sequence[object]) -> Setup:
    """What a probe has written, as far as `extract` reads it."""
    content = {"layers": list(range(len(weights))), "layer_weights": weights}
    return replaced(lambda path: path.write_text(json.dumps(content)), Path("results.json"))


NAN = with_weights(one(Q, lambda value: value * float("nan")))
PROBE = ["probe", "model.nemo", "--train", "l.jsonl", "--test", "l.jsonl", "--label", "label", "--output", "probe"]
PROBE += ["--device", "cpu"]
INCLUDE = "++init_from_nemo_model={m: {path: model.nemo, %s}}"

COMMANDS: list[tuple[str, Setup, list[str], Expected]] = [
    ("features of the same path, another model", both(old_features, other_model(NEMO)), extract(NEMO), Either(Refused(("out",)), Right(new_features))),
    ("features of the same run, another model", both(old_features, Fixture.run, other_model("runs/run/checkpoints/run.nemo")), extract("runs/run/checkpoints/run.nemo"), Either(Refused(("out",)), Right(new_features))),
    ("layer that does not exist", all_models, extract(NEMO, "--layers", "2"), Refused(("layers",))),
    ("layers as a range", all_models, extract(NEMO, "--layers", "0-1"), Either(Refused(("layers",)), SAME)),
    ("a layer twice", all_models, extract(NEMO, "--layers", "0,0"), Refused(("layers",))),
    ("weights that sum to zero", all_models, extract(NEMO, "--aggregation", "weighted", "--weights", "0,0"), Refused(("weights",))),
    ("weights with NaN", all_models, extract(NEMO, "--aggregation", "weighted", "--weights", "nan,1"), Refused(("weights",))),
    ("weights of a model with three layers", results([0.2, 0.3, 0.5]), extract(NEMO, "--aggregation", "weighted", "--weights", "results.json"), Refused(("results.json|layers",))),
    ("weights of null", results([None, 1.0]), extract(NEMO, "--aggregation", "weighted", "--weights", "results.json"), Refused(("results.json",))),
    ("weights without weighted", all_models, extract(NEMO, "--weights", "0.5,0.5"), Refused(("weights|weighted",))),
    ("export onto itself", all_models, ["export", "model.nemo", "model.nemo", "--format", "nemo"], Either(Refused(("model.nemo",)), Right(same_model("model.nemo")))),
    ("export over its source through a link", replaced(link("model.nemo"), Path("new.nemo")), ["export", "model.nemo", "new.nemo", "--format", "nemo"], Either(Refused(("new.nemo",)), Right(same_model("model.nemo")))),
    ("export nemo into a folder", replaced(Path.mkdir, Path("there")), ["export", "model.nemo", "there", "--format", "nemo"], Refused(("there",))),
    ("export huggingface onto a file", all_models, ["export", "model.nemo", "model.ckpt"], Refused(("model.ckpt",))),
    ("export into a folder with my notes", with_notes, ["export", "model.nemo", "there"], Either(Refused(("there",)), Right(kept("there/notes.txt", "mine", ended_well)))),
    ("export of a bad model over a good one", both(NAN, replaced(lambda path: shutil.copy(Fixture.path / NEMO, path), Path("good.nemo"))), ["export", "model.nemo", "good.nemo", "--format", "nemo"], Refused(("linear_q",))),
    ("ckpt to nemo and nothing lost", all_models, ["export", "model.ckpt", "new.nemo", "--format", "nemo"], Right(same_model("new.nemo"))),
    ("safetensors to nemo and nothing lost", all_models, ["export", "model.safetensors", "new.nemo", "--format", "nemo"], Right(same_model("new.nemo"))),
    ("float64 to nemo", with_weights(every(lambda value: value.double())), ["export", "model.nemo", "new.nemo", "--format", "nemo"], Either(Refused(("float64",)), Right(same_values("new.nemo")))),
    ("batch of no seconds", all_models, extract(NEMO, "--batch-seconds", "0"), Refused(("batch-seconds|batch_seconds",))),
    ("batch of NaN seconds", all_models, extract(NEMO, "--batch-seconds", "nan"), Refused(("batch-seconds|batch_seconds",))),
    ("batch smaller than any audio", all_models, extract(NEMO, "--batch-seconds", "0.001"), same_or("batch-seconds|batch_seconds")),
    ("longest duration of 0", all_models, extract(NEMO, "--max-duration", "0"), Refused(("max-duration|max_duration",))),
    ("longest duration NaN", all_models, extract(NEMO, "--max-duration", "nan"), Refused(("max-duration|max_duration",))),
    ("shards of no size", all_models, extract(NEMO, "--format", "shards", "--shard-mb", "0"), Refused(("shard-mb|shard_mb",))),
    ("shards of NaN", all_models, extract(NEMO, "--format", "shards", "--shard-mb", "nan"), Refused(("shard-mb|shard_mb",))),
    ("device of NeMo", all_models, [*extract(NEMO)[:-1], "gpu"], Refused(("device|gpu",))),
    ("a GPU that is not there", all_models, [*extract(NEMO)[:-1], "cuda:7"], Refused(("cuda:7",))),
    ("device meta", all_models, [*extract(NEMO)[:-1], "meta"], Refused(("meta",))),
    ("model in place of the audio", all_models, ["extract", "model.nemo", "model.ckpt", "out", "--device", "cpu"], Refused(("model.ckpt",), partial=True)),
    ("float16 features of large weights", with_weights(one("encoder.layers.1.norm_out.weight", lambda value: value * 1e6)), extract(NEMO, "--dtype", "float16"), Either(Refused(("float16|finite",), partial=True), Right(finite_features))),
    ("info with a size for a file", all_models, ["info", "model.nemo", "size=xlarge"], Refused(("size",))),
    ("info of a file and a word", all_models, ["info", "model.nemo", "and"], Refused(("and",))),
    ("info of three", all_models, ["info", "model.nemo", "model.ckpt", "model.safetensors"], Refused()),
    ("probe that is tested on what it learned", labelled, PROBE, Either(Refused(("l.jsonl",)), Right(said("training data", then=ended_well)))),
    ("probe of one class", lambda folder: label_as(folder, ["a"]), PROBE, Refused(("label|class",))),
    ("probe of labels that pandas left empty", lambda folder: label_as(folder, ["a", float("nan"), "b", None]), PROBE, Refused(("l.jsonl",))),
    ("probe of numbers and texts", lambda folder: label_as(folder, [1, "1"]), PROBE, Refused(("label|l.jsonl|class",))),
    ("probe of lists", lambda folder: label_as(folder, [["a"], ["b"]]), PROBE, Refused(("l.jsonl",))),
    ("probe of a label for each utterance", lambda folder: label_as(folder, list("abcdefgh")), PROBE, Either(Refused(("label|class",)), Right(said("8 classes", then=ended_well)))),
    ("probe: more examples than there are", labelled, [*PROBE, "--labels-per-class", "50"], Either(Refused(("labels-per-class|labels_per_class",)), Right(said("50", then=ended_well)))),
    ("probe: noise without a ratio", labelled, [*PROBE, "--noise", "l.jsonl"], Refused(("snr",))),
    ("probe: ratio without noise", labelled, [*PROBE, "--snr", "0"], Refused(("noise",))),
    ("probe: ratio of NaN", labelled, [*PROBE, "--snr", "nan", "--noise", "l.jsonl"], Refused(("snr",))),
    ("probe: learning rate below 0", labelled, [*PROBE, "--head", "attentive", "--lr", "-1"], Refused(("lr",))),
    ("info of NaN", NAN, ["info", "model.nemo"], Either(Refused(("linear_q",)), Right(said("nan", then=ended_well)))),
    ("info of two, one is damaged", both(all_models, on_bytes(cut(0.5), CKPT)), ["info", "model.nemo", "model.ckpt"], Refused(("model.ckpt",))),
    ("info of half a million layers", all_models, ["info", "nest_fast-conformer", "model.encoder.n_layers=500000"], Either(Refused(("n_layers",)), Right(said("500,000", then=ended_well)))),
    ("probe of NaN", both(labelled, NAN), PROBE, Refused(("linear_q",))),
    ("verify of NaN", NAN, ["verify", "model.nemo"], Refused(("model.nemo",))),
    ("verify of a text file", all_models, ["verify", "train.jsonl"], Refused(("train.jsonl",))),
    ("start from NaN", NAN, pretrain("++init_from_nemo_model=model.nemo"), Refused(("linear_q",))),
    ("start from a missing file", all_models, pretrain("++init_from_nemo_model=modle.nemo"), Refused(("modle.nemo",))),
    ("start from another width", with_weights(lambda weights: None), pretrain("++init_from_nemo_model=model.nemo", "model.encoder.d_model=64"), Refused(("model.nemo",))),
    ("start with an include that matches nothing", all_models, pretrain(INCLUDE % "include: [encodr]"), Refused(("encodr",))),
    ("start with everything excluded", all_models, pretrain(INCLUDE % "exclude: [encoder, decoder, preprocessor, quantizer, mask_processor]"), Refused(("exclude",))),
    ("start with include as a text", all_models, pretrain(INCLUDE % "include: encoder"), Either(Refused(("include",)), Right(said("92 loaded")))),
    ("start from two files", all_models, pretrain("++init_from_nemo_model=model.nemo", "++init_from_ptl_ckpt=model.ckpt"), Either(Refused(("init_from",)), Right(said("init_from")))),
    ("start: nemo given as ckpt", all_models, pretrain("++init_from_ptl_ckpt=model.nemo"), Either(Refused(("model.nemo",)), Right(said("model.nemo")))),
    ("start from weights of the optimizer", strange_checkpoint(lambda content: content.pop("state_dict") and None), pretrain("++init_from_ptl_ckpt=model.ckpt"), Refused(("model.ckpt",))),
    ("start from a folder", Fixture.run, pretrain("exp_manager.name=new", "++init_from_nemo_model=runs/run"), Refused(("runs/run",))),
]  # fmt: skip


def shard(path: Path, number: int = 0) -> Path:
    return sorted(path.glob("*.distcp"))[number]


def bit_in_shard(share: float) -> Callable[[Path], object]:
    return lambda path: shard(path).write_bytes(flipped(share)(shard(path).read_bytes()))


def as_trained(folder: Path, outcome: Outcome) -> str | None:
    """The exported model is the one that the run with sharded weights has written at its end."""
    expected = weights_of(Fixture.path / "sharded" / SHARDS.parent / "shards.nemo")
    found = weights_of(folder / "new.nemo")
    wrong = [
        k for k in expected | found if k not in expected or k not in found or not torch.equal(expected[k], found[k])
    ]
    return f"new.nemo: other weights: {wrong[:3]}" if wrong else None


def sharded(change: Callable[[Path], object]) -> Setup:
    """A checkpoint of two ranks with sharded weights; the run is made once, for all trials."""

    def setup(folder: Path) -> None:
        made = Fixture.path / "sharded"
        if not (made / SHARDS).exists():
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            Fixture.data(made)
            options = ("trainer.devices=2", "trainer.strategy=fsdp", "exp_manager.name=shards")
            outcome = in_process(pretrain(*options), made, {}, 120)
            if outcome.code != 0:
                raise RuntimeError(f"sharded weights cannot be trained:\n{outcome.text[-500:]}")
        shutil.copytree(made / SHARDS, folder / SHARDS)
        change(folder / SHARDS)

    return setup


def eight_features(folder: Path, outcome: Outcome) -> str | None:
    found = len(list((folder / "audio").rglob("*.npy")))
    return None if found == 8 else f"{found} feature files"


SHARDS = Path("runs/shards/checkpoints/last.ckpt")
SHARDED: list[tuple[str, Callable[[Path], object], Expected]] = [
    ("all there", nothing, Right(as_trained)),
    ("copied with *, which leaves out .metadata", lambda path: (path / ".metadata").unlink(), Refused((".metadata",))),
    ("rest.pt is missing", lambda path: (path / "rest.pt").unlink(), Refused(("rest.pt",))),
    ("a rank's file is missing", lambda path: shard(path).unlink(), Refused(("distcp",))),
    ("a rank's file is cut", lambda path: shard(path).write_bytes(shard(path).read_bytes()[:-9000]), Refused(("distcp",))),
    *(
        (f"a bit flipped at {share:.0%} of a rank's file", bit_in_shard(share), Either(Refused(("distcp",)), Right(as_trained)))
        for share in (0.05, 0.5, 0.95)
    ),
    ("a rank's file is of another save", lambda path: shard(path).write_bytes(shard(path, -1).read_bytes()), Refused(("distcp",))),
    ("a file more, of a sync program", lambda path: shutil.copy(shard(path), path / "__0_0 (conflicted copy).distcp"), Either(Refused(("conflicted",)), Right(as_trained))),
]  # fmt: skip


def trials() -> list[Trial]:
    cases: list[tuple[str, Setup, Sequence[str], Expected]] = [
        *((name, setup, extract(file), expected) for name, setup, file, expected in CONTAINERS),
        *(
            (f"{file}: {name}", on_bytes(change, file), extract(file), Refused((file.name,)))
            for file in (NEMO, CKPT, SAFE)
            for name, change in DAMAGE
        ),
        *((f"weights: {name}", with_weights(change), extract(NEMO), expected) for name, change, expected in TENSORS),
        *((f"configuration: {name}", setup, extract(NEMO), expected) for name, setup, expected in CONFIGS),
        *((name, setup, extract(file), expected) for name, setup, file, expected in CHECKPOINTS),
        *COMMANDS,
        *(
            (f"shards: {name}", sharded(change), ["export", str(SHARDS), "new.nemo", "--format", "nemo"], expected)
            for name, change, expected in SHARDED
        ),
        (
            "weights in the form before 2020",
            with_weights(lambda weights: None, _use_new_zipfile_serialization=False),
            extract(NEMO),
            Refused(("model.nemo",)),
        ),
        ("a model file of no bytes", on_bytes(always(b""), NEMO), extract(NEMO), Refused(("model.nemo",))),
    ]
    return [
        *(Trial(GROUP, name, command, expected, both(all_models, setup)) for name, setup, command, expected in cases),
        Trial(
            GROUP,
            "a pipe of the shell instead of a file",
            [],
            same_or("fd|pipe|regular|seek"),
            all_models,
            shell='"$1" -m nest_ssl extract <(cat model.nemo) audio/0.wav out --device cpu',
        ),
        Trial(
            GROUP,
            "features into the folder of the audio, twice",
            ["extract", "model.nemo", "audio", "audio", "--device", "cpu"],
            Either(Refused(("audio",)), Right(eight_features)),
            all_models,
            shell='"$@" && "$@"',
        ),
        *(
            Trial(
                GROUP,
                f"{file} of an export for transformers",
                [],
                Refused((file,), partial=True),
                all_models,
                shell=f'"$1" -m nest_ssl export model.nemo hf && "$1" -m nest_ssl extract {file} audio/0.wav out',
            )
            for file in ("hf", "hf/model.safetensors", "hf/config.json")
        ),
    ]
