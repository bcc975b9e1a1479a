"""The log of one attempt: a line of JSON for each call, flushed before its answer.

A call that continues an earlier one names it in `parent` and holds only the messages and ids that it adds, so a log
grows with the conversation and not with its square. Lines of other kinds: {"vocabulary": …} the first, {"tools": …} the
schemas behind a hash, {"status": …} a refused call, {"joined": …} a request that asked again for a call, {"aux": …}
other requests.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from etpi_resources.hashes import json_hash
from etpi_resources.outside import inside

HIDDEN = "[key]"
"""Replaces the attempt's key in requests, since commands print their environment: no prompt or log contains it."""

Row = dict[str, Any]


class CallLog:
    """An attempt's file, open only while a row is written. Thread-safe; after `close`, rows are dropped.

    Attributes:
        secret: a text that no line contains: HIDDEN replaces it.
    """

    secret = ""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._lock, self._tools, self._closed = path, threading.Lock(), set[str](), False
        path.touch()
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # a kill can cut the last line

    def append(self, row: Mapping[str, Any], tools: list[Any] | None = None) -> None:
        """Write a row; `tools` are written at their first use, and the row gets their hash.

        Raises OSError if the disk is full; the log then has nothing of the row.
        """
        lines, written = [dict(row)], set[str]()
        with self._lock:  # also around the set of schemas: no row may come before those that it names
            if tools is not None:
                lines[0]["tools_hash"] = key = json_hash(tools)
                written = {key} - self._tools
                lines[:0] = [{"tools_hash": key, "tools": tools} for _ in written]
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            text = text.replace(inside(self.secret), HIDDEN) if self.secret else text
            if not self._closed:
                self._write(text.encode("utf-8", "surrogatepass"))
            self._tools |= written

    def _write(self, data: bytes) -> None:
        with self.path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(size)
                raise

    def close(self) -> None:
        with self._lock:
            self._closed = True


def read_log(path: Path) -> Iterator[Row]:
    """Yield the rows of a log in order; calls with whole `messages`, `tools`, and `prompt_ids` as an int32 array.

    An incomplete last line is left out.

    Raises:
        ValueError: the file is no log of this module.
    """
    tools: dict[str, list[Any]] = {}
    calls: dict[int, Row] = {}
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            return
        row = json.loads(line.decode("utf-8", "surrogatepass"))
        if "tools" in row:
            tools[row["tools_hash"]] = row["tools"]
            continue
        if "output_ids" in row:
            before = calls[row["parent"]] if row["parent"] is not None else None
            row["tools"] = tools[row["tools_hash"]]
            row["prompt_ids"] = np.asarray(row["prompt_ids"], dtype=np.int32)
            if before is not None:
                row["messages"] = [*before["messages"], before["message"], *row["messages"]]
                row["prompt_ids"] = np.concatenate([before["history"], row["prompt_ids"]])
            row["history"] = np.concatenate([row["prompt_ids"], np.asarray(row.pop("kept_ids"), dtype=np.int32)])
            calls[row["call"]] = row
        yield row


def is_log(path: Path) -> bool:
    """Return whether a file is a log of this module: it begins with a row of one."""
    with path.open("rb") as file:
        head = file.read(16)
    return path.suffix == ".jsonl" and head.startswith((b'{"attempt": ', b'{"tools_hash": '))
