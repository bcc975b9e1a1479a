"""The prompt that serving renders for a student at a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from etpi_assets.agent.prompts import render_prompts, steering_text, templates_of
from etpi_assets.curation.steering import FirstPrompt
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs
from etpi_assets.specs.rollout_set import AgentSection, RolloutSetSpec
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Family, Role, Task
from etpi_resources.chat.format import ChatFormat, load_chat_format


class DefaultPrompts:
    """Callable: (task id, agent id) -> the first prompt of a student at a task of a set, None if it is unknown."""

    def __init__(
        self,
        specs: Specs,
        spec: ExperimentSpec,
        rollout_set: RolloutSetSpec,
        tasks: Mapping[str, Task],
        tools: Sequence[Any] | None,
    ) -> None:
        recorded = rollout_set.kind in ("imported", "agent") or rollout_set.suite is None
        self._family = None if recorded else load_family(specs.suites[rollout_set.suite or ""].family)
        self._agent, self._chat = rollout_set.agent, student_format(spec)
        self._tasks, self._tools, self._kwargs = tasks, tools, spec.serving.template_kwargs
        self._prompts: dict[tuple[str, str], FirstPrompt] = {}

    def __call__(self, task_id: str | None, agent_id: str) -> FirstPrompt | None:
        task = self._tasks.get(task_id or "")
        if task is None or self._family is None:
            return None
        key = task.task_id, agent_id
        if key not in self._prompts:
            messages = student_prompt(self._agent, task, role_of(self._family, task, agent_id))
            ids = self._chat.prompt_ids(messages, tools=self._tools, **self._kwargs)
            self._prompts[key] = FirstPrompt(messages, np.asarray(ids, dtype=np.int32))
        return self._prompts[key]

    def steering(self, task_id: str, agent_id: str) -> set[str]:
        """Return the steering that the set's teacher may have had at a task with a prompt."""
        if self._family is None or "steering" not in templates_of(self._agent):
            return set()
        return {steering_text(self._agent, role_of(self._family, self._tasks[task_id], agent_id)).strip()}


def role_of(family: Family, task: Task, agent_id: str) -> Role:
    return next(role for role in family.roles(task) if role.agent_id == agent_id)


def student_prompt(agent: AgentSection, task: Task, role: Role) -> list[dict[str, str]]:
    """Return the first messages without steering, whatever the teacher's prompt has."""
    return render_prompts(agent.model_copy(update={"steering": False}), task, role)


def student_format(spec: ExperimentSpec) -> ChatFormat:
    """Return the chat format in which the student is trained and served."""
    return load_chat_format(spec.base.tokenizer, spec.base.chat_template)
