"""vLLM as an engine: requests to running servers, with token ids in and out, or captured behind the chat template.

With request = "tokens" the prompt is the loop's own ids. With "chat" the server renders the messages with its template
and parsers, and the engine returns the ids that the server reports: such a prompt may not extend the last turn, which
the tables record as drift. An answer without ids stops the collection. HTTP and retries are in `endpoints`, starting a
server is in `vllm_server`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from etpi_resources.chat.tokenizer_files import PROBE
from etpi_resources.engines import Completion, EngineUnavailable, Request, ServedModel
from etpi_resources.engines.answers import Models, Success, Tokens
from etpi_resources.engines.endpoints import FINISH, Endpoints, RetryableError

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat

CONCURRENCY = 512
"""The most requests sent at once; the server batches them."""

NO_IDS = (
    "{model} at {urls} answered without token ids ({what}). Capture needs a vLLM that supports `return_token_ids`, and "
    'no proxy that drops fields; for an endpoint without ids use engine.kind = "openai", and build pairs with '
    'pairs.capture = "retokenised"'
)


class VllmEngine:
    """One model of one or more vLLM servers.

    Args:
        model: its name in the servers' model lists; also the engine's name.
        chat: the format of the prompts; the servers' tokenizers must give the same ids.
        request: whether `complete` sends ids ("tokens") or messages ("chat").
        template_kwargs: arguments of the server's chat template, for chat requests.
        settings: further fields of the fingerprint.
        release: called by `close`, to end a server that only this engine uses.
    Raises:
        EngineUnavailable: no server answers, or one does not list the model or has another vocabulary.
    """

    portable = True

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
        self._names, self._vocab_size = {model}, chat.vocab_size
        try:
            self._check_model_and_vocabulary()
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a client of the same servers, which releases nothing."""
        options = {"template_kwargs": self._template_kwargs, "settings": self._settings}
        copied = partial(VllmEngine, self._endpoints, self.name, self._chat, request=self._request, **options)
        return copied, ()

    @property
    def urls(self) -> list[str]:
        return self._endpoints.urls

    @property
    def answered_urls(self) -> list[str]:
        """The servers that have answered, so that rollouts may have come from them."""
        return self._endpoints.answered_urls

    def exit_reason(self) -> str | None:
        """Return why the servers that this process started for the engine ended; None while one runs, or if it started
        none."""
        return self._endpoints.exit_reason()

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return one completion per request, in order.

        Raises:
            EngineUnavailable: no server answers within the tries, or one answers without ids.
            RuntimeError: a server refuses one of the requests (a prompt too long, a grammar it cannot read), or its
                answer is of another model, has ids that the vocabulary lacks, or ids that are not those of its text.
        """
        return self._map(self._complete_chat if self._request == "chat" else self._complete_ids, requests)

    def chat(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete through the server's template and parsers, whatever `request` says."""
        return self._map(self._complete_chat, requests)

    def prompt_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Return the natural-log probability, at temperature 1, of each id but the first, (len(ids) - 1,).

        The server computes them without its prefix cache.

        Raises:
            EngineUnavailable: as `complete`, or an answer lacks a log-probability.
        """
        return self._prompt_logprobs(ids, self._endpoints.post("/v1/completions", self._probe_body(ids)))

    def prompt_logprobs_by_server(self, ids: Sequence[int]) -> dict[str, list[float]]:
        """Return {URL: `prompt_logprobs`} of every server that answers at the first try.

        Raises:
            EngineUnavailable: an answer lacks a log-probability.
            RuntimeError: a server refuses the request.
        """
        results: dict[str, list[float]] = {}
        for url in self._endpoints.urls:
            with suppress(RetryableError):
                answer = self._endpoints.complete(url, "/v1/completions", self._probe_body(ids))
                results[url] = self._prompt_logprobs(ids, answer)
        return results

    def _probe_body(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"model": self.name, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}

    def _prompt_logprobs(self, ids: Sequence[int], answer: Any) -> list[float]:
        try:
            (choice,) = answer["choices"]
            entries = choice["prompt_logprobs"]
            return [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)]
        except (KeyError, TypeError, ValueError):
            urls = ", ".join(self._endpoints.urls)
            raise EngineUnavailable(
                f"{self.name} at {urls} does not answer with `prompt_logprobs` as vLLM does"
            ) from None

    def list_models(self) -> list[ServedModel]:
        return [model for url in self._endpoints.urls for model in self._list_models(url)]

    def fingerprint(self) -> Mapping[str, Any]:
        fields = {"engine": "vllm", "model": self.name, "request": self._request, **self._settings}
        return fields | ({"template_kwargs": self._template_kwargs} if self._request == "chat" else {})

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        release, self._release = self._release, lambda: None
        release()

    # --- requests --------------------------------------------------------------------------------------------------

    def _map(self, complete: Callable[[Request], Completion], requests: Sequence[Request]) -> list[Completion]:
        return [complete(requests[0])] if len(requests) == 1 else list(self._threads.map(complete, requests))

    def _complete_ids(self, request: Request) -> Completion:
        body = {
            "prompt": list(request.prompt_ids),
            "logprobs": 0,
            # Only the loop's own end-of-turn ids: a model's files may name more.
            "stop_token_ids": sorted(self._chat.end_ids),
            "ignore_eos": True,
            # The text is compared with the ids, so it must have every token but the last one.
            "skip_special_tokens": False,
        }
        answer = self._endpoints.post("/v1/completions", self._common_body(request) | body, request.session)
        (choice,) = answer["choices"]
        prompt, output = self._ids(choice.get("prompt_token_ids"), choice.get("token_ids"))
        if prompt != body["prompt"]:
            raise EngineUnavailable(
                f"{self.name} at {', '.join(self._endpoints.urls)} read a prompt of {len(prompt)} ids, but "
                f"{len(body['prompt'])} were sent: it cuts or rewrites prompts; start it without truncation"
            )
        self._require_own_answer(request, answer, output)
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        completion = self._completion(request, choice, prompt, output, logprobs, None)
        text = choice.get("text")
        if isinstance(text, str) and not same_text(text, completion.text):
            raise RuntimeError(f"{self.name} answered {request.request_id} with ids that are not those of its text")
        return completion

    def _complete_chat(self, request: Request) -> Completion:
        body: dict[str, Any] = {"messages": [dict(m) for m in request.messages], "logprobs": True, "top_logprobs": 0}
        if request.tools:
            body |= {"tools": list(request.tools), "tool_choice": "auto"}
        if self._template_kwargs:
            body["chat_template_kwargs"] = self._template_kwargs
        answer = self._endpoints.post("/v1/chat/completions", self._common_body(request) | body, request.session)
        (choice,) = answer["choices"]
        prompt, output = self._ids(answer.get("prompt_token_ids"), choice.get("token_ids"))
        self._require_own_answer(request, answer, [*prompt, *output])
        logprobs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
        message = choice.get("message") or {"role": "assistant", "content": ""}
        return self._completion(request, choice, prompt, output, logprobs, message)

    def _common_body(self, request: Request) -> dict[str, Any]:
        sampler = request.sampler
        body = {
            "model": self.name,
            "max_tokens": sampler.max_tokens,
            "temperature": sampler.temperature,
            "top_p": sampler.top_p,
            "seed": request.seed(bits=63),
            # Set explicitly, because a server's defaults may come from the model's files.
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
        missing = [name for name, ids in (("prompt_token_ids", prompt), ("token_ids", output)) if not _are_ids(ids)]
        if missing:
            urls = ", ".join(self._endpoints.urls)
            raise EngineUnavailable(NO_IDS.format(model=self.name, urls=urls, what=f"no {' and no '.join(missing)}"))
        return prompt, output

    def _require_own_answer(self, request: Request, answer: Mapping[str, Any], ids: Sequence[int]) -> None:
        """Raise RuntimeError if the answer is another model's or has ids that the vocabulary lacks."""
        if answer.get("model", self.name) not in self._names:
            raise RuntimeError(f"{self.name}: {answer['model']!r} answered {request.request_id}")
        if not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise RuntimeError(
                f"{self.name} answered {request.request_id} with ids from {min(ids)} to {max(ids)}, but the "
                f"vocabulary has {self._vocab_size}"
            )

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
        if reason not in FINISH:
            raise RuntimeError(f"{self.name} ended {request.request_id} with finish_reason {reason!r}")
        text_ids = self._chat.without_end(output)
        return Completion(
            prompt_ids=prompt,
            output_ids=output,
            logprobs=list(logprobs) if logprobs and len(logprobs) == len(output) else None,
            text=self._chat.decode(text_ids),
            finish_reason=FINISH[reason],
            model=self.name,
            message=message,
        )

    # --- the servers -----------------------------------------------------------------------------------------------

    def _list_models(self, url: str) -> list[ServedModel]:
        cards = self._endpoints.request(url, "GET", "/v1/models", model=Models)["data"]
        return [ServedModel(card["id"], card.get("root"), card.get("parent")) for card in cards]

    def _check_model_and_vocabulary(self) -> None:
        """Check that at least one server answers, and that each that does lists the model and tokenizes alike."""
        expected, errors = self._chat.encode(PROBE), []
        for url in self._endpoints.urls:
            try:
                cards = {model.name: model.root for model in self._list_models(url)}
                if self.name not in cards:
                    names = list(cards)
                    raise EngineUnavailable(f"{url} serves {names}, not {self.name!r}; set engine.model to one of them")
                # A server may answer with the first of a model's names.
                self._names |= {name for name, root in cards.items() if root and root == cards[self.name]}
                body = {"model": self.name, "prompt": PROBE, "add_special_tokens": False}
                tokens = self._endpoints.request(url, "POST", "/tokenize", body, model=Tokens)["tokens"]
            except RetryableError as error:
                errors.append(str(error))
                continue
            if tokens != expected:
                raise EngineUnavailable(
                    f"{url} encodes text to other ids than the tokenizer {self._chat.name!r}, so it would misread "
                    "token-in prompts. Name the served model's own tokenizer (agent.tokenizer; base.tokenizer of an "
                    "experiment)"
                )
        if len(errors) == len(self._endpoints.urls):
            raise EngineUnavailable(f"no vLLM server answers: {'; '.join(errors)}")


@contextmanager
def loaded_adapter(endpoints: Endpoints, name: str, folder: Path) -> Iterator[None]:
    """Serve the adapter in `folder` under `name` on every server until the context ends.

    Raises:
        EngineUnavailable: a server cannot load it, or already has the name, perhaps for another adapter.
    """
    loaded = []
    try:
        for url in endpoints.urls:
            try:
                endpoints.request(url, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
            except RuntimeError as error:
                raise EngineUnavailable(
                    f"the adapter {name} cannot be served: {error}. The server needs --enable-lora, --max-lora-rank of "
                    "the adapter's rank, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; a name that is taken must be unloaded"
                ) from None
            loaded.append(url)
        yield
    finally:
        for url in loaded:
            with suppress(RuntimeError):  # the server may be gone
                endpoints.request(url, "POST", "/v1/unload_lora_adapter", {"lora_name": name})


RELOAD_ENVIRONMENT: Mapping[str, str] = {"VLLM_SERVER_DEV_MODE": "1"}
"""The environment variables a server needs for `reload_weights`; they open calls that other machines must not reach."""


def reload_weights(endpoints: Endpoints, folder: Path) -> None:
    """Make every server replace its weights with those in `folder`, and clear its prefix cache.

    Args:
        folder: safetensors with the parameter names of the served model; not needed afterwards.
    Raises:
        EngineUnavailable: a server did not load the weights, or a request under way keeps it from clearing its cache.
    """
    for url in endpoints.urls:
        try:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            endpoints.request(url, "POST", "/collective_rpc", reload)
            reset = endpoints.request(url, "POST", "/reset_prefix_cache", model=Success)
        except RuntimeError as error:
            raise EngineUnavailable(
                f"{url} did not load the weights in {folder}: {error}. It must be a vLLM of version 0.32 that was "
                f"started with {', '.join(f'{key}={value}' for key, value in RELOAD_ENVIRONMENT.items())}"
            ) from None
        if not reset["success"]:
            raise EngineUnavailable(f"{url} still caches keys and values of earlier weights: a request is under way")


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def same_text(text: str, decoded: str) -> bool:
    """Return whether a server's text can be that of the decoded ids.

    Only letters and digits are compared, because servers strip white space and cut characters in their own ways.
    """
    return "".join(filter(str.isalnum, text)) == "".join(filter(str.isalnum, decoded))
