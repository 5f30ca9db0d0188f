from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from nest_ssl.config import ModelConfig
from nest_ssl.data import build_loader
from nest_ssl.inspect.examples import ExampleBatch, example_batches
from nest_ssl.modules import AudioToMelSpectrogramPreprocessor
from tests.unit.inspect.conftest import RATE, Speech


def examples(config: ModelConfig, seed: int = 0) -> list[ExampleBatch]:
    assert config.train_ds is not None
    return example_batches(config, config.train_ds, num_batches=2, seed=seed)


def test_examples_are_the_batches_that_training_gets(speech: Speech) -> None:
    config = speech.config()
    assert config.train_ds is not None
    loader = build_loader(replace(config.train_ds, pin_memory=False), seed=3)
    for example, batch in zip(examples(config, seed=3), loader, strict=False):
        assert batch.audio is not None
        assert batch.noisy_audio is not None
        assert example.num_samples == batch.audio.shape[1]
        for row, utterance in enumerate(example.utterances):
            length = len(utterance.audio_N)
            assert utterance.name == batch.audio_filepaths[row]
            assert np.array_equal(utterance.audio_N, batch.audio[row, :length].numpy())
            assert np.array_equal(utterance.noisy_N, batch.noisy_audio[row, :length].numpy())
            assert np.allclose(utterance.audio_N + utterance.added_N, utterance.noisy_N, atol=1e-6)


def test_features_are_the_preprocessors_and_masked_frames_are_replaced(speech: Speech) -> None:
    config = speech.config(["model.preprocessor.dither=0"])
    preprocessor = AudioToMelSpectrogramPreprocessor(**vars(config.preprocessor))
    utterance = examples(config)[0].utterances[0]
    audio = torch.from_numpy(utterance.noisy_N)[None]
    mels, length = preprocessor(input_signal=audio, length=torch.tensor([audio.shape[1]]))
    assert utterance.noisy_MT.shape[1] == int(length[0]) == len(utterance.mask_T)
    assert np.allclose(utterance.noisy_MT, mels[0, :, : int(length[0])].numpy(), atol=1e-3)
    assert utterance.masked_MT is not None
    mask_T = utterance.mask_T
    assert 0 < utterance.masked_share < 1
    assert np.array_equal(utterance.masked_MT[:, ~mask_T], utterance.noisy_MT[:, ~mask_T])
    embedding_M = utterance.masked_MT[:, mask_T][:, :1]
    assert np.array_equal(utterance.masked_MT[:, mask_T], np.broadcast_to(embedding_M, (80, int(mask_T.sum()))))


def test_the_ratio_is_that_of_the_energies(speech: Speech) -> None:
    utterance = examples(speech.config())[0].utterances[0]
    twice = replace(utterance, added_N=utterance.audio_N / np.float32(2))
    assert twice.ratio_db == pytest.approx(20 * np.log10(2), abs=1e-4)
    assert replace(utterance, added_N=np.zeros_like(utterance.audio_N)).ratio_db is None


def test_the_same_seed_gives_the_same_and_another_seed_other_pictures(speech: Speech) -> None:
    first, again, other = (examples(speech.config(), seed)[0].utterances for seed in (0, 0, 1))
    assert all(np.array_equal(a.mask_T, b.mask_T) for a, b in zip(first, again, strict=True))
    assert [u.name for u in first] == [u.name for u in again] != [u.name for u in other]
    assert all(np.array_equal(a.clean_MT, b.clean_MT) for a, b in zip(first, again, strict=True))


def test_examples_leave_torchs_random_numbers_alone(speech: Speech) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    examples(speech.config())
    assert torch.equal(torch.rand(1), expected)


def test_masks_after_the_subsampling_are_shown_as_frames(speech: Speech) -> None:
    utterance = examples(speech.config(["model.mask_position=post_conv"]))[0].utterances[0]
    assert utterance.masked_MT is None
    assert len(utterance.mask_T) == utterance.clean_MT.shape[1]
    steps = np.flatnonzero(np.diff(utterance.mask_T.astype(int))) + 1
    assert (steps % 8 == 0).all()


def test_bad_files_are_replaced_and_named(speech: Speech) -> None:
    lines = [{"audio_filepath": f"{name}.wav", "duration": 1.2} for name in ("gone", 1, 2, 3)]
    (batch,) = examples(speech.config(manifest=speech.other("some.jsonl", lines)))
    assert [bad.audio_filepath for bad in batch.bad_files] == [str(speech.folder / "gone.wav")]
    assert len(batch.utterances) == 4


def test_a_single_utterance_is_drawn_though_training_would_drop_it(speech: Speech) -> None:
    path = speech.other("one.jsonl", [{"audio_filepath": "1.wav", "duration": speech.durations_s[1]}])
    (batch,) = examples(speech.config(manifest=path))
    assert len(batch.utterances) == 1
    assert batch.num_samples == pytest.approx(speech.durations_s[1] * RATE, abs=1)
    assert batch.padding_share == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
def test_a_fifo_is_a_bad_file_and_does_not_block(speech: Speech) -> None:
    config = speech.config()
    assert config.train_ds is not None
    first = build_loader(replace(config.train_ds, pin_memory=False), seed=0)
    path = next(iter(first)).audio_filepaths[0]
    os.remove(path)
    os.mkfifo(path)
    bad = [file for example in examples(config) for file in example.bad_files]
    assert {(file.audio_filepath, file.reason) for file in bad} == {(path, "not a regular file")}
