"""The planner and the skip rule: states of partitions, and what a change recomputes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from etpi_assets.asset import AssetRun
from etpi_assets.graph import GRAPH
from etpi_assets.planning import planner
from etpi_assets.specs.load import SpecError
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.lake import BlockedInput, LakeError, MissingInput, Ref
from tests.support.graph import EXPERIMENT, ROLLOUT_SET, write_spec

CHAIN = [name for name, node in GRAPH.items() if node.set != "all"]


def _states(world, experiment="first"):
    resources = world.resources()
    return {step.asset: step for step in planner.plan(experiment, resources.specs, resources.lake)}


def _not_ok(world, experiment="first"):
    return {name: step.state for name, step in _states(world, experiment).items() if step.state != "ok"}


def test_plan_of_an_empty_lake_is_missing_in_graph_order(world):
    steps = list(_states(world).values())
    assert [s.asset for s in steps] == sorted(CHAIN, key=lambda n: (planner.SETS.index(GRAPH[n].set), CHAIN.index(n)))
    assert {s.state for s in steps} == {"missing"}


def test_plan_of_a_rollout_set_and_of_a_suite_is_their_chain(world):
    resources = world.resources()
    keys = {name: {s.key for s in planner.plan(name, resources.specs, resources.lake)} for name in ("small", "few")}
    assert keys == {"small": {"small"}, "few": {"small", "few"}}
    assert [planner.set_of(name, resources.specs) for name in ("small", "few", "first")] == list(planner.SETS)


def test_second_run_computes_nothing(world):
    assert len(world.make_all()) > 0
    assert _not_ok(world) == {}
    assert world.make_all() == [("catalog", "all")]


def test_evaluation_budget_stales_evaluation_and_retrains_nothing(world):
    world.make_all()
    write_spec(world.specs_folder, "experiments", "first", EXPERIMENT.replace('"small"}', '"small", tasks = 5}'))
    stale = _states(world)
    assert stale["eval_rollouts"].reason == "its spec changed: evaluate.tasks 24 → 5"
    assert {n for n, s in stale.items() if s.state != "ok"} == {
        "experiment_spec", "blame", "eval_rollouts", "eval_metrics", "experiment_report", "model_card",
    }  # fmt: skip
    created = {name for name, _ in world.make_all()}
    assert not created & {"upweighted_dataset", "sft_checkpoint", "base_checkpoint", "serving_probe"}
    assert {"eval_rollouts", "eval_metrics"} <= created


def test_new_title_stales_only_reports(world):
    world.make_all()
    write_spec(world.specs_folder, "experiments", "first", EXPERIMENT.replace('"e"', '"better"'))
    assert set(_not_ok(world)) == {"experiment_spec", "experiment_report", "model_card"}


def test_change_of_one_experiment_leaves_others_fresh(world):
    world.make_all("first")
    world.make_all("second")
    write_spec(world.specs_folder, "experiments", "first", EXPERIMENT + "[train]\nepochs = 5\n")
    assert "sft_checkpoint" in _not_ok(world, "first")
    assert _not_ok(world, "second") == {}


def test_staleness_propagates_through_the_chain(world):
    world.make_all()
    write_spec(world.specs_folder, "rollout_sets", "few", ROLLOUT_SET + "k = 3\n")
    states = _states(world)
    assert states["raw_rollouts"].reason.startswith("its spec changed")
    assert states["tasks"].state == states["base_checkpoint"].state == "ok"
    assert states["eval_metrics"].state == states["model_card"].state == "waiting"
    assert states["tito_pairs"].reason == "waits for selected_trajectories (waiting), raw_rollouts of few (stale)"


def test_unchanged_result_upstream_stales_nothing(world):
    world.make_all()
    write_spec(world.specs_folder, "suites", "small", 'title = "s"\nfamily = "coop_tiny_shared"\nnotes = "n"\n')
    assert set(_not_ok(world)) == {"suite_spec"}, "no asset depends on notes"


def test_raised_number_is_a_state_that_names_the_change(world, code):
    world.make_all()
    code["tito_pairs"] = 2
    states = _states(world)
    assert (states["tito_pairs"].state, states["tito_pairs"].kept) == ("outdated", False)
    assert states["tito_pairs"].reason == "tito_pairs 2: better"
    assert states["upweighted_dataset"].state == "waiting"
    assert states["selected_trajectories"].state == "ok"
    assert [name for name, _ in world.make_all()] == ["tito_pairs", "catalog"], "same pairs, so nothing after them"
    assert _not_ok(world) == {}


def test_expensive_results_are_kept_without_consent(world, code):
    world.make_all()
    code["sft_checkpoint kept"] = 3
    step = _states(world)["sft_checkpoint"]
    assert (step.state, step.kept) == ("outdated", True) and step.seconds is not None
    assert step.reason == "sft_checkpoint kept 2: better; 3: best"
    assert world.make("sft_checkpoint", "first").skipped
    assert [name for name, _ in world.make_all()] == ["catalog"]
    assert planner.open_steps(_states(world).values()) == []
    assert not world.make("sft_checkpoint", "first", rebuild={"sft_checkpoint"}).skipped
    assert _not_ok(world) == {}


def test_what_follows_a_dataset_that_code_changed_is_kept_with_the_training(world, code):
    """A probe of the checkpoint with the new data set would fail: the checkpoint has not seen it. Reports say so."""
    world.make_all()
    before = world.lake.current(Ref("serving_probe", "experiment", "first")).version
    code["tito_pairs"] = 2
    world.change_result("tito_pairs")
    made = [name for name, _ in world.make_all()]
    assert made == ["tito_pairs", "upweighted_dataset", "experiment_report", "model_card", "catalog"]
    assert {n for n, s in _states(world).items() if s.kept} == {"blame", "sft_checkpoint", "serving_probe"}
    assert before == world.lake.current(Ref("serving_probe", "experiment", "first")).version
    write_spec(world.specs_folder, "experiments", "first", EXPERIMENT + "[train]\nepochs = 5\n")
    assert "sft_checkpoint" in [name for name, _ in world.make_all()], "the user asked for another training"
    assert _not_ok(world) == {}


def test_kept_results_let_others_be_computed(world, code):
    world.make_all()
    code["raw_rollouts kept"] = code["scored_rollouts"] = 2
    assert [name for name, _ in world.make_all()] == ["scored_rollouts", "catalog"]


def test_kept_lines_name_changes_cost_and_options(world, code):
    world.make_all()
    assert planner.kept_lines(_states(world).values()) == ""
    for name in ("raw_rollouts", "sft_checkpoint"):
        code[f"{name} kept"] = 2
    text = planner.kept_lines(_states(world).values())
    assert (
        "raw_rollouts of few: raw_rollouts kept 2: better; took 0 s last time; again with --rebuild raw_rollouts"
        in text
    )
    assert "sft_checkpoint of first" in text and "again with --rebuild sft_checkpoint" in text
    resources = world.resources()
    steps = planner.plan("first", resources.specs, resources.lake, (planner.ALL,))
    assert planner.kept_lines(steps) == "" and planner.open_steps(steps)


def test_assets_without_partitions_have_states(world):
    world.make_all()
    assert {step.state for step in planner.across(world.resources().specs, world.lake)} == {"ok"}
    world.make_all("second")
    write_spec(world.specs_folder, "experiments", "second", EXPERIMENT.replace('"e"', '"another title"'))
    states = {step.asset: step.state for step in planner.across(world.resources().specs, world.lake)}
    assert states["leaderboard"] == "stale"


def test_code_around_an_expensive_result_computes_it_from_what_is_stored(world, code):
    world.make_all()
    code["sft_checkpoint"] = 2
    step = _states(world)["sft_checkpoint"]
    assert (step.state, step.kept) == ("outdated", False)
    assert not world.make("sft_checkpoint", "first").skipped


def test_results_of_a_checkpoint_that_is_trained_again_are_computed_again(world, code):
    """An evaluation of the earlier checkpoint would stand for the later one."""
    world.make_all()
    code["tito_pairs"] = 2
    world.change_result("tito_pairs")
    world.make_all()
    resources = world.resources()
    rebuilt = planner.plan("first", resources.specs, resources.lake, ("sft_checkpoint",))
    assert {step.asset for step in rebuilt if step.kept} == set()
    assert not world.make("sft_checkpoint", "first", rebuild={"sft_checkpoint"}).skipped
    made = [name for name, _ in world.make_all()]
    assert {"rl_checkpoint", "serving_probe", "eval_rollouts", "eval_metrics", "blame"} <= {*made}
    assert _not_ok(world) == {}


def test_results_are_kept_where_the_files_of_the_earlier_checkpoint_are_gone(world, code):
    world.make_all()
    before = world.lake.current(Ref("sft_checkpoint", "experiment", "first"))
    code["sft_checkpoint"] = 2
    world.change_result("sft_checkpoint")
    world.make("sft_checkpoint", "first")
    for file in world.lake.files_of(before, "checkpoints"):
        file.unlink()
    assert _states(world)["eval_rollouts"].kept


def test_results_of_the_same_checkpoint_are_kept_although_its_asset_has_another_version(world, code, monkeypatch):
    world.make_all()
    code["sft_checkpoint"] = 2
    world.change_result("sft_checkpoint")
    monkeypatch.setattr(planner, "_checkpoint_ids", lambda manifest, lake: ["c1"])
    assert "eval_rollouts" not in [name for name, _ in world.make_all()]


def test_rebuild_of_one_asset_keeps_the_others(world, code):
    world.make_all()
    code["raw_rollouts kept"] = code["sft_checkpoint kept"] = 2
    assert world.make("raw_rollouts", "few", rebuild={"sft_checkpoint"}).skipped
    assert not world.make("raw_rollouts", "few", rebuild={"raw_rollouts"}).skipped
    assert not world.make("sft_checkpoint", "first", rebuild={planner.ALL}).skipped


def test_expensive_result_is_kept_when_code_changed_its_input(world, code):
    """A changed judge gives other tasks. The user edited nothing, so rollouts are not collected again."""
    world.make_all()
    code["tasks"] = 2
    world.change_result("tasks")
    world.make("tasks", "small")
    step = _states(world)["raw_rollouts"]
    assert (step.state, step.kept) == ("outdated", True) and "tasks/small" in step.reason
    assert world.make("raw_rollouts", "few").skipped


def test_edit_of_an_upstream_spec_retrains_without_consent(world):
    world.make_all()
    write_spec(world.specs_folder, "experiments", "first", EXPERIMENT + "[dataset]\nupweight_factor = 3\n")
    world.make("upweighted_dataset", "first")
    step = _states(world)["sft_checkpoint"]
    assert (step.state, step.kept) == ("stale", False)
    assert not world.make("sft_checkpoint", "first").skipped


def _rewrite(world, change):
    for manifest in [m for ref in world.lake.refs() if (m := world.lake.current(ref))]:
        path = world.lake.root / manifest.ref.asset / f"{manifest.ref.set}={manifest.ref.key}"
        pointer = path / json.loads((path / "current").read_text())["manifest"]
        pointer.write_text(json.dumps(change(json.loads(pointer.read_text()))))


def test_lake_with_digests_is_taken_over(world, code):
    world.make_all()
    old = {"version": "0123456789abcdef", "kept": "fedcba9876543210", "modules": {"etpi_assets.x": "01"}}
    _rewrite(world, lambda manifest: manifest | {"code": old, "input_key": "of the old rule"})
    assert _not_ok(world) == {} and [name for name, _ in world.make_all()] == ["catalog"]
    run = AssetRun(GRAPH["raw_rollouts"], "few", world.resources())
    assert run.older_codes == (old["kept"],)
    code["raw_rollouts kept"] = 2
    later = AssetRun(GRAPH["raw_rollouts"], "few", world.resources())
    assert _states(world)["raw_rollouts"].kept and later.older_codes is None and later.stored_name != run.stored_name


def test_lake_of_0_1_is_recognised_and_its_expensive_results_are_kept(world):
    world.make_all()
    later = ("code", "cause", "accepted", "seconds")
    _rewrite(world, lambda m: {n: v for n, v in m.items() if n not in later} | {"input_key": "k", "spec_hash": "h"})
    states = _states(world)
    assert states["sft_checkpoint"].state == "outdated" and "0.1" in states["sft_checkpoint"].reason
    assert states["sft_checkpoint"].kept and not states["tito_pairs"].kept
    world.make_all()
    assert {name for name, s in _states(world).items() if s.state != "ok"} == {
        "raw_rollouts", "sft_checkpoint", "rl_checkpoint", "eval_rollouts"
    }  # fmt: skip


def test_section_that_an_asset_declares_since_makes_nothing_stale(world):
    world.make_all()

    def without_train(manifest):
        spec = {name: value for name, value in manifest["spec"].items() if name != "train"}
        return manifest | {"spec": spec, "spec_hash": "h"} if manifest["ref"]["asset"] == "sft_checkpoint" else manifest

    _rewrite(world, without_train)
    assert _not_ok(world) == {}


def test_metadata_of_the_page_are_in_no_version(world, code):
    for name, key in (("suite_spec", "small"), ("tasks", "small"), ("rollout_set_spec", "few")):
        world.make(name, key)
    definition = world.assets["raw_rollouts"]
    first = definition.execute("few", world.resources(), log=lambda line: None)

    def with_another_plot(run, **inputs):
        produced = definition.function(run, **inputs)
        return replace(produced, metadata={"plot": "another plot"})

    code["raw_rollouts"] = 2
    other = replace(definition, function=with_another_plot).execute("few", world.resources(), log=lambda line: None)
    assert (other.skipped, other.metadata) == (False, {"plot": "another plot"})
    assert other.manifest.version == first.manifest.version


def test_reverted_spec_restores_the_earlier_version(world):
    world.make_all()
    before = world.lake.current(Ref("sft_checkpoint", "experiment", "first")).version
    write_spec(world.specs_folder, "experiments", "first", EXPERIMENT + "[train]\nepochs = 5\n")
    world.make_all()
    assert world.lake.current(Ref("sft_checkpoint", "experiment", "first")).version != before
    write_spec(world.specs_folder, "experiments", "first", EXPERIMENT)
    assert [n for n, _ in world.make_all() if GRAPH[n].set == "experiment"] == []
    assert world.lake.current(Ref("sft_checkpoint", "experiment", "first")).version == before
    assert _not_ok(world) == {}


def test_blocked_version_stops_consumers_until_a_good_one(world):
    world.failing.add("upweighted_dataset")
    for name in CHAIN[: CHAIN.index("sft_checkpoint")]:
        world.make(name, {"suite": "small", "rollout_set": "few", "experiment": "first"}[GRAPH[name].set])
    step = _states(world)["upweighted_dataset"]
    assert (step.state, step.reason) == ("blocked", "sound: row 3 is unsound; mend it")
    with pytest.raises(BlockedInput, match="row 3 is unsound; mend it"):
        world.make("sft_checkpoint", "first")
    assert ("sft_checkpoint", "first") not in world.made
    with pytest.raises(BlockedInput, match="row 3 is unsound; mend it"):  # not: it has no data, so run it again
        planner.require(Ref("eval_metrics", "experiment", "first"), world.resources().specs, world.lake)
    with pytest.raises(MissingInput):
        planner.require(Ref("eval_metrics", "experiment", "second"), world.resources().specs, world.lake)
    world.failing.clear()
    world.make("upweighted_dataset", "first")
    world.make("sft_checkpoint", "first")


def test_older_good_version_does_not_replace_a_newer_blocked_one(world):
    world.make_all()
    write_spec(world.specs_folder, "experiments", "first", EXPERIMENT + "[dataset]\nupweight_factor = 3\n")
    world.failing.add("upweighted_dataset")
    world.make("upweighted_dataset", "first")
    with pytest.raises(BlockedInput):
        world.make("sft_checkpoint", "first")
    write_spec(world.specs_folder, "experiments", "first", EXPERIMENT)
    assert world.make("upweighted_dataset", "first").skipped, "the earlier version is what this spec asks for"
    assert world.make("sft_checkpoint", "first").skipped


def test_missing_input_names_the_commands(world):
    with pytest.raises(MissingInput) as error:
        world.make("selected_trajectories", "first")
    text = str(error.value)
    assert text.endswith("Run `etpi run first`")
    with pytest.raises(MissingInput) as error:
        world.make("raw_rollouts", "few")
    assert str(error.value).endswith("Run `etpi run small`")


def test_invalid_and_unknown_specs(world):
    write_spec(world.specs_folder, "experiments", "broken", "sead = 1")
    assert {s.state for s in _states(world, "broken").values()} == {"invalid"}
    with pytest.raises(SpecError, match="'first'.* .*specs"):
        _states(world, "furst")
    with pytest.raises(SpecError, match="sead: unknown key"):
        world.make("experiment_spec", "broken")
    write_spec(world.specs_folder, "rollout_sets", "few", "kid = 1")
    steps = _states(world)
    assert steps["raw_rollouts"].state == "invalid" and "few.toml: kid" in steps["raw_rollouts"].reason


def test_reading_an_undeclared_input_is_refused(world):
    world.make_all()
    run = AssetRun(GRAPH["tito_pairs"], "first", world.resources())
    with pytest.raises(LakeError, match="'base_checkpoint'"):
        run.read("base_checkpoint", "checkpoints")
    with pytest.raises(LakeError, match="raw_rollouts.*'other'"):
        run.read("raw_rollouts", "turns", key="other")
    assert run.read("raw_rollouts", "turns", columns=["rollout_id"]).column_names == ["rollout_id"]


def test_files_that_a_spec_names_are_inputs(world, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a.json").write_text("{}")
    write_spec(world.specs_folder, "rollout_sets", "few", f'title = "i"\nkind = "imported"\npath = "{logs}"\n')
    world.make("raw_rollouts", "few")
    assert world.make("raw_rollouts", "few").skipped
    (logs / "b.json").write_text("{}")
    assert _states(world)["raw_rollouts"].reason == f"changed since: path/{logs}"
    assert not world.make("raw_rollouts", "few").skipped


def test_input_that_changes_during_the_run_is_noticed(world):
    world.make_all()
    definition = world.assets["tito_pairs"]

    def meddling(run, **inputs):
        write_spec(world.specs_folder, "rollout_sets", "few", ROLLOUT_SET + "k = 9\n")
        world.make("raw_rollouts", "few")
        return definition.function(run, **inputs)

    write_spec(world.specs_folder, "experiments", "first", EXPERIMENT + "[pairs]\nstrip_think = false\n")
    world.assets["tito_pairs"] = type(definition)(definition.node, meddling, definition.checks)
    with pytest.raises(LakeError, match="raw_rollouts/few"):
        world.make("tito_pairs", "first")


def test_undeclared_tables_and_checks_are_refused(world):
    world.make_all()
    definition = world.assets["tito_pairs"]
    (world.specs_folder / "experiments" / "first.toml").write_text(EXPERIMENT + "[pairs]\nstrip_think = false\n")

    def without_a_table(run, **inputs):
        produced = definition.function(run, **inputs)
        return type(produced)({"pairs": produced.tables["pairs"]}, produced.checks)

    def without_a_check(run, **inputs):
        return type(produced := definition.function(run, **inputs))(produced.tables)

    def with_a_check_that_only_warns(run, **inputs):
        produced = definition.function(run, **inputs)
        return type(produced)(produced.tables, [CheckOutcome("label_syntax", False, "wrong", blocking=False)])

    cases = (
        (without_a_table, r"\['pairs'\].*\['dropped', 'pairs'\]", definition.checks),
        (without_a_check, r"\[\], .*\['sound'\]", definition.checks),
        (with_a_check_that_only_warns, "label_syntax .*checks.toml", ("label_syntax",)),
    )
    for function, words, checks in cases:
        world.assets["tito_pairs"] = type(definition)(definition.node, function, checks)
        with pytest.raises(LakeError, match=words):
            world.make("tito_pairs", "first")


def test_step_that_is_up_to_date_says_how_long_it_took(world):
    world.make_all()
    step = _states(world)["raw_rollouts"]
    assert step.state == "ok" and step.seconds is not None


def test_data_that_a_spec_changed_before_code_did_are_trained_on(world, code):
    world.make_all()
    write_spec(world.specs_folder, "experiments", "first", EXPERIMENT + "[dataset]\nupweight_factor = 3\n")
    world.make("upweighted_dataset", "first")
    code["upweighted_dataset"] = 2
    world.change_result("upweighted_dataset")
    world.make("upweighted_dataset", "first")
    step = _states(world)["sft_checkpoint"]
    assert (step.state, step.kept) == ("stale", False)


def test_probe_that_was_never_made_is_refused_while_its_training_is_kept(world, code):
    for name in CHAIN[: CHAIN.index("serving_probe")]:
        world.make(name, {"suite": "small", "rollout_set": "few", "experiment": "first"}[GRAPH[name].set])
    code["tito_pairs"] = 2
    world.change_result("tito_pairs")
    for name in ("tito_pairs", "upweighted_dataset"):
        world.make(name, "first")
    assert world.make("sft_checkpoint", "first").skipped
    with pytest.raises(LakeError, match="sft_checkpoint .*--rebuild"):
        world.make("serving_probe", "first")
    world.make("sft_checkpoint", "first", rebuild={"sft_checkpoint"})
    world.make("rl_checkpoint", "first", rebuild={planner.ALL})
    assert not world.make("serving_probe", "first").skipped


def test_key_that_came_with_new_code_counts_where_somebody_wrote_it():
    was, now = {"train": {"epochs": 3}}, {"train": {"epochs": 3, "warmup": 2, "decay": 0.1}, "seeds": [0]}
    assert planner._without_new_defaults(was, now, {"train": {"warmup": 2}}) == {"train": {"epochs": 3, "warmup": 2}}
