"""The list of rollouts: filters, the search of texts, and a page of results."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from starlette.requests import Request

from etpi.view import text_search
from etpi.view.catalog_file import Queries
from etpi.view.pages.page import Page, decimal, number, text, with_query
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
