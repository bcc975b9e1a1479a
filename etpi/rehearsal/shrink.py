"""Shrink an experiment and everything that it reads to a size that a CPU runs in minutes.

Methods, templates, parsers, checks and exports stay. Random models replace models, embedded worlds with scripted
policies replace absent data and teachers; each replacement is recorded as a need of the real run.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomlkit

from etpi.rehearsal import students
from etpi_assets.checks import OVERRIDABLE
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.folders import FOLDERS
from etpi_assets.specs.load import SpecError, Specs, load_shipped
from etpi_assets.specs.paths import PathError, expand
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.specs.section import PARSED_AGAIN
from etpi_assets.specs.training import RLSection
from etpi_assets.tasks.families import load_family
from etpi_resources.chat.format import load_chat_format
from etpi_resources.checkpoints import HUB

PREFIX = "rehearsal_"
REASON = "rehearsal"
"""The reason of the overrides that let a rehearsal go on."""

TASKS, ROLLOUTS, STEPS, TURNS, OUTPUT = 4, 2, 2, 4, 64
"""Tasks of a rollout set, rollouts of each, optimiser steps, turns and output tokens of the random model."""

LONG_STEPS, SHORT_STEP = {"full": 0.02, "lora": 0.005}, 1e-4
"""The least learning rates of a random model and of its adapter, and the largest of a tiny base, in fine-tuning."""

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
"""Family -> the embedded world that replaces its tasks, and those of families that are built on it; a suite and a
scripted policy have its name too."""

_SKILLS = {
    "coop_tiny_shared": {"plan_first": 1.0, "follow_through": 1.0, "verbose_think": 0.0, "wrong_edit": 0.0},
    "repo_fix_tiny": {"compact": 1.0},
}
"""World -> the skill of the policy that replaces a teacher: plans, and thoughts in the slots of a grammar."""

_OF_SIZE = (
    "format_exposure", "turn_loss_share", "role_balance", "validation_rows", "differs_from_base", "first_turn_parses",
)  # fmt: skip
"""Checks of amounts and of a trained model's behaviour."""
_OF_TEACHER = ("teacher_gate", "plan_paths_in_task")
_OF_TASKS = ("plan_paths_in_task", "prompt_length_ratio", "template_distance")


@dataclass
class Rehearsal:
    """The small specs of an experiment, as written.

    Attributes:
        name: the real experiment.
        folder: everything of the rehearsal: specs, models, the lake.
        needs: "ASSET of SPEC" -> the needs of the real run that the rehearsal replaced.
        worlds: suites that an embedded world replaces, with its name.
        undecided: checks whose failure says nothing: its cause is the rehearsal's size or a replacement.
    """

    name: str
    folder: Path
    needs: dict[str, list[str]] = field(default_factory=dict)
    worlds: dict[str, str] = field(default_factory=dict)
    undecided: set[str] = field(default_factory=lambda: {*_OF_SIZE})

    def write(self, set_name: str, name: str, values: Mapping[str, Any]) -> None:
        """Write a small spec. Args: name: the real one's. values: null is written as "none", since TOML has no null."""
        file = self.folder / "specs" / FOLDERS[set_name] / f"{PREFIX}{name}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(tomlkit.dumps(_toml(values)), encoding="utf-8")

    def need(self, asset: str, text: str, key: str | None = None) -> None:
        """Record a need, once. `key`: the real spec; None: the experiment."""
        texts = self.needs.setdefault(f"{asset} of {key or self.name}", [])
        texts += [] if text in texts else [text]


def shrink(name: str, specs: Specs, folder: Path) -> Rehearsal:
    """Write the small specs of an experiment and all that it reads into `folder`/specs.

    Raises SpecError: a spec is unknown or invalid, or its architecture or family cannot be rehearsed.
    """
    spec = specs.get("experiment", name)
    small = Rehearsal(name, folder.resolve())
    shutil.rmtree(small.folder / "specs", ignore_errors=True)
    sets = [specs.get("rollout_set", key) for key in spec.rollout_sets]
    taught = {s.suite for s in sets if _by_a_model(s)}
    for suite in specs.upstream_keys("experiment", name, "suite"):
        _suite(suite, specs, small, taught=suite in taught)
    for rollout_set in spec.rollout_sets:
        _rollout_set(rollout_set, specs, small)
    _experiment(spec, small)
    return small


# --- suites ----------------------------------------------------------------------------------------------------------


def _suite(name: str, specs: Specs, small: Rehearsal, *, taught: bool) -> None:
    """Add a suite. Args: taught: a model rolls out its tasks, which a scripted policy of a world replaces."""
    spec = specs.get("suite", name)
    family = load_family(spec.family)
    values, params = _dumped(spec), {key: value for key, value in spec.params.items() if value is not None}
    sandbox, missing = "path" in params and family.sandbox(params), _missing(params.get("path"))
    if missing:
        small.need("tasks", f"its data: {missing}", name)
    if sandbox:
        images = " and images" if sandbox == "docker" else ""
        small.need("tasks", f"its own tasks{images}, which `etpi run {name}` tries without a GPU", name)
    if missing or taught or sandbox:
        worlds = (world for kind, world in WORLDS.items() if isinstance(family, type(load_family(kind))))
        if (world := next(worlds, spec.family if "path" not in params else "")) == "":
            raise SpecError(f"suite {name}: no embedded world replaces tasks of the family {spec.family!r}")
        if world != spec.family:
            small.worlds[name] = world
            small.undecided.update(_OF_TASKS)
            values |= load_shipped().get("suite", world).model_dump(mode="json", include={"family", "seed", "params"})
            params = values["params"]
    params |= {key: min(value, _WORLD_TASKS[key]) for key, value in params.items() if key in _WORLD_TASKS}
    small.write("suite", name, {**values, "params": params})


def _missing(path: object) -> str:
    """Return why the path, if one is named, cannot be read, or ""."""
    try:
        return "" if path is None or expand(str(path)).exists() else f"{path} does not exist"
    except PathError as error:
        return f"{str(error).partition(';')[0]}; `etpi fetch` says where they are"


# --- rollout sets ----------------------------------------------------------------------------------------------------


def _by_a_model(spec: RolloutSetSpec) -> bool:
    """Return whether a model rolls out the set that no rehearsal can run."""
    return spec.engine is not None and spec.engine.kind in ("vllm", "openai", "transformers") and not spec.engine.tiny


def _rollout_set(name: str, specs: Specs, small: Rehearsal) -> None:
    spec = specs.get("rollout_set", name)
    values = _dumped(spec)
    if spec.suite is not None:
        values["suite"] = PREFIX + spec.suite
    free = spec.engine is not None and spec.engine.kind == "scripted"  # its turns cost nothing
    values["tasks"] = min(spec.tasks or TASKS, 6 * TASKS if free else TASKS)
    values["k"] = min(spec.k, ROLLOUTS)
    values["agent"] = _agent(values["agent"], small)
    values["sandbox"] = "bubblewrap"
    if spec.kind == "imported":
        _imported(name, spec, values, small)
    if _by_a_model(spec):
        world = small.worlds.get(str(spec.suite), "")
        values |= {"kind": "live", "harness": None, "engine": _teacher(name, spec, world, small)}
        values["agent"] |= {"grammar": None, "harness": None}
    small.write("rollout_set", name, values)


def _imported(name: str, spec: RolloutSetSpec, values: dict[str, Any], small: Rehearsal) -> None:
    if tokenizer := spec.options.get("tokenizer"):
        values["options"] = {**values["options"], "tokenizer": _chat_format(str(tokenizer), small)}
    if missing := _missing(spec.path):
        unread = "" if spec.format == "messages" else f"; chat messages replace those of the format {spec.format}"
        small.need("raw_rollouts", f"its runs: {missing}{unread}", name)
        small.undecided.update(_OF_TEACHER)
        values |= {"format": "messages", "path": str(file := small.folder / f"{name}.jsonl")}
        small.folder.mkdir(parents=True, exist_ok=True)
        rows = (json.dumps(_conversation(name, number)) + "\n" for number in range(8))
        file.write_text("".join(rows), encoding="utf-8")


def _conversation(name: str, number: int) -> dict[str, Any]:
    """Return a row of a set, whose name is in it: two sets must not import the same runs."""
    call = json.dumps({"name": "code_interpreter", "arguments": {"code": f"print({number} * 17)"}})
    messages = [
        ("user", f"What is {number} times 17 ({name})?"),
        ("assistant", f"I compute it.\n<tool_call>\n{call}\n</tool_call>"),
        ("tool", f"{number * 17}\n"),
        ("assistant", f"The result is \\boxed{{{number * 17}}}."),
    ]
    return {"messages": [{"role": role, "content": text} for role, text in messages], "reward": 1.0}


def _teacher(name: str, spec: RolloutSetSpec, world: str, small: Rehearsal) -> dict[str, Any]:
    engine = spec.engine
    assert engine is not None
    small.undecided.update(_OF_TEACHER)
    if engine.kind == "openai":  # without token ids, the real run leaves this check undecided; the script has them
        small.undecided.add("history_as_captured")
    key = f", with the key {engine.api_key_env}" if engine.api_key_env else ""
    small.need("raw_rollouts", f"{', '.join(engine.urls) or 'a GPU'} that serves {engine.model}{key}", name)
    return {"kind": "scripted", "teacher": engine.teacher, "skill": _SKILLS.get(world, {})}


# --- the experiment --------------------------------------------------------------------------------------------------


def _experiment(spec: ExperimentSpec, small: Rehearsal) -> None:
    values = _dumped(spec)
    values |= {
        "title": f"Rehearsal: {spec.title}",
        "rollout_sets": [PREFIX + rollout_set for rollout_set in spec.rollout_sets],
        "seeds": [spec.seeds[0]],
        "requires": "cpu",
        "base": _base(spec, small),
        "train": _train(spec, small),
        "serving": _serving(spec, small),
        "probe": {**values["probe"], "prompts": 2},
    }
    if spec.requires != "cpu":
        small.need("sft_checkpoint", "a GPU (`requires`)")
    if spec.rl.method != "none":
        values["rl"] = _rl(values["rl"], small)
    if spec.evaluate is not None:
        values["evaluate"] = _evaluate(values["evaluate"], small)
    values["gates"]["override"] = {**dict.fromkeys(OVERRIDABLE, REASON), **spec.gates.override}
    small.write("experiment", small.name, values)


def _base(spec: ExperimentSpec, small: Rehearsal) -> dict[str, Any]:
    base = _dumped(spec.base)
    if spec.base.kind in ("tiny", "none"):
        chat = {key: _chat_format(base[key], small) for key in ("tokenizer", "chat_template")}
        return base if spec.base.kind == "tiny" else {**base, **chat}
    model = spec.base.model
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
    repo, _, commit = name.removeprefix(HUB).partition("@")
    if not name.startswith(HUB) or students.hub_path(repo, commit, "tokenizer.json"):
        return name
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


def _train(spec: ExperimentSpec, small: Rehearsal) -> dict[str, Any]:
    train, optimizer = spec.train, _optimizer(spec.train.optimizer, "sft_checkpoint", small)
    # Two steps lower the loss on other rows too if they are long for a random model, and short for a trained one.
    shortest, longest = (0.0, SHORT_STEP) if spec.base.kind == "tiny" else (LONG_STEPS.get(train.method, 0.0), math.inf)
    kernels = [option for option in ("loss_kernel", "layer_kernels") if getattr(train, option) == "liger"]
    if kernels and not find_spec("liger_kernel"):
        small.need("sft_checkpoint", f"liger-kernel, for train.{', train.'.join(kernels)} (pip install 'etpi[gpu]')")
    if students.is_hybrid(spec.base) and not find_spec("fla"):
        small.need("sft_checkpoint", "flash-linear-attention (pip install 'etpi[gpu]'); training is slow without it")
    used = train.use_epoch or train.use_step
    return {
        **_dumped(train),
        "optimizer": optimizer,
        "max_steps": STEPS,
        "learning_rate": train.learning_rate and min(max(train.learning_rate, shortest), longest),
        "schedule": "constant",
        "warmup_ratio": 0.0,
        "use_epoch": None,
        "use_step": 1 if used else None,
        "save_steps": 1 if used or train.save_steps else None,
    }


def _optimizer(name: str, asset: str, small: Rehearsal) -> str:
    """Return the optimiser, or the one that replaces an optimiser of bitsandbytes where that is not installed."""
    if not any(part in name for part in ("8bit", "paged", "bnb")) or find_spec("bitsandbytes"):
        return name
    small.need(asset, f"bitsandbytes, for the optimiser {name} (pip install 'etpi[gpu]')")
    return "adamw_torch"


def _serving(spec: ExperimentSpec, small: Rehearsal) -> dict[str, Any]:
    values = {**_dumped(spec.serving), "sandbox": "bubblewrap"}
    if spec.serving.engine != "transformers":
        small.need("serving_probe", "vLLM and its options (make gpu, or make vllm); the in-process engine serves here")
        values |= {"engine": "transformers", "options": {}}
    return values


_OF_SERVERS = ("engine", "options", "servers", "placement", "processes", "sharded", "correction")
"""Keys of [rl] of which the in-process engine takes the defaults alone."""


def _rl(rl: dict[str, Any], small: Rehearsal) -> dict[str, Any]:
    group = rl["group_size"]
    device_batch = math.gcd(rl["device_batch"], group)
    used = 1 if rl.get("use_step") else STEPS
    values = {
        **rl,
        "suite": PREFIX + rl["suite"],
        "tasks": max(2, rl.get("processes", 1)),  # a group of each process
        "agent": _agent(rl["agent"], small, short=True),
        "sandbox": "bubblewrap",
        "device_batch": device_batch,
        "accumulate": group // device_batch,
        "optimizer": _optimizer(rl["optimizer"], "rl_checkpoint", small),
        "steps": STEPS,
        "rewards": [*rl["rewards"], _LENGTH_REWARD],
        "warmup_steps": min(rl["warmup_steps"], used - 1),  # the first step of a warm-up trains nothing
        "max_response_tokens": min(rl["max_response_tokens"], 4 * OUTPUT),
        "save_steps": 1 if rl.get("save_steps") else None,
        "use_step": rl.get("use_step") and used,
    }
    if rl.get("engine") == "vllm":
        one = "; its processes are one, which shards nothing" if rl.get("sharded") else ""
        small.need("rl_checkpoint", f"vLLM (make gpu, or make vllm); the in-process engine rolls out here{one}")
        values |= {key: RLSection.model_fields[key].get_default(call_default_factory=True) for key in _OF_SERVERS}
    if rl["method"] == "opd":
        served = rl.get("teacher_engine") or {}
        named = f"{', '.join(served['urls'])} that serves {served['model']}" if served else rl["teacher"]
        small.need("rl_checkpoint", f"the teacher, {named}; GRPO trains here")
        values |= {"method": "grpo", "teacher": None, "teacher_engine": None}
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


# --- values ----------------------------------------------------------------------------------------------------------


def _dumped(spec: Any) -> dict[str, Any]:
    return spec.model_dump(mode="json", by_alias=False, context=PARSED_AGAIN)


def _toml(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _toml(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_toml(item) for item in value]
    return "none" if value is None else value
