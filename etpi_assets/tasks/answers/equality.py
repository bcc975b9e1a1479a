"""Compare mathematical answers with math-verify: a program, because a symbolic comparison may never end.

`python equality.py SECONDS` answers each line of standard input with a line of JSON, or the name of the error:
["equal", expected, answer, digits]: whether they are equal, decimal numbers to that many digits.
["leaves", expected, answer]: whether the answer has operations that the expected one lacks (`leaves_work`).
["rewrites", expected, answer, expression]: whether the answer rewrites this expression of its question (`rewrites`).
It ends itself if a comparison takes more processor time.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import sys
from collections.abc import Iterator
from math import gcd, prod
from typing import Any

MEMORY = 3 << 30
"""Bytes of the process's addresses."""
_FRACTION = re.compile(r"\{(\d+)\}\s*\{(\d+)\}|(?<![\w^.])(\d+)\s*/\s*(\d+)(?![\d.])")


def rewrites(expression: Any, wanted: Any, answer: Any) -> bool:
    """Return whether an answer is an expression of the question in another form, all three having one value.

    If it takes more than arithmetic to get from the expression to the expected answer, an answer that arithmetic gets
    from the expression rewrites it, and one with fewer factors or with a denominator that was to vanish. Else one does
    that is the expression in another order, is a root like it, or has more sums or other functions than expected.
    """
    from sympy import Add, Basic, Function, Mul, Pow, expand, fraction, preorder_traversal, together

    if not all(isinstance(value, Basic) for value in (expression, wanted, answer)):
        return False

    def evaluated(value: Any) -> Any:
        return value.func(*map(evaluated, value.args)) if value.args else value

    def sums(value: Any) -> int:
        return sum(len(node.args) - 1 for node in preorder_traversal(value) if isinstance(node, Add))

    def functions(value: Any) -> set[Any]:
        return {node.func for node in preorder_traversal(value) if isinstance(node, Function)}

    def ordered(value: Any) -> str:
        parts = sorted(map(ordered, _flat(value) if isinstance(value, Add | Mul) else ()))
        return f"{value.func.__name__}({', '.join(parts or map(ordered, value.args)) or value})"

    first, last, result = map(evaluated, (expression, wanted, answer))
    if first != last:
        (_, below), (above, result_below) = (fraction(together(value)) for value in (last, result))
        factors = [sum(bool(f.free_symbols) for f in Mul.make_args(value)) for value in (fraction(last)[0], above)]
        unfactored = first.is_Add and first == expand(first) and factors[1] < factors[0]
        return result == first or unfactored or bool(result_below.free_symbols and not below.free_symbols)
    if ordered(answer) == ordered(expression) != ordered(wanted):
        return True
    root = all(isinstance(value, Pow) for value in (expression, answer)) and not isinstance(wanted, Pow)
    return root or sums(answer) > sums(wanted) or bool(functions(answer) - functions(wanted))


def leaves_work(wanted: Any, answer: Any) -> bool:
    """Return whether an answer has an operation that the expected one lacks: an operator or a function, or any where
    that is a plain number."""
    from sympy import Basic, Equality, Expr, Function, preorder_traversal
    from sympy.concrete.expr_with_limits import ExprWithLimits
    from sympy.core.function import Derivative
    from sympy.series.limits import Limit

    if not isinstance(wanted, Basic) or not isinstance(answer, Basic):
        return False

    def operators(value: Any) -> set[Any]:
        kinds = (Function, ExprWithLimits, Derivative, Limit)
        return {node.func for node in preorder_traversal(value) if isinstance(node, kinds)}

    expected, value = (each.args[-1] if isinstance(each, Equality) else each for each in (wanted, answer))
    closed = isinstance(expected, Expr) and isinstance(value, Expr) and not value.free_symbols
    return bool(operators(answer) - operators(wanted)) or (closed and is_plain(expected) and not is_plain(value))


def is_plain(value: Any) -> bool:
    """Return whether a value is a number as it is written: with a sign, as a fraction, in per cent, with a power of
    ten."""
    from sympy import Integer, Mul, Number, Pow, UnevaluatedExpr

    if isinstance(value, Number) or value.is_infinite:
        return True
    if isinstance(value, Pow):
        base, exponent = value.args
        return isinstance(base, Integer) and isinstance(exponent, Integer) and (exponent == -1 or base == 10)
    if not isinstance(value, Mul):
        return False
    # math-verify reads a sign of per cent as an unevaluated 1/100.
    parts = [part for part in _flat(value) if abs(part) != 1 and not isinstance(part, UnevaluatedExpr)]
    return len(parts) < 3 and all(map(is_plain, parts)) and sum(not isinstance(part, Pow) for part in parts) < 2


def reducible(text: str, value: Any) -> bool:
    """Return whether an answer has a fraction of whole numbers with a common divisor."""
    from sympy import Integer, Mul, Pow, preorder_traversal

    pairs = [(int(m[1] or m[3]), int(m[2] or m[4])) for m in _FRACTION.finditer(text)]
    for node in preorder_traversal(value):
        if isinstance(node, Mul):
            factors = list(_flat(node))
            below = [f.base for f in factors if isinstance(f, Pow) and f.exp == -1 and isinstance(f.base, Integer)]
            pairs.append((prod(int(f) for f in factors if isinstance(f, Integer)), prod(map(int, below))))
    return any(gcd(*pair) > 1 for pair in pairs)


def _flat(value: Any) -> Iterator[Any]:
    """Yield the terms of sums of sums, or the factors of products of products."""
    for part in value.args:
        yield from _flat(part) if part.func is value.func else (part,)


def serve(seconds: int) -> None:
    """Answer until standard input ends."""
    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig
    from sympy import Add

    # Plain expressions would go through Python's parser, which runs code; LaTeX goes through a grammar.
    latex = [LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(text: str) -> Any:
        return parse(f"$\\boxed{{{text}}}$", extraction_config=latex, parsing_timeout=0)

    for name, limit in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(name, (limit, limit))
    # Only the answers go to the pipe, whatever the libraries print.
    answers, sys.stdout = sys.stdout, sys.stderr

    def equal(wanted: str, answer: str, digits: int = 6) -> bool:
        one, two = parsed(wanted), parsed(answer)
        if any(getattr(value, "is_finite", True) is False and not value.is_extended_real for value in one[:1]):
            return False  # a division by zero: 6:00
        compared = {"strict": True, "allow_set_relation_comp": True, "timeout_seconds": 0}
        return bool(verify(one, two, float_rounding=digits, **compared))

    def leaves(wanted: str, answer: str) -> bool:
        return leaves_work(parsed(wanted)[0], parsed(answer)[0])

    def rewritten(wanted: str, answer: str, expression: Any) -> bool:
        if not equal(wanted, expression):
            return False
        values = [parsed(text)[0] for text in (expression, wanted, answer)]
        plain = not isinstance(values[0], Add) and reducible(answer, values[2]) and not reducible(wanted, values[1])
        return plain or rewrites(*values)

    questions = {"equal": equal, "leaves": leaves, "rewrites": rewritten}
    for line in sys.stdin:
        name, *texts = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            result: bool | str = questions[name](*texts)
        except Exception as error:
            result = type(error).__name__
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(int(sys.argv[1]))
