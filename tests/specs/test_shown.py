"""Which specs the web page shows."""

from __future__ import annotations

import pytest

from etpi_assets.specs.load import load_specs
from etpi_assets.specs.section import SpecError
from etpi_assets.specs.shown import DEMO_EXPERIMENTS, shown_specs
from tests.support.graph import write_spec


def _nothing(_):
    return ()


def test_demo_shows_its_experiments_and_what_they_use(monkeypatch):
    monkeypatch.setenv("ETPI_SHIPPED", "demo")
    shown = shown_specs(load_specs(), _nothing)
    assert shown.keys("experiment") == sorted(DEMO_EXPERIMENTS)
    assert shown.keys("rollout_set") == ["coop_tiny_shared_strong", "coop_tiny_shared_weak"]
    assert shown.keys("suite") == ["coop_tiny_shared"]


def test_users_specs_invalid_ones_and_partitions_with_data_are_shown(monkeypatch, tmp_path):
    monkeypatch.setenv("ETPI_SHIPPED", "demo")
    write_spec(tmp_path, "experiments", "mine", 'title = "m"\nextends = "terminal_grpo_tiny"\n')
    write_spec(tmp_path, "experiments", "broken", "sead = 1")
    with_data = {"rollout_set": ["repo_fix_tiny_base"], "experiment": [], "suite": []}
    shown = shown_specs(load_specs(tmp_path), with_data.__getitem__)
    assert {"mine", "broken"} <= set(shown.keys("experiment"))
    assert {"terminal_tiny_teacher", "repo_fix_tiny_base"} <= set(shown.keys("rollout_set"))
    assert {"terminal_tiny", "repo_fix_tiny"} <= set(shown.keys("suite"))
    assert "terminal_grpo_tiny" not in shown.keys("experiment")


@pytest.mark.parametrize("value", ["all", ""])
def test_all_are_shown_where_all_or_nothing_is_asked_for(monkeypatch, value):
    monkeypatch.setenv("ETPI_SHIPPED", value)
    specs = load_specs()
    assert shown_specs(specs, _nothing) is specs


def test_another_value_names_the_two(monkeypatch):
    monkeypatch.setenv("ETPI_SHIPPED", "none")
    with pytest.raises(SpecError, match="ETPI_SHIPPED=.none"):
        shown_specs(load_specs(), _nothing)
