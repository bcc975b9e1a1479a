"""Formats with a rollout a row or a document: what arrives, what is refused and why, and that the account is whole."""

from __future__ import annotations

import copy
import gzip
import json
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etpi_assets.importers import IMPORTERS, count_found, import_runs
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.tables import from_tables, to_tables
from etpi_resources.chat.format import load_chat_format
from tests.support.fuzz import JUNK, places, replaced
from tests.support.rows import (
    OTHERS,
    ROWS,
    atif_document,
    autogen_state,
    chat,
    detect,
    goose_lines,
    messages_row,
    openhands_row,
    openhands_typed_row,
    r2e_row,
    sharegpt_row,
    trial,
    trl_row,
    verl_row,
    vibe_rows,
    write_lines,
    write_parquet,
)
from tests.support.sessions import FILES


def only(path: Path, format: str = "auto", **options: Any) -> RolloutRecord:
    """The one rollout of a path where nothing is refused."""
    (item,) = import_runs(format, path, options)
    assert isinstance(item, RolloutRecord), item
    assert count_found(format, path) == 1
    assert from_tables(to_tables([item])) == [item]
    return item


def refused(path: Path, format: str = "auto", **options: Any) -> RejectedInput:
    (item,) = import_runs(format, path, options)
    assert isinstance(item, RejectedInput), item
    assert count_found(format, path) == 1
    return item


def commands(record: RolloutRecord) -> list[list[str]]:
    return [[action.command for action in turn.actions] for agent in record.agents for turn in agent.turns]


@pytest.mark.parametrize(
    ("format", "kind"),
    [*product(ROWS, ("jsonl", "parquet")), *(("messages", kind) for kind in ("json", "jsonl.gz", "jsonl.zst"))],
)
def test_every_row_format_is_found_in_every_kind_of_file(tmp_path: Path, format: str, kind: str) -> None:
    rows = [ROWS[format]] * 3
    path = tmp_path / "data" / f"train.{kind}"
    if kind == "parquet":
        write_parquet(path, rows)
    elif kind == "json":
        path.parent.mkdir()
        path.write_text(json.dumps(rows, indent=1))
    else:
        write_lines(path, rows)
        data = path.read_bytes()
        if kind.endswith("gz"):
            path.write_bytes(gzip.compress(data))
        if kind.endswith("zst"):
            path.unlink()
            with pa.CompressedOutputStream(str(path), "zstd") as out:
                out.write(data)
    assert detect(tmp_path) == format
    result = list(import_runs("auto", tmp_path))
    assert [type(item) for item in result] == [RolloutRecord] * 3
    assert count_found("auto", tmp_path) == 3
    records = [item for item in result if isinstance(item, RolloutRecord)]
    assert len({record.rollout_id for record in records}) == 3
    assert [record.source for record in records] == [f"data/train.{kind}#{i}" for i in range(3)]
    reference = [
        commands(r)
        for r in import_runs(format, write_lines(tmp_path / "x.jsonl", rows))
        if isinstance(r, RolloutRecord)
    ]
    assert [commands(record) for record in records] == reference


def test_messages(tmp_path: Path) -> None:
    record = only(write_lines(tmp_path / "a.jsonl", [messages_row()]))
    agent = record.agents[0]
    assert (record.task_id, record.repo, record.teacher) == ("pier__moor-12", "pier/moor", "helmsman-2")
    assert record.outcome == {"reward": 1.0, "verdict": "passed"}
    assert [(m.role, m.content, m.turn) for m in agent.messages] == [
        ("system", "You have a shell.", None),
        ("user", "Moor the boat.", None),
        ("assistant", "I look.", 0),
        ("tool", "moor.py", 0),
        ("assistant", "Moored.", 1),
    ]
    assert commands(record) == [["ls"], []]
    assert agent.turns[0].observation == "moor.py"


def test_messages_without_loss_are_read_as_context(tmp_path: Path) -> None:
    talk = chat()
    talk[2]["weight"] = 0
    talk[4]["weight"] = 1
    agent = only(write_lines(tmp_path / "a.jsonl", [{"messages": talk}])).agents[0]
    assert [(m.role, m.turn) for m in agent.messages][2:] == [("assistant", None), ("tool", None), ("assistant", 0)]


def test_blocks_of_other_apis_and_old_calls(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "Go."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t", "name": "bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a.py"}]}],
        },
        {"role": "assistant", "content": None, "function_call": {"name": "bash", "arguments": '{"command": "pwd"}'}},
        {"role": "function", "name": "bash", "content": "/"},
        {"role": "assistant", "content": "<function=execute_bash>\n<parameter=command>id</parameter>\n</function>"},
    ]
    record = only(write_lines(tmp_path / "a.jsonl", [{"messages": json.dumps(talk)}]))
    assert commands(record) == [["ls"], ["pwd"], ["id"]]
    first = record.agents[0].turns[0]
    assert (first.content, first.reasoning, first.observation) == ("I look.", "hm", "a.py")


def test_null_padded_structs_and_calls_of_parquet(tmp_path: Path) -> None:
    padded = [
        {"role": m["role"], "content": m["content"], "tool_calls": m.get("tool_calls"), "name": None, "weight": None}
        for m in chat()
    ]
    path = write_parquet(tmp_path / "a.parquet", [{"messages": padded, "tools": None, "score": None}])
    assert commands(only(path)) == [["ls"], []]


def test_sharegpt(tmp_path: Path) -> None:
    record = only(write_lines(tmp_path / "a.jsonl", [sharegpt_row()]))
    assert [(m.role, m.content) for m in record.agents[0].messages] == [
        ("system", "You have a shell."),
        ("user", "Moor the boat."),
        ("assistant", ""),
        ("tool", "moor.py"),
        ("assistant", "Moored."),
    ]
    assert commands(record) == [["ls"], []]
    assert record.task_id == "r1"


def test_r2e_gym(tmp_path: Path) -> None:
    record = only(write_lines(tmp_path / "a.jsonl", [r2e_row()]))
    agent = record.agents[0]
    assert (record.task_id, record.repo, record.teacher) == ("harbor/0a1b2c", "harbor", "helmsman-2")
    assert record.outcome == {"reward": 1.0, "verdict": "passed", "test_output_chars": 8}
    assert (agent.exit_status, agent.patch) == ("LimitsExceeded", "diff --git a/moor.py b/moor.py\n")
    assert [m.content for m in agent.messages[:2]] == [
        "You have a shell.",
        "Fix: Moor the boat.\nSteps Remaining: 1",
    ]
    assert agent.turns[0].observation.endswith(
        "moor.py\nYou have reached the maximum number of steps. Please submit your answer NOW.\nbye"
    )
    assert commands(record) == [["ls"]], "the harness's own step is nobody's turn"
    nothing = {**r2e_row(), "trajectory_steps": [], "exit_reason": "env_exception", "test_output": "no image"}
    refusal = refused(write_lines(tmp_path / "b.jsonl", [nothing]))
    assert (refusal.reason, refusal.row) == ("errored", 0) and "no image" in refusal.detail


def test_exit_code_that_no_column_can_store_is_unknown(tmp_path: Path) -> None:
    text = json.dumps(openhands_row()).replace('"exit_code": 0', f'"exit_code": {2**31}')
    assert only(write_lines(tmp_path / "output.jsonl", [json.loads(text)])).agents[0].turns[0].exit_code is None


def test_openhands_events(tmp_path: Path) -> None:
    record = only(write_lines(tmp_path / "output.jsonl", [openhands_row()]))
    agent = record.agents[0]
    assert (record.task_id, record.repo, record.teacher) == ("pier__moor-12", "pier/moor", "helmsman-2")
    assert record.outcome == {"reward": 0.0, "verdict": "low_reward"}
    assert agent.patch == "diff --git a/moor.py b/moor.py\n"
    assert commands(record) == [["ls", "pwd"], ['finish {"outputs": {"word": "done"}}']], (
        "two calls of one response are one turn"
    )
    assert (agent.turns[0].observation, agent.turns[0].exit_code) == ("moor.py\n/work", 0)
    assert agent.exit_status == "Submitted"


def test_openhands_events_with_kinds(tmp_path: Path) -> None:
    record = only(write_lines(tmp_path / "output.jsonl", [openhands_typed_row()]))
    assert commands(record) == [["ls"], []]
    assert record.agents[0].turns[0].observation == "moor.py\nno such tool"
    condensed = openhands_typed_row()
    condensed["history"].insert(4, {"kind": "Condensation", "forgotten_event_ids": []})
    assert refused(write_lines(tmp_path / "b.jsonl", [condensed])).reason == "compacted"


@pytest.mark.parametrize(
    ("task", "repo"),
    [
        ("pier__moor-12", "pier/moor"),
        ("pier__moor-sail.0a1b2c3d.lm_modify__9x8y7z6w", "pier/moor-sail"),
        ("pier__moor.0a1b2c3d.pr_731", "pier/moor"),
        ("pier__moor.py", "unknown"),
    ],
)
def test_repository_of_an_instance_id(tmp_path: Path, task: str, repo: str) -> None:
    """SWE-bench numbers its instances; SWE-smith names a commit and the kind of the fault."""
    row = {"instance_id": task, "messages": messages_row()["messages"]}
    assert only(write_lines(tmp_path / "x.jsonl", [row])).repo == repo


def test_openhands_folder_of_an_evaluation_is_detected(tmp_path: Path) -> None:
    """Its `metadata.json` comes before `output.jsonl`, and is no run."""
    write_lines(tmp_path / "output.jsonl", [openhands_row()])
    (tmp_path / "metadata.json").write_text(json.dumps({"agent_class": "CodeActAgent", "llm_config": {}}))
    assert detect(tmp_path) == "openhands" and count_found("auto", tmp_path) == 2
    record, beside = import_runs("auto", tmp_path)
    assert isinstance(beside, RejectedInput) and beside.reason == "not_a_rollout"
    assert isinstance(record, RolloutRecord)


@pytest.mark.parametrize("make", [openhands_row, openhands_typed_row])
def test_array_of_openhands_events_is_one_run(tmp_path: Path, make: Any) -> None:
    """OpenHands saves a run's trajectory as a file that is an array of its events."""
    common = {"timestamp": "2026-03-01T09:00:00", "source": "agent"}
    events = [{"id": i, **common, **event} for i, event in enumerate(make()["history"])]
    (tmp_path / "trajectory.json").write_text(json.dumps(events))
    record = only(tmp_path)
    assert detect(tmp_path) == "openhands"
    whole = only(write_lines(tmp_path / "rows/output.jsonl", [{"history": events}]))
    assert [m.content for m in record.agents[0].messages] == [m.content for m in whole.agents[0].messages]
    (tmp_path / "one.json").write_text(json.dumps(events[:1]))
    assert refused(tmp_path / "one.json", "openhands").reason == "unknown_form"


def test_array_of_messages_is_one_run(tmp_path: Path) -> None:
    """Cline writes a task as the array of its messages."""
    call = {"type": "tool_use", "id": "c1", "name": "read_file", "input": {"path": "moor.py"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Moor the boat."}], "ts": 1},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call], "ts": 2},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "pass"}], "ts": 3},
    ]
    file = tmp_path / "api_conversation_history.json"
    file.write_text(json.dumps(messages))
    assert detect(tmp_path) == "messages"
    assert [(m.role, m.content) for m in only(file).agents[0].messages] == [
        ("user", "Moor the boat."),
        ("assistant", "I look."),
        ("tool", "pass"),
    ]
    file.write_text(json.dumps(messages[:1]))
    assert "one array" in refused(file).detail
    file.write_text(json.dumps([{"conversation_id": i, **message} for i, message in enumerate(messages)]))
    assert {item.reason for item in import_runs("messages", file) if isinstance(item, RejectedInput)} == {
        "unknown_form"
    }


def test_output_of_openhands_commands_has_the_lines_that_the_model_read(tmp_path: Path) -> None:
    metadata = {"exit_code": 1, "working_dir": "/work", "py_interpreter_path": "", "prefix": "", "suffix": "\n[Done.]"}
    old, new = openhands_row(), openhands_typed_row()
    old["history"][5] |= {"content": "", "extras": {"metadata": metadata}}
    old["history"][6] |= {
        "observation": "error",
        "content": "no such file",
        "tool_call_metadata": {"tool_call_id": "c2"},
    }
    new["history"][3]["observation"] = {"content": [{"type": "text", "text": ""}], "metadata": metadata}
    first, second = (
        [m.content for m in only(write_lines(tmp_path / name, [row])).agents[0].messages if m.role == "tool"]
        for name, row in (("old.jsonl", old), ("new.jsonl", new))
    )
    read = "\n[Done.]\n[Current working directory: /work]\n[Command finished with exit code 1]"
    assert first == [read, "no such file\n[Error occurred in processing last action]"]
    assert second[0] == read
    old["history"].insert(7, {"source": "agent", "observation": "error", "content": "Missing argument"})
    unnamed = copy.deepcopy(old)
    del unnamed["history"][3]["tool_call_metadata"]["model_response"]["id"]
    for name, row in (("lost.jsonl", old), ("unnamed.jsonl", unnamed)):
        messages = only(write_lines(tmp_path / name, [row])).agents[0].messages
        assert [m.role for m in messages if m.content.startswith("Missing argument")] == ["user"]  # of a lost call


def test_openhands_data_sets(tmp_path: Path) -> None:
    row = {
        "trajectory_id": "t",
        "instance_id": "pier__moor-12",
        "trajectory": chat(),
        "model_patch": "diff",
        "exit_status": "submit",
        "resolved": 1,
    }
    record = only(write_parquet(tmp_path / "a.parquet", [row]))
    assert commands(record) == [["ls"], []] and record.agents[0].exit_status == "Submitted"
    old = [
        {"role": "system", "system_prompt": "You.", "text": None},
        {"role": "user", "text": "Go."},
        {"role": "ai", "text": "```bash\nls\n```"},
    ]
    record = only(
        write_lines(
            tmp_path / "b.jsonl", [{"instance_id": "a__b-1", "trajectory": old, "target": True, "generated_patch": "d"}]
        )
    )
    assert commands(record) == [["ls"]] and record.outcome == {"reward": 1.0, "verdict": "passed"}


def test_verl_rows(tmp_path: Path) -> None:
    record = only(write_lines(tmp_path / "1.jsonl", [verl_row()]))
    assert commands(record) == [["ls"]] and record.outcome == {"reward": 1.0, "verdict": "passed"}
    prompt = {
        "data_source": "coop",
        "prompt": chat()[:2],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0},
    }
    refusal = refused(write_parquet(tmp_path / "rl.parquet", [prompt]))
    assert refusal.reason == "no_response"
    answered = {"data_source": "math", "extra_info": {"question": "2+2?", "answer": "4"}}
    assert only(write_parquet(tmp_path / "sft.parquet", [answered])).agents[0].turns[0].content == "4"


# --- token ids ------------------------------------------------------------------------------------------------------


def conversation_ids() -> tuple[list[int], list[tuple[int, int]]]:
    """Two turns in the tiny chat format, and where they stand."""
    form = load_chat_format("tiny")
    ids = form.prompt_ids([{"role": "system", "content": "You have a shell."}, {"role": "user", "content": "Moor."}])
    spans = []
    for text, seen in (
        ("<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>", "moor.py"),
        ("Moored.", ""),
    ):
        output = [*form.encode(text), form.end_id]
        spans.append((len(ids), len(ids) + len(output)))
        ids = ids + output + (form.observation_ids(seen) if seen else [])
    return ids, spans


def test_trl_ids(tmp_path: Path) -> None:
    ids, spans = conversation_ids()
    path = write_parquet(tmp_path / "a.parquet", [trl_row(ids, spans)])
    agent = only(path, tokenizer="tiny").agents[0]
    assert [(t.prompt_ids, t.output_ids, t.capture) for t in agent.turns] == [
        (ids[:start], ids[start:end], "retokenised") for start, end in spans
    ]
    assert [[a.command for a in t.actions] for t in agent.turns] == [["ls"], []]
    assert [(m.role, m.content) for m in agent.messages if m.role != "assistant"] == [
        ("system", "You have a shell."),
        ("user", "Moor."),
        ("user", "moor.py"),
    ]
    assert agent.turns[0].observation == "moor.py"
    assert refused(path).reason == "needs_tokenizer"
    masked = {"input_ids": ids, "completion_mask": [int(any(a <= i < b for a, b in spans)) for i in range(len(ids))]}
    native = only(write_parquet(tmp_path / "b.parquet", [masked]), tokenizer="tiny", capture="native").agents[0]
    assert [(t.output_ids, t.capture) for t in native.turns] == [(ids[start:end], "native") for start, end in spans]
    both = {"input_ids": ids, "completion_mask": [1] * len(ids), "assistant_masks": masked["completion_mask"]}
    agent = only(write_lines(tmp_path / "c.jsonl", [both]), tokenizer="tiny").agents[0]
    assert [t.output_ids for t in agent.turns] == [ids[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"labels": [1]}, "bad_token_ids"),
        ({"input_ids": [5000, 1]}, "bad_token_ids"),
        ({"input_ids": []}, "bad_token_ids"),
        ({"labels": [-100] * 5}, "bad_token_ids"),
        ({"labels": None}, "unknown_form"),
        ({"loss_mask": [0, 0.5, 1]}, "bad_token_ids"),
        ({"loss_mask": [0, 1]}, "bad_token_ids"),
        ({"loss_mask": [0, 0, 0]}, "empty"),
    ],
)
def test_ids_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    row = {**trl_row([1, 2, 3], [(1, 3)]), **change}
    assert refused(write_lines(tmp_path / "a.jsonl", [row]), tokenizer="tiny").reason == reason


def test_labels_that_are_another_id_or_nothing_at_all_are_refused(tmp_path: Path) -> None:
    assert (
        refused(
            write_lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2], "labels": [-100, 3]}]), tokenizer="tiny"
        ).reason
        == "bad_token_ids"
    )
    assert (
        refused(
            write_lines(tmp_path / "b.jsonl", [{"input_ids": [1, 2], "labels": [-100, -100]}]), tokenizer="tiny"
        ).reason
        == "empty"
    )
    assert (
        refused(write_lines(tmp_path / "c.jsonl", [{"prompt": "x", "chosen": "a", "rejected": "b"}])).reason
        == "preference"
    )


def test_pairs_of_one_rollout_are_joined(tmp_path: Path) -> None:
    ids, spans = conversation_ids()
    rows = [
        {
            "input_ids": ids[:start],
            "output_ids": ids[start:end],
            "metadata": {
                "rollout_id": "r1",
                "agent_id": agent,
                "turn": turn,
                "task_id": "t1",
                "repo": "pier",
                "capture": "native",
                "role": role,
            },
        }
        for agent, role in (("agent1", "proposer"), ("agent2", "responder"))
        for turn, (start, end) in enumerate(spans)
    ]
    alone = {**rows[0], "metadata": {"task_id": "t2"}}
    path = write_lines(tmp_path / "a.jsonl", [*rows, alone, alone])
    result = list(import_runs("auto", path, {"tokenizer": "tiny"}))
    assert len(result) == count_found("auto", path) == 3
    first, second, third = result
    assert isinstance(first, RolloutRecord) and isinstance(second, RolloutRecord) and isinstance(third, RolloutRecord)
    assert [(a.agent_id, a.role, [t.turn for t in a.turns]) for a in first.agents] == [
        ("agent1", "proposer", [0, 1]),
        ("agent2", "responder", [0, 1]),
    ]
    assert [[(t.prompt_ids, t.output_ids, t.capture) for t in a.turns] for a in first.agents] == [
        [(ids[:start], ids[start:end], "native") for start, end in spans]
    ] * 2
    assert commands(first) == [["ls"], [], ["ls"], []]
    assert [m.content for m in first.agents[0].messages if m.role == "user"] == ["Moor.", "moor.py"]
    assert (first.task_id, first.repo, second.task_id, second.sample, third.sample) == ("t1", "pier", "t2", 0, 1)
    assert second.rollout_id != third.rollout_id
    assert from_tables(to_tables([first, second])) == [first, second]


def test_answer_in_words_of_a_pair_is_a_turn_that_ends_the_rollout(tmp_path: Path) -> None:
    from etpi_resources.chat.format import load_chat_format

    chat = load_chat_format("tiny")
    prompt = chat.prompt_ids([{"role": "user", "content": "Moor."}])
    row = {"input_ids": prompt, "output_ids": [*chat.encode("Moored."), chat.end_id], "metadata": {"task_id": "t"}}
    (rollout,) = import_runs("tito", write_lines(tmp_path / "a.jsonl", [row]), {"tokenizer": "tiny"})
    assert isinstance(rollout, RolloutRecord)
    (agent,) = rollout.agents
    assert (agent.exit_status, agent.turns[0].parse_error) == ("Submitted", None)


# --- ATIF and Harbor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("minor", range(2, 9))
def test_atif(tmp_path: Path, minor: int) -> None:
    (tmp_path / "t.json").write_text(json.dumps(atif_document(schema_version=f"ATIF-v1.{minor}")))
    record = only(tmp_path)
    agent = record.agents[0]
    assert (record.task_id, record.teacher) == ("s1", "helmsman-2")
    assert [(m.role, m.content, m.turn, m.kind) for m in agent.messages] == [
        ("system", "You have a shell.", None, "prompt"),
        ("user", "Moor the boat.", None, "prompt"),
        ("assistant", "Earlier.", None, "prompt"),
        ("assistant", "I look.", 0, "action"),
        ("tool", "moor.py", 0, "observation"),
        ("assistant", "dispatch", 0, "other"),
        ("assistant", "Moored.", 1, "action"),
    ]
    first, last = agent.turns
    assert (first.prompt_ids, first.output_ids, first.logprobs, first.capture) == (
        [1, 2, 3],
        [4, 5],
        [-0.5, -0.25],
        "native",
    )
    assert (first.reasoning, first.actions[0].command, first.observation) == ("hm", "ls", "moor.py")
    assert (last.content, last.capture, last.prompt_ids) == ("Moored.", "none", None)


def test_tool_definitions_of_an_atif_agent_are_kept(tmp_path: Path) -> None:
    document = atif_document()
    schema = {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object"}}}
    document["agent"] = {**document["agent"], "tool_definitions": [schema]}
    (tmp_path / "t.json").write_text(json.dumps(document))
    assert only(tmp_path).tools == [schema]


def test_atif_continuations_and_subagents_are_agents(tmp_path: Path) -> None:
    helper = atif_document(trajectory_id="helper", session_id=None)
    (tmp_path / "trajectory.json").write_text(
        json.dumps(atif_document(continued_trajectory_ref="trajectory.cont-1.json", subagent_trajectories=[helper]))
    )
    (tmp_path / "trajectory.cont-1.json").write_text(json.dumps(atif_document()))
    record = only(tmp_path)
    assert [(a.agent_id, len(a.turns)) for a in record.agents] == [("agent1", 2), ("agent1-2", 2), ("helper", 2)]
    (tmp_path / "trajectory.cont-1.json").unlink()
    assert refused(tmp_path).reason == "missing_trajectory"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": "ATIF-v2.0"}, "unknown_version"),
        ({"schema_version": "ATIF-v1.9"}, "unknown_version"),
        ({"steps": []}, "empty"),
        ({"steps": [{"source": "narrator", "message": ""}]}, "unknown_role"),
        ({"steps": [{"source": "user", "message": [{"type": "image", "source": {"path": "x"}}]}]}, "non_text_content"),
        (
            {
                "steps": [
                    {"source": "user", "message": ""},
                    {
                        "source": "agent",
                        "message": "",
                        "metrics": {"prompt_token_ids": [1], "completion_token_ids": []},
                    },
                ]
            },
            "bad_token_ids",
        ),
        (
            {
                "steps": [
                    {"source": "user", "message": ""},
                    {
                        "source": "agent",
                        "message": "",
                        "metrics": {"prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": [1, 2]},
                    },
                ]
            },
            "bad_logprobs",
        ),
    ],
)
def test_atif_that_cannot_be_taken_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    (tmp_path / "t.json").write_text(json.dumps(atif_document(**change)))
    assert refused(tmp_path).reason == reason


def test_turns_after_a_summary_of_terminus_read_the_questions_and_not_the_steps_before(tmp_path: Path) -> None:
    refs = [{"trajectory_path": f"trajectory.summarization-1-{part}.json"} for part in ("summary", "questions")]
    handed_over = {"source": "system", "message": "Summarised.", "observation": {"results": []}}
    handed_over["observation"]["results"].append({"subagent_trajectory_ref": refs})
    task, first, last = ({"source": s, "message": m} for s, m in (("user", "Moor it."), ("agent", "A"), ("agent", "B")))
    asked = [{"source": "user", "message": "Ask."}, {"source": "agent", "message": "Where?"}]
    answers = {"source": "user", "message": "At the quay."}
    document = atif_document(steps=[task, first, handed_over, answers, last])
    (tmp_path / "trajectory.json").write_text(json.dumps(document))
    assert not isinstance(refusal := next(import_runs("atif", tmp_path)), RolloutRecord)
    assert refusal.reason == "missing_trajectory" and "summarization-1-questions" in refusal.detail
    for ref in refs:
        (tmp_path / ref["trajectory_path"]).write_text(json.dumps(atif_document(steps=asked)))
    agents = only(tmp_path).agents
    assert [a.agent_id for a in agents[:2]] == ["agent1", "agent1-2"]
    assert [[m.content for m in a.messages] for a in agents[:2]] == [
        ["Moor it.", "A"],
        ["Moor it.", "Ask.", "Where?", "At the quay.", "B"],
    ]
    assert [len(a.turns) for a in agents] == [1, 1, 1, 1], "the questions are a turn of the sub-agent alone"


def test_raw_answers_of_terminus_have_the_commands_that_it_typed(tmp_path: Path) -> None:
    texts = [
        'I look.\n{"plan": "p", "commands": [{"keystrokes": "ls\\n", "duration": 0.1}, {"keystrokes": ""}]}',
        '{"commands": {',
        '{"commands": [], "task_complete": true}',
    ]
    steps = [{"source": "user", "message": "Moor it."}, *({"source": "agent", "message": text} for text in texts)]
    (tmp_path / "t.json").write_text(json.dumps(atif_document(steps=steps)))
    (agent,) = only(tmp_path).agents
    assert [[a.command for a in turn.actions] for turn in agent.turns] == [["ls\n"], [], ["mark_task_complete"]]
    assert [turn.parse_error is None for turn in agent.turns] == [True, False, True]
    assert agent.exit_status == "Submitted"


def claude_step(metrics: dict[str, int] | None = None, *, side: bool = False, **step: Any) -> dict[str, Any]:
    """A step of Harbor's converter for Claude Code."""
    extra = {"is_sidechain": side, "stop_reason": "tool_use", **step.pop("extra", {})}
    return {"source": "agent", "model_name": "small" if side else "large", "metrics": metrics, **step, "extra": extra}


def claude_call(name: str, text: str, metrics: dict[str, int] | None, message: str | None = None) -> dict[str, Any]:
    """A step of one call. Harbor notes the tool's own record after the text that the model read."""
    block = {"type": "tool_result", "tool_use_id": name, "content": text}
    results = [{"source_call_id": name, "content": f'{text}\n\n[stdout]\n{text}\n[metadata] {{"n": 1}}'}]
    step = claude_step(
        metrics,
        message=f"Executed Bash {name}" if message is None else message,
        tool_calls=[{"tool_call_id": name, "function_name": "Bash", "arguments": {"command": name}}],
        extra={"tool_result_metadata": {"raw_tool_result": block}},
    )
    return step | ({"observation": {"results": results}} if text else {})


@pytest.mark.parametrize("repeated", [True, False])
def test_claude_code_steps_of_harbor_are_its_responses(tmp_path: Path, repeated: bool) -> None:
    """Releases of Harbor repeat a response's metrics in each of its steps, or write them in the first alone."""
    first, second, third = ({"prompt_tokens": n, "completion_tokens": 9} for n in (10, 20, 30))
    again = first if repeated else None
    steps = [
        claude_step({"prompt_tokens": 5}, side=True, message="A sub-agent looks."),
        {"source": "user", "message": "Moor the boat.", "extra": {"is_sidechain": False}},
        claude_step(first, message="I look twice."),
        claude_call("c1", "moor.py", again),
        claude_call("c2", "", again),
        claude_call("c3", "4 passed", second, "I test."),
        claude_step(third, message="Moored.", extra={"stop_reason": "end_turn"}),
        claude_step(message="API Error: 529", model_name="<synthetic>") | {"metrics": {"prompt_tokens": 0}},
    ]
    document = atif_document(agent={"name": "claude-code", "version": "2", "model_name": "small"}, steps=steps)
    (trial(tmp_path) / "agent/trajectory.json").write_text(json.dumps(document))
    record = only(tmp_path)
    (agent,) = record.agents
    assert record.teacher == "large", "the document states a sub-agent's model"
    assert [(m.role, m.content) for m in agent.messages] == [
        ("user", "Moor the boat."),
        ("assistant", "I look twice."),
        ("tool", "moor.py"),
        ("tool", ""),
        ("assistant", "I test."),
        ("tool", "4 passed"),
        ("assistant", "Moored."),
        ("assistant", "API Error: 529"),
    ]
    assert [[a.command for a in turn.actions] for turn in agent.turns] == [
        ["c1", "c2"],
        ["c3"],
        [],
    ]


def test_sessions_within_trials_are_no_other_format(tmp_path: Path) -> None:
    """Harbor's trials hold the sessions of their agents; a session beside the trials is a second format."""
    folder = trial(tmp_path)
    for place in (folder / "agent/sessions/projects/-app", tmp_path / "home"):
        write_lines(place / "s.jsonl", FILES["claude_code"][0][1])
        if place.is_relative_to(folder):
            assert (detect(tmp_path), detect(folder)) == ("harbor", "harbor")
    assert detect(tmp_path) == "claude_code+harbor"


def test_harbor_trials(tmp_path: Path) -> None:
    trial(tmp_path, exception_info={"exception_type": "AgentTimeoutError", "exception_message": "900 s"})
    assert detect(tmp_path) == "harbor"
    record = only(tmp_path)
    assert (record.task_id, record.source, record.wall_seconds) == ("moor", "jobs/2026-03-01/moor__abc", 90.0)
    assert record.outcome == {"reward": 1.0, "verdict": "passed"}
    assert record.started_at == datetime(2026, 3, 1, 9, tzinfo=UTC)
    assert (record.error, record.agents[0].exit_status) == ("AgentTimeoutError: 900 s", "LimitsExceeded")


def test_harbor_ids_of_the_trial_and_trials_without_a_trajectory(tmp_path: Path) -> None:
    details = [{"prompt_token_ids": [[1], [1, 2, 3]], "completion_token_ids": [[2], [4]], "logprobs": [[-1.0], [-2.0]]}]
    folder = trial(
        tmp_path,
        "a__1",
        agent_result={"rollout_details": details},
        verifier_result={"rewards": {"reward": 0, "style": 1}},
    )
    document = atif_document()
    for step in document["steps"]:
        step.pop("metrics", None)
    (folder / "agent/trajectory.json").write_text(json.dumps(document))
    (trial(tmp_path, "b__1") / "agent/trajectory.json").unlink()
    first, second = import_runs("auto", tmp_path)
    assert isinstance(first, RolloutRecord) and isinstance(second, RejectedInput)
    assert [(t.prompt_ids, t.output_ids, t.logprobs) for t in first.agents[0].turns] == [
        ([1], [2], [-1.0]),
        ([1, 2, 3], [4], [-2.0]),
    ]
    assert first.outcome == {"reward": 0.0, "verdict": "low_reward", "rewards": {"reward": 0, "style": 1}}
    assert second.reason == "missing_trajectory"


# --- what every row format survives ---------------------------------------------------------------------------------


def test_bad_rows_are_refused_one_by_one_with_their_place(tmp_path: Path) -> None:
    good = json.dumps(messages_row()).encode()
    lines = [
        good,
        good[:-30],
        b"",
        b"[1]",
        b'"x"',
        good.replace(b"Moor", b"\xff"),
        good.replace(b"Moor", b"\\ud83d"),
        b"{}",
        b'{"messages": [{"role": "narrator"}]}',
        good.replace(b"Moor", b"\\u0000"),
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    result = list(import_runs("messages", path))
    assert len(result) == count_found("messages", path) == 9
    told = [(item.row, item.reason) if isinstance(item, RejectedInput) else None for item in result]
    assert told == [
        None,
        (1, "truncated_json"),
        (2, "unknown_form"),
        (3, "unknown_form"),
        (4, "not_utf8"),
        (5, "lone_surrogate"),
        (6, "unknown_form"),
        (7, "unknown_role"),
        None,
    ]
    assert isinstance(result[-1], RolloutRecord) and result[-1].agents[0].messages[1].content == "\0 the boat."


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_truncated_stream_gives_earlier_rows_and_is_reported(tmp_path: Path, suffix: str) -> None:
    import random

    rows = [{**messages_row(), "noise": random.Random(i).randbytes(300).hex()} for i in range(800)]
    plain = write_lines(tmp_path / "a.jsonl", rows).read_bytes()
    path = tmp_path / f"a.jsonl.{suffix}"
    if suffix == "gz":
        path.write_bytes(gzip.compress(plain))
    else:
        with pa.CompressedOutputStream(str(path), "zstd") as out:
            out.write(plain)
    (tmp_path / "a.jsonl").unlink()
    path.write_bytes(path.read_bytes()[:-3000])
    result = list(import_runs("messages", path))
    assert len(result) == count_found("messages", path) > 300
    assert [item.reason for item in result if isinstance(item, RejectedInput)] == [
        "bad_gzip" if suffix == "gz" else "bad_zstd"
    ]
    assert isinstance(result[-1], RejectedInput)


def test_a_damaged_parquet_file_reconciles(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [messages_row()] * 50)
    data = path.read_bytes()
    path.write_bytes(data[:200])
    assert refused(path, "messages").reason == "bad_parquet"
    path.write_bytes(data[:60] + b"\xff" * 400 + data[460:])
    result = list(import_runs("messages", path))
    assert len(result) == count_found("messages", path) == 50
    assert {item.reason for item in result if isinstance(item, RejectedInput)} == {"bad_parquet"}


@pytest.mark.slow
def test_a_long_line_is_read(tmp_path: Path) -> None:
    talk = chat()
    talk[3]["content"] = "x" * 100_000_000
    path = write_lines(tmp_path / "a.jsonl", [{"messages": talk}])
    (item,) = import_runs("auto", path)
    assert isinstance(item, RolloutRecord) and len(item.agents[0].turns[0].observation or "") == 100_000_000


def test_an_empty_file_is_accounted_for(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.json", "c.json"):
        (tmp_path / name).write_text({"c.json": "[]"}.get(name, " "))
        assert refused(tmp_path / name, "messages").reason == "empty_file"


@pytest.mark.parametrize("about", [{}, {"version": 2, "license": "mit"}])
def test_list_under_data_is_the_rows_of_a_file(tmp_path: Path, about: dict[str, Any]) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({**about, "data": [messages_row(), messages_row()]}))
    sources = [item.source for item in import_runs("auto", file) if isinstance(item, RolloutRecord)]
    assert sources == ["a.json#0", "a.json#1"] and count_found("auto", file) == 2
    file.write_text(json.dumps({"data": [{"q": "hi", "a": "yes"}]}))
    assert only(file, "mapped", map="prompt=q,answer=a").agents[0].turns[0].content == "yes"
    file.write_text(json.dumps(about | messages_row() | {"data": ["of", "the", "run"]}))
    assert only(file).source == "a.json#0", "a column of a run"


@pytest.mark.parametrize("key", ["reward", "score", "resolved", "label", "instance_id"])
def test_nan_is_a_missing_value(tmp_path: Path, key: str) -> None:
    missing = only(write_lines(tmp_path / "a.jsonl", [{**messages_row(), key: float("nan")}]))
    absent = only(write_lines(tmp_path / "b/a.jsonl", [{k: v for k, v in messages_row().items() if k != key}]))
    assert (missing.outcome, missing.task_id) == (absent.outcome, absent.task_id)


@pytest.mark.parametrize(("format", "row"), [("messages", {"messages": None, "x": 1}), ("trl", {"prompt": None})])
def test_null_where_messages_belong_is_named(tmp_path: Path, format: str, row: dict[str, Any]) -> None:
    assert "= null" in refused(write_lines(tmp_path / "a.jsonl", [row]), format).detail


# --- no value anywhere breaks an importer ---------------------------------------------------------------------------

IDS, SPANS = conversation_ids()
SAMPLES: dict[str, list[Any]] = {
    **{name: [row, *OTHERS.get(name, [])] for name, row in ROWS.items()},
    "autogen": [autogen_state()],
    "goose": goose_lines(),
    "mistral_vibe": vibe_rows(),
    "trl": [trl_row(IDS, SPANS), ROWS["trl"], *OTHERS["trl"]],
    "tito": [
        {"input_ids": IDS[:a], "output_ids": IDS[a:b], "metadata": {"rollout_id": "r", "turn": i}}
        for i, (a, b) in enumerate(SPANS)
    ],
    "verl": [verl_row(), {"prompt": "x", "response": "y"}],
    "mapped": [{"a": {"talk": [{"who": "user", "said": ["Moor."]}, {"who": "ai", "said": ["Moored."]}]}, "won": "1"}],
    "atif": [
        atif_document(
            continued_trajectory_ref="t.cont-1.json", subagent_trajectories=[atif_document(trajectory_id="s")]
        )
    ],
}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), format=st.sampled_from([*SAMPLES, "harbor"]))
def test_no_value_anywhere_breaks_an_importer(tmp_path_factory, data: st.DataObject, format: str) -> None:
    root = tmp_path_factory.mktemp("fuzz")
    if format == "harbor":
        folder = trial(
            root,
            agent_result={"rollout_details": [{"prompt_token_ids": [[1]], "completion_token_ids": [[2]]}]},
            verifier_result={"rewards": {"reward": 1}},
        )
        file = folder / data.draw(st.sampled_from(["result.json", "config.json", "agent/trajectory.json"]))
        values = [json.loads(file.read_text())]
    else:
        file = root / ("t.json" if format == "atif" else "t.jsonl")
        values = list(SAMPLES[format])
        if format == "atif":
            (root / "t.cont-1.json").write_text(json.dumps(atif_document()))
    for i, value in enumerate(values):
        for _ in range(data.draw(st.integers(0, 3))):
            value = replaced(value, data.draw(st.sampled_from(places(value))), data.draw(JUNK))
        values[i] = value
    text = "\n".join(json.dumps(value) for value in values)
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(text))))
    file.write_text(text[:cut])
    columns = {"messages": "a.talk", "role": "who", "text": "said[0]", "reward": "won"}
    result = list(import_runs(format, root, {"tokenizer": "tiny", "map": columns}))
    assert len(result) == count_found(format, root)
    records = [item for item in result if isinstance(item, RolloutRecord)]
    assert from_tables(to_tables(records)) == records
    assert all(item.reason and item.detail for item in result if isinstance(item, RejectedInput))
    assert not any(isinstance(item, RejectedInput) and item.reason == "unconvertible" for item in result)


def test_every_format_is_fuzzed() -> None:
    others = {"harbor", "cooperbench", "mini_swe_agent", "swe_agent", "capture", *FILES}
    assert set(SAMPLES) | others == set(IMPORTERS)
