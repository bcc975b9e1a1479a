"""The first messages of a conversation, from templates that are data.

Belongs here: one folder of templates a prompt (`AgentSection.prompt`): `system.md`, `user.md` and `steering.md`. Their
variables are `$agent_id` and `$partner`, and in `user.md` `$instruction` and `$repo` too. Does not belong here: task
texts, which the suite family writes, and observations.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from string import Template

from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Role, Task

FOLDER = Path(__file__).parent
STEERING_SEPARATOR = "\n\n"


@cache
def _template(prompt: str, part: str) -> Template:
    path = FOLDER / prompt / f"{part}.md"
    if not path.is_file():
        known = sorted(p.name for p in FOLDER.iterdir() if (p / "system.md").is_file())
        raise FileNotFoundError(f"agent.prompt = {prompt!r}: no template {path}; known prompts: {known}")
    return Template(path.read_text(encoding="utf-8").removesuffix("\n"))


def _seat(role: Role) -> dict[str, str]:
    return {"agent_id": role.agent_id, "partner": role.partner or "nobody"}


def render_prompts(agent: AgentSection, task: Task, role: Role) -> list[dict[str, str]]:
    """The system and user message of `role` at `task`, as chat messages ({"role", "content"}).

    With `agent.steering` the protocol stands at the end of the system message, as `steering_text` gives it; without,
    the messages are the ones a student reads. Raises FileNotFoundError for an unknown `agent.prompt`, KeyError for a
    template that uses an unknown variable.
    """
    variables = _seat(role)
    system = _template(agent.prompt, "system").substitute(variables)
    if agent.steering:
        system += steering_text(agent.prompt, role)
    return [
        {"role": "system", "content": system},
        {
            "role": "user",
            "content": _template(agent.prompt, "user").substitute(
                variables, instruction=role.instruction, repo=task.repo
            ),
        },
    ]


def steering_text(prompt: str, role: Role) -> str:
    """What `agent.steering` adds to the end of the system message of `prompt`, the separating blank line included."""
    return STEERING_SEPARATOR + _template(prompt, "steering").substitute(_seat(role))
