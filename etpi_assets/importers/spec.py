"""A format as data: a TOML file, compiled to tables of keys. Paths, names and constants; no expressions.

Shipped formats are in `formats`, a user's own in `formats` of the folder of specs. docs/own_data.md has the keys.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import orjson

from etpi_assets.specs.plugins import near
from etpi_resources.inside import read_text
from etpi_resources.outside import loads, read_toml

SHIPPED = tuple(sorted(file.stem for file in (Path(__file__).parent / "formats").glob("*.toml")))
"""Names of the formats that etpi ships."""
BASE = "messages"
TABLES = {
    "run": ("messages", "context", "input", "system", "tools", "task", "numbered", "repo", "model", "reward", "flag")
    + ("patch", "exit", "truncated", "within", "scope", "finish", "settings", "usage", "seed", "started", "seconds")
    + ("error", "read"),
    "message": ("role", "text", "thought", "calls", "result_of", "time", "trained", "untrained", "partly", "finish")
    + ("exit_code", "command", "prompt_ids", "output_ids", "tools", "media", "wrapper", "context", "usage", "read"),
    "part": ("kind", "text", "call", "result", "result_of", "read"),
    "call": ("id", "name", "arguments", "function", "result", "read"),
    "tool": ("list", "function", "name", "parameters", "drop"),
}
"""Tables of paths -> their slots."""
NAMES = {
    "roles": ("system", "user", "assistant", "tool", "calls", "skip"),
    "kinds": ("text", "thought", "call", "result", "json", "turn", "media", "skip"),
    "exits": ("Submitted", "LimitsExceeded", "ContextWindowExceeded", "FormatError", "Error"),
}
"""Tables of lists of programs' names -> the names that they may stand for."""
_TOP = (
    *("title", "keeps", "loses", "inputs", "extends", "claims", "files", "rank", "rows", "answers", "bare_calls"),
    *("columns", "dialect", "reader", "suffixes", "greeting", "skip", "form", "refuse", *NAMES, *TABLES),
)

LISTED = frozenset(("trained", "untrained", "partly", "media"))
"""Slots of a message that every path may fill."""

KeyPath = tuple[str | int, ...]
Unread = Callable[[str, str, Any], None]
"""Counts (table, key, value) that no path reads."""


def silent(table: str, key: str, value: Any) -> None:
    """Count nothing."""


@dataclass(slots=True)
class Node:
    """Where a key leads: the slots that it fills, each with the rank of its path, and deeper keys. `known`: `read`."""

    slots: list[tuple[str, int]] = field(default_factory=list)
    below: dict[str | int, Node] = field(default_factory=dict)
    known: bool = False


@dataclass(frozen=True, eq=False)
class Spec:
    """One form of a format.

    Attributes:
        data: the TOML with that of the format which it extends.
        trees, paths: of each table; a tree leads from keys to slots, paths from a slot to its places in order.
        roles, kinds, globs, exits: roles, kinds of parts and exit statuses by a program's name, or by its beginning.
    """

    name: str
    data: Mapping[str, Any]
    trees: Mapping[str, Mapping[str | int, Node]]
    paths: Mapping[str, Mapping[str, Sequence[KeyPath]]]
    roles: Mapping[str, Any]
    kinds: Mapping[str, str]
    globs: Sequence[tuple[str, str]]
    exits: Mapping[str, str]
    refused: Sequence[tuple[KeyPath, Mapping[str, str]]]
    claimed: Sequence[Sequence[tuple[bool, KeyPath]]]
    plain: Mapping[str, Callable[[tuple[Any, ...]], Sequence[tuple[Any, str]] | None]]

    def claims(self, row: Any) -> bool:
        """Return whether a row has all paths of one of the format's claims."""
        return type(row) is dict and any(all(has(row, p) is want for want, p in paths) for paths in self.claimed)

    def first(self, table: str, slot: str, value: Any, kind: Any = object) -> Any:
        """Return what the first present path of a slot leads to, if it is of a kind; None if none is there."""
        is_dict = type(value) is dict
        for path in self.paths[table].get(slot, ()):
            if is_dict and path and path[0] not in value and type(path[0]) is str:
                continue  # nearly all
            if (item := at(value, path)) is not None and isinstance(item, kind):
                return item
        return None

    def filled(self, table: str, held: Mapping[Any, Any], unread: Unread) -> dict[str, Any]:
        """Return slot -> value; of several paths with a value, the first in the format's order counts.

        A slot of LISTED has all of them, as (path, value). Keys that fill no slot are counted.
        """
        if (slots := self.plain[table](tuple(held))) is not None:  # nearly all
            return {slot: value for key, slot in slots if (value := held[key]) is not None}
        got: dict[str, Any] = {}
        ranks: dict[str, int] = {}

        def walk(node: Node, value: Any, name: str) -> None:
            for slot, rank in node.slots:
                if slot in LISTED:
                    got.setdefault(slot, []).append((name, value))
                elif slot not in got or (value != "" and (got[slot] == "" or rank < ranks[slot])):
                    got[slot], ranks[slot] = value, rank
            if isinstance(value, dict) and node.below:
                descend(value, node.below, f"{name}.", counted=not node.slots and not node.known)
            elif isinstance(value, list) and len(value) == 1 and 0 in node.below:
                walk(node.below[0], value[0], name)

        def descend(inner: Mapping[Any, Any], below: Mapping[Any, Node], prefix: str, *, counted: bool) -> None:
            for key, value in inner.items():
                if value is not None and (node := below.get(key)) is not None:
                    walk(node, value, f"{prefix}{key}")
                elif value is not None and counted:
                    unread(table, f"{prefix}{key}", value)

        descend(held, self.trees[table], "", counted=True)
        return got


def _plain(tree: Mapping[Any, Node], keys: tuple[Any, ...]) -> Sequence[tuple[Any, str]] | None:
    """Return (key, slot) of the keys that fill one, if each fills another; None if that depends on the values."""
    nodes = [(key, tree.get(key)) for key in keys]
    if not all(node and not node.below and len(node.slots) < 2 for _, node in nodes):
        return None
    slots = [(key, node.slots[0][0]) for key, node in nodes if node and node.slots]
    names = {slot for _, slot in slots}
    return slots if len(names) == len(slots) and names.isdisjoint(LISTED) else None


def parse_path(text: str) -> KeyPath:
    """Parse `a.b`, `a[0].b` or `$.a`; an empty text is the value itself."""
    keys = text.removeprefix("$.").replace("[", ".").replace("]", "").split(".")
    return tuple(int(key) if key.lstrip("-").isdecimal() else key for key in keys if key)


def has(row: Mapping[Any, Any], path: KeyPath) -> bool:
    """Return whether a row has a key, or something at a longer path."""
    return path[0] in row if len(path) == 1 else at(row, path) is not None


def at(value: Any, path: KeyPath) -> Any:
    """Return the value at a path; None if there is none. JSON text of an object on the way is parsed."""
    for key in path:
        if isinstance(value, str):
            value = json_value(value)
        if isinstance(value, dict):
            value = value[key] if key in value else value.get(str(key)) if type(key) is int else None
        elif isinstance(value, list) and isinstance(key, int) and -len(value) <= key < len(value):
            value = value[key]
        else:
            return None
    return value


def json_value(text: str) -> Any:
    """Return the object or array that a text is the JSON of; None for any other text."""
    if text[:1] not in ("{", "[") and text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return orjson.loads(text)
    except ValueError:  # NaN, long integers and deep values are read by the standard library alone
        with suppress(ValueError):
            return loads(text)
    return None


def compiled(name: str, data: Mapping[str, Any]) -> Spec:
    """Compile one form of a format. Raises ValueError: an unknown key, naming the format."""
    unknown = [(key, _TOP) for key in data if key not in _TOP]
    unknown += [
        (f"{t}.{k}", [f"{t}.{s}" for s in TABLES[t]]) for t in TABLES for k in data.get(t, {}) if k not in TABLES[t]
    ]
    if unknown:
        key, known = unknown[0]
        raise ValueError(f"the format {name}: unknown key {key}.{near(key, known)} Known: {', '.join(known)}")
    tables = {t: {k: [v] if isinstance(v, str) else v for k, v in data.get(t, {}).items()} for t in TABLES}
    paths = {t: {slot: list(_with_dots(texts)) for slot, texts in of.items()} for t, of in tables.items()}
    kinds = data.get("kinds", {})
    trees = {table: _tree(of) for table, of in paths.items()}
    return Spec(
        name,
        data,
        trees,
        paths,
        {key.lower(): role for key, role in data.get("roles", {}).items()},
        {key: kind for key, kind in kinds.items() if not key.endswith("*")},
        [(key[:-1], kind) for key, kind in kinds.items() if key.endswith("*")],
        data.get("exits", {}),
        [(parse_path(key), rule) for rule in data.get("refuse", ()) for key in rule["any"]],
        [[(not p.startswith("!"), parse_path(p.removeprefix("!"))) for p in claim] for claim in data.get("claims", ())],
        {table: lru_cache(1024)(partial(_plain, tree)) for table, tree in trees.items()},
    )


def _with_dots(texts: Sequence[str]) -> Iterator[KeyPath]:
    """Yield the path of each text, and the key that has the text's dots itself."""
    for text in texts:
        path = parse_path(text)
        yield path
        if len(path) > 1 and not text.startswith("$"):
            yield (text,)


def _tree(table: Mapping[str, Sequence[KeyPath]]) -> dict[str | int, Node]:
    root: dict[str | int, Node] = {}
    for slot, paths in table.items():
        for rank, path in enumerate(paths):
            level = root
            for key in path[:-1]:
                level = level.setdefault(key, Node()).below
            if path:
                node = level.setdefault(path[-1], Node())
                node.known |= slot == "read"
                if slot != "read":
                    node.slots.append((slot, rank))
    _mark_below(root, known=False)
    return root


def _mark_below(level: Mapping[str | int, Node], *, known: bool) -> None:
    """Mark what stands below a key of `read`, also where a deeper path leads through it."""
    for node in level.values():
        node.known |= known
        _mark_below(node.below, known=node.known)


def _merged(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table over the one that it extends: a list replaces the base's, or precedes it after a "+"."""
    out = dict(base)
    for key, value in table.items():
        old = out.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            out[key] = _merged(old, value)
        elif isinstance(value, list) and value[:1] == ["+"]:
            out[key] = [*value[1:], *(v for v in old or () if v not in value)]
        else:
            out[key] = value
    return out


def forms(name: str, table: Mapping[str, Any]) -> list[Spec]:
    """Compile a format: one spec, or one for each of its `[[form]]`. Raises ValueError as `compiled`."""
    of = dict(table)
    each = of.pop("form", [{}])
    if any(not isinstance(of.get(key, {}), Mapping) for key in (*TABLES, *NAMES)):
        raise ValueError(f"the format {name}: {', '.join((*TABLES, *NAMES))} are tables")
    if (extended := of.get("extends", BASE)) not in SHIPPED:
        raise ValueError(f"extends = {extended!r} is none of {', '.join(SHIPPED)}")
    base = {} if name == BASE else {k: v for k, v in load(extended)[0].data.items() if k not in _OWN}
    return [compiled(name, _merged(_merged(base, _expanded(name, of)), _expanded(name, form))) for form in each]


def _expanded(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a format as it is merged: NAMES are a program's name -> its meaning, and slots of `none` have no path.

    Raises ValueError: as `compiled`.
    """
    out = dict(table)
    if (run := dict(table.get("run", {}))) and "none" in run:
        out["run"] = dict.fromkeys(run.pop("none"), []) | run
    for key, known in NAMES.items():
        for meaning, spellings in table.get(key, {}).items():
            if meaning not in known or not isinstance(spellings, list):
                lists = ", ".join(f"{each} = [...]" for each in known)
                raise ValueError(
                    f"the format {name}: {key}.{meaning} is no list of names.{near(meaning, known)} Known: {lists}"
                )
        out[key] = {spelling: meaning for meaning, spellings in table.get(key, {}).items() for spelling in spellings}
    return out


_OWN = ("claims", "files", "suffixes", "reader", "title", "keeps", "loses", "inputs", "rank", "rows")
"""Keys of a format that one which extends it does not have."""


@cache
def load(name: str) -> tuple[Spec, ...]:
    """Return the forms of a format that etpi ships."""
    file = Path(__file__).parent / "formats" / f"{name}.toml"
    return tuple(forms(name, tomllib.loads(file.read_text(encoding="utf-8"))))


def base() -> Spec:
    """Return the format `messages`, with the names that most programs use."""
    return load(BASE)[0]


def load_user(file: Path) -> list[Spec]:
    """Read a user's format. Raises ValueError naming the file."""
    try:
        data = read_toml(read_text(file))
        if "reader" in data:
            raise ValueError("only formats that etpi ships have a reader; write a plugin for one in Python")
        return forms(file.stem, data)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
