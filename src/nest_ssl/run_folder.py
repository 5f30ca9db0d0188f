"""A run folder: the names of its files, which checkpoint to continue from, and `metrics.csv`.

Imports neither torch nor numpy: the watchdog's monitor, which must start in a tenth of a second, uses it too.
What the metrics say about a run is in run_verdict.py.
"""

from __future__ import annotations

import csv
import io
import itertools
import logging
import math
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from nest_ssl.files import SHARDS_INDEX, SHARDS_REST, predecessor, replacing

if TYPE_CHECKING:
    from nest_ssl.config import CheckpointConfig, ExperimentConfig

log = logging.getLogger(__name__)

DEFAULT_ROOT = "nest_experiments"
"""`exp_manager.exp_dir` where none is given."""
CHECKPOINTS = "checkpoints"
LAST, BEFORE = "last.ckpt", "last-before.ckpt"
"""The checkpoint that a run continues from, and its predecessor, for the case that the former is damaged."""
SAVED = ".saved"
"""Exists once a checkpoint has been written, and says of which step: a run without checkpoints may have lost them."""
METRICS = "metrics.csv"
HPARAMS = "hparams.yaml"
COMMIT = "git-commit.txt"
REPORT = "report.html"
INCIDENTS = "incidents"
WATCHDOG = "watchdog"
LOCK = ".lock"
OWN_NAMES = (CHECKPOINTS, SAVED, METRICS, HPARAMS, COMMIT, REPORT, INCIDENTS, WATCHDOG, LOCK)


def parse_hparams(text: str) -> Any:
    """The content of an `hparams.yaml`. What this program never writes is a YAMLError: it could take for ever."""
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise yaml.YAMLError("aliases (*name) are not accepted")
        return yaml.safe_load(text)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps its files, as NeMo's exp_manager lays them out."""

    path: Path
    dirpath: str | None = None
    """`checkpoint_callback_params.dirpath`: another folder for checkpoints."""

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an existing run; its `hparams.yaml` says where the checkpoints are."""
        try:
            if not (path / HPARAMS).is_file():  # reading a FIFO would block
                return cls(path)
            cfg = parse_hparams((path / HPARAMS).read_text(encoding="utf-8", errors="replace"))
            dirpath = cfg["exp_manager"]["checkpoint_callback_params"]["dirpath"]
        except (OSError, yaml.YAMLError, KeyError, TypeError):  # not written yet, or damaged
            dirpath = None
        return cls(path, dirpath if isinstance(dirpath, str) else None)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS if self.dirpath is None else Path(self.dirpath).expanduser().absolute()

    @property
    def last_checkpoint(self) -> Path:
        return self.checkpoints / LAST

    @property
    def saved(self) -> Path:
        return self.path / SAVED

    @property
    def metrics_csv(self) -> Path:
        return self.path / METRICS

    @property
    def hparams(self) -> Path:
        return self.path / HPARAMS

    @property
    def commit(self) -> Path:
        return self.path / COMMIT

    @property
    def report(self) -> Path:
        return self.path / REPORT

    @property
    def incidents(self) -> Path:
        return self.path / INCIDENTS

    @property
    def lock(self) -> Path:
        return self.path / LOCK

    def check_kinds(self) -> None:
        """Refuse what stands where the run keeps a file or folder: it could not be written, or would block."""
        if self.lock.is_symlink():  # it is written in place: the file elsewhere would be
            raise ValueError(f"{self.lock}: is a link, and the run needs a file there. Delete it.")
        for path in (self.lock, self.saved, self.hparams, self.commit, self.report):
            if path.exists() and not path.is_file():
                what = "a folder" if path.is_dir() else "not a regular file"
                raise ValueError(f"{path}: is {what}, and the run needs a file there. Move it away or delete it.")
        for path in (self.incidents, self.path / WATCHDOG):
            if path.exists() and not path.is_dir():
                raise ValueError(f"{path}: is not a folder, and the run needs one there. Move it away or delete it.")

    def _saved_step(self) -> str:
        try:
            return self.saved.read_text(errors="replace").strip() or "an earlier step"
        except OSError:
            return "an earlier step"

    def nemo_file(self, params: CheckpointConfig) -> Path:
        return self.checkpoints / f"{params.prefix or self.path.name}{params.postfix}"

    def newest_checkpoint(self) -> Path | None:
        """The training checkpoint written last; of several names for one file, last.ckpt, which is never deleted."""
        return _newest(self.checkpoints, (".ckpt",), lambda path: path.name == LAST)

    def newest_weights(self) -> Path | None:
        """The `.nemo` or `.ckpt` file written last; of equally new ones the `.nemo`, which is smaller."""
        return _newest(self.checkpoints, (".nemo", ".ckpt"), lambda path: path.suffix == ".nemo")

    def checkpoint_to_resume(
        self,
        exp: ExperimentConfig,
        examine: Examine = lambda path: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> Path | None:
        """The newest good checkpoint to continue from, as `exp` asks; None: the run starts from the beginning.

        `examine` looks into a checkpoint; `say` is told about those that are passed over.
        """
        self.check_kinds()
        if exp.resume_from_checkpoint is not None:
            return self._named_checkpoint(exp, examine, say)
        if not exp.resume_if_exists:
            return None
        bad = []
        for path in self._candidates(exp):
            try:
                if not is_checkpoint(path):
                    raise ValueError(f"{path}: is neither a file nor a complete folder of shards.")
                examine(path)
            except PermissionError as error:
                raise ValueError(
                    f"{path}: the newest checkpoint cannot be opened: {error.strerror}. Allow yourself to read "
                    "it, or remove it to resume from the one before."
                ) from error
            except (ValueError, OSError) as error:
                bad.append(str(error).rstrip())
                continue
            if not bad and path.name != LAST and self.saved.is_file() and not self.last_checkpoint.exists():
                bad.append(f"{self.last_checkpoint}: is not there, although the run has saved.")
            for reason in bad:
                say(f"passed over a checkpoint: {reason}")
            if bad:
                say(f"resuming from {path} instead, the newest good checkpoint; training since then is repeated.")
            return path
        if bad or self.saved.is_file():
            raise ValueError(
                f"{self.path}: this run has saved a checkpoint of {self._saved_step()}, and none can be resumed now: "
                f"{' '.join(bad) or f'{self.checkpoints} contains none.'} Restore one from a backup, start again under "
                f"another exp_manager.name, or delete this folder."
            )
        model = self.nemo_file(exp.checkpoint_callback_params)
        if model.is_file():
            raise ValueError(
                f"{model}: is what this run has trained, there is no checkpoint to resume from, and training again "
                "would overwrite it. Move it away, restore a checkpoint, or give another exp_manager.name."
            )
        if not exp.resume_ignore_no_checkpoint:
            raise ValueError(
                f"{self.checkpoints}: there is no checkpoint to resume from. "
                f"Set exp_manager.resume_ignore_no_checkpoint=true to start from the beginning."
            )
        if self.metrics_csv.is_file():
            say(f"{self.path}: has results of an earlier start, but no checkpoint: starting from step 0.")
        return None

    def _named_checkpoint(self, exp: ExperimentConfig, examine: Examine, say: Callable[[str], None]) -> Path:
        """`exp_manager.resume_from_checkpoint`, unless this run has resumed from it before and saved since then."""
        path = Path(str(exp.resume_from_checkpoint)).expanduser()
        if not is_checkpoint(path):
            raise ValueError(f"exp_manager.resume_from_checkpoint: {path}: no such file, and no folder of shards.")
        for newer in self._candidates(exp):
            try:
                origin = examine(newer) if is_checkpoint(newer) else None
            except (ValueError, OSError):
                continue
            if origin == str(path.absolute()) and not newer.samefile(path):
                say(
                    f"exp_manager.resume_from_checkpoint: this run has resumed from {path} before; continuing from "
                    f"{newer}, which is newer. To start from {path.name} once more, give another exp_manager.name."
                )
                return newer
            break
        examine(path)
        return path

    def _candidates(self, exp: ExperimentConfig) -> list[Path]:
        """Whatever may be a training checkpoint, in the order in which a run would continue from it.

        First `last.ckpt`: one of the best may be newer, but was written in the middle of a step or contains only
        weights. Then the one before it, then the newest. Something under the name `last.ckpt` that is no checkpoint
        also counts.
        """
        found = [path for path in self.checkpoints.glob("*.ckpt") if is_checkpoint(path)]
        found.sort(key=lambda path: (_written_at_ns(path), path.name == LAST, path.name), reverse=True)
        last = self.last_checkpoint
        if exp.checkpoint_callback_params.save_last or not found:
            found = [path for path in found if path != last]
            found.sort(key=lambda path: path.name != BEFORE)
            if last.is_symlink() or last.exists():
                found.insert(0, last)
        return found

    def results(self, exp: ExperimentConfig) -> dict[str, str]:
        """What a finished run leaves behind, by name, and where it is; only files that exist."""
        files = {
            "model": self.nemo_file(exp.checkpoint_callback_params),
            "metrics": self.metrics_csv,
            "report": self.report,
        }
        found = {name: str(path) for name, path in files.items() if path.is_file()}
        if exp.create_tensorboard_logger:
            found["TensorBoard"] = f"tensorboard --logdir {shlex.quote(str(self.path))}"
        return found


def _newest(folder: Path, suffixes: tuple[str, ...], preferred: Callable[[Path], bool]) -> Path | None:
    files = [path for path in folder.glob("*") if path.suffix in suffixes and is_checkpoint(path)]
    return max(files, key=lambda path: (_written_at_ns(path), preferred(path), path.name), default=None)


Examine = Callable[[Path], "str | None"]
"""Looks into a checkpoint: the file that its run was told to resume from; ValueError where it cannot be resumed."""


def is_checkpoint(path: Path) -> bool:
    """Whether there is a file, or a folder of shards."""
    return path.is_file() or all((path / name).is_file() for name in (SHARDS_INDEX, SHARDS_REST))


def _written_at_ns(path: Path) -> int:
    return (path / SHARDS_REST if path.is_dir() else path).stat().st_mtime_ns


# --- trainer.devices


def listed_devices(devices: Any) -> list[int] | None:
    """The device numbers that `trainer.devices` lists ('0,1', [0, 2]); None where it is a count or 'auto'.

    A number may come twice: `launch.ranks.gpu_of_rank` decides whether ranks may share a GPU.
    """
    if isinstance(devices, str) and "," in devices:
        devices = [part for part in devices.split(",") if part.strip()]
    if not isinstance(devices, (list, tuple)):
        return None
    try:
        numbers = [int(number) for number in devices]
    except (TypeError, ValueError) as error:
        raise _not_devices(devices) from error
    if not numbers or min(numbers) < 0:
        raise _not_devices(devices)
    return numbers


def given_ranks_per_node(devices: Any) -> int | None:
    """How many ranks `trainer.devices` asks for; None for -1 and 'auto', where the machine decides."""
    if (numbers := listed_devices(devices)) is not None:
        return len(numbers)
    if devices in (-1, "-1", "auto"):
        return None
    try:
        count = int(devices)
    except (TypeError, ValueError) as error:
        raise _not_devices(devices) from error
    if count < 1:
        raise _not_devices(devices)
    return count


def ranks_per_node(devices: Any, accelerator: str, count_gpus: Callable[[], int]) -> int:
    """Ranks that `trainer.devices` means on this machine: one per GPU for -1 and 'auto', one on a CPU.

    `count_gpus` is called only where the answer depends on it: counting GPUs loads torch.
    """
    given, listed = given_ranks_per_node(devices), listed_devices(devices)
    if listed not in (None, [*range(given or 0)]) and (accelerator == "cpu" or not count_gpus()):
        raise ValueError(f"trainer.devices={devices}: lists GPUs, and there is none. Use trainer.devices={given}.")
    if given is not None:
        return given
    return 1 if accelerator == "cpu" else max(count_gpus(), 1)


def _not_devices(devices: Any) -> ValueError:
    return ValueError(
        f"trainer.devices={devices}: neither a count nor a list of devices. "
        f"Use a count (4), device numbers ([0,2] or '0,2'), or -1 for all GPUs."
    )


# --- metrics.csv


class MetricsWriter:
    """Rows of `step`, `time` and whatever is logged, on disk as soon as they are logged.

    New columns appear as they come; earlier rows keep them empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.latest: dict[str, float] = {}
        """The most recent value under each name."""
        self._columns: list[str] | None = None

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        self.latest |= metrics
        named = {name.replace("\r", " "): value for name, value in metrics.items()}  # csv does not quote it
        row = {"step": step, "time": round(time.time(), 3), **named}
        row.pop("epoch", None)
        if self._columns is not None and not self.path.exists():
            log.warning("%s: was deleted while the run was using it; it starts again here.", self.path)
            self._columns = None
        if self._columns is None:  # a resumed run has some already
            self._columns = read_columns(self.path)
        new = [name for name in row if name not in self._columns]
        if self.path.exists() and not self.path.is_file():
            raise OSError(f"{self.path}: cannot be written: it is not a file.")  # a pipe would wait for a reader
        try:
            if new:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _rewrite(self.path, self._columns + new, read_rows(self.path))
                self._columns = self._columns + new
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)  # \r would confuse awk and cut
        except OSError as error:
            raise OSError(f"{self.path}: cannot be written: {error.strerror}.") from error


def read_columns(path: Path) -> list[str]:
    columns = (_read_table(path) or [[]])[0]
    return columns if "step" in columns else []  # without a header its rows mean nothing


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows as text, by column, damaged ones too; empty if there is no file yet."""
    names, *rows = _read_table(path) or [[]]
    return [dict(itertools.zip_longest(names, row[: len(names)], fillvalue="")) for row in rows if row]


def _read_table(path: Path) -> list[list[str]]:
    """The header and the rows, without those that have a cell longer than this program writes."""
    if not path.is_file():
        return []
    csv.field_size_limit(2**31 - 1)  # an error in one line would end the reading of all
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:  # spreadsheets begin with a mark
        return [row for row in csv.reader(file) if max(map(len, row), default=0) < 10_000]


def forget_after(path: Path, step: int) -> None:
    """Remove the rows from `step` on: the run continues from there and will write them again."""
    try:
        rows = read_rows(path)
        columns = read_columns(path)
    except OSError as error:
        log.warning("%s: cannot be read (%s); rows of steps that are repeated stay in it.", path, error)
        return
    if rows and (not columns or step == 0):  # it may be the only record of the run
        before = predecessor(path)
        while before.exists():
            before = predecessor(before)
        edited = "" if columns else " has no column 'step', and"
        log.warning("%s:%s is kept as %s. A new one begins.", path, edited, path.rename(before))
        return
    whole = rows if not rows or path.read_bytes().endswith(b"\n") else rows[:-1]  # a kill cut off the last line
    kept = [row for row in whole if 0 <= _step_of(row) < step]
    if len(kept) < len(rows):
        _rewrite(path, columns, kept)


def logged_at(path: Path, step: int) -> set[str]:
    """The names that have a value in the rows of step number `step`."""
    rows = [row for row in read_rows(path) if _step_of(row) == step]
    return {name for row in rows for name, value in row.items() if name and value}


def _step_of(row: Mapping[str, str]) -> float:
    """The step of a row, which other programs write as 6.0; NaN if a kill or a full disk has damaged it."""
    try:
        return float(row.get("step") or "nan")
    except ValueError:
        return math.nan


def _rewrite(path: Path, columns: list[str], rows: list[dict[str, str]]) -> None:
    """Replace the file in one go: a kill leaves the old one or the new one."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with replacing(path) as file:
        file.write(text.getvalue().encode())
