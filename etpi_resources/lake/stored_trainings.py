"""Trainings stored in the lake under a key of all that they depend on, so that experiments share them.

The reports are in `checkpoints/trained/`, the weights in `checkpoints/`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etpi_resources.lake.files import write_atomically
from etpi_resources.lake.lake import Lake, folder_hash
from etpi_resources.process.locks import require_held


def train_once(
    lake: Lake,
    key: str,
    scratch: str,
    train: Callable[[Path], dict[str, Any]],
    *,
    passes: Callable[[dict[str, Any]], bool],
    adopt: Callable[[], None] = lambda: None,
    label: str,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Return the report stored under `key`; if there is none, train, and store the report if it passes.

    Another process that calls this with the same key waits.

    Args:
        scratch: the folder in the lake's scratch for `train`; its subfolder `key` is removed afterwards.
        train: folder -> the report (JSON), whose `checkpoints` name checkpoints in the lake.
        passes: whether a report is good enough to be stored.
        adopt: called first; it may put a report or a folder of `train` under the key.
        label: what is trained ("the tiny base"), for messages.
        log: reports a wait for another process, or that the training was stored before.
    Returns:
        The report, with `reused`.
    """
    stored = lake.root / "checkpoints" / "trained" / f"{key}.json"
    with lake.lock(f"training-{key}", log=log, what=label, doing="training"):
        adopt()
        if report := _load(lake, stored):
            log(f"{label}: trained before, nothing to do")
            return report | {"reused": True}
        folder = lake.scratch(f"{scratch}/{key}")
        report = train(folder)
        if passes(report):
            write_atomically(stored, json.dumps(report), check=require_held)
        shutil.rmtree(folder)
        return report | {"reused": False}


def move_checkpoint(lake: Lake, staging: Path, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Move a worker's checkpoint into the lake; return its entry with ids in place of folders."""
    adapter = folder_hash(staging / checkpoint["adapter"]) if checkpoint["adapter"] else None
    checkpoint_id, _ = lake.adopt_checkpoint(staging / checkpoint["folder"])
    row = {key: value for key, value in checkpoint.items() if key not in ("folder", "adapter")}
    return row | {"checkpoint_id": checkpoint_id, "adapter_hash": adapter}


def _load(lake: Lake, path: Path) -> dict[str, Any] | None:
    """Return the stored report; None if there is none, or a checkpoint that it names is missing."""
    if not path.exists():
        return None
    report = json.loads(path.read_text())
    missing = [c for c in report["checkpoints"] if not lake.checkpoint_dir(c["checkpoint_id"]).is_dir()]
    return None if missing else report
