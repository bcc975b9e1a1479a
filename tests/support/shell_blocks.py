"""Run the shell blocks of a docs page as a user would, in a folder, with this checkout's `etpi` on the path."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def shell_blocks(page: str, word: str = "") -> list[str]:
    """Return the blocks of commands of a page that have `word`."""
    return [block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if word in block]


def run_blocks(blocks: Iterable[str], folder: Path, **variables: str) -> None:
    """Run blocks in a folder. Raises CalledProcessError if one of their commands fails."""
    program = folder.parent / "bin" / "etpi"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m etpi "$@"\n')
    program.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("ETPI_DATA", "DAGSTER_HOME")}
    environment |= {"PATH": f"{program.parent}:{os.environ['PATH']}", **variables}
    for block in blocks:
        subprocess.run(["bash", "-euo", "pipefail", "-c", block], check=True, cwd=folder, env=environment)
