"""The terminal's output: progress, the metrics table, the states table."""

from __future__ import annotations

import io

from etpi_assets.planner import Step
from etpi_assets.reports.results import render
from etpi_assets.runs.console_table import ending, failures_table, metrics_table, states_table
from etpi_assets.specs.load import load_specs
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.schemas import from_rows
from etpi_resources.process import progress
from etpi_resources.process.progress import Activity, LogDisplay, Progress, shown_on


def _clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


class _RecordingDisplay:
    """A display that records its calls."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.shown: list[Activity | None] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def show(self, activity: Activity | None, source: str = "") -> None:
        self.shown.append(activity)


def test_progress_shows_stage_share_rate_and_time_left(monkeypatch):
    now = _clock(monkeypatch)
    counted = Progress("raw_rollouts of few", "rolled out", 100)
    now[0] += 20
    counted.advance(40)
    assert counted.line() == "raw_rollouts of few: rolled out 40/100 (40%), 2.0/s, 0:20 so far, 0:30 left"
    slow = Progress("x", "y", 10)
    now[0] += 60
    slow.advance(2, note="loss 0.5")
    assert "30.0 s each, 1:00 so far, 4:00 left (loss 0.5)" in slow.line()


def test_display_gets_two_updates_a_second_and_log_a_line_every_20_s(monkeypatch):
    now, log, recorded = _clock(monkeypatch), io.StringIO(), _RecordingDisplay()
    with shown_on(recorded), Progress("a", "b", 1000) as counted:
        for _ in range(620):
            now[0] += 0.1
            counted.advance()
    assert 100 <= len(recorded.shown) <= 130
    display = LogDisplay(log)
    for activity in recorded.shown:
        display.show(activity)
    assert len(log.getvalue().splitlines()) == 3, "after 5, 25 and 45 s"
    assert "0:05 so far" in log.getvalue().splitlines()[0]


def test_log_skips_short_stages_and_throttles_each_process_separately():
    log = io.StringIO()
    display = LogDisplay(log)
    for second in range(4):
        display.show(Activity("tasks", "validated", second, 10, second))
    assert log.getvalue() == ""
    for second in range(30):
        for source in "01":
            display.show(Activity(f"of {source}", "step", second, 100, second), source)
    assert [line.count("of 0") for line in log.getvalue().splitlines()] == [1, 0, 1, 0]


def _lake(folder) -> Lake:
    lake = Lake(folder)
    rows = [
        {"checkpoint_role": role, "decoding": decoding, "seed": seed, "metric": "plan_first", "value": value}
        | {"n": 24, "unit": "pair", "ci_low": value - 0.1, "ci_high": value + 0.1, "experiment": "plan_first_tiny"}
        for role, decoding, seed, value in [
            ("sft", "t1", None, 0.75),
            ("sft", "t1", 0, 0.5),
            ("sft", "t1", 1, 1.0),
            ("teacher", "recorded", None, 0.25),
        ]
    ]
    ref = Ref("eval_metrics", "experiment", "plan_first_tiny")
    lake.publish(ref, {"metrics": from_rows("metrics", rows)}, input_key="k", inputs={}, spec_hash="s")
    return lake


def test_metrics_table_has_teacher_above_student_with_n_and_interval_and_explains_itself(tmp_path):
    text = metrics_table(_lake(tmp_path), ["plan_first_tiny", "other"])
    lines = text.splitlines()
    assert lines[0].split() == ["plan_first"] and lines[1] == "plan_first_tiny"
    assert lines[2].split()[0] == "teacher" and lines[3].split()[:2] == ["sft", "t1"]
    assert "0.75 [0.65, 0.85] n=24" in lines[3], "pooled over seeds"
    assert "other: no metrics yet" in lines
    for word in ("teacher: ", "sft: ", "t1: ", "95 % interval", "plan_first: "):
        assert word in text[text.index("other: ") :]
    assert "base: " not in text and "greedy: " not in text, "only what the table has"


def test_metrics_that_do_not_fit_are_named_below(tmp_path):
    metrics = ("plan_first", "follow_through", "solved", "plan_content", "parse_rate")
    rows = [
        {"checkpoint_role": "sft", "decoding": "t1", "seed": None, "metric": metric, "value": 0.5, "n": 10083}
        | {"unit": "pair", "ci_low": 0.4, "ci_high": 0.6, "experiment": "e"}
        for metric in metrics
    ]
    lake = Lake(tmp_path)
    ref = Ref("eval_metrics", "experiment", "e")
    lake.publish(ref, {"metrics": from_rows("metrics", rows)}, input_key="k", inputs={}, spec_hash="s")
    narrow = metrics_table(lake, ["e"])
    assert narrow.splitlines()[0].split() == list(metrics[:3])
    assert max(map(len, narrow.splitlines())) <= 100
    assert narrow.endswith("in the reports: plan_content, parse_rate")
    assert metrics_table(lake, ["e"], 200).splitlines()[0].split() == list(metrics)


def test_a_run_ends_with_three_next_steps_or_the_reasons_of_its_failures(tmp_path):
    assert [line[2] for line in ending(_lake(tmp_path), ["plan_first_tiny"]).splitlines() if line[2].isdigit()] == [
        "1", "2", "3",
    ]  # fmt: skip
    text = failures_table({"right": ["tasks of little: blocked"], "publish_catalog": ["catalog: disk full"]})
    assert "failed: right, publish_catalog" in text and "  right: tasks of little: blocked" in text
    assert "etpi status right" in text and "  publish_catalog: catalog: disk full" in text


def test_results_page_lists_each_seed(tmp_path):
    page = render(_lake(tmp_path), load_specs(), {"first": "plan_first_tiny", "unfinished": "plan_first_tiny_weak"})
    assert "0.75 [0.65, 0.85], n 24; by seed 0.50, 1.00" in page
    assert "## unfinished" in page and "No metrics" in page


def test_states_table_shows_what_is_not_ok():
    steps = [Step("tasks", "suite", "s", "ok"), Step("tito_pairs", "experiment", "e", "stale", "its code changed")]
    text = states_table("e", steps, everything=False)
    assert text.splitlines()[0] == "e: 1 ok, 1 STALE"
    assert "its code changed" in text and "tasks" not in text
    assert "tasks" in states_table("e", steps, everything=True)
