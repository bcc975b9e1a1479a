"""docs/reference/tables.md: the tables of the lake, from the schema registry, and the views of sql/views."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

from etpi.reference.markdown import anchor, prose, sentence, table
from etpi.reference.view_columns import COLUMNS, SHARED, TABLES_BEHIND
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


def page() -> str:
    """Return the page."""
    views = list(_views())
    lines = [
        _HEAD,
        "**Tables:** " + _links([*TABLES], "table"),
        "",
        "**Views:** " + _links([v[0] for v in views], "view"),
    ]
    lines += ["", "## Tables", ""]
    for name, entry in TABLES.items():
        assets = [asset for asset, node in GRAPH.items() if name in node.tables]
        lines += [
            f"### Table {name}",
            "",
            f"{sentence(entry.row)} Written by {', '.join(f'`{a}`' for a in assets)}.",
            "",
        ]
        rows = [[f"`{column}`", _short_type(str(kind)), prose(text)] for column, kind, text in entry.columns]
        lines += [*table(["Column", "Type", "Meaning"], rows), ""]
    lines += ["## Views", ""]
    for name, comment, columns in views:
        lines += [f"### View {name}", "", sentence(comment), ""]
        rows = [[f"`{column}`", kind, _meaning(name, column)] for column, kind in columns]
        lines += [*table(["Column", "Type", "Meaning"], rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def _links(names: list[str], kind: str) -> str:
    return ", ".join(f"[{name}]({anchor(f'{kind} {name}')})" for name in names)


def _views() -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Yield (name, header comment, [(column, type)]) of every view of sql/views, from a catalog of an empty lake."""
    with TemporaryDirectory() as folder:
        path = catalog.build(Lake(Path(folder) / "data"), GRAPH.values(), Path(folder) / "reference.duckdb")
        with catalog.connect(path) as connection:
            for file in sorted((catalog.sql_folder() / "views").glob("*.sql")):
                header = takewhile(lambda line: line.startswith("--"), file.read_text(encoding="utf-8").splitlines())
                described = connection.sql(f'DESCRIBE "{file.stem}"').fetchall()
                columns = [(row[0], _short_type(row[1])) for row in described]
                yield file.stem, " ".join(line.removeprefix("-- ") for line in header), columns


def _meaning(view: str, column: str) -> str:
    """Return a column's meaning: of this view, of the stored tables that it shows, or of all views."""
    tables = TABLES_BEHIND.get(view, (view,))
    stored = {n: text for name in reversed(tables) if name in TABLES for n, _, text in TABLES[name].columns}
    return prose(COLUMNS.get(view, {}).get(column) or stored.get(column) or SHARED.get(column, ""))


def _short_type(kind: str) -> str:
    for long, short in _TYPES.items():
        kind = kind.replace(long, short)
    return kind


_TYPES = {
    "list<item: int32>": "int[]", "list<item: float>": "float[]", "timestamp[us, tz=UTC]": "time",
    "TIMESTAMP WITH TIME ZONE": "time", "VARCHAR": "string", "BIGINT": "int", "INTEGER": "int", "DOUBLE": "float",
    "FLOAT": "float", "BOOLEAN": "bool", "int32": "int", "int64": "int", "double": "float",
}  # fmt: skip
