"""The record of the exception that ends a rank, written before anything else can hang or be lost."""

from __future__ import annotations

import contextlib
import json
import re
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nest_ssl.files import replacing

PACKAGE = Path(__file__).parents[2]
"""The folder of nest_ssl."""
LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "socket closed",
    "recv failed",
    "failed to recv",
    "read error",
    "timed out waiting",
)

LOST_GPU = (
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "hardware error",
    "hardware stack error",
    "unspecified launch failure",
    "unknown error",
    "no cuda-capable device is detected",
    "busy or unavailable",
    "system not yet initialized",
)
"""What CUDA says of a GPU that has failed, fallen off the bus, or been taken away. An illegal memory access or an
assertion on the device is not among them: that is a bug, and would recur on any GPU."""


def tells_of_lost_worker(message: str) -> bool:
    """Whether this is torch's error of a killed DataLoader worker; it is raised wherever the rank happens to be."""
    return "DataLoader worker" in message and ("killed by signal" in message or "exited unexp" in message)


@dataclass(frozen=True)
class Failure:
    """An exception on one rank."""

    rank: int
    type: str
    message: str
    traceback: str
    monotonic_ns: int
    context: list[str] = field(default_factory=list)
    """What the rank adds: the files and durations of its batch."""
    is_plain: bool = False
    """An operating system error, or one that nest-ssl raised for its user: the message says it all."""
    gpu: str = ""
    """The rank's GPU and host, in words."""

    @property
    def is_lost_peer(self) -> bool:
        """Whether the rank only noticed that another one is gone."""
        text = self.message.lower()
        return self.type in ("RuntimeError", "DistBackendError", "DistNetworkError", "ConnectionError") and any(
            words in text for words in LOST_PEER
        )

    @property
    def is_lost_worker(self) -> bool:
        return tells_of_lost_worker(self.message)

    @property
    def speaks_for_itself(self) -> bool:
        """Whether its traceback would tell a person nothing."""
        return not self.traceback or self.is_plain or self.is_lost_peer or self.is_lost_worker

    @property
    def is_out_of_memory(self) -> bool:
        return self.type in ("OutOfMemoryError", "MemoryError") or "out of memory" in self.message.lower()

    @property
    def is_lost_gpu(self) -> bool:
        """Whether the GPU, not the program, has failed; the run can continue on another one."""
        text = self.message.lower()
        return (
            self.type in ("AcceleratorError", "RuntimeError", "DistBackendError")
            and ("cuda error" in text or "cuda failure" in text)
            and any(words in text for words in LOST_GPU)
        )

    @property
    def lost_gpu_cause(self) -> str:
        said = next((line for line in self.message.splitlines() if "cuda" in line.lower()), self.first_line)
        return f"{self.gpu or 'its GPU'} no longer works: {said.strip()[:200]}"

    @property
    def lost_gpu_advice(self) -> str:
        host = self.gpu.rpartition(" of ")[2]
        return (
            f"run 'nvidia-smi' and 'dmesg | grep Xid'{f' on {host}' if host else ''}; reset the GPU or leave the node "
            f"out (SLURM: --exclude={host or 'HOST'}), then resume"
        )

    @property
    def first_line(self) -> str:
        """The first line of the message, without gloo's own file and its general advice."""
        first = self.message.strip().partition("\n")[0]
        return re.sub(r"^\[\S+\.cc:\d+\] |\. This is typically caused by.*", "", first).strip() or "no message"

    @property
    def innermost_frames(self) -> list[str]:
        """The frames as 'f (file.py:12)', innermost first."""
        found = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', self.traceback)
        return [f"{name} ({'/'.join(Path(path).parts[-2:])}:{line})" for path, line, name in reversed(found)]

    @property
    def short_traceback(self) -> str:
        """The traceback without the frames of installed packages; the evidence has all of it."""
        kept, left_out = [], 0
        for part in re.split(r"(?m)^(?=  File )", self.traceback):
            if part.startswith("  File ") and "site-packages" in part.splitlines()[0]:
                left_out += 1
                part = "".join(re.split(r"(?m)^(?=\S)", part, maxsplit=1)[1:])  # the message after the last frame
                if not part:
                    continue
            if left_out:
                kept.append(f"  … {left_out} calls of installed packages\n")
                left_out = 0
            kept.append(part)
        return "".join(kept).rstrip()


def file_name(rank: int) -> str:
    return f"failure_rank{rank}.json"


def describe(rank: int, error: BaseException, context: list[str], gpu: str = "") -> Failure:
    return Failure(
        rank=rank,
        type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(type(error), error, error.__traceback__)),
        monotonic_ns=time.monotonic_ns(),
        context=context,
        is_plain=isinstance(error, OSError) or (isinstance(error, ValueError) and _is_ours(error)),
        gpu=gpu,
    )


def write_failure(folder: Path, rank: int, error: BaseException, context: list[str], gpu: str = "") -> Failure:
    """Write the failure where the monitor looks for it; a rank's first one is kept."""
    failure = describe(rank, error, context, gpu)
    path = folder / file_name(rank)
    if not path.exists():
        # The folder may be full, or gone because the job was ended meanwhile.
        with contextlib.suppress(OSError), replacing(path, sync=False) as file:
            file.write(json.dumps(asdict(failure)).encode())
    return failure


def _is_ours(error: BaseException) -> bool:
    """Return whether it was raised in this package, not deep inside another one."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and PACKAGE in Path(frames[-1].filename).parents


def read_failures(folder: Path) -> dict[int, Failure]:
    """Return the failures that ranks have written, by rank."""
    found: dict[int, Failure] = {}
    for path in sorted(folder.glob("failure_rank*.json")):
        failure = Failure(**json.loads(path.read_text()))
        found[failure.rank] = failure
    return found
