"""Generate tasks: a repository whose modules export through one shared file, and two functions to add.

The payload of a task (JSON):
    files: {path: text}, the start files of both agents
    check: "", because there is no visible check
    shared: the file that exports
    told: whether the instructions say that the partner edits the shared file too
    roles: [{agent_id, feature_id, partner, instruction}], in order
    features: {feature_id: {function, module, path, wanted, operation, number, hidden}}, where `module` gets the
        function, `path` is the shared file, through which the hidden tests call it, `wanted` is an expression, and
        `hidden` is [[argument, value], ...], the hidden test cases
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from string import Template
from typing import Any

from etpi_assets.tasks.family import Task
from etpi_assets.worlds.coop_tiny_shared.features import Formula, sample_formula
from etpi_assets.worlds.names import NameGenerator

AGENTS = ("agent1", "agent2")
FEATURES = ("f1", "f2")
OVERLAP_TOLD_SHARE = 0.5
"""Share of tasks whose instructions say that the partner edits the shared file too."""


@dataclass(frozen=True)
class Layout:
    """A repository: `modules` modules of sampled names in one folder with the shared file."""

    name: str
    shared: str
    modules: int
    heldout: bool = False


LAYOUTS: tuple[Layout, ...] = (
    Layout("cistern", "core.py", 2),
    Layout("bellows", "app.py", 2),
    Layout("trellis", "util.py", 2),
    Layout("sundial", "lib.py", 2),
    Layout("gantry", "core.py", 3),
    Layout("mooring", "app.py", 3),
    Layout("paddock", "util.py", 4),
    Layout("rookery", "lib.py", 4),
    Layout("culvert", "core.py", 4, heldout=True),
    Layout("hayloft", "app.py", 4, heldout=True),
    Layout("jetty", "util.py", 3, heldout=True),
    Layout("windlass", "lib.py", 3, heldout=True),
)


def generate_tasks(suite: str, seed: int, split: str) -> Iterator[Task]:
    """Yield tasks of a split ("train" or "heldout") without end, deterministic in (suite, seed, split, index).

    The split's repositories alternate. Names come from the split's own pool, so tasks of different splits share no
    identifier, whatever their suite and seed."""
    heldout = split == "heldout"
    layouts = [layout for layout in LAYOUTS if layout.heldout is heldout]
    for index in count():
        layout = layouts[index % len(layouts)]
        rng = random.Random(f"{suite}/{seed}/{split}/{index}")
        payload = _payload(layout, rng, NameGenerator(rng, heldout=heldout))
        instruction = "\n\n".join(f"[{role['agent_id']}]\n{role['instruction']}" for role in payload["roles"])
        yield Task.hashed(f"{suite}-{layout.name}-{index:05d}", suite, layout.name, split, instruction, payload)


def _payload(layout: Layout, rng: random.Random, names: NameGenerator) -> dict[str, Any]:
    modules = [names.word() for _ in range(layout.modules)]
    present = {module: (names.word(), sample_formula(rng)) for module in modules}
    files = {f"{module}.py": definition(name, formula.code) for module, (name, formula) in present.items()}
    files[layout.shared] = "".join(export(f"{module}.py", name) for module, (name, _) in present.items())
    features = {
        key: _feature(names.word(), f"{module}.py", layout.shared, rng)
        for key, module in zip(FEATURES, rng.sample(modules, k=2), strict=True)
    }
    tells_overlap = rng.random() < OVERLAP_TOLD_SHARE
    return {
        "files": files,
        "check": "",
        "shared": layout.shared,
        "told": tells_overlap,
        "roles": [_role(index, features, tells_overlap, rng) for index in range(len(AGENTS))],
        "features": features,
    }


def _feature(function: str, module: str, shared: str, rng: random.Random) -> dict[str, Any]:
    wanted = sample_formula(rng)
    arguments = [*rng.sample(range(-60, 2), k=2), *rng.sample(range(2, 100), k=3), *rng.sample(range(100, 500), k=2)]
    return {
        "function": function,
        "module": module,
        "path": shared,
        "wanted": wanted.code,
        "operation": wanted.operation,
        "number": wanted.number,
        "hidden": [[x, wanted(x)] for x in arguments],
    }


def _role(
    index: int, features: Mapping[str, Mapping[str, Any]], tells_overlap: bool, rng: random.Random
) -> dict[str, Any]:
    key, partner = FEATURES[index], AGENTS[1 - index]
    feature = features[key]
    fields = InstructionFields(
        feature["function"], feature["module"], feature["wanted"], feature["path"], partner, tells_overlap
    )
    return {
        "agent_id": AGENTS[index],
        "feature_id": key,
        "partner": partner,
        "instruction": write_text(fields, rng),
    }


def definition(function: str, code: str) -> str:
    """Return the line that defines a function."""
    return f"def {function}(x): return {code}\n"


def export(path: str, function: str) -> str:
    """Return the line of the shared file that exports a function of the module at `path`."""
    return f"from {path.removesuffix('.py')} import {function}\n"


def divided_solution(task: Task, feature_id: str) -> dict[str, str]:
    """Return the task's files after one agent's share of the divided work.

    Each agent adds its function; the first agent alone edits the shared file, for both."""
    features = task.payload["features"]
    feature, files = features[feature_id], dict(task.payload["files"])
    files[feature["module"]] += definition(feature["function"], feature["wanted"])
    if feature_id == FEATURES[0]:
        files[feature["path"]] += "".join(export(f["module"], f["function"]) for f in features.values())
    return files


def wanted_formula(feature: Mapping[str, Any]) -> Formula:
    """Return the formula of a feature's function."""
    return Formula(feature["operation"], feature["number"])


@dataclass(frozen=True)
class InstructionFields:
    """Fields of one agent's instruction.

    Attributes:
        code: the expression that the function returns.
        tells_overlap: the instruction says that the partner exports from the shared file too.
    """

    function: str
    path: str
    code: str
    shared: str
    partner: str
    tells_overlap: bool


_TEMPLATES = (
    "Task: add $fn to $path: return $code\nExport: $shared$overlap\nPartner: $partner",
    "Add the function $fn to $path. It should return $code\nThen export it in $shared$overlap\n"
    "Your partner is $partner.",
    "# New function $fn\n\nThe function $fn in $path should return $code\n\n"
    "$partner works here too. Export: $shared$overlap",
)
_OVERLAP = " ($partner exports there too)"


def write_text(fields: InstructionFields, rng: random.Random) -> str:
    """Write the instruction."""
    template = rng.choice(_TEMPLATES).replace("$overlap", _OVERLAP if fields.tells_overlap else "")
    return Template(template).substitute(
        fn=fields.function, path=fields.path, code=fields.code, shared=fields.shared, partner=fields.partner
    )
