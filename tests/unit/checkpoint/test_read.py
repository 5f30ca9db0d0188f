from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from nest_ssl import CheckpointError, load
from nest_ssl.checkpoint.export import write_safetensors
from nest_ssl.checkpoint.read import checkpoint_path
from nest_ssl.nemo_file import nemo_config, write_nemo
from tests.helpers import model_section, noise_batch, tiny_model


def saved(path: Path, hyper_parameters: Any) -> Path:
    torch.save({"state_dict": tiny_model().state_dict(), "hyper_parameters": hyper_parameters, "epoch": 3}, path)
    return path


@pytest.mark.parametrize("kind", ["nemo", "plain", "dataclass"])
def test_a_training_checkpoint_is_loaded(tmp_path: Path, kind: str) -> None:
    section: Any = model_section()
    if kind == "nemo":
        section = {"cfg": OmegaConf.create(section)}  # NeMo's own .ckpt files hold omegaconf objects
    elif kind == "dataclass":
        section = {"cfg": dataclasses.asdict(tiny_model().cfg)}
    model = load(saved(tmp_path / "last.ckpt", section))
    batch = noise_batch([16_000])
    assert torch.equal(model(**batch)[0], tiny_model().eval()(**batch)[0])


def test_a_configuration_that_contains_itself_or_grows_without_limit_is_refused(tmp_path: Path) -> None:
    cyclic = model_section()
    cyclic["loop"] = cyclic
    laughs: list[Any] = ["x"]
    for _ in range(30):
        laughs = [laughs] * 10
    for section in (cyclic, model_section() | {"laughs": laughs}):
        with pytest.raises(CheckpointError, match=r"x\.ckpt: its configuration contains itself, or more than 100,000"):
            load(saved(tmp_path / "x.ckpt", section))


def test_code_in_a_training_checkpoint_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "evil.ckpt", {"cfg": Path("/")})
    with pytest.raises(CheckpointError, match=r"evil\.ckpt: not a readable training checkpoint") as error:
        load(path)
    assert "weights_only" not in str(error.value)  # torch would advise to trust it


def test_what_else_a_training_checkpoint_contains_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"state_dict": tiny_model().state_dict(), "callbacks": {"best": datetime.timedelta(1)}}, path)
    with pytest.raises(CheckpointError, match=r"more than tensors and plain values: datetime\.timedelta"):
        load(path)


def test_a_model_of_another_kind_is_named_by_its_class(tmp_path: Path) -> None:
    section = {"cfg": {**model_section(), "target": "nemo.collections.asr.models.ctc_bpe_models.EncDecCTCModelBPE"}}
    with pytest.raises(CheckpointError, match=r"x\.ckpt: contains a 'EncDecCTCModelBPE', not a NEST model"):
        load(saved(tmp_path / "x.ckpt", section))


def test_a_file_that_is_not_a_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"weights": 1}, path)
    with pytest.raises(CheckpointError, match="it has no state_dict"):
        load(path)
    path.write_bytes(b"not at all")
    with pytest.raises(CheckpointError, match="not a readable training checkpoint"):
        load(path)
    with pytest.raises(CheckpointError, match="has no model configuration"):
        load(saved(path, None))
    with pytest.raises(CheckpointError, match="has no model configuration"):
        load(saved(path, {"cfg": [1, 2]}))
    torch.save({"state_dict": [1], "hyper_parameters": model_section()}, path)
    with pytest.raises(CheckpointError, match="its state_dict is not a mapping"):
        load(path)
    with pytest.raises(CheckpointError, match="no such file"):
        load(tmp_path / "nothing.ckpt")


def test_a_file_trained_in_ways_only_nemo_knows_still_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    section = model_section() | {
        "nemo_version": "2.7.3",
        "train_ds": {"manifest_filepath": "a.json", "batch_duration": 360},
    }
    model = load(saved(tmp_path / "last.ckpt", {"cfg": section}))
    assert model.cfg.train_ds is None
    assert "model.train_ds in the file is ignored" in caplog.text
    assert "batch_duration" in caplog.text


def test_a_section_cut_out_of_its_file_still_resolves(tmp_path: Path) -> None:
    section = OmegaConf.create(model_section())
    section.encoder.feat_in = "${model.preprocessor.features}"
    assert load(saved(tmp_path / "last.ckpt", OmegaConf.create({"cfg": section}))).cfg.encoder.feat_in == 80
    section.encoder.feat_in = "${model.nowhere}"
    with pytest.raises(CheckpointError, match=r"configuration cannot be used: .*nowhere"):
        load(saved(tmp_path / "last.ckpt", {"cfg": section}))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache as the hub's library lays it out, with one model, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs nest-ssl[hf]")
    repo = tmp_path / "hub" / "models--someone--nest"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    tiny_model(seed=3).save_to(snapshot / "nest.nemo")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_model_on_the_hub_loads_by_its_name(cache: Path) -> None:
    model = load("someone/nest")
    assert model.state_dict()["encoder.layers.0.norm_out.weight"].shape == (32,)
    assert not model.training


def test_without_a_network_the_error_says_where_to_put_the_file(cache: Path) -> None:
    with pytest.raises(CheckpointError, match="someone/other: no such file, and it could not be downloaded") as raised:
        load("someone/other")
    assert "https://huggingface.co/someone/other/tree/main" in str(raised.value)
    assert str(cache / "models--someone--other") in str(raised.value)


@pytest.mark.parametrize("name", ["folder/model.nemo", "/a/b", "a/b/c", "./a/b", "run/last.ckpt", "plain"])
def test_what_looks_like_a_path_never_asks_the_hub(name: str) -> None:
    assert checkpoint_path(name) == Path(name)


def test_a_file_that_exists_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone").mkdir()
    (tmp_path / "someone" / "nest").write_bytes(b"")
    assert checkpoint_path("someone/nest") == Path("someone/nest")


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("encoder.layers.0.norm_out.weight", lambda x: x.double() + 1e300, "32 of 32 values are NaN or infinite"),
        ("encoder.layers.0.norm_out.weight", lambda x: x.to(torch.float8_e4m3fn), "float8_e4m3fn has too few digits"),
        ("encoder.layers.0.conv.batch_norm.running_var", lambda x: x - 2, "variances are negative"),
        ("encoder.layers.0.conv.batch_norm.num_batches_tracked", lambda x: x * float("nan"), "1 of 1 values are NaN"),
        ("quantizer.codebooks", lambda x: x * 0, "whole rows are 0"),
        ("quantizer.proj.weight", lambda x: x * 0, "whole rows are 0"),
        ("preprocessor.featurizer.fb", lambda x: x + 1, "not what the configuration gives: another .*lowfreq"),
        ("preprocessor.featurizer.window", lambda x: x * 0, "not what the configuration gives: another .*window"),
    ],
)
def test_weights_that_would_only_fail_in_use_are_refused(
    tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor], named: str
) -> None:
    weights = dict(tiny_model().state_dict())
    weights[name] = change(weights[name])
    torch.save({"state_dict": weights, "hyper_parameters": model_section()}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=rf"(?s)x\.ckpt: .*{name}.*{named}"):
        load(tmp_path / "x.ckpt")


def test_a_run_folder_points_to_its_newest_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"run: is a folder, not a file\. Give a \.nemo, \.ckpt or"):
        load(run)
    newest = saved(run / "checkpoints" / "last.ckpt", model_section())
    (run / "hparams.yaml").write_text("exp_manager: {checkpoint_callback_params: {dirpath: 5}}")  # damaged
    for folder in (run, run / "checkpoints"):
        with pytest.raises(CheckpointError, match=rf"{folder}: is a folder, not a file\. Give {newest}, the newest"):
            load(folder)


def test_an_unpacked_nemo_file_is_recognised(tmp_path: Path) -> None:
    tiny_model().save_to(tmp_path / "x.nemo")
    with tarfile.open(tmp_path / "x.nemo") as archive:
        archive.extractall(tmp_path / "x", filter="data")
    with pytest.raises(CheckpointError, match=r"x: is an unpacked \.nemo file\. Pack it again: tar -cf ") as error:
        load(tmp_path / "x")
    subprocess.run(shlex.split(str(error.value).partition("again: ")[2]), check=True)
    assert load(tmp_path / "x.nemo").cfg == tiny_model().cfg


def test_a_nemo_file_may_be_called_a_checkpoint(tmp_path: Path) -> None:
    tiny_model().save_to(tmp_path / "x.nemo")
    (tmp_path / "x.nemo").rename(tmp_path / "x.ckpt")
    assert load(tmp_path / "x.ckpt").cfg == tiny_model().cfg


def test_an_encoder_of_zeros_is_refused(tmp_path: Path) -> None:
    weights = tiny_model().state_dict()
    weights |= {name: value * 0 for name, value in weights.items() if name.startswith("encoder.")}
    torch.save({"state_dict": weights, "hyper_parameters": model_section()}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"x\.ckpt: .*\n  encoder: all weight matrices are 0"):
        load(tmp_path / "x.ckpt")


def test_a_checkpoint_that_lost_a_byte_is_damaged(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.ckpt", model_section())
    content = path.read_bytes()
    for place in (len(content) // 2, 1):
        path.write_bytes(content[:place] + content[place + 1 :])
        with pytest.raises(CheckpointError, match=r"x\.ckpt: is damaged"):
            load(path)


def test_names_that_cannot_be_files_are_refused_in_words() -> None:
    with pytest.raises(CheckpointError, match="the name of the model file is empty"):
        load("")
    with pytest.raises(ValueError, match=r"model file: s3://a/b\.nemo: nest-ssl reads local files only"):
        load("s3://a/b.nemo")
    with pytest.raises(CheckpointError, match=r"~nobody-here/x\.nemo: no such file"):
        load("~nobody-here/x.nemo")


def test_a_file_that_the_system_cannot_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "x.ckpt", model_section())
    monkeypatch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match=r"x\.ckpt: cannot be read: Input/output error"):
        load(path)


def test_a_key_that_occurs_twice_in_the_json_of_a_file_is_refused_by_name(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs nest-ssl[hf]")
    text = json.dumps(model_section()).replace('"d_model":', '"d_model": 64, "d_model":', 1)
    safetensors.save_file(dict(tiny_model().state_dict()), tmp_path / "x.safetensors", metadata={"model_config": text})
    with pytest.raises(CheckpointError, match=r"x\.safetensors: .*the key 'd_model' occurs twice"):
        load(tmp_path / "x.safetensors")


def test_a_model_with_two_sample_rates_is_refused(tmp_path: Path) -> None:
    section = model_section()
    section["sample_rate"] = 8000
    torch.save({"state_dict": tiny_model().state_dict(), "hyper_parameters": section}, tmp_path / "x.ckpt")
    with pytest.raises(
        CheckpointError, match=r"x\.ckpt: .*preprocessor\.sample_rate: 16000 Hz is not model\.sample_rate"
    ):
        load(tmp_path / "x.ckpt")


def test_weights_in_torchs_old_form_are_refused_because_they_have_no_checksum(tmp_path: Path) -> None:
    content = {"state_dict": tiny_model().state_dict(), "hyper_parameters": model_section()}
    torch.save(content, tmp_path / "x.ckpt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"x\.ckpt: is in torch's form from before version 1\.6.*save it again"):
        load(tmp_path / "x.ckpt")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.int8, torch.bool])
@pytest.mark.parametrize("suffix", [".nemo", ".ckpt", ".safetensors"])
def test_weights_that_cannot_be_right_are_refused_by_name(tmp_path: Path, suffix: str, value: Any) -> None:
    model, name = tiny_model(), "encoder.layers.0.norm_out.weight"
    path = tmp_path / f"x{suffix}"
    weights = dict(model.state_dict())
    weights[name] = weights[name].to(value) if isinstance(value, torch.dtype) else weights[name].clone().fill_(value)
    if suffix == ".nemo":
        write_nemo(path, nemo_config(model.cfg, type(model).__name__), weights)
    elif suffix == ".ckpt":
        torch.save({"state_dict": weights, "hyper_parameters": model_section()}, path)
    else:
        safetensors = pytest.importorskip("safetensors.torch", reason="needs nest-ssl[hf]")
        safetensors.save_file(weights, path, metadata={"model_config": json.dumps(model_section())})
    with pytest.raises(CheckpointError, match=rf"x{suffix}: 1 of .* cannot be used.*\n  {name}: "):
        load(path)


@pytest.mark.parametrize("suffix", [".nemo", ".ckpt", ".safetensors"])
def test_a_flipped_bit_is_noticed(tmp_path: Path, suffix: str) -> None:
    model, path = tiny_model(), tmp_path / f"x{suffix}"
    if suffix == ".nemo":
        model.save_to(path)
    elif suffix == ".ckpt":
        saved(path, model_section())
    else:
        pytest.importorskip("safetensors.torch", reason="needs nest-ssl[hf]")
        write_safetensors(model, path)
    load(path)
    data = bytearray(path.read_bytes())
    data[data.index(model.state_dict()["encoder.layers.0.norm_out.weight"].numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\..*: is damaged: .* fails its checksum"):
        load(path)


@pytest.mark.parametrize("suffix", [".ckpt", ".nemo-ckpt", ".safetensors"])
def test_a_configuration_in_a_file_reads_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    section = model_section() | {"name": "${oc.env:SECRET}"}
    path = tmp_path / f"x.{suffix.split('-')[-1].lstrip('.')}"
    if suffix == ".safetensors":
        safetensors = pytest.importorskip("safetensors.torch", reason="needs nest-ssl[hf]")
        weights = dict(tiny_model().state_dict())
        safetensors.save_file(weights, path, metadata={"model_config": json.dumps(section)})
    else:
        saved(path, {"cfg": OmegaConf.create(section)} if "nemo" in suffix else section)
    with pytest.raises(CheckpointError, match=r"its configuration calls a resolver, '\$\{oc\.env:\w+';") as error:
        load(path)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("suffix", [".nemo", ".ckpt", ".safetensors"])
@pytest.mark.parametrize("name", ["model.pt", "model.nemo", "model"])
def test_a_renamed_file_is_known_by_its_content(tmp_path: Path, suffix: str, name: str) -> None:
    model, path = tiny_model(), tmp_path / f"original{suffix}"
    if suffix == ".safetensors":
        pytest.importorskip("safetensors", reason="needs nest-ssl[hf]")
        write_safetensors(model, path)
    elif suffix == ".ckpt":
        config = nemo_config(model.cfg, type(model).__name__)
        torch.save({"state_dict": model.state_dict(), "hyper_parameters": {"cfg": config}}, path)
    else:
        model.save_to(path)
    assert load(path.rename(tmp_path / name)).state_dict().keys() == model.state_dict().keys()


def test_weights_in_bfloat16_are_not_mistaken_for_those_of_other_features(tmp_path: Path) -> None:
    model = tiny_model()
    weights = {k: v.bfloat16() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    write_nemo(tmp_path / "x.nemo", nemo_config(model.cfg, type(model).__name__), weights)
    assert torch.isfinite(load(tmp_path / "x.nemo").preprocessor.featurizer.fb).all()
