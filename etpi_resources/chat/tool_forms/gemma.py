"""Gemma 4's form: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:3}<tool_call|>`, keys in alphabetical order."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etpi_resources.chat.tool_forms.call import (
    BAD_JSON,
    UNCLOSED_CALL,
    Call,
    ParsedCall,
    ToolForm,
)

OPENING, CLOSING, QUOTE = "<|tool_call>call:", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"([\w.\-]{1,128})\{")
_KEY = re.compile(r"\s*([^\s:{}\[\],<]{1,256}):")
_SCALAR = re.compile(r"[^,{}\[\]<]{1,64}")
_DEPTH = 64
"""Values that are nested more deeply are not read."""


class _Unreadable(Exception):
    pass


def _render(calls: Sequence[Call]) -> str:
    return "".join(f"{OPENING}{call.name}{_value(call.arguments)}{CLOSING}" for call in calls)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        pairs = sorted(value.items(), key=lambda pair: str(pair[0]).lower())  # as Jinja's `dictsort`
        return "{" + ",".join(f"{key}:{_value(item)}" for key, item in pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_value, value)) + "]"
    return json.dumps(value)


def _parse(text: str) -> list[ParsedCall]:
    calls: list[ParsedCall] = []
    at = text.find(OPENING)
    while at >= 0:
        start = at + len(OPENING)
        name = _NAME.match(text, start)
        if name is None:
            calls.append(BAD_JSON)
            at = text.find(OPENING, start)
            continue
        try:
            arguments, end = _read(text, name.end() - 1, 0)
        except _Unreadable:
            calls.append(BAD_JSON)
            at = text.find(OPENING, name.end())
            continue
        calls.append(Call(name[1], arguments) if text.startswith(CLOSING, end) else UNCLOSED_CALL)
        at = text.find(OPENING, end)
    return calls


def _read(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Return the value at `at` and the position after it."""
    if depth > _DEPTH:
        raise _Unreadable
    if text.startswith(QUOTE, at):
        end = text.find(QUOTE, at + len(QUOTE))
        if end < 0:
            raise _Unreadable
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    if text.startswith("{", at):
        return _read_object(text, at + 1, depth)
    if text.startswith("[", at):
        return _read_list(text, at + 1, depth)
    scalar = _SCALAR.match(text, at)
    try:
        return json.loads(scalar[0] if scalar else ""), scalar.end() if scalar else at
    except ValueError:
        raise _Unreadable from None


def _read_object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    while not text.startswith("}", at):
        key = _KEY.match(text, at)
        if key is None:
            raise _Unreadable
        values[key[1]], at = _read(text, key.end(), depth + 1)
        at = _next(text, at, "}")
    return values, at + 1


def _read_list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    while not text.startswith("]", at):
        value, at = _read(text, at, depth + 1)
        values.append(value)
        at = _next(text, at, "]")
    return values, at + 1


def _next(text: str, at: int, closing: str) -> int:
    """Return the position of the next item, or of the closing bracket."""
    if text.startswith(",", at):
        return at + 1
    if not text.startswith(closing, at):
        raise _Unreadable
    return at


GEMMA = ToolForm("gemma", _render, _parse, marker=OPENING, servers=("gemma4",))
