"""Build a tiny base from a spec's `base.tiny`: a corpus of templated conversations, and a model pretrained on it.

etpi contains the pretrained bases of the shipped experiments (`shipped`). A base has habits for fine-tuning to change:
in `coop_tiny` the agent starts with bash and rarely plans first, in `repo_fix_tiny` it thinks at length.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etpi_assets.specs.rollout_set import TinySection
from etpi_assets.tiny_bases import shipped as shipped_bases
from etpi_assets.worlds.arithmetic_tiny import conversations as arithmetic_tiny
from etpi_assets.worlds.coop_tiny import conversations as coop_tiny
from etpi_assets.worlds.coop_tiny_shared import conversations as coop_tiny_shared
from etpi_assets.worlds.repo_fix_tiny import conversations as repo_fix_tiny
from etpi_resources.chat.format import ChatFormat
from etpi_resources.hashes import json_hash
from etpi_resources.lake import stored_trainings
from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.schemas import TABLES
from etpi_resources.prefix_tree import CHAIN
from etpi_resources.trainers.contracts import BaseWorkerConfig, BaseWorkerResult
from etpi_resources.trainers.pipes import run_worker

WORKER = "etpi_resources.trainers.workers.base_worker"
TRAINED = "base_learnt"
RECIPE_UNCHANGED = "base_recipe_unchanged"
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


def build(
    lake: Lake,
    section: TinySection,
    chat: ChatFormat,
    code: str,
    *,
    context: Any = None,
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Return the shipped base for this section, vocabulary and template, or else an earlier build of it, or train it.

    Args:
        code: version of the code that writes the corpus and trains the model.
        context, echo: as for `run_worker`.
    Returns:
        The worker's report (see `base_worker.run`) with `checkpoint_id` and `reused`; `seconds` is the time of this
        call.
    Raises:
        LakeError: the shipped weights are damaged.
        WorkerFailed: the trainer failed; the message has its last lines.
    """

    if (recipe := shipped_bases.find(section, chat)) is not None:
        checkpoint = shipped_bases.adopt(recipe, lake, chat)
        echo(f"tiny base of {section.world}: shipped with etpi ({recipe.folder.name}), nothing to train")
        return recipe.model_dump(mode="json") | {"checkpoint_id": checkpoint, "reused": True, "seconds": 0.0}

    def pretrain(folder: Path) -> dict[str, Any]:
        shutil.rmtree(folder)
        result = run_worker(
            WORKER, prepare(section, chat, folder), folder, BaseWorkerResult, context=context, echo=echo
        )
        checkpoint, _ = lake.adopt_checkpoint(folder / result.folder)
        ids = {"checkpoint_id": checkpoint, "checkpoints": [{"checkpoint_id": checkpoint}]}
        return result.model_dump(mode="json") | ids

    return stored_trainings.train_once(
        lake,
        _key(section, chat, code),
        "base",
        pretrain,
        passes=lambda report: check_trained(report).passed,
        label="the tiny base",
        log=echo,
    )


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


def recipe_unchanged(section: TinySection, chat: ChatFormat) -> CheckOutcome:
    """Warn if a shipped base was trained with an older recipe. The base is used anyway."""
    recipe = shipped_bases.find(section, chat)
    part = shipped_bases.changed(recipe, corpus_rows(section, chat)) if recipe else None
    if recipe is None:
        message = "built here with the current recipe"
    elif part is None:
        message = f"{recipe.folder.name} was trained with the current recipe"
    else:
        message = (
            f"{recipe.folder.name} was trained before {part} changed and is used anyway; rebuild it with "
            f"`{shipped_bases.REBUILD}`"
        )
    return CheckOutcome(RECIPE_UNCHANGED, passed=part is None, message=message, blocking=False)


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


def _key(section: TinySection, chat: ChatFormat, code: str) -> str:
    vocabulary, template = shipped_bases.format_hashes(chat)
    depends = {
        "section": section.model_dump(mode="json"),
        "vocabulary": vocabulary,
        "template": template,
        "code": code,
    }
    return json_hash(depends)
