"""Settings for all tests; this file is imported before torch."""

from __future__ import annotations

import os

# MKL picks its FFT by processor, and their roundings differ by up to 1.4e-4 in a log-mel value, NeMo against itself
# too. The recordings were made with this one, which every processor has.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Threads that wait for work sleep: on a busy machine, or with more ranks than cores, spinning takes the time of those
# that work (measured on two busy cores: 1.4-1.8 s a step against 0.6-0.8 s).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Some virtual machines announce AMX and fault on its first use (a bf16 product dies with SIGILL).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
