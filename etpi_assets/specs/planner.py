"""What stands between an experiment and its results: the one function that knows what is missing, stale or blocked.

Belongs here: comparing what the lake holds with what the specs, the code and the inputs ask for, through the whole
chain, and saying it in commands. Does not belong here: running anything, Dagster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from etpi_assets.graph import GRAPH, JOBS, Node
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import SpecError, Specs
from etpi_assets.specs.paths import external_path, fingerprint
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.tiny_bases.shipped import shipped
from etpi_assets.versioning.keys import PartitionCode, code_of, file_of, input_key
from etpi_resources.lake.lake import Lake, Manifest, Ref

State = Literal["ok", "missing", "stale", "code", "waiting", "blocked", "invalid"]
"""ok: up to date. missing: never made. stale: its spec or an input changed. code: only the code that makes it changed.
waiting: something upstream of it is not ok. blocked: a blocking check failed. invalid: its spec cannot be read."""
SETS = ("suite", "rollout_set", "experiment")
SPEC_CHANGED = "its spec changed"
OLDER = "made by an older version of etpi, which recorded no code"


Consent = Literal["rebuild", "recollect"]
CONSENTS: tuple[Consent, ...] = ("rebuild", "recollect")
"""What a person agrees to: that expensive results are computed again because code changed; recollect for rollouts."""


def consent_for(asset: str) -> Consent:
    """The consent that computing an asset's expensive results again takes."""
    return "recollect" if asset == "raw_rollouts" else "rebuild"


@dataclass(frozen=True)
class Step:
    """One asset partition of a chain.

    Attributes:
        reason: why it is in its state; where it is ok, what was accepted of it, if anything.
        asks: whether it is only rebuilt with a person's consent: its code changed, and what it computed was expensive.
        seconds: what computing it took last time, where that was recorded.
    """

    asset: str
    set: str
    key: str
    state: State
    reason: str = ""
    asks: bool = False
    seconds: float | None = None

    @property
    def consent(self) -> Consent:
        """The option that gives the consent it asks for."""
        return consent_for(self.asset)


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


def expected_key(node: Node, key: str, specs: Specs, inputs: Mapping[str, str], code: PartitionCode) -> str:
    """The input key that a fresh version of the partition would have."""
    return input_key(node, specs.section_hash(node.set, key, node.sections), inputs, code.whole.digest)


def expensive(node: Node, key: str, specs: Specs) -> bool:
    """Whether a version of the partition costs enough to ask before it is made again for changed code: rollouts,
    trainings and evaluations, not what is read from files or written by a script without sandboxes."""
    if not node.kept:
        return False
    spec = specs.get(node.set, key)
    if isinstance(spec, RolloutSetSpec):
        return spec.kind == "live"
    if isinstance(spec, ExperimentSpec) and node.name == "base_checkpoint":
        return spec.base.kind == "tiny" and spec.base.tiny not in [recipe.section for recipe in shipped()]
    return True


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


def across(specs: Specs, lake: Lake) -> list[Step]:
    """The assets without partitions, each with its state: they read every experiment that has data."""
    steps = []
    for node in GRAPH.values():
        if node.set == "all":
            inputs = inputs_of(node, "all", specs, lake, lake.current)
            have = lake.current(Ref(node.name, "all", "all"))
            code = code_of(node, "all", specs)
            # The catalog has no key of its own: it is what it was built from.
            same = have and have.inputs == inputs if not node.tables else None
            change = None if have is None or same else compare(node, "all", specs, inputs, code, have, lake)
            state: State = "missing" if have is None else change.state if change else "ok"
            steps.append(Step(node.name, "all", "all", state, change.reason if change else ""))
    return steps


def unasked(steps: Iterable[Step], consent: Collection[str]) -> str:
    """What a run would have to compute again for changed code although nobody asked for it, and the ways on; empty
    where there is nothing of the kind."""
    asking = [step for step in steps if step.asks and step.consent not in consent]
    if not asking:
        return ""
    lines = ["Code changed since these were made, and computing them again is expensive:"]
    for step in asking:
        took = f"; took {step.seconds:,.0f} s last time" if step.seconds else ""
        lines.append(f"  {step.asset} of {step.key}: {step.reason}{took}; again with --{step.consent}")
    first = asking[0]
    lines += [
        "Nothing was run. Either give the options named, or, where a change cannot matter, keep the versions:",
        f'  etpi accept {first.asset} {first.key} --because "why it cannot matter"',
        '  etpi accept --all EXPERIMENT --because "..."',
        f"What changed exactly: etpi explain {first.asset} {first.key}",
    ]
    return "\n".join(lines)


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
    code = code_of(node, key, specs)
    wanted = expected_key(node, key, specs, inputs, code)
    waits = [s for r in upstream_refs(node, key, specs, lake) if (s := steps[(r.asset, r.key)]).state != "ok"]
    blocked, have = lake.blocked(ref), current(ref)
    if blocked and blocked.input_key == wanted and not waits:
        return step("blocked", "; ".join(f"{check['name']}: {check['message']}" for check in blocked.failures))
    if have is None:
        return step("missing", f"after {_named(waits, key)}" if waits else "never made")
    change = compare(node, key, specs, inputs, code, have, lake)
    if change is None and not (blocked or waits):
        return step("ok", accepted(have))
    if waits and (change is None or change.state == "stale"):
        states = " or ".join(dict.fromkeys(_WORDS[s.state] for s in waits))
        change = Change("waiting", f"{_named(waits, key)} {'is' if len(waits) == 1 else 'are'} {states}")
    change = change or Change("stale", "its newest version is blocked")
    asks = change.asks(node, key, specs, code, have)
    return Step(node.name, node.set, key, change.state, change.reason, asks, have.seconds)


_WORDS = {"code": "made by other code", "waiting": "not up to date"} | {
    state: state for state in ("missing", "stale", "blocked", "invalid")
}


@dataclass(frozen=True)
class Change:
    """What sets a version apart from the one that would be made now.

    Attributes:
        by_code: inputs that changed only because other code rebuilt them.
    """

    state: State
    reason: str
    by_code: bool = False

    def asks(self, node: Node, key: str, specs: Specs, code: PartitionCode, have: Manifest) -> bool:
        """Whether nothing but code, here or upstream, would have an expensive result computed again."""
        if code.kept is None or not expensive(node, key, specs):
            return False
        if self.state == "code":
            return have.code.get("kept") != code.kept.digest
        return self.state == "stale" and self.by_code


def compare(
    node: Node,
    key: str,
    specs: Specs,
    inputs: Mapping[str, str],
    code: PartitionCode,
    have: Manifest,
    lake: Lake,
) -> Change | None:
    """What changed since a version was made; None where nothing did."""
    if have.input_key == expected_key(node, key, specs, inputs, code):
        return None
    if not have.code:
        return Change("code", OLDER)
    if have.spec_hash != specs.section_hash(node.set, key, node.sections):
        keys = changed_keys(have.spec, specs.sections(node.set, key, node.sections))
        return Change("stale", f"{SPEC_CHANGED}: {', '.join(keys)}")
    changed = [name for name in {**inputs, **have.inputs} if inputs.get(name) != have.inputs.get(name)]
    if changed:
        return Change("stale", f"changed since: {', '.join(changed)}", _by_code(changed, node, key, specs, lake))
    if list(inputs) != list(have.inputs):
        return Change("stale", "its inputs are in another order")
    return Change("code", f"code changed since {have.created_at[:10]}: {', '.join(changed_code(code, have, lake))}")


def changed_keys(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys in which two resolved specs differ, each with both values."""
    found = []
    for name in dict.fromkeys([*was, *now]):
        old, new = was.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += changed_keys(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append(f"{prefix}{name} {_short(old)} → {_short(new)}")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:39]}…"


def changed_code(code: PartitionCode, have: Manifest, lake: Lake) -> list[str]:
    """The modules and data files whose reached definitions differ, each with the definitions where they are known."""
    was, now = have.code.get("modules", {}), code.whole.modules
    before = lake.code(have.code.get("version", ""))
    found = []
    for module in sorted(name for name in {**was, **now} if was.get(name) != now.get(name)):
        old, new = before.get(module, {}), code.whole.definitions.get(module, {})
        names = sorted(name for name in {**old, **new} if old.get(name) != new.get(name)) if before else []
        found.append(f"{file_of(module)} ({', '.join(names)})" if any(names) else file_of(module))
    return found


def accepted(manifest: Manifest) -> str:
    """What a person judged of changed code, in words; empty where nobody did."""
    if not manifest.accepted:
        return ""
    last = manifest.accepted[-1]
    return f"code change accepted by {last['by']} on {last['at'][:10]}: {last['because']}"


def _by_code(changed: Sequence[str], node: Node, key: str, specs: Specs, lake: Lake) -> bool:
    """Whether every changed input is one that only changed code made anew."""
    refs = {f"{ref.asset}/{ref.key}": ref for ref in upstream_refs(node, key, specs, lake)}
    manifests = [lake.current(refs[name]) if name in refs else None for name in changed]
    return all(manifest is not None and manifest.cause == "code" for manifest in manifests)


def _named(steps: Sequence[Step], key: str) -> str:
    return ", ".join(s.asset if s.key == key else f"{s.asset} of {s.key}" for s in steps)
