"""Small checks that config dataclasses share; each error names the key, the value and what is accepted.

A numeric field declares its range in its type: `lr: Annotated[float, Range(0, 1e6)]`, or with one of the names below.
`check_ranges` checks them all, so that no number is accepted unseen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import logging
import math
import os
import re
import typing
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, NoReturn


@dataclass(frozen=True)
class Range:
    """The numbers that a field accepts: finite, from `least` to `most`, both included unless said otherwise."""

    least: float = -1e12
    most: float = 1e12
    above: bool = False
    """`least` itself is refused."""
    below: bool = False
    """`most` itself is refused."""
    what: str = ""
    """What the number is, for messages: 'a probability'."""
    advice: str = ""
    """The way out: 'Use null for no limit.'"""

    def check(self, key: str, value: float) -> None:
        """Refuse a number outside the range, with its key and the way out."""
        problem = self._problem(value)
        if problem:
            raise ValueError(f"{key}: {short(value)} {problem}.{self.advice and ' '}{self.advice}")

    def _problem(self, value: float) -> str:
        too_low = value < self.least or (self.above and value == self.least)
        too_high = value > self.most or (self.below and value == self.most)
        if self.what and (too_low or too_high or value != value):
            return f"is not {self.what}"
        if isinstance(value, float) and not math.isfinite(value):
            return "is not a finite number"
        if too_low:
            return f"is not greater than {self.least:g}" if self.above else f"is less than {self.least:g}"
        if too_high:
            return f"is not below {self.most:g}" if self.below else f"is more than {self.most:.12g}"
        return ""


@contextlib.contextmanager
def named_section(section: str, config: Any) -> Iterator[None]:
    """Give errors that begin with a key of the dataclass `config` the key's full name."""
    try:
        yield
    except ValueError as error:
        key = str(error).partition(":")[0]
        if type(error) is ValueError and key in {field.name for field in dataclasses.fields(config)}:
            raise ValueError(f"{section}.{error}") from error
        raise


Positive = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
Size = Annotated[int, Range(1, 1_000_000)]
"""A dimension of a weight: more than a million is a typing error or a damaged file, and would exhaust memory."""
Seed = Annotated[int, Range(0, 2**32 - 1)]
Share = Annotated[float, Range(0, 1, what="a probability")]
ShareBelowOne = Annotated[float, Range(0, 1, below=True, what="a probability below 1")]
Finite = Annotated[float, Range()]
NotNegative = Annotated[float, Range(0)]
AboveZero = Annotated[float, Range(0, above=True)]


def check_ranges(where: str, config: Any) -> None:
    """Check every numeric field of a dataclass against the range that its type declares; `where` is its section."""
    for name, limits in ranges_of(type(config)).items():
        key = f"{where}.{name}" if where else name
        for value in numbers_in(getattr(config, name)):
            if isinstance(value, bool):
                if not limits.takes_bool:
                    raise ValueError(f"{key}: expected a number, got {str(value).lower()}.")
            else:
                limits.range.check(key, value)


@dataclass(frozen=True)
class FieldRange:
    """The range of one field, and whether the field is also a switch."""

    range: Range
    takes_bool: bool


_RANGES: dict[type[Any], dict[str, FieldRange]] = {}


def ranges_of(schema: type[Any]) -> dict[str, FieldRange]:
    """Return the range of every field that declares one."""
    if schema not in _RANGES:
        _RANGES[schema] = _declared_ranges(schema)
    return _RANGES[schema]


def _declared_ranges(schema: type[Any]) -> dict[str, FieldRange]:
    hints = typing.get_type_hints(schema, include_extras=True)
    found = {}
    for one in dataclasses.fields(schema):
        parts = list(_parts(hints[one.name]))
        ranges = [part for part in parts if isinstance(part, Range)]
        if ranges:
            found[one.name] = FieldRange(ranges[0], takes_bool=bool in parts)
    return found


def _parts(hint: Any) -> Iterator[Any]:
    """Yield every type and every range in a type hint."""
    yield hint
    if typing.get_origin(hint) is Annotated:
        yield from hint.__metadata__
        yield from _parts(hint.__origin__)
    else:
        for part in typing.get_args(hint):
            yield from _parts(part)


def numbers_in(value: Any) -> Iterator[Any]:
    """Yield the numbers and booleans in a value, a list or a list of lists."""
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from numbers_in(one)


def short(value: object) -> str:
    """Return a value as text for a message; a number of 400 digits would hide the rest."""
    try:
        text = str(value)
    except ValueError:  # Python refuses to print an integer of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text)} characters)"


def as_override(key: str, value: object) -> str:
    """Return `key=value` in the form that Hydra reads; in a shell it may need quotes of its own."""
    is_plain = re.fullmatch(r"[\w./:@~+-]+", str(value)) is not None
    return f"{key}={value if is_plain else repr(str(value))}"


def quoted(value: object) -> str:
    """Return a value for a message as Python writes it: with quotes, on one line."""
    try:
        return short(repr(value))
    except ValueError:
        return short(value)


def one_of(key: str, value: object, accepted: Collection[object]) -> None:
    if value not in accepted:
        raise ValueError(f"{key}: {quoted(value)} is not one of {', '.join(map(repr, accepted))}.")


def known_name(key: str, value: str, known: Collection[str]) -> None:
    """Like `one_of`, for longer lists: the message suggests the nearest known name."""
    if value not in known:
        by_lower = {name.lower(): name for name in known}
        near = difflib.get_close_matches(value.lower(), by_lower, n=1, cutoff=0.5)
        hint = f" Did you mean '{by_lower[near[0]]}'?" if near else ""
        raise ValueError(f"{key}: there is no {quoted(value)}.{hint} Known: {', '.join(known) or 'none'}.")


def not_supported(key: str, value: object, way_out: str) -> NoReturn:
    """Refuse a value that only NeMo supports; docs/alignment.md lists them all."""
    raise ValueError(f"{key}: {quoted(value)} exists in NeMo but not in nest-ssl; {way_out}.")


_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Control characters but tab and newline, marks that reverse the direction of text, halves of surrogate pairs, and
what XML does not allow."""
_ENDLESS = re.compile(r"(\S{200})\S{4000,}")
"""A word longer than any path: nobody reads it, and it hides the rest."""


def printable(text: str) -> str:
    """Return text for a terminal or a log: what could move its cursor, recolour it or hide words is written out.

    Names come from files, manifests and models that others made.
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def shortened(text: str) -> str:
    """Return `printable` text of which no word is longer than any path; not for pages, which contain pictures."""
    return printable(_ENDLESS.sub(lambda found: f"{found[1]}… ({len(found[0])} characters)", text))


class PlainFormatter(logging.Formatter):
    """Formats records for a terminal or a log file, without escape codes from names."""

    def format(self, record: logging.LogRecord) -> str:
        return shortened(super().format(record))


def log_to_terminal(level: int) -> None:
    """Print the messages of all loggers, by themselves; a program that has handlers already keeps them."""
    logging.basicConfig(level=level, format="%(message)s")
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setFormatter(PlainFormatter("%(message)s"))


MOST_NAME_BYTES = 150
"""A file system takes 255 bytes; names of checkpoints add metrics, and those being written more."""
_UNWRITABLE = re.compile("[\x00-\x1f\ud800-\udfff]")
"""Control characters, and halves of surrogate pairs, which cannot be encoded."""


def stays_inside(key: str, name: str | None) -> None:
    """Refuse a name that would leave the folder it is for, or that no file system takes."""
    if name is None:
        return
    parts = re.split(r"[/\\\\]", name)
    if not name.strip(".") or ".." in parts or name.startswith(("/", "~")) or _UNWRITABLE.search(name):
        raise ValueError(
            f"{key}: {quoted(name)} is not a name inside the run's folder. Use letters, digits, '-' and '_'."
        )
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        raise ValueError(f"{key}: {quoted(name)}: the locale has no such letters. Set PYTHONUTF8=1.") from error
    if any(len(part.encode(errors="replace")) > MOST_NAME_BYTES for part in parts):
        raise ValueError(f"{key}: {short(name)} is longer than {MOST_NAME_BYTES} bytes, too long for names of files.")


REMOTE = re.compile(r"(?!file:)[a-z][a-z0-9+.-]{1,9}:/{1,2}\w", re.IGNORECASE)


def local_paths(key: str, paths: Any) -> None:
    """Refuse addresses such as s3://… and https://…: they would only be missing files."""
    for path in [paths] if isinstance(paths, str) else paths or []:
        if isinstance(path, list):
            local_paths(key, path)
        elif isinstance(path, str) and REMOTE.match(path):
            raise ValueError(
                f"{key}: {short(path)}: nest-ssl reads local files only. "
                f"Download it, or mount the bucket, and give the path."
            )


def plain_path(key: str, path: str | None) -> None:
    """Refuse `~name/…` where there is no user of that name, and variables that no shell has replaced or known."""
    if path == "":
        raise ValueError(f"{key}: is empty. Give a path, or null for none.")
    if path is not None and re.match(r"\$\w|%\w+%|\w+://", path):
        raise ValueError(f"{key}: {quoted(path)} is not a path. Write out what it stands for, or ${{oc.env:NAME}}.")
    if path is not None and path.startswith("~") and os.path.expanduser(path) == path:
        raise ValueError(f"{key}: {quoted(path)}: there is no such user. Write ./~… for a folder of that name.")


def duration_s(key: str, value: str | dict[str, Any]) -> float:
    """Return the seconds in DD:HH:MM:SS, or in a mapping such as {hours: 2}."""
    if isinstance(value, str):
        if not re.fullmatch(r"\d{1,9}(:\d{1,9}){3}", value, re.ASCII):
            raise ValueError(f"{key}: {quoted(value)} is not of the form DD:HH:MM:SS.")
        parts = (int(part) for part in value.split(":"))
        return duration_s(key, dict(zip(("days", "hours", "minutes", "seconds"), parts, strict=True)))
    accepted = ("weeks", "days", "hours", "minutes", "seconds")
    if not value or not value.keys() <= set(accepted):
        raise ValueError(f"{key}: {quoted(value)} has keys other than weeks, days, hours, minutes and seconds.")
    try:
        total_s = timedelta(**value).total_seconds()
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{key}: {short(value)} is not a duration: {error}.") from error
    if total_s < 0:
        raise ValueError(f"{key}: {quoted(value)} is less than 0 seconds.")
    return total_s
