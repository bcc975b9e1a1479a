"""The work of `etpi verify`, `rm` and `gc`, as functions that return an exit code. `docs/lake.md` has the recipes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import datetime, timedelta

from etpi_resources.lake.audit import audit, set_aside
from etpi_resources.lake.files import disk_errors
from etpi_resources.lake.lake import Lake, LakeError, Ref
from etpi_resources.lake.removal import Removal, carry_out, plan_garbage, plan_partitions


@disk_errors()
def verify(*, deep: bool, since: datetime | None, move: bool, as_json: bool = False) -> int:
    """Print every damaged part of the lake, with `move` set it aside; 1 if a part is damaged.

    Stdout has a line for each damaged part, `PATH: FAULT`; the summary goes to stderr.
    """
    lake = Lake.open()
    with lake.exclusive_lock() if move else nullcontext():
        result = audit(lake, deep=deep, since=since)
        damages = []
        for damage in result.damages:
            path, refs = str(damage.path.relative_to(lake.root)), [*map(str, damage.refs)]
            damages.append({"path": path, "kind": damage.kind, "fault": damage.fault, "needed_by": refs})
            if not as_json:
                needed = f"needed by {', '.join(refs)}" if refs else "no pointer needs it"
                print(f"{path}: {damage.fault}; {needed}")
        movable = [damage for damage in result.damages if damage.kind != "version"]
        moved = set_aside(lake, movable) if move and movable else None
    if as_json:
        moved_to = str(moved) if moved else None
        print(json.dumps({"verified": dict(result.counts), "damaged": damages, "moved_to": moved_to}, indent=1))
    verified = ", ".join(f"{count} {kind}s" for kind, count in result.counts.items()) or "nothing published"
    print(f"{lake.root}: {verified} verified", file=sys.stderr)
    if result.damages:
        remedy = f"moved to {moved}; runs compute them again" if moved else "docs/lake.md says how to repair them"
        if missing := len(result.damages) - len(movable):
            print(f"{missing} missing: `etpi run` computes them again; versions that need them stay", file=sys.stderr)
        if movable:
            print(f"{len(movable)} damaged: {remedy}", file=sys.stderr)
    return 1 if result.damages else 0


def remove(pairs: Sequence[tuple[str, str]], *, yes: bool) -> int:
    """Show what removing the keys' partitions removes, and with `yes` do it; always 0."""
    return _remove(lambda lake: plan_partitions(lake, pairs), yes)


def collect_garbage(*, older_than: int, yes: bool) -> int:
    """Show what is older than a number of days and not needed, and with `yes` remove it; always 0."""
    return _remove(lambda lake: plan_garbage(lake, timedelta(days=older_than)), yes)


@disk_errors()
def _remove(plan: Callable[[Lake], list[Removal]], yes: bool) -> int:
    lake = Lake.open()
    with lake.exclusive_lock() if yes else nullcontext():
        parts = plan(lake)
        sizes = Counter[tuple[str, str]]()  # one line for all folders of a version
        for part in parts:
            sizes[part.reason, part.what] += part.bytes
        for (reason, what), size in [*sizes.items(), (("in all", ""), sizes.total())]:
            print(f"{reason:20}  {what:60}  {size / 1e6:>12,.3f} MB")
        if yes:
            carry_out(lake, parts)
    if not yes:
        print("Nothing was removed. Add --yes to remove it; it cannot be undone without a backup.")
    return rebuild(lake) if yes and parts else 0


def rebuild(lake: Lake, everything: bool = False) -> int:
    """Build the tables across experiments and the catalog again; 1 if one fails.

    Args:
        everything: also the tables that the lake does not have yet.
    """
    from etpi_assets.reports.assets import catalog, leaderboard, teacher_ceiling
    from etpi_assets.resources import Resources

    code, resources = 0, Resources(lake=lake)
    built = [r for r in (leaderboard, teacher_ceiling) if everything or lake.current(Ref(r.node.name, "all", "all"))]
    for definition in (*built, catalog):
        try:
            definition.execute("all", resources, log=lambda line: None)
            print(f"{definition.node.name}: built again")
        except LakeError as error:
            print(f"etpi: {definition.node.name} was not built again: {error}", file=sys.stderr)
            code = 1
    return code
