"""Joins the tables of a rollout set into `CapturedAgent`s: whole token ids per turn, and the prompt a student reads."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.curation.pairs import CapturedAgent, CapturedTurn
from etpi_assets.curation.retokenise import retokenise
from etpi_assets.curation.steering import FirstPrompt, Messages
from etpi_assets.specs.experiment import PairsSection
from etpi_assets.trajectories.tables import iter_prompts
from etpi_resources.chat.format import ChatFormat, TemplateRefuses
from etpi_resources.chat.sources import map_conversations
from etpi_resources.chat.tool_forms.call import function_schema
from etpi_resources.token_ids import arrays

AgentKey = tuple[str, str]
DefaultPrompt = Callable[[str | None, str], FirstPrompt | None]
"""(task id, agent id) -> the first prompt of a student at that task; None if it is unknown."""

_KEY = ("rollout_id", "agent_id")
_FACTS = ("task_id", "repo", "teacher", "suite", "rollout_set", "sample")
_TURN = ("turn", "capture", "finish_reason", "parse_error")
_TEXT = ("content", "reasoning")
COLUMNS = {
    "rollouts": ("rollout_id", *_FACTS, "tools"),
    "agents": (*_KEY, "role", "exit_status"),
    "turns": (*_KEY, *_TURN, *_TEXT, "prefix_turn", "suffix_ids", "output_ids"),
    "messages": (*_KEY, "index", "turn", "role", "content", "reasoning", "tool_calls", "kind"),
}
"""The columns that curation reads of each table."""


def captured_agents(
    tables: Mapping[str, pa.Table],
    section: PairsSection,
    chat: ChatFormat,
    default_prompt: DefaultPrompt,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Any] | None = None,
) -> Iterator[CapturedAgent]:
    """Yield the agents of the rollouts in the order of `agents`, with the whole prompts of one agent in memory.

    Args:
        tables: `rollouts`, `agents`, `turns` and `messages` of rollouts of one set, all in the same order; at least
            `COLUMNS`.
        template_kwargs, tools: arguments of the student's chat template for turns that are re-tokenised. Without
            `tools`, each rollout's own recorded schemas are offered.

    Raises:
        ValueError: the turns are in another order than the agents.
    """
    rollouts = {row["rollout_id"]: row for row in tables["rollouts"].select(COLUMNS["rollouts"]).to_pylist()}
    native = section.capture == "native"
    prompts = groupby(iter_prompts(tables["turns"]) if native else (), key=lambda item: item[0][:2])
    upcoming = next(prompts, None)
    spoken = tables["messages"]
    if native:  # of a conversation with ids, only the first prompt is read
        spoken = spoken.filter(pc.field("kind") == "prompt")
    turns, messages = _turns_by_agent(tables["turns"]), _messages_by_agent(spoken)
    agents = (
        CapturedAgent(
            *_key(row),
            turns=(),
            default=default_prompt(rollout["task_id"], row["agent_id"]),
            facts={**{name: rollout[name] for name in _FACTS}, "role": row["role"]},
            finished=row["exit_status"] == "Submitted",
            tools=tools if native or tools is not None else recorded_tools(rollout["tools"]),
        )
        for row in tables["agents"].select(COLUMNS["agents"]).to_pylist()
        for rollout in (rollouts[row["rollout_id"]],)
    )

    def retokenised(agent: CapturedAgent) -> CapturedAgent:
        key = agent.rollout_id, agent.agent_id
        read = messages[key]
        if agent.default is not None:  # its messages replace the captured ones, and steering with them
            read = _as_student_reads(turns[key], read, agent.default, agent.tools)
        captured, appended = _retokenised(turns[key], read, chat, template_kwargs, agent.tools, section)
        return replace(agent, turns=captured, appended=appended, messages=read)

    if not native:
        yield from map_conversations(chat.template, retokenised, agents)
        return
    for agent in agents:
        key = agent.rollout_id, agent.agent_id
        prompt_of: dict[int, np.ndarray] = {}
        if upcoming is not None and upcoming[0] == key:
            prompt_of = {turn: prompt for (_, _, turn), prompt in upcoming[1]}
            upcoming = next(prompts, None)
        captured = [_captured_turn(t, prompt_of.get(t["turn"]), t["output"], t["capture"]) for t in turns[key]]
        yield replace(agent, turns=captured, captured=_first_messages(messages[key]) if agent.default else None)
    if upcoming is not None:
        raise ValueError(f"the turns of {upcoming[0]} are in another order than the agents; rebuild raw_rollouts")


def recorded_tools(column: str | None) -> list[Any] | None:
    """Return the schemas in a rollout's `tools` column as chat APIs send them, None if it has none."""
    return None if column is None else [*map(function_schema, json.loads(column))] or None


def _turns_by_agent(table: pa.Table) -> dict[AgentKey, list[dict[str, Any]]]:
    """Return the rows of each agent, their output ids as "output"."""
    turns: defaultdict[AgentKey, list[dict[str, Any]]] = defaultdict(list)
    rows = table.select([*_KEY, *_TURN]).to_pylist()
    outputs = (ids for chunk in table["output_ids"].chunks for ids in arrays(chunk))
    for row, output in zip(rows, outputs, strict=True):
        row["output"] = output
        turns[_key(row)].append(row)
    return turns


def _messages_by_agent(table: pa.Table) -> dict[AgentKey, list[dict[str, Any]]]:
    messages: defaultdict[AgentKey, list[dict[str, Any]]] = defaultdict(list)
    for row in table.select(COLUMNS["messages"]).to_pylist():
        messages[_key(row)].append(row)
    for rows in messages.values():
        rows.sort(key=lambda row: row["index"])
    return messages


def _retokenised(
    turns: Sequence[Mapping[str, Any]],
    messages: Sequence[Mapping[str, Any]],
    chat: ChatFormat,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Any] | None,
    section: PairsSection,
) -> tuple[list[CapturedTurn], bool]:
    """Return the turns' text as the student's ids, and whether the template only appends to the conversation."""
    truncated = {row["turn"] for row in turns if row["finish_reason"] == "length"}
    try:
        rendered = retokenise(
            messages,
            chat,
            truncated=truncated,
            tools=tools,
            template_kwargs=template_kwargs,
            bare=section.strip_think or section.history_think == "strip",
            history=section.history_think == "keep",
            closes=section.strip_think and section.strip_rule == "delimited",
        )
    except TemplateRefuses as error:
        return [replace(_captured_turn(row, None, None, "none"), refused=str(error)) for row in turns], True
    retokenised = {turn.turn: turn for turn in rendered}
    captured = []
    for row in turns:
        turn = retokenised.get(row["turn"])
        if turn is None:
            captured.append(_captured_turn(row, None, None, "none"))
            continue
        with_ids = _captured_turn(row, _ids(turn.prompt_ids), _ids(turn.output_ids), "retokenised")
        error = with_ids.parse_error or turn.fault
        captured.append(
            replace(
                with_ids,
                calls=turn.calls,
                parse_error=error,
                prose_lost=turn.prose_lost,
                bare=(_ids(turn.bare[0]), _ids(turn.bare[1])) if turn.bare else None,
                unstripped=turn.unstripped,
                quoted=turn.quoted,
            )
        )
    return captured, all(turn.appended for turn in retokenised.values())


def _as_student_reads(
    turns: Sequence[Mapping[str, Any]],
    messages: Sequence[Mapping[str, Any]],
    default: FirstPrompt,
    tools: Sequence[Any] | None,
) -> list[dict[str, Any]]:
    """Return the messages with the default prompt, and observations in the role that the agent loop gives them.

    The loop answers as `tool` only where tools are offered and the turn could be parsed, otherwise as `user`, whatever
    role the teacher's chat endpoint required.
    """
    answered = {row["turn"] for row in turns if tools and row["parse_error"] is None}
    later = [
        {**m, "role": "tool" if m["turn"] in answered else "user"} if m["kind"] == "observation" else dict(m)
        for m in messages
        if m["kind"] != "prompt"
    ]
    return [{**m, "kind": "prompt", "turn": None, "tool_calls": None} for m in default.messages] + later


def _first_messages(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Return the messages of the first prompt as the teacher read them."""
    return [{"role": m["role"], "content": m["content"]} for m in messages if m["kind"] == "prompt"]


def _captured_turn(
    row: Mapping[str, Any], prompt: np.ndarray | None, output: np.ndarray | None, capture: str
) -> CapturedTurn:
    return CapturedTurn(row["turn"], prompt, output, capture, row["finish_reason"] == "length", row["parse_error"])


def _key(row: Mapping[str, Any]) -> AgentKey:
    return row["rollout_id"], row["agent_id"]


def _ids(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)
