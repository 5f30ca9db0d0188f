"""Training on several NCCL ranks that share one GPU: captured steps against uncaptured ones, rank against rank.

    python benchmarks/several_ranks.py --output benchmarks/results/several_ranks.json

Every rank has its own data, masks and dropout. For each number of ranks, with and without synchronised batch norm and
accumulation, the same run is made twice, as CUDA graphs and without them: the losses must agree to the noise of bf16,
and all ranks must have the same weights to the bit. NCCL takes ranks on one GPU for hosts of their own, which talk over
sockets: this shows behaviour, not speed. `--mps` starts NVIDIA's multi-process service, with which the ranks' kernels
run side by side instead of in turns: several times faster, since ranks wait for each other in every collective.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

sys.path[:0] = [str(Path(__file__).parents[1])]

from nest_ssl import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.config import compose
from nest_ssl.data import AudioNoiseBatch
from nest_ssl.data.randomness import Use, seed_everything
from nest_ssl.launch.ranks import shared_gpu_variables
from nest_ssl.training.parallel import World
from nest_ssl.training.step import hash_of
from nest_ssl.training.trainer import build_step, place_model
from nest_ssl.training.watching import Watch
from nest_ssl.watchdog.rank import RankFacts

RATE, SECONDS, UTTERANCES = 16_000, 4.0, 4
Combination = tuple[bool, int, int]
"""Synchronised batch norm, batches per step, steps."""


def batch_of(rank: int, number: int, device: torch.device) -> AudioNoiseBatch:
    """Noise that is the same in every run; the rows of each rank have other lengths."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    size = int(RATE * SECONDS * (0.9 + 0.1 * ((rank + number) % 2)))
    audio = 0.1 * torch.randn(UTTERANCES, size, generator=generator)
    lengths = torch.linspace(0.7 * size, size, UTTERANCES).long()
    noisy = audio + 0.02 * torch.randn(audio.shape, generator=generator)
    batch = AudioNoiseBatch(audio=audio, audio_len=lengths, noisy_audio=noisy, noisy_audio_len=lengths.clone())
    batch.planned_samples = int(RATE * SECONDS)
    return batch.to(device)


def run(world: World, options: argparse.Namespace, combination: Combination, captured: bool) -> dict[str, Any]:
    synchronized, accumulate, num_steps = combination
    overrides = [
        f"size={options.size}",
        f"trainer.sync_batchnorm={synchronized}",
        f"trainer.accumulate_grad_batches={accumulate}",
        *("trainer.precision=bf16", "trainer.gradient_clip_val=1.0", "exp_manager.ema.enable=true"),
        "model.optim.sched.warmup_steps=100",
    ]
    cfg = compose(overrides=overrides)
    seed_everything(0, Use.WEIGHTS)
    model = EncDecDenoiseMaskedTokenPredModel(cfg.model).train()
    watch = Watch()
    place_model(cfg, model, world, watch)
    step = build_step(cfg, model, world, watch, num_steps)
    step.engine.captures = captured  # without, padded all the same: masks and dropout depend on the shape
    losses, times = [], []
    for number in range(num_steps * accumulate):
        batch = batch_of(world.rank, number % 20, world.device)
        torch.cuda.synchronize()
        started = time.perf_counter()
        seed_everything(0, Use.TRAIN, 0, number, world.rank)
        place = number % accumulate
        step(batch, begins=place == 0, updates=place == accumulate - 1, step=number // accumulate)
        losses.append(float(step.results.loss))
        times.append(time.perf_counter() - started)
    weights = hash_of([p.detach() for p in model.parameters() if p.requires_grad])
    assert step.average is not None
    found = {
        "losses": losses,
        "weights": weights,
        "average": hash_of([w for w in step.average.weights.values() if w.dtype == torch.float32]),
        "graphs": step.engine.num_graphs,
        "collectives": step.gradients.num_collectives,
        "ms": 1e3 * sorted(times)[len(times) // 2],
    }
    step.release()
    torch.cuda.synchronize()
    return found


def rank_main(rank: int, size: int, options: argparse.Namespace, combinations: list[Combination], folder: str) -> None:
    facts = RankFacts(rank, rank, size, size, 0, "environment", "127.0.0.1", options.port)
    os.environ.update(facts.variables())
    os.environ.update(shared_gpu_variables(facts))
    os.environ.update(NCCL_SOCKET_NTHREADS="2", NCCL_NSOCKS_PERTHREAD="4")  # one stream per pair carries 1 GB/s
    torch.set_num_threads(1)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    world = World(rank, rank, size, device, gradient_group=distributed.new_group())
    for combination in combinations:
        own = {}
        for captured in (True, False):
            started = time.perf_counter()
            own[str(captured)] = run(world, options, combination, captured)
            if rank == 0:
                seconds = time.perf_counter() - started
                print(f"{size} ranks, {combination}, captured: {captured}, {seconds:.0f} s", flush=True)
        ranks: list[Any] = [None] * size
        distributed.all_gather_object(ranks, own)
        if rank == 0:
            row = compare(size, combination, ranks)
            print(json.dumps(row), flush=True)
            with Path(folder, "rows.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    distributed.barrier()
    distributed.destroy_process_group()


@contextlib.contextmanager
def multi_process_service(wanted: bool) -> Iterator[None]:
    """Kernels of several processes run at the same time meanwhile."""
    if not wanted:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(CUDA_MPS_PIPE_DIRECTORY=f"{folder}/pipe", CUDA_MPS_LOG_DIRECTORY=f"{folder}/log")
        for name in ("pipe", "log"):
            Path(folder, name).mkdir()
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=30)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False, timeout=30)


def compare(size: int, combination: Combination, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    differences = [
        abs(a - b) / b for rank in ranks for a, b in zip(rank["True"]["losses"], rank["False"]["losses"], strict=True)
    ]
    first = ranks[0]["True"]
    return {
        "ranks": size,
        "sync_batchnorm": combination[0],
        "accumulate": combination[1],
        "steps": combination[2],
        "graphs": first["graphs"],
        "collectives_for_gradients": first["collectives"],
        "same_weights_on_all_ranks": {k: len({rank[k]["weights"] for rank in ranks}) == 1 for k in ("True", "False")},
        "same_weights_captured_and_not": first["weights"] == ranks[0]["False"]["weights"],
        "same_average_captured_and_not": first["average"] == ranks[0]["False"]["average"],
        "largest_relative_difference_of_losses": max(differences),
        "first_and_last_loss": [first["losses"][0], first["losses"][-1]],
        "ms_captured_and_not": [ranks[0][k]["ms"] for k in ("True", "False")],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="medium")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 2, 8])
    parser.add_argument("--steps", type=int, default=200, help="of the first number of ranks with sync_batchnorm")
    parser.add_argument("--steps-of-others", type=int, default=20)
    parser.add_argument("--only-first", action="store_true", help="sync_batchnorm without accumulation alone")
    parser.add_argument("--mps", action="store_true", help="start NVIDIA's multi-process service")
    parser.add_argument("--port", type=int, default=29_617)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for size in options.ranks:
        long = options.steps if size == options.ranks[0] else options.steps_of_others
        combinations: list[Combination] = [
            (synchronized, accumulate, long if synchronized and accumulate == 1 else options.steps_of_others)
            for synchronized, accumulate in product((True, False), (1, 2))
        ]
        combinations = combinations[:1] if options.only_first else combinations
        with multi_process_service(options.mps), tempfile.TemporaryDirectory() as folder:
            spawn(rank_main, (size, options, combinations, folder), nprocs=size)
            rows += [json.loads(line) for line in Path(folder, "rows.jsonl").read_text().splitlines()]
    result = {
        "size": options.size,
        "batch": f"{UTTERANCES} x {SECONDS:g} s",
        "rows": rows,
        "device": subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.strip(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
    }
    if options.output is not None:
        earlier = json.loads(options.output.read_text()) if options.output.exists() else []
        options.output.write_text(json.dumps([*earlier, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
