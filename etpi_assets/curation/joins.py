"""Join imported rollouts that share turns into prefix trees by content, so that one turn is trained once.

A run saved after each step, one row per request with its history, retries and copies have the same turns after the same
messages. Of each such turn one rollout trains it: one that has its thoughts before those without, then the longest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from etpi_assets.checks import outcome
from etpi_assets.trajectories.records import UNTRAINED
from etpi_resources.chat.marks import split_thought
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.token_ids import arrays

COLUMNS = {
    "rollouts": ("rollout_id", "tools"),
    "turns": ("rollout_id", "agent_id", "turn", "suffix_ids", "output_ids"),
    "messages": ("rollout_id", "agent_id", "turn", "role", "kind", "content", "reasoning", "tool_calls"),
}
_LONG = 120
"""Characters of a turn that two runs do not have in common by chance."""


class TurnKey(NamedTuple):
    """Numbers of one turn, equal in other rollouts with the same content.

    Attributes:
        place: the tools, and all messages through the turn without thoughts; with the ids of turns that have ids.
        thought: the turn's thoughts; 0 if it has none.
        alone: the turn's text and calls, and the task's text, whatever is between them; 0 if they are short.
    """

    place: int
    thought: int
    alone: int


Paths = Mapping[str, Sequence[TurnKey]]
"""Agent -> the keys of its turns, in order."""


def paths_of(block: Mapping[str, pa.Table]) -> dict[str, Paths]:
    """Return rollout -> the keys of its turns, for a block of rollouts (the tables and columns of `COLUMNS`)."""
    tools = dict(zip(*(block["rollouts"][name].to_pylist() for name in COLUMNS["rollouts"]), strict=True))
    paths = {name: defaultdict[str, list[TurnKey]](list) for name in tools}
    ids = _ids(block["turns"])
    state: dict[tuple[str, str], _Agent] = {}
    for row in block["messages"].select(COLUMNS["messages"]).to_pylist():
        if re.match(UNTRAINED, row["kind"]):
            continue
        key = row["rollout_id"], row["agent_id"]
        if key not in state:
            state[key] = _Agent(_number((tools[key[0]] or "").removeprefix("[]")))
        state[key].add(row, paths[key[0]][key[1]], ids)
    return {name: dict(of_agents) for name, of_agents in paths.items()}


@dataclass
class _Agent:
    """One conversation while it is read: the key of its messages so far, its task's text, and its last turn."""

    place: int
    task: int = 0
    turn: int | None = None
    messages: list[Any] = field(default_factory=list)

    def add(self, row: Mapping[str, Any], turns: list[TurnKey], ids: Mapping[tuple[str, str, int], bytes]) -> None:
        content, thought = row["content"] or "", None
        if row["role"] == "assistant":
            split = split_thought(content, row["reasoning"])
            content, thought = split.rest.strip(), split.inside
        elif not self.task and row["role"] == "user":
            self.task = _number(content)
        message = [row["role"], content, _calls(row["tool_calls"])]
        if row["kind"] != "action":
            self.place, self.turn = _number(self.place, message), None
            return
        again = row["turn"] == self.turn  # one turn may have several messages
        recorded = ids.get((row["rollout_id"], row["agent_id"], row["turn"]), b"") if not again else b""
        self.place, self.turn = _number(self.place, message, recorded.hex()), row["turn"]
        self.messages = [*self.messages, message] if again else [message]
        text = orjson.dumps(self.messages)
        alone = _number(self.task, self.messages) if len(text) >= _LONG else 0
        inside = _number(thought) if thought and thought.strip() else 0
        key = TurnKey(self.place, (turns[-1].thought if again else 0) or inside, alone)
        if again:
            turns[-1] = key
        else:
            turns.append(key)


def _ids(turns: pa.Table) -> dict[tuple[str, str, int], bytes]:
    """Return (rollout, agent, turn) -> the ids that a turn adds, for turns with recorded ids."""
    recorded = turns.filter(turns["output_ids"].is_valid())
    keys = zip(*(recorded[name].to_pylist() for name in ("rollout_id", "agent_id", "turn")), strict=True)
    parts = ((ids for chunk in recorded[name].chunks for ids in arrays(chunk)) for name in COLUMNS["turns"][3:])
    return {
        key: hashlib.blake2b(b"".join(b"" if p is None else p.tobytes() for p in both), digest_size=8).digest()
        for key, *both in zip(keys, *parts, strict=True)
    }


def _calls(text: str | None) -> list[Any]:
    """Return the calls of a message without their ids, which differ from one save to the next."""
    calls = orjson.loads(text) if text else []
    functions = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    return [{k: v for k, v in f.items() if k not in ("id", "type")} if isinstance(f, dict) else f for f in functions]


def _number(*values: Any) -> int:
    return int.from_bytes(hashlib.blake2b(orjson.dumps(values), digest_size=8).digest(), "big") or 1


@dataclass(frozen=True)
class Joined:
    """Rollouts and turns that other rollouts have too.

    Attributes:
        covered: rollout without a turn of its own -> (the rollout that has its last turn, whether both are equal).
        repeated: rollout -> agent -> the numbers, from 0, of the turns that others train.
    """

    covered: Mapping[str, tuple[str, bool]]
    repeated: Mapping[str, Mapping[str, Sequence[int]]]


def join(rollouts: Sequence[str], paths: Mapping[str, Paths]) -> Joined:
    """Return which of the rollouts have turns that others train; earlier rollouts come before later ones."""
    known = [name for name in rollouts if any(paths.get(name, {}).values())]
    size = {name: sum(map(len, paths[name].values())) for name in known}
    thoughtful = {key.place: name for name in known for turns in paths[name].values() for key in turns if key.thought}
    owners: dict[tuple[int, int], str] = {}
    covered: dict[str, tuple[str, bool]] = {}
    repeated: dict[str, dict[str, list[int]]] = {}
    for name in sorted(known, key=lambda name: -size[name]):
        repeats: dict[str, list[int]] = defaultdict(list)
        trainer, unique = "", []
        for agent, turns in paths[name].items():
            for number, key in enumerate(turns):
                by = None if key.thought else thoughtful.get(key.place)
                if by is None and (by := owners.get(key[:2])) is None:
                    unique.append(key[:2])
                    continue
                trainer = by
                repeats[agent].append(number)
        if unique:
            owners |= dict.fromkeys(unique, name)
            repeated |= {name: dict(repeats)} if repeats else {}
        else:
            covered[name] = trainer, size[trainer] == size[name]
    return Joined(covered, repeated)


def once_outcome(selected: pa.Table, paths: Mapping[str, Paths]) -> CheckOutcome:
    """Warn of long turns of one task that several selected rollouts train after different messages.

    Args:
        selected: the table of that name.
    """
    columns = zip(selected["rollout_id"].to_pylist(), selected["repeated"].to_pylist(), strict=True)
    repeated = {name: json.loads(text) if text else {} for name, text in columns}
    trained: dict[int, set[int]] = defaultdict(set)
    rollouts: dict[int, set[str]] = defaultdict(set)
    for name, skips in repeated.items():
        for agent, turns in paths.get(name, {}).items():
            skipped = set(skips.get(agent, ()))
            for number, key in enumerate(turns):
                if key.alone and number not in skipped:
                    trained[key.alone].add(key.place)
                    rollouts[key.alone].add(name)
    again = [alone for alone, places in trained.items() if len(places) > 1 and len(rollouts[alone]) > 1]
    turns = sum(len(trained[alone]) - 1 for alone in again)
    involved = {name for alone in again for name in rollouts[alone]}
    repeats = sum(len(numbers) for agents in repeated.values() for numbers in agents.values())
    figures = {"joined_turns": repeats, "repeated_turns": turns, "rollouts": len(involved)}
    return outcome("turns_trained_once", not turns if paths else None, figures, first=min(involved, default=""))
