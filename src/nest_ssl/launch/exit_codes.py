"""Exit codes of `nest-ssl pretrain`. docs/faults.md explains them."""

from __future__ import annotations

FINISHED = 0
NEEDS_A_PERSON = 1
"""Starting the same command again would end the same way."""
RESUMABLE = 75
"""Ended, and the same command goes on: a stall, a dead rank, a preemption. BSD's EX_TEMPFAIL."""
