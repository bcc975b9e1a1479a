"""Pairs, data set rows and merged sequences of made-up token ids, and gradients over them."""

from __future__ import annotations

import json

import numpy as np
import torch
from hypothesis import strategies as st

from etpi_assets.curation.merge import merge
from etpi_assets.curation.upweight import RowRule, units_of, validation_units, weigh_pairs, with_split
from etpi_assets.specs.experiment import DatasetSection
from etpi_assets.trajectories.tables import iter_prompts
from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.lake.schemas import from_rows
from tests.support.models import qwen3


def pairs_of(*agents: list, repo: str | list[str] = "harbor", task: str | list[str] | None = None):
    """Return a `pairs` table without prefixes from agents, each a list of (whole prompt, output)."""
    rows = []
    for number, turns in enumerate(agents):
        facts = {
            "task_id": task[number] if isinstance(task, list) else task or f"t{number}",
            "repo": repo if isinstance(repo, str) else repo[number],
            "teacher": "made",
        }
        for turn, (prompt, output) in enumerate(turns):
            key = {"rollout_id": f"r{number}", "agent_id": "a", "turn": turn}
            rows.append(
                {"pair_id": f"r{number}/a/{turn}", **key, "suffix_ids": prompt, "output_ids": output,
                 "input_tokens": len(prompt), "capture": "native", "metadata": json.dumps(facts)}
            )  # fmt: skip
    return from_rows("pairs", rows)


CHAIN = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 2, 3, 4, 5, 6, 7, 8], [9, 10])]


FORK = [([1, 2], [3, 4]), ([1, 2, 9], [5]), ([1, 2, 3, 4, 6], [7]), ([1, 2, 9, 5, 8], [8, 8])]


def built(pairs, **section):
    chosen = DatasetSection(**{"val_fraction": 0.0, "upweight_turns": (0, 1, 2), **section})
    weighed = weigh(pairs, chosen)
    rows, sequences = merge(weighed["dataset_rows"], pairs, section.get("max_length", 2048), merged=chosen.merge)
    return rows, sequences, weighed["dropped"]


def weigh(pairs, section, heldout_tasks=(), limit=None):
    """Rows with their split, and dropped pairs, of a data set in one block."""
    tables = weigh_pairs(pairs, RowRule(section, heldout_tasks, limit))
    rows = tables["dataset_rows"]
    validate = validation_units(units_of(rows, section).unique().to_pylist(), section.val_fraction)
    return {**tables, "dataset_rows": with_split(rows, section, validate)}


ids = st.lists(st.integers(0, 3), min_size=1, max_size=3)


@st.composite
def conversations(draw):
    """Turns that extend an earlier one or begin again, over so few ids that prefixes also coincide by chance."""
    turns: list[tuple[list[int], list[int]]] = []
    for _ in range(draw(st.integers(1, 6))):
        before = draw(st.sampled_from([[], *[p + o for p, o in turns]]))
        turns.append((before + draw(ids), draw(ids)))
    return turns


def random_model(vocabulary: int = 1024, **changes):
    return qwen3(vocabulary, num_key_value_heads=1, max_position_embeddings=4096, **changes).float().eval()


def gradient(sequences, net=None):
    """The full-dataset gradient of sum(w * nll) / sum(w) over (input_ids, labels, weights), as one vector."""
    net = net or random_model()
    net.zero_grad()
    total = sum(float(weights.sum()) for _, _, weights in sequences)
    for ids_, labels, weights in sequences:
        logits = net(input_ids=torch.from_numpy(ids_)[None]).logits[0, :-1]
        nll = torch.nn.functional.cross_entropy(
            logits, torch.from_numpy(labels[1:]), ignore_index=IGNORE_INDEX, reduction="none"
        )
        (nll * torch.from_numpy(weights[1:])).sum().div(total).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).double()


def one_by_one(rows, pairs):
    """Yield the rows as a trainer without merging reads them: whole input and output, repeated by `copies`."""
    outputs = dict(zip(pairs["pair_id"].to_pylist(), pairs["output_ids"].to_pylist(), strict=True))
    prompts = {"/".join(map(str, key)): prompt for key, prompt in iter_prompts(pairs)}
    for row in rows.to_pylist():
        prompt, output = prompts[row["pair_id"]], outputs[row["pair_id"]]
        ids_ = np.concatenate([prompt, output]).astype(np.int64)
        labels = np.concatenate([np.full(len(prompt), IGNORE_INDEX), output]).astype(np.int64)
        weights = np.concatenate([np.zeros(len(prompt)), np.full(len(output), row["weight"])]).astype(np.float32)
        yield from [(ids_, labels, weights)] * row["copies"]


VOCABULARY = 32


def conversation(seed: int, turns: int, *, keep: bool):
    """(prompt, output) turns; with `keep` a history holds more than was learnt, so every turn forks."""
    rng = np.random.default_rng(seed)

    def some(least: int, most: int) -> list[int]:
        return rng.integers(1, VOCABULARY, rng.integers(least, most)).tolist()

    history, told = some(5, 20), []
    for _ in range(turns):
        think, output = some(2, 9), some(2, 9)
        told.append((history, output))
        history = history + (think if keep else []) + output + some(1, 12)
    return told
