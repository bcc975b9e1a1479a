"""Collections that are under way, and rollouts of a journal before they are in the tables."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

from starlette.requests import Request

from etpi.view.catalog_file import Queries
from etpi.view.journals import Journals, JournalState
from etpi.view.pages.curves import plots
from etpi.view.pages.page import NotFound, Page, number, text
from etpi.view.pages.rollout import loads, rollout_page
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
    states = [(state, _planned(lake, state)) for state in journals.states()]
    trainings = journals.trainings()
    values = {
        "refresh": None if text(request, "pause") else REFRESH_SECONDS,
        "active": [(state, planned) for state, planned in states if planned is None or state.n < planned],
        "complete": [state for state, planned in states if planned is not None and state.n >= planned],
        "trainings": trainings,
        "charts": plots(step for training in trainings for step in training.steps),
        "now": datetime.now().astimezone(),
        "written": lambda state: max(0.0, time.time() - state.written_at),
        "paused": text(request, "pause") is not None,
    }  # fmt: skip
    return Page("live.html.jinja", values)


def _planned(lake: Lake, state: JournalState) -> int | None:
    """Return the number of rollouts that a journal will have; an evaluation's has one checkpoint under one condition.
    None if the lake does not say.

    It is read from the lake, since a first run publishes its catalog at its end.
    """
    newest = next(iter(state.newest), None)
    section: dict[str, Any] = {}
    if state.kind == "rollouts":
        section = _spec(lake, "rollout_set", state.key)
    elif newest is not None and newest.experiment:
        section = _spec(lake, "experiment", newest.experiment).get("evaluate") or {}
    suite = section.get("suite")
    if not suite or lake.current(ref := Ref("tasks", "suite", suite)) is None:
        return None
    splits = lake.read(ref, "tasks", ["split"])["split"].to_pylist()
    split = section.get("split", "all")
    tasks = len(splits) if split == "all" else splits.count(split)
    return min(tasks, section.get("tasks") or tasks) * section.get("k", 1) or None


def _spec(lake: Lake, kind: str, name: str) -> dict[str, Any]:
    ref = Ref(f"{kind}_spec", kind, name)
    return json.loads(lake.read(ref, "specs")["spec"][0].as_py()) if lake.current(ref) else {}


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
    outcome = loads(row["outcome"]) or {}
    row |= {"verdict": outcome.get("verdict"), "reward": outcome.get("reward"), "turns": len(rows["turns"])}
    row |= {"infrastructure_error": bool(row["error"])} | dict.fromkeys(("instruction", "split", "output_tokens"))
    row["started_at"] = datetime.fromisoformat(row["started_at"]) if row["started_at"] else None
    turns = [turn | {"finished_at": None} for turn in rows["turns"]]
    prompts = [message for message in rows["messages"] if message["turn"] is None]
    agents = [agent | {"plan_first": None, "follow_through": None, "reason": None} for agent in rows["agents"]]
    return rollout_page(row, agents, turns, prompts, live=True)
