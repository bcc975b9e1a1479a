"""Questions with an answer: rows, balanced sampling, verdicts on mathematics and on programs, in the real sandbox."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from etpi_assets.tasks.answers import maths, programs
from etpi_assets.tasks.answers.comparer import Comparer, Undecided
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import ANSWER, RejectedInput, Task
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

FAMILY = load_family("answers")
BOX = BubblewrapFactory()
DOUBLE = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]}
CHECK = {
    "test": "def check(candidate):\n    assert candidate(n=3) == 6\n",
    "entry_point": "Solution().double",
    "prompt": "import math\n",
}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("so \\boxed{7}.", "7"),
        ("\\boxed{1} or \\boxed{2} or \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{7", None),
        ("\\boxed{ }", None),
        ("7", None),
        ("\\boxed{3} \\boxed{}", None),
    ],
)
def test_last_boxed_result_is_the_answer(text, result):
    assert maths.boxed(text) == result


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("0.5", "\\frac{1}{2}"), ("\\dfrac12", "1/2"), ("1,234", "1234"), ("$x = 3$", "3"), ("(1, 2)", "(1,2)"),
        ("90°", "90"), ("\\$1,\\!386.50", "1386.5"),
        ("90^\\circ", "90"), ("12.0", "12"), ("-\\frac{3}{4}", "-0.75"), ("\\text{east}", "east"),
    ],
)  # fmt: skip
def test_typography_and_the_form_of_a_number_do_not_count(one, two):
    assert maths.equal(one, two) and maths.equal(two, one)


@pytest.mark.parametrize(
    ("one", "two"), [("1", "2"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("1,2", "12"), ("", ""), ("1/0", "0")]
)
def test_different_answers_are_not_equal(one, two):
    assert not maths.equal(one, two)


def verdict_on(wanted: str, answer: str, grader: maths.Grader = "hardened") -> str:
    return maths.judge(wanted, f"so \\boxed{{{answer}}}", grader).verdict


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        ("2\\sqrt{2}", "\\sqrt{8}"), ("x^2-1", "(x-1)(x+1)"), ("\\frac{\\pi}{2}", "\\pi/2"), ("\\{1,2\\}", "\\{2,1\\}"),
        ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}"), ("25", "25 \\text{ cm}^2"),
        ("25", "25\\mbox{ m}^3"), ("1500", "1.5 \\times 10^{3}"),
        ("\\left(3,\\frac{\\pi}{2}\\right)", "(3, \\pi/2)"), ("x=5", "5"), ("5", "x = 5"), ("2^{10}", "1024"),
        ("\\binom{5}{2}", "10"), ("-3", "$-3$"), ("x \\in [1,2]", "[1,2]"),
        ("(-\\infty, 3]", "x \\le 3"), ("[1, 4)", "1 \\le y < 4"), ("x > 2", "(2, \\infty)"),
        ("7", "7."), ("\\frac12", "0.5."), ("(1, 2)", "(1,2)."),
    ],
)  # fmt: skip
def test_equal_mathematics_is_equal_whatever_its_form(wanted, answer):
    assert verdict_on(wanted, answer) == verdict_on(wanted, answer, "published") == "passed"


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        ("5", "1, 5"), ("5", "1 \\text{ or } 5"), ("5", "\\infty"), ("5", "\\frac{0}{0}"), ("5", "x"),
        ("5", "5 + 10^{-9}"),
        ("(1,2)", "[1,2]"), ("2", "1 < 2"), ("5", "$4$ $5$ $6$"), ("5", "__import__('os').getpid()"), ("5", "\\frac{"),
        ("(-\\infty, 3]", "x < 3"), ("7", "7.."), ("[1, 4)", "1"),
        ("5", "5 \\ne 6"), ("3.14159", "\\pi"), ("x", "5"), ("\\text{east}", "\\text{west}"),
    ],
)  # fmt: skip
def test_several_guesses_or_other_values_are_wrong_for_both_graders(wanted, answer):
    assert verdict_on(wanted, answer) == verdict_on(wanted, answer, "published")
    assert verdict_on(wanted, answer) in ("wrong_answer", "no_answer")


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        ("\\frac12", "\\int_0^1 x \\, dx"), ("55", "\\sum_{i=1}^{10} i"), ("391", "17 \\cdot 23"),
        ("391", "17 \\times 23"),
        ("1024", "2^{10}"), ("120", "5!"), ("10", "\\binom{5}{2}"), ("7", "3 + 4"),
        ("3", "\\sqrt{9}"), ("\\frac32", "\\frac{3/4}{1/2}"), ("\\frac32", "(3/4)/(1/2)"), ("1.5", "3/4/\\frac12"),
        ("0", "\\lim_{x \\to \\infty} \\frac{1}{x}"), ("\\frac{\\pi}{2}", "\\int_0^1 \\pi x dx"),
    ],
)  # fmt: skip
def test_question_put_into_the_box_earns_nothing_but_from_the_published_grader(wanted, answer):
    result = maths.judge(wanted, f"\\boxed{{{answer}}}")
    assert result.reward == 0.0 and result.details["why"] == "equal, but the answer leaves its value to compute"
    assert verdict_on(wanted, answer, "published") == "passed"


@pytest.mark.parametrize(
    ("question", "wanted", "copied", "right"),
    [
        ("Factor $x^2-1$.", "(x-1)(x+1)", "x^2-1", "(x+1)(x-1)"),
        ("Expand \\((x+1)^{2}\\).", "x^2+2x+1", "(x+1)^{2}", "1+2x+x^2"),
        ("Simplify $\\sqrt{ 8 }$.", "2\\sqrt{2}", "\\sqrt{8}", "\\sqrt{2} \\cdot 2"),
        ("Reduce \\frac{6}{4}.", "\\frac{3}{2}", "\\frac{6}{4}", "1.5"),
        ("Compute $|-5|$.", "5", "|-5|", "5.0"),
        ("Compute $\\lfloor 3.7 \\rfloor$.", "3", "\\lfloor 3.7 \\rfloor", "3.0"),
        ("Compute $\\arcsin 1$.", "\\frac{\\pi}{2}", "\\arcsin 1", "\\pi/2"),
        ("Compute $\\exp(0)$.", "1", "\\exp(0)", "1.0"),
        ("Factor $x^2-1$.", "(x-1)(x+1)", "-1+x^{2}", "(x-1) \\cdot (x+1)"),
        ("Expand \\((x+1)^{2}\\).", "x^2+2x+1", "\\left(1+x\\right)^2", "x^2+1+2x"),
        ("Simplify \\frac{x}{2}+\\frac{x}{3}.", "\\frac{5x}{6}", "x/3+x/2", "5x/6"),
        ("Simplify $\\sqrt{2}+\\sqrt{8}$.", "3\\sqrt{2}", "\\sqrt{8}+\\sqrt{2}", "\\sqrt{2} \\cdot 3"),
        ("Compute 1/2+1/3.", "\\frac{5}{6}", "\\frac13+\\frac12", "\\frac{10}{12}"),
        ("Compute 1/2+1/3.", "\\frac{5}{6}", "0.8333333", "5/6"),
        ("Simplify $\\sqrt{ 8 }$.", "2\\sqrt{2}", "2.8284271247", "2\\sqrt2"),
        ("Simplify $\\sqrt{ 8 }$.", "2\\sqrt{2}", "2.8284271247.", "2\\sqrt2."),
        ("Where is $x^2-12$ zero? Factor $x^2-1$ first.", "(x-1)(x+1)", "x^2-1", "(x-1) (x+1)"),
    ],
)
def test_expression_copied_from_the_question_earns_nothing_but_from_the_published_grader(
    question, wanted, copied, right
):
    def reward(answer: str, grader: maths.Grader = "hardened") -> float | None:
        return maths.judge(wanted, f"\\boxed{{{answer}}}", grader, question).reward

    assert reward(copied) == 0.0 and reward(copied, "published") == 1.0
    assert reward(right) == reward(wanted) == 1.0


@pytest.mark.parametrize(
    ("question", "wanted", "right"),
    [
        ("Let $f(x)=2x-3$. Find $-f(x)$.", "-(2x-3)", "3-2x"),
        ("Simplify $-(a-b)$.", "-(a-b)", "b-a"),
        ("Find the reciprocal of $\\frac{x-1}{2}$.", "-\\frac{2}{1-x}", "\\frac{2}{x-1}"),
        ("Let $y=\\frac{x-2}{2}$. Find $4y+2$.", "2(x-1)", "2x-2"),
    ],
)
def test_answer_of_the_questions_names_and_numbers_is_no_copy(question, wanted, right):
    assert maths.judge(wanted, f"\\boxed{{{right}}}", "hardened", question).reward == 1.0


@pytest.mark.parametrize(
    ("question", "wanted", "rewritten", "right"),
    [
        ("Reduce \\frac{6}{4}.", "\\frac32", ["12/8", "\\frac{18}{12}", "\\dfrac{6}{4}"], ["3/2", "1.5", "1\\frac12"]),
        (
            "Factor $x^2-1$.", "(x-1)(x+1)",
            ["x \\cdot x-1", "-(1-x^2)", "\\frac{2x^2-2}{2}", "\\frac{x^3-x}{x}", "x^2-1^2", "1(x^2-1)", "x^2-2+1"],
            ["(x+1)(x-1)", "-(1-x)(1+x)", "(x-1)(1+x)"],
        ),
        (
            "Expand $(x+1)^2$.", "x^2+2x+1",
            ["(x+1)(x+1)", "(1+x)(x+1)", "\\frac{2(x+1)^2}{2}", "\\frac{(x+1)^3}{x+1}", "(x+1)^{3-1}"],
            ["1+2x+x^2", "x(x+2)+1", "x^2+x+x+1"],
        ),
        (
            "Simplify $\\sqrt{8}$.", "2\\sqrt{2}",
            ["\\sqrt{4 \\cdot 2}", "\\sqrt{16/2}", "8^{1/2}", "\\sqrt{2}+\\sqrt{2}"],
            ["\\sqrt2 \\cdot 2", "2 \\cdot 2^{1/2}"],
        ),
        (
            "Simplify \\(\\frac{x}{2}+\\frac{x}{3}\\).", "\\frac{5x}{6}",
            ["\\frac{3x+2x}{6}", "\\frac{3x}{6}+\\frac{2x}{6}", "x(\\frac12+\\frac13)"],
            ["\\frac56 x", "5x/6", "x \\cdot \\frac{5}{6}"],
        ),
        ("Simplify $\\frac{x^2-1}{x-1}$.", "x+1", ["\\frac{1-x^2}{1-x}", "\\frac{2x^2-2}{2x-2}"], ["1+x"]),
        ("Factor $2x+2$.", "2(x+1)", ["2+2x"], ["2(1+x)"]),
        ("Simplify $3\\cdot\\frac{x}{6}$.", "\\frac{x}{2}", ["\\frac{3x}{6}", "\\frac{2x}{4}"], ["x/2", "\\frac12 x"]),
        ("Compute 1/2+1/3.", "\\frac56", ["\\frac{3}{6}+\\frac26"], ["10/12"]),
        (
            "Simplify $-\\frac{\\frac{a}{b}+x^{n-1}}{x-y}$.", "\\frac{a+bx^{n-1}}{b(y-x)}",
            ["-\\frac{x^{-1+n}+\\frac{a}{b}}{-y+x}"], ["\\frac{bx^{n-1}+a}{b(y-x)}"],
        ),
        ("Simplify $4(x+1)-2x$.", "2(x+2)", [], ["2x+4"]),
        ("Simplify $(x+1)^2-(x-1)^2-2x+2$.", "2(x+1)", [], ["2x+2"]),
        ("Simplify $\\frac{(x^2-1)(x+2)}{x-1}$.", "x^2+3x+2", [], ["(x+1)(x+2)"]),
        ("Simplify $2+\\frac{x}{x^2}$.", "2+\\frac{1}{x}", [], ["\\frac{2x+1}{x}"]),
        ("Simplify $\\sqrt{\\frac{4}{3}}$.", "\\frac{2}{\\sqrt{3}}", [], ["\\frac{2\\sqrt{3}}{3}"]),
    ],
)  # fmt: skip
def test_expression_of_the_question_rewritten_earns_nothing(question, wanted, rewritten, right):
    rewards = {a: maths.judge(wanted, f"\\boxed{{{a}}}", "hardened", question).reward for a in [*rewritten, *right]}
    assert rewards == {**dict.fromkeys(rewritten, 0.0), **dict.fromkeys(right, 1.0)}
    assert all(maths.judge(wanted, f"\\boxed{{{answer}}}", "published", question).reward for answer in rewritten)


@pytest.mark.parametrize(
    ("wanted", "wrong", "right"),
    [
        ("2\\frac{1}{2}", ["\\frac{21}{2}", "10.5", "21/2"], ["2.5", "\\frac{5}{2}", "2 \\frac12", "2 1/2"]),
        ("3 1/2", ["31/2"], ["3.5", "\\frac72"]),
        ("100, 200", ["100200", "100 200"], ["100,200", "100 , 200"]),
        ("1,600", ["600, 1", "600,1"], ["1600", "1,600"]),
        ("1,234,567", ["1234, 567"], ["1234567", "1{,}234{,}567", "1\\,234\\,567"]),
        ("1 2", ["12"], ["1 2"]),
        ("5 \\text{ m}", ["5 \\text{ cm}", "5 cm", "5 m^2"], ["5", "5 m", "5 \\text{ meters}", "5\\mathrm{m}"]),
        ("25 \\text{ cm}^2", ["25 \\text{ cm}", "25 m^2"], ["25"]),
    ],
)  # fmt: skip
def test_mixed_numbers_lists_and_units_keep_their_meaning(wanted, wrong, right):
    assert [verdict_on(wanted, answer) for answer in wrong] == ["wrong_answer"] * len(wrong)
    assert [verdict_on(wanted, answer) for answer in right] == ["passed"] * len(right)


@pytest.mark.parametrize(
    ("question", "wanted", "copied", "right"),
    [
        ("Factor 12.", "2^2 \\cdot 3", "12", "3 \\cdot 2^2"),
        ("Factor x² − 1", "(x-1)(x+1)", "x^2-1", "(x+1)(x-1)"),
        ("$$\\text{Expand } (x+1)^2$$", "x^2+2x+1", "(x+1)^2", "1+2x+x^2"),
    ],
)
def test_question_in_other_typography_is_copied_text_too(question, wanted, copied, right):
    rewards = [maths.judge(wanted, f"\\boxed{{{a}}}", "hardened", question).reward for a in (copied, right)]
    assert rewards == [0.0, 1.0]


def test_missing_answers_are_rejected_and_no_message_of_a_question_is_dropped(tmp_path):
    rows = tmp_path / "rows.jsonl"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "Given 3."}]
    several = [*chat, {"role": "user", "content": "Double it."}]
    dialogue = [*chat, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Double it."}]
    answers = [(chat, float("nan")), (chat, None), (several, "6"), (dialogue, "6"), (dialogue[:-1], "6")]
    rows.write_text(
        "".join(json.dumps({"source": "a", "prompt": p, "answer": a, "license": "mit"}) + "\n" for p, a in answers)
    )
    items = list(FAMILY.load("s", 0, {"path": str(rows)}))
    assert [item.reason for item in items if isinstance(item, RejectedInput)] == ["unreadable_row"] * 3
    texts = {item.instruction for item in items if isinstance(item, Task)}
    assert texts == {"Given 3.\n\nDouble it.", "user: Given 3.\n\nassistant: Yes?\n\nuser: Double it."}


def test_value_that_the_question_names_may_be_the_answer():
    question = "Is $\\pi/2$ or 0.5 or x^2-12 larger at 3?"
    for wanted, answer in (("\\frac{\\pi}{2}", "\\pi/2"), ("\\frac12", "0.5"), ("(x-1)(x+1)", "x^2-1")):
        assert maths.judge(wanted, f"\\boxed{{{answer}}}", "hardened", question).reward == 1.0


def test_decimal_number_is_right_where_it_is_exact_or_asked_for():
    for question, wanted, answer in (
        ("Compute 1/2+1/4.", "\\frac34", "0.75"),
        ("Compute $\\sqrt{8}$ to six decimal places.", "2\\sqrt{2}", "2.828427"),
        ("Compute $\\sqrt{8}$.", "2.828427", "2.828427"),
        ("How long is it?", "\\frac{5}{2} \\text{ cm}", "2.5"),
        ("How long is it?", "1\\frac{1}{2}", "1.5"),
        ("How likely is it?", "25\\%", "0.25"),
        ("Compute $(\\frac52)^2$.", "(\\frac52)^2", "6.25"),
        ("How long is it?", "\\frac{1}{1024} \\text{ m}", "0.0009765625"),
        ("How long is it?", "\\frac{12345678901002}{10^{14}}", "0.12345678901"),
    ):
        assert maths.judge(wanted, f"\\boxed{{{answer}}}", "hardened", question).reward == 1.0


def test_decimal_number_that_only_comes_near_is_wrong():
    for wanted, answer in (
        ("\\sqrt{6}", "2.44949"), ("\\frac{1}{3} \\text{ m}", "33.3333\\%"), ("10^{-7}", "0.0"),
        ("\\sqrt{2}", "1.4142135623731"),
    ):  # fmt: skip
        result = maths.judge(wanted, f"\\boxed{{{answer}}}")
        assert result.reward == 0.0 and "to a few digits" in result.details["why"], answer


def test_comparison_that_never_ends_is_wrong_and_the_next_one_is_judged():
    result = maths.judge("5", "\\boxed{9^{9^{9^{9}}} \\bmod 7}", "published")
    assert result.reward == 0.0
    assert verdict_on("2\\sqrt{2}", "\\sqrt{8}") == "passed"
    long = maths.judge("5", f"\\boxed{{{'1+' * 3000}1}}")
    assert long.reward == 0.0 and "longer than" in long.details["why"]


def test_comparer_ends_a_comparison_after_its_time():
    comparer = Comparer(seconds=1)
    with pytest.raises(Undecided, match=" 1 s$"):
        comparer.ask("equal", "1", ENDLESS, 6)


ENDLESS = "\\int_0^1 \\sin(x^{x^x}) \\cos(x^{x}) e^{x^{x}} dx"


@contextmanager
def endless_comparison(seconds: int = 60) -> Iterator[tuple[Future[bool], psutil.Process]]:
    """Yield an endless comparison and its process, once it computes."""
    comparer = Comparer(seconds)
    assert comparer.ask("equal", "2\\sqrt{2}", "\\sqrt{8}", 6) and comparer._process
    process = psutil.Process(comparer._process.pid)
    used = process.cpu_times().user
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(comparer.ask, "equal", "1", ENDLESS, 6)
        while process.cpu_times().user == used:
            time.sleep(0.01)
        yield answer, process


def test_comparison_that_waits_for_the_processor_is_not_ended():
    with endless_comparison(seconds=1) as (answer, process):
        process.suspend()
        time.sleep(1.1)
        used = process.cpu_times().user
        process.resume()
        while not answer.done() and process.cpu_times().user < used + 0.5:
            time.sleep(0.01)
        assert not answer.done()
    with pytest.raises(Undecided, match=" 1 s$"):
        answer.result()


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_comparison_that_is_ended_from_outside_is_an_error_and_no_verdict(number):
    """As when a run is stopped, or the machine has no memory left."""
    with endless_comparison() as (answer, process):
        process.send_signal(getattr(signal, number))
    with pytest.raises(RuntimeError, match="math-verify"):
        answer.result()


def test_comparer_that_cannot_run_is_an_error_and_no_verdict(monkeypatch, tmp_path):
    monkeypatch.setattr("etpi_assets.tasks.answers.comparer._PROGRAM", tmp_path / "absent.py")
    with pytest.raises(RuntimeError, match="absent.py .* 2$"):
        Comparer().ask("equal", "1", "2", 6)


def test_grader_of_a_suite_reaches_its_tasks_and_an_unknown_one_is_refused(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"data_source": "a", "prompt": "10 factorial?", "answer": "3628800", "license": "mit"}) + "\n"
    )
    for grader, reward in (("hardened", 0.0), ("published", 1.0)):
        (task,) = FAMILY.load("s", 0, {"path": str(rows), "grader": grader})
        assert isinstance(task, Task)
        assert FAMILY.judge(task, {"agent1": {ANSWER: "\\boxed{10!}"}}, BOX).reward == reward
    with pytest.raises(ValueError, match=r"params\.grader .*hardened, published"):
        list(FAMILY.load("s", 0, {"path": str(rows), "grader": "exact"}))


@pytest.mark.parametrize(
    ("tests", "right", "wrong"),
    [
        (DOUBLE, "print(int(input()) * 2)", "print(4)"),
        ({"fn_name": "f", "inputs": [[2], [5]], "outputs": [4, [10]]}, "def f(n):\n    return n * 2", "def f(n): ..."),
        ({"inputs": ["30000"], "outputs": ["x " * 30000]}, "print('x ' * int(input()))", "print('x ' * 9000)"),
        (CHECK, "class Solution:\n    def double(self, n):\n        return 2 * n", "import sys\nsys.exit(0)"),
    ],
)
def test_a_program_is_judged_by_its_tests(tests, right, wrong):
    rows_read = programs.read_tests(tests)

    def verdict(text: str) -> tuple[str, float]:
        result = programs.judge(rows_read, text, FAMILY.needs(one(row())).limits, BOX)
        if "test" in tests and result.verdict == "failed_tests":
            assert result.details["test"] == 0, "a check is one test"
        return result.verdict, result.reward

    assert verdict(f"First.\n```python\nraise SystemExit\n```\nNow:\n```python\n{right}\n```") == ("passed", 1.0)
    assert verdict(programs.as_answer(wrong)) == ("failed_tests", 0.0)
    assert verdict(right) == ("no_answer", 0.0)
    assert verdict(programs.EMPTY) == ("failed_tests", 0.0)


def row(number: int = 0, source: str = "maths", **changes: Any) -> dict[str, Any]:
    result = {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
        "reward_model": {"ground_truth": str(number + 1)},
        "license": "mit",
        **changes,
    }
    return {key: value for key, value in result.items() if value is not None}


def load(folder: Path, *rows: dict[str, Any], **params: Any) -> list[Task | RejectedInput]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(FAMILY.load("suite", 0, {"path": str(folder / "rows.jsonl"), **params}))


def one(of: dict[str, Any]) -> Task:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        (task,) = load(Path(folder), of)
    assert isinstance(task, Task), task
    return task


def test_seed_samples_per_source_rows_of_each_source(tmp_path):
    rows = [row(n, source) for source, count in (("a", 9), ("b", 30), ("c", 5)) for n in range(count)]
    result = load(tmp_path, *rows, per_source=4, sources=["a", "b"])
    drawn = [task for task in result if isinstance(task, Task)]
    assert len(drawn) == len(result) and [task.repo for task in drawn] == ["a", "b"] * 4
    assert load(tmp_path, *rows, per_source=4, sources=["a", "b"]) == drawn
    other = FAMILY.load("suite", 1, {"path": str(tmp_path / "rows.jsonl"), "per_source": 4, "sources": ["a", "b"]})
    assert {t.task_id for t in other if isinstance(t, Task)} != {t.task_id for t in drawn}
    # More rows of one source change nothing of the others.
    grown = load(tmp_path, *rows, *(row(n, "b") for n in range(30, 40)), per_source=4, sources=["a", "b"])
    of_a = [[t.task_id for t in tasks if isinstance(t, Task) and t.repo == "a"] for tasks in (drawn, grown)]
    assert of_a[0] == of_a[1]
    with pytest.raises(ValueError, match=r"5 .*\bc\b.*per_source = 6"):
        load(tmp_path, *rows, per_source=6)


def test_source_that_lacks_a_few_rejected_rows_gives_the_rest(tmp_path):
    rows = [row(n, source) for source in ("a", "b") for n in range(40)]
    result = load(tmp_path, *rows[1:], per_source=40, sources=["a", "b"])
    assert Counter(task.repo for task in result) == {"a": 39, "b": 40}


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"problem": "How many?", "answer": "Two and <<1+1=2>>2.\n#### 1,002"}, "1,002"),
        ({"question": "How many?", "expected_answer": "\\(\\frac{1}{2}\\)"}, "\\(\\frac{1}{2}\\)"),
        ({"question": "How many?", "final_answer": "[1, 2]"}, "[1, 2]"),
        ({"prompt": [{"role": "user", "content": "How many?"}], "reward_spec": {"ground_truth": "7"}}, "7"),
        ({"prompt": "How many?", "reward_model": {"ground_truth": '["\\\\frac{1}{2}"]'}}, "\\frac{1}{2}"),
        ({"prompt": "How many?", "reward_model": {"ground_truth": ["7"]}}, "7"),
        ({"prompt": "How many?", "answer": "{1, 2}"}, "{1, 2}"),
        ({"question": "How many? A) 1 B) 2", "answer": "B", "choices": ["1", "2"], "context": None, "images": []}, "B"),
    ],
)
def test_row_of_a_public_data_set_is_read(tmp_path, fields, answer):
    (task,) = load(tmp_path, {"license": "mit", **fields})
    assert isinstance(task, Task), task
    assert task.instruction.startswith("How many?") and task.payload["answer"].strip() == answer
    assert task.repo == "rows"
    assert maths.judge(task.payload["answer"], f"\\boxed{{{answer}}}").reward == 1.0


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"choices": ["cats", "dogs"]}, "choices"), ({"options": {"A": "1"}}, "options"),
        ({"options": "A) 1"}, "options"), ({"body": "There are 2 cats."}, "body"),
        ({"images": [{"bytes": "x"}]}, "images"),
        ({"answer": None, "reward_model": {"ground_truth": ["1", "2"]}}, "2 expected answers"),
    ],
)  # fmt: skip
def test_row_that_lacks_a_part_of_its_question_or_one_answer_is_refused(tmp_path, fields, names):
    (refused,) = load(tmp_path, {"license": "mit", "question": "How many?", "answer": "2", **fields})
    assert isinstance(refused, RejectedInput) and refused.detail.startswith(names)


def test_every_row_is_a_task_with_source_and_licence_or_is_refused_by_place(tmp_path):
    rows = [
        row(0), row(1, license=None), row(2, "known", license=None), row(0), row(3, reward_model=None),
        row(4, reward_model={"ground_truth": json.dumps(DOUBLE)}, extra_info={"solution": "print(2 * int(input()))"}),
        row(5, reward_model={"ground_truth": {"inputs": ["1"], "outputs": []}}), row(6, data_source=None),
    ]  # fmt: skip
    result = load(tmp_path, *rows, licenses={"known": "apache-2.0"})
    tasks = [item for item in result if isinstance(item, Task)]
    assert {(t.payload["source"], t.payload["license"], t.payload["kind"]) for t in tasks} == {
        ("maths", "mit", "answer"), ("known", "apache-2.0", "answer"), ("maths", "mit", "program"),
        ("rows", "mit", "answer"),
    }  # fmt: skip
    refused = {item.source: item.reason for item in result if isinstance(item, RejectedInput)}
    assert refused == {
        "rows.jsonl:2": "no_licence", "rows.jsonl:4": "repeated_task", "rows.jsonl:5": "unreadable_row",
        "rows.jsonl:7": "unreadable_row",
    }  # fmt: skip
    assert len(result) == len(rows)


def test_tasks_are_proven_by_their_references(tmp_path):
    truth = {"ground_truth": json.dumps(DOUBLE)}
    given = {"inputs": ["1"], "outputs": [""]}
    rows = [
        row(0),
        row(1, reward_model=truth, solution="print(2 * int(input()))"),
        row(2, reward_model=truth, solution="print(3)"),
        row(3, reward_model=truth),
        row(4, reward_model={"ground_truth": given}, solution="pass"),
    ]
    loaded = [item for item in load(tmp_path, *rows) if isinstance(item, Task)]
    wanted = {"What is 2 + 1?": "reference_fails", "What is 3 + 1?": "no_reference", "What is 4 + 1?": "null_passes"}
    for task, outcome in zip(loaded, FAMILY.validate(loaded, BOX), strict=True):
        reason = outcome.reason if isinstance(outcome, RejectedInput) else None
        assert reason == wanted.get(task.instruction), (task.instruction, outcome)
    # Where nothing proves a program, the spec may say that it is taken all the same.
    taken = [item for item in load(tmp_path, rows[3], unproven=True) if isinstance(item, Task)]
    assert list(FAMILY.validate(taken, BOX)) == taken


def test_only_the_agents_last_turn_is_its_answer():
    task = one(row(6))
    assert FAMILY.judge(task, {"agent1": {ANSWER: "\\boxed{7}"}}, BOX).reward == 1.0
    assert FAMILY.judge(task, {"agent1": {"other.md": "\\boxed{7}"}}, BOX).verdict == "no_answer"


def test_the_embedded_questions_are_proven_and_their_answers_spread():
    family = load_family("arithmetic_tiny")
    result = [task for task in family.load("s", 0, {"train": 60, "heldout": 20}) if isinstance(task, Task)]
    assert list(family.validate(result, BOX)) == result
    assert len({task.instruction for task in result}) == 80
    assert max(Counter(task.payload["answer"] for task in result).values()) < 20
    for task in result:
        product, plus, addend = task.payload["expression"].partition(" + ")
        for answer in (f"({addend.partition(')')[0]} + {product.strip('(')}) % 10", f"{task.payload['answer']}.0"):
            reward = family.judge(task, {"agent1": {ANSWER: f"\\boxed{{{answer}}}"}}, BOX).reward
            assert plus and reward == float(answer.endswith(".0")), (task.instruction, answer)
    wrong = Task(**{**vars(result[0]), "payload": {**result[0].payload, "answer": "x"}})
    assert isinstance(next(iter(family.validate([wrong], BOX))), RejectedInput)


@pytest.mark.parametrize("part", ["$", "$$", "\\(", "\\[", "$a", "\\(a", "?"])
def test_question_of_megabytes_is_read(part):
    assert maths.expressions_of(part * 300_000) == []
    assert maths.expressions_of(f"$1+2$ and {part * 10_000}")[:1] == ["1+2"]
