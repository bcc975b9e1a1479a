"""One turn as tokens: captured ids shaded by a quantity, and the training pair that was made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
from markupsafe import Markup
from starlette.requests import Request

from etpi.view.catalog_file import Queries, Row
from etpi.view.formats import visible
from etpi.view.pages.page import NotFound, Page, number, text, with_query
from etpi.view.pages.rollout import find_rollout, key_of
from etpi_resources.lake.lake import Lake
from etpi_resources.token_ids import common_prefix

PAGE_TOKENS = 4_000
"""The most tokens of a prompt on a page."""
CONTEXT = 24
"""Kept tokens shown before and after a difference; those between are counted."""
LEVELS = 9
LIMIT = 1e6
"""The largest figure that a shade tells apart: an engine writes -inf for a token that it excluded."""

SHADES = {
    "weight": "weight of the token in the loss of the data set (weight x copies); 0: not in the loss",
    "label": "whether the token is in the loss",
    "logprob": "log-probability under the engine that generated it, nats: 0 is certain, darker is less likely",
    "entropy": "entropy of the trainer's distribution at the token, nats: darker is less certain",
    "influence": "what training on the token did to the held-out metric of [blame]: blue raised it, red lowered it",
    "ratio": "importance ratio: exp(trainer's log-probability - rollout's); red above 1, blue below",
}


@dataclass(frozen=True)
class Token:
    """One token on the page: its text, id and position in the whole prompt + output, its shade and figures."""

    text: str
    id: int
    position: int
    shade: str
    figures: str


@dataclass(frozen=True)
class Statistics:
    """Figures of each output token, aligned with the output ids.

    Attributes:
        values: shade -> its figures, of those that were recorded, in the order of SHADES.
        largest: shade -> the figure of the data set at the dark end, of weights and influences.
    """

    values: Mapping[str, Sequence[float]]
    largest: Mapping[str, float]


def ratios(logprobs: Sequence[float] | None, policy: Sequence[float] | None) -> list[float] | None:
    """Return exp(policy - rollout) of each token, None if either is unknown."""
    if logprobs is None or policy is None or len(logprobs) != len(policy):
        return None
    return [math.exp(min(p - r, 50.0)) for r, p in zip(logprobs, policy, strict=True)]


def tokens(queries: Queries, lake: Lake, request: Request) -> Page:
    key = key_of(request)
    row = find_rollout(queries, key)
    agents = queries.rows("agents", origin=key["origin"], made_for=key["made_for"], rollouts=[key["rollout"]])
    agent = text(request, "agent") or (agents[0]["agent_id"] if agents else "")
    turn = number(request, "turn", 0) or 0
    chain = queries.rows("turn_ids", **key, agent=agent, turn=turn)
    if not chain:
        raise NotFound(f"Rollout {key['rollout']} has no turn {turn} of {agent!r}.")
    pieces, last = chain[:-1], chain[-1]
    pair, tokenizer = _pair(queries, key, agent, turn, text(request, "experiment"))
    if last["suffix_ids"] is not None:  # ids that an engine captured are of its tokenizer, whatever a pair has
        of_set = queries.row("tokenizer", origin=key["origin"], made_for=key["made_for"]) or {}
        tokenizer = tokenizer or of_set.get("tokenizer")
    prompt = [*_history(pieces), *(last["suffix_ids"] or [])]
    output = [*(last["output_ids"] or [])]
    words = vocabulary(queries, tokenizer, [*prompt, *output, *pair.input_ids, *pair.output_ids])
    statistics = _statistics(queries, key, agent, last, pair, output)
    shade = text(request, "shade") or ""
    if shade not in SHADES:
        shade = next((name for name in ("logprob", "weight") if name in statistics.values), "logprob")
    whole, begin = text(request, "whole") is not None, len(prompt) - len(last["suffix_ids"] or [])
    last_page = max(0, len(prompt) - PAGE_TOKENS)
    first = number(request, "from", last_page) or 0 if whole else begin
    shown_prompt = prompt[first : first + PAGE_TOKENS]
    values = {
        "rollout": row,
        "agents": agents,
        "agent": agent,
        "turn": turn,
        "last": last,
        "captured": last["suffix_ids"] is not None,
        "prompt": shown(shown_prompt, words, first),
        "prompt_tokens": len(prompt),
        "first": first,
        "begin": begin,
        "whole": whole,
        "more": first + PAGE_TOKENS if first + PAGE_TOKENS < len(prompt) else None,
        "output": shown(output, words, len(prompt), shade, statistics),
        "shade": shade,
        "shades": SHADES,
        "recorded": {name: name in statistics.values for name in SHADES},
        "pair": pair,
        "pair_prompt": _folded(diff(prompt, pair.input_ids, _breaks(words)), words) if pair.exists and prompt else [],
        "pair_output": _folded(diff(output, pair.output_ids, _breaks(words)), words) if pair.exists and output else [],
        "pair_tokens": shown(pair.output_ids, words, len(pair.input_ids), shade, statistics)
        if pair.exists and not output
        else [],
        "pair_input": shown(pair.input_ids[-PAGE_TOKENS:], words, max(0, len(pair.input_ids) - PAGE_TOKENS))
        if pair.exists and not prompt
        else [],
        "tokenizer": tokenizer,
        "known": bool(words),
        "link": lambda **changes: with_query(request, **changes),
    }
    return Page("tokens.html.jinja", values)


# --- the pair ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShownPair:
    """The training pair of a turn in one experiment; `exists`: there is one; `experiments` have one each."""

    exists: bool
    experiment: str | None
    experiments: Sequence[str]
    input_ids: Sequence[int]
    output_ids: Sequence[int]
    row: Row
    metadata: dict[str, Any]


def _pair(
    queries: Queries, key: dict[str, str], agent: str, turn: int, wanted: str | None
) -> tuple[ShownPair, str | None]:
    place = {"rollout": key["rollout"], "agent": agent, "turn": turn}
    rows = queries.rows("pairs_of", **place) if key["origin"] == "set" else []
    names = [row["experiment"] for row in rows]
    if not names:
        return ShownPair(False, None, [], [], [], {}, {}), None
    experiment = wanted if wanted in names else names[0]
    chain = queries.rows("pair_ids", **place, experiment=experiment)
    last = chain[-1]
    input_ids = [*_history(chain[:-1]), *last["suffix_ids"]]
    pair = ShownPair(True, experiment, names, input_ids, last["output_ids"], last, json.loads(last["metadata"] or "{}"))
    return pair, next(row["tokenizer"] for row in rows if row["experiment"] == experiment)


def _history(pieces: Sequence[Row]) -> list[int]:
    return [number for piece in pieces for number in (*piece["suffix_ids"], *piece["output_ids"])]


def _statistics(
    queries: Queries, key: dict[str, str], agent: str, turn: Row, pair: ShownPair, output: Sequence[int]
) -> Statistics:
    values: dict[str, Sequence[float] | None] = dict.fromkeys(SHADES)
    largest = dict[str, float]()
    values["logprob"] = turn["logprobs"] if turn["logprobs"] and len(turn["logprobs"]) == len(output) else None
    if key["origin"] == "rl":
        row = queries.row("policy_statistics", rollout=key["rollout"], made_for=key["made_for"]) or {}
        policy = _part(row.get("policy_logprobs"), turn["outputs_before"], len(output))
        values["entropy"] = _part(row.get("entropies"), turn["outputs_before"], len(output))
        values["ratio"] = ratios(values["logprob"], policy)
    if pair.exists and pair.row["weight"] is not None:
        place = {"agent": agent, "turn": turn["turn"]}
        if row := queries.row("influences", experiment=pair.experiment, rollout=key["rollout"], **place):
            values["influence"] = _aligned(output, pair.output_ids, row["influences"])
            largest["influence"] = influence_scale(queries, pair.experiment)
        weight = pair.row["weight"] * (pair.row["copies"] or 1)
        weights = _aligned(output, pair.output_ids, [weight] * len(pair.output_ids))
        values |= {"weight": weights, "label": [float(weight != 0) for weight in weights]}
        totals = queries.kept_rows("loss_totals")
        highest = (row["highest_weight"] for row in totals if row["experiment"] == pair.experiment)
        largest["weight"] = next(highest, 0.0)
    return Statistics({name: figures for name, figures in values.items() if figures is not None}, largest)


def influence_scale(queries: Queries, experiment: str | None) -> float:
    """Return the influence of an experiment's tokens that is shaded darkest; 0.0 without blame."""
    rows = queries.kept_rows("influence_scales")
    return next((row["largest"] for row in rows if row["experiment"] == experiment), 0.0)


def _aligned(output: Sequence[int], trained: Sequence[int], values: Sequence[float]) -> list[float]:
    """Return the values of trained ids at the captured output ids, 0.0 where the pair has an id no more."""
    if not output:
        return list(values)
    aligned, at = list[float](), 0
    for run in diff(output, trained):
        if run.kind != "added":
            aligned += values[at : at + len(run.ids)] if run.kind == "kept" else [0.0] * len(run.ids)
        at += len(run.ids) if run.kind != "removed" else 0
    return aligned


def _part(values: Sequence[float] | None, start: int, length: int) -> Sequence[float] | None:
    """Return the values of one turn's output from those of all turns; None if they are too few."""
    part = list(values or [])[start : start + length]
    return part if values and len(part) == length else None


# --- tokens --------------------------------------------------------------------------------------------------------


def vocabulary(queries: Queries, tokenizer: str | None, ids: Iterable[int]) -> dict[int, str]:
    """Return the text of each id; empty if the catalog does not have the tokenizer."""
    if tokenizer is None:
        return {}
    rows = queries.rows("vocabulary", tokenizer=tokenizer, ids=sorted(set(ids)))
    return {row["id"]: row["text"] for row in rows}


def shown(
    ids: Sequence[int],
    words: dict[int, str],
    position: int,
    shade: str = "",
    statistics: Statistics | None = None,
) -> list[Token]:
    """Return ids as tokens of the page, the first at `position`."""
    figures = statistics.values if statistics else {}
    values, top = figures.get(shade), statistics.largest.get(shade, 0.0) if statistics else 0.0
    return [
        Token(
            text=words.get(number, f"[{number}]"),
            id=number,
            position=position + place,
            shade=shade_class(shade, values[place], top) if values else "",
            figures=", ".join(f"{name} {column[place]:.4g}" for name, column in figures.items()),
        )
        for place, number in enumerate(ids)
    ]


_VISIBLE = str.maketrans({" ": "·", "\t": "→\t", "\n": "⏎\n", "\r": "␍"})


def token_spans(tokens: Iterable[Token]) -> Markup:
    """Return tokens as spans with their id, position and figures on hover; here, since a page has thousands of them."""
    spans = []
    for token in tokens:
        figures = f", {token.figures}" if token.figures else ""
        text = escape(visible(token.text.translate(_VISIBLE))) if token.text else "<i>∅</i>"
        style = f"t {token.shade}" if token.shade else "t"
        spans.append(f'<span class="{style}" title="id {token.id}, position {token.position}{figures}">{text}</span>')
    return Markup("".join(spans))


def shade_class(shade: str, value: float, top: float) -> str:
    """Return the class of a value: s0 (light) to s8 (dark); r1.. above and b1.. below 1 for ratios; s0 for no number.

    Args:
        top: the highest weight, or the largest influence, of the data set.
    """
    if math.isnan(value):
        return "s0"
    value = min(max(value, -LIMIT), LIMIT)
    match shade:
        case "label":
            return "s5" if value else "s0"
        case "logprob":
            return f"s{min(LEVELS - 1, int(-value / 0.5))}" if value <= 0 else "s0"
        case "entropy":
            return f"s{min(LEVELS - 1, max(0, int(value / 0.4)))}"
        case "influence":
            level = min(4, round(4 * abs(value) / top)) if top else 0
            return "s0" if not level else f"{'b' if value > 0 else 'r'}{level}"
        case "ratio":
            level = min(4, round(abs(math.log(max(value, 1e-9))) / 0.1))
            return "s0" if not level else f"{'r' if value > 1 else 'b'}{level}"
    return "s0" if not value or not top else f"s{max(1, round((LEVELS - 1) * min(1.0, value / top)))}"


@dataclass(frozen=True)
class TokenSpan:
    """Tokens with one fate in the pair, or the count of kept tokens that are not shown."""

    kind: str
    tokens: Sequence[Token] = ()
    hidden: int = 0


def _folded(runs: Sequence[Run], words: dict[int, str]) -> list[TokenSpan]:
    parts: list[TokenSpan] = []
    for run in runs:
        if run.kind != "kept" or len(run.ids) <= 3 * CONTEXT:
            parts.append(TokenSpan(run.kind, shown(run.ids, words, run.start)))
            continue
        middle = len(run.ids) - 2 * CONTEXT
        parts.append(TokenSpan("kept", shown(run.ids[:CONTEXT], words, run.start)))
        parts.append(TokenSpan("hidden", hidden=middle))
        parts.append(TokenSpan("kept", shown(run.ids[-CONTEXT:], words, run.start + CONTEXT + middle)))
    return parts


def _breaks(words: dict[int, str]) -> frozenset[int]:
    return frozenset(number for number, word in words.items() if "\n" in word)


Kind = Literal["kept", "removed", "added"]
CELLS = 1_000_000
"""The most pairs of ids that are compared one by one; longer parts are compared in pieces first."""
PIECE = 16


@dataclass(frozen=True)
class Run:
    """Ids in a row with one fate; `start` is their position in the old list (the new one where they were added)."""

    kind: Kind
    start: int
    ids: Sequence[int]


def diff(old: Sequence[int], new: Sequence[int], breaks: frozenset[int] = frozenset()) -> list[Run]:
    """Return the runs that turn `old` into `new`.

    Args:
        breaks: ids that end a line; parts that are too long are compared line by line.
    """
    old_array, new_array = np.asarray(old, np.int64), np.asarray(new, np.int64)
    before = common_prefix(old_array, new_array)
    after = common_prefix(old_array[before:][::-1], new_array[before:][::-1])
    middle_old, middle_new = old[before : len(old) - after], new[before : len(new) - after]
    runs = [Run("kept", 0, old[:before])]
    singly = len(middle_old) * len(middle_new) <= CELLS
    old_units, new_units = (
        [(number,) for number in ids] if singly else _lines(ids, breaks) for ids in (middle_old, middle_new)
    )
    old_ends, new_ends = (list(accumulate(map(len, units), initial=before)) for units in (old_units, new_units))
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, old_units, new_units, autojunk=False).get_opcodes():
        a1, a2, b1, b2 = old_ends[i1], old_ends[i2], new_ends[j1], new_ends[j2]
        if tag == "equal":
            runs.append(Run("kept", a1, old[a1:a2]))
        else:
            runs += [Run("removed", a1, old[a1:a2]), Run("added", b1, new[b1:b2])]
    runs.append(Run("kept", len(old) - after, old[len(old) - after :]))
    return _joined([run for run in runs if len(run.ids)])


def _lines(ids: Sequence[int], breaks: frozenset[int]) -> list[tuple[int, ...]]:
    """Split ids after each that ends a line; without such ids, into pieces."""
    if not breaks:
        return [tuple(ids[i : i + PIECE]) for i in range(0, len(ids), PIECE)]
    ends = [place + 1 for place, number in enumerate(ids) if number in breaks]
    return [tuple(ids[a:b]) for a, b in pairwise([0, *ends, len(ids)]) if a < b]


def _joined(runs: list[Run]) -> list[Run]:
    joined: list[Run] = []
    for run in runs:
        if joined and joined[-1].kind == run.kind and joined[-1].start + len(joined[-1].ids) == run.start:
            joined[-1] = Run(run.kind, joined[-1].start, [*joined[-1].ids, *run.ids])
        else:
            joined.append(run)
    return joined
