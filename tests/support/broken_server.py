"""A server of raw bytes: answers that no library would send, and floods."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Self

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
