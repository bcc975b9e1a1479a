"""Compare lakes: the functions of bench/kill.py, which say how two lakes differ and whether one is damaged."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.parquet import read
from etpi_resources.trainers.workers.states import COMPLETE_MARK

_BENCH = Path(__file__).resolve().parents[2] / "bench"


def _kill():
    sys.path.insert(0, str(_BENCH))
    try:
        return importlib.import_module("kill")
    finally:
        sys.path.remove(str(_BENCH))


def differences(reference: Path, lake: Path) -> list[str]:
    """Return how the current versions of two lakes differ, times excepted."""
    return list(_kill().differences(reference, lake))


def damages(lake: Path) -> list[str]:
    """Return what is damaged in a lake, and files of unfinished work."""
    return [*_kill().faults(lake), *_kill().unfinished(lake)]


def journaled(lake: Path, set_name: str) -> dict[str, str]:
    """Return {rollout id: its start} of a set's journals; a last line that is being written is left out. The same
    attempts have the same ids in another set."""
    started = {}
    for journal in (lake / "scratch" / "rollouts" / set_name).rglob("journal-*.jsonl"):
        for line in journal.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                row = json.loads(line)
                started[row["key"]] = str(row["rows"]["rollouts"][0]["started_at"])
    return started


def rollouts(lake: Path, set_name: str) -> dict[str, str]:
    """Return {rollout id: its start} of the current version of a rollout set. AssertionError: an id is there twice."""
    opened = Lake(lake)
    manifest = opened.current(Ref("raw_rollouts", "rollout_set", set_name))
    assert manifest is not None, set_name
    rows = read("rollouts", opened.files_of(manifest, "rollouts"))
    ids = rows.column("rollout_id").to_pylist()
    assert len(ids) == len(set(ids)), "a rollout is there twice"
    return dict(zip(ids, map(str, rows.column("started_at").to_pylist()), strict=True))


def training_states(lake: Path) -> list[Path]:
    """Return the complete states of trainings that have not ended."""
    return list((lake / "scratch" / "train").rglob(COMPLETE_MARK))


def hashes(lake: Path) -> dict[str, str]:
    """Return {asset and key: data version} of all current versions."""
    opened = Lake(lake)
    return {str(ref): manifest.version for ref in opened.refs() if (manifest := opened.current(ref))}
