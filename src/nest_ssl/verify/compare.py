"""A model file compared with NeMo, stage by stage; the result as a table, and as a page in Markdown.

As a program in an interpreter with NeMo, this file computes NeMo's numbers: `python compare.py
MODEL.nemo OUT.npz`. That interpreter need not have this package, so only functions import from it.
"""

from __future__ import annotations

import datetime
import importlib.util
import platform
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

if TYPE_CHECKING:
    from nest_ssl.model import EncDecMaskedTokenPredModel

Numbers = dict[str, Any]

SAMPLES = (26_345, 24_000, 17_007)

# Allowed differences: float32 rounding through the whole stack.
MEL_TOLERANCE, LAYER_TOLERANCE, LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-4, 1e-5, 1e-3


@dataclass
class Check:
    """One comparison."""

    stage: str
    what: str
    difference: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed


@dataclass
class Verification:
    """The outcome of `verify`."""

    file: str
    against: str
    """What the file was compared with; empty if nothing was available."""
    checks: list[Check]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def verify(path: Path, recorded: Path | None = None, nemo_python: str | None = None) -> Verification:
    """Compare the model in `path` with NeMo's numbers.

    `recorded` is an `.npz` file of NeMo's numbers (with `batch.npz` next to it), `nemo_python` a Python with NeMo.
    If neither is given: numbers of the same name next to the file, or else this interpreter if it has NeMo; otherwise
    only the file itself is checked.
    """
    from nest_ssl.checkpoint import load

    model = load(path)
    if recorded is None and nemo_python is None:
        recorded = _beside(path)
    if recorded is not None:
        numbers, batch = _arrays(recorded), _recorded_batch(recorded)
        return Verification(str(path), f"numbers recorded from NeMo in {recorded.name}", compare(model, batch, numbers))
    nemo_python = nemo_python or (sys.executable if importlib.util.find_spec("nemo") else None)
    if nemo_python is not None:
        batch = audio_batch(model.cfg.sample_rate)
        return Verification(
            str(path), "NeMo, run on the same audio", compare(model, batch, ask_nemo(path, nemo_python))
        )
    return Verification(str(path), "", check_alone(model))


def compare(
    model: EncDecMaskedTokenPredModel, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], nemo: Numbers
) -> list[Check]:
    """One check per stage: its largest difference."""
    ours = stage_numbers(model, batch, _is_denoising(model))
    absent = sorted(key for key in ours if not key.startswith(("grad/", "mel_")) and key not in nemo)
    absent += sorted(key for key in nemo if key.startswith("layer_") and key not in ours)
    if absent:
        raise ValueError(f"the numbers belong to another model: only one side has {', '.join(absent[:5])}.")
    checks = [
        Check("preprocessor", f"log-mel, {name}", _largest(ours[key], nemo[key]), MEL_TOLERANCE)
        for name, key in (("clean", "mel_clean"), ("noisy", "mel_noisy"))
        if key in nemo
    ]
    checks.append(Check("preprocessor", "lengths", _largest(ours["mel_len"], nemo["mel_len"]), 0))
    checks.append(Check("quantizer", "tokens of valid frames that differ", _wrong_tokens(model, ours, nemo), 0))
    layers = sorted((key for key in nemo if key.startswith("layer_")), key=lambda key: int(key.split("_")[1]))
    checks += [
        Check("encoder", key.replace("_", " "), _largest(ours[key], nemo[key]), LAYER_TOLERANCE) for key in layers
    ]
    checks += [
        Check("encoder", "output", _largest(ours["encoded"], nemo["encoded"]), LAYER_TOLERANCE),
        Check("encoder", "lengths", _largest(ours["encoded_len"], nemo["encoded_len"]), 0),
        Check("decoder", "log-probabilities", _largest(ours["log_probs"], nemo["log_probs"]), LAYER_TOLERANCE),
        Check("loss", "masked tokens", _largest(ours["loss"], nemo["loss"]), LOSS_TOLERANCE),
        Check("training", "gradients, relative", _gradients(ours, nemo), GRADIENT_TOLERANCE),
    ]
    return checks


def check_alone(model: EncDecMaskedTokenPredModel) -> list[Check]:
    """Check a file without NeMo: finite weights, unit codes, NeMo's filterbank, finite outputs."""
    state = model.state_dict()
    broken = sum(int((~torch.isfinite(value)).sum()) for value in state.values() if value.is_floating_point())
    norms = model.quantizer.codebooks.detach().norm(dim=-1)
    fresh = type(model.preprocessor)(**vars(model.cfg.preprocessor)).state_dict()
    saved = model.preprocessor.state_dict()
    filterbank = max(_largest(value.numpy(), saved[key].numpy()) for key, value in fresh.items())
    batch = audio_batch(model.cfg.sample_rate)
    numbers = stage_numbers(model, batch, _is_denoising(model))
    unfinished = sum(int((~np.isfinite(value)).sum()) for value in numbers.values())
    return [
        Check("file", "weights that are not finite", broken, 0),
        Check("quantizer", "length of codes, distance from 1", float((norms - 1).abs().max()), 1e-6),
        Check("preprocessor", "window and filterbank, difference from ours", filterbank, 1e-6),
        Check("model", "outputs and gradients that are not finite", unfinished, 0),
    ]


def _is_denoising(model: EncDecMaskedTokenPredModel) -> bool:
    from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel

    return isinstance(model, EncDecDenoiseMaskedTokenPredModel)


def ask_nemo(path: Path, nemo_python: str) -> Numbers:
    """NeMo's numbers for the file, computed by an interpreter that has NeMo."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "nemo.npz"
        command = [nemo_python, __file__, str(path.absolute()), str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ValueError(f"{nemo_python}: cannot be run as an interpreter: {error.strerror}.") from error
        if done.returncode != 0 or not out.is_file():
            last_line = (done.stderr.strip() or "no output").splitlines()[-1]
            raise RuntimeError(
                f"{path}: NeMo could not run it (exit code {done.returncode}): {last_line} ({nemo_python})"
            )
        return _arrays(out)


def _beside(path: Path) -> Path | None:
    candidate = path.with_suffix(".npz")
    return candidate if candidate.is_file() and (path.parent / "batch.npz").is_file() else None


def _recorded_batch(recorded: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    path = recorded.parent / "batch.npz"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; the recorded numbers need the audio they were computed from.")
    arrays = _arrays(path)
    absent = {"audio", "noisy", "audio_len"} - arrays.keys()
    if absent:
        raise ValueError(f"{path}: has no {', '.join(sorted(absent))}.")
    clean, noisy, lengths = (torch.from_numpy(arrays[key]) for key in ("audio", "noisy", "audio_len"))
    return clean, noisy, lengths


def _arrays(path: Path) -> Numbers:
    """Read the arrays in an `.npz` file."""
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file.") from None
    except (OSError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not an .npz file of numbers.") from error


def _largest(ours: NDArray[Any], nemo: NDArray[Any]) -> float:
    if ours.shape != nemo.shape:
        return float("inf")
    return float(np.abs(ours.astype(np.float64) - nemo).max()) if ours.size else 0.0


def _wrong_tokens(model: EncDecMaskedTokenPredModel, ours: Numbers, nemo: Numbers) -> int:
    """Tokens that differ where there is audio; in the padding, NeMo's are ties of a zero vector."""
    if ours["tokens"].shape != nemo["tokens"].shape:
        return int(nemo["tokens"].size)
    post_conv = model.pre_encoder is not None
    valid = nemo["encoded_len"] if post_conv else nemo["mel_len"] // model.quantizer.cfg.combine_time_steps
    return sum(
        int((ours["tokens"][row, :length] != nemo["tokens"][row, :length]).sum()) for row, length in enumerate(valid)
    )


def _gradients(ours: Numbers, nemo: Numbers) -> float:
    """The largest difference of a gradient, relative to its norm or to a thousandth of the largest norm."""
    names = {key for key in nemo if key.startswith("grad/")}
    if names != {key for key in ours if key.startswith("grad/")}:
        return float("inf")
    if any(ours[name].shape != nemo[name].shape for name in names):
        return float("inf")
    norms = {name: float(np.linalg.norm(nemo[name])) for name in names}
    least = 1e-3 * max(norms.values(), default=0.0) + 1e-30
    differences = (float(np.linalg.norm(ours[name] - nemo[name])) / max(norms[name], least) for name in names)
    return max(differences, default=0.0)


def write_report(path: Path, results: list[Verification]) -> None:
    """Write the page: what was measured, what equals NeMo, and what differs on purpose."""
    from nest_ssl.files import replace_text

    alignment = resources.files("nest_ssl.verify").joinpath("alignment.md").read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, alignment.replace("{measured}", measured(results)))


def measured(results: list[Verification]) -> str:
    """The tables for all verified files."""
    from nest_ssl._version import __version__

    versions = f"nest-ssl {__version__}, torch {torch.__version__}, numpy {np.__version__}, {platform.machine()}"
    parts = [f"Written by `nest-ssl verify --report` on {datetime.date.today()} with {versions}."]
    parts += [file_table(result) for result in results]
    return "\n\n".join(parts)


def file_table(result: Verification) -> str:
    against = f"compared with {result.against}" if result.against else "checked without NeMo's numbers"
    lines = [
        f"**`{Path(result.file).name}`**, {against}:",
        "",
        "| stage | what | largest difference | allowed | |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.stage} | {c.what} | {c.difference:.2g} | {c.allowed:g} | {'ok' if c.passed else '**differs**'} |"
        for c in result.checks
    ]
    return "\n".join(lines)


# ---- the numbers of every stage, through the interface that NeMo's model and ours share ----


def audio_batch(sample_rate: int = 16_000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clean and noisy audio (B, N) and lengths (B,): sweeps in noise, the same on every machine."""
    random = np.random.RandomState(11)
    lengths = np.array(SAMPLES)
    seconds = np.arange(lengths.max()) / sample_rate
    sweeps = np.stack([np.sin(2 * np.pi * f * seconds * (1 + 0.3 * seconds)) for f in (180.0, 320.0, 95.0)])
    clean = 0.2 * sweeps + 0.02 * random.randn(*sweeps.shape)
    clean *= np.arange(lengths.max()) < lengths[:, None]
    noisy = clean + 0.05 * random.randn(*sweeps.shape)
    return torch.tensor(clean).float(), torch.tensor(noisy).float(), torch.tensor(lengths)


def stage_numbers(model: Any, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], denoising: bool) -> Numbers:
    """Features, tokens, every layer, log-probabilities, loss and gradients of `model`."""
    clean, noisy, lengths = batch
    inputs: dict[str, Any] = {"input_signal": clean, "input_signal_length": lengths}
    if denoising:
        inputs |= {"noisy_input_signal": noisy, "noisy_input_signal_length": lengths}
        inputs |= {"noise_signal": noisy, "noise_signal_length": lengths}
    out: Numbers = {}
    model.eval()
    with torch.no_grad():
        out["mel_clean"], out["mel_len"] = model.preprocessor(input_signal=clean, length=lengths)
        out["mel_noisy"], _ = model.preprocessor(input_signal=noisy, length=lengths)
        hooks = [
            layer.register_forward_hook(lambda _m, _i, o, i=i: out.__setitem__(f"layer_{i}", o))
            for i, layer in enumerate(model.encoder.layers)
        ]
        log_probs, encoded_len, masks, tokens = model(**inputs, apply_mask=False)
        for hook in hooks:
            hook.remove()
        out["encoded"], _ = model.encoder(audio_signal=out["mel_noisy"], length=out["mel_len"])
    out |= {"log_probs": log_probs, "encoded_len": encoded_len, "tokens": tokens}
    mask = fixed_mask(model, masks, tokens)
    with torch.no_grad():
        out["loss"] = masked_loss(model, mask, log_probs, tokens, encoded_len)
    silence_randomness(model)
    model.train()
    model.preprocessor.eval()  # no dither
    model.zero_grad()
    log_probs, encoded_len, _, tokens = model(**inputs, apply_mask=False)
    masked_loss(model, mask, log_probs, tokens, encoded_len).backward()
    out |= {f"grad/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {key: value.detach().cpu().numpy() for key, value in out.items()}


def fixed_mask(model: Any, masks: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A mask (B, 1, T) over six tokens of each row: all that the loss needs."""
    frames = masks.shape[2]
    if model.pre_encoder is not None:
        frames = tokens.shape[1]  # NeMo 2.7.3 returns (B, T, D) here, but its loss expects (B, D, T)
    per_token = max(1, frames // tokens.shape[1])
    mask = torch.zeros(masks.shape[0], 1, frames)
    for row, start in enumerate((1, 5, 2)):
        mask[row, :, start * per_token : (start + 6) * per_token] = 1.0
    return mask


def masked_loss(model: Any, mask: Any, log_probs: Any, tokens: Any, encoded_len: Any) -> Any:
    # Causal subsampling can give one frame more than there are tokens; NeMo 2.7.3's loss then raises.
    return model.loss(
        masks=mask, decoder_outputs=log_probs[:, : tokens.shape[1]], targets=tokens, decoder_lengths=encoded_len
    )


def silence_randomness(model: Any) -> None:
    """Disable dropout and stochastic depth, so that two programs can be compared in training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.encoder.layer_drop_probs = [0.0] * len(model.encoder.layers)


def save_nemo_numbers(path: str, out: str) -> None:
    """Compute the numbers of a file with NeMo, and write them to `out`."""
    from nemo.collections.asr.models.ssl_models import EncDecDenoiseMaskedTokenPredModel, EncDecMaskedTokenPredModel
    from nemo.core.classes import ModelPT

    config = ModelPT.restore_from(path, return_config=True)
    denoising = str(config.target).endswith("EncDecDenoiseMaskedTokenPredModel")
    kind = EncDecDenoiseMaskedTokenPredModel if denoising else EncDecMaskedTokenPredModel
    model = kind.restore_from(path, map_location="cpu")
    if model.pre_encoder is not None:
        # NeMo 2.7.3 passes (B, D, T) to a module that expects (B, T, D) and raises; compare with what was intended.
        subsample, mels = model.pre_encoder.pre_encode, model.cfg.preprocessor.features
        forward = subsample.forward
        subsample.forward = lambda x, lengths: forward(x if x.shape[2] == mels else x.transpose(1, 2), lengths)
    np.savez(out, **stage_numbers(model, audio_batch(model.cfg.sample_rate), denoising))


if __name__ == "__main__":
    save_nemo_numbers(sys.argv[1], sys.argv[2])
