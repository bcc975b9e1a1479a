"""From the turns of selected rollouts to token-in/token-out pairs.

Belongs here: what a turn's input and output become for the student, which turns are dropped, and the `pairs` table.
Does not belong here: the edits (`steering`, `strip_think`), re-tokenising (`retokenise`), weights (`upweight`).

Edits commute with extension. A captured prompt that extends an earlier turn's prompt + output is rebuilt from the
edited earlier turn, so a chain of turns stays a chain wherever the edited output is also what the student's history
holds. A pair is stored as the ids it adds to the latest earlier pair that it extends, found by comparison.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from etpi_assets.curation.steering import FirstPrompt, Messages, splice
from etpi_assets.curation.strip_think import Stripped, close_tail, has_think, strip_history, strip_opened, strip_output
from etpi_assets.specs.experiment import PairsSection
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.tool_forms import Call
from etpi_resources.lake.schemas import from_rows
from etpi_resources.token_ids import begins_with


@dataclass(frozen=True)
class CapturedTurn:
    """One turn as its capture gives it: whole prompt and output, (n,) int32, None where nothing was captured; `calls`:
    the structured calls that the output was made of."""

    turn: int
    prompt: np.ndarray | None
    output: np.ndarray | None
    capture: str
    truncated: bool = False
    parse_error: str | None = None
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class CapturedAgent:
    """One agent's turns in order.

    Attributes:
        captured, default: its first messages as the teacher read them, and the prompt that a student reads; None where
            the captured prompt is to stay as it is.
        facts: what every pair's `metadata` holds (task_id, repo, teacher, role, ...).
        appended: whether one rendering held all prompts; False where the template writes earlier messages anew.
        finished: whether the agent ended the conversation itself.
        tools: the schemas that the prompts offer, None where they offer none.
    """

    rollout_id: str
    agent_id: str
    turns: Sequence[CapturedTurn]
    captured: Messages | None = None
    default: FirstPrompt | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    appended: bool = True
    finished: bool = False
    tools: Sequence[Any] | None = None


@dataclass(frozen=True)
class Pair:
    """A turn for the student."""

    turn: int
    input: np.ndarray
    output: np.ndarray
    capture: str
    edits: tuple[str, ...]
    removed: int
    tail: str
    source_tokens: int


def make_pairs(agents: Iterable[CapturedAgent], section: PairsSection, chat: ChatFormat) -> dict[str, pa.Table]:
    """Pairs and dropped turns of every agent, in order: {"pairs", "dropped"}; together they are all the turns.

    Raises:
        ValueError: steering cannot be spliced, or an open tail cannot be closed; names the rollout and agent.
    """
    pairs: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    for agent in agents:
        name = f"{agent.rollout_id}/{agent.agent_id}"
        key = {"rollout_id": agent.rollout_id, "agent_id": agent.agent_id}
        kept: list[Pair] = []
        try:
            for turn, result in zip(agent.turns, _edit(agent, section, chat), strict=True):
                if isinstance(result, Pair):
                    kept.append(result)
                else:
                    reason, detail = result
                    tokens = None if turn.output is None else len(turn.output)
                    dropped.append(
                        {"stage": "pairs", **key, "turn": turn.turn, "reason": reason, "detail": detail,
                         "output_tokens": tokens}
                    )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"rollout {name}: {error}") from error
        for index, pair in enumerate(kept):
            prefix = extended(pair.input, kept[:index])
            known = 0 if prefix is None else len(prefix.input) + len(prefix.output)
            pairs.append(
                {
                    "pair_id": f"{name}/{pair.turn}",
                    **key,
                    "turn": pair.turn,
                    "prefix_turn": None if prefix is None else prefix.turn,
                    "suffix_ids": pair.input[known:],
                    "output_ids": pair.output,
                    "input_tokens": len(pair.input),
                    "capture": pair.capture,
                    "prompt_edit": "+".join(pair.edits) or "none",
                    "think_removed": pair.removed,
                    "format_tokens": format_tokens(pair.output, chat),
                    "metadata": json.dumps(
                        {**agent.facts, "source_output_tokens": pair.source_tokens, "tail": pair.tail}, sort_keys=True
                    ),
                }
            )
    return {"pairs": from_rows("pairs", pairs), "dropped": from_rows("dropped", dropped)}


def extended(prompt: np.ndarray, earlier: Sequence[Pair]) -> Pair | None:
    """The latest earlier pair whose input + output the prompt begins with."""
    return next((pair for pair in reversed(earlier) if begins_with(prompt, pair.input, pair.output)), None)


@dataclass(frozen=True)
class _History:
    """A turn as captured, and what stands in its place in the student's later prompts."""

    captured: np.ndarray
    edited: np.ndarray
    edits: tuple[str, ...]


def _edit(agent: CapturedAgent, section: PairsSection, chat: ChatFormat) -> Iterator[Pair | tuple[str, str]]:
    """For each turn its pair, or (reason, detail) why there is none."""
    past: list[_History] = []
    for turn in agent.turns:
        if turn.prompt is None or turn.output is None or turn.capture != section.capture:
            yield "not_captured", f"capture is {turn.capture}, pairs.capture asks for {section.capture}"
            continue
        prompt, edits = _edited_prompt(turn.prompt, past, agent, section, chat)
        tail = chat.tail_form(turn.prompt.tolist())
        opened = section.strip_rule == "opened"
        stripped = strip_opened(turn.output, chat) if opened else strip_output(turn.output, tail, chat)
        cut = stripped.reason is None
        closes = cut and tail == "open"
        closed = close_tail(prompt, chat) if closes else prompt
        through = section.history_think == "strip" and cut
        past.append(
            _History(
                np.concatenate([turn.prompt, turn.output]),
                np.concatenate([closed, stripped.ids] if through else [prompt, turn.output]),
                (*edits, *_stripped(through and (stripped.removed > 0 or closes))),
            )
        )
        if section.drop_unparseable and turn.parse_error is not None:
            yield "unparseable", turn.parse_error
        elif section.drop_truncated and turn.truncated:
            yield "truncated", f"{len(turn.output)} ids, no end of turn"
        elif section.strip_think and stripped.reason is not None:
            yield stripped.reason, f"tail {tail}, {len(turn.output)} output ids"
        else:
            final = stripped if section.strip_think else Stripped(turn.output)
            yield Pair(
                turn.turn,
                closed if section.strip_think else prompt,
                final.ids,
                turn.capture,
                _ordered((*edits, *_stripped(section.strip_think and closes))),
                final.removed,
                tail,
                len(turn.output),
            )


def _edited_prompt(
    prompt: np.ndarray, past: Sequence[_History], agent: CapturedAgent, section: PairsSection, chat: ChatFormat
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The prompt as a student reads it, and what was done to it."""
    for earlier in reversed(past):
        if begins_with(prompt, earlier.captured):
            added, more = _without_old_thoughts(prompt[len(earlier.captured) :], section, chat)
            return np.concatenate([earlier.edited, added]), _ordered((*earlier.edits, *more))
    edits: tuple[str, ...] = ()
    if agent.captured is not None and agent.default is not None:
        prompt, spliced = splice(prompt, agent.captured, agent.default, chat)
        edits = ("spliced",) if spliced else ()
    prompt, more = _without_old_thoughts(prompt, section, chat)
    return prompt, _ordered((*edits, *more))


def _without_old_thoughts(
    ids: np.ndarray, section: PairsSection, chat: ChatFormat
) -> tuple[np.ndarray, tuple[str, ...]]:
    if section.history_think == "keep" or not has_think(ids, chat):
        return ids, ()
    edited, removed = strip_history(ids, chat)
    return edited, _stripped(removed > 0)


def _stripped(edited: bool) -> tuple[str, ...]:
    return ("stripped",) if edited else ()


def _ordered(edits: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in ("spliced", "stripped") if name in edits)


def format_tokens(output: np.ndarray, chat: ChatFormat) -> int:
    """Ids of an output that belong to the form of its tool calls: all from the opening id to the closing one, but for
    what stands between the last tag before a parameter's value and the tag after it. 0 where there is no call."""
    if chat.tool_open_id is None:
        return 0
    count = 0
    starts = np.flatnonzero(output == chat.tool_open_id).tolist()
    for start, bound in pairwise([*starts, len(output)]):
        closes = np.flatnonzero(output[start:bound] == chat.tool_close_id)
        call = output[start : start + int(closes[0]) + 1 if len(closes) else bound].tolist()
        text = chat.decode(call)
        opened, ended = text.find(">", text.find("<parameter=")) + 1, text.rfind("</parameter>")
        if "<parameter=" not in text or not 0 < opened <= ended:
            count += len(call)
            continue
        head = next(n for n in range(1, len(call) + 1) if len(chat.decode(call[:n])) >= opened)
        tail = next(n for n in range(1, len(call) + 1) if len(chat.decode(call[-n:])) >= len(text) - ended)
        count += min(len(call), head + tail)
    return count
