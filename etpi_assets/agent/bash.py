"""Split bash commands into the messages that they send and the rest; `bash_tree` reads all else.

It knows enough of bash's grammar (quotes, heredocs, separators, redirections) to separate message commands from the
commands around them, in one pass that never raises. A message's text is literal: the harness delivers it, no shell
expands it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

_PLAIN_WORD = re.compile(r"""[^'"\\ \t\r\n<>;&|()`]+""")
_PLAIN_QUOTED = re.compile(r'[^"\\]+')
"""Runs of literal characters: in a word, and between double quotes."""

_AFTER_WORD = frozenset(["", *" \t\r\n<>;&|"])

_OTHER = r"""(?:[ \t\r]*(?!{names})[^'"\\ \t\r\n<>;&|()`#][^'"\\\n<>;&|()`#]*(?:&&|\|\||[;|\n]|&(?![&>]))){{1,1000}}"""
"""Up to 1,000 commands of plain words that do not begin with `names`, each with its operator."""


@dataclass(frozen=True)
class SentMessage:
    """One message command: the recipient (None: everybody), the text, whether the sender waits for an answer."""

    to: str | None
    message: str
    wait: bool


@dataclass(frozen=True)
class SplitCommand:
    """A bash command split into messages and the rest.

    Attributes:
        rest: the command with `:` in place of each message; "" if it only sends messages.
        leads: the first simple command is a message.
    """

    sent: tuple[SentMessage, ...]
    rest: str
    leads: bool


@dataclass(slots=True)
class _SimpleCommand:
    """One simple command.

    Attributes:
        start, end: its span in the text.
        words: (word without quotes, whether any of it was quoted).
        text: its here-string or heredoc.
        redirected: it has other redirections.
        bodies: spans of its heredocs.
    """

    start: int
    end: int = 0
    words: list[tuple[str, bool]] = field(default_factory=list)
    text: str | None = None
    redirected: bool = False
    bodies: list[tuple[int, int]] = field(default_factory=list)


def split_command(command: str, names: Collection[str] = ("send_message",)) -> SplitCommand:
    """Split a bash command into the messages that its top-level simple commands send and the rest.

    A simple command is a message where its first word is one of `names`: `NAME TO <<'EOF'`, `NAME TO "text"`,
    `NAME TO 'text'`, `NAME "text"` (to everybody), with `--wait` anywhere among the words. Inside a substitution, a
    group or a conditional it is left to the shell, because static parsing cannot tell whether it would run.
    """
    if not any(name in command for name in names):
        return SplitCommand((), command, False)
    lexer = _Lexer(command, names)
    sent: list[SentMessage] = []
    cuts: list[tuple[int, int, str]] = []
    pure, leads = True, False
    for simple in lexer.run():
        message = _message(simple)
        if message is None:
            pure = False
            continue
        leads = leads or simple.start == lexer.first
        pure = pure and not simple.redirected
        sent.append(message)
        cuts.append((simple.start, simple.end, ":"))
        cuts.extend((start, end, "") for start, end in simple.bodies)
    if not sent:
        return SplitCommand((), command, False)
    rest, position = [], 0
    for start, end, put in sorted(cuts):
        rest.append(command[position:start] + put)
        position = max(position, end)
    left = "".join(rest) + command[position:]
    return SplitCommand(tuple(sent), "" if pure and not lexer.joined and not lexer.others else left, leads)


def _message(simple: _SimpleCommand) -> SentMessage | None:
    operands = [(word, quoted) for word, quoted in simple.words[1:] if quoted or word != "--wait"]
    wait = len(operands) < len(simple.words) - 1
    if simple.text is not None:
        return SentMessage(operands[0][0] if operands else None, simple.text, wait)
    if len(operands) == 1 and operands[0][1]:
        return SentMessage(None, operands[0][0], wait)
    if len(operands) < 2:
        return None
    return SentMessage(operands[0][0], " ".join(word for word, _ in operands[1:]), wait)


class _Lexer:
    """Lexer of a command in one pass.

    Attributes:
        joined: the command has a pipe or a `&`, so its messages are not pure.
        first: where its first simple command starts.
        others: with `names`, there are commands that do not begin with one of them; these are not returned.
    """

    def __init__(self, text: str, names: Collection[str] | None = None) -> None:
        self.s, self.n, self.i = text, len(text), 0
        self.depth, self.ticked = 0, False
        self.out: list[_SimpleCommand] = []
        self.simple: _SimpleCommand | None = None
        self.pending: list[tuple[str, bool, _SimpleCommand]] = []
        self.last = 0
        self.joined = False
        self.first: int | None = None
        self.names, self.others = names, False
        self.skip = re.compile(_OTHER.format(names="|".join(map(re.escape, names)))) if names else None

    def run(self) -> list[_SimpleCommand]:
        while self.i < self.n:
            c = self.s[self.i]
            if c == "\n":
                self.i += 1
                if self._top():
                    self._close()
                self._bodies()
            elif c in " \t\r":
                self.i += 1
            elif c == "\\" and self.s.startswith("\\\n", self.i):
                self.i += 2
            elif c == "#":
                end = self.s.find("\n", self.i)
                self.i = self.n if end < 0 else end
            elif c in "<>" or (c == "&" and self.s.startswith("&>", self.i)):
                self._redirect()
            elif c in ";&|" and self._top():
                self._close()
                doubled = self.s[self.i : self.i + 2] in ("&&", "||")
                self.joined = self.joined or (c != ";" and not doubled)
                self.i += 2 if doubled else 1
            elif c in ";&|":
                self.i += 1
            elif not self._skipped():
                simple = self._open()
                word, quoted = self._word()
                if not (word.isdigit() and not quoted and self.i < self.n and self.s[self.i] in "<>"):
                    simple.words.append((word, quoted))
                self.last = self.i
        self._close()
        return self.out

    def _top(self) -> bool:
        return self.depth == 0 and not self.ticked

    def _skipped(self) -> bool:
        """Pass over commands that are not to be returned, and return whether there were any."""
        if self.skip is None or self.simple is not None or self.pending or not self._top():
            return False
        other = self.skip.match(self.s, self.i)
        if other is None:
            return False
        self.first = self.i if self.first is None else self.first
        self.i, self.others = other.end(), True
        return True

    def _open(self) -> _SimpleCommand:
        if self.simple is None:
            self.first = self.i if self.first is None else self.first
            self.simple = _SimpleCommand(self.i)
            self.last = self.i
        return self.simple

    def _close(self) -> None:
        if self.simple is not None:
            self.simple.end = self.last
            words = self.simple.words
            if self.names is None or words and words[0][0] in self.names:
                self.out.append(self.simple)
            else:
                self.others = True
            self.simple = None

    def _word(self) -> tuple[str, bool]:
        """Return the word at `i` without quotes, and whether any of it was quoted; always advances `i`."""
        plain = _PLAIN_WORD.match(self.s, self.i)
        if plain and self.s[plain.end() : plain.end() + 1] in _AFTER_WORD:
            self.i = plain.end()
            return plain[0], False
        parts: list[str] = []
        quoted = False
        while self.i < self.n:
            plain = _PLAIN_WORD.match(self.s, self.i)
            if plain:
                parts.append(plain[0])
                self.i = plain.end()
                continue
            c = self.s[self.i]
            if c == "'":
                end = self.s.find("'", self.i + 1)
                end = self.n if end < 0 else end
                parts.append(self.s[self.i + 1 : end])
                self.i, quoted = end + 1, True
            elif c == '"':
                parts.append(self._double())
                quoted = True
            elif c == "\\":
                if self.s[self.i + 1 : self.i + 2] != "\n":
                    parts.append(self.s[self.i + 1 : self.i + 2])
                self.i += 2
            elif c in " \t\r\n<>;&|":
                break
            else:
                if c == "(":
                    self.depth += 1
                elif c == ")":
                    self.depth = max(0, self.depth - 1)
                elif c == "`":
                    self.ticked = not self.ticked
                parts.append(c)
                self.i += 1
        self.i = min(self.i, self.n)
        return "".join(parts), quoted

    def _double(self) -> str:
        parts: list[str] = []
        self.i += 1
        while self.i < self.n:
            plain = _PLAIN_QUOTED.match(self.s, self.i)
            if plain:
                parts.append(plain[0])
                self.i = plain.end()
                continue
            c = self.s[self.i]
            if c == '"':
                self.i += 1
                break
            if c == "\\" and self.s[self.i + 1 : self.i + 2] in ("\\", '"', "$", "`", "\n"):
                parts.append(self.s[self.i + 1].replace("\n", ""))
                self.i += 2
            else:
                parts.append(c)
                self.i += 1
        return "".join(parts)

    def _blank(self) -> None:
        while self.i < self.n and self.s[self.i] in " \t":
            self.i += 1

    def _redirect(self) -> None:
        simple = self._open()
        start = self.i
        while self.i < self.n and self.s[self.i] in "<>&|-":
            self.i += 1
        operator = self.s[start : self.i]
        self._blank()
        word, _ = self._word()
        self.last = self.i
        if operator in ("<<", "<<-"):
            self.pending.append((word, operator == "<<-", simple))
        elif operator == "<<<":
            simple.text = word
        else:
            simple.redirected = True

    def _bodies(self) -> None:
        """Read the heredocs that the last line opened; one without an end mark runs to the end of the text."""
        for mark, tabs, simple in self.pending:
            start = self.i
            lines: list[str] = []
            while self.i < self.n:
                end = self.s.find("\n", self.i)
                end = self.n if end < 0 else end
                line = self.s[self.i : end]
                self.i = min(end + 1, self.n)
                line = line.lstrip("\t") if tabs else line
                if line.rstrip() == mark:
                    break
                lines.append(line)
            simple.text = "\n".join(lines)
            simple.bodies.append((start, self.i))
        self.pending.clear()
