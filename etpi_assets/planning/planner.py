"""Plan an experiment: which partitions of its chain are missing, stale or blocked, and the commands that make them.

The planner compares the lake's manifests with the specs, the code and the inputs. It runs nothing and needs no Dagster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from etpi_assets.graph import GRAPH, Node
from etpi_assets.planning.versioning.keys import PartitionCode, code_of, file_of, input_key
from etpi_assets.specs.load import SpecError, Specs
from etpi_assets.specs.paths import external_path, fingerprint
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_resources.lake.lake import Lake, Manifest, Ref

State = Literal["ok", "missing", "stale", "code", "waiting", "blocked", "invalid"]
"""ok: up to date. missing: never computed. stale: its spec or an input changed. code: only its code changed.
waiting: an upstream partition is not ok. blocked: a blocking check failed. invalid: its spec cannot be read."""
SETS = ("suite", "rollout_set", "experiment")
SPEC_CHANGED = "its spec changed"
OLDER = "computed by an older version of etpi, which recorded no code"


Consent = Literal["rebuild", "recollect"]
CONSENTS: tuple[Consent, ...] = ("rebuild", "recollect")
"""The options by which a person agrees to recompute expensive results because code changed: `recollect` for rollouts,
`rebuild` for the rest."""
CONSENT_TAG = "etpi/"
"""Prefix of the run tags that give consent: etpi/rebuild, etpi/recollect."""


@dataclass(frozen=True)
class Step:
    """One asset partition of a chain.

    Attributes:
        reason: why it is in its state; for an ok one, the change of code that a person accepted, if any.
        needs_consent: whether rebuilding takes a person's consent: its code changed and its result was expensive.
        seconds: how long computing it took last time, if recorded.
    """

    asset: str
    set: str
    key: str
    state: State
    reason: str = ""
    needs_consent: bool = False
    seconds: float | None = None

    @property
    def consent(self) -> Consent:
        """The option that gives the needed consent."""
        return "recollect" if self.asset == "raw_rollouts" else "rebuild"


def node_of(asset: str) -> Node:
    """Return an asset's node. Raises SpecError if there is no such asset; the message lists the names."""
    if asset not in GRAPH:
        raise SpecError(f"there is no asset {asset!r}; there are {', '.join(GRAPH)}")
    return GRAPH[asset]


def upstream_refs(node: Node, key: str, specs: Specs, lake: Lake, asset: str | None = None) -> list[Ref]:
    """Return the partitions that a partition reads, of all upstream assets or of one, in order of graph and spec.

    An asset without partitions reads every partition that has data, with or without a spec; the catalog, which declares
    no upstream, reads every current version.
    """
    if not node.tables:
        return [ref for ref in lake.refs() if ref.asset in GRAPH and ref.asset != node.name and lake.current(ref)]
    refs = []
    for name in node.upstream if asset is None else (asset,):
        upstream = GRAPH[name]
        across_all = node.set == "all"
        keys = lake.keys(name, upstream.set) if across_all else specs.upstream_keys(node.set, key, upstream.set)
        refs += [Ref(name, upstream.set, k) for k in keys]
    return refs


def inputs_of(
    node: Node, key: str, specs: Specs, lake: Lake, current: Callable[[Ref], Manifest | None]
) -> dict[str, str]:
    """Return the data versions that a partition would read, as {"asset/key": version}, in order.

    Files outside the lake that its spec names come last, as {"path/<as written>": fingerprint}. Missing inputs are left
    out.
    """
    inputs = {}
    for ref in upstream_refs(node, key, specs, lake):
        if manifest := current(ref):
            inputs[f"{ref.asset}/{ref.key}"] = manifest.version
    if node.reads_path and (path := external_path(specs.get(node.set, key))) is not None:
        inputs[f"path/{path}"] = fingerprint(path)
    return inputs


@dataclass(frozen=True)
class Wanted:
    """The version of a partition that would be computed now; `inputs` as `inputs_of` returns them."""

    node: Node
    key: str
    specs: Specs
    inputs: Mapping[str, str]
    code: PartitionCode

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The resolved keys of its spec that it depends on."""
        return self.specs.sections(self.node.set, self.key, self.node.sections)

    @cached_property
    def spec_hash(self) -> str:
        """The hash of `spec`."""
        return self.specs.section_hash(self.node.set, self.key, self.node.sections)

    @cached_property
    def input_key(self) -> str:
        """Its input key."""
        return input_key(self.node, self.spec_hash, self.inputs, self.code.whole.digest)


def wanted(
    node: Node, key: str, specs: Specs, lake: Lake, current: Callable[[Ref], Manifest | None] | None = None
) -> Wanted:
    """Return the version of a partition that would be computed now."""
    inputs = inputs_of(node, key, specs, lake, current or lake.current)
    return Wanted(node, key, specs, inputs, code_of(node, key, specs))


def expensive(node: Node, key: str, specs: Specs) -> bool:
    """Return whether recomputing the partition for changed code needs consent.

    Live rollouts, trainings and evaluations do; imports and templated rollouts do not.
    """
    if not node.kept:
        return False
    spec = specs.get(node.set, key)
    if isinstance(spec, RolloutSetSpec):
        return spec.is_collected
    return True


def plan(name: str, specs: Specs, lake: Lake) -> list[Step]:
    """Return every asset partition of a chain with its state, in an order in which they can be computed.

    Args:
        name: of an experiment, a rollout set or a suite (`set_of`).

    Raises:
        SpecError: there is no such spec; the message lists the nearest names. An invalid spec is a step of state
            "invalid".
    """
    return chain(set_of(name, specs), name, specs, lake)


def set_of(name: str, specs: Specs) -> str:
    """Return the set that has a spec of this name; an experiment hides a rollout set or suite with its name.

    Raises:
        SpecError: none has.
    """
    named = next((set_name for set_name in reversed(SETS) if name in specs.keys(set_name)), None)
    return named or specs.entry("experiment", name).set


def chain(set: str, key: str, specs: Specs, lake: Lake) -> list[Step]:
    """Return the steps of a suite, a rollout set or an experiment, as `plan` does."""
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
    """Return the assets without partitions, which read every experiment that has data, with their states."""
    steps = []
    for node in GRAPH.values():
        if node.set == "all":
            new, manifest = wanted(node, "all", specs, lake), lake.current(Ref(node.name, "all", "all"))
            # The catalog is up to date when its inputs are; its own key does not count.
            same = manifest and manifest.inputs == new.inputs if not node.tables else None
            change = None if manifest is None or same else compare(manifest, new, lake)
            state: State = "missing" if manifest is None else change.state if change else "ok"
            steps.append(Step(node.name, "all", "all", state, change.reason if change else ""))
    return steps


def consent_refusal(steps: Iterable[Step], consent: Collection[str]) -> str:
    """Return why a run may not start without more consent, and what to do; empty if it may.

    The message lists the expensive steps whose code changed and that `consent` does not cover.
    """
    uncovered = [step for step in steps if step.needs_consent and step.consent not in consent]
    if not uncovered:
        return ""
    lines = ["Code changed since these were computed, and computing them again is expensive:"]
    for step in uncovered:
        took = f"; took {step.seconds:,.0f} s last time" if step.seconds else ""
        lines.append(f"  {step.asset} of {step.key}: {step.reason}{took}; again with --{step.consent}")
    first = uncovered[0]
    lines += [
        f'Nothing was run. Give the options named above (as tags of a run: {CONSENT_TAG}{first.consent}: "true"), or '
        "keep a version whose change cannot matter:",
        f'  etpi accept {first.asset} {first.key} --because "why it cannot matter"',
        '  etpi accept --all EXPERIMENT --because "..."',
        f"What changed exactly: etpi explain {first.asset} {first.key}",
    ]
    return "\n".join(lines)


def open_steps(steps: Iterable[Step]) -> list[Step]:
    return [step for step in steps if step.state != "ok"]


def _step(
    node: Node,
    key: str,
    specs: Specs,
    lake: Lake,
    current: Callable[[Ref], Manifest | None],
    steps: Mapping[tuple[str, str], Step],
) -> Step:
    def step(state: State, reason: str = "", needs_consent: bool = False, seconds: float | None = None) -> Step:
        return Step(node.name, node.set, key, state, reason, needs_consent, seconds)

    try:
        specs.get(node.set, key)
    except SpecError as error:
        return step("invalid", str(error))
    ref = Ref(node.name, node.set, key)
    new = wanted(node, key, specs, lake, current)
    open_upstream = [s for r in upstream_refs(node, key, specs, lake) if (s := steps[(r.asset, r.key)]).state != "ok"]
    blocked, manifest = lake.blocked(ref), current(ref)
    if blocked and blocked.input_key == new.input_key and not open_upstream:
        return step("blocked", "; ".join(f"{check['name']}: {check['message']}" for check in blocked.failures))
    if manifest is None:
        return step("missing", f"after {_names(open_upstream, key)}" if open_upstream else "never computed")
    change = compare(manifest, new, lake)
    if change is None and not (blocked or open_upstream):
        return step("ok", accepted(manifest), seconds=manifest.seconds)
    if open_upstream and (change is None or change.state == "stale"):
        states = " or ".join(dict.fromkeys(_WORDS[s.state] for s in open_upstream))
        verb = "is" if len(open_upstream) == 1 else "are"
        change = Change("waiting", f"{_names(open_upstream, key)} {verb} {states}")
    change = change or Change("stale", "its newest version is blocked")
    return step(change.state, change.reason, change.needs_consent(manifest, new), manifest.seconds)


_WORDS = {"code": "of changed code", "waiting": "not up to date"} | {
    state: state for state in ("missing", "stale", "blocked", "invalid")
}


@dataclass(frozen=True)
class Change:
    """Difference between a version and the one that would be computed now.

    Attributes:
        by_code: inputs that changed only because other code rebuilt them.
    """

    state: State
    reason: str
    by_code: bool = False

    def needs_consent(self, manifest: Manifest, new: Wanted) -> bool:
        """Return whether only changed code, here or upstream, would recompute an expensive result."""
        if new.code.kept is None or not expensive(new.node, new.key, new.specs):
            return False
        if self.state == "code":
            return manifest.code.get("kept") != new.code.kept.digest
        return self.state == "stale" and self.by_code


def compare(manifest: Manifest, new: Wanted, lake: Lake) -> Change | None:
    """Return the change since a version was computed, or None."""
    if manifest.input_key == new.input_key:
        return None
    if not manifest.code:
        return Change("code", OLDER)
    if manifest.spec_hash != new.spec_hash:
        return Change("stale", f"{SPEC_CHANGED}: {', '.join(changed_keys(manifest.spec, new.spec))}")
    if changed := differing(manifest.inputs, new.inputs):
        return Change("stale", f"changed since: {', '.join(changed)}", _by_code(changed, new, lake))
    if list(new.inputs) != list(manifest.inputs):
        return Change("stale", "its inputs are in another order")
    names = _first(changed_code(manifest, new.code, lake), "files")
    return Change("code", f"code changed since {manifest.created_at[:10]}: {names}")


def differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ."""
    return [name for name in {**now, **was} if was.get(name) != now.get(name)]


_MOST_NAMES = 3
"""Files, and definitions of a file, that a reason names; `etpi explain` lists all."""


def _first(names: Sequence[str], what: str) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more {what}" if more > 0 else "")


def changed_keys(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys in which two resolved specs differ, each with both values."""
    changes = []
    for name in dict.fromkeys([*was, *now]):
        old, new = was.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += changed_keys(old, new, f"{prefix}{name}.")
        elif old != new:
            changes.append(f"{prefix}{name} {_short(old)} → {_short(new)}")
    return changes


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:39]}…"


def changed_code(manifest: Manifest, code: PartitionCode, lake: Lake) -> list[str]:
    """Return the modules and data files whose reached definitions differ, each with its definitions if known."""
    before = lake.code(manifest.code.get("version", ""))
    changes = []
    for module in sorted(differing(manifest.code.get("modules", {}), code.whole.modules)):
        names = differing(before.get(module, {}), code.whole.definitions.get(module, {})) if before else []
        changes.append(file_of(module) + (f" ({_first(sorted(names), 'definitions')})" if any(names) else ""))
    return changes


def accepted(manifest: Manifest) -> str:
    """Return who accepted a change of code and why, in words; empty if nobody did."""
    if not manifest.accepted:
        return ""
    last = manifest.accepted[-1]
    return f"code change accepted by {last['by']} on {last['at'][:10]}: {last['because']}"


def _by_code(changed: Sequence[str], new: Wanted, lake: Lake) -> bool:
    """Return whether every changed input was rebuilt only because code changed."""
    refs = {f"{ref.asset}/{ref.key}": ref for ref in upstream_refs(new.node, new.key, new.specs, lake)}
    manifests = [lake.current(refs[name]) if name in refs else None for name in changed]
    return all(manifest is not None and manifest.cause == "code" for manifest in manifests)


def _names(steps: Sequence[Step], key: str) -> str:
    return ", ".join(s.asset if s.key == key else f"{s.asset} of {s.key}" for s in steps)
