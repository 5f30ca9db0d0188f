"""How a training step runs: CUDA graphs, fused layers, or the plain model. This is the one place that decides.

`accelerate(model)` looks at the model, its device and the configuration, logs one line with the
decision and its reason, and returns an `Engine`, which runs steps. The model itself does not
change: same classes, same state dict, and it can be called as before. `model.compile: off` switches
everything off.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nest_ssl.fast.encoder import fused, log_once
from nest_ssl.fast.graphs import (
    Batch,
    Graphs,
    Inputs,
    Key,
    Lane,
    Leaves,
    Padding,
    StepGraph,
    Work,
    is_as_built,
    obstacle_to_graphs,
    padded,
    put_back,
    random_state,
    renew_generator,
    set_random_state,
)
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.modules.inputs import Mels, Signal
from nest_ssl.objective import MaskedPrediction

__all__ = ["Batch", "Engine", "Work", "accelerate"]

log = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Relative difference of loss and gradient norm between a replay and the same step uncaptured; none is expected."""


def accelerate(
    model: EncDecDenoiseMaskedTokenPredModel,
    *,
    compile: str = "auto",
    activation_budget: float | None = None,
    autocast: torch.dtype | None = None,
    no_graphs: str | None = None,
) -> Engine:
    """Return what runs training steps of `model` in the fastest form that gives the same results.

    `compile`: auto (fused layers and graphs on a CUDA GPU), on (fused layers on a CPU too, without
    kernels: for tests) or off. `activation_budget`: the share of activations that fused layers keep
    for the backward pass; None: the model's configuration. `autocast`: None is float32.
    `no_graphs`: a reason why graphs must not be used, which is logged.
    """
    budget = model.cfg.activation_budget if activation_budget is None else activation_budget
    return Engine(model, compile, budget, autocast, no_graphs)


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


class Engine:
    """Runs the steps of a model: forward, and whatever the caller does with the prediction.

    The first step of a shape runs uncaptured, at the size to which a graph would pad it; the second
    is captured, compared with the same step uncaptured, and replayed from then on. The forward pass
    runs under autocast and the rest outside it, captured or not, so that both give the same bits.
    The model is inspected once: call `refresh` after freezing parameters, adding hooks or moving it.
    """

    description: str
    """One line: what was decided, and why."""
    vote: Callable[[str], list[str]]
    """Tells all ranks a text, and returns those of all ranks."""
    is_shared = False
    """Several ranks replay together: their shapes must come from the plan, and a step cannot be repeated by one."""
    building: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """Surrounds what may take as long as a start: compiling, capturing, checking."""
    on_mismatch: Callable[[str], None] | None = None
    """Called with a text when a replay differs from the same step uncaptured."""

    def __init__(
        self,
        model: EncDecDenoiseMaskedTokenPredModel,
        compile: str,
        activation_budget: float,
        autocast: torch.dtype | None,
        no_graphs: str | None,
    ) -> None:
        self.model = model
        self._compile, self._activation_budget = compile, activation_budget
        self._autocast, self._no_graphs = autocast, no_graphs
        self.description = ""
        self.vote = lambda text: [text]
        self.check_next = False
        """Compare the next replay with the same step uncaptured."""
        self.captures = True
        """Without it steps are padded as for graphs and never captured: once that has failed, or to compare."""
        self._largest = 0
        self._uncapturable: set[tuple[int, int]] = set()
        """Shapes for which there was no room."""
        self.refresh()

    @property
    def uses_graphs(self) -> bool:
        return self._plan.graphs and self.captures

    @property
    def num_graphs(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    def is_captured(self, batch_size: int, planned: int) -> bool:
        """Whether steps of batches with this planned size are graphs."""
        return self._graphs is not None and (batch_size, self._padding.whole_frames(planned)) in self._graphs.shapes()

    @property
    def leaves(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """The tensors on which the backward pass leaves the gradient of each trainable parameter."""
        return self._leaves

    def refresh(self) -> None:
        """Forget all graphs, and look at the model again."""
        params = [p for p in self.model.parameters() if p.requires_grad]
        self._plan = decide(self.model, self._compile, self._autocast, self._no_graphs)
        self._padding = Padding.of(self.model)
        self._lane = Lane(_device(self.model)) if self._plan.graphs else None
        self._stand_ins = Leaves(self.model, params) if self._plan.graphs else None
        self._leaves = {p: p for p in params} if self._stand_ins is None else self._stand_ins.of
        self.release()
        if self.captures and str(self._plan) != self.description:
            self.description = str(self._plan)
            log.info("Training runs with %s.", self.description)

    def expect(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Tell the shapes that will come, batch size and samples, so that graphs can share one place for batches."""
        sizes = [Inputs.num_values(size, self._padding.whole_frames(samples)) for size, samples in shapes]
        self._largest = max(sizes, default=0)
        if self._graphs is not None:
            self._graphs.largest = self._largest

    def release(self) -> None:
        """Drop all graphs and their memory. Later steps are captured again, as if their shapes were new."""
        self._graphs: Graphs | None = None
        self._seen: set[Key] = set()
        if self._lane is not None:
            self._lane.renew()
            self._graphs = Graphs(self._lane)
            self._graphs.largest = self._largest

    def run(
        self,
        batch: Batch,
        work: Work,
        *,
        planned: int | None = None,
        variant: Hashable = None,
        context: tuple[int, int] | None = None,
    ) -> bool:
        """Run a step. Return whether it was captured or checked just now.

        `planned` is the size that the plan gives to this step's audio on all ranks. Steps of one
        shape whose work differs have different `variant`s. `context`: what the attention sees,
        where the model has several.
        """
        size = self._graph_size(batch, planned)
        if size is None or self._graphs is None:
            self._uncaptured(batch, None, work, context)
            return False
        key = (batch[0].shape[0], size, (variant, context))
        graph = self._graphs.find(key)
        is_new = graph is None and self.captures and key in self._seen and key[:2] not in self._uncapturable
        checks = is_new or (graph is not None and self.check_next)
        if checks:
            self.check_next = False
            with self.building():
                graph = self._captured(self._graphs, key, batch, work, context) if is_new else graph
                graph = None if graph is None else self._checked(graph, key, batch, work, context)
        if graph is None:
            with self.building():
                self._uncaptured(batch, size, work, context)
            self._seen.add(key)
        else:
            with self._lane_entered():
                graph.replay(batch)
        return checks

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> MaskedPrediction:
        """Predict without gradients, by the plain model in the mode it is in, under autocast."""
        with self._computing(), self._precision():
            return self.model.masked_loss(*batch)

    # ---- uncaptured ----

    def _uncaptured(self, batch: Batch, size: int | None, work: Work, context: tuple[int, int] | None) -> None:
        """Run a step, padded to `size`; if memory runs out, once more without graphs, from unchanged state."""
        if self._plan.fused and not is_as_built(self.model.encoder):  # hooks were added since: they must run
            self.refresh()
            size = None
        may_repeat = self.num_graphs > 0 and not self.is_shared
        kept = [tensor.clone() for tensor in work.volatile()] if may_repeat else []
        try:
            self._launch(batch, size, work, context)
        except torch.OutOfMemoryError as error:
            if not may_repeat:
                raise self._out_of_memory(batch, size) from error
        else:
            return
        # Outside the handler: the error holds the activations of the step.
        log.warning(
            "Out of memory: %d CUDA graphs are dropped, and the step is repeated without them.", self.num_graphs
        )
        put_back(work.volatile(), kept)
        self._uncapturable.add((batch[0].shape[0], size or batch[0].shape[1]))
        self.release()
        torch.cuda.empty_cache()
        try:
            self._launch(batch, size, work, context)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(batch, size) from error

    def _launch(self, batch: Batch, size: int | None, work: Work, context: tuple[int, int] | None) -> None:
        with self._computing():
            whole, num_samples = (batch, None) if size is None else padded(batch, size)
            self._work_on(whole, num_samples, work, context)

    @torch.enable_grad()
    def _work_on(self, batch: Batch, num_samples: Tensor | None, work: Work, context: tuple[int, int] | None) -> None:
        """The step itself, captured or not; `num_samples` is the size of the batch before it was padded."""
        encoder = self.model.encoder
        encoder.next_context = context
        try:
            with contextlib.nullcontext() if self._stand_ins is None else self._stand_ins.in_the_model():
                work.run(lambda: self._predict(batch, num_samples))
        finally:
            encoder.next_context = None

    def _predict(self, batch: Batch, num_samples: Tensor | None) -> MaskedPrediction:
        """The forward pass under autocast."""
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

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        with contextlib.nullcontext() if self._lane is None else self._lane.computing():
            yield

    @contextlib.contextmanager
    def _lane_entered(self) -> Iterator[None]:
        with contextlib.nullcontext() if self._lane is None else self._lane.entered():
            yield

    def _out_of_memory(self, batch: Batch, size: int | None) -> torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        seconds = (size or batch[0].shape[1]) / self.model.cfg.sample_rate
        return torch.OutOfMemoryError(
            f"the GPU is out of memory in a step of {batch[0].shape[0]} utterances x {seconds:.1f} s: "
            f"{(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB are in use. Lower model.train_ds.batch_size (or "
            f"bucket_batch_size, batch_duration), model.train_ds.max_duration or model.activation_budget; "
            f"'nest-ssl fit' finds what fits. The same command resumes from the last checkpoint."
        )

    # ---- captured ----

    def _graph_size(self, batch: Batch, planned: int | None) -> int | None:
        """Return the padded audio size of a step that may be a graph, or None."""
        if not (self._plan.graphs and self.model.training):
            return None
        if batch[0].shape != batch[2].shape:
            log_once("No CUDA graph for batches whose clean and noisy audio differ in size.")
            return None
        if self.is_shared and (planned is None or self._padding.samples_per_frame == 0):
            reason = "the plan gives no common size" if planned is None else "its norm would count padding"
            log_once(f"No CUDA graph for a step on several ranks: {reason}.")
            return None
        if planned is None:
            return self._padding.size(batch[0].shape[1])
        return self._padding.whole_frames(max(batch[0].shape[1], planned))

    def _captured(
        self, graphs: Graphs, key: Key, batch: Batch, work: Work, context: tuple[int, int] | None
    ) -> StepGraph | None:
        """Capture the step, if all ranks can."""
        answer, random = "yes", random_state(graphs.lane.device)
        try:
            if graphs.has_room(key):
                graphs.capture(key, batch, lambda own, size: self._work_on(own, size, work, context))
            else:
                answer = "no room"
        # Out of memory, or an operation that cannot be captured: the step itself may still work.
        except RuntimeError as error:
            ran_out = isinstance(error, torch.OutOfMemoryError)
            answer = "out of memory" if ran_out else f"failed: {error}".splitlines()[0]
            renew_generator(graphs.lane.device, random)
        answers = self.vote(answer)
        failed = next((f"rank {rank} {text}" for rank, text in enumerate(answers) if text.startswith("failed")), None)
        if failed is not None:
            self.give_up(f"a step could not be captured ({failed})")
        elif any(text != "yes" for text in answers):
            self._uncapturable.add(key[:2])
            log.info("No CUDA graph for %d x %d samples: there is no room for it.", *key[:2])
            if "out of memory" in answers:  # a rank has another generator now, which its graphs do not know
                self.release()
            else:
                graphs.drop(key)
        return None if self._graphs is None else self._graphs.find(key)

    def _checked(
        self, graph: StepGraph, key: Key, batch: Batch, work: Work, context: tuple[int, int] | None
    ) -> StepGraph | None:
        """Run the step twice without changing a weight, uncaptured and replayed: both must give the same."""
        device = _device(self.model)
        kept = [tensor.clone() for tensor in work.volatile()]
        random, was_held = random_state(device), work.hold.clone()
        outcomes = []
        work.hold.fill_(True)
        for replays in (False, True):
            if replays:
                with self._lane_entered():
                    graph.replay(batch)
            else:
                self._launch(batch, key[1], work, context)
            outcomes.append(work.outcome.clone())
            put_back(work.volatile(), kept)
            set_random_state(device, random)
        work.hold.copy_(was_held)
        wanted, found = (outcome.tolist() for outcome in outcomes)
        agrees = torch.allclose(outcomes[1], outcomes[0], rtol=TOLERANCE, atol=0.0, equal_nan=True)
        answers = self.vote("same" if agrees else f"loss and gradient norm {found} instead of {wanted}")
        if all(text == "same" for text in answers):
            return graph
        text = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(answers) if text != "same")
        if self.on_mismatch is not None:
            self.on_mismatch(f"a replayed step differs from the same step uncaptured: {text}")
        self.give_up("a replayed step differed from the same step uncaptured")
        return None

    def give_up(self, reason: str) -> None:
        """Run without graphs from here on, on batches padded as before: the numbers stay the same."""
        log.warning("Steps run without CUDA graphs from here on: %s.", reason)
        self.captures, self.description = False, f"fused layers, no CUDA graphs: {reason}"
        self.release()


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
