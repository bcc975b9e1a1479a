"""The table that a run ends with: figures, changes, and what it says of a drop."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from etpi import commands
from etpi.run.metrics_table import METRICS, metrics_table
from etpi_assets.evaluation.metrics import measure
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.schemas import from_rows

FIGURE = r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]"
SIGNED = r"[+-]\d\.\d\d \[[+-]\d\.\d\d, [+-]\d\.\d\d\]"
TASKS = 24


def _evaluated(
    folder, rewards: dict[str, float], experiment: str = "e", stale: bool = False, judge: str | None = None
) -> Lake:
    """A lake with an evaluation over 24 tasks; `rewards`: role -> share of tasks solved, every turn parsed."""
    lake, rollouts, scores, agents = Lake(folder), [], [], []
    for role, share in rewards.items():
        for i in range(TASKS):
            rollout = {"rollout_id": f"{role}{i}"}
            task = rollout | {"task_id": f"t{i}"}
            rollouts.append(task | {"origin": "eval", "checkpoint_role": role, "seed": 0, "decoding": "greedy"})
            scores.append(task | {"reward": float(i < share * TASKS), "infrastructure_error": False, "judge": judge})
            of_agent = {"agent_id": "a", "exit_status": "Submitted", "parse_rate": 0.5 if role == "rl" else 1.0}
            agents.append(rollout | of_agent | {"turns": 4})
    tables = {"scores": from_rows("scores", scores), "agent_scores": from_rows("agent_scores", agents)}
    evaluation = from_rows("rollouts", rollouts)
    empty = {name: from_rows(name, []) for name in ("agents", "turns", "messages")}
    made = lake.publish(
        Ref("eval_rollouts", "experiment", experiment),
        {"rollouts": evaluation, **empty},
        input_key="k",
        inputs={},
        spec_hash="s",
    )
    teacher = {"experiment": experiment, "checkpoint_role": "teacher", "decoding": "recorded", "metric": "solved"}
    teacher |= {"value": 0.25, "n": 1000, "unit": "pair", "ci_low": 0.2, "ci_high": 0.3}
    measured = measure(evaluation, *tables.values(), experiment=experiment).to_pylist()
    lake.publish(
        Ref("eval_metrics", "experiment", experiment),
        {"metrics": from_rows("metrics", [teacher, *measured]), **tables, "turn_scores": from_rows("turn_scores", [])},
        input_key="k",
        inputs={f"eval_rollouts/{experiment}": "older" if stale else made.version},
        spec_hash="s",
    )
    return lake


def _line(text: str, begins: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(begins)]
    return line


def test_table_has_teacher_base_student_and_signed_change_within_100_columns(tmp_path):
    text = metrics_table(_evaluated(tmp_path, {"base": 0.5, "sft": 1.0}), ["e", "other"])
    lines = text.splitlines()
    assert lines[0].split() == ["n", "teacher", "base", "sft", "change"] and lines[1] == "e"
    assert re.fullmatch(rf"  solved +greedy  24  0\.25 +{FIGURE}  {FIGURE}  {SIGNED}", _line(text, "  solved"))
    assert "+0.50" in _line(text, "  solved") and "  no metric fell" in lines
    assert "other: no metrics" in lines and max(map(len, lines)) <= 100
    assert "t1" not in text and "plan_first" not in text, "only what was measured"


@pytest.mark.parametrize(("judge", "warned"), [("judge 2, judge.r2e 3", False), ("judge 2, judge.r2e 4", True)])
def test_rewards_of_several_judges_are_not_compared_without_a_word(tmp_path, judge, warned):
    _evaluated(tmp_path, {"base": 0.5}, judge="judge 2, judge.r2e 3")
    text = metrics_table(_evaluated(tmp_path, {"base": 0.5}, "other", judge=judge), ["e", "other"])
    assert ("  e: judge 2, judge.r2e 3" in text, f"  other: {judge}" in text) == (warned, warned)


@pytest.mark.parametrize(("share", "says"), [(0.0, "never solved"), (1.0, "always solved"), (0.5, "")])
def test_tasks_that_teach_reinforcement_nothing_are_named(tmp_path, share, says):
    text = metrics_table(_evaluated(tmp_path, {"base": share}), ["e"])
    assert ("finds no advantage" in text) is bool(says) and says in text


@pytest.mark.parametrize(("later", "says"), [(0.125, "FELL"), (23 / 24, "lower, but not certain at this n")])
def test_drop_is_said_in_words_with_a_link_to_the_lost_tasks(tmp_path, later, says):
    text = metrics_table(_evaluated(tmp_path, {"base": 1.0, "sft": later}), ["e"])
    assert _line(text, f"  {says}").split(": ")[1] == f"solved greedy 1.00 → {later:.2f}"
    assert "http://localhost:3001/regressions/e" in text and "no metric fell" not in text


def test_change_is_that_of_the_last_stage_and_a_narrow_table_drops_intervals_but_not_its(tmp_path):
    lake = _evaluated(tmp_path, {"base": 0.25, "sft": 0.5, "rl": 0.75})
    text = metrics_table(lake, ["e"])
    assert text.splitlines()[0].split() == ["n", "teacher", "base", "sft", "rl", "change"]
    change = re.search(rf"{SIGNED}$", _line(text, "  solved"))
    assert change and change[0].startswith("+0.50"), "from base to rl"
    assert max(map(len, text.splitlines())) <= 100
    narrow = metrics_table(lake, ["e"], 76)
    assert re.search(r"0\.25 +0\.50  0\.75  \+0\.50 \[", _line(narrow, "  solved"))
    assert max(map(len, narrow.splitlines())) <= 76
    assert "parse_rate greedy 1.00 → 0.50" in _line(text, "  FELL")


def test_change_is_left_out_if_other_rollouts_were_measured(tmp_path):
    text = metrics_table(_evaluated(tmp_path, {"base": 1.0, "sft": 0.0}, stale=True), ["e"])
    assert text.splitlines()[0].split() == ["n", "teacher", "base", "sft"] and "FELL" not in text


def test_teacher_alone_has_its_interval(tmp_path):
    rows = [
        {"experiment": "e", "checkpoint_role": "teacher", "decoding": "recorded", "seed": seed, "metric": metric}
        | {"value": 0.5 if seed is None else 0.9, "n": 1000, "unit": "pair", "ci_low": 0.4, "ci_high": 0.6}
        for metric in METRICS
        for seed in (None, 0)
    ]
    lake = Lake(tmp_path)
    ref = Ref("eval_metrics", "experiment", "e")
    lake.publish(ref, {"metrics": from_rows("metrics", rows)}, input_key="k", inputs={}, spec_hash="s")
    text = metrics_table(lake, ["e"])
    assert [line.split()[0] for line in text.splitlines()[2:5]] == list(METRICS)[:3]
    assert re.fullmatch(r"  plan_first +1000  0\.50 \[0\.40, 0\.60\]", _line(text, "  plan_first")), "pooled over seeds"


def test_metrics_that_the_spec_puts_first_lead_the_table(tmp_path):
    first = ["think_tokens_per_turn", "adherence", "post_think_tokens_per_turn", "solved"]
    rows = [
        {"experiment": "e", "checkpoint_role": role, "decoding": "greedy", "metric": metric, "unit": "turn"}
        | {"value": 12.0, "n": 90, "ci_low": 11.0, "ci_high": 13.0}
        for role in ("base", "sft")
        for metric in (*first, *METRICS)
    ]
    lake, ref = Lake(tmp_path), Ref("eval_metrics", "experiment", "e")
    of_spec = {"spec_hash": "s", "spec": {"metrics": {"headline": first}}}
    lake.publish(ref, {"metrics": from_rows("metrics", rows)}, input_key="k", inputs={}, **of_spec)
    lines = metrics_table(lake, ["e"]).splitlines()
    assert [line.split()[0] for line in lines[2:6]] == first and len(lines) == 6
    assert not any(word in "".join(lines) for word in ("FELL", "lower")), "a mean is neither better nor worse"


def test_table_imports_neither_pandas_nor_dagster(tmp_path):
    """They cost a run that has nothing to do half a second and two."""
    _evaluated(tmp_path, {"base": 0.5, "sft": 1.0})
    code = (
        "import sys; from pathlib import Path; from etpi.run.metrics_table import metrics_table; "
        "from etpi_resources.lake.lake import Lake; assert 'solved' in metrics_table(Lake(Path(sys.argv[1])), ['e']); "
        "print([name for name in ('pandas', 'dagster', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("code", "ended", "data_only", "shown"), [
    (1, {"first": ["a step failed"], "second": []}, False, ["second"]),
    (1, {}, False, []),
    (0, {"first": [], "second": []}, True, []),
    (0, {}, False, ["first", "second"]),
])  # fmt: skip
def test_run_ends_with_the_metrics_of_experiments_that_succeeded(
    world, monkeypatch, capsys, code, ended, data_only, shown
):
    for name in ("first", "second"):
        _evaluated(world.lake.root, {"base": 0.5, "sft": 1.0}, name)
    monkeypatch.setenv("ETPI_DATA", str(world.lake.root))
    monkeypatch.setenv("ETPI_SPECS", str(world.specs_folder))

    def run(names, specs, rebuild, finished, data_only):
        assert specs is loaded[-1], "they are read once"
        for name, failures in ended.items():
            finished(name, failures)
        return code

    loaded, load_specs = [], commands.load_specs
    monkeypatch.setattr(commands, "load_specs", lambda *folder: loaded.append(load_specs(*folder)) or loaded[-1])
    monkeypatch.setattr(commands, "run_experiments", run)
    assert commands.compare(("first", "second"), data_only=data_only, as_json=True) == code
    printed = json.loads(capsys.readouterr().out)
    assert [name for name, metrics in printed["metrics"].items() if metrics] == shown
    assert printed["failures"] == {name: failures for name, failures in ended.items() if failures}
    assert commands.compare(("first", "second"), data_only=data_only) == code
    text = capsys.readouterr().out
    assert [name for name in ("first", "second") if f"\n{name}\n" in text] == shown
