"""The training objective as CUDA graphs: a step whose shape has been seen before is one launch instead of thousands.

Small batches spend their time on launching kernels: 8 × 16 s takes about as long as 32 × 16 s. A graph holds forward
and backward; `CapturedLoss` gives the gradients it left behind to autograd, so that optimizers, clipping, accumulation
and DDP see nothing new. Audio is padded to one of few sizes (results do not change), so that shapes repeat.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel, MaskedPrediction
from nest_ssl.modules.as_built import hooks_of, is_as_built, must_run
from nest_ssl.modules.fast_path import padding_is_exact, say_once

MEMORY_SHARE = 0.05
"""Of the GPU's memory, at most this is for what graphs hold between steps: batch and predictions, 0.2 GB for 64 × 16 s
and 8192 codes. The memory in which they compute is one and the same."""

Batch = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass
class _Graph:
    """A captured step and the memory it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    num_samples: Tensor
    prediction: MaskedPrediction
    grads: list[Tensor]

    @property
    def num_bytes(self) -> int:
        """What is held until the next replay."""
        return sum(tensor.nbytes for tensor in (*self.batch, *vars(self.prediction).values()))

    def replay(self, batch: Batch) -> None:
        size = batch[0].shape[1]
        for ours, given in zip(self.batch, batch, strict=True):
            if given.ndim == 2:
                ours[:, size:].zero_()
                ours = ours[:, :size]
            ours.copy_(given, non_blocking=True)
        self.num_samples.fill_(size)
        self.graph.replay()


class CapturedLoss:
    """Called like `model.masked_loss`, with the same result; a prediction is valid until the next call.

    The first step of a shape, forward and backward, runs as it is; the second is captured. Where it cannot be, one line
    says why. The model is looked at once: call `refresh` after freezing parameters, adding hooks or moving it.
    """

    def __init__(self, model: EncDecDenoiseMaskedTokenPredModel, memory_share: float = MEMORY_SHARE) -> None:
        self.model, self.memory_share = model, memory_share
        self.refresh()

    def refresh(self) -> None:
        """Forget all graphs, and look at the model again."""
        self._params = [p for p in self.model.parameters() if p.requires_grad]
        self._grads: list[Tensor] = []
        self._seen: set[tuple[Any, ...]] = set()
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._pool: Any = None
        self._obstacle = obstacle_of(self.model)
        self._as_built = is_as_built(self.model.encoder)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def __call__(
        self, audio: Tensor, audio_len: Tensor, noisy_audio: Tensor, noisy_audio_len: Tensor
    ) -> MaskedPrediction:
        batch = (audio, audio_len, noisy_audio, noisy_audio_len)
        if not (audio.is_cuda and self._as_built and self.model.encoder.takes_fast_path(audio)):
            return self.model.masked_loss(*batch)
        precision = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        obstacle = self._obstacle
        if precision == torch.float16:
            obstacle = "float16 needs a scale that changes from step to step; use bf16"
        elif audio.shape != noisy_audio.shape:
            obstacle = "clean and noisy audio differ in size"
        if obstacle is not None:
            say_once(f"no CUDA graphs: {obstacle}.")
            return self.model.masked_loss(*batch)
        key = (audio.shape[0], friendly_num_samples(self.model, audio.shape[1]), precision, audio.device)
        graph = self._graphs.get(key)
        if graph is None and (key not in self._seen or self._is_full(audio.device)):
            padded, num_samples = _padded(batch, key[1])  # the shape of the capture: all it needs is compiled here
            prediction = self.model.masked_loss(*padded, num_samples=num_samples)
            prediction.loss.register_hook(lambda _: self._seen.add(key))
            return prediction
        if graph is None:
            graph = self._graphs[key] = self._capture(*_padded(batch, key[1]))
        loss: Tensor = _Replay.apply(graph, batch, *self._params)  # type: ignore[no-untyped-call]
        found = graph.prediction
        return MaskedPrediction(loss, found.log_probs_GKH, found.targets_GH, found.counts_G, found.num_valid)

    def _is_full(self, device: torch.device) -> bool:
        held = sum(graph.num_bytes for graph in self._graphs.values())
        return held >= self.memory_share * torch.cuda.get_device_properties(device).total_memory

    def _capture(self, batch: Batch, num_samples: Tensor) -> _Graph:
        if not self._grads:
            self._grads = [torch.zeros_like(p) for p in self._params]
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # A weight cast to bf16 before the capture would be read, unchanged, by every replay.
        torch.clear_autocast_cache()
        leaves = {p: nn.Parameter(p.detach()) for p in self._params}
        capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        with with_parameters(self.model, leaves), capture:
            prediction = self.model.masked_loss(*batch, num_samples=num_samples)
            torch._foreach_copy_(self._grads, list(torch.autograd.grad(prediction.loss, list(leaves.values()))))
        torch.clear_autocast_cache()
        prediction = MaskedPrediction(**{name: value.detach() for name, value in vars(prediction).items()})
        return _Graph(graph, batch, num_samples, prediction, self._grads)


@contextlib.contextmanager
def with_parameters(model: nn.Module, others: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """The model with `others` in place of its parameters: the same memory, but unknown to autograd.

    What is known to it, by an earlier step that somebody still holds or by DDP, belongs to the stream it was first used
    on, and a capture may not touch another stream.
    """
    places = [(module, name, p) for module in model.modules() for name, p in module._parameters.items() if p in others]
    for module, name, p in places:
        module._parameters[name] = others[p]  # type: ignore[index]
    try:
        yield
    finally:
        for module, name, p in places:
            module._parameters[name] = p


def _padded(batch: Batch, size: int) -> tuple[Batch, Tensor]:
    """A copy of the batch with `size` samples, and how many it had."""
    audio, audio_len, noisy_audio, noisy_audio_len = batch
    pads = (0, size - audio.shape[1])
    num_samples = torch.full((), audio.shape[1], device=audio.device)
    return (F.pad(audio, pads), audio_len.clone(), F.pad(noisy_audio, pads), noisy_audio_len.clone()), num_samples


class _Replay(torch.autograd.Function):
    """Runs a graph forward; backward hands out the gradients it computed."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, batch: Batch, *params: Tensor) -> Tensor:
        for p in params:
            if p.grad is not None:  # accumulating: it may be the memory that this replay writes to
                p.grad = p.grad.clone()
        graph.replay(batch)
        ctx.grads = graph.grads
        return graph.prediction.loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        torch._foreach_mul_(ctx.grads, grad_outputs[0])
        return None, None, *(grad.detach() for grad in ctx.grads)  # detached: autograd takes them without a copy


def friendly_num_samples(model: EncDecDenoiseMaskedTokenPredModel, num_samples: int) -> int:
    """The least size from `num_samples` on that batches are padded to: one of 32 or more between it and its double."""
    if model.pre_encoder is not None or not padding_is_exact(model.encoder):
        return num_samples
    stride = model.preprocessor.featurizer.cfg.num_stride_samples
    frame = stride * model.encoder.subsampling_factor
    num_frames = num_samples // frame + 1
    grain = max(2, 1 << max(1, num_frames // 32).bit_length() - 1)
    return -(-num_frames // grain) * grain * frame - 1


def obstacle_of(model: EncDecDenoiseMaskedTokenPredModel) -> str | None:
    """What keeps the model's steps from being graphs, or None."""
    if len(model.encoder.cfg.attention_contexts) > 1:
        return "encoder.att_context_size has several contexts, drawn anew in every step"
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "the batch norm is synchronised between ranks (trainer.sync_batchnorm=false allows them)"
    if any(must_run(hook) for module in model.modules() for hook in hooks_of(module)):
        return "a hook watches the model, and a graph calls none"
    return None
