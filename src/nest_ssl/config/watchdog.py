"""The `watchdog:`, `launch:` and `debug:` sections: what NeMo has no keys for."""

from __future__ import annotations

from dataclasses import dataclass

from nest_ssl.config.checks import at_least, one_of


@dataclass
class WatchdogConfig:
    """`watchdog:`: who looks after the ranks."""

    enabled: bool | None = None
    """Name ranks that stand still; null: whenever there is more than one rank."""
    action: str = "end"
    """end: report, then end the job with exit code 75. report: write the report and let the job be."""
    floor_s: float = 60.0
    """The least stall that counts. A stage may take this long, or 5 times its usual (p99) duration if that is more."""
    init_s: float = 900.0
    """How long starting may take: joining, comparing, loading manifests, the first step with its compilation."""

    def __post_init__(self) -> None:
        one_of("watchdog.action", self.action, ("end", "report"))
        at_least("watchdog.floor_s", self.floor_s, 1.0)
        at_least("watchdog.init_s", self.init_s, 1.0)


@dataclass
class LaunchConfig:
    """`launch:`: how `nest-ssl pretrain` starts its ranks when nobody else (torchrun, SLURM) does."""

    max_restarts: int = 0
    """Go on by itself this many times after a stall or the death of a rank."""

    def __post_init__(self) -> None:
        at_least("launch.max_restarts", self.max_restarts, 0)


@dataclass
class DebugConfig:
    """`debug:`: looking closer, at a cost."""

    trace: bool = False
    """Print, on every rank, what goes into and comes out of every stage."""
    barrier: bool = False
    """Wait for all ranks before the encoder, and name those that do not arrive."""
