"""A hosted teacher for `coop_tiny_shared`: a scripted policy behind HTTP, in the form of an endpoint with parsers.

Thoughts are in `reasoning_content`, calls are structured, and answers have no ids. It recognises a task by its first
messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from etpi_assets.agent.actions import after_think, format_action
from etpi_assets.agent.prompts import render_prompts
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Task
from etpi_assets.worlds.coop_tiny_shared import CoopTinyShared
from etpi_assets.worlds.coop_tiny_shared.policy import CoopTinySharedPolicy, SharedSkill
from etpi_resources.engines import Request, Sampler
from tests.support.loopback import Loopback

FILLER = "See the last result."
"""The loop's answer to every call of a turn except the last."""


class HostedTeacher(Loopback):
    """Answers as the steered `CoopTinySharedPolicy` does for these tasks, with two calls in its first turn."""

    def __init__(self, tasks: Iterable[Task], skill: SharedSkill, port: int = 0, steering: bool = True) -> None:
        super().__init__(port=port)
        self.owned_by = "example"
        self._policy, self._roles = CoopTinySharedPolicy(skill), {}
        for task in tasks:
            for role in CoopTinyShared().roles(task):
                prompt = render_prompts(AgentSection(steering=steering), task, role)
                self._roles[tuple(message["content"] for message in prompt)] = task, role
        self.say, self.message, self.change = self._text, self._message, _without_ids

    def _text(self, body: dict[str, Any]) -> str:
        system, user, *rest = body["messages"]
        task, role = self._roles[system["content"], user["content"]]
        # The policy expects observations in the user's role.
        messages = [{**m, "role": "user"} if m["role"] == "tool" else m for m in rest if m["content"] != FILLER]
        session = f"{task.task_id}/{role.agent_id}"
        privileged = {"task": task, "role": role, "payload": task.payload}
        return self._policy(Request(session, session, (), (system, user, *messages), Sampler(), privileged=privileged))

    def _message(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        thought, closed, _ = text.partition("</think>")
        content, called, call = after_think(text).strip("\n").partition("<tool_call>")
        message: dict[str, Any] = {"content": content.rstrip("\n")}
        if closed:
            message["reasoning_content"] = thought.removeprefix("<think>").strip()
        command = call.partition("<parameter=command>\n")[2].partition("\n</parameter>\n</function>")[0]
        if called and call.endswith("</tool_call>"):
            commands = ["ls", command] if command.startswith("cat ") else [command]
            calls = [call for command in commands for call in format_action(command, "tool_calls")]
            message["tool_calls"] = [{"id": f"call_{i}", **call} for i, call in enumerate(calls)]  # type: ignore[dict-item]
        elif called:  # a parser leaves an unfinished call in the text
            message["content"] += called + call
        return message


def _without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """Remove ids from an answer, and set the finish reason of turns with calls."""
    (choice,) = answer["choices"]
    choice = {key: value for key, value in choice.items() if key not in ("token_ids", "logprobs")}
    choice["finish_reason"] = "tool_calls" if choice["message"].get("tool_calls") else "stop"
    return {**{k: v for k, v in answer.items() if k != "prompt_token_ids"}, "choices": [choice]}
