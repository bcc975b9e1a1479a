"""Conversations of scripted agents of `coop_tiny`, and what its tiny base grows up on.

Belongs here: the tasks, habits and exercises of that world. Does not belong here: driving the loop (`transcripts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Task, Verdict
from etpi_assets.worlds.coop_tiny import CoopTiny
from etpi_assets.worlds.coop_tiny.generate import generate_tasks
from etpi_assets.worlds.coop_tiny.policy import BASE_HABITS, CoopTinyPolicy, CoopTinySkill
from etpi_assets.worlds.emulated import EmulatedFactory
from etpi_assets.worlds.transcripts import transcripts as roll_out
from etpi_resources.sandboxes import SandboxFactory

SUITE = "coop_tiny_base"
"""Tasks are drawn under this name, so that they are others than those of a suite of the same seed."""

EDIT = "sed -i"
DILIGENT = CoopTinySkill(plan_first=0.0, follow_through=1.0, verbose_think=0.0, wrong_edit=0.0)


def transcripts(
    seed: int, n: int, skill: CoopTinySkill | Mapping[str, float], agent: AgentSection, split: str = "train"
) -> Iterator[list[dict[str, str]]]:
    """`n` conversations, deterministic in the arguments; see `templated.transcripts`."""
    skill = skill if isinstance(skill, CoopTinySkill) else CoopTinySkill.of(skill)
    tasks = generate_tasks(SUITE, seed, split)
    return roll_out(tasks, n, UnjudgedCoopTiny(), CoopTinyPolicy(skill, seed), EmulatedFactory(), agent, seed)


def conversations(seed: int, n: int, tokenizer: str) -> Iterator[list[dict[str, str]]]:
    """Of agents with the base's habits."""
    return transcripts(seed, n, BASE_HABITS, AgentSection(tokenizer=tokenizer))


def exercises(seed: int, n: int, tokenizer: str) -> Iterator[list[dict[str, str]]]:
    """A task and its right edit, nothing between: a conversation holds one edit in seven hundred tokens, too few to
    learn what each wording asks for."""
    for messages in transcripts(seed, n, DILIGENT, AgentSection(tokenizer=tokenizer)):
        edit = next(m for m in messages if m["role"] == "assistant" and EDIT in m["content"])
        yield [*messages[:2], edit]


class UnjudgedCoopTiny(CoopTiny):
    """The family without its verdicts: conversations are wanted, not rewards."""

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        return Verdict(0.0, "unknown", {})
