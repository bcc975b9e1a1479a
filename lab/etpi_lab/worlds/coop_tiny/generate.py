"""Generate tasks: a repository, two features in it, each agent's instruction, and hidden test cases.

The payload of a task (JSON):
    files: {path: text}, the start files of both agents, including the visible check
    check: the visible check's path
    register: the style of the instructions
    roles: [{agent_id, feature_id, partner, instruction}], in order
    features: {feature_id: {function, path, current, wanted, operation, number, hidden}}, where `current` and `wanted`
        are expressions and `hidden` is [[argument, value], ...], the hidden test cases
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from etpi_assets.tasks.family import Task
from etpi_assets.worlds.coop_tiny_shared import features
from etpi_assets.worlds.coop_tiny_shared.features import Formula
from etpi_assets.worlds.names import NameGenerator
from etpi_lab.worlds.coop_tiny.repositories import (
    LAYOUTS,
    Function,
    GeneratedRepository,
    check_text,
    generate_repository,
    module_texts,
)
from etpi_lab.worlds.coop_tiny.texts import REGISTERS, InstructionFields, write_text

AGENTS = ("agent1", "agent2")
FEATURES = ("f1", "f2")
SAME_MODULE_SHARE = 0.35
"""Share of tasks with both features in one module, where patches can conflict."""


def generate_tasks(suite: str, seed: int, split: str, registers: Sequence[str] = tuple(REGISTERS)) -> Iterator[Task]:
    """Yield tasks of a split ("train" or "heldout") without end, deterministic in (suite, seed, split, index).

    The split's repositories alternate. Names come from the split's own pool, so tasks of different splits share no
    identifier, whatever their suite and seed."""
    heldout = split == "heldout"
    layouts = [layout for layout in LAYOUTS if layout.heldout is heldout]
    for index in count():
        layout = layouts[index % len(layouts)]
        rng = random.Random(f"{suite}/{seed}/{split}/{index}")
        repository = generate_repository(layout, rng, NameGenerator(rng, heldout=heldout))
        payload = _payload(repository, rng, rng.choice(registers))
        instruction = "\n\n".join(f"[{role['agent_id']}]\n{role['instruction']}" for role in payload["roles"])
        yield Task.hashed(f"{suite}-{layout.name}-{index:05d}", suite, layout.name, split, instruction, payload)


def _payload(repository: GeneratedRepository, rng: random.Random, register: str) -> dict[str, Any]:
    chosen = dict(zip(FEATURES, _choose(repository, rng), strict=True))
    wanted = {key: features.sample_formula(rng, unlike=function.formula) for key, function in chosen.items()}
    visible, hidden = {}, {}
    for key, function in chosen.items():
        visible[key], hidden[key] = _cases(function.formula, wanted[key], rng)
    check = repository.layout.check
    files = module_texts(repository) | {
        check: check_text({f.name: (f.path, *visible[key]) for key, f in chosen.items()})
    }
    roles = []
    for index, other in ((0, 1), (1, 0)):
        key, function, partner = FEATURES[index], chosen[FEATURES[index]], chosen[FEATURES[other]]
        fields = InstructionFields(
            function=function.name,
            path=function.path,
            wanted=wanted[key],
            current=function.formula,
            partner=AGENTS[other],
            partner_function=partner.name,
            partner_path=partner.path,
            files=(*repository.paths, check),
            check=f"python3 {check}",
            example=visible[key],
        )
        text = write_text(fields, register, rng)
        roles.append({"agent_id": AGENTS[index], "feature_id": key, "partner": AGENTS[other], "instruction": text})
    return {
        "files": files,
        "check": check,
        "register": register,
        "roles": roles,
        "features": {
            key: {
                "function": function.name,
                "path": function.path,
                "current": function.formula.code,
                "wanted": wanted[key].code,
                "operation": wanted[key].operation,
                "number": wanted[key].number,
                "hidden": hidden[key],
            }
            for key, function in chosen.items()
        },
    }


def _choose(repository: GeneratedRepository, rng: random.Random) -> tuple[Function, Function]:
    """Choose two functions, from one module in SAME_MODULE_SHARE of the tasks."""
    first = rng.choice(repository.functions)
    same = rng.random() < SAME_MODULE_SHARE
    candidates = [f for f in repository.functions if f is not first and (f.path == first.path) is same]
    return first, rng.choice(candidates)


def _cases(current: Formula, wanted: Formula, rng: random.Random) -> tuple[tuple[int, int], list[list[int]]]:
    """Sample a visible case and hidden cases.

    The current formula fails the visible case and at least one hidden case. The hidden arguments lie below, among and
    above all possible numbers, so that another formula rarely passes by chance."""
    while True:
        low = rng.sample(range(-60, 2), k=2)
        middle = rng.sample(range(2, 100), k=3)
        high = rng.sample(range(100, 500), k=2)
        visible = rng.choice([x for x in range(2, 100) if x not in middle])
        arguments = [*low, *middle, *high]
        if wanted(visible) != current(visible) and any(wanted(x) != current(x) for x in arguments):
            return (visible, wanted(visible)), [[x, wanted(x)] for x in arguments]


def solution(task: Task, feature_id: str) -> dict[str, str]:
    """Return the task's files, including the visible check, with one feature implemented."""
    feature = task.payload["features"][feature_id]
    files = dict(task.payload["files"])
    body = re.compile(rf"(def {feature['function']}\(x\):\n    return )[^\n]*")
    files[feature["path"]], edits = body.subn(rf"\g<1>{feature['wanted']}", files[feature["path"]])
    if edits != 1:
        raise ValueError(f"{task.task_id}: {feature['path']} has {edits} functions {feature['function']}")
    return files
