"""One update: loss → backward → exchange → non-finite guard → clip → optimizer → EMA. Any device, no synchronisation.

On a GPU the whole update is one CUDA graph (fast/engine.py), on one GPU and on many; the host copies a batch, writes
the learning rate and replays, at most two steps ahead of the device. A step whose gradient is not finite changes
nothing. The decision is taken on the gradient after it was averaged over the ranks, so all ranks take it together
without talking; nothing is read back from a GPU before a step that is logged.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nest_ssl.fast.graphs import Work, put_back
from nest_ssl.modules import batch_norm
from nest_ssl.training.metrics import EpochMeans, TokenCounts, count_tokens
from nest_ssl.training.parallel import Gradients, batch_statistics
from nest_ssl.training.sharding import ShardedGradients, is_sharded, optimized
from nest_ssl.watchdog.rank import Stage

if TYPE_CHECKING:
    from nest_ssl.data import AudioNoiseBatch
    from nest_ssl.fast.engine import Engine
    from nest_ssl.fast.graphs import Predict
    from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
    from nest_ssl.objective import MaskedPrediction
    from nest_ssl.training.ema import Average
    from nest_ssl.training.parallel import World
    from nest_ssl.training.watching import Watch

log = logging.getLogger(__name__)

MOST_IN_A_ROW = 20
"""Skipped steps in a row, at a step that is logged, after which a run ends: it has nothing left to learn from."""
MOST_AHEAD = 2
"""Steps by which the host may be ahead of the device: enough to hide launching, few enough to see who is late."""
LOSS_OF_EPOCH = "train_loss_epoch"
REMEMBERED = 1024
"""Losses that are kept on the device until somebody looks."""


@dataclass(frozen=True)
class Clipping:
    """`trainer.gradient_clip_val` and `gradient_clip_algorithm`."""

    most: float | None = None
    by_value: bool = False


class Results:
    """What is known of a step, on the device, always in the same place: a graph writes there too."""

    def __init__(self, model: EncDecDenoiseMaskedTokenPredModel, device: torch.device) -> None:
        zeros = functools.partial(torch.zeros, device=device)
        num_codes, num_books = model.cfg.decoder.num_classes, model.cfg.decoder.num_decoders
        self.outcome = zeros(2)
        """Loss of the latest batch, and norm of the gradient of the latest step before it was clipped."""
        whole = functools.partial(zeros, dtype=torch.long)
        self.tokens = TokenCounts(whole(num_books), whole(()), whole(()), zeros(num_codes, num_books))
        """Of the latest batch."""
        self.in_a_row = whole(())
        """Steps skipped in a row, because their gradient was not finite."""
        self.losses = zeros(REMEMBERED)
        """Of the latest batches; number n is in place n modulo its size."""
        self._next = whole(1)
        self.num_batches = 0
        """Batches trained on by this process, counted by the host."""

    @property
    def loss(self) -> Tensor:
        return self.outcome[0]

    @property
    def norm(self) -> Tensor:
        return self.outcome[1]

    def take(self, predicted: MaskedPrediction) -> None:
        self.loss.copy_(predicted.loss.detach())
        for ours, given in zip(vars(self.tokens).values(), vars(count_tokens(predicted)).values(), strict=True):
            ours.copy_(given)
        self.losses.index_copy_(0, self._next % REMEMBERED, self.loss.reshape(1))
        self._next.add_(1)

    def tensors(self) -> list[Tensor]:
        return [self.outcome, *vars(self.tokens).values(), self.in_a_row, self.losses, self._next]


class TrainStep:
    """Called once per batch; every `accumulate`-th call, and the last of an epoch, updates the weights."""

    def __init__(
        self,
        model: EncDecDenoiseMaskedTokenPredModel,
        engine: Engine,
        optimizer: Optimizer,
        schedule: LRScheduler | None,
        world: World,
        watch: Watch,
        *,
        accumulate: int = 1,
        clipping: Clipping | None = None,
        scaler: torch.amp.GradScaler | None = None,
        average: Average | None = None,
        exchange_dtype: torch.dtype = torch.float32,
        check_every: int = 0,
    ) -> None:
        self.model, self.engine, self.optimizer, self.schedule = model, engine, optimizer, schedule
        self.world, self.watch, self.accumulate, self.scaler, self.average = world, watch, accumulate, scaler, average
        self.clipping, self.check_every = clipping or Clipping(), check_every
        self.means = EpochMeans()
        """Of the losses of an epoch; a run that resumes has its own."""
        parameters = optimized(optimizer)
        self.gradients: Gradients | ShardedGradients
        if is_sharded(model):
            self.gradients = ShardedGradients(parameters)
        else:
            reached = _reached(model, parameters)
            self.gradients = Gradients(reached, world, adds=accumulate > 1, travels_as=exchange_dtype)
        device = parameters[0].device
        self.results = Results(model, device)
        self._hold = torch.zeros((), dtype=torch.bool, device=device)
        self._found_inf = torch.zeros((), device=device)
        self._rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self._written: list[float] = [0.0 for _ in optimizer.param_groups]
        self._transfers = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._running: deque[tuple[torch.cuda.Event, object]] = deque()
        """Batches that the device may still be working on, and when it is done."""
        engine.is_shared = world.size > 1
        engine.vote, engine.building = world.votes, watch.building
        self._has_logged = False

    @property
    def updates_in_graph(self) -> bool:
        """The optimizer's step can be captured: torch's fused Adam and AdamW on a GPU."""
        whole = isinstance(self.gradients, Gradients)
        return whole and self.scaler is None and is_fused(self.optimizer) and self._found_inf.is_cuda

    def to_device(self, batch: AudioNoiseBatch) -> AudioNoiseBatch:
        """The batch on the device, copied while earlier steps compute."""
        if self._transfers is None:
            return batch.to(self.world.device).mixed()
        with torch.cuda.stream(self._transfers):
            moved = batch.to(self.world.device, non_blocking=True).mixed()
        torch.cuda.current_stream().wait_stream(self._transfers)
        return moved

    def __call__(
        self,
        batch: AudioNoiseBatch,
        *,
        begins: bool,
        updates: bool,
        step: int,
        context: tuple[int, int] | None = None,
    ) -> Results:
        """Train on one batch: the first (`begins`) or last (`updates`) of those that step number `step` is made of."""
        self._write_rates()
        if self.check_every and updates and (step + 1) % self.check_every == 0:
            self.engine.check_next = True
        checked = self._launch(batch, begins=begins, updates=updates, context=context)
        self.results.num_batches += 1
        if updates:
            if not self.updates_in_graph:
                self._update()
            if self.schedule is not None:
                self.schedule.step()
            if self.average is not None:
                self.average.update(step + 1)
            if checked:
                self._compare_weights(step)
        self.watch.step_is_launched()
        self._stay_close(batch)
        return self.results

    def warm_up(self, batch: AudioNoiseBatch, context: tuple[int, int] | None = None) -> None:
        """Train on a batch without learning from it. The second time its steps are captured.

        To be called with the largest batch that will come, before all others: if memory does not suffice, it shows at
        once, and smaller batches find room in what the largest has reserved, while it would find none in theirs.
        """
        self.means.place(LOSS_OF_EPOCH, self._hold.device)
        kept = [tensor.clone() for tensor in self._volatile()]
        moved = self.to_device(batch)
        self._hold.fill_(True)
        for updates in (True,) if self.accumulate == 1 else (False, True):
            self._launch(moved, begins=True, updates=updates, context=context)
            self.watch.step_is_launched()
        self._hold.fill_(False)
        put_back(self._volatile(), kept)
        self._stay_close(moved)

    def _launch(self, batch: AudioNoiseBatch, *, begins: bool, updates: bool, context: tuple[int, int] | None) -> bool:
        """Give a batch to the engine. Return whether its step was captured or checked just now."""
        self.watch.forward_begins()
        if begins:
            self.gradients.begin()
        tensors = batch.tensors()
        run = functools.partial(self._run, updates, len(tensors[0]))
        work = Work(run, self._hold, self.results.outcome, self._volatile)
        return self.engine.run(tensors, work, planned=batch.planned_samples, variant=updates, context=context)

    def _run(self, updates: bool, num_utterances: int, predict: Predict) -> None:
        """What happens on the device. It may be captured: no value is read, and nothing that is made here is kept."""
        self.watch.step_begins_on_gpu()
        of_norms = batch_norm.num_collectives
        predicted = predict()
        self.watch.backward_begins(predicted.loss.detach())
        scaled = predicted.loss * (self.gradients.share / self.accumulate)
        self.gradients.backward(
            scaled if self.scaler is None else self.scaler.scale(scaled), self.engine.leaves, exchanges=updates
        )
        self.results.take(predicted)
        self.means.add(LOSS_OF_EPOCH, self.results.loss, num_utterances)
        if updates:
            self._log_collectives(batch_norm.num_collectives - of_norms)
            self.watch.enter(Stage.EXCHANGE)
            self.gradients.wait()
            if self.updates_in_graph:
                self._update()
        self.watch.step_ends_on_gpu()

    def _update(self) -> None:
        self.watch.enter(Stage.OPTIMIZER)
        self.gradients.show()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = self.gradients.norm()
        self.results.norm.copy_(norm)
        skip = ~torch.isfinite(norm) | self._hold
        self.watch.optimizer_begins(norm)
        self.results.in_a_row.copy_(torch.where(skip, self.results.in_a_row + 1, 0))
        if self.clipping.most:
            if self.clipping.by_value:
                self.gradients.clip_values(self.clipping.most)
            else:
                self.gradients.clip(self.clipping.most, norm)
        if self.scaler is not None:  # the scaler itself skips steps that are not finite
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return
        self._found_inf.copy_(skip)
        skip_gradient(self.optimizer, self._found_inf)
        with self._rates_on_device() if self.updates_in_graph else contextlib.nullcontext():
            self.optimizer.step()

    def _log_collectives(self, of_norms: int) -> None:
        of_gradients = self.gradients.num_collectives
        if self.world.is_first and (of_norms or of_gradients) and not self._has_logged:
            self._has_logged = True
            log.info("Collectives in a step: %d for gradients, %d for batch norms.", of_gradients, of_norms)

    # ---- around the device's work ----

    def _write_rates(self) -> None:
        """Let the device know the learning rates of this step."""
        if not self.updates_in_graph:
            return
        for place, group in enumerate(self.optimizer.param_groups):
            if (rate := float(group["lr"])) != self._written[place]:
                self._rates[place].fill_(rate)
                self._written[place] = rate

    @contextlib.contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        """Let the optimizer read its learning rates from the device: a graph would keep a number for ever.

        Schedules and checkpoints see numbers, as with any other optimizer.
        """
        groups = self.optimizer.param_groups
        before = [(group["lr"], group.get("capturable", False)) for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"], group["capturable"] = rate, True
        try:
            yield
        finally:
            for group, (rate_before, capturable) in zip(groups, before, strict=True):
                group["lr"], group["capturable"] = rate_before, capturable

    def _volatile(self) -> Sequence[Tensor]:
        """What a step changes even where it is held."""
        added = [self.gradients.flat] if isinstance(self.gradients, Gradients) and self.gradients.adds else []
        return [*batch_statistics(self.model), *self.results.tensors(), *self.means.tensors(), *added]

    def _stay_close(self, batch: object) -> None:
        """Wait until the device is at most two steps behind; keep the batch until it has been used."""
        if self._transfers is None:
            return
        done = torch.cuda.Event(blocking=True)
        done.record()
        self._running.append((done, batch))
        while len(self._running) > MOST_AHEAD:
            self._running.popleft()[0].synchronize()

    def _compare_weights(self, step: int) -> None:
        """All ranks must have the same weights; if not, they take those of rank 0 and go on without graphs."""
        if self.world.size == 1 or isinstance(self.gradients, ShardedGradients):
            return
        answers = self.world.votes(hash_of(self.gradients.parameters))
        if len(set(answers)) == 1:
            return
        odd = [str(rank) for rank, answer in enumerate(answers) if answer != answers[0]]
        text = f"step {step}: the weights of rank{'s' if len(odd) > 1 else ''} {', '.join(odd)} differ from rank 0's"
        if self.engine.on_mismatch is not None:
            self.engine.on_mismatch(text)
        moments = [
            value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        ]
        self.world.copy_from_first([*self.gradients.parameters, *moments])
        self.engine.give_up(text)

    def release(self) -> None:
        """Drop all graphs: those that hold collectives must go before the process group."""
        self._running.clear()
        self.engine.release()


@torch.no_grad()
def hash_of(tensors: Sequence[Tensor]) -> str:
    """A hash of the bits of float32 tensors; reads one number per tensor from the device."""
    sums = []
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(torch.int32).to(torch.int64)
        sums.append((bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum())
    return hashlib.sha256(str(torch.stack(sums).tolist()).encode()).hexdigest()


def _reached(model: EncDecDenoiseMaskedTokenPredModel, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters that can have a gradient: the targets have none, even if the quantizer is not frozen.

    A gradient of zero in its place would let weight decay move the codebooks.
    """
    of_targets = {id(parameter) for parameter in model.quantizer.parameters()}
    return [parameter for parameter in parameters if id(parameter) not in of_targets]


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernel itself can skip a step."""
    # Groups may come from a checkpoint of an optimizer that was not fused. SGD's kernel would leave its first momentum
    # as it found the memory.
    groups = optimizer.param_groups
    return isinstance(optimizer, (Adam, AdamW)) and all(group.get("fused") for group in groups)


def skip_gradient(optimizer: Optimizer, skip: Tensor) -> None:
    """Make the next `optimizer.step()` change nothing, neither weights nor state, if `skip` is not 0."""
    if is_fused(optimizer):
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
    elif bool(skip):  # reads a value: free on a CPU, a wait on a GPU without a fused optimizer
        optimizer.zero_grad(set_to_none=True)


def running_statistics(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Means and variances that normalisation layers keep for validation."""
    return ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(("running_mean", "running_var")))


class LookBack:
    """Reads, from time to time, what happened in the steps since: the one place where training waits for a GPU.

    It names the files of batches whose loss was not finite, repairs running statistics that such a batch has spoilt,
    and ends a run that does not recover.
    """

    def __init__(self, model: nn.Module, results: Results, rank: int) -> None:
        self.model, self.results, self.rank = model, results, rank
        self._batches: list[tuple[int, list[str]]] = []
        self._statistics = {name: value.clone() for name, value in running_statistics(model)}

    def note(self, step: int, files: list[str]) -> None:
        """A batch of step number `step` was trained on."""
        self._batches.append((step, files))
        if len(self._batches) == REMEMBERED:
            self.look(step)

    def look(self, step: int) -> None:
        if not self._batches:
            return
        self._name_batches()
        self._repair_statistics()
        self._batches = []
        skipped = int(self.results.in_a_row)
        if skipped >= MOST_IN_A_ROW:
            raise RuntimeError(
                f"step {step}: no finite gradient for {skipped} steps in a row; training has diverged. Lower "
                f"model.optim.lr or lengthen model.optim.sched.warmup_steps, set trainer.gradient_clip_val, and start "
                f"again with the same command: it resumes from the last checkpoint."
            )

    def _name_batches(self) -> None:
        finite = torch.isfinite(self.results.losses).tolist()
        first = self.results.num_batches - len(self._batches)
        for number, (step, files) in enumerate(self._batches, start=first):
            if not finite[number % REMEMBERED]:
                log.warning(
                    "rank %d, step %d: the loss is not finite; every rank skips this step. Files of the batch: %s",
                    *(self.rank, step, ", ".join(files)),
                )

    def _repair_statistics(self) -> None:
        """A forward pass with NaN leaves them in the running statistics for ever: put back the last good ones."""
        now = dict(running_statistics(self.model))
        finite = torch.stack([value.isfinite().all() for value in now.values()]).tolist() if now else []
        for (name, value), is_finite in zip(now.items(), finite, strict=True):
            if is_finite:
                self._statistics[name].copy_(value)
            else:
                value.copy_(self._statistics[name])
