"""docs/reference/published.md: every number of the published documents beside the spec that has it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.generate.markdown import prose, table
from etpi_assets.specs.load import MODELS, Specs, load_shipped

_ROWS = Path(__file__).with_name("published.toml")
_HEAD = """# Published numbers and specs

The numbers of the four documents whose experiments ship as specs: each has its key, or the reason why no key has it (a
result, an advice, an estimate). `docs/generate/published.toml` names those left out: versions, dates and identifiers.
Tests compare the page with the specs and, where `ETPI_DOCUMENTS` names a folder that has them, with the documents.
Numbers are listed by what they mean; a document that repeats one has it once here. Where a spec cannot be exact, its
`published.faults` says why: they are listed at the end.
"""


def documents() -> list[dict[str, Any]]:
    """Return the documents in order: {"title", "file", "rows": [what, as printed, where]}."""
    return tomllib.loads(_ROWS.read_text(encoding="utf-8"))["document"]


_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def numbers(text: str) -> set[str]:
    """Return the numbers in a text, without commas."""
    return {found.replace(",", "").rstrip(".") for found in _NUMBER.findall(text)}


def unaccounted(file: str, text: str) -> tuple[set[str], set[str]]:
    """Compare a document's text with its rows: return numbers that no row has, and those of rows that it lacks."""
    content = tomllib.loads(_ROWS.read_text(encoding="utf-8"))
    rows = [row for document in content["document"] if document["file"] == file for row in document["rows"]]
    listed, printed = set().union(*(numbers(row[1]) for row in rows)), numbers(text)
    return printed - listed - set(content["aside"][file]), listed - printed - set(content["derived"].get(file, ()))


def keys() -> Iterator[tuple[str, str]]:
    """Yield (the number as printed, "SPEC:KEY") of each number that a spec has."""
    for document in documents():
        yield from ((printed, where) for _, printed, where in document["rows"] if not where.startswith("-"))


def number(printed: str) -> float:
    """Read a number as printed: "2,560", "72.46 %", "5e-6", or the count in "3/4"."""
    text = printed.partition("/")[0].replace(",", "").strip()
    return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)


def value(where: str, specs: Specs) -> Any:
    """Return the value of "SPEC:KEY"; items of a list are named by their `name` or `function`.

    Raises:
        KeyError: no spec or no key has that name.
    """
    name, _, key = where.partition(":")
    kind = next((kind for kind in MODELS if name in specs.keys(kind)), None)
    if kind is None:
        raise KeyError(where)
    content: Any = specs.get(kind, name).model_dump(mode="json", by_alias=False)
    for part in key.split("."):
        if isinstance(content, list):
            content = {item.get("name") or item.get("function"): item for item in content}
        content = content[part] if part in content or kind != "suite" else content["params"][part]
    return content


def page() -> str:
    """Return the page."""
    specs, lines = load_shipped(), [_HEAD]
    for document in documents():
        rows = [
            [what, printed, where.removeprefix("- ") if where.startswith("-") else f"`{where}` = {value(where, specs)}"]
            for what, printed, where in document["rows"]
        ]
        lines += [f"## {document['title']}", "", *table(["number", "as printed", "spec and key"], rows)]
    faults = [
        [f"`{name}`", fault, prose(text)]
        for name, spec in specs.experiments.items()
        for fault, text in spec.published.get("faults", {}).items()
    ]
    return "\n".join([*lines, "## Where specs differ", "", *table(["spec", "of", "difference"], faults)])
