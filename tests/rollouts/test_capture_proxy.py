"""The capturing proxy: dialects, prompts that extend by ids, retries, budgets, keys, and logs that survive kills."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from etpi.init import preview
from etpi.init.student import Student
from etpi_assets.agent.actions import read_actions
from etpi_assets.agent.harness import _shown_folder
from etpi_assets.curation.pair_blocks import of_rollouts
from etpi_assets.exports import atif
from etpi_assets.exports.experiment_data import ExportSource
from etpi_assets.trajectories.assemble import CaptureError, assemble
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord
from etpi_assets.trajectories.tables import to_tables
from etpi_resources.capture import server as server_module
from etpi_resources.capture import store
from etpi_resources.capture.conversation import output_message
from etpi_resources.capture.dialects import DIALECTS, Refused, Turn
from etpi_resources.capture.store import CallLog
from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.tool_forms import FORMS, Call, ToolForm
from etpi_resources.engines import Completion, EngineUnavailable
from etpi_resources.engines.endpoints import Endpoints
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.engines.vllm import VllmEngine
from tests.support.capturing import CHAT, KEY, TASK, TOOL, TOOLS, World, begin, lists
from tests.support.loopback import Loopback


@pytest.fixture(scope="module")
def engine():
    return ScriptedEngine(lists, CHAT, "t", noncanonical=0.5)


@pytest.fixture
def world(tmp_path, engine):
    with World(tmp_path, engine) as world:
        yield world


def said(message):
    """The message as a harness repeats it: other white space, no thoughts."""
    return {key: value for key, value in message.items() if key != "reasoning_content"} | {
        "content": f"{message['content']} "
    }


def results(message):
    return [
        {"role": "tool", "tool_call_id": c["id"], "content": f"done {c['id']}"} for c in message.get("tool_calls", ())
    ]


def converse(world, messages, turns=3, **more):
    for _ in range(turns):
        message = world.chat(messages, **more)
        messages = [*messages, said(message), *results(message)]
    return messages


def test_later_prompts_extend_the_sampled_ids(world):
    converse(world, begin())
    first, second, third = world.calls()
    assert [row["message"].get("reasoning") for row in world.calls()] == ["step 0", "step 1", "enough"]
    for before, after in ((first, second), (second, third)):
        whole = [*before["prompt_ids"], *before["output_ids"]]
        assert list(after["prompt_ids"][: len(whole)]) == whole and after["parent"] == before["call"]
    text = CHAT.decode(first["output_ids"])
    assert CHAT.encode(text) != first["output_ids"] and first["message"]["tool_calls"][0]["function"]["name"] == "bash"
    added = CHAT.decode(second["prompt_ids"][len(first["history"]) :])
    assert added.startswith("\n<|im_start|>user\n<tool_response>\ndone call_") and added.endswith("assistant\n")
    attempt = world.assembled()
    assert attempt.figures == {
        "calls": 3, "turns": 3, "untrained": {}, "untrained_tokens": 0, "refused": 0, "joined": 0,
        "links": {"root": 1, "exact": 2},
    }  # fmt: skip
    (main,) = attempt.agents
    assert [m.kind for m in main.messages] == [
        "prompt",
        "prompt",
        "action",
        "observation",
        "action",
        "observation",
        "action",
    ]
    assert [t.output_ids for t in main.turns] == [row["output_ids"] for row in world.calls()]
    assert [a.command for t in main.turns for a in t.actions] == ["ls 0", "ls 1"]


def test_a_final_answer_in_words_is_no_parse_error(world):
    converse(world, begin())
    (main,) = world.assembled().agents
    assert [(len(turn.actions), turn.parse_error) for turn in main.turns] == [(1, None), (1, None), (0, None)]
    cut = [row | {"finish": "length"} for row in world.rows()]
    again = AgentRecord("agent1", "f", "main", "Submitted")
    assemble(cut, TASK, lambda text, calls: read_actions(text, calls), main=again)
    assert again.turns[-1].parse_error == "no command found"


def test_a_task_that_the_harness_quotes_is_found(world):
    converse(world, begin('"Print \\"sum\\"\n of two."'), turns=1)
    assert len(world.assembled('Print "sum" of two.').agents[0].turns) == 1


def test_a_thousand_calls_are_assembled_in_linear_time():
    tools, messages, ids, rows = TOOLS, begin(), np.arange(200, dtype=np.int32), []
    for call in range(1000):
        answer = {"role": "assistant", "content": f"answer {call}"}
        history = np.append(ids, np.int32(call))
        rows.append({
            "call": call, "at": float(call), "seconds": 0.5, "messages": messages, "tools": tools, "tools_hash": "t",
            "prompt_ids": ids, "history": history, "output_ids": [call], "logprobs": None, "text": answer["content"],
            "message": answer, "finish": "stop", "headers": {},
        })  # fmt: skip
        ids = np.append(history, np.int32(7))
        messages = [*messages, answer, {"role": "user", "content": f"go on {call}"}]
        if call == 700:  # as after a compaction
            messages, ids = [*begin(), {"role": "user", "content": "The work so far"}], np.arange(50, dtype=np.int32)
    started = time.process_time()
    main = AgentRecord("agent1", "f", "main", "Submitted")
    attempt = assemble(rows, TASK, lambda text, calls: ([], None), main=main)
    assert time.process_time() - started < 8
    assert attempt.figures["links"] == {"root": 1, "exact": 998, "rewritten": 1} and len(main.turns) == 1000


BILLED = "x-anthropic-billing-header: 1\nYou fix."
MESSAGES = {
    "model": "policy",
    "max_tokens": 300,
    "system": [{"type": "text", "text": BILLED}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": TASK}]}],
    "tools": [{"name": "bash", "description": "run", "input_schema": TOOL["parameters"]}],
}
RESPONSES = {"model": "policy", "instructions": "You fix.", "input": TASK, "tools": [{"type": "function", **TOOL}]}


def events(response: httpx.Response):
    blocks = [block for block in response.text.strip().split("\n\n") if not block.startswith(":")]
    lines = [block.split("data: ", 1)[1] for block in blocks]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_messages_dialect_whole_streamed_and_continued(world):
    whole = world.post("messages", MESSAGES).json()
    thinking, text, call = whole["content"]
    assert (thinking["thinking"], text["text"], call["input"], whole["stop_reason"]) == (
        "step 0",
        "I look.",
        {"command": "ls 0"},
        "tool_use",
    )
    streamed = events(world.post("messages", MESSAGES | {"stream": True}))
    assert [e["type"] for e in streamed][:2] == ["message_start", "content_block_start"] and streamed[-1][
        "type"
    ] == "message_stop"
    assert json.loads(next(e["delta"]["partial_json"] for e in streamed if "partial_json" in e.get("delta", {}))) == {
        "command": "ls 0"
    }
    answer = [{"type": "tool_result", "tool_use_id": call["id"], "content": "x"}, {"type": "text", "text": "go on"}]
    later = [
        *MESSAGES["messages"],
        {"role": "assistant", "content": whole["content"]},
        {"role": "user", "content": answer},
    ]
    world.post("messages", MESSAGES | {"messages": later})
    first, _, last = world.calls()
    assert last["parent"] in (1, 2) and first["messages"][0] == {"role": "system", "content": "You fix."}
    assert [m["role"] for m in last["messages"][-2:]] == ["tool", "user"]
    tokens = world.client.post("/a/a/v1/messages/count_tokens", json=MESSAGES, headers={"x-api-key": KEY}).json()
    assert tokens["input_tokens"] == len(first["prompt_ids"])


def test_responses_dialect_whole_streamed_and_continued(world):
    whole = world.post("responses", RESPONSES).json()
    reasoning, message, call = whole["output"]
    assert reasoning["content"][0]["text"] == "step 0" and message["content"][0]["text"] == "I look."
    assert call["name"] == "bash" and json.loads(call["arguments"]) == {"command": "ls 0"}
    streamed = events(world.post("responses", RESPONSES | {"stream": True}))
    assert [e["sequence_number"] for e in streamed] == list(range(len(streamed)))
    kinds = [e["type"].removeprefix("response.") for e in streamed]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    written = ["output_item.added", *text, "output_item.done"]
    added = ["output_item.added", "output_item.done"]
    assert kinds == ["created", *added, *written, *added, "completed"]
    back = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
    world.post("responses", RESPONSES | {"input": [{"role": "user", "content": TASK}, *whole["output"], back]})
    assert world.calls()[-1]["parent"] in (1, 2)
    custom = [
        {"type": "custom", "name": "bash"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", **TOOL}]},
    ]
    freeform = world.post("responses", RESPONSES | {"tools": custom}).json()["output"][2]
    assert freeform["type"] == "custom_tool_call"
    assert [t["function"]["name"] for t in world.calls()[-1]["tools"]] == ["bash", "n__bash"]


def test_only_names_in_namespaces_are_answered_with_a_namespace():
    body = {"tools": [
        {"type": "function", "name": "mcp__read"},
        {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]},
    ]}  # fmt: skip
    calls = [
        {"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("mcp__read", "files__read", "other")
    ]
    turn = Turn("c", {"content": "", "tool_calls": calls}, "tool_calls", 1, 1)
    _, whole = next(DIALECTS["responses"].write(body, turn))
    named = [(item["name"], item.get("namespace")) for item in whole["output"]]
    assert named == [("mcp__read", None), ("read", "files"), ("other", None)]


def test_streamed_chat_is_kept_alive_and_whole(world, monkeypatch):
    monkeypatch.setattr(server_module, "KEEPALIVE_SECONDS", 0.05)
    engine = world.attempts["a"].engine
    complete = engine.complete
    monkeypatch.setattr(engine, "complete", lambda requests: time.sleep(0.2) or complete(requests))
    body = {
        "model": "policy",
        "messages": begin(),
        "tools": TOOLS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = world.post("chat/completions", body)
    assert answer.text.startswith(": the model is still writing") and answer.text.endswith("data: [DONE]\n\n")
    deltas = [e["choices"][0]["delta"] for e in events(answer) if e["choices"]]
    assert deltas[0]["content"] == "I look." and deltas[1]["tool_calls"][0]["function"]["name"] == "bash"
    assert events(answer)[-1]["usage"]["completion_tokens"] == len(world.calls()[0]["output_ids"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("responses", RESPONSES | {"input": [{"type": "computer_call"}]}),
        ("responses", RESPONSES | {"previous_response_id": "r"}),
        ("messages", MESSAGES | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("chat/completions", {"messages": begin(), "n": 2}),
        ("chat/completions", {"messages": [{"content": "no role"}]}),
        ("chat/completions", {"messages": []}),
        ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}),
        ("chat/completions", {"messages": begin(), "tools": [{"type": "function"}]}),
        ("chat/completions", {"messages": begin(), "tools": [{"type": "function", "function": TOOL | {"name": 1}}]}),
        ("chat/completions", {"messages": begin(), "max_tokens": -1}),
        ("messages", MESSAGES | {"max_tokens": "many"}),
        ("messages", MESSAGES | {"tools": [{"name": "bash", "input_schema": [1]}]}),
        ("responses", RESPONSES | {"instructions": {"a": 1}}),
    ],
)
def test_requests_that_cannot_be_captured_are_refused_and_recorded(world, path, body):
    answer = world.post(path, body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert [row["status"] for row in world.rows()] == [400]
    assert not world.attempts["a"].failure, "a command of the model must not make its attempt an error"
    assert world.assembled(None).figures["refused"] == 1


def test_other_paths_and_keys_are_refused(world):
    world.open("b", "sk-other")
    for name, key in (("a", "sk-other"), ("b", KEY), ("c", KEY), ("a", "x")):
        assert world.post("chat/completions", {"messages": begin()}, name, key).status_code == 401
    assert world.client.head("/a/a/v1/x", headers={"x-api-key": KEY}).status_code == 404
    assert world.client.get("/a/a/v1/models", headers={"x-api-key": KEY}).json()["data"][0]["id"] == "policy"
    world.attempts["a"].revoked = True
    assert world.post("chat/completions", {"messages": begin()}).status_code == 401
    assert KEY not in (world.folder / "a.jsonl").read_text()


def test_large_requests_are_refused_and_logs_are_bounded(world, monkeypatch):
    monkeypatch.setattr(server_module, "MOST_BODY_BYTES", 20_000)
    monkeypatch.setattr(server_module, "MOST_AUX_ROWS", 3)
    headers = {"x-api-key": KEY}
    large = world.client.post("/a/a/v1/chat/completions", content=iter([b"x" * 9_000] * 3), headers=headers)
    assert large.status_code == 413 and not world.attempts["a"].calls
    for _ in range(5):
        assert world.client.get(f"/a/a/v1/{'x' * 9000}", headers=headers).status_code == 404
    world.chat(begin(), metadata={"note": "y" * 9000})
    assert world.post("chat/completions", {"messages": begin(), "n": 2, "user": "z" * 9000}).status_code == 400
    aux, asked = ([row[key] for row in world.rows() if key in row] for key in ("aux", "asked"))
    assert [len(request) for request in aux] == [len("POST /chat/completions"), 2000, 2000]
    assert [len(asked[0]["metadata"]), len(asked[1]["user"])] == [2000, 2000]


def test_half_a_surrogate_pair_is_replaced(world):
    text = r'"a \ud83d, \ud83d\ude00"'
    body = f'{{"messages": [{{"role": "user", "content": {text}}}], "model": "\\udc00"}}'
    answer = world.client.post("/a/a/v1/chat/completions", content=body, headers={"x-api-key": KEY})
    assert answer.status_code == 200 and world.calls()[0]["messages"][0]["content"] == "a \ufffd, \U0001f600"


def test_schemas_come_before_all_rows_that_name_them(tmp_path, monkeypatch):
    log, dumps = CallLog(tmp_path / "a.jsonl"), json.dumps
    first, second = {"attempt": "a", "call": 1}, {"attempt": "a", "call": 2}
    monkeypatch.setattr(store.json, "dumps", lambda row, **k: time.sleep(0.2 * ("tools" in row)) or dumps(row, **k))
    writing = threading.Thread(target=log.append, args=(first, TOOLS))
    writing.start()
    time.sleep(0.05)
    log.append(second, TOOLS)
    writing.join()
    log.close()
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert ["tools" in line for line in lines] == [True, False, False]


def test_an_undelivered_request_is_joined_and_a_delivered_one_is_sampled_again(world, monkeypatch):
    engine, release = world.attempts["a"].engine, threading.Event()
    complete = engine.complete
    monkeypatch.setattr(engine, "complete", lambda requests: release.wait(10) and complete(requests))
    body = json.dumps({"model": "policy", "messages": begin(), "tools": TOOLS}).encode()
    lines = ("POST /a/a/v1/chat/completions HTTP/1.1", "host: x", f"x-api-key: {KEY}", f"content-length: {len(body)}")
    head = "\r\n".join([*lines, "", ""])
    with socket.create_connection(("127.0.0.1", world.server.port)) as gone:
        gone.sendall(head.encode() + body)
        while not world.attempts["a"].calls:
            time.sleep(0.01)
    time.sleep(0.1)
    threading.Timer(0.2, release.set).start()
    headers = {"authorization": f"Bearer {KEY}"}
    first = world.client.post("/a/a/v1/chat/completions", content=body, headers=headers).json()
    again = world.client.post("/a/a/v1/chat/completions", content=body, headers=headers).json()
    assert [first["id"], again["id"]] == ["call-a-1", "call-a-2"]
    assert world.assembled().figures["joined"] == 1 and len(world.calls()) == 2


def test_two_equal_requests_after_a_lost_one_are_one_joined_and_one_new():
    async def gone() -> bool:
        await asyncio.sleep(0)
        return True

    async def both() -> list[bool]:
        call = server_module._Call(1, asyncio.Future(), SimpleNamespace(is_disconnected=gone))  # type: ignore[arg-type]

        async def asks() -> bool:
            if joins := await call.lost():
                call.request = SimpleNamespace(is_disconnected=gone)  # type: ignore[assignment]
            return joins

        return list(await asyncio.gather(asks(), asks()))

    assert asyncio.run(both()) == [True, False]


def test_the_key_is_in_no_prompt_and_no_log(world):
    """A command of the model prints the environment of the harness."""
    messages = converse(world, begin(), turns=1)
    messages[-1] = messages[-1] | {"content": f"OPENAI_API_KEY={KEY}\nHOME=/tmp"}
    converse(world, messages, turns=2, metadata={"key": KEY})
    world.client.get(f"/a/a/v1/{KEY}", headers={"x-api-key": KEY})
    assert KEY not in (world.folder / "a.jsonl").read_text()
    assert "OPENAI_API_KEY=[key]\nHOME" in CHAT.decode(world.calls()[-1]["prompt_ids"].tolist())
    assert world.assembled().figures["links"] == {"root": 1, "exact": 2}


def test_an_answer_that_looks_like_events_or_control_tokens_is_text(world, monkeypatch):
    odd = 'data: [DONE]\n\nevent: error\ndata: {"x": 1}\n\r\n\x0b\u2028: keep </tool_call> <|im_end|>x'
    monkeypatch.setattr(world.attempts["a"].engine, "_policy", lambda request: odd)
    answer = world.post("chat/completions", {"messages": begin(odd), "tools": TOOLS, "stream": True})
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events(answer) if e["choices"])
    assert text == world.calls()[0]["message"]["content"] and text.startswith(
        'data: [DONE]\n\nevent: error\ndata: {"x"'
    )
    whole = world.post("messages", MESSAGES | {"stream": True})
    assert [e["delta"]["text"] for e in events(whole) if "text" in e.get("delta", {})] == [text]
    assert [e["delta"] for e in events(world.post("responses", RESPONSES | {"stream": True})) if "delta" in e] == [text]
    ids = world.calls()[0]["prompt_ids"].tolist()
    assert ids.count(CHAT.encode("<|im_end|>", allow_special=True)[0]) == 2, "one after each message"


def test_a_schema_that_takes_text_keeps_it(world):
    chat = SimpleNamespace(
        decode=lambda ids: "x", without_end=lambda ids: ids, answer=str,
        tool_form=ToolForm("f", lambda calls: "x", lambda text: [Call("f", dict.fromkeys("abcd", "12"))], typed=False),
    )  # fmt: skip
    properties = {"a": {"type": ["string", "null"]}, "b": True, "c": {"type": "integer"}, "d": {"type": 5}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    (call,) = output_message(chat, [1], False, tools)["tool_calls"]  # type: ignore[arg-type]
    assert json.loads(call["function"]["arguments"]) == {"a": "12", "b": "12", "c": 12, "d": 12}


_BODY = '{"command": "ls"}'
_ARGUMENTS = "\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n"
_WRITTEN = [
    *((form, "") for form in FORMS.values()),
    (FORMS["glm"], "<tool_call>submit</tool_call>"),
    (FORMS["glm"], "<tool_call>submit\n</tool_call>"),
    (FORMS["glm"], f"<tool_call>bash\n{_ARGUMENTS}</tool_call>"),
    (FORMS["qwen_xml"], "<tool_call><function=bash><parameter=command>ls</parameter></function></tool_call>"),
    (FORMS["mistral"], f'[TOOL_CALLS] [{{"name": "bash", "arguments": {_BODY}}}]'),
    (FORMS["mistral_v11"], f"[TOOL_CALLS]bash[CALL_ID]abc123456[ARGS]{_BODY}"),
    (FORMS["harmony"], f"<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{_BODY}"),
    (FORMS["harmony"], f"<|start|>assistant<|channel|>commentary to=functions.bash<|message|>{_BODY}"),
    (FORMS["atem"], f" to=bash<|message|>{FORMS['atem'].render([Call('bash', {})])}"),
]
"""Calls as models write them that differ from what `render` writes; "" for that."""


def message_of(form, text):
    chat = SimpleNamespace(decode=lambda ids: text, without_end=lambda ids: ids, answer=str, tool_form=form)
    return output_message(chat, [1], False, [])  # type: ignore[arg-type]


@pytest.mark.parametrize(("form", "written"), _WRITTEN)
def test_text_beside_a_call_is_what_the_model_wrote_before_it(form, written):
    alone = form.name == "llama3_json"
    prose = "" if alone else " I look; to=functions.x opens calls of another form."
    written = written or form.render([Call("bash", {"command": "ls <tool_call>"})] * 2)
    for after in ("", "" if alone else "\nDone"):
        message = message_of(form, f"{prose}\n{written}{after}".lstrip("\n"))
        assert message["content"] == prose and message["tool_calls"]


def test_call_that_cannot_be_read_stays_in_the_text_before_one_that_can():
    bad, good = f"<tool_call>bash{_ARGUMENTS}<arg_key>x</tool_call>", f"<tool_call>bash{_ARGUMENTS}</tool_call>"
    message = message_of(FORMS["glm"], f"I look.\n{bad}\n{good}\n{bad}")
    assert message["content"] == f"I look.\n{bad}" and len(message["tool_calls"]) == 1


def test_two_equal_helpers_at_once_are_two_calls(world, monkeypatch):
    engine, both = world.attempts["a"].engine, threading.Barrier(2)
    complete = engine.complete
    monkeypatch.setattr(engine, "complete", lambda requests: (both.wait(60), complete(requests))[1])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: world.chat(begin("Read calc.py.")), range(2)))
    attempt = world.assembled("Read", trained=("helper", "summary"))
    assert [(agent.role, len(agent.turns)) for agent in attempt.agents] == [("main", 1), ("helper", 1)]


def test_only_root_opens_the_folder_of_the_key_to_other_users(monkeypatch):
    for user, mode in ((1000, 0o700), (0, 0o711)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        with _shown_folder() as shown:
            assert shown.parent.stat().st_mode & 0o777 == mode


def test_budgets_refuse_further_calls(tmp_path, engine):
    with World(tmp_path, engine, max_calls=1, max_model_len=400) as world:
        world.chat(begin())
        refused = world.post("chat/completions", {"messages": begin("x"), "tools": TOOLS})
        assert refused.status_code == 400 and "budget of 1 calls" in refused.text
        assert world.attempts["a"].over.is_set() and world.attempts["a"].limit == "1 calls"
    with World(tmp_path / "tokens", engine, max_output_tokens=70) as world:
        messages = converse(world, begin(), turns=2)
        assert sum(len(row["output_ids"]) for row in world.calls()) == 70 and len(world.calls()) == 2
        assert "70 output tokens" in world.post("chat/completions", {"messages": messages, "tools": TOOLS}).text
    with World(tmp_path / "long", engine, max_model_len=200) as world:
        refused = world.post("chat/completions", {"messages": begin("x " * 300), "tools": TOOLS})
        assert refused.json()["error"]["code"] == "context_length_exceeded" and not world.attempts["a"].over.is_set()


def test_a_killed_proxy_loses_no_written_call_and_continues_the_conversation(tmp_path, engine):
    with World(tmp_path, engine) as world:
        messages = converse(world, begin(), turns=1)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"attempt": "a", "call": 2, "output_i')  # killed while it wrote
    with World(tmp_path, engine) as world:
        world.chat(messages)
        assert [(row["call"], len(row["messages"])) for row in world.calls()] == [(1, 2), (2, 4)]
        assert world.assembled().figures["links"] == {"root": 1, "exact": 1}


def test_row_that_a_full_disk_refuses_leaves_a_log_that_can_be_read_and_continued(tmp_path):
    log, limits = CallLog(tmp_path / "a.jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)
    log.append({"attempt": "a"})
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError):
            log.append({"text": "x" * (2 << 20)}, ["tool"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.append({"call": 1}, ["tool"])
    assert [json.loads(line).keys() for line in log.path.read_text().splitlines()] == [
        {"attempt"}, {"tools_hash", "tools"}, {"call", "tools_hash"},
    ]  # fmt: skip


def test_calls_wait_while_the_weights_change_and_record_their_version(world, monkeypatch):
    attempt, entered, release = world.attempts["a"], threading.Event(), threading.Event()
    complete = attempt.engine.complete
    monkeypatch.setattr(
        attempt.engine, "complete", lambda requests: entered.set() or release.wait(20) and complete(requests)
    )
    changed = threading.Event()

    def change() -> None:
        with attempt.weights.change("step 1"):
            changed.set()
            time.sleep(0.3)
            assert len(world.calls()) == 1, "no call is answered during the change"

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(world.chat, begin("one"))
        entered.wait(20)
        changing = pool.submit(change)
        assert not changed.wait(0.3), "the change waits for the call under way"
        second = pool.submit(world.chat, begin("two"))
        time.sleep(0.1)
        release.set()
        for job in (first, changing, second):
            job.result()
    assert [row["weights"] for row in world.calls()] == ["", "step 1"]
    with pytest.raises(OSError), attempt.weights.change("step 2"):
        raise OSError
    world.chat(begin("three"))
    assert world.calls()[-1]["weights"] == "step 1"


def test_a_log_is_not_continued_with_another_vocabulary(tmp_path, engine):
    with World(tmp_path, engine) as world:
        world.chat(begin())
        attempt = world.attempts["a"]
        with pytest.raises(Refused, match="another vocabulary"):
            replace(attempt, chat=load_chat_format("tiny"))


def test_side_requests_invented_messages_and_helpers_are_not_trained(world):
    world.chat([{"role": "user", "content": f"A title for: {TASK}"}], tools=[])
    invented = [*begin(), {"role": "assistant", "content": "I am ready."}, {"role": "user", "content": "Go."}]
    messages = converse(world, invented, turns=1)
    converse(world, begin("Read one file."), turns=2)
    converse(world, messages, turns=1)
    attempt = world.assembled()
    (main,) = attempt.agents
    assert [turn.content.startswith("<think>\nstep") for turn in main.turns][:1] == [True]
    assert attempt.figures["untrained"] == {"side": 1, "helper": 2} and len(main.turns) == 2
    spoken = {kind: [m.content for m in main.messages if m.kind == kind] for kind in ("prompt", "side1", "helper1")}
    assert "I am ready." in spoken["prompt"] and spoken["side1"][-1] == "Fix a sum" and len(spoken["helper1"]) == 5
    assert not any("ready" in turn.content for turn in main.turns)
    record = RolloutRecord("r", "set", None, None, None, [main])
    kept = [m.content for m in main.messages if m.kind in ("prompt", "action", "observation")]
    captured = ExportSource._messages(SimpleNamespace(_default_prompts={"": lambda *_: None}), record, main)  # type: ignore[arg-type]
    shown = [part.text.rstrip("\n") for part in preview.parts(record, Student(), native=True, strips_think=False)]
    assert [m["content"] for m in captured] == kept and "Fix a sum" not in shown and "I am ready." in shown
    assert "Fix a sum" not in json.dumps(atif.document(record)) and "I am ready." in json.dumps(atif.document(record))
    kinds = of_rollouts(to_tables([record]), frozenset(["r"]))["messages"]["kind"].to_pylist()
    assert len(kinds) == len(kept) and {"side1", "helper1"}.isdisjoint(kinds)
    trained = world.assembled(trained=("helper", "summary"))
    assert [(agent.agent_id, agent.role, len(agent.turns)) for agent in trained.agents] == [
        ("agent1", "main", 2),
        ("helper1", "helper", 2),
    ]


def test_helpers_that_go_on_from_the_main_conversation_at_once_are_agents_of_their_own(world):
    """A harness forks three helpers of its own conversation, whose header names them, and goes on meanwhile."""
    messages = converse(world, begin(), turns=1)

    def fork(number: int) -> None:
        ours = [*messages, {"role": "user", "content": f"You are helper {number}."}]
        for _ in range(number):
            body = {"model": "policy", "messages": ours, "tools": TOOLS}
            headers = {"authorization": f"Bearer {KEY}", "x-claude-code-agent-id": f"helper {number}"}
            answer = world.client.post("/a/a/v1/chat/completions", json=body, headers=headers).json()
            message = answer["choices"][0]["message"]
            ours = [*ours, said(message), *results(message), {"role": "user", "content": "Go on."}]

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(fork, (1, 2, 4)))
    converse(world, messages, turns=2)
    attempt = world.assembled(trained=("helper", "summary"))
    assert [(agent.role, len(agent.turns)) for agent in attempt.agents][0] == ("main", 3)
    assert sorted((agent.role, len(agent.turns)) for agent in attempt.agents[1:]) == [
        ("helper", 1), ("helper", 2), ("helper", 4),
    ]  # fmt: skip
    assert attempt.figures["links"] == {"root": 1, "exact": 9}


def test_dropped_and_retried_turns_are_untrained(world):
    messages = converse(world, begin(), turns=1)
    for _ in range(3):  # the harness throws two answers away
        message = world.chat(messages)
    messages = [*messages, said(message), *results(message)]
    world.chat([*messages[:-2], {"role": "user", "content": "You wrote no call."}])
    converse(world, messages, turns=1)
    attempt = world.assembled()
    assert attempt.figures["untrained"] == {"retry": 2, "dropped": 1}
    assert [turn.turn for turn in attempt.agents[0].turns] == [0, 1, 2] and attempt.figures["calls"] == 6


def test_unresolved_retries_are_untrained(world):
    messages = converse(world, begin(), turns=1)
    for _ in range(2):
        world.chat(messages)
    attempt = world.assembled()
    assert len(attempt.agents[0].turns) == 1 and attempt.figures["untrained"] == {"retry": 2}


def test_a_compaction_is_one_agent_with_its_summary_apart(world, monkeypatch):
    messages = converse(world, begin(), turns=2)
    monkeypatch.setattr(world.attempts["a"].engine, "_policy", lambda request: "So far: listed both files.")
    world.chat([*messages, {"role": "user", "content": "Summarise."}], tools=[])
    compacted = [*begin(), {"role": "user", "content": "Summary of the work: So far: listed both files."}]
    monkeypatch.setattr(world.attempts["a"].engine, "_policy", lists)
    converse(world, compacted, turns=2)
    attempt = world.assembled()
    assert attempt.figures["untrained"] == {"summary": 1} and attempt.figures["links"]["rewritten"] == 1
    (main,) = attempt.agents
    assert len(main.turns) == 4
    drift = to_tables([RolloutRecord("r", "set", None, None, None, [main])])["turns"]["drift_at"]
    assert [at is not None for at in drift.to_pylist()] == [False, False, True, False]


def test_missing_ids_end_the_attempt(world, monkeypatch):
    engine = world.attempts["a"].engine
    none = Completion(None, None, None, "text", "stop", "t")
    monkeypatch.setattr(engine, "complete", lambda requests: [none])
    assert world.post("chat/completions", {"messages": begin()}).status_code == 500
    assert isinstance(world.attempts["a"].failure, EngineUnavailable) and world.attempts["a"].over.is_set()
    assert world.attempts["a"].held_bytes == 0


def test_a_system_message_that_the_template_refuses_ends_the_attempt(world, monkeypatch):
    messages = [*converse(world, begin(), turns=1), {"role": "system", "content": "Be brief."}]
    world.chat(messages)
    monkeypatch.setattr(CHAT, "roles", type(CHAT.roles)(later_system=False))
    assert world.post("chat/completions", {"messages": [*messages, *begin()], "tools": TOOLS}).status_code == 500
    assert "system message within" in str(world.attempts["a"].failure)


def test_calls_that_contradict_themselves_are_refused(world):
    world.chat(begin())
    (row,) = world.calls()
    main = AgentRecord("a", "", "main", "x")
    for change, what in (({"logprobs": [0.0]}, "log-probabilities"), ({"text": "other"}, "not in the text")):
        with pytest.raises(CaptureError, match=what):
            assemble([row | change], None, lambda text, calls: ([], None), main=main)


def test_chat_requests_of_vllm_record_drift_and_ids(tmp_path):
    with Loopback("teacher", CHAT) as upstream:
        upstream.say = lambda body: "<think>\nhm\n</think>\n\nYes."
        upstream.message = lambda body, text: {"content": "Yes.", "reasoning": "hm"}
        for request, link in (("tokens", "exact"), ("chat", "drift")):
            endpoints = Endpoints([upstream.url])
            engine = VllmEngine(endpoints, "teacher", CHAT, request=request, release=endpoints.close)
            with World(tmp_path / request, engine) as world:
                message = world.chat(begin(), tools=[])
                world.chat([*begin(), said(message), {"role": "user", "content": "Sure?"}], tools=[])
                assert world.assembled().figures["links"] == {"root": 1, link: 1}
                assert all(len(row["logprobs"]) == len(row["output_ids"]) for row in world.calls())
            engine.close()
