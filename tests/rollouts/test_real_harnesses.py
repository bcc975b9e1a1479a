"""Unmodified harnesses of pip and npm in bubblewrap, and a student trained and evaluated in one of them.

`ETPI_HARNESSES` names a folder with a folder for each harness, installed as docs/any_agent.md says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from contextlib import closing
from pathlib import Path

import pytest

from etpi_assets.agent.harness import run_harness
from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime
from etpi_assets.specs.harness import PRESETS
from etpi_assets.trajectories.rollout_checks import set_figures, set_outcomes
from etpi_assets.trajectories.tables import captured_digest, to_tables
from etpi_assets.worlds.repo_fix_tiny import FAMILY
from etpi_resources.capture.store import read_log
from etpi_resources.engines.endpoints import Endpoints
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.engines.vllm import VllmEngine
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.schemas import empty
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from tests.support.graph import write_spec
from tests.support.real_harnesses import CHAT, HARNESS, TASK, fixes, folder_of, section
from tests.support.serving import NEEDS_VLLM, make_models, start

PARSER = {"tool-call-parser": "hermes"}


EXAMPLE = Path(__file__).parents[2] / "examples" / "mini_swe_agent.toml"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", [*PRESETS, EXAMPLE.name])
def test_an_unmodified_harness_is_captured_token_for_token(name, tmp_path):
    if name in PRESETS:
        agent = section(name, folder_of(name))
    else:
        agent = section(**tomllib.loads(EXAMPLE.read_text())["harness"] | {"folder": folder_of("mini-swe-agent")})
    engine = ScriptedEngine(fixes, CHAT, "t", noncanonical=0.1)
    runtime = RolloutRuntime(FAMILY, engine, BubblewrapFactory(), CHAT)
    record = run_harness(RolloutJob(TASK, agent, Identity("k", "set", "scripted")), runtime, tmp_path)
    assert record.error is None and record.outcome and record.outcome["reward"] == 1.0
    main = record.agents[0]
    assert main.exit_status == "Submitted" and len(main.turns) >= 3
    figures = record.outcome["details"]["capture"]
    assert (
        figures["turns"] + sum(figures["untrained"].values()) + figures["refused"] + figures["joined"]
        == figures["calls"]
    )
    later = [turn for turn in main.turns if turn.turn]
    tables = to_tables([record], CHAT.decode) | {"quarantined": empty("quarantined")}
    assert tables["turns"]["prefix_turn"].null_count == 1 and len(later) == len(main.turns) - 1
    figures = set_figures(tables, {record.rollout_id: captured_digest(record)}, live=True)
    assert all(outcome.passed for outcome in set_outcomes(figures, total=1, live=True))
    sampled = [row["output_ids"] for log in tmp_path.glob("*.jsonl") for row in read_log(log) if "output_ids" in row]
    assert all(sampled.count(turn.output_ids) == 1 for turn in main.turns)


SET = """
title = "t"
kind = "agent"
suite = "fixes"
engine = { kind = "reference", teacher = "reference" }
agent = { max_model_len = 4000, max_tokens = 400 }
harness = { name = "mini-swe-agent", folder = "FOLDER", max_calls = 8, seconds = 300 }
"""
EXPERIMENT = """
title = "t"
extends = "etpi_phase1_tiny"
rollout_sets = ["mini"]
select = { shortest_correct = false }
dataset = { max_length = 4000 }
train = { max_steps = 2 }
probe = { prompts = 2, min_differs = 0.0 }
metrics = { scoring = { structure = "none" } }
[gates]
format_exposure = 0
first_turn_loss_share = "none"
prompt_length_ratio = "none"
template_distance = "none"
override = { first_turn_parses = "two steps teach no student to parse" }
[evaluate]
suite = "fixes"
tasks = 1
decodings = [{ name = "greedy" }]
agent = { max_model_len = 4000, max_tokens = 200 }
harness = { name = "mini-swe-agent", folder = "FOLDER", max_calls = 4, seconds = 300 }
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_student_is_trained_on_a_harness_and_evaluated_in_it(tmp_path):
    folder = folder_of("mini-swe-agent")
    specs = tmp_path / "specs"
    write_spec(specs, "suites", "fixes", 'extends = "repo_fix_tiny"\nparams = { train = 6, heldout = 2 }\n')
    write_spec(specs, "rollout_sets", "mini", SET.replace("FOLDER", folder))
    write_spec(specs, "experiments", "student", EXPERIMENT.replace("FOLDER", folder))
    environment = {**os.environ, "ETPI_DATA": str(tmp_path / "data"), "ETPI_SPECS": str(specs), "DAGSTER_HOME": ""}
    command = [sys.executable, "-m", "etpi", "run", "student"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lake = Lake(tmp_path / "data")
    rows = lake.read(Ref("upweighted_dataset", "experiment", "student"), "dataset_rows")
    assert min(rows["span_start"].to_pylist()) > 1000, "trained on the harness's prompts, not on etpi's"
    evaluated = lake.read(Ref("eval_rollouts", "experiment", "student"), "rollouts")
    assert evaluated["error"].null_count == evaluated.num_rows
    assert all("capture" in json.loads(text)["details"] for text in evaluated["outcome"].to_pylist())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["codex", "claude-code"])
def test_pairs_of_an_unmodified_harness_are_what_was_sampled_in_it(name, tmp_path):
    specs = tmp_path / "specs"
    write_spec(specs, "suites", "fixes", 'extends = "repo_fix_tiny"\nparams = { train = 2, heldout = 1 }\n')
    roomy = SET.replace("max_model_len = 4000, max_tokens = 400", "max_model_len = 90000, max_tokens = 1000")
    write_spec(specs, "rollout_sets", "mini", roomy.replace("mini-swe-agent", name).replace("FOLDER", folder_of(name)))
    data = EXPERIMENT[: EXPERIMENT.index("[evaluate]")].replace("max_length = 4000", "max_length = 90000")
    data = data.replace("shortest_correct = false", 'shortest_correct = false, min_reward = "none"')
    write_spec(specs, "experiments", "student", data)
    environment = {**os.environ, "ETPI_DATA": str(tmp_path / "data"), "ETPI_SPECS": str(specs), "DAGSTER_HOME": ""}
    command = [sys.executable, "-m", "etpi", "run", "student", "--data-only"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    lake = Lake(tmp_path / "data")
    manifest = lake.current(Ref("tito_pairs", "experiment", "student"))
    assert manifest and not manifest.blocked, done.stderr
    assert {check["name"]: check["passed"] for check in manifest.checks}["history_as_captured"]
    pairs = lake.read(Ref("tito_pairs", "experiment", "student"), "pairs")
    logs = (tmp_path / "data").rglob("calls/*.jsonl")
    sampled = [row["output_ids"] for log in logs for row in read_log(log) if "output_ids" in row]
    assert pairs.num_rows >= 4 and all(sampled.count(ids) >= 1 for ids in pairs["output_ids"].to_pylist())


class Stalls(ScriptedEngine):
    """Answers two calls, and none after them for two minutes."""

    answered = 0

    def complete(self, requests):
        self.answered += len(requests)
        if self.answered > 2:
            time.sleep(120)
        return super().complete(requests)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", PRESETS)
def test_an_unmodified_harness_is_ended_within_five_seconds_and_graded(name, tmp_path):
    agent = section(name, folder_of(name), seconds=40)
    runtime = RolloutRuntime(FAMILY, Stalls(fixes, CHAT, "t"), BubblewrapFactory(), CHAT)
    started = time.monotonic()
    record = run_harness(RolloutJob(TASK, agent, Identity("k", "set", "scripted")), runtime, tmp_path)
    print(f"{name}: ended and graded {time.monotonic() - started - 40:.1f} s after its 40 s")
    assert time.monotonic() - started < 40 + 5 + 5, "five seconds to end it, and some to start and to grade"
    assert record.agents[0].exit_status == "LimitsExceeded" and record.outcome


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", PRESETS)
def test_an_unmodified_harness_without_budget_is_ended_within_five_seconds_and_graded(name, tmp_path):
    agent = section(name, folder_of(name), max_calls=2)
    runtime = RolloutRuntime(FAMILY, ScriptedEngine(fixes, CHAT, "t"), BubblewrapFactory(), CHAT)
    record = run_harness(RolloutJob(TASK, agent, Identity("k", "set", "scripted")), runtime, tmp_path)
    ended = time.time()
    (log,) = tmp_path.glob("*.jsonl")
    refused = [row["at"] for row in read_log(log) if row.get("status") == 400]
    print(f"{name}: ended and graded {ended - refused[0]:.1f} s after the first of {len(refused)} refused calls")
    assert ended - refused[0] < 5 + 5, "five seconds to end it, and some to grade"
    assert record.agents[0].exit_status == "LimitsExceeded" and record.outcome


class TestVllm:
    """A live server behind the proxy."""

    pytestmark = NEEDS_VLLM

    def test_served_ids_equal_direct_completions_and_extend_exactly(self, tmp_path):
        harness = tmp_path / "harness"
        harness.mkdir()
        for path in (harness, *harness.parents[:2]):
            path.chmod(0o755)
        again = 'messages += [message] + [{"role": "user", "content": "Go on."}] * (not message.get("tool_calls"))'
        (harness / "harness.py").write_text(HARNESS.replace("messages.append(message)", again))
        models = make_models(tmp_path / "models", CHAT)
        with closing(start(models, tmp_path / "log", **PARSER)) as server, closing(Endpoints(server.urls)) as endpoints:
            engine = VllmEngine(endpoints, server.name, CHAT)
            more = {"version": "1", "command": "python3 -B {folder}/harness.py {task_file}", "max_calls": 4}
            env = {"BASE": "{base_url}/v1", "KEY": "{key}"}
            agent = section("custom", str(harness), env=env, **more)
            agent = agent.model_copy(update={"temperature": 0.0, "max_tokens": 40, "max_model_len": 3000})
            runtime = RolloutRuntime(FAMILY, engine, BubblewrapFactory(), CHAT)
            record = run_harness(RolloutJob(TASK, agent, Identity("k", "set", "vllm")), runtime)
            engine.close()
            assert record.error is None and record.outcome
            assert record.outcome["details"]["capture"]["links"] == {"root": 1, "exact": 3}
            for turn in record.agents[0].turns:
                body = {"prompt": turn.prompt_ids, "max_tokens": 40, "temperature": 0.0, "return_token_ids": True}
                direct = endpoints.post("/v1/completions", {"model": server.name, **body})["choices"][0]
                assert (direct["prompt_token_ids"], direct["token_ids"]) == (turn.prompt_ids, turn.output_ids)
                assert len(turn.logprobs or ()) == len(turn.output_ids or ())
