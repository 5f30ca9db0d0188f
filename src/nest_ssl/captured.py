"""The training objective as CUDA graphs: a step whose shape has been seen before is one launch instead of thousands.

Small batches spend their time on launching kernels: 8 × 16 s takes about as long as 32 × 16 s. A graph holds forward
and backward; `CapturedLoss` gives the gradients it left behind to autograd, so that optimizers, clipping, accumulation
and DDP see nothing new. Audio is padded to one of few sizes (results do not change), so that shapes repeat.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel, MaskedPrediction
from nest_ssl.modules.fast_path import padding_is_exact, say_once

log = logging.getLogger(__name__)

MAX_GRAPHS = 16  # each holds its predictions: 0.2 GB for 64 × 16 s


@dataclass
class _Graph:
    """A captured step and the memory it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    prediction: MaskedPrediction
    grads: list[Tensor]

    def replay(self, inputs: tuple[Tensor, ...]) -> None:
        for ours, given in zip(self.inputs, inputs, strict=True):
            ours.copy_(given, non_blocking=True)
        self.graph.replay()


class CapturedLoss:
    """Called like `model.masked_loss`, with the same result; a prediction is valid until the next call.

    The first step of a shape runs as it is, the second is captured. Where it cannot be, one line says why.
    """

    def __init__(self, model: EncDecDenoiseMaskedTokenPredModel, max_graphs: int = MAX_GRAPHS) -> None:
        self.model, self.max_graphs = model, max_graphs
        self._seen: set[tuple[Any, ...]] = set()
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._grads: list[Tensor] = []
        self._pool: Any = None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def __call__(
        self, audio: Tensor, audio_len: Tensor, noisy_audio: Tensor, noisy_audio_len: Tensor
    ) -> MaskedPrediction:
        batch = (audio, audio_len, noisy_audio, noisy_audio_len)
        if not self.model.encoder.takes_fast_path(audio) or not audio.is_cuda:
            return self.model.masked_loss(*batch)
        reason = why_not_captured(self.model, audio, noisy_audio)
        if reason is not None:
            say_once(f"no CUDA graphs: {reason}.")
            return self.model.masked_loss(*batch)
        inputs = self._padded(*batch)
        params = [p for p in self.model.parameters() if p.requires_grad]
        precision = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        key = (*inputs[0].shape, precision, torch.cuda.current_device(), *(p.data_ptr() for p in params))
        graph = self._graphs.get(key)
        if graph is None and (key not in self._seen or len(self._graphs) >= self.max_graphs):
            self._seen.add(key)
            return self.model.masked_loss(*inputs[:4], num_samples=inputs[4])
        if graph is None:
            graph = self._graphs[key] = self._capture(inputs, params)
        loss: Tensor = _Replay.apply(graph, inputs, *params)  # type: ignore[no-untyped-call]
        found = graph.prediction
        return MaskedPrediction(loss, found.log_probs_GKH, found.targets_GH, found.counts_G, found.num_valid)

    def _padded(
        self, audio: Tensor, audio_len: Tensor, noisy_audio: Tensor, noisy_audio_len: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The batch at a size that others have too, and the number of samples it had."""
        size = friendly_num_samples(self.model, audio.shape[1])
        num_samples = torch.full((), audio.shape[1], device=audio.device)
        audio, noisy_audio = (F.pad(x, (0, size - x.shape[1])) for x in (audio, noisy_audio))
        return audio, audio_len, noisy_audio, noisy_audio_len, num_samples

    def _capture(self, inputs: tuple[Tensor, ...], params: list[nn.Parameter]) -> _Graph:
        static = tuple(x.clone() for x in inputs)
        if [g.shape for g in self._grads] != [p.shape for p in params]:
            self._grads = [torch.zeros_like(p) for p in params]
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # A weight cast to bf16 before the capture would be read, unchanged, by every replay.
        torch.clear_autocast_cache()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            prediction = self.model.masked_loss(*static[:4], num_samples=static[4])
            grads = torch.autograd.grad(prediction.loss, params)
            torch._foreach_copy_(self._grads, list(grads))
        torch.clear_autocast_cache()
        prediction = MaskedPrediction(**{name: value.detach() for name, value in vars(prediction).items()})
        return _Graph(graph, static, prediction, self._grads)


class _Replay(torch.autograd.Function):
    """Runs a graph forward; backward hands out the gradients it computed."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, inputs: tuple[Tensor, ...], *params: Tensor) -> Tensor:
        for p in params:
            if p.grad is not None:  # accumulating: it may be the memory that this replay writes to
                p.grad = p.grad.clone()
        graph.replay(inputs)
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


def why_not_captured(model: nn.Module, audio: Tensor, noisy_audio: Tensor) -> str | None:
    """What keeps a step from being a graph, or None."""
    checks: list[tuple[Callable[[], bool], str]] = [
        (lambda: audio.shape != noisy_audio.shape, "clean and noisy audio differ in size"),
        (
            lambda: torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.float16,
            "float16 needs a scale that changes from step to step; use bf16",
        ),
        (
            lambda: len(model.encoder.cfg.attention_contexts) > 1,  # type: ignore[union-attr,arg-type]
            "encoder.att_context_size has several contexts, drawn anew in every step",
        ),
        (
            lambda: any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()),
            "the batch norm is synchronised between ranks (trainer.sync_batchnorm=false allows them)",
        ),
        (
            lambda: any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()),
            "a hook watches the model, and a graph calls none",
        ),
    ]
    return next((reason for applies, reason in checks if applies()), None)
