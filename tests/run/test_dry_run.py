"""A dry run lists the states that a run would start from, why and at what cost, and makes nothing."""

from __future__ import annotations

import re

import pytest

from etpi.commands import dry_run


@pytest.fixture
def listed(world, monkeypatch, capsys):
    """(experiments, consent) -> what a dry run prints."""
    monkeypatch.setenv("ETPI_DATA", str(world.lake.root))
    monkeypatch.setenv("ETPI_SPECS", str(world.specs_folder))

    def lines(*names: str, consent=(), data_only=False) -> str:
        assert dry_run(names, consent, data_only=data_only) == 0
        return capsys.readouterr().out

    return lines


def test_dry_run_of_an_empty_lake_lists_every_step_and_makes_nothing(world, listed):
    text = listed("first")
    assert text.startswith("first: 18 missing\n") and text.endswith("Nothing was run.\n")
    assert world.made == []
    assert all(f"  {asset}  " in text for asset, key in world.make_all() if key != "all")


def test_dry_run_names_the_changed_key_and_the_last_cost(world, listed):
    world.make_all()
    file = world.specs_folder / "rollout_sets" / "few.toml"
    file.write_text(file.read_text() + "k = 4\n")
    text = listed("first")
    assert re.search(r"raw_rollouts +few +STALE +its spec changed: k 1 → 4; took 0:00 last time", text)
    assert re.search(r"scored_rollouts +few +waiting", text)


def test_dry_run_of_changed_code_reports_that_the_run_would_stop(world, code, listed):
    world.make_all()
    world.made.clear()
    code["raw_rollouts"] = code["raw_rollouts kept"] = "2"
    text = listed("first")
    assert "would stop" in text and "--recollect" in text
    assert "would stop" not in listed("first", consent=("recollect", "rebuild"))
    assert world.made == []


def test_run_of_the_data_alone_is_not_refused_for_changed_training_code(world, code, listed):
    world.make_all()
    code["sft_checkpoint"] = code["sft_checkpoint kept"] = "2"
    assert "would stop" in listed("first")
    text = listed("first", data_only=True)
    assert "would stop" not in text and "upweighted_dataset" in text and "sft_checkpoint" not in text
