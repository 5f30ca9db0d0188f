"""Draw the three pictures of docs/architecture.md: the packages, one step, and a run on many ranks.

    python tools/draw_architecture.py        # writes docs/images/{packages,step,ranks}.svg

Text stays text, fonts are the reader's own, and the colours follow the reader's light or dark mode.
tests/unit/test_architecture.py checks that the files are current and that the packages are those of
tests/unit/test_layering.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH = 960
LINE = 17
"""Pixels from one line of text to the next."""

STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 13px; fill: #1f2328 }
.title { font-size: 14px; font-weight: 600 }
.code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 12px }
.note { fill: #57606a; font-size: 12px }
.middle { text-anchor: middle }
.page { fill: #ffffff }
.plain { fill: #f6f8fa; stroke: #8c959f }
.blue { fill: #ddf4ff; stroke: #0969da }
.green { fill: #dafbe1; stroke: #1a7f37 }
.amber { fill: #fff8c5; stroke: #9a6700 }
.red { fill: #ffebe9; stroke: #cf222e }
.violet { fill: #fbefff; stroke: #8250df }
.frame { fill: none; stroke: #57606a; stroke-dasharray: 6 4 }
.graph { fill: none; stroke: #1a7f37; stroke-width: 2; stroke-dasharray: 8 4 }
.line { fill: none; stroke: #57606a; stroke-width: 1.4 }
.thick { fill: none; stroke: #cf222e; stroke-width: 2.2 }
.head { fill: #57606a }
.headthick { fill: #cf222e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .note { fill: #9ea7b3 }
  .page { fill: #0d1117 }
  .plain { fill: #161b22; stroke: #6e7681 }
  .blue { fill: #0c2d4d; stroke: #388bfd }
  .green { fill: #0f2e1a; stroke: #3fb950 }
  .amber { fill: #332b00; stroke: #bb8009 }
  .red { fill: #3c1618; stroke: #f85149 }
  .violet { fill: #271a45; stroke: #a371f7 }
  .frame { stroke: #8b949e }
  .graph { stroke: #3fb950 }
  .line { stroke: #8b949e }
  .thick { stroke: #f85149 }
  .head { fill: #8b949e }
  .headthick { fill: #f85149 }
}
"""


@dataclass
class Picture:
    """Boxes, lines and text; coordinates in pixels from the top left."""

    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, w: int, h: int, kind: str, *lines: tuple[str, str]) -> None:
        """Draw a box with its lines of (class, text) centred in it."""
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="6"/>')
        first = y + h / 2 - LINE * (len(lines) - 1) / 2 + 4.5
        for number, (style, text) in enumerate(lines):
            self.text(x + w / 2, first + LINE * number, text, f"{style} middle")

    def frame(self, x: int, y: int, w: int, h: int, kind: str = "frame") -> None:
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="8"/>')

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        self.parts.append(f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def arrow(self, path: str, style: str = "line", *, both: bool = False) -> None:
        """Draw an SVG path with an arrow head at its end, or at both ends."""
        head = "url(#headthick)" if style == "thick" else "url(#head)"
        start = f' marker-start="{head}"' if both else ""
        self.parts.append(f'<path class="{style}" d="{path}" marker-end="{head}"{start}/>')

    def svg(self) -> str:
        markers = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
            f'<path class="{name}" d="M0 0 L8 4 L0 8 z"/></marker>'
            for name in ("head", "headthick")
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
                f'height="{self.height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                f"<defs>{markers}</defs>",
                f'<rect class="page" width="{WIDTH}" height="{self.height}" rx="10"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


# ---- the packages ----

LAYERS: list[tuple[str, tuple[str, ...], str]] = [
    (
        "plain",
        ("files.py", "plugins.py", "freed_memory.py", "run_verdict.py"),
        "atomic files; registered names; a run's verdict",
    ),
    ("plain", ("config/",), "NeMo's yaml keys as checked dataclasses; the yaml files"),
    ("plain", ("audio/", "run_folder.py", "nemo_file.py"), "reading and mixing audio; names in a run folder; .nemo"),
    ("blue", ("modules/",), "the reference: plain torch that reads like the paper"),
    ("blue", ("model.py", "objective.py"), "features → targets → mask → encode → predict; the loss"),
    ("green", ("fast/",), "speed from outside: engine, graphs, fused encoder, ops/"),
    ("blue", ("checkpoint/",), "loading models; starting weights; export"),
    ("blue", ("layer_features.py",), "features from chosen layers"),
    ("amber", ("data/",), "manifest/ → plan/ → batch/, from sources/: files, tar, lhotse"),
    ("red", ("watchdog/",), "beacon, agent, monitor, judge/, report/"),
    ("red", ("launch/",), "who a rank is; starting, comparing and ending ranks"),
    ("violet", ("training/",), "the loop and all that it needs: run, step, state, saving, …"),
    ("violet", ("fit.py",), "the largest batches that a GPU holds"),
    ("plain", ("drawing/",), "charts and HTML pages"),
    ("plain", ("prepare/", "demo/", "inspect/", "report/", "extract/", "probe/", "verify/"), "one product each"),
    ("plain", ("lightning.py",), "an adapter for Lightning's Trainer"),
    ("plain", ("cli/",), "arguments and printing"),
]
"""From bottom to top: colour, packages, and what they own. A package imports only from lower rows."""


def packages() -> Picture:
    row, gap, top = 30, 5, 44
    picture = Picture(top + len(LAYERS) * (row + gap) + 12, "The packages of nest-ssl, in layers")
    picture.text(64, 28, "A package imports only from the rows below its own.", "title")
    bottom = top + len(LAYERS) * (row + gap) - gap
    picture.arrow(f"M32 {top + 4} V{bottom - 4}")
    picture.parts.append(
        f'<text class="note middle" transform="translate(22 {(top + bottom) / 2:g}) rotate(-90)">imports</text>'
    )
    for number, (kind, names, owns) in enumerate(reversed(LAYERS)):
        y = top + number * (row + gap)
        picture.parts.append(f'<rect class="{kind}" x="52" y="{y}" width="{WIDTH - 72}" height="{row}" rx="6"/>')
        picture.text(66, y + 20, "  ".join(names), "code")
        picture.text(500, y + 20, owns)
    return picture


# ---- one step ----


def step() -> Picture:
    p = Picture(640, "One training step, from a batch to updated weights, and what the loop does after it")
    code, title, note = "code", "title", "note"

    p.text(24, 30, "One step", title)
    p.text(
        24, 48, "training/loop.py calls training/step.py, whose work on the device fast/engine.py runs or replays", note
    )

    p.box(24, 70, 200, 74, "amber", (title, "batch"), ("", "clean and noisy audio"), (code, "data/batch/loader.py"))
    p.box(274, 70, 200, 74, "violet", (title, "transfer"), ("", "pinned memory → device"), (code, "training/step.py"))
    p.box(524, 70, 200, 74, "violet", (title, "seed"), ("", "by epoch, batch and rank"), (code, "training/loop.py"))
    p.arrow("M224 107 H272")
    p.arrow("M474 107 H522")
    p.arrow("M624 144 V162 H94 V206")

    p.frame(14, 172, 932, 304, "graph")
    p.text(378, 194, "on a GPU: one CUDA graph per batch shape", title)
    p.box(28, 208, 134, 58, "blue", (title, "features"), ("", "log-mel"))
    p.box(192, 208, 156, 58, "blue", (title, "targets"), ("", "codes of clean audio"))
    p.box(192, 284, 156, 58, "blue", (title, "mask"), ("", "blocks of noisy audio"))
    p.box(378, 284, 126, 58, "blue", (title, "encode"), ("", "FastConformer"))
    p.box(534, 284, 126, 58, "blue", (title, "predict"), ("", "masked tokens"))
    p.box(690, 284, 112, 58, "blue", (title, "loss"), (code, "objective.py"))
    p.box(832, 284, 102, 58, "green", (title, "backward"), ("", "autograd"))
    p.arrow("M162 237 H190")
    p.arrow("M94 266 V313 H190")
    p.arrow("M348 313 H376")
    p.arrow("M504 313 H532")
    p.arrow("M660 313 H688")
    p.arrow("M348 250 H746 V282")
    p.arrow("M802 313 H830")
    p.text(378, 216, "model.py: the plain version, for any device", note)
    p.text(378, 234, "fast/graphs.py, fast/encoder.py, fast/ops/: the same maths, fused and captured", note)

    p.arrow("M883 342 V374 H108 V390")
    y = 392
    p.box(24, y, 168, 74, "red", (title, "exchange"), ("", "while backward goes on"), (code, "parallel.py"))
    p.box(212, y, 168, 74, "violet", (title, "non-finite guard"), ("", "all skip, or none"), (code, "step.py"))
    p.box(400, y, 168, 74, "violet", (title, "clip"), ("", "norm or value"), (code, "step.py"))
    p.box(588, y, 168, 74, "violet", (title, "optimizer"), ("", "and its schedule"), (code, "optimizers.py"))
    p.box(776, y, 160, 74, "violet", (title, "EMA"), ("", "a graph of its own"), (code, "ema.py"))
    for x in (192, 380, 568, 756):
        p.arrow(f"M{x} {y + 37} H{x + 18}")

    p.text(24, 502, "After the step, in this order", title)
    p.text(24, 520, "training/loop.py; every rank decides from the same numbers, so all ranks decide alike", note)
    y = 540
    p.box(24, y, 200, 74, "violet", (title, "log"), ("", "every n steps"), (code, "metrics.py, loggers.py"))
    p.box(261, y, 200, 74, "violet", (title, "save"), ("", "before validation"), (code, "saving.py, state.py"))
    p.box(498, y, 200, 74, "violet", (title, "validate"), ("", "when due; keep the best"), (code, "validation.py"))
    p.box(735, y, 200, 74, "violet", (title, "stop?"), ("", "steps, time, signal, metric"), (code, "stopping.py"))
    for x in (224, 461, 698):
        p.arrow(f"M{x} {y + 37} H{x + 35}")
    return p


# ---- a run on many ranks ----


def ranks() -> Picture:
    p = Picture(764, "The processes of a run on two nodes, and how they communicate")
    code, title, note = "code", "title", "note"
    p.text(24, 30, "A run on two nodes with two ranks each", title)
    p.text(24, 48, "Launchers, workers, ranks and monitors are processes; the others are what they share.", note)

    for node, left in enumerate((24, 536)):
        p.frame(left, 64, 400, 424)
        p.text(left + 14, 90, f"node {node}", title)
        p.box(left + 100, 74, 200, 54, "plain", (title, "launcher"), (code, "launch/launcher.py"))
        p.text(left + 310, 98, "or torchrun,", note)
        p.text(left + 310, 114, "or SLURM", note)
        p.arrow(f"M{left + 200} 128 V146 H{left + 8} V246 H{left + 15}")
        p.arrow(f"M{left + 200} 146 H{left + 392} V246 H{left + 385}")
        for local in range(2):
            x = left + 16 + 194 * local
            p.box(x, 160, 174, 36, "amber", ("", "DataLoader workers"))
            p.arrow(f"M{x + 87} 196 V224")
            p.text(x + 95, 214, "batches", note)
            p.box(x, 226, 174, 54, "violet", (title, f"rank {2 * node + local}"), (code, "training/run.py"))
            p.arrow(f"M{x + 87} 280 V328")
            p.text(x + 95, 308, "marks", note)
        p.arrow(f"M{left + 190} 266 H{left + 210}", "thick", both=True)
        p.box(
            *(left + 16, 330, 368, 54, "plain"),
            (title, "beacon (shared memory)"),
            ("", "each rank's step and stage, each worker's file"),
        )
        role = "monitor, the leader" if node == 0 else "monitor, a follower"
        p.arrow(f"M{left + 200} 384 V420")
        p.text(left + 208, 407, "reads it four times a second", note)
        p.box(left + 100, 422, 200, 54, "red", (title, role), (code, "watchdog/monitor.py"))

    p.arrow("M408 266 H552", "thick", both=True)
    p.text(480, 258, "collectives", "note middle")
    p.arrow("M324 449 H636", both=True)
    p.text(480, 440, "rows, orders", "note middle")
    p.text(480, 466, "JSON over TCP", "note middle")

    notes(
        p,
        *(24, 504, 448, 134, "red"),
        "The only collectives (NCCL or gloo)",
        "start: copy rank 0's weights",
        "step: average gradients, one all-reduce per 32 MB",
        "validation: copy statistics, one sum, one decision",
        "sync_batchnorm=true: two per conformer layer",
        "strategy=fsdp: gather and scatter each layer",
    )
    notes(
        p,
        *(488, 504, 448, 134, "plain"),
        "The store (torch's TCPStore, on node 0)",
        "before the first step, all ranks compare their",
        "configuration, code, data plan and checkpoint;",
        "every ten steps, rank 0's clock tells all ranks",
        "to save, to validate or to stop",
    )
    notes(
        p,
        *(24, 654, 912, 96, "plain"),
        "The run folder, on a disk that all nodes see",
        "rank 0: checkpoints/, metrics.csv, hparams.yaml, git-commit.txt",
        "every rank: its log file, and the files that it could not read",
        "monitors: watchdog/nodeN.json while the run lasts; incidents/ when a rank stalls, fails or dies",
    )
    return p


def notes(picture: Picture, x: int, y: int, w: int, h: int, kind: str, title: str, *lines: str) -> None:
    """Draw a box with a title and lines that start at its left edge."""
    picture.box(x, y, w, h, kind)
    picture.text(x + 14, y + 24, title, "title")
    for number, line in enumerate(lines):
        picture.text(x + 14, y + 46 + LINE * number, line)


PICTURES = {"packages.svg": packages, "step.svg": step, "ranks.svg": ranks}


def main() -> None:
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
