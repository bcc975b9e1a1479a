"""Versions of code: the numbers, which partitions a raised number outdates, and code whose results no table can pin."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from etpi_assets.graph import GRAPH, GraphError
from etpi_assets.importers import IMPORTERS
from etpi_assets.planning import versions
from etpi_assets.planning.planner import other_packages
from etpi_assets.specs.load import load_specs
from etpi_assets.specs.rollout_set import ENGINE_KINDS
from etpi_assets.tasks.families import SHIPPED
from etpi_resources.lake.lake import Lake
from tests.goldens.golden import OF_LAB
from tests.planning import unpinned
from tests.support import small_lake


def test_numbers_are_counted_from_1_and_each_has_a_line():
    for name, rows in versions.COMPONENTS.items():
        assert sorted(rows) == list(range(1, len(rows) + 1)), name
        assert all(text.strip() and "\n" not in text for text in rows.values()), name


def test_every_option_of_a_spec_has_a_component():
    wanted = {f"importer.{name}" for name in IMPORTERS}
    wanted |= {f"{part}.{family}" for family in (*SHIPPED, *OF_LAB) for part in ("family", "judge")}
    wanted |= {f"engine.{versions._SCRIPTED.get(kind, kind)}" for kind in ENGINE_KINDS}
    listed = {n for n in versions.COMPONENTS if n.startswith(("importer.", "family.", "judge.", "engine."))}
    assert listed == wanted


def test_every_component_is_selected_by_a_shipped_spec_or_a_format():
    specs, named = load_specs(), set()
    for node in GRAPH.values():
        for key in specs.keys(node.set) if node.set != "all" else ["all"]:
            named |= set(versions.versions_of(node, key, specs).whole)
    others = {n for n in versions.COMPONENTS.keys() - named if not n.startswith(("importer.", "family.", "judge."))}
    assert others <= {"blame", "harness", "engine.openai", "engine.vllm"}, "raising their numbers would change nothing"


def test_asset_that_names_an_unknown_component_is_refused():
    for wrong in ("scorings", "judges.{family}"):
        with pytest.raises(GraphError, match=wrong.partition("{")[0]):
            versions.require_components(replace(GRAPH["tito_pairs"], versions=(wrong,)))


@pytest.mark.parametrize(
    ("was", "now", "changed"),
    [({}, {"agent": 1}, None), ({}, {"agent": 2}, "agent 2: x"), ({"agent": 2}, {"agent": 2}, None),
     ({"agent": 1}, {"agent": 3}, "agent 2: x; 3: y"), ({"agent": 3}, {"agent": 2}, None),
     ({"old": 4}, {"agent": 1}, None), ({}, {"plugin a": "ab"}, None),
     ({"plugin a": "ac"}, {"plugin a": "ab"}, "plugin a changed")],
)  # fmt: skip
def test_only_a_raised_number_or_another_plugin_is_a_change(was, now, changed, monkeypatch):
    monkeypatch.setattr(versions, "COMPONENTS", {"agent": {1: "w", 2: "x", 3: "y"}})
    assert versions.raised(was, now) == ({} if changed is None else {next(iter(now)): changed})


def test_name_of_stored_results_follows_raised_numbers_alone():
    def name(**kept):
        return versions.PartitionVersions({}, kept).stored_name

    assert name(agent=1) == name(agent=1, chat=1) != name(agent=2) != name(agent=1, chat=2)
    assert name(plugin="ab") not in (name(plugin="ac"), name())


def test_page_shows_the_raised_components_of_an_asset(monkeypatch):
    monkeypatch.setattr(versions, "COMPONENTS", dict.fromkeys(versions.COMPONENTS, {1: "x"}))
    assert {versions.asset_version(node) for node in GRAPH.values()} == {"1"}
    for component in ("agent", "judge.harbor"):
        monkeypatch.setitem(versions.COMPONENTS, component, {1: "x", 2: "y"})
    assert versions.asset_version(GRAPH["raw_rollouts"]) == "agent 2"
    assert versions.asset_version(GRAPH["scored_rollouts"]) == "judge.harbor 2"
    assert versions.asset_version(GRAPH["tasks"]) == "judge.harbor 2"
    assert versions.asset_version(GRAPH["leaderboard"]) == "1"


def test_code_that_no_golden_pins_has_another_number_or_a_new_digest():
    was, now = json.loads(unpinned.FILE.read_text()), unpinned.digests()
    changed = [component for component in now if was.get(component) != now[component]]
    assert not changed, (
        f"the code of {', '.join(changed)} differs, and no golden table shows whether its results do: raise the number "
        f"in versions.toml and say what differs, unless they are equal; then run python -m tests.planning.unpinned"
    )


def test_digest_follows_the_syntax_tree(tmp_path):
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text('"""Words."""\nSLOTS = 64  # rows\n')
    other.write_text('"""Other words."""\n\nSLOTS = (64)\n')
    assert versions.digest(one) == versions.digest(other)
    other.write_text("SLOTS = 32\n")
    assert versions.digest(one) != versions.digest(other)


def test_other_minor_versions_of_packages_are_named(monkeypatch, tmp_path):
    made_before = small_lake.put(Lake(tmp_path), "tasks", "coop", {})
    here = {"torch": "2.13.0+cpu", "trl": "1.2.3", "peft": None}
    monkeypatch.setattr("etpi_assets.planning.planner.installed", here.get)

    def note(**made):
        return other_packages(replace(made_before, fingerprint=made))

    assert note(torch="2.13.4", trl="1.2.0", peft="0.1", numpy="1") == ""
    assert note(torch="2.12.1", trl="1.1.9") == (
        "made with torch 2.12.1, 2.13.0+cpu is installed; made with trl 1.1.9, 1.2.3 is installed"
    )


@pytest.mark.parametrize(
    ("kept", "as_in_0_2"),
    [(None, False), ({}, True), ({"a": 1, "plugin b": "2"}, True), ({"a": 1, "c": 2}, False)],
)
def test_results_of_0_2_are_reused_where_no_number_was_raised(kept, as_in_0_2):
    assert versions.PartitionVersions(whole={"a": 2}, kept=kept).as_in_0_2 is as_in_0_2
