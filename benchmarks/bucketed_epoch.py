"""Padding and idle ranks of an epoch on mixed durations, from the batch plan alone: no audio, no GPU.

    python benchmarks/bucketed_epoch.py      # adds its figures to benchmarks/results/bucketed_epoch.json

200,000 utterances of 2 to 30 s, uniform on a logarithmic scale, are planned for 8 ranks. Padding is counted up to the
planned shape of each step. A rank is idle while it waits for the slowest one of its step; a step's time follows from
the shape, by a cost model fitted to the measured steps of benchmarks/results/train_step.json. With planned shapes, all
ranks do the same work by construction; `idle, own width` is what they would wait if each padded to its own longest
utterance instead.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nest_ssl.config import DatasetConfig
from nest_ssl.data.build import build_plan
from nest_ssl.data.plan.batches import Plan
from nest_ssl.data.sources.files import Source

RATE = 16_000
RESULTS = Path(__file__).parent / "results"
GOAL = 0.05

SETTINGS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "30 buckets": {"use_bucketing": True, "num_buckets": 30},
    "30 buckets, own bucket per rank": {
        "use_bucketing": True,
        "num_buckets": 30,
        "bucketing_strategy": "fully_randomized",
    },
}
COUNTED = "30 buckets"


class Simulated(Source):
    """Utterances that have a duration and no audio."""

    name = "simulated"

    def __init__(self, num_utterances: int, least_s: float, most_s: float) -> None:
        logarithms = np.random.default_rng(0).uniform(np.log(least_s), np.log(most_s), num_utterances)
        self._durations_s = np.exp(logarithms).astype(np.float32)

    def __len__(self) -> int:
        return len(self._durations_s)

    def read(self, index: int, on_read: Any = None) -> Any:
        raise NotImplementedError("there is no audio")

    def fingerprint(self) -> str:
        return "simulated"

    @property
    def durations_s(self) -> npt.NDArray[np.float32]:
        return self._durations_s


@dataclass(frozen=True)
class CostModel:
    """Milliseconds of a step: a constant, the padded audio, and attention, which grows with the length squared."""

    constant: float
    per_second: float
    per_second_squared: float

    @classmethod
    def fitted(cls, path: Path, size: str = "large") -> CostModel:
        """Fit to the measured steps of one model size, by least squares of the relative errors."""
        settings = [one for one in json.loads(path.read_text())["settings"] if one["size"] == size]
        measured_ms = np.array([one["rows"]["nest-ssl"]["ms"] for one in settings])
        terms = np.array([[1.0, one["batch"] * one["seconds"], one["batch"] * one["seconds"] ** 2] for one in settings])
        solution, *_ = np.linalg.lstsq(terms / measured_ms[:, None], np.ones(len(settings)), rcond=None)
        return cls(*solution.tolist())

    def ms(self, batch_size: int, seconds: float) -> float:
        padded_s = batch_size * seconds
        return self.constant + self.per_second * padded_s + self.per_second_squared * padded_s * seconds


def measure(plan: Plan, durations_s: npt.NDArray[np.float32], cost: CostModel) -> dict[str, Any]:
    """Add up one epoch over all ranks."""
    num_steps = plan.num_batches()
    assert num_steps is not None
    audio_s = padded_s = 0.0
    work_ms = np.zeros((2, plan.world_size))  # with planned shapes, with own widths
    step_ms = np.zeros(2)
    num_planned, shapes = 0, set()
    for step in range(num_steps):
        specs = [plan.batch(0, step, rank) for rank in range(plan.world_size)]
        own_s = [float(durations_s[spec.indices].max()) for spec in specs]
        planned_s = [
            s if spec.num_samples is None else spec.num_samples / RATE for s, spec in zip(own_s, specs, strict=True)
        ]
        num_planned += specs[0].num_samples is not None
        shapes.add((len(specs[0].indices), specs[0].num_samples))
        for spec, seconds in zip(specs, planned_s, strict=True):
            audio_s += float(durations_s[spec.indices].sum(dtype=np.float64))
            padded_s += len(spec.indices) * seconds
        for row, widths_s in enumerate((planned_s, own_s)):
            ranks_ms = np.array([cost.ms(len(spec.indices), s) for spec, s in zip(specs, widths_s, strict=True)])
            work_ms[row] += ranks_ms
            step_ms[row] += ranks_ms.max()
    idle = 1 - work_ms / step_ms[:, None]
    return {
        "steps": num_steps,
        "planned_steps": num_planned,
        "shapes": len(shapes),
        "padding_share": 1 - audio_s / padded_s,
        "idle_share_per_rank": idle[0].round(5).tolist(),
        "idle_share_per_rank_own_width": idle[1].round(5).tolist(),
        "epoch_s": step_ms[0] / 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--utterances", type=int, default=200_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--batch-duration", type=float, default=600.0, help="seconds of audio per batch and rank")
    parser.add_argument("--output", type=Path, default=RESULTS / "bucketed_epoch.json")
    options = parser.parse_args()

    source = Simulated(options.utterances, 2.0, 30.0)
    cost = CostModel.fitted(RESULTS / "train_step.json")
    rows = {}
    print(f"{'':34}{'steps':>6} {'shapes':>6} {'padding':>8} {'idle':>8} {'idle, own width':>16} {'epoch':>8}")
    for name, settings in SETTINGS.items():
        size = (
            {"batch_duration": options.batch_duration} if settings else {"batch_size": int(options.batch_duration / 30)}
        )
        config = DatasetConfig(shuffle=True, drop_last=True, **size, **settings)
        plan = build_plan(config, [source], world_size=options.ranks, seed=0)
        rows[name] = row = measure(plan, source.durations_s, cost)
        idle, own = max(row["idle_share_per_rank"]), max(row["idle_share_per_rank_own_width"])
        shapes = row["shapes"] if row["planned_steps"] else "-"
        print(
            f"{name:34}{row['steps']:6} {shapes:>6} {row['padding_share']:8.1%} "
            f"{idle:8.1%} {own:16.1%} {row['epoch_s']:6.0f} s"
        )
    counted = rows[COUNTED]
    worst = max(counted["padding_share"], *counted["idle_share_per_rank"], *counted["idle_share_per_rank_own_width"])
    print(f"{COUNTED}: the largest share is {worst:.1%}, goal {GOAL:.0%}: {'reached' if worst < GOAL else 'MISSED'}")
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    record = {
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "utterances": options.utterances,
        "ranks": options.ranks,
        "batch_duration_s": options.batch_duration,
        "cost_model_ms": asdict(cost),
        "goal": GOAL,
        "rows": rows,
    }
    records = json.loads(options.output.read_text()) if options.output.is_file() else []
    options.output.write_text(json.dumps([*records, record], indent=2) + "\n")


if __name__ == "__main__":
    main()
