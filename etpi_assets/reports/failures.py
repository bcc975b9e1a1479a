"""The evaluation's failed rollouts, counted by kind, with the addresses of their lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from etpi_assets.reports.answer import REASONS
from etpi_resources.links import (
    REPORTED_VIEW,
    dataset_page,
    experiment_page,
    regressions_page,
    rollouts_page,
)

_ROLES = ("rl", "sft", "base")


def kinds(rows: Sequence[Mapping[str, Any]], rollouts: pa.Table, experiment: str) -> list[dict[str, Any]]:
    """Count failures by checkpoint, decoding, verdict and exit status, most frequent first within a checkpoint.

    Args:
        rows: those of sql/reports/failures.sql.

    Returns:
        role, decoding, verdict, exit_status, count; `of`: rollouts of the checkpoint under the decoding; reasons: the
        most frequent, each with its count; link: the address of the list of these rollouts.
    """
    evaluated = Counter(
        zip(rollouts["checkpoint_role"].to_pylist(), rollouts["decoding"].to_pylist(), strict=True)
    )  # fmt: skip
    counts: Counter[tuple[str, ...]] = Counter()
    reasons: dict[tuple[str, ...], Counter[str]] = {}
    for row in rows:
        verdict = "infrastructure" if row["infrastructure"] else row["verdict"]
        kind = (row["checkpoint_role"], row["decoding"] or "", verdict, row["exit_status"] or "")
        counts[kind] += 1
        reasons.setdefault(kind, Counter())[_short(row["reason"] or REASONS.get(verdict))] += 1
    failed = []
    for kind in sorted(counts, key=lambda kind: (_ROLES.index(kind[0]), kind[1], -counts[kind], kind[2:])):
        role, decoding, verdict, exit_status = kind
        stated = [(reason, n) for reason, n in reasons[kind].items() if reason]
        chosen = {"role": role, "decoding": decoding or None, "verdict": verdict, "exit": exit_status or None}
        failed.append(
            {
                "role": role, "decoding": decoding, "verdict": verdict, "exit_status": exit_status,
                "count": counts[kind], "of": evaluated[role, decoding or None],
                "reasons": sorted(stated, key=lambda item: (-item[1], item[0]))[:3],
                "link": REPORTED_VIEW + rollouts_page(made_for=experiment, origin="eval", **chosen),
            }
        )  # fmt: skip
    return failed


def links(experiment: str) -> dict[str, str]:
    """Return the addresses of an experiment's regressions, training data and page."""
    pages = {"regressions": regressions_page, "dataset": dataset_page, "experiment": experiment_page}
    return {name: REPORTED_VIEW + page(experiment) for name, page in pages.items()}


def _short(reason: str | None, most: int = 160) -> str:
    text = " ".join((reason or "").split())
    return text if len(text) <= most else text[: most - 1] + "…"
