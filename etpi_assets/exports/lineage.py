"""The templates of cards, and the lineage that every card ends with.

It names experiment, code, teachers, licences, data versions, and the SQL that traces them.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.exports.experiment_data import DATASET, ExportSource
from etpi_assets.tasks.table import data_sources
from etpi_resources.lake.lake import Ref
from etpi_resources.lake.schemas import empty
from etpi_resources.templates import templates

# YAML reads JSON.
TEMPLATES = templates(Path(__file__).with_name("templates"), yaml=lambda value: json.dumps(value, ensure_ascii=False))


def lineage_section(source: ExportSource) -> str:
    """Return the section, which depends on nothing but the exported versions and the installed etpi."""
    manifest = source.manifest()
    rows = [("experiment", f"`{source.experiment}`"), ("etpi", version("etpi"))]
    if manifest.git_revision:
        rows.append(("git revision that made it", f"`{manifest.git_revision}`"))
    rows.append(("rollout sets", ", ".join(f"`{name}`" for name in source.spec.rollout_sets)))
    if set(DATASET) <= set(source.assets):
        rows.append(("teachers", ", ".join(f"`{teacher}`" for teacher in _teachers(source)) or "unknown"))
    return TEMPLATES.get_template("lineage.md.jinja").render(
        rows=rows, sources=_licences(source), experiment=source.experiment, versions=source.versions()
    )


def _teachers(source: ExportSource) -> list[str]:
    names = source.rows.filter(pc.field("split") == "train")["teacher"].unique().to_pylist()
    return sorted(name or "unknown" for name in names)


def _licences(source: ExportSource) -> list[tuple[str, str, str]]:
    sets = [(name, source.specs.get("rollout_set", name)) for name in source.spec.rollout_sets]
    suites = [key for name in source.versions() if (key := name.partition("tasks/")[2]) and name.startswith("tasks/")]
    tables = [source.lake.read(Ref("tasks", "suite", suite), "tasks") for suite in suites]
    return data_sources(pa.concat_tables([empty("tasks"), *tables]), sets)
