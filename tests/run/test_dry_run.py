"""A dry run lists the states that a run would start from, why and at what cost, and makes nothing."""

from __future__ import annotations

import re

import pytest

from etpi.commands import dry_run


@pytest.fixture
def listed(world, monkeypatch, capsys):
    """(experiments, rebuild) -> what a dry run prints."""
    monkeypatch.setenv("ETPI_DATA", str(world.lake.root))
    monkeypatch.setenv("ETPI_SPECS", str(world.specs_folder))

    def lines(*names: str, rebuild=(), data_only=False) -> str:
        assert dry_run(names, rebuild, data_only=data_only) == 0
        return capsys.readouterr().out

    return lines


def test_dry_run_of_an_empty_lake_lists_every_step_and_makes_nothing(world, listed):
    text = listed("first")
    assert text.startswith("first: 19 missing\n") and text.endswith("Nothing was run.\n")
    assert world.made == []
    assert all(f"  {asset}  " in text for asset, key in world.make_all() if key != "all")


def test_dry_run_names_the_changed_key_and_the_last_cost(world, listed):
    world.make_all()
    file = world.specs_folder / "rollout_sets" / "few.toml"
    file.write_text(file.read_text() + "k = 4\n")
    text = listed("first")
    assert re.search(r"raw_rollouts +few +STALE +its spec changed: k 1 → 4; took 0:00 last time", text)
    assert re.search(r"scored_rollouts +few +waiting", text)


def test_dry_run_says_what_is_kept_and_the_option_that_rebuilds_it(world, code, listed):
    world.make_all()
    world.made.clear()
    code["raw_rollouts kept"] = 2
    text = listed("first")
    assert re.search(r"raw_rollouts +few +OUTDATED +raw_rollouts kept 2: better; kept; --rebuild raw_rollouts", text)
    assert text.endswith("Nothing to do.\n")
    rebuilt = listed("first", rebuild=("raw_rollouts",))
    assert re.search(r"raw_rollouts +few +OUTDATED +raw_rollouts kept 2: better; took", rebuilt)
    assert re.search(r"scored_rollouts +few +waiting", rebuilt)
    assert re.search(r"sft_checkpoint +first +OUTDATED .*kept", rebuilt), "its data will be others for changed code"
    assert world.made == []


def test_dry_run_says_that_a_training_stays_although_its_data_will_be_made_again(world, code, listed):
    world.make_all()
    code["tito_pairs"] = 2
    text = listed("first")
    assert re.search(r"tito_pairs +first +OUTDATED +tito_pairs 2: better; took", text)
    assert re.search(r"upweighted_dataset +first +waiting", text)
    assert re.search(r"sft_checkpoint +first +OUTDATED +upweighted_dataset is computed again, .*; kept", text)
    assert re.search(r"serving_probe +first +OUTDATED .*kept", text)
    assert re.search(r"sft_checkpoint +first +waiting", listed("first", rebuild=("all",)))
    assert "sft_checkpoint" not in listed("first", data_only=True)
