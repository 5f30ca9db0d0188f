"""How much of the gradient exchange hides behind the backward pass, from a trace of a captured step on one GPU.

    python benchmarks/exchange_overlap.py --output benchmarks/results/exchange_overlap.json
    python benchmarks/exchange_overlap.py --plot-from benchmarks/results/exchange_overlap.json --plot exchange.svg

The trace tells when each bucket of gradients is complete, and when the backward pass ends. Buckets travel one after
another, each as soon as it is complete: with an assumed bandwidth, that gives the part of the exchange which the step
has to wait for. Statistics of synchronised batch norms cannot hide: each collective costs the step its latency.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

CASES = (("large", 8, 16.0), ("large", 64, 16.0))
STATISTICS_PER_LAYER = 2


@dataclass(frozen=True)
class Cluster:
    """GPUs and what their network is assumed to do."""

    gpus: int
    gb_per_s: float
    """Bus bandwidth of a large all-reduce, per GPU."""
    latency_us: float
    """Of a small all-reduce."""


CLUSTERS = (
    Cluster(8, 350.0, 20.0),  # NVLink within a node
    Cluster(64, 45.0, 45.0),  # one port of 400 Gb/s per GPU between nodes
    Cluster(512, 40.0, 70.0),
)


def exposed_ms(ready_ms: list[float], num_bytes: list[int], cluster: Cluster) -> tuple[float, float]:
    """What the step waits for after its last bucket is complete, and how long all buckets travel."""
    finished, travels = 0.0, 0.0
    for ready, size in zip(ready_ms, num_bytes, strict=True):
        moved = 2 * (cluster.gpus - 1) / cluster.gpus * size
        ms = moved / cluster.gb_per_s / 1e6 + cluster.latency_us / 1e3
        finished, travels = max(finished, ready) + ms, travels + ms
    return finished - ready_ms[-1], travels


def project(row: dict[str, Any], cluster: Cluster) -> dict[str, Any]:
    exposed, travels = exposed_ms(row["ready_ms"], row["bucket_bytes"], cluster)
    statistics = row["batch_norms"] * STATISTICS_PER_LAYER * cluster.latency_us / 1e3
    return {
        "gpus": cluster.gpus,
        "gb_per_s": cluster.gb_per_s,
        "latency_us": cluster.latency_us,
        "exchange_ms": travels,
        "hidden_share": 1 - exposed / travels,
        "exposed_ms": exposed,
        "statistics_ms": statistics,
        "step_ms": row["step_ms"] + exposed + statistics,
        "step_ms_without_sync_batchnorm": row["step_ms"] + exposed,
    }


def traced(size: str, batch: int, seconds: float) -> dict[str, Any]:
    """The captured step of one rank, which fills its buckets as with many."""
    import torch
    from benchmarks.train_step import our_model, our_training, random_batch, timed
    from torch.profiler import ProfilerActivity, profile

    from nest_ssl.config import OptimConfig
    from nest_ssl.fast.engine import accelerate
    from nest_ssl.training.optimizers import build_optimizer
    from nest_ssl.training.parallel import Gradients, World

    model = our_model(size)
    optimizer = build_optimizer(model, OptimConfig(lr=1e-4, betas=[0.9, 0.98], weight_decay=1e-3))
    step = our_training(accelerate(model, autocast=torch.bfloat16), random_batch(batch, seconds), optimizer)
    step_ms = timed(step, 30, 10)["ms"]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = sorted(
        (event.time_range.start / 1e3, event.time_range.end / 1e3, event.name)
        for event in profiler.events()
        if str(event.device_type).endswith("CUDA")
    )
    origin = events[0][0]
    kernels = [(start - origin, end - origin, name) for start, end, name in events]
    buckets = Gradients([p for p in model.parameters() if p.requires_grad], World(device=torch.device("cuda")))
    return {
        "size": size,
        "batch": f"{batch} x {seconds:g} s",
        "step_ms": step_ms,
        "traced_ms": kernels[-1][1],
        "bucket_bytes": [bucket.nbytes for _, bucket in buckets._buckets],
        "ready_ms": ready_times(kernels, buckets.num_buckets),
        "kernels": len(kernels),
        "batch_norms": sum(type(m).__name__.endswith("BatchNorm1d") for m in model.modules()),
    }


def ready_times(kernels: list[tuple[float, float, str]], num_buckets: int) -> list[float]:
    """The end of each run of copies into a bucket; kernels of copies of lists of tensors are nothing else in a step."""
    ready: list[float] = []
    copied_before = False
    for _, end, name in kernels:
        copies = "multi_tensor_apply" in name and "Copy" in name
        if copies and copied_before:
            ready[-1] = end
        elif copies:
            ready.append(end)
        copied_before = copies
    if len(ready) != num_buckets:
        raise RuntimeError(f"the trace has {len(ready)} runs of copies, and there are {num_buckets} buckets")
    return ready


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(rows), 1, figsize=(9, 2.6 * len(rows)), constrained_layout=True)
    for row, axis in zip(rows, axes if len(rows) > 1 else [axes], strict=True):
        end = row["ready_ms"][-1]
        axis.barh(len(CLUSTERS), end, color="#c8d6e5", height=0.6)
        axis.text(0.1, len(CLUSTERS), "forward and backward", va="center", fontsize=8)
        axis.plot(row["ready_ms"], [len(CLUSTERS)] * len(row["ready_ms"]), "|", color="#34495e", markersize=12)
        for place, cluster in enumerate(reversed(CLUSTERS)):
            finished = 0.0
            for ready, size in zip(row["ready_ms"], row["bucket_bytes"], strict=True):
                begins = max(finished, ready)
                moved = 2 * (cluster.gpus - 1) / cluster.gpus * size
                finished = begins + moved / cluster.gb_per_s / 1e6 + cluster.latency_us / 1e3
                hidden = max(0.0, min(finished, end) - begins)
                axis.barh(place, hidden, left=begins, color="#27ae60", height=0.6)
                axis.barh(place, finished - begins - hidden, left=begins + hidden, color="#c0392b", height=0.6)
        axis.axvline(end, color="#7f8c8d", linewidth=0.8, linestyle="--")
        labels = [f"{cluster.gpus} GPUs, {cluster.gb_per_s:g} GB/s" for cluster in reversed(CLUSTERS)]
        axis.set_yticks(range(len(CLUSTERS) + 1), [*labels, "one GPU (traced)"], fontsize=8)
        axis.set_title(f"{row['size']}, {row['batch']}: buckets of gradients on their way", fontsize=9)
        axis.set_xlabel("ms of the step; green: hidden behind the backward pass, red: waited for", fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--plot-from", type=Path)
    options = parser.parse_args()
    if options.plot_from is not None:
        plot(json.loads(options.plot_from.read_text())[-1]["rows"], options.plot)
        return
    import torch

    rows = []
    for case in CASES:
        row = traced(*case)
        row["projected"] = [project(row, cluster) for cluster in CLUSTERS]
        rows.append(row)
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
    result = {
        "rows": rows,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
    }
    if options.output is not None:
        earlier = json.loads(options.output.read_text()) if options.output.exists() else []
        options.output.write_text(json.dumps([*earlier, result], indent=1) + "\n")
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
