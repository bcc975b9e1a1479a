"""Prompts of a user's own: their folder, their place in the resolved spec, and the faults that stop before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from etpi_assets.agent.prompts import render_prompts, steering_text
from etpi_assets.specs.load import SpecError, load_specs
from etpi_assets.specs.prompts import shipped_prompts, shipped_templates, with_own_prompts
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Role, Task

TASK = Task.hashed("t1", "suite", "own/repo", "train", "Add $dollars.", {})
ROLE = Role("agent1", "1", "Add $dollars.", "agent2")
SETS = 'extends = "coop_tiny_strong"\ntitle = "own"\n[agent]\nprompt = "{}"\nsteering = false\n'


def specs_of(folder: Path, prompt: str = "mine", **files: str):
    (folder / "rollout_sets").mkdir(exist_ok=True)
    (folder / "rollout_sets" / "own.toml").write_text(SETS.format(prompt))
    for name, text in files.items():
        path = folder / "prompts" / "mine" / name.replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return load_specs(folder)


def test_own_prompt_is_rendered_and_part_of_the_resolved_spec(tmp_path):
    spec = specs_of(tmp_path, user_md="$repo for $agent_id: $instruction\n", system_md="Costs $$5.\n")
    agent = spec.get("rollout_set", "own").agent
    assert [m["content"] for m in render_prompts(agent, TASK, ROLE)] == [
        "Costs $5.",
        "own/repo for agent1: Add $dollars.",
    ]
    before = spec.section_hash("rollout_set", "own", ["agent"])
    changed = specs_of(tmp_path, user_md="$instruction\n", system_md="Costs $$5.\n")
    assert changed.section_hash("rollout_set", "own", ["agent"]) != before
    assert changed.sections("rollout_set", "own", ["agent"])["agent"]["templates"]["user"] == "$instruction"


def test_prompt_without_a_system_message_may_have_steering(tmp_path):
    agent = (
        specs_of(tmp_path, user_md="$instruction", steering_md="Plan with $partner.").get("rollout_set", "own").agent
    )
    assert [m["role"] for m in render_prompts(agent, TASK, ROLE)] == ["user"]
    steered = render_prompts(agent.model_copy(update={"steering": True}), TASK, ROLE)
    assert (steered[0]["content"], steering_text(agent, ROLE).strip()) == ("Plan with agent2.", "Plan with agent2.")


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"user_md": "$instruction $task"}, "$task"),
        ({"user_md": "costs $5"}, "$$"),
        ({"system_md": "$instruction", "user_md": "$instruction"}, "system: $instruction"),
        ({"system_md": "only this"}, "user"),
        ({"user_md": "x", "User_md": "y"}, "User.md"),
        ({"user_md": "x", "notes_txt": "y"}, "notes.txt"),
        ({}, "mine"),
    ],
)
def test_fault_of_a_prompt_is_an_error_of_the_spec(tmp_path, files, named):
    with pytest.raises(SpecError) as error:
        specs_of(tmp_path, **files).get("rollout_set", "own")
    assert named in str(error.value) and "own.toml" in str(error.value) or ".md" in str(error.value)


@pytest.mark.parametrize("name", ["cop", "../mine", "/etc", "", "mine/sub"])
def test_name_of_no_prompt_is_an_error_of_the_spec(tmp_path, name):
    with pytest.raises(SpecError, match=r"agent\.prompt"):
        specs_of(tmp_path, name, user_md="x").get("rollout_set", "own")


def test_own_prompt_does_not_replace_a_shipped_one(tmp_path):
    (tmp_path / "prompts" / "coop").mkdir(parents=True)
    (tmp_path / "prompts" / "coop" / "user.md").write_text("x")
    with pytest.raises(SpecError, match="'coop'.*prompts/coop;"):
        specs_of(tmp_path, "coop").get("rollout_set", "own")


@pytest.mark.parametrize("name", sorted(shipped_prompts()))
def test_shipped_prompts_can_be_filled(name):
    agent = AgentSection(prompt=name, templates=dict(shipped_templates(name)))
    assert render_prompts(agent, TASK, ROLE) == render_prompts(AgentSection(prompt=name), TASK, ROLE)


def test_steering_needs_a_part_of_that_name(tmp_path):
    for prompt in ("mine", "terminal"):
        specs_of(tmp_path, prompt, user_md="x")
        file = tmp_path / "rollout_sets" / "own.toml"
        file.write_text(file.read_text().replace("false", "true"))
        with pytest.raises(SpecError, match=r"steering\.md"):
            load_specs(tmp_path).get("rollout_set", "own")


def test_unknown_prompt_of_a_plugins_spec_is_named_where_there_is_no_folder_of_specs():
    table = {"agent": {"prompt": "nobody"}}
    with pytest.raises(SpecError, match="'nobody'.*specs/prompts/nobody"):
        with_own_prompts("rollout_set", table, [], Path("set.toml"))
