"""Split bash commands into the messages that they send and the rest, by the tree of `bash_tree`. Nothing here raises.

A message's text is literal: the harness delivers it, no shell expands it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate

from tree_sitter import Node

from etpi_assets.agent.bash_tree import Heredoc, edited, heredocs, text_of, tree_of, words_of

_CHARACTER = re.compile(r"[^\n]")
_MOST_NODES = 50_000
"""Nodes of a tree; a larger command sends no messages."""
_HERE = "herestring_redirect"
_STRINGS = frozenset(("raw_string", "string", "ansi_c_string", "translated_string"))


@dataclass(frozen=True)
class SentMessage:
    """One message command: the recipient (None: everybody), the text, whether the sender waits for an answer."""

    to: str | None
    message: str
    wait: bool


@dataclass
class SplitCommand:
    """A bash command split into messages and the rest.

    Attributes:
        rest: the command with `:` in place of each message; "" if it only sends messages.
        leads: the first simple command is a message.
    """

    sent: tuple[SentMessage, ...]
    rest: str
    leads: bool


def split_command(command: str, names: Collection[str] = ("send_message",)) -> SplitCommand:
    """Split a bash command into the messages that its top-level simple commands send and the rest.

    A simple command is a message where its first word is one of `names`: `NAME TO <<'EOF'`, `NAME TO "text"`,
    `NAME TO 'text'`, `NAME "text"` (to everybody), with `--wait` anywhere among the words. Inside a substitution, a
    group or a conditional it is left to the shell, because static parsing cannot tell whether it would run.
    """
    if not any(name in command for name in names):
        return SplitCommand((), command, False)
    held = {each.operator[0]: each for each in heredocs(command)}
    # The grammar reads a heredoc as the input from a file: offsets stay.
    edits = [(start, start + 2, "< ") for start in held]
    edits += [(start + 2, start + 3, " ") for start in held if command.startswith("<<-", start)]
    edits += [(*each.lines, _CHARACTER.sub(" ", command[slice(*each.lines)])) for each in held.values()]
    text = edited(command, edits)
    # A quote that is not closed runs to the end of the text.
    roots = (root for end in ("", "'", '"') if (root := tree_of(text + end)) is not None)
    root = next((root for root in roots if not root.has_error), None) or tree_of(text)
    if root is None or root.descendant_count > _MOST_NODES:
        return SplitCommand((), command, False)
    ends = list(accumulate(len(character.encode(errors="replace")) for character in text))
    sent: list[SentMessage] = []
    cuts: list[tuple[int, int, str]] = []
    statements, joined = _top_level(root)
    pure, leads = not joined, False
    for number, (node, redirects) in enumerate(statements):
        bodies = {each: held.get(bisect_right(ends, each.start_byte)) for each in redirects}
        message = _message(node, bodies, names)
        pure = pure and message is not None and all(b or r.type == _HERE for r, b in bodies.items())
        if message is not None:
            leads = leads or number == 0
            sent.append(message)
            start, end = node.start_byte, max(each.end_byte for each in (node, *redirects))
            cuts.append((bisect_right(ends, start), bisect_right(ends, end), ":"))
            cuts.extend((*each.lines, "") for each in bodies.values() if each)
    if not sent:
        return SplitCommand((), command, False)
    return SplitCommand(tuple(sent), "" if pure else edited(command, cuts), leads)


def _top_level(root: Node) -> tuple[list[tuple[Node, list[Node]]], bool]:
    """Return the statements of a tree that are in no other one, each with its redirections, and whether a pipe or `&`
    joins some."""
    statements, joined = list[tuple[Node, list[Node]]](), False
    waiting: list[tuple[Node, list[Node]]] = [(root, [])]
    while waiting:
        node, redirects = waiting.pop()
        if node.type == "redirected_statement":
            behind = node.children_by_field_name("redirect")
            waiting.append((node.child_by_field_name("body") or node.children[0], [*behind, *redirects]))
        elif node.type in ("program", "list", "pipeline"):
            joined = joined or any(each.type in ("|", "|&", "&") for each in node.children)
            inner = [each for each in node.named_children if each.type != "comment"]
            waiting += [(each, redirects if each is inner[-1] else []) for each in reversed(inner)]
        else:
            inside = [each for each in node.children if each.type.endswith("_redirect")]
            statements.append((node, [*inside, *redirects]))
    return statements, joined


def _message(node: Node, redirects: Mapping[Node, Heredoc | None], names: Collection[str]) -> SentMessage | None:
    if node.type != "command" or node.has_error or node.children[0].type != "command_name":
        return None
    words = [each for each in node.children if not each.type.endswith("_redirect")]
    words += [each for redirect in redirects for each in redirect.children_by_field_name("destination")[1:]]
    name, *operands = sorted(words, key=lambda each: each.start_byte)
    if _word(name) not in names:
        return None
    plain = [each for each in operands if text_of(each) != "--wait"]
    texts = [
        body.text if body else _word(r.named_children[-1]) for r, body in redirects.items() if body or r.type == _HERE
    ]
    to, wait = _word(plain[0]) if plain else None, len(plain) < len(operands)
    if texts:
        return SentMessage(to, texts[-1], wait)
    if len(plain) == 1 and _is_quoted(plain[0]):
        return SentMessage(None, to or "", wait)
    return SentMessage(to, " ".join(map(_word, plain[1:])), wait) if len(plain) > 1 else None


def _is_quoted(word: Node) -> bool:
    parts = word.children if word.type == "concatenation" else [word]
    return any(each.type in _STRINGS for each in parts)


def _word(node: Node) -> str:
    return "".join(words_of(node)[:1])
