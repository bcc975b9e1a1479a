"""The page of one rollout as a conversation, with its verdict, scores and lineage."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from etpi.view.catalog_file import Queries, Row
from etpi.view.conversation import read_conversation
from etpi.view.pages.page import NotFound, Page
from etpi_resources.lake.lake import Lake

SCORES = (
    ("plan_first", "plan_first_reason"),
    ("plan_content", "plan_content_reason"),
    ("follow_through", None),
)


def key_of(request: Request) -> dict[str, str]:
    """Return the rollout that the path names, as variables of the queries."""
    path = request.path_params
    return {"rollout": path["rollout_id"], "origin": path["origin"], "made_for": path["made_for"]}


def find_rollout(queries: Queries, key: dict[str, str]) -> Row:
    """Return the rollout's row. Raises NotFound if the catalog has none under this address."""
    row = queries.row("rollout", **key)
    if row is None:
        raise NotFound(
            f"The catalog has no rollout {key['rollout']!r} of {key['made_for']!r} ({key['origin']}). It may be of "
            "another version; the list of rollouts shows the current ones."
        )
    return row


def rollout(queries: Queries, lake: Lake, request: Request) -> Page:
    key = key_of(request)
    row = find_rollout(queries, key)
    agents = queries.rows("agents", **key)
    by_time = row["engine"] == "imported"
    conversation = read_conversation(agents, queries.rows("turns", **key), queries.rows("prompts", **key), by_time)
    of_set, of_rl = key["origin"] == "set", key["origin"] == "rl"
    values = {
        "rollout": row,
        "conversation": conversation,
        "outcome": loads(row["outcome"]),
        "sampler": loads(row["sampler"]),
        "patches": patches(row, agents),
        "scores": [(name, row[name], row[reason] if reason else None) for name, reason in SCORES],
        "fates": queries.rows("fate", rollout=key["rollout"]) if of_set else [],
        "trained_on": queries.rows("trained_on", rollout=key["rollout"]) if of_set else [],
        "reinforced": queries.rows("reinforced_on", rollout=key["rollout"], made_for=key["made_for"]) if of_rl else [],
        "live": False,
    }
    return Page("rollout.html.jinja", values)


def loads(text: str | None) -> Any:
    """Return a JSON column's value; the text itself if it is no JSON."""
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def patches(row: Row, agents: list[Row]) -> dict[str, str]:
    """Return {agent or "workspace": unified diff}: of the agents' workspaces, or the patches that were recorded."""
    files = loads(row["final_files"])
    if isinstance(files, dict) and files:
        return {str(name): text if isinstance(text, str) else json.dumps(text) for name, text in files.items() if text}
    return {agent["agent_id"]: agent["patch"] for agent in agents if agent["patch"]}
