"""Small files of other programs, made for the tests of importers: sessions of assistants, traces, logs and results."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

SESSION = "0b1f"


def claude_line(uuid: str, parent: str | None, kind: str, content: Any, **more: Any) -> dict[str, Any]:
    """Return a line of Claude Code; of the assistant, `more["id"]` is that of the response."""
    message: dict[str, Any] = {"role": kind, "content": content}
    if kind == "assistant":
        message |= {"id": more.pop("id"), "model": "claude-x", "stop_reason": more.pop("stop", "tool_use")}
        message["usage"] = {"input_tokens": 10, "output_tokens": 2}
    facts = {"sessionId": SESSION, "cwd": "/home/user/pier", "timestamp": "2026-03-01T10:00:00Z", "isSidechain": False}
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "message": message, **facts, **more}


def use(call: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": "Bash", "input": arguments or {"command": f"echo {call}"}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def result(call: str, words: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": [text(words)]}


def claude_session() -> list[dict[str, Any]]:
    """A retry, two calls of one response whose results hang on either, an error of the provider, a compaction that
    keeps the last message, and a sub-agent."""
    task = {"type": "tool_use", "id": "t3", "name": "Task", "input": {"prompt": "Look at the pier."}}
    boundary = {"type": "system", "subtype": "compact_boundary", "uuid": "c1", "parentUuid": None}
    line = claude_line
    return [
        {"type": "summary", "summary": "Mooring", "leafUuid": "a4"},
        line("u1", None, "user", "Moor the boat."),
        {"type": "attachment", "uuid": "x1", "parentUuid": "u1", "sessionId": SESSION},
        line("a0", "x1", "assistant", [text("No.")], id="m0", stop="end_turn"),
        line("a1", "x1", "assistant", [{"type": "thinking", "thinking": "hm", "signature": "s"}], id="m1", stop=None),
        line("a2", "a1", "assistant", [use("t1")], id="m1"),
        line("a3", "a2", "assistant", [use("t2")], id="m1"),
        line("r2", "a3", "user", [result("t2", "two")]),
        line("r1", "a2", "user", [result("t1", "one")]),
        line("e1", "r1", "assistant", [text("API Error")], id="e", isApiErrorMessage=True),
        line("a4", "e1", "assistant", [text("Moored.")], id="m2", stop="end_turn"),
        boundary | {"compactMetadata": {"preservedSegment": {"headUuid": "a4", "anchorUuid": "s1", "tailUuid": "a4"}}},
        line("s1", "c1", "user", "Summary: it is moored.", isCompactSummary=True),
        line("u2", "s1", "user", "Check."),
        line("a5", "u2", "assistant", [task], id="m3"),
        line("p1", None, "user", "Look at the pier.", isSidechain=True),
        line("p2", "p1", "assistant", [text("A pier.")], id="m4", stop="end_turn", isSidechain=True),
        line("r3", "a5", "user", [result("t3", "A pier.")]),
        line("a6", "r3", "assistant", [text("Fine.")], id="m5", stop="end_turn"),
    ]


def said(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def items() -> list[dict[str, Any]]:
    """One response with reasoning, text and two calls, their results, and a closing response."""
    return [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"},
        said("assistant", "I look."),
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "c1"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin", "call_id": "c2"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
        {"type": "function_call_output", "call_id": "c1", "output": {"content": "moor.py", "success": True}},
        said("assistant", "Moored."),
    ]


def codex_session() -> list[dict[str, Any]]:
    """A response, a question that is rolled back, and a compaction with its new history."""
    meta = {
        "id": "s1",
        "cwd": "/home/user/pier",
        "base_instructions": {"text": "You are a coder."},
        "source": {"subagent": {"thread_spawn": {"parent_thread_id": "s0"}}},
        "dynamic_tools": [{"name": "lookup", "description": "Look.", "parameters": {"type": "object"}}],
    }
    usage = {"type": "token_count", "info": {"last_token_usage": {"input_tokens": 5, "output_tokens": 1}}}
    first = [said("developer", "Be brief."), said("user", "Moor the boat."), *items()]
    kept = [said("user", "Moor the boat."), said("user", "Summary: it is moored.")]
    payloads = [
        ("session_meta", meta),
        ("turn_context", {"model": "gpt-x"}),
        *(("response_item", item) for item in first),
        ("event_msg", usage),
        ("response_item", said("user", "And the other?")),
        ("response_item", said("assistant", "Which?")),
        ("event_msg", {"type": "thread_rolled_back", "num_turns": 1}),
        ("response_item", said("user", "Check.")),
        ("response_item", said("assistant", "Checked.")),
        ("compacted", {"message": "Summary", "replacement_history": kept}),
        ("response_item", said("user", "Done?")),
        ("response_item", said("assistant", "Done.")),
    ]
    return [{"timestamp": f"2026-03-01T10:00:{i:02}Z", "type": t, "payload": p} for i, (t, p) in enumerate(payloads)]


def codex_bare() -> list[dict[str, Any]]:
    """The older form: a line about the session, then bare items."""
    meta = {"id": "s2", "timestamp": "2025-07-01T10:00:00Z", "instructions": "You are a coder."}
    return [meta, {"record_type": "state"}, said("user", "Moor the boat."), *items()]


def gemini_records() -> list[dict[str, Any]]:
    """A call with its result, a rewind, and the same messages again in an update."""
    answer = {"output": "moor.py"}
    part = {"functionResponse": {"id": "c1", "name": "run", "response": answer}}
    call = {"id": "c1", "name": "run", "args": {"command": "ls"}, "status": "success", "result": [part]}
    first = {
        "id": "2", "type": "gemini", "content": "I look.", "model": "gemini-x", "tokens": {"input": 4, "output": 2},
    }  # fmt: skip
    first |= {"thoughts": [{"subject": "Look", "description": "hm"}], "timestamp": "2026-03-01T10:00:01Z"}
    return [
        {"sessionId": SESSION, "projectHash": "f00", "startTime": "2026-03-01T10:00:00Z", "kind": "main"},
        {"$set": {"messages": [{"id": "1", "type": "user", "content": [{"text": "Moor the boat."}]}]}},
        first,
        {**first, "toolCalls": [call]},
        {"id": "3", "type": "user", "content": [part]},
        {"id": "4", "type": "gemini", "content": "Moored."},
        {"id": "5", "type": "info", "content": "saved"},
        {"id": "6", "type": "user", "content": "Bad."},
        {"id": "7", "type": "gemini", "content": "Sorry."},
        {"$rewindTo": "6"},
        {"id": "8", "type": "user", "content": "Good."},
        {"id": "9", "type": "gemini", "content": "Thanks."},
    ]


def gemini_document() -> dict[str, Any]:
    """The older form: the same first messages as one object."""
    head, _, _, second, _, last, *_ = gemini_records()
    return {**head, "messages": [{"id": "1", "type": "user", "content": "Moor the boat."}, second, last]}


def qwen_session() -> list[dict[str, Any]]:
    """A call with its result, a rewind, a response in two lines, and a compaction."""
    call = {"functionCall": {"id": "c1", "name": "run", "args": {"command": "ls"}}}
    result = {"functionResponse": {"id": "c1", "name": "run", "response": {"output": "moor.py"}}}
    history = [{"role": "user", "parts": [{"text": "Summary."}]}, {"role": "model", "parts": [{"text": "Got it."}]}]

    def line(uuid: str, parent: str | None, kind: str, *parts: Any, **more: Any) -> dict[str, Any]:
        role = "model" if kind == "assistant" else "user"
        row = {"uuid": uuid, "parentUuid": parent, "type": kind, "message": {"role": role, "parts": [*parts]}}
        return {**row, "sessionId": SESSION, "cwd": "/home/user/pier", "timestamp": "2026-03-01T10:00:00Z", **more}

    usage = {"promptTokenCount": 5, "candidatesTokenCount": 2}
    return [
        line("1", None, "user", {"text": "Moor the boat."}),
        line("2", "1", "assistant", {"text": "hm", "thought": True}, {"text": "I look."}, model="qwen-x"),
        line("2", "1", "assistant", call, model="qwen-x", usageMetadata=usage),
        line("3", "2", "tool_result", result),
        line("4", "3", "assistant", {"text": "Sunk."}),
        line("5", "3", "system", subtype="rewind"),
        line("6", "5", "assistant", {"text": "Moored."}),
        line("7", "6", "system", subtype="chat_compression", systemPayload={"compressedHistory": history}),
        line("8", "7", "user", {"text": "Check."}),
        line("9", "8", "assistant", {"text": "Checked."}),
    ]


def nemo_row() -> dict[str, Any]:
    ids = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.5, -0.25]}
    output = [*items()[:-1], {**items()[-1], **ids}]
    schema = {
        "type": "function", "name": "shell", "description": "Run.", "parameters": {"type": "object"}, "strict": True,
    }  # fmt: skip
    request = {"input": [{"role": "user", "content": "Moor the boat."}], "tools": [schema], "temperature": 0.5}
    response = {"output": output, "model": "helmsman-2", "usage": {"output_tokens": 7}, "incomplete_details": None}
    return {"responses_create_params": request, "response": response, "reward": 1.0, "task_id": "pier__moor-12"}


def trace() -> dict[str, Any]:
    """Two branches of one question; the first answer has ids."""
    call = {"id": "c1", "name": "bash", "arguments": '{"command": "ls"}'}

    def node(parent: int | None, message: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"parent": parent, "message": message, "timestamp": 1.0, **more}

    first = {"sampled": True, "token_ids": [7, 8, 9], "mask": [False, True, True], "logprobs": [-0.5, -0.25]}
    return {
        "task": {"type": "Moor", "key": "moor-1", "data": {"question": "Moor?"}},
        "agent": {"name": "solver", "trainable": True},
        "tools": [{"name": "bash", "description": "Run.", "parameters": {"type": "object"}}],
        "nodes": [
            node(None, {"role": "user", "content": "Moor the boat."}, token_ids=[5, 6], mask=[False, False]),
            node(0, {"role": "assistant", "content": "I look.", "tool_calls": [call]}, **first),
            node(1, {"role": "tool", "tool_call_id": "c1", "content": "moor.py"}),
            node(2, {"role": "assistant", "content": "Moored."}, sampled=True),
            node(0, {"role": "user", "content": "Summary."}),
            node(4, {"role": "assistant", "content": "Again."}, sampled=True),
        ],
        "calls": [{"node": 3, "model": "helmsman-2", "sampling": {"temperature": 1.0}, "finish_reason": "stop"}],
        "rewards": {"solved": {"score": 1.0, "weight": 0.5}, "style": {"score": 0.5, "weight": 1.0}},
        "errors": [],
    }


def episode() -> dict[str, Any]:
    judge = {**trace(), "agent": {"name": "judge", "trainable": False}}
    return {"id": "e1", "env": {"id": "moor"}, "task": trace()["task"], "ok": True, "traces": [trace(), judge]}


def inspect_sample() -> dict[str, Any]:
    call = {"id": "c1", "function": "bash", "arguments": {"cmd": "ls"}, "type": "function"}
    schema = {"name": "bash", "description": "Run.", "parameters": {"type": "object", "properties": {}}}
    return {
        "id": "pier__moor-12", "epoch": 1,
        "messages": [
            {"role": "user", "content": "attachment://f1", "source": "input"},
            {"role": "assistant", "content": "Like this.", "source": "input"},
            {"role": "user", "content": "Now you."},
            {"role": "assistant", "content": [{"type": "reasoning", "reasoning": "hm"}], "tool_calls": [call]},
            {"role": "tool", "content": "", "tool_call_id": "c1", "error": {"type": "timeout", "message": "too slow"}},
            {"role": "assistant", "content": "Moored.", "source": "generate"},
        ],
        "output": {"model": "m", "choices": [{"message": {}, "stop_reason": "stop"}]},
        "scores": {"match": {"value": "C"}, "speed": {"value": 0.25}},
        "events": [{"event": "model", "tools": [schema]}], "model_usage": {"m": {"output_tokens": 7}},
        "attachments": {"f1": "Moor the boat."}, "total_time": 2.5,
    }  # fmt: skip


def inspect_log(*samples: Any) -> dict[str, Any]:
    spec = {"task": "moor", "model": "openai/helmsman-2", "model_generate_config": {"temperature": 0.5}}
    return {"version": 2, "status": "success", "eval": spec, "samples": list(samples)}


def write_archive(path: Path, log: dict[str, Any], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    """Write a log as Inspect's archive."""
    head = {key: value for key, value in log.items() if key != "samples"}
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("header.json", json.dumps(head))
        for number, sample in enumerate(log["samples"]):
            archive.writestr(f"samples/{number}_epoch_1.json", json.dumps(sample))
    return path


def write_zstd_archive(path: Path, log: dict[str, Any]) -> Path:
    """Write an archive whose entries are compressed with zstd, by marking stored frames."""
    import pyarrow as pa

    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as archive:
        for name, value in (("header.json", {**log, "samples": []}), ("samples/0_epoch_1.json", log["samples"][0])):
            frame = pa.BufferOutputStream()
            with pa.CompressedOutputStream(frame, "zstd") as out:
                out.write(json.dumps(value).encode())
            archive.writestr(name, frame.getvalue().to_pybytes())
    data = bytearray(whole.getvalue())
    for mark, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = data.find(mark)
        while at >= 0:
            data[at + offset : at + offset + 2] = (93).to_bytes(2, "little")
            at = data.find(mark, at + 4)
    path.write_bytes(bytes(data))
    return path


def tau2_results() -> dict[str, Any]:
    asked = {"id": "c1", "name": "find", "arguments": {"id": 3}, "requestor": "assistant"}
    own = {"id": "c2", "name": "reboot", "arguments": {}, "requestor": "user"}
    simulation = {
        "id": "x", "task_id": "7", "termination_reason": "user_stop", "seed": 300, "duration": 4.5,
        "start_time": "2026-03-01T10:00:00", "reward_info": {"reward": 1.0},
        "messages": [
            {"role": "assistant", "content": "Hi! How can I help?", "tool_calls": None},
            {"role": "user", "content": "Find it.", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [asked], "usage": {"completion_tokens": 4}},
            {"role": "tool", "id": "c1", "content": "found", "requestor": "assistant"},
            {"role": "assistant", "content": "Please reboot.", "tool_calls": None, "usage": {"completion_tokens": 3}},
            {"role": "user", "content": None, "tool_calls": [own]},
            {"role": "tool", "id": "c2", "content": "rebooted", "requestor": "user"},
            {"role": "user", "content": "Thanks ###STOP###", "tool_calls": None},
        ],
    }  # fmt: skip
    info = {
        "agent_info": {"llm": "helmsman-2", "llm_args": {"temperature": 0.0}},
        "environment_info": {"domain_name": "telecom", "policy": "# Policy", "tool_defs": None},
    }
    return {"timestamp": "2026-03-01", "info": info, "tasks": [{"id": "7"}], "simulations": [simulation]}


def batch_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Requests, and answers: one of chat completions, one of the Responses API, one that failed."""
    asked = {"model": "m", "messages": [{"role": "user", "content": "Moor?"}], "temperature": 0.5}
    bodies = [("/v1/chat/completions", asked), ("/v1/responses", {"input": "Moor?"}), ("/v1/responses", {"input": "x"})]
    requests = [{"custom_id": f"c{i}", "method": "POST", "url": url, "body": b} for i, (url, b) in enumerate(bodies)]
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Moored."}}
    chat = {"model": "helmsman-2", "choices": [choice], "usage": {"total_tokens": 9}}
    answers = [
        {"id": "1", "custom_id": "c1", "response": {"body": {"model": "m", "output": items()}}, "error": None},
        {"id": "0", "custom_id": "c0", "response": {"status_code": 200, "body": chat}, "error": None},
        {"id": "2", "custom_id": "c2", "response": None, "error": {"message": "expired"}},
    ]
    return requests, answers


FILES: dict[str, list[tuple[str, list[Any]]]] = {
    "claude_code": [("s.jsonl", claude_session())],
    "codex": [("rollout-1.jsonl", codex_session()), ("rollout-2.jsonl", codex_bare())],
    "gemini_cli": [("session-1.jsonl", gemini_records()), ("session-2.json", [gemini_document()])],
    "qwen_code": [("chat.jsonl", qwen_session())],
    "nemo_gym": [("r.jsonl", [nemo_row()])],
    "verifiers": [("traces.jsonl", [episode(), trace()])],
    "inspect": [("log.json", [inspect_log(inspect_sample())])],
    "tau2": [("results.json", [tau2_results()])],
    "openai_batch": [("out.jsonl", [{**batch_rows()[1][1], **batch_rows()[0][0]}])],
}
"""Format -> (file name, its lines; of a document, the one value)."""
