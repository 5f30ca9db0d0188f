"""What `nest-ssl pretrain` does with this process: launch ranks, be one of them, or train alone."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nest_ssl.config import ExperimentConfig, NestConfig, TrainerConfig
from nest_ssl.config.data import DatasetConfig
from nest_ssl.freed_memory import keep_freed_memory
from nest_ssl.launch import ranks
from nest_ssl.training import experiment
from nest_ssl.training.experiment import RunFolder
from nest_ssl.watchdog.rank import FINISHED, NEEDS_A_PERSON, RESUMABLE, RankFacts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How this process ends."""

    exit_code: int
    run_dir: Path
    speaks: bool
    """It is the one of the job that tells the user about the result."""


def start(cfg: NestConfig, arguments: list[str]) -> Outcome:
    """Run `cfg`. `arguments` are those of `nest-ssl pretrain`, for other processes to repeat."""
    per_node = devices_per_node(cfg.trainer)
    facts = ranks.from_environment(os.environ, per_node)
    folder = experiment.run_folder(cfg)
    if cfg.trainer.num_nodes > 1 or (facts is not None and facts.world_size > 1):
        experiment.check_all_name_it_alike(cfg)
    if facts is None and (per_node * cfg.trainer.num_nodes > 1 or cfg.watchdog.enabled):
        with experiment.named_for_ranks(folder):
            code = _launch(cfg, arguments, per_node, folder.path)
        return Outcome(code, folder.path, speaks=os.environ.get("NODE_RANK", "0") == "0")
    if facts is not None and facts.world_size == 1:
        facts.check_against(per_node, cfg.trainer.num_nodes)  # else Lightning would start the others, unwatched
    facts = facts or _alone()
    code = _train(cfg, arguments, facts, folder)
    return Outcome(code, folder.path, speaks=facts.rank == 0 and facts.launcher != "nest-ssl")


def devices_per_node(config: TrainerConfig) -> int:
    """Ranks that `trainer.devices` means on this machine."""
    devices = config.devices
    if isinstance(devices, list):
        return len(devices)
    if str(devices).isdigit():
        return int(devices)
    if config.accelerator == "cpu":
        return 1
    import torch  # only where GPUs have to be counted

    return max(torch.cuda.device_count(), 1)


def _launch(cfg: NestConfig, arguments: list[str], per_node: int, run_dir: Path) -> int:
    from nest_ssl.launch.launcher import Job, check_address, check_port, launch

    node = int(os.environ.get("NODE_RANK", "0"))
    port = os.environ.get("MASTER_PORT")
    if cfg.trainer.num_nodes > 1 and (port is None or "MASTER_ADDR" not in os.environ or "NODE_RANK" not in os.environ):
        raise ValueError(
            f"trainer.num_nodes={cfg.trainer.num_nodes}: start this command on every node with MASTER_ADDR, "
            f"MASTER_PORT and NODE_RANK set, or use torchrun or srun."
        )
    address = os.environ["MASTER_ADDR"] if cfg.trainer.num_nodes > 1 else "127.0.0.1"
    check_address(address)
    if port is not None and node == 0:
        check_port(int(port))
        if cfg.trainer.num_nodes > 1:
            check_port(int(port) + 1)  # the monitors'
    verbose = ["--verbose"] if logging.getLogger().isEnabledFor(logging.DEBUG) else []
    job = Job(
        command=[sys.executable, "-m", "nest_ssl", *verbose, "pretrain", *arguments],
        local_ranks=per_node,
        num_nodes=cfg.trainer.num_nodes,
        node=node,
        master_addr=address,
        master_port=None if port is None else int(port),
        workers_per_rank=worker_slots(cfg),
        settings=monitor_settings(cfg, arguments, run_dir, None),
        resume_arguments=resume_overrides(cfg, run_dir),
        max_restarts=cfg.launch.max_restarts,
    )
    return launch(job)


def _train(cfg: NestConfig, arguments: list[str], facts: RankFacts, folder: RunFolder) -> int:
    from nest_ssl.launch.attach import attached
    from nest_ssl.launch.launcher import check_address, check_port
    from nest_ssl.watchdog.rank import RankState

    keep_freed_memory()
    os.environ.update(facts.variables() if facts.world_size > 1 else {})
    settings = monitor_settings(cfg, arguments, folder.path, facts)
    if cfg.launch.max_restarts and facts.launcher not in ("nest-ssl", "nobody") and facts.rank == 0:
        log.warning("launch.max_restarts is left to %s, which has launched this run.", facts.launcher)
    many = facts.world_size > 1
    if facts.rank > 0:
        for handler in logging.getLogger().handlers:
            handler.setLevel(logging.WARNING)  # rank 0 speaks for all; each rank has its own log file
    with attached(facts, settings, workers_per_rank=worker_slots(cfg), wants_monitor=many) as agent:
        try:
            if many and facts.launcher in ("slurm", "environment"):
                check_address(facts.master_addr)
                if facts.rank == 0:
                    check_port(facts.master_port)
            with _without_garbage_collection():
                from nest_ssl.training.pretrain import pretrain
                from nest_ssl.training.watch import Stopped

            try:
                pretrain(cfg, agent, folder)
            except Stopped as stopped:
                agent.mark.state = RankState.STOPPED
                if facts.rank == 0:
                    log.info("%s; to go on: %s", stopped, settings["resume_command"])
                return RESUMABLE
        except BaseException as error:
            agent.fail(error)
            if agent.has_monitor:
                return NEEDS_A_PERSON  # the monitor has said what there is to say
            raise
        agent.mark.state = RankState.FINISHED
    return FINISHED


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """For imports: Lightning's two thousand modules are looked through again and again, and are no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _alone() -> RankFacts:
    return RankFacts(0, 0, 1, 1, 0, "nobody", "127.0.0.1", ranks.DEFAULT_PORT)


def monitor_settings(cfg: NestConfig, arguments: list[str], run_dir: Path, facts: RankFacts | None) -> dict[str, Any]:
    """All that the monitor needs to know of the configuration."""
    return {
        "run_dir": str(run_dir),
        "floor_s": cfg.watchdog.floor_s,
        "init_s": cfg.watchdog.init_s,
        "judges": cfg.watchdog.enabled is not False,
        "ends": cfg.watchdog.action == "end",
        "saves": experiment.saves_when_stopped(cfg),
        "resume_command": resume_command(cfg, arguments, run_dir, facts),
    }


def worker_slots(cfg: NestConfig) -> int:
    """Slots for processes that read: the rank itself and its loader processes, for every loader."""

    def slots(config: DatasetConfig | None) -> int:
        return 0 if config is None else 1 + config.num_workers

    validation = cfg.model.validation_ds
    manifests = validation.manifest_filepath if validation is not None else None
    num_sets = len(manifests) if isinstance(manifests, list) else 1
    return max(1, slots(cfg.model.train_ds) + num_sets * slots(validation))


def resume_overrides(cfg: NestConfig, run_dir: Path) -> list[str]:
    """What the command of a run lacks to go on with that run."""
    exp = cfg.exp_manager or ExperimentConfig()
    extra = []
    if exp.resume_from_checkpoint is not None:
        extra.append("exp_manager.resume_from_checkpoint=null")
    if not exp.resume_if_exists:
        extra.append("exp_manager.resume_if_exists=true")
        if exp.explicit_log_dir is None and exp.version is None:
            plain = re.fullmatch(r"[\w./:@~+-]+", str(run_dir)) is not None
            extra.append(f"exp_manager.explicit_log_dir={run_dir if plain else repr(str(run_dir))}")
    if not exp.resume_ignore_no_checkpoint:
        extra.append("exp_manager.resume_ignore_no_checkpoint=true")
    return extra


def resume_command(cfg: NestConfig, arguments: list[str], run_dir: Path, facts: RankFacts | None) -> str:
    """A line for the shell that goes on with the run."""
    program = [*_program(), "pretrain"]
    if facts is not None and facts.launcher == "torchrun":
        program = ["torchrun", f"--nnodes={facts.num_nodes}", f"--nproc-per-node={facts.local_world_size}"]
        program += ["-m", "nest_ssl", "pretrain"]
    elif facts is not None and facts.launcher == "slurm":
        program = ["srun", f"--ntasks={facts.world_size}", *program]
    return shlex.join([*program, *arguments, *resume_overrides(cfg, run_dir)])


def _program() -> list[str]:
    """nest-ssl, as it was started."""
    started = Path(sys.argv[0])
    if started.name != "nest-ssl":
        return [sys.executable, "-m", "nest_ssl"]
    return ["nest-ssl"] if shutil.which("nest-ssl") == str(started) else [str(started)]
