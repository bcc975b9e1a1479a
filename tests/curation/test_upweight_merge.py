"""Weights, the split by repository, and merged sequences with the same objective as the rows one by one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_assets.curation.merge import branches, expand, merge, merge_savings
from etpi_assets.curation.upweight import validation_units
from etpi_assets.specs.experiment import DatasetSection
from etpi_assets.trajectories.tables import iter_prompts
from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.lake.schemas import from_rows
from etpi_resources.prefix_tree import PrefixTree
from etpi_resources.trainers.workers.collate import read_sequences
from tests.support import whole_checks
from tests.support.datasets import dataset
from tests.support.sequences import CHAIN, FORK, built, conversations, gradient, one_by_one, pairs_of, weigh

# --- weights, split, length --------------------------------------------------------------------------------------


def test_early_turns_count_more_in_both_forms():
    rows, sequences, _ = built(pairs_of(CHAIN), upweight_turns=(0, 1), upweight_factor=12.0)
    assert rows["weight"].to_pylist() == [12.0, 12.0, 1.0] and rows["copies"].to_pylist() == [1, 1, 1]
    assert sequences["span_weights"].to_pylist() == [[12.0, 12.0, 1.0]]
    rows, sequences, _ = built(pairs_of(CHAIN), upweight_turns=(0, 1), upweight_factor=12.0, upweight_form="duplicate")
    assert rows["weight"].to_pylist() == [1.0] * 3 and rows["copies"].to_pylist() == [12, 12, 1]
    assert sequences["span_weights"].to_pylist() == [[12.0, 12.0, 1.0]]


def test_fractional_factor_cannot_be_duplicated():
    with pytest.raises(ValueError, match="upweight_factor = 2.5"):
        built(pairs_of(CHAIN), upweight_factor=2.5, upweight_form="duplicate")


def test_pairs_over_max_length_are_dropped_never_truncated():
    rows, sequences, dropped = built(pairs_of(CHAIN, [([1] * 60, [2] * 5)]), max_length=64)
    assert rows["pair_id"].to_pylist() == ["r0/a/0", "r0/a/1", "r0/a/2"]
    assert dropped.to_pylist()[0] | {"agent_id": "a"} == {
        "stage": "dataset", "rollout_id": "r1", "agent_id": "a", "turn": 0, "reason": "over_max_length",
        "detail": "65 ids, dataset.max_length = 64", "output_tokens": 5,
    }  # fmt: skip
    assert len(sequences) == 1


def test_heldout_repositories_and_tasks_are_dropped():
    pairs = pairs_of(CHAIN, CHAIN, CHAIN, repo=["harbor", "quay", "skiff"])
    weighed = weigh(pairs, DatasetSection(heldout_repos=("quay",)), heldout_tasks={"t2"})
    assert set(weighed["dataset_rows"]["repo"].to_pylist()) == {"harbor"}
    assert {(r["rollout_id"], r["reason"]) for r in weighed["dropped"].to_pylist()} == {
        ("r1", "heldout_repo"),
        ("r2", "heldout_task"),
    }


@given(st.sets(st.text(min_size=1), max_size=12), st.floats(0, 0.99))
def test_validation_unitsitories_depend_only_on_their_names(repos, fraction):
    chosen = validation_units(sorted(repos), fraction)
    assert chosen <= repos and len(chosen) == min(max(0, len(repos) - 1), round(fraction * len(repos)))
    assert validation_units([*sorted(repos, reverse=True), *repos], fraction) == chosen


def test_each_repository_is_in_one_split():
    pairs = pairs_of(*[CHAIN] * 8, repo=[f"repo{n % 5}" for n in range(8)])
    rows, sequences, _ = built(pairs, val_fraction=0.4)
    sides: dict[str, set[str]] = {}
    for row in rows.to_pylist():
        sides.setdefault(row["repo"], set()).add(row["split"])
    assert sorted(map(len, sides.values())) == [1] * 5 and {s for side in sides.values() for s in side} == {
        "train",
        "val",
    }
    of = dict(zip(rows["sequence_id"].to_pylist(), rows["split"].to_pylist(), strict=True))
    assert all(of[s["sequence_id"]] == s["split"] for s in sequences.to_pylist())


def test_conversations_of_one_repository_may_be_in_both_splits():
    pairs = pairs_of(*[CHAIN] * 20, repo=[f"repo{n % 2}" for n in range(20)])
    rows, sequences, _ = built(pairs, val_fraction=0.1, val_by="conversation")
    splits: dict[str, set[str]] = {}
    for row in rows.to_pylist():
        splits.setdefault(row["rollout_id"], set()).add(row["split"])
    assert all(len(of) == 1 for of in splits.values()), "a conversation is in one split"
    assert sum(of == {"val"} for of in splits.values()) == 2
    assert not whole_checks.heldout_split(rows, ()).passed
    assert whole_checks.heldout_split(rows, (), (), "conversation").passed
    assert not whole_checks.heldout_split(rows, {"repo1"}, (), "conversation").passed
    assert {row["split"] for row in sequences.to_pylist()} == {"train", "val"}


def test_row_ids_follow_content():
    first, again = built(pairs_of(CHAIN))[0], built(pairs_of(CHAIN))[0]
    assert first.equals(again) and len(set(first["dataset_row_id"].to_pylist())) == 3
    weighted = built(pairs_of(CHAIN), upweight_factor=3.0)[0]
    assert not set(first["dataset_row_id"].to_pylist()) & set(weighted["dataset_row_id"].to_pylist())


# --- merging -------------------------------------------------------------------------------------------------------


def test_turns_that_extend_each_other_are_one_sequence_with_a_span_each():
    rows, sequences, _ = built(pairs_of(CHAIN))
    (sequence,) = sequences.to_pylist()
    assert sequence["input_ids"] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] and sequence["rows"] == 3
    assert list(zip(sequence["span_starts"], sequence["span_ends"], strict=True)) == [(2, 4), (5, 6), (8, 10)]
    assert rows["span_start"].to_pylist() == [2, 5, 8]
    ids, labels, weights = expand(sequence)
    assert labels.tolist() == [IGNORE_INDEX, IGNORE_INDEX, 3, 4, IGNORE_INDEX, 6, IGNORE_INDEX, IGNORE_INDEX, 9, 10]
    assert weights[labels == IGNORE_INDEX].sum() == 0 and len(ids) == 10


def test_differing_row_is_a_branch_that_repeats_no_token():
    rows, sequences, _ = built(pairs_of(FORK))
    (sequence,) = sequences.to_pylist()
    assert sequence["input_ids"] == [1, 2, 9, 5, 8, 8, 8, 3, 4, 6, 7], "the longer branch first"
    tree = PrefixTree.from_row(sequence)
    assert (tree.starts.tolist(), tree.parents.tolist(), tree.positions.tolist()) == ([0, 2, 7], [-1, 0, 0], [0, 2, 2])
    assert tree.token_positions().tolist() == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 5]
    assert tree.predicted_from()[[2, 7]].tolist() == [1, 1], "both branches go on from the token they fork at"
    assert list(zip(rows["span_start"].to_pylist(), rows["span_end"].to_pylist(), strict=True)) == [
        (7, 9), (3, 4), (10, 11), (5, 7),
    ]  # fmt: skip
    assert merge_savings(rows, pairs_of(FORK), sequences) == {"row_tokens": 21, "sequence_tokens": 11, "ratio": 21 / 11}
    told = [(b["input_ids"].tolist(), b["span_starts"]) for b in branches(sequence)]
    assert told == [([1, 2, 9, 5, 8, 8, 8], [3, 5]), ([1, 2, 3, 4, 6, 7], [2, 5])]


@pytest.mark.parametrize(
    "fault",
    [
        {"input_ids": [1, 2, 9, 5, 8, 8, 8, 3, 4, 6, 0]},
        {"input_ids": [1, 0, 9, 5, 8, 8, 8, 3, 4, 6, 7]},
        {"node_positions": [0, 2, 1]},
        {"node_parents": [-1, 0, 1]},
    ],
)
def test_label_tokens_fails_on_a_fault_in_a_branch(fault: dict[str, list[int]]):
    pairs = pairs_of(FORK)
    rows, sequences, _ = built(pairs)
    assert whole_checks.label_tokens(rows, pairs, sequences).passed
    broken = from_rows("sequences", [{**sequences.to_pylist()[0], **fault}])
    assert not whole_checks.label_tokens(rows, pairs, broken).passed


def test_output_stays_one_span_if_a_later_prompt_branches_inside_it():
    turns = [([1, 2], [3, 4, 5]), ([1, 2, 3, 9, 9, 9, 9], [6]), ([1, 2, 3, 4, 5, 7], [8])]
    rows, sequences, _ = built(pairs_of(turns))
    (sequence,) = sequences.to_pylist()
    assert sequence["input_ids"] == [1, 2, 3, 4, 5, 7, 8, 9, 9, 9, 9, 6] and sequence["node_starts"] == [0, 3, 7]
    assert list(zip(rows["span_start"].to_pylist(), rows["span_end"].to_pylist(), strict=True)) == [
        (2, 5), (11, 12), (6, 7),
    ]  # fmt: skip


def test_samples_of_one_prompt_are_branches_with_their_own_labels():
    _, sequences, _ = built(pairs_of([([1, 2], [3]), ([1, 2], [3])]))
    assert [s["input_ids"] for s in sequences.to_pylist()] == [[1, 2, 3, 3]]
    rollouts = pairs_of([([1, 2, 3], [4])], [([1, 2, 3], [5])], task="one")
    rows, sequences, _ = built(rollouts)
    assert sequences["input_ids"].to_pylist() == [[1, 2, 3, 4, 5]] and len(set(rows["sequence_id"].to_pylist())) == 1
    _, sequences, _ = built(pairs_of([([1, 2, 3], [4])], [([1, 2, 3], [5])]))
    assert sequences["rows"].to_pylist() == [1, 1], "of other tasks"
    _, sequences, _ = built(pairs_of([([1, 2], [4] * 4)], [([1, 2], [5] * 4)], task="one"))
    assert sequences["rows"].to_pylist() == [1, 1], "what they share is less than half of either"


def test_sequences_are_in_the_order_of_their_first_rows():
    pairs = pairs_of(*([([1, 2, 3], [number])] for number in range(4, 9)), task=list("ababc"))
    rows, sequences, _ = built(pairs)
    assert sequences["rows"].to_pylist() == [2, 2, 1]
    assert sequences["sequence_id"].to_pylist() == rows["sequence_id"].unique().to_pylist()
    assert whole_checks.label_tokens(rows, pairs, sequences).passed


def test_rows_missing_among_the_pairs_raise():
    pairs = pairs_of(CHAIN)
    rows = weigh(pairs, DatasetSection(val_fraction=0.0))["dataset_rows"]
    with pytest.raises(ValueError, match="r0/a/2"):
        merge(rows, pairs.slice(0, 2), 2048)


def test_tree_is_no_longer_than_max_length():
    turns = [([1] * 30, [2] * 30), ([1] * 20 + [3] * 20, [4] * 20), ([1] * 20 + [3] * 20, [5] * 4)]
    _, sequences, dropped = built(pairs_of(turns), max_length=64)
    assert [len(ids) for ids in sequences["input_ids"]] == [60, 64] and not len(dropped)
    assert sequences["rows"].to_pylist() == [1, 2]


def test_the_trainer_reads_the_same_labels(tmp_path):
    created = dataset(weights={"upweight_factor": 4, "val_fraction": 0.0})
    pq.write_table(created.sequences, tmp_path / "sequences.parquet")
    loaded = read_sequences([tmp_path / "sequences.parquet"], "train", vocabulary=1024, longest=4096)
    expanded = [expand(sequence) for sequence in created.sequences.to_pylist()]
    assert loaded.labels.tolist() == np.concatenate([labels for _, labels, _ in expanded]).tolist()
    assert loaded.weights.tolist() == np.concatenate([weights for _, _, weights in expanded]).tolist()
    assert (loaded.labels != IGNORE_INDEX).sum() == sum(created.rows["output_tokens"].to_pylist())


@settings(deadline=None)
@given(st.lists(conversations(), min_size=1, max_size=3))
def test_every_output_is_once_in_the_trees_after_its_own_input(agents):
    pairs = pairs_of(*agents)
    rows, sequences, _ = built(pairs)
    stored = {s["sequence_id"]: s for s in sequences.to_pylist()}
    outputs = dict(zip(pairs["pair_id"].to_pylist(), pairs["output_ids"].to_pylist(), strict=True))
    learnt = 0
    for row, (_, prompt) in zip(rows.to_pylist(), iter_prompts(pairs), strict=True):
        sequence = stored[row["sequence_id"]]
        output = outputs[row["pair_id"]]
        branch = PrefixTree.from_row(sequence).branch_to(row["span_end"] - 1)
        assert np.array(sequence["input_ids"])[branch].tolist() == prompt.tolist() + output
        assert branch[len(prompt) :].tolist() == list(range(row["span_start"], row["span_end"]))
        learnt += row["output_tokens"]
    assert learnt == sum(int((expand(s)[1] != IGNORE_INDEX).sum()) for s in stored.values())
    assert sum(s["rows"] for s in stored.values()) == len(rows)


@settings(deadline=None)
@given(st.lists(conversations(), min_size=1, max_size=3), st.sampled_from([None, "one"]), st.sampled_from([64, 2048]))
def test_branches_of_the_trees_are_exactly_the_rows(agents, task, longest):
    """Round trip: the labelled tokens of every branch, each with the tokens before them, are the per-turn rows."""
    pairs = pairs_of(*agents, task=task)
    rows, sequences, _ = built(pairs, max_length=longest)
    outputs = dict(zip(pairs["pair_id"].to_pylist(), pairs["output_ids"].to_pylist(), strict=True))
    wanted = [(prompt.tolist(), outputs["/".join(map(str, key))]) for key, prompt in iter_prompts(pairs)]
    result = []
    for sequence in sequences.to_pylist():
        tree = PrefixTree.from_row(sequence)
        assert tree.find_error() is None and len(tree.token_positions()) == len(sequence["input_ids"]) <= longest
        once = np.concatenate([indices[repeated:] for indices, repeated in tree.branches()])
        assert sorted(once.tolist()) == list(range(tree.length)), "each token is one branch's own"
        for branch in branches(sequence):
            told = branch["input_ids"].tolist()
            result += [(told[:s], told[s:e]) for s, e in zip(branch["span_starts"], branch["span_ends"], strict=True)]
            assert sum(e - s for s, e in zip(branch["span_starts"], branch["span_ends"], strict=True)) == int(
                (branch["labels"] != IGNORE_INDEX).sum()
            )
    assert sorted(result) == sorted(wanted) and len(rows) == len(wanted)


# --- the objective -------------------------------------------------------------------------------------------------


def plain(sequences):
    """(input_ids, labels, weights) of every branch."""
    for sequence in sequences.to_pylist():
        yield from ((b["input_ids"], b["labels"], b["weights"]) for b in branches(sequence))


@pytest.mark.parametrize("form", ["weight", "duplicate"])
@pytest.mark.parametrize("history", ["strip", "keep"])
def test_merged_sequences_have_the_gradient_of_the_rows(form, history):
    """With `history = keep`, every turn whose think was stripped is a branch."""
    torch.set_num_threads(1)
    weights = {"upweight_factor": 4.0, "upweight_form": form, "val_fraction": 0.0}
    created = dataset({"history_think": history}, weights)
    few = created.pairs.slice(0, 20)
    rows, sequences, _ = built(few, **weights)
    assert any(len(nodes) > 1 for nodes in sequences["node_starts"]) is (history == "keep")
    merged = gradient(list(plain(sequences)))
    apart = gradient(list(one_by_one(rows, few)))
    assert (merged - apart).norm() / apart.norm() <= 1e-5


def test_without_merging_each_row_is_a_sequence_with_the_same_gradient():
    torch.set_num_threads(1)
    weights = {"upweight_factor": 4.0, "val_fraction": 0.0}
    few = dataset({"history_think": "keep"}, weights).pairs.slice(0, 20)
    rows, sequences, _ = built(few, merge=False, **weights)
    assert sequences["rows"].to_pylist() == [1] * len(rows)
    assert rows["sequence_id"].to_pylist() == sequences["sequence_id"].to_pylist()
    for (ids, labels, row_weights), (own_ids, own_labels, own_weights) in zip(
        plain(sequences), one_by_one(rows, few), strict=True
    ):
        assert (ids == own_ids).all() and (labels == own_labels).all() and (row_weights == own_weights).all()
    assert all(check.passed for check in (whole_checks.label_tokens(rows, few, sequences),))
    merged = gradient(list(plain(built(few, **weights)[1])))
    assert (gradient(list(plain(sequences))) - merged).norm() / merged.norm() <= 1e-5


def test_wrong_span_changes_the_gradient():
    torch.set_num_threads(1)
    rows, sequences, _ = built(pairs_of(CHAIN))
    (sequence,) = sequences.to_pylist()
    right = gradient(list(one_by_one(rows, pairs_of(CHAIN))))
    assert (gradient(list(plain(sequences))) - right).norm() / right.norm() <= 1e-5
    shifted = {**sequence, "span_ends": [end - (end == 4) for end in sequence["span_ends"]]}
    assert (gradient([expand(shifted)]) - right).norm() / right.norm() > 1e-2


def test_merging_saves_tokens():
    created = dataset()
    assert isinstance(created.sequences, pa.Table)
    assert merge_savings(created.rows, created.pairs, created.sequences)["ratio"] > 2
