"""Lakes of earlier commits and releases: this etpi verifies, plans, cleans and extends them; newer ones it refuses."""

from __future__ import annotations

import json
import shutil
import tarfile
from datetime import timedelta
from pathlib import Path

import pytest

from etpi_assets.asset import asset_definitions
from etpi_assets.graph import GRAPH
from etpi_assets.planning.planner import ALL, plan
from etpi_assets.planning.versions import COMPONENTS
from etpi_assets.resources import Resources
from etpi_assets.specs.load import load_specs
from etpi_resources.lake import catalog, formats
from etpi_resources.lake.audit import audit
from etpi_resources.lake.lake import Lake, LakeError, Ref
from etpi_resources.lake.manifest import SCHEMA_VERSION, Manifest, NewerFormat
from etpi_resources.lake.removal import plan_garbage
from tests.support import small_lake

LAKES = Path(__file__).parents[1] / "fixtures" / "lakes"
ARCHIVES = sorted(LAKES.glob("*.tar.xz"))
KEYS = {"suite": "release_suite", "rollout_set": "release_set", "experiment": "release_experiment"}
GROUPS = ("specs", "sources", "rollouts", "curation")
CHAIN = {
    name: definition
    for name, definition in asset_definitions().items()
    if definition.node.group in GROUPS and name != "base_checkpoint"
}


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def root(request, tmp_path_factory) -> Path:
    """The folder of one of the lakes."""
    folder = tmp_path_factory.mktemp("release") / "data"
    with tarfile.open(request.param) as archive:
        # Python 3.11.0 to 3.11.3 have no filters; the archives are this repository's own.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    return folder


def test_it_verifies_and_every_view_can_be_read(root: Path) -> None:
    lake = Lake(root)
    assert audit(lake, deep=True).damages == [] and audit(lake).counts["pointer"] > 10
    with catalog.connect(catalog.build(lake, GRAPH.values(), root.parent / "etpi.duckdb")) as connection:
        views = connection.sql("SELECT view_name FROM duckdb_views() WHERE NOT internal AND schema_name = 'main'")
        for (view,) in views.fetchall():
            connection.sql(f"SELECT * FROM {view}").fetchall()
        traced = "SELECT count(*), count(DISTINCT rollout_id), min(experiment) FROM lineage"
        count, rollouts, experiment = connection.sql(traced).fetchall()[0]
        # Of six rollouts, those of one repository are held out of training.
        assert (rollouts, experiment) == (5, "release_experiment") and count > 40
        assert connection.sql("SELECT count(*) FROM turns WHERE output_ids IS NOT NULL").fetchall()[0][0] == 66


def _of_0_2(root: Path) -> bool:
    marker = root / formats.MARKER
    return marker.exists() and json.loads(marker.read_text())["etpi"].startswith("0.2")


def test_the_planner_says_what_changed(root: Path) -> None:
    steps = {step.asset: step for step in plan("release_experiment", load_specs(LAKES / "specs"), Lake(root))}
    assert steps["eval_rollouts"].state == "missing"
    states = {"ok", "outdated"} if _of_0_2(root) else {"ok", "outdated", "stale", "waiting"}
    assert {steps[name].state for name in CHAIN} <= states
    for step in steps.values():
        if step.asset in CHAIN and step.state == "outdated" and _of_0_2(root):
            component, number = step.reason.split(": ")[0].split()
            assert step.reason.startswith(f"{component} {number}: {COMPONENTS[component][int(number)]}")
    assert steps["raw_rollouts"].state != "missing"


def test_a_key_that_is_new_changes_the_spec_once_it_is_written(root: Path, tmp_path: Path) -> None:
    """Its default, which differs from what the release did, is a change of code."""
    shutil.copytree(LAKES / "specs", tmp_path / "specs")
    written = tmp_path / "specs" / "experiments" / "release_experiment.toml"
    written.write_text(written.read_text().replace("[select]", '[select]\nexit = ["submitted"]'))
    steps = {step.asset: step for step in plan("release_experiment", load_specs(tmp_path / "specs"), Lake(root))}
    selected = steps["selected_trajectories"]
    assert not _of_0_2(root) or (selected.state == "stale" and "select.exit" in selected.reason)


def test_no_garbage_is_seen_in_it(root: Path) -> None:
    assert "past version" not in {part.reason for part in plan_garbage(Lake(root), timedelta(0))}


@pytest.mark.slow
def test_runs_continue_in_it(root: Path) -> None:
    lake = Lake(root)
    resources = Resources(lake=lake, specs_folder=LAKES / "specs")
    dataset = Ref("upweighted_dataset", "experiment", "release_experiment")
    before = lake.history(dataset)
    for name, definition in CHAIN.items():
        outcome = definition.execute(KEYS[GRAPH[name].set], resources, log=lambda line: None, rebuild=frozenset([ALL]))
        assert not outcome.manifest.blocked, outcome.manifest.failures
    assert len(lake.history(dataset)) >= len(before) and audit(lake, deep=True).damages == []
    steps = {step.asset: step for step in plan("release_experiment", load_specs(LAKES / "specs"), lake)}
    assert {steps[name].state for name in CHAIN} == {"ok"}


# --- formats ---------------------------------------------------------------------------------------------------------


def test_the_first_publication_marks_the_lake(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "data")
    assert not (lake.root / formats.MARKER).exists()
    small_lake.put(lake, "tasks", "coop", {})
    assert json.loads((lake.root / formats.MARKER).read_text())["format"] == SCHEMA_VERSION


def test_a_lake_of_a_newer_etpi_is_refused_with_both_versions(tmp_path: Path) -> None:
    (tmp_path / formats.MARKER).write_text('{"format": 7, "etpi": "3.1.0"}')
    with pytest.raises(NewerFormat, match=r"etpi 3\.1\.0 .* 7; .*etpi 3\.1\.0"):
        Lake(tmp_path)


def test_a_manifest_of_a_newer_format_is_refused_and_a_new_field_is_not(tmp_path: Path) -> None:
    made = small_lake.put(Lake(tmp_path), "tasks", "coop", {})
    assert Manifest.from_json(made.to_json() | {"later": 1}) == made
    with pytest.raises(NewerFormat, match="format 9"):
        Manifest.from_json(made.to_json() | {"schema_version": 9})


def test_a_damaged_marker_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / formats.MARKER).write_text("{")
    with pytest.raises(LakeError, match=r"lake\.json "):
        Lake(tmp_path)
