"""What stands between an experiment and its results: the one function that knows what is missing, stale or blocked.

Belongs here: comparing what the lake holds with what the specs, the code and the inputs ask for, through the whole
chain, and saying it in commands. Does not belong here: running anything, Dagster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from etpi_assets.graph import GRAPH, JOBS, Node
from etpi_assets.specs.load import SpecError, Specs
from etpi_assets.specs.paths import external_path, fingerprint
from etpi_assets.versions import code_version, input_key
from etpi_resources.lake import Lake, Manifest, Ref

State = Literal["ok", "missing", "stale", "blocked", "invalid"]
SETS = ("suite", "rollout_set", "experiment")


@dataclass(frozen=True)
class Step:
    """One asset partition of a chain, and why it stands where it does; `reason` is empty where it is ok."""

    asset: str
    set: str
    key: str
    state: State
    reason: str = ""


def upstream_refs(node: Node, key: str, specs: Specs, lake: Lake, asset: str | None = None) -> list[Ref]:
    """What a partition reads, of all its upstream assets or of one, in the order of the graph and of its spec.

    An asset without partitions reads every partition that has data and a spec; the catalog, which declares no
    upstream, reads all there is.
    """
    if not node.tables:
        return [ref for ref in lake.refs() if ref.asset in GRAPH and ref.asset != node.name and lake.current(ref)]
    refs = []
    for name in node.upstream if asset is None else (asset,):
        upstream = GRAPH[name]
        if node.set == "all":
            have = lake.keys(name, upstream.set)
            keys = [k for k in specs.keys(upstream.set) if k in have]
        else:
            keys = specs.upstream_keys(node.set, key, upstream.set)
        refs += [Ref(name, upstream.set, k) for k in keys]
    return refs


def inputs_of(
    node: Node, key: str, specs: Specs, lake: Lake, current: Callable[[Ref], Manifest | None]
) -> dict[str, str]:
    """The data versions a partition would read, as {"asset/key": version}, in order; the files that its spec names
    outside the lake stand last, as {"path/<as written>": fingerprint}. What is missing is left out."""
    inputs = {}
    for ref in upstream_refs(node, key, specs, lake):
        if manifest := current(ref):
            inputs[f"{ref.asset}/{ref.key}"] = manifest.version
    if node.reads_path and (path := external_path(specs.get(node.set, key))) is not None:
        inputs[f"path/{path}"] = fingerprint(path)
    return inputs


def expected_key(node: Node, key: str, specs: Specs, inputs: Mapping[str, str]) -> str:
    """The input key that a fresh version of the partition would have."""
    return input_key(node, specs.section_hash(node.set, key, node.sections), inputs, code_version(node))


def plan(experiment: str, specs: Specs, lake: Lake) -> list[Step]:
    """Every asset partition an experiment rests on, in an order in which they can be made, with its state.

    Raises:
        SpecError: there is no such experiment; the message lists those there are. An invalid one is a step of state
            "invalid".
    """
    specs.entry("experiment", experiment)
    return chain("experiment", experiment, specs, lake)


def chain(set: str, key: str, specs: Specs, lake: Lake) -> list[Step]:
    """As `plan`, for a suite, a rollout set or an experiment."""
    wanted = {(s, k) for s in SETS[: SETS.index(set)] for k in specs.upstream_keys(set, key, s)} | {(set, key)}
    known: dict[Ref, Manifest | None] = {}

    def current(ref: Ref) -> Manifest | None:
        if ref not in known:
            known[ref] = lake.current(ref)
        return known[ref]

    steps: dict[tuple[str, str], Step] = {}
    for node in GRAPH.values():
        for name, k in sorted(wanted, key=lambda pair: (SETS.index(pair[0]), pair[1])):
            if node.set == name:
                steps[(node.name, k)] = _step(node, k, specs, lake, current, steps)
    return sorted(steps.values(), key=lambda step: SETS.index(step.set))


def open_steps(steps: Iterable[Step]) -> list[Step]:
    """Those that are not ok."""
    return [step for step in steps if step.state != "ok"]


def commands(steps: Sequence[Step]) -> list[str]:
    """The commands that make what is not ok, in order, one a job and partition."""
    found: dict[str, None] = {}
    for step in open_steps(steps):
        job = next(name for name, (set_name, assets) in JOBS.items() if set_name == step.set and step.asset in assets)
        found[f"dg launch --job {job} --partition {step.key}"] = None
    return list(found)


def remedy(ref: Ref, specs: Specs, lake: Lake, experiment: str | None = None) -> str:
    """What to run so that `ref` has data: its whole chain, as commands; `make run` too where an experiment asks."""
    steps = chain(ref.set, ref.key, specs, lake)
    lines = [f"  {command}" for command in commands(steps[: _position(steps, ref) + 1])]
    text = "Run, in this order:\n" + "\n".join(lines)
    return f"{text}\nor all of it at once:\n  make run EXPERIMENT={experiment}" if experiment else text


def _position(steps: Sequence[Step], ref: Ref) -> int:
    return next(i for i, step in enumerate(steps) if (step.asset, step.key) == (ref.asset, ref.key))


def _step(
    node: Node,
    key: str,
    specs: Specs,
    lake: Lake,
    current: Callable[[Ref], Manifest | None],
    steps: Mapping[tuple[str, str], Step],
) -> Step:
    def step(state: State, reason: str = "") -> Step:
        return Step(node.name, node.set, key, state, reason)

    try:
        specs.get(node.set, key)
    except SpecError as error:
        return step("invalid", str(error))
    ref = Ref(node.name, node.set, key)
    inputs = inputs_of(node, key, specs, lake, current)
    wanted = expected_key(node, key, specs, inputs)
    waits = [s for r in upstream_refs(node, key, specs, lake) if (s := steps[(r.asset, r.key)]).state != "ok"]
    blocked, have = lake.blocked(ref), current(ref)
    if blocked and blocked.input_key == wanted and not waits:
        return step("blocked", "; ".join(f"{check['name']}: {check['message']}" for check in blocked.failures))
    if have is None:
        return step("missing", f"after {_named(waits, key)}" if waits else "never made")
    if waits:
        states = " or ".join(dict.fromkeys(s.state for s in waits))
        return step("stale", f"{_named(waits, key)} {'is' if len(waits) == 1 else 'are'} {states}")
    if have.input_key != wanted or blocked:
        return step("stale", _what_changed(node, key, specs, inputs, have))
    return step("ok")


def _named(steps: Sequence[Step], key: str) -> str:
    return ", ".join(s.asset if s.key == key else f"{s.asset} of {s.key}" for s in steps)


def _what_changed(node: Node, key: str, specs: Specs, inputs: Mapping[str, str], have: Manifest) -> str:
    if have.spec_hash != specs.section_hash(node.set, key, node.sections):
        return f"its spec changed ({', '.join(node.sections)})" if node.sections != ("*",) else "its spec changed"
    changed = [name for name in {**inputs, **have.inputs} if inputs.get(name) != have.inputs.get(name)]
    if changed:
        return f"changed since: {', '.join(changed)}"
    return "its code changed" if list(inputs) == list(have.inputs) else "its inputs stand in another order"
