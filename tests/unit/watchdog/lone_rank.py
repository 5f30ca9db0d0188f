"""A run of one rank, without torch and without a monitor: `lone_rank.py RUN_DIR saves|does-not-save MOMENT`.

At MOMENT (init, step, stuck-step, finished) it prints 'ready' and can be asked to stop. At others (blocks, hangs) it
reads RUN_DIR/fifo, or does nothing any more.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from nest_ssl.launch.attach import attached
from nest_ssl.launch.ranks import DEFAULT_PORT
from nest_ssl.watchdog.agent import RankAgent
from nest_ssl.watchdog.beacon import WorkerMark
from nest_ssl.watchdog.rank import RankFacts, RankState, Stage
from nest_ssl.watchdog.system import say

LONG_S = 60.0


def main(run_dir: str, saves: str, moment: str) -> int:
    settings: dict[str, Any] = {
        "run_dir": run_dir,
        "floor_s": 1.0 if moment in ("blocks", "hangs") else 60.0,
        "init_s": 900.0,
        "judges": True,
        "ends": True,
        "saves": saves == "saves",
        "resume_command": "nest-ssl pretrain again",
    }
    facts = RankFacts(0, 0, 1, 1, 0, "nobody", "127.0.0.1", DEFAULT_PORT)
    with attached(facts, settings, workers_per_rank=1, wants_monitor=False) as agent:
        if moment == "init":
            wait_for_the_signal()
        agent.mark.state = train(agent, moment)
    if agent.mark.state is RankState.STOPPED:
        return 75
    wait_for_the_signal()
    return 1


def train(agent: RankAgent, moment: str) -> RankState:
    agent.trains = True
    if moment == "stuck-step":
        wait_for_the_signal()
    for step in range(1, 1 if moment == "finished" else 1000):
        time.sleep(0.02)
        agent.mark.finish_step(step)
        if agent.stop_is_due(step):
            say(f"saved after step {step}")
            return RankState.STOPPED
        if step == 3:
            say("ready")
            misbehave(agent, moment)
    return RankState.FINISHED


def misbehave(agent: RankAgent, moment: str) -> None:
    if moment == "blocks":
        fifo = Path(sys.argv[1]) / "fifo"
        os.mkfifo(fifo)
        agent.mark.enter(Stage.DATA)
        WorkerMark(agent.beacon, 0, 0, -1).reads(str(fifo))
        fifo.read_bytes()
    elif moment == "hangs":
        agent.mark.enter(Stage.ENCODER)
        wait_for_the_signal()


def wait_for_the_signal() -> None:
    say("ready")
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
