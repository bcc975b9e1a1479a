"""A server on the loopback that speaks the protocols of vLLM and of OpenAI and answers with reference solutions.

Agents that may send messages first send their plan. A turn depends on its prompt alone: the task is recognised by its
text, the step by the number of the assistant's turns before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from typing import Any

from etpi.rehearsal.json_handler import JsonHandler
from etpi_assets.agent.actions import format_action
from etpi_assets.agent.loop import SUBMIT
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.tasks.family import Family, Role, Task
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.grammars import CLOSING, OPENING

_LOGPROB = -0.5


@dataclass(frozen=True)
class _Conversation:
    """The lines of one agent: the text by which its prompt is recognised, and its commands in order."""

    instruction: str
    commands: Sequence[str]


class TeacherServer(AbstractContextManager["TeacherServer"]):
    """Serves one rollout set's teacher.

    Args:
        spec: the rollout set; `engine.model` is the served name.
        chat: the chat format that counts the tokens.
        port: of the loopback; the rollout set names it. 0: a free one.
    """

    def __init__(
        self, spec: RolloutSetSpec, family: Family, tasks: Iterable[Task], chat: ChatFormat, port: int
    ) -> None:
        assert spec.engine is not None
        self.model, self.chat = str(spec.engine.model), chat
        self.structured = spec.engine.kind == "openai" and bool(spec.agent.tools)
        self.grammar = None if spec.agent.grammar is None else spec.agent.grammar.grammar()
        self._conversations = [
            _Conversation(role.instruction.strip(), _commands(family, task, role))
            for task in tasks
            for role in family.roles(task)
        ]
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._server.teacher = self  # pyright: ignore[reportAttributeAccessIssue]

    def __enter__(self) -> TeacherServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self.close()

    def close(self) -> None:
        """Free the port of a server that does not run."""
        self._server.server_close()

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request for a completion. Raises LookupError: no task has the prompt."""
        prompt = self._prompt(body)
        if "prompt_logprobs" in body:  # the comparison of weights
            entries = [{str(token): {"logprob": _LOGPROB}} for token in prompt[1:]]
            return {"choices": [{"prompt_logprobs": [None, *entries]}]}
        command = self._command(body, prompt)
        if self.structured:
            calls = [{"id": "call_0", **call} for call in format_action(command, "tool_calls")]  # type: ignore[dict-item]
            message = {"role": "assistant", "content": "", "tool_calls": calls}
            return self._reply({"index": 0, "finish_reason": "tool_calls", "message": message})
        text = self._text(command, opened=self.chat.decode(prompt[-4:]).rstrip().endswith("<think>"))
        output = self.chat.ended(self.chat.encode(text))
        choice: dict[str, Any] = {"index": 0, "token_ids": output, "finish_reason": "stop"}
        if path == "/v1/completions":
            logprobs: dict[str, Any] = {"token_logprobs": [_LOGPROB] * len(output)}
            return self._reply({**choice, "text": text, "prompt_token_ids": prompt, "logprobs": logprobs})
        entry = {"token": "", "logprob": _LOGPROB, "bytes": None, "top_logprobs": []}
        choice |= {"message": {"role": "assistant", "content": text}, "logprobs": {"content": [entry] * len(output)}}
        return self._reply(choice, prompt_token_ids=prompt)

    def _reply(self, choice: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        return {
            "id": "1", "object": "chat.completion", "created": 1, "model": self.model, "choices": [choice], **more
        }  # fmt: skip

    def _prompt(self, body: Mapping[str, Any]) -> list[int]:
        if "prompt" in body:
            return list(body["prompt"])
        arguments = body.get("chat_template_kwargs") or {}
        return self.chat.prompt_ids(body["messages"], tools=body.get("tools"), **arguments)

    def _command(self, body: Mapping[str, Any], prompt: Sequence[int]) -> str:
        if "messages" in body:
            text = "\n".join(str(message.get("content") or "") for message in body["messages"])
            step = sum(message["role"] == "assistant" for message in body["messages"])
        else:
            text = self.chat.decode(prompt)
            step = text.count("<|im_start|>assistant") - 1
        known = [agent for agent in self._conversations if agent.instruction in text]
        if not known:
            raise LookupError("no task of the rehearsal has this prompt")
        commands = max(known, key=lambda agent: len(agent.instruction)).commands
        return commands[min(step, len(commands) - 1)]

    def _text(self, command: str, *, opened: bool) -> str:
        """Return a turn. `opened`: the prompt ends in an open think block, which the turn has to close."""
        call = str(format_action(command))
        if self.grammar is None:
            return f"The next command.\n</think>\n\n{call}" if opened else call
        lines = "".join(f"{slot}: the next command of the solution\n" for slot in self.grammar.slots)
        return f"{'' if opened else OPENING}{lines}{CLOSING}\n\n{call}"


def _commands(family: Family, task: Task, role: Role) -> Sequence[str]:
    """Return the agent's commands: its plan if it has a partner, the reference solution, the submission."""
    plan = []
    if role.partner is not None:
        paths = [entity for entity in family.entities(task) if "/" in entity or "." in entity][:2]
        named = " and ".join(paths) or "my files"
        text = f"Plan: I'll take the first step on {named}; you take your own feature. We split the work there."
        plan = [f"send_message {role.partner} <<'MSG'\n{text}\nMSG", *(f"cat {path}" for path in paths[:1])]
    return [*plan, *family.solve(task, role), f"echo {SUBMIT}"]


class _Handler(JsonHandler):
    @property
    def teacher(self) -> TeacherServer:
        return self.server.teacher  # pyright: ignore[reportAttributeAccessIssue]

    def do_GET(self) -> None:
        card = {"id": self.teacher.model, "root": self.teacher.model, "parent": None, "owned_by": "vllm"}
        self.send(200, {"data": [{**card, "max_model_len": 65536}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = self.read()
        if self.path == "/tokenize":
            return self.send(200, {"tokens": self.teacher.chat.encode(body["prompt"])})
        try:
            self.send(200, self.teacher.answer(self.path, body))
        except LookupError as error:
            self.refuse(str(error))
