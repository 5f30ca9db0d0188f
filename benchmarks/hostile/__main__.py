"""What does the program do with bad input? Hundreds of trials in eight classes, each judged by the same rules.

    python -m benchmarks.hostile [--only CLASS] [--jobs N] --output benchmarks/results/hostile.json

Each class is a module of this package, and each trial a row in it. Linux only; some trials of the class `environment`
mount small file systems and are left out without root.
"""

from __future__ import annotations

from benchmarks.hostile import (
    audio,
    checkpoints,
    configuration,
    environment,
    kills,
    manifests,
    model_files,
    names,
)
from benchmarks.hostile.harness import Trial, main

MODULES = (configuration, manifests, audio, kills, checkpoints, model_files, names, environment)


def trials() -> list[Trial]:
    return [trial for module in MODULES for trial in module.trials()]


if __name__ == "__main__":
    main(trials, __doc__)
