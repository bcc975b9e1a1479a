"""`etpi lab results`, `sweeps` and `power`: shares, resumption, forecast, and pages of what the lake has."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from click.testing import CliRunner

from etpi import cli
from etpi_assets.specs.load import load_installed
from etpi_assets.specs.section import SpecError
from etpi_lab.analysis import findings
from etpi_lab.analysis import sweeps as declared_sweeps
from etpi_lab.repeat import forecast as forecasts
from etpi_lab.repeat import progress_page, results, running, sweeps
from etpi_lab.repeat.forecast import Forecast, State, duration, forecast
from etpi_lab.repeat.share import Share
from etpi_resources.lake.lake import Lake, Ref
from tests.support.findings import row
from tests.support.small_lake import put


@pytest.fixture
def lake(tmp_path, monkeypatch):
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("ETPI_SPECS", raising=False)
    monkeypatch.chdir(tmp_path)
    return Lake.open()


@pytest.fixture
def ran(monkeypatch, lake):
    """Runs record their experiments and publish metrics in place of running; `fails` names one that fails."""
    calls: list[list[str]] = []

    def run(names, specs, rebuild=(), finished=lambda name, failures: None):
        calls.append(list(names))
        for name in names:
            if name == run.stops_at:
                raise KeyboardInterrupt
            if name != run.fails:
                hits = run.hits.get(name, {None: 40, 0: 40, 1: 40})
                base = row(name, 0, 48, checkpoint_role="base")
                put(lake, "eval_metrics", name, {"metrics": [base, *(row(name, n, 48, s) for s, n in hits.items())]})
            finished(name, ["sft_checkpoint: it broke"] if name == run.fails else [])
        return int(run.fails in names)

    run.fails, run.stops_at, run.hits = "", "", {}
    monkeypatch.setattr(running, "run_experiments", run)
    return calls, run


def test_shares_are_disjoint_and_together_everything():
    names = [f"e{i}" for i in range(10)]
    shares = [Share.parse(f"{k}/3").take(names) for k in (1, 2, 3)]
    assert sorted(name for share in shares for name in share) == sorted(names)
    assert [len(share) for share in shares] == [4, 3, 3] and Share().take(names) == names
    for wrong in ("4/3", "0/3", "1", "a/b"):
        with pytest.raises(SpecError, match="2/3"):
            Share.parse(wrong)


def test_each_share_runs_its_experiments_and_the_page_lists_what_is_missing(lake, ran, tmp_path):
    calls, _ = ran
    names, page = ["plan_first_tiny", "plan_first_tiny_weak", "plan_first_tiny_x1"], tmp_path / "r.md"
    assert results.results(names, (0, 1), page, Share(1, 2)) == 0
    assert calls == [["plan_first_tiny_seeds", "plan_first_tiny_x1_seeds"]]
    assert "No metrics yet (1 of 3 experiments): plan_first_tiny_weak." in page.read_text()
    assert results.results(names, (0, 1), page, Share(2, 2)) == 0
    assert calls[1] == ["plan_first_tiny_weak_seeds"] and "No metrics yet" not in page.read_text()
    assert results.results(names, (0, 1), page, Share(), table_only=True) == 0 and len(calls) == 2, "runs nothing"
    spec = (lake.scratch("results_specs") / "experiments" / "plan_first_tiny_seeds.toml").read_text()
    assert spec == 'extends = "plan_first_tiny"\nseeds = [0, 1]\n'


def test_second_look_repeats_only_what_is_undecided_over_twice_the_seeds(lake, ran, tmp_path):
    calls, run = ran
    names, page = ["plan_first_tiny", "plan_first_tiny_weak"], tmp_path / "r.md"
    run.hits["plan_first_tiny_seeds"] = {None: 24, 0: 4, 1: 44}  # against its base, whose share is 0
    assert results.results(names, (0, 1), page, Share(), second_look=True) == 0
    assert calls[1:] == [["plan_first_tiny_more_seeds"]]
    spec = (lake.scratch("results_specs") / "experiments" / "plan_first_tiny_more_seeds.toml").read_text()
    assert spec == 'extends = "plan_first_tiny"\nseeds = [0, 1, 2, 3]\n'
    assert "2, second look" in page.read_text() and (lake.scratch("progress") / "second_look.html").exists()
    assert results.results(names, (0, 1), page, Share()) == 0 and "second look" in page.read_text(), "the lake has it"
    run.hits.clear()
    assert results.results(names, (0, 1), page, Share(), second_look=True) == 0
    assert len(calls) == 4 and "2, second look" not in page.read_text(), "now the first look decides"


def test_stopped_and_failed_runs_leave_a_page_and_a_progress_page(lake, ran, tmp_path):
    _, run = ran
    run.fails, run.stops_at = "plan_first_tiny_seeds", "plan_first_tiny_x1_seeds"
    names, page = ["plan_first_tiny", "plan_first_tiny_weak", "plan_first_tiny_x1"], tmp_path / "r.md"
    with pytest.raises(KeyboardInterrupt):
        results.results(names, (0, 1), page, Share())
    assert "(2 of 3 experiments): plan_first_tiny, plan_first_tiny_x1." in page.read_text()
    progress = (lake.scratch("progress") / "results.html").read_text()
    assert "failed: sft_checkpoint: it broke" in progress and 'http-equiv="refresh"' not in progress


def test_default_is_every_experiment_that_a_finding_compares(lake, ran, tmp_path):
    calls, _ = ran
    result = CliRunner().invoke(
        cli.etpi, ["lab", "results", "--seed", "4", "--share", "1/60", "--to", str(tmp_path / "r.md")]
    )
    assert result.exit_code == 0, result.output
    assert calls == [[f"{findings.experiments()[0]}_seeds"]]
    assert "etpi lab results --seed 4" in (tmp_path / "r.md").read_text()


def test_forecast_takes_recorded_seconds_of_the_same_asset_and_counts_shared_steps_once(lake, tmp_path, monkeypatch):
    specs, names = load_installed(), ["plan_first_apart", "plan_first_tiny_x1"]
    put(lake, "sft_checkpoint", "elsewhere", {})
    ref = Ref("sft_checkpoint", "experiment", "elsewhere")
    current = Lake.current
    monkeypatch.setattr(
        Lake, "current", lambda self, of: replace(m, seconds=100.0) if (m := current(self, of)) else None
    )
    assert lake.current(ref).seconds == 100.0
    states = forecast(names, specs, lake, 2, {}).states
    assert [state.left for state in states] == [100.0, 100.0] and not any(state.spent for state in states)
    assert states[0].guessed > states[1].guessed, "suite and rollout set are needed once"
    declared = forecast(names, specs, lake, 2, {"plan_first_apart": 4.0})
    assert [state.left for state in declared.states] == [240.0, 100.0] and declared.seconds_left == 170.0
    assert declared.line().startswith("0 of 2 experiments finished; about 3 min left on ")
    put(lake, "rl_checkpoint", "elsewhere", {})
    assert [state.left for state in forecast(names, specs, lake, 2, {}).states] == [100.0, 100.0], "reinforces nothing"
    put(lake, "sft_checkpoint", "plan_first_apart", {})
    assert forecast(names, specs, lake, 2, {"plan_first_tiny_x1": 9.0}).states[1].left == 100.0, "a record comes first"


def test_progress_page_reloads_while_it_runs_and_names_the_machine(tmp_path):
    states = (
        State("done", 0, "", 120.0, 0.0, 0),
        State("<open>", 3, "", 0.0, 600.0, 0),
        State("b", 1, "a check", 0, 0, 1),
    )
    state, page = Forecast(states, 2), tmp_path / "p.html"
    progress_page.write(page, "Sweeps", state, {}, running=True, mine=["done"], body="<figure>plot</figure>")
    text = page.read_text()
    assert 'http-equiv="refresh"' in text and "1 of 3 experiments finished; about 5 min left" in text
    assert "&lt;open&gt;" in text and "3 steps open, in another share" in text and "failed: a check" in text
    assert "<figure>plot</figure>" in text and forecasts.cpu() in text and not list(tmp_path.glob(".*"))


def test_durations_are_short():
    assert [duration(s) for s in (45, 600, 7200)] == ["45 s", "10 min", "2.0 h"]


def test_sweeps_write_specs_plots_and_a_page_that_says_a_trial_is_one(lake, ran, tmp_path):
    calls, _ = ran
    to = tmp_path / "out"
    result = CliRunner().invoke(
        cli.etpi, ["lab", "sweeps", "filter_strength", "--seed", "7", "--share", "1/6", "--to", str(to)]
    )
    assert result.exit_code == 0, result.output
    assert len(calls[0]) == 2 and all(name.endswith("_swept") for name in calls[0])
    spec = (lake.scratch("sweep_specs") / "experiments" / f"{calls[0][0]}.toml").read_text()
    assert "seeds = [7]" in spec
    text = (to / "filter_strength.md").read_text()
    assert text.startswith("# Filters on the teacher's rollouts") and "not run" in text
    assert "![Filters on the teacher's rollouts" in text
    assert "A trial on seeds 7" in text and "etpi lab sweeps filter_strength --seed 7" in text
    assert (to / "filter_strength.svg").read_text().startswith("<svg")
    assert "n = 3 seeds a side" in text, "the declaration stands, whatever the trial has"


def test_page_of_a_sweep_of_ones_own_names_its_file(lake, ran, tmp_path):
    mine = tmp_path / "mine.toml"
    shutil.copy(declared_sweeps.declared()["filter_strength"], mine)
    result = CliRunner().invoke(cli.etpi, ["lab", "sweeps", str(mine), "--table", "--to", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert f"Generated from the lake by `etpi lab sweeps {mine}`" in (tmp_path / "mine.md").read_text()


def test_plan_runs_nothing_and_unknown_sweeps_are_named(lake, ran):
    calls, _ = ran
    result = CliRunner().invoke(cli.etpi, ["lab", "sweeps", "--plan"])
    assert result.exit_code == 0 and result.output.count("power calculation: to show") == 4 and not calls
    with pytest.raises(SpecError, match="'token_ids'"):
        sweeps.chosen(["tokens_ids"])


def test_power_prints_the_seeds_that_show_a_difference():
    result = CliRunner().invoke(
        cli.etpi, ["lab", "power", "--difference", "0.25", "--seed-sd", "0.06", "--tasks", "96"]
    )
    line = result.output.splitlines()[-3].split()
    assert line[:2] == ["96", "3"] and float(line[2]) >= 0.8, result.output
    assert (
        "more than 400" in CliRunner().invoke(cli.etpi, ["lab", "power", "--difference", "0.1", "--tasks", "24"]).output
    )
