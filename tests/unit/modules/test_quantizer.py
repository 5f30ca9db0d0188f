from __future__ import annotations

import resource
import subprocess
import sys
import textwrap

import pytest
import torch

from nest_ssl.modules import RandomProjectionVectorQuantizer
from nest_ssl.modules.quantizer import nearest_code

OPTIONS = {"feat_in": 80, "code_dim": 16, "num_classes": 512, "num_books": 2, "combine_time_steps": 8}


def quantizer(**changes: object) -> RandomProjectionVectorQuantizer:
    torch.manual_seed(0)
    return RandomProjectionVectorQuantizer(**{**OPTIONS, **changes})


def test_cosine_gives_the_tokens_of_l2() -> None:
    features = torch.randn(2, 80, 160)
    by_angle = quantizer(dist_fn="cosine")(input_signal=features)[1]
    assert torch.equal(by_angle, quantizer(dist_fn="l2")(input_signal=features)[1])


def test_the_nearest_code_is_the_nearest_by_distance() -> None:
    x = torch.nn.functional.normalize(torch.randn(2, 9, 16), dim=-1)
    codebook = torch.nn.functional.normalize(torch.randn(300, 16).double(), dim=-1)
    distance = torch.cdist(x.double(), codebook)
    assert torch.equal(nearest_code(x, codebook), distance.argmin(-1))


def test_chunks_do_not_change_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    features = torch.randn(2, 80, 160)
    whole = quantizer()(input_signal=features)[1]
    monkeypatch.setattr("nest_ssl.modules.quantizer._CHUNK_BYTES", 3 * 512 * 8)
    assert torch.equal(quantizer()(input_signal=features)[1], whole)


def test_quantized_vectors_are_the_codes_of_the_tokens() -> None:
    module = quantizer()
    quantized, tokens = module(input_signal=torch.randn(2, 80, 160))
    assert quantized.shape == (2, 16, 20, 2)
    assert tokens.shape == (2, 20, 2)
    for book in range(2):
        torch.testing.assert_close(quantized[1, :, 7, book], module.codebooks[book, tokens[1, 7, book]])


def test_time_ahead_takes_frames_first() -> None:
    features = torch.randn(2, 80, 160)
    quantized, tokens = quantizer(time_ahead=True)(input_signal=features.transpose(1, 2))
    expected, expected_tokens = quantizer()(input_signal=features)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(quantized, expected.transpose(1, 2))


def test_an_incomplete_last_group_of_frames_is_left_out() -> None:
    features = torch.randn(1, 80, 163)
    tokens = quantizer()(input_signal=features)[1]
    assert torch.equal(tokens, quantizer()(input_signal=features[:, :, :160])[1])


def test_no_gradient_reaches_projection_or_codes_even_when_not_frozen() -> None:
    quantized, _ = quantizer(freeze=False)(input_signal=torch.randn(1, 80, 16, requires_grad=True))
    assert not quantized.requires_grad


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory as Linux counts it")
def test_eight_minutes_of_audio_take_less_than_300_megabytes() -> None:
    program = textwrap.dedent(
        """
        import resource, torch
        from nest_ssl.modules import RandomProjectionVectorQuantizer
        quantizer = RandomProjectionVectorQuantizer(
            feat_in=80, code_dim=16, num_classes=8192, num_books=1, combine_time_steps=8, dist_fn="l2")
        features = torch.randn(8, 80, 6000)
        quantizer(input_signal=features[:, :, :800])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        quantizer(input_signal=features)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        """
    )
    assert resource.RUSAGE_SELF == 0
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(printed) * 1024 < 300e6
