"""Where metrics go: `metrics.csv`, TensorBoard, Weights & Biases, progress on the terminal; log files and profiles.

Rank 0 logs. The progress shows the values logged last, so it never waits for a GPU.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nest_ssl.config import ExperimentConfig
from nest_ssl.config.checks import PlainFormatter
from nest_ssl.config.training import SummaryWriterConfig
from nest_ssl.files import replacing
from nest_ssl.run_folder import MetricsWriter, RunFolder
from nest_ssl.watchdog.system import say

if TYPE_CHECKING:
    from nest_ssl.training.watching import Watch
    from nest_ssl.watchdog.rank import Stage

log = logging.getLogger(__name__)

LINE_EVERY_S = 10.0


class Logger(Protocol):
    """Somewhere to send metrics."""

    def write(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Loggers:
    """All loggers of a run as one. A dry run, and every rank but the first, has none."""

    def __init__(self, folder: RunFolder, exp: ExperimentConfig, *, enabled: bool) -> None:
        self.latest: dict[str, float] = {}
        """The most recent value under each name."""
        self._all: list[Logger] = []
        self._warned: set[str] = set()
        if not enabled:
            return
        self._all.append(_Csv(folder.metrics_csv))
        if exp.create_tensorboard_logger:
            self._all.append(_TensorBoard(folder.path, exp.summary_writer_kwargs or SummaryWriterConfig()))
        if exp.create_wandb_logger:
            self._all.append(_WeightsAndBiases(folder.path, exp.wandb_logger_kwargs or {}))

    def write(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        self.latest |= metrics
        for logger in list(self._all):
            with self._only_warned_of(logger):
                logger.write({**metrics, "epoch": epoch}, step)

    def close(self) -> None:
        for logger in list(self._all):
            with self._only_warned_of(logger):
                logger.close()

    @contextlib.contextmanager
    def _only_warned_of(self, logger: Logger) -> Iterator[None]:
        """A log that cannot be written is no reason to lose training: warn, once for each logger.

        `metrics.csv` is tried again at every row. The others are given up: TensorBoard's thread is dead after an error.
        """
        try:
            yield
        except OSError as error:
            name = type(logger).__name__.lstrip("_")
            if not isinstance(logger, _Csv):
                self._all.remove(logger)
            if name not in self._warned:
                self._warned.add(name)
                log.warning("%s: %s Training continues; metrics will be missing there.", name, error)


def check_loggers(exp: ExperimentConfig) -> None:
    """Find out that a logger is not installed before anything is written."""
    for wanted, name, extra in (
        (exp.create_tensorboard_logger, "tensorboard", "tensorboard"),
        (exp.create_wandb_logger, "wandb", "nest-ssl[wandb]"),
    ):
        if wanted and importlib.util.find_spec(name) is None:
            raise ValueError(f"exp_manager.create_{name}_logger: {name} is not installed. pip install '{extra}'")


class _Csv(MetricsWriter):
    def close(self) -> None:
        """Every row is on disk already."""


class _TensorBoard:
    def __init__(self, folder: Path, options: SummaryWriterConfig) -> None:
        self.folder, self.options = folder, options
        self._writer: Any = None

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import: not before the first step

            self._writer = SummaryWriter(str(self.folder), **asdict(self.options))
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _WeightsAndBiases:
    """Options are those of Lightning's WandbLogger, or of `wandb.init`."""

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        import wandb

        given = dict(options)
        if given.pop("log_model", False):
            raise ValueError(
                "exp_manager.wandb_logger_kwargs.log_model: checkpoints are not uploaded. Leave it out; they are in "
                "the run folder."
            )
        if given.pop("offline", False):
            given["mode"] = "offline"
        if (version := given.pop("version", None)) is not None:
            given.setdefault("id", version)
        given.setdefault("dir", given.pop("save_dir", None) or str(folder))
        try:
            self._run = wandb.init(resume="allow", **given)
        except TypeError as error:
            raise ValueError(f"exp_manager.wandb_logger_kwargs: wandb.init does not take these: {error}.") from error
        except wandb.errors.Error as error:
            raise ValueError(
                f"exp_manager.create_wandb_logger: {' '.join(str(error).split())} Run 'wandb login', or set "
                "WANDB_API_KEY or exp_manager.wandb_logger_kwargs.offline=true."
            ) from error
        self._run.define_metric("trainer/global_step")
        self._run.define_metric("*", step_metric="trainer/global_step", step_sync=True)

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "trainer/global_step": step})

    def close(self) -> None:
        self._run.finish()


class Progress:
    """A bar on a terminal, plain lines elsewhere: step, loss, accuracy, speed and time left."""

    def __init__(self, loggers: Loggers, *, enabled: bool) -> None:
        self.loggers, self.enabled = loggers, enabled
        self.bar: Any = None
        self._task: Any = None
        self._last_line = 0.0
        self._started = time.monotonic()
        self._first_step = 0
        self._total: int | None = None

    def start(self, step: int, total: int | None) -> None:
        self._started, self._first_step, self._total = time.monotonic(), step, total
        if not self.enabled or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Bar(*columns, console=Console(stderr=True))
        self._task = self.bar.add_task("", total=total, completed=step, shown="")
        self.bar.start()

    def step_is_done(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self._task, completed=step, shown=self._shown())
        elif self.enabled and time.monotonic() - self._last_line > LINE_EVERY_S:
            self._line(step)

    def validation_is_done(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.enabled and "val_loss" in metrics:
            self._say(f"step {step}: val_loss {metrics['val_loss']:.4f}")

    def end(self, step: int) -> None:
        if self.enabled and self.bar is None:
            self._line(step)
        self.close()

    def close(self) -> None:
        """Give the terminal back: else the bar is drawn over a message, and the cursor stays hidden."""
        if self.bar is not None:
            with contextlib.suppress(OSError):  # the terminal was closed
                self.bar.stop()
            self.bar = None

    def _line(self, step: int) -> None:
        self._last_line = time.monotonic()
        parts = [f"step {step}/{'?' if self._total is None else self._total}", self._shown()]
        if self._total is not None and step > self._first_step:
            seconds = (time.monotonic() - self._started) / (step - self._first_step) * (self._total - step)
            parts.append(f"{datetime.timedelta(seconds=round(seconds))} left")
        self._say(", ".join(part for part in parts if part))

    def _say(self, text: str) -> None:
        if self.bar is None:
            say(text)
            return
        with contextlib.suppress(OSError):
            self.bar.console.print(text)

    def _shown(self) -> str:
        latest = self.loggers.latest
        parts = (("train_loss", "loss {:.3f}"), ("accuracy", "accuracy {:.1%}"), ("audio_s_per_s", "{:.0f} audio-s/s"))
        return ", ".join(form.format(latest[name]) for name, form in parts if name in latest)


class _LogFile(logging.FileHandler):
    """A log file that says once that it cannot be written; logging itself would print a traceback for every line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        logging.getLogger().removeHandler(self)
        log.warning("%s: cannot be written any more: %s", self.baseFilename, sys.exc_info()[1])


@contextlib.contextmanager
def log_to_file(folder: Path, exp: ExperimentConfig, *, global_rank: int, local_rank: int) -> Iterator[None]:
    """Meanwhile, this rank's log also goes to `log_globalrank-R_localrank-L.txt`, if `exp` wants one of this rank."""
    if (exp.log_global_rank_0_only and global_rank != 0) or (exp.log_local_rank_0_only and local_rank != 0):
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"log_globalrank-{global_rank}_localrank-{local_rank}.txt"
        if path.exists() and not path.is_file():  # opening a FIFO would block
            raise OSError(f"{path.name} is not a regular file")
        handler = _LogFile(path, encoding="utf-8")
    except OSError as error:
        log.warning("%s: no log of this rank: %s", folder, error)
        yield
        return
    handler.setFormatter(PlainFormatter(f"%(asctime)s rank {global_rank} %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    except Exception:
        log.debug("the run ends with an error", exc_info=True)
        raise
    finally:
        logging.getLogger().removeHandler(handler)
        with contextlib.suppress(OSError):  # the log has said already that it cannot be written
            handler.close()


@contextlib.contextmanager
def profiled(kind: str | None, folder: Path, watch: Watch, *, enabled: bool) -> Iterator[None]:
    """`trainer.profiler`: meanwhile, measure where time goes, and write it to the run folder. One rank does it.

    simple: seconds per stage; advanced: Python functions; pytorch: a trace of all kernels, for a few steps only.
    """
    if kind is None or not enabled:
        yield
        return
    path = folder / f"profile-{kind}.{'json' if kind == 'pytorch' else 'txt'}"
    if kind == "simple":
        with _timed_stages(watch) as spent_s:
            yield
        whole_s = sum(spent_s.values()) or 1.0
        rows = sorted(spent_s.items(), key=lambda row: -row[1])
        text = "".join(f"{name:<14}{value:10.3f} s{value / whole_s:8.1%}\n" for name, value in rows)
    elif kind == "advanced":
        import cProfile
        import io
        import pstats

        with cProfile.Profile() as profile:
            yield
        buffer = io.StringIO()
        pstats.Stats(profile, stream=buffer).sort_stats("cumulative").print_stats(100)
        text = buffer.getvalue()
    else:
        from torch.profiler import profile as torch_profile

        with torch_profile() as trace:
            yield
        trace.export_chrome_trace(str(path))
        text = ""
    try:
        if text:
            with replacing(path) as file:
                file.write(text.encode())
        log.info("profile: %s", path)
    except OSError as error:
        log.warning("%s: the profile could not be written: %s", path, error)


@contextlib.contextmanager
def _timed_stages(watch: Watch) -> Iterator[dict[str, float]]:
    """Meanwhile, add up the host's time between one stage and the next."""
    spent_s: dict[str, float] = {}
    now: dict[str, Any] = {"stage": "start", "since": time.perf_counter()}
    real = watch.enter

    def enter(stage: Stage, part: int = 0) -> None:
        spent_s[now["stage"]] = spent_s.get(now["stage"], 0.0) + time.perf_counter() - now["since"]
        now["stage"], now["since"] = "validation" if watch.validates else stage.label, time.perf_counter()
        real(stage, part)

    watch.enter = enter  # type: ignore[method-assign]
    try:
        yield spent_s
    finally:
        watch.enter = real  # type: ignore[method-assign]
