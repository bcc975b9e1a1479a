"""Explain an asset partition: its state, the parts of its input key, and how two of its versions differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from etpi_assets.graph import GRAPH, Node
from etpi_assets.planning.planner import accepted, chain, changed_keys, inputs_of
from etpi_assets.planning.versioning.keys import code_of, file_of
from etpi_assets.specs.load import SpecError, Specs
from etpi_resources.lake.lake import Lake, LakeError, Manifest, Ref


def explain(asset: str, key: str, specs: Specs, lake: Lake, between: Sequence[str] = ()) -> Iterator[str]:
    """Yield lines on a partition: its state, the parts of its key, and the difference between two of its versions.

    Args:
        between: two versions, the older first; default: the last two that were published, if there are two.

    Raises:
        SpecError: there is no such asset or partition.
        LakeError: `between` names a version that was never published.
    """
    node = _node(asset)
    ref = Ref(asset, node.set, key)
    history = lake.history(ref)
    if node.set != "all":
        specs.entry(node.set, key)
        step = next(s for s in chain(node.set, key, specs, lake) if (s.asset, s.key) == (asset, key))
        yield f"{asset} of {key}: {step.state}" + (f": {step.reason}" if step.reason else "")
    if (current := lake.current(ref)) is not None:
        yield from _version(current)
    yield from _key(node, key, specs, lake, current)
    older, newer = _pair(history, between, ref)
    if older and newer:
        yield ""
        yield f"from version {older.version} ({older.created_at[:19]}) to {newer.version} ({newer.created_at[:19]}):"
        yield from _causes(older, newer)
        yield from (f"  {table}: {older.rows.get(table, 0)} → {count} rows" for table, count in newer.rows.items())


def _node(asset: str) -> Node:
    if asset not in GRAPH:
        raise SpecError(f"there is no asset {asset!r}; there are {', '.join(GRAPH)}")
    return GRAPH[asset]


def _version(current: Manifest) -> Iterator[str]:
    took = f" in {current.seconds:.1f} s" if current.seconds is not None else ""
    why = f", because of {current.cause}" if current.cause and current.cause != "first" else ""
    yield f"  version {current.version}, made {current.created_at[:19]}{took}{why}; rows: " + (
        ", ".join(f"{n} {table}" for table, n in current.rows.items()) or "none"
    )
    if note := accepted(current):
        yield f"  {note}"


def _key(node: Node, key: str, specs: Specs, lake: Lake, current: Manifest | None) -> Iterator[str]:
    """Return the parts of a new version's key, each with the current version's part if that differs."""
    yield "key: asset, spec, inputs, code"
    yield f"  spec: {', '.join(node.sections) or 'none of its sections'}"
    if current and current.spec:
        for change in changed_keys(current.spec, specs.sections(node.set, key, node.sections)):
            yield f"    changed: {change}"
    yield "  inputs:"
    inputs = inputs_of(node, key, specs, lake, lake.current)
    was = current.inputs if current else {}
    for name in dict.fromkeys([*inputs, *was]):
        now, before = inputs.get(name, "none"), was.get(name, "none")
        yield f"    {name}: {now}" + (f" (was {before})" if current and before != now else "")
    code = code_of(node, key, specs)
    modules = current.code.get("modules", {}) if current else {}
    yield f"  code {code.whole.digest}: {len(code.whole.modules)} modules and data files"
    for name, digest in code.whole.modules.items():
        mark = "" if not modules or modules.get(name) == digest else " (changed)" if name in modules else " (new)"
        yield f"    {digest} {file_of(name)}{mark}"
    for name in sorted(set(modules) - set(code.whole.modules)):
        yield f"    {modules[name]} {file_of(name)} (no longer reached)"


def _pair(history: Sequence[Manifest], between: Sequence[str], ref: Ref) -> tuple[Manifest | None, Manifest | None]:
    """Return the two versions to compare, the older first; (None, None) if there is only one."""
    by_version = {manifest.version: manifest for manifest in history}
    if between:
        for version in between:
            if version not in by_version:
                raise LakeError(f"{ref} has no version {version!r}; it has {', '.join(by_version) or 'none'}")
        return by_version[between[0]], by_version[between[1]]
    versions = list(by_version.values())
    return (versions[-2], versions[-1]) if len(versions) > 1 else (None, None)


def _causes(older: Manifest, newer: Manifest) -> Iterator[str]:
    """Return the differences in spec, inputs and code behind two versions."""
    for change in changed_keys(older.spec, newer.spec):
        yield f"  spec: {change}"
    for name in dict.fromkeys([*older.inputs, *newer.inputs]):
        was, now = older.inputs.get(name, "none"), newer.inputs.get(name, "none")
        if was != now:
            yield f"  input: {name} {was} → {now}"
    was, now = older.code.get("modules", {}), newer.code.get("modules", {})
    for name in sorted(name for name in {**was, **now} if was.get(name) != now.get(name)):
        yield f"  code: {file_of(name)}"
