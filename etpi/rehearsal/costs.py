"""Estimates of the real run, from its specs alone: each figure with its formula and its assumptions.

Amounts that depend on behaviour (turns, lengths) are upper bounds: every rollout uses its whole budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from etpi.rehearsal import RATE
from etpi.rehearsal.memory import PEAK_FLOPS, UTILISATION, Shape, Training, shape_of
from etpi.rehearsal.students import published_config
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs
from etpi_assets.specs.rollout_set import AgentSection, RolloutSetSpec
from etpi_assets.specs.suite import SuiteSpec
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Task

BANDWIDTH = 4.8e12
"""Bytes that an H200 reads from its memory in a second (NVIDIA's data sheet)."""
READING = 0.5
"""Share of the bandwidth that decoding reaches."""
CONCURRENT = 32
"""Sequences that a server decodes at once."""
TURN_BYTES = 2_000
"""Bytes of a turn in all tables of the lake: 1,955 MB of 999,999 turns (`bench/report_queries.py`)."""

_GIB = 1 << 30


@dataclass(frozen=True)
class Cost:
    """One figure: what of, its value as text, how it was computed, and the GPU hours in it."""

    part: str
    value: str
    formula: str
    hours: float = 0.0


def costs(name: str, specs: Specs, rate: float = RATE) -> list[Cost]:
    """Return the estimates for a real run of the experiment, in the order of its chain."""
    spec = specs.get("experiment", name)
    assert isinstance(spec, ExperimentSpec)
    lines = [line for set_name in spec.rollout_sets for line in _rollouts(set_name, specs)]
    if spec.base.kind in ("tiny", "none"):
        return [*lines, Cost("student", spec.base.kind, "no GPU is needed")]
    model = spec.base.repo or spec.base.package or str(spec.base.path)
    config = published_config(model, str(spec.base.revision)) if spec.base.kind == "hub" else None
    shape = shape_of(model, config)
    if shape is None:
        return [*lines, Cost("student", model, "neither its configuration nor its name tells its size")]
    lines.append(
        Cost(
            "student",
            f"{shape.parameters / 1e9:.1f} B parameters, {shape.layers} layers, width {shape.hidden}",
            shape.source,
        )
    )
    if spec.train.method != "none":
        lines += _supervised(spec, shape)
    if spec.rl.method != "none":
        lines += _reinforcement(spec, shape)
    lines += _serving(spec, shape)
    hours = sum(line.hours for line in lines)
    return [*lines, Cost("GPU time", f"{hours:.1f} h, ${hours * rate:,.0f} at ${rate:.2f} an hour", "the hours above")]


def steps_of(spec: ExperimentSpec, rows: float) -> int:
    """Return the optimiser steps of the supervised training on that number of rows of `dataset.max_length` tokens."""
    train = spec.train
    per_step = train.batch_sequences or max(1, train.batch_tokens // _row_length(spec))
    steps = math.ceil(rows * train.epochs / per_step)
    return min(steps, train.max_steps) if train.max_steps else steps


def _rollouts(name: str, specs: Specs) -> Iterator[Cost]:
    spec = specs.get("rollout_set", name)
    assert isinstance(spec, RolloutSetSpec)
    if spec.kind != "live" or spec.engine is None or spec.engine.kind not in ("vllm", "openai", "transformers"):
        yield Cost(f"rollouts {name}", "no generation", spec.kind)
        return
    suite = specs.get("suite", str(spec.suite))
    assert isinstance(suite, SuiteSpec)
    tasks, agents = spec.tasks or _counted(str(spec.suite), suite, spec.split), _agents(spec.agent)
    if tasks is None:
        yield Cost(f"rollouts {name}", f"{spec.k} of each task", "the suite's data are not here to be counted")
        return
    turns = tasks * spec.k * agents * spec.agent.max_steps
    formula = f"{tasks} tasks x {spec.k} x {agents} agents x at most {spec.agent.max_steps} turns"
    if spec.engine.kind == "openai":
        yield Cost(f"rollouts {name}", f"at most {turns:,} calls of {spec.engine.model}", formula)
    else:
        tokens = tasks * spec.k * agents * spec.agent.max_model_len
        shape = shape_of(str(spec.engine.model), None)
        hours = 0.0 if shape is None else _decoding(shape.parameters, tokens) / 3600
        yield Cost(
            f"rollouts {name}",
            f"at most {turns:,} turns, {tokens / 1e6:,.1f} M tokens, {hours:.1f} GPU hours",
            f"{formula}, {spec.agent.max_model_len:,} tokens each; {_DECODING}",
            hours,
        )
    yield Cost(f"lake {name}", f"at most {turns * TURN_BYTES / 1e6:,.0f} MB", f"{TURN_BYTES:,} bytes a turn")


def _agents(agent: AgentSection) -> int:
    return 2 if agent.prompt.startswith("coop") else 1


def _counted(name: str, suite: SuiteSpec, split: str) -> int | None:
    """Return the number of tasks of a split; None if the data are not here."""
    try:
        items = load_family(suite.family).load(name, suite.seed, suite.params)
        return sum(isinstance(item, Task) and split in ("all", item.split) for item in items) or None
    except (OSError, ValueError):
        return None


_PEAK = f"{UTILISATION:.0%} of {PEAK_FLOPS / 1e12:.0f} TFLOP/s"
_DECODING = (
    f"a step of {CONCURRENT} sequences reads 2 bytes a parameter at {READING:.0%} of {BANDWIDTH / 1e12:.1f} TB/s"
)


def _decoding(parameters: float, tokens: float) -> float:
    """Return the seconds in which a server generates that number of tokens."""
    return tokens / CONCURRENT * 2 * parameters / (BANDWIDTH * READING)


def supervised(spec: ExperimentSpec) -> Training:
    """Return the experiment's supervised training."""
    from etpi_resources.trainers.workers.label_head import TILE  # imports torch

    train = spec.train
    return Training(
        full=train.method == "full",
        rank=train.lora_rank,
        recomputed=train.gradient_checkpointing,
        small_states="8bit" in train.optimizer,
        shards=train.shards,
        tile=TILE,
        reference=False,
        length=_row_length(spec),
    )


def reinforcement(spec: ExperimentSpec) -> Training:
    """Return the experiment's reinforcement."""
    rl = spec.rl
    return Training(
        full=rl.tuning == "full",
        rank=rl.lora_rank,
        recomputed=rl.gradient_checkpointing,
        small_states="8bit" in rl.optimizer,
        shards=1,
        tile=None,
        reference=bool(rl.beta),
        length=rl.max_prompt_tokens + rl.max_response_tokens,
    )


def _row_length(spec: ExperimentSpec) -> int:
    """Return the most tokens of a row."""
    return spec.dataset.max_length if isinstance(spec.dataset.max_length, int) else spec.train.batch_tokens


def _supervised(spec: ExperimentSpec, shape: Shape) -> list[Cost]:
    train, stated, training = spec.train, spec.published.get("stated", {}), supervised(spec)
    rows = next((stated[key] for key in ("train_rows", "rows", "trajectories") if key in stated), None)
    lines = [_memory("training", training, shape)]
    if rows is None and not train.max_steps:
        return [*lines, Cost("training time", "unknown", "the number of rows is not known before the data set")]
    steps = steps_of(spec, float(rows)) if rows is not None else int(train.max_steps or 0)
    tokens = steps * (train.batch_sequences * training.length if train.batch_sequences else train.batch_tokens)
    hours = training.seconds(shape, tokens) / 3600 * len(spec.seeds)
    source = "the published rows" if rows is not None else "train.max_steps"
    return [
        *lines,
        Cost("training steps", f"{steps:,}", f"{source}, {train.epochs:g} epochs"),
        Cost(
            "training time",
            f"at most {tokens / 1e6:,.1f} M tokens, {hours:.1f} GPU hours",
            f"{training.operations} parameters tokens / ({_PEAK})",
            hours,
        ),
        _disk("training", training, shape, train.save_steps, steps),
    ]


def _reinforcement(spec: ExperimentSpec, shape: Shape) -> list[Cost]:
    rl, training = spec.rl, reinforcement(spec)
    rollouts = rl.steps * rl.device_batch * rl.accumulate // rl.iterations
    tokens = rollouts * rl.max_response_tokens
    seconds = _decoding(shape.parameters, tokens) + training.seconds(shape, rollouts * training.length)
    hours = seconds / 3600 * len(spec.seeds)
    return [
        _memory("reinforcement", training, shape),
        Cost(
            "reinforcement time",
            f"at most {rollouts:,} rollouts, {tokens / 1e6:,.1f} M tokens, {hours:.1f} GPU hours",
            f"{rl.steps:,} steps x {rl.device_batch * rl.accumulate}, {rl.max_response_tokens:,} tokens each; "
            f"{_DECODING}; then {training.operations} parameters tokens / ({_PEAK})",
            hours,
        ),
        _disk("reinforcement", training, shape, rl.save_steps, rl.steps),
    ]


def _memory(part: str, training: Training, shape: Shape) -> Cost:
    state, shards = training.state_bytes, training.shards
    parts = training.memory(shape)
    shown = ", ".join(f"{name} {value / _GIB:.1f}" for name, value in parts.items() if value)
    kept = "4 bytes a weight" if training.full else "2 bytes a frozen weight, 4 a trained one"
    formula = (
        f"{kept}, 4 a gradient, {state} an optimiser state; activations of a sequence of {training.length:,} tokens "
        f"({'recomputed' if training.recomputed else 'kept'}); 10 bytes a logit (2 as computed, 4 in "
        "float32, 4 of gradient)"
        f"{f', of which {training.tile:,} are held at a time' if training.tile else ''}"
        f"{'' if shards == 1 else f'; over {shards} GPUs, each'}"
    )
    return Cost(f"{part} memory", f"{sum(parts.values()) / _GIB:.0f} GiB: {shown}", formula)


def _disk(part: str, training: Training, shape: Shape, every: int | None, steps: int) -> Cost:
    kept = 1 + (steps // every if every else 0)
    merged = "" if training.full else ", and the merged model"
    total = kept * 2 * training.trained(shape) + (0 if training.full else 2 * shape.parameters)
    return Cost(
        f"{part} disk",
        f"{total / 1e9:,.1f} GB",
        f"{kept} checkpoints of 2 bytes a trained parameter{merged}",
    )


def _serving(spec: ExperimentSpec, shape: Shape) -> Iterator[Cost]:
    if spec.evaluate is None:
        return
    evaluate, agent = spec.evaluate, spec.evaluate.agent
    cache = 2 * shape.layers * shape.keys * 2 * agent.max_model_len
    yield Cost(
        "serving memory",
        f"{(2 * shape.parameters + CONCURRENT * cache) / _GIB:.0f} GiB: weights {2 * shape.parameters / _GIB:.1f}, "
        f"KV cache {CONCURRENT * cache / _GIB:.1f}",
        f"2 bytes a weight; {CONCURRENT} sequences of {agent.max_model_len:,} tokens x 2 x layers x keys x 2 bytes",
    )
    conditions = len(evaluate.roles) * len(evaluate.decodings) * len(spec.seeds) + len(evaluate.budgets)
    agents = _agents(agent)
    tasks = evaluate.tasks
    rollouts = None if tasks is None else tasks * conditions * agents
    if rollouts is None:
        yield Cost("evaluation", f"{conditions} rollouts of each task", "all tasks of the suite")
        return
    tokens = rollouts * min(agent.max_model_len, agent.max_steps * agent.max_tokens)
    hours = _decoding(shape.parameters, tokens) / 3600
    yield Cost(
        "evaluation",
        f"at most {tokens / 1e6:,.1f} M tokens, {hours:.1f} GPU hours",
        f"{tasks} tasks x {conditions} conditions x {agents} agents; {_DECODING}",
        hours,
    )
