"""The specs of `etpi init` say what its options ask for, and can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etpi.cli import main
from etpi.init.experiment import NewExperiment
from etpi.init.student import read_student
from etpi.init.write import write_specs
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import load_specs


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """(options of an experiment) -> the specs by name, as they are read from an empty folder."""
    monkeypatch.chdir(tmp_path)

    def write(**options: object) -> dict[str, ExperimentSpec]:
        new = NewExperiment("own", read_student("tiny"), native=True, min_reward="min_reward = 1.0", **options)  # type: ignore[arg-type]
        specs = [new.spec(), *([new.baseline()] if new.rl_sandbox else [])]
        write_specs([spec.__class__(spec.set, spec.name, spec.text.replace('["own"]', "[]")) for spec in specs])
        return load_specs().experiments

    return write


def test_training_is_switched_on(written) -> None:
    spec = written(trains=True)["own"]
    assert spec.train.method == "full" and spec.evaluate is None and spec.rl.method == "none"


def test_reinforcement_has_suite_reward_evaluation_and_a_baseline_that_trains_nothing(written) -> None:
    specs = written(suite="repo_fix_tiny", rl_sandbox="bubblewrap")
    own, baseline = specs["own"], specs["own_baseline"]
    assert (own.rl.method, own.rl.suite, [term.function for term in own.rl.rewards]) == (
        "grpo", "repo_fix_tiny", ["outcome"],
    )  # fmt: skip
    assert own.evaluate and own.evaluate.suite == own.rl.suite and own.rl.sandbox == own.serving.sandbox
    assert own.evaluate.roles == ("base", "rl"), "the held-out result is the reinforced student's"
    assert (baseline.rl.method, baseline.train.method) == ("none", "none") and baseline.evaluate
    assert (baseline.evaluate.suite, baseline.evaluate.agent) == (own.rl.suite, own.evaluate.agent)
    assert baseline.evaluate.split == "train" and len(baseline.evaluate.sample_seeds) == 4, "the tasks of own.rl"


@pytest.mark.parametrize("harness", ["mini-swe-agent", "qwen-code"])
def test_reinforcement_in_a_harness_trains_all_its_calls_and_evaluates_in_it(written, harness: str) -> None:
    spec = written(suite="repo_fix_tiny", rl_sandbox="bubblewrap", harness=harness)["own"]
    acting, evaluated = spec.rl.agent.harness, spec.evaluate.harness
    assert acting and evaluated and acting.name == evaluated.name == harness
    assert acting.helpers == "all" and (acting.max_calls, acting.folder) == (evaluated.max_calls, evaluated.folder)
    assert len(spec.rl.rewards) == 2, "no attempt of the tiny base is right, so another reward has to vary"
    assert spec.rl.max_prompt_tokens + spec.rl.max_response_tokens == spec.evaluate.agent.max_model_len


def test_editors_find_the_schema(written, tmp_path: Path) -> None:
    written()
    file = tmp_path / "specs" / "experiments" / "own.toml"
    line = file.read_text(encoding="utf-8").splitlines()[0]
    assert line.startswith("#:schema ")
    assert "title" in json.loads((file.parent / line.removeprefix("#:schema ")).read_text())["properties"]


def test_options_of_another_start_are_refused(capsys) -> None:
    assert main(["init", "--tasks", "x", "--train"]) == 2 and main(["init", "--from", "x", "--rl"]) == 2
    error = capsys.readouterr().err
    assert "'--train'" in error and "'--rl'" in error
