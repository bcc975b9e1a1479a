"""Tasks that ask for the lines of a file in order: one function judges them, and their rows are in data/lines.jsonl."""

from __future__ import annotations

from collections.abc import Mapping

from etpi_assets.tasks.family import Task
from etpi_assets.tasks.judged_rows import JudgedRows
from etpi_resources.sandboxes import SandboxFactory


def sorted_lines(task: Task, files: Mapping[str, str], sandboxes: SandboxFactory) -> float:
    """Return 1 if output.txt holds the lines of input.txt in order, else 0."""
    lines = sorted(task.payload["files"]["input.txt"].splitlines())
    return float(files.get("output.txt", "").splitlines() == lines)


FAMILY = JudgedRows("sorted_lines", sorted_lines)
