"""The plan-first report's experiments: each spec says what the report states, each generator's fault is stopped."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.generate import history
from etpi_assets.agent.actions import read_actions
from etpi_assets.asset import asset_definitions
from etpi_assets.checks import OVERRIDABLE
from etpi_assets.curation.upweight import loss_by_turn, shares
from etpi_assets.evaluation.probes import prompt_parity
from etpi_assets.graph import GRAPH
from etpi_assets.planning.planner import plan
from etpi_assets.reports import facts, html
from etpi_assets.reports.facts import published_figures
from etpi_assets.resources import Resources
from etpi_assets.rollouts.plan_first import FIXED, PlanFirstAgent, choose, write_turns
from etpi_assets.scoring.intervals import wilson
from etpi_assets.specs.load import load_specs
from etpi_assets.specs.rollout_set import ScoringSection, TemplatedSection
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake import catalog
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.schemas import empty
from etpi_resources.trainers.workers.plan import PlanSettings, make_plan
from tests.support import whole_checks
from tests.support.curation import CurationLake
from tests.support.docs_pages import stopped
from tests.support.repositories import PATCH

SPECS = load_specs()
TEMPLATED = (
    "plan_first_v1", "plan_first_v1_rerun", "plan_first_v1_fix2", "plan_first_v1_first_turn",
    "plan_first_v2", "plan_first_v3", "plan_first_v4", "plan_first_v5_tf",
)  # fmt: skip
RETOKENISED = tuple(f"tito_retokenised_v{n}" for n in (1, 2, 3, 4))
NATIVE = tuple(f"tito_native_{n}" for n in ("v1", "v2", "v3", "v4b", "v4c"))
TABLE_OF = {
    "eval_rollouts": "rollouts", "eval_agents": "agents", "eval_turns": "turns", "eval_scores": "scores",
    "eval_agent_scores": "agent_scores", "rl_log": "training_log",
}  # fmt: skip
PATH = ScoringSection().path_pattern
HELD_OUT = ["pallets_click_task", "dspy_task"]


def spec(name: str) -> Any:
    return SPECS.experiments[name]


def conversations(name):
    """Agents' conversations that an experiment's set holds, of a suite that has all the tasks it asks for."""
    rollout_set: Any
    (rollout_set,) = (SPECS.rollout_sets[n] for n in spec(name).rollout_sets)
    return rollout_set.tasks * rollout_set.k * (2 if rollout_set.templated.roles == "both" else 1)


def steps(name, rows):
    train = spec(name).train
    return make_plan(
        [900] * rows,
        [1.0] * rows,
        [300.0] * rows,
        PlanSettings(
            epochs=train.epochs,
            max_steps=train.max_steps,
            batch_tokens=train.batch_tokens,
            micro_tokens=8192,
            batch_sequences=train.batch_sequences,
            schedule=train.schedule,
            warmup=train.warmup_ratio,
            seed=0,
        ),
    ).steps


@pytest.mark.parametrize("name", (*TEMPLATED, *RETOKENISED, *NATIVE))
def test_every_iteration_resolves_to_its_published_settings(name, tmp_path):
    result = spec(name)
    assert result.requires != "cpu" and result.base.kind == "hub" and result.train.method == "lora"
    assert (result.train.lora_rank, result.train.lora_alpha, result.train.target_modules) == (32, 16, "all-linear")
    assert result.metrics.thresholds == {"plan_first": 0.70, "plan_content": 0.70, "follow_through": 0.60}
    assert result.evaluate.agent.max_model_len == 16384
    for suite in {*(SPECS.rollout_sets[n].suite for n in result.rollout_sets), result.evaluate.suite}:
        assert suite and SPECS.suites[suite].params["heldout_repos"] == HELD_OUT
    states = {step.state for step in plan(name, SPECS, Lake(tmp_path))}
    assert states == {"missing"}
    assert result.published["source"] and result.published["date"] and result.published["fault"]
    published_figures(result.published)


def test_every_iteration_but_the_diagnosis_evaluates_two_pairs_at_100_steps():
    for name in (*TEMPLATED, *RETOKENISED, *NATIVE):
        section = spec(name).evaluate
        if name == "plan_first_v1_first_turn":
            assert (section.split, section.tasks * 2, section.agent.max_steps) == ("train", 20, 1)
            assert section.agent.prompt == SPECS.rollout_sets["plan_first_templated_v1"].agent.prompt != "coop"
        else:
            assert (section.split, section.tasks, section.agent.max_steps) == ("heldout", 2, 100)
            assert section.agent.prompt == "coop"
    assert SPECS.suites["cooperbench_two_pairs"].params["pairs"] == [
        "pallets_click_task/2068/f1_f2", "dspy_task/8394/f1_f2"
    ]  # fmt: skip


def test_the_diagnosis_and_the_third_attempt_retrain_nothing():
    dataset = [GRAPH[a].sections for a in ("selected_trajectories", "tito_pairs", "sft_checkpoint")]
    for sections in ([s for s in of_asset if not s.startswith("gates")] for of_asset in dataset):
        names = ("plan_first_v1_first_turn", "plan_first_v1_fix2", "plan_first_v1_rerun")
        assert len({SPECS.section_hash("experiment", name, sections) for name in names}) == 1


def test_serving_only_template_arguments_differ_from_training_and_retrain_nothing():
    chat, messages = load_chat_format("qwen3"), [{"role": "user", "content": "x"}]
    for name, passes in (("plan_first_v1", False), ("plan_first_v1_rerun", False), ("plan_first_v1_fix2", True)):
        serving = spec(name).serving
        served, trained = (chat.prompt_ids(messages, **k) for k in (serving.served_kwargs(), serving.template_kwargs))
        answer = prompt_parity({"task": served}, {"task": trained})
        assert answer.passed is passes
        assert passes or chat.decode(answer.detail["first_departure"][1]["served"]).startswith("<think>")
    sections = [s for asset in ("tito_pairs", "rl_checkpoint") for s in GRAPH[asset].sections if "serving" in s]
    read = {"serving.template_kwargs", "serving.options.tool-call-parser"}
    assert set(sections) == read, "the parser decides a check of the pairs, and changes none"


@pytest.mark.parametrize(
    ("name", "rows", "training", "stated"),
    [
        ("plan_first_v1", 380, 342, 42),
        ("plan_first_v1_rerun", 1900, 1710, 424),
        ("plan_first_v2", 2100, 1890, 472),
        ("plan_first_v5_tf", 2300, 2070, 516),
    ],
)
def test_rows_and_steps_are_those_of_the_report(name, rows, training, stated):
    train = spec(name).train
    assert conversations(name) == rows and round(rows * 0.9) == training
    assert train.epochs * (training // train.batch_sequences) == stated, "the report's trainer leaves the rest out"
    assert steps(name, training) == stated
    said = spec(name).published["stated"]
    assert said["steps"] == stated and said.get("train_rows", training) == training and said.get("rows", rows) == rows


def test_the_adapter_is_252_and_252_tensors_and_132_megabytes():
    torch, transformers, peft = (pytest.importorskip(name) for name in ("torch", "transformers", "peft"))
    train = spec("plan_first_v1").train
    assert spec("plan_first_v1").base.repo == "Qwen/Qwen3-4B"
    config = transformers.Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = peft.get_peft_model(
            transformers.Qwen3ForCausalLM(config),
            peft.LoraConfig(r=train.lora_rank, lora_alpha=train.lora_alpha, target_modules=train.target_modules),
        )
    adapter = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert sum(".lora_A." in n for n in adapter) == sum(".lora_B." in n for n in adapter) == 252
    stored = 2 * sum(p.numel() for p in adapter.values())  # bf16
    assert round(stored / 1e6) == 132 == spec("plan_first_v1").published["stated"]["adapter_megabytes"]


def made_rows(agents, a_turns, early, factor):
    """Tables as the gates read them: `agents` x `a_turns` turns (and the rest of `early`), turns 0-2 by `factor`."""
    numbers = [turn for _ in range(agents) for turn in range(a_turns)]
    numbers += [a_turns] * (early - len(numbers))
    count = len(numbers)
    names = [f"p{i}" for i in range(count)]
    rows = pa.table(
        {
            "pair_id": names, "turn": numbers, "split": ["train"] * count, "weight": [1.0] * count,
            "copies": [factor if turn < 3 else 1 for turn in numbers], "output_tokens": [100] * count,
        }
    )  # fmt: skip
    return rows, pa.table({"pair_id": names, "format_tokens": [20] * count})


@pytest.mark.parametrize("name", RETOKENISED)
def test_gate_thresholds_separate_published_failures_from_successes(name):
    section, factor = spec(name).gates, int(spec(name).dataset.upweight_factor)
    stated = spec("tito_retokenised_v1").published["stated"]
    agents, total = 2 * stated["selected_pairs"], stated["rows"]
    assert (agents, total) == (stated["first_turn_rows"], 571) == (38, 571)
    rows, pairs = made_rows(agents, total // agents, total, factor)
    outcomes = [whole_checks.turn_loss_share(rows, section), whole_checks.format_exposure(rows, pairs, section)]
    failed = {outcome.name for outcome in outcomes if not outcome.passed}
    assert failed == set(spec(name).published["answered_by"]) & {"turn_loss_share", "format_exposure"}
    assert shares(loss_by_turn(made_rows(agents, total // agents, total, 1)[0]))[0] == pytest.approx(38 / 571)
    assert (shares(loss_by_turn(rows))[0] > 0.1) == (factor > 1)


@pytest.mark.parametrize("name", NATIVE)
def test_the_call_format_holds_from_a_thousand_weighted_rows_on(name):
    rows = spec(name).published.get("stated", {}).get("rows")
    if rows is not None:
        assert (rows < spec(name).gates.format_exposure) == ("format_exposure" in spec(name).published["answered_by"])


@pytest.mark.parametrize("name", (*RETOKENISED, *NATIVE))
def test_the_teacher_gate_refuses_the_teacher_that_does_not_follow_through(name):
    teacher, floors = spec(name).published["teacher"], spec(name).gates.teacher
    weak = any(teacher[metric] < floor for metric, floor in floors.items())
    assert weak == ("teacher_gate" in spec(name).published["answered_by"]) == (teacher["name"] == "Qwen3-8B, prompted")


def test_history_page_has_a_row_per_teacher():
    section = history.page(SPECS).split("## Teachers")[1]
    cells = [line.removeprefix("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    rows = {name: figures for name, *figures, _, _ in cells[1:]}
    assert rows == {
        "Gemini 3 Pro, unprompted": ["2", "50.0 %", "0.0 %", "50.0 %"],
        "Gemini 3 Pro, prompted": ["23", "100.0 %", "100.0 %", "82.6 %"],
        "Qwen3-8B, prompted": ["not given", "100.0 %", "100.0 %", "13.0 %"],
        "Qwen3.5-27B, prompted": ["23", "95.7 %", "95.7 %", "95.7 %"],
    }


def test_published_figures_are_not_inherited(tmp_path):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "longer.toml").write_text('extends = "tito_native_v4c"\n[train]\nepochs = 3\n')
    assert load_specs(tmp_path).experiments["longer"].published == {}
    assert load_specs(tmp_path).experiments["tito_native_v4c"].published["follow_through"]["value"] == 0.5


def test_published_figures_equal_their_counts():
    assert [f.metric for f in published_figures({"source": "x", "parsed": 0.7, "teacher": {"a": 1}})] == ["parsed"]
    with pytest.raises(ValueError, match="3 of 4 is not 0.5"):
        published_figures({"follow_through": {"value": 0.5, "hits": 3, "n": 4}})


def test_answered_by_names_checks_of_the_graph():
    groups = ("curation", "serving", "evaluation")
    known = {
        name
        for definition in asset_definitions().values()
        if definition.node.group in groups
        for name in definition.checks
    }
    named = {answer for name in (*TEMPLATED, *RETOKENISED, *NATIVE) for answer in spec(name).published["answered_by"]}
    assert named <= known, sorted(named - known)


# --- the generators --------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(["plan", "acknowledge", "wait"]), st.sampled_from(["inline", "runtime"]), st.booleans(),
    st.randoms(),
    st.lists(st.text("abz_-.", min_size=1, max_size=6), min_size=1, max_size=4).map(lambda p: f"a/{'/'.join(p)}x.py"),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_turns_read_back_through_the_parser_of_inference(second, calls, first, random, path):
    section = TemplatedSection(second=second, calls=calls, run_tests=first)
    said = write_turns(PlanFirstAgent("agent1", "agent2", path, "b/c.py", first), section, random)
    loaded = [read_actions(text) for text in said]
    assert all(error is None and len(actions) == 1 for actions, error in loaded)
    waits = second == "wait" and not first
    assert [actions[0].kind for actions, _ in loaded][: 1 + waits] == ["bash"] * waits + ["send_message"]
    message = loaded[waits][0][0].message
    assert message and path in message and "b/c.py" in message
    assert ("pytest" in [actions[0].command for actions, _ in loaded]) == first
    assert loaded[waits][0][0].wait == (second == "wait" and first), "a partner that waits is waited for"


@given(st.randoms())
def test_plan_names_files_of_its_task_or_reports_the_fallback(random):
    both = ["Change `src/a.py` and ./src/b.py.", "Only src/b.py."]
    assert sorted(choose(both, PATH, "task", random)) == ["src/a.py", "src/b.py"]
    assert choose(["Change src/a.py.", "Change src/b.py."], PATH, "task", random) == ("src/a.py", "src/b.py")
    assert choose(both, PATH, "fixed", random) in FIXED
    assert choose(["src/a.py", "src/a.py again"], PATH, "task", random) in FIXED


TEXT = """**Title**: tie {n}

Add `tie_{n}(rope)` to `src/moor_{n}.py` and its case to `tests/test_moor_{n}.py`.
"""


def make_pool(root: Path, long: int = 60) -> Path:
    for repo in ("harbor_task", "quay_task", "pier_task", "dspy_task"):
        for n in (1, 2, 3):
            folder = root / repo / "task7" / f"feature{n}"
            folder.mkdir(parents=True)
            prose = "The rope is long, and the harbour master wants it to be written down how long it is.\n" * long
            (folder / "feature.md").write_text(TEXT.replace("{n}", str(n)) + prose)
            for name in ("feature.patch", "tests.patch"):
                (folder / name).write_text(PATCH.replace("{n}", str(n)))
    return root


EXPERIMENT = """title = "e"
rollout_sets = ["NAME"]
preset = "plan_first"
base = {kind = "tiny"}
select = {min_reward = "none", shortest_correct = false, require = []}
pairs = {capture = "retokenised"}
[dataset]
max_length = 8192
[evaluate]
suite = "pool"
[gates]
format_exposure = 10
"""


@pytest.fixture(scope="module")
def curation(tmp_path_factory):
    curation = CurationLake(tmp_path_factory.mktemp("curation"))
    pool = make_pool(tmp_path_factory.mktemp("pool"))
    params = f'[params]\npath = "{pool}"\nheldout_repos = ["dspy_task"]\n'
    curation.write("suites", "pool", f'extends = "cooperbench_pool"\n{params}')
    assert curation.make("tasks", "pool").manifest.rows == {"tasks": 4, "quarantined": 0}
    return curation


def rehearsed(curation, version, suite="pool"):
    """Make and score a small set of that version; its name, the raw manifest, the scores."""
    name = f"{version}_{suite}"
    text = f'extends = "plan_first_templated_{version}"\nsuite = "{suite}"\nk = 2\n[agent]\ntokenizer = "tiny"\n'
    curation.write("rollout_sets", name, text)
    raw = curation.make("raw_rollouts", name).manifest
    assert not raw.blocked, raw.checks
    assert not curation.make("scored_rollouts", name).manifest.blocked
    return name, raw, curation.lake.read(Ref("scored_rollouts", "rollout_set", name), "scores").to_pylist()


def failures(curation, version, more="", suite="pool"):
    """Make a small set of that version and its data set; the checks that failed, and the raw manifest."""
    name, raw, _ = rehearsed(curation, version, suite)
    curation.write("experiments", name, EXPERIMENT.replace("NAME", name).replace('"pool"', f'"{suite}"') + more)
    return curation.failures(name), raw


def test_v5_passes_and_everything_is_counted(curation):
    failed, raw = failures(curation, "v5")
    assert failed == {} and raw.notes["fell_back"] == []
    assert raw.rows["rollouts"] == 6 and raw.rows["agents"] == 12
    turns = curation.lake.read(Ref("raw_rollouts", "rollout_set", "v5_pool"), "turns").to_pylist()
    assert len(turns) == 12 * 6, "a message, then read, edit, diff, test, submit: the report plans six turns"
    scores = curation.lake.read(Ref("scored_rollouts", "rollout_set", "v5_pool"), "scores").to_pylist()
    assert all(row["plan_first"] and row["plan_content"] and row["follow_through"] == 1 for row in scores)


def test_short_synthetic_prompts_are_stopped(curation):
    failed, _ = failures(curation, "v1")
    assert {"prompt_length_ratio", "plan_paths_in_task"} <= set(failed)
    stopped(
        "short synthetic prompts in training, long ones in evaluation", "upweighted_dataset", failed,
        "prompt_length_ratio", "A behaviour trained at one length fails at the other",
    )  # fmt: skip


def test_one_role_is_stopped(curation):
    failed, raw = failures(curation, "v2")
    assert raw.rows["agents"] == raw.rows["rollouts"] == 6
    stopped(
        "trained on one role", "upweighted_dataset", failed, "role_balance",
        "A student trained on one role fails the other",
    )  # fmt: skip
    assert "prompt_length_ratio" not in failed


def test_a_second_agent_that_runs_a_command_first_is_stopped(curation):
    for version in ("v2_waits", "responder"):
        failed, _ = failures(curation, version)
        assert "plan_first" in failed["teacher_gate"] and "role_balance" not in failed
    scores = curation.lake.read(Ref("scored_rollouts", "rollout_set", "responder_pool"), "scores").to_pylist()
    assert {row["plan_first_reason"] for row in scores} == {"agent2: first action not send_message"}
    assert all(row["plan_content"] for row in scores), "it acknowledges with files of its task"


def test_files_of_a_fixed_list_are_stopped(curation):
    for version in ("v3", "v4"):
        failed, _ = failures(curation, version)
        assert set(failed) == {"plan_paths_in_task", "teacher_gate"}
        stopped(
            "plan paths of a fixed list, unrelated to the task", "upweighted_dataset", failed, "plan_paths_in_task",
            "names that have nothing to do with its task",
        )  # fmt: skip


def test_tasks_that_name_one_file_fall_back_by_name_and_are_stopped(curation, tmp_path):
    pool = make_pool(tmp_path / "bare")
    for path in pool.glob("*/*/*/feature.md"):
        path.write_text(path.read_text().replace("src/moor_2", "src/moor_1").split(" and its case")[0])
    (tmp_path / "bare" / "harbor_task" / "task7" / "feature2" / "feature.md").write_text("Add tie(rope) to moor.go.")
    curation.write("suites", "bare", f'extends = "pool"\n[params]\npath = "{pool}"\n')
    curation.make("tasks", "bare")
    failed, raw = failures(curation, "v5", suite="bare")
    assert raw.notes["fell_back"] == ["pier_task/7/f1_f2", "quay_task/7/f1_f2"]
    stopped(
        "fallback paths in the plans of tasks that name one file", "upweighted_dataset", failed, "plan_paths_in_task",
        "Plans name what the task does not",
    )  # fmt: skip


def test_the_templates_work_on_the_embedded_suite_too(curation):
    curation.write("suites", "tiny", 'extends = "coop_tiny_shared"\n[params]\ntrain = 6\nheldout = 24\n')
    curation.make("tasks", "tiny")
    failed, raw = failures(curation, "v5", suite="tiny")
    assert failed == {} and raw.notes["fell_back"] == []
    plans = {
        "v1": (24, 1, 0),
        "v2": (12, 0, 0),
        "v3": (24, 1, 0),
        "v4": (24, 1, 0),
        "v5": (24, 1, 1),
        "responder": (24, 0, 1),
    }
    for version, expected in plans.items():
        _, raw, scores = rehearsed(curation, version, "tiny")
        (plan_first,), (content,) = ({bool(row[metric]) for row in scores} for metric in ("plan_first", "plan_content"))
        assert (raw.rows["agents"], plan_first, content) == expected, version


def test_a_pool_of_stale_names_is_refused_name_by_name(curation):
    text = 'extends = "pool"\n[params]\npairs = ["quay_task/7/f1_f2", "quay/7/f1_f2", "quay_task/8/f1_f2"]\n'
    curation.write("suites", "stale", text)
    manifest = curation.make("tasks", "stale").manifest
    assert manifest.rows == {"tasks": 1, "quarantined": 2}
    failed = {check["name"]: check["message"] for check in manifest.failures}
    stopped("a list of tasks whose names are stale", "tasks", failed, "tasks_valid", "its list of names is stale")
    rows = pq.read_table(curation.lake.files_of(manifest, "quarantined")).to_pylist()
    assert {(row["source"], row["reason"]) for row in rows} == {
        ("quay/7/f1_f2", "missing_feature"), ("quay_task/8/f1_f2", "missing_feature")
    }  # fmt: skip


# --- beside our own figures ------------------------------------------------------------------------------------------


def test_leaderboard_has_published_figures_with_intervals_from_their_counts(tmp_path):
    lake = Lake(tmp_path / "lake")
    for name in ("tito_native_v4c", "tito_native_v1", "plan_first_tiny"):
        asset_definitions()["experiment_spec"].execute(name, Resources(lake=lake), lambda line: None)
    with duckdb.connect(str(catalog.build(lake, GRAPH.values())), read_only=True) as connection:
        rows = connection.sql("FROM leaderboard ORDER BY metric").fetchall()
        columns = [column[0] for column in connection.sql("FROM leaderboard").description]
    result = [dict(zip(columns, row, strict=True)) for row in rows]
    assert {(row["experiment"], row["checkpoint_role"]) for row in result} == {("tito_native_v4c", "published")}
    assert {row["metric"]: (row["value"], row["n"]) for row in result} == {
        "plan_first": (1.0, 2), "plan_content": (1.0, 2), "follow_through": (0.5, 4)
    }  # fmt: skip
    follow = next(row for row in result if row["metric"] == "follow_through")
    assert (follow["ci_low"], follow["ci_high"]) == pytest.approx(wilson(2, 4), abs=1e-5)


def test_report_shows_published_figures_beside_ours():
    result = spec("plan_first_v5_tf")
    experiment = html.ReportedExperiment("plan_first_v5_tf", result, {}, [])
    no_tables = facts.ReportTables(
        **{field.name: empty(TABLE_OF.get(field.name, field.name)) for field in fields(facts.ReportTables)}
    )
    unpublished = result.model_copy(update={"published": {}})
    page, _ = html.render(experiment, no_tables)
    assert (
        "Published elsewhere" in page and result.published["source"] in page and "3 of 4" in page and "75.0 %" in page
    )
    assert "Published elsewhere" not in html.render(replace(experiment, spec=unpublished), no_tables)[0]


# --- the page --------------------------------------------------------------------------------------------------------


def test_history_page_is_current():
    page = Path(__file__).parents[2] / "docs" / "reference" / "history.md"
    assert page.read_text() == history.page(SPECS), "make docs"
    assert all(f"`{name}`" in page.read_text() for name in (*TEMPLATED, *RETOKENISED, *NATIVE))


def test_published_runs_can_be_repeated_because_their_specs_accept_the_checks_that_stop_them():
    """`served_name` stops an evaluation of another adapter, which cannot happen here; the unprompted teacher trains
    nobody."""
    for name in (*TEMPLATED, *RETOKENISED, *NATIVE):
        answers = set(spec(name).published["answered_by"])
        assert set(spec(name).gates.override) == answers & set(OVERRIDABLE) - {"served_name"}, name
        assert all(reason.startswith("as published: ") for reason in spec(name).gates.override.values()), name


def test_spec_withdraws_an_override_of_the_one_it_extends():
    assert "prompt_length_ratio" in spec("plan_first_v1_fix2").gates.override
    assert "prompt_length_ratio" not in spec("plan_first_v2").gates.override
