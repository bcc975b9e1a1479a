"""Writes the table of docs/verdicts.md: `python -m tests.attacks.write_page`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.attacks.attacks import attacks
from tests.attacks.targets import Targets

PAGE = Path(__file__).parents[2] / "docs" / "verdicts.md"
HEAD = "| family | attacks |\n|---|---|\n"


def table() -> str:
    """The number of attacks by family."""
    with TemporaryDirectory() as folder:
        counts = Counter(attack.family for attack in attacks(Targets(Path(folder))))
    return "".join(f"| {family} | {count} |\n" for family, count in sorted(counts.items()))


if __name__ == "__main__":
    head, _, _ = PAGE.read_text().partition(HEAD)
    PAGE.write_text(head + HEAD + table())
