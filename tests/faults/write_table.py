"""Write docs/faults.md from the tests' real output: `python -m tests.faults.write_table FOLDER docs`.

The rows of GPUs are those of the latest run of benchmarks/stalls_on_gpu.py.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

FAULTS = {
    1: "a rank is killed",
    2: "a rank is frozen (SIGSTOP)",
    3: "a rank sleeps in the encoder",
    4: "a rank loops in the encoder",
    5: "a C call holds the GIL",
    6: "an exception on one rank",
    7: "a file blocks (a leased file stands for a dead network disk)",
    8: "a DataLoader worker is killed",
    9: "a DataLoader worker is frozen",
    10: "corrupt, empty, truncated audio",
    11: "unequal batch counts",
    12: "NaN on one rank",
    13: "a collective that the others do not call",
    14: "a slow rank (+200 ms per step)",
    15: "the optimizer stalls",
    16: "validation stalls",
    17: "the disk is full",
    18: "killed while saving",
    19: "the port is in use",
    20: "a rank never joins",
    21: "preemption (SIGTERM)",
    22: "the launcher is killed",
    23: "the monitor is killed",
    24: "nothing wrong: slow first step, long validation, 1,000 steps; 10,000 steps",
    25: "stalls in the preprocessor, or in layer 1 of the encoder",
    26: "stalls in backward",
    27: "out of memory on one rank",
    28: "the original hang",
    29: "a bad file, or a death, in validation",
    30: "a stop during validation",
    31: "a monitor is silent for three times the limit, and returns; then a rank stalls",
    32: "the first batch of epoch 2 takes 90 s: many slow files; or one of them blocks",
    33: "one rank: a file blocks, a worker is killed, the host's memory is used up",
}

ON_GPUS = {
    "host sleeps": "a rank's host is late",
    "host stopped": "a rank is frozen (SIGSTOP)",
    "killed": "a rank is killed",
    "GPU spins in a kernel": "a GPU is stuck in a kernel",
    "all GPUs in one collective": "all GPUs are stuck in one collective",
    "replays another graph": "a rank replays another graph than the others",
    "diverging collective, eager": "a collective that the others do not call, without graphs",
    "out of memory": "one rank has no GPU memory left",
    "late loader": "a rank's file blocks",
    "capture fails on one rank": "one rank cannot capture its step (row 35)",
}

COMMAND = re.compile(r"\S+ -m nest_ssl (\w+)(?: [\w.+~]+=\S+)+")
"""A whole command, with this machine's paths."""
TEMPLATE = Path(__file__).with_name("faults.md.in")
GPU_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "stalls_on_gpu.json"


def main(folder: Path, docs: Path) -> None:
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        number = re.search(r"row_(\d+)", content["test"])
        if number is not None:
            found.setdefault(int(number[1]), []).append(content)
    missing = FAULTS.keys() - found.keys()
    if missing:
        raise SystemExit(f"no output for rows {sorted(missing)}: run all fault tests.")
    rows = [_row(number, content) for number in FAULTS for content in found[number][:3]]
    report = found[3][0]["text"]
    on_gpus = "".join(_gpu_row(trial) for trial in json.loads(GPU_RESULTS.read_text())[-1]["trials"])
    text = TEMPLATE.read_text().replace("@ROWS@\n", "".join(rows)).replace("@REPORT@", report)
    text = text.replace("@GPU_ROWS@\n", on_gpus)
    (docs / "faults.md").write_text(text)
    page = docs / "why-it-hung.md"
    block = re.compile(r"(?s)```\n(?:@ROW_28@|nest-ssl: rank .*?)\n```")
    page.write_text(block.sub(lambda _: f"```\n{found[28][0]['text']}\n```", page.read_text(), count=1))


def _row(number: int, content: dict[str, Any]) -> str:
    lines = content["text"].splitlines()
    fields = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:] if line.startswith("  ")}
    if "where" in fields:
        said = f"**{lines[0].removeprefix('nest-ssl: ')}**; {fields['where'].split(', rank')[0]}; {fields['cause']}"
    else:
        said = COMMAND.sub(r"nest-ssl \1 …", "<br>".join(lines))
    after = f"{content['after_s']:.1f} s" if content["after_s"] is not None else "–"
    return f"| {number} | {FAULTS[number]} | {said.replace('|', '/')} | {after} | {content['exit']} |\n"


def _gpu_row(trial: dict[str, Any]) -> str:
    said = "one line in the log; all ranks continue without graphs"
    if trial["kind"]:
        ranks = f"rank{'s' if len(trial['ranks']) > 1 else ''} {', '.join(map(str, trial['ranks']))}"
        cause = re.sub(r"/tmp/\w+/", "/", trial["cause"]).partition(". Lower ")[0]
        said = f"**{ranks}**; {trial['stage']}, step {trial['step']}; {cause}"
    after = "–" if trial["reported_s"] is None else f"{trial['reported_s']:.1f} s"
    return f"| {ON_GPUS[trial['name']]} | {said} | {after} | {trial['exit_code']} |\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
