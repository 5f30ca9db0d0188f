"""Freed memory. Each case runs in its own process, because malloc options last for the rest of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

MEASURE = """
import torch
from nest_ssl.freed_memory import give_back_freed_memory, keep_freed_memory

def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6

def use_200_mb():
    torch.ones(50_000_000)

torch.ones(1)
before = resident_mb()
{calls}
print(resident_mb() - before)
"""


def growth_mb(*calls: str) -> float:
    script = MEASURE.format(calls="\n".join(calls))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_freed_memory_stays_until_it_is_given_back() -> None:
    assert growth_mb("use_200_mb()") < 50
    assert growth_mb("keep_freed_memory()", "use_200_mb()") > 150
    assert growth_mb("keep_freed_memory()", "use_200_mb()", "give_back_freed_memory()") < 50
