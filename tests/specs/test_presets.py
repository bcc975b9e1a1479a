"""Presets: what lies beneath a spec, and what its own values replace."""

from __future__ import annotations

import tomllib
from typing import get_args

import pytest

from etpi_assets.graph import GRAPH
from etpi_assets.specs.experiment import ExperimentSpec, Preset, preset_file, preset_names, preset_values
from etpi_assets.specs.load import load_shipped, load_specs
from etpi_assets.specs.section import PARSED_AGAIN
from tests.support.graph import EXPERIMENT, small_world, write_spec


@pytest.fixture
def folder(tmp_path):
    return small_world(tmp_path)


def _entry(folder, text, name="mine"):
    write_spec(folder, "experiments", name, text)
    return load_specs(folder).entry("experiment", name)


def _spec(folder, text, name="mine") -> ExperimentSpec:
    entry = _entry(folder, text, name)
    assert isinstance(entry.spec, ExperimentSpec), entry.error
    return entry.spec


def _keys(values, path=""):
    """Yield (dotted path, value) of every key; free tables, which empty ones stand for, are values."""
    for key, value in values.items():
        if isinstance(value, dict) and key not in ("teacher", "thresholds", "options"):
            yield from _keys(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


@pytest.mark.parametrize("name", get_args(Preset))
def test_preset_gives_each_of_its_values(folder, name):
    spec = _spec(folder, EXPERIMENT + f'preset = "{name}"\nrl = {{suite = "small"}}\n')
    assert spec.preset == name
    for key, value in _keys(preset_values(name)):
        at = spec.model_dump(mode="json", context=PARSED_AGAIN)
        for part in key.split("."):
            at = at[part]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            assert [term["function"] for term in at] == [term["function"] for term in value]
        elif key != "evaluate.suite":  # the spec names its own
            assert at == (None if value == "none" else value), key


def test_preset_names_are_the_file_names():
    assert set(get_args(Preset)) == set(preset_names())


def test_spec_and_what_it_extends_replace_keys_of_the_preset(folder):
    parent = EXPERIMENT + 'preset = "plan_first"\n[gates]\nrole_balance = 0.1\nformat_exposure = 7\n'
    _spec(folder, parent, "parent")
    spec = _spec(folder, 'extends = "parent"\n[gates]\nformat_exposure = 9\n')
    gates = spec.gates
    assert (spec.preset, gates.plan_paths_in_task, gates.role_balance, gates.format_exposure) == (
        "plan_first", 0.8, 0.1, 9,
    )  # fmt: skip
    other = _spec(folder, 'extends = "parent"\npreset = "structured_cot"\n')
    assert (other.train.lora_rank, other.gates.role_balance, other.gates.teacher) == (128, 0.1, {})
    bare = _spec(folder, 'extends = "parent"\npreset = "none"\n')
    assert (bare.preset, bare.gates.format_exposure) == (None, 7)


def test_empty_table_empties_free_keys_and_no_section(folder):
    spec = _spec(folder, EXPERIMENT + 'preset = "plan_first"\n[gates]\nteacher = {}\n[metrics]\n')
    assert spec.gates.teacher == {} and spec.gates.role_balance == 0.25
    assert set(spec.metrics.thresholds) == {"plan_first", "plan_content", "follow_through"}


@pytest.mark.parametrize("name", ["plan_frist", "zzz", 5])
def test_unknown_preset_names_the_file_and_the_presets(folder, name):
    value = name if isinstance(name, int) else f'"{name}"'
    message = str(_entry(folder, EXPERIMENT + f"preset = {value}\n").error)
    assert "experiments/mine.toml: preset:" in message and "structured_cot" in message
    assert ("Did you mean 'plan_first'" in message) == (name == "plan_frist")


def test_suites_and_rollout_sets_have_no_preset(folder):
    write_spec(folder, "suites", "other", 'preset = "plan_first"\ntitle = "s"\nfamily = "coop_tiny_shared"\n')
    assert "preset: unknown key" in str(load_specs(folder).entry("suite", "other").error)


def test_the_same_values_with_and_without_a_preset_have_the_same_hashes(folder):
    text = EXPERIMENT + '[select]\nexit = "any"\nmin_reward = 1.0\nrequire = []\nshortest_correct = true\n'
    assert tomllib.loads(text)["select"] == preset_values("rejection_sampling")["select"]
    _spec(folder, text, "spelt_out")
    _spec(folder, EXPERIMENT + 'preset = "rejection_sampling"\n', "by_name")
    specs = load_specs(folder)
    for node in (n for n in GRAPH.values() if n.set == "experiment"):
        hashes = {specs.section_hash("experiment", name, node.sections) for name in ("spelt_out", "by_name")}
        assert len(hashes) == 1, node.name


def test_the_published_runs_at_full_size_name_their_preset():
    specs = load_shipped().experiments
    names = {"etpi_phase1": "structured_cot", "grpo_tcr_4b": "tool_rl", "terminal_grpo_0_8b": "terminal_rl"}
    assert {name: specs[name].preset for name in names} == names
    assert all(preset_file(name).is_file() for name in names.values())


@pytest.mark.parametrize(
    ("twin", "preset"),
    [
        *(("etpi_phase1_tiny", "structured_cot"), ("etpi_phase2_tiny", "structured_cot"), ("grpo_tcr_tiny", "tool_rl")),
        *(("terminal_grpo_tiny", "terminal_rl"), ("terminal_grpo_smol", "terminal_rl")),
    ],
)
def test_small_experiment_has_the_headline_of_its_full_size(twin, preset):
    assert list(load_shipped().experiments[twin].metrics.headline) == preset_values(preset)["metrics"]["headline"]
