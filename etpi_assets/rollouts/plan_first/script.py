"""The script of a templated plan-first conversation: phrases, order of the steps, form of a call.

Every turn is parsed back by the parser that inference uses; a turn that this parser does not understand is an error.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from etpi_assets.agent.actions import format_action, read_actions
from etpi_assets.agent.loop import SUBMIT
from etpi_assets.specs.rollout_set import TemplatedSection

WAITING = "echo waiting"
TESTS = "pytest"


@dataclass(frozen=True)
class PlanFirstAgent:
    """One agent of the script: its id, its partner's, the file that each of them changes, whether it writes first."""

    agent_id: str
    partner: str
    own_file: str
    partner_file: str
    first: bool

    @property
    def words(self) -> dict[str, str]:
        """Values of the placeholders in the phrases."""
        return {"partner": self.partner, "own": self.own_file, "other": self.partner_file}


def write_turns(agent: PlanFirstAgent, section: TemplatedSection, rng: random.Random) -> list[str]:
    """Write the agent's turns in order; the last one submits. Raises ValueError if a turn does not parse back."""
    if agent.first or section.second == "plan":
        # A partner that waits first answers a round later. Bash before its answer would not be plan-first.
        opening = [_message(agent, rng.choice(_PLANS), rng.choice(_BEFORE_PLAN), section, section.second == "wait")]
    elif section.second == "acknowledge":
        opening = [_message(agent, rng.choice(_ANSWERS), rng.choice(_BEFORE_ACKNOWLEDGEMENT), section, False)]
    else:
        opening = [
            _bash(WAITING, rng.choice(_BEFORE_WAIT).format(**agent.words), section),
            _message(agent, rng.choice(_ANSWERS), rng.choice(_BEFORE_ANSWER), section, False),
        ]
    work = [
        (f"cat {agent.own_file}", _BEFORE_READ),
        (f"sed -i 's/[[:space:]]*$//' {agent.own_file}", _BEFORE_EDIT),
        (f"git diff --stat {agent.own_file}", _BEFORE_DIFF),
        *([(TESTS, _BEFORE_TESTS)] if section.run_tests else []),
        (f"echo {SUBMIT}", _BEFORE_SUBMIT),
    ]
    return opening + [_bash(command, rng.choice(phrases).format(**agent.words), section) for command, phrases in work]


def _bash(command: str, prose: str, section: TemplatedSection) -> str:
    text = _turn(prose, command, section)
    actions, error = read_actions(text)
    if error or [(a.kind, a.command) for a in actions] != [("bash", command)]:
        raise ValueError(f"the turn {text!r} parses back as {actions or error}, not as the command {command!r}")
    return text


def _message(agent: PlanFirstAgent, template: str, prose: str, section: TemplatedSection, wait: bool) -> str:
    message = template.format(**agent.words)
    command = f"send_message {'--wait ' * wait}{agent.partner} <<'MSG'\n{message}\nMSG"
    text = _turn(prose.format(partner=agent.partner), command, section)
    actions, error = read_actions(text)
    parsed = [(a.kind, a.to, a.message, a.pure, a.wait) for a in actions]
    if error or parsed != [("send_message", agent.partner, message, True, wait)]:
        raise ValueError(f"the turn {text!r} parses back as {actions or error}, not as a message to {agent.partner}")
    return text


def _turn(prose: str, command: str, section: TemplatedSection) -> str:
    if section.calls == "runtime":
        return f"{prose}\n\n{format_action(command)}"
    return f"{prose} <tool_call><function=bash><parameter=command>\n{command}\n</parameter></function></tool_call>"


_PLANS: Sequence[str] = (
    "Plan: I'll handle {own} first, you handle {other}. No overlap after that.",
    "Here is the plan, so that we split the work: I'll take {own}, you take {other}.",
    "First step: I'll change {own}. Can you take {other}? Tell me if the plan does not suit you.",
    "Let's split it. My plan is {own} for me and {other} for you.",
)
_ANSWERS: Sequence[str] = (
    "Acknowledged, the plan is fine: I'll do {own} and you keep {other}.",
    "Agreed with the split. I'll take {own} first, you take {other}.",
)
_BEFORE_PLAN: Sequence[str] = (
    "Before I start editing, let me coordinate with {partner} so that we do not touch the same file.",
    "I should agree with {partner} on who does what before I run anything.",
)
_BEFORE_WAIT: Sequence[str] = ("{partner} speaks first, so I check whether a message has come.",)
_BEFORE_ANSWER: Sequence[str] = ("{partner} has sent a plan; I confirm it before I start.",)
_BEFORE_ACKNOWLEDGEMENT: Sequence[str] = (
    "{partner} plans who does what; I say first that I keep to it, then I work.",
    "I answer {partner} before I run anything, so that both of us know the split.",
)
_BEFORE_READ: Sequence[str] = ("Now my part: I read {own}.", "The split is clear, let me look at {own}.")
_BEFORE_EDIT: Sequence[str] = ("I make the change in {own}.", "This is the edit that {own} needs.")
_BEFORE_DIFF: Sequence[str] = ("Let me see what changed.", "I check that only my file changed.")
_BEFORE_TESTS: Sequence[str] = ("I run the tests before I submit.", "Do the tests still pass?")
_BEFORE_SUBMIT: Sequence[str] = ("My part is done.", "That is all of my piece, so I submit.")
