"""A reinforcement whose measured baseline is 0 or 1 is not started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from etpi.run.preflight import require_variance
from etpi_assets.planning.planner import Step
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.training import RLSection


def world(solved: float, *, trains: str = "none", split: str = "train", **keys: Any) -> tuple[Any, Any]:
    rl = RLSection.model_validate({"method": "grpo", "suite": "s", "rewards": [{"function": "outcome"}], **keys})
    reinforced = SimpleNamespace(rl=rl, train=SimpleNamespace(method=trains), base="b", evaluate=None)
    evaluate = SimpleNamespace(suite="s", split=split)
    baseline = SimpleNamespace(rl=RLSection(), base="b", evaluate=evaluate)
    rows = [
        {"metric": "solved", "checkpoint_role": "base", "decoding": "t1", "value": solved},
        {"metric": "solved", "checkpoint_role": "base", "decoding": "greedy", "value": 0.0},
        {"metric": "parse_rate", "checkpoint_role": "base", "decoding": "t1", "value": 1.0},
    ]
    lake = SimpleNamespace(current=lambda ref: ref.key == "first_baseline", read=lambda *a: pa.Table.from_pylist(rows))
    return SimpleNamespace(experiments={"first": reinforced, "first_baseline": baseline}), lake


STEP = Step("rl_checkpoint", "experiment", "first", "missing", "never computed")


@pytest.mark.parametrize("solved", [0.0, 1.0])
def test_baseline_without_variance_stops_before_anything_runs(solved, monkeypatch):
    with pytest.raises(SpecError, match="first_baseline"):
        require_variance([STEP], *world(solved))
    monkeypatch.setenv("ETPI_KEEP_GOING", "1")
    require_variance([STEP], *world(solved))


@pytest.mark.parametrize(
    "other",
    [
        {"solved": 0.2},
        {"rewards": [{"function": "format"}]},
        {"trains": "lora"},
        {"split": "heldout"},
        {"method": "opd", "teacher": "checkpoint:t", "rewards": []},
        {"method": "opd", "teacher": "checkpoint:t"},
    ],
    ids=str,
)
def test_other_baselines_and_rewards_start(other):
    require_variance([STEP], *world(**{"solved": 0.0, **other}))
