"""Find the pipelines of a bash command that surely run, from its tree; nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tree_sitter import Node

from etpi_assets.agent.bash_tree import SIMPLE, command_of, parse, redirected, text_of

_WRAPPERS = frozenset({"sudo", "time", "nohup", "exec", "env", "command", "builtin", "eval", "!"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_CHANGES_SHELL = frozenset(
    """
    . alias bind break builtin continue declare disown enable eval exec exit getopts hash kill killall local logout
    mapfile pkill readarray readonly return set shopt sleep source suspend trap typeset ulimit unalias unset yes
    """.split()  # noqa: SIM905 - words read better as text
)
"""Commands after which a shell may run nothing, never, or other programs under the same names."""
_SETS = re.compile(r"[-+][eux]+|[-+][eux]*o|errexit|nounset|pipefail|xtrace")
"""Words of a `set` after which commands run as before, unless one fails."""
_UNKNOWN = re.compile(
    r"\b(?:PATH|BASH_ENV|BASHOPTS|SHELLOPTS|E?UID|PPID|p?kill|killall|getppid)\b|\$\$|\$\[|\$\(\(|\w\+?=\("
    r"|\$\{(?!\w+(?:[%#/]|:?-|\}))"
)
"""Text that changes where programs are found, or may end the shell: a signal, or a value that does not exist."""
_SYSTEM_FOLDERS = re.compile(r"(?:/usr|/usr/local)?/s?bin/")
_TESTS = frozenset({"[", "[[", "((", "test", "let"})
_CONSTANTS = {"true": True, ":": True, "false": False}
_RESERVED = frozenset("if then elif else fi do done case esac while until for select function in { }".split())  # noqa: SIM905
_ENDLESS = {("while", "true"), ("while", ":"), ("until", "false")}
"""Keyword and condition of a loop that does not end."""
_LONGEST = 65_536
"""Characters beyond which a command counts nothing."""
_DEEPEST = 50
"""Statements within statements beyond which nothing counts."""


@dataclass(frozen=True)
class Pipeline:
    """The programs of a pipeline, and its text with arguments and redirections."""

    programs: list[str]
    text: str


_Part = tuple[Node, Sequence[Node]]
"""A command and its redirections."""


class _Broken(Exception):
    """Bash would not parse the command."""


def sure_pipelines(command: str) -> Iterator[Pipeline]:
    """Yield the pipelines that surely run, if those before them do what they usually do.

    Nothing counts after `false &&`, `true ||` or a test, in `else`, in a loop over nothing or in a function, after a
    command that may change the shell or whose program is not known from the text, after a loop without end, or if bash
    would not parse the text.
    """
    root = parse(command) if len(command) <= _LONGEST else None
    if root is None or root.has_error:
        return
    reader = _Reader()
    try:
        reader.statements(root.named_children, surely=True)
    except _Broken:
        return
    yield from reader.counted


@dataclass
class _Reader:
    """Reads statements in the order in which they run.

    Attributes:
        counted: the pipelines that surely run.
        sure: whether the shell is known to go on as it was.
        status: whether the last statement succeeded; None: it depends.
        defined: names of the functions.
        strict, nounset: `set -e` and `set -u` hold.
        left: whether a `break` or `continue` left the loop.
    """

    counted: list[Pipeline] = field(default_factory=list)
    sure: bool = True
    status: bool | None = True
    defined: set[str] = field(default_factory=set)
    strict: bool = False
    nounset: bool = False
    left: bool = False
    depth: int = 0

    def statements(self, nodes: Sequence[Node], *, surely: bool) -> None:
        """Read statements, of which the next runs whether or not the one before succeeds."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise _Broken
        for node in nodes:
            if node.type not in ("comment", "heredoc_body", "heredoc_end"):
                self.statement(node, surely=surely and not self.left)
                self.sure = self.sure and not (self.strict and self.status is not True)
        self.depth -= 1

    def statement(self, node: Node, redirects: Sequence[Node] = (), *, surely: bool) -> None:
        kind = node.type
        if kind in SIMPLE:
            self.pipeline([(node, redirects)], surely=surely)
        elif kind == "pipeline":
            *more, last = node.named_children
            self.joined([*((each, ()) for each in more), (last, redirects)], surely=surely)
        elif kind == "redirected_statement":
            (body, redirections), *rest = redirected(node, redirects)
            if rest and rest[0][0].type == "pipeline":
                (first, after), *more = [_and_or(each) for each in rest[0][0].named_children]
                self.joined([(body, redirections), (first, ()), *((each, ()) for each, _ in more)], surely=surely)
                for operator, each in after:
                    self.then(operator, [(each, ())], surely=surely)
            else:
                self.statement(body, redirections, surely=surely)
                for heredoc in node.children_by_field_name("redirect"):
                    for operator in heredoc.children_by_field_name("operator"):
                        self.then(text_of(operator), rest, surely=surely)
        elif kind == "list":
            first, operator, last = [each for each in node.children if each.type != "comment"]
            self.statement(first, surely=surely)
            self.then(text_of(operator), [(last, redirects)], surely=surely)
        elif kind == "negated_command":
            self.statement(node.named_children[-1], redirects, surely=surely)
            self.status = None if self.status is None else not self.status
        elif kind in ("compound_statement", "subshell"):
            if text_of(node).startswith("(("):
                self.status = None
                return
            self.block(node.named_children, surely=surely)
        elif kind == "if_statement":
            self.conditional(node, surely=surely)
        elif kind == "while_statement":
            self.loop(node, surely=surely)
        elif kind in ("for_statement", "c_style_for_statement"):
            name = text_of(node.children[1])
            if node.children[0].type == "for" and node.children[1].type == "variable_name" and not name.isidentifier():
                raise _Broken
            self.sure = self.sure and not _UNKNOWN.search(name)
            values = [text_of(each) for each in node.children_by_field_name("value")]
            self.body(node, surely=surely and any(map(_is_item, values)) and node.children[0].type == "for")
            self.status = True if self.status else None
        elif kind == "function_definition":
            self.defined |= {text_of(each) for each in node.children_by_field_name("name")}
            self.block(node.children_by_field_name("body"), surely=False)
        else:
            self.sure = self.sure and kind == "case_statement"
            self.status = None

    def joined(self, parts: Sequence[_Part], *, surely: bool) -> None:
        """Read a pipeline. The grammar gives one after a redirection the whole list before it: `a && b > c | d`."""
        (first, redirections), *more = parts
        if first.type == "redirected_statement":
            (first, redirections), *rest = redirected(first, redirections)
            more = [*(part for part in rest if part[0].type != "pipeline"), *more]
        if first.type != "list":
            return self.pipeline([(first, redirections), *more], surely=surely)
        left, operator, right = [each for each in first.children if each.type != "comment"]
        self.statement(left, surely=surely)
        return self.then(text_of(operator), [(right, redirections), *more], surely=surely)

    def then(self, operator: str, parts: Sequence[_Part], *, surely: bool) -> None:
        """Read the pipeline that runs after `&&` or `||`."""
        before, runs = self.status, self.status is (operator == "&&")
        if len(parts) == 1:
            self.statement(*parts[0], surely=surely and runs)
        else:
            self.joined(parts, surely=surely and runs)
        if not runs:
            self.status = before

    def block(self, nodes: Sequence[Node], *, surely: bool) -> None:
        if not nodes:
            raise _Broken
        before = self.status
        self.statements(nodes, surely=surely)
        if not surely:
            self.status = before

    def conditional(self, node: Node, *, surely: bool) -> None:
        condition = node.children_by_field_name("condition")
        then = next(at for at, each in enumerate(node.children) if each.type == "then")
        body = [each for each in node.children[then:] if each.is_named and not each.type.startswith(("elif", "else"))]
        self.block([each for each in condition if each.is_named], surely=surely)
        taken = self.status is True
        self.block(body, surely=surely and taken)
        self.status = True if taken and self.status else None

    def loop(self, node: Node, *, surely: bool) -> None:
        keyword = text_of(node.children[0])
        condition = [each for each in node.children_by_field_name("condition") if each.is_named]
        last = text_of(condition[-1]) if condition else ""
        runs = surely and keyword == "while"
        self.block(condition, surely=runs)
        self.sure = self.sure and (keyword, last) not in _ENDLESS
        self.body(node, surely=runs and self.status is True)
        self.status = True if self.status else None

    def body(self, node: Node, *, surely: bool) -> None:
        self.status = True
        for each in node.children_by_field_name("body"):
            self.block(each.named_children, surely=surely)
        self.left = False

    def pipeline(self, parts: Sequence[_Part], *, surely: bool) -> None:
        steps = [step for part in parts for step in _steps(*part)]
        words = [command_of(*step).words for step in steps]
        if any(each[:1] and each[0] in _RESERVED for each in words):
            raise _Broken
        programs, text = [*map(_program, words)], " ".join(_line(*step) for step in steps)
        known = f"{text} {' '.join(word for each in words for word in each)}"
        self.sure = self.sure and not (_UNKNOWN.search(known) or (self.nounset and "$" in text))
        simple = all(node.type in SIMPLE for node, _ in steps)
        if not surely or not self.sure or not simple:
            self.status = None if surely else self.status
            return
        if not re.fullmatch(r"[\w.+\[:({!=/~-]*", programs[0]) or self.defined & set(programs):
            self.sure = False
            return
        self.status = None if programs[-1] in _TESTS else _CONSTANTS.get(programs[-1], True)
        if len(programs) > 1 and "false" in programs:
            self.status = None  # `pipefail`
        self.counted.append(Pipeline(programs, text))
        self.change(words[0], programs)

    def change(self, words: list[str], programs: list[str]) -> None:
        """Note what a command changes for those after it."""
        changing = ({*words[:1]} | set(programs)) & _CHANGES_SHELL
        if changing == {"set"} and all(map(_SETS.fullmatch, words[1:])):
            self.strict = self.strict or any("e" in word for word in words[1:] if word not in ("pipefail", "nounset"))
            self.nounset = self.nounset or any(re.match("-[a-z]*u|nounset", word) for word in words[1:])
        elif changing in ({"break"}, {"continue"}):
            self.left = True
        elif (changing and (changing != {"exec"} or programs[0])) or (programs[0] == "printf" and "-v" in words):
            self.sure = False


def _and_or(node: Node) -> tuple[Node, list[tuple[str, Node]]]:
    """Return (the first statement of a list, (operator, statement) of the rest)."""
    if node.type != "list":
        return node, []
    left, operator, right = [each for each in node.children if each.type != "comment"]
    first, more = _and_or(left)
    return first, [*more, (text_of(operator), right)]


def _steps(node: Node, redirects: Sequence[Node]) -> list[_Part]:
    """Return the commands of a pipeline with their redirections."""
    if node.type == "pipeline":
        return [step for child in node.named_children for step in _steps(child, ())]
    if node.type == "redirected_statement":
        (body, redirections), *rest = redirected(node, redirects)
        return [*_steps(body, redirections), *(step for each, more in rest for step in _steps(each, more))]
    return [(node, redirects)]


def _line(node: Node, redirects: Sequence[Node]) -> str:
    """Return the text of a command with its redirections, without the bodies of its heredocs."""
    shown = [each.children[1] if each.type == "heredoc_redirect" else each for each in [*node.children, *redirects]]
    texts = map(text_of, shown if node.child_count else [node, *shown])
    return " ".join(text for text in texts if not (text.startswith("<<<") and "\n" in text))


def _is_item(value: str) -> bool:
    """Return whether a loop surely has an item: a word that is more than a variable or an empty substitution."""
    return not re.fullmatch(r"\$\{?\w+\}?|\$\((?:true|false|:)?\)|", value)


def _program(words: Sequence[str]) -> str:
    """Return the program that a simple command runs; "" for assignments alone. The system's folders are left out."""
    for word in words:
        if word and word not in _WRAPPERS and not _ASSIGNMENT.match(word):
            return _SYSTEM_FOLDERS.sub("", word, 1) if _SYSTEM_FOLDERS.match(word) else word
    return ""
