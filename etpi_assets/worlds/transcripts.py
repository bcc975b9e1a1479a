"""Conversations of scripted agents on freshly named tasks, as many as one likes.

Belongs here: driving the agent loop without tokens, in emulated workspaces. Does not belong here: another loop, or
another form of prompts and observations: what is yielded is what a live rollout would record. Nor any world.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Family, Task
from etpi_assets.worlds.text_engine import TextEngine, UntokenizedChat
from etpi_resources.engines.scripted import Policy
from etpi_resources.sandboxes import SandboxFactory

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat


def transcripts(
    tasks: Iterable[Task],
    n: int,
    family: Family,
    policy: Policy,
    sandboxes: SandboxFactory,
    agent: AgentSection,
    seed: int,
) -> Iterator[list[dict[str, str]]]:
    """`n` conversations of one agent each ([system, user, assistant, user, ...], the last message an observation), the
    agents of a rollout one after the other, deterministic in the arguments.

    Raises RuntimeError where a rollout broke, naming its task and the error.
    """
    runtime = RolloutRuntime(family, TextEngine(policy), sandboxes, cast("ChatFormat", UntokenizedChat()))
    identity = Identity(spec_key=f"templated/{seed}", origin="set", engine="scripted", teacher="templated")
    left = n
    for task in tasks:
        record = run_rollout(RolloutJob(task, agent, identity), runtime)
        if record.error:
            raise RuntimeError(f"templated rollout of {task.task_id} broke: {record.error}")
        for one in record.agents[:left]:
            yield [{"role": message.role, "content": message.content} for message in one.messages]
        left -= len(record.agents)
        if left <= 0:
            return
