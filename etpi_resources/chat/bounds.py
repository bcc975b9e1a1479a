"""Bounds for the chat templates of strangers: each rendering is done by a process with little time and memory.

A template that exceeds them is not rendered again by this process.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from etpi_resources.errors import ExpectedError

SECONDS, MOST_BYTES, MOST_CHARACTERS = 20, 1 << 30, 2_000_000
"""Of one rendering: seconds of computing, bytes of memory, and characters; both and MOST_TIMES its input."""

MOST_TIMES = 16
_SHOWN = 300
_MORE_TRIES = 2
_SMALL = 4096
"""Bytes of conversations whose texts are kept: labels of turns begin with the same ones."""


class TemplateUnbounded(ExpectedError, ValueError):
    """A chat template takes too long, or writes too much, for a conversation."""


class _Worker:
    """A process that renders. `pid` is that of the process that started it: a fork of that one starts its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        line = [sys.executable, "-I", "-m", "etpi_resources.chat.template_worker"]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}, cwd="/")
        assert self._process.stdin and self._process.stdout
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # a user has a share of pipes, beyond which they stay small
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, 1 << 20)

    def ask(self, request: Any) -> list[str] | None:
        """Return the answer to a request; None if the worker ended over it."""
        assert self._process.stdin and self._process.stdout
        data = pickle.dumps(request, protocol=5)
        with suppress(BrokenPipeError):
            self._process.stdin.write(len(data).to_bytes(8, "big") + data)
            self._process.stdin.flush()
            size = int.from_bytes(self._process.stdout.read(8), "big")
            answer = self._process.stdout.read(size)
            if size and len(answer) == size:  # a kill can cut it
                return answer.decode("utf-8", "surrogatepass").split("\n", 1)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self.close()
        return None

    @property
    def out_of_time(self) -> bool:
        return self._process.returncode == -signal.SIGXCPU

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # pyright: ignore[reportOptionalMemberAccess]
        self._process.kill()
        self._process.wait()


_IDLE: list[_Worker] = []
"""Used by all threads: `append` and `pop` of a list are atomic."""

AT_ONCE = min(4, os.cpu_count() or 1)
_TURN = threading.BoundedSemaphore(AT_ONCE)
_REFUSED: dict[str, str] = {}
"""Template -> why no conversation of it is rendered any more."""


@atexit.register
def _close() -> None:
    while _IDLE:
        if (worker := _IDLE.pop()).pid == os.getpid():
            worker.close()


def _idle() -> _Worker:
    try:
        return _IDLE.pop()
    except IndexError:
        return _Worker()


def render(template: str, conversation: Mapping[str, Any]) -> str:
    """Return a template's text for a conversation: its messages, tools and other variables.

    Raises:
        TemplateUnbounded: it does not keep within the bounds, now or earlier.
        TemplateError: it raises an error; the message is the template's own, or that of Python.
    """
    pickled = pickle.dumps(dict(conversation), protocol=5)
    return (_rendered_small if len(pickled) < _SMALL else _rendered)(template, pickled)


def _rendered(template: str, pickled: bytes) -> str:
    if template in _REFUSED:
        raise TemplateUnbounded(_REFUSED[template])
    most = MOST_CHARACTERS + MOST_TIMES * len(pickled)
    request = (SECONDS, MOST_BYTES + MOST_TIMES * len(pickled), most, template, pickled)
    with _TURN:
        while (worker := _idle()).pid != os.getpid():
            pass  # of the process that this one was forked from
        answer = worker.ask(request)
        for _ in range(_MORE_TRIES):
            if answer is None and not worker.out_of_time:  # ended from outside, perhaps long ago
                worker = _Worker()
                answer = worker.ask(request)
        if answer is not None:
            _IDLE.append(worker)
    match answer:
        case ["ok", text]:
            return text
        case ["refused" | "failed", message]:
            raise TemplateError(message)
        case None:
            why = f"takes more than {SECONDS} s of computing" if worker.out_of_time else "ends its process"
        case _:
            why = f"writes more than {most:,} characters, or needs more than {MOST_BYTES >> 20} MiB,"
    last = str((pickle.loads(pickled).get("messages") or [""])[-1])
    _REFUSED[template] = (
        f"the chat template {why} for the conversation whose last message is {last[:_SHOWN]!r}; write one that does "
        "not, or name another (base.chat_template)"
    )
    raise TemplateUnbounded(_REFUSED[template])


_rendered_small = lru_cache(maxsize=2048)(_rendered)
