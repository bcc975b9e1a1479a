"""An engine that emits a scripted policy's text as token ids: a teacher without a model.

A sampling model does not always emit the tokenizer's canonical tokens for a text. So this engine splits a seeded share
of the longer tokens in two: the ids decode to the same text but differ from its re-tokenisation. Tests can thus tell
native ids from re-tokenised ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etpi_resources.chat.marks import THINK, THINK_END
from etpi_resources.engines import Completion, FinishReason, Request

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat

SHORTEST_SPLIT = 3
"""Shorter tokens are never split: names in the tiny worlds are tokens of two letters, and a student copies whole
tokens."""

Policy = Callable[[Request], str]
"""Returns the text of a turn; may read `Request.privileged`. Deterministic in the request."""


class ScriptedEngine:
    """Emits a policy's text as native token ids and the end-of-turn id, cut at the request's max_tokens.

    Deterministic in (sampler seed, request id). It keeps no state between requests, so threads may share it.

    Attributes:
        noncanonical: the share of splittable tokens to split; the default splits 5 % of all tokens of the shipped
            policies. Special tokens and tokens of fewer than SHORTEST_SPLIT characters are never split.
    """

    portable = True

    def __init__(
        self,
        policy: Policy,
        chat: ChatFormat,
        teacher: str,
        *,
        settings: Mapping[str, Any] | None = None,
        noncanonical: float = 0.15,
    ) -> None:
        if not 0 <= noncanonical <= 1:
            raise ValueError(f"noncanonical = {noncanonical}: a share between 0 and 1")
        self.name = teacher
        self.noncanonical = noncanonical
        self._policy, self._chat, self._settings = policy, chat, dict(settings or {})
        self._pieces: dict[str, int] = chat.tokenizer.get_vocab()
        self._tokens = {number: token for token, number in self._pieces.items()}
        self._splits: dict[int, tuple[tuple[int, int], ...]] = {}

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._complete(request) for request in requests]

    def fingerprint(self) -> Mapping[str, Any]:
        return {
            "kind": "scripted",
            "teacher": self.name,
            "noncanonical": self.noncanonical,
            "tokenizer": self._chat.name,
            **self._settings,
        }

    def close(self) -> None:
        """Do nothing: the engine has no resources."""

    def _complete(self, request: Request) -> Completion:
        text = self._policy(request)
        if self._chat.tail_form(request.prompt_ids) == "open":
            text = continued(text)
        rng = random.Random(f"{request.sampler.seed}/{request.request_id}")
        ids: list[int] = []
        for token in self._chat.encode(text):
            splits = self._splits_of(token)
            if splits and rng.random() < self.noncanonical:
                ids.extend(splits[rng.randrange(len(splits))])
            else:
                ids.append(token)
        ids = self._chat.ended(ids)
        finish: FinishReason = "stop"
        if len(ids) > request.sampler.max_tokens:
            ids, finish = ids[: request.sampler.max_tokens], "length"
            text = self._chat.decode(ids)
        return Completion(
            prompt_ids=list(request.prompt_ids),
            output_ids=ids,
            logprobs=None,
            text=text,
            finish_reason=finish,
            model=self.name,
        )

    def _splits_of(self, token: int) -> tuple[tuple[int, int], ...]:
        """Return every way to write a token as two tokens of the vocabulary; empty for special tokens."""
        if token not in self._splits:
            piece = self._tokens[token]
            if token in self._chat.special_ids or len(piece) < SHORTEST_SPLIT:
                piece = ""
            halves = ((self._pieces.get(piece[:k]), self._pieces.get(piece[k:])) for k in range(1, len(piece)))
            self._splits[token] = tuple((a, b) for a, b in halves if a is not None and b is not None)
        return self._splits[token]


def continued(text: str) -> str:
    """Return a text as it goes on behind a prompt that has begun the think block."""
    return text.removeprefix(f"{THINK}\n") if text.startswith(THINK) else f"{THINK_END}\n\n{text}"
