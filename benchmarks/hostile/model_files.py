"""Model files that are damaged, foreign or hostile, for every command that reads one.

What is promised (docs/export.md): files are checked when they are read, by every command. Our `.nemo` files have a
checksum of the configuration too; those that are packed here, as NeMo does it, have none.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from benchmarks.hostile.harness import (
    EVIL,
    RUN,
    Check,
    Either,
    Evil,
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
    flipped,
    in_process,
    link,
    nothing,
    on_bytes,
    patched,
    pretrain,
    replaced,
    resume,
    said,
    same_features,
    zeros,
)
from omegaconf import OmegaConf

GROUP = "model files"
NEMO, CKPT, SAFE = Path("model.nemo"), Path("model.ckpt"), Path("model.safetensors")
WEIGHT = "encoder.layers.0.self_attn.linear_q.weight"
VARIANCE = "encoder.layers.1.conv.batch_norm.running_var"

Change = Callable[[Any], Any]
"""Changes what it is given, or returns something else in its place."""

INFO, VERIFY = ["info", "model.nemo"], ["verify", "model.nemo"]
EXPORT = ["export", "model.nemo", "out.nemo", "--format", "nemo"]
INIT = pretrain("init_from_nemo_model=model.nemo")
INIT_CKPT = pretrain("init_from_ptl_ckpt=model.ckpt")
PROBE = ["probe", "model.nemo", "--train", "labels.jsonl", "--test", "labels.jsonl", "--label", "label"]
PROBE += ["--output", "out", "--device", "cpu"]


def extract(name: object = NEMO, *options: str) -> list[str]:
    return ["extract", str(name), "audio/0.wav", "out", "--device", "cpu", *options]


NAMED = Refused(("model.nemo",))
SAME = Right(same_features)
EITHER = Either(NAMED, SAME)


# -------------------------------------------------------------------------------------------------------- what is right


def close_features(folder: Path, outcome: Outcome) -> str | None:
    """The features are those of the undamaged model, but for weights that were rounded to 8 bits of mantissa."""
    found = np.load(next((folder / "out").rglob("*.npy")))
    return None if np.allclose(found, Fixture.feature(), atol=0.1) else "features differ by more than 0.1"


def same_model(name: str) -> Check:
    """This `.nemo` file has the weights of the undamaged model."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found, expected = (weights_of(path) for path in (folder / name, Fixture.path / NEMO))
        equal = found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
        return None if equal else f"the weights in {name} are not those of the model"

    return check


def probed(folder: Path, outcome: Outcome) -> str | None:
    results = json.loads((folder / "out/results.json").read_text())
    return None if 0 <= results["encoder"]["accuracy"] <= 1 else "no accuracy"


def no_nan_features(folder: Path, outcome: Outcome) -> str | None:
    files = list((folder / "out").rglob("*.npy"))
    return None if files and all(np.isfinite(np.load(path)).all() for path in files) else "features are not finite"


# ------------------------------------------------------------------------------------------------------- how it is made


def changed(value: Any, change: Change | None) -> Any:
    new = change(value) if change else None
    return value if new is None else new


def put(path: str, value: object) -> Change:
    """Set a key of nested dicts and lists."""

    def change(content: Any) -> None:
        *parents, last = path.split("/")
        for name in parents:
            content = content[int(name) if isinstance(content, list) else name]
        content[last] = value

    return change


def all_of(*changes: Change) -> Change:
    """Several changes in place, one after the other."""

    def change(content: Any) -> None:
        for one in changes:
            one(content)

    return change


def drop(name: str) -> Change:
    def change(content: Any) -> None:
        del content[name]

    return change


def at(name: str, change: Change) -> Change:
    """Replace one entry by what the change makes of it."""
    return lambda content: {**content, name: change(content[name])}


def filled(value: float) -> Change:
    """The tensor with one element replaced."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.clone()
        new.view(-1)[7] = value
        return new

    return change


def to(dtype: torch.dtype) -> Change:
    """All floating-point weights in another type."""
    return lambda weights: {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()
    }


def members(path: Path) -> tuple[bytes, bytes]:
    """The configuration and the weights in a `.nemo` file."""
    read = {}
    with tarfile.open(path) as archive:
        for info in archive:
            if file := archive.extractfile(info):
                read[Path(info.name).name] = file.read()
    return read["model_config.yaml"], read["model_weights.ckpt"]


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(io.BytesIO(members(path)[1]), weights_only=True)
    return loaded


def torch_bytes(content: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def tar_bytes(files: list[tuple[str, bytes]], mode: Any = "w:") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=tarfile.GNU_FORMAT) as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def nemo(
    config: Change | None = None,
    weights: Change | None = None,
    text: Callable[[bytes], bytes] | None = None,
    blob: Callable[[bytes], bytes] | None = None,
    pack: Callable[[list[tuple[str, bytes]]], bytes] = tar_bytes,
) -> Setup:
    """A `.nemo` file packed as NeMo does it, with another configuration, other weights or other bytes of the two."""

    def setup(folder: Path) -> None:
        yaml_bytes, weight_bytes = members(Fixture.path / NEMO)
        if config:
            content = changed(yaml.safe_load(yaml_bytes), config)
            yaml_bytes = yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode()
        if weights:
            loaded = torch.load(io.BytesIO(weight_bytes), weights_only=True)
            weight_bytes = torch_bytes(changed(loaded, weights))
        yaml_bytes, weight_bytes = changed(yaml_bytes, text), changed(weight_bytes, blob)
        files = [("./model_config.yaml", yaml_bytes), ("./model_weights.ckpt", weight_bytes)]
        (folder / NEMO).write_bytes(pack(files))

    return setup


def member(name: str, kind: bytes, target: str = "") -> Callable[[list[tuple[str, bytes]]], bytes]:
    """The weights are a link, a device or a pipe of the archive."""

    def pack(files: list[tuple[str, bytes]]) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:") as archive:
            config = tarfile.TarInfo(files[0][0])
            config.size = len(files[0][1])
            archive.addfile(config, io.BytesIO(files[0][1]))
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
        return buffer.getvalue()

    return pack


def huge_claim(files: list[tuple[str, bytes]]) -> bytes:
    """The archive says that its weights have 7 TB."""
    data = tar_bytes(files)
    start = data.index(b"./model_weights.ckpt")
    info = tarfile.TarInfo("./model_weights.ckpt")
    info.size = 7 << 40
    return patched(data, start, info.tobuf(tarfile.GNU_FORMAT)[:512])


def copy(name: Path, to_name: str = "") -> Setup:
    return lambda folder: shutil.copy(Fixture.path / name, folder / (to_name or name))


def damaged(change: Callable[[bytes], bytes], name: Path = NEMO) -> Setup:
    return both(copy(name), on_bytes(change, name))


def ckpt(change: Change) -> Setup:
    def setup(folder: Path) -> None:
        content = torch.load(Fixture.path / CKPT, weights_only=True)
        torch.save(changed(content, change), folder / CKPT)

    return setup


def safetensors(header: Change | None = None, keep_checksum: bool = False, data: Change | None = None) -> Setup:
    """A safetensors file with another header or other data; without our checksum, as others write it."""

    def setup(folder: Path) -> None:
        raw = (Fixture.path / SAFE).read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        content = json.loads(raw[8 : 8 + size])
        if not keep_checksum:
            del content["__metadata__"]["crc32"]
        text = json.dumps(changed(content, header)).encode()
        (folder / SAFE).write_bytes(struct.pack("<Q", len(text)) + text + changed(raw[8 + size :], data))

    return setup


def model_config(change: Change) -> Change:
    """Change the configuration in the metadata of a safetensors file."""

    def in_header(header: Any) -> None:
        content = json.loads(header["__metadata__"]["model_config"])
        header["__metadata__"]["model_config"] = json.dumps(changed(content, change))

    return in_header


def written(name: str, content: bytes | str) -> Setup:
    def setup(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return setup


def unpacked(folder: Path) -> None:
    """A folder with the two files of the archive."""
    config, weights = members(Fixture.path / NEMO)
    written("model.nemo/model_config.yaml", config)(folder)
    written("model.nemo/model_weights.ckpt", weights)(folder)


def labelled(folder: Path) -> None:
    """A manifest with labels."""
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    texts = (json.dumps({**line, "label": "ab"[i % 2], "speaker": str(i)}) for i, line in enumerate(lines))
    (folder / "labels.jsonl").write_text("".join(text + "\n" for text in texts))


def rezipped(data: bytes, extra: Callable[[zipfile.ZipFile], None] | None = None, drop_name: str = "\0") -> bytes:
    """Unpack torch's archive and pack it again, compressed, as a zip program does."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if not name.endswith(drop_name):
                new.writestr(name, old.read(name))
        if extra:
            extra(new)
    return buffer.getvalue()


def evil_archive(data: bytes) -> bytes:
    return rezipped(data, lambda new: new.writestr("archive/data.pkl", EVIL), "data.pkl")


def bomb(data: bytes) -> bytes:
    """300 MB of zeros in 300 KB, in place of the first tensor."""
    return rezipped(data, lambda new: new.writestr("archive/data/0", bytes(300 << 20)), "archive/data/0")


def alias_bomb(data: bytes) -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    return "\n".join(lines).encode() + b"\n" + data


def as_asr(config: Any) -> dict[str, Any]:
    """The configuration of a speech recogniser of NeMo with the same encoder."""
    decoder = {"_target_": "nemo.collections.asr.modules.ConvASRDecoder", "feat_in": 32, "num_classes": 128}
    return {
        "target": "nemo.collections.asr.models.ctc_bpe_models.EncDecCTCModelBPE",
        "sample_rate": 16000,
        "tokenizer": {"dir": "tokenizer", "type": "bpe", "model_path": "nemo:tokenizer.model"},
        "preprocessor": config["preprocessor"],
        "encoder": config["encoder"],
        "decoder": {**decoder, "vocabulary": ["a", "b"]},
        "optim": config["optim"],
    }


def as_asr_weights(weights: Any) -> dict[str, torch.Tensor]:
    kept = {name: value for name, value in weights.items() if name.startswith(("preprocessor", "encoder"))}
    return {**kept, "decoder.decoder_layers.0.weight": torch.zeros(129, 32, 1)}


def traced(folder: Path) -> None:
    """A TorchScript program."""
    torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)).save(str(folder / CKPT))


def nemo_ckpt(folder: Path) -> None:
    """What NeMo's trainer saves: Lightning's keys, and the configuration as an OmegaConf object."""
    content = torch.load(Fixture.path / CKPT, weights_only=True)
    for name in ("progress", "data_position", "epoch_means", "nest_ssl_version"):
        del content[name]
    content |= {"pytorch-lightning_version": "2.4.0", "loops": {}, "callbacks": {}}
    content["hyper_parameters"] = {"cfg": OmegaConf.create(content["hyper_parameters"]["cfg"])}
    torch.save(content, folder / CKPT)


def hub(files: dict[str, bytes | Path], ref: str = "a" * 40) -> Setup:
    """A model `acme/nest` in the cache of the Hugging Face hub."""

    def setup(folder: Path) -> None:
        repo = folder.parent / "home/.cache/huggingface/hub/models--acme--nest"
        (repo / "snapshots" / ("a" * 40)).mkdir(parents=True)
        (repo / "refs").mkdir()
        (repo / "refs/main").write_text(ref)
        for name, content in files.items():
            data = content if isinstance(content, bytes) else (Fixture.path / content).read_bytes()
            (repo / "snapshots" / ("a" * 40) / name).write_bytes(data)

    return setup


def sharded(change: Setup) -> Setup:
    """A checkpoint of two sharded ranks, as the folder `model.ckpt`, then changed."""

    def setup(folder: Path) -> None:
        name = "exp_manager.name=sharded"
        outcome = in_process(resume(name, "trainer.devices=2", "trainer.strategy=fsdp"), folder, {}, 120)
        if outcome.code != 0:
            raise RuntimeError(f"no sharded checkpoint: {outcome.text[-500:]}")
        shutil.copytree(folder / RUN.parent / "sharded/checkpoints/last.ckpt", folder / CKPT)
        shutil.rmtree(folder / RUN.parent)
        change(folder)

    return setup


def huggingface(folder: Path) -> None:
    """The folder that `nest-ssl export` writes for transformers."""
    outcome = in_process(["export", str(Fixture.path / NEMO), "exported"], folder, {}, 120)
    if outcome.code != 0:
        raise RuntimeError(f"cannot be exported: {outcome.text[-500:]}")


def nested_evil(content: Any) -> dict[str, Any]:
    return {**content, "callbacks": {"ModelCheckpoint": Evil()}}


def evil_npz(folder: Path) -> None:
    np.savez(folder / "recorded.npz", encoded=np.array([Evil()], dtype=object))
    np.savez(folder / "batch.npz", audio=np.array([Evil()], dtype=object))


def foreign_npz(folder: Path) -> None:
    np.savez(folder / "recorded.npz", picture=np.zeros((3, 3)))
    np.savez(folder / "batch.npz", picture=np.zeros((3, 3)))


# ------------------------------------------------------------------------------------------------------------- the rows

Row = tuple[str, list[str], Expected, Setup]

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 460124160\n"
HTML = b"<!DOCTYPE html><html><head><title>404 Not Found</title></head><body>Entry not found</body></html>\n"
GGUF = b"GGUF\x03\0\0\0" + bytes(4096)

DAMAGED: list[Row] = [
    ("nemo: half of it is there", extract(), NAMED, damaged(cut(0.5))),
    ("nemo: only the padding at its end is missing", extract(), EITHER, damaged(cut(0.985))),
    ("nemo: empty", INFO, NAMED, damaged(always(b""))),
    ("nemo: zeros, after a full disk", EXPORT, NAMED, damaged(zeros)),
    ("nemo: a flipped bit in the weights, extract", extract(), NAMED, damaged(flipped(0.5))),
    ("nemo: a flipped bit in the weights, probe", PROBE, NAMED, both(labelled, damaged(flipped(0.6)))),
    ("nemo: a flipped bit in the weights, init_from", INIT, NAMED, damaged(flipped(0.8))),
    (
        "nemo: a digit of the configuration was edited in place",
        *(extract(), NAMED, damaged(lambda data: data.replace(b"preemph: 0.97", b"preemph: 0.96"))),
    ),
    (
        "nemo: a flipped bit in the header of the second member",
        *(extract(), NAMED, damaged(lambda data: data.replace(b"./model_weights.ckpt", b"./modem_weights.ckpt"))),
    ),
    ("nemo: a Git LFS pointer", INIT, NAMED, damaged(always(LFS))),
    ("nemo: a web page with an error", extract(), NAMED, damaged(always(HTML))),
    ("info of a WAV file", ["info", "audio/0.wav"], Refused(("0.wav",)), nothing),
    ("nemo: does not exist", extract("nowhere.nemo"), Refused(("nowhere.nemo",)), nothing),
    ("nemo: a folder, as it was unpacked", extract(), EITHER, unpacked),
    ("nemo: a pipe that nobody writes to", INFO, NAMED, lambda folder: os.mkfifo(folder / NEMO)),
    ("nemo: a link to /dev/zero", extract(), NAMED, replaced(link("/dev/zero"), NEMO)),
    ("nemo: really a ckpt", extract(), EITHER, copy(CKPT, "model.nemo")),
    (
        "ckpt: really a nemo file",
        *(extract(CKPT), Either(Refused(("model.ckpt",)), SAME), copy(NEMO, "model.ckpt")),
    ),
    (
        "info of two models, the second cut off",
        ["info", "model.nemo", "other.nemo"],
        Refused(("other.nemo",)),
        both(damaged(cut(0.5)), lambda folder: (folder / NEMO).rename(folder / "other.nemo"), copy(NEMO)),
    ),
]


ARCHIVE: list[Row] = [
    ("archive: packed again by tar", extract(), SAME, nemo()),
    ("archive: compressed with gzip", extract(), EITHER, nemo(pack=lambda files: gzip.compress(tar_bytes(files)))),
    ("archive: without weights", EXPORT, Refused(("model.nemo", "weights")), nemo(pack=lambda f: tar_bytes(f[:1]))),
    (
        "archive: without a configuration",
        INFO,
        Refused(("model.nemo", "config")),
        nemo(pack=lambda f: tar_bytes(f[1:])),
    ),
    (
        "archive: a second configuration was appended",
        *(extract(), Refused(("model_config",))),
        nemo(pack=lambda files: tar_bytes([*files, (files[0][0], files[0][1].replace(b": 0.97", b": 0.5"))])),
    ),
    (
        "archive: a member that would leave the folder",
        *(extract(), EITHER, nemo(pack=lambda files: tar_bytes([*files, ("../pwned", b"x")]))),
    ),
    (
        "archive: the weights are a link to a file outside",
        *(extract(), NAMED, nemo(pack=member("./model_weights.ckpt", tarfile.SYMTYPE, "/etc/passwd"))),
    ),
    ("archive: the weights are a pipe", INIT, NAMED, nemo(pack=member("./model_weights.ckpt", tarfile.FIFOTYPE))),
    ("archive: claims to have 7 TB of weights", extract(), NAMED, nemo(pack=huge_claim)),
    ("archive: a gzip bomb", INFO, NAMED, nemo(pack=lambda files: gzip.compress(bytes(300 << 20), 1))),
]

BOOKS = ("num_books", "quantizer/num_books", "decoder/num_decoders", "loss/num_decoders")
CONFIG: list[Row] = [
    ("yaml: Windows line ends", extract(), SAME, nemo(text=lambda data: data.replace(b"\n", b"\r\n"))),
    ("yaml: a byte order mark", extract(), EITHER, nemo(text=lambda data: b"\xef\xbb\xbf" + data)),
    ("yaml: in UTF-16", extract(), EITHER, nemo(text=lambda data: data.decode().encode("utf-16"))),
    ("yaml: empty", INFO, Refused(("model.nemo", "config")), nemo(text=always(b""))),
    ("yaml: aliases that grow to 10^12 values", INFO, NAMED, nemo(text=alias_bomb)),
    (
        "yaml: runs a command when loaded carelessly",
        *(extract(), NAMED),
        nemo(text=lambda data: data + b"x: !!python/object/apply:os.system ['touch ../pwned']\n"),
    ),
    (
        "yaml: takes a value from the environment",
        *(extract(), Refused(("resolver",)), nemo(put("preprocessor/window", "${oc.env:HOME}"))),
    ),
    (
        "yaml: a reference to a key that is not there",
        *(extract(), Refused(("model.nowhere|nowhere",)), nemo(put("encoder/d_model", "${model.nowhere}"))),
    ),
    ("config: no encoder", INFO, Refused(("encoder",)), nemo(drop("encoder"))),
    (
        "config: a layer more than there are weights",
        extract(),
        Refused(("layers.2",)),
        nemo(put("encoder/n_layers", 3)),
    ),
    ("config: a layer less than there are weights", EXPORT, Refused(("layers.1",)), nemo(put("encoder/n_layers", 1))),
    ("config: 10^9 layers", INFO, NAMED, nemo(put("encoder/n_layers", 10**9))),
    ("config: 10^6 codebooks", INFO, NAMED, nemo(all_of(*(put(key, 10**6) for key in BOOKS)))),
    (
        "config: the encoder of another model",
        *(extract(), Refused(("ConvASREncoder|_target_",))),
        nemo(put("encoder/_target_", "nemo.collections.asr.modules.ConvASREncoder")),
    ),
    ("config: an encoder key that does not exist", extract(), Refused(("n_layer_",)), nemo(put("encoder/n_layer_", 2))),
    (
        "config: data and optimizer of a later NeMo",
        *(extract(), SAME),
        nemo(all_of(put("train_ds/gpu_decoding", "auto"), put("optim", {"name": "muon", "lr": 1}))),
    ),
    ("config: two sample rates", extract(), Refused(("sample_rate",)), nemo(put("preprocessor/sample_rate", 8000))),
    (
        "config: another window than the one saved",
        extract(),
        Refused(("window",)),
        nemo(put("preprocessor/window", "hamming")),
    ),
    (
        "config: other mel filters than those saved",
        *(extract(), Refused(("highfreq|featurizer.fb|filter",)), nemo(put("preprocessor/highfreq", 4000))),
    ),
    (
        "config: preemph is not a number",
        extract(),
        Refused(("preemph",)),
        nemo(put("preprocessor/preemph", float("nan"))),
    ),
    (
        "config: a stride of 10 instead of 0.01",
        extract(),
        Refused(("window_stride|stride",)),
        nemo(put("preprocessor/window_stride", 10)),
    ),
    ("config: subsampling by 3", INFO, Refused(("subsampling_factor",)), nemo(put("encoder/subsampling_factor", 3))),
    (
        "config: escape codes in a value",
        *(INFO, Refused(("self_attention_model",)), nemo(put("encoder/self_attention_model", "\x1b[2Jrel_pos"))),
    ),
    ("config: a speech recogniser of NeMo, extract", extract(), NAMED, nemo(as_asr, as_asr_weights)),
    (
        "config: a speech recogniser of NeMo, init_from its encoder",
        pretrain("init_from_nemo_model={asr: {path: model.nemo, include: [encoder]}}"),
        *(Either(NAMED, Right(said("loaded"))), nemo(as_asr, as_asr_weights)),
    ),
]

WEIGHTS: list[Row] = [
    ("weights: one is NaN, extract", extract(), Refused((WEIGHT,)), nemo(weights=at(WEIGHT, filled(float("nan"))))),
    ("weights: one is NaN, info", INFO, Refused((WEIGHT,)), nemo(weights=at(WEIGHT, filled(float("nan"))))),
    ("weights: one is infinite, export", EXPORT, Refused((WEIGHT,)), nemo(weights=at(WEIGHT, filled(float("inf"))))),
    ("weights: one is NaN, init_from", INIT, Refused((WEIGHT,)), nemo(weights=at(WEIGHT, filled(float("nan"))))),
    (
        "weights: quantised to int8",
        extract(),
        Refused((WEIGHT,)),
        nemo(weights=at(WEIGHT, lambda t: (t * 100).to(torch.int8))),
    ),
    ("weights: sparse", extract(), Either(Refused((WEIGHT,)), SAME), nemo(weights=at(WEIGHT, lambda t: t.to_sparse()))),
    ("weights: all in bfloat16", extract(), Either(NAMED, Right(close_features)), nemo(weights=to(torch.bfloat16))),
    ("weights: a negative variance", extract(), Refused(("running_var",)), nemo(weights=at(VARIANCE, filled(-1.0)))),
    (
        "weights: 1e38, so that outputs overflow",
        *(extract(), Either(Refused(("model.nemo|finite",), partial=True), Right(no_nan_features))),
        nemo(weights=at(WEIGHT, lambda t: torch.full_like(t, 1e38))),
    ),
    ("weights: a matrix has another shape", extract(), Refused((WEIGHT,)), nemo(weights=at(WEIGHT, lambda t: t[:16]))),
    (
        "weights: one is unknown",
        EXPORT,
        Refused(("encoder.extra",)),
        nemo(weights=put("encoder.extra", torch.zeros(3))),
    ),
    (
        "weights: escape codes in a name",
        *(extract(), NAMED, nemo(weights=put("encoder.\x1b]0;owned\x07\x1b[2J", torch.zeros(3)))),
    ),
    (
        "weights: with DDP's prefix module.",
        *(extract(), Either(Refused(("module.",)), SAME)),
        nemo(weights=lambda w: {f"module.{name}": value for name, value in w.items()}),
    ),
    ("weights: a text among them", extract(), Refused((WEIGHT,)), nemo(weights=put(WEIGHT, "see appendix"))),
    (
        "weights: one number that claims to be 10^12",
        *(extract(), Refused((WEIGHT,)), nemo(weights=at(WEIGHT, lambda t: torch.zeros(1).expand(10**6, 10**6)))),
    ),
    (
        "weights: in torch's form from before 2020",
        *(extract(), NAMED),
        nemo(blob=lambda data: torch_bytes(torch.load(io.BytesIO(data)), _use_new_zipfile_serialization=False)),
    ),
    ("weights: a pickle that runs a command", extract(), NAMED, nemo(blob=always(EVIL))),
    ("weights: torch's archive with such a pickle", INIT, NAMED, nemo(blob=evil_archive)),
    ("weights: zipped again, compressed", extract(), EITHER, nemo(blob=rezipped)),
    ("weights: a zip bomb", extract(), NAMED, nemo(blob=bomb)),
]

C = Refused(("model.ckpt",))
CHECKPOINTS: list[Row] = [
    ("ckpt: half of it is there", ["export", "model.ckpt", "out.nemo", "--format", "nemo"], C, damaged(cut(0.5), CKPT)),
    ("ckpt: a flipped bit, info", ["info", "model.ckpt"], C, damaged(flipped(0.5), CKPT)),
    ("ckpt: without a state_dict", extract(CKPT), Refused(("state_dict",)), ckpt(drop("state_dict"))),
    ("ckpt: only a state_dict, extract", extract(CKPT), C, ckpt(lambda content: content["state_dict"])),
    (
        "ckpt: of another Lightning model, init_from",
        *(INIT_CKPT, C),
        ckpt(lambda c: {"state_dict": {"layer.weight": torch.zeros(3)}, "hyper_parameters": {"lr": 1e-3}, "epoch": 3}),
    ),
    ("ckpt: of NeMo's trainer, init_from", INIT_CKPT, Right(said("99 loaded")), nemo_ckpt),
    ("ckpt: of NeMo's trainer, extract", extract(CKPT), Either(C, SAME), nemo_ckpt),
    ("ckpt: a command in a pickled callback", INIT_CKPT, C, ckpt(nested_evil)),
    ("ckpt: a TorchScript program", ["info", "model.ckpt"], C, traced),
    ("ckpt: a folder without content", extract(CKPT), C, lambda folder: (folder / CKPT).mkdir()),
    (
        "ckpt: sharded, one rank's file is missing",
        *(extract(CKPT), C, sharded(lambda folder: next((folder / CKPT).glob("__1_*.distcp")).unlink())),
    ),
    (
        "ckpt: sharded, its index runs a command",
        *(extract(CKPT), C, sharded(replaced(lambda path: path.write_bytes(EVIL), CKPT / ".metadata"))),
    ),
]

S = Refused(("model.safetensors",))
SAFETENSORS: list[Row] = [
    ("safetensors: without a checksum", extract(SAFE), SAME, safetensors()),
    ("safetensors: half of it is there", extract(SAFE), S, damaged(cut(0.5), SAFE)),
    ("safetensors: a flipped bit", extract(SAFE), S, damaged(flipped(0.7), SAFE)),
    (
        "safetensors: an edited configuration",
        extract(SAFE),
        S,
        safetensors(model_config(put("preprocessor/preemph", 0.5)), True),
    ),
    (
        "safetensors: a header of 2^60 bytes",
        *(extract(SAFE), S, damaged(lambda data: patched(data, 0, struct.pack("<Q", 1 << 60)), SAFE)),
    ),
    ("safetensors: offsets behind the end", extract(SAFE), S, safetensors(put(f"{WEIGHT}/data_offsets", [0, 1 << 40]))),
    ("safetensors: two tensors in one place", extract(SAFE), S, safetensors(put(f"{WEIGHT}/data_offsets", [0, 4096]))),
    ("safetensors: of another program, no metadata", extract(SAFE), S, safetensors(drop("__metadata__"))),
    (
        "safetensors: a NaN, and nobody's checksum",
        *(
            extract(SAFE),
            Refused(("model.safetensors",)),
            safetensors(data=lambda data: b"\0\0\xc0\x7f" * (len(data) // 4)),
        ),
    ),
    (
        "safetensors: a configuration for another width",
        *(["export", "model.safetensors", "out.nemo", "--format", "nemo"], Refused(("encoder",))),
        safetensors(model_config(put("encoder/d_model", 64))),
    ),
    (
        "Hugging Face: the exported folder, extract",
        extract("exported"),
        Either(Refused(("exported",)), SAME),
        huggingface,
    ),
    (
        "Hugging Face: the exported weights, extract",
        *(extract("exported/model.safetensors"), Refused(("exported/model.safetensors",)), huggingface),
    ),
    (
        "Hugging Face: its config.json as a model",
        *(["info", "config.json"], Refused(("config.json",)), written("config.json", '{"model_type": "bert"}')),
    ),
]

OUTPUT: list[Row] = [
    (
        "export onto itself",
        ["export", "model.nemo", "model.nemo", "--format", "nemo"],
        Either(NAMED, Right(same_model("model.nemo"))),
        copy(NEMO),
    ),
    (
        "export where a folder is",
        EXPORT,
        Refused(("out.nemo",)),
        both(copy(NEMO), lambda folder: (folder / "out.nemo").mkdir()),
    ),
    (
        "export: causal convolutions for transformers",
        *(["export", "model.nemo", "out"], Refused(("conv_context_size",))),
        nemo(put("encoder/conv_context_size", "causal")),
    ),
    (
        "probe: a model from NeMo without a checksum",
        *(PROBE, Right(probed), both(labelled, nemo())),
    ),
    (
        "extract: layer weights from a damaged results.json",
        extract(NEMO, "--aggregation", "weighted", "--weights", "results.json"),
        Refused(("results.json",)),
        both(copy(NEMO), written("results.json", '{"layer_weights": [0.5, ')),
    ),
    (
        "verify: codes that do not have length 1",
        VERIFY,
        Right(said("quantizer", then=ended_well), codes=(1,)),
        nemo(weights=at("quantizer.codebooks", lambda t: t * 2)),
    ),
    (
        "verify: recorded numbers that are pickled commands",
        [*VERIFY, "--recorded", "recorded.npz"],
        Refused(("recorded.npz|batch.npz",)),
        both(copy(NEMO), evil_npz),
    ),
    (
        "verify: a Python that is not there",
        [*VERIFY, "--nemo-python", "/nowhere/python"],
        Refused(("/nowhere/python",)),
        copy(NEMO),
    ),
]

INITIAL: list[Row] = [
    (
        "init_from: include with a typo",
        pretrain("init_from_nemo_model={base: {path: model.nemo, include: [enccoder]}}"),
        Refused(("enccoder",)),
        copy(NEMO),
    ),
    (
        "init_from: another width",
        pretrain("init_from_nemo_model=model.nemo", "model.encoder.d_model=16"),
        Either(NAMED, Right(said("of a different shape"))),
        copy(NEMO),
    ),
    (
        "init_from: a ckpt as a nemo file",
        pretrain("init_from_nemo_model=model.ckpt"),
        Either(Refused(("model.ckpt",)), Right(said("99 loaded"))),
        copy(CKPT),
    ),
]

OFFLINE: dict[str, str | None] = {"HF_HUB_OFFLINE": "1"}
DEAD: dict[str, str | None] = {"HF_ENDPOINT": "http://127.0.0.1:9"}
HUB: list[tuple[str, Expected, dict[str, str | None], Setup]] = [
    ("hub: not in the cache, offline", Refused(("acme/nest",)), OFFLINE, nothing),
    ("hub: not in the cache, and nobody answers", Refused(("acme/nest",)), DEAD, nothing),
    ("hub: the cached file is cut off", Refused(("nest.nemo|acme/nest",)), OFFLINE, hub({"nest.nemo": b"x" * 5000})),
    ("hub: no model file in the cached folder", Refused(("acme/nest",)), OFFLINE, hub({"README.md": b"# nest\n"})),
]


def trials() -> list[Trial]:
    tables = (DAMAGED, ARCHIVE, CONFIG, WEIGHTS, CHECKPOINTS, SAFETENSORS, OUTPUT, INITIAL)
    found = [Trial(GROUP, *row) for table in tables for row in table]
    for name, expected, environment, setup in HUB:
        found.append(Trial(GROUP, name, extract("acme/nest"), expected, setup, environment, own_process=True))
    small = 'ulimit -f 100; "$@"'
    found.append(Trial(GROUP, "export: no room for the file", EXPORT, Refused(("out.nemo",)), copy(NEMO), shell=small))
    return found
