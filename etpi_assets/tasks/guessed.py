"""Decide which expected values an answer has to know, and which are guessed."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator

DECISIVE = frozenset(("==", "in", "is", "sequence", "count", "almost", "startswith", "endswith", "raises"))
GUESSABLE = frozenset(
    ("None", "True", "False", "0", "1", "0.0", "1.0", "''", "[]", "{}", "()", "b''", "set()", "Ellipsis", "...")
)
_CONVERSIONS = ("approx", "int", "str", "bytes", "bytearray")
"""Constructors of which only the first argument is a value: others are tolerances, bases and encodings."""
_VARIABLE = re.compile(r"\\.|\[[^\]]*\]|\([^()]*\)[*?{]|\(\?[^)]|.[*?{]")
"""Parts of a regular expression that match more than themselves."""
_LONG_TEXT, _LONG_NUMBER = 4, 6
"""Characters of a text, and digits of a text without a second word, that are not guessed."""


def is_strong(op: str, literal: ast.expr, *, needle: bool = False) -> bool:
    """Return whether only an answer that knows a literal satisfies a comparison with it.

    `needle`: the literal is searched for in a value of the tested code."""
    if op in ("startswith", "endswith"):
        return len(_text(literal)) >= _LONG_TEXT
    if op == "in":
        return needle and _is_telling(_text(literal))
    constants = [node for node in needed_parts(literal) if isinstance(node, ast.Constant)]
    return op in DECISIVE and any(repr(constant.value) not in GUESSABLE for constant in constants)


def says_words(expression: str) -> bool:
    """Return whether each alternative of a regular expression has a text of its own."""
    fixed = _VARIABLE.sub("*", expression).split("|")
    return all(any(map(_is_telling, re.findall(r"[\w ]+", alternative))) for alternative in fixed)


def _is_telling(text: str) -> bool:
    """Return whether a text of bounded length contains this one only if its author knows it.

    Any single word is easily among others there, a long number is not."""
    words = re.findall(r"\w+", text)
    return len(text) >= _LONG_TEXT and (len(words) > 1 or sum(map(str.isdigit, text)) >= _LONG_NUMBER)


def _text(literal: ast.expr) -> str:
    """Return the text of a literal, also of bytes; an empty one if it is none."""
    value = literal.value if isinstance(literal, ast.Constant) else ""
    return value.decode("latin-1") if isinstance(value, bytes) else value if isinstance(value, str) else ""


def needed_parts(
    node: ast.AST, tested: Collection[ast.AST] = (), *, joined: bool = False
) -> Iterator[ast.Constant | ast.Name]:
    """Yield the literals and cells of an expected value that an answer has to know.

    A number that is added to a part that the tested code gives is none: `inf + 79` is inf, and `0 * 79` is 0.

    Args:
        tested: the parts that the tested code gives.
        joined: whether such a part is joined with the node.
    """
    if node in tested or isinstance(node, ast.FormattedValue):
        return
    if isinstance(node, ast.Constant | ast.Name):
        if not joined or re.search(r"\w", _text(node)):
            yield node
        return
    parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.BinOp):
        mixed = any(part in tested for part in ast.walk(node))
        parts, joined = [node.left, node.right] if isinstance(node.op, ast.Add) or not mixed else [], joined or mixed
    elif isinstance(node, ast.Call):
        parts, joined = node.args[:1] if called_name(node.func) in _CONVERSIONS else [*node.args, *node.keywords], False
    elif not isinstance(node, ast.UnaryOp):
        joined = isinstance(node, ast.JoinedStr)
    for part in parts:
        yield from needed_parts(part, tested, joined=joined)


def called_name(function: ast.expr) -> str:
    """Return the last name of a called expression: "raises" of `pytest.raises`; "" without any."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
