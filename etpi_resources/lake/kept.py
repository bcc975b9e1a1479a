"""What was trained, in the lake's keeping, and found again by what it depends on.

Belongs here: training once what several ask for, moving a worker's checkpoints into the lake, and the records under
`checkpoints/trained/` by which experiments share them. Does not belong here: what a training depends on, or whether its
result is good enough to keep.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etpi_resources.lake.lake import Lake, folder_hash


def once(
    lake: Lake,
    key: str,
    place: str,
    make: Callable[[Path], dict[str, Any]],
    *,
    good: Callable[[dict[str, Any]], bool],
    what: str,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """The report of a training: the one kept under its key, else of a training now. Another process that asks for the
    same waits for it.

    Args:
        place: what the scratch folder that `make` works in is called, besides the key; it is removed afterwards.
        make: folder -> the report (JSON), whose `checkpoints` name what was adopted into the lake.
        good: whether a report is to be found again.
        what: what is trained, in words ("the tiny base"), for messages.
        log: told that another process trains it, or that it was trained before.
    Returns:
        The report with `reused`.
    """
    with lake.lock(f"training-{key}", log=log, what=what, doing="training"):
        if report := _find(lake, key):
            log(f"{what}: trained before, nothing to do")
            return report | {"reused": True}
        folder = lake.scratch(f"{place}/{key}")
        report = make(folder)
        if good(report):
            _keep(lake, key, report)
        shutil.rmtree(folder)
        return report | {"reused": False}


def adopt(lake: Lake, staging: Path, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Move a worker's checkpoint into the lake: its entry with `checkpoint_id` and `adapter_hash` for its folders."""
    adapter = folder_hash(staging / checkpoint["adapter"]) if checkpoint["adapter"] else None
    checkpoint_id, _ = lake.adopt_checkpoint(staging / checkpoint["folder"])
    row = {key: value for key, value in checkpoint.items() if key not in ("folder", "adapter")}
    return row | {"checkpoint_id": checkpoint_id, "adapter_hash": adapter}


def _find(lake: Lake, key: str) -> dict[str, Any] | None:
    """The report kept under a key, where every checkpoint it names still stands."""
    path = _path(lake, key)
    if not path.exists():
        return None
    report = json.loads(path.read_text())
    gone = [c for c in report["checkpoints"] if not lake.checkpoint_dir(c["checkpoint_id"]).is_dir()]
    return None if gone else report


def _keep(lake: Lake, key: str, report: Mapping[str, Any]) -> None:
    path = _path(lake, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(report))
    beside.replace(path)


def _path(lake: Lake, key: str) -> Path:
    return lake.root / "checkpoints" / "trained" / f"{key}.json"
