"""The ranks of a run: who this one is, its device, and everything they say to each other.

Collectives are called here, in sharding.py and in modules/batch_norm.py. A training step has one per 32 MB of gradients
(two more per conformer layer with `trainer.sync_batchnorm`), a validation has one. What ranks decide together without a
collective, they decide through the process group's store.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from nest_ssl.config import TrainerConfig
from nest_ssl.launch.ranks import LISTENER_VARIABLE, gpu_label, gpu_of_rank, port_is_taken, shared_gpu_variables
from nest_ssl.watchdog.rank import RankFacts

log = logging.getLogger(__name__)

T = TypeVar("T")

BUCKET_BYTES = 32 * 2**20
"""Gradients per collective: large enough for the bandwidth of a network, and about a layer of the large model, so that
its gradients travel while the layer below computes its own."""
ALIGNED = 64
"""Gradients of a parameter begin at a multiple of this many values: fused optimizers read 16 bytes at a time."""
ASK_EVERY_N_STEPS = 10
"""How often several ranks look what rank 0's clock says."""
KEEP_ANSWERS = 100
"""Old answers in the store: a rank whose host is behind, by as many steps as a GPU can queue, still finds its own."""
LEAVE_S = 300.0
"""How long rank 0 waits for the others at the end."""

_votes = itertools.count()
_counters = itertools.count()

# ---- who and where ----


def uses_gpu(config: TrainerConfig) -> bool:
    if config.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ValueError("trainer.accelerator=gpu: no CUDA GPU was found. Use trainer.accelerator=cpu or auto.")
    if config.accelerator not in ("auto", "cpu", "gpu", "cuda"):
        is_mps = config.accelerator == "mps"
        reason = "; the codebooks are float64, like NeMo's, which Apple's GPUs lack" if is_mps else ""
        raise ValueError(f"trainer.accelerator={config.accelerator}: not supported{reason}. Use auto, cpu or gpu.")
    return config.accelerator != "cpu" and torch.cuda.is_available()


def device_for(config: TrainerConfig, facts: RankFacts, *, share_gpu: bool = False) -> torch.device:
    """The device of a rank; every rank of its node refuses what `trainer.devices` asks for in vain."""
    if not uses_gpu(config):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    return torch.device("cuda", gpu_of_rank(config.devices, facts, os.environ, count, share_gpu=share_gpu))


def gpu_in_words(device: torch.device) -> str:
    """Which GPU this is, on which host, for whoever has to look for it; empty for a CPU."""
    if device.type != "cuda":
        return ""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return gpu_label(device.index, os.environ, uuid, socket.gethostname())


@dataclass(frozen=True)
class World:
    """One rank among all ranks of a run."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    talks_to_itself: bool = field(default=False, kw_only=True)
    """One rank makes all collectives too (`debug.collectives`)."""
    gradient_group: Any = field(default=None, kw_only=True)
    """Gradients have a communicator of their own, so that statistics of batch norms need not queue behind them."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def communicates(self) -> bool:
        """There is a process group."""
        return self.size > 1 or self.talks_to_itself

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, the same on each to the bit."""
        if self.size > 1:
            values = values.clone()
            distributed.all_reduce(values)
        return values

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the values of rank 0: a few large collectives in place of hundreds of small ones."""
        if self.size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
        for same in by_dtype.values():
            for chunk in _chunks(same, lambda tensor: tensor.nbytes):
                flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
                distributed.broadcast(flat, src=0)
                for tensor, part in zip(chunk, flat.split([tensor.numel() for tensor in chunk]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def votes(self, text: str) -> list[str]:
        """Tell all ranks a text, and return those of all ranks, without a collective. All ranks call this together."""
        if self.size == 1:
            return [text]
        store = group_store()
        prefix = f"nest-ssl/vote/{next(_votes)}"  # the store remembers for as long as the process group lives
        if self.is_first:
            others = [store.get(f"{prefix}/{rank}").decode() for rank in range(1, self.size)]
            store.set(f"{prefix}/all", json.dumps([text, *others]))
        else:
            store.set(f"{prefix}/{self.rank}", text)
        answers: list[str] = json.loads(store.get(f"{prefix}/all"))
        return answers

    def counter(self) -> Callable[[str, int], int] | None:
        """Return a function that adds a number to a named sum over all ranks and returns it; None with one rank.

        No collective: a rank that has nothing to add need not call it. All ranks ask for their counters alike.
        """
        if self.size == 1:
            return None
        store = group_store()
        prefix = f"nest-ssl/count/{next(_counters)}"
        return lambda name, number: int(store.add(f"{prefix}/{name}", number))

    def leave(self) -> None:
        """Rank 0, whose process has the store, leaves last: the others may still need it."""
        if self.size == 1:
            return
        if not self.is_first:
            group_store().set(f"nest-ssl/left/{self.rank}", "")
            return
        with contextlib.suppress(distributed.DistStoreError):  # who is missing has died, which others report
            group_store().wait([f"nest-ssl/left/{rank}" for rank in range(1, self.size)], timedelta(seconds=LEAVE_S))

    def decision_of_first(self, decision: bool) -> bool:
        """What rank 0 has decided, for decisions that all ranks must share."""
        flag = torch.tensor([int(decision)], device=self.device)
        self.copy_from_first([flag])
        return bool(flag.item())


def group_store() -> Any:
    """The store through which the ranks of the process group have met."""
    return distributed.distributed_c10d._get_default_store()


def _chunks(items: Iterable[T], num_bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Lists of at most BUCKET_BYTES each, in order; an item that is larger is alone."""
    chunk: list[T] = []
    num_bytes = 0
    for item in items:
        num_bytes += num_bytes_of(item)
        if chunk and num_bytes > BUCKET_BYTES:
            yield chunk
            chunk, num_bytes = [], num_bytes_of(item)
        chunk.append(item)
    yield chunk


def _let_memory_grow_in_place() -> None:
    """Ask torch for segments that grow, in place of many of fixed sizes: a large batch then takes a fifth less memory.

    What the user has set stays. To be called before the first tensor is on the GPU.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # torch's newer name
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


@contextlib.contextmanager
def joined(
    config: TrainerConfig, facts: RankFacts, *, share_gpu: bool = False, collectives: bool = False
) -> Iterator[World]:
    """Join the other ranks; `facts` are this rank's, and its environment is set (`RankFacts.variables`).

    `share_gpu`: ranks may share a GPU. `collectives`: one rank makes all collectives too, with itself, to measure what
    they cost.
    """
    device = device_for(config, facts, share_gpu=share_gpu)
    if device.type == "cuda":
        _let_memory_grow_in_place()
        torch.cuda.set_device(device)
    world = World(facts.rank, facts.local_rank, facts.world_size, device)
    if world.size == 1 and not collectives:
        yield world
        return
    options = config.strategy if isinstance(config.strategy, dict) else {}
    if share_gpu and device.type == "cuda":
        for name, value in shared_gpu_variables(facts).items():
            os.environ.setdefault(name, value)
        if world.is_first:
            log.warning("debug.share_gpu: ranks share GPUs and talk over sockets; this shows behaviour, not speed.")
    backend = options.get("process_group_backend") or ("nccl" if device.type == "cuda" else "gloo")
    given: dict[str, Any] = {}
    try:
        if (store := _store(facts)) is not None:
            given = {"rank": facts.rank, "world_size": facts.world_size, "store": store}
        distributed.init_process_group(backend, device_id=device if backend == "nccl" else None, **given)
    except distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise port_is_taken(facts.master_port, "another program has taken it") from error
    separate = config.sync_batchnorm and config.strategy_name != "fsdp"
    group = distributed.new_group() if separate else None
    yield replace(world, talks_to_itself=collectives, gradient_group=group)
    # A rank that fails does not get here, and just ends: to leave the group, it would have to wait for the others.
    distributed.destroy_process_group()


def _store(facts: RankFacts) -> Any:
    """The store through which the ranks meet; None: torch makes one from the environment, as with torchrun."""
    if facts.world_size == 1:
        return distributed.HashStore()  # type: ignore[attr-defined]
    if facts.launcher != "nest-ssl":
        return None
    listener = os.environ.get(LISTENER_VARIABLE)
    return distributed.TCPStore(  # type: ignore[attr-defined]
        facts.master_addr,
        facts.master_port,
        facts.world_size,
        is_master=facts.rank == 0,
        timeout=distributed.distributed_c10d.default_pg_timeout,
        wait_for_workers=False,
        master_listen_fd=None if facts.rank or listener is None else int(listener),
    )


class FirstRanksClock:
    """Answers of rank 0's clock, given to all ranks at the same step without a collective.

    Rank 0 writes its answer into the store after every tenth step; all ranks read it ten steps later, and wait for it
    where their hosts are ahead of rank 0's.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._asked = False
        self._answered = False

    def answer(self, step: int, now: int) -> int:
        """`now` where one rank runs alone; otherwise rank 0's answer of ten steps before, 0 between such steps.

        After an answer other than 0 the next one is dropped: rank 0 gave it before it acted on the first.
        """
        if self.world.size == 1:
            return now
        if step % ASK_EVERY_N_STEPS:
            return 0
        store = group_store()
        if self.world.is_first:
            store.set(f"nest-ssl/clock/{step}", str(now))
            store.delete_key(f"nest-ssl/clock/{step - KEEP_ANSWERS * ASK_EVERY_N_STEPS}")
        if not self._asked:
            self._asked = True
            return 0
        answer = int(store.get(f"nest-ssl/clock/{step - ASK_EVERY_N_STEPS}"))
        self._answered, answer = answer != 0 and not self._answered, 0 if self._answered else answer
        return answer


# ---- gradients ----


class Gradients:
    """The gradients of a step in one flat buffer, averaged over the ranks while the backward pass goes on.

    The buffer is cut into buckets in the order in which the backward pass reaches the parameters, last layer first.
    As soon as all gradients of a bucket are there, they are copied into it and it travels, on the communicator's own
    stream. The order is the same on every rank and in every step. `p.grad` is a part of the buffer.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        world: World,
        *,
        adds: bool = False,
        travels_as: torch.dtype = torch.float32,
    ) -> None:
        self.parameters, self.world, self.adds, self.travels_as = list(parameters), world, adds, travels_as
        self.num_collectives = 0
        """Of the latest step."""
        starts, size = [], 0
        for parameter in reversed(self.parameters):
            starts.append(size)
            size += -(-parameter.numel() // ALIGNED) * ALIGNED
        starts.reverse()
        device = self.parameters[0].device
        self.flat = torch.zeros(size, device=device)
        self.parts = [
            self.flat[start : start + p.numel()].view_as(p) for p, start in zip(self.parameters, starts, strict=True)
        ]
        self._buckets = [
            (numbers, self.flat[starts[numbers[0]] : starts[numbers[-1]] + self.parameters[numbers[-1]].numel()])
            # The last parameters, whose gradients come first, are in the first bucket.
            for numbers in _chunks(reversed(range(len(starts))), lambda number: self.parameters[number].nbytes)
        ]
        self._bucket_of = {number: place for place, (numbers, _) in enumerate(self._buckets) for number in numbers}
        self._leaves: list[nn.Parameter] = []
        self._missing: list[int] = []
        self._next = 0
        self._travelling: list[tuple[Tensor, Tensor, Any]] = []
        self._exchanges = False

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    @property
    def share(self) -> float:
        """By what the loss is multiplied, so that the sum over the ranks is the mean."""
        return 1 / self.world.size

    def begin(self) -> None:
        """A step begins: where the gradients of several batches are added up, start from zero."""
        if self.adds:
            self.flat.zero_()

    def backward(self, loss: Tensor, leaves: Mapping[nn.Parameter, nn.Parameter], *, exchanges: bool) -> None:
        """Run the backward pass of a loss that is scaled already; with `exchanges`, start to average over the ranks.

        `leaves` are the tensors on which autograd leaves each parameter's gradient.
        """
        self._leaves = [leaves[parameter] for parameter in self.parameters]
        for leaf in self._leaves:
            leaf.grad = None
        self._missing, self._next = [len(numbers) for numbers, _ in self._buckets], 0
        self._exchanges, self.num_collectives = exchanges and self.world.communicates, 0
        # For one backward pass only: the model may be used, and trained by others, between two steps.
        hooks = [leaf.register_post_accumulate_grad_hook(self._arrival(n)) for n, leaf in enumerate(self._leaves)]
        try:
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
        while self._next < len(self._buckets):  # this batch did not use all parameters; those of other ranks may have
            self._send_next()
        self.show()

    def wait(self) -> None:
        """Let the device wait until all buckets have arrived."""
        for bucket, sent, work in self._travelling:
            work.wait()
            if sent is not bucket:
                bucket.copy_(sent)
        self._travelling = []

    def show(self) -> None:
        """Let `p.grad` be the gradients."""
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            if parameter.grad is not part:
                parameter.grad = part

    def norm(self) -> Tensor:
        """The norm of the parameters' norms, rounded as torch's; what lies between two parts does not count."""
        return torch.nn.utils.get_total_norm(self.parts)

    def clip(self, most: float, norm: Tensor) -> None:
        self.flat.mul_(torch.clamp(most / (norm + 1e-6), max=1.0))

    def clip_values(self, most: float) -> None:
        self.flat.clamp_(-most, most)

    def _arrival(self, number: int) -> Callable[[Tensor], None]:
        place = self._bucket_of[number]

        def arrived(leaf: Tensor) -> None:
            self._missing[place] -= 1
            while self._next < len(self._buckets) and self._missing[self._next] == 0:
                self._send_next()

        return arrived

    @torch.no_grad()
    def _send_next(self) -> None:
        """In the order of the buckets, whatever arrives first: all ranks must send the same."""
        numbers, bucket = self._buckets[self._next]
        self._next += 1
        into, given = [], []
        for number in numbers:
            leaf, part = self._leaves[number], self.parts[number]
            if leaf.grad is not None:
                into.append(part)
                given.append(leaf.grad)
            elif not self.adds:
                part.zero_()
        if into:
            (torch._foreach_add_ if self.adds else torch._foreach_copy_)(into, given)
        for number in numbers:
            self._leaves[number].grad = None
        if self._exchanges:
            sent = bucket if self.travels_as == bucket.dtype else bucket.to(self.travels_as)
            work = distributed.all_reduce(sent, group=self.world.gradient_group, async_op=True)
            self._travelling.append((bucket, sent, work))
            self.num_collectives += 1


# ---- batch norm ----


def batch_statistics(model: nn.Module) -> Iterator[Tensor]:
    """The running statistics of batch norms: the only buffers that training changes."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            yield from module.buffers(recurse=False)
