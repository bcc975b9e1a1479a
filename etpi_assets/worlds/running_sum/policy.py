"""A scripted teacher that adds up: it reads the sum it stated last and the number that came last, wherever they stand.

Belongs here: what it says. Does not belong here: the tasks. It looks at no payload: what its conversation no longer
holds it does not know, so a history cut in the wrong place shows in what it does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from etpi_assets.agent.actions import format_action
from etpi_assets.agent.loop import SUBMIT
from etpi_assets.worlds.running_sum import END, state
from etpi_resources.engines import Request

_STATED = re.compile(re.escape(state(0)).replace("0", r"(\d+)"))
_GIVEN = re.compile(rf"^(\d+|{END})$", re.MULTILINE)


class RunningSumPolicy:
    """`sh next` first; then the last sum plus the last number; the submission where none is left. Has no skill."""

    def __init__(self, skill: Mapping[str, float]) -> None:
        if skill:
            raise ValueError(f"engine.skill: unknown {sorted(skill)}; the teacher of running_sum has no skill to set")

    def __call__(self, request: Request) -> str:
        told = [message["content"] for message in request.messages if message["role"] != "system"]
        given, stated = _GIVEN.findall(told[-1]), _STATED.findall("\n".join(told))
        if not given:
            return str(format_action("sh next"))
        if given[-1] == END:
            return str(format_action(f"echo {SUBMIT}"))
        return str(format_action(state(int(stated[-1] if stated else 0) + int(given[-1]))))
