"""Harbor's Agent Trajectory Interchange Format, version 1.7: one document per rollout.

A turn becomes one step, even if the harness recorded it in several blocks. Values without a field in the format go into
`extra.etpi`, where the importer reads them. Further agents of a rollout become subagent trajectories.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from etpi_assets.exports.experiment_data import ExportSource
from etpi_assets.exports.format import Written
from etpi_assets.importers.atif import EXPORT_KEY
from etpi_assets.trajectories.calls import stored_call
from etpi_assets.trajectories.records import AgentRecord, Message, RolloutRecord, Turn, own_messages

VERSION = "ATIF-v1.7"
_CONTEXT = {"is_copied_context", "llm_call_count"}
"""Keys of a step that is no captured turn."""


def document(record: RolloutRecord) -> dict[str, Any]:
    """Convert a rollout to a document (JSON)."""
    first, *subagents = record.agents
    trajectory = _of_agent(record, first)
    reward = (record.outcome or {}).get("reward")
    about = {"rollout_id": record.rollout_id, "task_id": record.task_id, "repo": record.repo, "reward": reward}
    trajectory["extra"][EXPORT_KEY] |= _without_nulls(about)
    if subagents:
        trajectory["subagent_trajectories"] = [_of_agent(record, agent) for agent in subagents]
    return trajectory


def _of_agent(record: RolloutRecord, agent: AgentRecord) -> dict[str, Any]:
    about = {name: getattr(agent, name) for name in ("agent_id", "feature_id", "role", "exit_status", "patch")}
    steps = [{"step_id": number + 1, **step} for number, step in enumerate(_steps(agent))]
    return {
        "schema_version": VERSION,
        "session_id": record.rollout_id,
        "trajectory_id": agent.agent_id,
        "agent": _without_nulls(
            {
                "name": record.engine,
                "version": "unknown",
                "model_name": record.teacher,
                "tool_definitions": record.tools,
            }
        ),
        "steps": steps,
        "extra": {EXPORT_KEY: _without_nulls(about)},
    }


def _steps(agent: AgentRecord) -> Iterator[dict[str, Any]]:
    turns = {turn.turn: turn for turn in agent.turns}
    step: dict[str, Any] | None = None  # the current turn's step, to which its observations belong
    converted: set[int] = set()
    messages = own_messages(agent)
    answers = Counter(m.turn for m in messages if m.role != "assistant")
    for message in messages:
        if message.role == "assistant" and message.kind == "action" and message.turn in turns:
            if message.turn not in converted:
                if step is not None:
                    yield step
                converted.add(message.turn)
                blocks = [m for m in agent.messages if m.turn == message.turn and m.kind == "action"]
                step = _turn(turns[message.turn], blocks)
        elif message.role == "assistant":
            if step is not None:
                yield step
            step = _context(message)
        elif step is not None and (message.role == "tool" or not _CONTEXT & step.keys()):
            results = step.setdefault("observation", {"results": []})["results"]
            results.append(_result(message, step))
            if message.turn in turns and len(results) == answers[message.turn]:
                turn = turns[message.turn]
                for result in results:
                    result["extra"][EXPORT_KEY]["inbox"] = []
                results[-1]["extra"][EXPORT_KEY] |= _without_nulls({"exit_code": turn.exit_code, "inbox": turn.inbox})
        else:
            if step is not None:
                yield step
                step = None
            source = "system" if message.role == "system" else "user"
            about = {EXPORT_KEY: _without_nulls({"kind": message.kind, "role": message.role})}
            yield _without_nulls(
                {"source": source, "message": message.content, "timestamp": _time(message.at), "extra": about}
            )
    if step is not None:
        yield step


def _context(message: Message) -> dict[str, Any]:
    """Convert an assistant message that is no captured turn: a demonstration, a summary, or text of no model."""
    copied = {"is_copied_context": True, "reasoning_content": message.reasoning}
    mark = copied if message.kind == "prompt" else {"llm_call_count": 0}  # the format forbids thoughts of no model
    calls = [_call(call, f"context-{i}") for i, call in enumerate(message.tool_calls or ())]
    about = {"message": message.content, "timestamp": _time(message.at)}
    return _without_nulls({"source": "agent", **about, "tool_calls": calls or None, **mark})


def _turn(turn: Turn, blocks: Sequence[Message]) -> dict[str, Any]:
    calls = [call for block in blocks for call in block.tool_calls or ()]
    metrics = {
        "prompt_token_ids": turn.prompt_ids,
        "completion_token_ids": turn.output_ids,
        "logprobs": turn.logprobs,
        "completion_tokens": None if turn.output_ids is None else len(turn.output_ids),
        "extra": _without_nulls({"finish_reason": turn.finish_reason}) or None,
    }
    if turn.capture == "retokenised":
        metrics["extra"] = {**(metrics["extra"] or {}), EXPORT_KEY: {"capture": "retokenised"}}
    return _without_nulls(
        {
            "source": "agent",
            "message": turn.content,
            "timestamp": _time(turn.at),
            "reasoning_content": turn.reasoning,
            "tool_calls": [_call(call, f"{turn.turn}-{i}") for i, call in enumerate(calls)] or None,
            "metrics": _without_nulls(metrics) or None,
            "extra": {EXPORT_KEY: {"actions": [asdict(action) for action in turn.actions]}} if turn.actions else None,
        }
    )


def _call(call: Any, name: str) -> dict[str, Any]:
    """Convert a tool call; `extra` keeps it as captured."""
    read = stored_call(call)
    text = {"arguments": read.raw} if isinstance(read.raw, str) else {}
    return {
        "tool_call_id": read.id or name,
        "function_name": read.name or "unknown",
        "arguments": text if read.arguments is None else read.arguments,
        "extra": {EXPORT_KEY: {"call": call}},
    }


def _result(message: Message, step: dict[str, Any]) -> dict[str, Any]:
    """Convert an observation; tool messages are matched to the step's calls in order."""
    calls = step.get("tool_calls") or []
    answered = [r for r in step["observation"]["results"] if "source_call_id" in r]
    about = {"role": message.role, "kind": message.kind, "at": _time(message.at)}
    result: dict[str, Any] = {"content": message.content, "extra": {EXPORT_KEY: _without_nulls(about)}}
    if message.role == "tool" and len(answered) < len(calls):
        result["source_call_id"] = calls[len(answered)]["tool_call_id"]
    return result


def _time(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def write(source: ExportSource, folder: Path) -> Written:
    rows = {}
    (folder / "trajectories").mkdir()
    for record in source.records():
        name = f"trajectories/{record.rollout_id}.json"
        (folder / name).write_text(json.dumps(document(record), ensure_ascii=False), encoding="utf-8")
        rows[name] = 1
    return Written(rows)
