"""Labels against `apply_chat_template`: generated conversations, templates of many families, and injected faults."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etpi_assets.curation import captured, integrity, recorded_text, student_form, template_check
from etpi_assets.curation.label_syntax import LabelSyntax
from etpi_assets.curation.pair_blocks import PairBuilder, label_checks
from etpi_assets.curation.recorded_text import result_figures
from etpi_assets.curation.retokenise import conversation
from etpi_assets.exports.conversations import _as_columns
from etpi_assets.exports.experiment_data import rendered_messages
from etpi_assets.specs.experiment import GatesSection, PairsSection
from etpi_assets.trajectories.tables import iter_turns
from etpi_resources.chat import format as chat_format
from etpi_resources.chat.format import ChatFormat, TemplateRefuses, load_chat_format
from etpi_resources.chat.marks import Thought
from etpi_resources.chat.tokenizer_files import read_tokenizer
from etpi_resources.lake.check_outcome import CheckOutcome
from tests.curation.oracle import Oracle
from tests.support import students, vocabularies
from tests.support.conversations import NoDefault, tables_of
from tests.support.students import FAMILIES, byte_tokenizer, smollm2

needs_qwen = pytest.mark.skipif(
    find_spec("dashscope") is None, reason="dashscope, which ships the Qwen3 ranks, is missing"
)
OF_QWEN = [
    "qwen3", "qwen3_training", "qwen3_instruct_2507", "qwen2_5", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6",
    "qwen3_8",
]  # fmt: skip
OF_OTHERS = ["llama3_1", "gemma4", "gpt_oss", "gemma3"]


@cache
def chat_of(name: str) -> ChatFormat:
    if name in OF_QWEN:
        return load_chat_format("qwen3", name)
    if name == "smollm2":
        return load_chat_format(str(smollm2()))
    return students.chat_of(name)


ALL = [
    *(pytest.param(name, marks=needs_qwen) for name in OF_QWEN),
    *OF_OTHERS,
    "smollm2",
]
TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "default": None}, "depth": {"type": "integer"}},
            "required": ["command"],
        },
    },
}


def checked(
    chat: ChatFormat, tables: dict[str, pa.Table], *, kwargs: dict[str, Any] | None = None, **section: Any
) -> tuple[dict[str, CheckOutcome], dict[str, pa.Table]]:
    """Build pairs, and return {check: outcome} and the tables; the outcome `oracle` is that of the oracle of labels."""
    pairs = PairsSection(**{"capture": "retokenised", "drop_unparseable": False, **section})
    prompts: Any = NoDefault()
    syntax = LabelSyntax(chat, GatesSection())
    built = PairBuilder(pairs, chat, kwargs or {}, None, frozenset(), prompts, syntax).build(tables)
    figures = json.loads(built["figures"]["json"][0].as_py())
    gates = GatesSection()
    outcomes = [*label_checks(figures, pairs, chat, gates), integrity.think_outcome(figures["think"], pairs, chat)]
    seen = Oracle(chat, pairs, kwargs or {}, None).figures(tables, built["pairs"], {})
    outcomes.append(CheckOutcome("oracle", not seen["wrong"], "".join(seen["first"]), figures=seen))
    return {outcome.name: outcome for outcome in outcomes}, built


@cache
def bytes_chat() -> ChatFormat:
    """Return Qwen3's template over a vocabulary of bytes, which has no token for a think or call tag."""
    tokenizer = byte_tokenizer(FAMILIES["qwen3"])
    return ChatFormat("bytes", tokenizer, tokenizer.chat_template)


def equal(outcomes: dict[str, CheckOutcome]) -> bool:
    """Return whether labels equal the template's, for the check at run time and for the oracle."""
    return outcomes["labels_equal_template"].passed and outcomes["oracle"].passed


def labels(chat: ChatFormat, built: dict[str, pa.Table]) -> list[str]:
    return [chat.decode(ids) for ids in built["pairs"]["output_ids"].to_pylist()]


# --- generated conversations ----------------------------------------------------------------------------------------

PROSE = st.sampled_from(
    [
        "Look.", " Look. ", "\nDone.\n", "", "数える 🧮 é",
        "The tag `</think>` ends a block.", "Write </think> after it.",
        "```\n<think>\nx\n</think>\n```\nis an example.", "`<tool_call>` begins a call.", "a <|im_end|> b",
    ]
)  # fmt: skip
THOUGHT = st.sampled_from([None, "See the files.", "One.\n\nTwo.", "é 🧮"])
ARGUMENTS = st.sampled_from(
    [
        '{"command": "ls -a"}',
        '{"command": "ls", "depth": null}',
        "{}",
        {"command": "x é 'q' \"p\""},
        '{"command": "a\\nb"}',
    ]
)


@st.composite
def turns(draw: st.DrawFn, tools: bool) -> list[dict[str, Any]]:
    """An assistant message, its thoughts in either place, and the results of its calls."""
    thought, prose = draw(THOUGHT), draw(PROSE)
    message: dict[str, Any] = {"role": "assistant", "content": prose}
    if thought is not None and draw(st.booleans()):
        message["reasoning_content"] = thought
    elif thought is not None:
        message["content"] = f"<think>\n{thought}\n</think>\n\n{prose}"
    if not tools or not draw(st.booleans()):
        return [message, {"role": "user", "content": draw(PROSE)}]
    calls = draw(st.lists(ARGUMENTS, min_size=1, max_size=2))
    message["tool_calls"] = [
        {"id": f"c{number}", "type": "function", "function": {"name": "run", "arguments": arguments}}
        for number, arguments in enumerate(calls)
    ]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": draw(PROSE)} for n in range(len(calls))]
    return [message, *results]


@st.composite
def conversations(draw: st.DrawFn, tools: bool) -> list[dict[str, Any]]:
    first = draw(
        st.sampled_from([[], [{"role": "system", "content": "Act."}], [{"role": "developer", "content": "Act."}]])
    )
    middle = [message for turn in draw(st.lists(turns(tools), min_size=1, max_size=3)) for message in turn]
    if draw(st.booleans()):
        role = draw(st.sampled_from(["system", "developer"]))
        middle.insert(draw(st.integers(0, len(middle))), {"role": role, "content": "Two steps left."})
    last = {"role": "assistant", "content": draw(PROSE) or "Done."}
    return [*first, {"role": "user", "content": "Go."}, *middle, last]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), strip=st.booleans(), history=st.sampled_from(["strip", "keep"]))
def test_labels_of_any_conversation_equal_the_template(
    name: str, data: st.DataObject, strip: bool, history: str
) -> None:
    chat = chat_of(name)
    tools = [TOOL] if chat.words.form is not None and data.draw(st.booleans()) else None
    tables = tables_of(data.draw(conversations(tools is not None)), tools=tools)
    try:
        outcomes, built = checked(chat, tables, strip_think=strip, history_think=history)
    except ValueError as error:
        assert "closes none" in str(error), "only a template that closes no open block refuses to strip"
        return
    for check in ("labels_equal_template", "oracle", "no_think_in_output"):
        closed = "the prompt closes the think block" in outcomes[check].message
        assert outcomes[check].passed or (closed and not strip), outcomes[check].message
    assert len(built["pairs"]) + len(built["dropped"]) == len(tables["turns"])
    figures = outcomes["labels_equal_template"].figures
    assert figures["compared"] + figures.get("skipped_refused_by_template", 0) == len(built["pairs"])


SPOKEN = [" look: \n", "look </s> <｜User｜> <|im_end|> <|end|> look", "\n\nlook"]


@pytest.mark.parametrize("name", vocabularies.VOCABULARIES)
def test_labels_under_the_rules_of_a_vocabulary_equal_the_template(name: str) -> None:
    chat = vocabularies.chat_of(name)
    talk = [
        {"role": role, "content": text, **({"finish_reason": "length"} if at == 2 and role == "assistant" else {})}
        for at, text in enumerate(SPOKEN)
        for role in ("user", "assistant")
    ]
    outcomes, built = checked(chat, tables_of(talk), drop_truncated=False)
    assert len(built["pairs"]) == len(SPOKEN)
    assert equal(outcomes), outcomes["labels_equal_template"].message


def alone(self: ChatFormat, before: str, texts: list[str], stand_ins: Any) -> list[list[int]]:
    """Encode labels without the generation prompt before them."""
    return [self._structured(text, stand_ins) for text in texts]


@pytest.mark.parametrize(
    ("name", "place", "fault"),
    [
        ("llama2", "_following", alone),
        ("header_of_text", "_following", alone),
        ("mistral_v03", "_inner", property(lambda self: self._core)),
        ("phi3", "_pieces", lambda self, text: [piece for piece in self._split.split(text) if piece]),
        ("phi4", "_pieces", lambda self, text: [piece for piece in self._split.split(text) if piece]),
        ("command_r7b", "_ending", "<|END|>"),
    ],
)
def test_ids_against_the_rules_of_a_vocabulary_are_caught(
    name: str, place: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = ChatFormat(name, vocabularies.tokenizer(name), vocabularies.VOCABULARIES[name].template)
    tables = tables_of([USER, {"role": "assistant", "content": "  look"}])
    assert equal(checked(chat, tables)[0])
    monkeypatch.setattr(ChatFormat, place, fault)
    chat = ChatFormat(name, vocabularies.tokenizer(name), vocabularies.VOCABULARIES[name].template)
    assert not equal(checked(chat, tables)[0])


def test_thoughts_that_the_template_cuts_off_do_not_leave_their_line_breaks() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}"
        "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
    )
    chat = ChatFormat("r1", vocabularies.tokenizer("deepseek"), template)
    tables = tables_of([USER, {"role": "assistant", "content": "look", "reasoning_content": "Hi"}])
    outcomes, built = checked(chat, tables, strip_think=False, history_think="keep")
    assert labels(chat, built) == ["Hi\n</think>\n\nlook</s>"]
    assert equal(outcomes), outcomes["labels_equal_template"].message


# --- faults that the checks catch -----------------------------------------------------------------------------------

retokenised = captured.retokenise

USER = {"role": "user", "content": "Go."}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c0", "type": "function", "function": {"name": "run", "arguments": arguments}}


def naive_split(content: str, separate: str | None = None) -> Thought:
    """Take the first closing tag for the end of thoughts, wherever it stands."""
    inside, closed, rest = content.partition("</think>")
    return (
        Thought(inside.removeprefix("<think>").strip("\n"), rest.lstrip("\n")) if closed else Thought(separate, content)
    )


def schemas_without_nulls(column: str | None) -> Any:
    return column and json.loads(column.replace(', "default": null', ""))


def edited_turns(**changes: Any) -> Any:
    """Return `retokenise` whose turns get other values: name -> function of the turn."""
    return lambda *args, **kwargs: [
        replace(turn, **{name: change(turn) for name, change in changes.items()})
        for turn in retokenised(*args, **kwargs)
    ]


def drop_later_systems(roles: Any, messages: Any) -> list[Any]:
    return [message for at, message in enumerate(messages) if at == 0 or message["role"] != "system"]


def without_nulls(raw: Any) -> Any:
    parsed = chat_call(raw)
    return (
        parsed
        if isinstance(parsed, str)
        else parsed._replace(arguments={key: value for key, value in parsed.arguments.items() if value is not None})
    )


chat_call = student_form.parse_structured
split = student_form.split_thought


FORM, CAPTURED = "etpi_assets.curation.student_form", "etpi_assets.curation.captured"
THOUGHT_IN_TEXT = {"content": "<think>\nSee.\n</think>\n\nDone."}
FAULTS = {
    "separate thoughts are lost": (
        {"content": "Done.", "reasoning_content": "See."}, False, f"{FORM}.split_thought",
        lambda content, separate=None: split(content),
    ),
    "quoted tag ends thoughts": (
        {"content": "The tag `</think>` ends it. Go on."}, True, f"{FORM}.split_thought", naive_split
    ),
    "white space": ({"content": "\nDone.\n"}, True, f"{FORM}.StudentForm._is_verbatim", lambda self, message: True),
    "null of a call": (
        {"content": "", "tool_calls": [call('{"command": "ls", "depth": null}')]}, True, f"{FORM}.parse_structured",
        without_nulls,
    ),
    "null of a schema": ({"content": "Done."}, True, f"{CAPTURED}.recorded_tools", schemas_without_nulls),
    "thoughts stay": (THOUGHT_IN_TEXT, True, f"{CAPTURED}.retokenise", edited_turns(bare=lambda turn: None)),
    "thoughts stay in history": (
        THOUGHT_IN_TEXT, True, f"{CAPTURED}.retokenise",
        edited_turns(bare=lambda turn: turn.bare and (turn.prompt_ids, turn.bare[1])),
    ),
    "message cut at the limit gets an end": (
        {"content": "I would", "finish_reason": "length"}, True, f"{CAPTURED}.retokenise",
        edited_turns(output_ids=lambda turn: bytes_chat().ended(turn.output_ids)),
    ),
}  # fmt: skip
"""Fault -> (an assistant message, pairs.strip_think, the code that is mended, the code without its mend)."""


OF_MESSAGES = {"null of a call", "null of a schema"}
"""Faults in reading the messages, which the check at run time reads in the same way."""


@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_labels_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message, strip, place, fault = FAULTS[name]
    turn = {"role": "assistant", **message}
    # The template keeps thoughts of turns before a result, so that thoughts of history are seen.
    before = [turn, {"role": "tool", "content": "x"}] if name == "thoughts stay in history" else []
    tables = tables_of([USER, *before, turn], tools=[TOOL])
    settings = {"strip_think": strip, "drop_truncated": False}
    outcomes, _ = checked(bytes_chat(), tables, **settings)
    assert all(outcome.passed for outcome in outcomes.values()), outcomes
    monkeypatch.setattr(place, fault)
    outcomes, _ = checked(bytes_chat(), tables, **settings)
    assert not outcomes["oracle"].passed
    assert outcomes["labels_equal_template"].passed is (name in OF_MESSAGES)
    assert outcomes["no_think_in_output"].passed is (name not in ("thoughts stay", "quoted tag ends thoughts"))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Act."}, {"role": "system", "content": "Two steps."}, USER],
        [USER, {"role": "assistant", "content": "Look."}, {"role": "system", "content": "Two steps."}],
        [USER, {"role": "assistant", "content": "", "tool_calls": [call("{}")]},
         {"role": "system", "content": "Two steps."}, {"role": "tool", "tool_call_id": "c0", "content": "a"}],
    ],
    ids=["first", "later", "before a result"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["qwen3_6_bytes", "gpt_oss", "gemma4", "gemma3", "llama3_1"])
def test_later_system_message_is_kept_and_its_loss_is_caught(
    name: str, messages: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "gemma3" and any("tool_calls" in message for message in messages):
        return  # its template writes no calls
    chat = students.chat_of(name.removesuffix("_bytes"))
    tables = tables_of([*messages, {"role": "assistant", "content": "Done."}], tools=None)
    outcome = checked(chat, tables)[0]["labels_equal_template"]
    assert outcome.passed and outcome.figures["compared"] == len(tables["turns"]), outcome.message
    prompt = chat.decode(next(reversed([i for _, i, _ in iter_turns(checked(chat, tables)[1]["pairs"])])))
    assert "Two steps." in prompt and (messages[-1]["role"] != "tool" or prompt.count("a") > prompt.count("assistant"))
    monkeypatch.setattr("etpi_resources.chat.roles.Roles.fit", drop_later_systems)
    assert not equal(checked(chat, tables)[0])


def without_bos(folder: Path, **special: str) -> Any:
    tokenizer = read_tokenizer(folder, **special)
    tokenizer.bos_token = None
    return tokenizer


def test_bos_of_a_chatml_template_is_written_and_its_loss_is_caught(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer(FAMILIES["qwen3"])
    tokenizer.add_special_tokens({"bos_token": "<|startoftext|>"})
    tokenizer.chat_template = "{{- bos_token -}}" + tokenizer.chat_template
    for name in ("good", "lost"):
        tokenizer.save_pretrained(tmp_path / name)
    tables = tables_of([USER, {"role": "assistant", "content": "Done."}])
    chat = load_chat_format(str(tmp_path / "good"))
    outcomes, built = checked(chat, tables)
    assert equal(outcomes)
    (prompt,) = built["pairs"]["suffix_ids"].to_pylist()
    assert chat.decode(prompt[:1]) == "<|startoftext|>" and chat.decode(prompt).count("<|startoftext|>") == 1
    monkeypatch.setattr(chat_format, "read_tokenizer", without_bos)
    outcomes, _ = checked(load_chat_format(str(tmp_path / "lost")), tables)
    assert not equal(outcomes)
    assert "<|startoftext|>" in outcomes["oracle"].message


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=needs_qwen), "llama3_1"])
def test_control_token_that_a_message_quotes_is_text_and_its_parsing_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = copy.copy(chat_of(name))
    end = chat.tokenizer.decode([chat.end_id])
    for asked, answer in ((f"Say {end} now.", "Done."), ("Go.", f"It ends with {end} here.")):
        tables = tables_of([{"role": "user", "content": asked}, {"role": "assistant", "content": answer}])
        assert equal(checked(chat, tables)[0])
        with monkeypatch.context() as patched:
            patched.setattr(ChatFormat, "_masked", lambda self, messages, tools: ((list(messages), tools), {}))
            patched.setattr(chat, "has_control", lambda text: True)
            outcome = checked(chat, tables)[0]["labels_equal_template"]
        assert not outcome.passed and "trained as a control token" in outcome.message


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=needs_qwen), "llama3_1", "gemma4"])
def test_quoted_block_at_the_beginning_is_text_if_thoughts_are_recorded_apart(name: str) -> None:
    chat = chat_of(name)
    prose = "<think> opens a block and </think> closes it."
    for content, left in ((prose, prose), ("<think>\nOther.\n</think>\nDone.", "Done."), ("<think>A.</think>B", "B")):
        for strip in (True, False):
            message = {"role": "assistant", "content": content, "reasoning_content": "A."}
            outcomes, built = checked(chat, tables_of([USER, message]), strip_think=strip, history_think="keep")
            assert all(outcome.passed for outcome in outcomes.values()), outcomes
            (label,) = labels(chat, built)
            assert chat.decode([chat.end_id]) in label
            assert left in label and (not strip or label.startswith(left))


@pytest.mark.parametrize("name", [pytest.param("qwen3_6", marks=needs_qwen), "llama3_1", "gpt_oss"])
@pytest.mark.parametrize("quoted", ["The tag `</think>` ends it.", "```\n</think>\n```\nis the tag."])
def test_thoughts_end_at_the_tag_that_they_do_not_quote(name: str, quoted: str) -> None:
    chat = chat_of(name)
    message = {"role": "assistant", "content": f"<think>\n{quoted}\nSECRET\n</think>\n\nDone."}
    outcomes, built = checked(chat, tables_of([USER, message, USER, {"role": "assistant", "content": "Bye."}]))
    assert all(outcome.passed for outcome in outcomes.values()), outcomes
    assert len(built["pairs"]) == 2 and "Done." in labels(chat, built)[0]
    for column in ("output_ids", "suffix_ids"):
        assert "SECRET" not in chat.decode([i for ids in built["pairs"][column].to_pylist() for i in ids])


def test_refusal_is_the_text_of_a_message_without_content() -> None:
    tables = tables_of([USER, {"role": "assistant", "content": None, "refusal": "I cannot."}])
    assert labels(bytes_chat(), checked(bytes_chat(), tables)[1]) == ["I cannot.<|im_end|>"]


def test_arguments_encoded_twice_are_read_and_an_unreadable_call_is_no_label() -> None:
    chat = chat_of("llama3_1")
    twice = json.dumps(json.dumps({"command": 'ls é "x"'}))
    for arguments, passed in ((twice, True), ("not JSON", False)):
        messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}]
        outcomes, built = checked(chat, tables_of(messages, tools=[TOOL]))
        assert equal(outcomes) is passed, outcomes["labels_equal_template"].message
        assert not passed or '{"command": "ls é \\"x\\""}' in labels(chat, built)[0]


def test_the_last_turn_of_a_long_conversation_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENCODED", "RENDERED"):
        monkeypatch.setattr(template_check, name, 200)
    turns = [m for number in range(9) for m in (USER, {"role": "assistant", "content": f"{number} " * 30})]
    tables = tables_of([*turns, USER, {"role": "assistant", "content": "\nDone.\n"}])
    monkeypatch.setattr("etpi_assets.curation.student_form.StudentForm._is_verbatim", lambda self, message: True)
    outcome = checked(bytes_chat(), tables)[0]["labels_equal_template"]
    assert not outcome.passed and outcome.figures["compared"] == 10 and "skipped_not_sampled" not in outcome.figures


def test_label_in_another_split_than_the_tokenizers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = load_chat_format("tiny")
    tables = tables_of([USER, {"role": "assistant", "content": "Look."}])
    assert equal(checked(chat, tables)[0])
    letters = [i for letter in "Look." for i in chat.encode(letter)]
    assert letters != chat.encode("Look.")
    monkeypatch.setattr(f"{CAPTURED}.retokenise", edited_turns(output_ids=lambda turn: [*letters, chat.end_id]))
    assert not equal(checked(chat, tables)[0])


def test_thoughts_after_a_block_that_the_prompt_closes_are_caught() -> None:
    tables = tables_of([USER, {"role": "assistant", "content": "Done.", "reasoning_content": "See."}])
    for thinking in (True, False):
        kept = {"kwargs": {"enable_thinking": thinking}, "strip_think": False, "history_think": "keep"}
        outcome = checked(bytes_chat(), tables, **kept)[0]["labels_equal_template"]
        assert outcome.passed is thinking and ("closes the think block" in outcome.message) is not thinking


def refuses(*arguments: Any, **more: Any) -> str:
    raise TemplateRefuses("no")


def test_labels_that_the_template_refuses_count_towards_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_check.TemplateCheck, "_render", refuses)
    outcome = checked(bytes_chat(), tables_of([USER, {"role": "assistant", "content": "Done."}]))[0][
        "labels_equal_template"
    ]
    assert not outcome.passed and outcome.figures["skipped_refused_by_template"] == 1


def test_message_cut_at_the_limit_has_no_end_of_turn() -> None:
    chat = bytes_chat()
    tables = tables_of([USER, {"role": "assistant", "content": "I would", "finish_reason": "length"}])
    outcomes, built = checked(chat, tables, drop_truncated=False)
    assert outcomes["labels_equal_template"].figures["cut_at_limit"] == 1
    assert labels(chat, built) == ["I would"]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6"])
def test_columns_of_an_export_render_as_the_conversation(name: str) -> None:
    chat = students.chat_of(name)
    turn = {"content": "Look.", "reasoning_content": "See.", "tool_calls": [call('{"command": "ls", "depth": 2}')]}
    rows = tables_of([USER, {"role": "assistant", **turn}], tools=[TOOL])["messages"].to_pylist()
    messages, _ = conversation(rows, student_form.StudentForm(chat, [TOOL]))
    columns = [_as_columns(message, chat, [TOOL]) for message in messages]
    assert all(isinstance(c["function"]["arguments"], str) for m in columns for c in m.get("tool_calls", ()))
    rendered = [
        chat.tokenizer.apply_chat_template(shown, tools=[TOOL], tokenize=False)
        for shown in (columns, [USER, {"role": "assistant", **turn, "tool_calls": messages[1]["tool_calls"]}])
    ]
    assert rendered[0] == rendered[1] and "See." in rendered[0] and "depth" in rendered[0]


@pytest.mark.parametrize("name", ["qwen3_6", "gemma3"])
def test_exported_messages_have_roles_that_the_template_takes(name: str) -> None:
    chat = students.chat_of(name)
    system, answer = {"role": "system", "content": "Act."}, {"role": "assistant", "content": "Look."}
    rows = tables_of([system, USER, answer, system, {**answer, "content": "Done."}])["messages"].to_pylist()
    messages, positions = rendered_messages(rows, student_form.StudentForm(chat))
    assert [messages[at]["content"] for _, at in positions] == ["Look.", "Done."]
    assert str(chat.tokenizer.apply_chat_template(messages, tokenize=False)).count("Act.") == 2


def test_call_without_any_offered_tool_is_caught() -> None:
    calling = [USER, {"role": "assistant", "content": "", "tool_calls": [call('{"command": "ls"}')]}]
    flattened = [USER, {"role": "assistant", "content": '[tool_use run] {"command": "ls"}'}]
    for tools, prompt, passed in (
        ([TOOL], "Go.", True), (None, "Go.", False), (None, "Call run(command).", True), (None, "It runs.", False),
    ):  # fmt: skip
        for messages in (calling, flattened):
            tables = tables_of([{**USER, "content": prompt}, *messages[1:]], tools=tools)
            assert checked(bytes_chat(), tables)[0]["tools_offered"].passed is passed


def test_prompts_with_calls_without_results_are_counted() -> None:
    asks = {"role": "assistant", "content": "", "tool_calls": [call('{"command": "ls"}')]}
    asks_twice, asks_thrice = ({**asks, "tool_calls": asks["tool_calls"] * n} for n in (2, 3))
    result, done = {"role": "tool", "content": "a"}, {"role": "assistant", "content": "Done."}
    for messages, passed in (
        ([asks, result, done], True), ([asks, USER, done], True), ([asks_twice, result, result, asks], True),
        ([asks_twice, result, done], True), ([asks, result, done, result, done], True),
        ([asks, done], False), ([asks, asks, result, done], False), ([asks_thrice, result, result, done], False),
        ([asks, result, result, done], False),
    ):  # fmt: skip
        outcome = checked(bytes_chat(), tables_of([USER, *messages], tools=[TOOL]))[0]["calls_answered"]
        assert (outcome.passed, outcome.blocking) == (passed, False), (messages, outcome.message)
        assert outcome.figures == {"calling": 1, "unanswered": int(not passed)}
    tables = tables_of([USER, asks, done], tools=[TOOL])
    pairs = checked(bytes_chat(), tables)[1]["pairs"]
    recorded = pairs.drop_columns("capture").append_column("capture", pa.array(["native"] * len(pairs)))
    assert result_figures(tables["messages"], recorded)["calling"] == 0  # their prompts are recorded ids


WHOLE = "See.\n</think>\n\nFix the parser."
CALLS = [call('{"command": "echo \\"é\\n\\""}')]
WRITTEN = '\n<tool_call>\n{"name": "run", "arguments": {"command": "echo \\"\\u00e9\\n\\""}}\n</tool_call>'


OTHER_TEXT = (WHOLE.replace("parser", "parsing") + WRITTEN, WHOLE + ' run echo "é\n"')
"""A call with another text before it, and one written as text."""


@pytest.mark.parametrize(
    ("written", "calls", "passed"),
    [
        (WHOLE, [], True),
        (WHOLE[:-8], [], False),
        (WHOLE + " And more.", [], False),
        (WHOLE + " Fix the parser.", [], False),
        ("Fix the parser.", [], False),
        (WHOLE.replace("See.", "See. More."), [], False),
        *((written, CALLS, False) for written in OTHER_TEXT),
        (WHOLE + WRITTEN, CALLS, True),
        (WHOLE, CALLS, False),
        (WHOLE + WRITTEN.replace("echo", "rm"), CALLS, False),
        (WHOLE + WRITTEN, [], False),
        (WHOLE + WRITTEN, [*CALLS, {"function": {"name": "read", "arguments": "{}"}}], False),
    ],
)
def test_recorded_ids_without_the_recorded_text_or_calls_are_caught(
    written: str, calls: list[Any], passed: bool
) -> None:
    chat = bytes_chat()
    key = {"rollout_id": ["r"], "agent_id": ["a"], "turn": [0]}
    pairs = pa.table({**key, "capture": ["native"]})
    output = pa.array([[*chat.encode(written), chat.end_id]], pa.list_(pa.int32()))
    for thought, content, without in (("See.", "Fix the parser.", False), (None, "", True), (None, WHOLE[-15:], False)):
        if (without and (not calls or written in OTHER_TEXT)) or (thought is None and not without and written != WHOLE):
            continue  # nothing is recorded that differs, or thoughts that the record lacks
        said = {"content": [content], "reasoning": [thought], "output_ids": output}
        messages = pa.table({**key, "tool_calls": pa.array([json.dumps(calls) if calls else None], pa.string())})
        figures = recorded_text.text_figures(pa.table({**key, **said}), messages, pairs, chat)
        assert recorded_text.text_outcome(figures).passed is passed, figures


@pytest.mark.parametrize("name", ["llama3_1", "smollm2"])
def test_stripped_labels_of_a_vocabulary_without_think_tokens_have_no_think_text(name: str) -> None:
    chat = chat_of(name)
    assert chat.think_open_id is None
    tables = tables_of(
        [
            USER,
            {"role": "assistant", "content": "<think>\nSee.\n</think>\n\nLook."},
            USER,
            {"role": "assistant", "content": "Done.", "reasoning_content": "It is."},
        ]
    )
    outcomes, built = checked(chat, tables)
    assert all(outcome.passed for outcome in outcomes.values())
    assert [label.partition("<|")[0] for label in labels(chat, built)] == ["Look.", "Done."]
    assert all(built["pairs"]["think_removed"].to_pylist())
    prompts = chat.decode([i for ids in built["pairs"]["suffix_ids"].to_pylist() for i in ids])
    assert "think>" not in prompts and "See." not in prompts


def test_recorded_ids_that_the_template_would_not_write_are_counted_and_not_refused() -> None:
    chat = bytes_chat()
    messages = [USER, {"role": "assistant", "content": "Look."}, USER, {"role": "assistant", "content": " Done. "}]
    tables = tables_of(messages)
    _, rendered = checked(chat, tables)
    prompts = [prompt.tolist() for _, prompt, _ in iter_turns(rendered["pairs"])]
    first, last = chat.encode("Look."), chat.encode("Done.")
    turns = tables["turns"].to_pylist()
    turns[0] |= {"capture": "native", "suffix_ids": prompts[0], "output_ids": [*first, chat.end_id]}
    again = chat.prompt_ids([{"role": "user", "content": "A summary."}])
    turns[1] |= {"capture": "native", "suffix_ids": again, "output_ids": [*last, chat.end_id]}
    native = {**tables, "turns": pa.Table.from_pylist(turns, tables["turns"].schema)}
    outcomes, built = checked(chat, native, capture="native")
    assert len(built["pairs"]) == 2 and all(outcome.passed for outcome in outcomes.values()), outcomes
    figures = outcomes["labels_equal_template"].figures
    assert (figures["compared"], figures["own_history"], figures["own_label"]) == (2, 1, 1)
    assert outcomes["recorded_text"].figures["own_splits"] == 0
    turns[0]["content"], turns[1]["content"] = "Look .", None
    native["turns"] = pa.Table.from_pylist(turns, tables["turns"].schema)
    figures = checked(chat, native, capture="native")[0]["recorded_text"].figures
    assert (figures["own_white_space"], figures["without_text"], figures["text_unchecked"]) == (1, 1, 1)


def test_think_text_that_stays_in_recorded_histories_is_counted() -> None:
    chat = bytes_chat()
    turn = {"role": "assistant", "content": "Look."}
    tables = tables_of([USER, turn, USER, turn])
    for said, figures in (("Look.", {}), ("<think>\nb\n</think>\n\nLook.", {"histories_with_think": 1})):
        first, later = chat.prompt_ids([USER]), chat.observation_ids("Go.")
        output = chat.encode(f"<think>\na\n</think>\n\n{said}")
        turns = tables["turns"].to_pylist()
        turns[0] |= {"capture": "native", "suffix_ids": first, "output_ids": [*output, chat.end_id]}
        prompt = [*first, *output, chat.end_id, *later]
        turns[1] |= {
            "capture": "native",
            "prefix_turn": None,
            "suffix_ids": prompt,
            "output_ids": [*chat.encode("Look."), chat.end_id],
        }
        native = {**tables, "turns": pa.Table.from_pylist(turns, tables["turns"].schema)}
        outcome = checked(chat, native, capture="native")[0]["no_think_in_output"]
        assert outcome.passed
        assert {name: n for name, n in outcome.figures.items() if name == "histories_with_think"} == figures
        kept = checked(chat, native, capture="native", history_think="keep")[0]["no_think_in_output"]
        assert "histories_with_think" not in kept.figures


@pytest.mark.parametrize("name", [*FAMILIES, "smollm2"])
def test_developer_message_is_read_as_the_templates_system_message(name: str) -> None:
    chat = chat_of(name) if name == "smollm2" else students.chat_of(name)
    answer = {"role": "assistant", "content": "Done."}
    first = [{"role": role, "content": "Act."} for role in ("system", "developer")]
    prompts = []
    for message in first:
        outcomes, built = checked(chat, tables_of([message, USER, answer]))
        assert outcomes["labels_equal_template"].figures["compared"] == 1 and equal(outcomes)
        prompts.append(chat.decode(next(ids for _, ids, _ in iter_turns(built["pairs"]))))
    assert prompts[0] == prompts[1] and "Act." in prompts[0]
    if "'developer'" in chat.template or '"developer"' in chat.template:  # the template knows the role
        shown = chat.tokenizer.apply_chat_template([first[1], USER], tokenize=False, add_generation_prompt=True)
        assert str(shown).split("Act.")[1] == prompts[1].split("Act.")[1]


@needs_qwen
def test_splits_of_recorded_ids_that_are_not_the_tokenizers_are_counted() -> None:
    chat = chat_of("qwen3")
    pieces = [i for letter in "Look." for i in chat.encode(letter)]
    key = {"rollout_id": ["r", "r"], "agent_id": ["a", "a"], "turn": [0, 1]}
    outputs = pa.array([[*pieces, chat.end_id], [*chat.encode("Look."), chat.end_id]], pa.list_(pa.int32()))
    turns = pa.table({**key, "content": ["Look."] * 2, "reasoning": [None] * 2, "output_ids": outputs})
    messages = pa.table({**key, "tool_calls": pa.array([None, None], pa.string())})
    pairs = pa.table({**key, "capture": ["native"] * 2})
    figures = recorded_text.text_figures(turns, messages, pairs, chat)
    assert recorded_text.text_outcome(figures).passed and figures["own_splits"] == 1


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"), ("<|begin_of_thought|>", "<|end_of_thought|>")],
)
@pytest.mark.parametrize("name", ["bytes", "llama3_1", "gemma4"])
def test_thoughts_in_other_spellings_are_stripped_and_their_loss_is_caught(
    name: str, opening: str, closing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = bytes_chat() if name == "bytes" else chat_of(name)
    turn = {"role": "assistant", "content": f"{opening}\nSee.\n{closing}\n\nLook."}
    tables = tables_of([USER, turn, USER, {"role": "assistant", "content": f"Write {opening} and {closing}."}])
    outcomes, built = checked(chat, tables)
    assert all(outcome.passed for outcome in outcomes.values()), outcomes
    first, second = labels(chat, built)
    assert first.startswith("Look.") and "See." not in first and opening in second
    outcomes, built = checked(chat, tables, strip_think=False, history_think="keep")
    assert equal(outcomes) and "See." in labels(chat, built)[0]
    monkeypatch.setattr("etpi_resources.chat.marks.other_block", lambda text: None)
    outcomes, _ = checked(chat, tables)
    assert not equal(outcomes) and not outcomes["no_think_in_output"].passed
