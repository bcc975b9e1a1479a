"""Estimates of the real run, from its specs alone: each figure with its formula and its assumptions.

An amount that is not known is None, never 0, and the total names it. Amounts that depend on behaviour (turns, lengths)
are upper bounds: every rollout uses its whole budget. Times on a GPU are lower bounds: rates that no run here exceeded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from string import Template
from typing import Any

from etpi.fetch import rows_of
from etpi.rehearsal import RATE, students
from etpi.rehearsal.memory import PEAK_FLOPS, UTILISATION, Shape, Training, shape_of
from etpi_assets.agent.prompts import templates_of
from etpi_assets.asset import AssetRun
from etpi_assets.evaluation.rollouts import conditions
from etpi_assets.graph import GRAPH
from etpi_assets.resources import Resources
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs
from etpi_assets.specs.rollout_set import AgentSection, RolloutSetSpec
from etpi_assets.specs.training import RLSection, TrainSection
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Task
from etpi_assets.tasks.proofs import Prover
from etpi_resources.process.pool import worker_count
from etpi_resources.process.progress import clock
from etpi_resources.sandboxes import SandboxUnavailable
from etpi_resources.sandboxes.docker_images import budget

BANDWIDTH = 4.8e12
"""Bytes that an H200 reads from its memory in a second (NVIDIA's data sheet)."""
STEPS = 25.0
"""The most steps that the in-process engine made in a second on an H200: SmolLM2-135M (bench/README.md)."""
AT_ONCE = 64
"""Rollouts at once on any machine; with more than 8 cores there are more, and the real machine's are not known."""
WRITTEN = 0.66e9
"""Bytes of weights that reinforcement merged and wrote in a second for vLLM, on the same H200."""

GIB = 1 << 30
_EXPERTS = ("num_experts", "num_local_experts", "num_experts_per_tok")
"""Keys of a configuration of a mixture of experts."""


@dataclass(frozen=True)
class Cost:
    """One figure: what of, its value as text, how it was computed, and its GPU hours; None: they are not known."""

    part: str
    value: str
    formula: str
    hours: float | None = 0.0


def costs(name: str, specs: Specs, rate: float = RATE) -> list[Cost]:
    """Return the estimates for a real run of the experiment, in the order of its chain."""
    spec = specs.get("experiment", name)
    proofs = proof_lines("experiment", name, specs, Resources())
    lines = [Cost(f"proofs {suite}", text, images) for suite, text, images in proofs]
    lines += [line for set_name in spec.rollout_sets for line in _rollouts(set_name, specs)]
    lines += _student(spec, specs)
    return [*lines, _total(lines, rate)] if any(line.hours != 0 for line in lines) else lines


def _student(spec: ExperimentSpec, specs: Specs) -> Iterator[Cost]:
    """Yield the lines of a student, its training, its evaluation, and the machine."""
    if spec.base.kind in ("tiny", "none"):
        yield Cost("student", spec.base.kind, "no GPU is needed")
        return
    if (shape := model_shape(spec.base.model)) is None:
        why = "its configuration is not here, or its weights are quantised or of a mixture of experts: no size is known"
        yield Cost("student, its training and evaluation", f"unknown: {spec.base.model}", why, None)
        return
    size = f"{shape.parameters / 1e9:.1f} B parameters, {shape.layers} layers, width {shape.hidden}"
    counted = "as transformers builds its configuration, without a vision part"
    yield Cost("student", f"{size}; {shape.attention} layers keep keys and values", counted)
    if spec.train.method != "none":
        yield from _supervised(spec, shape, specs)
    if spec.rl.method != "none":
        yield from _reinforcement(spec, shape)
    yield from _evaluation(spec, shape, specs)
    yield _host(spec, shape, specs)


def _total(lines: list[Cost], rate: float) -> Cost:
    hours = sum(line.hours or 0 for line in lines)
    unknown = [line.part for line in lines if line.hours is None]
    parts = "start of programs, reading of prompts, probes and proofs, grading, failed attempts, GPUs that wait"
    return Cost(
        "GPU time",
        f"at least {hours:,.1f} h, ${hours * rate:,.2f} at ${rate:.2f} an hour, if all amounts above are reached",
        f"sum of the lines with a time; to be added, since not known: {', '.join([*unknown, parts])}",
    )


@lru_cache(maxsize=16)
def model_shape(model: str) -> Shape | None:
    """Return the sizes of a model that a spec names; None if its configuration is not here, or is of quantised weights
    or a mixture of experts, whose time and memory are not estimated."""
    config = students.configuration(model)
    if config is None or "quantization_config" in config or any(config.get(name) for name in _EXPERTS):
        return None
    return shape_of(config)


# --- rollouts --------------------------------------------------------------------------------------------------------


def _rollouts(name: str, specs: Specs) -> Iterator[Cost]:
    spec = specs.get("rollout_set", name)
    part = f"rollouts {name}"
    if spec.kind == "agent":
        yield Cost(part, f"unknown: {spec.k} of each task", "a harness decides its calls and their lengths", None)
    if spec.kind != "live" or spec.engine is None or spec.engine.kind not in ("vllm", "openai", "transformers"):
        return
    tasks = spec.tasks or _counted(str(spec.suite), specs, spec.split)
    if tasks is None:
        yield Cost(part, f"unknown: {spec.k} of each task", "the suite's data are not here to be counted", None)
        return
    agents = _agents(spec.agent)
    turns = tasks * spec.k * agents * spec.agent.max_steps
    formula = f"{tasks:,} tasks x {spec.k} x {spec.agent.max_steps} turns at most; agents of a rollout: {agents}"
    if spec.engine.kind == "openai":
        price = "the price of a token is not known; " if spec.engine.api_key_env else ""
        yield Cost(part, f"at most {turns:,} calls of {spec.engine.model}", f"{price}{formula}", None)
        return
    tokens = tasks * spec.k * agents * min(spec.agent.max_model_len, spec.agent.max_steps * spec.agent.max_tokens)
    shape, at_once = model_shape(str(spec.engine.model)), _at_once(tasks * spec.k, spec.agent)
    seconds, how = decoding(spec.engine.kind, shape, tokens, at_once)
    yield _timed(part, f"{turns:,} turns", tokens, seconds, f"{formula}; {how}")


def gpu_time(hours: float) -> str:
    """Return hours of a GPU as text; short times in minutes."""
    return f"{hours:,.1f} GPU hours" if hours >= 1 else f"{hours * 60:.1f} GPU minutes"


def _timed(part: str, amount: str, tokens: float, seconds: float | None, formula: str) -> Cost:
    """Return the line of tokens that take that number of seconds at least; None: they are not known."""
    hours = None if seconds is None else seconds / 3600
    shown = "an unknown time" if hours is None else f"at least {gpu_time(hours)} for them"
    return Cost(part, f"at most {amount}, {tokens / 1e6:,.1f} M tokens; {shown}", formula, hours)


def decoding(engine: str, shape: Shape | None, tokens: float, at_once: int) -> tuple[float | None, str]:
    """Return the seconds that tokens of that number of sequences at once take at least (None: unknown), and why."""
    if shape is None:
        return None, "the size of the model is not known"
    seconds = 2 * shape.parameters / BANDWIDTH
    how = f"at best a step of {at_once} sequences reads 2 bytes a parameter at {BANDWIDTH / 1e12:.1f} TB/s"
    if engine == "transformers":
        at_once, seconds = min(at_once, AT_ONCE), max(seconds, 1 / STEPS)
        how = f"at best the in-process engine makes {STEPS:g} steps of {at_once} sequences a second; {how}"
    return tokens / at_once * seconds, how


def _agents(agent: AgentSection) -> int:
    """Return the agents of a rollout: two if the prompt, which may be the user's own, names a partner."""
    return 2 if any("partner" in Template(text).get_identifiers() for text in templates_of(agent).values()) else 1


def _at_once(rollouts: int, agent: AgentSection) -> int:
    return min(rollouts, AT_ONCE) * _agents(agent)


@lru_cache(maxsize=64)
def _counted(name: str, specs: Specs, split: str) -> int | None:
    """Return the number of tasks of a split: of the data here, else of the public data set, else None."""
    suite = specs.get("suite", name)
    try:
        items = load_family(suite.family).load(name, suite.seed, suite.params)
        return sum(isinstance(item, Task) and split in ("all", item.split) for item in items) or None
    except (OSError, ValueError):
        return rows_of(str(suite.params.get("path")))


# --- training --------------------------------------------------------------------------------------------------------

_PEAK = f"{UTILISATION:.0%} of {PEAK_FLOPS / 1e12:.0f} TFLOP/s (17 to 29 % were measured)"


def steps_of(spec: ExperimentSpec, sequences: float) -> int:
    """Return the optimiser steps of the supervised training on that number of merged sequences."""
    train = spec.train
    per_step = train.batch_sequences or max(1, train.batch_tokens // _row_length(spec))
    steps = math.ceil(sequences * train.epochs / per_step)
    return min(steps, train.max_steps) if train.max_steps else steps


def sequences_of(spec: ExperimentSpec, specs: Specs) -> tuple[float, str] | None:
    """Return the number of merged training sequences (an agent's conversation each) and its source; None: unknown."""
    stated, kept = spec.published.get("stated", {}), 1 - spec.dataset.val_fraction
    if not spec.dataset.merge:
        return (float(stated["rows"]), "rows, as many as published, not merged") if "rows" in stated else None
    rollout_sets = [specs.get("rollout_set", name) for name in spec.rollout_sets]
    agents = max(_agents(s.agent) for s in rollout_sets)
    for key, each in (("train_rows", 1), ("selected_pairs", agents * kept), ("trajectories", kept)):
        if key in stated:
            return stated[key] * each, f"{stated[key] * each:g} conversations, from the published number"
    numbers = [_conversations(rollout_set, specs) for rollout_set in rollout_sets]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        return None
    return sum(known) * kept, f"at most all {sum(known):,} conversations, x {kept:g}"


def _conversations(spec: RolloutSetSpec, specs: Specs) -> int | None:
    tasks = spec.tasks or (_counted(spec.suite, specs, spec.split) if spec.suite else None)
    both = spec.templated is None or spec.templated.roles == "both"
    return None if tasks is None else tasks * spec.k * (_agents(spec.agent) if both else 1)


def supervised(spec: ExperimentSpec) -> Training:
    train, length = spec.train, _row_length(spec)
    full = train.method == "full"
    return _training(train, tiled=True, full=full, shards=train.shards, length=length, scored=length)


def reinforcement(spec: ExperimentSpec, shape: Shape) -> Training:
    """Return the experiment's reinforcement: the samples of a pass are a tree, or rows where a layer refuses trees."""
    rl, rows = spec.rl, not shape.only_full
    scored = rl.device_batch * rl.max_response_tokens
    return _training(
        rl,
        tiled=not rows,
        full=rl.tuning == "full",
        shards=rl.processes if rl.sharded else 1,
        length=rl.max_prompt_tokens * (rl.device_batch if rows else 1) + scored,
        scored=scored,
        reference=bool(rl.beta) and rl.tuning == "full",
        copied=rl.ahead > 0 and rl.engine == "transformers",
    )


def _training(section: TrainSection | RLSection, *, tiled: bool, **values: Any) -> Training:
    from etpi_resources.trainers.workers.label_head import TILE  # imports torch

    return Training(
        rank=section.lora_rank,
        recomputed=section.gradient_checkpointing,
        small_states="8bit" in section.optimizer,
        tile=TILE if tiled else None,
        **values,
    )


def _row_length(spec: ExperimentSpec) -> int:
    return spec.dataset.max_length if isinstance(spec.dataset.max_length, int) else spec.train.batch_tokens


def _supervised(spec: ExperimentSpec, shape: Shape, specs: Specs) -> Iterator[Cost]:
    train, training = spec.train, supervised(spec)
    yield _memory("training", training, shape)
    known = sequences_of(spec, specs)
    if known is None and not train.max_steps:
        yield Cost("training time", "unknown", "the number of sequences is not known before the data", None)
        return
    sequences, source = known or (math.inf, "train.max_steps")
    steps = steps_of(spec, sequences) if known else int(train.max_steps or 0)
    used = train.use_step or math.ceil(steps * (train.use_epoch or train.epochs) / train.epochs)
    last = min(used, steps) if train.stop_at_used else steps
    whole = f"; {steps:,} without train.stop_at_used" if last < steps else ""
    longest = last * (train.batch_sequences * training.length if train.batch_sequences else train.batch_tokens)
    tokens = min(longest, sequences * train.epochs * last / steps * training.length)
    yield Cost("training steps", f"{last:,}", f"{source}; epochs: {train.epochs:g}{whole}")
    yield _computed("training time", f"{last:,} steps", training, shape, tokens * len(spec.seeds))


def _computed(part: str, amount: str, training: Training, shape: Shape, tokens: float) -> Cost:
    formula = f"{training.operations} x parameters x tokens / ({_PEAK})"
    return _timed(part, amount, tokens, training.seconds(shape, tokens), formula)


def _reinforcement(spec: ExperimentSpec, shape: Shape) -> Iterator[Cost]:
    rl, training = spec.rl, reinforcement(spec, shape)
    steps = rl.last_step
    whole = f"; {rl.steps:,} without rl.stop_at_used" if steps < rl.steps else ""
    rollouts = steps * rl.round_size // rl.iterations
    trained = steps * rl.round_size * (rl.max_prompt_tokens + rl.max_response_tokens) * len(spec.seeds)
    sampled = rollouts * rl.max_response_tokens * len(spec.seeds)
    # Servers share a round.
    at_once = math.ceil(_at_once(rl.round_size, rl.agent) / rl.servers)
    seconds, how = decoding(rl.engine, shape, sampled, at_once)
    formula = f"{steps:,} steps{whole}, {rl.max_response_tokens:,} tokens each; {how}"
    yield _memory("reinforcement", training, shape)
    yield _timed("reinforcement rollouts", f"{rollouts:,} rollouts", sampled, seconds, formula)
    yield _computed("reinforcement updates", f"{steps:,} steps", training, shape, trained)
    if rl.engine == "vllm":
        hours = steps * 2 * training.trained(shape) / WRITTEN / 3600 * len(spec.seeds)
        formula = f"2 bytes a trained parameter at {WRITTEN / 1e9:g} GB/s, measured; reading them was not"
        yield Cost("hand-over of weights", f"{steps:,} times, at least {gpu_time(hours)}", formula, hours)


def _memory(part: str, training: Training, shape: Shape) -> Cost:
    parts, shards = training.memory(shape), training.shards
    shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size / GIB >= 0.05)
    kept = "4 bytes a weight" if training.full else "2 bytes a frozen weight, 4 a trained one"
    formula = (
        f"{kept}, 4 a gradient, {training.state_bytes} an optimiser state; activations of {training.length:,} tokens "
        f"({'recomputed' if training.recomputed else 'kept'}); 10 bytes a logit"
        f"{f', {training.tile:,} at a time' if training.tile else f' of {training.scored:,} tokens'}"
        f"{'' if shards == 1 else f'; over {shards} GPUs, each'}"
    )
    return Cost(f"{part} memory", f"{sum(parts.values()) / GIB:.0f} GiB of each GPU: {shown}", formula)


def _evaluation(spec: ExperimentSpec, shape: Shape, specs: Specs) -> Iterator[Cost]:
    if spec.evaluate is None:
        return
    evaluate, agent = spec.evaluate, spec.evaluate.agent
    each = {
        role: len(conditions(evaluate, role)) * (1 if role == "base" else len(spec.seeds)) for role in evaluate.roles
    }
    tasks = evaluate.tasks or _counted(evaluate.suite, specs, evaluate.split)
    formula = " + ".join(f"{count} of {role}" for role, count in each.items())
    if tasks is None:
        formula = f"{formula}; the suite's data are not here to be counted"
        yield Cost("evaluation", f"unknown: {sum(each.values())} rollouts of each task", formula, None)
        return
    rollouts = tasks * sum(each.values()) * _agents(agent)
    turns = max([agent.max_steps, *(budget.max_steps or 0 for budget in evaluate.budgets)])
    tokens = rollouts * min(evaluate.longest_context(), turns * agent.max_tokens)
    seconds, how = decoding(spec.serving.engine, shape, tokens, _at_once(tasks * max(each.values()), agent))
    formula = f"{tasks} tasks x ({formula}); agents of a rollout: {_agents(agent)}; {how}"
    yield _timed("evaluation", f"{rollouts:,} conversations", tokens, seconds, formula)


# --- the machine -----------------------------------------------------------------------------------------------------


def teachers(spec: ExperimentSpec, specs: Specs) -> list[tuple[str, str, RolloutSetSpec]]:
    """Return (rollout set, model, its spec) of the rollout sets for which etpi starts a vLLM server."""
    sets = [(key, specs.get("rollout_set", key)) for key in spec.rollout_sets]
    return [(key, str(s.engine and s.engine.model), s) for key, s in sets if s.starts_vllm]


def cache_bytes(shape: Shape, tokens: int) -> float:
    """Return the bytes of keys and values of one sequence; the states of linear attention are left out."""
    return 2.0 * shape.attention * shape.keys * 2 * tokens


def _host(spec: ExperimentSpec, shape: Shape, specs: Specs) -> Cost:
    weights, rl = 2 * shape.parameters, spec.rl
    saved, processes = 0, [1]  # whole models: those of an adapter are stored merged
    if spec.train.method != "none":
        goes_on = not spec.train.stop_at_used and bool(spec.train.use_epoch or spec.train.use_step)
        saved, processes = 1 + goes_on, [*processes, spec.train.shards]
    if rl.method != "none":
        every = rl.save_steps or rl.steps
        kept = {rl.last_step, rl.use_step or rl.steps, *range(every, rl.last_step + 1, every)}
        saved, processes = saved + len(kept), [*processes, rl.processes]
    names = {spec.base.model, *(model for _, model, _ in teachers(spec, specs))}
    read = sum(2 * other.parameters for name in names if (other := model_shape(name)))
    number, saved = max(processes), saved * len(spec.seeds)
    handed = rl.method != "none" and rl.engine == "vllm" and rl.tuning == "full"  # to the servers, through the disk
    return Cost(
        "host",
        f"at least {weights * (number + handed) / GIB:.0f} GiB of memory, "
        f"{(read + (saved + handed) * weights) / 1e9:.0f} GB of disk",
        f"2 bytes a weight, read by {number} {'process' if number == 1 else 'processes'}; {saved} saved models; to be "
        "added, since not known: adapters, states to resume from, models of unknown size, data, sandboxes, images of "
        "containers, the lake",
    )


# --- proofs ----------------------------------------------------------------------------------------------------------


def proof_lines(set: str, name: str, specs: Specs, resources: Resources) -> list[tuple[str, str, str]]:
    """Return (suite, its proofs and their time, the place of its images) for each suite of a chain."""
    lines = []
    for suite in specs.upstream_keys(set, name, "suite"):
        spec = specs.suites[suite]
        family = load_family(spec.family)
        if not family.keeps_proofs or (kind := family.sandbox(spec.params)) is None:
            continue
        kept = f"one image a task, kept under {budget() >> 30} GiB (ETPI_IMAGES_GIB)"
        images = kept if kind == "docker" else "no images"
        try:
            prover = Prover.of(AssetRun(GRAPH["tasks"], suite, resources), suite)
            tasks = [item for item in family.load(suite, spec.seed, spec.params) if isinstance(item, Task)]
        except (OSError, ValueError, SandboxUnavailable) as error:
            lines.append((suite, f"unknown: {error}", images))
            continue
        assert prover is not None
        if spec.proof != "all":
            uses = _uses(set, name, suite, specs)
            used = [[task for task in tasks if split in ("all", task.split)][:most] for split, most in uses]
            tasks = list({task.task_id: task for of_use in used for task in of_use}.values())
        left, cores = sum(prover.finished(task) is None for task in tasks), worker_count()
        took = f"about {clock(left * prover.seconds() / cores)} on {cores} cores"
        lines.append((suite, f"{left:,} of {len(tasks):,} tasks to prove (proof = {spec.proof}), {took}", images))
    return lines


def _uses(set: str, name: str, suite: str, specs: Specs) -> Iterator[tuple[str, int | None]]:
    """Yield (split, most tasks) for each use of a suite by rollout sets, evaluation and reinforcement."""
    for rollout_set in (specs.rollout_sets[key] for key in specs.upstream_keys(set, name, "rollout_set")):
        if rollout_set.suite == suite and rollout_set.kind != "imported":
            yield rollout_set.split, rollout_set.tasks
    if set == "experiment":
        spec = specs.experiments[name]
        if spec.evaluate and spec.evaluate.suite == suite:
            yield spec.evaluate.split, spec.evaluate.tasks
        if spec.rl.method != "none" and spec.rl.suite == suite:
            yield "train", None
