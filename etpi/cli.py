"""The console command `etpi`: arguments, exit codes and error messages. `make` calls it.

Each command imports what it needs only when it runs, so that `etpi --help` and a mistyped command answer at once.

Exit codes: 0, success; 1, something failed; 2, the command line is wrong; 130, stopped.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import click

from etpi.rehearsal import RATE

PLUGINS = "etpi.commands"
"""The group of entry points with the commands of plugins."""


JSON = click.option("--json", "as_json", is_flag=True, help="print JSON for programs")
PORT = click.IntRange(1, 65535)
NAMES = click.option(
    "--name", "names", metavar="NAME", multiple=True,
    help="a host name that the page is opened under, beside localhost and --host; may be repeated",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: that of the command line) and return its exit code.

    An expected error becomes one message on stderr; any other keeps its traceback.
    """
    if find_spec("torch") is None:  # transformers would say so whenever it is imported
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        code = etpi.main(arguments, prog_name="etpi", standalone_mode=False) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # `etpi … | head`: the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("etpi: stopped. Finished work is kept; the same command continues from there.", err=True)
        return 130
    except Exception as error:
        from etpi.errors import explained
        from etpi.run import console

        if (line := explained(error)) is None or console.verbose:
            raise
        click.echo(f"etpi: {line}", err=True)
        return 1


def _checked(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the assets of --rebuild. Raises UsageError: there is no such asset."""
    if values:
        from etpi_assets.planning.planner import ALL, node_of
        from etpi_assets.specs.load import SpecError

        for value in values:
            try:
                assert value == ALL or node_of(value)
            except SpecError as error:
                raise click.UsageError(f"--rebuild takes an asset, or stands last: {error}") from None
    return values


REBUILD = click.option(
    "--rebuild", multiple=True, is_flag=False, flag_value="all", metavar="[ASSET]", callback=_checked,
    help="compute again what is kept although it is outdated, or of one ASSET only; may be repeated",
)  # fmt: skip


_WANTS = {
    "Start": ("audit", "init", "demo", "model", "doctor"),
    "Run": ("run", "rehearse", "fetch", "capture"),
    "Look": ("status", "view", "sql", "ui", "explain"),
    "Use and share": ("export", "push", "pull", "remote"),
}
"""Purpose -> its commands in `etpi --help`; the others operate."""


class _WithPlugins(click.Group):
    """A group that also has the commands of installed plugins: the entry points of the group `etpi.commands`."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        shown = {name: command for name, command in commands.items() if command and not command.hidden}
        named = {name for names in _WANTS.values() for name in names}
        for title, names in {**_WANTS, "Operate": [name for name in shown if name not in named]}.items():
            with formatter.section(title):
                formatter.write_dl([(n, shown[n].get_short_help_str(58)) for n in names if n in shown])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *entry_points(group=PLUGINS).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if command := super().get_command(ctx, cmd_name):
            return command
        return next((point.load() for point in entry_points(group=PLUGINS, name=cmd_name)), None)


@click.group(cls=_WithPlugins, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="etpi")
@click.option("-q", "--quiet", is_flag=True, help="print results and errors, and no progress")
@click.option("-v", "--verbose", is_flag=True, help="show the stack trace of an error as well")
def etpi(quiet: bool, verbose: bool) -> None:
    """A data platform for post-training coding agents.

    Data go to ./data, ./etpi.duckdb and ./.dagster_home, or all into the folder that ETPI_DATA names. Your own specs
    are in ./specs, or in the folders that ETPI_SPECS names.
    """
    from etpi.run import console

    console.quiet, console.verbose = quiet, verbose


@etpi.command()
@REBUILD
def demo(rebuild: tuple[str, ...]) -> int:
    """Train a student of a strong and one of a weak teacher, and compare them."""
    from etpi import commands
    from etpi_assets.specs.shown import DEMO_EXPERIMENTS

    code = commands.compare(DEMO_EXPERIMENTS, rebuild)
    click.echo(
        "CPUs round differently. On those seen so far, solved at t1 was 0.85 to 0.98 after the strong teacher, and "
        "follow_through at t1 0.11 to 0.23 after the weak one (docs/install.md)."
    )
    return code


@etpi.command("demo-all")
@REBUILD
def demo_all(rebuild: tuple[str, ...]) -> int:
    """Run every experiment on the embedded worlds once, ablations excepted."""
    from etpi import commands
    from etpi_assets.specs.load import load_specs

    experiments = load_specs().experiments.items()
    names = [n for n, spec in experiments if spec.base.kind == "tiny" and spec.requires == "cpu" and not spec.variant]
    return commands.compare(names, rebuild)


@etpi.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--dry-run", is_flag=True, help="list assets that would be computed, why, and last cost; run nothing")
@click.option("--data-only", is_flag=True, help="end with the data sets of experiments: train and evaluate nothing")
@click.option("--allow-code", is_flag=True, help="let servers run code that specs with allow_code = true name")
@click.option("--keep-going", is_flag=True, help="reinforce although no group of rollouts has had an advantage")
@JSON
@REBUILD
def run(
    names: tuple[str, ...],
    dry_run: bool,
    data_only: bool,
    allow_code: bool,
    keep_going: bool,
    as_json: bool,
    rebuild: tuple[str, ...],
) -> int:
    """Bring experiments, rollout sets or suites up to date, with everything they depend on.

    `etpi run catalog` rebuilds the catalog that `etpi sql` and `etpi view` read, and nothing else.
    """
    from etpi import commands

    if allow_code:
        os.environ["ETPI_ALLOW_CODE"] = "1"  # the processes of the run inherit it
    if keep_going:
        os.environ["ETPI_KEEP_GOING"] = "1"
    if dry_run:
        return commands.dry_run(names, rebuild, as_json, data_only)
    return commands.compare(names, rebuild, data_only, as_json)


@etpi.command()
@click.argument("experiments", nargs=-1, required=True, metavar="EXPERIMENT...")
@click.option("--rate", type=float, default=RATE, show_default=True, help="US dollars for an hour of a GPU")
def rehearse(experiments: tuple[str, ...], rate: float) -> int:
    """Run experiments small, on this machine's CPU, to find the faults that would stop them, and their cost.

    Specs, graph, checks, templates, sandboxes, merging and reports are the real ones. Models are random, a server of
    reference solutions replaces teachers, and stand-ins replace missing data. Exits with 1 if something would stop a
    real run. Everything is in the lake's folder, below rehearsals/EXPERIMENT (docs/rehearsal.md).
    """
    from etpi.rehearsal import record
    from etpi.rehearsal.starts import faults
    from etpi_assets.specs.load import load_specs
    from etpi_resources.errors import require_torch
    from etpi_resources.lake.lake import Lake

    require_torch("a rehearsal")
    specs, root, stopped = load_specs(), Lake.open().root / "rehearsals", False
    for name in experiments:
        rehearsal = record.rehearse(name, specs, root / name, rate)
        click.echo(record.text(rehearsal, root / name).rstrip("\n"))
        stopped |= bool(faults(rehearsal.starts))
    return 1 if stopped else 0


@etpi.command()
@click.argument("source", metavar="PATH", type=click.Path(exists=True))
@click.option("--model", "--student", "model", metavar="MODEL", help="the model to train, as for `etpi init`")
@click.option(
    "--heldout", metavar="PATH", type=click.Path(exists=True), help="tasks of the evaluation, which no row may have"
)
@click.option("--format", default="auto", metavar="FORMAT", help="format of the rows (default: recognised)")
@click.option("--map", "columns", metavar="KEY=PATH,...", help="columns of rows of no known format, as for `etpi init`")
@click.option(
    "--fail-on", default="error=0", show_default=True, metavar="LEVEL[=SHARE]",
    help="exit with 1 if a finding of this level (error, warning, note, never) hits more of the label tokens",
)  # fmt: skip
@click.option("--page", metavar="FILE", help="write the findings with their tokens as one HTML page")
@click.option("--base", metavar="MODEL", help="PATH is a checkpoint or an adapter that was trained from this model")
@click.option("--server", metavar="URL", help="with --base: a server of the checkpoint, as http://127.0.0.1:8000")
@click.option("--name", metavar="NAME", help="with --server: the checkpoint's name there")
@click.option("--api-key-env", "key_env", metavar="VARIABLE", help="environment variable with the server's key")
@JSON
def audit(
    source: str, model: str | None, heldout: str | None, format: str, columns: str | None, fail_on: str,
    page: str | None, base: str | None, server: str | None, name: str | None, key_env: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Find what is wrong with a training file or a checkpoint: no lake, no specs (docs/audit.md).

    PATH is a file or folder in any format that etpi reads, or rows of ids and labels; with --base, a checkpoint. Exit
    status 0: nothing above the bound; 1: findings; 2: the file, the model or an option cannot be read.
    """
    import time

    from etpi.audit import command

    start = time.monotonic()
    if bool(model) == bool(base) or bool(server) != bool(name) or (server and not base):
        raise click.UsageError("write FILE --model MODEL, or CHECKPOINT --base MODEL [--server URL --name NAME]")
    if base and (heldout or page or columns or format != "auto"):
        raise click.UsageError("a checkpoint takes --server, --name and --json; the other options are of files")
    if base:
        return command.show_checks(command.of_checkpoint(source, base, server, name, key_env), source, base, as_json)
    assert model
    bound = command.bound_of(fail_on)  # wrong options end it before the file is read
    if page and not Path(page).absolute().parent.is_dir():
        raise click.UsageError(f"--page {page}: there is no such folder")
    return command.show(command.of_file(source, model, heldout, format, columns), start, bound, as_json, page)


_INIT: dict[str, tuple[Any, str]] = {
    "model": ("MODEL", "the student: a folder, REPO@COMMIT of the hub, or tiny"),
    "format": ({"default": "auto", "metavar": "FORMAT"}, "format of the runs (default: recognised)"),
    "train": (True, "train the student on the runs (default: end with a data set)"),
    "map": ("KEY=PATH,...", "columns of rows of no known format (docs/reference/formats.md)"),
    "ignore": ("KEY,...", "columns and keys (message.NAME) that may stay unread"),
    "secrets": ({"type": click.Choice(["keep", "mask", "quarantine"])}, "what is done with keys in the runs"),
    "json": (True, "print what was seen as JSON, and write nothing"),
    "teacher": ("NAME", "the model that wrote the runs, if they do not name it"),
    "license": ("LICENSE", "licence of the runs, if they do not name it"),
    "rl": (True, "reinforce the student on the tasks (default: reference rollouts)"),
    "harness": ("NAME", "with --rl: reinforce in this harness, such as mini_swe_agent"),
    "repos": ({"metavar": "REPO,...", "default": ""}, "only these repositories of CooperBench's folder"),
    "python": ("FILE", "interpreter with the packages that a git repository's tests need"),
    "commits": ({"default": 200, "show_default": True}, "how many commits of a git repository to look at"),
    "split": ({"type": click.Choice(["repository", "time"]), "default": "repository"}, "what is held out"),
    "checkouts": ("FOLDER", "prepared folders, for bubblewrap instead of Docker"),
    "suite": ("SUITE", "the suite whose tasks the teacher works on (required; docs/reference lists suites)"),
    "api-key-env": ("VARIABLE", "environment variable with the server's key"),
    "preset": ("PRESET", "settings of a method (docs/own_data.md)"),
    "name": ("NAME", "name of the new specs (default: from the data)"),
    "yes": (True, "ask nothing; take defaults for options that are not given"),
    "force": (True, "replace files that exist"),
}
"""Option of the commands of `etpi init` -> its metavar, True for a flag, or its settings; and its help."""
_NAMES = {"model": ("--model", "--student", "student"), "map": ("--map", "columns"), "json": ("--json", "as_json")}
_OF_ALL = ("preset", "name", "yes", "force")


def _init_options(*names: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return the decorator with these options of `_INIT`."""

    def decorated(command: Callable[..., int]) -> Callable[..., int]:
        for name in reversed(names):
            kind, text = _INIT[name]
            settings: dict[str, Any] = (
                {"is_flag": True} if kind is True else kind if isinstance(kind, dict) else {"metavar": kind}
            )
            command = click.option(*_NAMES.get(name, (f"--{name}",)), **settings, help=text)(command)
        return command

    return decorated


class _Init(click.Group):
    """A group that reads `--from PATH`, `--tasks PATH` and `--endpoint URL` of the release before as its commands."""

    _OLD: ClassVar = {"--from": "runs", "--tasks": "tasks", "--endpoint": "endpoint"}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = [w for arg in args for w in (arg.split("=", 1) if arg.partition("=")[0] in self._OLD else [arg])]
        at = [n for n, word in enumerate(words) if word in self._OLD]
        is_path = words[:1] and words[0] not in self.commands and Path(words[0]).exists()
        if len(at) > 1 or at == [len(words) - 1] or is_path:
            raise click.UsageError("name one beginning: init runs PATH, init tasks PATH or init endpoint URL")
        if at:
            args = [self._OLD[words[at[0]]], *words[: at[0]], *words[at[0] + 2 :], "--", words[at[0] + 1]]
        return super().parse_args(ctx, args)


@etpi.group(cls=_Init)
def init() -> None:
    """Write specs into ./specs for your own recorded runs, your own tasks, or a teacher behind an endpoint.

    docs/own_data.md and docs/own_tasks.md show it. The options of one command, `etpi init --from PATH`, `--tasks PATH`
    and `--endpoint URL`, work until the next release.
    """


@init.command("runs")
@click.argument("path")
@_init_options("model", "train", "format", "map", "ignore", "secrets", "teacher", "license", "json", *_OF_ALL)
def init_runs(path: str, **options: Any) -> int:
    """Look at recorded runs (a file or folder; ${VARIABLE} is replaced), and write the specs that train on them."""
    from etpi.init import command

    return command.from_trajectories(path, command.Answers(**options))


@init.command("tasks")
@click.argument("path")
@_init_options("model", "rl", "harness", "python", "commits", "split", "checkouts", "repos", *_OF_ALL)
def init_tasks(path: str, **options: Any) -> int:
    """Make proved tasks of a git repository, Harbor's or CooperBench's folder, or rows of SWE-bench's form."""
    from etpi.init import command

    if options["harness"] and not options["rl"]:
        raise click.UsageError("--harness belongs to --rl")
    return command.from_tasks(path, command.Answers(**options))


@init.command("endpoint")
@click.argument("url")
@_init_options("suite", "api-key-env", *_OF_ALL)
@click.option("--model", metavar="NAME", help="the server's name of the teacher (default: its only model)")
@click.option("--student", metavar="MODEL", help=_INIT["model"][1])
def init_endpoint(url: str, suite: str | None, **options: Any) -> int:
    """Collect rollouts of a model behind an OpenAI-compatible endpoint on the tasks of a suite."""
    from etpi.init import command

    if not suite:
        raise click.UsageError("Missing option '--suite'; `etpi status --all` and docs/reference list suites")
    return command.from_endpoint(url, suite, command.Answers(**options))


@etpi.command()
@click.argument("kind", type=click.Choice(["suite", "rollout_set", "experiment"]))
def schema(kind: str) -> int:
    """Print the JSON schema of a kind of spec, for editors and programs. `etpi init` writes them beside its specs."""
    import json

    from etpi_assets.specs import json_schema

    click.echo(json.dumps(json_schema.schema(kind), indent=1))
    return 0


@etpi.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def fetch(names: tuple[str, ...]) -> int:
    """Download the public data sets and models that an experiment, rollout set or suite reads.

    The first fetch pins revision and hash of every file; without network it names the files to copy, and where to.
    """
    from etpi import fetch as fetching
    from etpi_assets.specs.load import load_specs
    from etpi_resources.lake.lake import Lake

    return fetching.fetch(names, load_specs(), Lake.open())


@etpi.command()
@click.argument("model")
@click.option("--template", metavar="TEMPLATE", help="another chat template: a name in TRL, a Jinja file or a folder")
def model(model: str, template: str | None) -> int:
    """Show the [base] section of a model, its size and context, and the effects of its chat template on training data.

    MODEL is a folder, REPO@COMMIT of the hub, package:NAME==VERSION@SHA256, or tiny. Exits with 1 if something does not
    work.
    """
    from etpi.model_facts import show

    return show(model, template)


# The name that it had before.
etpi.add_command(click.Command("template", callback=model.callback, params=model.params, help=model.help, hidden=True))


@etpi.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "everything", is_flag=True, help="the experiments that come with etpi as well")
@JSON
def status(names: tuple[str, ...], everything: bool, as_json: bool) -> int:
    """Show what is missing, stale or blocked, through the whole chain of experiments, rollout sets or suites.

    Without a NAME: your own experiments, and those that the lake has data of.
    """
    from etpi import commands

    return commands.show_status(names, everything, as_json)


@etpi.command()
@click.argument("name")
@click.option("--task", "tasks", multiple=True, metavar="ID", help="judge only the work on this task; may be repeated")
@click.option("--dry-run", is_flag=True, help="say what would be judged, how long it takes, and what cannot be")
@JSON
def rejudge(name: str, tasks: tuple[str, ...], dry_run: bool, as_json: bool) -> int:
    """Judge the stored work of a rollout set or an experiment with the present judge; no model runs.

    `etpi run` does so too where a judge's number was raised (docs/rejudge.md).
    """
    from etpi import verdicts

    return verdicts.rejudge(name, tasks, dry_run=dry_run, as_json=as_json)


@etpi.command("taint")
@click.option(
    "--from", "roots", metavar="ROOT", multiple=True,
    help="flips (the default), or KIND:VALUE by rollout, task, teacher, repo, sampler, set, importer, licence "
    "or blamed (an experiment); may be repeated",
)  # fmt: skip
@click.option("--keep", metavar="REASON", help="accept the flips among them, with a reason")
@click.option("--retrain", is_flag=True, help="write specs of the experiments that train without these rollouts")
@JSON
def taint_command(roots: tuple[str, ...], keep: str | None, retrain: bool, as_json: bool) -> int:
    """Show the data sets, checkpoints, evaluations and reports that rest on flipped verdicts or on rollouts."""
    from etpi import verdicts

    return verdicts.show_taint(roots or ("flips",), keep, retrain=retrain, as_json=as_json)


@etpi.command()
@click.argument("asset")
@click.argument("key")
def explain(asset: str, key: str) -> int:
    """Show the state of ASSET's partition KEY, the numbers of its code with their lines, and what changed."""
    from etpi_assets.planning.planner import explain as explained
    from etpi_assets.specs.load import load_specs
    from etpi_resources.lake.lake import Lake

    for line in explained(asset, key, load_specs(), Lake.open()):
        click.echo(line)
    return 0


@etpi.command()
@click.option("--deep", is_flag=True, help="read every file and compare its sha256 (default: existence and size)")
@click.option("--since", type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"]), help="publications from then on (UTC)")
@click.option("--set-aside", is_flag=True, help="move damaged parts, and the versions that need them, to data/.damaged")
@JSON
def verify(deep: bool, since: datetime | None, set_aside: bool, as_json: bool) -> int:
    """Compare the lake with its manifests; print damaged parts, and exit with 1 if there is one.

    Restore damaged parts from a backup before you use --set-aside (docs/lake.md); runs compute the rest again.
    """
    from etpi import storage

    return storage.verify(
        deep=deep, since=since.replace(tzinfo=UTC) if since else None, move=set_aside, as_json=as_json
    )


@etpi.command()
@click.argument("experiment")
@click.option(
    "--format",
    metavar="FORMAT",
    help="trl, trl_messages, verl_sft, verl_rl, atif, hub, tito or model (docs/reference/formats.md)",
)
@click.option("--to", required=True, type=click.Path(path_type=Path), metavar="FOLDER", help="a new or empty folder")
def export(experiment: str, format: str | None, to: Path) -> int:
    """Write an experiment's data or models in another program's format (docs/reference/formats.md)."""
    from etpi_assets.exports import EXPORTS, MANIFEST
    from etpi_assets.exports import export as write
    from etpi_assets.resources import Resources

    if format is None:
        raise click.UsageError(f"--format is missing; it is one of {', '.join(EXPORTS)}")
    manifest = write(experiment, format, to, Resources())
    for file in manifest["files"][:8]:
        rows = f"{file['rows']:,} rows, " if file["rows"] > 1 else ""
        click.echo(f"{to / file['path']}  {rows}{file['bytes'] / 1000:,.1f} kB")
    if more := len(manifest["files"][8:]):
        click.echo(f"... and {more} more files; {to / MANIFEST} lists them")
    for reason, count in manifest["left_out"].items():
        click.echo(f"left out: {count}, {reason}")
    for note in manifest["notes"]:
        click.echo(f"note: {note}")
    click.echo(f"{to / MANIFEST} names the {len(manifest['versions'])} data versions it comes from")
    return 0


@etpi.command()
@click.option("--port", type=PORT, help="port to listen on  [default: 3000, or the next that is free]")
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen on")
@NAMES
def ui(port: int | None, host: str, names: tuple[str, ...]) -> int:
    """Serve Dagster's web page until it is stopped (docs/view.md: who can use it)."""
    from etpi import commands
    from etpi.web.ports import free_port

    return commands.serve_page(host, free_port(host, port or 3000, named=port is not None), names)


@etpi.command("sql")
@click.argument("query", required=False, metavar="[REPORT|FILE]")
@click.argument("values", nargs=-1, metavar="[NAME=VALUE]...")
@click.option("-c", "text", metavar="SQL", help="run this text instead of a report or a file")
@click.option("--list", "list_them", is_flag=True, help="list the reports with their questions and variables")
@click.option(
    "--format", type=click.Choice(["table", "csv", "json", "markdown"]), default="table", show_default=True,
    help="how to print the result",
)  # fmt: skip
@JSON
def sql(
    query: str | None, values: tuple[str, ...], text: str | None, list_them: bool, format: str, as_json: bool
) -> int:
    """Ask the catalog: run a report, a file or -c SQL and print the result; without any, open DuckDB's shell.

    The catalog is opened read-only, with times in UTC; a query opens no other file and writes none. NAME=VALUE sets a
    variable of the query (docs/queries.md).
    """
    from etpi.query import command
    from etpi_resources.lake.questions import Question

    if list_them:
        return command.list_reports()
    if text is not None:
        values = (query, *values) if query is not None else values
        question = Question("-c", text)
    elif query is None:
        return command.shell()
    else:
        question = command.find(query)
    return command.run(question, command.parse_values(values, question), "json" if as_json else format)


@etpi.command()
@click.argument("experiment")
@click.option(
    "--by", type=click.Choice(["teacher", "sampler", "repo", "importer", "task"]), default="teacher",
    show_default=True, help="group rollouts by this",
)  # fmt: skip
@click.option(
    "--share", type=click.FloatRange(0, 1), default=0.1, show_default=True, help="the worst rollouts: how many"
)
@click.option("--retrain", is_flag=True, help="write specs without the worst share, and without as many at random")
@click.option(
    "--without", multiple=True, metavar="KIND:VALUE",
    help="write a spec without rollouts of a root of `etpi taint`; may be repeated",
)  # fmt: skip
def blame(experiment: str, by: str, share: float, retrain: bool, without: tuple[str, ...]) -> int:
    """Show which training rollouts raised or lowered a held-out metric (docs/blame.md).

    Nothing is dropped: the specs that --retrain and --without write train without them when a person runs them.
    """
    from etpi import blame as blaming

    return blaming.without(experiment, without) if without else blaming.blame(experiment, by, share, retrain)


@etpi.command()
@click.argument("experiments", nargs=-1, metavar="[EXPERIMENT]...")
@click.option("--rollout-set", "rollout_sets", multiple=True, metavar="NAME", help="a rollout set; may be repeated")
@click.option("--suite", "suites", multiple=True, metavar="NAME", help="a suite; may be repeated")
@click.option("--remote", is_flag=True, help="remove them from the bucket, not from the lake (docs/sharing.md)")
@click.option("--yes", is_flag=True, help="remove it (default: only show what would be removed)")
def rm(
    experiments: tuple[str, ...], rollout_sets: tuple[str, ...], suites: tuple[str, ...], remote: bool, yes: bool
) -> int:
    """Remove experiments from the lake: every version, their reports and journals. `etpi gc` then frees their weights.

    Refuses if something that stays depends on them, or while a run uses the lake. Specs are not touched.
    """
    from etpi import exchange, storage

    sets = (("experiment", experiments), ("rollout_set", rollout_sets), ("suite", suites))
    pairs = [(name, key) for name, keys in sets for key in keys]
    if not pairs:
        raise click.UsageError("name an experiment, or --rollout-set NAME, or --suite NAME")
    return (exchange if remote else storage).remove(pairs, yes=yes)


@etpi.command()
@click.option("--older-than", type=click.IntRange(0, 36500), default=14, show_default=True, metavar="DAYS")
@click.option("--remote", is_flag=True, help="objects of the bucket that no current version there needs")
@click.option("--yes", is_flag=True, help="remove it (default: only show what would be removed)")
def gc(older_than: int, remote: bool, yes: bool) -> int:
    """Remove past versions, checkpoints and scratch that nothing needs any more, and that are older than DAYS.

    What a current version was computed from stays, and with it the lineage of every checkpoint.
    """
    from etpi import exchange, storage

    return (exchange if remote else storage).collect_garbage(older_than=older_than, yes=yes)


def _exchanges(command: Callable[..., int]) -> Callable[..., int]:
    """Add the argument and the options that push and pull share."""
    prefer = {"ours": "this lake's versions", "theirs": "the bucket's versions"}
    for option in (
        *(
            click.option(f"--{k}", "prefer", flag_value=k, help=f"where both moved: keep {v}")
            for k, v in prefer.items()
        ),
        click.option("--dry-run", is_flag=True, help="show what would move and its size; move nothing"),
        click.option("--no-weights", is_flag=True, help="leave out checkpoints, stored trainings and journals"),
        click.argument("names", nargs=-1, metavar="[NAME]..."),
    ):
        command = option(command)
    return command


def _where(name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    text = "s3://BUCKET/PREFIX, gs://..., az://... or a folder (default: that of the last exchange)"
    return click.option(name, "url", metavar="URL", help=text)


@etpi.command()
@_where("--to")
@click.option("--again", is_flag=True, help="store files again that the bucket should have")
@_exchanges
def push(names: tuple[str, ...], url: str | None, no_weights: bool, **options: Any) -> int:
    """Store what the current versions of experiments, rollout sets or suites need in a bucket, and make them current.

    Without NAME everything is pushed. Nothing is current in the bucket before all of it is there (docs/sharing.md).
    """
    from etpi import exchange

    return exchange.push(names, url, exchange.Options(weights=not no_weights, **options))


@etpi.command()
@_where("--from")
@_exchanges
def pull(names: tuple[str, ...], url: str | None, no_weights: bool, **options: Any) -> int:
    """Fetch what the bucket's versions of experiments, rollout sets or suites need, and make them current here."""
    from etpi import exchange

    return exchange.pull(names, url, exchange.Options(weights=not no_weights, **options))


@etpi.command()
@click.argument("url", required=False)
@JSON
def remote(url: str | None, as_json: bool) -> int:
    """Show what a bucket has, who pushed it when, and how this lake stands to it; with URL, use that bucket."""
    from etpi import exchange

    return exchange.remote(url, as_json)


@etpi.command()
@click.option("--url", required=True, metavar="URL", help="a vLLM server that runs, as http://127.0.0.1:8000")
@click.option("--model", required=True, metavar="NAME", help="the server's name of the model")
@click.option("--tokenizer", required=True, metavar="NAME", help="its tokenizer: a folder, hub:REPO@COMMIT, or qwen3")
@click.option("--to", required=True, type=click.Path(path_type=Path), metavar="FOLDER", help="the folder of the logs")
@click.option("--port", default=8200, show_default=True, help="port to listen on")
@click.option("--temperature", default=1.0, show_default=True, help="sampling temperature of every call")
@click.option("--max-tokens", default=4096, show_default=True, help="most output tokens of a call")
@click.option("--max-model-len", default=131072, show_default=True, help="most tokens of prompt and output of a call")
@click.option("--api-key-env", "key_env", metavar="VARIABLE", help="environment variable with the server's key")
def capture(**options: Any) -> int:
    """Record the calls of agent harnesses to a vLLM server, token for token, until stopped (docs/any_agent.md).

    The harness is pointed at http://127.0.0.1:PORT/a/NAME/v1, with the key in FOLDER/key. Each NAME is a log in FOLDER,
    and later a rollout of an imported set (`format = "capture"`).
    """
    from etpi.capture import CaptureOptions
    from etpi.capture import capture as serve_capture

    return serve_capture(CaptureOptions(**options))


@etpi.command()
@click.option("--port", type=PORT, help="port to listen on  [default: 3001, or the next that is free]")
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen on")
@NAMES
@click.option(
    "--export", nargs=2, metavar="EXPERIMENT FOLDER", help="write an experiment's pages to a new folder, and end"
)
@click.option("--remote", metavar="URL", help="first pull what pages show from a bucket, without weights")
def view(
    port: int | None, host: str, names: tuple[str, ...], export: tuple[str, str] | None, remote: str | None
) -> int:
    """Serve pages that show rollouts, tokens, data sets and running work, until it is stopped (docs/view.md)."""
    from etpi.view.serve import export_view, serve_view
    from etpi.web.ports import free_port

    if remote:
        from etpi import exchange

        if code := exchange.pull(export[:1] if export else (), remote, exchange.Options(weights=False)):
            return code
    if export:
        return export_view(export[0], Path(export[1]))
    return serve_view(host, free_port(host, port or 3001, named=port is not None), names)


@etpi.command()
@click.argument("experiments", nargs=-1, metavar="[EXPERIMENT]...")
def doctor(experiments: tuple[str, ...]) -> int:
    """Prove, before anything is run, that lake, locks and sandboxes work on this machine.

    Prints a remedy for each fault; exit status 1 if there is one. No container engine is a fault if an EXPERIMENT
    needs one.
    """
    from etpi.doctor import command

    return command.doctor(experiments)
