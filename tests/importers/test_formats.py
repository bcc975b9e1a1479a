"""Formats as data: what each public shape is read as, what is counted as unread, and formats of a user's own."""

from __future__ import annotations

import ast
import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from etpi_assets.agent.actions import NO_ACTION
from etpi_assets.importers import IMPORTERS, count_found, import_runs
from etpi_assets.importers.account import Account, findings
from etpi_assets.importers.bulk import ImportSource, import_in_bulk
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.trajectories.records import RolloutRecord
from tests.support import sessions
from tests.support.recorded_runs import bare_list
from tests.support.rows import (
    atif_document,
    autogen_state,
    bedrock_row,
    chat,
    completion_row,
    detect,
    goose_lines,
    openhands_row,
    openhands_typed_row,
    taubench_row,
    tool,
    vercel_row,
    vibe_rows,
    write_lines,
)

USER, ANSWER = {"role": "user", "content": "Moor?"}, {"role": "assistant", "content": "Moored."}
TALK = [("user", None, "Moor?"), ("assistant", 0, "Moored.")]
TURNS = [
    ("user", None, "Moor the boat."),
    ("assistant", 0, "I look."),
    ("tool", 0, "moor.py"),
    ("assistant", 1, "Moored."),
]


def langchain(name: str, text: str) -> dict[str, Any]:
    """LangChain: a message as `dumpd` writes it."""
    of = {"HumanMessage": "human", "AIMessage": "ai"}[name]
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", name],
            "kwargs": {"content": text, "type": of, "id": "m1"}}  # fmt: skip


def talk(item: Any) -> list[tuple[str, int | None, str]]:
    assert isinstance(item, RolloutRecord), item
    return [(m.role, m.turn, m.content) for m in item.agents[0].messages if m.role != "system"]


def read(path: Path, **options: Any) -> list[Any]:
    items = list(import_runs("auto", path, options))
    assert count_found("auto", path) == len(items)
    return items


def unread(tmp_path: Path, rows: list[Any], **options: Any) -> dict[str, tuple[str, bool]]:
    account = Account()
    list(import_runs("auto", write_lines(tmp_path / "a.jsonl", rows), options, account))
    return {each.name: (each.kind, each.stops) for each in findings(account.figures())}


@pytest.mark.parametrize(
    ("format", "rows", "turns", "facts"),
    [
        ("vercel_ai", [vercel_row()], TURNS, ("a.jsonl, row 0", None, None)),
        ("vercel_ai", vercel_row()["messages"], TURNS, ("a.jsonl, row 0", None, None)),
        ("bedrock", [bedrock_row()], TURNS, ("a.jsonl, row 0", None, "helmsman-2")),
        ("mistral_vibe", vibe_rows(), TURNS, ("a.jsonl, row 0", None, None)),
        ("completion_log", [completion_row()], TURNS[:2], ("a.jsonl, row 0", None, "helmsman-2")),
        ("completion_log", [{"messages": chat()[:2], "response": "Moored."}], [TURNS[0], ("assistant", 0, "Moored.")],
         ("a.jsonl, row 0", None, None)),
        ("taubench", [taubench_row()], [*TURNS, ("user", 1, "Moor the boat."), ("assistant", 2, "Moored.")],
         ("a.jsonl:3", 1.0, None)),
        ("completion_log", [{"id": "o7", "input": {"messages": [USER], "tools": []}, "output": ANSWER, "model": "m"}],
         TALK, ("o7", None, "m")),
        ("completion_log", [{"input": [USER], "output": ANSWER}], TALK, ("a.jsonl, row 0", None, None)),
        ("completion_log", [{"attributes": {"llm": {"input_messages": [{"message": USER}], "model_name": "m",
                                                    "output_messages": [{"message": ANSWER}]}}}],
         TALK, ("a.jsonl, row 0", None, "m")),
        ("goose", goose_lines(), TURNS, ("a.jsonl, row 1", None, None)),
        ("goose", [{"working_dir": "/x", "conversation": goose_lines()[1:]}], TURNS, ("a.jsonl, row 0", None, None)),
        ("autogen", [autogen_state()], [TURNS[0], ("assistant", 0, ""), *TURNS[2:]], ("a.jsonl, row 0", None, None)),
        ("messages", [{"turns": [USER, ANSWER], "score": 0.5}], TALK, ("a.jsonl, row 0", 0.5, None)),
        ("messages", [{"conversation": [USER, {**ANSWER, "role": "agent"}], "item_id": "quay_3"}], TALK,
         ("quay_3", None, None)),
        ("sharegpt", [{"conversation": [{"from": "human", "value": "Moor?"}, {"from": "bot", "value": "Moored."}],
                       "item_id": 4}], TALK, ("a.jsonl:4", None, None)),
        ("messages", [{"messages": [langchain("HumanMessage", "Moor?"), langchain("AIMessage", "Moored.")]}], TALK,
         ("a.jsonl, row 0", None, None)),
        ("messages", [chat()], TURNS, ("a.jsonl, row 0", None, None)),
        ("sharegpt", [{"from": "human", "value": "Moor the boat."}, {"from": "gpt", "value": "Moored."}],
         [TURNS[0], ("assistant", 0, "Moored.")], ("a.jsonl, row 0", None, None)),
    ],
)  # fmt: skip
def test_rows_of_a_format_are_read_as_these_turns(
    tmp_path: Path, format: str, rows: Any, turns: Any, facts: Any
) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert detect(path) == format
    (item,) = [item for item in read(path) if getattr(item, "reason", "") != "not_a_rollout"]
    assert talk(item) == turns
    assert (item.task_id, (item.outcome or {}).get("reward"), item.teacher) == facts
    assert all(turn.parse_error is None for turn in item.agents[0].turns)


@pytest.mark.parametrize("rows", [[vercel_row()], [bedrock_row()]])
def test_calls_and_schemas_of_every_format_have_the_normal_form(tmp_path: Path, rows: Any) -> None:
    (item,) = read(write_lines(tmp_path / "a.jsonl", rows))
    (call,) = item.agents[0].messages[-3].tool_calls
    assert call == {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    assert all(schema["function"]["parameters"] == {"type": "object"} for schema in item.tools or ())


def test_object_that_a_tool_returned_is_json_unless_it_shows_media(tmp_path: Path) -> None:
    call = {**ANSWER, "content": None, "tool_call": {"name": "look", "arguments": {"at": "quay"}}}
    rows = [
        {"messages": [USER, call, {"role": "tool", "content": held}, ANSWER]}
        for held in ({"depth": 3}, {"image": "a.png"})
    ]
    item, refused = read(write_lines(tmp_path / "a.jsonl", rows))
    assert talk(item)[1:3] == [("assistant", 0, ""), ("tool", 0, '{"depth": 3}')]
    assert item.agents[0].messages[1].tool_calls[0]["function"] == {"name": "look", "arguments": {"at": "quay"}}
    assert refused.reason == "non_text_content"


def test_task_and_instructions_in_a_row_of_tau_bench_stop_no_import(tmp_path: Path) -> None:
    info = {"task": {"instruction": "You are Mia, and want to moor.", "outputs": []}, "reward_info": {"r_actions": 1.0}}
    rows = [{**taubench_row(), "info": {**info, "ok": n % 2 == 0}, "task_id": n} for n in range(4)]
    assert unread(tmp_path, rows) == {}


SCHEMA = tool("run", cmd="string")
FLAT = {"name": "run", "parameters": SCHEMA["function"]["parameters"]}


@pytest.mark.parametrize(
    "tools",
    [
        [FLAT],
        {"run": FLAT},
        {"run": {"parameters": FLAT["parameters"]}},
        {"run": {"function": FLAT}},
        [{"toolSpec": {"name": "run", "inputSchema": {"json": FLAT["parameters"]}}}],
        {"functions": [FLAT]},
        json.dumps([SCHEMA]),
        [json.dumps(FLAT)],
        [{"type": "function", "strict": None, **FLAT}],
        [{"name": "run", "inputSchema": FLAT["parameters"]}],
        [{"name": "run", "args_schema": FLAT["parameters"]}],
        [{"type": "function", "function": {"name": "run", "signature": FLAT["parameters"]}}],
        [{"name": "run", "input_schema": FLAT["parameters"], "cache_control": {"type": "ephemeral"}}],
        [{"functionDeclarations": [FLAT]}],
        [FLAT, {"type": "web_search"}, {"google_search": {}}],
    ],
)
def test_every_shape_of_schemas_is_offered_as_chat_clients_send_them(tmp_path: Path, tools: Any) -> None:
    (item,) = read(write_lines(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER], "tools": tools}]))
    assert item.tools == [SCHEMA]


@pytest.mark.parametrize("key", ["tool_spec", "definition"])
def test_schema_under_a_key_that_no_path_reads_is_refused(tmp_path: Path, key: str) -> None:
    (item,) = read(write_lines(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER], "tools": [{key: FLAT}]}]))
    assert isinstance(item, RejectedInput) and item.reason == "unknown_form" and key in item.detail


@pytest.mark.parametrize("key", ["message", "data"])
def test_message_within_an_object_of_its_own_is_read(tmp_path: Path, key: str) -> None:
    (item,) = read(write_lines(tmp_path / "a.jsonl", [{"messages": [{"at": 1, key: m} for m in chat()]}]))
    assert talk(item) == TURNS


@pytest.mark.parametrize(
    ("columns", "reward"),
    [
        *(({key: value}, want) for key in ("is_resolved", "passed", "verified", "solved") for value, want in
          ((False, 0.0), ("True", 1.0), (1, 1.0))),
        ({"report": {"resolved": False}}, 0.0), ({"eval": json.dumps({"resolved": True})}, 1.0),
        ({"rewards": {"total": 0.5}}, 0.5), ({"resolved_status": "RESOLVED_NO"}, 0.0),
        ({"outcome": "passed"}, 1.0), ({"metadata": {"passed": False}}, 0.0),
        ({"label": "bird"}, None), ({"label": True}, 1.0), ({"kto_tag": 1}, None),
    ],
)  # fmt: skip
def test_verdicts_are_rewards_under_every_usual_name(tmp_path: Path, columns: Any, reward: float | None) -> None:
    (item,) = read(write_lines(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER], **columns}]))
    assert (item.outcome or {}).get("reward") == reward


@pytest.mark.parametrize(
    ("task", "repo"),
    [
        ("pier__moor-12_0", "pier/moor"), ("pier__moor-12-attempt3", "pier/moor"),
        ("pier__moor-12__run_2", "pier/moor"),
        ("runs/pier__moor-sail-12", "pier/moor-sail"), ("pier__moor-12.run1", "pier/moor"),
        ("pier__moor-12x", "unknown"),
        ("pier-12", "unknown"),
    ],
)  # fmt: skip
def test_repository_of_an_id_with_an_attempt(tmp_path: Path, task: str, repo: str) -> None:
    (item,) = read(write_lines(tmp_path / "a.jsonl", [{"instance_id": task, "messages": [USER, ANSWER]}]))
    assert item.repo == repo


@pytest.mark.parametrize(
    ("status", "kept", "error"),
    [("completed", "Submitted", None), ("success", "Submitted", None), ("RateLimitError", "RateLimitError", NO_ACTION)],
)
@pytest.mark.parametrize("key", ["exit_status", "termination_reason", "stop_reason"])
def test_answer_in_words_ends_a_run_whose_status_says_that_it_ended(
    tmp_path: Path, key: str, status: str, kept: str, error: str | None
) -> None:
    (item,) = read(write_lines(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER], key: status}]))
    assert (item.agents[0].exit_status, item.agents[0].turns[0].parse_error) == (kept, error)


def test_numbers_are_tasks_of_their_file_and_of_their_prompt(tmp_path: Path) -> None:
    """Shards that count from 0 have other questions; samples of one question share its number."""
    rows = [{"index": i % 2, "messages": [{"role": "user", "content": f"q{i % 2}"}, ANSWER]} for i in range(4)]
    other = [{"index": 0, "messages": [{"role": "user", "content": "other"}, ANSWER]}]
    write_lines(tmp_path / "a.jsonl", rows + other)
    write_lines(tmp_path / "b.jsonl", other)
    tasks = [item.task_id for item in read(tmp_path)]
    assert tasks == ["a.jsonl:0", "a.jsonl:1", "a.jsonl:0", "a.jsonl:1", "a.jsonl:0#4", "b.jsonl:0"]


@pytest.mark.parametrize("bad", [{}, {"type": "header", "version": 1}, {"messages": None}, [1], 3])
def test_first_row_that_is_no_run_is_quarantined_alone(tmp_path: Path, bad: Any) -> None:
    path = write_lines(tmp_path / "a.jsonl", [bad, *({"messages": [USER, ANSWER]} for _ in range(3))])
    items = read(path)
    assert [isinstance(item, RejectedInput) for item in items] == [True, False, False, False]
    assert items[0].row == 0
    path.write_text('{"messages": [{"role"\n' + path.read_text())
    assert [getattr(item, "reason", "read") for item in read(path)][0] == "truncated_json"


def test_each_row_goes_to_the_format_that_claims_it(tmp_path: Path) -> None:
    rows = [
        {"messages": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ]
    for number, order in enumerate((rows, rows[::-1])):
        assert len([talk(item) for item in read(write_lines(tmp_path / f"{number}.jsonl", order))]) == 2


def test_every_file_of_a_folder_is_read_by_its_format_or_listed(tmp_path: Path) -> None:
    write_lines(tmp_path / "runs.jsonl", [{"messages": [USER, ANSWER]}] * 3)
    (tmp_path / "x.traj.json").write_text(json.dumps(chat()))
    (tmp_path / "settings.json").write_text('{"x": 1}')
    (tmp_path / "odd.json").write_text(json.dumps([{"talk": [{"who": "me", "role": "x"}]}]))
    (tmp_path / "readme.md").write_text("no rows")
    items = read(tmp_path)
    fates = {item.source: getattr(item, "reason", "read") for item in items}
    assert detect(tmp_path) == "messages+mini_swe_agent"
    assert fates == {
        **{f"runs.jsonl#{i}": "read" for i in range(3)},
        "x.traj.json": "read",
        "settings.json": "not_a_rollout",
        "odd.json": "unknown_form",
    }
    source = ImportSource("auto", str(tmp_path), {}, "s", None)
    created = import_in_bulk(source, tmp_path.parent / "spill", hashes={}, workers=1)
    rows = {name: [row for batch in batches for row in batch.to_pylist()] for name, batches in created.tables.items()}
    assert created.total == 6 == len(rows["rollouts"]) + len(rows["quarantined"])
    (named,) = [item for item in import_runs("mini_swe_agent", tmp_path) if isinstance(item, RolloutRecord)]
    assert named.source == "x.traj.json" and count_found("mini_swe_agent", tmp_path) == 4


def test_messages_of_several_conversations_a_line_are_grouped_by_their_id(tmp_path: Path) -> None:
    lines = [
        {**m, "session_id": name}
        for pair in ([USER, USER], [ANSWER, ANSWER])
        for m, name in zip(pair, "ab", strict=True)
    ]
    assert [talk(item) for item in read(write_lines(tmp_path / "a.jsonl", lines))] == [
        [("user", None, "Moor?"), ("assistant", 0, "Moored.")]
    ] * 2


def row(message: Any = None, **columns: Any) -> dict[str, Any]:
    return {"messages": [USER, {**ANSWER, **(message or {})}], **columns}


@pytest.mark.parametrize(
    ("rows", "name", "kind", "stops"),
    [
        ([row({"remark": "Please look at this again"})], "message.remark", "text", True),
        ([row({"toolUses": [{"name": "ls", "input": {"path": "."}}]})], "message.toolUses", "calls", True),
        ([row({"picture": "data:image/png;base64,aa"})], "message.picture", "media", True),
        ([row({"learnable": False}), row({"learnable": True})], "message.learnable", "flag", True),
        ([row({"skip_loss": True})], "message.skip_loss", "loss", True),
        ([row({"files": [{"url": "https://x.y/a.png", "size": 3}]})], "message.files", "media", True),
        ([row(reply={"role": "assistant", "content": "Sailed."})], "reply", "messages", True),
        ([row(said=[USER, {"role": "assistant", "content": "Sailed."}])], "said", "messages", True),
        ([row({"tone": "calm"})], "message.tone", "other", False),
        ([row({"latency": 3.5})], "message.latency", "number", False),
        ([row(screenshot="a.png")], "screenshot", "media", True),
        ([row(persona="You are a sailor of many years")], "persona", "system", True),
        ([row(tests_ok=True), row(tests_ok=False)], "tests_ok", "flag", True),
        ([row(tests_ok=True, reward=1), row(tests_ok=False, reward=0.5)], "tests_ok", "flag", True),
        ([row(all_passed=True, reward=1), row(all_passed=False)], "all_passed", "verdict", True),
        ([row(all_passed=True, reward=1), row(all_passed=False, reward=0.5)], "all_passed", "verdict", False),
        ([row(judge_failed=False, resolved=True)], "judge_failed", "verdict", False),
        ([row(developer_prompt="Be short with sailors")], "developer_prompt", "system", True),
        ([row(end_state="done"), row(end_state="crashed")], "end_state", "exit", True),
        ([row(info={"end_note": "Reached the step limit."})], "info.end_note", "exit", True),
        ([row(end_state="done")], "end_state", "exit", False),
        ([row(remark="crashed")], "remark", "other", False),
        ([row(summary="The boat was moored at noon")], "summary", "text", False),
        ([row(outcome="odd")], "outcome", "verdict", False),
        ([row(cost=0.3)], "cost", "number", False),
        ([row(extra_facts={"weather": "the wind was too strong"})], "extra_facts.weather", "text", False),
    ],
)
def test_what_no_path_reads_is_counted_and_stops_where_it_may_change_the_training(
    tmp_path: Path, rows: Any, name: str, kind: str, stops: bool
) -> None:
    found = unread(tmp_path, rows)
    assert found[name][1] == stops and (found[name][0] == kind or not stops)
    assert name not in unread(tmp_path, rows, ignore=[name])
    source = ImportSource("auto", str(tmp_path / "a.jsonl"), {}, "s", None)
    if stops:
        with pytest.raises(ValueError, match=re.escape(f'options.ignore = ["{name}"]')):
            import_in_bulk(source, tmp_path / "spill", hashes={}, workers=1)
    else:
        assert import_in_bulk(source, tmp_path / "spill", hashes={}, workers=1).total == len(rows)


EVENTS = {
    "claude_code": sessions.claude_session,
    "codex": sessions.codex_session,
    "gemini_cli": sessions.gemini_records,
    "qwen_code": sessions.qwen_session,
    "openhands": lambda: [openhands_row(), openhands_typed_row()],
    "atif": lambda: [atif_document()],
}


@pytest.mark.parametrize("format", EVENTS)
def test_keys_of_a_log_that_no_reader_knows_are_listed_and_stop_nothing(tmp_path: Path, format: str) -> None:
    def listed(lines: list[Any]) -> list[tuple[str, str, bool]]:
        account = Account()
        path = write_lines(tmp_path / ("a.json" if format == "atif" else "a.jsonl"), lines)
        assert any(isinstance(item, RolloutRecord) for item in import_runs(format, path, None, account))
        return [(each.name, each.kind, each.stops) for each in findings(account.figures())]

    lines = EVENTS[format]()
    assert not listed(lines)
    text = json.dumps(lines).replace('"timestamp":', '"plans": "to rest for a while", "timestamp":')
    assert listed(json.loads(text)) == [("event.plans", "text", False)]


def test_rows_that_are_understood_leave_nothing_unread(tmp_path: Path) -> None:
    plain = {
        "messages": chat(),
        "tools": [SCHEMA],
        "instance_id": "x",
        "model": "m",
        "reward": 1,
        "exit_status": "submitted",
    }
    logged = copy.deepcopy(plain)
    logged["messages"][2] |= {
        "id": "m1",
        "usage": {"total_tokens": 3},
        "annotations": [],
        "refusal": None,
        "audio": None,
    }
    again = {**plain, "first": chat()[0], "asked": chat()[:2]}  # messages that were read already
    for rows in (
        [plain],
        [logged],
        [again],
        [vercel_row()],
        [bedrock_row()],
        [taubench_row()],
        vibe_rows(),
        [completion_row()],
    ):
        assert not [name for name, (_, stops) in unread(tmp_path, rows).items() if stops]


@pytest.mark.parametrize(
    "extra",
    [
        {"response": {"choices": [{"message": {"content": "Moored.", "tool_calls": [{}]}, "finish_reason": "stop"}]}},
        {"response": {"choices": [{"finish_reason": "stop"}], "system_fingerprint": "a text of the server's own"}},
        {"token_capture": {"prompt": "the whole prompt once more"}},
    ],
)
def test_a_key_that_a_format_reads_is_read_with_all_below_it(tmp_path: Path, extra: dict[str, Any]) -> None:
    talk = [message | ({"extra": extra} if message["role"] == "assistant" else {}) for message in bare_list()]
    (tmp_path / "fix.traj.json").write_text(json.dumps(talk))
    account = Account()
    (record,) = import_runs("auto", tmp_path, {}, account)
    assert isinstance(record, RolloutRecord) and len(record.agents[0].turns) == 2
    assert not findings(account.figures())
    assert unread(tmp_path, [{"messages": talk}]), "rows of another format are not known to have it"


@pytest.mark.parametrize("key", ["image", "images", "video", "audio"])
def test_media_of_a_message_or_a_row_are_refused(tmp_path: Path, key: str) -> None:
    for bad in (row({key: "a.png"}), row(**{key: ["a.png"]})):
        (item,) = read(write_lines(tmp_path / "a.jsonl", [bad]))
        assert item.reason == "non_text_content"


def test_format_of_the_user_is_a_file_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "specs/formats").mkdir(parents=True)
    file = tmp_path / "specs/formats/log_of_mine.toml"
    file.write_text(
        'claims = [["a.talk"]]\n[run]\nmessages = ["a.talk"]\nreward = ["+", "won"]\n[message]\nrole = ["who"]\n'
        'text = ["said"]\n[roles]\nassistant = ["skipper"]\n'
    )
    monkeypatch.setenv("ETPI_SPECS", str(tmp_path / "specs"))
    rows = [{"a": {"talk": [{"who": "user", "said": "Moor?"}, {"who": "Skipper", "said": "Moored."}]}, "won": "yes"}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert detect(path) == "log_of_mine"
    (item,) = read(path)
    assert talk(item) == [("user", None, "Moor?"), ("assistant", 0, "Moored.")]
    assert item.outcome == {"reward": 1.0, "verdict": "passed"}
    file.write_text('reader = "atif"\n')
    with pytest.raises(ValueError, match=r"log_of_mine.toml.*plugin"):
        detect(path)
    file.write_text("[mesage]\n")
    with pytest.raises(ValueError, match=r"log_of_mine.toml.*mesage.*'message'"):
        detect(path)
    for names in ('assistent = ["skipper"]', 'skipper = "assistant"'):
        file.write_text(f"[roles]\n{names}\n")
        with pytest.raises(ValueError, match=r"log_of_mine.toml: .*roles.\w+ .* assistant = "):
            detect(path)


@pytest.mark.parametrize(
    "spelling",
    ["tool_use_id", "toolCallId", "toolInvocations", "input_schema", "inputSchema", "reasoning_content", "loss_mask",
     "functionDeclarations", "is_resolved", "kto_tag", "chosen_messages", "toolUseId", "functionCall",
     "functionResponse", "function_name", "llm_config", "git_patch", "model_patch"],
)  # fmt: skip
def test_a_spelling_of_rows_stands_in_formats_and_not_in_readers(spelling: str) -> None:
    """Readers of event logs and trees know the keys of their own program; they are named here."""
    own = {"reasoning_content": {"atif", "openhands"}, "tool_use_id": {"atif", "claude_code"}}
    own |= {"loss_mask": {"token_rows"}, "toolUseId": {"claude_code"}}
    folder = Path(__file__).parents[2] / "etpi_assets/importers"
    found = {file.stem for file in folder.glob("*.py") if re.search(rf'"{spelling}"', file.read_text())}
    assert found <= own.get(spelling, set())
    assert sum(spelling in file.read_text() for file in folder.glob("formats/*.toml")) in (1, 2)


def literals(file: Path) -> list[str]:
    """Return the texts in a module's code, without its docstrings."""
    tree = ast.parse(file.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs)
    return [node.value for node in constants if isinstance(node.value, str)]


@pytest.mark.parametrize(
    ("spelling", "places"),
    [
        # `trajectories/calls.py` reads it; CooperBench's reader takes it apart; the others strip or colour a line.
        (r"\\?\[tool_use ", {"trajectories/calls", "importers/cooperbench", "agent/actions", "view/conversation"}),
        (r"\\?\[tool_result", {"curation/student_form", "importers/cooperbench"}),
        # `chat/marks.py` has the tags for all others; the two below list tokens of a vocabulary.
        (r"</think>", {"chat/marks", "chat/tokenizer_files", "tokenizers/qwen3"}),
        (r"execute_bash|run_command", {"tool_forms/call", "importers/openhands"}),
        (r"tool_use_id|toolCallId|toolInvocations|input_schema|inputSchema|functionDeclarations|kto_tag",
         {"importers/atif", "importers/claude_code", "capture/dialects", "exports/conversations", "tool_forms/call"}),
    ],
)  # fmt: skip
def test_a_foreign_spelling_stands_in_these_modules_and_no_other(spelling: str, places: set[str]) -> None:
    root = Path(__file__).parents[2]
    files = [file for package in ("etpi", "etpi_assets", "etpi_resources") for file in (root / package).rglob("*.py")]
    spelled = [file for file in files if re.search(spelling, file.read_text())]
    modules = {f"{f.parent.name}/{f.stem}" for f in spelled if any(re.search(spelling, text) for text in literals(f))}
    assert modules <= places, "read it with the module that knows it, or name it in a format"


def test_formats_of_data_are_formats(tmp_path: Path) -> None:
    names = {file.stem for file in (Path(__file__).parents[2] / "etpi_assets/importers/formats").glob("*.toml")}
    assert names <= set(IMPORTERS)
