"""Find the pipelines of a bash command that surely run, from its text; nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from etpi_assets.agent.bash import JoinedCommand, joined_commands

_WRAPPERS = frozenset({"sudo", "time", "nohup", "exec", "env", "command", "builtin", "eval", "!"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_FUNCTION = re.compile(r"([\w-]+)\(\)\{?$")
_CHANGES_SHELL = frozenset(
    """
    . alias bind break builtin continue disown enable eval exec exit hash kill logout return set shopt source suspend
    trap ulimit unalias unset
    """.split()  # noqa: SIM905 - words read better as text
)
"""Built-in commands after which a shell may run nothing, or other programs under the same names."""
_SETS = re.compile(r"[-+][eux]+|[-+][eux]*o|errexit|nounset|pipefail|xtrace")
"""Words of a `set` after which commands run as before, unless one fails."""
_UNKNOWN = re.compile(r"\bPATH\b|\bBASH_ENV\b|\$\{[^}]{0,80}\?")
"""Text that changes where programs are found, or ends the shell if a variable has no value."""
_TESTS = frozenset({"[", "[[", "test", "let"})
_CONSTANTS = {"true": True, ":": True, "false": False}
_OPENS = frozenset({"if", "while", "until", "for", "select", "case", "{"})
_CLOSES = frozenset({"fi", "done", "esac", "}"})
_DEEPEST = 50
"""Open blocks beyond which nothing counts; each pipeline looks at all of them."""


@dataclass(frozen=True)
class Pipeline:
    """The programs of a pipeline, and its text with arguments and redirections."""

    programs: list[str]
    text: str


@dataclass
class _Flow:
    """The state of reading a command.

    Attributes:
        status: whether the last pipeline of the list succeeded; None: it depends.
        blocks: whether each open block surely runs.
        defined: names of the functions.
        strict: `set -e` holds.
        broken: a block was closed that is not open.
    """

    status: bool | None = True
    blocks: list[bool] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)
    strict: bool = False
    broken: bool = False


def sure_pipelines(command: str) -> Iterator[Pipeline]:
    """Yield the pipelines that surely run, if those before them do what they usually do.

    Nothing counts after `false &&`, `true ||` or a test, in `else`, in a loop over nothing or in a function, after a
    command that may change the shell or whose program is not known from the text, or if a block stays open.
    """
    flow = _Flow()
    counted = list(_counted(command, flow))
    if not flow.blocks and not flow.broken:
        yield from counted


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
        if (words is not steps[0].words and not words) or not surely or not runs or not all(flow.blocks):
            continue
        if _UNKNOWN.search(text) or not re.fullmatch(r"[\w.+\[:({!=-]*", programs[0]):
            surely = False
            continue
        flow.status = _status(words if len(steps) == 1 else steps[-1].words, programs[-1])
        yield Pipeline([name for name in programs if name not in flow.defined], text)
        changing = {words[0], programs[0]} & _CHANGES_SHELL
        if changing == {"set"} and all(map(_SETS.fullmatch, words[1:])):
            flow.strict = flow.strict or any("e" in word for word in words[1:] if word != "pipefail")
        elif changing in ({"break"}, {"continue"}) and flow.blocks:
            flow.blocks[-1] = False
        elif changing and (changing != {"exec"} or programs[0]):
            surely = False


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
    """Open and close the blocks of a command's keywords, and return its words without them."""
    while words:
        word, following = words[0], words[1:]
        if (function := _FUNCTION.match(word)) or word == "function" or following[:1] == ["()"]:
            flow.defined.add(function[1] if function else (following or [""])[0] if word == "function" else word)
            flow.blocks.append(False)
            return []
        if word in _OPENS:
            flow.blocks.append(runs and word not in ("until", "case", "select"))
            if word == "for":
                flow.blocks[-1] = flow.blocks[-1] and len(words) > 3
            flow.status = True
            if word in ("for", "case", "select"):
                return []
        elif word in ("then", "do"):
            flow.blocks[-1:] = [all(flow.blocks[-1:]) and flow.status is True]
        elif word in ("else", "elif"):
            flow.blocks[-1:] = [False]
        elif word in _CLOSES:
            flow.broken = flow.broken or not flow.blocks
            flow.blocks[-1:] = []
            flow.status = True
        else:
            return words
        words, runs = following, True
    return []


def _program(words: list[str]) -> str:
    """Return the program that a simple command runs; "" for assignments alone. A path counts by its last part."""
    for word in words:
        bare = word.lstrip("(")
        if bare and bare not in _WRAPPERS and not _ASSIGNMENT.match(bare):
            return bare.rsplit("/", 1)[-1]
    return ""


def _status(words: list[str], program: str) -> bool | None:
    """Return whether a command succeeds; None for a test."""
    if program in _TESTS or words[0].startswith("(("):
        return None
    status = _CONSTANTS.get(program, True)
    return not status if words[0] == "!" else status
