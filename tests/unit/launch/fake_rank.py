"""A rank without torch, for tests of launcher and monitor: `fake_rank.py BEHAVIOUR_OF_RANK_0 BEHAVIOUR_OF_RANK_1 …`."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

# Before the imports below: there is no flight recorder here, and no waiting for torch.
sys.modules["torch._C._distributed_c10d"] = None  # type: ignore[assignment]

from nest_ssl.launch.ranks import BEACON_VARIABLE, LAUNCHER_VARIABLE, from_environment
from nest_ssl.watchdog.agent import RankAgent
from nest_ssl.watchdog.beacon import Beacon, WorkerMark
from nest_ssl.watchdog.rank import RankState, Stage
from nest_ssl.watchdog.system import say

STEPS = 40


def main() -> int:
    facts = from_environment(os.environ, 2)
    assert facts is not None
    behaviour = sys.argv[1 + facts.rank]
    if behaviour == "exit-3-early":
        return 3
    agent = RankAgent(facts, Beacon(Path(os.environ[BEACON_VARIABLE])), has_monitor=True)
    agent.start(parent=int(os.environ[LAUNCHER_VARIABLE]))
    steps = 10_000 if behaviour == "long" else STEPS
    for step in range(steps):
        for stage in (Stage.DATA, Stage.ENCODER):
            agent.mark.enter(stage)
            time.sleep(0.01)
        if step == STEPS // 2:
            act(behaviour, agent)
        agent.mark.enter(Stage.BACKWARD)
        agent.mark.finish_step(step + 1, counts=step > 0)
        if agent.stop_is_due(step + 1):
            agent.mark.state = RankState.STOPPED
            say(f"rank {facts.rank} stopped after step {step + 1}")
            return 75
    agent.mark.state = RankState.FINISHED
    if behaviour == "freeze-at-the-end":
        os.kill(os.getpid(), signal.SIGSTOP)
    return 0


def act(behaviour: str, agent: RankAgent) -> None:
    if behaviour == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif behaviour == "sleep":
        time.sleep(1000)
    elif behaviour == "take-port":
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", agent.facts.master_port))
                say("the port was free")
            except OSError:
                say("the port was taken")
    elif behaviour == "fail":
        agent.fail(KeyError("a bug"))
    elif behaviour.startswith("had-a-worker-"):
        mark = WorkerMark(agent.beacon, agent.facts.local_rank, 0, 0)
        mark._pid = int(behaviour.rsplit("-", 1)[1])  # another process has this pid now: it was started at another time
        mark.reads("/a.wav")
    elif behaviour.startswith("leave-a-worker"):
        start_worker(agent)
        act(behaviour.removeprefix("leave-a-worker-and-"), agent)


def start_worker(agent: RankAgent) -> None:
    """Start a worker that ends neither with its rank nor with the rank's process group: only its slot leads to it."""
    local_rank = agent.facts.local_rank
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the test reads stderr to its end
        WorkerMark(agent.beacon, local_rank, 0, 0).reads("/a.wav")
        time.sleep(60)
        os._exit(0)
    while not agent.beacon.workers(local_rank):
        time.sleep(0.01)
    say(f"worker {pid}")


if __name__ == "__main__":
    sys.exit(main())
