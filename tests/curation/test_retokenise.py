"""Recorded text as ids of the student's vocabulary: prompts equal whole renderings, outputs equal the turns."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_assets.agent.actions import read_actions
from etpi_assets.curation.retokenise import conversation, retokenise
from etpi_assets.curation.student_form import StudentForm, format_call, observation_text, turn_text
from etpi_assets.importers import import_runs
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.tables import to_tables
from etpi_resources.chat.format import ChatFormat, TemplateRefuses, load_chat_format
from etpi_resources.chat.template_worker import DATE
from tests.support.recorded_runs import PAIR_OPTIONS, bare_list, pair_run, windowed_history, write
from tests.support.students import chat_of

HAS_QWEN = find_spec("dashscope") is not None
needs_qwen = pytest.mark.skipif(not HAS_QWEN, reason="dashscope, which ships the Qwen3 ranks, is not installed")
QWEN_TEMPLATES = [
    "qwen3", "qwen3_training", "qwen3_instruct_2507", "qwen3_instruct_2507_training", "qwen2_5", "qwen2_5_training",
    "qwen3_5_think", "qwen3_5_think_training", "qwen3_5_nothink", "qwen3_5_nothink_training", "qwen3_6",
    "qwen3_6_training", "qwen3_8", "qwen3_vl",
]  # fmt: skip
FORMATS = [("tiny", None), *((("qwen3", name) for name in QWEN_TEMPLATES) if HAS_QWEN else ())]


def rows(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the messages table; an assistant message is a turn of its own."""
    created, turn = [], -1
    for message in messages:
        learnt = message["role"] == "assistant"
        turn += learnt
        created.append(
            {
                "kind": "action" if learnt else "observation",
                "tool_calls": None,
                "turn": turn if turn >= 0 else None,
                **message,
            }
        )
    return created


def imported(root: Path, options: dict[str, Any] | None = None) -> tuple[RolloutRecord, list[list[dict[str, Any]]]]:
    (record,) = import_runs("auto", root, options)
    assert isinstance(record, RolloutRecord)
    table = to_tables([record])["messages"].to_pylist()
    return record, [[m for m in table if m["agent_id"] == agent.agent_id] for agent in record.agents]


# --- identity with rendering every prefix ---------------------------------------------------------------------------

PIECES = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "\n", "\n\n", " ", "<tool_call>", "</tool_call>",
     "<tool_response>", "</tool_response>", "ls -a", "é", "e\u0301", "😀", "你好", "\u200d", "\r\n", "\ue000", "x"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=8).map("".join)
ASSISTANT = st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXTS})
OTHER = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": TEXTS})
CONVERSATIONS = st.tuples(
    st.lists(st.fixed_dictionaries({"role": st.just("system"), "content": TEXTS}), max_size=1),
    st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}),
    st.lists(st.one_of(ASSISTANT, OTHER), max_size=8),
).map(lambda parts: [*parts[0], parts[1], *parts[2]])
TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "description": "run", "parameters": {"type": "object", "properties": {}}},
    }
]


@pytest.mark.parametrize(("name", "template"), FORMATS)
@settings(max_examples=8, deadline=None)
@given(messages=CONVERSATIONS, tools=st.sampled_from([None, TOOLS]), thinking=st.sampled_from([None, True, False]))
def test_prompts_equal_rendering_each_prefix(
    name: str, template: str | None, messages: list[dict[str, Any]], tools: Any, thinking: bool | None
) -> None:
    chat = load_chat_format(name, template)
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    try:
        expected = [chat.prompt_ids(messages[:end], tools=tools, **kwargs) for end in ends]
    except Exception as error:  # some templates refuse some conversations; then both ways do
        with pytest.raises(type(error)):
            chat.prefix_prompts(messages, ends, tools=tools, **kwargs)[0]
        return
    assert chat.prefix_prompts(messages, ends, tools=tools, **kwargs)[0] == expected


CALLS = [{"type": "function", "function": {"name": "bash", "arguments": {"command": "ls é"}}}]
# Few kinds of messages in many orders: what a trajectory is, so that one rendering serves wherever it can.
KINDS = st.lists(
    st.sampled_from(
        [
            {"role": "assistant", "content": "Look."},
            {"role": "assistant", "content": "<think>\nhm 😀\n</think>\n\nLook."},
            {"role": "assistant", "content": "", "tool_calls": CALLS},
            {"role": "assistant", "content": "\nLook. \n"},
            {"role": "tool", "content": "a.py 你好"},
            {"role": "user", "content": "and now?"},
            {"role": "user", "content": "<tool_response>\na.py\n</tool_response>"},
        ]
    ),
    min_size=1,
    max_size=3,
    unique_by=json.dumps,
)  # fmt: skip


@needs_qwen
@pytest.mark.parametrize("template", QWEN_TEMPLATES)
@settings(max_examples=8, deadline=None)
@given(data=st.data(), tools=st.sampled_from([None, TOOLS]), thinking=st.booleans())
def test_renders_once_is_true_only_if_each_prompt_extends_the_last(
    template: str, data: st.DataObject, tools: Any, thinking: bool
) -> None:
    chat, kwargs = load_chat_format("qwen3", template), {"enable_thinking": thinking}
    start = [{"role": "user", "content": "fix it"}, {"role": "assistant", "content": "Look."}]
    following = data.draw(st.lists(st.sampled_from(data.draw(KINDS)), min_size=2, max_size=12))
    messages = [*start, *following, {"role": "assistant", "content": "Done."}]
    ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    prompts = chat.prefix_prompts(messages, ends, tools=tools, **kwargs)[0]
    assert prompts == [chat.prompt_ids(messages[:end], tools=tools, **kwargs) for end in ends]
    # A prompt without its generation prompt: what the next one must begin with, if the template only appends.
    heads = [prompt[: len(prompt) - 1 - prompt[::-1].index(chat.turn_id)] for prompt in prompts]
    grows = all(later[: len(head)] == head for head, later in zip(heads, prompts[1:], strict=False))
    if chat.renders_once(messages, tools=tools, **kwargs):
        assert grows
    if not template.endswith("_training") and template in ("qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6"):
        return  # these write some conversations anew, and may be taken to where they do not
    assert grows


@needs_qwen
def test_every_template_renders_a_trajectory_of_tool_results_once(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = [{"role": "assistant", "content": "Look."}, {"role": "tool", "content": "a.py"}]
    messages = [{"role": "user", "content": "fix it"}, *(turn * 20)]
    for template in QWEN_TEMPLATES:
        chat = load_chat_format("qwen3", template)
        assert chat.renders_once(messages), template
        rendered: list[int] = []
        apply = chat._apply
        monkeypatch.setattr(chat, "_apply", lambda m, *rest, a=apply, r=rendered: r.append(len(m)) or a(m, *rest))
        chat.prefix_prompts(messages, range(1, 41, 2))
        assert rendered == [39, 21], "the whole, and one prompt to hold against it"


@needs_qwen
def test_template_that_rewrites_history_is_detected() -> None:
    """Qwen3 drops earlier thoughts once a new question comes: the prompt then forks, and is still exact."""
    chat = load_chat_format("qwen3")
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\ncall"},
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": "three"},
    ]
    first, second, third = chat.prefix_prompts(messages, [1, 3, 5])[0]
    assert chat.think_open_id in second and chat.think_open_id not in third
    assert [second, third] == [chat.prompt_ids(messages[:3]), chat.prompt_ids(messages[:5])]
    assert not chat.renders_once(messages)
    assert not any(turn.appended for turn in retokenise(rows(messages), chat))
    assert all(turn.appended for turn in retokenise(rows(messages[:4]), chat))
    # Its variant for training keeps them.
    assert load_chat_format("qwen3", "qwen3_training").renders_once(messages)
    assert chat.prefix_prompts(messages, [])[0] == []


# --- turns ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tiny", pytest.param("qwen3", marks=needs_qwen)])
def chat(request: pytest.FixtureRequest) -> ChatFormat:
    return load_chat_format(request.param)


def test_output_is_text_calls_and_end_of_turn(chat: ChatFormat) -> None:
    call = {"function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    talk = rows(
        [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "Look.", "tool_calls": [call]},
            {"role": "user", "content": "a.py"},
            {"role": "assistant", "content": "cut off"},
        ]
    )
    first, second = retokenise(talk, chat, truncated={1})
    written = format_call("bash", {"command": "ls"})
    if chat.name == "qwen3":  # what its template tells the model to write
        written = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    assert first.output_ids == [*chat.encode("Look.\n" + written), chat.end_id]
    assert second.output_ids == chat.encode("cut off")
    assert chat.think_open_id not in first.output_ids
    # The newline after an output belongs to what follows it.
    extended = first.prompt_ids + first.output_ids
    assert second.prompt_ids[: len(extended)] == extended
    assert chat.decode(second.prompt_ids[len(extended) :]).startswith("\n<|im_start|>user\na.py")


def test_end_token_in_text_does_not_end_the_turn(chat: ChatFormat) -> None:
    (turn,) = retokenise(
        rows([{"role": "user", "content": "go"}, {"role": "assistant", "content": "a <|im_end|> b"}]), chat
    )
    assert turn.output_ids.count(chat.end_id) == 1
    assert chat.decode(turn.output_ids) == "a <|im_end|> b<|im_end|>"


def test_messages_of_one_turn_are_one_output(chat: ChatFormat, tmp_path: Path) -> None:
    pair_run(tmp_path)
    record, agents = imported(tmp_path, PAIR_OPTIONS)
    for agent, messages in zip(record.agents, agents, strict=True):
        turns = retokenise(messages, chat)
        assert [t.turn for t in turns] == [t.turn for t in agent.turns] == [0, 1, 2, 3, 4]
        for turn, captured in zip(turns, agent.turns, strict=True):
            text = chat.decode(turn.output_ids).removesuffix("<|im_end|>")
            result, error = read_actions(text, None, PAIR_OPTIONS["message_commands"])
            assert (error is None) == bool(captured.actions)
            shell = [
                (a.kind, a.command, a.to, a.message)
                for a in result
                if "Edit" not in a.command and "Read" not in a.command
            ]
            assert shell == [
                (a.kind, a.command, a.to, a.message)
                for a in captured.actions
                if "Edit" not in a.command and "Read" not in a.command
            ]
        for earlier, later in zip(turns, turns[1:], strict=False):
            whole = earlier.prompt_ids + earlier.output_ids
            assert later.prompt_ids[: len(whole)] == whole


def test_flattened_marks_are_removed_and_results_have_role_tool(tmp_path: Path) -> None:
    pair_run(tmp_path)
    _, agents = imported(tmp_path, PAIR_OPTIONS)
    told, turns = conversation(agents[0], StudentForm(load_chat_format("tiny")))
    assert not [m for m in told if "[tool_use" in m["content"] or "[tool_result]" in m["content"]]
    assert [m["role"] for m in told] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [position for _, position in turns] == [1, 4, 6, 8, 10]
    assert told[6]["content"].startswith("Both plans fit.\n<tool_call>\n<function=Edit>\n<parameter=file_path>\n")


def test_demonstrations_are_context_not_labels(chat: ChatFormat, tmp_path: Path) -> None:
    write(tmp_path / "x.traj", windowed_history("fenced"))
    _, (messages,) = imported(tmp_path)
    if chat.name == "tiny":
        messages = [{**m, "role": "user" if m["role"] == "tool" else m["role"]} for m in messages]
    turns = retokenise(messages, chat)
    assert [t.turn for t in turns] == [0, 1]
    assert "find_file x" in chat.decode(turns[0].prompt_ids)
    assert chat.decode(turns[0].output_ids) == "Look around.\n```\nls -a\n```<|im_end|>"


def test_text_that_the_model_wrote_stays_unchanged(chat: ChatFormat, tmp_path: Path) -> None:
    write(tmp_path / "x.traj.json", bare_list())
    _, (messages,) = imported(tmp_path)
    outputs = [chat.decode(t.output_ids).removesuffix("<|im_end|>") for t in retokenise(messages, chat)]
    assert outputs == [m["content"] for m in bare_list() if m["role"] == "assistant"]


def test_turns_without_thoughts_have_no_second_form(chat: ChatFormat) -> None:
    said = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Done."}]
    thought = [said[0], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nDone."}]
    prompt = chat.decode(chat.prompt_ids(said[:1]))
    for conversation_, thinks in ((said, False), (thought, True)):
        (turn,) = retokenise(rows(conversation_), chat)
        assert (turn.bare is not None) is (thinks or prompt.rstrip().endswith("<think>"))


def test_conversation_without_prompt_or_with_unknown_role_raises(chat: ChatFormat) -> None:
    with pytest.raises(ValueError, match="first turn"):
        retokenise(rows([{"role": "assistant", "content": "x"}]), chat)
    with pytest.raises(ValueError, match="role 'narrator'"):
        retokenise(rows([{"role": "narrator", "content": "x"}]), chat)
    assert retokenise([], chat) == []


# --- the student's form ---------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["Bash", "bash", "Edit", "str_replace_editor"])
VALUES = st.lists(
    st.sampled_from(
        ["</parameter>", "</tool_call>", "<tool_call>", "\n", "x", " ", '"', "\\", "é", "<function=", "{", "}"]
    ),
    min_size=1, max_size=8,
).map("".join).filter(str.strip)  # fmt: skip


@given(name=NAMES, value=VALUES, other=VALUES)
def test_call_with_any_argument_is_parsed_back(name: str, value: str, other: str) -> None:
    arguments = {"command": value} if name.lower() == "bash" else {"path": value, "text": other}
    (action,), error = read_actions(f"Then.\n{format_call(name, arguments)}")
    assert error is None
    if name.lower() == "bash":
        assert action.command == value
    else:
        assert json.loads(action.command.partition(" ")[2]) == arguments


@given(command=VALUES)
def test_flattened_call_is_rewritten_in_place(command: str) -> None:
    flat = f"[tool_use Bash] {json.dumps({'command': command})}"
    assert turn_text(f"First.\n{flat}\n{flat}") == "First.\n" + "\n".join(
        [format_call("bash", {"command": command})] * 2
    )


@pytest.mark.parametrize(
    "text", ["[tool_use Bash] {cut", "see [tool_use Bash] {}", "[tool_use Bash] none", "[tool_use", ""]
)
def test_text_that_is_not_a_flattened_call_stays_unchanged(text: str) -> None:
    assert turn_text(text) == text


def test_non_text_arguments_are_written_as_json() -> None:
    assert "<parameter=n>\n[1, 2]\n</parameter>" in format_call("Read", {"n": [1, 2]})
    assert turn_text("", [{"function": {"name": "bash", "arguments": None}}]) == format_call("bash", {})


CUT = {"id": "c1", "function": {"name": "bash", "arguments": '{"command": cut'}}
USER, RESULT = {"role": "user", "content": "Go."}, {"role": "tool", "content": "Not valid.", "tool_call_id": "c1"}


def test_unparseable_call_stays_unparseable() -> None:
    text = turn_text("Then.", [CUT])
    assert text == 'Then.\n<tool_call>\n{"name": "bash", "arguments": {"command": cut}\n</tool_call>'
    assert read_actions(text)[0] == []


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gpt_oss", "glm4_5"])
def test_arguments_that_cannot_be_read_are_what_the_template_writes_or_refuses(name: str) -> None:
    chat = chat_of(name)
    spoken = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CUT]},
        RESULT,
        {"role": "assistant", "content": "Done."},
    ]
    try:
        shown = chat.tokenizer.apply_chat_template(
            spoken[:3], tokenize=False, add_generation_prompt=True, strftime_now=DATE.strftime
        )
    except Exception:
        with pytest.raises(TemplateRefuses):
            retokenise(rows(spoken), chat)
        return
    last = retokenise(rows(spoken), chat)[-1]
    assert chat.decode(last.prompt_ids) == shown and "cut" in str(shown)


@pytest.mark.parametrize("call", [{"name": 5}, "x"])
def test_call_without_a_name_is_a_refusal(call: Any) -> None:
    with pytest.raises(TemplateRefuses):
        retokenise(rows([USER, {"role": "assistant", "content": "", "tool_calls": [call]}]), chat_of("qwen3"))


def test_observation_loses_only_the_leading_mark() -> None:
    assert observation_text("[tool_result] [tool_result] a") == "[tool_result] a"
    assert observation_text("a [tool_result] b") == "a [tool_result] b"


# --- the real thing -------------------------------------------------------------------------------------------------


@needs_qwen
@pytest.mark.skipif("ETPI_TRAJECTORIES" not in os.environ, reason="ETPI_TRAJECTORIES names no folder of recorded runs")
def test_recorded_pairs_extend_exactly() -> None:
    """Every prompt of the recorded pair runs extends the turn before it, and is that of rendering it whole."""
    chat = load_chat_format("qwen3")
    result = import_runs("auto", Path(os.environ["ETPI_TRAJECTORIES"]) / "cooperbench-logs", PAIR_OPTIONS)
    records = [item for item in result if isinstance(item, RolloutRecord)]
    table = to_tables(records[:6])["messages"].to_pylist()
    for agent in sorted({(m["rollout_id"], m["agent_id"]) for m in table}):
        messages = [m for m in table if (m["rollout_id"], m["agent_id"]) == agent]
        told, positions = conversation(messages, StudentForm(chat))
        turns = retokenise(messages, chat)
        assert turns[-1].prompt_ids == chat.prompt_ids(told[: positions[-1][1]])
        for earlier, later in zip(turns, turns[1:], strict=False):
            whole = earlier.prompt_ids + earlier.output_ids
            assert later.prompt_ids[: len(whole)] == whole
