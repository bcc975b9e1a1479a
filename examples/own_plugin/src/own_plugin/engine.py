"""An engine that sorts: it writes the commands that solve a task of `sorted_lines`."""

from __future__ import annotations

from etpi_assets.agent.actions import format_action
from etpi_assets.agent.loop import SUBMIT
from etpi_assets.specs.rollout_set import EngineSection
from etpi_resources.chat.format import ChatFormat
from etpi_resources.engines import Engine, Request
from etpi_resources.engines.scripted import ScriptedEngine

COMMANDS = ("LC_ALL=C sort input.txt > output.txt", f"echo {SUBMIT}")


def sorter(section: EngineSection, chat: ChatFormat) -> Engine:
    """Open the engine of an `[engine]` section; a real one would read `section.model` and `section.urls`."""
    return ScriptedEngine(_turn, chat, section.teacher, settings={"commands": COMMANDS})


def _turn(request: Request) -> str:
    turn = sum(message["role"] == "assistant" for message in request.messages)
    return str(format_action(COMMANDS[min(turn, len(COMMANDS) - 1)]))
