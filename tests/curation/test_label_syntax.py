"""The check of label syntax stops data sets that train a syntax which no prompt asks for and no parser reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etpi_assets.curation.label_syntax import LabelSyntax
from etpi_assets.curation.pairs import CapturedAgent, CapturedTurn, make_pairs
from etpi_assets.curation.retokenise import retokenise
from etpi_assets.specs.experiment import GatesSection, PairsSection
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.tool_forms import FORMS, Call
from etpi_resources.lake.check_outcome import CheckOutcome
from tests.support.own_runs import TOOLS, recorded_run
from tests.support.students import FAMILIES, byte_tokenizer, trl_template

PAIRS = PairsSection(capture="retokenised", strip_think=False)
GATES = GatesSection(turns_lost=0.1)
CALL = Call("execute_bash", {"command": "ls"})
Edit = Callable[[list[CapturedTurn]], list[CapturedTurn]]


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    tokenizer = byte_tokenizer(FAMILIES["qwen3"])
    return ChatFormat("qwen3", tokenizer, tokenizer.chat_template)


def verdict(
    chat: ChatFormat, edit: Edit = lambda turns: turns, parser: str | None = None, tools: list[Any] | None = TOOLS
) -> CheckOutcome:
    """Check three runs of four turns whose captured turns were edited; the last turn is an answer in words."""
    agents = []
    for number in range(3):
        rows = [
            {**m, "turn": None if m["role"] in ("system", "user") else max(0, index - 2) // 2,
             "kind": "action" if m["role"] == "assistant" else "observation"}
            for index, m in enumerate(recorded_run(number, 3)["messages"])
        ]  # fmt: skip
        turns = [
            CapturedTurn(t.turn, ids(t.prompt_ids), ids(t.output_ids), "retokenised", calls=t.calls)
            for t in retokenise(rows, chat, tools=tools)
        ]
        agents.append(CapturedAgent(f"r{number}", "agent1", edit(turns), finished=True, tools=tools))
    check = LabelSyntax(chat, GATES, parser)
    tables = make_pairs(agents, PAIRS, chat)
    return check.outcome(check.figures(agents, tables["pairs"], tables["dropped"]))


def ids(numbers: list[int]) -> np.ndarray:
    return np.asarray(numbers, dtype=np.int32)


def written(chat: ChatFormat, text: str) -> np.ndarray:
    return ids([*chat.encode(text), chat.end_id])


def with_turn(turns: list[CapturedTurn], at: int, output: np.ndarray | None, **changes: Any) -> list[CapturedTurn]:
    return [replace(t, output=output, calls=(), **changes) if i == at else t for i, t in enumerate(turns)]


def test_labels_of_the_template_pass_with_a_parser_that_reads_them(chat: ChatFormat) -> None:
    for parser in (None, "hermes"):
        outcome = verdict(chat, parser=parser)
        assert outcome.passed, outcome.message
        assert (outcome.figures["labels"], outcome.figures["with_calls"]) == (12, 9)


@pytest.mark.parametrize("form", ["qwen_xml", "glm", "mistral", "markdown"])
def test_calls_in_another_syntax_than_the_prompt_asks_for_block(chat: ChatFormat, form: str) -> None:
    call = Call("bash", CALL.arguments) if form == "markdown" else CALL
    text = f"Look.\n{FORMS[form].render([call])}"
    outcome = verdict(chat, lambda turns: with_turn(turns, 0, written(chat, text)))
    assert not outcome.passed
    assert form in outcome.message
    assert "hermes" in outcome.message


def test_fenced_command_in_an_answer_is_no_call(chat: ChatFormat) -> None:
    text = "Run it with\n```bash\nls\n```"
    assert verdict(chat, lambda turns: with_turn(turns, 3, written(chat, text))).passed


def test_answers_that_are_not_learnt_block(chat: ChatFormat) -> None:
    outcome = verdict(chat, lambda turns: with_turn(turns, 3, None))
    assert not outcome.passed
    assert outcome.figures["endings_lost"] == 3


def test_advice_for_conversations_that_the_template_refuses_is_not_about_syntax(chat: ChatFormat) -> None:
    outcome = verdict(chat, lambda turns: with_turn(turns, 3, None, refused="the template refuses a system message"))
    assert not outcome.passed and "the template refuses a system message" in outcome.message
    assert "hermes" not in outcome.message


def test_labels_without_an_end_of_turn_block(chat: ChatFormat) -> None:
    outcome = verdict(chat, lambda turns: with_turn(turns, 3, ids(chat.encode("Done."))))
    assert not outcome.passed
    assert "end-of-turn" in outcome.message


def test_calls_of_tools_that_no_prompt_offers_block(chat: ChatFormat) -> None:
    text = FORMS["hermes"].render([Call("search_web", {"query": "x"})])
    outcome = verdict(chat, lambda turns: with_turn(turns, 0, written(chat, text)))
    assert not outcome.passed
    assert "search_web 3" in outcome.message


def test_broken_calls_block(chat: ChatFormat) -> None:
    text = FORMS["hermes"].render([CALL]).replace("}}", "}")
    outcome = verdict(chat, lambda turns: with_turn(turns, 0, written(chat, text)))
    assert not outcome.passed
    assert "cannot read" in outcome.message


def test_label_that_is_not_what_was_captured_blocks(chat: ChatFormat) -> None:
    other = written(chat, FORMS["hermes"].render([Call("execute_bash", {"command": "rm x"})]))

    def edit(turns: list[CapturedTurn]) -> list[CapturedTurn]:
        return [replace(turns[0], output=other), *turns[1:]]

    outcome = verdict(chat, edit)
    assert not outcome.passed
    assert "not read back" in outcome.message


def test_call_that_reads_alike_but_is_written_otherwise_blocks(chat: ChatFormat) -> None:
    call = '<tool_call>{"name":"execute_bash","arguments":{"command":"ls"}}</tool_call>'

    def edit(turns: list[CapturedTurn]) -> list[CapturedTurn]:
        return [replace(turns[0], output=written(chat, call), calls=(CALL,)), *turns[1:]]

    assert not verdict(chat, edit).passed


def test_parser_of_serving_that_reads_another_syntax_blocks(chat: ChatFormat) -> None:
    outcome = verdict(chat, parser="qwen3_coder")
    assert not outcome.passed
    assert all(word in outcome.message for word in ("qwen3_coder", "'hermes'", "serving.options"))


def test_calls_without_offered_tools_are_counted(chat: ChatFormat) -> None:
    outcome = verdict(chat, tools=None)
    assert outcome.passed
    assert outcome.figures["calls_without_tools"] == 9


@pytest.mark.parametrize("text", ["Go.", '[tool_use bash] {"command": "ls"}\nis the command to run.'])
def test_turns_without_calls_are_built_under_a_template_of_an_unknown_form(text: str) -> None:
    chat = ChatFormat("lfm2", byte_tokenizer(FAMILIES["qwen3"]), trl_template("lfm2_v2"))
    rows = [{"role": role, "content": text, "turn": turn, "kind": kind}
            for role, turn, kind in (("user", None, "prompt"), ("assistant", 0, "action"))]  # fmt: skip
    (turn,) = retokenise(rows, chat)
    captured = CapturedTurn(0, ids(turn.prompt_ids), ids(turn.output_ids), "retokenised")
    pairs = make_pairs([CapturedAgent("r", "agent1", [captured])], PAIRS, chat)["pairs"]
    assert pairs["format_tokens"].to_pylist() == [0]
