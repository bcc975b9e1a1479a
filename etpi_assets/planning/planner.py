"""Plan an experiment: which partitions of its chain are missing, stale or blocked, why, and the commands for them.

The planner compares the lake's manifests with the specs, the code and the inputs. It runs nothing and needs no Dagster.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from etpi_assets.graph import GRAPH, Node
from etpi_assets.planning.versions import PartitionVersions, lines, raised, versions_of
from etpi_assets.specs.load import SpecError, Specs
from etpi_assets.specs.paths import external_path, fingerprint
from etpi_resources.lake import parquet
from etpi_resources.lake.lake import Lake, Manifest, MissingInput, Ref
from etpi_resources.lake.provenance import installed

State = Literal["ok", "missing", "stale", "outdated", "waiting", "blocked", "invalid"]
"""ok: up to date. missing: never computed. stale: its spec or an input changed.
outdated: only the version of its code was raised, or that of code that computed an input.
waiting: an upstream partition is not ok. blocked: a blocking check failed. invalid: its spec cannot be read."""
SETS = ("suite", "rollout_set", "experiment")
OLDER = "computed by etpi 0.1, which recorded neither spec nor code"
ALL = "all"
"""In a set of assets to rebuild: every asset."""
REBUILD_TAG = "etpi/rebuild"
"""The tag of a run that names assets to rebuild, with commas; "true" is all."""


@dataclass(frozen=True)
class Step:
    """One asset partition of a chain.

    Attributes:
        reason: why it is in its state; for an ok one, the packages that made it, if their versions differ.
        kept: whether a run leaves it as it is, because it is outdated and expensive, or because of a seam.
        seam: whether it, or a step that it rests on, is kept although its inputs are others now.
        for_code: whether it is computed again only because versions of code were raised.
        seconds: how long computing it took last time, if recorded.
    """

    asset: str
    set: str
    key: str
    state: State
    reason: str = ""
    kept: bool = False
    seam: bool = False
    for_code: bool = False
    seconds: float | None = None


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
    code: PartitionVersions

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
        text = json.dumps([self.node.name, self.spec_hash, list(self.inputs.items()), self.code.whole])
        return hashlib.sha256(text.encode()).hexdigest()


def wanted(
    node: Node, key: str, specs: Specs, lake: Lake, current: Callable[[Ref], Manifest | None] | None = None
) -> Wanted:
    """Return the version of a partition that would be computed now."""
    inputs = inputs_of(node, key, specs, lake, current or lake.current)
    return Wanted(node, key, specs, inputs, versions_of(node, key, specs))


def expensive(node: Node, key: str, specs: Specs) -> bool:
    """Return whether the partition is kept when only versions of code were raised."""
    return bool(node.kept) and node.expensive(specs.get(node.set, key))


def plan(name: str, specs: Specs, lake: Lake, rebuild: Collection[str] = ()) -> list[Step]:
    """Return every asset partition of a chain with its state, in an order in which they can be computed.

    Args:
        name: of an experiment, a rollout set or a suite (`set_of`).
        rebuild: assets that are not kept when they are outdated; `ALL` is every one.

    Raises:
        SpecError: there is no such spec; the message lists the nearest names. An invalid spec is a step of state
            "invalid".
    """
    return chain(set_of(name, specs), name, specs, lake, rebuild)


def set_of(name: str, specs: Specs) -> str:
    """Return the set that has a spec of this name; an experiment hides a rollout set or suite with its name.

    Raises:
        SpecError: none has.
    """
    named = next((set_name for set_name in reversed(SETS) if name in specs.keys(set_name)), None)
    return named or specs.entry("experiment", name).set


def chain(set: str, key: str, specs: Specs, lake: Lake, rebuild: Collection[str] = ()) -> list[Step]:
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
                steps[(node.name, k)] = _step(node, k, specs, lake, current, steps, rebuild)
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


def kept_lines(steps: Iterable[Step]) -> str:
    """Return what a run keeps although it is outdated, and the option that rebuilds it; empty if nothing."""
    kept = [step for step in steps if step.kept]
    first = [step for step in kept if GRAPH[step.asset].kept]
    lines = ["Kept, although outdated:"] if first else []
    for step in first:
        took = f"; took {step.seconds:,.0f} s last time" if step.seconds else ""
        lines.append(f"  {step.asset} of {step.key}: {step.reason}{took}; again with --rebuild {step.asset}")
    if after := list(dict.fromkeys(step.asset for step in kept if step not in first)):
        lines.append(f"  and with them {', '.join(after)}")
    return "\n".join(lines)


def require(ref: Ref, specs: Specs, lake: Lake) -> Manifest:
    """Return the current version of a partition, to be used as an input.

    Raises:
        BlockedInput: it, or what it is computed from, failed a check; a run would end there again.
        MissingInput: there is no version, and nothing blocks it.
    """
    try:
        return lake.require(ref)
    except MissingInput:
        known = ref.set != "all" and ref.key in specs.keys(ref.set)
        for step in chain(ref.set, ref.key, specs, lake) if known else ():
            if step.state == "blocked":
                lake.require(Ref(step.asset, step.set, step.key))  # names the failed check
        raise


def open_steps(steps: Iterable[Step]) -> list[Step]:
    """Return the steps that a run computes."""
    return [step for step in steps if step.state != "ok" and not step.kept]


def _step(
    node: Node,
    key: str,
    specs: Specs,
    lake: Lake,
    current: Callable[[Ref], Manifest | None],
    steps: Mapping[tuple[str, str], Step],
    rebuild: Collection[str],
) -> Step:
    def step(state: State, reason: str = "", **marks: bool) -> Step:
        return Step(node.name, node.set, key, state, reason, seconds=manifest.seconds if manifest else None, **marks)

    manifest = None
    try:
        specs.get(node.set, key)
    except SpecError as error:
        return step("invalid", str(error))
    ref = Ref(node.name, node.set, key)
    new = wanted(node, key, specs, lake, current)
    upstream = [steps[(r.asset, r.key)] for r in upstream_refs(node, key, specs, lake)]
    open_upstream, seam = open_steps(upstream), any(s.seam for s in upstream)
    stopped = seam and not node.across_seams
    blocked, manifest = lake.blocked(ref), current(ref)
    change = compare(manifest, new, lake) if manifest else None
    if blocked and not open_upstream and difference(blocked, new) is None:
        return step("blocked", "; ".join(f"{check['name']}: {check['message']}" for check in blocked.failures))
    stays = not blocked and node.name not in rebuild and ALL not in rebuild
    if manifest is None:
        if seam and not open_upstream:
            return step("missing", _seam_reason(upstream), kept=True, seam=True)
        return step("missing", f"after {_names(open_upstream, key)}" if open_upstream else "never computed")
    for_code = change is None or change.cause == "code"
    if stays and change and (stopped and (for_code or change.by_code) or for_code and change.expensive(manifest, new)):
        return step("outdated", change.reason, kept=True, seam=seam or change.rests)
    for_code = for_code and all(s.for_code for s in open_upstream)
    if change is None and not (blocked or open_upstream):
        return step("ok", other_packages(manifest) if new.code.kept else "", seam=seam)
    if open_upstream and (change is None or change.rests):
        verb = "is" if len(open_upstream) == 1 else "are"
        reason = "waits for " + ", ".join(f"{_names([s], key)} ({s.state})" for s in open_upstream)
        retrained = any(s.asset in rebuild and "checkpoints" in GRAPH[s.asset].tables for s in open_upstream)
        if stays and for_code and (stopped or (new.code.kept and not retrained and expensive(node, key, specs))):
            again = f"{_names(open_upstream, key)} {verb} computed again, for changed code"
            return step("outdated", again, kept=True, seam=True)
        return step("waiting", reason, seam=seam, for_code=for_code)
    if change is None:
        return step("stale", "its newest version is blocked", seam=seam)
    return step(change.state, change.reason, seam=seam, for_code=for_code)


def _seam_reason(upstream: Sequence[Step]) -> str:
    kept = next(step for step in upstream if step.seam)
    return f"{kept.asset} is kept although its inputs changed; --rebuild builds it first"


PACKAGES = ("torch", "transformers", "trl", "peft", "vllm", "llguidance")
"""Packages whose minor version may change an expensive result."""


def other_packages(manifest: Manifest) -> str:
    """Return which of `PACKAGES` computed a version in another minor version than is installed; empty if none did."""

    def minor(version: str) -> list[str]:
        return version.split("+")[0].split(".")[:2]

    recorded_versions = {name: manifest.fingerprint[name] for name in PACKAGES if name in manifest.fingerprint}
    pairs = [(name, version, installed(name)) for name, version in recorded_versions.items()]
    other = [(name, was, now) for name, was, now in pairs if now and minor(was) != minor(now)]
    return "; ".join(f"made with {name} {was}, {now} is installed" for name, was, now in other)


@dataclass(frozen=True)
class Change:
    """Difference between a version and the one that would be computed now.

    Attributes:
        cause: `code` if only versions of code were raised, its own or those of code that computed its inputs.
        inputs: the inputs that changed; empty if only their order did.
        by_code: whether these changed only because their code did.
        retrained: whether one of them has other checkpoints. A person asked for that training, and results of the
            earlier checkpoints must not stand for it.
    """

    cause: Literal["spec", "inputs", "code"]
    reason: str
    inputs: tuple[str, ...] = ()
    by_code: bool = False
    retrained: bool = False

    @property
    def state(self) -> State:
        """The state of a version with this change."""
        return "outdated" if self.cause == "code" else "stale"

    @property
    def rests(self) -> bool:
        """Whether the change is one of inputs."""
        return self.cause == "inputs" or bool(self.inputs)

    def expensive(self, manifest: Manifest, new: Wanted) -> bool:
        """Return whether an expensive result would be computed again."""
        if new.code.kept is None or self.retrained or not expensive(new.node, new.key, new.specs):
            return False
        return bool(self.inputs) or not manifest.code or bool(raised(recorded(manifest), new.code.kept))


def compare(manifest: Manifest, new: Wanted, lake: Lake) -> Change | None:
    """Return the change since a version was computed, or None."""
    change = difference(manifest, new)
    if change is None or not change.inputs or not _by_code(manifest, change.inputs, new, lake):
        return change
    cause = "code" if change.cause == "inputs" else change.cause
    return replace(change, cause=cause, by_code=True, retrained=_retrained(manifest, change.inputs, new, lake))


def difference(manifest: Manifest, new: Wanted) -> Change | None:
    """Return the change as `compare` does; changed inputs have the cause "inputs", whatever changed them."""
    if not manifest.code:
        return Change("code", OLDER) if manifest.input_key != new.input_key else None
    changed = tuple(differing(manifest.inputs, new.inputs))
    if manifest.spec_hash != new.spec_hash and (keys := changed_keys(*_comparable(manifest, new))):
        return Change("spec", f"its spec changed: {', '.join(keys)}", changed)
    if changed:
        return Change("inputs", f"changed since: {', '.join(changed)}", changed)
    if list(new.inputs) != list(manifest.inputs):
        return Change("inputs", "its inputs are in another order")
    changes = raised(recorded(manifest), new.code.whole)
    if not changes:
        return None
    (_, line), *further = changes.items()
    more = ", ".join(f"{name} {new.code.whole[name]}" for name, _ in further)
    return Change("code", f"{line}; and {more} (etpi explain)" if more else line)


def _comparable(manifest: Manifest, new: Wanted) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the two specs without what is a change of code: sections that the asset lists since, or no longer, and
    defaults of keys that came with a raised number."""
    was, now, named = manifest.spec, new.spec, set(new.node.sections) - {"*"}
    added = {name for name in named if name not in was}
    has_sections = new.node.set != "all" and "*" not in new.node.sections  # else the names are experiments or keys
    gone = {name for name in was if name not in now and has_sections}
    compared = {k: v for k, v in now.items() if k not in added}
    if raised(recorded(manifest), new.code.whole):
        written = new.specs.sections(new.node.set, new.key, new.node.sections, written=True)
        compared = _without_new_defaults(was, compared, written)
    return {k: v for k, v in was.items() if k not in gone}, compared


def _without_new_defaults(was: Any, now: Any, written: Any) -> Any:
    """Return a section of a spec without the keys that a version's spec lacks and nobody wrote."""
    if not isinstance(was, Mapping) or not isinstance(now, Mapping):
        return now
    stated = written if isinstance(written, Mapping) else {}
    kept = {k: v for k, v in now.items() if k in was or k in stated}
    return {k: _without_new_defaults(was.get(k), v, stated.get(k)) for k, v in kept.items()}


def recorded(manifest: Manifest) -> Mapping[str, Any]:
    """Return the versions of code that a manifest names; none up to etpi 0.2, which had digests."""
    return manifest.code.get("versions", {})


def differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ."""
    return [name for name in {**now, **was} if was.get(name) != now.get(name)]


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


def _by_code(manifest: Manifest, changed: Sequence[str], new: Wanted, lake: Lake) -> bool:
    """Return whether every changed input was published only because code changed, each time since the version."""
    refs = {f"{ref.asset}/{ref.key}": ref for ref in upstream_refs(new.node, new.key, new.specs, lake)}
    for name in changed:
        if name not in refs or name not in manifest.inputs:
            return False
        published = [m for m in lake.history(refs[name]) if not m.blocked]
        read = [n for n, m in enumerate(published) if m.version == manifest.inputs[name]]
        since = published[read[-1] + 1 :] if read else []
        if new.inputs.get(name) not in {m.version for m in since} or any(m.cause != "code" for m in since):
            return False
    return True


def _retrained(manifest: Manifest, changed: Sequence[str], new: Wanted, lake: Lake) -> bool:
    """Return whether a changed input has other checkpoints than the one that a version was computed from; False where
    the files of the earlier one are gone."""
    for ref in upstream_refs(new.node, new.key, new.specs, lake):
        if (name := f"{ref.asset}/{ref.key}") in changed and "checkpoints" in GRAPH[ref.asset].tables:
            versions = {m.version: m for m in lake.history(ref)}
            before, now = versions[manifest.inputs[name]], versions[new.inputs[name]]
            if lake.has_files(before) and _checkpoint_ids(before, lake) != _checkpoint_ids(now, lake):
                return True
    return False


def _checkpoint_ids(manifest: Manifest, lake: Lake) -> list[str]:
    rows = parquet.read("checkpoints", lake.files_of(manifest, "checkpoints"), ["checkpoint_id"])
    return rows["checkpoint_id"].to_pylist()


def _names(steps: Sequence[Step], key: str) -> str:
    return ", ".join(s.asset if s.key == key else f"{s.asset} of {s.key}" for s in steps)


def explain(asset: str, key: str, specs: Specs, lake: Lake) -> Iterator[str]:
    """Yield lines on a partition: its state, the parts of its key, and what changed since its current version.

    Raises:
        SpecError: there is no such asset or partition.
    """
    node = node_of(asset)
    if node.set != "all":
        specs.entry(node.set, key)
        step = next(s for s in chain(node.set, key, specs, lake) if (s.asset, s.key) == (asset, key))
        kept = "; kept" if step.kept else ""
        yield f"{asset} of {key}: {step.state}{kept}" + (f": {step.reason}" if step.reason else "")
    new, current = wanted(node, key, specs, lake), lake.current(Ref(asset, node.set, key))
    if current is not None:
        took = f" in {current.seconds:.1f} s" if current.seconds is not None else ""
        rows = ", ".join(f"{count} {table}" for table, count in current.rows.items()) or "none"
        yield f"  version {current.version}, made {current.created_at[:19]}{took}; rows: {rows}"
        yield from [f"  {note}"] if (note := other_packages(current)) else []
        yield from (f"  changed since: {line}" for line in _differences(current, new))
    yield "key: asset, spec, inputs, versions of code"
    yield f"  spec: {', '.join(node.sections) or 'none of its sections'}"
    yield from (f"  input: {name} {version}" for name, version in new.inputs.items())
    for name, version in new.code.whole.items():
        yield f"  code: {name} {version}"
        yield from (f"    {number}: {text}" for number, text in lines(name).items())


def _differences(current: Manifest, new: Wanted) -> Iterator[str]:
    yield from (f"spec: {change}" for change in changed_keys(current.spec, new.spec))
    was, now = current.inputs, new.inputs
    yield from (f"input: {n} {was.get(n, 'none')} → {now.get(n, 'none')}" for n in differing(was, now))
    before = recorded(current)
    yield from (
        f"code: {name} {before[name]} → {version}"
        for name, version in new.code.whole.items()
        if before.get(name, version) != version
    )
