"""Sharded weights on real NCCL ranks: train, save in shards, resume with other numbers of ranks, compare every tensor.

    python benchmarks/fsdp_on_gpu.py --output benchmarks/results/fsdp_on_gpu.json

`nest-ssl pretrain` trains xxlarge for 20 steps on 2 ranks with `trainer.strategy=fsdp`, an average of the weights and
clipping; all ranks share one GPU (`debug.share_gpu`), so this shows behaviour, not speed. Its one checkpoint, about 17
GB, is resumed on 1 rank, whole, and on 4, sharded. Both must have the weights, moments and averages that the 2 ranks
had when they saved, to the bit, and the same loss on one fixed batch; both then train two more steps. Exit code 1: they
do not.

Tensors are compared by a hash of their bits that is a sum over elements: every rank adds up its own part, and nothing
has to be gathered.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1])]
from nest_ssl.checkpoint.read import read_checkpoint
from nest_ssl.training import hydra_runner, sharding, state, trainer
from nest_ssl.training.parallel import World
from nest_ssl.training.run import pretrain
from nest_ssl.training.saving import Saver
from nest_ssl.training.state import Trained, averaged_weights

TRAINED_ON, RESUMED_ON = 2, (1, 4)
MORE_STEPS = 2
"""After a resume."""
TOLERANCE = 1e-5
WITNESS = "NEST_SSL_FSDP_WITNESS"
"""Where rank 0 of the program writes what it saw; without it this file is the benchmark itself."""


# ---- inside the program, on every rank ----


@hydra_runner(config_name="nest_fast-conformer")
def observed(cfg: Any) -> None:
    """`nest-ssl pretrain`; notes its tensors when it has resumed or, if it has not, when it has trained."""
    restore, save_nemo = state.restore, Saver.save_nemo_at_end

    class ObservedSaver(Saver):
        def save_nemo_at_end(self, trained: Trained) -> None:
            if not Path(os.environ[WITNESS]).exists():
                note(trained)
            save_nemo(self, trained)

    def observed_restore(checkpoint: dict[str, Any], trained: Trained) -> Any:
        started = time.perf_counter()
        resumed = restore(checkpoint, trained)
        note(trained, restored_s=time.perf_counter() - started)
        return resumed

    trainer.Saver, trainer.restore = ObservedSaver, observed_restore  # type: ignore[attr-defined]
    pretrain(cfg)


def note(trained: Trained, **more: Any) -> None:
    """Write down the hashes of all tensors and the loss of a fixed batch; every rank takes part."""
    world = trained.step.world
    states = trained.step.optimizer.state_dict()["state"]
    moments = {f"{number} {kind}": value for number, kinds in states.items() for kind, value in kinds.items()}
    kinds = {"weights": trained.model.state_dict(), "averages": averaged_weights(trained), "moments": moments}
    seen: dict[str, Any] = {kind: hashes(tensors, world) for kind, tensors in kinds.items()}
    seen |= {
        "loss": fixed_loss(trained),
        "ranks": world.size,
        "sharded": sharding.is_sharded(trained.model),
        "engine": trained.step.engine.description,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if world.device.type == "cuda" else 0.0,
        **more,
    }
    if world.is_first:
        Path(os.environ[WITNESS]).write_text(json.dumps(seen))


@torch.no_grad()
def hashes(tensors: dict[str, Tensor], world: World) -> dict[str, int]:
    """A hash of each whole tensor; of what every rank has whole, rank 0's."""
    sums = []
    for value in tensors.values():
        own, start = sharding.part(value), 0
        if sharding.is_shard(value):
            rows_per_rank = -(-value.shape[0] // world.size)
            start = world.rank * rows_per_rank * (value.numel() // max(value.shape[0], 1))
        own = own.to(world.device).reshape(-1).contiguous()
        bits = own.view({8: torch.int64, 4: torch.int32, 1: torch.int8}[own.element_size()]).long()
        places = torch.arange(start, start + len(bits), device=bits.device)
        total = (bits * (2 * places + 1)).sum()  # wraps around, in whatever order
        sums.append(total if sharding.is_shard(value) or world.is_first else torch.zeros_like(total))
    return dict(zip(tensors, world.sum(torch.stack(sums)).tolist(), strict=True))


def fixed_loss(trained: Trained) -> float:
    """The loss of one batch, the same in every program: validated, so without dropout."""
    device = trained.step.world.device
    generator = torch.Generator().manual_seed(0)
    audio = 0.1 * torch.randn(2, 64_000, generator=generator).to(device)
    length = torch.tensor([64_000, 48_000], device=device)
    torch.manual_seed(0)  # of the masks
    trained.model.eval()
    loss = float(trained.step.engine.evaluate((audio, length, audio, length)).loss)
    trained.model.train()
    return loss


# ---- the benchmark ----


def run_program(work: Path, num_ranks: int, steps: int, overrides: list[str], *, saves: bool) -> dict[str, Any]:
    """Run the program until `steps` steps are done; what it saw, and how long it took."""
    witness = work / f"{num_ranks}.json"
    command = [
        *(sys.executable, __file__, "size=xxlarge", "trainer.strategy=fsdp", f"trainer.devices={num_ranks}"),
        *(f"trainer.max_steps={steps}", "trainer.precision=bf16", "trainer.gradient_clip_val=1.0"),
        *("trainer.log_every_n_steps=1", "debug.share_gpu=true", "~model.validation_ds"),
        *(f"model.train_ds.manifest_filepath={work}/train.jsonl", f"model.train_ds.noise_manifest={work}/noise.jsonl"),
        *("model.train_ds.batch_size=2", "model.train_ds.num_workers=2", "model.optim.sched.warmup_steps=100"),
        *(f"exp_manager.exp_dir={work}", "exp_manager.name=run", "exp_manager.ema.enable=true"),
        *("exp_manager.ema.decay=0.9", "exp_manager.create_tensorboard_logger=false"),
        f"exp_manager.create_checkpoint_callback={str(saves).lower()}",
        *overrides,
    ]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, WITNESS: str(witness)})
    if done.returncode:
        raise RuntimeError(f"{num_ranks} ranks: exit code {done.returncode}\n{done.stderr[-6000:]}")
    with (work / "run" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train_loss"]]
    seen: dict[str, Any] = json.loads(witness.read_text())
    seen |= {
        "whole_s": time.perf_counter() - started,
        "losses": [float(row["train_loss"]) for row in rows],
        "step_s": statistics.median(float(row["train_step_timing"]) for row in rows[-MORE_STEPS:]),
        "last_step": int(rows[-1]["step"]),
    }
    print(f"{num_ranks} ranks: {seen['whole_s']:.0f} s, {seen['engine']}, loss {seen['loss']:.6f}", flush=True)
    return seen


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """How many tensors of each kind differ, and by how much the loss does."""
    out: dict[str, Any] = {}
    for kind in ("weights", "averages", "moments"):
        names = found[kind].keys() | wanted[kind].keys()
        differ = sorted(name for name in names if found[kind].get(name) != wanted[kind].get(name))
        out[kind] = {"tensors": len(names), "different": len(differ), "first": differ[:3]}
    out["loss"] = abs(found["loss"] - wanted["loss"])
    return out


def summary(seen: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in seen.items() if key not in ("weights", "averages", "moments")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume-on", type=int, nargs="*", default=list(RESUMED_ON))
    parser.add_argument("--work", type=Path, help="a folder with 30 GB of room; default: a temporary one")
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*", help="further overrides of nest-ssl pretrain")
    options = parser.parse_args()
    from benchmarks.pretrain_on_gpu import make_data  # the ranks need none of it

    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        work = Path(folder)
        make_data(work, 16, 16 * options.steps, 4.0)
        trained = run_program(work, TRAINED_ON, options.steps, options.overrides, saves=True)
        last = work / "run" / "checkpoints" / "last.ckpt"
        size_gb = sum(path.stat().st_size for path in last.iterdir()) / 1e9
        whole = read_checkpoint(next(last.parent.glob("*.nemo"))).weights  # the average
        nemo = hashes(whole, World(device=torch.device("cuda" if torch.cuda.is_available() else "cpu")))
        resumed = {
            count: run_program(work, count, options.steps + MORE_STEPS, options.overrides, saves=False)
            for count in options.resume_on
        }
    differs = {count: differences(seen, trained) for count, seen in resumed.items()}
    same = nemo == trained["averages"] and all(
        one["loss"] <= TOLERANCE and not any(one[kind]["different"] for kind in ("weights", "averages", "moments"))
        for one in differs.values()
    )
    on_gpu = torch.cuda.is_available()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    result = {
        "same": same,
        "nemo_is_the_average": nemo == trained["averages"],
        "steps": options.steps,
        "overrides": options.overrides,
        "checkpoint_gb": size_gb,
        "trained": summary(trained),
        "resumed": {count: {**summary(seen), "differs": differs[count]} for count, seen in resumed.items()},
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }
    print(json.dumps(result, indent=1))
    if options.output is not None:
        earlier = json.loads(options.output.read_text()) if options.output.exists() else []
        options.output.write_text(json.dumps([*earlier, result], indent=1) + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    if WITNESS in os.environ:
        observed()
    else:
        sys.exit(main())
