"""The command `etpi lab`, found by the entry point `lab` of the group `etpi.commands`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click


def _shares(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options that split a list of experiments over calls."""
    share = click.option("--share", default="1/1", metavar="K/N", help="run only the K-th of N shares")
    table = click.option("--table", is_flag=True, help="run nothing; write the page from what the lake has")
    return share(table(command))


@click.group()
def lab() -> None:
    """Repeat experiments over training seeds, run sweeps, and build what etpi ships (lab/README.md)."""


@lab.command()
@click.argument("experiments", nargs=-1, metavar="[EXPERIMENT]...")
@click.option("--seed", "seeds", type=int, multiple=True, help="a training seed; may be repeated (default 0, 1, 2)")
@click.option(
    "--to", default="results.md", show_default=True, type=click.Path(path_type=Path), help="the page to write"
)
@click.option("--second-look", is_flag=True, help="then repeat what is undecided over twice the seeds")
@_shares
def results(
    experiments: tuple[str, ...], seeds: tuple[int, ...], to: Path, second_look: bool, share: str, table: bool
) -> int:
    """Repeat experiments over training seeds and write a page of results.

    Finished experiments are skipped, so a stopped call continues. The page has whatever the lake has; shares may run on
    several machines (lab/docs/seeds.md).
    """
    from etpi_lab.repeat import results
    from etpi_lab.repeat.share import Share

    return results.results(
        experiments, seeds or results.SEEDS, to, Share.parse(share), table_only=table, second_look=second_look
    )


@lab.command("pypi-bugs")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--per-package", type=int, help="most bugs of each package")
@click.option("--seed", type=int, default=0, show_default=True, help="seed of the choice of bugs")
def pypi_bugs(folder: Path, per_package: int | None, seed: int) -> int:
    """Build the suite of bugs in real packages in FOLDER. Fetches the packages with pip once."""
    from etpi_lab.pypi_bugs.build import PER_PACKAGE, build
    from etpi_lab.pypi_bugs.packages import SuiteBuildError, pinned
    from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

    try:
        rows = build(folder, BubblewrapFactory(), pinned(), per_package=per_package or PER_PACKAGE, seed=seed)
    except SuiteBuildError as error:
        raise click.ClickException(str(error)) from error
    counts = json.loads((folder / "built.json").read_text())
    click.echo(f"{rows}: {counts['rows']} tasks. Name the folder: export ETPI_PYPI_BUGS={folder.resolve()}")
    return 0


@lab.command()
@click.argument("sweeps", nargs=-1, metavar="[SWEEP]...")
@click.option("--plan", "show_plan", is_flag=True, help="print the declared analyses, with n from a power calculation")
@click.option("--seed", "seeds", type=int, multiple=True, help="a trial on these training seeds; may be repeated")
@click.option(
    "--to", default="sweeps", show_default=True, type=click.Path(file_okay=False, path_type=Path),
    help="the folder for a page and a plot of each sweep",
)  # fmt: skip
@_shares
def sweeps(sweeps: tuple[str, ...], show_plan: bool, seeds: tuple[int, ...], to: Path, share: str, table: bool) -> int:
    """Run declared sweeps: how an effect depends on a variable, with a plot and a sentence each.

    SWEEP is the name of a shipped sweep or a TOML file; by default all shipped ones. Finished experiments are skipped
    (lab/docs/seeds.md).
    """
    from etpi_lab.repeat import sweeps as declared
    from etpi_lab.repeat.share import Share

    if show_plan:
        return declared.plan(sweeps)
    return declared.run(sweeps, to, Share.parse(share), table_only=table, seeds=seeds)


@lab.command()
@click.option("--difference", type=click.FloatRange(0, 1, min_open=True), required=True, help="to be shown")
@click.option("--rate", type=click.FloatRange(0, 1, True, True), default=0.5, show_default=True, help="expected rate")
@click.option("--seed-sd", type=click.FloatRange(0), default=0.05, show_default=True, help="between training seeds")
@click.option("--tasks", type=click.IntRange(2), multiple=True, help="held-out tasks; may be repeated")
@click.option("--power", type=click.FloatRange(0, 1, True, True), default=0.8, show_default=True)
def power(difference: float, rate: float, seed_sd: float, tasks: tuple[int, ...], power: float) -> int:
    """Print how many training seeds and held-out tasks show a difference of two conditions (lab/docs/seeds.md)."""
    from etpi_lab.repeat import power_table

    print(power_table.table(difference, rate, seed_sd, tasks or power_table.TASKS, power))
    return 0


@lab.command("tiny-bases")
@click.argument("worlds", nargs=-1, metavar="[WORLD]...")
def tiny_bases(worlds: tuple[str, ...]) -> int:
    """Train the tiny bases that etpi ships again, in a checkout, after a change of their recipe; default: all."""
    from etpi_lab.tiny_bases.rebuild import rebuild_worlds

    return rebuild_worlds(worlds)
