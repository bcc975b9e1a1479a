"""An emulated sandbox for scripted policies: their few commands on a dictionary of files, without processes.

Its output equals that of a real sandbox byte for byte, which a test checks. An unknown command is an error. Never use
it for commands of a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Self

from etpi_assets.tasks.family import Task, Verdict
from etpi_lab.worlds.coop_tiny import CoopTiny
from etpi_lab.worlds.coop_tiny.formulas import parse_formula
from etpi_lab.worlds.coop_tiny.repositories import read_check
from etpi_resources.sandboxes import CommandResult, Environment, Limits, SandboxFactory

_SED = re.compile(r"sed -i '(?:/def (\w+)/,/return/)?s/return \.\*/(return [\w +*%(),-]+)/' (\S+)")
_CHECK = re.compile(r"python3 (\S+\.py) (\w+)")
_ECHO = re.compile(r"echo ([\w ]+)")


class UnknownCommand(ValueError):
    """A command that the emulation does not support."""


class EmulatedSandbox:
    """One emulated workspace."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = dict(files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Release nothing."""

    def write_files(self, files: Mapping[str, str]) -> None:
        self._files.update(files)

    def read_files(self) -> dict[str, str]:
        return dict(self._files)

    def run(self, command: str, *, timeout: float | None = None) -> CommandResult:
        """Return the command's result. Raises UnknownCommand for a command that no scripted policy uses."""
        output, code = self._answer(command)
        return CommandResult(output, code, 0.0)

    def _answer(self, command: str) -> tuple[str, int]:
        if command == "ls":
            return "".join(f"{name}\n" for name in sorted({path.split("/")[0] for path in self._files})), 0
        if command.startswith("cat ") and command[4:] in self._files:
            return self._files[command[4:]], 0
        if match := _ECHO.fullmatch(command):
            return f"{match[1]}\n", 0
        if (match := _SED.fullmatch(command)) and match[3] in self._files:
            self._substitute(match[1], match[2], match[3])
            return "", 0
        if (match := _CHECK.fullmatch(command)) and match[1] in self._files:
            return self._check(match[1], match[2])
        raise UnknownCommand(
            f"the emulated sandbox does not know {command!r} here (files: {sorted(self._files)}); "
            "only scripted policies of coop_tiny may use it, everything else runs in a real sandbox"
        )

    def _substitute(self, function: str | None, replacement: str, path: str) -> None:
        """Replace the `return` of one function, or of all functions of the module."""
        if function is None:
            pattern, text = r"return .*", replacement
        else:
            pattern, text = rf"(def {function}.*\n(?:(?!.*return).*\n)*.*?)return .*", rf"\g<1>{replacement}"
        self._files[path] = re.sub(pattern, text, self._files[path])

    def _check(self, check: str, function: str) -> tuple[str, int]:
        cases = read_check(self._files[check])
        if function not in cases:
            raise UnknownCommand(f"{check} has no case of {function}; it has {sorted(cases)}")
        path, value, want = cases[function]
        code = re.search(rf"^def {function}\(x\):\n    return (.*)$", self._files[path], re.MULTILINE)
        if code is None:
            raise UnknownCommand(f"{path} has no one-line function {function} to check")
        got = parse_formula(code[1])(value)
        return ("ok\n", 0) if got == want else (f"wrong: {function}({value}) is {got}, not {want}\n", 1)


class EmulatedFactory:
    """Creates emulated sandboxes of a world's class, for scripted policies only."""

    name = "emulated"

    def __init__(self, kind: type[EmulatedSandbox] = EmulatedSandbox) -> None:
        self._kind = kind

    def create(
        self,
        files: Mapping[str, str],
        limits: Limits = Limits(),  # noqa: B008
        environment: Environment | None = None,
    ) -> EmulatedSandbox:
        return self._kind(files)


class UnjudgedCoopTiny(CoopTiny):
    """The family without its judge, for conversations that need no reward."""

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        return Verdict(0.0, "unknown", {})
