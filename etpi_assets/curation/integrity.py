"""What must hold of pairs and datasets, whatever the experiment: ids, counts, labels, leaks.

Belongs here: checks that a correct build always passes, each naming what to do. Does not belong here: floors and bounds
that a spec sets (`gates`).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.curation.merge import expand, turns_of
from etpi_assets.curation.steering import NGRAM_IDS, SteeringNgrams
from etpi_assets.curation.strip_think import close_tail, has_think, without_tail
from etpi_assets.specs.experiment import PairsSection
from etpi_assets.trajectories.tables import iter_prompts
from etpi_resources.chat.format import ChatFormat
from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.lake.stored import Rows, batches, columns_of, counts
from etpi_resources.prefix_tree import PrefixTree
from etpi_resources.token_ids import common_prefix

_SHOWN = 3
_TEXT = 60
"""Characters shown of a prompt where it departs."""

TurnKey = tuple[str, str, int]
KEY = ["rollout_id", "agent_id", "turn"]


def pairs_reconcile(turns: pa.Table, pairs: Rows, dropped: pa.Table) -> CheckOutcome:
    """Pairs + dropped are the turns of the selected rollouts (their `KEY` columns), each once, and there are pairs."""
    told = f"{len(turns)} turns = {len(pairs)} pairs + {len(dropped)} dropped"
    return _reconcile("pairs_reconcile", turns, columns_of(pairs, KEY), dropped, len(pairs), told)


def dataset_reconciles(pairs: Rows, rows: pa.Table, dropped: pa.Table) -> CheckOutcome:
    """Rows + dropped are the pairs, each once, and there are rows to train on."""
    told = f"{len(pairs)} pairs = {len(rows)} rows + {len(dropped)} dropped"
    training = counts(rows, "split")["train"]
    return _reconcile("dataset_reconciles", columns_of(pairs, KEY), rows, dropped, training, told)


def _reconcile(
    name: str, offered: pa.Table, kept: pa.Table, dropped: pa.Table, training: int, told: str
) -> CheckOutcome:
    reasons = counts(dropped, "reason")
    told += f" ({', '.join(f'{reason} {n}' for reason, n in reasons.most_common()) or 'none'})"
    figures = {"offered": len(offered), "kept": training, "dropped": len(dropped), "reasons": dict(reasons)}
    if wrong := _unbalanced(offered, kept, dropped):
        told += f": {len(wrong)} are missing or duplicated, first {wrong[:_SHOWN]}; do not use this version"
        return CheckOutcome(name, False, told, figures=figures)
    if not training:
        remedy = {
            "not_captured": 'the rollouts have no such ids: set pairs.capture = "retokenised", or collect native ones',
            "over_max_length": "raise dataset.max_length",
        }
        commonest = next(iter(dict(reasons.most_common())), "")
        told += f": nothing is left to train on; {remedy.get(commonest, 'see the table `dropped` for the reasons')}"
        return CheckOutcome(name, False, told, figures=figures)
    return CheckOutcome(name, True, told, figures=figures)


def _unbalanced(offered: pa.Table, *found: pa.Table) -> list[TurnKey]:
    """The turns that are not found exactly as often as offered, sorted."""
    signed = [
        table.select(KEY).append_column("n", pa.array(np.full(len(table), sign, dtype=np.int64)))
        for table, sign in ((offered, 1), *((table, -1) for table in found))
    ]
    sums = pa.concat_tables(signed).group_by(KEY).aggregate([("n", "sum")])
    wrong = sums.filter(pc.field("n_sum") != 0)
    return sorted(zip(*(wrong[column].to_pylist() for column in KEY), strict=True))


def capture_not_mixed(pairs: Rows, section: PairsSection) -> CheckOutcome:
    """Every pair is of the capture that the spec asks for."""
    found = counts(pairs, "capture")
    passed = set(found) <= {section.capture}
    message = f"{found[section.capture]} pairs, all {section.capture}."
    if not passed:
        message = (
            f"Pairs of capture {dict(found)}, the spec asks for {section.capture}: native and re-tokenised ids in one "
            "dataset teach two spellings. Make an experiment of each, or set pairs.capture."
        )
    return CheckOutcome("capture_not_mixed", passed, message, figures=dict(found))


def history_as_captured(pairs: Rows, captured: pa.Table, chat: ChatFormat) -> CheckOutcome:
    """Every prompt put together again from messages reads as the one the model was given, both edited alike.

    Args:
        captured: the pairs that the captured ids give, of any of the same turns; without rows, nothing is decided.
    """
    read = dict(iter_prompts(captured))
    compared, wrong, first = 0, 0, ""
    for key, ids in iter_prompts(pairs) if read else ():
        if key not in read:
            continue
        compared += 1
        theirs, ours = chat.decode(read[key].tolist()), chat.decode(ids.tolist())
        if theirs == ours:
            continue
        wrong += 1
        if not first:
            at = len(os.path.commonprefix([theirs, ours]))
            first = (
                f"{'/'.join(map(str, key))}: it read {theirs[at : at + _TEXT]!r} where the dataset has "
                f"{ours[at : at + _TEXT]!r}"
            )
    figures: dict[str, object] = {"compared": compared, "pairs": len(pairs)}
    if not compared:
        message = f"Cannot be decided: for none of {len(pairs)} pairs are there captured ids to compare with."
        return CheckOutcome("history_as_captured", True, message, figures=figures)
    figures["departing"] = wrong
    message = f"{compared} of {len(pairs)} prompts compared with what was captured, all read the same."
    if wrong:
        message = (
            f"{wrong} of {compared} prompts are not what the model was given, first {first}. A history that was "
            'compacted or edited on the way is in the captured ids alone: set pairs.capture = "native".'
        )
    return CheckOutcome("history_as_captured", not wrong, message, figures=figures)


def no_think_in_output(pairs: Rows, section: PairsSection, chat: ChatFormat) -> CheckOutcome:
    """No think id in any output, and no input that leaves a think block open, where think is stripped."""
    tails: Counter[str] = Counter()
    left: list[str] = []
    opened: list[str] = []
    for batch in batches(pairs, ["pair_id", "metadata", "suffix_ids", "output_ids"]):
        for name, facts, suffix, output in zip(*batch.columns, strict=True):
            tails[json.loads(facts.as_py())["tail"]] += 1
            if section.strip_think:
                left += [name.as_py()] if has_think(_array(output), chat) else []
                opened += [name.as_py()] if chat.tail_form(_array(suffix).tolist()) == "open" else []
    figures: dict[str, object] = {"tokenizer": chat.name, "prompt_tails": dict(tails)}
    if not section.strip_think:
        return CheckOutcome(
            "no_think_in_output", True, "Think blocks are kept (pairs.strip_think = false).", figures=figures
        )
    figures |= {"outputs_with_think": len(left), "open_prompts": len(opened)}
    if not left and not opened:
        message = f"No think id in {len(pairs)} outputs; prompt tails of {chat.name}: {dict(tails)}."
        return CheckOutcome("no_think_in_output", True, message, figures=figures)
    message = (
        f"{len(left)} outputs hold a think id and {len(opened)} inputs end in an open think block, first "
        f"{(left + opened)[:_SHOWN]}; prompt tails of {chat.name}: {dict(tails)}. The strip does not know this "
        "tokenizer's form: look at one such turn token by token, mend curation/strip_think.py, or set "
        "pairs.strip_think = false."
    )
    return CheckOutcome("no_think_in_output", False, message, figures=figures)


def no_steering_leak(pairs: Rows, traces: SteeringNgrams) -> CheckOutcome:
    """No run of steering, as ids or as words, in any input or output."""
    found: list[tuple[str, str]] = []
    agent: tuple[str, str] | None = None
    before: dict[int, np.ndarray] = {}
    columns = ["rollout_id", "agent_id", "turn", "prefix_turn", "suffix_ids", "output_ids", "pair_id"]
    for batch in batches(pairs, columns):
        for rollout_id, agent_id, turn, prefix, suffix, output, name in zip(*batch.columns, strict=True):
            if agent != (key := (rollout_id.as_py(), agent_id.as_py())):
                agent, before = key, {}
            # What stands before the suffix was searched with the pair it belongs to; its end is read again for runs
            # that cross the seam.
            seam = before.get(prefix.as_py(), np.empty(0, dtype=np.int32))
            ids = np.concatenate([seam, _array(suffix), _array(output)])
            run = traces.find(ids)
            # A leak is one pair's, not also the next one's.
            before[turn.as_py()] = ids[-4 * NGRAM_IDS :].copy() if run is None else ids[:0]
            if run is not None:
                found.append((name.as_py(), run))
    figures = {"pairs": len(pairs), "leaks": len(found)}
    if not found:
        return CheckOutcome("no_steering_leak", True, f"No run of steering in {len(pairs)} pairs.", figures=figures)
    message = (
        f"{len(found)} pairs hold steering, first {found[0][0]}: {found[0][1]!r}. The student would learn to obey a "
        "prompt it never gets. If it stands in inputs, the rollout set's messages and its agent section disagree; if "
        "in outputs, the teacher quotes it: drop those rollouts, or change the steering text."
    )
    return CheckOutcome("no_steering_leak", False, message, figures=figures)


def prompt_is_default_render(
    pairs: Rows, expected: Mapping[tuple[str, str], Sequence[int] | np.ndarray], section: PairsSection, chat: ChatFormat
) -> CheckOutcome:
    """Every agent's first input is the prompt that serving renders, id for id; where turn 0 was dropped, it begins so.

    Args:
        expected: (rollout_id, agent_id) -> ids of the default prompt, generation prompt included. Agents without an
            entry are not compared.
    """
    compared, wrong, agents = 0, [], set()
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
        else:  # what follows the generation prompt's tail is the turns before
            wanted = without_tail(wanted, chat)
        same = common_prefix(wanted, prompt)
        if same < len(wanted) or (turn == 0 and len(prompt) > len(wanted)):
            wrong.append(f"{rollout_id}/{agent_id}/{turn} at position {same}")
    figures = {"agents": len(agents), "compared": compared, "differ": len(wrong)}
    if wrong:
        message = (
            f"{len(wrong)} of {compared} agents' prompts are not the default render, first {wrong[:_SHOWN]}: the "
            "student would be trained on a prompt that serving never gives. Compare agent.prompt, agent.tools, "
            "base.tokenizer and base.chat_template with what the rollouts were made with."
        )
        return CheckOutcome("prompt_is_default_render", False, message, figures=figures)
    message = f"{compared} of {len(agents)} agents' prompts compared with the default render, all equal."
    if not compared:
        message = (
            f"Cannot be decided: for none of {len(agents)} agents is the default prompt known (imported rollouts)."
        )
    return CheckOutcome("prompt_is_default_render", True, message, figures=figures)


def label_tokens(rows: pa.Table, pairs: Rows, sequences: Rows) -> CheckOutcome:
    """Labels of the sequences are exactly the outputs of the rows, each on a branch behind its own input, and there are
    some.

    Rows stand in the order of the pairs, sequences in that of their first rows: few sequences are held at a time.
    """
    wanted = pc.sum(rows["output_tokens"]).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
    expected_weight = 0.0
    shelf = _Shelf(sequences)
    wrong: list[str] = []
    columns = ["pair_id", "sequence_id", "span_start", "span_end", "weight", "copies", "output_tokens"]
    for row, prompt, output in turns_of(rows, pairs, columns):
        expected_weight += row["weight"] * row["copies"] * row["output_tokens"]
        if prompt is None or output is None or not _in_place(row, shelf.take(row["sequence_id"]), prompt, output):
            wrong.append(row["pair_id"])
    shelf.read_on()
    figures = {
        "label_tokens": shelf.labelled, "row_tokens": wanted, "weighted_tokens": shelf.weighted,
        "sequences": len(sequences),
    }  # fmt: skip
    passed = not wrong and shelf.labelled == wanted > 0 and np.isclose(shelf.weighted, expected_weight, rtol=1e-5)
    message = f"{shelf.labelled} label tokens in {len(sequences)} sequences, exactly the outputs of {len(rows)} rows."
    if not passed:
        message = (
            f"{shelf.labelled} label tokens (weight {shelf.weighted:.0f}) in the sequences, {wanted} (weight "
            f"{expected_weight:.0f}) in the rows, {len(wrong)} rows not where they say, first {wrong[:_SHOWN]}: a "
            "healthy loss would hide this. Materialize upweighted_dataset again; if it stays, the merge is broken."
        )
    return CheckOutcome("label_tokens", bool(passed), message, figures=figures)


class _Shelf:
    """The sequences, read forwards and kept until each of their rows was asked for; what is labelled is counted."""

    def __init__(self, sequences: Rows) -> None:
        self._coming = _sequences(sequences)
        self._open: dict[str, dict[str, Any]] = {}
        self._asked: Counter[str] = Counter()
        self.labelled, self.weighted = 0, 0.0

    def take(self, name: str | None) -> Mapping[str, Any] | None:
        """The sequence of a row; None where there is none, or all its rows were asked for already."""
        while name not in self._open and self._read():
            pass
        if name is None or (sequence := self._open.get(name)) is None:
            return None
        self._asked[name] += 1
        if self._asked[name] == sequence["rows"]:
            del self._open[name], self._asked[name]
        return sequence

    def read_on(self) -> None:
        """Count what is left."""
        while self._read():
            self._open.clear()

    def _read(self) -> bool:
        sequence = next(self._coming, None)
        if sequence is None:
            return False
        _, labels, weights = expand(sequence)
        self.labelled += int((labels != IGNORE_INDEX).sum())
        self.weighted += float(weights.sum())
        self._open[sequence["sequence_id"]] = sequence
        return True


def _sequences(sequences: Rows) -> Iterator[dict[str, Any]]:
    """Rows of `sequences`, lists as arrays."""
    lists = ["input_ids", "node_starts", "node_parents", "node_positions", "span_starts", "span_ends", "span_weights"]
    columns = ["sequence_id", "rows", *lists]
    for batch in batches(sequences, columns):
        for name, rows, *arrays in zip(*batch.columns, strict=True):
            plain = {"sequence_id": name.as_py(), "rows": rows.as_py()}
            yield plain | dict(zip(lists, (column.values.to_numpy() for column in arrays), strict=True))


def _in_place(row: Mapping, sequence: Mapping[str, Any] | None, prompt: np.ndarray, output: np.ndarray) -> bool:
    if sequence is None or row["span_end"] - row["span_start"] != len(output):
        return False
    if (row["span_start"], row["span_end"]) not in zip(sequence["span_starts"], sequence["span_ends"], strict=True):
        return False
    tree = PrefixTree.from_row(sequence)
    if tree.find_error() or not 0 < row["span_end"] <= tree.length:
        return False
    branch = tree.branch_to(row["span_end"] - 1)
    ids = np.asarray(sequence["input_ids"], dtype=np.int32)[branch]
    in_one_piece = np.array_equal(branch[-len(output) :], np.arange(row["span_start"], row["span_end"]))
    return len(prompt) > 0 and in_one_piece and np.array_equal(ids, np.concatenate([prompt, output]))


def heldout_split(rows: pa.Table, heldout_repos: Collection[str], heldout_tasks: Collection[str] = ()) -> CheckOutcome:
    """No held-out repository or task in the data set, no repository on both sides of train and val, none unknown.

    Args:
        heldout_repos, heldout_tasks: what evaluation is done on, and what the spec holds out besides.
    """
    sides: dict[str | None, set[str]] = {}
    tasks = set(rows["task_id"].unique().to_pylist())
    for row in rows.group_by(["repo", "split"]).aggregate([]).to_pylist():
        sides.setdefault(row["repo"], set()).add(row["split"])
    problems = []
    if leaked := sorted(repo for repo in sides if repo in set(heldout_repos)):
        problems.append(
            f"held-out repositories {leaked} are in it: add them to select.exclude_repos or split by repository"
        )
    if seen := sorted(str(task) for task in tasks & set(heldout_tasks)):
        problems.append(f'held-out tasks are in it, first {seen[:_SHOWN]}: set the rollout set\'s split = "train"')
    if both := sorted(str(repo) for repo, splits in sides.items() if len(splits) > 1):
        problems.append(f"{both} stand in train and in val: materialize upweighted_dataset again")
    if None in sides:
        problems.append("rows without a repository cannot be held out: name it in the rollout set's options.repo")
    figures = {
        "repos": {str(repo): "+".join(sorted(splits)) for repo, splits in sides.items()},
        "heldout_repos": sorted(heldout_repos),
    }
    message = "; ".join(problems) or f"{len(sides)} repositories, none of the {len(set(heldout_repos))} held-out ones."
    return CheckOutcome("heldout_split", not problems, message, figures=figures)


def _keys(table: pa.Table) -> Counter[TurnKey]:
    return Counter(zip(*(table[name].to_pylist() for name in ("rollout_id", "agent_id", "turn")), strict=True))


def _array(scalar: pa.ListScalar) -> np.ndarray:
    return scalar.values.to_numpy()
