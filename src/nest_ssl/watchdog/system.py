"""What only the operating system knows and does. Linux has all of it; elsewhere answers are coarser, never wrong."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from nest_ssl.config.checks import printable
from nest_ssl.watchdog.rank import RESUMABLE

T = TypeVar("T")

DISK_ANSWERS_S = 2.0
"""A disk that takes longer than this to look something up counts as not responding."""
IS_LINUX = sys.platform.startswith("linux")
HAS_PROC = IS_LINUX and os.path.exists("/proc/self/stat")
"""Not in every container: without it nobody may be taken for dead who cannot be seen."""
KILLED = -9
"""The exit status of a process that SIGKILL has ended; Windows does not know the signal."""
LESS_MEMORY = "lower model.train_ds.num_workers, prefetch_factor or prefetch_gb, or give the job more memory"
_PR_SET_PDEATHSIG, _PR_SET_PTRACER = 1, 0x59616D61

PROCESS_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a device",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead",
    "I": "idle",
    "": "gone",
}


def say(text: str) -> None:
    """Print to stderr while there is one: a closed terminal or an ended `| tee log` must not end the job."""
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except RuntimeError:  # a signal handler has interrupted another print
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), f"{text}\n".encode())
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):  # so that flushing at exit does not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def open_missing_streams() -> None:
    """Give a program that was started without stdin, stdout or stderr (`>&-`) empty ones, and any a way to print all.

    Otherwise the next file that it opens would have the number of stdout, and be printed to. And a name with a letter
    that the terminal's encoding lacks would end the program when it is printed.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def while_stdout_lasts() -> Iterator[None]:
    """Print what can be printed: a full disk or an ended `| head` must not turn a finished run into a failed one."""
    try:
        yield
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        say(f"nest-ssl: warning: stdout: {getattr(error, 'strerror', None) or error}")
        drop_stdout()


def drop_stdout() -> None:
    """Print to nowhere from now on, so that flushing at exit does not fail again, with exit code 120."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of `work`; raise TimeoutError if it takes longer, as anything on a dead disk would."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]


class SlowFiles:
    """Names files that threads have been reading for long, where there is no monitor: in `extract` and `probe`.

    A thread that reads from a dead disk cannot be ended; but who waits should know for what.
    """

    def __init__(self, warn_s: float = 60.0) -> None:
        self.warn_s = warn_s
        self._reading: dict[int, tuple[str, float]] = {}
        self._over = threading.Event()

    def __enter__(self) -> SlowFiles:
        threading.Thread(target=self._watch, name="nest-ssl slow files", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Show, in the thread that reads, what it reads."""
        self._reading[threading.get_ident()] = (path, time.monotonic())
        try:
            yield
        finally:
            del self._reading[threading.get_ident()]

    def _watch(self) -> None:
        named: set[tuple[str, float]] = set()
        while not self._over.wait(min(1.0, self.warn_s / 4)):
            for path, since in list(self._reading.values()):
                waited_s = time.monotonic() - since
                if waited_s > self.warn_s and (path, since) not in named:
                    named.add((path, since))
                    say(
                        f"nest-ssl: warning: {path!r}: has been read for {waited_s:.0f} s and does not end. Is it a "
                        f"regular file, on a disk that responds? Ctrl-C and remove it from the input, or wait."
                    )


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a run to save and exit, without ignored ones: nohup has SIGHUP ignored."""
    known = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP") if hasattr(signal, name)]
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]


def on_stop_signals(handler: signal.Handlers | Callable[[int, FrameType | None], Any]) -> None:
    for number in stop_signals():
        signal.signal(number, handler)


def end_before_training(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal to stop until launcher and ranks have handlers: with 75, by which schedulers' scripts requeue.

    Reading the configuration takes 1 to 3 s. To die of the signal, as is the default, would be 138 to SLURM.
    """
    say(f"nest-ssl: {signal_name(number)}: stopped; nothing to save before the first step")
    os._exit(RESUMABLE)


def shared_memory_folder(least_free_mb: float = 16.0) -> Path:
    """Return the folder where a mapped file uses no disk, as long as there is room."""
    shm = Path("/dev/shm")
    usable = shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 1e6 * least_free_mb
    return shm if usable else Path(tempfile.gettempdir())


def python_command(module: str) -> list[str]:
    """Return the command that runs a module of this package; a json.py in the working folder is not Python's json."""
    is_source = Path.cwd() == Path(__file__).parents[2]  # there the working folder is the only way to the package
    return [sys.executable, *([] if is_source else ["-P"]), "-m", module]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit at once if `parent` is gone already."""
    if not IS_LINUX:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def allow_inspection() -> None:
    """Let processes of the same user read this one's stack where Yama would allow only its parents to."""
    if IS_LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1 % 2**64), 0, 0, 0)


def process_state(pid: int) -> str:
    """Return a letter of PROCESS_STATES; an empty string if there is no such process."""
    if sys.platform == "win32":
        return "S"  # os.kill(pid, 0) would be Ctrl-C there, so no process is taken for dead
    if not HAS_PROC:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except PermissionError:
            pass
        return "S"
    stat = _read(f"/proc/{pid}/stat")
    return stat[stat.rindex(")") + 2] if stat else ""


def is_alive(pid: int) -> bool:
    return process_state(pid) not in ("", "Z", "X")


def birthmark(pid: int) -> int:
    """Return what a later process with the same pid will not have; 0: no such process, or unknown.

    With /proc this is the time of its start, else its session, which a rank shares only with its workers.
    """
    if HAS_PROC:
        stat = _read(f"/proc/{pid}/stat")
        return int(stat[stat.rindex(")") + 2 :].split()[19]) if stat else 0
    try:
        # One that began outside this container has the number 0 here. Windows has no sessions.
        return os.getsid(pid) + 1 if hasattr(os, "getsid") else 0
    except OSError:
        return 0


def is_still(pid: int, mark: int) -> bool:
    """Return whether `pid` is still the process with this birthmark: pids are reused in a long run."""
    return mark != 0 and birthmark(pid) == mark


def children_of(parents: set[int]) -> set[int]:
    """Return all living descendants of `parents`."""
    if not HAS_PROC:
        return set()
    parent_of: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            stat = _read(f"/proc/{entry}/stat")
            if stat:
                parent_of[int(entry)] = int(stat[stat.rindex(")") + 4 :].split()[0])
    found: set[int] = set()
    level = set(parents)
    while level:
        level = {pid for pid, parent in parent_of.items() if parent in level} - found
        found |= level
    return found


def kill_all(pids: set[int]) -> None:
    """Kill the processes, the process groups they lead, and their descendants, stopped ones included."""
    # Under torchrun the monitor is a child of the first rank: it must not kill itself.
    everyone = (pids | children_of(pids)) - {os.getpid()}
    for pid in everyone:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg") and os.getpgid(pid) == pid and pid != os.getpgrp():
                os.killpg(pid, signal.SIGCONT)
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL if IS_LINUX else signal.SIGTERM)


def wait_until_gone(pids: set[int], timeout_s: float) -> set[int]:
    """Wait for the processes to end; return those that are alive after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left := {pid for pid in pids if is_alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def process_facts(pid: int) -> dict[str, str]:
    """Return state, memory, threads and the kernel function it waits in, for the evidence."""
    facts = {"state": PROCESS_STATES.get(process_state(pid), "unknown")}
    for line in _read(f"/proc/{pid}/status").splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM", "RssShmem", "Threads", "PPid"):
            facts[name] = value.strip()
    facts["wchan"] = _read(f"/proc/{pid}/wchan").strip()
    facts["command"] = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()[:300]
    return facts


def memory_facts() -> dict[str, str]:
    """Return the machine's free memory and how often its kernel killed a process for lack of it."""
    facts = {}
    for line in _read("/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable", "Shmem", "SwapFree"):
            facts[name] = value.strip()
    for line in _read("/proc/vmstat").splitlines():
        if line.startswith("oom_kill "):
            facts["oom_kill"] = line.split()[1]
    return facts


class OomKiller:
    """What the kernel's OOM killer has done since this was made, in this process's cgroup or on the whole machine.

    `root` is where /proc and /sys are. Processes of several cgroups can compare only the counts of the `whole_host`.
    """

    def __init__(self, root: str = "", *, whole_host: bool = False) -> None:
        self._root = root
        folders = [] if whole_host else self._cgroup_folders()
        counters = [f"{folder}/{name}" for folder in folders for name in ("memory.events", "memory.oom_control")]
        found = (path for path in (*counters, f"{root}/proc/vmstat") if self._count(path) is not None)
        self._counter = next(found, None)
        self._whose = "of this job" if self._counter in counters else "on this host"
        limits = [f"{folder}/{name}" for folder in folders for name in ("memory.max", "memory.limit_in_bytes")]
        self._limit = next((path for path in limits if _read(path).strip().isdigit()), None)
        self.before = self.kills()

    def _cgroup_folders(self) -> list[str]:
        """Return where the figures may be; a container sees its own cgroup as the root, under another path."""
        folders = []
        for line in _read(f"{self._root}/proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                base = f"{self._root}/sys/fs/cgroup{'' if controllers == '' else '/memory'}"
                folders += [f"{base}{path.rstrip('/')}", base]
        return folders

    def _count(self, path: str) -> int | None:
        found = [line.split()[1] for line in _read(path).splitlines() if line.startswith("oom_kill ")]
        return int(found[0]) if found else None

    def kills(self) -> int:
        return 0 if self._counter is None else self._count(self._counter) or 0

    def text(self) -> str:
        """Return what it did, and how much memory there is; an empty string if it did nothing."""
        kills = self.kills() - self.before
        if kills <= 0:
            return ""
        facts = dict(line.split(":", 1) for line in _read(f"{self._root}/proc/meminfo").splitlines() if ":" in line)
        total_gb = int(facts.get("MemTotal", "0 kB").split()[0]) / 1e6
        limit_gb = int(_read(self._limit)) / 1e9 if self._limit is not None else total_gb
        limited = f", of which this job may use {limit_gb:.1f}" if limit_gb < total_gb else ""
        return (
            f"the kernel's OOM killer has ended {kills} process{'' if kills == 1 else 'es'} {self._whose}; the host "
            f"has {total_gb:.1f} GB of memory{limited}"
        )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
