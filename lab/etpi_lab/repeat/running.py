"""Run a share of a list of experiments; after each, print how far the list is and rewrite its pages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etpi.commands import run_experiments
from etpi.run.console import say
from etpi_assets.specs.load import load_specs
from etpi_lab.repeat import progress_page
from etpi_lab.repeat.forecast import Forecast, cpu, duration, forecast
from etpi_lab.repeat.share import Share
from etpi_resources.lake.lake import Lake


@dataclass
class Campaign:
    """A list of experiments to bring up to date, in calls that may each run a share.

    Attributes:
        title: of the progress page.
        names: every experiment of the list, in order.
        folder: the folder of their specs.
        share: what this call runs.
        page: the progress page.
        pages: writes all other pages from what the lake has; returns HTML for the progress page.
        minutes: experiment -> declared minutes, for the forecast before anything is recorded.
        failures: experiment -> lines of failed steps, of this call.
        last_line: the last line of progress that was printed.
    """

    title: str
    names: Sequence[str]
    folder: Path
    share: Share
    page: Path
    pages: Callable[[Forecast], str]
    minutes: Mapping[str, float] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)
    last_line: str = ""

    def run(self, *, table_only: bool = False) -> int:
        """Run this call's share unless `table_only`, and write the pages in any case; return the exit code.

        Finished experiments are skipped. A call that is stopped leaves the pages of what is finished.
        """
        mine = self.share.take(self.names)
        if table_only or not mine:
            self.write(running=False)
            return 0
        print(f"progress: {self.page.resolve().as_uri()}", file=sys.stderr)
        try:
            self.write(running=True)
            return run_experiments(mine, load_specs(self.folder), finished=self._finished)
        finally:
            self.write(running=False)

    def write(self, *, running: bool) -> None:
        """Write all pages from what the lake has, and print a line of progress."""
        state = self.forecast()
        body = self.pages(state)
        mine = self.share.take(self.names)
        progress_page.write(self.page, self.title, state, self.failures, running=running, mine=mine, body=body)
        if (line := state.line()) != self.last_line:
            say(f"== {self.title}: {line}")
            self.last_line = line

    def forecast(self) -> Forecast:
        """Return how far the whole list is."""
        from etpi_assets.resources import side_by_side

        workers = min(len(self.names), side_by_side())
        return forecast(self.names, load_specs(self.folder), Lake.open(), workers, self.minutes)

    def _finished(self, name: str, failures: list[str]) -> None:
        if failures:
            self.failures[name] = failures
        try:
            self.write(running=True)
        except Exception as error:  # the last write raises it; a page must not end the other experiments' runs
            say(f"WARNING: the pages of {self.title} were not written: {type(error).__name__}: {error}")


def cost_sentence(state: Forecast) -> str:
    """Return what the finished experiments of a list took, and on which machine; "" if none has finished."""
    if not (steps := steps_sentence(state)):
        return ""
    return f"{steps}; this page was written on {cpu()}, which runs {state.workers} experiments at once."


def steps_sentence(state: Forecast) -> str:
    """Return what the finished experiments of a list took, without a full stop; "" if none has finished."""
    if not (done := state.finished):
        return ""
    took = duration(state.spent)
    return (
        f"The steps of {len(done)} of {len(state.states)} experiments took {took} in all, suites and rollout sets apart"
    )
