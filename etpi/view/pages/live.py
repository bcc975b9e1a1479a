"""Collections that are under way, and rollouts of a journal before they are in the tables."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

from starlette.requests import Request

from etpi.view.catalog_file import Queries
from etpi.view.conversation import read_conversation
from etpi.view.journals import Journals, JournalState
from etpi.view.pages.curves import plots
from etpi.view.pages.page import NotFound, Page, number, text
from etpi.view.pages.rollout import SCORES, loads, patches
from etpi_resources.lake.lake import Lake, Ref

REFRESH_SECONDS = 5
ROLLOUT_COLUMNS = (
    "rollout_id", "origin", "rollout_set", "experiment", "checkpoint_role", "checkpoint_id", "seed", "sample_seed",
    "decoding", "suite", "task_id", "repo", "sample", "engine", "teacher", "exit_status", "started_at", "wall_seconds",
    "error", "source", "final_files", "outcome", "sampler",
)  # fmt: skip

_readers: dict[Any, Journals] = {}


def _journals(lake: Lake) -> Journals:
    return _readers.setdefault(lake.root, Journals(lake))


def live(queries: Queries, lake: Lake, request: Request) -> Page:
    journals = _journals(lake)
    plans = {row["rollout_set"]: _planned(row) for row in queries.rows("plans")}
    values = {
        "refresh": None if text(request, "pause") else REFRESH_SECONDS,
        "active": [
            (state, plans.get(state.key) if state.kind == "rollouts" else _evaluated(queries, lake, state))
            for state in journals.states()
        ],
        "charts": plots(journals.trainings()),
        "now": datetime.now().astimezone(),
        "age": _age,
        "paused": text(request, "pause") is not None,
    }  # fmt: skip
    return Page("live.html.jinja", values)


def _age(written_at: float) -> float:
    """Return the seconds since a file was written."""
    return max(0.0, time.time() - written_at)


def _planned(row: dict[str, Any]) -> int | None:
    if not row["k"]:
        return None
    limit = row["limit_of_tasks"]
    tasks = min(row["tasks"], int(limit)) if limit and limit.isdigit() else row["tasks"]
    return tasks * row["k"] or None


def _evaluated(queries: Queries, lake: Lake, state: JournalState) -> int | None:
    """Return the number of rollouts of an evaluation's journal, which has one checkpoint under one condition."""
    newest = next(iter(state.newest), None)
    if newest is None or not newest.experiment:
        return None
    ref = Ref("experiment_spec", "experiment", newest.experiment)
    specs = lake.read(ref, "specs")["spec"].to_pylist() if lake.current(ref) else []
    section = (json.loads(specs[0]).get("evaluate") or {}) if specs else {}
    tasks = next((row for row in queries.rows("suites") if row["suite"] == newest.suite), None)
    counted = tasks[section.get("split", "heldout")] if tasks else None
    limit = section.get("tasks")
    return min(counted, limit) if counted and isinstance(limit, int) else counted


def journal_rollout(queries: Queries, lake: Lake, request: Request) -> Page:
    name, offset = text(request, "journal") or "", number(request, "offset", 0) or 0
    rows = _journals(lake).rows(name, offset)
    if rows is None:
        raise NotFound(
            f"There is no rollout at position {offset} of {name!r}. The collection may be complete; its rollouts are "
            "then in the list."
        )
    (recorded,) = rows["rollouts"]
    row = dict.fromkeys(ROLLOUT_COLUMNS) | recorded
    outcome = loads(row["outcome"]) if isinstance(row["outcome"], str) else row["outcome"]
    row |= {"verdict": (outcome or {}).get("verdict"), "reward": (outcome or {}).get("reward"), "instruction": None}
    row |= {
        "split": None,
        "output_tokens": None,
        "turns": len(rows["turns"]),
        "infrastructure_error": bool(row["error"]),
    }
    row["started_at"] = datetime.fromisoformat(row["started_at"]) if row["started_at"] else None
    turns = [turn | {"finished_at": None} for turn in rows["turns"]]
    prompts = [message for message in rows["messages"] if message["turn"] is None]
    agents = [agent | {"plan_first": None, "follow_through": None, "reason": None} for agent in rows["agents"]]
    values = {
        "rollout": row, "conversation": read_conversation(agents, turns, prompts), "outcome": outcome,
        "sampler": loads(row["sampler"]) if isinstance(row["sampler"], str) else row["sampler"],
        "patches": patches(row, agents), "scores": [(score, None, None) for score, _ in SCORES],
        "fates": [], "trained_on": [], "reinforced": [], "live": True, "neighbours": None,
    }  # fmt: skip
    return Page("rollout.html.jinja", values)
