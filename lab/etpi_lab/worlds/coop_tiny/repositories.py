"""Repositories of `coop_tiny`: fixed layouts, filled with new names and functions for each task.

A layout's name is the task's repository, since splits are by repository; the names of modules, folders and functions
are sampled for each task. No folder has two modules: telling siblings apart takes more context than the tiny model can
match. The visible check is a file of the repository that runs one case of one function; it has no hidden case.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter

from etpi_assets.worlds.coop_tiny_shared import features
from etpi_assets.worlds.coop_tiny_shared.features import Formula
from etpi_assets.worlds.names import NameGenerator


@dataclass(frozen=True)
class Layout:
    """`modules`: paths with fields, `{p}` to `{r}` for folders, `{a}` to `{c}` for modules. python3 runs `check`."""

    name: str
    modules: tuple[str, ...]
    check: str
    heldout: bool = False


LAYOUTS: tuple[Layout, ...] = (
    Layout("tidepool", ("{a}.py", "{b}.py"), "check.py"),
    Layout("harborlog", ("{p}/src/{a}.py", "{q}/src/{b}.py"), "check.py"),
    Layout("lanternfish", ("{p}/{a}.py", "{q}/{b}.py", "{c}.py"), "tools/check.py"),
    Layout("millstone", ("{a}.py", "{p}/lib/{b}.py"), "run_checks.py"),
    Layout("orchard", ("{p}/app/{a}.py", "{q}/app/{b}.py", "{c}.py"), "check.py"),
    Layout("quarry", ("{p}/core/{a}.py", "{q}/util/{b}.py"), "tools/check.py"),
    Layout("ferry", ("{p}/{a}.py", "{q}/{b}.py"), "run_checks.py"),
    Layout("saltworks", ("{a}.py", "{b}.py", "{p}/core/{c}.py"), "tests/check.py"),
    Layout("beacon", ("{p}/lib/{a}.py", "{q}/lib/{b}.py"), "check.py"),
    Layout("drydock", ("{p}/core/{a}.py", "{q}/app/{b}.py"), "tests/run.py"),
    Layout("foundry", ("{p}/{a}.py", "{q}/util/{b}.py", "{c}.py"), "tools/run.py"),
    Layout("almanac", ("{p}/{q}/{a}.py", "{r}/{b}.py"), "tests/check.py"),
    Layout("granary", ("{a}.py", "{p}/core/{b}.py"), "check.py", heldout=True),
    Layout("kelpbed", ("{p}/lib/{a}.py", "{q}/{b}.py", "{c}.py"), "tests/run.py", heldout=True),
    Layout("aviary", ("{p}/src/{q}/{a}.py", "{r}/{b}.py"), "run_checks.py", heldout=True),
    Layout("viaduct", ("{p}/app/{a}.py", "{q}/util/{b}.py", "{c}.py"), "tools/run.py", heldout=True),
)

# Not runpy: it would add half of the interpreter's start-up time.
_CHECK = """\
import sys

CASES = {cases}
name = sys.argv[1]
path, value, want = CASES[name]
module = {{}}
exec(open(path).read(), module)
got = module[name](value)
print("ok" if got == want else f"wrong: {{name}}({{value}}) is {{got}}, not {{want}}")
sys.exit(got != want)
"""

Case = tuple[str, int, int]
"""Path, argument and expected value of a visible check."""


@dataclass(frozen=True)
class Function:
    """A one-line function of a module."""

    name: str
    path: str
    formula: Formula


@dataclass(frozen=True)
class GeneratedRepository:
    """The repository of one task. `paths` are its modules."""

    layout: Layout
    paths: tuple[str, ...]
    functions: tuple[Function, ...]


def generate_repository(layout: Layout, rng: random.Random, names: NameGenerator) -> GeneratedRepository:
    """Fill a layout with sampled names and two or three functions a module."""
    fields = sorted({field for module in layout.modules for _, field, _, _ in Formatter().parse(module) if field})
    drawn = {field: names.directory() if field in "pqr" else names.module() for field in fields}
    paths = tuple(module.format(**drawn) for module in layout.modules)
    functions = tuple(
        Function(names.function(), path, features.sample_formula(rng))
        for path in paths
        for _ in range(rng.choice((2, 2, 3)))
    )
    return GeneratedRepository(layout, paths, functions)


def module_text(functions: Sequence[Function]) -> str:
    """Return the source of a module with these functions."""
    return "\n\n".join(f"def {f.name}(x):\n    return {f.formula.code}\n" for f in functions)


def module_texts(repository: GeneratedRepository) -> dict[str, str]:
    """Return the source of every module, by path."""
    return {path: module_text([f for f in repository.functions if f.path == path]) for path in repository.paths}


def check_text(cases: Mapping[str, Case]) -> str:
    """Return the source of the visible check of the functions in `cases`."""
    rows = "".join(f'    "{name}": ("{path}", {value}, {want}),\n' for name, (path, value, want) in cases.items())
    return _CHECK.format(cases=f"{{\n{rows}}}")


def read_check(text: str) -> dict[str, Case]:
    """Return the cases of a visible check. Raises ValueError for any other text."""
    if match := re.search(r"^CASES = (\{\n.*?^\})", text, re.DOTALL | re.MULTILINE):
        cases = ast.literal_eval(match[1])
        if check_text(cases) == text:
            return cases
    raise ValueError("the text is not a visible check as check_text writes it")
