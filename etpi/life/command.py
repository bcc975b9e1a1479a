"""The work of `etpi du`, `rm`, `gc`, `backup`, `restore` and `migrate`, as functions that return an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

from etpi.life.pages import plan_page, readable, usage_page
from etpi_resources.lake import backup as backups
from etpi_resources.lake import formats, migrations
from etpi_resources.lake.audit import audit
from etpi_resources.lake.files import disk_errors
from etpi_resources.lake.lake import Lake, LakeError, Ref
from etpi_resources.lake.references import References
from etpi_resources.lake.removal import Keep, Plan, carry_out, plan_garbage, plan_partitions
from etpi_resources.lake.usage import refs_of, usage

Pairs = Sequence[tuple[str, str]]


def disk_use(keys: Sequence[str]) -> int:
    """Print the disk use of the lake, or of what the keys name; always 0."""
    lake = Lake.open()
    references = References(lake)
    print(usage_page(str(lake.root), usage(lake, references), keys, refs_of(references, keys) if keys else None))
    return 0


def remove(pairs: Pairs, *, yes: bool) -> int:
    """Show what removing the keys' partitions removes, and with `yes` do it; 1 if something else needs them."""
    return _remove(lambda lake: plan_partitions(lake, pairs), yes)


def collect_garbage(*, keep_last: int, older_than: float, yes: bool) -> int:
    """Show what nothing needs any more, and with `yes` remove it; always 0."""
    try:
        keep = Keep(keep_last, timedelta(days=older_than))
    except (ValueError, OverflowError) as error:
        raise LakeError(f"--older-than {older_than} is no number of days: {error}") from error
    return _remove(lambda lake: plan_garbage(lake, keep), yes)


@disk_errors()
def _remove(make_plan: Callable[[Lake], Plan], yes: bool) -> int:
    lake = Lake.open()
    with lake.alone() if yes else nullcontext():
        plan = make_plan(lake)
        if plan.refused:
            print("\n".join(["etpi: nothing was removed:", *plan.refused]), file=sys.stderr)
            return 1
        if plan.parts or plan.kept.total():
            print(plan_page(plan))
        if not plan.parts:
            print(f"{lake.root}: nothing to remove")
            return 0
        if not yes:
            print("Nothing was removed. Add --yes to remove it; it cannot be undone (`etpi backup` first).")
            return 0
        carry_out(lake, plan)
    print(f"removed {readable(plan.bytes)}")
    return _rebuild(lake)


def _rebuild(lake: Lake) -> int:
    """Make the tables across experiments and the catalog again, where the lake has them; 1 if one fails."""
    from etpi_assets.reports.assets import catalog, leaderboard, teacher_ceiling
    from etpi_assets.resources import Resources

    code, resources = 0, Resources(lake=lake)
    for recipe in (leaderboard, teacher_ceiling, catalog):
        if recipe is not catalog and lake.current(Ref(recipe.node.name, "all", "all")) is None:
            continue
        try:
            recipe.execute("all", resources, log=lambda line: None)
            print(f"{recipe.node.name}: built again")
        except LakeError as error:
            print(f"etpi: {recipe.node.name} was not built again: {error}", file=sys.stderr)
            code = 1
    return code


@disk_errors()
def back_up(folder: Path, *, deep: bool, delete: bool, force: bool) -> int:
    """Copy the lake to a folder, and verify what was copied; 1 if the backup is damaged."""
    lake = Lake.open()
    copied = backups.back_up(lake, folder, deep=deep, delete=delete, force=force)
    print(f"{folder}: {_copied(copied)}; the lake as of {copied.at}")
    if copied.extra:
        what = "removed from it" if copied.removed else "left in it (--delete removes them)"
        print(f"{len(copied.extra)} files that the lake no longer has were {what}")
    return _verified(Lake(folder), deep)


@disk_errors()
def restore(folder: Path, to: Path | None, *, overwrite: bool) -> int:
    """Copy a backup into a lake (default: the opened one), verify every file, and build its catalog."""
    lake = Lake(to) if to else Lake.open()
    copied = backups.restore(folder, lake, overwrite=overwrite)
    print(f"{lake.root}: {_copied(copied)}")
    code = _verified(lake, deep=True)
    if to is None or lake.root == Lake.open().root:
        return _rebuild(lake) or code
    print(
        f"To use it: ETPI_DATA={lake.root} etpi status; its catalog: ETPI_DATA={lake.root} dg launch --assets catalog"
    )
    return code


def _copied(copied: backups.Copied) -> str:
    return f"{copied.files} files copied ({readable(copied.bytes)}), {copied.present} were there"


def _verified(lake: Lake, deep: bool) -> int:
    result = audit(lake, deep=deep)
    for damage in result.damages:
        print(f"{damage.path}: {damage.fault}")
    print(
        f"verified: {result.counts['pointer']} pointers, {result.counts['file']} files, {len(result.damages)} damaged"
    )
    return 1 if result.damages else 0


@disk_errors()
def migrate(*, yes: bool) -> int:
    """Show what bringing the lake to this etpi's format changes, and with `yes` do it; always 0."""
    root = Lake.folder().resolve()
    stored = formats.read(root)
    if not yes:
        shown = migrations.preview(root)
        if not shown.steps:
            print(f"{root} has format {stored.format}, which this etpi writes; nothing to migrate")
            return 0
        for step in shown.steps:
            print(f"format {step.to}: {step.summary}")
        print(_changes(shown), "would be written again. Nothing was changed; add --yes (`etpi backup` first).")
        return 0
    done = migrations.migrate(root)
    print(f"{root}: format {stored.format} -> {formats.read(root).format}; {_changes(done)} written again")
    return _rebuild(Lake(root)) if done.steps else 0


def _changes(migrated: migrations.Migrated) -> str:
    return f"{migrated.manifests} manifests and {migrated.files.total()} files"
