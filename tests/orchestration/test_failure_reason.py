"""The reason of a failed step, in one line."""

from __future__ import annotations

import dagster as dg

from etpi_assets.orchestration.jobs import failure_reason


def test_reason_of_an_unexpected_error_is_its_own_message() -> None:
    @dg.op
    def train():
        raise ValueError("the loss is not finite")

    @dg.job
    def job():
        train()

    done = job.execute_in_process(raise_on_error=False)
    (event,) = [event for event in done.all_events if event.is_step_failure]
    assert failure_reason(event) == "train: ValueError: the loss is not finite"
