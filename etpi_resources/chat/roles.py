"""Roles that a chat template accepts, and conversion of messages to that form.

Templates differ in whether they know a system message, a tool's result, and two messages of one role in a row. What a
template refuses is determined by rendering small conversations; nothing here depends on a template's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etpi_resources.chat.markers import Apply
from etpi_resources.chat.tool_forms import Call, message_calls

_FIRST, _SECOND = "firstofprobe", "secondofprobe"
_SEPARATOR = "\n\n"
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Roles:
    """Roles and positions that a template accepts.

    Attributes:
        system: a system message; without, its text is put before the first user message.
        later_system: a system message that is not the first message; without, it becomes a user message, or part of a
            system message directly before it.
        results: a tool's result directly after a call; without, it becomes a user message.
        apart_results: a result with another message between its call and it; without, it becomes a user message.
        loose_results: a tool's result after a turn without a call; without, it becomes a user message.
        repeated: two user messages in a row; without, they are joined.
    """

    system: bool = True
    later_system: bool = True
    results: bool = True
    apart_results: bool = True
    loose_results: bool = True
    repeated: bool = True

    @classmethod
    def probe(cls, apply: Apply, *, calls_as_text: bool) -> Roles:
        """Render small conversations with the template and return what it takes.

        Args:
            calls_as_text: whether the template takes a call's arguments as JSON text.
        """
        user, answer = {"role": "user", "content": _FIRST}, {"role": "assistant", "content": _FIRST}
        (call,) = message_calls([Call("probe", {"x": "y"})], as_text=calls_as_text)
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "name": "probe", "content": _SECOND}
        loose = {"role": "tool", "content": _SECOND}
        system = {"role": "system", "content": _SECOND}
        return cls(
            system=_shows(apply, [system, user]),
            later_system=_shows(apply, [user, answer, system]),
            results=_shows(apply, [user, calling, result]),
            apart_results=_shows(apply, [user, calling, user, result]),
            loose_results=_shows(apply, [user, answer, loose]),
            repeated=_shows(apply, [user, {"role": "user", "content": _SECOND}]),
        )

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in roles that the template takes; the same messages if it takes all of them."""
        if self == Roles():
            return list(messages)
        fitted: list[Message] = []
        system: list[str] = []
        for message in messages:
            role = message.get("role")
            if role == "system" and not self.system and not fitted:
                system.append(message["content"])
                continue
            if role == "system" and not self.later_system and fitted:
                earlier = fitted[0]
                if len(fitted) == 1 and earlier.get("role") == "system":
                    fitted[0] = {**earlier, "content": _SEPARATOR.join([earlier["content"], message["content"]])}
                    continue
                message, role = {"role": "user", "content": message["content"]}, "user"
            if role == "tool" and not self._takes_result(message, fitted):
                message, role = {"role": "user", "content": message["content"]}, "user"
            if role == "user" and system:
                message = {**message, "content": _SEPARATOR.join([*system, message["content"]])}
                system = []
            if role == "user" and not self.repeated and fitted and fitted[-1].get("role") == "user":
                earlier = fitted.pop()
                message = {**earlier, "content": _SEPARATOR.join([earlier["content"], message["content"]])}
            fitted.append(message)
        return fitted

    def _takes_result(self, message: Message, earlier: Sequence[Message]) -> bool:
        if not message.get("tool_call_id"):
            return self.loose_results
        return self.results if earlier and earlier[-1].get("role") in ("assistant", "tool") else self.apart_results


def _shows(apply: Apply, messages: list[dict[str, Any]]) -> bool:
    """Return whether the template renders the conversation with the text that is probed."""
    try:
        return _SECOND in apply(messages, None, False)
    except Exception:  # templates raise various errors for roles that they refuse
        return False
