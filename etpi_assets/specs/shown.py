"""The specs that Dagster's web page shows: the user's own, the demo's and those with data, unless all are wanted."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from etpi_assets.specs.load import SpecError, Specs, installed_folders

SHIPPED_VARIABLE = "ETPI_SHIPPED"
DEMO_EXPERIMENTS = ("plan_first_tiny", "plan_first_tiny_weak")
"""The experiments of `make demo`."""
_SETS = ("experiment", "rollout_set", "suite")
"""Each set before the sets that it uses."""


def shown_specs(specs: Specs, with_data: Callable[[str], Collection[str]]) -> Specs:
    """Return the specs to show: all of them unless $ETPI_SHIPPED is "demo".

    With "demo", an installed spec is shown if the demo runs it, if its partition has data, or if a shown spec uses it.

    Args:
        with_data: set -> the names of its partitions that have data.

    Raises SpecError: the variable has another value than "demo" or "all".
    """
    choice = os.environ.get(SHIPPED_VARIABLE) or "all"
    if choice not in ("demo", "all"):
        raise SpecError(f"{SHIPPED_VARIABLE}={choice!r}: write demo (the demo's shipped specs) or all")
    if choice == "all":
        return specs
    shown = {("experiment", name) for name in DEMO_EXPERIMENTS}
    installed = installed_folders()
    shown |= {(e.set, e.name) for e in specs.entries() if not any(e.file.is_relative_to(path) for path in installed)}
    shown |= {(name, key) for name in _SETS for key in with_data(name)}
    for index, name in enumerate(_SETS):
        for key in [key for set_name, key in shown if set_name == name]:
            shown |= {(used, other) for used in _SETS[index + 1 :] for other in specs.upstream_keys(name, key, used)}
    return Specs((entry for entry in specs.entries() if (entry.set, entry.name) in shown), specs.folders)
