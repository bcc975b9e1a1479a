"""Two policies that validate a suite and a sandbox: one applies the reference solution, one submits at once."""

from __future__ import annotations

from etpi_assets.agent.actions import format_action
from etpi_assets.agent.loop import SUBMIT
from etpi_assets.tasks.family import Family
from etpi_resources.engines import Request
from etpi_resources.engines.scripted import Policy


def reference_policy(family: Family) -> Policy:
    """Return a policy that runs the commands of the task's solution, one per turn, then submits.

    The solution is in the text of the turns, so `max_tokens` and `max_model_len` must have room for it.
    """

    def policy(request: Request) -> str:
        task, role = request.privileged["task"], request.privileged["role"]
        commands = [*family.solve(task, role), f"echo {SUBMIT}"]
        turn = sum(message["role"] == "assistant" for message in request.messages)
        return str(format_action(commands[min(turn, len(commands) - 1)]))

    return policy


def null_policy(request: Request) -> str:
    """Submit at once."""
    return str(format_action(f"echo {SUBMIT}"))
