"""Results of tau2-bench, a document with all simulations or a folder of them; `formats/tau2.toml` reads one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etpi_assets.importers.source import as_list, as_mapping, no_run
from etpi_assets.importers.spec import load
from etpi_resources.rows import files_below
from etpi_resources.rows.bounded import Unreadable, attempt, read_json

_FOLDER = "simulations"


def units(root: Path) -> list[Path]:
    """Return the documents below the root, sorted; a folder of simulations belongs to the document beside it."""
    if not root.is_dir():
        return [root]
    files = files_below(root, ".json")
    return [f for f in files if f.parent.name != _FOLDER or not (f.parent.parent / "results.json").is_file()]


def iter_rows(unit: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, {"info": of the run, "simulation": ...}) or an Unreadable of each one. Raises Unreadable."""
    document = as_mapping(read_json(unit), unit.name)
    results, simulation = load("tau2")[-2:]
    if simulation.claims(document):
        yield 0, {"info": {}, "simulation": document}
        return
    if not results.claims(document):
        raise no_run(document, f"{unit.name} is no result of tau2-bench")
    simulations: list[Any] = as_list(document.get(_FOLDER) or [], f"{unit.name}.{_FOLDER}")
    files = sorted((unit.parent / _FOLDER).glob("*.json")) if not simulations else []
    if not simulations and not files:
        raise Unreadable("empty", f"{unit.name} has no simulations")
    for number, simulation in enumerate(simulations or files):
        value = attempt(read_json, simulation) if isinstance(simulation, Path) else simulation
        is_read = not isinstance(value, Unreadable)
        yield number, {"info": document.get("info"), "simulation": value} if is_read else value
