"""Sweeps: declared analyses of how much an effect depends on a variable, written before they run.

A sweep is a file of `declared_sweeps`: a question, a variable with its levels, two experiments at each level that
differ in one setting, the smallest difference that matters, the power calculation that gives the number of seeds, and
when to stop. At each level the difference is judged as a finding is (`findings.judge`); `sentence` derives what the
page says from the levels' words by rules.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from etpi_assets.specs.folders import FOLDERS
from etpi_assets.specs.section import SpecError
from etpi_lab.analysis.findings import REINFORCED, ComparisonSide, Finding, FindingVerdict, Read, judge
from etpi_lab.analysis.power import POWER, Size, planned, power_of, seeds_needed

DECLARED = Path(__file__).parent / "declared_sweeps"


class _Declared(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Variable(_Declared):
    """The variable of a sweep."""

    label: str
    """Name and unit, as on the axis."""
    log: bool = False
    """True for a logarithmic axis."""
    percent: bool = False
    """True if x is a share, shown as a percentage."""
    measure: Literal["declared", "first_turn_loss_share"] = "declared"
    """The source of a level's x: its `x`, or the first turn's share of the loss, from the data set of its `less`."""


class Level(_Declared):
    """One value of the variable, with the two experiments that are compared there."""

    x: float
    """The declared value; shown until the experiment has run, where the variable is measured."""
    more: str
    """The experiment with the setting."""
    less: str
    """The experiment without."""
    series: str = ""
    """The curve that the level belongs to, where a second variable is swept too."""
    figure: str | None = None
    """The sweep's figure for this level, where it depends on the second variable."""


class PowerSection(_Declared):
    """The assumptions of the power calculation."""

    difference: float = Field(gt=0, lt=1)
    """The true difference that has to be shown with probability 0.8. Not the smallest that matters: an effect between
    the two may stay undecided, and the page then says what would decide it."""
    rate: float = Field(default=0.5, gt=0, lt=1)
    """The rate expected in both conditions; 0.5 is the worst case."""
    seed_sd: float = Field(ge=0)
    """Standard deviation of the figure between trainings that differ in the seed alone."""
    tasks: int = Field(ge=2)
    """Tasks (or prompts) that the figure is measured on."""
    source: str
    """Source of these numbers."""


class Sweep(_Declared):
    """A declared analysis."""

    title: str
    question: str
    """The question that the sweep answers."""
    setting: str
    """The setting that is compared, as the subject of a sentence: "Weight 12 on first turns"."""
    figure: str
    """The measured metric, as in findings.toml."""
    role: Literal["sft", "rl"] = "sft"
    decoding: str = "greedy"
    least: float = Field(gt=0)
    """The smallest difference that matters."""
    seeds: tuple[int, ...] = Field(min_length=2)
    """Training seeds of every experiment; at least as many as the power calculation says."""
    stop: str
    """The end of data collection, fixed before the first run."""
    minutes: float = Field(gt=0)
    """Minutes of one experiment and one seed on two cores with AVX2, estimated."""
    notes: str = ""
    variable: Variable
    power: PowerSection
    level: tuple[Level, ...] = Field(min_length=1)
    suite: dict[str, dict[str, Any]] = {}
    rollout_set: dict[str, dict[str, Any]] = {}
    experiment: dict[str, dict[str, Any]] = {}
    """Specs that exist for this sweep only, by name."""

    @model_validator(mode="after")
    def _has_the_seeds_that_its_power_calculation_gives(self) -> Sweep:
        needed = self.needed()
        if needed is None:
            raise ValueError("the power calculation has no answer: with so few tasks no number of seeds is enough")
        if len(self.seeds) < needed.seeds:
            raise ValueError(f"{len(self.seeds)} seeds are declared; the power calculation gives {needed.seeds}")
        return self

    def needed(self) -> Size | None:
        """Return the design of the power calculation."""
        return seeds_needed(planned(self.power.rate, self.power.seed_sd), self.power.difference, self.power.tasks)

    def figure_in_words(self) -> str:
        """Return the figure with its role and decoding; one of reinforcement's own attempts has none."""
        if self.figure.startswith(REINFORCED):
            return self.figure
        return f"{self.figure} ({self.role}, {self.decoding})"

    def experiments(self) -> list[str]:
        """Return every experiment, in order."""
        return list(dict.fromkeys(name for level in self.level for name in (level.more, level.less)))

    def specs(self, seeds: Sequence[int] = ()) -> Iterator[tuple[str, str]]:
        """Yield (path below a folder of specs, TOML) of the sweep's own specs and of its repetitions over seeds.

        Args:
            seeds: other seeds than declared, for a trial.
        """
        by_noun = {"suite": self.suite, "rollout_set": self.rollout_set, "experiment": self.experiment}
        for noun, specs in by_noun.items():
            for name, spec in specs.items():
                yield f"{FOLDERS[noun]}/{name}.toml", to_toml(spec)
        for name in self.experiments():
            repeated = {"extends": name, "seeds": list(seeds or self.seeds)}
            yield f"{FOLDERS['experiment']}/{repetition(name)}.toml", to_toml(repeated)


def repetition(experiment: str) -> str:
    """Return the name of an experiment of a sweep repeated over the sweep's seeds."""
    return f"{experiment}_swept"


def declared() -> dict[str, Path]:
    """Return the shipped sweeps: name -> file."""
    return {path.stem: path for path in sorted(DECLARED.glob("*.toml"))}


def load(path: Path) -> Sweep:
    """Read a sweep. Raises SpecError with the file and every fault."""
    try:
        return Sweep.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"{path}: {error}") from error
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc'])) or 'the sweep'}: {e['msg']}" for e in error.errors()]
        raise SpecError(f"{path}: " + "; ".join(faults)) from error


def to_toml(spec: Mapping[str, Any]) -> str:
    """Return a spec as TOML with inline tables."""
    return "".join(f"{_key(name)} = {_value(value)}\n" for name, value in spec.items())


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


WORDS = ("helps", "hurts", "nothing", "undecided", "not run")


@dataclass(frozen=True)
class Point:
    """A level with its measured x and its verdict."""

    level: Level
    x: float
    verdict: FindingVerdict

    @property
    def word(self) -> str:
        """Return what is seen at the level: one of WORDS."""
        between = self.verdict.over_seeds or self.verdict.between
        if between is None:
            return "not run"
        if between.ci_low > 0:
            return "helps"
        if between.ci_high < 0:
            return "hurts"
        least = self.verdict.finding.least
        return "nothing" if between.ci_high < least and between.ci_low > -least else "undecided"

    def wants(self) -> str:
        """Return the designs that would decide the level; "" unless it is undecided.

        The verdict's own word is one-sided: a level that can only hurt is "not supported" there, and undecided here.
        """
        return self.verdict.designs() if self.word == "undecided" else ""


def points(sweep: Sweep, read: Read, measured: Mapping[str, float]) -> list[Point]:
    """Judge every level.

    Args:
        read: as for `findings.judge`.
        measured: experiment -> the variable, where it is measured and known.
    """
    judged = []
    for level in sweep.level:
        sides = [
            ComparisonSide(experiment=name, role=sweep.role, decoding=sweep.decoding)
            for name in (level.more, level.less)
        ]
        finding = Finding(
            claim=sweep.setting, figure=level.figure or sweep.figure, more=sides[0], less=sides[1], least=sweep.least
        )
        judged.append(Point(level, measured.get(level.less, level.x), judge(finding, read)))
    curves = list(dict.fromkeys(level.series for level in sweep.level))
    return sorted(judged, key=lambda point: (curves.index(point.level.series), point.x))


def sentence(sweep: Sweep, judged: Sequence[Point]) -> str:
    """Return what the sweep shows, by these rules.

    "helps" ("hurts") lists where the interval lies above (below) 0, for each curve as a range of x if no other level
    lies in between. "Nothing is seen" where the interval has no difference of `least` or more, with the largest limit
    as the bound; it is "elsewhere" if nothing is open, and "no effect in this range" if it is so at every level. The
    other levels are undecided, with the design that would decide the first of them, or not run.
    """
    at = {word: [point for point in judged if point.word == word] for word in WORDS}
    if len(at["not run"]) == len(judged):
        return f"{sweep.setting}: not run yet."
    none, undecided, absent = at["nothing"], at["undecided"], at["not run"]
    parts = [f"{word} {_places(sweep, at[word], judged)}" for word in ("helps", "hurts") if at[word]]
    if none:
        bound = f"bound {max(_largest(point) for point in none):.2f}"
        if len(none) == len(judged):
            parts.append(f"no effect in this range ({_places(sweep, none, judged)}), {bound}")
        elif parts and not (undecided or absent):
            parts.append(f"elsewhere nothing is seen ({bound})")
        else:
            parts.append(f"nothing is seen {_places(sweep, none, judged)} ({bound})")
    if undecided:
        wants = next((text for point in undecided if (text := point.wants())), "")
        design = f" ({'the first ' if len(undecided) > 1 else ''}would want {wants})" if wants else ""
        parts.append(f"undecided {_places(sweep, undecided, judged)}{design}")
    if absent:
        parts.append(f"not run {_places(sweep, absent, judged)}")
    return f"{sweep.setting}: {'; '.join(parts)}."


def _largest(point: Point) -> float:
    between = point.verdict.over_seeds or point.verdict.between
    return max(abs(between.ci_low), abs(between.ci_high)) if between else 0.0


def _places(sweep: Sweep, chosen: Sequence[Point], judged: Sequence[Point]) -> str:
    """Return where the chosen levels lie on each curve; curves with the same range together."""
    curves: dict[str, list[str]] = {}
    for name in dict.fromkeys(point.level.series for point in judged):
        on_curve = [point for point in chosen if point.level.series == name]
        if on_curve:
            where = _range(sweep, on_curve, [point for point in judged if point.level.series == name])
            curves.setdefault(where, []).append(name)
    every = len({point.level.series for point in judged})
    return ", ".join(
        where if len(names) == every else f"{where} ({', '.join(names)})" for where, names in curves.items()
    )


def _range(sweep: Sweep, chosen: Sequence[Point], judged: Sequence[Point]) -> str:
    """Return where the chosen levels lie: a bound, a range, or a list if others lie in between."""
    places = [index for index, point in enumerate(judged) if point in chosen]
    low, high = (shown(sweep.variable, chosen[place].x) for place in (0, -1))
    if len(chosen) == 1:
        return f"at {low}"
    if places != list(range(places[0], places[-1] + 1)):
        return "at " + ", ".join(shown(sweep.variable, point.x) for point in chosen)
    if len(chosen) == len(judged):
        return f"from {low} to {high}"
    if places[0] == 0:
        return f"up to {high}"
    return f"from {low} on" if places[-1] == len(judged) - 1 else f"from {low} to {high}"


def shown(variable: Variable, x: float) -> str:
    """Format a value of the variable."""
    return f"{100 * x:.3g} %" if variable.percent else f"{x:g}"


def plan_lines(name: str, sweep: Sweep) -> Iterator[str]:
    """Yield the declared analysis in words, with the power calculation's result."""
    needed, power, count = sweep.needed(), sweep.power, len(sweep.experiments())
    assert needed is not None, "checked when the sweep was read"
    reached = power_of(planned(power.rate, power.seed_sd), power.difference, len(sweep.seeds), power.tasks)
    source = " ".join(power.source.split())
    yield f"{name}: {sweep.title}"
    yield f"  question: {' '.join(sweep.question.split())}"
    yield f"  compared: {sweep.setting}; figure {sweep.figure_in_words()}"
    levels = ", ".join(dict.fromkeys(shown(sweep.variable, level.x) for level in sweep.level))
    yield f"  variable: {sweep.variable.label}; levels {levels}"
    yield f"  smallest difference that matters: {sweep.least:g}"
    yield (
        f"  power calculation: to show a difference of {power.difference:g} with probability {POWER:g} at rates near "
        f"{power.rate:g}, with a standard deviation of {power.seed_sd:g} between seeds and {power.tasks} tasks: "
        f"n = {needed.seeds} seeds a side; declared are {len(sweep.seeds)} (power {reached:.2f}). {source}"
    )
    yield f"  stops: {' '.join(sweep.stop.split())}"
    yield (
        f"  cost: {count} experiments x {len(sweep.seeds)} seeds, about {count * len(sweep.seeds) * sweep.minutes:.0f} "
        f"minutes on two cores with AVX2"
    )
