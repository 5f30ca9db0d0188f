from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nest_ssl.config import EncoderConfig
from nest_ssl.modules.inputs import valid_frames
from nest_ssl.modules.subsampling import ConvSubsampling, HalvingConv


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


def subsampling_of(kind: str = "dw_striding", *, causal: bool = False, factor: int = 8) -> ConvSubsampling:
    torch.manual_seed(0)
    cfg = EncoderConfig(
        feat_in=20, d_model=12, n_layers=1, n_heads=2, subsampling=kind, subsampling_factor=factor,
        subsampling_conv_channels=6, causal_downsampling=causal,
    )  # fmt: skip
    return ConvSubsampling(cfg)


Subsample = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def outcome(module: ConvSubsampling, forward: Subsample, x: Tensor, lengths: Tensor) -> list[Tensor]:
    """Values, lengths and the gradients of all parameters and, where asked for, of the input."""
    module.zero_grad()
    x.grad = None
    out, out_lengths = forward(x, lengths)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    grads = [leaf.grad for leaf in (x, *module.parameters()) if leaf.grad is not None]
    assert len(grads) == len(list(module.parameters())) + x.requires_grad
    return [out.detach(), out_lengths, *(grad.clone() for grad in grads)]


def assert_all_close(ours: list[Tensor], definition: list[Tensor], rtol: float = 1e-5) -> None:
    for one, other in zip(ours, definition, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("kind", ["dw_striding", "striding"])
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients_are_those_of_the_definition(kind: str, causal: bool, factor: int) -> None:
    module = subsampling_of(kind, causal=causal, factor=factor)
    x, lengths = torch.randn(4, 97, 20, requires_grad=True), torch.tensor([97, 50, 1, 0])
    definition = outcome(module, lambda *inputs: plainly(module, *inputs), x, lengths)
    assert_all_close(outcome(module, module, x, lengths), definition)


def test_an_utterance_does_not_hear_its_neighbours_in_the_batch() -> None:
    module, lengths = subsampling_of(), torch.tensor([40, 33, 40])
    x = torch.randn(3, 40, 20)
    together = module(x, lengths)[0]
    for row, length in enumerate(lengths):
        alone = module(x[row : row + 1, :length], length[None])[0][0]
        torch.testing.assert_close(together[row, : len(alone)], alone)


def test_hooks_and_adapters_in_the_subsampling_take_effect() -> None:
    module, inputs = subsampling_of(), (torch.randn(1, 64, 20), torch.tensor([64]))
    before, heard = module(*inputs)[0], []
    with module.out.register_forward_hook(lambda *_: heard.append(True)):
        torch.testing.assert_close(module(*inputs)[0], before)
    assert heard
    module.out = nn.utils.parametrizations.weight_norm(module.out)
    module.out.parametrizations.weight.original0.data *= 2  # type: ignore[union-attr, operator]
    assert not torch.allclose(module(*inputs)[0], before)


def test_a_hook_of_the_backward_pass_is_called() -> None:
    module, inputs, heard = subsampling_of(), (torch.randn(1, 64, 20), torch.tensor([64])), []
    part = module.get_submodule("conv.0")
    with part.register_full_backward_hook(lambda *_: heard.append(True)):
        module(*inputs)[0].sum().backward()
    assert heard


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_traced_subsampling_works_for_other_lengths() -> None:
    module = subsampling_of().eval()
    traced = torch.jit.trace(module, (torch.randn(2, 64, 20), torch.tensor([64, 30])), check_trace=False)
    x, lengths = torch.randn(2, 64, 20), torch.tensor([12, 64])
    torch.testing.assert_close(traced(x, lengths), module(x, lengths))
