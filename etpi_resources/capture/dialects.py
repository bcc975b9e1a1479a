"""The three HTTP interfaces that harnesses speak: chat completions, messages and responses.

`read` turns the body of a request into chat messages and tool schemas, `write` a turn into the answer's body and its
server-sent events. Chat messages are those of chat templates: {"role", "content", "tool_calls"?, "reasoning"?,
"tool_call_id"?}, a call's arguments as JSON text.

Sources: the API references of OpenAI (chat completions, responses) and Anthropic (messages), and the requests of the
harnesses that `etpi_assets.specs.harness` lists.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from etpi_resources.outside import loads

Message = dict[str, Any]
Event = tuple[str | None, Any]
"""The name of a server-sent event, None where the dialect names none, and its data."""

_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
"""A line that Claude Code puts before its system prompt. It differs from call to call and is no part of the prompt."""

HELPER_HEADERS = (
    "x-claude-code-agent-id",
    "x-codex-parent-thread-id",
    "x-openai-subagent",
    "x-parent-session-id",
)
"""Headers that a harness sends with requests of helpers alone."""

_NO_TEXT = ("image_url", "image", "input_image", "input_file", "document")


class Refused(Exception):
    """A request that is not sent on: the HTTP status of its answer, and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Asked:
    """A request in the form that all dialects share.

    Attributes:
        max_tokens: the most output tokens that the harness asks for, if it says so.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int | None


_ROLES = ("system", "user", "assistant", "tool")


def require_readable(query: Asked) -> None:
    """Raise ValueError, KeyError or TypeError for a request that no template could render, whatever its dialect."""
    if not query.messages:
        raise ValueError("it has no messages")
    for message in query.messages:
        if message["role"] not in _ROLES or not isinstance(message["content"], str):
            raise ValueError(f"a message has the unknown role {message['role']!r}, or its content is not text")
    for function in (tool["function"] for tool in query.tools):
        if not isinstance(function["name"], str) or not isinstance(function.get("parameters") or {}, Mapping):
            raise ValueError(f"the tool {function['name']!r} has no name, or its parameters are no schema")
    if query.max_tokens is not None and not (type(query.max_tokens) is int and query.max_tokens >= 0):
        raise ValueError(f"the most output tokens cannot be {query.max_tokens!r}")


@dataclass(frozen=True)
class Turn:
    """The model's answer to a request.

    Attributes:
        message: the assistant message.
        finish: "stop", "length" or "tool_calls".
        prompt_tokens, output_tokens: lengths in ids.
    """

    call_id: str
    message: Message
    finish: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Dialect:
    """One interface. `write` yields the whole answer first, then the events of a streamed one."""

    read: Callable[[Mapping[str, Any]], Asked]
    write: Callable[[Mapping[str, Any], Turn], Iterator[Event]]


def _text(content: Any) -> str:
    """Return the text of a message's content, which is text or a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if refused := next((part["type"] for part in content if part.get("type") in _NO_TEXT), None):
        raise Refused(400, f"content of type {refused} is not captured, only text")
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)


def _function(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    function = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": function}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parse_json(text: Any) -> Any:
    """Return the value of JSON text; the text itself if it is not JSON."""
    with suppress(ValueError, TypeError):
        return loads(text)
    return text


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    value = parse_json(call["function"]["arguments"])
    return value if isinstance(value, dict) else {}


# --- chat completions --------------------------------------------------------------------------------------------


def _read_chat(body: Mapping[str, Any]) -> Asked:
    messages = []
    for sent in body["messages"]:
        role = {"developer": "system", "function": "tool"}.get(sent["role"], sent["role"])
        message: Message = {"role": role, "content": _text(sent.get("content"))}
        if calls := sent.get("tool_calls"):
            message["tool_calls"] = [
                _call(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls
            ]
        if reasoning := sent.get("reasoning_content") or sent.get("reasoning"):
            message["reasoning"] = _text(reasoning)
        if role == "tool":
            message["tool_call_id"] = sent.get("tool_call_id")
        messages.append(message)
    tools = [tool for tool in body.get("tools") or () if tool.get("type") == "function"]
    return Asked(messages, tools, body.get("max_completion_tokens") or body.get("max_tokens"))


def _write_chat(body: Mapping[str, Any], turn: Turn) -> Iterator[Event]:
    message: Message = {"role": "assistant", "content": turn.message["content"]}
    if reasoning := turn.message.get("reasoning"):
        message["reasoning_content"] = reasoning
    calls = turn.message.get("tool_calls") or []
    usage = {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.output_tokens,
        "total_tokens": turn.prompt_tokens + turn.output_tokens,
    }
    head = {"id": turn.call_id, "created": int(time.time()), "model": body.get("model", "")}
    whole = message | ({"tool_calls": calls} if calls else {})
    choice = {"index": 0, "message": whole, "finish_reason": turn.finish, "logprobs": None}
    yield None, {**head, "object": "chat.completion", "choices": [choice], "usage": usage}

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> Event:
        choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
        return None, {**head, "object": "chat.completion.chunk", "choices": choices}

    yield chunk(message)
    for index, call in enumerate(calls):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, turn.finish)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield None, {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage}
    yield None, "[DONE]"


# --- messages ----------------------------------------------------------------------------------------------------


def _read_messages(body: Mapping[str, Any]) -> Asked:
    system = _BILLING.sub("", _text(body.get("system"))).lstrip("\n")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for sent in body["messages"]:
        content = sent["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        of_type = {kind: [block for block in blocks if block["type"] == kind] for kind in {b["type"] for b in blocks}}
        for block in of_type.get("tool_result", ()):
            result = _text(block.get("content"))
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
        texts = [block for block in blocks if block["type"] in ("text", *_NO_TEXT)]
        calls = [
            _call(block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))
            for block in of_type.get("tool_use", ())
        ]
        if not (texts or calls or sent["role"] == "assistant"):
            continue
        message: Message = {"role": sent["role"], "content": _text(texts)}
        if calls:
            message["tool_calls"] = calls
        if thinking := "\n".join(block["thinking"] for block in of_type.get("thinking", ())):
            message["reasoning"] = thinking
        messages.append(message)
    tools = [
        _function(tool["name"], tool.get("description"), tool["input_schema"])
        for tool in body.get("tools") or ()
        if "input_schema" in tool
    ]
    return Asked(messages, tools, body.get("max_tokens"))


_STOP_REASONS = {"tool_calls": "tool_use", "stop": "end_turn", "length": "max_tokens"}


def _write_messages(body: Mapping[str, Any], turn: Turn) -> Iterator[Event]:
    blocks: list[dict[str, Any]] = []
    if reasoning := turn.message.get("reasoning"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if content := turn.message["content"]:
        blocks.append({"type": "text", "text": content})
    for call in turn.message.get("tool_calls") or ():
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": _arguments(call)}
        )
    stop = _STOP_REASONS[turn.finish]
    usage = {"input_tokens": turn.prompt_tokens, "output_tokens": turn.output_tokens}
    head = {"id": turn.call_id, "type": "message", "role": "assistant", "model": body.get("model", "")}
    head["stop_sequence"] = None
    yield None, {**head, "content": blocks, "stop_reason": stop, "usage": usage}
    started = {**head, "content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    yield _event("message_start", message=started)
    for index, block in enumerate(blocks):
        yield from _block_events(index, block)
    yield _event("message_delta", delta={"stop_reason": stop, "stop_sequence": None}, usage=usage)
    yield _event("message_stop")


def _block_events(index: int, block: Mapping[str, Any]) -> Iterator[Event]:
    if block["type"] == "tool_use":
        empty = {**block, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
    else:
        key = block["type"]  # "text" or "thinking", also the name of the field
        empty = {**block, key: ""}
        delta = {"type": f"{key}_delta", key: block[key]}
    yield _event("content_block_start", index=index, content_block=empty)
    yield _event("content_block_delta", index=index, delta=delta)
    yield _event("content_block_stop", index=index)


def _event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind, **data}


# --- responses ---------------------------------------------------------------------------------------------------

_FREEFORM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_SEPARATOR = "__"
"""Between a namespace and the name of a tool in it."""


def _response_tools(tools: Sequence[Mapping[str, Any]], prefix: str = "") -> Iterator[dict[str, Any]]:
    """Yield functions: freeform tools take one text, namespaces are flattened, hosted tools are left out."""
    for tool in tools:
        if tool["type"] == "function":
            yield _function(prefix + tool["name"], tool.get("description"), tool.get("parameters"))
        elif tool["type"] == "custom":
            yield _function(prefix + tool["name"], tool.get("description"), _FREEFORM)
        elif tool["type"] == "namespace":
            yield from _response_tools(tool["tools"], tool["name"] + _SEPARATOR)


def _read_responses(body: Mapping[str, Any]) -> Asked:
    if body.get("previous_response_id"):
        raise Refused(400, "previous_response_id: the proxy keeps no responses; send the whole input")
    messages: list[Message] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    sent = body["input"]
    items = [{"type": "message", "role": "user", "content": sent}] if isinstance(sent, str) else sent
    turn: Message | None = None  # the assistant message that the last items belong to
    for item in items:
        kind = item.get("type", "message")
        if kind in ("reasoning", "function_call", "custom_tool_call") or item.get("role") == "assistant":
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add_item(turn, kind, item)
            continue
        turn = None
        if kind in ("function_call_output", "custom_tool_call_output"):
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        elif kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _text(item["content"])})
        else:
            raise Refused(400, f"items of type {kind} are not captured")
    return Asked(messages, list(_response_tools(body.get("tools") or ())), body.get("max_output_tokens"))


def _add_item(turn: Message, kind: str, item: Mapping[str, Any]) -> None:
    if kind == "reasoning":
        turn["reasoning"] = _text(item.get("content")) or _text(item.get("summary"))
    elif kind == "message":
        turn["content"] += _text(item["content"])
    else:
        freeform = kind == "custom_tool_call"
        arguments = json.dumps({"input": item["input"]}, ensure_ascii=False) if freeform else item["arguments"]
        namespace = item.get("namespace")
        name = f"{namespace}{_SEPARATOR}{item['name']}" if namespace else item["name"]
        turn.setdefault("tool_calls", []).append(_call(item["call_id"], name, arguments))


def _write_responses(body: Mapping[str, Any], turn: Turn) -> Iterator[Event]:
    items = list(_items(body, turn))
    usage = {
        "input_tokens": turn.prompt_tokens,
        "output_tokens": turn.output_tokens,
        "total_tokens": turn.prompt_tokens + turn.output_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    head = {"id": turn.call_id, "object": "response", "created_at": int(time.time()), "model": body.get("model", "")}
    head |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    whole = {**head, "status": "completed", "output": items, "usage": usage}
    if turn.finish == "length":
        whole |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    yield None, whole
    created = {"response": {**head, "status": "in_progress", "output": [], "usage": None}}
    events: list[tuple[str, dict[str, Any]]] = [("response.created", created)]
    for index, item in enumerate(items):
        begun = item | ({"content": []} if item["type"] == "message" else {})
        events.append(("response.output_item.added", {"output_index": index, "item": begun}))
        if item["type"] == "message":
            (part,) = item["content"]
            at = {"output_index": index, "content_index": 0, "item_id": item["id"]}
            events += [
                ("response.content_part.added", {**at, "part": {**part, "text": ""}}),
                ("response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}),
                ("response.output_text.done", {**at, "text": part["text"], "logprobs": []}),
                ("response.content_part.done", {**at, "part": part}),
            ]
        events.append(("response.output_item.done", {"output_index": index, "item": item}))
    events.append((f"response.{whole['status']}", {"response": whole}))
    for number, (kind, data) in enumerate(events):
        yield _event(kind, sequence_number=number, **data)


def _items(body: Mapping[str, Any], turn: Turn) -> Iterator[dict[str, Any]]:
    tools = body.get("tools") or ()
    flat = {tool["name"] for tool in tools if tool["type"] in ("function", "custom")}
    freeform = {tool["name"] for tool in tools if tool["type"] == "custom"}
    if reasoning := turn.message.get("reasoning"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        yield {"type": "reasoning", "id": _new("rs"), "summary": [], "content": content, "encrypted_content": None}
    if text := turn.message["content"]:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        yield {"type": "message", "id": _new("msg"), "role": "assistant", "status": "completed", "content": content}
    for call in turn.message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name in freeform:
            text = str(_arguments(call).get("input", ""))
            yield {"type": "custom_tool_call", "id": _new("ctc"), "call_id": call["id"], "name": name, "input": text}
            continue
        namespace, _, short = ("", "", name) if name in flat else name.rpartition(_SEPARATOR)
        item = {"type": "function_call", "id": _new("fc"), "call_id": call["id"], "name": short or name}
        item |= {"arguments": arguments, "status": "completed"}
        yield item | ({"namespace": namespace} if namespace else {})


def _new(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


DIALECTS: Mapping[str, Dialect] = {
    "chat/completions": Dialect(_read_chat, _write_chat),
    "messages": Dialect(_read_messages, _write_messages),
    "responses": Dialect(_read_responses, _write_responses),
}
"""The end of a request's path -> its dialect."""
