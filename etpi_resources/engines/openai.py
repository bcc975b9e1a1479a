"""Any OpenAI-compatible endpoint as an engine: a hosted teacher, which returns text and no ids.

Curation turns the text into the student's form and ids (`pairs.capture = "retokenised"`). Structured calls and
reasoning stay separate fields of `message`, as the endpoint returns them. The `openai` package retries 408, 409, 429,
5xx, timeouts and lost connections with backoff, and obeys Retry-After.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from etpi_resources.engines import Completion, EngineUnavailable, FinishReason, Request
from etpi_resources.engines.endpoints import ATTEMPTS, api_key

CONCURRENCY = 64
_FINISH: Mapping[str | None, FinishReason] = {
    "stop": "stop", "tool_calls": "stop", "function_call": "stop", "length": "length",
}  # fmt: skip


class OpenAIEngine:
    """A model behind one endpoint.

    Args:
        model: the endpoint's name for it; also the engine's name.
        url: the endpoint's base URL, version path included.
        key_env: name of the environment variable with the key; None for an endpoint without keys.
        timeout: seconds a request may take.
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
        import openai

        self.name, self._url, self._key_env = model, url, key_env
        self._key = api_key(key_env)
        self._timeout = timeout
        self._template_kwargs = dict(template_kwargs or {})
        self._attempts = attempts
        self._client = openai.OpenAI(
            api_key=self._key or "none", base_url=url, timeout=timeout, max_retries=attempts - 1
        )
        self._threads = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix=f"openai {model}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the key: a copy reads it from its own environment."""
        return _open, (self.name, self._url, self._key_env, self._timeout, self._template_kwargs, self._attempts)

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
        self._client.close()

    def _complete_one(self, request: Request) -> Completion:
        import openai

        if request.grammar is not None:
            raise EngineUnavailable(f"{self.name}: an OpenAI endpoint takes no grammar; serve the model with vLLM")
        try:
            answer = self._client.chat.completions.create(**self._body(request))
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise EngineUnavailable(
                f"{self._without_key(error)}. Check engine.model, engine.urls and the key that api_key_env names"
            ) from None
        except (openai.APIConnectionError, openai.RateLimitError, openai.InternalServerError) as error:
            raise EngineUnavailable(
                f"{self._without_key(error)} ({self._attempts} tries). Finished rollouts are kept; start again later"
            ) from None
        except openai.APIError as error:
            raise RuntimeError(self._without_key(error)) from None
        return self._completion(request, answer)

    def _body(self, request: Request) -> dict[str, Any]:
        sampler = request.sampler
        digest = hashlib.sha256(f"{sampler.seed}/{request.request_id}".encode()).digest()
        body: dict[str, Any] = {
            "model": self.name,
            # Strict endpoints refuse a message that sends their reasoning back.
            "messages": [{k: v for k, v in message.items() if k != "reasoning"} for message in request.messages],
            "max_tokens": sampler.max_tokens,
            "temperature": sampler.temperature,
            "top_p": sampler.top_p,
            "seed": int.from_bytes(digest[:4], "big") >> 1,
        }
        if request.tools:
            body["tools"] = list(request.tools)
        if self._template_kwargs:
            body["extra_body"] = {"chat_template_kwargs": self._template_kwargs}
        return body

    def _completion(self, request: Request, answer: Any) -> Completion:
        if not answer.choices or answer.choices[0].finish_reason not in _FINISH:
            reason = answer.choices[0].finish_reason if answer.choices else "no choice"
            raise RuntimeError(f"{self.name} ended {request.request_id} with {reason!r}")
        choice = answer.choices[0]
        fields = choice.message.model_dump(mode="json", exclude_none=True)
        message: dict[str, Any] = {"role": "assistant", "content": fields.get("content") or ""}
        if calls := fields.get("tool_calls"):
            message["tool_calls"] = calls
        if reasoning := fields.get("reasoning_content") or fields.get("reasoning"):
            message["reasoning"] = reasoning
        return Completion(
            prompt_ids=None,
            output_ids=None,
            logprobs=None,
            text=message["content"],
            finish_reason=_FINISH[choice.finish_reason],
            model=answer.model or self.name,
            message=message,
        )

    def _without_key(self, error: Exception) -> str:
        """Return the error's text without the key, which some endpoints repeat."""
        text = f"{self._url}: {error}"[:1000]
        return text.replace(self._key, f"${self._key_env}") if self._key else text


def _open(
    model: str, url: str, key_env: str | None, timeout: float, template_kwargs: Mapping[str, Any], attempts: int
) -> OpenAIEngine:
    return OpenAIEngine(
        model, url=url, key_env=key_env, timeout=timeout, template_kwargs=template_kwargs, attempts=attempts
    )
