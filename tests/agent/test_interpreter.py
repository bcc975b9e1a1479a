"""The tool code_interpreter: a session that lasts a rollout, in the real sandbox and in the agent loop."""

from __future__ import annotations

import json
from typing import Any

import pytest

from etpi_assets.agent import interpreter
from etpi_assets.agent.interpreter import cell_command, cell_of, printed, published_command
from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.agent.tools import tool_schemas
from etpi_assets.scoring.behaviours import ScoringOptions, score
from etpi_assets.scoring.rewards import functions
from etpi_assets.scoring.rewards.attempt import Attempt, attempt_of
from etpi_assets.specs.rollout_set import AgentSection, ScoringSection
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import ANSWER, Task
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.tables import to_tables
from etpi_assets.worlds.arithmetic_tiny import GIVEN_UP, ArithmeticSkill, ArithmeticTinyPolicy, answer, call
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.lake.schemas import empty
from etpi_resources.sandboxes import Limits
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

FAMILY = load_family("arithmetic_tiny")
TASK = next(t for t in FAMILY.load("s", 0, {"train": 1, "heldout": 0}) if isinstance(t, Task))
AGENT = AgentSection(
    prompt="arithmetic_tiny", tools=("code_interpreter",), action_format="tool_or_answer", max_steps=4,
    max_model_len=1024, max_tokens=200,
)  # fmt: skip


def session(*cells: str) -> list[tuple[str, int]]:
    with BubblewrapFactory().create({}, Limits(command_seconds=60)) as box:
        done = [box.run(cell_command(cell)) for cell in cells]
        assert box.read_files() == {}
    return [(result.output, result.exit_code) for result in done]


def test_cell_sees_definitions_of_earlier_cells():
    cells = (
        "import math\nfrom collections import Counter as C\nn = 4",
        "class P:\n    def __init__(self, x):\n        self.x = x",
        "from functools import lru_cache\n@lru_cache\ndef area(r=n):\n    return math.floor(r * n)",
        "square = lambda v: v * v\np = P(3)",
        "print(area(), square(p.x), C('aa'))\nn",
        "area = 5\nopen('kept.txt', 'w').write('x')\nimport os; os.remove('kept.txt')",
        "area + n",
    )
    assert [text for text, _ in session(*cells)] == ["", "", "", "", "16 9 Counter({'a': 2})\n4\n", "", "9\n"]


def test_error_is_shown_and_keeps_earlier_definitions():
    outcome = session(
        "a = 1", "b = 2\nraise KeyError('k')", "1 +", "print(a, b)", "gen = (x for x in 'ab')", "exit(3)", "a"
    )
    assert outcome[1] == ("Traceback (most recent call last):\n  line 2, in <module>\nKeyError: 'k'\n", 1)
    assert outcome[2][1] == 1 and "SyntaxError" in outcome[2][0]
    assert outcome[3] == ("1 2\n", 0)
    assert outcome[4] == ("[not kept for the next call: gen]\n", 0)
    assert [code for _, code in outcome[5:]] == [1, 0]


def test_workspace_files_do_not_shadow_the_library():
    names = "('pickle', 'traceback', 'ast')"
    outcome = session(
        f"for name in {names}:\n    open(name + '.py', 'w').write('1 / 0')",
        "kept = [1, bytearray(b'2')]",
        "def f():\n    return kept",
        "raise KeyError('k')",
        f"import os\nfor name in {names}:\n    os.remove(name + '.py')\nf()",
    )
    assert outcome[3] == ("Traceback (most recent call last):\n  line 1, in <module>\nKeyError: 'k'\n", 1)
    assert outcome[4] == ("[1, bytearray(b'2')]\n", 0)


@pytest.mark.parametrize(
    ("command", "cell"),
    [
        ('code_interpreter {"code": "print(1)"}', "print(1)"),
        ("code_interpreter {}", ""),
        ('code_interpreter {"code": 3}', ""),
        ("code_interpreter now", ""),
        ("echo code_interpreter", None),
    ],
)
def test_cell_of_reads_calls_and_ignores_other_commands(command, cell):
    assert cell_of(command) == cell


# --- as published ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "program"),
    [
        ("x = 2\nx + 1\n", "x = 2\nprint(x + 1)\n"),
        ("print(1)\n\n", "print(1)\n\n"),
        ("x = 2", "print(x = 2)"),
        ("First:\n```python\nx = 2\nx\n```\nthen\n```python\ny\n```", "x = 2\nprint(x)"),
        ("", ""),
    ],
)
def test_published_program_is_the_first_block_with_its_last_line_printed(code, program):
    assert printed(code) == program


def programs(*codes: str, seconds: float = 30.0) -> list[tuple[str, int]]:
    with pytest.MonkeyPatch.context() as patch, BubblewrapFactory().create({}, Limits(command_seconds=60)) as box:
        patch.setattr(interpreter, "PROGRAM_SECONDS", seconds)
        done = [box.run(published_command(code)) for code in codes]
    return [(result.output, result.exit_code) for result in done]


def test_published_program_knows_no_other_and_shows_stdout_before_stderr():
    codes = (
        "n = 4\nimport sys\nprint('e', file=sys.stderr)\nn + 1",
        "n",
        "input()",
        "x = bytearray(2 << 30)\nprint(len(x))",
    )
    first, second, third, fourth = programs(*codes)
    assert first == ("5\ne\n", 0)
    assert second[1] == 1 and "NameError: name 'n' is not defined" in second[0]
    assert third[1] == 1 and "EOFError" in third[0]
    assert fourth[1] == 1 and "MemoryError" in fourth[0]


def test_published_program_that_does_not_end_says_so_and_nothing_else():
    assert programs("print('seen', flush=True)\nwhile True: pass\nprint()", seconds=1.0) == [("no stdout here\n", 1)]


def test_spec_offers_one_interpreter():
    with pytest.raises(ValueError, match=r"agent\.tools: "):
        AgentSection(tools=("code_interpreter", "code_interpreter_published"))


# --- in the loop -----------------------------------------------------------------------------------------------------


def roll(*texts: str, agent: AgentSection = AGENT) -> RolloutRecord:
    """A rollout of an agent that says these texts, one a turn."""
    chat = load_chat_format("tiny")

    def policy(request: Any) -> str:
        return texts[min(sum(m["role"] == "assistant" for m in request.messages), len(texts) - 1)]

    engine = ScriptedEngine(policy, chat, "t")
    job = RolloutJob(TASK, agent, Identity("k", "set", "scripted", "t"))
    record = run_rollout(job, RolloutRuntime(FAMILY, engine, BubblewrapFactory(), chat))
    assert record.error is None, record.error
    return record


def seen(record: RolloutRecord) -> Attempt:
    return attempt_of(record, TASK)


def counted(record: RolloutRecord, tools: bool) -> int | None:
    """Turns with a tool as scoring finds them in the rollout's tables."""
    tables = to_tables([record])
    options = ScoringOptions(ScoringSection(), tools=tools)
    scored = score(*(tables[n] for n in ("rollouts", "agents", "turns")), empty("tasks"), options)
    return scored["agent_scores"]["tool_turns"][0].as_py()


def test_an_agent_computes_over_several_turns_and_answers_without_a_call():
    expression, right = TASK.payload["expression"], TASK.payload["answer"]
    record = roll(call(f"n = {expression}"), call("print(n)"), answer(right))
    [agent] = record.agents
    assert [turn.observation for turn in agent.turns] == ["[exit 0]", f"[exit 0]\n{right}", ""]
    assert [m.role for m in agent.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert agent.exit_status == "Submitted" and record.outcome and record.outcome["verdict"] == "passed"
    assert (seen(record).turns, seen(record).tool_turns, functions.tool_call_reward(seen(record))) == (3, 2, 1.0)


def test_published_tool_answers_with_the_bare_output():
    agent = AGENT.model_copy(update={"tools": ("code_interpreter_published",)})
    record = roll(call("n = 6\nn * 7"), call("n"), GIVEN_UP, agent=agent)
    [state] = record.agents
    first, second, _ = [turn.observation for turn in state.turns]
    assert first == "42" and second.startswith("Traceback") and "[exit" not in second
    assert '"description": "A tool for executing code."' in json.dumps(tool_schemas(agent.tools))


def test_an_agent_that_only_calls_ends_without_an_answer():
    record = roll(call("print(1)"))
    assert [agent.exit_status for agent in record.agents] == ["LimitsExceeded"]
    assert record.outcome and record.outcome["verdict"] == "no_answer"
    assert functions.tool_call_reward(seen(record)) == pytest.approx(-0.65)


def test_answer_written_by_code_does_not_count():
    code = f"open('{ANSWER}', 'w').write({answer(TASK.payload['answer'])!r})"
    record = roll(call(code))
    assert record.outcome and record.outcome["verdict"] == "no_answer"
    # And it does not stand before the words that are one.
    record = roll(call(code), GIVEN_UP)
    assert record.outcome and record.outcome["verdict"] == "no_answer"


@pytest.mark.parametrize(
    ("texts", "tool_turns", "reward"),
    [
        ((GIVEN_UP,), 0, -1.0),
        # Calls in words, without their end, and results that the agent wrote itself are no calls.
        (("I call code_interpreter.",), 0, -1.0),
        (("<tool_response>[exit 0]</tool_response>" * 5,), 0, -1.0),
        (("<tool_call>\n{\"name\": \"code_interpreter\"", GIVEN_UP), 0, -0.95),
        (("<tool_call></tool_call>" * 9, GIVEN_UP), 0, -0.95),
        # A think block ends where a call begins, so a call in it is one. Five calls in a turn are one turn with a
        # tool; empty code, and code to no effect, are calls like any other.
        ((f"<think>{call('pass')}</think>{GIVEN_UP}", GIVEN_UP), 1, -0.9),
        ((call("pass") * 5, GIVEN_UP), 1, -0.9),
        ((call(""), GIVEN_UP), 1, -0.9),
        ((call("pass"), call("pass"), call("pass"), GIVEN_UP), 3, -0.7),
    ],
)  # fmt: skip
def test_tool_call_reward_of_degenerate_turns(texts, tool_turns, reward):
    """TCR pays for turns, as published: a turn that no call could be read from counts as a turn of the assistant's, and
    idle calls earn what useful ones do, up to -0.6 and never a right answer's 1."""
    record = roll(*texts)
    attempt = seen(record)
    assert attempt.tool_turns == tool_turns == counted(record, tools=True)
    assert counted(record, tools=False) is None, "no tool was offered, so nothing is said of any"
    assert functions.tool_call_reward(attempt) == pytest.approx(reward)
    assert functions.outcome(attempt) == -1.0


def test_teacher_calls_and_prints_at_the_rates_of_its_skill():
    from etpi_resources.engines import Request, Sampler

    policy = ArithmeticTinyPolicy(ArithmeticSkill(calls=0.3, prints=0.2, exact=0.4, again=0.5), seed=1)

    def say(number: int, *shown: str) -> str:
        messages = [{"role": "system", "content": ""}, {"role": "user", "content": ""}]
        for text in shown:
            messages += [{"role": "assistant", "content": ""}, {"role": "tool", "content": text}]
        return policy(Request("r", f"s{number}", (), tuple(messages), Sampler(), privileged={"payload": TASK.payload}))

    first = [say(n) for n in range(800)]
    calls = [text for text in first if "<tool_call>" in text]
    assert len(calls) / 800 == pytest.approx(0.3, abs=0.06)
    assert sum("print" in text for text in calls) / len(calls) == pytest.approx(0.2, abs=0.08)
    assert sum("% 10" in text for text in calls) / len(calls) == pytest.approx(0.4, abs=0.08)
    later = [say(n, "[exit 0]") for n in range(400)]
    assert sum(text == GIVEN_UP for text in later) / 400 == pytest.approx(0.5, abs=0.08)
    assert say(0, "[exit 0]", f"[exit 0]\n{answer('7')}\n") == answer("7")
