"""Values for every key of the configuration, drawn from its schema: good ones, edges, and what people and disks make.

Words come from where the schema documents them: the strings after a field.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import inspect
import itertools
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from hypothesis import strategies as st

from nest_ssl.config.checks import Range


@dataclass(frozen=True)
class Key:
    """One key of the configuration: a value or a whole section."""

    path: str
    hint: Any
    words: tuple[str, ...]
    """What the schema's documentation of the key mentions."""


def keys_of(schema: type[Any], where: str = "") -> Iterator[Key]:
    """Yield every key below a dataclass, sections before their contents."""
    hints = typing.get_type_hints(schema, include_extras=True)
    words = _documented_words(schema)
    for one in dataclasses.fields(schema):
        path = f"{where}.{one.name}" if where else one.name
        yield Key(path, hints[one.name], (*words.get(one.name, ()), *_default_word(one)))
        for section in filter(_is_section, _alternatives(hints[one.name])):
            yield from keys_of(section, path)


def _default_word(one: dataclasses.Field[Any]) -> tuple[str, ...]:
    return (one.default,) if isinstance(one.default, str) else ()


def _documented_words(schema: type[Any]) -> dict[str, tuple[str, ...]]:
    """Return the words in the string that follows each field."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(schema)).body if isinstance(node, ast.ClassDef))
    found: dict[str, tuple[str, ...]] = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = tuple(re.findall(r"[\w-]+", ast.literal_eval(text.value)))
    return found


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _alternatives(hint: Any) -> Iterator[Any]:
    """Yield the types that a union is made of."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for one in typing.get_args(hint):
            yield from _alternatives(one)
    else:
        yield hint


# ---- values that a key documents ----


def good(key: Key) -> st.SearchStrategy[Any]:
    """Draw values of the key's type, within its range or at its edges; most are accepted."""
    return st.one_of([_of_type(hint, key.words) for hint in _alternatives(key.hint)])


def _of_type(hint: Any, words: tuple[str, ...]) -> st.SearchStrategy[Any]:
    if typing.get_origin(hint) is Annotated:
        limits = next(one for one in hint.__metadata__ if isinstance(one, Range))
        return st.one_of([_numbers(kind, limits) for kind in _alternatives(hint.__origin__)])
    if hint in (str, Any):
        return st.sampled_from(words or ("x",)) | st.sampled_from(["x", "a/b.jsonl", "00:00:01:00", "{epoch}-{step}"])
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(-2, 100)
    if hint in (None, type(None)):
        return st.none()
    if typing.get_origin(hint) is list:
        return st.lists(
            st.one_of([_of_type(one, words) for one in _alternatives(typing.get_args(hint)[0])]), max_size=3
        )
    if hint is dict or typing.get_origin(hint) is dict:
        units = st.sampled_from(["_target_", "seconds", "days", "name", "x", *words])
        return st.dictionaries(units, st.integers(0, 9) | st.sampled_from(TARGETS), max_size=2)
    assert _is_section(hint), hint
    return st.just({})


TARGETS = ("lightning.pytorch.strategies.DDPStrategy", "nest_ssl.data.SpeakerNoiseAugmentation")


def _numbers(kind: Any, limits: Range) -> st.SearchStrategy[Any]:
    if kind is bool:
        return st.booleans()
    if kind is int:
        lowest, highest = math.ceil(limits.least), math.floor(limits.most)
        near_lowest = st.integers(max(lowest, -9), min(highest, max(lowest, -9) + 70))
        return near_lowest | st.sampled_from([lowest, highest, 2**4, 2**6])
    low, high = limits.least, limits.most
    usual = st.floats(max(low, -10.0), min(high, 100.0), exclude_min=limits.above and low > -10.0)
    return usual | st.sampled_from([low, high, math.nextafter(low, high), math.nextafter(high, low), 1, "1e-3"])


# ---- and all others ----

ODD_TEXTS = [
    *(
        "",
        " ",
        "a\nb",
        "a\0b",
        "\ud800",
        "\x1b[2J",
        "é" * 200,
        "x" * 3000,
        "../x",
        "~no-such-user/x",
        "/",
        "a,b",
        "1",
        "٣",
    ),
    *("nan", "inf", "1e400", "9" * 5000, "0x10", "-1", "???", "null", "true", "9:9:9:9", "group_norm" + "9" * 5000),
    *("${name}", "${", "${x}", "${oc.env:NOBODY}", "${model}", "${.}", "{epoch:9999999999d}", "{x!r}", "{epoch:%Y}"),
    *("s3://bucket/x", "m_{0..99999999}.jsonl", "_OP_0..9_CL_", "group_norm0", "causal", "bf16-true", "fsdp", "auto"),
]
ODD_NUMBERS = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e300, 1e12, 0, -1, 2**31, 2**63, -(2**64), 10**400, True]


@dataclass(frozen=True)
class Nested:
    """Stands for a list in a list in a list …: hypothesis could not print one of 3000."""

    depth: int


def _spelled_out(value: Any) -> Any:
    if not isinstance(value, Nested):
        return value
    lists: list[Any] = []
    for _ in range(value.depth):
        lists = [lists]
    return lists


odd: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, [], {}, [[]], [None], [[None]], [1, [2]], [math.nan, "a"], {"": 1}, {"a": {"b": []}}]),
    st.sampled_from(ODD_NUMBERS),
    st.sampled_from(ODD_TEXTS),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.sampled_from([*ODD_NUMBERS, *ODD_TEXTS]) | st.integers(-2, 9), max_size=4),
    st.dictionaries(
        st.sampled_from(["_target_", "options", "days", "name", "1", ""]), st.integers() | st.text(max_size=4)
    ),
    st.sampled_from([{1: 2}, {None: 1}, {"days": 10**400}, {"_target_": None}, Nested(50), Nested(3000)]),
    st.sampled_from([datetime.date(2001, 9, 9), b"\xff", {1, 2}]),  # yaml has them
)


def near_edges(key: Key) -> st.SearchStrategy[Any]:
    """Draw numbers at and just outside the key's range."""
    ranges = [one for one in _ranges_in(key.hint) if math.isfinite(one.least)]
    if not ranges:
        return odd
    edges = [edge + step for one in ranges for edge in (one.least, one.most) for step in (-1, -1e-9, 0, 1e-9, 1)]
    return st.sampled_from([*edges, *(int(edge) for edge in edges)])


def _ranges_in(hint: Any) -> Iterator[Range]:
    if typing.get_origin(hint) is Annotated:
        yield from (one for one in hint.__metadata__ if isinstance(one, Range))
    for one in typing.get_args(hint):
        yield from _ranges_in(one)


def any_value(key: Key) -> st.SearchStrategy[Any]:
    return good(key) | near_edges(key) | odd


def changes(
    keys: list[Key], values: Callable[[Key], st.SearchStrategy[Any]], most: int = 3
) -> st.SearchStrategy[dict[str, Any]]:
    """Draw the paths of a few keys, each with a value from `values(key)`."""
    one = st.sampled_from(keys).flatmap(lambda key: st.tuples(st.just(key.path), values(key)))
    return st.lists(one, min_size=1, max_size=most).map(dict)


def changed(config: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with other values; sections on the way that are none are made."""
    for path, value in values.items():
        config = _changed(config, path.split("."), value)
    return config


def _changed(config: Any, parts: list[str], value: Any) -> dict[str, Any]:
    section = dict(config) if isinstance(config, dict) else {}
    section[parts[0]] = _spelled_out(value) if len(parts) == 1 else _changed(section.get(parts[0]), parts[1:], value)
    return section


def hydra_text(value: Any) -> str:
    """Return a value as one writes it on the command line."""
    if isinstance(value, Nested):
        return "[" * value.depth + "]" * value.depth
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list):
        return f"[{','.join(map(hydra_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{hydra_text(key)}:{hydra_text(one)}' for key, one in value.items())}}}"
    if isinstance(value, int) and abs(value) >= 10 ** sys.get_int_max_str_digits():
        return "9" * 5000
    return repr(value)
