"""What was trained, in the lake's keeping, and found again by what it depends on.

Belongs here: moving a worker's checkpoints into the lake, and the records under `checkpoints/trained/` by which
experiments that ask for the same training share it. Does not belong here: what a training depends on, or whether its
result is good enough to keep.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from etpi_resources.lake import Lake, folder_hash


def find(lake: Lake, key: str) -> dict[str, Any] | None:
    """The report kept under a key, where every checkpoint it names still stands."""
    path = _path(lake, key)
    if not path.exists():
        return None
    report = json.loads(path.read_text())
    gone = [c for c in report["checkpoints"] if not lake.checkpoint_dir(c["checkpoint_id"]).is_dir()]
    return None if gone else report


def alone(lake: Lake, key: str, log: Callable[[str], None]) -> AbstractContextManager[None]:
    """Held from the look for a report until it is kept: another process that asks for the same waits for it."""
    return lake.lock(f"training-{key}", log=log)


def keep(lake: Lake, key: str, report: Mapping[str, Any]) -> None:
    """Keep a report (JSON) whose `checkpoints` name what was adopted into the lake."""
    path = _path(lake, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(report))
    beside.replace(path)


def adopt(lake: Lake, staging: Path, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Move a worker's checkpoint into the lake: its entry with `checkpoint_id` and `adapter_hash` for its folders."""
    adapter = folder_hash(staging / checkpoint["adapter"]) if checkpoint["adapter"] else None
    checkpoint_id, _ = lake.adopt_checkpoint(staging / checkpoint["folder"])
    row = {key: value for key, value in checkpoint.items() if key not in ("folder", "adapter")}
    return row | {"checkpoint_id": checkpoint_id, "adapter_hash": adapter}


def _path(lake: Lake, key: str) -> Path:
    return lake.root / "checkpoints" / "trained" / f"{key}.json"
