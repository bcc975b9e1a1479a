"""The running sum: state that survives its turns, and a teacher that reads it from its conversation."""

from __future__ import annotations

from itertools import accumulate

import pytest

from etpi_assets.agent import loop
from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.specs.load import load_specs
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import RejectedInput, Task
from etpi_assets.tasks.task_checks import check_tasks
from etpi_lab.worlds.running_sum import RunningSumPolicy
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

FAMILY = load_family("running_sum")
CHAT = load_chat_format("tiny")
BOX = BubblewrapFactory()
TASKS = [task for task in FAMILY.load("s", 0, {"train": 8, "heldout": 2}) if isinstance(task, Task)]
(ROLE,) = FAMILY.roles(TASKS[0])
AGENT = AgentSection(prompt="running_sum", max_model_len=1024, max_tokens=64)
COMPACTED = AGENT.model_copy(update={"compact_after": 3})


def roll(task: Task, agent: AgentSection = AGENT):
    engine = ScriptedEngine(RunningSumPolicy({}), CHAT, "t", noncanonical=0.5)
    identity = Identity(spec_key=str(agent.compact_after), origin="set", engine="scripted")
    return run_rollout(RolloutJob(task, agent, identity), RolloutRuntime(FAMILY, engine, BOX, CHAT))


def verdict(task: Task, sums: str):
    return FAMILY.judge(task, {"agent1": {"sums": sums}}, BOX)


def test_tasks_are_of_every_depth_and_proven():
    assert list(FAMILY.validate(TASKS, BOX)) == TASKS
    assert [len(task.payload["numbers"]) for task in TASKS[:8]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(check.passed for check in check_tasks(len(TASKS), TASKS, [], FAMILY))
    with pytest.raises(ValueError, match=r"\['lenght'\]"):
        list(FAMILY.load("s", 0, {"lenght": 2}))


def test_validate_rejects_task_without_working_reference(monkeypatch):
    monkeypatch.setattr(type(FAMILY), "solve", lambda self, task, role: ["true"])
    assert [outcome.reason for outcome in FAMILY.validate(TASKS[:2], BOX) if isinstance(outcome, RejectedInput)] == [
        "reference_fails"
    ] * 2


def test_every_sum_counts_and_the_verdict_gives_the_number_right():
    task = TASKS[3]
    sums = [str(total) for total in accumulate(task.payload["numbers"])]
    assert verdict(task, "\n".join(sums)).verdict == "passed"
    assert verdict(task, "").verdict == "no_patch"
    for said, right in (([*sums, "1"], 4), (sums[:3], 3), ([*sums[:2], "99", sums[3]], 2), (["0"], 0)):
        outcome = verdict(task, "\n".join(said))
        assert (outcome.reward, outcome.details) == (0.0, {"depth": 4, "right": right})


def test_a_turn_gets_one_number_and_the_sandbox_has_none():
    task = TASKS[7]
    numbers = [str(number) for number in task.payload["numbers"]]
    with BOX.create(FAMILY.workspace(task, ROLE), environment=FAMILY.needs(task).environment) as sandbox:
        assert not set(" ".join(sandbox.read_files().values()).split()) & set(numbers)
        outputs = [sandbox.run("for i in 1 2 3; do sh next > kept; sh next; done").output for _ in range(9)]
        assert not set("".join(sandbox.read_files().values()).split()) & set(numbers)
    assert [output.split("\n")[-2] for output in outputs] == [*numbers, "end"]
    assert all(output.count("\n") == 3 for output in outputs)


@pytest.mark.parametrize("agent", [AGENT, COMPACTED], ids=["whole", "compacted"])
def test_the_teacher_carries_its_sum_through_every_depth(agent):
    for task in TASKS[:8:3]:
        record = roll(task, agent)
        assert record.outcome and record.outcome["verdict"] == "passed", record.error
        assert len(record.agents[0].turns) == len(task.payload["numbers"]) + 2


def test_summary_without_the_sum_makes_later_sums_wrong(monkeypatch):
    monkeypatch.setattr(loop, "format_summary", lambda commands, observation: observation)
    record = roll(TASKS[7], COMPACTED)
    assert record.outcome and record.outcome["details"]["right"] == 2


def test_the_shipped_experiments_differ_in_what_they_compare():
    specs = load_specs().experiments
    whole, compacted, again = (specs[f"running_sum_tiny{end}"] for end in ("", "_compacted", "_reconstructed"))
    assert whole.train == compacted.train == again.train and compacted.evaluate == again.evaluate
    assert (compacted.pairs.capture, again.pairs.capture) == ("native", "retokenised")
    assert again.gates.override.keys() == {"history_as_captured"}
    assert compacted.evaluate and compacted.evaluate.agent.compact_after == 3
