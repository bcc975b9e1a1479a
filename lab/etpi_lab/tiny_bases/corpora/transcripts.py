"""Conversations of scripted agents: run the agent loop without tokens, in emulated sandboxes.

They equal the messages that a live rollout records, because the loop, prompts and observations are the same.
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
    """Yield `n` conversations ([system, user, assistant, user, ...], ending with an observation), one per agent.

    The result is deterministic in the arguments. Raises RuntimeError with task and error if a rollout fails.
    """
    runtime = RolloutRuntime(family, TextEngine(policy), sandboxes, cast("ChatFormat", UntokenizedChat()))
    identity = Identity(spec_key=f"templated/{seed}", origin="set", engine="scripted", teacher="templated")
    remaining = n
    for task in tasks:
        record = run_rollout(RolloutJob(task, agent, identity), runtime)
        if record.error:
            raise RuntimeError(f"templated rollout of {task.task_id} failed: {record.error}")
        for agent_record in record.agents[:remaining]:
            yield [{"role": message.role, "content": message.content} for message in agent_record.messages]
        remaining -= len(record.agents)
        if remaining <= 0:
            return
