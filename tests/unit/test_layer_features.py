"""Features of layers in Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import soundfile
import torch

from nest_ssl.extract import FeatureExtractor
from nest_ssl.layer_features import layer_outputs, parse_layers
from tests.helpers import noise_batch, tiny_model
from tests.unit.probe.speech_like import RATE, tone, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny.nemo")


def test_a_file_gives_layers_by_width_by_frames_in_two_lines(checkpoint: Path, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "speech.wav", tone(1.7, 120, 0), RATE)
    features = FeatureExtractor(checkpoint, layers="all")(tmp_path / "speech.wav")
    assert features.shape == (2, 32, 22)
    assert features.dtype == torch.float32


def test_the_last_layer_is_the_encoders_output(checkpoint: Path) -> None:
    extractor = FeatureExtractor(checkpoint, "last", device="cpu")
    batch = noise_batch([20_000])
    mels, length = extractor.model.preprocessor(input_signal=batch["input_signal"], length=torch.tensor([20_000]))
    encoded, num_frames = extractor.model.encoder(audio_signal=mels, length=length)
    features = extractor(batch["input_signal"][0])
    torch.testing.assert_close(features[0], encoded[0, :, : int(num_frames)], atol=1e-6, rtol=0)


def test_a_projected_encoder_projects_every_layer() -> None:
    model = tiny_model({"encoder.feat_out": 24, "decoder.feat_in": 24})
    features = FeatureExtractor(model, "all", device="cpu")(tone(1.0, 120, 0))
    assert features.shape[:2] == (2, 24)


def test_features_do_not_depend_on_the_batch(checkpoint: Path) -> None:
    extractor = FeatureExtractor(checkpoint, "all", device="cpu")
    waveforms = [tone(duration_s, 110, seed) for seed, duration_s in enumerate((3.1, 0.9, 2.0, 0.3))]
    for alone, together in zip(map(extractor, waveforms), extractor.batch(waveforms), strict=True):
        torch.testing.assert_close(alone, together, atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm", ["instance_norm", "group_norm4", "layer_norm"])
def test_features_do_not_depend_on_the_batch_whatever_the_norm(norm: str) -> None:
    extractor = FeatureExtractor(tiny_model({"encoder.conv_norm_type": norm}), "all", device="cpu")
    waveforms = [tone(duration_s, 110, seed) for seed, duration_s in enumerate((1.1, 0.9, 1.1, 0.3))]
    for alone, together in zip(map(extractor, waveforms), extractor.batch(waveforms), strict=True):
        torch.testing.assert_close(alone, together, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_features_of_the_cpu(checkpoint: Path) -> None:
    waveforms = [tone(duration_s, 110, seed) for seed, duration_s in enumerate((3.1, 0.9, 2.0))]
    here, there = (FeatureExtractor(checkpoint, device=device, precision="fp32") for device in ("cpu", "cuda"))
    for pin in (False, True):
        for ours, theirs in zip(here.batch(waveforms), there.batch(waveforms, pin=pin), strict=True):
            assert theirs.device.type == "cpu"
            assert theirs.is_contiguous()
            assert theirs.is_pinned() == pin
            torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


def test_layers_above_the_highest_one_are_not_computed() -> None:
    model = tiny_model().eval()
    ran = []
    model.encoder.layers[1].register_forward_hook(lambda *_: ran.append(1))
    layer_outputs(model.encoder, torch.randn(1, 80, 64), torch.tensor([64]), [0])
    assert ran == []
    assert len(model.encoder.layers) == 2  # the encoder itself is whole


def test_layers_of_a_model_in_training_are_seen() -> None:
    model = tiny_model({"compile": "on"}).train()
    outputs, _ = layer_outputs(model.encoder, torch.randn(2, 80, 64), torch.tensor([64, 50]), [0, 1])
    assert [tuple(x_BDS.shape) for x_BDS in outputs] == [(2, 32, 8)] * 2


def test_a_model_in_training_is_left_in_training() -> None:
    model = tiny_model().train()
    extractor = FeatureExtractor(model, device="cpu")
    waveform = tone(1.0, 120, 0)
    assert torch.equal(extractor(waveform), extractor(waveform))  # no dropout
    assert model.training


@pytest.mark.parametrize(
    ("aggregation", "shape"), [("cat", (64, 13)), ("sum", (32, 13)), ("mean", (32, 13)), ("weighted", (32, 13))]
)
def test_aggregations_make_one_of_the_layers(checkpoint: Path, aggregation: str, shape: tuple[int, int]) -> None:
    waveform = tone(1.0, 120, 0)
    layers = FeatureExtractor(checkpoint, device="cpu")(waveform)
    weights = [0.2, 0.8] if aggregation == "weighted" else None
    features = FeatureExtractor(checkpoint, "all", aggregation, weights, device="cpu")(waveform)
    expected = {
        "cat": layers.flatten(0, 1),
        "sum": layers.sum(0),
        "mean": layers.mean(0),
        "weighted": 0.2 * layers[0] + 0.8 * layers[1],
    }[aggregation]
    assert features.shape == shape
    torch.testing.assert_close(features, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("given", "numbers"), [("all", [0, 1, 2]), ("last", [2]), ("0,2", [0, 2]), (-1, [2]), ([1, 0], [1, 0])]
)
def test_layers_are_named_as_nemo_numbers_them(given: str | int | list[int], numbers: list[int]) -> None:
    assert parse_layers(given, 3) == numbers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": "5"}, "there is no layer 5; the encoder has layers 0 to 1"),
        ({"layers": "first"}, "'first' is not 'all', 'last' or numbers"),
        ({"layers": "1,1"}, "names a layer twice"),
        ({"layers": []}, "names no layer"),
        ({"aggregation": "max"}, "'max' is not one of none, cat"),
        ({"weights": [1.0, 2.0]}, "the aggregation is 'none'; use 'weighted'"),
        ({"aggregation": "weighted", "weights": [1.0]}, "1 values for 2 layers"),
        ({"precision": "fp8"}, "'fp8' is not one of auto"),
        ({"device": "x"}, "device: 'x' is not one of cpu"),
        ({"device": "cuda:99"}, "device: 'cuda:99' is not one of cpu"),
        ({"device": "meta"}, "device: 'meta' is not one of cpu"),
    ],
)
def test_arguments_that_make_no_sense_are_one_clear_line(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FeatureExtractor(tiny_model(), **options)  # type: ignore[arg-type]


def test_an_empty_waveform_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(0,\); expected \(samples,\)"):
        FeatureExtractor(tiny_model(), device="cpu")(torch.zeros(0))
