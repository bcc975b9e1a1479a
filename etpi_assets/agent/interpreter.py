"""The tool `code_interpreter`: Python cells in a rollout's sandbox that share their names.

A cell runs as a bash command in the rollout's workspace, within its limits; processes that the cell starts end with it.
`interpreter_cell` is the program that runs inside the sandbox.
"""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path

from etpi_assets.agent.tools import INTERPRETER

FOLDER = "/tmp/.interpreter"
"""The session's folder in the sandbox. It is outside of the workspace, so it is not part of the patch."""

_PROGRAM = Path(__file__).with_name("interpreter_cell.py")


def cell_of(command: str) -> str | None:
    """Return the code of a recorded call `code_interpreter {"code": ...}`, "" without code; None for other commands."""
    name, _, arguments = command.partition(" ")
    if name != INTERPRETER:
        return None
    try:
        code = json.loads(arguments).get("code")
    except (ValueError, AttributeError):
        return ""
    return code if isinstance(code, str) else ""


def cell_command(code: str) -> str:
    """Return the bash command that runs a cell; its exit code is 1 if the code raised."""
    return (
        f"mkdir -p {FOLDER} && printf %s {shlex.quote(_program())} > {FOLDER}/run.py && "
        f"printf %s {shlex.quote(code)} > {FOLDER}/cell.py && python3 -B -I {FOLDER}/run.py {FOLDER}"
    )


def cell_in(command: str) -> str | None:
    """Return the code in a command that `cell_command` wrote; None for other commands."""
    words = shlex.split(command)
    place = words.index(f"{FOLDER}/cell.py") if f"{FOLDER}/cell.py" in words else 0
    return words[place - 2] if place >= 2 and cell_command(words[place - 2]) == command else None


@cache
def _program() -> str:
    return _PROGRAM.read_text(encoding="utf-8")
