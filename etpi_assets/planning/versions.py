"""Versions of code: the numbers of etpi's components (`versions.toml`), and digests of plugins' distributions."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from etpi_assets.graph import Node
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs
from etpi_assets.specs.plugins import GROUPS, Plugin, plugin, usable_plugins
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.specs.suite import SuiteSpec

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("versions.toml")
COMPONENTS: Mapping[str, Mapping[int, str]] = {
    name: {int(number): text for number, text in rows.items()}
    for name, rows in tomllib.loads(FILE.read_text("utf-8")).items()
}
"""Component -> its numbers, each with a line; the highest is that of the running code."""
DECLARED = "ETPI_VERSION"
"""A plugin's module that assigns it a literal is versioned by that, not by the files of its distribution."""

Versions = Mapping[str, int | str]
"""Component -> its number; "plugin DISTRIBUTION" -> a digest or its declared version."""


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
    def kept_name(self) -> str | None:
        """The name under which expensive results are stored."""
        return None if self.kept is None else hashlib.sha256(json.dumps(self.kept, sort_keys=True).encode()).hexdigest()[:16]


def number(component: str) -> int:
    """Return the number of a component. Raises KeyError if there is no such component."""
    return max(COMPONENTS[component])


def versions_of(node: Node, key: str, specs: Specs) -> PartitionVersions:
    """Return the versions of the components that a partition's spec selects; none if it computes nothing.

    Raises:
        SpecError: the spec is unknown or invalid.
    """
    if not applies(node, key, specs):
        return PartitionVersions({}, None)
    selected = _selection(node, key, specs)
    kept = _expanded(node.kept, selected) if node.kept else None
    return PartitionVersions({**_expanded(node.versions, selected), **(kept or {})}, kept)


def asset_version(node: Node) -> str:
    """Return the version that Dagster shows for an asset: its components with raised numbers, or "1"."""
    patterns = [re.compile(re.sub(r"\\{.*?\\}", ".*", re.escape(name)) + "$") for name in (*node.versions, *node.kept)]
    raised = [name for name in CHANGES if any(pattern.match(name) for pattern in patterns)]
    return ", ".join(f"{name} {number(name)}" for name in raised) or "1"


def raised(was: Versions, now: Versions) -> dict[str, str]:
    """Return the components that differ, with the changes in words.

    What a manifest does not name had the number 1: it is of etpi 0.2 or 0.3, or the component is newer. A number that is
    lower than the manifest's is no change.
    """
    changes = {}
    for name, version in now.items():
        before = was.get(name, version if isinstance(version, str) else 1)
        if isinstance(version, str) or isinstance(before, str):
            if before != version:
                changes[name] = f"{name} changed"
        elif before < version:
            texts = [f"{n}: {CHANGES[name][n]}" for n in sorted(CHANGES[name]) if before < n <= version]
            changes[name] = f"{name} {'; '.join(texts)}"
    return changes


# --- what specs select ------------------------------------------------------------------------------------------------


def _expanded(names: Iterable[str], selected: Mapping[str, list[str] | None]) -> dict[str, int | str]:
    """Return the versions of components; "judge.{family}" is one for each selected family, all if None."""
    versions: dict[str, int | str] = {}
    for name in names:
        start, _, kind = name.rstrip("}").partition("{")
        options = selected.get(kind, []) if kind else [""]
        if options is None:
            versions |= {component: number(component) for component in CHANGES if component.startswith(start)}
            points = usable_plugins(kind, ())[0] if kind in GROUPS else []
        else:
            found = [plugin(kind, option, ()) if kind in GROUPS else None for option in options]
            points = [point for point in found if point]
            named = bool(start) or kind not in GROUPS
            own = [o for o, point in zip(options, found, strict=True) if named and point is None]
            versions |= {start + option: number(start + option) for option in own}
        versions |= {f"plugin {point.distribution.rpartition(' ')[0]}": plugin_version(point) for point in points}
    return dict(sorted(versions.items()))


def _selection(node: Node, key: str, specs: Specs) -> dict[str, list[str] | None]:
    """Return the options that a partition's spec selects, by kind; None selects all."""
    if node.set == "all":
        return {}
    spec = specs.get(node.set, key)
    if isinstance(spec, SuiteSpec):
        return {"family": [spec.family], "sandbox": [str(spec.params.get("sandbox") or "bubblewrap")]}
    if isinstance(spec, RolloutSetSpec):
        suite = specs.suites.get(spec.suite or "")
        steps = ["importers", "agent", "tasks"] if spec.kind == "imported" else LIVE
        return {
            "family": [suite.family] if suite else [],
            "judge": [suite.family] if suite and spec.kind != "imported" else [],
            "engine": [_SCRIPTED.get(spec.engine.kind, spec.engine.kind)] if spec.engine else [],
            "sandbox": [spec.sandbox] if spec.is_collected else [],
            "steps": steps + (["harness"] if spec.agent.harness else []) + (["plan_first"] if spec.templated else []),
            "format": [] if spec.kind != "imported" else None if spec.format == "auto" else [spec.format],
        }
    assert isinstance(spec, ExperimentSpec)
    if node.name in ("rl_checkpoint", "rl_rewards"):
        names, agents, sandbox, engine = [spec.rl.suite], [spec.rl.agent], spec.rl.sandbox, spec.rl.engine
    else:
        evaluated = [spec.evaluate] if spec.evaluate else []
        names, agents, sandbox = [e.suite for e in evaluated], [e.agent for e in evaluated], spec.serving.sandbox
        engine = "transformers" if spec.serving.engine == "auto" else spec.serving.engine
    families = [specs.suites[name].family for name in names if name and name in specs.suites]
    return {
        "family": families,
        "sandbox": [sandbox],
        "engine": [engine],
        "steps": LIVE + (["harness"] if any(a.harness for a in agents) else []),
        "reward": [term.function for term in spec.rl.rewards],
    }


LIVE = ["agent", "chat", "judge", "rollouts", "sandboxes", "tasks", "worlds"]
"""Components of every rollout that etpi collects."""
_SCRIPTED = {"reference": "scripted", "null": "scripted"}


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


# --- files ------------------------------------------------------------------------------------------------------------


@cache
def plugin_version(point: Plugin) -> str:
    """Return the declared version of a plugin, or 16 hex digits over the files of its distribution."""
    root, parts = point.root.resolve(), point.module.split(".")
    module = root.joinpath(*parts)
    source = next((p for p in (module.with_suffix(".py"), module / "__init__.py") if p.is_file()), None)
    declared = re.search(rf"^{DECLARED}\s*=\s*(.+)$", source.read_text("utf-8"), re.MULTILINE) if source else None
    if declared:
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
    """Return 12 hex digits of a file: Python without comments, docstrings and layout, SQL without comments."""
    data = path.read_bytes()
    if path.suffix == ".py":
        try:
            tree = ast.parse(data)
        except SyntaxError:
            return hashlib.sha256(data).hexdigest()[:12]
        data = repr(_normal(tree)).encode()
    elif path.suffix == ".sql":
        data = re.sub(rb"--[^\n]*|\s+", b" ", data)
    return hashlib.sha256(data).hexdigest()[:12]


def _normal(node: object) -> object:
    """Return a syntax tree without strings that are statements, as nested tuples that every Python gives alike."""
    if isinstance(node, ast.AST):
        fields = ((name, _normal(value)) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind"))
        return (type(node).__name__, *(pair for pair in fields if pair[1] not in ((), None)))
    if isinstance(node, list):
        return tuple(_normal(n) for n in node if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)))
    return node
