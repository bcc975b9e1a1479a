"""What was trained before, found again by what it depends on.

Belongs here: the records under `checkpoints/trained/` of a lake, by which experiments that ask for the same training
share it. Does not belong here: what a training depends on, or whether its result is good enough to keep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etpi_resources.lake import Lake


def find(lake: Lake, key: str) -> dict[str, Any] | None:
    """The report kept under a key, where every checkpoint it names still stands."""
    path = _path(lake, key)
    if not path.exists():
        return None
    report = json.loads(path.read_text())
    gone = [c for c in report["checkpoints"] if not lake.checkpoint_dir(c["checkpoint_id"]).is_dir()]
    return None if gone else report


def keep(lake: Lake, key: str, report: Mapping[str, Any]) -> None:
    """Keep a report (JSON) whose `checkpoints` name what was adopted into the lake."""
    path = _path(lake, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(report))
    beside.replace(path)


def _path(lake: Lake, key: str) -> Path:
    return lake.root / "checkpoints" / "trained" / f"{key}.json"
