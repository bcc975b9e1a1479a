"""An engine and a chat format for the agent loop that work on text, without token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etpi_resources.engines import Completion, Request
from etpi_resources.engines.scripted import Policy


class TextEngine:
    """An engine that returns a scripted policy's text."""

    def __init__(self, policy: Policy, name: str = "templated", settings: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self._policy, self._settings = policy, dict(settings or {})

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        return [Completion(None, None, None, self._policy(request), "stop", self.name) for request in requests]

    def fingerprint(self) -> Mapping[str, Any]:
        return {"kind": "templated", **self._settings}

    def close(self) -> None:
        """Release nothing."""


class UntokenizedChat:
    """A chat format that tokenises nothing, so prompts have no length limit."""

    tool_form: None = None
    """No template declares a form of tool calls, so calls in any form are parsed."""

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[int]:
        return []

    def answer(self, text: str) -> str:
        return text

    def tail_form(self, prompt_ids: Sequence[int]) -> str:
        return "none"
