"""The normal form of a recorded conversation: every reader writes it, every later stage reads nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from etpi_assets.trajectories.calls import ToolCall
from etpi_assets.trajectories.records import Action, RolloutRecord

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(slots=True)
class Message:
    """One message of an imported conversation.

    Attributes:
        thought: the reasoning before the text.
        result_of: of a result, the id of the call that it answers, or the tool's name.
        time: in UTC.
        trained: an assistant's message is a turn, not context.
        kind: as in the lake; None: it follows from the role.
        inbox: messages of other agents that it shows; None: `fill_agent` parses them from the text.
        actions: actions of the turn as the source recorded them; None: `fill_agent` parses them.
        broken_call: the text is a call that cannot be parsed.
    """

    role: Role
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    thought: str | None = None
    time: datetime | None = None
    trained: bool = True
    kind: str | None = None
    prompt_ids: list[int] | None = None
    output_ids: list[int] | None = None
    logprobs: list[float] | None = None
    capture: Literal["native", "retokenised"] = "native"
    finish: str | None = None
    exit_code: int | None = None
    inbox: list[dict[str, str]] | None = None
    actions: list[Action] | None = None
    broken_call: bool = False
    result_of: str | None = None


@dataclass
class RunInfo:
    """Facts of a run besides its messages.

    Attributes:
        rollout: the record, without agents.
        patch, exit_status: of its agent; the status is etpi's name of how the run ended.
        truncated: the last turn was cut at the output limit.
        numbered: the task id is a number that names a task within its file alone.
    """

    rollout: RolloutRecord
    patch: str | None
    exit_status: str | None
    truncated: bool
    numbered: bool
