"""Facts that rows of public formats hold in their own ways: calls, nulls, flags, ids of results, tools, rewards."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etpi_assets.importers import UnknownFormat, count_found, import_runs
from etpi_assets.importers.calls import read_calls
from etpi_assets.importers.conversation import Message, in_call_order
from etpi_assets.importers.source import without_padding
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.trajectories.records import RolloutRecord
from tests.support.rows import (
    called,
    chat,
    detect,
    factory_row,
    openhands_flat_row,
    openhands_row,
    openhands_typed_row,
    swift_row,
    tool,
    verifiers_row,
    write_lines,
    write_parquet,
)

USER = {"role": "user", "content": "Moor the boat."}
ANSWER = {"role": "assistant", "content": "Moored."}


def read(path: Path, format: str = "auto") -> list[RolloutRecord | RejectedInput]:
    items = list(import_runs(format, path))
    assert len(items) == count_found(format, path)
    return items


def only(path: Path) -> RolloutRecord:
    (item,) = read(path)
    assert isinstance(item, RolloutRecord), item
    return item


def row_of(tmp_path: Path, row: dict[str, Any]) -> RolloutRecord:
    return only(write_lines(tmp_path / "a.jsonl", [row]))


def refusal(tmp_path: Path, row: dict[str, Any], format: str = "auto") -> RejectedInput:
    (item,) = read(write_lines(tmp_path / "a.jsonl", [row]), format)
    assert isinstance(item, RejectedInput) and item.row == 0, item
    return item


def arguments(rollout: RolloutRecord) -> list[Any]:
    calls = [call for m in rollout.agents[0].messages for call in m.tool_calls or ()]
    return [call["function"]["arguments"] if "function" in call else call["arguments"] for call in calls]


def answers(rollout: RolloutRecord) -> list[tuple[str, str | None]]:
    return [(turn.content, turn.parse_error) for turn in rollout.agents[0].turns]


# --- nulls ----------------------------------------------------------------------------------------------------------


def test_null_of_json_is_kept_in_calls_and_schemas(tmp_path):
    schema = tool("run", cmd="string")
    schema["function"]["parameters"]["properties"]["timeout"] = {"type": ["integer", "null"], "default": None}
    asked = {"cmd": "ls", "timeout": None, "env": [{"name": "A", "value": None}]}
    call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": asked}}
    talk = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "x"}, ANSWER]
    for tools in ([schema], json.dumps([schema]), [json.dumps(schema)]):
        rollout = row_of(tmp_path, {"messages": talk, "tools": tools})
        assert arguments(rollout) == [asked] and rollout.tools == [schema]


def test_padding_of_parquet_is_removed_in_lists_too_and_the_id_stays(tmp_path):
    edits = [{"op": "add", "line": 1}, {"op": "cut", "first": 2, "last": 3}]
    keys = {key: None for edit in edits for key in edit}
    rows = [
        [{"function": {"name": "edit", "arguments": {"edits": [{**keys, **edit} for edit in edits], "path": None}}}],
        [{"function": {"name": "read", "arguments": {"edits": None, "path": "a.py"}}}],
    ]
    talk = [
        [USER, {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "x"}, ANSWER]
        for calls in rows
    ]
    path = write_parquet(tmp_path / "a.parquet", [{"messages": messages} for messages in talk])
    first, second = read(path)
    assert isinstance(first, RolloutRecord) and isinstance(second, RolloutRecord)
    assert arguments(first) == [{"edits": edits}] and arguments(second) == [{"path": "a.py"}]


@pytest.mark.parametrize("mark", ["user message", "call", "schema"])
def test_padding_of_json_that_was_written_from_a_table_is_removed(tmp_path, mark):
    call: dict[str, Any] = {
        "id": "c1",
        "type": "function",
        "function": {"name": "run", "arguments": {"cmd": "ls", "path": None}},
    }
    schemas = [tool("run", cmd="string"), tool("read", path="string")]
    user: dict[str, Any] = dict(USER)
    if mark == "user message":
        user["tool_calls"] = None
    if mark == "call":
        call["id"] = None
    if mark == "schema":
        for schema in schemas:
            properties = schema["function"]["parameters"]["properties"]
            schema["function"]["parameters"]["properties"] = {"cmd": None, "path": None, **properties}
    talk = [user, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "x"}, ANSWER]
    rollout = row_of(tmp_path, {"messages": talk, "tools": schemas})
    assert arguments(rollout) == [{"cmd": "ls"}]
    assert rollout.tools == [tool("run", cmd="string"), tool("read", path="string")]


@given(
    st.recursive(
        st.one_of(st.none(), st.integers(), st.text(max_size=3)),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    )
)
def test_padding_is_every_null_of_a_struct_and_nothing_else(value):
    result = without_padding(value)
    assert without_padding(result) == result

    def same(before: Any, after: Any) -> bool:
        if isinstance(before, dict):
            return set(after) <= set(before) and all(
                same(before[key], after[key]) if key in after else before[key] is None for key in before
            )
        if isinstance(before, list) and isinstance(after, list):
            return len(before) == len(after) and all(map(same, before, after))
        return before == after

    assert same(value, result)


# --- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", "  ", "null", None, [], "[]", "{}", {}])
def test_empty_arguments_are_those_of_a_tool_without_parameters(tmp_path, value):
    talk = chat()
    talk[2]["tool_calls"][0]["function"] = {"name": "now", "arguments": value}
    rollout = row_of(tmp_path, {"messages": talk})
    assert [a.command for a in rollout.agents[0].turns[0].actions] == ["now {}"]


@pytest.mark.parametrize(
    "call",
    [
        json.dumps({"id": "c", "function": {"name": "run", "arguments": '{"cmd": "ls"}'}}),
        {"name": "run", "args": {"cmd": "ls"}, "id": "c", "type": "tool_call"},
        {"name": "run", "parameters": {"cmd": "ls"}},
        {"function": "run", "arguments": {"cmd": "ls"}},
        {"type": "tool_use", "name": "run", "input": {"cmd": "ls"}},
    ],
)
def test_calls_of_other_libraries_keep_their_arguments(call):
    assert [(call.name, call.arguments) for call in read_calls([call], "x")] == [("run", {"cmd": "ls"})]


def test_message_without_content_keeps_its_calls(tmp_path):
    talk = chat()
    del talk[2]["content"]
    agent = row_of(tmp_path, {"messages": talk}).agents[0]
    assert [[a.command for a in turn.actions] for turn in agent.turns] == [["ls"], []]


def test_row_of_anthropic_has_its_system_prompt_and_tools(tmp_path):
    schema = {"name": "bash", "description": "Run.", "input_schema": {"type": "object"}, "cache_control": {}}
    row = {"system": "You have a shell.", "messages": [USER, ANSWER], "tools": [schema]}
    rollout = row_of(tmp_path, row)
    assert [m.role for m in rollout.agents[0].messages] == ["system", "user", "assistant"]
    function = {"name": "bash", "description": "Run.", "parameters": {"type": "object"}}
    assert rollout.tools == [{"type": "function", "function": function}]
    row["messages"] = [{"role": "system", "content": "Own."}, *row["messages"]]
    assert [m.content for m in row_of(tmp_path, row).agents[0].messages][0] == "Own."


def test_call_whose_arguments_have_an_unknown_key_is_refused_by_name(tmp_path):
    talk = chat()
    talk[2]["tool_calls"] = [{"function": {"name": "run", "payload": {"cmd": "ls"}}}]
    found = refusal(tmp_path, {"messages": talk})
    assert found.reason == "unknown_form" and "payload" in found.detail and "messages[2]" in found.detail


def test_rows_of_verifiers_have_their_calls_and_tools(tmp_path):
    rollout = row_of(tmp_path, verifiers_row())
    assert [[a.command for a in turn.actions] for turn in rollout.agents[0].turns] == [["ls"], []]
    assert rollout.tools == [tool("bash", command="string")] and rollout.outcome == {"reward": 1.0, "verdict": "passed"}
    with_steps = {**verifiers_row(), "trajectory": [{"prompt": [], "completion": []}]}
    assert detect(write_lines(tmp_path / "b.jsonl", [with_steps])) == "trl"


def test_prompt_and_completion_may_be_json_texts_of_messages(tmp_path):
    row = verifiers_row()
    written = {**row, "prompt": json.dumps(row["prompt"]), "completion": json.dumps(row["completion"])}
    assert row_of(tmp_path, written).agents == row_of(tmp_path, row).agents
    text = '[{"role": "guard"}]'
    assert row_of(tmp_path, {**row, "completion": text}).agents[0].turns[0].content == text


def test_schemas_of_the_options_are_for_runs_that_record_none(tmp_path):
    row, named = verifiers_row(), [tool("other", x="string")]
    path = write_lines(tmp_path / "a.jsonl", [row, {k: v for k, v in row.items() if k not in ("info", "tools")}])
    for tools in (named, json.dumps(named)):
        first, second = import_runs("auto", path, {"tools": tools})
        assert isinstance(first, RolloutRecord) and isinstance(second, RolloutRecord)
        assert first.tools == only(write_lines(tmp_path / "b.jsonl", [row])).tools and second.tools == named
    for tools in ("other", [{"x": 1}], 3):
        with pytest.raises(ValueError, match=r"options\.tools"):
            list(import_runs("auto", path, {"tools": tools}))


def test_rows_of_swift_join_the_calls_of_a_turn(tmp_path):
    rollout = row_of(tmp_path, swift_row())
    agent = rollout.agents[0]
    assert [[a.command for a in turn.actions] for turn in agent.turns] == [["ls", "pwd"], []]
    assert agent.turns[0].content == "I look." and agent.turns[0].observation == "moor.py\n/work"
    assert [m.turn for m in agent.messages if m.content == "I guess."] == [None]
    assert rollout.tools == [tool("bash", command="string")]


def test_rows_of_llama_factory_have_text_reasoning_and_calls(tmp_path):
    rollout = row_of(tmp_path, factory_row())
    first, last = rollout.agents[0].turns
    assert (first.content, first.reasoning, first.actions[0].command) == ("I look.", "hm", "ls")
    assert (last.content, last.parse_error) == ("Moored.", None)


def test_part_of_text_under_an_unknown_key_is_refused_by_its_keys(tmp_path):
    found = refusal(tmp_path, {"messages": [{"role": "user", "content": [{"type": "text", "words": "hi"}]}, ANSWER]})
    assert found.reason == "unknown_form" and "without `text`" in found.detail and "words" in found.detail


def test_reasoning_parts_are_reasoning_and_not_content(tmp_path):
    for part in ({"type": "reasoning", "text": "hm"}, {"type": "thinking", "thinking": "hm"}):
        content = [part, {"type": "output_text", "text": "Moored."}]
        (turn,) = row_of(tmp_path, {"messages": [USER, {"role": "assistant", "content": content}]}).agents[0].turns
        assert (turn.content, turn.reasoning) == ("Moored.", "hm")
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}]
    talk = [USER, {**ANSWER, "thinking_blocks": blocks}]
    assert row_of(tmp_path, {"messages": talk}).agents[0].turns[0].reasoning == "hm"


def test_messages_of_langchain_have_roles_calls_and_finish_reasons(tmp_path):
    talk = [
        {"type": "human", "content": "Moor the boat."},
        {"type": "ai", "content": "", "tool_calls": [{"name": "bash", "args": {"command": "ls"}, "id": "c"}]},
        {"type": "tool", "content": "moor.py", "tool_call_id": "c"},
        {"type": "ai", "content": "Moo", "response_metadata": {"finish_reason": "length"}},
    ]
    first, last = row_of(tmp_path, {"messages": talk}).agents[0].turns
    assert first.actions[0].command == "ls" and (last.finish_reason, last.parse_error) == ("length", "no command found")


# --- results --------------------------------------------------------------------------------------------------------


@given(st.permutations(range(4)), st.booleans())
def test_parallel_results_follow_their_calls(order, named):
    calls = [{"id": None if named else f"c{i}", "function": {"name": f"tool{i}", "arguments": {}}} for i in range(4)]
    entries = [
        Message("user", "Go."),
        Message("assistant", "", read_calls(calls, "x")),
        *(Message("tool", str(i), result_of=f"tool{i}" if named else f"c{i}") for i in order),
        Message("assistant", "Done."),
    ]
    assert [entry.text for entry in in_call_order(entries)] == ["Go.", "", "0", "1", "2", "3", "Done."]


@pytest.mark.parametrize("ids", [["b", None], ["b", "b"], ["b", "x"]])
def test_results_that_name_no_call_or_one_twice_keep_their_order(ids):
    calls = [{"id": name, "function": {"name": "run", "arguments": {}}} for name in "ab"]
    entries = [
        Message("assistant", "", read_calls(calls, "x")),
        *(Message("tool", f"{i}", result_of=a) for i, a in enumerate(ids)),
    ]
    assert [entry.text for entry in in_call_order(entries)] == ["", "0", "1"]


def test_results_of_anthropic_are_tool_messages_in_the_order_of_the_calls(tmp_path):
    uses = [{"type": "tool_use", "id": f"t{i}", "name": "bash", "input": {"command": f"cat {i}"}} for i in range(2)]
    results = [{"type": "tool_result", "tool_use_id": f"t{i}", "content": f"text {i}"} for i in (1, 0)]
    talk = [USER, {"role": "assistant", "content": uses}, {"role": "user", "content": results}, ANSWER]
    messages = row_of(tmp_path, {"messages": talk}).agents[0].messages
    assert [(m.role, m.content) for m in messages][2:4] == [("tool", "text 0"), ("tool", "text 1")]


# --- flags ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "trained"),
    [
        *((key, 0, False) for key in ("train", "loss", "loss_mask", "loss_weight", "trainable")),
        *(("weight", value, False) for value in (0, 0.0, False, "false", [0, 0])),
        *(("weight", value, True) for value in (1, 1.0, True, None)),
    ],
)
@pytest.mark.parametrize("form", ["messages", "conversations"])
def test_flag_of_a_message_makes_it_context(tmp_path, key, value, trained, form):
    talk = [USER, {"role": "assistant", "content": "bad", key: value}, {"role": "user", "content": "No."}, ANSWER]
    if form == "conversations":
        names = {"user": "human", "assistant": "gpt"}
        talk = [{**m, "from": names[m.pop("role")], "value": m.pop("content")} for m in map(dict, talk)]
    for other in ({}, {"trainable": True, "weight": 1}):
        talk[1] = {**other, **talk[1]}
        turns = row_of(tmp_path, {form: talk}).agents[0].turns
        assert [turn.content for turn in turns] == (["bad", "Moored."] if trained else ["Moored."])


@pytest.mark.parametrize(
    "flag", [{"weight": 0.5}, {"loss_mask": [0, 1]}, {"train": "maybe"}, {"train_detail": [{"train": False}]}]
)
def test_message_that_is_trained_in_part_is_refused_by_its_key(tmp_path, flag):
    found = refusal(tmp_path, {"messages": [USER, {**ANSWER, **flag}]})
    assert found.reason == "partly_trained" and next(iter(flag)) in found.detail


@pytest.mark.parametrize("place", ["message", "row", "is_truncated"])
def test_answer_that_was_cut_is_no_final_answer(tmp_path, place):
    message = {**ANSWER, **({"finish_reason": "length"} if place == "message" else {})}
    facts = {"message": {}, "row": {"finish_reason": "length"}, "is_truncated": {"is_truncated": True}}
    agent = row_of(tmp_path, {"messages": [USER, message], **facts[place]}).agents[0]
    assert (agent.turns[0].finish_reason, agent.exit_status) == ("length", "unknown") and agent.turns[0].parse_error


# --- answers in words -----------------------------------------------------------------------------------------------


def test_answers_before_a_next_user_message_are_answers(tmp_path):
    again = {"role": "user", "content": "And now?"}
    rollout = row_of(tmp_path, {"messages": [*chat(), again, *chat()[2:], again, {**ANSWER, "content": "Yes."}]})
    assert answers(rollout) == [("I look.", None), ("Moored.", None)] * 2 + [("Yes.", None)]


def test_text_that_a_harness_refuses_is_no_answer(tmp_path):
    fenced = {"role": "assistant", "content": "```bash\nls\n```"}
    complaint = {"role": "user", "content": "Write exactly one command."}
    for talk in (
        [USER, {"role": "assistant", "content": "Hm."}, complaint, fenced, complaint, ANSWER],  # results of the user
        [*chat()[:4], {"role": "assistant", "content": "Hm."}, complaint, *chat()[2:4]],  # no final answer
    ):
        assert ("Hm.", "no command found") in answers(row_of(tmp_path, {"messages": talk}))


# --- OpenHands ------------------------------------------------------------------------------------------------------


def test_tools_of_the_system_event_are_offered(tmp_path):
    schema = tool("execute_bash", command="string")
    old = openhands_row()
    old["history"][0]["args"]["tools"] = [schema]
    new = openhands_typed_row()
    new["history"][0]["tools"] = [schema]
    for row in (old, new):
        assert row_of(tmp_path, row).tools == [schema]
    new["history"][0]["tools"] = [{"kind": "TerminalTool", "title": "terminal"}]
    assert row_of(tmp_path, new).tools is None


def test_flat_events_have_their_arguments_and_roles(tmp_path):
    agent = row_of(tmp_path, openhands_flat_row()).agents[0]
    assert [m.role for m in agent.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert [[a.command for a in turn.actions] for turn in agent.turns] == [
        ["touch LICENSE"],
        ['run_ipython {"code": "print(1)"}'],
        [],
        ['finish {"outputs": {}}'],
    ]
    assert [turn.content for turn in agent.turns] == ["I create it.", "Now its text.", "Shall I go on?", "Done."]
    assert agent.turns[0].exit_code == 0 and agent.exit_status == "Submitted"


def test_event_without_arguments_is_refused_and_never_an_empty_call(tmp_path):
    row = openhands_flat_row()
    row["history"][1] = {"action": "run", "thought": "I create it.", "keep_prompt": True}
    found = refusal(tmp_path, row)
    assert found.reason == "unknown_form" and "history[1]" in found.detail and "'run'" in found.detail


def test_action_event_without_its_call_is_rebuilt(tmp_path):
    row = openhands_typed_row()
    action = {"kind": "TerminalAction", "command": "ls", "timeout": None}
    row["history"][2] = {"kind": "ActionEvent", "tool_name": "bash", "tool_call_id": "c1", "action": action}
    assert [a.command for a in row_of(tmp_path, row).agents[0].turns[0].actions] == ["ls"]


@pytest.mark.parametrize(("sender", "text"), [("from", "value"), ("role", "value"), ("from", "content")])
def test_conversations_may_mix_the_keys_of_both_forms(tmp_path, sender, text):
    row = {"conversations": [{sender: "user", text: "Moor."}, {sender: "assistant", text: "Moored."}]}
    assert [message.content for message in row_of(tmp_path, row).agents[0].messages] == ["Moor.", "Moored."]


def test_request_for_a_condensation_that_did_not_follow_is_no_message(tmp_path):
    row = openhands_flat_row()
    turns = row_of(tmp_path, row).agents[0].turns
    row["history"].insert(1, {"source": "agent", "action": "condensation_request", "args": {}})
    assert row_of(tmp_path, row).agents[0].turns == turns


@pytest.mark.parametrize("reason", ["content_filter", "error", "abort", "max_tokens"])
def test_answer_that_a_provider_broke_off_is_no_final_answer(tmp_path, reason):
    agent = row_of(tmp_path, {"messages": [USER, {**ANSWER, "finish_reason": reason}]}).agents[0]
    assert agent.exit_status == "unknown" and agent.turns[0].finish_reason == "length"


def test_encrypted_thoughts_are_left_out(tmp_path):
    parts = [{"type": "redacted_thinking", "data": "Zm9v"}, {"type": "text", "text": "Moored."}]
    row = {"messages": [USER, {"role": "assistant", "content": parts}]}
    assert [turn.content for turn in row_of(tmp_path, row).agents[0].turns] == ["Moored."]


@pytest.mark.parametrize("key", ["text", "value", "output", "result"])
def test_message_whose_text_has_another_name_is_refused_and_never_blank(tmp_path, key):
    called_back = {"role": "tool", "tool_call_id": "c1", key: "moor.py"}
    calling = {"role": "assistant", "content": None, "value": 3, "tool_calls": [called(command="ls")]}
    refused = refusal(tmp_path, {"messages": [USER, calling, called_back, ANSWER]})
    assert refused.reason == "unknown_form" and repr(key) in refused.detail
    assert row_of(tmp_path, {"messages": [USER, calling, {**called_back, "content": ""}, ANSWER]}).agents[0].turns


def test_messages_that_langchain_dumped_have_their_texts(tmp_path):
    call = {"name": "bash", "args": {"command": "ls"}, "id": "c1", "type": "tool_call"}
    dumped = [
        ("human", {"content": "Moor."}),
        ("ai", {"content": "", "tool_calls": [call]}),
        ("tool", {"content": "moor.py", "tool_call_id": "c1"}),
        ("ai", {"content": "Moored."}),
    ]
    agent = row_of(tmp_path, {"messages": [{"type": kind, "data": data} for kind, data in dumped]}).agents[0]
    assert [message.content for message in agent.messages] == ["Moor.", "", "moor.py", "Moored."]
    assert [action.command for action in agent.turns[0].actions] == ["ls"]


# --- rows as a whole ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fact", "reward"),
    [
        ({"reward": "1.0"}, 1.0),
        ({"reward": " 0 "}, 0.0),
        ({"reward": "True"}, 1.0),
        ({"resolved": "false"}, 0.0),
        ({"score": "0.25"}, 0.25),
        ({"reward": "N/A"}, None),
        ({"reward": ""}, None),
        ({"label": False}, 0.0),
        ({"kto_tag": True}, 1.0),
        ({"label": 3}, None),
        ({"target": "1"}, None),
        ({"target": 42}, None),
        ({"target": True}, 1.0),
        ({"chosen": True, "rejected": False}, None),
        ({"metadata": '{"reward": "1"}'}, 1.0),
    ],
)
def test_reward_may_be_text(tmp_path, fact, reward):
    outcome = row_of(tmp_path, {"messages": [USER, ANSWER], **fact}).outcome
    assert (outcome and outcome["reward"]) == reward


@pytest.mark.parametrize("value", ["good", {"total": 1}, [1], "1e999"])
def test_reward_of_another_form_is_refused(tmp_path, value):
    found = refusal(tmp_path, {"messages": [USER, ANSWER], "reward": value})
    assert found.reason == "bad_reward" and "reward is" in found.detail


@pytest.mark.parametrize(
    "answers", [{"chosen": ANSWER, "rejected": ANSWER}, {"rejected_response": "bad"}, {"rejected_messages": [ANSWER]}]
)
@pytest.mark.parametrize(
    "form",
    [
        {"messages": [USER, ANSWER]},
        {"prompt": [USER], "completion": [ANSWER]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ],
)
def test_preferences_are_refused_with_the_way_to_train_the_chosen_answer(tmp_path, answers, form):
    found = refusal(tmp_path, {**form, **answers})
    assert found.reason == "preference" and next(iter(answers)) in found.detail and "`messages`" in found.detail


@pytest.mark.parametrize("form", [{"messages": [USER, ANSWER]}, {"prompt": [USER], "completion": [ANSWER]}])
def test_row_that_shows_files_is_refused(tmp_path, form):
    assert refusal(tmp_path, {**form, "images": ["a.jpg"]}).reason == "non_text_content"
    assert row_of(tmp_path, {**form, "images": [], "audios": None}).agents[0].turns


@pytest.mark.parametrize(
    ("row", "hints"),
    [
        ({"dialog": [USER, ANSWER]}, ["dialog", "messages"]),
        ({"traj": [[USER, ANSWER]], "reward": 1}, ["traj", "messages"]),
        ({"talk": [{"from": "human", "value": "q"}]}, ["talk", "sharegpt"]),
        ({"mesages": "x", "id": 1}, ["mesages", "messages"]),
        ({"instruction": "a", "input": "", "output": "b", "history": [["q", "a"]]}, ["Alpaca", "history"]),
        ({"instruction": "a", "input": "", "output": "b"}, ["--map prompt=instruction,input=input,answer=output"]),
        ({"query": "a", "answers": "[]", "tools": "[]", "id": 1}, ["xLAM", "answers"]),
        ({"system": "s", "chat": "USER: x"}, ["Glaive", "messages"]),
        ({"chosen": "a", "rejected": "b"}, ["compare", "messages"]),
        ({"prompt": "a"}, ["trl", "completion"]),
        ({"zzz": 1}, ["zzz", "messages"]),
    ],
)
def test_unknown_format_names_the_keys_and_the_nearest(tmp_path, row, hints):
    path = write_lines(tmp_path / "a.jsonl", [row])
    with pytest.raises(UnknownFormat) as raised:
        detect(path)
    assert all(hint in str(raised.value) for hint in hints), raised.value


def test_unreadable_folder_names_its_files(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match=r"a\.csv"):
        detect(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("a.json", b'[{"messages": [{"role": "us', "a.json, line 1"),
        ("a.jsonl.gz", gzip.compress(b'{"messages": []}\n', mtime=0)[:-12], "a.jsonl.gz: "),
    ],
)
def test_files_of_which_no_row_can_be_read_name_the_fault(tmp_path, name, content, hint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnknownFormat) as raised:
        detect(tmp_path)
    assert hint in str(raised.value) and "JSON lines" not in str(raised.value)
    assert "Known:" not in str(raised.value)  # no format would read it


def test_row_without_messages_names_its_keys(tmp_path):
    found = refusal(tmp_path, {"dialogue": []}, "messages")
    assert found.reason == "unknown_form" and "dialogue" in found.detail


def test_roles_are_read_in_any_case(tmp_path):
    talk = [{"from": "User", "value": "q"}, {"from": "Assistant", "value": "a"}]
    assert answers(row_of(tmp_path, {"conversations": talk, "mask": "User"})) == [("a", None)]


def test_tools_within_a_message_are_offered(tmp_path):
    talk = chat()
    talk[0]["tools"] = [tool("bash", command="string")]
    assert row_of(tmp_path, {"messages": talk}).tools == [tool("bash", command="string")]


def test_calls_of_a_wrong_type_are_refused(tmp_path):
    for calls in ("{'name': 'run'}", [1], {}, {"name": "run", "values": 1}):
        assert refusal(tmp_path, {"messages": [USER, {**ANSWER, "tool_calls": calls}]}).reason == "unknown_form"
    assert called()["function"]["arguments"] == "{}"
