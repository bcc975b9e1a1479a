"""docs/reference/tables.md: the tables of the lake, from the schema registry, and the views of sql/views."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

from docs.generate.markdown import anchor, prose, table
from etpi_assets.graph import GRAPH
from etpi_resources.lake import catalog
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.schemas import TABLES

_HEAD = """# Tables and views

`etpi.duckdb` has two layers. Each asset has a **schema** with its own tables, such as `tito_pairs.pairs`; a table of a
partitioned asset has the partition's name as one more column (`suite`, `rollout_set` or `experiment`). On top, `main`
has **views** that join and unite them, which is what most queries want:

```sql
SELECT rollout_set, count(*) FROM rollouts GROUP BY ALL;
```

Token ids are 32-bit integers; a prompt that extends an earlier turn is stored as the ids it adds, and the views
`full_turns` and `tito_pairs` give whole prompts. Times are UTC. Columns said to be JSON hold it as text.
"""

_VIEWS = tomllib.loads(Path(__file__).with_name("view_columns.toml").read_text(encoding="utf-8"))
"""Meanings of the columns that views add, and the tables behind views."""


def page() -> str:
    """Return the page."""
    views = list(_views())
    names = {"table": list(TABLES), "view": [name for name, *_ in views]}
    lines = [_HEAD]
    for kind, listed in names.items():
        lines += [f"**{kind.title()}s:** " + ", ".join(f"[{name}]({anchor(f'{kind} {name}')})" for name in listed), ""]
    lines += ["## Tables", ""]
    for name, entry in TABLES.items():
        assets = ", ".join(f"`{asset}`" for asset, node in GRAPH.items() if name in node.tables)
        about = f"{_sentence(entry.row)} Written by {assets}."
        lines += _entry(f"Table {name}", about, [(column, str(kind), text) for column, kind, text in entry.columns])
    lines += ["## Views", ""]
    for name, comment, columns in views:
        rows = [(column, kind, _meaning(name, column)) for column, kind in columns]
        lines += _entry(f"View {name}", _sentence(comment), rows)
    return "\n".join(lines)


def _entry(title: str, about: str, columns: list[tuple[str, str, str]]) -> list[str]:
    rows = []
    for column, kind, text in columns:
        for long, short in _TYPES.items():
            kind = kind.replace(long, short)
        rows.append([f"`{column}`", kind, prose(text)])
    return [f"### {title}", "", about, "", *table(["Column", "Type", "Meaning"], rows)]


def _sentence(text: str) -> str:
    return prose(f"{text[:1].upper()}{text[1:].rstrip('.')}.")


def _views() -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Yield (name, header comment, [(column, type)]) of every view of sql/views, from a catalog of an empty lake."""
    with TemporaryDirectory() as folder:
        path = catalog.build(Lake(Path(folder) / "data"), GRAPH.values(), Path(folder) / "reference.duckdb")
        with catalog.connect(path) as connection:
            for file in sorted((catalog.sql_folder() / "views").glob("*.sql")):
                header = takewhile(lambda line: line.startswith("--"), file.read_text(encoding="utf-8").splitlines())
                described = connection.sql(f'DESCRIBE "{file.stem}"').fetchall()
                yield file.stem, " ".join(line.removeprefix("-- ") for line in header), [row[:2] for row in described]


def _meaning(view: str, column: str) -> str:
    """Return a column's meaning: of this view, of the stored tables that it shows, or of all views."""
    tables = _VIEWS["tables_behind"].get(view, [view])
    stored = {n: text for name in reversed(tables) if name in TABLES for n, _, text in TABLES[name].columns}
    return {**_VIEWS["shared"], **stored, **_VIEWS["columns"].get(view, {})}.get(column, "")


_TYPES = {
    "list<item: int32>": "int[]", "list<item: float>": "float[]", "timestamp[us, tz=UTC]": "time",
    "TIMESTAMP WITH TIME ZONE": "time", "VARCHAR": "string", "BIGINT": "int", "INTEGER": "int", "DOUBLE": "float",
    "FLOAT": "float", "BOOLEAN": "bool", "int32": "int", "int64": "int", "double": "float",
}  # fmt: skip
