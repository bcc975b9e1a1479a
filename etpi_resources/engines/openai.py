"""Any OpenAI-compatible endpoint as an engine: a hosted teacher, which returns text and no ids.

Curation turns the text into the student's form and ids (`pairs.capture = "retokenised"`). Structured calls and
reasoning stay separate fields of `message`, as the endpoint returns them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from etpi_resources.engines import Completion, EngineUnavailable, Request
from etpi_resources.engines.endpoints import ATTEMPTS, FINISH, Endpoints, assistant_message

CONCURRENCY = 64

_PATH = "/chat/completions"
_PROBE = [{"role": "user", "content": "Hello"}]
_REFUSES_ALL = (
    "The endpoint refuses a small request too: check engine.model, engine.urls, engine.api_key_env, and whether the "
    "model takes agent.temperature and agent.top_p"
)

_LOG = logging.getLogger(__name__)
_CHANGES = ("max_completion_tokens", "reasoning_content", "top_p", "seed", "temperature")
"""Fields that an endpoint may require or refuse, by the name in its error: OpenAI's reasoning models take another name
of the limit; DeepSeek and Moonshot require the thoughts of turns with calls; Anthropic refuses top_p beside a
temperature, Mistral a seed."""


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
        message = assistant_message(choice.get("message") or {})
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
        """Send a request; if the endpoint refuses a field whose absence changes nothing, again without the field.

        What helped is done at once from then on.
        """
        body, changes = self._body(request), self._changes
        while True:
            sent = _changed(body, request, changes)
            probe = {key: value for key, value in sent.items() if key != "tools"} | {"messages": _PROBE}
            try:
                answer = self._endpoint.post(_PATH, sent, request.session, probe)
            except EngineUnavailable:
                raise
            except RuntimeError as error:
                names = [name for name in _CHANGES if re.search(rf"\b{name}\b", str(error))]
                change = next((name for name in names if name not in changes and _changes_nothing(body, name)), None)
                if change is None:
                    if not self._endpoint.answered_urls and not self._endpoint.answers(self._url, _PATH, probe):
                        raise EngineUnavailable(f"{error}. {_REFUSES_ALL}") from None
                    raise
                changes = (*changes, change)
                continue
            if changes != self._changes:
                _LOG.warning("%s: the endpoint needs requests changed in %s", self.name, ", ".join(changes))
                self._changes = changes
            return answer

    def _body(self, request: Request) -> dict[str, Any]:
        sampler = request.sampler
        body: dict[str, Any] = {
            "model": self.name,
            # Strict endpoints refuse a message that sends their reasoning back.
            "messages": [{k: v for k, v in message.items() if k != "reasoning"} for message in request.messages],
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


def _changed(body: Mapping[str, Any], request: Request, changes: Sequence[str]) -> dict[str, Any]:
    changed = {key: value for key, value in body.items() if key not in changes}
    if "max_completion_tokens" in changes:
        changed["max_completion_tokens"] = changed.pop("max_tokens")
    if "reasoning_content" in changes:
        changed["messages"] = [
            sent | {"reasoning_content": message.get("reasoning") or ""} if sent["role"] == "assistant" else sent
            for sent, message in zip(body["messages"], request.messages, strict=True)
        ]
    return changed
