"""The capturing proxy in front of a scripted policy that calls a tool twice, and the client of a harness."""

from __future__ import annotations

import httpx

from etpi_assets.agent.actions import read_actions
from etpi_assets.trajectories.assemble import assemble
from etpi_assets.trajectories.records import AgentRecord
from etpi_resources.capture.server import Attempt, Budget, CaptureServer
from etpi_resources.capture.store import CallLog, read_log
from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.tool_forms import Call
from etpi_resources.engines import Sampler

CHAT = load_chat_format("qwen3")
KEY = "sk-attempt-4711"
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL = {"name": "bash", "description": "run", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": TOOL}]
TASK = "The sum is wrong. Fix calc.py."


def lists(request) -> str:
    """Think, say a word and call the tool; after two calls, answer in words."""
    turn = sum(message["role"] == "assistant" for message in request.messages)
    if not request.tools:
        return "Fix a sum"
    if turn >= 2:
        return "<think>\nenough\n</think>\n\nThe sum is right now."
    call = CHAT.tool_form.render([Call("bash", {"command": f"ls {turn}"})])
    return f"<think>\nstep {turn}\n</think>\n\nI look.\n{call}"


class World:
    """A proxy with attempts in front of an engine."""

    def __init__(self, folder, engine, **budget) -> None:
        self.folder, self.engine = folder, engine
        self.attempts: dict[str, Attempt] = {}
        self.budget = Budget(**{"max_model_len": 8000, **budget})
        self.open("a")

    def open(self, name: str, key: str = KEY) -> Attempt:
        log = CallLog(self.folder / f"{name}.jsonl")
        sampler = Sampler(1.0, 1.0, 500, 3)
        self.attempts[name] = Attempt(name, key, self.engine, CHAT, log, sampler, self.budget, session=name)
        return self.attempts[name]

    def __enter__(self):
        self.server = CaptureServer(self.attempts.get).__enter__()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.server.port}", trust_env=False, timeout=20)
        return self

    def __exit__(self, *exc) -> None:
        self.client.close()
        self.server.__exit__()

    def post(self, path: str, body, name="a", key=KEY) -> httpx.Response:
        return self.client.post(f"/a/{name}/v1/{path}", json=body, headers={"authorization": f"Bearer {key}"})

    def chat(self, messages, tools=TOOLS, **more):
        body = {"model": "policy", "messages": messages, "tools": tools, **more}
        answer = self.post("chat/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    def rows(self, name="a"):
        about, *rows = read_log(self.folder / f"{name}.jsonl")
        assert about["vocabulary"] == CHAT.vocabulary_hash
        return rows

    def calls(self):
        return [row for row in self.rows() if "output_ids" in row]

    def assembled(self, task=TASK, **more):
        main = AgentRecord("agent1", "f", "main", "Submitted")
        return assemble(self.rows(), task, lambda text, calls: read_actions(text, calls), main=main, **more)


def begin(text=TASK):
    return [{"role": "system", "content": "You fix."}, {"role": "user", "content": text}]
