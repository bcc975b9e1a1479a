"""The influence of every training row on a held-out metric, by the weights of one checkpoint (see `influence`).

Weights are in float32 whatever the dtype of their files: the difference of two losses needs its digits.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from etpi_resources.trainers.contracts import BlameWorkerConfig, BlameWorkerResult
from etpi_resources.trainers.workers.reporting import Worker, open_worker

if TYPE_CHECKING:
    from etpi_resources.trainers.workers.collate import Sequences
    from etpi_resources.trainers.workers.influence import Direction, Rows

COMPARED = 6
"""Sequences whose influence is computed by their gradients too."""
GRADIENT_BYTES = 2**31
"""Memory for gradients of single rollouts, whose products with those of held-out tasks are computed together."""
PAD = 0
"""The id that fills rows; no label attends to it."""


def run(worker: Worker[BlameWorkerConfig]) -> BlameWorkerResult:
    """Compute and write the tables `blame` and `blame_tasks`.

    Raises:
        RuntimeError: the config requires a GPU and this interpreter's torch sees none.
        BadSequences: the model cannot read the sequences; the message says why.
    """
    import pyarrow.parquet as pq
    import torch

    from etpi_resources.lake.schemas import from_rows
    from etpi_resources.trainers.workers import influence
    from etpi_resources.trainers.workers.collate import read_sequences
    from etpi_resources.trainers.workers.device import choose_compute

    began, config = time.monotonic(), worker.config
    gpu = choose_compute(worker, config.device, "fp32").gpu
    model, trees = load(config, "cuda" if gpu else "cpu")
    text = model.config.get_text_config()

    def read(files: Sequence[str], split: str) -> Rows:
        stored = read_sequences(files, split, vocabulary=text.vocab_size, longest=text.max_position_embeddings)
        return influence.Rows.of(stored, config.micro_tokens, PAD, trees=trees)

    training = read(config.files, "train")
    heldout = [(sign, read([config.heldout], split)) for split, sign in (("raised", 1.0), ("lowered", -1.0))]
    direction = influence.gradient(model, heldout)
    length = influence.norm(value for _, value in direction) or 1.0
    for _, value in direction:
        value /= length
    step, exact, measured = best_step(model, training, direction)
    by_token = influence.influences(model, training, direction, step)
    spans = read_spans(config, training.stored)
    blamed = [row | {"influence": float(by_token[at].sum()), "influences": by_token[at]} for row, at in spans]
    chosen = _extremes(blamed, config.extremes)
    owners: dict[str, set[int]] = defaultdict(set)
    for row, at in spans:
        owners[row["rollout_id"]].add(int(training.stored.offsets.searchsorted(at.start, "right")) - 1)
    tasks = sorted({name for _, part in heldout for name in part.stored.names}) if chosen else []
    together = max(1, GRADIENT_BYTES // (4 * sum(value.numel() for _, value in direction)))
    parts = [chosen[at : at + together] for at in range(0, len(chosen), together)]
    stage, by_task = worker.stage("held-out tasks", len(tasks) * len(parts)), []
    for part in parts:
        gradients = {name: influence.gradient(model, [(1.0, training.only(owners[name]))]) for name in part}
        for task in tasks:
            of_task = influence.gradient(model, [(sign / length, rows.named(task)) for sign, rows in heldout])
            by_task += [
                {"task_id": task, "rollout_id": name, "influence": influence.along(each, of_task)}
                for name, each in gradients.items()
            ]
            stage.advance()
    for name, table in (("blame", blamed), ("blame_tasks", by_task)):
        pq.write_table(from_rows(name, [config.checkpoint | row for row in table]), worker.folder / f"{name}.parquet")
    most = torch.cuda.max_memory_allocated() / 1024 if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return BlameWorkerResult(
        exact=tuple(exact),
        measured=tuple(measured),
        tokens=len(training.stored.ids),
        seconds=time.monotonic() - began,
        memory_mb=int(most / 1024),
    )


def load(config: BlameWorkerConfig, device: str) -> tuple[Any, bool]:
    """Return the model, whose trained weights alone have gradients, and whether it can be trained on trees."""
    import torch
    from peft import PeftModel

    from etpi_resources.cuda import avoid_cudnn_attention
    from etpi_resources.trainers.workers.checkpointing import load_model
    from etpi_resources.trainers.workers.label_head import add_label_head
    from etpi_resources.trainers.workers.tree_attention import refuses_trees

    avoid_cudnn_attention()
    model: Any = load_model(config.model, torch.float32, device)
    trees = refuses_trees(model) is None
    add_label_head(model)
    if config.adapter is not None:
        model = PeftModel.from_pretrained(model, config.adapter, is_trainable=True)
    return model.eval(), trees


def read_spans(config: BlameWorkerConfig, stored: Sequences) -> list[tuple[dict[str, Any], slice]]:
    """Return the training rows, each with the place of its output among the stored tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ["dataset_row_id", "rollout_id", "agent_id", "turn"]
    columns = [*names, "split", "sequence_id", "span_start", "span_end"]
    table = pa.concat_tables([pq.read_table(file, columns=columns) for file in config.rows])
    begins = dict(zip(stored.names, stored.offsets.tolist(), strict=False))
    return [
        ({name: row[name] for name in names}, slice(begin + row["span_start"], begin + row["span_end"]))
        for row in table.to_pylist()
        if row["split"] == "train" and (begin := begins[row["sequence_id"]]) is not None
    ]


def best_step(model: Any, training: Rows, direction: Direction) -> tuple[float, list[float], list[float]]:
    """Return the relative step that agrees best with gradients of some sequences, and their influences by both."""
    from etpi_resources.trainers.workers import influence

    stored = training.stored
    numbers = list(range(0, len(stored), max(1, -(-len(stored) // COMPARED))))
    gradients = (influence.gradient(model, [(1.0, training.only([number]))]) for number in numbers)
    exact, rows, tried = [influence.along(each, direction) for each in gradients], training.only(numbers), []
    for step in influence.RELATIVE_STEPS:
        measured = stored.totals(influence.influences(model, rows, direction, step))[numbers].tolist()
        tried.append((max(abs(e - m) for e, m in zip(exact, measured, strict=True)), step, measured))
    _, step, measured = min(tried)
    return step, exact, measured


def _extremes(blamed: Sequence[dict[str, Any]], count: int) -> list[str]:
    """Return the rollouts with most harm (the sum of tokens below 0) and those with the highest influence."""
    harm, total = defaultdict[str, float](float), defaultdict[str, float](float)
    for row in blamed:
        harm[row["rollout_id"]] += float(row["influences"].clip(max=0).sum())
        total[row["rollout_id"]] -= row["influence"]
    return sorted({name for order in (harm, total) for name in sorted(order, key=order.__getitem__)[:count]})


if __name__ == "__main__":
    with open_worker(BlameWorkerConfig) as worker:
        worker.finish(run(worker))
