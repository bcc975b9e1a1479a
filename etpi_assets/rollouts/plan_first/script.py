"""What an agent of a templated plan-first conversation writes, turn by turn.

Belongs here: the phrases, the order of the steps, the form of a call. Does not belong here: which files are named
(`paths`), or playing the turns (`rehearsal`).

Every turn is read back by the parser that inference uses before it is given out: a turn that would not be understood
there is an error here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from etpi_assets.agent.actions import format_action, read_actions
from etpi_assets.agent.loop import SUBMIT
from etpi_assets.specs.rollout_set import TemplatedSection

WAITING = "echo waiting"


@dataclass(frozen=True)
class Seat:
    """One agent's place: who it is, whom it writes to, its own file and its partner's, whether it speaks first."""

    agent_id: str
    partner: str
    own: str
    other: str
    first: bool


def turns(seat: Seat, section: TemplatedSection, rng: random.Random) -> list[str]:
    """The agent's turns in order, the last one submits. Raises ValueError where one does not read back."""
    words = {"partner": seat.partner, "own": seat.own, "other": seat.other}
    if seat.first or section.second == "plan":
        # A partner that waits first answers a round later, and bash before its answer would not be planning first.
        opening = [_message(seat, rng.choice(_PLANS), rng.choice(_BEFORE_PLAN), section, section.second == "wait")]
    else:
        opening = [
            _bash(WAITING, rng.choice(_BEFORE_WAIT).format(**words), section),
            _message(seat, rng.choice(_ANSWERS), rng.choice(_BEFORE_ANSWER), section, False),
        ]
    work = [
        (f"cat {seat.own}", _BEFORE_READ),
        (f"sed -i 's/[[:space:]]*$//' {seat.own}", _BEFORE_EDIT),
        (f"git diff --stat {seat.own}", _BEFORE_DIFF),
        (f"echo {SUBMIT}", _BEFORE_SUBMIT),
    ]
    return opening + [_bash(command, rng.choice(said).format(**words), section) for command, said in work]


def _bash(command: str, prose: str, section: TemplatedSection) -> str:
    text = _turn(prose, command, section)
    actions, error = read_actions(text)
    if error or [(a.kind, a.command) for a in actions] != [("bash", command)]:
        raise ValueError(f"the turn {text!r} reads back as {actions or error}, not as the command {command!r}")
    return text


def _message(seat: Seat, template: str, prose: str, section: TemplatedSection, wait: bool) -> str:
    message = template.format(partner=seat.partner, own=seat.own, other=seat.other)
    command = f"send_message {'--wait ' * wait}{seat.partner} <<'MSG'\n{message}\nMSG"
    text = _turn(prose.format(partner=seat.partner), command, section)
    actions, error = read_actions(text)
    read = [(a.kind, a.to, a.message, a.pure, a.wait) for a in actions]
    if error or read != [("send_message", seat.partner, message, True, wait)]:
        raise ValueError(f"the turn {text!r} reads back as {actions or error}, not as a message to {seat.partner}")
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
_BEFORE_READ: Sequence[str] = ("Now my part: I read {own}.", "The split is clear, let me look at {own}.")
_BEFORE_EDIT: Sequence[str] = ("I make the change in {own}.", "This is the edit that {own} needs.")
_BEFORE_DIFF: Sequence[str] = ("Let me see what changed.", "I check that only my file changed.")
_BEFORE_SUBMIT: Sequence[str] = ("My part is done.", "That is all of my piece, so I submit.")
