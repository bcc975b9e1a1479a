"""lab/docs/history.md: failures and repairs of the plan-first report that findings repeat on the embedded worlds.

python -m etpi_lab.analysis.history lab/docs/history.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from etpi_lab.analysis.findings import declared

_HEAD = """# The plan-first report in miniature

Failures and repairs of the published report ([history.md](../../docs/reference/history.md)) on the embedded worlds,
a finding each; [results.md](results.md) has their figures, [first_turns.md](first_turns.md) those of row 9.
Row 1 had two more faults, which cannot happen here: an adapter without effect (`differs_from_base`, and a test of every
server) and an empty think block in serving alone (`generation_prompt`, planted in a test of rehearsals).

Generated from the findings by `python -m etpi_lab.analysis.history lab/docs/history.md`; do not edit.

| published as | finding | failure | repair |
|---|---|---|---|
"""


def page() -> str:
    """Return the page: a row for each finding that repeats published iterations."""
    rows = (
        f"| {', '.join(finding.published)} | {finding.claim} | {finding.less} | {finding.more} |\n"
        for finding in declared()
        if finding.published
    )
    return f"{_HEAD}{''.join(rows)}".replace("<", "&lt;")  # so that markdown does not read tags as HTML


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
