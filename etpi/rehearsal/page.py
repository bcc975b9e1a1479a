"""The rehearsal's result as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from etpi.rehearsal.record import Record
from etpi.rehearsal.stages import first_stop
from etpi.rehearsal.starts import faults

WIDTH = 118


def lines(record: Record, folder: Path) -> Iterator[str]:
    """Yield the table of stages, the estimates of the real run, and the proofs that it would start."""
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
    yield ""
    yield "Estimates for the real run (amounts are upper bounds, GPU times lower bounds for these amounts):"
    for cost in record.costs:
        yield from _wrapped(f"{cost.part}: {cost.value}", 2)
        yield from _wrapped(f"= {cost.formula}", 6)
    yield ""
    yield "Would the real run start? Each need, with its proof:"
    for line in record.starts:
        yield from _wrapped(f"{line.state:10}  {line.what}: {line.why}", 2)
    yield ""
    stopping = faults(record.starts)
    open_lines = sum(line.state in ("not proved", "estimated") for line in record.starts)
    if stop := first_stop(record.stages):
        yield f"The real run would stop at {stop.asset} of {stop.key}. Log: {folder / 'run.log'}"
    if stopping:
        yield f"{len(stopping)} of {len(record.starts)} lines would stop the real run: see FAULT."
    else:
        yield f"No fault in {len(record.starts)} lines; {open_lines} of them are estimated or not proved here."


def _wrapped(text: str, indent: int) -> Iterator[str]:
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2), break_on_hyphens=False
    )
