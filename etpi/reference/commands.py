"""docs/reference/commands.md: the console command, from click, and the targets of the Makefile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import entry_points

import click

from etpi.cli import PLUGINS, etpi
from etpi.reference.markdown import prose, table

_HEAD = """# Commands

`etpi` is the console command; `make` runs it in the checkout's own environment. Exit codes: 0, success; 1, something
failed; 2, the command line is wrong; 130, stopped. Every command has `--help`; `etpi --version` prints the version.

## etpi
"""
_MAKE = """## make

Set variables behind the target, as in `make run EXPERIMENT=plan_first_tiny`; those in brackets may be left out. Two
apply to every target: `PYTHON`, the interpreter that the environment is built with, and `VENV`, its folder (`.venv`).
"""


def page(makefile: str) -> str:
    """Return the page; `makefile`: the text of the Makefile."""
    lines = [_HEAD]
    theirs = {point.name for point in entry_points(group=PLUGINS) if point.dist and point.dist.name != "etpi"}
    for name, command in _commands(etpi, ""):
        if name.split()[0] not in theirs:
            lines += [*_command(name, command), ""]
    targets = re.findall(r"^([a-z-]+):.*?## (.+)$", makefile, re.MULTILINE)
    lines += [_MAKE, *table(["Target", "What it does"], [[f"`make {name}`", prose(text)] for name, text in targets])]
    phony = re.search(r"^\.PHONY:((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    steps = sorted(set((phony[1] if phony else "").replace("\\", " ").split()) - {name for name, _ in targets})
    lines += ["", f"Steps that other targets run: {', '.join(f'`{name}`' for name in steps)}."]
    return "\n".join(lines) + "\n"


def _commands(group: click.Group, prefix: str) -> Iterator[tuple[str, click.Command]]:
    """Yield (name, command) for each command of a group and of the groups in it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, f"{prefix}{name} ")
        elif command is not None:
            yield f"{prefix}{name}", command


def _command(name: str, command: click.Command) -> list[str]:
    context = click.Context(command, info_name=f"etpi {name}", parent=None)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    rows = [_option(parameter, context) for parameter in command.params if isinstance(parameter, click.Option)]
    lines = [f"### etpi {name}", "", prose(command.help or ""), "", "```", usage, "```"]
    return [*lines, "", *table(["Option", "Meaning", "Default"], rows)] if rows else lines


def _option(option: click.Option, context: click.Context) -> list[str]:
    value = "" if option.is_flag else f" {option.make_metavar(context)}"
    default = "required" if option.required else f"`{option.default}`" if option.show_default else ""
    return [f"`{option.opts[0]}{value}`", prose(option.help or ""), default]
