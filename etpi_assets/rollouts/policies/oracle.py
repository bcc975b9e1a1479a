"""The two policies that prove a suite and a sandbox: one applies the reference solution, one does nothing.

Belongs here: what either writes, turn by turn, for any suite family. Does not belong here: teachers.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from etpi_assets.rollouts.actions import format_action
from etpi_assets.rollouts.agent import SUBMIT
from etpi_assets.tasks.family import Family
from etpi_resources.engines import Request
from etpi_resources.engines.scripted import Policy


def reference_policy(family: Family) -> Policy:
    """Write each file that the reference solution changes, one a turn, then submit. The files travel in the turn's
    text, so `max_tokens` and `max_model_len` must have room for them."""

    def policy(request: Request) -> str:
        task, role = request.privileged["task"], request.privileged["role"]
        commands = [*write_commands(family.workspace(task, role), family.reference(task, role)), f"echo {SUBMIT}"]
        turn = sum(message["role"] == "assistant" for message in request.messages)
        return str(format_action(commands[min(turn, len(commands) - 1)]))

    return policy


def null_policy(request: Request) -> str:
    """Submit at once."""
    return str(format_action(f"echo {SUBMIT}"))


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
