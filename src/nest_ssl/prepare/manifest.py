"""From a folder, list or manifest to a measured manifest, its list of bad files, and a split into train and valid.

Everything streams: memory does not grow with the corpus. N jobs can share the work without communicating: job i
measures the entries n with n % N == i and numbers its lines; `merge_jobs` restores the order of the input.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from nest_ssl.data.manifest.index import open_index
from nest_ssl.data.manifest.lines import resolve_audio_path
from nest_ssl.data.manifest.listing import Entry, list_entries
from nest_ssl.prepare.ledger import Ledger, Progress, bad_path, hash_of
from nest_ssl.prepare.measure import Measured, measure_all

Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Job:
    """One of several jobs that share an input."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise ValueError(
                f"job {self.number}/{self.count}: numbers go from 0/{self.count} to {self.count - 1}/{self.count}."
            )

    @classmethod
    def parse(cls, text: str) -> Job:
        number, _, count = text.partition("/")
        if not number.isdigit() or not count.isdigit():
            raise ValueError(f"job {text!r}: give its number, counted from 0, and the number of jobs, such as 3/16.")
        return cls(int(number), int(count))


def prepare_manifest(
    source: Path,
    output: Path,
    *,
    decode: bool = True,
    num_workers: int = 0,
    job: Job | None = None,
    restart: bool = False,
    report: Report = lambda progress: None,
) -> Progress:
    """Measure everything that the input names (a job: its share); write the manifest and the list of bad files.

    A run that was killed resumes where it was; a complete one does nothing unless the input has changed or `restart`.
    """
    if job is not None and not restart:
        whole = _ledger(source, output, decode, None)
        if whole.is_current(lambda: list_entries(source)):  # merged already: the jobs' parts are gone
            return whole.progress
    ledger = _ledger(source, output, decode, job, restart)
    if ledger.is_current(lambda: _share(list_entries(source), job)):
        return ledger.progress
    entries = ledger.skip_done(lambda: _share(list_entries(source), job))
    results = measure_all(entries, decode=decode, num_workers=num_workers)
    ledger.record(results, partial(_line, ledger=ledger, output=output, job=job), lambda: report(ledger.progress))
    if job is None:
        open_index(os.fspath(output))
    return ledger.progress


def count_entries(source: Path, job: Job | None = None, most: int | None = None) -> int:
    """Count the entries of the input (a job: of its share), all of them or up to `most`."""
    return sum(1 for _ in islice(_share(list_entries(source), job), most))


def _share(entries: Iterator[Entry], job: Job | None) -> Iterator[Entry]:
    return entries if job is None else islice(entries, job.number, None, job.count)


def _ledger(source: Path, output: Path, decode: bool, job: Job | None, restart: bool = False) -> Ledger:
    settings = {"input": os.path.abspath(source), "output": os.path.abspath(output), "decode": decode}
    return Ledger(
        output if job is None else _job_path(output, job), settings, restart=restart, may_be_empty=job is not None
    )


def _job_path(output: Path, job: Job) -> Path:
    return output.parent / f"{output.stem}.jobs" / f"{job.number}-of-{job.count}.log"


def _line(result: Measured, *, ledger: Ledger, output: Path, job: Job | None) -> bytes:
    """Return one line of the manifest or of the bad list; a job's lines start with their number in the input."""
    path = _written_path(result.path, output)
    item = {"audio_filepath": path, "reason": result.reason} if result.line is None else result.line
    text = json.dumps(item | {"audio_filepath": path}, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
    return text if job is None else b"%d\t%s" % (job.number + ledger.progress.num_done * job.count, text)


def _written_path(path: str, output: Path) -> str:
    """Return a relative path if the file is below the manifest's folder, so that both can be moved; else absolute."""
    folder = os.path.join(os.path.abspath(output.parent), "")
    absolute = os.path.abspath(path)
    return absolute[len(folder) :].replace(os.sep, "/") if absolute.startswith(folder) else absolute


def merge_jobs(source: Path, output: Path, num_jobs: int, *, decode: bool = True, restart: bool = False) -> Progress:
    """Merge the parts that the jobs have written into the manifest and bad list of the whole input."""
    whole = _ledger(source, output, decode, None, restart)
    if whole.is_current(lambda: list_entries(source)):
        return whole.progress
    jobs = [Job(number, num_jobs) for number in range(num_jobs)]
    parts = [_ledger(source, output, decode, job) for job in jobs]
    missing = [str(job.number) for job, part in zip(jobs, parts, strict=True) if not part.progress.complete]
    if missing:
        raise ValueError(
            f"{output}: of {num_jobs} jobs, not complete: {', '.join(missing)}. Start them again, then merge."
        )
    with ExitStack() as stack:
        streams = [
            _numbered_lines(stack.enter_context(open(path, "rb")), is_bad)
            for part in parts
            for path, is_bad in ((part.manifest, False), (bad_path(part.manifest), True))
        ]
        outs = [stack.enter_context(open(f"{path}.partial", "wb")) for path in (output, bad_path(output))]
        for expected, (number, is_bad, text) in enumerate(heapq.merge(*streams)):
            if number != expected:
                for path in (output, bad_path(output)):
                    os.unlink(f"{path}.partial")
                raise ValueError(
                    f"{output}: the input changed between the jobs (entry {expected}). Start with --restart."
                )
            outs[is_bad].write(text)
    for part in parts:
        whole.progress.num_good += part.progress.num_good
        whole.progress.num_bad += part.progress.num_bad
        whole.progress.duration_s += part.progress.duration_s
    whole.progress.paths_hash = hash_of(list_entries(source))
    whole.finish()
    shutil.rmtree(parts[0].manifest.parent)
    open_index(os.fspath(output))
    return whole.progress


def _numbered_lines(file: BinaryIO, is_bad: bool) -> Iterator[tuple[int, bool, bytes]]:
    for line in file:
        number, _, text = line.partition(b"\t")
        yield int(number), is_bad, text


@dataclass(frozen=True)
class Split:
    """How a manifest is divided: `hash` by each file's path, `folder` by the folder (speaker) it is in."""

    by: str
    valid_share: float = 0.02
    folder_level: int = 1
    """Which folder below the input: 1 is the topmost, -1 the one that contains the file."""

    def __post_init__(self) -> None:
        if self.by not in ("hash", "folder"):
            raise ValueError(f"--split {self.by}: give 'hash' or 'folder'.")
        if not 0 < self.valid_share < 1:
            raise ValueError(f"--valid-share {self.valid_share}: give a share between 0 and 1.")
        if self.folder_level < -1 or self.folder_level == 0:
            raise ValueError(f"--folder-level {self.folder_level}: give 1, 2, …, or -1 for the file's own folder.")


def part_path(manifest: Path, part: str) -> Path:
    """M.jsonl -> M.train.jsonl"""
    return manifest.with_name(f"{manifest.stem}.{part}{manifest.suffix}")


def split_manifest(source: Path, manifest: Path, split: Split) -> dict[str, int]:
    """Write M.train.jsonl and M.valid.jsonl; return the number of lines of each.

    A file's part depends only on its path (or folder, or `speaker` key): adding data later does not move it.
    """
    root = os.path.abspath(source if source.is_dir() else source.parent)
    counts = {"train": 0, "valid": 0}
    finals = {part: part_path(manifest, part) for part in counts}
    with ExitStack() as stack:
        outs = {part: stack.enter_context(open(f"{path}.partial", "wb")) for part, path in finals.items()}
        for line in stack.enter_context(open(manifest, "rb")):
            part = (
                "valid" if _unit_hash(_group(json.loads(line), root, manifest, split)) < split.valid_share else "train"
            )
            outs[part].write(line)
            counts[part] += 1
    if not all(counts.values()):
        for path in finals.values():
            os.unlink(f"{path}.partial")
        empty = min(counts, key=counts.__getitem__)
        way_out = "Choose another --valid-share" + (" or --folder-level." if split.by == "folder" else ".")
        raise ValueError(f"{manifest}: nothing falls into '{empty}' with --split {split.by}. {way_out}")
    for path in finals.values():
        os.replace(f"{path}.partial", path)
        open_index(os.fspath(path))
    return counts


def _group(item: dict[str, Any], root: str, manifest: Path, split: Split) -> str:
    """Return what decides an utterance's part."""
    path = resolve_audio_path(item["audio_filepath"], os.fspath(manifest))
    inside = os.path.relpath(path, root).replace(os.sep, "/") if path.startswith(os.path.join(root, "")) else path
    if split.by == "hash":
        return f"{inside}@{item.get('offset', 0)}"
    if "speaker" in item:
        return str(item["speaker"])
    folders = inside.split("/")[:-1]
    return "/".join(folders if split.folder_level < 0 else folders[: split.folder_level])


def _unit_hash(text: str) -> float:
    """Hash to [0, 1), uniformly, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
