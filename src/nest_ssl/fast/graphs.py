"""Training steps as CUDA graphs: a step whose shape has been seen before is one launch instead of thousands.

Small batches spend their time on launching kernels: without graphs 8 × 16 s takes as long as 32 ×
16 s (123 and 136 ms on an H200; 18 and 36 ms with them). A graph holds forward and backward and
leaves the gradients in static buffers, which become the parameters' `.grad`: nothing is allocated
or copied after a replay. All graphs share these buffers and one memory pool. Audio is padded to one
of few sizes (results do not change), so that shapes repeat.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.modules.conformer import ConformerConvolution

if TYPE_CHECKING:
    from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
    from nest_ssl.objective import MaskedPrediction

MEMORY_SHARE = 0.05
"""At most this share of the GPU's memory is for what graphs hold between steps: batches and predictions, 0.2 GB
for 64 × 16 s and 8192 codes. The memory in which they compute is shared by all of them."""

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""Audio, its lengths, noisy audio, its lengths."""

Predict = Callable[[Batch, Tensor], "MaskedPrediction"]
"""The forward pass of a padded batch, whose size before padding is a scalar tensor."""

Hook = TypeVar("Hook", bound=Callable[..., Any])

_BUILT_FROM = ("torch.nn.modules.", "nest_ssl.")
_FSDP = "torch.distributed.fsdp."


def obstacle_to_graphs(model: EncDecDenoiseMaskedTokenPredModel) -> str | None:
    """Return why the model's steps cannot be graphs, or None."""
    if len(model.encoder.cfg.attention_contexts) > 1:
        return "encoder.att_context_size has several contexts, and every step draws one"
    norms = {type(m.batch_norm) for m in model.modules() if isinstance(m, ConformerConvolution)}
    if not norms <= {nn.BatchNorm1d, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d}:
        return "the batch norm is synchronised between ranks (trainer.sync_batchnorm=false allows graphs)"
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
        if self.samples_per_frame == 0:
            return num_samples
        num_frames = num_samples // self.samples_per_frame + 1
        grain = max(2, 1 << max(1, num_frames // 32).bit_length() - 1)
        return -(-num_frames // grain) * grain * self.samples_per_frame - 1


def padding_is_exact(model: EncDecDenoiseMaskedTokenPredModel) -> bool:
    """Return whether frames may be added to a batch without changing its results: not if a norm counts them."""
    norms = {type(m.batch_norm) for m in model.encoder.modules() if isinstance(m, ConformerConvolution)}
    return norms <= {nn.BatchNorm1d, nn.LayerNorm}


def padded(batch: Batch, size: int) -> tuple[Batch, Tensor]:
    """Return a copy of the batch with `size` samples, and how many it had."""
    audio, audio_len, noisy_audio, noisy_audio_len = batch
    pads = (0, size - audio.shape[1])
    num_samples = torch.full((), audio.shape[1], device=audio.device)
    return (F.pad(audio, pads), audio_len.clone(), F.pad(noisy_audio, pads), noisy_audio_len.clone()), num_samples


class Graphs:
    """The captured steps of a model, by batch size, padded audio size, and whether gradients are added.

    The model must stay on its device, with the parameters it has; otherwise make new graphs.
    """

    def __init__(
        self, model: nn.Module, params: Sequence[nn.Parameter], predict: Predict, memory_share: float = MEMORY_SHARE
    ) -> None:
        self._model, self._params, self._predict, self._memory_share = model, list(params), predict, memory_share
        self._device = self._params[0].device
        self._graphs: dict[tuple[int, int, bool], StepGraph] = {}
        self._pool: Any = None
        self._grads: list[Tensor | None] = [torch.zeros_like(p) for p in self._params]
        self._share = torch.ones((), device=self._device)
        self._share_value = 1.0

    def __len__(self) -> int:
        return len(self._graphs)

    def has_room(self) -> bool:
        held = sum(graph.num_bytes for graph in self._graphs.values())
        return held < self._memory_share * torch.cuda.get_device_properties(self._device).total_memory

    def find(self, batch_size: int, num_samples: int, adds: bool) -> StepGraph | None:
        return self._graphs.get((batch_size, num_samples, adds))

    def capture(self, batch: Batch, num_samples: int, adds: bool) -> StepGraph:
        """Record a step of this batch, padded to `num_samples`. Recording runs nothing: replay it."""
        own_batch, own_size = padded(batch, num_samples)
        leaves = {p: nn.Parameter(p.detach()) for p in self._params}

        def run() -> MaskedPrediction:
            with with_parameters(self._model, leaves):
                prediction = self._predict(own_batch, own_size)
                found = torch.autograd.grad(
                    prediction.loss,
                    list(leaves.values()),
                    grad_outputs=self._share.to(prediction.loss.dtype),
                    allow_unused=True,
                )
            # A parameter that the loss does not reach has no gradient, as without graphs.
            self._grads = [None if grad is None else own for own, grad in zip(self._grads, found, strict=True)]
            into = [own for own in self._grads if own is not None]
            grads = [grad for grad in found if grad is not None]
            (torch._foreach_add_ if adds else torch._foreach_copy_)(into, grads)
            return prediction.detached()

        self._pool = self._pool or new_pool()
        graph, prediction = record(run, self._pool)
        made = StepGraph(graph, own_batch, own_size, prediction, filled=batch[0].shape[1])
        self._graphs[batch[0].shape[0], num_samples, adds] = made
        return made

    def replay(self, graph: StepGraph, batch: Batch, share: float, adds: bool) -> MaskedPrediction:
        """Run a captured step on this batch. Its gradients are then the parameters' `.grad`."""
        if adds:
            self._take_over_gradients()
        if share != self._share_value:
            self._share.fill_(share)
            self._share_value = share
        graph.load(batch)
        graph.graph.replay()
        for p, grad in zip(self._params, self._grads, strict=True):
            if p.grad is not grad:
                p.grad = grad
        return graph.prediction

    def _take_over_gradients(self) -> None:
        """Copy gradients that an uncaptured step left elsewhere into the buffers that the graphs add to."""
        into, given = [], []
        for p, own in zip(self._params, self._grads, strict=True):
            if own is None or p.grad is own:
                continue
            if p.grad is None:
                own.zero_()
            else:
                into.append(own)
                given.append(p.grad)
        if into:
            torch._foreach_copy_(into, given)


@dataclass
class StepGraph:
    """A captured step and the memory it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    num_samples: Tensor
    prediction: MaskedPrediction
    filled: int
    """Samples per row that may be other than zero."""

    @property
    def num_bytes(self) -> int:
        """What is held until the next replay."""
        return sum(tensor.nbytes for tensor in (*self.batch, *vars(self.prediction).values()))

    def load(self, batch: Batch) -> None:
        audio, audio_len, noisy_audio, noisy_audio_len = self.batch
        size = batch[0].shape[1]
        for ours, given in ((audio, batch[0]), (noisy_audio, batch[2])):
            if size < self.filled:
                ours[:, size : self.filled].zero_()
            ours[:, :size].copy_(given, non_blocking=True)
        audio_len.copy_(batch[1], non_blocking=True)
        noisy_audio_len.copy_(batch[3], non_blocking=True)
        if size != self.filled:
            self.num_samples.fill_(size)
            self.filled = size


def new_pool() -> Any:
    return torch.cuda.graph_pool_handle()


def record(run: Callable[[], MaskedPrediction], pool: Any) -> tuple[torch.cuda.CUDAGraph, MaskedPrediction]:
    """Capture what `run` launches; its result holds no values before the first replay."""
    graph = torch.cuda.CUDAGraph()
    # A weight cast to bf16 before the capture would be read, unchanged, by every replay.
    torch.clear_autocast_cache()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()
    torch.clear_autocast_cache()
    return graph, result


@contextlib.contextmanager
def with_parameters(model: nn.Module, others: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Put `others` in place of the model's parameters: the same memory, but unknown to autograd.

    A parameter that autograd knows, from an earlier step that somebody still holds, belongs to the
    stream it was first used on, and a capture may not touch another stream.
    """
    places = [(module, name, p) for module in model.modules() for name, p in module._parameters.items() if p in others]
    for module, name, p in places:
        module._parameters[name] = others[p]  # type: ignore[index]
    try:
        yield
    finally:
        for module, name, p in places:
            module._parameters[name] = p


# ---- what calling a part would do, and reading its weights would not ----


def is_as_built(module: nn.Module) -> bool:
    """Return False if a part was replaced (adapters, parametrisations) or has a hook that must run.

    Code that reads the weights of parts instead of calling them must ask. Sharded parts are as built, but their weights
    are there only inside a call of them (`is_sharded`).
    """
    return "forward" not in vars(module) and all(_is_plain(part) for part in module.modules() if part is not module)


def _is_plain(part: nn.Module) -> bool:
    kind = type(part).__mro__[2] if is_sharded(part) else type(part)  # torch's class, FSDPModule, then the part's own
    has_own_forward = kind.__module__.startswith(_BUILT_FROM) and "forward" not in vars(part)
    return has_own_forward and not any(must_run(hook) for hook in hooks_of(part) if not _gathers(hook))


def is_sharded(part: nn.Module) -> bool:
    """Return whether FSDP2 shares out the weights of this part: its hooks gather them when the part is called."""
    return type(part).__module__.startswith(_FSDP)


def _gathers(hook: Callable[..., Any]) -> bool:
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
