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
    """What the command line says; None: ask for it on a terminal."""

    model: str | None
    name: str | None
    yes: bool = False
    force: bool = False

    def asked_model(self) -> str:
        """Return the student's name. Raises UsageError where it is not given and nobody can be asked."""
        if self.model:
            return self.model
        if self.yes or not sys.stdin.isatty():
            raise click.UsageError("--model is missing: a folder, REPO@COMMIT of the hub, or tiny")
        return click.prompt("Student: a folder, or REPO@COMMIT of the hub")

    def asked_name(self, default: str) -> str:
        """Return the name of the new specs."""
        if self.name or self.yes or not sys.stdin.isatty():
            return self.name or default
        return click.prompt("Name of the new specs", default=default)


def from_trajectories(source: str, format: str, answers: Answers) -> int:
    """Write a rollout set and an experiment for recorded runs.

    Returns:
        1 if none of the inputs can be read; nothing is written then.

    Raises:
        SpecError: a bad path, format, model or name, or files that exist.
    """
    student = read_student(answers.asked_model())
    seen = trajectories.survey(source, format, student)
    click.echo(trajectories.summary(seen, student))
    if not seen.rollouts:
        raise SpecError(f"none of the {seen.looked} inputs looked at can be read; nothing was written")
    name = answers.asked_name(spec_name(Path(source).name.partition(".")[0]))
    specs = [trajectories.rollout_set_spec(name, seen), trajectories.experiment_spec(name, seen, student)]
    files = write_specs(specs, force=answers.force)
    click.echo(announcement(files, name))
    return 0
