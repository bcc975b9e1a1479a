"""Convert recorded conversations to token ids: each assistant turn's prompt and output in the student's vocabulary.

A prompt is the conversation before the turn, rendered whole with the generation prompt. An output is the text that the
template writes for the turn after that, and the end-of-turn id. It has no empty think block that a template would put
before it, no newline after it (which belongs to the next message), and no end-of-turn id if the turn was truncated.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etpi_assets.curation.strip_think import EMPTY, SECOND, UNCLOSED
from etpi_assets.curation.student_form import StudentForm, calls_of, observation_text
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.marks import THINK, THINK_END, split_thought
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
        bare: (prompt, output) without thoughts, and without an empty block that the prompt opens; None if the turn
            has neither.
        unstripped: why the output cannot be trained without its thoughts; None if it can.
        quoted: the number of think tags that the turn quotes in its prose, code or calls.
    """

    turn: int
    prompt_ids: list[int]
    output_ids: list[int]
    appended: bool = True
    calls: tuple[Call, ...] = ()
    fault: str | None = None
    prose_lost: bool = False
    bare: tuple[list[int], list[int]] | None = None
    unstripped: str | None = None
    quoted: int = 0


def retokenise(
    messages: Iterable[Mapping[str, Any]],
    chat: ChatFormat,
    *,
    truncated: Collection[int] = (),
    tools: Sequence[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    bare: bool = True,
    history: bool = False,
    closes: bool = True,
) -> list[RetokenisedTurn]:
    """Return the turns of one agent, in order.

    Args:
        messages: the agent's rows of the `messages` table by index (`role`, `content`, `turn`, `kind`, `tool_calls`,
            and `reasoning` if there is any).
        truncated: turns with finish_reason "length".
        tools, template_kwargs: further arguments of the student's template, as in serving.
        bare: also render the turns without thoughts.
        history: leave thoughts in the prompts of those.
        closes: render those with enable_thinking = false if prompts otherwise end in an open think block.

    Raises:
        ValueError: the first message is a turn, so it has no prompt; or a message's role is unknown.
        TemplateRefuses: the template does not take the conversation (a ValueError).
        UnknownToolForm: the template writes no tool calls, or writes them in an unknown form (a ValueError).
    """
    messages = list(messages)
    kwargs = dict(template_kwargs or {})
    student = StudentForm(chat, tools, kwargs)
    spoken = _Spoken.of(messages)
    turns = _rendered(messages, student, truncated)
    without = None
    closing = closes and student.opened
    if bare and (spoken.thoughts or student.opened):
        closed = {**kwargs, "enable_thinking": False} if closing else kwargs
        prompts = [turn.prompt_ids for turn in turns]
        if closing or (spoken.thoughts and not history):
            shown = replace(student, thoughts=history, template_kwargs=closed)
            prompts = [turn.prompt_ids for turn in _rendered(messages, shown, truncated)]
        without = _rendered(messages, replace(student, thoughts=False, template_kwargs=closed), truncated, prompts)
    return [
        replace(
            turn,
            bare=(without[at].prompt_ids, without[at].output_ids) if without else None,
            unstripped=spoken.unstripped(turn.turn, without[at].output_ids if without else turn.output_ids, chat),
            prose_lost=student.loses_prose(spoken.content[turn.turn], {"tool_calls": turn.calls}),
            quoted=spoken.quoted[turn.turn],
        )
        for at, turn in enumerate(turns)
    ]


def _rendered(
    messages: Sequence[Mapping[str, Any]],
    student: StudentForm,
    truncated: Collection[int],
    prompts: list[list[int]] | None = None,
) -> list[RetokenisedTurn]:
    """Return the turns of a conversation in one form of the student; `prompts` are theirs, if they are known."""
    chat, tools, kwargs = student.chat, student.tools, dict(student.template_kwargs)
    chat_messages, turns = conversation(messages, student)
    if turns and turns[0][1] == 0:
        raise ValueError("the conversation begins with the assistant: the prompt of its first turn is missing")
    positions = [position for _, position in turns]
    appended = True
    if prompts is None:
        prompts, appended = chat.prefix_prompts(chat_messages, positions, tools=tools, **kwargs)
    labels = student.labels([chat_messages[position] for position in positions])
    return [
        RetokenisedTurn(
            turn,
            prompt,
            chat.without_end(output) if turn in truncated else chat.ended(output),
            appended,
            tuple(calls_of(chat_messages[position])),
            student.fault(chat_messages[position], label.plain),
        )
        for (turn, position), prompt, output, label in zip(
            turns, prompts, chat.label_ids(labels, **kwargs), labels, strict=True
        )
    ]


@dataclass(frozen=True)
class _Spoken:
    """Content of the recorded messages of the turns.

    Attributes:
        thoughts: whether any assistant message has thoughts.
        content: turn -> its text. quoted: turn -> think tags in its text after the thoughts, and in its calls.
        opened, again: turns that open a block that they do not close, and those with a second block.
    """

    thoughts: bool
    content: Mapping[int, str]
    quoted: Mapping[int, int]
    opened: frozenset[int]
    again: frozenset[int]

    @classmethod
    def of(cls, messages: Iterable[Mapping[str, Any]]) -> _Spoken:
        content: defaultdict[int, str] = defaultdict(str)
        quoted: Counter[int] = Counter()
        opened, again = set(), set()
        thoughts = False
        for message in messages:
            if message["role"] != "assistant":
                continue
            text = message["content"] or ""
            thought = split_thought(text, message.get("reasoning"))
            thoughts |= thought.inside is not None
            if message["kind"] != "action":
                continue
            turn = message["turn"]
            content[turn] = "\n".join(filter(None, (content[turn], text)))
            calls = message.get("tool_calls") or ""
            after = thought.rest + (calls if isinstance(calls, str) else json.dumps(calls, ensure_ascii=False))
            quoted[turn] += after.count(THINK) + after.count(THINK_END)
            opened |= {turn} if thought.opened else set()
            again |= {turn} if thought.again else set()
        return cls(thoughts, content, quoted, frozenset(opened), frozenset(again))

    def unstripped(self, turn: int, bare: Sequence[int], chat: ChatFormat) -> str | None:
        """Return why a turn cannot be trained without its thoughts; None if it can.

        Args:
            bare: its output without them.
        """
        if turn in self.opened:
            return UNCLOSED
        if turn in self.again:
            return SECOND
        return EMPTY if self.content[turn].strip() and not chat.decode(chat.without_end(bare)).strip() else None


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
            calls = json.loads(calls) if isinstance(calls, str) else calls
            written = student.message(content, calls, message.get("reasoning"))
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
    results = 0
    for message in reversed(earlier):
        if message["role"] == "assistant":
            calls = message.get("tool_calls") or ()
            call = calls[min(results, len(calls) - 1)] if calls else None
            return {"tool_call_id": call["id"], "name": call["function"]["name"]} if call else {}
        results += message["role"] == "tool"
    return {}


def _joined(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Join two messages of one turn: their texts, thoughts and calls."""
    whole = dict(earlier)
    for key, value in later.items():
        if key == "tool_calls":
            whole[key] = [*earlier.get(key, ()), *value]
        elif key != "role":
            whole[key] = "\n".join(filter(None, (earlier.get(key, ""), value)))
    return whole
