"""Checkpoints by their name on the hub, from a local cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from nest_ssl import CheckpointError, load
from nest_ssl.checkpoint.load import checkpoint_path
from tests.helpers import tiny_model

constants = pytest.importorskip("huggingface_hub.constants", reason="needs nest-ssl[hf]")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache as the hub's library keeps it, with one model, and no network."""
    repo = tmp_path / "hub" / "models--someone--nest"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    tiny_model(seed=3).save_to(snapshot / "nest.nemo")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_model_of_the_hub_loads_by_its_name(cache: Path) -> None:
    model = load("someone/nest")
    assert model.state_dict()["encoder.layers.0.norm_out.weight"].shape == (32,)
    assert not model.training


def test_without_a_network_the_error_says_where_to_put_the_file(cache: Path) -> None:
    with pytest.raises(CheckpointError, match="someone/other: no such file, and it could not be had") as raised:
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
