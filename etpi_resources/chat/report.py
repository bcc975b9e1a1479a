"""Report on the effects of a chat template on training, measured by rendering small conversations.

A finding is an observation; a problem is a use that the template does not allow, with an alternative.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from etpi_resources.chat.format import ChatFormat, TemplateRefuses
from etpi_resources.chat.markers import NoTurnEnd
from etpi_resources.chat.tool_forms import Call, ToolForm
from etpi_resources.chat.tool_forms.template import UnknownToolForm

_CALL = Call("run_probe", {"command": "ls -a", "depth": 2})
_TOOL = {
    "type": "function",
    "function": {
        "name": _CALL.name,
        "description": "probe of tools",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "depth": {"type": "integer"}},
            "required": ["command"],
        },
    },
}
_TASK, _SYSTEM = {"role": "user", "content": "taskofprobe"}, {"role": "system", "content": "systemofprobe"}
_PROSE = {
    "kept": "is part of the label, before the calls",
    "dropped": "is dropped by the template: the label is the calls alone",
    "moved": "is written after the calls by the template, so it is left out of labels",
    "refused": "is refused by the template, so it is left out of labels",
}


@dataclass(frozen=True)
class Finding:
    """One property of a template.

    Attributes:
        subject: what was looked at.
        seen: what the template does.
        problem: what therefore cannot be done, and the remedy; empty if nothing is wrong.
    """

    subject: str
    seen: str
    problem: str = ""


def report(chat: ChatFormat) -> list[Finding]:
    """Return the findings about a chat format, the most important ones first.

    Without an end of a turn nothing can be trained, and no more is looked at.
    """
    try:
        ends = ", ".join(sorted(chat.decode([i]) for i in chat.end_ids))
        _ = chat.tool_form  # both are determined by rendering
    except UnknownToolForm as error:
        return [Finding("tool calls", "unknown form", str(error))]
    except (NoTurnEnd, TemplateRefuses) as error:
        return [Finding("end of a turn", "none", str(error))]
    header = chat.markers.header
    return [
        _bos(chat),
        Finding("a turn begins with", repr(header) if header else "nothing of its own"),
        Finding("a turn ends with", ends),
        *_calls(chat),
        *_roles(chat),
        Finding("thoughts", _thoughts(chat)),
        Finding("prompts", _prompts(chat)),
    ]


def _bos(chat: ChatFormat) -> Finding:
    subject, bos = "a conversation begins with", chat.tokenizer.bos_token
    if "bos_token" not in chat.template:
        return Finding(subject, "no token of its own: the template writes no bos_token")
    if bos is None:
        problem = "name the bos_token in tokenizer_config.json of base.tokenizer, as the model's own folder does"
        return Finding(subject, "nothing, although the template writes bos_token: the tokenizer has none", problem)
    return Finding(subject, f"{bos}, the tokenizer's bos_token, written by the template")


def _calls(chat: ChatFormat) -> Iterator[Finding]:
    form = chat.tool_form
    if form is None:
        yield Finding(
            "tool calls",
            "none: the template writes no structured calls",
            "runs with structured calls cannot be rendered; take a template of the family that writes them "
            "(base.chat_template), or runs whose actions are text, such as fenced shell commands",
        )
        return
    if chat.calls_in_content:
        yield Finding("tool calls", f"{form.name}, as part of the text")
        return
    label = chat.turn_ids("", [_CALL], tools=[_TOOL])
    read = form.same(form.parse(chat.decode(chat.without_end(label))), [_CALL])
    yield Finding(
        "tool calls",
        f"{form.name}: {chat.decode(label)!r}",
        "" if read else f"the parser of {form.name} does not read the call back; report it with the template's name",
    )
    yield Finding("parsers of vLLM", " or ".join(form.servers) or "none known")
    shown = chat.prompt_ids([_TASK], tools=[_TOOL]) != chat.prompt_ids([_TASK])
    yield Finding(
        "tools in the prompt",
        "written by the template" if shown else "not written by the template: describe them in the system prompt",
    )
    yield Finding("text beside calls", _PROSE[chat.template_form.prose])
    yield Finding("several calls in a turn", _several(chat, form))
    yield _extends(chat)


def _several(chat: ChatFormat, form: ToolForm) -> str:
    calls = [_CALL, Call(_CALL.name, {"command": "pwd", "depth": 1})]
    try:
        text = chat.decode(chat.without_end(chat.turn_ids("", calls, tools=[_TOOL])))
    except TemplateRefuses as error:
        return f"refused: conversations with such turns are dropped and counted ({error.__cause__})"
    return "read back" if form.same(form.parse(text), calls) else "not read back: such turns are dropped and counted"


def _extends(chat: ChatFormat) -> Finding:
    subject = "appended ids"
    message = chat.template_form.message("", [_CALL])
    turn = {**message, "tool_calls": message["tool_calls"]}
    result = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "name": _CALL.name, "content": "a.py"}
    try:
        prompt = chat.prompt_ids([_TASK], tools=[_TOOL])
        label = chat.as_history(chat.turn_ids("", [_CALL], tools=[_TOOL]))
        appended = [*prompt, *label, *chat.observation_ids("a.py", "tool", tool=_CALL.name)]
        again = chat.prompt_ids([_TASK, turn, result], tools=[_TOOL])
    except ValueError as error:
        return Finding(subject, "a tool's result cannot be appended", f"{error}; evaluate with another template")
    if appended == again:
        return Finding(subject, "equal to the conversation rendered again")
    return Finding(
        subject,
        "differ from the conversation rendered again: a server that renders messages shows the model other prompts "
        "than etpi's agent loop, which never renders a turn twice",
    )


def _roles(chat: ChatFormat) -> Iterator[Finding]:
    roles = chat.roles
    changed = [
        (roles.system, "a system message is put before the first user message"),
        (roles.later_system or not roles.system, "a system message after others becomes a user message"),
        (roles.results, "a tool's result becomes a user message"),
        (
            (roles.loose_results and roles.apart_results) or not roles.results,
            "a tool's result that does not follow a call becomes a user message",
        ),
        (roles.repeated, "user messages in a row are joined"),
    ]
    edits = "; ".join(text for taken, text in changed if not taken)
    yield Finding("roles", edits or "system, user, assistant and tool, in any order")


def _thoughts(chat: ChatFormat) -> str:
    if not chat.chatml and (key := chat.template_form.thinking):
        return f"written by the template in a form of its own, from the key {key!r} of a message"
    if chat.think_open_id is None:
        return "no <think> token: a think block is plain text"
    tails = {switch: chat.tail_form(chat.prompt_ids([_TASK], enable_thinking=switch)) for switch in (True, False)}
    return f"<think> in the text; the prompt's block is {tails[True]} with enable_thinking, {tails[False]} without"


def _prompts(chat: ChatFormat) -> str:
    spoken: dict[str, Any] = {"role": "assistant", "content": "Look."}
    talk: Sequence[Any] = [_SYSTEM, _TASK, spoken, {"role": "user", "content": "more"}, spoken]
    if chat.renders_once(talk):
        return "each extends the one before: a conversation is rendered once"
    return "rendered one by one, since the template rewrites earlier messages or marks no beginning of a turn"
