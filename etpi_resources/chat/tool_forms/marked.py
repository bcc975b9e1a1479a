"""Forms with markers of one model family: Llama 3, Mistral (two), DeepSeek (two), gpt-oss (harmony) and Muse.

`tagged` has the forms with `<tool_call>` tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial

from etpi_resources.chat.tool_forms.call import (
    BAD_JSON,
    UNCLOSED_CALL,
    Call,
    ParsedCall,
    ToolForm,
    dumps,
    json_object,
    named_object,
    skip_space,
)

# --- Llama 3.1 and 3.2: a turn is one JSON object, or several separated by `;`

PYTHON_TAG = "<|python_tag|>"


def _llama_render(calls: Sequence[Call]) -> str:
    return "; ".join(dumps({"name": call.name, "parameters": dict(call.arguments)}) for call in calls)


def _llama_parse(text: str) -> list[ParsedCall]:
    body = text.strip()
    tagged = body.startswith(PYTHON_TAG)
    body = body.removeprefix(PYTHON_TAG).lstrip()
    if not body.startswith("{"):
        return [BAD_JSON] if tagged else []
    calls: list[ParsedCall] = []
    at = 0
    while True:
        value, end = json_object(body, at)
        if value is None:
            return [*calls, BAD_JSON] if tagged or calls or '"parameters"' in body else []
        if "parameters" not in value and not tagged:
            return []
        calls.append(named_object(value, "parameters"))
        at = skip_space(body, end)
        if at >= len(body):
            return calls
        if body[at] != ";":
            return [*calls, BAD_JSON]
        at = skip_space(body, at + 1)


# --- Mistral: up to tokenizer v7 a JSON list of calls; from v11 on, each call is a name and its arguments

_LONGEST_HEAD = 1000
"""Characters of a call's name and id."""
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _mistral_render(calls: Sequence[Call]) -> str:
    return TOOL_CALLS + dumps([{"name": call.name, "arguments": dict(call.arguments)} for call in calls])


def _mistral_parse(text: str) -> list[ParsedCall]:
    at = text.find(TOOL_CALLS)
    if at < 0:
        return []
    try:
        value, _ = json.JSONDecoder(strict=False).raw_decode(text, skip_space(text, at + len(TOOL_CALLS)))
    except (ValueError, RecursionError):
        return [BAD_JSON]
    return [named_object(item) for item in value] if isinstance(value, list) else [BAD_JSON]


def _mistral_v11_render(calls: Sequence[Call]) -> str:
    return "".join(f"{TOOL_CALLS}{call.name}{ARGS}{dumps(dict(call.arguments))}" for call in calls)


def _mistral_v11_parse(text: str) -> list[ParsedCall]:
    calls: list[ParsedCall] = []
    at = text.find(TOOL_CALLS)
    while at >= 0:
        start = at + len(TOOL_CALLS)
        split = text.find(ARGS, start, start + _LONGEST_HEAD)
        # Tokenizer v11 writes the call's id between its name and its arguments.
        name = text[start:split].partition(CALL_ID)[0].strip() if split >= 0 else ""
        if not name or not re.fullmatch(r"[\w.\-]{1,128}", name):
            calls.append(BAD_JSON)
            at = text.find(TOOL_CALLS, start)
            continue
        value, end = json_object(text, skip_space(text, split + len(ARGS)))
        calls.append(BAD_JSON if value is None else Call(name, value))
        at = text.find(TOOL_CALLS, max(end, split))
    return calls


# --- DeepSeek: V3 and R1 write the arguments in a fenced JSON block, V3.1 without the fence

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _deepseek_render(calls: Sequence[Call]) -> str:
    bodies = (f"function{_CALL_SEP}{call.name}\n```json\n{dumps(dict(call.arguments))}\n```" for call in calls)
    joined = "\n".join(f"{_CALL_BEGIN}{body}{_CALL_END}" for body in bodies)
    return f"{_CALLS_BEGIN}{joined}{_CALLS_END}"


def _deepseek_v31_render(calls: Sequence[Call]) -> str:
    bodies = (f"{_CALL_BEGIN}{call.name}{_CALL_SEP}{dumps(dict(call.arguments))}{_CALL_END}" for call in calls)
    return f"{_CALLS_BEGIN}{''.join(bodies)}{_CALLS_END}"


def _deepseek_parse(text: str, *, fenced: bool = True) -> list[ParsedCall]:
    calls: list[ParsedCall] = []
    at = text.find(_CALL_BEGIN)
    while at >= 0:
        start = at + len(_CALL_BEGIN)
        sep = text.find(_CALL_SEP, start)
        if sep < 0:
            return [*calls, UNCLOSED_CALL]
        kind, head = text[start:sep], sep + len(_CALL_SEP)
        if fenced:
            name, opened, _ = text[head : head + 300].partition("\n```json\n")
            body = head + len(name) + len(opened)
            readable = kind == "function" and bool(opened)
        else:
            name, body, readable = kind, head, not kind.startswith("function")
        value, end = json_object(text, body) if readable else (None, head)
        closed = text.startswith(f"\n```{_CALL_END}" if fenced else _CALL_END, end)
        calls.append(Call(name.strip(), value) if value is not None and closed else BAD_JSON)
        at = text.find(_CALL_BEGIN, max(end, head))
    return calls


# --- harmony (gpt-oss): a message to a function; its header names the recipient before or after the channel

_HARMONY = re.compile(
    r"(?:<\|channel\|>commentary)?[ ]?to=functions\.([\w.\-]{1,128})[ ]?(?:<\|channel\|>commentary)?"
    r"[ ]?(?:<\|constrain\|>)?(?:json)?[ ]?<\|message\|>"
)
_CALL = "<|call|>"


def _harmony_render(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f" to=functions.{call.name}<|channel|>commentary json<|message|>{dumps(dict(call.arguments))}{_CALL}"
        for call in calls
    )


def _harmony_parse(text: str) -> list[ParsedCall]:
    calls: list[ParsedCall] = []
    at = 0
    while match := _HARMONY.search(text, at):
        value, end = json_object(text, skip_space(text, match.end()))
        calls.append(BAD_JSON if value is None else Call(match[1], value))
        at = max(end, match.end())
    return calls


# --- Muse: XML with the tool's name as an attribute

_ATEM_CLOSING = "</atem:parameter>"
_ATEM_PARAMETER = re.compile(rf'<atem:parameter name="([^"]{{1,128}})">(.*?){_ATEM_CLOSING}', re.DOTALL)
_ATEM = re.compile(r'<atem:invoke name="([^"]{1,128})">')


def _atem_render(calls: Sequence[Call]) -> str:
    def invocation(call: Call) -> str:
        values = ((key, value if isinstance(value, str) else dumps(value)) for key, value in call.arguments.items())
        lines = "".join(f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in values)
        return f'<atem:invoke name="{call.name}">\n{lines}</atem:invoke>\n'

    return f"<atem:function_calls>\n{''.join(map(invocation, calls))}</atem:function_calls>"


def _atem_parse(text: str) -> list[ParsedCall]:
    calls: list[ParsedCall] = []
    at = 0
    while match := _ATEM.search(text, at):
        end = text.find("</atem:invoke>", match.end())
        if end < 0:
            return [*calls, UNCLOSED_CALL]
        at = end
        closed = text.rfind(_ATEM_CLOSING, match.end(), end)  # a search beyond it would find nothing, in quadratic time
        pairs = _ATEM_PARAMETER.findall(text, match.end(), max(closed, 0) + len(_ATEM_CLOSING))
        calls.append(Call(match[1], dict(pairs)))
    return calls


LLAMA = ToolForm("llama3_json", _llama_render, _llama_parse, servers=("llama3_json", "llama4_json"))
MISTRAL = ToolForm("mistral", _mistral_render, _mistral_parse, marker=f"{TOOL_CALLS}[", servers=("mistral",))
MISTRAL_V11 = ToolForm("mistral_v11", _mistral_v11_render, _mistral_v11_parse, marker=ARGS, servers=("mistral",))
DEEPSEEK = ToolForm("deepseek_v3", _deepseek_render, _deepseek_parse, marker=_CALL_BEGIN, servers=("deepseek_v3",))
DEEPSEEK_V31 = ToolForm(
    "deepseek_v3_1",
    _deepseek_v31_render,
    partial(_deepseek_parse, fenced=False),
    marker=_CALL_BEGIN,
    servers=("deepseek_v31",),
)
HARMONY = ToolForm("harmony", _harmony_render, _harmony_parse, marker="to=functions.", servers=("openai",))
ATEM = ToolForm("atem", _atem_render, _atem_parse, typed=False, marker="<atem:invoke")
