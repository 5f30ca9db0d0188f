"""`nest-ssl prepare`: turn a folder, list or manifest of audio into a measured manifest; split and shard on request."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nest_ssl.cli.console import keep_inputs, say, show_progress
from nest_ssl.data.manifest.listing import NOT_AUDIO
from nest_ssl.data.manifest.read import Manifest
from nest_ssl.files import only_writer
from nest_ssl.prepare.ledger import Progress, bad_path
from nest_ssl.prepare.manifest import Job, Split, count_entries, merge_jobs, part_path, prepare_manifest, split_manifest
from nest_ssl.prepare.shards import join_shard_manifests, write_shards
from nest_ssl.watchdog.system import while_stdout_lasts

DEFAULT_LIMITS_S = (1.0, 60.0)
"""`min_duration` and `max_duration` of the default configuration."""


class Check(StrEnum):
    decode = "decode"
    header = "header"


class SplitBy(StrEnum):
    hash = "hash"
    folder = "folder"


def prepare(
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="A folder, a list of paths, or a manifest.")],
    output: Annotated[Path, typer.Option(help="The manifest to write, such as data/train.jsonl.")],
    check: Annotated[Check, typer.Option(help="Decode every file to the end, or read only its header.")] = Check.decode,
    split: Annotated[SplitBy | None, typer.Option(help="Also write M.train.jsonl and M.valid.jsonl.")] = None,
    valid_share: Annotated[
        float | None, typer.Option(help="--split: share of files (folders) that go to valid. [default: 0.02]")
    ] = None,
    folder_level: Annotated[
        int | None, typer.Option(help="--split folder: 1: topmost below INPUT, -1: the file's own. [default: 1]")
    ] = None,
    shards: Annotated[
        int | None, typer.Option(min=1, help="Also write this many tar shards (of the train part).")
    ] = None,
    shards_folder: Annotated[Path | None, typer.Option(help="Their folder; default: next to the manifest.")] = None,
    job: Annotated[str | None, typer.Option(metavar="I/N", help="Do the part of job I (from 0) of N.")] = None,
    merge: Annotated[int | None, typer.Option(metavar="N", min=1, help="Merge the results of the N jobs.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes; default: one per core; 0: none.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Ignore an earlier run.")] = False,
) -> None:
    """Measure audio files; write a manifest of the good ones, and M.bad.jsonl with the others and the reasons."""
    num_workers = _num_cores() if workers is None else workers
    part = None if job is None else Job.parse(job)
    if valid_share is not None and split is None:
        raise ValueError(f"--valid-share {valid_share}: nothing is split. Give --split too.")
    if folder_level is not None and split is not SplitBy.folder:
        raise ValueError(f"--folder-level {folder_level}: nothing is split by folder. Give --split folder too.")
    divide = None
    if split is not None:
        divide = Split(split, 0.02 if valid_share is None else valid_share, 1 if folder_level is None else folder_level)
    if shards is None and shards_folder is not None:
        raise ValueError(f"--shards-folder {shards_folder}: there are no shards to write. Give --shards too.")
    target = output if divide is None else part_path(output, "train")
    parts = ("train", "valid") if divide else ()
    _check_outputs(source, [output, bad_path(output), *(part_path(output, name) for name in parts)])
    mine = output if part is None else part_path(output, f"job-{part.number}-of-{part.count}")
    with only_writer(mine):
        if part is None or shards is None:
            if shards is not None and 0 < (found := count_entries(source, most=shards)) < shards:
                raise ValueError(f"--shards {shards}: {source} names {found} files. Give 1 to {found}.")
            _measure(source, output, check, part, merge, num_workers, restart)
        elif not target.exists():
            raise ValueError(f"{target}: does not exist yet. Run the jobs without --shards, then --merge {part.count}.")
        try:
            if part is None and divide is not None:
                counts = split_manifest(source, output, divide)
                say(*(f"{part_path(output, name)}: {count:,} utterances" for name, count in counts.items()), sep="\n")
            if shards is not None:
                _write_shards(target, shards_folder or output.parent, shards, part, num_workers)
        except ValueError as error:
            raise ValueError(f"{error} ({output} is complete: the next run does not measure again.)") from error


def _check_outputs(source: Path, outputs: list[Path]) -> None:
    """Refuse to overwrite the list or manifest that is read, or an audio file in the folder that is read."""
    folder = source.resolve() if source.is_dir() else None
    audio = [path for path in outputs if folder in path.resolve().parents and path.suffix.lower() not in NOT_AUDIO]
    keep_inputs("--output", outputs, [source, *audio])


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _measure(
    source: Path, output: Path, check: Check, job: Job | None, merge: int | None, num_workers: int, restart: bool
) -> None:
    decode = check is Check.decode
    if count_entries(source, most=1) == 0:
        raise ValueError(f"{source}: names no audio file.")
    if merge is not None:
        progress = merge_jobs(source, output, merge, decode=decode, restart=restart)
    else:
        with show_progress("prepare", "files", lambda: count_entries(source, job)) as show:
            progress = prepare_manifest(
                source,
                output,
                decode=decode,
                num_workers=num_workers,
                job=job,
                restart=restart,
                report=lambda now: show(now.num_done, text=_describe(now)),
            )
    name = output if job is None else f"job {job.number}/{job.count} of {output}"
    with while_stdout_lasts():
        say(f"{name}: {progress.num_good:,} utterances, {progress.duration_s / 3600:,.2f} h")
        if progress.num_bad:
            say(f"{bad_path(output) if job is None else name}: {progress.num_bad:,} bad files, with reasons")
    if job is None:
        limits = Manifest([str(output)], min_duration_s=DEFAULT_LIMITS_S[0], max_duration_s=DEFAULT_LIMITS_S[1])
        if outside := limits.outside_limits():
            say(f"warning: {output}: {outside}", file=sys.stderr)


def _describe(progress: Progress) -> str:
    return f"{progress.duration_s / 3600:,.2f} h, {progress.num_bad:,} bad"


def _write_shards(manifest: Path, folder: Path, num_shards: int, job: Job | None, num_workers: int) -> None:
    mine = range(num_shards) if job is None else range(job.number, num_shards, job.count)
    with show_progress("prepare", "shards", lambda: len(mine)) as show:
        written = write_shards(
            manifest, folder, num_shards, shards=mine, num_workers=num_workers, report=lambda done, _: show(done)
        )
    say(f"{folder}/audio__OP_0..{num_shards - 1}_CL_.tar: {written} shards written, {len(mine) - written} existed")
    if join_shard_manifests(folder, num_shards):
        say(f"{folder}/sharded_manifests/manifest__OP_0..{num_shards - 1}_CL_.json: their manifests")
