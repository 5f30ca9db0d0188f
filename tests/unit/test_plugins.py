"""Registering things from outside the package, and finding those of installed packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nest_ssl import plugins
from nest_ssl.plugins import PluginError, Registry


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with an installed package `nest-extra`, whose entry point names the module nest_extra."""
    info = tmp_path / "nest_extra-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nest-extra\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[nest_ssl.plugins]\nextra = nest_extra\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.load_entry_points.cache_clear()
    yield tmp_path
    plugins.load_entry_points.cache_clear()
    sys.modules.pop("nest_extra", None)


def test_a_registered_thing_is_found_by_its_name() -> None:
    registry = Registry("augmentation")
    registry.register("mine", dict)
    registry.register("mine", dict)
    assert registry.find("mine") is dict
    assert registry.find("other") is None
    assert registry.names() == ["mine"]


def test_a_name_is_given_once() -> None:
    registry = Registry("augmentation")
    registry.register("mine", dict)
    with pytest.raises(PluginError, match="augmentation 'mine': the name is taken by <class 'dict'>"):
        registry.register("mine", list)


def test_a_built_in_name_cannot_be_replaced() -> None:
    registry = Registry("optimizer")
    registry.register("adamw", dict)
    with pytest.raises(PluginError, match="optimizer 'adamw': nest-ssl has its own"):
        registry.find("adamw", built_in={"adamw"})


@pytest.mark.parametrize(("name", "thing"), [("", dict), ("mine", 3)])
def test_only_classes_and_functions_with_a_name_are_taken(name: str, thing: object) -> None:
    with pytest.raises(PluginError):
        Registry("augmentation").register(name, thing)  # type: ignore[arg-type]


def test_an_installed_package_is_imported_when_a_name_is_not_known(installed: Path) -> None:
    (installed / "nest_extra.py").write_text(
        "from nest_ssl.plugins import register_schedule\nregister_schedule('test_plugins.extra', dict)\n"
    )
    assert "nest_extra" not in sys.modules
    assert plugins.schedules.find("test_plugins.extra") is dict


def test_a_plugin_that_fails_is_named_with_its_package(installed: Path) -> None:
    (installed / "nest_extra.py").write_text("import no_such_module_at_all\n")
    with pytest.raises(PluginError, match=r"'extra' \(package nest-extra 1.2\): nest_extra: ModuleNotFoundError: "):
        plugins.schedules.find("unknown")


def test_an_entry_point_names_a_module(installed: Path) -> None:
    (installed / "nest_extra.py").write_text("def register() -> None: ...\n")
    (installed / "nest_extra-1.2.dist-info" / "entry_points.txt").write_text(
        "[nest_ssl.plugins]\nextra = nest_extra:register\n"
    )
    with pytest.raises(PluginError, match="is not a module"):
        plugins.schedules.find("unknown")
