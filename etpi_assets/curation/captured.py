"""Rollouts of one set as the agents that `pairs` takes: whole ids, and the prompt a student reads.

Belongs here: joining the tables of a rollout set, by capture. Does not belong here: editing ids.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from etpi_assets.curation.pairs import CapturedAgent, CapturedTurn
from etpi_assets.curation.retokenise import retokenise
from etpi_assets.curation.steering import FirstPrompt, Messages
from etpi_assets.specs.experiment import PairsSection
from etpi_assets.trajectories.tables import iter_prompts
from etpi_resources.chat.format import ChatFormat

AgentKey = tuple[str, str]
Default = Callable[[str | None, str], FirstPrompt | None]
"""(task id, agent id) -> what a student reads first there; None where nobody knows it."""

_KEY = ("rollout_id", "agent_id")
_FACTS = ("task_id", "repo", "teacher", "suite", "rollout_set", "sample")
_TURN = ("turn", "capture", "finish_reason", "parse_error")
COLUMNS = {
    "rollouts": ("rollout_id", *_FACTS, "tools"),
    "agents": (*_KEY, "role", "exit_status"),
    "turns": (*_KEY, *_TURN, "prefix_turn", "suffix_ids", "output_ids"),
    "messages": (*_KEY, "index", "turn", "role", "content", "tool_calls", "kind"),
}
"""What is read of each table."""


def captured_agents(
    tables: Mapping[str, pa.Table],
    section: PairsSection,
    chat: ChatFormat,
    default: Default,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Any] | None = None,
) -> Iterator[CapturedAgent]:
    """The agents of the rollouts, in the order of `agents`; the whole prompts of one are held at a time.

    Args:
        tables: `rollouts`, `agents`, `turns` and `messages` of rollouts of one set, in one order; `COLUMNS` of them.
        template_kwargs, tools: what a student's chat template gets besides the messages, for turns that are
            re-tokenised. Without `tools`, a rollout's own recorded schemas are offered.
    """
    rollouts = {row["rollout_id"]: row for row in tables["rollouts"].select(COLUMNS["rollouts"]).to_pylist()}
    native = section.capture == "native"
    prompts = groupby(iter_prompts(tables["turns"]) if native else (), key=lambda item: item[0][:2])
    given = next(prompts, None)
    turns: defaultdict[AgentKey, list[dict[str, Any]]] = defaultdict(list)
    plain = tables["turns"].select([*_KEY, *_TURN]).to_pylist()
    for row, output in zip(plain, tables["turns"]["output_ids"], strict=True):
        turns[_key(row)].append({**row, "output": output.values.to_numpy() if output.is_valid else None})
    messages: defaultdict[AgentKey, list[dict[str, Any]]] = defaultdict(list)
    for row in tables["messages"].select(COLUMNS["messages"]).to_pylist():
        messages[_key(row)].append(row)
    for agent in tables["agents"].select(COLUMNS["agents"]).to_pylist():
        key = _key(agent)
        rollout = rollouts[key[0]]
        told = sorted(messages[key], key=lambda row: row["index"])
        wanted = default(rollout["task_id"], agent["agent_id"])
        facts = {name: rollout[name] for name in _FACTS}
        facts["role"] = agent["role"]
        finished = agent["exit_status"] == "Submitted"
        if native:
            whole: dict[int, np.ndarray] = {}
            if given is not None and given[0] == key:
                whole = {turn: prompt for (_, _, turn), prompt in given[1]}
                given = next(prompts, None)
            found = [_turn(row, whole.get(row["turn"]), row["output"], row["capture"]) for row in turns[key]]
            yield CapturedAgent(
                *key, found, _before(told) if wanted else None, wanted, facts, finished=finished, tools=tools
            )
        else:
            offered = recorded_tools(rollout["tools"]) if tools is None else tools
            found, appended = _retokenised(turns[key], told, wanted, chat, template_kwargs, offered)
            yield CapturedAgent(
                *key, found, default=wanted, facts=facts, appended=appended, finished=finished, tools=offered
            )
    if given is not None:
        raise ValueError(f"the turns of {given[0]} do not stand where `agents` has that agent; they are in one order")


def recorded_tools(column: str | None) -> list[Any] | None:
    """The schemas of a rollout's `tools` column; None where it has none."""
    return None if column is None else json.loads(column) or None


def _retokenised(
    turns: Sequence[Mapping[str, Any]],
    messages: Sequence[Mapping[str, Any]],
    default: FirstPrompt | None,
    chat: ChatFormat,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Any] | None,
) -> tuple[list[CapturedTurn], bool]:
    """The turns as text in the student's ids, and whether the template only appends to the conversation; steering goes
    with the messages that hold it, before anything is ids.

    An agent of ours reads observations in the role that the loop will give them when the student acts, whatever a chat
    endpoint asked for: a tool's answer only where tools are offered and something could be read of the turn.
    """
    if default is not None:
        answered = {row["turn"] for row in turns if tools and row["parse_error"] is None}
        told = [
            {**m, "role": "tool" if m["turn"] in answered else "user"} if m["kind"] == "observation" else m
            for m in messages
            if m["kind"] != "prompt"
        ]
        messages = [{**m, "kind": "prompt", "turn": None, "tool_calls": None} for m in default.messages] + told
    truncated = {row["turn"] for row in turns if row["finish_reason"] == "length"}
    pairs = retokenise(messages, chat, truncated=truncated, tools=tools, template_kwargs=template_kwargs)
    made = {pair.turn: pair for pair in pairs}
    found = []
    for row in turns:
        pair = made.get(row["turn"])
        prompt, output = (None, None) if pair is None else (_ids(pair.prompt_ids), _ids(pair.output_ids))
        made_turn = _turn(row, prompt, output, "none" if pair is None else "retokenised")
        if pair is not None:
            made_turn = replace(made_turn, calls=pair.calls, parse_error=made_turn.parse_error or pair.fault)
        found.append(made_turn)
    return found, all(pair.appended for pair in made.values())


def _before(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """The first messages as the teacher read them."""
    return [{"role": m["role"], "content": m["content"]} for m in messages if m["kind"] == "prompt"]


def _turn(row: Mapping[str, Any], prompt: np.ndarray | None, output: np.ndarray | None, capture: str) -> CapturedTurn:
    return CapturedTurn(row["turn"], prompt, output, capture, row["finish_reason"] == "length", row["parse_error"])


def _key(row: Mapping[str, Any]) -> AgentKey:
    return row["rollout_id"], row["agent_id"]


def _ids(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)
