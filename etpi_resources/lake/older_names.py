"""Journals and trainings that etpi 0.2 stored under digests of its code: found again and moved to today's names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from etpi_resources.lake.files import write_atomically
from etpi_resources.lake.lake import Lake

_DIGEST = re.compile(r"[0-9a-f]{16}")


def older_codes(lake: Lake, asset: str) -> tuple[str, ...]:
    """Return the digests of code that the manifests of an asset name, those of current versions first."""
    manifests = [m for ref in lake.refs(asset) if (m := lake.current(ref))]
    manifests += [m for ref in lake.refs(asset) for m in reversed(lake.history(ref))]
    codes = [str(m.code.get("kept_root") or m.code.get("kept", "")) for m in manifests if "versions" not in m.code]
    return tuple(dict.fromkeys(filter(None, codes)))


def adopt(path: Path, folders: Iterable[Path] | None = None) -> None:
    """Rename the newest of the older paths to `path`, unless that exists.

    Args:
        folders: folders that may have a file of its name; by default the older paths are the folders beside it.
    """
    if path.exists():
        return
    beside = older_folders(path.parent) if folders is None else [folder / path.name for folder in folders]
    older = [p for p in beside if p.exists()]
    if older:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another process has just renamed it
            max(older, key=lambda p: p.stat().st_mtime).rename(path)


def older_folders(folder: Path) -> list[Path]:
    """Return the folders in `folder` that have names of etpi 0.2."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in entries if _DIGEST.fullmatch(path.name)]


def adopt_training(
    lake: Lake, key: str, scratch: str, older: Collection[str], config: Mapping[str, Any], same: Callable[[Path], bool]
) -> None:
    """Take over under `key` a training that was stored, or begun and interrupted, under an older key.

    Args:
        scratch: the folder in the lake's scratch where trainings of this kind work.
        older: keys of the training under older digests of the code.
        config: of its worker; an interrupted training with an unknown key has the same, and `same` is true for the
            folder of its rounds.
    """
    trained, rounds = lake.root / "checkpoints" / "trained", lake.root / "checkpoints" / "rounds"
    work = lake.root / "scratch" / scratch
    if (trained / f"{key}.json").exists() or (work / key).exists():
        return
    for report in (trained / f"{old}.json" for old in older):
        if report.exists():
            write_atomically(trained / f"{key}.json", report.read_text())
            return
    for begun in older_folders(work):
        if begun.name in older or (_agrees(begun / "config.json", config) and same(rounds / begun.name)):
            if (rounds / begun.name).exists():
                (rounds / begun.name).rename(rounds / key)
            begun.rename(work / key)
            return


def _agrees(file: Path, config: Mapping[str, Any]) -> bool:
    """Return whether a stored configuration has the values of `config` in all keys that both have."""
    try:
        return _equal(json.loads(file.read_text()), config)
    except (OSError, ValueError):
        return False


def _equal(was: Any, now: Any) -> bool:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        return all(_equal(was[name], now[name]) for name in was.keys() & now.keys())
    return was == now
