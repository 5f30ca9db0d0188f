"""The record of a long measuring run: good and bad lines on disk, and how many of them are valid, so it can resume.

While M.jsonl is being made, `M.jsonl.partial`, `M.bad.jsonl.partial` and `M.jsonl.state` are next to it. The state is
written after the lines it describes have reached the disk; a resumed run cuts off any lines beyond it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from nest_ssl.data.manifest.listing import Entry, file_version
from nest_ssl.files import remove_left_over, replacing
from nest_ssl.prepare.measure import Measured

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 2.0


@dataclass
class Progress:
    """How far the work has come."""

    num_good: int = 0
    num_bad: int = 0
    duration_s: float = 0.0
    good_bytes: int = 0
    bad_bytes: int = 0
    paths_hash: str = ""
    """Hash of the entries done, in order, with sizes and times: shows whether the input is still the same."""
    all_measured: bool = False
    complete: bool = False
    """All files have their final names."""

    @property
    def num_done(self) -> int:
        return self.num_good + self.num_bad


def bad_path(manifest: Path) -> Path:
    """M.jsonl -> M.bad.jsonl"""
    return manifest.with_name(f"{manifest.stem}.bad{manifest.suffix}")


class Ledger:
    """Writes the results of measuring, in the order of the input."""

    def __init__(
        self, manifest: Path, settings: dict[str, Any], *, restart: bool = False, may_be_empty: bool = False
    ) -> None:
        self.manifest, self._may_be_empty = manifest, may_be_empty
        self._settings = settings
        self._state = manifest.with_name(f"{manifest.name}.state")
        self._finals = (manifest, bad_path(manifest))
        self._partials = tuple(path.with_name(f"{path.name}.partial") for path in self._finals)
        for path in self._finals:
            if path.exists() and not path.is_file():
                raise ValueError(f"{path}: is not a file. Give the manifest to write, for example {path}/train.jsonl.")
        manifest.parent.mkdir(parents=True, exist_ok=True)
        remove_left_over(self._state)
        self.progress = Progress() if restart else self._load()
        self._hash = hashlib.sha256()
        self._saved_at = time.monotonic()

    def skip_done(self, list_entries: Callable[[], Iterator[Entry]]) -> Iterator[Entry]:
        """Return the entries that are left; all of them if the input no longer starts with those done."""
        entries = list_entries()
        for entry in islice(entries, self.progress.num_done):
            self._hash.update(_hashed(entry.path))
        if self.progress.num_done and self._hash.hexdigest() != self.progress.paths_hash:
            logger.warning("%s: the input has changed since the last run; measuring from the start", self.manifest)
            self.progress, self._hash, entries = Progress(), hashlib.sha256(), list_entries()
        return entries

    def is_current(self, list_entries: Callable[[], Iterator[Entry]]) -> bool:
        """Tell whether everything is done and no file was added, removed or replaced since; else start again."""
        if not self.progress.complete:
            return False
        if hash_of(list_entries()) == self.progress.paths_hash:
            return True
        logger.warning(
            "%s: files were added, removed or replaced since it was made; measuring from the start", self.manifest
        )
        self.progress = Progress()
        return False

    def record(
        self, results: Iterator[Measured], line: Callable[[Measured], bytes], report: Callable[[], None]
    ) -> None:
        """Write every result, and the state every 2 seconds."""
        progress = self.progress
        with open(self._partials[0], "ab") as good, open(self._partials[1], "ab") as bad:
            good.truncate(progress.good_bytes)
            bad.truncate(progress.bad_bytes)
            for result in results:
                text = line(result)
                if result.line is None:
                    bad.write(text)
                    progress.num_bad, progress.bad_bytes = progress.num_bad + 1, progress.bad_bytes + len(text)
                else:
                    good.write(text)
                    progress.num_good, progress.good_bytes = progress.num_good + 1, progress.good_bytes + len(text)
                    progress.duration_s += result.line["duration"]
                self._hash.update(_hashed(result.path))
                report()
                if time.monotonic() - self._saved_at > SAVE_EVERY_S:
                    self._save(good, bad)
            progress.all_measured = True
            self._save(good, bad)
        self.finish()

    def _save(self, *files: BinaryIO) -> None:
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        self.progress.paths_hash = self._hash.hexdigest()
        self.save_state()
        self._saved_at = time.monotonic()

    def save_state(self) -> None:
        state = {"settings": self._settings, "progress": asdict(self.progress)}
        with replacing(self._state) as file:
            file.write(json.dumps(state, indent=1).encode() + b"\n")

    def _load(self) -> Progress:
        """Return the progress of an earlier run with the same settings; none: from the start."""
        try:
            state = json.loads(self._state.read_bytes())
            settings, progress = state["settings"], Progress(**state["progress"])
            if any(type(value) is not type(getattr(Progress, name)) for name, value in asdict(progress).items()):
                raise ValueError("a value of another type")
        except FileNotFoundError:
            if self.manifest.exists():
                raise ValueError(
                    f"{self.manifest}: exists, and 'prepare' has not written it: there is no {self._state.name}. Give "
                    "--restart to replace it, or give another output."
                ) from None
            return Progress()
        except (ValueError, KeyError, TypeError, RecursionError):
            logger.warning("%s: is damaged; measuring from the start", self._state)
            return Progress()
        if settings != self._settings:
            logger.warning("%s: made with other settings; measuring from the start", self.manifest)
            return Progress()
        if progress.complete:
            if not all(path.exists() for path in self._finals):
                return Progress()
            if progress.good_bytes not in (0, size := self.manifest.stat().st_size):  # 0: of jobs of earlier versions
                raise ValueError(
                    f"{self.manifest}: was changed since it was made ({size:,} bytes, then {progress.good_bytes:,}). "
                    "Give --restart to measure everything again and replace it, or give another output."
                )
            return progress
        self.progress = progress
        if progress.all_measured:
            self.finish()
            return progress
        sizes = (progress.good_bytes, progress.bad_bytes)
        intact = all(p.exists() and p.stat().st_size >= size for p, size in zip(self._partials, sizes, strict=True))
        return progress if intact else Progress()

    def finish(self) -> None:
        """Rename to the final names; a run killed between two renames repeats the one that is left.

        Without a single good file an older manifest is kept: perhaps a disk is not mounted.
        """
        if self.progress.num_bad and not self.progress.num_good and not self._may_be_empty:
            self._partials[0].unlink(missing_ok=True)
            num_bad, self.progress = self.progress.num_bad, Progress()
            if self.manifest.exists():  # of an earlier run; the next one may replace it
                self.save_state()
            else:
                self._state.unlink(missing_ok=True)
            os.replace(self._partials[1], self._finals[1])
            with open(self._finals[1], "rb") as bad:
                first = json.loads(bad.readline())
            raise ValueError(
                f"{self._settings['input']}: contains no usable audio: {first['audio_filepath']}: {first['reason']}. "
                f"{self._finals[1]} has all {num_bad:,} reasons; {self.manifest} is not written."
            )
        for partial, final in zip(self._partials, self._finals, strict=True):
            if partial.exists():
                os.replace(partial, final)
        self.progress.complete = True
        self.progress.good_bytes, self.progress.bad_bytes = (path.stat().st_size for path in self._finals)
        self.save_state()


def hash_of(entries: Iterator[Entry]) -> str:
    """Return `Progress.paths_hash` of a whole input."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(_hashed(entry.path))
    return digest.hexdigest()


def _hashed(path: str) -> bytes:
    return f"{path}\0{file_version(path)}\0".encode(errors="surrogateescape")
