"""Progress of a list of experiments, and the remaining time on this machine, from recorded seconds."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from etpi_assets.graph import GRAPH
from etpi_assets.planning.planner import Step, open_steps, plan
from etpi_assets.planning.versions import applies
from etpi_assets.specs.load import Specs
from etpi_resources.lake.lake import Lake, Ref

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class State:
    """An experiment: its open steps (none: finished), what stands in the way, and seconds.

    Attributes:
        blocked: the reason of a step that a check blocked or a spec that is invalid; "" if there is none.
        spent: recorded seconds of the experiment's own steps.
        left: estimated seconds of the open steps; a step that another experiment of the list also needs counts once.
        guessed: open steps without any record to estimate from; they count nothing.
    """

    name: str
    open: int
    blocked: str
    spent: float
    left: float
    guessed: int


@dataclass(frozen=True)
class Forecast:
    """The states of all experiments of a list, and what they run on."""

    states: tuple[State, ...]
    workers: int

    @property
    def finished(self) -> list[State]:
        return [state for state in self.states if not state.open]

    @property
    def seconds_left(self) -> float:
        return sum(state.left for state in self.states) / self.workers

    @property
    def spent(self) -> float:
        return sum(state.spent for state in self.states)

    def line(self) -> str:
        """Return the progress as one line."""
        text = f"{len(self.finished)} of {len(self.states)} experiments finished"
        if len(self.finished) == len(self.states):
            return f"{text}; their steps took {duration(self.spent)}"
        guessed = sum(state.guessed for state in self.states)
        if guessed and not self.seconds_left:
            return f"{text}; {cpu()}, {self.workers} at once; time left unknown, nothing of the kind is recorded"
        unknown = f", {guessed} steps without a record not counted" if guessed else ""
        return f"{text}; about {duration(self.seconds_left)} left on {cpu()}, {self.workers} at once{unknown}"


def forecast(names: Sequence[str], specs: Specs, lake: Lake, workers: int, minutes: Mapping[str, float]) -> Forecast:
    """Return how far experiments are.

    A step that computes nothing in its experiment takes no time. Another open step is expected to take what
    its partition took before; else the mean of the same asset in the list's other experiments; else, for an experiment
    with declared `minutes` (name -> minutes) whose training has no such record, these; else the mean of the asset in
    the whole lake.
    """
    plans = {name: plan(name, specs, lake) for name in names}
    recorded: dict[str, list[float]] = {}
    for step in dict.fromkeys(step for steps in plans.values() for step in steps):
        manifest = lake.current(Ref(step.asset, step.set, step.key)) if step.state != "invalid" else None
        if manifest and manifest.seconds and "not_applicable" not in manifest.notes:
            recorded.setdefault(step.asset, []).append(manifest.seconds)
    needed = {step.asset for steps in plans.values() for step in open_steps(steps)}
    elsewhere = _recorded_elsewhere(lake, needed - recorded.keys())
    seen: set[tuple[str, str]] = set()
    states = [_state(name, plans[name], specs, recorded, elsewhere, seen, minutes.get(name)) for name in names]
    return Forecast(tuple(states), workers)


def _recorded_elsewhere(lake: Lake, assets: Collection[str]) -> dict[str, list[float]]:
    """Return the recorded seconds of these assets in the whole lake."""
    recorded: dict[str, list[float]] = {}
    for ref in lake.refs() if assets else ():
        manifest = lake.current(ref) if ref.asset in assets else None
        if manifest and manifest.seconds and "not_applicable" not in manifest.notes:
            recorded.setdefault(ref.asset, []).append(manifest.seconds)
    return recorded


def _state(
    name: str,
    steps: Sequence[Step],
    specs: Specs,
    recorded: Mapping[str, Sequence[float]],
    elsewhere: Mapping[str, Sequence[float]],
    seen: set[tuple[str, str]],
    minutes: float | None,
) -> State:
    waiting = open_steps(steps)
    fresh = [step for step in waiting if (step.asset, step.key) not in seen]
    seen.update((step.asset, step.key) for step in fresh)
    fresh = [step for step in fresh if step.state == "invalid" or applies(GRAPH[step.asset], step.key, specs)]
    known = {step: step.seconds or _mean(recorded.get(step.asset)) for step in fresh}
    untrained = any(step.asset == "sft_checkpoint" and known[step] is None for step in fresh)
    if minutes is not None and untrained:
        left, known = 60 * minutes, {}
    else:
        known = {step: seconds or _mean(elsewhere.get(step.asset)) for step, seconds in known.items()}
        left = sum(seconds for seconds in known.values() if seconds)
    blocked = next((step.reason for step in waiting if step.state in ("blocked", "invalid")), "")
    spent = sum(step.seconds or 0 for step in steps if step.state == "ok" and step.key == name)
    return State(name, len(waiting), blocked, spent, left, sum(seconds is None for seconds in known.values()))


def _mean(seconds: Sequence[float] | None) -> float | None:
    return fmean(seconds) if seconds else None


def cpu() -> str:
    """Return the CPU's model, the instruction sets that decide how fast it trains, and its cores."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    except OSError:
        fields = {}
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = [flag for flag in _FLAGS if flag in fields.get("flags", "").split()]
    model = fields.get("model name", "a CPU of no stated model")
    return f"{model} ({', '.join(flags) or 'no AVX2'}; {os.cpu_count()} cores)"


def duration(seconds: float) -> str:
    """Format seconds as "45 s", "12 min" or "3.4 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
