"""Goldens: cases of each component of etpi_assets/planning/versions.toml, their results as columns, and comparison.

A case computes a result from small fixed inputs. Its golden is a line of goldens.jsonl: each column of the result as it
is where it is short, else as digests of its values; floats as numbers that have to agree within a tolerance.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
GOLDENS = HERE / "goldens.jsonl"

RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""Floats agree within RELATIVE of the larger, plus ABSOLUTE. In float32, CPUs and numbers of threads differ by 1e-6 to
1e-5 in losses and gradients; a change of what is computed differs by more."""
LITERAL = 48
"""A column whose JSON has at most this many characters is stored as it is."""
LISTED = 40
"""A longer column of at most this many values has a digest of each, so that the first that differs is known."""
FLOATS = 16
"""So many floats of a column are stored; of more, the norm and projections."""
FLOAT = "~"
"""Stands for a float in a column's exact part."""

OF_LAB = ("running_sum",)
"""Families of the lab whose components etpi numbers: they were in the core, and their results keep their numbers."""

Columns = dict[str, Any]
Versions = Mapping[str, Mapping[int, str]]
Key = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Case:
    """A computation: its component, a name that is unique in it, and a function without arguments."""

    component: str
    name: str
    compute: Callable[[], Any]

    @property
    def key(self) -> Key:
        return self.component, self.name


@dataclasses.dataclass(frozen=True)
class Golden:
    """The stored result of a case, and the number of its component when it was written."""

    number: int
    columns: Columns


CASES: dict[Key, Case] = {}


def case(component: str, name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function as a case. Its result: a table, rows (dicts), values by name, or any nesting of these."""

    def register(compute: Callable[[], Any]) -> Callable[[], Any]:
        if (component, name) in CASES:
            raise ValueError(f"two cases {name} of {component}")
        CASES[component, name] = Case(component, name, compute)
        return compute

    return register


def load_cases() -> Mapping[Key, Case]:
    """Import all modules of cases and return the cases, sorted."""
    for path in sorted((HERE / "cases").glob("*.py")):
        importlib.import_module(f"tests.goldens.cases.{path.stem}")
    return dict(sorted(CASES.items()))


# --- results as columns -----------------------------------------------------------------------------------------------


def values_of(result: Any) -> dict[str, list[Any]]:
    """Return a result's columns, path -> values. Columns of nulls are left out, as if they were not there."""
    columns: dict[str, list[Any]] = {}
    _collect(_plain(result), "", columns)
    return columns


def stored_form(columns: Mapping[str, list[Any]]) -> Columns:
    """Return the columns as a golden has them."""
    stored: Columns = {}
    for path, values in columns.items():
        floats: list[float] = []
        exact = [_exact(value, floats) for value in values]
        if not floats or set(exact) != {FLOAT}:
            stored[path] = _short(exact)
        if floats:
            stored[f"{path} {FLOAT}"] = _short_floats(floats)
    return stored


def _collect(value: Any, path: str, columns: dict[str, list[Any]]) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            _collect(part, f"{path}.{key}" if path else str(key), columns)
    elif isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        columns[f"{path} rows".strip()] = [len(value)]
        for key in {key: None for row in value for key in row}:
            cells = [row.get(key) for row in value]
            if any(cell is not None for cell in cells):
                columns[f"{path}.{key}" if path else key] = cells
    elif value is not None:
        columns[path or "values"] = value if isinstance(value, list) else [value]


def _plain(value: Any) -> Any:
    """Return a value of JSON's types, floats kept."""
    if hasattr(value, "to_pylist"):
        return _plain(value.to_pylist())
    if hasattr(value, "model_dump"):
        return _plain(value.model_dump(mode="json"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_name(key): _plain(part) for key, part in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(part) for part in value), key=repr)
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str | int | float) or value is None:
        return value
    if isinstance(value, Iterable):
        return [_plain(part) for part in value]
    return str(value)


def _name(key: Any) -> str:
    return "/".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _exact(value: Any, floats: list[float]) -> Any:
    """Return the JSON of a value with its finite floats moved to `floats`; a text, number or null as it is."""
    if isinstance(value, list | dict):
        return json.dumps(_without(value, floats), ensure_ascii=False, sort_keys=True)
    return _without(value, floats)


def _without(value: Any, floats: list[float]) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        floats.append(value)
        return FLOAT
    if isinstance(value, list):
        return [_without(part, floats) for part in value]
    return {key: _without(part, floats) for key, part in sorted(value.items())} if isinstance(value, dict) else value


def _short(values: list[Any]) -> Any:
    text = json.dumps(values, ensure_ascii=False)
    if len(text) <= LITERAL:
        return values
    if len({json.dumps(value) for value in values}) == 1 and len(json.dumps(values[0])) <= LITERAL:
        return f"{len(values)} x {json.dumps(values[0], ensure_ascii=False)}"
    each = " ".join(_digest(value, 4) for value in values) if len(values) <= LISTED else f"{len(values)} values"
    return f"{_digest(values, 12)}: {each}"


def _digest(value: Any, digits: int) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()[:digits]


def _short_floats(floats: list[float]) -> Any:
    if len(floats) <= FLOATS:
        return [float(f"{value:.9g}") for value in floats]
    norm = math.sqrt(sum(x * x for x in floats))
    waves = (math.sqrt(2 / len(floats)) * sum(x * math.cos(k * i) for i, x in enumerate(floats)) for k in range(1, 5))
    return {"count": len(floats), "norm": float(f"{norm:.9g}"), "along": [float(f"{wave:.9g}") for wave in waves]}


# --- comparison -------------------------------------------------------------------------------------------------------


def differences(golden: Columns, columns: Mapping[str, list[Any]]) -> list[str]:
    """Return a line for each column that differs from the golden: old and new, or the first value that differs."""
    new = stored_form(columns)
    lines = []
    for path in sorted({*golden, *new}):
        if path not in new:
            lines.append(f"{path}: was {_view(golden[path])}, is gone or null")
        elif path not in golden:
            lines.append(f"{path}: is new: {_view(new[path])}")
        elif not (_agree if path.endswith(f" {FLOAT}") else _equal)(golden[path], new[path]):
            lines.append(f"{path}: {_change(golden[path], new[path], columns.get(path))}")
    return lines


def _equal(old: Any, new: Any) -> bool:
    return json.dumps(old) == json.dumps(new)


def _agree(old: Any, new: Any) -> bool:
    """Compare floats within the tolerance; of more than FLOATS, in units of their norm."""
    if isinstance(old, dict) and isinstance(new, dict):
        norm, count = max(old["norm"], new["norm"]), old["count"]
        near = RELATIVE * norm + ABSOLUTE, RELATIVE * norm * min(1.0, 10 * math.sqrt(2 / count)) + ABSOLUTE
        far = abs(old["norm"] - new["norm"]), max(abs(a - b) for a, b in zip(old["along"], new["along"], strict=True))
        return count == new["count"] and far[0] <= near[0] and far[1] <= near[1]
    if isinstance(old, dict) or isinstance(new, dict) or len(old) != len(new):
        return False
    return all(math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE) for a, b in zip(old, new, strict=True))


def _change(old: Any, new: Any, values: list[Any] | None) -> str:
    digests = all(isinstance(text, str) and ": " in text for text in (old, new))
    if digests and values is not None and len(values) <= LISTED:
        was, is_now = (text.partition(": ")[2].split() for text in (old, new))
        if len(was) == len(is_now):
            rows = [row for row, pair in enumerate(zip(was, is_now, strict=True)) if pair[0] != pair[1]]
            if rows:
                more = f", and {len(rows) - 1} more" if rows[1:] else ""
                return f"value {rows[0]}{more}, is now {_view(values[rows[0]])}"
        return f"{len(was)} values, now {len(is_now)}: {_view(values)}"
    return f"{_view(old)} -> {_view(new)}"


def _view(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}…"


# --- files ------------------------------------------------------------------------------------------------------------


def read_goldens(path: Path = GOLDENS) -> dict[Key, Golden]:
    """Return the stored goldens by component and case."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return {(row["component"], row["case"]): Golden(row["number"], row["columns"]) for row in rows}


def write_goldens(goldens: Mapping[Key, Golden], path: Path = GOLDENS) -> None:
    """Write a line for each golden, sorted."""
    rows = [
        {"component": component, "case": name, "number": golden.number, "columns": golden.columns}
        for (component, name), golden in sorted(goldens.items())
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


# --- the verdict ------------------------------------------------------------------------------------------------------


def fault(key: Key, golden: Golden | None, columns: Mapping[str, list[Any]], versions: Versions) -> str | None:
    """Return what is wrong with a case whose result has these columns; None if it is its golden."""
    component, name = key
    if component not in versions:
        return f"{component}, of case {name}, is no component of versions.toml"
    if golden is None:
        return f"case {name} of {component} is new: `make goldens` writes its golden"
    if (number := max(versions[component])) < golden.number:
        return (
            f"the number of {component} is {number}, but the golden of case {name} has {golden.number}: raise it again"
        )
    if lines := differences(golden.columns, columns):
        return (
            f"results of `{component}` differ for case {name}: raise its number in versions.toml and say what differs, "
            "or mend it\n" + shown(lines)
        )
    return None


def rewritten(
    goldens: Mapping[Key, Golden], results: Mapping[Key, Mapping[str, list[Any]]], versions: Versions
) -> tuple[dict[Key, Golden], list[str]]:
    """Return the new goldens and the refusals: changed cases whose component has no higher number with a line that
    names the case, and lowered numbers. Goldens of equal results stay as they are."""
    new, refusals = {}, []
    for key, columns in results.items():
        component, name = key
        golden = goldens.get(key)
        if golden and component in versions and max(versions[component]) >= golden.number:
            if not differences(golden.columns, columns):
                new[key] = golden
                continue
            lines = [line for number, line in versions[component].items() if number > golden.number]
            if not any(name in line for line in lines):
                refusals.append(_refusal(key, golden, columns, lines))
                continue
        elif golden or component not in versions:
            refusals.append(fault(key, golden, columns, versions) or "")
            continue
        new[key] = Golden(max(versions[component]), stored_form(columns))
    return new, refusals


def _refusal(key: Key, golden: Golden, columns: Mapping[str, list[Any]], lines: Sequence[str]) -> str:
    component, name = key
    lack = f"no line after {golden.number} names it" if lines else f"its number is still {golden.number}"
    return (
        f"results of `{component}` differ for case {name}, and {lack}: add to versions.toml\n"
        f'    "{component}".{golden.number + len(lines) + (not lines)} = "... ({name})"\n'
        + shown(differences(golden.columns, columns))
    )


def shown(lines: list[str], most: int = 12) -> str:
    """Return the first lines, indented."""
    more = [f"and {len(lines) - most} more columns"] if len(lines) > most else []
    return "\n".join(f"    {line}" for line in [*lines[:most], *more])


def unpinned(components: Iterable[str], cases: Iterable[Key], without: Iterable[str]) -> Iterator[str]:
    """Yield what is wrong between components, cases and the components that have no case."""
    covered = {component for component, _ in cases}
    for component in components:
        if component not in covered and component not in without:
            yield f"{component} has no case"
        if component in covered and component in without:
            yield f"{component} has cases"
