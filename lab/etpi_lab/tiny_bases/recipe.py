"""Pretrain a tiny base from a spec's `base.tiny`: a corpus of templated conversations, and a model trained on it.

A base has habits for fine-tuning to change: in `coop_tiny` the agent starts with bash and rarely plans first, in
`repo_fix_tiny` it thinks at length.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etpi_assets.specs.rollout_set import TinySection
from etpi_assets.tiny_bases import Corpus
from etpi_lab.tiny_bases.corpora import arithmetic_tiny, coop_tiny, coop_tiny_shared, repo_fix_tiny
from etpi_lab.tiny_bases.worker import BaseWorkerConfig
from etpi_resources.chat.format import ChatFormat
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.schemas import TABLES
from etpi_resources.prefix_tree import CHAIN

WORKER = "etpi_lab.tiny_bases.worker"
TRAINED = "base_learnt"
WORLDS = {
    "arithmetic_tiny": arithmetic_tiny,
    "coop_tiny": coop_tiny,
    "coop_tiny_shared": coop_tiny_shared,
    "repo_fix_tiny": repo_fix_tiny,
}
"""`base.tiny.world` -> its module with `conversations` and `exercises`."""

LOSS_BOUND = 0.6
"""Upper bound of the mean loss over the last tenth of the run, in nats per token.

The randomly chosen habits of the corpus cost about 0.2; a model that cannot copy names stays above 1.
"""


def prepare(section: TinySection, chat: ChatFormat, folder: Path) -> BaseWorkerConfig:
    """Write the corpus and the tokenizer under `folder`; return the worker's config."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.parquet"
    schema = TABLES["sequences"].schema
    pq.write_table(pa.Table.from_pylist(list(corpus_rows(section, chat)), schema=schema), corpus)
    chat.save(folder / "tokenizer")
    return BaseWorkerConfig(
        files=(str(corpus),),
        tokenizer=str(folder / "tokenizer"),
        vocabulary=chat.vocab_size,
        seed=section.seed,
        epochs=section.epochs,
        batch_tokens=section.batch_tokens,
        hidden=section.hidden,
        intermediate=section.intermediate,
        layers=section.layers,
        heads=section.heads,
        head_dim=section.head_dim,
        positions=section.positions,
        matrix_learning_rate=section.muon_lr,
        learning_rate=section.adamw_lr,
    )


def corpus_rows(section: TinySection, chat: ChatFormat) -> Iterator[dict[str, Any]]:
    """Yield the corpus as rows of `sequences`, one per conversation or exercise.

    Tokens of assistant turns have weight 1, all others `reading_weight`.
    """
    world = WORLDS[section.world]
    conversations = world.conversations(section.seed, section.conversations, chat.name)
    # A different seed gives the exercises other tasks than the conversations.
    exercises = world.exercises(section.seed + 1, section.exercises, chat.name)
    for number, messages in enumerate(chain(conversations, exercises)):
        ids = chat.prompt_ids(messages[:2])
        starts, ends, weights = [1], [len(ids)], [section.reading_weight]
        for message in messages[2:]:
            is_turn = message["role"] == "assistant"
            text = message["content"]
            new = [*chat.encode(text), chat.end_id] if is_turn else chat.observation_ids(text, message["role"])
            starts.append(len(ids))
            ids += new
            ends.append(len(ids))
            weights.append(1.0 if is_turn else section.reading_weight)
        yield {
            "sequence_id": f"{number:08d}",
            "split": "train",
            "input_ids": ids,
            **CHAIN,
            "span_starts": starts,
            "span_ends": ends,
            "span_weights": weights,
            "rows": len(starts),
        }


def corpus_of(rows: Iterable[Mapping[str, Any]]) -> Corpus:
    """Hash the columns of a corpus that the loss depends on, in row order."""
    digest, count, tokens = hashlib.sha256(), 0, 0
    for row in rows:
        columns = [row[name] for name in ("input_ids", "span_starts", "span_ends", "span_weights")]
        digest.update(json.dumps(columns).encode() + b"\n")
        count, tokens = count + 1, tokens + len(row["input_ids"])
    return Corpus(sha256=digest.hexdigest(), rows=count, tokens=tokens)


def check_trained(report: Mapping[str, Any]) -> CheckOutcome:
    """Check that the base's final loss is below LOSS_BOUND."""
    tail = [line["loss"] for line in report["log"][-max(1, len(report["log"]) // 10) :]]
    loss = sum(tail) / len(tail)
    return CheckOutcome(
        name=TRAINED,
        passed=loss <= LOSS_BOUND,
        message=f"loss {loss:.3f} at the end, bound {LOSS_BOUND}"
        + ("" if loss <= LOSS_BOUND else "; raise base.tiny.conversations or change the learning rates"),
        figures={"loss": loss, "parameters": report["parameters"], "seconds": report["seconds"]},
    )
