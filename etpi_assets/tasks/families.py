"""Look-up of suite families by name: shipped modules with a `FAMILY`, and plugins."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from etpi_assets.planning.versions import WORLDS
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.plugins import plugin, plugin_names, unknown
from etpi_assets.tasks.family import Family

SHIPPED: Mapping[str, str] = {
    **dict.fromkeys(("answers", "cooperbench", "harbor", "r2e", "swe_bench"), "etpi_assets.tasks"),
    **dict.fromkeys(WORLDS, "etpi_assets.worlds"),
}
"""Family -> the package of its module."""


def load_family(name: str) -> Family:
    """Return the family of this name.

    Raises:
        SpecError: there is none, and the message lists the known names; or a plugin cannot be used.
    """
    if named := plugin("family", name, SHIPPED):
        return named.load()
    if name not in SHIPPED:
        raise SpecError(f"family: {unknown('family', name, SHIPPED)}")
    return import_module(f"{SHIPPED[name]}.{name}").FAMILY


def known_families() -> list[str]:
    """Return the names that `load_family` takes."""
    return sorted({*SHIPPED, *plugin_names("family")})
