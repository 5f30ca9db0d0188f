"""Let NeMo compute the curves and mels of curve_cases.py and write them next to this file.

    PYTHON_WITH_NEMO tests/parity/record_nemo_curves.py

Needs nemo_toolkit[asr]==2.7.3 in an environment of its own. Model, optimizer, schedule and preprocessor are NeMo's;
only the masks are given, as in record_nemo_training.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")  # as in tests/conftest.py
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import numpy as np
import torch
from nemo.collections.asr.models.ssl_models import EncDecDenoiseMaskedTokenPredModel
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.parity import curve_cases, training_case
from tests.parity.record_nemo_training import GivenMask


def load(path: Path) -> Any:
    return EncDecDenoiseMaskedTokenPredModel.restore_from(str(path), map_location="cpu")


def curve(warmup_steps: int) -> tuple[list[float], list[float]]:
    """Losses and rates."""
    model = load(training_case.START).train()
    model.mask_processor = GivenMask(model.mask_processor.mask_embedding)
    model.setup_optimization(OmegaConf.create(curve_cases.optim(warmup_steps)))
    optimizer, schedule = model._optimizer, model._scheduler["scheduler"]
    losses, rates = [], []
    for step in range(training_case.NUM_STEPS):
        given = curve_cases.batch(step)
        model.mask_processor.step = step
        log_probs, encoded_len, masks, tokens = model(
            input_signal=given["audio"],
            input_signal_length=given["audio_len"],
            noise_signal=given["noisy_audio"],
            noise_signal_length=given["noisy_audio_len"],
            noisy_input_signal=given["noisy_audio"],
            noisy_input_signal_length=given["noisy_audio_len"],
            apply_mask=True,
        )
        loss = model.loss(masks=masks, decoder_outputs=log_probs, targets=tokens, decoder_lengths=encoded_len)
        rates.append(optimizer.param_groups[0]["lr"])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return losses, rates


@torch.no_grad()
def mels(model_name: str, signal_name: str) -> Any:
    model = load(curve_cases.GOLDEN / f"{model_name}.nemo").eval()
    audio_BN, lengths_B = curve_cases.signal(signal_name)
    mels_BMT, _ = model.preprocessor(input_signal=audio_BN, length=lengths_B)
    return mels_BMT[:, :, :: curve_cases.EVERY_NTH_FRAME].numpy()


def main() -> None:
    recorded: dict[str, Any] = {}
    for warmup_steps, num_threads in curve_cases.CURVES:
        torch.set_num_threads(num_threads)
        losses, rates = curve(warmup_steps)
        recorded[f"losses_{warmup_steps}_{num_threads}"] = np.array(losses)
        recorded[f"rates_{warmup_steps}"] = np.array(rates)
        print(warmup_steps, num_threads, losses[0], losses[-1], rates[-1], flush=True)
    torch.set_num_threads(1)
    for model_name, signal_name in curve_cases.MELS:
        recorded[f"mels_{model_name}_{signal_name}"] = mels(model_name, signal_name)
    np.savez_compressed(curve_cases.RECORDED, **recorded)


if __name__ == "__main__":
    main()
