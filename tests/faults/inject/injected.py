"""The faults. Each happens once, at the given step, and notes when."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nest_ssl.data.batch.loader import PlanSampler
from nest_ssl.data.sources.files import AudioNoiseDataset
from nest_ssl.fast.engine import Engine
from nest_ssl.fast.graphs import Graphs
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.modules import AudioToMelSpectrogramPreprocessor, ConformerEncoder
from nest_ssl.modules.conformer import ConformerLayer
from nest_ssl.training.loop import Loop
from nest_ssl.training.step import TrainStep
from nest_ssl.training.validation import Validation
from nest_ssl.training.watching import Watch
from nest_ssl.watchdog.rank import Stage

FOREVER_S = 3600.0


class Now:
    """The position of this rank."""

    step = -1
    validates = False


def note() -> None:
    """Record the time of the fault."""
    Path(os.environ["NEST_FAULT_NOTE"]).write_text(str(time.time()))


def sleep() -> None:
    time.sleep(FOREVER_S)


def spin() -> None:
    while True:
        pass


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(int(FOREVER_S))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise KeyError("a bug in somebody's code")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.1 GiB in all.")


def lose_gpu() -> None:
    raise RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later.")


def extra_all_reduce() -> None:
    torch.distributed.all_reduce(torch.ones(7, device="cuda" if torch.distributed.get_backend() == "nccl" else "cpu"))


def allocate_nothing_more() -> None:
    """Let the next memory that the GPU is asked for be too much."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)


def fail_to_capture() -> None:
    raise RuntimeError("an operation that cannot be captured")


FAULTS = (
    *(sleep, spin, hold_the_gil, kill, freeze, fail, run_out_of_memory, lose_gpu, extra_all_reduce),
    *(allocate_nothing_more, fail_to_capture),
)
ACTS: dict[str, Callable[[], None]] = {act.__name__: act for act in FAULTS}


def before(owner: Any, name: str, act: Callable[..., Any]) -> None:
    """Call `act` before every call of `owner.name`, with the same arguments."""
    real = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return real(*args, **kwargs)

    setattr(owner, name, wrapped)


def once_at(step: int, act: Callable[[], None], *, validates: bool = False) -> Callable[..., None]:
    done = False

    def maybe(*args: Any, **kwargs: Any) -> None:
        nonlocal done
        if not done and Now.step >= step and Now.validates == validates:
            done = True
            note()
            act()

    return maybe


def install(name: str, step: int) -> None:
    def start_step(self: TrainStep, *args: Any, **kwargs: Any) -> None:
        Now.step, Now.validates = kwargs["step"], False

    def start_validation(self: Validation, *args: Any, **kwargs: Any) -> None:
        Now.validates = True

    before(TrainStep, "__call__", start_step)
    before(Validation, "_run_set", start_validation)
    if name in SPECIAL:
        SPECIAL[name](step)
        return
    where, _, what = name.partition(":")
    act = once_at(step, ACTS[what], validates=where == "validation")
    PLACES[where](act)


def _in_layer_1(act: Callable[[], None]) -> None:
    def maybe(self: ConformerLayer, *args: Any, **kwargs: Any) -> None:
        if self is Now.layer_1:  # type: ignore[attr-defined]
            act()

    def remember(self: ConformerEncoder, *args: Any, **kwargs: Any) -> None:
        Now.layer_1 = self.layers[1]  # type: ignore[attr-defined]

    before(ConformerEncoder, "forward", remember)
    before(ConformerLayer, "forward", maybe)


def _in_backward(act: Callable[[], None]) -> None:
    real = EncDecDenoiseMaskedTokenPredModel.masked_loss

    def wrapped(self: EncDecDenoiseMaskedTokenPredModel, *args: Any, **kwargs: Any) -> Any:
        predicted = real(self, *args, **kwargs)
        if predicted.loss.requires_grad:
            predicted.loss.register_hook(lambda gradient: act())
        return predicted

    EncDecDenoiseMaskedTokenPredModel.masked_loss = wrapped  # type: ignore[method-assign]


PLACES: dict[str, Callable[[Callable[[], None]], None]] = {
    "encoder": lambda act: before(ConformerEncoder, "forward", act),
    "validation": lambda act: before(ConformerEncoder, "forward", act),
    "preprocessor": lambda act: before(AudioToMelSpectrogramPreprocessor, "forward", act),
    "optimizer": lambda act: before(importlib.import_module("torch.optim.adam"), "adam", act),
    "step": lambda act: before(TrainStep, "__call__", act),
    "reading": lambda act: before(AudioNoiseDataset, "source", act),
    "launch": lambda act: before(Engine, "_launch", act),
    "capture": lambda act: before(Graphs, "capture", act),
    "layer_1": _in_layer_1,
    "backward": _in_backward,
}


# ---- faults that are more than one act in one place ----


def slow_rank(step: int) -> None:
    before(ConformerEncoder, "forward", lambda *args, **kwargs: time.sleep(0.2))


def in_the_loader(act: Callable[[], None]) -> Callable[[int], None]:
    """Return a fault that acts in a DataLoader worker when it reads its `step`-th file."""

    def install_it(step: int) -> None:
        count = 0

        def maybe(*args: Any, **kwargs: Any) -> None:
            nonlocal count
            count += 1
            if count == step and torch.utils.data.get_worker_info() is not None:
                note()
                act()

        before(AudioNoiseDataset, "source", maybe)

    return install_it


def nan_batch(step: int) -> None:
    def poison(self: TrainStep, batch: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs["step"] == step:
            note()
            batch.noisy_audio[0, :100] = float("nan")

    before(TrainStep, "__call__", poison)


def one_batch_short(step: int) -> None:
    """Make this rank ignore the plan: its epoch is one batch short."""
    real_len, real_iter = PlanSampler.__len__, PlanSampler.__iter__
    # Only in training: validation repeats its one epoch.
    PlanSampler.__len__ = lambda self: real_len(self) - (not self.same_every_epoch)  # type: ignore[method-assign]

    def short(self: PlanSampler) -> Any:
        specs = list(real_iter(self))
        return iter(specs if self.same_every_epoch else specs[:-1])

    PlanSampler.__iter__ = short  # type: ignore[method-assign]


def joins_late(step: int) -> None:
    note()
    time.sleep(FOREVER_S)


def killed_while_saving(step: int) -> None:
    real = torch.save

    def save_half(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if Now.step >= step:
            file.write(b"half a checkpoint")
            file.flush()
            note()
            kill()
        real(content, file, *args, **kwargs)

    torch.save = save_half  # type: ignore[assignment]


def all_reduce_in_forward(step: int) -> None:
    """Agree on the longest audio of all ranks in every forward pass, as NeMo's encoder did."""

    def agree(self: ConformerEncoder, *args: Any, **kwargs: Any) -> None:
        longest = torch.tensor([kwargs["audio_signal"].shape[-1]])
        torch.distributed.all_reduce(longest, op=torch.distributed.ReduceOp.MAX)

    before(ConformerEncoder, "forward", agree)


def the_original_hang(step: int) -> None:
    """`all_reduce_in_forward`, and rank 1 silently has one batch less."""
    all_reduce_in_forward(step)
    if os.environ["RANK"] == "1":
        real_iter = PlanSampler.__iter__

        def short(self: PlanSampler) -> Any:
            yield from list(real_iter(self))[:-1]
            note()

        PlanSampler.__iter__ = short  # type: ignore[method-assign]


def slow_but_well(step: int) -> None:
    """Make the first step and every validation batch take longer than the floor, on all ranks."""

    def first(*args: Any, **kwargs: Any) -> None:
        if Now.validates or Now.step == 0:
            time.sleep(4.0)

    before(ConformerEncoder, "forward", first)


def slow_validation(step: int) -> None:
    """Make every validation batch take a second; note the first."""
    begin = once_at(step, lambda: None, validates=True)

    def wait(*args: Any, **kwargs: Any) -> None:
        begin()
        if Now.validates:
            time.sleep(1.0)

    before(ConformerEncoder, "forward", wait)


def slow_then_sleep(step: int) -> None:
    """Make every step take a tenth of a second, and `step` never end."""
    stop = once_at(step, sleep)

    def wait(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.1)
        stop()

    before(ConformerEncoder, "forward", wait)


def slow_second_epoch(step: int, blocks_at: int = 0) -> None:
    """Make every file take two seconds from the second epoch on; or let the `blocks_at`-th of those never end."""
    count = 0

    def wait(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        if Now.step < 0:
            return
        count += 1
        if count == (blocks_at or 1):
            note()
        time.sleep(FOREVER_S if count == blocks_at else 2.0)

    before(AudioNoiseDataset, "source", wait)


def uses_up_memory(step: int) -> None:
    """Take memory until the kernel objects."""
    taken: list[bytearray] = []

    def take() -> None:
        for _ in range(64):  # 4 GB at most, should the limit not hold
            taken.append(bytearray(os.urandom(2**20)) * 64)

    before(ConformerEncoder, "forward", once_at(step, take))


def list_collectives(step: int) -> None:
    """Append the collectives of every step to the note."""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    seen = 0

    def dump(self: Loop, *args: Any, **kwargs: Any) -> None:
        nonlocal seen
        entries = json.loads(_dump_fr_trace_json())["entries"][seen:]
        seen += len(entries)
        with Path(os.environ["NEST_FAULT_NOTE"]).open("a") as file:
            file.write(json.dumps([entry["profiling_name"] for entry in entries]) + "\n")

    before(Loop, "_note_metrics", dump)


def gpu_spins(where: Stage) -> Callable[[int], None]:
    """Return a fault that has the GPU enter a kernel that does not end, in a stage of a step that may be captured."""
    return lambda step: _install_spinning(where, step)


def _install_spinning(where: Stage, step: int) -> None:
    from spinning import spin_while  # type: ignore[import-not-found]  # needs Triton

    flags: list[torch.Tensor] = []

    def begin() -> None:
        flags[0].fill_(1)

    set_flag = once_at(step, begin)

    def prepare(self: TrainStep, *args: Any, **kwargs: Any) -> None:
        if not flags:  # outside the step, whose memory is not kept
            flags.append(torch.zeros(1, dtype=torch.int32, device="cuda"))
        set_flag()

    real = Watch.enter

    def enter(self: Watch, stage: Stage, part: int = 0) -> None:
        real(self, stage, part)
        if stage is where and not self.validates:
            spin_while[(1,)](flags[0], num_warps=1)

    Watch.enter = enter  # type: ignore[method-assign]
    before(TrainStep, "_launch", prepare)


def other_graph(step: int) -> None:
    """Replay, once, the graph of a batch that does not update in place of one that does: it has no exchange."""
    real, done = Graphs.find, False

    def find(self: Graphs, key: Any) -> Any:
        nonlocal done
        batch_size, num_samples, (updates, context) = key
        other = real(self, (batch_size, num_samples, (False, context)))
        if done or not updates or Now.step < step or other is None:
            return real(self, key)
        done = True
        note()
        return other

    Graphs.find = find  # type: ignore[method-assign]


SPECIAL: dict[str, Callable[[int], None]] = {
    "gpu_spins:backward": gpu_spins(Stage.BACKWARD),
    "gpu_spins:exchange": gpu_spins(Stage.EXCHANGE),
    "other_graph": other_graph,
    "slow_rank": slow_rank,
    "loader:kill": in_the_loader(kill),
    "loader:freeze": in_the_loader(freeze),
    "nan_batch": nan_batch,
    "one_batch_short": one_batch_short,
    "joins_late": joins_late,
    "killed_while_saving": killed_while_saving,
    "the_original_hang": the_original_hang,
    "slow_but_well": slow_but_well,
    "slow_validation": slow_validation,
    "slow_then_sleep": slow_then_sleep,
    "slow_second_epoch": slow_second_epoch,
    "slow_second_epoch_blocks": lambda step: slow_second_epoch(step, blocks_at=step),
    "uses_up_memory": uses_up_memory,
    "list_collectives": list_collectives,
}
