"""Say of rows of no known format what they hold, and which format is nearest."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any

from etpi_assets.importers.format import DetectionInput, Row
from etpi_assets.importers.spec import base, load
from etpi_resources.rows.bounded import Unreadable

_OTHERS = {
    ("chosen", "rejected"): "rows that compare answers are no trajectories; keep the chosen answer alone:",
    ("instruction", "output"): "these are Alpaca's keys: --map prompt=instruction,input=input,answer=output; or",
    ("input", "output"): "these are OpenRLHF's keys: --map prompt=input,answer=output; or",
    ("query", "response"): "these are ms-swift's keys: --map prompt=query,answer=response leaves `history` out; or",
    ("query", "answers"): "these are xLAM's keys, calls without a conversation:",
    ("system", "chat"): "this is Glaive's form, a conversation in one text:",
    ("segments",): "these are axolotl's segments of text:",
    ("text",): "this is text without roles:",
}
"""Keys of formats that etpi does not read -> what they are."""
_NAMES = {
    "role": ("role", "from", "speaker", "sender", "author", "type", "who"),
    "text": ("content", "value", "text", "message", "utterance", "body", "said"),
}
"""Names of the columns of a message in files of no known format."""
_FORMS = "rows are JSON lines, JSON arrays or parquet"
_SHOWN, _VALUES, _LONGEST = 12, 3, 60


def unknown_row(source: DetectionInput) -> str:
    """Return the keys of the first row, and the nearest format with what it would need."""
    row = next(iter(source.rows), None)
    if row is None:
        names = ", ".join(file.name for file in source.files[:_SHOWN])
        if not names:
            return "it has no files"
        if not any(file.stat().st_size for file in source.files):
            return f"nothing but empty files ({names}); {_FORMS}"
        faults = (value.detail for value in source.values if isinstance(value, Unreadable))
        return f"no row can be read ({next(faults, f'{names}; {_FORMS}')})"
    keys = ", ".join(map(str, list(row)[:_SHOWN])) + (", ..." if len(row) > _SHOWN else "")
    texts = ((key, json.dumps(value, ensure_ascii=False, default=str)) for key, value in list(row.items())[:_VALUES])
    values = ", ".join(f"{key} = {text if len(text) <= _LONGEST else f'{text[:_LONGEST]}...'}" for key, text in texts)
    prompt, answer = _prompt(row)
    near = f"{_nearest(row)}{_map(row)}"
    if prompt and answer:
        near = f"`{prompt}` holds messages that `{answer}` answers: --map prompt={prompt},answer={answer}"
    elif prompt:
        near += f"; `{prompt}` of this row is without an answer, as for training by reward"
    return f"its first row has {keys or 'no keys'} ({values}); {near}"


def _prompt(row: Row) -> tuple[str | None, str | None]:
    """Return the column whose messages are all of the system and the user, and the one with the model's, if any."""
    roles = {
        key: {base().roles.get(message.get("role")) for message in value}
        for key, value in row.items()
        if isinstance(value, list) and value and all(isinstance(message, dict) for message in value)
    }
    prompt = next((key for key, of_key in roles.items() if of_key <= {"system", "user"}), None)
    return prompt, next((key for key, of_key in roles.items() if "assistant" in of_key), None)


def _map(row: Row) -> str:
    """Return the `--map` that fits the row's first list of messages; empty if it has none."""
    for path, message in _lists(row, ""):
        named = {text: key for key in message for text in ("role", "text") if key in _NAMES[text]}
        if len(named) == 2:
            return f"; or name its columns: --map messages={path},role={named['role']},text={named['text']}"
    return ""


def _lists(value: Any, path: str) -> Iterator[tuple[str, Row]]:
    """Yield the path and the first item of each list of objects, also within objects and lists of lists."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _lists(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield path, value[0]


def _nearest(row: Row) -> str:
    """Return the format whose column of messages has another name in the row, or whose claim it nearly has."""
    for key, value in row.items():
        first: Any = value[0] if isinstance(value, list) and value else None
        first = first[0] if isinstance(first, list) and first else first  # one level down
        for mark, name, column in (("role", "messages", "messages"), ("from", "sharegpt", "conversations")):
            if isinstance(first, dict) and mark in first:
                return f"the nearest format is {name}: `{key}` holds its messages, so call it `{column}`"
    for keys, what in _OTHERS.items():
        if set(keys) <= set(row):
            return f"{what} write them as `messages` of {{role, content}} (format messages)"
    claims = [(name, claim) for name in _ROW_FORMATS for spec in load(name) for claim in spec.claimed]
    columns = {str(path[0]): (name, claim) for name, claim in reversed(claims) for wanted, path in claim if wanted}
    for key in map(str, row):
        if match := difflib.get_close_matches(key, columns, n=1, cutoff=0.7):
            name, claim = columns[match[0]]
            missing = [f"`{path[0]}`" for wanted, path in claim if wanted and path[0] not in row]
            of = f"`{key}` for `{match[0]}`" if key != match[0] else f"without {' and '.join(missing)}"
            return f"the nearest format is {name}, {of}"
    return "the nearest format is messages, which has a column `messages` of {role, content}"


_ROW_FORMATS = ("messages", "sharegpt", "r2e_gym", "verl", "trl", "tito")
"""Formats of rows that any program may write; the first one is named of those with a column of the same name."""
