"""Convert recorded conversations to token ids: each assistant turn's prompt and output in the student's vocabulary.

A prompt is the conversation before the turn, rendered whole with the generation prompt. An output is the turn's text
and the end-of-turn id. It has no think block that a template would put before it, no newline after it (which belongs to
the next message), and no end-of-turn id if the turn was truncated.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etpi_assets.curation.student_form import StudentForm, calls_of, observation_text
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.tool_forms import Call


@dataclass(frozen=True)
class RetokenisedTurn:
    """One turn's whole prompt and its output, as ids of the student's vocabulary (int32 range).

    Attributes:
        appended: whether the template only appends to this conversation, so that all its prompts come from one
            rendering; otherwise each was rendered by itself.
        calls: the structured calls in the output.
        fault: why the student's own parser does not read those calls back from the output; None if it does.
        prose_lost: whether the captured turn has text beside its calls that the template does not write before them.
    """

    turn: int
    prompt_ids: list[int]
    output_ids: list[int]
    appended: bool = True
    calls: tuple[Call, ...] = ()
    fault: str | None = None
    prose_lost: bool = False


def retokenise(
    messages: Iterable[Mapping[str, Any]],
    chat: ChatFormat,
    *,
    truncated: Collection[int] = (),
    tools: Sequence[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    thoughts: bool = True,
) -> list[RetokenisedTurn]:
    """Return the turns of one agent, in order.

    Args:
        messages: the agent's rows of the `messages` table by index (`role`, `content`, `turn`, `kind`, `tool_calls`).
        truncated: turns with finish_reason "length".
        tools, template_kwargs: further arguments of the student's template, as in serving.
        thoughts: as in `StudentForm`.

    Raises:
        ValueError: the first message is a turn, so it has no prompt; or a message's role is unknown.
        TemplateRefuses: the template does not take the conversation (a ValueError).
        UnknownToolForm: the template writes no tool calls, or writes them in an unknown form (a ValueError).
    """
    student = StudentForm(chat, tools, template_kwargs or {}, thoughts)
    messages = list(messages)
    chat_messages, turns = conversation(messages, student)
    captured = {m["turn"]: m["content"] or "" for m in messages if m["role"] == "assistant" and m["kind"] == "action"}
    if turns and turns[0][1] == 0:
        raise ValueError("the conversation begins with the assistant: the prompt of its first turn is missing")
    positions = [position for _, position in turns]
    kwargs = dict(template_kwargs or {})
    prompts = chat.prefix_prompt_ids(chat_messages, positions, tools=tools, **kwargs)
    through_last_turn = chat_messages[: positions[-1] + 1] if positions else []
    appended = chat.renders_once(through_last_turn, tools=tools, **kwargs)
    texts = [student.text(chat_messages[position]) for position in positions]
    outputs = student.output_ids([chat_messages[position] for position in positions], texts)
    return [
        RetokenisedTurn(
            turn,
            prompt,
            chat.without_end(output) if turn in truncated else chat.ended(output),
            appended,
            tuple(calls_of(chat_messages[position])),
            student.fault(chat_messages[position], text),
            student.loses_prose(captured[turn], chat_messages[position]),
        )
        for (turn, position), prompt, output, text in zip(turns, prompts, outputs, texts, strict=True)
    ]


def conversation(
    messages: Iterable[Mapping[str, Any]], student: StudentForm
) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """Return the messages for the student's template, and (turn, position) of those that the student writes.

    Assistant messages of one turn become one message, its text before its calls. Assistant messages outside any turn (a
    demonstration, a summary) are context like other messages.
    """
    chat_messages: list[dict[str, Any]] = []
    turns: list[tuple[int, int]] = []
    for message in messages:
        role, content = message["role"], message["content"] or ""
        if role == "assistant":
            calls = message.get("tool_calls")
            written = student.message(content, json.loads(calls) if isinstance(calls, str) else calls)
            turn = message["turn"] if message["kind"] == "action" else None
            if turn is not None and turns and turns[-1] == (turn, len(chat_messages) - 1):
                chat_messages[-1] = _joined(chat_messages[-1], written)
                continue
            if turn is not None:
                turns.append((turn, len(chat_messages)))
            chat_messages.append(written)
        elif role == "tool":
            chat_messages.append({"role": role, "content": observation_text(content), **_answered(chat_messages)})
        elif role in ("system", "user"):
            chat_messages.append({"role": role, "content": observation_text(content)})
        else:
            raise ValueError(f"a message has role {role!r}; templates know system, user, assistant and tool")
    return chat_messages, turns


def _answered(earlier: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the id and tool of the call that the next result answers: results follow in the order of the calls."""
    for results, message in enumerate(reversed(earlier)):
        if message["role"] != "tool":
            calls = message.get("tool_calls") or ()
            call = calls[min(results, len(calls) - 1)] if calls else None
            return {"tool_call_id": call["id"], "name": call["function"]["name"]} if call else {}
    return {}


def _joined(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Join two messages of one turn."""
    calls = [*earlier.get("tool_calls", ()), *later.get("tool_calls", ())]
    content = "\n".join(filter(None, (earlier["content"], later["content"])))
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
