"""Compare the values that holes recorded with the expected ones: a program, since untrusted values may take any time.

`python values.py SECONDS` reads {holes, cells, lengths, records} as JSON (`holes.Holed`, `proof`) and writes a list of
reasons why a record disagrees, null where it agrees. Nothing is evaluated but literals, operators and constructors.
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
_COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "in": lambda a, b: a in b, "not in": lambda a, b: a not in b, "sequence": lambda a, b: list(a) == list(b),
    "is": lambda a, b: type(a) is type(b) and a == b, "is not": lambda a, b: not (type(a) is type(b) and a == b),
    "almost": lambda a, b: a == b or round(abs(a - b), 7) == 0, "startswith": lambda a, b: a.startswith(b),
    "endswith": lambda a, b: a.endswith(b), "count": lambda a, b: _same_items(list(a), list(b)),
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


def evaluate(node: Any, leaves: list[Any]) -> Any:
    """Return the value of an expression of literals, operators, constructors and leaves (`_l[i]`)."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Subscript):
        assert isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int)
        return leaves[node.slice.value]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        items: list[Any] = []
        for item in node.elts:
            value = evaluate(item.value if isinstance(item, ast.Starred) else item, leaves)
            items += value if isinstance(item, ast.Starred) else [value]
        return {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)](items)
    if isinstance(node, ast.Dict):
        mapping: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            mapping.update(evaluate(value, leaves) if key is None else {evaluate(key, leaves): evaluate(value, leaves)})
        return mapping
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](evaluate(node.left, leaves), evaluate(node.right, leaves))
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](evaluate(node.operand, leaves))
    if isinstance(node, ast.JoinedStr):
        return "".join(str(evaluate(part, leaves)) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return str(evaluate(node.value, leaves))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        named = {str(keyword.arg): evaluate(keyword.value, leaves) for keyword in node.keywords}
        return CONSTRUCTORS[node.func.id](*(evaluate(argument, leaves) for argument in node.args), **named)
    raise ValueError(f"no literal: {ast.dump(node)[:80]}")


def decoded(record: Any, cells: Mapping[str, str] | None) -> Any:
    """Return a recorded value (see `pytest_recorder.plain`). A cell counts where `cells` are given: in expected values.

    Raises Opaque, or any error for a record that is none."""
    kind, value = record
    if kind in ("opaque", "large"):
        raise Opaque(value or kind)
    if kind == "cell":
        if cells is None:
            raise Opaque("cell")
        return evaluate(ast.parse(cells[value], mode="eval").body, [])
    if kind in ("NoneType", "bool"):
        return {"NoneType": None, "bool": bool(value)}[kind]
    if kind == "int":
        return int(value, 16)
    if kind in ("str", "float", "Decimal", "Fraction"):
        return {"str": str, "float": float, "Decimal": Decimal, "Fraction": Fraction}[kind](value)
    if kind in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[kind].fromhex(value)
    if kind == "complex":
        return complex(float(value[0]), float(value[1]))
    if kind == "range":
        return range(*value)
    if kind == "timedelta":
        return datetime.timedelta(*value)
    if kind == "date":
        return datetime.date(*value[0])
    if kind in ("datetime", "time"):
        return getattr(datetime, kind)(*value[0], tzinfo=datetime.UTC if value[1] else None)
    if kind == "dict":
        return {decoded(key, cells): decoded(item, cells) for key, item in value}
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](decoded(i, cells) for i in value)


def disagreement(
    hole: Mapping[str, Any], values: list[Any], cells: Mapping[str, str], longest: int | None
) -> str | None:
    """Return why a record disagrees with a hole; None if it agrees."""
    operation = hole["op"]
    try:
        if hole.get("bit"):
            return None if values[0] == ["bool", operation not in ("false", "not none")] else "differs"
        got, *leaves = [decoded(value, cells if at else None) for at, value in enumerate(values)]
        expected = evaluate(ast.parse(hole["expected"], mode="eval").body, leaves)
        looked_in = leaves[0] if operation == "raises" else got
        if longest is not None and isinstance(looked_in, str | bytes) and len(looked_in) > 4 * longest + _SLACK:
            return "longer than four times the reference's"
        if operation == "raises":
            if not {*hole["classes"]} & {*got}:
                return "another exception"
            return None if expected is None or re.search(expected, leaves[0]) else "differs"
        first, second = (expected, got) if hole["flip"] else (got, expected)
        return None if _COMPARED[operation](first, second) else "differs"
    except Opaque as error:
        return f"opaque {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:120]


def size_of(hole: Mapping[str, Any], values: list[Any]) -> int:
    """Return the length of a recorded text in which something is looked for; 0 for another value."""
    at = 1 if hole["op"] == "raises" else 0
    looks = hole["op"] in ("raises", "in", "startswith", "endswith")
    return len(values[at][1]) if looks and len(values) > at and values[at][0] in ("str", "bytes") else 0


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
    holes, lengths = request["holes"], request["lengths"]
    reasons = [disagreement(holes[k], values, request["cells"], lengths.get(k)) for k, values in request["records"]]
    sizes = [size_of(holes[key], values) for key, values in request["records"]]
    json.dump([reasons, sizes], sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
