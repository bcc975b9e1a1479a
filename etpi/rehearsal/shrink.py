"""Shrink an experiment and everything that it reads to a size that a CPU runs in minutes.

Methods, templates, parsers, checks and exports stay. Random models replace models, embedded worlds with scripted
policies replace absent data and teachers; each replacement is recorded as a need of the real run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import tomlkit

from etpi.rehearsal import students
from etpi_assets.resources import Resources
from etpi_assets.specs.check_names import OVERRIDABLE
from etpi_assets.specs.experiment import BaseSection, ExperimentSpec
from etpi_assets.specs.folders import FOLDERS
from etpi_assets.specs.load import SpecError, Specs, load_shipped
from etpi_assets.specs.paths import PathError, expand
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.specs.suite import SuiteSpec
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Task
from etpi_resources.chat.format import load_chat_format
from etpi_resources.checkpoints import HUB
from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.vllm_server import vllm_program
from etpi_resources.sandboxes import SandboxUnavailable
from etpi_resources.trainers.trackers import missing_trackers

PREFIX = "rehearsal_"
REASON = "rehearsal"
"""The reason of the overrides that let a rehearsal go on."""

TASKS, ROLLOUTS, STEPS, TURNS, OUTPUT = 4, 2, 2, 4, 64
"""Tasks of a rollout set, rollouts of each, optimiser steps, turns and output tokens of the random model."""

LONG_STEP, SHORT_STEP = 0.02, 1e-4
"""The least learning rate of a random model, and the largest of a tiny base, in supervised training."""

_LENGTH_REWARD = {"function": "conciseness_unhardened", "weight": 0.1, "params": {"free": 1, "scale": 4000}}
"""A random model earns the same reward in every rollout, which trains nothing; the lengths of its texts differ."""

_WORLD_TASKS = {"train": 24, "heldout": 24}
"""The size of an embedded world. All repositories of `coop_tiny_shared` share four file names, which are too large a
part (`heldout_names_unseen`) of the names of a few held-out tasks."""

WORLDS = {
    "cooperbench": "coop_tiny_shared",
    "r2e": "repo_fix_tiny",
    "swe_bench": "repo_fix_tiny",
    "harbor": "terminal_tiny",
    "answers": "arithmetic_tiny",
}
"""Family -> the embedded world that replaces its tasks; a suite and a scripted policy have its name too."""

_SKILLS = {
    "coop_tiny_shared": {"plan_first": 1.0, "follow_through": 1.0, "verbose_think": 0.0, "wrong_edit": 0.0},
    "repo_fix_tiny": {"compact": 1.0},
}
"""World -> the skill of the policy that replaces a teacher: plans, and thoughts in the slots of a grammar."""


@dataclass
class Rehearsal:
    """The small specs of an experiment, as written.

    Attributes:
        name: the real experiment.
        folder: everything of the rehearsal: specs, models, the lake.
        needs: (asset, real spec) -> the needs of the real run that the rehearsal replaced.
        worlds: suites that an embedded world replaces, with its name.
        scripted: whether a teacher, or recorded runs, are replaced.
    """

    name: str
    folder: Path
    specs: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    needs: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    worlds: dict[str, str] = field(default_factory=dict)
    scripted: bool = False

    def need(self, asset: str, text: str, key: str | None = None) -> None:
        """Record a need, once. `key`: the real spec; None: the experiment."""
        texts = self.needs.setdefault((asset, key or self.name), [])
        texts += [] if text in texts else [text]


@dataclass(frozen=True)
class Machine:
    """The programs that this machine offers: Docker's API, and vLLM."""

    docker: bool
    vllm: bool


def this_machine() -> Machine:
    """Return the programs of this machine."""
    try:
        vllm_program()
        vllm = True
    except EngineUnavailable:
        vllm = False
    return Machine(docker_answers(), vllm)


def docker_answers() -> bool:
    """Return whether a container engine answers here."""
    try:
        Resources().sandboxes("docker").check()
    except SandboxUnavailable:
        return False
    return True


def shrink(name: str, specs: Specs, folder: Path, machine: Machine) -> Rehearsal:
    """Write the small specs of an experiment and all that it reads into `folder`/specs.

    Raises:
        SpecError: a spec is unknown or invalid, or its architecture or family cannot be rehearsed.
    """
    spec = specs.get("experiment", name)
    assert isinstance(spec, ExperimentSpec)
    small = Rehearsal(name, folder.resolve())
    sets = [specs.get("rollout_set", key) for key in spec.rollout_sets]
    taught = {s.suite for s in sets if isinstance(s, RolloutSetSpec) and _by_a_model(s)}
    for suite in specs.upstream_keys("experiment", name, "suite"):
        _suite(suite, specs, small, machine, taught=suite in taught)
    for rollout_set in spec.rollout_sets:
        _rollout_set(rollout_set, specs, small, machine)
    _experiment(spec, small, machine)
    _write(small)
    return small


# --- suites ----------------------------------------------------------------------------------------------------------


def _suite(name: str, specs: Specs, small: Rehearsal, machine: Machine, *, taught: bool) -> None:
    """Add a suite. Args: taught: a model rolls out its tasks, which a scripted policy of a world replaces."""
    spec = specs.get("suite", name)
    assert isinstance(spec, SuiteSpec)
    family = load_family(spec.family)
    values, params = _dumped(spec), {key: value for key, value in spec.params.items() if value is not None}
    container = family.sandbox(params) == "docker"
    if container:
        small.need("tasks", "Docker, and the images of its tasks", name)
    missing = _missing(params["path"]) if "path" in params else ""
    if missing:
        small.need("tasks", f"its data: {missing}", name)
    if missing or taught or (container and not machine.docker):
        if (world := WORLDS.get(spec.family, spec.family if "path" not in params else "")) == "":
            raise SpecError(f"suite {name}: no embedded world replaces tasks of the family {spec.family!r}")
        if world != spec.family:
            small.worlds[name] = world
            values |= load_shipped().get("suite", world).model_dump(mode="json", include={"family", "seed", "params"})
            params = values["params"]
    elif "path" in params:
        params |= _few_tasks(name, spec, params)
    params |= {key: min(value, _WORLD_TASKS[key]) for key, value in params.items() if key in _WORLD_TASKS}
    small.specs["suite", PREFIX + name] = {**values, "params": params}


def _missing(path: object) -> str:
    """Return why the path cannot be read, or ""."""
    try:
        return "" if expand(str(path)).exists() else f"{path} does not exist"
    except PathError as error:
        return str(error).partition(";")[0]


def _few_tasks(name: str, spec: SuiteSpec, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the params that restrict real data to a few tasks of each split, where proving all takes long."""
    family = load_family(spec.family)
    if family.sandbox(dict(params)) is None:
        return {}
    if params.get("per_source"):
        return {"per_source": 2}
    tasks = [item for item in family.load(name, spec.seed, params) if isinstance(item, Task)]
    few = [task for split in ("train", "heldout") for task in islice((t for t in tasks if t.split == split), TASKS - 1)]
    if spec.family == "cooperbench":
        return {"pairs": [task.task_id for task in few]}
    if spec.family == "harbor":
        return {"tasks": [task.task_id for task in few]}
    return {"rows": TASKS}


# --- rollout sets ----------------------------------------------------------------------------------------------------


def _by_a_model(spec: RolloutSetSpec) -> bool:
    """Return whether a model rolls out the set that no rehearsal can run."""
    return spec.engine is not None and spec.engine.kind in ("vllm", "openai", "transformers") and not spec.engine.tiny


def _rollout_set(name: str, specs: Specs, small: Rehearsal, machine: Machine) -> None:
    spec = specs.get("rollout_set", name)
    assert isinstance(spec, RolloutSetSpec)
    values = _dumped(spec)
    if spec.suite is not None:
        values["suite"] = PREFIX + spec.suite
    values["tasks"] = min(spec.tasks or TASKS, _few(spec))
    values["k"] = min(spec.k, ROLLOUTS)
    values["agent"] = _agent(values["agent"], small)
    values["sandbox"] = _sandbox(spec.sandbox, spec.suite, small, machine)
    if spec.kind == "imported":
        _imported(name, spec, values, small)
    if _by_a_model(spec):
        world = small.worlds.get(str(spec.suite), "")
        values |= {"kind": "live", "harness": None, "engine": _teacher(name, spec, world, small)}
        values["agent"] |= {"grammar": None, "harness": None}
    small.specs["rollout_set", PREFIX + name] = values


def _few(spec: RolloutSetSpec) -> int:
    """Return the number of tasks: more where turns cost nothing."""
    return TASKS if spec.engine is None or spec.engine.kind != "scripted" else 6 * TASKS


def _imported(name: str, spec: RolloutSetSpec, values: dict[str, Any], small: Rehearsal) -> None:
    if tokenizer := spec.options.get("tokenizer"):
        values["options"] = {**values["options"], "tokenizer": _chat_format(str(tokenizer), small)}
    if missing := _missing(spec.path):
        small.need("raw_rollouts", f"its runs: {missing}", name)
        small.scripted = True
        if spec.format == "messages":
            values["path"] = str(file := small.folder / f"{name}.jsonl")
            small.folder.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(_conversation(number)) + "\n" for number in range(8)), encoding="utf-8")


def _conversation(number: int) -> dict[str, Any]:
    """Return a row of chat messages with two calls of code_interpreter and an answer."""
    messages: list[dict[str, str]] = [{"role": "user", "content": f"What is {number + 3} times 17, plus {number}?"}]
    value = (number + 3) * 17
    for code, printed in ((f"print({number + 3} * 17)", value), (f"print({value} + {number})", value + number)):
        call = json.dumps({"name": "code_interpreter", "arguments": {"code": code}})
        messages.append({"role": "assistant", "content": f"I compute it.\n<tool_call>\n{call}\n</tool_call>"})
        messages.append({"role": "tool", "content": f"{printed}\n"})
    messages.append({"role": "assistant", "content": f"The result is \\boxed{{{value + number}}}."})
    return {"messages": messages}


def _teacher(name: str, spec: RolloutSetSpec, world: str, small: Rehearsal) -> dict[str, Any]:
    """Return the engine section of the scripted policy that acts instead of a model."""
    engine = spec.engine
    assert engine is not None
    small.scripted = True
    if engine.api_key_env:
        small.need("raw_rollouts", f"the key {engine.api_key_env} and the endpoint {', '.join(engine.urls)}", name)
    elif engine.urls:
        small.need("raw_rollouts", f"the servers {', '.join(engine.urls)} with {engine.model}", name)
    else:
        small.need("raw_rollouts", f"a GPU that serves {engine.model}", name)
    return {"kind": "scripted", "teacher": engine.teacher, "skill": _SKILLS.get(world, {})}


# --- the experiment --------------------------------------------------------------------------------------------------


def _experiment(spec: ExperimentSpec, small: Rehearsal, machine: Machine) -> None:
    values = _dumped(spec)
    values |= {
        "title": f"Rehearsal: {spec.title}",
        "rollout_sets": [PREFIX + rollout_set for rollout_set in spec.rollout_sets],
        "seeds": [spec.seeds[0]],
        "requires": "cpu",
        "base": _base(spec, small),
        "train": _train(values["train"], spec, small),
        "serving": _serving(spec, small, machine),
        "probe": {**values["probe"], "prompts": 2},
    }
    if spec.requires == "gpu":
        small.need("sft_checkpoint", "a GPU (`requires`)")
    if spec.rl.method != "none":
        values["rl"] = _rl(values["rl"], small, machine)
    if spec.evaluate is not None:
        values["evaluate"] = _evaluate(values["evaluate"], small)
    values["gates"]["override"] = {**dict.fromkeys(OVERRIDABLE, REASON), **spec.gates.override}
    small.specs["experiment", PREFIX + small.name] = values


def model_name(base: BaseSection) -> str:
    """Return the base as models are named elsewhere: hub:REPO@COMMIT, package:NAME==VERSION@SHA256, or a folder."""
    match base.kind:
        case "hub":
            return f"{HUB}{base.repo}@{base.revision}"
        case "package":
            return base.name_in_package
    return str(base.path)


def _base(spec: ExperimentSpec, small: Rehearsal) -> dict[str, Any]:
    base = _dumped(spec.base)
    if spec.base.kind in ("tiny", "none"):
        chat = {key: _chat_format(base[key], small) for key in ("tokenizer", "chat_template")}
        return base if spec.base.kind == "tiny" else {**base, **chat}
    model = model_name(spec.base)
    if spec.base.kind != "package":
        small.need("base_checkpoint", f"the weights of {model.removeprefix(HUB).partition('@')[0]}")
    kind = students.architecture(model)
    tokenizer = _chat_format(spec.base.tokenizer, small)
    template = _chat_format(spec.base.chat_template, small)
    folder = small.folder / "students" / kind
    sha256 = students.make_student(folder, kind, tokenizer, template)
    named = {"kind": "path", "path": str(folder), "sha256": sha256, "tokenizer": tokenizer, "chat_template": template}
    return {**base, **dict.fromkeys(("repo", "revision", "package")), **named}


def _chat_format(name: str, small: Rehearsal) -> str:
    """Return the name of an available chat format or template: itself, or the folder that replaces it."""
    if students.tokenizer_here(name):
        return name
    repo = name.removeprefix(HUB).partition("@")[0]
    small.need("base_checkpoint", f"the tokenizer and template of {repo}; Qwen3's vocabulary replaces it")
    kind = students.architecture(name)
    folder = small.folder / "tokenizers" / kind
    if not (folder / "tokenizer.json").is_file():
        load_chat_format("qwen3", "qwen3_6" if kind == "qwen3_5_text" else "qwen3").save(folder)
    return str(folder)


def _agent(agent: dict[str, Any], small: Rehearsal, *, short: bool = False) -> dict[str, Any]:
    """Return an agent section; `short`: with budgets for a model that never ends."""
    values = {**agent, "tokenizer": _chat_format(agent["tokenizer"], small)}
    if short:
        values |= {"max_steps": min(agent["max_steps"], TURNS), "max_tokens": min(agent["max_tokens"], OUTPUT)}
    return values


def _train(train: dict[str, Any], spec: ExperimentSpec, small: Rehearsal) -> dict[str, Any]:
    base = spec.base.kind
    # Two steps lower the loss on other rows too if they are long for a random model, and short for a trained one.
    rate = train["learning_rate"]
    if rate:
        rate = min(rate, SHORT_STEP) if base == "tiny" else max(rate, LONG_STEP)
    values = {
        **train,
        "optimizer": _optimizer(train["optimizer"], "sft_checkpoint", small),
        "max_steps": STEPS,
        "learning_rate": rate,
        "schedule": "constant",
        "warmup_ratio": 0.0,
    }
    kernels = [option for option in ("loss_kernel", "layer_kernels") if train.get(option) == "liger"]
    if kernels and not find_spec("liger_kernel"):
        small.need("sft_checkpoint", f"liger-kernel, for train.{', train.'.join(kernels)} (pip install 'etpi[gpu]')")
    if spec.base.kind == "hub" and students.is_hybrid(model_name(spec.base)) and not find_spec("fla"):
        small.need("sft_checkpoint", "flash-linear-attention (pip install 'etpi[gpu]'); training is slow without it")
    for name in missing_trackers(spec.train.report_to):
        small.need("sft_checkpoint", f"{name}, for train.report_to (pip install {name})")
    if train.get("use_epoch") is not None or train.get("use_step") is not None:
        values |= {"use_epoch": None, "use_step": 1, "save_steps": 1}
    elif train.get("save_steps"):
        values["save_steps"] = 1
    return values


def _optimizer(name: str, asset: str, small: Rehearsal) -> str:
    """Return the optimiser, or the one that replaces an optimiser of bitsandbytes where that is not installed."""
    if not any(part in name for part in ("8bit", "paged", "bnb")) or find_spec("bitsandbytes"):
        return name
    small.need(asset, f"bitsandbytes, for the optimiser {name} (pip install 'etpi[gpu]')")
    return "adamw_torch"


def _serving(spec: ExperimentSpec, small: Rehearsal, machine: Machine) -> dict[str, Any]:
    suite = None if spec.evaluate is None else spec.evaluate.suite
    values = {**_dumped(spec.serving), "sandbox": _sandbox(spec.serving.sandbox, suite, small, machine)}
    if spec.serving.engine == "vllm" and not machine.vllm:
        small.need("serving_probe", "vLLM (make vllm); the in-process engine serves here")
        values |= {"engine": "transformers", "options": {}}
    return values


def _sandbox(kind: str, suite: str | None, small: Rehearsal, machine: Machine) -> str:
    """Return the kind of sandbox; embedded worlds have no images."""
    return "bubblewrap" if suite in small.worlds or not machine.docker else kind


_WITHOUT_VLLM = {
    "engine": "transformers",
    "options": {},
    "servers": 1,
    "placement": "apart",
    "processes": 1,
    "sharded": False,
    "correction": "none",
}
"""Settings of [rl] that only servers have, as the in-process engine takes them."""


def _rl(rl: dict[str, Any], small: Rehearsal, machine: Machine) -> dict[str, Any]:
    group = rl["group_size"]
    device_batch = min(rl["device_batch"], group)
    while group % device_batch:
        device_batch -= 1
    values = {
        **rl,
        "suite": PREFIX + rl["suite"],
        "tasks": 2,
        "agent": _agent(rl["agent"], small, short=True),
        "sandbox": _sandbox(rl["sandbox"], rl["suite"], small, machine),
        "device_batch": device_batch,
        "accumulate": group // device_batch,
        "optimizer": _optimizer(rl["optimizer"], "rl_checkpoint", small),
        "steps": STEPS,
        "rewards": [*rl["rewards"], _LENGTH_REWARD],
        "warmup_steps": min(rl["warmup_steps"], 1),
        "max_response_tokens": min(rl["max_response_tokens"], 4 * OUTPUT),
        "save_steps": 1 if rl.get("save_steps") else None,
    }
    if rl.get("use_step") is not None:
        values["use_step"] = 1
    if rl.get("engine") == "vllm" and not machine.vllm:
        one = "; its processes are one, which shards nothing" if rl.get("sharded") else ""
        small.need("rl_checkpoint", f"vLLM (make vllm); the in-process engine rolls out here{one}")
        values |= _WITHOUT_VLLM
    return values


def _evaluate(evaluate: dict[str, Any], small: Rehearsal) -> dict[str, Any]:
    agent = _agent(evaluate["agent"], small, short=True)
    # A budget that equals the agent's would be the same condition twice.
    budgets = [{**budget, "max_steps": TURNS + 1 + number} for number, budget in enumerate(evaluate["budgets"])]
    return {
        **evaluate,
        "suite": PREFIX + evaluate["suite"],
        "tasks": 2,
        "sample_seeds": evaluate["sample_seeds"][:1],
        "budgets": budgets,
        "agent": agent,
    }


# --- writing ---------------------------------------------------------------------------------------------------------


def _dumped(spec: Any) -> dict[str, Any]:
    return spec.model_dump(mode="json", by_alias=False)


def _write(small: Rehearsal) -> None:
    root = small.folder / "specs"
    shutil.rmtree(root, ignore_errors=True)
    for (set_name, name), values in small.specs.items():
        file = root / FOLDERS[set_name] / f"{name}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(tomlkit.dumps(_toml(values)), encoding="utf-8")


def _toml(value: Any) -> Any:
    """Return a resolved value with null as the word "none", which TOML can hold."""
    if isinstance(value, Mapping):
        return {key: _toml(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_toml(item) for item in value]
    return "none" if value is None else value
