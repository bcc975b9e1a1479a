"""Rows of no known format, by a map of their columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etpi_assets.importers import UnknownFormat, import_runs
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.trajectories.records import RolloutRecord, own_messages
from tests.support.rows import called, detect, write_lines

NESTED = {
    "id": 7,
    "conv": {"turns": [{"from": "customer", "value": "Moor."}, {"from": "bot", "value": "Moored."}]},
    "score": 0.5,
}
STEPS = {
    "episode": [
        {"log": [{"who": "human", "said": ["Moor."]}, {"who": "ai", "said": [""], "does": [called(command="ls")]}]}
    ],
    "a.b": "pier__moor-1",
    "won": "true",
}
PAIR = {"question": "Moor?", "reply": "Moored.", "wrote": "helmsman-2"}


def read(tmp_path: Path, row: Any, columns: Any) -> RolloutRecord | RejectedInput:
    (item,) = import_runs("mapped", write_lines(tmp_path / "a.jsonl", [row]), {"map": columns})
    return item


def test_rows_that_a_map_names_are_rows_in_a_file_of_any_name(tmp_path):
    path = write_lines(tmp_path / "results.json", [PAIR])
    columns = {"prompt": "question", "answer": "reply"}
    assert [type(item) for item in import_runs("mapped", path, {"map": columns})] == [RolloutRecord]
    (lost,) = import_runs("mapped", path, {"map": {**columns, "answer": "text"}})
    assert isinstance(lost, RejectedInput) and lost.reason == "unknown_form"


@pytest.mark.parametrize(
    ("row", "columns", "roles", "facts"),
    [
        (
            NESTED,
            "messages=conv.turns,role=from,text=value,reward=score,user=customer,assistant=bot",
            ["user", "assistant"],
            ("a.jsonl:7", 0.5, None),
        ),
        (
            STEPS,
            "messages=$.episode[0].log,role=who,text=said.0,calls=does,reward=won,task=a.b",
            ["user", "assistant"],
            ("pier__moor-1", 1.0, None),
        ),
        (
            PAIR,
            {"prompt": "question", "answer": "reply", "model": "wrote"},
            ["user", "assistant"],
            (None, None, "helmsman-2"),
        ),
    ],
)
def test_map_names_columns_of_unlike_files(tmp_path, row, columns, roles, facts):
    rollout = read(tmp_path, row, columns)
    assert isinstance(rollout, RolloutRecord), rollout
    agent = rollout.agents[0]
    assert [message.role for message in agent.messages] == roles and len(agent.turns) == 1
    task, reward, model = facts
    assert rollout.task_id == (task or "a.jsonl, row 0") and rollout.teacher == model
    assert (rollout.outcome or {}).get("reward") == reward
    calls = [action.command for action in agent.turns[0].actions]
    assert calls == (["ls"] if row is STEPS else []) and agent.messages[0].content.startswith("Moor")


def test_path_that_a_row_lacks_is_refused_by_its_name(tmp_path):
    item = read(tmp_path, NESTED, "messages=conv.steps,role=from,text=value")
    assert isinstance(item, RejectedInput) and item.reason == "unknown_form"
    assert "'conv.steps'" in item.detail and "conv, score" in item.detail


@pytest.mark.parametrize("columns", ["role=from", "messages=", "message=a", 3, {"messages": 1}])
def test_bad_map_is_refused(tmp_path, columns):
    with pytest.raises(ValueError, match="map"):
        read(tmp_path, NESTED, columns)


def test_unknown_rows_are_answered_with_values_and_a_map(tmp_path):
    with pytest.raises(UnknownFormat) as raised:
        detect(write_lines(tmp_path / "a.jsonl", [NESTED]))
    text = str(raised.value)
    assert "id, conv, score (id = 7, conv = {" in text and "--map messages=conv.turns,role=from,text=value" in text


def _said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"input": _said("user", "a"), "output": _said("assistant", "b")}, "--map prompt=input,answer=output"),
        ({"context": _said("system", "a") + _said("user", "b"), "reply": _said("model", "c")},
         "--map prompt=context,answer=reply"),
        ({"input": "a", "output": "b"}, "--map prompt=input,answer=output"),
        ({"prompt": _said("user", "a")}, "without an answer"),
        ({"context_messages": _said("human", "a"), "tools": [{"name": "b"}]}, "without an answer"),
    ],
)  # fmt: skip
def test_prompts_beside_their_answers_or_without_any_are_told_apart(tmp_path, row, expected):
    with pytest.raises(UnknownFormat) as raised:
        detect(write_lines(tmp_path / "a.jsonl", [row]))
    text = str(raised.value)
    assert expected in text
    if expected.startswith("--map"):
        assert "so call it" not in text
        columns = expected.removeprefix("--map ")
        item = read(tmp_path, row, columns)
        assert isinstance(item, RolloutRecord)
        assert [turn.content for turn in item.agents[0].turns] == [_text(row[columns.rpartition("=")[2]])]


def _text(value: str | list[dict[str, str]]) -> str:
    return value if isinstance(value, str) else value[0]["content"]


@pytest.mark.parametrize(("more", "text"), [("2 and 3", "Add.\n\n2 and 3"), ("", "Add."), (None, "Add.")])
def test_input_of_alpacas_rows_follows_the_prompt(tmp_path, more, text):
    path = write_lines(tmp_path / "a.jsonl", [{"instruction": "Add.", "input": more, "output": "5"}])
    columns = {"prompt": "instruction", "input": "input", "answer": "output"}
    (rollout,) = import_runs("mapped", path, {"map": columns})
    assert isinstance(rollout, RolloutRecord)
    assert [(message.role, message.content) for message in own_messages(rollout.agents[0])] == [
        ("user", text),
        ("assistant", "5"),
    ]
