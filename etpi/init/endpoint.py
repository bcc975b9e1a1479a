"""Look at a server with an OpenAI-compatible interface, and write the specs that collect rollouts from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from etpi.init.student import Student, family_vocabulary
from etpi.init.write import NewSpec, rendered
from etpi_assets.specs.load import SpecError, Specs
from etpi_assets.specs.rollout_set import AgentSection, checked_url
from etpi_resources.engines.bounded_http import BoundedClient
from etpi_resources.engines.endpoints import api_key
from etpi_resources.outside import Unreadable, read_json

_MOST_BYTES = 8 << 20
_SECONDS = 10.0
_TOKENS = 32768
"""Limit of prompt and output where the server does not say its own."""


@dataclass(frozen=True)
class Endpoint:
    """A server, as its list of models describes it.

    Attributes:
        kind: "vllm" where a vLLM server's token ids can be recorded, else "openai": text only.
        url: as `engine.urls` of that kind needs it.
        model: the name under which the server offers the teacher.
        tokenizer: vllm: the chat format of the served model.
        context: the longest sequence that the server takes, if it says so.
        reason: why this kind was chosen.
    """

    kind: Literal["vllm", "openai"]
    url: str
    model: str
    key_variable: str | None
    tokenizer: str = "tiny"
    context: int | None = None
    reason: str = ""


def read_endpoint(url: str, model: str | None, key_variable: str | None) -> Endpoint:
    """Ask the server for its models.

    Args:
        model: the name of one of them; None where the server has only one.

    Raises:
        SpecError: the server does not answer as such an endpoint, refuses the key, or does not offer the model.
        EngineUnavailable: the variable of the key is not set.
    """
    try:
        base = checked_url(url).rstrip("/")
    except ValueError as error:
        raise SpecError(f"the endpoint: {error}") from error
    base += "" if urlsplit(url).path.strip("/") else "/v1"
    cards = {str(card["id"]): card for card in _cards(base, key_variable)}
    if model is None and len(cards) == 1:
        model = next(iter(cards))
    if model not in cards:
        named = f"--model {model} is none of them" if model else "name one with --model"
        raise SpecError(f"{url} offers {', '.join(cards) or 'no model'}; {named}")
    card = cards[model]
    context = length if type(length := card.get("max_model_len")) is int and length > 0 else None
    tokenizer = family_vocabulary(str(card.get("root") or model))
    if card.get("owned_by") != "vllm":
        return Endpoint("openai", base, model, key_variable, context=context, reason="it returns text, no token ids")
    if tokenizer is None:
        reason = f"a vLLM server, whose token ids are not used: etpi does not know the tokenizer of {card.get('root')}"
        return Endpoint("openai", base, model, key_variable, context=context, reason=reason)
    served = base.removesuffix("/v1")
    return Endpoint("vllm", served, model, key_variable, tokenizer, context, "a vLLM server: token ids are recorded")


def _cards(base: str, key_variable: str | None) -> Sequence[Mapping[str, Any]]:
    key = api_key(key_variable)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    client = BoundedClient(headers=headers, connect_seconds=_SECONDS, proxies=True)
    try:
        answer = client.send("GET", f"{base}/models", seconds=_SECONDS, most_bytes=_MOST_BYTES)
    except (httpx.HTTPError, Unreadable) as error:
        raise SpecError(f"{base}/models does not answer ({error}); is the server running?") from error
    finally:
        client.close()
    if answer.moved_to:
        raise SpecError(f"{base} moved to {answer.moved_to.removesuffix('/models')}; write that address")
    if answer.status in (401, 403):
        named = f"correct the key in {key_variable}" if key else "name the key's variable with --api-key-env"
        raise SpecError(f"{base}/models refuses the request ({answer.status}); {named}")
    try:
        listed = read_json(answer.body, _MOST_BYTES // 16) if answer.status < 300 else {}
        cards = listed if isinstance(listed, list) else listed["data"]  # Together sends the list alone
    except (ValueError, KeyError, TypeError) as error:
        text = answer.body.decode("utf-8", "replace")
        text = (text.replace(key, f"${key_variable}") if key else text)[:200]
        raise SpecError(
            f"{base}/models is no list of models ({answer.status}: {text}); give the URL up to /v1, "
            "and a key with --api-key-env"
        ) from error
    return [card for card in cards if isinstance(card, dict) and "id" in card]


def summary(endpoint: Endpoint) -> str:
    context = f"{endpoint.context:,} tokens" if endpoint.context else "a context that it does not name"
    return f"{endpoint.url}: {endpoint.model}, {context}; engine {endpoint.kind}: {endpoint.reason}"


def suite_agent(suite: str, specs: Specs) -> tuple[AgentSection, str]:
    """Return the agent and the kind of sandbox that a known rollout set on a suite of the same family has.

    Raises SpecError: there is no such suite.
    """
    spec = specs.get("suite", suite)
    for rollout_set in specs.rollout_sets.values():
        other = specs.suites.get(rollout_set.suite or "")
        if other and other.family == spec.family and rollout_set.kind == "live":
            return rollout_set.agent, rollout_set.sandbox
    return AgentSection(prompt="solo"), "bubblewrap"


def rollout_set_spec(name: str, suite: str, endpoint: Endpoint, agent: AgentSection, sandbox: str) -> NewSpec:
    """Return the rollout set that collects the teacher's rollouts."""
    limit = min(endpoint.context or _TOKENS, 131072)
    text = rendered("collected", suite=suite, endpoint=endpoint, agent=agent, sandbox=sandbox, limit=limit)
    return NewSpec("rollout_set", name, text)


def same_ids(endpoint: Endpoint, student: Student) -> bool:
    """Return whether the recorded ids are of the student's tokenizer."""
    return endpoint.kind == "vllm" and student.names.get("tokenizer", "tiny") == endpoint.tokenizer
