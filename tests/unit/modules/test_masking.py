from __future__ import annotations

import pytest
import torch

from nest_ssl.modules import RandomBlockMasking


def masking(**changes: object) -> RandomBlockMasking:
    options: dict[str, object] = {"feat_in": 4, "block_size": 40, "mask_prob": 0.01, "allow_overlap": True}
    return RandomBlockMasking(**{**options, **changes})


def test_masked_frames_hold_the_embedding_and_the_others_are_untouched() -> None:
    module = masking(mask_prob=0.1)
    features = torch.randn(3, 4, 200)
    masked, masks = module(input_feats=features, input_lengths=torch.tensor([200, 150, 100]))
    inside = masks[:, 0].bool()
    assert inside.any()
    assert torch.equal(masks, masks[:, :1].expand_as(masks))
    assert (masked.transpose(1, 2)[inside] == module.mask_embedding).all()
    assert torch.equal(masked.transpose(1, 2)[~inside], features.transpose(1, 2)[~inside])


def test_the_same_generator_gives_the_same_mask() -> None:
    lengths = torch.tensor([200, 150])
    draws = [masking().draw(lengths, 200, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*draws)


def test_masked_runs_are_whole_blocks() -> None:
    mask = masking().draw(torch.full((500,), 400), 400)
    edges = torch.nn.functional.pad(mask.int(), (1, 1)).diff(dim=1)
    for row in edges:
        starts, ends = torch.nonzero(row == 1)[:, 0], torch.nonzero(row == -1)[:, 0]
        assert ((ends - starts) >= 40).all()


@pytest.mark.parametrize("allow_overlap", [True, False])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 30, 50])
def test_an_utterance_too_short_for_a_block_masks_its_first_eight_frames(allow_overlap: bool, length: int) -> None:
    mask = masking(allow_overlap=allow_overlap).draw(torch.tensor([length]), 64)
    assert mask[0].nonzero()[:, 0].tolist() == list(range(min(8, length)))


@pytest.mark.parametrize("length", [51, 60, 75, 99, 100, 101, 400])
def test_separate_blocks_stay_within_the_length_where_nemo_runs_past_it(length: int) -> None:
    mask = masking(allow_overlap=False, mask_prob=0.5).draw(torch.full((200,), length), length + 100)
    assert mask.any()
    assert not mask[:, length:].any()


def test_a_mask_value_replaces_the_embedding_and_a_learned_embedding_gets_gradients() -> None:
    fixed = masking(mask_value=-3.0)
    assert (fixed.mask_embedding == -3.0).all()
    assert not fixed.mask_embedding.requires_grad
    assert not masking().mask_embedding.requires_grad
    learned = masking(freeze=False, mask_prob=0.5)
    masked, _ = learned(input_feats=torch.randn(1, 4, 200), input_lengths=torch.tensor([200]))
    masked.sum().backward()
    assert learned.mask_embedding.grad is not None
    assert (learned.mask_embedding.grad > 0).all()
