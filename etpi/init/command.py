"""The command `etpi init`: asks for what is missing, prints what was seen, writes the specs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import click

from etpi.init import trajectories
from etpi.init.student import read_student
from etpi.init.write import announcement, spec_name, write_specs
from etpi_assets.specs.load import SpecError


@dataclass(frozen=True)
class Answers:
    """The options of the command line; None: ask on a terminal, unless `yes`."""

    model: str | None = None
    name: str | None = None
    teacher: str | None = None
    license: str | None = None
    yes: bool = False
    force: bool = False

    def ask(self, option: str, question: str, default: str | None) -> str:
        """Return the option, a person's answer, or the default.

        Raises:
            UsageError: there is neither an option, nor a person to ask, nor a default.
        """
        value = getattr(self, option)
        if value is None and not self.yes and sys.stdin.isatty():
            value = click.prompt(question, default=default, show_default=bool(default))
        value = default if value is None else value
        if value is None:
            raise click.UsageError(f"--{option} is missing: {question}")
        return value


def from_trajectories(source: str, format: str, answers: Answers) -> int:
    """Write a rollout set and an experiment for recorded runs; always 0.

    Raises:
        SpecError: a bad path, format, model or name; none of the inputs can be read; or files that exist.
    """
    student = read_student(answers.ask("model", "the student, a folder or REPO@COMMIT of the hub", None))
    survey = trajectories.survey(source, format, student)
    click.echo(trajectories.summary(survey, student))
    if not survey.rollouts:
        raise SpecError(f"none of the {survey.looked} inputs looked at can be read; nothing was written")
    name = answers.ask("name", "name of the new specs", spec_name(Path(source).name.partition(".")[0]))
    teacher = licence = None
    if survey.teachers["unknown"]:
        teacher = answers.ask("teacher", "the model that wrote the runs, which they do not name", "unknown")
    if not survey.licences:
        licence = answers.ask("license", "licence of the runs", "")
    specs = [
        trajectories.rollout_set_spec(name, survey, teacher, licence),
        trajectories.experiment_spec(name, survey, student),
    ]
    click.echo(announcement(write_specs(specs, force=answers.force), name))
    return 0
