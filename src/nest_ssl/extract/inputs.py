"""The input of an extraction: the utterances of a file, a folder, a list or a manifest, and batches of them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nest_ssl.audio import AudioError, audio_info
from nest_ssl.data.manifest.listing import NOT_AUDIO, Entry, file_version, list_entries
from nest_ssl.watchdog.system import SlowFiles

AUDIO_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".opus", ".mp3", ".m4a", ".aac", ".aiff", ".au", ".sph", ".webm"})
_LOOKED_AT_BYTES = 4096


@dataclass(frozen=True)
class Item:
    """One utterance: where it is, and what its manifest says about it."""

    path: str
    offset_s: float
    duration_s: float | None
    """None: to the end of the file."""
    key: str
    """Names its features: the same file and segment have the same key in every manifest, until the file is replaced."""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bad:
    """One utterance without features."""

    path: str
    reason: str


def list_items(source: Path) -> tuple[list[Item], list[Bad]]:
    """The utterances of an input in its order, and entries that cannot be read."""
    entries = [Entry(str(source))] if is_audio(source) else list_entries(source)
    items: list[Item] = []
    bad: list[Bad] = []
    for entry in entries:
        if entry.error is not None:
            bad.append(Bad(entry.path, entry.error))
        else:
            items.append(_item(entry))
    if not items and not bad:
        raise ValueError(f"{source}: contains no audio.")
    return items, bad


def is_audio(source: Path) -> bool:
    """Whether this is an audio file rather than a list or a manifest: by its name, or because it is not text."""
    suffix = source.suffix.lower()
    if not source.is_file() or suffix in NOT_AUDIO:
        return False
    if suffix in AUDIO_SUFFIXES:
        return True
    with source.open("rb") as file:
        head = file.read(_LOOKED_AT_BYTES)
    try:
        return "\0" in head.decode()
    except UnicodeDecodeError as error:
        return error.start < len(head) - 4  # otherwise the last character was cut in two


def _item(entry: Entry) -> Item:
    extra = {name: value for name, value in entry.item.items() if name not in ("duration", "offset")}
    offset_s, duration_s = entry.item.get("offset") or 0.0, entry.item.get("duration")
    path = os.path.abspath(entry.path)
    facts = f"{path}\0{offset_s}\0{duration_s}\0{file_version(path)}"
    digest = hashlib.sha256(facts.encode(errors="surrogateescape"))
    stem = re.sub(r"[^\w.-]+", "_", Path(path).stem, flags=re.ASCII)[:80]
    return Item(path, offset_s, duration_s, f"{digest.hexdigest()[:16]}-{stem}", extra)


def measured(
    items: list[Item], pool: Executor, max_duration_s: float, slow: SlowFiles
) -> tuple[list[tuple[float, Item]], list[Bad]]:
    """(seconds, utterance), longest first, from headers where the manifest has no duration; and those left out."""
    known: list[tuple[float, Item]] = []
    bad: list[Bad] = []
    for item, duration_s in zip(items, pool.map(lambda item: _duration(item, slow), items), strict=True):
        if isinstance(duration_s, AudioError):
            bad.append(Bad(item.path, duration_s.reason))
        elif duration_s > max_duration_s:
            reason = f"{duration_s:.1f} s, longer than the limit of {max_duration_s:g} s; cut it with offset, duration"
            bad.append(Bad(item.path, reason))
        else:
            known.append((duration_s, item))
    known.sort(key=lambda pair: -pair[0])  # the largest batch comes first: out of memory shows at once
    return known, bad


def _duration(item: Item, slow: SlowFiles) -> float | AudioError:
    if item.duration_s is not None:
        return item.duration_s
    try:
        with slow.reading(item.path):
            return audio_info(item.path).duration_s - item.offset_s
    except AudioError as error:
        return error


def batches(items: Iterable[tuple[float, Item]], max_batch_s: float) -> list[list[Item]]:
    """Batches of similar length: at most `max_batch_s` seconds with padding, and at least one utterance."""
    out: list[list[Item]] = []
    longest_s = 0.0
    for duration_s, item in items:
        if out and longest_s * (len(out[-1]) + 1) <= max_batch_s:
            out[-1].append(item)
        else:
            out.append([item])
            longest_s = duration_s
    return out


def unique(items: list[Item]) -> list[Item]:
    """One item per key: lines with the same audio share their features."""
    return list({item.key: replace(item, extra={}) for item in items}.values())
