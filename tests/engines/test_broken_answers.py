"""Answers that break a client: bounded in time, bytes and values, typed, retried, and never a bare Python error."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from etpi_resources.engines import EngineUnavailable, Request, Sampler
from etpi_resources.engines import endpoints as module
from etpi_resources.engines.endpoints import Endpoints, RetryableError
from etpi_resources.engines.openai import OpenAIEngine
from tests.support.broken_server import FLOODS, READABLE, TIMED, UNREADABLE, BrokenServer, Raw, chat, raw_json

GOOD = raw_json(chat())


@pytest.fixture(autouse=True)
def soon(monkeypatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_SECONDS", 0.01)


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
    with BrokenServer(lambda number: UNREADABLE["a list as finish_reason"]) as server:
        with pytest.raises(RetryableError) as caught:
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
