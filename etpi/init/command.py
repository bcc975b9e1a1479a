"""The command `etpi init`: asks for missing facts, prints a summary of the data, writes the specs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import click

from etpi.init import endpoint, tasks, trajectories
from etpi.init.experiment import TINY_PROMPT, NewExperiment
from etpi.init.student import read_student
from etpi.init.write import announcement, refuse_existing, spec_name, write_specs
from etpi_assets.agent.harness import require_installed
from etpi_assets.specs.experiment import preset_file
from etpi_assets.specs.harness import PRESETS, HarnessSection
from etpi_assets.specs.load import SpecError, load_specs
from etpi_assets.specs.paths import PathError
from etpi_resources.engines import EngineUnavailable

_STUDENT = "the student, a folder or REPO@COMMIT of the hub"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The options of the command line (`etpi init --help`); None: ask on a terminal, unless `yes`."""

    model: str | None = None
    student: str | None = None
    name: str | None = None
    teacher: str | None = None
    license: str | None = None
    preset: str | None = None
    api_key_env: str | None = None
    yes: bool = False
    force: bool = False
    format: str = "auto"
    columns: str | None = None
    secrets: str | None = None
    ignore: str | None = None
    as_json: bool = False
    train: bool = False
    rl: bool = False
    harness: str | None = None
    python: str | None = None
    commits: int = 200
    split: str = "repository"
    checkouts: str | None = None
    repos: str = ""

    def __post_init__(self) -> None:
        """Raise SpecError for an unknown preset, or a name that cannot be a file's."""
        if self.name is not None and spec_name(self.name) != self.name:
            raise SpecError(
                f"--name {self.name}: a name has letters, digits, `_`, `.` and `-`, such as {spec_name(self.name)}"
            )
        try:
            if self.preset is not None:
                preset_file(self.preset)
        except ValueError as error:
            raise SpecError(f"--preset: {error}") from error

    def ask(self, option: str, question: str, default: str | None) -> str:
        """Return the option, a person's answer, or the default.

        Raises UsageError: there is neither an option, nor a person to ask, nor a default.
        """
        value = getattr(self, option)
        if value is None and not self.yes and sys.stdin.isatty():
            value = click.prompt(question, default=default, show_default=bool(default))
        value = default if value is None else value
        if value is None:
            raise click.UsageError(f"--{option} is missing: {question}")
        return value

    @property
    def ignored(self) -> list[str]:
        """Return the columns and keys that may stay unread."""
        return [name.strip() for name in (self.ignore or "").split(",") if name.strip()]

    def ask_student(self, default: str | None) -> str:
        """Return the student, which --model names too where no endpoint has a model."""
        return self.student or self.ask("model", _STUDENT, default)


def from_trajectories(source: str, answers: Answers) -> int:
    """Write a rollout set and an experiment for recorded runs, or print what was seen as JSON; always 0.

    Raises SpecError: a bad path, format, student or name; none of the inputs can be read; or files that exist.
    """
    student = read_student(answers.ask_student(None))
    name = answers.ask("name", "name of the new specs", spec_name(Path(source).name.partition(".")[0]))
    if not (answers.force or answers.as_json):  # looking at runs takes seconds
        refuse_existing([("rollout_set", name), ("experiment", name)])
    survey = trajectories.survey(source, answers.format, student, answers.columns, answers.secrets, answers.ignored)
    if answers.as_json:
        click.echo(json.dumps(trajectories.facts(survey, student, answers.preset), ensure_ascii=False, indent=1))
        return 0
    click.echo(trajectories.summary(survey, student, answers.preset))
    click.echo("\n".join(trajectories.preview_lines(survey, student, answers.preset)))
    if survey.stopping:
        names = ",".join(each.name for each in survey.stopping)
        raise SpecError(
            "the format does not read everything that may change what is trained; nothing was written. Name the "
            f"columns or keys in a format of your own (docs/own_data.md), or leave them out with --ignore {names}"
        )
    if not survey.rollouts:
        raise SpecError(f"none of the {survey.looked} inputs looked at can be read; nothing was written")
    if survey.called and not survey.native and student.chat and student.chat.tool_form is None:
        raise SpecError(
            f"the runs have {survey.called.total()} structured calls, and the chat template of --model writes none, so "
            "none could be trained; nothing was written. Take a model whose template writes tool calls, or runs whose "
            "actions are text, such as fenced shell commands"
        )
    teacher = licence = None
    if survey.teachers["unknown"]:
        teacher = answers.ask("teacher", "the model that wrote the runs, which they do not name", "unknown")
    if not survey.licences:
        licence = answers.ask("license", "licence of the runs", "")
    new = [
        trajectories.rollout_set_spec(name, survey, teacher, licence),
        trajectories.experiment_spec(name, survey, student, answers.preset, answers.train),
    ]
    if columns := survey.options.get("map"):
        new.append(trajectories.format_spec(trajectories.format_name(name), columns))
    click.echo(announcement(write_specs(new, force=answers.force), name, export="model" if answers.train else "trl"))
    return 0


def from_tasks(source: str, answers: Answers) -> int:
    """Write a suite, a rollout set and an experiment for one's own tasks, and prove the tasks.

    Always 0.

    Raises SpecError: there are no tasks, they cannot be proved, a bad student or name, or files that exist.
    """
    place = Path(source).expanduser()
    kind = tasks.kind_of(place)
    name = answers.ask("name", "name of the new specs", spec_name(place.resolve().name.partition(".")[0]))
    # Patches of real repositories are longer than what the tiny base can read.
    trains = kind != "cooperbench" or answers.student or answers.model or answers.rl
    student = read_student(answers.ask_student("tiny") if trains else "tiny")
    if not answers.force:  # making tasks takes minutes
        refuse_existing([(set, name) for set in ("suite", "rollout_set", "experiment")])
    if kind == "git":
        suite_tasks = tasks.from_git(place, name, answers.python, answers.commits)
    elif kind == "rows":
        suite_tasks = tasks.from_rows(place, answers.split, answers.checkouts)
    elif kind == "cooperbench":
        suite_tasks = tasks.from_cooperbench(place, [*filter(None, answers.repos.split(","))], answers.checkouts)
    else:
        suite_tasks = tasks.from_harbor(place, answers.checkouts)
    click.echo("\n".join(suite_tasks.lines))
    sandbox = suite_tasks.sandbox if answers.rl else ""
    solved = "min_reward = 1.0   # solved rollouts; the others are not trained on"
    experiment = NewExperiment(
        name, student, native=True, min_reward=solved, preset=answers.preset, suite=name, rl_sandbox=sandbox,
        harness=harness_named(answers.harness) if answers.harness else "",
    )  # fmt: skip
    if experiment.reinforces_tiny:  # `serving_probe`: trained and served prompts are the same
        suite_tasks = replace(suite_tasks, prompt=TINY_PROMPT)
    new = tasks.new_specs(name, suite_tasks)
    new += [experiment.spec()] if trains else []
    new += [experiment.baseline()] if answers.rl else []
    files = write_specs(new, force=answers.force)  # reads them: a wrong suite or reward is refused before the proof
    if failures := _prove(name):
        raise SpecError("\n".join(["the tasks cannot be proved:", *failures]))
    click.echo("\n".join(tasks.proof(name)))
    first = [f"{name}_baseline"] if answers.rl else []
    export = "model" if answers.rl else "trl" if trains else ""
    click.echo(announcement(files, name, export=export, first=first))
    return 0


def harness_named(name: str) -> str:
    """Return a preset's name, written with `-` or `_`. Raises SpecError if its version is not installed."""
    names = {preset.replace("-", "_"): preset for preset in PRESETS}
    preset = names.get(name.replace("-", "_"))
    if preset is None:
        raise SpecError(f"--harness {name}: there are {', '.join(sorted(PRESETS))}; docs/any_agent.md has your own")
    try:
        require_installed(HarnessSection.model_validate({"name": preset, "folder": f"${{ETPI_HARNESSES}}/{preset}"}))
    except (EngineUnavailable, PathError) as error:
        raise SpecError(f"--harness {name}: {error}") from error
    return preset


def _prove(suite: str) -> list[str]:
    """Make the suite's tasks in the lake; return a line for each failed step."""
    from etpi.dagster_home import prepare_dagster_home

    prepare_dagster_home()
    # Importing Dagster takes seconds; a bad folder is refused before.
    from etpi.run.client import Client

    with Client(load_specs()) as client:
        return client.run("prepare_suite", suite)


def from_endpoint(url: str, suite: str, answers: Answers) -> int:
    """Write a rollout set that an endpoint's model collects on a suite, and an experiment; always 0.

    Raises SpecError: the server or the suite is unknown, a bad student or name, or files that exist.
    """
    specs = load_specs()
    agent, sandbox = endpoint.suite_agent(suite, specs)
    server = endpoint.read_endpoint(url, answers.model, answers.api_key_env)
    click.echo(endpoint.summary(server))
    student = read_student(answers.ask("student", _STUDENT, "tiny"))
    name = answers.ask("name", "name of the new specs", spec_name(f"{suite}_{server.model.rpartition('/')[2]}"))
    experiment = NewExperiment(
        name,
        student,
        native=endpoint.same_ids(server, student),
        min_reward="min_reward = 1.0   # solved rollouts; the others are not trained on",
        preset=answers.preset,
    )
    new = [endpoint.rollout_set_spec(name, suite, server, agent, sandbox), experiment.spec()]
    click.echo(announcement(write_specs(new, force=answers.force), name))
    return 0
