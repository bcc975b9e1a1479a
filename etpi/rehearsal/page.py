"""The rehearsal's result as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from etpi.rehearsal.record import Record
from etpi.rehearsal.stages import first_stop

WIDTH = 118


def lines(record: Record, folder: Path) -> Iterator[str]:
    """Yield the table of stages, and the needs and estimates of the real run."""
    yield f"Rehearsal of {record.experiment}: {record.seconds:.0f} s, in {folder}"
    yield ""
    width = max(len(f"{stage.asset} of {stage.key}") for stage in record.stages)
    for stage in record.stages:
        yield f"  {f'{stage.asset} of {stage.key}':{width}}  {stage.verdict:14} {stage.seconds:6.1f} s"
        for finding in stage.blocks:
            label = f"{finding.check}: " if finding.check else ""
            yield from _wrapped(f"{label}{finding.message}", 6)
        if stage.unjudged:
            yield from _wrapped(f"cannot be judged at this size: {', '.join(stage.unjudged)}", 6)
        if stage.accepted:
            yield from _wrapped(f"fails, and the spec accepts it: {', '.join(stage.accepted)}", 6)
        for need in stage.needs:
            yield from _wrapped(f"needs: {need}", 6)
    yield ""
    yield "What the real run will take (upper bounds where behaviour decides):"
    for cost in record.costs:
        yield from _wrapped(f"{cost.part}: {cost.value}", 2)
        yield from _wrapped(f"= {cost.formula}", 6)
    yield ""
    if stop := first_stop(record.stages):
        yield f"The real run would stop at {stop.asset} of {stop.key}."
        yield f"Log: {folder / 'run.log'}"
    else:
        yield "Nothing that a CPU can find would stop the real run."


def _wrapped(text: str, indent: int) -> Iterator[str]:
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2), break_on_hyphens=False
    )
