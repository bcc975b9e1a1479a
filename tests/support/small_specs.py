"""Specs of an experiment that takes seconds: live rollouts in real sandboxes, curated, nothing trained."""

from __future__ import annotations

from pathlib import Path

from tests.support.graph import write_spec

SUITE = 'extends = "coop_tiny_shared"\n[params]\ntrain = 40\nheldout = 20\n'
ROLLOUT_SET = 'extends = "coop_tiny_shared_strong"\nsuite = "little"\ntasks = 24\nk = 1\n'
DATA_ALONE = """
extends = "plan_first_tiny"
rollout_sets = ["little_strong"]
evaluate = "none"
[base]
kind = "none"
tokenizer = "tiny"
chat_template = "tiny"
[train]
method = "none"
[gates]
teacher = {}
format_exposure = 0
role_balance = 0.0
plan_paths_in_task = 0.0
"""


def write_small_specs(folder: Path) -> Path:
    """The suite `little`, its rollout set `little_strong` and the experiment `first`; returns the folder."""
    write_spec(folder, "suites", "little", SUITE)
    write_spec(folder, "rollout_sets", "little_strong", ROLLOUT_SET)
    write_spec(folder, "experiments", "first", DATA_ALONE)
    return folder
