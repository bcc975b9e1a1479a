"""Find keys and tokens in a rollout by the forms that their issuers document; mask them, or quarantine the rollout.

A mask is never trained: a turn that wrote the key becomes context. Passwords and keys without a form of their own are
not found.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from etpi_assets.importers.format import ImportResult
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord

_SHORTEST, _SHORT = 10, 400
"""Characters that a secret has at least, and those of a text whose kinds are cached."""
CHOICES = ("keep", "mask", "quarantine")


def _patterns() -> Iterator[tuple[str, tuple[Sequence[str], re.Pattern[str]]]]:
    """Yield (kind, (texts of which every secret of the kind holds one, its form)) of secrets.toml."""
    for kind, table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items():
        beginnings = "|".join(map(re.escape, table.get("beginnings", "").split()))
        yield kind, (table["texts"], re.compile(table["form"].replace("BEGINNINGS", beginnings), re.DOTALL))


_PATTERNS = dict(_patterns())


def found(record: RolloutRecord) -> Counter[str]:
    """Count the secrets of each kind in a rollout's messages, schemas, patches, error and outcome."""
    counts = Counter[str]()
    for agent in record.agents:
        _masked([[m.content, m.reasoning, m.tool_calls] for m in agent.messages], counts)
    _masked([[agent.patch for agent in record.agents], record.tools, record.error, record.outcome], counts)
    return counts


def without_secrets(item: ImportResult, choice: str) -> ImportResult:
    """Return the rollout with its secrets masked, or its refusal; that of a reader is masked unless the choice is
    "keep". `choice`: one of CHOICES."""
    if choice == "keep":
        return item
    if isinstance(item, RejectedInput):
        return replace(item, detail=_masked(item.detail, Counter()))
    if not (counts := found(item)):
        return item
    words = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
    remedy = 'replace them, or take options.secrets = "mask"'
    if choice == "mask":
        # Secrets outside of the conversation can be masked beside token ids too.
        error, outcome = _masked([item.error, item.outcome], Counter())
        item = replace(item, error=error, outcome=outcome)
        if not found(item):
            return item
        ids = any(turn.output_ids is not None for agent in item.agents for turn in agent.turns)
        agents = [_masked_agent(agent) for agent in item.agents]
        if not ids and any(agent.turns for agent in agents):
            return replace(item, agents=agents, tools=_masked(item.tools, Counter()))
        remedy = "token ids cannot be masked" if ids else "every turn wrote one, and a mask is not trained"
    name, _, row = (item.source or "").rpartition("#")
    unit, number = (name, int(row)) if name and row.isdecimal() else (item.source or "", None)
    return RejectedInput(unit, "secrets", f"it holds {words}; {remedy}", number)


def _masked_agent(agent: AgentRecord) -> AgentRecord:
    """Return an agent with masks; its turns that wrote a secret are context."""
    written = [(t.turn, [t.content, t.reasoning, *(a.command for a in t.actions)]) for t in agent.turns]
    written += [(m.turn, m.tool_calls) for m in agent.messages if m.role == "assistant" and m.turn is not None]
    wrote = {turn for turn, texts in written if _masked(texts, Counter()) != texts}
    messages, last = [], None
    for message in agent.messages:
        is_context = message.turn is None or message.turn in wrote
        last = last if is_context else message.turn
        content, reasoning, calls = _masked([message.content, message.reasoning, message.tool_calls], Counter())
        turn = None if is_context and message.role == "assistant" else last
        kind = "other" if turn is None and message.kind == "action" else message.kind
        texts = {"content": content, "reasoning": reasoning, "tool_calls": calls}
        messages.append(replace(message, turn=turn, kind=kind, **texts))
    turns = []
    for turn in (turn for turn in agent.turns if turn.turn not in wrote):
        observation, inbox = _masked([turn.observation, turn.inbox], Counter())
        turns.append(replace(turn, observation=observation, inbox=inbox))
    return replace(agent, messages=messages, turns=turns, patch=_masked(agent.patch, Counter()))


def _masked(value: Any, counts: Counter[str]) -> Any:
    """Return a value with its secrets masked, also within lists and objects; add their numbers to `counts`."""
    if isinstance(value, str):
        # The strings of schemas are the same in every row.
        for kind, pattern in () if len(value) < _SHORTEST else (_cached if len(value) < _SHORT else _candidates)(value):
            value, number = pattern.subn(f"[masked {kind}]", value)
            if number:
                counts[kind] += number
        return value
    if isinstance(value, dict):
        return {_masked(key, counts): _masked(inner, counts) for key, inner in value.items()}
    return [_masked(inner, counts) for inner in value] if isinstance(value, list) else value


@lru_cache(maxsize=1 << 10)
def _cached(text: str) -> Sequence[tuple[str, re.Pattern[str]]]:
    """Return the kinds of which a short text has a secret."""
    return [(kind, pattern) for kind, pattern in _candidates(text) if pattern.search(text)]


def _candidates(text: str) -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield the kinds of which the text may hold a secret; a search of fixed texts is far faster than of patterns."""
    for kind, (parts, pattern) in _PATTERNS.items():
        if any(part in text for part in parts):
            yield kind, pattern
