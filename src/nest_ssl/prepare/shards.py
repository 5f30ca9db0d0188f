"""Tar shards in NeMo's layout: audio_0.tar ..., sharded_manifests/manifest_0.json ..., tarred_audio_manifest.json.

Utterance k goes to shard k % N, so every shard is a sample of the whole. One process writes a shard under another name
and renames it when it is complete: existing shards are whole, and a run that was killed resumes with the others. A
note next to a shard's manifest has what it was made of: it is written again if a file was replaced or the tar is cut.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from nest_ssl.audio import audio_info, read_native
from nest_ssl.data.manifest.listing import file_version
from nest_ssl.data.manifest.read import Manifest, Utterance, open_manifests
from nest_ssl.files import replace_text
from nest_ssl.prepare.measure import Workers

SEGMENT_SLACK_S = 0.01
"""An utterance this close to the length of its file is the whole file, which is then copied as it is."""


def tar_path(folder: Path, shard: int) -> Path:
    return folder / f"audio_{shard}.tar"


def shard_manifest_path(folder: Path, shard: int) -> Path:
    return folder / "sharded_manifests" / f"manifest_{shard}.json"


def write_shards(
    manifest: Path,
    folder: Path,
    num_shards: int,
    *,
    shards: Iterable[int] | None = None,
    num_workers: int = 0,
    report: Callable[[int, int], None] = lambda num_done, num_all: None,
) -> int:
    """Write those of the given shards (default: all) that are missing; return how many were written."""
    utterances = open_manifests(os.fspath(manifest))
    if not 1 <= num_shards <= len(utterances):
        raise ValueError(
            f"{manifest}: {num_shards} shards of {len(utterances)} utterances. Give 1 to {len(utterances)}."
        )
    (folder / "sharded_manifests").mkdir(parents=True, exist_ok=True)
    wanted = range(num_shards) if shards is None else shards
    todo = [shard for shard in wanted if not _is_done(folder, shard, num_shards, utterances)]
    if num_workers == 0:
        for done, shard in enumerate(todo, start=1):
            write_shard(utterances, folder, shard, num_shards)
            report(done, len(todo))
        return len(todo)
    with Workers(num_workers) as pool:
        tasks = [pool.submit(write_shard, utterances, folder, shard, num_shards) for shard in todo]
        for done, task in enumerate(as_completed(tasks), start=1):
            task.result()
            report(done, len(todo))
    return len(todo)


def _is_done(folder: Path, shard: int, num_shards: int, utterances: Manifest) -> bool:
    """Tell whether a shard is complete (its manifest is renamed last) and up to date; refuse files of other data."""
    there = [path for path in (tar_path(folder, shard), shard_manifest_path(folder, shard)) if path.exists()]
    if not there:
        return False
    try:
        noted = json.loads(_note_path(folder, shard).read_bytes())
        paths = noted["paths"]
    except FileNotFoundError:  # not written here: NeMo's, or moved from elsewhere
        paths = None
    except (ValueError, LookupError, TypeError, RecursionError):  # damaged
        return False
    made_of = _made_of(utterances, shard, num_shards)
    if paths != made_of["paths"]:
        raise ValueError(
            f"{there[-1]}: shards of other data, or of another number of shards. Give another folder, or remove them."
        )
    return len(there) == 2 and bool(noted.items() <= {**made_of, **_content(*there)}.items())


def _note_path(folder: Path, shard: int) -> Path:
    path = shard_manifest_path(folder, shard)
    return path.with_name(f"{path.name}.state")


def _made_of(utterances: Manifest, shard: int, num_shards: int) -> dict[str, Any]:
    """Hashes of the audio of a shard: which it is, and in which version."""
    paths, versions = hashlib.sha256(), hashlib.sha256()
    for number in range(shard, len(utterances), num_shards):
        utterance = utterances[number]
        paths.update(f"{utterance.audio_filepath}\0{utterance.offset_s}\0".encode(errors="surrogateescape"))
        versions.update(f"{file_version(utterance.audio_filepath)}\0{utterance.duration_s}\0".encode())
    return {"paths": paths.hexdigest(), "versions": versions.hexdigest()}


def _content(tar: Path, lines: Path) -> dict[str, Any]:
    """What shows that both files are as they were written; audio has checks of its own."""
    return {"tar_bytes": tar.stat().st_size, "lines": hashlib.sha256(lines.read_bytes()).hexdigest()}


def write_shard(utterances: Manifest, folder: Path, shard: int, num_shards: int) -> None:
    """Write one tar file and its manifest; both get their names only when complete."""
    tar, lines = tar_path(folder, shard), shard_manifest_path(folder, shard)
    partial = [path.with_name(f"{path.name}.partial") for path in (tar, lines)]
    made_of = _made_of(utterances, shard, num_shards)
    with tarfile.open(partial[0], "w") as archive, open(partial[1], "w", encoding="utf-8") as out:
        for number in range(shard, len(utterances), num_shards):
            utterance = utterances[number]
            name = _add_audio(archive, utterance, number)
            item = {"audio_filepath": name, "duration": utterance.duration_s, "shard_id": shard, **utterance.extra}
            out.write(json.dumps(item, ensure_ascii=False) + "\n")
    # First: a tar file without it is somebody else's.
    replace_text(_note_path(folder, shard), json.dumps({**made_of, **_content(*partial)}) + "\n")
    os.replace(partial[0], tar)
    os.replace(partial[1], lines)


def _add_audio(archive: tarfile.TarFile, utterance: Utterance, number: int) -> str:
    """Add the utterance's file, or its part of the file, and return its name in the archive."""
    path = Path(utterance.audio_filepath)
    stem, suffix = os.path.splitext(f"_{path.name}")  # of '.wav' and '....wav' too
    # A dot would end webdataset's key, and NeMo cuts names at '-sub'.
    stem = re.sub(r"[^\w-]", "_", stem).replace("-sub", "_sub")
    if _is_whole_file(utterance):
        name = f"{number:09d}{stem}{suffix}"
        with open(path, "rb") as file:
            _add(archive, name, file, os.fstat(file.fileno()).st_size)
        return name
    encoded, extension = _encode_segment(utterance)
    name = f"{number:09d}{stem}{extension}"
    _add(archive, name, io.BytesIO(encoded), len(encoded))
    return name


def _is_whole_file(utterance: Utterance) -> bool:
    if utterance.offset_s:
        return False
    if utterance.duration_s is None:
        return True
    return audio_info(utterance.audio_filepath).duration_s <= utterance.duration_s + SEGMENT_SLACK_S


def _encode_segment(utterance: Utterance) -> tuple[bytes, str]:
    """Encode as 24-bit FLAC (lossless up to 24 bits, no larger than needed), or as WAV for floats beyond 1."""
    samples_NC, rate = read_native(
        utterance.audio_filepath, offset_s=utterance.offset_s, duration_s=utterance.duration_s
    )
    fits = np.abs(samples_NC).max() <= 1 and samples_NC.shape[1] <= 8
    out = io.BytesIO()
    kind = {"format": "FLAC", "subtype": "PCM_24"} if fits else {"format": "WAV", "subtype": "FLOAT"}
    soundfile.write(out, samples_NC, rate, **kind)
    if fits:
        return out.getvalue(), ".flac"
    # libsndfile notes the time of writing in a chunk called PEAK, after 8 bytes: the same input would give other bytes.
    return re.sub(rb"(PEAK.{8}).{4}", rb"\1\0\0\0\0", out.getvalue(), count=1, flags=re.DOTALL), ".wav"


def _add(archive: tarfile.TarFile, name: str, file: Any, size: int) -> None:
    """Add a file without owner and time, so that the same input gives the same bytes."""
    entry = tarfile.TarInfo(name)
    entry.size = size
    archive.addfile(entry, file)


def join_shard_manifests(folder: Path, num_shards: int) -> bool:
    """Write tarred_audio_manifest.json, all shards' lines in order; return False if a shard is still missing."""
    parts = [shard_manifest_path(folder, shard) for shard in range(num_shards)]
    if not all(part.exists() for part in parts):
        return False
    final = folder / "tarred_audio_manifest.json"
    partial = final.with_name(f"{final.name}.partial")
    with open(partial, "wb") as out:
        for part in parts:
            with open(part, "rb") as file:
                shutil.copyfileobj(file, out)
    os.replace(partial, final)
    return True
