"""`.nemo` files: a tar of `model_config.yaml` and `model_weights.ckpt`, read without trusting it.

Nothing is unpacked to disk, no name in the file is imported, weights can only be tensors, and sizes are checked before
anything is read. Training checkpoints in shards are read here too, in the same spirit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import logging
import pickle
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch
import yaml
from torch import Tensor

from nest_ssl._version import __version__
from nest_ssl.config import ModelConfig
from nest_ssl.config.checks import quoted
from nest_ssl.config.targets import SECTIONS, nemo_target
from nest_ssl.files import SHARDS_INDEX, SHARDS_REST, remove_left_over, replacing

log = logging.getLogger(__name__)

CONFIG_NAME, WEIGHTS_NAME = "model_config.yaml", "model_weights.ckpt"

CONFIG_CHECKSUM = "NESTSSL.crc32"
"""Of the configuration, next to it in the tar file; NeMo writes none and ignores it."""

GIVEN = {
    "featurizer.fb": "model.preprocessor.lowfreq, highfreq, n_fft or mel_norm",
    "featurizer.window": "model.preprocessor.window or window_size",
}
"""Ends of names of what is saved with the weights although the configuration decides it, and the keys that do."""

MAX_CONFIG_BYTES = 2**20  # NeMo's have 6 to 60 KB; yaml parses 170 KB per second
MAX_WEIGHTS_BYTES = 64 * 2**30
MAX_EXPANSION = 200  # more is a zip bomb: compression shrinks float32 weights by a tenth
MAX_MEMBERS = 10_000
MAX_CONFIG_VALUES = 100_000  # NeMo's have hundreds; a pickle can contain itself, or one list a billion times
ENCRYPTED = 1  # zip's flag
BEFORE_ZIP = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
"""What torch's files began with before they were zip archives."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and the reason."""


@dataclass
class NemoFile:
    """The contents of a `.nemo` file."""

    config: dict[str, Any]
    """The model section, as saved."""
    weights: dict[str, Tensor]


def read_nemo(path: str | Path, map_location: Any = "cpu") -> NemoFile:
    """Read configuration and weights from a `.nemo` file (tar or tar.gz)."""
    path = Path(path)
    check_is_file(path)
    with (
        as_checkpoint_errors(path, "not a readable .nemo file"),
        tarfile.open(path, "r:gz" if _is_gzip(path) else "r:") as archive,
    ):
        members = _checked_members(path, archive)
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            if name not in members:
                raise CheckpointError(f"{path}: not a .nemo file of a model: it has no {name}.")
        config = _read_config(path, archive, members[CONFIG_NAME])
        weights = _read_weights(path, archive, members[WEIGHTS_NAME], map_location)
    return NemoFile(config, weights)


def write_nemo(path: str | Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write a `.nemo` file, complete or not at all."""
    path = Path(path)
    buffer = io.BytesIO()
    torch.save({name: tensor.detach().cpu() for name, tensor in weights.items()}, buffer)
    text = yaml.safe_dump(dict(config), sort_keys=False).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_left_over(path)
    with replacing(path) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in ((CONFIG_NAME, text), (WEIGHTS_NAME, buffer.getbuffer())):
            info = tarfile.TarInfo(f"./{name}")
            info.size, info.mode = len(data), 0o644
            if name == CONFIG_NAME:  # the weights have checksums of their own
                info.pax_headers = {CONFIG_CHECKSUM: f"{zlib.crc32(data):08x}"}
            archive.addfile(info, io.BytesIO(data))


def nemo_config(cfg: ModelConfig, class_name: str) -> dict[str, Any]:
    """`cfg` as NeMo writes it: with its `_target_` names, and the sections that its base classes require."""
    config = dataclasses.asdict(cfg)
    for section, name in SECTIONS.items():
        config[section] = {"_target_": nemo_target(name), **config[section]}
    for key in ("compile", "activation_budget"):  # about the machine, not the model; NeMo does not know these keys
        del config[key]
    config["optim"] = cfg.optim.as_nemo_writes_it()
    if cfg.mask_position == "post_conv":
        config["quantizer"]["combine_time_steps"] = 1  # NeMo adjusts the other values for post_conv itself
    config["spec_augment"] = {"_target_": nemo_target("SpectrogramAugmentation"), "freq_masks": 0, "time_masks": 0}
    config["target"] = nemo_target(class_name).replace(".models.", ".models.ssl_models.")
    config["nest_ssl_version"] = __version__
    return config


def check_is_file(path: Path) -> None:
    """Refuse everything but regular files: a pipe would block, and a device has no end."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be opened: {one_line(error)}.") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: is {'a folder, not a file' if stat.S_ISDIR(mode) else 'not a regular file'}.")


def check_weights(weights: object, where: str) -> dict[str, Tensor]:
    """Return `weights` if they are a mapping of names to ordinary tensors; otherwise raise."""
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{where} is not a mapping of names to tensors.")
    for name, value in weights.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{where} is not a mapping of names to tensors: {quoted(name)}.")
        if not name.isprintable():  # it could pass for another line of a message
            raise CheckpointError(f"{where}: a name has control characters: {quoted(name)}; refused.")
        if value.layout != torch.strided or value.is_quantized or value.is_complex() or value.is_meta:
            raise CheckpointError(f"{where} contains {quoted(name)}, which is not a dense, real tensor with data.")
    return dict(weights)


def check_fit(model: torch.nn.Module, weights: dict[str, Tensor], where: str, *, strict: bool = True) -> None:
    """Check that names, shapes and kinds agree and that all values are finite; an error lists what does not."""
    own = model.state_dict()
    misshapen = [
        f"{name}: {tuple(weights[name].shape)} in the file, {tuple(own[name].shape)} in the model"
        for name in sorted(own.keys() & weights.keys())
        if weights[name].shape != own[name].shape
    ]
    if misshapen:
        raise CheckpointError(f"{where}: {len(misshapen)} parameters have different shapes:\n{_listing(misshapen)}")
    check_values({name: weights[name] for name in own.keys() & weights.keys()}, own, where)
    missing = sorted(own.keys() - weights.keys())
    unexpected = sorted(weights.keys() - own.keys())
    if missing or unexpected:
        listings = [
            _listing([f"missing: {k}" for k in missing], 3),
            _listing([f"unexpected: {k}" for k in unexpected], 3),
        ]
        counts = f"{len(missing)} parameters are missing and {len(unexpected)} are unexpected"
        message = "\n".join([f"{where}: {counts}.", *filter(None, listings)])
        if strict:
            raise CheckpointError(message)
        log.warning(message)


def check_values(weights: Mapping[str, Tensor], own: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights that are not floating-point where the model's are, or not finite."""
    bad = []
    for name in sorted(weights):
        value = weights[name]
        if own[name].is_floating_point() and not value.is_floating_point():
            bad.append(f"{name}: {str(value.dtype).removeprefix('torch.')} in the file, floating-point in the model")
        elif value.is_floating_point() and value.dtype.itemsize == 1:
            bad.append(f"{name}: {str(value.dtype).removeprefix('torch.')} has too few digits for weights")
        elif value.is_floating_point():
            dtype = own[name].dtype if own[name].is_floating_point() else value.dtype  # NaN would become an integer
            finite = value.to(dtype).isfinite()  # as the model will have it: float64 may be too large
            if not finite.all():
                bad.append(f"{name}: {int((~finite).sum()):,} of {finite.numel():,} values are NaN or infinite")
            elif name.endswith("running_var") and (value < 0).any():
                bad.append(f"{name}: variances are negative")
            elif name.startswith("quantizer.") and (value == 0).all(-1).any():
                bad.append(f"{name}: whole rows are 0, so targets would mean nothing")
    matrices = [value for name, value in weights.items() if name.startswith("encoder.") and value.ndim > 1]
    if not bad and matrices and not any(bool(value.any()) for value in matrices):
        bad.append("encoder: all weight matrices are 0")
    if bad:
        raise CheckpointError(
            f"{where}: {len(bad)} of {len(weights)} parameters cannot be used; training may have diverged before it "
            f"was saved. Use an earlier checkpoint.\n{_listing(bad)}"
        )


def check_features(weights: Mapping[str, Tensor], own: Mapping[str, Tensor], where: str) -> None:
    """Refuse another window or other mel filters than those of the configuration, which `own` has."""
    for end, keys in GIVEN.items():
        for name in sorted(name for name in weights.keys() & own.keys() if name.endswith(end)):
            rtol = max(1e-3, torch.finfo(weights[name].dtype).eps)  # bfloat16 has three digits
            if not torch.allclose(weights[name].cpu().float(), own[name].cpu(), rtol=rtol, atol=1e-5):
                raise CheckpointError(f"{where}: its {name} is not what the configuration gives: another {keys}?")


def _listing(lines: list[str], most: int = 6) -> str:
    more = [f"… and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join(f"  {line}" for line in lines[:most] + more)


def one_line(error: BaseException, most: int = 300) -> str:
    """The message of an error on one line, or its type if it has no message."""
    if isinstance(error, EOFError):
        return "it ends too early"
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or contains itself"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "weights_only" in str(error):  # torch advises to trust the file
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f": {found[1]}" if found else ", or is something else altogether"
        return f"it contains more than tensors and plain values{what}"
    if "PytorchStreamReader" in str(error):
        return "it is cut off or damaged"
    if "mmap can only be used" in str(error) or "inline_container" in str(error):
        return "it is something else"
    return " ".join(str(error).split())[:most] or type(error).__name__


def read_weights(file: IO[bytes], name: str, map_location: Any = "cpu") -> Any:
    """`torch.load` for tensors and plain containers only, after checking size and checksums of its zip."""
    if zipfile.is_zipfile(file):
        check_archive(file, name)
    file.seek(0)
    if file.read(len(BEFORE_ZIP)) == BEFORE_ZIP:
        raise CheckpointError(
            f"{name}: is in torch's form from before version 1.6, which has no checksums. Load it with torch and save "
            "it again."
        )
    file.seek(0)
    return torch.load(file, map_location=map_location, weights_only=True)


def check_archive(file: IO[bytes], name: str) -> None:
    """Refuse a zip that would unpack to too much, or whose content differs from the checksums in it.

    Torch writes a CRC-32 for every tensor and ignores it when it reads: a flipped bit would become a weight. This costs
    one more pass over the file, some seconds per GB.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            packed = sum(entry.compress_size for entry in archive.infolist())
            if unpacked > MAX_WEIGHTS_BYTES or unpacked > MAX_EXPANSION * max(packed, 1):
                raise CheckpointError(f"{name}: would unpack to {unpacked:,} bytes; refused.")
            if len(set(archive.namelist())) < len(archive.namelist()):
                raise CheckpointError(f"{name}: is damaged: a part of it is there twice. Use another copy of it.")
            if any(entry.flag_bits & ENCRYPTED for entry in archive.infolist()):
                raise CheckpointError(f"{name}: is encrypted, or damaged.")
            bad = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that is a place before the file's start
            raise
        raise CheckpointError(f"{name}: is damaged: {one_line(error)}. Use another copy of it.") from error
    if bad is not None:
        raise CheckpointError(f"{name}: is damaged: {quoted(bad)} in it fails its checksum. Use another copy of it.")


def _checked_members(path: Path, archive: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
    """The regular files in the archive by name, after checking every name and size."""
    members: dict[str, tarfile.TarInfo] = {}
    file_bytes, total = path.stat().st_size, 0
    for count, member in enumerate(archive, start=1):
        if count > MAX_MEMBERS:
            raise CheckpointError(f"{path}: contains more than {MAX_MEMBERS:,} members; refused.")
        name = PurePosixPath(member.name)
        if name.is_absolute() or ".." in name.parts or "\\" in member.name:
            raise CheckpointError(f"{path}: contains {quoted(member.name)}, a path outside its folder; refused.")
        if not (member.isreg() or member.isdir()):
            kind = "neither a file nor a folder"
            raise CheckpointError(f"{path}: contains {quoted(member.name)}, which is {kind}; refused.")
        total += member.size
        if total > MAX_WEIGHTS_BYTES or total > MAX_EXPANSION * file_bytes:
            raise CheckpointError(f"{path}: would unpack to {total:,} bytes or more from {file_bytes:,}; refused.")
        if str(name) in members:
            raise CheckpointError(f"{path}: contains {quoted(str(name))} twice; refused.")
        members[str(name)] = member
    while _is_gzip(path) and archive.fileobj is not None and (rest := archive.fileobj.read(2**20)):
        total += len(rest)  # to the end of the stream, where gzip compares its checksum
        if total > MAX_EXPANSION * file_bytes:
            raise CheckpointError(f"{path}: would unpack to {total:,} bytes or more from {file_bytes:,}; refused.")
    return {name: member for name, member in members.items() if member.isreg()}


def _read_config(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> dict[str, Any]:
    if member.size > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{path}: its {CONFIG_NAME} has {member.size:,} bytes; refused.")
    file = archive.extractfile(member)
    assert file is not None
    data = file.read()
    if member.pax_headers.get(CONFIG_CHECKSUM) not in (None, f"{zlib.crc32(data):08x}"):
        raise CheckpointError(f"{path}: is damaged: its {CONFIG_NAME} fails its checksum. Use another copy of it.")
    with as_checkpoint_errors(path, f"its {CONFIG_NAME} is not valid yaml"):
        text = data.decode()  # yaml would also take UTF-16, and find resolvers in it that were not looked for
        refuse_resolvers(text, f"{path}: its {CONFIG_NAME}")
        config = yaml.load(text, Loader=_StrictLoader)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: its {CONFIG_NAME} is not a mapping.")
    return config


def refuse_resolvers(config: Any, where: str) -> None:
    """Refuse `${oc.env:NAME}` and its like, in a text or a mapping: they copy secrets into messages and files."""
    values = [config]
    for value in values:  # which grows
        if isinstance(value, Mapping):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            values += value
        elif isinstance(value, str) and (found := re.search(r"\$\{[^}]*:[^}]*", value)):
            raise CheckpointError(f"{where} calls a resolver, {quoted(found[0])}; refused.")
        if len(values) > MAX_CONFIG_VALUES:
            raise CheckpointError(f"{where} contains itself, or more than {MAX_CONFIG_VALUES:,} values; refused.")


class _StrictLoader(yaml.SafeLoader):
    """yaml without keys that occur twice and without aliases, which can make a small file expand without limit."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not accepted")
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:  # yaml would take the last one
            if str(key.value) in seen:
                raise yaml.YAMLError(f"the key '{key.value}' occurs twice, again in line {key.start_mark.line + 1}")
            seen.add(str(key.value))
        return node


def _read_weights(
    path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo, map_location: Any
) -> dict[str, Tensor]:
    file = archive.extractfile(member)
    assert file is not None
    # Each seek in a compressed stream starts from the beginning: keep it in memory instead.
    seekable: IO[bytes] = io.BytesIO(file.read()) if _is_gzip(path) else file
    with as_checkpoint_errors(path, f"its {WEIGHTS_NAME} cannot be read as weights"):
        weights = read_weights(seekable, f"{path}: its {WEIGHTS_NAME}", map_location)
    return check_weights(weights, f"{path}: its {WEIGHTS_NAME}")


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


@contextlib.contextmanager
def as_checkpoint_errors(path: Path, what: str) -> Iterator[None]:
    """Turn whatever a damaged file makes torch, tar and yaml stumble over into one clear error that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = "it is empty" if path.is_file() and path.stat().st_size == 0 else one_line(error)
        raise CheckpointError(f"{path}: {what}: {reason}.") from error


# ---- checkpoints in shards: a folder that torch.distributed.checkpoint wrote ----

INDEX_CHECKSUM = "index_crc32"
SAVE = "save"
"""The number of the save: once in the rest, and in the shards of every rank. They may be copied while they change."""
OPTIMIZER = "optimizer"
"""Tensors are named `state_dict.NAME`, `current_model_state.NAME` and `optimizer.NUMBER.KIND`."""
_INDEX_GLOBALS = {
    "torch": {"Size", "device", *(str(value)[6:] for value in vars(torch).values() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "WindowsPath"},  # where it was written
    "pathlib._local": {"PosixPath", "WindowsPath"},
}
"""What the index may be made of; torch itself would unpickle anything."""

Empty = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Makes the tensor that a stored one of this name, size and type is read into."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX_GLOBALS.get(module, ()):
            raise pickle.UnpicklingError(f"contains a {module}.{name}; refused")
        return super().find_class(module, name)


def read_rest(folder: Path) -> dict[str, Any]:
    """Read all of a checkpoint in shards but the tensors in the shards."""
    path = folder / SHARDS_REST
    check_is_file(path)
    with as_checkpoint_errors(path, "not a readable training checkpoint"), path.open("rb") as file:
        content: dict[str, Any] = read_weights(file, str(path))
    return content


def read_sharded(folder: Path, empty: Empty | None = None, *, only: str = "") -> dict[str, Any]:
    """Read a checkpoint in shards into the form that a `.ckpt` file has.

    Without `empty` its tensors are whole, on the CPU. A tensor that `empty` makes may be this rank's shard: only that
    part is read, by whatever number of ranks it was written. `only` tensors whose names begin so are read.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    content = read_rest(folder)
    index = read_index(folder)
    if content.pop(INDEX_CHECKSUM, None) not in (None, checksum_of_index(folder)):  # older ones have none
        raise CheckpointError(f"{folder / SHARDS_INDEX}: is damaged: it fails its checksum.")
    tensors: dict[str, Any] = {}
    for name, about in index.state_dict_metadata.items():
        if name.startswith((only, f"{SAVE}.")):
            make = empty or (lambda _, size, dtype: torch.empty(size, dtype=dtype))
            tensors[name] = make(name, about.size, about.properties.dtype)
    reader, planner = FileSystemReader(folder), DefaultLoadPlanner(flatten_state_dict=False)
    # What torch's `load` does, without its collectives: each rank finds in the index what it needs.
    planner.set_up_planner(tensors, index, is_coordinator=False)
    reader.set_up_storage_reader(index, is_coordinator=False)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    for item in plan.items:  # each is an archive of its own; only what this rank reads is checked
        place = index.storage_data[item.storage_index]
        with (folder / place.relative_path).open("rb") as shard:
            shard.seek(place.offset)
            where = f"{folder / place.relative_path}: {item.storage_index.fqn}"
            check_archive(io.BytesIO(shard.read(place.length)), where)
    with as_checkpoint_errors(folder, "is damaged"):  # torch looks at more of an archive than its checksums cover
        reader.read_data(plan, planner).wait()
    saves = {int(tensors.pop(name)) for name in list(tensors) if name.startswith(f"{SAVE}.")}
    if saves != ({content.pop(SAVE)} if SAVE in content else set()):  # older ones have none
        raise CheckpointError(f"{folder}: is damaged: its parts are of different saves.")
    for place, value in tensors.items():
        section, name = place.split(".", 1)
        if section == OPTIMIZER:
            number, kind = name.split(".", 1)
            content["optimizer_states"][0]["state"].setdefault(int(number), {})[kind] = value
        else:
            content.setdefault(section, {})[name] = value
    return content


def checksum_of_index(folder: Path) -> int:
    return zlib.crc32((folder / SHARDS_INDEX).read_bytes())


def read_index(folder: Path) -> Any:
    """Read the index of a checkpoint in shards, and check that the folder contains what it lists."""
    path = folder / SHARDS_INDEX
    check_is_file(path)
    with as_checkpoint_errors(path, "not a readable index of shards"):
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
        stored = {info.relative_path: 0 for info in index.storage_data.values()}
        for info in index.storage_data.values():
            stored[info.relative_path] = max(stored[info.relative_path], info.offset + info.length)
        sizes = [about.size.numel() * about.properties.dtype.itemsize for about in index.state_dict_metadata.values()]
    for name, num_bytes in stored.items():
        shard = folder / name
        if Path(name).name != name or not shard.is_file() or shard.stat().st_size < num_bytes:
            raise CheckpointError(
                f"{folder}: its shard {name} is missing or incomplete. All ranks must write to one folder: with "
                f"several nodes, exp_manager.exp_dir has to be on a file system that they share."
            )
    if sum(sizes) > sum(stored.values()):
        raise CheckpointError(f"{folder}: its index describes {sum(sizes):,} bytes, its shards have fewer; refused.")
    return index
