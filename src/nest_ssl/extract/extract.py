"""Write the features of many utterances into a folder: in batches of similar length, resumable, and independent of how
the batches are formed."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nest_ssl.audio import AudioError, read_audio
from nest_ssl.audio.read import check_regular
from nest_ssl.audio.signal import Samples
from nest_ssl.config.checks import Range
from nest_ssl.extract.files import Features, FeatureStore, open_store
from nest_ssl.extract.inputs import Bad, Item, batches, list_items, measured, unique
from nest_ssl.files import make_folder, remove_left_over, replace_text, replacing
from nest_ssl.layer_features import FeatureExtractor
from nest_ssl.watchdog.system import SlowFiles

INDEX, BAD, SETTINGS = "manifest.jsonl", "bad.jsonl", "extract.json"
DTYPES = ("float32", "float16")
CPU_BATCH_S, GPU_BATCH_S = 16.0, 600.0
"""Seconds of audio per batch, padding included. Small batches stay in a CPU's caches: with batches of 60 s everything
takes 1.6 times as long as with 16 s (measured: small encoder, one core)."""
MAX_DURATION_S = 600.0
"""Memory for attention grows with the square of the length: 600 s take about 6 GB in a large encoder."""
READ_AHEAD = 3
"""Batches to read in advance."""


@dataclass(frozen=True)
class ExtractOptions:
    """How features are stored and computed; only `dtype` changes their values."""

    format: str = "npy"
    dtype: str = "float32"
    batch_s: float | None = None
    """Seconds of audio per batch; None: depends on the device."""
    max_duration_s: float = MAX_DURATION_S
    shard_mb: float = 256.0
    num_workers: int = 4
    """Threads that read and write."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPES)}.")
        given = {"--batch-seconds": self.batch_s, "--max-duration": self.max_duration_s, "--shard-mb": self.shard_mb}
        for option, value in given.items():
            if value is not None:
                Range(0, above=True).check(option, value)


@dataclass
class Extracted:
    """The outcome."""

    num_new: int = 0
    num_kept: int = 0
    """Utterances whose features an earlier run had written."""
    audio_s: float = 0.0
    """Seconds of audio in the new ones."""
    bad: list[Bad] = field(default_factory=list)


def extract_features(
    extractor: FeatureExtractor,
    source: str | Path,
    output: str | Path,
    options: ExtractOptions | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Extracted:
    """Write the features of a file, folder, list or manifest into the folder `output`; existing ones are kept.

    `output/manifest.jsonl` lists the features of every utterance, `output/bad.jsonl` the files that could not be read,
    and why. `report` is called with the number of utterances done and their total.
    """
    source, output, options = Path(source).expanduser(), Path(output).expanduser(), options or ExtractOptions()
    items, bad = list_items(source)
    make_folder(output)
    settings = _settings(extractor, options)
    _check_settings(output, settings)
    remove_left_over(output, inside=True)
    store = open_store(output, options.format, int(options.shard_mb * 1e6))
    result = Extracted(bad=list(bad))
    missing = [item for item in unique(items) if store.find(item.key) is None]
    total = len(unique(items))
    result.num_kept = total - len(missing)
    with SlowFiles() as slow, ThreadPoolExecutor(max(1, options.num_workers)) as pool:
        pairs, unreadable = measured(missing, pool, options.max_duration_s, slow)
        result.bad += unreadable
        batch_s = options.batch_s or (GPU_BATCH_S if extractor.device.type == "cuda" else CPU_BATCH_S)
        writer = _Writer(store, pool, options.dtype, extractor.name)
        for batch, waveforms in _read_ahead(batches(pairs, batch_s), extractor.sample_rate, pool, slow):
            _extract_batch(extractor, batch, waveforms, writer, result)
            report(result.num_kept + result.num_new + len(result.bad), total + len(bad))  # not in `total`
        writer.finish()
    found = [(item.key, line) for item in items if (line := _index_line(item, store)) is not None]
    _check_settings(output, settings, is_ours=True)
    _write_lines(output / INDEX, [line for _, line in found])
    (output / BAD).unlink(missing_ok=True)
    if result.bad:
        _write_lines(output / BAD, [{"audio_filepath": file.path, "reason": file.reason} for file in result.bad])
    gone = result.num_kept + result.num_new - len({key for key, _ in found})
    if gone > 0:
        raise ValueError(
            f"{output}: something else has deleted the features of {gone:,} of {total:,} utterances while this was "
            "running. Run the same command again to write them."
        )
    return result


def _extract_batch(
    extractor: FeatureExtractor,
    batch: list[Item],
    waveforms: list[Samples | AudioError],
    writer: _Writer,
    result: Extracted,
) -> None:
    good = []
    for item, waveform in zip(batch, waveforms, strict=True):
        if isinstance(waveform, AudioError):
            result.bad.append(Bad(item.path, waveform.reason))
        else:
            good.append((item, waveform))
    if not good:
        return
    features = _features(extractor, [waveform for _, waveform in good])
    for (item, waveform), tensor in zip(good, features, strict=True):
        if tensor is None:
            result.bad.append(Bad(item.path, f"out of memory for {len(waveform) / extractor.sample_rate:.1f} s"))
            continue
        if tensor.shape[-1] == 0:
            result.bad.append(Bad(item.path, f"{len(waveform)} samples are too short for one frame"))
            continue
        writer.put(item.key, tensor)
        result.num_new += 1
        result.audio_s += len(waveform) / extractor.sample_rate


def _features(extractor: FeatureExtractor, waveforms: list[Samples]) -> list[torch.Tensor | None]:
    """Features of each, in smaller batches if GPU memory runs out; None: it does not even fit alone."""
    try:
        return list(extractor.batch(waveforms, pin=True))
    except torch.OutOfMemoryError:
        if len(waveforms) == 1:
            return [None]
    half = len(waveforms) // 2
    return _features(extractor, waveforms[:half]) + _features(extractor, waveforms[half:])


def _read_ahead(
    groups: list[list[Item]], sample_rate: int, pool: ThreadPoolExecutor, slow: SlowFiles
) -> Iterator[tuple[list[Item], list[Samples | AudioError]]]:
    """Each batch with its waveforms, while threads read the next ones."""

    def read(item: Item) -> Samples | AudioError:
        try:
            with slow.reading(item.path):
                return read_audio(
                    item.path, sample_rate=sample_rate, offset_s=item.offset_s, duration_s=item.duration_s
                )
        except AudioError as error:
            return error

    pending: deque[tuple[list[Item], list[Future[Samples | AudioError]]]] = deque()
    for group in groups:
        pending.append((group, [pool.submit(read, item) for item in group]))
        if len(pending) > READ_AHEAD:
            batch, futures = pending.popleft()
            yield batch, [future.result() for future in futures]
    for batch, futures in pending:
        yield batch, [future.result() for future in futures]


class _Writer:
    """Writes features in threads; an error in a thread stops the run at the next write."""

    MAX_PENDING = 256

    def __init__(self, store: FeatureStore, pool: ThreadPoolExecutor, dtype: str, model: str) -> None:
        self.store, self.pool, self.dtype, self.model = store, pool, np.dtype(dtype), model
        self.pending: deque[Future[None]] = deque()

    def put(self, key: str, tensor: torch.Tensor) -> None:
        if not self.store.concurrent:
            self._write(key, tensor)
            return
        self.pending.append(self.pool.submit(self._write, key, tensor))
        if len(self.pending) > self.MAX_PENDING:
            self.pending.popleft().result()

    def _write(self, key: str, tensor: torch.Tensor) -> None:
        if not tensor.isfinite().all():  # audio is checked when it is read
            raise ValueError(
                f"{self.model}: its features of {key} are not finite: the weights are damaged, or diverged."
            )
        with np.errstate(over="ignore"):
            features: Features = np.ascontiguousarray(tensor.numpy(), dtype=self.dtype)
        if not np.isfinite(features).all():
            raise ValueError(f"--dtype {self.dtype}: the features do not fit into it. Use float32.")
        self.store.write(key, features)

    def finish(self) -> None:
        for future in self.pending:
            future.result()
        self.store.flush()


def _index_line(item: Item, store: FeatureStore) -> dict[str, Any] | None:
    stored = store.find(item.key)
    if stored is None:
        return None
    line = {"audio_filepath": item.path, "duration": item.duration_s, "offset": item.offset_s or None}
    line = {name: value for name, value in line.items() if value is not None} | item.extra
    line |= {"feature_filepath": stored.path, "feature_name": stored.name, "num_frames": stored.shape[-1]}
    return {name: value for name, value in line.items() if name != "feature_name" or value is not None}


def _settings(extractor: FeatureExtractor, options: ExtractOptions) -> dict[str, Any]:
    """What determines the values and the location of features."""
    return {
        "encoder": _fingerprint(extractor),
        "layers": extractor.layers,
        "aggregation": extractor.aggregation,
        "weights": extractor.weights,
        "precision": extractor.precision,
        "format": options.format,
        "dtype": options.dtype,
        "frames_per_s": extractor.frames_per_s,
    }


def _fingerprint(extractor: FeatureExtractor) -> str:
    """A hash of the encoder's weights and of how its input is computed; the same on every device.

    Weights enter as the sum of their bits, read as integers: exact in any order, and computed where the weights are.
    """
    weights = sorted(extractor.model.encoder.state_dict().items())
    sums = {name: int(_bits(tensor).sum()) for name, tensor in weights}
    facts = repr((extractor.model.cfg.preprocessor, extractor.model.cfg.encoder, sums))
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers, whose sum is int64."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def _check_settings(output: Path, settings: dict[str, Any], *, is_ours: bool = False) -> None:
    """Refuse a folder with other features. Settings are written first, so that a killed run has them too.

    If a folder `is_ours` and has none, they were deleted, and are written again.
    """
    path = output / SETTINGS
    if path.exists():
        try:
            check_regular(path, str(path))
            earlier = dict(json.loads(path.read_text()))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: not readable ({error}). Give another output folder.") from error
        changed = [name for name in settings if earlier.get(name) != settings[name]]
        if changed and os.listdir(output) != [SETTINGS]:  # alone: nothing was computed with them
            text = ", ".join(f"{name} {earlier.get(name)!r}, now {settings[name]!r}" for name in changed)
            raise ValueError(f"{output}: contains features with other settings ({text}). Give another output folder.")
        if not changed:
            return
    elif os.listdir(output) and not is_ours:
        raise ValueError(f"{output}: is not empty and has no {SETTINGS}. Give another output folder.")
    replace_text(path, json.dumps(settings, indent=2) + "\n")


def _write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    with replacing(path) as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
