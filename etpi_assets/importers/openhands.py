"""OpenHands: evaluation rows with an event `history` (old and new events), data sets with a `trajectory` column, and
saved trajectories, which are arrays of events.

The calls of one response are several events with the same response id; they become one turn. A condensed history is
refused, because the file does not hold the prompts of the later turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any

from etpi_assets.importers.calls import content_text, listed, read_calls, read_tools
from etpi_assets.importers.conversation import Options
from etpi_assets.importers.format import FormatDoc, Row, row_format
from etpi_assets.importers.generic import read_messages, solo
from etpi_assets.importers.normal import Message
from etpi_assets.importers.run_info import run_info
from etpi_assets.importers.source import Unreadable, as_mapping, field, int32_field, number_field, text_field, to_utc
from etpi_assets.trajectories.calls import ToolCall
from etpi_assets.trajectories.records import RolloutRecord

_SILENT = ("agent_state_changed", "change_agent_state", "null", "recall", "ConversationStateUpdateEvent", "PauseEvent",
           "LLMCompletionLogEvent", "TokenEvent", "CondensationRequest", "condensation_request",
           "HookExecutionEvent")  # fmt: skip
"""Kinds of events that add no message to the prompt."""
_BOOKKEEPING = frozenset(
    {
        "thought",
        "keep_prompt",
        "is_confirmed",
        "confirmation_state",
        "action_risk",
        "security_risk",
        "kernel_init_code",
        "hidden",
        "blocking",
        "background",
        "images_urls",
        "image_urls",
        "file_urls",
        "wait_for_response",
        "impl_source",
        "translated_ipython_code",
        "is_input",
        "is_static",
        "include_extra",
        "task_completed",
        "final_thought",
    }
)
"""Arguments of an action that the model did not write, or wrote as its text."""
_WITHOUT_ARGUMENTS = ("finish", "reject", "think")
_OF_EVENT = frozenset({"action", "id", "source", "timestamp", "cause", "message", "llm_metrics", "tool_call_metadata"})
_READ = ("history", "trajectory", "instruction", "instance", "metadata", "test_result", "report", "error", "metrics")
"""Columns that are read here, or hold counts and the configuration."""
_CONDENSED = ("condensation", "condense", "agent_condensation", "Condensation", "CondensationSummaryEvent")


def claims(row: Row) -> bool:
    """Alpaca's rows have a `history` of texts, those of verifiers a `trajectory` beside their messages."""
    if _is_event(row):
        return True
    answered = any(key in row for key in ("output", "response", "completion", "messages"))
    return not answered and ("history" in row or "trajectory" in row)


def _is_event(row: Any) -> bool:
    kinds = ("action", "observation", "kind")
    return isinstance(row, dict) and row.keys() >= {"id", "timestamp", "source"} and any(key in row for key in kinds)


def record(row: Row, where: str, options: Options) -> RolloutRecord:
    """Read a row. Raises Unreadable: `errored`, `empty`, `compacted`, `unknown_form`, `unknown_role`."""
    error = text_field(row, "error")
    info = run_info(row, options, reads=_READ)
    info = replace(
        info,
        patch=info.patch or text_field(row, "test_result", "git_patch"),
        repo=info.repo if info.repo != "unknown" else text_field(row, "instance", "repo") or "unknown",
        teacher=info.teacher
        or text_field(row, "metadata", "llm_config", "model")
        or text_field(row, "metadata", "llm", "model"),
        reward=info.reward if info.reward is not None else _resolved(row),
    )
    name = "history" if row.get("history") is not None else "trajectory"
    items = listed(row.get(name) or [], f"{where}, {name}")
    if not items:
        raise Unreadable("errored" if error else "empty", f"{where}: no event{f'; {error[:300]}' if error else ''}")
    if isinstance(items[0], dict) and items[0].get("role") is not None:
        entries = read_messages([_with_content(m) for m in items], f"{where}, {name}")
    else:
        events = _listed(items, f"{where}, {name}")
        entries = _events(events, f"{where}, {name}", text_field(row, "instruction"))
        models = (text_field(event, "tool_call_metadata", "model_response", "model") for event in events)
        teacher = info.teacher or next((model for model in models if model), None)
        info = replace(info, tools=info.tools or _offered(events, where), teacher=teacher)
    rollout = solo(entries, info, where, options)
    rollout.error = error
    return rollout


def _resolved(row: Row) -> float | None:
    stated = (field(row, "report", "resolved"), field(row, "test_result", "report", "resolved"))
    verdict = next((value for value in stated if isinstance(value, bool)), None)
    return number_field(row, "test_result", "reward") if verdict is None else float(verdict)


def _with_content(message: Any) -> Any:
    """Set `content` of messages that call it `text`, with the system prompt in a key of its own."""
    if isinstance(message, dict) and "content" not in message and "text" in message:
        return {**message, "content": message["text"] if message["text"] is not None else message.get("system_prompt")}
    return message


def _listed(items: Sequence[Any], name: str) -> list[Mapping[str, Any]]:
    """Return the events, which old files hold in pairs."""
    events = chain.from_iterable(event if isinstance(event, list) else (event,) for event in items)
    return [as_mapping(event, f"{name}[{index}]") for index, event in enumerate(events)]


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
            raise Unreadable(
                "compacted",
                f"{name}[{index}]: the history was condensed, so what later turns read is lost; run without",
            )
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
    kind = text_field(event, "kind")
    if kind is not None:
        return _new_event(kind, event, name, responses)
    action = text_field(event, "action")
    if action is None:
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
        (responses[key],) = read_messages([{"role": "assistant", **_response_keys(choices[0])}], name)
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
        return read_calls([{"function": {"name": tool, "arguments": kept.get("arguments")}}], name)
    return read_calls([{"function": {"name": "execute_bash" if action == "run" else action, "arguments": kept}}], name)


def _response_keys(choice: Any) -> dict[str, Any]:
    message = field(choice, "message")
    keys = ("content", "tool_calls", "reasoning_content")
    values = {key: message.get(key) for key in keys} if isinstance(message, dict) else {"content": ""}
    return {**values, "finish_reason": field(choice, "finish_reason")}


def _new_event(kind: str, event: Mapping[str, Any], name: str, responses: dict[str, Message]) -> Message | None:
    if kind == "SystemPromptEvent":
        return Message("system", _text(event.get("system_prompt"), name))
    if kind == "MessageEvent":
        message = as_mapping(event.get("llm_message"), f"{name}.llm_message")
        return read_messages([message], f"{name}.llm_message")[0]
    if kind == "ActionEvent":
        call = event.get("tool_call")
        calls = read_calls([_call(call)] if isinstance(call, dict) else _own_call(event), name)
        key = text_field(event, "llm_response_id")
        if key and key in responses:
            earlier = responses[key]
            earlier.calls += calls
            return None
        entry = Message(
            "assistant", content_text(event.get("thought"), name), calls, text_field(event, "reasoning_content")
        )
        if key:
            responses[key] = entry
        return entry
    if (observation := event.get("observation")) is not None:
        text = observation.get("content", observation.get("output")) if isinstance(observation, dict) else observation
        answers = text_field(event, "tool_call_id")
        text = _as_read(_text(text, name), field(observation, "metadata"))
        return Message("tool", text, exit_code=_code(observation), result_of=answers)
    for key in ("error", "rejection_reason", "detail"):
        if (text := text_field(event, key)) is not None:
            return Message("tool", text, result_of=text_field(event, "tool_call_id"))
    raise Unreadable("unknown_form", f"{name} is an event of kind {kind!r}, which is not known")


def _own_call(event: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the call of an event that holds the tool's name and the parsed action, not the call as written."""
    name, action = text_field(event, "tool_name"), event.get("action")
    if name is None or not isinstance(action, dict):
        return None
    arguments = {key: value for key, value in action.items() if key != "kind" and value is not None}
    return [{"id": event.get("tool_call_id"), "function": {"name": name, "arguments": arguments}}]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call as {"id", "function"}, from that form or from {"id", "name", "arguments"}."""
    if "function" in call:
        return dict(call)
    return {"id": call.get("id"), "function": {"name": call.get("name"), "arguments": call.get("arguments")}}


def _text(value: Any, name: str) -> str:
    return content_text([value] if isinstance(value, dict) else value, name)


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


FORMAT = row_format(
    "openhands",
    FormatDoc(
        title="OpenHands: evaluation rows with an event `history` (old and new events), data sets with a "
        "`trajectory` of messages, and saved trajectories, which are one array of events",
        keeps="messages, calls, tool schemas (of the system event, or a `tools` column), answers in words as turns, "
        "reasoning, observations with exit codes, times, patch, verdict, model, task and repository; the calls of one "
        "response are one turn",
        loses="state changes, recalls, costs, the configuration; a condensed history is quarantined",
        files="`.jsonl`, `.json`, `.parquet`, `.arrow`; text also with `.gz` or `.zst`; one rollout per row, or per "
        "array of events",
    ),
    claims=claims,
    record=record,
    part=(_is_event, "history"),
)
