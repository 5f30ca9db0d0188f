"""Model files that are damaged, foreign, malicious or inconsistent, given to every command that reads one."""

from __future__ import annotations

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
import omegaconf
import torch
import yaml
from benchmarks.hostile.checkpoints import (
    HTML_PAGE,
    LFS,
    YAML_BOMB,
    YAML_EVIL,
    evil_index,
    hole,
    rezipped,
    sharded,
    wide,
)
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
    both,
    cut,
    losses,
    patched,
    pretrain,
    same_features,
    trained,
    write_lines,
)

GROUP = "model files"
CONFIG, WEIGHTS = "./model_config.yaml", "./model_weights.ckpt"
NORM = "encoder.layers.0.norm_out.weight"
Weights = dict[str, Any]
Settings = dict[str, Any]


# -------------------------------------------------------------------------------------------------- how files are made


def original(name: str = "model.nemo") -> bytes:
    return (Fixture.path / name).read_bytes()


def members() -> dict[str, bytes]:
    with tarfile.open(Fixture.path / "model.nemo") as archive:
        return {item.name: archive.extractfile(item).read() for item in archive}  # type: ignore[union-attr]


def packed(items: dict[str, bytes] | list[tuple[str, bytes]], mode: str = "w") -> bytes:
    """A tar file as NeMo writes it, without checksums of ours."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in items.items() if isinstance(items, dict) else items:
            item = tarfile.TarInfo(name)
            item.size = len(content)
            archive.addfile(item, io.BytesIO(content))
    return buffer.getvalue()


def with_special(kind: bytes, name: str, target: str = "") -> bytes:
    """The model, and a member that is a link, a pipe or a device; it replaces one of the same name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member, content in members().items():
            item = tarfile.TarInfo(member)
            item.size = len(content)
            if member != name:
                archive.addfile(item, io.BytesIO(content))
        item = tarfile.TarInfo(name)
        item.type, item.linkname = kind, target
        archive.addfile(item)
    return buffer.getvalue()


def saved(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def weights() -> Weights:
    return dict(torch.load(io.BytesIO(members()[WEIGHTS]), weights_only=True))


def weighted(change: Callable[[Weights], Any], **options: Any) -> bytes:
    """The model with changed weights, and right checksums."""
    content = weights()
    changed = change(content)
    return packed({**members(), WEIGHTS: saved(content if changed is None else changed, **options)})


def configured(change: Callable[[Settings], Any]) -> bytes:
    """The model with a changed configuration, without a checksum, as if NeMo had written it."""
    content = yaml.safe_load(members()[CONFIG])
    change(content)
    return packed({**members(), CONFIG: yaml.safe_dump(content, sort_keys=False).encode()})


def setting(path: str, value: Any) -> bytes:
    def change(content: Settings) -> None:
        *way, last = path.split(".")
        for key in way:
            content = content[key]
        content[last] = value

    return configured(change)


def text_config(content: bytes) -> bytes:
    return packed({**members(), CONFIG: content})


def tensors(change: Callable[[dict[str, Any], bytes], tuple[Any, bytes] | None]) -> bytes:
    """model.safetensors with a changed header and data."""
    data = original("model.safetensors")
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    header, body = change(header, body) or (header, body)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def in_header(*keys: str, to: Any) -> bytes:
    def change(header: dict[str, Any], body: bytes) -> None:
        inner = header
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to

    return tensors(change)


def without_checksum(header: dict[str, Any], body: bytes) -> tuple[Any, bytes]:
    header["__metadata__"].pop("crc32")
    begin, end = header[NORM]["data_offsets"]
    return header, patched(body, begin, np.full((end - begin) // 4, np.nan, np.float32).tobytes())


def ckpt(change: Callable[[dict[str, Any]], Any]) -> bytes:
    content = torch.load(Fixture.path / "model.ckpt", weights_only=True)
    changed = change(content)
    return saved(content if changed is None else changed)


def as_nemo_does(content: dict[str, Any]) -> None:
    """Checkpoints of NeMo have objects of omegaconf in them."""
    content["hyper_parameters"] = {"cfg": omegaconf.OmegaConf.create(content["hyper_parameters"]["cfg"])}
    for key in ("progress", "data_position", "epoch_means", "nest_ssl_version"):
        del content[key]
    content["pytorch-lightning_version"] = "2.4.0"


def file(name: str, content: bytes | Callable[[], bytes]) -> Setup:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content())


def scripted() -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), buffer)
    return buffer.getvalue()


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members().items():
            archive.writestr(name[2:], content)
    return buffer.getvalue()


def claims_10_gb() -> bytes:
    """The tar header of the weights says 10 GB; they are not there."""
    item = tarfile.TarInfo(WEIGHTS)
    item.size = 10 << 30
    return packed({CONFIG: members()[CONFIG]})[: 512 + 6656] + item.tobuf()


def sparse(folder: Path) -> None:
    with (folder / "m.nemo").open("wb") as stream:
        stream.truncate(40 << 30)


def filled(name: str, number: float) -> Callable[[Weights], None]:
    return lambda content: content.update({name: torch.full_like(content[name], number)})


def cast(dtype: torch.dtype) -> Callable[[Weights], Weights]:
    return lambda content: {k: v.to(dtype) if v.is_floating_point() else v for k, v in content.items()}


def labelled(folder: Path) -> None:
    lines = [{"audio_filepath": f"audio/{i}.wav", "duration": 1.5, "label": "ab"[i % 2]} for i in range(8)]
    write_lines(folder / "labelled.jsonl", lines)


# -------------------------------------------------------------------------------------------------------- what is right


def close_features(limit: float) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        files = sorted((folder / "out").rglob("*.npy"))
        if len(files) != 1:
            return f"{len(files)} feature files"
        difference = float(np.abs(np.load(files[0]) - Fixture.feature()).max())
        return None if difference < limit else f"features differ by {difference}"

    return check


def new_features(folder: Path, outcome: Outcome) -> str | None:
    """The manifest names features that are not those of the old model."""
    lines = [json.loads(line) for line in (folder / "out/manifest.jsonl").read_text().splitlines()]
    for line in lines:
        if np.array_equal(np.load(folder / "out" / line["feature_filepath"]), Fixture.feature()):
            return "the features of the old model are given for the new one"
    return None if len(lines) == 1 else f"{len(lines)} lines"


def named_features(folder: Path, outcome: Outcome) -> str | None:
    """The features that the manifest names are right."""
    (line,) = [json.loads(line) for line in (folder / "out/manifest.jsonl").read_text().splitlines()]
    found = np.load(folder / "out" / line["feature_filepath"])
    return None if np.array_equal(found, Fixture.feature()) else "the features are wrong"


def same_model(name: str) -> Check:
    """This .nemo file has the weights of the original."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        with tarfile.open(folder / name) as archive:
            stream = archive.extractfile(next(item for item in archive if item.name.endswith("model_weights.ckpt")))
            found = torch.load(io.BytesIO(stream.read()), weights_only=True)  # type: ignore[union-attr]
        expected = weights()
        if found.keys() != expected.keys():
            return "other weights"
        return None if all(torch.equal(found[key], expected[key]) for key in expected) else "weights differ"

    return check


def started_from(folder: Path, outcome: Outcome) -> str | None:
    """The first loss is not that of new weights: those of the file were taken."""
    first = losses(folder / RUN)[0]
    if first == losses(Fixture.path / "runs/whole")[0]:
        return "the weights of the file were not used"
    return trained(folder, outcome)


def kept_folder(folder: Path, outcome: Outcome) -> str | None:
    return None if (folder / "out/precious.txt").exists() else "a file of somebody else was deleted"


# --------------------------------------------------------------------------------------------------------------- trials

SAME = Right(same_features)
ROW = tuple[str, bytes | Callable[[], bytes], Expected]


def refused(*words: str) -> Refused:
    return Refused(words)


def same_or(*words: str) -> Either:
    return Either(Refused(words), SAME)


def nemo_rows() -> list[ROW]:
    """For `extract m.nemo`."""
    file_named = refused("m.nemo")
    parts = members()
    return [
        ("a .nemo file that is empty", b"", file_named),
        ("a .nemo file of which half was downloaded", lambda: cut(0.5)(original()), file_named),
        ("a .nemo file with a page of zeros in its weights", lambda: hole(original()), file_named),
        (
            "a .nemo file with another digit in its configuration",
            lambda: original().replace(b"n_heads: 4", b"n_heads: 2"),
            file_named,
        ),
        ("a .nemo file whose first tar header is damaged", lambda: patched(original(), 1030, b"\xff" * 20), file_named),
        ("a .nemo file that is an error page", HTML_PAGE, file_named),
        ("a .nemo file that is a pointer of git-lfs", LFS, file_named),
        ("a .nemo file that is compressed, as early NeMo's", lambda: packed(parts, "w:gz"), same_or("m.nemo")),
        (
            "a .nemo file that was packed again in a folder",
            lambda: packed({f"nest/{k[2:]}": v for k, v in parts.items()}),
            same_or("m.nemo"),
        ),
        ("a .nemo file packed again without the dots", lambda: packed({k[2:]: v for k, v in parts.items()}), SAME),
        ("a .nemo file without a configuration", lambda: packed({WEIGHTS: parts[WEIGHTS]}), file_named),
        ("a .nemo file without weights", lambda: packed({CONFIG: parts[CONFIG]}), file_named),
        (
            "a .nemo file with two different weights",
            lambda: packed([*parts.items(), (WEIGHTS, saved({k: v * 0 for k, v in weights().items()}))]),
            same_or("m.nemo"),
        ),
        ("a .nemo file that claims 10 GB of weights", claims_10_gb, file_named),
        (
            "a .nemo file that writes outside its folder",
            lambda: packed({"../../pwned": b"x", "../pwned": b"x", **parts}),
            same_or("m.nemo"),
        ),
        (
            "a .nemo file whose weights are a link to a file",
            lambda: with_special(tarfile.SYMTYPE, WEIGHTS, "/etc/passwd"),
            file_named,
        ),
        ("a .nemo file whose weights are a pipe", lambda: with_special(tarfile.FIFOTYPE, WEIGHTS), file_named),
        ("a .nemo file whose weights run a command", lambda: packed({**parts, WEIGHTS: EVIL}), file_named),
        (
            "a .nemo file whose archive of weights runs a command",
            lambda: packed({**parts, WEIGHTS: rezipped(evil_index)(parts[WEIGHTS])}),
            file_named,
        ),
        ("a .nemo file whose configuration runs a command", lambda: text_config(YAML_EVIL.encode()), file_named),
        ("a .nemo file whose configuration multiplies itself", lambda: text_config(YAML_BOMB.encode()), file_named),
        ("a .nemo file that reads the environment", lambda: setting("encoder.d_model", "${oc.env:HOME}"), file_named),
        ("a .nemo file whose configuration is a list", lambda: text_config(b"- a\n- b\n"), file_named),
        (
            "a .nemo file whose configuration is in UTF-16",
            lambda: text_config(parts[CONFIG].decode().encode("utf-16")),
            same_or("m.nemo"),
        ),
        (
            "a .nemo file whose configuration has an encoder twice",
            lambda: text_config(parts[CONFIG] + b"encoder:\n  n_layers: 1\n  d_model: 32\n  feat_in: 80\n"),
            file_named,
        ),
        (
            "a .nemo file of a recogniser",
            lambda: packed(
                {
                    **parts,
                    CONFIG: b"target: nemo.collections.asr.models."
                    b"EncDecCTCModelBPE\nsample_rate: 16000\ntokenizer: {dir: x, type: bpe}\n",
                }
            ),
            file_named,
        ),
        (
            "a .nemo file that has fewer layers in its settings",
            lambda: setting("encoder.n_layers", 1),
            refused("layers"),
        ),
        ("a .nemo file with another width in its settings", lambda: setting("encoder.d_model", 64), refused("m.nemo")),
        (
            "a .nemo file whose heads do not divide its width",
            lambda: setting("encoder.n_heads", 5),
            refused("n_heads|heads"),
        ),
        ("a .nemo file with ten million layers", lambda: setting("encoder.n_layers", 10**7), refused("layers")),
        (
            "a .nemo file with a width of a billion",
            lambda: setting("encoder.d_model", 10**9),
            refused("d_model|m.nemo"),
        ),
        (
            "a .nemo file with a width that is a text",
            lambda: setting("encoder.d_model", "thirty-two"),
            refused("d_model"),
        ),
        (
            "a .nemo file with a kernel of 8 frames",
            lambda: setting("encoder.conv_kernel_size", 8),
            refused("kernel|m.nemo"),
        ),
        (
            "a .nemo file with two sample rates",
            lambda: setting("preprocessor.sample_rate", 8000),
            refused("sample_rate"),
        ),
        (
            "a .nemo file with another window than its own",
            lambda: setting("preprocessor.window", "hamming"),
            refused("window"),
        ),
        (
            "a .nemo file with a window stride of 0",
            lambda: setting("preprocessor.window_stride", 0),
            refused("window_stride"),
        ),
        (
            "a .nemo file whose encoder is a system call",
            lambda: setting("encoder._target_", "os.system"),
            refused("_target_|os.system|m.nemo"),
        ),
        (
            "a .nemo file whose settings colour the terminal",
            lambda: setting("encoder.\x1b[2Jx\x07", "\x1b]0;x\x07"),
            same_or("m.nemo"),
        ),
        ("a .nemo file with a NaN weight", lambda: weighted(filled(NORM, float("nan"))), refused(NORM)),
        (
            "a .nemo file with a negative variance",
            lambda: weighted(filled("encoder.layers.1.conv.batch_norm.running_var", -1.0)),
            refused("running_var"),
        ),
        (
            "a .nemo file whose mel filters are zeros",
            lambda: weighted(filled("preprocessor.featurizer.fb", 0.0)),
            refused("fb|filter"),
        ),
        (
            "a .nemo file with a weight of integers",
            lambda: weighted(lambda w: w.update({NORM: torch.ones(32, dtype=torch.int32)})),
            refused(NORM),
        ),
        (
            "a .nemo file in half precision",
            lambda: weighted(cast(torch.float16)),
            Either(file_named, Right(close_features(0.1))),
        ),
        ("a .nemo file that lacks a weight", lambda: weighted(lambda w: w.pop(NORM) is None or None), refused(NORM)),
        (
            "a .nemo file with a weight too many",
            lambda: weighted(lambda w: w.update({"encoder.layers.2.x": torch.ones(3)})),
            refused("encoder.layers.2"),
        ),
        (
            "a .nemo file with names that colour the terminal",
            lambda: weighted(lambda w: w.update({"encoder.\x1b[2J\x07": torch.ones(3)})),
            file_named,
        ),
        (
            "a .nemo file whose names begin with module",
            lambda: weighted(lambda w: {f"module.{k}": v for k, v in w.items()}),
            same_or("m.nemo"),
        ),
        (
            "a .nemo file with a tensor of 4 TB in 4 bytes",
            lambda: weighted(lambda w: w.update({NORM: torch.zeros(1).expand(10**12)})),
            refused(NORM),
        ),
        ("a .nemo file whose weights are a list", lambda: weighted(lambda w: list(w.values())), file_named),
        (
            "a .nemo file in torch's form of 2019",
            lambda: weighted(lambda w: None, _use_new_zipfile_serialization=False),
            file_named,
        ),
        ("a .nemo file that is a safetensors file", lambda: original("model.safetensors"), same_or("m.nemo")),
    ]


def safetensors_rows() -> list[ROW]:
    """For `extract m.safetensors`."""
    file_named = refused("m.safetensors")
    deep = b'{"a":' * 100_000
    return [
        ("a safetensors file with a flipped bit", lambda: hole(original("model.safetensors")), file_named),
        ("a safetensors file that is cut", lambda: cut(0.8)(original("model.safetensors")), file_named),
        (
            "a safetensors file whose header claims a terabyte",
            lambda: patched(original("model.safetensors"), 0, struct.pack("<Q", 1 << 40)),
            file_named,
        ),
        (
            "a safetensors file with a header nested 100,000 deep",
            lambda: struct.pack("<Q", len(deep)) + deep,
            file_named,
        ),
        (
            "a safetensors file without a configuration",
            lambda: tensors(lambda h, b: h["__metadata__"].pop("model_config") and None),
            file_named,
        ),
        (
            "a safetensors file whose configuration is not JSON",
            lambda: in_header("__metadata__", "model_config", to="{x"),
            file_named,
        ),
        (
            "a safetensors file whose checksum is a word",
            lambda: in_header("__metadata__", "crc32", to="none"),
            file_named,
        ),
        ("a safetensors file of others with NaN", lambda: tensors(without_checksum), refused(NORM)),
        (
            "a safetensors file with a tensor beyond its end",
            lambda: in_header(NORM, "data_offsets", to=[0, 1 << 50]),
            file_named,
        ),
        ("a safetensors file of another shape", lambda: in_header(NORM, "shape", to=[8, 4]), file_named),
    ]


def ckpt_rows() -> list[ROW]:
    """For `extract m.ckpt`."""
    file_named = refused("m.ckpt")
    return [
        (
            "a .ckpt file with weights and no settings",
            lambda: ckpt(lambda c: {"state_dict": c["state_dict"]}),
            file_named,
        ),
        ("a .ckpt file of NeMo with objects in it", lambda: ckpt(as_nemo_does), same_or("m.ckpt")),
        ("a .ckpt file with an object that runs a command", lambda: ckpt(lambda c: c.update(x=Evil())), file_named),
        ("a .ckpt file of a compiled program", scripted, file_named),
    ]


def special_rows() -> list[tuple[str, list[str], Setup | None, Expected]]:
    """Files that are no files, other commands, and folders of results."""
    extract = ["extract", "m.nemo", "audio/0.wav", "out", "--device", "cpu"]
    good = file("m.nemo", original)
    nan = file("m.nemo", lambda: weighted(filled(NORM, float("nan"))))
    probe = [
        "probe",
        "m.nemo",
        "--train",
        "labelled.jsonl",
        "--test",
        "labelled.jsonl",
        "--label",
        "label",
        "--output",
        "out",
    ]
    by_weights = [*extract, "--aggregation", "weighted", "--weights", "results.json"]
    numbers = io.BytesIO()
    np.savez(numbers, allow_pickle=True, x=np.array([Evil()], dtype=object))

    def old(folder: Path) -> None:
        shutil.copytree(Fixture.path / "features", folder / "out")

    def init(key: str, name: str) -> list[str]:
        return pretrain(f"+{key}={name}")

    def weights_of(text: bytes) -> Setup:
        return both(good, file("results.json", text))

    def occupied(folder: Path) -> None:
        (folder / "out").mkdir()
        (folder / "out/precious.txt").touch()

    return [
        ("a model that is a named pipe", extract, lambda f: os.mkfifo(f / "m.nemo"), refused("m.nemo")),
        ("a model that is a folder", extract, lambda f: (f / "m.nemo").mkdir(), refused("m.nemo")),
        (
            "a model that is a link to endless zeros",
            extract,
            lambda f: (f / "m.nemo").symlink_to("/dev/zero"),
            refused("m.nemo"),
        ),
        ("a model that is 40 GB of nothing", extract, sparse, refused("m.nemo")),
        (
            "a folder of shards whose index runs a command",
            ["extract", "m.ckpt", *extract[2:]],
            lambda f: [
                shutil.copytree(sharded() / RUN / "checkpoints/last.ckpt", f / "m.ckpt"),
                (f / "m.ckpt/.metadata").write_bytes(EVIL),
            ],
            refused("m.ckpt"),
        ),
        (
            "features of an earlier model under the same name",
            extract,
            both(old, lambda f: shutil.copy(Fixture.path / "runs/whole/checkpoints/whole.nemo", f / "m.nemo")),
            Either(Refused(("out",)), Right(new_features)),
        ),
        (
            "features of which one file is cut",
            extract,
            both(old, good, lambda f: [p.write_bytes(p.read_bytes()[:-200]) for p in (f / "out").rglob("*.npy")]),
            Either(Refused(("out",)), Right(named_features)),
        ),
        (
            "features whose description is cut",
            extract,
            both(old, good, lambda f: (f / "out/extract.json").write_text('{"la')),
            Either(Refused(("extract.json|out",)), Right(named_features)),
        ),
        (
            "weights of layers from a probe that was cut",
            by_weights,
            weights_of(b'{"layer_weights": [0.2, 0.'),
            refused("results.json"),
        ),
        (
            "weights of layers that are NaN",
            by_weights,
            weights_of(b'{"layer_weights": [NaN, 0.5]}'),
            refused("results.json|weights"),
        ),
        ("a description of a model with a NaN", ["info", "m.nemo"], nan, refused(NORM)),
        (
            "a comparison of a model with one that is cut",
            ["info", "model.nemo", "m.nemo"],
            both(file("model.nemo", original), file("m.nemo", lambda: cut(0.7)(original()))),
            refused("m.nemo"),
        ),
        (
            "a description of an exported graph",
            ["info", "m.onnx"],
            file("m.onnx", b"\x08\x08\x12\x07pytorch" + bytes(99)),
            refused("m.onnx"),
        ),
        ("a check of a model with a NaN", ["verify", "m.nemo"], nan, Refused((NORM + "|not finite",), codes=(1,))),
        (
            "a check with recorded numbers that run a command",
            ["verify", "m.nemo", "--recorded", "r.npz"],
            both(good, file("r.npz", numbers.getvalue()), file("batch.npz", numbers.getvalue())),
            refused("npz"),
        ),
        (
            "a check by a Python that says nothing",
            ["verify", "m.nemo", "--nemo-python", "/bin/true"],
            good,
            refused("/bin/true|NeMo"),
        ),
        ("a probe of a model with a NaN", probe, both(nan, labelled), refused(NORM)),
        (
            "an export of a model that is cut",
            ["export", "m.nemo", "out", "--format", "huggingface"],
            file("m.nemo", lambda: cut(0.6)(original())),
            refused("m.nemo"),
        ),
        (
            "an export of a model onto itself",
            ["export", "m.nemo", "m.nemo", "--format", "nemo"],
            good,
            Either(Refused(("m.nemo",)), Right(same_model("m.nemo"))),
        ),
        (
            "an export onto a folder with other files",
            ["export", "m.nemo", "out", "--format", "nemo"],
            both(good, occupied),
            Either(Refused(("out",)), Right(kept_folder)),
        ),
        (
            "a start from a .nemo file with a page of zeros",
            init("init_from_nemo_model", "m.nemo"),
            file("m.nemo", lambda: hole(original())),
            refused("m.nemo"),
        ),
        (
            "a start from a model of another width",
            init("init_from_nemo_model", "m.nemo"),
            lambda f: shutil.copy(wide() / RUN / "checkpoints/run.nemo", f / "m.nemo"),
            refused("m.nemo|shape|size"),
        ),
        (
            "a start from weights of which no name is known",
            init("init_from_ptl_ckpt", "m.ckpt"),
            file("m.ckpt", lambda: saved({"state_dict": {"bert.encoder.weight": torch.ones(3)}})),
            refused("m.ckpt"),
        ),
        (
            "a start from a checkpoint that NeMo wrote",
            init("init_from_ptl_ckpt", "m.ckpt"),
            file("m.ckpt", lambda: ckpt(as_nemo_does)),
            Right(started_from),
        ),
        (
            "a start from a checkpoint that runs a command",
            init("init_from_ptl_ckpt", "m.ckpt"),
            file("m.ckpt", lambda: ckpt(lambda c: c.update(x=Evil()))),
            refused("m.ckpt"),
        ),
    ]


def trials() -> list[Trial]:
    found = [
        Trial(GROUP, name, ["extract", model, "audio/0.wav", "out", "--device", "cpu"], expected, file(model, content))
        for model, rows in (("m.nemo", nemo_rows()), ("m.safetensors", safetensors_rows()), ("m.ckpt", ckpt_rows()))
        for name, content, expected in rows
    ]
    return found + [Trial(GROUP, name, command, expected, setup) for name, command, setup, expected in special_rows()]
