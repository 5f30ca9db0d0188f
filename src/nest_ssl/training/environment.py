"""Lightning told who this rank is, and kept from talking to the other ranks behind our back."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from nest_ssl.watchdog.rank import RankFacts


class LaunchedRank(ClusterEnvironment):
    """A rank that somebody has launched: nest-ssl itself, torchrun or SLURM."""

    def __init__(self, facts: RankFacts) -> None:
        super().__init__()
        self.facts = facts

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.facts.master_addr

    @property
    def main_port(self) -> int:
        return self.facts.master_port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.facts.world_size

    def set_world_size(self, size: int) -> None:
        """The launcher has decided."""

    def global_rank(self) -> int:
        return self.facts.rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher has decided."""

    def local_rank(self) -> int:
        return self.facts.local_rank

    def node_rank(self) -> int:
        return self.facts.node

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        self.facts.check_against(num_devices, num_nodes)


def take_broadcasts_out(trainer: pl.Trainer) -> None:
    """Lightning (since 2.5.2) broadcasts before every batch and inside its SIGTERM handler, whether a signal came.

    A collective in a signal handler can hang; one before every batch couples the ranks for nothing. Signals are ours:
    the ranks agree on a step through the beacon.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    if not hasattr(loop, "_broadcast_sigterm_tensor"):
        raise RuntimeError(
            "this version of Lightning stops ranks in a way that nest-ssl does not know: use lightning 2.6."
        )
    loop._broadcast_sigterm_tensor = lambda: None
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
