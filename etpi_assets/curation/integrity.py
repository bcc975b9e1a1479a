"""Checks of pairs and data sets that a correct build always passes: ids, counts, labels, leaks.

Each check has figures that are computed per block of rollouts (`*_figures`, values of JSON), summed by `merged` of
`trajectories.rollout_checks`, and judged by `checks.judged` or `*_outcome`. Checks whose floors and bounds a spec sets
are in `gates`.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.checks import faulty, judged, outcome
from etpi_assets.curation.lost import listed_with_keys
from etpi_assets.curation.merge import expand, turns_of
from etpi_assets.curation.pairs import label_text
from etpi_assets.curation.steering import NGRAM_IDS, SteeringNgrams
from etpi_assets.curation.strip_think import close_tail, last_turn, thinks_in_history, without_tail
from etpi_assets.specs.experiment import DatasetSection, PairsSection
from etpi_assets.trajectories.tables import Key, iter_prompts, turn_keys
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.marks import THINK, THINK_END, other_block, without_code
from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.lake.check_outcome import CheckOutcome, listed
from etpi_resources.lake.stored import batches, counts
from etpi_resources.prefix_tree import PrefixTree
from etpi_resources.token_ids import arrays, common_prefix

_SHOWN = 3
_TEXT = 60
"""Characters shown of a prompt from the first difference on."""

AgentKey = tuple[str, str]
KEY = ["rollout_id", "agent_id", "turn"]
STEERING_COLUMNS = [*KEY, "prefix_turn", "pair_id", "suffix_ids", "output_ids"]
"""The columns that `steering_figures` reads of the pairs."""


def validation_outcome(rows: Mapping[str, int], section: DatasetSection) -> CheckOutcome:
    """Warn if `val_fraction` leaves no row for validation, given the number of rows of each split."""
    share, validating = section.val_fraction, rows.get("val", 0)
    words = {"validating": validating, "all_rows": sum(rows.values()), "share": share}
    return outcome("validation_rows", bool(validating) or not share, rows, hint=section.val_by, **words)


def reconcile_figures(offered: pa.Table, kept: pa.Table, dropped: pa.Table) -> dict[str, Any]:
    """Count the turns kept and dropped, and those of the offered ones that are missing or duplicated."""
    wrong = faulty(_unbalanced(offered, kept, dropped))
    return {"kept": len(kept), "dropped": len(dropped), "reasons": dict(counts(dropped, "reason")), "wrong": wrong}


def reconcile_outcome(name: str, counted: Mapping[str, Any], offered: int, training: int | None = None) -> CheckOutcome:
    """Check that kept + dropped are the offered turns (`KEY` columns), each once, and that some are left to train on.

    Args:
        training: the number of training rows; None: every kept turn.
    """
    wrong, reasons = counted["wrong"], Counter(counted["reasons"])
    unread = offered - counted["kept"] - counted["dropped"]  # of blocks that nothing read
    training = counted["kept"] if training is None else training
    return judged(
        name,
        {**counted, "offered": offered, "training": training, "wrong": {**wrong, "n": wrong["n"] or unread}},
        holds=bool(training) and not unread,
        case="doubled" if wrong["n"] or unread else "",
        hint=max(reasons, key=reasons.__getitem__, default=""),
        by_reason=listed_with_keys(reasons),
    )


def _unbalanced(offered: pa.Table, *accounted: pa.Table) -> list[Key]:
    """Return the turns whose number of rows in `accounted` differs from that in `offered`, sorted."""
    rows = Counter(turn_keys(offered))
    for table in accounted:
        rows.subtract(turn_keys(table))
    return sorted(key for key, n in rows.items() if n)


def capture_outcome(captures: Counter[str], section: PairsSection) -> CheckOutcome:
    """Check that every pair is of the capture that the spec asks for."""
    wanted = section.capture
    words = {"wanted": wanted, "of_spec": captures[wanted], "by_capture": listed(captures)}
    return outcome("capture_not_mixed", set(captures) <= {wanted}, dict(captures), **words)


def history_figures(pairs: pa.Table, captured: pa.Table, chat: ChatFormat) -> dict[str, Any]:
    """Count the prompts compared and those that differ, and describe the first.

    Args:
        captured: pairs built from the captured ids of some of the same turns.
    """
    captured_prompts = dict(iter_prompts(captured))
    compared, differing = 0, []
    for key, ids in iter_prompts(pairs) if captured_prompts else ():
        if key not in captured_prompts:
            continue
        compared += 1
        original, rebuilt = chat.decode(captured_prompts[key].tolist()), chat.decode(ids.tolist())
        if original != rebuilt:
            at = len(os.path.commonprefix([original, rebuilt]))
            read, shown = original[at : at + _TEXT], rebuilt[at : at + _TEXT]
            differing.append(f"{'/'.join(map(str, key))}: the model read {read!r} where the data set has {shown!r}")
    figures = {"compared": compared, "pairs": len(pairs)}
    return figures | ({"differing": faulty(differing)} if compared else {})


def think_figures(
    pairs: pa.Table, section: PairsSection, chat: ChatFormat, quoted: Mapping[str, int]
) -> dict[str, Any]:
    """Count the forms of the prompts' tails, outputs with think text, and inputs that end in an open block.

    Of recorded ids, earlier turns with think text that could not be cut are counted too.

    Args:
        quoted: pair_id -> the number of think tags that its turn quotes, which are no think text. Of recorded ids,
            tags in code are quoted.
    """
    tails, quoting, uncut = Counter[str](), 0, 0
    thinking, opened = list[str](), list[str]()
    for batch in batches(pairs, ["pair_id", "metadata", "capture", "suffix_ids", "output_ids"]):
        tails.update(json.loads(facts)["tail"] for facts in batch["metadata"].to_pylist())
        if section.capture == "native" and section.history_think == "strip":
            uncut += sum(thinks_in_history(ids, chat) for ids in arrays(batch["suffix_ids"]) if ids is not None)
        if not section.strip_think:
            continue
        names = (batch[column].to_pylist() for column in ("pair_id", "capture"))
        for name, capture, suffix, output in zip(
            *names, arrays(batch["suffix_ids"]), arrays(batch["output_ids"]), strict=True
        ):
            assert suffix is not None and output is not None, "the columns have no nulls"
            text = label_text(output, chat)
            tags = _think_tags(text)
            plain = _think_tags(without_code(text)) if tags and capture == "native" else tags
            if plain > quoted.get(name, 0) or other_block(text):
                thinking.append(name)
            else:
                quoting += tags > 0
            if chat.tail_form(last_turn(suffix, chat).tolist()) == "open":
                opened.append(name)
    figures: dict[str, Any] = {"pairs": len(pairs), "prompt_tails": dict(tails)}
    figures |= {"histories_with_think": uncut} if uncut else {}
    if section.strip_think:
        figures |= {"outputs_with_think": faulty(thinking), "open_prompts": faulty(opened), "quoting_tags": quoting}
    return figures


def _think_tags(text: str) -> int:
    return text.count(THINK) + text.count(THINK_END)


def think_outcome(counted: Mapping[str, Any], section: PairsSection, chat: ChatFormat) -> CheckOutcome:
    """Check that no output has think text and no input ends in an open think block, if think is stripped."""
    case = "" if section.strip_think else "kept"
    tails = listed(counted["prompt_tails"])
    return judged("no_think_in_output", {**counted, "tokenizer": chat.name}, case=case, tails=tails)


def steering_figures(pairs: pa.Table, steering: SteeringNgrams) -> dict[str, Any]:
    """Count the pairs with an n-gram of steering, and describe the first; the table has whole agents."""
    leaks: list[tuple[str, str]] = []
    agent: tuple[str, str] | None = None
    ends: dict[int, np.ndarray] = {}
    for batch in batches(pairs, STEERING_COLUMNS) if steering else ():
        names = (column.to_pylist() for column in batch.columns[:5])
        ids_of = (arrays(column) for column in batch.columns[5:])
        for rollout_id, agent_id, turn, prefix, name, suffix, output in zip(*names, *ids_of, strict=True):
            if agent != (rollout_id, agent_id):
                agent, ends = (rollout_id, agent_id), {}
            # The pair that this one extends was searched before. Its last ids are searched again with this suffix, for
            # n-grams that begin in one and end in the other.
            seam = ends.get(prefix, np.empty(0, dtype=np.int32))
            ids = np.concatenate([seam, suffix, output])
            ngram = steering.find(ids)
            # A leak counts for one pair, not for those that extend it.
            ends[turn] = ids[-4 * NGRAM_IDS :].copy() if ngram is None else ids[:0]
            if ngram is not None:
                leaks.append((name, ngram))
    return {"pairs": len(pairs), "leaks": faulty(leaks)}


def default_render_figures(
    pairs: pa.Table, expected: Mapping[AgentKey, Sequence[int] | np.ndarray], section: PairsSection, chat: ChatFormat
) -> dict[str, Any]:
    """Count agents, those compared, and those whose prompt differs; the table has whole agents.

    Args:
        expected: (rollout_id, agent_id) -> ids of the default prompt, generation prompt included. Agents without an
            entry are not compared.
    """
    compared, differ, agents = 0, [], set()
    for (rollout_id, agent_id, turn), prompt in iter_prompts(pairs):
        agent = rollout_id, agent_id
        if agent in agents:
            continue
        agents.add(agent)
        if agent not in expected:
            continue
        compared += 1
        wanted = np.asarray(expected[agent], dtype=np.int32)
        if turn == 0:
            wanted = close_tail(wanted, chat) if section.strip_think else wanted
        else:  # earlier turns follow the generation prompt, without the think block at its end
            wanted = without_tail(wanted, chat)
        same = common_prefix(wanted, prompt)
        if same < len(wanted) or (turn == 0 and len(prompt) > len(wanted)):
            differ.append(f"{rollout_id}/{agent_id}/{turn} at position {same}")
    return {"agents": len(agents), "compared": compared, "differ": faulty(differ)}


def label_figures(rows: pa.Table, pairs: pa.Table, sequences: pa.Table) -> dict[str, Any]:
    """Count the labels of rows and of sequences, with their weights, and the rows that are not at their span."""
    label_tokens, weighted_tokens, laid = 0, 0.0, {}
    for sequence in _sequences(sequences):
        _, labels, weights = expand(sequence)
        label_tokens += int((labels != IGNORE_INDEX).sum())
        weighted_tokens += float(weights.sum())
        tree = PrefixTree.from_row(sequence)
        if tree.find_error() is None:
            laid[sequence["sequence_id"]] = sequence, tree
    columns = ["pair_id", "split", "sequence_id", "span_start", "span_end", "weight", "copies", "output_tokens"]
    wrong = faulty(
        row["pair_id"]
        for row, *ids in turns_of(rows, pairs, columns)
        if row["sequence_id"] not in laid or not _is_in_place(row, *laid[row["sequence_id"]], *ids)
    )
    return {
        "label_tokens": label_tokens,
        "row_tokens": pc.sum(rows["output_tokens"]).as_py() or 0,  # pyright: ignore[reportAttributeAccessIssue]
        "weighted_tokens": weighted_tokens,
        "sequences": len(sequences),
        "rows": len(rows),
        "wrong": wrong,
    }


def label_outcome(counted: Mapping[str, Any]) -> CheckOutcome:
    """Check that the labels of the sequences are the outputs of the rows, each after its own input, and that there are
    labels."""
    return judged("label_tokens", counted, holds=counted["label_tokens"] == counted["row_tokens"] > 0)


def _sequences(sequences: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows of `sequences`, with lists as arrays."""
    lists = ["input_ids", "node_starts", "node_parents", "node_positions", "span_starts", "span_ends", "span_weights"]
    for batch in batches(sequences, ["sequence_id", "split", *lists]):
        names = (column.to_pylist() for column in batch.columns[:2])
        for name, split, *of_sequence in zip(*names, *map(arrays, batch.columns[2:]), strict=True):
            yield {"sequence_id": name, "split": split, **dict(zip(lists, of_sequence, strict=True))}


def _is_in_place(
    row: Mapping, sequence: Mapping, tree: PrefixTree, prompt: np.ndarray | None, output: np.ndarray | None
) -> bool:
    """Return whether a row's span in its sequence is its output after its input, in its split and with its weight."""
    if prompt is None or output is None or not len(prompt) or not len(output) or row["split"] != sequence["split"]:
        return False
    start, end = row["span_start"], row["span_end"]
    at = (sequence["span_starts"] == start) & (sequence["span_ends"] == end)
    if not at.any() or not np.isclose(sequence["span_weights"][at], row["weight"] * row["copies"], rtol=1e-5).all():
        return False
    if end - start != len(output) or not 0 < end <= tree.length:
        return False
    ids = sequence["input_ids"]
    if not tree.has_branches:
        return len(prompt) == start and np.array_equal(ids[:start], prompt) and np.array_equal(ids[start:end], output)
    branch = tree.branch_to(end - 1)
    in_one_piece = np.array_equal(branch[-len(output) :], np.arange(start, end))
    return in_one_piece and np.array_equal(ids[branch], np.concatenate([prompt, output]))


def heldout_figures(rows: pa.Table) -> dict[str, Any]:
    """Return the (repository, split) and the tasks that the rows have."""
    splits = rows.group_by(["repo", "split"]).aggregate([])
    return {
        "splits": [[row["repo"], row["split"]] for row in splits.to_pylist()],
        "tasks": rows["task_id"].unique().to_pylist(),
    }


def repositories_held_out(tasks: pa.Table, of_code: Collection[str]) -> set[str]:
    """Return the repositories of held-out tasks of which nothing may be trained.

    A suite that has a repository in both splits splits it by time (`split_by_repo`), and keeps out its held-out tasks
    alone. So do suites of questions, whose "repository" is a source that other suites train on.

    Args:
        tasks: columns suite, repo and split. of_code: the suites whose repositories are repositories.
    """
    rows = tasks.select(["suite", "repo", "split"]).to_pylist()
    trained, heldout = (
        {(r["suite"], r["repo"]) for r in rows if r["split"] == split} for split in ("train", "heldout")
    )
    anywhere = {repo for _, repo in trained}
    return {repo for suite, repo in heldout - trained if suite in of_code or repo not in anywhere}


def heldout_outcome(
    counted: Mapping[str, Any],
    heldout_repos: Collection[str],
    heldout_tasks: Collection[str],
    val_by: Literal["repository", "conversation"],
) -> CheckOutcome:
    """Check that no row is of a held-out repository or task, and that each repository is known and in one split.

    Args:
        heldout_repos, heldout_tasks: those of the evaluation, and those that the spec names.
        val_by: `dataset.val_by`; conversations of one repository may be in both splits.
    """
    splits_of: defaultdict[str | None, set[str]] = defaultdict(set)
    for repo, split in counted["splits"]:
        splits_of[repo].add(split)
    both = sorted(str(repo) for repo, splits in splits_of.items() if len(splits) > 1)
    faults = {
        "leaked": sorted(repo for repo in splits_of if repo in set(heldout_repos)),
        "tasks": sorted(str(task) for task in {*counted["tasks"]} & {*heldout_tasks})[:_SHOWN],
        "both": both if val_by == "repository" else [],
        "unknown": None in splits_of,
    }
    figures = {
        "repos": {str(repo): "+".join(sorted(splits)) for repo, splits in splits_of.items()},
        "heldout_repos": sorted(heldout_repos),
    }
    words = {"count": len(splits_of), "heldout": len(set(heldout_repos)), **faults}
    return outcome("heldout_split", not any(faults.values()), figures, **words)
