"""A rehearsal from its specs to its record, which stays in its folder, and its text for a terminal."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from etpi.rehearsal import RATE
from etpi.rehearsal.costs import Cost, costs
from etpi.rehearsal.shrink import shrink
from etpi.rehearsal.stages import Stage, first_stop, run
from etpi.rehearsal.starts import Start, faults, starts
from etpi_assets.specs.load import Specs
from etpi_resources.lake.files import write_atomically

NAME, WIDTH = "rehearsal.json", 118


@dataclass(frozen=True)
class Record:
    """The outcome of a rehearsal, and the estimates for the real run.

    Attributes:
        seconds: wall time of the rehearsal.
    """

    experiment: str
    seconds: float
    stages: Sequence[Stage]
    starts: Sequence[Start]
    costs: Sequence[Cost]


def rehearse(name: str, specs: Specs, folder: Path, rate: float = RATE) -> Record:
    """Rehearse an experiment in `folder`, and write the record there as JSON when it is finished.

    Args:
        rate: US dollars for an hour of a GPU.

    Raises:
        SpecError: a spec is unknown or invalid, or its architecture or family cannot be rehearsed.
        LakeError: the chain's process ended without a result.
    """
    start = time.monotonic()
    small = shrink(name, specs, folder)
    stages = run(small)
    record = Record(
        name,
        round(time.monotonic() - start, 1),
        stages,
        starts(name, specs, stages, small.needs),
        costs(name, specs, rate),
    )
    write_atomically(folder / NAME, json.dumps(asdict(record), indent=1))
    return record


def lines(record: Record, folder: Path) -> Iterator[str]:
    """Yield the table of stages, the estimates of the real run, and what proves that it would start."""
    yield f"Rehearsal of {record.experiment}: {record.seconds:.0f} s, in {folder}"
    yield ""
    width = max(len(f"{stage.asset} of {stage.key}") for stage in record.stages)
    for stage in record.stages:
        yield f"  {f'{stage.asset} of {stage.key}':{width}}  {stage.verdict:14} {stage.seconds:6.1f} s"
        for finding in stage.blocks:
            label = f"{finding.check}: " if finding.check else ""
            yield from _wrapped(f"{label}{finding.message}", 6)
        if stage.accepted:
            yield from _wrapped(f"fails, and the spec accepts it: {', '.join(stage.accepted)}", 6)
    yield ""
    yield "What the real run will take (amounts at most; GPU times at least, for those amounts):"
    for cost in record.costs:
        yield from _wrapped(f"{cost.part}: {cost.value}", 2)
        yield from _wrapped(f"= {cost.formula}", 6)
    yield ""
    yield "Would the real run start? Line by line, with what proves it:"
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
