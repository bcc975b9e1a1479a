"""Tool calls: every form reads back what it writes, and templates are probed for the form they write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etpi_resources.chat.tool_forms import FORMS, Call, message_calls, structured
from etpi_resources.chat.tool_forms.template import Apply, TemplateForm, UnknownToolForm

TRL = Path(pytest.importorskip("trl").__file__ or "").parent / "chat_templates"
OF_TEMPLATES = {
    "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_training": "hermes", "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes", "qwen3_5_think": "qwen_xml", "qwen3_5_nothink": "qwen_xml", "qwen3_6": "qwen_xml",
    "qwen3_8": "qwen_xml", "nemotron_3_nano": "qwen_xml", "nemotron_3_super": "qwen_xml",
    "nemotron_3_ultra": "qwen_xml", "nemotron_3_5_lightning": "qwen_xml", "glm4moe": "glm",
    "deepseekv3": "deepseek_v3", "gptoss": "harmony", "llama3_1": "llama3_json", "llama3_2": "llama3_json",
    "muse_glimmer": "atem",
}  # fmt: skip
"""What each of TRL's templates that write tool calls writes them in."""

PARTS = ["</tool_response>", "<tool_call>", "\n", "x", " ", '"', "\\", "é", "<function=", "{", "}", "[", ";", "```"]
TEXTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=8).map("".join).filter(str.strip)
VALUES = st.one_of(TEXTS, st.integers(-5, 5), st.booleans(), st.lists(TEXTS, max_size=2))
ARGUMENTS = st.dictionaries(st.sampled_from(["command", "path", "n", "old_str"]), VALUES, min_size=1, max_size=3)
NAMES = st.sampled_from(["bash", "str_replace_editor", "Read"])
CALLS = st.lists(st.builds(Call, NAMES, ARGUMENTS), min_size=1, max_size=3)
MARKS = [form.mark for form in FORMS.values() if form.mark]
TAGS = ["{", "}", '"name"', "\n", ":", "a", "[ARGS]", "</tool_call>", "<parameter=x>", "<|message|>", "```bash"]
PIECES = st.lists(st.sampled_from([*MARKS, *TAGS]), max_size=9).map("".join)
JSON_FORMS = [name for name, form in FORMS.items() if form.typed and name != "markdown"]
TEXT_FORMS = [name for name, form in FORMS.items() if not form.typed]


def template(name: str) -> Apply:
    """One of TRL's templates as text -> text."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled = _compile_jinja_template((TRL / f"{name}.jinja").read_text())

    def apply(messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool) -> str:
        return compiled.render(messages=messages, tools=tools, add_generation_prompt=prompt, bos_token="", eos_token="")

    return apply


@pytest.mark.parametrize("name", JSON_FORMS)
@given(calls=CALLS)
def test_json_forms_read_back_any_arguments(name: str, calls: list[Call]) -> None:
    assert FORMS[name].parse(FORMS[name].render(calls)) == calls


@pytest.mark.parametrize("name", TEXT_FORMS)
@given(calls=CALLS)
def test_forms_of_text_read_back_arguments_without_their_own_tags(name: str, calls: list[Call]) -> None:
    form = FORMS[name]
    told = [Call(call.name, {k: v for k, v in call.arguments.items() if "<" not in str(v)}) for call in calls]
    told = [call for call in told if call.arguments]
    assert form.same(form.parse(form.render(told)), told)


@given(command=TEXTS)
def test_a_markdown_block_carries_one_bash_command(command: str) -> None:
    if "```" in command:
        return
    (call,) = FORMS["markdown"].parse(FORMS["markdown"].render([Call("bash", {"command": command})]))
    assert call == Call("bash", {"command": command})
    with pytest.raises(ValueError, match="carries a bash command alone"):
        FORMS["markdown"].render([Call("Read", {"path": command})])


@pytest.mark.parametrize("name", FORMS)
@given(text=PIECES)
def test_no_text_makes_a_parser_raise(name: str, text: str) -> None:
    assert all(isinstance(call, Call | str) for call in FORMS[name].parse(text))


@pytest.mark.parametrize(("name", "form"), OF_TEMPLATES.items())
def test_a_template_is_probed_for_its_form(name: str, form: str) -> None:
    found = TemplateForm.of(template(name), name)
    assert found.form is FORMS[form]
    assert found.as_text == (name == "deepseekv3"), "DeepSeek V3 joins arguments as text"


@pytest.mark.parametrize("name", OF_TEMPLATES)
@given(
    content=st.sampled_from(["", "Look.", "First:\n\n- a"]),
    arguments=st.dictionaries(
        st.sampled_from(["command", "path"]), TEXTS.filter(lambda t: "<" not in t), min_size=1, max_size=2
    ),
)
def test_a_turn_is_what_the_template_renders_and_its_parser_reads(
    name: str, content: str, arguments: dict[str, str]
) -> None:
    apply = template(name)
    found = TemplateForm.of(apply, name)
    assert found.form is not None
    call = Call("bash", arguments)
    text = found.turn(content, [call], None, apply)
    message = {"role": "assistant", "content": content, "tool_calls": message_calls([call], as_text=found.as_text)}
    whole = apply([{"role": "user", "content": "go"}, message], None, False)
    assert whole.removesuffix(found.end).endswith(text), "the label is a part of the template's own rendering"
    assert found.form.same(found.form.parse(text), [call])
    assert found.form.render([call]) in text, "the registry writes the call as the template does"


@pytest.mark.parametrize("name", ["gemma4", "lfm2_v2"])
def test_an_unknown_form_says_what_was_rendered_and_what_was_tried(name: str) -> None:
    with pytest.raises(UnknownToolForm, match=r"writes a call as .*run_probe.*tried hermes, qwen_xml"):
        TemplateForm.of(template(name), name)


def test_a_template_without_calls_refuses_a_structured_one() -> None:
    found = TemplateForm.of(template("deepseek_r1_distill"), "deepseek_r1_distill")
    assert found.form is None
    with pytest.raises(UnknownToolForm, match="writes no tool call"):
        found.turn("", [Call("bash", {"command": "ls"})], None, template("deepseek_r1_distill"))


def test_structured_calls_of_either_shape_are_read() -> None:
    wanted = Call("bash", {"command": "ls"})
    for raw in (
        {"type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}},
        {"name": "bash", "input": {"command": "ls"}},
    ):
        assert structured(raw) == wanted
    assert isinstance(structured({"function": {"name": "bash", "arguments": "{cut"}}), str)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "markdown"])
def test_a_grammar_takes_the_call_that_the_form_writes_and_no_other_tool(name: str) -> None:
    llguidance = pytest.importorskip("llguidance")
    form = FORMS[name]
    grammar = form.lark(["bash"])
    assert not llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_lark(grammar))
    assert _matches(llguidance, grammar, form.render([Call("bash", {"command": "ls -a"})]))
    assert not _matches(llguidance, grammar, form.render([Call("rm", {"command": "ls -a"})]))


def _matches(llguidance: Any, grammar: str, text: str) -> bool:
    from llguidance import LLTokenizer

    matcher = llguidance.LLMatcher(LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(grammar))
    data = list(text.encode())
    return matcher.validate_tokens(data) == len(data)
