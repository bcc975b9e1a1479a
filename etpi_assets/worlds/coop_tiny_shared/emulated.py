"""Emulated workspaces of `coop_tiny_shared`, for scripted policies only, and its family without the judge."""

from __future__ import annotations

import re
from collections.abc import Mapping

from etpi_assets.tasks.family import Task, Verdict
from etpi_assets.worlds.coop_tiny.emulated import EmulatedSandbox
from etpi_assets.worlds.coop_tiny_shared import CoopTinyShared
from etpi_resources.sandboxes import SandboxFactory

_APPEND = re.compile(r"echo '([^']*)' >> (\w+\.py)|cat >> (\w+\.py) <<'EOF'\n(.*\n)EOF", re.DOTALL)


class SharedSandbox(EmulatedSandbox):
    """An emulated sandbox that also runs this world's commands, which append lines to a file."""

    def _answer(self, command: str) -> tuple[str, int]:
        if match := _APPEND.fullmatch(command):
            path, text = (match[2], f"{match[1]}\n") if match[2] else (match[3], match[4])
            self._files[path] = self._files.get(path, "") + text
            return "", 0
        return super()._answer(command)


class UnjudgedCoopTinyShared(CoopTinyShared):
    """The family without its judge, for conversations that need no reward."""

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        return Verdict(0.0, "unknown", {})
