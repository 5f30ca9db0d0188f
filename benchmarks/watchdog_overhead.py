"""The cost of the watchdog: one mark, one file name, training steps with and without it, and the monitor's time.

python benchmarks/watchdog_overhead.py --output benchmarks/results/watchdog_overhead.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nest_ssl import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.config import compose
from nest_ssl.data import AudioNoiseBatch
from nest_ssl.freed_memory import keep_freed_memory
from nest_ssl.training.parallel import World
from nest_ssl.training.step import TrainStep
from nest_ssl.training.trainer import build_step, place_model
from nest_ssl.training.watching import Watch, mark_stages
from nest_ssl.watchdog.agent import BEAT_EVERY_S, RankAgent
from nest_ssl.watchdog.beacon import Beacon, RankMark, WorkerMark
from nest_ssl.watchdog.monitor import LOOK_EVERY_S
from nest_ssl.watchdog.rank import RankFacts, Stage
from nest_ssl.watchdog.rows import Limits, local_rows

NUM_CALLS = 200_000
STEPS_PER_BLOCK = 10
WHOLE_STEP = (Stage.DATA, Stage.TRANSFER, Stage.BACKWARD, Stage.OPTIMIZER)


def per_call_us(act: Callable[[], Any], calls: int = NUM_CALLS) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        act()
    return (time.perf_counter() - start) / calls * 1e6


def make_step(size: str, batch: int, seconds: float, device: torch.device) -> tuple[Any, Callable[[], None]]:
    """Return a model and one training step of it, without data and optimizer."""
    cfg = compose(overrides=[f"size={size}"]).model
    model = EncDecDenoiseMaskedTokenPredModel(cfg).to(device).train()
    audio = torch.randn(batch, int(seconds * cfg.sample_rate), device=device)
    length = torch.full((batch,), audio.shape[1], device=device)

    def step() -> None:
        model.masked_loss(audio, length, audio, length).loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return model, step


def compare_steps(size: str, batch: int, seconds: float, rounds: int, mark: RankMark) -> dict[str, float]:
    """Return medians of steps with and without hooks, measured alternately so that both see the same machine.

    On a CPU this measures the time of one thread, which other load on the machine does not lengthen.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    torch.set_num_threads(1)
    keep_freed_memory()  # as in training; page faults would otherwise drown the measurement
    model, step = make_step(size, batch, seconds, device)
    times_ms: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * rounds + 2):
        watched = number % 2 == 1
        hooks = mark_stages(model, mark.enter) if watched else []
        start = clock()
        step()
        if watched:
            for stage in WHOLE_STEP:
                mark.enter(stage)
            mark.finish_step(number)
        if number >= 2:
            times_ms[watched].append(1e3 * (clock() - start))
        for hook in hooks:
            hook.remove()
    num_marks = len(list(model.encoder.layers)) + 9 + len(WHOLE_STEP)
    return {"marks_per_step": num_marks, **compared(times_ms)}


def captured_steps(beacon: Beacon, batch: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Captured steps of the large model, watched and not: blocks of ten in turn, so that both see the same machine.

    The watched ones do what they do in training: marks of the host and of the GPU, a heartbeat, a finished step.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    cfg = compose(overrides=["size=large", "trainer.precision=bf16", "model.optim.sched.warmup_steps=100"])
    agent = RankAgent(RankFacts(0, 0, 1, 1, 0, "environment", "localhost", 0), beacon, has_monitor=True)
    agent.start(0)
    audio = 0.1 * torch.randn(batch, int(seconds * cfg.model.sample_rate))
    length = torch.linspace(0.7 * audio.shape[1], audio.shape[1], batch).long()
    host = AudioNoiseBatch(audio=audio, audio_len=length, noisy_audio=audio, noisy_audio_len=length).pin_memory()
    blocks: dict[bool, Callable[[int], None]] = {}
    for watched in (False, True):
        watch = Watch(agent if watched else None)
        model = EncDecDenoiseMaskedTokenPredModel(cfg.model).train()
        place_model(cfg, model, World(device=device), watch)
        if watched and watch.gpu is None:
            raise SystemExit("the GPU cannot write to the beacon: see the log above")
        blocks[watched] = partial(block_of_steps, build_step(cfg, model, World(device=device), watch, None), host)
    for watched in (False, True):
        blocks[watched](STEPS_PER_BLOCK)
    times_ms: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for watched in (number % 2 == 0, number % 2 == 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            blocks[watched](STEPS_PER_BLOCK)
            torch.cuda.synchronize()
            times_ms[watched].append(1e3 * (time.perf_counter() - start) / STEPS_PER_BLOCK)
    return {f"captured_{key}": value for key, value in compared(times_ms).items()}


def block_of_steps(step: TrainStep, batch: AudioNoiseBatch, count: int) -> None:
    for number in range(count):
        step.watch.batch_arrives(batch)
        step(step.to_device(batch), begins=True, updates=True, step=number)
        step.watch.step_is_done(number + 1)


def compared(times_ms: dict[bool, list[float]]) -> dict[str, float]:
    """What watching (True) adds to a step, as a share: the median of the differences, and its standard error."""
    step_ms = statistics.median(times_ms[False])
    more_ms = [watched - plain for plain, watched in zip(times_ms[False], times_ms[True], strict=True)]
    quarters = statistics.quantiles(more_ms, n=4)
    return {
        "step_ms": step_ms,
        "watched_step_ms": statistics.median(times_ms[True]),
        "share_of_step_measured": statistics.median(more_ms) / step_ms,
        # The standard error of a median of n values is 1.25 standard deviations / √n; here from the quartiles.
        "standard_error_of_that": 1.25 * (quarters[2] - quarters[0]) / 1.35 / len(more_ms) ** 0.5 / step_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="small")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        beacon = Beacon.create(Path(folder, "beacon"), local_ranks=8, first_rank=0, world_size=8, workers_per_rank=16)
        for local_rank in range(8):
            RankMark(beacon, local_rank).take()
        mark, reader = RankMark(beacon, 0), WorkerMark(beacon, 0, 1, 0)
        limits = Limits(60, 900)
        result: dict[str, Any] = {
            "mark_us": per_call_us(lambda: mark.enter(Stage.ENCODER, 12)),
            "read_us": per_call_us(lambda: reader.reads("/data/some/folder/of/speech/000123456.flac")),
            "finish_step_us": per_call_us(lambda: mark.finish_step(1), 20_000),
            "heartbeat_us": per_call_us(mark.beat),
            "look_ms_of_8_ranks": per_call_us(lambda: local_rows(beacon, limits, 0), 200) / 1e3,
        }
        result |= captured_steps(beacon, 8, 16.0, 100) if torch.cuda.is_available() else {}
        result |= compare_steps(arguments.size, arguments.batch, arguments.seconds, arguments.rounds, mark)
    marks_us = result["marks_per_step"] * result["mark_us"] + result["finish_step_us"]
    beats_us = result["heartbeat_us"] / BEAT_EVERY_S * result["step_ms"] / 1e3
    result["share_of_step_computed"] = (marks_us + beats_us) / (1e3 * result["step_ms"])
    result["share_of_a_100_ms_step"] = marks_us / 100e3
    result["monitor_share_of_a_core"] = result["look_ms_of_8_ranks"] / 1e3 / LOOK_EVERY_S
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    report = {
        "commit": commit,
        "machine": f"{device}, {platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "size": arguments.size,
        "batch": arguments.batch,
        "seconds": arguments.seconds,
    } | result
    for key, value in report.items():
        print(f"{key:26} {value}")
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
