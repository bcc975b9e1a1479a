"""Evaluation budgets: each is a condition with its own name, and editing one retrains nothing."""

from __future__ import annotations

import pytest

from etpi_assets.evaluation.rollouts import conditions
from etpi_assets.graph import GRAPH
from etpi_assets.specs.experiment import EvaluateSection
from etpi_assets.specs.load import load_specs
from tests.support.graph import EXPERIMENT, write_spec

SECTION = EvaluateSection.model_validate(
    {
        "suite": "coop_tiny_shared",
        "decodings": [{"name": "greedy"}, {"name": "t1", "temperature": 1.0}],
        "sample_seeds": [0, 1],
        "steering_probe": True,
        "agent": {"max_steps": 100, "max_model_len": 16384},
        "budgets": [{"name": "long", "max_steps": 200}, {"name": "wide", "max_model_len": 32768}],
    }
)


def test_trained_checkpoints_run_under_each_budget_and_the_base_under_its_own():
    result = {
        (c.decoding, c.sample_seed): (c.agent.max_steps, c.agent.max_model_len) for c in conditions(SECTION, "sft")
    }
    assert result == {
        (decoding + name, seed): budget
        for decoding, seed in (("greedy", 0), ("t1", 0), ("t1", 1))
        for name, budget in (("", (100, 16384)), ("@long", (200, 16384)), ("@wide", (100, 32768)))
    }
    assert {c.agent.temperature for c in conditions(SECTION, "sft") if c.decoding.startswith("t1@")} == {1.0}
    base = conditions(SECTION, "base")
    assert {c.decoding for c in base} == {"greedy", "t1", "greedy+steering", "t1+steering"}
    assert {c.decoding for c in base if c.agent.steering} == {"greedy+steering", "t1+steering"}


@pytest.mark.parametrize("change", ["max_steps = 150", "max_model_len = 4096"])
def test_editing_a_budget_makes_evaluation_stale_and_retrains_nothing(world, change):
    def budget(bound: str) -> None:
        text = EXPERIMENT.replace('"small"}', f'"small", budgets = [{{name = "other", {bound}}}]}}')
        write_spec(world.specs_folder, "experiments", "first", text)

    budget("max_steps = 100")
    world.make_all()
    budget(change)
    created = {name for name, _ in world.make_all()}
    assert {"eval_rollouts", "eval_metrics"} <= created
    assert not created & {name for name, node in GRAPH.items() if node.group in ("rollouts", "curation", "training")}
    assert "serving_probe" not in created


def test_shipped_evaluations_have_the_published_budgets():
    specs = load_specs()
    published = specs.experiments["tito_native_v4c"].evaluate
    assert published and [(b.max_steps, b.max_model_len) for b in published.budgets] == [(150, None), (200, 32768)]
    assert specs.experiments["tito_native_v4b"].evaluate.budgets == ()
