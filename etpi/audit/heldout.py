"""The held-out tasks that training rows must not have: texts, ids, repositories and lengths of their prompts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from etpi_assets.importers.spec import at, base
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.chat.format import ChatFormat
from etpi_resources.rows import files_below, iter_rows, row_files

_COLUMNS = ("messages", "conversations", "prompt", "problem_statement", "question", "instruction", "query", "problem")
"""Columns in which data sets have their tasks."""
_WORDS, _MOST, _ALIKE = 8, 400, 0.8
"""Words of a piece of a task, words of a task that are compared, and the share of its pieces that a copy has."""


@dataclass
class HeldOut:
    """Tasks of an evaluation.

    Attributes:
        pieces: a piece of text -> the number of the one task that has it. sizes: the pieces of each task.
        lengths: tokens of each prompt.
    """

    names: set[str] = field(default_factory=set)
    repos: set[str] = field(default_factory=set)
    pieces: dict[int, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, chat: ChatFormat) -> HeldOut:
        """Read rows of messages, prompts or tasks. Raises ValueError: no row has a task."""
        held, texts = cls(), list[set[int]]()
        paths = base().paths["run"]
        for file in row_files(files_below(path)):
            for _, row in iter_rows(file):
                if not isinstance(row, Mapping):
                    continue
                held.names |= {str(v) for p in paths["task"] if isinstance(v := at(row, p), str)}
                held.repos |= {str(v) for p in paths["repo"] if isinstance(v := at(row, p), str)}
                if opening := _opening(row):
                    texts.append(set(_pieces(" ".join(m["content"] for m in opening if m["role"] == "user"))))
                    held.lengths.append(len(chat.encode(" ".join(m["content"] for m in opening))))
        if not (texts or held.names or held.repos):
            raise ValueError(f"{path}: no row has a task in {', '.join(_COLUMNS)}, nor a name or repository of one")
        tasks = list({frozenset(pieces): None for pieces in texts if pieces})
        shared = Counter(piece for pieces in tasks for piece in pieces)
        for number, pieces in enumerate(tasks):  # words that several tasks have are of their prompt's template
            alone = [piece for piece in pieces if shared[piece] == 1]
            held.sizes.append(len(alone))
            held.pieces |= dict.fromkeys(alone, number)
        return held

    def leak(self, record: RolloutRecord) -> str | None:
        """Return what of the held-out tasks a row has; None if nothing."""
        if record.task_id in self.names:
            return f"the held-out task {record.task_id}"
        if record.repo and record.repo in self.repos:
            return f"the held-out repository {record.repo}"
        text = next((m.content for a in record.agents for m in a.messages if m.role == "user"), "")
        hits = Counter(self.pieces[piece] for piece in set(_pieces(text, 10 * _MOST)) if piece in self.pieces)
        task, count = next(iter(hits.most_common(1)), (0, 0))
        return f"the text of a held-out task: {text[:80]!r}" if count and count >= _ALIKE * self.sizes[task] else None


def _opening(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a row before the first answer."""
    value = next((row[name] for name in _COLUMNS if isinstance(row.get(name), str | list)), None)
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    opening = list[dict[str, str]]()
    for message in value or ():
        if not isinstance(message, Mapping):
            return []
        role = base().roles.get(str(message.get("role") or message.get("from")), "user")
        text = message.get("content") or message.get("value") or ""
        if role == "assistant":
            break
        opening.append({"role": role, "content": text if isinstance(text, str) else str(text)})
    return opening


def _pieces(text: str, most: int = _MOST) -> Iterator[int]:
    words = re.findall(r"\w+", text.lower())[:most]
    for start in range(max(1, len(words) - _WORDS + 1)):
        yield crc32(" ".join(words[start : start + _WORDS]).encode())  # the same in every process
