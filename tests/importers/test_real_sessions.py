"""Sessions that unmodified assistants of npm write, read back: each turn, call and result that the model server saw.

`ETPI_HARNESSES` names a folder with a folder for each assistant, installed as docs/any_agent.md says.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from etpi_assets.agent.harness import HarnessLoop
from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.importers import import_runs
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord
from etpi_assets.worlds.repo_fix_tiny import FAMILY
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from tests.support.real_harnesses import CHAT, TASK, fixes, folder_of, section
from tests.support.rows import detect
from tests.support.web_server import Handler, WebServer

pytestmark = [pytest.mark.slow, pytest.mark.long]
SESSIONS = {
    "claude-code": ("claude_code", "/tmp/.claude/projects"),
    "codex": ("codex", "/tmp/.codex/sessions"),
    "qwen-code": ("qwen_code", "/tmp/.qwen/projects"),
}


class KeepsSessions(HarnessLoop):
    """Copies the files that the assistant wrote for itself, before the sandbox is gone."""

    def __init__(self, *arguments: Any, sessions: str, kept: Path) -> None:
        super().__init__(*arguments)
        self.sessions, self.kept = sessions, kept

    def run(self) -> None:
        super().run()
        sandbox = self.agents[0].sandbox
        sandbox.run(f"cp -r {self.sessions} kept")
        for name, text in sandbox.read_files().items():
            if name.startswith("kept/"):
                path = self.kept / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        sandbox.run("rm -r kept")


def spoken(agent: AgentRecord) -> list[tuple[str, int]]:
    return [(turn.content.strip(), len(turn.actions)) for turn in agent.turns]


def only(path: Path) -> RolloutRecord:
    (item,) = import_runs("auto", path)
    assert isinstance(item, RolloutRecord), item
    return item


@pytest.mark.parametrize("name", SESSIONS)
def test_session_of_an_assistant_has_every_turn_call_and_result(name, tmp_path):
    format, sessions = SESSIONS[name]
    job = RolloutJob(TASK, section(name, folder_of(name)), Identity("k", "set", "scripted"))
    runtime = RolloutRuntime(FAMILY, ScriptedEngine(fixes, CHAT, "t"), BubblewrapFactory(), CHAT)
    live = run_rollout(job, runtime, partial(KeepsSessions, sessions=sessions, kept=tmp_path))
    assert live.error is None, live.error
    assert detect(tmp_path) == format
    rollout = only(tmp_path)
    (agent,), main = rollout.agents, live.agents[0]
    contents = [turn.content.partition("<tool_call>")[0].strip() for turn in main.turns]
    assert spoken(agent) == list(zip(contents, [len(turn.actions) for turn in main.turns], strict=True))
    results = [message.content for message in agent.messages if message.role == "tool"]
    assert len(results) == sum(len(turn.actions) for turn in main.turns)
    assert agent.exit_status == "Submitted" and rollout.teacher == "policy"
    assert rollout.sampler and sum(rollout.sampler["usage"].values()) > 0
    assert all(turn.at for turn in agent.turns)


class Gemini(WebServer):
    """Answers each request of the Gemini API: first a call, then words."""

    def __init__(self) -> None:
        super().__init__(self.answer)
        self.seen: list[dict[str, Any]] = []

    def answer(self, handler: Handler) -> None:
        request = handler.body
        self.seen.append(request)
        answered = any("functionResponse" in part for c in request.get("contents", ()) for part in c.get("parts", ()))
        call = {"functionCall": {"name": "list_directory", "args": {"dir_path": "."}}}
        parts = [{"text": "Moored."}] if answered or not request.get("tools") else [{"text": "I look."}, call]
        content = {"role": "model", "parts": parts}
        usage = {"promptTokenCount": 5, "candidatesTokenCount": 2, "totalTokenCount": 7}
        body = {"candidates": [{"content": content, "finishReason": "STOP"}], "usageMetadata": usage}
        if "streamGenerateContent" not in handler.path:
            return handler.reply(200, body)
        handler.reply(200, f"data: {json.dumps(body)}\r\n\r\n".encode(), **{"content-type": "text/event-stream"})


def test_session_of_gemini_cli_has_its_call_and_result(tmp_path):
    program = Path(os.environ.get("ETPI_HARNESSES", "")) / "gemini-cli/node_modules/.bin/gemini"
    if not program.is_file():
        pytest.skip("gemini-cli is not installed")
    (tmp_path / "work").mkdir()
    (tmp_path / "work/pier.py").write_text("boats = []\n")
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": False}}
    (tmp_path / ".gemini").mkdir()
    (tmp_path / ".gemini/settings.json").write_text(json.dumps(settings))
    with Gemini() as server:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "GEMINI_API_KEY": "key",
            "GOOGLE_GEMINI_BASE_URL": server.url,
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
        }
        command = [program, "--yolo", "--model", "gemini-x", "--prompt", "Moor the boat."]
        done = subprocess.run(command, cwd=tmp_path / "work", env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rollout = only(tmp_path / ".gemini/tmp")
    (agent,) = rollout.agents
    assert spoken(agent) == [("I look.", 1), ("Moored.", 0)]
    assert any("pier.py" in message.content for message in agent.messages if message.role == "tool")
    assert (agent.exit_status, rollout.teacher) == ("Submitted", "gemini-x")
    assert rollout.sampler
