"""`etpi lab results`: repeat shipped experiments over training seeds, and write the page of their findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from etpi_assets.specs.load import load_installed, load_specs
from etpi_lab.analysis import findings
from etpi_lab.analysis.results import reader, render
from etpi_lab.repeat.forecast import Forecast
from etpi_lab.repeat.running import Campaign, cost_sentence, steps_sentence
from etpi_lab.repeat.share import Share
from etpi_resources.lake.lake import Lake

SEEDS = (0, 1, 2)


def results(
    names: Sequence[str],
    seeds: Sequence[int],
    target: Path,
    share: Share,
    *,
    table_only: bool = False,
    second_look: bool = False,
) -> int:
    """Repeat shipped experiments (default: all that a finding compares) over training seeds; write a page of results.

    The repetitions are experiments named `<name>_seeds`, and `<name>_more_seeds` for the second look, which repeats the
    experiments of undecided findings over twice the seeds; those trained before are not trained again. The page has
    whatever the lake has, also if this call ran only a share, failed or was stopped.
    """
    specs, names = load_installed(), names or findings.experiments()
    for name in names:
        specs.entry("experiment", name)
    folder = Lake.open().scratch("results_specs")
    complete = set(findings.experiments()) <= set(names)
    repeated = _write_specs(folder, names, seeds, "seeds")

    def undecided() -> dict[str, str]:
        experiments = findings.undecided(names, reader(Lake.open(), repeated))
        return _write_specs(folder, experiments, [*seeds, *_following(seeds)], "more_seeds")

    def campaign(title: str, experiments: Mapping[str, str], pages: Callable[[Forecast], str]) -> Campaign:
        progress = Lake.open().scratch("progress") / f"{title.lower().replace(' ', '_')}.html"
        return Campaign(title, list(experiments.values()), folder, share, progress, pages)

    def at_first(state: Forecast) -> str:
        again = undecided()
        return write(again, state, campaign("Second look", again, at_first).forecast())

    def write(again: Mapping[str, str], first: Forecast, second: Forecast) -> str:
        cost = cost_sentence(first)
        if more := steps_sentence(second):
            cost = f"{cost} {more}, for the second look."
        page = render(Lake.open(), load_specs(folder), repeated, again, complete=complete, cost=cost)
        target.write_text(page, encoding="utf-8")
        return ""

    first = campaign("Results", repeated, at_first)
    code = first.run(table_only=table_only)
    if second_look and not code and (again := undecided()):
        done = first.forecast()
        code = campaign("Second look", again, lambda state: write(again, done, state)).run(table_only=table_only)
    print(f"wrote {target}")
    return code


def _write_specs(folder: Path, names: Sequence[str], seeds: Sequence[int], suffix: str) -> dict[str, str]:
    """Write a spec for every experiment, with these seeds; return experiment -> its repetition."""
    (folder / "experiments").mkdir(exist_ok=True)
    repeated = {name: f"{name}_{suffix}" for name in names}
    for name, copy in repeated.items():
        (folder / "experiments" / f"{copy}.toml").write_text(f'extends = "{name}"\nseeds = {list(seeds)}\n')
    return repeated


def _following(seeds: Sequence[int]) -> range:
    """Return as many seeds again, which begin after the largest."""
    return range(max(seeds) + 1, max(seeds) + 1 + len(seeds))
