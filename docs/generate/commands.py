"""docs/reference/commands.md: the help of every command, from click, and the targets of the Makefile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import click

from docs.generate.markdown import prose, table
from etpi.cli import PLUGINS, etpi

_HEAD = """# Commands

`etpi` is the console command; `make` runs it in the checkout's own environment. Exit codes: 0, success; 1, something
failed; 2, the command line is wrong; 130, stopped. `etpi --version` prints the version.

## etpi
"""
_MAKE = """## make

Set variables behind the target, as in `make run EXPERIMENT=plan_first_tiny`; those in brackets may be left out. Two
apply to every target: `PYTHON`, the interpreter that the environment is built with, and `VENV`, its folder (`.venv`).
"""


def page() -> str:
    """Return the page."""
    makefile = Path("Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):.*?## (.+)$", makefile, re.MULTILINE)
    others = {point.name for point in entry_points(group=PLUGINS) if point.dist and point.dist.name != "etpi"}
    lines = [_HEAD]
    for name, shown in _help(etpi, "etpi"):
        if name.split()[1] not in others:
            lines += [f"### {name}", "", "```", shown, "```", ""]
    lines += [_MAKE, *table(["Target", "What it does"], [[f"`make {name}`", prose(text)] for name, text in targets])]
    return "\n".join(lines)


def _help(group: click.Group, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (name, help) for each command of a group and of the groups in it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command, full = group.get_command(context, name), f"{prefix} {name}"
        if isinstance(command, click.Group):
            yield from _help(command, full)
        elif command:
            names = etpi.context_settings["help_option_names"]
            yield (
                full,
                command.get_help(click.Context(command, info_name=full, terminal_width=100, help_option_names=names)),
            )
