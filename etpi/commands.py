"""The work of `etpi run`, `demo`, `status` and `ui`, as functions that return an exit code."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from etpi.dagster_home import prepare_dagster_home
from etpi.run import CATALOG
from etpi_assets.specs.folders import FOLDERS, user_folders
from etpi_assets.specs.load import SpecError, Specs, load_specs
from etpi_assets.specs.paths import PathError
from etpi_assets.specs.shown import SHIPPED_VARIABLE
from etpi_resources.backend import backend

if TYPE_CHECKING:
    from etpi_assets.planning.planner import Step
    from etpi_resources.lake.lake import Lake


def run_experiments(
    names: Sequence[str],
    specs: Specs,
    rebuild: Collection[str] = (),
    finished: Callable[[str, list[str]], None] = lambda name, failures: None,
    data_only: bool = False,
) -> int:
    """Bring experiments, rollout sets and suites up to date with everything they depend on, several at once.

    Args:
        names: of specs; CATALOG is the catalog alone.
        data_only: end with the data sets of experiments.
        finished: called after each experiment with one line for each failed step.

    Returns:
        1 if any experiment failed.

    Raises:
        SpecError: an experiment does not exist, or a spec of its chain is invalid.
        SandboxUnavailable: the run needs sandboxes that cannot start on this machine; nothing was run.
        EngineUnavailable: a spec's server would load code, without `--allow-code`; nothing was run.
        PackageMissing, TrackerMissing: PyTorch or a tracker of `train.report_to` is not installed; nothing was run.
        CodeServerError: Dagster cannot launch runs.
        LakeError: ETPI_CATALOG names a file that is no catalog.
    """
    from etpi.run import preflight
    from etpi_assets.graph import GRAPH
    from etpi_assets.planning.planner import across, kept_lines, open_steps
    from etpi_assets.resources import Resources
    from etpi_resources.lake.catalog import default_path, refuse_other_file
    from etpi_resources.lake.lake import Lake

    lake = Lake.open()
    refuse_other_file(default_path(lake), [node.name for node in GRAPH.values() if node.tables])
    plans = _plans(names, specs, lake, data_only, rebuild)
    for line in preflight.plan_warnings(names, specs):
        print(f"etpi: {line}", file=sys.stderr)
    steps = list(dict.fromkeys(step for planned in plans.values() for step in planned))
    if kept := kept_lines(steps):
        print(f"etpi: {kept}", file=sys.stderr)
    if CATALOG not in names and not open_steps([*steps, *across(specs, lake)]) and default_path(lake).exists():
        print(f"== {', '.join(names)}: nothing is missing or stale", file=sys.stderr)
        return 0
    preflight.require_variance(steps, specs, lake)
    preflight.require_code_allowed(steps, specs)
    if backend() is None:  # else placement names what no node offers
        preflight.require_sandboxes(steps, specs, Resources(lake=lake).sandboxes)
        preflight.require_libraries(steps, specs)
        preflight.require_templates(steps, specs)

    prepare_dagster_home()
    # Importing Dagster takes seconds; a mistyped name is refused before.
    from etpi.run.client import Client
    from etpi.run.console_table import failures_table

    with Client(specs, rebuild, at_once=len(names), data_only=data_only) as client:
        failed = client.run_experiments(names, finished)
    if failed:
        print(failures_table(failed), file=sys.stderr)
    return 1 if failed else 0


def dry_run(names: Sequence[str], rebuild: Collection[str] = (), as_json: bool = False, data_only: bool = False) -> int:
    """Print the states that `run_experiments` would start from; always 0. Raises SpecError as it does."""
    from etpi.run.console_table import states_table, steps_json
    from etpi_assets.planning.planner import kept_lines, open_steps
    from etpi_resources.lake.lake import Lake

    specs = load_specs()
    plans = _plans(names, specs, Lake.open(), data_only, rebuild)
    if as_json:
        print(json.dumps([steps_json(name, steps) for name, steps in plans.items()], indent=1))
        return 0
    for name, steps in plans.items():
        print(states_table(name, steps, everything=True))
    steps = list(dict.fromkeys(step for planned in plans.values() for step in planned))
    to_run = open_steps(steps)
    lines = [kept_lines(steps), _missing(names, specs) if to_run else "", *_proofs(names, specs)]
    print("\n".join(["", *filter(None, lines), "Nothing was run." if to_run else "Nothing to do."]))
    return 0


def _proofs(names: Sequence[str], specs: Specs) -> Iterator[str]:
    """Yield a line for each suite whose tasks a run proves: how many, how long, and their images."""
    from etpi.rehearsal.costs import proof_lines
    from etpi_assets.planning.planner import set_of
    from etpi_assets.resources import Resources

    for name in (each for each in names if each != CATALOG):
        for suite, text, images in proof_lines(set_of(name, specs), name, specs, Resources()):
            yield f"proofs of {suite}: {text}; {images}"


def _plans(
    names: Sequence[str], specs: Specs, lake: Lake, data_only: bool, rebuild: Collection[str]
) -> dict[str, list[Step]]:
    """Return the plan of each experiment; with `data_only`, without the steps after its data set.

    Raises:
        SpecError: a spec of a chain is unknown or invalid.
        PathError: a step that is to run reads a path whose environment variable is not set.
    """
    from etpi.run.preflight import require_inputs
    from etpi_assets.graph import JOBS
    from etpi_assets.planning.planner import plan

    plans = {name: plan(name, specs, lake, rebuild) for name in names if name != CATALOG}
    if data_only:
        wanted = JOBS["build_dataset"][1]
        plans = {
            name: [step for step in steps if step.set != "experiment" or step.asset in wanted]
            for name, steps in plans.items()
        }
    if invalid := [step.reason for steps in plans.values() for step in steps if step.state == "invalid"]:
        raise SpecError("\n".join(dict.fromkeys(invalid)))
    try:
        require_inputs(dict.fromkeys(step for steps in plans.values() for step in steps), specs)
    except PathError as error:
        raise PathError(f"{error}\n{_missing(names, specs)}") from error
    return plans


def _missing(names: Sequence[str], specs: Specs) -> str:
    """Return all models and data that this machine lacks, and the command that brings them; empty if it has all."""
    from etpi.fetch import needed

    lacking = [each.name for each in needed(names, specs) if not each.here()]
    remedy = f"`etpi fetch {' '.join(names)}` fetches what it can, and says where the rest goes."
    return f"Not on this machine: {', '.join(lacking)}. {remedy}" if lacking else ""


def show_status(names: Sequence[str], everything: bool = False, as_json: bool = False) -> int:
    """Print the folders of the user's specs and the state of chains.

    Args:
        names: of experiments, rollout sets or suites; by default the user's own experiments, and those that the lake
            has data of.
        everything: the experiments that come with etpi as well.
        as_json: an array with an object for each, for programs.

    Returns:
        1 if a folder has files that would not be read; then no experiment is shown.
    """
    from etpi.run.console_table import folders_table, lost_lines, states_table, steps_json
    from etpi.run.preflight import plan_warnings
    from etpi_assets.planning.planner import plan
    from etpi_assets.reports.tainted import checkpoint_lines, tainted
    from etpi_resources.lake.lake import Lake

    folders = user_folders()
    if any(folder.problems for folder in folders):
        print(folders_table(folders, None), file=sys.stderr if as_json else sys.stdout)
        return 1
    specs, lake = load_specs(), Lake.open()
    if (named := Lake.named_folder()) and not named.exists():
        print(f"etpi: ETPI_DATA names {named}, where there is no lake yet; `etpi run` makes one there", file=sys.stderr)
    all_names = specs.keys("experiment")
    known = {
        entry.name for entry in specs.entries() if any(entry.file.is_relative_to(folder.path) for folder in folders)
    } | set(lake.keys("experiment_spec", "experiment"))
    wanted = names or [name for name in all_names if everything or name in known]
    if as_json:
        rows = tainted(lake, wanted)
        shown = [steps_json(name, plan(name, specs, lake)) for name in wanted]
        shown = [each | {"tainted": [row for row in rows if row["experiment"] == each["name"]]} for each in shown]
        print(json.dumps(shown, indent=1))
        return 0
    if not names:
        print(folders_table(folders, specs))
    for name in wanted:
        steps = plan(name, specs, lake)
        print(states_table(name, steps, everything=bool(names)))
        if names and (lost := lost_lines(steps, lake)):
            print("\n".join(lost))
    for line in [*checkpoint_lines(tainted(lake, wanted)), *plan_warnings(wanted, specs), *_pulled_lines(lake, specs)]:
        print(line)
    if more := len(all_names) - len(wanted) if not names else 0:
        print(f"{more} more come with etpi: etpi status --all")
    return 0


def _pulled_lines(lake: Lake, specs: Specs) -> list[str]:
    """Say how the lake stands to its bucket, and which specs of its data are not here."""
    lines = []
    if (lake.root / "remote.json").is_file():
        from etpi_resources.lake.exchange.remote import Remote, standing  # a lake without a bucket does not wait for it

        remote = Remote.of(lake)
        counts = Counter(standing(lake, remote).values())
        states = ", ".join(f"{count} {word}" for word, count in counts.items())
        lines.append(f"{remote.url}: {states}; read at {remote.looked}, `etpi remote` reads it again")
    for set_name in FOLDERS:
        if names := sorted({*lake.keys(f"{set_name}_spec", set_name)} - {*specs.keys(set_name)}):
            kind = set_name.replace("_", " ")
            lines.append(
                f"no spec here of {kind} {', '.join(names)}: their data can be read, not run; specs travel by git"
            )
    return lines


def compare(names: Sequence[str], rebuild: Collection[str] = (), data_only: bool = False, as_json: bool = False) -> int:
    """Run experiments, rollout sets and suites; end with the table that compares the experiments that succeeded.

    Args:
        data_only: train and evaluate nothing; metrics of earlier runs are not shown.
        as_json: print an object for programs instead: the failures of each name, and the metrics of each experiment,
            none of one that failed.
    """
    from etpi.run import columns
    from etpi.run.console_table import ending
    from etpi.run.metrics_table import metrics_table
    from etpi_assets.planning.planner import set_of
    from etpi_resources.lake.lake import Lake, Ref

    ended: dict[str, list[str]] = {}
    specs = load_specs()
    experiments = [name for name in names if name != CATALOG and set_of(name, specs) == "experiment"]
    code = run_experiments(
        names, specs, rebuild, lambda name, failures: ended.update({name: failures}), data_only=data_only
    )
    # A run that is refused, or that finds nothing to do, ends no experiment.
    evaluated = [name for name in experiments if not data_only and (not code or ended.get(name) == [])]
    lake = Lake.open()
    if as_json:
        refs = {name: Ref("eval_metrics", "experiment", name) for name in experiments}
        shown = {name: ref for name, ref in refs.items() if name in evaluated and lake.current(ref)}
        metrics = {name: lake.read(ref, "metrics").to_pylist() if name in shown else [] for name, ref in refs.items()}
        failed = {name: failures for name, failures in ended.items() if failures}
        print(json.dumps({"exit_code": code, "failures": failed, "metrics": metrics}, indent=1))
        return code
    if evaluated:
        print(f"\n{metrics_table(lake, evaluated, columns.width())}")
    if not code:
        print(f"\n{ending(lake, evaluated)}")
    return code


def _refuse_other_home(home: Path) -> None:
    """Raise LakeError if `.env` of the working folder, which `dagster dev` obeys, names another DAGSTER_HOME."""
    from dotenv import dotenv_values

    from etpi_resources.lake.lake import LakeError

    file = Path(".env")
    named = dotenv_values(file).get("DAGSTER_HOME") if file.is_file() else None
    if named and Path(named).resolve() != home:
        raise LakeError(
            f"{file.resolve()} sets DAGSTER_HOME={named}, and Dagster's page reads that file before the environment: "
            f"it would show the runs of that folder, not those of {home}. Start `etpi ui` in another folder, or remove "
            "the line from the file"
        )


def serve_page(host: str, port: int, names: Sequence[str]) -> int:
    """Serve Dagster's web page, with its daemon, until it is stopped.

    Raises:
        LakeError: `.env` names another home of Dagster than this process has.
    """
    home = prepare_dagster_home()
    _refuse_other_home(home)
    os.environ.setdefault(SHIPPED_VARIABLE, "demo")
    import dagster as dg

    from etpi.web.ui import serve_dagster
    from etpi_assets.orchestration.webpage import report_unseen
    from etpi_resources.lake.lake import Lake

    with dg.DagsterInstance.get() as instance:
        if count := report_unseen(instance, Lake.open()):
            print(f"etpi: {count} versions that are new to {home} are shown without a run", file=sys.stderr)
    return serve_dagster(host, port, names, home)
