"""Code versions: which asset partitions an edit of the project's own code changes, and which it must leave alone.

Each edit of `mutations.EDITS` is made in a copy of the packages. An edit is missed where a partition keeps its code
version although the edit can change its result; it is over-reported where the version changes and the result cannot.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from etpi_assets.graph import GRAPH
from etpi_assets.planning import planner
from etpi_assets.planning.versioning import codebase
from etpi_assets.planning.versioning import keys as versions
from etpi_assets.planning.versioning.choices import (
    CHOICES,
    INFRASTRUCTURE,
    Selection,
    is_infrastructure,
    narrowing,
    selection,
)
from etpi_assets.planning.versioning.codebase import CALLED_ELSEWHERE, PACKAGES, ROOT, Codebase, normal_text
from etpi_assets.planning.versioning.keys import PartitionCode
from etpi_assets.planning.versioning.moved import REWRITTEN, Moves
from etpi_assets.specs.load import Specs, load_specs
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.schemas import TABLES, empty, from_rows
from tests.support.graph import write_spec
from tests.support.mutations import EDITS, EXPERIMENTS, OWN, SAME, Edit

Partition = tuple[str, str]
MOST_OVER_REPORTED = 0.10
_REWRITTEN = "etpi_assets/planning/versioning/rewritten.toml"


@pytest.fixture(scope="module")
def specs(tmp_path_factory) -> Specs:
    folder = tmp_path_factory.mktemp("specs")
    for name, text in OWN.items():
        kind, _, spec = name.partition("/")
        write_spec(folder, kind, spec, text)
    return load_specs(folder)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The packages and sql/ in a folder of their own."""
    folder = tmp_path_factory.mktemp("copy")
    for name in (*PACKAGES, "sql"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def unchanged(copy) -> Codebase:
    return Codebase(copy)


@pytest.fixture(scope="module")
def before(specs, unchanged) -> dict[Partition, PartitionCode]:
    """The code of every asset partition that the table's experiments and suites rest on."""
    keys: dict[str, set[str]] = {"experiment": set(EXPERIMENTS), "rollout_set": set(), "suite": set()}
    for experiment in EXPERIMENTS:
        for kind in ("rollout_set", "suite"):
            keys[kind] |= set(specs.upstream_keys("experiment", experiment, kind))
    return {
        (node.name, key): versions.code_of(node, key, specs, unchanged)
        for node in GRAPH.values()
        if node.set != "all"
        for key in sorted(keys[node.set])
    }


def _with_changed(code: Codebase, file: str) -> Codebase:
    """Return a copy that reads one file (a path from the root) again and shares the other parsed files."""
    other = Codebase(code.root, code.packages, code.moves)
    other._paths, other._files = code._paths, {path: d for path, d in code._files.items() if path != file}
    if not file.endswith(".py"):
        other._sources, other._edges, other._methods = code._sources, code._edges, code._methods
        other._by_method = code._by_method
        return other
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    other._sources = {name: source for name, source in code._sources.items() if name != module}
    # The changed module may define or import other names, so references to it are resolved again.
    prefix = f"{module}:"
    other._edges = {
        target: edges
        for target, edges in code._edges.items()
        if not target.startswith(prefix) and not any(edge.startswith(prefix) for edge in edges)
    }
    return other


Changed = Callable[[str, Callable[[str], str]], set[Partition]]


@pytest.fixture
def changed(copy, unchanged, specs, before) -> Changed:
    """(file, edit of its text) -> the partitions whose code version the edit changes."""

    def partitions(file: str, edit: Callable[[str], str]) -> set[Partition]:
        path, module = copy / file, file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        text = path.read_text("utf-8")
        path.write_text(edit(text), "utf-8")
        try:
            code = _with_changed(unchanged, file)
            # A walk that reached nothing of the file has read nothing that the edit changes; rows of rewritten
            # definitions hide that it did.
            names = {*map(code.moves.original, (file, module))}
            hidden = any(target.startswith(f"{module}:") for target, _ in REWRITTEN)
            loaded = [p for p, was in before.items() if hidden or was.whole.definitions.keys() & names]
            now = {p: versions.code_of(GRAPH[p[0]], p[1], specs, code) for p in loaded}
        finally:
            path.write_text(text, "utf-8")
        return {p for p, code in now.items() if code.whole.digest != before[p].whole.digest}

    return partitions


@pytest.mark.slow
def test_no_edit_leaves_the_version_of_a_result_that_it_changes(changed, specs, before, capsys):
    missed, over, reported, right = [], [], 0, 0
    for edit in EDITS:
        assert (copies := (ROOT / edit.file).read_text("utf-8").count(edit.old)) == 1, (
            f"{edit.file} holds {edit.old!r} {copies} times; update tests/support/mutations.py"
        )
        result = changed(edit.file, lambda text, edit=edit: text.replace(edit.old, edit.new))
        ought = edit.partitions(specs, before)
        assert ought, f"{edit.what}: no partition of the table runs that code; add an experiment, or drop the edit"
        missed += [(edit.what, *p) for p in sorted(ought - result)]
        over += [(edit.what, *p) for p in sorted(result - ought)]
        reported += len(result)
        right += result == ought
    share = len(over) / reported
    with capsys.disabled():
        print(
            f"\n{len(EDITS)} edits: {right} exactly right; {len(missed)} partitions missed, "
            f"{len(over)} of {reported} over-reported ({share:.1%})"
        )
    assert len(EDITS) >= 65
    assert not missed
    assert share < MOST_OVER_REPORTED, "\n".join(map(str, over))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({choice.kind for choice in CHOICES}))
def test_an_edit_would_be_missed_if_the_choice_dropped_what_a_spec_selects(kind, unchanged, specs, before):
    # One partition of each edit, asset and option is enough.
    selections = {
        (edit, asset, chosen.get(kind)): chosen
        for edit in EDITS
        for asset, key in sorted(edit.partitions(specs, before))
        for chosen in [selection(GRAPH[asset], key, specs)]
    }
    assert any(
        options
        and _counts(edit, asset, chosen, unchanged)
        and not _counts(edit, asset, {**chosen, kind: frozenset()}, unchanged)
        for (edit, asset, options), chosen in selections.items()
    ), f"no edit of tests/support/mutations.py is in code that only the choice {kind!r} leads to: add one"


def _counts(edit: Edit, asset: str, chosen: Selection, code: Codebase) -> bool:
    """Return whether the definition that an edit changes is in the code of an asset under this selection."""
    module = edit.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    reached = code.reach([versions.function_of(asset)], narrowing(code, chosen)).definitions
    names = reached.get(code.moves.original(module if edit.file.endswith(".py") else edit.file), {})
    source = code.source(module)
    if source is None:
        return bool(names)
    line = (code.root / edit.file).read_text("utf-8").partition(edit.old)[0].count("\n") + 1
    heads = {name: source.definitions.get(name.partition(".")[0]) for name in names}
    today = [name for name, head in heads.items() if head and name.partition(".")[2] in ("", *head.methods)]
    known = [code.definition(f"{module}:{name}") for name in today]
    parts = [part for definition in known for part in (definition.shell or definition).parts]
    return any(part.lineno <= line <= (part.end_lineno or 0) for part in parts if isinstance(part, ast.stmt))


@pytest.mark.parametrize(("file", "old", "new"), SAME, ids=[f"{file}-{n}" for n, (file, _, _) in enumerate(SAME)])
def test_words_and_layout_change_no_version(changed, file, old, new):
    assert (ROOT / file).read_text("utf-8").count(old) == 1, f"{file} no longer holds {old!r}; update mutations.SAME"
    assert changed(file, lambda text: text.replace(old, new)) == set()


@pytest.mark.parametrize(
    "file", ["etpi_assets/curation/merge.py", "etpi_assets/agent/bash.py", "etpi_assets/tasks/table.py"]
)
def test_rewriting_a_whole_file_without_its_comments_changes_no_version(changed, file):
    assert changed(file, lambda text: ast.unparse(ast.parse(text))) == set()


def test_sql_without_comments_and_layout_is_the_same_text():
    assert normal_text("a.sql", "select 1, -- one\n       '--' as two\n") == normal_text(
        "a.sql", "select 1, '--' as two"
    )
    assert normal_text("a.sql", "select 1") != normal_text("a.sql", "select 2")


def test_planner_names_the_edited_function(copy, unchanged, specs, tmp_path, monkeypatch):
    edit, lake, node = EDITS[1], Lake(tmp_path), GRAPH["tasks"]
    monkeypatch.setattr(versions, "CODE", unchanged)
    monkeypatch.setattr(versions, "_store", versions._store.__wrapped__)  # of the code of the moment
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("suite_spec", "tasks"):
        created, key = GRAPH[name], "repo_fix_tiny"
        code = versions.code_of(created, key, specs)
        lake.publish(
            Ref(name, "suite", key),
            {table: empty(table) for table in created.tables},
            input_key=planner.wanted(created, key, specs, lake).input_key,
            inputs={},
            spec_hash=specs.section_hash("suite", key, created.sections),
            code=code.to_json(),
        )
        lake.store_code(code.whole.digest, code.whole.definitions)
    assert {step.state for step in planner.chain("suite", "repo_fix_tiny", specs, lake)} == {"ok"}
    path, text = copy / edit.file, (copy / edit.file).read_text("utf-8")
    path.write_text(text.replace(edit.old, edit.new), "utf-8")
    try:
        monkeypatch.setattr(versions, "CODE", _with_changed(unchanged, edit.file))
        steps = {step.asset: step for step in planner.chain("suite", "repo_fix_tiny", specs, lake)}
    finally:
        path.write_text(text, "utf-8")
    assert (steps["suite_spec"].state, steps[node.name].state) == ("ok", "code")
    assert "etpi_assets/worlds/repo_fix_tiny/judge.py (compare)" in steps[node.name].reason


@pytest.mark.parametrize(
    ("old", "new", "stale"),
    [
        (
            "max_rollouts: int | None = None",
            "max_rollouts: int | None = 9",
            {"selected_trajectories"},
        ),
        ("min_parse: float = 0.8", "min_parse: float = 0.7", {"serving_probe"}),
        ('license: str = "apache-2.0"', 'license: str = "mit"', set()),
        ("Floor of tool calls trained on in one epoch", "Least calls of an epoch", None),
    ],
    ids=["select", "probe", "card", "description"],
)
def test_defaults_of_a_spec_make_stale_what_reads_them(copy, specs, old, new, stale):
    path = copy / "etpi_assets/specs/experiment.py"
    text = path.read_text("utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), "utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _HASHES], cwd=copy,
            # Bytecode of the edit before would serve this one too, if both have the same size and second.
            env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    finally:
        path.write_text(text, "utf-8")
    now = json.loads(done.stdout)
    assert now.pop("file").startswith(str(copy))
    nodes = [node for node in GRAPH.values() if node.set == "experiment"]
    hashes = {node.name: specs.section_hash("experiment", "running_sum_tiny", node.sections) for node in nodes}
    result = {name for name, value in hashes.items() if now[name] != value}
    printed = {"experiment_spec", "experiment_report", "model_card"}  # they have the whole spec
    assert result == (set() if stale is None else stale | printed)


_HASHES = """
import json, etpi_assets.specs.load as load
from etpi_assets.graph import GRAPH
specs = load.load_specs()
nodes = [node for node in GRAPH.values() if node.set == "experiment"]
found = {node.name: specs.section_hash("experiment", "running_sum_tiny", node.sections) for node in nodes}
print(json.dumps({"file": load.__file__, **found}))
"""


# --- completeness ----------------------------------------------------------------------------------------------------

PROGRAMS = {
    "etpi_assets.planning": "plans, computes versions, explains and accepts them",
    "etpi_assets.orchestration": "etpi as Dagster sees it",
    "etpi_assets.checks": "describes checks for the web page and the reference",
    "etpi_assets.definitions": "hands Dagster the assets",
    "etpi_assets.exports": "writes data for other programs; no asset holds it",
    "etpi_resources.chat.bounds": "refuses templates before a run; those that it passes render the same",
    "etpi_resources.chat.report": "etpi model: shows what a chat template does",
    "etpi_assets.tasks.judged_rows": "a family for plugins, reached where a spec selects one",
    "etpi_assets.specs": "models of specs count through the resolved spec, their methods where they are called",
    "etpi_resources.trainers.workers.ranks": "starts a worker's ranks, for the trainers' pipes",
}
"""Modules that no asset runs, each with why that cannot hide a change; submodules included."""

DATA = {
    "etpi_assets/checks.toml": "describes checks for the web page and the reference",
    _REWRITTEN: "digests that code versions contain, which moved.py applies",
    "etpi_resources/lake/tables.toml": "columns are in the code version of an asset that stores them",
    "etpi_resources/sandboxes/downloads/requirements.txt": "make mitmproxy",
    "etpi_assets/tiny_bases/": "shipped checkpoints, which their content names",
    "sql/checks/": "questions that people ask the catalog",
    "sql/pages/": "etpi view",
    "sql/reports/": "questions that people ask the catalog",
    "sql/views/": "the catalog, which is made anew each time",
}
"""Data files that no asset reads."""


@pytest.fixture(scope="module")
def everything() -> dict[str, set[str]]:
    """Module or data file (today's name) -> the definitions that some asset reaches, whatever a spec selects."""
    result: dict[str, set[str]] = {}
    code = Codebase(moves=Moves({}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codebase, "REWRITTEN", {})
        for name in GRAPH:
            reached = code.reach([versions.function_of(name)], narrowing(code, {}))
            for module, names in reached.definitions.items():
                result.setdefault(module, set()).update(names)
    return result


def _explained(name: str, reasons: Collection[str]) -> bool:
    return any(
        name == reason or name.startswith((f"{reason}.", reason if reason.endswith("/") else "\0"))
        for reason in reasons
    )


def test_every_module_is_reached_or_explained(everything):
    empty = {
        m
        for m in versions.CODE.modules
        if (s := versions.CODE.source(m)) and not any(d.digest for d in s.definitions.values())
    }
    left = {m for m in versions.CODE.modules if not is_infrastructure(m)} - everything.keys() - empty
    assert {m for m in left if not _explained(m, PROGRAMS)} == set(), "unreached; see etpi_assets/planning/versioning"
    assert {name for name in PROGRAMS if not any(_explained(m, [name]) for m in left)} == set(), "these are reached now"


def test_every_data_file_is_reached_or_explained(everything):
    assert {p for p in versions.CODE.data if p not in everything and not _explained(p, DATA)} == set()


_CODE_VERSIONS = "tests/planning/test_code_versions.py"
_EDITS = f"{_CODE_VERSIONS}::test_no_edit_leaves_the_version_of_a_result_that_it_changes"
_PLANNER = "tests/graph/test_planner.py"

LEFT_OUT = {
    "etpi_assets.asset": (
        "locks, the skip rule and publishing",
        f"{_CODE_VERSIONS}::test_published_bytes_are_the_same_as_ever",
    ),
    "etpi_assets.graph": (
        "edges and spec sections are in the key themselves",
        f"{_PLANNER}::test_staleness_propagates_through_the_chain",
    ),
    "etpi_assets.planning.planner": ("decides what runs", f"{_PLANNER}::test_unchanged_result_upstream_stales_nothing"),
    "etpi_assets.resources": ("hands out the sandboxes and servers that the spec selects", _EDITS),
    "etpi_assets.rollouts.executors": (
        "where rollouts run",
        "tests/cluster/test_fan_out.py::test_rollout_set_over_nodes_resumes_after_a_kill_and_equals_threads",
    ),
    "etpi_assets.specs.load": (
        "reads specs; the resolved spec is in the key",
        f"{_CODE_VERSIONS}::test_defaults_of_a_spec_make_stale_what_reads_them",
    ),
    "etpi_assets.specs.paths": (
        "expands paths; the files' fingerprint is in the key",
        f"{_PLANNER}::test_files_that_a_spec_names_are_inputs",
    ),
    "etpi_assets.training.curves": (
        "plots for the asset's page",
        f"{_PLANNER}::test_metadata_of_the_page_are_in_no_version",
    ),
    "etpi_assets.planning.versioning.keys": ("computes the key", _EDITS),
    "etpi_resources.backend": (
        "where work runs",
        "tests/cluster/test_fan_out.py::test_rollout_set_over_nodes_resumes_after_a_kill_and_equals_threads",
    ),
    "etpi_resources.sandboxes.downloads": (
        "hands recorded responses on as they came",
        "tests/sandboxes/test_downloads_proxy.py::test_what_was_fetched_once_is_answered_without_the_index",
    ),
    "etpi_resources.lake": (
        "stores and reads tables as they are",
        f"{_CODE_VERSIONS}::test_published_bytes_are_the_same_as_ever",
    ),
    "etpi_resources.process": (
        "affects timing only",
        "tests/process/test_pool.py::test_results_come_in_order_whatever_the_number_of_workers",
    ),
    "etpi_resources.trainers.pipes": (
        "starts a worker and reads its report",
        "tests/trainers/test_pipes.py::test_result_and_lines_come_back_and_stay_in_the_folder",
    ),
    "etpi_resources.trainers.workers.device": (
        "names the device and the libraries in the report, and has the device repeat",
        "tests/training/test_repeatable.py::test_two_short_runs_are_equal_to_the_digit",
    ),
    "etpi_resources.trainers.workers.reporting": (
        "hands a worker its configuration and takes its report",
        "tests/trainers/test_pipes.py::test_result_and_lines_come_back_and_stay_in_the_folder",
    ),
}
"""`INFRASTRUCTURE`: (why an edit cannot change a table's content, the test of it)."""


def test_infrastructure_names_modules_with_reasons():
    assert {m for m in INFRASTRUCTURE if versions.CODE.path(m) is None} == set()
    assert LEFT_OUT.keys() == set(INFRASTRUCTURE) and all(reason for reason, _ in LEFT_OUT.values())


def test_every_claim_of_the_tables_has_its_test():
    named = {test for _, test in LEFT_OUT.values()}
    split = [(test, *test.split("::")) for test in sorted(named)]
    missing = [test for test, file, name in split if f"def {name}(" not in (ROOT / file).read_text("utf-8")]
    assert missing == []


def _digest(target: str) -> str:
    """Return the digest that code versions have of a definition; of a class, without its methods."""
    definition = versions.CODE.definition(target)
    shell = definition.shell if versions.CODE.by_method(target) else None
    return (shell or definition).digest


def test_rewritten_definitions_are_those_of_today():
    names = {target: target.partition(":") for target, _ in REWRITTEN}
    today = {target: f"{versions.CODE.moves.today(module)}:{name}" for target, (module, _, name) in names.items()}
    digests = {(target, _digest(name)) for target, name in today.items()}
    assert digests == REWRITTEN.keys(), "edited since: remove its row, or prove again that it returns the same"


def test_every_rewritten_definition_has_the_test_that_proves_its_row():
    proofs = tomllib.loads((ROOT / _REWRITTEN).read_text("utf-8"))["proofs"]

    def place(name: str) -> str:
        parts = name.partition(":")[0].split(".")
        places = [name, *(".".join(parts[:n]) for n in range(len(parts), 0, -1))]
        return next((place for place in places if place in proofs), f"no test for {name}")

    used = {place(name) for name, _ in REWRITTEN}
    assert used == proofs.keys()
    split = [(test, *test.split("::")) for test in proofs.values()]
    assert [t for t, file, name in split if f"def {name}(" not in (ROOT / file).read_text("utf-8")] == []


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.kind)
def test_a_choice_loses_nothing_and_its_places_exist(choice):
    options, code = choice.options(versions.CODE), versions.CODE
    for place in choice.at:
        target = f"{place}*" if place.endswith(":") else place
        assert ":" not in place or code.exists(target) or code.definition(place).digest, (
            f"{place} was renamed; the choice {choice.kind!r} narrows nothing"
        )
    lost = {t for targets in options.values() for t in targets if not t.endswith(":") and not code.exists(t)}
    assert options and lost == set()


def test_every_method_of_a_reached_class_is_called_by_name_or_known_to_be_unused(everything):
    unused = set()
    for module, names in everything.items():
        source = versions.CODE.source(module)
        # A class of nothing but methods is reached through them alone.
        for name in {name.partition(".")[0] for name in names} & (source.definitions.keys() if source else set()):
            if versions.CODE.by_method(f"{module}:{name}"):
                unused |= {f"{name}.{m}" for m in versions.CODE.definition(f"{module}:{name}").methods} - names
    fingerprints = {f"{name}.fingerprint" for name in ("_RemotePolicy", "PolicyServers", "_InStep")}
    assert unused == {"Weights.change", *fingerprints}, (
        "nothing names these methods: unused, or called by another package (then: codebase.CALLED_ELSEWHERE)"
    )
    assert all(versions.CODE.exists(name) for name in CALLED_ELSEWHERE)


# --- the infrastructure's own results --------------------------------------------------------------------------------

PINNED = {
    "leaderboard": ("2c75d7fabae78a72", "3f6829dfd8364803"),
    "raw_rollouts": ("a2eee4616c34a81a", "021ea2012f2f2da7"),
    "upweighted_dataset": ("0db0cc7bb2e45559", "85fa9a8f9988677e"),
}
"""Asset -> (the version, 16 hex digits of the sha256 of its first table's file)."""


@pytest.mark.parametrize("asset", ["leaderboard", "raw_rollouts", "upweighted_dataset"])
def test_published_bytes_are_the_same_as_ever(asset, tmp_path):
    lake, node = Lake(tmp_path), GRAPH[asset]
    tables = {name: _filled(name) if i == 0 else empty(name) for i, name in enumerate(node.tables)}
    manifest = lake.publish(Ref(asset, node.set, "k"), tables, input_key="k", inputs={}, spec_hash="s")
    result = hashlib.sha256(b"".join(path.read_bytes() for path in lake.files_of(manifest, node.tables[0]))).hexdigest()
    assert (manifest.version, result[:16]) == PINNED[asset], (
        "INFRASTRUCTURE leaves out the modules that write tables because their bytes are pinned here: another literal "
        "means that every version in every lake changes, unless the table's columns did"
    )


def _filled(table: str) -> pa.Table:
    """Two rows: a value of each kind, lists included, and another."""

    def value(kind: pa.DataType, number: int) -> Any:
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return [value(kind.value_type, number), value(kind.value_type, number + 1)]
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return f"text {number}"
        if pa.types.is_timestamp(kind):
            return datetime(2026, 1, 1 + number, tzinfo=UTC)
        return bool(number) if pa.types.is_boolean(kind) else number + 0.5 if pa.types.is_floating(kind) else number

    columns = [(name, kind) for name, kind, _ in TABLES[table].columns]
    return from_rows(table, [{name: value(kind, n) for name, kind in columns} for n in (0, 1)])
