from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nest_ssl.audio.signal import power
from nest_ssl.data import Utterance
from nest_ssl.probe.data import (
    Example,
    check_labels,
    find_task,
    label_under,
    labelled,
    labels_per_class,
    length_sorted,
    open_noise,
    read_batches,
)
from nest_ssl.watchdog.system import SlowFiles
from tests.unit.probe.speech_like import RATE, write_corpus

DURATIONS_S = [0.4, 0.9, 0.6, 1.2, 0.5, 0.7]


def labelled_by_key(manifest: Path, key: str) -> list[Example]:
    return labelled(str(manifest), label_under(key), key)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return write_corpus(
        tmp_path / "corpus", DURATIONS_S, label=["10", "2", "2", "10", "2", "10"], speaker=list("aabbcc")
    )


def test_labels_are_read_and_classes_sorted_as_numbers(manifest: Path) -> None:
    examples = labelled_by_key(manifest, "label")
    assert [example.label for example in examples] == ["10", "2", "2", "10", "2", "10"]
    assert [example.group for example in examples] == list("aabbcc")
    assert check_labels(examples, examples, "label") == ["2", "10"]


def test_where_the_speaker_is_the_label_utterances_are_held_out_one_by_one(manifest: Path) -> None:
    groups = [example.group for example in labelled_by_key(manifest, "speaker")]
    assert len(set(groups)) == len(groups)


def test_missing_and_unknown_labels_are_named(manifest: Path) -> None:
    with pytest.raises(ValueError, match=r"manifest.jsonl:1: no label 'emotion'. Keys of this line: label, speaker"):
        labelled_by_key(manifest, "emotion")
    odd = manifest.with_name("odd.jsonl")
    odd.write_text(manifest.read_text().splitlines()[0].replace("}", ', "mood": NaN}') + "\n")
    with pytest.raises(ValueError, match="'mood' is nan, which is no label"):
        labelled_by_key(odd, "mood")
    examples = labelled_by_key(manifest, "label")
    twos = [example for example in examples if example.label == "2"]
    with pytest.raises(ValueError, match="all utterances of the training set have the label '2'"):
        check_labels(twos, examples, "label")
    speakers = labelled_by_key(manifest, "speaker")
    with pytest.raises(ValueError, match="the test set has labels that do not occur in training: c"):
        check_labels(speakers[:4], speakers, "speaker")


def test_few_labels_are_the_same_number_of_each_class(manifest: Path) -> None:
    examples = labelled_by_key(manifest, "label")
    chosen = labels_per_class(examples, 2, np.random.default_rng(0))
    assert sorted(example.label for example in chosen) == ["10", "10", "2", "2"]
    assert chosen == labels_per_class(examples, 2, np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"too few examples of 10 \(3\), 2 \(3\)"):
        labels_per_class(examples, 4, np.random.default_rng(0))


def test_noise_has_the_ratio_asked_for_and_depends_on_the_place_alone(manifest: Path) -> None:
    noise = open_noise(str(manifest), 5.0, RATE, seed=1)
    clean = np.random.default_rng(0).standard_normal(8000).astype(np.float32)
    noisy = noise.added(clean, 3)
    assert 10 * np.log10(power(clean) / power(noisy - clean)) == pytest.approx(5.0, abs=0.01)
    np.testing.assert_array_equal(noisy, noise.added(clean, 3))
    assert not np.array_equal(noisy, noise.added(clean, 4))


def test_batches_hold_every_utterance_once_and_all_bad_files_end_in_one_error(manifest: Path) -> None:
    examples = labelled_by_key(manifest, "label")
    batches = length_sorted(examples, 2.0)
    seen: dict[int, int] = {}
    for indices, waveforms in read_batches(examples, batches, RATE, None):
        seen |= {index: len(waveform) for index, waveform in zip(indices, waveforms, strict=True)}
    assert seen == {index: int(duration_s * RATE) for index, duration_s in enumerate(DURATIONS_S)}
    for name in ("1.wav", "4.wav"):
        (manifest.parent / name).write_bytes(b"")
    with pytest.raises(ValueError, match="2 files cannot be read.*\n.*1.wav: empty file\n.*4.wav: empty file"):
        list(read_batches(examples, batches, RATE, None))


def test_a_task_gives_labels_and_leaves_utterances_out(manifest: Path) -> None:
    def length(utterance: Utterance) -> str | None:
        assert utterance.duration_s is not None
        if utterance.extra["speaker"] == "c":
            return None
        return "long" if utterance.duration_s > 0.8 else "short"

    examples = labelled(str(manifest), length, "length")
    assert [example.label for example in examples] == ["short", "long", "short", "long"]
    assert [example.group for example in examples] == list("aabb")
    with pytest.raises(ValueError, match=r"manifest.jsonl: no utterance has a label for 'length'"):
        labelled(str(manifest), lambda utterance: None, "length")
    with pytest.raises(ValueError, match=r"manifest.jsonl:1: no key 'age'"):
        labelled(str(manifest), lambda utterance: utterance.extra["age"], "age")


def test_a_task_that_nobody_registered_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"--task rhythm: no such task.*register_probe_task, or use --label"):
        find_task("rhythm")


def test_a_file_that_blocks_is_named(
    manifest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_slowly(path: str, **other: object) -> Any:
        time.sleep(0.4)
        return np.zeros(10, np.float32)

    monkeypatch.setattr("nest_ssl.probe.data.SlowFiles", lambda: SlowFiles(0.1))
    monkeypatch.setattr("nest_ssl.probe.data.read_audio", read_slowly)
    examples = labelled_by_key(manifest, "label")[:1]
    assert len(list(read_batches(examples, [[0]], RATE, None))) == 1
    assert f"{examples[0].utterance.audio_filepath!r}: has been read for" in capsys.readouterr().err
