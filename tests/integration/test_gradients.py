"""Two ranks with half the batch each take the step that one rank takes."""

from __future__ import annotations

from pathlib import Path

import torch

from nest_ssl import load
from tests.integration.runs import arguments, run

# Options under which an utterance gives the same result on any rank: the first 8 frames are masked (the blocks are
# longer than the utterances), normalisation is per frame, there is no dropout and no noise.
ALIKE = [
    "trainer.max_steps=1",
    "~model.validation_ds",
    "~model.train_ds.batch_augmentor",
    "model.train_ds.noise_manifest=null",
    "model.train_ds.shuffle=false",
    "model.masking.block_size=1000",
    "model.encoder.conv_norm_type=layer_norm",
    "model.preprocessor.dither=0",
    *(f"model.encoder.{name}=0" for name in ("dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att")),
    "model.optim.name=sgd",
    "~model.optim.betas",
    "model.optim.weight_decay=0",
    "model.optim.lr=1",
    "~model.optim.sched",
]


def test_two_ranks_with_half_the_batch_each_give_the_gradient_of_one(corpus: Path, tmp_path: Path) -> None:
    runs = {
        "start": ["model.optim.lr=0", "model.train_ds.batch_size=8"],
        "one": ["model.train_ds.batch_size=8"],
        "two": ["model.train_ds.batch_size=4", "trainer.devices=2", "trainer.strategy=ddp"],
    }
    weights = {}
    for name, more in runs.items():
        done = run(arguments(corpus, tmp_path, name, *ALIKE, *more))
        assert done.returncode == 0, done.stderr[-3000:]
        weights[name] = load(tmp_path / name / "checkpoints" / f"{name}.nemo").state_dict()
    largest = 0.0
    for name, before in weights["start"].items():
        one, two = before - weights["one"][name], before - weights["two"][name]
        torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-6)
        largest = max(largest, float(one.abs().max()))
    assert largest > 1e-3  # there was a gradient
