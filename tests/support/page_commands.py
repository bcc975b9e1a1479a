"""The commands of a page of docs/, for tests that type them: fenced blocks whose language is followed by a machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```sh (\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """What a reader types on a machine, in one shell."""

    machine: str
    commands: str


def blocks(page: Path) -> list[Block]:
    """Return the blocks marked "```sh MACHINE", in the order of the page."""
    return [Block(machine, commands) for machine, commands in _BLOCK.findall(page.read_text(encoding="utf-8"))]
