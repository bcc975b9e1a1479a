"""The tool `code_interpreter`: Python cells in a rollout's sandbox that share what they define.

Belongs here: which recorded action is a cell, and the command that runs it. Does not belong here: what happens inside
(`interpreter_cell`), reading calls (`actions`).

A cell is a command like any other of the rollout: under its limits, in its workspace, with everything it starts ended
when it is done.
"""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path

from etpi_assets.agent.tools import INTERPRETER

FOLDER = "/tmp/.interpreter"
"""The session's folder inside; outside of the workspace, so that no cell is taken for work."""

_PROGRAM = Path(__file__).with_name("interpreter_cell.py")


def cell_of(command: str) -> str | None:
    """The code of a recorded call of the tool (`code_interpreter {"code": ...}`); None for any other command, "" where
    the call brings no code."""
    name, _, arguments = command.partition(" ")
    if name != INTERPRETER:
        return None
    try:
        code = json.loads(arguments).get("code")
    except (ValueError, AttributeError):
        return ""
    return code if isinstance(code, str) else ""


def cell_command(code: str) -> str:
    """The bash command that runs a cell; its exit code is 1 where the code raised."""
    return (
        f"mkdir -p {FOLDER} && printf %s {shlex.quote(_program())} > {FOLDER}/run.py && "
        f"printf %s {shlex.quote(code)} > {FOLDER}/cell.py && python3 -B -I {FOLDER}/run.py {FOLDER}"
    )


def cell_in(command: str) -> str | None:
    """The code that a command of `cell_command` runs; None for any other command."""
    words = shlex.split(command)
    place = words.index(f"{FOLDER}/cell.py") if f"{FOLDER}/cell.py" in words else 0
    return words[place - 2] if place >= 2 and cell_command(words[place - 2]) == command else None


@cache
def _program() -> str:
    return _PROGRAM.read_text(encoding="utf-8")
