"""A hosted teacher of the embedded world: a policy's words over HTTP as an endpoint with parsers gives them.

Thoughts stand apart (`reasoning_content`), calls are structured, and no answer holds an id. What it knows of a task it
knows from the first messages, as a model would.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from etpi_assets.agent.actions import after_think, format_action
from etpi_assets.agent.prompts import render_prompts
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Task
from etpi_assets.worlds.coop_tiny import CoopTiny
from etpi_assets.worlds.coop_tiny.policy import CoopTinyPolicy, Skill
from etpi_resources.engines import Request, Sampler
from tests.support.loopback import Loopback

FILLER = "See the last result."
"""What the loop answers all calls of a turn with but the last."""


class HostedTeacher(Loopback):
    """Speaks as `CoopTinyPolicy` does at these tasks, steered; opens its work with two calls in one turn."""

    def __init__(self, tasks: Iterable[Task], skill: Skill, port: int = 0) -> None:
        super().__init__(port=port)
        self._policy, self._seats = CoopTinyPolicy(skill), {}
        for task in tasks:
            for role in CoopTiny().roles(task):
                prompt = render_prompts(AgentSection(steering=True), task, role)
                self._seats[tuple(message["content"] for message in prompt)] = task, role
        self.say, self.message, self.change = self._said, self._message, _without_ids

    def _said(self, body: dict[str, Any]) -> str:
        system, user, *talk = body["messages"]
        task, role = self._seats[system["content"], user["content"]]
        # The policy reads a conversation of its own form: observations are the user's.
        told = [{**m, "role": "user"} if m["role"] == "tool" else m for m in talk if m["content"] != FILLER]
        session = f"{task.task_id}/{role.agent_id}"
        privileged = {"task": task, "role": role, "payload": task.payload}
        return self._policy(Request(session, session, (), (system, user, *told), Sampler(), privileged=privileged))

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
        elif called:  # a call that never ends: a parser leaves it in the text
            message["content"] += called + call
        return message


def _without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """As a host that reports none; a turn with calls ends by them."""
    (choice,) = answer["choices"]
    kept = {key: value for key, value in choice.items() if key not in ("token_ids", "logprobs")}
    reason = "tool_calls" if choice["message"].get("tool_calls") else "stop"
    return {
        **{k: v for k, v in answer.items() if k != "prompt_token_ids"},
        "choices": [{**kept, "finish_reason": reason}],
    }
