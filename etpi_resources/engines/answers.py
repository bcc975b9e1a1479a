"""The answers of OpenAI-compatible servers as types: coerced where servers differ, refused where nothing fits."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, FiniteFloat, StrictBool, StrictInt, ValidationError


def _text(value: Any) -> str:
    return "".join(_texts(value))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a content: a text, a part with one, or a list of them. Raises ValueError for other values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(next((value[key] for key in _PART_KEYS if value.get(key)), None))
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif value is not None:
        raise ValueError(f"{type(value).__name__} is no text")


_PART_KEYS = ("text", "thinking", "reasoning", "summary", "refusal")


def _message(value: Any) -> Any:
    """Return a server's message with one name for its text, its reasoning and its calls. A refusal is text."""
    if not isinstance(value, Mapping):
        return value or {"role": "assistant", "content": ""}
    content, thoughts = value.get("content") or value.get("refusal"), value.get("reasoning")
    thoughts = thoughts or value.get("reasoning_content")
    if isinstance(content, list):  # Mistral sends thoughts as parts of the content
        thinking = [part for part in content if isinstance(part, Mapping) and part.get("type") in _THINKING]
        thoughts = thoughts or thinking
        content = [part for part in content if part not in thinking]
    calls = value.get("tool_calls")
    if not calls and value.get("function_call"):  # of OpenAI's older interface
        calls = [{"function": value["function_call"]}]
    if isinstance(calls, list):
        calls = [_whole_call(call) for call in calls if call is not None]
    more = {"tool_calls": calls, "reasoning": _text(thoughts)}
    return {"role": "assistant", "content": content} | {key: part for key, part in more.items() if part}


def _whole_call(call: Any) -> Any:
    """Return a call with an id, which its answer names, and with its arguments as text: some servers leave out the id,
    or send an object, and refuse that in the next request."""
    if not isinstance(call, Mapping):
        return call
    whole = {**call, "id": call.get("id") or uuid.uuid4().hex[:9], "type": call.get("type") or "function"}
    if isinstance(function := call.get("function"), Mapping) and not isinstance(function.get("arguments"), str):
        arguments = function.get("arguments")
        whole["function"] = {**function, "arguments": json.dumps({} if arguments is None else arguments)}
    return whole


_THINKING = ("thinking", "reasoning")
Text = Annotated[str, BeforeValidator(_text)]


class _Open(BaseModel):
    """Keeps the fields that it does not name: some servers want them back."""

    model_config = ConfigDict(extra="allow", coerce_numbers_to_str=True)


class _Function(_Open):
    name: str
    arguments: str


class _Call(_Open):
    id: str
    type: str
    function: _Function


class _Message(BaseModel):
    role: str
    content: Text
    tool_calls: list[_Call] = []
    reasoning: str = ""


class _Entry(_Open):
    logprob: FiniteFloat


class _Logprobs(_Open):
    token_logprobs: list[FiniteFloat] | None = None
    content: list[_Entry] | None = None


class Choice(_Open):
    finish_reason: str | None = None
    message: Annotated[_Message, BeforeValidator(_message)] | None = None
    text: str | None = None
    token_ids: list[StrictInt] | None = None
    prompt_token_ids: list[StrictInt] | None = None
    logprobs: _Logprobs | None = None


class Completed(_Open):
    """The answer to a request for a completion or a chat completion."""

    model: str | None = None
    choices: list[Choice]
    prompt_token_ids: list[StrictInt] | None = None


class _Card(_Open):
    id: str
    root: str | None = None
    parent: str | None = None


class Models(_Open):
    """A server's list of models."""

    data: list[_Card]


class Tokens(_Open):
    """The answer of vLLM's /tokenize."""

    tokens: list[StrictInt]


class Success(_Open):
    """The answer of vLLM's /reset_prefix_cache."""

    success: StrictBool


def typed(answer: Any, model: type[BaseModel]) -> dict[str, Any]:
    """Return an answer as the model has it. Raises ValueError, which names the first field that does not fit."""
    try:
        return model.model_validate(answer).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "value"
        raise ValueError(f"{where}: {first['msg'][:200]}") from None
