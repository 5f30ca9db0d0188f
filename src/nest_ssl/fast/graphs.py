"""Training steps as CUDA graphs: a step whose shape has been seen before is one launch instead of thousands.

Small batches spend their time on launching kernels: without graphs 8 × 16 s takes as long as 32 ×
16 s (123 and 136 ms on an H200; 18 and 36 ms with them). A graph holds a whole step: forward,
backward, and what the caller does with the gradients. It computes in memory that all graphs, and
steps that are not captured, share (`Lane`): nothing that is made in a step may outlive it. Audio is
padded to one of few sizes (results do not change), so that shapes repeat.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.modules.batch_norm import SynchronizedBatchNorm
from nest_ssl.modules.conformer import ConformerConvolution

if TYPE_CHECKING:
    from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
    from nest_ssl.objective import MaskedPrediction

SPARE_BYTES = 2**29
"""Memory that must be free on the GPU before a step is captured: the driver keeps some for every graph."""

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""Audio, its lengths, noisy audio, its lengths."""

Predict = Callable[[], "MaskedPrediction"]
"""The forward pass of a step."""

Key = tuple[int, int, Hashable]
"""Batch size, padded audio size, and what else tells steps apart."""

Hook = TypeVar("Hook", bound=Callable[..., Any])

_BUILT_FROM = ("torch.nn.modules.", "nest_ssl.")
_FSDP = "torch.distributed.fsdp."


def obstacle_to_graphs(model: EncDecDenoiseMaskedTokenPredModel) -> str | None:
    """Return why the model's steps cannot be graphs, or None."""
    norms = {type(m.batch_norm) for m in model.modules() if isinstance(m, ConformerConvolution)}
    if not norms <= {nn.BatchNorm1d, SynchronizedBatchNorm, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d}:
        return "the convolutions have a norm of another library"
    if any(must_run(hook) for module in model.modules() for hook in hooks_of(module)):
        return "the model has a hook, and a graph calls none"
    return None


@dataclass(frozen=True)
class Padding:
    """To which size audio is padded: one of 32 or more between a size and its double, at most 3 % or two frames."""

    samples_per_frame: int
    """Samples of one encoder frame; 0: no padding, because it would change the results."""

    @classmethod
    def of(cls, model: EncDecDenoiseMaskedTokenPredModel) -> Padding:
        if model.pre_encoder is not None or not padding_is_exact(model):
            return cls(0)
        return cls(model.preprocessor.featurizer.cfg.num_stride_samples * model.encoder.subsampling_factor)

    def size(self, num_samples: int) -> int:
        """Return the padded size of audio of this size."""
        num_frames = num_samples // self.samples_per_frame + 1 if self.samples_per_frame else 1
        return self.whole_frames(num_samples, max(2, 1 << max(1, num_frames // 32).bit_length() - 1))

    def whole_frames(self, num_samples: int, grain: int = 1) -> int:
        """Return the size rounded up to a multiple of `grain` encoder frames: enough where a plan has few sizes."""
        if self.samples_per_frame == 0:
            return num_samples
        num_frames = num_samples // self.samples_per_frame + 1
        return -(-num_frames // grain) * grain * self.samples_per_frame - 1


def padding_is_exact(model: EncDecDenoiseMaskedTokenPredModel) -> bool:
    """Return whether frames may be added to a batch without changing its results: not if a norm counts them."""
    norms = {type(m.batch_norm) for m in model.encoder.modules() if isinstance(m, ConformerConvolution)}
    return norms <= {nn.BatchNorm1d, SynchronizedBatchNorm, nn.LayerNorm}


def padded(batch: Batch, size: int) -> tuple[Batch, Tensor]:
    """Return a copy of the batch with `size` samples, and how many it had."""
    audio, audio_len, noisy_audio, noisy_audio_len = batch
    pads = (0, size - audio.shape[1])
    num_samples = torch.full((), audio.shape[1], device=audio.device)
    return (F.pad(audio, pads), audio_len.clone(), F.pad(noisy_audio, pads), noisy_audio_len.clone()), num_samples


@dataclass
class Work:
    """What a step does with its prediction, on the device alone: it may be captured, and then no Python runs."""

    run: Callable[[Predict], None]
    """Calls the forward pass, and everything after it. Keeps nothing that it makes."""
    hold: Tensor
    """Scalar; where true, the step changes no weights."""
    outcome: Tensor
    """(2,) loss and gradient norm of the latest step."""
    volatile: Callable[[], Sequence[Tensor]]
    """What a step changes even where it is held."""


@torch.no_grad()
def put_back(tensors: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """Give tensors the values they had before a step that does not count."""
    for tensor, value in zip(tensors, kept, strict=True):
        tensor.copy_(value)


class Lane:
    """The stream on which steps run, captured or not, and the memory in which they compute.

    Memory that a graph uses only while it runs is free for the next step, whatever that is. So a
    tensor that is made in a step must not be kept beyond it, except in the first one, before there
    is any graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._index = device, torch.cuda._utils._get_device_index(device)
        self.stream = torch.cuda.Stream(device)
        self._kept: weakref.finalize[Any, Any] | None = None
        self.renew()

    def renew(self) -> None:
        """Start with other memory; the old one is free once no graph uses it."""
        if self._kept is not None:
            self._kept()
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._kept = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Launch on the stream, after what was launched before; what is launched later waits."""
        around = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(around)
        with torch.cuda.stream(self.stream):
            yield
        around.wait_stream(self.stream)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """The same, and allocate in the shared memory: in the backward pass too, whose thread has this stream."""
        with self.entered():
            torch._C._cuda_beginAllocateCurrentStreamToPool(self._index, self._pool)
            try:
                yield
            finally:
                torch._C._cuda_endAllocateToPool(self._index, self._pool)
                # Torch counts who uses the memory. The first use counts for as long as there is this lane; torch's own
                # MemPool would insist on going after all graphs, in whatever order they are collected.
                release = functools.partial(torch._C._cuda_releasePool, self._index, self._pool)
                if self._kept is None:
                    self._kept = weakref.finalize(self, release)
                    self._kept.atexit = False
                else:
                    release()

    def record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture what `run` launches; nothing runs before the first replay."""
        graph = torch.cuda.CUDAGraph()
        # A weight cast to bf16 before the capture would be read, unchanged, by every replay.
        torch.clear_autocast_cache()
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
            run()
        torch.clear_autocast_cache()
        return graph

    def has_room(self, num_bytes: int) -> bool:
        """Whether another graph fits, whose inputs need this much."""
        return torch.cuda.mem_get_info(self.device)[0] > num_bytes + SPARE_BYTES


def random_state(device: torch.device) -> Tensor:
    state: Tensor = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def renew_generator(device: torch.device, state: Tensor) -> None:
    """After a capture that failed: torch's generator would believe for ever that it is being captured.

    Graphs that were captured before keep the old one.
    """
    if device.type == "cuda":
        index = torch.cuda._utils._get_device_index(device)
        torch.cuda.default_generators[index].graphsafe_set_state(torch.Generator(device))
    set_random_state(device, state)


class Inputs:
    """Where a graph finds its batch: a place that all graphs share as far as it is large enough."""

    def __init__(self, storage: Tensor, batch_size: int, num_samples: int) -> None:
        audio, noisy = storage[: 2 * batch_size * num_samples].view(2, batch_size, num_samples)
        lengths = torch.zeros(2, batch_size, dtype=torch.long, device=storage.device)
        self.batch: Batch = (audio, lengths[0], noisy, lengths[1])
        self.num_samples = torch.zeros((), dtype=torch.long, device=storage.device)
        """Of the batch before it was padded."""
        self._size = 0

    @classmethod
    def num_values(cls, batch_size: int, num_samples: int) -> int:
        return 2 * batch_size * num_samples

    def load(self, batch: Batch) -> None:
        size = batch[0].shape[1]
        for ours, given in ((self.batch[0], batch[0]), (self.batch[2], batch[2])):
            ours[:, :size].copy_(given, non_blocking=True)
            ours[:, size:].zero_()
        self.batch[1].copy_(batch[1], non_blocking=True)
        self.batch[3].copy_(batch[3], non_blocking=True)
        if size != self._size:
            self.num_samples.fill_(size)
            self._size = size


@dataclass
class StepGraph:
    """A captured step and the batch it reads."""

    graph: torch.cuda.CUDAGraph
    inputs: Inputs

    def replay(self, batch: Batch) -> None:
        self.inputs.load(batch)
        self.graph.replay()


class Graphs:
    """The captured steps of a run, by shape."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._graphs: dict[Key, StepGraph] = {}
        self._dropped: list[StepGraph] = []
        self._storage = torch.empty(0, device=lane.device)
        self.largest = 0
        """Values of the largest batch that will come, where that is known: the place for inputs is made once."""

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, key: Key) -> StepGraph | None:
        return self._graphs.get(key)

    def shapes(self) -> set[tuple[int, int]]:
        """Batch size and padded audio size of every graph."""
        return {key[:2] for key in self._graphs}

    def has_room(self, key: Key) -> bool:
        missing = max(Inputs.num_values(*key[:2]), self.largest) - self._storage.numel()
        return self.lane.has_room(self._storage.itemsize * max(missing, 0))

    def capture(self, key: Key, batch: Batch, run: Callable[[Batch, Tensor], None]) -> StepGraph:
        """Record `run` on batches of this shape; `batch` is only an example, which the first replay overwrites."""
        num_values = max(Inputs.num_values(*key[:2]), self.largest)
        if num_values > self._storage.numel():
            self._storage = torch.empty(num_values, device=self.lane.device)
        inputs = Inputs(self._storage, *key[:2])
        inputs.load(batch)
        made = StepGraph(self.lane.record(lambda: run(inputs.batch, inputs.num_samples)), inputs)
        self._graphs[key] = made
        return made

    def drop(self, key: Key) -> None:
        """Forget a graph. It goes together with the others: where one goes, recent torch (pytorch/pytorch#193402)
        frees the cuBLAS workspaces of its stream, which all graphs of a lane compute in.
        """
        if key in self._graphs:
            self._dropped.append(self._graphs.pop(key))


class Leaves:
    """Stand-ins for a model's parameters: the same memory, but unknown to autograd.

    A parameter that autograd knows, from an earlier step that somebody still holds, belongs to the
    stream it was first used on, and a capture may not touch another stream.
    """

    def __init__(self, model: nn.Module, params: Sequence[nn.Parameter]) -> None:
        self.of: Mapping[nn.Parameter, nn.Parameter] = {p: nn.Parameter(p.detach()) for p in params}
        self._places = [
            (module, name, p) for module in model.modules() for name, p in module._parameters.items() if p in self.of
        ]

    @contextlib.contextmanager
    def in_the_model(self) -> Iterator[None]:
        for module, name, p in self._places:
            module._parameters[name] = self.of[p]
        try:
            yield
        finally:
            for module, name, p in self._places:
                module._parameters[name] = p


# ---- what calling a part would do, and reading its weights would not ----


def is_as_built(module: nn.Module) -> bool:
    """Return False if a part was replaced (adapters, parametrisations) or has a hook that must run.

    Code that reads the weights of parts instead of calling them must ask. Sharded parts are as built, but their weights
    are there only inside a call of them.
    """
    return "forward" not in vars(module) and all(_is_plain(part) for part in module.modules() if part is not module)


def _is_plain(part: nn.Module) -> bool:
    is_sharded = type(part).__module__.startswith(_FSDP)
    kind = type(part).__mro__[2] if is_sharded else type(part)  # torch's class, FSDPModule, then the part's own
    has_own_forward = kind.__module__.startswith(_BUILT_FROM) and "forward" not in vars(part)
    return has_own_forward and not any(must_run(hook) for hook in hooks_of(part) if not _gathers(hook))


def _gathers(hook: Callable[..., Any]) -> bool:
    """Return whether this is FSDP2's hook, which gathers the weights of a part that is called."""
    return type(getattr(hook, "__self__", None)).__module__.startswith(_FSDP)


def may_be_skipped(hook: Hook) -> Hook:
    """Mark a hook that a step may leave out."""
    hook.may_be_skipped = True  # type: ignore[attr-defined]
    return hook


def must_run(hook: Callable[..., Any]) -> bool:
    return not getattr(hook, "may_be_skipped", False)


def hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """The hooks of a module's forward and backward pass."""
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()
    yield from module._backward_pre_hooks.values()
    yield from module._backward_hooks.values()
