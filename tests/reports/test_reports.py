"""Reports: the page shows the figures of the tables, and escapes their texts."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from etpi_assets.asset import Markdown, asset_definitions
from etpi_assets.curation.upweight import loss_by_turn, shares
from etpi_assets.evaluation.metrics import measure
from etpi_assets.graph import GRAPH
from etpi_assets.reports import facts, html, leaderboard, model_card
from etpi_assets.resources import Resources
from etpi_assets.specs.experiment import ExperimentSpec, preset_values
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.specs.training import RLSection
from etpi_resources import charts
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.schemas import empty, from_rows
from etpi_resources.links import REPORTED_VIEW
from tests.support.graph import write_spec
from tests.support.models import make_base

SPEC = ExperimentSpec.model_validate(
    {**preset_values("plan_first"), "title": "Plan <first> & go", "rollout_sets": ["strong"], "base": {"kind": "tiny"}}
)
IMPORTED = {"title": "t", "kind": "imported", "path": "x", "license": "cc-by-4.0"}


def _rollout(i: int, role: str, seed: int | None) -> dict:
    return {
        "rollout_id": f"{role}{seed}{i}",
        "origin": "eval",
        "checkpoint_role": role,
        "seed": seed,
        "sample_seed": 0,
        "decoding": "greedy",
        "task_id": f"task{i}",
        "repo": "harbor",
        "wall_seconds": 2.0,
        "exit_status": "Submitted",
    }


@pytest.fixture(scope="module")
def tables() -> facts.ReportTables:
    rollouts = [_rollout(i, *who) for i in range(12) for who in (("base", None), ("sft", 0))]
    scores = [
        {
            "rollout_id": r["rollout_id"],
            "task_id": r["task_id"],
            "repo": r["repo"],
            "reward": float(r["checkpoint_role"] == "sft" and r["task_id"] != "task3"),
            "verdict": "passed",
            "plan_first": r["checkpoint_role"] == "sft",
            "plan_first_reason": None if r["checkpoint_role"] == "sft" else "first action not send_message",
            "plan_content": True,
            "follow_through": 1.0,
            "plan_first_published": r["task_id"] != "task0",
            "exit_status": "Submitted",
            "infrastructure_error": False,
        }
        for r in rollouts
    ]
    agents = [
        {
            "rollout_id": r["rollout_id"],
            "agent_id": agent,
            "follow_through": True,
            "plan_entities": '["src/<b>.py"]',
            "parse_rate": 1.0,
            "turns": 5,
            "output_tokens": 100,
            "think_tokens": 0,
            "exit_status": "Submitted",
        }
        for r in rollouts
        for agent in ("agent1", "agent2")
    ]
    evaluated = from_rows("rollouts", rollouts), from_rows("scores", scores), from_rows("agent_scores", agents)
    return facts.ReportTables(
        metrics=measure(*evaluated, experiment="demo"),
        rollouts=from_rows("rollouts", [{"rollout_id": "a", "wall_seconds": 60.0}] * 4),
        agents=from_rows("agents", [{"rollout_id": "a", "output_tokens": 250}] * 8),
        eval_rollouts=evaluated[0],
        eval_agents=from_rows("agents", [{"rollout_id": a["rollout_id"], "output_tokens": 100} for a in agents]),
        eval_turns=empty("turns"),
        eval_scores=evaluated[1],
        eval_agent_scores=evaluated[2],
        selected=from_rows("selected", [{"rollout_id": "a"}]),
        dropped=from_rows("dropped", [{"stage": "selection", "rollout_id": "b", "reason": "reward_below"}]),
        pairs=from_rows("pairs", [{"pair_id": str(t), "input_tokens": 10 * t, "output_ids": [1, 2]} for t in range(3)]),
        dataset_rows=from_rows(
            "dataset_rows",
            [
                {
                    "pair_id": str(t),
                    "turn": t,
                    "weight": 12.0 if t == 0 else 1.0,
                    "copies": 1,
                    "output_tokens": 4,
                    "split": "train",
                    "repo": "harbor",
                    "teacher": "strong",
                    "rollout_id": "a",
                }
                for t in range(4)
            ],
        ),
        sequences=from_rows(
            "sequences",
            [
                {
                    "sequence_id": "s",
                    "split": "train",
                    "rollout_id": "a",
                    "agent_id": "agent1",
                    "input_ids": list(range(6)),
                    "span_starts": [2],
                    "span_ends": [4],
                    "span_weights": [12.0],
                }
            ],
        ),
        checkpoints=from_rows(
            "checkpoints",
            [
                {
                    "checkpoint_id": "c" * 64,
                    "role": "sft",
                    "seed": 0,
                    "step": 10,
                    "final": True,
                    "method": "full",
                    "path": "data/checkpoints/c",
                    "train_loss": 0.1,
                    "wall_seconds": 9.0,
                    "hyperparameters": '{"device": "cpu, 2 threads", "libraries": {"torch": "2.13.0", "trl": "1.0"}}',
                }
            ],
        ),
        training_log=from_rows(
            "training_log",
            [{"role": "sft", "seed": 0, "step": s, "loss": 1.0 / (s + 1), "val_loss": None} for s in range(5)],
        ),
        rl_log=empty("training_log"),
        probes=from_rows("probes", []),
        tasks=empty("tasks"),
    )


def _experiment(**changes: Any) -> html.ReportedExperiment:
    """The experiment of `SPEC` with other values of its keys."""
    checks = [
        {"asset": "tito_pairs", "name": "no_think", "passed": False, "blocking": True, "message": "1 row <script>"},
        {"asset": "raw_rollouts", "name": "tasks_as_asked", "passed": False, "blocking": False, "message": "1 fewer"},
    ]
    return html.ReportedExperiment("demo", SPEC.model_copy(update=changes), {"tasks/coop": "v1"}, checks)


class _Wellformed(HTMLParser):
    VOID = {"meta", "br", "link"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag


def test_page_is_wellformed_self_contained_and_escaped(tables):
    page, _ = html.render(_experiment(), tables)
    parser = _Wellformed()
    parser.feed(page)
    assert parser.open == []
    assert "script" not in parser.tags and "link" not in parser.tags
    assert not re.search(r'src="|url\(|@import', page), "nothing is loaded; links lead to the pages of etpi view"
    assert set(re.findall(r'href="(https?://[^/"]+)', page)) == {REPORTED_VIEW}
    assert "Plan &lt;first&gt; &amp; go" in page


def test_hidden_characters_are_shown_as_their_numbers(tables):
    hostile = "\x1b]0;title\x07\x9b\u202eabc"
    failed = [{**row, "verdict": hostile} for row in tables.eval_scores.to_pylist()]
    tables = replace(tables, eval_scores=from_rows("scores", failed))
    experiment = _experiment(title=hostile, notes=hostile)
    for text in html.render(experiment, tables):
        assert not set(text) & set("\x1b\x07\x9b\u202e") and text.count("⟨U+202E⟩abc") > 2


def test_equal_tables_give_equal_bytes(tables):
    assert html.render(_experiment(), tables) == html.render(_experiment(), tables)


def test_page_says_what_happened_pairs_the_tasks_and_links_the_failures(tables):
    page, markdown = html.render(_experiment(), tables)
    for text in (page.replace("<code>", "`").replace("</code>", "`"), markdown):
        assert "Improved: `plan_first` 0 % to 100 % under greedy." in text
        assert "`solved` rose from 0 % to 92 % (+92 points [+54, +99], 12 tasks) under greedy; significant" in text
        assert "1 check failed: `no_think`" in text and "1 check warned: `tasks_as_asked`" in text
    assert "| solved | greedy | base 0.0 % → sft 91.7 % | +92 [+54, +99] | 12 | 11 / 0 | improved |" in markdown
    assert f'href="{REPORTED_VIEW}/dataset/demo"' in page
    assert f'href="{REPORTED_VIEW}/regressions/demo"' in page and f"]({REPORTED_VIEW}/regressions/demo)" in markdown
    card = _card(tables)
    assert "`solved` rose from 0 % to 92 %" in card and "On held-out repositories, with" in card


def test_a_drop_is_shown_beside_a_threshold_that_is_cleared(tables):
    lost = {"sft00": False}
    scores = from_rows(
        "scores",
        [
            {**row, "plan_first": not row["rollout_id"].startswith("sft") or lost.get(row["rollout_id"], True)}
            for row in tables.eval_scores.to_pylist()
        ],
    )
    metrics = measure(tables.eval_rollouts, scores, tables.eval_agent_scores, experiment="demo")
    experiment = _experiment(metrics=SPEC.metrics.model_copy(update={"thresholds": {"plan_first": 0.5}}))
    page, markdown = html.render(experiment, replace(tables, eval_scores=scores, metrics=metrics))
    assert "- plan_first of sft, greedy: clears the threshold, but lower since base (50 %)" in markdown
    assert '<span class="bad">clears the threshold, but lower since base</span>' in page


def test_figures_of_a_training_split_are_not_called_held_out(tables):
    evaluated = ExperimentSpec.model_validate({**SPEC.model_dump(), "evaluate": {"suite": "s", "split": "train"}})
    page, markdown = html.render(_experiment(evaluate=evaluated.evaluate), tables)
    for text in (page, markdown):
        assert "Results on tasks of the split train, not held out" in text and "Held-out results" not in text


def test_nothing_is_cut_between_500_and_1600_pixels(tables, tmp_path, chromium):
    """Neither the page nor a table is wider than the window, with long names and a column for every role."""
    long = "a_repository_with_a_long_name/" * 4
    rows = [{**row, "decoding": "greedy@a-long-budget", "task_id": row["task_id"] + long}
            for row in tables.eval_rollouts.to_pylist()]  # fmt: skip
    roles = [
        {**row, "checkpoint_role": role, "n": 10_000} for row in tables.metrics.to_pylist() for role in facts.ROLE_ORDER
    ]
    wide = replace(
        tables, eval_rollouts=from_rows("rollouts", rows), metrics=from_rows("metrics", roles),
        probes=from_rows("probes", [{"role": "sft", "probe": "first_turn_message", "n": 20, "value": 1.0}]),
    )  # fmt: skip
    page, _ = html.render(_experiment(), wide)
    measure_it = (
        "<script>const cut = [...document.querySelectorAll('table, p, pre, svg')].filter("
        "e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1);"
        "if (innerWidth < 640) cut.splice(0, cut.length, ...cut.filter(e => !e.closest('.chart')));"
        "document.title = 'cut ' + cut.length + ' of ' + document.documentElement.clientWidth;</script>"
    )
    (tmp_path / "report.html").write_text(page.replace("</body>", measure_it + "</body>"))
    for width in (500, 800, 1300, 1600):
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
        command += ["--hide-scrollbars", "--dump-dom", f"file://{tmp_path}/report.html"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert f"<title>cut 0 of {width}</title>" in shown, re.findall("<title>.*</title>", shown)


def test_text_between_backticks_is_escaped_code(tables):
    notes = "Turn `dataset.<factor>` & run `make run`; a lone ` stays."
    page, markdown = html.render(_experiment(notes=notes, published={"source": "`x` of a report"}), tables)
    assert "Turn <code>dataset.&lt;factor&gt;</code> &amp; run <code>make run</code>; a lone ` stays." in page
    assert notes in markdown
    assert "I&#39;ll" in page and r"\u0027" not in page, "the spec's keywords"


def test_page_and_markdown_show_the_same_figures_of_the_trained_role(tables):
    page, markdown = html.render(_experiment(), tables)
    assert "100.0 %" in page and "| metric | decoding | base | sft |" in markdown
    assert "| plan_first |" in markdown
    assert "first action not send_message" not in page, "the base's pairs are not the trained role's"
    assert "reward_below" in page


def test_published_figures_stand_beside_the_published_reading_and_both_readings_are_shown(tables):
    value = next(
        row["value"]
        for row in tables.metrics.to_pylist()
        if (row["metric"], row["checkpoint_role"], row["seed"]) == ("plan_first_published", "sft", None)
    )
    assert 0 < value < 1
    published = {"plan_first": {"value": 0.5, "hits": 1, "n": 2}}
    for reading, headline in (("hardened", "plan_first"), ("published", "plan_first_published")):
        metrics = SPEC.metrics.model_copy(update={"reading": reading})
        page, markdown = html.render(_experiment(published=published, metrics=metrics), tables)
        (beside,) = [
            line for line in page.splitlines() if line.startswith('<tr><td>plan_first</td><td class="figure">50.0 %')
        ]
        assert f"{100 * value:.1f} %" in beside
        first_row = next(line for line in markdown.splitlines() if line.startswith("| plan_first"))
        assert first_row.startswith(f"| {headline} |")
        assert "plan_first_published</td>" in page and "plan_first</td>" in page


def test_loss_share_follows_the_weights(tables):
    assert shares(loss_by_turn(tables.dataset_rows))[0] == pytest.approx(12 / 15)


def test_report_compares_tokens_of_rows_and_of_merged_sequences(tables):
    page, _ = html.render(_experiment(), tables)
    assert "46 → 6 (7.7× fewer)" in page


def _card(tables: facts.ReportTables, spec: ExperimentSpec = SPEC, tainted: Sequence[str] = ()) -> str:
    rows = [
        {"split": split, "payload": f'{{"source": "omni", "license": "{licence}"}}'}
        for split, licence in (("train", "mit"), ("train", "mit"), ("heldout", "mit"))
    ]
    sets = {name: RolloutSetSpec(**IMPORTED) for name in SPEC.rollout_sets}
    experiment = replace(_experiment(), spec=spec, rollout_sets=sets, tainted=tainted)
    base = from_rows("checkpoints", [{"checkpoint_id": "b" * 64, "role": "base"}])
    return model_card.render(experiment, replace(tables, tasks=from_rows("tasks", rows)), base)


def test_card_names_base_data_and_intervals(tables):
    card = _card(tables)
    assert "| omni | mit | 2 tasks |" in card
    assert f"| {SPEC.rollout_sets[0]} | cc-by-4.0 | imported rollouts |" in card
    assert card.startswith("---\nlicense: apache-2.0")
    assert "| Trained on | cpu, 2 threads; torch 2.13.0, trl 1.0 |" in card
    assert "tiny `bbbbbbbbbbbbbbbb`" in card and "strong" in card and "| plan_first | sft | greedy | 100.0 % [" in card


def test_card_and_report_name_what_is_tainted(tables):
    sentence = "tainted: checkpoint strong sft seed 0 step 200"
    assert sentence not in _card(tables) and sentence in _card(tables, tainted=[sentence])
    assert sentence in html.render(replace(_experiment(), tainted=[sentence]), tables)[0]


def test_card_of_an_experiment_that_trained_nothing_says_so(tables):
    untrained = {**SPEC.model_dump(), "train": {"method": "none"}}
    none = replace(tables, checkpoints=empty("checkpoints"), metrics=empty("metrics"))
    card = _card(none, ExperimentSpec.model_validate(untrained))
    assert "**Nothing was trained**" in card and "| Teachers | strong |" in card
    assert not [words for words in ("A checkpoint trained", "Optimiser", "Epochs", "fine-tuning]") if words in card]
    assert "Nothing was trained" not in _card(tables)


@pytest.mark.parametrize(
    ("teacher", "named"),
    [
        ({"teacher": "checkpoint:0b1d"}, "checkpoint:0b1d"),
        ({"teacher_engine": {"kind": "vllm", "teacher": "t", "model": "big", "urls": ["http://gpu2:8000"]}}, "big"),
    ],
)
def test_card_of_a_distilled_student_names_its_teacher(tables, teacher, named):
    section = {"method": "opd", "suite": "s", "agent": {"temperature": 1.0}, **teacher}
    card = _card(tables, SPEC.model_copy(update={"rl": RLSection.model_validate(section)}))
    assert "stage 2, OPD: s" in card and "| Reinforcement | OPD on s" in card and f"| RL teacher | {named} |" in card
    assert "gpu2" not in card and "RL teacher" not in _card(tables)


def test_card_and_report_begin_with_the_main_metric(tables):
    main = ExperimentSpec.model_validate({**SPEC.model_dump(), "metrics": {"main": "plan_first"}})
    for spec, begins in ((SPEC, "`solved` rose from"), (main, "`plan_first` rose from")):
        assert begins in _card(tables, spec).split("## ")[0]
        _, markdown = html.render(_experiment(metrics=spec.metrics), tables)
        assert markdown.split("## What happened")[1].strip().startswith(f"- {begins}")


def test_card_states_each_stage_and_the_batch_size(tables):
    assert "8,192 tokens per step" in _card(tables) and "stage 2" not in _card(tables)
    rl = {"method": "grpo", "suite": "terminal_tiny", "rewards": [{"function": "format"}]}
    train = {"batch_sequences": 16, "max_steps": 42}
    card = _card(tables, ExperimentSpec.model_validate({**SPEC.model_dump(), "rl": rl, "train": train}))
    assert "at most 42 steps; 16 sequences per step" in card
    assert "└── stage 1, fine-tuning: strong" in card and "└── stage 2, GRPO: terminal_tiny (this model)" in card


def test_inference_code_of_the_card_renders_the_prompt_of_training(tables, tmp_path):
    pytest.importorskip("torch")
    chat = load_chat_format("tiny")
    trained = {**tables.checkpoints.to_pylist()[0], "path": str(make_base(tmp_path / "base", chat))}
    code = _card(replace(tables, checkpoints=from_rows("checkpoints", [trained])))
    code = code.partition("```python\n")[2].partition("```")[0].replace("max_new_tokens=256", "max_new_tokens=4")
    names: dict[str, Any] = {}
    exec(compile(code, "card", "exec"), names)
    prompt = names["inputs"]["input_ids"][0].tolist()
    assert prompt == list(chat.prompt_ids(names["messages"]))
    assert 0 < names["output"].shape[1] - len(prompt) <= 4


def test_page_lists_tasks_that_reinforcement_changed(tables):
    after = {
        "task1": (1.0, 1.0), "task2": (0.0, 1.0), "task3": (1.0, 1.0), "task4": (0.0, 0.5),
    }  # fmt: skip
    evaluated = [_rollout(i, role, 0) | {"suite": "s"} for i in range(1, 5) for role in ("sft", "rl")]
    rollouts = from_rows("rollouts", evaluated)
    before = {**dict.fromkeys(after, (1.0, 1.0)), "task3": (0.0, 0.0)}
    result = [(r["rollout_id"], r["task_id"], r["checkpoint_role"]) for r in rollouts.to_pylist()]
    outcome = {"sft": before, "rl": after}
    scores = [
        {"rollout_id": i, "task_id": t, "reward": outcome[role][t][0], "infrastructure_error": False}
        for i, t, role in result
    ]
    agents = [{"rollout_id": i, "agent_id": "agent1", "parse_rate": outcome[role][t][1]} for i, t, role in result]
    log = [{"role": "rl", "seed": 0, "step": s, "parsed": 0.1 * s, "solved": 0.0, "called": 0.5} for s in range(4)]
    wrote = {"task1": ["ls"], "task3": [None, "wc -l <them> | tee `n`", "ls"], "task4": []}
    turns = [
        {
            "rollout_id": i,
            "agent_id": "agent1",
            "turn": turn,
            "actions": json.dumps([{"kind": "bash", "command": command}] if command else []),
        }
        for i, t, role in result
        for turn, command in enumerate(wrote.get(t, []) if role == "rl" else ["before"])
    ]
    changed = replace(
        tables,
        eval_rollouts=rollouts,
        eval_turns=from_rows("turns", turns[::-1]),
        eval_scores=from_rows("scores", scores),
        eval_agent_scores=from_rows("agent_scores", agents),
        rl_log=from_rows("training_log", log),
        tasks=from_rows("tasks", [{"task_id": "task3", "suite": "s", "instruction": "Count <them>."}]),
    )
    page = html.render(_experiment(), changed)[0].partition("<h2>Reinforcement</h2>")[2].partition("<h2>")[0]
    assert "newly parsed 1, parse lost 1, newly solved 1, newly lost 2" in page
    assert "<td>task3</td><td>greedy</td><td>0</td><td>newly parsed, newly solved</td>" in page
    assert "<td>task4</td><td>greedy</td><td>0</td><td>no longer parsed, newly lost</td>" in page
    assert "wc -l &lt;them&gt; | tee `n`</code>" in page
    assert "<td>task1</td>" not in page
    assert "Count &lt;them&gt;." in page and "called" in page
    assert "<h2>Reinforcement</h2>" not in html.render(_experiment(), tables)[0]


def test_leaderboard_and_ceiling_keep_filtered_apart(tables):
    entry = leaderboard.EvaluatedExperiment("demo", "Demo", tables.metrics)
    board = leaderboard.leaderboard([entry]).to_pylist()
    (row,) = [r for r in board if r["metric"] == "solved" and r["checkpoint_role"] == "sft"]
    assert row["value"] == pytest.approx(11 / 12) and row["seeds"] == 1
    teacher_scores = from_rows(
        "scores",
        [
            {
                "rollout_id": str(i),
                "plan_first": True,
                "plan_content": True,
                "follow_through": float(i == 0),
                "reward": 0.0,
                "infrastructure_error": False,
            }
            for i in range(4)
        ],
    )
    teacher = leaderboard.TeacherData(teacher_scores, frozenset({"0"}), ("strong",), frozenset({"follow_through"}))
    ceiling = {r["metric"]: r for r in leaderboard.teacher_ceiling([entry], {"demo": teacher}).to_pylist()}
    assert ceiling["follow_through"]["teacher_value"] == pytest.approx(0.25)
    assert ceiling["follow_through"]["selected_value"] == pytest.approx(1.0)
    assert ceiling["follow_through"]["filtered"] and not ceiling["plan_first"]["filtered"]


def test_charts_survive_nothing_and_one_point():
    assert "nothing recorded" in charts.line_chart("Loss", [], "step")
    one = charts.line_chart("Loss", [("train", [(1, 0.5)])], "step", log_y=True)
    assert one.count("<circle") == 2, "the legend's and the point"
    assert ">1.25<" not in one, "no tick between two steps"
    assert charts.as_image(charts.bars("b", []), "b").startswith("![b](data:image/svg+xml;base64,")


def test_board_has_a_line_per_condition_and_counts_omitted_rows(tables, monkeypatch):
    entries = [leaderboard.EvaluatedExperiment("demo", "Demo", tables.metrics)]
    table = leaderboard.leaderboard(entries)
    lines = leaderboard.board(table).splitlines()
    assert [line.split(" | ")[:3] for line in lines[2:]] == [["| demo", role, "greedy"] for role in ("base", "sft")]
    assert "| 0.92 [0.65, 0.99], n 12 |" in lines[3] and lines[0].count("|") == lines[3].count("|")
    assert "called" not in lines[0], "no tools were offered"
    with monkeypatch.context() as patch:
        patch.setattr(leaderboard, "PAGE_CHARACTERS", len("\n".join(lines[:3])))
        assert leaderboard.board(table).rpartition("\n\n")[2].startswith("… and 1 more")
    teacher = leaderboard.TeacherData(tables.eval_scores, frozenset({"sft00"}), ("a|b",), frozenset({"plan_first"}))
    ceiling = leaderboard.ceiling_board(leaderboard.teacher_ceiling(entries, {"demo": teacher}))
    assert "| demo | a\\|b | sft | plan_first | greedy | yes | 0.50 | 1.00 | 1.00 [0.76, 1.00], n 12 |" in ceiling


def test_metrics_that_a_spec_puts_first_lead_in_its_reading():
    first = facts.headline_metrics("published", ("adherence", "plan_first"))
    assert first[:2] == ["adherence", "plan_first_published"] and len(first) == len(set(first)) == 9
    assert facts.headline_metrics("hardened") == list(facts.HEADLINE)


def test_means_that_lead_the_report_are_no_percentages(tables):
    row = {"experiment": "demo", "checkpoint_role": "sft", "decoding": "greedy", "unit": "turn", "excluded": 0, "n": 9}
    row |= {"interval": "mean_cluster_t", "value": 33.75, "ci_low": 33.5, "ci_high": 34.0}
    for metric in facts.MEANS:
        with_mean = pa.concat_tables([tables.metrics, from_rows("metrics", [row | {"metric": metric}])])
        first = SPEC.metrics.model_copy(update={"headline": (metric,)})
        page, markdown = html.render(_experiment(metrics=first), replace(tables, metrics=with_mean))
        text = re.sub(r"(\s|<[^>]+>)+", " ", page)
        assert " 33.8 [33.5, 34.0] n = 9" in text and "3375" not in text
        assert "33.8 [33.5, 34.0], n = 9" in markdown


@pytest.mark.parametrize("first", [(), ("parse_rate",)])
def test_rates_with_a_threshold_and_the_headline_stand_above_the_fold(tables, first):
    metrics = SPEC.metrics.model_copy(update={"headline": first})
    page, _ = html.render(_experiment(metrics=metrics), tables)
    shown = set(re.findall(r"<tr><td>(\w+)</td>", page.partition("more rows: the other metrics")[0]))
    assert shown == {"solved", *SPEC.metrics.thresholds, *first}
    assert facts.leading_metrics(metrics.model_dump()) == [*first, *SPEC.metrics.thresholds]


def test_board_shows_called_where_it_was_measured():
    row = {"experiment": "demo", "checkpoint_role": "rl", "decoding": "greedy", "unit": "rollout", "excluded": 0}
    row |= {"interval": "wilson", "ci_low": 0.4, "ci_high": 0.6, "n": 96}
    metrics = from_rows(
        "metrics", [row | {"metric": "solved", "value": 0.5}, row | {"metric": "called", "value": 0.52}]
    )
    assert [m["metric"] for m in facts.metric_rows(metrics, facts.HEADLINE)] == ["solved", "called"]
    head, _, line = leaderboard.board(
        leaderboard.leaderboard([leaderboard.EvaluatedExperiment("demo", "Demo", metrics)])
    ).splitlines()
    assert head == "| experiment | role | decoding | solved | called |"
    assert line.endswith("| 0.50 [0.40, 0.60], n 96 | 0.52 [0.40, 0.60], n 96 |")


def test_cost_counts_teacher_rollouts(tables):
    figures = dict(facts.cost(tables))
    assert (figures["teacher rollouts"], figures["teacher output tokens"]) == ("4", "2,000")
    assert figures["teacher rollout time, summed over concurrent rollouts"] == "4.0 min"
    assert (figures["training wall time"], figures["evaluation rollouts"]) == ("9 s", "24")


SUITE = 'title = "s"\nfamily = "coop_tiny_shared"\n[params]\ntrain = 8\nheldout = 24\n'
SET = """title = "t"
kind = "live"
suite = "small"
engine = {kind = "scripted", teacher = "made", skill = {plan_first = 1.0}}
"""
UNTRAINED = """title = "e"
rollout_sets = ["planned"]
evaluate = "none"
base = {kind = "none", tokenizer = "tiny", chat_template = "tiny"}
preset = "plan_first"
train = {method = "none"}
select = {min_reward = "none", shortest_correct = false}
gates = {format_exposure = 1, turns_lost = 1.0}
dataset = {max_length = 300}
"""


def test_assets_show_their_reports_as_markdown_metadata(tmp_path):
    for kind, name, text in (
        ("suites", "small", SUITE), ("rollout_sets", "planned", SET), ("experiments", "few", UNTRAINED),
    ):  # fmt: skip
        write_spec(tmp_path / "specs", kind, name, text)
    resources = Resources(lake=Lake(tmp_path / "lake"), specs_folder=tmp_path / "specs")
    definitions = asset_definitions()
    shown = {}
    for asset, node in GRAPH.items():
        key = {"suite": "small", "rollout_set": "planned", "experiment": "few", "all": "all"}[node.set]
        outcome = definitions[asset].execute(key, resources, lambda line: None)
        assert not outcome.manifest.blocked, outcome.manifest.failures
        shown[asset] = outcome.metadata
    board, ceiling = shown["leaderboard"]["board"], shown["teacher_ceiling"]["board"]
    for shown_value in (board, ceiling, shown["experiment_report"]["summary"], shown["model_card"]["card"]):
        assert isinstance(shown_value, Markdown)
    assert "| few | teacher | as_rolled_out | 1.00 [" in board
    page = Path(shown["experiment_report"]["report"]).read_text()
    collected = Ref("raw_rollouts", "rollout_set", "planned")
    count = resources.lake.require(collected).rows["rollouts"]
    assert f'<td>teacher rollouts</td><td class="figure">{count}</td>' in page
    assert f'<td class="long">{collected}</td>' in page, "lineage"
    assert "Not evaluated</h2>" in page and "Held-out" not in page and "held out" in page
    assert "<td>live</td>" in page and "the result is a data set of" in page
    assert "<td>dataset</td><td>over_max_length</td>" in page, "drops of all stages"
    card = shown["model_card"]["card"]
    assert "Not evaluated." in card and "held-out" not in card and "| plan_first | 100.0 %" in card

    # The same lake without the user's specs, as in a shell without ETPI_SPECS.
    (tmp_path / "none" / "experiments").mkdir(parents=True)
    without = Resources(lake=resources.lake, specs_folder=tmp_path / "none")
    before = {name: resources.lake.require(Ref(name, "all", "all")).rows for name in ("leaderboard", "teacher_ceiling")}
    for name, rows in before.items():
        assert definitions[name].execute("all", without, lambda line: None).manifest.rows == rows
    table = resources.lake.read(Ref("leaderboard", "all", "all"), "leaderboard").to_pylist()
    assert {(row["experiment"], row["title"], row["spec"]) for row in table} == {("few", "e", "missing")}
    assert "few (spec missing)" in leaderboard.board(from_rows("leaderboard", table))
