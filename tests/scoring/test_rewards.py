"""Reward functions: scores of right, wrong and degenerate answers, hardened and unhardened."""

from __future__ import annotations

import math
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etpi_assets.agent.contract import Contract, format_contract, read_contract
from etpi_assets.planning import versions
from etpi_assets.scoring.advantage import group_advantages
from etpi_assets.scoring.rewards import functions, terminal
from etpi_assets.scoring.rewards.attempt import Attempt, BadReward
from etpi_assets.specs.load import SpecError, load_specs
from etpi_assets.specs.training import RewardTerm
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Task

REQUEST = "Count the lines of a.txt, then search it and pack it."
GOOD = format_contract("I count and search.", "wc -l a.txt && grep x a.txt | tar -cf b.tar a.txt")


def attempt(text: str | None = GOOD, request: str | None = REQUEST, **known) -> Attempt:
    return Attempt("r1", "t1", request, text, **known)


def scores(text: str) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Return (form, relevance, conciseness), hardened and unhardened."""
    names = ("format", "relevance", "conciseness")
    scores = [
        tuple(functions.FUNCTIONS[f"{name}{end}"](attempt(text)) for name in names) for end in ("", "_unhardened")
    ]
    return scores[0], scores[1]  # pyright: ignore[reportReturnType]


# --- terminal --------------------------------------------------------------------------------------------------------


def test_good_answer_scores_the_same_hardened_and_unhardened():
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
    "verbs in a comment": (format_contract("a", "# wc grep tar\nls"), (0, 0, 0), (1, 3, 1)),
    "verbs in echo": (format_contract("a", "echo wc grep tar"), (0, 0, 0), (1, 3, 1)),
    "verbs in quotes": (format_contract("a", "echo 'wc | grep; tar'"), (0, 0, 0), (1, 3, 1)),
    "verbs in a heredoc": (format_contract("a", "cat <<EOF\nwc\ngrep\ntar\nEOF"), (0, 0, 0), (1, 3, 1)),
    "verbs in the thinking alone": (format_contract("wc grep tar", "ls"), (0, 0, 0), (1, 3, 1)),
    "one verb many times": (format_contract("a", "wc a.txt; wc a.txt; wc a.txt"), (1, 1, 1), (1, 1, 1)),
    "verbs that were not requested": (format_contract("a", "docker ps; find ."), (0, 0, 0), (1, 0, 1)),
    # The verb runs without effect. Text cannot show it; only the outcome does.
    "a verb that does nothing": (format_contract("a", "wc --help a.txt"), (1, 1, 1), (1, 1, 1)),
    "verbs without an argument": (format_contract("a", "wc; grep; tar"), (0, 0, 0), (1, 3, 1)),
    "verbs with a common word": (format_contract("a", "wc the lines; grep 3 of; tar it"), (0, 0, 0), (1, 3, 1)),
    "verbs after the end": (format_contract("a", "exit; wc a.txt; grep x a.txt"), (0, 0, 0), (1, 2, 1)),
    "verbs after a failure": (format_contract("a", "false && wc a.txt && grep x a.txt"), (0, 0, 0), (1, 2, 1)),
    "verbs in place of a success": (format_contract("a", "true || wc a.txt"), (0, 0, 0), (1, 1, 1)),
    "verbs in a function": (format_contract("a", "f() { wc a.txt; }"), (0, 0, 0), (1, 1, 1)),
    "verbs in a branch": (format_contract("a", "if [ 1 = 2 ]; then wc a.txt; fi"), (0, 0, 0), (1, 1, 1)),
}


@pytest.mark.parametrize("name", HACKS)
def test_scores_of_degenerate_answers(name):
    text, hardened, faithful = HACKS[name]
    assert scores(text) == (hardened, faithful)


@pytest.mark.parametrize(
    ("command", "verbs"),
    [
        ("wc -l < a > b", ["wc"]),
        ("sudo /usr/bin/find . | xargs wc", ["find", "xargs"]),
        ("LANG=C sort a; (grep x b)", ["sort", "grep"]),
        ("if grep x a; then wc a; else tar a; fi", ["grep", "wc"]),
        ("for i in a b; do wc $i; done; find a", ["wc", "find"]),
        ("for i in; do wc $i; done; until find; do wc; done", []),
        ("cd x && ! false && { wc a; }", ["cd", "false", "wc"]),
        ("set -e; false; wc a", ["set", "false"]),
        ("[ 1 = 2 ] && wc a; exec find a; grep x a", ["[", "find"]),
        ("false && grep x > b | wc a", ["false"]),
        ("true && grep x > b | wc a", ["true", "grep", "wc"]),
        ("wc(){ true; }; wc a", []),
        ("cat a |\ngrep b # tar", ["cat", "grep"]),
        ("", []),
    ],
)
def test_only_verbs_in_command_position_count(command, verbs):
    assert terminal.run_verbs(command) == verbs


RUNS_NOTHING = (
    "set -o errexit; false", "set -n", "set -o noexec", "eval 'exit 0'", "e=exit; $e", "$(echo exit)",
    "trap exit DEBUG", "source /dev/stdin <<< exit", ". /dev/fd/0 <<< exit", "PATH=", "export PATH=/nowhere",
    "unset PATH", "kill $$",
    "hash -p /bin/true wc", "set -u; $nosuch", "echo ${nosuch:?}", ": ${nosuch?x}", "while true; do break",
    "for i in a; do continue", "wc() { :; }", "exec true", "if true; then :; else", "if", "(", "fi",
    "f() { exit; }; f", "{ false; } &&", "for i in a; do false; done &&", "set -u; echo $nosuch", "set -eu; cd $nosuch",
    "set -o pipefail; false | true &&", "sh -c 'kill -9 $PPID'", "timeout 1 kill $$", "echo $(kill -9 $$)", "x=(a",
    'declare "PA""TH=/n"', "p=PA; printf -v ${p}TH /n", "for PATH in /n; do :; done", "UID=5", "readonly x=1; x=2",
    "mapfile -C exit -c 1 x <<< a", "echo ${}", "echo ${a b}", ": ${!nosuch}", "echo $((1/0))", "echo $[1+]",
    "for i in b; do for j in a; do break 2; done", "for i in a; do { break; }", "for i in $nosuch; do", "[[ a",
    "for i in $(true); do", "for 1x in a; do", "for x y in a; do", "((", "&&", "|", "; ;", "echo >", "echo '",
    "if true; then fi",
)  # fmt: skip


@pytest.mark.parametrize("start", RUNS_NOTHING)
def test_verb_that_bash_does_not_run_does_not_count(start, tmp_path):
    (tmp_path / "wc").write_text(f"#!/bin/sh\necho > {tmp_path}/ran\n")
    (tmp_path / "wc").chmod(0o755)
    (tmp_path / "work").mkdir()
    close = (
        "; done"
        if " do " in start and "done" not in start or start.endswith("do")
        else "; fi"
        if "else" in start
        else ""
    )
    command = f"{start} wc a.txt" if start in ("if", "(") else f"wc a.txt; {start}" if start == "fi" else ""
    joined = start.endswith(("else", "do", "&&", "|"))
    command = command or f"{start.removesuffix(';')}{'' if joined else ';'} wc a.txt{close}"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(
        ["bash", "-c", command], cwd=tmp_path / "work", env=environment, capture_output=True, check=False, timeout=9
    )
    assert not (tmp_path / "ran").exists(), command
    assert "wc" not in terminal.run_verbs(command)


USUAL = (
    "set -eo pipefail", "set -u", "export LANG=C", "x=$(date)", "echo {a,b} $HOME ${x%.txt}", "! [ -e b ]",
    "for f in *.txt; do grep x $f; done", "while read f; do grep x $f; done < a", "if [ -e a ]; then ls; fi",
    "cat <<'E' > b\nit's; && x\nE", "ls | sort \\\n  > b # it's", "ls &&\n grep x b", "sort a & wait",
    "(cd b; ls)", "case $x in\n a) ls;;\n *) cat;;\nesac", "find . \\( -name a \\)", "grep '(a|b)$' x; echo $?",
)  # fmt: skip


@pytest.mark.parametrize("start", USUAL)
def test_verb_after_usual_commands_counts(start):
    assert "wc" in terminal.run_verbs(f"{start}\nwc a.txt")


def test_keywords_match_whole_words_and_can_be_set_by_the_spec():
    keywords = {"wc": ["count"], "head": ["first lines"]}
    assert terminal.requested_verbs("COUNT the First Lines", keywords) == {"wc", "head"}
    assert terminal.requested_verbs("An account of the first-born", keywords) == set()
    assert terminal.relevance(attempt(format_contract("a", "head a"), "the first lines"), keywords=keywords) == 1.0


def shipped_tasks() -> Iterator[tuple[str, Task, Sequence[RewardTerm]]]:
    """Tasks and reward terms of the shipped experiments with terminal rewards, each with the experiment's name."""
    specs = load_specs()
    for name in ("terminal_grpo_tiny", "terminal_grpo_0_8b"):
        section = specs.experiments[name].rl
        assert section is not None
        suite = specs.suites[str(section.suite)]
        hardened = {term.function: term.function.removesuffix("_unhardened") for term in section.rewards}
        terms = [term.model_copy(update={"function": hardened[term.function]}) for term in section.rewards]
        tasks = load_family(suite.family).load(str(section.suite), 0, {**suite.params, "train": 100, "heldout": 0})
        yield from ((name, task, terms) for task in tasks if isinstance(task, Task))


def words_of(request: str) -> str:
    """Return the words of a request that may be its arguments: all but the short ones, which name no file."""
    return " ".join(word.strip(".,") for word in request.split() if len(word) > 3 and word.islower())


VERBS = ("docker", "find", "grep", "tar", "wc")
CONSTANT = (
    "ls",
    "docker;find;grep;tar;wc",
    "docker; find; grep; tar; wc; sort; head; tail; cp; rm",
    "exit; docker x; find x; grep x; tar x; wc x",
    "false && docker && find && grep && tar && wc",
    "wc the lines; find every file; grep for; tar archive; docker containers; head -n 3",
    "ls sort copy remove search find count put archive lines",
    "for f in *; do wc -l $f; grep a $f; sort $f; head $f; done; find . -type f; rm *",
)
WITH_ARGUMENTS = {
    "every verb": lambda words: "; ".join(f"{verb} {words}" for verb in VERBS),
    "a pipe of every verb": lambda words: " | ".join(f"{verb} {words}" for verb in VERBS),
    "every verb of both suites": lambda words: "; ".join(f"{v} {words}" for v in (*VERBS, "sort", "head", "cp", "rm")),
    "another program": lambda words: f"ls {words}",
    "one verb": lambda words: f"find {words}",
    "two verbs": lambda words: f"find {words} | grep x",
    "verbs in a loop": lambda words: f"for verb in {' '.join(VERBS)}; do $verb {words}; done",
    "the request itself": lambda words: words,
}


@pytest.mark.parametrize("case", ["", "I do not know.", *CONSTANT, *WITH_ARGUMENTS])
def test_degenerate_text_earns_at_most_half_of_the_honest_reward(case):
    totals: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for experiment, task, terms in shipped_tasks():
        command = WITH_ARGUMENTS[case](words_of(task.instruction)) if case in WITH_ARGUMENTS else case
        degenerate = format_contract("I run it.", command) if case in (*CONSTANT, *WITH_ARGUMENTS) else case
        for name, text in (
            ("honest", format_contract("I run it.", task.payload["command"])),
            ("degenerate", degenerate),
        ):
            for score in functions.score_attempt(attempt(text, task.instruction, outcome=0.0), terms):
                totals[experiment, score.function][name] += score.value
    assert {function for _, function in totals} == {"format", "relevance", "conciseness"}
    assert all(total["degenerate"] <= total["honest"] / 2 for total in totals.values()), totals


@pytest.mark.parametrize("start", ["exit", "builtin exit", "eval exit", "set -n", "command exit", "false &&"])
def test_honest_command_that_does_not_run_earns_at_most_half(start):
    command = "wc -l harbor.txt"
    texts = {start: f"{start} {command}" if start.endswith("&&") else f"{start}; {command}", "honest": command}
    request = "Count the lines of harbor.txt."
    for function in (terminal.form, terminal.relevance, terminal.conciseness):
        earned = {name: function(attempt(format_contract("I run it.", text), request)) for name, text in texts.items()}
        assert earned[start] == 0 < earned["honest"]


def test_pipeline_of_a_requested_verb_and_another_is_in_form():
    request = "How many files has harbor?"
    for command, relevance in (("find harbor -type f | wc -l", 0.5), ("find harbor; grep harbor; wc harbor", 1 / 3)):
        text = attempt(format_contract("I count.", command), request)
        assert terminal.relevance(text) == relevance
        assert terminal.form(text) == terminal.conciseness(text) == float(relevance == 0.5)


DEGENERATE = {
    "silence": attempt("", turns=1, tool_turns=0, response_tokens=0, outcome=0.0),
    "idle calls": attempt("x", turns=40, tool_turns=39, response_tokens=4000, outcome=0.0),
    "endless text": attempt("x" * 99999, turns=1, tool_turns=0, response_tokens=99999, outcome=0.0),
}
HONEST = attempt(GOOD, turns=3, tool_turns=2, response_tokens=900, outcome=1.0)


@pytest.mark.parametrize("name", [name for name in functions.FUNCTIONS if not name.endswith("_unhardened")])
def test_degenerate_attempt_earns_at_most_half_of_an_honest_one(name):
    function = functions.function_named(name)
    for case, degenerate in DEGENERATE.items():
        assert function(degenerate) <= function(HONEST) / 2, case


def test_conciseness_falls_from_300_to_600_characters():
    for length, value in ((300, 1.0), (450, 0.5), (600, 0.0), (900, 0.0)):
        text = format_contract("x" * (length - len(format_contract("", "wc a.txt"))), "wc a.txt")
        assert len(text) == length and terminal.conciseness(attempt(text)) == pytest.approx(value)


@given(st.text(alphabet="<>/`\nbashthinkg ", max_size=120))
def test_contract_is_never_more_lenient_than_its_pattern(text):
    loaded = read_contract(text)
    if isinstance(loaded, Contract):
        assert terminal.form_unhardened(attempt(text)) and format_contract(loaded.thinking, loaded.command).strip()
    else:
        assert loaded


@given(st.text(max_size=60), st.text(max_size=60))
def test_formatted_contract_is_read_back(thinking, command):
    clean = not any(mark in thinking + command for mark in ("<thinking>", "</thinking>", "```"))
    if clean and thinking.strip() and command.strip():
        assert read_contract(format_contract(thinking, command)) == Contract(thinking, command)


# --- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("calls", "value"), [(0, -1.0), (1, -0.9), (4, -0.6), (9, -0.6)])
def test_wrong_attempt_loses_less_the_more_tools_it_called(calls, value):
    wrong = attempt(turns=calls + 1, tool_turns=calls, outcome=0.0)
    assert functions.tool_call_reward(wrong) == pytest.approx(value)
    assert functions.tool_call_reward(replace(wrong, outcome=1.0)) == 1.0
    assert (functions.outcome(wrong), functions.outcome(replace(wrong, outcome=1.0))) == (-1.0, 1.0)


def test_calls_without_effect_earn_as_much_as_others_and_nothing_if_solved():
    """The known hack of TCR: ten empty calls lift a wrong attempt from -1 to -0.6, no further."""
    idle = attempt(turns=11, tool_turns=10, outcome=0.0)
    assert functions.tool_call_reward(idle) == -0.6
    assert functions.tool_call_reward(replace(idle, outcome=1.0)) == 1.0


@pytest.mark.parametrize(("tokens", "value"), [(0, 0.0), (7480, 0.0), (8980, -0.5), (10480, -1.0), (13480, -2.0)])
def test_overlong_penalty_is_linear_and_has_no_lower_bound(tokens, value):
    assert functions.overlong(attempt(response_tokens=tokens)) == pytest.approx(value)


def test_overlong_penalty_outweighs_idle_calls_and_counts_observations():
    """Padding a wrong attempt with idle calls lifts the tool-call reward by 0.4 at most; the length takes it back."""
    idle = attempt(turns=11, tool_turns=10, outcome=0.0, response_tokens=7480 + 1200)
    assert functions.tool_call_reward(idle) + functions.overlong(idle) == pytest.approx(-1.0)
    right = attempt(turns=1, tool_turns=0, outcome=1.0, response_tokens=13480)
    assert functions.tool_call_reward(right) + functions.overlong(right) == pytest.approx(-1.0)
    assert functions.overlong(attempt(text="", response_tokens=8980)) == -0.5, (
        "ids that only observations wrote are length"
    )


# --- the registry ----------------------------------------------------------------------------------------------------


def test_missing_input_raises_with_the_row_instead_of_scoring_zero():
    missing = {
        "format": attempt(text=None),
        "relevance": attempt(request=None),
        "outcome": attempt(),
        "tool_call_reward": attempt(outcome=0.0),
        "overlong": attempt(),
    }
    for name, incomplete in missing.items():
        with pytest.raises(BadReward, match="r1 of task t1"):
            functions.score_attempt(incomplete, [RewardTerm(function=name)])


def test_reward_that_is_not_finite_raises_with_row_and_function(monkeypatch):
    monkeypatch.setitem(functions.FUNCTIONS, "broken", lambda attempt: math.nan)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadReward, match="r1 of task t1.*'broken'.*nan"):
        functions.score_attempt(attempt(), [RewardTerm(function="broken")])


def test_unknown_reward_names_and_parameters_are_rejected():
    functions.check_terms([RewardTerm(function="conciseness", params={"free": 200})])
    alike = [RewardTerm(function=name, params={"keywords": {"sort": ["sort"]}}) for name in ("format", "relevance")]
    functions.check_terms(alike)
    with pytest.raises(SpecError, match=r"relevance .*conciseness .*params\.keywords"):
        functions.check_terms([*alike, RewardTerm(function="conciseness")])
    with pytest.raises(SpecError, match="'formt'.*'format'"):
        functions.check_terms([RewardTerm(function="formt")])
    with pytest.raises(SpecError, match="conciseness.*fre"):
        functions.check_terms([RewardTerm(function="conciseness", params={"fre": 1})])


def test_scores_have_weight_and_a_version_that_follows_the_code(monkeypatch):
    [score] = functions.score_attempt(attempt(), [RewardTerm(function="relevance", weight=0.5)])
    assert (score.value, score.weighted, score.weight) == (3.0, 1.5, 0.5)
    assert score.version == "2"
    monkeypatch.setitem(versions.COMPONENTS, "rewards", {1: "x", 2: "y", 3: "z"})
    functions.version_of.cache_clear()
    try:
        assert functions.version_of("relevance") == "3"
    finally:
        functions.version_of.cache_clear()


# --- advantages ------------------------------------------------------------------------------------------------------


def test_advantages_are_standard_scores_of_the_group():
    advantages = group_advantages([1, 2, 3, 4, 0, 0, 0, 8], 4, eps=1e-8, ddof=1)
    assert advantages[:4] == pytest.approx([-1.1619, -0.3873, 0.3873, 1.1619], abs=1e-4)
    assert advantages[4:] == pytest.approx([-0.5, -0.5, -0.5, 1.5])
    assert group_advantages([0, 2], 2, eps=1.0, ddof=0) == pytest.approx([-0.5, 0.5])
    assert group_advantages([0, 2], 2, eps=1e-8, ddof=1, scale=False) == [-1.0, 1.0]


@given(st.floats(-1e3, 1e3), st.integers(2, 9), st.floats(1e-12, 1e-2))
def test_constant_group_has_exactly_zero_advantages(value, size, eps):
    assert group_advantages([value] * size, size, eps=eps, ddof=1) == [0.0] * size


def test_rewards_that_are_not_finite_or_not_whole_groups_are_rejected():
    with pytest.raises(ValueError, match="1 of 2 .*nan"):
        group_advantages([0.0, math.nan], 2, eps=1e-8, ddof=1)
    with pytest.raises(ValueError, match="groups of 2"):
        group_advantages([0.0, 1.0, 2.0], 2, eps=1e-8, ddof=1)


def test_scores_of_agents_are_added_to_those_that_they_share():
    scores = [functions.Score("outcome", "1", 1.0, 1.0), functions.Score("length", "1", -0.5, 0.5)]
    assert functions.reward_of(scores) == (0.75, {})
    scores += [functions.Score("format", "1", 2.0, value, agent) for agent, value in (("a", 1.0), ("b", 0.0))]
    assert functions.reward_of(scores) == (1.75, {"a": 2.75, "b": 0.75})
