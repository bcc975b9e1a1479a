"""Declarations of assets: faults of edges, tables, sections and checks are found when the graph loads."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from etpi_assets import asset as asset_module
from etpi_assets.asset import AssetRun, Input, Produced, asset
from etpi_assets.checks import CHECKS, faulty, judged, outcome
from etpi_assets.graph import GRAPH, STAGES, Graph, GraphError
from etpi_assets.trajectories.rollout_checks import merged
from etpi_resources.lake.lake import LakeError
from tests.support.graph import World


@pytest.fixture
def graph(monkeypatch) -> Graph:
    """An empty graph, which `@asset` fills."""
    graph = Graph()
    monkeypatch.setattr(asset_module, "GRAPH", graph)
    monkeypatch.setattr(asset_module, "_DEFINITIONS", {})
    return graph


def _suite_asset(function, **changed: Any):
    return asset(**{"set": "suite", "group": "sources", "summary": "A test.", "tables": ("tasks",), **changed})(
        function
    )


def tasks(run: AssetRun) -> Produced:
    raise NotImplementedError


def raw_rollouts(run: AssetRun, tasks: Input) -> Produced:
    raise NotImplementedError


def test_parameters_are_the_edges_in_their_order(graph):
    def scored_rollouts(run: AssetRun, raw_rollouts: Input, tasks: Input) -> Produced:
        raise NotImplementedError

    _suite_asset(scored_rollouts)
    _suite_asset(raw_rollouts)
    assert _suite_asset(tasks).node is graph["tasks"]
    assert list(graph) == ["tasks", "raw_rollouts", "scored_rollouts"]
    assert graph["scored_rollouts"].upstream == ("raw_rollouts", "tasks")


@pytest.mark.parametrize(
    ("changed", "fault", "right"),
    [
        ({"tables": ("task",)}, "table 'task'", "'tasks'"),
        ({"sections": ("famly",)}, "'famly'", "'family'"),
        ({"sections": ("path.x",)}, "'path.x'", "'"),
        ({"set": "experiment", "sections": ("evaluate.suit",)}, "'evaluate.suit'", "'evaluate.suite'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_right_one(graph, changed, fault, right):
    with pytest.raises(GraphError) as error:
        _suite_asset(tasks, **changed)
    assert all(part in str(error.value) for part in ("tasks ", fault, right)), error.value


def test_checks_of_an_unknown_asset_are_refused_with_the_nearest_right_one(monkeypatch):
    monkeypatch.setattr(asset_module, "CHECKS", {**CHECKS, "tito_pair": {}})
    with pytest.raises(GraphError, match=r"checks\.toml .*'tito_pair'.*'tito_pairs'"):
        asset_module.asset_definitions()


def test_a_misspelt_check_is_refused_with_the_nearest_right_one():
    with pytest.raises(KeyError, match=r"'tasks_acounted'.*'tasks_accounted'"):
        outcome("tasks_acounted", True)


def test_faulty_rows_of_all_blocks_are_counted_and_the_first_are_named():
    blocks = [{"pairs": 4, "leaks": faulty([(f"{name}{n}", "words") for n in range(2)])} for name in "ab"]
    leaking = judged("no_steering_leak", merged(blocks))
    assert not leaking.passed and leaking.figures == {"pairs": 8, "leaks": 4} and "first a0:" in leaking.message
    assert judged("no_steering_leak", {"pairs": 4, "leaks": faulty([])}).passed


@pytest.mark.parametrize(("calling", "unanswered", "verdict"), [(0, 0, None), (3, 0, True), (3, 1, False)])
def test_check_without_a_case_decides_nothing(calling, unanswered, verdict):
    rows = judged("calls_answered", {"calling": calling, "unanswered": faulty(["r/a"] * unanswered)})
    assert (rows.passed if rows.applicable else None) is verdict


def test_further_condition_fails_a_check_without_faulty_rows():
    counted = {"label_tokens": 5, "row_tokens": 5, "weighted_tokens": 5.0, "sequences": 1, "rows": 1}
    assert [judged("label_tokens", counted | {"wrong": faulty([])}, holds=h).passed for h in (True, False)] == [
        True,
        False,
    ]


@pytest.mark.parametrize(("quoting", "said"), [(2, True), (0, False)])
def test_words_of_a_figure_are_left_out_where_it_is_0(quoting, said):
    counted = {"pairs": 4, "prompt_tails": {}, "tokenizer": "t", "quoting_tags": quoting}
    assert ("quote think tags" in judged("no_think_in_output", counted, tails="none").message) is said


def test_checks_that_share_a_table_keep_their_own_values():
    name, root = (CHECKS["serving_probe"][probe] for probe in ("served_name", "served_root"))
    assert name.says["fails"] == root.says["fails"] and name.says["idle"] != root.says["idle"]
    assert name.hints != root.hints and name.catches != root.catches
    assert CHECKS["rl_checkpoint"]["adapter_not_zero"] == CHECKS["sft_checkpoint"]["adapter_not_zero"]


def test_checks_that_the_stages_name_are_those_of_the_table():
    """A misspelt name in a function would fail only when that function runs."""
    calls = re.compile(r'\b(?:outcome|measured|judged|CheckOutcome|CheckOutcome\.not_applicable|_counts)\(\s*"(\w+)"')
    sources = [path.read_text("utf-8") for path in Path(asset_module.__file__).parent.rglob("*.py")]
    named = {name for text in sources for name in calls.findall(text)}
    described = {name for asset, checks in CHECKS.items() for name in checks}
    assert named <= described and len(named) > 40


def test_keys_below_a_dictionary_of_a_spec_are_free(graph):
    _suite_asset(tasks, sections=("params.anything",))


def test_an_unknown_input_is_refused_with_the_nearest_right_one(graph):
    def raw_rollouts(run: AssetRun, task: Input) -> Produced:
        raise NotImplementedError

    _suite_asset(tasks)
    _suite_asset(raw_rollouts)
    with pytest.raises(GraphError, match=r"raw_rollouts .*'task'.*'tasks'"):
        list(graph)


def test_assets_in_a_cycle_are_refused(graph):
    def tasks(run: AssetRun, raw_rollouts: Input) -> Produced:
        raise NotImplementedError

    _suite_asset(tasks)
    _suite_asset(raw_rollouts)
    with pytest.raises(GraphError, match="tasks .*raw_rollouts; raw_rollouts .*tasks"):
        list(graph)


def test_an_asset_declared_twice_is_refused(graph):
    _suite_asset(tasks)
    with pytest.raises(GraphError, match="asset tasks "):
        _suite_asset(tasks)


def test_an_edge_from_an_experiment_back_to_a_suite_is_refused(graph):
    _suite_asset(tasks, set="experiment")
    _suite_asset(raw_rollouts)
    with pytest.raises(GraphError, match="raw_rollouts,.* suite,.* tasks,.* experiment"):
        list(graph)


def test_an_input_has_no_other_tables_than_its_asset(tmp_path):
    world = World(tmp_path)
    for name, key in (
        ("suite_spec", "small"),
        ("tasks", "small"),
        ("rollout_set_spec", "few"),
        ("raw_rollouts", "few"),
    ):
        world.make(name, key)
    run = AssetRun(GRAPH["scored_rollouts"], "few", world.resources())
    assert Input(run, "raw_rollouts").read("turns").num_rows == 1
    with pytest.raises(LakeError, match=r"scored_rollouts .*'turn'.*raw_rollouts.*'turns'"):
        Input(run, "raw_rollouts").read("turn")


def test_every_table_that_a_stage_reads_is_declared():
    """The parameters of type Input are named after their assets, in helpers too, so the calls can be checked here."""
    calls = [call for stage in STAGES for call in _reads(import_module(f"etpi_assets.{stage}.assets"))]
    assert len(calls) > 50
    wrong = [(where, a, t) for where, a, t in calls if a not in GRAPH or (t and t not in GRAPH[a].tables)]
    assert wrong == []


def _reads(module) -> list[tuple[str, str, str | None]]:
    """(function, asset, table) of every `INPUT.read("table")` or `stored`, and `run.read("asset", "table")`."""
    calls = []
    for function in [n for n in ast.parse(inspect.getsource(module)).body if isinstance(n, ast.FunctionDef)]:
        inputs = {
            a.arg for a in function.args.args if isinstance(a.annotation, ast.Name) and a.annotation.id == "Input"
        }
        calls += [(function.name, name, None) for name in inputs]
        for call in [n for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]:
            on, names = call.func.value, [a.value for a in call.args if isinstance(a, ast.Constant)]
            if not isinstance(on, ast.Name) or call.func.attr not in ("read", "stored"):
                continue
            if on.id in inputs and names:
                calls.append((function.name, on.id, names[0]))
            elif on.id == "run" and len(names) == 2:
                calls.append((function.name, *names))
    return calls


def test_stored_nodes_are_those_that_the_stages_declare():
    assert list(dict(GRAPH).items()) == list(GRAPH.load().items())


def test_the_graph_loads_without_torch_and_without_dagster():
    code = (
        "import sys; from etpi_assets.graph import GRAPH; assert len(GRAPH.load()) > 15; "
        "print([m for m in ('torch', 'transformers', 'trl', 'dagster') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_order_of_assets_is_that_of_the_stages_whatever_was_imported_first():
    code = (
        "import etpi_assets.tasks.assets; from etpi_assets.graph import GRAPH, STAGES; "
        "print([STAGES.index(node.module.split('.')[1]) for node in GRAPH.load().values()])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    places = ast.literal_eval(done.stdout)
    assert places == sorted(places)
