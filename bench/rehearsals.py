"""Rehearse every experiment and print a table: `python bench/rehearsals.py [EXPERIMENT...] [--folder .slow]`.

Each finished rehearsal is kept in FOLDER/rehearsals/NAME; the next start continues after it, unless --again.
The exit status is 1 if an experiment would stop that is not in EXPECTED.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from etpi.rehearsal import record
from etpi_assets.specs.load import load_specs

EXPECTED = {"teacher_gemini_unprompted": "upweighted_dataset"}
"""Experiments that stop by design -> where. The unprompted teacher's rollouts are all held out: it trains nobody."""


@click.command()
@click.argument("experiments", nargs=-1)
@click.option("--folder", type=click.Path(path_type=Path), default=".slow", show_default=True)
@click.option("--again", is_flag=True, help="repeat finished rehearsals")
def main(experiments: tuple[str, ...], folder: Path, again: bool) -> None:
    """Rehearse the experiments, by default all that load."""
    results, unexpected = folder.resolve() / "rehearsals", 0
    specs = load_specs()
    for name in experiments or specs.experiments:
        file = results / name / record.NAME
        if again or not file.exists():
            record.rehearse(name, specs, results / name)
        unexpected += _print(name, json.loads(file.read_text(encoding="utf-8")))
    raise SystemExit(1 if unexpected else 0)


def _print(name: str, result: dict) -> bool:
    """Print one row of the table; return whether the experiment stops where it should not."""
    stopped = [stage for stage in result["stages"] if stage["verdict"] == "would block"]
    accepted = sorted({check for stage in result["stages"] for check in stage["accepted"]})
    unjudged = sorted({check for stage in result["stages"] for check in stage["unjudged"]})
    first = stopped[0]["asset"] if stopped else ""
    checks = ", ".join(block["check"] or block["message"] for stage in stopped for block in stage["blocks"])
    outcome = f"would block: {first} ({checks})" if stopped else "passes"
    cells = [f"`{name}`", outcome, f"{result['seconds'] / 60:.1f}", ", ".join(accepted), ", ".join(unjudged)]
    print(f"| {' | '.join(cells)} |", flush=True)
    return first != EXPECTED.get(name, "")


if __name__ == "__main__":
    main()
