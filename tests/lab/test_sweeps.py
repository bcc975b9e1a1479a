"""Sweeps: declarations with their power calculation, and the sentence and plot that follow from measured levels."""

from __future__ import annotations

import tomllib
import xml.etree.ElementTree as ElementTree

import pytest

from etpi_assets.specs.load import load_specs
from etpi_assets.specs.section import SpecError
from etpi_lab.analysis import sweeps
from etpi_lab.analysis.sweeps import Sweep, points, sentence, to_toml
from etpi_lab.repeat.dose_plot import dose_plot
from tests.support.findings import probe, row

SEEDS = (0, 1, 2)


def sweep(**more) -> Sweep:
    return Sweep.model_validate(
        {
            "title": "t", "question": "q", "setting": "The lever", "figure": "plan_first", "least": 0.1,
            "seeds": [0, 1, 2], "stop": "fixed", "minutes": 1, "variable": {"label": "dose"},
            "power": {"difference": 0.25, "seed_sd": 0.05, "tasks": 100, "source": "s"},
            "level": [{"x": x, "more": f"with_{x}", "less": f"without_{x}"} for x in (1, 2, 3)],
        } | more
    )  # fmt: skip


def rates(of: Sweep, *levels: tuple[float, float] | None, n: int = 2000) -> dict[str, list[dict]]:
    """Metrics of (with, without) at each level, with equal seeds; None: not run."""
    tables = {}
    for level, values in zip(of.level, levels, strict=True):
        if values is not None:
            for name, value in zip((level.more, level.less), values, strict=True):
                tables[name] = [row(name, round(value * n), n, seed) for seed in (None, *SEEDS)]
    return tables


def said(of: Sweep, *levels: tuple[float, float] | None, n: int = 2000) -> str:
    tables = rates(of, *levels, n=n)
    return sentence(of, points(of, lambda experiment, table: tables.get(experiment), {}))


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        (((0.9, 0.5), (0.7, 0.5), (0.5, 0.5)), "The lever: helps up to 2; elsewhere nothing is seen (bound 0.0"),
        (((0.5, 0.5), (0.5, 0.5), (0.5, 0.5)), "The lever: no effect in this range (from 1 to 3), bound 0.0"),
        (((0.5, 0.5), (0.5, 0.5), (0.5, 0.9)), "hurts at 3; elsewhere nothing is seen"),
        (((0.9, 0.5), (0.5, 0.9), (0.9, 0.5)), "helps at 1, 3; hurts at 2."),
        (((0.9, 0.5), None, None), "helps at 1; not run from 2 on."),
        ((None, None, None), "The lever: not run yet."),
    ],
)
def test_sentence_follows_from_the_intervals_of_the_levels(levels, words):
    assert words in said(sweep(), *levels)


def test_wide_intervals_leave_a_level_undecided_with_the_design_that_would_decide_it():
    text = said(sweep(), (0.6, 0.5), (0.5, 0.5), (0.5, 0.5), n=40)
    assert text.startswith("The lever: undecided from 1 to 3 (the first would want ") and "seeds on" in text


def test_level_that_can_only_hurt_is_undecided_with_a_design_too():
    of = sweep(level=[{"x": 1, "more": "a", "less": "b"}])
    tables = rates(of, (0.45, 0.5), n=600)
    (point,) = points(of, lambda experiment, table: tables.get(experiment), {})
    assert (point.verdict.word, point.word) == ("not supported", "undecided")
    assert "would want" in sentence(of, [point]) and "seeds on" in point.verdict.designs()


def test_curves_with_the_same_range_are_named_together():
    levels = [
        {"x": x, "more": f"with_{x}_{s}", "less": f"without_{x}_{s}", "series": s}
        for s in ("8 steps", "16 steps", "24 steps") for x in (1, 2)
    ]  # fmt: skip
    of = sweep(level=levels)
    text = said(of, (0.9, 0.5), (0.5, 0.5), (0.9, 0.5), (0.5, 0.5), (0.5, 0.5), (0.5, 0.5))
    assert text.startswith("The lever: helps at 1 (8 steps, 16 steps); elsewhere nothing is seen (bound 0.0")
    partly = said(of, (0.9, 0.5), (0.9, 0.5), (0.9, 0.5), (0.5, 0.5), (0.5, 0.5), None)
    assert "helps from 1 to 2 (8 steps), at 1 (16 steps); nothing is seen at 2 (16 steps), at 1 (24 steps)" in partly
    assert partly.endswith("; not run at 2 (24 steps).")
    assert "no effect in this range (from 1 to 2), bound" in said(of, *[(0.5, 0.5)] * 6)


def test_seeds_that_disagree_decide_nothing_although_their_tasks_do():
    of = sweep(level=[{"x": 1, "more": "a", "less": "b"}])
    values = {"a": (0.9, 0.5, 0.4), "b": (0.5, 0.5, 0.5)}
    tables = {
        name: [row(name, round(sum(by_seed) / 3 * 2000), 2000)]
        + [row(name, round(value * 700), 700, seed) for seed, value in enumerate(by_seed)]
        for name, by_seed in values.items()
    }
    (point,) = points(of, lambda experiment, table: tables.get(experiment), {})
    assert point.verdict.between and point.verdict.between.ci_low > 0 and point.word == "undecided"


def test_measured_variable_replaces_the_declared_one_and_levels_may_name_a_checkpoint():
    level = {"x": 9, "more": "a", "less": "b", "figure": "probe:first_turn_message@8"}
    of = sweep(level=[level])
    rows = {
        "a": [probe(4, s, 0.0) for s in SEEDS] + [probe(8, s, 1.0) for s in SEEDS],
        "b": [probe(8, s, 0.0) for s in SEEDS],
    }
    (point,) = points(of, lambda experiment, table: rows[experiment] if table == "probes" else None, {"b": 0.25})
    assert (point.x, point.word) == (0.25, "helps")
    assert point.verdict.more and point.verdict.more.value == 1.0, "step 4 does not count"


def test_sweep_with_fewer_seeds_than_its_power_calculation_gives_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(to_toml({**sweep().model_dump(exclude_none=True), "seeds": [0, 1], "extra": 1}))
    with pytest.raises(SpecError, match="mine.toml: extra: "):
        sweeps.load(file)
    file.write_text(to_toml({**sweep().model_dump(exclude_none=True), "seeds": [0, 1]}))
    with pytest.raises(SpecError, match="2 seeds .* 3"):
        sweeps.load(file)


def test_plan_prints_n_from_the_power_calculation():
    lines = "\n".join(sweeps.plan_lines("name", sweep()))
    assert "n = 3 seeds a side; declared are 3 (power 0." in lines
    assert "6 experiments x 3 seeds, about 18 minutes" in lines


def test_figure_of_reinforcement_s_own_attempts_has_no_decoding():
    assert sweep(figure="rl:solved", role="rl").figure_in_words() == "rl:solved"
    assert sweep(figure="solved").figure_in_words() == "solved (sft, greedy)"


@pytest.mark.parametrize("name", sorted(sweeps.declared()))
def test_shipped_sweep_is_declared_whole_and_its_specs_are_valid(tmp_path, name):
    of = sweeps.load(sweeps.declared()[name])
    for file, text in of.specs():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    specs = load_specs(tmp_path)
    for level in of.level:
        sides = [specs.get("experiment", sweeps.repetition(side)) for side in (level.more, level.less)]
        assert [side.seeds for side in sides] == [of.seeds, of.seeds]
        more, less = (side.model_dump(exclude={"title", "notes", "variant"}) for side in sides)
        changed = {section for section in more if more[section] != less[section]}
        assert len(changed) == 1, f"{level.more} and {level.less} differ in {changed}"
        if of.role == "sft" and not (level.figure or of.figure).startswith("probe:"):
            evaluated = sides[0].evaluate
            assert evaluated.tasks >= of.power.tasks and of.decoding in [d.name for d in evaluated.decodings]
        for side in sides:
            for rollout_set in side.rollout_sets:
                assert specs.get("rollout_set", rollout_set)


def test_specs_are_written_as_toml_that_reads_back():
    spec = {"a": 1.5, "b": 'x "y" \n', "c": [True, 2], "d": {"e": {"f": "g"}, "h-i": []}}
    assert tomllib.loads(to_toml(spec)) == spec


def test_plot_has_a_point_and_an_interval_for_each_level():
    early = [(0.1, "10 %", 0.4, 0.2, 0.6), (0.3, "30 %", 0.0, -0.1, 0.1)]
    series = [("8 steps", early), ("16 steps", [(0.3, "30 %", 0.1, 0.0, 0.2)])]
    svg = dose_plot("title", series, "share", "difference", 0.1, log_x=True)
    tree = ElementTree.fromstring(svg)
    tags = [element.tag.rpartition("}")[2] for element in tree.iter()]
    assert tags.count("circle") == 3 + 2 and tags.count("polyline") == 2 and "10 %" in svg and "8 steps" in svg
    assert "nothing measured yet" in dose_plot("title", [("", [])], "share", "difference", 0.1)
