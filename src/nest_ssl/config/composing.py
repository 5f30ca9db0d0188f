"""Turn a yaml and command-line overrides into a checked configuration. Hydra composes; OmegaConf ends here."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nest_ssl.config.checks import short
from nest_ssl.config.model_section import unused_keys
from nest_ssl.config.parsing import MISSING, ConfigError, check_sections, one_line, parse
from nest_ssl.config.training import NestConfig

log = logging.getLogger(__name__)

YAML_PACKAGE = "nest_ssl.config.yaml"
DEFAULT_CONFIG = "nest_fast-conformer"
MOST_NODES = 100_000
"""Values in a yaml: aliases of aliases of aliases would fill the memory."""


def yaml_folder() -> Path:
    """Return the folder of the packaged yaml files."""
    return Path(str(resources.files(YAML_PACKAGE)))


def embedded_configs() -> list[str]:
    """Return the names of the packaged configurations."""
    return sorted(path.stem for path in yaml_folder().glob("*.yaml"))


def compose(
    config_name: str = DEFAULT_CONFIG, overrides: Sequence[str] = (), config_path: str | Path | None = None
) -> NestConfig:
    """Return the configuration `config_name` from the folder `config_path` (None: the package's own), with overrides.

    Overrides are Hydra's. A key of the schema needs no `+`; a `+` on an existing key replaces its value.
    """
    folder = yaml_folder() if config_path is None else Path(config_path).expanduser().absolute()
    path = folder / f"{config_name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        there = next((one for one in (Path(config_name), folder) if one.is_file()), None)
        hint = f"Packaged configurations: {', '.join(embedded_configs())}."
        if there:
            hint = f"For {there} use '--config-path {there.parent} --config-name {there.stem}', and the ending .yaml."
        raise ConfigError(f"{path}: no such file. {hint}")
    folder, name = path.parent, path.stem  # Hydra would look for what it is based on in the folder of its name
    groups = {path.name for base in (folder, yaml_folder()) for path in base.iterdir() if path.is_dir()}
    listed, left_open = _groups_and_open_keys(folder / f"{name}.yaml")
    given = [_checked(_override(text, groups, listed), text, folder) for text in overrides]
    try:
        with hydra.initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            node = hydra.compose(name, overrides=[*given, f"hydra.searchpath=[pkg://{YAML_PACKAGE}]"])
        data = OmegaConf.to_container(node, resolve=True)
    except RecursionError as error:  # it is not nested too deeply: _groups_and_open_keys has read it
        circle = "leads in a circle: a file in its 'defaults:' list is based on itself, or a ${value} is"
        raise ConfigError(f"{name}.yaml: {circle}. Remove one of its links.") from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name}.yaml: {one_line(error)}") from error
    named = {text.lstrip("+~").partition("=")[0] for text in overrides}
    for key in left_open:
        value = _value_at(data, key)
        if value != MISSING and not any(f"{key}.".startswith(f"{one}.") for one in named):
            used = "null" if value is None else value
            log.warning("%s.yaml: %s: ??? stands for a value to be given. None was: %s is used.", name, key, used)
    try:
        return parse(NestConfig, data, unused=unused_keys())
    except ConfigError as error:
        raise ConfigError(_with_origin(str(error), node)) from error


def _with_origin(message: str, node: Any) -> str:
    """Return a message about a key, with the key that its value was taken from: that may be the one to change."""
    key, colon, rest = message.partition(": ")
    value = _value_at(OmegaConf.to_container(node, resolve=False), key)
    return f"{key} = {value}{colon}{rest}" if isinstance(value, str) and "${" in value else message


def _value_at(data: Any, key: str) -> Any:
    """Return the value of a dotted key; None: there is none."""
    for part in key.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def load_yaml(path: str | Path, overrides: Sequence[str] = ()) -> NestConfig:
    """Return the configuration in the file `path`, with overrides."""
    path = Path(path)
    return compose(path.name, overrides, path.parent)


def _groups_and_open_keys(path: Path) -> tuple[set[str], list[str]]:
    """Return the config groups in the defaults list of a yaml, and its keys whose values are to be given."""
    try:
        with path.open(encoding="utf-8") as file:
            root = yaml.compose(file, Loader=yaml.SafeLoader)
        if _num_nodes(root, {}) > MOST_NODES:
            raise ValueError(f"its aliases (*name) repeat their anchors (&name) more than {MOST_NODES:,} times")
        if not isinstance(root, yaml.MappingNode):  # OmegaConf takes a word for a key
            raise ConfigError(f"{path}: {'is empty' if root is None else 'expected a mapping of keys'}.")
        content = OmegaConf.to_container(OmegaConf.load(path))
    except ConfigError:
        raise
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{path}: not a readable yaml file: {one_line(error)}") from error
    assert isinstance(content, dict)
    if "hydra" in content:
        log.warning("%s: 'hydra:' has no effect: Hydra only composes the configuration here.", path)
    check_sections(NestConfig, content)
    entries = content.get("defaults") or []
    return {str(group) for entry in entries if isinstance(entry, dict) for group in entry}, list(_open_keys(content))


def _open_keys(section: Mapping[Any, Any], where: str = "") -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _open_keys(value, f"{where}{key}.")
        elif value == MISSING:
            yield f"{where}{key}"


def _num_nodes(node: Any, known: dict[int, float]) -> float:
    """Return how many values a yaml has once all aliases are replaced by what they stand for."""
    if id(node) not in known:
        known[id(node)] = math.inf  # what contains itself has no end
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = itertools.chain.from_iterable(one if isinstance(one, tuple) else (one,) for one in inner)
        known[id(node)] = 1 + sum(_num_nodes(part, known) for part in parts)
    return known[id(node)]


def _checked(override: str, text: str, folder: Path) -> str:
    """Return an override that Hydra can parse; `text` is what the user wrote."""
    try:
        parsed = OverridesParser.create().parse_override(override)
        value = parsed.value()
    except HydraException as error:
        key, _, value = text.lstrip("+").partition("=")
        if odd := re.search(r"[^\x20-\x7e]", key):  # pasted from a page or a chat
            raise ConfigError(f"override {text!a}: its key contains U+{ord(odd[0]):04X}. Type it again.") from error
        raise ConfigError(
            f"override {_shown(text)}: Hydra cannot read it. Text with one of {{}}[](),:= in it needs quotes: "
            f"'{key[:200]}=\"{short(value)}\"'"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"override {_shown(text)}: {one_line(error)}") from error
    if override.startswith("++"):
        at_root = functools.reduce(lambda inner, key: {key: inner}, reversed(parsed.key_or_group.split(".")), value)
        check_sections(NestConfig, at_root)
    if not override.startswith(("++", "~")) and not isinstance(value, (str, list)):
        raise ConfigError(f"override {_shown(text)}: expected the name of a file in {parsed.key_or_group}/.")
    if not override.startswith(("++", "~")) and isinstance(value, str):
        group = parsed.key_or_group
        choices = {path.stem for base in (folder, yaml_folder()) for path in (base / group).glob("*.yaml")}
        if value.removesuffix(".yaml") not in choices:
            raise ConfigError(f"{_shown(text)}: no such {group}. There are {', '.join(sorted(choices))}.")
    return override


def _shown(override: str) -> str:
    """Return an override on one line, with its whole key and as much of its value as there is room for."""
    key, equals, value = override.partition("=")
    return repr(f"{key[:200]}{equals}{short(value)}")


def _override(text: str, groups: set[str], listed: set[str]) -> str:
    """Return an override in Hydra's form, with `++` so that the key need not exist in the yaml."""
    key = text.lstrip("+").split("=", 1)[0]
    if key.lstrip("~").split(".")[0].split("/")[0] == "hydra":
        where = "exp_manager.explicit_log_dir=FOLDER" if ".dir" in key else "the keys of this program"
        raise ConfigError(
            f"{short(text)}: Hydra only composes the configuration here, so its own keys have no effect. Use {where}."
        )
    if text.startswith("~"):
        return text
    if key.split("@", 1)[0] in groups:
        return text.lstrip("+") if key in listed else f"+{text.lstrip('+')}"
    if "=" not in text:
        raise ConfigError(f"override {_shown(text)}: expected key=value.")
    value = text.split("=", 1)[1]
    if not value.isascii() and re.fullmatch(r"[^\s'\"\\{}\[\](),:=$]+", value):
        text = f"{key}='{value}'"  # Hydra reads letters other than ASCII only in quotes
    return f"++{text.lstrip('+')}"
