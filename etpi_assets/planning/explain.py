"""Explain an asset partition: its state, the parts of its key, the numbers of its code, and what changed in them."""

from __future__ import annotations

from collections.abc import Iterator

from etpi_assets.planning.planner import (
    Wanted,
    chain,
    changed_keys,
    differing,
    node_of,
    other_packages,
    recorded,
    wanted,
)
from etpi_assets.planning.versions import lines
from etpi_assets.specs.load import Specs
from etpi_resources.lake.lake import Lake, Manifest, Ref


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
