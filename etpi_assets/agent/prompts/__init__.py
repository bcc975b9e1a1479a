"""The first messages of a conversation, from templates that are data (`etpi_assets.specs.prompts`).

Does not belong here: task texts, which the suite family writes, and observations.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Template

from etpi_assets.specs.prompts import shipped_templates
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Role, Task

STEERING_SEPARATOR = "\n\n"


def templates_of(agent: AgentSection) -> Mapping[str, str]:
    """Return the templates of the agent's prompt by part: its own, or those of the shipped prompt that it names.

    Raises:
        FileNotFoundError: there is no such prompt.
    """
    return shipped_templates(agent.prompt) if agent.templates is None else agent.templates


def render_prompts(agent: AgentSection, task: Task, role: Role) -> list[dict[str, str]]:
    """Return the system and user message of `role` at `task`, as chat messages ({"role", "content"}).

    With `agent.steering`, `steering_text` is appended to the system message; without it, these are the messages that a
    student reads. A prompt without the part `system` has no system message.

    Raises:
        FileNotFoundError: `agent.prompt` is unknown, or has no part `steering` for `agent.steering`.
    """
    templates, variables = templates_of(agent), _variables(role)
    system = [Template(templates["system"]).substitute(variables)] if "system" in templates else []
    if agent.steering:
        steering = steering_text(agent, role)
        system = [system[0] + steering] if system else [steering.removeprefix(STEERING_SEPARATOR)]
    user = Template(templates["user"]).substitute(variables, instruction=role.instruction, repo=task.repo)
    return [*({"role": "system", "content": text} for text in system), {"role": "user", "content": user}]


def steering_text(agent: AgentSection, role: Role) -> str:
    """Return the text that `agent.steering` appends to the system message, with a blank line before it.

    Raises:
        FileNotFoundError: the prompt has no part `steering`.
    """
    if "steering" not in (templates := templates_of(agent)):
        raise FileNotFoundError(f"agent.steering: the prompt {agent.prompt!r} has no steering.md")
    return STEERING_SEPARATOR + Template(templates["steering"]).substitute(_variables(role))


def _variables(role: Role) -> dict[str, str]:
    return {"agent_id": role.agent_id, "partner": role.partner or "nobody"}
