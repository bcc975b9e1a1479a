"""The training corpus of the tiny base of `coop_tiny_shared`: conversations of scripted agents, and exercises."""

from __future__ import annotations

from collections.abc import Iterator

from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.worlds.coop_tiny.emulated import EmulatedFactory
from etpi_assets.worlds.coop_tiny_shared.emulated import SharedSandbox, UnjudgedCoopTinyShared
from etpi_assets.worlds.coop_tiny_shared.generate import generate_tasks
from etpi_assets.worlds.coop_tiny_shared.policy import CoopTinySharedPolicy, SharedSkill
from etpi_lab.tiny_bases.corpora.transcripts import transcripts as roll_out

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
