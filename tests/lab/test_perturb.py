"""Variants of a task have other names, the same everywhere, and nothing else changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi.rehearsal.shrink import shrink
from etpi_assets.specs.load import load_specs
from etpi_assets.tasks.family import Task
from etpi_lab.perturbed import FAMILY
from etpi_lab.perturbed.perturb import perturb, rename

WORD = st.text("bcdfgh", min_size=4, max_size=9)


def task_of(first: str, second: str, entities: list[str]) -> Task:
    payload = {"features": ["1", "2"], "texts": {"1": first, "2": second}, "entities": entities, "files": {"1": "x"}}
    return Task("repo/7/f1_f2", "pool", "repo", "train", f"# 1\n\n{first}\n# 2\n\n{second}", payload, first + second)


@given(st.lists(WORD, min_size=2, max_size=4, unique=True), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_names_change_alike_in_every_style_and_nowhere_meet(words, number):
    path, function, name = f"src/{words[0]}/test_{words[1]}.py", "_".join(words), "".join(map(str.capitalize, words))
    old = task_of(f"Change `{function}` in {path}, for {name}.", f"Then {path.upper()}: {function}()", [path, function])
    new = perturb(old, number)
    texts = new.payload["texts"]
    assert new == perturb(old, number) and new != perturb(old, number + 1)
    pieces = re.fullmatch(r"Change `(\w+)` in src/(\w+)/test_(\w+)\.py, for (\w+)\.", texts["1"])
    assert pieces, texts
    parts = pieces[1].split("_")
    assert len(set(parts)) == len(words) and not set(parts) & set(words)
    assert (pieces[2], pieces[3]) == (parts[0], parts[1]) and pieces[4] == "".join(map(str.capitalize, parts))
    assert texts["2"] == f"Then SRC/{parts[0].upper()}/TEST_{parts[1].upper()}.PY: {pieces[1]}()"
    assert new.payload["entities"] == sorted([f"src/{parts[0]}/test_{parts[1]}.py", pieces[1]])
    assert all(text in new.instruction for text in texts.values())
    assert (new.task_id, new.payload["variant_of"]) == (f"repo/7/f1_f2~{number}", "repo/7/f1_f2")
    assert new.content_hash != old.content_hash and new.payload["files"] == old.payload["files"]


def test_words_of_the_language_and_short_words_stay():
    new = perturb(task_of("Return None from `json_format` in src/cli.py.", "See tests/test_cli.py", ["json_format"]), 1)
    assert re.fullmatch(r"Return None from `json_(\w+)` in src/cli\.py\.", new.payload["texts"]["1"])
    assert new.payload["texts"]["2"] == "See tests/test_cli.py"
    assert rename("HTTPServer, httpserver", {"server": "kettle"}) == "HTTPKettle, httpserver"


def test_some_variants_give_the_features_to_the_other_agents():
    old = task_of("one", "two", [])
    orders = {tuple(role.feature_id for role in FAMILY.roles(perturb(old, n))) for n in range(1, 20)}
    assert orders == {("1", "2"), ("2", "1")}


def test_more_names_than_words_at_hand_are_still_distinct():
    entities = [f"{a}{b}{c}{d}" for a in "abcd" for b in "abcd" for c in "abcd" for d in "abcd"]
    new = perturb(task_of(" ".join(entities), "two", entities), 1)
    assert len(set(new.payload["entities"])) == len(entities) and not set(new.payload["entities"]) & set(entities)


def test_only_training_tasks_without_a_sandbox_have_variants(tmp_path: Path):
    for repo in ("harbor_task", "dspy_task"):
        for n in (1, 2):
            folder = tmp_path / repo / "task7" / f"feature{n}"
            folder.mkdir(parents=True)
            for name in ("feature.md", "feature.patch", "tests.patch"):
                (folder / name).write_text(f"Change `anything_{n}` in src/moor.py.\n")
    params = {"path": str(tmp_path), "heldout_repos": ["dspy_task"], "variants": 2}
    loaded = [item for item in FAMILY.load("pool", 0, params) if isinstance(item, Task)]
    assert [task.task_id.partition("/7/f1_f2")[::2] for task in loaded] == [
        ("dspy_task", ""), ("harbor_task", ""), ("harbor_task", "~1"), ("harbor_task", "~2")
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"params\.sandbox: .*cooperbench"):
        list(FAMILY.load("pool", 0, {**params, "sandbox": "docker"}))


def test_rehearsal_replaces_perturbed_tasks_by_the_world_of_the_family_below(tmp_path):
    small = shrink("plan_first_v5_perturbed", load_specs(), tmp_path)
    assert small.worlds["cooperbench_pool_perturbed"] == "coop_tiny_shared"
