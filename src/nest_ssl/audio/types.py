"""What reading audio gives and raises."""

from __future__ import annotations

from dataclasses import dataclass


class AudioError(ValueError):
    """One audio file cannot be used: which one, and why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)  # both in args, so that the error survives pickling from a worker process
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True)
class AudioInfo:
    """What an audio file says about itself."""

    sample_rate: int
    """Samples per second of the file."""
    num_samples: int
    """Samples per channel."""
    num_channels: int
    format: str
    """Container and encoding, such as 'WAV/PCM_16' or 'matroska/opus'."""

    @property
    def duration_s(self) -> float:
        return self.num_samples / self.sample_rate
