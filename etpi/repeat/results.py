"""`etpi results`: repeat shipped experiments over training seeds, and write the page of their findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from etpi.repeat.forecast import Forecast
from etpi.repeat.running import Campaign, cost_sentence, steps_sentence
from etpi.repeat.share import Share
from etpi_assets.reports import findings
from etpi_assets.reports.results import reader, render
from etpi_assets.specs.load import load_shipped, load_specs
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
    specs, names = load_shipped(), names or findings.experiments()
    for name in names:
        specs.entry("experiment", name)
    folder = Lake.open().scratch("results_specs")
    complete = set(findings.experiments()) <= set(names)
    repeated = _write_specs(folder, names, seeds, "seeds")

    def again() -> dict[str, str]:
        undecided = findings.undecided(names, reader(Lake.open(), repeated))
        return _write_specs(folder, undecided, [*seeds, *_following(seeds)], "more_seeds")

    def write(_: Forecast) -> str:
        second, cost = again(), cost_sentence(campaign.forecast())
        if more := steps_sentence(campaign_of("Second look", second).forecast()):
            cost = f"{cost} {more}, for the second look."
        page = render(Lake.open(), load_specs(folder), repeated, second, complete=complete, cost=cost)
        target.write_text(page, encoding="utf-8")
        return ""

    def campaign_of(title: str, experiments: Mapping[str, str]) -> Campaign:
        progress = Lake.open().scratch("progress") / f"{title.lower().replace(' ', '_')}.html"
        return Campaign(title, list(experiments.values()), folder, share, progress, write)

    campaign = campaign_of("Results", repeated)
    code = campaign.run(table_only=table_only)
    if second_look and not code and (second := again()):
        code = campaign_of("Second look", second).run(table_only=table_only)
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
