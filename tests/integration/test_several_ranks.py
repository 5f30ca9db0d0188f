"""What several ranks add to a run of the program. tests/unit/training/test_parallel.py has the numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nest_ssl import load
from nest_ssl.training.loop import Loop
from nest_ssl.training.state import restore
from tests.integration.runs import arguments, losses, run, run_here

TWO = ("trainer.devices=2", "trainer.strategy=ddp", "trainer.max_steps=3", "~model.validation_ds")


def test_batch_statistics_are_shared_between_cpu_ranks_on_request(corpus: Path, tmp_path: Path) -> None:
    for name, option in (("own", "false"), ("shared", "true")):
        done = run(arguments(corpus, tmp_path, name, *TWO, f"trainer.sync_batchnorm={option}"))
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stderr.count("trainer.sync_batchnorm: all ranks meet twice") == (name == "shared")
    own, shared = (losses(tmp_path / name / "metrics.csv") for name in ("own", "shared"))
    assert own.keys() == shared.keys() == {0, 1, 2}
    assert own != shared


def test_sharded_ranks_train_save_and_resume_like_whole_ones(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """FSDP2 over gloo, validated with the average. The checkpoint is a folder until one rank takes over."""
    two = ("trainer.devices=2", "trainer.max_steps=3", "exp_manager.ema.enable=true", "exp_manager.ema.decay=0.5")
    for name, strategy in (("sharded", "fsdp"), ("whole", "ddp")):
        done = run(arguments(corpus, tmp_path, name, *two, f"trainer.strategy={strategy}"))
        assert done.returncode == 0, done.stderr[-3000:]
    for column, steps in (("train_loss", {0, 1, 2}), ("val_loss", {2})):
        sharded, whole = (losses(tmp_path / name / "metrics.csv", column) for name in ("sharded", "whole"))
        assert sharded.keys() == whole.keys() == steps
        for step, value in whole.items():
            assert abs(float(sharded[step]) - float(value)) < 1e-3
    saved = [tmp_path / name / "checkpoints" / "last.ckpt" for name in ("sharded", "whole")]
    assert [path.is_dir() for path in saved] == [True, False]
    assert load(saved[0]).state_dict().keys() == load(saved[1]).state_dict().keys()
    run_here(arguments(corpus, tmp_path, "sharded", "trainer.max_steps=7", "~model.validation_ds"))
    assert "resumed on 1 rank (was 2)" in caplog.text
    assert saved[0].is_file()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc of Linux")
def test_ranks_of_a_node_share_the_memory_of_the_checkpoint_until_they_have_copied_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is mapped: the pages belong to the file, however many ranks read them."""
    args = arguments(corpus, tmp_path, "run", "~model.validation_ds", "exp_manager.ema.enable=true")
    last = run_here([*args, "trainer.max_steps=2"]) / "checkpoints" / "last.ckpt"
    mapped: list[bool] = []

    def look(function: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*given: Any) -> Any:
            mapped.append(f"{last}\n" in Path("/proc/self/maps").read_text())
            return function(*given)

        return looked

    monkeypatch.setattr("nest_ssl.training.trainer.restore", look(restore))
    monkeypatch.setattr(Loop, "run", look(Loop.run))
    run_here([*args, "trainer.max_steps=3"])
    assert mapped == [True, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_sharded_ranks_on_a_gpu_run_fused_layers_with_the_losses_of_plain_ones(corpus: Path, tmp_path: Path) -> None:
    """FSDP2 over NCCL, ranks sharing the GPU; dropout 0, so that both forms draw the same numbers."""
    off = [f"model.encoder.{name}=0" for name in ("dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att")]
    options = ("trainer.strategy=fsdp", "trainer.devices=2", "trainer.accelerator=gpu", "debug.share_gpu=true", *off)
    for compile in ("auto", "off"):
        more = (f"model.compile={compile}", "trainer.max_steps=3", "exp_manager.ema.enable=true")
        done = run(arguments(corpus, tmp_path, compile, *options, *more, "model.preprocessor.dither=0"))
        assert done.returncode == 0, done.stderr[-3000:]
        assert ("fused layers, no CUDA graphs: the weights are sharded" in done.stderr) == (compile == "auto")
    for column in ("train_loss", "val_loss"):
        fused, plain = (losses(tmp_path / name / "metrics.csv", column) for name in ("auto", "off"))
        assert fused.keys() == plain.keys() != set()
        for step, value in plain.items():
            assert abs(float(fused[step]) - float(value)) < 2e-2, (column, step)
    assert load(tmp_path / "auto" / "checkpoints" / "last.ckpt").encoder.n_layers == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_more_ranks_than_gpus_share_them_only_with_the_switch(corpus: Path, tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    options = (*TWO, f"trainer.devices={2 * count}", "trainer.accelerator=gpu", "trainer.precision=bf16")
    done = run(arguments(corpus, tmp_path, "refused", *options))
    assert done.returncode == 1
    assert f"trainer.devices={2 * count}: " in done.stderr
    assert "debug.share_gpu=true" in done.stderr
    assert not (tmp_path / "refused").exists()
    done = run(arguments(corpus, tmp_path, "shared", *options, "model.train_ds.batch_size=2", "debug.share_gpu=true"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "debug.share_gpu: ranks share GPUs" in done.stderr
    assert losses(tmp_path / "shared" / "metrics.csv").keys() == {0, 1, 2}
