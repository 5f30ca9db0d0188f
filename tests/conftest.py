"""Settings for all tests; this file is imported before torch."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from importlib import metadata

import pytest

# MKL picks its FFT by processor, and their roundings differ by up to 1.4e-4 in a log-mel value, NeMo against itself
# too. The recordings were made with this one, which every processor has.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the program sets it, see cli/main.py
# Some virtual machines announce AMX and fault on its first use (a bf16 product dies with SIGILL).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

# Lightning is an extra: these test its adapter.
collect_ignore = ["unit/test_lightning.py", "integration/test_train_lightning.py"]
if any(distribution.metadata["Name"] == "lightning" for distribution in metadata.distributions()):
    collect_ignore.clear()


@pytest.fixture(autouse=True)
def graphs_go_with_their_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Streams come from a ring of 32, and a CUDA graph that is collected frees the workspaces of all on its stream."""
    yield
    if request.node.get_closest_marker("gpu") is not None:
        gc.collect()
