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

FOLDERS = (Path(__file__).parent, Path(__file__).parents[2] / "worlds")
"""Shared prompts, one folder each; then the embedded worlds, each with a folder `prompts`."""
STEERING_SEPARATOR = "\n\n"


def template_path(prompt: str, part: str) -> Path | None:
    """Return the file of one part ("system", "user", "steering") of a prompt; None if the prompt lacks the part."""
    shared, embedded = FOLDERS
    paths = (shared / prompt / f"{part}.md", embedded / prompt / "prompts" / f"{part}.md")
    return next((path for path in paths if path.is_file()), None)


@cache
def _template(prompt: str, part: str) -> Template:
    path = template_path(prompt, part)
    if path is None:
        raise FileNotFoundError(f"agent.prompt = {prompt!r}: it has no template {part}.md; known prompts: {_known()}")
    return Template(path.read_text(encoding="utf-8").removesuffix("\n"))


def _known() -> list[str]:
    shared, embedded = FOLDERS
    paths = [*shared.glob("*/system.md"), *embedded.glob("*/prompts/system.md")]
    return sorted(path.parts[-3 if path.parts[-2] == "prompts" else -2] for path in paths)


def _variables(role: Role) -> dict[str, str]:
    return {"agent_id": role.agent_id, "partner": role.partner or "nobody"}


def render_prompts(agent: AgentSection, task: Task, role: Role) -> list[dict[str, str]]:
    """Return the system and user message of `role` at `task`, as chat messages ({"role", "content"}).

    With `agent.steering`, `steering_text` is appended to the system message; without it, these are the messages that a
    student reads.

    Raises:
        FileNotFoundError: `agent.prompt` is unknown.
        KeyError: a template uses an unknown variable.
    """
    variables = _variables(role)
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
    """Return the text that `agent.steering` appends to the system message of `prompt`, with a blank line before it."""
    return STEERING_SEPARATOR + _template(prompt, "steering").substitute(_variables(role))
