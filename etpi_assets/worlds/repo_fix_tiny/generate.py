"""Generate tasks: modules with one number each, notes with two tables, a symptom, and hidden tests.

The payload of a task (JSON):
    files: {path: text}, the agent's start files: modules, NOTES, and visible tests
    symptom, module, value: the issue's symptom, its module, and the number that the module should add
    owners: {symptom: module}, values: {module: number}, in the order of the tables in NOTES
    tests: {test: [path, function, arguments, values]}, hidden
    expected: {test: outcome}, of the fixed repository; one test fails there too, as in real ones
    names: symptoms and modules
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from etpi_assets.tasks.family import Task
from etpi_assets.worlds.names import NameGenerator

REPOS: Mapping[str, tuple[str, ...]] = {
    "train": ("anvil", "beacon", "cinder", "dynamo", "ember", "furnace", "girder", "hammer"),
    "heldout": ("lantern", "mortar", "pulley"),
}
"""Split -> repositories."""

MODULES = 4
"""Rows of each table: a guess of the second hop is right one time in MODULES."""

NUMBERS = range(2, 10)
NOTES = "NOTES"
ISSUES = ("{symptom} is wrong.", "Fix {symptom}.", "See {symptom}.", "Change {symptom}.")


def generate_tasks(suite: str, seed: int, split: str) -> Iterator[Task]:
    """Yield tasks of a split ("train" or "heldout") without end, deterministic in (suite, seed, split, index).

    The split's repositories alternate. Names come from the split's own pool."""
    repos = REPOS[split]
    for index in count():
        rng = random.Random(f"{suite}/{seed}/{split}/{index}")
        payload = _payload(rng, NameGenerator(rng, heldout=split == "heldout"))
        instruction = rng.choice(ISSUES).format(symptom=payload["symptom"])
        repo = repos[index % len(repos)]
        yield Task.hashed(f"{suite}-{split}-{index:05d}", suite, repo, split, instruction, payload)


def notes(owners: Mapping[str, str], values: Mapping[str, int]) -> str:
    """Return the text of the two tables: symptom -> module, and module -> number."""
    return "".join(f"{left} {right}\n" for table in (owners, values) for left, right in table.items())


def module_text(name: str, number: int) -> str:
    return f"def {name}(x):\n    return x + {number}\n"


def _payload(rng: random.Random, names: NameGenerator) -> dict[str, Any]:
    symptoms = [names.directory() for _ in range(MODULES)]
    modules = [names.directory() for _ in range(MODULES)]
    *numbers, wrong = rng.sample(list(NUMBERS), k=MODULES + 1)
    values = dict(zip(modules, numbers, strict=True))
    owners = dict(zip(symptoms, rng.sample(modules, k=MODULES), strict=True))
    symptom = rng.choice(symptoms)
    module = owners[symptom]
    files = {f"{name}.py": module_text(name, wrong if name == module else values[name]) for name in modules}
    files[NOTES] = notes(owners, values)
    files["tests/test_types.py"] = _seen_tests(modules)
    tests: dict[str, list[Any]] = {}
    for name in modules:
        arguments = rng.sample(range(100), k=3)
        tests[f"test_{name}"] = [f"{name}.py", name, arguments, [x + values[name] for x in arguments]]
    other = next(name for name in modules if name != module)
    tests[f"test_{other}_of_text"] = [f"{other}.py", other, ["1"], [1 + values[other]]]
    expected = {test: "FAILED" if test.endswith("_of_text") else "PASSED" for test in tests}
    return {
        "files": files,
        "symptom": symptom,
        "module": module,
        "value": values[module],
        "owners": owners,
        "values": values,
        "tests": tests,
        "expected": expected,
        "names": [*symptoms, *modules],
    }


def _seen_tests(modules: list[str]) -> str:
    lines = [f"from {name} import {name}" for name in sorted(modules)]
    lines += [f"\n\ndef test_{name}():\n    assert type({name}(1)) is int" for name in sorted(modules)]
    return "\n".join(lines) + "\n"
