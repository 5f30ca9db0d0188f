from __future__ import annotations

import pytest

from nest_ssl.data import ManifestError
from nest_ssl.inspect.inspect import Inspection, InspectOptions, inspect_data, training_config
from tests.unit.inspect.conftest import Speech

OPTIONS = InspectOptions(batch_sizes=[4], num_examples=1)


def inspect_lines(speech: Speech, lines: list[dict[str, object]], *overrides: str) -> Inspection:
    return inspect_data(speech.config(overrides, manifest=speech.other("other.jsonl", lines)), OPTIONS)


def test_good_data_gives_every_part_and_no_alarm(speech: Speech) -> None:
    found = inspect_data(speech.config(["model.train_ds.drop_last=false"]), OPTIONS)
    assert found.num_kept == 14
    assert found.noise is not None
    assert list(found.batchings) == [4]
    assert len(found.examples) == 1
    assert found.notes == ["14% of the files are resampled to 16,000 Hz every time they are read."]


def test_a_note_counts_utterances_outside_the_limits(speech: Speech) -> None:
    found = inspect_data(speech.config(["model.train_ds.min_duration=1.8"]), OPTIONS)
    num_short = sum(s < 1.8 for s in speech.durations_s)
    assert found.num_kept == 14 - num_short
    assert f"{num_short} of 14 utterances are left out by model.train_ds.min_duration=1.8 (seconds)." in found.notes


def test_a_note_counts_short_utterances_that_are_padded(speech: Speech) -> None:
    found = inspect_data(speech.config(["model.train_ds.min_audio_len_secs=2.0"]), OPTIONS)
    short_s = [s for s in speech.durations_s if s < 2]
    share = sum(2 - s for s in short_s) / sum(max(s, 2) for s in speech.durations_s)
    expected = (
        f"{len(short_s)} utterances are shorter than model.train_ds.min_audio_len_secs=2 and are padded (repeat):"
    )
    assert any(note.startswith(f"{expected} {share:.0%} of what the model sees.") for note in found.notes)


def test_limits_that_leave_nothing_do_not_crash(speech: Speech) -> None:
    found = inspect_data(speech.config(["model.train_ds.min_duration=50"]), OPTIONS)
    assert (found.num_kept, found.batchings, found.examples) == (0, {}, [])
    assert any("Nothing is left to train on" in note for note in found.notes)


def test_without_durations_the_headers_are_used(speech: Speech) -> None:
    found = inspect_lines(speech, [{"audio_filepath": f"{i}.wav"} for i in (1, 2, 3, 4, 5, 99)])
    shuffled = found.batchings[4][0]
    assert shuffled.num_total == 5
    assert len(found.examples[0].utterances) == 4
    assert any("6 of 6 utterances have no 'duration'" in note for note in found.notes)
    assert any("1 of 6 examined files cannot be used" in note for note in found.notes)


def test_unusable_files_alone_do_not_crash(speech: Speech) -> None:
    found = inspect_lines(speech, [{"audio_filepath": f"gone_{i}.wav", "duration": 2.0} for i in range(8)])
    assert len(found.speech.unusable) == 8
    assert found.examples == []
    assert any(note.startswith("No example batches: none of these") for note in found.notes)


def test_one_utterance_is_enough(speech: Speech) -> None:
    found = inspect_lines(speech, [{"audio_filepath": "1.wav", "duration": 1.2}])
    assert found.batchings[4][0].problem.startswith("batch_size: 1 utterance does not fill one batch")
    assert len(found.examples[0].utterances) == 1


def test_a_note_warns_when_drop_last_leaves_out_much(speech: Speech) -> None:
    buckets = ["model.train_ds.num_buckets=2", "model.train_ds.use_bucketing=true"]
    found = inspect_data(speech.config(buckets), InspectOptions(batch_sizes=[5]))
    worst = max(row.left_out_share or 0 for row in found.batchings[5] if row.name.startswith("buckets"))
    assert worst > 0.1
    assert any(f"leaves out up to {worst:.0%} of the utterances" in note for note in found.notes)


def test_no_note_warns_of_buckets_that_were_not_asked_for(speech: Speech) -> None:
    found = inspect_data(speech.config(["model.train_ds.num_buckets=2"]), InspectOptions(batch_sizes=[5]))
    assert max(row.left_out_share or 0 for row in found.batchings[5]) > 0.1
    assert not any("bucket" in note for note in found.notes)


def test_batches_of_hours_are_not_drawn(speech: Speech) -> None:
    lines: list[dict[str, object]] = [{"audio_filepath": "1.wav", "duration": s} for s in (1.2, 5000.0)]
    found = inspect_lines(speech, lines, "model.train_ds.max_duration=null")
    assert found.examples == []
    assert any("would be 5.6 h of audio" in note for note in found.notes)
    assert len(inspect_lines(speech, lines).examples) == 1  # max_duration leaves the long one out


def test_noise_that_cannot_be_read_is_named(speech: Speech) -> None:
    (speech.folder / "noise_0.wav").write_text("broken")
    found = inspect_data(speech.config(), OPTIONS)
    assert found.noise is not None
    assert [bad.name for bad in found.noise.unusable] == [str(speech.folder / "noise_0.wav")]
    assert len(found.examples) == 1


def test_a_missing_or_empty_manifest_raises(speech: Speech) -> None:
    with pytest.raises(ValueError, match="no such manifest"):
        inspect_data(speech.config(manifest=speech.folder / "missing.jsonl"), OPTIONS)
    with pytest.raises(ValueError, match=r"empty.jsonl: contains no utterances. Run 'nest-ssl prepare"):
        inspect_data(speech.config(manifest=speech.other("empty.jsonl", [])), OPTIONS)
    broken = speech.folder / "broken.jsonl"
    broken.write_text("hello\n")
    with pytest.raises(ManifestError, match="broken.jsonl:1: not JSON"):
        inspect_data(speech.config(manifest=broken), OPTIONS)


def test_the_noise_of_a_configuration_is_kept_unless_another_is_given(speech: Speech) -> None:
    given = [f"model.train_ds.noise_manifest={speech.noise}"]
    kept = training_config("m.jsonl", None, given, "nest_fast-conformer", None).train_ds
    other = training_config("m.jsonl", "n.jsonl", given, "nest_fast-conformer", None).train_ds
    assert kept is not None
    assert other is not None
    assert (kept.manifest_filepath, kept.noise_manifest) == ("m.jsonl", str(speech.noise))
    assert other.noise_manifest == "n.jsonl"
