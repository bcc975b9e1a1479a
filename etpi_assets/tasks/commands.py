"""Work on files as bash commands.

Belongs here: turning a solution into what an agent would type. Does not belong here: whose solution it is.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping


def write_commands(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """One bash command a changed file that turns `before` into `after` (path -> text)."""
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


def apply_command(patch: str) -> str:
    """The command that applies a unified diff to the repository it is run in."""
    return f"printf %s {shlex.quote(patch)} | git apply --whitespace=nowarn -"
