"""A probe from manifests to results: systems, options, files."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from nest_ssl import plugins
from nest_ssl.cli.main import main
from nest_ssl.probe.attentive import TrainingOptions
from nest_ssl.probe.probe import ProbeOptions, probe, with_random_weights, write_results
from tests.helpers import NO_DROPOUT, tiny_model
from tests.unit.probe.speech_like import RATE, tone, write_checkpoint

PITCHES_HZ = {"low": 100.0, "high": 220.0}
OPTIONS = ProbeOptions("pitch")


def corpus(folder: Path, count: int, seed: int) -> Path:
    """Tones of two pitches."""
    folder.mkdir(parents=True)
    lines = []
    for number in range(count):
        label = list(PITCHES_HZ)[number % 2]
        rng = np.random.default_rng([seed, number])
        duration_s = float(rng.uniform(0.4, 0.7))
        soundfile.write(folder / f"{number}.wav", tone(duration_s, PITCHES_HZ[label], seed * 1000 + number), RATE)
        lines.append({"audio_filepath": f"{number}.wav", "duration": duration_s, "pitch": label, "one": "same"})
    (folder / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "m.jsonl"


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tones")
    return {"train": str(corpus(folder / "train", 24, 0)), "test": str(corpus(folder / "test", 12, 1))}


def test_utterances_in_both_sets_are_a_warning(
    manifests: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lines(name: str) -> list[dict[str, Any]]:
        path = Path(manifests[name])
        found = [json.loads(line) for line in path.read_text().splitlines()]
        return [{**line, "audio_filepath": str(path.parent / line["audio_filepath"])} for line in found]

    train, shared = tmp_path / "train.jsonl", lines("test")[0]
    for learned in (lines("train"), [*lines("train"), shared]):
        assert not caplog.text
        train.write_text("".join(json.dumps(line) + "\n" for line in learned))
        probe(tiny_model(), str(train), manifests["test"], options=OPTIONS, device="cpu")
    expected = f"1 of 12 test utterances are in the training data too, such as {shared['audio_filepath']}"
    assert expected in caplog.text


def test_features_too_large_to_fit_are_named(manifests: dict[str, Any]) -> None:
    model = tiny_model()
    for name, value in model.state_dict().items():
        if name.endswith("norm_out.weight"):
            value.mul_(1e30)
    with pytest.raises(
        ValueError, match=r"encoder: its features are up to (nan|inf|\de\+\d\d), and no probe can be fitted to them"
    ):
        probe(model, **manifests, options=OPTIONS, device="cpu")


def test_a_linear_probe_tells_two_pitches_apart(manifests: dict[str, Any], tmp_path: Path) -> None:
    result = probe(tiny_model(), **manifests, options=OPTIONS, device="cpu")
    assert result.scores["log_mel"].accuracy > 0.9
    assert result.classes == ["high", "low"]
    assert (result.num_train, result.num_test, result.most_frequent) == (24, 12, 0.5)
    assert result.confusion_CC.sum() == 12
    write_results(result, OPTIONS, tmp_path / "out", {"checkpoint": "x.nemo"})
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    for system in ("encoder", "log_mel", "random_encoder"):
        found = content[system]
        assert found["low"] <= found["accuracy"] <= found["high"]
    assert content["differences"].keys() == {"encoder - log_mel", "encoder - random_encoder"}
    assert len(content["layer_weights"]) == 2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "results.json",
        "layer_weights.svg",
        "confusion.svg",
    }


def test_the_same_seed_gives_the_same_result(manifests: dict[str, Any]) -> None:
    options = replace(OPTIONS, labels_per_class=4, snr_db=0.0, noise_manifest=manifests["train"], seed=3)
    one, two = (probe(tiny_model(), **manifests, options=options, device="cpu") for _ in range(2))
    assert one.scores == two.scores
    assert one.layer_weights == two.layer_weights
    assert one.num_train == 8


def test_noise_makes_the_test_harder_and_leaves_training_clean(manifests: dict[str, Any]) -> None:
    noisy = replace(OPTIONS, snr_db=-20.0, noise_manifest=manifests["train"])
    clean = probe(tiny_model(), **manifests, options=OPTIONS, device="cpu")
    hard = probe(tiny_model(), **manifests, options=noisy, device="cpu")
    assert hard.scores["log_mel"].accuracy < clean.scores["log_mel"].accuracy


def test_random_weights_are_new_ones_of_the_same_shape() -> None:
    model = tiny_model(seed=1)
    state = torch.random.get_rng_state()
    untrained = with_random_weights(model, seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    name = "encoder.layers.0.feed_forward1.linear1.weight"
    assert untrained.state_dict()[name].shape == model.state_dict()[name].shape
    assert not torch.equal(untrained.state_dict()[name], model.state_dict()[name])


@pytest.mark.parametrize("finetune", [False, True])
def test_the_attentive_head_learns_with_the_encoder_frozen_or_not(manifests: dict[str, Any], finetune: bool) -> None:
    model = tiny_model(NO_DROPOUT).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    training = TrainingOptions(finetune=finetune, epochs=6, lr=5e-3, encoder_lr=1e-3, batch_s=6.0)
    result = probe(model, **manifests, options=ProbeOptions("pitch", head="attentive", training=training), device="cpu")
    assert result.scores["encoder"].accuracy > 0.8
    assert len(result.layer_weights) == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model.training


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head": "deep"}, "'deep' is not one of linear, attentive"),
        ({"snr_db": 0.0}, "--snr and --noise go together"),
        ({"snr_db": math.nan, "noise_manifest": "n.jsonl"}, "--snr: nan is not a finite number"),
        ({"snr_db": math.inf, "noise_manifest": "n.jsonl"}, "--snr: inf is not a finite number"),
        ({"snr_db": -1e30, "noise_manifest": "n.jsonl"}, r"--snr: -1e\+30 is less than -100"),
        ({"task": "length"}, "give --label KEY or --task NAME, one of the two"),
        ({"labels_per_class": 0}, "--labels-per-class 0: give 1 or more"),
        ({"training": TrainingOptions(finetune=True)}, "--finetune trains the attentive head"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ProbeOptions("pitch", **options)


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0, 0.0, 1e30])
@pytest.mark.parametrize("name", ["lr", "encoder_lr"])
def test_rates_that_are_not_positive_numbers_are_refused(name: str, rate: float) -> None:
    options: dict[str, Any] = {name: rate}
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}: {re.escape(str(rate))} is "):
        TrainingOptions(**options)


@pytest.mark.parametrize("epochs", [1, 2])  # diverged when it is tested, and when it is trained
def test_a_classifier_that_diverges_is_an_error_that_names_the_rates(manifests: dict[str, Any], epochs: int) -> None:
    training = TrainingOptions(finetune=True, epochs=epochs, encoder_lr=1e12)
    options = ProbeOptions("pitch", head="attentive", training=training)
    with pytest.raises(ValueError, match="the loss is not finite: .* Lower --lr, or --encoder-lr"):
        probe(tiny_model(NO_DROPOUT), **manifests, options=options, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", "99999999999999999999999"], "--seed"),
        (["--layers", "-1"], "--layers -1: layers are numbered from 0"),
        (["--output", "{out}"], "results.json: would overwrite the input"),
    ],
)
def test_the_command_refuses_options_before_it_writes(
    manifests: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    train = tmp_path / "results.json"
    train.write_bytes(Path(manifests["train"]).read_bytes())
    command = ["probe", "no.nemo", "--train", str(train), "--test", manifests["test"], "--label", "pitch"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--output", str(tmp_path / "p"), *(text.format(out=tmp_path) for text in arguments)])
    assert ended.value.code != 0
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [train]


def test_the_command_prints_a_table_and_names_its_files(
    manifests: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny.nemo")
    command = ["probe", str(checkpoint), "--train", manifests["train"], "--test", manifests["test"], "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--label", "pitch", "--output", str(tmp_path / "out")])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "pitch: 2 classes, 24 training utterances, 12 test utterances" in out
    for words in ("encoder", "log_mel", "random_encoder", "results.json"):
        assert words in out
    with pytest.raises(SystemExit) as ended:
        main([*command, "--label", "one", "--output", str(tmp_path / "out2")])
    assert ended.value.code == 1
    assert "all utterances of the training set have the label 'same'" in capsys.readouterr().err
    assert not (tmp_path / "out2").exists()


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package that registers a task, as docs/extending.md describes it."""
    info = tmp_path / "my_probes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-probes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nest_ssl.plugins]\nmy_probes = my_probes\n")
    (tmp_path / "my_probes.py").write_text(
        "from nest_ssl.plugins import register_probe_task\n\n\n"
        "def is_high(utterance):\n"
        "    return utterance.extra['pitch'] == 'high'\n\n\n"
        "register_probe_task('is_high', is_high)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.load_entry_points.cache_clear()
    yield
    plugins.load_entry_points.cache_clear()
    sys.modules.pop("my_probes", None)


@pytest.mark.usefixtures("other_package")
def test_a_task_of_another_package_is_probed_by_its_name(
    manifests: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny.nemo")
    command = ["probe", str(checkpoint), "--train", manifests["train"], "--test", manifests["test"], "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--task", "is_high", "--output", str(tmp_path / "out")])
    assert ended.value.code == 0
    assert "is_high: 2 classes, 24 training utterances" in capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert content["classes"] == ["False", "True"]
    assert content["options"]["task"] == "is_high"
    by_label = probe(tiny_model(), **manifests, options=OPTIONS, device="cpu")
    assert content["log_mel"]["accuracy"] == by_label.scores["log_mel"].accuracy
    with pytest.raises(SystemExit):
        main([*command, "--task", "is_low", "--output", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert "--task is_low: no such task; registered: " in error
    assert "is_high" in error
