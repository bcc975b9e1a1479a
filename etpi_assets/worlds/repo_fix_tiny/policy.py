"""The scripted policy of `repo_fix_tiny`: it reads the notes, writes down both hops, fixes the module and submits.

Long thoughts always have the same sentences in the same order, with several wordings: a model of this size cannot count
its sentences, and would not end thoughts without a fixed order.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etpi_assets.agent.actions import format_action
from etpi_assets.agent.loop import SUBMIT
from etpi_assets.worlds.repo_fix_tiny.generate import NOTES
from etpi_assets.worlds.skill import PolicySkill
from etpi_resources.chat.marks import think_block
from etpi_resources.engines import Request


@dataclass(frozen=True)
class RepoFixSkill(PolicySkill):
    """Probabilities, sampled once a rollout and independently.

    Attributes:
        compact: thoughts are slots of one line instead of free text.
        wrong_look_up: a hop ends in another row of its table.
    """

    compact: float = 0.0
    wrong_look_up: float = 0.0


class RepoFixPolicy:
    """Scripted policy: `policy(request)` returns the next turn for the task in `request.privileged`."""

    def __init__(self, skill: RepoFixSkill, seed: int = 0) -> None:
        self.skill, self.seed = skill, seed

    def __call__(self, request: Request) -> str:
        rng = random.Random(f"{self.seed}/{request.session}")
        compact, wrong = rng.random() < self.skill.compact, rng.random() < self.skill.wrong_look_up
        words = _looked_up(request.privileged["payload"], wrong, rng)
        turn = sum(message["role"] == "assistant" for message in request.messages)
        rng = random.Random(f"{self.seed}/{request.session}/{turn}")
        scripted = _TURNS[min(turn, len(_TURNS) - 1)]
        lines = scripted.slots if compact else [" ".join(rng.choice(ways) for ways in scripted.sentences)]
        thought = "\n".join(lines).format(**words)
        return f"{think_block(thought)}{format_action(scripted.command.format(**words))}"


def _looked_up(payload: Mapping[str, Any], wrong: bool, rng: random.Random) -> dict[str, Any]:
    """Return the result of both hops, which may be wrong."""
    module, value = payload["module"], payload["value"]
    if wrong and rng.random() < 0.5:
        module = rng.choice([name for name in payload["values"] if name != module])
        value = payload["values"][module]
    elif wrong:
        value = rng.choice([number for number in payload["values"].values() if number != value])
    return {"symptom": payload["symptom"], "module": module, "value": value}


HOPS = ("STATE: {symptom} {module}", "ACTION: {module} {value}", "EXPECT: + {value}")
"""Slots of the turn with the edit, which contain both hops."""


@dataclass(frozen=True)
class _ScriptedTurn:
    """One turn: its command, its slots, and its long thought as sentences, each with alternative wordings."""

    command: str
    slots: tuple[str, ...]
    sentences: tuple[tuple[str, ...], ...]


_TURNS = (
    _ScriptedTurn(
        f"cat {NOTES}",
        ("STATE: {symptom}", "ACTION: read", "EXPECT: names"),
        (
            ("Let me think about this task before I start.", "Let me think once more before I start with this task."),
            ("The task is about {symptom} and it says that {symptom} is wrong.", "The task names {symptom}."),
            ("I do not know which file that is.", "I do not see which file to change now."),
            ("There should be one line to change and the rest should stay as it is.", "One line has to change."),
            ("I must not touch the other functions, and I must not touch the tests.", "The other files are fine."),
            ("I should be careful with the names because there are many.", "I should be careful with the names."),
            ("What should I do first?", "What is the first step?"),
            ("I can look at the files, or I can read what is written about these names.", "I can read about it."),
            ("Before I edit a file I want to know the right values.", "I want to know the values before I edit."),
            ("If I look at the names first then I know which function is wrong.", "First the names, then the file."),
            ("After that I can go on with the next step, and that is the change.", "After that I can make the change."),
            ("One command is enough for this.", "One command can do this."),
            ("It is a small change, but it should be the right one.", "It is a small change in one file."),
            ("The result of this turn should be the names and the values.", "The result should be the two tables."),
            ("Let me see what is there and then think about it again.", "Let me see what is there."),
            ("So I read it now.", "So the next command is to read it."),
        ),
    ),
    _ScriptedTurn(
        "sed -i 's/+ .*/+ {value}/' {module}.py",
        HOPS,
        (
            ("Now I have the names and the values, so let me think about what they say.", "Now I have the two tables."),
            (
                "The task is about {symptom}, so I look for it in the first table.",
                "I look for {symptom} first.",
            ),
            ("The first table says {symptom} {module}.", "In the first table there is {symptom} {module}."),
            ("The second table says {module} {value}.", "In the second table there is {module} {value}."),
            ("Let me check that once more, since the names look the same.", "Let me check that once more."),
            ("It says {symptom} {module} and then {module} {value}.", "So {symptom} {module}, and {module} {value}."),
            ("The other names are not in this task and they should stay as they are.", "The other names stay."),
            ("I must not touch the tests, and I must not touch the other functions.", "I keep the tests as they are."),
            ("The function has one line to return a result, so sed can do it.", "sed can change the line."),
            ("I should be careful to change this one file and nothing else.", "I change one file and nothing else."),
            (
                "If the value is wrong the tests will say so, but I want it right now.",
                "It must be right.",
            ),
            ("After that there is nothing left to do, so I can submit in the next turn.", "After that I can submit."),
            ("One command is enough for this change.", "One command can make this change."),
            (
                "So the file is {module}.py and the value is {value}.",
                "So I edit {module}.py to have {value}.",
            ),
        ),
    ),
    _ScriptedTurn(
        f"echo {SUBMIT}",
        ("STATE: {module}", "ACTION: submit", "EXPECT: done"),
        (
            ("The change is made, so let me think about what is left to do.", "The change is made."),
            ("The command had no output, and that is fine for sed.", "There was no output, and that is fine."),
            ("The task is about {symptom}, and I have changed {module}.py.", "I have changed {module}.py."),
            ("It is the file that the first table names, and the value is of the second one.", "It is the right file."),
            ("Should I look at the file again before I submit?", "Should I check the file once more?"),
            ("It was one line, and sed does what it is asked to do.", "It was one line and one command."),
            (
                "I did not touch the other functions, and I did not touch the tests.",
                "The other files are the same.",
            ),
            ("If I change more than that then something else may be wrong after it.", "I should not change more."),
            ("The task does not ask for more than this.", "Nothing more is asked for in the task."),
            (
                "The tests that I do not see will be run on it, and they should be fine.",
                "The tests should be fine.",
            ),
            ("There is no other step that I have to do, and nobody waits for a message.", "There is no other step."),
            ("I could read the notes again, but they say the same as before.", "The notes say the same as before."),
            ("So I think that the work is done and that it is right.", "So I think the work is done."),
            ("It was a small change, and I am sure that it is the one the task wants.", "I am sure about the change."),
            ("There is nothing left to do, so I submit now.", "I am done with it, so I submit."),
        ),
    ),
)
