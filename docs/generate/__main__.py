"""`python -m docs.generate`: rewrite every generated page of docs/."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generate import chat_formats, checks, commands, formats, history, published, specs, tables
from etpi_assets.specs.load import load_shipped

_INDEX = """# Reference

Generated from the code, except for environment.md. `make docs` rewrites these pages, and a test fails when one is not
current.

| Page | Contents |
|---|---|
| [specs.md](specs.md) | every key of suite, rollout set and experiment specs: type, default, meaning |
| [presets.md](presets.md) | the values of every preset |
| [commands.md](commands.md) | the commands and options of `etpi`, and the targets of `make` |
| [environment.md](environment.md) | every environment variable that etpi reads or sets |
| [published.md](published.md) | every number of the published documents and the spec that has it |
| [checks.md](checks.md) | every check: what it catches, what to do, which published failure it answers |
| [tables.md](tables.md) | every table and SQL view: columns, types, meaning |
| [formats.md](formats.md) | formats that etpi imports and exports |
| [chat_formats.md](chat_formats.md) | chat templates: think blocks, tool calls, whether turns extend prompts |
| [history.md](history.md) | the experiments of the plan-first report: figures, faults, and the checks that stop them |
"""

PAGES: Mapping[str, Callable[[], str]] = {
    "reference/README.md": lambda: _INDEX,
    "reference/specs.md": specs.page,
    "reference/presets.md": specs.presets,
    "reference/commands.md": commands.page,
    "reference/checks.md": checks.page,
    "reference/published.md": published.page,
    "reference/tables.md": tables.page,
    "reference/formats.md": formats.page,
    "reference/chat_formats.md": chat_formats.page,
    "reference/history.md": lambda: history.page(load_shipped()),
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path("docs") / name).write_text(page(), encoding="utf-8")
