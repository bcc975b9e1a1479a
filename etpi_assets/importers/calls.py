"""Structured calls, tool schemas and content of messages, as programs write them: the words are those of a format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import orjson

from etpi_assets.importers.source import as_list, field, text_field, without_padding
from etpi_assets.importers.spec import Spec, Unread, at, base, load, silent
from etpi_assets.trajectories.calls import ToolCall, tool_call
from etpi_resources.outside import loads
from etpi_resources.rows.bounded import Unreadable

_EMPTY = ("", "null", "[]")


def count_keys(events: Iterable[Mapping[Any, Any]], format: str, unread: Unread) -> None:
    """Count the keys of a log's events that the format's TOML does not list under `[message]`; they stop no import."""
    known = load(format)[0].trees["message"].keys()
    for event in events if unread is not silent else ():
        for key in () if event.keys() <= known else event.keys() - known:
            if event[key] is not None:
                unread("event", str(key), event[key])


def read_calls(value: Any, what: str, spec: Spec | None = None, unread: Unread = silent) -> list[ToolCall]:
    """Return the calls of a message, an object, a list or JSON text of one. Raises Unreadable: `unknown_form`."""
    return [call for call, _ in calls_with_results(value, what, spec or base(), unread)]


def calls_with_results(value: Any, what: str, spec: Spec, unread: Unread) -> list[tuple[ToolCall, Any]]:
    """Return the calls, each with the result that stands in it (None: results are messages)."""
    if isinstance(value, str):
        value = json_text(value, f"{what}.tool_calls") if value.strip() else None
    if value is None or value == []:
        return []
    if not isinstance(value, list) and not (isinstance(value, dict) and value):
        raise Unreadable("unknown_form", f"{what}.tool_calls is neither an array nor an object with keys")
    name = f"{what}.tool_calls[]"
    return [read_call(call, name, spec, unread) for call in (value if isinstance(value, list) else [value])]


def read_call(value: Any, what: str, spec: Spec, unread: Unread, name: str | None = None) -> tuple[ToolCall, Any]:
    """Return a call and the result in it. `name`: of the tool, unless the call has one. Raises Unreadable."""
    call = json_text(value, what) if isinstance(value, str) else value
    if not isinstance(call, dict):
        raise Unreadable("unknown_form", f"{what} is not an object")
    if None in (call.get("id", ""), call.get("type", "")):  # only tables write these as null
        call = without_padding(call)
    whole = call
    for path in spec.paths["call"]["function"]:
        if type(inner := call.get(path[0]) if len(path) == 1 else at(call, path)) is dict:
            call = {**call, **inner}
            if path[0] not in inner:
                del call[path[0]]
            break
    unknown: list[tuple[str, str, Any]] = []
    got = spec.filled("call", call, lambda *entry: unknown.append(entry))
    if unknown and "arguments" not in got:
        held = f"{what} has no arguments, but {', '.join(key for _, key, _ in unknown[:8])}"
        raise Unreadable("unknown_form", f"{held}; call them `arguments`, or remove these keys")
    for entry in unknown:
        unread(*entry)
    call_id, named = _id(got.get("id")), got.get("name")
    if not (isinstance(named, str) and named) and (named := name) is None:
        return ToolCall("", None, call_id, whole, "it has no name"), got.get("result")
    return _normal(named, got.get("arguments"), call_id), got.get("result")


def _id(value: Any) -> str | None:
    if type(value) is str:  # nearly all
        return value or None
    return str(value) if isinstance(value, int) else None


def _normal(name: str, arguments: Any, call_id: str | None) -> ToolCall:
    if isinstance(arguments, str) and arguments[:1] == "{":  # nearly all
        return tool_call(name, arguments, call_id)
    if isinstance(arguments, str):
        arguments = _decoded(arguments)
    if arguments == [] or (isinstance(arguments, str) and arguments.strip() in _EMPTY):
        arguments = {}
    return tool_call(name, arguments, call_id)


def _decoded(arguments: str) -> str:
    """Return arguments that were encoded as JSON text more than once as they were after the first time."""
    if not arguments.lstrip().startswith('"'):
        return arguments
    try:
        value = loads(arguments)
    except ValueError:
        return arguments
    return _decoded(value) if isinstance(value, str) else arguments


def read_tools(value: Any, what: str, spec: Spec | None = None) -> list[dict[str, Any]] | None:
    """Return tool schemas as `{"type": "function", "function": {...}}`, keys in order; None for none and mere names.

    The value is a list of objects or of their JSON text, JSON text of such a list, or an object of schemas by name. A
    null such as that of `"default": null` is kept. JSON that was written from a table has null for the properties of
    the other tools, which is no schema; then all its nulls are padding.

    Runs of one program offer the same tools, so equal values give the same list.

    Raises Unreadable: `unknown_form` for text that is not JSON, and for anything but schemas.
    """
    if not value:
        return None
    spec = spec or base()
    try:
        key = id(spec), value if isinstance(value, str) else orjson.dumps(value)
    except TypeError:  # integers beyond 64 bits
        return _tools(value, what, spec)
    if key not in _tools_of:
        if len(_tools_of) >= _MOST_TOOLS:
            _tools_of.clear()
        _tools_of[key] = _tools(value, what, spec)
    return _tools_of[key]


_MOST_TOOLS = 64
_tools_of: dict[tuple[int, str | bytes], list[dict[str, Any]] | None] = {}


def _tools(value: Any, what: str, spec: Spec) -> list[dict[str, Any]] | None:
    if isinstance(value, str) and value.strip():
        value = json_text(value, what)
    if not value:
        return None
    if isinstance(value, dict):
        value = spec.first("tool", "list", value) or value
    paths = [*spec.paths["tool"]["function"], *spec.paths["tool"]["parameters"]]
    known = {"name", "description", *(path[0] for path in paths)}
    if isinstance(value, dict) and all(isinstance(v, dict) and not known.isdisjoint(v) for v in value.values()):
        value = [{"name": name, **schema} for name, schema in value.items()]
    if not isinstance(value, list):
        raise Unreadable("unknown_form", f"{what} is no array of schemas")
    if all(isinstance(tool, str) and not tool.lstrip().startswith("{") for tool in value):
        return None
    tools = [json_text(tool, f"{what}[]") if isinstance(tool, str) else tool for tool in value]
    if not all(isinstance(tool, dict) for tool in tools):
        raise Unreadable("unknown_form", f"{what}[] is no object, expected a schema")
    schemas = [schema for tool in tools for schema in _schemas(tool, spec)]
    if any(None in (parameters_of(schema) or {}).values() for schema in schemas):
        schemas = without_padding(schemas)
    return schemas


def _schemas(tool: dict[str, Any], spec: Spec) -> Iterable[dict[str, Any]]:
    paths, drop = spec.paths["tool"], spec.data["tool"]["drop"]
    inner = next((v for path in paths["function"] if (v := at(tool, path)) is not None), tool)
    if isinstance(inner, list):  # Gemini lists the functions of one tool
        return [schema for each in inner if isinstance(each, dict) for schema in _schemas(each, spec)]
    if not isinstance(inner, dict):
        raise Unreadable("unknown_form", f"a schema's function is {type(inner).__name__}, expected an object")
    if inner is tool:  # flat, as the Responses API, Anthropic and MCP have it
        if not isinstance(inner.get("name"), str):
            if any(field(held, "name") for held in inner.values()):
                raise Unreadable("unknown_form", f"a schema is under an unknown key; it has {', '.join(inner)}")
            return []  # of a tool that the provider runs
        inner = {key: v for key, v in inner.items() if key != "type" and v is not None}
    parameters = next((v for path in paths["parameters"] if isinstance(v := at(inner, path), dict)), None)
    if parameters is None:  # under a key of the program's own
        key_of_schema = next((key for key, v in inner.items() if isinstance(field(v, "properties"), dict)), None)
        parameters, drop = inner.get(key_of_schema or ""), [*drop, key_of_schema]
    function = {key: v for key, v in inner.items() if key not in drop}
    if parameters is not None:
        function["parameters"] = parameters
    return [{"type": "function", "function": function}]


def parameters_of(tool: Any) -> Mapping[str, Any] | None:
    """Return the properties that a tool's schema declares for its arguments; None if it declares none."""
    properties = field(tool, "function", "parameters", "properties")
    return properties if isinstance(properties, dict) else None


class Content(NamedTuple):
    """A message's content: its text, and the calls, results and thoughts that some APIs put into it.

    Attributes:
        results: (id of the call, text) of each tool result.
        answered: (number of the call, result) of calls that hold their result.
        turns: content of each further response in the same message.
    """

    text: str = ""
    calls: Sequence[ToolCall] = ()
    thought: str | None = None
    results: Sequence[tuple[str | None, str]] = ()
    answered: Sequence[tuple[int, Any]] = ()
    turns: Sequence[Content] = ()


def content_text(content: Any, what: str, spec: Spec | None = None) -> str:
    """Return a message's content as text. Raises Unreadable as `read_content`."""
    return content if isinstance(content, str) else read_content(content, what, spec).text


def result_text(result: Any, what: str, spec: Spec) -> str:
    """Return a result as text; an object that is no part of a content is JSON. Raises Unreadable as `read_content`."""
    is_object = isinstance(result, dict) and "type" not in result and _kind_of(result, spec)[0] is None
    if is_object and {path[0] for path in spec.paths["message"]["media"]}.isdisjoint(result):
        return json.dumps(result, ensure_ascii=False)
    return content_text(result, what, spec)


def read_content(content: Any, what: str, spec: Spec | None = None, unread: Unread = silent) -> Content:
    """Read a message's content: a string, nothing, or parts of text, thoughts, calls and results.

    Raises Unreadable: `non_text_content` for images and the like, `unknown_form` for anything else.
    """
    if isinstance(content, str) or content is None:
        return Content(content or "")
    spec = spec or base()
    parts = [content] if isinstance(content, dict) else content
    if not isinstance(parts, list):
        raise Unreadable("unknown_form", f"{what}.content is neither text nor an array of parts")
    if "turn" not in spec.kinds.values():
        return _response(parts, what, spec, unread)
    ends = [i for i, part in enumerate(parts) if spec.kinds.get(text_field(part, "type") or "") == "turn"]
    cut = (parts[start + 1 : end] for start, end in pairwise([-1, *ends, len(parts)]))
    read = [_response(response, what, spec, unread) for response in cut if response]
    return read[0]._replace(turns=read[1:]) if len(read) > 1 else read[0] if read else Content()


def _response(parts: Sequence[Any], what: str, spec: Spec, unread: Unread) -> Content:
    texts: list[str] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    results: list[tuple[str | None, str]] = []
    answered: list[tuple[int, Any]] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise Unreadable("unknown_form", f"{what}.content[] is neither text nor an object")
        written = part.get("type")
        usual = spec.kinds.get(written) == "text" if type(written) is str else len(part) == 1  # nearly all
        if usual and isinstance(part.get("text"), str):
            texts.append(part["text"])
            continue
        kind, name = _kind_of(part, spec)
        if kind == "skip":
            continue
        text = spec.first("part", "text", part, str) if kind in ("text", "thought") else None
        if kind == "thought" and text is not None:
            thoughts.append(text)
        elif kind == "call" and (call := _part_call(part, spec, name)) is not None:
            read, result = read_call(call, f"{what}.content[]", spec, unread, name)
            if result is not None:
                answered.append((len(calls), result))
            calls.append(read)
        elif kind == "result":
            text = result_text(spec.first("part", "result", part), f"{what}.content[]", spec)
            results.append((_id(spec.first("part", "result_of", part)), text))
        elif kind == "json":
            texts.append(json.dumps(spec.first("part", "result", part), ensure_ascii=False))
        elif isinstance(text := part.get("text", text), str):
            texts.append(text)
        elif kind == "text":
            keys = ", ".join(sorted(map(str, part))[:8])
            raise Unreadable("unknown_form", f"{what} holds a part of text without `text`; it has {keys}")
        else:
            kind = field(part, "type") or ", ".join(map(str, part)) or "no keys"
            read = "only text, calls and results are read"
            raise Unreadable("non_text_content", f"{what} holds a part of type {kind}; {read}")
    return Content("\n".join(texts), calls, "\n".join(thoughts) or None, results, answered)


def _part_call(part: Mapping[str, Any], spec: Spec, name: str | None) -> Any:
    """Return the call in a part: the part itself if it has a name, else at a path of the format."""
    if name is not None or spec.first("call", "name", part, str) is not None:
        return part
    return spec.first("part", "call", part, dict | str)


def _kind_of(part: Mapping[str, Any], spec: Spec) -> tuple[str | None, str | None]:
    """Return the kind of a part, and the name that a `*` in its type stands for."""
    for path in spec.paths["part"]["kind"]:
        if path == ("@key",):
            kinds = [spec.kinds[key] for key in part if key in spec.kinds and part[key] not in (None, False)]
            if len(kinds) > 1:  # another key says what the text is
                kinds = [kind for kind in kinds if kind != "text"] or kinds
            if kinds:
                return kinds[0], None
        elif isinstance(written := at(part, path), str):
            for prefix, kind in spec.globs if written not in spec.kinds else ():
                if written.startswith(prefix):
                    return kind, written[len(prefix) :]
            return spec.kinds.get(written), None
    return ("text" if isinstance(part.get("text"), str) else None), None


def listed(value: Any, what: str) -> list[Any]:
    """Return an array, parsed from JSON text if the value is text. Raises Unreadable: `unknown_form`."""
    return as_list(json_text(value, what) if isinstance(value, str) else value, what)


def json_text(text: str, what: str) -> Any:
    """Parse JSON text in a value. Raises Unreadable: `unknown_form`."""
    try:
        return loads(text)
    except ValueError as error:
        raise Unreadable("unknown_form", f"{what} is text that is not JSON") from error


def role_of(name: Any, what: str, spec: Spec | None = None) -> Any:
    """Return etpi's role for a name in any case; "calls" or "skip" for those. Raises Unreadable: `unknown_role`."""
    roles = (spec or base()).roles
    role = roles.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise Unreadable("unknown_role", f"{what} has role {name!r}; known are {', '.join(roles)}")
    return role
