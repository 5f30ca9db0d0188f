"""The table and the plot of train_step.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ENCODER_PARAMETERS = {"large": 108_762_112, "xlarge": 607_306_752}
FRAMES_PER_SECOND = 12.5
PEER = "NeMo"


def matrix_share(setting: dict[str, Any], ms: float, tflops: float) -> float:
    """Return 6 × parameters × frames of the padded batch, as a share of the GPU's matrix rate in that time."""
    frames = setting["batch"] * setting["seconds"] * FRAMES_PER_SECOND
    share: float = 6 * ENCODER_PARAMETERS[setting["size"]] * frames / (ms * 1e-3 * tflops * 1e12)
    return share


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['device']}, torch {result['versions'].get('torch')}, {result['matrix_TFLOPs']:.0f} TFLOP/s in bf16; "
        f"graph breaks {result.get('compiler', {}).get('graph_breaks')}",
        f"{'':34}{'ms':>8}{'padded s/s':>12}{'real s/s':>10}{'GB':>7}{'of matrix':>11}{'x NeMo':>8}",
    ]
    for setting in result["settings"]:
        lines.append(f"{setting['size']}, {setting['batch']} x {setting['seconds']:g} s")
        peer = setting["rows"].get(PEER, {}).get("ms")
        for name, row in setting["rows"].items():
            if "error" in row:
                lines.append(f"  {name:32}{row['error'][:80]}")
                continue
            ms, padded_s = row["ms"], setting["batch"] * setting["seconds"]
            against = f"{peer / ms:.1f}" if peer and not name.startswith("encoder") else "-"
            lines.append(
                f"  {name:32}{ms:8.1f}{1e3 * padded_s / ms:12,.0f}{1e3 * setting['real_s'] / ms:10,.0f}"
                f"{row['peak_GB']:7.1f}{matrix_share(setting, ms, result['matrix_TFLOPs']):11.1%}{against:>8}"
            )
            stages = ", ".join(f"{stage} {value:.1f}" for stage, value in row.get("stages_ms", {}).items())
            if stages:
                lines.append(f"    {stages}")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot padded seconds per second of whole steps, one group of bars per setting."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    settings = result["settings"]
    names = [n for n in dict.fromkeys(n for s in settings for n in s["rows"]) if not n.startswith("encoder")]
    figure, axes = pyplot.subplots(figsize=(9, 4))
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        heights = []
        for setting in settings:
            ms = setting["rows"].get(name, {}).get("ms")
            heights.append(1e3 * setting["batch"] * setting["seconds"] / ms if ms else 0)
        places = [i + (index - (len(names) - 1) / 2) * width for i in range(len(settings))]
        axes.bar(places, heights, width, label=name)
    axes.set_xticks(range(len(settings)), [f"{s['size']}\n{s['batch']} × {s['seconds']:g} s" for s in settings])
    axes.set_ylabel("seconds of padded audio per second")
    axes.set_title(f"One training step, bf16, {result['device']}")
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
