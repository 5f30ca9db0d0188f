from __future__ import annotations

import gzip
import itertools
import logging
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch

from nest_ssl.audio import AudioError
from nest_ssl.config import DatasetConfig
from nest_ssl.data import BadDataError, LhotseAudioNoiseDataset, build_loader
from nest_ssl.data.plan.batches import MAX_SHAPES, Shape
from nest_ssl.data.sources.lhotse import is_endless
from tests.helpers import fifo_that_is_not_opened
from tests.unit.data.corpus import RATE, Corpus, make_corpus, write_manifest

lhotse = pytest.importorskip("lhotse")
MonoCut, Recording = lhotse.MonoCut, lhotse.Recording
CutSet = Any


def config(corpus: Corpus, **changed: Any) -> DatasetConfig:
    settings: dict[str, Any] = {
        "use_lhotse": True,
        "use_bucketing": True,
        "num_buckets": 3,
        "batch_size": None,
        "batch_duration": 1.0,
    }
    return corpus.config(**{**settings, **changed})


@pytest.fixture(scope="module")
def cuts(corpus: Corpus) -> CutSet:
    made = []
    for i in range(22):
        recording = Recording.from_file(corpus.folder / f"speech_{i}.wav")
        made.append(MonoCut(f"cut-{i}", 0, recording.duration, 0, recording=recording))
    return lhotse.CutSet.from_cuts(made)


def ids(batches: list[Any]) -> Counter[str]:
    return Counter(name for batch in batches for name in batch.sample_id)


@pytest.mark.parametrize(
    "changed", [{}, {"quadratic_duration": 0.5}, {"bucket_duration_bins": [0.2, 0.3]}, {"use_bucketing": False}]
)
def test_an_epoch_reads_every_utterance_once_within_the_duration(corpus: Corpus, changed: dict[str, Any]) -> None:
    loader = build_loader(config(corpus, **changed))
    batches = list(loader)
    assert ids(batches) == Counter(f"0-{i}" for i in range(22))
    longest_s = max(corpus.durations_s)  # lhotse stops after the utterance that reaches the limit
    assert all(int(batch.audio_len.sum()) <= (1.0 + longest_s) * RATE for batch in batches)  # type: ignore[union-attr]
    with pytest.raises(TypeError):
        len(loader)


def test_quadratic_duration_makes_batches_smaller(corpus: Corpus) -> None:
    plain, quadratic = (list(build_loader(config(corpus, quadratic_duration=q))) for q in (None, 0.2))
    assert len(quadratic) > len(plain)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 16])
def test_every_rank_has_the_same_number_of_batches(corpus: Corpus, world_size: int, drop_last: bool) -> None:
    settings = config(corpus, drop_last=drop_last)
    loaders = [build_loader(settings, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert len({loader.plan_hash for loader in loaders}) == 1
    specs = [list(loader.batches) for loader in loaders]
    assert len({len(rank) for rank in specs}) == 1
    if not drop_last:
        found = {cut.id.split("_")[0] for rank in specs for spec in rank for cut in spec.cuts}
        assert found == {f"0-{i}" for i in range(22)}


def test_concurrent_bucketing_is_refused_on_several_ranks(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match=r"concurrent_bucketing: .* on 2 ranks.* Set concurrent_bucketing=false\."):
        build_loader(config(corpus, concurrent_bucketing=True), world_size=2)
    assert sum(len(batch.sample_id or []) for batch in build_loader(config(corpus, concurrent_bucketing=True))) == 22


def test_passing_over_old_batches_is_logged_and_reported_to_the_watchdog(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = itertools.count(step=10)  # every look at it takes 10 s
    monkeypatch.setattr("nest_ssl.data.sources.lhotse.time.monotonic", lambda: float(next(clock)))
    loader = build_loader(config(corpus))
    beats: list[None] = []
    loader.batches.on_skip = lambda: beats.append(None)
    loader.start_at(0, 5)
    with caplog.at_level(logging.INFO):
        next(iter(loader.batches))
    assert len(beats) == 5
    passed = [text for text in caplog.messages if "passed over" in text]
    assert passed == ["resuming epoch 0: passed over 3 of 5 batches; about 20 s left"]


def test_epochs_are_shuffled_differently_and_reproducibly(corpus: Corpus) -> None:
    loader = build_loader(config(corpus), seed=1)
    epochs = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        epochs.append([batch.sample_id for batch in loader])
    assert epochs[0] == epochs[2]
    assert epochs[0] != epochs[1]


def test_lhotses_own_manifests_and_shar_folders_are_read(corpus: Corpus, cuts: CutSet, tmp_path: Path) -> None:
    cuts.to_file(tmp_path / "cuts.jsonl.gz")
    (tmp_path / "shar").mkdir()
    cuts.to_shar(tmp_path / "shar", fields={"recording": "wav"}, shard_size=8)
    for source in ({"cuts_path": str(tmp_path / "cuts.jsonl.gz")}, {"shar_path": str(tmp_path / "shar")}):
        settings = config(corpus, manifest_filepath=None, noise_manifest=None, batch_augmentor=None, **source)
        batches = list(build_loader(settings))
        assert ids(batches) == Counter(f"cut-{i}" for i in range(22))
        for batch in batches:
            for i, name in enumerate(batch.sample_id or []):
                expected, _ = soundfile.read(corpus.folder / f"speech_{name.removeprefix('cut-')}.wav")
                found = batch.audio[i, : len(expected)]  # type: ignore[index]
                torch.testing.assert_close(found, torch.from_numpy(expected).float(), atol=1e-4, rtol=0)


def test_inputs_are_mixed_by_weight_without_end(corpus: Corpus, tmp_path: Path) -> None:
    other = write_manifest(
        tmp_path / "other.jsonl",
        [{"audio_filepath": str(corpus.folder / f"speech_{i}.wav"), "duration": 0.1} for i in range(3)],
    )
    inputs = [
        {"type": "nemo", "manifest_filepath": str(corpus.speech), "weight": 1.0},
        {
            "type": "group",
            "weight": 3.0,
            "input_cfg": [{"type": "nemo", "manifest_filepath": str(other), "weight": 0.5}],
        },
    ]
    settings = config(corpus, manifest_filepath=None, input_cfg=inputs, use_bucketing=False, batch_size=4)
    specs = [spec for _, spec in zip(range(300), build_loader(settings).batches, strict=False)]
    drawn = Counter(cut.id.split("-")[0] for spec in specs for cut in spec.cuts)
    assert len(specs) == 300
    assert 0.7 < drawn["1"] / sum(drawn.values()) < 0.8
    assert is_endless(settings)
    assert not is_endless(config(corpus))
    assert not is_endless(config(corpus, manifest_filepath=None, input_cfg=inputs[1:]))
    settings = config(corpus, manifest_filepath=None, input_cfg=inputs, force_finite=True)
    assert not is_endless(settings)
    finite = build_loader(settings)
    assert sum(len(spec.cuts) for spec in finite.batches) == 25


def test_a_mixture_of_nothing_or_of_itself_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "i.yaml"
    for content, message in (
        ("[]", "input_cfg: .*i.yaml does not contain a list of inputs"),
        ("- manifest_filepath: [a.jsonl", r"i\.yaml: not a readable yaml file: "),
        ("!!python/object/apply:os.getcwd []", r"i\.yaml: not a readable yaml file: "),
        ("[text]", "input_cfg: text is not a mapping with a 'type'"),
        (f"[{{type: group, input_cfg: {path}}}]", "groups within groups. Does .*i.yaml name itself"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            build_loader(config(corpus, manifest_filepath=None, input_cfg=str(path)))


def test_an_input_that_is_not_understood_is_refused(corpus: Corpus) -> None:
    for entry, message in (
        ({"type": "parquet"}, "type 'parquet' is not one of"),
        ({"type": "nemo"}, r"needs \['manifest_filepath'\]"),
        ({"type": "nemo", "manifest_filepath": "m", "speed": 2}, r"does not take \['speed'\]"),
        ({"type": "nemo", "manifest_filepath": "m", "weight": 0}, "weight: 0.0 is not greater than 0"),
        ({"type": "nemo", "manifest_filepath": "m", "weight": float("nan")}, "weight: nan is not a finite number"),
        ({"type": "nemo", "manifest_filepath": "m", "weight": [1]}, "is not a number"),
    ):
        with pytest.raises(ValueError, match=message):
            build_loader(config(corpus, input_cfg=[entry]))
    with pytest.raises(ValueError, match="needs one of manifest_filepath, cuts_path, shar_path and input_cfg"):
        build_loader(config(corpus, manifest_filepath=None))
    with pytest.raises(ValueError, match="batch_duration: needed"):
        build_loader(config(corpus, batch_duration=None))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("c.jsonl", b"", "has no cut"),
        ("c.jsonl", b"no json\n", "cannot read these cuts"),
        ("c.jsonl", b'{"audio_filepath": "a.wav", "duration": 1.0}\n', "cannot read these cuts"),
        ("c.jsonl", b'{"id": "c", "type": "PaperCut", "start": 0, "duration": 1, "channel": 0}\n', "PaperCut"),
        ("c.jsonl", b'{"id": "c", "type": "MonoCut", "start": -3, "duration": 1, "channel": 0}\n', "starts at -3"),
        ("c.jsonl", b'{"id": "c", "type": "MonoCut", "start": 0, "duration": 0, "channel": 0}\n', "lasts 0 s"),
        (
            "c.jsonl",
            b'{"id": "s", "recording_id": "r", "start": 0, "duration": 1, "channel": 0}\n',
            "SupervisionSegment",
        ),
        ("c.jsonl.gz", gzip.compress(b'{"id": "c", "type": "MonoCut"}\n' * 99, mtime=0)[:30], "cannot read these cuts"),
        ("c.yaml", b"- !!python/object/apply:os.system ['touch pwned']\n", "could not determine a constructor"),
    ],
)
def test_cuts_that_cannot_be_read_are_refused_by_their_file(
    corpus: Corpus, tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^cuts_path: .*{name}: .*{words}"):
        build_loader(config(corpus, manifest_filepath=None, cuts_path=str(tmp_path / name)))


def test_a_shar_folder_without_shards_is_refused_by_its_name(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^shar_path: {tmp_path}: lhotse cannot read these cuts"):
        build_loader(config(corpus, manifest_filepath=None, shar_path=str(tmp_path)))


def test_bad_files_are_replaced_without_changing_the_batches(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "data")
    before = [len(batch.sample_id or []) for batch in build_loader(config(corpus))]
    (corpus.folder / "speech_3.wav").write_bytes(b"junk")
    loader = build_loader(config(corpus))
    batches = list(loader)
    assert [len(batch.sample_id or []) for batch in batches] == before
    assert "0-3" not in ids(batches)
    assert list(loader.bad_data.files) == [str(corpus.folder / "speech_3.wav")]


def test_an_input_of_a_mixture_that_the_limits_leave_out_is_refused_instead_of_searched_for_ever(
    corpus: Corpus, tmp_path: Path
) -> None:
    recording = Recording.from_file(corpus.folder / "speech_0.wav")
    inputs = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.jsonl"
        lhotse.CutSet.from_cuts([MonoCut(name, 0, recording.duration, 0, recording=recording)]).to_file(path)
        inputs.append({"type": "lhotse", "cuts_path": str(path)})
    with pytest.raises(ValueError, match=r"input_cfg: .*a\.jsonl.*: no utterance is left between min_duration and max"):
        build_loader(config(corpus, manifest_filepath=None, input_cfg=inputs, min_duration=50.0))


def test_the_reason_of_a_bad_recording_of_lhotse_is_more_than_an_announcement(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "data", num_speech=2)
    cuts = []
    for number in range(2):
        recording = Recording.from_file(corpus.folder / f"speech_{number}.wav")
        cuts.append(MonoCut(f"cut-{number}", 0, recording.duration, 0, recording=recording))
    (corpus.folder / "speech_0.wav").unlink()
    (corpus.folder / "speech_1.wav").write_bytes(b"junk")
    for cut, reason in zip(cuts, ("No such file or directory", "Exception #0 .*Format not"), strict=True):
        with pytest.raises(BadDataError, match=rf"speech_\d\.wav: {reason}"):
            LhotseAudioNoiseDataset()[lhotse.CutSet.from_cuts([cut])]


def test_bad_recordings_of_lhotses_own_cuts_are_replaced_too(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "data", num_speech=6)
    recordings = [Recording.from_file(corpus.folder / f"speech_{i}.wav") for i in range(6)]
    made = lhotse.CutSet.from_cuts(MonoCut(f"cut-{i}", 0, r.duration, 0, recording=r) for i, r in enumerate(recordings))
    made.to_file(tmp_path / "cuts.jsonl.gz")
    (corpus.folder / "speech_3.wav").write_bytes(b"junk")
    (corpus.folder / "speech_4.wav").unlink()
    changed = {"cuts_path": str(tmp_path / "cuts.jsonl.gz"), "max_bad_fraction": 1.0}
    loader = build_loader(config(corpus, manifest_filepath=None, **changed))
    with fifo_that_is_not_opened(corpus.folder / "speech_4.wav"):
        assert sum(len(batch.sample_id or []) for batch in loader) == 6
    assert sorted(loader.bad_data.files) == [str(corpus.folder / f"speech_{number}.wav") for number in (3, 4)]


def of_source(cut: Any, kind: str, source: str) -> Any:
    recording = replace(cut.recording, sources=[lhotse.AudioSource(kind, [0], source)])
    return replace(cut, recording=recording, id="hostile")


def hostile_cuts(cut: Any, line: str) -> dict[str, Any]:
    """Cuts that make lhotse run `line` in a shell when their audio is read."""
    command = of_source(cut, "command", line)
    transform = {"name": "ReverbWithImpulseResponse", "kwargs": {"rir": command.recording.to_dict()}}
    return {
        "command": command,
        "url": of_source(cut, "url", f"pipe:{line}"),
        "file name": of_source(cut, "file", f"$({line}).sph"),
        "track": cut.append(command),
        "room response": replace(cut, recording=replace(cut.recording, transforms=[transform])),
    }


@pytest.mark.parametrize("kind", ["command", "url", "file name", "track", "room response"])
def test_a_cut_that_would_run_a_command_is_refused_and_runs_nothing(cuts: CutSet, tmp_path: Path, kind: str) -> None:
    mark = tmp_path / "mark"
    cut = hostile_cuts(cuts[0], f"touch {mark}")[kind]
    with pytest.raises(ValueError, match=r"^cut .* is not read: .*\.$") as refused:
        LhotseAudioNoiseDataset()[lhotse.CutSet.from_cuts([cut])]
    assert not isinstance(refused.value, AudioError)  # it is not replaced like a bad file
    assert not mark.exists()


def test_cuts_in_memory_and_mixed_cuts_are_read(cuts: CutSet) -> None:
    mixed = cuts[0].append(cuts[1].move_to_memory()).with_id("mixed")
    batch = LhotseAudioNoiseDataset()[lhotse.CutSet.from_cuts([mixed])]
    assert batch.audio_len is not None
    assert batch.audio_len.tolist() == [round((cuts[0].duration + cuts[1].duration) * RATE)]


@pytest.mark.parametrize("error", [AssertionError(), ZeroDivisionError("in a decoder"), KeyError("codec")])
def test_any_error_of_lhotses_decoders_replaces_the_file(
    corpus: Corpus, cuts: CutSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    cuts.to_file(tmp_path / "cuts.jsonl.gz")
    load = MonoCut.load_audio

    def failing(cut: Any) -> Any:
        if cut.id == "cut-3":
            raise error
        return load(cut)

    monkeypatch.setattr(MonoCut, "load_audio", failing)
    loader = build_loader(config(corpus, manifest_filepath=None, cuts_path=str(tmp_path / "cuts.jsonl.gz")))
    assert sum(len(batch.sample_id or []) for batch in loader) == 22
    ((path, bad),) = loader.bad_data.files.items()
    assert (path, bad.reason) == (str(corpus.folder / "speech_3.wav"), str(error) or "AssertionError")


def test_running_out_of_memory_does_not_replace_a_file(
    corpus: Corpus, cuts: CutSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(cut: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(MonoCut, "load_audio", fails)
    with pytest.raises(MemoryError):
        LhotseAudioNoiseDataset()[cuts.subset(first=1)]


def test_the_dataset_takes_cuts_as_nemos_does(corpus: Corpus, cuts: CutSet) -> None:
    dataset = LhotseAudioNoiseDataset(str(corpus.noise), {"prob": 1.0, "noise_ratio": 1.0})
    batch = dataset[cuts.subset(first=3)]
    assert batch.audio is not None
    assert batch.audio_len is not None
    assert batch.noise is not None
    assert batch.audio_len.tolist() == [round(duration * RATE) for duration in corpus.durations_s[:3]]
    assert batch.noise.any(dim=1).all()


def test_our_own_keys_for_mixing_datasets_are_reported_as_unused(
    corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    build_loader(config(corpus, is_concat=True, bucketing_weights=[1, 2]))
    assert [message.split(":")[0] for message in caplog.messages] == ["is_concat", "bucketing_weights"]


FIXED = {"batch_size": None, "batch_duration": None, "bucket_duration_bins": [0.2, 0.3], "bucket_batch_size": [3, 2, 2]}


@pytest.mark.parametrize("changed", [{"batch_size": 2}, {"batch_size": 2, "use_bucketing": False}, FIXED])
@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_with_equal_batch_sizes_have_one_of_few_shapes(
    corpus: Corpus, changed: dict[str, Any], world_size: int
) -> None:
    settings = config(corpus, **changed)
    loaders = [build_loader(settings, rank=rank, world_size=world_size) for rank in range(world_size)]
    shapes = loaders[0].shapes()
    assert len(shapes) <= MAX_SHAPES
    num_planned = 0
    for step in zip(*(loader.batches for loader in loaders), strict=True):
        assert len({spec.num_samples for spec in step}) == 1
        if step[0].num_samples is not None:
            assert {Shape(len(spec.cuts), spec.num_samples) for spec in step} <= set(shapes)
            assert max(cut.duration for spec in step for cut in spec.cuts) * RATE < step[0].num_samples
            num_planned += 1
    assert num_planned >= 2


def test_fixed_batch_sizes_of_buckets_read_every_utterance_once(corpus: Corpus) -> None:
    batches = list(build_loader(config(corpus, **FIXED)))
    assert ids(batches) == Counter(f"0-{i}" for i in range(22))
    assert {len(batch.sample_id or []) for batch in batches} <= {1, 2, 3}
    assert all(batch.num_cropped == 0 for batch in batches)
    with pytest.raises(ValueError, match="bucket_batch_size: needs 'use_bucketing: true'"):
        config(corpus, **FIXED, use_bucketing=False)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, "lhotse fills each batch up to batch_duration.*bucket_batch_size"),
        ({"batch_size": 2, "manifest_filepath": None}, "the longest duration is unknown.*max_duration"),
    ],
)
def test_steps_without_shapes_are_explained(
    corpus: Corpus, cuts: CutSet, tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, Any], reason: str
) -> None:
    cuts.to_file(tmp_path / "cuts.jsonl.gz")
    cuts_path = str(tmp_path / "cuts.jsonl.gz") if "manifest_filepath" in changed else None
    settings = config(corpus, **changed, cuts_path=cuts_path)
    with caplog.at_level(logging.INFO):
        loader = build_loader(settings, world_size=2)
    assert any(re.search(reason, message) for message in caplog.messages)
    assert loader.shapes() == []
    assert all(spec.num_samples is None for spec in loader.batches)
    if cuts_path is not None:
        assert build_loader(replace(settings, max_duration=0.5), world_size=2).shapes()


def test_the_plan_of_older_checkpoints_is_recognised(corpus: Corpus) -> None:
    before = config(corpus)
    assert build_loader(before).plan_hash == build_loader(replace(before, prefetch_gb=1.0)).plan_hash
