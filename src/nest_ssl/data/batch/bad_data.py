"""Bad files: counted, named in a file of the run and in the log, and the end of the run when there are too many."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger(__name__)

MIN_UTTERANCES = 1000
"""Where an epoch's length is not known (lhotse, endless), no run stops because of fewer utterances than this."""
MAX_NAMED = 10
"""Files named in the log; the others are only in the run's file."""


class BadDataError(RuntimeError):
    """Too much of the data cannot be read."""


@dataclass  # not frozen: Lightning walks through batches and refuses frozen ones
class BadFile:
    """One file that could not be read for one place in the plan."""

    kind: str
    """speech, noise, or no-noise: an utterance that was left without noise because none could be read."""
    audio_filepath: str
    reason: str
    epoch: int
    step: int
    rank: int
    """Place in the plan."""
    stand_in: bool = False
    """It was to stand in for another bad file, so the plan lost no further utterance."""


class BadDataLog:
    """Counts what a rank could not read, writes each file once to `path`, and stops above `max_bad_fraction`."""

    def __init__(self, *, max_bad_fraction: float, utterances_per_epoch: int | None, path: Path | None = None) -> None:
        self.max_bad_fraction = max_bad_fraction
        self.utterances_per_epoch = utterances_per_epoch
        self.path = path
        self.epoch = 0
        self.num_read = 0
        """Utterances of this epoch so far."""
        self.num_bad: Counter[str] = Counter()
        """By kind, in this epoch: utterances replaced, noise drawn again, utterances left without noise."""
        self.files: dict[str, BadFile] = {}
        """Every bad file of the run, by path."""

    def start_epoch(self, epoch: int) -> None:
        self.epoch, self.num_read, self.num_bad = epoch, 0, Counter()

    def record(self, num_utterances: int, bad_files: list[BadFile]) -> None:
        """Take note of a batch. Raises BadDataError when the epoch's share of bad utterances is too high."""
        self.num_read += num_utterances
        for bad in bad_files:
            self.num_bad[bad.kind] += not bad.stand_in
            if bad.kind != "no-noise" and bad.audio_filepath not in self.files:
                self._name(bad)
        if bad_files:
            self._stop_if_too_many()

    def _name(self, bad: BadFile) -> None:
        self.files[bad.audio_filepath] = bad
        if len(self.files) <= MAX_NAMED:
            log.warning("bad %s file: %s: %s", bad.kind, bad.audio_filepath, bad.reason)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(bad), ensure_ascii=False) + "\n")

    def _stop_if_too_many(self) -> None:
        out_of = self.utterances_per_epoch or max(self.num_read, MIN_UTTERANCES)
        for kind, what in (("speech", "could not be read"), ("no-noise", "found no noise that could be read")):
            if self.num_bad[kind] > self.max_bad_fraction * out_of:
                raise BadDataError(
                    f"{self.num_bad[kind]} of {out_of:,} utterances of epoch {self.epoch} {what}, more than "
                    f"max_bad_fraction = {self.max_bad_fraction:.2%}.\n{self.summary()}\n"
                    "Run 'nest-ssl prepare' on the data to leave them out, or raise max_bad_fraction."
                )

    def summary(self) -> str:
        """One paragraph for the log; empty when nothing was bad."""
        if not self.files and not self.num_bad:
            return ""
        reasons = Counter(bad.reason for bad in self.files.values())
        lines = [
            f"bad data: {self.num_bad['speech']} of {self.num_read:,} utterances of epoch {self.epoch} replaced, "
            f"{self.num_bad['noise']} noise segments drawn again, {self.num_bad['no-noise']} utterances without noise; "
            f"{len(self.files)} bad files in this run",
            *(f"  {count} x {reason}" for reason, count in reasons.most_common(MAX_NAMED)),
            *(f"  {bad.kind}: {bad.audio_filepath}: {bad.reason}" for bad in list(self.files.values())[:MAX_NAMED]),
        ]
        if self.path is not None:
            lines.append(f"  all of them: {self.path}")
        return "\n".join(lines)

    def state_dict(self) -> dict[str, object]:
        return {"num_read": self.num_read, "num_bad": dict(self.num_bad)}

    def load_state_dict(self, state: dict[str, object], epoch: int) -> None:
        self.start_epoch(epoch)
        self.num_read = int(state["num_read"])  # type: ignore[call-overload]
        self.num_bad.update(state["num_bad"])  # type: ignore[call-overload]
