"""A rehearsal from its specs to its record, which stays in its folder, and its text for a terminal."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from etpi.rehearsal import RATE
from etpi.rehearsal.costs import Cost, costs
from etpi.rehearsal.shrink import shrink
from etpi.rehearsal.stages import Stage, first_stop, run
from etpi.rehearsal.starts import Start, faults, starts
from etpi_assets.specs.load import Specs
from etpi_resources.lake.files import write_atomically
from etpi_resources.templates import templates

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


def text(record: Record, folder: Path) -> str:
    """Return the table of stages, the estimates of the real run, and what proves that it would start."""

    def wrapped(line: str, indent: int) -> str:
        before, after = " " * indent, " " * (indent + 2)
        return textwrap.fill(line, WIDTH, initial_indent=before, subsequent_indent=after, break_on_hyphens=False)

    environment = templates(Path(__file__).parent, wrapped=wrapped)
    return environment.get_template("record.txt.jinja").render(
        r=record,
        folder=folder,
        width=max(len(f"{stage.asset} of {stage.key}") for stage in record.stages),
        stop=first_stop(record.stages),
        faults=faults(record.starts),
        unproved=sum(line.state in ("not proved", "estimated") for line in record.starts),
    )
