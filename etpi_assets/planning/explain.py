"""Explain an asset partition: its state, the parts of its input key, and how two of its versions differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etpi_assets.planning.planner import accepted, chain, changed_keys, differing, node_of, wanted
from etpi_assets.planning.versioning.keys import file_of
from etpi_assets.specs.load import Specs
from etpi_resources.lake.lake import Lake, LakeError, Manifest, Ref


def explain(asset: str, key: str, specs: Specs, lake: Lake, between: Sequence[str] = ()) -> Iterator[str]:
    """Yield lines on a partition: its state, the parts of its key, and the difference between two of its versions.

    Args:
        between: two versions, the older first; default: the last two that were published, if there are two.

    Raises:
        SpecError: there is no such asset or partition.
        LakeError: `between` names a version that was never published.
    """
    node = node_of(asset)
    ref = Ref(asset, node.set, key)
    if node.set != "all":
        specs.entry(node.set, key)
        step = next(s for s in chain(node.set, key, specs, lake) if (s.asset, s.key) == (asset, key))
        yield f"{asset} of {key}: {step.state}" + (f": {step.reason}" if step.reason else "")
    new, current = wanted(node, key, specs, lake), lake.current(ref)
    now = (new.spec, new.inputs, new.code.whole.modules)
    if current is not None:
        took = f" in {current.seconds:.1f} s" if current.seconds is not None else ""
        rows = ", ".join(f"{count} {table}" for table, count in current.rows.items()) or "none"
        yield f"  version {current.version}, made {current.created_at[:19]}{took}; rows: {rows}"
        yield from [f"  {note}"] if (note := accepted(current)) else []
        yield from (f"  changed since: {line}" for line in _differences(_parts(current), now))
    yield "key: asset, spec, inputs, code"
    yield f"  spec: {', '.join(node.sections) or 'none of its sections'}"
    yield from (f"  input: {name} {version}" for name, version in new.inputs.items())
    yield f"  code: {new.code.whole.digest}, of {len(now[2])} modules and data files"
    yield from (f"    {digest} {file_of(name)}" for name, digest in now[2].items())
    versions = {manifest.version: manifest for manifest in lake.history(ref)}
    if unknown := [version for version in between if version not in versions]:
        raise LakeError(f"{ref} has no version {unknown[0]!r}; it has {', '.join(versions) or 'none'}")
    pair = [versions[version] for version in between or [*versions][-2:]]
    if len(pair) == 2:
        older, newer = pair
        yield f"from version {older.version} ({older.created_at[:19]}) to {newer.version} ({newer.created_at[:19]}):"
        yield from (f"  {line}" for line in _differences(_parts(older), _parts(newer)))
        yield from (f"  {table}: {older.rows.get(table, 0)} → {count} rows" for table, count in newer.rows.items())


_Parts = tuple[Mapping[str, Any], Mapping[str, str], Mapping[str, str]]
"""The parts of a version's key: the spec, {input: version}, {module: digest}."""


def _parts(manifest: Manifest) -> _Parts:
    return manifest.spec, manifest.inputs, manifest.code.get("modules", {})


def _differences(older: _Parts, newer: _Parts) -> Iterator[str]:
    """Yield a line for each part of a key that differs."""
    yield from (f"spec: {change}" for change in changed_keys(older[0], newer[0]))
    was, now = older[1], newer[1]
    yield from (f"input: {n} {was.get(n, 'none')} → {now.get(n, 'none')}" for n in differing(was, now))
    yield from (f"code: {file_of(name)}" for name in sorted(differing(older[2], newer[2])))
