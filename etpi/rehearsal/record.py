"""A rehearsal from its specs to its record, which stays in its folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from etpi.rehearsal import RATE
from etpi.rehearsal.costs import Cost, costs
from etpi.rehearsal.shrink import Machine, shrink
from etpi.rehearsal.stages import Stage, run
from etpi.rehearsal.starts import Start, starts
from etpi_assets.specs.load import Specs

NAME = "rehearsal.json"


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


def rehearse(name: str, specs: Specs, folder: Path, machine: Machine, rate: float = RATE) -> Record:
    """Rehearse an experiment in `folder`, and write the record there as JSON when it is finished.

    Args:
        rate: US dollars for an hour of a GPU.

    Raises:
        SpecError: a spec is unknown or invalid, or its architecture or family cannot be rehearsed.
        RehearsalFailed: the chain's process ended without a result.
    """
    start = time.monotonic()
    stages = run(shrink(name, specs, folder, machine))
    record = Record(
        name,
        round(time.monotonic() - start, 1),
        stages,
        starts(name, specs, stages, machine),
        costs(name, specs, rate),
    )
    partial = folder / f"{NAME}.new"
    partial.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
    os.replace(partial, folder / NAME)
    return record
