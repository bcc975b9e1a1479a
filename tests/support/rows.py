"""Small trajectories in the formats that keep a rollout a row or a document, made for the tests of importers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etpi_assets.importers import plan


def detect(path: Path) -> str:
    """Return the format that is detected, several as "a+b"."""
    return "+".join(plan("auto", path).formats)


def called(name: str = "bash", **arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def chat() -> list[dict[str, Any]]:
    """Two turns: a call and a closing word."""
    return [
        {"role": "system", "content": "You have a shell."},
        {"role": "user", "content": "Moor the boat."},
        {"role": "assistant", "content": "I look.", "tool_calls": [called(command="ls")]},
        {"role": "tool", "content": "moor.py", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Moored."},
    ]


def messages_row() -> dict[str, Any]:
    return {"messages": chat(), "instance_id": "pier__moor-12", "model": "helmsman-2", "resolved": True}


def sharegpt_row() -> dict[str, Any]:
    turns = [
        {"from": "human", "value": "Moor the boat."},
        {"from": "function_call", "value": json.dumps({"name": "bash", "arguments": {"command": "ls"}})},
        {"from": "observation", "value": "moor.py"},
        {"from": "gpt", "value": "Moored."},
    ]
    return {"id": "r1", "system": "You have a shell.", "conversations": turns}


def r2e_row() -> dict[str, Any]:
    def step(index: int, thought: str, action: str, seen: str, tokens: int) -> dict[str, Any]:
        return {
            "step_idx": index, "thought": thought, "action": action, "observation": seen, "done": False,
            "info": {"total_time": 0.5}, "token_usage_completion": tokens, "llm_exec_time": 0.1,
        }  # fmt: skip

    ls = "<function=execute_bash>\n  <parameter=cmd>ls</parameter>\n</function>"
    finish = "<function=finish>\n</function>"
    agent = {"system_prompt": "You have a shell.", "instance_prompt": "Fix: {problem_statement}"}
    return {
        "trajectory_steps": [step(0, "I look.", ls, "moor.py", 30), step(1, "", finish, "bye", 0)],
        "problem_statement": "Moor the boat.", "docker_image": "namanjain12/harbor_final:0a1b2c",
        "agent_args": agent | {"llm_name": "helmsman-2"}, "ds": {"repo_name": "harbor"}, "max_steps": 1,
        "exit_reason": "max_step_limit", "output_patch": "diff --git a/moor.py b/moor.py\n", "reward": 1.0,
        "test_output": "1 passed",
    }  # fmt: skip


def openhands_row() -> dict[str, Any]:
    """The old events; one response with two calls."""
    calls = [called("execute_bash", command=command) for command in ("ls", "pwd")]
    response = {"id": "m1", "choices": [{"message": {"role": "assistant", "content": "I look.", "tool_calls": calls}}]}
    meta = {"tool_call_id": "c1", "function_name": "execute_bash", "model_response": response}
    task = {"source": "user", "action": "message", "args": {"content": "Moor the boat."}}
    changed = {"source": "environment", "observation": "agent_state_changed", "content": ""}
    ran = {"source": "agent", "observation": "run", "extras": {"metadata": {"exit_code": 0}}}
    return {
        "instance_id": "pier__moor-12", "instruction": "Moor the boat.",
        "metadata": {"llm_config": {"model": "helmsman-2"}},
        "test_result": {"git_patch": "diff --git a/moor.py b/moor.py\n"}, "report": {"resolved": False},
        "history": [
            {"source": "agent", "action": "system", "args": {"content": "You have a shell."}},
            task | {"timestamp": "2026-03-01T09:00:00"},
            changed | {"extras": {"agent_state": "running"}},
            {"source": "agent", "action": "run", "args": {"command": "ls"}, "tool_call_metadata": meta},
            {"source": "agent", "action": "run", "args": {"command": "pwd"}, "tool_call_metadata": meta},
            ran | {"content": "moor.py"},
            ran | {"content": "/work"},
            {"source": "agent", "action": "finish", "args": {"outputs": {"word": "done"}, "thought": "Moored."}},
        ],
    }  # fmt: skip


def openhands_typed_row() -> dict[str, Any]:
    """The new events."""
    call = {"id": "c1", "name": "terminal", "arguments": json.dumps({"command": "ls"}), "origin": "completion"}

    def text(words: str) -> dict[str, str]:
        return {"type": "text", "text": words}

    def message(source: str, role: str, words: str) -> dict[str, Any]:
        return {"kind": "MessageEvent", "source": source, "llm_message": {"role": role, "content": [text(words)]}}

    action = {"kind": "ActionEvent", "source": "agent", "thought": [text("I look.")], "tool_call": call}
    return {
        "instance_id": "pier__moor-12",
        "history": [
            {"kind": "SystemPromptEvent", "source": "agent", "system_prompt": text("You have a shell.")},
            message("user", "user", "Moor."),
            action | {"llm_response_id": "m1"},
            {"kind": "ObservationEvent", "observation": {"content": [text("moor.py")], "exit_code": 0}},
            {"kind": "AgentErrorEvent", "error": "no such tool"},
            {"kind": "ConversationStateUpdateEvent", "key": "x"},
            message("agent", "assistant", "Moored."),
        ],
    }


def openhands_flat_row() -> dict[str, Any]:
    """The oldest events, which hold their arguments themselves and name no source."""
    return {
        "instruction": "Add a licence.",
        "history": [
            {"action": "message", "content": "Add a licence.", "images_urls": None, "wait_for_response": False},
            {"action": "run", "command": "touch LICENSE", "thought": "I create it.", "keep_prompt": True},
            {"observation": "run", "content": "$ ", "command": "touch LICENSE", "command_id": -1, "exit_code": 0},
            {"action": "run_ipython", "code": "print(1)", "thought": "Now its text.", "kernel_init_code": "import x"},
            {"observation": "run_ipython", "content": "1", "code": "print(1)"},
            {"action": "message", "content": "Shall I go on?", "wait_for_response": True},
            {"action": "message", "content": "Yes.", "wait_for_response": False},
            {"action": "finish", "outputs": {}, "thought": "Done."},
        ],
    }


def verifiers_row() -> dict[str, Any]:
    """A rollout as verifiers saves it: calls as JSON texts, the tools within `info`."""
    answers = [{**m, "tool_calls": [json.dumps(c) for c in m.get("tool_calls", [])] or None} for m in chat()[2:]]
    info = json.dumps({"oai_tools": [tool("bash", command="string")]})
    return {
        "example_id": 0, "prompt": chat()[:2], "completion": answers, "reward": 1.0, "info": info,
        "is_truncated": False,
    }  # fmt: skip


def swift_row() -> dict[str, Any]:
    """ms-swift: calls and results as messages with roles of their own, a flag, tools as JSON text."""
    calls = [{"name": "bash", "arguments": {"command": command}} for command in ("ls", "pwd")]
    return {
        "tools": json.dumps([tool("bash", command="string")]),
        "messages": [
            {"role": "user", "content": "Moor the boat."},
            {"role": "assistant", "content": "I guess.", "loss": False},
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "I look."},
            *({"role": "tool_call", "content": json.dumps(call)} for call in calls),
            {"role": "tool_response", "content": "moor.py"},
            {"role": "tool_response", "content": "/work"},
            {"role": "assistant", "content": "Moored."},
        ],
    }


def factory_row() -> dict[str, Any]:
    """LLaMA-Factory's second format: parts with a `value`, weights of messages."""
    call = {"name": "bash", "arguments": {"command": "ls"}}
    parts = [
        ("user", 0.0, [("text", "Moor the boat.")]),
        ("assistant", 1.0, [("reasoning", "hm"), ("text", "I look."), ("tool_call", json.dumps(call))]),
        ("tool", 0.0, [("text", "moor.py")]),
        ("assistant", 1.0, [("text", "Moored.")]),
    ]
    messages = [
        {"role": role, "loss_weight": weight, "content": [{"type": kind, "value": text} for kind, text in content]}
        for role, weight, content in parts
    ]
    return {"messages": messages}


def tool(name: str, **parameters: str) -> dict[str, Any]:
    """Return a schema; `parameters` are names of JSON types."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": schema}


def verl_row() -> dict[str, Any]:
    return {"input": "Moor the boat.", "output": "```bash\nls\n```", "gts": "x", "score": 1.0, "step": 3}


def trl_row(ids: list[int], spans: list[tuple[int, int]]) -> dict[str, Any]:
    labels = [-100] * len(ids)
    for start, end in spans:
        labels[start:end] = ids[start:end]
    return {"input_ids": ids, "labels": labels}


def atif_document(**changes: Any) -> dict[str, Any]:
    """A copied step, a turn with ids and log-probabilities, a step that no model made, a closing turn."""
    document = {
        "schema_version": "ATIF-v1.7", "session_id": "s1",
        "agent": {"name": "terminus", "version": "2", "model_name": "helmsman-2"},
        "steps": [
            {"source": "system", "message": "You have a shell."},
            {"source": "user", "message": "Moor the boat.", "timestamp": "2026-03-01T09:00:00Z"},
            {"source": "agent", "message": "Earlier.", "is_copied_context": True},
            {
                "source": "agent", "message": "I look.", "reasoning_content": "hm",
                "tool_calls": [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}],
                "observation": {"results": [{"source_call_id": "c1", "content": "moor.py"}]},
                "metrics": {"prompt_token_ids": [1, 2, 3], "completion_token_ids": [4, 5], "logprobs": [-0.5, -0.25]},
            },
            {"source": "agent", "message": "dispatch", "llm_call_count": 0},
            {"source": "agent", "message": "Moored.", "metrics": {"completion_tokens": 3}},
        ],
    }  # fmt: skip
    document["steps"] = [{"step_id": i + 1, **step} for i, step in enumerate(document["steps"])]
    return {**document, **changes}


def trial(root: Path, name: str = "moor__abc", **result: Any) -> Path:
    """A trial folder with a trajectory and a reward."""
    folder = root / "jobs/2026-03-01" / name
    (folder / "agent").mkdir(parents=True)
    (folder / "verifier").mkdir()
    (folder / "agent/trajectory.json").write_text(json.dumps(atif_document()))
    (folder / "verifier/reward.txt").write_text("1.0\n")
    (folder / "config.json").write_text(json.dumps({"task": {"path": "tasks/moor"}, "trial_name": name}))
    times = {"started_at": "2026-03-01T09:00:00Z", "finished_at": "2026-03-01T09:01:30Z"}
    (folder / "result.json").write_text(json.dumps({"task_name": "moor", "trial_name": name, **times, **result}))
    return folder


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def vercel_row() -> dict[str, Any]:
    """UIMessages: a call with its result in a part, and a second response in the same message."""
    call = {"type": "tool-bash", "toolCallId": "c1", "state": "output-available", "input": {"command": "ls"}}
    parts = [
        {"type": "step-start"},
        {"type": "reasoning", "text": "hm"},
        {"type": "text", "text": "I look."},
        {**call, "output": "moor.py"},
        {"type": "step-start"},
        {"type": "text", "text": "Moored."},
    ]
    user = {"id": "m1", "role": "user", "parts": [{"type": "text", "text": "Moor the boat."}]}
    return {"messages": [user, {"id": "m2", "role": "assistant", "parts": parts}]}


def bedrock_row() -> dict[str, Any]:
    """A Converse request whose last message is the response."""
    use = {"toolUseId": "c1", "name": "bash", "input": {"command": "ls"}}
    result = {"toolUseId": "c1", "content": [{"text": "moor.py"}], "status": "success"}
    spec = {"name": "bash", "description": "Run.", "inputSchema": {"json": {"type": "object"}}}
    return {
        "modelId": "helmsman-2",
        "system": [{"text": "You have a shell."}],
        "messages": [
            {"role": "user", "content": [{"text": "Moor the boat."}]},
            {"role": "assistant", "content": [{"text": "I look."}, {"toolUse": use}]},
            {"role": "user", "content": [{"toolResult": result}]},
            {"role": "assistant", "content": [{"text": "Moored."}]},
        ],
        "toolConfig": {"tools": [{"toolSpec": spec}]},
    }


def completion_row() -> dict[str, Any]:
    response = {"model": "helmsman-2", "choices": [{"message": chat()[2], "finish_reason": "tool_calls"}]}
    return {"request": {"model": "h", "messages": chat()[:2]}, "response": response}


def taubench_row() -> dict[str, Any]:
    talk = [*chat(), *chat()[1:2], *chat()[4:]]
    return {"task_id": 3, "reward": 1.0, "info": {"task": {"user_id": "u"}}, "traj": talk, "trial": 0}


def vibe_rows() -> list[dict[str, Any]]:
    """A file of one message a line; the first one has no id."""
    return [{**m, "message_id": f"m{i}"} if i else m for i, m in enumerate(chat())]


def goose_lines() -> list[Any]:
    """Goose: a line of facts, then messages whose parts are calls and results."""
    call = {"status": "success", "value": {"name": "developer__shell", "arguments": {"command": "ls"}}}
    result = {"status": "success", "value": [{"type": "text", "text": "moor.py"}]}
    contents = [
        [{"type": "text", "text": "Moor the boat."}],
        [{"type": "text", "text": "I look."}, {"type": "toolRequest", "id": "c1", "toolCall": call}],
        [{"type": "toolResponse", "id": "c1", "toolResult": result}],
        [{"type": "text", "text": "Moored."}],
    ]
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": r, "created": 1_750_000_000 + i, "content": contents[i]} for i, r in enumerate(roles)]
    return [{"working_dir": "/x", "description": "moor", "message_count": 4}, *messages]


def autogen_state() -> dict[str, Any]:
    """AutoGen: the messages of a model's context, whose calls and results have no type."""
    call = {"id": "c1", "arguments": '{"command": "ls"}', "name": "bash"}
    result = {"content": "moor.py", "name": "bash", "call_id": "c1", "is_error": False}
    messages = [
        {"content": "Moor the boat.", "source": "user", "type": "UserMessage"},
        {"content": [call], "thought": None, "source": "mate", "type": "AssistantMessage"},
        {"content": [result], "type": "FunctionExecutionResultMessage"},
        {"content": "Moored.", "thought": None, "source": "mate", "type": "AssistantMessage"},
    ]
    return {"type": "AssistantAgentState", "version": "1.0.0", "llm_context": {"messages": messages}}


ROWS = {
    "bedrock": bedrock_row(), "completion_log": completion_row(), "taubench": taubench_row(), "vercel_ai": vercel_row(),
    "messages": messages_row(), "sharegpt": sharegpt_row(), "r2e_gym": r2e_row(), "openhands": openhands_row(),
    "verl": verl_row(), "trl": {"prompt": chat()[:2], "completion": chat()[2:]},
}  # fmt: skip
"""Format -> a row of it."""
OTHERS = {
    "openhands": [openhands_typed_row(), openhands_flat_row()],
    "trl": [verifiers_row()],
    "messages": [swift_row(), factory_row()],
}
"""Format -> further rows of it, as other programs write them."""
