"""Look-up of suite families by name: modules of `etpi_assets.tasks` or `etpi_assets.worlds` that define `FAMILY`, and
plugins."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from etpi_assets.specs.load import SpecError
from etpi_assets.specs.plugins import plugin, plugin_names, unknown
from etpi_assets.tasks.family import Family

PACKAGES = ("etpi_assets.tasks", "etpi_assets.worlds")


def load_family(name: str) -> Family:
    """Return the family of this name.

    Raises:
        SpecError: there is none, and the message lists the known names; or a plugin cannot be used.
    """
    if named := plugin("family", name, _shipped()):
        return named.load()
    for module in (f"{package}.{name}" for package in PACKAGES):
        if name.isidentifier() and find_spec(module) is not None:
            family = getattr(import_module(module), "FAMILY", None)
            if family is not None:
                return family
    raise SpecError(f"family: {unknown('family', name, _shipped())}")


def known_families() -> list[str]:
    """Return the names that `load_family` takes."""
    return sorted({*_shipped(), *plugin_names("family")})


@cache
def _shipped() -> list[str]:
    folders = [Path(location) for package in PACKAGES for location in import_module(package).__path__]
    entries = [entry for folder in folders for entry in folder.iterdir()]
    modules = [p for p in entries if p.suffix == ".py" or (p / "__init__.py").is_file()]
    return sorted(p.stem for p in modules if "\nFAMILY" in _source(p))


def _source(module: Path) -> str:
    return (module / "__init__.py" if module.is_dir() else module).read_text(encoding="utf-8")
