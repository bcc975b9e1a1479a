"""Conversations of scripted agents on freshly named tasks of the embedded world, as many as one likes.

Belongs here: driving the agent loop without tokens, in emulated workspaces. Does not belong here: another loop, or
another form of prompts and observations: what is yielded is what a live rollout would record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from etpi_assets.rollouts.agent import Identity, run_rollout
from etpi_assets.rollouts.policies.coop_tiny import CoopTinyPolicy, Skill
from etpi_assets.rollouts.templated.emulated import EmulatedFactory
from etpi_assets.rollouts.templated.words import NoTokens, Words
from etpi_assets.specs.models import AgentSection
from etpi_assets.tasks.coop_tiny import CoopTiny
from etpi_assets.tasks.coop_tiny.generate import draw_tasks
from etpi_assets.tasks.family import Task, Verdict
from etpi_resources.sandboxes import SandboxFactory

if TYPE_CHECKING:
    from etpi_resources.chat_format import ChatFormat

SUITE = "coop_tiny_base"
"""Tasks are drawn under this name, so that they are others than those of a suite of the same seed."""


def transcripts(
    seed: int, n: int, skill: Skill | Mapping[str, float], agent: AgentSection, split: str = "train"
) -> Iterator[list[dict[str, str]]]:
    """`n` conversations of one agent each ([system, user, assistant, user, ...], the last message an observation), both
    agents of a rollout one after the other, deterministic in the arguments.

    Raises RuntimeError where a rollout broke, naming its task and the error.
    """
    skill = skill if isinstance(skill, Skill) else Skill.of(skill)
    engine, family, chat = Words(CoopTinyPolicy(skill, seed)), Unjudged(), cast("ChatFormat", NoTokens())
    identity = Identity(spec_key=f"templated/{seed}", origin="set", engine="scripted", teacher="templated")
    left = n
    for task in draw_tasks(SUITE, seed, split):
        record = run_rollout(task, family, engine, EmulatedFactory(), agent, chat, identity=identity)
        if record.error:
            raise RuntimeError(f"templated rollout of {task.task_id} broke: {record.error}")
        for one in record.agents[:left]:
            yield [{"role": message.role, "content": message.content} for message in one.messages]
        left -= len(record.agents)
        if left <= 0:
            return


class Unjudged(CoopTiny):
    """The family without its verdicts: conversations are wanted, not rewards."""

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        return Verdict(0.0, "unknown", {})
