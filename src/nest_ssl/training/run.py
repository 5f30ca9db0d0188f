"""One process's life: compose → launch the ranks, or be one of them and train → summary.

`nest-ssl pretrain` and `train.py` are the same five steps (`pretrain`) under the same runner (`run`).
"""

from __future__ import annotations

import functools
import logging
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nest_ssl.config import ExperimentConfig, NestConfig, compose
from nest_ssl.config.checks import as_override, log_to_terminal, printable
from nest_ssl.config.composing import DEFAULT_CONFIG
from nest_ssl.config.data import DatasetConfig
from nest_ssl.freed_memory import keep_freed_memory
from nest_ssl.launch import ranks
from nest_ssl.run_folder import RunFolder, given_ranks_per_node, ranks_per_node
from nest_ssl.training import experiment
from nest_ssl.watchdog.rank import FINISHED, NEEDS_A_PERSON, RESUMABLE, RankFacts
from nest_ssl.watchdog.system import end_before_training, on_stop_signals, open_missing_streams, python_command

log = logging.getLogger(__name__)

LEAST_OPEN_FILES = 64
"""Two ranks with two workers each start with this many, not with 24."""

Main = Callable[[NestConfig], Any]


def pretrain(cfg: NestConfig) -> None:
    """Pre-train, or resume, the run that `cfg` describes: train.py, line by line."""
    from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel  # torch takes two seconds to import
    from nest_ssl.training.trainer import Trainer, exp_manager, maybe_init_from_pretrained_checkpoint

    trainer = Trainer(**cfg.trainer)
    exp_manager(trainer, cfg.exp_manager)
    model = EncDecDenoiseMaskedTokenPredModel(cfg.model, trainer)
    maybe_init_from_pretrained_checkpoint(model, cfg)
    trainer.fit(model)


def hydra_runner(
    config_path: str | None = None, config_name: str = DEFAULT_CONFIG, *, launch: bool = True
) -> Callable[[Main], Callable[[], None]]:
    """A decorator for `main(cfg)`: composes the configuration from the command line, starts the ranks, and calls it.

    The command line is Hydra's: `python train.py --config-name=nest_demo trainer.max_steps=100`. A relative
    `config_path` is relative to the file of `main`, as in NeMo; without one, the configurations of the package count.
    The program ends with the exit code of the run: 0 finished, 75 ended but resumable, 1 needs a person. Without
    `launch` it only composes and calls `main(cfg)`, for programs whose trainer starts the ranks itself, as Lightning's.
    """

    def decorate(main: Main) -> Callable[[], None]:
        @functools.wraps(main)
        def program() -> None:
            open_missing_streams()
            log_to_terminal(logging.INFO)
            script = Path(main.__code__.co_filename)
            if launch:
                on_stop_signals(end_before_training)
            try:
                folder, name, overrides = _command_line(sys.argv[1:], script, config_path, config_name)
                with ranks.as_rank_zero():
                    cfg = compose(name, overrides, folder)
                if not launch:
                    main(cfg)
                    return
                command = [sys.executable, str(script.absolute())]
                outcome = run(cfg, main, Command(command, sys.argv[1:]))
            except (ValueError, OSError, RuntimeError) as error:
                if os.environ.get("NEST_SSL_TRACEBACK"):
                    raise
                sys.exit(printable(f"{script.name}: {error}"))
            sys.exit(outcome.exit_code)

        return program

    return decorate


def _command_line(
    arguments: Sequence[str], script: Path, config_path: str | None, config_name: str
) -> tuple[Path | None, str, list[str]]:
    """Folder and name of the yaml, and overrides."""
    folder = None if config_path is None else script.parent / config_path
    overrides, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        key, given, value = argument.partition("=")
        if key in ("--config-path", "-cp", "--config-name", "-cn"):
            if not given and not rest:
                raise ValueError(f"{key}: a value is needed.")
            value = value if given else rest.pop(0)
            if key in ("--config-path", "-cp"):
                folder = Path(value)
            else:
                config_name = value
        elif argument.startswith("-"):
            raise ValueError(f"{argument}: no such option. Known: --config-path, --config-name, and KEY=VALUE.")
        else:
            overrides.append(argument)
    return folder, config_name, overrides


# ---- launch, or train ----


@dataclass(frozen=True)
class Command:
    """How this program was started, for other processes and for people to repeat."""

    program: list[str]
    """For the ranks."""
    arguments: list[str]
    shown: list[str] | None = None
    """The program as a person would type it."""


@dataclass(frozen=True)
class Outcome:
    """How this process ends."""

    exit_code: int
    run_dir: Path
    speaks: bool
    """It is the one of the job that tells the user about the result."""


def run(cfg: NestConfig, main: Main, command: Command) -> Outcome:
    """Call `main(cfg)` on every rank of the run that `cfg` describes.

    Once it is over there is nothing left to stop: a signal does not turn a finished run into a failed job.
    """
    outcome = _run(cfg, main, command)
    on_stop_signals(signal.SIG_IGN)
    return outcome


def _check_open_files() -> None:
    """Refuse a limit with which ranks or workers would fail to start, each with a message of its own."""
    try:
        import resource
    except ImportError:  # Windows
        return
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < LEAST_OPEN_FILES:  # -1: no limit
        raise ValueError(
            f"only {most} files may be open at a time, and training needs {LEAST_OPEN_FILES} or more. Raise the limit "
            "with 'ulimit -n 4096'."
        )


def _run(cfg: NestConfig, main: Main, command: Command) -> Outcome:
    trainer = cfg.trainer
    per_node = ranks_per_node(trainer.devices, trainer.accelerator, _count_gpus)
    facts = ranks.from_environment(os.environ, per_node)
    exp = cfg.exp_manager or ExperimentConfig()
    folder = experiment.run_folder(exp, cfg.name)
    if trainer.num_nodes > 1 or (facts is not None and facts.world_size > 1):
        experiment.check_all_name_it_alike(exp)
    if facts is not None:
        takes_all = given_ranks_per_node(trainer.devices) is None
        if takes_all and ranks.sees_only_its_own(facts, os.environ, per_node):
            per_node = facts.local_world_size
        facts.check_against(per_node, trainer.num_nodes)
    _check_open_files()
    _check_gpus(cfg, facts, per_node)
    if (per_node * trainer.num_nodes if facts is None else facts.world_size) > 1:
        ranks.check_debug_level(os.environ)
        _check_interfaces(cfg)
    if facts is None and (per_node * trainer.num_nodes > 1 or cfg.watchdog.enabled):
        with experiment.named_for_ranks(folder):
            code = _launch(cfg, command, per_node, folder)
        return Outcome(code, folder.path, speaks=os.environ.get("NODE_RANK", "0") == "0")
    facts = facts or ranks.ALONE
    code = _train(cfg, main, command, facts, folder)
    return Outcome(code, folder.path, speaks=facts.rank == 0 and facts.launcher != "nest-ssl")


def _count_gpus() -> int:
    import torch  # only where GPUs have to be counted

    return torch.cuda.device_count()


def _check_gpus(cfg: NestConfig, facts: RankFacts | None, per_node: int) -> None:
    """Refuse GPUs that are not there, before a rank starts and before anything is written.

    Torch, which takes 2 s to import, is asked only where a bound that is known without it leaves a doubt.
    """
    trainer, share_gpu = cfg.trainer, cfg.debug.share_gpu
    most = 0 if trainer.accelerator == "cpu" else ranks.most_visible_gpus(os.environ)
    if most == 0 and trainer.accelerator not in ("gpu", "cuda"):
        return
    if facts is None:  # the first rank that the launcher would start on this node
        facts = RankFacts(0, 0, per_node * trainer.num_nodes, per_node, 0, "nest-ssl", "", 0)
    try:
        ranks.gpu_of_rank(trainer.devices, facts, os.environ, max(most, 1), share_gpu=share_gpu)
        is_plausible = most > 0
    except ValueError:
        is_plausible = False
    if not is_plausible:
        from nest_ssl.training.parallel import device_for

        device_for(trainer, facts, share_gpu=share_gpu)


def _check_interfaces(cfg: NestConfig) -> None:
    """Refuse network interfaces that are not there, for the backend that the ranks will use."""
    strategy, has_gpus = cfg.trainer.strategy, ranks.most_visible_gpus(os.environ) > 0
    usual = "nccl" if has_gpus and cfg.trainer.accelerator != "cpu" else "gloo"
    chosen = (strategy.get("process_group_backend") if isinstance(strategy, dict) else None) or usual
    for backend in ("gloo", "nccl"):
        if backend in str(chosen):
            ranks.check_interfaces(backend, os.environ)


def _launch(cfg: NestConfig, command: Command, per_node: int, folder: RunFolder) -> int:
    from nest_ssl.launch.launcher import Job, check_address, check_port, launch

    num_nodes = cfg.trainer.num_nodes
    node, port = ranks.number_in(os.environ, "NODE_RANK", 0), os.environ.get("MASTER_PORT")
    if num_nodes > 1 and (port is None or "MASTER_ADDR" not in os.environ or "NODE_RANK" not in os.environ):
        raise ValueError(
            f"trainer.num_nodes={num_nodes}: start this command on every node with MASTER_ADDR, MASTER_PORT and "
            f"NODE_RANK set, or use torchrun or srun."
        )
    if node >= num_nodes:
        raise ValueError(
            f"NODE_RANK={node}: nodes count from 0, and trainer.num_nodes={num_nodes}. Correct either, or unset it."
        )
    address = os.environ["MASTER_ADDR"] if num_nodes > 1 else "127.0.0.1"
    if per_node * num_nodes > 1:
        check_address(address)
    given_port = None if port is None else ranks.number_in(os.environ, "MASTER_PORT")
    if given_port is not None and node == 0:
        check_port(given_port)
        if num_nodes > 1:
            check_port(given_port + 1)  # the monitors'
    job = Job(
        command=[*command.program, *command.arguments],
        local_ranks=per_node,
        num_nodes=num_nodes,
        node=node,
        master_addr=address,
        master_port=given_port,
        workers_per_rank=worker_slots(cfg),
        settings=monitor_settings(cfg, command, folder, None),
        resume_arguments=resume_overrides(cfg, folder.path),
        max_restarts=cfg.launch.max_restarts,
    )
    return launch(job)


def _train(cfg: NestConfig, main: Main, command: Command, facts: RankFacts, folder: RunFolder) -> int:
    from nest_ssl.launch.attach import attached
    from nest_ssl.launch.launcher import check_address, check_port, fork_rank
    from nest_ssl.watchdog.judge.failure import describe
    from nest_ssl.watchdog.rank import RankState

    many = facts.world_size > 1
    task = fork_rank() if many and facts.launcher == "slurm" else None
    keep_freed_memory()
    os.environ.update(facts.variables() if many else {})
    settings = monitor_settings(cfg, command, folder, facts)
    if cfg.launch.max_restarts and facts.launcher not in ("nest-ssl", "nobody") and facts.rank == 0:
        log.warning("launch.max_restarts is left to %s, which has launched this run.", facts.launcher)
    if facts.rank > 0:
        for handler in logging.getLogger().handlers:
            handler.setLevel(logging.WARNING)  # rank 0 speaks for all; each rank has its own log file
    with attached(facts, settings, workers_per_rank=worker_slots(cfg), wants_monitor=many) as agent:
        if task is not None:
            os.write(task, os.fsencode(agent.beacon.path))
            os.close(task)
        try:
            if many and facts.launcher in ("slurm", "environment"):
                check_address(facts.master_addr)
                if facts.rank == 0:
                    check_port(facts.master_port)
            # torch takes seconds to import: a launcher does without it, and a rank is visible before
            from nest_ssl.data.randomness import Use, seed_everything
            from nest_ssl.training.trainer import Run, current_run
            from nest_ssl.training.watching import Stopped

            try:
                with current_run(Run(facts, cfg, agent, folder)):
                    seed_everything(cfg.seed, Use.WEIGHTS)
                    main(cfg)
            except Stopped as stopped:
                agent.mark.state = RankState.STOPPED
                if facts.rank == 0:
                    log.info("%s; to resume: %s", stopped, settings["resume_command"])
                return RESUMABLE
        except BaseException as error:
            if hasattr(signal, "SIGCHLD"):
                # Torch's handler raises the error of a killed worker again whenever another child ends, here too.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            agent.fail(error)
            if agent.has_monitor:
                return NEEDS_A_PERSON  # the monitor has said what there is to say
            if why := agent.why_killed(error):
                log.error("nest-ssl: %s To resume: %s", why, settings["resume_command"])
                return RESUMABLE
            failure = describe(facts.rank, error, [], agent.gpu)
            if not failure.is_lost_gpu:
                raise
            log.error("rank %d: %s. To do: %s.", facts.rank, failure.lost_gpu_cause, failure.lost_gpu_advice)
            log.error("to resume: %s", settings["resume_command"])
            return RESUMABLE
        agent.mark.state = RankState.FINISHED
    return FINISHED


# ---- what the monitor is told ----


def monitor_settings(cfg: NestConfig, command: Command, folder: RunFolder, facts: RankFacts | None) -> dict[str, Any]:
    """All that the monitor needs to know of the configuration."""
    return {
        "run_dir": str(folder.path),
        "floor_s": cfg.watchdog.floor_s,
        "init_s": cfg.watchdog.init_s,
        "judges": cfg.watchdog.enabled is not False,
        "ends": cfg.watchdog.action == "end",
        "saves": experiment.saves_when_stopped(cfg),
        "resume_command": resume_command(cfg, command, folder.path, facts),
    }


def worker_slots(cfg: NestConfig) -> int:
    """Slots for processes that read: the rank itself and its workers, for every loader."""

    def slots(config: DatasetConfig | None) -> int:
        return 0 if config is None else 1 + config.num_workers

    validation = cfg.model.validation_ds
    manifests = validation.manifest_filepath if validation is not None else None
    num_sets = len(manifests) if isinstance(manifests, list) else 1
    return max(1, slots(cfg.model.train_ds) + num_sets * slots(validation))


def resume_overrides(cfg: NestConfig, run_dir: Path) -> list[str]:
    """What the command of a run lacks to resume that run."""
    exp = cfg.exp_manager or ExperimentConfig()
    extra = []
    if exp.resume_from_checkpoint is not None:
        extra.append("exp_manager.resume_from_checkpoint=null")
    if not exp.resume_if_exists:
        extra.append("exp_manager.resume_if_exists=true")
        if exp.explicit_log_dir is None and exp.version is None:
            extra.append(as_override("exp_manager.explicit_log_dir", run_dir))
    if not exp.resume_ignore_no_checkpoint:
        extra.append("exp_manager.resume_ignore_no_checkpoint=true")
    return extra


def resume_command(cfg: NestConfig, command: Command, run_dir: Path, facts: RankFacts | None) -> str:
    """A line for the shell that resumes the run."""
    program = command.shown or command.program
    if facts is not None and facts.launcher == "torchrun":
        started = [word for word in command.program[1:] if word != "-P"]  # torchrun starts Python itself
        program = ["torchrun", f"--nnodes={facts.num_nodes}", f"--nproc-per-node={facts.local_world_size}", *started]
    elif facts is not None and facts.launcher == "slurm":
        program = ["srun", f"--ntasks={facts.world_size}", *program]
    return shlex.join([*program, *command.arguments, *resume_overrides(cfg, run_dir)])


def pretrain_command(arguments: list[str], *, verbose: bool) -> Command:
    """`nest-ssl pretrain`, as it was started."""
    program = [*python_command("nest_ssl"), *(["--verbose"] if verbose else []), "pretrain"]
    started = Path(sys.argv[0])
    shown = [sys.executable, "-m", "nest_ssl"]
    if started.name == "nest-ssl":
        shown = ["nest-ssl"] if shutil.which("nest-ssl") == str(started) else [str(started)]
    return Command(program, arguments, [*shown, "pretrain"])
