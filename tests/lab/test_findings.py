"""Findings: verdicts follow from the figures of two conditions, and the results page shows the chosen experiments."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from etpi_assets.scoring.intervals import Estimate, difference, rate
from etpi_assets.scoring.structure import structure_of
from etpi_assets.specs.load import load_specs
from etpi_lab.analysis import findings, history
from etpi_lab.analysis.findings import Finding, judge
from etpi_lab.analysis.results import render
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.schemas import TABLES
from tests.support import small_lake
from tests.support.findings import probe, row

ROOT = Path(__file__).parents[2]
SPECS = load_specs().experiments
COLUMNS = {column.name for column in TABLES["rl_samples"].schema}


def finding(figure: str = "plan_first", **more) -> Finding:
    sides = {"more": {"experiment": "a"}, "less": {"experiment": "b"}}
    return Finding.model_validate({"claim": "a over b", "figure": figure, **sides, **more})


def verdict(of: Finding, **tables: list[dict]) -> findings.FindingVerdict:
    return judge(of, lambda experiment, table: tables.get(experiment))


@pytest.mark.parametrize(
    ("more", "less", "word"),
    [
        ((46, 48), (2, 48), "supported"),
        ((24, 48), (22, 48), "undecided at this n"),
        ((2, 2), (1, 2), "undecided at this n"),
        ((480, 960), (485, 960), "not supported"),
        ((2, 48), (46, 48), "not supported"),
    ],
)
def test_verdict_follows_from_the_interval_of_the_difference(more, less, word):
    result = verdict(finding(), a=[row("a", *more)], b=[row("b", *less)])
    assert result.word == word
    assert result.between and result.between.ci_low <= result.between.value <= result.between.ci_high


def test_smallest_difference_that_matters_can_be_set():
    rows = {"a": [row("a", 480, 960)], "b": [row("b", 470, 960)]}
    assert verdict(finding(), **rows).word == "not supported"
    assert verdict(finding(least=0.03), **rows).word == "undecided at this n"


def test_contradicting_seed_leaves_a_finding_undecided():
    pooled = {"a": [row("a", 70, 96)], "b": [row("b", 40, 96)]}
    assert verdict(finding(), **pooled).word == "supported"
    seeds = {"a": [row("a", 48, 48, seed=0), row("a", 22, 48, seed=1)], "b": [row("b", 14, 48, 0), row("b", 26, 48, 1)]}
    assert verdict(finding(), **{k: pooled[k] + seeds[k] for k in pooled}).word == "undecided at this n"


def test_stages_of_one_experiment_are_compared_by_paired_difference():
    sides = {"more": {"experiment": "a", "role": "rl"}, "less": {"experiment": "a"}}
    metrics = [row("a", 104, 120, metric="solved", checkpoint_role="rl"), row("a", 98, 120, metric="solved")]
    paired = {"decoding": "greedy", "before": "sft", "after": "rl", "tasks": 120, "difference": 0.05}
    stages = [paired | {"after": "base", "ci_low": 0.2, "ci_high": 0.3}, paired | {"ci_low": 0.01, "ci_high": 0.09}]

    def judged(figure: str, stages: list[dict]) -> findings.FindingVerdict:
        tables = {"metrics": [r | {"metric": figure} for r in metrics], "stages": stages}
        return judge(finding(figure, **sides, least=0.05), lambda _, table: tables.get(table))

    assert judged("solved", []).word == judged("parsed", stages).word == "undecided at this n"
    result = judged("solved", stages)
    assert result.word == "supported" and result.between == Estimate(0.05, 120, 120, 0.01, 0.09, "paired")


def test_only_the_named_role_decoding_and_metric_count():
    others = [
        row("b", 48, 48, decoding="t1"),
        row("b", 48, 48, checkpoint_role="teacher", decoding="as_rolled_out"),
        row("b", 48, 48, metric="plan_content"),
    ]
    rows = {"a": [row("a", 46, 48)], "b": [*others, row("b", 2, 48)]}
    assert verdict(finding(), **rows).word == "supported"
    assert verdict(finding(less={"experiment": "b", "role": "teacher"}), **rows).word != "supported"
    assert verdict(finding(less={"experiment": "b", "decoding": "greedy@long"}), **rows).word == "not comparable"
    assert verdict(finding(), a=rows["a"]).word == "not measured"


def test_probe_figure_is_the_mean_over_intermediate_checkpoints():
    soon = [probe(step, seed, value) for seed in (0, 1) for step, value in ((10, 0.9), (20, 1.0), (30, 1.0))]
    late = [probe(step, seed, value) for seed in (0, 1) for step, value in ((10, 0.0), (20, 0.2), (30, 0.9))]
    ends = [probe(None, 0, 1.0), probe(10, 0, 1.0, prompt_set="train"), probe(10, 0, 1.0, role="base")]
    result = verdict(finding("probe:first_turn_message"), a=soon + ends, b=late + ends)
    assert result.word == "supported" and result.more and result.less
    assert math.isclose(result.more.value, 2.9 / 3) and math.isclose(result.less.value, 1.1 / 3)
    assert result.more.n == 20, "all checkpoints and seeds answer the same prompts"
    assert verdict(finding("probe:first_turn_message"), a=ends, b=late).word == "not comparable"


def test_reinforcement_figure_is_over_its_last_steps_by_seed():
    def attempts(called: float, seed: int) -> list[dict]:
        """Return ten steps of ten tasks; in the last two steps the share `called` calls a tool, before that all do."""
        rows = [(step, task, step < 8 or task < 10 * called) for step in range(10) for task in range(10)]
        return [{"step": step, "seed": seed, "task_id": str(task), "called": hit} for step, task, hit in rows]

    ends = {"more": {"experiment": "a", "role": "rl"}, "less": {"experiment": "b", "role": "rl"}}
    result = verdict(finding("rl:called", **ends), a=attempts(0.9, 0) + attempts(1.0, 1), b=attempts(0.1, 0))
    assert result.word == "supported" and result.more and result.less
    assert (result.more.value, result.more.n, result.less.value) == (0.95, 40, 0.1)
    turned = verdict(finding("rl:called", **ends), a=attempts(0.1, 0) + attempts(1.0, 1), b=attempts(0.2, 0))
    assert turned.word == "undecided at this n", "seed 0 contradicts it"
    assert verdict(finding("rl:called"), a=attempts(0.9, 0), b=attempts(0.1, 0)).word == "not comparable"


def test_interval_of_a_difference_is_newcombes():
    # Newcombe 1998, table II: 56/70 against 48/80, method 10: 0.2000 [0.0524, 0.3339].
    first, second = (rate([1.0] * k + [0.0] * (n - k), [str(i) for i in range(n)]) for k, n in ((56, 70), (48, 80)))
    assert first and second
    between = difference(first, second)
    assert [round(x, 4) for x in (between.value, between.ci_low, between.ci_high)] == [0.2, 0.0524, 0.3339]
    back = difference(second, first)
    assert math.isclose(back.ci_low, -between.ci_high) and math.isclose(back.ci_high, -between.ci_low)
    same = Estimate(0.5, 10, 10, 0.5, 0.5, "wilson")
    assert difference(same, same) == Estimate(0.0, 10, 10, 0.0, 0.0, "newcombe")


def test_declared_findings_can_be_measured():
    declared, sets = findings.declared(), load_specs().rollout_sets
    assert len({f.claim + f.figure + str(f.less) for f in declared}) == len(declared) > 10
    for each in declared:
        for condition in (each.more, each.less):
            section = SPECS[condition.experiment].evaluate
            if condition.role == "teacher":
                continue
            assert section and condition.role in section.roles, f"{each.claim}: {condition}"
            budgets = {f"@{budget.name}" for budget in section.budgets} | {""}
            if each.figure.startswith(findings.PROBE):
                assert SPECS[condition.experiment].train.save_steps
            else:
                assert condition.decoding in {d.name + b for d in section.decodings for b in budgets}
            if each.figure.startswith(findings.REINFORCED):
                assert condition.role == "rl" and each.figure.removeprefix(findings.REINFORCED) in COLUMNS
            if each.figure == "called":
                assert section.agent.tools
            if each.figure == "adherence":
                spec = SPECS[condition.experiment]
                agents = [sets[name].agent for name in spec.rollout_sets]
                assert structure_of(spec.metrics.scoring, agents)


def test_compared_experiments_differ_only_in_the_compared_setting():
    for suffix in ("short", "one_role", "fixed_paths"):
        ours, theirs = SPECS["templated_tiny"], SPECS[f"templated_tiny_{suffix}"]
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


def test_page_shows_the_findings_of_its_experiments(tmp_path):
    lake, both = Lake(tmp_path), [row("x", 46, 48), row("x", 0, 24, checkpoint_role="base")]
    specs = load_specs()
    names = {name: name for name in ("plan_first_tiny", "plan_first_tiny_x1", "plan_first_tiny_x12")}
    chosen = [f for f in findings.declared() if {f.more.experiment, f.less.experiment} <= names.keys()]
    assert render(lake, specs, names, complete=False).count("**not measured**") == len(chosen) > 1
    small_lake.put(lake, "eval_metrics", "plan_first_tiny", {"metrics": both})
    page = render(lake, specs, {"plan_first_tiny": "plan_first_tiny"}, complete=False)
    (line,) = [line for line in page.splitlines() if line.startswith("| A student plans first")]
    assert "plan_first_tiny, sft, greedy: 0.96 [0.86, 0.99], n 48" in line and line.endswith("| **supported** | – |")
    assert "plan_first_tiny_x12" not in page


def test_second_look_judges_only_what_the_first_left_undecided(tmp_path):
    """Of three seeds one plans in half of the pairs; of six, all others in nearly all."""
    lake, specs, claim = Lake(tmp_path), load_specs(), "| A student plans first without"
    base = row("x", 0, 48, checkpoint_role="base")

    def measured(*hits: int) -> dict[str, list[dict]]:
        seeds = [row("x", n, 48, seed) for seed, n in enumerate(hits)]
        return {"metrics": [base, row("x", sum(hits) // len(hits), 48), *seeds]}

    three, six = "plan_first_tiny", "plan_first_tiny_x1"  # names of specs, which the page reads
    first, again = {"plan_first_tiny": three}, {"plan_first_tiny": six}
    small_lake.put(lake, "eval_metrics", three, measured(4, 46, 48))

    def line(again: dict[str, str]) -> str:
        page = render(lake, specs, first, again, complete=False)
        return next(line for line in page.splitlines() if line.startswith(claim))

    undecided = line({})
    assert "| 3 | **undecided at this n** |" in undecided and line(again) == undecided, "the second has not run"
    small_lake.put(lake, "eval_metrics", six, measured(4, 46, 48, 47, 48, 46))
    assert "| 6, second look | **supported** | – |" in line(again)
    page = render(lake, specs, first, again, complete=False)
    assert "--second-look\n" in page and "by seed 0.08, 0.96, 1.00, 0.98, 1.00, 0.96" in page
    small_lake.put(lake, "eval_metrics", three, measured(46, 46, 48))
    assert "| 3 | **supported** |" in line(again), "what the first look decides stays as it is"


def test_page_shows_how_soon_for_probed_intermediate_checkpoints(tmp_path):
    """Ten conversations of four turns; the first turn has as many tokens as the others, with weight 12."""
    lake, name = Lake(tmp_path), "plan_first_tiny_x12"
    trained, probes = [], []
    turns = [(agent, turn) for agent in range(10) for turn in range(4)]
    rows = [{"rollout_id": "r", "agent_id": str(a), "turn": t, "weight": 1.0 if t else 12.0} for a, t in turns]
    every = {"split": "train", "copies": 1, "output_tokens": 20}
    validation = {"rollout_id": "v", "agent_id": "1", "turn": 0, "weight": 12.0, "split": "val"}
    small_lake.put(lake, "upweighted_dataset", name, {"dataset_rows": [every | row for row in (*rows, validation)]})
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
    assert "| x12 | 4.0 | 80.0 % | first_turn_message | 20, – | 0.72, 0.72 | 1.00, 0.85 |" in page
    assert page.count("| first_turn_message |") == 1, "the others have no probed intermediate checkpoints"


def test_page_compares_stages_task_by_task(tmp_path):
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
    assert "|  | solved | adherence |" in page, "no columns for metrics that were not measured"


def test_every_variant_is_compared_by_a_finding():
    variants = {name for name, spec in SPECS.items() if spec.variant}
    compared = {side.experiment for f in findings.declared() for side in (f.more, f.less)}
    assert variants and variants <= compared


def test_sweeps_are_compared_only_where_they_are_named(tmp_path):
    swept = [f for f in findings.declared() if f.sweep]
    shown = set(findings.experiments())
    assert swept and not any({f.more.experiment, f.less.experiment} <= shown for f in swept)
    default = render(Lake(tmp_path), load_specs(), {name: name for name in shown})
    assert not [f.claim for f in swept if f.claim in default]
    assert not any(f.published for f in swept), "lab/docs/history.md points to findings that results measures"
    names = {name: name for name in (swept[0].more.experiment, swept[0].less.experiment)}
    page = render(Lake(tmp_path), load_specs(), names, complete=False)
    assert swept[0].claim in page and f"\n    etpi lab results {' '.join(names)} --seed 0\n" in page


@pytest.mark.parametrize("turns", [33, 17, 9, 5])
def test_first_turns_weights_are_compared_on_equal_terms(turns: int):
    """At each number of turns the two sides differ in the weight alone, and levels differ in the survey alone."""
    light, heavy = (SPECS[f"plan_first_{turns}_turns_x{factor}"] for factor in (1, 12))
    assert (light.dataset.upweight_factor, heavy.dataset.upweight_factor) == (1, 12)
    weights = {"dataset": light.dataset.model_copy(update={"upweight_factor": 12.0})}
    assert light.model_copy(update=weights | {"title": heavy.title, "notes": heavy.notes}) == heavy
    longest = SPECS["plan_first_33_turns_x1"]
    same = {"title": longest.title, "notes": longest.notes, "rollout_sets": longest.rollout_sets}
    assert light.model_copy(update=same) == longest
    sets = load_specs().rollout_sets
    ours, theirs = sets[light.rollout_sets[0]], sets[longest.rollout_sets[0]]
    assert (ours.tasks, ours.k, ours.seed, ours.suite) == (theirs.tasks, theirs.k, theirs.seed, theirs.suite)
    assert ours.engine and theirs.engine and ours.engine.skill.get("survey_turns", 0) == turns - 5
    assert {**ours.engine.skill, "survey_turns": 28} == theirs.engine.skill


def test_every_row_of_the_report_that_the_embedded_worlds_repeat_has_a_finding():
    page = history.page()
    assert page == (ROOT / "lab/docs/history.md").read_text(encoding="utf-8"), "run python -m etpi_lab.analysis.history"
    assert {int(number) for number in re.findall(r"row (\d+)", page)} >= {1, 3, 5, 6, 9, 10, 11}
    sides = {cell.split(",")[0] for line in page.splitlines() if line.count("|") == 5 for cell in line.split(" | ")[2:]}
    assert {name for name in sides if name.endswith("tiny")} <= set(SPECS)


def test_page_lists_each_seed_and_experiments_without_metrics(tmp_path):
    lake, name = Lake(tmp_path), "plan_first_tiny"
    by_seed = [row(name, hits, 24, seed) for seed, hits in ((None, 18), (0, 12), (1, 24))]
    small_lake.put(lake, "eval_metrics", name, {"metrics": by_seed})
    page = render(lake, load_specs(), {"first": name, "unfinished": "plan_first_tiny_weak"})
    assert "0.75 [0.55, 0.88], n 24; by seed 0.50, 1.00" in page
    assert "## unfinished" in page and "No metrics" in page
