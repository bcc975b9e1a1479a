"""Unmodified harnesses of pip and npm that tests run: where they are installed, and the policy that solves the task.

`ETPI_HARNESSES` names a folder with a folder for each harness, installed as docs/any_agent.md says.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from etpi_assets.agent.actions import next_turn
from etpi_assets.agent.harness import require_installed
from etpi_assets.specs.paths import PathError
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Task
from etpi_assets.worlds.repo_fix_tiny import FAMILY
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import EngineUnavailable, Request

TASK = next(task for task in FAMILY.load("little", 0, {"train": 1, "heldout": 1}) if isinstance(task, Task))
CHAT = load_chat_format("qwen3")
HARNESS = r"""
import json, os, subprocess, sys, urllib.request
base, key = os.environ["BASE"], os.environ["KEY"]
tool = {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}
messages = [{"role": "user", "content": open(sys.argv[1]).read()}]
while True:
    body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": tool}]}
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    request = urllib.request.Request(base + "/chat/completions", json.dumps(body).encode(), headers)
    try:
        message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        if "STUBBORN" in os.environ:
            continue
        sys.exit(3)
    messages.append(message)
    for call in message.get("tool_calls", ()):
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
        if "SUBMIT_FINAL" in done.stdout:
            sys.exit(0)
"""
"""A scripted harness: it asks the policy, runs the commands and ends with the submission."""


def write_harness(folder: Path, text: str = HARNESS) -> None:
    """Write a harness as `harness.py`, and let every user enter its folder, since commands run as another one."""
    folder.mkdir(exist_ok=True)
    (folder / "harness.py").write_text(text)
    for path in (folder, *folder.parents):
        if path.is_relative_to("/tmp") and str(path) != "/tmp":
            path.chmod(0o755)


def folder_of(name: str) -> str:
    """Return the harness's folder as specs write it; skip where it is not installed."""
    folder = f"${{ETPI_HARNESSES}}/{name}"
    try:
        require_installed(section(name, folder).harness)  # pyright: ignore[reportArgumentType]
    except (EngineUnavailable, PathError) as missing:
        pytest.skip(f"{name} is not installed: {missing}")
    return folder


def section(name: str, folder: str, **more) -> AgentSection:
    harness = {"name": name, "folder": folder, "seconds": 400, **more}
    return AgentSection.model_validate({"max_model_len": 60000, "max_tokens": 1000, "harness": harness})


def fixes(request: Request) -> str:
    """Run the reference solution through whatever shell the harness offers."""
    if not request.tools:
        return "A title"
    solution = FAMILY.solve(request.privileged["task"], request.privileged["role"])
    return "Next.\n" + next_turn(request, ["ls -R", *solution])
