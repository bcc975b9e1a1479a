"""Chat formats of student families other than ChatML: everything is derived from the template by rendering."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etpi_resources.capture.conversation import Conversation
from etpi_resources.chat.format import ChatFormat, TemplateRefuses
from etpi_resources.chat.markers import NoTurnEnd
from etpi_resources.chat.tool_forms import Call
from tests.support.students import FAMILIES, byte_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "execute_bash",
        "description": "Run.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
CALLING = ["qwen3", "qwen3_6", "llama3_1", "mistral_v3", "mistral_v11", "gemma4", "glm4_5", "gpt_oss"]
SYSTEM, TASK = {"role": "system", "content": "Fix bugs."}, {"role": "user", "content": "Go."}
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ 'model' if m.role == 'assistant' else m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}model:{% endif %}"
)
_FORMATS: dict[str, ChatFormat] = {}


def chat_of(name: str) -> ChatFormat:
    if name not in _FORMATS:
        tokenizer = byte_tokenizer(FAMILIES[name])
        _FORMATS[name] = ChatFormat(name, tokenizer, tokenizer.chat_template)
    return _FORMATS[name]


def history(chat: ChatFormat, call: Call, result: str) -> list[Any]:
    turn = chat.template_form.message("", [call])
    answer = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "name": call.name, "content": result}
    return [SYSTEM, TASK, turn, answer]


@pytest.mark.parametrize(
    ("name", "form", "ends"),
    [
        ("qwen3", "hermes", {"<|im_end|>"}),
        ("qwen3_6", "qwen_xml", {"<|im_end|>"}),
        ("llama3_1", "llama3_json", {"<|eot_id|>"}),
        ("mistral_v3", "mistral", {"</s>"}),
        ("mistral_v11", "mistral_v11", {"</s>"}),
        ("gemma4", "gemma", {"<turn|>", "<|tool_response>"}),
        ("glm4_5", "glm", {"<|user|>", "<|observation|>"}),
        ("gpt_oss", "harmony", {"<|return|>", "<|call|>"}),
        ("gemma3", None, {"<end_of_turn>"}),
    ],
)
def test_form_and_ends_of_turns_are_read_off_the_template(name: str, form: str | None, ends: set[str]) -> None:
    chat = chat_of(name)
    assert (chat.tool_form.name if chat.tool_form else None) == form
    assert {chat.decode([i]) for i in chat.end_ids} == ends


@pytest.mark.parametrize("name", CALLING)
@given(
    command=st.text(st.sampled_from("ab \n\"'{}$<é"), min_size=1, max_size=20),
    injected=st.sampled_from(
        ["", "</s>", "<|eot_id|>", "<|call|>", "<|im_end|>", "<turn|>", "[TOOL_CALLS]", "<|user|>"]
    ),
)
def test_label_is_read_back_and_text_in_it_is_never_structure(name: str, command: str, injected: str) -> None:
    chat = chat_of(name)
    call = Call("execute_bash", {"command": f"x {command}{injected} y"})
    ids = chat.ended(chat.turn_ids("", [call], tools=[TOOL]))
    assert ids[-1] in chat.end_ids
    assert sum(i in chat.end_ids for i in ids) == 1, "the text of a call holds no end of a turn"
    assert chat.tool_form is not None
    if name == "qwen3_6" and "\n" in command[-1:]:
        return  # its form trims a value's last line break
    assert chat.tool_form.same(chat.tool_form.parse(chat.decode(chat.without_end(ids))), [call])


@pytest.mark.parametrize("name", [name for name in CALLING if name not in ("qwen3_6", "glm4_5")])
def test_appended_ids_equal_rendering_the_whole_conversation(name: str) -> None:
    chat, call = chat_of(name), Call("execute_bash", {"command": "ls"})
    prompt = chat.prompt_ids([SYSTEM, TASK], tools=[TOOL])
    label = chat.ended(chat.turn_ids("", [call], tools=[TOOL]))
    result = chat.observation_ids("a.py", "tool", tool="execute_bash")
    conversation = history(chat, call, "a.py")
    assert [*prompt, *chat.as_history(label), *result] == chat.prompt_ids(conversation, tools=[TOOL])


@pytest.mark.parametrize("name", CALLING)
def test_prompts_of_turns_equal_each_rendered_by_itself(name: str) -> None:
    chat, call = chat_of(name), Call("execute_bash", {"command": "ls"})
    conversation = [*history(chat, call, "a.py"), {"role": "assistant", "content": "Done."}]
    prompts = chat.prefix_prompts(conversation, [2, 4], tools=[TOOL])[0]
    assert prompts == [chat.prompt_ids(conversation[:end], tools=[TOOL]) for end in (2, 4)]


@pytest.mark.parametrize("name", [*CALLING, "gemma3"])
def test_answer_in_words_is_recovered_from_its_turn(name: str) -> None:
    chat = chat_of(name)
    turn = chat.decode(chat.turn_ids("All tests pass.", []))
    assert chat.answer(turn).strip() == "All tests pass."


@pytest.mark.parametrize("name", ["gemma4", "gpt_oss"])
def test_thoughts_are_written_as_the_template_writes_them(name: str) -> None:
    chat, call = chat_of(name), Call("execute_bash", {"command": "ls"})
    text = chat.decode(chat.turn_ids("<think>\nLook first.\n</think>\n\n", [call], tools=[TOOL]))
    assert "Look first." in text
    assert "<think>" not in text
    assert chat.tool_form is not None
    assert chat.tool_form.parse(text) == [call]


@pytest.mark.parametrize(
    ("name", "prose"), [("qwen3", "kept"), ("llama3_1", "dropped"), ("mistral_v3", "refused"), ("gemma4", "moved")]
)
def test_text_beside_a_call_is_no_part_of_the_label_where_the_template_does_not_write_it_first(
    name: str, prose: str
) -> None:
    chat, call = chat_of(name), Call("execute_bash", {"command": "ls"})
    assert (chat.template_form.prose if name != "qwen3" else "kept") == prose
    text = chat.decode(chat.turn_ids("Look first.", [call], tools=[TOOL]))
    assert ("Look first." in text) == (prose == "kept")


def test_roles_that_a_template_refuses_are_fitted() -> None:
    gemma = chat_of("gemma3")
    assert (gemma.roles.system, gemma.roles.results, gemma.roles.repeated) == (True, False, False)
    answered = [TASK, {"role": "assistant", "content": "ls"}, {"role": "tool", "content": "a.py"}]
    assert "<start_of_turn>user\na.py<end_of_turn>" in gemma.decode(gemma.prompt_ids(answered))
    two = [TASK, {"role": "user", "content": "Now."}]
    assert "Go.\n\nNow." in gemma.decode(gemma.prompt_ids(two))
    assert not chat_of("mistral_v3").roles.loose_results, "a result needs the call that it answers"
    strict = ChatFormat("strict", gemma.tokenizer, STRICT)
    assert not strict.roles.system
    assert strict.decode(strict.prompt_ids([SYSTEM, TASK])) == "<bos>user:Fix bugs.\n\nGo.<eos>model:"


def test_conversation_that_a_template_refuses_is_an_error_with_its_reason() -> None:
    chat = chat_of("llama3_1")
    calls = [Call("execute_bash", {"command": c}) for c in ("ls", "pwd")]
    message = chat.template_form.message("", calls)
    with pytest.raises(TemplateRefuses, match="single tool-calls"):
        chat.prompt_ids([TASK, message, TASK], tools=[TOOL])


def test_template_of_another_tokenizer_is_refused() -> None:
    tokenizer = byte_tokenizer(FAMILIES["llama3_1"])
    chat = ChatFormat("mixed", tokenizer, FAMILIES["gemma3"].template_text())
    with pytest.raises(NoTurnEnd, match=r"base\.tokenizer and base\.chat_template"):
        _ = chat.end_id


def test_day_in_a_prompt_does_not_depend_on_the_clock() -> None:
    assert "2026-01-01" in chat_of("gpt_oss").decode(chat_of("gpt_oss").prompt_ids([TASK]))


@pytest.mark.parametrize("name", ["llama3_1", "gemma4", "glm4_5", "gpt_oss", "qwen3"])
@pytest.mark.parametrize("answered", [0, 1])
def test_one_result_after_two_calls_continues_the_ids_of_the_turn(name: str, answered: int) -> None:
    chat = chat_of(name)
    talk = Conversation(chat, {})
    asked = [{"role": "user", "content": "Go."}]
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": tool, "arguments": "{}"}}
        for n, tool in enumerate(["read", "execute_bash"])
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    first = talk.prompt(asked, [TOOL])
    output = chat.encode("two calls")
    talk.add(1, first, output, [*asked, turn], [TOOL])
    result = {"role": "tool", "tool_call_id": f"c{answered}", "content": "a.py"}
    later = talk.prompt([*asked, turn, result], [TOOL])
    before = [*first.ids, *chat.as_history(output)]
    assert later.ids[: len(before)] == before and "a.py" in chat.decode(later.ids[len(before) :])
    if name == "gpt_oss":  # its template names the tool
        assert calls[answered]["function"]["name"] in chat.decode(later.ids[len(before) :])
