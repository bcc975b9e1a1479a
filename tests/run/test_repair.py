"""Repairing a lake makes what is damaged again, with consent where that is expensive, and leaves the rest alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from etpi.life.repair import repair
from etpi_resources.lake.audit import audit
from etpi_resources.lake.lake import Ref

TASKS = Ref("tasks", "suite", "small")
ROLLOUTS = Ref("raw_rollouts", "rollout_set", "few")


@pytest.fixture
def mend(world):
    """Repair the world's lake with its recipes; return {path: result}."""
    world.make_all()
    world.made.clear()

    def run(job, key, assets):
        for asset in assets:
            world.make(asset, key or "all", consent=("rebuild", "recollect"))
        return []

    def mend(consent=()):
        damages = audit(world.lake, deep=True).damages
        repairs = repair(damages, world.resources().specs, world.lake, run, consent)
        return {done.damage.path: done.result for done in repairs}

    return mend


def damage(path: Path) -> Path:
    path.write_bytes(b"\0" * path.stat().st_size)
    return path


def file_of(world, ref: Ref) -> Path:
    manifest = world.lake.require(ref)
    return world.lake.files_of(manifest, sorted(manifest.tables)[0])[0]


def test_repair_rebuilds_a_damaged_file_with_the_same_content(world, mend):
    path = file_of(world, TASKS)
    clean = path.read_bytes()
    assert mend() == {}
    assert mend() == {} and world.made == []
    damage(path)
    assert mend() == {path: "same content"}
    assert path.read_bytes() == clean and world.made == [("tasks", "small")]
    assert audit(world.lake, deep=True).damages == []
    assert world.make_all() == [("catalog", "all")], "nothing downstream became stale"


def test_repair_of_expensive_results_needs_consent(world, mend):
    path = damage(file_of(world, ROLLOUTS))
    assert mend() == {path: "needs consent"} and world.made == [] and path.exists()
    assert mend(["recollect"]) == {path: "same content"}


def test_repair_reports_different_content(world, mend):
    path = damage(file_of(world, TASKS))
    world.change_result("tasks")
    assert mend() == {path: "other content"}
    assert audit(world.lake, deep=True).damages == [], "the version that is gone is forgotten"


def test_repair_sets_versions_aside_that_are_not_current(world, mend):
    path = file_of(world, TASKS)
    spec = world.specs_folder / "suites" / "small.toml"
    spec.write_text(spec.read_text() + "params = {train = 50}\n")
    world.make_all()
    assert file_of(world, TASKS) != path
    damage(path)
    world.made.clear()
    assert mend() == {path: "not current"} and not path.exists() and world.made == []
    assert mend() == {}


def test_repair_restores_a_pointer_without_computing(world, mend):
    pointer = damage(world.lake.root / "tasks" / "suite=small" / "current")
    assert mend() == {pointer: "same content"} and world.made == []


def test_repair_without_the_spec_leaves_the_damage_in_place(world, mend):
    world.make_all("second")
    path = damage(file_of(world, Ref("experiment_report", "experiment", "second")))
    (world.specs_folder / "experiments" / "second.toml").unlink()
    assert mend() == {path: "no spec"} and path.exists()
