"""The check that prompts hold a result for every call: a table that lost its tool messages still renders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import pyarrow as pa

from etpi_assets.curation.hits import OnHit, ignore

_COLUMNS = ("rollout_id", "agent_id", "turn", "role", "tool_calls")


def result_figures(messages: pa.Table, pairs: pa.Table, hit: OnHit = ignore) -> dict[str, Any]:
    """Count the trained agents with structured calls, and those with calls whose results are missing or too many.

    The calls of a response are compared with the messages up to the next response: a message of a tool for each call,
    one for all of them, or a user's message, in which some agents show results. After the last response there may be
    none. Agents with recorded ids are not judged, nor responses whose calls, if they have any, are in their text.

    Args:
        messages: with the columns rollout_id, agent_id, turn, role and tool_calls, in the order of the conversations.
    """
    keys = zip(*(pairs[name].to_pylist() for name in ("rollout_id", "agent_id", "capture")), strict=True)
    rendered = {(rollout, agent) for rollout, agent, capture in keys if capture != "native"}
    figures: dict[str, Any] = {"calling": 0, "unanswered": 0, "first": []}
    rows = messages.select(list(_COLUMNS)).to_pylist()
    for agent, group in groupby(rows, lambda row: (row["rollout_id"], row["agent_id"])):
        conversation = list(group)
        if agent not in rendered or not any(row["tool_calls"] for row in conversation):
            continue
        figures["calling"] += 1
        if (place := unanswered(conversation)) is not None:
            figures["unanswered"] += 1
            hit("/".join(agent), "unanswered", place)
            figures["first"] += [f"{'/'.join(agent)}: {place}"][: 1 - len(figures["first"])]
    return figures


def unanswered(conversation: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the first response whose calls have no result, or a number of results that fits no way to answer."""
    calls, results, words, turn = 0, 0, 0, None
    for row in conversation:
        if row["role"] != "assistant":
            results += row["role"] == "tool"
            words += row["role"] != "tool"
            continue
        begins = results or words or row["turn"] != turn
        if begins and calls and (results > calls or 1 < results < calls or not (results or words)):
            return f"turn {turn} has {calls} calls and {results} results"
        calls, results, words = (0, 0, 0) if begins else (calls, results, words)
        calls, turn = calls + len(_listed(row["tool_calls"])), row["turn"]
    return None


def _listed(calls: Any) -> list[Any]:
    return json.loads(calls) if isinstance(calls, str) else calls or []
