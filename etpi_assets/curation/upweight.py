"""From pairs to weighted training rows: which pairs train, which validate, and how much each counts.

Belongs here: weights, the split by repository, the length limit. Does not belong here: the pairs, or their merging.

A row of weight w and a row repeated w times are the same full-dataset function, sum(w * nll) / sum(w). The weighted
form stores `weight` = w and `copies` = 1; the duplicating form `weight` = 1 and `copies` = w.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from etpi_assets.rollouts.tables import iter_prompts
from etpi_assets.specs.experiment import DatasetSection
from etpi_resources.schemas import from_rows


def weigh(pairs: pa.Table, section: DatasetSection, heldout_tasks: Collection[str] = ()) -> dict[str, pa.Table]:
    """{"dataset_rows", "dropped"}: a row a pair that trains or validates, and every other pair with the reason.

    Rows stand in the order of `pairs`; their sequence and span are null until `merge` sets them. Pairs of
    `section.heldout_repos` and of `heldout_tasks` never train. A pair longer than `section.max_length` is dropped,
    never cut.

    Raises:
        ValueError: the duplicating form with a factor that is no whole number.
    """
    if section.upweight_form == "duplicate" and section.upweight_factor != int(section.upweight_factor):
        raise ValueError(
            f'dataset.upweight_factor = {section.upweight_factor:g} cannot be repeated; use upweight_form = "weight"'
        )
    rows: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    prompts = iter_prompts(pairs)
    for pair, (_, prompt) in zip(pairs.to_pylist(), prompts, strict=True):
        facts = json.loads(pair["metadata"])
        key = {name: pair[name] for name in ("rollout_id", "agent_id", "turn")}
        length = pair["input_tokens"] + len(pair["output_ids"])
        reason = _fails(facts, length, section, heldout_tasks)
        if reason:
            dropped.append({"stage": "dataset", **key, "reason": reason[0], "detail": reason[1]})
            continue
        factor = section.upweight_factor if pair["turn"] in section.upweight_turns else 1.0
        repeated = section.upweight_form == "duplicate"
        weight, copies = (1.0, int(factor)) if repeated else (float(factor), 1)
        rows.append(
            {
                "dataset_row_id": _row_id(pair, prompt, weight, copies),
                "pair_id": pair["pair_id"],
                **key,
                **{name: facts.get(name) for name in ("task_id", "repo", "teacher")},
                "weight": weight,
                "copies": copies,
                "output_tokens": len(pair["output_ids"]),
            }
        )
    validate = validation_repos((row["repo"] for row in rows), section.val_fraction)
    for row in rows:
        row["split"] = "val" if row["repo"] in validate else "train"
    return {"dataset_rows": from_rows("dataset_rows", rows), "dropped": from_rows("dropped", dropped)}


def validation_repos(repos: Iterable[str | None], fraction: float) -> set[str | None]:
    """The repositories kept for validation: round(fraction * n) of them, never all, in an order that depends on their
    names alone."""
    names = sorted(set(repos), key=lambda repo: hashlib.sha256(str(repo).encode()).digest())
    return set(names[: min(len(names) - 1, round(fraction * len(names)))]) if names else set()


def _fails(
    facts: dict[str, Any], length: int, section: DatasetSection, heldout_tasks: Collection[str]
) -> tuple[str, str] | None:
    if facts.get("repo") in section.heldout_repos:
        return "heldout_repo", f"dataset.heldout_repos names {facts['repo']}"
    if facts.get("task_id") in heldout_tasks:
        return "heldout_task", f"{facts['task_id']} is of the suite's held-out split"
    if length > section.max_length:
        return "over_max_length", f"{length} ids, dataset.max_length = {section.max_length}"
    return None


def _row_id(pair: dict[str, Any], prompt: np.ndarray, weight: float, copies: int) -> str:
    """32 hex digits over where the row is from, its ids, and how it counts."""
    digest = hashlib.sha256(json.dumps([pair["pair_id"], len(prompt), weight, copies]).encode())
    digest.update(prompt.astype("<i4").tobytes())
    digest.update(np.asarray(pair["output_ids"], dtype="<i4").tobytes())
    return digest.hexdigest()[:32]
