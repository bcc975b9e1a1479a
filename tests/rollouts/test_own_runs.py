"""A user's own chat-format runs, from import to export: labels are what the student's template writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from etpi.init.preview import parts
from etpi.init.student import Student
from etpi_assets.agent.actions import read_actions
from etpi_assets.exports import export
from etpi_assets.importers import import_runs
from etpi_assets.resources import Resources
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.tables import iter_turns
from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.tool_forms import parse_structured
from etpi_resources.lake.lake import Ref
from tests.support.curation import CurationLake
from tests.support.own_runs import ANSWER, TOOLS, recorded_run, write_runs

pytest.importorskip("dashscope", reason="the qwen3 vocabulary comes with etpi[import]")

CHATML = (
    "qwen3", "qwen3_training", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6",
    "qwen3_8", "qwen2_5", "nemotron_3_nano",
)  # fmt: skip
"""TRL's ChatML templates with tool calls."""
PLAIN = {"enable_thinking": False}
"""The runs have no reasoning, so templates must close the think block that they open."""
RUNS = [recorded_run(number, turns) for number, turns in enumerate((2, 3, 4, 3, 40))]
SET = 'title = "mine"\nkind = "imported"\nformat = "messages"\npath = "PATH"\n[options]\nteacher = "me"\n'
EXPERIMENT = """title = "own runs"
rollout_sets = ["mine"]
evaluate = "none"
select = {require = [], shortest_correct = false}
dataset = {val_fraction = 0.0, upweight_turns = [], max_length = LENGTH}
[pairs]
capture = "retokenised"
[base]
kind = "none"
tokenizer = "qwen3"
chat_template = "TEMPLATE"
[serving.template_kwargs]
enable_thinking = false
[gates]
teacher = {}
first_turn_loss_share = 0.0
format_exposure = 1
role_balance = 0.0
plan_paths_in_task = 0.0
"""


@pytest.fixture(scope="module")
def curation(tmp_path_factory: pytest.TempPathFactory) -> CurationLake:
    folder = tmp_path_factory.mktemp("own")
    curation = CurationLake(folder)
    curation.write("rollout_sets", "mine", SET.replace("PATH", str(write_runs(folder, RUNS))))
    for template in CHATML:
        curation.write("experiments", template, EXPERIMENT.replace("TEMPLATE", template).replace("LENGTH", "16384"))
    curation.make_set("mine")
    return curation


def labels(curation: CurationLake, name: str) -> dict[tuple[str, int], str]:
    chat = load_chat_format("qwen3", name)
    pairs = curation.lake.read(Ref("tito_pairs", "experiment", name), "pairs")
    return {
        (rollout, turn): chat.decode(output.tolist()) for (rollout, _, turn), _, output in iter_turns(pairs)
        if output is not None
    }  # fmt: skip


@pytest.mark.parametrize("template", CHATML)
def test_labels_and_prompts_equal_the_templates_rendering_of_the_messages(
    curation: CurationLake, template: str
) -> None:
    assert curation.failures(template) == {}
    chat = load_chat_format("qwen3", template)
    form = chat.tool_form
    assert form is not None
    pairs = curation.lake.read(Ref("tito_pairs", "experiment", template), "pairs")
    rollouts = curation.lake.read(Ref("raw_rollouts", "rollout_set", "mine"), "rollouts").to_pylist()
    runs = {row["rollout_id"]: RUNS[int(row["task_id"].rpartition("-")[2])] for row in rollouts}
    seen = 0
    for (rollout, _, turn), prompt, output in iter_turns(pairs):
        assert output is not None
        messages = as_objects(runs[rollout]["messages"])
        position = [i for i, m in enumerate(messages) if m["role"] == "assistant"][turn]
        assert prompt.tolist() == chat.prompt_ids(messages[:position], tools=TOOLS, **PLAIN)
        shown = messages[: position + 1]
        text = chat.tokenizer.apply_chat_template(shown, tools=TOOLS, chat_template=chat.template, tokenize=False)
        turn_text = str(text).rpartition("<|im_start|>assistant\n")[2].removesuffix("\n")
        opening = chat.decode(prompt.tolist()).rpartition("<|im_start|>assistant\n")[2]
        expected = chat.encode(turn_text.removeprefix(opening), allow_special=True)
        assert output.tolist() == expected, "token for token"
        seen += 1
        wanted = [parse_structured(call) for call in messages[position].get("tool_calls", ())]
        loaded = form.parse(chat.decode(output.tolist()))
        assert form.same(loaded, wanted)
        actions, error = read_actions(chat.decode(output.tolist()).removesuffix("<|im_end|>"), form=form)
        assert bool(actions) == bool(wanted) and (error is None) == bool(wanted)
    assert seen == sum(sum(m["role"] == "assistant" for m in run["messages"]) for run in RUNS)


def as_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with arguments as objects, as servers pass them to a template."""
    parsed = json.loads(json.dumps(messages))
    for message in parsed:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return parsed


def test_final_answer_is_a_label_with_end_of_turn(curation: CurationLake) -> None:
    assert curation.failures("qwen3") == {}
    ends = [text for text in labels(curation, "qwen3").values() if text.startswith("Fixed")]
    assert ends == [f"{ANSWER}<|im_end|>"] * len(RUNS)


def test_preview_shows_the_labels_that_are_trained(curation: CurationLake) -> None:
    assert curation.failures("qwen3") == {}
    trained = labels(curation, "qwen3")
    student = Student(chat=load_chat_format("qwen3", "qwen3"))
    for record in import_runs("messages", curation.folder / "runs.jsonl"):
        assert isinstance(record, RolloutRecord)
        shown = parts(record, student, native=False, strips_think=True)
        assert [(part.turn, part.text) for part in shown if part.is_trained] == [
            (turn, text) for (rollout, turn), text in sorted(trained.items()) if rollout == record.rollout_id
        ]


def test_turns_over_max_length_block_and_name_the_option(curation: CurationLake) -> None:
    curation.write("experiments", "short", EXPERIMENT.replace("TEMPLATE", "qwen3").replace("LENGTH", "700"))
    failed = curation.failures("short")
    assert "turns_lost" in failed
    assert all(term in failed["turns_lost"] for term in ("of 57", "over_max_length", "dataset.max_length"))


def test_exports_keep_tools_and_structured_calls(curation: CurationLake, tmp_path: Path) -> None:
    assert curation.failures("qwen3") == {}
    resources = Resources(lake=curation.lake, specs_folder=curation.folder / "specs")
    for name in ("trl_messages", "verl_sft", "hub"):
        export("qwen3", name, tmp_path / name, resources)
    (row, *_) = pq.read_table(tmp_path / "trl_messages" / "data" / "train.parquet").to_pylist()
    assert json.loads(row["tools"]) == TOOLS
    call = json.loads(row["messages"])[2]["tool_calls"][0]["function"]
    assert (call["name"], list(json.loads(call["arguments"]))) == ("execute_bash", ["timeout", "command"])
    (row, *_) = pq.read_table(tmp_path / "verl_sft" / "data" / "train.parquet").to_pylist()
    assert row["tools"] == TOOLS
    records = list(import_runs("messages", tmp_path / "trl_messages" / "data", {}))
    assert all(isinstance(record, RolloutRecord) and record.tools == TOOLS for record in records)


def test_trl_renders_the_export_to_the_same_labels(curation: CurationLake, tmp_path: Path) -> None:
    """Render with TRL's own code, from the columns that its trainer reads."""
    from trl.data_utils import apply_chat_template

    assert curation.failures("qwen3") == {}
    export(
        "qwen3", "trl_messages", tmp_path / "out", Resources(lake=curation.lake, specs_folder=curation.folder / "specs")
    )
    chat = load_chat_format("qwen3", "qwen3")
    said = set(labels(curation, "qwen3").values())
    for row in pq.read_table(tmp_path / "out" / "data" / "train.parquet").to_pylist():
        text = apply_chat_template(
            {"messages": json.loads(row["messages"])}, chat.tokenizer, tools=json.loads(row["tools"])
        )["text"]
        turns = [part.partition("<|im_end|>")[0] for part in text.split("<|im_start|>assistant\n")[1:]]
        assert all(turn.rpartition("</think>")[2].lstrip("\n") + "<|im_end|>" in said for turn in turns)


def test_calls_written_as_text_in_another_syntax_block(curation: CurationLake) -> None:
    """The prompt asks for JSON calls; the messages have XML calls in their text."""
    runs = json.loads(json.dumps([recorded_run(9, 2)]))
    for message in runs[0]["messages"]:
        if message.pop("tool_calls", None):
            message["content"] = (
                "<tool_call>\n<function=execute_bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
            )
    (curation.folder / "xml").mkdir()
    path = write_runs(curation.folder / "xml", runs)
    curation.write("rollout_sets", "mine_xml", SET.replace("PATH", str(path)))
    text = EXPERIMENT.replace("TEMPLATE", "qwen3").replace("LENGTH", "16384").replace('["mine"]', '["mine_xml"]')
    curation.write("experiments", "xml", text)
    curation.make_set("mine_xml")
    failed = curation.failures("xml")
    assert set(failed) == {"label_syntax"}
    assert all(form in failed["label_syntax"] for form in ("qwen_xml", "hermes"))


def test_call_that_the_syntax_cannot_express_is_dropped_with_its_reason(curation: CurationLake) -> None:
    run = recorded_run(8, 6)
    spoilt = run["messages"][2]["tool_calls"][0]["function"]
    spoilt["arguments"] = json.dumps({"command": "echo '</parameter>'"})
    (curation.folder / "spoilt").mkdir()
    path = write_runs(curation.folder / "spoilt", [run])
    curation.write("rollout_sets", "spoilt", SET.replace("PATH", str(path)))
    text = EXPERIMENT.replace("TEMPLATE", "qwen3_6").replace("LENGTH", "16384").replace('["mine"]', '["spoilt"]')
    curation.write("experiments", "spoilt", text)
    curation.make_set("spoilt")
    assert curation.failures("spoilt") == {}
    (dropped,) = curation.lake.read(Ref("tito_pairs", "experiment", "spoilt"), "dropped").to_pylist()
    assert (dropped["turn"], dropped["reason"]) == (0, "unparseable")
    assert "qwen_xml" in dropped["detail"]
