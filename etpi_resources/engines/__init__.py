"""The Engine protocol: token ids in, token ids out, whatever serves the model.

Belongs here: the values that cross the boundary between the agent loop and whatever generates. Does not belong here:
any engine, each of which is a module of this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Sampler:
    """How the next tokens are drawn.

    Attributes:
        temperature: 0.0 is greedy.
        top_p: nucleus mass in (0, 1].
        max_tokens: the most output tokens of one completion, the end-of-turn token included.
        seed: the rollout's seed; an engine derives one generator a request from (seed, request_id), so that a draw
            does not depend on what else is in the batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 256
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One request for an assistant turn.

    Attributes:
        request_id: unique within a run, stable over reruns: "<rollout_id>/<agent_id>/<turn>".
        session: "<rollout_id>/<agent_id>"; an engine may keep a key-value cache by it.
        prompt_ids: the whole prompt, generation prompt included.
        messages: the same conversation as chat messages ({"role", "content"}), for engines that take text.
        sampler: how to draw.
        privileged: what only scripted policies may see: "task" and "role" as the suite family has them, and "payload",
            the task's. Model engines ignore it.
    """

    request_id: str
    session: str
    prompt_ids: Sequence[int]
    messages: Sequence[Mapping[str, Any]]
    sampler: Sampler
    privileged: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """What the engine produced for one request.

    Attributes:
        prompt_ids: the prompt as the engine saw it (int32 range); equal to the request's in token-in mode. None where
            the engine does not report ids (capture = "none").
        output_ids: the generated ids, the end-of-turn id included where it was generated. None as above.
        logprobs: natural-log probability of each output id under the sampling distribution at temperature 1, or None.
        text: the output decoded, special end-of-turn token left out.
        finish_reason: "stop" (end of turn generated), "length" (cut at max_tokens or the model's length), "error".
        model: the name the engine serves the model under.
    """

    prompt_ids: Sequence[int] | None
    output_ids: Sequence[int] | None
    logprobs: Sequence[float] | None
    text: str
    finish_reason: FinishReason
    model: str


@runtime_checkable
class Engine(Protocol):
    """Generates assistant turns. Thread-safe: several rollouts call `complete` at once, and an engine that batches
    joins what arrives together."""

    name: str

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order."""
        ...

    def fingerprint(self) -> Mapping[str, Any]:
        """What identifies the model and its settings in a rollout's input key (JSON-serialisable, no secrets)."""
        ...

    def close(self) -> None:
        """Free what the engine holds; calling it twice is harmless."""
        ...
