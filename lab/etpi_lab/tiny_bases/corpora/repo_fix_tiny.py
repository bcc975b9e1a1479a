"""The training corpus of the tiny base of `repo_fix_tiny`: conversations of scripted agents, and exercises."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from etpi_assets.agent.actions import format_action
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Task, Verdict
from etpi_assets.worlds.repo_fix_tiny import RepoFixTiny
from etpi_assets.worlds.repo_fix_tiny.generate import NOTES, generate_tasks
from etpi_assets.worlds.repo_fix_tiny.policy import HOPS, RepoFixPolicy, RepoFixSkill
from etpi_lab.tiny_bases.corpora.transcripts import transcripts as roll_out
from etpi_lab.worlds.coop_tiny.emulated import EmulatedFactory, EmulatedSandbox
from etpi_resources.sandboxes import SandboxFactory

SUITE = "repo_fix_tiny_base"
"""Suite name for the corpus's tasks, so that they differ from those of a suite with the same seed."""

BASE_HABITS = RepoFixSkill(compact=0.2, wrong_look_up=0.1)
"""Habits in the base model's corpus: mostly long thoughts, some slots, and some wrong look-ups."""

_SED = re.compile(r"sed -i 's/\+ \.\*/(\+ \d+)/' (\w+\.py)")


def transcripts(
    seed: int, n: int, skill: RepoFixSkill, agent: AgentSection, split: str = "train"
) -> Iterator[list[dict[str, str]]]:
    """Yield `n` conversations, deterministic in the arguments; see `corpora.transcripts`."""
    tasks = generate_tasks(SUITE, seed, split)
    return roll_out(
        tasks, n, UnjudgedRepoFixTiny(), RepoFixPolicy(skill, seed), EmulatedFactory(RepoFixSandbox), agent, seed
    )


def conversations(seed: int, n: int, tokenizer: str) -> Iterator[list[dict[str, str]]]:
    """Yield conversations of agents with BASE_HABITS."""
    return transcripts(seed, n, BASE_HABITS, AgentSection(prompt="repo_fix_tiny", tokenizer=tokenizer))


def exercises(seed: int, n: int, tokenizer: str) -> Iterator[list[dict[str, str]]]:
    """Yield the notes, a symptom, and both hops with the resulting edit, as bare rows or, every third, as slots.

    A conversation has one look-up in nine hundred tokens, too few to train it, and slots in only one of five."""
    tasks = generate_tasks(SUITE, seed, "train")
    for number, task in zip(range(n), tasks, strict=False):
        symptom, module, value = (task.payload[key] for key in ("symptom", "module", "value"))
        edit = format_action(f"sed -i 's/+ .*/+ {value}/' {module}.py")
        rows = f"{symptom} {module}\n{module} {value}\n"
        hops = "\n".join(HOPS).format(symptom=symptom, module=module, value=value)
        slots = f"<think>\n{hops}\n</think>\n\n"
        yield [
            {"role": "system", "content": task.payload["files"][NOTES].rstrip("\n")},
            {"role": "user", "content": symptom},
            {"role": "assistant", "content": f"{rows if number % 3 else slots}{edit}"},
        ]


class RepoFixSandbox(EmulatedSandbox):
    """An emulated sandbox that also runs this world's `sed` command."""

    def _answer(self, command: str) -> tuple[str, int]:
        if (match := _SED.fullmatch(command)) and match[2] in self._files:
            self._files[match[2]] = re.sub(r"\+ .*", match[1], self._files[match[2]])
            return "", 0
        return super()._answer(command)


class UnjudgedRepoFixTiny(RepoFixTiny):
    """The family without its judge, for conversations that need no reward."""

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        return Verdict(0.0, "unknown", {})
