"""The scripted policy of `coop_tiny`; its skill sets how well it works.

The agent is a generator that yields turns and receives observations. It keeps no state between requests: each request
replays the observations so far, so a turn depends only on (seed, rollout, agent, observations).
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from etpi_assets.agent.actions import format_action
from etpi_assets.worlds.coop_tiny_shared import features
from etpi_assets.worlds.coop_tiny_shared.features import Formula
from etpi_assets.worlds.skill import PolicySkill
from etpi_lab.worlds.coop_tiny.formulas import parse_formula
from etpi_resources.engines import Request

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@dataclass(frozen=True)
class CoopTinySkill(PolicySkill):
    """Probabilities of an agent's choices.

    Attributes:
        plan_first: both agents of a rollout start with a plan (sampled once a rollout, so pairs plan at this rate).
        follow_through: an agent does its part (sampled once an agent); else it idles and submits an empty patch.
        verbose_think: a turn starts with a long think block.
        wrong_edit: an agent's first edit is wrong in one of several ways.
        notice: the agent corrects its edit if the visible check fails.
        run_check: the agent runs the visible check after an edit.
        look_around: the agent lists the files first.
        ack: the agent answers a received plan in an extra turn.
        report: an agent that did not plan tells its partner about its change.
        markdown: a turn's command is in a fenced block instead of a tool call.
        malformed: a turn has no parsable command and is repeated.
    """

    plan_first: float = 0.957
    follow_through: float = 0.957
    verbose_think: float = 0.5
    wrong_edit: float = 0.1
    notice: float = 0.6
    run_check: float = 0.9
    look_around: float = 0.1
    ack: float = 0.05
    report: float = 0.3
    markdown: float = 0.0
    malformed: float = 0.0


BASE_HABITS = CoopTinySkill(
    plan_first=0.02,
    follow_through=1.0,
    verbose_think=0.6,
    wrong_edit=0.15,
    notice=0.6,
    run_check=0.85,
    look_around=0.3,
    ack=0.1,
    report=0.3,
    markdown=0.1,
    malformed=0.03,
)
"""Habits in the base model's corpus: a competent agent that starts with bash and thinks a lot."""


class CoopTinyPolicy:
    """Scripted policy: `policy(request)` returns the text of the next turn.

    It reads `request.privileged` ("payload": the task's, "role": the agent's role) and the observations.
    """

    def __init__(self, skill: CoopTinySkill, seed: int = 0) -> None:
        self.skill, self.seed = skill, seed

    def __call__(self, request: Request) -> str:
        rollout, _, agent_id = request.session.rpartition("/")
        observations = [m["content"] for m in request.messages if m["role"] in ("user", "tool")][1:]
        agent = _Agent(
            self.skill,
            random.Random(f"{self.seed}/{rollout}").random() < self.skill.plan_first,
            random.Random(f"{self.seed}/{rollout}/{agent_id}"),
            request.privileged["payload"],
            agent_id,
        )
        turns = agent.turns()
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
        self, skill: CoopTinySkill, plans: bool, rng: random.Random, payload: Mapping[str, Any], agent_id: str
    ) -> None:
        self.skill, self.plans, self.rng = skill, plans, rng
        role = next(role for role in payload["roles"] if role["agent_id"] == agent_id)
        own_feature, other = (
            payload["features"][role["feature_id"]],
            next(feature for key, feature in payload["features"].items() if key != role["feature_id"]),
        )
        self.wanted = Formula(own_feature["operation"], own_feature["number"])
        self.current = parse_formula(own_feature["current"])
        self.check = f"python3 {payload['check']} {own_feature['function']}"
        self.partner = role["partner"]
        self.words = {
            "fn": own_feature["function"],
            "path": own_feature["path"],
            "pfn": other["function"],
            "ppath": other["path"],
            "partner": self.partner,
            "code": own_feature["wanted"],
        }

    def turns(self) -> Turns:
        """Yield the turns of the whole conversation; the last one, a submission, repeats."""
        follows = self._happens("follow_through")
        if self.plans:
            observation = yield from self._message(_PLANS, _THINK_PLAN)
            if "INBOX" in observation and self._happens("ack"):
                yield from self._message(_ACKS, _THINK_ACK)
        if self._happens("look_around"):
            yield from self._do("ls", _THINK_LIST)
        if follows:
            yield from self._work()
        else:
            yield from self._dawdle()
        while True:
            yield from self._do(SUBMIT, _THINK_SUBMIT)

    def _work(self) -> Turns:
        path = self.words["path"]
        yield from self._do(f"cat {path}", _THINK_READ)
        right = _edit(self.words["fn"], self.wanted.code, path)
        if self._happens("wrong_edit"):
            yield from self._do(self._wrong_edit(), _THINK_EDIT)
        else:
            yield from self._do(right, _THINK_EDIT)
        if self._happens("run_check"):
            observation = yield from self._do(self.check, _THINK_CHECK)
            if "[exit 1]" in observation and self._happens("notice"):
                yield from self._do(right, _THINK_MEND)
                yield from self._do(self.check, _THINK_CHECK)
        if not self.plans and self._happens("report"):
            yield from self._message(_REPORTS, _THINK_REPORT)

    def _dawdle(self) -> Turns:
        """Idle: run commands that name no file and no function."""
        for command in self.rng.choice((("ls",), ("ls", "ls"), ("echo waiting", "ls"), ("echo waiting",))):
            yield from self._do(command, _THINK_DAWDLE)

    def _wrong_edit(self) -> str:
        """Return an edit with a typical mistake: another number, another operation, the partner's function, or no
        address, so that every function of the module changes."""
        fn, path, wanted = self.words["fn"], self.words["path"], self.wanted
        kind = self.rng.choices(("number", "operation", "partner", "everywhere"), weights=(4, 2, 1, 1))[0]
        if kind == "partner":
            return _edit(self.words["pfn"], wanted.code, self.words["ppath"])
        if kind == "everywhere":
            return f"sed -i 's/return .*/return {wanted.code}/' {path}"
        if kind == "operation":
            operation = self.rng.choice([name for name in features.OPERATIONS if name != wanted.operation])
            return _edit(fn, Formula(operation, wanted.number).code, path)
        numbers = [n for n in (wanted.number - 1, wanted.number + 1, wanted.number + 10) if n in features.NUMBERS]
        return _edit(fn, Formula(wanted.operation, self.rng.choice(numbers)).code, path)

    def _message(self, texts: tuple[str, ...], thoughts: tuple[str, ...]) -> Step:
        text = self.rng.choice(texts).format(**self.words)
        form = self.rng.random()
        if form < 0.75:
            command = f"send_message {self.partner} <<'MSG'\n{text}\nMSG"
        elif form < 0.8:
            command = f"send_message --wait {self.partner} <<'MSG'\n{text}\nMSG"
        else:
            command = f'send_message {self.partner} "{text}"'
        return (yield from self._do(command, thoughts))

    def _do(self, command: str, thoughts: tuple[str, ...]) -> Step:
        """Send a command, a second time if the first attempt is malformed."""
        if self._happens("malformed"):
            yield self._think(thoughts) + self.rng.choice(_MALFORMED).format(command=command)
        action = format_action(command, "fenced" if self._happens("markdown") else "xml")
        return (yield f"{self._think(thoughts)}{action}")

    def _think(self, thoughts: tuple[str, ...]) -> str:
        if not self._happens("verbose_think"):
            return ""
        sentences = [self.rng.choice(thoughts), *self.rng.sample(_MUSINGS, k=self.rng.randint(1, 3))]
        return f"<think>\n{' '.join(sentences).format(**self.words)}\n</think>\n\n"

    def _happens(self, what: str) -> bool:
        return self.rng.random() < getattr(self.skill, what)


def _edit(function: str, code: str, path: str) -> str:
    return f"sed -i '/def {function}/,/return/s/return .*/return {code}/' {path}"


_PLANS = (
    "Plan: I'll take {fn} in {path} first, you take {pfn} in {ppath}.",
    "Here is the plan: I'll do {fn} in {path} first and you do {pfn} in {ppath}.",
    "Let's split the work: I'll change {fn} in {path}, you change {pfn} in {ppath}.",
    "First step: I'll edit {fn} in {path}. You edit {pfn} in {ppath}.",
    "My plan is to take {fn} in {path} first. Can you take {pfn} in {ppath}?",
)
_ACKS = (
    "OK, I'll keep to {fn} in {path}, you keep to {pfn} in {ppath}.",
    "Agreed, you do {pfn} in {ppath} and I'll do {fn} in {path}.",
)
_REPORTS = ("I changed {fn} in {path}.", "{fn} in {path} is done.", "I am done with {fn} in {path}.")
_MALFORMED = (
    "I will run this now: {command}",
    "<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n",
)

_THINK_PLAN = (
    "Before I start {partner} should know what I do. I take {fn} in {path} and {pfn} is left to {partner}.",
    "We are two, so we should agree first. My part is {fn} in {path}, the other one is {pfn} in {ppath}.",
)
_THINK_ACK = ("{partner} has sent a plan. It fits mine, so I say that I agree.",)
_THINK_REPORT = ("{partner} should know that my part is done.",)
_THINK_LIST = ("Let me see which files there are before I open one.", "I want to see the files first.")
_THINK_READ = (
    "I have to change {fn}, so I look at {path} first.",
    "Let me read {path} to see how {fn} is written now.",
)
_THINK_EDIT = (
    "Now I change the line of {fn} in {path}. The rest of the file stays as it is.",
    "The function {fn} has one line to change and sed can do that in {path}.",
)
_THINK_CHECK = ("The edit is made, so let me see if {fn} is right now.", "I run the check of {fn}.")
_THINK_MEND = ("The check says that {fn} is wrong. I read the task again and edit {path} once more.",)
_THINK_SUBMIT = ("I am done with {fn}, so I submit.", "There is nothing left to do, so I submit now.")
_THINK_DAWDLE = ("I wait and see what {partner} does.", "I am not sure what to do next, let me look around.")
_MUSINGS = (
    "It is a small change.",
    "I should be careful with the names.",
    "The task says what the result should be.",
    "The function of {partner} is not mine.",
    "One command is enough for this.",
    "After that I can go on with the next step.",
    "Let me think about it once more.",
    "I must not touch the other functions.",
)
