"""Model files that nobody should trust: .nemo, .ckpt and .safetensors files that lie, contradict themselves or attack.

Every file is made from the good one of the fixture by a small change, and is given to one of the commands that read
models. What can be read must give the same features; the rest is refused, names the file, and runs no code.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import pickle
import shutil
import socket
import struct
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import yaml
from benchmarks.hostile.harness import (
    EVIL,
    RUN,
    Either,
    Evil,
    Expected,
    Fixture,
    Outcome,
    Refused,
    Right,
    Trial,
    cut,
    ended_well,
    flipped,
    in_process,
    link,
    patched,
    pretrain,
    resume,
    same_features,
    trained,
    write_lines,
    zeros,
)

Made = bytes | Callable[[Path], object]
"""A file's content, or a function that makes something else at this path."""

LAYER = "encoder.layers.0.feed_forward1.linear1.weight"  # (128, 32)
BIAS = "encoder.layers.1.norm_out.bias"
VARIANCE = "encoder.layers.0.conv.batch_norm.running_var"
WINDOW, FILTERS = "preprocessor.featurizer.window", "preprocessor.featurizer.fb"
CONFIG, WEIGHTS = "./model_config.yaml", "./model_weights.ckpt"


# ------------------------------------------------------------------------------------------------------- making files


def good(name: str = "model.nemo") -> bytes:
    return (Fixture.path / name).read_bytes()


def members() -> dict[str, bytes]:
    with tarfile.open(Fixture.path / "model.nemo") as tar:
        return {member.name: _content(tar, member) for member in tar}


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return file.read() if file else b""


def tarred(*parts: tuple[str, bytes] | tarfile.TarInfo, mode: str = "w", **options: Any) -> bytes:
    """A tar file; unlike ours its configuration has no checksum, as in NeMo's."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, **options) as tar:  # type: ignore[call-overload]
        for part in parts:
            if isinstance(part, tarfile.TarInfo):
                tar.addfile(part)
                continue
            info = tarfile.TarInfo(part[0])
            info.size = len(part[1])
            tar.addfile(info, io.BytesIO(part[1]))
    return buffer.getvalue()


def nemo(config: bytes | None = None, weights: bytes | None = None) -> bytes:
    found = members()
    return tarred(
        (CONFIG, found[CONFIG] if config is None else config),
        (WEIGHTS, found[WEIGHTS] if weights is None else weights),
    )


def saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def good_weights() -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(io.BytesIO(members()[WEIGHTS]), weights_only=True)
    return loaded


def good_config() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(members()[CONFIG])
    return loaded


def with_weights(change: Callable[[dict[str, Any]], object]) -> Callable[[], bytes]:
    """A .nemo file whose weights were changed in place, or replaced by what `change` returns."""

    def make() -> bytes:
        weights = good_weights()
        returned = change(weights)
        return nemo(weights=saved(weights if returned is None else returned))

    return make


def with_config(**changes: object) -> Callable[[], bytes]:
    """A .nemo file with these keys changed; `__` separates sections, and None removes a key."""

    def make() -> bytes:
        return nemo(config=yaml.safe_dump(edited(good_config(), changes)).encode())

    return make


def edited(config: dict[str, Any], changes: Mapping[str, object]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = config
        for section in sections:
            place = place[section]
        if value is None:
            place.pop(key)
        else:
            place[key] = value
    return config


def with_text(old: str, new: str, **also: object) -> Callable[[], bytes]:
    """A .nemo file whose configuration was changed with a text editor."""

    def make() -> bytes:
        text = members()[CONFIG].decode()
        assert old in text
        return nemo(config=text.replace(old, new, 1).encode())

    return make


def with_yaml(content: bytes) -> Callable[[], bytes]:
    return lambda: nemo(config=content)


def rezipped(
    change: Callable[[str, bytes], bytes | None] = lambda name, content: content,
    extra: Sequence[tuple[str, bytes]] = (),
    method: int = zipfile.ZIP_STORED,
) -> Callable[[], bytes]:
    """A .nemo file whose weights were unpacked, changed and zipped again; all checksums are right."""

    def make() -> bytes:
        buffer = io.BytesIO()
        with (
            zipfile.ZipFile(io.BytesIO(members()[WEIGHTS])) as old,
            zipfile.ZipFile(buffer, "w", method) as new,
        ):
            for info in old.infolist():
                content = change(info.filename, old.read(info))
                if content is not None:
                    new.writestr(info.filename, content)
            for name, content in extra:
                new.writestr(name, content)
        return nemo(weights=buffer.getvalue())

    return make


def on_record(ending: str, change: Callable[[bytes], bytes | None]) -> Callable[[], bytes]:
    return rezipped(lambda name, content: change(content) if name.endswith(ending) else content)


def checkpoint(change: Callable[[dict[str, Any]], object]) -> Callable[[], bytes]:
    """The training checkpoint with something changed, or replaced by what `change` returns."""

    def make() -> bytes:
        content = torch.load(Fixture.path / "model.ckpt", weights_only=True)
        returned = change(content)
        return saved(content if returned is None else returned)

    return make


def tensors(
    change: Callable[[dict[str, Any]], object] | None = None, metadata: Mapping[str, str] | None = None
) -> Callable[[], bytes]:
    """A .safetensors file with our configuration and without our checksum."""

    def make() -> bytes:
        weights = {name: value.contiguous() for name, value in good_weights().items()}
        if change:
            change(weights)
        config = {"model_config": json.dumps(good_config()), "format": "pt"}
        return safetensors.torch.save(weights, dict(config if metadata is None else metadata))

    return make


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[], bytes]:
    """Our own .safetensors file with another header."""

    def make() -> bytes:
        data = good("model.safetensors")
        (size,) = struct.unpack("<Q", data[:8])
        found = json.loads(data[8 : 8 + size])
        returned = change(found)
        text = returned if isinstance(returned, bytes) else json.dumps(found).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return make


def member(name: str, kind: bytes, target: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, size
    return info


def tar_patched(at: int, new: bytes, again: bool = True) -> Callable[[], bytes]:
    """Change the first header of a plain tar file; `again`: compute its checksum again."""

    def make() -> bytes:
        data = bytearray(patched(nemo(), at, new))
        if again:
            data[148:156] = b" " * 8
            data[148:156] = b"%06o\0 " % sum(data[:512])
        return bytes(data)

    return make


def with_parts(*names: str, more: Sequence[tuple[str, bytes] | tarfile.TarInfo] = ()) -> Callable[[], bytes]:
    """A .nemo file with the good configuration and weights under these names, then more members."""

    def make() -> bytes:
        found = [members()[CONFIG], members()[WEIGHTS]]
        return tarred(*zip(names, found, strict=False), *more)

    return make


def set_value(name: str, value: Callable[[Any], object]) -> Callable[[dict[str, Any]], None]:
    def change(weights: dict[str, Any]) -> None:
        weights[name] = value(weights[name])

    return change


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        del content[name]

    return change


def one_value(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = number
        return tensor

    return change


def every(change: Callable[[torch.Tensor], object]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda weights: {
        name: change(value) if value.is_floating_point() else value for name, value in weights.items()
    }


def sharded(folder: Path) -> Path:
    """A run of two ranks with sharded weights, made once; its checkpoints are folders."""
    run = Fixture.path / "runs/sharded"
    if not run.exists():
        command = resume("exp_manager.name=sharded", "trainer.devices=2", "trainer.strategy=fsdp")
        box = folder.parent / "sharded/folder"
        for path in (box, box.parent / "home", box.parent / "tmp"):
            path.mkdir(parents=True)
        Fixture.data(box)
        outcome = in_process(command, box, {}, 120)
        if outcome.code != 0:
            raise RuntimeError(f"no sharded run: {outcome.text[-500:]}")
        shutil.copytree(box / "runs/sharded", run, symlinks=True)
        shutil.rmtree(box.parent)
    return run


def shards(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """A checkpoint in shards, with something changed in its folder."""

    def make(path: Path) -> None:
        shutil.copytree(sharded(path.parent) / "checkpoints/last.ckpt", path)
        change(path)

    return make


def overwrite(pattern: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def setup(folder: Path) -> None:
        path = sorted(folder.glob(pattern))[0]
        path.write_bytes(change(path.read_bytes()))

    return setup


def every_page(data: bytes) -> bytes:
    changed = bytearray(data)
    for at in range(2000, len(data), 4096):
        changed[at] ^= 4
    return bytes(changed)


def older_shard(path: Path) -> None:
    """One shard is of an earlier save, as when a copy of the folder was interrupted."""
    box = path.parent.parent / "earlier/folder"
    for folder in (box, box.parent / "home", box.parent / "tmp"):
        folder.mkdir(parents=True)
    Fixture.data(box)
    command = resume("trainer.max_steps=6", "trainer.devices=2", "trainer.strategy=fsdp")
    if in_process(command, box, {}, 120).code != 0:
        raise RuntimeError("no sharded run")
    shutil.copy(box / RUN / "checkpoints/last.ckpt/__0_0.distcp", path)
    shutil.rmtree(box.parent)


class Module(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def scripted() -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(Module(), torch.zeros(1)), buffer)
    return buffer.getvalue()


def other_encoder() -> dict[str, torch.Tensor]:
    return {f"bert.encoder.layer.{i}.attention.self.query.weight": torch.randn(32, 32) for i in range(4)}


def big_pickle(depth: int) -> bytes:
    return b"\x80\x02" + b"(" * 0 + b"]" * depth + b"a" * (depth - 1) + b"."


def data_pickle(content: object) -> Callable[[], bytes]:
    return on_record("data.pkl", lambda old: pickle.dumps(content))


def doubled_key(config: str) -> Callable[[], bytes]:
    return lambda: nemo(config=members()[CONFIG] + config.encode())


# ------------------------------------------------------------------------------------------------------- what is right


def no(*words: str) -> Refused:
    """Refused, and the message names the file."""
    return Refused(("bad.", *words))


def close_features(folder: Path, outcome: Outcome) -> str | None:
    files = list((folder / "out").rglob("*.npy"))
    if len(files) != 1:
        return f"{len(files)} feature files"
    difference = float(np.abs(np.load(files[0]) - Fixture.feature()).max())
    return None if difference < 0.1 else f"features differ by {difference}"


def as_from_good_shards(folder: Path, outcome: Outcome) -> str | None:
    shutil.copytree(sharded(folder) / "checkpoints/last.ckpt", folder / "good.ckpt")
    again = in_process(["extract", "good.ckpt", "audio/0.wav", "good", "--device", "cpu"], folder, {}, 90)
    found, expected = (np.load(next((folder / name).rglob("*.npy"))) for name in ("out", "good"))
    return None if again.code == 0 and np.array_equal(found, expected) else "features differ from the good shards'"


def same_model(folder: Path, outcome: Outcome) -> str | None:
    """What was exported has the weights of the good model."""
    found, expected = safetensors.torch.load_file(folder / "out.safetensors"), good_weights()
    if set(found) != set(expected):
        return "other tensors"
    wrong = [name for name in found if not torch.equal(found[name], expected[name])]
    return f"other weights: {wrong[:2]}" if wrong else None


def all_loaded(folder: Path, outcome: Outcome) -> str | None:
    return trained(folder, outcome) if "99 loaded" in outcome.text else "not all weights were loaded"


def own_filters(folder: Path, outcome: Outcome) -> str | None:
    """The filters are those of the configuration, whatever the file had."""
    found = torch.load(folder / RUN / "checkpoints/last.ckpt", weights_only=True)["state_dict"][FILTERS]
    return trained(folder, outcome) if torch.equal(found, good_weights()[FILTERS]) else "mel filters of the file"


def knows(folder: Path, outcome: Outcome) -> str | None:
    """A probe's results are there, and finite."""
    results = json.loads((folder / "out/results.json").read_text())
    accuracy = results["encoder"]["accuracy"]
    return None if 0 <= accuracy <= 1 else f"accuracy {accuracy}"


SAME = Right(same_features)
READ = Right(ended_well)

COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "extract": lambda file: ["extract", file, "audio/0.wav", "out", "--device", "cpu"],
    "info": lambda file: ["info", file],
    "compare": lambda file: ["info", "model.nemo", file],
    "verify": lambda file: ["verify", file],
    "export": lambda file: ["export", file, "out.safetensors", "--format", "safetensors"],
    "to nemo": lambda file: ["export", file, "out.nemo", "--format", "nemo"],
    "hugging": lambda file: ["export", file, "out"],
    "onnx": lambda file: ["export", file, "out.onnx", "--format", "onnx"],
    "init": lambda file: pretrain(f"init_from_nemo_model={file}"),
    "init ckpt": lambda file: pretrain(f"init_from_ptl_ckpt={file}"),
    "probe": lambda file: [
        *("probe", file, "--train", "labels.jsonl", "--test", "labels.jsonl", "--label", "label"),
        *("--output", "out", "--device", "cpu"),
    ],
}


def good_result(use: str) -> Expected:
    """Where a file is odd but readable: exactly what the good file gives."""
    return {
        "extract": SAME,
        "export": Right(same_model),
        "init": Right(all_loaded),
        "init ckpt": Right(all_loaded),
        "probe": Right(knows),
    }.get(use, READ)


def maybe(use: str = "extract") -> Expected:
    right = good_result(use)
    assert isinstance(right, Right)
    return Either(no(), right)


def labels(folder: Path) -> None:
    lines = [
        {"audio_filepath": f"audio/{i}.wav", "duration": 1.6 + 0.1 * i, "label": "ab"[i % 2], "speaker": f"s{i}"}
        for i in range(8)
    ]
    write_lines(folder / "labels.jsonl", lines)
    shutil.copy(Fixture.path / "model.nemo", folder)


def trial(name: str, use: str, make: Callable[[], bytes] | Made, expected: Expected, file: str = "bad.nemo") -> Trial:
    """`make`: the content, a function that returns it, or (with a parameter) one that makes it at a path."""

    def setup(folder: Path) -> None:
        labels(folder)
        path = folder / file
        if isinstance(make, bytes):
            path.write_bytes(make)
        elif make.__code__.co_argcount:
            make(path)  # type: ignore[call-arg]
        else:
            path.write_bytes(make())  # type: ignore[call-arg, arg-type]

    return Trial("model files", name, COMMANDS[use](file), expected, setup)


# ---------------------------------------------------------------------------------------------------------- the trials

Row = tuple[str, str, Any, Expected]

TENSORS: list[Row] = [
    ("a weight is NaN", "extract", with_weights(set_value(LAYER, one_value(float("nan")))), no(LAYER)),
    ("a bias is infinite", "info", with_weights(set_value(BIAS, one_value(float("inf")))), no(BIAS)),
    (
        "the mask embedding is -inf, for init",
        "init",
        with_weights(set_value("mask_processor.mask_embedding", one_value(float("-inf")))),
        no("mask_embedding"),
    ),
    (
        "a codebook is NaN, for export",
        "export",
        with_weights(set_value("quantizer.codebooks", one_value(float("nan")))),
        no("quantizer.codebooks"),
    ),
    ("a running mean is NaN, for probe", "probe", with_weights(set_value(VARIANCE, one_value(float("nan")))), no()),
    ("integer weights", "extract", with_weights(set_value(LAYER, lambda t: (t * 100).int())), no(LAYER)),
    ("boolean weights", "probe", with_weights(set_value(LAYER, lambda t: t > 0)), no(LAYER)),
    ("complex weights", "info", with_weights(set_value(LAYER, lambda t: t.to(torch.complex64))), no(LAYER)),
    ("float64 weights", "extract", with_weights(every(lambda t: t.double())), SAME),
    ("bfloat16 weights", "extract", with_weights(every(lambda t: t.bfloat16())), Either(no(), Right(close_features))),
    ("float8 weights", "extract", with_weights(set_value(LAYER, lambda t: t.to(torch.float8_e4m3fn))), no(LAYER)),
    ("half weights that overflowed", "info", with_weights(set_value(BIAS, lambda t: (t + 1e6).half())), no(BIAS)),
    ("a tensor is missing", "extract", with_weights(drop(LAYER)), no(LAYER)),
    ("a whole layer is missing, for probe", "probe", with_weights(
        lambda w: {n: v for n, v in w.items() if ".layers.1." not in n}), no("layers.1")),
    ("a tensor too many", "export", with_weights(lambda w: w.update({"encoder.layers.2.x": torch.ones(1)})), no(
        "layers.2")),
    ("only the encoder", "extract", with_weights(
        lambda w: {n: v for n, v in w.items() if n.startswith("encoder.")}), Either(no(), SAME)),
    ("another shape", "info", with_weights(set_value(LAYER, lambda t: t[:-1])), no(LAYER)),
    ("transposed", "extract", with_weights(set_value(LAYER, lambda t: t.T.contiguous())), no(LAYER)),
    ("one dimension more", "extract", with_weights(set_value(LAYER, lambda t: t[None])), no(LAYER)),
    ("a scalar instead of a bias", "probe", with_weights(set_value(BIAS, lambda t: torch.tensor(1.0))), no(BIAS)),
    ("a negative variance", "extract", with_weights(set_value(VARIANCE, one_value(-0.5))), no(VARIANCE)),
    ("another window", "extract", with_weights(set_value(WINDOW, lambda t: t.flip(0) * 0.5)), no(WINDOW)),
    ("mel filters of zeros", "extract", with_weights(set_value(FILTERS, torch.zeros_like)), no(FILTERS)),
    ("mel filters of zeros, for init", "init", with_weights(set_value(FILTERS, torch.zeros_like)), Either(
        no(FILTERS), Right(own_filters))),
    ("a negative number of batches", "extract", with_weights(
        set_value("encoder.layers.0.conv.batch_norm.num_batches_tracked", lambda t: t - 100)), maybe()),
    ("names with a prefix", "extract", with_weights(
        lambda w: {f"module.{n}": v for n, v in w.items()}), Either(no(), SAME)),
    ("names are numbers", "info", with_weights(lambda w: dict(enumerate(w.values()))), no()),
    ("a name with control codes", "info", with_weights(lambda w: w.update({"\x1b[2J\x07evil": torch.ones(1)})), no()),
    ("weights are a list", "extract", with_weights(lambda w: list(w.values())), no()),
    ("weights are one tensor", "info", with_weights(lambda w: torch.ones(3)), no()),
    ("weights are empty", "extract", with_weights(lambda w: {}), no()),
    ("a weight is a string", "extract", with_weights(set_value(LAYER, lambda t: "0.5")), no(LAYER)),
    ("a weight is None", "export", with_weights(set_value(BIAS, lambda t: None)), no(BIAS)),
    ("a weight is a list of numbers", "init", with_weights(set_value(BIAS, lambda t: t.tolist())), no(BIAS)),
    ("a sparse weight", "extract", with_weights(set_value(LAYER, lambda t: t.to_sparse())), Either(no(LAYER), SAME)),
    ("a weight without data (meta)", "extract", with_weights(set_value(LAYER, lambda t: t.to("meta"))), no(LAYER)),
    ("a quantized weight", "info", with_weights(
        set_value(LAYER, lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8))), no()),
    ("a weight that claims four terabytes", "info", with_weights(
        set_value(LAYER, lambda t: torch.zeros(1).expand(2**20, 2**20))), no(LAYER)),
    ("weights stored transposed", "extract", with_weights(
        lambda w: {n: v.T.contiguous().T if v.dim() == 2 else v for n, v in w.items()}), SAME),
    ("weights are parameters", "extract", with_weights(every(torch.nn.Parameter)), SAME),
    ("weights are an OrderedDict under state_dict", "extract", with_weights(
        lambda w: {"state_dict": OrderedDict(w)}), maybe()),
    ("numpy arrays", "extract", with_weights(every(lambda t: t.numpy())), no()),
    ("weights so large that features overflow", "extract", with_weights(
        every(lambda t: t * 1e18 if t.dim() == 2 else t)),
        Refused(("finite|overflow|nan|inf|bad.",), partial=True)),
    ("a weight of 1e38 in the mel projection", "probe", with_weights(
        set_value("encoder.pre_encode.out.weight", lambda t: t * 0 + 3e38)),
        Refused(("finite|overflow|nan|inf|bad.",), partial=True)),
]  # fmt: skip

PICKLES: list[Row] = [
    ("code in the pickle", "extract", lambda: nemo(weights=saved({"x": Evil()})), no()),
    ("code in the pickle, for init", "init", lambda: nemo(weights=saved({**good_weights(), "x": Evil()})), no()),
    ("code as the weights, a bare pickle", "info", lambda: nemo(weights=EVIL), no()),
    ("code in the data.pkl of a good archive", "export", data_pickle(Evil()), no()),
    ("weights in torch's form before 2020", "extract", lambda: nemo(weights=_legacy()), no()),
    ("a pickle of 100,000 nested lists", "info", on_record("data.pkl", lambda d: big_pickle(100_000)), no()),
    ("a pickle cut in the middle", "extract", on_record("data.pkl", cut(0.5)), no()),
    ("a pickle of one number", "probe", data_pickle(7), no()),
    ("a record that a tensor needs is missing", "extract", on_record("data/20", lambda d: None), no()),
    ("a record is shorter than its tensor", "info", on_record("data/20", lambda d: d[:-4]), no()),
    ("a record is longer than its tensor", "extract", on_record("data/20", lambda d: d + bytes(64)), maybe()),
    ("an unknown byte order", "extract", on_record("byteorder", lambda d: b"middle"), no()),
    ("a version from the future", "extract", on_record("archive/version", lambda d: b"999\n"), maybe()),
    ("zipped again, compressed", "extract", rezipped(method=zipfile.ZIP_DEFLATED), maybe()),
    ("zipped again, stored", "export", rezipped(), maybe("export")),
    ("a record twice, the second is noise", "extract",
     rezipped(extra=[("archive/data/20", bytes(range(128)))]), maybe()),
    ("a record that climbs out of the archive", "extract",
     rezipped(extra=[("archive/../../../pwned", b"x")]), maybe()),
    ("a zip bomb as one more record", "info", lambda: nemo(weights=_bomb()), maybe("info")),
    ("the zip's directory is gone", "extract", lambda: nemo(weights=members()[WEIGHTS][:-3000]), no()),
    ("bytes before the zip", "extract", lambda: nemo(weights=b"#!/bin/sh\n" + members()[WEIGHTS]), maybe()),
    ("a flipped bit in a weight", "extract", lambda: nemo(weights=flipped(0.5)(members()[WEIGHTS])), no(
        "damaged|checksum|corrupt")),
    ("a flipped bit in a weight, for verify", "verify", lambda: nemo(weights=flipped(0.3)(members()[WEIGHTS])), no()),
    ("weights encrypted by the zip's flag", "info", lambda: nemo(weights=_encrypted()), no()),
    ("a script module", "extract", lambda: nemo(weights=scripted()), no()),
    ("a whole module, pickled", "info", lambda: nemo(weights=saved(torch.nn.Linear(2, 2))), no()),
]  # fmt: skip


def _legacy() -> bytes:
    buffer = io.BytesIO()
    torch.save(good_weights(), buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def _bomb() -> bytes:
    """Eight gigabytes of zeros in a few megabytes, next to the good records."""
    buffer = io.BytesIO(members()[WEIGHTS])
    record = zipfile.ZipInfo("archive/data/9999")
    record.compress_type = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(buffer, "a") as archive, archive.open(record, "w", force_zip64=True) as file:
        for _ in range(128):
            file.write(bytes(1 << 26))
    return buffer.getvalue()


def _encrypted() -> bytes:
    data = bytearray(members()[WEIGHTS])
    at = data.find(b"PK\x01\x02")
    while at >= 0:
        data[at + 8] |= 1
        at = data.find(b"PK\x01\x02", at + 4)
    return bytes(data)


def _whole() -> list[tuple[str, bytes]]:
    return list(members().items())


TARS: list[Row] = [
    ("an empty file", "extract", b"", no()),
    ("an empty tar", "info", lambda: tarred(), no()),
    ("only a configuration", "extract", lambda: tarred((CONFIG, members()[CONFIG])), no("weights")),
    ("only weights", "info", lambda: tarred((WEIGHTS, members()[WEIGHTS])), no("config")),
    ("cut off in the weights", "extract", lambda: cut(0.6)(good()), no()),
    ("cut off before the last byte of the weights", "init", lambda: good()[: 8192 + 392_000], no()),
    ("cut off after the configuration", "export", lambda: good()[:8192], no()),
    ("zeros", "info", lambda: zeros(good()), no()),
    ("a bit of the configuration flipped", "extract", lambda: flipped(0.004)(good()), no("damaged|checksum|config")),
    ("weights of 0 bytes", "extract", lambda: nemo(weights=b""), no()),
    ("a configuration of 0 bytes", "info", lambda: nemo(config=b""), no()),
    ("gzip, as NeMo 1 wrote it", "extract", lambda: gzip.compress(nemo()), maybe()),
    ("gzip, cut off", "extract", lambda: gzip.compress(nemo())[:-1000], no()),
    ("xz", "info", lambda: tarred(*_whole(), mode="w:xz"), maybe("info")),
    ("a gzip bomb", "info", lambda: gzip.compress(bytes(1 << 30), 9) * 8, no()),
    ("names without ./", "extract", with_parts("model_config.yaml", "model_weights.ckpt"), SAME),
    ("names from the root", "extract", with_parts("/model_config.yaml", "/model_weights.ckpt"), maybe()),
    ("names in a folder", "info", with_parts("nest/model_config.yaml", "nest/model_weights.ckpt"), maybe("info")),
    ("a name that climbs out", "extract", with_parts(CONFIG, "../../model_weights.ckpt"), no()),
    ("one more member that climbs out", "extract", with_parts(CONFIG, WEIGHTS, more=[("../../pwned", b"x")]), maybe()),
    ("a member with control codes in its name", "info", with_parts(CONFIG, more=[("\x1b[2Jevil", b"x")]), no()),
    ("weights are a link to /etc/passwd", "extract",
     with_parts(CONFIG, more=[member(WEIGHTS, tarfile.SYMTYPE, "/etc/passwd")]), no()),
    ("weights are a hard link to the configuration", "info",
     with_parts(CONFIG, more=[member(WEIGHTS, tarfile.LNKTYPE, CONFIG)]), no()),
    ("weights are a link to themselves", "extract",
     with_parts(CONFIG, more=[member(WEIGHTS, tarfile.SYMTYPE, WEIGHTS)]), no()),
    ("weights are a pipe", "extract", with_parts(CONFIG, more=[member(WEIGHTS, tarfile.FIFOTYPE)]), no()),
    ("weights are a device", "probe", with_parts(CONFIG, more=[member(WEIGHTS, tarfile.CHRTYPE)]), no()),
    ("weights are a folder", "info", with_parts(CONFIG, more=[member(WEIGHTS, tarfile.DIRTYPE)]), no()),
    ("two configurations, the second of another model", "extract",
     lambda: tarred(*_whole(), (CONFIG, yaml.safe_dump({"encoder": {"d_model": 8}}).encode())), no()),
    ("two configurations that differ in what weights do not show", "extract",
     lambda: tarred(*_whole(), (CONFIG, members()[CONFIG].replace(b"xscaling: true", b"xscaling: false"))), no()),
    ("two weights, the second with zeros", "export",
     lambda: tarred(*_whole(), (WEIGHTS, saved({n: v * 0 for n, v in good_weights().items()}))), no()),
    ("more members, as other NeMo models have", "extract",
     with_parts(CONFIG, WEIGHTS, more=[("./tokenizer.model", b"x" * 999), ("./vocab.txt", b"a\n")]), SAME),
    ("garbage after the end", "extract", lambda: nemo() + os.urandom(5000), maybe()),
    ("two files joined", "info", lambda: nemo() + nemo(), maybe("info")),
    ("no end marker", "extract", lambda: nemo().rstrip(b"\0").ljust(-(-len(nemo().rstrip(b"\0")) // 512) * 512, b"\0"),
     maybe()),
    ("a member that claims 8 TB", "info", tar_patched(124, b"\x80" + (8 << 40).to_bytes(11, "big")), no()),
    ("a member of negative size", "extract", tar_patched(124, b"\xff" * 12), no()),
    ("a size that is no number", "info", tar_patched(124, b"zzzzzzzzzzz\0"), no()),
    ("a wrong checksum in a tar header", "extract", tar_patched(124, b"00000000001\0", again=False), no()),
    ("a tar within the tar", "extract", lambda: tarred(("model.nemo", good())), no()),
    ("a zip archive", "info", lambda: _zipped(), no()),
]  # fmt: skip


def _zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in _whole():
            archive.writestr(name, content)
    return buffer.getvalue()


LAUGHS = b"a: &a [x, x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [" % (ord("a") + i, ord("a") + i) + b", ".join([b"*%c" % (ord("a") + i - 1)] * 10) + b"]\n"
    for i in range(1, 12)
)

YAML: list[Row] = [
    ("yaml that runs a command", "extract",
     with_yaml(b'encoder: !!python/object/apply:os.system ["touch ../pwned"]\n'), no()),
    ("yaml that names a class to make", "extract", with_config(encoder___target_="os.system"), no("os.system")),
    ("yaml that names a class of another model", "extract",
     with_config(encoder___target_="nemo.collections.asr.modules.ConvASREncoder"), no("ConvASREncoder")),
    ("a billion laughs", "info", lambda: nemo(config=members()[CONFIG] + LAUGHS), no()),
    ("an alias that contains itself", "info", doubled_key("loop: &x [*x]\n"), no()),
    ("50,000 nested lists", "info", doubled_key("deep: " + "[" * 50_000), no()),
    ("${oc.env:HOME} in a path", "extract", with_config(train_ds__manifest_filepath="${oc.env:HOME}"), no("resolver")),
    ("${oc.env:HOME} in a name, for export", "export", with_config(target="${oc.env:HOME}"), no("resolver")),
    ("${oc.decode:…} as a number", "info", with_config(encoder__d_model="${oc.decode:32}"), no()),
    ("interpolations in a circle", "extract",
     with_config(encoder__d_model="${decoder.feat_in}", decoder__feat_in="${encoder.d_model}"), no()),
    ("an interpolation to a key that is not there", "info", with_config(encoder__d_model="${model.width}"), no()),
    ("an interpolation within the file", "extract", with_config(decoder__feat_in="${encoder.d_model}"), maybe()),
    ("a mandatory value that is missing", "extract", with_config(encoder__d_model="???"), no("d_model")),
    ("a section twice", "extract", doubled_key("encoder:\n  d_model: 32\n"), no()),
    ("a key twice, and the second changes the features", "extract",
     with_text("  xscaling: true\n", "  xscaling: true\n  xscaling: false\n"), no("xscaling|twice|duplicate")),
    ("two documents", "info", doubled_key("---\nencoder: {}\n"), no()),
    ("a list", "info", with_yaml(b"- 1\n- 2\n"), no()),
    ("a number", "extract", with_yaml(b"42\n"), no()),
    ("tabs and braces", "info", with_yaml(b"\t{{{ not yaml"), no()),
    ("bytes that are no text", "extract", with_yaml(bytes(range(256)) * 20), no()),
    ("UTF-16", "info", lambda: nemo(config=members()[CONFIG].decode().encode("utf-16")), maybe("info")),
    ("a byte order mark", "extract", lambda: nemo(config=b"\xef\xbb\xbf" + members()[CONFIG]), maybe()),
    ("Windows line ends", "extract", lambda: nemo(config=members()[CONFIG].replace(b"\n", b"\r\n")), SAME),
    ("terminal codes in a value", "info", with_config(train_ds__manifest_filepath="\x1b[2J\x1b]0;evil\x07"), READ),
    ("terminal codes in a key", "extract", lambda: nemo(config=yaml.safe_dump(edited(good_config(), {
        "encoder__\x1b[31mred": 1})).encode()), no()),
    ("no encoder section", "extract", with_config(encoder=None), no("encoder")),
    ("no preprocessor section", "info", with_config(preprocessor=None), no("preprocessor")),
    ("no training data section", "extract", with_config(train_ds=None, validation_ds=None), SAME),
    ("the encoder is a list", "extract", with_config(encoder=[1, 2]), no("encoder")),
    ("an unknown key of the encoder", "extract", with_config(encoder__n_layer=2), no("n_layer")),
    ("another number of layers: more", "probe", with_config(encoder__n_layers=3), no("layers")),
    ("another number of layers: fewer", "extract", with_config(encoder__n_layers=1), no("layers")),
    ("another width", "extract", with_config(encoder__d_model=64), no()),
    ("another width, for init", "init", with_config(encoder__d_model=64), maybe("init")),
    ("another number of heads", "info", with_config(encoder__n_heads=2), no("heads|pos_bias")),
    ("heads that do not divide the width", "extract", with_config(encoder__n_heads=5), no("n_heads")),
    ("no heads", "info", with_config(encoder__n_heads=0), no("n_heads")),
    ("another number of codes", "info", with_config(num_classes=65, quantizer__num_classes=65), no()),
    ("40 mels instead of 80", "extract",
     with_config(preprocessor__features=40, encoder__feat_in=40, quantizer__feat_in=40, masking__feat_in=40), no()),
    ("two sample rates", "extract", with_config(preprocessor__sample_rate=8000), no("sample_rate|rate")),
    ("another window in the configuration", "export", with_config(preprocessor__window="hamming"), no("window")),
    ("a width of a billion", "info", with_config(encoder__d_model=10**9, decoder__feat_in=10**9), no()),
    ("a million layers", "extract", with_config(encoder__n_layers=10**6), no()),
    ("a width of 2**70", "extract", with_config(encoder__d_model=2**70, decoder__feat_in=2**70), no()),
    ("a position table of 2**40", "extract", with_config(encoder__pos_emb_max_len=2**40), maybe()),
    ("a million codebooks", "info", with_config(num_books=10**6, quantizer__num_books=10**6), no()),
    ("two and a half layers", "info", with_config(encoder__n_layers=2.5), no("n_layers")),
    ("layers: yes", "extract", with_config(encoder__n_layers=True), no("n_layers")),
    ("layers in words", "info", with_config(encoder__n_layers="two"), no("n_layers")),
    ("a sample rate of .nan", "extract",
     with_config(sample_rate=float("nan"), preprocessor__sample_rate=float("nan")), no("sample_rate")),
    ("a window stride of 0", "extract", with_config(preprocessor__window_stride=0.0), no("window_stride")),
    ("a window longer than the FFT", "info", with_config(preprocessor__n_fft=16), no("n_fft|window")),
    ("a subsampling factor of 7", "extract", with_config(encoder__subsampling_factor=7), no("subsampling_factor")),
    ("a dropout of 2", "info", with_config(encoder__dropout=2.0), no("dropout")),
    ("a normalisation that does not exist", "probe", with_config(preprocessor__normalize="per_galaxy"), no(
        "normalize|per_galaxy")),
    ("an even convolution kernel", "extract", with_config(encoder__conv_kernel_size=8), no("conv_kernel_size|kernel")),
]  # fmt: skip

CKPTS: list[Row] = [
    ("a good training checkpoint", "extract", lambda: good("model.ckpt"), SAME),
    ("a checkpoint without its configuration", "extract", checkpoint(drop("hyper_parameters")),
     no("hyper_parameters|configuration|cfg")),
    ("a checkpoint whose configuration is empty", "info", checkpoint(lambda c: c["hyper_parameters"].update(cfg={})),
     no()),
    ("a checkpoint whose configuration is text", "export", checkpoint(
        lambda c: c["hyper_parameters"].update(cfg="encoder: 1")), no()),
    ("a checkpoint with ${oc.env:HOME}", "to nemo", checkpoint(
        lambda c: c["hyper_parameters"]["cfg"]["train_ds"].update(noise_manifest="${oc.env:HOME}")), no("resolver")),
    ("a checkpoint whose configuration contradicts it", "extract", checkpoint(
        lambda c: c["hyper_parameters"]["cfg"]["encoder"].update(n_layers=4)), no("layers")),
    ("a checkpoint without weights", "info", checkpoint(drop("state_dict")), no("state_dict")),
    ("a checkpoint with NaN", "hugging", checkpoint(
        lambda c: c["state_dict"].update({BIAS: c["state_dict"][BIAS] * float("nan")})), no(BIAS)),
    ("a checkpoint with code in its configuration", "extract", checkpoint(
        lambda c: c["hyper_parameters"].update(cfg=Evil())), no()),
    ("a checkpoint that is a list", "init ckpt", checkpoint(lambda c: [1, 2]), no()),
    ("a checkpoint with NaN averages aside", "extract", checkpoint(
        lambda c: c.update(current_model_state={"x": torch.tensor(float("nan"))})), maybe()),
    ("another model's checkpoint", "init ckpt", lambda: saved({"state_dict": other_encoder()}), no()),
    ("another model's bare weights", "extract", lambda: saved(other_encoder()), no()),
    ("a text", "extract", b"<!DOCTYPE html><html>404 Not Found</html>", no()),
    ("a git LFS pointer", "info", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 463000000\n",
     no()),
    ("an npz archive", "info", lambda: _npz(), no()),
    ("a checkpoint in shards: empty folder", "extract", lambda path: path.mkdir(), no()),
    ("a checkpoint in shards: good", "extract", shards(lambda path: None), READ),
    ("a checkpoint in shards: code in .metadata", "extract", shards(overwrite(".metadata", lambda d: EVIL)), no()),
    ("a checkpoint in shards: code in rest.pt", "export", shards(overwrite("rest.pt", lambda d: saved(Evil()))), no()),
    ("a checkpoint in shards: no .metadata", "info", shards(lambda p: (p / ".metadata").unlink()), no()),
    ("a checkpoint in shards: one shard is gone", "extract",
     shards(lambda p: sorted(p.glob("*.distcp"))[1].unlink()), no("distcp")),
    ("a checkpoint in shards: one shard is cut off", "info", shards(overwrite("*.distcp", cut(0.7))), no()),
    ("a checkpoint in shards: a flipped bit nobody reads", "extract", shards(overwrite("*.distcp", flipped(0.5))),
     Either(no(), Right(as_from_good_shards))),
    ("a checkpoint in shards: a flipped bit in every 4 KB", "extract", shards(overwrite("*.distcp", every_page)), no()),
    ("a checkpoint in shards: a shard of another save", "extract", shards(older_shard), no()),
    ("a checkpoint in shards: code in a shard", "init ckpt", shards(overwrite("*.distcp", lambda d: saved(Evil()))),
     no()),
    ("a checkpoint in shards: swapped shards", "extract", shards(lambda path: _swap(path)), no()),
]  # fmt: skip


def _swap(path: Path) -> None:
    first, second = sorted(path.glob("*.distcp"))[:2]
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def _npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, state_dict=np.zeros(3))
    return buffer.getvalue()


SAFE: list[Row] = [
    ("safetensors without our checksum", "extract", tensors(), SAME),
    ("safetensors with a flipped bit", "extract", lambda: flipped(0.9)(good("model.safetensors")), no(
        "damaged|checksum|corrupt")),
    ("safetensors with a wrong checksum", "info", header(lambda h: h["__metadata__"].update(crc32="00000000")), no(
        "damaged|checksum|corrupt")),
    ("safetensors with a checksum that is no number", "extract", header(
        lambda h: h["__metadata__"].update(crc32="zz")), no()),
    ("safetensors without metadata", "extract", tensors(metadata={}), no("config")),
    ("safetensors whose configuration is no JSON", "info", tensors(metadata={"model_config": "{encoder"}), no()),
    ("safetensors whose configuration is a list", "extract", tensors(metadata={"model_config": "[]"}), no()),
    ("safetensors whose configuration is deep", "info", tensors(metadata={"model_config": "[" * 99_999}), no()),
    ("safetensors with ${oc.env:HOME}", "export", tensors(metadata={"model_config": json.dumps(
        {"encoder": {"d_model": "${oc.env:HOME}"}})}), no()),
    ("safetensors with NaN", "extract", tensors(set_value(LAYER, one_value(float("nan")))), no(LAYER)),
    ("safetensors with integers", "init", tensors(set_value(LAYER, lambda t: t.int())), no(LAYER)),
    ("safetensors in half precision", "extract", tensors(
        lambda w: w.update({n: v.half() for n, v in w.items() if v.dim() == 2})), Either(
            no(), Right(close_features))),
    ("safetensors without a tensor", "probe", tensors(lambda w: w.pop(BIAS)), no(BIAS)),
    ("safetensors with another model's tensors", "extract", lambda: safetensors.torch.save(other_encoder()), no()),
    ("safetensors cut off", "extract", lambda: cut(0.7)(good("model.safetensors")), no()),
    ("safetensors with a byte too many", "info", lambda: good("model.safetensors") + b"\0", no()),
    ("safetensors with a header of 2**60 bytes", "info", struct.pack("<Q", 1 << 60) + b"{}", no()),
    ("safetensors with a header of no bytes", "extract", bytes(8), no()),
    ("safetensors with overlapping tensors", "extract", header(
        lambda h: h[LAYER].update(data_offsets=h[LAYER.replace("linear1", "linear2")]["data_offsets"])), no()),
    ("safetensors with offsets past the end", "info", header(
        lambda h: h[LAYER].update(data_offsets=[2**40, 2**40 + 16384])), no()),
    ("safetensors with a shape that overflows", "info", header(
        lambda h: h[LAYER].update(shape=[2**62, 2**62])), no()),
    ("safetensors with a dtype that does not exist", "extract", header(lambda h: h[LAYER].update(dtype="F12")), no()),
    ("safetensors with a header that is a list", "info", header(lambda h: b"[1, 2, 3]"), no()),
    ("safetensors with a tensor named twice", "extract", header(
        lambda h: json.dumps(h)[:-1].encode() + b', "x": {"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
        b'"x": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'), no()),
]  # fmt: skip


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    before = os.open(".", os.O_RDONLY)
    os.chdir(path.parent)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.fchdir(before)
    os.close(before)


def _folder(path: Path) -> None:
    path.mkdir()
    for name, content in _whole():
        (path / name).write_bytes(content)


PLACES: list[tuple[str, str, Any, Expected, str]] = [
    ("a pipe that nobody writes to", "extract", _pipe, no(), "bad.nemo"),
    ("a pipe as a checkpoint", "info", _pipe, no(), "bad.ckpt"),
    ("a pipe as safetensors", "export", _pipe, no(), "bad.safetensors"),
    ("a socket", "info", _socket, no(), "bad.nemo"),
    ("an endless device", "extract", link("/dev/zero"), no(), "bad.nemo"),
    ("an endless device as a checkpoint", "init ckpt", link("/dev/urandom"), no(), "bad.ckpt"),
    ("an empty device", "info", link("/dev/null"), no(), "bad.safetensors"),
    ("a link in a circle", "info", link("bad.nemo"), no(), "bad.nemo"),
    ("a link to nothing", "extract", link("nothing.nemo"), no(), "bad.nemo"),
    ("a link to the good file", "extract", link("model.nemo"), SAME, "bad.nemo"),
    ("an unpacked .nemo file: a folder", "extract", _folder, Either(no(), SAME), "bad.nemo"),
    ("a .nemo file called .ckpt", "extract", lambda: good(), maybe(), "bad.ckpt"),
    ("a .ckpt file called .nemo", "extract", lambda: good("model.ckpt"), maybe(), "bad.nemo"),
    ("a .safetensors file called .nemo", "info", lambda: good("model.safetensors"), maybe("info"), "bad.nemo"),
    ("a .safetensors file called .ckpt", "init ckpt", lambda: good("model.safetensors"), maybe("init ckpt"),
     "bad.ckpt"),
    ("a .nemo file called .NEMO", "extract", lambda: good(), maybe(), "bad.NEMO"),
    ("a .nemo file called .bin", "extract", lambda: good(), maybe(), "bad.bin"),
    ("a sound called .nemo", "extract", lambda: good("audio/0.wav"), no(), "bad.nemo"),
    ("a configuration called .nemo", "info", lambda: members()[CONFIG], no(), "bad.nemo"),
    ("a name that is not there", "probe", lambda path: None, no(), "bad.nemo"),
    ("an ONNX graph called .ckpt", "extract", b"\x08\x08\x12\x07pytorch\x1a\x051.0.0" * 99, no(), "bad.ckpt"),
]  # fmt: skip


def untouched(folder: Path, outcome: Outcome) -> str | None:
    """The model that was given is still a good one."""
    return None if (folder / "model.nemo").read_bytes() == good() else "the model was changed"


def still_good(folder: Path, outcome: Outcome) -> str | None:
    with tarfile.open(folder / "model.nemo") as tar:
        found = torch.load(io.BytesIO(_content(tar, tar.getmember(WEIGHTS))), weights_only=True)
    same = all(torch.equal(value, found[name]) for name, value in good_weights().items())
    return None if same else "the model was damaged"


def not_compared(folder: Path, outcome: Outcome) -> str | None:
    return None if "Not compared with NeMo" in outcome.text else "it does not say that NeMo was not there"


def exported(pattern: str) -> Right:
    def check(folder: Path, outcome: Outcome) -> str | None:
        return untouched(folder, outcome) or (None if list(folder.glob(pattern)) else f"no {pattern}")

    return Right(check)


def probe_weights(content: str) -> Callable[[Path], None]:
    def setup(folder: Path) -> None:
        labels(folder)
        (folder / "results.json").write_text(content)

    return setup


WEIGHTED = (
    *("extract", "model.nemo", "audio/0.wav", "out", "--device", "cpu"),
    *("--aggregation", "weighted", "--weights", "results.json"),
)
OTHERS: list[tuple[str, Sequence[str], Expected, str]] = [
    *[
        ("layer weights that are NaN", WEIGHTED, Refused(("results.json",)), '{"layer_weights": [NaN, 1.0]}'),
        ("layer weights of another model", WEIGHTED, Refused(("results.json",)), '{"layer_weights": [0.2, 0.3, 0.5]}'),
        ("layer weights that are text", WEIGHTED, Refused(("results.json",)), '{"layer_weights": "all"}'),
        ("a probe's results cut off", WEIGHTED, Refused(("results.json",)), '{"layer_weights": [0.5, '),
    ],
    (
        "an export onto its own input",
        ("export", "model.nemo", "model.nemo", "--format", "nemo"),
        Either(Refused(("model.nemo",)), Right(still_good)),
        "",
    ),
    (
        "an export onto a folder with files",
        ("export", "model.nemo", "audio", "--format", "safetensors"),
        Refused(("audio",)),
        "",
    ),
    (
        "an export into a folder that is not there",
        ("export", "model.nemo", "new/deep/x.nemo", "--format", "nemo"),
        Either(Refused(("new",)), exported("new/deep/x.nemo")),
        "",
    ),
    (
        "init with an include that matches nothing",
        pretrain("init_from_nemo_model={a: {path: model.nemo, include: [encodr]}}"),
        Refused(("include",)),
        "",
    ),
    (
        "init with an exclude that leaves nothing",
        pretrain("init_from_nemo_model={a: {path: model.nemo, exclude: ['']}}"),
        Refused(("exclude|0 loaded|nothing",)),
        "",
    ),
    ("init with a model of another width", pretrain("init_from_nemo_model=model.nemo", "model.encoder.d_model=64"),
     Either(Refused(("model.nemo",)), Right(trained)), ""),
    ("init with a URL", pretrain("init_from_nemo_model=https://127.0.0.1:9/x.nemo"), Refused(("127.0.0.1",)), ""),
    ("init with a list", pretrain("init_from_nemo_model=[model.nemo]"), Refused(("init_from_nemo_model",)), ""),
    ("init from two sources at once", pretrain("init_from_nemo_model=model.nemo", f"init_from_ptl_ckpt={RUN}/x.ckpt"),
     Refused(("init_from",)), ""),
    ("a good file for verify, without NeMo", ("verify", "model.nemo"), Right(not_compared), ""),
    ("verify with recorded numbers that are no numbers", ("verify", "model.nemo", "--recorded", "results.json"),
     Refused(("results.json",)), "not numpy"),
    ("verify with recorded numbers that are code", ("verify", "model.nemo", "--recorded", "results.npz"),
     Refused(("results.npz",)), "code"),
]  # fmt: skip


def _other_setup(content: str) -> Callable[[Path], None]:
    def setup(folder: Path) -> None:
        probe_weights(content)(folder)
        if content == "code":
            np.savez(folder / "results.npz", x=np.array([Evil()], dtype=object))
            np.savez(folder / "batch.npz", x=np.array([Evil()], dtype=object))

    return setup


def trials() -> Iterator[Trial]:
    nemo_files = [*TENSORS, *PICKLES, *TARS, *YAML]
    for rows, file in ((nemo_files, "bad.nemo"), (CKPTS, "bad.ckpt"), (SAFE, "bad.safetensors")):
        for name, use, make, expected in rows:
            yield trial(name, use, make, expected, file)
    for name, use, make, expected, file in PLACES:
        yield trial(name, use, make, expected, file)
    for name, command, expected, content in OTHERS:
        yield Trial("model files", name, command, expected, _other_setup(content))
