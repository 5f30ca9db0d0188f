"""Parts of a probe: data, scores, the linear and the attentive head, pictures."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from nest_ssl.audio.signal import power
from nest_ssl.probe.attentive import AttentiveHead, AttentiveStatistics, _at_least_two
from nest_ssl.probe.charts import write_confusion, write_layer_weights
from nest_ssl.probe.data import (
    check_labels,
    labelled,
    labels_per_class,
    length_sorted,
    open_noise,
    read_batches,
)
from nest_ssl.probe.linear import fit_linear, statistics
from nest_ssl.probe.log_mel import LogMelStatistics
from nest_ssl.probe.scores import confusion, difference, score
from tests.unit.probe.speech_like import RATE, tone, write_corpus

DURATIONS_S = [0.4, 0.9, 0.6, 1.2, 0.5, 0.7]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return write_corpus(
        tmp_path / "corpus", DURATIONS_S, label=["10", "2", "2", "10", "2", "10"], speaker=list("aabbcc")
    )


def test_labels_are_read_and_classes_sorted_as_numbers(manifest: Path) -> None:
    examples = labelled(str(manifest), "label")
    assert [example.label for example in examples] == ["10", "2", "2", "10", "2", "10"]
    assert [example.group for example in examples] == list("aabbcc")
    assert check_labels(examples, examples, "label") == ["2", "10"]


def test_where_the_speaker_is_the_label_utterances_are_held_out_one_by_one(manifest: Path) -> None:
    groups = [example.group for example in labelled(str(manifest), "speaker")]
    assert len(set(groups)) == len(groups)


@pytest.mark.parametrize(
    ("sizes", "joined"), [([1, 1, 1], [3]), ([1, 3, 1], [5]), ([2, 1, 1, 2], [2, 2, 2]), ([1], [1]), ([4, 1], [5])]
)
def test_no_batch_of_the_attentive_head_is_one_utterance(sizes: list[int], joined: list[int]) -> None:
    batches = [[10 * place + item for item in range(size)] for place, size in enumerate(sizes)]
    out = _at_least_two(batches)
    assert [len(batch) for batch in out] == joined
    assert sorted(chain(*out)) == sorted(chain(*batches))


def test_missing_and_unknown_labels_are_named(manifest: Path) -> None:
    with pytest.raises(ValueError, match=r"manifest.jsonl:1: no label 'emotion'. Keys of this line: label, speaker"):
        labelled(str(manifest), "emotion")
    examples = labelled(str(manifest), "label")
    twos = [example for example in examples if example.label == "2"]
    with pytest.raises(ValueError, match="all utterances of the training set have the label '2'"):
        check_labels(twos, examples, "label")
    speakers = labelled(str(manifest), "speaker")
    with pytest.raises(ValueError, match="the test set has labels that training has not: c"):
        check_labels(speakers[:4], speakers, "speaker")


def test_few_labels_are_the_same_number_of_each_class(manifest: Path) -> None:
    examples = labelled(str(manifest), "label")
    chosen = labels_per_class(examples, 2, np.random.default_rng(0))
    assert sorted(example.label for example in chosen) == ["10", "10", "2", "2"]
    assert chosen == labels_per_class(examples, 2, np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"fewer examples of 10 \(3\), 2 \(3\)"):
        labels_per_class(examples, 4, np.random.default_rng(0))


def test_noise_has_the_ratio_asked_for_and_depends_on_the_place_alone(manifest: Path) -> None:
    noise = open_noise(str(manifest), 5.0, RATE, seed=1)
    clean = np.random.default_rng(0).standard_normal(8000).astype(np.float32)
    noisy = noise.added(clean, 3)
    assert 10 * np.log10(power(clean) / power(noisy - clean)) == pytest.approx(5.0, abs=0.01)
    np.testing.assert_array_equal(noisy, noise.added(clean, 3))
    assert not np.array_equal(noisy, noise.added(clean, 4))


def test_batches_hold_every_utterance_once_and_all_bad_files_end_in_one_error(manifest: Path) -> None:
    examples = labelled(str(manifest), "label")
    batches = length_sorted(examples, 2.0)
    seen: dict[int, int] = {}
    for indices, waveforms in read_batches(examples, batches, RATE, None):
        seen |= {index: len(waveform) for index, waveform in zip(indices, waveforms, strict=True)}
    assert seen == {index: int(duration_s * RATE) for index, duration_s in enumerate(DURATIONS_S)}
    for name in ("1.wav", "4.wav"):
        (manifest.parent / name).write_bytes(b"")
    with pytest.raises(ValueError, match="2 files cannot be read.*\n.*1.wav: empty file\n.*4.wav: empty file"):
        list(read_batches(examples, batches, RATE, None))


def test_an_interval_has_the_width_that_theory_gives() -> None:
    correct = np.arange(400) % 4 != 0
    found = score(correct, seed=0)
    half = 1.96 * np.sqrt(0.75 * 0.25 / 400)
    assert found.accuracy == 0.75
    assert found.low == pytest.approx(0.75 - half, abs=0.006)
    assert found.high == pytest.approx(0.75 + half, abs=0.006)


def test_a_paired_difference_is_sharper_than_two_intervals() -> None:
    rng = np.random.default_rng(0)
    base = rng.random(500) < 0.7
    better = base | (rng.random(500) < 0.1)
    gap = difference(better, base, seed=0)
    assert gap.low > 0
    assert score(base, 0).high > score(better, 0).low  # the intervals of the two overlap
    assert difference(base, base, seed=0) == difference(better, better, seed=1)


def test_confusion_counts_true_classes_by_answers() -> None:
    counts = confusion(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 2]), 3)
    np.testing.assert_array_equal(counts, [[1, 1, 0], [0, 1, 0], [0, 0, 1]])


def test_statistics_are_of_valid_frames_alone() -> None:
    x = torch.randn(2, 3, 10)
    found = statistics(x, torch.arange(10) < torch.tensor([[10], [4]]))
    torch.testing.assert_close(found[1, :3], x[1, :, :4].mean(1))
    torch.testing.assert_close(found[1, 3:], x[1, :, :4].std(1, correction=0))


def test_the_linear_probe_finds_the_layer_that_knows() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (240,), generator=generator)
    x = torch.randn(240, 4, 6, generator=generator)
    x[:, 2, :3] += 2.0 * torch.nn.functional.one_hot(labels, 3)
    probe = fit_linear(x[:160], labels[:160], 3, [str(i) for i in range(160)], seed=0)
    assert int(np.argmax(probe.layer_weights)) == 2
    assert sum(probe.layer_weights) == pytest.approx(1.0, abs=1e-5)
    assert (probe.predict(x[160:]) == labels[160:].numpy()).mean() > 0.8


def test_the_linear_probe_reaches_the_optimum_of_its_objective() -> None:
    """One layer is plain multinomial regression: its gradient is zero at the end."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(3, (60,), generator=generator)
    x = torch.randn(60, 1, 5, generator=generator) + labels[:, None, None]
    probe = fit_linear(x, labels, 3, [str(i) for i in range(60)], seed=0)
    weight = probe.weight_CF.clone().requires_grad_()
    logits = ((x - probe.mean_LF) / probe.std_LF)[:, 0] @ weight.T + probe.bias_C
    loss = torch.nn.functional.cross_entropy(logits, labels) + probe.penalty * weight.square().sum() / (2 * 60)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.abs().max() < 2e-3


def test_features_without_the_label_get_a_stronger_penalty_than_clear_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (60,), generator=generator)
    noise = torch.randn(60, 1, 40, generator=generator)
    clear = 0.1 * noise + labels[:, None, None]
    penalties = [fit_linear(x, labels, 2, [str(i) for i in range(60)], seed=0).penalty for x in (noise, clear)]
    assert penalties[0] > 10 * penalties[1]


def test_attentive_statistics_do_not_see_padding() -> None:
    torch.manual_seed(0)
    pool = AttentiveStatistics(6)
    x = torch.randn(2, 6, 9)
    longer = torch.nn.functional.pad(x, (0, 5), value=7.0)
    length = torch.tensor([9, 4])
    torch.testing.assert_close(pool(x, length), pool(longer, length), atol=1e-6, rtol=0)
    assert torch.isfinite(pool(x, torch.tensor([9, 0]))).all()


def test_the_attentive_head_weighs_layers_equally_at_first() -> None:
    head = AttentiveHead(4, 6, 3)
    assert head.layer_weights == [0.25] * 4
    assert head([torch.randn(2, 6, 9)] * 4, torch.tensor([9, 5])).shape == (2, 3)


def test_pictures_are_well_formed_and_name_what_they_show(tmp_path: Path) -> None:
    write_layer_weights([0.1, 0.7, 0.2], [0, 5, 11], tmp_path / "weights.svg")
    write_confusion(np.array([[3, 1], [0, 4]]), ["<low>", "a very long name of a class"], tmp_path / "confusion.svg")
    for name, words in (("weights.svg", "layer 5: 0.700"), ("confusion.svg", "<low> taken for a very long n…: 1")):
        root = ElementTree.parse(tmp_path / name).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert words in "\n".join(root.itertext())


def test_the_log_mel_baseline_hears_no_loudness_no_padding_and_no_pauses() -> None:
    baseline = LogMelStatistics(RATE).eval()
    samples = torch.from_numpy(tone(1.0, 150, 0))
    alone = baseline(samples[None], torch.tensor([RATE]))
    assert alone.shape == (1, 128)
    padded = torch.nn.functional.pad(0.1 * samples, (0, 4000))[None]
    torch.testing.assert_close(baseline(padded, torch.tensor([RATE])), alone, atol=5e-3, rtol=0)
    assert alone[:, :64].max() <= 0
    pause = 1e-4 * torch.randn(RATE, generator=torch.Generator().manual_seed(0))
    with_pause = baseline(torch.cat((samples, pause))[None], torch.tensor([2 * RATE]))
    assert (with_pause - alone).abs().mean() < 0.1
