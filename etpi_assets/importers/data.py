"""The formats of `formats` as `Format`s, and a user's own: what is data is read by it, the rest by its `reader`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from etpi_assets.importers.conversation import Options
from etpi_assets.importers.format import (
    ROWS,
    DetectionInput,
    Format,
    FormatDoc,
    as_row,
    row_format,
    rows_claim,
    run_format,
)
from etpi_assets.importers.generic import read_run
from etpi_assets.importers.source import holds_conversation, no_run
from etpi_assets.importers.spec import SHIPPED, Spec, forms, load
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources import rows
from etpi_resources.rows import files_below
from etpi_resources.rows.bounded import Unreadable, read_json


def data_format(name: str, specs: Sequence[Spec]) -> Format:
    """Return the format of its forms.

    The module that `reader` names may have functions in place of those of data: `claims` of a row, `units` of a folder,
    `iter_rows`, `count_rows` and `group` of a file, `prepared` (row, where) -> the row that the TOML reads, and
    `record` of a row, or of a file or folder (`rows`).
    """
    data = specs[0].data
    functions = vars(import_module(f"{__package__}.{data['reader']}")) if "reader" in data else {}
    kind, rank, suffixes = data.get("rows", "run"), data.get("rank", ROWS), tuple(data.get("suffixes", ()))
    names = tuple(ending + packed for ending in data.get("files", ()) for packed in ("", *_PACKED))
    title, loses = data.get("title", f"The user's format {name}"), "other columns, which `etpi init` lists"
    doc = FormatDoc(title, data.get("keeps", "as `messages`"), data.get("loses", loses), data.get("inputs", ""))
    is_part = functions.get("is_part", _part_of(specs))

    def claims(row: Any) -> bool:
        return any(spec.claims(row) for spec in specs) or (kind == "run or messages" and is_part(row))

    def listed(root: Path) -> list[Path]:
        return files_below(root, *names, *suffixes)

    def claims_folder(source: DetectionInput) -> bool:
        return source.root.is_dir() and bool(functions.get("claims", units)(source.root))

    claims, units = functions.get("claims", claims), functions.get("units", listed if names or suffixes else rows.units)
    if kind in ("file", "folder", "document"):
        claimed = claims_folder if kind == "folder" else rows_claim(claims, suffixes)
        record = _documents(specs, names) if kind == "document" else functions["record"]
        return run_format(
            name, doc, claims=claimed, units=units, record=record, rank=rank, names=names, of_folders=kind == "folder"
        )
    part = None if kind == "run" else (is_part, _column(specs))
    readers = {key: functions[key] for key in ("iter_rows", "group") if key in functions}
    readers["count_rows"] = functions.get("count_rows", None if "iter_rows" in functions else rows.count_rows)
    record = _mapped if name == "mapped" else functions.get("record") or _record(specs, functions.get("prepared"))
    return row_format(
        name, doc, claims=claims, record=record, rank=rank, names=names, part=part, units=units, **readers
    )


_PACKED = (".gz", ".zst")


def _record(
    specs: Sequence[Spec], prepared: Callable[[Any, str], Any] | None
) -> Callable[[Any, str, Options], RolloutRecord]:
    column = _column(specs)

    def record(row: Any, where: str, options: Options) -> RolloutRecord:
        row = row if prepared is None else prepared(row, where)
        spec = next((spec for spec in specs if spec.claims(row)), None)
        if spec is None and specs[0].data.get("rows") == "messages" and type(row) is dict and row.keys() == {column}:
            spec = specs[0]  # the messages of a file
        if spec is None and prepared is None:  # rows of several formats in a file
            spec = next((spec for spec in _row_specs() if spec.claims(row)), None)
        folder, _, file = where.partition(", row ")[0].rpartition("/")
        for packed in _PACKED:
            file = file.removesuffix(packed)
        return read_run(row, spec or specs[0], where, options, {"@file": file, "@folder": folder.rpartition("/")[2]})

    return record


@cache
def _row_specs() -> Sequence[Spec]:
    """Return the forms of all formats of rows, those of the lowest rank first."""
    specs = [spec for name in SHIPPED for spec in load(name) if not {"reader", "files"} & spec.data.keys()]
    return sorted(specs, key=lambda spec: (spec.data.get("rank", ROWS), spec.name))


def _column(specs: Sequence[Spec]) -> str:
    """Return the column that a row has for its messages."""
    return str(specs[0].paths["run"]["messages"][0][0])


def _part_of(specs: Sequence[Spec]) -> Callable[[Any], bool]:
    """Return whether a row is one message of a run: it has a known role, and text or calls, and no messages."""
    message, known = specs[0].paths["message"], specs[0].roles
    roles = [path[0] for path in message["role"]]
    texts = {path[0] for slot in ("text", "calls") for path in message[slot]}
    runs = {p[0] for of in specs for slot in ("messages", "context") for p in of.paths["run"].get(slot, ()) if p}

    def is_part(row: Any) -> bool:
        if not isinstance(row, dict) or not runs.isdisjoint(row) or texts.isdisjoint(row):
            return False
        return any(isinstance(name := row.get(key), str) and name.lower() in known for key in roles)

    return is_part


def _documents(specs: Sequence[Spec], names: tuple[str, ...]) -> Callable[[Path, Path, Options], RolloutRecord]:
    """Return the reader of a file that is a run, whose name the format claims."""

    def record(unit: Path, root: Path, options: Options) -> RolloutRecord:
        data = as_row(read_json(unit))
        ending = next((ending for ending in sorted(names, key=len, reverse=True) if unit.name.endswith(ending)), "")
        if not isinstance(data, Mapping) or not (ending or holds_conversation(data)):
            raise no_run(data, f"{unit.name} has no messages")
        place = {"@file": unit.name.removesuffix(ending), "@folder": unit.parent.name}
        spec = next((spec for spec in specs if spec.claims(data)), specs[0])
        return read_run(data, spec, unit.name, options, place)

    return record


MAP_KEYS: Mapping[str, tuple[str, str]] = {
    **{key: ("run", key) for key in ("messages", "system", "tools", "task", "repo", "model", "reward")},
    **{key: ("message", key) for key in ("role", "text", "calls", "time", "trained", "untrained")},
    "reasoning": ("message", "thought"),
    "answers": ("message", "result_of"),
    "prompt": ("run", "context"),
    "input": ("run", "input"),
    "answer": ("run", "messages"),
}
"""Key of a map -> (table, slot) of a format. The keys `user`, `assistant` and `tool` are the file's names of roles."""
MAP_ROLES = ("user", "assistant", "tool")


def map_tables(columns: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return a map of columns as the tables of a format. Raises ValueError: no messages, nor a prompt and an answer."""
    if "messages" not in columns and not {"prompt", "answer"} <= set(columns):
        raise ValueError("map: it names neither `messages`, nor `prompt` and `answer`")
    tables: dict[str, dict[str, Any]] = {}
    for key, path in columns.items():
        table, slot = MAP_KEYS.get(key, ("roles", key))
        more = ["+"] if table != "roles" and slot not in ("messages", "context") else []
        tables.setdefault(table, {})[slot] = [*more, path]
    return tables


@cache
def _map_spec(columns: tuple[tuple[str, str], ...]) -> Spec:
    return forms("mapped", map_tables(dict(columns)))[0]


def _mapped(row: Any, where: str, options: Options) -> RolloutRecord:
    if options.map is None:
        raise Unreadable("needs_map", f'{where}: name its columns: options.map = {{messages = "PATH", ...}}')
    return read_run(row, _map_spec(tuple(options.map.items())), where, options)
