"""Rollouts written by hand, for tests of what is read off them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from etpi_assets.agent.actions import format_action, read_actions
from etpi_assets.trajectories.records import AgentRecord, Message, RolloutRecord, Turn
from etpi_assets.trajectories.tables import iter_prompts
from etpi_resources.lake.schemas import from_rows

INSTRUCTION = "`fold_lantern` in `src/harbor/tides.py` should return 7. Partner: `moor_skiff` in src/harbor/quay.py."
PLAN = "Plan: I'll take fold_lantern in src/harbor/tides.py first, you take src/harbor/quay.py."
REPLY = "OK, you take src/harbor/tides.py first. I'll do moor_skiff in src/harbor/quay.py."


def say(message: str, to: str = "agent2", quoting: Any = "heredoc") -> str:
    return format_action(format_message(to, message, quoting))  # pyright: ignore[reportReturnType]


def run(command: str) -> str:
    return format_action(command)  # pyright: ignore[reportReturnType]


def agent(
    agent_id: str,
    steps: Sequence[str | tuple[str, Mapping[str, str] | None]],
    *,
    role: str = "proposer",
    exit_status: str = "Submitted",
    message_commands: Sequence[str] = ("send_message",),
) -> AgentRecord:
    """An agent from its turns' texts; a turn may be (text, {sender: message}) with the mail its observation shows."""
    record = AgentRecord(agent_id, f"f{agent_id[-1]}", role, exit_status)
    for number, step in enumerate(steps):
        text, mail = step if isinstance(step, tuple) else (step, None)
        actions, error = read_actions(text, message_commands=message_commands)
        inbox = [{"from": sender, "message": message} for sender, message in (mail or {}).items()]
        captured = {"output_ids": [1] * 10, "prompt_ids": [1], "capture": "native"}
        record.turns.append(Turn(number, text, actions=actions, parse_error=error, inbox=inbox, **captured))
    return record


def rollout(*agents: AgentRecord, outcome: Mapping[str, Any] | None = None, **columns: Any) -> RolloutRecord:
    outcome = {"reward": 1.0, "verdict": "passed"} if outcome is None else dict(outcome)
    given = {"rollout_id": "r1", "task_id": "t1", "origin": "set", "suite": "s", "repo": "harbor", **columns}
    return RolloutRecord(agents=list(agents), outcome=outcome, **given)


def planning_pair(rollout_id: str = "r1", **columns: Any) -> RolloutRecord:
    """Both plan, then do their part."""
    tides, quay = "src/harbor/tides.py", "src/harbor/quay.py"
    first = [(say(PLAN), {"agent2": REPLY}), run(f"cat {tides}"), run(f"sed -i s/1/7/ {tides}")]
    second = [(say(REPLY, "agent1"), {"agent1": PLAN}), run(f"cat {quay}"), run(f"sed -i s/1/7/ {quay}")]
    pair = agent("agent1", first), agent("agent2", second, role="responder")
    return rollout(*pair, rollout_id=rollout_id, **columns)


def prompt(text: str) -> Message:
    return Message("user", text, kind="prompt")


def tasks(*rows: Mapping[str, Any]) -> pa.Table:
    default = {"task_id": "t1", "suite": "s", "repo": "harbor", "split": "train", "payload": "{}"}
    default["instruction"] = INSTRUCTION
    return from_rows("tasks", [{**default, **row} for row in (rows or ({},))])


def prompts_of(turns: Any) -> dict[tuple[str, str, int], list[int]]:
    """Return the whole prompt of each turn with ids."""
    return {key: prompt.tolist() for key, prompt in iter_prompts(turns)}


Quoting = Literal["heredoc", "single", "double"]
_QUOTE_IN_SINGLE = "'\\''"


def format_message(
    to: str,
    message: str,
    quoting: Quoting = "heredoc",
    *,
    wait: Literal["before", "after"] | None = None,
    name: str = "send_message",
) -> str:
    """Write the command that sends `message` to `to`, the inverse of `split_command`."""
    head = f"{name} --wait {to}" if wait == "before" else f"{name} {to}"
    tail = " --wait" if wait == "after" else ""
    if quoting == "heredoc":
        lines = {line.rstrip() for line in message.split("\n")}
        mark, number = "MSG", 0
        while mark in lines:
            number += 1
            mark = f"MSG{number}"
        return f"{head} <<'{mark}'{tail}\n{message}\n{mark}"
    if quoting == "single":
        return f"{head} '{message.replace(chr(39), _QUOTE_IN_SINGLE)}'{tail}"
    escaped = "".join("\\" + c if c in '\\"$`' else c for c in message)
    return f'{head} "{escaped}"{tail}'
