"""The training corpus of the tiny base of `coop_tiny_shared`: conversations of scripted agents, and exercises."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Task, Verdict
from etpi_assets.worlds.coop_tiny_shared import CoopTinyShared
from etpi_assets.worlds.coop_tiny_shared.generate import generate_tasks
from etpi_assets.worlds.coop_tiny_shared.policy import CoopTinySharedPolicy, SharedSkill
from etpi_lab.tiny_bases.corpora.transcripts import transcripts as roll_out
from etpi_lab.worlds.coop_tiny.emulated import EmulatedFactory, EmulatedSandbox
from etpi_resources.sandboxes import SandboxFactory

SUITE = "coop_tiny_shared_base"
"""Suite name for the corpus's tasks, so that they differ from those of a suite with the same seed."""

BASE_HABITS = SharedSkill(
    plan_first=0.03,
    follow_through=1.0,
    verbose_think=0.5,
    wrong_edit=0.02,
    look_around=0.3,
    reword=1.0,
    report=0.3,
    markdown=0.1,
    malformed=0.02,
)
"""Habits in the base model's corpus: a competent agent that starts with bash, thinks aloud, and rarely plans."""

DILIGENT = SharedSkill(
    plan_first=0.0, follow_through=1.0, verbose_think=0.0, wrong_edit=0.0, look_around=0.0, report=0.0
)


def transcripts(
    seed: int, n: int, skill: SharedSkill, agent: AgentSection, split: str = "train"
) -> Iterator[list[dict[str, str]]]:
    """Yield `n` conversations, deterministic in the arguments; see `corpora.transcripts`."""
    tasks = generate_tasks(SUITE, seed, split)
    policy, sandboxes = CoopTinySharedPolicy(skill, seed), EmulatedFactory(SharedSandbox)
    return roll_out(tasks, n, UnjudgedCoopTinyShared(), policy, sandboxes, agent, seed)


def conversations(seed: int, n: int, tokenizer: str) -> Iterator[list[dict[str, str]]]:
    """Yield conversations of agents with BASE_HABITS."""
    return transcripts(seed, n, BASE_HABITS, AgentSection(tokenizer=tokenizer))


def exercises(seed: int, n: int, tokenizer: str) -> Iterator[list[dict[str, str]]]:
    """Yield a task and the work of an agent alone, without thoughts: most of a conversation is other text."""
    return transcripts(seed, n, DILIGENT, AgentSection(tokenizer=tokenizer))


_APPEND = re.compile(r"echo '([^']*)' >> (\w+\.py)|cat >> (\w+\.py) <<'EOF'\n(.*\n)EOF", re.DOTALL)


class SharedSandbox(EmulatedSandbox):
    """An emulated sandbox that also runs this world's commands, which append lines to a file."""

    def _answer(self, command: str) -> tuple[str, int]:
        if match := _APPEND.fullmatch(command):
            path, text = (match[2], f"{match[1]}\n") if match[2] else (match[3], match[4])
            self._files[path] = self._files.get(path, "") + text
            return "", 0
        return super()._answer(command)


class UnjudgedCoopTinyShared(CoopTinyShared):
    """The family without its judge, for conversations that need no reward."""

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        return Verdict(0.0, "unknown", {})
