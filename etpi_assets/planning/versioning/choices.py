"""The code that a spec selects among alternatives (`CHOICES`), and the code that changes no result (`INFRASTRUCTURE`).

`codebase` follows references and `keys` computes the code versions. Most options are read off the packages that hold
them. `tests/planning/test_code_versions.py` names the test that fails if the claim of another row is wrong, and checks
that some option selects every alternative, and that every file is reached or listed here.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from etpi_assets.graph import Node
from etpi_assets.planning.versioning.codebase import Codebase, Filter, Target
from etpi_assets.planning.versioning.definitions import dotted
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs
from etpi_assets.specs.rollout_set import TINY, RolloutSetSpec
from etpi_assets.specs.suite import SuiteSpec

INFRASTRUCTURE = (
    "etpi_assets.asset",
    "etpi_assets.graph",
    "etpi_assets.planning.planner",
    "etpi_assets.resources",
    "etpi_assets.rollouts.executors",
    "etpi_assets.specs.load",
    "etpi_assets.specs.paths",
    "etpi_assets.training.curves",
    "etpi_assets.planning.versioning.keys",
    "etpi_resources.backend",
    "etpi_resources.sandboxes.downloads",
    "etpi_resources.lake",
    "etpi_resources.process",
    "etpi_resources.trainers.pipes",
    "etpi_resources.trainers.workers.device",
    "etpi_resources.trainers.workers.reporting",
)
"""Modules and packages that code versions leave out. `tests/planning/test_code_versions.py` says why, with tests."""

Selection = Mapping[str, frozenset[str]]
"""The options that a partition's spec selects, by kind of choice. A missing kind selects every option."""


@dataclass(frozen=True)
class Choice:
    """One place where the code branches on a value of the spec.

    Attributes:
        kind: the entry of a Selection that decides.
        at: the definitions whose references are narrowed ("module:": all of a module), or the end of a dotted name,
            such as "resources.sandboxes".
        options: option -> targets; a target that ends in ":" is everything in that module.
    """

    kind: str
    at: tuple[str, ...]
    options: Callable[[Codebase], Mapping[str, tuple[Target, ...]]]

    def narrow(self, targets: set[Target], code: Codebase, selection: Selection) -> set[Target]:
        """Return `targets` without those of unselected options, and with those of selected options."""
        options = options_of(self, code)
        selected = [name for name in options if name in selection.get(self.kind, options)]
        wanted = {target for name in selected for target in options[name]}
        offered = {target for targets in options.values() for target in targets}
        kept = {t for t in targets if not _covers(offered, t) or _covers(wanted, t)}
        return kept | {target for target in wanted if code.exists(target)}


@cache
def options_of(choice: Choice, code: Codebase) -> Mapping[str, tuple[Target, ...]]:
    """Return the options of a choice in the code: option -> targets."""
    return choice.options(code)


def _covers(patterns: Iterable[Target], target: Target) -> bool:
    return any(target == pattern or (pattern.endswith(":") and target.startswith(pattern)) for pattern in patterns)


def _fixed(**options: tuple[Target, ...]) -> Callable[[Codebase], Mapping[str, tuple[Target, ...]]]:
    return lambda code: options


def _modules_below(package: str, name: str = "") -> Callable[[Codebase], Mapping[str, tuple[Target, ...]]]:
    """Return an option per module directly in a package, named after it; with `name`, only modules that define it."""

    def options(code: Codebase) -> Mapping[str, tuple[Target, ...]]:
        modules = [m for m in code.modules if m.rpartition(".")[0] == package]
        if name:
            return {m.rpartition(".")[2]: (f"{m}:{name}", f"{m}:") for m in modules if code.exists(f"{m}:{name}")}
        return {m.rpartition(".")[2]: (f"{m}:*", f"{m}:") for m in modules}

    return options


def _modules_of_worlds(module: str) -> Callable[[Codebase], Mapping[str, tuple[Target, ...]]]:
    """Return an option per world that has this module, named after the world."""

    def options(code: Codebase) -> Mapping[str, tuple[Target, ...]]:
        below = [m.split(".") for m in code.modules if m.startswith(f"{_WORLDS}.")]
        worlds = [parts[2] for parts in below if len(parts) == 4 and parts[3] == module]
        return {w: (f"{_WORLDS}.{w}.{module}:*", f"{_WORLDS}.{w}.{module}:") for w in worlds}

    return options


def _families(code: Codebase) -> Mapping[str, tuple[Target, ...]]:
    """Return an option per suite family; embedded worlds are families too."""
    packages = ("etpi_assets.tasks", _WORLDS)
    return {name: targets for p in packages for name, targets in _modules_below(p, "FAMILY")(code).items()}


def _prompts(code: Codebase) -> Mapping[str, tuple[Target, ...]]:
    """Return the templates by prompt name, from the folders of `agent/prompts` and the worlds' `prompts` folders."""
    options: dict[str, list[Target]] = {}
    for path in code.data:
        folder = path.rpartition("/")[0]
        if folder.startswith("etpi_assets/agent/prompts/"):
            options.setdefault(folder.rpartition("/")[2], []).append(path)
        elif folder.startswith("etpi_assets/worlds/") and folder.endswith("/prompts"):
            options.setdefault(folder.split("/")[2], []).append(path)
    return {name: tuple(paths) for name, paths in options.items()}


def _rewards(code: Codebase) -> Mapping[str, tuple[Target, ...]]:
    """Return the function of each name in the registry of reward functions, `{"name": module.function}`."""
    table = next(
        n for part in code.definition(f"{_REWARDS}:FUNCTIONS").parts for n in ast.walk(part) if isinstance(n, ast.Dict)
    )
    entries = zip(table.keys, table.values, strict=True)
    return {ast.literal_eval(name): tuple(code.resolve(_REWARDS, dotted(value))) for name, value in entries if name}


_REWARDS = "etpi_assets.scoring.rewards.functions"
_TRAINING = "etpi_assets.training"
_ROLLOUTS = "etpi_assets.rollouts"
_WORLDS = "etpi_assets.worlds"
_ENGINES = "etpi_resources.engines"
_SANDBOXES = "etpi_resources.sandboxes"
_TOKENIZERS = "etpi_resources/chat/tokenizers"
_TRAINERS = "etpi_resources.trainers"
_WORKERS = f"{_TRAINERS}.workers"

CHOICES = (
    Choice("family", ("etpi_assets.tasks.families:load_family",), _families),
    Choice("policy", (f"{_ROLLOUTS}.teachers:POLICIES",), _modules_of_worlds("policy")),
    Choice("format", ("etpi_assets.importers:_MODULES",), _modules_below("etpi_assets.importers", "FORMAT")),
    Choice("reward", (f"{_REWARDS}:FUNCTIONS",), _rewards),
    Choice(
        "base",
        (f"{_TRAINING}.assets:base_checkpoint", f"{_TRAINING}.pointers:pointer"),
        _fixed(
            tiny=(f"{_TRAINING}.assets:_tiny_base",),
            hub=(f"{_TRAINING}.pointers:hub_pointer",),
            path=(f"{_TRAINING}.pointers:path_pointer",),
            package=(f"{_TRAINING}.pointers:package_pointer",),
            none=(),
        ),
    ),
    Choice("prompt", ("etpi_assets.agent.prompts:_template",), _prompts),
    Choice(
        "rollouts",
        (f"{_ROLLOUTS}.assets:",),
        _fixed(
            live=(f"{_ROLLOUTS}.assets:_roll_out_set", "etpi_assets.agent.loop:run_rollout"),
            engine=(f"{_ROLLOUTS}.teachers:make_engine",),
            imported=(f"{_ROLLOUTS}.assets:_import_set",),
            plan_first=(f"{_ROLLOUTS}.plan_first.rollout:*", f"{_ROLLOUTS}.plan_first.rollout:"),
        ),
    ),
    Choice(
        "engine",
        (f"{_ROLLOUTS}.teachers:make_engine", f"{_ROLLOUTS}.models:model_engine"),
        _fixed(
            scripted=(f"{_ROLLOUTS}.teachers:POLICIES", f"{_ENGINES}.scripted:"),
            reference=("etpi_assets.agent.oracle:reference_policy", f"{_ENGINES}.scripted:"),
            null=("etpi_assets.agent.oracle:null_policy", f"{_ENGINES}.scripted:"),
            transformers=(f"{_ROLLOUTS}.models:model_engine", f"{_ENGINES}.transformers:"),
            openai=(f"{_ROLLOUTS}.models:model_engine", f"{_ROLLOUTS}.models:_chat_endpoint", f"{_ENGINES}.openai:"),
            vllm=(
                f"{_ROLLOUTS}.models:model_engine",
                f"{_ROLLOUTS}.models:_remote_vllm",
                f"{_ROLLOUTS}.models:_local_vllm",
                *(f"{_ENGINES}.{name}:" for name in ("endpoints", "vllm", "vllm_server")),
            ),
            tiny=(f"{_ROLLOUTS}.models:_built",),
        ),
    ),
    Choice(
        "sandbox",
        ("resources.sandboxes",),
        _fixed(
            bubblewrap=(f"{_SANDBOXES}.bubblewrap:BubblewrapFactory",), docker=(f"{_SANDBOXES}.docker:DockerFactory",)
        ),
    ),
    Choice(
        "serving",
        ("resources.serving",),
        _fixed(
            transformers=(f"{_ENGINES}.serving:TransformersServing",),
            vllm=(f"{_ENGINES}.serving:VllmServing",),
            auto=(f"{_ENGINES}.serving:TransformersServing", f"{_ENGINES}.serving:VllmServing"),
        ),
    ),
    Choice(
        "template",
        ("etpi_resources.chat.format:load_chat_format", "etpi_resources.chat.format:_template"),
        _fixed(
            tiny=(f"{_TOKENIZERS}/tiny/tokenizer.json", f"{_TOKENIZERS}/tiny/tiny.jinja"),
            terminal=(f"{_TOKENIZERS}/terminal.jinja",),
            others=("etpi_resources.chat.tokenizers.qwen3:",),
        ),
    ),
    Choice(
        "template",
        (f"{_ENGINES}.scripted:ScriptedEngine._complete",),
        _fixed(opens_think=(f"{_ENGINES}.scripted:continued",)),
    ),
    Choice(
        "harness", (f"{_ROLLOUTS}.assets:_rollout_function",), _fixed(foreign=(f"{_ROLLOUTS}.assets:_run_harness",))
    ),
    Choice(
        "harness",
        ("etpi_assets.evaluation.rollouts:_roll_out",),
        _fixed(foreign=("etpi_assets.agent.harness:run_harness",)),
    ),
    Choice(
        "generator",
        (
            f"{_WORKERS}.grpo_worker:build_trainer",
            f"{_TRAINING}.grpo:server_plan",
            f"{_TRAINERS}.policy_servers:PolicyServers._load_adapter",
        ),
        _fixed(
            transformers=(f"{_ENGINES}.live:LiveEngine",),
            vllm=(
                f"{_WORKERS}.grpo_worker:_publisher",
                f"{_TRAINERS}.policy_link:largest_gap",
                f"{_ENGINES}.vllm:loaded_adapter",
                f"{_ENGINES}.adapter_keys:served_adapter",
            ),
        ),
    ),
    Choice(
        "ranks",
        (
            f"{_WORKERS}.grpo_worker:load",
            f"{_WORKERS}.grpo_worker:gather",
            f"{_WORKERS}.policy_trainer:PolicyTrainer",
        ),
        _fixed(one=(), sharded=(f"{_WORKERS}.sharding:", f"{_WORKERS}.states:")),
    ),
)
"""Every place where a spec selects code."""


def narrowing(code: Codebase, selection: Selection) -> Filter:
    """Return the filter that restricts a walk to the code that a spec selects."""
    at = {target: [c for c in CHOICES if target in c.at] for choice in CHOICES for target in choice.at}

    def edges(definition: Target, targets: set[Target]) -> set[Target]:
        for choice in (*at.get(definition, ()), *at.get(f"{definition.partition(':')[0]}:", ())):
            targets = choice.narrow(targets, code, selection)
        return targets

    dotted = {
        tuple(at.split(".")): choice.narrow(set(), code, selection)
        for choice in CHOICES
        for at in choice.at
        if ":" not in at
    }
    return Filter(is_infrastructure, edges, dotted)


@cache
def is_infrastructure(module: str) -> bool:
    """Return whether code versions leave a module out."""
    return any(module == name or module.startswith(f"{name}.") for name in INFRASTRUCTURE)


# --- selections of specs ---------------------------------------------------------------------------------------------


def selection(node: Node, key: str, specs: Specs) -> Selection:
    """Return the options that a partition's spec selects for an asset; an unpartitioned asset selects all.

    Raises:
        SpecError: the spec is unknown or invalid.
    """
    if node.set == "all":
        return {}
    spec = specs.get(node.set, key)
    if isinstance(spec, SuiteSpec):
        return _frozen(family=[spec.family], sandbox=[str(spec.params.get("sandbox") or "bubblewrap")], prompt=[])
    if isinstance(spec, RolloutSetSpec):
        return _of_rollout_set(spec, specs)
    return _of_experiment(node, spec, specs)


def _of_rollout_set(spec: RolloutSetSpec, specs: Specs) -> Selection:
    suite = specs.suites.get(spec.suite or "")
    family = [suite.family] if suite else []
    engine = spec.engine
    builds = engine is not None and engine.model == TINY
    options_by_kind = {
        "imported": ["imported"],
        "live": ["live", "engine"],
        "agent": ["live", "engine"],
        "templated": ["live", "plan_first"],
    }
    return _frozen(
        family=family,
        policy=family if engine and engine.kind == "scripted" else [],
        engine=[*([engine.kind] if engine else []), *(["tiny"] if builds else [])],
        sandbox=[spec.sandbox] if spec.is_collected else [],
        harness=["foreign"] if spec.agent.harness else [],
        prompt=[spec.agent.prompt],
        template=_templates(spec.agent.tokenizer),
        format=None if spec.format == "auto" else [spec.format],
        rollouts=options_by_kind[spec.kind],
    )


def _of_experiment(node: Node, spec: ExperimentSpec, specs: Specs) -> Selection:
    sets = [specs.rollout_sets[name] for name in spec.rollout_sets if name in specs.rollout_sets]
    if node.name in ("rl_checkpoint", "rl_rewards"):
        suites, agents, sandbox = [spec.rl.suite], [spec.rl.agent], spec.rl.sandbox
    elif node.name in ("serving_probe", "eval_rollouts"):
        evaluated = [spec.evaluate] if spec.evaluate else []
        suites, agents, sandbox = [e.suite for e in evaluated], [e.agent for e in evaluated], spec.serving.sandbox
    else:
        suites = [s.suite for s in sets] + [spec.evaluate.suite if spec.evaluate else None]
        evaluated = [spec.evaluate.agent] if spec.evaluate else []
        agents = {"tito_pairs": [s.agent for s in sets], "base_checkpoint": []}.get(node.name, evaluated)
        sandbox = spec.serving.sandbox
    return _frozen(
        family=[specs.suites[name].family for name in suites if name and name in specs.suites],
        sandbox=[sandbox],
        serving=[spec.serving.engine],
        generator=[spec.rl.engine],
        ranks=["sharded" if spec.rl.sharded else "one"],
        harness=["foreign"] if any(agent.harness for agent in agents) else [],
        prompt=[agent.prompt for agent in agents],
        base=[spec.base.kind],
        template=_templates(spec.base.tokenizer, spec.base.chat_template),
        reward=[term.function for term in spec.rl.rewards],
    )


def applies(node: Node, key: str, specs: Specs) -> bool:
    """Return whether an asset computes anything for a partition; if not, it publishes an empty version."""
    spec = specs.get(node.set, key) if node.set == "experiment" else None
    if not isinstance(spec, ExperimentSpec):
        return True
    computes = {
        "base_checkpoint": spec.base.kind != "none",
        "sft_checkpoint": spec.train.method != "none",
        "rl_checkpoint": spec.rl.method != "none",
        "rl_rewards": spec.rl.method != "none",
        "serving_probe": spec.evaluate is not None or spec.train.method != "none" or spec.rl.method != "none",
        "eval_rollouts": spec.evaluate is not None,
    }
    return computes.get(node.name, True)


def _templates(*names: str) -> list[str]:
    known = {"tiny", "terminal"}
    unknown = set(names) - known
    return [*(known & set(names)), *(["others"] if unknown else []), *(["opens_think"] if unknown - {"qwen3"} else [])]


def _frozen(**chosen: Iterable[str] | None) -> Selection:
    return {kind: frozenset(names) for kind, names in chosen.items() if names is not None}
