"""Dagster jobs run in this process, one after the other.

Belongs here: starting a job by name and saying how it went. Does not belong here: which jobs are needed
(`specs.planner`), or several processes (`lanes`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import dagster as dg

from etpi_assets.definitions import build_defs
from etpi_assets.resources import Resources
from etpi_assets.specs.load import Specs
from etpi_assets.stopping import StopRequests
from etpi_resources.lake import Lake

_QUIET = {"loggers": {"console": {"config": {}}}}


class Runner:
    """Runs jobs against the persistent Dagster instance, so that the web page shows them."""

    def __init__(self, specs: Specs, specs_folder: Path | None = None) -> None:
        resources = Resources(lake=Lake.open(), specs_folder=specs_folder)
        self._defs = build_defs(specs, {"etpi": resources})
        self._instance = dg.DagsterInstance.get()

    def run(self, job: str, key: str | None, assets: Sequence[str] | None = None) -> bool:
        """Whether the run of the job, or of some of its assets, succeeded; the console logger has said why where not.

        Raises:
            KeyboardInterrupt: this process was asked to stop meanwhile.
        """
        start = time.monotonic()
        of = f" of {key}" if key else ""
        print(f"-- {job}{of}", file=sys.stderr)
        with StopRequests() as asked:
            result = self._defs.resolve_job_def(job).execute_in_process(
                instance=self._instance,
                partition_key=key,
                run_config=_QUIET,
                raise_on_error=False,
                asset_selection=None if assets is None else [dg.AssetKey(name) for name in assets],
            )
            stop = asked.any()
        print(
            f"-- {job}{of}: {'done' if result.success else 'FAILED'} in {time.monotonic() - start:.1f} s",
            file=sys.stderr,
        )
        if stop:
            raise KeyboardInterrupt  # Dagster took it for a failed run, if at all; no further job is wanted
        return result.success
