"""The launcher: starts one process per rank and one monitor per node, ends them together, restarts them if asked to."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from nest_ssl.launch.ranks import BEACON_VARIABLE, LAUNCHER_VARIABLE, LISTENER_VARIABLE, port_is_taken
from nest_ssl.run_folder import WATCHDOG
from nest_ssl.watchdog.beacon import Beacon, Hold, is_in_use
from nest_ssl.watchdog.node import verdict_path
from nest_ssl.watchdog.rank import FINISHED, NEEDS_A_PERSON, RESUMABLE, RankFacts
from nest_ssl.watchdog.report.status import SETTINGS, Settings, explain_run, record_kill
from nest_ssl.watchdog.system import (
    DISK_ANSWERS_S,
    KILLED,
    OomKiller,
    die_with_parent,
    end_before_training,
    kill_all,
    on_stop_signals,
    python_command,
    say,
    shared_memory_folder,
    stop_signals,
    wait_until_gone,
    within,
)

POLL_S = 0.05
VERDICT_WAIT_S = 8.0
"""The monitor reports a dead rank within 2 s; if it has not after this long, the launcher acts alone."""
MAX_MONITORS = 3
MONITOR_AGAIN_S = 60.0
"""After this many monitors a new one is started at most this often."""
LOOPBACK_ANSWERS_S = 5.0
SILENT_S = 40.0
"""A monitor looks four times a second and takes at most 20 s for a report; if silent for longer, it has stalled."""


@dataclass(frozen=True)
class Job:
    """What to launch on this node."""

    command: list[str]
    """The command of every rank."""
    local_ranks: int
    num_nodes: int
    node: int
    master_addr: str
    master_port: int | None
    """None: any free port of this node."""
    workers_per_rank: int
    settings: dict[str, Any]
    """The monitor's settings, without what differs between attempts."""
    resume_arguments: list[str]
    """Arguments added to the command when it is restarted."""
    max_restarts: int = 0

    @property
    def world_size(self) -> int:
        return self.local_ranks * self.num_nodes


def launch(job: Job) -> int:
    """Run the job until it is finished, stopped, or ended for good; return its exit code."""
    last_fault: Any = None
    for attempt in range(job.max_restarts + 1):
        attempted = Attempt(job, job.command + (job.resume_arguments if attempt else []))
        code, fault = attempted.run()
        if code != RESUMABLE or attempted.was_asked_to_stop or attempt == job.max_restarts:
            return code
        if fault is not None and fault == last_fault:
            kind, ranks, stage, step = fault
            say(f"nest-ssl: the same fault again ({kind}, ranks {ranks}, {stage} of step {step}): not restarting")
            return NEEDS_A_PERSON
        last_fault = fault
        say(f"nest-ssl: restart {attempt + 1} of {job.max_restarts}")
    raise AssertionError("the last attempt returns")


def fork_rank() -> int | None:
    """Fork: the child returns and becomes the rank; this process stays SLURM's task, and exits as the job does.

    srun reports the highest exit code of its tasks, and 137 for a killed one. A rank that the kernel or the monitor
    kills would hide the 75 by which a script knows that it can requeue the job. The child returns a pipe, into which
    it writes the path of its beacon; None: this process cannot be forked, and is the rank itself.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reads, writes = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        if _cuda_was_used():
            os._exit(FINISHED)
        die_with_parent(parent)
        return writes
    os.close(writes)
    beacon: Beacon | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        if beacon is None:
            os.kill(pid, number)
        else:
            beacon.stop_signal = number  # SLURM signals the rank as well: the monitor takes both for one request

    on_stop_signals(pass_on)
    with os.fdopen(reads, "rb") as pipe:
        path = os.fsdecode(pipe.read())
    if path:
        with contextlib.suppress(OSError, ValueError):  # gone already, with its rank
            beacon = Beacon(Path(path))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not path and code == FINISHED:
        on_stop_signals(end_before_training)
        return None
    os._exit(exit_code_of_task(code, beacon))


def exit_code_of_task(code: int, beacon: Beacon | None) -> int:
    """Return the job's exit code according to the monitor, or else the rank's; one that was killed can be resumed."""
    deadline = time.monotonic() + (VERDICT_WAIT_S if code < 0 else 0.0)
    while beacon is not None:
        if (outcome := beacon.outcome) is not None:
            return outcome
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    return RESUMABLE if code < 0 else code


def _cuda_was_used() -> bool:
    """Return whether this forked process may not use CUDA, because the one that it is a copy of did."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


class Attempt:
    """One start of all ranks and their monitor."""

    def __init__(self, job: Job, command: list[str]) -> None:
        self.job, self.command = job, command
        self.was_asked_to_stop = False
        self._stop_now = False
        self._oom_killer = OomKiller()
        self.folder = make_beacon_folder(secrets.token_hex(16), job.settings["run_dir"])
        self._in_use = Hold(self.folder)
        self.beacon = Beacon.create(
            self.folder / "beacon",
            local_ranks=job.local_ranks,
            first_rank=job.node * job.local_ranks,
            world_size=job.world_size,
            workers_per_rank=job.workers_per_rank,
        )
        # Rank 0 inherits the socket: a port that was only known to be free could be taken before rank 0 binds it.
        self._listener: socket.socket | None = None
        self.port = job.master_port or 0
        if job.master_port is None:
            self._listener = socket.create_server((job.master_addr, 0), backlog=2048)
            self.port = int(self._listener.getsockname()[1])
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.monitor = KeptMonitor(self._monitor_settings(), self.beacon)

    def run(self) -> tuple[int, Any]:
        """Run the attempt; return its exit code, and what the fault was according to the monitor."""
        before = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        try:
            self.monitor.start()
            for local_rank in range(self.job.local_ranks):
                self.ranks.append(self._start_rank(local_rank))
                self.beacon.set_pid(local_rank, self.ranks[-1].pid)
            self._close_listener()  # rank 0 has its own
            self._wait()
            return self._outcome()
        finally:
            self._end_all()
            self._close_listener()
            for number, handler in before.items():
                signal.signal(number, handler)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start_rank(self, local_rank: int) -> subprocess.Popen[bytes]:
        job = self.job
        facts = RankFacts(
            rank=job.node * job.local_ranks + local_rank,
            local_rank=local_rank,
            world_size=job.world_size,
            local_world_size=job.local_ranks,
            node=job.node,
            launcher="nest-ssl",
            master_addr=job.master_addr,
            master_port=self.port,
        )
        env = {**os.environ, **facts.variables()}
        env |= {BEACON_VARIABLE: str(self.beacon.path), LAUNCHER_VARIABLE: str(os.getpid())}
        inherited: tuple[int, ...] = ()
        if local_rank == 0 and self._listener is not None:
            inherited = (self._listener.fileno(),)
            env[LISTENER_VARIABLE] = str(self._listener.fileno())
        # The ranks share the cores; otherwise each would start a thread for every core.
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // job.local_ranks)))
        return subprocess.Popen(
            self.command, env=env, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=inherited
        )

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _monitor_settings(self) -> Settings:
        return Settings(
            **self.job.settings,
            beacon=str(self.beacon.path),
            node=self.job.node,
            parent=os.getpid(),
            num_nodes=self.job.num_nodes,
            leader_address=self.job.master_addr,
            leader_port=self.port + 1,
        )

    def _wait(self) -> None:
        """Wait until all ranks have left and the monitor has judged any failure."""
        alone_since: float | None = None
        while True:
            codes = [process.poll() for process in self.ranks]
            for local_rank, code in enumerate(codes):
                if code is not None:
                    self.beacon.set_exit_status(local_rank, code)
            judged = self.beacon.outcome is not None
            all_left = all(code is not None for code in codes)
            if self._stop_now or (all_left and (judged or all(code in (FINISHED, RESUMABLE) for code in codes))):
                return
            if not judged:
                self.monitor.keep()
            if any(code not in (None, FINISHED, RESUMABLE) for code in codes):
                alone_since = alone_since or time.monotonic()
                if time.monotonic() - alone_since > VERDICT_WAIT_S:
                    ranks = [str(rank) for rank, code in enumerate(codes) if code == KILLED]
                    if ranks and (why := self._oom_killer.text()):
                        say(f"nest-ssl: local rank {', '.join(ranks)} was killed: {why}")
                    say("nest-ssl: a rank is gone and the monitor does not report it: ending the job")
                    return
            time.sleep(POLL_S)

    def _outcome(self) -> tuple[int, Any]:
        if (code := self.beacon.outcome) is not None:
            path = verdict_path(self.folder)
            return code, json.loads(path.read_text())["fault"] if path.is_file() else None
        codes = [process.poll() for process in self.ranks]
        if all(code == FINISHED for code in codes):
            return FINISHED, None
        if self._stop_now or all(code in (FINISHED, RESUMABLE) or (code or -1) < 0 for code in codes):
            return RESUMABLE, None
        return NEEDS_A_PERSON, None

    def _end_all(self) -> None:
        """Leave nothing running: ranks, their workers, the monitor."""
        monitor = self.monitor.process
        if monitor is not None and not self._stop_now:
            with contextlib.suppress(subprocess.TimeoutExpired):
                monitor.wait(timeout=1.0)  # it has killed the ranks and is about to exit
        processes = [*self.ranks, *([monitor] if monitor is not None else [])]
        workers = [worker for i in range(self.job.local_ranks) for worker in self.beacon.workers(i)]
        pids = {process.pid for process in processes if process.poll() is None}
        pids |= {worker.pid for worker in workers if worker.is_there}
        kill_all(pids)
        wait_until_gone(pids, 1.0)
        for process in processes:
            process.poll()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.was_asked_to_stop:
            self._stop_now = True  # asked twice: stop at once
        self.was_asked_to_stop = True
        self.beacon.stop_signal = number


class KeptMonitor:
    """The monitor of this node, restarted when it is killed or stalls."""

    def __init__(self, settings: Settings, beacon: Beacon) -> None:
        self.beacon = beacon
        self.process: subprocess.Popen[bytes] | None = None
        self._path = beacon.folder / SETTINGS
        self._num_started, self._started_ns = 0, 0
        settings.write(self._path)

    def start(self) -> None:
        """Start it in its own session, where a Ctrl-C in the terminal does not reach it."""
        self._num_started += 1
        self._started_ns = time.monotonic_ns()
        command = [*python_command("nest_ssl.watchdog.monitor"), str(self._path)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def keep(self) -> None:
        """Restart the monitor if it is gone or has stalled."""
        if self.process is None or (code := self.process.poll()) == 0:
            return  # a monitor that exits by itself has seen all ranks leave
        what = "was killed"
        if code is None:
            silent_s = (time.monotonic_ns() - max(self.beacon.monitor_beat_ns, self._started_ns)) / 1e9
            if silent_s < SILENT_S:
                return
            what = f"stalled for {silent_s:.0f} s and was ended"
            self.process.kill()
            self.process.wait()
        if self._num_started >= MAX_MONITORS and time.monotonic_ns() - self._started_ns < 1e9 * MONITOR_AGAIN_S:
            return  # later: without a monitor nobody would choose the step at which ranks that are asked to stop do
        say(f"nest-ssl: warning: the monitor {what}; training continues with a new monitor")
        self.start()


def beacon_folder(token: str) -> Path:
    """Return the folder of the beacon of one start of a job."""
    return shared_memory_folder() / f"{_folder_prefix()}{token}"


def _folder_prefix() -> str:
    return f"nest-ssl-{os.getuid() if hasattr(os, 'getuid') else 0}-"


def make_beacon_folder(token: str, run_dir: str) -> Path:
    """Make `beacon_folder`, and remove those of jobs that are gone; say so if the last start in `run_dir` was killed.

    How the other jobs ended is recorded in their folders, for those who resume them.
    """
    folder = beacon_folder(token)
    root, prefix = folder.parent, _folder_prefix()
    for old in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError, ValueError):
            check_folder(old)
            beacon = Beacon(old / "beacon")
            if not is_in_use(old):
                # Another run's folder, and perhaps another version's: whatever is wrong there, this run starts.
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    within(DISK_ANSWERS_S, functools.partial(record_kill, beacon))
                shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(OSError, ValueError):  # there was none, or its status is damaged, which doctor says
        # Several nodes were watched by their monitors, and each would read the status of all of them.
        several = (Path(run_dir) / WATCHDOG / "node1.json").exists()
        if run_dir and not several and (how := explain_run(Path(run_dir)).how_killed):
            say(f"nest-ssl: warning: {run_dir}: the last start was {how}")
    folder.mkdir(mode=0o700, exist_ok=True)
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Refuse a folder that another user, who may write to /dev/shm as well, has put there."""
    facts = folder.lstat()
    is_own = not hasattr(os, "getuid") or (facts.st_uid == os.getuid() and not stat.S_IMODE(facts.st_mode) & 0o077)
    if not stat.S_ISDIR(facts.st_mode) or not is_own:
        raise ValueError(f"{folder}: not a folder that belongs to you alone. Remove it, or have its owner remove it.")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def check_port(port: int) -> None:
    """Refuse a port that another program has."""
    with socket.socket() as sock:
        # torch binds it the same way: an old connection in TIME_WAIT does not matter.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError as error:
            raise port_is_taken(port, error.strerror) from error


def check_address(address: str) -> None:
    """Refuse a MASTER_ADDR that cannot be resolved, or a loopback that is down: ranks would try until they time out."""
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(address, None)]
    except OSError as error:
        raise ValueError(f"MASTER_ADDR={address}: {error.strerror}. Set it to node 0's host name or IP.") from error
    if not all(ipaddress.ip_address(ip.partition("%")[0]).is_loopback for ip in found):
        return
    try:
        with (
            socket.create_server((address, 0)) as server,
            socket.create_connection(server.getsockname()[:2], timeout=LOOPBACK_ANSWERS_S),
        ):
            pass
    except OSError as error:
        raise ValueError(
            f"{address}: {error.strerror or error}: the loopback interface, through which the ranks of one node meet, "
            "is down or missing. Run 'ip link set lo up'; in a container, start it with a network."
        ) from error
