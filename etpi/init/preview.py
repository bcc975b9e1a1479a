"""The first conversation of recorded runs as it will be trained, with the labels marked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import click

from etpi.init.student import Student
from etpi_assets.curation.retokenise import retokenise
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord, Turn, own_messages

_TURNS, _LINES, _WIDTH = 3, 8, 110
"""Turns, lines of a part and characters of a line that a terminal shows; `--json` has all of them."""


@dataclass(frozen=True)
class TextSpan:
    """A part of the text that a model is trained on.

    Attributes:
        turn: the number of the turn whose label it is; None: context.
        dropped: why a label is not trained; empty if it is.
    """

    text: str
    turn: int | None = None
    dropped: str = ""

    @property
    def is_trained(self) -> bool:
        return self.turn is not None and not self.dropped


def parts(rollout: RolloutRecord, student: Student, *, native: bool, strips_think: bool) -> list[TextSpan]:
    """Return the first agent's conversation in the student's template; as messages, if it is not at hand.

    Args:
        native: recorded ids are trained.
        strips_think: outputs are trained without their think blocks.

    Raises ValueError: the template does not take the conversation.
    """
    agent = rollout.agents[0]
    if student.chat is None:
        return list(_messages(agent))
    outputs: dict[int, tuple[tuple[Sequence[int], Sequence[int]], str]]
    if native:
        outputs = {turn.turn: ((turn.prompt_ids or (), turn.output_ids or ()), "") for turn in agent.turns}
    else:
        cut = {turn.turn for turn in agent.turns if turn.finish_reason == "length"}
        kwargs = {"enable_thinking": False} if student.thinking_switch and strips_think else {}
        form: dict[str, Any] = {"tools": rollout.tools, "template_kwargs": kwargs, "bare": strips_think}
        rendered = retokenise(map(vars, own_messages(agent)), student.chat, truncated=cut, **form)
        outputs = {turn.turn: (turn.bare or (turn.prompt_ids, turn.output_ids), turn.fault or "") for turn in rendered}
    shown, before = list[TextSpan](), ""
    for turn in agent.turns:
        if turn.turn in outputs:
            ids, fault = outputs[turn.turn]
            text, label = map(student.chat.decode, ids)
            common = os.path.commonprefix([before, text])
            start = len(common) if common == before else common.rfind("\n") + 1  # whole lines of what is new
            shown += [TextSpan(text[start:]), TextSpan(label, turn.turn, _dropped(turn) or fault)]
            before = text + label
    return shown


def _dropped(turn: Turn) -> str:
    return turn.parse_error or ("it was cut at the output limit" if turn.finish_reason == "length" else "")


def _messages(agent: AgentRecord) -> Iterator[TextSpan]:
    turns = {turn.turn: turn for turn in agent.turns}
    for message in own_messages(agent):
        calls = f"\n{json.dumps(message.tool_calls, ensure_ascii=False)}" if message.tool_calls else ""
        turn = turns.get(message.turn) if message.role == "assistant" and message.turn is not None else None
        yield TextSpan(f"[{message.role}]\n")
        yield TextSpan(f"{message.content}{calls}\n", turn.turn if turn else None, _dropped(turn) if turn else "")


def lines(shown: Sequence[TextSpan], place: str) -> list[str]:
    """Return the preview for a terminal: labels have a bar before each line, and colour; `place`: the row's."""
    labels = [part for part in shown if part.turn is not None]
    trained = sum(part.is_trained for part in labels)
    text = [f"  {place} as it will be trained, ▌ before its labels ({trained} of {len(labels)} turns):"]
    hidden = [part.turn for part in labels[_TURNS:-1]]
    next_label = {id(part): after.turn for part, after in pairwise(shown)}
    for part in shown:
        if hidden and part.turn == hidden[0]:
            span = f"turn {hidden[0]}" if len(hidden) == 1 else f"turns {hidden[0]} to {hidden[-1]}"
            text.append(click.style(f"    … {span} hidden, --json shows all …", dim=True))
        if {part.turn, next_label.get(id(part))} & set(hidden):
            continue
        (bar, colour), half = ("▌", "green") if part.is_trained else (" ", None), _LINES // 2
        rows = part.text.strip("\n").split("\n")
        if len(rows) > _LINES:
            rows = [*rows[:half], f"... {len(rows) - 2 * half} lines ...", *rows[-half:]]
        cut = (row if len(row) <= _WIDTH else f"{row[:_WIDTH]}..." for row in rows)
        text += [click.style(f"  {bar} {row}".rstrip(), fg=colour, dim=not part.is_trained) for row in cut]
        if part.dropped:
            text.append(f"    (turn {part.turn} is not trained: {part.dropped})")
    return text


def as_json(shown: Sequence[TextSpan]) -> list[dict[str, Any]]:
    """Return the parts whole."""
    return [{"text": p.text, "turn": p.turn, "trained": p.is_trained, "dropped": p.dropped or None} for p in shown]
