"""Validation: every set, on every rank its share, and one sum over all ranks at the end."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nest_ssl.config import DatasetConfig, TrainerConfig
from nest_ssl.config.checks import printable
from nest_ssl.config.parsing import MISSING
from nest_ssl.data.randomness import Use, seed_everything
from nest_ssl.training.metrics import VALIDATION_METRICS, TokenCounts, count_tokens
from nest_ssl.training.sharding import is_sharded

if TYPE_CHECKING:
    from nest_ssl.data import PlannedLoader
    from nest_ssl.fast.engine import Engine
    from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
    from nest_ssl.objective import MaskedPrediction
    from nest_ssl.training.parallel import World
    from nest_ssl.training.watching import Watch

log = logging.getLogger(__name__)


def validation_sets(config: DatasetConfig | None) -> dict[str, DatasetConfig]:
    """The validation sets by name; empty when no data is given. A set alone has no name.

    A list of manifests is one set each, as in NeMo. Manifests joined by commas, or mixed by `is_concat`, are one set,
    and so is a registered source.
    """
    if config is None or not has_data(config):
        return {}
    manifests = config.manifest_filepath
    if not isinstance(manifests, list) or len(manifests) == 1 or config.source is not None:
        return {"": config}
    if config.is_concat or config.bucketing_batch_size:
        return {"": config}
    tars = config.tarred_audio_filepaths
    if config.is_tarred and (not isinstance(tars, list) or len(tars) != len(manifests)):
        raise ValueError(
            f"validation_ds: {len(manifests)} manifests are as many validation sets, so tarred_audio_filepaths must be "
            f"a list of as many."
        )
    sets: dict[str, DatasetConfig] = {}
    for place, manifest in enumerate(manifests):
        first = manifest if isinstance(manifest, str) else manifest[0]
        name = printable(Path(first.split(",")[0]).stem)  # it becomes a column of metrics.csv
        if name in sets:
            name = f"{name}_{place}"
        sets[name] = dataclasses.replace(
            config,
            manifest_filepath=manifest if isinstance(manifest, str) else list(manifest),
            tarred_audio_filepaths=tars[place] if config.is_tarred and isinstance(tars, list) else None,
        )
    return sets


def has_data(config: DatasetConfig) -> bool:
    """Whether a dataset section names anything to read."""
    return config.manifest_filepath not in (None, MISSING) or config.use_lhotse or config.source is not None


class LeftEarlyError(Exception):
    """The job was asked to stop in the middle of a validation, and all ranks have left it."""


@dataclass
class Validation:
    """Runs the validation sets of a run."""

    model: EncDecDenoiseMaskedTokenPredModel
    engine: Engine
    loaders: Mapping[str, PlannedLoader]
    world: World
    watch: Watch
    config: TrainerConfig
    seed: int

    def run(self, most_batches: int | None = None) -> dict[str, float]:
        """The metrics over all ranks: `val_loss`, the mean of all batches as NeMo's, and more; of several sets each.

        `most_batches` per set instead of `trainer.limit_val_batches`. A stop that is asked for meanwhile ends it at
        the next batch, on every rank: LeftEarlyError.
        """
        self.model.eval()
        # Sharded weights would be gathered into inference tensors, which torch keeps and training may not change.
        inference = self.config.inference_mode and not is_sharded(self.model)
        without_gradients = torch.inference_mode if inference else torch.no_grad
        try:
            with self.watch.validating(), without_gradients():
                loaders = enumerate(self.loaders.values())
                return self._metrics([self._run_set(place, loader, most_batches) for place, loader in loaders])
        finally:
            self.model.train()

    def _run_set(self, place: int, loader: PlannedLoader, most_batches: int | None) -> _Sums:
        sums = _Sums(self.model, self.world.device)
        limit = self._num_batches(loader) if most_batches is None else most_batches
        for number, batch in enumerate(loader):
            if number >= limit:
                break
            if self.watch.stop_was_asked_for():
                sums.num_left_early += 1
                break
            self.watch.batch_arrives(batch)
            seed_everything(self.seed, Use.VALIDATION, place, number, self.world.rank)
            sums.add(self.engine.evaluate(batch.to(self.world.device, non_blocking=True).mixed().tensors()))
            self.watch.validation_batch_is_done()
        return sums

    def _num_batches(self, loader: PlannedLoader) -> float:
        limit = self.config.limit_val_batches
        if self.config.fast_dev_run:
            return int(self.config.fast_dev_run)
        if isinstance(limit, float) and limit < 1:
            if loader.batches.utterances_per_epoch() is None:
                raise ValueError(
                    "trainer.limit_val_batches: a share of data whose length is unknown. Give a number of batches."
                )
            return max(1, int(limit * len(loader)))
        return limit if isinstance(limit, int) else float("inf")

    def _metrics(self, sums: list[_Sums]) -> dict[str, float]:
        """All sums of all ranks travel in one collective."""
        packed = self.world.sum(torch.stack([own.packed() for own in sums]))
        for own, shared in zip(sums, packed, strict=True):
            own.unpack(shared)
        whole = _together(sums, self.model)
        if whole.num_left_early:
            raise LeftEarlyError
        named = dict(zip(self.loaders, sums, strict=True)) if len(sums) > 1 else {}
        metrics: dict[str, float] = {}
        for name, one in {"": whole, **named}.items():
            if one.num_batches and not one.tokens.masked:
                what = "the validation" if not name else f"the validation set {name}"
                log.warning(
                    "%s: no token was masked, so it has no val_loss, and no checkpoint is its best. Use longer "
                    "utterances, raise model.masking.mask_prob or block_size, or lower model.loss.mask_threshold.",
                    what,
                )
            elif one.num_batches:
                metrics |= {f"{name}_{key}" if name else key: value for key, value in one.metrics().items()}
        return metrics


class _Sums:
    """What is added up over batches, sets and ranks; in float64, so that the order does not matter."""

    def __init__(self, model: EncDecDenoiseMaskedTokenPredModel, device: torch.device) -> None:
        num_codes, num_books = model.cfg.decoder.num_classes, model.cfg.decoder.num_decoders
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=device)
        self.loss, self.num_batches, self.num_left_early = zeros(()), zeros(()), zeros(())
        self.tokens = TokenCounts(zeros(num_books), zeros(()), zeros(()), zeros(num_codes, num_books))

    def add(self, predicted: MaskedPrediction) -> None:
        self.loss = self.loss + predicted.loss
        self.num_batches = self.num_batches + 1
        self.tokens = self.tokens + count_tokens(predicted)

    def packed(self) -> Tensor:
        parts = (self.loss, self.num_batches, self.num_left_early, *vars(self.tokens).values())
        return torch.cat([part.reshape(-1) for part in parts])

    def unpack(self, packed: Tensor) -> None:
        parts = list(vars(self.tokens).values())
        self.loss, self.num_batches, self.num_left_early = packed[0], packed[1], packed[2]
        values = packed[3:].split([part.numel() for part in parts])
        self.tokens = TokenCounts(*(value.view_as(part) for value, part in zip(values, parts, strict=True)))

    def metrics(self) -> dict[str, float]:
        of_tokens = self.tokens.metrics()
        found = (self.loss / self.num_batches, of_tokens["accuracy"], of_tokens["most_frequent_token"])
        return dict(zip(VALIDATION_METRICS, torch.stack(found).float().tolist(), strict=True))


def _together(sums: list[_Sums], model: EncDecDenoiseMaskedTokenPredModel) -> _Sums:
    """All sets as one."""
    whole = _Sums(model, sums[0].loss.device)
    whole.unpack(torch.stack([one.packed() for one in sums]).sum(0))
    return whole
