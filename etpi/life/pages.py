"""What the commands print: tables of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from etpi_resources.lake.manifest import Ref
from etpi_resources.lake.removal import Part, Plan
from etpi_resources.lake.usage import CheckpointUse, State, Usage, meaning

WIDTH = 100
_STATES: tuple[State, ...] = ("current", "past", "unnamed")
_MOST_PARTS = 12
"""Parts of one reason that a plan names."""


def readable(size: int) -> str:
    """Return a number of bytes with a unit."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size / 1e3:,.0f} kB"


def usage_page(root: str, usage: Usage, keys: Sequence[str] = (), refs: Collection[Ref] | None = None) -> str:
    """Return disk use by asset, by key, of checkpoints and of all else; with `keys` and their `refs`, only of these."""
    by_asset = usage.by_asset(refs)
    checkpoints = [c for c in usage.checkpoints if not keys or any(_names(user, keys) for user in c.users)]
    versions = sum((states for states in by_asset.values()), Counter[State]())
    lines = [f"{root}: {readable(usage.total)}" if not keys else f"{', '.join(keys)}, in {root}"]
    lines += ["", *_states("versions by asset", by_asset, versions)]
    if not keys:
        by_key = {_key(*pair): states for pair, states in usage.by_key().items()}
        lines += ["", *_states("the same by key", by_key, versions)]
    if checkpoints:
        lines += ["", *_checkpoints(checkpoints, keys)]
    if not keys:
        lines += ["", *_other(usage)]
    return "\n".join(lines)


def _key(set: str, key: str) -> str:
    return "tables across experiments" if set == "all" else f"{set.replace('_', ' ')} {key}"


def _names(user: str, keys: Iterable[str]) -> bool:
    return user.removesuffix(" (past)").split(" of ", 1)[1] in keys


def _states(title: str, rows: Mapping[str, Counter[State]], total: Counter[State]) -> list[str]:
    def line(name: str, states: Counter[State]) -> str:
        cells = "".join(f"{readable(states[state]) if states[state] else '-':>12}" for state in _STATES)
        return f"{name[:48]:48}{cells}"

    ordered = sorted(rows.items(), key=lambda item: -sum(item[1].values()))
    head = f"{title:48}" + "".join(f"{state:>12}" for state in _STATES)
    return [head, *(line(name, states) for name, states in ordered), line("total", total)]


def _checkpoints(checkpoints: Sequence[CheckpointUse], keys: Sequence[str]) -> list[str]:
    lines = [f"{'checkpoint':20}{'size':>12}    used by"]
    for use in checkpoints:
        users = ", ".join(use.users) or "no version: `etpi gc` removes it"
        first, *more = textwrap.wrap(users, WIDTH - 36) or [""]
        lines += [f"{use.checkpoint:20}{readable(use.bytes):>12}    {first}", *(" " * 36 + line for line in more)]
    lines.append(f"{'total, each once':20}{readable(sum(use.bytes for use in checkpoints)):>12}")
    if keys:
        unshared = sum(use.bytes for use in checkpoints if all(_names(user, keys) for user in use.users))
        lines.append(f"{'used by no other':20}{readable(unshared):>12}")
    return lines


def _other(usage: Usage) -> list[str]:
    shown = [(place, size) for place, size in usage.other.most_common() if size > 4096]
    rest = sum(usage.other.values()) - sum(size for _, size in shown) + usage.folders
    lines = [f"{'all else':36}{'size':>12}"]
    lines += [f"{place[:36]:36}{readable(size):>12}    {meaning(place)}".rstrip() for place, size in shown]
    return [*lines, f"{'folders':36}{readable(rest):>12}"]


def plan_page(plan: Plan) -> str:
    """Return what a removal would remove, by reason, and what it keeps."""
    lines = []
    for reason, (count, size) in plan.by_reason().items():
        lines.append(f"{_plural(reason, count):48}{readable(size):>12}")
        parts = [part for part in plan.parts if part.reason == reason]
        named = _merged(parts)
        lines += [f"  {name[:46]:46}{readable(n):>12}" for name, n in list(named.items())[:_MOST_PARTS]]
        if len(named) > _MOST_PARTS:
            lines.append(f"  and {len(named) - _MOST_PARTS} more")
    lines.append(f"{'in all':48}{readable(plan.bytes):>12}")
    lines += [f"kept though nothing needs it: {what}, {readable(size)}" for what, size in plan.kept.items() if size]
    return "\n".join(lines)


def _merged(parts: Sequence[Part]) -> dict[str, int]:
    """Return the bytes of parts by what they are; the tables of a version count with it."""
    sums: dict[str, int] = {}
    for part in parts:
        name = part.what.split(" of ", 1)[1] if part.reason == "past version" and " of " in part.what else part.what
        sums[name] = sums.get(name, 0) + part.bytes
    return sums


def _plural(reason: str, count: int) -> str:
    return {"partition": "partitions", "past version": "past versions"}.get(reason, f"{reason} ({count})")
