"""Mels, and fifty training steps at two rates with one thread and two, equal those of NeMo 2.7.3 to 1e-5."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from nest_ssl import load
from tests.parity import curve_cases
from tests.parity.test_training import train


@pytest.fixture
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("warmup_steps", "num_threads"), curve_cases.CURVES, indirect=["num_threads"])
def test_fifty_steps_follow_nemos_losses_to_1e_5(
    warmup_steps: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, rates = train(curve_cases.optim(warmup_steps), curve_cases.batch, monkeypatch)
    with np.load(curve_cases.RECORDED) as recorded:
        np.testing.assert_allclose(rates, recorded[f"rates_{warmup_steps}"], rtol=1e-12)
        nemo = recorded[f"losses_{warmup_steps}_{num_threads}"]
    np.testing.assert_allclose(losses, nemo, rtol=0, atol=1e-5)
    assert nemo[-5:].mean() < 0.95 * nemo[:5].mean()  # it was a training


@pytest.mark.parametrize(("model_name", "signal_name"), curve_cases.MELS)
def test_mels_equal_nemos_to_1e_5(model_name: str, signal_name: str) -> None:
    preprocessor = load(curve_cases.GOLDEN / f"{model_name}.nemo").preprocessor
    audio_BN, lengths_B = curve_cases.signal(signal_name)
    mels_BMT, _ = preprocessor(input_signal=audio_BN, length=lengths_B)
    with np.load(curve_cases.RECORDED) as recorded:
        nemo_BMT = recorded[f"mels_{model_name}_{signal_name}"]
    ours_BMT = mels_BMT[:, :, :: curve_cases.EVERY_NTH_FRAME].numpy()
    np.testing.assert_allclose(ours_BMT, nemo_BMT, rtol=0, atol=1e-5)
