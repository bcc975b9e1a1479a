"""Runs that different commands start share the machine's places and the locks of partitions; nothing is made twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import dagster as dg
import pyarrow.compute as pc
import pytest

from etpi_assets import resources
from etpi_assets.asset import resource_lock
from etpi_assets.resources import Resources, side_by_side
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.process.locks import machine_locks
from etpi_resources.process.progress import acting_for
from tests.support.curation import ASSETS
from tests.support.graph import write_spec
from tests.support.small_specs import DATA_ALONE, write_small_specs
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240.0
OTHER = 'extends = "little_strong"\nseed = 7\ntasks = 16\n'


class Site:
    """A folder with specs, a lake that has the suite alone, and a Dagster home."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lake = folder, Lake(folder / "data")
        self.home = folder / "home"
        self.home.mkdir()
        (self.home / "dagster.yaml").write_text((ROOT / "etpi" / "dagster.yaml").read_text())
        write_small_specs(folder / "specs")
        write_spec(folder / "specs", "rollout_sets", "little_other", OTHER)
        write_spec(folder / "specs", "experiments", "second", DATA_ALONE.replace("little_strong", "little_other"))
        site_resources = Resources(lake=self.lake, specs_folder=folder / "specs")
        for definition in (ASSETS["suite_spec"], ASSETS["tasks"]):
            definition.execute("little", site_resources, lambda line: None)

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        places = {"ETPI_DATA": "data", "ETPI_SPECS": "specs", "ETPI_CATALOG": "etpi.duckdb", "DAGSTER_HOME": "home"}
        environment = {**os.environ, **{name: str(self.folder / place) for name, place in places.items()}}
        environment |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command], cwd=self.folder, env=environment, stdout=log, stderr=log
            )

    def log(self) -> str:
        return (self.folder / "log").read_text()[-3000:]

    def launch(self, job: str, partition: str) -> subprocess.Popen[bytes]:
        tags = json.dumps({"dagster/partition": partition})
        return self.start("dagster", "job", "launch", "-m", "etpi_assets.definitions", "-j", job, "--tags", tags)

    def waits(self, instance: dg.DagsterInstance, what: str) -> int:
        """Return how many runs have said that they wait for something."""
        entries = (entry for run in instance.get_runs() for entry in instance.all_logs(run.run_id))
        return sum(f" waits for {what} that " in entry.user_message for entry in entries)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture
def places(site: Site) -> Iterator[list[ExitStack]]:
    """All places of the machine for sandboxes, taken; close one to free it."""
    stacks = []
    for place in range(side_by_side()):
        stacks.append(ExitStack())
        path = site.lake.machine_lock_file(f"sandboxes-{place}" if place else "sandboxes")
        stacks[-1].enter_context(machine_locks().hold(path))
    yield stacks
    for stack in stacks:
        stack.close()


@pytest.mark.long
@pytest.mark.skipif(resources.accelerators(), reason="runs on an accelerator are one by one already")
def test_runs_by_launch_and_by_command_take_turns_at_one_place_and_make_a_shared_set_once(
    site: Site, places: list[ExitStack]
) -> None:
    with dg.DagsterInstance.from_config(str(site.home)) as instance:
        launch = site.launch("collect_rollouts", "little_strong")
        command = site.start("etpi", "run", "first", "second")
        until(lambda: site.waits(instance, "the sandboxes") == 2, SECONDS, site.log)
        until(lambda: site.waits(instance, "raw_rollouts of little_strong") == 1, SECONDS, site.log)

        places[0].close()
        until(lambda: launch.poll() is not None and command.poll() is not None, SECONDS, site.log)
        assert (launch.returncode, command.returncode) == (0, 0), (site.folder / "log").read_text()[-3000:]
        until(lambda: all(run.is_finished for run in instance.get_runs()), SECONDS, site.log)
        assert {run.status for run in instance.get_runs()} == {dg.DagsterRunStatus.SUCCESS}
        skipped = _skipped(instance, "little_strong")
    assert sorted(skipped) == [False, True], "one run made the set and the other took it as it was"

    spans = []
    for name, rollouts in (("little_strong", 24), ("little_other", 16)):
        ref = Ref("raw_rollouts", "rollout_set", name)
        assert len(site.lake.history(ref)) == 1
        rows = site.lake.read(ref, "rollouts")
        assert len(rows) == len(rows["rollout_id"].unique()) == rollouts
        journals = [*site.lake.scratch(f"rollouts/{name}").rglob("*.jsonl")]
        assert sum(len(path.read_text().splitlines()) for path in journals) == rollouts
        started = pc.min_max(rows["started_at"]).as_py()  # pyright: ignore[reportAttributeAccessIssue]
        spans.append((started["min"], started["max"]))
    (_, first_ended), (second_began, _) = sorted(spans)
    assert first_ended < second_began, "with one place, one set is collected after the other"
    for name in ("first", "second"):
        assert len(site.lake.history(Ref("upweighted_dataset", "experiment", name))) == 1


def _skipped(instance: dg.DagsterInstance, rollout_set: str) -> list[bool]:
    """Return, for each run that needed a rollout set, whether it found the rollouts up to date."""
    entries = (
        entry
        for run in instance.get_runs()
        for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    )
    materializations = [entry.asset_materialization for entry in entries]
    return [
        bool(m.metadata["skipped"].value)
        for m in materializations
        if m and m.asset_key == dg.AssetKey("raw_rollouts") and m.partition == rollout_set
    ]


def test_runs_share_an_accelerator_one_by_one_else_one_for_each_core(monkeypatch):
    monkeypatch.setattr(resources, "ACCELERATORS", ("null",))
    assert resources.side_by_side() == 1
    monkeypatch.setattr(resources, "ACCELERATORS", ())
    for cores, places in ((3, 3), (64, resources.MOST_SIDE_BY_SIDE)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert resources.side_by_side() == places


def test_runs_take_the_places_of_the_machine_and_the_next_one_waits(world, monkeypatch):
    """Whoever starts them: `etpi run`, `dg launch` and the web page take the same places."""
    monkeypatch.setattr(resources, "ACCELERATORS", ())
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    lines, inside = [], Event()
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(resource_lock("sandboxes", world.lake, lines.append))

        def enter() -> None:
            with acting_for("third"), resource_lock("sandboxes", world.lake, lines.append):
                inside.set()

        thread = Thread(target=enter)
        thread.start()
        with resource_lock("accelerator", world.lake, lines.append):
            assert not inside.wait(1.5), "two places, and neither is free"
    thread.join()
    assert inside.is_set() and len(lines) == 1
    assert lines[0].startswith("third waits for the sandboxes that ") and lines[0].endswith(" are using")
    assert lines[0].count(f"process {os.getpid()} ") == 2


def test_runs_on_different_accelerators_of_a_machine_do_not_wait_and_one_on_all_does(world, monkeypatch):
    monkeypatch.setattr(resources, "ACCELERATORS", ("null",))

    def waits_on(devices: str) -> bool:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        inside = Event()

        def enter() -> None:
            with resource_lock("accelerator", world.lake, lambda line: None):
                inside.set()

        thread = Thread(target=enter)
        thread.start()
        threads.append(thread)
        return not inside.wait(0.5)

    threads: list[Thread] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with resource_lock("accelerator", world.lake, print):
        assert [waits_on(devices) for devices in ("2,3", "1,2", "")] == [False, True, True]
    for thread in threads:
        thread.join()
