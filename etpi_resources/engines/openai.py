"""Any OpenAI-compatible endpoint as an engine: a hosted teacher, which returns text and no ids.

Curation turns the text into the student's form and ids (`pairs.capture = "retokenised"`). Structured calls and
reasoning stay separate fields of `message`, as the endpoint returns them.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from etpi_resources.engines import Completion, EngineUnavailable, Request
from etpi_resources.engines.endpoints import ATTEMPTS, FINISH, Endpoints

CONCURRENCY = 64

_PATH = "/chat/completions"
_SMALL = [{"role": "user", "content": "Hello"}]
_REFUSES_ALL = (
    "The endpoint refuses a small request too: check engine.model, engine.urls, engine.api_key_env, and whether the "
    "model takes agent.temperature and agent.top_p"
)

_LOG = logging.getLogger(__name__)
_FIELDS = ("max_completion_tokens", "top_p", "seed", "temperature")
"""Fields that an endpoint may require or refuse, by the name in its error: OpenAI's reasoning models take another name
of the limit, Anthropic refuses top_p beside a temperature, Mistral a seed."""

_THOUGHTS = "reasoning_content"
"""The field of messages that DeepSeek and Moonshot require in turns with calls, and that other endpoints refuse."""


class OpenAIEngine:
    """A model behind one endpoint.

    Args:
        model: the endpoint's name for it; also the engine's name.
        url: the endpoint's base URL, version path included.
        key_env, timeout, attempts: see `Endpoints`.
        template_kwargs: sent as `chat_template_kwargs`, for endpoints that support it.
    Raises:
        EngineUnavailable: the key is not set.
    """

    portable = True

    def __init__(
        self,
        model: str,
        *,
        url: str,
        key_env: str | None = None,
        timeout: float = 600.0,
        template_kwargs: Mapping[str, Any] | None = None,
        attempts: int = ATTEMPTS,
    ) -> None:
        self.name, self._url, self._template_kwargs = model, url, dict(template_kwargs or {})
        self._settings = {"key_env": key_env, "timeout": timeout, "attempts": attempts}
        self._endpoint = Endpoints([url], proxies=True, **self._settings)
        self._changes: tuple[str, ...] = ()
        self._learning = threading.Lock()
        self._threads = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix=f"openai {model}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the key: a copy reads it from its own environment."""
        options = {"url": self._url, "template_kwargs": self._template_kwargs, **self._settings}
        return partial(OpenAIEngine, self.name, **options), ()

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return one completion per request, in order, without ids.

        Raises:
            EngineUnavailable: the endpoint does not answer within the tries, refuses the key or does not know the
                model; or a request has a grammar.
            RuntimeError: the endpoint refuses one of the requests.
        """
        if len(requests) == 1:
            return [self._complete_one(requests[0])]
        return list(self._threads.map(self._complete_one, requests))

    def fingerprint(self) -> Mapping[str, Any]:
        return {"engine": "openai", "model": self.name, "url": self._url, "template_kwargs": self._template_kwargs}

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._endpoint.close()

    def _complete_one(self, request: Request) -> Completion:
        if request.grammar is not None:
            raise EngineUnavailable(f"{self.name}: an OpenAI endpoint takes no grammar; serve the model with vLLM")
        answer = self._post(request)
        (choice,) = answer["choices"]
        if (reason := choice.get("finish_reason")) not in FINISH:
            raise RuntimeError(f"{self.name} ended {request.request_id} with {reason!r}")
        message = choice.get("message") or {"role": "assistant", "content": ""}
        return Completion(
            prompt_ids=None,
            output_ids=None,
            logprobs=None,
            text=message["content"],
            finish_reason=FINISH[reason],
            model=answer.get("model") or self.name,
            message=message,
        )

    def _post(self, request: Request) -> dict[str, Any]:
        """Send a request; if the endpoint needs requests changed, send it again, changed."""
        body, changes = self._body(request), self._changes
        while True:
            sent = _sent(body, changes)
            try:
                return self._endpoint.post(_PATH, sent, request.session, probe={**sent, "messages": _SMALL})
            except EngineUnavailable:
                raise
            except RuntimeError as error:
                with self._learning:
                    if self._changes == changes:
                        self._learn(body, str(error))
                    if self._changes == changes:
                        raise
                    changes = self._changes

    def _learn(self, body: Mapping[str, Any], refusal: str) -> None:
        """Find the changes with which the endpoint takes a small request of this form, and keep them in `_changes`.

        Its answers decide, because the refusal of another request may quote text with the name of a field.

        Raises:
            EngineUnavailable: it refuses the small request however that is changed.
        """
        small, changes, tried, last = {**body, "messages": _SMALL}, self._changes, {*self._changes}, None
        while (error := self._refusal(_sent(small, changes))) is not None:
            if error == last:  # the last change did not help
                changes = changes[:-1]
            named = (name for name in _FIELDS if name not in tried and re.search(rf"\b{name}\b", error))
            change = next((name for name in named if _changes_nothing(small, name)), None)
            if change is None:
                raise EngineUnavailable(f"{error}. {_REFUSES_ALL}")
            changes, last = (*changes, change), error
            tried.add(change)
        if _THOUGHTS in refusal and _THOUGHTS not in changes:
            changes = (*changes, _THOUGHTS)
        if changes != self._changes:
            _LOG.warning("%s: the endpoint needs requests changed in %s", self.name, ", ".join(changes))
            self._changes = changes

    def _refusal(self, body: Mapping[str, Any]) -> str | None:
        try:
            self._endpoint.post(_PATH, body)
        except EngineUnavailable:
            raise
        except RuntimeError as error:
            return str(error)
        return None

    def _body(self, request: Request) -> dict[str, Any]:
        sampler = request.sampler
        body: dict[str, Any] = {
            "model": self.name,
            "messages": request.messages,
            "max_tokens": sampler.max_tokens,
            "temperature": sampler.temperature,
            "top_p": sampler.top_p,
            "seed": request.seed(bits=31),
        }
        if request.tools:
            body["tools"] = list(request.tools)
        if self._template_kwargs:
            body["chat_template_kwargs"] = self._template_kwargs
        return body


def _changes_nothing(body: Mapping[str, Any], name: str) -> bool:
    """Return whether a request without the field asks for the same sampling; a seed is no promise of an endpoint."""
    return name not in ("top_p", "temperature") or body[name] == 1.0


def _sent(body: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Return the body as it is sent. Strict endpoints refuse a message that sends their reasoning back."""
    sent = {key: value for key, value in body.items() if key not in changes or not _changes_nothing(body, key)}
    if "max_completion_tokens" in changes:
        sent["max_completion_tokens"] = sent.pop("max_tokens")
    sent["messages"] = [{k: v for k, v in message.items() if k != "reasoning"} for message in body["messages"]]
    if _THOUGHTS in changes:
        for message, plain in zip(body["messages"], sent["messages"], strict=True):
            if plain["role"] == "assistant":
                plain[_THOUGHTS] = message.get("reasoning") or ""
    return sent
