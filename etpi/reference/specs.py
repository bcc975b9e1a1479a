"""docs/reference/specs.md: every key of a spec, from the pydantic models and the shipped specs."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from etpi.reference.markdown import anchor, code, prose, table
from etpi_assets.specs.folders import FOLDERS
from etpi_assets.specs.load import MODELS, inner_section, load_shipped

_HEAD = """# Spec keys

A spec is a TOML file `<name>.toml` in `suites`, `rollout_sets` or `experiments`, shipped in `etpi_assets/specs` or in a
folder of your own: `specs` in the working folder, or the folders that `etpi.toml` (`specs = ["FOLDER"]`) or
`ETPI_SPECS` name. Subfolders group files; a name occurs once in all folders, so your spec cannot replace a shipped one.
`etpi status` shows each folder and its faults. `extends = "name"` takes over another spec of the same kind; tables
merge key by key, and an empty table empties free keys, as `gates.teacher = {}`. `preset = "name"` takes over a
method's settings ([presets.md](presets.md)). The word `"none"` means "no value" where the type allows it.
An unknown key is an error that names the nearest valid one.
"""
_TITLES = {"suite": "Suites", "rollout_set": "Rollout sets", "experiment": "Experiments"}
_NUMBERS = {int: "int", float: "number"}
_LONGEST_DEFAULT, _LONGEST_EXAMPLE = 48, 45

Place = tuple[str, str]
"""Kind of spec and dotted path of a section; the path of the spec itself is empty."""


def page() -> str:
    """Return the page."""
    places = _places()
    lines = [_HEAD]
    for kind, title in _TITLES.items():
        sections = [model for model, model_places in places.items() if model_places[0][0] == kind]
        lines += [f"## {title}", "", f"`{FOLDERS[kind]}/<name>.toml`. {prose(MODELS[kind].__doc__ or '')}", ""]
        for model in sections:
            lines += [*_section(model, places), ""]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines).rstrip() + "\n")
    return re.sub(r"docs/(reference/)?(\w+\.md)", lambda m: f"[{m[2]}]({m[2] if m[1] else f'../{m[2]}'})", text)


def _places() -> Mapping[type[BaseModel], list[Place]]:
    """Return every section's places in specs, in the order of the models."""
    places: dict[type[BaseModel], list[Place]] = {}

    def walk(model: type[BaseModel], kind: str, path: str) -> None:
        places.setdefault(model, []).append((kind, path))
        for name, field in model.model_fields.items():
            if inner := inner_section(field.annotation):
                walk(inner, kind, f"{path}.{name}".lstrip("."))

    for kind in _TITLES:
        walk(MODELS[kind], kind, "")
    return places


def _section(model: type[BaseModel], places: Mapping[type[BaseModel], list[Place]]) -> list[str]:
    (kind, path), *other_places = places[model]
    lines: list[str] = []
    if path:
        lines += [f"### {_heading(kind, path)}", "", prose(model.__doc__ or ""), ""]
        if other_places:
            lines += [f"The same keys are in {_listed(other_places)}.", ""]
    rows, long = [], []
    for name, field in model.model_fields.items():
        default = default_of(field)
        if len(default) > _LONGEST_DEFAULT:
            long += [f"Default of `{name}`:", "", "```toml", f"{name} = {default}", "```", ""]
            default = "see below"
        else:
            default = default if default == "required" else code(default)
        rows.append([f"`{name}`", _type(field, places), default, _meaning(name, field, places[model])])
    return [
        *lines,
        *table(["Key", "Type", "Default", "Meaning"], rows),
        "",
        *long,
        *_other_defaults(model, other_places),
    ]


def _heading(kind: str, path: str) -> str:
    return f"{_bracketed(kind, path)} of {_noun(kind)}"


def _bracketed(kind: str, path: str) -> str:
    """Return a section's name as TOML heads it: in double brackets if a spec may have several."""
    *parents, name = path.split(".")
    model = MODELS[kind]
    for part in parents:
        model = inner_section(model.model_fields[part].annotation) or model
    many = typing.get_origin(model.model_fields[name].annotation) is tuple
    return f"[[{path}]]" if many else f"[{path}]"


def _noun(kind: str) -> str:
    return {"suite": "a suite", "rollout_set": "a rollout set", "experiment": "an experiment"}[kind]


def _listed(places: Sequence[Place]) -> str:
    kinds = dict.fromkeys(kind for kind, _ in places)
    named = {kind: ", ".join(f"`{_bracketed(k, path)}`" for k, path in places if k == kind) for kind in kinds}
    return " and ".join(f"{names} of {_noun(kind)}" for kind, names in named.items())


def _other_defaults(model: type[BaseModel], places: Sequence[Place]) -> list[str]:
    """Return a line for each further place whose defaults differ from the section's own."""
    lines = []
    for kind, path in places:
        value: Any = MODELS[kind].model_construct()
        for part in path.split("."):
            value = getattr(value, part, None)
        if isinstance(value, model):
            changed = {n: getattr(value, n) for n, f in model.model_fields.items() if getattr(value, n) != _value(f)}
            if changed:
                shown = ", ".join(f"`{name} = {toml_value(at)}`" for name, at in changed.items())
                lines += [f"Other defaults in `[{path}]` of {_noun(kind)}: {shown}.", ""]
    return lines


# --- cells -----------------------------------------------------------------------------------------------------------


def _type(field: FieldInfo, places: Mapping[type[BaseModel], list[Place]]) -> str:
    section = inner_section(field.annotation)
    optional = code('"none"') if type(None) in typing.get_args(field.annotation) else ""
    if section:
        link = f"[table]({anchor(_heading(*places[section][0]))})"
        shown = f"list of {link}s" if typing.get_origin(field.annotation) is tuple else link
        return f"{shown} or {optional}" if optional else shown
    names = [_named(part, field) for part in _alternatives(field.annotation) if part is not type(None)]
    return code(" | ".join([*names, *(['"none"'] if optional else [])]))


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if union else (annotation,)


def _named(kind: Any, field: FieldInfo | None = None) -> str:
    """Return a type in words, with the field's bounds if it is a number."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _named(args[0], next(mark for mark in args[1:] if isinstance(mark, FieldInfo)))
    if origin is typing.Literal:
        return " | ".join(toml_value(value) for value in args)
    if origin is tuple:
        literal = typing.get_origin(args[0]) is typing.Literal
        return f"list of ({_named(args[0])})" if literal else f"list of {_named(args[0])}"
    if origin is dict:
        return "table" if args[1] is Any else f"table of {_named(args[1])}"
    if kind in _NUMBERS:
        return _bounded(_NUMBERS[kind], field)
    return {str: "string", bool: "true | false"}[kind]


def _bounded(name: str, field: FieldInfo | None) -> str:
    limits = {sign: str(limit) for mark in (field.metadata if field else ()) for sign, limit in _limits(mark)}
    low = next((f"{limits[key]} {sign} " for key, sign in (("ge", "<="), ("gt", "<")) if key in limits), "")
    high = next((f" {sign} {limits[key]}" for key, sign in (("le", "<="), ("lt", "<")) if key in limits), "")
    if low and not high:
        return f"{name} >{'=' if 'ge' in limits else ''} {limits.get('ge', limits.get('gt'))}"
    return f"{low}{name}{high}"


def _limits(mark: object) -> Iterator[tuple[str, Any]]:
    yield from ((sign, getattr(mark, sign)) for sign in ("ge", "gt", "le", "lt") if hasattr(mark, sign))


def _value(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = _value(field)
    return "" if isinstance(value, BaseModel) else toml_value(value)


def _meaning(name: str, field: FieldInfo, places: Sequence[Place]) -> str:
    text = prose(field.description or "")
    example = _example(name, field, places)
    return f"{text} Example: {code(example)}." if example else text


def _example(name: str, field: FieldInfo, places: Sequence[Place]) -> str:
    """Return the field's own example, or the shortest value of a shipped spec; none for numbers and choices."""
    if field.examples:
        return toml_value(field.examples[0])
    if not any(typing.get_origin(part) in (tuple, dict) or part is str for part in _alternatives(field.annotation)):
        return ""
    if inner_section(field.annotation) or (not field.is_required() and _value(field)):
        return ""
    values = {toml_value(value) for place in places for value in _shipped(place, name) if value}
    return min((v for v in values if len(v) <= _LONGEST_EXAMPLE), key=lambda text: (len(text), text), default="")


def _shipped(place: Place, name: str) -> Iterator[Any]:
    """Yield the values of a key in the shipped specs."""
    kind, path = place
    for spec in _shipped_specs()[kind].values():
        sections: list[Any] = [spec]
        for part in filter(None, path.split(".")):
            values = [getattr(section, part) for section in sections]
            sections = [
                s for value in values for s in (value if isinstance(value, tuple) else [value]) if s is not None
            ]
        yield from (getattr(section, name) for section in sections)


@cache
def _shipped_specs() -> Mapping[str, Mapping[str, BaseModel]]:
    specs = load_shipped()
    return {"suite": specs.suites, "rollout_set": specs.rollout_sets, "experiment": specs.experiments}


def toml_value(value: Any) -> str:
    """Return a value as TOML writes it in one line; None is "none"."""
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case str():
            return f"'{value}'" if "\\" in value or '"' in value else f'"{value}"'
        case float():
            return f"{value:g}".replace("e-0", "e-") if value != int(value) else f"{value:.1f}"
        case BaseModel():
            return toml_value(value.model_dump(exclude_defaults=True))
        case Mapping():
            return "{" + ", ".join(f"{key} = {toml_value(at)}" for key, at in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(toml_value, value)) + "]"
        case _:
            return str(value)
