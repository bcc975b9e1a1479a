"""Rollouts that other programs recorded, as records: one module a format.

Belongs here: which formats there are, telling which one a folder holds, and the account that nothing goes missing.
Does not belong here: any format. A format is a module with `claims`, `units` and `read`; adding one is adding it to
IMPORTERS.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from etpi_assets.rollouts.importers import cooperbench, mini_swe_agent, swe_agent
from etpi_assets.rollouts.importers.conversation import Options
from etpi_assets.rollouts.importers.source import Unreadable
from etpi_assets.rollouts.records import RolloutRecord
from etpi_assets.tasks.family import Refusal


class Importer(Protocol):
    """One format."""

    def claims(self, root: Path) -> bool:
        """Whether the folder or file holds this format."""
        ...

    def units(self, root: Path) -> list[Path]:
        """Every input below the root that this format accounts for, sorted: a run's folder, or a file."""
        ...

    def read(self, unit: Path, root: Path, options: Options) -> RolloutRecord:
        """The unit's rollout. Raises Unreadable, and nothing else, where it holds none."""
        ...


IMPORTERS: Mapping[str, Importer] = {
    "cooperbench": cooperbench,
    "mini_swe_agent": mini_swe_agent,
    "swe_agent": swe_agent,
}


def import_runs(format: str, path: Path, options: Mapping[str, Any] | None = None) -> Iterator[RolloutRecord | Refusal]:
    """Every rollout below `path`, in the order of the units' paths; for a unit that holds none, why.

    As many results come out as `find_units` finds: imported + refused = found. `sample` counts the rollouts of a task.

    Args:
        format: a name of IMPORTERS, or "auto".
        options: what `Options` holds; "options" of the rollout set.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: an unknown format or option, no format or several found by "auto".
    """
    chosen = _options(options or {})
    found = find_units(format, path)
    importer = IMPORTERS[detect(path) if format == "auto" else format]
    samples: Counter[str | None] = Counter()
    for unit in found:
        source = unit.relative_to(path).as_posix() if unit != path else path.name
        try:
            record = importer.read(unit, path, chosen)
        except Unreadable as refused:
            yield Refusal(source, refused.reason, refused.detail)
            continue
        record.source = source
        record.sample = samples[record.task_id]
        samples[record.task_id] += 1
        yield record


def find_units(format: str, path: Path) -> list[Path]:
    """The inputs that `import_runs` accounts for, one by one. Raises as `import_runs` does."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; the rollout set's `path` has to name a folder or a file")
    if format != "auto" and format not in IMPORTERS:
        near = difflib.get_close_matches(format, IMPORTERS, n=1, cutoff=0.0)[0]
        raise ValueError(f"format {format!r} is unknown, the nearest is {near!r}; known: {', '.join(IMPORTERS)}, auto")
    return IMPORTERS[detect(path) if format == "auto" else format].units(path)


def detect(path: Path) -> str:
    """The one format that a folder or file holds. Raises ValueError where there is none or more than one."""
    claimed = [name for name, importer in IMPORTERS.items() if importer.claims(path)]
    if len(claimed) == 1:
        return claimed[0]
    if not claimed:
        raise ValueError(f"{path} holds no known format ({', '.join(IMPORTERS)}); name it in `format` if it should")
    raise ValueError(
        f"{path} holds {' and '.join(claimed)}; name one in `format`, or make one rollout set of each folder"
    )


def _options(given: Mapping[str, Any]) -> Options:
    known = {f.name for f in fields(Options)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"options.{key}: unknown option; the nearest valid one is {near!r}")
        if not key.endswith("_commands"):
            values[key] = str(value)
        elif isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
            values[key] = tuple(value)
        else:
            raise ValueError(f"options.{key}: {value!r} is not a list of command names")
    return Options(**values)
