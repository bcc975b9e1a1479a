"""Every generated page below docs/, and the function that returns its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from etpi.reference import checks, commands, environment, presets, specs, tables
from etpi_assets.exports import reference as formats
from etpi_resources.chat import table as chat_formats

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "make docs"

_INDEX = f"""# Reference

Generated from the code; `{COMMAND}` rewrites these pages and a test fails when one is not current.

| Page | Contents |
|---|---|
| [specs.md](specs.md) | every key of suite, rollout set and experiment specs: type, default, meaning |
| [presets.md](presets.md) | every key that a preset sets |
| [commands.md](commands.md) | the commands and options of `etpi`, and the targets of `make` |
| [environment.md](environment.md) | every environment variable that etpi reads or sets |
| [checks.md](checks.md) | every check: what it catches, what to do, which published failure it answers |
| [tables.md](tables.md) | every table and SQL view: columns, types, meaning |
| [formats.md](../formats.md) | formats that etpi imports and exports |
| [chat_formats.md](../chat_formats.md) | chat templates: think blocks, tool calls, whether turns extend prompts |
"""

REFERENCE: Mapping[str, Callable[[], str]] = {
    "reference/README.md": lambda: _INDEX,
    "reference/specs.md": specs.page,
    "reference/presets.md": presets.page,
    "reference/commands.md": lambda: commands.page((ROOT / "Makefile").read_text(encoding="utf-8")),
    "reference/environment.md": environment.page,
    "reference/checks.md": lambda: checks.page((ROOT / "docs" / "faults.md").read_text(encoding="utf-8")),
    "reference/tables.md": tables.page,
}
"""Path below docs/ -> the text of the page."""

PAGES: Mapping[str, Callable[[], str]] = {
    **REFERENCE,
    "formats.md": formats.page,
    "chat_formats.md": chat_formats.page,
}
"""Those and the generated pages whose generators are beside the code they describe."""


def write_pages() -> None:
    """Rewrite the pages and print the ones that changed."""
    for name, page in PAGES.items():
        path, text = ROOT / "docs" / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}")
