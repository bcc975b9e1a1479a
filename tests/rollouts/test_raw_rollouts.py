"""The raw_rollouts asset on a real lake: live from tasks to tables, resumed after a kill, and imported."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from etpi_assets.resources import Resources
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_assets.specs.load import SpecError
from etpi_assets.tasks.assets import tasks
from etpi_assets.trajectories.tables import from_tables
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake.lake import Lake, Ref
from tests.support.rollouts import prompts_of

SUITE = 'extends = "coop_tiny_shared"\n[params]\ntrain = 6\nheldout = 24\n'
SET = 'extends = "coop_tiny_shared_strong"\nsuite = "little"\ntasks = 4\n'


def specs(folder: Path, **files: str) -> Path:
    for name, text in {"suites__little": SUITE, "rollout_sets__little": SET, **files}.items():
        kind, _, stem = name.partition("__")
        (folder / kind).mkdir(parents=True, exist_ok=True)
        (folder / kind / f"{stem}.toml").write_text(text)
    return folder


@pytest.fixture
def resources(tmp_path):
    return Resources(lake=Lake(tmp_path / "lake"), specs_folder=specs(tmp_path / "specs"))


def test_live_rollouts_become_tables(resources):
    assert tasks.execute("little", resources).manifest.rows == {"tasks": 30, "quarantined": 0}
    outcome = raw_rollouts.execute("little", resources)
    assert not outcome.manifest.blocked
    assert {check["name"]: check["passed"] for check in outcome.manifest.checks} == {
        "prompts_reconstruct": True,
        "native_ids_present": True,
        "counts_reconcile": True,
        "drift_bounded": True,
        "budget_exhausted": True,
        "tasks_as_asked": True,
    }
    ref = Ref("raw_rollouts", "rollout_set", "little")
    tables = {name: resources.lake.read(ref, name) for name in ("rollouts", "agents", "turns", "messages")}
    rollouts = tables["rollouts"].to_pylist()
    assert Counter(row["sample"] for row in rollouts) == {0: 4, 1: 4}
    assert {row["origin"] for row in rollouts} == {"set"} and {row["rollout_set"] for row in rollouts} == {"little"}
    assert {row["teacher"] for row in rollouts} == {"scripted_shared_strong"}
    assert len(set(tables["rollouts"]["rollout_id"])) == 8
    chat = load_chat_format("tiny")
    for record in from_tables(tables):
        for agent in record.agents:
            assert "Plan-First" in chat.decode(agent.turns[0].prompt_ids or [])
            for turn in agent.turns:
                assert chat.decode((turn.output_ids or [])[:-1]) == turn.content
    assert len(prompts_of(tables["turns"])) == tables["turns"].num_rows
    assert raw_rollouts.execute("little", resources).skipped


def test_more_rollouts_leave_earlier_ones_unchanged(resources, tmp_path):
    tasks.execute("little", resources)
    raw_rollouts.execute("little", resources)
    ref = Ref("raw_rollouts", "rollout_set", "little")
    first = resources.lake.read(ref, "rollouts")
    specs(tmp_path / "specs", rollout_sets__little=SET.replace("tasks = 4", "tasks = 5\nk = 3"))
    more = Resources(lake=resources.lake, specs_folder=tmp_path / "specs")
    assert raw_rollouts.execute("little", more).manifest.rows["rollouts"] == 15
    rows = {row["rollout_id"]: row for row in more.lake.read(ref, "rollouts").to_pylist()}
    assert all(rows[row["rollout_id"]] == row for row in first.to_pylist()), "what the journal held ran again"


def test_fewer_tasks_than_requested_only_warn(resources, tmp_path):
    specs(tmp_path / "specs", rollout_sets__little=SET.replace("tasks = 4", "tasks = 23") + "k = 1\n")
    tasks.execute("little", resources)
    manifest = raw_rollouts.execute("little", Resources(resources.lake, specs_folder=tmp_path / "specs")).manifest
    (check,) = (check for check in manifest.checks if check["name"] == "tasks_as_asked")
    assert not manifest.blocked and not check["passed"] and not check["blocking"]
    assert "23" in check["message"] and "'train'" in check["message"]


@pytest.mark.parametrize("budget", ["max_steps = 2", "max_steps = 3"])
def test_budget_that_no_rollout_ends_within_is_a_warning(resources, tmp_path, budget):
    specs(tmp_path / "specs", rollout_sets__little=SET + f"k = 1\n[agent]\n{budget}\n")
    tasks.execute("little", resources)
    manifest = raw_rollouts.execute("little", Resources(resources.lake, specs_folder=tmp_path / "specs")).manifest
    (check,) = (check for check in manifest.checks if check["name"] == "budget_exhausted")
    assert not manifest.blocked and not check["passed"] and not check["blocking"]
    assert check["figures"] == {"the set": {"ended_in_limits": 4, "rollouts": 4}}


def test_an_unknown_skill_is_named(resources, tmp_path):
    specs(tmp_path / "specs", rollout_sets__little=SET + "[engine]\nskill = { folow_through = 1.0 }\n")
    tasks.execute("little", resources)
    broken = Resources(lake=resources.lake, specs_folder=tmp_path / "specs")
    with pytest.raises(SpecError, match="folow_through: unknown, follow_through?"):
        raw_rollouts.execute("little", broken)


def test_imported_rollouts_are_accounted_for(tmp_path, monkeypatch):
    source = tmp_path / "runs" / "mini"
    source.mkdir(parents=True)
    answer = "<returncode>0</returncode>"
    conversation = [("system", "s"), ("user", "do"), ("assistant", "```bash\nls\n```"), ("user", answer)]
    messages = [{"role": role, "content": content} for role, content in conversation]
    (source / "one.traj.json").write_text(json.dumps({"info": {"exit_status": "Submitted"}, "messages": messages}))
    (source / "two.traj.json").write_text("{ torn")
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    text = 'title = "t"\nkind = "imported"\nformat = "mini_swe_agent"\npath = "${RUNS}/mini"\n'
    resources = Resources(lake=Lake(tmp_path / "lake"), specs_folder=specs(tmp_path / "specs", rollout_sets__old=text))
    outcome = raw_rollouts.execute("old", resources)
    assert not outcome.manifest.blocked, outcome.manifest.checks
    assert outcome.manifest.rows["rollouts"] == 1 and outcome.manifest.rows["quarantined"] == 1
    ref = Ref("raw_rollouts", "rollout_set", "old")
    assert resources.lake.read(ref, "turns")["capture"].to_pylist() == ["none"]
    (row,) = resources.lake.read(ref, "quarantined").to_pylist()
    assert row["asset"] == "raw_rollouts" and "two.traj.json" in row["source"]
