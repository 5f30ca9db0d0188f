"""Datasets of audio files."""

from __future__ import annotations

import torch

from nest_ssl.data import AudioNoiseDataset, MultiSpeakerNoiseAugmentation
from tests.unit.data.corpus import RATE, Corpus


def test_the_dataset_gives_items_that_torchs_own_loader_can_batch(corpus: Corpus) -> None:
    dataset = AudioNoiseDataset(
        manifest_filepath=str(corpus.speech),
        noise_manifest=str(corpus.noise),
        sample_rate=RATE,
        batch_augmentor=MultiSpeakerNoiseAugmentation(prob=1.0, noise_ratio=0.5),
        min_audio_len_secs=0.1,
    )
    assert len(dataset) == 22
    item = dataset[3]
    assert item.sample_id == "3"
    assert item.audio is not None
    assert item.noise is not None
    assert item.noise.shape == item.audio.shape
    loader = torch.utils.data.DataLoader(dataset, batch_size=5, collate_fn=dataset.collate_fn)
    batches = list(loader)
    assert [len(batch.sample_id) for batch in batches] == [5, 5, 5, 5, 2]
    assert all(torch.equal(b.noisy_audio, b.audio + b.noise) for b in batches)
