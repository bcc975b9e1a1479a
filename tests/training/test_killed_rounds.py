"""Reinforcement whose process is killed in a refill or while harnesses run, and on tasks that a query chooses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from etpi_assets.graph import GRAPH
from etpi_resources.lake import catalog
from etpi_resources.lake.check_outcome import BadData
from etpi_resources.lake.lake import Lake
from tests.support.real_harnesses import write_harness
from tests.support.reinforcement import make, prepared, processes, rows
from tests.support.tiny_training import make_speaking_base
from tests.support.waiting import until

KILLED_AT_3 = """
import os, signal, sys, threading
from pathlib import Path
from etpi_assets.training import rounds
from tests.support import reinforcement

folder, where = Path(sys.argv[1]), sys.argv[2]
roll_out_all, compare, run_harness = rounds.Rounds._roll_out_all, rounds.Rounds._compare, rounds.run_harness
reached = threading.Event()

def killed_soon():
    if not reached.is_set():
        reached.set()
        (folder / "reached").touch()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()

def in_a_refill(self, step, requested, aside, engine):
    self.step = step
    if any(attempted.left_out == "constant" for attempted in aside):
        killed_soon()
    return roll_out_all(self, step, requested, aside, engine)

def without_variance(self, groups):
    compare(self, groups)
    for attempted in groups[0] if self.step == 3 else ():
        attempted.advantage = 0.0

def in_a_harness(job, runtime):
    if job.sample >= 12:
        killed_soon()
    return run_harness(job, runtime)

if where == "refill":
    rounds.Rounds._roll_out_all, rounds.Rounds._compare = in_a_refill, without_variance
else:
    rounds.run_harness = in_a_harness
reinforcement.make(folder, reinforcement.Lake(folder / "data"), "rl_checkpoint")
"""
HARNESS = r"""
import json, os, sys, urllib.request
messages = [{"role": "user", "content": open(sys.argv[1]).read()}]
for turn in range(2):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
    answer = urllib.request.urlopen(urllib.request.Request(os.environ["BASE"] + "/chat/completions", body, headers))
    messages.append(json.load(answer)["choices"][0]["message"])
    messages.append({"role": "user", "content": "again"})
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_speaking_base(tmp_path_factory.mktemp("base"))


def agent_with_harness(folder: Path) -> str:
    write_harness(folder, HARNESS)
    harness = f'name = "custom", version = "1", folder = "{folder}", seconds = 60, helpers = "all", '
    harness += 'command = "python3 -B {folder}/harness.py {task_file}", env = {BASE = "{base_url}/v1", KEY = "{key}"}'
    return f"{{harness = {{{harness}}}, max_tokens = 12, temperature = 0.9}}"


def recorded(lake: Lake) -> dict[str, list]:
    """Return what a run recorded, but for times."""
    turns = [(t["rollout_id"], t["output_ids"], t["logprobs"]) for t in rows(lake, "turns")]
    return {"samples": rows(lake, "rl_samples"), "turns": turns, "checkpoints": rows(lake, "checkpoints")[-1:]}


@pytest.mark.long
@pytest.mark.parametrize("where", ["refill", "harness"])
def test_run_that_is_killed_in_the_middle_of_a_round_doubles_nothing(tmp_path, base, where):
    rl = {"steps": "5", "save_steps": "5", "refill": "2"}
    rl |= {"repeatable": "true"} if where == "refill" else {
        "agent": agent_with_harness(tmp_path / "harness"), "max_prompt_tokens": "900", "max_response_tokens": "300",
        "rewards": '[{function = "overlong", params = {limit = 100, buffer = 100}}]',
    }  # fmt: skip
    lake = prepared(tmp_path / "killed", base, **rl)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", KILLED_AT_3, str(tmp_path / "killed"), where], env=environment)
    assert run.returncode == -signal.SIGKILL and (tmp_path / "killed" / "reached").exists()
    until(lambda: not processes(lake, base), 60, "the supervisor did not end the worker")
    outcome = make(tmp_path / "killed", lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    assert outcome.metadata["seed 0"]["resumed from step"] == 3
    samples = rows(lake, "rl_samples")
    in_place = Counter((r["step"], r["place"]) for r in samples if r["left_out"] not in ("replaced", "constant"))
    assert in_place == Counter((step, place) for step in range(5) for place in range(8))
    assert len({r["rollout_id"] for r in samples}) == len(samples) == len(rows(lake, "rollouts"))
    if where == "refill":
        undisturbed = prepared(tmp_path / "whole", base, **rl)
        make(tmp_path / "whole", undisturbed, "rl_checkpoint")
        one, other = recorded(undisturbed), recorded(lake)
        assert one["samples"] == other["samples"] and one["turns"] == other["turns"]
        assert one["checkpoints"][0]["checkpoint_id"] == other["checkpoints"][0]["checkpoint_id"]


@pytest.mark.slow
def test_tasks_that_a_query_chooses_are_trained_on_in_whole_runs(tmp_path, base, monkeypatch):
    monkeypatch.setenv("ETPI_CATALOG", str(tmp_path / "etpi.duckdb"))
    query = tmp_path / "late.sql"
    query.write_text("SELECT task_id FROM tasks WHERE suite = getvariable('suite') ORDER BY task_id DESC LIMIT 3")
    lake = prepared(tmp_path, base, tasks_from=f'"{query}"', steps="2", save_steps="2")
    catalog.build(lake, GRAPH.values())
    make(tmp_path, lake, "rl_checkpoint")
    names = {f"small-train-{number:05d}" for number in (5, 6, 7)}
    assert {r["task_id"] for r in rows(lake, "rl_samples")} <= names
    prepared(tmp_path, base, "unsolved", tasks_from='"mixed_tasks"', steps="2", save_steps="2")
    with pytest.raises(BadData, match="etpi sql mixed_tasks"):
        make(tmp_path, lake, "rl_checkpoint", "unsolved")
