"""OpenHands: evaluation rows with an event `history` (old and new events), data sets with a `trajectory` column, and
saved trajectories, which are arrays of events.

The calls of one response are several events with the same response id; they become one turn. A condensed history is
refused, because the file does not hold the prompts of the later turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, takewhile
from typing import Any

from etpi_assets.importers.calls import content_text, count_keys, listed, read_calls, read_tools
from etpi_assets.importers.conversation import Message, Options
from etpi_assets.importers.format import Row
from etpi_assets.importers.generic import read_messages, solo
from etpi_assets.importers.run_info import run_info
from etpi_assets.importers.source import as_mapping, field, int32_field, text_field, to_utc
from etpi_assets.importers.spec import load
from etpi_assets.trajectories.calls import ToolCall
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.rows.bounded import Unreadable

_SILENT = ("agent_state_changed", "change_agent_state", "null", "recall", "ConversationStateUpdateEvent", "PauseEvent",
           "LLMCompletionLogEvent", "TokenEvent", "CondensationRequest", "condensation_request",
           "HookExecutionEvent")  # fmt: skip
"""Kinds of events that add no message to the prompt."""
_BOOKKEEPING = (
    "thought", "keep_prompt", "is_confirmed", "confirmation_state", "action_risk", "security_risk", "kernel_init_code",
    "hidden", "blocking", "background", "images_urls", "image_urls", "file_urls", "wait_for_response", "impl_source",
    "translated_ipython_code", "is_input", "is_static", "include_extra", "task_completed", "final_thought",
)  # fmt: skip
"""Arguments of an action that the model did not write, or wrote as its text."""
_WITHOUT_ARGUMENTS = ("finish", "reject", "think")
_OF_EVENT = frozenset({"action", "id", "source", "timestamp", "cause", "message", "llm_metrics", "tool_call_metadata"})
_CONDENSED = ("condensation", "condense", "agent_condensation", "Condensation", "CondensationSummaryEvent")


def claims(row: Row) -> bool:
    """Alpaca's rows have a `history` of texts, those of verifiers a `trajectory` beside their messages."""
    if is_part(row):
        return True
    answered = any(key in row for key in ("output", "response", "completion", "messages"))
    return not answered and ("history" in row or "trajectory" in row)


def is_part(row: Any) -> bool:
    kinds = ("action", "observation", "kind")
    return isinstance(row, dict) and row.keys() >= {"id", "timestamp", "source"} and any(key in row for key in kinds)


def record(row: Row, where: str, options: Options) -> RolloutRecord:
    """Read a row. Raises Unreadable: `errored`, `empty`, `compacted`, `unknown_form`, `unknown_role`."""
    spec, name = load("openhands")[0], f"{where}, {'trajectory' if row.get('history') is None else 'history'}"
    items = listed(spec.first("run", "messages", row) or [], name)
    if items and isinstance(items[0], dict) and items[0].get("role") is not None:
        entries = read_messages(items, name, spec, options.unread)
        return solo(entries, run_info(row, options, spec, shown=entries), where, options)
    # Old files have pairs of events.
    flat = chain.from_iterable(event if isinstance(event, list) else (event,) for event in items)
    events = [as_mapping(event, f"{name}[{index}]") for index, event in enumerate(flat)]
    # The oldest events hold their arguments themselves.
    count_keys([e for e in events if "args" in e or "kind" in e], "openhands", options.unread)
    entries = _events(events, name, text_field(row, "instruction"))
    info = run_info(row, options, spec, shown=entries)
    models = (text_field(event, "tool_call_metadata", "model_response", "model") for event in events)
    info.rollout.teacher = info.rollout.teacher or next(filter(None, models), None)
    info.rollout.tools = info.rollout.tools or _offered(events, where)
    return solo(entries, info, where, options)


def _offered(events: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]] | None:
    """Return the tool schemas of the system event; None if there are none, or mere descriptions of classes."""
    for event in events:
        for tools in (field(event, "args", "tools"), event.get("tools")):
            schemas = read_tools(tools, f"{where}, tools")
            if schemas and all("function" in tool or "parameters" in tool for tool in schemas):
                return schemas
    return None


def _events(events: Sequence[Mapping[str, Any]], name: str, instruction: str | None) -> list[Message]:
    entries: list[Message] = []
    responses: dict[str, Message] = {}
    for index, event in enumerate(events):
        kind = text_field(event, "kind") or text_field(event, "action") or text_field(event, "observation")
        if kind in _CONDENSED:
            why = "the history was condensed, so what later turns read is lost; run without"
            raise Unreadable("compacted", f"{name}[{index}]: {why}")
        if kind in _SILENT or (kind is None and not event.get("content")):
            continue
        entry = _event(event, f"{name}[{index}]", responses)
        if entry is not None:
            entry.time = entry.time or to_utc(event.get("timestamp"))
            entries.append(entry)
    before = takewhile(lambda entry: entry.role != "assistant", entries)
    if instruction and not any(entry.role == "user" for entry in before):
        entries.insert(sum(1 for entry in entries[:1] if entry.role == "system"), Message("user", instruction))
    return entries


def _event(event: Mapping[str, Any], name: str, responses: dict[str, Message]) -> Message | None:
    """Return the message of an event; None if an earlier event gave the same response.

    Args:
        responses: response id, or name of the event if it has none -> its message so far; added to.
    """
    if (kind := text_field(event, "kind")) is not None:
        return _new_event(kind, event, name, responses)
    if (action := text_field(event, "action")) is None:
        answers = text_field(event, "tool_call_metadata", "tool_call_id")
        text = _as_read(content_text(event.get("content"), name), field(event, "extras", "metadata"))
        failed = text_field(event, "observation") == "error"
        if failed:
            text += "\n[Error occurred in processing last action]"
        # Of a call that OpenHands could not read: it keeps no action of it, and the model read the words of a user.
        role = "user" if failed and answers is None and responses else "tool"
        return Message(role, text, exit_code=_code(event), result_of=answers)
    arguments = event.get("args")
    if not isinstance(arguments, dict):  # the oldest events hold their arguments themselves
        arguments = {key: value for key, value in event.items() if key not in _OF_EVENT}
    if action == "system":
        return Message("system", content_text(arguments.get("content"), name))
    # Without a source, only the agent waits for a response.
    source = text_field(event, "source") or ("agent" if arguments.get("wait_for_response") is True else "user")
    if action == "message" and source == "user":
        return Message("user", content_text(arguments.get("content"), name))
    response = field(event, "tool_call_metadata", "model_response")
    choices = field(response, "choices")
    if isinstance(choices, list) and choices:
        key = text_field(response, "id") or name
        if key in responses:
            return None
        message = field(choices[0], "message")
        message = {"content": "", **(message if isinstance(message, dict) else {}), "role": "assistant"}
        (responses[key],) = read_messages([{**message, "finish_reason": field(choices[0], "finish_reason")}], name)
        return responses[key]
    if action == "message":
        return Message("assistant", content_text(arguments.get("content"), name))
    return Message("assistant", text_field(arguments, "thought") or "", _rebuilt(action, arguments, name))


def _rebuilt(action: str, arguments: Mapping[str, Any], name: str) -> list[ToolCall]:
    """Return the call of an action whose response was not recorded."""
    kept = {key: value for key, value in arguments.items() if key not in _BOOKKEEPING and value is not None}
    if not kept and action not in _WITHOUT_ARGUMENTS:
        raise Unreadable("unknown_form", f"{name} is the action {action!r} without arguments in `args` or beside it")
    if action == "call_tool_mcp" and (tool := text_field(kept, "name")):
        return read_calls({"name": tool, "arguments": kept.get("arguments")}, name)
    return read_calls({"name": "execute_bash" if action == "run" else action, "arguments": kept}, name)


def _new_event(kind: str, event: Mapping[str, Any], name: str, responses: dict[str, Message]) -> Message | None:
    if kind == "SystemPromptEvent":
        return Message("system", content_text(event.get("system_prompt"), name))
    if kind == "MessageEvent":
        message = as_mapping(event.get("llm_message"), f"{name}.llm_message")
        return read_messages([message], f"{name}.llm_message")[0]
    if kind == "ActionEvent":
        calls = read_calls(event.get("tool_call") or _own_call(event), name)
        key = text_field(event, "llm_response_id") or name
        if key in responses:
            responses[key].calls += calls
            return None
        thought, reasoning = content_text(event.get("thought"), name), text_field(event, "reasoning_content")
        responses[key] = Message("assistant", thought, calls, reasoning)
        return responses[key]
    if (observation := event.get("observation")) is not None:
        text = observation.get("content", observation.get("output")) if isinstance(observation, dict) else observation
        text = _as_read(content_text(text, name), field(observation, "metadata"))
        return Message("tool", text, exit_code=_code(observation), result_of=text_field(event, "tool_call_id"))
    for key in ("error", "rejection_reason", "detail"):
        if (text := text_field(event, key)) is not None:
            return Message("tool", text, result_of=text_field(event, "tool_call_id"))
    raise Unreadable("unknown_form", f"{name} is an event of kind {kind!r}, which is not known")


def _own_call(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the call of an event that holds the tool's name and the parsed action, not the call as written."""
    name, action = text_field(event, "tool_name"), event.get("action")
    if name is None or not isinstance(action, dict):
        return None
    arguments = {key: value for key, value in action.items() if key != "kind" and value is not None}
    return {"id": event.get("tool_call_id"), "name": name, "arguments": arguments}


def _as_read(text: str, metadata: Any) -> str:
    """Return a command's output as the model read it: OpenHands records what it adds to the output beside it."""
    if not isinstance(metadata, dict) or "suffix" not in metadata:
        return text
    code = int32_field(metadata, "exit_code")
    notes = (
        ("Current working directory:", text_field(metadata, "working_dir")),
        ("Python interpreter:", text_field(metadata, "py_interpreter_path")),
        ("Command finished with exit code", None if code == -1 else code),
    )
    lines = [f"\n[{note} {value}]" for note, value in notes if value is not None]
    return "".join([text_field(metadata, "prefix") or "", text, text_field(metadata, "suffix") or "", *lines])


def _code(event: Any) -> int | None:
    places = (("extras", "metadata"), ("extras",), (), ("metadata",))
    codes = (int32_field(event, *place, "exit_code") for place in places)
    return next((code for code in codes if code is not None), None)
