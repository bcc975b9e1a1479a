"""Forms with `<tool_call>` tags: JSON (Hermes, Qwen2.5, Qwen3), XML (Qwen3-Coder, Qwen3.5, Nemotron 3) and GLM-4.5's.

`marked` has the forms of single model families with other markers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from etpi_resources.chat.tool_forms.call import (
    BAD_JSON,
    NO_CALL,
    UNCLOSED_CALL,
    Call,
    ParsedCall,
    ToolForm,
    dumps,
    json_object,
    named_object,
    skip_space,
    value_text,
)

OPENING, CLOSING = "<tool_call>", "</tool_call>"
Tagged = Literal["xml", "hermes"]


def read_tagged(text: str) -> Iterator[tuple[Tagged, ParsedCall]]:
    """Yield each call in `<tool_call>` tags with its form.

    Linear in the text: each search starts where the last one ended or stops at the end of the block.
    """
    at = text.find(OPENING)
    while at >= 0:
        start = skip_space(text, at + len(OPENING))
        if text.startswith("{", start):
            value, end = json_object(text, start)
            yield "hermes", named_object(value, "arguments" if value and "arguments" in value else "parameters")
            at = text.find(OPENING, max(end, start))
            continue
        end = text.find(CLOSING, start)
        yield "xml", read_xml(text, start, len(text) if end < 0 else end)
        at = text.find(OPENING, end) if end >= 0 else -1


def read_bare_xml(text: str) -> Iterator[ParsedCall]:
    """Yield each `<function=NAME>…</function>` outside of `<tool_call>` tags; UNCLOSED_CALL for one without an end."""
    opening, closing = "<function=", "</function>"
    at = text.find(opening)
    while at >= 0:
        end = text.find(closing, at)
        yield UNCLOSED_CALL if end < 0 else read_xml(text, at, end)
        at = text.find(opening, end) if end >= 0 else -1


def read_xml(text: str, start: int, end: int) -> ParsedCall:
    """Parse `<function=NAME><parameter=P>value</parameter>…` in text[start:end].

    One newline before and one after a value belong to the form, not to the value.
    """
    name_end = text.find(">", start, end)
    if not text.startswith("<function=", start) or name_end < 0:
        return NO_CALL if end < len(text) else UNCLOSED_CALL
    arguments: dict[str, Any] = {}
    at = text.find("<parameter=", name_end, end)
    while at >= 0:
        key_end = text.find(">", at, end)
        value_end = text.find("</parameter>", key_end, end) if key_end >= 0 else -1
        if value_end < 0:
            return UNCLOSED_CALL
        value = text[key_end + 1 : value_end]
        arguments[text[at + len("<parameter=") : key_end]] = value.removeprefix("\n").removesuffix("\n")
        at = text.find("<parameter=", value_end, end)
    if not arguments and end == len(text):
        return UNCLOSED_CALL
    return Call(text[start + len("<function=") : name_end], arguments)


def xml_call(call: Call) -> str:
    """Return a call as Qwen's XML in `<tool_call>` tags; arguments other than strings are JSON."""
    values = {key: value_text(value) for key, value in call.arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"{OPENING}\n<function={call.name}>\n{parameters}</function>\n{CLOSING}"


def hermes_call(call: Call) -> str:
    """Return a call as Hermes' JSON in `<tool_call>` tags."""
    return f"{OPENING}\n{dumps({'name': call.name, 'arguments': dict(call.arguments)})}\n{CLOSING}"


def _parse_hermes(text: str) -> list[ParsedCall]:
    return [call if form == "hermes" else BAD_JSON for form, call in read_tagged(text)]


def _parse_xml(text: str) -> list[ParsedCall]:
    return [call if form == "xml" else NO_CALL for form, call in read_tagged(text)]


def _glm_call(call: Call) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value_text(value)}</arg_value>\n"
        for key, value in call.arguments.items()
    )
    return f"{OPENING}{call.name}\n{pairs}{CLOSING}"


def _parse_glm(text: str) -> list[ParsedCall]:
    return [_glm_read(body) for body in _bodies(text)]


def _glm_read(body: str | None) -> ParsedCall:
    if body is None:
        return UNCLOSED_CALL
    name, _, rest = body.partition("<arg_key>")
    if not name.strip() or "<" in name or name.lstrip().startswith("{"):
        return NO_CALL
    arguments: dict[str, Any] = {}
    for pair in rest.split("<arg_key>") if rest else ():
        key, _, value = pair.partition("</arg_key>")
        value, ended, _ = value.partition("</arg_value>")
        before, opened, value = value.partition("<arg_value>")
        if not (ended and opened) or before.strip():
            return UNCLOSED_CALL
        arguments[key] = value
    return Call(name.strip(), arguments)


def _bodies(text: str) -> Iterator[str | None]:
    """Yield the text in each pair of `<tool_call>` tags; None if the closing tag is missing."""
    at = text.find(OPENING)
    while at >= 0:
        end = text.find(CLOSING, at)
        yield text[at + len(OPENING) : end] if end >= 0 else None
        at = text.find(OPENING, end) if end >= 0 else -1


HERMES = ToolForm(
    "hermes",
    lambda calls: "\n".join(map(hermes_call, calls)),
    _parse_hermes,
    marker=OPENING,
    servers=("hermes",),
)
XML = ToolForm(
    "qwen_xml",
    lambda calls: "\n".join(map(xml_call, calls)),
    _parse_xml,
    typed=False,
    marker="<function=",
    servers=("qwen3_coder", "qwen3_xml"),
)
GLM = ToolForm(
    "glm",
    lambda calls: "\n".join(map(_glm_call, calls)),
    _parse_glm,
    typed=False,
    marker="<arg_key>",
    servers=("glm45", "glm47"),
)
