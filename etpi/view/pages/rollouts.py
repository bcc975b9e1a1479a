"""The list of rollouts with its filters and search, and the page of one: its conversation, scores and lineage."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from starlette.requests import Request

from etpi.view import text_search
from etpi.view.catalog_file import Queries, Row
from etpi.view.conversation import read_conversation
from etpi.view.pages.page import NotFound, Page, decimal, number, text, with_query
from etpi_resources.lake.lake import Lake

PAGE_ROWS = 50
LISTED_VALUES = 60
"""The most values of a column that a menu offers; the address takes narrowing too."""
FILTERS = ("made_for", "origin", "experiment", "role", "decoding", "repo", "verdict", "exit")
SORTS = ("newest", "task", "reward", "tokens", "turns", "seconds")


def rollouts(queries: Queries, lake: Lake, request: Request) -> Page:
    chosen: dict[str, Any] = {name: text(request, name) for name in (*FILTERS, "task", "reason")}
    chosen |= {"seed": number(request, "seed"), "min_reward": decimal(request, "min_reward")}
    sort = text(request, "sort") or "newest"
    sort = sort if sort in SORTS else "newest"
    first, searched, hits = number(request, "first", 0) or 0, None, {}
    wanted = text(request, "text")
    if wanted:
        where = {"origin": chosen["origin"], "made_for": chosen["made_for"], "experiment": chosen["experiment"]}
        narrowing = {name: value for name, value in chosen.items() if value is not None and name not in where}
        ids = queries.column("rollouts", "rollout_id", **chosen, first=0, count=10**9) if narrowing else None
        allowed = None if ids is None else frozenset(ids)
        searched = text_search.search(lake, wanted, text(request, "after"), **where, allowed=allowed)
        hits = {(hit.origin, hit.made_for, hit.rollout_id): hit for hit in reversed(searched.hits)}
    rows = queries.rows(
        "rollouts", **chosen, sort=sort, first=0 if wanted else first, count=10_000 if wanted else PAGE_ROWS,
        ids=[hit.rollout_id for hit in searched.hits] if searched else None,
    )  # fmt: skip
    if searched:
        rows = [row for row in rows if (row["origin"], row["made_for"], row["rollout_id"]) in hits]
    values: dict[str, list[tuple[str, int]]] = defaultdict(list)
    narrowed = any(value is not None for value in chosen.values())
    for row in queries.rows("filter_values", **chosen) if narrowed else queries.kept_rows("filter_values"):
        if len(values[row["name"]]) < LISTED_VALUES or row["value"] == chosen[row["name"]]:
            values[row["name"]].append((row["value"], row["n"]))
    matches = len(rows) if searched else rows[0]["matches"] if rows else 0
    following = None
    if searched and searched.resume:
        following = with_query(request, after=searched.resume)
    elif not searched and first + PAGE_ROWS < matches:
        following = with_query(request, first=first + PAGE_ROWS)
    before = with_query(request, first=max(0, first - PAGE_ROWS) or None) if first and not searched else None
    page = {
        "rows": rows, "matches": matches, "first": first, "values": dict(values), "chosen": chosen | {"sort": sort},
        "text": wanted, "searched": searched, "hits": hits, "following": following, "before": before, "sorts": SORTS,
        "filters": FILTERS, "page_rows": PAGE_ROWS,
        "filtered": [n for n, v in chosen.items() if v is not None] + (["text"] if wanted else []),
    }  # fmt: skip
    return Page("rollouts.html.jinja", page)


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
    conversation = read_conversation(agents, turns, queries.rows("prompts", **key), row["engine"] == "imported")
    of_set, of_rl = key["origin"] == "set", key["origin"] == "rl"
    values = {
        "rollout": row,
        "conversation": conversation,
        "outcome": loads(row["outcome"]),
        "sampler": loads(row["sampler"]),
        "patches": patches(row, agents),
        "scores": [(name, row[name], row[reason] if reason else None) for name, reason in SCORES],
        "fates": queries.rows("fate", rollout=key["rollout"]) if of_set else [],
        "trained_on": _trained_on(queries, key["rollout"]) if of_set else [],
        "blamed": queries.rows("rollout_blame", rollout=key["rollout"]) if of_set else [],
        "reinforced": queries.rows("reinforced_on", rollout=key["rollout"], made_for=key["made_for"]) if of_rl else [],
        "neighbours": queries.row("neighbours", **key, role=row["checkpoint_role"], decoding=row["decoding"]),
        "live": False,
    }
    return Page("rollout.html.jinja", values)


def _trained_on(queries: Queries, rollout_id: str) -> list[Row]:
    """Return the data sets that have rows of a rollout, with its share of their loss."""
    rows = queries.rows("trained_on", rollout=rollout_id)
    totals = {row["experiment"]: row["loss_weight"] for row in queries.kept_rows("loss_totals")} if rows else {}
    for row in rows:
        total = totals.get(row["experiment"])
        row["share_of_loss"] = row["loss_weight"] / total if total and row["loss_weight"] else None
    return rows


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
