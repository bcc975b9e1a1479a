"""Batches and learning rates of a training run."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.prefix_tree import PrefixTree
from etpi_resources.trainers.workers.collate import Sequences, collate
from etpi_resources.trainers.workers.plan import (
    MicroBatch,
    PlanSettings,
    learning_rates,
    make_plan,
    one_pass,
    padded_lengths,
)

LENGTHS = st.lists(st.integers(1, 900), min_size=1, max_size=60)


def plan_of(lengths, weights=None, **changes):
    weights = np.ones(len(lengths)) if weights is None else np.asarray(weights, dtype=float)
    settings = {
        "epochs": 1.0, "max_steps": None, "batch_tokens": 2048, "micro_tokens": 2048, "schedule": "cosine",
        "warmup": 0.1, "seed": 0,
    }  # fmt: skip
    return make_plan(lengths, weights.tolist(), (weights * lengths).tolist(), PlanSettings(**(settings | changes)))


@given(LENGTHS)
def test_padded_lengths_are_the_best_choice(lengths):
    multiple, most = 64, 3
    chosen = padded_lengths(lengths, multiple, most)
    rounded = sorted({-(-n // multiple) * multiple for n in lengths})
    assert set(chosen) <= set(rounded) and len(chosen) <= most

    def cost(buckets):
        return sum(min(b for b in buckets if b >= n) for n in lengths)

    best = min(
        cost([*others, rounded[-1]]) for k in range(min(most, len(rounded))) for others in combinations(rounded[:-1], k)
    )
    assert cost(chosen) == best


@given(LENGTHS, st.integers(64, 4096), st.integers(0, 5))
def test_pass_has_every_sequence_once_within_the_budget(lengths, micro_tokens, seed):
    buckets = padded_lengths(lengths)
    batches = one_pass(lengths, buckets, micro_tokens, np.random.default_rng(seed))
    assert sorted(s for b in batches for s in b.sequences) == list(range(len(lengths)))
    for batch in batches:
        assert batch.length in buckets and all(lengths[s] <= batch.length for s in batch.sequences)
        assert batch.tokens <= micro_tokens or len(batch.sequences) == 1
    assert len({(len(b.sequences), b.length) for b in batches}) <= 2 * len(buckets)


@pytest.mark.parametrize("packed", [False, True])
def test_tokens_of_a_pass_are_those_of_its_rows(packed):
    plan = plan_of([500] * 10, packed=packed)
    assert plan.packed is packed and max(len(batch.sequences) for batch in plan.batches) == 4
    for batch in plan.batches:
        assert batch.packed is packed
        assert batch.tokens == (batch.length if packed else len(batch.sequences) * batch.length) <= 2048


@given(LENGTHS, st.sampled_from([0.3, 1.0, 2.0, 2.5]), st.integers(1, 4))
@settings(deadline=None)
def test_epochs_are_counted_in_weighted_rows(lengths, epochs, accumulate):
    weights = 1.0 + np.arange(len(lengths)) % 12
    plan = plan_of(lengths, weights, epochs=epochs, batch_tokens=1024 * accumulate, micro_tokens=1024)
    done = [s for b in plan.batches for s in b.sequences]
    assert plan.consumed[-1] == pytest.approx(weights[done].sum() / weights.sum())
    assert plan.consumed[-1] >= epochs - 1e-6
    assert plan.steps == 1 or plan.consumed[-2] < epochs
    assert plan.steps == -(-len(plan.batches) // plan.accumulate)
    if epochs == 2.0:
        assert sorted(done) == sorted([*range(len(lengths))] * 2)
    # The constant is what a step carries on average over a pass.
    steps_of_a_pass = plan.pass_batches / plan.accumulate
    assert plan.step_weight * steps_of_a_pass == pytest.approx((weights * lengths).sum())


def test_max_steps_ends_the_run_and_the_schedule():
    plan = plan_of([500] * 100, epochs=3, max_steps=7)
    assert plan.steps == 7
    assert plan.learning_rates[-1] < 0.1, "the schedule must end where the run does"


def test_learning_rate_follows_weighted_rows_not_steps():
    lengths = [500] * 40
    heavy_first = [12.0] * 20 + [1.0] * 20
    plan = plan_of(lengths, heavy_first, schedule="linear", warmup=0.0)
    rows = np.diff(np.concatenate([[0.0], plan.consumed]))
    middle = plan.consumed - rows / 2
    assert plan.learning_rates == pytest.approx(1 - middle)
    steps = np.diff(plan.learning_rates)
    assert len(set(np.round(steps, 6))) > 1, "steps of different weight change it by different amounts"


def test_scaling_every_weight_changes_neither_batches_nor_learning_rates():
    lengths = list(range(100, 600, 13))
    one, twelve = plan_of(lengths), plan_of(lengths, np.full(len(lengths), 12.0))
    assert one.batches == twelve.batches
    assert one.learning_rates == pytest.approx(twelve.learning_rates)
    assert twelve.step_weight == pytest.approx(12 * one.step_weight)


@pytest.mark.parametrize(
    ("schedule", "at_half", "at_end"), [("cosine", 0.5, 0.0), ("linear", 0.5, 0.0), ("constant", 1.0, 1.0)]
)
def test_schedules_warm_up_to_one_and_then_fall(schedule, at_half, at_end):
    rates = learning_rates(np.array([0.0, 0.05, 0.1, 0.55, 1.0]), schedule, 0.1)
    assert rates == pytest.approx([0.0, 0.5, 1.0, at_half, at_end])


def test_another_seed_is_another_order_and_the_same_seed_the_same():
    lengths = list(range(100, 600, 13))
    assert plan_of(lengths).batches == plan_of(lengths).batches != plan_of(lengths, seed=1).batches


def test_data_without_weight_is_an_error():
    with pytest.raises(ValueError, match="no training sequence"):
        plan_of([])
    with pytest.raises(ValueError, match="weight"):
        plan_of([10, 20], [0.0, 0.0])


@given(st.lists(st.tuples(st.integers(2, 200), st.data()), min_size=1, max_size=5))
@settings(deadline=None)
def test_collating_keeps_every_token_label_and_weight(drawn):
    flat_ids, flat_labels, flat_weights, offsets = [], [], [], [0]
    for length, data in drawn:
        start = data.draw(st.integers(1, length - 1))
        end = data.draw(st.integers(start + 1, length))
        ids = np.arange(3, 3 + length) % 60 + 3
        labels = np.full(length, IGNORE_INDEX)
        labels[start:end] = ids[start:end]
        flat_ids.extend(ids)
        flat_labels.extend(labels)
        flat_weights.extend((labels != IGNORE_INDEX) * 1.5)
        offsets.append(offsets[-1] + length)
    arrays = [np.asarray(x) for x in (offsets, flat_ids, flat_labels, flat_weights)]
    trees = [PrefixTree.chain(length) for length, _ in drawn]
    none = np.zeros(len(drawn), dtype=int)
    names = [f"s{i}" for i in range(len(drawn))]
    sequences = Sequences(names, arrays[0], arrays[1], arrays[2], arrays[3], np.ones(len(drawn)), trees, none, none)
    padded = -(-max(length for length, _ in drawn) // 64) * 64
    batch = collate(MicroBatch(tuple(range(len(drawn))), padded), sequences, pad_id=0)
    assert batch["input_ids"].shape == (len(drawn), padded)
    assert int(batch["tokens"]) == offsets[-1]
    positions = batch["positions"].numpy()
    assert len(set(positions)) == len(positions) and positions.max() < padded - 1
    assert len(positions) % 64 == 0 or len(positions) == padded - 1
    for row in range(len(drawn)):
        own = slice(offsets[row], offsets[row + 1])
        length = own.stop - own.start
        assert (batch["input_ids"][row, :length].numpy() == arrays[1][own]).all()
        assert (batch["input_ids"][row, length:] == 0).all()
        labels = np.full(padded, IGNORE_INDEX)
        labels[positions + 1] = batch["labels"][row].numpy()
        assert (labels[:length] == arrays[2][own]).all() and (labels[length:] == IGNORE_INDEX).all()
        weights = np.zeros(padded)
        weights[positions + 1] = batch["weights"][row].numpy()
        assert weights[:length] == pytest.approx(arrays[3][own]) and not weights[length:].any()


@given(st.lists(st.integers(1, 900), min_size=1, max_size=60), st.integers(1, 7))
@settings(deadline=None)
def test_batch_sequences_counts_sequences_whatever_their_lengths(lengths, size):
    plan = plan_of(lengths, epochs=2, batch_sequences=size)
    assert all(len(batch.sequences) == 1 for batch in plan.batches)
    assert plan.accumulate == min(size, len(lengths))
    assert plan.steps == -(-2 * len(lengths) // plan.accumulate)
