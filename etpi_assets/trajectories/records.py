"""The record of a rollout that the agent loop, the importers and the templates all produce."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

Capture = Literal["native", "retokenised", "none"]


@dataclass(unsafe_hash=True)  # every turn has one, and a frozen one takes three times as long
class Action:
    """One command or message of an assistant turn; never changed.

    Attributes:
        kind: "bash" or "send_message".
        command: the bash command as written (for a message: the whole command that sent it).
        to, message: recipient and text of a message.
        form: the form of the call: "tool_calls", "xml", "hermes", "fenced" or "bracket" (`[tool_use Bash] {…}`).
        pure: for a message: the command only sends.
        wait: for a message: the sender takes no turns until an answer comes.
    """

    kind: Literal["bash", "send_message"]
    command: str
    to: str | None = None
    message: str | None = None
    form: str = "xml"
    pure: bool = True
    wait: bool = False


@dataclass
class Turn:
    """One assistant turn. `prompt_ids` is the whole prompt; ids are in the int32 range, None if not captured."""

    turn: int
    content: str
    prompt_ids: list[int] | None = None
    output_ids: list[int] | None = None
    logprobs: list[float] | None = None
    capture: Capture = "none"
    finish_reason: str | None = None
    reasoning: str | None = None
    think_tokens: int | None = None
    post_think_tokens: int | None = None
    actions: list[Action] = field(default_factory=list)
    parse_error: str | None = None
    observation: str | None = None
    exit_code: int | None = None
    inbox: list[dict[str, str]] = field(default_factory=list)
    at: datetime | None = None


@dataclass
class Message:
    """One chat message as captured."""

    role: str
    content: str
    turn: int | None = None
    kind: str = "other"
    reasoning: str | None = None
    tool_calls: list[Any] | None = None
    at: datetime | None = None


@dataclass
class AgentRecord:
    """One agent of a rollout: its turns, its messages and its patch."""

    agent_id: str
    feature_id: str
    role: str
    exit_status: str
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    patch: str | None = None


UNTRAINED = "^(helper|summary|side|dropped|retry)[0-9]+$"
"""The kinds of messages of other conversations, which a harness held beside the agent's own."""


_LIMIT = re.compile(
    r"limit|exceed|max_?(?:imum|step|turn|iter|token)|budget|exit_(?:cost|context)|time_?out|timed", re.IGNORECASE
)
_ERROR = re.compile(
    r"error|exception|fail(?:ed|ure)|crash|abort|cancel|interrupt|killed|exit_(?:format|api|command)|refus|not_started",
    re.IGNORECASE,
)


def exit_kind(status: str | None) -> Literal["ended", "limit", "error"]:
    """Return how a run with an exit status ended: by itself, at a limit, or by an error; unknown ones by themselves."""
    if _ERROR.search(status or ""):
        return "error"
    return "limit" if _LIMIT.search(status or "") else "ended"


def own_messages(agent: AgentRecord) -> list[Message]:
    """Return the messages of the agent's own conversation."""
    return [message for message in agent.messages if not re.match(UNTRAINED, message.kind)]


@dataclass
class RolloutRecord:
    """One rollout: columns of the `rollouts` table, and its agents.

    Attributes:
        outcome: the judge's or the source's verdict: {"reward": float | None, "verdict": str, ...}.
        tools: the tool schemas of an imported source, as recorded.
    """

    rollout_id: str
    origin: Literal["set", "eval", "rl"]
    suite: str | None
    task_id: str | None
    repo: str | None
    agents: list[AgentRecord]
    task_hash: str | None = None
    rollout_set: str | None = None
    experiment: str | None = None
    checkpoint_role: str | None = None
    checkpoint_id: str | None = None
    seed: int | None = None
    sample_seed: int | None = None
    decoding: str | None = None
    sample: int = 0
    engine: str = "imported"
    teacher: str | None = None
    sampler: dict[str, Any] | None = None
    outcome: dict[str, Any] | None = None
    source: str | None = None
    started_at: datetime | None = None
    wall_seconds: float | None = None
    error: str | None = None
    tools: list[Any] | None = None
