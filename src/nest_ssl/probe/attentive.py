"""The attentive head: weighted layers, attentive statistics over time, an embedding, classes.

ECAPA's head, as NeMo's multi-layer speaker models use it; the encoder is frozen or trained too.
B batch, L layers, D width, S frames, A attention width, E embedding, C classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.config.checks import Range
from nest_ssl.layer_features import layer_outputs, pad_waveforms
from nest_ssl.model import EncDecMaskedTokenPredModel
from nest_ssl.probe.data import Example, Noise, length_sorted, read_batches

ATTENTION_WIDTH, EMBEDDING_WIDTH = 128, 192
"""The widths of ECAPA-TDNN."""
_VARIANCE_FLOOR = 1e-6


@dataclass(frozen=True)
class TrainingOptions:
    """How the head, and with `finetune` the encoder too, is trained."""

    finetune: bool = False
    epochs: int = 20
    lr: float = 1e-3
    """Learning rate of the head."""
    encoder_lr: float = 1e-4
    batch_s: float = 60.0
    """Seconds of audio per step."""
    warmup_share: float = 0.1
    """Share of all steps; the learning rates decay to zero over the rest."""

    def __post_init__(self) -> None:
        Range(0, above=True).check("--lr", self.lr)
        Range(0, above=True).check("--encoder-lr", self.encoder_lr)


class AttentiveStatistics(nn.Module):
    """(B, D, S) to (B, 2D): mean and std over time, each channel weighted by its own attention over the frames."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.context = nn.Conv1d(3 * width, ATTENTION_WIDTH, 1)
        self.norm = nn.LayerNorm(ATTENTION_WIDTH)
        self.attention = nn.Conv1d(ATTENTION_WIDTH, width, 1)

    def forward(self, x_BDS: Tensor, length: Tensor) -> Tensor:
        valid_B1S = (torch.arange(x_BDS.shape[2], device=x_BDS.device) < length[:, None])[:, None]
        equal_B1S = valid_B1S / length.clamp(min=1)[:, None, None]
        mean_BD, std_BD = _weighted_statistics(x_BDS, equal_B1S)
        whole = torch.cat((mean_BD, std_BD), dim=1)[:, :, None].expand(-1, -1, x_BDS.shape[2])
        hidden_BAS = F.relu(self.context(torch.cat((x_BDS, whole), dim=1)))
        hidden_BAS = self.norm(hidden_BAS.transpose(1, 2)).tanh().transpose(1, 2)
        scores_BDS = self.attention(hidden_BAS).masked_fill(~valid_B1S, -torch.inf)
        # An utterance without frames has nothing to attend to: zero weights instead of NaN.
        weights_BDS = torch.where(valid_B1S, scores_BDS.softmax(2).nan_to_num(0.0), 0.0)
        return torch.cat(_weighted_statistics(x_BDS, weights_BDS), dim=1)


def _weighted_statistics(x_BDS: Tensor, weights_BDS: Tensor) -> tuple[Tensor, Tensor]:
    mean_BD = (x_BDS * weights_BDS).sum(2)
    variance_BD = ((x_BDS - mean_BD[:, :, None]).square() * weights_BDS).sum(2)
    return mean_BD, variance_BD.clamp(min=_VARIANCE_FLOOR).sqrt()


class AttentiveHead(nn.Module):
    """Layer outputs (B, D, S) to logits (B, C)."""

    def __init__(self, num_layers: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.layer_logits_L = nn.Parameter(torch.zeros(num_layers))
        self.pool = AttentiveStatistics(width)
        self.norm = nn.BatchNorm1d(2 * width)
        self.embedding = nn.Linear(2 * width, EMBEDDING_WIDTH)
        self.embedding_norm = nn.BatchNorm1d(EMBEDDING_WIDTH)
        self.classes = nn.Linear(EMBEDDING_WIDTH, num_classes)

    @property
    def layer_weights(self) -> list[float]:
        weights: list[float] = self.layer_logits_L.detach().softmax(0).tolist()
        return weights

    def forward(self, layers: Sequence[Tensor], length: Tensor) -> Tensor:
        x_BDS = torch.einsum("lbds,l->bds", torch.stack(list(layers)), self.layer_logits_L.softmax(0))
        embedding_BE = self.embedding(self.norm(self.pool(x_BDS, length)))
        logits_BC: Tensor = self.classes(self.embedding_norm(embedding_BE))
        return logits_BC


class Classifier(nn.Module):
    """A pre-trained encoder with an attentive head."""

    def __init__(self, model: EncDecMaskedTokenPredModel, layers: list[int], num_classes: int, finetune: bool) -> None:
        super().__init__()
        self.model = copy.deepcopy(model) if finetune else model
        self.layers, self.finetune = layers, finetune
        cfg = model.cfg.encoder
        width = cfg.feat_out if cfg.feat_out > 0 else cfg.d_model
        self.head = AttentiveHead(len(layers), width, num_classes)

    def train(self, mode: bool = True) -> Classifier:
        super().train(mode)
        self.model.train(mode and self.finetune)  # a frozen encoder runs without dropout in training too
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()  # statistics from pre-training are better than those of a few batches
        return self

    def forward(self, samples_BN: Tensor, length: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.finetune and torch.is_grad_enabled()):
            mels_BMT, num_mels = self.model.preprocessor(input_signal=samples_BN, length=length)
            outputs, num_frames = layer_outputs(self.model.encoder, mels_BMT, num_mels, self.layers)
        logits_BC: Tensor = self.head([x_BDS.float() for x_BDS in outputs], num_frames)
        return logits_BC


def _at_least_two(batches: list[list[int]]) -> list[list[int]]:
    """Join each batch of one with its neighbours in length: batch norm needs at least two utterances."""
    out: list[list[int]] = []
    for batch in batches:
        if out and (len(out[-1]) == 1 or (len(batch) == 1 and batch is batches[-1])):
            out[-1] = out[-1] + batch
        else:
            out.append(batch)
    return out


def train_classifier(
    net: Classifier,
    examples: list[Example],
    labels_N: Tensor,
    options: TrainingOptions,
    *,
    seed: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Train with AdamW on batches of similar length in random order; the same seed gives the same result."""
    device = next(net.head.parameters()).device
    groups = [{"params": list(net.head.parameters()), "lr": options.lr}]
    if options.finetune:
        groups.append({"params": list(net.model.encoder.parameters()), "lr": options.encoder_lr})
    optimizer = torch.optim.AdamW(groups, weight_decay=1e-2)
    batches = _at_least_two(length_sorted(examples, options.batch_s))
    total = options.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, total, options.warmup_share))
    net.train()
    rng = np.random.default_rng(seed)
    for epoch in range(options.epochs):
        order = [batches[place] for place in rng.permutation(len(batches))]
        for step, (indices, samples_BN, length) in enumerate(_on_device(examples, order, net, None, device)):
            logits_BC = _finite(net(samples_BN, length))
            loss = F.cross_entropy(logits_BC, labels_N[indices].to(device), label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
            schedule.step()
            report(epoch * len(batches) + step + 1, total)
    net.eval()


def _finite(logits_BC: Tensor) -> Tensor:
    if not logits_BC.isfinite().all():
        raise ValueError("the loss is not finite: the classifier has diverged. Lower --lr, or --encoder-lr.")
    return logits_BC


def _rate(step: int, total: int, warmup_share: float) -> float:
    warmup = max(1, int(warmup_share * total))
    return (step + 1) / warmup if step < warmup else (total - step) / max(1, total - warmup)


@torch.inference_mode()
def classify(net: Classifier, examples: list[Example], noise: Noise | None, batch_s: float) -> NDArray[np.int64]:
    """The predicted class of each example."""
    device = next(net.head.parameters()).device
    predicted = np.zeros(len(examples), np.int64)
    for indices, samples_BN, length in _on_device(examples, length_sorted(examples, batch_s), net, noise, device):
        predicted[indices] = _finite(net(samples_BN, length)).argmax(1).cpu().numpy()
    return predicted


def _on_device(
    examples: list[Example], batches: list[list[int]], net: Classifier, noise: Noise | None, device: torch.device
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    sample_rate = net.model.cfg.preprocessor.sample_rate
    for indices, waveforms in read_batches(examples, batches, sample_rate, noise):
        samples_BN, length = pad_waveforms(waveforms)
        yield indices, samples_BN.to(device), length.to(device)
