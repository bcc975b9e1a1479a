"""The experiment that `etpi init` writes for a rollout set: from selection to the data set, nothing trained yet."""

from __future__ import annotations

from dataclasses import dataclass

from etpi.init.student import Student
from etpi.init.write import NewSpec, quoted
from etpi_assets.specs.presets import preset_values

DEFAULT_LENGTH = 32768
"""`dataset.max_length` where neither the student's context nor longer runs say otherwise."""


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

    @property
    def max_length(self) -> int:
        """Return `dataset.max_length`: the model's context, else a power of two above the longest conversation."""
        return self.student.context or max(DEFAULT_LENGTH, 1 << self.longest.bit_length())

    @property
    def reinforces_tiny(self) -> bool:
        """Return whether the tiny base is reinforced: the one that works alone, with its own prompt and settings."""
        return bool(self.rl_sandbox) and self.student.base["kind"] == "tiny"

    def spec(self) -> NewSpec:
        parts = [
            self._head(),
            "[base]   # the student\n"
            + "".join(f"{key} = {quoted(value)}\n" for key, value in self.student.base.items()),
            _BASE_TINY if self.reinforces_tiny else "",
            "" if self.preset else self._select(),
            self._data(),
            _SWITCH if self.student.thinking_switch and strips_think(self.preset) else "",
            self._train(),
            self._rl(),
            "" if self.preset else _GATES.format(format_exposure=int(self.calls)),
        ]
        return NewSpec("experiment", self.name, "\n".join(filter(None, parts)))

    def baseline(self) -> NewSpec:
        """Return the file of the experiment that evaluates the untrained student."""
        text = _BASELINE.format(experiment=quoted(self.name), title=quoted(f"The untrained student on {self.suite}"))
        return NewSpec("experiment", f"{self.name}_baseline", text)

    def _head(self) -> str:
        preset = (
            f"preset = {quoted(self.preset)}   # docs/own_data.md; values below override it\n" if self.preset else ""
        )
        return f"""\
# Written by `etpi init`. All keys: docs/reference/specs.md; the words: docs/concepts.md
title = {quoted(f"A student of {self.name}")}
{preset}rollout_sets = [{quoted(self.name)}]
{"" if self.rl_sandbox else f'evaluate = "none"   # {self._evaluation()}'}
"""

    def _train(self) -> str:
        if not self.trains:
            return '[train]\nmethod = "none"   # "lora" or "full" trains the student; "none" ends with the data set\n'
        return _TRAIN_TINY if self.student.base["kind"] == "tiny" else _TRAIN

    def _rl(self) -> str:
        if not self.rl_sandbox:
            return ""
        names = {"name": self.name, "suite": quoted(self.suite), "sandbox": quoted(self.rl_sandbox)}
        if self.reinforces_tiny:
            return _RL.format(**names, settings=_RL_SETTINGS_TINY, agent=_RL_AGENT_TINY)
        return _RL.format(**names, settings=_RL_SETTINGS, agent=_RL_AGENT)

    def _evaluation(self) -> str:
        if not self.suite:
            return "held-out rollouts need a suite of tasks"
        return f"a trained student is evaluated with a section instead: [evaluate] suite = {quoted(self.suite)}"

    def _select(self) -> str:
        return f"""\
[select]
{self.min_reward}
require = []
shortest_correct = false   # true: only the shortest solved rollout of each task
"""

    def _data(self) -> str:
        return f"""\
[pairs]
capture = "{"native" if self.native else "retokenised"}"   # native: recorded token ids; retokenised: from the messages

[dataset]
max_length = {self.max_length}   # tokens of a prompt and its turn; a longer turn is dropped, never cut
val_fraction = {0.1 if self.repositories > 2 else 0.0}   # share of the repositories kept for validation
"""


def strips_think(preset: str | None) -> bool:
    """Return whether think blocks are removed from the outputs that are trained on."""
    values = preset_values(preset) if preset else {}
    return values.get("pairs", {}).get("strip_think", True)


_SWITCH = """\
[serving.template_kwargs]
enable_thinking = false   # think blocks are not trained on; in training and in serving alike
"""
_TRAIN = """\
[train]
method = "lora"   # "full" trains all weights; "none" ends with the data set
epochs = 3.0   # more where `serving_probe` says that it trained too little
learning_rate = 2e-4
batch_tokens = 2048   # of a step; more take more memory and make fewer steps
"""
_TRAIN_TINY = """\
[train]
method = "full"   # "none" ends with the data set
epochs = 8.0   # more where `serving_probe` says that it trained too little
learning_rate = 2e-3
batch_tokens = 2048
"""
_BASE_TINY = """\
[base.tiny]
world = "repo_fix_tiny"   # the tiny base that works alone; it solves what docs/own_tasks.md shows
conversations = 1300
exercises = 3000
"""
_RL = """\
[rl]
method = "grpo"   # teaches nothing where tasks are never or always solved: run {name}_baseline first
suite = {suite}
sandbox = {sandbox}
rewards = [{{ function = "outcome" }}]   # the judge's verdict; docs/rl.md lists others
{settings}
[rl.agent]
{agent}
[evaluate]
suite = {suite}
roles = ["base", "rl"]   # before and after
sample_seeds = [0, 1, 2, 3]   # at temperature 1: held-out tasks of one's own are few

[evaluate.agent]
{agent}
[serving]
sandbox = {sandbox}
"""
_RL_SETTINGS = """\
steps = 100
max_response_tokens = 8192
"""
_RL_AGENT = """\
prompt = "solo"
max_steps = 30
"""
_RL_SETTINGS_TINY = """\
steps = 8
group_size = 8
device_batch = 32   # four tasks a step
accumulate = 1
learning_rate = 3e-5
schedule = "constant"
beta = 0.0
max_response_tokens = 1400
"""
TINY_PROMPT = "repo_fix_tiny"
"""The prompt that the tiny base of the same name was trained with."""
_RL_AGENT_TINY = f"""\
prompt = "{TINY_PROMPT}"
max_steps = 4
max_tokens = 400
"""
_BASELINE = """\
# Written by `etpi init --rl`: how often the untrained student solves the tasks that reinforcement trains on.
extends = {experiment}
title = {title}
rl.method = "none"
train.method = "none"

[evaluate]
split = "train"
roles = ["base"]
decodings = [{{ name = "t1", temperature = 1.0 }}]
sample_seeds = [0, 1, 2, 3]
"""
_GATES = """\
[gates]   # floors of the checks before training that recorded runs in general can be held to
teacher = {{}}
first_turn_loss_share = 0.0
format_exposure = {format_exposure}   # tool calls
role_balance = 0.0
plan_paths_in_task = 0.0
"""
