from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nest_ssl.config import EncoderConfig
from nest_ssl.modules.lengths import valid_frames
from nest_ssl.modules.subsampling import ConvSubsampling, HalvingConv, relu_and_zero_past_end


def plainly(module: ConvSubsampling, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: zeros past the end after every layer."""

    def zeroed(x: Tensor) -> Tensor:
        return torch.where(valid_frames(lengths, x.shape[2])[:, None, :, None], x, 0.0)

    x = zeroed(x[:, None])
    for layer in module.conv:
        x = layer(x)
        if isinstance(layer, HalvingConv):
            lengths = layer.out_length(lengths)
        x = zeroed(x)
    return module.out(x.transpose(1, 2).flatten(2)), lengths


@pytest.mark.parametrize("subsampling", ["dw_striding", "striding"])
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients_are_those_of_the_definition(subsampling: str, causal: bool) -> None:
    torch.manual_seed(0)
    cfg = EncoderConfig(
        feat_in=20, d_model=12, n_layers=1, n_heads=2, subsampling=subsampling, subsampling_conv_channels=6,
        causal_downsampling=causal,
    )  # fmt: skip
    module = ConvSubsampling(cfg)
    x = torch.randn(3, 97, 20, requires_grad=True)
    lengths = torch.tensor([97, 50, 1])
    outcomes: list[list[Tensor]] = []
    for forward in (module, lambda *inputs: plainly(module, *inputs)):
        module.zero_grad()
        x.grad = None
        out, out_lengths = forward(x, lengths)
        out.square().sum().backward()
        assert x.grad is not None
        outcomes.append(
            [out.detach(), out_lengths, x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
        )
    for ours, definition in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, definition, rtol=1e-5, atol=1e-5)


def test_without_gradients_the_input_is_not_modified() -> None:
    x = torch.randn(2, 3, 4, 5)
    before = x.clone()
    out = relu_and_zero_past_end(x, torch.tensor([4, 2]))
    assert torch.equal(x, before)
    assert torch.equal(out[0], x[0].relu())
    assert not out[1, :, 2:].any()
