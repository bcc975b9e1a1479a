"""A server that restarts with other weights under the same name stops the run, and its rollouts are set aside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from etpi_assets.agent.loop import rollout_id
from etpi_assets.rollouts.journal import Journal
from etpi_assets.rollouts.served_weights import same_weights
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord, Turn
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.endpoints import Endpoints
from etpi_resources.engines.vllm import VllmEngine
from tests.support.faulty_server import NAME, FaultyServer
from tests.support.loopback import status

ROOT = Path(__file__).parents[2]
CHAT = load_chat_format("tiny")
TASKS = [Task(f"t{number}", "suite", "repo", "train", "do it", {}, f"hash{number}") for number in range(4)]


def rollout(task: Task) -> RolloutRecord:
    agent = AgentRecord("agent1", "f1", "solo", "Submitted", [Turn(0, "x", [1, 2], [3], capture="native")])
    key = rollout_id(task, 0, "spec")
    return RolloutRecord(key, "set", task.suite, task.task_id, task.repo, [agent], task_hash=task.content_hash)


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path, "spec") as journal:
        yield journal


def engine_of(*servers: FaultyServer) -> VllmEngine:
    return VllmEngine(Endpoints([server.url for server in servers], backoff=0.01), NAME, CHAT)


def test_same_weights_keep_every_rollout(journal):
    with FaultyServer(weights=1) as server:
        for task in TASKS[:2]:
            with same_weights(engine_of(server), CHAT, journal, pytest.fail):
                journal.append(rollout(task))
    assert len(journal) == 2


def test_rollouts_since_the_last_comparison_are_set_aside_and_run_again(journal, tmp_path):
    with FaultyServer(weights=1) as server:
        with same_weights(engine_of(server), CHAT, journal, pytest.fail):
            journal.append(rollout(TASKS[0]))
        with (
            pytest.raises(EngineUnavailable, match=r" 2 rollouts.*engine\.model"),
            same_weights(engine_of(server), CHAT, journal, pytest.fail),
        ):
            journal.append(rollout(TASKS[1]))
            server.weights = 2
            journal.append(rollout(TASKS[2]))
    assert [journal.has(task, 0) for task in TASKS] == [True, False, False, False]
    assert len((tmp_path / "journal-spec.aside.jsonl").read_text().splitlines()) == 2
    journal.append(rollout(TASKS[2]))


def test_other_weights_at_the_next_start_are_refused(journal):
    with FaultyServer(weights=1) as first, same_weights(engine_of(first), CHAT, journal, pytest.fail):
        journal.append(rollout(TASKS[0]))
    with (
        FaultyServer(weights=2) as second,
        pytest.raises(EngineUnavailable, match=" 0 rollouts"),
        same_weights(engine_of(second), CHAT, journal, pytest.fail),
    ):
        pytest.fail("the collection has started")
    assert journal.has(TASKS[0], 0)


def test_one_of_two_servers_with_other_weights_is_named(journal):
    with (
        FaultyServer(weights=1) as first,
        FaultyServer(weights=2) as second,
        pytest.raises(EngineUnavailable, match=second.url),
        same_weights(engine_of(first, second), CHAT, journal, pytest.fail),
    ):
        pytest.fail("the collection has started")


def test_server_without_prompt_logprobs_is_said_to_be_unknown(journal):
    lines: list[str] = []
    with FaultyServer() as server:
        server.change = lambda answer: {"choices": [{}]}
        with same_weights(engine_of(server), CHAT, journal, lines.append) as compare_if_due:
            compare_if_due()
            journal.append(rollout(TASKS[0]))
    assert len(lines) == 1 and "not applicable" in lines[0] and len(journal) == 1


def test_server_that_fails_for_a_moment_is_compared_later(journal, monkeypatch):
    monkeypatch.setattr("etpi_assets.rollouts.served_weights.RETRY_SECONDS", 0.01)
    with FaultyServer(weights=1) as server:
        with same_weights(engine_of(server), CHAT, journal, pytest.fail):
            journal.append(rollout(TASKS[0]))
        server.weights, server.faults = 2, [status(503)] * 3
        with (
            pytest.raises(EngineUnavailable, match=r"0\.272 nats"),
            same_weights(engine_of(server), CHAT, journal, pytest.fail),
        ):
            journal.append(rollout(TASKS[1]))
    assert len(journal) == 1


def test_server_that_missed_the_first_comparison_is_waited_for_at_the_end(journal, monkeypatch):
    served_weights = "etpi_assets.rollouts.served_weights"
    monkeypatch.setattr(f"{served_weights}.RETRY_SECONDS", 0.01)
    monkeypatch.setattr(f"{served_weights}.PATIENCE_SECONDS", 0.0)
    lines: list[str] = []
    with FaultyServer(weights=1) as first, FaultyServer(weights=1) as second:
        second.faults = [status(503)]
        with (
            pytest.raises(EngineUnavailable, match=second.url),
            same_weights(engine_of(first, second), CHAT, journal, lines.append),
        ):
            journal.append(rollout(TASKS[0]))
            second.weights, second.faults = 2, [status(503)] * 3
            monkeypatch.setattr(f"{served_weights}.PATIENCE_SECONDS", 30.0)
    assert len(lines) == 1 and "cannot be compared" in lines[0] and len(journal) == 0


@pytest.mark.slow
def test_only_true_answers_of_failing_servers_are_published():
    command = [sys.executable, "bench/soak.py", "--minutes", "0", "--tasks", "16", "--rate", "0.1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "3 rounds, 48 rollouts" in done.stdout, done.stdout + done.stderr
