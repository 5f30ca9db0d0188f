"""Starting weights from another model, with NeMo's keys: a path, or a mapping with `include` and `exclude`."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nest_ssl.checkpoint.read import hub_file, local_path, read_checkpoint
from nest_ssl.config import NestConfig
from nest_ssl.config.checks import quoted, short
from nest_ssl.nemo_file import GIVEN, CheckpointError, NemoFile, check_values

log = logging.getLogger(__name__)

KEYS = ("init_from_nemo_model", "init_from_ptl_ckpt", "init_from_pretrained_model")
OPTIONS = {"path", "name", "include", "exclude"}
"""Of one source."""


@dataclass
class Initialized:
    """What was loaded from one source."""

    source: str
    loaded: list[str]
    excluded: list[str]
    not_in_source: list[str]
    not_in_model: list[str]
    other_shape: list[str]


def maybe_init_from_pretrained_checkpoint(model: nn.Module, cfg: NestConfig) -> list[Initialized]:
    """Load what `cfg` asks for, and log what was and was not loaded."""
    given = [key for key in KEYS if getattr(cfg, key) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given; use only one of them.")
    if not given:
        return []
    key = given[0]
    results = [_initialize(model, key, name, options) for name, options in _sources(key, getattr(cfg, key))]
    for result in results:
        log.info("%s", describe(result))
    return results


def describe(result: Initialized) -> str:
    """A table of what was and was not loaded."""
    rows = [
        ("loaded", result.loaded),
        ("left out by include/exclude", result.excluded),
        ("missing in the file, left unchanged", result.not_in_source),
        ("in the file, but not in the model", result.not_in_model),
        ("of a different shape, left unchanged", result.other_shape),
    ]
    lines = [f"starting weights from {result.source}:"]
    for what, names in rows:
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        lines.append(f"  {len(names):5d} {what}{f': {shown}' if names and what != 'loaded' else ''}")
    return "\n".join(lines)


def _sources(key: str, value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Each source: path or name on the hub, and options."""
    if isinstance(value, str):
        return [(value, {})]
    out = []
    for label, options in value.items():
        name = options.get("path") or options.get("name") if isinstance(options, dict) else None
        if name is None:
            raise ValueError(f"{key}.{label}: expected a mapping with 'path' or 'name', 'include', 'exclude'.")
        for unknown in options.keys() - OPTIONS:
            raise ValueError(f"{key}.{label}: there is no {quoted(unknown)}. Known: {', '.join(sorted(OPTIONS))}.")
        out.append((str(name), options))
    return out


def _initialize(model: nn.Module, key: str, name: str, options: dict[str, Any]) -> Initialized:
    path, content = _read(key, name)
    weights, rate = content.weights, content.config.get("sample_rate")
    own_rate = getattr(getattr(model, "cfg", None), "sample_rate", rate)
    if rate not in (None, own_rate):
        log.warning("%s: these weights were trained on audio of %s Hz; model.sample_rate is %s.", path, rate, own_rate)
    include, exclude = (_list(f"{key}: {part}", options.get(part)) for part in ("include", "exclude"))
    for part in (*include, *exclude):
        if not any(part in parameter for parameter in weights):
            log.warning("%s: no weight of %s has %s in its name.", key, path, quoted(part))
    own = model.state_dict()
    result = Initialized(str(path), [], [], [], [], [])
    chosen: dict[str, Tensor] = {}
    for parameter, value in weights.items():
        wanted = (not include or any(part in parameter for part in include)) and not any(
            part in parameter for part in exclude
        )
        if parameter not in own:
            result.not_in_model.append(parameter)
        elif not wanted:
            result.excluded.append(parameter)
        elif own[parameter].shape != value.shape:
            result.other_shape.append(parameter)
        elif parameter.endswith(tuple(GIVEN)):
            result.loaded.append(parameter)  # as the configuration says, not as the file does
        else:
            chosen[parameter] = value
    result.not_in_source = sorted(own.keys() - weights.keys())
    result.loaded += chosen
    if not chosen:
        chosen_by = f" with include {include} and exclude {exclude}" if result.excluded else ""
        raise CheckpointError(f"{key}: nothing in {path}{chosen_by} fits the model.\n{describe(result)}")
    _check_encoder_fits(key, result, weights, own)
    check_values(chosen, own, str(path))
    model.load_state_dict(chosen, strict=False)
    return result


def _check_encoder_fits(key: str, found: Initialized, weights: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Refuse an encoder of another width: most of it would start at random, which nobody asks for by naming a file."""
    loaded, other = ([name for name in names if name[:8] == "encoder."] for names in (found.loaded, found.other_shape))
    if sum(own[name].numel() for name in other) > sum(own[name].numel() for name in loaded):
        raise CheckpointError(
            f"{key}: {found.source}: most of its encoder has other shapes than the model's: {other[0]} has "
            f"{[*weights[other[0]].shape]}, not {[*own[other[0]].shape]}. Use its sizes ('nest-ssl info' shows them), "
            f"or leave out what does not fit: '{key}={{a: {{path: {found.source}, exclude: [encoder.layers, …]}}}}'."
        )


def _list(key: str, value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key}: {short(value)} is not a list of names, or of parts of them.")
    return names


def _read(key: str, name: str) -> tuple[Path, NemoFile]:
    try:
        path = local_path(name)
        if key == "init_from_pretrained_model" and not os.path.lexists(path):
            path = hub_file(name)
        return path, read_checkpoint(path)
    except ValueError as error:
        raise CheckpointError(f"{key}: {error}") from error
