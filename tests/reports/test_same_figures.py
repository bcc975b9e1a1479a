"""Figures shown in several places are equal: reports, SQL, and the table that a run ends with."""

from __future__ import annotations

import random
import re
from dataclasses import fields
from pathlib import Path

import pytest

from etpi.run.metrics_table import METRICS, metrics_table
from etpi_assets.evaluation.metrics import measure
from etpi_assets.graph import GRAPH
from etpi_assets.reports import facts, html
from etpi_assets.reports.changes import STORED, changes, changes_table, sign_test
from etpi_assets.scoring.intervals import wilson
from etpi_assets.specs.experiment import ExperimentSpec, preset_values
from etpi_resources.lake import catalog
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.schemas import empty, from_rows
from tests.support import small_lake, viewed_lake

SAMPLES = 2


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A lake with an evaluation of 24 tasks, two samples each, as the pipeline would store it."""
    lake, rng = Lake(tmp_path_factory.mktemp("same") / "data"), random.Random(0)
    rollouts, scores, agents = [], [], []
    for role, share in (("base", 0.2), ("sft", 0.6), ("rl", 0.97)):
        for task in range(24):
            for sample in range(SAMPLES):
                name, solved = f"{role}-{task}-{sample}", float(rng.random() < share)
                about = {"checkpoint_role": role, "task_id": f"t{task}", "decoding": "greedy", "seed": 0}
                rollouts.append(small_lake.rollout(name, role, origin="eval", experiment="e", sample=sample, **about))
                scores.append(small_lake.score(name, solved, rng.random() < share) | {"task_id": f"t{task}"})
                agents += small_lake.agent_scores(name, rng.random() < share)
    tables = {name: from_rows(name, rows) for name, rows in
              (("rollouts", rollouts), ("scores", scores), ("agent_scores", agents))}  # fmt: skip
    figures = measure(**tables, experiment="e").to_pylist()
    content = {"rollout_sets": [], "seeds": [0], "published": {"solved": {"value": 0.5, "hits": 24, "n": 48}}}
    small_lake.put(lake, "experiment_spec", "e", small_lake.spec("experiment", "e", "E", **content))
    made = small_lake.put(lake, "eval_rollouts", "e", {"rollouts": rollouts})
    small_lake.put(
        lake, "eval_metrics", "e", {"metrics": figures, "scores": scores, "agent_scores": agents},
        inputs={"eval_rollouts/e": made.version},
    )  # fmt: skip
    paired = changes_table("e", changes(**tables, metrics=STORED))
    small_lake.put(lake, "experiment_report", "e", {"changes": paired.to_pylist()})
    catalog.build(lake, GRAPH.values())
    return lake


def ask(lake: Lake, query: str) -> list[dict]:
    with catalog.connect(catalog.default_path(lake)) as db:
        return db.execute(query).to_arrow_table().to_pylist()


def report(lake: Lake, name: str) -> list[dict]:
    return ask(lake, (catalog.sql_folder() / "reports" / f"{name}.sql").read_text(encoding="utf-8"))


def test_changes_are_the_same_in_the_report_in_sql_and_in_the_table_that_a_run_ends_with(evaluated: Lake) -> None:
    stored = {
        (row["metric"], row["before"], row["after"]): row
        for row in evaluated.read(Ref("experiment_report", "experiment", "e"), "changes").to_pylist()
    }
    by_metric = report(evaluated, "paired_by_metric")
    assert {row["metric"] for row in by_metric} >= set(METRICS) - {"called"}
    assert {key: stored[key] for key in ((r["metric"], r["before"], r["after"]) for r in by_metric)} == {
        (row["metric"], row["before"], row["after"]): row for row in by_metric
    }
    for row in report(evaluated, "solved_paired"):
        of = stored["solved", row["before"], row["after"]]
        assert [row[name] for name in ("tasks", "difference", "ci_low", "ci_high")] == [
            of[name] for name in ("tasks", "difference", "ci_low", "ci_high")
        ]
        assert (row["solved_before"], row["solved_after"]) == (of["value_before"], of["value_after"])
    assert all(-1 <= row["ci_low"] <= row["difference"] <= row["ci_high"] <= 1 for row in by_metric)
    of = stored["solved", "base", "rl"]
    shown = f"{of['difference']:+.2f} [{of['ci_low']:+.2f}, {of['ci_high']:+.2f}]"
    assert shown in metrics_table(evaluated, ["e"])


def test_changes_agree_with_the_metrics_and_with_the_tasks_that_regressions_lists(evaluated: Lake) -> None:
    values = {(row["metric"], row["checkpoint_role"]): row["value"] for row in ask(evaluated, "FROM metrics")}
    moved = report(evaluated, "regressions")
    for row in report(evaluated, "paired_by_metric"):
        assert row["value_before"] == pytest.approx(values[row["metric"], row["before"]])
        assert row["value_after"] == pytest.approx(values[row["metric"], row["after"]])
        if row["metric"] == "solved":
            kinds = [m["change"] for m in moved if (m["before"], m["after"]) == (row["before"], row["after"])]
            assert (row["higher"], row["lower"]) == (kinds.count("gained"), kinds.count("lost"))


def test_interval_of_published_counts_is_wilsons(evaluated: Lake) -> None:
    [row] = ask(evaluated, "FROM leaderboard WHERE checkpoint_role = 'published'")
    assert (row["ci_low"], row["ci_high"]) == pytest.approx(wilson(24, 48), abs=1e-7)


def test_sign_test_is_exact() -> None:
    assert (sign_test(0, 0), sign_test(1, 1), sign_test(5, 0)) == (1.0, 1.0, 2 / 32)
    assert sign_test(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)


def test_loss_of_the_query_in_the_readme_counts_weight_copies_and_tokens(tmp_path: Path) -> None:
    text = Path("README.md").read_text(encoding="utf-8").split("```sql")[1].split("```")[0]
    lake = small_lake.make(tmp_path / "data")
    catalog.build(lake, GRAPH.values())
    rows = ask(lake, text.replace("plan_first_tiny", "strong"))
    assert [row["loss"] for row in rows[:2]] == [36.0, 36.0] and rows[-1]["loss"] == 3.0


def test_pages_of_the_viewer_show_the_stored_figures(evaluated: Lake) -> None:
    client = viewed_lake.client(evaluated, catalog.default_path(evaluated))
    page = {path: re.sub(r"(\s|<[^>]+>)+", " ", client.get(path).text) for path in ("/", "/experiment/e")}
    values = {
        row["metric"]: f"{100 * row['value']:.1f} % [{100 * row['ci_low']:.1f} %, {100 * row['ci_high']:.1f} %]"
        for row in ask(evaluated, "FROM metrics WHERE checkpoint_role = 'rl'")
    }
    changed = [row for row in report(evaluated, "paired_by_metric") if (row["before"], row["after"]) == ("base", "rl")]
    rates = {row["metric"]: row for row in changed if row["metric"] in METRICS}
    assert set(rates) == set(METRICS) - {"called"}
    for row in rates.values():
        points = [f"{100 * row[name]:+.1f}" for name in ("difference", "ci_low", "ci_high")]
        points = [point.replace("-", "−").replace("+0.0", "0.0") for point in points]
        assert f"{points[0]} [{points[1]}, {points[2]}]" in page["/experiment/e"]
        assert values[row["metric"]] in page["/experiment/e"]
        if row["metric"] != "parse_rate":  # the overview has five columns
            assert f"{points[0]} [{points[1]}, {points[2]}]" in page["/"]
    scores = {row["rollout_id"]: row["reward"] for row in ask(evaluated, "FROM scores WHERE origin = 'eval'")}
    moved = [scores[name.replace("base", "rl")] - scores[name] for name in scores if name.startswith("base")]
    assert f"{moved.count(-1)} lost, {moved.count(1)} gained" in page["/experiment/e"]
    of = rates["solved"]
    whole = [f"{100 * of[name]:+.0f}" for name in ("difference", "ci_low", "ci_high")]
    assert f"({whole[0]} points [{whole[1]}, {whole[2]}], {of['tasks']} tasks)" in page["/experiment/e"]


def test_every_figure_of_the_report_is_that_of_sql(evaluated: Lake) -> None:
    read = {"metrics": "metrics", "eval_scores": "scores", "eval_agent_scores": "agent_scores"}
    stored = {name: evaluated.read(Ref("eval_metrics", "experiment", "e"), table) for name, table in read.items()}
    stored["eval_rollouts"] = evaluated.read(Ref("eval_rollouts", "experiment", "e"), "rollouts")
    others = {field.name: field.name.removeprefix("eval_") for field in fields(facts.ReportTables)} | {
        "rl_log": "training_log"
    }
    tables = facts.ReportTables(**{name: stored.get(name, empty(table)) for name, table in others.items()})
    values = {**preset_values("plan_first"), "title": "E", "rollout_sets": ["s"], "base": {"kind": "tiny"}}
    page, _ = html.render(html.ReportedExperiment("e", ExperimentSpec.model_validate(values), {}, []), tables)
    text = re.sub(r"(\s|<[^>]+>)+", " ", page).replace("−", "-")
    cells = re.findall(r"(\d+\.\d) % \[(\d+\.\d), (\d+\.\d)\] n = (\d+)", text)
    in_sql = {row["metric"]: [] for row in ask(evaluated, "FROM metrics WHERE value <= 1")}
    for row in ask(evaluated, "FROM metrics WHERE value <= 1"):
        percents = [f"{100 * row[name]:.1f}" for name in ("value", "ci_low", "ci_high")]
        in_sql[row["metric"]].append((*percents, str(row["n"])))
    assert len(cells) >= 21 and {*cells} <= {cell for of in in_sql.values() for cell in of}
    for metric in ("solved", *METRICS):
        assert {*in_sql.get(metric, ())} <= {*cells}, metric
    lines = re.findall(
        r"(\w+) greedy (\w+) ([\d.]+) % → (\w+) ([\d.]+) % (\S+) \[(\S+), (\S+)\] (\d+) (\d+) / (\d+)", text
    )
    names = ("difference", "ci_low", "ci_high")
    for row in report(evaluated, "paired_by_metric"):
        (line,) = [
            line for line in lines if (line[0], line[1], line[3]) == (row["metric"], row["before"], row["after"])
        ]
        assert (line[2], line[4]) == tuple(f"{100 * row[f'value_{end}']:.1f}" for end in ("before", "after"))
        assert [float(value) for value in line[5:8]] == [round(100 * row[name]) for name in names]
        assert [int(value) for value in line[8:]] == [row["tasks"], row["higher"], row["lower"]]
