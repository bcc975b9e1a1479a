"""Token-in/token-out pairs: `{input_ids, output_ids, metadata}`, a row an assistant turn.

Belongs here: joining the turns of a rollout, which stand in rows one after the other. Does not belong here: making
pairs (`curation.pairs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from etpi_assets.importers.conversation import Entry, Options, build_agent, token_ids
from etpi_assets.importers.facts import facts, made_of
from etpi_assets.importers.format import Row, of_rows
from etpi_assets.importers.messages import listed
from etpi_assets.importers.source import Unreadable, field, text_field
from etpi_assets.importers.token_rows import entries_of
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord


def claims(row: Row) -> bool:
    return "input_ids" in row and "output_ids" in row


def rollout_of(row: Row) -> Any:
    """What the rows of one rollout share; None where a row says nothing, so that it stands by itself."""
    return text_field(row, "metadata", "rollout_id")


def record(rows: list[Row], where: str, options: Options) -> RolloutRecord:
    """Raises Unreadable: `bad_token_ids`, `needs_tokenizer`, `unknown_form`."""
    by_agent: dict[str, list[Row]] = {}
    for row in rows:
        if not isinstance(row.get("metadata"), Mapping | None):
            listed(row["metadata"], f"{where}, metadata")  # says what it is instead
        by_agent.setdefault(text_field(row, "metadata", "agent_id") or "agent1", []).append(row)
    agents = [_agent(name, turns, where, options) for name, turns in by_agent.items()]
    return made_of(agents, facts(rows[0], options), where)


def _agent(name: str, rows: list[Row], where: str, options: Options) -> AgentRecord:
    turns: list[Entry] = []
    longest: list[Entry] = []
    for number, row in enumerate(rows):
        what = f"{where}, {name}, turn {number}"
        prompt = token_ids(row.get("input_ids"), f"{what}, input_ids")
        output = token_ids(row.get("output_ids"), f"{what}, output_ids")
        capture = text_field(row, "metadata", "capture") or options.capture
        told = entries_of([*prompt, *output], [(len(prompt), len(prompt) + len(output))], options, what, capture)
        turns.append(told[-1])
        longest = told  # the last prompt holds the conversation; edits of history may have made it its own
    context = longest[:-1]
    written = [i for i, entry in enumerate(context) if entry.role == "assistant"]
    entries = list(context)
    # Earlier turns stand in the last prompt as messages, the last so many of them.
    for at, turn in zip(reversed(written), reversed(turns[:-1]), strict=False):
        entries[at] = turn
    if len(turns) - 1 > len(written):
        raise Unreadable(
            "unknown_form",
            f"{where}, {name}: {len(turns)} turns, but the last prompt shows {len(written)}: they are no one "
            f"conversation; leave `rollout_id` out of `metadata` to import each as a row of its own",
        )
    facts_of = field(rows[0], "metadata")
    role = text_field(facts_of, "role") or "solo"
    agent = build_agent(
        [*entries, turns[-1]],
        agent_id=name,
        feature_id=text_field(facts_of, "feature_id") or "",
        role=role,
        exit_status=text_field(facts_of, "exit_status") or "unknown",
        options=options,
    )
    numbers = [number if type(number := field(row, "metadata", "turn")) is int else i for i, row in enumerate(rows)]
    if numbers == sorted(set(numbers)):
        mapping = dict(enumerate(numbers))
        agent.turns = [replace(turn, turn=mapping[turn.turn]) for turn in agent.turns]
        agent.messages = [replace(m, turn=None if m.turn is None else mapping[m.turn]) for m in agent.messages]
    return agent


FORMAT = of_rows(
    "tito",
    title="Token-in/token-out pairs: `{input_ids, output_ids, metadata}`, a row a turn; rows of one "
    "`metadata.rollout_id` that follow one another are one rollout",
    keeps="every prompt and output id for id, turn numbers, agents and roles, task, repository, teacher, reward; with "
    "`options.tokenizer`, the messages they say",
    loses="other metadata",
    claims=claims,
    record=record,
    group=rollout_of,
)
