"""`etpi template`: what a template does, and what does not work with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from etpi import cli
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.report import report
from tests.support.students import FAMILIES, byte_tokenizer, make_student

PAGE = Path(__file__).parents[2] / "docs" / "own_model.md"


def chat_of(name: str, template: str | None = None) -> ChatFormat:
    tokenizer = byte_tokenizer(FAMILIES[name])
    return ChatFormat(name, tokenizer, template or tokenizer.chat_template)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma3"])
def test_families_that_are_trained_in_tests_have_no_problem(family: str) -> None:
    chat = chat_of(family)
    assert [finding for finding in report(chat) if finding.problem] == []
    row = next(line for line in PAGE.read_text().splitlines() if f"| `{family}` |" in line)
    assert chat.tool_form is not None
    assert f"`{chat.tool_form.name}`" in row, "the table of docs/own_model.md"
    assert all(f"`{parser}`" in row for parser in chat.tool_form.servers)


def test_template_without_calls_is_a_problem_with_a_remedy() -> None:
    (problem,) = [finding for finding in report(chat_of("gemma3")) if finding.problem]
    assert problem.subject == "tool calls"
    assert "base.chat_template" in problem.problem


def test_template_that_ends_no_turn_is_the_only_finding() -> None:
    endless = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (finding,) = report(chat_of("llama3_1", endless))
    assert finding.subject == "end of a turn"
    assert "learn to stop" in finding.problem


def test_command_prints_findings_and_exits_with_one_if_something_does_not_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for family, code in (("mistral_v11", 0), ("gemma3", 1)):
        assert cli.main(["template", str(make_student(family, tmp_path / family))]) == code
    printed = capsys.readouterr().out
    assert "[TOOL_CALLS]run_probe" in printed
    assert "does not work: tool calls" in printed
    assert cli.main(["template", str(tmp_path / "nothing")]) == 1
