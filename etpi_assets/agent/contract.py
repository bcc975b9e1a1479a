"""The terminal prompt contract: a turn is one thinking block and one bash block, and nothing else.

`read_turn` chooses between this contract and the forms of `actions` by the agent section.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etpi_assets.agent.actions import NO_ACTION, after_think, read_actions
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.trajectories.records import Action
from etpi_resources.chat.tool_forms import ToolForm

OPEN, CLOSE, FENCE = "<thinking>", "</thinking>", "```"

NO_THINKING = "the turn does not open with one <thinking> block"
EMPTY_THINKING = "the thinking is empty"
NO_BLOCK = "no ```bash block follows the thinking"
EMPTY_COMMAND = "the command is empty"
MORE = "the turn holds more than the thinking and one ```bash block"


@dataclass(frozen=True)
class Contract:
    """A turn that satisfies the contract: the text between its thinking tags, and the command."""

    thinking: str
    command: str


def read_contract(text: str) -> Contract | str:
    """Parse a turn under the contract; return the reason if it breaks it.

    The form is `<thinking>…</thinking>`, white space, "```bash", the command on lines of its own, "```", and the end.
    Neither part may contain a tag or a fence, and neither may be blank.
    """
    if not text.startswith(OPEN):
        return NO_THINKING
    thinking, closed, rest = text[len(OPEN) :].partition(CLOSE)
    if not closed or OPEN in thinking:
        return NO_THINKING
    if not thinking.strip():
        return EMPTY_THINKING
    if FENCE in thinking or OPEN in rest or CLOSE in rest:
        return MORE
    opening = f"{FENCE}bash\n"
    block = rest.lstrip()
    if not block.startswith(opening):
        return NO_BLOCK
    command, closed, after = block[len(opening) :].partition(f"\n{FENCE}")
    if not closed:
        return NO_BLOCK
    if after or FENCE in command:
        return MORE
    return Contract(thinking, command) if command.strip() else EMPTY_COMMAND


def format_contract(thinking: str, command: str) -> str:
    """Write a turn under the contract, the inverse of `read_contract`."""
    return f"{OPEN}{thinking}{CLOSE}\n{FENCE}bash\n{command}\n{FENCE}"


def read_turn(
    text: str,
    agent: AgentSection,
    tool_calls: Sequence[Any] | None = None,
    form: ToolForm | None = None,
) -> tuple[list[Action], str | None]:
    """Parse a turn in the form that `agent.action_format` allows; return its actions, and the reason if there are none.

    An answer in words (`action_format = "tool_or_answer"`) has neither. `tool_calls`, `form`: as for `read_actions`.
    """
    if agent.action_format == "tool_or_answer" and not tool_calls and not _calls_tools(after_think(text), form):
        return [], None
    if agent.action_format != "thinking_bash":
        actions, error = read_actions(text, tool_calls, form=form)
        fenced = agent.action_format == "tool_call" and any(action.form == "fenced" for action in actions)
        return ([], NO_ACTION) if fenced else (actions, error)
    parsed = read_contract(text)
    return ([], parsed) if isinstance(parsed, str) else ([Action("bash", parsed.command, form="fenced")], None)


def _calls_tools(body: str, form: ToolForm | None) -> bool:
    return "<tool_call>" in body or (form is not None and bool(form.parse(body)))
