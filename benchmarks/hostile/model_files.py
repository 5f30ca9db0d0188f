"""Hostile, damaged and foreign .nemo, .ckpt and .safetensors files: the same features as ever, or words, never less."""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping
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
    in_process,
    on_bytes,
    patched,
    pretrain,
    said,
    same_features,
    trained,
    write_lines,
)
from safetensors.torch import load_file, save_file

GROUP = "model files"
CONFIG, WEIGHTS = "model_config.yaml", "model_weights.ckpt"
FLAT = "encoder.layers.0.norm_out.weight"
MATRIX = "encoder.layers.0.feed_forward1.linear1.weight"
VARIANCE = "encoder.layers.1.conv.batch_norm.running_var"
FILTERS = "preprocessor.featurizer.fb"
NEMO, CKPT, TENSORS = "model.nemo", "model.ckpt", "model.safetensors"

PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Your session has expired.</body></html>\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"9c1f" * 16 + b"\nsize 481296384\n"


# ------------------------------------------------------------------------------------------------------------- commands


def extract(name: str) -> list[str]:
    return ["extract", name, "audio/0.wav", "out", "--device", "cpu"]


def info(name: str) -> list[str]:
    return ["info", name]


def export(name: str, kind: str = "nemo") -> list[str]:
    return ["export", name, f"exported.{kind}", "--format", kind]


def probe(name: str) -> list[str]:
    return [
        "probe",
        name,
        "--train",
        "l.jsonl",
        "--test",
        "l.jsonl",
        "--label",
        "label",
        "--output",
        "p",
        "--device",
        "cpu",
    ]


def starting(key: str, value: str) -> list[str]:
    return pretrain(f"{key}={value}")


# --------------------------------------------------------------------------------------------- what is done to the files

Config = dict[str, Any]
State = dict[str, Any]


def given(*names: str) -> Setup:
    """Copies of the good models."""
    return lambda folder: [shutil.copy(Fixture.path / name, folder) for name in names]


def damaged(name: str, change: Callable[[bytes], bytes]) -> Setup:
    return both(given(name), on_bytes(change, Path(name)))


def renamed(name: str, to: str) -> Setup:
    return lambda folder: shutil.copy(Fixture.path / name, folder / to)


def members(folder: Path) -> dict[str, bytes]:
    """What is in the good .nemo file."""
    with tarfile.open(Fixture.path / NEMO) as archive:
        found = {Path(each.name).name: archive.extractfile(each) for each in archive if each.isfile()}
        return {name: file.read() for name, file in found.items() if file}


def pack(path: Path, content: Mapping[str, bytes] | list[tuple[str, bytes]], mode: str = "w") -> None:
    """Pack a .nemo file as tar does it, without our checksums."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in content.items() if isinstance(content, Mapping) else content:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def packed(
    change: Callable[[dict[str, bytes]], Mapping[str, bytes] | list[tuple[str, bytes]]], mode: str = "w"
) -> Setup:
    return lambda folder: pack(folder / NEMO, change(members(folder)), mode)


def config_bytes(change: Callable[[bytes], bytes]) -> Setup:
    """Somebody has edited the configuration, and packed it again."""
    return packed(lambda content: {**content, CONFIG: change(content[CONFIG])})


def config(**changes: Any) -> Setup:
    """Other values in the configuration; `__` stands for a dot."""

    def change(data: bytes) -> bytes:
        loaded: Config = yaml.safe_load(data)
        for key, value in changes.items():
            *parents, last = key.split("__")
            section = loaded
            for parent in parents:
                section = section[parent]
            if value is None:
                section.pop(last)
            else:
                section[last] = value
        return yaml.safe_dump(loaded, sort_keys=False).encode()

    return config_bytes(change)


def saved(content: object, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **how)
    return file.getvalue()


def weights(change: Callable[[State], object], **how: Any) -> Setup:
    """Other weights in a .nemo file, saved with good checksums. A change returns new weights or changes the old ones."""

    def repack(content: dict[str, bytes]) -> dict[str, bytes]:
        state = torch.load(io.BytesIO(content[WEIGHTS]), weights_only=True)
        new = change(state)
        return {**content, WEIGHTS: saved(state if new is None else new, **how)}

    return packed(repack)


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], State]:
    return lambda state: {name: change(value) if value.is_floating_point() else value for name, value in state.items()}


def one(name: str, change: Callable[[torch.Tensor], object]) -> Callable[[State], None]:
    """Change a tensor in place, or replace it by what the change returns."""

    def apply(state: State) -> None:
        new = change(state[name])
        state[name] = state[name] if new is None else new

    return apply


def put(name: str, at: int, value: float) -> Callable[[State], None]:
    def apply(state: State) -> None:
        state[name].view(-1)[at] = value

    return apply


def prefixed(prefix: str) -> Callable[[State], State]:
    return lambda state: {prefix + name: value for name, value in state.items()}


def of_one_buffer(state: State) -> State:
    """All weights are views of one buffer, as some optimizers keep them."""
    sizes = [value.numel() for value in state.values()]
    buffer = torch.cat([value.reshape(-1).double() for value in state.values()])
    views = buffer.float().split(sizes)
    return {
        name: view.view(value.shape) if value.is_floating_point() else value
        for (name, value), view in zip(state.items(), views, strict=True)
    }


def part_of_larger(state: State) -> None:
    """A tensor is a slice of one that is a hundred times as large, and not contiguous."""
    large = torch.zeros(state[MATRIX].shape[1] * 100, state[MATRIX].shape[0])
    large[: state[MATRIX].shape[1]] = state[MATRIX].T
    state[MATRIX] = large[: state[MATRIX].shape[1]].T


def checkpoint(change: Callable[[dict[str, Any]], object], name: str = CKPT, **how: Any) -> Setup:
    """A training checkpoint that a script has loaded, changed and saved."""

    def setup(folder: Path) -> None:
        content = torch.load(Fixture.path / CKPT, weights_only=True)
        new = change(content)
        (folder / name).write_bytes(saved(new if isinstance(new, dict) else content, **how))

    return setup


def kept(*keys: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda content: {key: content[key] for key in keys}


def saved_on_gpu(data: bytes) -> bytes:
    """Tensors that were on `cuda:3` when they were saved."""
    cpu, gpu = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:3"
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, content.replace(cpu, gpu) if name.endswith("data.pkl") else content)
    return packed.getvalue()


def by_nemo(content: dict[str, Any]) -> None:
    """As NeMo and Lightning write it: other bookkeeping."""
    for key in ("progress", "data_position", "epoch_means", "nest_ssl_version"):
        content.pop(key)
    content["callbacks"] = {"NeMoModelCheckpoint": {"best_model_score": torch.tensor(4.0741), "dirpath": "/results"}}
    content["loops"] = {"fit_loop": {"epoch_progress": {"total": {"ready": 3}}}}
    content["pytorch-lightning_version"] = "2.4.0"


def by_callback(content: dict[str, Any]) -> None:
    """A callback of the user's keeps numpy's numbers."""
    by_nemo(content)
    content["callbacks"]["MyMetrics"] = {"best_wer": np.float64(0.31), "history": np.arange(3)}


def tensors(change: Callable[[State], State], keep: bool = False) -> Setup:
    """Load and save a .safetensors file; by default without its metadata, as `save_file(load_file(…))` does."""

    def setup(folder: Path) -> None:
        data = (Fixture.path / TENSORS).read_bytes()
        head = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        changed = change(load_file(Fixture.path / TENSORS))
        save_file(changed, folder / TENSORS, metadata=head["__metadata__"] if keep else None)

    return setup


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Change the header of a .safetensors file, and leave the tensors as they are."""

    def apply(data: bytes) -> bytes:
        end = 8 + struct.unpack("<Q", data[:8])[0]
        head = json.loads(data[8:end])
        change(head)
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + data[end:]

    return apply


def of_speech_recogniser(content: dict[str, bytes]) -> dict[str, bytes]:
    """NeMo's CTC model with the same encoder: another class, another decoder, a tokenizer's files."""
    loaded: Config = yaml.safe_load(content[CONFIG])
    for key in ("quantizer", "masking", "loss", "num_classes", "num_books", "code_dim"):
        loaded.pop(key)
    loaded["target"] = "nemo.collections.asr.models.ctc_bpe_models.EncDecCTCModelBPE"
    loaded["decoder"] = {"_target_": "nemo.collections.asr.modules.ConvASRDecoder", "feat_in": 32, "num_classes": 128}
    loaded["tokenizer"] = {"dir": "tok", "type": "bpe", "model_path": "nemo:tokenizer.model"}
    state = torch.load(io.BytesIO(content[WEIGHTS]), weights_only=True)
    state = {name: value for name, value in state.items() if name.startswith(("preprocessor.", "encoder."))}
    state["decoder.decoder_layers.0.weight"] = torch.zeros(129, 32, 1)
    state["decoder.decoder_layers.0.bias"] = torch.zeros(129)
    return {CONFIG: yaml.safe_dump(loaded).encode(), WEIGHTS: saved(state), "tokenizer.model": b"\n\x0e\n\x05<unk>"}


def bomb(data: bytes) -> bytes:
    """Aliases that stand for 10^9 words."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    return data + "\n".join(lines).encode() + b"\n"


def labelled(folder: Path) -> None:
    lines = [{"audio_filepath": f"audio/{i}.wav", "duration": 1.6 + 0.1 * i, "label": "ab"[i % 2]} for i in range(8)]
    write_lines(folder / "l.jsonl", lines)


def evil_in_archive(data: bytes) -> bytes:
    """A checkpoint in torch's form whose pickle runs a command."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            new.writestr(name, EVIL if name.endswith("data.pkl") else old.read(name))
    return packed.getvalue()


def deflated(data: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return packed.getvalue()


# -------------------------------------------------------------------------------------------------------- what is right


def close_features(tolerance: float) -> Check:
    """The features of rounded weights are near those of the others, and not nonsense."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found, expected = (
            np.asarray(array, dtype=np.float64)
            for array in (np.load(next((folder / "out").rglob("*.npy"))), Fixture.feature())
        )
        if found.shape != expected.shape:
            return f"shape {found.shape}"
        difference = float(np.abs(found - expected).max())
        return None if difference <= tolerance else f"features differ by {difference:.3g}"

    return check


def same_weights(folder: Path, outcome: Outcome) -> str | None:
    """What was exported holds the weights of the good model."""
    with tarfile.open(Fixture.path / NEMO) as archive:
        member = next(each for each in archive if each.name.endswith(WEIGHTS))
        expected = torch.load(io.BytesIO(archive.extractfile(member).read()), weights_only=True)  # type: ignore[union-attr]
    with tarfile.open(folder / NEMO) as archive:
        member = next(each for each in archive if each.name.endswith(WEIGHTS))
        found = torch.load(io.BytesIO(archive.extractfile(member).read()), weights_only=True)  # type: ignore[union-attr]
    different = [name for name in expected if name not in found or not torch.equal(expected[name], found[name])]
    return f"weights differ: {different[:3]}" if different else None


def refused(*words: str) -> Refused:
    return Refused(words)


SAME = Right(same_features)
ALL_LOADED = Right(said(" 0 missing in the file", " 0 of a different shape", then=trained))


def either(*words: str, right: Right = SAME) -> Either:
    return Either(Refused(words), right)


# --------------------------------------------------------------------------------------------------------------- trials

Row = tuple[str, Setup, list[str], Expected]


def not_what_it_says() -> list[Row]:
    """The name or the content is of something else."""
    return [
        ("a login page as .nemo", damaged(NEMO, always(PAGE)), info(NEMO), refused(NEMO)),
        ("a git lfs pointer as .nemo", damaged(NEMO, always(POINTER)), extract(NEMO), refused(NEMO)),
        ("an empty .nemo", damaged(NEMO, always(b"")), probe(NEMO), refused(NEMO)),
        ("a download of .nemo that stopped in the weights", damaged(NEMO, cut(0.7)), extract(NEMO), refused(NEMO)),
        ("a download of .safetensors that stopped", damaged(TENSORS, cut(0.9)), export(TENSORS), refused(TENSORS)),
        (
            ".nemo sent as text: CRLF",
            damaged(NEMO, lambda data: data.replace(b"\n", b"\r\n")),
            extract(NEMO),
            refused(NEMO),
        ),
        ("a .ckpt that was renamed to .nemo", renamed(CKPT, NEMO), extract(NEMO), either(NEMO)),
        ("a .nemo that was renamed to .ckpt", renamed(NEMO, CKPT), extract(CKPT), either(CKPT)),
        (
            "a browser's name: model.nemo?download=true",
            renamed(NEMO, "model.nemo?download=true"),
            extract("model.nemo?download=true"),
            either("model.nemo?download=true"),
        ),
        ("a run folder instead of a file", Fixture.run, extract("runs/run"), refused("runs/run")),
        ("a path with a typo", given(NEMO), extract("model.nem"), refused("model.nem")),
        (
            "a name on the hub with a typo, and no network",
            given(NEMO),
            extract("nvidia/ssl_en_nest_larg_v1.0"),
            refused("nvidia/ssl_en_nest_larg_v1.0"),
        ),
        ("an address", given(NEMO), info("https://127.0.0.1:9/model.nemo"), refused("https:")),
        (
            "an index of shards from the hub",
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"encoder.a": "model-00001-of-00002.safetensors"}}'
            ),
            extract("model.safetensors.index.json"),
            refused("model.safetensors.index.json"),
        ),
    ]


def archives() -> list[Row]:
    """.nemo files as other programs pack them."""
    return [
        (".nemo packed by tar without ./", packed(lambda content: content), extract(NEMO), SAME),
        (
            ".nemo packed by tar with gzip, as old NeMo did",
            packed(lambda content: content, "w:gz"),
            extract(NEMO),
            either("gz|compress"),
        ),
        (
            ".nemo packed with its folder",
            packed(lambda content: {f"nest/{name}": data for name, data in content.items()}),
            extract(NEMO),
            either("model_config.yaml"),
        ),
        (
            ".nemo packed on a Mac, with ._ files",
            packed(
                lambda content: [
                    ("./._" + CONFIG, b"\x00\x05\x16\x07" * 40),
                    *content.items(),
                    ("./._" + WEIGHTS, b"\x00\x05\x16\x07" * 40),
                ]
            ),
            extract(NEMO),
            SAME,
        ),
        (
            ".nemo with an edited configuration appended (tar -r)",
            packed(
                lambda content: [*content.items(), (CONFIG, content[CONFIG].replace(b"n_layers: 2", b"n_layers: 1"))]
            ),
            extract(NEMO),
            refused("model_config.yaml|layers.1"),
        ),
        (
            ".nemo with weights in a folder of shards",
            packed(
                lambda content: {
                    CONFIG: content[CONFIG],
                    "model_weights/metadata.json": b"{}",
                    "model_weights/__0_0.distcp": bytes(99),
                }
            ),
            extract(NEMO),
            refused("model_weights"),
        ),
        (
            ".nemo of a speech recogniser with this encoder",
            packed(of_speech_recogniser),
            extract(NEMO),
            either("decoder|EncDecCTCModelBPE"),
        ),
        (
            ".ckpt with a pickle that is a command",
            damaged(CKPT, evil_in_archive),
            starting("init_from_ptl_ckpt", CKPT),
            refused(CKPT),
        ),
        (".ckpt packed again by zip", damaged(CKPT, deflated), extract(CKPT), either(CKPT)),
        (
            "a flipped bit in the configuration of .nemo",
            damaged(NEMO, lambda data: data.replace(b"n_fft: 512", b"n_fft: 513", 1)),
            extract(NEMO),
            refused(NEMO),
        ),
        (
            "a page of zeros in .ckpt",
            damaged(CKPT, lambda data: patched(data, 409_600, bytes(4096))),
            export(CKPT),
            refused(CKPT),
        ),
    ]


def configurations() -> list[Row]:
    """The configuration in a .nemo file was edited, and packed again without a checksum."""
    same: list[Row] = [
        (
            "configuration saved by an editor: byte order mark",
            config_bytes(lambda data: b"\xef\xbb\xbf" + data),
            extract(NEMO),
            SAME,
        ),
        (
            "configuration with strings for numbers",
            config(encoder__d_model="32", encoder__n_layers="2"),
            extract(NEMO),
            either("d_model|n_layers"),
        ),
        (
            "configuration with data of another machine",
            config(train_ds__manifest_filepath="/mnt/gone/train.json", optim__name="novograd"),
            extract(NEMO),
            SAME,
        ),
    ]
    broken: dict[str, tuple[Setup, list[str], str]] = {
        "indented with tabs": (config_bytes(lambda data: data.replace(b"  ", b"\t")), info(NEMO), CONFIG),
        "10^9 words by aliases": (config_bytes(bomb), info(NEMO), CONFIG),
        "with a secret of the environment": (
            config(train_ds__manifest_filepath="${oc.env:HOME}"),
            export(NEMO),
            "oc.env",
        ),
        "with two sample rates": (config(preprocessor__sample_rate=8000), extract(NEMO), "sample_rate"),
        "with other mel filters": (config(preprocessor__highfreq=4000), extract(NEMO), "fb|highfreq|mel"),
        "with a layer more": (config(encoder__n_layers=3), extract(NEMO), "layers.2"),
        "with heads that do not divide the width": (config(encoder__n_heads=5), extract(NEMO), "n_heads"),
        "with a width of 10^9": (config(encoder__d_model=10**9), extract(NEMO), "d_model"),
        "with a key of a later NeMo": (config(encoder__flash_conformer=True), extract(NEMO), "flash_conformer"),
    }
    return [
        *same,
        *((f"configuration {name}", setup, command, refused(word)) for name, (setup, command, word) in broken.items()),
    ]


def contents() -> list[Row]:
    """Weights with good checksums that are wrong, or right and stored in an unusual way."""
    broken: dict[str, tuple[Setup, list[str], str]] = {
        "NaN in one weight": (weights(put(MATRIX, 77, float("nan"))), extract(NEMO), MATRIX),
        "an infinite weight, exported": (weights(put(FLAT, 0, float("-inf"))), export(NEMO), FLAT),
        "a NaN weight, probed": (both(labelled, weights(put(FLAT, 0, float("nan")))), probe(NEMO), FLAT),
        "a NaN weight, as starting weights": (
            weights(put(FLAT, 0, float("nan"))),
            starting("init_from_nemo_model", NEMO),
            FLAT,
        ),
        "a negative variance": (weights(put(VARIANCE, 5, -0.3)), extract(NEMO), VARIANCE),
        "int8 weights": (weights(one(MATRIX, lambda value: (value * 100).to(torch.int8))), extract(NEMO), MATRIX),
        "one weight too many: a LoRA adapter": (
            weights(lambda state: {**state, "encoder.layers.0.lora_A": torch.ones(4, 32)}),
            extract(NEMO),
            "lora_A",
        ),
        "codebooks of zeros": (
            weights(
                lambda state: {
                    k: v * 0 if k.startswith("quantizer.") and v.is_floating_point() else v for k, v in state.items()
                }
            ),
            export(NEMO),
            "quantizer",
        ),
        "mel filters scaled by 32768": (weights(one(FILTERS, lambda value: value * 32768)), extract(NEMO), "fb"),
        "a tensor whose name rings a bell": (
            weights(lambda state: {**state, "encoder.\x1b]0;owned\x07\x1b[2J": torch.ones(1)}),
            extract(NEMO),
            "owned",
        ),
    }
    stored: dict[str, tuple[Setup, list[str], Expected]] = {
        "as parameters that want gradients": (
            weights(each(lambda value: torch.nn.Parameter(value))),
            extract(NEMO),
            SAME,
        ),
        "as views of one buffer": (weights(of_one_buffer), extract(NEMO), SAME),
        "as part of a larger tensor": (weights(part_of_larger), extract(NEMO), SAME),
        "in float16": (
            weights(each(lambda value: value.half() if value.numel() < 9e9 else value)),
            extract(NEMO),
            either("float16|half|fb|window", right=Right(close_features(0.05))),
        ),
        "in bfloat16, but not the preprocessor's": (
            weights(
                lambda state: {
                    k: v.bfloat16() if k.startswith("encoder.") and v.is_floating_point() else v
                    for k, v in state.items()
                }
            ),
            extract(NEMO),
            either("bfloat16", right=Right(close_features(0.2))),
        ),
        "that were on a GPU": (
            packed(lambda content: {**content, WEIGHTS: saved_on_gpu(content[WEIGHTS])}),
            extract(NEMO),
            SAME,
        ),
    }
    return [
        *((f"weights: {name}", setup, command, refused(word)) for name, (setup, command, word) in broken.items()),
        *((f"weights {name}", setup, command, expected) for name, (setup, command, expected) in stored.items()),
        (".ckpt that was saved on a GPU", damaged(CKPT, saved_on_gpu), extract(CKPT), SAME),
        (
            ".ckpt with weights and configuration only",
            checkpoint(kept("state_dict", "hyper_parameters")),
            extract(CKPT),
            SAME,
        ),
        (
            ".ckpt without a configuration",
            checkpoint(kept("state_dict")),
            extract(CKPT),
            refused("hyper_parameters|config"),
        ),
        (".ckpt that NeMo has written", checkpoint(by_nemo), extract(CKPT), either(CKPT)),
    ]


def safetensors_files() -> list[Row]:
    return [
        (
            ".safetensors saved again without metadata",
            tensors(lambda state: state),
            extract(TENSORS),
            refused(TENSORS, "config|metadata"),
        ),
        (
            ".safetensors saved again in float16 with our checksum",
            tensors(lambda state: {k: v.half() if v.is_floating_point() else v for k, v in state.items()}, keep=True),
            extract(TENSORS),
            refused("checksum|crc|damaged"),
        ),
        (
            ".safetensors with names of wav2vec 2.0",
            tensors(lambda state: {"wav2vec2.encoder.layers.0.attention.k_proj.weight": torch.ones(4, 4)}),
            info(TENSORS),
            refused(TENSORS),
        ),
        (
            ".safetensors without its checksum",
            damaged(TENSORS, header(lambda head: head["__metadata__"].pop("crc32"))),
            extract(TENSORS),
            either("crc32|checksum"),
        ),
    ]


def starts() -> list[Row]:
    """Starting weights for pretrain."""
    nemo, ckpt = "init_from_nemo_model", "init_from_ptl_ckpt"
    wide = ["model.encoder.d_model=64", "model.encoder.n_heads=8"]
    return [
        ("starting weights: the whole model", given(NEMO), starting(nemo, NEMO), ALL_LOADED),
        (
            "starting weights: a .ckpt for init_from_nemo_model",
            given(CKPT),
            starting(nemo, CKPT),
            Either(refused(ckpt), ALL_LOADED),
        ),
        ("starting weights: a .ckpt that NeMo has written", checkpoint(by_nemo), starting(ckpt, CKPT), ALL_LOADED),
        (
            "starting weights: a .ckpt that was saved on a GPU",
            damaged(CKPT, saved_on_gpu),
            starting(ckpt, CKPT),
            ALL_LOADED,
        ),
        (
            "starting weights: only state_dict in .ckpt",
            checkpoint(kept("state_dict")),
            starting(ckpt, CKPT),
            ALL_LOADED,
        ),
        ("starting weights: cut off", damaged(NEMO, cut(0.5)), starting(nemo, NEMO), refused(NEMO)),
        (
            "starting weights: two sources",
            given(NEMO, CKPT),
            pretrain(f"{nemo}={NEMO}", f"{ckpt}={CKPT}"),
            refused(nemo, ckpt),
        ),
        (
            "starting weights: include matches nothing",
            given(NEMO),
            starting(nemo, f"{{base: {{path: {NEMO}, include: [encodr]}}}}"),
            refused("encodr"),
        ),
        (
            "starting weights: exclude matches everything",
            given(NEMO),
            starting(nemo, f"{{base: {{path: {NEMO}, exclude: ['']}}}}"),
            Either(refused("exclude"), Right(said("0 loaded", "warning"))),
        ),
        (
            "starting weights: of a model of another width",
            given(NEMO),
            [*starting(nemo, NEMO), *wide],
            Either(refused("shape|d_model"), Right(said("of a different shape", then=trained))),
        ),
        (
            "starting weights: names with 'module.', nothing fits",
            weights(prefixed("module.")),
            starting(nemo, NEMO),
            refused("module.|nothing|none of|no weight"),
        ),
    ]


def outputs() -> list[Trial]:
    """The models are good; what is done with them is not."""
    here = ["export", NEMO, NEMO, "--format", "nemo"]
    return [
        Trial(GROUP, "export onto the file itself", here, Either(refused(NEMO), Right(same_weights)), given(NEMO)),
        Trial(
            GROUP,
            "export to .safetensors onto the .nemo file",
            ["export", NEMO, NEMO, "--format", "safetensors"],
            refused(NEMO),
            given(NEMO),
        ),
        Trial(
            GROUP,
            "a model from a pipe: <(zcat …)",
            info(""),
            Either(refused("/dev/fd"), Right(said("parameters", then=ended_well))),
            piped,
            shell='"${@:1:4}" <(zcat model.nemo.gz)',
        ),
    ]


def extracted_before(folder: Path) -> None:
    """Features of another model, which had the same name."""
    before = in_process(extract(NEMO), folder, {}, 60)
    if before.code != 0:
        raise RuntimeError(before.text)
    weights(one(MATRIX, lambda value: value + 0.5))(folder)


def other_features(folder: Path, outcome: Outcome) -> str | None:
    """None of the features that the manifest names is the old model's."""
    line = json.loads((folder / "out/manifest.jsonl").read_text())
    old = np.array_equal(np.load(folder / line["feature_filepath"]), Fixture.feature())
    return "the features are those of the model that was there before" if old else None


def loaded_in_part(folder: Path, outcome: Outcome) -> str | None:
    """The encoder's weights were loaded, the decoder's and the quantizer's were not."""
    loaded = re.search(r"(\d+) loaded", outcome.text)
    if not loaded or not 80 < int(loaded[1]) < 99:
        return f"loaded: {loaded[1] if loaded else 'not said'}"
    return trained(folder, outcome)


def piped(folder: Path) -> None:
    (folder / "model.nemo.gz").write_bytes(gzip.compress((Fixture.path / NEMO).read_bytes()))


def trials() -> list[Trial]:
    table = [*not_what_it_says(), *archives(), *configurations(), *contents(), *safetensors_files(), *starts()]
    made = [
        Trial(GROUP, name, command, expected, both(labelled, setup), limit_s=90)
        for name, setup, command, expected in table
    ]
    return [*made, *outputs(), *later()]


def later() -> list[Trial]:
    """What happens the next week: the model of the same name is another, or somebody's shorthand means something else."""
    nemo = "init_from_nemo_model"
    no_sum = header(lambda head: head["__metadata__"].pop("crc32"))
    bfloat = each(lambda value: value.bfloat16())
    rows: list[Row] = [
        (
            "features of a model that was replaced since",
            both(given(NEMO), extracted_before),
            extract(NEMO),
            Either(refused("out"), Right(other_features)),
        ),
        (
            "starting weights: include is a word, not a list",
            given(NEMO),
            starting(nemo, f"{{base: {{path: {NEMO}, include: encoder}}}}"),
            Either(refused("include"), Right(loaded_in_part)),
        ),
        (
            "starting weights: exclude is a word, not a list",
            given(NEMO),
            starting(nemo, f"{{base: {{path: {NEMO}, exclude: decoder}}}}"),
            Either(refused("exclude"), Right(loaded_in_part)),
        ),
        (
            "starting weights: numpy's numbers in .ckpt",
            checkpoint(by_callback),
            starting("init_from_ptl_ckpt", CKPT),
            Either(refused("numpy"), ALL_LOADED),
        ),
        (
            "weights all in bfloat16, as NeMo's .bfloat16() leaves them",
            weights(bfloat),
            extract(NEMO),
            either("bfloat16", right=Right(close_features(0.3))),
        ),
        (
            "a NaN weight in .safetensors without a checksum",
            both(
                tensors(lambda state: (put(FLAT, 2, float("nan"))(state), state)[1], keep=True),
                on_bytes(no_sum, Path(TENSORS)),
            ),
            extract(TENSORS),
            refused(FLAT),
        ),
        (
            "info of two models that differ in one weight",
            both(given(CKPT), weights(put(MATRIX, 9, 0.25))),
            ["info", NEMO, CKPT],
            Right(said(MATRIX, then=ended_well)),
        ),
        (
            "a NaN weight, exported to Hugging Face",
            weights(put(FLAT, 0, float("nan"))),
            export(NEMO, "huggingface"),
            refused(FLAT),
        ),
    ]
    return [Trial(GROUP, name, command, expected, setup, limit_s=90) for name, setup, command, expected in rows]
