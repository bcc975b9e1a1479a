"""Exported conversations as datasets reads them: the template of each family writes the text that the student reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from datasets import Json
from hypothesis import given
from hypothesis import strategies as st

from etpi_assets.exports import export
from etpi_assets.exports.conversations import json_fields, read_fraction
from etpi_assets.exports.experiment_data import ExportSource
from etpi_assets.importers import import_runs
from etpi_assets.resources import Resources
from etpi_assets.specs.load import SpecError
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.chat.format import load_chat_format
from tests.support.curation import CurationLake
from tests.support.own_runs import ANSWER, TOOLS, write_runs
from tests.support.students import FAMILIES, VERL_SFT, Family, byte_tokenizer, read_by

SET = 'title = "mine"\nkind = "imported"\npath = "PATH"\n'
EXPERIMENT = """title = "mine"
rollout_sets = ["mine"]
evaluate = "none"
[select]
min_reward = "none"
[base]
kind = "none"
tokenizer = "TOKENIZER"
chat_template = "TOKENIZER"
[pairs]
strip_think = STRIP
[gates]
override = {skip_rate = "One run of three is cut.", turns_lost = "One run of three is cut."}
"""
QWEN2_5 = replace(FAMILIES["qwen3"], template="qwen2_5")
NUMBER = 10**30
"""More than 64 bits."""


@dataclass(frozen=True)
class Exported:
    """An export, the text that the student's template writes of each conversation, and the tokenizer."""

    folder: Path
    manifest: dict[str, Any]
    texts: dict[str | None, str]
    tokenizer: Any


def call(number: int, **arguments: Any) -> dict[str, Any]:
    function = {"name": "execute_bash", "arguments": json.dumps(arguments)}
    return {"id": f"c{number}", "type": "function", "function": function}


def run(name: str, *messages: dict[str, Any], tools: list[Any] | None = TOOLS) -> dict[str, Any]:
    offered = {"tools": tools} if tools else {}
    return {"instance_id": name, "messages": [{"role": "user", "content": "Mend it."}, *messages], **offered}


def runs(**arguments: Any) -> list[dict[str, Any]]:
    """Return a run with calls, one without tools, and one whose only turn was cut at the limit.

    Args:
        arguments: further arguments of the second call.
    """
    first = {"content": "", "reasoning_content": "Let me see.", "tool_calls": [call(0, command="echo </think>")]}
    second = {"content": "Again.", "tool_calls": [call(1, command="ls", **arguments)]}
    return [
        run(
            "calls",
            {"role": "assistant", **first},
            {"role": "tool", "tool_call_id": "c0", "content": ""},
            {"role": "assistant", **second},
            {"role": "tool", "tool_call_id": "c1", "content": "a </think>"},
            {"role": "assistant", "content": ANSWER},
        ),
        run("words", {"role": "assistant", "content": ANSWER}, tools=None),
        run("cut", {"role": "assistant", "content": "I would", "finish_reason": "length"}),
    ]


def exported(
    folder: Path, family: Family, rows: list[dict[str, Any]], name: str = "trl_messages", strip: str = "true"
) -> Exported:
    tokenizer = byte_tokenizer(family)
    tokenizer.save_pretrained(folder / "tokenizer")
    world = CurationLake(folder)
    world.write("rollout_sets", "mine", SET.replace("PATH", str(write_runs(folder, rows))))
    text = EXPERIMENT.replace("TOKENIZER", str(folder / "tokenizer")).replace("STRIP", strip)
    world.write("experiments", "mine", text)
    world.make_set("mine")
    failures = world.failures("mine")
    assert failures == {}
    resources = Resources(lake=world.lake, specs_folder=folder / "specs")
    texts = {
        c.record.task_id: str(tokenizer.apply_chat_template(c.messages, tools=c.tools, tokenize=False))
        for c in ExportSource("mine", resources).conversations()
    }
    return Exported(folder / "out", export("mine", name, folder / "out", resources), texts, tokenizer)


def loaded(file: Path, cache: Path) -> list[dict[str, Any]]:
    from datasets import load_dataset

    data = load_dataset("parquet", data_files=str(file), split="train", cache_dir=str(cache))
    return [dict(row) for row in data]


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"gemma3"}))  # whose template writes no calls
def test_every_family_renders_its_rows_as_the_student_reads_them(family: str, tmp_path: Path) -> None:
    result = exported(tmp_path, FAMILIES[family], runs(timeout=None))
    rows = loaded(result.folder / "data/train.parquet", tmp_path / "cache")
    assert len(rows) == 2
    for row in rows:
        text = result.tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
        assert text == result.texts[row["task_id"]] and ANSWER in text
    assert all(value is not None for row in rows for m in row["messages"] for value in m.values())
    back = [item for item in import_runs("messages", result.folder / "data", {}) if isinstance(item, RolloutRecord)]
    assert [len(record.agents[0].turns) for record in back] == [3, 1] and back[0].tools == TOOLS


@pytest.mark.parametrize(("strip", "kept"), [("true", False), ("false", True)])
def test_messages_have_thoughts_if_the_data_set_has_them(strip: str, kept: bool, tmp_path: Path) -> None:
    result = exported(tmp_path, FAMILIES["qwen3"], runs(), strip=strip)
    assert ("Let me see." in str(pq.read_table(result.folder / "data/train.parquet")["messages"][0])) is kept


def test_agents_without_a_turn_in_the_data_set_are_counted(tmp_path: Path) -> None:
    result = exported(tmp_path, QWEN2_5, runs())
    assert result.manifest["left_out"] == {"agents without a turn in the data set": 1}
    assert "assistant_only_loss" in result.manifest["notes"][0]


def test_number_that_datasets_cannot_read_leaves_its_conversation_out(tmp_path: Path) -> None:
    rows = runs(timeout=NUMBER)
    rows[0]["messages"][1]["weight"] = 0  # not trained
    result = exported(tmp_path, FAMILIES["qwen3_6"], rows)
    assert not any("no turns" in note for note in result.manifest["notes"])
    assert [n for reason, n in result.manifest["left_out"].items() if "64 bits" in reason] == [1]
    assert [row["task_id"] for row in loaded(result.folder / "data/train.parquet", tmp_path / "cache")] == ["words"]


def test_fractions_are_read_as_they_are(tmp_path: Path) -> None:
    bound = {"default": 0.7, "minimum": 3e-4, "maximum": 0.95, "title": '\\" 0.7', "step": 3.0e22}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"a": bound}}}}
    rows = [{**row, "tools": [tool, *TOOLS]} for row in runs(timeout=-1.64)[:1]]
    result = exported(tmp_path, FAMILIES["qwen3_6"], rows)
    (row,) = loaded(result.folder / "data/train.parquet", tmp_path / "cache")
    text = result.tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
    assert text == result.texts["calls"] and json.dumps(bound) in text and "-1.64" in text


@given(st.decimals(-(2**64), 2**64, allow_nan=False, places=17), st.integers(-20, 20) | st.none())
def test_fraction_is_read_as_datasets_reads_it(number: Decimal, exponent: int | None) -> None:
    text = f"{number:f}" + (f"e{exponent}" if exponent is not None else "")
    read = read_fraction(text)
    assert read is None or Json().decode_example(text) == read


def test_template_that_reads_arguments_as_text_keeps_any_number(tmp_path: Path) -> None:
    result = exported(tmp_path, FAMILIES["qwen3"], runs(timeout=NUMBER))
    rows = loaded(result.folder / "data/train.parquet", tmp_path / "cache")
    assert [str(NUMBER) in json.dumps(row["messages"]) for row in rows] == [True, False]


def test_tools_that_are_not_written_leave_no_conversation_out() -> None:
    chat, message = load_chat_format("tiny"), {"role": "user", "content": "Mend it."}
    assert chat.calls_in_content
    assert json_fields([message], chat, [{"maximum": NUMBER}]) == {"messages": json.dumps([message]), "tools": None}


# --- verl -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("consumers")
def test_verl_reads_rows_with_and_without_tools(tmp_path: Path) -> None:
    result = exported(tmp_path, QWEN2_5, runs(), "verl_sft")
    trained = read_by(VERL_SFT, file=result.folder / "data/train.parquet", tokenizer=tmp_path / "tokenizer")
    assert len(trained) == 2 and trained[1] == f"{ANSWER}<|im_end|>\n"
    assert trained[0].count("<tool_call>") == 2 and trained[0].endswith(trained[1])


def test_template_that_does_not_read_verls_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=" 1 conversations .*export trl"):
        exported(tmp_path, FAMILIES["gemma4"], runs()[:1], "verl_sft")


@pytest.mark.parametrize("bound", [NUMBER, "high"])
def test_schemas_that_no_column_holds_leave_their_conversations_out(bound: Any, tmp_path: Path) -> None:
    """A table has no number over 64 bits, and no column of both text and numbers."""
    parameters = {"type": "object", "properties": {"a": {"maximum": bound}, "b": {"maximum": 1}}}
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": parameters}}
    rows = [{**row, "tools": [TOOLS[0], tool]} if "tools" in row else row for row in runs()]
    result = exported(tmp_path, QWEN2_5, rows, "verl_sft")
    assert [n for reason, n in result.manifest["left_out"].items() if "tool schemas" in reason] == [1]
    (row,) = pq.read_table(result.folder / "data/train.parquet").to_pylist()
    assert (row["extra_info"]["task_id"], row["extra_info"]["index"]) == ("words", 0)


# --- prompts --------------------------------------------------------------------------------------------------------


def test_prompts_say_where_tools_and_later_rollouts_are(tmp_path: Path) -> None:
    again: dict[str, Any] = runs()[0]
    again["messages"][-1]["content"] += " Twice."
    demonstrated: dict[str, Any] = {**runs()[0], "instance_id": "shown"}
    demonstrated["messages"][1]["weight"] = 0
    result = exported(tmp_path, QWEN2_5, [*runs(), again, demonstrated], "verl_rl")
    assert sorted(result.manifest["left_out"].values()) == [1, 1, 1]
    assert [file["rows"] for file in result.manifest["files"]] == [2]
    assert "tool_config_path" in result.manifest["notes"][1]
