"""The `watchdog:`, `launch:` and `debug:` sections, which NeMo does not have."""

from __future__ import annotations

from dataclasses import dataclass

from nest_ssl.config.checks import at_least, one_of


@dataclass
class WatchdogConfig:
    """`watchdog:`: what monitors the ranks."""

    enabled: bool | None = None
    """Detect stalled ranks; null: whenever there is more than one rank."""
    action: str = "end"
    """end: report, then end the job with exit code 75. report: write the report and let the job run."""
    floor_s: float = 60.0
    """Shortest stall that counts. A stage may take this long, or 5 times its usual (p99) duration if that is longer."""
    init_s: float = 900.0
    """How long starting may take: joining, comparing, loading manifests, the first step with its compilation."""

    def __post_init__(self) -> None:
        one_of("watchdog.action", self.action, ("end", "report"))
        at_least("watchdog.floor_s", self.floor_s, 1.0)
        at_least("watchdog.init_s", self.init_s, 1.0)


@dataclass
class LaunchConfig:
    """`launch:`: how `nest-ssl pretrain` starts its ranks, unless torchrun or SLURM does."""

    max_restarts: int = 0
    """Resume automatically up to this many times after a stall or the death of a rank."""

    def __post_init__(self) -> None:
        at_least("launch.max_restarts", self.max_restarts, 0)


@dataclass
class DebugConfig:
    """`debug:`: slower, but shows more."""

    trace: bool = False
    """Print the inputs and outputs of every stage, on every rank."""
    barrier: bool = False
    """Wait for all ranks before the encoder, and name the ranks that do not arrive."""
