"""The corpora of the tiny bases: conversations of scripted agents in emulated workspaces, equal to real ones."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest

from etpi_assets.agent.actions import read_actions
from etpi_assets.agent.interpreter import cell_command
from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.worlds.repo_fix_tiny import FAMILY
from etpi_assets.worlds.repo_fix_tiny.generate import NOTES, generate_tasks
from etpi_assets.worlds.repo_fix_tiny.policy import RepoFixPolicy, RepoFixSkill
from etpi_lab.tiny_bases import tokenizer
from etpi_lab.tiny_bases.corpora import arithmetic_tiny, coop_tiny, coop_tiny_shared, repo_fix_tiny
from etpi_lab.worlds.coop_tiny.emulated import EmulatedFactory, UnknownCommand
from etpi_lab.worlds.coop_tiny.policy import CoopTinySkill
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import Request, Sampler
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes import Limits, SandboxFactory
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

AGENT = AgentSection()
CHAT = load_chat_format("tiny")
RECKLESS = CoopTinySkill(
    plan_first=0.5, follow_through=0.8, verbose_think=0.5, wrong_edit=0.7, notice=0.7, run_check=0.9, look_around=0.5,
    ack=0.5, report=0.7, markdown=0.3, malformed=0.15,
)  # fmt: skip


def session(*cells: str) -> list[tuple[str, int]]:
    with BubblewrapFactory().create({}, Limits(command_seconds=60)) as box:
        done = [box.run(cell_command(cell)) for cell in cells]
    return [(result.output, result.exit_code) for result in done]


def roll(task: Task, sandboxes: SandboxFactory) -> RolloutRecord:
    engine = ScriptedEngine(RepoFixPolicy(RepoFixSkill()), CHAT, "t", noncanonical=0.0)
    job = RolloutJob(task, AgentSection(prompt="repo_fix_tiny", max_steps=5), Identity("k", "set", "scripted", "t"))
    return run_rollout(job, RolloutRuntime(FAMILY, engine, sandboxes, CHAT))


def test_at_least_five_percent_of_tokens_are_split():
    said = [
        message["content"]
        for messages in coop_tiny.transcripts(0, 20, CoopTinySkill(), AgentSection(tokenizer="tiny"))
        for message in messages
        if message["role"] == "assistant"
    ]
    engine = ScriptedEngine(lambda request: said[int(request.request_id)], CHAT, "t")
    split = total = 0
    for number in range(len(said)):
        request = Request(str(number), "s", [1], [], Sampler(max_tokens=1000))
        (completion,) = engine.complete([request])
        canonical = len(CHAT.encode(completion.text))
        total += canonical
        split += len(completion.output_ids or []) - 1 - canonical
        assert engine.complete([request])[0].output_ids == completion.output_ids
    assert 0.05 < split / total < 0.1


def test_emulated_and_real_interpreter_agree_on_the_bases_corpus():
    talks = list(arithmetic_tiny.conversations(0, 24, "tiny"))
    assert talks == list(arithmetic_tiny.conversations(0, 24, "tiny"))
    assert all([m["role"] for m in talk[2:5]] == ["assistant", "tool", "assistant"] for talk in talks)
    calls = [json.loads(talk[2]["content"].removeprefix("<tool_call>\n").partition("\n")[0]) for talk in talks]
    codes = [entry["arguments"]["code"] for entry in calls]
    assert {"% 9;" in code for code in codes} == {True, False}
    for talk, (shown, _) in zip(talks, session(*codes), strict=True):
        assert talk[3]["content"] == f"[exit 0]\n{shown.rstrip()}" and talk[4]["content"] == shown.rstrip()
    assert all(len(talk) < 5 and "boxed" in talk[2]["content"] for talk in arithmetic_tiny.exercises(1, 8, "tiny"))


def test_emulated_interpreter_accepts_only_the_teachers_cells():
    code = "n = (12 * 13 + 14) % 10"
    shown = cell_command(code)
    assert [arithmetic_tiny.cell_in(command) for command in (shown, f"{shown}; ls", "ls")] == [code, None, None]
    with arithmetic_tiny.ArithmeticSandbox({}) as box:
        assert box.run(shown).output == ""
        for unknown in (cell_command("__import__('os').getcwd()"), "ls -a"):
            with pytest.raises(UnknownCommand):
                box.run(unknown)


def test_the_emulated_workspace_answers_as_the_real_one():
    for task in itertools.islice(generate_tasks("s", 0, "train"), 3):
        boxes = (EmulatedFactory(repo_fix_tiny.RepoFixSandbox), BubblewrapFactory())
        emulated, actual = (roll(task, box) for box in boxes)
        said = [[message.content for message in record.agents[0].messages] for record in (emulated, actual)]
        assert said[0] == said[1] and emulated.agents[0].patch == actual.agents[0].patch


def test_base_corpus_has_conversations_and_exercises():
    talks = list(repo_fix_tiny.conversations(0, 40, "tiny"))
    slots = sum("STATE: " in talk[2]["content"] for talk in talks)
    assert 0 < slots < 15 and list(repo_fix_tiny.conversations(0, 40, "tiny")) == talks
    drills = list(repo_fix_tiny.exercises(1, 6, "tiny"))
    assert [answer["content"].startswith("<think>\nSTATE: ") for *_, answer in drills] == [True, False, False] * 2
    for system, user, answer in drills:
        first, second = (line.split(": ")[-1] for line in answer["content"].removeprefix("<think>\n").split("\n")[:2])
        assert first.startswith(user["content"]) and {first, second} <= set(system["content"].split("\n"))
    assert all(NOTES in talk[2]["content"] for talk in talks)


def test_base_habits_are_bash_first_and_mostly_readable():
    turns = [
        turn for conversation in coop_tiny.transcripts(5, 400, coop_tiny.BASE_HABITS, AGENT) for turn in conversation
    ]
    said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    readable = sum(read_actions(text)[1] is None for text in said) / len(said)
    assert 0.95 < readable < 1
    assert 0.5 < sum("<think>" in text for text in said) / len(said) < 0.7
    assert 0.07 < sum("```bash" in text for text in said) / len(said) < 0.14
    starts = [c[2]["content"] for c in coop_tiny.transcripts(5, 400, coop_tiny.BASE_HABITS, AGENT)]
    assert sum("send_message" in text for text in starts) / len(starts) < 0.06


def test_transcripts_equal_recorded_messages():
    (first, second) = coop_tiny.transcripts(3, 2, RECKLESS, AGENT)
    assert [m["role"] for m in first[:3]] == ["system", "user", "assistant"]
    assert all(a["role"] != b["role"] for a, b in itertools.pairwise(first))
    assert first != second
    assert list(coop_tiny.transcripts(3, 2, dataclasses.asdict(RECKLESS), AGENT)) == [first, second]
    assert list(coop_tiny.transcripts(4, 2, RECKLESS, AGENT)) != [first, second]
    assert len(list(coop_tiny.transcripts(3, 7, RECKLESS, AGENT))) == 7
    steered = next(coop_tiny.transcripts(3, 1, RECKLESS, AgentSection(steering=True)))
    assert "Plan-First" in steered[0]["content"] and "Plan-First" not in first[0]["content"]


def test_base_of_the_shared_world_knows_both_wordings_of_a_plan():
    assert coop_tiny_shared.BASE_HABITS.reword == 1.0


def test_a_vocabulary_learns_common_words_and_leaves_names_in_syllables() -> None:
    draw = random.Random(1)
    syllables = ["ka", "lo", "mi", "ze", "du", "bo", "ri", "ta"]
    names = ["".join(draw.choices(syllables, k=4)) for _ in range(300)]
    texts = [f"please return {name} to file 12\n<tool_call>{name}" for name in names]
    core = tokenizer.train(texts, 1024, syllables, spread=0.2)
    assert core.to_str() == tokenizer.train(texts, 1024, syllables, spread=0.2).to_str()
    assert core.encode(" return").tokens == ["Ġreturn"]
    assert core.encode(" kalomize 12").tokens == ["Ġ", "ka", "lo", "mi", "ze", "Ġ", "1", "2"]
    assert core.token_to_id("<tool_call>") is not None
