"""The terminal's output: progress, next steps, the states table."""

from __future__ import annotations

import io
import re

import pytest

from etpi.run.client import _Followed
from etpi.run.console_table import ending, failures_table, states_table
from etpi.run.live_lines import live_lines
from etpi_assets.orchestration.live_progress import _SentProgress, received_progress
from etpi_assets.planning.planner import Step
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


def test_display_gets_two_updates_a_second_and_log_a_line_after_ever_longer_pauses(monkeypatch):
    now, log, recorded = _clock(monkeypatch), io.StringIO(), _RecordingDisplay()
    with shown_on(recorded), Progress("a", "b", 2000) as counted:
        for _ in range(1800):
            now[0] += 0.1
            counted.advance()
    assert 300 <= len(recorded.shown) <= 370
    display = LogDisplay(log)
    for activity in recorded.shown:
        display.show(activity)
    lines = log.getvalue().splitlines()
    seconds = [int(line.split("b ")[1].split("/")[0]) / 10 for line in lines]
    assert seconds == pytest.approx([20, 41, 83, 167], abs=2), "each pause as long as the time before it"


def test_pauses_between_progress_lines_stay_below_ten_minutes():
    log = io.StringIO()
    display = LogDisplay(log)
    for second in range(0, 3600, 10):
        display.show(Activity("training", "step", second, 10000, second))
    shown = [int(line.split("step ")[1].split("/")[0]) for line in log.getvalue().splitlines()]
    assert shown[:6] == [20, 40, 80, 160, 320, 640] and shown[6:] == [1240, 1840, 2440, 3040]


def test_log_skips_short_stages_and_throttles_each_process_separately():
    log = io.StringIO()
    display = LogDisplay(log)
    for second in range(19):
        display.show(Activity("tasks", "validated", second, 20, second))
    assert log.getvalue() == ""
    for second in range(45):
        for source in "01":
            display.show(Activity(f"of {source}", "step", second, 100, second), source)
    assert [line.count("of 0") for line in log.getvalue().splitlines()] == [1, 0, 1, 0]


def test_live_lines_have_experiment_step_asset_share_and_time_left_in_columns():
    training = Activity("sft_checkpoint of mine", "seed 0, step", 62, 100, 104, "loss 0.14", "mine", 7, 15)
    shared = Activity("raw_rollouts of theirs", "rolled out", 5, 1000, 10, "", "another", 4, 15)
    started = Activity("tito_pairs of third", seconds=3, run="third", step=9, steps=15)
    lines = live_lines([training, shared, started], 120)
    cells = [re.split(r" {2,}", line) for line in lines]
    assert cells[0] == ["mine", "step 7/15", "sft_checkpoint", "62 %", "seed 0, step 62/100, loss 0.14", "1:04 left"]
    assert cells[1][:4] == ["another", "step 4/15", "raw_rollouts of theirs", "0 %"], "whose rollouts"
    assert cells[2] == ["third", "step 9/15", "tito_pairs", "0:03"]
    assert len({line.index("step ") for line in lines}) == 1
    narrow = live_lines([training, shared, started], 76)
    assert max(map(len, narrow)) <= 76 and "…" in narrow[0] and narrow[0].endswith("1:04 left")
    tiny = live_lines([training, shared, started], 60)
    assert max(map(len, tiny)) <= 60 and "62 %" in tiny[0] and "loss" not in tiny[0], "the detail goes first"


def test_position_in_the_chain_counts_what_need_not_run_and_only_grows():
    chain = [f"{asset} of {key}" for key in ("a", "b", "e") for asset in ("one", "two")]
    followed = _Followed("e", frozenset(chain), {"one of a", "two of a"})
    labels = ("one of b", "catalog", "two of e", "one of b", "one of e")
    placed = [followed.placed(Activity(label)) for label in labels]
    assert [(activity.step, activity.steps) for activity in placed] == [(3, 6), (0, 0), (4, 6), (4, 6), (5, 6)]
    assert {activity.run for activity in placed} == {"e"}


def test_progress_reaches_the_client_and_is_lost_without_one(tmp_path, monkeypatch):
    received, activity = [], Activity("raw_rollouts of few", "rolled out", 3, 24, 1.5, "note")
    path = tmp_path / "socket"
    sender = _SentProgress(str(path), "run")
    sender.show(activity)
    with received_progress(path, lambda *message: received.append(message)):
        sender.show(activity)
        sender.show(None)
    assert received == [("run", activity), ("run", None)]


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
    assert "etpi ui" in text and "etpi sql" in text and "plan_first_tiny_2.toml" in text
    monkeypatch.setenv("ETPI_VIEW_URL", "https://lab/view/")
    assert "https://lab/view/experiment/plan_first_tiny" in ending(lake, ["plan_first_tiny"])
    text = failures_table({"right": ["tasks of little: blocked"], "publish_catalog": ["catalog: disk full"]})
    assert "failed: right, publish_catalog" in text and "  right: tasks of little: blocked" in text
    assert "etpi status right" in text and "  publish_catalog: catalog: disk full" in text


def test_states_table_shows_what_is_not_ok():
    steps = [Step("tasks", "suite", "s", "ok"), Step("tito_pairs", "experiment", "e", "stale", "its code changed")]
    text = states_table("e", steps, everything=False)
    assert text.splitlines()[0] == "e: 1 ok, 1 STALE"
    assert "its code changed" in text and "tasks" not in text
    assert "tasks" in states_table("e", steps, everything=True)
