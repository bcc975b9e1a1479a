"""The running sum: state that survives its turns, a teacher that reads it from its conversation, histories compacted on
the way, and the check that finds a history put together again that nobody read."""

from __future__ import annotations

from itertools import accumulate

import pyarrow as pa
import pytest

from etpi_assets.agent import loop
from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.curation.captured import captured_agents
from etpi_assets.curation.pairs import make_pairs
from etpi_assets.specs.experiment import PairsSection
from etpi_assets.specs.load import load_specs
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import RejectedInput, Task
from etpi_assets.tasks.task_checks import check_tasks
from etpi_assets.trajectories.tables import to_tables
from etpi_assets.worlds.running_sum import RunningSumPolicy
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from tests.support import whole_checks

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


def test_compacted_prompt_is_first_messages_and_summary_and_messages_are_kept():
    whole, record = roll(TASKS[7]).agents[0], roll(TASKS[7], COMPACTED).agents[0]
    assert [message.content for message in record.messages] == [message.content for message in whole.messages]
    for number, turn in enumerate(record.turns):
        before = record.turns[number - 1]
        text = CHAT.decode(turn.prompt_ids or [])
        told = [action.command for past in record.turns[:number] for action in past.actions]
        if number % 3 or not number:
            extended = [*(before.prompt_ids or []), *(before.output_ids or [])] if number else []
            assert (turn.prompt_ids or [])[: len(extended)] == extended
        else:
            assert text.startswith(CHAT.decode((record.turns[0].prompt_ids or [])[:-3]))
            assert "".join(f"$ {command}\n" for command in told) + (before.observation or "") in text
            assert text.count("<tool_call>") == 1, "the system prompt's own"
    tables = to_tables([roll(TASKS[7], COMPACTED)], CHAT.decode)
    drifts = [row["turn"] for row in tables["turns"].to_pylist() if row["drift_at"] is not None]
    assert drifts == [3, 6, 9]


def test_summary_without_the_sum_makes_later_sums_wrong(monkeypatch):
    monkeypatch.setattr(loop, "format_summary", lambda commands, observation: observation)
    record = roll(TASKS[7], COMPACTED)
    assert record.outcome and record.outcome["details"]["right"] == 2


@pytest.mark.parametrize("agent", [AGENT, COMPACTED], ids=["whole", "compacted"])
def test_reconstructed_history_is_compared_with_the_captured_one(agent):
    tables = to_tables([roll(task, agent) for task in TASKS[5:8]])

    def pairs(capture: str) -> pa.Table:
        section = PairsSection.model_validate({"capture": capture})
        return make_pairs(captured_agents(tables, section, CHAT, lambda t, a: None, {}), section, CHAT)["pairs"]

    native, again = pairs("native"), pairs("retokenised")
    assert whole_checks.history_as_captured(native, native, CHAT).passed
    outcome = whole_checks.history_as_captured(again, native, CHAT)
    if agent is AGENT:  # other spellings of the same text
        assert native["output_ids"] != again["output_ids"]
        assert outcome.passed and outcome.figures["compared"] == len(again)
    else:
        assert not outcome.passed and outcome.blocking
        assert "'user\\nDone so far" in outcome.message and 'set pairs.capture = "native"' in outcome.message
        assert outcome.figures["differing"] == sum(len(task.payload["numbers"]) + 2 - 3 for task in TASKS[5:8])


def test_without_captured_ids_nothing_is_decided():
    pairs = make_pairs([], PairsSection(capture="native"), CHAT)["pairs"]
    assert not whole_checks.history_as_captured(pairs, pairs, CHAT).applicable


def test_the_shipped_experiments_differ_in_what_they_compare():
    specs = load_specs().experiments
    whole, compacted, again = (specs[f"running_sum_tiny{end}"] for end in ("", "_compacted", "_reconstructed"))
    assert whole.train == compacted.train == again.train and compacted.evaluate == again.evaluate
    assert (compacted.pairs.capture, again.pairs.capture) == ("native", "retokenised")
    assert again.gates.override.keys() == {"history_as_captured"}
    assert compacted.evaluate and compacted.evaluate.agent.compact_after == 3


def test_a_knob_that_is_off_leaves_a_rollout_what_it_was():
    assert "compact_after" not in AGENT.identity() and COMPACTED.identity()["compact_after"] == 3
