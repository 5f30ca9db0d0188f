"""A real SLURM with two nodes on this machine: Debian's slurm-wlm and munge, started as root in a folder of its own.

A node is a `slurmd` with its own name, port and spool folder. Both see the same /dev/shm and the same process numbers,
which two machines never do; otherwise jobs cannot tell. Each node claims GPUs that do not exist: SLURM counts them,
and the ranks train on CPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.harness import INJECT
from tests.integration.runs import losses

NODES = ("nest-n1", "nest-n2")
SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"
HOSTS = Path("/etc/hosts")
MUNGE_KEY = Path("/etc/munge/munge.key")
CONTROL_PORT = 17_817
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

# cred_expire is also how long a requeued job waits; SLURM's default is 120 s.
CONFIG = """\
ClusterName=nest
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmdLogFile={folder}/slurmd_%n.log
SlurmdSpoolDir={folder}/spool_%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=20
KillWait=20
MinJobAge=3600
JobRequeue=1
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """The daemons, what they are told, and how a test breaks them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self._daemons: list[int] = []

    def start(self) -> None:
        if os.geteuid() != 0 or shutil.which("slurmctld") is None or shutil.which("munged") is None:
            raise RuntimeError("needs root, slurm-wlm and munge: run 'make slurm' as root.")
        with HOSTS.open("a") as file:
            file.writelines(f"127.0.0.1 {node}\n" for node in NODES)
        (self.folder / "state").mkdir()
        for node in NODES:
            (self.folder / f"spool_{node}").mkdir()
        lines = [
            f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={CONTROL_PORT + 1 + i} CPUs=4 Gres=gpu:2"
            for i, node in enumerate(NODES)
        ]
        self.config.write_text(
            CONFIG.format(
                host=socket.gethostname(),
                port=CONTROL_PORT,
                folder=self.folder,
                nodes="\n".join(lines),
                names=",".join(NODES),
            )
        )
        for number in range(2):
            (self.folder / f"gpu{number}").touch()  # SLURM only asks whether the device's file is there
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-1]\n")
        os.environ["SLURM_CONF"] = str(self.config)
        self._start_munge()
        self._daemon("slurmctld", "-D", "-f", str(self.config))
        for node in NODES:
            self.start_node(node)
        self.wait_until_idle()

    def _start_munge(self) -> None:
        if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0:
            return  # this machine has one already
        if not MUNGE_KEY.is_file():
            MUNGE_KEY.write_bytes(os.urandom(1024))
            MUNGE_KEY.chmod(0o400)
            shutil.chown(MUNGE_KEY, "munge", "munge")
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge", "munge")
        self._daemon("runuser", "-u", "munge", "--", "munged", "--foreground")
        wait_for(
            lambda: subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0, 10, "munged"
        )

    def _daemon(self, *command: str) -> int:
        with (self.folder / "daemons.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._daemons.append(process.pid)
        return process.pid

    def start_node(self, node: str) -> None:
        self._daemon("slurmd", "-D", "-N", node, "-f", str(self.config))

    def wait_until_idle(self) -> None:
        wait_for(lambda: command("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", 60, "two idle nodes")

    def stop(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            command("scancel", "--user=root")
            wait_for(lambda: not command("squeue", "-h"), 60, "no job")
        for pid in reversed(self._daemons):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        HOSTS.write_text("".join(line for line in HOSTS.open() if line.split()[-1:] not in ([n] for n in NODES)))

    def submit(self, folder: Path, *arguments: str, options: tuple[str, ...] = (), script: Path = SCRIPT) -> Job:
        """Submit `script` with steps of at least 0.2 s, so that there is time to disturb it."""
        variables = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(INJECT), *sys.path]),
            "NEST_FAULT": "slow_rank all 0",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        output = folder / "job.log"
        done = command("sbatch", "--parsable", *options, f"--output={output}", str(script), *arguments, env=variables)
        return Job(int(done), output, folder / "run")

    def kill_node(self, node: str) -> None:
        """Take away all of a node at once: slurmd, its slurmstepds, and all that they have started."""
        own = self._processes(lambda entry: f"SLURMD_NODENAME={node}\0".encode() in (entry / "environ").read_bytes())
        slurmd = int((self.folder / f"slurmd_{node}.pid").read_text())
        stepds = self._processes(
            lambda entry: (entry / "cmdline").read_bytes().startswith(b"slurmstepd") and parent_of(entry) not in own
        )
        theirs = {parent_of(Path("/proc", str(pid))) for pid in own} & stepds
        for pid in (slurmd, *theirs, *own):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _processes(is_meant: Callable[[Path], bool]) -> set[int]:
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if is_meant(entry):
                        found.add(int(entry.name))
        return found


@dataclass(frozen=True)
class Job:
    """A job of the cluster."""

    number: int
    output: Path
    run_dir: Path

    @property
    def log(self) -> str:
        return self.output.read_text(errors="replace") if self.output.is_file() else ""

    def fact(self, name: str) -> str:
        """Return a field of `scontrol show job`."""
        match = re.search(rf"\b{name}=(\S*)", command("scontrol", "show", "job", str(self.number)))
        assert match is not None
        return match[1]

    @property
    def run_time_s(self) -> float:
        hours, minutes, seconds = self.fact("RunTime").split(":")
        return 3600 * float(hours) + 60 * float(minutes) + float(seconds)

    def set_time_limit(self, minutes: int) -> None:
        command("scontrol", "update", f"JobId={self.number}", f"TimeLimit={minutes}")

    @property
    def requeues(self) -> int:
        return int(self.fact("Restarts"))

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: any(done >= step for done in losses(self.run_dir / "metrics.csv")), 120, f"step {step}", self)

    def pids(self) -> dict[int, int]:
        """Return the process number of every rank, as the monitors of all nodes have written them down."""
        contents = [json.loads(path.read_text()) for path in (self.run_dir / "watchdog").glob("node*.json")]
        return {row["rank"]: row["pid"] for content in contents for row in content["rows"]}

    def incidents(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.run_dir / "incidents").glob("*.json"))]

    def wait_for_requeue(self) -> None:
        wait_for(lambda: self.requeues > 0, 90, "a requeue", self)

    def wait(self, timeout_s: float = 300.0) -> str:
        """Wait until the job has ended for good; return its state and exit code, as 'COMPLETED 0:0'."""
        wait_for(lambda: self.fact("JobState") in ENDED, timeout_s, "the end", self)
        return f"{self.fact('JobState')} {self.fact('ExitCode')}"


def parent_of(entry: Path) -> int:
    return int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])


def command(*words: str, env: dict[str, str] | None = None) -> str:
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout


def wait_for(is_so: Callable[[], bool], timeout_s: float, what: str, job: Job | None = None) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        log = "" if job is None else f"\n{job.log[-6000:]}"
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s{log}"
        time.sleep(0.2)


@contextlib.contextmanager
def cluster_in(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
