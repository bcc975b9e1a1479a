"""The terminal's output: progress, next steps, the states table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from etpi.run import console
from etpi.run.console_table import ending, failures_table, states_table
from etpi_assets.planning.planner import Step
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.schemas import from_rows
from etpi_resources.process import progress
from etpi_resources.process.progress import Progress


def _clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_line_is_written_whole_so_that_two_threads_do_not_share_one(monkeypatch):
    written = []
    monkeypatch.setattr(console.sys, "stderr", SimpleNamespace(write=written.append))
    console.say("one")
    assert [text[9:] for text in written] == ["one\n"]


def test_progress_shows_stage_share_rate_and_time_left(monkeypatch):
    now = _clock(monkeypatch)
    counted = Progress("raw_rollouts of few", "rolled out", 100, print)
    counted.advance(0)  # as a worker reports that it starts, and a collection that none is there yet
    now[0] += 60  # the first units wait for workers to start
    counted.advance(4)
    assert counted.line() == "raw_rollouts of few: rolled out 4/100 (4%), 1:00 so far"
    now[0] += 18
    counted.advance(36)
    assert counted.line() == "raw_rollouts of few: rolled out 40/100 (40%), 2.0/s, 1:18 so far, 0:30 left"
    slow = Progress("x", "y", 10, print)
    slow.advance(1)
    now[0] += 60
    slow.advance(2)
    assert "30.0 s each, 1:00 so far, 3:30 left (loss 0.5)" in slow.line("loss 0.5")


@pytest.mark.parametrize(
    ("step", "seconds"),
    [(0.1, [3, 6, 12, 25, 50, 99, 199]), (10, [10, 20, 40, 80, 160, 320, 640, 1240, 1840, 2440, 3040])],
)
def test_log_gets_a_line_after_ever_longer_pauses_of_at_most_ten_minutes(monkeypatch, step, seconds):
    now, lines = _clock(monkeypatch), list[str]()
    counted = Progress("training", "step", 10_000, lines.append)
    for _ in range(int((max(seconds) + 3) / step)):
        now[0] += step
        counted.advance()
    shown = [int(line.split("step ")[1].split("/")[0]) * step for line in lines]
    assert shown == pytest.approx(seconds, abs=2)


def test_short_stages_and_their_ends_are_not_logged(monkeypatch):
    now, lines = _clock(monkeypatch), list[str]()
    counted = Progress("tasks", "validated", 20, lines.append)
    for _ in range(20):
        now[0] += 1.5 if counted.done == 19 else 0.1
        counted.advance()
    assert lines == []


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


def test_a_run_ends_with_links_or_the_reasons_of_its_failures(tmp_path, monkeypatch):
    lake = _lake(tmp_path)
    assert "report    none yet" in ending(lake, ["plan_first_tiny"])
    row = {"kind": "html", "path": "reports/plan_first_tiny/report.html", "experiment": "plan_first_tiny"}
    ref = Ref("experiment_report", "experiment", "plan_first_tiny")
    lake.publish(ref, {"reports": from_rows("reports", [row])}, input_key="k", inputs={}, spec_hash="s")
    text = ending(lake, ["plan_first_tiny", "other"])
    assert f"{tmp_path}/reports/plan_first_tiny/report.html" in text
    assert "http://localhost:3001/experiment/plan_first_tiny" in text and "experiment/other" not in text
    assert "etpi ui" in text and "etpi sql" in text and "etpi export plan_first_tiny --format" in text
    monkeypatch.setenv("ETPI_VIEW_URL", "https://lab/view/")
    assert "https://lab/view/experiment/plan_first_tiny" in ending(lake, ["plan_first_tiny"])
    assert "etpi status" not in failures_table({"catalog": ["catalog: disk full"]})
    text = failures_table({"right": ["tasks of little: blocked"], "publish_catalog": ["catalog: disk full"]})
    assert "failed: right, publish_catalog" in text and "  right: tasks of little: blocked" in text
    assert "etpi status right" in text and "  publish_catalog: catalog: disk full" in text


def test_states_table_shows_what_is_not_ok():
    steps = [Step("tasks", "suite", "s", "ok"), Step("tito_pairs", "experiment", "e", "stale", "its code changed")]
    text = states_table("e", steps, everything=False)
    assert text.splitlines()[0] == "e: 1 ok, 1 STALE"
    assert "its code changed" in text and "tasks" not in text
    assert "tasks" in states_table("e", steps, everything=True)


def test_error_of_a_spec_is_shown_once_for_all_its_assets():
    steps = [Step(asset, "experiment", "e", "invalid", "e.toml: no key") for asset in ("experiment_spec", "tito_pairs")]
    text = states_table("e", steps, everything=True)
    assert text.count("no key") == 1 and text.count("INVALID") == 3
