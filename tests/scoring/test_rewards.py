"""Reward functions: what right, wrong and degenerate answers score, hardened and as their source words them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etpi_assets.agent.contract import Contract, format_contract, read_contract
from etpi_assets.scoring.advantage import constant_share, group_advantages
from etpi_assets.scoring.rewards import functions, terminal, tools, unhardened
from etpi_assets.scoring.rewards.attempt import Attempt, BadReward
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.training import RewardTerm
from etpi_assets.versioning.keys import definition_version

REQUEST = "Count the lines of a.txt, then search it and pack it."
GOOD = format_contract("I count and search.", "wc -l a.txt && grep x a.txt | tar -cf b.tar a.txt")


def attempt(text: str | None = GOOD, request: str | None = REQUEST, **known) -> Attempt:
    return Attempt("r1", "t1", request, text, **known)


def scores(text: str) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """(form, relevance, conciseness), hardened and unhardened."""
    found = [
        tuple(f(attempt(text)) for f in (module.form, module.relevance, module.conciseness))
        for module in (terminal, unhardened)
    ]
    return found[0], found[1]  # pyright: ignore[reportReturnType]


# --- terminal --------------------------------------------------------------------------------------------------------


def test_a_good_answer_scores_the_same_under_both_readings():
    assert scores(GOOD) == ((1.0, 3.0, 1.0), (1.0, 3.0, 1.0))


COMMAND = "```bash\nwc -l a.txt\n```"
HACKS = {
    "repeated thinking": (f"<thinking>a</thinking><thinking>b</thinking>\n{COMMAND}", (0, 0, 0), (1, 1, 1)),
    "tags inside tags": (f"<thinking><thinking>a</thinking>\n{COMMAND}", (0, 0, 0), (1, 1, 1)),
    "empty thinking": (f"<thinking></thinking>\n{COMMAND}", (0, 0, 0), (0, 1, 1)),
    "blank thinking": (f"<thinking>  </thinking>\n{COMMAND}", (0, 0, 0), (1, 1, 1)),
    "blank command": ("<thinking>wc</thinking>\n```bash\n \n```", (0, 0, 0), (1, 1, 1)),
    "two blocks": (f"<thinking>a</thinking>\n{COMMAND}\n{COMMAND}", (0, 0, 0), (1, 1, 1)),
    "words after the block": (f"<thinking>a</thinking>\n{COMMAND}\nDone.", (0, 0, 0), (0, 1, 1)),
    "newline after the block": (f"<thinking>a</thinking>\n{COMMAND}\n", (0, 0, 0), (1, 1, 1)),
    "words before": (f"Sure: <thinking>a</thinking>\n{COMMAND}", (0, 0, 0), (0, 1, 1)),
    "nothing at all": ("", (0, 0, 0), (0, 0, 1)),
    "verbs in a comment": (format_contract("a", "# wc grep tar\nls"), (1, 0, 1), (1, 3, 1)),
    "verbs in echo": (format_contract("a", "echo wc grep tar"), (1, 0, 1), (1, 3, 1)),
    "verbs in quotes": (format_contract("a", "echo 'wc | grep; tar'"), (1, 0, 1), (1, 3, 1)),
    "verbs in a heredoc": (format_contract("a", "cat <<EOF\nwc\ngrep\ntar\nEOF"), (1, 0, 1), (1, 3, 1)),
    "verbs in the thinking alone": (format_contract("wc grep tar", "ls"), (1, 0, 1), (1, 3, 1)),
    "one verb many times": (format_contract("a", "wc; wc; wc; wc"), (1, 1, 1), (1, 1, 1)),
    "verbs nobody asked for": (format_contract("a", "docker ps; find ."), (1, 0, 1), (1, 0, 1)),
    # What no text can tell: the verb runs, to no effect. Only the outcome sees it.
    "a verb that does nothing": (format_contract("a", "wc --help"), (1, 1, 1), (1, 1, 1)),
}


@pytest.mark.parametrize("name", HACKS)
def test_what_degenerate_answers_score(name):
    text, hardened, faithful = HACKS[name]
    assert scores(text) == (hardened, faithful)


@pytest.mark.parametrize(
    ("command", "verbs"),
    [
        ("wc -l < a > b", ["wc"]),
        ("sudo /usr/bin/find . | xargs wc", ["find", "xargs"]),
        ("LANG=C sort a; (grep x b)", ["sort", "grep"]),
        ("if grep x a; then wc a; fi", ["grep", "wc", "fi"]),
        ("cat a |\ngrep b # tar", ["cat", "grep"]),
        ("", []),
    ],
)
def test_verbs_are_read_in_command_position(command, verbs):
    assert terminal.run_verbs(command) == verbs


def test_keywords_are_whole_words_of_the_request_and_spec_data():
    keywords = {"wc": ["count"], "head": ["first lines"]}
    assert terminal.asked_verbs("COUNT the First Lines", keywords) == {"wc", "head"}
    assert terminal.asked_verbs("An account of the first-born", keywords) == set()
    assert terminal.relevance(attempt(format_contract("a", "head a"), "the first lines"), keywords=keywords) == 1.0


def test_conciseness_falls_from_300_to_600_characters():
    for length, value in ((300, 1.0), (450, 0.5), (600, 0.0), (900, 0.0)):
        text = format_contract("x" * (length - len(format_contract("", "ls"))), "ls")
        assert len(text) == length and terminal.conciseness(attempt(text)) == pytest.approx(value)


@given(st.text(alphabet="<>/`\nbashthinkg ", max_size=120))
def test_the_contract_is_read_or_refused_and_never_more_lenient_than_its_pattern(text):
    read = read_contract(text)
    if isinstance(read, Contract):
        assert unhardened.PATTERN.fullmatch(text) and format_contract(read.thinking, read.command).strip()
    else:
        assert read


@given(st.text(max_size=60), st.text(max_size=60))
def test_what_is_formatted_is_read_back(thinking, command):
    clean = not any(mark in thinking + command for mark in ("<thinking>", "</thinking>", "```"))
    if clean and thinking.strip() and command.strip():
        assert read_contract(format_contract(thinking, command)) == Contract(thinking, command)


# --- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("calls", "value"), [(0, -1.0), (1, -0.9), (4, -0.6), (9, -0.6)])
def test_a_wrong_attempt_loses_less_the_more_it_called_tools(calls, value):
    wrong = attempt(turns=calls + 1, tool_turns=calls, outcome=0.0)
    assert tools.tool_call_reward(wrong) == pytest.approx(value)
    assert tools.tool_call_reward(replace(wrong, outcome=1.0)) == 1.0
    assert (tools.outcome(wrong), tools.outcome(replace(wrong, outcome=1.0))) == (-1.0, 1.0)


def test_calls_to_no_effect_earn_what_any_call_earns_and_nothing_on_a_right_answer():
    """The hack that TCR invites, stated: ten empty calls lift a wrong attempt from -1 to -0.6, no further."""
    idle = attempt(turns=11, tool_turns=10, outcome=0.0)
    assert tools.tool_call_reward(idle) == -0.6
    assert tools.tool_call_reward(replace(idle, outcome=1.0)) == 1.0


@pytest.mark.parametrize(("tokens", "value"), [(0, 0.0), (7480, 0.0), (8980, -0.5), (10480, -1.0), (13480, -2.0)])
def test_the_overlong_penalty_is_linear_and_unclamped(tokens, value):
    assert tools.overlong(attempt(response_tokens=tokens)) == pytest.approx(value)


def test_no_answer_is_worth_its_own_length_and_what_was_read_counts_too():
    """Padding a wrong attempt with idle calls lifts the tool-call reward by 0.4 at most; the length takes it back."""
    idle = attempt(turns=11, tool_turns=10, outcome=0.0, response_tokens=7480 + 1200)
    assert tools.tool_call_reward(idle) + tools.overlong(idle) == pytest.approx(-1.0)
    right = attempt(turns=1, tool_turns=0, outcome=1.0, response_tokens=13480)
    assert tools.tool_call_reward(right) + tools.overlong(right) == pytest.approx(-1.0)
    assert tools.overlong(attempt(text="", response_tokens=8980)) == -0.5, "ids that only observations wrote are length"


# --- the registry ----------------------------------------------------------------------------------------------------


def test_an_input_that_never_arrived_names_the_row_instead_of_scoring_zero():
    missing = {
        "format": attempt(text=None),
        "relevance": attempt(request=None),
        "outcome": attempt(),
        "tool_call_reward": attempt(outcome=0.0),
        "overlong": attempt(),
    }
    for name, what in missing.items():
        with pytest.raises(BadReward, match="r1 of task t1"):
            functions.score_attempt(what, [RewardTerm(function=name)])


def test_a_reward_that_is_no_number_names_row_and_function(monkeypatch):
    monkeypatch.setitem(functions.FUNCTIONS, "broken", lambda attempt: math.nan)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadReward, match="r1 of task t1: the reward 'broken' is nan"):
        functions.score_attempt(attempt(), [RewardTerm(function="broken")])


def test_terms_are_checked_by_name_and_parameter():
    functions.check_terms([RewardTerm(function="conciseness", params={"free": 200})])
    with pytest.raises(SpecError, match="'formt'.*'format'"):
        functions.check_terms([RewardTerm(function="formt")])
    with pytest.raises(SpecError, match="conciseness has no parameter fre"):
        functions.check_terms([RewardTerm(function="conciseness", params={"fre": 1})])


def test_scores_carry_weight_and_version_and_versions_follow_the_code(monkeypatch):
    [score] = functions.score_attempt(attempt(), [RewardTerm(function="relevance", weight=0.5)])
    assert (score.value, score.weighted, score.weight) == (3.0, 1.5, 0.5)
    before = score.version
    assert before == functions.version_of("relevance") != functions.version_of("relevance_unhardened")
    assert before == definition_version("etpi_assets.scoring.rewards.terminal:relevance")[:12]
    monkeypatch.setitem(functions.FUNCTIONS, "relevance", lambda attempt: 0.25)
    functions.version_of.cache_clear()
    try:
        assert functions.version_of("relevance") not in (before, "")
    finally:
        functions.version_of.cache_clear()


# --- advantages ------------------------------------------------------------------------------------------------------


def test_advantages_are_the_group_s_standard_scores():
    found = group_advantages([1, 2, 3, 4, 0, 0, 0, 8], 4, eps=1e-8, ddof=1)
    assert found[:4] == pytest.approx([-1.1619, -0.3873, 0.3873, 1.1619], abs=1e-4)
    assert found[4:] == pytest.approx([-0.5, -0.5, -0.5, 1.5])
    assert group_advantages([0, 2], 2, eps=1.0, ddof=0) == pytest.approx([-0.5, 0.5])
    assert group_advantages([0, 2], 2, eps=1e-8, ddof=1, scale=False) == [-1.0, 1.0]


@given(st.floats(-1e3, 1e3), st.integers(2, 9), st.floats(1e-12, 1e-2))
def test_a_constant_group_teaches_exactly_nothing(value, size, eps):
    assert group_advantages([value] * size, size, eps=eps, ddof=1) == [0.0] * size
    assert constant_share([value] * size + [value] * (size - 1) + [value + 1], size) == 0.5


def test_rewards_that_are_no_numbers_or_no_whole_groups_are_refused():
    with pytest.raises(ValueError, match="reward 1 of 2 is nan"):
        group_advantages([0.0, math.nan], 2, eps=1e-8, ddof=1)
    with pytest.raises(ValueError, match="groups of 2"):
        group_advantages([0.0, 1.0, 2.0], 2, eps=1e-8, ddof=1)
