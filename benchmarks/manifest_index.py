"""How long a large manifest takes to index and to open, and how much memory it takes while workers read it.

python benchmarks/manifest_index.py --lines 10000000 --output benchmarks/results/manifest_index.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nest_ssl.data.manifest.read import Manifest, open_manifests

NUM_READS = 100_000
MB = 1e6


def write_manifest(path: Path, num_lines: int) -> None:
    """Write lines about as long as LibriSpeech's (200 bytes)."""
    rng = np.random.default_rng(0)
    text = "chapter one missus rachel lynde is surprised missus rachel lynde lived just where the avonlea main road"
    with open(path, "w") as file:
        for first in range(0, num_lines, 100_000):
            durations_s = rng.uniform(1, 20, size=min(100_000, num_lines - first)).round(2)
            file.writelines(
                f'{{"audio_filepath": "train/{i // 1000:06d}/{i:09d}.flac", "duration": {d}, "text": "{text}"}}\n'
                for i, d in enumerate(durations_s.tolist(), start=first)
            )


def memory(pid: int) -> dict[str, float]:
    """Return the proportional (shared pages divided among their users) and resident memory of a process, in MB."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {row.split(":")[0]: int(row.split()[1]) for row in rows}
    return {"pss_mb": kilobytes["Pss"] * 1024 / MB, "rss_mb": kilobytes["Rss"] * 1024 / MB}


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def worker(manifest: Manifest, seed: int, done: Any, leave: Any) -> None:
    for index in np.random.default_rng(seed).integers(len(manifest), size=NUM_READS):
        manifest[int(index)]
    done.release()
    leave.wait()


def measure_workers(manifest: Manifest, method: str, num_workers: int) -> dict[str, float]:
    """Return the memory of this process and its workers, after each has read NUM_READS random utterances."""
    context: Any = multiprocessing.get_context(method)
    done, leave = context.Semaphore(0), context.Event()
    processes = [context.Process(target=worker, args=(manifest, seed, done, leave)) for seed in range(num_workers)]
    for process in processes:
        process.start()
    for _ in processes:
        done.acquire()
    each = [memory(pid) for pid in [os.getpid(), *(process.pid for process in processes if process.pid)]]
    leave.set()
    for process in processes:
        process.join()
    return {key: sum(row[key] for row in each) for key in ("pss_mb", "rss_mb")}


def measure_open(path: Path, num_workers: int) -> dict[str, Any]:
    """Measure in a fresh process, like a training run that finds an existing index."""
    before = memory(os.getpid())
    _, open_s = timed(lambda: open_manifests(str(path)))
    manifest, filtered_s = timed(lambda: open_manifests(str(path), min_duration_s=2.0, max_duration_s=16.0))
    indices = np.random.default_rng(0).integers(len(manifest), size=NUM_READS)
    _, read_s = timed(lambda: [manifest[int(i)].line for i in indices])
    return {
        "open_s": open_s,
        "open_with_filters_s": filtered_s,
        "read_us_per_utterance": read_s / NUM_READS * 1e6,
        "before": before,
        "open": memory(os.getpid()),
        "workers": num_workers,
        "with_forked_workers": measure_workers(manifest, "fork", num_workers),
        "with_spawned_workers": measure_workers(manifest, "spawn", num_workers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.jsonl")
        write_manifest(path, arguments.lines)
        result = {"lines": arguments.lines, "manifest_mb": path.stat().st_size / MB}
        result["first_open_s"] = timed(lambda: open_manifests(str(path)))[1]
        result["index_mb"] = Path(f"{path}.idx").stat().st_size / MB
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            result |= pool.submit(measure_open, path, arguments.workers).result()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    versions = {"python": platform.python_version(), "numpy": np.__version__, "msgspec": msgspec.__version__}
    report = {
        "commit": commit,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": versions,
    } | result
    for key, value in report.items():
        print(f"{key:24} {value}")
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
