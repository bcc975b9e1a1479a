"""Versions of code: the numbers of etpi's components (`versions.toml`), and digests of plugins' distributions."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from etpi_assets.graph import GraphError, Node
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.folders import format_files
from etpi_assets.specs.load import Specs
from etpi_assets.specs.plugins import GROUPS, Plugin, plugin
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.specs.suite import SuiteSpec

FILE = Path(__file__).with_name("versions.toml")
_PACKAGE = FILE.parents[1]
WORLDS = sorted(module.parent.name for module in (_PACKAGE / "worlds").glob("*/__init__.py"))
"""The embedded worlds: the packages of `worlds`."""
_FIRST = {
    **{f"family.{world}": "tasks and scripted policy" for world in WORLDS},
    **{f"judge.{world}": "verdicts" for world in WORLDS},
    **{f"importer.{file.stem}": "recorded rollouts" for file in (_PACKAGE / "importers/formats").glob("*.toml")},
}
"""Component of a world or format -> the line of its number 1, which the file does not have."""


def _components() -> Mapping[str, Mapping[int, str]]:
    numbers = {name: {1: text} for name, text in sorted(_FIRST.items())}
    for name, rows in tomllib.loads(FILE.read_text("utf-8")).items():
        numbers[name] = numbers.get(name, {}) | {int(number): text for number, text in rows.items()}
    return numbers


COMPONENTS = _components()
"""Component -> its numbers, each with a line; the highest is that of the running code."""
DECLARED = "ETPI_VERSION"
"""A plugin whose module assigns it a literal is versioned by that, not by the files of its distribution."""

Versions = Mapping[str, int | str]
"""Component -> its number; "plugin MODULE" -> a digest of its distribution's files, or its declared version."""


@dataclass(frozen=True)
class PartitionVersions:
    """The versions of the code behind a partition.

    Attributes:
        whole: of all components that its spec selects.
        kept: of those whose results are expensive and stored under them; None for an asset that is cheap.
    """

    whole: Versions
    kept: Versions | None

    @property
    def stored_name(self) -> str:
        """The name under which expensive results are stored; a component that is added at number 1 does not change it.

        It starts with "v"; etpi 0.2 had names of 16 hex digits.
        """
        assert self.kept is not None, "the asset declares no expensive components"
        raised_ones = {name: version for name, version in self.kept.items() if version != 1}
        return f"v{hashlib.sha256(json.dumps(raised_ones, sort_keys=True).encode()).hexdigest()[:16]}"

    @property
    def as_in_0_2(self) -> bool:
        """Whether no number of an expensive component was raised since etpi 0.2, which recorded none."""
        return self.kept is not None and all(version == 1 for version in self.kept.values() if isinstance(version, int))


def number(component: str) -> int:
    """Return the number of a component. Raises KeyError if there is no such component."""
    return max(COMPONENTS[component])


def require_components(node: Node) -> None:
    """Raise GraphError if an asset names a component that does not exist."""
    for name in (*node.versions, *node.kept):
        start, _, kind = name.partition("{")
        if not (any(c.startswith(start) for c in COMPONENTS) if kind else name in COMPONENTS):
            raise GraphError(f"{node.name} names the component {name!r}, which {FILE.name} does not list")


def versions_of(node: Node, key: str, specs: Specs) -> PartitionVersions:
    """Return the versions of the components that a partition's spec selects; none if it computes nothing.

    Raises:
        SpecError: the spec is unknown or invalid.
    """
    if not applies(node, key, specs):
        return PartitionVersions({}, None)
    selected = _selection(node, key, specs)
    kept = dict(_selected(node.kept, selected)) if node.kept else None
    return PartitionVersions({**dict(_selected(node.versions, selected)), **(kept or {})}, kept)


def asset_version(node: Node) -> str:
    """Return the version that Dagster shows for an asset: the components it may use with raised numbers, or "1"."""
    starts = [name.partition("{")[0] for name in (*node.versions, *node.kept) if not name.startswith("{")]
    starts += LIVE if any(name.startswith("{steps}") for name in node.kept) else []
    starts += ["judge", "judge."] if "{proofs}" in node.kept else []
    named = [
        c for c in COMPONENTS if number(c) > 1 and any(c == s or s.endswith(".") and c.startswith(s) for s in starts)
    ]
    return ", ".join(f"{component} {number(component)}" for component in named) or "1"


def raised(was: Versions, now: Versions) -> dict[str, str]:
    """Return the components that differ, each with the lines of its numbers since.

    A component that a manifest does not name had the number 1 and a plugin its present version: the manifest is of
    etpi 0.2, or the asset names the component since. A number that is lower than the manifest's is no change.
    """
    changes = {}
    for name, version in now.items():
        before = was.get(name, version if isinstance(version, str) else 1)
        if isinstance(version, str) or isinstance(before, str):
            if before != version:
                changes[name] = f"{name} changed"
        elif before < version:
            since = (f"{n}: {text}" for n, text in lines(name).items() if before < n <= version)
            changes[name] = f"{name} {'; '.join(since)}"
    return changes


def lines(component: str) -> Mapping[int, str]:
    """Return the raised numbers of a component up to its present one, each with its line; none for a plugin."""
    return {n: text for n, text in sorted(COMPONENTS.get(component, {}).items()) if n > 1}


def judge_of(family: str, was: Versions | None = None) -> str:
    """Return the judge of a suite family, as "judge 2, judge.r2e 3": its components with their numbers, or with those
    that a manifest records (`was`)."""
    now = dict(_selected(("judge", "judge.{family}"), {"family": [family]}))
    if was is not None:
        now = {name: was.get(name, number if isinstance(number, str) else 1) for name, number in now.items()}
    return ", ".join(f"{name} {number}" for name, number in sorted(now.items()))


def lines_between(was: str, now: str) -> str:
    """Return why judges (`judge_of`) differ: the lines of the numbers since the first; that the first is unknown."""
    before, after = ({n: int(v) if v.isdecimal() else v for n, _, v in
                      (part.rpartition(" ") for part in judge.split(", "))} for judge in (was, now))  # fmt: skip
    known = before.keys() & after.keys()
    return "; ".join(raised(before, after).values()) if known else f"{was} by another program"


# --- what specs select ------------------------------------------------------------------------------------------------


def _selected(names: Iterable[str], selected: Mapping[str, list[str]]) -> Iterator[tuple[str, int | str]]:
    """Yield the versions of components; "judge.{family}" is one for each selected family.

    Without a component of that name, the version is that of the plugin with the option's name.
    """
    for name in names:
        start, _, kind = name.rstrip("}").partition("{")
        for option in dict.fromkeys(selected.get(kind, ())) if kind else [""]:
            if (component := start + option) in COMPONENTS:
                yield component, number(component)
            elif kind in GROUPS and (point := plugin(kind, option, ())):
                yield f"plugin {point.module}", plugin_version(point)
            elif kind == "format" and (file := format_files().get(option)):
                yield f"format {option}", hashlib.sha256(file.read_bytes()).hexdigest()[:16]


LIVE = ["agent", "chat", "parsing", "prompts", "tasks"]
"""Components of every rollout that etpi collects. Its verdict has those of its judge (`judge_of`)."""
_SCRIPTED = {"reference": "scripted", "null": "scripted"}


def _selection(node: Node, key: str, specs: Specs) -> dict[str, list[str]]:
    """Return the options that a partition's spec selects, by kind."""
    if node.set == "all":
        return {}
    spec = specs.get(node.set, key)
    if isinstance(spec, SuiteSpec):
        sandbox = str(spec.params.get("sandbox") or "bubblewrap")
        proofs = ["judge", f"judge.{spec.family}"] if spec.proof == "all" else []
        return {"proofs": proofs, "family": [spec.family], "world": _worlds([spec.family]), "sandbox": [sandbox]}
    if isinstance(spec, RolloutSetSpec):
        return _of_rollout_set(spec, specs)
    assert isinstance(spec, ExperimentSpec)
    return _of_experiment(node, spec, specs)


def _of_rollout_set(spec: RolloutSetSpec, specs: Specs) -> dict[str, list[str]]:
    suite = specs.suites.get(spec.suite or "")
    family = [suite.family] if suite else []
    if spec.kind == "imported":
        formats = [name.removeprefix("importer.") for name in COMPONENTS if name.startswith("importer.")]
        return {
            "steps": ["importers", "parsing"],
            "format": [*formats, *format_files()] if spec.format == "auto" else [spec.format],
            "scored": family,
        }
    templated = spec.templated is not None
    return {
        "family": family,
        "world": _worlds(family),
        "scored": family,
        "engine": [_SCRIPTED.get(spec.engine.kind, spec.engine.kind)] if spec.engine else [],
        "sandbox": [] if templated else [spec.sandbox],
        "steps": ["agent", "chat", "parsing", "plan_first", "prompts"]
        if templated
        else [*LIVE, *(["harness"] if spec.agent.harness else [])],
    }


def _of_experiment(node: Node, spec: ExperimentSpec, specs: Specs) -> dict[str, list[str]]:
    if node.name in ("rl_checkpoint", "rl_rewards"):
        suites, agents, sandbox, engine = [spec.rl.suite], [spec.rl.agent], spec.rl.sandbox, spec.rl.engine
    else:
        evaluated = [spec.evaluate] if spec.evaluate else []
        suites, agents, sandbox = [e.suite for e in evaluated], [e.agent for e in evaluated], spec.serving.sandbox
        engine = "transformers" if spec.serving.engine == "auto" else spec.serving.engine
    families = [specs.suites[name].family for name in suites if name and name in specs.suites]
    return {
        "family": families,
        "world": _worlds(families),
        "sandbox": [sandbox],
        "engine": [engine],
        "steps": [*LIVE, *(["harness"] if any(agent.harness for agent in agents) else [])],
        "reward": [term.function for term in spec.rl.rewards],
    }


def _worlds(families: Iterable[str]) -> list[str]:
    """Return the component of the parts that embedded worlds share, if a family is one."""
    return [] if set(WORLDS).isdisjoint(families) else ["worlds"]


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
        "blame": spec.blame is not None,
    }
    return computes.get(node.name, True)


# --- plugins ----------------------------------------------------------------------------------------------------------


@cache
def plugin_version(point: Plugin) -> str:
    """Return the version that a plugin's module or a package above it declares, or 16 hex digits over the files of its
    distribution."""
    root, parts = point.root.resolve(), point.module.split(".")
    for depth in range(len(parts), 0, -1):
        module = root.joinpath(*parts[:depth])
        source = next((p for p in (module / "__init__.py", module.with_suffix(".py")) if p.is_file()), None)
        if source and (declared := re.search(rf"^{DECLARED}\s*=\s*(.+)$", source.read_text("utf-8"), re.MULTILINE)):
            return f"declared {ast.literal_eval(declared[1])}"
    # An editable installation lists no sources, and a distribution may have several packages.
    places = {root / parts[0]} | {root / name for name in _top_level(point.distribution.rpartition(" ")[0])}
    files = {f for p in places for f in (p.rglob("*") if p.is_dir() else [p.with_suffix(".py")]) if f.is_file()}
    named = sorted(f for f in files if "__pycache__" not in f.parts)
    entries = [(f.relative_to(root).as_posix(), digest(f)) for f in named]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


def _top_level(name: str) -> list[str]:
    """Return the packages that a distribution says it has."""
    try:
        return (distribution(name).read_text("top_level.txt") or "").split()
    except PackageNotFoundError:
        return []


def digest(path: Path) -> str:
    """Return 12 hex digits of a file; Python without comments, docstrings and layout."""
    data = path.read_bytes()
    if path.suffix == ".py":
        try:
            tree = ast.parse(data)
        except SyntaxError:
            return hashlib.sha256(data).hexdigest()[:12]
        data = repr(_normal(tree)).encode()
    return hashlib.sha256(data).hexdigest()[:12]


def _normal(node: object) -> object:
    """Return a syntax tree without strings that are statements, as nested tuples that every Python gives alike."""
    if isinstance(node, ast.AST):
        fields = ((name, _normal(value)) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind"))
        return (type(node).__name__, *(pair for pair in fields if pair[1] not in ((), None)))
    if isinstance(node, list):
        return tuple(_normal(n) for n in node if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)))
    return node
