"""What a terminal shows: progress, the table of figures, the state of a chain."""

from __future__ import annotations

import io

from etpi_assets.console_table import ending, metrics_table, states_table
from etpi_assets.reports.results import render
from etpi_assets.specs.load import load_specs
from etpi_assets.specs.planner import Step
from etpi_resources import progress
from etpi_resources.lake import Lake, Ref
from etpi_resources.progress import Progress
from etpi_resources.schemas import from_rows


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_progress_says_stage_share_rate_and_time_left(monkeypatch):
    now = _clock(monkeypatch)
    shown = Progress("raw_rollouts of few", "rolled out", 100, io.StringIO())
    now[0] += 20
    shown.advance(40)
    assert shown.line() == "raw_rollouts of few: rolled out 40/100 (40%), 2.0/s, 0:20 so far, 0:30 left"
    slow = Progress("x", "y", 10, io.StringIO())
    now[0] += 60
    slow.advance(2)
    assert "30.0 s each, 1:00 so far, 4:00 left" in slow.line()


def test_progress_is_throttled_and_always_ends_with_its_last_line(monkeypatch):
    now = _clock(monkeypatch)
    log, terminal = io.StringIO(), _Terminal()
    with Progress("a", "b", 1000, log) as in_log, Progress("a", "b", 1000, terminal) as on_terminal:
        for _ in range(600):
            now[0] += 0.1
            in_log.advance()
            on_terminal.advance()
    assert 4 <= len(log.getvalue().splitlines()) <= 6, "a line every 15 s"
    assert 100 <= terminal.getvalue().count("\r") <= 130, "twice a second, in place"
    assert "600/1000" in log.getvalue().splitlines()[-1] and terminal.getvalue().endswith("\n")


def test_progress_of_an_instant_says_nothing(monkeypatch):
    _clock(monkeypatch)
    log = io.StringIO()
    with Progress("a", "b", 3, log) as shown:
        shown.advance(3)
    assert log.getvalue() == ""


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


def test_metrics_table_has_teacher_beside_student_with_n_and_interval(tmp_path):
    lines = metrics_table(_lake(tmp_path), ["plan_first_tiny", "other"]).splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["plan_first_tiny", "teacher", "recorded"],
        ["plan_first_tiny", "sft", "t1"],
    ]
    assert "0.75 [0.65, 0.85] n=24" in lines[2], "pooled over seeds"
    assert lines[3].split("  ")[0] == "other" and "no metrics yet" in lines[3]
    assert "make ui" in ending(_lake(tmp_path), ["plan_first_tiny"])


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
