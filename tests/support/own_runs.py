"""A user's own chat-format runs: a system prompt, a column of tools, structured calls with results, a final answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.rows import write_lines

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "execute_bash",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {"timeout": {"type": "integer"}, "command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]
ANSWER = "Fixed: `total` now adds the last row too."


def recorded_run(number: int, turns: int, answer: bool = True) -> dict[str, Any]:
    """Return one run: a system prompt, structured calls with their results, and a final answer."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You fix bugs."},
        {"role": "user", "content": f"Mend case {number}."},
    ]
    for turn in range(turns):
        arguments = json.dumps({"timeout": 10 + turn, "command": f'grep -n "tot\\n{turn}" a{number}.py | head'})
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "execute_bash", "arguments": arguments}}
        text = "" if turn % 2 else f"Step {turn}."
        messages.append({"role": "assistant", "content": text, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": f"{turn}: total = {number}"})
    if answer:
        messages.append({"role": "assistant", "content": ANSWER})
    return {"instance_id": f"own__repo-{number}", "messages": messages, "tools": TOOLS, "reward": 1.0}


def as_text(run: dict[str, Any]) -> dict[str, Any]:
    """Return the run with its calls as fenced shell commands and their results as messages of the user."""
    messages = []
    for message in run["messages"]:
        role, text = message["role"], message["content"]
        for call in message.get("tool_calls", ()):
            text += f"\n```bash\n{json.loads(call['function']['arguments'])['command']}\n```"
        messages.append({"role": "user" if role == "tool" else role, "content": text})
    return {**{key: value for key, value in run.items() if key != "tools"}, "messages": messages}


def write_runs(folder: Path, runs: list[dict[str, Any]]) -> Path:
    return write_lines(folder / "runs.jsonl", runs)
