"""Find the pipelines of a bash command that surely run, from its text; nothing is executed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from etpi_assets.agent.bash import JoinedCommand, joined_commands

_WRAPPERS = frozenset({"sudo", "time", "nohup", "exec", "env", "command", "builtin", "eval", "!"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_FUNCTION = re.compile(r"([\w-]+)\(\)\{?$")
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
_TESTS = frozenset({"[", "[[", "test", "let"})
_CONSTANTS = {"true": True, ":": True, "false": False}
_OPENS = frozenset({"if", "while", "until", "for", "select", "case", "{"})
_CLOSES = {"fi": ("then", "else"), "done": ("do",), "esac": ("case",), "}": ("{",)}
"""Keyword -> the keywords of a block that it may close."""
_AFTER = {"then": ("if", "elif"), "elif": ("then",), "else": ("then",), "do": ("while", "until", "for", "select")}
"""Keyword -> the keywords of a block that it may follow."""
_ENDLESS = {("while", "true"), ("while", ":"), ("until", "false")}
"""Keyword and condition of a loop that does not end."""
_LONGEST = 65_536
"""Characters beyond which a command counts nothing."""
_DEEPEST = 50
"""Open blocks beyond which nothing counts; each pipeline looks at all of them."""


@dataclass(frozen=True)
class Pipeline:
    """The programs of a pipeline, and its text with arguments and redirections."""

    programs: list[str]
    text: str


@dataclass
class _Block:
    """An open block: its last keyword, and whether it surely runs."""

    keyword: str
    runs: bool


@dataclass
class _Flow:
    """The state of reading a command.

    Attributes:
        status: whether the last pipeline of the list succeeded; None: it depends.
        defined: names of the functions.
        strict, nounset: `set -e` and `set -u` hold.
        program: the last one that ran.
        endless: a loop has a condition that always holds.
        broken: bash would not parse it.
    """

    status: bool | None = True
    blocks: list[_Block] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)
    strict: bool = False
    nounset: bool = False
    program: str = ""
    endless: bool = False
    broken: bool = False


def sure_pipelines(command: str) -> Iterator[Pipeline]:
    """Yield the pipelines that surely run, if those before them do what they usually do.

    Nothing counts after `false &&`, `true ||` or a test, in `else`, in a loop over nothing or in a function, after a
    command that may change the shell or whose program is not known from the text, after a loop without end, or if bash
    would not parse the text.
    """
    flow = _Flow(broken=len(command) > _LONGEST or not _closes_quotes(command))
    counted = [] if flow.broken else list(_counted(command, flow))
    if not flow.blocks and not flow.broken:
        yield from counted


def _closes_quotes(command: str) -> bool:
    """Return whether every quote is closed; True with a heredoc, whose text may hold single ones."""
    try:
        return "<<" in command or bool(shlex.split(command, comments=True))
    except ValueError:
        return False


def _counted(command: str, flow: _Flow) -> Iterator[Pipeline]:
    """Yield the pipelines that surely run; when it ends, `flow` tells whether bash would parse the command."""
    surely = True
    for operator, steps in _pipelines(command):
        if len(flow.blocks) > _DEEPEST:
            return
        surely = surely and not (operator in ";&" and flow.strict and flow.status is not True)
        runs = operator in ";&" or flow.status is (operator == "&&")
        words = _after_keywords(steps[0].words, flow, runs=runs)
        programs = [_program(words), *(_program(step.words) for step in steps[1:])]
        text = " ".join(step.text for step in steps)
        flow.broken = flow.broken or (words[-1:] == [")"] and text.count("(") < text.count(")"))
        flow.broken = flow.broken or any(map(_is_cut, steps))
        known = f"{text} {' '.join(word for step in steps for word in step.words)}"
        surely = surely and not (_UNKNOWN.search(known) or (flow.nounset and "$" in text) or flow.endless)
        all_run = runs and all(block.runs for block in flow.blocks)
        if (words is not steps[0].words and not words) or not surely or not all_run:
            continue
        if not re.fullmatch(r"[\w.+\[:({!=/~-]*", programs[0]) or flow.defined & set(programs):
            surely = False
            continue
        flow.program = programs[-1]
        flow.status = _status(words if len(steps) == 1 else steps[-1].words, programs[-1])
        if len(programs) > 1 and "false" in programs:
            flow.status = None  # `pipefail`
        yield Pipeline(programs, text)
        changing = ({words[0]} | set(programs)) & _CHANGES_SHELL
        if changing == {"set"} and all(map(_SETS.fullmatch, words[1:])):
            flow.strict = flow.strict or any("e" in word for word in words[1:] if word not in ("pipefail", "nounset"))
            flow.nounset = flow.nounset or any(re.match("-[a-z]*u|nounset", word) for word in words[1:])
        elif changing in ({"break"}, {"continue"}) and flow.blocks:
            for block in flow.blocks:
                block.runs = False
        elif (changing and (changing != {"exec"} or programs[0])) or (programs[0] == "printf" and "-v" in words):
            surely = False


def _is_cut(step: JoinedCommand) -> bool:
    """Return whether the command lacks the file of a redirection, or the end of a test."""
    first = step.words[0]
    unended = (first.startswith("((") and "))" not in step.text) or (first == "[[" and "]]" not in step.words)
    return unended or step.text.rstrip().endswith(("<", ">"))


def _pipelines(command: str) -> Iterator[tuple[str, list[JoinedCommand]]]:
    """Yield (the operator before it, its commands) for each pipeline."""
    steps: list[JoinedCommand] = []
    for step in joined_commands(command):
        if steps and step.operator != "|":
            yield steps[0].operator, steps
            steps = []
        steps.append(step)
    if steps:
        yield steps[0].operator, steps


def _after_keywords(words: list[str], flow: _Flow, *, runs: bool) -> list[str]:
    """Open, continue and close the blocks of a command's keywords, and return its words without them."""
    while words:
        word, following = words[0], words[1:]
        last = flow.blocks[-1] if flow.blocks else _Block("", True)
        if (function := _FUNCTION.match(word)) or word == "function" or following[:1] == ["()"]:
            flow.defined.add(function[1] if function else (following or [""])[0] if word == "function" else word)
            flow.blocks.append(_Block("{", False))
            return []
        if word in _OPENS:
            flow.blocks.append(_Block(word, runs and word not in ("until", "case", "select")))
            if word == "for":
                flow.blocks[-1].runs = runs and following[1:2] == ["in"] and _has_item(following[2:])
                flow.broken = (
                    flow.broken
                    or following[1:2] not in ([], ["in"])
                    or not "".join(following[:1]).lstrip("(").isidentifier()
                )
            flow.status = True
            if word in ("for", "case", "select"):
                return []
        elif word in _AFTER:
            flow.broken = (
                flow.broken
                or last.keyword not in _AFTER[word]
                or following[:1] == ["then"]
                or not _CLOSES.keys().isdisjoint(following[:1])
            )
            last.runs = last.runs and flow.status is True and word in ("then", "do")
            flow.endless = flow.endless or (last.keyword, flow.program) in _ENDLESS
            last.keyword = word
        elif word in _CLOSES:
            flow.broken = flow.broken or last.keyword not in _CLOSES[word]
            flow.blocks[-1:] = []
            flow.status = True if flow.status else None
        else:
            return words
        words, runs = following, True
    return []


def _has_item(words: list[str]) -> bool:
    """Return whether a loop surely has an item: a word that is more than a variable or an empty substitution."""
    return any(not re.fullmatch(r"\$\{?\w+\}?|\$\((?:true|false|:)?\)|", word) for word in words)


def _program(words: list[str]) -> str:
    """Return the program that a simple command runs; "" for assignments alone. The system's folders are left out."""
    for word in words:
        bare = word.lstrip("(")
        if bare and bare not in _WRAPPERS and not _ASSIGNMENT.match(bare):
            return _SYSTEM_FOLDERS.sub("", bare, 1) if _SYSTEM_FOLDERS.match(bare) else bare
    return ""


def _status(words: list[str], program: str) -> bool | None:
    """Return whether a command succeeds; None for a test."""
    if program in _TESTS or words[0].startswith("(("):
        return None
    status = _CONSTANTS.get(program, True)
    return not status if words[0] == "!" else status
