"""Run the chain of one experiment, export its data, and write its failures as JSON.

`python -m etpi.rehearsal.chain NAME FILE EXPORTS` is a separate process, because the lake, the specs and Dagster's home
are in its environment.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from etpi.dagster_home import prepare_dagster_home
from etpi_assets.exports import export
from etpi_assets.planning.planner import CONSENTS
from etpi_assets.resources import Resources
from etpi_assets.specs.load import SpecError, load_specs
from etpi_resources.lake.lake import LakeError

FORMATS = ("hub", "atif")
"""Formats that every experiment can be exported in: training rows as messages and as ids, and rollouts."""


def main(name: str, target: Path, exports: Path) -> None:
    """Bring the experiment up to date; write {"failures": a line for each failed step, "exports": format -> error}."""
    prepare_dagster_home()
    from etpi.run.client import Client

    with Client(load_specs(), consent=CONSENTS) as client:
        failures = [line for lines in client.run_experiments([name]).values() for line in lines]
    errors = {} if failures else {form: _exported(name, form, exports / form) for form in FORMATS}
    target.write_text(json.dumps({"failures": failures, "exports": errors}), encoding="utf-8")


def _exported(name: str, form: str, folder: Path) -> str:
    """Export the experiment; return the error, or ""."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        export(name, form, folder, Resources())
    except (SpecError, LakeError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
