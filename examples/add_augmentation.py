"""Add an augmentation from outside the package, and make a batch with it: python add_augmentation.py train.jsonl

`Telephone` passes 300 to 3,400 Hz. To use it in `nest-ssl pretrain`, put the class and the `register_augmentation` call
into your own package, and name its module in the entry points `nest_ssl.plugins` (docs/extending.md).
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from nest_ssl.config import compose
from nest_ssl.data import AudioNoiseBatch, build_loader
from nest_ssl.plugins import register_augmentation


class Telephone:
    def __init__(self, prob: float = 0.5, sample_rate: int = 16000) -> None:
        self.prob, self.sample_rate = prob, sample_rate

    def __call__(self, batch: AudioNoiseBatch, *, generator: Sequence[np.random.Generator]) -> AudioNoiseBatch:
        assert batch.audio is not None
        assert batch.audio_len is not None
        assert batch.noise is not None
        noisy_audio = batch.audio + batch.noise
        for row, length, rng in zip(noisy_audio, batch.audio_len.tolist(), generator, strict=True):
            if rng.random() < self.prob:
                spectrum, hz = torch.fft.rfft(row[:length]), torch.fft.rfftfreq(length, 1 / self.sample_rate)
                spectrum[(hz < 300) | (hz > 3400)] = 0
                row[:length] = torch.fft.irfft(spectrum, length)
        return replace(batch, noisy_audio=noisy_audio)


register_augmentation("telephone", Telephone)


def main(manifest: str) -> AudioNoiseBatch:
    overrides = [
        f"model.train_ds.manifest_filepath={manifest}",
        "model.train_ds.noise_manifest=null",
        "model.train_ds.num_workers=0",
        "~model.train_ds.batch_augmentor",  # the yaml's own, with its keys
        "model.train_ds.batch_augmentor={_target_: telephone, prob: 1.0}",
        "model.validation_ds.manifest_filepath=null",
    ]
    config = compose("nest_fast-conformer", overrides).model.train_ds
    assert config is not None
    batch = next(iter(build_loader(config)))
    assert batch.noisy_audio is not None
    print(f"a batch of {len(batch.noisy_audio)} utterances through the telephone")
    return batch


if __name__ == "__main__":
    main(sys.argv[1])
