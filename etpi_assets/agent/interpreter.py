"""The tool `code_interpreter`: Python in a rollout's sandbox.

By default a call is a cell, and cells share their names (`interpreter_cell` is the program that runs inside the
sandbox). As published, a call is a whole program that knows nothing of the calls before it (`interpreter_program`).
Either runs as a bash command in the rollout's workspace, within its limits; processes that it starts end with it.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

from etpi_assets.agent.tools import INTERPRETER
from etpi_resources.outside import loads

FOLDER = "/tmp/.interpreter"
"""The session's folder in the sandbox. It is outside of the workspace, so it is not part of the patch."""

_CELL = Path(__file__).with_name("interpreter_cell.py")
_PROGRAM = Path(__file__).with_name("interpreter_program.py")
_FENCED = re.compile(r"```python(.*?)```", re.DOTALL)

PROGRAM_SECONDS = 30
PROGRAM_BYTES = 1 << 30
"""The limits of verl's SandboxFusion tool (`default_timeout`, `memory_limit_mb`)."""


def cell_of(command: str) -> str | None:
    """Return the code of a recorded call `code_interpreter {"code": ...}`, "" without code; None for other commands."""
    name, _, arguments = command.partition(" ")
    if name != INTERPRETER:
        return None
    try:
        code = loads(arguments).get("code")
    except (ValueError, AttributeError):
        return ""
    return code if isinstance(code, str) else ""


def cell_command(code: str) -> str:
    """Return the bash command that runs a cell; its exit code is 1 if the code raised."""
    return _run_command(_CELL, code, FOLDER)


def published_command(code: str) -> str:
    """Return the bash command that runs a whole program as verl's `CustomSandboxFusionTool` does.

    Of a text with a ```python block only the block runs, and the last line is printed if it does not print. The output
    is stdout, then stderr, or one line if the program does not end. Source: verl, recipe/retool, which the recipe of
    Open-AgentRL extends; the tool itself in verl/tools/sandbox_fusion_tools.py.
    """
    return _run_command(_PROGRAM, printed(code), f"{FOLDER}/cell.py {PROGRAM_SECONDS} {PROGRAM_BYTES}")


def printed(code: str) -> str:
    """Return the program in a call's code, its last line printed."""
    block = _FENCED.search(code)
    lines = (block[1].strip() if block else code).split("\n")
    last = next((number for number in reversed(range(len(lines))) if lines[number]), None)
    if last is not None and not lines[last].startswith("print"):
        lines[last] = f"print({lines[last]})"
    return "\n".join(lines)


def _run_command(program: Path, code: str, arguments: str) -> str:
    return (
        f"mkdir -p {FOLDER} && printf %s {shlex.quote(_source(program))} > {FOLDER}/run.py && "
        f"printf %s {shlex.quote(code)} > {FOLDER}/cell.py && python3 -B -I {FOLDER}/run.py {arguments}"
    )


@cache
def _source(program: Path) -> str:
    return program.read_text(encoding="utf-8")
