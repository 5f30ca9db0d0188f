"""The outcome of a verification as a page: what was measured, what equals NeMo, and what differs on purpose."""

from __future__ import annotations

import datetime
import platform
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from nest_ssl._version import __version__
from nest_ssl.verify.compare import Verification


def write_report(path: Path, results: list[Verification]) -> None:
    """Write the page, in Markdown."""
    alignment = resources.files("nest_ssl.verify").joinpath("alignment.md").read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(alignment.replace("{measured}", measured(results)), encoding="utf-8")


def measured(results: list[Verification]) -> str:
    """The tables of all verified files."""
    versions = f"nest-ssl {__version__}, torch {torch.__version__}, numpy {np.__version__}, {platform.machine()}"
    parts = [f"Written by `nest-ssl verify --report` on {datetime.date.today()} with {versions}."]
    parts += [file_table(result) for result in results]
    return "\n\n".join(parts)


def file_table(result: Verification) -> str:
    against = f"against {result.against}" if result.against else "by itself: no numbers of NeMo were at hand"
    lines = [
        f"**`{Path(result.file).name}`**, {against}:",
        "",
        "| stage | what | largest difference | allowed | |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.stage} | {c.what} | {c.difference:.2g} | {c.allowed:g} | {'ok' if c.passed else '**differs**'} |"
        for c in result.checks
    ]
    return "\n".join(lines)
