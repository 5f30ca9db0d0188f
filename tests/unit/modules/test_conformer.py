from __future__ import annotations

import pytest
import torch

from nest_ssl.config import EncoderConfig
from nest_ssl.modules import ConformerEncoder
from nest_ssl.modules.attention import distances_to_keys, sinusoids
from nest_ssl.modules.conformer import layer_drop_probs, visible_context

OPTIONS = {"feat_in": 16, "n_layers": 2, "d_model": 8, "n_heads": 2, "conv_kernel_size": 5}


@pytest.mark.parametrize("num_frames", [1, 2, 3, 8])
def test_distances_become_keys(num_frames: int) -> None:
    scores = torch.randn(2, 3, num_frames, 2 * num_frames - 1)
    out = distances_to_keys(scores)
    for query in range(num_frames):
        for key in range(num_frames):
            column = num_frames - 1 - (query - key)
            assert torch.equal(out[:, :, query, key], scores[:, :, query, column])
    assert torch.equal(distances_to_keys(torch.cat((scores, scores))[2:]), out)  # not at the beginning of its memory
    assert torch.equal(distances_to_keys(scores.mT.contiguous().mT), out)


def test_limited_context_sees_exactly_its_frames() -> None:
    visible = visible_context(6, (2, 1), "regular", torch.device("cpu"))
    assert visible[3].tolist() == [False, True, True, True, True, False]


def test_chunks_see_themselves_and_the_chunks_before() -> None:
    visible = visible_context(8, (2, 1), "chunked_limited", torch.device("cpu"))
    assert visible[4].tolist() == [False, False, True, True, True, True, False, False]
    assert torch.equal(visible[4], visible[5])


def test_a_streaming_encoder_does_not_see_past_its_chunk() -> None:
    torch.manual_seed(0)
    encoder = ConformerEncoder(
        **OPTIONS,
        subsampling="dw_striding",
        subsampling_factor=4,
        causal_downsampling=True,
        conv_context_size="causal",
        conv_norm_type="layer_norm",
        att_context_style="chunked_limited",
        att_context_size=[4, 1],
    ).eval()
    signal = torch.randn(1, 16, 96)
    length = torch.tensor([96])
    other = signal.clone()
    other[:, :, 48:] = torch.randn(1, 16, 48)
    same = (encoder(signal, length)[0] == encoder(other, length)[0]).all(dim=1)[0]
    assert same[:12].all()
    assert not same[12:].all()


def test_positions_work_far_beyond_pos_emb_max_len() -> None:
    encoder = ConformerEncoder(**OPTIONS, pos_emb_max_len=8, subsampling_factor=2).eval()
    assert torch.isfinite(encoder(torch.randn(1, 16, 400), torch.tensor([400]))[0]).all()
    assert sinusoids(torch.tensor([9_999.0]), 8).shape == (1, 8)


def test_layers_are_dropped_with_the_probabilities_of_the_paper() -> None:
    linear = EncoderConfig(**{**OPTIONS, "n_layers": 5}, stochastic_depth_drop_prob=0.4)  # type: ignore[arg-type]
    assert layer_drop_probs(linear) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    uniform = EncoderConfig(
        **{**OPTIONS, "n_layers": 4},  # type: ignore[arg-type]
        stochastic_depth_drop_prob=0.4,
        stochastic_depth_mode="uniform",
        stochastic_depth_start_layer=2,
    )
    assert layer_drop_probs(uniform) == pytest.approx([0.0, 0.0, 0.4, 0.4])


def test_tied_biases_are_one_parameter_of_all_layers() -> None:
    encoder = ConformerEncoder(**OPTIONS, untie_biases=False)
    for name in ("pos_bias_u", "pos_bias_v"):
        first, second = (encoder.get_parameter(f"layers.{index}.self_attn.{name}") for index in range(2))
        assert first is second


def test_without_lengths_all_frames_count() -> None:
    encoder = ConformerEncoder(**OPTIONS).eval()
    signal = torch.randn(2, 16, 32)
    torch.testing.assert_close(encoder(signal)[0], encoder(signal, torch.tensor([32, 32]))[0])
