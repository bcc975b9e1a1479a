"""A rollout as a conversation of all its agents on one clock, from rows of the tables, for the templates."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from etpi_resources.chat.marks import THINK, split_thought
from etpi_resources.outside import loads

_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)|```.*?(?:```|\Z)|^\[tool_use [^\n]*$", re.DOTALL | re.MULTILINE)
"""Calls in the forms that the agent and importers read; they are shown as commands and messages."""

EVERYBODY = "all"
"""The receiver of a broadcast."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class SentMessage:
    """A message, with the turn that sent it and the turn in whose observation its receiver read it (None: never)."""

    sender: str
    receiver: str
    text: str
    sent_in: int | None
    received_in: int | None = None


@dataclass(frozen=True)
class ShownTurn:
    """One turn as a page shows it.

    Attributes:
        row: the stored turn.
        thought: the think block, or the reasoning that the engine returned separately.
        prose: the text beside the calls; the whole text if no action could be read.
        commands: the commands, without messages.
        sent, received: messages that the turn sent, and those that its observation showed.
    """

    agent: str
    turn: int
    row: Row
    thought: str
    prose: str
    commands: Sequence[Mapping[str, Any]]
    sent: Sequence[SentMessage]
    received: Sequence[SentMessage]


@dataclass
class ShownAgent:
    """An agent, with its prompts."""

    agent_id: str
    number: int
    row: Row
    prompts: list[Row] = field(default_factory=list)
    turns: int = 0


@dataclass(frozen=True)
class Conversation:
    """Agents and rounds. A round has a turn of each agent, or None.

    Attributes:
        clock: "round" where the agents advance together, "time" where turns are ordered by when they ended, "number"
            where only their numbers are known.
    """

    agents: Sequence[ShownAgent]
    rounds: Sequence[Sequence[ShownTurn | None]]
    clock: str


def read_conversation(
    agents: Sequence[Row], turns: Sequence[Row], prompts: Sequence[Row], recorded: bool = False
) -> Conversation:
    """Build the conversation of one rollout.

    Args:
        turns: in the order of agents and turns.
        prompts: the messages before the first turn, and others that belong to no turn.
        recorded: whether another program recorded it, whose agents do not advance in rounds: turns are then ordered by
            their times, if all are known.
    """
    names = list(dict.fromkeys([*(a["agent_id"] for a in agents), *(t["agent_id"] for t in turns)]))
    rows = {agent["agent_id"]: agent for agent in agents}
    shown_agents = [ShownAgent(name, place + 1, rows.get(name, {})) for place, name in enumerate(names)]
    for agent in shown_agents:
        agent.prompts = [p for p in prompts if p["agent_id"] == agent.agent_id]
        agent.turns = sum(turn["agent_id"] == agent.agent_id for turn in turns)
    shown = _with_mail([_shown(turn) for turn in turns])
    timed = recorded and len(names) > 1 and all(turn.row["finished_at"] for turn in shown)
    rounds = list(_by_time(shown, names)) if timed else list(_by_round(shown, names))
    return Conversation(shown_agents, rounds, "time" if timed else "number" if recorded else "round")


def _shown(row: Row) -> ShownTurn:
    parts = split_thought(row["content"] or "", row["reasoning"])
    thought, text = (parts.inside or "").strip(), parts.rest.strip()
    if parts.opened:
        thought, text = text.removeprefix(THINK).strip(), ""
    actions = _list(row["actions"])
    sent = [
        SentMessage(row["agent_id"], str(a.get("to") or EVERYBODY), str(a.get("message") or ""), row["turn"])
        for a in actions
        if a.get("kind") == "send_message"
    ]
    received = [
        SentMessage(str(m.get("from")), row["agent_id"], str(m.get("message")), None, row["turn"])
        for m in _list(row["inbox"])
    ]
    prose = _CALL.sub("", text).strip() if actions else text
    commands = [a for a in actions if a.get("kind") != "send_message"]
    return ShownTurn(row["agent_id"], row["turn"], row, thought, prose, commands, sent, received)


def _list(text: str | None) -> list[dict[str, Any]]:
    """Return a JSON list of objects; nothing for text that is none, since imported rows can be anything."""
    try:
        value = loads(text or "[]")
    except ValueError:
        return []
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _with_mail(turns: Sequence[ShownTurn]) -> list[ShownTurn]:
    """Return the turns with each received message joined to the turn that sent it."""
    letters = [letter for turn in turns for letter in turn.sent]
    read_in: dict[int, int | None] = {}
    joined = []
    for turn in turns:
        received = []
        for mail in turn.received:
            place = _find_letter(mail, letters, read_in)
            received.append(mail if place is None else replace(mail, sent_in=letters[place].sent_in))
            # A broadcast is read by several agents, so it stays unread.
            if place is not None and letters[place].receiver != EVERYBODY:
                read_in[place] = mail.received_in
        joined.append(replace(turn, received=received))
    places = {id(letter): place for place, letter in enumerate(letters)}
    return [
        replace(turn, sent=[replace(letter, received_in=read_in.get(places[id(letter)])) for letter in turn.sent])
        for turn in joined
    ]


def _find_letter(mail: SentMessage, letters: Sequence[SentMessage], read: Container[int]) -> int | None:
    """Return the index of the earliest unread sent message that matches a received one."""
    for place, letter in enumerate(letters):
        to_reader = letter.sender == mail.sender and letter.receiver in (mail.receiver, EVERYBODY)
        if place not in read and to_reader and letter.text.strip() == mail.text.strip():
            return place
    return None


def _by_round(turns: Sequence[ShownTurn], names: Sequence[str]) -> Iterator[list[ShownTurn | None]]:
    cells = {(turn.agent, turn.turn): turn for turn in turns}
    for number in sorted({turn.turn for turn in turns}):
        yield [cells.get((name, number)) for name in names]


def _by_time(turns: Sequence[ShownTurn], names: Sequence[str]) -> Iterator[list[ShownTurn | None]]:
    """Yield rows in the order of time; turns of different agents that follow each other share a row."""
    row: list[ShownTurn | None] = [None] * len(names)
    for turn in sorted(turns, key=lambda t: (t.row["finished_at"], t.agent, t.turn)):
        place = names.index(turn.agent)
        if any(row[place:]):  # a row is in the order of time from left to right
            yield row
            row = [None] * len(names)
        row[place] = turn
    if any(row):
        yield row
