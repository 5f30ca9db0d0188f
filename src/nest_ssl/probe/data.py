"""The data of a probe: utterances with labels, read in batches, with noise added on request."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from nest_ssl.audio import AudioError, read_audio
from nest_ssl.audio.signal import Samples, gain_for_ratio, power, repeat_to
from nest_ssl.config.checks import quoted
from nest_ssl.data import NoiseSource, Utterance, open_manifests
from nest_ssl.plugins import probe_tasks
from nest_ssl.watchdog.system import SlowFiles

GROUP_KEY = "speaker"
"""Utterances that share this key (unless it is the label) stay in one fold when the L2 penalty is chosen."""
MAX_NAMED = 10
NOISE_BANK_BYTES = 200_000_000


ProbeTask = Callable[[Utterance], object]
"""What a probe asks: the label of an utterance, as a text or a number; None leaves the utterance out."""


@dataclass(frozen=True)
class Example:
    """One utterance and its label."""

    utterance: Utterance
    label: str
    group: str
    """The speaker, if the manifest names one."""


@dataclass(frozen=True)
class Noise:
    """Noise to add at a fixed ratio; the same seed and utterance index always give the same noise."""

    source: NoiseSource
    snr_db: float
    seed: int

    def added(self, samples: Samples, index: int) -> Samples:
        rng = np.random.default_rng([self.seed, index])
        noise = self.source.sample(len(samples), rng, _raise)
        assert noise is not None
        noise = repeat_to(noise, len(samples))
        gain = gain_for_ratio(power(samples), power(noise), self.snr_db)
        noisy: Samples = samples + noise * np.float32(gain)
        return noisy


def _raise(error: AudioError) -> None:
    raise ValueError(f"{error.path}: this noise cannot be read: {error.reason}")


def open_noise(manifest: str, snr_db: float, sample_rate: int, seed: int) -> Noise:
    utterances = open_manifests(manifest)
    if not len(utterances):
        raise ValueError(f"{manifest}: contains no noise.")
    return Noise(NoiseSource(utterances, sample_rate, bank_bytes=NOISE_BANK_BYTES), snr_db, seed)


def label_under(key: str) -> ProbeTask:
    """The task of `--label KEY`: predict what the manifest has under `key`."""

    def label(utterance: Utterance) -> object:
        value = utterance.extra.get(key)
        if value is None or isinstance(value, (dict, list)) or value != value:  # not even itself: NaN
            known = ", ".join(sorted(utterance.extra)) or "none"
            if key in utterance.extra:
                raise ValueError(f"'{key}' is {quoted(value)}, which is no label. Give a text or a number.")
            raise ValueError(f"no label '{key}'. Keys of this line: {known}.")
        return value

    return label


def find_task(name: str) -> ProbeTask:
    """The task of `--task NAME`, which a plugin has registered."""
    task = probe_tasks.find(name)
    if task is None:
        known = ", ".join(probe_tasks.names()) or "none"
        raise ValueError(
            f"--task {name}: no such task; registered: {known}. "
            f"Add one with nest_ssl.plugins.register_probe_task, or use --label KEY."
        )
    return task


def labelled(manifest: str, task: ProbeTask, name: str) -> list[Example]:
    """The utterances of a manifest with the labels that `task` gives them; `name` is its key or name."""
    examples = []
    for utterance in open_manifests(manifest):
        where = f"{utterance.manifest}:{utterance.line}"
        try:
            label = task(utterance)
        except (ValueError, KeyError) as error:
            reason = f"no key {error}." if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{where}: {reason}") from error
        if label is not None:
            group = where if name == GROUP_KEY else utterance.extra.get(GROUP_KEY, where)
            examples.append(Example(utterance, str(label), str(group)))
    if not examples:
        raise ValueError(f"{manifest}: no utterance has a label for '{name}'.")
    return examples


def check_labels(train: list[Example], test: list[Example], option: str) -> list[str]:
    """The classes, sorted. Each class of the test set must occur in the training set; `option` is for errors."""
    classes = sorted({example.label for example in train}, key=_number_or_text)
    if len(classes) < 2:
        raise ValueError(f"{option}: all utterances of the training set have the label '{classes[0]}'.")
    unknown = sorted({example.label for example in test} - set(classes))
    if unknown:
        raise ValueError(
            f"{option}: the test set has labels that do not occur in training: {', '.join(unknown[:MAX_NAMED])}."
        )
    return classes


def _number_or_text(label: str) -> tuple[int, float, str]:
    """Sort numbers by value, then texts."""
    return (0, float(label), label) if label.lstrip("-").isdecimal() else (1, 0.0, label)


def labels_per_class(examples: list[Example], count: int, rng: np.random.Generator) -> list[Example]:
    """`count` random examples of each class."""
    by_label: dict[str, list[int]] = defaultdict(list)
    for index, example in enumerate(examples):
        by_label[example.label].append(index)
    short = [f"{label} ({len(places)})" for label, places in by_label.items() if len(places) < count]
    if short:
        raise ValueError(f"--labels-per-class {count}: too few examples of {', '.join(sorted(short))}.")
    chosen = [rng.choice(by_label[label], count, replace=False) for label in sorted(by_label)]
    return [examples[index] for index in sorted(np.concatenate(chosen).tolist())]


def length_sorted(examples: Sequence[Example], max_batch_s: float) -> list[list[int]]:
    """Indices in batches of similar length; a batch has at most `max_batch_s` seconds, padding included."""
    durations_s = [example.utterance.duration_s or max_batch_s for example in examples]
    out: list[list[int]] = []
    for index in sorted(range(len(examples)), key=lambda i: (-durations_s[i], i)):
        if out and durations_s[out[-1][0]] * (len(out[-1]) + 1) <= max_batch_s:
            out[-1].append(index)
        else:
            out.append([index])
    return out


def read_batches(
    examples: Sequence[Example],
    batches: Sequence[list[int]],
    sample_rate: int,
    noise: Noise | None,
    num_workers: int = 4,
) -> Iterator[tuple[list[int], list[Samples]]]:
    """Each batch of indices with its waveforms, read in threads. One error names all files that cannot be read."""

    slow = SlowFiles()

    def read(index: int) -> Samples | AudioError:
        one = examples[index].utterance
        try:
            with slow.reading(one.audio_filepath):
                samples = read_audio(
                    one.audio_filepath, sample_rate=sample_rate, offset_s=one.offset_s, duration_s=one.duration_s
                )
        except AudioError as error:
            return error
        return samples if noise is None else noise.added(samples, index)

    bad: list[AudioError] = []
    with slow, ThreadPoolExecutor(num_workers) as pool:
        ahead = pool.map(read, batches[0]) if batches else iter(())
        for number, batch in enumerate(batches):
            waveforms = list(ahead)
            if number + 1 < len(batches):
                ahead = pool.map(read, batches[number + 1])
            bad += [waveform for waveform in waveforms if isinstance(waveform, AudioError)]
            if not bad:
                yield batch, [waveform for waveform in waveforms if not isinstance(waveform, AudioError)]
    if bad:
        named = "\n".join(f"  {error}" for error in bad[:MAX_NAMED])
        more = f"\n  … and {len(bad) - MAX_NAMED:,} more" if len(bad) > MAX_NAMED else ""
        raise ValueError(f"{len(bad):,} files cannot be read; fix them or leave them out:\n{named}{more}")


def most_frequent_share(examples: Sequence[Example]) -> float:
    """The accuracy of always predicting the most frequent label."""
    counts = Counter(example.label for example in examples)
    return max(counts.values()) / len(examples)
