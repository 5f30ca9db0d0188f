"""A rank without torch whose "GPU" is a thread, for the monitor: `fake_gpu_rank.py BEHAVIOUR_OF_RANK_0 …`.

The GPUs exchange their gradients at the end of every batch: each waits for all others. A host is at most two batches
ahead of its GPU. Behaviours: ok, late (the host sleeps), stuck (the GPU does not leave its backward pass), torn (the
GPU's exchange never ends).
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from pathlib import Path

from nest_ssl.launch.ranks import BEACON_VARIABLE, LAUNCHER_VARIABLE, from_environment
from nest_ssl.watchdog.agent import RankAgent
from nest_ssl.watchdog.beacon import STAGE_BITS, WORD, Beacon, GpuLog
from nest_ssl.watchdog.rank import Stage

AT = 20
"""The batch in which it happens."""
STAGES = (Stage.TRANSFER, Stage.ENCODER, Stage.BACKWARD, Stage.EXCHANGE, Stage.OPTIMIZER, Stage.END)


class FakeGpu(threading.Thread):
    def __init__(self, beacon: Beacon, local_rank: int, behaviour: str) -> None:
        super().__init__(daemon=True)
        self.beacon, self.local_rank, self.behaviour = beacon, local_rank, behaviour
        self.batches: queue.Queue[int] = queue.Queue()
        self.done = 0

    def run(self) -> None:
        while True:
            batch = self.batches.get()
            for stage in STAGES:
                WORD.pack_into(self.beacon.map, self.beacon.gpu_at(self.local_rank), batch << STAGE_BITS | stage)
                time.sleep(0.002)
                if stage is Stage.BACKWARD and self.behaviour == "stuck" and batch == AT:
                    time.sleep(1000)
                if stage is Stage.EXCHANGE:
                    self.exchange(batch)
            self.done = batch

    def exchange(self, batch: int) -> None:
        while self.behaviour == "torn" and batch == AT:
            time.sleep(1)
        for other in range(self.beacon.local_ranks):
            while (slot := self.beacon.gpu(other)) is None or (slot.batch, slot.stage) < (batch, Stage.EXCHANGE):
                time.sleep(0.001)


def main() -> None:
    sys.modules["torch._C._distributed_c10d"] = None  # type: ignore[assignment]  # no flight recorder, no torch
    facts = from_environment(os.environ, 2)
    assert facts is not None
    behaviour = sys.argv[1 + facts.rank]
    agent = RankAgent(facts, Beacon(Path(os.environ[BEACON_VARIABLE])), has_monitor=True)
    agent.start(parent=int(os.environ[LAUNCHER_VARIABLE]))
    gpu, log = FakeGpu(agent.beacon, facts.local_rank, behaviour), GpuLog(agent.beacon, facts.local_rank)
    gpu.start()
    for step in range(100_000):
        agent.mark.enter(Stage.DATA)
        if step == AT and behaviour == "late":
            time.sleep(1000)
        agent.mark.enter(Stage.TRANSFER)
        gpu.batches.put(log.begins(step))
        while gpu.done < log.batch - 2:
            time.sleep(0.001)
        log.is_launched()
        agent.mark.finish_step(step + 1, counts=step > 0)


if __name__ == "__main__":
    main()
