"""Schemas of the tools that a prompt may offer, in the form of chat templates and chat endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def _function(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


INTERPRETER = "code_interpreter"
PUBLISHED_INTERPRETER = "code_interpreter_published"
"""Offered under the same name: the interpreter of verl's agents (`interpreter.published_command`)."""

TOOLS: dict[str, dict[str, Any]] = {
    "bash": _function("bash", "Run a command in the repository.", command="The command, one line or a script."),
    "send_message": _function(
        "send_message", "Send a message to another agent.", to="The agent's name.", message="What to tell it."
    ),
    INTERPRETER: _function(
        INTERPRETER,
        "Run Python code. What a call defines is there in the next; print what you want to see.",
        code="The code.",
    ),
    # The words are those of the published tool, since they are part of every prompt that its data were made with.
    PUBLISHED_INTERPRETER: _function(INTERPRETER, "A tool for executing code.", code="The code to execute."),
}


def tool_schemas(names: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return the schemas of the named tools; None for no tools, because templates treat an empty list differently."""
    return [TOOLS[name] for name in names] or None
