"""Means over an epoch, which a run that is resumed in the middle of one goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class EpochMeans:
    """Weighted means; nothing is read back from the device before they are asked for."""

    def __init__(self) -> None:
        self._epoch, self._weight = -1, 0
        self._sums: dict[str, Tensor] = {}

    def add(self, epoch: int, values: Mapping[str, Tensor], weight: int) -> None:
        """Values of a step of `epoch`; those of another epoch are forgotten."""
        if epoch != self._epoch:
            self._epoch, self._weight, self._sums = epoch, 0, {}
        self._weight += weight
        for name, value in values.items():
            weighted = value.float() * weight
            self._sums[name] = weighted + self._sums[name].to(value.device) if name in self._sums else weighted

    def means(self) -> dict[str, Tensor]:
        return {name: total / self._weight for name, total in self._sums.items()}

    def state(self) -> dict[str, Any]:
        sums = {name: total.cpu() for name, total in self._sums.items()}
        return {"epoch": self._epoch, "weight": self._weight, "sums": sums}

    def resume(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._weight, self._sums = state["epoch"], state["weight"], dict(state["sums"])
