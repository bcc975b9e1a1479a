"""The lab's specs: each ablation differs from its experiment in what it says, and all resolve."""

from __future__ import annotations

from etpi_assets.graph import GRAPH
from etpi_assets.specs.load import SHIPPED, load_installed, load_shipped
from etpi_assets.worlds.coop_tiny_shared.policy import SharedSkill

SPECS = load_installed()


def test_plugin_brings_the_ablations_and_every_spec_of_it_is_valid():
    shipped = load_shipped()
    theirs = [entry for entry in SPECS.entries() if entry.name not in shipped.keys(entry.set)]
    assert [entry.error for entry in theirs if entry.error] == []
    ablations = {entry.name for entry in theirs if entry.set == "experiment"}
    assert {entry.name for entry in theirs} == set((SHIPPED / "in_lab.txt").read_text().split())
    assert len(ablations) == 40 == 3 + sum(spec.variant for spec in SPECS.experiments.values())


def test_tool_call_reward_is_all_that_its_ablation_lacks():
    pair = ("grpo_tcr_tiny", "grpo_tcr_tiny_without")
    with_it, without = (SPECS.experiments[name].model_dump(exclude={"title", "variant"}) for name in pair)
    functions = [[term["function"] for term in spec["rl"].pop("rewards")] for spec in (with_it, without)]
    assert functions == [["tool_call_reward", "overlong"], ["outcome", "overlong"]]
    assert with_it == without


def test_evaluations_under_other_budgets_share_their_training():
    sections = [*GRAPH["sft_checkpoint"].sections, *GRAPH["upweighted_dataset"].sections, "select", "pairs"]
    names = ("plan_first_apart", "plan_first_tiny_budgets")
    assert len({SPECS.section_hash("experiment", name, sections) for name in names}) == 1


def test_control_without_thoughts_starts_from_the_same_base():
    with_thoughts, without = (SPECS.experiments[f"etpi_phase1_tiny{end}"].base for end in ("", "_no_think"))
    assert with_thoughts == without


def test_unprompted_teacher_writes_canonical_tokens_and_one_wording():
    engine = SPECS.rollout_sets["coop_tiny_shared_unprompted"].engine
    assert engine is not None and engine.noncanonical == 0.0 and SharedSkill.of(engine.skill).reword == 0.0
