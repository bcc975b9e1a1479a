"""The training corpus of the tiny base of `coop_tiny`: conversations of scripted agents, and exercises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from etpi_assets.specs.rollout_set import AgentSection
from etpi_lab.tiny_bases.corpora.transcripts import transcripts as roll_out
from etpi_lab.worlds.coop_tiny.emulated import EmulatedFactory, UnjudgedCoopTiny
from etpi_lab.worlds.coop_tiny.generate import generate_tasks
from etpi_lab.worlds.coop_tiny.policy import BASE_HABITS, CoopTinyPolicy, CoopTinySkill

SUITE = "coop_tiny_base"
"""Suite name for the corpus's tasks, so that they differ from those of a suite with the same seed."""

EDIT = "sed -i"
DILIGENT = CoopTinySkill(plan_first=0.0, follow_through=1.0, verbose_think=0.0, wrong_edit=0.0)


def transcripts(
    seed: int, n: int, skill: CoopTinySkill | Mapping[str, float], agent: AgentSection, split: str = "train"
) -> Iterator[list[dict[str, str]]]:
    """Yield `n` conversations, deterministic in the arguments; see `corpora.transcripts`."""
    skill = skill if isinstance(skill, CoopTinySkill) else CoopTinySkill.of(skill)
    tasks = generate_tasks(SUITE, seed, split)
    return roll_out(tasks, n, UnjudgedCoopTiny(), CoopTinyPolicy(skill, seed), EmulatedFactory(), agent, seed)


def conversations(seed: int, n: int, tokenizer: str) -> Iterator[list[dict[str, str]]]:
    """Yield conversations of agents with BASE_HABITS."""
    return transcripts(seed, n, BASE_HABITS, AgentSection(tokenizer=tokenizer))


def exercises(seed: int, n: int, tokenizer: str) -> Iterator[list[dict[str, str]]]:
    """Yield a task and its correct edit only: a conversation has one edit in seven hundred tokens, too few to train the
    mapping from wordings to edits."""
    for messages in transcripts(seed, n, DILIGENT, AgentSection(tokenizer=tokenizer)):
        edit = next(m for m in messages if m["role"] == "assistant" and EDIT in m["content"])
        yield [*messages[:2], edit]
