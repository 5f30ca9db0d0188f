"""Starting weights: what is loaded, what is not, and what the log says about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nest_ssl import CheckpointError, EncDecDenoiseMaskedTokenPredModel, load
from nest_ssl.checkpoint.initialize import describe, maybe_init_from_pretrained_checkpoint
from nest_ssl.config import NestConfig
from tests.helpers import model_section, tiny_model

SOURCE_SEED, OWN_SEED = 1, 2


def init(model: EncDecDenoiseMaskedTokenPredModel, **keys: Any) -> list[Any]:
    return maybe_init_from_pretrained_checkpoint(model, NestConfig(model=model.cfg, **keys))


@pytest.fixture
def nemo(tmp_path: Path) -> Path:
    path = tmp_path / "source.nemo"
    tiny_model(seed=SOURCE_SEED).save_to(path)
    return path


def same(model: EncDecDenoiseMaskedTokenPredModel, seed: int) -> set[str]:
    """Names of the tensors that are those of the tiny model with this seed."""
    other = tiny_model(seed=seed).state_dict()
    return {name for name, value in model.state_dict().items() if torch.equal(value, other[name])}


def test_all_weights_of_a_nemo_file(nemo: Path) -> None:
    model = tiny_model(seed=OWN_SEED)
    (result,) = init(model, init_from_nemo_model=str(nemo))
    assert same(model, SOURCE_SEED) == set(model.state_dict())
    assert len(result.loaded) == len(model.state_dict())


def test_all_weights_of_a_training_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": tiny_model(seed=SOURCE_SEED).state_dict(), "hyper_parameters": model_section()}, path)
    model = tiny_model(seed=OWN_SEED)
    init(model, init_from_ptl_ckpt=str(path))
    assert same(model, SOURCE_SEED) == set(model.state_dict())


def test_a_checkpoint_of_only_weights_is_enough_to_start_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "weights.ckpt"
    torch.save({"state_dict": tiny_model(seed=SOURCE_SEED).state_dict()}, path)
    model = tiny_model(seed=OWN_SEED)
    init(model, init_from_ptl_ckpt=str(path))
    assert same(model, SOURCE_SEED) == set(model.state_dict())
    assert "Hz" not in caplog.text  # nothing is known of the audio
    with pytest.raises(CheckpointError, match=r"weights\.ckpt: has no model configuration under hyper_parameters"):
        load(path)


def test_a_part_of_a_name_that_no_weight_has_is_a_warning(nemo: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"path": str(nemo), "include": ["encoder", "decodr"]}
    init(tiny_model(), init_from_nemo_model={"first": options})
    assert f"init_from_nemo_model: no weight of {nemo} has 'decodr' in its name" in caplog.text


def test_include_and_exclude_choose_by_parts_of_names(nemo: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(seed=OWN_SEED)
    options = {"path": str(nemo), "include": ["encoder"], "exclude": ["layers.1."]}
    (result,) = init(model, init_from_nemo_model={"first": options})
    assert not caplog.text
    names = {name for name in model.state_dict() if "encoder" in name and "layers.1." not in name}
    assert set(result.loaded) == names
    assert names <= same(model, SOURCE_SEED)
    others = {name for name in model.state_dict() if "decoder" in name or "encoder.layers.1." in name}
    fixed = same(tiny_model(seed=SOURCE_SEED), OWN_SEED)  # zeros and ones of norms are the same for every seed
    assert others - fixed <= same(model, OWN_SEED)
    assert "left out by include/exclude: " in describe(result)


def test_several_sources_each_give_their_part(nemo: Path, tmp_path: Path) -> None:
    tiny_model(seed=3).save_to(tmp_path / "third.nemo")
    model = tiny_model(seed=OWN_SEED)
    sources = {
        "a": {"path": str(nemo), "include": ["encoder"]},
        "b": {"path": str(tmp_path / "third.nemo"), "include": ["decoder"]},
    }
    assert len(init(model, init_from_nemo_model=sources)) == 2
    assert {name for name in model.state_dict() if "encoder" in name} <= same(model, SOURCE_SEED)
    assert {name for name in model.state_dict() if "decoder" in name} <= same(model, 3)


def test_other_shapes_and_missing_weights_are_listed(nemo: Path) -> None:
    torch.manual_seed(0)
    model = EncDecDenoiseMaskedTokenPredModel(model_section({"num_classes": 32, "encoder.n_layers": 3}))
    (result,) = init(model, init_from_nemo_model=str(nemo))
    assert "decoder.decoder_layers.0.bias" in "".join(result.other_shape) or result.other_shape
    assert any("encoder.layers.2." in name for name in result.not_in_source)
    text = describe(result)
    assert "of a different shape, left unchanged: " in text
    assert "missing in the file, left unchanged: " in text


def test_a_model_on_the_hub_is_found_in_its_local_cache(
    nemo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs nest-ssl[hf]")
    repo = tmp_path / "hub" / "models--someone--nest"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    (snapshot / "nest.nemo").write_bytes(nemo.read_bytes())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tiny_model(seed=OWN_SEED)
    (result,) = init(model, init_from_pretrained_model="someone/nest")
    assert same(model, SOURCE_SEED) == set(model.state_dict())
    assert result.source.endswith("nest.nemo")
    with pytest.raises(CheckpointError, match="someone/other: .*could not be downloaded from the hub .* give the path"):
        init(model, init_from_pretrained_model="someone/other")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"init_from_nemo_model": "/nowhere.nemo"}, "init_from_nemo_model: /nowhere.nemo: no such file"),
        ({"init_from_pretrained_model": "tests"}, "init_from_pretrained_model: tests: is a folder, not a"),
        ({"init_from_nemo_model": ""}, "init_from_nemo_model: the name of the model file is empty"),
        ({"init_from_nemo_model": "s3://a/b.nemo"}, "init_from_nemo_model: model file: s3://a/b.nemo: nest-ssl reads"),
        ({"init_from_ptl_ckpt": "/nowhere.ckpt"}, "/nowhere.ckpt: no such file"),
        ({"init_from_nemo_model": "a", "init_from_ptl_ckpt": "b"}, "use only one of them"),
        ({"init_from_nemo_model": {"a": {"include": ["x"]}}}, "init_from_nemo_model.a: expected a mapping with 'path'"),
        ({"init_from_nemo_model": {"a": "x.nemo"}}, "init_from_nemo_model.a: expected a mapping"),
        (
            {"init_from_nemo_model": {"a": {"path": "x", "inclde": ["encoder"]}}},
            "there is no 'inclde'. Known",
        ),
    ],
)
def test_a_key_that_makes_no_sense_is_one_clear_line(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        init(tiny_model(), **keys)


def test_include_must_be_names(nemo: Path) -> None:
    with pytest.raises(ValueError, match="init_from_nemo_model: include: 3 is not a list of names"):
        init(tiny_model(), init_from_nemo_model={"a": {"path": str(nemo), "include": 3}})


def test_features_stay_those_of_the_configuration_and_another_rate_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {**tiny_model(seed=SOURCE_SEED).state_dict()}
    own = weights["preprocessor.featurizer.fb"]
    weights["preprocessor.featurizer.fb"] = own + 1
    section = model_section()
    section["sample_rate"] = section["preprocessor"]["sample_rate"] = 8000
    torch.save({"state_dict": weights, "hyper_parameters": section}, tmp_path / "x.ckpt")
    model = tiny_model(seed=OWN_SEED)
    init(model, init_from_ptl_ckpt=str(tmp_path / "x.ckpt"))
    assert "were trained on audio of 8000 Hz; model.sample_rate is 16000" in caplog.text
    assert torch.equal(model.state_dict()["preprocessor.featurizer.fb"], own)


def test_nothing_that_fits_is_an_error(nemo: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing in .* with include \['no_such_part'\] .* fits the model"):
        init(tiny_model(), init_from_nemo_model={"a": {"path": str(nemo), "include": ["no_such_part"]}})


@pytest.mark.parametrize("change", [{"encoder.d_model": 64}, {"encoder.ff_expansion_factor": 8}])
def test_an_encoder_of_another_width_is_refused_unless_it_is_left_out(nemo: Path, change: dict[str, Any]) -> None:
    model = EncDecDenoiseMaskedTokenPredModel(model_section(change))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"init_from_nemo_model: .*source\.nemo: most of its encoder .*exclude:"):
        init(model, init_from_nemo_model=str(nemo))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    options = {"path": str(nemo), "exclude": ["encoder.layers", "encoder.pre_encode.out"]}
    (result,) = init(model, init_from_nemo_model={"a": options})
    assert any(name.startswith("encoder.pre_encode.conv") for name in result.loaded)
