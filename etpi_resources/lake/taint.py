"""The walk from rollouts to all that rests on them: data sets, checkpoints, evaluations and reports.

The walk is `sql/views/tainted.sql`. Its roots are flipped verdicts, or the rollouts that `roots_of` finds by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import duckdb

from etpi_resources.lake.lake import Lake, LakeError

FLIPS = "flips"
"""The root that stands for every verdict that flipped and was not kept."""

ROOTS: Mapping[str, str] = {
    "rollout": "r.rollout_id", "task": "r.task_id", "teacher": "r.teacher", "repo": "r.repo", "sampler": "r.sampler",
    "set": "f.rollout_set", "importer": "f.spec ->> '$.format'",
    "blamed": "b.experiment", "licence": "coalesce(nullif(f.spec ->> '$.license', ''), t.payload ->> '$.license')",
}  # fmt: skip
"""Kind of a root, written `kind:value` -> what has its value in _ROLLOUTS; a licence is the set's, else the task's, and
`blamed:EXPERIMENT` the tenth of its training rollouts with most harm."""

_ROLLOUTS = """
    SELECT DISTINCT r.rollout_id FROM rollouts AS r
    LEFT JOIN rollout_sets AS f ON r.origin = 'set' AND r.made_for = f.rollout_set
    LEFT JOIN tasks AS t ON r.suite = t.suite AND r.task_id = t.task_id
    LEFT JOIN (
        SELECT experiment, rollout_id FROM blame_rollouts
        QUALIFY percent_rank() OVER (PARTITION BY experiment ORDER BY harm) < 0.1 AND harm < 0
    ) AS b ON r.rollout_id = b.rollout_id"""

KEPT = "kept_flips.jsonl"
"""The lake's file of the flips that `etpi taint --keep` accepted, a line each: rollout_id, judge, reason, at."""


def roots_of(connection: duckdb.DuckDBPyConnection, names: Sequence[str]) -> list[str] | None:
    """Return the rollouts that `kind:value` names, sorted; None for FLIPS alone.

    Raises:
        LakeError: an unknown kind, or no rollout has the value.
    """
    if list(names) == [FLIPS]:
        return None
    rollout_ids: set[str] = set()
    for name in names:
        kind, _, value = name.partition(":")
        if name == FLIPS:
            query, values = "SELECT DISTINCT rollout_id FROM flips WHERE kept IS NULL", []
        elif kind in ROOTS and value:
            query, values = f"{_ROLLOUTS} WHERE {ROOTS[kind]} = ?", [value]
        else:
            kinds = ", ".join([FLIPS, *(f"{kind}:VALUE" for kind in ROOTS)])
            raise LakeError(f"{name!r} is no root of a walk; there are {kinds}")
        rollouts = [row[0] for row in connection.execute(query, values).fetchall()]
        if not rollouts and name != FLIPS:
            raise LakeError(f"no rollout of the catalog has the {kind} {value!r}; `etpi sql` lists the view rollouts")
        rollout_ids.update(rollouts)
    return sorted(rollout_ids)


def walk(connection: duckdb.DuckDBPyConnection, roots: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of the view `tainted`, ordered, as dictionaries.

    Args:
        connection: to a catalog (`catalog.connect`, or `catalog.in_memory` without a file).
        roots: rollout ids; None: those whose verdict flipped since it was used, and was not kept.
    """
    if roots is None:
        connection.execute("RESET VARIABLE roots")
    else:
        connection.execute("SET VARIABLE roots = ?::VARCHAR[]", [list(roots)])
    order = "list_position(['dataset', 'checkpoint', 'evaluation', 'report'], kind), experiment, role, seed, step, name"
    rows = connection.sql(f"SELECT * FROM tainted ORDER BY {order}, via_checkpoint_id")
    return [dict(zip(rows.columns, row, strict=True)) for row in rows.fetchall()]


def keep(lake: Lake, flips: Sequence[Mapping[str, Any]], reason: str) -> None:
    """Accept flips (rows of the view `flips`) for a reason: they taint nothing from the next catalog on."""
    at = datetime.now(UTC).isoformat()
    lines = [
        {"rollout_id": flip["rollout_id"], "judge": flip["new_judge"], "reason": reason, "at": at} for flip in flips
    ]
    with (lake.root / KEPT).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def kept_flips(lake: Lake) -> list[dict[str, Any]]:
    """Return the accepted flips; the last reason for each."""
    file = lake.root / KEPT
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return list({(row["rollout_id"], row["judge"]): row for row in map(json.loads, lines)}.values())
