"""Code of other distributions that specs name, found through entry points (docs/own_tasks.md).

A plugin is a function or an object in an installed distribution. Its module is imported when a spec first uses it, not
before, so a broken plugin stops only what names it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from etpi_assets.specs.section import SpecError

GROUPS = {
    "family": "etpi.families",
    "reward": "etpi.rewards",
    "format": "etpi.importers",
    "export": "etpi.exports",
    "engine": "etpi.engines",
}
"""Kind of plugin -> group of entry points."""


@dataclass(frozen=True)
class Plugin:
    """One entry point.

    Attributes:
        kind: a key of GROUPS.
        name: what specs call it.
        distribution: the name and version of the distribution that gives it.
        module, attribute: where it is.
    """

    kind: str
    name: str
    distribution: str
    module: str
    attribute: str

    def load(self) -> Any:
        """Import the plugin and return its object.

        Raises SpecError: it cannot be imported, or its module lacks the attribute.
        """
        point = EntryPoint(self.name, f"{self.module}:{self.attribute}", GROUPS[self.kind])
        try:
            return point.load()
        except Exception as error:  # a plugin may fail in any way
            raise SpecError(
                f"the {self.kind} {self.name!r} of {self.distribution} cannot be imported from {self.module}: "
                f"{type(error).__name__}: {error}"
            ) from error

    @property
    def root(self) -> Path:
        """The folder that holds the plugin's top-level package or module.

        Raises SpecError: there is no such package.
        """
        spec = find_spec(self.module.split(".")[0])
        locations = list(spec.submodule_search_locations or ()) if spec else []
        if locations:
            return Path(locations[0]).parent
        if spec is None or spec.origin is None:
            raise SpecError(f"{self.distribution} names {self.module}, which is not installed; install it again")
        return Path(spec.origin).parent


def plugin(kind: str, name: str, shipped: Collection[str]) -> Plugin | None:
    """Return the plugin of that name, or None if no distribution gives one.

    Args:
        shipped: the names that etpi itself gives; they cannot be replaced.

    Raises SpecError: the plugin has a shipped name, or two distributions give the name.
    """
    if clash := _clash(kind, name, shipped):
        raise SpecError(clash)
    return next(iter(_plugins(kind).get(name, ())), None)


def _clash(kind: str, name: str, shipped: Collection[str]) -> str:
    """Return why a name cannot be used: etpi and a distribution give it, or two do; empty if neither is so."""
    owners = [*(["etpi"] if name in shipped else []), *(plugin.distribution for plugin in _plugins(kind).get(name, ()))]
    if len(owners) < 2:
        return ""
    foreign = " or ".join(owner for owner in owners if owner != "etpi")
    return f"the {kind} {name!r} is given by {' and '.join(owners)}; uninstall {foreign}, or rename its entry point"


def plugin_names(kind: str) -> list[str]:
    """Return the names of all plugins of a kind, sorted; nothing is imported."""
    return sorted(_plugins(kind))


def unknown(kind: str, name: str, known: Collection[str]) -> str:
    """Return the message for a name that neither etpi nor a plugin gives."""
    names = [*known, *(n for n in plugin_names(kind) if n not in known)]
    return f"unknown {kind} {name!r}.{near(name, names)} Known: {', '.join(names)}"


def near(name: str, known: Collection[str]) -> str:
    """Return " Did you mean ...?" for the known names that resemble a name; empty if none does."""
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


@cache
def _plugins(kind: str) -> Mapping[str, Sequence[Plugin]]:
    """Return name -> the plugins of that name, one for each distribution."""
    plugins: dict[str, dict[Plugin, None]] = {}
    for point in entry_points(group=GROUPS[kind]):
        by = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
        plugins.setdefault(point.name, {})[Plugin(kind, point.name, by, point.module, point.attr)] = None
    return {name: tuple(points) for name, points in plugins.items()}
