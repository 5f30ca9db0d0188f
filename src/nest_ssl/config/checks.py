"""Small checks that config dataclasses share; each error names the key, the value and what is accepted."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection
from datetime import timedelta
from typing import Any, NoReturn


def at_least(key: str, value: float, least: float) -> None:
    finite(key, value)
    if value < least:
        raise ValueError(f"{key}: {value} is less than {least}.")


def finite(key: str, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{key}: {value} is not a finite number.")


def probability(key: str, value: float, *, below_one: bool = False) -> None:
    if not 0 <= value <= 1 or (below_one and value == 1):
        raise ValueError(f"{key}: {value} is not a probability{' below 1' if below_one else ''}.")


def one_of(key: str, value: object, accepted: Collection[object]) -> None:
    if value not in accepted:
        raise ValueError(f"{key}: {value!r} is not one of {', '.join(map(repr, accepted))}.")


def known_name(key: str, value: str, known: Collection[str]) -> None:
    """Like `one_of`, for longer lists: the message suggests the nearest known name."""
    if value not in known:
        by_lower = {name.lower(): name for name in known}
        near = difflib.get_close_matches(value.lower(), by_lower, n=1, cutoff=0.5)
        hint = f" Did you mean '{by_lower[near[0]]}'?" if near else ""
        raise ValueError(f"{key}: there is no '{value}'.{hint} Known: {', '.join(known)}.")


def not_supported(key: str, value: object, way_out: str) -> NoReturn:
    """Refuse a value that only NeMo supports; docs/alignment.md lists them all."""
    raise ValueError(f"{key}: {value!r} exists in NeMo but not in nest-ssl; {way_out}.")


def duration_s(key: str, value: str | dict[str, Any]) -> float:
    """Return the seconds in DD:HH:MM:SS, or in a mapping such as {hours: 2}."""
    if isinstance(value, str):
        if not re.fullmatch(r"\d+:\d+:\d+:\d+", value):
            raise ValueError(f"{key}: {value!r} is not of the form DD:HH:MM:SS.")
        days, hours, minutes, seconds = (int(part) for part in value.split(":"))
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
    try:
        return timedelta(**value).total_seconds()
    except TypeError as error:
        raise ValueError(f"{key}: {value!r} has keys other than weeks, days, hours, minutes and seconds.") from error
