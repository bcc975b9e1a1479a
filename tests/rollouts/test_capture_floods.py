"""The capturing proxy under floods: flat memory, other calls answered, no request lost, and a key nothing shows."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etpi_resources.capture.server import MOST_BODY_BYTES
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.secrets import kept_secret
from tests.support.capturing import CHAT, KEY, TOOLS, World, begin, lists
from tests.support.waiting import until

CHAT_PATH = "/a/a/v1/chat/completions"
MIB = 1 << 20


@pytest.fixture(scope="module")
def engine():
    return ScriptedEngine(lists, CHAT, "t", noncanonical=0.5)


@pytest.fixture
def world(tmp_path, engine):
    with World(tmp_path, engine) as world:
        yield world


class Memory:
    """Samples this process's resident bytes in a context."""

    def __enter__(self):
        gc.collect()
        self.idle = self.most = self.now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.most = max(self.most, self.now())

    @staticmethod
    def now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def objects(mib: int):
    """Yield a body of empty objects, piece by piece."""
    yield b'{"messages": [{}'
    for _ in range(mib):
        yield b",{}" * (MIB // 3)
    yield b"]}"


def texts(mib: int):
    """Yield a body with one text of letters that take four bytes each in memory."""
    yield b'{"messages": [{"role": "user", "content": "' + "\U0001f600".encode()
    for _ in range(mib):
        yield b"x" * MIB
    yield b'"}]}'


def send(world: World, body) -> int:
    return world.client.post(CHAT_PATH, content=body, headers={"x-api-key": KEY}).status_code


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("body", [objects, texts])
def test_huge_bodies_take_little_memory_and_delay_no_other_call(world, body, at_once):
    world.open("b")
    world.chat(begin())
    waits = []
    with Memory() as memory, ThreadPoolExecutor(at_once) as pool:
        for _ in range(3):
            floods = [pool.submit(send, world, body(28)) for _ in range(at_once)]
            while not all(flood.done() for flood in floods):
                started = time.monotonic()
                assert world.post("chat/completions", {"messages": begin("b")}, "b").status_code == 200
                waits.append(time.monotonic() - started)
            assert {flood.result() for flood in floods} <= {413, 429}
    assert memory.most - memory.idle < 64 * MIB and max(waits) < 3
    world.chat(begin("later"))
    assert world.attempts["a"].held_bytes == 0
    assert {row["status"] for row in world.rows() if "aux" in row} <= {413, 429}


@pytest.mark.slow
def test_share_is_given_back_whatever_ends_a_request(world):
    bodies = [b"{", b"[]", b'{"messages": 3}', b"[" * 10_000, json.dumps({"messages": begin(), "n": 2}).encode()]
    for body in bodies:
        assert send(world, body) in (400, 404)
    for mib in (1, 2):  # longer than the model's context, and longer than any prompt of it
        answer = world.client.post(CHAT_PATH, content=texts(mib), headers={"x-api-key": KEY})
        assert answer.status_code == (400, 413)[mib - 1] and "context_length_exceeded" in answer.text
    assert world.attempts["a"].held_bytes == 0

    async def hang_up() -> None:
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", world.server.port)
            writer.write(f"POST {CHAT_PATH} HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\n".encode())
            writer.write(b"content-length: 9000000\r\n\r\n" + b"x" * MIB)
            await writer.drain()
            writer.close()

    asyncio.run(hang_up())
    until(lambda: world.attempts["a"].held_bytes == 0, 10)
    world.chat(begin())


def test_request_beyond_the_share_of_those_under_way_may_come_again(world):
    world.attempts["a"].hold(MOST_BODY_BYTES - 100)
    assert world.post("chat/completions", {"messages": begin()}).status_code == 429
    world.attempts["a"].hold(100 - MOST_BODY_BYTES)
    world.chat(begin())


def test_key_that_a_request_hides_is_in_no_prompt_and_no_line(world):
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in KEY)
    body = f'{{"messages": [{{"role": "user", "content": "{escaped}"}}], "{escaped}": "{escaped}", "n": 1}}'
    headers = {"x-api-key": KEY, "user-agent": f"x/{KEY}", "anthropic-beta": "y" * 1995 + KEY}
    assert world.client.post(CHAT_PATH, content=body, headers=headers).status_code == 200
    assert world.client.post(f"/a/a/v1/{KEY}", content=b"{}", headers=headers).status_code == 404
    (call,) = world.calls()
    log = (world.folder / "a.jsonl").read_text()
    assert call["messages"][0]["content"] == "[key]" and KEY not in log and KEY[:6] not in log
    assert call["headers"]["user-agent"] == "x/[key]"


@pytest.mark.parametrize("content", [b"", b"\n", None])
def test_key_file_that_a_kill_left_empty_is_written_again(tmp_path, content):
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    key = kept_secret(tmp_path / "key")
    assert len(key) > 20 and kept_secret(tmp_path / "key") == key
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600 and [p.name for p in tmp_path.iterdir()] == ["key"]


@pytest.mark.long
def test_two_hundred_streams_and_nine_hundred_slow_uploads_lose_nothing(tmp_path, engine):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    with World(tmp_path, engine) as world, Memory() as memory:

        async def call(number: int, stream: bool) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.server.port)
            messages = begin(f"{number} " + "word " * (10 if stream else 1000))
            body = json.dumps({"messages": messages, "tools": TOOLS, "stream": stream}).encode()
            head = f"POST {CHAT_PATH} HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\nconnection: close\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode())
            for start in range(0, len(body), len(body) if stream else len(body) // 10 + 1):
                writer.write(body[start : start + len(body) // 10 + 1] if not stream else body)
                await writer.drain()
                await asyncio.sleep(0 if stream else 1.0)
            answer = await reader.read()
            writer.close()
            return answer

        async def every() -> list[bytes]:
            return await asyncio.gather(*(call(number, number < 200) for number in range(1100)))

        answers = asyncio.run(every())
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
        assert sum(b"[DONE]" in answer for answer in answers) == 200 and len(world.calls()) == 1100
        assert world.attempts["a"].held_bytes == 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert memory.most - memory.idle < 400 * MIB  # of 1100 conversations, which the attempt keeps
