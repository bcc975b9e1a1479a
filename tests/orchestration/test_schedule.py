"""The schedule of $ETPI_SCHEDULE."""

from __future__ import annotations

from datetime import UTC, datetime

import dagster as dg
import pytest

from etpi_assets.definitions import build_defs
from etpi_assets.orchestration.jobs import schedules
from etpi_assets.specs.load import load_shipped
from etpi_assets.specs.section import SpecError


@pytest.fixture
def scheduled(monkeypatch):
    def build(cron, names):
        monkeypatch.setenv("ETPI_SCHEDULE", cron)
        monkeypatch.setenv("ETPI_SCHEDULE_EXPERIMENTS", names)
        return schedules(load_shipped())

    return build


def test_schedule_brings_each_named_experiment_and_is_off_at_first(scheduled):
    scheduled("0 3 * * 1", "plan_first_tiny, plan_first_tiny_weak")
    repository = build_defs(load_shipped()).get_repository_def()
    (schedule,) = repository.schedule_defs
    assert (schedule.cron_schedule, schedule.job_name) == ("0 3 * * 1", "run_experiment")
    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED
    monday = datetime(2026, 11, 23, 3, tzinfo=UTC)
    data = schedule.evaluate_tick(dg.build_schedule_context(scheduled_execution_time=monday, repository_def=repository))
    assert [request.partition_key for request in data.run_requests or []] == ["plan_first_tiny", "plan_first_tiny_weak"]
    assert len({request.run_key for request in data.run_requests or []}) == 2


def test_no_schedule_without_the_variable(monkeypatch):
    monkeypatch.delenv("ETPI_SCHEDULE", raising=False)
    assert schedules(load_shipped()) == []


@pytest.mark.parametrize(
    ("cron", "names", "said"),
    [
        ("0 3 * * 1", "", "ETPI_SCHEDULE_EXPERIMENTS=NAME"),
        ("0 3 * * 1", "plan_frist_tiny", "Did you mean 'plan_first_tiny'"),
        ("every monday", "plan_first_tiny", "not a cron expression"),
    ],
)
def test_wrong_settings_say_what_to_write(scheduled, cron, names, said):
    with pytest.raises(SpecError, match=said):
        scheduled(cron, names)
