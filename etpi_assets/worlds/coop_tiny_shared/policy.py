"""The scripted policy of `coop_tiny_shared`; its skill sets how well it works.

An agent that works alone adds its function and exports it. Two agents that plan divide the work: each adds its
function, and the first agent exports both. It knows the partner's line only from the partner's message.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etpi_assets.agent.actions import format_action
from etpi_assets.worlds.coop_tiny_shared.features import NUMBERS, OPERATIONS, Formula
from etpi_assets.worlds.coop_tiny_shared.generate import AGENTS, definition, export, wanted_formula
from etpi_assets.worlds.skill import PolicySkill
from etpi_resources.chat.marks import think_block
from etpi_resources.engines import Request

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_EXPORT = re.compile(r"from \w+ import \w+")


@dataclass(frozen=True)
class SharedSkill(PolicySkill):
    """Probabilities of an agent's choices.

    Attributes:
        plan_first: both agents of a rollout start with a plan (sampled once a rollout, so pairs plan at this rate).
        plan_if_told: the same for tasks whose text says that the partner edits the shared file too, if it is higher.
        follow_through: an agent does its part (sampled once an agent); else it idles and submits an empty patch.
        keep_division: an agent that planned keeps to the division; else it exports its own function and no other.
        verbose_think: a turn starts with a think block.
        wrong_edit: the agent's function has another number or another operation.
        look_around: the agent reads the shared file first.
        reword: an agent chooses between two wordings of its plan; else it uses the first. A student can copy such a
            choice only as chance, which costs it sharpness at temperature 1 (docs/dividend.md).
        report: an agent that did not plan tells its partner about its addition.
        markdown: a turn's command is in a fenced block instead of a tool call.
        malformed: a turn has no parsable command and is repeated.
    """

    plan_first: float = 0.957
    plan_if_told: float = 0.0
    follow_through: float = 0.957
    keep_division: float = 1.0
    verbose_think: float = 0.5
    wrong_edit: float = 0.1
    look_around: float = 0.1
    reword: float = 0.0
    report: float = 0.3
    markdown: float = 0.0
    malformed: float = 0.0


class CoopTinySharedPolicy:
    """Scripted policy: `policy(request)` returns the text of the next turn, from the observations so far.

    It reads `request.privileged` ("payload": the task's): of the partner's feature it uses nothing.
    """

    def __init__(self, skill: SharedSkill, seed: int = 0) -> None:
        self.skill, self.seed = skill, seed

    def __call__(self, request: Request) -> str:
        rollout, _, agent_id = request.session.rpartition("/")
        observations = [m["content"] for m in request.messages if m["role"] in ("user", "tool")][1:]
        payload = request.privileged["payload"]
        chance = max(self.skill.plan_first, self.skill.plan_if_told if payload["told"] else 0.0)
        plans = random.Random(f"{self.seed}/{rollout}").random() < chance
        rng = random.Random(f"{self.seed}/{rollout}/{agent_id}")
        turns = _Agent(self.skill, plans, rng, payload, agent_id).turns()
        text = next(turns)
        for observation in observations:
            text = turns.send(observation)
        return text


Turns = Generator[str, str, None]
Step = Generator[str, str, str]
"""Yields the turns of one command, returns its observation."""


class _Agent:
    """One agent at one task."""

    def __init__(
        self, skill: SharedSkill, plans: bool, rng: random.Random, payload: Mapping[str, Any], agent_id: str
    ) -> None:
        self.skill, self.plans, self.rng, self.agent_id = skill, plans, rng, agent_id
        role = next(role for role in payload["roles"] if role["agent_id"] == agent_id)
        feature = payload["features"][role["feature_id"]]
        self.wanted = wanted_formula(feature)
        self.shared = feature["path"]
        self.export = export(feature["module"], feature["function"]).rstrip("\n")
        self.partner = role["partner"]
        self.words = {
            "fn": feature["function"],
            "path": feature["module"],
            "shared": self.shared,
            "partner": self.partner,
            "export": self.export,
        }

    def turns(self) -> Turns:
        """Yield the turns of the whole conversation; the last one, a submission, repeats."""
        follows, keeps = self._happens("follow_through"), self._happens("keep_division")
        owner, received = self.agent_id == AGENTS[0], None
        if self.plans:
            observation = yield from self._message(self._plans(owner), "think_plan")
            received = _EXPORT.search(observation) if "INBOX" in observation else None
        if self._happens("look_around"):
            yield from self._do(f"cat {self.shared}", "think_read")
        if not follows:
            yield from self._dawdle()
        else:
            yield from self._do(self._add_function(), "think_add")
            if not (self.plans and keeps):
                yield from self._export(self.export)
            elif owner:
                yield from self._export(self.export, *([received[0]] if received else ()))
            if not self.plans and self._happens("report"):
                yield from self._message(_WORDINGS["reports"], "think_report")
        while True:
            yield from self._do(SUBMIT, "think_submit")

    def _plans(self, owner: bool) -> Sequence[str]:
        texts, reword = _WORDINGS["owner_plans" if owner else "plans"], self.skill.reword
        return texts if reword == 1 or (reword and self._happens("reword")) else texts[:1]

    def _add_function(self) -> str:
        formula = self._wrong_formula() if self._happens("wrong_edit") else self.wanted
        line = definition(self.words["fn"], formula.code).rstrip("\n")
        return f"echo '{line}' >> {self.words['path']}"

    def _wrong_formula(self) -> Formula:
        operation, number = self.wanted.operation, self.wanted.number
        if self.rng.random() < 0.3:
            return Formula(self.rng.choice([name for name in OPERATIONS if name != operation]), number)
        return Formula(operation, self.rng.choice([n for n in (number - 1, number + 1, number + 10) if n in NUMBERS]))

    def _export(self, *lines: str) -> Step:
        text = "\n".join(lines)
        return (yield from self._do(f"cat >> {self.shared} <<'EOF'\n{text}\nEOF", "think_export"))

    def _dawdle(self) -> Turns:
        """Idle: run commands that name no file and no function."""
        for command in self.rng.choice((("ls",), ("ls", "ls"), ("echo waiting", "ls"), ("echo waiting",))):
            yield from self._do(command, "think_dawdle")

    def _message(self, texts: Sequence[str], thoughts: str) -> Step:
        text = self.rng.choice(texts).format(**self.words)
        return (yield from self._do(f"send_message {self.partner} <<'MSG'\n{text}\nMSG", thoughts))

    def _do(self, command: str, thoughts: str) -> Step:
        """Send a command, a second time if the first attempt is malformed."""
        if self._happens("malformed"):
            yield self._think(thoughts) + self.rng.choice(_WORDINGS["malformed"]).format(command=command)
        action = format_action(command, "fenced" if self._happens("markdown") else "xml")
        return (yield f"{self._think(thoughts)}{action}")

    def _think(self, occasion: str) -> str:
        if not self._happens("verbose_think"):
            return ""
        sentences = [
            self.rng.choice(_WORDINGS[occasion]),
            *self.rng.sample(_WORDINGS["musings"], k=self.rng.randint(1, 2)),
        ]
        return think_block(" ".join(sentences).format(**self.words))

    def _happens(self, what: str) -> bool:
        return self.rng.random() < getattr(self.skill, what)


_WORDINGS: Mapping[str, Sequence[str]] = tomllib.loads(Path(__file__).with_name("script.toml").read_text("utf-8"))
"""Occasion -> alternative wordings."""
