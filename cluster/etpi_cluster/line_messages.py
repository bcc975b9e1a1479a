"""Dagster Pipes messages that arrive as lines of a worker's output, from a node that shares no temporary files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg
from dagster_pipes import PIPES_PROTOCOL_VERSION_FIELD, PipesDefaultMessageWriter


class LineMessages(dg.PipesMessageReader):
    """Hands the session every line that is a message."""

    def __init__(self) -> None:
        self._handler: Any = None

    @contextmanager
    def read_messages(self, handler: Any) -> Iterator[dict[str, Any]]:
        """Yield what tells the worker to write its messages to stdout."""
        self._handler = handler
        try:
            yield {PipesDefaultMessageWriter.STDIO_KEY: PipesDefaultMessageWriter.STDOUT}
        finally:
            self._handler = None

    def no_messages_debug_text(self) -> str:
        return "Messages are read from the output of rank 0."

    def take(self, line: str) -> bool:
        """Hand over a line if it is a message; return whether it was."""
        if not line.startswith("{") or PIPES_PROTOCOL_VERSION_FIELD not in line:
            return False
        try:
            message = json.loads(line)
        except ValueError:
            return False
        if not isinstance(message, dict) or PIPES_PROTOCOL_VERSION_FIELD not in message:
            return False
        if self._handler is not None:
            self._handler.handle_message(message)
        return True
