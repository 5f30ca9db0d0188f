"""The Triton kernels against plain torch, forward and backward, on a CUDA GPU or by Triton's interpreter.

`test_interpreter.py` runs this file by the interpreter, in a process of its own.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.config import EncoderConfig
from nest_ssl.fast.encoder import fused_subsampling
from nest_ssl.fast.ops.dropout import draw_seeds, keep_mask
from nest_ssl.modules.attention import RelPositionMultiHeadAttention
from nest_ssl.modules.subsampling import ConvSubsampling

INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
NUM_FRAMES, NUM_BANDS = (33, 12) if INTERPRETED else (75, 20)  # the interpreter takes a millisecond for each program
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA GPU or TRITON_INTERPRET=1"),
]


@pytest.fixture(autouse=True)
def exact_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's convolutions round to TF32 unless told: 1e-3, where the comparisons are of 1e-5."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(autouse=True)
def no_access_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter finds loads and stores outside the kernel's tensors, which a GPU may or may not notice."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    storages: list[tuple[int, int]] = []
    theirs, place = interpreter._interpreter, interpreter.GridExecutor._init_args_hst

    def placed(self: Any, args: Any, kwargs: Any) -> Any:
        on_host = place(self, args, kwargs)
        tensors = [x.untyped_storage() for x in (*on_host[0], *on_host[1].values()) if isinstance(x, Tensor)]
        storages[:] = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in tensors]
        return on_host

    def check(addresses: Any, mask: Any, num_bytes: int) -> None:
        used = addresses[np.broadcast_to(mask, addresses.shape)]
        inside = np.zeros(used.shape, dtype=bool)
        for begin, end in storages:
            inside |= (used >= begin) & (used + np.uint64(num_bytes) <= end)
        assert inside.all(), f"{(~inside).sum()} of {used.size} places are outside of the kernel's tensors"

    def load(addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        check(addresses, mask, np.dtype(dtype).itemsize)
        return theirs.load(addresses, mask, other, dtype)

    def store(addresses: Any, value: Any, mask: Any) -> Any:
        check(addresses, mask, value.dtype.itemsize)
        return theirs.store(addresses, value, mask)

    checked = types.SimpleNamespace(**{**vars(theirs), "load": load, "store": store})
    monkeypatch.setattr(interpreter, "_interpreter", checked)
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", placed)


class HashedDropout(nn.Module):
    """The dropout of the kernels, on weights that are there as a whole."""

    def __init__(self, rate: float, seed: Tensor) -> None:
        super().__init__()
        self.p, self.seed = rate, seed

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0:
            return x
        return torch.where(keep_mask(x.numel(), self.p, self.seed).view(x.shape), x / (1 - self.p), 0.0)


@pytest.mark.parametrize(
    ("limited", "rate", "num_frames", "channels"),
    [(False, 0.0, 70, 12), (True, 0.0, 52, 8), (False, 0.3, 70, 12), (True, 0.3, 129, 64)],
)
def test_fused_attention_is_the_plain_one(limited: bool, rate: float, num_frames: int, channels: int) -> None:
    from nest_ssl.fast.ops.attention import relative_attention

    torch.manual_seed(0)
    heads, lengths = 2, torch.tensor([1, num_frames // 2 + 3, num_frames], device=DEVICE)
    (seed,) = draw_seeds(1, device=DEVICE)
    module = RelPositionMultiHeadAttention(heads * channels, heads, dropout=0.0, use_bias=True).to(DEVICE)
    module.dropout = HashedDropout(rate, seed)  # type: ignore[assignment]
    for bias in (module.pos_bias_u, module.pos_bias_v):
        nn.init.normal_(bias)
    frame = torch.arange(num_frames, device=DEVICE)
    valid = frame < lengths[:, None]
    context = (frame[:, None] - frame).abs() < 9 if limited else None
    visible = (valid[:, :, None] & valid[:, None, :] & (True if context is None else context))[:, None]
    x = torch.randn(3, num_frames, heads * channels, device=DEVICE, requires_grad=True)
    positions = torch.randn(1, 2 * num_frames - 1, heads * channels, device=DEVICE)
    expected = module(x, visible, positions)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x, *module.parameters()], grad)

    linears = (module.linear_q, module.linear_k, module.linear_v)
    qkv = torch.cat([linear(x) for linear in linears], dim=-1).view(-1, 3, heads, channels)
    projected = module.linear_pos(positions[0]).view(-1, heads, channels)
    biases = (module.pos_bias_u, module.pos_bias_v)
    out, _ = relative_attention(qkv, projected, *biases, lengths, valid, context, seed, rate)
    ours = module.linear_out(out.reshape(expected.shape))
    found = torch.autograd.grad(ours, [x, *module.parameters()], grad)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    for theirs, gradient in zip(wanted, found, strict=True):
        torch.testing.assert_close(gradient, theirs, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("left", [0, 4, 8])
def test_the_convolution_over_time_is_torchs(left: int) -> None:
    from nest_ssl.fast.ops.convolution import convolve

    torch.manual_seed(0)
    batch, num_frames, width, taps = 3, 77, 24, 9
    x = torch.randn(batch * num_frames, width, device=DEVICE, requires_grad=True)
    weight = torch.randn(width, taps, device=DEVICE, requires_grad=True)
    bias = torch.randn(width, device=DEVICE, requires_grad=True)
    padded = F.pad(x.view(batch, num_frames, width).transpose(1, 2), (left, taps - 1 - left))
    expected = F.conv1d(padded, weight[:, None], bias, groups=width).transpose(1, 2).flatten(0, 1)
    ours = convolve(x, weight, bias, torch.empty(batch, num_frames, device=DEVICE), left)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    grad = torch.randn_like(expected)
    wanted, found = (torch.autograd.grad(y, (x, weight, bias), grad) for y in (expected, ours))
    for theirs, gradient in zip(wanted, found, strict=True):
        torch.testing.assert_close(gradient, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_the_fused_subsampling_is_the_plain_one(causal: bool, factor: int) -> None:
    torch.manual_seed(0)
    options = {"feat_in": NUM_BANDS, "n_layers": 1, "d_model": 8, "n_heads": 2, "subsampling_conv_channels": 12}
    cfg = EncoderConfig(
        **options,  # type: ignore[arg-type]
        subsampling="dw_striding",
        subsampling_factor=factor,
        causal_downsampling=causal,
    )
    plain = ConvSubsampling(cfg).to(DEVICE)
    fast = copy.deepcopy(plain)
    x, lengths = torch.randn(3, NUM_FRAMES, NUM_BANDS, device=DEVICE), torch.tensor([17, 26, NUM_FRAMES], device=DEVICE)
    expected, expected_lengths = plain(x, lengths)
    ours, our_lengths = fused_subsampling(fast, x, lengths)
    assert torch.equal(our_lengths, expected_lengths)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    ours.backward(grad)
    for (name, theirs), parameter in zip(plain.named_parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, theirs.grad, atol=1e-4, rtol=1e-3, msg=name)
