"""Say of rows of no known format what they hold, and which format is nearest."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any

from etpi_assets.importers.format import DetectionInput, Row
from etpi_assets.importers.source import Unreadable

_COLUMNS = {
    "messages": "messages",
    "conversations": "sharegpt",
    "history": "openhands",
    "trajectory": "openhands",
    "trajectory_steps": "r2e_gym",
    "input_ids": "trl",
    "output_ids": "tito",
    "prompt": "trl",
    "completion": "trl",
    "response": "verl",
    "reward_model": "verl",
}
"""Column -> the format that has it."""
_OTHERS = {
    ("chosen", "rejected"): "rows that compare answers are no trajectories; keep the chosen answer alone:",
    ("instruction", "output"): "these are Alpaca's keys: --map prompt=instruction,answer=output leaves `input` out; or",
    (
        "query",
        "response",
    ): "these are ms-swift's keys of a query: --map prompt=query,answer=response leaves `history` out; or",
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
    row = source.row
    if row is None:
        names = ", ".join(file.name for file in source.files[:_SHOWN])
        if not names:
            return "it has no files"
        if not any(file.stat().st_size for file in source.files):
            return f"nothing but empty files ({names}); {_FORMS}"
        faults = (value.detail for value in source.first_values() if isinstance(value, Unreadable))
        fault = next(faults, f"{names}; {_FORMS}")
        return f"no row can be read ({fault})"
    keys = ", ".join(map(str, list(row)[:_SHOWN])) + (", ..." if len(row) > _SHOWN else "")
    values = ", ".join(f"{key} = {_shortened(value)}" for key, value in list(row.items())[:_VALUES])
    return f"its first row has {keys or 'no keys'} ({values}); {_nearest(row)}{_map(row)}"


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _map(row: Row) -> str:
    """Return the `--map` that fits the row's first list of messages; empty if it has none."""
    for path, message in _lists(row, ""):
        named = {text: key for key in message for text in ("role", "text") if key in _NAMES[text]}
        if len(named) == 2:
            return f"; or name its columns: --map messages={path},role={named['role']},text={named['text']}"
    return ""


def _lists(value: Any, path: str) -> Iterator[tuple[str, Row]]:
    """Yield the path and the first item of each list of objects, also within objects."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _lists(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield path, value[0]


def _nearest(row: Row) -> str:
    if advice := next(_renamed(row), None):
        return advice
    for keys, what in _OTHERS.items():
        if set(keys) <= set(row):
            return f"{what} write them as `messages` of {{role, content}} (format messages)"
    near = [(key, match[0]) for key in map(str, row) if (match := difflib.get_close_matches(key, _COLUMNS, n=1))]
    if near:
        key, column = near[0]
        missing = [other for other, name in _COLUMNS.items() if name == _COLUMNS[column] and other not in row]
        of = f"`{key}` for `{column}`" if key != column else f"without {' or '.join(f'`{m}`' for m in missing)}"
        return f"the nearest format is {_COLUMNS[column]}, {of}"
    return "the nearest format is messages, which has a column `messages` of {role, content}"


def _renamed(row: Row) -> Iterator[str]:
    """Yield what a column of messages under another name would have to be called."""
    for key, value in row.items():
        first: Any = value[0] if isinstance(value, list) and value else None
        if isinstance(first, list) and first:  # one level down
            first = first[0]
        if isinstance(first, dict) and "role" in first:
            yield f"the nearest format is messages: `{key}` holds chat messages, so call it `messages`"
        elif isinstance(first, dict) and "from" in first:
            yield f"the nearest format is sharegpt: `{key}` holds its messages, so call it `conversations`"
