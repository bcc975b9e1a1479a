"""The `[harness]` section: a foreign agent harness that acts instead of etpi's own agent loop (docs/any_agent.md)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from etpi_assets.specs.section import Section

if TYPE_CHECKING:
    from etpi_assets.specs.rollout_set import AgentSection, RolloutSetSpec

PRESETS: Mapping[str, Mapping[str, Any]] = tomllib.loads(Path(__file__).with_name("harnesses.toml").read_text("utf-8"))
"""Name of a harness -> the values of the keys of its section that a spec does not give."""


class HarnessSection(Section):
    """A foreign agent harness, run unmodified in the task's sandbox; every call it makes to its model is recorded.

    `{folder}`, `{base_url}`, `{key}` and `{task_file}` are replaced in `command`, `env` and `files`."""

    name: Literal["mini-swe-agent", "codex", "claude-code", "opencode", "qwen-code", "pi", "custom"]
    """The harness. All but `custom` are presets: they give the keys that the spec does not."""
    version: str
    """The version that has to be installed in `folder`."""
    folder: str = Field(examples=["${ETPI_HARNESSES}/codex"])
    """The folder in which the harness is installed; sandboxes see it, read-only, under the same path. `${VARIABLE}` is
    replaced from the environment."""
    package: str = ""
    """The package whose version is checked: `npm:NAME` below `folder`, or `pip:NAME` in the virtual environment
    `folder`/venv; empty: none."""
    command: str
    """The bash command that runs it in the workspace until the task is done. Never write `{key}` in it: other users of
    the machine see the arguments of processes."""
    env: dict[str, str] = Field(default_factory=dict)
    """Its environment variables."""
    files: dict[str, str] = Field(default_factory=dict)
    """Files that are written before it starts, by absolute path in the sandbox."""
    max_calls: int = Field(default=40, ge=1)
    """Most calls of the model in an attempt; the next one ends the attempt, which is graded."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Most output tokens of all calls together; "none": no limit."""
    seconds: float = Field(default=900.0, gt=0)
    """Most seconds of an attempt."""
    helpers: Literal["record", "train", "all"] = "record"
    """Calls of helpers and summaries: `record` keeps their messages, `train` makes turns of them."""
    memory_gib: float = Field(default=2, gt=0)
    """Memory of all processes of the harness and its commands together."""
    address_gib: float = Field(default=64, gt=0)
    """Addresses that each process may reserve, which runtimes such as Node do far beyond the memory they use."""
    later_system: bool = False
    """True: it sends system messages within a conversation, which the student's template then has to take."""

    @model_validator(mode="before")
    @classmethod
    def _preset_gives_the_rest(cls, values: Any) -> Any:
        return {**PRESETS.get(values.get("name", ""), {}), **values} if isinstance(values, dict) else values

    def faults(self) -> Iterator[str]:
        if "{key}" in self.command:
            yield "harness.command contains {key}, and other users see it; use harness.env or harness.files"

    def filled(self, text: str, values: Mapping[str, str]) -> str:
        """Return a text with the values of its placeholders."""
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        return text


def with_harness(values: Any) -> Any:
    """Return the keys of a set or an evaluation in which `[agent]` carries the `[harness]` beside it."""
    if not isinstance(values, dict) or not values.get("harness") or values["harness"] == "none":
        return values
    agent = values.get("agent") or {}
    agent = agent if isinstance(agent, dict) else agent.model_dump()
    return {**values, "agent": {**agent, "harness": values["harness"]}}


def harness_difference(
    evaluated: AgentSection, rollout_sets: Iterable[RolloutSetSpec], reinforced: AgentSection | None = None
) -> str:
    """Return how the harness of an evaluation differs from that of reinforcement, or without it from those of the
    rollouts; "" if it does not. Imported runs are left out, because their harness is unknown."""
    trained = {_shown(each.agent) for each in rollout_sets if each.kind != "imported"}
    trained = {_shown(reinforced)} if reinforced else trained
    if not trained - {_shown(evaluated)}:
        return ""
    return (
        f"is evaluated in {_shown(evaluated)} and trained on rollouts of {', '.join(sorted(trained))}: set "
        "[evaluate.harness] to the same name and version"
    )


def _shown(agent: AgentSection) -> str:
    return f"{agent.harness.name} {agent.harness.version}" if agent.harness else "etpi's own loop"
