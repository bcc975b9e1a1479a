"""The Engine protocol: token ids in, token ids out, whatever serves the model.

Belongs here: the values that cross the boundary between the agent loop and whatever generates. Does not belong here:
any engine, each of which is a module of this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from etpi_resources.chat.grammars import ThinkGrammar

FinishReason = Literal["stop", "length", "error"]


class EngineUnavailable(RuntimeError):
    """The engine cannot do what is asked, whatever the request: it stops what is under way instead of becoming the
    outcome of a rollout. The message says what to do."""


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
        grammar: what the think block of the answer must look like, from where the prompt leaves off; None: nothing. An
            engine that cannot bind it refuses the request.
        tools: schemas of the tools the prompt offers (OpenAI's form), for engines that take text; `prompt_ids` hold
            them already.
        privileged: what only scripted policies may see: "task" and "role" as the suite family has them, and "payload",
            the task's. Model engines ignore it.
    """

    request_id: str
    session: str
    prompt_ids: Sequence[int]
    messages: Sequence[Mapping[str, Any]]
    sampler: Sampler
    grammar: ThinkGrammar | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    privileged: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """What the engine produced for one request.

    Attributes:
        prompt_ids: the prompt as the engine saw it (int32 range); equal to the request's in token-in mode. None where
            the engine does not report ids (capture = "none").
        output_ids: the generated ids, the end-of-turn id included where it was generated. None as above.
        logprobs: natural-log probability of each output id under the model at temperature 1, before any nucleus or
            grammar, or None.
        text: the output decoded, special end-of-turn token left out; where there are no ids, the message's content.
        finish_reason: "stop" (end of turn generated), "length" (cut at max_tokens or the model's length), "error".
        model: the name the engine serves the model under.
        message: the assistant message as a chat endpoint gave it ({"role", "content", "tool_calls"?, "reasoning"?}),
            what a parser of the server took out of the text kept apart; None in token-in mode.
    """

    prompt_ids: Sequence[int] | None
    output_ids: Sequence[int] | None
    logprobs: Sequence[float] | None
    text: str
    finish_reason: FinishReason
    model: str
    message: Mapping[str, Any] | None = None


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


@dataclass(frozen=True)
class ServedModel:
    """A line of what a server lists: a name, the folder or hub id behind it, the name of the base under an adapter."""

    name: str
    root: str | None
    parent: str | None


@runtime_checkable
class ServerEngine(Engine, Protocol):
    """An engine behind a server with a template and parsers of its own, which may differ from what was trained."""

    def list_models(self) -> list[ServedModel]:
        """What the server says it serves."""
        ...

    def chat(self, requests: Sequence[Request]) -> list[Completion]:
        """As `complete`, by the server's own template and parsers, ids captured."""
        ...
