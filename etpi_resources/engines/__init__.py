"""The Engine protocol: token ids in, token ids out, for every kind of server.

These are the values that pass between the agent loop and an engine; each engine is a module of this package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from etpi_resources.chat.grammars import ThinkGrammar
from etpi_resources.errors import ExpectedError

FinishReason = Literal["stop", "length", "error"]


class EngineUnavailable(ExpectedError, RuntimeError):
    """The engine cannot answer any request, so the run stops and no rollout records this as its outcome. The
    message says what to do."""


@dataclass(frozen=True)
class Sampler:
    """Settings of sampling the next tokens.

    Attributes:
        temperature: 0.0 is greedy.
        top_p: nucleus mass in (0, 1].
        max_tokens: the most output tokens of one completion, the end-of-turn token included.
        seed: the rollout's seed. An engine seeds one generator per request from (seed, request_id), so that a sample
            does not depend on the other requests in the batch.
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
        session: "<rollout_id>/<agent_id>"; an engine may keep a key-value cache per session.
        prompt_ids: the whole prompt, generation prompt included.
        messages: the same conversation as chat messages ({"role", "content"}), for engines that take text.
        sampler: how to sample.
        grammar: constrains the think block, starting at the end of the prompt; None: unconstrained. An engine that
            cannot enforce a grammar refuses the request.
        tools: schemas of the tools that the prompt offers (OpenAI's form), for engines that take text; `prompt_ids`
            already contain them.
        privileged: data for scripted policies only: the family's "task" and "role", the task's "payload", and in a
            harness the "form" of calls that it reads. Model engines ignore it.
    """

    request_id: str
    session: str
    prompt_ids: Sequence[int]
    messages: Sequence[Mapping[str, Any]]
    sampler: Sampler
    grammar: ThinkGrammar | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    privileged: Mapping[str, Any] = field(default_factory=dict)

    def seed(self, bits: int) -> int:
        """Return the seed of this request's generator."""
        digest = hashlib.sha256(f"{self.sampler.seed}/{self.request_id}".encode()).digest()
        return int.from_bytes(digest[: (bits + 1) // 8], "big") >> 1


@dataclass(frozen=True)
class Completion:
    """The engine's answer to one request.

    Attributes:
        prompt_ids: the prompt as the engine read it (int32 range); equal to the request's in token-in mode. None if
            the engine reports no ids (capture = "none").
        output_ids: the generated ids, the end-of-turn id included if it was generated. None as above.
        logprobs: natural-log probability of each output id under the model at temperature 1, before any nucleus or
            grammar, or None.
        text: the decoded output without the end-of-turn token; without ids, the message's content.
        finish_reason: "stop" (end of turn generated), "length" (cut at max_tokens or the model's length), "error".
        model: the name under which the engine serves the model.
        message: the assistant message of a chat endpoint ({"role", "content", "tool_calls"?, "reasoning"?}), with the
            parts that the server's parsers took out of the text as separate fields; None in token-in mode.
        version: of a policy in training, the optimiser steps done by the weights that generated it.
    """

    prompt_ids: Sequence[int] | None
    output_ids: Sequence[int] | None
    logprobs: Sequence[float] | None
    text: str
    finish_reason: FinishReason
    model: str
    message: Mapping[str, Any] | None = None
    version: int | None = None


@runtime_checkable
class Engine(Protocol):
    """Generates assistant turns. Thread-safe: several rollouts call `complete` at once, and an engine that batches
    puts concurrent requests into one batch.

    An engine whose pickled copy answers alike on another machine has a true attribute `portable`. Its pickle names the
    variables of its keys and contains no keys.
    """

    name: str

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return one completion per request, in order."""
        ...

    def fingerprint(self) -> Mapping[str, Any]:
        """Return what identifies the model and its settings in a rollout's input key (JSON, no secrets)."""
        ...

    def close(self) -> None:
        """Release the engine's resources; a second call does nothing."""
        ...


@dataclass
class EngineView:
    """An engine whose requests a function passes on to another, which is its owner's to close."""

    of: Engine
    completed: Callable[[Sequence[Request]], list[Completion]]

    def __post_init__(self) -> None:
        self.name = self.of.name

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        return self.completed(requests)

    def fingerprint(self) -> Mapping[str, Any]:
        return self.of.fingerprint()

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class ServedModel:
    """One entry of a server's model list: its name, its folder or hub id, and for an adapter the base's name."""

    name: str
    root: str | None
    parent: str | None


@runtime_checkable
class ServerEngine(Engine, Protocol):
    """An engine behind a server with its own chat template and parsers, which may differ from those of training."""

    def list_models(self) -> list[ServedModel]:
        """Return the server's model list."""
        ...

    def chat(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete through the server's own template and parsers, with ids captured."""
        ...
