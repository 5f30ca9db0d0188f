"""The report of a pre-training run: one HTML file with curves, a verdict, and an utterance with its tokens."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup

from nest_ssl.checkpoint import load
from nest_ssl.checkpoint.load import model_without_storage
from nest_ssl.drawing import page
from nest_ssl.drawing.charts import Chart, chart_picture
from nest_ssl.drawing.draw import colour_scale
from nest_ssl.drawing.lanes import mel_range
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.report.charts import book_uses, metric_charts, usage_chart
from nest_ssl.report.examples import MAX_UTTERANCE_S, TOP, Examined, examine
from nest_ssl.report.metrics import RunMetrics
from nest_ssl.report.run_folder import Run, open_run
from nest_ssl.report.tokens import MAX_BOOKS, tokens_picture
from nest_ssl.report.verdict import judge

REPORT = "report.html"
# Endings of columns: of several validation sets each has its own, NAME_val_loss.
LOWER_IS_BETTER = ("train_loss", "val_loss", "train_loss_epoch")
HIGHER_IS_BETTER = ("accuracy", "audio_s_per_s")
SHARES = ("accuracy", "most_frequent_token", "mask_rate", "codebook_coverage", "padding_share", "data_wait_share")


@dataclass(frozen=True)
class Look:
    """What the newest checkpoint makes of the data, or why it could not be asked."""

    audio: str
    """validation or training."""
    examined: Examined | None
    problem: str = ""


def write_run_report(run_dir: Path, *, output: Path | None = None) -> Path:
    """Write the report of the run in `run_dir`, finished or not; `output` is RUN_DIR/report.html by default.

    What is missing (a checkpoint, the audio, …) is said on the page; only a folder that is no run raises.
    """
    run = open_run(run_dir)
    path = run_dir / REPORT if output is None else output
    page.write(render_report(run, look_at_checkpoint(run)), path)
    return path


def look_at_checkpoint(run: Run) -> Look:
    """Ask the newest checkpoint about the run's validation audio, or its training audio if it has no other."""
    audio = "validation"
    try:
        if run.checkpoint is None:
            raise ValueError(f"{run.path / 'checkpoints'}: no .nemo or .ckpt file is there yet.")
        audio, dataset = run.dataset()
        assert run.config is not None, "dataset() has read it"
        with torch.random.fork_rng(devices=[]):  # building a model, and a DataLoader, draw from torch's own generator
            model = load(run.checkpoint)
            if not isinstance(model, EncDecDenoiseMaskedTokenPredModel):
                raise ValueError(f"{run.checkpoint}: a {type(model).__name__}, which is trained without noise.")
            return Look(audio, examine(model, dataset, seed=run.config.seed))
    except (ValueError, OSError, RuntimeError) as error:
        return Look(audio, None, " ".join(str(error).split()))


def render_report(run: Run, look: Look) -> str:
    """The page as text: the same for the same run and checkpoint, to the byte."""
    metrics, config = run.metrics, run.config
    num_classes = None if config is None else config.model.num_classes
    predictions = look.examined.predictions if look.examined else None
    example = look.examined.example if look.examined else None
    charts = [_chart(chart) for chart in metric_charts(metrics, num_classes, run.num_ranks)]
    colours = mel_range((example.clean_MT, example.noisy_MT)) if example else None
    return page.render(
        "nest_ssl.report",
        "report.html",
        run=run,
        cards=_cards(run),
        dates=[utc(time_s) for time_s in metrics.times or ()],
        verdict=judge(metrics, num_classes, predictions, look.audio),
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
    """Value and name of what stands at the head of the page."""
    metrics = run.metrics
    cards = [(f"{metrics.num_steps:,}", f"of {run.max_steps:,} steps" if run.max_steps else "steps")]
    if run.config is not None:
        model = model_without_storage(run.path, EncDecDenoiseMaskedTokenPredModel, run.config.model)
        cards.append((_millions(sum(p.numel() for p in model.parameters())), "parameters"))
    audio_s = metrics.audio_s()
    if audio_s is not None:
        heard = "of audio heard" + ("" if run.num_ranks else " by each rank")
        cards.append((f"≈ {duration(audio_s * (run.num_ranks or 1))}", heard))
    if metrics.times is not None:
        cards.append((duration(metrics.times[1] - metrics.times[0]), "first to last row"))
    for column, name in (("val_loss", "validation loss"), ("val_accuracy", "validation accuracy")):
        last = metrics.series(column).last
        if last is not None:
            cards.append((_value(column, last), name))
    return cards


def _rows(metrics: RunMetrics) -> list[tuple[str, int, str, str, str]]:
    """Of every column: its name, how many values it has, the first, the last, and the best with its step."""
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
