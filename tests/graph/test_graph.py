"""The graph: names, sets and edges as the design has them, and that Dagster's view of it is the same."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import dagster as dg

from etpi.cli import etpi
from etpi_assets.checks import CHECKS
from etpi_assets.graph import GRAPH, JOBS
from etpi_assets.planning.versions import asset_version
from etpi_assets.specs.load import load_specs
from etpi_resources.lake.schemas import TABLES

SNAPSHOT = Path(__file__).parent / "graph_snapshot.json"
SETS = {"suite", "rollout_set", "experiment"}


def _definitions() -> dg.Definitions:
    from etpi_assets.definitions import build_defs

    return build_defs(load_specs())


def test_graph_is_well_formed():
    seen: set[str] = set()
    for node in GRAPH.values():
        assert set(node.upstream) <= seen, f"{node.name} stands before what it reads"
        assert set(node.tables) <= set(TABLES)
        assert len(node.kinds) <= 3
        assert asset_version(node), node.name
        seen.add(node.name)


def test_no_edge_leads_from_an_experiment_back():
    rank = {"suite": 0, "rollout_set": 1, "experiment": 2, "all": 3}
    for node in GRAPH.values():
        assert all(rank[GRAPH[name].set] <= rank[node.set] for name in node.upstream), node.name


def test_jobs_span_one_set_and_end_with_the_catalog():
    for name, (set_name, assets) in JOBS.items():
        assert {GRAPH[a].set for a in assets} <= {set_name, "all"}, name
        assert assets[-1] == "catalog"
    covered = {a for _, assets in JOBS.values() for a in assets}
    assert covered == set(GRAPH)
    assert set(JOBS["run_experiment"][1]) >= {n for n, node in GRAPH.items() if node.set == "experiment"}


def test_dagster_has_the_graph_of_the_snapshot():
    """A change of the graph is seen in review."""
    graph = _definitions().resolve_asset_graph()
    outcome = {}
    for key in sorted(graph.get_all_asset_keys()):
        node = graph.get(key)
        partitions = getattr(node.partitions_def, "set_name", None)
        outcome[key.to_user_string()] = {
            "group": node.group_name,
            "partitions": partitions,
            "upstream": sorted(parent.to_user_string() for parent in node.parent_keys),
        }
    if not SNAPSHOT.exists():
        SNAPSHOT.write_text(json.dumps(outcome, indent=1) + "\n")
    assert outcome == json.loads(SNAPSHOT.read_text()), f"rm {SNAPSHOT}, run this test, and commit the new file"


def test_checks_block_in_dagster_as_declared():
    graph = _definitions().resolve_asset_graph()
    declared = {(asset, name): info.blocking for asset, infos in CHECKS.items() for name, info in infos.items()}
    specs = [graph.get_check_spec(key) for name in GRAPH for key in graph.get(dg.AssetKey(name)).check_keys]
    assert {(spec.asset_key.to_user_string(), spec.name): spec.blocking for spec in specs} == declared
    assert not all(declared.values())


def test_every_asset_page_has_a_description():
    graph = _definitions().resolve_asset_graph()
    for name, node in GRAPH.items():
        asset = graph.get(dg.AssetKey(name))
        assert node.summary in (asset.description or "")
        assert asset.owners and asset.kinds and asset.code_version
        assert (asset.partitions_def is None) == (node.set == "all")
        if node.tables:
            schema = asset.metadata["dagster/column_schema"]
            assert [c.name for c in schema.columns] == [c[0] for c in TABLES[node.tables[0]].columns]
            assert all(column.description for column in schema.columns)


def test_every_check_and_job_of_the_page_has_a_description():
    repository = _definitions().get_repository_def()
    graph = repository.asset_graph
    described = {key: graph.get(key).description or "" for key in graph.asset_check_keys}
    assert described
    for key, text in described.items():
        catches, _, remedy = text.partition(" Remedy: ")
        assert catches.strip() and remedy.strip(), key
        for line in re.findall(r"`etpi ([^`]+)`", text):
            command, *arguments = shlex.split(line)
            # Raises on an unknown option.
            etpi.commands[command].make_context(command, arguments, **etpi.context_settings)
    jobs = [job for job in repository.get_all_jobs() if not job.name.startswith("__")]
    assert [job.name for job in jobs if not job.description] == []


def test_column_descriptions_name_nothing_outside_the_page():
    for name, table in TABLES.items():
        for column, _, description in table.columns:
            assert ".py" not in description and "etpi_" not in description, f"{name}.{column}"


def test_partition_mappings_follow_the_specs():
    specs = load_specs()
    graph = _definitions().resolve_asset_graph()
    for experiment, spec in specs.experiments.items():
        context = dg.AssetKey("selected_trajectories"), dg.AssetKey("scored_rollouts")
        mapping = graph.get_partition_mapping(*context)
        child, parent = (graph.get(key).partitions_def for key in context)
        result = mapping.get_upstream_mapped_partitions_result_for_partitions(
            child.empty_subset().with_partition_keys([experiment]), child, parent
        )
        assert set(result.partitions_subset.get_partition_keys()) == set(spec.rollout_sets)


def test_import_brings_no_torch():
    """Every process of Dagster imports the definitions, so they must not load what only training and engines need."""
    code = (
        "import sys; import etpi_assets.definitions; "
        "print([m for m in ('torch', 'transformers', 'trl', 'datasets', 'selenium') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
