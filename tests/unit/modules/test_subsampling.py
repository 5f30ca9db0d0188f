from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.config import EncoderConfig
from nest_ssl.modules import packed_subsampling
from nest_ssl.modules.lengths import valid_frames
from nest_ssl.modules.packed_subsampling import first_alike, pack
from nest_ssl.modules.subsampling import ConvSubsampling, HalvingConv, relu_and_zero_past_end


@pytest.fixture(autouse=True, params=["one piece", "many pieces"])
def num_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many pieces":
        monkeypatch.setattr(packed_subsampling, "_PIECE_BYTES", 5000)


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
    assert_all_close(outcome(module, module.padded, x, lengths), definition)


@pytest.mark.parametrize("begin", range(0, 24, 5))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kind", "factor"), [("dw_striding", 8), ("dw_striding", 4), ("striding", 2), ("striding", 8)])
def test_masked_blocks_are_computed_once_and_give_what_they_gave(
    kind: str, factor: int, causal: bool, begin: int
) -> None:
    module = subsampling_of(kind, causal=causal, factor=factor)
    x, lengths = torch.randn(3, 203, 20), torch.tensor([203, 160, 90])
    x[0, begin : begin + 72] = x[0, begin]
    x[0, begin + 100 : begin + 171] = 0.0  # as silent as what is past the end
    x[1, begin:160] = 1.5  # up to the end
    x[2] = 1.5  # all of it, and before anything else was heard
    packing, rows = pack(module, x, lengths)
    unmasked, _ = pack(module, torch.randn_like(x), lengths)
    assert packing.keep_BG.sum() < 0.7 * unmasked.keep_BG.sum()
    assert len(rows) == factor * packing.keep_BG.sum()
    definition = outcome(module, lambda *inputs: plainly(module, *inputs), x, lengths)
    # One row's gradient stands for many that the definition sums one by one.
    assert_all_close(outcome(module, module, x, lengths), definition, rtol=1e-4)


def test_under_autocast_it_is_the_plain_version_too() -> None:
    module, lengths = subsampling_of(), torch.tensor([203, 90])
    x = torch.randn(2, 203, 20)
    x[0, 40:140] = 1.5
    with torch.autocast("cpu", torch.bfloat16):
        packed, plain = (outcome(module, forward, x, lengths) for forward in (module, module.padded))
    for one, other in zip(packed, plain, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.05, atol=0.05 * float(other.abs().max()))


def test_one_group_stands_for_a_frame_that_is_heard_over_and_over_in_many_utterances() -> None:
    lengths = torch.tensor([160, 160, 90])
    x = torch.randn(3, 160, 20)
    x[0, 16:56] = x[1, 80:] = x[2, 8:88] = 1.5
    own = torch.arange(3 * 21).view(3, 21)
    like = first_alike(own, F.pad(x, (0, 0, 0, 8)), lengths, reach=7)
    repeating = [(0, group) for group in range(3, 7)] + [(1, group) for group in range(11, 20)]
    repeating += [(2, group) for group in range(2, 11)]
    assert sorted(map(tuple, (like != own).nonzero().tolist())) == repeating[1:]
    assert {int(like[place]) for place in repeating} == {int(own[repeating[0]])}


def test_gradients_are_the_same_to_the_bit_in_every_run() -> None:
    module, lengths = subsampling_of(), torch.full((8,), 4000)
    module.out = nn.Linear(module.out.in_features, 64)
    x = torch.randn(8, 4000, 20)
    x[:, 100:3900] = 1.5  # thousands of frames of output, and all their gradients in one sum
    first = outcome(module, module, x, lengths)
    assert first[0].numel() > 2 * 2**15  # fewer are summed by one thread alone
    for _ in range(5):
        assert all(map(torch.equal, first, outcome(module, module, x, lengths)))


def test_under_autocast_many_gradients_are_summed_in_full_precision() -> None:
    module, lengths = subsampling_of(), torch.tensor([8000])
    x = torch.full((1, 8000, 20), 0.5)
    grads = []
    for enabled in (False, True):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out, _ = module(x, lengths)
        out.float().sum().backward()
        assert module.out.weight.grad is not None
        grads.append(module.out.weight.grad.clone())
    plain, cast = grads
    assert (plain - cast).norm() < 0.02 * plain.norm()  # the sum of a thousand in bfloat16 is 256


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_another_precision_has_the_gradients_of_the_plain_version(dtype: torch.dtype) -> None:
    module, lengths = subsampling_of().to(dtype), torch.tensor([203, 90])
    x = torch.randn(2, 203, 20)
    x[0, 40:140] = 1.5
    rtol = 1e-9 if dtype == torch.float64 else 0.05
    for one, other in zip(*(outcome(module, forward, x, lengths) for forward in (module, module.padded)), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * float(other.abs().max()))


def test_frames_that_want_gradients_are_all_kept() -> None:
    module, lengths = subsampling_of(), torch.tensor([120])
    x = torch.ones(1, 120, 20, requires_grad=True)
    definition = outcome(module, lambda *inputs: plainly(module, *inputs), x, lengths)
    assert_all_close(outcome(module, module, x, lengths), definition)


def test_an_utterance_does_not_hear_its_neighbours_in_the_batch() -> None:
    module, lengths = subsampling_of(), torch.tensor([40, 33, 40])
    x = torch.randn(3, 40, 20)
    together = module(x, lengths)[0]
    for row, length in enumerate(lengths):
        alone = module(x[row : row + 1, :length], length[None])[0][0]
        torch.testing.assert_close(together[row, : len(alone)], alone)


def test_hooks_and_adapters_in_it_act() -> None:
    module, inputs = subsampling_of(), (torch.randn(1, 64, 20), torch.tensor([64]))
    before, heard = module(*inputs)[0], []
    with module.out.register_forward_hook(lambda *_: heard.append(True)):
        torch.testing.assert_close(module(*inputs)[0], before)
    assert heard
    module.out = nn.utils.parametrizations.weight_norm(module.out)
    module.out.parametrizations.weight.original0.data *= 2  # type: ignore[union-attr, operator]
    assert not torch.allclose(module(*inputs)[0], before)
    torch.testing.assert_close(module(*inputs), module.padded(*inputs))


def test_a_hook_of_the_backward_pass_is_called() -> None:
    module, inputs, heard = subsampling_of(), (torch.randn(1, 64, 20), torch.tensor([64])), []
    part = module.get_submodule("conv.0")
    with part.register_full_backward_hook(lambda *_: heard.append(True)):
        module(*inputs)[0].sum().backward()
    assert heard


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_what_is_traced_works_for_other_lengths() -> None:
    module = subsampling_of().eval()
    traced = torch.jit.trace(module, (torch.randn(2, 64, 20), torch.tensor([64, 30])), check_trace=False)
    x, lengths = torch.randn(2, 64, 20), torch.tensor([12, 64])
    torch.testing.assert_close(traced(x, lengths), module(x, lengths))


def test_without_gradients_the_input_is_not_modified() -> None:
    x = torch.randn(2, 3, 4, 5)
    before = x.clone()
    out = relu_and_zero_past_end(x, torch.tensor([4, 2]))
    assert torch.equal(x, before)
    assert torch.equal(out[0], x[0].relu())
    assert not out[1, :, 2:].any()
