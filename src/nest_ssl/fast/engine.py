"""How a training step runs: CUDA graphs, fused layers, or the plain model. This is the one place that decides.

`accelerate(model)` looks at the model, its device and the configuration, logs one line with the
decision and its reason, and returns an `Objective`, which computes gradients. The model itself does
not change: same classes, same state dict, and it can be called as before. `model.compile: off`
switches everything off.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from nest_ssl.fast.encoder import fused, log_once
from nest_ssl.fast.graphs import (
    MEMORY_SHARE,
    Batch,
    Graphs,
    Padding,
    StepGraph,
    is_as_built,
    obstacle_to_graphs,
    padded,
)
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.modules.inputs import Mels, Signal
from nest_ssl.objective import MaskedPrediction

__all__ = ["Batch", "Objective", "accelerate"]

log = logging.getLogger(__name__)


def accelerate(
    model: EncDecDenoiseMaskedTokenPredModel,
    *,
    compile: str = "auto",
    activation_budget: float | None = None,
    autocast: torch.dtype | None = None,
    no_graphs: str | None = None,
) -> Objective:
    """Return the training objective of `model` in the fastest form that gives the same results.

    `compile`: auto (fused layers and graphs on a CUDA GPU), on (fused layers on a CPU too, without
    kernels: for tests) or off. `activation_budget`: the share of activations that fused layers keep
    for the backward pass; None: the model's configuration. `autocast`: None is float32.
    `no_graphs`: a reason why graphs must not be used, which is logged.
    """
    budget = model.cfg.activation_budget if activation_budget is None else activation_budget
    return Objective(model, compile, budget, autocast, no_graphs)


@dataclass(frozen=True)
class Plan:
    """What was decided, and why not more."""

    fused: bool
    graphs: bool
    reason: str | None = None

    def __str__(self) -> str:
        if self.graphs:
            return "fused layers and CUDA graphs"
        return f"{'fused layers, no CUDA graphs' if self.fused else 'plain layers'}: {self.reason}"


def decide(
    model: EncDecDenoiseMaskedTokenPredModel, compile: str, autocast: torch.dtype | None, no_graphs: str | None
) -> Plan:
    """Decide how steps of this model run, from what the model and its device are now."""
    on_gpu = _device(model).type == "cuda"
    obstacle = _obstacle_to_fusing(model, compile, on_gpu)
    if obstacle is not None:
        return Plan(fused=False, graphs=False, reason=obstacle)
    obstacle = no_graphs or obstacle_to_graphs(model)
    if not on_gpu:
        obstacle = "the model is not on a CUDA GPU"
    elif autocast == torch.float16:
        obstacle = "float16 needs a scale that changes from step to step; use bf16"
    return Plan(fused=True, graphs=obstacle is None, reason=obstacle)


def _obstacle_to_fusing(model: EncDecDenoiseMaskedTokenPredModel, compile: str, on_gpu: bool) -> str | None:
    if compile not in ("auto", "on", "off"):
        raise ValueError(f"model.compile: {compile!r} is not auto, on or off.")
    if compile == "off":
        return "model.compile is off"
    if compile == "auto" and not on_gpu:
        return "the model is not on a CUDA GPU"
    if on_gpu and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not is_as_built(model.encoder):
        return "the encoder has hooks or adapters, which fused layers would bypass"
    own = EncDecDenoiseMaskedTokenPredModel
    if type(model).masked_loss is not own.masked_loss or type(model).predict_masked is not own.predict_masked:
        return f"{type(model).__name__} has an objective of its own"
    return None


class Objective:
    """The training objective of a model: gradients for training, predictions for validation.

    The first step of a batch shape runs uncaptured, at the size to which a graph would pad it; the
    second is captured, and replayed from then on. The forward pass runs under autocast and the
    backward pass outside it, captured or not, so that both give the same bits. The model is
    inspected once: call `refresh` after freezing parameters, adding hooks or moving it.
    """

    on_backward: Callable[[Tensor], None] | None = None
    """Called with the loss right before the backward pass of an uncaptured step."""
    description: str
    """One line: what was decided, and why."""

    def __init__(
        self,
        model: EncDecDenoiseMaskedTokenPredModel,
        compile: str,
        activation_budget: float,
        autocast: torch.dtype | None,
        no_graphs: str | None,
        memory_share: float = MEMORY_SHARE,
    ) -> None:
        self.model = model
        self._compile, self._activation_budget = compile, activation_budget
        self._autocast, self._no_graphs, self._memory_share = autocast, no_graphs, memory_share
        self.description = ""
        self.refresh()

    @property
    def num_graphs(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    def refresh(self) -> None:
        """Forget all graphs, and look at the model again."""
        self._params = [p for p in self.model.parameters() if p.requires_grad]
        self._plan = decide(self.model, self._compile, self._autocast, self._no_graphs)
        self._padding = Padding.of(self.model)
        self.release()
        if str(self._plan) != self.description:
            self.description = str(self._plan)
            log.info("Training runs with %s.", self.description)

    def release(self) -> None:
        """Drop all graphs and their memory. Later steps are captured again, as if their shapes were new."""
        self._graphs: Graphs | None = None
        self._seen: set[tuple[int, int]] = set()

    @torch.enable_grad()
    def gradients(
        self,
        batch: Batch,
        *,
        share: float = 1.0,
        adds: bool = False,
        scaler: torch.amp.GradScaler | None = None,
    ) -> MaskedPrediction:
        """Leave the gradient of share × loss in every trainable parameter's `.grad`.

        It replaces what was there or, if `adds`, is added to it. Parameters that the loss does not
        reach keep None. Return the prediction, detached, with the loss as it is (unscaled, without
        the share); it is valid until the next call.
        """
        adds = adds and any(p.grad is not None for p in self._params)
        shape = None if scaler is not None else self._graph_shape(batch)
        if shape is not None and shape in self._seen:
            graph = self._captured(batch, shape, adds)
            if graph is not None and self._graphs is not None:
                return self._graphs.replay(graph, batch, share, adds)
        if self._plan.fused and not is_as_built(self.model.encoder):  # hooks were added since: they must run
            self.refresh()
            shape = None
        if shape is None:
            return self._uncaptured(batch, None, share, adds, scaler)
        prediction = self._uncaptured(*padded(batch, shape[1]), share, adds, None)
        self._seen.add(shape)
        return prediction

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> MaskedPrediction:
        """Predict without gradients, by the plain model in the mode it is in, under autocast."""
        with self._precision():
            return self.model.masked_loss(*batch)

    def _uncaptured(
        self, batch: Batch, num_samples: Tensor | None, share: float, adds: bool, scaler: torch.amp.GradScaler | None
    ) -> MaskedPrediction:
        if not adds:
            for p in self._params:
                p.grad = None
        prediction = self._predict(batch, num_samples)
        if self.on_backward is not None:
            self.on_backward(prediction.loss.detach())
        if scaler is None:
            prediction.loss.backward(torch.full_like(prediction.loss, share))
        else:
            scaler.scale(prediction.loss * share).backward()
        return prediction.detached()

    def _predict(self, batch: Batch, num_samples: Tensor | None) -> MaskedPrediction:
        """The forward pass under autocast; `num_samples` is the size of the batch before it was padded."""
        with self._precision():
            if not (self._plan.fused and self.model.training):
                assert num_samples is None, "only fused layers ignore padding"
                return self.model.masked_loss(*batch)
            featurizer = self.model.preprocessor.featurizer
            num_frames = None if num_samples is None else featurizer.num_padded_frames(num_samples)
            clean, noisy = both_features(self.model, batch)
            with fused(self.model.encoder, self._activation_budget, num_frames):
                return self.model.predict_masked(clean, noisy)

    def _precision(self) -> AbstractContextManager[object]:
        device = _device(self.model)
        if device.type == "meta":
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self._autocast, enabled=self._autocast is not None)

    def _graph_shape(self, batch: Batch) -> tuple[int, int] | None:
        """Return the batch size and padded audio size of a step that may be a graph, or None."""
        if not (self._plan.graphs and self.model.training):
            return None
        if batch[0].shape != batch[2].shape:
            log_once("No CUDA graph for batches whose clean and noisy audio differ in size.")
            return None
        return batch[0].shape[0], self._padding.size(batch[0].shape[1])

    def _captured(self, batch: Batch, shape: tuple[int, int], adds: bool) -> StepGraph | None:
        """Return the graph of this step, captured if it is new; None if there can be none."""
        if self._graphs is not None:
            graph = self._graphs.find(*shape, adds)
            if graph is not None:
                return graph
        try:
            if self._graphs is None:
                self._graphs = Graphs(self.model, self._params, self._predict, self._memory_share)
            if not self._graphs.has_room():
                log_once(f"No more CUDA graphs: the {len(self._graphs)} captured ones fill their share of the memory.")
                return None
            return self._graphs.capture(batch, shape[1], adds)
        # Out of memory, or an operation that cannot be captured: the step itself may still work.
        except RuntimeError as error:
            log.warning("A step could not be captured (%s); steps run without CUDA graphs from here on.", error)
            self._no_graphs = "a step could not be captured"
            self.refresh()
            return None


def both_features(model: EncDecDenoiseMaskedTokenPredModel, batch: Batch) -> tuple[Mels, Mels]:
    """Return the features of clean and noisy audio; in one pass if they have one size (3.85 → 3.53 ms at 64 × 16 s)."""
    audio, audio_len, noisy_audio, noisy_audio_len = batch
    if audio.shape != noisy_audio.shape:
        clean = model.features(Signal("audio", audio, audio_len))
        return clean, model.features(Signal("noisy_audio", noisy_audio, noisy_audio_len))
    samples, length = torch.cat((audio, noisy_audio)), torch.cat((audio_len, noisy_audio_len))
    both = model.features(Signal("audio and noisy_audio", samples, length))
    (clean_BMT, noisy_BMT), (clean_len, noisy_len) = both.mels_BMT.chunk(2), both.length.chunk(2)
    return Mels("audio", clean_BMT, clean_len), Mels("noisy_audio", noisy_BMT, noisy_len)


def _device(model: EncDecDenoiseMaskedTokenPredModel) -> torch.device:
    return model.mask_processor.mask_embedding.device
