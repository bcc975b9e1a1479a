"""Read bash commands with tree-sitter's grammar: simple commands with their words, redirections and heredocs.

Nothing is executed. A heredoc without its end runs to the end of the text, as in bash.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, product

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

_BASH = Language(tree_sitter_bash.language())
_TOKEN = re.compile(
    r"""^[ \t]*\)"|'[^']*'?|"(?!\$\([^"\n]*<<)(?:\\.|[^"\\])*"?|\\.|(?<![^\s;&|(])\#[^\n]*|\(\([^\n()]{0,200}\)\)|<<<"""
    r"""|(?P<line>\n)|<<(?P<tabs>-?)[ \t]*(?P<mark>(?:'[^'\n]*'|"[^"\n]*"|\\.|[^\s<>;&|()'"\\])+)""",
    re.DOTALL | re.MULTILINE,
)
"""Ends of lines, beginnings of heredocs (also in "$(…)"), and texts in which neither stands."""
_QUOTES = re.compile(r"['\"]|\\(?=.)")
_SECONDS = 0.5
_CHUNK = 1 << 10
"""Bytes that the parser, and each text of a node, reads at once."""
_WORD_BYTES = bytes(range(0x80)) + bytes((*range(1, 9), *range(14, 32))[byte % 26] for byte in range(0x80, 0x100))
"""The byte that the parser reads for each byte of a text. tree-sitter-bash 0.25 looks characters beyond ASCII up
outside its tables, and crashes at some; to bash they are parts of words, as control characters are."""
_MOST_COMMANDS = 1000
"""Simple commands of a text, at most, that are read."""
_MOST_WORDS = 100
"""Words, at most, that a word with variables stands for."""
_ESCAPED = re.compile(r"\\(\n|.)", re.DOTALL)
_ESCAPED_IN_QUOTES = re.compile(r'\\([\\"$`\n])')
SIMPLE = frozenset(
    ("command", "declaration_command", "unset_command", "test_command", "variable_assignment", "variable_assignments")
)
"""Kinds of nodes that are one simple command."""


@dataclass(frozen=True)
class Command:
    """A simple command.

    Attributes:
        words: its words without quotes; assignments before its name are no words.
        targets: the files that it is redirected to.
        bodies: its heredocs and here-strings.
    """

    words: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    bodies: list[str] = field(default_factory=list)


Values = Mapping[str, Sequence[str]]
"""Variable of a loop -> the words that it stands for."""


@dataclass(frozen=True)
class Heredoc:
    """A heredoc: its text, the span of its operator and end mark, and the span of its lines."""

    text: str
    operator: tuple[int, int]
    lines: tuple[int, int]


def parse(text: str) -> Node | None:
    """Return the root of a text's tree. If the grammar refuses it, its heredocs are read as here-strings.

    The grammar knows no heredoc without an end, no two in a line, and no list after one.

    None if that takes more than _SECONDS: the time to recover from errors may grow with the square of their number."""
    root = tree_of(text)
    if root is not None and root.has_error and "<<" in text:
        edits = [(*each.operator, f"<<< {shlex.quote(f'{each.text}{chr(10)}')}") for each in heredocs(text)]
        other = tree_of(edited(text, [*edits, *((*each.lines, "") for each in heredocs(text))]))
        return other if other is not None and not other.has_error else root
    return root


def heredocs(text: str) -> list[Heredoc]:
    """Return the heredocs of a text; one without an end mark runs to the end of the text."""
    read: list[Heredoc] = []
    waiting: list[re.Match[str]] = []
    at = 0
    while match := _TOKEN.search(text, at):
        at = match.end()
        if match["mark"]:
            waiting.append(match)
        elif match["line"]:
            for operator in waiting:
                start, held, mark = at, list[str](), _QUOTES.sub("", operator["mark"])
                while at < len(text):
                    end = text.find("\n", at) % (len(text) + 1)
                    line = text[at:end].lstrip("\t") if operator["tabs"] else text[at:end]
                    at = min(end + 1, len(text))
                    if line.rstrip() == mark:
                        break
                    held.append(line)
                read.append(Heredoc("\n".join(held), operator.span(), (start, at)))
            waiting = []
    return [*read, *(Heredoc("", each.span(), (len(text), len(text))) for each in waiting)]


def edited(text: str, edits: list[tuple[int, int, str]]) -> str:
    """Return a text with (start, end, other text) put into it."""
    parts, position = [], 0
    for start, end, put in sorted(edits):
        parts.append(text[position:start] + put)
        position = max(position, end)
    return "".join(parts) + text[position:]


def tree_of(text: str) -> Node | None:
    source, end = text.encode(errors="replace").replace(b"\0", b"?"), time.thread_time() + _SECONDS
    read = source.translate(_WORD_BYTES)

    def late(*_: object) -> bool:
        return time.thread_time() > end

    with suppress(ValueError):  # cancelled
        tree = Parser(_BASH).parse(lambda at, _: read[at : at + _CHUNK], progress_callback=late)
        read = source  # for the texts of nodes
        return tree.root_node
    return None


def text_of(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")


def commands(text: str) -> Iterator[Command]:
    """Yield the simple commands of a text in order, also those in loops, functions and substitutions.

    The variable of a loop stands for the words of the loop."""
    root = parse(text)
    yield from islice(_commands(root), _MOST_COMMANDS) if root else ()


def _commands(root: Node) -> Iterator[Command]:
    waiting: list[tuple[Node, Sequence[Node], Values]] = [(root, (), {})]
    while waiting:
        node, redirects, values = waiting.pop()
        if node.type in SIMPLE:
            yield command_of(node, redirects, values)
            inner: list[tuple[Node, Sequence[Node], Values]] = [(each, (), values) for each in _substitutions(node)]
        elif node.type == "redirected_statement":
            inner = [(part, redirections, values) for part, redirections in redirected(node, redirects)]
        else:
            if node.type == "for_statement" and (name := node.child_by_field_name("variable")):
                named = [word for each in node.children_by_field_name("value") for word in words_of(each, values)]
                values = {**values, text_of(name): named[:_MOST_WORDS]}
            inner = [(child, (), values) for child in node.named_children]
            if redirects and inner and node.type in ("list", "pipeline"):
                inner[-1] = (inner[-1][0], redirects, values)
            elif redirects:
                yield command_of(None, redirects, values)
        waiting.extend(reversed(inner))


def redirected(node: Node, redirects: Sequence[Node] = ()) -> list[tuple[Node, Sequence[Node]]]:
    """Return the body of a redirected statement with its redirections, and the rest of the line of its heredocs."""
    heredocs = [each for each in node.children_by_field_name("redirect") if each.type == "heredoc_redirect"]
    redirections = [*node.children_by_field_name("redirect"), *redirects]
    redirections += [each for heredoc in heredocs for each in heredoc.children_by_field_name("redirect")]
    body = node.child_by_field_name("body")
    parts: list[tuple[Node, Sequence[Node]]] = [(body or node.children[0], redirections)]
    for heredoc in heredocs:
        rest = [each for each in heredoc.named_children if each.type == "pipeline"]
        parts += [(each, ()) for each in [*rest, *heredoc.children_by_field_name("right")]]
    return parts


def command_of(node: Node | None, redirects: Sequence[Node] = (), values: Values | None = None) -> Command:
    """Return a simple command; without a node, one of redirections alone."""
    values = values or {}
    words, targets, bodies = list[str](), list[str](), list[str]()
    inside = [each for each in node.children if each.type.endswith("_redirect")] if node is not None else []
    if node is not None:
        parts = node.children if node.type != "test_command" else node.children[:1]
        skipped = ("file_redirect", "herestring_redirect", "variable_assignment", "comment")
        if node.type in ("declaration_command", "unset_command"):
            skipped = skipped[:2]
        if not node.type.startswith("variable_assignment"):
            words = [word for each in parts if each.type not in skipped for word in words_of(each, values)]
    for each in [*inside, *redirects]:
        if each.type == "file_redirect":
            if any(">" in child.type and child.type != ">&" for child in each.children):
                named = each.children_by_field_name("destination")
                targets += [word for child in named[:1] for word in words_of(child, values)]
                words += [word for child in named[1:] for word in words_of(child, values)]
        elif each.type == "herestring_redirect":
            bodies += [word for child in each.named_children[-1:] for word in words_of(child, values)]
        elif each.type == "heredoc_redirect":
            words += [word for child in each.children_by_field_name("argument") for word in words_of(child, values)]
            bodies += [text_of(child) for child in each.children if child.type == "heredoc_body"]
    return Command(words, targets, bodies)


def words_of(node: Node, values: Values | None = None) -> list[str]:
    """Return the words without quotes that a node stands for: several where it has the variable of a loop."""
    values = values or {}
    text = text_of(node)
    if node.type == "raw_string":
        return [text[1:-1]]
    if node.type == "ansi_c_string":
        return [text[2:-1]]
    if node.type in ("simple_expansion", "expansion"):
        return list(values.get(text.strip("${}"), [text]))
    if node.type in ("string", "concatenation", "command_name"):
        return _joined(node, values)
    return [_ESCAPED.sub(lambda match: match[1].strip("\n"), text)] if node.type == "word" else [text]


def _joined(node: Node, values: Values) -> list[str]:
    """Return the words of a node whose parts stand beside each other; the text between variables stays as it is."""
    quoted = node.type == "string"
    source, start, pieces = node.text or b"", node.start_byte, list[list[str]]()
    at = 1 if quoted else 0
    for child in node.named_children:
        if quoted and child.type not in ("simple_expansion", "expansion"):
            continue
        between = source[at : child.start_byte - start].decode(errors="replace")
        pieces += [[_plain(between) if quoted else between], words_of(child, values)]
        at = child.end_byte - start
    rest = source[at : len(source) - 1 if quoted else len(source)].decode(errors="replace")
    pieces.append([_plain(rest) if quoted else rest])
    words = product(*pieces)
    return ["".join(word) for word, _ in zip(words, range(_MOST_WORDS), strict=False)]


def _plain(text: str) -> str:
    return _ESCAPED_IN_QUOTES.sub(lambda match: match[1].strip("\n"), text)


def _substitutions(node: Node) -> list[Node]:
    """Return the nodes below a simple command whose commands run too."""
    substitutions, waiting = [], list(node.children)
    while waiting:
        each = waiting.pop()
        if each.type in ("command_substitution", "process_substitution"):
            substitutions.append(each)
        else:
            waiting += each.children
    return sorted(substitutions, key=lambda each: each.start_byte)
