"""Shrink an experiment and everything that it reads to a size that a CPU runs in minutes.

Methods, templates, parsers, checks and exports stay. Random models replace models, a server of reference solutions
replaces teachers, and stand-ins of the same form replace absent data; each replacement is recorded as a need of the
real run.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import tomlkit

from etpi.rehearsal import stand_ins, students
from etpi.rehearsal.memory import HYBRID
from etpi_assets.resources import Resources
from etpi_assets.specs.check_names import OVERRIDABLE
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.folders import FOLDERS
from etpi_assets.specs.load import Specs
from etpi_assets.specs.paths import PathError, expand
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.specs.suite import SuiteSpec
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Task
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.vllm_server import vllm_program
from etpi_resources.packages import package_folder
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

_BITSANDBYTES = ("8bit", "paged", "bnb")
"""Parts of names of optimisers that bitsandbytes implements."""

_WORLD_TASKS = {"train": 24, "heldout": 24}
"""The size of an embedded world. All repositories of `coop_tiny_shared` share four file names, which are too large a
part (`heldout_names_unseen`) of the names of a few held-out tasks."""


@dataclass(frozen=True)
class Need:
    """A need of the real run that the rehearsal replaced, with the asset and the real spec."""

    asset: str
    key: str
    text: str


@dataclass
class Rehearsal:
    """The small specs of an experiment, as written.

    Attributes:
        name: the real experiment.
        folder: everything of the rehearsal: specs, models, stand-ins, the lake.
        served: rollout sets whose teacher the rehearsal serves, by name, with the port.
        stand_in_suites: suites whose tasks are stand-ins.
        stand_in_teacher: whether a teacher, or recorded runs, are stand-ins.
    """

    name: str
    folder: Path
    specs: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    needs: list[Need] = field(default_factory=list)
    served: dict[str, int] = field(default_factory=dict)
    stand_in_suites: set[str] = field(default_factory=set)
    stand_in_teacher: bool = False

    @property
    def experiment(self) -> str:
        """The name of the small experiment."""
        return PREFIX + self.name

    def need(self, asset: str, text: str, key: str | None = None) -> None:
        """Record a need, once. `key`: the real spec; None: the experiment."""
        need = Need(asset, self.name if key is None else key, text)
        if need not in self.needs:
            self.needs.append(need)


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
    for suite in specs.upstream_keys("experiment", name, "suite"):
        _suite(suite, specs, small, machine)
    for rollout_set in spec.rollout_sets:
        _rollout_set(rollout_set, specs, small, machine)
    _experiment(spec, small, machine)
    _write(small)
    return small


# --- suites ----------------------------------------------------------------------------------------------------------


def _suite(name: str, specs: Specs, small: Rehearsal, machine: Machine) -> None:
    spec = specs.get("suite", name)
    assert isinstance(spec, SuiteSpec)
    family = load_family(spec.family)
    params = {key: value for key, value in spec.params.items() if value is not None}
    container = family.sandbox(params) == "docker"
    if container:
        small.need("tasks", "Docker, and the images of its tasks", name)
    if "path" not in params:
        params |= {key: min(value, _WORLD_TASKS[key]) for key, value in params.items() if key in _WORLD_TASKS}
    elif (missing := _missing(params["path"])) or (container and not machine.docker):
        if missing:
            small.need("tasks", f"its data: {missing}", name)
        params = stand_ins.replace_suite(spec.family, stand_ins.visible_folder(small.folder) / name, params)
        small.stand_in_suites.add(name)
    else:
        params |= _few_tasks(name, spec, params)
    small.specs["suite", PREFIX + name] = {**_dumped(spec), "params": params}


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
    if spec.engine is not None and spec.engine.kind in ("vllm", "openai", "transformers") and not spec.engine.tiny:
        values["engine"] = _teacher(name, spec, small)
    small.specs["rollout_set", PREFIX + name] = values


def _few(spec: RolloutSetSpec) -> int:
    """Return the number of tasks: more where turns cost nothing."""
    return TASKS if spec.engine is None or spec.engine.kind != "scripted" else 6 * TASKS


def _imported(name: str, spec: RolloutSetSpec, values: dict[str, Any], small: Rehearsal) -> None:
    if tokenizer := spec.options.get("tokenizer"):
        values["options"] = {**values["options"], "tokenizer": _chat_format(str(tokenizer), small)}
    missing = _missing(spec.path)
    if not missing:
        return
    small.need("raw_rollouts", f"its runs: {missing}", name)
    if file := stand_ins.replace_runs(spec.format, small.folder / "stand_ins" / name):
        values["path"] = str(file)
        small.stand_in_teacher = True


def _teacher(name: str, spec: RolloutSetSpec, small: Rehearsal) -> dict[str, Any]:
    """Return the engine section that asks the rehearsal's own server."""
    engine = spec.engine
    assert engine is not None
    small.stand_in_teacher = True
    if engine.api_key_env:
        small.need("raw_rollouts", f"the key {engine.api_key_env} and the endpoint {', '.join(engine.urls)}", name)
    elif engine.urls:
        small.need("raw_rollouts", f"the servers {', '.join(engine.urls)} with {engine.model}", name)
    else:
        small.need("raw_rollouts", f"a GPU that serves {engine.model}", name)
    small.served[name] = port = 20000 + zlib.crc32(f"{small.folder}/{name}".encode()) % 20000
    url = f"http://127.0.0.1:{port}"
    values = engine.model_dump(mode="json")
    if engine.kind == "openai":
        return {**values, "urls": [f"{url}/v1"], "api_key_env": None}
    return {**values, "kind": "vllm", "urls": [url], "options": {}, "sha256": None, "api_key_env": None}


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
    small.specs["experiment", small.experiment] = values


def _base(spec: ExperimentSpec, small: Rehearsal) -> dict[str, Any]:
    base = _dumped(spec.base)
    if spec.base.kind in ("tiny", "none"):
        chat = {key: _chat_format(base[key], small) for key in ("tokenizer", "chat_template")}
        return base if spec.base.kind == "tiny" else {**base, **chat}
    model = spec.base.repo or str(spec.base.path)
    if spec.base.kind == "package":
        model = str(package_folder(spec.base.name_in_package))
    if spec.base.kind == "hub":
        small.need("base_checkpoint", f"the weights of {model}")
        config = students.published_config(model, str(spec.base.revision))
    else:
        file = expand(model) / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        if config is None:
            small.need("base_checkpoint", f"the folder {model}")
    kind = students.architecture(model, config)
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
    repo = name.removeprefix(students.HUB).partition("@")[0]
    small.need("base_checkpoint", f"the tokenizer and template of {repo}; Qwen3's vocabulary stands in")
    kind = students.architecture(repo, None)
    folder = small.folder / "tokenizers" / kind
    if not (folder / "tokenizer.json").is_file():
        load_chat_format("qwen3", students.stand_in_template(kind)).save(folder)
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
    for option in ("loss_kernel", "layer_kernels"):
        if train.get(option) == "liger" and not find_spec("liger_kernel"):
            small.need(
                "sft_checkpoint",
                f"liger-kernel, for train.{option} (pip install 'etpi[gpu]'); the same is computed without it here",
            )
    if HYBRID.search(str(spec.base.repo)) and not find_spec("fla"):
        small.need(
            "sft_checkpoint",
            "flash-linear-attention (pip install 'etpi[gpu]'); without it linear attention is plain PyTorch, and slow",
        )
    for name in missing_trackers(spec.train.report_to):
        small.need("sft_checkpoint", f"{name}, for train.report_to (pip install {name}); a rehearsal reports nothing")
    if train.get("use_epoch") is not None or train.get("use_step") is not None:
        values |= {"use_epoch": None, "use_step": 1, "save_steps": 1}
    elif train.get("save_steps"):
        values["save_steps"] = 1
    return values


def _optimizer(name: str, asset: str, small: Rehearsal) -> str:
    """Return the optimiser, or the one that replaces an optimiser of bitsandbytes where that is not installed."""
    if not any(part in name for part in _BITSANDBYTES) or find_spec("bitsandbytes"):
        return name
    small.need(asset, f"bitsandbytes, for the optimiser {name} (pip install 'etpi[gpu]'); adamw_torch trains here")
    return "adamw_torch"


def _serving(spec: ExperimentSpec, small: Rehearsal, machine: Machine) -> dict[str, Any]:
    suite = None if spec.evaluate is None else spec.evaluate.suite
    values = {**_dumped(spec.serving), "sandbox": _sandbox(spec.serving.sandbox, suite, small, machine)}
    if spec.serving.engine == "vllm" and not machine.vllm:
        # The stand-in enforces no grammar.
        grammar = spec.evaluate is not None and spec.evaluate.agent.grammar is not None
        server = "the transformers engine" if grammar else "a stand-in that speaks its protocol"
        small.need("serving_probe", f"vLLM (make vllm); {server} serves here")
        values |= {"engine": "transformers", "options": {}} if grammar else {}
    return values


def _sandbox(kind: str, suite: str | None, small: Rehearsal, machine: Machine) -> str:
    """Return the kind of sandbox; stand-ins have no images."""
    return "bubblewrap" if suite in small.stand_in_suites or not machine.docker else kind


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
        small.need("rl_checkpoint", "vLLM (make vllm); a stand-in that speaks its protocol rolls out here")
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
