"""Parts of a rehearsal: small specs, worlds that replace data, estimates, and the lines that say what would start."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from etpi.rehearsal import costs, memory, starts, students
from etpi.rehearsal import shrink as shrink_module
from etpi.rehearsal.shrink import PREFIX, REASON, WORLDS, Rehearsal, shrink
from etpi.rehearsal.stages import Finding, Stage, first_stop, judged
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import SpecError, Specs, load_shipped, load_specs
from etpi_assets.specs.training import BaseSection, RLSection
from tests.support.graph import write_spec
from tests.support.students import link_smollm2

SHIPPED = load_shipped()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rehearsals")


@pytest.fixture(autouse=True)
def _without_data(monkeypatch):
    monkeypatch.setattr(students, "hub_path", lambda *name: None)
    for name in ("COOPERBENCH", "R2E_GYM", "SWE_BENCH", "TERMINAL_BENCH", "OPEN_AGENTRL", "TRAJECTORIES"):
        monkeypatch.delenv(f"ETPI_{name}", raising=False)


def experiment(rehearsal: Rehearsal) -> ExperimentSpec:
    return load_specs(rehearsal.folder / "specs").get("experiment", PREFIX + rehearsal.name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED.experiments)
def test_every_shipped_experiment_has_small_specs_that_load(name, folder):
    spec = SHIPPED.experiments[name]
    if spec.base.kind == "package":
        link_smollm2()
    small = shrink(name, SHIPPED, folder)
    loaded = load_specs(small.folder / "specs")
    written = loaded.get("experiment", PREFIX + name)
    assert written.requires == "cpu" and written.train.max_steps == 2 and len(written.seeds) == 1
    assert written.evaluate is None or written.evaluate.agent.max_steps <= 4
    for section in ("pairs", "select", "dataset", "metrics", "card"):
        assert getattr(written, section) == getattr(spec, section)
    assert (written.train.method, written.rl.method) == (spec.train.method, spec.rl.method)
    for set_name in ("suite", "rollout_set"):
        keys = SHIPPED.upstream_keys("experiment", name, set_name)
        assert loaded.upstream_keys("experiment", PREFIX + name, set_name) == [PREFIX + key for key in keys]
        for key in keys:
            assert loaded.get(set_name, PREFIX + key).title  # it loads
            path = getattr(loaded.get(set_name, PREFIX + key), "path", None)
            assert not shrink_module._missing(path), f"{key} reads what is not here"
    if spec.base.kind == "hub":
        assert written.base.kind == "path" and any(
            "weights of" in text for texts in small.needs.values() for text in texts
        )


def test_replaced_parts_are_recorded_as_needs_of_their_asset(folder):
    needs = shrink("tito_retokenised_v1", SHIPPED, folder).needs
    assert "GEMINI_API_KEY" in needs["raw_rollouts of cooperbench_gemini_prompted"][0]
    assert "vLLM" in needs["serving_probe of tito_retokenised_v1"][0]
    assert "ETPI_COOPERBENCH" in " ".join(needs["tasks of cooperbench_pool_docker"])


def test_missing_runs_of_any_format_are_replaced_by_others_in_each_set(folder):
    small = shrink("solo_import", SHIPPED, folder)
    replaced = [
        load_specs(small.folder / "specs").rollout_sets[PREFIX + key]
        for key in SHIPPED.experiments["solo_import"].rollout_sets
    ]
    assert [(s.kind, s.format) for s in replaced] == [("imported", "messages")] * 2
    first, second = (set(Path(str(s.path)).read_text(encoding="utf-8").splitlines()) for s in replaced)
    assert first and second and not first & second  # or the experiment would import the same runs twice
    assert "mini_swe_agent" in small.needs["raw_rollouts of mini_swe_agent_logs"][0]


def test_kernels_that_are_missing_are_needs(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("etpi.rehearsal.shrink.find_spec", lambda name: None)
    (tmp_path / "experiments").mkdir()
    text = 'title = "t"\nextends = "etpi_phase1"\n[train]\nlayer_kernels = "liger"\n'
    (tmp_path / "experiments" / "fused.toml").write_text(text)
    needs = str(shrink("fused", load_specs(tmp_path), folder).needs)
    assert "for train.loss_kernel, train.layer_kernels" in needs


@pytest.mark.parametrize("wrapped", [True, False])
def test_folder_of_a_model_with_linear_attention_is_known_as_one_of_the_hub_is(tmp_path, wrapped):
    text = {"model_type": "qwen3_5_text"}
    config = {"model_type": "qwen3_5", "text_config": text} if wrapped else text
    (tmp_path / "config.json").write_text(json.dumps(config))
    base = BaseSection(kind="path", path=str(tmp_path), sha256="0" * 16)
    assert students.is_hybrid(base)


def test_real_data_are_used_where_they_are_and_no_model_acts_on_them(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ETPI_COOPERBENCH", str(tmp_path))
    small = shrink("plan_first_v5_tf", SHIPPED, folder)
    suite = load_specs(small.folder / "specs").suites[f"{PREFIX}cooperbench_pool"]
    assert suite.params["path"] == "${ETPI_COOPERBENCH}"
    # Its evaluation runs commands in containers, and a model acts in the other.
    assert small.worlds == {"cooperbench_two_pairs": "coop_tiny_shared"}
    assert "cooperbench_pool_docker" in shrink("tito_native_v4c", SHIPPED, folder).worlds


def test_a_scripted_policy_of_the_suites_world_acts_instead_of_a_model(folder):
    small = shrink("etpi_phase1", SHIPPED, folder)
    loaded = load_specs(small.folder / "specs")
    teacher, suite = loaded.rollout_sets[f"{PREFIX}r2e_gym_lite_phase1"], loaded.suites[f"{PREFIX}r2e_gym_lite"]
    assert (suite.family, teacher.engine and teacher.engine.kind) == ("repo_fix_tiny", "scripted")
    assert teacher.agent.grammar is None and teacher.engine and teacher.engine.skill == {"compact": 1.0}
    assert teacher.agent.prompt == SHIPPED.rollout_sets["r2e_gym_lite_phase1"].agent.prompt


def test_family_without_a_world_is_named(folder, tmp_path):
    write_spec(tmp_path, "suites", "mine", 'title = "t"\nfamily = "r2e"\n[params]\npath = "/nowhere"\n')
    text = 'extends = "plan_first_tiny"\n[evaluate]\nsuite = "mine"\n'
    write_spec(tmp_path, "experiments", "on_mine", text)
    assert shrink("on_mine", load_specs(tmp_path), folder).worlds == {"mine": "repo_fix_tiny"}
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(WORLDS, "r2e")
        with pytest.raises(SpecError, match="suite mine"):
            shrink("on_mine", load_specs(tmp_path), folder)


def test_unknown_architecture_is_refused(tmp_path):
    with pytest.raises(SpecError, match="hub:state-spaces/mamba-3B@a{40}: .*etpi fetch"):
        students.architecture("hub:state-spaces/mamba-3B@" + "a" * 40)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(SpecError, match="mamba"):
        students.architecture(str(tmp_path))
    (tmp_path / "config.json").write_text('{"text_config": {"model_type": "qwen3_5_text"}}')
    assert students.architecture(str(tmp_path)) == "qwen3_5_text"


# --- estimates -------------------------------------------------------------------------------------------------------

QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "vocab_size": 151_936, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 9728, "tie_word_embeddings": True,
}  # fmt: skip
"""Sizes of Qwen3-4B's published configuration."""


SMOL = replace(memory.shape_of(QWEN3_4B), parameters=135_000_000)


def shape(model: str) -> memory.Shape:
    shape = costs.model_shape(f"hub:{model}@{'a' * 40}")
    assert shape is not None
    return shape


def test_parameters_are_those_of_the_published_models():
    # Bytes of model.safetensors.index.json in bfloat16: 8.04 GB and 16.4 GB; Qwen3.5's also have a vision part.
    assert memory.shape_of(QWEN3_4B).parameters == pytest.approx(4.022e9, rel=1e-3)
    assert shape("Qwen/Qwen3-4B").parameters == pytest.approx(4.022e9, rel=1e-3)
    assert shape("Qwen/Qwen3-8B").parameters == pytest.approx(8.19e9, rel=1e-3)
    for name, billions in (("Qwen3.5-0.8B", 0.87), ("Qwen3.5-2B", 2.27), ("Qwen3.6-27B", 27.79)):
        assert 0.8 * billions < shape(f"Qwen/{name}").parameters / 1e9 < billions
    assert costs.model_shape(f"hub:some/model-4B@{'a' * 40}") is None


@pytest.mark.parametrize(("recomputed", "measured"), [(True, 69.7), (False, 103.1)])
def test_memory_of_a_training_is_the_measured_one(recomputed, measured):
    """GiB of training all of Qwen3-4B's shape on rows of 9,152 tokens, of them 2,400 labels (bench/README.md)."""
    shape = memory.shape_of({
        "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
        "tie_word_embeddings": True,
    })  # fmt: skip
    training = memory.Training(
        full=True, rank=0, recomputed=recomputed, small_states=False, shards=1, tile=1 << 25, reference=False,
        length=9152, scored=2400,
    )  # fmt: skip
    assert sum(training.memory(shape).values()) / 2**30 == pytest.approx(measured, rel=0.02)


def test_parameters_agree_with_a_model_that_is_built(folder):
    from transformers import AutoModelForCausalLM

    students.make_student(folder / "qwen3", "qwen3", "qwen3", None)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "qwen3")
    built = costs.model_shape(str(folder / "qwen3"))
    assert built and built.parameters == sum(p.numel() for p in model.parameters())


def test_adapter_has_the_published_size():
    """The report: 132 MB, for rank 32 of all linear modules of Qwen3-4B."""
    spec = SHIPPED.experiments["plan_first_v5_tf"]
    assert 2 * costs.supervised(spec).trained(shape("Qwen/Qwen3-4B")) / 1e6 == pytest.approx(132, abs=0.5)


@pytest.mark.parametrize("name", ["plan_first_v1", "plan_first_v2", "plan_first_v5_tf"])
def test_steps_are_the_published_ones(name):
    spec = SHIPPED.experiments[name]
    stated = spec.published["stated"]
    rows = stated.get("train_rows") or 0.9 * stated["rows"]
    unbounded = spec.model_copy(update={"train": spec.train.model_copy(update={"max_steps": None})})
    assert costs.steps_of(unbounded, rows) == pytest.approx(stated["steps"], abs=2)
    assert costs.steps_of(spec, rows) <= stated["steps"] + 1


def test_training_time_is_the_published_one():
    """The card: 318 trajectories, 40 minutes on one H100."""
    lines = {cost.part: cost for cost in costs.costs("etpi_phase1", SHIPPED)}
    assert lines["training time"].hours and lines["training time"].hours * 60 == pytest.approx(40, rel=0.25)
    assert "$" in lines["GPU time"].value


def test_weights_gradients_and_moments_take_16_bytes_a_parameter():
    spec = SHIPPED.experiments["grpo_tcr_4b"]
    (line,) = [line for line in costs.costs("grpo_tcr_4b", SHIPPED) if line.part == "reinforcement memory"]
    sizes = dict(part.rsplit(" ", 1) for part in line.value.partition(": ")[2].split(", "))
    each = sum(float(sizes[name]) for name in ("weights", "gradients", "optimiser")) * 2**30
    total = each * costs.reinforcement(spec, shape("Qwen/Qwen3-4B")).shards
    assert total == pytest.approx(16 * 4.02e9, rel=0.01) and spec.rl.tuning == "full"


def test_samples_of_a_pass_are_a_tree_or_rows_where_layers_refuse_trees(tmp_path):
    write_spec(tmp_path, "experiments", "many", 'extends = "etpi_phase2"\n[rl]\ndevice_batch = 8\naccumulate = 8\n')
    spec = load_specs(tmp_path).experiments["many"]
    tree, rows = (costs.reinforcement(spec, shape(f"Qwen/{name}")) for name in ("Qwen3-4B", "Qwen3.6-27B"))
    assert (tree.length, rows.length) == (4096 + 8 * 12288, 8 * 16384) and (tree.tile is None, rows.tile) == (
        False,
        None,
    )
    faults = starts.faults(list(start_lines("many", load_specs(tmp_path)).values()))
    assert [fault.what for fault in faults] == ["reinforcement on 2 of 2 x 141 GB"]


def test_calls_of_paid_endpoints_are_counted_and_their_price_is_unknown():
    lines = {cost.part: cost for cost in costs.costs("tito_retokenised_v1", SHIPPED)}
    calls = lines["rollouts cooperbench_gemini_prompted"]
    assert calls.value == "at most 4,600 calls of gemini-3-pro" and calls.hours is None
    assert "rollouts cooperbench_gemini_prompted" in lines["GPU time"].formula


@pytest.mark.parametrize(("text", "agents"), [("$agent_id and ${partner}: $instruction", 2), ("$instruction", 1)])
def test_agents_of_an_own_prompt_are_counted(tmp_path, text, agents):
    write_spec(tmp_path, "experiments", "mine", 'extends = "plan_first_v5_tf"\n[evaluate.agent]\nprompt = "mine"\n')
    (folder := tmp_path / "prompts" / "mine").mkdir(parents=True)
    (folder / "user.md").write_text(text)
    formulas = [line.formula for line in costs.costs("mine", load_specs(tmp_path)) if line.part == "evaluation"]
    assert f"agents of a rollout: {agents};" in formulas[0]


def test_shipped_prompts_for_two_agents_are_those_of_the_suites_for_two():
    agents = [s.agent for s in SHIPPED.rollout_sets.values()]
    agents += [s.evaluate.agent for s in SHIPPED.experiments.values() if s.evaluate]
    assert all((costs._agents(agent) == 2) == agent.prompt.startswith("coop") for agent in agents)


def test_unknown_amounts_are_no_zeros():
    lines = {cost.part: cost for cost in costs.costs("plan_first_v5_responder", SHIPPED)}
    assert lines["evaluation"].hours is None and "evaluation" in lines["GPU time"].formula


def test_times_of_the_in_process_engine_are_below_the_measured_ones():
    """Output tokens a second on an H200 (bench/README.md): 1,616 of 0.135 B, and 79 of 4 B by 8 sequences."""
    assert costs.decoding("transformers", SMOL, 1616.0, 64)[0] == pytest.approx(1.0, rel=0.02)
    large = shape("Qwen/Qwen3-4B")
    assert 20 < (costs.decoding("transformers", large, 7900.0, 8)[0] or 0) < 100
    assert costs.decoding("transformers", large, 7900.0, 8)[0] == costs.decoding("transformers", SMOL, 7900.0, 8)[0]


@pytest.mark.parametrize("more", [{"num_experts": 128, "num_experts_per_tok": 8}, {"quantization_config": {}}])
def test_nothing_is_estimated_of_experts_and_quantised_weights(more, monkeypatch):
    monkeypatch.setattr(students, "configuration", lambda model: QWEN3_4B | more)
    costs.model_shape.cache_clear()
    try:
        total = costs.costs("etpi_phase1", SHIPPED)[-1]
        assert "student, its training and evaluation" in total.formula
        assert start_lines("etpi_phase1")["GPUs"].state == "not proved"
        assert costs.decoding("transformers", costs.model_shape("m"), 1.0, 8)[0] is None
    finally:
        costs.model_shape.cache_clear()


def test_time_of_a_harness_is_unknown(tmp_path):
    harness = 'kind = "agent"\n[harness]\nname = "codex"\nversion = "1"\nfolder = "/opt/codex"\n'
    write_spec(tmp_path, "rollout_sets", "by_codex", f'extends = "repo_fix_tiny_base"\n{harness}')
    write_spec(tmp_path, "experiments", "of_codex", 'extends = "plan_first_tiny"\nrollout_sets = ["by_codex"]\n')
    lines = {cost.part: cost for cost in costs.costs("of_codex", load_specs(tmp_path))}
    assert lines["rollouts by_codex"].hours is None and "rollouts by_codex" in lines["GPU time"].formula


def test_merged_sequences_make_the_steps_and_tasks_are_those_of_the_public_data():
    lines = {cost.part: cost for cost in costs.costs("tito_native_v4c", SHIPPED)}
    assert lines["training steps"].value == "80"  # 22 pairs of agents, 90 % of them, two epochs
    lines = {cost.part: cost for cost in costs.costs("etpi_phase1", SHIPPED)}
    assert "4,578 tasks x 4 " in lines["rollouts r2e_gym_lite_phase1"].formula
    hours = [cost.hours for cost in lines.values() if cost.hours is not None]
    assert len(hours) == len(lines) and sum(hours) > 2 * (lines["training time"].hours or 0)


@pytest.mark.parametrize(
    ("seeds", "checkpoints"), [([0], 1 + 4), ([0, 1], 2 * (1 + 4))]
)  # fine-tuned, and after steps 50, 100, 150 and 200 of reinforcement
def test_every_checkpoint_of_an_adapter_takes_the_disk_of_its_model(seeds, checkpoints, tmp_path):
    write_spec(tmp_path, "experiments", "seeded", f'extends = "etpi_phase2"\nseeds = {seeds}\n')
    (host,) = [cost for cost in costs.costs("seeded", load_specs(tmp_path)) if cost.part == "host"]
    disk = float(host.value.split(", ")[1].split()[0])
    assert disk == pytest.approx(53.79 * (1 + checkpoints), rel=0.01)


def test_servers_of_a_policy_share_its_rounds():
    lines = {cost.part: cost for cost in costs.costs("grpo_tcr_4b", SHIPPED)}
    # Two servers, each with half of the 32 rollouts of a step, read 8 GB of weights for each token.
    seconds = 1500 * 10_480 * 2 * 2 * 4.022e9 / costs.BANDWIDTH
    assert lines["reinforcement rollouts"].hours == pytest.approx(seconds / 3600, rel=0.01)


def test_linear_attention_keeps_no_keys():
    layers = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 9
    sizes = {"num_hidden_layers": 36, "head_dim": 128, "num_key_value_heads": 8, "layer_types": layers}
    hybrid = memory.shape_of({"model_type": "qwen3_5_text", **sizes})
    assert (hybrid.layers, hybrid.attention) == (36, 9)
    assert costs.cache_bytes(hybrid, 16384) == 2 * 9 * 1024 * 2 * 16384


# --- would it start? -------------------------------------------------------------------------------------------------


def start_lines(name: str, specs: Specs = SHIPPED, *, docker: bool = True) -> dict[str, starts.Start]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starts, "docker_answers", lambda: docker)
        return {line.what: line for line in starts.starts(name, specs, [Stage("tasks", "s", "passes", 1.0)], {})}


@pytest.mark.parametrize("name", [n for n, s in SHIPPED.experiments.items() if s.requires != "cpu"])
def test_every_full_size_experiment_fits_the_gpus_that_it_requires(name):
    lines = start_lines(name)
    assert starts.faults(list(lines.values())) == [], name
    assert all(line.why for line in lines.values())


def test_no_engine_for_a_suite_in_containers_is_a_fault_with_the_alternatives():
    lines = start_lines("etpi_phase1", docker=False)
    (fault,) = starts.faults(list(lines.values()))
    assert fault.what == "containers for r2e_gym_lite, swe_bench_verified"
    assert all(word in fault.why for word in ("podman", "DOCKER_HOST", "bubblewrap"))
    assert starts.faults(list(start_lines("plan_first_tiny", docker=False).values())) == []


def test_what_does_not_fit_or_asks_for_more_gpus_than_named_is_a_fault(tmp_path):
    (tmp_path / "experiments").mkdir()
    for name, number, size in (("few", 1, 141), ("small", 4, 24)):
        written = f'extends = "plan_first_9b"\nrequires = {{gpus = {number}, memory_gb = {size}}}\n'
        (tmp_path / "experiments" / f"{name}.toml").write_text(written)
    specs = load_specs(tmp_path)
    (few,) = starts.faults(list(start_lines("few", specs).values()))
    assert "this takes 4" in few.why
    small = starts.faults(list(start_lines("small", specs).values()))
    assert "of 23 GiB" in small[0].why
    unstated = start_lines("plan_first_v5_tf")["GPUs of training"]
    assert unstated.state == "not proved" and "; 1 of " in unstated.why


def test_gpu_of_a_teacher_that_etpi_serves_is_checked(tmp_path):
    write_spec(tmp_path, "experiments", "small", 'extends = "tito_native_v4c"\nrequires.memory_gb = 48\n')
    (fault,) = starts.faults(list(start_lines("small", load_specs(tmp_path)).values()))
    assert fault.what.startswith("teacher of cooperbench_qwen3_5_27b_prompted")


def test_servers_of_a_policy_need_all_gpus_of_their_tensor_parallelism(tmp_path):
    rl = 'placement = "apart"\nservers = 1\noptions = { tensor-parallel-size = 2 }\n'
    for name, number in (("few", 3), ("enough", 4)):
        required = f"requires.gpus = {number}\n"
        write_spec(tmp_path, "experiments", name, f'extends = "grpo_tcr_4b"\n{required}[rl]\n{rl}')
    specs = load_specs(tmp_path)
    enough = start_lines("enough", specs)
    assert not starts.faults(list(enough.values())) and "servers of the policy on 2 of 4 x 80 GB" in enough
    (few,) = starts.faults(list(start_lines("few", specs).values()))
    assert few.what == "reinforcement on 4 of 3 x 80 GB"


def test_first_stop_is_the_first_stage_that_would_block():
    passed = Stage("tasks", "s", "passes", 1.0)
    stopped = replace(passed, asset="tito_pairs", verdict="would block", blocks=(Finding("label_syntax", "no"),))
    assert first_stop([passed]) is None and first_stop([passed, stopped, stopped]) is stopped


def test_check_of_amounts_is_not_judged_at_a_small_size(tmp_path):
    accepted = {"passed": True, "blocking": False, "message": "no", "overridden": {"reason": REASON, "passed": False}}
    checks = [{"name": name, **accepted} for name in ("validation_rows", "label_syntax")]
    manifest: Any = SimpleNamespace(checks=checks)
    stage = judged(Rehearsal("full", tmp_path), Stage("upweighted_dataset", "full", "passes", 1.0), manifest)
    assert (stage.verdict, stage.blocks, stage.unjudged) == (
        "would block", (Finding("label_syntax", "no"),), ("validation_rows",),
    )  # fmt: skip


@pytest.mark.parametrize(("name", "undecided"), [("tito_retokenised_v1", True), ("tito_native_v1", False)])
def test_history_of_a_teacher_without_ids_is_not_judged_by_its_script(folder, name, undecided):
    small = shrink(name, SHIPPED, folder)
    check = {"name": "history_as_captured", "passed": False, "blocking": True, "message": "no"}
    manifest: Any = SimpleNamespace(checks=[check])
    stage = judged(small, Stage("tito_pairs", name, "passes", 1.0), manifest)
    assert (stage.unjudged == ("history_as_captured",)) is undecided and bool(stage.blocks) is not undecided


# --- shrunk settings agree with each other ------------------------------------------------------------------------


@st.composite
def reinforcements(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of [rl] that a valid spec may have."""
    group, batch, processes = draw(st.integers(2, 12)), draw(st.integers(1, 12)), draw(st.integers(1, 8))
    groups = draw(st.integers(1, 4))
    size = math.lcm(group, batch * processes) * groups
    steps = draw(st.integers(1, 2000))
    return {
        "group_size": group,
        "device_batch": batch,
        "processes": processes,
        "accumulate": size // (batch * processes),
        "steps": steps,
        "use_step": draw(st.none() | st.integers(2, steps)) if steps > 1 else None,
        "warmup_steps": draw(st.integers(0, steps)) if steps > 1 else 0,
        "save_steps": draw(st.none() | st.integers(1, steps)),
        "tasks": draw(st.none() | st.integers(size // group, 10_000)),
        "iterations": draw(st.integers(1, 4)),
        "engine": draw(st.sampled_from(["transformers", "vllm"])),
        "max_response_tokens": draw(st.integers(1, 32_768)),
    }


@given(settings=reinforcements(), shipped=st.sampled_from([s.rl for s in SHIPPED.experiments.values() if s.rl.suite]))
def test_shrunk_reinforcement_is_valid_and_its_used_step_has_a_learning_rate(folder, settings, shipped):
    plain = {"sharded": False, "repeatable": False, "options": {}}
    valid = RLSection.model_validate({**shipped.model_dump(), **plain, **settings})
    small = RLSection.model_validate(shrink_module._rl(valid.model_dump(mode="json"), Rehearsal("x", folder)))
    used = small.use_step or small.steps
    assert small.warmup_steps < used <= small.steps and small.last_step == used
    assert small.groups <= (small.tasks or 0) and small.round_size % small.group_size == 0
    assert small.group_size == valid.group_size and bool(small.use_step) == bool(valid.use_step)


@pytest.mark.parametrize(
    ("teacher", "named"),
    [
        ({"teacher": "checkpoint:0b1d"}, "checkpoint:0b1d"),
        (
            {"teacher_engine": {"kind": "vllm", "teacher": "t", "model": "big", "urls": ["http://gpu2:8000"]}},
            "http://gpu2:8000 that serves big",
        ),
    ],
)
def test_teacher_of_a_distillation_is_a_need_and_the_rehearsal_does_without_it(folder, teacher, named):
    section = {"method": "opd", "suite": "s", "agent": {"temperature": 1.0}, **teacher}
    dumped, small = RLSection.model_validate(section).model_dump(mode="json"), Rehearsal("x", folder)
    assert RLSection.model_validate(shrink_module._rl(dumped, small)).method == "grpo"
    assert any(named in need for needs in small.needs.values() for need in needs)


def test_first_step_of_a_warm_up_is_no_checkpoint_to_use():
    shipped = SHIPPED.experiments["terminal_grpo_0_8b"].rl.model_dump()
    for changed in ({"use_step": 1}, {"use_step": None, "steps": 1}):
        with pytest.raises(ValidationError, match="warmup_steps"):
            RLSection.model_validate({**shipped, **changed})
    RLSection.model_validate({**shipped, "use_step": 1, "schedule": "constant"})
