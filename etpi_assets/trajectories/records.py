"""A rollout as plain values, whoever made it, and its form as tables.

Belongs here: the one record that the agent loop, the importers, the generators and evaluation all yield, and the
lossless encoding of its prompts. Does not belong here: making rollouts, or judging them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

Capture = Literal["native", "retokenised", "none"]


@dataclass(frozen=True)
class Action:
    """One thing an assistant turn does.

    Attributes:
        kind: "bash" or "send_message".
        command: the bash command as written (for a message: the whole command that carried it).
        to, message: recipient and text of a message.
        form: where it was read from: "tool_calls", "xml", "hermes", "fenced" or "bracket" (`[tool_use Bash] {…}`).
        pure: for a message: the command does nothing besides sending.
        wait: for a message: the sender blocks until an answer comes.
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
    """One assistant turn. `prompt_ids` and `output_ids` are whole (int32 range), None where nothing was captured."""

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
    """One agent's part."""

    agent_id: str
    feature_id: str
    role: str
    exit_status: str
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    patch: str | None = None


@dataclass
class RolloutRecord:
    """One rollout: columns of the `rollouts` table, and its agents. `outcome` is the verifier's or the source's
    verdict: {"reward": float | None, "verdict": str, ...}. `tools`: the tool schemas that an imported source recorded,
    as it wrote them."""

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
