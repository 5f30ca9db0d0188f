"""Small models and inputs that tests share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from nest_ssl import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.config.composing import yaml_folder
from nest_ssl.data import AudioNoiseBatch
from nest_ssl.fast.engine import Batch, accelerate
from nest_ssl.training.parallel import World
from nest_ssl.training.step import TrainStep
from nest_ssl.training.watching import Watch

TINY: dict[str, Any] = {
    "num_classes": 64,
    "encoder.d_model": 32,
    "encoder.n_layers": 2,
    "encoder.n_heads": 4,
    "encoder.subsampling_conv_channels": 16,
}
NO_DROPOUT: dict[str, Any] = {
    "preprocessor.dither": 0.0,
    **{f"encoder.{name}": 0.0 for name in ("dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att")},
}


@contextlib.contextmanager
def blocking(path: Path) -> Iterator[None]:
    """Let whoever opens this file wait, for up to 45 s: it stands for one on a network disk that does not respond."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the system's request to give the lease back
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    except OSError as error:
        pytest.skip(f"no leases here: {error}")
    finally:
        os.close(file)
        signal.signal(signal.SIGIO, before)


@contextlib.contextmanager
def fifo_that_is_not_opened(path: Path) -> Iterator[None]:
    """A FIFO at `path`: fail if the code in here opens it, which blocks it until it is let go after 10 s."""
    os.mkfifo(path)
    ended = threading.Event()
    blocked: list[Path] = []

    def let_go() -> None:
        while not ended.wait(0.1 if blocked else 10):
            os.close(os.open(path, os.O_RDWR))
            blocked.append(path)

    thread = threading.Thread(target=let_go)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert not blocked, f"{path}: whoever opened it was blocked"


def model_section(overrides: dict[str, Any] | None = None, *, tiny: bool = True) -> dict[str, Any]:
    """The model section of our yaml, small unless told, as a plain dict."""
    cfg = OmegaConf.load(yaml_folder() / "nest_fast-conformer.yaml")
    cfg.model.train_ds = cfg.model.validation_ds = None
    for key, value in {**(TINY if tiny else {}), **(overrides or {})}.items():
        OmegaConf.update(cfg, f"model.{key}", value, force_add=True)
    section = OmegaConf.to_container(cfg.model, resolve=True)
    assert isinstance(section, dict)
    return {str(key): value for key, value in section.items()}


def tiny_model(overrides: dict[str, Any] | None = None, seed: int = 0) -> EncDecDenoiseMaskedTokenPredModel:
    torch.manual_seed(seed)
    return EncDecDenoiseMaskedTokenPredModel(model_section(overrides))


def noise_batch(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    """Keyword arguments of NEST's forward: random audio, and the same with noise."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.tensor(lengths)
    audio = 0.1 * torch.randn(len(lengths), max(lengths), generator=generator)
    audio *= torch.arange(max(lengths)) < length[:, None]
    noisy = audio + 0.02 * torch.randn(audio.shape, generator=generator)
    return {
        "input_signal": audio,
        "input_signal_length": length,
        "noisy_input_signal": noisy,
        "noisy_input_signal_length": length,
    }


def train_step(
    model: EncDecDenoiseMaskedTokenPredModel,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    world: World | None = None,
    compile: str = "auto",
    autocast: torch.dtype | None = None,
    no_graphs: str | None = None,
    **options: Any,
) -> TrainStep:
    """Training steps of `model`; without an optimizer they leave gradients and change no weight."""
    engine = accelerate(model, compile=compile, autocast=autocast, no_graphs=no_graphs)
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    return TrainStep(model, engine, optimizer, None, world or World(), Watch(), **options)


def train_on(
    step: TrainStep,
    batch: Batch,
    *,
    begins: bool = True,
    updates: bool = True,
    planned: int | None = None,
    **options: Any,
) -> Tensor:
    """Train on a batch that is on its device; the loss."""
    audio, audio_len, noisy, noisy_len = batch
    made = AudioNoiseBatch(
        audio=audio, audio_len=audio_len, noisy_audio=noisy, noisy_audio_len=noisy_len, planned_samples=planned
    )
    return step(made, begins=begins, updates=updates, step=0, **options).loss.clone()


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
