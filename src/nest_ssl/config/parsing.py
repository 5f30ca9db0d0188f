"""Turn plain mappings into checked dataclasses; every error says where, what, and the way out."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import dacite
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nest_ssl.config.checks import quoted
from nest_ssl.config.targets import resolve_target

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_DEPTH = 100
"""Levels of sections and lists. The schema has 5; a hostile file could have more than Python's stack."""

MISSING = "???"
"""A yaml's placeholder for a value that the user must give."""


class ConfigError(ValueError):
    """An invalid configuration; the message names the key and what to do."""


def plain(config: Any, where: str = "", depth: int = 0) -> Any:
    """Turn OmegaConf nodes and dataclasses into dicts, lists and scalars, with interpolations resolved."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{where or 'config'}: more than {MAX_DEPTH} levels of lists and sections.")
    if isinstance(config, (DictConfig, ListConfig)):
        try:
            config = OmegaConf.to_container(config, resolve=True)
        except (OmegaConfBaseException, RecursionError) as error:
            raise ConfigError(one_line(error)) from error
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    if isinstance(config, Mapping):
        return {key: plain(value, f"{where}.{key}" if where else str(key), depth + 1) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [plain(value, where, depth + 1) for value in config]
    return config


def read_yaml(path: str | Path) -> Any:
    """Return the content of a yaml file, with interpolations resolved."""
    try:
        return plain(OmegaConf.load(path))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a readable yaml file: {one_line(error)}") from error


def parse(
    schema: type[T],
    config: Any,
    where: str = "",
    unused: Mapping[str, str] | None = None,
    report_level: int = logging.INFO,
) -> T:
    """Return `config` (a mapping, DictConfig or dataclass) as an instance of the dataclass `schema`.

    `where` is the key of `config` in the yaml, for messages. `unused` maps dotted keys that NeMo has and
    NEST does not use to the reason; they are dropped and logged in one line.
    """
    data = plain(config, where)
    if not isinstance(data, dict):
        raise ConfigError(f"{where or 'config'}: expected a mapping of keys, got {quoted(data)}.")
    dropped: list[str] = []
    data = _checked(schema, data, where, unused or {}, dropped)
    if dropped:
        log.log(report_level, "ignored NeMo config keys that NEST does not use: %s", ", ".join(sorted(dropped)))
    return _built(schema, data, where)


def check_sections(schema: type[Any], data: Mapping[Any, Any], where: str = "") -> None:
    """Refuse what is no section in place of one, and a section in place of a list; Hydra would not say where it is."""
    hints = typing.get_type_hints(schema)
    for key, value in data.items():
        hint, path = hints.get(key), f"{where}.{key}" if where else str(key)
        nested = _dataclass_in(hint)
        if nested is not None and isinstance(value, Mapping):
            check_sections(nested, value, path)
            continue
        is_given = value is not None or type(None) not in _alternatives(hint)
        is_reference = isinstance(value, str) and ("${" in value or value == MISSING)
        if is_given and not is_reference if nested else isinstance(value, Mapping) and _takes_only_lists(hint):
            raise ConfigError(f"{path}: expected {_in_words(hint)}, got {quoted(value)}.")


def _built(schema: type[T], data: dict[str, Any], where: str) -> T:
    """Return `data` as a `schema`, its sections first; the sections' own messages get the whole key."""
    hints = typing.get_type_hints(schema)
    try:
        values = dict(data)
        for key, value in data.items():
            nested = _dataclass_in(hints[key])
            if nested is not None and isinstance(value, dict):
                values[key] = _built(nested, value, f"{where}.{key}" if where else key)
            elif value is not None and not isinstance(value, list) and _takes_only_lists(hints[key]):
                # dacite would take a mapping, a text or bytes apart
                raise dacite.WrongTypeError(hints[key], value, key)
        return dacite.from_dict(schema, values, dacite.Config(type_hooks={float: _as_float}))
    except dacite.WrongTypeError as error:
        key = ".".join(filter(None, (where, error.field_path)))
        is_bare = str in _alternatives(error.field_type) and isinstance(error.value, int | float)
        hint = " Text that looks like a number or a switch needs quotes." if is_bare else ""
        raise ConfigError(f"{key}: expected {_in_words(error.field_type)}, got {quoted(error.value)}.{hint}") from None
    except dacite.MissingValueError as error:
        key = ".".join(filter(None, (where, error.field_path)))
        raise ConfigError(f"{key}: a value is needed.") from None
    except ValueError as error:
        raise ConfigError(_with_whole_key(str(error), where, hints)) from error


def _with_whole_key(message: str, where: str, fields: Collection[str]) -> str:
    """Return a section's message with the key from the root on.

    A section writes 'batch_size: …', 'masking.block_size: …' or the whole key: it does not know where it stands.
    """
    parts = where.split(".") if where else []
    key = re.match(r"[\w.]*", message)[0].split(".")  # type: ignore[index]
    for place in range(len(parts)):
        if key[: len(parts) - place] == parts[place:]:
            return ".".join([*parts[:place], message])
    return f"{where}.{message}" if parts and key[0] in fields else message


def _as_float(value: Any) -> Any:
    # yaml 1.1 reads `1e-3` as text, and `1` as an int where a float is meant.
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e300 else value
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _checked(
    schema: type[Any], data: dict[str, Any], where: str, unused: Mapping[str, str], dropped: list[str]
) -> dict[str, Any]:
    """Return `data` without its `_target_` (checked) and unused keys; an unknown key is an error."""
    hints = typing.get_type_hints(schema)
    if hasattr(schema, "rearranged"):
        try:
            data = schema.rearranged(data)
        except ValueError as error:
            raise ConfigError(_with_whole_key(str(error), where, hints)) from error
    known = {f.name for f in dataclasses.fields(schema) if f.init}
    out: dict[str, Any] = {}
    for key, value in data.items():
        path = f"{where}.{key}" if where else str(key)
        if key == "_target_" and key not in known:
            resolve_target(value, path)
        elif path in unused:
            if value not in (None, False):
                dropped.append(path)
        elif key not in known:
            sections = {name: one for name, hint in hints.items() if (one := _dataclass_in(hint)) is not None}
            inside = [f"{name}.{key}" for name, one in sections.items() if key in typing.get_type_hints(one)]
            raise ConfigError(unknown_key_message(path, known, inside))
        else:
            nested = _dataclass_in(hints[key])
            if nested is not None and isinstance(value, dict):
                value = _checked(nested, value, path, unused, dropped)
            elif any("\0" in text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)):
                raise ConfigError(f"{path}: {quoted(value)} contains NUL, which no name or path has.")
            out[key] = value
    return out


def unknown_key_message(path: str, known: set[str], inside: Sequence[str] = ()) -> str:
    """Return the refusal of the key `path`; `inside` is where sections at its level have a key of its name."""
    parent, _, key = path.rpartition(".")
    near = inside or difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.5)
    if near:
        return f"{path}: no such key. Did you mean '{f'{parent}.' if parent else ''}{near[0]}'?"
    return f"{path}: no such key. Known here: {', '.join(sorted(known))}."


def _dataclass_in(hint: Any) -> type[Any] | None:
    """Return the dataclass in a field's type, also from `X | None`."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hint
    found = [kind for kind in _alternatives(hint) if dataclasses.is_dataclass(kind)]
    return found[0] if len(found) == 1 and isinstance(found[0], type) else None


def _takes_only_lists(hint: Any) -> bool:
    """Tell whether a field takes a list, perhaps null, and nothing else."""
    return {typing.get_origin(kind) for kind in _alternatives(hint) if kind is not type(None)} == {list}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _in_words(hint: Any) -> str:
    """`int | list[int] | None`"""
    shown = (
        str(kind) if typing.get_args(kind) else getattr(kind, "__name__", str(kind)) for kind in _alternatives(hint)
    )
    return re.sub(r"\w+Config\b", "a mapping of keys", " | ".join(shown).replace("NoneType", "None"))


def one_line(error: Exception, most: int = 600) -> str:
    """Return an error's message as one line; Hydra's may contain a whole section."""
    text = " ".join(str(error).split())
    return text if len(text) <= most else f"{text[:most]}…"
