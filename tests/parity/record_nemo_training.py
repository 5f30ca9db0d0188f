"""Let NeMo do the training steps of training_case.py and write its losses and rates next to this file.

    PYTHON_WITH_NEMO tests/parity/record_nemo_training.py

Needs nemo_toolkit[asr]==2.7.3 in an environment of its own. Model, optimizer and schedule are NeMo's; only the mask is
given in place of a drawn one, as the draws of the two programs have the same distribution but not the same values.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")  # as in tests/conftest.py

import numpy as np
import torch
from nemo.collections.asr.models.ssl_models import EncDecDenoiseMaskedTokenPredModel
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.parity import training_case


class GivenMask(torch.nn.Module):
    """In the place of NeMo's mask_processor: the same embedding, at the given frames."""

    def __init__(self, embedding: torch.nn.Parameter) -> None:
        super().__init__()
        self.mask_embedding = embedding
        self.step = 0

    def forward(self, input_feats: Any, input_lengths: Any) -> Any:
        mask = training_case.mask(self.step, input_lengths, input_feats.shape[2])[:, None].expand_as(input_feats)
        return torch.where(mask, self.mask_embedding[:, None], input_feats), mask.to(input_feats.dtype)


def main() -> None:
    torch.set_num_threads(1)
    model = EncDecDenoiseMaskedTokenPredModel.restore_from(str(training_case.START), map_location="cpu").train()
    model.mask_processor = GivenMask(model.mask_processor.mask_embedding)
    model.setup_optimization(OmegaConf.create(training_case.OPTIM))
    optimizer, schedule = model._optimizer, model._scheduler["scheduler"]
    losses, rates = [], []
    for step in range(training_case.NUM_STEPS):
        given = training_case.batch(step)
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
        print(step, losses[-1], rates[-1], flush=True)
    np.savez_compressed(training_case.RECORDED, losses=np.array(losses), rates=np.array(rates))


if __name__ == "__main__":
    main()
