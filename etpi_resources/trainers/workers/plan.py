"""The batches of a training run and the learning rate of each step. Numbers alone, no torch.

A sequence carries one or more dataset rows; its weighted rows are the sum of their weights. One epoch is every sequence
once, so E epochs are E times the data's weighted rows, and a fractional epoch ends at the first optimiser step that
reaches it. The learning rate follows the share of weighted rows consumed, not the number of steps: a step that carries
more weight moves further along the schedule. A step's loss is divided by the constant `step_weight`, the expected sum
of token weights of one step. Dividing by each batch's own sum would make the weight of a row depend on the rest of its
batch, and a row of weight 2 would no longer count as two rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

Schedule = Literal["cosine", "linear", "constant"]
LENGTH_MULTIPLE = 64
MAX_LENGTHS = 8


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: positions of its sequences in the dataset, and the length of its rows. Each sequence is a
    padded row; if `packed`, all are concatenated in a single row."""

    sequences: tuple[int, ...]
    length: int
    packed: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the forward pass, padding included."""
        return self.length if self.packed else len(self.sequences) * self.length


@dataclass(frozen=True)
class Plan:
    """The batches of a run, and the learning rate of its steps.

    Attributes:
        batches: every micro-batch in order.
        accumulate: micro-batches of one optimiser step; the last step may have fewer.
        pass_batches: micro-batches of one pass over the data.
        step_weight: expected sum of token weights of one optimiser step, the constant the loss is divided by.
        consumed: epochs done after each optimiser step, in weighted rows; shape (steps,).
        learning_rates: of each optimiser step, as a share of the peak, in (0, 1]; shape (steps,).
    """

    batches: tuple[MicroBatch, ...]
    accumulate: int
    pass_batches: int
    step_weight: float
    consumed: np.ndarray
    learning_rates: np.ndarray

    @property
    def packed(self) -> bool:
        return self.batches[0].packed

    @property
    def steps(self) -> int:
        return len(self.learning_rates)

    def final_step(self, use_step: int | None, use_epoch: float | None) -> int:
        """Return the step whose checkpoint is used: `use_step`, the one after `use_epoch`, or the last.

        Raises:
            ValueError: training ends before.
        """
        if use_step is not None and use_step > self.steps:
            raise ValueError(f"train.use_step = {use_step}, and training ends after {self.steps} steps")
        return use_step or (self.step_after(use_epoch) if use_epoch else self.steps)

    def until(self, step: int) -> Plan:
        """Return the first `step` steps, with the learning rates that they have in the whole run."""
        cut = {"consumed": self.consumed[:step], "learning_rates": self.learning_rates[:step]}
        return replace(self, batches=self.batches[: step * self.accumulate], **cut)

    def step_after(self, epochs: float) -> int:
        """Return the first optimiser step after which `epochs` are done. Raises ValueError if the run ends before."""
        reached = np.flatnonzero(self.consumed >= epochs - 1e-9)
        if not len(reached):
            raise ValueError(f"train.use_epoch = {epochs:g}, and training ends after {self.consumed[-1]:g} epochs")
        return int(reached[0]) + 1

    @property
    def padded_tokens(self) -> int:
        return sum(batch.tokens for batch in self.batches)

    def padding(self, lengths: Sequence[int] | np.ndarray) -> float:
        """Share of the tokens of all forward passes that are padding."""
        return 1 - sum(lengths[s] for batch in self.batches for s in batch.sequences) / self.padded_tokens


def padded_lengths(lengths: Sequence[int], multiple: int = LENGTH_MULTIPLE, most: int = MAX_LENGTHS) -> list[int]:
    """At most `most` lengths, multiples of `multiple`, such that padding each sequence up to the next of them adds the
    fewest tokens (exact, by dynamic programming over the distinct rounded lengths)."""
    rounded, counts = np.unique(-(-np.asarray(lengths) // multiple) * multiple, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    n = len(rounded)
    best = np.full((most + 1, n + 1), np.inf)
    best[:, 0] = 0
    start = np.zeros((most + 1, n + 1), dtype=int)
    for k in range(1, most + 1):
        for end in range(1, n + 1):
            # The last group is the rounded lengths from some start to `end`, all padded to the longest of them.
            costs = best[k - 1, :end] + rounded[end - 1] * (below[end] - below[:end])
            start[k, end] = int(np.argmin(costs))
            best[k, end] = costs[start[k, end]]
    chosen, end, k = [], n, most
    while end:
        chosen.append(int(rounded[end - 1]))
        end, k = int(start[k, end]), k - 1
    return sorted(chosen)


def pack(lengths: Sequence[int], row_tokens: int, rng: np.random.Generator) -> list[tuple[tuple[int, ...], int]]:
    """Rows of (which sequences, padded length) that hold each sequence once, whole.

    A row has `row_tokens` tokens, rounded down to a multiple of 64; a row for a longer sequence has that sequence's
    length, padded to one of at most eight. Longest first, each sequence goes into the row that it fills most (best fit
    decreasing); among equal lengths the order is random. With `row_tokens` 0 every sequence gets a row of its own.
    """
    total = -(-sum(lengths) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    usual = min(row_tokens // LENGTH_MULTIPLE * LENGTH_MULTIPLE, total)
    long = [n for n in lengths if n > usual]
    longer = padded_lengths(long) if long else []
    rows: list[list[int]] = []
    sizes: list[int] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), in order
    shuffled = rng.permutation(len(lengths))
    for index in shuffled[np.argsort(-np.asarray(lengths)[shuffled], kind="stable")].tolist():
        length = lengths[index]
        at = bisect_left(open_rows, (length, -1))
        if at < len(open_rows):
            free, row = open_rows.pop(at)
        else:
            free, row = next(size for size in (usual, *longer) if length <= size), len(rows)
            rows.append([])
            sizes.append(free)
        rows[row].append(index)
        if free > length and row_tokens:
            insort(open_rows, (free - length, row))
    return [(tuple(members), size) for members, size in zip(rows, sizes, strict=True)]


def make_pass(lengths: Sequence[int], micro_tokens: int, rng: np.random.Generator, *, packed: bool) -> list[MicroBatch]:
    """Return micro-batches with every sequence once, in random order; every pass has the same number of them.

    Their rows are packed to a few lengths (see `pack`), or have one sequence each (see `one_pass`).
    """
    if not packed:
        return one_pass(lengths, padded_lengths(lengths), micro_tokens, rng)
    rows = [MicroBatch(members, length, packed=True) for members, length in pack(lengths, micro_tokens, rng)]
    return [rows[i] for i in rng.permutation(len(rows))]


def one_pass(
    lengths: Sequence[int], buckets: Sequence[int], micro_tokens: int, rng: np.random.Generator
) -> list[MicroBatch]:
    """Return every sequence once, in random micro-batches of one padded length each, in random order.

    A micro-batch holds as many sequences as fit `micro_tokens`, at least one; the remainder of a length is a smaller
    one. So each length has at most two shapes, the same in every pass.
    """
    filling: dict[int, list[int]] = {length: [] for length in buckets}
    for index in rng.permutation(len(lengths)):
        filling[next(b for b in buckets if lengths[index] <= b)].append(int(index))
    batches = []
    for length, members in filling.items():
        rows = max(1, micro_tokens // length)
        batches += [MicroBatch(tuple(members[i : i + rows]), length) for i in range(0, len(members), rows)]
    return [batches[i] for i in rng.permutation(len(batches))]


def learning_rates(position: np.ndarray, schedule: Schedule, warmup: float) -> np.ndarray:
    """Return multipliers at positions in [0, 1] of the run: linear warm-up over the first share `warmup`, then the
    schedule from 1 towards 0 (cosine: (1 + cos(pi x)) / 2; linear: 1 - x; constant: 1)."""
    rise = np.minimum(1.0, position / warmup) if warmup > 0 else np.ones_like(position)
    x = np.clip((position - warmup) / max(1.0 - warmup, 1e-12), 0.0, 1.0)
    fall = {"cosine": 0.5 * (1 + np.cos(np.pi * x)), "linear": 1 - x, "constant": np.ones_like(x)}[schedule]
    return rise * fall


@dataclass(frozen=True)
class PlanSettings:
    """Rules that divide a run's sequences into steps.

    Attributes:
        epochs, max_steps: the run ends at whichever comes first.
        batch_tokens: tokens of one optimiser step, padding included; a longer sequence is a step of its own.
        micro_tokens: tokens of one forward pass, at most `batch_tokens`.
        schedule, warmup: see `learning_rates`.
        batch_sequences: sequences of one optimiser step, one a forward pass; then neither bound on tokens counts. The
            remainder of a pass shares a step with the next pass: n sequences in E epochs are
            ceil(E * n / batch_sequences) steps, where a trainer that drops it counts E * floor(n / batch_sequences).
        packed: a forward pass is one row of `micro_tokens` tokens that holds several sequences.
        seed: of the order of sequences.
    """

    epochs: float
    batch_tokens: int
    micro_tokens: int
    schedule: Schedule
    warmup: float
    seed: int
    max_steps: int | None = None
    batch_sequences: int | None = None
    packed: bool = False


def make_plan(
    lengths: Sequence[int], weighted_rows: Sequence[float], token_weights: Sequence[float], settings: PlanSettings
) -> Plan:
    """Plan a run over sequences given by length (tokens), weighted rows, and sum of token weights.

    Raises:
        ValueError: there are no sequences, or their weights are all 0.
    """
    if not len(lengths) or sum(token_weights) <= 0:
        raise ValueError("there is nothing to train on: no training sequence carries weight")
    rng = np.random.default_rng(settings.seed)
    row_tokens = 0 if settings.batch_sequences else settings.micro_tokens
    passes = [make_pass(lengths, row_tokens, rng, packed=settings.packed) for _ in range(math.ceil(settings.epochs))]
    pass_batches = len(passes[0])
    # A step is never more than one pass, so data smaller than `batch_tokens` makes one step an epoch.
    accumulate = settings.batch_sequences or max(1, settings.batch_tokens // settings.micro_tokens)
    accumulate = min(accumulate, pass_batches)
    batches = [batch for of_pass in passes for batch in of_pass]
    steps = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
    rows = np.array([sum(weighted_rows[s] for b in step for s in b.sequences) for step in steps])
    consumed = np.cumsum(rows) / sum(weighted_rows)
    # The tolerance keeps a rounding error of the sum from adding a step to whole epochs.
    last = int(np.searchsorted(consumed, settings.epochs * (1 - 1e-9))) + 1
    last = min(last, len(steps), settings.max_steps or len(steps))
    consumed, rows = consumed[:last], rows[:last]
    middle = consumed - rows / sum(weighted_rows) / 2
    return Plan(
        batches=tuple(batch for step in steps[:last] for batch in step),
        accumulate=accumulate,
        pass_batches=pass_batches,
        step_weight=float(sum(token_weights)) * accumulate / pass_batches,
        consumed=consumed,
        learning_rates=learning_rates(middle / consumed[-1], settings.schedule, settings.warmup),
    )
