"""Stalls of several NCCL ranks on one GPU: does the report name the right rank and stage, in time, and does all resume?

    python benchmarks/stalls_on_gpu.py --output benchmarks/results/stalls_on_gpu.json

Each trial is the real `nest-ssl pretrain` with four ranks that share the GPU (`debug.share_gpu`) and a fault in rank 2,
brought in from outside as in tests/faults. Steps are captured, except where the trial needs them not to be. A run that
was ended is resumed with the command of its report, and must have the losses of one that nothing happened to. Three
trials run at a time; all of them take about 6 minutes. Rows 34 and 35 of the fault table. Exit code 1: a trial failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
from tests.faults.harness import INJECT, Run
from tests.integration.runs import PROGRAM, losses

RATE = 16_000
SECONDS = 1.5
"""All files have one length: one shape, of which there are two graphs, with and without an update."""
STEPS, ACCUMULATE, BATCH = 12, 2, 4
FAULTY, AT = 2, 7
"""The rank, and the step: all graphs have been captured by then."""
SLACK_S = 2.0
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Trial:
    """A fault, and what must be said of it."""

    fault: str
    """A name in tests/faults/inject."""
    kinds: tuple[str, ...] = ()
    """Kinds of verdicts that are right; none: the run must finish."""
    stages: tuple[str, ...] = ()
    at: int = AT
    captured: bool = True
    limited: bool = True
    """It is a stall, to be reported within T + 2 s; a death is reported within 3 s."""
    everywhere: bool = False
    """It happens on all ranks."""


TRIALS = {
    "host sleeps": Trial("step:sleep", ("host-late",), ("transfer", "data")),
    "host stopped": Trial("step:freeze", ("stopped",), ("transfer", "data")),
    "killed": Trial("step:kill", ("died",), ("transfer", "data"), limited=False),
    "GPU spins in a kernel": Trial("gpu_spins:backward", ("gpu-stuck",), ("backward",)),
    "all GPUs in one collective": Trial("gpu_spins:exchange", ("gpu-unfinished",), ("exchange",), everywhere=True),
    "replays another graph": Trial("other_graph", ("gpu-ahead", "gpu-stuck"), ("preprocessor", "encoder", "exchange")),
    "diverging collective, eager": Trial("encoder:extra_all_reduce", ("diverged",), ("encoder",), captured=False),
    "out of memory": Trial(
        "launch:allocate_nothing_more", ("out-of-memory",), ("transfer", "preprocessor"), captured=False, limited=False
    ),
    "late loader": Trial("reading:sleep", ("host-late", "file"), ("data",)),
    "capture fails on one rank": Trial("capture:fail_to_capture", at=-1),
}


@dataclass
class Result:
    """What came out of a trial."""

    name: str
    ok: bool = False
    wrong: list[str] = field(default_factory=list)
    exit_code: int | None = None
    kind: str = ""
    ranks: list[int] = field(default_factory=list)
    stage: str = ""
    step: int = -1
    cause: str = ""
    others: dict[str, str] = field(default_factory=dict)
    stalled_s: float = 0.0
    limit_s: float = 0.0
    """T: the floor, or more where the steps of this run took long."""
    reported_s: float | None = None
    """From the fault to the report."""
    ended_s: float | None = None
    left_running: int = 0
    resumed: int | None = None
    """The exit code of the resumed run."""
    losses_equal: bool | None = None
    largest_difference: float | None = None
    whole_s: float = 0.0
    said: str = ""
    """The end of the output, if something is wrong."""


class Lab:
    """Where the trials happen."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.corpus = folder / "corpus"
        make_corpus(self.corpus, options.ranks)

    def arguments(self, name: str, *, captured: bool) -> list[str]:
        options, data = self.options, self.corpus
        device = ["trainer.accelerator=cpu", "trainer.precision=32"]
        if options.accelerator == "gpu":
            device = ["trainer.accelerator=gpu", "trainer.precision=bf16", "debug.share_gpu=true"]
        return [
            *("size=small", "model.encoder.n_layers=2", "model.num_classes=256", "model.optim.sched.warmup_steps=20"),
            *(f"model.train_ds.manifest_filepath={data}/train.jsonl", f"model.train_ds.batch_size={BATCH}"),
            f"model.train_ds.noise_manifest={data}/noise.jsonl",
            *(f"model.validation_ds.manifest_filepath={data}/valid.jsonl", f"model.validation_ds.batch_size={BATCH}"),
            *("model.train_ds.num_workers=0", "model.validation_ds.num_workers=0"),
            *(f"model.compile={'auto' if captured else 'off'}", *device, f"trainer.devices={options.ranks}"),
            *("trainer.sync_batchnorm=true", f"trainer.accumulate_grad_batches={ACCUMULATE}"),
            # Not every step is logged: between two of them, hosts are ahead of their GPUs.
            *(f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=3", "trainer.enable_progress_bar=false"),
            *("exp_manager.create_tensorboard_logger=false", f"exp_manager.exp_dir={self.folder}"),
            *(f"exp_manager.name={name}", "exp_manager.checkpoint_callback_params.every_n_train_steps=3"),
            *(f"watchdog.floor_s={options.floor}", "watchdog.init_s=180"),
        ]

    def start(self, command: list[str], name: str, fault: str = "") -> Run:
        token = f"nest-test-{uuid.uuid4().hex}"
        note, output = self.folder / f"{token}.note", self.folder / f"{token}.stderr"
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(INJECT), str(ROOT / "src"), *sys.path]),
            "NEST_FAULT": fault,
            "NEST_FAULT_NOTE": str(note),
            "NEST_FAULT_TOKEN": token,
            "OMP_NUM_THREADS": "1",
        }
        with output.open("wb") as file:
            process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=file)
        return Run(process, self.folder / name, note, output, token, self.corpus)

    def undisturbed(self, captured: bool) -> Path:
        name = "captured" if captured else "eager"
        run = self.start([*PROGRAM, *self.arguments(name, captured=captured)], name).wait(TIMEOUT_S)
        if run.returncode or run.incidents():
            raise RuntimeError(f"the undisturbed run failed with {run.returncode}:\n{run.stderr[-6000:]}")
        print(f"undisturbed, {name}: {engine_of(run)}", flush=True)
        return run.run_dir

    def try_it(self, name: str, undisturbed: dict[bool, Path]) -> Result:
        trial, result, started = TRIALS[name], Result(name), time.monotonic()
        folder = name.replace(" ", "_").replace(",", "")
        command = [*PROGRAM, *self.arguments(folder, captured=trial.captured)]
        rank = "all" if trial.everywhere else FAULTY % self.options.ranks
        run = self.start(command, folder, f"{trial.fault} {rank} {trial.at}")
        try:
            self._judge(trial, result, run.wait(TIMEOUT_S))
            if trial.kinds and run.incidents():
                again = self.start(shlex.split(run.incident["resume_command"]), folder).wait(TIMEOUT_S)
                result.resumed = again.returncode
                check(result, again.returncode == 0, f"resumed: exit code {again.returncode}\n{again.stderr[-3000:]}")
            compare_losses(result, run.run_dir, undisturbed[trial.captured])
        except Exception:
            result.wrong.append(traceback.format_exc())
        finally:
            if run.process.poll() is None:
                run.process.kill()
            for line in run.survivors():
                subprocess.run(["kill", "-9", line.split()[0]], check=False)
        result.ok, result.whole_s = not result.wrong, round(time.monotonic() - started, 1)
        result.said = "" if result.ok else run.stderr[-6000:]
        print(f"{'ok    ' if result.ok else 'WRONG '} {in_a_line(result)}", flush=True)
        return result

    def _judge(self, trial: Trial, result: Result, run: Run) -> None:
        result.exit_code = run.returncode
        result.left_running = nothing_left(run)
        check(result, result.left_running == 0, f"left running: {run.survivors()}")
        if not trial.kinds:
            check(result, run.returncode == 0, f"exit code {run.returncode}, and it should continue")
            check(result, "without CUDA graphs" in run.stderr, "no line says that graphs are off")
            return
        check(result, len(run.incidents()) == 1, f"{len(run.incidents())} incidents")
        incident = run.incidents()[0]
        result.kind, result.ranks, result.stage = incident["kind"], incident["ranks"], incident["stage"]
        result.step, result.cause, result.others = incident["step"], incident["cause"], incident["waiting"]
        result.stalled_s = incident["stalled_s"]
        result.reported_s = round(run.reported_s, 2)
        result.ended_s = round(run.ended_at - run.struck, 2)
        check(result, run.returncode == 75, f"exit code {run.returncode}")
        ranks = list(range(self.options.ranks)) if trial.everywhere else [FAULTY % self.options.ranks]
        # Hosts of CPU ranks wait in their collectives themselves.
        kinds = trial.kinds if self.options.accelerator == "gpu" else (*trial.kinds, "missing")
        check(result, result.kind in kinds, f"{result.kind} is not {' or '.join(kinds)}")
        check(result, result.ranks == ranks, f"ranks {result.ranks}")
        check(result, result.stage in trial.stages, f"{result.stage} is not {' or '.join(trial.stages)}")
        result.limit_s = incident["limit_s"]
        most_s = result.limit_s + SLACK_S if trial.limited else 3.0
        check(result, result.reported_s <= most_s, f"reported after {result.reported_s} s, not {most_s:g}")


def make_corpus(folder: Path, ranks: int) -> None:
    """Files of one length, and manifests that repeat them: one epoch is the whole run."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    lines = []
    for number in range(24):
        soundfile.write(folder / f"{number}.wav", 0.1 * random.standard_normal(int(RATE * SECONDS)), RATE)
        lines.append(json.dumps({"audio_filepath": f"{number}.wav", "duration": SECONDS}) + "\n")
    count = STEPS * ACCUMULATE * BATCH * ranks
    (folder / "train.jsonl").write_text("".join(lines[number % len(lines)] for number in range(count)))
    (folder / "valid.jsonl").write_text("".join(lines[: BATCH * ranks]))
    (folder / "noise.jsonl").write_text("".join(lines[:4]))


def check(result: Result, holds: bool, otherwise: str) -> None:
    if not holds:
        result.wrong.append(otherwise)


def nothing_left(run: Run, within_s: float = 5.0) -> int:
    """Return how many processes of the run are alive; the driver needs a moment for those with a GPU."""
    deadline = time.monotonic() + within_s
    while run.survivors() and time.monotonic() < deadline:
        time.sleep(0.1)
    return len(run.survivors())


def compare_losses(result: Result, run_dir: Path, undisturbed: Path) -> None:
    pairs = []
    for column in ("train_loss", "val_loss"):
        found, wanted = (losses(folder / "metrics.csv", column) for folder in (run_dir, undisturbed))
        check(result, found.keys() == wanted.keys(), f"{column} at steps {sorted(found)}, not {sorted(wanted)}")
        pairs += [(found[step], wanted[step]) for step in found.keys() & wanted.keys()]
    result.losses_equal = all(a == b for a, b in pairs)
    result.largest_difference = max((abs(float(a) - float(b)) for a, b in pairs), default=0.0)
    check(result, result.losses_equal, f"losses differ by up to {result.largest_difference:.3g}")


def engine_of(run: Run) -> str:
    return "; ".join(line for line in run.stderr.splitlines() if "raining runs with" in line or "CUDA graph" in line)


def in_a_line(result: Result) -> str:
    where = f"{result.kind} {result.ranks} in {result.stage} of step {result.step}: {result.cause}"
    said = f"{where}; after {result.reported_s} s" if result.kind else "finished"
    wrong = "".join(f"\n         {line}" for line in result.wrong)
    return f"{result.name}: {said}; exit {result.exit_code}, resumed {result.resumed}, {result.whole_s} s{wrong}"


def facts(options: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    on_gpu = options.accelerator == "gpu"
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "ranks": options.ranks,
        "floor_s": options.floor,
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="JSON file to which the results are appended")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--floor", type=float, default=5.0, help="watchdog.floor_s")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=[*TRIALS], help=f"of {', '.join(TRIALS)}")
    parser.add_argument("--accelerator", choices=["gpu", "cpu"], default="gpu", help="cpu: to try this script")
    options = parser.parse_args()
    names = options.only or list(TRIALS)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        lab = Lab(Path(folder), options)
        needed = sorted({TRIALS[name].captured for name in names})
        undisturbed = dict(zip(needed, pool.map(lab.undisturbed, needed), strict=True))
        results = list(pool.map(lambda name: lab.try_it(name, undisturbed), names))
    content = {**facts(options), "whole_s": round(time.monotonic() - started), "trials": [asdict(r) for r in results]}
    if options.output is not None:
        before = json.loads(options.output.read_text()) if options.output.is_file() else []
        options.output.write_text(json.dumps([*before, content], indent=1) + "\n")
    print(f"{sum(result.ok for result in results)} of {len(results)} as they should be, in {content['whole_s']} s")
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
