"""The experiment that `etpi init` writes for a rollout set: from selection to the data set, nothing trained yet."""

from __future__ import annotations

from dataclasses import dataclass

from etpi.init.student import Student
from etpi.init.write import NewSpec, rendered
from etpi_assets.specs.experiment import preset_values

DEFAULT_LENGTH = 32768
"""`dataset.max_length` where neither the student's context nor longer runs say otherwise."""
TINY_PROMPT = "repo_fix_tiny"
"""The prompt that the tiny base of the same name was trained with."""


@dataclass(frozen=True)
class NewExperiment:
    """The answers from which `etpi init` writes an experiment.

    Attributes:
        native: whether every turn has recorded ids of the student's tokenizer.
        min_reward: the TOML line of `select.min_reward`.
        longest: tokens of the longest recorded conversation.
        repositories: number of repositories in the data; 0: unknown.
        calls: whether turns have tool calls; commands in fences are none to `format_exposure`.
        preset: name of a preset, whose values replace those of recorded runs in general.
        suite: a suite with held-out tasks; empty if there is none.
        trains: whether the student is fine-tuned on the runs.
        rl_sandbox: the kind of sandbox in which it is reinforced on the suite's tasks, and evaluated on those held out;
            empty: neither.
        harness: name of the harness in which it is reinforced and evaluated; empty: etpi's own agent loop.
    """

    name: str
    student: Student
    native: bool
    min_reward: str
    longest: int = 0
    repositories: int = 0
    calls: bool = True
    preset: str | None = None
    suite: str = ""
    trains: bool = False
    rl_sandbox: str = ""
    harness: str = ""

    @property
    def harness_folder(self) -> str:
        """Return the folder that the harness is installed in, as docs/any_agent.md says."""
        return f"${{ETPI_HARNESSES}}/{self.harness}"

    @property
    def call_tokens(self) -> int:
        """Return most ids of a harness's call, prompt and output together."""
        return 8192 if self.reinforces_tiny else min(self.student.context or DEFAULT_LENGTH, DEFAULT_LENGTH)

    @property
    def max_length(self) -> int:
        """Return `dataset.max_length`: the model's context, else a power of two above the longest conversation."""
        return self.student.context or max(DEFAULT_LENGTH, 1 << self.longest.bit_length())

    @property
    def reinforces_tiny(self) -> bool:
        """Return whether the tiny base is reinforced: the one that works alone, with its own prompt and settings."""
        return bool(self.rl_sandbox) and self.student.names["kind"] == "tiny"

    @property
    def switches_thinking_off(self) -> bool:
        """Return whether its template gets `enable_thinking = false`, because no think block is trained on."""
        return self.student.thinking_switch and strips_think(self.preset)

    def spec(self) -> NewSpec:
        return NewSpec("experiment", self.name, rendered("experiment", e=self, tiny_prompt=TINY_PROMPT))

    def baseline(self) -> NewSpec:
        """Return the file of the experiment that evaluates the untrained student."""
        return NewSpec("experiment", f"{self.name}_baseline", rendered("baseline", e=self))


def strips_think(preset: str | None) -> bool:
    """Return whether think blocks are removed from the outputs that are trained on."""
    values = preset_values(preset) if preset else {}
    return values.get("pairs", {}).get("strip_think", True)
