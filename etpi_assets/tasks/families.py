"""Finding a suite family by its name.

Belongs here: the lookup. Does not belong here: any family, each a module of this package with a `FAMILY`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from etpi_assets.specs.load import SpecError
from etpi_assets.tasks.family import Family


def load_family(name: str) -> Family:
    """The family a suite's `family` names; SpecError lists the known ones where there is none."""
    module = f"{__package__}.{name}"
    if name.isidentifier() and find_spec(module) is not None:
        family = getattr(import_module(module), "FAMILY", None)
        if family is not None:
            return family
    raise SpecError(f"family = {name!r}: no such suite family; there are {', '.join(known_families())}")


def known_families() -> list[str]:
    """The names that `load_family` takes."""
    modules = [p for p in Path(__file__).parent.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()]
    return sorted(p.stem for p in modules if "\nFAMILY" in _source(p))


def _source(module: Path) -> str:
    return (module / "__init__.py" if module.is_dir() else module).read_text(encoding="utf-8")
