"""Compare the values that holes recorded with the expected ones: a program, since untrusted values may take any time.

`python values.py SECONDS` reads {holes, cells, records} as JSON (`holes.Holed`, `calibration`), and writes for each
record the reason why it disagrees, null where it agrees, and the length of the text in which something is looked for.
Nothing is evaluated but literals, operators and constructors.
"""

from __future__ import annotations

import ast
import datetime
import json
import math
import operator
import re
import resource
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

MEMORY = 2 << 30
"""Bytes of the process's addresses."""
_SLACK = 200
"""Characters by which a text in which something is looked for may exceed four times the reference's."""
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_, ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.inv, ast.Not: operator.not_
}  # fmt: skip
_COMPARED: Mapping[str, Callable[..., bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "in": lambda a, b: a in b, "not in": lambda a, b: a not in b, "sequence": lambda a, b: list(a) == list(b),
    "is": lambda a, b: type(a) is type(b) and a == b, "is not": lambda a, b: not (type(a) is type(b) and a == b),
    "almost": lambda a, b, **within: a == b or _is_near(abs(a - b), **within),
    "startswith": lambda a, b: a.startswith(b), "endswith": lambda a, b: a.endswith(b),
    "count": lambda a, b: _same_items(list(a), list(b)),
}  # fmt: skip


class Opaque(Exception):
    """A recorded object whose meaning is not its content."""


class Approx:
    """A number, or a container of numbers, that is equal to those near it, as `pytest.approx` says."""

    def __init__(self, expected: Any, rel: Any = None, abs: Any = None, nan_ok: bool = False) -> None:
        self.expected, self.rel, self.abs, self.nan_ok = expected, rel, abs, nan_ok

    def __eq__(self, other: object) -> bool:
        return self._near(self.expected, other)

    def _near(self, expected: Any, got: Any) -> bool:
        number: Any = got
        if isinstance(expected, dict):
            return (
                isinstance(got, dict)
                and expected.keys() == got.keys()
                and all(self._near(expected[k], got[k]) for k in got)
            )
        if isinstance(expected, list | tuple):
            same = isinstance(got, list | tuple) and len(got) == len(expected)
            return same and all(map(self._near, expected, got))
        if isinstance(expected, bool | str | bytes | None.__class__) or expected == got:
            return expected == got
        if not isinstance(got, int | float | complex | Decimal | Fraction) or isinstance(got, bool):
            return False
        if isinstance(expected, float) and math.isnan(expected):
            return self.nan_ok and got != got
        bound = 1e-12 if self.abs is None else self.abs
        if self.rel is not None or self.abs is None:
            bound = max(bound, (1e-6 if self.rel is None else self.rel) * abs(expected))
        return bool(abs(expected - number) <= bound) and not math.isinf(abs(expected))


CONSTRUCTORS: Mapping[str, Callable[..., Any]] = {
    "approx": Approx, "Counter": Counter, "OrderedDict": OrderedDict, "Decimal": Decimal, "Fraction": Fraction,
    "date": datetime.date, "datetime": datetime.datetime, "time": datetime.time, "timedelta": datetime.timedelta,
    **{kind.__name__: kind for kind in (
        bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)},
}  # fmt: skip
"""Calls in an expected value that are evaluated again."""


def _opaque(name: str) -> None:
    raise Opaque(name)


_RECORDED: Mapping[str, Callable[..., Any]] = {
    "Decimal": Decimal, "Fraction": Fraction, "date": datetime.date.fromisoformat, "timedelta": datetime.timedelta,
    "datetime": datetime.datetime.fromisoformat, "time": datetime.time.fromisoformat, "Opaque": _opaque,
    **{kind.__name__: kind for kind in (bytearray, complex, float, frozenset, list, range, set, tuple)},
}  # fmt: skip
"""Calls in a recorded value (see `pytest_recorder.source`)."""


def evaluate(text: str, leaves: list[Any], constructors: Mapping[str, Callable[..., Any]] = CONSTRUCTORS) -> Any:
    """Return the value of an expression of literals, operators, constructors and leaves (`_l[i]`)."""
    return _value(ast.parse(text, mode="eval").body, leaves, constructors)


def _value(node: Any, leaves: list[Any], constructors: Mapping[str, Callable[..., Any]]) -> Any:
    def value(part: Any) -> Any:
        return _value(part, leaves, constructors)

    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Subscript):
        assert isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int)
        return leaves[node.slice.value]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        items: list[Any] = []
        for item in node.elts:
            items += value(item.value) if isinstance(item, ast.Starred) else [value(item)]
        return {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)](items)
    if isinstance(node, ast.Dict):
        mapping: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            mapping.update(value(item) if key is None else {value(key): value(item)})
        return mapping
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](value(node.operand))
    if isinstance(node, ast.JoinedStr):
        return "".join(str(value(part)) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return str(value(node.value))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        named = {str(keyword.arg): value(keyword.value) for keyword in node.keywords}
        return constructors[node.func.id](*map(value, node.args), **named)
    raise ValueError(f"no literal: {ast.dump(node)[:80]}")


def decoded(text: str, cells: Mapping[str, str] | None) -> Any:
    """Return a recorded value. A cell counts where `cells` are given: in expected values.

    Raises Opaque, or any error for a text that is none."""

    def cell(key: str) -> Any:
        return _opaque("cell") if cells is None else evaluate(cells[key], [])

    return evaluate(text, [], {**_RECORDED, "Cell": cell})


def compare(hole: Mapping[str, Any], values: list[str], cells: Mapping[str, str]) -> tuple[str | None, int]:
    """Return (why a record disagrees with a hole, None if it agrees; the length of a text that is searched, else 0)."""
    operation, longest, size = hole["op"], hole.get("longest"), 0
    try:
        got, *leaves = [decoded(value, cells if at else None) for at, value in enumerate(values)]
        searched = leaves[0] if operation == "raises" else got
        if operation in ("raises", "in", "startswith", "endswith"):
            size = _size(searched)
        if longest is not None and size > 4 * longest + _SLACK:
            return "longer than four times the reference's", size
        expected = evaluate(hole["expected"], leaves)
        if operation == "raises":
            if not {*hole["classes"]} & {*got}:
                return "another exception", size
            agrees = expected is None or re.search(expected, leaves[0])
        else:
            sides = (expected, got) if hole["flip"] else (got, expected)
            agrees = _COMPARED[operation](*sides, **{k: evaluate(each, []) for k, each in hole["options"].items()})
        return None if agrees else "differs", size
    except Opaque as error:
        return f"opaque {error}", size
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:120], size


def _size(searched: Any) -> int:
    """Return the characters of a text, or of the items of a container; 0 for others."""
    if isinstance(searched, list | tuple | dict | set | frozenset):
        return len(repr(list(searched)))
    return len(searched) if isinstance(searched, str | bytes) else 0


def _is_near(difference: Any, places: int | None = None, delta: Any = None) -> bool:
    """Return whether `assertAlmostEqual` takes a difference."""
    return round(difference, 7 if places is None else places) == 0 if delta is None else difference <= delta


def _same_items(first: list[Any], second: list[Any]) -> bool:
    for item in first:
        if item not in second:
            return False
        second.remove(item)
    return not second


def main(seconds: int) -> None:
    for name, limit in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(name, (limit, limit))
    request = json.load(sys.stdin)
    records = request["records"]
    json.dump([compare(request["holes"][key], values, request["cells"]) for key, values in records], sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
