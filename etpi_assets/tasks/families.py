"""Look-up of suite families by name: modules of `etpi_assets.tasks` or `etpi_assets.worlds` that define `FAMILY`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from etpi_assets.specs.load import SpecError
from etpi_assets.tasks.family import Family

PACKAGES = ("etpi_assets.tasks", "etpi_assets.worlds")


def load_family(name: str) -> Family:
    """Return the family of this name. Raises SpecError, which lists the known names, if there is none."""
    for module in (f"{package}.{name}" for package in PACKAGES):
        if name.isidentifier() and find_spec(module) is not None:
            family = getattr(import_module(module), "FAMILY", None)
            if family is not None:
                return family
    raise SpecError(f"family = {name!r}: no such suite family; there are {', '.join(known_families())}")


def known_families() -> list[str]:
    """Return the names that `load_family` takes."""
    folders = [Path(location) for package in PACKAGES for location in import_module(package).__path__]
    entries = [entry for folder in folders for entry in folder.iterdir()]
    modules = [p for p in entries if p.suffix == ".py" or (p / "__init__.py").is_file()]
    return sorted(p.stem for p in modules if "\nFAMILY" in _source(p))


def _source(module: Path) -> str:
    return (module / "__init__.py" if module.is_dir() else module).read_text(encoding="utf-8")
