"""NeMo's `restore_from` reads what we save, and computes the same."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import NO_DROPOUT, noise_batch, tiny_model

NEMO_PYTHON = os.environ.get("NEST_SSL_NEMO_PYTHON", "")

VARIANTS: dict[str, dict[str, Any]] = {
    "pre_conv": {},
    "books": {"num_books": 4},
    "post_conv": {"mask_position": "post_conv"},
    "streaming": {
        "encoder.causal_downsampling": True,
        "encoder.conv_context_size": "causal",
        "encoder.conv_norm_type": "layer_norm",
        "encoder.att_context_style": "chunked_limited",
        "encoder.att_context_size": [14, 6],
    },
    "tied": {"encoder.untie_biases": False, "squeeze_single": True},
}

PROGRAM = """
import sys, numpy, torch
from nemo.collections.asr.models.ssl_models import EncDecDenoiseMaskedTokenPredModel as Model
folder = sys.argv[1]
batch = numpy.load(folder + "/batch.npz")
audio, noisy, length = (torch.from_numpy(batch[k]) for k in ("audio", "noisy", "length"))
for name in sys.argv[2:]:
    model = Model.restore_from(f"{folder}/{name}.nemo", map_location="cpu").eval()
    with torch.no_grad():
        mels, mel_len = model.preprocessor(input_signal=noisy, length=length)
        encoded, _ = model.encoder(audio_signal=mels, length=mel_len)
        log_probs = model.decoder(encoder_output=encoded)
    numpy.savez(f"{folder}/{name}.npz", encoded=encoded, log_probs=log_probs,
                block=model.mask_processor.block_size, codes=model.quantizer.codebooks.detach())
"""


@pytest.mark.nemo
@pytest.mark.skipif(not NEMO_PYTHON, reason="NEST_SSL_NEMO_PYTHON names no interpreter with nemo_toolkit[asr]==2.7.3")
def test_nemo_restores_our_files_and_computes_the_same(tmp_path: Path) -> None:
    batch = noise_batch([24_000, 17_000])
    audio, noisy = batch["input_signal"], batch["noisy_input_signal"]
    np.savez(tmp_path / "batch.npz", audio=audio, noisy=noisy, length=batch["input_signal_length"])
    models = {name: tiny_model({**NO_DROPOUT, **overrides}).eval() for name, overrides in VARIANTS.items()}
    for name, model in models.items():
        model.save_to(tmp_path / f"{name}.nemo")
    done = subprocess.run(
        [NEMO_PYTHON, "-c", PROGRAM, str(tmp_path), *models], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, model in models.items():
        nemo = np.load(tmp_path / f"{name}.npz")
        with torch.no_grad():
            mels, mel_len = model.preprocessor(input_signal=noisy, length=batch["input_signal_length"])
            encoded, _ = model.encoder(audio_signal=mels, length=mel_len)
        np.testing.assert_allclose(encoded.numpy(), nemo["encoded"], atol=1e-4, err_msg=name)
        np.testing.assert_allclose(model(**batch)[0].detach().numpy(), nemo["log_probs"], atol=1e-4, err_msg=name)
        assert int(nemo["block"]) == model.mask_processor.cfg.block_size
        assert np.array_equal(nemo["codes"], model.quantizer.codebooks.detach().numpy())
