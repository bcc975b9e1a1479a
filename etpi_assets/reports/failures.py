"""The evaluation's failed rollouts, counted by kind, with the addresses of their lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from etpi_assets.reports.answer import REASONS
from etpi_assets.reports.queries import run_report
from etpi_resources.links import (
    REPORTED_VIEW,
    dataset_page,
    experiment_page,
    regressions_page,
    rollouts_page,
)

_ROLES = ("rl", "sft", "base")


@dataclass(frozen=True)
class FailureKind:
    """Failed rollouts of a checkpoint under a decoding with the same verdict and exit status.

    Attributes:
        of: how many rollouts of the checkpoint were evaluated under the decoding.
        reasons: the most frequent reasons, each with its count.
        link: the address of the list of these rollouts.
    """

    role: str
    decoding: str
    verdict: str
    exit_status: str
    count: int
    of: int
    reasons: Sequence[tuple[str, int]]
    link: str


def failures(rollouts: pa.Table, scores: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of sql/reports/failures.sql, the last trained checkpoint's first."""
    return run_report("failures.sql", {"rollouts": rollouts, "scores": scores}, {})


def kinds(rows: Sequence[Mapping[str, Any]], rollouts: pa.Table, experiment: str) -> list[FailureKind]:
    """Count failures by checkpoint, decoding, verdict and exit status, most frequent first within a checkpoint."""
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
    ordered = sorted(counts, key=lambda kind: (_ROLES.index(kind[0]), kind[1], -counts[kind], kind[2:]))
    return [
        FailureKind(
            role, decoding, verdict, exit_status, counts[kind], evaluated[role, decoding or None],
            sorted(((r, n) for r, n in reasons[kind].items() if r), key=lambda item: (-item[1], item[0]))[:3],
            REPORTED_VIEW + rollouts_page(
                made_for=experiment, origin="eval", role=role, decoding=decoding or None, verdict=verdict,
                exit=exit_status or None,
            ),
        )
        for kind in ordered
        for role, decoding, verdict, exit_status in [kind]
    ]  # fmt: skip


def links(experiment: str) -> dict[str, str]:
    """Return the addresses of an experiment's regressions, training data and page."""
    pages = {"regressions": regressions_page, "dataset": dataset_page, "experiment": experiment_page}
    return {name: REPORTED_VIEW + page(experiment) for name, page in pages.items()}


def _short(reason: str | None, most: int = 160) -> str:
    text = " ".join((reason or "").split())
    return text if len(text) <= most else text[: most - 1] + "…"
