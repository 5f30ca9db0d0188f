"""The report on a pre-training run: one HTML file with curves, a verdict, and an utterance with its tokens."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from markupsafe import Markup

from nest_ssl.checkpoint import load
from nest_ssl.checkpoint.read import model_without_storage
from nest_ssl.config import DatasetConfig, NestConfig, parse
from nest_ssl.config.model_section import unused_keys
from nest_ssl.config.parsing import MISSING
from nest_ssl.drawing.charts import Chart, chart_picture
from nest_ssl.drawing.draw import colour_scale, mel_range, render_template, write_html
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.nemo_file import check_fit
from nest_ssl.report.charts import MAX_BOOKS, TOP, book_uses, metric_charts, tokens_picture, usage_chart
from nest_ssl.report.examples import MAX_UTTERANCE_S, Examined, examine
from nest_ssl.run_folder import DEFAULT_ROOT, HPARAMS, METRICS, RunFolder, given_ranks_per_node, parse_hparams
from nest_ssl.run_verdict import RunMetrics, Verdict, judge, read_metrics

MAX_SUGGESTED = 3
"""Runs that are named when the folder given is not one."""
# Endings of column names: each of several validation sets has its own columns, such as NAME_val_loss.
LOWER_IS_BETTER = ("train_loss", "val_loss", "train_loss_epoch")
HIGHER_IS_BETTER = ("accuracy", "audio_s_per_s")
SHARES = ("accuracy", "most_frequent_token", "mask_rate", "codebook_coverage", "padding_share", "data_wait_share")


@dataclass(frozen=True)
class Run:
    """What a run folder contains; every part may be missing, and then a note says why."""

    folder: RunFolder
    metrics: RunMetrics
    config: NestConfig | None
    config_text: str
    commit: str
    checkpoint: Path | None
    """The newest one, `.nemo` or `.ckpt`."""
    num_ranks: int | None
    """Ranks of the whole run; None where they depend on the machine (`devices: auto`)."""
    notes: list[str]
    """What is missing or cannot be read."""

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def name(self) -> str:
        if self.config is None:
            return self.path.name
        exp = self.config.exp_manager
        return (exp.name if exp is not None else None) or self.config.name

    @property
    def num_classes(self) -> int | None:
        return None if self.config is None else self.config.model.num_classes

    @property
    def max_steps(self) -> int | None:
        return self.config.trainer.max_steps if self.config is not None and self.config.trainer.max_steps > 0 else None

    def dataset(self) -> tuple[str, DatasetConfig]:
        """The validation data or, if there is none, the training data; and which of the two it is."""
        sections = () if self.config is None else (self.config.model.validation_ds, self.config.model.train_ds)
        for name, section in zip(("validation", "training"), sections, strict=False):
            if section is None:
                continue
            elsewhere = section.source or section.cuts_path or section.shar_path or section.input_cfg
            if elsewhere or section.manifest_filepath not in (None, MISSING):
                return name, section
        raise ValueError(f"{HPARAMS} names no data.")


@dataclass(frozen=True)
class Look:
    """What the newest checkpoint predicts for the data, or why it could not be evaluated."""

    audio: str
    """validation or training."""
    examined: Examined | None
    problem: str = ""


@dataclass(frozen=True)
class Report:
    """A written report."""

    path: Path
    run: Run
    verdict: Verdict
    """The page's verdict, for the terminal."""


def write_run_report(run_dir: Path, *, output: Path | None = None) -> Path:
    """Write the report on the run in `run_dir`; return its path."""
    return make_report(run_dir, output=output).path


def make_report(run_dir: Path, *, output: Path | None = None) -> Report:
    """Write the report on the run in `run_dir`, finished or not; `output` is RUN_DIR/report.html by default.

    The page names what is missing (a checkpoint, the audio, …); only a folder that is not a run raises.
    """
    run = open_run(run_dir)
    look = look_at_checkpoint(run)
    predictions = look.examined.predictions if look.examined else None
    verdict = judge(run.metrics, run.num_classes, predictions, look.audio)
    path = run.folder.report if output is None else output
    write_html(render_report(run, look, verdict), path)
    return Report(path, run, verdict)


def open_run(path: Path) -> Run:
    """Read a run folder; ValueError if it is not one."""
    folder = RunFolder.open(path)
    if not path.is_dir():
        what = "not a folder" if path.exists() else "no such folder"
        raise ValueError(f"{path}: {what}. Give the folder that 'nest-ssl pretrain' names when it starts.")
    if not folder.metrics_csv.is_file() and not folder.hparams.is_file():
        raise ValueError(
            f"{path}: contains neither {METRICS} nor {HPARAMS}, so it is not a run folder.{_suggestion(path)}"
        )
    metrics = read_metrics(folder.metrics_csv)
    notes = list(metrics.notes)
    config, config_text = _read_config(folder.hparams, notes)
    commit = folder.commit
    return Run(
        folder=folder,
        metrics=metrics,
        config=config,
        config_text=config_text,
        commit=commit.read_text(encoding="utf-8", errors="replace").strip() if commit.is_file() else "",
        checkpoint=folder.newest_weights(),
        num_ranks=_num_ranks(config, notes),
        notes=notes,
    )


def _read_config(path: Path, notes: list[str]) -> tuple[NestConfig | None, str]:
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "no such file"
        notes.append(f"{HPARAMS}: {what}, so the configuration is unknown.")
        return None, ""
    content = ""
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
        return parse(NestConfig, parse_hparams(content), unused=unused_keys()), content
    except (yaml.YAMLError, ValueError, OSError) as error:
        notes.append(f"{HPARAMS}: cannot be used: {' '.join(str(error).split())}")
        return None, content


def _num_ranks(config: NestConfig | None, notes: list[str]) -> int | None:
    if config is None:
        return None
    try:
        per_node = given_ranks_per_node(config.trainer.devices)
    except ValueError as error:
        notes.append(f"{HPARAMS}: {error}")
        return None
    return None if per_node is None else per_node * config.trainer.num_nodes


def _suggestion(path: Path) -> str:
    """Runs below `path`, newest first: each run has its own folder inside that of its experiment."""
    inside = sorted({file.parent for file in path.glob(f"*/{METRICS}")}, key=lambda run: run.stat().st_mtime)
    names = ", ".join(str(run) for run in inside[::-1][:MAX_SUGGESTED])
    return f" Runs inside it: {names}." if names else f" Runs are in {DEFAULT_ROOT}/NAME by default."


def look_at_checkpoint(run: Run) -> Look:
    """Evaluate the newest checkpoint on the run's validation audio, or on its training audio if it has no other."""
    audio = "validation"
    try:
        if run.checkpoint is None:
            raise ValueError(f"{run.folder.checkpoints}: there is no .nemo or .ckpt file yet.")
        audio, dataset = run.dataset()
        assert run.config is not None, "dataset() has read it"
        with torch.random.fork_rng(devices=[]):  # building a model or a DataLoader draws from torch's own generator
            model = load(run.checkpoint)
            expected = model_without_storage(run.path, type(model), run.config.model)
            check_fit(expected, model.state_dict(), f"{run.checkpoint}: not the model that {HPARAMS} describes")
            if not isinstance(model, EncDecDenoiseMaskedTokenPredModel):
                raise ValueError(f"{run.checkpoint}: a {type(model).__name__}, which is trained without noise.")
            return Look(audio, examine(model, dataset, seed=run.config.seed))
    except (ValueError, OSError, RuntimeError) as error:
        return Look(audio, None, " ".join(str(error).split()))


def render_report(run: Run, look: Look, verdict: Verdict) -> str:
    """The page as text: the same for the same run and checkpoint, to the byte."""
    metrics, config = run.metrics, run.config
    predictions = look.examined.predictions if look.examined else None
    example = look.examined.example if look.examined else None
    charts = [_chart(chart) for chart in metric_charts(metrics, run.num_classes, run.num_ranks)]
    colours = mel_range((example.clean_MT, example.noisy_MT)) if example else None
    return render_template(
        "nest_ssl.report",
        "report.html",
        run=run,
        cards=_cards(run),
        dates=[utc(time_s) for time_s in metrics.times or ()],
        verdict=verdict,
        charts=charts,
        rows=_rows(metrics),
        look=look,
        predictions=predictions,
        usage=_chart(usage_chart(predictions, look.audio)) if predictions else None,
        uses=book_uses(predictions.used_KH) if predictions else [],
        example=example,
        checkpoint_date=utc(run.checkpoint.stat().st_mtime) if run.checkpoint else "",
        picture=Markup(tokens_picture(example)) if example else None,
        colours=colour_scale(),
        colour_range=colours,
        normalized=config is not None and config.model.preprocessor.normalize == "per_feature",
        max_books=MAX_BOOKS,
        max_utterance_s=MAX_UTTERANCE_S,
        top=TOP,
    )


def _chart(chart: Chart) -> dict[str, Any]:
    picture = chart_picture(chart)
    return {"chart": chart, "picture": Markup(picture) if picture else None}


def _cards(run: Run) -> list[tuple[str, str]]:
    """The figures at the top of the page: value and name."""
    metrics = run.metrics
    cards = [(f"{metrics.num_steps:,}", f"of {run.max_steps:,} steps" if run.max_steps else "steps")]
    if run.config is not None:
        model = model_without_storage(run.path, EncDecDenoiseMaskedTokenPredModel, run.config.model)
        cards.append((_millions(sum(p.numel() for p in model.parameters())), "parameters"))
    audio_s = metrics.audio_s()
    if audio_s is not None:
        processed = "of audio processed" + ("" if run.num_ranks else " by each rank")
        cards.append((f"≈ {duration(audio_s * (run.num_ranks or 1))}", processed))
    if metrics.times is not None:
        cards.append((duration(metrics.times[1] - metrics.times[0]), "first to last row"))
    for column, name in (("val_loss", "validation loss"), ("val_accuracy", "validation accuracy")):
        last = metrics.series(column).last
        if last is not None:
            cards.append((_value(column, last), name))
    return cards


def _rows(metrics: RunMetrics) -> list[tuple[str, int, str, str, str]]:
    """Each column: its name, how many values it has, the first, the last, and the best with its step."""
    rows = []
    for name in metrics.columns:
        series = metrics.series(name)
        if name in ("step", "time") or not len(series):
            continue
        lower = name.endswith(LOWER_IS_BETTER)
        best = series.best(lowest=lower) if lower or name.endswith(HIGHER_IS_BETTER) else None
        shown = "" if best is None else f"{_value(name, best[1])} (step {best[0]:,})"
        first, last = (_value(name, float(series.values_R[place])) for place in (0, -1))
        rows.append((name, len(series), first, last, shown))
    return rows


def _value(column: str, value: float) -> str:
    return f"{100 * value:.2f} %" if column.endswith(SHARES) else f"{value:.4g}" if "rate" in column else f"{value:.4f}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.{0 if count >= 1e8 else 1 if count >= 1e7 else 2}f} M"


def duration(seconds: float) -> str:
    """Two units: 1 h 5 min, 3 min 20 s, 12 s."""
    days, rest = divmod(round(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((place for place, (number, _) in enumerate(parts) if number), len(parts) - 1)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2])


def utc(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
