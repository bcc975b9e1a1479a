"""The commands behind `make run`, `make status`, `make export`, `make demo`, `make demo-all` and `make results`.

Belongs here: reading arguments, running jobs one after the other in this process, and saying how it went. Does not
belong here: what a job does, or which are needed (`specs.planner`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from etpi_assets.console import showing
from etpi_assets.console_table import WIDTH, ending, failures_table, metrics_table, states_table
from etpi_assets.exports import EXPORTS, MANIFEST, export
from etpi_assets.lanes import side_by_side
from etpi_assets.reports import findings
from etpi_assets.reports.results import render
from etpi_assets.resources import Resources
from etpi_assets.runner import Runner
from etpi_assets.specs.load import SpecError, Specs, load_specs
from etpi_assets.specs.planner import plan
from etpi_resources.gguf_converter import NotConverted
from etpi_resources.lake import Lake, LakeError

DEMO = ("plan_first_tiny", "plan_first_tiny_weak")
RESULT_SEEDS = (0, 1, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 where everything asked for succeeded."""
    parser = argparse.ArgumentParser(prog="python -m etpi_assets.cli", description="etpi's commands")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="bring experiments up to date, with all they rest on")
    run.add_argument("experiments", nargs="+", metavar="EXPERIMENT")
    status = commands.add_parser("status", help="what is missing, stale or blocked, through the whole chain")
    status.add_argument("experiments", nargs="*", metavar="EXPERIMENT")
    out = commands.add_parser("export", help="write an experiment in another program's format")
    out.add_argument("experiment", metavar="EXPERIMENT")
    out.add_argument("--format", required=True, help=", ".join(EXPORTS))
    out.add_argument("--to", required=True, type=Path, metavar="FOLDER", help="a folder that is not there yet")
    commands.add_parser("demo", help=f"run {' and '.join(DEMO)} and compare them")
    commands.add_parser("demo-all", help="run every experiment on the embedded world but the variants of others")
    repeat = commands.add_parser("results", help="the same over several training seeds, into docs/results.md")
    repeat.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help="by default all that a finding compares")
    repeat.add_argument("--seeds", nargs="+", type=int, default=list(RESULT_SEEDS), metavar="SEED")
    given = parser.parse_args(arguments)
    try:
        if given.command == "run":
            return demo(given.experiments)
        if given.command == "status":
            return show_status(given.experiments)
        if given.command == "export":
            return export_experiment(given.experiment, given.format, given.to)
        if given.command == "demo":
            return demo(DEMO)
        specs = load_specs()
        if given.command == "demo-all":
            return demo(tiny(specs))
        return results(specs, given.experiments or findings.experiments(), given.seeds)
    except (SpecError, LakeError, NotConverted) as error:
        print(f"etpi: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("etpi: stopped. What is finished is kept; the same command goes on from there.", file=sys.stderr)
        return 130


def run_experiments(names: Sequence[str], specs_folder: Path | None = None) -> int:
    """Bring experiments up to date with all they rest on, several side by side; 1 where any of them failed."""
    specs = load_specs(specs_folder)
    plans = {name: plan(name, specs, Lake.open()) for name in names}
    if invalid := [step.reason for steps in plans.values() for step in steps if step.state == "invalid"]:
        raise SpecError("\n".join(dict.fromkeys(invalid)))
    with showing():
        runner = Runner(specs, specs_folder)
        alone = len(names) == 1
        failures = {names[0]: runner.bring(names[0])} if alone else side_by_side(names, specs, specs_folder)
        failed = {name: reasons for name, reasons in failures.items() if reasons}
        # What succeeded can be queried.
        if (failed or not alone) and (reasons := runner.run("publish_catalog", None)):
            failed["publish_catalog"] = reasons
    if failed:
        print(failures_table(failed), file=sys.stderr)
    return 1 if failed else 0


def show_status(names: Sequence[str]) -> int:
    """Print the state of experiments (all, where none is named); always 0."""
    specs, lake = load_specs(), Lake.open()
    for name in names or specs.keys("experiment"):
        print(states_table(name, plan(name, specs, lake), everything=bool(names)))
    return 0


def export_experiment(name: str, format: str, to: Path) -> int:
    """Write an experiment's data to a folder and say what it holds; always 0."""
    manifest = export(name, format, to, Resources(lake=Lake.open()))
    for file in manifest["files"][:8]:
        print(f"{to / file['path']}: {file['rows']} rows, {file['bytes']} bytes")
    if len(manifest["files"]) > 8:
        print(f"... and {len(manifest['files']) - 8} more files; {to / MANIFEST} lists them")
    for reason, count in manifest["left_out"].items():
        print(f"left out: {count}, {reason}")
    for note in manifest["notes"]:
        print(f"note: {note}")
    print(f"{to / MANIFEST} names the {len(manifest['versions'])} data versions it comes from")
    return 0


def demo(names: Sequence[str]) -> int:
    """Run experiments and end with the table that compares them."""
    code = run_experiments(names)
    lake = Lake.open()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    print(f"\n{metrics_table(lake, names, width)}\n\n{ending(lake, names)}")
    return code


def tiny(specs: Specs) -> list[str]:
    """The experiments that need nothing but this machine, those on the embedded base; no variants of others."""
    return [
        name
        for name, spec in specs.experiments.items()
        if spec.base.kind == "tiny" and spec.requires == "cpu" and not spec.variant
    ]


def results(specs: Specs, names: Sequence[str], seeds: Sequence[int]) -> int:
    """Repeat experiments over training seeds, under names of their own, and write docs/results.md."""
    if os.environ.get("ETPI_SPECS"):
        raise SpecError("`make results` repeats the shipped experiments; unset ETPI_SPECS for it")
    if unknown := sorted(set(names) - set(specs.experiments)):
        raise SpecError(f"no experiment {', '.join(unknown)}; there are {', '.join(specs.experiments)}")
    folder = Lake.open().scratch("results_specs")
    (folder / "experiments").mkdir(exist_ok=True)
    repeated = {name: f"{name}_seeds" for name in names}
    for name, copy in repeated.items():
        (folder / "experiments" / f"{copy}.toml").write_text(f'extends = "{name}"\nseeds = {list(seeds)}\n')
    code = run_experiments(list(repeated.values()), folder)
    target = Path("docs/results.md")
    complete = set(findings.experiments()) <= set(names)
    target.write_text(render(Lake.open(), load_specs(folder), repeated, complete=complete))
    print(f"wrote {target}")
    return code


def _dagster_home(environment: Mapping[str, str]) -> None:
    """Give Dagster a persistent home in the working folder, where none is named."""
    home = Path(environment.get("DAGSTER_HOME") or ".dagster_home").resolve()
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "dagster.yaml").exists():
        with suppress(FileNotFoundError):
            shutil.copy("dagster.yaml", home / "dagster.yaml")
    os.environ["DAGSTER_HOME"] = str(home)


if __name__ == "__main__":
    _dagster_home(os.environ)
    sys.exit(main())
