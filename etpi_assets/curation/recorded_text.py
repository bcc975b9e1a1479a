"""The checks of recorded ids against recorded text, and of calls against the tools that their prompts offer.

Both read the recorded tables and the finished pairs, so that they find what the code that builds pairs gets wrong.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.checks import OnHit, faulty, ignore, judged
from etpi_assets.trajectories.calls import flat_calls, stored_call
from etpi_assets.trajectories.tables import Key, turn_keys
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.marks import THINK_END
from etpi_resources.chat.tool_forms import Call, parse_structured
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.token_ids import arrays

_SHOWN = 60
"""Characters shown of a text."""
_SPLIT = 100
"""Turns of a block whose text is encoded again."""
_SCHEMA = re.compile(r'"parameters": ?\{')
_TAGS = re.compile(r"</?think>")


def text_figures(turns: pa.Table, messages: pa.Table, pairs: pa.Table, chat: ChatFormat) -> dict[str, Any]:
    """Compare the recorded ids of each trained turn with its recorded text and calls.

    The ids must have all of the text and thoughts, and the names and texts of structured calls; without a call, they
    must have nothing else. Other white space, other ids than the tokenizer's for the same text (of the first `_SPLIT`
    turns), and text that was not recorded are counted.

    Args:
        turns: with the columns `output_ids`, `content` and `reasoning`.
    """
    wanted = set(turn_keys(pairs.filter(pc.field("capture") == "native")))
    if not wanted:
        return {"native": 0}
    figures = {"native": len(wanted), "without_text": 0, "text_unchecked": 0, "own_white_space": 0}
    wrong: list[str] = []
    rows = turns.select(["content", "reasoning"]).to_pylist()
    spoken = messages.filter(pc.field("tool_calls").is_valid() & pc.field("turn").is_valid())
    calls: defaultdict[Key, list[Any]] = defaultdict(list)
    for key, text in zip(turn_keys(spoken), spoken["tool_calls"].to_pylist(), strict=True):
        calls[key] += json.loads(text)
    outputs = (ids for chunk in turns["output_ids"].chunks for ids in arrays(chunk))
    split: list[list[int]] = []
    for key, row, output in zip(turn_keys(turns), rows, outputs, strict=True):
        if key not in wanted or output is None:
            continue
        text, ids = row["content"] or row["reasoning"], chat.without_end(output.tolist())
        decoded = chat.decode(ids, skip_special=True)
        if len(split) < _SPLIT:
            split.append(ids)
        if not text and key not in calls:
            figures["without_text"] += 1
            figures["text_unchecked"] += bool(decoded.strip())
            continue
        problem = text and _difference(row, decoded, chat, called=key in calls)
        if text and not problem:
            parts = ((row[name] or "").strip() for name in ("content", "reasoning"))
            figures["own_white_space"] += not all(part in decoded for part in parts)
        if problem := problem or _missing_call(calls.get(key, ()), output, chat):
            wrong.append(f"{'/'.join(map(str, key))}: {problem}")
    again = chat.encode_all([chat.decode(ids) for ids in split])
    own_splits = sum(a != b for a, b in zip(again, split, strict=True))
    return {**figures, "wrong": faulty(wrong), "split": len(split), "own_splits": own_splits}


def _difference(row: Mapping[str, Any], decoded: str, chat: ChatFormat, *, called: bool) -> str | None:
    """Return the difference between the ids' text and the recorded text, None if they are equal.

    Args:
        decoded: the text of the ids, without control tokens.
        called: the turn has a recorded call.
    """
    content, reasoning = row["content"] or "", row["reasoning"] or ""
    if "\ufffd" in decoded:
        decoded = decoded.replace("\ufffd", "")
        content, reasoning = content.replace("\ufffd", ""), reasoning.replace("\ufffd", "")
    flat = next((start for start, _, _ in flat_calls(content)), None)
    # A harness may record a turn without its thoughts; the ids then have more.
    whole = reasoning or THINK_END in content
    written, left = _squeezed(decoded), _squeezed(decoded if whole else decoded.rpartition(THINK_END)[2])
    for part in (content[:flat], reasoning):
        squeezed = _squeezed(part)
        if squeezed not in written:
            return f"the ids are {decoded[:_SHOWN]!r}, the recorded text is {part[:_SHOWN]!r}"
        left = left.replace(squeezed, "", 1)
    if left and flat is None and chat.chatml and not (called and _CALL.search(decoded)):
        return f"the ids have {left[:_SHOWN]!r} besides the recorded text {content[:_SHOWN]!r}"
    return None


def _missing_call(calls: Iterable[Any], output: np.ndarray, chat: ChatFormat) -> str | None:
    """Return which text of a recorded call the ids lack, as it is or as JSON escapes it; None if they lack none."""
    forms = [chat.decode(output.tolist())]
    for _ in range(2):  # arguments that are JSON text within JSON are escaped twice
        forms.append(_ESCAPES.sub(lambda match: json.loads(f'"{match[0]}"'), forms[-1]))
    written = [_squeezed(form) for form in forms]
    for call in map(parse_structured, calls):
        texts = [call.name, *_strings(dict(call.arguments))] if isinstance(call, Call) else []
        for text in texts:
            if not any(_squeezed(text) in form for form in written):
                return f"the ids are {forms[0][:_SHOWN]!r}, a recorded call has {text[:_SHOWN]!r}"
    return None


_ESCAPES = re.compile(r'(?:\\u[0-9a-fA-F]{4})+|\\["\\/bfnrt]')


def _strings(value: Any) -> Iterable[str]:
    """Return the texts within a JSON value."""
    if isinstance(value, str):
        return [value]
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for item in inside for text in _strings(item)]


_CALL = re.compile(r"<tool_call>|<function=|<\|tool_call")


def _squeezed(text: str) -> str:
    """Return a text without white space and think tags, in Unicode's composed form."""
    return "".join(unicodedata.normalize("NFC", _TAGS.sub("", text)).split())


def text_outcome(counted: Mapping[str, Any]) -> CheckOutcome:
    """Judge the figures."""
    return judged("recorded_text", counted, with_text=counted["native"] - counted.get("without_text", 0))


def tool_figures(
    block: Mapping[str, pa.Table],
    pairs: pa.Table,
    tools: Sequence[Any] | None,
    chat: ChatFormat,
    hit: OnHit = ignore,
) -> dict[str, Any]:
    """Count the labels with calls, and those whose prompts offer no tool.

    A tool is offered by a schema, or by its name in a message before the first turn, because some prompts describe
    tools in words.

    Args:
        tools: the schemas that all prompts offer; None for each rollout's own.
    """
    recorded = dict(zip(*(block["rollouts"][name].to_pylist() for name in ("rollout_id", "tools")), strict=True))
    described: defaultdict[tuple[str, str], str] = defaultdict(str)
    calls: defaultdict[Key, list[str]] = defaultdict(list)
    answered: set[tuple[str, str]] = set()
    columns = ["rollout_id", "agent_id", "turn", "role", "kind", "content", "tool_calls"]
    for row in block["messages"].select(columns).to_pylist():
        agent = row["rollout_id"], row["agent_id"]
        if row["kind"] == "action":
            answered.add(agent)
            flat = [] if chat.calls_in_content else [call.name for *_, call in flat_calls(row["content"] or "")]
            names = (stored_call(call).name for call in json.loads(row["tool_calls"] or "[]"))
            calls[*agent, row["turn"]] += [*filter(None, names), *flat]
        elif agent not in answered and row["role"] != "assistant":
            described[agent] += row["content"] or ""
    calling, unoffered, unknown = 0, list[str](), Counter[str]()
    for key in turn_keys(pairs):
        if not (names := calls[key]):
            continue
        calling += 1
        if tools or json.loads(recorded[key[0]] or "null"):
            continue
        words = {name: re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE) for name in names}
        if strange := [name for name in names if not words[name].search(described[key[:2]])]:
            # A prompt that shows schemas in its text offers other tools.
            shown = "not_offered" if _SCHEMA.search(described[key[:2]]) else "no_tools"
            hit("/".join(map(str, key)), shown, f"calls {', '.join(strange)}", strange[0])
            unknown.update(strange)
            unoffered.append("/".join(map(str, key)))
    return {"calling": calling, "unoffered": faulty(unoffered), "names": dict(unknown)}


_COLUMNS = ("rollout_id", "agent_id", "turn", "role", "tool_calls")


def result_figures(messages: pa.Table, pairs: pa.Table, hit: OnHit = ignore) -> dict[str, Any]:
    """Count the trained agents with structured calls, and those with calls whose results are missing or too many.

    The calls of a response are compared with the messages up to the next response: a message of a tool for each call,
    one for all of them, or a user's message, in which some agents show results. After the last response there may be
    none. Agents with recorded ids are not judged, nor responses whose calls, if they have any, are in their text.

    Args:
        messages: with the columns rollout_id, agent_id, turn, role and tool_calls, in the order of the conversations.
    """
    keys = zip(*(pairs[name].to_pylist() for name in ("rollout_id", "agent_id", "capture")), strict=True)
    rendered = {(rollout, agent) for rollout, agent, capture in keys if capture != "native"}
    calling, without_results = 0, list[str]()
    rows = messages.select(list(_COLUMNS)).to_pylist()
    for agent, group in groupby(rows, lambda row: (row["rollout_id"], row["agent_id"])):
        conversation = list(group)
        if agent not in rendered or not any(row["tool_calls"] for row in conversation):
            continue
        calling += 1
        if (place := unanswered(conversation)) is not None:
            hit("/".join(agent), "unanswered", place)
            without_results.append(f"{'/'.join(agent)}: {place}")
    return {"calling": calling, "unanswered": faulty(without_results)}


def unanswered(conversation: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the first response whose calls have no result, or a number of results that fits no way to answer."""
    calls, results, words, turn = 0, 0, 0, None
    for row in conversation:
        if row["role"] != "assistant":
            results += row["role"] == "tool"
            words += row["role"] != "tool"
            continue
        begins = results or words or row["turn"] != turn
        if begins and calls and (results > calls or 1 < results < calls or not (results or words)):
            return f"turn {turn} has {calls} calls and {results} results"
        calls, results, words = (0, 0, 0) if begins else (calls, results, words)
        calls, turn = calls + len(_listed(row["tool_calls"])), row["turn"]
    return None


def _listed(calls: Any) -> list[Any]:
    return json.loads(calls) if isinstance(calls, str) else calls or []
