"""Where features are stored: one file per utterance, or shards. Files are complete or absent."""

from __future__ import annotations

import io
import json
import math
import os
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nest_ssl.files import replacing

Features = NDArray[np.float32] | NDArray[np.float16]

FORMATS = ("npy", "safetensors", "shards")


@dataclass(frozen=True)
class Stored:
    """Where one utterance's features are, relative to the output folder."""

    path: str
    name: str | None
    """Name inside a safetensors file; None for npy."""
    shape: tuple[int, ...]


class FeatureStore(ABC):
    """A folder of features by key."""

    concurrent: bool
    """`write` may be called from several threads at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def find(self, key: str) -> Stored | None:
        """What is stored under this key, or None."""

    @abstractmethod
    def write(self, key: str, features: Features) -> None: ...

    @abstractmethod
    def flush(self) -> None:
        """Make sure that everything written is on disk."""


class FileStore(FeatureStore):
    """`features/ab/ab12cd-name.npy` or `.safetensors`: one file per utterance, in up to 256 folders."""

    concurrent = True

    def __init__(self, folder: Path, suffix: str) -> None:
        super().__init__(folder)
        self.suffix = suffix

    def _path(self, key: str) -> Path:
        return Path("features") / key[:2] / f"{key}{self.suffix}"

    def find(self, key: str) -> Stored | None:
        path = self._path(key)
        try:
            with (self.folder / path).open("rb") as file:
                if self.suffix == ".npy":
                    return Stored(path.as_posix(), None, _npy_shape(file))
                return Stored(path.as_posix(), "features", _safetensors_shapes(file)["features"])
        except (FileNotFoundError, Incomplete, KeyError):
            return None

    def write(self, key: str, features: Features) -> None:
        path = self.folder / self._path(key)
        for folder in (path.parent.parent, path.parent):  # but not the output folder, if that was deleted meanwhile
            folder.mkdir(exist_ok=True)
        with replacing(path, sync=False) as file:
            if self.suffix == ".npy":
                np.save(file, features)
            else:
                file.write(_safetensors_bytes({"features": features}))

    def flush(self) -> None:
        """Nothing to do: every file is complete as soon as it is written."""


class ShardStore(FeatureStore):
    """`shard-00000.safetensors` …: many utterances per file, each under its key."""

    concurrent = False

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        super().__init__(folder)
        self.shard_bytes = shard_bytes
        self._waiting: dict[str, Features] = {}
        self._waiting_bytes = 0
        self._stored: dict[str, Stored] = {}
        self._num_shards = 0
        while (path := folder / self._name()).exists():
            with path.open("rb") as file:
                self._remember(_safetensors_shapes(file))

    def _name(self) -> str:
        return f"shard-{self._num_shards:05d}.safetensors"

    def _remember(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._stored |= {key: Stored(self._name(), key, shape) for key, shape in shapes.items()}
        self._num_shards += 1

    def find(self, key: str) -> Stored | None:
        stored = self._stored.get(key)
        return stored if stored and (self.folder / stored.path).exists() else None

    def write(self, key: str, features: Features) -> None:
        self._waiting[key] = features
        self._waiting_bytes += features.nbytes
        if self._waiting_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        with replacing(self.folder / self._name()) as file:
            file.write(_safetensors_bytes(self._waiting))
        self._remember({key: features.shape for key, features in self._waiting.items()})
        self._waiting, self._waiting_bytes = {}, 0


def open_store(folder: Path, kind: str, shard_bytes: int) -> FeatureStore:
    """Open the store in a folder; it finds what is there already."""
    if kind not in FORMATS:
        raise ValueError(f"format: {kind!r} is not one of {', '.join(FORMATS)}.")
    if kind != "npy":
        _need_safetensors(kind)
    return ShardStore(folder, shard_bytes) if kind == "shards" else FileStore(folder, f".{kind}")


def read_features(folder: str | Path, entry: dict[str, object]) -> Features:
    """Read the features of one line of `manifest.jsonl` in an output folder of `nest-ssl extract`."""
    path = Path(folder) / str(entry["feature_filepath"])
    if path.suffix == ".npy":
        features: Features = np.load(path)
        return features
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        tensor: Features = file.get_tensor(str(entry["feature_name"]))
        return tensor


class Incomplete(ValueError):  # noqa: N818 - a normal case: the file is written again
    """A truncated file: the machine went down before it was on disk."""

    def __init__(self, file: io.BufferedReader) -> None:
        super().__init__(f"{file.name}: is truncated. Remove it to have it written again.")


def _npy_shape(file: io.BufferedReader) -> tuple[int, ...]:
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject:
            raise ValueError("objects in place of numbers")
    except ValueError as error:
        raise Incomplete(file) from error
    _check_size(file, file.tell() + math.prod(shape) * dtype.itemsize)
    return tuple(shape)


def _safetensors_shapes(file: io.BufferedReader) -> dict[str, tuple[int, ...]]:
    """Read shapes from the header: 8 bytes with its length, then JSON."""
    try:
        (size,) = struct.unpack("<Q", file.read(8))
        _check_size(file, 8 + size)  # before as much memory is asked for
        header = json.loads(file.read(size))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        _check_size(file, 8 + size + max(entry["data_offsets"][1] for entry in tensors.values()))
        return {name: tuple(entry["shape"]) for name, entry in tensors.items()}
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Incomplete(file) from error


def _check_size(file: io.BufferedReader, num_bytes: int) -> None:
    if os.fstat(file.fileno()).st_size < num_bytes:
        raise Incomplete(file)


def _safetensors_bytes(tensors: dict[str, Features]) -> bytes:
    from safetensors.numpy import save

    return save({name: np.ascontiguousarray(features) for name, features in tensors.items()})


def _need_safetensors(kind: str) -> None:
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise ValueError(f"format {kind}: needs safetensors. Install nest-ssl[hf], or use npy.") from error
