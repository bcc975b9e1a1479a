"""Measure imports against DuckDB, which reads the same files with `read_json` and writes the same messages and turns.

Run: `python bench/import_runs.py [--rounds N] [--runs N] [FORMAT ...]`. For each format it writes runs of 20 to 40
turns whose results have up to 60 lines, imports them in this process (`ETPI_WORKERS=1`: parse, normalise, read the
actions, quarantine, check, publish), and lets DuckDB, in one thread too,

- read the files into a table with `read_json`, and
- write from it with SQL `messages` (a row for each message, calls as JSON), `turns` (what the assistant wrote, with the
  text of the results behind it) and `agents`, as parquet with zstd, which etpi compresses with.

DuckDB does not read actions, hash rows, check or quarantine, and its SQL reads only the shape that this script writes.
"alone" is a lower bound: DuckDB writes the documents as `read_json` gives them. Times are CPU seconds, the best of the
rounds. `--memory` imports an eighth of the runs and then all of them, and prints the peaks of memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
from machine import machine

from etpi_assets.importers.bulk import ImportSource, import_in_bulk
from etpi_resources.lake.lake import Lake, Ref

Message = dict[str, Any]
WORDS = [f"word{i}" for i in range(3000)]
TIME = "2026-03-01T10:00:00Z"
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL = {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS}
MAP = {"messages": "a.talk", "role": "who", "text": "said", "calls": "calls", "answers": "of"}


def talk(number: int) -> list[Message]:
    """Return the messages of a run in the form of the chat API: a turn is a thought, a call, and its result."""
    words = random.Random(number)

    def text(count: int) -> str:
        return " ".join(words.choices(WORDS, k=count))

    messages: list[Message] = [{"role": "system", "content": text(200)}, {"role": "user", "content": text(200)}]
    for turn in range(words.randint(20, 40)):
        command = json.dumps({"command": f"sed -n {turn},{turn + 80}p src/{text(1)}.py | grep '{text(2)}'"})
        call = {"id": f"c{number}-{turn}", "type": "function", "function": {"name": "bash", "arguments": command}}
        result = "\n".join(text(8) for _ in range(words.randint(5, 60)))
        messages.append({"role": "assistant", "content": text(30), "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return [*messages, {"role": "assistant", "content": text(30), "tool_calls": []}]


def arguments(call: Message) -> Message:
    return json.loads(call["function"]["arguments"])


def chat_row(number: int) -> Message:
    return {
        "messages": talk(number),
        "tools": [{"type": "function", "function": TOOL}],
        "instance_id": f"a__b-{number}",
    }


def sharegpt_row(number: int) -> Message:
    turns = []
    for message in talk(number):
        name = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}[message["role"]]
        turns.append({"from": name, "value": message["content"]})
        for call in message.get("tool_calls", ()):
            turns.append({"from": "function_call", "value": json.dumps({"name": "bash", "arguments": arguments(call)})})
    return {"conversations": turns, "id": number}


def trl_row(number: int) -> Message:
    messages = talk(number)
    return {"prompt": messages[:2], "completion": messages[2:], "id": number}


def trace_row(number: int) -> Message:
    nodes = [
        {"parent": i - 1 if i else None, "sampled": m["role"] == "assistant", "message": m, "timestamp": 1.7e9 + i}
        for i, m in enumerate(talk(number))
    ]
    return {"nodes": nodes, "task": {"key": f"t{number}"}, "rewards": {"r": {"score": 1, "weight": 1}}, "tools": []}


def items(messages: Sequence[Message]) -> list[Message]:
    """Return messages as items of the Responses API."""
    sent: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            sent.append({"type": "function_call_output", **output})
            continue
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        content = [{"type": kind, "text": message["content"]}]
        sent.append({"type": "message", "role": message["role"], "content": content})
        for call in message.get("tool_calls", ()):
            sent.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return sent


def gym_row(number: int) -> Message:
    messages = talk(number)
    request = {"input": items(messages[:2]), "tools": [{"type": "function", **TOOL}]}
    return {
        "responses_create_params": request,
        "response": {"model": "m", "output": items(messages[2:])},
        "reward": 1.0,
    }


def mapped_row(number: int) -> Message:
    renamed = [
        {"who": m["role"], "said": m["content"], "calls": m.get("tool_calls"), "of": m.get("tool_call_id")}
        for m in talk(number)
    ]
    return {"a": {"talk": renamed}}


def simulation(number: int) -> Message:
    messages: list[Message] = []
    for m in talk(number)[1:]:
        message: Message = {"role": m["role"], "content": m["content"], "timestamp": TIME}
        if m["role"] == "tool":
            message |= {"id": m["tool_call_id"], "requestor": "assistant", "error": False}
        message["tool_calls"] = [
            {"id": c["id"], "name": "bash", "arguments": arguments(c), "requestor": "assistant"}
            for c in m.get("tool_calls", ())
        ]
        messages.append(message)
    return {"id": f"s{number}", "task_id": str(number), "termination_reason": "user_stop", "messages": messages}


def codex_lines(number: int) -> list[Message]:
    payloads = [("session_meta", {"id": f"s{number}", "cwd": "/x/pier"})]
    payloads += [("response_item", item) for item in items(talk(number))]
    return [{"timestamp": TIME, "type": kind, "payload": payload} for kind, payload in payloads]


def claude_lines(number: int) -> list[Message]:
    lines: list[Message] = []
    for m in talk(number)[1:]:
        role, content = "user", m["content"]
        facts: Message = {}
        if m["role"] == "assistant":
            role, facts = "assistant", {"id": f"m{number}-{len(lines)}", "model": "x", "usage": {"output_tokens": 30}}
            uses = [{"id": c["id"], "name": "Bash", "input": arguments(c)} for c in m["tool_calls"]]
            content = [{"type": "text", "text": m["content"]}, *({"type": "tool_use", **use} for use in uses)]
        elif m["role"] == "tool":
            content = [{"type": "tool_result", "tool_use_id": m["tool_call_id"], "content": m["content"]}]
        for block in content if role == "assistant" else [content]:
            parent = lines[-1]["uuid"] if lines else None
            message = {"role": role, "content": [block] if role == "assistant" else block, **facts}
            ids = {"uuid": f"{number}-{len(lines)}", "parentUuid": parent, "sessionId": f"s{number}", "timestamp": TIME}
            lines.append({"type": role, **ids, "cwd": "/x/pier", "isSidechain": False, "message": message})
    return lines


def qwen_lines(number: int) -> list[Message]:
    lines: list[Message] = []
    for m in talk(number)[1:]:
        kind, parts = ("assistant" if m["role"] == "assistant" else "user"), [{"text": m["content"]}]
        if m["role"] == "tool":
            response = {"id": m["tool_call_id"], "name": "bash", "response": {"output": m["content"]}}
            kind, parts = "tool_result", [{"functionResponse": response}]
        calls = [{"id": c["id"], "name": "bash", "args": arguments(c)} for c in m.get("tool_calls", ())]
        parts += [{"functionCall": call} for call in calls]
        ids = {"uuid": f"{len(lines)}", "parentUuid": lines[-1]["uuid"] if lines else None, "sessionId": f"s{number}"}
        lines.append({**ids, "type": kind, "timestamp": TIME, "cwd": "/x", "message": {"role": kind, "parts": parts}})
    return lines


def gemini_document(number: int) -> list[Message]:
    messages: list[Message] = []
    for i, m in enumerate(talk(number)[1:]):
        if m["role"] == "tool":
            response = {"id": m["tool_call_id"], "name": "bash", "response": {"output": m["content"]}}
            messages[-1]["toolCalls"][0]["result"] = [{"functionResponse": response}]
            continue
        kind = "gemini" if m["role"] == "assistant" else "user"
        calls = [{"id": c["id"], "name": "bash", "args": arguments(c)} for c in m.get("tool_calls", ())]
        messages.append({"id": str(i), "type": kind, "content": m["content"], "timestamp": TIME, "toolCalls": calls})
    return [{"sessionId": f"s{number}", "projectHash": "h", "messages": messages}]


def batch_files(folder: Path, runs: int) -> None:
    """Write requests of chat completions, and their answers beside them."""
    messages = [talk(number) for number in range(runs)]
    url = {"method": "POST", "url": "/v1/chat/completions"}
    requests = [
        {"custom_id": f"r{i}", **url, "body": {"model": "m", "messages": m[:-1]}} for i, m in enumerate(messages)
    ]
    answers = ({"model": "m", "choices": [{"message": m[-1], "finish_reason": "stop"}]} for m in messages)
    write_lines(folder / "in.jsonl", requests)
    write_lines(folder / "out.jsonl", [{"custom_id": f"r{i}", "response": {"body": b}} for i, b in enumerate(answers)])


def openhands_row(number: int) -> Message:
    return {"history": talk(number), "instance_id": f"a__b-{number}"}


def step_document(number: int) -> list[Message]:
    steps: list[Message] = []
    for m in talk(number):
        if m["role"] == "tool":
            steps[-1]["observation"] = {"results": [{"source_call_id": m["tool_call_id"], "content": m["content"]}]}
            continue
        source = "agent" if m["role"] == "assistant" else m["role"]
        calls = [
            {"tool_call_id": c["id"], "function_name": "bash", "arguments": arguments(c)}
            for c in m.get("tool_calls", ())
        ]
        steps.append({"source": source, "message": m["content"], "timestamp": TIME, "tool_calls": calls})
    return [{"schema_version": "ATIF-v1.7", "agent": {"name": "a", "model_name": "m"}, "steps": steps}]


def cooperbench_runs(folder: Path, runs: int) -> None:
    """Write folders of one agent, whose messages are flattened to text, a message for each block."""
    for number in range(runs):
        messages: list[Message] = []
        for m in talk(number)[1:]:
            mark = "[tool_result] " if m["role"] == "tool" else ""
            messages.append({"role": "user" if mark else m["role"], "content": mark + m["content"]})
            for call in m.get("tool_calls", ()):
                text = f"[tool_use Bash] {call['function']['arguments']}"
                messages.append({"role": "assistant", "content": text})
        run = folder / f"r/coop/pier/{number}/f1_f2"
        head = {"repo": "pier", "task_id": number, "agent_id": "agent1", "status": "Submitted"}
        write_lines(run / "agent1_traj.json", [{**head, "messages": messages}])
        write_lines(run / "result.json", [{"repo": "pier", "task_id": number, "agents": {"agent1": {}}}])
        write_lines(run / "eval.json", [{"both_passed": number % 2 == 0}])


def inspect_log(runs: int) -> list[Message]:
    samples = [{"id": i, "epoch": 1, "messages": talk(i), "scores": {"a": {"value": "C"}}} for i in range(runs)]
    return [{"eval": {"task": "t", "model": "m"}, "status": "success", "samples": samples}]


def tau_results(runs: int) -> list[Message]:
    info = {"environment_info": {"domain_name": "air", "policy": "p"}}
    return [{"info": info, "tasks": [], "simulations": [simulation(i) for i in range(runs)]}]


def write_lines(path: Path, lines: Sequence[Message]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def rows(name: str, row: Callable[[int], Message]) -> Callable[[Path, int], None]:
    return lambda folder, runs: write_lines(folder / name, [row(number) for number in range(runs)])


def files(name: str, lines: Callable[[int], list[Message]]) -> Callable[[Path, int], None]:
    def write(folder: Path, runs: int) -> None:
        for number in range(runs):
            write_lines(folder / name.format(number), lines(number))

    return write


def listed(lists: str, role: str, content: str, calls: str) -> str:
    """Return the SQL for the messages of documents: a row for each item of a list."""
    items = f"SELECT rid, generate_subscripts({lists}, 1) AS idx, unnest({lists}) AS m FROM docs"
    return f"SELECT rid, idx, {role} AS role, {content} AS content, {calls} AS calls FROM ({items})"


def of_lines(role: str, content: str, calls: str, where: str = "true") -> str:
    """Return the SQL for the messages of files of lines: a row for each line."""
    return (
        f"SELECT filename AS rid, rid AS idx, {role} AS role, {content} AS content, {calls} AS calls "
        f"FROM docs WHERE {where}"
    )


CALLS = "to_json(m.tool_calls)"
CHAT = ("m.role", "m.content", CALLS)
ITEM = "coalesce({0}.role, if({0}.type = 'function_call', 'assistant', 'tool'))"
TEXT = "coalesce({0}.content[1].text, {0}.output)"
ITEM_CALLS = "if({0}.type = 'function_call', to_json({{'name': {0}.name, 'arguments': {0}.arguments}}), NULL)"


@dataclass(frozen=True)
class Case:
    """A writer of runs in a format, and the SQL for (rid, idx, role, content, calls) of their messages."""

    write: Callable[[Path, int], None]
    sql: str
    glob: str = "*"


def responses(lists: str) -> str:
    return listed(lists, *(text.format("m") for text in (ITEM, TEXT, ITEM_CALLS)))


CASES: dict[str, Case] = {
    "messages": Case(rows("t.jsonl", chat_row), listed("messages", *CHAT)),
    "sharegpt": Case(
        rows("t.jsonl", sharegpt_row),
        listed(
            "conversations",
            "if(m.from IN ('gpt', 'function_call'), 'assistant', m.from)",
            "m.value",
            "if(m.from = 'function_call', m.value, NULL)",
        ),
    ),
    "trl": Case(rows("t.jsonl", trl_row), listed("list_concat(prompt, completion)", *CHAT)),
    "verifiers": Case(
        rows("traces.jsonl", trace_row),
        listed("nodes", "m.message.role", "m.message.content", "to_json(m.message.tool_calls)"),
    ),
    "nemo_gym": Case(
        rows("t.jsonl", gym_row), responses("list_concat(responses_create_params.input, response.output)")
    ),
    "mapped": Case(rows("t.jsonl", mapped_row), listed("a.talk", "m.who", "m.said", "to_json(m.calls)")),
    "openhands": Case(rows("t.jsonl", openhands_row), listed("history", *CHAT)),
    "inspect": Case(
        lambda folder, runs: write_lines(folder / "log.json", inspect_log(runs)),
        "WITH s AS (SELECT unnest(samples) AS s FROM docs), docs AS (SELECT row_number() OVER () AS rid, s FROM s) "
        + listed("s.messages", *CHAT),
    ),
    "tau2": Case(
        lambda folder, runs: write_lines(folder / "results.json", tau_results(runs)),
        "WITH s AS (SELECT unnest(simulations) AS s FROM docs), docs AS (SELECT row_number() OVER () AS rid, s FROM s) "
        + listed("s.messages", *CHAT),
    ),
    "openai_batch": Case(
        batch_files,
        "WITH a AS (SELECT custom_id, response.body.choices[1].message AS m FROM docs WHERE response IS NOT NULL), "
        "q AS (SELECT d.rid, d.body.messages AS messages, a.m AS last FROM docs d JOIN a USING (custom_id) "
        "WHERE d.body IS NOT NULL), "
        "asked AS (SELECT rid, generate_subscripts(messages, 1) AS idx, unnest(messages) AS m FROM q) "
        "SELECT rid, idx, if(m.role = 'assistant', 'context', m.role) AS role, m.content AS content, "
        "to_json(m.tool_calls) AS calls FROM asked "
        "UNION ALL SELECT rid, 1000000, last.role, last.content, NULL FROM q",
    ),
    "codex": Case(
        files("rollout-{}.jsonl", codex_lines),
        of_lines(*(text.format("payload") for text in (ITEM, TEXT, ITEM_CALLS)), where="type = 'response_item'"),
    ),
    "claude_code": Case(
        files("s{}.jsonl", claude_lines),
        of_lines("message.role", "message.content::VARCHAR", "if(type = 'assistant', message.content::VARCHAR, NULL)"),
    ),
    "qwen_code": Case(
        files("s{}.jsonl", qwen_lines),
        of_lines(
            "type",
            "coalesce(message.parts[1].text, message.parts[1].functionResponse.response.output)",
            "to_json(message.parts[2].functionCall)",
        ),
    ),
    "gemini_cli": Case(
        files("session-{}.json", gemini_document),
        "WITH m AS ("
        + listed("messages", "m.type", "m.content", "m.toolCalls")
        + ") SELECT rid, idx * 2 AS idx, if(role = 'user', role, 'assistant') AS role, content, "
        "to_json(calls) AS calls FROM m "
        "UNION ALL SELECT rid, idx * 2 + 1, 'tool', calls[1].result[1].functionResponse.response.output, NULL "
        "FROM m WHERE len(calls) > 0",
    ),
    "atif": Case(
        files("t{}.json", step_document),
        "WITH m AS ("
        + listed("steps", "m.source", "m.message", "struct_pack(c := m.tool_calls, o := m.observation)")
        + ") SELECT rid, idx * 2 AS idx, if(role = 'agent', 'assistant', role) AS role, content, "
        "to_json(calls.c) AS calls FROM m "
        "UNION ALL SELECT rid, idx * 2 + 1, 'tool', calls.o.results[1].content, NULL FROM m "
        "WHERE calls.o IS NOT NULL",
    ),
    "mini_swe_agent": Case(
        files("t{}.traj.json", lambda number: [{"info": {"exit_status": "Submitted"}, "messages": talk(number)}]),
        listed("messages", *CHAT),
    ),
    "swe_agent": Case(
        files("t{}.traj", lambda number: [{"info": {"exit_status": "submitted"}, "history": talk(number)}]),
        listed("history", *CHAT),
    ),
    "cooperbench": Case(cooperbench_runs, listed("messages", "m.role", "m.content", "NULL"), "**/*_traj.json"),
}
"""Not here: single turns (`verl`, `tito`), `harbor`, whose trials hold files of `atif`, `r2e_gym`, `capture`."""


def ours(format: str, folder: Path, lake: Path) -> tuple[float, int]:
    """Import the runs; return the CPU seconds and the number of turns."""
    shutil.rmtree(lake, ignore_errors=True)
    before = time.process_time()
    opened = Lake(lake)
    options = {"map": MAP} if format == "mapped" else {}
    imported = import_in_bulk(ImportSource(format, str(folder), options, "bench", None), opened.scratch("i"), hashes={})
    ref = Ref("raw_rollouts", "rollout_set", "bench")
    counts = opened.publish(ref, imported.tables, input_key="bench", inputs={}, spec_hash="bench").rows
    seconds = time.process_time() - before
    assert counts["quarantined"] == 0 and counts["rollouts"] == imported.total, counts
    return seconds, counts["turns"]


def read_json(folder: Path, case: Case) -> str:
    options = "union_by_name = true, filename = true, maximum_object_size = 2000000000"
    return f"read_json('{folder}/{case.glob}', {options})"


ZSTD = "(FORMAT parquet, COMPRESSION zstd)"


def theirs(case: Case, folder: Path, out: Path) -> tuple[float, int]:
    """Read the files and write the tables with DuckDB; return the CPU seconds and the number of turns."""
    before = time.process_time()
    with duckdb.connect() as connection:
        for statement in statements(case, folder, out):
            connection.execute(statement)
        (turns,) = connection.execute(f"SELECT count(*) FROM '{out}/turns.parquet'").fetchone() or (0,)
    return time.process_time() - before, turns


def statements(case: Case, folder: Path, out: Path) -> Iterator[str]:
    yield "SET threads = 1"
    yield f"CREATE TEMP TABLE docs AS SELECT row_number() OVER () AS rid, * FROM {read_json(folder, case)}"
    said = f"SELECT *, role = 'assistant' AS spoke FROM ({case.sql})"
    # Messages of the assistant in a row are one turn.
    starts = "spoke AND NOT coalesce(lag(spoke) OVER (PARTITION BY rid ORDER BY idx), false)"
    started = f"SELECT *, {starts} AS starts FROM ({said})"
    number = "sum(starts::INT) OVER (PARTITION BY rid ORDER BY idx) - 1"
    yield f"CREATE TEMP TABLE said AS SELECT *, {number} AS turn FROM ({started})"
    messages = "SELECT rid, idx, role, content, calls, turn FROM said ORDER BY rid, idx"
    yield f"COPY ({messages}) TO '{out}/messages.parquet' {ZSTD}"
    texts = "string_agg(content, '\n' ORDER BY idx)"
    yield (
        f"COPY (SELECT rid, turn, {texts} FILTER (spoke) AS content, {texts} FILTER (NOT spoke) AS observation, "
        "string_agg(calls, ',' ORDER BY idx) FILTER (spoke) AS actions FROM said WHERE turn >= 0 GROUP BY rid, turn "
        f"ORDER BY rid, turn) TO '{out}/turns.parquet' {ZSTD}"
    )
    yield f"COPY (SELECT rid, max(turn) + 1 AS turns FROM said GROUP BY rid) TO '{out}/agents.parquet' {ZSTD}"


def alone(case: Case, folder: Path, out: Path) -> float:
    """Return the CPU seconds in which DuckDB reads the files and writes what it read."""
    before = time.process_time()
    with duckdb.connect() as connection:
        connection.execute("SET threads = 1")
        connection.execute(f"COPY (SELECT * FROM {read_json(folder, case)}) TO '{out}/alone.parquet' {ZSTD}")
    return time.process_time() - before


def measure(format: str, case: Case, runs: int, rounds: int, place: Path) -> None:
    folder, lake, out = place / format, place / "lake", place / "duckdb"
    folder.mkdir()
    out.mkdir(exist_ok=True)
    case.write(folder, runs)
    size = sum(file.stat().st_size for file in folder.rglob("*.*")) / 1e6
    ours(format, folder, lake)  # it imports modules
    results = [(ours(format, folder, lake), theirs(case, folder, out), alone(case, folder, out)) for _ in range(rounds)]
    (_, turns), (_, their_turns), _ = results[0]
    assert turns == their_turns, f"{format}: {turns} turns here, {their_turns} in DuckDB"
    mine, tables, only = (min(column) for column in zip(*((m[0], t[0], a) for m, t, a in results), strict=True))
    print(
        f"{format:15} {size:5.1f} MB {turns:6} turns  etpi {mine:5.2f} s  DuckDB {tables:5.2f} s, alone {only:5.2f} s  "
        f"ratio {mine / tables:4.2f}, alone {mine / only:4.2f}",
        flush=True,
    )
    shutil.rmtree(folder)


def peak() -> float:
    """Return the peak resident memory in MB of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _write(format: str, folder: Path, runs: int) -> None:
    CASES[format].write(folder, runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help="by default all that have a case")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    os.environ["ETPI_WORKERS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        for format in options.formats or CASES:
            if not options.memory:
                measure(format, CASES[format], options.runs, options.rounds, Path(folder))
                continue
            for runs in (options.runs // 8, options.runs):
                place = Path(folder) / f"{format}{runs}"
                place.mkdir()
                writer = multiprocessing.Process(target=_write, args=(format, place, runs))  # its memory is not ours
                writer.start()
                writer.join()
                _, turns = ours(format, place, Path(folder) / "lake")
                print(f"{format:15} {turns:6} turns: peak {peak():.0f} MB", flush=True)
    print("1-minute load", round(os.getloadavg()[0], 1))


if __name__ == "__main__":
    print(machine(), flush=True)
    main()
