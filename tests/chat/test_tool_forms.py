"""Tool calls: every form reads back what it writes, and templates are probed for the form they write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etpi_assets.agent.actions import read_actions
from etpi_resources.chat.tool_forms import FORMS, Call, message_calls, parse_structured
from etpi_resources.chat.tool_forms.call import NO_CALL, UNCLOSED_CALL, ParsedCall
from etpi_resources.chat.tool_forms.template import Apply, TemplateForm, UnknownToolForm

TRL = Path(pytest.importorskip("trl").__file__ or "").parent / "chat_templates"
OF_TEMPLATES = {
    "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_training": "hermes", "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes", "qwen3_5_think": "qwen_xml", "qwen3_5_nothink": "qwen_xml", "qwen3_6": "qwen_xml",
    "qwen3_8": "qwen_xml", "nemotron_3_nano": "qwen_xml", "nemotron_3_super": "qwen_xml",
    "nemotron_3_ultra": "qwen_xml", "nemotron_3_5_lightning": "qwen_xml", "glm4moe": "glm",
    "deepseekv3": "deepseek_v3", "gptoss": "harmony", "llama3_1": "llama3_json", "llama3_2": "llama3_json",
    "muse_glimmer": "atem", "gemma4": "gemma", "gemma4_v5": "gemma",
}  # fmt: skip
"""TRL's templates that write tool calls -> the form of their calls."""

PARTS = ["</tool_response>", "<tool_call>", "\n", "x", " ", '"', "\\", "é", "<function=", "{", "}", "[", ";", "```"]
TEXTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=8).map("".join).filter(str.strip)
VALUES = st.one_of(TEXTS, st.integers(-5, 5), st.booleans(), st.lists(TEXTS, max_size=2))
ARGUMENTS = st.dictionaries(st.sampled_from(["command", "path", "n", "old_str"]), VALUES, min_size=1, max_size=3)
NAMES = st.sampled_from(["bash", "str_replace_editor", "Read"])
CALLS = st.lists(st.builds(Call, NAMES, ARGUMENTS), min_size=1, max_size=3)
MARKERS = [form.marker for form in FORMS.values() if form.marker]
TAGS = ["{", "}", '"name"', "\n", ":", "a", "[ARGS]", "</tool_call>", "<parameter=x>", "<|message|>", "```bash"]
PIECES = st.lists(st.sampled_from([*MARKERS, *TAGS]), max_size=9).map("".join)
JSON_FORMS = [name for name, form in FORMS.items() if form.typed and name != "markdown"]
TEXT_FORMS = [name for name, form in FORMS.items() if not form.typed]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (' {"a": "é", "n": 1, "b": true, "c": null} ', {"a": "é", "n": 1, "b": True, "c": None}),
        ('{"n": 123456789012345678901234567890}', {"n": 123456789012345678901234567890}),
        ('{"n": [123456789012345678901234567890], "x": 0.5}', {"n": [123456789012345678901234567890], "x": 0.5}),
        ('{"a": "one\ntwo"}', {"a": "one\ntwo"}),
        ('{"a": "\\ud800"}', {"a": "\ud800"}),
        ('{"a": 1} and more', {"a": 1}),
        ("null", {}),
        ("", {}),
    ],
)
def test_structured_arguments_are_read_as_the_standard_parser_reads_them(text, arguments):
    assert parse_structured({"function": {"name": "f", "arguments": text}}) == Call("f", arguments)
    assert read_actions("", [{"function": {"name": "f", "arguments": text}}])[0][0].command.startswith("f {")


@pytest.mark.parametrize("call", [{"name": "f"}, {"function": {"name": "f"}}, {"name": 1, "arguments": {}}, "f", None])
def test_structured_call_without_name_or_arguments_is_no_action(call):
    assert read_actions("", [call])[0] == []


def template(name: str) -> Apply:
    """Return one of TRL's templates, compiled."""
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
def test_untyped_forms_read_back_arguments_without_tags(name: str, calls: list[Call]) -> None:
    form = FORMS[name]
    calls_without_tags = [
        Call(call.name, {k: v for k, v in call.arguments.items() if "<" not in str(v)}) for call in calls
    ]
    calls_without_tags = [call for call in calls_without_tags if call.arguments]
    assert form.same(form.parse(form.render(calls_without_tags)), calls_without_tags)


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ("<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n", Call("bash", {"command": "ls"})),
        ("<arg_key>command</arg_key>\n<arg_value>ls", UNCLOSED_CALL),
        ("<arg_key>command</arg_key>\n</arg_value>", UNCLOSED_CALL),
        ("<arg_key>command</arg_key>\nls<arg_value></arg_value>", UNCLOSED_CALL),
        ("<arg_key>command</arg_key>", UNCLOSED_CALL),
        ("<arg_key>command<arg_value>ls</arg_value>", UNCLOSED_CALL),
        ("<b", NO_CALL),
    ],
)
def test_truncated_glm_call_is_no_call(body: str, call: ParsedCall) -> None:
    assert FORMS["glm"].parse(f"<tool_call>bash\n{body}</tool_call>") == [call]


@given(command=TEXTS)
def test_markdown_form_carries_bash_commands_only(command: str) -> None:
    if "```" in command:
        return
    (call,) = FORMS["markdown"].parse(FORMS["markdown"].render([Call("bash", {"command": command})]))
    assert call == Call("bash", {"command": command})
    with pytest.raises(ValueError, match="not Read"):
        FORMS["markdown"].render([Call("Read", {"path": command})])


@pytest.mark.parametrize("name", FORMS)
@given(text=PIECES)
def test_parsers_never_raise(name: str, text: str) -> None:
    assert all(isinstance(call, Call | str) for call in FORMS[name].parse(text))


@pytest.mark.parametrize(("name", "form"), OF_TEMPLATES.items())
def test_probe_returns_form_of_template(name: str, form: str) -> None:
    probed = TemplateForm.probe(template(name), name)
    assert probed.form is FORMS[form]
    assert probed.as_text == (name == "deepseekv3"), "DeepSeek V3 joins arguments as text"


@pytest.mark.parametrize("name", OF_TEMPLATES)
@given(
    content=st.sampled_from(["", "Look.", "First:\n\n- a"]),
    arguments=st.dictionaries(
        st.sampled_from(["command", "path"]), TEXTS.filter(lambda t: "<" not in t), min_size=1, max_size=2
    ),
)
def test_turn_is_part_of_rendering_and_its_parser_reads_it_back(
    name: str, content: str, arguments: dict[str, str]
) -> None:
    apply = template(name)
    probed = TemplateForm.probe(apply, name)
    assert probed.form is not None
    call = Call("bash", arguments)
    text = probed.turn(content, [call], None, apply)
    if probed.prose == "moved":
        content = ""  # written after the call, so it is no part of the label
    message = {"role": "assistant", "content": content, "tool_calls": message_calls([call], as_text=probed.as_text)}
    whole = apply([{"role": "user", "content": "go"}, message], None, False)
    assert whole.removesuffix(probed.end).endswith(text), "the label is a part of the template's own rendering"
    assert probed.form.same(probed.form.parse(text), [call])
    assert probed.form.render([call]) in text, "the registry writes the call as the template does"


@pytest.mark.parametrize("name", ["lfm2_v2"])
def test_error_of_unknown_form_shows_rendered_call_and_tried_forms(name: str) -> None:
    with pytest.raises(UnknownToolForm, match=r"run_probe.*hermes, qwen_xml"):
        TemplateForm.probe(template(name), name)


def test_template_without_calls_rejects_structured_call() -> None:
    probed = TemplateForm.probe(template("deepseek_r1_distill"), "deepseek_r1_distill")
    assert probed.form is None
    with pytest.raises(UnknownToolForm, match="'deepseek_r1_distill'"):
        probed.turn("", [Call("bash", {"command": "ls"})], None, template("deepseek_r1_distill"))


def test_parse_structured_accepts_both_shapes() -> None:
    wanted = Call("bash", {"command": "ls"})
    for raw in (
        {"type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}},
        {"name": "bash", "input": {"command": "ls"}},
    ):
        assert parse_structured(raw) == wanted
    assert isinstance(parse_structured({"function": {"name": "bash", "arguments": "{cut"}}), str)
