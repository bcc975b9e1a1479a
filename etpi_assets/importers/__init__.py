"""Rollouts that other programs recorded, as records: one module a format.

Belongs here: which formats there are, telling which one a folder holds, and the account that nothing goes missing.
Does not belong here: any format. A format is a module with a `FORMAT`; adding one is adding it to IMPORTERS.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from etpi_assets.importers import (
    atif,
    cooperbench,
    harbor,
    messages,
    mini_swe_agent,
    openhands,
    r2e_gym,
    sharegpt,
    swe_agent,
    tito,
    trl,
    verl,
)
from etpi_assets.importers.conversation import Options
from etpi_assets.importers.format import Format, Item, Look
from etpi_assets.trajectories.records import RolloutRecord

_MODULES = (
    cooperbench,
    mini_swe_agent,
    swe_agent,
    harbor,
    atif,
    r2e_gym,
    openhands,
    tito,
    trl,
    verl,
    sharegpt,
    messages,
)

IMPORTERS: Mapping[str, Format] = {module.FORMAT.name: module.FORMAT for module in _MODULES}


def import_runs(format: str, path: Path, options: Mapping[str, Any] | None = None) -> Iterator[Item]:
    """Every rollout below `path`, in the order of the units' paths and rows; for an input that holds none, why.

    As many results come out as `count_found` finds: imported + refused = found. `sample` counts the rollouts of a task.

    Args:
        format: a name of IMPORTERS, or "auto".
        options: what `Options` holds; "options" of the rollout set.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: an unknown format or option, no format or several found by "auto".
    """
    chosen, importer = read_options(options or {}), importer_of(format, path)
    samples: Counter[str | None] = Counter()
    for unit in importer.units(path):
        for item in importer.read(unit, path, chosen):
            if isinstance(item, RolloutRecord):
                item.sample = samples[item.task_id]
                samples[item.task_id] += 1
            yield item


def find_units(format: str, path: Path) -> list[Path]:
    """The files and folders that `import_runs` accounts for, sorted. Raises as `import_runs` does."""
    return importer_of(format, path).units(path)


def count_found(format: str, path: Path) -> int:
    """How many results `import_runs` gives, counted without reading what they say. Raises as `import_runs` does."""
    importer = importer_of(format, path)
    return sum(importer.count(unit) for unit in importer.units(path))


def importer_of(format: str, path: Path) -> Format:
    """The importer of that name; for "auto" the one that claims the path. Raises as `import_runs` does."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; the rollout set's `path` has to name a folder or a file")
    if format != "auto" and format not in IMPORTERS:
        near = difflib.get_close_matches(format, IMPORTERS, n=1, cutoff=0.0)[0]
        raise ValueError(f"format {format!r} is unknown, the nearest is {near!r}; known: {', '.join(IMPORTERS)}, auto")
    return IMPORTERS[detect(path) if format == "auto" else format]


def detect(path: Path) -> str:
    """The one format that a folder or file holds. Raises ValueError where there is none or more than one.

    Of formats of different rank the lower one has it: a program's own folders before rows, a program's own columns
    before rows that hold nothing but messages.
    """
    look = Look(path)
    for rank in sorted({importer.rank for importer in IMPORTERS.values()}):
        claimed = [name for name, importer in IMPORTERS.items() if importer.rank == rank and importer.claims(look)]
        if len(claimed) == 1:
            return claimed[0]
        if claimed:
            raise ValueError(
                f"{path} holds {' and '.join(claimed)}; name one in `format`, or make one rollout set of each folder"
            )
    raise ValueError(f"{path} holds no known format ({', '.join(IMPORTERS)}); name it in `format` if it should")


def read_options(given: Mapping[str, Any]) -> Options:
    """The options of a spec. Raises ValueError: an unknown one, or a value that does not fit."""
    known = {f.name for f in fields(Options)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"options.{key}: unknown option; the nearest valid one is {near!r}")
        if key == "capture" and value not in ("native", "retokenised"):
            raise ValueError(f"options.capture: {value!r} is neither native nor retokenised")
        if not key.endswith("_commands"):
            values[key] = str(value)
        elif isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
            values[key] = tuple(value)
        else:
            raise ValueError(f"options.{key}: {value!r} is not a list of command names")
    return Options(**values)
