"""What a probe learns from and is tested on: utterances with a label, read, and made noisy on request."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from nest_ssl.audio import AudioError, read_audio
from nest_ssl.audio.signal import Samples, gain_for_ratio, power, repeat_to
from nest_ssl.data import NoiseSource, Utterance, open_manifests

GROUP_KEY = "speaker"
"""Utterances that share this key (unless it is the label) stay on one side when the L2 penalty is chosen."""
MAX_NAMED = 10
NOISE_BANK_BYTES = 200_000_000


@dataclass(frozen=True)
class Example:
    """One utterance and its label."""

    utterance: Utterance
    label: str
    group: str


@dataclass(frozen=True)
class Noise:
    """Noise to add at one ratio; the same for the same seed and place, whoever asks."""

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
        raise ValueError(f"{manifest}: no noise in it.")
    return Noise(NoiseSource(utterances, sample_rate, bank_bytes=NOISE_BANK_BYTES), snr_db, seed)


def labelled(manifest: str, key: str) -> list[Example]:
    """Every utterance of a manifest with the label under `key`."""
    examples = []
    for utterance in open_manifests(manifest):
        label = utterance.extra.get(key)
        if label is None or isinstance(label, (dict, list)):
            known = ", ".join(sorted(utterance.extra)) or "none"
            raise ValueError(f"{utterance.manifest}:{utterance.line}: no label '{key}'. Keys of this line: {known}.")
        alone = f"{utterance.manifest}:{utterance.line}"
        group = alone if key == GROUP_KEY else utterance.extra.get(GROUP_KEY, alone)
        examples.append(Example(utterance, str(label), str(group)))
    if not examples:
        raise ValueError(f"{manifest}: no utterances in it.")
    return examples


def check_labels(train: list[Example], test: list[Example], key: str) -> list[str]:
    """The classes, sorted; every one of the test set must have been seen in training."""
    classes = sorted({example.label for example in train}, key=_number_or_text)
    if len(classes) < 2:
        raise ValueError(f"--label {key}: all utterances of the training set have the label '{classes[0]}'.")
    unknown = sorted({example.label for example in test} - set(classes))
    if unknown:
        raise ValueError(
            f"--label {key}: the test set has labels that training has not: {', '.join(unknown[:MAX_NAMED])}."
        )
    return classes


def _number_or_text(label: str) -> tuple[int, float, str]:
    """Numbers in their order, then texts."""
    return (0, float(label), label) if label.lstrip("-").isdecimal() else (1, 0.0, label)


def labels_per_class(examples: list[Example], count: int, rng: np.random.Generator) -> list[Example]:
    """`count` random examples of each class."""
    by_label: dict[str, list[int]] = defaultdict(list)
    for index, example in enumerate(examples):
        by_label[example.label].append(index)
    short = [f"{label} ({len(places)})" for label, places in by_label.items() if len(places) < count]
    if short:
        raise ValueError(f"--labels-per-class {count}: fewer examples of {', '.join(sorted(short))}.")
    chosen = [rng.choice(by_label[label], count, replace=False) for label in sorted(by_label)]
    return [examples[index] for index in sorted(np.concatenate(chosen).tolist())]


def length_sorted(examples: Sequence[Example], max_batch_s: float) -> list[list[int]]:
    """Indices in batches of neighbours in length, as many as `max_batch_s` holds with padding."""
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
    """Each batch of indices with its waveforms, read in threads. All files that cannot be read end in one error."""

    def read(index: int) -> Samples | AudioError:
        one = examples[index].utterance
        try:
            samples = read_audio(
                one.audio_filepath, sample_rate=sample_rate, offset_s=one.offset_s, duration_s=one.duration_s
            )
        except AudioError as error:
            return error
        return samples if noise is None else noise.added(samples, index)

    bad: list[AudioError] = []
    with ThreadPoolExecutor(num_workers) as pool:
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
        raise ValueError(f"{len(bad):,} files cannot be read; mend them or leave them out:\n{named}{more}")


def most_frequent_share(examples: Sequence[Example]) -> float:
    """The accuracy of always answering with the most frequent label."""
    counts = Counter(example.label for example in examples)
    return max(counts.values()) / len(examples)
