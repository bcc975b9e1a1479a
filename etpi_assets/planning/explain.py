"""Explain an asset partition: its state, the parts of its input key, and what changed in them."""

from __future__ import annotations

from collections.abc import Iterator

from etpi_assets.planning.planner import Wanted, accepted, chain, changed_keys, differing, node_of, wanted
from etpi_assets.planning.versioning.keys import file_of
from etpi_assets.specs.load import Specs
from etpi_resources.lake.lake import Lake, Manifest, Ref


def explain(asset: str, key: str, specs: Specs, lake: Lake) -> Iterator[str]:
    """Yield lines on a partition: its state, the parts of its key, and what changed since its current version.

    Raises:
        SpecError: there is no such asset or partition.
    """
    node = node_of(asset)
    ref = Ref(asset, node.set, key)
    if node.set != "all":
        specs.entry(node.set, key)
        step = next(s for s in chain(node.set, key, specs, lake) if (s.asset, s.key) == (asset, key))
        yield f"{asset} of {key}: {step.state}" + (f": {step.reason}" if step.reason else "")
    new, current = wanted(node, key, specs, lake), lake.current(ref)
    if current is not None:
        took = f" in {current.seconds:.1f} s" if current.seconds is not None else ""
        rows = ", ".join(f"{count} {table}" for table, count in current.rows.items()) or "none"
        yield f"  version {current.version}, made {current.created_at[:19]}{took}; rows: {rows}"
        yield from [f"  {note}"] if (note := accepted(current)) else []
        yield from (f"  changed since: {line}" for line in _differences(current, new))
    yield "key: asset, spec, inputs, code"
    yield f"  spec: {', '.join(node.sections) or 'none of its sections'}"
    yield from (f"  input: {name} {version}" for name, version in new.inputs.items())
    yield f"  code: {new.code.whole.digest}, of {len(new.code.whole.modules)} modules and data files"
    yield from (f"    {digest} {file_of(name)}" for name, digest in new.code.whole.modules.items())


def _differences(current: Manifest, new: Wanted) -> Iterator[str]:
    yield from (f"spec: {change}" for change in changed_keys(current.spec, new.spec))
    was, now = current.inputs, new.inputs
    yield from (f"input: {n} {was.get(n, 'none')} → {now.get(n, 'none')}" for n in differing(was, now))
    changed = differing(current.code.get("modules", {}), new.code.whole.modules)
    yield from (f"code: {file_of(name)}" for name in sorted(changed))
