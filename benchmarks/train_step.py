"""One training step (features, targets, masks, encoder, loss, backward, AdamW) on a GPU: nest-ssl, NeMo, transformers.

    python benchmarks/train_step.py --output benchmarks/results/train_step.json --plot docs/images/train_step.svg

bf16 autocast, random audio, utterances of 70 to 100 % of the batch's length, the same padded batch for all.
Figures are medians of synchronised steps after a warm-up. The rows of NeMo (its own model and yaml defaults) and
transformers (only the encoder's forward and backward pass, compiled) hold an error if the package is missing.
`--plot-from FILE` plots an existing result.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).parents[1])]
from benchmarks.train_step_peers import nemo_model, nemo_step, parakeet_encoder
from benchmarks.train_step_report import plot, table

from nest_ssl import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.config.composing import compose
from nest_ssl.data import AudioNoiseBatch
from nest_ssl.fast.encoder import fused
from nest_ssl.fast.engine import Batch, Engine, accelerate
from nest_ssl.training.parallel import World
from nest_ssl.training.step import TrainStep
from nest_ssl.training.watching import Watch

RATE = 16000
SETTINGS = [("large", 8, 16), ("large", 32, 16), ("large", 64, 16), ("large", 128, 16), ("large", 8, 60)]
STAGES = ("preprocessor", "quantizer", "mask_processor", "encoder", "decoder", "loss")


def random_batch(batch: int, seconds: float) -> Batch:
    """Return clean audio, its lengths, noisy audio and its lengths."""
    num_samples = int(RATE * seconds)
    generator = torch.Generator().manual_seed(1)
    audio = (0.1 * torch.randn(batch, num_samples, generator=generator)).cuda()
    noisy = audio + 0.02 * torch.randn(batch, num_samples, generator=generator).cuda()
    length = torch.linspace(0.7 * num_samples, num_samples, batch).long().cuda()
    return audio, length, noisy, length


def our_model(size: str) -> EncDecDenoiseMaskedTokenPredModel:
    torch.manual_seed(0)
    return EncDecDenoiseMaskedTokenPredModel(compose(overrides=[f"size={size}"]).model).cuda().train()


def our_training(engine: Engine, batch: Batch, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """The program's own step, on a batch that stays on the GPU."""
    world = World(device=batch[0].device)
    update = TrainStep(engine.model, engine, optimizer, None, world, Watch())
    audio, length, noisy, noisy_length = batch
    whole = AudioNoiseBatch(audio=audio, audio_len=length, noisy_audio=noisy, noisy_audio_len=noisy_length)

    def step() -> None:
        update(whole, begins=True, updates=True, step=0)

    return step


def adamw(model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trainable, lr=1e-5, betas=(0.9, 0.98), weight_decay=1e-3, fused=fused)


def timed(step: Callable[[], object], steps: int, warm_up: int) -> dict[str, float]:
    """Return the median milliseconds of a step and the peak memory of all steps in GB."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for index in range(warm_up + steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if index >= warm_up:
            times.append(1e3 * (time.perf_counter() - begin))
    return {"ms": sorted(times)[len(times) // 2], "peak_GB": torch.cuda.max_memory_allocated() / 2**30}


def training(loss_of: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return the step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a side stream, because the capturing stream must be empty
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def stage_times(model: nn.Module, step: Callable[[], None], steps: int = 4) -> dict[str, float]:
    """Return the milliseconds of each stage, synchronised at both ends; backward and optimizer follow the loss."""
    spent: dict[str, float] = {}
    begun: dict[str, float] = {}

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            torch.cuda.synchronize()
            begun[name] = time.perf_counter()

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            torch.cuda.synchronize()
            spent[name] = spent.get(name, 0.0) + 1e3 * (time.perf_counter() - begun[name]) / steps

        return hook

    step()
    handles = []
    for name in STAGES:
        module = model.get_submodule(name)
        handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave(name))]
    whole = timed(step, steps, 0)["ms"]
    for handle in handles:
        handle.remove()
    return {**spent, "backward, optimizer and the rest": whole - sum(spent.values())}


def measure(size: str, batch_size: int, seconds: float, peers: set[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure the rows of one setting."""
    batch = random_batch(batch_size, seconds)
    rows: dict[str, dict[str, Any]] = {}

    def add(name: str, row: Callable[[], dict[str, Any]]) -> None:
        try:
            rows[name] = row()
        except (torch.OutOfMemoryError, RuntimeError) as error:  # the row holds the error; the others still run
            rows[name] = {"error": " ".join(str(error).split())[:200]}
        torch.cuda.empty_cache()
        print(size, batch_size, seconds, name, json.dumps(rows[name]), flush=True)

    def ours(
        *, compile_mode: str = "auto", graphs: bool = True, stages: bool = False, budget: float | None = None
    ) -> dict[str, Any]:
        model = our_model(size)
        optimizer = adamw(model, fused=True)
        no_graphs = None if graphs else "measured without them"
        settings: dict[str, Any] = {"compile": compile_mode, "activation_budget": budget, "autocast": torch.bfloat16}
        engine = accelerate(model, **settings, no_graphs=no_graphs)
        row: dict[str, Any] = timed(our_training(engine, batch, optimizer), options.steps, options.warm_up)
        row["graphs"], row["runs"] = engine.num_graphs, engine.description
        if stages:
            engine = accelerate(model, **settings, no_graphs="stages are timed by hooks")
            row["stages_ms"] = stage_times(model, our_training(engine, batch, optimizer))
        return row

    def our_encoder(*, graph: bool) -> dict[str, Any]:
        model = our_model(size)
        mels, length = model.preprocessor(input_signal=batch[0], length=batch[1])

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16), fused(model.encoder, model.cfg.activation_budget):
                encoded = model.encoder(audio_signal=mels, length=length)[0]
            encoded.float().square().mean().backward()
            model.zero_grad(set_to_none=True)

        if not graph:
            return timed(step, options.steps, options.warm_up)
        torch.cuda.reset_peak_memory_stats()
        replay = captured(step)
        peak_gb = torch.cuda.max_memory_allocated() / 2**30  # a replay allocates nothing
        return {**timed(replay, options.steps, options.warm_up), "peak_GB": peak_gb}

    if "ours" in peers:
        add("nest-ssl", lambda: ours(stages=batch_size in options.stages_at))
        add("nest-ssl, no graphs", lambda: ours(graphs=False))
        add("nest-ssl, compile off", lambda: ours(compile_mode="off"))
    if "budget" in peers:
        add("nest-ssl, activation_budget 1", lambda: ours(budget=1.0))
        add("nest-ssl, activation_budget 0.5", lambda: ours(budget=0.5))
    if "encoder" in peers:
        add("encoder: nest-ssl", lambda: our_encoder(graph=True))
        add("encoder: nest-ssl, no graph", lambda: our_encoder(graph=False))
        add("encoder: transformers, compiled", lambda: parakeet_encoder(size, batch_size, seconds, timed, options))
    if "nemo" in peers:
        add("NeMo", lambda: nemo_row(size, batch, batch_size in options.stages_at, options))
    return {"size": size, "batch": batch_size, "seconds": seconds, "real_s": batch[1].sum().item() / RATE, "rows": rows}


def nemo_row(size: str, batch: Batch, stages: bool, options: argparse.Namespace) -> dict[str, Any]:
    if util.find_spec("nemo") is None:
        return {"error": "NeMo is not installed here"}
    model = nemo_model(size)
    step = training(lambda: nemo_step(model, batch), adamw(model, fused=False))
    row: dict[str, Any] = timed(step, options.steps, options.warm_up)
    if stages:
        row["stages_ms"] = stage_times(model, step)
    return row


def matrix_rate() -> float:
    """Return the TFLOP/s of a GEMM of two 8192 × 8192 matrices of random bf16."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / timed(lambda: a @ b, 10, 3)["ms"] / 1e9


def facts() -> dict[str, Any]:
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = os.environ.get("NEST_SSL_COMMIT") or subprocess.run(describe, capture_output=True, text=True).stdout
    names = [name for name in ("torch", "triton", "transformers", "nemo_toolkit") if util.find_spec(name.split("_")[0])]
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    device = torch.cuda.get_device_name()
    return {"commit": commit.strip(), "device": device, "python": platform.python_version(), "versions": versions}


def compiler_report() -> dict[str, Any]:
    counters = torch._dynamo.utils.counters
    return {"graph_breaks": dict(counters["graph_break"]), "compiled_graphs": counters["stats"].get("unique_graphs", 0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", help="SIZE:BATCH:SECONDS[:PEER+PEER]; may be repeated")
    parser.add_argument(
        "--peers", default="ours,encoder,nemo", help="which rows to measure: ours, budget, encoder, nemo"
    )
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--stages-at", type=int, nargs="*", default=[32], help="batch sizes whose stages are timed")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="picture to write")
    parser.add_argument("--plot-from", type=Path, help="a result to draw, instead of measuring")
    options = parser.parse_args()
    if options.plot_from:
        result = json.loads(options.plot_from.read_text(encoding="utf-8"))
        print(table(result))
        plot(result, options.plot or options.plot_from.with_suffix(".svg"))
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # the engine logs what it decided
    settings = options.setting or [":".join(map(str, setting)) for setting in SETTINGS]
    result = {**facts(), "matrix_TFLOPs": matrix_rate(), "settings": []}
    for setting in settings:
        size, batch_size, seconds, *peers = setting.split(":")
        wanted = set((peers[0] if peers else options.peers).replace("+", ",").split(","))
        result["settings"].append(measure(size, int(batch_size), float(seconds), wanted, options))
        result["compiler"] = compiler_report()
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
