"""Parts of a rehearsal: small specs, stand-ins, the teacher's server, estimates."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from etpi.rehearsal import costs, memory, stand_ins, starts, students
from etpi.rehearsal.shrink import PREFIX, Machine, Rehearsal, shrink
from etpi.rehearsal.stages import Finding, Stage, first_stop
from etpi.rehearsal.teacher import TeacherServer
from etpi_assets.agent.actions import read_actions
from etpi_assets.agent.prompts import render_prompts
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import SpecError, Specs, load_shipped, load_specs
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import RejectedInput, Task
from etpi_resources.chat.format import load_chat_format
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from tests.support.graph import write_spec

CPU = Machine(docker=False, vllm=False)
SHIPPED = load_shipped()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rehearsals")


@pytest.fixture(autouse=True)
def _without_data(monkeypatch):
    monkeypatch.setattr(students, "hub_reachable", lambda: False)
    for name in ("COOPERBENCH", "R2E_GYM", "SWE_BENCH", "TERMINAL_BENCH", "OPEN_AGENTRL", "TRAJECTORIES"):
        monkeypatch.delenv(f"ETPI_{name}", raising=False)


def experiment(rehearsal: Rehearsal) -> ExperimentSpec:
    spec = load_specs(rehearsal.folder / "specs").get("experiment", rehearsal.experiment)
    assert isinstance(spec, ExperimentSpec)
    return spec


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED.experiments)
def test_every_shipped_experiment_has_small_specs_that_load(name, folder):
    spec, small = SHIPPED.experiments[name], shrink(name, SHIPPED, folder, CPU)
    written = experiment(small)
    assert written.requires == "cpu" and written.train.max_steps == 2 and len(written.seeds) == 1
    assert written.evaluate is None or written.evaluate.agent.max_steps <= 4
    for section in ("pairs", "select", "dataset", "metrics", "card"):
        assert getattr(written, section) == getattr(spec, section)
    assert (written.train.method, written.rl.method) == (spec.train.method, spec.rl.method)
    loaded = load_specs(small.folder / "specs")
    for set_name in ("suite", "rollout_set"):
        keys = SHIPPED.upstream_keys("experiment", name, set_name)
        assert loaded.upstream_keys("experiment", small.experiment, set_name) == [PREFIX + key for key in keys]
        for key in keys:
            loaded.get(set_name, PREFIX + key)
    if spec.base.kind == "hub":
        assert written.base.kind == "path" and any("weights of" in need.text for need in small.needs)


def test_replaced_parts_are_recorded_as_needs_of_their_asset(folder):
    needs = {(need.asset, need.key): need.text for need in shrink("tito_retokenised_v1", SHIPPED, folder, CPU).needs}
    assert "GEMINI_API_KEY" in needs["raw_rollouts", "cooperbench_gemini_prompted"]
    assert "vLLM" in needs["serving_probe", "tito_retokenised_v1"]
    assert "ETPI_COOPERBENCH" in needs["tasks", "cooperbench_pool_docker"]


def test_kernels_that_are_missing_are_needs(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("etpi.rehearsal.shrink.find_spec", lambda name: None)
    (tmp_path / "experiments").mkdir()
    text = 'title = "t"\nextends = "etpi_phase1"\n[train]\nlayer_kernels = "liger"\n'
    (tmp_path / "experiments" / "fused.toml").write_text(text)
    needs = " ".join(need.text for need in shrink("fused", load_specs(tmp_path), folder, CPU).needs)
    assert "for train.loss_kernel" in needs and "for train.layer_kernels" in needs


def test_trackers_that_are_missing_are_needs_and_a_rehearsal_reports_to_none(folder, tmp_path):
    (tmp_path / "experiments").mkdir()
    text = 'title = "t"\nextends = "plan_first_tiny"\n[train]\nreport_to = ["tensorboard", "mlflow"]\n'
    (tmp_path / "experiments" / "tracked.toml").write_text(text)
    small = shrink("tracked", load_specs(tmp_path), folder, CPU)
    named = [need.text for need in small.needs if "train.report_to" in need.text]
    assert [text.split(",")[0] for text in named] == [n for n in ("tensorboard", "mlflow") if not find_spec(n)]
    assert experiment(small).train.report_to == ()


def test_real_data_are_used_where_they_are(folder, tmp_path, monkeypatch):
    stand_ins.replace_suite("cooperbench", tmp_path / "all", {})
    shutil.copytree(tmp_path / "all" / "tasks", tmp_path / "data")
    monkeypatch.setenv("ETPI_COOPERBENCH", str(tmp_path / "data"))
    small = shrink("plan_first_v5_tf", SHIPPED, folder, CPU)
    suite = load_specs(small.folder / "specs").suites[f"{PREFIX}cooperbench_pool"]
    assert suite.params["path"] == "${ETPI_COOPERBENCH}"
    # Its evaluation needs containers, which are not here.
    assert small.stand_in_suites == {"cooperbench_two_pairs"}


def test_unknown_architecture_is_refused():
    with pytest.raises(SpecError, match="mamba"):
        students.architecture("state-spaces/mamba-3B", None)
    with pytest.raises(SpecError, match="mamba"):
        students.architecture("mamba", {"model_type": "mamba"})
    assert students.architecture("x", {"model_type": "qwen3_5_text"}) == "qwen3_5"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["cooperbench", "r2e", "swe_bench", "harbor", "answers"])
def test_stand_ins_are_valid_tasks_of_their_family(family, tmp_path):
    # Commands run as another user, who cannot enter the folders of pytest.
    folder = stand_ins.visible_folder(tmp_path)
    assert folder.is_relative_to(tempfile.gettempdir()) and not folder.is_relative_to(tmp_path)
    assert stand_ins.visible_folder(tmp_path) == folder
    sources = {"sources": ["deepscaler", "taco_code"], "per_source": 400, "unproven": True}
    params = sources if family == "answers" else {"sandbox": "docker"}
    suite = load_family(family)
    items = list(suite.load("stand_ins", 0, stand_ins.replace_suite(family, folder / "data", params)))
    tasks = [item for item in items if isinstance(item, Task)]
    assert len(tasks) == len(items) >= 3
    assert {task.split for task in tasks} >= ({"heldout"} if family not in ("answers",) else {"train"})
    proven = list(suite.validate([tasks[0], tasks[-1]], BubblewrapFactory()))
    shutil.rmtree(folder)
    assert not [item for item in proven if isinstance(item, RejectedInput)]


def test_stand_ins_are_the_same_every_time(tmp_path):
    rows = []
    for name in ("one", "two"):
        params = stand_ins.replace_suite("r2e", tmp_path / name, {})
        rows.append(Path(params["path"]).read_text())
    assert rows[0] == rows[1]


def test_family_without_stand_ins_is_named(tmp_path):
    with pytest.raises(SpecError, match="pypi_bugs"):
        stand_ins.replace_suite("pypi_bugs", tmp_path, {})


# --- the teacher -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> list[Task]:
    params = stand_ins.replace_suite("cooperbench", tmp_path_factory.mktemp("pairs"), {"sandbox": "docker"})
    return [item for item in load_family("cooperbench").load("pairs", 0, params) if isinstance(item, Task)]


def conversation(tasks: list[Task], kind: str) -> list[dict[str, Any]]:
    """The messages of an agent until it submits, as a client of the protocol sees them."""
    spec = load_shipped().rollout_sets[f"cooperbench_{kind}_prompted"]
    assert isinstance(spec, RolloutSetSpec)
    chat, family = load_chat_format("qwen3"), load_family("cooperbench")
    role = family.roles(tasks[0])[1]
    messages: list[dict[str, Any]] = list(render_prompts(spec.agent, tasks[0], role))
    with TeacherServer(spec, family, tasks, chat, port=0) as server:
        url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
        for _ in range(5):
            body = {"model": "m", "messages": messages, "tools": None}
            answer = httpx.post(url, json=body).json()
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": "done"})
        refused = httpx.post(url, json={"messages": [{"role": "user", "content": "another task"}]})
        assert refused.status_code == 400 and "no task" in refused.text
    return messages


@pytest.mark.parametrize("kind", ["gemini", "qwen3_8b"])
def test_teacher_plans_solves_and_submits_in_both_protocols(tasks, kind):
    messages = conversation(tasks, kind)
    turns = [message for message in messages if message["role"] == "assistant"]
    actions = [read_actions(turn["content"] or "", turn.get("tool_calls"))[0] for turn in turns]
    assert all(actions) and ("tool_calls" in turns[0]) == (kind == "gemini")
    assert actions[0][0].kind == "send_message" and actions[0][0].to == "agent1"
    commands = [action.command for (action, *_) in actions[1:]]
    assert commands[0].startswith("cat cargo/") and "deck.py" in commands[1]
    assert "COMPLETE_TASK" in commands[2] and commands[2] == commands[3]


def test_teacher_closes_an_open_think_block_and_fills_the_grammars_slots(tasks):
    spec = load_shipped().rollout_sets["r2e_gym_lite_phase1"]
    family = load_family("cooperbench")
    chat = load_chat_format("qwen3", "qwen3_6")
    server = TeacherServer(spec, family, tasks, chat, port=0)
    prompt = chat.prompt_ids(render_prompts(spec.agent, tasks[0], family.roles(tasks[0])[0]))
    assert chat.decode(prompt).endswith("<think>\n")
    (choice,) = server.answer("/v1/completions", {"prompt": prompt})["choices"]
    server.close()
    assert choice["text"].startswith("STATE: ") and choice["text"].count("</think>") == 1
    assert choice["token_ids"] == chat.ended(chat.encode(choice["text"]))


# --- estimates -------------------------------------------------------------------------------------------------------

QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "vocab_size": 151_936, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 9728, "tie_word_embeddings": True,
}  # fmt: skip
"""Sizes of Qwen3-4B's published configuration."""


def test_parameters_are_those_of_the_model():
    shape = memory.shape_of("Qwen/Qwen3-4B", QWEN3_4B)
    assert shape and shape.parameters == pytest.approx(4.022e9, rel=1e-3)  # model.safetensors.index.json: 8.04 GB, bf16
    estimated = memory.shape_of("Qwen/Qwen3-4B", None)
    assert estimated and estimated.parameters == 4e9 and estimated.hidden == pytest.approx(2560, rel=0.2)
    assert memory.shape_of("some/model", None) is None


def test_parameters_agree_with_a_model_that_is_built(folder):
    from transformers import AutoModelForCausalLM

    students.make_student(folder / "qwen3", "qwen3", "qwen3", None)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "qwen3")
    shape = memory.shape_of("small", json.loads((folder / "qwen3" / "config.json").read_text()))
    assert shape and shape.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=1e-3)


def test_adapter_has_the_published_size():
    """The report: 132 MB, for rank 32 of all linear modules of Qwen3-4B."""
    spec, shape = SHIPPED.experiments["plan_first_v5_tf"], memory.shape_of("", QWEN3_4B)
    assert shape and 2 * costs.supervised(spec).trained(shape) / 1e6 == pytest.approx(132, abs=0.5)


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
    shape = memory.shape_of("", QWEN3_4B)
    assert shape
    (line,) = [line for line in costs.costs("grpo_tcr_4b", SHIPPED) if line.part == "reinforcement memory"]
    sizes = dict(part.rsplit(" ", 1) for part in line.value.partition(": ")[2].split(", "))
    each = sum(float(sizes[name]) for name in ("weights", "gradients", "optimiser")) * 2**30
    total = each * costs.reinforcement(spec).shards
    assert total == pytest.approx(16 * 4e9, rel=0.01) and spec.rl.tuning == "full"


def test_calls_of_paid_endpoints_are_counted_and_their_price_is_unknown():
    lines = {cost.part: cost for cost in costs.costs("tito_retokenised_v1", SHIPPED)}
    calls = lines["rollouts cooperbench_gemini_prompted"]
    assert calls.value == "at most 4,600 calls of gemini-3-pro" and calls.hours is None
    assert "rollouts cooperbench_gemini_prompted" in lines["GPU time"].formula


def test_unknown_amounts_are_no_zeros():
    lines = {cost.part: cost for cost in costs.costs("plan_first_v5_responder", SHIPPED)}
    assert lines["evaluation"].hours is None and "evaluation" in lines["GPU time"].formula
    shape = memory.shape_of("", QWEN3_4B)
    large = memory.shape_of("Qwen/Qwen3.6-27B", None)
    assert costs.decoding("transformers", large, 1e6)[0] is None
    seconds, source = costs.decoding("transformers", shape, 7900.0)
    assert seconds == pytest.approx(100, rel=0.02) and "measured" in source


def test_time_of_a_harness_is_unknown(tmp_path):
    harness = 'kind = "agent"\n[harness]\nname = "codex"\nversion = "1"\nfolder = "/opt/codex"\n'
    write_spec(tmp_path, "rollout_sets", "by_codex", f'extends = "repo_fix_tiny_base"\n{harness}')
    write_spec(tmp_path, "experiments", "of_codex", 'extends = "plan_first_tiny"\nrollout_sets = ["by_codex"]\n')
    lines = {cost.part: cost for cost in costs.costs("of_codex", load_specs(tmp_path))}
    assert lines["rollouts by_codex"].hours is None and "rollouts by_codex" in lines["GPU time"].formula


def test_merged_sequences_make_the_steps_and_rollouts_are_at_least_the_published_ones():
    lines = {cost.part: cost for cost in costs.costs("tito_native_v4c", SHIPPED)}
    assert lines["training steps"].value == "80"  # 22 pairs of agents, 90 % of them, two epochs
    lines = {cost.part: cost for cost in costs.costs("etpi_phase1", SHIPPED)}
    assert "at least 318 tasks" in lines["rollouts r2e_gym_lite_phase1"].formula
    hours = [cost.hours for cost in lines.values() if cost.hours is not None]
    assert len(hours) == len(lines) and sum(hours) > 2 * (lines["training time"].hours or 0)


def test_linear_attention_keeps_no_keys():
    layers = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 9
    hybrid = memory.shape_of("", {**QWEN3_4B, "layer_types": layers})
    assert hybrid and (hybrid.layers, hybrid.attention) == (36, 9)
    assert costs.cache_bytes(hybrid, 16384) == 2 * 9 * 1024 * 2 * 16384


# --- would it start? -------------------------------------------------------------------------------------------------


def start_lines(name: str, machine: Machine = CPU, specs: Specs = SHIPPED) -> dict[str, starts.Start]:
    return {line.what: line for line in starts.starts(name, specs, [Stage("tasks", "s", "passes", 1.0)], machine)}


@pytest.mark.parametrize("name", [n for n, s in SHIPPED.experiments.items() if s.requires == "gpu"])
def test_every_full_size_experiment_fits_the_gpus_that_its_notes_name(name):
    lines = start_lines(name, Machine(docker=True, vllm=False))
    assert starts.faults(list(lines.values())) == [], name
    assert all(line.why for line in lines.values())


def test_no_engine_for_a_suite_in_containers_is_a_fault_with_the_alternatives():
    lines = start_lines("etpi_phase1")
    (fault,) = starts.faults(list(lines.values()))
    assert fault.what == "containers for r2e_gym_lite, swe_bench_verified"
    assert all(word in fault.why for word in ("podman", "DOCKER_HOST", "bubblewrap"))
    assert starts.faults(list(start_lines("plan_first_tiny").values())) == []


def test_what_does_not_fit_or_asks_for_more_gpus_than_named_is_a_fault(tmp_path):
    (tmp_path / "experiments").mkdir()
    text = 'extends = "plan_first_9b"\nnotes = "Needs NUMBER GPU of SIZE GB."\n'
    for name, number, size in (("few", "one", "141"), ("small", "four", "24")):
        written = text.replace("NUMBER", number).replace("SIZE", size)
        (tmp_path / "experiments" / f"{name}.toml").write_text(written)
    specs, machine = load_specs(tmp_path), Machine(docker=True, vllm=False)
    (few,) = starts.faults(list(start_lines("few", machine, specs).values()))
    assert "4 processes see one GPU each" in few.why
    small = starts.faults(list(start_lines("small", machine, specs).values()))
    assert "of 22 GiB" in small[0].why


def test_servers_of_a_policy_need_all_gpus_of_their_tensor_parallelism(tmp_path):
    rl = 'placement = "apart"\nservers = 1\noptions = { tensor-parallel-size = 2 }\n'
    for name, number in (("few", "three"), ("enough", "four")):
        notes = f'notes = "Needs {number} GPUs of 80 GB."\n'
        write_spec(tmp_path, "experiments", name, f'extends = "grpo_tcr_4b"\n{notes}[rl]\n{rl}')
    specs, machine = load_specs(tmp_path), Machine(docker=True, vllm=False)
    enough = start_lines("enough", machine, specs)
    assert not starts.faults(list(enough.values())) and "GPUs 2 to 3" in enough["servers of the policy"].why
    (few,) = starts.faults(list(start_lines("few", machine, specs).values()))
    assert few.what == "reinforcement on 3 GPUs"


def test_first_stop_is_the_first_stage_that_would_block():
    passed = Stage("tasks", "s", "passes", 1.0)
    stopped = replace(passed, asset="tito_pairs", verdict="would block", blocks=(Finding("label_syntax", "no"),))
    assert first_stop([passed]) is None and first_stop([passed, stopped, stopped]) is stopped
