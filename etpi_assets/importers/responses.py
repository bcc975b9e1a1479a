"""Items of OpenAI's Responses API as messages; Codex and NeMo-Gym record them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from etpi_assets.importers.calls import content_text, read_calls, read_content, role_of
from etpi_assets.importers.conversation import Message, set_ids
from etpi_assets.importers.source import as_mapping, text_field, to_utc
from etpi_resources.rows.bounded import Unreadable

_CALLS = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "mcp_call": "arguments",
    "local_shell_call": "action",
    "tool_search_call": "arguments",
}
"""Kind of an item that is a call -> its key of the arguments."""
_SILENT = ("ghost_snapshot", "item_reference", "other", "web_search_call", "file_search_call", "image_generation_call",
           "additional_tools", "configuration_update", "compaction_trigger")  # fmt: skip
"""Kinds of items without text, or whose results stay with the provider."""


def response_messages(items: Iterable[Any], what: str, *, is_context: bool = False) -> list[Message]:
    """Parse items; those of one response (reasoning, text and calls in a row) are one message.

    Args:
        is_context: no item is a turn.

    Raises Unreadable: `unknown_form`, `unknown_role`, `non_text_content`, `bad_token_ids` or `bad_logprobs`.
    """
    entries: list[Message] = []
    is_open = False
    for number, raw in enumerate(items):
        name = f"{what}[{number}]"
        item = as_mapping(raw, name)
        kind = text_field(item, "type") or ("message" if "role" in item else "")
        if kind in _SILENT:
            continue
        role = "assistant" if kind in _CALLS or kind == "reasoning" else "tool"
        if kind == "message":
            known = role_of(item.get("role"), name)
            role = "assistant" if known == "calls" else known
        if role == "assistant":
            if not is_open:
                entries.append(Message("assistant", time=to_utc(item.get("timestamp")), trained=not is_context))
            _add(entries[-1], kind, item, name)
            is_open = entries[-1].output_ids is None
            continue
        is_open, at = False, to_utc(item.get("timestamp"))
        if kind in ("message", "agent_message"):  # of another agent
            role = role if kind == "message" else "user"
            entries.append(Message(role, content_text(item.get("content"), name), time=at))
        elif kind.endswith("_output"):
            output = json.dumps(item.get("tools")) if "tools" in item else _output(item.get("output"), name)
            entries.append(Message("tool", output, time=at, result_of=text_field(item, "call_id")))
        else:
            raise Unreadable("unknown_form", f"{name} is an item of type {kind!r}, which is not known")
    return entries


def _add(entry: Message, kind: str, item: Mapping[str, Any], name: str) -> None:
    if kind == "message":
        parts = read_content(item.get("content"), name)
        entry.text = "\n".join(text for text in (entry.text, parts.text) if text)
    elif kind == "reasoning":
        texts = (read_content(item.get(key), name) for key in ("content", "summary"))
        thought = next((text for t in texts if (text := "\n".join(filter(None, (t.thought, t.text))))), None)
        entry.thought = "\n".join(text for text in (entry.thought, thought) if text) or None
    else:
        arguments = item.get(_CALLS[kind])
        if kind == "custom_tool_call":
            arguments = {"input": arguments}
        called = text_field(item, "name") or kind.removesuffix("_call")
        call_id = text_field(item, "call_id") or text_field(item, "id")
        entry.calls += read_calls({"id": call_id, "name": called, "arguments": arguments}, name)
        if kind == "mcp_call" and item.get("output") is not None:
            raise Unreadable("unknown_form", f"{name} is a call whose result the provider added to the same response")
    if item.get("generation_token_ids"):
        ids, logprobs = item["generation_token_ids"], item.get("generation_log_probs")
        set_ids(entry, item.get("prompt_token_ids"), ids, logprobs, name)


def _output(value: Any, name: str) -> str:
    """Return the text of a result: text, parts of text, or an object that has it as its content."""
    if isinstance(value, dict):
        value = value.get("content") if isinstance(value.get("content"), str | list) else json.dumps(value)
    return content_text(value, name)
