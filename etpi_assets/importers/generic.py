"""Read conversations by a format that is data: every key of a row and of a message fills a slot, or is counted."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from etpi_assets.importers.calls import (
    Content,
    calls_with_results,
    parameters_of,
    read_calls,
    read_content,
    read_tools,
    result_text,
    role_of,
)
from etpi_assets.importers.conversation import Message, Options, Role, RunInfo, fill_agent, finish_of, token_ids
from etpi_assets.importers.responses import response_messages
from etpi_assets.importers.run_info import add_usage, build_rollout, exit_by_action, run_info, sampler_of
from etpi_assets.importers.source import as_list, as_mapping, field, text_field, to_utc, without_padding
from etpi_assets.importers.spec import Spec, Unread, at, base, json_value, silent
from etpi_assets.importers.token_rows import labelled_ids
from etpi_assets.trajectories.records import Action, AgentRecord, RolloutRecord
from etpi_resources.chat.tool_forms.call import tool_name
from etpi_resources.rows.bounded import Unreadable

_TRUTH = {**dict.fromkeys(("true", "yes", "1", "1.0"), True), **dict.fromkeys(("false", "no", "0", "0.0"), False)}
_SPOKEN = frozenset(("system", "user", "assistant", "tool"))
_FLAGS = frozenset(("trained", "untrained", "partly"))
_RETURNCODE = re.compile(r"\s*<returncode>(-?\d{1,7})</")
"""The exit code of a command, as mini-swe-agent prints it."""


def read_run(
    row: Any, spec: Spec, where: str, options: Options, place: Mapping[str, str] | None = None
) -> RolloutRecord:
    """Read a row of a format.

    Args:
        place: "@file" and "@folder" -> names of the file and its folder, for ids.

    Raises Unreadable: a reason of the format's `refuse`, `empty`, `no_prompt`, or as `read_messages` and `run_info`.
    """
    for path, rule in spec.refused:
        if (value := at(row, path)) and isinstance(value, str | list | dict):
            remedy = rule.get("remedy", "")
            keys = ", ".join(".".join(map(str, p)) for p, other in spec.refused if other is rule and at(row, p))
            raise Unreadable(rule["reason"], f"{where} {rule['text']} ({keys or path}){remedy}")
    messages = _conversation(row, spec, where, options)
    info = run_info(row, options, spec, place, shown=messages)
    system = next((v for path in spec.paths["run"].get("system", ()) if (v := at(row, path))), None)
    if system and not (messages and messages[0].role == "system"):
        messages.insert(0, Message("system", read_content(system, f"{where}, system", spec).text))
    if (finish := text_field(spec.first("run", "finish", row))) and messages:
        messages[-1].finish = finish_of(finish)
    if spec.data.get("greeting") == "context":
        for message in takewhile(lambda message: message.role != "user", messages):
            message.trained = False
    listed = spec.first("run", "messages", row, list)
    listed = [message for message in listed or () if isinstance(message, dict)]
    rollout = info.rollout
    if rollout.tools is None:
        paths = spec.paths["message"].get("tools", ())
        offered = (read_tools(v, where, spec) for m in listed for p in paths if (v := at(m, p)))
        rollout.tools = next(filter(None, offered), None)
    if spec.paths["message"].get("usage"):
        total = Counter[str]()
        for message in listed:
            add_usage(total, spec.first("message", "usage", message) if message.get("role") == "assistant" else None)
        rollout.sampler = sampler_of(rollout.sampler or {}, dict(total))
    return solo(messages, info, where, options, spec.data)


def _conversation(row: Any, spec: Spec, where: str, options: Options) -> list[Message]:
    if spec.data.get("dialect") == "token_ids":
        return labelled_ids(row, where, options)
    messages: list[Message] = []
    slots: tuple[tuple[str, Role], ...] = (("context", "user"), ("messages", "assistant"))
    for slot, role in slots:
        if not spec.paths["run"].get(slot):
            continue
        if (value := spec.first("run", slot, row)) is None:
            keys = ", ".join(f"{key} = null" if row[key] is None else str(key) for key in list(row)[:12]) or "no keys"
            names = " or ".join(map(repr, spec.data["run"][slot]))
            raise Unreadable("unknown_form", f"{where} has nothing at {names}; it has {keys}")
        read = read_messages(value, f"{where}, {slot}", spec, options.unread, role)
        if slot == "context":
            if read and (more := spec.first("run", "input", row, str)):
                read[-1].text = f"{read[-1].text}\n\n{more}"
            for message in read:
                message.trained, message.kind = False, "prompt"
        elif [(m.role, m.text) for m in read[: len(messages)]] == [(m.role, m.text) for m in messages]:
            read = read[len(messages) :]  # the history again
        messages += read
    return messages


def solo(
    messages: Sequence[Message], info: RunInfo, where: str, options: Options, form: Mapping[str, Any] | None = None
) -> RolloutRecord:
    """Build the rollout of one agent. Raises Unreadable: `errored` or `empty` without a turn, `no_prompt`.

    Args:
        form: `answers` and `bare_calls` of a format.
    """
    spoken = [message for message in messages if message.role == "assistant" and message.trained]
    if not spoken:
        reason, why = ("errored", f"; {info.rollout.error[:300]}") if info.rollout.error else ("empty", "")
        raise Unreadable(reason, f"{where}: {len(messages)} message(s), none that the assistant is to learn from{why}")
    if info.truncated:
        spoken[-1].finish = "length"
    _drop_padding(spoken, info.rollout.tools)
    agent = AgentRecord("agent1", "", "solo", info.exit_status or "unknown", patch=info.patch)
    form = form or base().data
    fill_agent(agent, messages, options, bare_calls=form["bare_calls"], answers=form["answers"])
    if agent.exit_status == "unknown":
        agent.exit_status = exit_by_action(agent.turns[-1].actions)
    return build_rollout([agent], info, where)


def _drop_padding(spoken: Sequence[Message], tools: Sequence[Any] | None) -> None:
    """Remove the null arguments that a call has only because another tool declares them.

    JSON that was written from a table has them; a null of an argument of the tool itself is a value.
    """
    padded = [call for message in spoken for call in message.calls if None in (call.arguments or {}).values()]
    if not tools or not padded:
        return
    declared = {tool_name(tool): parameters_of(tool) for tool in tools}
    names = {name for parameters in declared.values() for name in parameters or ()}
    for call in padded:
        if (of_tool := declared.get(call.name)) is not None and call.arguments:
            held = call.arguments.items()
            call.arguments = {k: v for k, v in held if v is not None or k in of_tool or k not in names}


def read_messages(
    value: Any, what: str, spec: Spec | None = None, unread: Unread = silent, text_role: Role = "assistant"
) -> list[Message]:
    """Read messages: a list, JSON text of one, one message, or the text of one, which gets `text_role`.

    An assistant's message that its own flag excludes from the loss becomes context, not a turn.

    Raises Unreadable: `unknown_role`, `non_text_content`, `bad_token_ids`, `partly_trained` or `unknown_form`,
    naming the message.
    """
    spec = spec or base()
    if isinstance(value, str):
        if (written := _written(value)) is None:
            return [Message(text_role, value)]
        value = written
    elif type(value) in (int, float) and spec.paths["run"].get("context"):
        return [Message(text_role, str(value))]
    elif isinstance(value, dict) and not spec.trees["message"].keys().isdisjoint(value):
        value = [value]
    value = as_list(value, what)
    if spec.data.get("dialect") == "responses":
        return response_messages(value, what)
    if [m for m in value if type(m) is dict and m.get("role") == "user" and m.get("tool_calls", m) is None]:
        value = without_padding(value)  # only tables give the user's messages a key for calls
    out, rules = list[Message](), spec.data.get("skip", ())
    for index, raw in enumerate(value):
        if not rules or not any(_has_constants(raw, rule) for rule in rules):
            read_message(raw, out, what, index, spec, unread)
    return out


def _has_constants(raw: Any, rule: Mapping[str, str]) -> bool:
    """Return whether a message has a rule's constants under their keys, "*" for any value."""
    for key, constant in rule.items():
        value = field(raw, key)
        if value != constant and not (value and constant == "*"):
            return False
    return True


def _written(text: str) -> list[Any] | None:
    """Return the messages that a text is the JSON of; None for any other text."""
    items = json_value(text)
    is_list = isinstance(items, list) and items and all(isinstance(item, dict) and len(item) > 1 for item in items)
    return items if is_list else None


def read_message(raw: Any, out: list[Message], what: str, index: int, spec: Spec, unread: Unread) -> None:
    """Read message `index` of a list, and add it and the results in it to `out`. Raises as `read_messages`."""
    if type(raw) is not dict:
        as_mapping(raw, f"{what}[{index}]")  # raises with the type that it has
    if "role" not in raw:  # nearly all have it
        raw = _unwrapped(raw, spec)
    got = spec.filled("message", raw, unread)
    sender, text = got.get("role"), got.get("text", "")
    role = spec.roles.get(sender) if type(sender) is str else None
    if type(text) is not str or role not in _SPOKEN or not (text or "calls" in got) or "media" in got:
        _read_rest(raw, got, out, what, index, spec, unread)
        return
    message = Message(role, text)  # nearly all
    out.append(message)
    besides = len(got) - ("text" in got) - ("calls" in got)
    if "calls" in got:
        _add_calls(out, got["calls"], f"{what}[{index}]", spec, unread)
    if besides > 1 or (role != "assistant" and "<returncode>" in text[:40]):
        _set_keys(message, got, what, index, spec)


def _unwrapped(raw: dict[str, Any], spec: Spec) -> dict[str, Any]:
    """Return a message with the keys of an object in it that holds the rest (LangChain)."""
    for path in spec.paths["message"].get("wrapper", ()):
        if spec.paths["message"]["role"][0][0] not in raw and isinstance(inner := at(raw, path), dict):
            raw = {**raw, str(path[0]): None, **inner}
    return raw


def _read_rest(
    raw: Any, got: Mapping[str, Any], out: list[Message], what: str, index: int, spec: Spec, unread: Unread
) -> None:
    """Read a message that is not plain text with calls."""
    name = f"{what}[{index}]"
    role = role_of(got.get("role"), name, spec)
    if role == "skip":
        return
    if any(value for _, value in got.get("media", ())):
        raise Unreadable("non_text_content", f"{name} shows an image, a video or audio; only text can be imported")
    if role == "calls":
        _only_calls(out, got, name, spec, unread)
        return
    held = got.get("text")
    is_object = role == "tool" and type(held) is dict
    content = Content(result_text(held, name, spec)) if is_object else read_content(held, name, spec, unread)
    if not got.keys() & {"text", "calls", "thought"}:
        _refuse_unread_text(raw, spec, name)
    out += [Message("tool", text, result_of=of) for of, text in content.results]  # Anthropic's are in a user's message
    first = Message(role)
    if not content.results or content.text or content.calls:
        for part in (content, *content.turns):
            message = first if part is content else Message(role)
            message.text, message.calls, message.thought = part.text, list(part.calls), part.thought
            out.append(message)
            out += [_result(message.calls[number].id, value) for number, value in part.answered]
            _set_keys(message, got, what, index, spec)
    if "calls" in got:
        _add_calls(out, got["calls"], name, spec, unread)


def _refuse_unread_text(raw: Mapping[str, Any], spec: Spec, name: str) -> None:
    """Raise Unreadable for a message without text or calls that has words, objects or lists under an unread key."""
    for key, value in raw.items():
        words = isinstance(value, str) and (key in _TEXTS or len(value.split()) > 1)
        if key not in spec.trees["message"] and value and (words or isinstance(value, dict | list)):
            remedy = "call it `content`, or name it in a map or a format"
            raise Unreadable("unknown_form", f"{name} has nothing that was read, but {key!r}: {remedy}")


_TEXTS = ("text", "value", "output", "result", "body", "message", "utterance")


def _add_calls(out: list[Message], value: Any, name: str, spec: Spec, unread: Unread) -> None:
    """Add calls to the last message, and behind it the results in them."""
    message = next(m for m in reversed(out) if m.role != "tool") if out[-1].role == "tool" else out[-1]
    for call, result in calls_with_results(value, name, spec, unread):
        message.calls.append(call)
        if result is not None:
            out.append(_result(call.id, result))


def _result(call_id: str | None, value: Any) -> Message:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Message("tool", text, result_of=call_id)


def _set_keys(message: Message, got: Mapping[str, Any], what: str, index: int, spec: Spec) -> None:
    """Set the fields of a message from its keys besides role, text and calls."""
    if "thought" in got:
        message.thought = _thought(got["thought"], f"{what}[{index}]", spec) or message.thought
    if "time" in got:
        message.time = to_utc(got["time"])
    if got.get("context") is True:
        message.trained, message.kind = False, "prompt"
    if type(code := got.get("exit_code")) is int:
        message.exit_code = code
    if message.role != "assistant":
        if message.role == "tool":
            message.result_of = text_field(got, "result_of")
        if message.exit_code is None and (printed := _RETURNCODE.match(message.text)):
            message.exit_code = int(printed[1])
        return
    if not _FLAGS.isdisjoint(got):
        message.trained = message.trained and is_trained(got, f"{what}[{index}]")
    if "finish" in got:
        message.finish = finish_of(text_field(got, "finish"))
    if message.trained and (command := (text_field(got, "command") or "").strip()):
        xml = "<command>" in message.text or "<tool_call>" in message.text
        form = "tool_calls" if message.calls or got.get("calls") else "xml" if xml else "fenced"
        message.actions = [Action("bash", command, form=form)]
    if "output_ids" in got or "prompt_ids" in got:
        message.prompt_ids = token_ids(got.get("prompt_ids"), f"{what}[{index}], prompt_ids")
        message.output_ids = token_ids(got.get("output_ids"), f"{what}[{index}], output_ids")


def _thought(value: Any, name: str, spec: Spec) -> str | None:
    """Return a thought: text, or blocks of it; encrypted blocks have none."""
    if isinstance(value, str):
        return value
    blocks = [b for b in value if isinstance(b, dict) and "data" not in b] if isinstance(value, list) else []
    return read_content(blocks, name, spec).thought


def is_trained(got: Mapping[str, Any], name: str) -> bool:
    """Return whether the flags of a message let it be trained: of `trained` all, of `untrained` none.

    Raises Unreadable: `partly_trained` for values other than yes and no, and for flags of parts of the message.
    """
    trained = True
    for slot, means in (("trained", True), ("untrained", False)):
        for key, value in got.get(slot, ()):
            flags = {_TRUTH.get(str(v).lower()) for v in (value if isinstance(value, list) and value else [value])}
            if flags not in ({True}, {False}):
                remedy = "a message is trained (1) or context (0), so write one of them, or remove the key"
                raise Unreadable("partly_trained", f"{name} has {key} = {str(value)[:40]}; {remedy}")
            trained = trained and flags == {means}
    if keys := [key for key, value in got.get("partly", ()) if value]:
        raise Unreadable("partly_trained", f"{name} has {keys[0]}; only whole messages can be left out")
    return trained


def _only_calls(out: list[Message], got: Mapping[str, Any], name: str, spec: Spec, unread: Unread) -> None:
    """Add the calls of a message that is only calls, to the assistant's message before it if there is one."""
    trained, text = is_trained(got, name), read_content(got.get("text"), name, spec).text
    if (value := json_value(text)) is None:
        out.append(Message("assistant", text, trained=trained, broken_call=True))  # `parse_error` says why
        return
    calls = read_calls(value if isinstance(value, list) else [value], name, spec, unread)
    last = out[-1] if out else None
    if last is not None and last.role == "assistant" and last.trained == trained and not last.broken_call:
        last.calls += calls
    else:
        out.append(Message("assistant", "", calls, trained=trained))
