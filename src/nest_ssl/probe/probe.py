"""Probe an encoder: a small classifier on its frozen features, next to log-mel statistics and random weights.

N utterances, L layers, F statistics.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nest_ssl.checkpoint import load
from nest_ssl.config.checks import Range
from nest_ssl.files import make_folder, replace_text
from nest_ssl.layer_features import FeatureExtractor, Layers, pad_waveforms
from nest_ssl.model import EncDecMaskedTokenPredModel
from nest_ssl.modules.inputs import valid_frames
from nest_ssl.probe.attentive import Classifier, TrainingOptions, classify, train_classifier
from nest_ssl.probe.data import (
    Example,
    Noise,
    check_labels,
    find_task,
    label_under,
    labelled,
    labels_per_class,
    length_sorted,
    most_frequent_share,
    open_noise,
    read_batches,
)
from nest_ssl.probe.linear import LogMelStatistics, fit_linear, statistics
from nest_ssl.probe.results import Score, confusion, difference, score, write_confusion, write_layer_weights

log = logging.getLogger(__name__)

RESULTS = ("results.json", "layer_weights.svg", "confusion.svg")
HEADS = ("linear", "attentive")
ENCODER, LOG_MEL, RANDOM = SYSTEMS = ("encoder", "log_mel", "random_encoder")
LARGEST = 1e15
"""Features above this have a variance that float32 cannot hold."""
BATCH_S = 16.0
"""Seconds of audio per batch: fits a CPU's caches, and suffices for the short utterances of probes on a GPU."""


@dataclass(frozen=True)
class ProbeOptions:
    """What to predict, and how."""

    label: str | None = None
    """Key of the manifests that has the label."""
    layers: Layers = "all"
    head: str = "linear"
    """linear: mean and std over time, then a linear classifier. attentive: attentive statistics and an embedding."""
    snr_db: float | None = None
    """Add noise to the test audio at this ratio; training stays clean."""
    noise_manifest: str | None = None
    labels_per_class: int | None = None
    """Train on this many random examples of each class; None: on all."""
    training: TrainingOptions = field(default_factory=TrainingOptions)
    """For the attentive head and for fine-tuning."""
    seed: int = 0
    task: str | None = None
    """A task that was registered as a plugin, in place of `label`."""

    def __post_init__(self) -> None:
        if (self.label is None) == (self.task is None):
            raise ValueError("give --label KEY or --task NAME, one of the two.")
        if self.head not in HEADS:
            raise ValueError(f"head: {self.head!r} is not one of {', '.join(HEADS)}.")
        if (self.snr_db is None) != (self.noise_manifest is None):
            raise ValueError("--snr and --noise go together: a ratio in dB, and a manifest of noises.")
        if self.snr_db is not None:
            Range(-100, 100).check("--snr", self.snr_db)
        if self.labels_per_class is not None and self.labels_per_class < 1:
            raise ValueError(f"--labels-per-class {self.labels_per_class}: give 1 or more.")
        if self.training.finetune and self.head == "linear":
            raise ValueError("--finetune trains the attentive head; use --head attentive.")

    @property
    def name(self) -> str:
        """What is predicted, for messages and tables."""
        return self.label or self.task or ""


@dataclass(frozen=True)
class ProbeResult:
    """Scores of the three systems on the same test utterances."""

    scores: dict[str, Score]
    differences: dict[str, Score]
    """Accuracy of the encoder minus that of each baseline, paired."""
    layer_weights: list[float]
    layers: list[int]
    classes: list[str]
    confusion_CC: NDArray[np.int64]
    num_train: int
    num_test: int
    most_frequent: float
    """The share of the most frequent class in the test set: the accuracy of a constant prediction."""


@dataclass(frozen=True)
class _Task:
    """What the three systems have in common."""

    train: list[Example]
    test: list[Example]
    labels_N: Tensor
    classes: list[str]
    noise: Noise | None
    options: ProbeOptions
    device: torch.device
    report: Callable[[int, int], None]

    @property
    def groups(self) -> list[str]:
        return [example.group for example in self.train]


def probe(
    checkpoint: str | Path | EncDecMaskedTokenPredModel,
    train: str,
    test: str,
    options: ProbeOptions,
    *,
    device: str | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> ProbeResult:
    """Train on one manifest and test on the other: the encoder, log-mel statistics, the encoder with random weights."""
    model = checkpoint if isinstance(checkpoint, EncDecMaskedTokenPredModel) else load(checkpoint)
    extractor = FeatureExtractor(model, options.layers, device=device, precision="fp32")
    task = _open_task(train, test, options, extractor, report)
    untrained = FeatureExtractor(
        with_random_weights(model, options.seed), extractor.layers, device=extractor.device, precision="fp32"
    )
    if options.head == "linear":
        predicted, weights = _linear_systems(task, extractor, untrained)
    else:
        predicted, weights = _attentive_systems(task, extractor, untrained)
    return _result(task, predicted, weights, extractor.layers)


def with_random_weights(model: EncDecMaskedTokenPredModel, seed: int) -> EncDecMaskedTokenPredModel:
    """A model of the same configuration before any training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return type(model)(model.cfg).eval()


def _open_task(
    train: str, test: str, options: ProbeOptions, extractor: FeatureExtractor, report: Callable[[int, int], None]
) -> _Task:
    ask = find_task(options.task) if options.task is not None else label_under(options.name)
    learned, tested = labelled(train, ask, options.name), labelled(test, ask, options.name)
    _warn_of_shared(learned, tested)
    classes = check_labels(learned, tested, f"--{'label' if options.label else 'task'} {options.name}")
    if options.labels_per_class is not None:
        learned = labels_per_class(learned, options.labels_per_class, np.random.default_rng(options.seed))
    noise = None
    if options.snr_db is not None and options.noise_manifest is not None:
        noise = open_noise(options.noise_manifest, options.snr_db, extractor.sample_rate, options.seed)
    labels_N = torch.tensor([classes.index(example.label) for example in learned])
    return _Task(learned, tested, labels_N, classes, noise, options, extractor.device, report)


def _warn_of_shared(learned: list[Example], tested: list[Example]) -> None:
    """A score on utterances that were learned says nothing about others."""

    def segment(example: Example) -> tuple[str, float]:
        return example.utterance.audio_filepath, example.utterance.offset_s

    known = {segment(example) for example in learned}
    shared = [example.utterance.audio_filepath for example in tested if segment(example) in known]
    if shared:
        log.warning(
            "%d of %d test utterances are in the training data too, such as %s: the scores will be too good. Leave "
            "them out of --train.",
            len(shared),
            len(tested),
            shared[0],
        )


def _linear_systems(
    task: _Task, extractor: FeatureExtractor, untrained: FeatureExtractor
) -> tuple[dict[str, NDArray[np.int64]], list[float]]:
    """The predictions of each system, and the encoder's layer weights; one pass over the audio serves all three."""
    log_mels = _log_mels(extractor)
    total = len(task.train) + len(task.test)
    train = _pooled(task.train, None, extractor, untrained, log_mels, lambda done: task.report(done, total))
    test = _pooled(
        task.test, task.noise, extractor, untrained, log_mels, lambda done: task.report(len(task.train) + done, total)
    )
    predicted, weights = {}, []
    labels_N = task.labels_N.to(extractor.device)
    for system in SYSTEMS:
        largest = max(float(one[system].abs().max()) for one in (train, test))
        if not largest <= LARGEST:  # or nan
            raise ValueError(
                f"{system}: its features are up to {largest:.0e}, and no probe can be fitted to them. Are its weights "
                "damaged?"
            )
        fitted = fit_linear(train[system], labels_N, len(task.classes), task.groups, task.options.seed)
        predicted[system] = fitted.predict(test[system])
        if system == ENCODER:
            weights = fitted.layer_weights
    return predicted, weights


def _attentive_systems(
    task: _Task, extractor: FeatureExtractor, untrained: FeatureExtractor
) -> tuple[dict[str, NDArray[np.int64]], list[float]]:
    options, predicted, weights = task.options, {}, []
    log_mels, labels_N = _log_mels(extractor), task.labels_N.to(extractor.device)
    train, test = (
        _log_mel_statistics(examples, noise, log_mels, extractor)
        for examples, noise in ((task.train, None), (task.test, task.noise))
    )
    fitted = fit_linear(train, labels_N, len(task.classes), task.groups, options.seed)
    predicted[LOG_MEL] = fitted.predict(test)
    for system, source in ((ENCODER, extractor), (RANDOM, untrained)):
        with torch.random.fork_rng(devices=[extractor.device] if extractor.device.type == "cuda" else []):
            torch.manual_seed(options.seed)
            net = Classifier(source.model, source.layers, len(task.classes), options.training.finetune)
            net.to(extractor.device)
            train_classifier(net, task.train, task.labels_N, options.training, seed=options.seed, report=task.report)
        predicted[system] = classify(net, task.test, task.noise, options.training.batch_s)
        if system == ENCODER:
            weights = net.head.layer_weights
    return predicted, weights


def _log_mels(extractor: FeatureExtractor) -> LogMelStatistics:
    return LogMelStatistics(extractor.sample_rate).eval().to(extractor.device)


@torch.inference_mode()
def _pooled(
    examples: list[Example],
    noise: Noise | None,
    extractor: FeatureExtractor,
    untrained: FeatureExtractor,
    log_mels: LogMelStatistics,
    report: Callable[[int], None],
) -> dict[str, Tensor]:
    """Statistics over time of each system, (N, L, F)."""
    rows: dict[str, list[Tensor]] = {system: [] for system in SYSTEMS}
    order: list[int] = []
    for indices, waveforms in read_batches(examples, length_sorted(examples, BATCH_S), extractor.sample_rate, noise):
        samples_BN, length = (tensor.to(extractor.device) for tensor in pad_waveforms(waveforms))
        for system, source in ((ENCODER, extractor), (RANDOM, untrained)):
            features_BLDS, num_frames = source.tensors(samples_BN, length)
            valid_BS = valid_frames(num_frames, features_BLDS.shape[3])
            rows[system].append(torch.stack([statistics(x_BDS, valid_BS) for x_BDS in features_BLDS.unbind(1)], dim=1))
        rows[LOG_MEL].append(log_mels(samples_BN, length)[:, None])
        order += indices
        report(len(order))
    places = torch.tensor(order, device=extractor.device).argsort()
    # A clone is not an inference tensor: fitting on it needs gradients.
    return {system: torch.cat(parts)[places].clone() for system, parts in rows.items()}


@torch.inference_mode()
def _log_mel_statistics(
    examples: list[Example],
    noise: Noise | None,
    log_mels: LogMelStatistics,
    extractor: FeatureExtractor,
) -> Tensor:
    rows, order = [], []
    for indices, waveforms in read_batches(examples, length_sorted(examples, BATCH_S), extractor.sample_rate, noise):
        samples_BN, length = (tensor.to(extractor.device) for tensor in pad_waveforms(waveforms))
        rows.append(log_mels(samples_BN, length)[:, None])
        order += indices
    return torch.cat(rows)[torch.tensor(order, device=extractor.device).argsort()]


def _result(
    task: _Task, predicted: dict[str, NDArray[np.int64]], weights: list[float], layers: list[int]
) -> ProbeResult:
    true_N = np.array([task.classes.index(example.label) for example in task.test])
    correct = {system: np.asarray(answers == true_N) for system, answers in predicted.items()}
    seed = task.options.seed
    return ProbeResult(
        scores={system: score(correct[system], seed) for system in SYSTEMS},
        differences={other: difference(correct[ENCODER], correct[other], seed) for other in (LOG_MEL, RANDOM)},
        layer_weights=weights,
        layers=layers,
        classes=task.classes,
        confusion_CC=confusion(true_N, predicted[ENCODER], len(task.classes)),
        num_train=len(task.train),
        num_test=len(task.test),
        most_frequent=most_frequent_share(task.test),
    )


def write_results(result: ProbeResult, options: ProbeOptions, output: Path, about: dict[str, Any]) -> None:
    """Write `results.json`, `layer_weights.svg` and `confusion.svg` into the folder `output`."""
    make_folder(output)
    content: dict[str, Any] = {system: asdict(result.scores[system]) for system in SYSTEMS}
    content["differences"] = {f"{ENCODER} - {other}": asdict(gap) for other, gap in result.differences.items()}
    content |= {"layers": result.layers, "layer_weights": result.layer_weights, "classes": result.classes}
    content |= {"num_train": result.num_train, "num_test": result.num_test, "most_frequent": result.most_frequent}
    content |= {"confusion": result.confusion_CC.tolist(), "options": asdict(options), **about}
    write_layer_weights(result.layer_weights, result.layers, output / "layer_weights.svg")
    write_confusion(result.confusion_CC, result.classes, output / "confusion.svg")
    replace_text(output / "results.json", json.dumps(content, indent=2) + "\n")
