"""`etpi results`: repeat shipped experiments over training seeds, and write the page of their findings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from etpi.repeat.forecast import Forecast
from etpi.repeat.running import Campaign, cost_sentence
from etpi.repeat.share import Share
from etpi_assets.reports import findings
from etpi_assets.reports.results import render
from etpi_assets.specs.load import load_shipped, load_specs
from etpi_resources.lake.lake import Lake

SEEDS = (0, 1, 2)


def results(names: Sequence[str], seeds: Sequence[int], target: Path, share: Share, *, table_only: bool = False) -> int:
    """Repeat shipped experiments (default: all that a finding compares) over training seeds; write a page of results.

    The repetitions are experiments named `<name>_seeds`. The page has whatever the lake has, also if this call ran only
    a share, failed or was stopped.
    """
    specs, names = load_shipped(), names or findings.experiments()
    for name in names:
        specs.entry("experiment", name)
    folder = Lake.open().scratch("results_specs")
    (folder / "experiments").mkdir(exist_ok=True)
    repeated = {name: f"{name}_seeds" for name in names}
    for name, copy in repeated.items():
        (folder / "experiments" / f"{copy}.toml").write_text(f'extends = "{name}"\nseeds = {list(seeds)}\n')
    complete = set(findings.experiments()) <= set(names)

    def write(state: Forecast) -> str:
        page = render(Lake.open(), load_specs(folder), repeated, complete=complete, cost=cost_sentence(state))
        target.write_text(page, encoding="utf-8")
        return ""

    progress = Lake.open().scratch("progress") / "results.html"
    campaign = Campaign("Results", list(repeated.values()), folder, share, progress, write)
    code = campaign.run(table_only=table_only)
    print(f"wrote {target}")
    return code
