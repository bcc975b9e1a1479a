"""Answers that break a client: bounded in time, bytes and values, typed, retried, and never a bare Python error."""

from __future__ import annotations

import resource
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from etpi_assets.agent.actions import format_action
from etpi_assets.agent.loop import SUBMIT, Identity, RolloutJob, RolloutRuntime, rollout_id, run_rollout
from etpi_assets.rollouts.collect import collect
from etpi_assets.rollouts.journal import Journal
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import EngineUnavailable, Request, Sampler
from etpi_resources.engines import endpoints as module
from etpi_resources.engines.endpoints import Endpoints, RetryableError
from etpi_resources.engines.openai import OpenAIEngine
from etpi_resources.sandboxes import CommandResult
from tests.support.agent_loop import Pair
from tests.support.broken_server import FLOODS, READABLE, TIMED, UNREADABLE, BrokenServer, Raw, chat, raw_json

GOOD = raw_json(chat())


@pytest.fixture(autouse=True)
def soon(monkeypatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_SECONDS", 0.01)


class NoSandboxes:
    """Sandboxes in which a command does nothing: it prints the line that ends an agent."""

    name = "none"

    def create(self, files, limits=None, environment=None):
        result = CommandResult(SUBMIT, 0, 0.0)
        return nullcontext(SimpleNamespace(run=lambda *_, **__: result, read_files=lambda: {"a.txt": "done"}))


def teacher(server: BrokenServer, **options) -> OpenAIEngine:
    engine = OpenAIEngine("teacher", url=server.url, timeout=1.0, **options)
    engine._endpoint._backoff = 0.01
    return engine


def ask(number: int = 0) -> Request:
    return Request(f"r{number}", f"s{number}", (), [{"role": "user", "content": "hello"}], Sampler())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def only(fault: Raw, first: int = 1):
    return lambda number: fault if number <= first else GOOD


@pytest.mark.parametrize("name", UNREADABLE)
def test_answer_that_cannot_be_read_is_tried_again(name):
    with BrokenServer(only(UNREADABLE[name])) as server:
        assert teacher(server).complete([ask()])[0].text == "x" and server.count == 2


@pytest.mark.parametrize("name", TIMED)
def test_whole_answer_has_a_deadline(name):
    with BrokenServer(only(TIMED[name])) as server:
        started = time.monotonic()
        assert teacher(server).complete([ask()])[0].text == "x"
        assert 0.9 < time.monotonic() - started < 5


@pytest.mark.parametrize("name", READABLE)
def test_odd_answer_is_read(name):
    answer, text = READABLE[name]
    with BrokenServer(lambda number: raw_json(answer)) as server:
        (turn,) = teacher(server).complete([ask()])
        assert turn.text == text and turn.message is not None
        turn.text.encode()
        repr(turn.message).encode()


@pytest.mark.parametrize("name", [*TIMED, "a list as finish_reason", "deep lists"])
def test_request_that_alone_gets_broken_answers_stops_no_other(name):
    fault = (TIMED | UNREADABLE)[name]

    def answer(body):
        return (fault if body["messages"][0]["content"] == "hello" else GOOD)(body)

    with BrokenServer(lambda number: answer) as server:
        with pytest.raises(RuntimeError) as caught:
            teacher(server, attempts=2).complete([ask()])
        assert not isinstance(caught.value, EngineUnavailable)


def test_unreadable_answer_names_the_server_the_field_and_the_remedy():
    server = BrokenServer(lambda number: UNREADABLE["a list as finish_reason"])
    with server, pytest.raises(RetryableError) as caught:
        Endpoints([server.url]).complete(server.url, "/v1/chat/completions", {})
    assert all(part in str(caught.value) for part in (server.url, "choices.0.finish_reason", "gateway"))


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "1e999", "-5", "9" * 5000, "soon", ""])
def test_wait_that_a_server_asks_for_is_finite_and_short(seconds):
    assert 0 <= module._retry_after({"retry-after": seconds}) <= module.MAX_EXCLUDE_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOODS)
def test_flood_takes_little_memory(name):
    with BrokenServer(lambda number: FLOODS[name] if number > 1 else GOOD) as server:
        client = Endpoints([server.url], timeout=20.0)
        client.complete(server.url, "/x", {})
        idle, most = resident(), 0
        for _ in range(10):
            with pytest.raises(RetryableError):
                client.complete(server.url, "/x", {"max_tokens": 4096})
            most = max(most, resident() - idle)
    assert most < 64 << 20


@pytest.mark.slow
def test_collection_whose_server_breaks_every_tenth_answer_ends_with_all_rollouts(tmp_path):
    """Each break is another one; no rollout is lost, and the journal reads back."""
    breaks = [*(TIMED | UNREADABLE).values(), *(raw_json(answer) for answer, _ in READABLE.values())]
    text = str(format_action(f"echo {SUBMIT}"))
    good = raw_json(chat(message={"role": "assistant", "content": text}))

    def answer(number: int) -> Raw:
        return breaks[number // 10 % len(breaks)] if number % 10 == 0 else good

    tasks = [Task(f"t{number}", "suite", "repo", "train", "do it", {}, f"h{number}") for number in range(120)]
    section = AgentSection(max_tokens=64, max_steps=4)
    with BrokenServer(answer) as server:
        engine = teacher(server)

        def run(task: Task, sample: int) -> RolloutRecord:
            runtime = RolloutRuntime(Pair(agents=("agent1",)), engine, NoSandboxes(), load_chat_format("tiny"))  # pyright: ignore
            identity = Identity(spec_key="spec", origin="set", engine="openai", teacher="t")
            return run_rollout(RolloutJob(task, section, identity, sample), runtime)

        with Journal(tmp_path, "spec") as journal, ThreadPoolExecutor(8) as pool:
            records = list(collect(tasks, 4, [(run, journal)], executor=pool))
    assert len(records) == 480 and server.count > 480
    assert [record.error for record in records] == [None] * 480
    with Journal(tmp_path, "spec") as journal:
        assert len(journal) == 480


def test_record_with_half_a_surrogate_pair_is_kept(tmp_path):
    task = Task("t", "s", "r", "train", "x", {}, "h")
    record = RolloutRecord(rollout_id(task, 0, "spec"), "set", "s", "t", "r", [], task_hash="h", teacher="a\ud800")
    with Journal(tmp_path, "spec") as journal:
        journal.append(record)
        assert journal.get(task, 0).teacher == "a\ufffd"
