"""The limits end what fuzzing is there to find, and leave no trace."""

from __future__ import annotations

import resource
import signal

import pytest

from tests.fuzz.effort import ExceededError, limits


def hang() -> None:
    while True:
        pass


def test_a_case_that_hangs_is_ended() -> None:
    before = signal.getsignal(signal.SIGPROF)
    with pytest.raises(ExceededError), limits(cpu_s=0.05):
        hang()
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_case_that_takes_gigabytes_is_refused_the_memory() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError), limits(memory_gb=0.5):
        bytearray(1 << 30)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
