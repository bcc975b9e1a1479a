"""Answers that break a client: bounded in time, bytes and values, typed, retried, and never a bare Python error."""

from __future__ import annotations

import gzip
import json
import resource
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

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

Raw = Callable[[dict[str, Any]], Iterator[bytes]]
"""The request's body -> the bytes of an answer; the connection is closed after them."""


def http(body: bytes, status: str = "200 OK", length: bool = True, **headers: Any) -> bytes:
    """Return a whole answer."""
    sent = {"content-type": "application/json", "connection": "close"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    if length:
        sent["content-length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def chat(**choice: Any) -> dict[str, Any]:
    """Return a good chat answer with a choice's fields changed."""
    return {"choices": [{"message": {"role": "assistant", "content": "x"}, "finish_reason": "stop", **choice}]}


def raw_json(value: Any, **headers: Any) -> Raw:
    return lambda body: iter([http(json.dumps(value).encode(), **headers)])


def raw(data: bytes, **headers: Any) -> Raw:
    return lambda body: iter([http(data, **headers)])


def drip(body: dict[str, Any]) -> Iterator[bytes]:
    """Send one blank after the other."""
    yield http(b"", length=False)
    while True:
        time.sleep(0.05)
        yield b" "


def trickled_headers(body: dict[str, Any]) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nx: "
    while True:
        time.sleep(0.05)
        yield b"a"


def flood(body: dict[str, Any]) -> Iterator[bytes]:
    """Send the letters of one text for ever."""
    yield http(b"", length=False) + b'{"choices": [{"message": {"content": "'
    while True:
        yield b"x" * (1 << 20)


def gzip_bomb(body: dict[str, Any]) -> Iterator[bytes]:
    """Send 4 GiB of zeros in 4 MiB."""
    yield http(b"", length=False, content_encoding="gzip")
    packer, zeros = zlib.compressobj(9, wbits=31), bytes(1 << 20)
    for _ in range(4096):
        yield packer.compress(zeros)
    yield packer.flush()


def many_values(body: dict[str, Any]) -> Iterator[bytes]:
    """Send as many empty objects as fit into the bytes of an answer."""
    yield http(b'{"choices": [' + b"{}," * 600_000 + b"{}]}")


TIMED: dict[str, Raw] = {"dripped bytes": drip, "trickled headers": trickled_headers}
FLOODS: dict[str, Raw] = {"flood": flood, "gzip bomb": gzip_bomb, "many values": many_values}
CALL = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
UNREADABLE: dict[str, Raw] = {
    **FLOODS,
    "deep lists": raw(b"[" * 100_000),
    "a number of 5,000 digits": raw(b'{"choices": ' + b"1" * 5000 + b"}"),
    "not JSON": raw(b"<html>"),
    "half a gzip": raw(gzip.compress(json.dumps(chat()).encode())[:-9], content_encoding="gzip"),
    "no gzip": raw(b"{}", content_encoding="gzip"),
    "an encoding nobody asked for": raw(b"{}", content_encoding="br"),
    "a list": raw_json([chat()]),
    "null": raw_json(None),
    "two choices": raw_json({"choices": chat()["choices"] * 2}),
    "a list as finish_reason": raw_json(chat(finish_reason=["stop"])),
    "an object as finish_reason": raw_json(chat(finish_reason={})),
    "a list as message": raw_json(chat(message=["x"])),
    "a text as message": raw_json(chat(message="x")),
    "a number as content": raw_json(chat(message={"content": 7})),
    "an object in parts of content": raw_json(chat(message={"content": [{"type": "text", "text": {"text": 3}}]})),
    "a text as calls": raw_json(chat(message={"tool_calls": "ls"})),
    "a number as call": raw_json(chat(message={"tool_calls": [3]})),
    "a call without function": raw_json(chat(message={"tool_calls": [{"id": "c"}]})),
    "a call of null": raw_json(chat(message={"tool_calls": [{"id": "c", "function": None}]})),
    "a list as a call's name": raw_json(chat(message={"tool_calls": [{"function": {"name": []}}]})),
    "a list as model": raw_json({**chat(), "model": []}),
    "an error of 5,000 digits": raw_json({"error": {"code": "1" * 5000, "message": "no"}}),
    "an error with a list as code": raw_json({"error": {"code": [], "message": {}}}),
    "retry-after nan": raw(b"{}", status="429 No", retry_after="nan"),
    "retry-after infinity": raw(b"{}", status="503 No", retry_after="inf"),
    "retry-after negative": raw(b"{}", status="503 No", retry_after="-9"),
    "a flood of headers": lambda body: iter([b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000]),
    "no HTTP": lambda body: iter([b"SSH-2.0-OpenSSH_9.9\r\n"]),
    "nothing": lambda body: iter([]),
    "a flood of an error": lambda body: iter([http(b"", status="500 No", length=False), *[b"x" * (1 << 20)] * 64]),
}  # fmt: skip
"""Answers that have nothing to keep: the request is tried again."""

READABLE: dict[str, tuple[Any, str]] = {
    "a lone surrogate": (chat(message={"content": "a\ud800b"}), "a\ufffdb"),
    "a surrogate in a call": (chat(message={"content": "a", "tool_calls": [{**CALL, "id": "\udfff"}]}), "a"),
    "null calls": (chat(message={"content": "a", "tool_calls": None}), "a"),
    "calls of null": (chat(message={"content": "a", "tool_calls": [None]}), "a"),
    "content in texts": (chat(message={"content": ["a", {"type": "text", "text": "b"}]}), "ab"),
    "no content": (chat(message={"content": None}), ""),
    "no message": (chat(message=None), ""),
    "a number as a call's id": (chat(message={"content": "a", "tool_calls": [{**CALL, "id": 7}]}), "a"),
}
"""Answers that are odd, and the text that is kept of them."""


class BrokenServer:
    """A server on a loopback port that answers the request of a number (from 1) with `answer(number)`."""

    def __init__(self, answer: Callable[[int], Raw]) -> None:
        self._answer, self.count, self._lock = answer, 0, threading.Lock()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError), connection.makefile("rb") as file:
            length, first = 0, file.readline()
            while (line := file.readline().strip().lower()) != b"":
                length = int(line.partition(b":")[2]) if line.startswith(b"content-length") else length
            body = json.loads(file.read(length) or b"{}")
            if not first.startswith(b"POST"):
                return connection.sendall(http(b"{}", status="404 No"))
            with self._lock:
                self.count += 1
                number = self.count
            for piece in self._answer(number)(body):
                connection.sendall(piece)


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
