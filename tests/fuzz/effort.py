"""How much to fuzz, and what ends a case that hangs or takes gigabytes.

`make test` draws a few examples, the same ones every time. `make fuzz` sets NEST_SSL_FUZZ and draws that many times
more, at random; it prints each failing example, keeps it in .hypothesis/ and tries it first the next time.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from hypothesis import HealthCheck, settings

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

TIMES_MORE = int(os.environ.get("NEST_SSL_FUZZ") or 0)


def examples(num: int) -> settings:
    """Return the settings of a property test that `make test` tries on `num` examples."""
    return settings(
        max_examples=num * max(TIMES_MORE, 1),
        derandomize=not TIMES_MORE,
        deadline=None,  # other processes may take the processor; `limits` counts our own time
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )


def outcome(run: Callable[[], T], refusal: type[E], **most: float) -> tuple[T | None, E | None]:
    """Return what `run` returns within the `limits`, or the `refusal` that it raises."""
    with limits(**most):
        try:
            return run(), None
        except refusal as error:
            return None, error


class ExceededError(AssertionError):
    """A case took longer than it may."""


@contextmanager
def limits(*, cpu_s: float = 5.0, memory_gb: float = 3.0) -> Iterator[None]:
    """Raise ExceededError after `cpu_s` of work, and MemoryError where more than `memory_gb` are asked for on top."""

    def exceeded(number: int, frame: FrameType | None) -> None:
        raise ExceededError(f"more than {cpu_s:g} s of work")

    before = resource.getrlimit(resource.RLIMIT_AS)
    most_bytes = _address_space_bytes() + int(memory_gb * 2**30)
    handler = signal.signal(signal.SIGPROF, exceeded)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
