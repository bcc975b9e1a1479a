"""A policy as an engine of the agent loop, without token ids.

Belongs here: what the loop asks of an engine and of a chat format where text alone is wanted. Does not belong here: any
policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etpi_resources.engines import Completion, Request
from etpi_resources.engines.scripted import Policy


class TextEngine:
    """A policy as an engine that takes and gives text."""

    def __init__(self, policy: Policy, name: str = "templated", settings: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self._policy, self._settings = policy, dict(settings or {})

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        return [Completion(None, None, None, self._policy(request), "stop", self.name) for request in requests]

    def fingerprint(self) -> Mapping[str, Any]:
        return {"kind": "templated", **self._settings}

    def close(self) -> None:
        """Nothing is held."""


class UntokenizedChat:
    """What the loop asks of a chat format where nothing is tokenised: lengths are not limited."""

    tool_form: None = None
    """There is no template that declares a form of tool calls: calls are read in every form."""

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[int]:
        return []

    def tail_form(self, prompt_ids: Sequence[int]) -> str:
        return "none"
