from __future__ import annotations

import numpy as np
import pytest
import torch

from nest_ssl.probe.linear import LogMelStatistics, fit_linear, statistics
from tests.unit.probe.speech_like import RATE, tone


def test_statistics_use_only_valid_frames() -> None:
    x = torch.randn(2, 3, 10)
    found = statistics(x, torch.arange(10) < torch.tensor([[10], [4]]))
    torch.testing.assert_close(found[1, :3], x[1, :, :4].mean(1))
    torch.testing.assert_close(found[1, 3:], x[1, :, :4].std(1, correction=0))


def test_the_linear_probe_finds_the_layer_that_knows() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (240,), generator=generator)
    x = torch.randn(240, 4, 6, generator=generator)
    x[:, 2, :3] += 2.0 * torch.nn.functional.one_hot(labels, 3)
    probe = fit_linear(x[:160], labels[:160], 3, [str(i) for i in range(160)], seed=0)
    assert int(np.argmax(probe.layer_weights)) == 2
    assert sum(probe.layer_weights) == pytest.approx(1.0, abs=1e-5)
    assert (probe.predict(x[160:]) == labels[160:].numpy()).mean() > 0.8


def test_the_linear_probe_reaches_the_optimum_of_its_objective() -> None:
    """One layer is plain multinomial regression: its gradient is zero at the end."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(3, (60,), generator=generator)
    x = torch.randn(60, 1, 5, generator=generator) + labels[:, None, None]
    probe = fit_linear(x, labels, 3, [str(i) for i in range(60)], seed=0)
    weight = probe.weight_CF.clone().requires_grad_()
    logits = ((x - probe.mean_LF) / probe.std_LF)[:, 0] @ weight.T + probe.bias_C
    loss = torch.nn.functional.cross_entropy(logits, labels) + probe.penalty * weight.square().sum() / (2 * 60)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.abs().max() < 2e-3


def test_features_without_the_label_get_a_stronger_penalty_than_clear_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (60,), generator=generator)
    noise = torch.randn(60, 1, 40, generator=generator)
    clear = 0.1 * noise + labels[:, None, None]
    penalties = [fit_linear(x, labels, 2, [str(i) for i in range(60)], seed=0).penalty for x in (noise, clear)]
    assert penalties[0] > 10 * penalties[1]


def test_the_log_mel_baseline_depends_on_neither_loudness_nor_padding_nor_pauses() -> None:
    baseline = LogMelStatistics(RATE).eval()
    samples = torch.from_numpy(tone(1.0, 150, 0))
    alone = baseline(samples[None], torch.tensor([RATE]))
    assert alone.shape == (1, 128)
    padded = torch.nn.functional.pad(0.1 * samples, (0, 4000))[None]
    torch.testing.assert_close(baseline(padded, torch.tensor([RATE])), alone, atol=5e-3, rtol=0)
    assert alone[:, :64].max() <= 0
    pause = 1e-4 * torch.randn(RATE, generator=torch.Generator().manual_seed(0))
    with_pause = baseline(torch.cat((samples, pause))[None], torch.tensor([2 * RATE]))
    assert (with_pause - alone).abs().mean() < 0.1
