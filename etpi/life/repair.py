"""Repair a lake: set damaged parts aside, and run the assets of current versions that need them again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from etpi_assets.graph import GRAPH, JOBS
from etpi_assets.planning.planner import consent_for, expensive
from etpi_assets.specs.load import SpecError, Specs
from etpi_resources.lake.audit import Damage, forget, set_aside
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.manifest import Ref

Result = Literal["same content", "other content", "failed", "not current", "no spec", "needs consent"]
Run = Callable[[str, str | None, Sequence[str]], list[str]]
"""Runs assets of a job for a partition key, as `Client.run` does, and returns a line for each failure."""


@dataclass(frozen=True)
class Repair:
    """What became of one damaged part.

    Attributes:
        ref: the partition that was made again; None if no current version needs the part.
        detail: the failure, or the option that is needed.
    """

    damage: Damage
    ref: Ref | None
    result: Result
    detail: str = ""


def repair(
    damages: Sequence[Damage], specs: Specs, lake: Lake, run: Run, consent: Collection[str] = ()
) -> list[Repair]:
    """Make the damaged parts again that current versions need; return what became of each.

    The assets run in the order of the graph. An expensive one (rollouts by a model, trainings) needs consent, because
    its content may differ this time. Parts that only earlier versions need are set aside: nothing reads them, and a run
    that produces the same content again restores them.
    """
    at = datetime.now(UTC)
    position = {name: i for i, name in enumerate(GRAPH)}
    repairs, again = [], list[tuple[Ref, Damage, str | None]]()
    for damage in damages:
        unable = [outcome for ref in damage.refs if (outcome := _refusal(damage, ref, specs, consent))]
        if unable:
            repairs += unable
            continue
        before = {ref: _version(lake, ref) for ref in damage.refs}
        set_aside(lake, damage, at)
        if not damage.refs:
            repairs.append(Repair(damage, None, "not current"))
        again += [(ref, damage, version) for ref, version in before.items()]
    versions = {ref: version for ref, _, version in again if version}
    for ref in sorted({ref for ref, *_ in again}, key=lambda ref: (position[ref.asset], ref.key)):
        failures = run(_job(ref), None if ref.set == "all" else ref.key, [ref.asset])
        now = _version(lake, ref)
        same: Result = "same content" if now == versions.get(ref, now) else "other content"
        result: Result = "failed" if failures or now is None else same
        repairs += [Repair(damage, ref, result, "; ".join(failures)) for needed, damage, _ in again if needed == ref]
    for damage in dict.fromkeys(done.damage for done in repairs if done.result in ("not current", "other content")):
        if not damage.path.exists():
            forget(lake, damage, at)
    return repairs


def _refusal(damage: Damage, ref: Ref, specs: Specs, consent: Collection[str]) -> Repair | None:
    """Return why a partition cannot be made again now, or None."""
    node = GRAPH.get(ref.asset)
    try:
        if node is None:
            raise SpecError(f"this version of etpi has no asset {ref.asset}")
        if ref.set == "all":
            return None
        specs.get(ref.set, ref.key)
    except SpecError as error:
        return Repair(damage, ref, "no spec", str(error))
    option = consent_for(ref.asset)
    if expensive(node, ref.key, specs) and option not in consent:
        return Repair(damage, ref, "needs consent", f"--{option}")
    return None


def _version(lake: Lake, ref: Ref) -> str | None:
    """Return the current version of a partition; None if there is none or its pointer or manifest is damaged."""
    try:
        current = lake.current(ref)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return current.version if current else None


def _job(ref: Ref) -> str:
    """Return the job of the partition's set that has the asset."""
    return next(name for name, (set_name, assets) in JOBS.items() if set_name == ref.set and ref.asset in assets)
