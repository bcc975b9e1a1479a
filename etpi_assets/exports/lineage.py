"""Parts of every card: its first lines, and the lineage section.

The section names experiment, code, teachers, licences, data versions, and the SQL that traces them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.exports.experiment_data import DATASET, ExportSource
from etpi_assets.tasks.table import data_sources
from etpi_resources.lake.lake import Ref
from etpi_resources.lake.schemas import empty


def card_top(head: Mapping[str, Any], title: str, text: str) -> list[str]:
    """Return the first lines of a card: its metadata as YAML, the title and one paragraph."""
    values = (f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items())  # YAML reads JSON
    return ["---", *values, "---", "", f"# {title}", "", text, ""]


def lineage_section(source: ExportSource) -> list[str]:
    """Return the lines of the section, which depend on nothing but the exported versions and the installed etpi."""
    manifest = source.manifest()
    rows = [("experiment", f"`{source.experiment}`"), ("etpi", version("etpi"))]
    if manifest.git_revision:
        rows.append(("git revision that made it", f"`{manifest.git_revision}`"))
    rows.append(("rollout sets", ", ".join(f"`{name}`" for name in source.spec.rollout_sets)))
    if set(DATASET) <= set(source.assets):
        rows.append(("teachers", ", ".join(f"`{teacher}`" for teacher in _teachers(source)) or "unknown"))
    sources = _licences(source)
    return [
        "## Lineage",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in rows),
        "",
        *(["| source | licence | content |", "|---|---|---|"] if sources else []),
        *(f"| {' | '.join(line)} |" for line in sources),
        *([""] if sources else ["No source of the data states a licence.", ""]),
        "In the lake that it comes from, SQL leads from every training token to its turn, rollout, task and teacher:",
        "",
        "```",
        f"etpi sql -c \"SELECT * FROM lineage WHERE experiment = '{source.experiment}'\"",
        "```",
        "",
        "## Data versions",
        "",
        "| data | version |",
        "|---|---|",
        *(f"| `{name}` | `{version}` |" for name, version in source.versions().items()),
        "",
    ]


def _teachers(source: ExportSource) -> list[str]:
    names = source.rows.filter(pc.field("split") == "train")["teacher"].unique().to_pylist()
    return sorted(name or "unknown" for name in names)


def _licences(source: ExportSource) -> list[tuple[str, str, str]]:
    sets = [(name, source.specs.get("rollout_set", name)) for name in source.spec.rollout_sets]
    suites = [key for name in source.versions() if (key := name.partition("tasks/")[2]) and name.startswith("tasks/")]
    tables = [source.lake.read(Ref("tasks", "suite", suite), "tasks") for suite in suites]
    return data_sources(pa.concat_tables([empty("tasks"), *tables]), sets)
