"""The work of `etpi rejudge` and `etpi taint`, as functions that return an exit code (docs/rejudge.md)."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from etpi.blame import leave_out
from etpi_assets.asset import AssetRun, Input, asset_definitions
from etpi_assets.evaluation import assets as evaluation
from etpi_assets.graph import GRAPH
from etpi_assets.planning.planner import set_of
from etpi_assets.reports.tainted import line
from etpi_assets.resources import Resources
from etpi_assets.scoring import assets as scoring
from etpi_assets.scoring.judging import Bench, Judged, Judging
from etpi_assets.specs.load import SpecError
from etpi_assets.tasks.table import read_tasks
from etpi_assets.training import assets as training
from etpi_resources.lake import catalog, taint
from etpi_resources.lake.lake import Lake, LakeError
from etpi_resources.process.progress import clock

_JUDGED = {
    "rollout_set": {"scored_rollouts": ("raw_rollouts", scoring.judging)},
    "experiment": {
        "eval_metrics": ("eval_rollouts", evaluation.judging),
        "rl_rewards": ("rl_checkpoint", training.judging),
    },
}
"""Set of specs -> asset with verdicts -> the asset with the rollouts, and the function that says what judges them."""


def rejudge(name: str, task_ids: Sequence[str], *, dry_run: bool, as_json: bool) -> int:
    """Judge the stored work of a rollout set, or of an experiment's evaluation and reinforcement, again; always 0.

    With tasks their verdicts are stored and shown; the next run of `name` takes them, and judges the rest.

    Raises:
        SpecError: there is no such set or experiment. LakeError: it has no rollouts yet.
    """
    resources, reports = Resources(), []
    set_name = set_of(name, resources.specs)
    if set_name not in _JUDGED:
        raise SpecError(f"{name} is a suite, which has no rollouts; name a rollout set or an experiment")
    for asset, (source, judging) in _JUDGED[set_name].items():
        run = AssetRun(GRAPH[asset], name, resources, log=_say)
        if not any(resources.lake.current(ref) for ref in run.refs(source)):
            continue
        of_asset: Judging = judging(run, Input(run, source))
        if of_asset.suite is None:
            continue
        bench = of_asset.bench(read_tasks(run.read("tasks", "tasks", key=of_asset.suite)))
        plan = of_asset.plan(bench, set(task_ids) or None)
        reports.append(_figures(asset, bench, plan))
        if not as_json:
            print(_plan_line(reports[-1]))
        if dry_run or bench is None or not plan.work:
            continue
        if task_ids:
            work, before = plan.work, Counter(plan.refused)
            of_asset.judge(bench, plan)
            for row in (plan.later[each.rollout_id][-1] for each in work if each.rollout_id in plan.later):
                if row["judge"] == bench.judge:
                    print(f"  {row['rollout_id']} {row['task_id']}: {row['verdict']}, reward {row['reward']}")
            for reason, count in (plan.refused - before).items():
                print(f"  not judged: {count:,} {reason}")
            continue
        outcome = asset_definitions()[asset].execute(name, resources, _say, again=True)
        reports[-1] |= {"done": outcome.manifest.notes}
    if not reports:
        raise LakeError(f"{name} has no rollouts of a suite that are stored; run `etpi run {name}`")
    if as_json:
        print(json.dumps(reports, indent=1))
    if not dry_run and not task_ids and any("done" in each for each in reports):
        asset_definitions()["catalog"].execute("all", resources, _say)
        if not as_json:
            return show_taint([taint.FLIPS], None, retrain=False, as_json=False)
    return 0


def _figures(asset: str, bench: Bench | None, plan: Judged) -> dict[str, Any]:
    known = bench.seconds() if bench and plan.work else None
    seconds = None if known is None or bench is None else known * len(plan.work) / bench.threads
    return {
        "asset": asset,
        "judge": bench and bench.judge,
        "to_judge": len(plan.work),
        "seconds": seconds,
        "cannot": dict(plan.refused),
    }


def _plan_line(figures: Mapping[str, Any]) -> str:
    if figures["judge"] is None:
        return f"{figures['asset']}: its suite's tasks cannot be run here, so recorded verdicts stay"
    took = "" if not figures["to_judge"] else ", time unknown before the first verdict"
    took = took if figures["seconds"] is None else f", about {clock(figures['seconds'])}"
    cannot = ", ".join(f"{count:,} {reason}" for reason, count in figures["cannot"].items())
    lacking = f"; cannot be judged: {cannot}" if cannot else ""
    return f"{figures['asset']}: {figures['to_judge']:,} to be judged by {figures['judge']}{took}{lacking}"


def show_taint(names: Sequence[str], reason: str | None, *, retrain: bool, as_json: bool) -> int:
    """Print what rests on flips or on rollouts, and what mends it; with a reason, keep the flips among them. Always 0.

    With `retrain`, write specs that train without the rollouts, of the experiments whose current data have some.

    Raises:
        LakeError: a root is unknown, or there is no flip to keep.
    """
    lake = Lake.open()
    with catalog.in_memory(lake, GRAPH.values()) as connection:
        roots = taint.roots_of(connection, names)
        rows = taint.walk(connection, roots)
        flips = connection.sql("SELECT * FROM flips WHERE kept IS NULL ORDER BY judged_at, rollout_id")
        columns, values = flips.columns, flips.fetchall()
    open_flips = [dict(zip(columns, row, strict=True)) for row in values]
    open_flips = [flip for flip in open_flips if roots is None or flip["rollout_id"] in roots]
    if reason:
        if not open_flips:
            raise LakeError("there is no flip to keep")
        taint.keep(lake, open_flips, reason)
        reported = {row["experiment"] for row in rows if row["kind"] == "report"}
        again = [(asset, name) for name in sorted(reported) for asset in ("experiment_report", "model_card")]
        for asset, key in (*again, ("leaderboard", "all"), ("catalog", "all")):
            asset_definitions()[asset].execute(key, Resources(lake=lake), _say, again=True)
        print(f"{len(open_flips)} flips are kept: {reason}")
        return 0
    if retrain:
        trained = sorted({row["experiment"] for row in rows if row["kind"] == "dataset" and row["final"]})
        if not trained:
            raise LakeError(f"no current data set has rollouts of {', '.join(names)}")
        leave_out(trained, {flip["rollout_id"] for flip in open_flips} if roots is None else roots, names)
        return 0
    if as_json:
        print(json.dumps({"flips": open_flips, "tainted": rows}, indent=1, default=str))
        return 0
    counts = Counter((flip["old_verdict"], flip["new_verdict"]) for flip in open_flips)
    for (old, new), count in counts.most_common():
        print(f"{count:,} flips {old} → {new}")
    print("\n".join(map(line, rows)) or "nothing rests on them")
    return 0


def _say(text: str) -> None:
    print(f"etpi: {text}", file=sys.stderr)
