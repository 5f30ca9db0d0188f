"""Checkpoints in the formats of others: what loads there gives our numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nest_ssl import EncDecMaskedTokenPredModel, load
from nest_ssl.checkpoint.export import export_checkpoint
from nest_ssl.checkpoint.huggingface import inexpressible
from nest_ssl.extract import FeatureExtractor
from nest_ssl.nemo_file import CheckpointError
from tests.helpers import tiny_model
from tests.parity.cases import audio, fill_parameters

STYLES: dict[str, dict[str, Any]] = {
    "large": {},
    "xlarge": {"preprocessor.features": 128, "encoder.use_bias": False, "encoder.xscaling": False},
}


def checkpoint_of(overrides: dict[str, Any], path: Path) -> EncDecMaskedTokenPredModel:
    """A model whose every parameter and statistic is away from its default, saved and loaded."""
    model = tiny_model(overrides)
    fill_parameters(model.state_dict())
    model.save_to(path)
    return load(path)


def waveforms() -> list[torch.Tensor]:
    clean, _, lengths = audio()
    return [row[:length] for row, length in zip(clean, lengths.tolist(), strict=True)]


@pytest.fixture(params=list(STYLES))
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[EncDecMaskedTokenPredModel, Path]:
    pytest.importorskip("transformers", reason="needs nest-ssl[hf]")
    model = checkpoint_of(STYLES[request.param], tmp_path / "nest.nemo")
    export_checkpoint(tmp_path / "nest.nemo", tmp_path / "hf", "huggingface")
    return model, tmp_path / "hf"


def test_a_full_disk_is_named_and_leaves_no_half_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs nest-ssl[hf]")
    from safetensors import SafetensorError

    def fail(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    checkpoint_of({}, tmp_path / "nest.nemo")
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fail)
    with pytest.raises(OSError, match=r"/hf: cannot be written: I/O error: No space left on device"):
        export_checkpoint(tmp_path / "nest.nemo", tmp_path / "hf", "huggingface")
    assert [path.name for path in tmp_path.iterdir()] == ["nest.nemo"]


def test_auto_model_gives_our_hidden_states(exported: tuple[EncDecMaskedTokenPredModel, Path]) -> None:
    from transformers import AutoModel

    model, folder = exported
    encoder = AutoModel.from_pretrained(folder)
    assert type(encoder).__name__ == "ParakeetEncoder"
    samples = torch.nn.utils.rnn.pad_sequence(waveforms(), batch_first=True)
    mels, length = model.preprocessor(input_signal=samples, length=torch.tensor([len(w) for w in waveforms()]))
    mask = torch.arange(mels.shape[2]) < length[:, None]
    with torch.no_grad():
        out = encoder(input_features=mels.transpose(1, 2), attention_mask=mask, output_hidden_states=True)
    ours = FeatureExtractor(model, "all", device="cpu").batch(waveforms())
    assert out.attention_mask.sum(1).tolist() == [features.shape[2] for features in ours]
    for row, features in enumerate(ours):
        for theirs, layer in zip(out.hidden_states[1:], features, strict=True):
            torch.testing.assert_close(theirs[row, : features.shape[2]].T, layer, atol=1e-4, rtol=0)
        torch.testing.assert_close(out.last_hidden_state[row, : features.shape[2]].T, features[-1], atol=1e-4, rtol=0)


def test_the_ctc_model_has_our_encoder(exported: tuple[EncDecMaskedTokenPredModel, Path]) -> None:
    from transformers import AutoModel, ParakeetForCTC

    _, folder = exported
    ctc, encoder = ParakeetForCTC.from_pretrained(folder / "ctc"), AutoModel.from_pretrained(folder)
    weights = encoder.state_dict()
    assert ctc.encoder.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in ctc.encoder.state_dict().items())
    mels = torch.randn(2, 96, encoder.config.num_mel_bins)
    labels = torch.tensor([[1, 2, 3], [4, 5, ctc.config.pad_token_id]])
    loss = ctc(input_features=mels, attention_mask=torch.ones(2, 96, dtype=torch.bool), labels=labels).loss
    assert torch.isfinite(loss)
    export_checkpoint(folder.parent / "nest.nemo", folder.parent / "again", "huggingface")
    again = ParakeetForCTC.from_pretrained(folder.parent / "again" / "ctc").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in ctc.state_dict().items())  # its random head too


def test_the_feature_extractor_gives_our_mels(exported: tuple[EncDecMaskedTokenPredModel, Path]) -> None:
    pytest.importorskip("librosa", reason="ParakeetFeatureExtractor needs it")
    from transformers import AutoFeatureExtractor

    model, folder = exported
    extractor = AutoFeatureExtractor.from_pretrained(folder)
    inputs = extractor([w.numpy() for w in waveforms()], sampling_rate=16_000, return_tensors="pt")
    samples = torch.nn.utils.rnn.pad_sequence(waveforms(), batch_first=True)
    mels, length = model.preprocessor(input_signal=samples, length=torch.tensor([len(w) for w in waveforms()]))
    assert inputs.attention_mask.sum(1).tolist() == length.tolist()
    num_frames = inputs.input_features.shape[1]
    torch.testing.assert_close(inputs.input_features, mels[:, :, :num_frames].transpose(1, 2), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"encoder.conv_norm_type": "layer_norm"}, "encoder.conv_norm_type is layer_norm"),
        ({"encoder.att_context_size": [16, 4]}, "encoder.att_context_size is [16, 4]"),
        ({"encoder.subsampling": "striding"}, "encoder.subsampling is striding"),
        ({"encoder.causal_downsampling": True}, "encoder.causal_downsampling is True"),
        ({"encoder.self_attention_model": "abs_pos"}, "encoder.self_attention_model is abs_pos"),
        ({"encoder.conv_context_size": "causal"}, "encoder.conv_context_size is causal"),
        ({"encoder.feat_out": 24, "decoder.feat_in": 24}, "encoder.feat_out is 24"),
        ({"preprocessor.features": 84}, "encoder.feat_in is 84"),
        ({"preprocessor.window": "hamming"}, "preprocessor.window is hamming"),
        ({"preprocessor.normalize": "all_features"}, "preprocessor.normalize is all_features"),
        ({"preprocessor.highfreq": 7000.0}, "preprocessor.highfreq is 7000.0"),
    ],
)
def test_what_parakeet_cannot_express_is_refused_by_name(overrides: dict[str, Any], key: str) -> None:
    (problem,) = inexpressible(tiny_model(overrides))
    assert f"model.{key}; it allows only " in problem


def test_a_refused_export_writes_nothing(tmp_path: Path) -> None:
    tiny_model({"encoder.conv_norm_type": "layer_norm"}).save_to(tmp_path / "nest.nemo")
    with pytest.raises(ValueError, match="cannot express this model:\n  model.encoder.conv_norm_type is layer_norm"):
        export_checkpoint(tmp_path / "nest.nemo", tmp_path / "hf", "huggingface")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    "overrides",
    [{"encoder.untie_biases": False}, {"mask_position": "post_conv"}, {"encoder.subsampling_factor": 4}],
    ids=["tied_biases", "post_conv", "factor_4"],
)
def test_what_parakeet_can_express_otherwise_is_exported(overrides: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs nest-ssl[hf]")
    from transformers import AutoModel

    if "encoder.subsampling_factor" in overrides:
        overrides = {**overrides, "quantizer.combine_time_steps": 4, "loss.combine_time_steps": 4}
    model = checkpoint_of(overrides, tmp_path / "nest.nemo")
    export_checkpoint(tmp_path / "nest.nemo", tmp_path / "hf", "huggingface")
    mels = torch.randn(1, 80, 100)
    with torch.no_grad():
        theirs = AutoModel.from_pretrained(tmp_path / "hf")(input_features=mels.transpose(1, 2)).last_hidden_state
        ours = model.encoder(audio_signal=mels, length=torch.tensor([100]))[0]
    torch.testing.assert_close(theirs.transpose(1, 2), ours, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["nemo", "safetensors"])
def test_nemo_and_safetensors_files_contain_the_whole_model(kind: str, tmp_path: Path) -> None:
    overrides = {"mask_position": "post_conv", "encoder.untie_biases": False}
    model = checkpoint_of(overrides, tmp_path / "nest.nemo")
    export_checkpoint(tmp_path / "nest.nemo", tmp_path / f"out.{kind}", kind)
    again = load(tmp_path / f"out.{kind}")
    assert again.cfg == model.cfg
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())


def test_safetensors_of_others_are_refused(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs nest-ssl[hf]")
    safetensors.save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="contains weights but no NEST configuration"):
        load(tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(CheckpointError, match="not a readable .safetensors file"):
        load(tmp_path / "broken.safetensors")


def test_onnx_gives_our_encoder_for_any_batch_and_length(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs nest-ssl[onnx]")
    pytest.importorskip("onnxscript", reason="needs nest-ssl[onnx]")
    model = checkpoint_of({"encoder.n_layers": 1}, tmp_path / "nest.nemo")
    ((path, words),) = export_checkpoint(tmp_path / "nest.nemo", tmp_path / "out" / "nest.onnx", "onnx").files
    assert "largest difference in onnxruntime" in words
    session = onnxruntime.InferenceSession(str(path))
    for lengths in ([5], [8, 3], [333, 120, 1], [1000, 999]):
        mels = torch.randn(len(lengths), model.cfg.encoder.feat_in, max(lengths))
        length = torch.tensor(lengths)
        with torch.no_grad():
            ours, ours_len = model.encoder(audio_signal=mels, length=length)
        theirs, theirs_len = session.run(None, {"audio_signal": mels.numpy(), "length": length.numpy()})
        assert theirs_len.tolist() == ours_len.tolist()
        for row, frames in enumerate(ours_len.tolist()):
            np.testing.assert_allclose(theirs[row, :, :frames], ours[row, :, :frames].numpy(), atol=1e-4)


def test_onnxruntime_reports_nothing_to_its_makers(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs nest-ssl[onnx]")
    onnx = pytest.importorskip("onnx")
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([], "nothing", [value], [value])
    onnx.save(
        onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 18)]),
        tmp_path / "x.onnx",
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = (
        "from nest_ssl.checkpoint.onnx_file import _need_onnx; _need_onnx(); import onnxruntime; "
        f"onnxruntime.InferenceSession({str(tmp_path / 'x.onnx')!r}, providers=['CPUExecutionProvider'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    subprocess.run([sys.executable, "-c", script], check=True, env={**environment, "TMPDIR": str(temporary)})
    assert not list(temporary.iterdir())


def test_a_graph_whose_outputs_are_not_finite_is_not_written(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs nest-ssl[onnx]")
    model = tiny_model({"encoder.n_layers": 1})
    weights = model.state_dict()
    weights["encoder.layers.0.feed_forward1.linear1.weight"].fill_(1e38)  # finite, and every sum of it overflows
    model.save_to(tmp_path / "nest.nemo")
    with pytest.raises(CheckpointError, match=r"nest\.onnx: not written: the model's outputs are not finite"):
        export_checkpoint(tmp_path / "nest.nemo", tmp_path / "nest.onnx", "onnx")
    assert not (tmp_path / "nest.onnx").exists()


@pytest.mark.parametrize(
    ("output", "kind", "words"),
    [
        ("out.bin", "onnx", "the file name must end in .onnx for onnx"),
        (".", "nemo", "is a folder; give a file such as .*nest.nemo"),
        ("nest.nemo", "huggingface", "is a file; huggingface needs a folder"),
        (".", "huggingface", "is a folder with other files. Give a new folder"),
        ("nest.nemo/out.nemo", "nemo", r"nest\.nemo: is not a folder\. Give another output folder"),
        ("out", "tensorflow", "'tensorflow' is not one of huggingface, nemo, safetensors, onnx"),
    ],
)
def test_outputs_of_the_wrong_kind_are_refused(output: str, kind: str, words: str, tmp_path: Path) -> None:
    tiny_model().save_to(tmp_path / "nest.nemo")
    with pytest.raises(ValueError, match=words):
        export_checkpoint(tmp_path / "nest.nemo", tmp_path / output, kind)


def test_the_feature_extractors_settings_are_plain_json(exported: tuple[EncDecMaskedTokenPredModel, Path]) -> None:
    model, folder = exported
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    assert settings["feature_size"] == model.cfg.preprocessor.features
    assert (settings["hop_length"], settings["win_length"], settings["n_fft"]) == (160, 400, 512)
