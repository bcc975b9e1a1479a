"""Find the earlier call that a request continues; build the ids of its prompt; read the message in an output.

The prompt is the ids of the longest earlier call whose messages and tools begin the request, then the new messages as
the template writes them after a turn. Nothing is rendered twice, so an output stays as it was sampled. A request that
begins like no earlier call is rendered whole: it starts a branch.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from etpi_resources.capture.dialects import Message, parse_json
from etpi_resources.chat.marks import THINK, split_thought
from etpi_resources.chat.tool_forms import gemma, marked, tagged
from etpi_resources.chat.tool_forms.call import Call, ParsedCall, ToolForm
from etpi_resources.outside import without_surrogates

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat

_ANCHOR = "anchor of the continuation"
_STOPPED = "a template that takes a system message only at the beginning would refuse the harness's requests"


class SystemRefused(RuntimeError):
    """The harness sends a system message within a conversation, and the student's template takes none there."""


@dataclass(frozen=True)
class Node:
    """A call that later ones may continue.

    Attributes:
        call: its number.
        parent: the call that it continues.
        added: the ids that it adds to those of its parent, output included, int32.
        length: the number of all its ids.
    """

    call: int
    parent: Node | None
    added: np.ndarray
    length: int

    def ids(self) -> np.ndarray:
        """Return the whole prompt and output."""
        parts, node = [], self
        while node is not None:
            parts.append(node.added)
            node = node.parent
        return np.concatenate(parts[::-1])


@dataclass(frozen=True)
class Prompt:
    """The prompt of a request: its ids, the node that it continues, and how many of its messages are new."""

    ids: list[int]
    parent: Node | None
    new_messages: int


class Conversation:
    """The calls of one attempt, by the messages that lead to them."""

    def __init__(self, chat: ChatFormat, template_kwargs: Mapping[str, Any]) -> None:
        self._chat, self._kwargs = chat, dict(template_kwargs)
        self._nodes: dict[str, Node] = {}

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> Prompt:
        """Return the prompt of a request.

        Raises:
            SystemRefused: as the class says.
            TemplateRefuses: the template raises an error for the conversation.
        """
        self._require_takes(messages)
        keys = list(prefix_keys(messages, tools))
        for end in range(len(messages) - 1, 0, -1):
            node = self._nodes.get(keys[end - 1])
            if node is None or any(message["role"] == "assistant" for message in messages[end:]):
                continue
            if (added := self._after_turn(messages[end - 1], messages[end:])) is not None:
                return Prompt([*node.ids().tolist(), *added], node, len(messages) - end)
        ids = self._chat.prompt_ids(
            [template_message(message, self._chat) for message in messages], tools=list(tools) or None, **self._kwargs
        )
        return Prompt(ids, None, len(messages))

    def add(
        self, call: int, prompt: Prompt, output: Sequence[int], messages: Sequence[Message], tools: Sequence[Any]
    ) -> None:
        """Remember a call; `messages` end with the model's."""
        ids = np.asarray([*prompt.ids, *self._chat.as_history(output)], dtype=np.int32)
        known = 0 if prompt.parent is None else prompt.parent.length
        *_, key = prefix_keys(messages, tools)
        self._nodes[key] = Node(call, prompt.parent, ids[known:].copy(), len(ids))

    def _require_takes(self, messages: Sequence[Message]) -> None:
        roles = [message["role"] for message in messages]
        leading = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
        if "system" in roles[leading:] and not self._chat.roles.later_system:
            raise SystemRefused(f"the harness sends a system message within the conversation: {_STOPPED}")

    def _after_turn(self, turn: Message, new: Sequence[Message]) -> list[int] | None:
        """Return the ids after a turn that has ended; None if the template cannot write the messages there."""
        chat = self._chat
        if not chat.chatml and any(message["role"] == "tool" for message in new):
            if len(new) > 1:
                return None
            calls = turn.get("tool_calls") or [{"function": {"name": "tool"}}]
            answered = next((c for c in calls if c.get("id") == new[0].get("tool_call_id")), calls[0])
            with suppress(ValueError):  # the whole conversation is rendered instead
                return chat.observation_ids(
                    new[0]["content"], "tool", tool=answered["function"]["name"], **self._kwargs
                )
            return None
        before = [{"role": "user", "content": ""}, {"role": "assistant", "content": _ANCHOR}]
        ids = chat.prompt_ids([*before, *new], **self._kwargs)
        (end,) = chat.as_history([])
        ends = (at for at, token in enumerate(ids) if token == end)
        at = next((at for at in ends if chat.decode(ids[:at]).endswith(_ANCHOR)), None)
        return None if at is None else ids[at + 1 :]


def prefix_keys(messages: Sequence[Message], tools: Sequence[Any]) -> Iterator[str]:
    """Yield a key for each beginning of a conversation. Tools are part of it, because prompts show them."""
    digest = hashlib.sha256(_dumps(tools).encode())
    for message in messages:
        digest.update(_dumps(normalised(message)).encode())
        yield digest.hexdigest()


def normalised(message: Message) -> list[Any]:
    """Return the parts of a message that a harness repeats unchanged; white space around the text, ids of calls, the
    spelling of arguments, and thoughts may differ."""
    calls = [
        [call["function"]["name"], parse_json(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return [message["role"], (message.get("content") or "").strip(), calls]


def template_message(message: Message, chat: ChatFormat) -> dict[str, Any]:
    """Return a message in the form that the student's template renders."""
    if message["role"] != "assistant":
        return {key: message[key] for key in ("role", "content", "tool_call_id") if message.get(key) is not None}
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [Call(function["name"], _object(function["arguments"])) for function in functions]
    content, form = message.get("content") or "", chat.tool_form
    if calls and chat.calls_in_content and form is not None:
        content, calls = "\n".join(filter(None, [content, form.render(calls)])), []
    return chat.words.message(content, calls, message.get("reasoning") or "")


def output_message(chat: ChatFormat, output: Sequence[int], opened: bool, tools: Sequence[Any]) -> Message:
    """Return the assistant message in an output.

    Args:
        opened: whether the prompt opens a think block.
    """
    text = chat.decode(chat.without_end(output))
    thought = split_thought(THINK + text if opened else text)
    form = chat.tool_form
    parsed = form.parse(thought.rest) if form is not None else []
    calls = [call for call in parsed if isinstance(call, Call)]
    content = text_before_calls(form, thought.rest, parsed) if form and calls else thought.rest
    message: Message = {"role": "assistant", "content": content if calls else chat.answer(content)}
    if thought.inside:
        message["reasoning"] = thought.inside
    if calls and form is not None:
        message["tool_calls"] = [_structured(call, form, tools) for call in calls]
    return message


def _structured(call: Call, form: ToolForm, tools: Sequence[Any]) -> dict[str, Any]:
    """Return a call as chat APIs write it. A form that writes values as text gets the types of the tool's schema."""
    arguments = dict(call.arguments)
    schema = next((tool["function"] for tool in tools if tool["function"]["name"] == call.name), {})
    properties = (schema.get("parameters") or {}).get("properties") or {}
    properties = properties if isinstance(properties, Mapping) else {}
    for key, value in arguments.items() if not form.typed else ():
        if isinstance(value, str) and not _takes_text(properties.get(key)):
            arguments[key] = parse_json(value)
    function = {"name": call.name, "arguments": without_surrogates(json.dumps(arguments, ensure_ascii=False))}
    return {"id": f"call_{uuid.uuid4().hex[:20]}", "type": "function", "function": function}


def _takes_text(schema: Any) -> bool:
    """Return whether text is a value of a schema, whose `type` may be a list, or missing; a schema may be `true`."""
    kinds = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _object(text: Any) -> dict[str, Any]:
    value = parse_json(text)
    return value if isinstance(value, dict) else {"input": value}


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


_FIXED = (tagged.OPENING, gemma.OPENING, marked.TOOL_CALLS)
_OPENINGS = re.compile(
    "|".join(
        (
            *map(re.escape, _FIXED),
            r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>",
            r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)? ?to=functions\.",
            r"(?:(?:(?:<\|start\|>assistant)? to=[\w.\-]{1,128}<\|message\|>)?<atem:function_calls>\s*)?<atem:invoke",
            r"^[ \t]*```(?:bash|sh|shell|mswea_bash_command)[ \t]*$",
        )
    ),
    re.MULTILINE,
)
"""The openings of all forms: the parser of the one that is used decides which of them begin a call."""


def text_before_calls(form: ToolForm, text: str, parsed: Sequence[ParsedCall]) -> str:
    """Return the text before the first call that can be read, without white space at its end.

    Calls before it that cannot be read stay: the model wrote them, and the message holds them nowhere else.

    Args:
        text: a turn after its think block.
        parsed: its calls as `form` reads them; at least one is a call.
    """
    unread = next(at for at, call in enumerate(parsed) if isinstance(call, Call))
    starts = [0, *(match.start() for match in _OPENINGS.finditer(text))]
    # The call begins at the last opening before which the parser reads no more than the unreadable calls.
    first = bisect_right(starts, unread, key=lambda at: len(form.parse(text[:at]))) - 1
    return text[: starts[max(first, 0)]].rstrip()
