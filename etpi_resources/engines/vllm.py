"""vLLM as an engine: token ids in and out of its completions, or captured behind its chat template.

Belongs here: what is asked of a vLLM server and how its answers are read. Does not belong here: transport and retries
(`endpoints`), or starting a server (`vllm_server`).

With request = "tokens" the prompt is the loop's own ids. With "chat" the server renders the messages with its template
and parsers, and the ids that it reports are kept as they are: a prompt may then depart from the last turn, which the
tables record as drift. An answer without ids stops the collection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from etpi_resources.engines import Completion, EngineUnavailable, FinishReason, Request, ServedModel
from etpi_resources.engines.endpoints import Endpoints, Unanswered

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat

CONCURRENCY = 128
"""Requests on their way at once; the server batches them."""

_SPELLING = "def halve(n):\n    return n // 2  # 50 %, naïve\n<think>\n</think>\n<tool_call>"
"""A text that two vocabularies do not spell alike."""

_FINISH: Mapping[str | None, FinishReason] = {"stop": "stop", "tool_calls": "stop", "length": "length"}

NO_IDS = (
    "{model} at {urls} answered without token ids ({what}). Capture needs a vLLM that knows `return_token_ids`, with "
    'nothing between that drops fields; for an endpoint without ids use engine.kind = "openai", and build pairs with '
    'pairs.capture = "retokenised"'
)


class VllmEngine:
    """Requests to one model of one or more vLLM servers.

    Args:
        model: the name that the servers list it under; also the engine's name.
        chat: the tokenizer of the prompts; the servers' must spell alike.
        request: what `complete` sends, ids ("tokens") or messages ("chat").
        template_kwargs: arguments of the server's chat template, for chat requests.
        settings: what else identifies the model in a rollout's key.
        release: called on closing: ends what only this engine uses.
    Raises:
        EngineUnavailable: no server answers, one does not list the model, or has another vocabulary.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        model: str,
        chat: ChatFormat,
        *,
        request: Literal["tokens", "chat"] = "tokens",
        template_kwargs: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = model
        self._endpoints, self._chat, self._request = endpoints, chat, request
        self._template_kwargs, self._settings = dict(template_kwargs or {}), dict(settings or {})
        self._release = release
        self._threads = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix=f"vllm {model}")
        try:
            self._same_model_and_vocabulary()
        except BaseException:
            self.close()
            raise

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order.

        Raises:
            EngineUnavailable: no server answers within the tries, or one answers without ids.
            RuntimeError: a server refuses one of the requests (a prompt too long, a grammar it cannot read).
        """
        return self._all(self._one_chat if self._request == "chat" else self._one_prompt, requests)

    def chat(self, requests: Sequence[Request]) -> list[Completion]:
        """As `complete`, always through the server's template and parsers."""
        return self._all(self._one_chat, requests)

    def prompt_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Natural-log probability, at temperature 1, of each id but the first (len(ids) - 1,), computed afresh: nothing
        that was cached is used.

        Raises:
            EngineUnavailable: as `complete`, and where an answer lacks one of them.
        """
        body = {"model": self.name, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        (choice,) = self._endpoints.post("/v1/completions", body)["choices"]
        found: list[Any] = choice.get("prompt_logprobs") or [None]
        try:
            return [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], found[1:], strict=True)]
        except (KeyError, TypeError, ValueError):
            urls = ", ".join(self._endpoints.urls)
            raise EngineUnavailable(
                f"{self.name} at {urls} does not answer with `prompt_logprobs` as vLLM does"
            ) from None

    def list_models(self) -> list[ServedModel]:
        return [
            ServedModel(card["id"], card.get("root"), card.get("parent"))
            for url in self._endpoints.urls
            for card in self._endpoints.ask(url, "GET", "/v1/models")["data"]
        ]

    def fingerprint(self) -> Mapping[str, Any]:
        found = {"engine": "vllm", "model": self.name, "request": self._request, **self._settings}
        return found | ({"template_kwargs": self._template_kwargs} if self._request == "chat" else {})

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        release, self._release = self._release, lambda: None
        release()

    # --- requests --------------------------------------------------------------------------------------------------

    def _all(self, one: Callable[[Request], Completion], requests: Sequence[Request]) -> list[Completion]:
        return [one(requests[0])] if len(requests) == 1 else list(self._threads.map(one, requests))

    def _one_prompt(self, request: Request) -> Completion:
        body = {
            "prompt": list(request.prompt_ids),
            "logprobs": 0,
            # The loop's own end of turn and no other: a model's files may name more.
            "stop_token_ids": [self._chat.end_id],
            "ignore_eos": True,
        }
        answer = self._endpoints.post("/v1/completions", self._common(request) | body, request.session)
        (choice,) = answer["choices"]
        prompt, output = self._ids(choice.get("prompt_token_ids"), choice.get("token_ids"))
        if prompt != body["prompt"]:
            raise EngineUnavailable(
                f"{self.name} at {', '.join(self._endpoints.urls)} read {len(prompt)} ids where {len(body['prompt'])} "
                "were sent: it cuts or rewrites prompts; start it without truncation"
            )
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        return self._completion(request, choice, prompt, output, logprobs, None)

    def _one_chat(self, request: Request) -> Completion:
        body: dict[str, Any] = {"messages": [dict(m) for m in request.messages], "logprobs": True, "top_logprobs": 0}
        if request.tools:
            body |= {"tools": list(request.tools), "tool_choice": "auto"}
        if self._template_kwargs:
            body["chat_template_kwargs"] = self._template_kwargs
        answer = self._endpoints.post("/v1/chat/completions", self._common(request) | body, request.session)
        (choice,) = answer["choices"]
        prompt, output = self._ids(answer.get("prompt_token_ids"), choice.get("token_ids"))
        logprobs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
        return self._completion(request, choice, prompt, output, logprobs, _message(choice["message"]))

    def _common(self, request: Request) -> dict[str, Any]:
        sampler = request.sampler
        digest = hashlib.sha256(f"{sampler.seed}/{request.request_id}".encode()).digest()
        body = {
            "model": self.name,
            "max_tokens": sampler.max_tokens,
            "temperature": sampler.temperature,
            "top_p": sampler.top_p,
            "seed": int.from_bytes(digest[:8], "big") >> 1,
            # Said outright: a server's defaults may come from the model's files.
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "return_token_ids": True,
        }
        if request.grammar is not None:
            body["structured_outputs"] = request.grammar.structured_outputs()
        return body

    def _ids(self, prompt: Any, output: Any) -> tuple[list[int], list[int]]:
        missing = [name for name, ids in (("prompt_token_ids", prompt), ("token_ids", output)) if not ids]
        if missing:
            urls = ", ".join(self._endpoints.urls)
            raise EngineUnavailable(NO_IDS.format(model=self.name, urls=urls, what=f"no {' and no '.join(missing)}"))
        return list(prompt), list(output)

    def _completion(
        self,
        request: Request,
        choice: Mapping[str, Any],
        prompt: list[int],
        output: list[int],
        logprobs: Sequence[float] | None,
        message: Mapping[str, Any] | None,
    ) -> Completion:
        reason = choice.get("finish_reason")
        if reason not in _FINISH:
            raise RuntimeError(f"{self.name} ended {request.request_id} with finish_reason {reason!r}")
        spoken = output[:-1] if output[-1] == self._chat.end_id else output
        return Completion(
            prompt_ids=prompt,
            output_ids=output,
            logprobs=list(logprobs) if logprobs and len(logprobs) == len(output) else None,
            text=self._chat.decode(spoken),
            finish_reason=_FINISH[reason],
            model=self.name,
            message=message,
        )

    # --- the servers -----------------------------------------------------------------------------------------------

    def _same_model_and_vocabulary(self) -> None:
        """Every server that answers lists the model and spells as the prompts do; one at least answers."""
        expected, silent = self._chat.encode(_SPELLING), []
        for url in self._endpoints.urls:
            try:
                listed = [card["id"] for card in self._endpoints.ask(url, "GET", "/v1/models")["data"]]
                if self.name not in listed:
                    raise EngineUnavailable(
                        f"{url} serves {listed}, not {self.name!r}; set engine.model to one of them"
                    )
                body = {"model": self.name, "prompt": _SPELLING, "add_special_tokens": False}
                found = self._endpoints.ask(url, "POST", "/tokenize", body)["tokens"]
            except Unanswered as error:
                silent.append(str(error))
                continue
            if found != expected:
                raise EngineUnavailable(
                    f"{url} spells text in other ids than the tokenizer {self._chat.name!r}: token-in prompts would be "
                    "noise to it. Name the served model's own tokenizer (agent.tokenizer; base.tokenizer of an "
                    "experiment)"
                )
        if len(silent) == len(self._endpoints.urls):
            raise EngineUnavailable(f"no vLLM server answers: {'; '.join(silent)}")


@contextmanager
def loaded_adapter(endpoints: Endpoints, name: str, folder: Path) -> Iterator[None]:
    """Serve the adapter in `folder` under `name` on every server, and no longer after.

    Raises:
        EngineUnavailable: a server cannot load it, or has the name already: another adapter may stand behind it.
    """
    loaded = []
    try:
        for url in endpoints.urls:
            try:
                endpoints.ask(url, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
            except RuntimeError as error:
                raise EngineUnavailable(
                    f"the adapter {name} cannot be served: {error}. The server needs --enable-lora, --max-lora-rank of "
                    "the adapter's rank, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; a name that is taken must be unloaded"
                ) from None
            loaded.append(url)
        yield
    finally:
        for url in loaded:
            with suppress(RuntimeError):  # a server that is gone serves nothing
                endpoints.ask(url, "POST", "/v1/unload_lora_adapter", {"lora_name": name})


RELOAD_ENVIRONMENT: Mapping[str, str] = {"VLLM_SERVER_DEV_MODE": "1"}
"""What a server's environment must hold for `reload_weights`; it opens calls that only this machine should reach."""


def reload_weights(endpoints: Endpoints, folder: Path) -> None:
    """Have every server read the weights in `folder` in place of its own, and forget what it computed with those.

    Args:
        folder: safetensors under the names of the model that is served; not needed afterwards.
    Raises:
        EngineUnavailable: a server did not read them, or requests under way still hold what it is to forget.
    """
    for url in endpoints.urls:
        try:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            endpoints.ask(url, "POST", "/collective_rpc", reload)
            forgot = endpoints.ask(url, "POST", "/reset_prefix_cache")
        except RuntimeError as error:
            raise EngineUnavailable(
                f"{url} did not take the weights in {folder}: {error}. It must be a vLLM of version 0.32 that was "
                f"started with {', '.join(f'{key}={value}' for key, value in RELOAD_ENVIRONMENT.items())}"
            ) from None
        if not forgot["success"]:
            raise EngineUnavailable(f"{url} still holds keys and values of earlier weights: a request is under way")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The assistant message as the next request repeats it, reasoning under one name."""
    kept: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = calls
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        kept["reasoning"] = reasoning
    return kept
