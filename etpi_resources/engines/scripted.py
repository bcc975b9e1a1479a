"""An engine that speaks a policy's words: a teacher without a model.

Belongs here: turning text that a policy writes into ids the way a model would emit them. Does not belong here: any
policy, which is a function from a request to text.

A sampling model does not always spell a text in its tokenizer's canonical pieces. So a seeded share of the
longer tokens is split in two here: the ids decode to the same text but differ from its re-tokenisation, and a
pipeline that re-tokenises where it claims to be native is found out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etpi_resources.engines import Completion, FinishReason, Request

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat

SHORTEST_SPLIT = 3
"""Names in the embedded world are spelled in tokens of two letters; split, they leave a student nothing to copy by."""

Policy = Callable[[Request], str]
"""What the policy says in answer to a request; it may read `Request.privileged`. Deterministic in the request."""


class ScriptedEngine:
    """Emits a policy's text as native token ids, the end-of-turn id after it, cut at the request's max_tokens.

    Attributes:
        noncanonical: the share of splittable tokens that are split: 5 % of all that the shipped policies say. Special
            tokens never are, nor tokens of fewer than SHORTEST_SPLIT characters.

    Deterministic in (sampler seed, request id), and without state between requests, so threads may share it.
    """

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
        """Nothing is held."""

    def _complete(self, request: Request) -> Completion:
        text = self._policy(request)
        draw = random.Random(f"{request.sampler.seed}/{request.request_id}")
        ids: list[int] = []
        for token in self._chat.encode(text):
            splits = self._splits_of(token)
            if splits and draw.random() < self.noncanonical:
                ids.extend(splits[draw.randrange(len(splits))])
            else:
                ids.append(token)
        ids.append(self._chat.end_id)
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
        """Every way to write a token as two others of the vocabulary; none for special tokens."""
        if token not in self._splits:
            piece = self._tokens[token]
            if token in self._chat.special_ids or len(piece) < SHORTEST_SPLIT:
                piece = ""
            halves = ((self._pieces.get(piece[:k]), self._pieces.get(piece[k:])) for k in range(1, len(piece)))
            self._splits[token] = tuple((a, b) for a, b in halves if a is not None and b is not None)
        return self._splits[token]
