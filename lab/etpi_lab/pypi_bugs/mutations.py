"""Mutations of a module's syntax tree: each replaces one expression of one function and keeps the rest of the text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
}  # fmt: skip
_SKIPPED = (ast.JoinedStr, ast.Assert, ast.Raise, ast.AnnAssign)
"""Nodes that are not mutated: messages and annotations. Positions inside f-strings are not those of the source."""


@dataclass(frozen=True)
class Mutation:
    """One change of a module: kind, enclosing function, first line, and the text that replaces the bytes from start to
    end of the UTF-8 source."""

    kind: str
    function: str
    line: int
    start: int
    end: int
    replacement: str

    def apply(self, source: str) -> str:
        """Return the module with the bug. Raises SyntaxError if it does not parse."""
        whole = source.encode()
        text = (whole[: self.start] + self.replacement.encode() + whole[self.end :]).decode()
        ast.parse(text)
        return text


def mutations(source: str) -> list[Mutation]:
    """Return every mutation of a module, in source order. Raises SyntaxError if the source does not parse."""
    ends = [0]
    for line in source.splitlines(keepends=True):
        ends.append(ends[-1] + len(line.encode()))
    changes = []
    for function in _functions(ast.parse(source)):
        for kind, node, replacement in _changes(function):
            assert node.end_lineno is not None and node.end_col_offset is not None
            start = ends[node.lineno - 1] + node.col_offset
            end = ends[node.end_lineno - 1] + node.end_col_offset
            changes.append(Mutation(kind, function.name, node.lineno, start, end, replacement))
    return changes


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield functions and methods; a nested function is part of its outer function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        elif not isinstance(node, ast.AsyncFunctionDef | ast.expr):
            yield from _functions(node)


def _changes(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield (kind, expression, replacement) for a function's body."""
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, _SKIPPED):
            continue
        yield from _changes_of_node(node)
        parts = node.body if isinstance(node, ast.FunctionDef | ast.ClassDef) else list(ast.iter_child_nodes(node))
        waiting += reversed(parts)


def _changes_of_node(node: ast.AST) -> Iterator[tuple[str, ast.expr, str]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            changed = ast.Compare(node.left, [_COMPARISONS[type(op)]()], node.comparators)
            yield "comparison", node, ast.unparse(changed)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "boolean", node, f"({ast.unparse(ast.BoolOp(other, node.values))})"
        case ast.BinOp() if type(node.op) in _ARITHMETIC and not any(map(_is_text, (node.left, node.right))):
            changed = ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
            yield "arithmetic", node, f"({ast.unparse(changed)})"
        case ast.UnaryOp(op=ast.Not()):
            yield "negation", node, f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool() as truth):
            yield "constant", node, str(not truth)
        case ast.Constant(value=int() as number):
            yield "constant", node, str(number + 1)
        case ast.If() | ast.IfExp():
            yield "condition", node.test, f"(not ({ast.unparse(node.test)}))"
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "result", value, "None"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
