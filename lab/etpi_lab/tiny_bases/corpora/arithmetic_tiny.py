"""The training corpus of the tiny base of `arithmetic_tiny`: conversations of scripted agents, and exercises."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from etpi_assets.agent.interpreter import FOLDER, cell_command
from etpi_assets.agent.tools import INTERPRETER
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Task
from etpi_assets.worlds.arithmetic_tiny import FAMILY, ArithmeticSkill, ArithmeticTinyPolicy, answer
from etpi_lab.tiny_bases.corpora.transcripts import transcripts as roll_out
from etpi_lab.worlds.coop_tiny.emulated import EmulatedFactory, EmulatedSandbox, UnknownCommand

SUITE = "arithmetic_tiny_base"
"""Suite name for the corpus's tasks, so that they differ from those of a suite with the same seed."""

BASE_HABITS = ArithmeticSkill(calls=1.0, prints=1.0, exact=0.5)
"""Habits in the base model's corpus: it always calls its tool and answers with the printed text."""

GUESSES = ArithmeticSkill(calls=0.0)

_CELL = re.compile(r"n = \((\d+) \* (\d+) \+ (\d+)\) % (\d+)(; print\(r'\\boxed\{%d\}' % n\))?")


def transcripts(seed: int, n: int, skill: ArithmeticSkill, tokenizer: str) -> Iterator[list[dict[str, str]]]:
    """Yield `n` conversations, deterministic in the arguments; see `corpora.transcripts`."""
    agent = AgentSection(
        prompt="arithmetic_tiny", tools=(INTERPRETER,), action_format="tool_or_answer", tokenizer=tokenizer
    )
    tasks = [task for task in FAMILY.load(SUITE, seed, {"train": n, "heldout": 0}) if isinstance(task, Task)]
    return roll_out(
        tasks, n, FAMILY, ArithmeticTinyPolicy(skill, seed), EmulatedFactory(ArithmeticSandbox), agent, seed
    )


def conversations(seed: int, n: int, tokenizer: str) -> Iterator[list[dict[str, str]]]:
    """Yield conversations of agents with BASE_HABITS."""
    return transcripts(seed, n, BASE_HABITS, tokenizer)


def exercises(seed: int, n: int, tokenizer: str) -> Iterator[list[dict[str, str]]]:
    """Yield questions, each with a guess."""
    return transcripts(seed, n, GUESSES, tokenizer)


def cell_in(command: str) -> str | None:
    """Return the code in a command that `cell_command` wrote; None for other commands."""
    words = shlex.split(command)
    place = words.index(f"{FOLDER}/cell.py") if f"{FOLDER}/cell.py" in words else 0
    return words[place - 2] if place >= 2 and cell_command(words[place - 2]) == command else None


class ArithmeticSandbox(EmulatedSandbox):
    """An emulated sandbox that also runs this world's Python cells."""

    def _answer(self, command: str) -> tuple[str, int]:
        cell = _CELL.fullmatch(cell_in(command) or "")
        if cell is None:
            raise UnknownCommand(
                f"the emulated interpreter does not know {command[-200:]!r}; only scripted policies of arithmetic_tiny "
                "may use it, everything else runs in a real sandbox"
            )
        first, second, third, modulus = (int(group) for group in cell.groups()[:4])
        return (f"{answer(str((first * second + third) % modulus))}\n" if cell[5] else ""), 0
