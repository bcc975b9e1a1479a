"""Convert rollout records to the tables `rollouts`, `agents`, `turns` and `messages` and back, without loss.

A prompt that extends an earlier turn's prompt + output exactly, id for id, is stored as that turn's number and the ids
it adds; any other prompt is stored whole. So a session of n turns is stored once instead of n times.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import chain
from json.encoder import encode_basestring
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.trajectories.records import Action, AgentRecord, Message, RolloutRecord, Turn
from etpi_resources.lake.schemas import TABLES as SCHEMAS
from etpi_resources.lake.schemas import from_tuples
from etpi_resources.lake.stored import Rows, batches, no_rows
from etpi_resources.token_ids import GrowingIds, arrays, begins_with, common_prefix

Key = tuple[str, str, int]
Decode = Callable[[Sequence[int]], str]

TableRows = dict[str, list[tuple[Any, ...]]]
"""Table -> rows, values in the order of its columns."""

TABLES = ("rollouts", "agents", "turns", "messages")
_TURN_FIELDS = tuple(f.name for f in fields(Turn) if f.name not in ("prompt_ids", "actions", "inbox"))
_MESSAGE_FIELDS = tuple(f.name for f in fields(Message))
_COLUMNS = {name: SCHEMAS[name].schema.names for name in TABLES}
_text = attrgetter("finish_reason", "content", "reasoning", "think_tokens", "post_think_tokens")
_AGENT_FIELDS = ("agent_id", "feature_id", "role", "exit_status", "patch")

_EXITS = ("Submitted", "LimitsExceeded", "ContextWindowExceeded", "FormatError")
"""From best to worst. Other exits are worse than these, and Error is the worst."""

_MOST_ROWS = 2048
"""Rows of a table as Python objects."""
_DRIFT_IDS = 16
"""Ids stored of each side where a prompt differs from its history: enough to see the difference."""


def to_tables(records: Iterable[RolloutRecord], decode: Decode | None = None) -> dict[str, pa.Table]:
    """Build the four tables, rows in the order of records, agents and turns.

    Args:
        records: consumed one by one, so an iterator need not fit in memory.
        decode: ids -> text; adds text to `drift`.
    """
    chunks: dict[str, list[pa.Table]] = {name: [] for name in TABLES}
    rows: TableRows = {name: [] for name in TABLES}
    for record in chain(records, [None]):
        for name, added in to_rows(record, decode).items() if record else ():
            rows[name].extend(added)
        for name, waiting in rows.items():
            if record is None or len(waiting) >= _MOST_ROWS:
                chunks[name].append(from_tuples(name, waiting))
                rows[name] = []
    return {name: pa.concat_tables(chunks[name]) for name in TABLES}


def from_tables(tables: Mapping[str, pa.Table]) -> list[RolloutRecord]:
    """Return the records of the tables, in the order of `rollouts`."""
    rows: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: {name: [] for name in TABLES})
    for name in TABLES:
        for row in tables[name].to_pylist():
            rows[row["rollout_id"]][name].append(row)
    return [to_record(rows[rollout_id]) for rollout_id in tables["rollouts"]["rollout_id"].to_pylist()]


def to_rows(record: RolloutRecord, decode: Decode | None = None) -> TableRows:
    """Convert one record to rows of the four tables, ids as int32 arrays."""
    rows: TableRows = {"rollouts": [_rollout_row(record)], "agents": [], "turns": [], "messages": []}
    for agent in record.agents:
        key = (record.rollout_id, agent.agent_id)
        rows["agents"].append((*key, *_agent_values(agent)))
        rows["turns"] += _turn_rows(key, agent, decode)
        rows["messages"] += [_message_row(key, i, message) for i, message in enumerate(agent.messages)]
    return rows


def named_rows(rows: TableRows) -> dict[str, list[dict[str, Any]]]:
    """Return the rows with the names of their columns, as `to_record` reads them."""
    return {
        table: [dict(zip(_COLUMNS[table], row, strict=True)) for row in of_table] for table, of_table in rows.items()
    }


def to_record(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> RolloutRecord:
    """Convert the rows of one record back; ids may be lists or arrays."""
    (row,) = rows["rollouts"]
    agents = {
        agent["agent_id"]: AgentRecord(**{name: agent[name] for name in _AGENT_FIELDS}) for agent in rows["agents"]
    }
    whole: dict[tuple[str, int], list[int]] = {}
    for turn in rows["turns"]:
        prompt = None if turn["suffix_ids"] is None else list(turn["suffix_ids"])
        if prompt is not None and turn["prefix_turn"] is not None:
            prompt = whole[turn["agent_id"], turn["prefix_turn"]] + prompt
        if prompt is not None and turn["output_ids"] is not None:
            whole[turn["agent_id"], turn["turn"]] = prompt + list(turn["output_ids"])
        agents[turn["agent_id"]].turns.append(_turn(turn, prompt))
    for message in rows["messages"]:
        columns = {name: message[name] for name in _MESSAGE_FIELDS}
        agents[message["agent_id"]].messages.append(Message(**columns | {"tool_calls": _loads(message["tool_calls"])}))
    columns = {f.name: row[f.name] for f in fields(RolloutRecord) if f.name != "agents"}
    columns |= {name: _loads(row[name]) for name in ("sampler", "outcome", "tools")}
    return RolloutRecord(**columns, agents=list(agents.values()))


def iter_prompts(turns: Rows) -> Iterator[tuple[Key, np.ndarray]]:
    """Yield (rollout_id, agent_id, turn) and the turn's whole prompt, an int32 array, for turns with ids."""
    return ((key, prompt) for key, prompt, _ in iter_turns(turns))


def turn_keys(table: pa.Table) -> Iterator[Key]:
    """Yield (rollout_id, agent_id, turn) of each row."""
    return zip(*(table[name].to_pylist() for name in ("rollout_id", "agent_id", "turn")), strict=True)


def iter_turns(turns: Rows) -> Iterator[tuple[Key, np.ndarray, np.ndarray | None]]:
    """Yield (key, whole prompt, output) of each turn with a prompt, in the order of the table, ids as int32 arrays.

    An agent's turns must be consecutive and in order, as `to_tables` writes them. One agent's turns are in memory.
    """
    columns = ["rollout_id", "agent_id", "turn", "prefix_turn", "suffix_ids", "output_ids"]
    agent: tuple[str, str] | None = None
    whole: dict[int, np.ndarray] = {}
    conversation = GrowingIds()
    for batch in batches(turns, columns):
        names = (batch.column(i).to_pylist() for i in range(4))
        ids = (arrays(batch.column(i)) for i in (4, 5))
        for rollout_id, agent_id, number, prefix, suffix, output in zip(*names, *ids, strict=True):
            if agent != (rollout_id, agent_id):
                agent, whole, conversation = (rollout_id, agent_id), {}, GrowingIds()
            if suffix is None:
                continue
            prompt = suffix
            key: Key = (rollout_id, agent_id, number)
            if prefix is not None:
                if prefix not in whole:
                    raise ValueError(f"turn {key} extends turn {prefix}, which is not before it in the table")
                prompt = conversation.extend(whole[prefix], suffix)
            elif output is not None:
                prompt = conversation.extend(None, suffix)
            if output is not None:
                whole[number] = conversation.extend(prompt, output)
            yield key, prompt, output


def prompts_digest(turns: Iterable[tuple[str, int, Sequence[int] | np.ndarray]]) -> str:
    """Return the sha256 over (agent_id, turn, ids) of one rollout's turns with ids, in order.

    Equal digests of the captured record and of the table prove the encoding.
    """
    digest = hashlib.sha256()
    for agent_id, turn, ids in turns:
        array = _array(ids)
        digest.update(f"{agent_id}/{turn}/{len(array)}:".encode() + array.astype("<i4").tobytes())
    return digest.hexdigest()


def captured_digest(record: RolloutRecord) -> str:
    """Return `prompts_digest` of a record."""
    return prompts_digest(
        (agent.agent_id, turn.turn, turn.prompt_ids)
        for agent in record.agents
        for turn in agent.turns
        if turn.prompt_ids is not None
    )


def worst_exit(statuses: Iterable[str]) -> str:
    """Return the worst of the agents' exits; "Error" if there are no agents."""

    def rank(status: str) -> tuple[int, str]:
        if status in _EXITS:
            return _EXITS.index(status), status
        return (len(_EXITS) + (status == "Error"), status)

    return max(statuses, key=rank, default="Error")


def _array(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)


_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode
_encode_ordered = json.JSONEncoder(ensure_ascii=False).encode
"""Created once: creating an encoder costs as much as encoding a call."""


def _dumps(value: Any) -> str | None:
    return None if value is None else _encode(value)


def _ordered(value: Any) -> str | None:
    """Encode as JSON with keys in order, because chat templates render schemas and arguments in that order."""
    return None if value is None else _encode_ordered(value)


def _loads(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _rollout_row(record: RolloutRecord) -> tuple[Any, ...]:
    patches = {agent.agent_id: agent.patch for agent in record.agents if agent.patch is not None}
    computed = {
        "sampler": _dumps(record.sampler),
        "outcome": _dumps(record.outcome),
        "tools": None if record.tools is None else _tools(record.tools),
        "exit_status": worst_exit(agent.exit_status for agent in record.agents),
        "agents": len(record.agents),
        "final_files": _dumps(patches),
    }
    return tuple(computed[name] if name in computed else getattr(record, name) for name in _COLUMNS["rollouts"])


def _tools(tools: list[Any]) -> str | None:
    """Encode tool schemas; the rollouts of an import mostly share one list of them."""
    known, text = _last_tools[0]
    if known is not tools:
        text = _ordered(tools)
        _last_tools[0] = tools, text
    return text


_last_tools: list[tuple[list[Any] | None, str | None]] = [(None, None)]
"""The list that was encoded last, and its text: one pair, because rollouts are encoded in several threads."""


def _agent_values(agent: AgentRecord) -> tuple[Any, ...]:
    lengths = [len(turn.output_ids) for turn in agent.turns if turn.output_ids is not None]
    tokens = sum(lengths) if lengths or not agent.turns else None
    return agent.feature_id, agent.role, agent.exit_status, len(agent.turns), tokens, agent.patch


def _turn_rows(key: tuple[str, str], agent: AgentRecord, decode: Decode | None) -> Iterator[tuple[Any, ...]]:
    whole: dict[int, np.ndarray] = {}
    last: int | None = None
    for turn in agent.turns:
        if last is not None and turn.turn <= last:
            raise ValueError(f"rollout {' '.join(key)}: turn {turn.turn} follows turn {last}; number them upwards")
        prefix = suffix = drift_at = drift = prompt_tokens = None
        if turn.prompt_ids is not None:
            prompt = _array(turn.prompt_ids)
            # The latest earlier turn whose prompt + output is a prefix of the prompt.
            prefix = next((turn for turn in reversed(whole) if begins_with(prompt, whole[turn])), None)
            prompt_tokens = len(prompt)
            suffix = prompt if prefix is None else prompt[len(whole[prefix]) :]
            if last in whole and prefix != last:
                drift_at, drift = _drift(whole[last], prompt, decode)
            if turn.output_ids is not None:
                whole[turn.turn] = np.concatenate([prompt, _array(turn.output_ids)])
        last = turn.turn
        actions = f"[{', '.join(map(_action, turn.actions))}]"
        ids = (prefix, suffix, turn.output_ids, turn.logprobs, turn.capture, drift_at, drift, prompt_tokens)
        output_tokens = None if turn.output_ids is None else len(turn.output_ids)
        inbox = _encode(turn.inbox) if turn.inbox else "[]"
        answered = (turn.parse_error, turn.observation, turn.exit_code, inbox, turn.at)
        yield (*key, turn.turn, *ids, output_tokens, *_text(turn), actions, *answered)


def _action(action: Action) -> str:
    """Encode an action as JSON, its fields in the order of their names."""
    rest = _rest(action.form, action.kind, action.message, action.pure, action.to, action.wait)
    return f'{{"command": {encode_basestring(action.command)}, {rest}'


@lru_cache(maxsize=256)
def _rest(form: str, kind: str, message: str | None, pure: bool, to: str | None, wait: bool) -> str:
    """Encode the fields after the command; most actions have the same."""
    fields = {"form": form, "kind": kind, "message": message, "pure": pure, "to": to, "wait": wait}
    return _encode(fields).removeprefix("{")


def _drift(expected: np.ndarray, actual: np.ndarray, decode: Decode | None) -> tuple[int, str | None]:
    at = common_prefix(expected, actual)
    sides: dict[str, Any] = {}
    for side, ids in (("expected", expected), ("found", actual)):
        sides[f"{side}_ids"] = ids[at : at + _DRIFT_IDS].tolist()
        if decode is not None:
            sides[f"{side}_text"] = decode(sides[f"{side}_ids"])
    return at, _dumps(sides)


def _turn(row: Mapping[str, Any], prompt: list[int] | None) -> Turn:
    columns = {name: row[name] for name in _TURN_FIELDS if name != "output_ids"}
    return Turn(
        **columns,
        prompt_ids=prompt,
        output_ids=None if row["output_ids"] is None else list(row["output_ids"]),
        actions=[Action(**action) for action in _loads(row["actions"]) or []],
        inbox=_loads(row["inbox"]) or [],
    )


def _message_row(key: tuple[str, str], index: int, message: Message) -> tuple[Any, ...]:
    calls = _ordered(message.tool_calls)
    text = (message.content, message.reasoning, calls)
    return (*key, index, message.turn, message.role, *text, message.kind, message.at)


_ROLLOUTS = 32
"""Rollouts per block, about a thousand turns."""


def blocks(tables: Mapping[str, Rows], columns: Mapping[str, Sequence[str]]) -> Iterator[dict[str, pa.Table]]:
    """Yield blocks of whole rollouts: {table: its rows of those rollouts}.

    Args:
        tables: `rollouts`, and others with a `rollout_id`, all in the order of `rollouts`, as rollout sets are stored.
        columns: the columns to read of each table, including `rollout_id`.

    Raises ValueError: a table is in another order, or has rows of a rollout that `rollouts` lacks.
    """
    readers = {name: _Reader(table, columns[name]) for name, table in tables.items() if name != "rollouts"}
    for batch in batches(tables["rollouts"], columns["rollouts"]):
        for start in range(0, batch.num_rows, _ROLLOUTS):
            rollouts = pa.Table.from_batches([batch.slice(start, _ROLLOUTS)])
            rest = {name: reader.take(rollouts["rollout_id"]) for name, reader in readers.items()}
            yield {"rollouts": rollouts} | rest
    for name, reader in readers.items():
        if (left := reader.next_id()) is not None:
            raise ValueError(
                f"table {name}: the rows of rollout {left} are out of order: they must be together and in the order "
                "of `rollouts`. Materialize raw_rollouts of this set again"
            )


class _Reader:
    """Reads one table forwards."""

    def __init__(self, table: Rows, columns: Sequence[str]) -> None:
        self._batches = batches(table, columns)
        self._empty = no_rows(table, columns)
        self._batch: pa.RecordBatch | None = next(self._batches, None)

    def take(self, rollout_ids: pa.ChunkedArray) -> pa.Table:
        """Return the next rows, up to the first one of another rollout."""
        taken = []
        while self._batch is not None:
            outside = pc.invert(pc.is_in(self._batch["rollout_id"], value_set=rollout_ids))  # pyright: ignore[reportAttributeAccessIssue]
            first = pc.index(outside, True).as_py()
            if first >= 0:
                taken.append(self._batch.slice(0, first))
                self._batch = self._batch.slice(first)
                break
            taken.append(self._batch)
            self._batch = next(self._batches, None)
        return pa.Table.from_batches(taken, self._empty.schema)

    def next_id(self) -> str | None:
        """Return the rollout of the next row; None at the end."""
        return None if self._batch is None else self._batch["rollout_id"][0].as_py()
