"""Solutions as the bash commands that an agent would type."""

from __future__ import annotations

import shlex
from collections.abc import Mapping


def write_commands(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return bash commands, one for each changed file, that turn `before` into `after` (path -> text)."""
    commands = []
    for path in sorted(before.keys() | after.keys()):
        name = shlex.quote(path)
        text = after.get(path)
        if text is None:
            commands.append(f"rm -f -- {name}")
        elif text != before.get(path):
            folder = f"mkdir -p -- {shlex.quote(path.rpartition('/')[0])} && " if "/" in path else ""
            commands.append(f"{folder}printf %s {shlex.quote(text)} > {name}")
    return commands


def apply_command(patch: str, *, index: bool = False) -> str:
    """Return the command that applies a unified diff to the repository in the working directory, and to its index."""
    return f"printf %s {shlex.quote(patch)} | git apply {'--index ' if index else ''}--whitespace=nowarn -"
