"""Findings: each verdict follows from the figures of two conditions, and the results page shows what was asked for."""

from __future__ import annotations

import math

import pytest

from etpi_assets.reports import findings
from etpi_assets.reports.findings import Finding, judge
from etpi_assets.reports.results import render
from etpi_assets.scoring.intervals import Estimate, difference, rate, wilson
from etpi_assets.specs.load import load_specs
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.schemas import TABLES
from tests.support import small_lake

SPECS = load_specs().experiments
COLUMNS = {column.name for column in TABLES["rl_samples"].schema}


def row(experiment: str, hits: int, n: int, seed: int | None = None, **more) -> dict:
    low, high = wilson(hits, n)
    figure = {"value": hits / n, "n": n, "ci_low": low, "ci_high": high, "interval": "wilson", "unit": "pair"}
    of = {"experiment": experiment, "checkpoint_role": "sft", "decoding": "greedy", "metric": "plan_first"}
    return {**of, **figure, "seed": seed, "excluded": 0, **more}


def probe(step: int | None, seed: int, value: float, **more) -> dict:
    of = {"role": "sft", "probe": "first_turn_message", "prompt_set": "heldout", "checkpoint_id": f"c{step}"}
    return {**of, "step": step, "seed": seed, "value": value, "n": 20, "passed": True, "detail": "{}", **more}


def finding(figure: str = "plan_first", **more) -> Finding:
    sides = {"more": {"experiment": "a"}, "less": {"experiment": "b"}}
    return Finding.model_validate({"claim": "a over b", "figure": figure, **sides, **more})


def verdict(of: Finding, **tables: list[dict]) -> findings.Verdict:
    return judge(of, lambda experiment, table: tables.get(experiment))


@pytest.mark.parametrize(
    ("more", "less", "word"),
    [
        ((46, 48), (2, 48), "there"),
        ((24, 48), (22, 48), "undecided at this n"),
        ((2, 2), (1, 2), "undecided at this n"),
        ((480, 960), (485, 960), "not there"),
        ((2, 48), (46, 48), "not there"),
    ],
)
def test_a_verdict_is_read_from_the_interval_of_the_difference(more, less, word):
    found = verdict(finding(), a=[row("a", *more)], b=[row("b", *less)])
    assert found.word == word
    assert found.between and found.between.ci_low <= found.between.value <= found.between.ci_high


def test_a_smaller_difference_may_matter():
    rows = {"a": [row("a", 480, 960)], "b": [row("b", 470, 960)]}
    assert verdict(finding(), **rows).word == "not there"
    assert verdict(finding(least=0.03), **rows).word == "undecided at this n"


def test_a_seed_that_says_otherwise_leaves_it_undecided():
    pooled = {"a": [row("a", 70, 96)], "b": [row("b", 40, 96)]}
    assert verdict(finding(), **pooled).word == "there"
    seeds = {"a": [row("a", 48, 48, seed=0), row("a", 22, 48, seed=1)], "b": [row("b", 14, 48, 0), row("b", 26, 48, 1)]}
    assert verdict(finding(), **{k: pooled[k] + seeds[k] for k in pooled}).word == "undecided at this n"


def test_stages_of_an_experiment_are_compared_task_by_task():
    sides = {"more": {"experiment": "a", "role": "rl"}, "less": {"experiment": "a"}}
    metrics = [row("a", 104, 120, metric="solved", checkpoint_role="rl"), row("a", 98, 120, metric="solved")]
    paired = {"decoding": "greedy", "before": "sft", "after": "rl", "tasks": 120, "difference": 0.05}
    stages = [paired | {"after": "base", "ci_low": 0.2, "ci_high": 0.3}, paired | {"ci_low": 0.01, "ci_high": 0.09}]

    def judged(figure: str, stages: list[dict]) -> findings.Verdict:
        tables = {"metrics": [r | {"metric": figure} for r in metrics], "stages": stages}
        return judge(finding(figure, **sides, least=0.05), lambda _, table: tables.get(table))

    assert judged("solved", []).word == judged("parsed", stages).word == "undecided at this n"
    found = judged("solved", stages)
    assert found.word == "there" and found.between == Estimate(0.05, 120, 120, 0.01, 0.09, "paired")


def test_other_conditions_are_not_taken_for_the_one_that_is_meant():
    others = [
        row("b", 48, 48, decoding="t1"),
        row("b", 48, 48, checkpoint_role="teacher", decoding="as_rolled_out"),
        row("b", 48, 48, metric="plan_content"),
    ]
    rows = {"a": [row("a", 46, 48)], "b": [*others, row("b", 2, 48)]}
    assert verdict(finding(), **rows).word == "there"
    assert verdict(finding(less={"experiment": "b", "role": "teacher"}), **rows).word != "there"
    assert verdict(finding(less={"experiment": "b", "decoding": "greedy@long"}), **rows).word == "not comparable"
    assert verdict(finding(), a=rows["a"]).word == "not measured"


def test_how_soon_a_behaviour_is_learnt_is_the_mean_over_the_way():
    soon = [probe(step, seed, value) for seed in (0, 1) for step, value in ((10, 0.9), (20, 1.0), (30, 1.0))]
    late = [probe(step, seed, value) for seed in (0, 1) for step, value in ((10, 0.0), (20, 0.2), (30, 0.9))]
    ends = [probe(None, 0, 1.0), probe(10, 0, 1.0, prompt_set="train"), probe(10, 0, 1.0, role="base")]
    found = verdict(finding("probe:first_turn_message"), a=soon + ends, b=late + ends)
    assert found.word == "there" and found.more and found.less
    assert math.isclose(found.more.value, 2.9 / 3) and math.isclose(found.less.value, 1.1 / 3)
    assert found.more.n == 20, "every checkpoint and seed is asked the same prompts"
    assert verdict(finding("probe:first_turn_message"), a=ends, b=late).word == "not comparable"


def test_reinforcement_is_read_at_its_end_by_seed():
    def attempts(called: float, seed: int) -> list[dict]:
        """Ten steps of ten tasks; in the last two of them `called` of the attempts call a tool, before that all."""
        told = [(step, task, step < 8 or task < 10 * called) for step in range(10) for task in range(10)]
        return [{"step": step, "seed": seed, "task_id": str(task), "called": hit} for step, task, hit in told]

    ends = {"more": {"experiment": "a", "role": "rl"}, "less": {"experiment": "b", "role": "rl"}}
    found = verdict(finding("rl:called", **ends), a=attempts(0.9, 0) + attempts(1.0, 1), b=attempts(0.1, 0))
    assert found.word == "there" and found.more and found.less
    assert (found.more.value, found.more.n, found.less.value) == (0.95, 40, 0.1)
    turned = verdict(finding("rl:called", **ends), a=attempts(0.1, 0) + attempts(1.0, 1), b=attempts(0.2, 0))
    assert turned.word == "undecided at this n", "seed 0 has it the other way round"
    assert verdict(finding("rl:called"), a=attempts(0.9, 0), b=attempts(0.1, 0)).word == "not comparable"


def test_the_interval_of_a_difference_is_newcombe_s():
    # Newcombe 1998, table II: 56/70 against 48/80, method 10: 0.2000 [0.0524, 0.3339].
    first, second = (rate([1.0] * k + [0.0] * (n - k), [str(i) for i in range(n)]) for k, n in ((56, 70), (48, 80)))
    assert first and second
    between = difference(first, second)
    assert [round(x, 4) for x in (between.value, between.ci_low, between.ci_high)] == [0.2, 0.0524, 0.3339]
    back = difference(second, first)
    assert math.isclose(back.ci_low, -between.ci_high) and math.isclose(back.ci_high, -between.ci_low)
    same = Estimate(0.5, 10, 10, 0.5, 0.5, "wilson")
    assert difference(same, same) == Estimate(0.0, 10, 10, 0.0, 0.0, "newcombe")


def test_what_is_declared_can_be_measured():
    found = findings.declared()
    assert len({f.claim + f.figure + str(f.less) for f in found}) == len(found) > 10
    for one in found:
        for condition in (one.more, one.less):
            section = SPECS[condition.experiment].evaluate
            if condition.role == "teacher":
                continue
            assert section and condition.role in section.roles, f"{one.claim}: {condition}"
            budgets = {f"@{budget.name}" for budget in section.budgets} | {""}
            if one.figure.startswith(findings.PROBE):
                assert SPECS[condition.experiment].train.save_steps
            else:
                assert condition.decoding in {d.name + b for d in section.decodings for b in budgets}
            if one.figure.startswith(findings.REINFORCED):
                assert condition.role == "rl" and one.figure.removeprefix(findings.REINFORCED) in COLUMNS
            if one.figure == "called":
                assert section.agent.tools
            if one.figure == "adherence":
                assert SPECS[condition.experiment].metrics.scoring.structure


def test_compared_experiments_differ_in_what_is_compared():
    for twin in ("short", "one_role", "fixed_paths"):
        ours, theirs = SPECS["templated_tiny"], SPECS[f"templated_tiny_{twin}"]
        assert ours.train == theirs.train and ours.evaluate == theirs.evaluate and ours.dataset == theirs.dataset
        assert theirs.gates.override and not ours.gates.override
    short, asked = SPECS["templated_tiny_short"], SPECS["templated_tiny_short_asked_short"]
    assert short.evaluate and asked.evaluate and asked.evaluate.agent.prompt == "coop_short"
    assert asked.model_copy(update={"title": short.title, "notes": short.notes, "evaluate": short.evaluate}) == short
    agent = asked.evaluate.agent.model_copy(update={"prompt": short.evaluate.agent.prompt})
    assert asked.evaluate.model_copy(update={"agent": agent}) == short.evaluate
    sets = load_specs().rollout_sets
    one = sets["templated_tiny_one_role"]
    assert one.tasks == 2 * (sets["templated_tiny"].tasks or 0), "as many conversations"


def test_the_page_shows_the_findings_of_what_was_run(tmp_path):
    lake, both = Lake(tmp_path), [row("x", 46, 48), row("x", 0, 24, checkpoint_role="base")]
    specs = load_specs()
    names = {name: name for name in ("plan_first_tiny", "plan_first_tiny_x1", "plan_first_tiny_x12")}
    asked = [f for f in findings.declared() if {f.more.experiment, f.less.experiment} <= names.keys()]
    assert render(lake, specs, names, complete=False).count("**not measured**") == len(asked) > 1
    small_lake.put(lake, "eval_metrics", "plan_first_tiny", {"metrics": both})
    page = render(lake, specs, {"plan_first_tiny": "plan_first_tiny"}, complete=False)
    (line,) = [line for line in page.splitlines() if "its base does not" in line]
    assert "plan_first_tiny, sft, greedy: 0.96 [0.86, 0.99], n 48" in line and line.endswith("| **there** |")
    assert "bury" not in page


def test_the_page_shows_how_soon_where_checkpoints_on_the_way_were_probed(tmp_path):
    lake, name = Lake(tmp_path), "plan_first_tiny_x12"
    trained, probes = [], []
    for seed, shares in ((0, (0.5, 0.95, 1.0)), (1, (0.95, 0.5, 0.85))):
        for step, share in zip((10, 20, 30), shares, strict=True):
            checkpoint = f"c{seed}-{step}"
            row = {"checkpoint_id": checkpoint, "experiment": name, "role": "sft", "seed": seed, "step": step}
            trained.append(row | {"final": step == 30})
            probes.append(probe(None if step == 30 else step, seed, share, checkpoint_id=checkpoint))
    for asset, tables in (("sft_checkpoint", {"checkpoints": trained}), ("serving_probe", {"probes": probes})):
        small_lake.put(lake, asset, name, tables)
        small_lake.put(
            lake, asset, "plan_first_tiny", {t: [r for r in rows if r.get("final")] for t, rows in tables.items()}
        )
    shown = {"x12": name, "x1": "plan_first_tiny_x1", "plain": "plan_first_tiny"}
    page = render(lake, load_specs(), shown, complete=False)
    assert "| x12 | first_turn_message | 20, – | 1.00, 0.85 |" in page
    assert page.count("| first_turn_message |") == 1, "nothing on the way was probed of the others"


def test_the_page_compares_stages_task_by_task(tmp_path):
    """Solved 6 of 8 before, 7 of 8 after; 200 tokens of thought a turn, then 40."""
    lake, name = Lake(tmp_path), "etpi_phase1_tiny"
    rollouts, scores, agents = [], [], []
    for role, solved, thought in (("base", 6, 400), ("sft", 7, 80)):
        for task in range(8):
            key = {"rollout_id": f"{role}{task}", "task_id": f"t{task}"}
            rollouts.append(small_lake.rollout(key["rollout_id"], role, task_id=key["task_id"], checkpoint_role=role))
            rollouts[-1] |= {"origin": "eval", "experiment": name, "decoding": "greedy"}
            scores.append(key | {"reward": float(task < solved), "infrastructure_error": False})
            agents.append({"rollout_id": key["rollout_id"], "agent_id": "agent1", "think_tokens": thought, "turns": 2})
    adheres = [row(name, 95, 100, metric="adherence"), row(name, 7, 8, metric="solved")]
    small_lake.put(lake, "eval_rollouts", name, {"rollouts": rollouts})
    tables = {"metrics": adheres, "scores": scores, "agent_scores": agents}
    small_lake.put(lake, "eval_metrics", name, tables)
    page = render(lake, load_specs(), {name: name}, complete=False)
    (line,) = [line for line in page.splitlines() if "base → sft" in line]
    assert "| etpi_phase1_tiny, greedy | base → sft | 8 | 0.75 → 0.88 | +0.12 [" in line
    assert line.endswith("| 200 → 40, ÷ 5.0 |")
    assert "|  | solved | adherence |" in page, "no columns of what was not measured"


def test_what_no_demo_runs_a_finding_compares():
    variants = {name for name, spec in SPECS.items() if spec.variant}
    assert variants and variants <= set(findings.experiments())
