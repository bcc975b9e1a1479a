"""What a run would make, why, and what it cost last time, without running anything."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from etpi_assets.graph import GRAPH
from etpi_assets.planning.planner import Step, consent_refusal, expensive
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs
from etpi_assets.specs.rollout_set import EngineSection, RolloutSetSpec
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.manifest import Manifest, Ref

_RUN = ("missing", "stale", "code", "blocked")
"""States of steps that a run computes; a waiting one only if its inputs change."""


def describe(
    plans: Mapping[str, Sequence[Step]], specs: Specs, lake: Lake, consent: Collection[str] = ()
) -> Iterator[str]:
    """Yield the lines for a run of experiments: counts first, then every step with its reason and its last cost.

    Args:
        plans: experiment -> its steps, as `planner.plan` returns them. A step of several experiments is listed once.
        consent: the options given with the command, as in `planner.consent_refusal`.
    """
    steps = list(dict.fromkeys(step for planned in plans.values() for step in planned))
    to_run = [step for step in steps if step.state in _RUN]
    waiting = [step for step in steps if step.state == "waiting"]
    kept = [step for step in steps if step.state == "ok"]
    yield (
        f"{', '.join(plans)}: {len(to_run)} of {len(steps)} steps would run{_total(to_run)}; "
        f"{len(waiting)} more if what they read changes{_total(waiting)}; {len(kept)} are up to date."
    )
    yield from _listed("Would run, in this order:", to_run, specs, lake)
    yield from _listed("Would run if what they read changes:", waiting, specs, lake)
    costly = [step for step in kept if step.set != "all" and expensive(GRAPH[step.asset], step.key, specs)]
    yield from _listed("Expensive and up to date, so kept:", costly, specs, lake)
    if refusal := consent_refusal(steps, consent):
        yield f"\nThe run would stop before its first step. {refusal}"
    else:
        yield "\nNothing was run."


def _listed(heading: str, steps: Sequence[Step], specs: Specs, lake: Lake) -> Iterator[str]:
    if not steps:
        return
    yield f"\n{heading}"
    names = [f"{step.asset} of {step.key}" for step in steps]
    width = max(map(len, names))
    for name, step in zip(names, steps, strict=True):
        state = f"{step.state}: " if step.state in ("missing", "stale", "blocked") else ""
        facts = [f"{state}{step.reason}", _needs(step, specs), _cost(lake.current(Ref(step.asset, step.set, step.key)))]
        yield f"  {name:{width}}  {'; '.join(filter(None, facts))}"


def _needs(step: Step, specs: Specs) -> str:
    """Return what a step takes that is scarce: a GPU, an engine that serves a model, a paid endpoint."""
    if step.set == "all" or step.state == "invalid":
        return ""
    spec = specs.get(step.set, step.key)
    if isinstance(spec, RolloutSetSpec):
        return _engine(spec) if step.asset == "raw_rollouts" else ""
    if isinstance(spec, ExperimentSpec) and GRAPH[step.asset].lock == "accelerator" and spec.requires == "gpu":
        return "needs a GPU"
    return ""


def _engine(spec: RolloutSetSpec) -> str:
    engine: EngineSection | None = spec.engine
    if spec.kind != "live" or engine is None:
        return f"{spec.kind}, no engine"
    place = f" at {', '.join(engine.urls)}" if engine.urls else ""
    return f"engine {engine.kind}{place}" + (", paid by the caller" if engine.api_key_env else "")


def _cost(manifest: Manifest | None) -> str:
    """Return the time and the size of the last version."""
    if manifest is None:
        return ""
    took = f"took {_duration(manifest.seconds)} last time" if manifest.seconds else ""
    rows = ", ".join(f"{count:,} {name}" for name, count in manifest.rows.items() if name in ("rollouts", "turns"))
    return ", ".join(filter(None, [took, rows]))


def _total(steps: Sequence[Step]) -> str:
    """Return the time that steps took last time, for those that ran before."""
    known = [step.seconds for step in steps if step.seconds]
    if not known:
        return ""
    part = "" if len(known) == len(steps) else f" for {len(known)} of them"
    return f" ({_duration(sum(known))} last time{part})"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes:
        return f"{minutes} min {rest} s"
    return f"{seconds:.1f} s" if seconds < 10 else f"{rest} s"
