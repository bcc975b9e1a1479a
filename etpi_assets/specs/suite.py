"""The spec of a suite: a family of tasks and its parameters."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from etpi_assets.specs.section import Section


class SuiteSpec(Section):
    """A set of tasks that one family makes or reads."""

    title: str
    """One line for people, shown in the catalog."""
    family: str
    """The family of the tasks: a module of `etpi_assets.tasks` or `etpi_assets.worlds`."""
    seed: int = 0
    """Seed of the family's random choices: generated tasks, or rows sampled from a larger set."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The family's own parameters; its module documents them. `path` is where a family reads its tasks from."""
    proof: Literal["all", "ahead"] = "all"
    """all: every task is proved before the first rollout. ahead: only tasks that are used, while rollouts of proved
    ones run; a judge's raised number then outdates neither tasks nor rollouts."""
    notes: str = ""
    """Free text for people: where the tasks come from, what to set before a run."""
