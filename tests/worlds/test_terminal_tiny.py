"""The terminal suite: its tasks are real, its teacher makes the mistakes it says, and one turn is all there is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from etpi_assets.agent.contract import read_contract
from etpi_assets.agent.harness import run_harness
from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.scoring.rewards.terminal import KEYWORDS as REWARDED
from etpi_assets.scoring.rewards.terminal import requested_verbs, run_verbs
from etpi_assets.specs.load import load_specs
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import WHY_UNPROVEN, JudgesInPlace, RejectedInput, Task
from etpi_assets.tasks.task_checks import check_tasks
from etpi_assets.worlds.terminal_tiny import judge, wanted
from etpi_assets.worlds.terminal_tiny.generate import KEYWORDS, KINDS, PUBLISHED_KINDS, generate_tasks
from etpi_assets.worlds.terminal_tiny.policy import TerminalSkill, TerminalTinyPolicy
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from tests.support.real_harnesses import section, write_harness

FAMILY = load_family("terminal_tiny")
TASKS = list(islice(generate_tasks("s", 0, "train"), 2 * len(KINDS)))
AGENT = AgentSection(prompt="terminal_tiny", action_format="thinking_bash", max_steps=1)


def test_every_kind_is_solved_by_its_command_and_not_by_nothing():
    result = [task for task in FAMILY.load("s", 0, {"train": 40, "heldout": 24}) if isinstance(task, Task)]
    outcomes = list(FAMILY.validate(result, BubblewrapFactory()))
    assert outcomes == result
    assert {task.payload["verb"] for task in result} == set(KEYWORDS)
    assert all(check.passed for check in check_tasks(len(result), result, [], FAMILY))


def test_task_with_failing_reference_or_empty_request_is_refused():
    broken = replace(TASKS[0], payload={**TASKS[0].payload, "command": "true"})
    idle = replace(TASKS[1], payload={**TASKS[1].payload, "left": {}})
    reasons = [o.reason for o in FAMILY.validate([broken, idle], BubblewrapFactory()) if isinstance(o, RejectedInput)]
    assert reasons == ["reference_fails", "reference_fails"]


def test_judge_rejects_command_that_also_damages_files():
    task = TASKS[2]
    files = wanted(task)
    assert judge(task, files).verdict == "passed"
    assert judge(task, {**files, "more": "x"}).details == {"wrong": ["more"]}
    gone = {path: text for path, text in files.items() if path != task.payload["slots"]["source"]}
    assert judge(task, gone).reward == 0.0
    assert judge(task, task.payload["files"]).verdict == "no_patch"


@pytest.mark.parametrize(
    "command",
    [
        "chmod 000 {}",
        "rm {0}; ln -s x {0}",
        "rm {0}; mkdir {0}",
        "rm {0}; mkfifo {0}",
        "rm {}; mkdir more",
        "rm {}; chmod 700 *",
    ],
)
def test_judge_compares_kinds_and_modes_of_the_whole_workspace(command):
    task = next(task for task in TASKS if task.payload["verb"] == "rm")
    source = task.payload["slots"]["source"]
    assert isinstance(FAMILY, JudgesInPlace)
    with BubblewrapFactory().create(FAMILY.workspace(task, FAMILY.roles(task)[0])) as sandbox:
        assert FAMILY.judge_in_place(task, {"agent1": sandbox}, BubblewrapFactory()).verdict == "no_patch"
        sandbox.run(command.format(source))
        verdict = FAMILY.judge_in_place(task, {"agent1": sandbox}, BubblewrapFactory())
        assert (verdict.reward, verdict.verdict) == (0.0, "failed_tests") and verdict.details["wrong"]
        sandbox.run(f"rm -rf more; chmod 755 *; rm -rf {source}")
        assert FAMILY.judge_in_place(task, {"agent1": sandbox}, BubblewrapFactory()).verdict == "passed"


def test_request_names_only_its_verb_and_its_command_runs_it():
    for task in TASKS:
        assert requested_verbs(task.instruction, KEYWORDS) == {task.payload["verb"]}
        assert run_verbs(task.payload["command"]) == [task.payload["verb"]]
    for term in load_specs().experiments["terminal_grpo_tiny"].rl.rewards:
        assert term.params["keywords"] == {verb: list(words) for verb, words in KEYWORDS.items()}


def test_every_published_request_asks_for_the_programs_that_earn_its_reward_and_is_solved_by_its_command():
    params = {"train": 40, "heldout": 20, "requests": "published"}
    tasks = [task for task in FAMILY.load("s", 0, params) if isinstance(task, Task)]
    assert list(FAMILY.validate(tasks, BubblewrapFactory())) == tasks
    times_requested: Counter[str] = Counter()
    for task in tasks:
        verbs = requested_verbs(task.instruction, REWARDED)
        assert verbs and verbs == set(run_verbs(task.payload["command"])), task.instruction
        assert (WHY_UNPROVEN in task.payload) == (verbs == {"docker"})
        times_requested.update(verbs)
    assert set(times_requested) == set(REWARDED) and min(times_requested.values()) >= len(tasks) / 10
    with pytest.raises(ValueError, match=r"params\.requests .*'all'; .*files, published"):
        list(FAMILY.load("s", 0, {"requests": "all"}))


def test_published_request_that_cannot_run_is_rewarded_without_a_verdict():
    policy = TerminalTinyPolicy(TerminalSkill())
    tasks = {task.payload["verb"]: task for task in islice(generate_tasks("s", 0, "train", kinds=PUBLISHED_KINDS), 4)}
    outcomes = {verb: roll(task, policy).outcome for verb, task in tasks.items()}
    assert {verb: outcome and outcome["verdict"] for verb, outcome in outcomes.items()} == {
        "docker": "unproven", "find": "passed", "grep": "passed", "tar": "passed"
    }  # fmt: skip
    assert outcomes["docker"] and outcomes["docker"]["reward"] is None


def test_full_size_experiment_asks_for_the_rewarded_programs_only():
    specs = load_specs()
    suite = specs.suites[str(specs.experiments["terminal_grpo_0_8b"].rl.suite)]
    tasks = islice((t for t in FAMILY.load("s", 0, suite.params) if isinstance(t, Task)), 400)
    earns = [bool(requested_verbs(task.instruction, REWARDED)) for task in tasks]
    assert len(earns) == 400 and all(earns)


def roll(task: Task, policy):
    chat = load_chat_format("tiny")
    identity = Identity("k", "set", "scripted", "t")
    engine = ScriptedEngine(policy, chat, "t")
    return run_rollout(RolloutJob(task, AGENT, identity), RolloutRuntime(FAMILY, engine, BubblewrapFactory(), chat))


def test_well_formed_turn_is_submitted_and_malformed_turn_does_nothing():
    right, wrong = TerminalTinyPolicy(TerminalSkill()), TerminalTinyPolicy(TerminalSkill(wrong_verb=1.0))
    loose = TerminalTinyPolicy(TerminalSkill(unformatted=1.0))
    for task in TASKS[:3]:
        record = roll(task, right)
        assert record.outcome and record.outcome["verdict"] == "passed", record.outcome
        assert [agent.exit_status for agent in record.agents] == ["Submitted"]
        assert roll(task, wrong).outcome["reward"] == 0.0  # pyright: ignore[reportOptionalSubscript]
        record = roll(task, loose)
        assert record.outcome and record.outcome["verdict"] == "no_patch"
        [turn] = record.agents[0].turns
        assert turn.parse_error and not turn.actions and record.agents[0].exit_status == "FormatError"


def test_policy_errs_at_the_rates_of_its_skill():
    from etpi_resources.engines import Request, Sampler

    policy = TerminalTinyPolicy(TerminalSkill(unformatted=0.4, wrong_verb=0.25), seed=1)
    seen: Counter[str] = Counter()
    for number in range(600):
        task = TASKS[number % len(TASKS)]
        text = policy(Request("r", f"s{number}/agent1", (), (), Sampler(), privileged={"payload": task.payload}))
        loaded = read_contract(text)
        seen["unformatted"] += isinstance(loaded, str)
        seen["wrong"] += not isinstance(loaded, str) and run_verbs(loaded.command) != [task.payload["verb"]]
    assert seen["unformatted"] / 600 == pytest.approx(0.4, abs=0.07)
    assert seen["wrong"] / 600 == pytest.approx(0.6 * 0.25, abs=0.05)
    with pytest.raises(ValueError, match="unknown"):
        TerminalSkill.of({"unformated": 0.1})


def test_suite_of_some_programs_has_their_requests_alone():
    tasks = list(FAMILY.load("s", 0, {"train": 6, "heldout": 2, "programs": ["wc", "rm"]}))
    assert [task.payload["verb"] for task in tasks if isinstance(task, Task)] == ["wc", "rm"] * 4
    with pytest.raises(ValueError, match="awk"):
        list(FAMILY.load("s", 0, {"programs": ["awk"]}))


@pytest.mark.parametrize(
    ("wrong_verb", "reward", "template"), [(0.0, 1.0, "tiny"), (1.0, 0.0, "tiny"), (0.0, 1.0, "qwen3")]
)
def test_teacher_acts_in_a_harness_by_its_skill(tmp_path, wrong_verb, reward, template):
    chat = load_chat_format(template)
    write_harness(tmp_path)
    env = {"BASE": "{base_url}/v1", "KEY": "{key}"}
    more = {"version": "1", "command": "python3 -B {folder}/harness.py {task_file}", "env": env}
    engine = ScriptedEngine(TerminalTinyPolicy(TerminalSkill(wrong_verb=wrong_verb)), chat, "t")
    runtime = RolloutRuntime(FAMILY, engine, BubblewrapFactory(), chat)
    job = RolloutJob(TASKS[0], section("custom", str(tmp_path), **more), Identity("k", "set", "scripted"))
    record = run_harness(job, runtime)
    assert record.error is None and record.outcome and record.outcome["reward"] == reward
    assert record.agents[0].exit_status == "Submitted" and len(record.agents[0].turns) == 2
