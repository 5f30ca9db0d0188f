"""A kernel that does not end while a flag is 1. Triton reads the source of a kernel, so it has a file of its own."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spin_while(flag):
    while tl.atomic_cas(flag, 2, 2) == 1:  # reads the flag, and never changes it
        pass
