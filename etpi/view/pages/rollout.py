"""The page of one rollout as a conversation, with its verdict, scores and lineage."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from etpi.view.catalog_file import Queries, Row
from etpi.view.conversation import read_conversation
from etpi.view.pages.page import NotFound, Page
from etpi_resources import outside
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
    partition = {"origin": key["origin"], "made_for": key["made_for"], "rollouts": [key["rollout"]]}
    agents, turns = queries.rows("agents", **partition), queries.rows("turns", **partition)
    prompts = queries.rows("prompts", **key)
    known: dict[str, Any] = {
        "neighbours": queries.row("neighbours", **key, role=row["checkpoint_role"], decoding=row["decoding"])
    }
    if key["origin"] == "set":
        of_set = {"fates": "fate", "blamed": "rollout_blame"}
        known |= {name: queries.rows(query, rollout=key["rollout"]) for name, query in of_set.items()}
        known["trained_on"] = _trained_on(queries, key["rollout"])
    elif key["origin"] == "rl":
        known["reinforced"] = queries.rows("reinforced_on", rollout=key["rollout"], made_for=key["made_for"])
    return rollout_page(row, agents, turns, prompts, **known)


def rollout_page(row: Row, agents: list[Row], turns: list[Row], prompts: list[Row], **known: Any) -> Page:
    """Return the page of a rollout. `known`: more of it from the catalog, which lacks live ones."""
    values = {
        "rollout": row,
        "conversation": read_conversation(agents, turns, prompts, row["engine"] == "imported"),
        "outcome": loads(row["outcome"]),
        "sampler": loads(row["sampler"]),
        "patches": patches(row, agents),
        "scores": [(name, row.get(name), row.get(reason) if reason else None) for name, reason in SCORES],
        **dict.fromkeys(("fates", "trained_on", "blamed", "reinforced"), ()),
        "neighbours": None,
        "live": False,
    }
    return Page("rollout.html.jinja", values | known)


def _trained_on(queries: Queries, rollout_id: str) -> list[Row]:
    """Return the data sets that have rows of a rollout, with its share of their loss."""
    rows = queries.rows("trained_on", rollout=rollout_id)
    totals = {row["experiment"]: row["loss_weight"] for row in queries.kept_rows("loss_totals")} if rows else {}
    for row in rows:
        total = totals.get(row["experiment"])
        row["share_of_loss"] = row["loss_weight"] / total if total and row["loss_weight"] else None
    return rows


def loads(text: Any) -> Any:
    """Return a JSON column's value; the text itself if it is no JSON, and a value that a journal holds as it is."""
    try:
        return (outside.loads(text) if text else None) if isinstance(text, str) else text
    except ValueError:
        return text


def patches(row: Row, agents: list[Row]) -> dict[str, str]:
    """Return {agent or "workspace": unified diff}: of the agents' workspaces, or the patches that were recorded."""
    files = loads(row["final_files"])
    if isinstance(files, dict) and files:
        return {str(name): text if isinstance(text, str) else json.dumps(text) for name, text in files.items() if text}
    return {agent["agent_id"]: agent["patch"] for agent in agents if agent["patch"]}
