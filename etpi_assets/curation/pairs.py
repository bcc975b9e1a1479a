"""Convert the turns of selected rollouts to token-in/token-out pairs: the table `pairs`, and the turns it drops.

A captured prompt that extends an earlier turn's prompt + output is rebuilt from that turn as edited. So turns that
extend each other still do after editing, unless the history that the student reads differs from the trained output. A
pair is stored as the ids that it adds to the latest earlier pair that it extends. That relation is computed again after
editing, because it can differ from the captured one (`prefix_turn` of `turns`) in both directions.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from etpi_assets.agent.actions import after_think
from etpi_assets.curation.steering import FirstPrompt, Messages, splice
from etpi_assets.curation.strip_think import (
    Stripped,
    close_tail,
    has_think,
    last_turn,
    strip_history,
    strip_opened,
    strip_output,
)
from etpi_assets.specs.experiment import PairsSection
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.marks import CALL, CALL_END, spans
from etpi_resources.chat.tool_forms import Call
from etpi_resources.chat.tool_forms.call import value_text
from etpi_resources.chat.tool_forms.template import UnknownToolForm
from etpi_resources.lake.schemas import from_rows
from etpi_resources.token_ids import begins_with


@dataclass(frozen=True)
class CapturedTurn:
    """One turn as captured.

    Attributes:
        prompt, output: whole ids, (n,) int32; None if no ids were captured.
        calls: the structured calls that the output was rendered from.
        refused: why the student's template does not take the conversation; empty if it does.
        prose_lost: whether the template leaves out the text beside the turn's calls.
        bare, unstripped, quoted: of a turn whose ids were rendered from messages, as in `RetokenisedTurn`.
    """

    turn: int
    prompt: np.ndarray | None
    output: np.ndarray | None
    capture: str
    truncated: bool = False
    parse_error: str | None = None
    calls: tuple[Call, ...] = ()
    refused: str = ""
    prose_lost: bool = False
    bare: tuple[np.ndarray, np.ndarray] | None = None
    unstripped: str | None = None
    quoted: int = 0


@dataclass(frozen=True)
class CapturedAgent:
    """One agent's turns in order.

    Attributes:
        captured, default: its first messages as the teacher read them, and the first prompt of a student; None to keep
            the captured prompt.
        facts: values for every pair's `metadata` (task_id, repo, teacher, role, ...).
        appended: whether the template only appends to the conversation; False if it rewrites earlier messages.
        finished: whether the agent ended the conversation itself.
        tools: the schemas that the prompts offer, None if they offer none.
        repeated: numbers of the turns, from 0, that another rollout trains.
        messages: the rows of `messages` from which the ids were rendered, as the student reads them.
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
    repeated: Collection[int] = ()
    messages: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Pair:
    """A turn as the student trains on it.

    Attributes:
        edits: the kinds of edits in the input, "spliced" and "stripped".
        removed: think ids removed from the output.
        tail: form of the captured prompt's tail, see `ChatFormat.tail_form`.
        source_tokens: length of the captured output.
    """

    turn: int
    input: np.ndarray
    output: np.ndarray
    capture: str
    edits: frozenset[str]
    removed: int
    tail: str
    source_tokens: int


def make_pairs(agents: Iterable[CapturedAgent], section: PairsSection, chat: ChatFormat) -> dict[str, pa.Table]:
    """Return {"pairs", "dropped"} of every agent, in order; each turn is in one of them.

    Raises:
        ValueError: steering cannot be spliced, or an open tail cannot be closed; names the rollout and agent.
    """
    pairs: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    for agent in agents:
        agent_pairs: list[Pair] = []
        try:
            for number, (turn, result) in enumerate(zip(agent.turns, _edit(agent, section, chat), strict=True)):
                if isinstance(result, Pair) and number in agent.repeated:
                    result = "repeated_turn", "another rollout trains it after the same messages"
                if isinstance(result, Pair):
                    agent_pairs.append(result)
                else:
                    dropped.append(_dropped_row(agent, turn, *result))
        except ValueError as error:
            raise ValueError(f"rollout {agent.rollout_id}/{agent.agent_id}: {error}") from error
        pairs += [
            _pair_row(agent, pair, extended(pair.input, agent_pairs[:index]), chat)
            for index, pair in enumerate(agent_pairs)
        ]
    return {"pairs": from_rows("pairs", pairs), "dropped": from_rows("dropped", dropped)}


def _pair_row(agent: CapturedAgent, pair: Pair, prefix: Pair | None, chat: ChatFormat) -> dict[str, Any]:
    prefix_length = 0 if prefix is None else len(prefix.input) + len(prefix.output)
    facts = {**agent.facts, "source_output_tokens": pair.source_tokens, "tail": pair.tail}
    return {
        "pair_id": f"{agent.rollout_id}/{agent.agent_id}/{pair.turn}",
        "rollout_id": agent.rollout_id,
        "agent_id": agent.agent_id,
        "turn": pair.turn,
        "prefix_turn": None if prefix is None else prefix.turn,
        "suffix_ids": pair.input[prefix_length:],
        "output_ids": pair.output,
        "input_tokens": len(pair.input),
        "capture": pair.capture,
        "prompt_edit": "+".join(sorted(pair.edits)) or "none",
        "think_removed": pair.removed,
        "format_tokens": format_tokens(pair.output, chat),
        "metadata": json.dumps(facts, sort_keys=True),
    }


def _dropped_row(agent: CapturedAgent, turn: CapturedTurn, reason: str, detail: str) -> dict[str, Any]:
    return {
        "stage": "pairs",
        "rollout_id": agent.rollout_id,
        "agent_id": agent.agent_id,
        "turn": turn.turn,
        "reason": reason,
        "detail": detail,
        "output_tokens": None if turn.output is None else len(turn.output),
    }


def extended(prompt: np.ndarray, earlier: Sequence[Pair]) -> Pair | None:
    """Return the latest earlier pair whose input + output the prompt begins with."""
    return next((pair for pair in reversed(earlier) if begins_with(prompt, pair.input, pair.output)), None)


@dataclass(frozen=True)
class _PastTurn:
    """A turn's prompt and output as captured, and those that replace them in the student's later prompts.

    Attributes:
        edited: None where nothing is replaced.
    """

    captured: tuple[np.ndarray, np.ndarray]
    edited: tuple[np.ndarray, np.ndarray] | None
    edits: frozenset[str]


def _edit(agent: CapturedAgent, section: PairsSection, chat: ChatFormat) -> Iterator[Pair | tuple[str, str]]:
    """Yield for each turn its pair, or (reason, detail) why it is dropped."""
    past: list[_PastTurn] = []
    for turn in agent.turns:
        if turn.refused:
            yield "refused_by_template", turn.refused
            continue
        if turn.prompt is None or turn.output is None or turn.capture != section.capture:
            yield "not_captured", f"capture is {turn.capture}, pairs.capture asks for {section.capture}"
            continue
        if turn.capture == "retokenised":
            yield _of_messages(turn, turn.prompt, turn.output, section, chat)
            continue
        prompt, edits = _edited_prompt(turn.prompt, past, agent, section, chat)
        tail = chat.tail_form(last_turn(turn.prompt, chat).tolist())
        opened = section.strip_rule == "opened"
        stripped = strip_opened(turn.output, chat) if opened else strip_output(turn.output, tail, chat)
        can_strip = stripped.reason is None
        closes = can_strip and tail == "open"
        closed = close_tail(prompt, chat) if closes else prompt
        in_history = section.history_think == "strip" and can_strip
        captured = turn.prompt, turn.output
        edited = (closed, stripped.ids) if in_history else (prompt, turn.output)
        past.append(
            _PastTurn(
                captured,
                None if edited[0] is captured[0] and edited[1] is captured[1] else edited,
                edits | _stripped(in_history and (stripped.removed > 0 or closes)),
            )
        )
        if drop := _drop_reason(turn, turn.output, stripped, tail, section):
            yield drop
            continue
        yield Pair(
            turn=turn.turn,
            input=closed if section.strip_think else prompt,
            output=stripped.ids if section.strip_think else turn.output,
            capture=turn.capture,
            edits=edits | _stripped(section.strip_think and closes),
            removed=stripped.removed if section.strip_think else 0,
            tail=tail,
            source_tokens=len(turn.output),
        )


def _of_messages(
    turn: CapturedTurn, prompt: np.ndarray, output: np.ndarray, section: PairsSection, chat: ChatFormat
) -> Pair | tuple[str, str]:
    """Return the pair of a turn whose ids were rendered from messages, or (reason, detail) why it is dropped.

    Its thoughts are known from the messages, so nothing is searched for in the ids.
    """
    tail = chat.tail_form(last_turn(prompt, chat).tolist())
    history, stripped = turn.bare or (prompt, output)
    # The published rule removes only a block that the output itself opens.
    strips = section.strip_think and not (section.strip_rule == "opened" and tail == "open")
    result = (
        Stripped(stripped, len(output) - len(stripped))
        if turn.unstripped is None
        else Stripped(output, 0, turn.unstripped)
    )
    if drop := _drop_reason(turn, output, result, tail, section):
        return drop
    edited = close_tail(history, chat) if strips and tail == "open" else history
    return Pair(
        turn=turn.turn,
        input=edited,
        output=result.ids if strips else output,
        capture=turn.capture,
        edits=_stripped(not np.array_equal(edited, prompt)),
        removed=result.removed if strips else 0,
        tail=tail,
        source_tokens=len(output),
    )


def _drop_reason(
    turn: CapturedTurn, output: np.ndarray, stripped: Stripped, tail: str, section: PairsSection
) -> tuple[str, str] | None:
    """Return (reason, detail) if the turn must be dropped, else None."""
    if section.drop_unparseable and turn.parse_error is not None:
        return "unparseable", turn.parse_error
    if section.drop_truncated and turn.truncated:
        return "truncated", f"{len(output)} ids, no end of turn"
    if section.strip_think and stripped.reason is not None:
        return stripped.reason, f"tail {tail}, {len(output)} output ids"
    return None


def _edited_prompt(
    prompt: np.ndarray, past: Sequence[_PastTurn], agent: CapturedAgent, section: PairsSection, chat: ChatFormat
) -> tuple[np.ndarray, frozenset[str]]:
    """Return the prompt as a student reads it, and its edits."""
    for earlier in reversed(past):
        if begins_with(prompt, *earlier.captured):
            follows = prompt[sum(map(len, earlier.captured)) :]
            added, more = _strip_history_think(follows, section, chat)
            whole = prompt
            if earlier.edited is not None or added is not follows:
                whole = np.concatenate([*(earlier.edited or earlier.captured), added])
            return whole, earlier.edits | more
    edits = frozenset[str]()
    if agent.captured is not None and agent.default is not None:
        prompt, spliced = splice(prompt, agent.captured, agent.default, chat)
        edits = frozenset({"spliced"} if spliced else ())
    prompt, more = _strip_history_think(prompt, section, chat)
    return prompt, edits | more


def _strip_history_think(ids: np.ndarray, section: PairsSection, chat: ChatFormat) -> tuple[np.ndarray, frozenset[str]]:
    if section.history_think == "keep" or not has_think(ids, chat):
        return ids, _stripped(False)
    edited, removed = strip_history(ids, chat)
    return edited, _stripped(removed > 0)


def _stripped(edited: bool) -> frozenset[str]:
    return frozenset({"stripped"} if edited else ())


def format_tokens(output: np.ndarray, chat: ChatFormat) -> int:
    """Return how many ids of an output are the syntax of its tool calls, 0 if it has no call.

    These are the ids from the opening to the closing one, without those between the first parameter's opening tag and
    the last parameter's closing tag. In a form without such tags, they are those of the calls as the template writes
    them, without the ids of the arguments' values.
    """
    starts = [start for start, _ in spans(output, CALL, chat)]
    if not starts and chat.tool_open_id is None:
        return _call_tokens(output, chat)
    count = 0
    ends = [end for _, end in spans(output, CALL_END, chat)] if starts else []
    has_parameters = bool(starts) and "<parameter=" in label_text(output, chat)
    for start, bound in pairwise([*starts, len(output)]):
        call = output[start : next((end for end in ends if start < end <= bound), bound)].tolist()
        text = chat.decode(call) if has_parameters else ""
        opened, ended = text.find(">", text.find("<parameter=")) + 1, text.rfind("</parameter>")
        if "<parameter=" not in text or not 0 < opened <= ended:
            count += len(call)
            continue
        head = next(n for n in range(1, len(call) + 1) if len(chat.decode(call[:n])) >= opened)
        tail = next(n for n in range(1, len(call) + 1) if len(chat.decode(call[-n:])) >= len(text) - ended)
        count += min(len(call), head + tail)
    return count


def label_text(output: np.ndarray, chat: ChatFormat) -> str:
    """Return an output's text without the end of its turn."""
    ended = len(output) > 0 and int(output[-1]) in chat.end_ids
    return _text(chat, (output[:-1] if ended else output).tobytes())


@lru_cache(maxsize=4096)
def _text(chat: ChatFormat, ids: bytes) -> str:
    """Decode; the tokens of a label are counted and its syntax is checked, so a block needs its text twice."""
    return chat.decode(np.frombuffer(ids, dtype=np.int32).tolist())


def _call_tokens(output: np.ndarray, chat: ChatFormat) -> int:
    """Return `format_tokens` under a template whose calls have no opening id of their own."""
    try:
        form = None if chat.calls_in_content else chat.tool_form
    except UnknownToolForm:  # `label_syntax` blocks the data if its prompts or turns have calls
        form = None
    parsed = form.parse(after_think(chat.decode(output.tolist()))) if form else ()
    calls = [call for call in parsed if isinstance(call, Call)]
    if not calls:
        return 0
    values = [value_text(value) for call in calls for value in call.arguments.values()]
    return max(1, len(chat.without_end(chat.turn_ids("", calls))) - sum(map(len, chat.encode_all(values))))
