"""The two policies that prove a suite and a sandbox: one applies the reference solution, one does nothing.

Belongs here: what either writes, turn by turn, for any suite family. Does not belong here: teachers.
"""

from __future__ import annotations

from etpi_assets.agent.actions import format_action
from etpi_assets.agent.loop import SUBMIT
from etpi_assets.tasks.family import Family
from etpi_resources.engines import Request
from etpi_resources.engines.scripted import Policy


def reference_policy(family: Family) -> Policy:
    """The commands of the task's own solution (its files, or its patch), one a turn, then submit. They stand in the
    turn's text, so `max_tokens` and `max_model_len` must have room for them."""

    def policy(request: Request) -> str:
        task, role = request.privileged["task"], request.privileged["role"]
        commands = [*family.solve(task, role), f"echo {SUBMIT}"]
        turn = sum(message["role"] == "assistant" for message in request.messages)
        return str(format_action(commands[min(turn, len(commands) - 1)]))

    return policy


def null_policy(request: Request) -> str:
    """Submit at once."""
    return str(format_action(f"echo {SUBMIT}"))
