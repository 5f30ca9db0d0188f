"""What the watchdog sees of training: the stage of every moment, what is being read, failures, and agreed stops.

The model knows nothing of it: hooks mark its stages from outside. `debug.trace` and `debug.barrier` are hooks too.

On a GPU a stage is marked twice: by the host when it launches the stage, and by the GPU when it begins it. The host
is up to two steps ahead, and when a captured step is replayed it marks nothing; the GPU's marks are part of the graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import platform
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

import nest_ssl
from nest_ssl.config import DebugConfig, NestConfig
from nest_ssl.data import AudioNoiseBatch, PlannedLoader
from nest_ssl.fast.graphs import may_be_skipped
from nest_ssl.launch.preflight import Facts, code_version, compare_ranks
from nest_ssl.modules import batch_norm
from nest_ssl.training.parallel import group_store
from nest_ssl.watchdog.agent import RankAgent, ReadReport
from nest_ssl.watchdog.beacon import CAME_TO_AT, NO_STEP, PAGE_BYTES, STAGE_BITS, WORD, Beacon, GpuLog
from nest_ssl.watchdog.rank import (
    FIRST_LAYER,
    POSITIONS,
    PRE_ENCODE,
    InitPart,
    Stage,
    part_label,
    validation_part,
)

if TYPE_CHECKING:
    from nest_ssl.model import EncDecMaskedTokenPredModel
    from nest_ssl.training.parallel import World

log = logging.getLogger(__name__)

MOST_GPU_MARKS = 16
"""Per batch. A mark takes about 5 µs of GPU time; a usual step has 12 of them, in 14 ms or more."""
BARRIER_SHARE = 0.8
"""Of `watchdog.floor_s`: `debug.barrier` reports before the monitor would."""


class Stopped(Exception):  # noqa: N818 - it is no error
    """All ranks have saved at the agreed step; this one leaves."""


class Watch:
    """Keeps this rank's place in the beacon up to date. Without an agent, nobody watches and nothing is written."""

    def __init__(self, agent: RankAgent | None = None, sample_rate: int = 16_000) -> None:
        self.agent, self.sample_rate = agent, sample_rate
        self.gpu: GpuMarks | None = None
        self.trace: Trace | None = None
        self.validates = False
        self._num_steps = 0
        self._is_usual = True
        self._num_validation_batches = 0
        self._reports: dict[str, ReadReport] = {}
        self._next_slot = 0
        self._lengths: Tensor | None = None
        self._files: list[str] = []
        if agent is not None:
            agent.describe_work = self._describe_batch

    def enter(self, stage: Stage, part: int = 0) -> None:
        """This rank is in `stage` from now on; so is its GPU, once it has done what was launched before."""
        if self.agent is None:
            return
        if self.validates:
            self.agent.mark.enter(Stage.VALIDATION, validation_part(stage, part))
            return
        self.agent.mark.enter(stage, part)
        if self.gpu is not None and part == 0:  # parts, such as layers, would be too many marks
            self.gpu.mark(stage)

    def joins(self) -> None:
        """From here on this rank waits for the others to form the process group."""
        if self.agent is not None:
            self.agent.show()
            self.agent.mark.enter(Stage.INIT, InitPart.JOIN)

    def reads(self, section: str, num_workers: int) -> ReadReport | None:
        """For the loader of a section: reports what its workers read."""
        if self.agent is None:
            return None
        if section not in self._reports:
            facts, beacon = self.agent.facts, self.agent.beacon
            self._reports[section] = ReadReport(beacon.path, facts.local_rank, self._next_slot)
            self._next_slot += 1 + num_workers
        return self._reports[section]

    # ---- a step ----

    def marks_gpu(self, device: torch.device) -> None:
        """From now on a CUDA GPU reports its stages; before anything is captured."""
        if self.agent is not None and self.gpu is None and device.type == "cuda":
            self.gpu = GpuMarks.on(device, self.agent.beacon, self.agent.facts.local_rank)
            if self.gpu is not None:
                batch_norm.bring = self.gpu.bring

    def training_begins(self, step: int) -> None:
        if self.agent is not None:
            self.agent.mark.step = step
            self.agent.mark.enter(Stage.DATA)
            self.agent.trains = True

    def epoch_begins(self) -> None:
        """The next batch may take as long as a start: workers, indexes and queues start again."""
        self._starts(True)

    def _starts(self, starts: bool) -> None:
        if self.agent is not None and self.agent.mark.starts != starts:
            self.agent.mark.starts = starts

    def batch_arrives(self, batch: AudioNoiseBatch) -> None:
        """To be called with the batch still on the host."""
        self._starts(False)
        self.enter(Stage.TRANSFER)
        self._lengths, self._files = batch.audio_len, batch.audio_filepaths
        if self.trace is not None and not self.validates:
            self.trace.say(f"batch: {describe(vars(batch))}")

    def forward_begins(self) -> None:
        """To be called right before a batch is launched, captured or not, on the stream that it is launched on."""
        if self.gpu is None or self.agent is None:
            self.enter(Stage.ENCODER)  # the hooks say it more exactly, but a step that is one CUDA graph calls none
        else:  # then the GPU says it, and its host is transferring until all is launched
            self.gpu.batch_begins(self.agent.mark.step)

    def step_begins_on_gpu(self) -> None:
        """To be called first in what is captured."""
        if self.gpu is not None:
            self.gpu.begins()

    def step_ends_on_gpu(self) -> None:
        """To be called last in what is captured."""
        if self.gpu is not None:
            self.gpu.ends()

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Something is compiled or captured: it may take as long as a start, and says nothing about usual steps."""
        self._is_usual = False
        if self.agent is not None:
            self.agent.mark.builds = True
        try:
            yield
        finally:
            if self.agent is not None:
                self.agent.mark.builds = False

    def backward_begins(self, loss: Tensor) -> None:
        self.enter(Stage.BACKWARD)
        if self.trace is not None:
            self.trace.backward_begins(loss)

    def optimizer_begins(self, norm: Tensor) -> None:
        if self.trace is not None:
            self.trace.optimizer_begins(norm)

    def step_is_launched(self) -> None:
        """The GPU has all of the batch; from here on the host may wait for it."""
        if self.gpu is not None:
            self.gpu.batch_is_launched()

    def step_is_done(self, step: int) -> None:
        """A batch was trained on, or at least launched; `step` steps are done."""
        self.step_is_launched()
        if self.agent is not None:
            self.agent.mark.finish_step(step, counts=self._num_steps > 0 and self._is_usual)
            self._num_steps += 1
            self._is_usual = True
        if self.trace is not None:
            self.trace.step = step

    # ---- validation, saving, the end ----

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        self.validates = True
        self._starts(True)
        self.enter(Stage.DATA)
        try:
            yield
        finally:
            self.validates = False
            self._starts(True)
        self.enter(Stage.DATA)

    def validation_batch_is_done(self) -> None:
        self._num_validation_batches += 1
        if self.agent is not None:
            self.agent.mark.finish_step(self.agent.mark.step, counts=self._num_validation_batches > 1)
        self.enter(Stage.DATA)

    def training_has_ended(self) -> None:
        self.enter(Stage.END)
        if self.gpu is not None:
            batch_norm.bring = Tensor.clone
            self.gpu.close()
            self.gpu = None

    def failed(self, error: BaseException) -> None:
        if self.agent is not None and not isinstance(error, Stopped):
            self.agent.fail(error)

    # ---- stopping together ----

    def stop_is_due(self, step: int) -> bool:
        """Whether all ranks have agreed to save and leave once `step` steps are done."""
        return self.agent is not None and self.agent.stop_is_due(step)

    def stop_was_asked_for(self) -> bool:
        """Whether the job was asked to stop, at whatever step."""
        return self.agent is not None and self.agent.beacon.stop_step != NO_STEP

    def _describe_batch(self) -> list[str]:
        if self._lengths is None:
            return []
        durations_s = [float(length) / self.sample_rate for length in self._lengths]
        files = ", ".join(self._files[:3]) + (", …" if len(self._files) > 3 else "")
        return [
            f"a batch of {len(durations_s)} utterances, {sum(durations_s):.1f} s in all, the longest "
            f"{max(durations_s):.1f} s: {files}"
        ]


# ---- stages on the GPU ----


class GpuMarks:
    """Has the GPU write its stage into this rank's page of the beacon: (batch << 8 | stage), 8 bytes, in stream order.

    `begins`, `mark`, `bring` and `ends` launch work on the current stream, which a CUDA graph may capture. No Python
    runs in a replay: the number of the batch is a tensor, which `batch_begins` sets before each launch.

    A mark is a copy of its own and costs 5 microseconds. Ranks that synchronise batch norms meet dozens of times in one
    stage: there a kernel that runs anyway, the one that copies what a rank brings, writes the count into the page too.
    """

    def __init__(self, device: torch.device, beacon: Beacon, local_rank: int) -> None:
        self.log = GpuLog(beacon, local_rank)
        self._batch = torch.zeros(1, dtype=torch.long, device=device)
        self._numbers = torch.arange(1 << STAGE_BITS, device=device)
        self._words = torch.zeros_like(self._numbers)
        self._word_of = self._words.split(1)
        self._num_collectives = 0
        # torch takes memory for pinned if the start of its storage is: the tensor must begin with the page.
        page = torch.frombuffer(
            beacon.map, dtype=torch.long, count=PAGE_BYTES // WORD.size, offset=beacon.gpu_at(local_rank)
        )
        self.address = page.data_ptr()
        self._slot, self._came_to = page[:1], page[CAME_TO_AT // WORD.size :][:1]
        self._is_locked = False
        self._left = 0
        self._last: Stage | None = None

    @classmethod
    def on(cls, device: torch.device, beacon: Beacon, local_rank: int) -> GpuMarks | None:
        """Return the marks of a CUDA device; None, with one line in the log, if it cannot write to the beacon."""
        marks = cls(device, beacon, local_rank)
        error = torch.cuda.cudart().cudaHostRegister(marks.address, PAGE_BYTES, 0)
        if int(error) == 0:
            marks._is_locked = True
            marks._came_to = torch.as_tensor(LockedWord(marks.address + CAME_TO_AT), device=device)
            return marks
        log.info("The GPU does not report its stages: cudaHostRegister returned %s.", error)
        with contextlib.suppress(RuntimeError):  # the error stays until the next launch, which must not be a step's
            marks._batch.fill_(0)
        return None

    def batch_begins(self, step: int) -> None:
        """A batch of `step` is about to be launched. Not captured."""
        self._left = 0  # a step that was given up in the middle has not ended
        self._batch.fill_(self.log.begins(step))

    def batch_is_launched(self) -> None:
        self.log.is_launched()

    def begins(self) -> None:
        """The GPU begins the batch once it gets here. One kernel makes all words."""
        torch.add(self._numbers, self._batch, alpha=1 << STAGE_BITS, out=self._words)
        self._num_collectives = 0
        self._left, self._last = MOST_GPU_MARKS - 1, None  # one is kept for the end
        self.mark(Stage.TRANSFER)

    def mark(self, stage: Stage) -> None:
        """The GPU is in `stage` once it gets here. Outside a batch, and beyond the 16th mark, nothing is marked."""
        if self._left > 0 and stage is not self._last:
            self._left, self._last = self._left - 1, stage
            self._slot.copy_(self._word_of[stage], non_blocking=True)

    def bring(self, values: Tensor) -> Tensor:
        """Return a copy of 8-byte numbers for a collective, to which the GPU has come once it gets here."""
        self._num_collectives = min(self._num_collectives + 1, len(self._word_of) - 1)
        copy = torch.empty_like(values)
        word = self._word_of[self._num_collectives]
        torch._foreach_copy_([copy.view(torch.long), self._came_to], [values.view(torch.long), word])  # one kernel
        return copy

    def ends(self) -> None:
        """The batch is done once the GPU gets here."""
        self._slot.copy_(self._word_of[Stage.END], non_blocking=True)
        self._left = 0

    def close(self) -> None:
        """Let the page go. Nothing that was captured may be replayed afterwards."""
        if self._is_locked:
            torch.cuda.synchronize(self._batch.device)
            torch.cuda.cudart().cudaHostUnregister(self.address)
            self._is_locked = False
        self.log.forget()


class LockedWord:
    """Eight bytes of pinned memory, which a kernel can write as if they were the GPU's own."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (1,), "typestr": "<i8", "version": 2}


# ---- stages of the model ----


def staged_modules(model: EncDecMaskedTokenPredModel) -> Iterator[tuple[nn.Module, Stage, int]]:
    """Every module that is a stage or a part of one."""
    yield model.preprocessor, Stage.PREPROCESSOR, 0
    yield model.quantizer, Stage.QUANTIZER, 0
    yield model.mask_processor, Stage.MASKING, 0
    yield model.encoder, Stage.ENCODER, 0
    yield model.encoder.pre_encode, Stage.ENCODER, PRE_ENCODE
    yield model.encoder.pos_enc, Stage.ENCODER, POSITIONS
    for number, layer in enumerate(model.encoder.layers):
        yield layer, Stage.ENCODER, FIRST_LAYER + number
    yield model.decoder, Stage.DECODER, 0
    yield model.loss, Stage.LOSS, 0


Enter = Callable[[Stage, int], None]


def mark_stages(model: EncDecMaskedTokenPredModel, enter: Enter) -> list[torch.utils.hooks.RemovableHandle]:
    """Call `enter` whenever a stage of the model begins."""
    return [
        module.register_forward_pre_hook(_stage_hook(enter, stage, part))
        for module, stage, part in staged_modules(model)
    ]


def _stage_hook(enter: Enter, stage: Stage, part: int) -> Callable[[nn.Module, Any], None]:
    def before(module: nn.Module, args: Any) -> None:
        # Inside a compiled graph a write to the beacon would break the graph; the stage around it is marked.
        if not torch.compiler.is_compiling():
            enter(stage, part)

    return may_be_skipped(before)


# ---- before the first step ----


def compare_starts(cfg: NestConfig, world: World, run_dir: Path | None, checkpoint: Path | None) -> None:
    """Refuse ranks whose configuration, code, versions or checkpoint differ."""
    facts = {
        "config": dataclasses.asdict(cfg),
        "code": code_version(Path(nest_ssl.__file__).parent),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "world_size": world.size,
        "run folder": run_dir,
        "checkpoint": None if checkpoint is None else checkpoint.name,
    }
    _compare(world, "start", facts, cfg.watchdog.init_s)


def compare_loaders(cfg: NestConfig, world: World, loaders: dict[str, Any], step: int) -> None:
    """Refuse ranks that would read other data, or another number of batches."""
    facts = {section: loader_facts(loader) for section, loader in loaders.items()}
    _compare(world, "loaders", {**facts, "step": step}, cfg.watchdog.init_s)


def _compare(world: World, name: str, facts: Facts, timeout_s: float) -> None:
    if world.size > 1:
        compare_ranks(group_store(), name, facts, rank=world.rank, world_size=world.size, timeout_s=timeout_s)


def loader_facts(loader: Any) -> dict[str, Any]:
    """What must agree between the loaders of all ranks. The plan's hash covers batch size, drop_last and data."""
    if not isinstance(loader, PlannedLoader):
        return {"loader": type(loader).__name__}
    return {
        "plan": loader.plan_hash[:16],
        "batches": "no end" if loader.batches.utterances_per_epoch() is None else len(loader),
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
    }


# ---- debug.trace and debug.barrier ----


def look_closer(
    debug: DebugConfig, model: EncDecMaskedTokenPredModel, watch: Watch, world: World, floor_s: float
) -> None:
    """Attach what `debug:` asks for."""
    if debug.trace:
        watch.trace = Trace(model, world)
    if debug.barrier and world.size > 1:
        wait_before_encoder(model, timedelta(seconds=BARRIER_SHARE * floor_s))


class Trace:
    """Prints, on every rank, what goes into and comes out of every stage. It reads every tensor back: slow on a GPU."""

    def __init__(self, model: EncDecMaskedTokenPredModel, world: World) -> None:
        self.rank, self.step = world.rank, 0
        self._since: dict[str, float] = {}
        self._say_settings(model)
        for module, stage, part in staged_modules(model):
            name = f"{stage.label} {part_label(stage, part)}".strip()
            module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            module.register_forward_hook(self._after(name), with_kwargs=True)

    def _say_settings(self, model: EncDecMaskedTokenPredModel) -> None:
        wanted, actual = model.cfg.encoder.sync_max_audio_length, model.encoder.sync_max_audio_length
        self.say(f"encoder.sync_max_audio_length: {actual} (config: {wanted})")
        if actual != wanted:
            raise ValueError(
                f"encoder.sync_max_audio_length is {actual}, and the configuration says {wanted}: the model was built "
                f"from another one."
            )
        ready = distributed.is_available() and distributed.is_initialized()
        backend = f"initialised, backend {distributed.get_backend()}" if ready else "not initialised"
        self.say(f"process group: {backend}")

    def backward_begins(self, loss: Tensor) -> None:
        self._since["backward"] = time.perf_counter()
        self.say(f"before backward: {describe(loss)}")

    def optimizer_begins(self, norm: Tensor) -> None:
        self.say(f"after backward, {self._elapsed_ms('backward'):.1f} ms")
        self.say(f"before optimizer: gradient norm {float(norm):.4g}")

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._since[name] = time.perf_counter()
            self.say(f"before {name}: {describe([*args, kwargs])}")

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.say(f"after {name}, {self._elapsed_ms(name):.1f} ms: {describe(output)}")

        return hook

    def _elapsed_ms(self, name: str) -> float:
        return 1e3 * (time.perf_counter() - self._since[name])

    def say(self, text: str) -> None:
        clock = time.strftime("%H:%M:%S")
        print(f"trace {clock} rank {self.rank} step {self.step}: {text}", file=sys.stderr, flush=True)


def describe(value: Any) -> str:
    """Every tensor in `value`: shape, dtype, device, NaN and Inf; short ones in full; batch sizes compared."""
    parts, sizes = [], set()
    for name, tensor in _tensors(value, ""):
        text = f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {tensor.device}".strip()
        if tensor.is_floating_point():
            text += f", {int(tensor.isnan().sum())} NaN, {int(tensor.isinf().sum())} Inf"
        if tensor.ndim <= 1 and tensor.numel() <= 64:
            text += f" {tensor.detach().tolist()}"
        if tensor.ndim >= 1:
            sizes.add(tensor.shape[0])
        parts.append(text)
    if len(sizes) > 1:
        parts.append(f"first dimensions differ: {sorted(sizes)}")
    return "; ".join(parts) or "no tensor"


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, str(key))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner, name)


def wait_before_encoder(model: EncDecMaskedTokenPredModel, timeout: timedelta) -> None:
    """Wait for all ranks before the encoder of every training step; rank 0 names those that do not arrive."""
    group = distributed.new_group(backend="gloo")  # the only backend that has this barrier

    def wait(module: nn.Module, args: Any) -> None:
        if module.training:
            distributed.monitored_barrier(group, timeout, wait_all_ranks=True)

    model.encoder.register_forward_pre_hook(wait, prepend=True)
