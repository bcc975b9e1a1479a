"""The overview, the page of an experiment, and its comparisons: regressions, and one task beside another."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

from starlette.requests import Request

from etpi.view.catalog_file import Queries, Row
from etpi.view.conversation import Conversation, read_conversation
from etpi.view.pages.page import NotFound, Page, number, text
from etpi_assets.reports import answer, story
from etpi_assets.reports.changes import OUTCOME, Change, summary, tone_of
from etpi_assets.reports.facts import HEADLINE, headline_metrics, leading_metrics
from etpi_assets.reports.tainted import checkpoint_lines, line
from etpi_assets.scoring.published import in_reading
from etpi_resources.lake.lake import Lake
from etpi_resources.links import rollouts_page, task_page

COLUMNS = ("solved", "plan_first", "plan_content", "follow_through", "called", "parsed", "submitted")
"""The figures of the overview after the main metrics, the most important first; it shows MOST_COLUMNS of them."""
MOST_COLUMNS = 5
SIDES = {"base": "base", "sft": "student", "rl": "student (reinforced)", "teacher": "teacher"}


def overview(queries: Queries, lake: Lake, request: Request) -> Page:
    figures = queries.rows("figures")
    table: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in figures:
        table[row["experiment"], row["decoding"]][row["metric"]] = row
    experiments = [
        row
        | {"decodings": [(d, metrics) for (name, d), metrics in sorted(table.items()) if name == row["experiment"]]}
        | {"main": main_metric(json.loads(row["spec"]))}
        for row in queries.rows("experiments")
    ]
    ordered = dict.fromkeys([*(row["main"] for row in experiments), *COLUMNS])
    columns = [name for name in ordered if any(name in row for row in table.values())][:MOST_COLUMNS]
    counts = _verdicts_by(queries.rows("verdict_counts"), ("made_for",), origin="set")
    sets = [row | {"verdicts": counts.pop((row["rollout_set"],), {})} for row in queries.rows("rollout_sets")]
    values = {"experiments": experiments, "columns": columns, "sets": sets, "suites": queries.rows("suites")}
    return Page("overview.html.jinja", values)


def _verdicts_by(rows: list[Row], names: tuple[str, ...], origin: str | None = None) -> dict[tuple[Any, ...], Any]:
    counts: dict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
    for row in rows:
        if origin is None or row["origin"] == origin:
            counts[tuple(row[name] for name in names)][row["verdict"]] += row["n"]
    return dict(counts)


def find_experiment(queries: Queries, name: str) -> Row:
    """Return the experiment's row. Raises NotFound if the catalog has none of that name."""
    row = queries.row("experiments", experiment=name)
    if row is None:
        raise NotFound(f"The catalog has no experiment {name!r}; the overview lists those that it has.")
    return row


def experiment(queries: Queries, lake: Lake, request: Request) -> Page:
    name = request.path_params["experiment"]
    row = find_experiment(queries, name)
    spec = json.loads(row["spec"])
    main, first = main_metric(spec), leading_metrics(spec.get("metrics") or {})
    order = {metric: place for place, metric in enumerate(dict.fromkeys((*first, *COLUMNS, *HEADLINE)))}
    figures = sorted(
        queries.rows("figures", experiment=name),
        key=lambda r: (r["decoding"], order.get(r["metric"], 99), r["metric"]),
    )
    counts = _verdicts_by(
        queries.rows("verdict_counts", experiment=name), ("origin", "made_for", "checkpoint_role", "decoding")
    )
    verdicts = [
        {
            "label": {"set": f"{made_for} (teacher)", "rl": "rl in training"}.get(origin, f"{role} {decoding or ''}"),
            "link": rollouts_page(origin=origin, made_for=made_for, role=role, decoding=decoding),
            "verdicts": {
                verdict: (n, rollouts_page(origin=origin, made_for=made_for, role=role, decoding=decoding,
                                           verdict=verdict))
                for verdict, n in counter.most_common()
            },
            "total": sum(counter.values()),
        }
        for (origin, made_for, role, decoding), counter in sorted(
            counts.items(), key=lambda item: tuple(str(part or "") for part in item[0])
        )
    ]  # fmt: skip
    pairs, tainted = queries.rows("changes", experiment=name), queries.rows("tainted", experiment=name)
    values = {
        **_answer(queries, name, spec, main, pairs, counts),
        "experiment": row,
        "settings": settings(spec),
        "spec": spec,
        "main": main,
        "figures": [[f for f in figures if (f["metric"] in {main, *first}) is leads] for leads in (True, False)],
        "checks": queries.rows("failed_checks", experiment=name),
        "verdicts": verdicts,
        "changes": Counter(pair["change"] for pair in pairs),
        "checkpoints": queries.rows("checkpoints", experiment=name),
        "tainted": checkpoint_lines(tainted) or [line(row) for row in tainted],
        "shares": {row["checkpoint_id"]: row["share"] for row in tainted if row["kind"] == "checkpoint"},
        "reports": queries.rows("reports", experiment=name),
        "drops": queries.rows("dataset_drops", experiment=name),
    }
    return Page("experiment.html.jinja", values)


def main_metric(spec: dict[str, Any]) -> str:
    """Return the main metric of a resolved spec, in its reading."""
    metrics = spec.get("metrics") or {}
    return in_reading(metrics.get("main", OUTCOME), metrics.get("reading", "hardened"))


def _answer(
    queries: Queries, name: str, spec: dict[str, Any], main: str, pairs: list[Row], counts: dict[tuple[Any, ...], Any]
) -> dict[str, Any]:
    """Return the values of the page's first screen: the sentences of the report, and one task side by side."""
    ended: Counter[str] = Counter()
    teacher: Counter[str] = Counter()
    role = answer.last_role(role for origin, _, role, _ in counts if origin == "eval")
    for (origin, _, of_role, _), verdicts in counts.items():
        if origin == "set":
            teacher += verdicts
        elif origin == "eval" and of_role == role:
            ended += verdicts
    shown = headline_metrics((spec.get("metrics") or {}).get("reading", "hardened"))
    stored = queries.rows("paired", experiment=name)
    paired = [Change(**row) for metric in shown for row in stored if row["metric"] == metric]
    split = (spec.get("evaluate") or {}).get("split", "heldout")
    sentences = [("", "Not evaluated.")]
    if role:
        sentences = story.compared(split, paired, main, answer.why(role, ended, teacher))
    chosen = answer.pick(pairs, answer.dominant(ended))
    columns = []
    if chosen:
        rollouts = queries.rows("task_rollouts", experiment=name, task=chosen["task_id"], count=20)
        sides = [chosen["base_rollout"], chosen["student_rollout"]]
        columns = _columns(queries, [r for r in rollouts if r["rollout_id"] in sides])
    return {
        "story": sentences, "tone": tone_of(summary(paired, main)[0]), "columns": columns, "example": chosen,
        "example_link": task_page(name, chosen["task_id"]) if chosen else None,
    }  # fmt: skip


def settings(spec: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the settings that characterise an experiment, as (name, value)."""
    paths = (
        ("base", "kind"), ("base", "path"), ("train", "method"), ("train", "epochs"), ("train", "learning_rate"),
        ("rl", "method"), ("pairs", "capture"), ("pairs", "think"), ("dataset", "upweight_factor"),
        ("select", "min_reward"), ("select", "require"), ("select", "shortest_correct"),
    )  # fmt: skip
    rows = []
    for section, name in paths:
        values = spec[section] if isinstance(spec.get(section), dict) else {}
        value = values.get(name)
        if value in (None, [], "") or (value == "none" and (section, name) != ("train", "method")):
            continue
        if name != "method" and values.get("method") == "none":
            continue  # nothing is trained so, whatever the section's defaults say
        rows.append((f"{section}.{name}", _as_toml(value)))
    return rows


def _as_toml(value: Any) -> str:
    """Return a value as a spec writes it, a list without its brackets."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def regressions(queries: Queries, lake: Lake, request: Request) -> Page:
    name = request.path_params["experiment"]
    row = find_experiment(queries, name)
    changes = queries.rows("changes", experiment=name)
    differ = any(change["change"] in ("lost", "gained") for change in changes)
    decoding, everything = text(request, "decoding"), not differ or text(request, "all") is not None
    decodings = sorted({change["decoding"] for change in changes})
    shown = [change for change in changes if decoding in (None, change["decoding"])]
    counts = Counter((change["decoding"], change["seed"], change["change"]) for change in shown)
    groups = [
        (kind, [change for change in shown if change["change"] == kind])
        for kind in ("lost", "gained", *(("neither solved", "both solved") if everything else ()))
    ]
    values = {
        "experiment": row, "groups": groups, "decodings": decodings, "decoding": decoding, "everything": everything,
        "counts": counts, "conditions": sorted({key[:2] for key in counts}, key=str), "pairs": len(shown),
    }  # fmt: skip
    return Page("regressions.html.jinja", values)


def task(queries: Queries, lake: Lake, request: Request) -> Page:
    name, task_id = request.path_params["experiment"], text(request, "task")
    row = find_experiment(queries, name)
    if task_id is None:
        raise NotFound("Name the task: ?task=TASK_ID")
    rollouts = queries.rows("task_rollouts", experiment=name, task=task_id, count=number(request, "count", 2, 1, 20))
    if not rollouts:
        raise NotFound(f"{name} has no rollout on task {task_id!r}, neither held out nor of its rollout sets.")
    decodings = sorted({r["decoding"] for r in rollouts if r["decoding"]})
    decoding = text(request, "decoding") or (decodings[0] if decodings else None)
    shown = [r for r in rollouts if r["origin"] == "set" or r["decoding"] == decoding]
    columns = _columns(queries, shown)
    values = {
        "experiment": row, "task_id": task_id, "task": queries.row("task", experiment=name, task=task_id),
        "columns": columns, "decodings": decodings, "decoding": decoding,
    }  # fmt: skip
    return Page("task.html.jinja", values)


def _columns(queries: Queries, rollouts: list[Row]) -> list[dict[str, Any]]:
    conversations = _conversations(queries, rollouts)
    return [
        {"rollout": r, "side": SIDES.get(r["side"], r["side"]), "conversation": conversations[r["rollout_id"]]}
        for r in rollouts
    ]


def _conversations(queries: Queries, rollouts: list[Row]) -> dict[str, Conversation]:
    """Return rollout_id -> conversation without prompts; one query of each table for every partition."""
    partitions: dict[tuple[str, str], list[str]] = defaultdict(list)
    for rollout in rollouts:
        partitions[rollout["origin"], rollout["made_for"]].append(rollout["rollout_id"])
    agents: dict[str, list[Row]] = defaultdict(list)
    turns: dict[str, list[Row]] = defaultdict(list)
    for (origin, made_for), ids in partitions.items():
        for query, rows in (("agents", agents), ("turns", turns)):
            for row in queries.rows(query, origin=origin, made_for=made_for, rollouts=ids):
                rows[row["rollout_id"]].append(row)
    return {r["rollout_id"]: read_conversation(agents[r["rollout_id"]], turns[r["rollout_id"]], []) for r in rollouts}
