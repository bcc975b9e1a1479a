"""The training data of an experiment: its versions, and its sequences as prefix trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from etpi.view.catalog_file import Queries, Row
from etpi.view.pages.overview import find_experiment
from etpi.view.pages.page import NotFound, Page, number, text, with_query
from etpi.view.pages.tokens import SHADES, Statistics, Token, influence_scale, shown, vocabulary
from etpi_resources.charts import bars
from etpi_resources.lake.lake import Lake
from etpi_resources.prefix_tree import PrefixTree

PAGE_ROWS = 50
SORTS = ("id", "branches", "loss", "influence")
EDGE = 30
"""Tokens shown at either end of a long stretch without loss."""
SPAN_TOKENS = 400
"""The most tokens of a span on the page of a sequence."""
PAGE_TOKENS = 12_000
DEEPEST = 8
"""The deepest indentation."""


def dataset(queries: Queries, lake: Lake, request: Request) -> Page:
    name = request.path_params["experiment"]
    row = find_experiment(queries, name)
    versions = queries.rows("dataset_versions", experiment=name)
    if not any(version["n_rows"] for version in versions):
        raise NotFound(f"{name} has no data set yet; `etpi run {name}` makes it.")
    sort = text(request, "sort") or "id"
    sort = sort if sort in SORTS else "id"
    first, of_rollout = number(request, "first", 0) or 0, text(request, "rollout")
    chosen = {"task": text(request, "task"), "split": text(request, "split"), "contains": text(request, "contains")}
    sequences = queries.rows(
        "sequences", experiment=name, sort=sort, first=first, count=PAGE_ROWS, rollout=of_rollout, **chosen
    )
    tokenizer = (queries.row("tokenizer", origin="eval", made_for=name) or {}).get("tokenizer")
    words = vocabulary(queries, tokenizer, [number for listed in sequences for number in listed["trained_ids"] or []])
    for listed in sequences:
        listed["trained"] = "".join(words.get(number, "") for number in listed["trained_ids"] or [])
    shares = queries.rows("loss_share", experiment=name)
    matches = sequences[0]["matches"] if sequences else 0
    values = {
        "experiment": row,
        "versions": versions,
        "shares": shares,
        "share_plot": bars(
            "Share of the loss by turn", [(f"turn {s['turn']}", 100 * s["share_of_loss"]) for s in shares[:16]], " %"
        ),
        "drops": queries.rows("dataset_drops", experiment=name),
        "sequences": sequences,
        "matches": matches,
        "first": first,
        "sort": sort,
        "sorts": SORTS,
        "of_rollout": of_rollout,
        "chosen": chosen,
        "following": with_query(request, first=first + PAGE_ROWS) if first + PAGE_ROWS < matches else None,
        "before": with_query(request, first=max(0, first - PAGE_ROWS) or None) if first else None,
        "link": lambda **changes: with_query(request, **changes),
    }
    return Page("dataset.html.jinja", values)


# --- one sequence --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one node with one weight; of weight 0 they are context.

    Attributes:
        rows: the dataset rows whose output it is.
        hidden: tokens after `tokens` that the page leaves out; `tail` come after them.
    """

    weight: float
    rows: Sequence[Row]
    tokens: Sequence[Token]
    hidden: int
    tail: Sequence[Token]
    length: int


@dataclass(frozen=True)
class Node:
    """A node of the tree: its number, the node that it continues, its indentation and its stretches."""

    number: int
    parent: int
    depth: int
    position: int
    length: int
    is_branch: bool
    stretches: Sequence[Stretch]


def sequence(queries: Queries, lake: Lake, request: Request) -> Page:
    name, sequence_id = request.path_params["experiment"], request.path_params["sequence_id"]
    row = queries.row("sequence", experiment=name, sequence=sequence_id)
    experiment = find_experiment(queries, name)
    if row is None:
        raise NotFound(f"The current data set of {name} has no sequence {sequence_id!r}; its page lists them.")
    rows = queries.rows("sequence_rows", experiment=name, sequence=sequence_id)
    tokenizer = (queries.row("tokenizer", origin="eval", made_for=name) or {}).get("tokenizer")
    words = vocabulary(queries, tokenizer, row["input_ids"])
    tree = PrefixTree.from_row(row)
    if fault := tree.find_error():
        raise NotFound(f"Sequence {sequence_id} of {name} is no prefix tree: {fault}.")
    influences = list[float]()
    for span in queries.rows("influences", experiment=name, sequence=sequence_id):
        influences = influences or [0.0] * len(row["input_ids"])
        influences[span["span_start"] : span["span_start"] + len(span["influences"])] = span["influences"]
        next(r for r in rows if r["span_start"] == span["span_start"])["influence"] = span["influence"]
    values = {
        "experiment": experiment, "sequence": row, "rows": rows, "tree": tree, "known": bool(words),
        "nodes": nodes_of(row, rows, tree, words, influences, influence_scale(queries, name)), "tokenizer": tokenizer,
        "shading": SHADES["influence"] if influences else None,
    }  # fmt: skip
    return Page("sequence.html.jinja", values)


def nodes_of(
    row: Row,
    rows: Sequence[Row],
    tree: PrefixTree,
    words: dict[int, str],
    influences: Sequence[float] = (),
    largest: float = 0.0,
) -> list[Node]:
    """Return the nodes depth first, so that a shared prefix comes once and its branches follow it, indented.

    Args:
        influences: of each token, which shades it; none: nothing is shaded. largest: the dark end of the shades.
    """
    children: dict[int, int] = {}
    for parent in tree.parents.tolist():
        children[parent] = children.get(parent, 0) + 1
    depths: list[int] = []
    nodes: list[Node] = []
    left = PAGE_TOKENS
    positions = tree.token_positions()
    for node, parent in enumerate(tree.parents.tolist()):
        is_branch = parent >= 0 and children[parent] > 1
        depths.append(0 if parent < 0 else depths[parent] + is_branch)
        start, end = int(tree.starts[node]), int(tree.ends[node])
        stretches = []
        for begin, stop, weight in _stretches(row, start, end):
            of_stretch = [r for r in rows if weight and r["span_start"] < stop and r["span_end"] > begin]
            shades = None
            if influences and weight:
                shades = Statistics({"influence": influences[begin:stop]}, {"influence": largest})
            span = row["input_ids"], begin, stop, weight, of_stretch, words, int(positions[begin]), left
            stretch = _stretch(*span, shades)
            left -= len(stretch.tokens) + len(stretch.tail)
            stretches.append(stretch)
        depth = min(depths[node], DEEPEST)
        nodes.append(Node(node, parent, depth, int(tree.positions[node]), end - start, is_branch, stretches))
    return nodes


def _stretches(row: Row, start: int, end: int) -> list[tuple[int, int, float]]:
    """Return (begin, stop, weight) of the parts of a node, in order; 0.0 between spans."""
    parts, at = [], start
    for begin, stop, weight in sorted(zip(row["span_starts"], row["span_ends"], row["span_weights"], strict=True)):
        if stop <= start or begin >= end:
            continue
        begin, stop = max(begin, at), min(stop, end)
        if begin > at:
            parts.append((at, begin, 0.0))
        if stop > begin:
            parts.append((begin, stop, weight))
        at = max(at, stop)
    if at < end:
        parts.append((at, end, 0.0))
    return parts


def _stretch(
    ids: Sequence[int],
    begin: int,
    stop: int,
    weight: float,
    rows: Sequence[Row],
    words: dict[int, str],
    position: int,
    left: int,
    shades: Statistics | None,
) -> Stretch:
    length, shade = stop - begin, "influence" if shades else ""
    most = max(0, min(SPAN_TOKENS if weight else 2 * EDGE, left))
    if length <= most:
        return Stretch(weight, rows, shown(ids[begin:stop], words, position, shade, shades), 0, (), length)
    head = most if weight else most // 2
    tail = 0 if weight else most // 2
    end = shown(ids[stop - tail : stop], words, position + length - tail) if tail else ()
    first = shown(ids[begin : begin + head], words, position, shade, shades)
    return Stretch(weight, rows, first, length - head - tail, end, length)
