"""Model files that are damaged, foreign or hostile, given to every command that reads one.

What each container can show at all is in docs/export.md: the archives of .nemo and .ckpt files have checksums, our
.safetensors files too, those of others none. A model that is accepted must give the features of the undamaged one.
"""

from __future__ import annotations

import binascii
import bz2
import copy
import gzip
import io
import json
import lzma
import os
import shutil
import struct
import sys
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
    both,
    cut,
    ended_well,
    flipped,
    on_bytes,
    patched,
    pretrain,
    same_features,
    trained,
    write_lines,
    zeros,
)

Weights = dict[str, Any]
Config = dict[str, Any]
NEMO, CKPT, SAFE = "model.nemo", "model.ckpt", "model.safetensors"
QUERY = "encoder.layers.0.self_attn.linear_q.weight"
NORM = "encoder.layers.0.conv.batch_norm."
WINDOW, MELS, BOOKS = "preprocessor.featurizer.window", "preprocessor.featurizer.fb", "quantizer.codebooks"
NAMED = Refused((NEMO,))
ANY = Either(Refused(), Right(same_features))
STILL = ["model.optim.lr=1e-9", "model.optim.sched.min_lr=0", "trainer.max_steps=2"]
"""A training that does not move the weights, so that those it began with can be told."""

# ------------------------------------------------------------------------------------------------------------- commands


def extract(file: str = NEMO) -> list[str]:
    return ["extract", file, "audio/0.wav", "out", "--device", "cpu"]


def export(file: str = NEMO, out: str = "out.nemo", form: str = "nemo") -> list[str]:
    return ["export", file, out, "--format", form]


def info(*files: str) -> list[str]:
    return ["info", *(files or (NEMO,))]


def probe(file: str = NEMO) -> list[str]:
    given = ["--train", "label.jsonl", "--test", "label.jsonl", "--label", "label", "--device", "cpu"]
    return ["probe", file, *given, "--output", "probe"]


def verify(file: str = NEMO, *more: str) -> list[str]:
    return ["verify", file, *more]


def begin(key: str, file: str, *more: str) -> list[str]:
    return pretrain(f"{key}={file}", *STILL, *more)


# --------------------------------------------------------------------------------------------------------------- set-up


def member(name: str) -> bytes:
    with tarfile.open(Fixture.path / NEMO) as archive:
        file = archive.extractfile(f"./{name}")
        assert file
        return file.read()


def config() -> Config:
    found: Config = yaml.safe_load(member("model_config.yaml"))
    return found


def weights() -> Weights:
    found: Weights = torch.load(io.BytesIO(member("model_weights.ckpt")), weights_only=True)
    return found


def saved(content: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def tar(*members: tuple[tarfile.TarInfo | str, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, data in members:
            entry = tarfile.TarInfo(name) if isinstance(name, str) else name
            if isinstance(name, str):
                entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def nemo_bytes(
    settings: Config | bytes | None = None,
    tensors: object = None,
    more: tuple[tuple[tarfile.TarInfo | str, bytes], ...] = (),
) -> bytes:
    """A file as NeMo writes it: no checksums but those of torch's archive."""
    settings = member("model_config.yaml") if settings is None else settings
    text = settings if isinstance(settings, bytes) else yaml.safe_dump(settings, sort_keys=False).encode()
    data = member("model_weights.ckpt") if tensors is None else tensors
    data = data if isinstance(data, bytes) else saved(data)
    return tar(("./model_config.yaml", text), ("./model_weights.ckpt", data), *more)


def written(make: Callable[[], bytes], name: str = NEMO) -> Setup:
    def setup(folder: Path) -> None:
        (folder / name).write_bytes(make())

    return setup


def with_config(change: Callable[[Config], object]) -> Setup:
    def setup(folder: Path) -> None:
        settings = copy.deepcopy(config())
        change(settings)
        (folder / NEMO).write_bytes(nemo_bytes(settings))

    return setup


def setting(key: str, value: object) -> Setup:
    def change(settings: Config) -> None:
        *sections, last = key.split(".")
        for section in sections:
            settings = settings[section]
        settings[last] = value

    return with_config(change)


def with_text(change: Callable[[bytes], bytes]) -> Setup:
    return written(lambda: nemo_bytes(change(member("model_config.yaml"))))


def with_weights(change: Callable[[Weights], object]) -> Setup:
    """The change is made in place, or returns what is saved instead."""

    def make() -> bytes:
        tensors = weights()
        result = change(tensors)
        return nemo_bytes(tensors=tensors if result is None else result)

    return written(make)


def tensor(name: str, change: Callable[[torch.Tensor], object]) -> Setup:
    def put(tensors: Weights) -> None:
        tensors[name] = change(tensors[name].clone())

    return with_weights(put)


def put(at: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(values: torch.Tensor) -> torch.Tensor:
        values.view(-1)[at] = value
        return values

    return change


def given(*names: str) -> Setup:
    """Undamaged files of the fixture."""

    def setup(folder: Path) -> None:
        for name in names:
            shutil.copy(Fixture.path / name, folder / name)

    return setup


def named(source: str, target: str) -> Setup:
    def setup(folder: Path) -> None:
        shutil.copy(Fixture.path / source, folder / target)

    return setup


def labels(folder: Path) -> None:
    lines = [{"audio_filepath": f"audio/{i}.wav", "duration": 1.6 + 0.1 * i, "label": "ab"[i % 2]} for i in range(8)]
    write_lines(folder / "label.jsonl", lines)


def archive_with(
    change: Callable[[str, bytes], bytes | None], compress: int = zipfile.ZIP_STORED
) -> Callable[[bytes], bytes]:
    """Write torch's archive anew, with right checksums for changed records; None leaves a record out."""

    def make(data: bytes) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", compress) as new:
            for name in old.namelist():
                content = change(name, old.read(name))
                if content is not None:
                    new.writestr(zipfile.ZipInfo(name), content, compress)
        return buffer.getvalue()

    return make


def record(ending: str, content: Callable[[bytes], bytes | None]) -> Callable[[bytes], bytes]:
    return archive_with(lambda name, data: content(data) if name.endswith(ending) else data)


def inner(change: Callable[[bytes], bytes]) -> Setup:
    """Change the bytes of the weights in a .nemo file."""
    return written(lambda: nemo_bytes(tensors=change(member("model_weights.ckpt"))))


def ckpt(change: Callable[[dict[str, Any]], object]) -> Setup:
    def setup(folder: Path) -> None:
        content = torch.load(Fixture.path / CKPT, weights_only=True)
        result = change(content)
        torch.save(content if result is None else result, folder / CKPT)

    return setup


def safe_parts() -> tuple[dict[str, Any], bytes]:
    data = (Fixture.path / SAFE).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def safe_bytes(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def safe(change: Callable[[dict[str, Any]], object]) -> Setup:
    def make() -> bytes:
        header, data = safe_parts()
        result = change(header)
        return safe_bytes(header if result is None else result, data)

    return written(make, SAFE)


def gone(mapping: dict[str, Any], *keys: str) -> None:
    for key in keys:
        del mapping[key]


def entry(name: str, kind: bytes, target: str = "", size: int = 0) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, target, size
    return made


def huge_member(name: str, size: int) -> bytes:
    """A tar header that promises more than there is."""
    header = tarfile.TarInfo(name)
    header.size = size
    return header.tobuf(tarfile.GNU_FORMAT)


def bomb(name: str, size: int) -> bytes:
    """A gzip-compressed archive with a member of this many blanks."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1) as file:
        file.write(huge_member(name, size))
        for _ in range(size >> 20):
            file.write(b" " * (1 << 20))
        file.write(bytes(1024))
    return buffer.getvalue()


def cached(folder: Path, change: Callable[[bytes], bytes] = bytes) -> Path:
    """A model in the cache of the hub, as huggingface_hub keeps it."""
    repository = folder.parent / "home/.cache/huggingface/hub/models--acme--speech"
    revision = "0123456789abcdef0123456789abcdef01234567"
    for name in (f"snapshots/{revision}", "refs", "blobs"):
        (repository / name).mkdir(parents=True)
    (repository / "refs/main").write_text(revision)
    blob = repository / "blobs/aa11"
    blob.write_bytes(change((Fixture.path / NEMO).read_bytes()))
    (repository / f"snapshots/{revision}/speech.nemo").symlink_to("../../blobs/aa11")
    return blob


OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


# -------------------------------------------------------------------------------------------------------------- checks


def query(path: Path) -> torch.Tensor:
    found: torch.Tensor = torch.load(path, weights_only=True)["state_dict"][QUERY]
    return found


def begun_from_it(folder: Path, outcome: Outcome) -> str | None:
    """Training began with the weights of the fixture's model."""
    difference = (query(folder / RUN / "checkpoints/last.ckpt") - query(Fixture.path / CKPT)).abs().max().item()
    return f"weights differ from the file's by {difference:.2g}" if difference > 1e-4 else trained(folder, outcome)


def read_again(*names: str) -> Check:
    """What was exported has the weights of the fixture's model."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        for name in names:
            if name.endswith(".safetensors"):
                from safetensors.torch import load_file

                found = load_file(folder / name)
            else:
                with tarfile.open(folder / name) as archive:
                    inside = next(m for m in archive.getmembers() if m.name.endswith("model_weights.ckpt"))
                    file = archive.extractfile(inside)
                    assert file
                    found = torch.load(io.BytesIO(file.read()), weights_only=True)
            expected = weights()
            if found.keys() != expected.keys():
                return f"{name}: other keys: {sorted(found.keys() ^ expected.keys())[:3]}"
            for key, value in expected.items():
                if not torch.equal(found[key], value):
                    return f"{name}: {key} differs"
        return None

    return check


def untouched(*names: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        changed = [name for name in names if (folder / name).read_bytes() != (Fixture.path / name).read_bytes()]
        return f"changed {changed}" if changed else None

    return check


def nearly_same(folder: Path, outcome: Outcome) -> str | None:
    """Features within what half precision of the weights explains."""
    files = list((folder / "out").rglob("*.npy"))
    if len(files) != 1:
        return f"{len(files)} feature files"
    difference = float(np.abs(np.load(files[0]) - Fixture.feature()).max())
    return None if difference < 0.2 else f"features differ by {difference:.2g}"


def quiet_features(folder: Path, outcome: Outcome) -> str | None:
    files = list((folder / "out").rglob("*.npy"))
    bad = [path.name for path in files if not np.isfinite(np.load(path)).all()]
    return f"features are not finite: {bad}" if bad else None if files else "no features"


# -------------------------------------------------------------------------------------------------------------- trials

Row = tuple[str, list[str], Setup, Expected]


def containers() -> list[Row]:
    lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 478012416\n"
    page = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Access to model is restricted</body></html>"
    return [
        ("a git-lfs pointer", extract(), written(lambda: lfs), NAMED),
        ("a sign-in page of a proxy", info(), written(lambda: page), NAMED),
        ("a JSON error of an API", export(), written(lambda: b'{"error":"Repository not found"}'), NAMED),
        ("a partial download, .incomplete inside", probe(), both(labels, on_copy(cut(0.61))), NAMED),
        ("only the first block", info(), on_copy(lambda data: data[:512]), NAMED),
        ("the config is whole, the weights are not there", extract(), on_copy(lambda data: data[:8192]), NAMED),
        ("ends before the archive's end marks", extract(), on_copy(lambda data: data.rstrip(b"\0")), ANY),
        ("256 kB of other bytes after the end", extract(), on_copy(lambda data: data + os.urandom(1 << 18)), ANY),
        ("a preallocated file, never written", begin("init_from_nemo_model", NEMO), on_copy(zeros), NAMED),
        ("the second half is zeros", extract(), on_copy(lambda data: data[: len(data) // 2] + bytes(len(data) // 2)), NAMED),
        ("a block of 4096 zeros in the weights", export(), on_copy(lambda data: patched(data, 200_704, bytes(4096))), NAMED),
        ("a bit of a weight", probe(), both(labels, on_copy(bit)), NAMED),
        ("CRLF conversion of a binary transfer", info(), on_copy(lambda data: data.replace(b"\n", b"\r\n")), NAMED),
        ("bytes over 127 became question marks", info(), on_copy(lambda data: data.decode("ascii", "replace").encode()), NAMED),
        ("base64 text", extract(), on_copy(binascii.b2a_base64), NAMED),
        ("gzip, as early NeMo wrote", extract(), on_copy(gzip.compress), ANY),
        ("bzip2", extract(), on_copy(bz2.compress), ANY),
        ("xz", extract(), on_copy(lzma.compress), ANY),
        ("gzip, cut off", extract(), on_copy(lambda data: gzip.compress(data)[:-5000]), NAMED),
        ("gzip, its checksum is wrong", info(), on_copy(lambda data: gzip.compress(data)[:-8] + b"12345678"), NAMED),
        ("gzip of 3 GB of blanks as config", info(), written(lambda: bomb("./model_config.yaml", 3 << 30)), NAMED),
        ("header promises 8 TB of weights", extract(), written(lambda: tar(("./model_config.yaml", member("model_config.yaml")))[:8192] + huge_member("./model_weights.ckpt", 8 << 40) + bytes(4096)), NAMED),
        ("negative member size", info(), written(lambda: negative_size()), NAMED),
        ("old and new file in one: concatenated", extract(), on_copy(lambda data: data + data), ANY),
        ("member names without ./", extract(), written(lambda: tar(("model_config.yaml", member("model_config.yaml")), ("model_weights.ckpt", member("model_weights.ckpt")))), Right(same_features)),
        ("weights before the config", extract(), written(lambda: tar(("./model_weights.ckpt", member("model_weights.ckpt")), ("./model_config.yaml", member("model_config.yaml")))), Right(same_features)),
        ("packed with its folder around it", extract(), written(lambda: tar(("nest/model_config.yaml", member("model_config.yaml")), ("nest/model_weights.ckpt", member("model_weights.ckpt")))), ANY),
        ("tokenizers, a license and ._ files of a Mac besides", extract(), written(lambda: nemo_bytes(more=(("./tokenizer.model", b"\x0a\x00"), ("./._model_config.yaml", b"\x00\x05\x16\x07"), ("./LICENSE", b"free")))), Right(same_features)),
        ("two configs, another model's first", extract(), written(lambda: tar(("./model_config.yaml", b"encoder: {n_layers: 7}"), ("./model_config.yaml", member("model_config.yaml")), ("./model_weights.ckpt", member("model_weights.ckpt")))), ANY),
        ("two weights, NaN last", extract(), written(lambda: nemo_bytes(more=(("./model_weights.ckpt", saved({key: value * torch.nan if value.is_floating_point() else value for key, value in weights().items()})),))), ANY),
        ("model-parallel parts, mp_rank_00 and 01", info(), written(lambda: tar(("./model_config.yaml", member("model_config.yaml")), ("./mp_rank_00/model_weights.ckpt", b"x"), ("./mp_rank_01/model_weights.ckpt", b"x"))), NAMED),
        ("weights are a link to /etc/passwd", extract(), written(lambda: tar(("./model_config.yaml", member("model_config.yaml")), (entry("./model_weights.ckpt", tarfile.SYMTYPE, "/etc/passwd"), b""))), NAMED),
        ("weights are a link to a good file outside", extract(), both(given(CKPT), written(lambda: tar(("./model_config.yaml", member("model_config.yaml")), (entry("./model_weights.ckpt", tarfile.SYMTYPE, "model.ckpt"), b"")))), NAMED),
        ("config is a hard link to itself", info(), written(lambda: tar((entry("./model_config.yaml", tarfile.LNKTYPE, "./model_config.yaml"), b""), ("./model_weights.ckpt", member("model_weights.ckpt")))), NAMED),
        ("config is a named pipe", info(), written(lambda: tar((entry("./model_config.yaml", tarfile.FIFOTYPE), b""), ("./model_weights.ckpt", member("model_weights.ckpt")))), NAMED),
        ("weights are a folder", export(), written(lambda: tar(("./model_config.yaml", member("model_config.yaml")), (entry("./model_weights.ckpt", tarfile.DIRTYPE), b""))), NAMED),
        ("a member that leaves the folder", extract(), written(lambda: nemo_bytes(more=(("../../pwned", b"x"), ("/tmp/nest_pwned", b"x")))), ANY),
        ("100,000 empty members", extract(), written(lambda: nemo_bytes(more=tuple((f"./{i}", b"") for i in range(100_000)))), ANY),
        ("a member name with escape codes and no weights", info(), written(lambda: tar(("./\x1b[2Jmodel_config.yaml", b"a: 1"), ("./\x07.ckpt", b""))), NAMED),
        ("a zip of the two members", info(), written(lambda: zipped()), NAMED),
        ("the unpacked folder instead of the file", info(), unpacked, Either(NAMED, Right(ended_well))),
        ("a named pipe", extract(), lambda folder: os.mkfifo(folder / NEMO), NAMED),
        ("a link to /dev/zero", info(), lambda folder: (folder / NEMO).symlink_to("/dev/zero"), NAMED),
        ("a link that leads to itself", export(), lambda folder: (folder / NEMO).symlink_to(NEMO), NAMED),
        ("a socket", info(), socket_file, NAMED),
        ("a sparse file of 1 TB", info(), sparse, Refused((NEMO,))),
        ("one of two files to compare is cut", info(NEMO, "other.nemo"), both(given(NEMO), on_copy(cut(0.9), "other.nemo")), Refused(("other.nemo",))),
        ("exported onto itself", export(NEMO, NEMO), given(NEMO), Either(Refused((NEMO,)), Right(read_again(NEMO)))),
        ("exported onto a link to itself", export(NEMO, "b.nemo"), both(given(NEMO), lambda folder: (folder / "b.nemo").symlink_to(NEMO)), Either(Refused(("b.nemo|model.nemo",)), Right(read_again(NEMO, "b.nemo")))),
        ("exported to a folder that is full of other things", export(NEMO, "audio"), given(NEMO), Refused(("audio",))),
        ("exported below a file", export(NEMO, "valid.jsonl/out.nemo"), given(NEMO), Refused(("valid.jsonl",))),
        ("exported to /dev/full", export(NEMO, "/dev/full"), given(NEMO), Refused(("/dev/full",))),
        ("a damaged file exported over a good one", export("bad.nemo", NEMO), both(given(NEMO), on_copy(cut(0.7), "bad.nemo")), Refused(("bad.nemo",))),
        ("safetensors inside a .nemo name", extract(), named(SAFE, NEMO), ANY),
        ("a .ckpt file with a .nemo name", extract(), named(CKPT, NEMO), ANY),
        ("a .nemo file with a .ckpt name", extract(CKPT), named(NEMO, CKPT), Either(Refused((CKPT,)), Right(same_features))),
        ("upper-case ending", extract("MODEL.NEMO"), named(NEMO, "MODEL.NEMO"), Either(Refused(("MODEL.NEMO",)), Right(same_features))),
    ]  # fmt: skip


def negative_size() -> bytes:
    header = bytearray(huge_member("./model_config.yaml", 0))
    header[124:136] = b"\xff" * 12  # base 256, -1
    total = sum(header[:148]) + 8 * 32 + sum(header[156:512])
    header[148:156] = b"%06o\0 " % total
    return bytes(header) + bytes(2048)


def on_copy(change: Callable[[bytes], bytes], target: str = NEMO) -> Setup:
    return written(lambda: change((Fixture.path / NEMO).read_bytes()), target)


def bit(data: bytes) -> bytes:
    """Flip a bit in the largest record of torch's archive, whether that is the file or a member of it."""
    begin = data.index(b"PK\x03\x04")
    inner_bytes = data[begin : data.rindex(b"PK\x05\x06") + 22]
    with zipfile.ZipFile(io.BytesIO(inner_bytes)) as archive:
        found = max((item for item in archive.infolist() if "/data/" in item.filename), key=lambda item: item.file_size)
    names, extra = struct.unpack("<HH", inner_bytes[found.header_offset + 26 : found.header_offset + 30])
    at = begin + found.header_offset + 30 + names + extra + found.file_size // 2
    return patched(data, at, bytes([data[at] ^ 4]))


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("model_config.yaml", member("model_config.yaml"))
        archive.writestr("model_weights.ckpt", member("model_weights.ckpt"))
    return buffer.getvalue()


def unpacked(folder: Path) -> None:
    (folder / NEMO).mkdir()
    for name in ("model_config.yaml", "model_weights.ckpt"):
        (folder / NEMO / name).write_bytes(member(name))


def sparse(folder: Path) -> None:
    (folder / NEMO).touch()
    os.truncate(folder / NEMO, 1 << 40)


def socket_file(folder: Path) -> None:
    import socket

    here = os.getcwd()
    os.chdir(folder)
    try:
        socket.socket(socket.AF_UNIX).bind(NEMO)
    finally:
        os.chdir(here)


def configurations() -> list[Row]:
    laughs = b"a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + b"".join(
        b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 10)) for i in range(1, 12)
    )
    inside = Either(Refused(), Right(quiet_features))
    return [
        ("config: billion laughs", info(), with_text(lambda text: laughs + text), Either(NAMED, Right(ended_well))),
        ("config: 50,000 open brackets", info(), with_text(lambda text: b"train_ds: " + b"[" * 50_000), NAMED),
        ("config: a python/object tag", info(), with_text(lambda text: text + b"\nx: !!python/object/apply:os.system ['touch ../pwned']\n"), NAMED),
        ("config: UTF-16 with its mark", extract(), with_text(lambda text: text.decode().encode("utf-16")), ANY),
        ("config: CRLF line ends and a UTF-8 mark", extract(), with_text(lambda text: b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n")), ANY),
        ("config: Latin-1 in a comment", extract(), with_text(lambda text: b"# F\xfcr Gr\xf6\xdfe\n" + text), ANY),
        ("config: tabs for blanks", info(), with_text(lambda text: text.replace(b"  ", b"\t")), NAMED),
        ("config: two documents", info(), with_text(lambda text: text + b"---\nencoder: {}\n"), NAMED),
        ("config: cut in the middle, archive rebuilt", info(), with_text(cut(0.2)), NAMED),
        ("config: empty", extract(), with_text(lambda text: b""), NAMED),
        ("config: a list", export(), with_text(lambda text: b"- encoder\n- decoder\n"), NAMED),
        ("config: 'null'", info(), with_text(lambda text: b"null\n"), NAMED),
        ("config: merge conflict marks", info(), with_text(lambda text: b"<<<<<<< HEAD\n" + text + b">>>>>>> main\n"), NAMED),
        ("config: n_layers twice, last one wrong", extract(), with_text(lambda text: text.replace(b"  n_layers: 2\n", b"  n_layers: 2\n  n_layers: 1\n")), Refused(("n_layers|layers|duplicate",))),
        ("config: an environment variable", info(), setting("train_ds.manifest_filepath", "${oc.env:SECRET_TOKEN}"), Refused(("oc.env|resolver",))),
        ("config: a reference to nothing", extract(), setting("encoder.d_model", "${model.nowhere}"), Refused(("nowhere|d_model",))),
        ("config: a reference to itself", info(), setting("encoder.d_model", "${encoder.d_model}"), Refused(("d_model",))),
        ("config: NeMo's ??? in d_model", info(), setting("encoder.d_model", "???"), Refused(("d_model",))),
        ("config: ??? in a manifest, as NeMo ships", extract(), setting("train_ds.manifest_filepath", "???"), ANY),
        ("config: encoder _target_ is subprocess.Popen", extract(), setting("encoder._target_", "subprocess.Popen"), Refused(("subprocess.Popen",))),
        ("config: a squeezeformer", info(), setting("encoder._target_", "nemo.collections.asr.modules.SqueezeformerEncoder"), Refused(("SqueezeformerEncoder",))),
        ("config: NeMo's CTC model", info(), with_config(lambda c: c.update(target="nemo.collections.asr.models.EncDecCTCModelBPE", decoder={"_target_": "nemo.collections.asr.modules.ConvASRDecoder", "feat_in": 32, "num_classes": 28, "vocabulary": list("abc")})), Refused(("CTC|ConvASRDecoder",))),
        ("config: no encoder section", info(), with_config(lambda c: gone(c, "encoder")), Refused(("encoder",))),
        ("config: preprocessor is a string", info(), setting("preprocessor", "mel"), Refused(("preprocessor",))),
        ("config: one layer less than the weights", extract(), setting("encoder.n_layers", 1), Refused(("layer",))),
        ("config: a million layers", info(), setting("encoder.n_layers", 10**6), Refused(("layer",))),
        ("config: width 4,000,000", extract(), setting("encoder.d_model", 4_000_000), Refused(("d_model|shape|size",))),
        ("config: a billion books", info(), setting("num_books", 10**9), Refused(("num_books|book",))),
        ("config: one head of 32 instead of 4 of 8", extract(), setting("encoder.n_heads", 1), Refused(("n_heads|pos_bias",))),
        ("config: three heads", extract(), setting("encoder.n_heads", 3), Refused(("n_heads",))),
        ("config: zero heads", info(), setting("encoder.n_heads", 0), Refused(("n_heads",))),
        ("config: n_layers 2.5", info(), setting("encoder.n_layers", 2.5), Refused(("n_layers",))),
        ("config: n_layers 'two'", info(), setting("encoder.n_layers", "two"), Refused(("n_layers",))),
        ("config: n_layers yes", info(), setting("encoder.n_layers", True), Refused(("n_layers",))),
        ("config: kernel 8, even", extract(), setting("encoder.conv_kernel_size", 8), Refused(("conv_kernel_size",))),
        ("config: kernel 11", extract(), setting("encoder.conv_kernel_size", 11), Refused(("conv|kernel",))),
        ("config: 8 kHz in the preprocessor only", extract(), setting("preprocessor.sample_rate", 8000), Refused(("sample_rate",))),
        ("config: a Hamming window, weights say Hann", extract(), setting("preprocessor.window", "hamming"), Refused(("window",))),
        ("config: window of 50 ms, weights say 25", extract(), setting("preprocessor.window_size", 0.05), Refused(("window",))),
        ("config: mels from 300 Hz, weights say 0", extract(), setting("preprocessor.lowfreq", 300), Refused(("mel|fb|lowfreq",))),
        ("config: mels above Nyquist", info(), setting("preprocessor.highfreq", 12_000), Refused(("highfreq",))),
        ("config: mel_norm null, weights say slaney", extract(), setting("preprocessor.mel_norm", None), Refused(("mel|fb",))),
        ("config: n_fft 300, less than the window", extract(), setting("preprocessor.n_fft", 300), Refused(("n_fft",))),
        ("config: stride 0", extract(), setting("preprocessor.window_stride", 0), Refused(("window_stride",))),
        ("config: stride NaN", info(), setting("preprocessor.window_stride", float("nan")), Refused(("window_stride",))),
        ("config: preemph infinite", extract(), setting("preprocessor.preemph", float("inf")), Refused(("preemph",))),
        ("config: log guard of 0", extract(), setting("preprocessor.log_zero_guard_value", 0), inside),
        ("config: normalize by nothing known", extract(), setting("preprocessor.normalize", "per_planet"), Refused(("normalize",))),
        ("config: a context of [5]", extract(), setting("encoder.att_context_size", [5]), Refused(("att_context_size",))),
        ("config: a context of ten million", extract(), setting("encoder.att_context_size", [10**7, 10**7]), Either(Refused(("att_context_size",)), Right(quiet_features))),
        ("config: xscaling 'maybe'", extract(), setting("encoder.xscaling", "maybe"), Refused(("xscaling",))),
        ("config: dropout 7", info(), setting("encoder.dropout", 7), Refused(("dropout",))),
        ("config: subsampling by 4, weights by 8", extract(), setting("encoder.subsampling_factor", 4), Refused()),
        ("config: an unknown key of a newer NeMo", extract(), setting("encoder.flash_attention_4", True), Either(Refused(("flash_attention_4",)), Right(same_features))),
        ("config: a key with escape codes", info(), setting("encoder.\x1b[31mred\x07", 1), Refused()),
        ("config: target with right-to-left marks", info(), setting("target", "\u202eledoM"), Either(Refused(), Right(ended_well))),
        ("config: optimizer that does not exist", extract(), setting("optim", {"name": "madgrad9", "lr": "fast"}), Either(Refused(("optim",)), Right(same_features))),
        ("config: one digit changed, ours has a checksum", info(), on_copy(lambda data: data.replace(b"dropout: 0.1\n", b"dropout: 0.3\n", 1)), NAMED),
    ]  # fmt: skip


def weight_files() -> list[Row]:
    rename = lambda prefix: with_weights(lambda w: {prefix + key: value for key, value in w.items()})  # noqa: E731
    half = Either(Refused(), Right(nearly_same))
    named_weight = Refused(("linear_q",))
    return [
        ("weights: one NaN", probe(), both(labels, tensor(QUERY, put(7, float("nan")))), named_weight),
        ("weights: one -infinity", export(), tensor("decoder.decoder_layers.0.bias", put(0, -float("inf"))), Refused(("decoder_layers",))),
        ("weights: NaN in the mask embedding", begin("init_from_nemo_model", NEMO), tensor("mask_processor.mask_embedding", put(3, float("nan"))), Refused(("mask_embedding",))),
        ("weights: NaN in a mel filter", extract(), tensor(MELS, put(300, float("nan"))), Refused(("fb|mel",))),
        ("weights: int8, quantized by a tool", extract(), tensor(QUERY, lambda t: (t * 127).to(torch.int8)), named_weight),
        ("weights: booleans", info(), tensor(QUERY, lambda t: t > 0), named_weight),
        ("weights: complex numbers", export(), tensor(QUERY, lambda t: t.to(torch.complex64)), named_weight),
        ("weights: all in float64", extract(), with_weights(lambda w: {k: v.double() if v.is_floating_point() else v for k, v in w.items()}), half),
        ("weights: all in bfloat16", extract(), with_weights(lambda w: {k: v.bfloat16() if v.is_floating_point() else v for k, v in w.items()}), half),
        ("weights: float16 with an overflow", extract(), with_weights(lambda w: {k: (v * (1e6 if k == QUERY else 1)).half() if v.is_floating_point() else v for k, v in w.items()}), named_weight),
        ("weights: 8-bit floats", info(), tensor(QUERY, lambda t: t.to(torch.float8_e4m3fn)), Either(named_weight, Right(ended_well))),
        ("weights: a sparse tensor", extract(), tensor(QUERY, lambda t: t.to_sparse()), Either(Refused(("linear_q|model.nemo",)), Right(same_features))),
        ("weights: a tensor without data (meta)", extract(), tensor(QUERY, lambda t: t.to("meta")), Refused(("linear_q|model.nemo",))),
        ("weights: a quantized tensor", info(), tensor(QUERY, lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)), Refused(("linear_q|model.nemo",))),
        ("weights: another order in memory", extract(), tensor(QUERY, lambda t: t.t().contiguous().t()), Right(same_features)),
        ("weights: a view into a large storage", extract(), tensor(QUERY, lambda t: torch.cat([torch.zeros(500, 32), t])[500:]), Right(same_features)),
        ("weights: Parameters, not tensors", extract(), tensor(QUERY, lambda t: torch.nn.Parameter(t)), Right(same_features)),
        ("weights: one row expanded to all", extract(), tensor(QUERY, lambda t: t[:1].expand(32, 32)), Either(Refused(), Right(quiet_features))),
        ("weights: transposed, of equal shape by chance is right, of others not", extract(), tensor("encoder.layers.1.feed_forward1.linear1.weight", lambda t: t.t()), Refused(("linear1",))),
        ("weights: scalar where a vector belongs", info(), tensor("encoder.layers.0.norm_out.bias", lambda t: t[0]), Refused(("norm_out",))),
        ("weights: no columns", extract(), tensor(QUERY, lambda t: t[:, :0]), named_weight),
        ("weights: a number instead of a tensor", info(), tensor(QUERY, lambda t: 0.5), named_weight),
        ("weights: a numpy array instead of a tensor", info(), tensor(QUERY, lambda t: t.numpy()), Refused(("linear_q|model.nemo",))),
        ("weights: one is missing", extract(), with_weights(lambda w: gone(w, QUERY)), named_weight),
        ("weights: batch statistics are missing", extract(), with_weights(lambda w: gone(w, NORM + "running_mean", NORM + "running_var")), Refused(("running_",))),
        ("weights: a third layer too many", extract(), with_weights(lambda w: w.update({k.replace("layers.1", "layers.2"): v for k, v in list(w.items()) if "layers.1" in k})), Refused(("layers.2|n_layers",))),
        ("weights: DistributedDataParallel's module. prefix", extract(), rename("module."), ANY),
        ("weights: torch.compile's _orig_mod. prefix", extract(), rename("_orig_mod."), ANY),
        ("weights: a key with escape codes", info(), with_weights(lambda w: w.update({"\x1b[2J\x07encoder": torch.ones(1)})), Refused()),
        ("weights: a key of a megabyte", info(), with_weights(lambda w: w.update({"k" * (1 << 20): torch.ones(1)})), Refused()),
        ("weights: keys are numbers", info(), with_weights(lambda w: dict(enumerate(w.values()))), NAMED),
        ("weights: an empty dict", extract(), with_weights(lambda w: {}), Refused()),
        ("weights: a list", export(), with_weights(lambda w: list(w.values())), NAMED),
        ("weights: inside 'state_dict'", extract(), with_weights(lambda w: {"state_dict": w}), ANY),
        ("weights: variance below 0", extract(), tensor(NORM + "running_var", put(5, -0.01)), Refused(("running_var",))),
        ("weights: variance 1e38", extract(), tensor(NORM + "running_var", put(5, 1e38)), Either(Refused(), Right(quiet_features))),
        ("weights: finite, but overflow in the layer", extract(), tensor(QUERY, lambda t: t * 1e38), Either(Refused(), Right(quiet_features))),
        ("weights: a code book with a row of zeros", info(), tensor(BOOKS, lambda t: t.index_fill(1, torch.tensor([9]), 0)), Refused(("codebook|quantizer",))),
        ("weights: projection of the quantizer all zeros", begin("init_from_nemo_model", NEMO), tensor("quantizer.proj.weight", torch.zeros_like), Refused(("quantizer",))),
        ("weights: window all zeros", extract(), tensor(WINDOW, torch.zeros_like), Refused(("window",))),
        ("weights: mel filters in reverse", extract(), tensor(MELS, lambda t: t.flip(1)), Refused(("fb|mel",))),
        ("weights: torch's form of before 2020", extract(), written(lambda: nemo_bytes(tensors=saved(weights(), _use_new_zipfile_serialization=False))), NAMED),
        ("weights: a pickle that runs a command", extract(), inner(lambda data: EVIL), NAMED),
        ("weights: torch's archive whose pickle runs a command", info(), inner(record("data.pkl", lambda data: EVIL)), NAMED),
        ("weights: a whole module, pickled", info(), with_weights(lambda w: torch.nn.Linear(2, 2)), NAMED),
        ("weights: an object that runs a command as a value", probe(), both(labels, with_weights(lambda w: w.update(x=Evil()))), NAMED),
        ("weights: a record shorter than its tensor", extract(), inner(record("data/16", lambda data: data[:100])), NAMED),
        ("weights: a record is missing", extract(), inner(record("data/16", lambda data: None)), NAMED),
        ("weights: says big-endian", extract(), inner(record("byteorder", lambda data: b"big")), Either(Refused(), Right(same_features))),
        ("weights: byte order is nonsense", extract(), inner(record("byteorder", lambda data: b"middle")), Either(Refused(), Right(same_features))),
        ("weights: records are deflated", extract(), inner(archive_with(lambda name, data: data, zipfile.ZIP_DEFLATED)), ANY),
        ("weights: archive's directory is cut off", extract(), inner(lambda data: data[:-300]), NAMED),
        ("weights: checksum of one record is wrong", export(), inner(lambda data: wrong_crc(data)), NAMED),
        ("weights: an archive within an archive", info(), inner(lambda data: saved({"model": torch.tensor(list(data[:1000]))})), Refused()),
    ]  # fmt: skip


def wrong_crc(data: bytes) -> bytes:
    """Change the CRC of a large record where the archive's directory states it."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = max(archive.infolist(), key=lambda item: item.file_size)
    name = found.filename.encode()
    at = data.rindex(name) - 46
    assert data[at : at + 4] == b"PK\x01\x02"
    return patched(data, at + 16, struct.pack("<I", found.CRC ^ 0x10))


def checkpoints_as_models() -> list[Row]:
    start = lambda *more: begin("init_from_ptl_ckpt", CKPT, *more)  # noqa: E731

    def lightning(content: dict[str, Any]) -> dict[str, Any]:
        """As Lightning and NeMo write it, with an OmegaConf object that torch does not read safely."""
        from omegaconf import OmegaConf

        return {
            "epoch": 3,
            "global_step": 99,
            "pytorch-lightning_version": "2.4.0",
            "state_dict": content["state_dict"],
            "loops": {},
            "callbacks": {"ModelCheckpoint": {"best_model_path": "/raid/exp/x.ckpt"}},
            "optimizer_states": [],
            "lr_schedulers": [],
            "hparams_name": "cfg",
            "hyper_parameters": OmegaConf.create(config()),
        }

    def state(change: Callable[[Weights], object]) -> Setup:
        def inside(content: dict[str, Any]) -> None:
            change(content["state_dict"])

        return ckpt(inside)

    of = Refused((CKPT,))
    return [
        ("ckpt: NeMo's, with OmegaConf inside, as starting weights", start(), ckpt(lightning), Right(begun_from_it)),
        ("ckpt: NeMo's, with an object that runs a command", start(), ckpt(lambda c: {**lightning(c), "callbacks": Evil()}), Either(of, Right(begun_from_it))),
        ("ckpt: NeMo's, its config has another width", start("model.encoder.d_model=48"), ckpt(lightning), Refused(("shape|size|d_model",))),
        ("ckpt: no hyper_parameters, extract", extract(CKPT), ckpt(lambda c: gone(c, "hyper_parameters")), Refused((CKPT, "hyper_parameters|config"))),
        ("ckpt: no hyper_parameters, as starting weights", start(), ckpt(lambda c: gone(c, "hyper_parameters")), Either(of, Right(begun_from_it))),
        ("ckpt: hyper_parameters are a list", info(CKPT), ckpt(lambda c: c.update(hyper_parameters=[1, 2])), of),
        ("ckpt: no state_dict", export(CKPT), ckpt(lambda c: gone(c, "state_dict")), Refused((CKPT, "state_dict|weights"))),
        ("ckpt: state_dict is None", info(CKPT), ckpt(lambda c: c.update(state_dict=None)), of),
        ("ckpt: only a state_dict, saved by hand", extract(CKPT), ckpt(lambda c: c["state_dict"]), of),
        ("ckpt: of a huggingface wav2vec2", info(CKPT), ckpt(lambda c: {"wav2vec2.encoder.layers.0.attention.k_proj.weight": torch.ones(3, 3)}), of),
        ("ckpt: of fairseq", start(), ckpt(lambda c: {"args": None, "model": {"mask_emb": torch.ones(768)}, "cfg": {}}), of),
        ("ckpt: NaN, as starting weights", start(), state(lambda w: w[QUERY].fill_(torch.nan)), Refused(("linear_q",))),
        ("ckpt: a flipped bit, info", info(CKPT), both(given(CKPT), on_bytes(bit, Path(CKPT))), of),
        ("ckpt: cut off, export", export(CKPT), both(given(CKPT), on_bytes(cut(0.99), Path(CKPT))), of),
        ("ckpt: zeros at its end, as a lazy disk leaves them", probe(CKPT), both(labels, given(CKPT), on_bytes(lambda data: data[:-4096] + bytes(4096), Path(CKPT))), of),
        ("ckpt: a folder of shards without .metadata", info("last.ckpt"), shards("__0_0.distcp", "rest.pt"), Refused(("last.ckpt",))),
        ("ckpt: an empty folder", start("exp_manager.name=run"), lambda folder: (folder / CKPT).mkdir(), of),
        ("ckpt: .metadata is a pickle that runs a command", export("last.ckpt"), shards(".metadata", "rest.pt", content=EVIL), Refused(("last.ckpt",))),
        ("ckpt: weights with module. in front, as starting weights", start(), state(lambda w: [w.update({"module." + k: w.pop(k)}) for k in list(w)]), Either(Refused(), Right(begun_from_it))),
        ("ckpt: nothing fits, include names nothing", begin("init_from_ptl_ckpt", "null", f"++init_from_ptl_ckpt.m.path={CKPT}", "++init_from_ptl_ckpt.m.include=[nonsense]"), given(CKPT), Refused(("include|nonsense|init_from",))),
        ("two sources of starting weights", begin("init_from_ptl_ckpt", CKPT, f"init_from_nemo_model={NEMO}"), given(CKPT, NEMO), Either(Refused(("init_from",)), Right(begun_from_it))),
        ("starting weights that are not there", begin("init_from_nemo_model", "nowhere.nemo"), lambda folder: None, Refused(("nowhere.nemo",))),
        ("starting weights with another number of classes", begin("init_from_nemo_model", NEMO, "model.num_classes=32"), given(NEMO), Either(Refused(("shape|size|num_classes",)), Right(begun_from_it))),
    ]  # fmt: skip


def shards(*names: str, content: bytes = b"\x80\x04}.") -> Setup:
    def setup(folder: Path) -> None:
        (folder / "last.ckpt").mkdir()
        for name in names:
            (folder / "last.ckpt" / name).write_bytes(content)

    return setup


def safetensors() -> list[Row]:
    run = extract(SAFE)
    bad = Refused((SAFE,))
    info_safe = info(SAFE)

    def meta(change: Callable[[dict[str, Any]], object]) -> Setup:
        return safe(lambda header: change(header["__metadata__"]) and None)

    def model(change: Callable[[Config], object]) -> Setup:
        def edit(metadata: dict[str, Any]) -> None:
            settings = json.loads(metadata["model_config"])
            change(settings)
            metadata["model_config"] = json.dumps(settings)

        return meta(edit)

    def offsets(begin: int, end: int) -> Setup:
        return safe(lambda header: header[QUERY].update(data_offsets=[begin, end]) and None)

    cut_tail = both(given(SAFE), on_bytes(cut(0.97), Path(SAFE)))
    return [
        ("safetensors: a flipped bit of a weight", run, both(given(SAFE), on_bytes(flipped(0.8), Path(SAFE))), bad),
        ("safetensors: cut off", info_safe, cut_tail, bad),
        ("safetensors: bytes after its end", run, both(given(SAFE), on_bytes(lambda data: data + b"more", Path(SAFE))), Either(bad, Right(same_features))),
        ("safetensors: header of 2^63 bytes", info_safe, both(given(SAFE), on_bytes(lambda data: patched(data, 0, b"\xff" * 7 + b"\x7f"), Path(SAFE))), bad),
        ("safetensors: header length 0", info_safe, both(given(SAFE), on_bytes(lambda data: patched(data, 0, bytes(8)), Path(SAFE))), bad),
        ("safetensors: seven bytes", run, written(lambda: b"\x01" * 7, SAFE), bad),
        ("safetensors: header of 100,000 open brackets", info_safe, written(lambda: safe_bytes(b"[" * 100_000, b""), SAFE), bad),
        ("safetensors: header is not UTF-8", info_safe, written(lambda: safe_bytes(b'{"\xff\xfe": 1}', b""), SAFE), bad),
        ("safetensors: no tensors, only a config", run, written(lambda: safe_bytes({"__metadata__": safe_parts()[0]["__metadata__"]}, b""), SAFE), Refused()),
        ("safetensors: tensors overlap", run, offsets(0, 4096), bad),
        ("safetensors: offsets beyond the end", info_safe, offsets(1 << 40, (1 << 40) + 4096), bad),
        ("safetensors: offsets in reverse", export(SAFE), offsets(8192, 4096), bad),
        ("safetensors: a negative shape", info_safe, safe(lambda h: h[QUERY].update(shape=[-32, -32]) and None), bad),
        ("safetensors: a shape whose product overflows", info_safe, safe(lambda h: h[QUERY].update(shape=[1 << 33, 1 << 33]) and None), bad),
        ("safetensors: an unknown dtype", run, safe(lambda h: h[QUERY].update(dtype="F24") and None), bad),
        ("safetensors: floats declared as integers", run, safe(lambda h: h[QUERY].update(dtype="I32") and None), bad),
        ("safetensors: two tensors with swapped names", run, safe(lambda h: swap(h, "linear_k.weight", "linear_v.weight")), bad),
        ("safetensors: no metadata, as others write", run, safe(lambda h: gone(h, "__metadata__")), bad),
        ("safetensors: config is not JSON", info_safe, meta(lambda m: m.update(model_config="encoder: {n_layers: 2")), bad),
        ("safetensors: config is a string of JSON", info_safe, meta(lambda m: m.update(model_config='"hello"')), bad),
        ("safetensors: config with 400 digits", info_safe, model(lambda c: c["encoder"].update(d_model=10**400)), Refused(("d_model|model.safetensors",))),
        ("safetensors: config with Infinity", run, model(lambda c: c["preprocessor"].update(window_stride=float("inf"))), Refused(("window_stride|model.safetensors",))),
        ("safetensors: config with one layer", run, model(lambda c: c["encoder"].update(n_layers=1)), Refused(("layer|model.safetensors",))),
        ("safetensors: checksum is not a number", run, meta(lambda m: m.update(crc32="zzzzzzzz")), bad),
        ("safetensors: checksum of another file", export(SAFE, "out.nemo"), meta(lambda m: m.update(crc32="00000000")), bad),
        ("safetensors: NaN, checksum taken away", run, nan_without_checksum, Refused(("linear_q",))),
        ("safetensors: metadata with escape codes", info_safe, meta(lambda m: m.update(model_config="\x1b[2J\x07")), bad),
        ("safetensors: index of shards instead of the file", info("model.safetensors.index.json"), written(lambda: b'{"weight_map": {}}', "model.safetensors.index.json"), Refused(("index.json",))),
        ("safetensors: given to init_from_nemo_model", begin("init_from_nemo_model", SAFE), given(SAFE), Either(Refused((SAFE,)), Right(begun_from_it))),
        ("safetensors: from .nemo and back", export(SAFE, "back.nemo"), given(SAFE), Right(read_again("back.nemo"))),
    ]  # fmt: skip


def swap(header: dict[str, Any], one: str, other: str) -> None:
    a, b = (f"encoder.layers.0.self_attn.{name}" for name in (one, other))
    header[a], header[b] = header[b], header[a]


def nan_without_checksum(folder: Path) -> None:
    header, data = safe_parts()
    del header["__metadata__"]["crc32"]
    at = header[QUERY]["data_offsets"][0]
    (folder / SAFE).write_bytes(safe_bytes(header, patched(data, at, struct.pack("<f", float("nan")))))


def elsewhere() -> list[Trial]:
    """Names on the hub, Hugging Face folders, and NeMo's recorded numbers."""

    def hub(name: str, command: list[str], setup: Setup, expected: Expected) -> Trial:
        return Trial("model files", name, command, expected, setup, environment=OFFLINE, own_process=True)

    def parakeet(folder: Path) -> None:
        (folder / "hf").mkdir()
        (folder / "hf/config.json").write_text('{"model_type": "parakeet_encoder", "hidden_size": 32}')
        shutil.copy(Fixture.path / SAFE, folder / "hf/model.safetensors")

    def recorded(content: bytes, batch: bytes | None = None) -> Setup:
        def setup(folder: Path) -> None:
            shutil.copy(Fixture.path / NEMO, folder / NEMO)
            (folder / "numbers.npz").write_bytes(content)
            if batch is not None:
                (folder / "batch.npz").write_bytes(batch)

        return setup

    def npz(**arrays: Any) -> bytes:
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        return buffer.getvalue()

    def plain(name: str, command: list[str], setup: Setup, expected: Expected) -> Trial:
        return Trial("model files", name, command, expected, setup)

    with_numbers = verify(NEMO, "--recorded", "numbers.npz")
    objects = np.array([Evil()], dtype=object)
    return [
        hub("hub: in the cache, no network", extract("acme/speech"), lambda folder: cached(folder), Right(same_features)),
        hub("hub: in the cache, damaged", extract("acme/speech"), lambda folder: cached(folder, bit), Refused(("speech",))),
        hub("hub: in the cache, the blob was deleted", info("acme/speech"), lambda folder: cached(folder).unlink(), Refused(("acme/speech|speech.nemo",))),
        hub("hub: not in the cache, no network", extract("acme/other"), lambda folder: None, Refused(("acme/other",))),
        hub("hub: a name with two slashes", info("acme/speech/v1"), lambda folder: None, Refused(("acme/speech/v1",))),
        hub("hub: a web address", info("https://huggingface.co/acme/speech"), lambda folder: None, Refused(("huggingface.co",))),
        plain("a folder of transformers, with config.json", extract("hf"), parakeet, Refused(("hf",))),
        plain("a folder that AutoModel saved, to compare", info(NEMO, "hf"), both(given(NEMO), parakeet), Refused(("hf",))),
        plain("verify: a damaged file", verify(), on_copy(bit), NAMED),
        plain("verify: recorded numbers are a text", with_numbers, recorded(b"mean 0.3\n", npz(a=np.ones(2))), Refused(("numbers.npz",))),
        plain("verify: recorded numbers run a command", with_numbers, recorded(npz(encoded=objects), npz(audio=objects)), Refused(("numbers.npz|batch.npz",))),
        plain("verify: recorded numbers of nothing", with_numbers, recorded(npz(), npz()), Refused(("numbers.npz|batch.npz",))),
        plain("verify: batch.npz is missing", with_numbers, recorded(npz(encoded=np.ones((1, 32, 20)))), Refused(("batch.npz",))),
        plain("verify: recorded numbers are cut off", with_numbers, recorded(npz(encoded=np.ones((1, 32, 20)))[:-40], npz(a=np.ones(1))), Refused(("numbers.npz",))),
        plain("verify: NeMo's Python is not one", verify(NEMO, "--nemo-python", "/bin/false"), given(NEMO), Refused(("/bin/false",))),
        plain("verify: NeMo's Python without NeMo", verify(NEMO, "--nemo-python", sys.executable), given(NEMO), Refused(("nemo",))),
        plain("verify: one good file, one that is not there", verify(NEMO, "gone.nemo"), given(NEMO), Refused(("gone.nemo",))),
    ]  # fmt: skip


def trials() -> list[Trial]:
    tables = (containers, configurations, weight_files, checkpoints_as_models, safetensors)
    made = [Trial("model files", *row_of(row)) for table in tables for row in table()]
    return [*made, *elsewhere()]


def row_of(row: Row) -> tuple[str, list[str], Expected, Setup]:
    name, command, setup, expected = row
    return name, command, expected, setup
