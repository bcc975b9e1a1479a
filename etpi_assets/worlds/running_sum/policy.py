"""The scripted policy of `running_sum`: it adds the latest number to the sum that it stated last.

It reads only the conversation, not the payload, so a history that is cut in the wrong place leads to wrong sums.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from etpi_assets.agent.actions import format_action
from etpi_assets.agent.loop import SUBMIT
from etpi_assets.worlds.running_sum import END, state
from etpi_resources.engines import Request

_STATED = re.compile(re.escape(state(0)).replace("0", r"(\d+)"))
_NUMBER = re.compile(rf"^(\d+|{END})$", re.MULTILINE)


class RunningSumPolicy:
    """Run `sh next` first, then state the last sum plus the last number, and submit after "end". Has no skill."""

    def __init__(self, skill: Mapping[str, float]) -> None:
        if skill:
            raise ValueError(f"engine.skill: unknown {sorted(skill)}; the teacher of running_sum has no skill to set")

    def __call__(self, request: Request) -> str:
        contents = [message["content"] for message in request.messages if message["role"] != "system"]
        numbers, stated = _NUMBER.findall(contents[-1]), _STATED.findall("\n".join(contents))
        if not numbers:
            return str(format_action("sh next"))
        if numbers[-1] == END:
            return str(format_action(f"echo {SUBMIT}"))
        return str(format_action(state(int(stated[-1] if stated else 0) + int(numbers[-1]))))
