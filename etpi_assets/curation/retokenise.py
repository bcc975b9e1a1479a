"""Captured text as token ids: for every assistant turn, what the student would have read and what it is to write.

Belongs here: the conversation as the student's chat format sees it, and the ids of its turns. Does not belong here: the
form of a turn (`student_form`), rendering (`chat_format`), or what becomes of the pairs.

A prompt is the conversation before the turn, rendered whole with the generation prompt. An output is the turn's text
and the end-of-turn id: no think block that a template would put before it, no newline after it (that belongs to what
follows), and no end-of-turn id where the turn was cut.
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
class Retokenised:
    """One turn's whole prompt and its output, as ids of the student's vocabulary (int32 range).

    Attributes:
        appended: whether the template only appends to this conversation, so that one rendering held all its prompts;
            otherwise each was rendered by itself.
        calls: the structured calls that the output holds.
        fault: why the student's own parser does not read them back from it; None where it does.
    """

    turn: int
    prompt_ids: list[int]
    output_ids: list[int]
    appended: bool = True
    calls: tuple[Call, ...] = ()
    fault: str | None = None


def retokenise(
    messages: Iterable[Mapping[str, Any]],
    chat: ChatFormat,
    *,
    truncated: Collection[int] = (),
    tools: Sequence[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Retokenised]:
    """The turns of one agent, in order.

    Args:
        messages: the agent's rows of the `messages` table by index (`role`, `content`, `turn`, `kind`, `tool_calls`).
        truncated: turns that were cut before their end (finish_reason "length").
        tools, template_kwargs: what the student's template gets besides the messages, as in serving.

    Raises:
        ValueError: a turn stands before any message, so it has no prompt; or a message's role is not known; or the
            template writes no tool calls, or writes them in an unknown form (UnknownToolForm).
    """
    student = StudentForm(chat, tools, template_kwargs or {})
    chat_messages, turns = conversation(messages, student)
    if turns and turns[0][1] == 0:
        raise ValueError("the conversation begins with the assistant: the prompt of its first turn is missing")
    positions = [position for _, position in turns]
    kwargs = dict(template_kwargs or {})
    prompts = chat.prefix_prompt_ids(chat_messages, positions, tools=tools, **kwargs)
    read = chat_messages[: positions[-1] + 1] if positions else []
    appended = chat.renders_once(read, tools=tools, **kwargs)
    texts = [student.text(chat_messages[position]) for position in positions]
    outputs = chat.encode_all(texts)
    return [
        Retokenised(
            turn,
            prompt,
            output + [chat.end_id] * (turn not in truncated),
            appended,
            tuple(calls_of(chat_messages[position])),
            student.fault(chat_messages[position], text),
        )
        for (turn, position), prompt, output, text in zip(turns, prompts, outputs, texts, strict=True)
    ]


def conversation(
    messages: Iterable[Mapping[str, Any]], student: StudentForm
) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """The messages as the student's template is given them, and (turn, position) of those it is to write.

    Assistant messages of one turn become one, its text before its calls. Assistant messages that are no turn (a
    demonstration, a summary) are read like any other.
    """
    told: list[dict[str, Any]] = []
    turns: list[tuple[int, int]] = []
    for message in messages:
        role, content = message["role"], message["content"] or ""
        if role == "assistant":
            calls = message.get("tool_calls")
            spoken = student.message(content, json.loads(calls) if isinstance(calls, str) else calls)
            turn = message["turn"] if message["kind"] == "action" else None
            if turn is not None and turns and turns[-1] == (turn, len(told) - 1):
                told[-1] = _joined(told[-1], spoken)
                continue
            if turn is not None:
                turns.append((turn, len(told)))
            told.append(spoken)
        elif role in ("system", "user", "tool"):
            told.append({"role": role, "content": observation_text(content)})
        else:
            raise ValueError(f"a message has role {role!r}; templates know system, user, assistant and tool")
    return told, turns


def _joined(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Two messages of one turn as one."""
    calls = [*earlier.get("tool_calls", ()), *later.get("tool_calls", ())]
    content = "\n".join(filter(None, (earlier["content"], later["content"])))
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
